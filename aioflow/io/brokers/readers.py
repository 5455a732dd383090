"""The base classes of readers.

`BufferedReader` is for streams that deliver data on their own: one task fills a bounded buffer, and
`poll_batch` empties it. Invariant: the task waits while the buffer is full, so a reader never holds
more than its capacity and one element. Every element is in exactly one polled batch, together with
the position after it.

`ReadAhead` is a task that reads ahead of the polls: it starts with the reader, waits while enough
is buffered, and ends with `close`. It reads files in the executor, one call at a time. A running
call continues when the task is cancelled, and `close` waits for it. If the task fails, the polls
first return the data that it has read, and then raise its error. The reader, not the `ReadAhead`,
holds the data.

`StreamReader` is for external logs, such as Kafka topics. Messages arrive in chunks, each of one
split, and are decoded when they are polled. A subclass defines `run`, one task that reads all
splits concurrently from their positions and awaits `put` for each chunk. Invariants: the task waits
while the buffer is full, so a reader never holds more than its capacity and one chunk. Decoding
never waits: `put` fetches the schemas of a chunk before it adds the chunk to the buffer. A
malformed message is reported only after all messages before it have been polled, so it also counts
exactly once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, TypeVarTuple

from aioflow.core.aio import cancel_and_wait, wait_all
from aioflow.core.user_code import check_own_task, close_user_code, user_error
from aioflow.io.arguments import MALFORMED, Malformed
from aioflow.operators.source import BaseReader

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from aioflow.core.host import Host
    from aioflow.io.arguments import OnError
    from aioflow.operators.source import SourceContext, Split

__all__ = [
    "BUFFER_RECORDS",
    "AcknowledgingReader",
    "BufferedReader",
    "GroupReader",
    "Message",
    "ReadAhead",
    "StreamReader",
    "say_at_most_once",
]

logger = logging.getLogger(__name__)

BUFFER_RECORDS = 4096
"""Capacity of the buffer in elements. The buffer holds two of the largest batches, so that one is
filled while the other is processed.
"""


class BufferedReader(BaseReader[Any]):
    """A reader of one split. A subclass defines `run`, which reads until the stream ends and awaits
    `put` for each element.

    `run` is one asyncio task from beginning to end, so it may keep timeouts, task groups and
    connections open across elements.
    """

    at_most_once = ""
    """Reason why the peer cannot send elements again, as part of a warning that is logged once a
    run. Empty if the peer can send them again.
    """

    def __init__(self, ctx: SourceContext, *, capacity: int = BUFFER_RECORDS) -> None:
        self.ctx = ctx
        self._capacity = capacity
        # Parallel lists. `_positions` stays empty if the stream has no positions.
        self._values: list[Any] = []
        self._positions: list[Any] = []
        self._split: Split | None = None
        self._position: Any = None
        self._pump: asyncio.Task[None] | None = None
        self._ended = True
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    async def run(self, split: Split) -> None:
        """Reads `split` from its position to the end of the stream.

        If this method raises an error, `poll_batch` raises it.
        """
        raise TypeError(f"{type(self).__name__} must define run(self, split)")

    async def put(self, value: Any, position: Any = None) -> None:
        """Adds one element to the buffer, then waits while the buffer is full.

        Either all elements have positions or none has.
        """
        self.add(value, position)
        while len(self._values) >= self._capacity:
            await self.room()

    def add(self, value: Any, position: Any = None) -> None:
        """Adds one element to the buffer without waiting; the caller has checked that there is
        room.
        """
        if position is not None:
            self._positions.append(position)
        self._values.append(value)
        if self._waiter is not None:
            self.wake()

    async def room(self) -> None:
        """Waits until a poll leaves the buffer at most half full."""
        if self._room is None:
            self._room = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._room)

    def wake(self) -> None:
        """Makes a running call of `wait` return."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def open(self, splits: Sequence[Split]) -> None:
        if not splits:
            return
        assert self._split is None and len(splits) == 1, "the stream has one split"
        self._split = splits[0]
        self._position = splits[0].position
        self._ended = False
        if self.at_most_once and self.ctx.replays and self.ctx.runtime.attempt == 0:
            say_at_most_once(self.ctx, self.at_most_once)
        # Owned by this reader: close() cancels it and waits for its end.
        self._pump = asyncio.get_running_loop().create_task(
            self._guarded(splits[0]), name=f"{type(self).__name__}-{splits[0].id}"
        )

    async def _guarded(self, split: Split) -> None:
        try:
            await self.run(split)
            check_own_task()
        # poll_batch raises this error after it has returned all elements before it.
        except BaseException as error:  # noqa: BLE001
            self._error = user_error(error)
        finally:
            self._ended = True
            self.wake()

    def poll_batch(self, max_records: int) -> list[Any] | None:
        values = self._values
        # Slice and delete rather than swap: another thread may be appending to this very list.
        batch = values[:max_records]
        if not batch:
            if self._error is not None:
                raise self._error
            return None
        taken = len(batch)
        del values[:taken]
        if self._positions:
            self._position = self._positions[taken - 1]
            del self._positions[:taken]
        if len(values) <= self._capacity // 2:
            self.on_room()
        return batch

    def on_room(self) -> None:
        """Called when the buffer is at most half full. Lets the task that fills the buffer
        continue.
        """
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    async def wait(self) -> None:
        if self._values or self._ended:
            return
        if self._waiter is None:
            self._waiter = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._waiter)

    @property
    def finished(self) -> bool:
        return self._ended and not self._values and self._error is None

    def position(self, split_id: str) -> Any:
        return self._position

    async def close(self) -> None:
        pump, self._pump = self._pump, None
        if pump is not None:
            try:
                await self.ctx.end(pump)
            except asyncio.CancelledError:  # Closing took longer than its time limit.
                close_user_code(pump)
                raise


def say_at_most_once(ctx: SourceContext, what: str) -> None:
    """Logs a warning that a restart loses the elements that no checkpoint covers.

    `what` is the part of the message that gives the reason. Readers call this function once a run.
    """
    logger.warning(
        "source of %s: %s, so after a restart elements that no checkpoint covers are lost (at "
        "most once)",
        ctx.runtime.task_name,
        what,
    )


T = TypeVar("T")
Args = TypeVarTuple("Args")


class ReadAhead:
    """Owns a task that reads ahead; `name` is the name of the task."""

    def __init__(self, host: Host, name: str) -> None:
        self.error: BaseException | None = None
        """The error that ended the task."""
        self._host = host
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._reading: asyncio.Future[Any] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the task may still add data."""
        return self._task is not None and not self._task.done()

    def start(self, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Starts a task that runs `read()`, unless one is running."""
        if not self.is_running:
            # Owned by this object: close() cancels it and waits for its end.
            self._task = asyncio.get_running_loop().create_task(
                self._guarded(read), name=self._name
            )

    async def _guarded(self, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await read()
            check_own_task()
        # A later poll raises this error, once all data before it was polled.
        except BaseException as error:  # noqa: BLE001
            self.error = user_error(error)
        finally:
            self._wake()

    # Methods that the task calls.

    async def blocking(self, call: Callable[[*Args], T], *args: *Args) -> T:
        """Returns the result of `call(*args)`, a blocking read that runs in the executor."""
        reading = self._reading = self._host.blocking(call, *args)
        # Shielded, because a running read continues after a cancellation, and close() waits for it.
        return await asyncio.shield(reading)

    async def added(self, is_full: Callable[[], bool]) -> None:
        """Wakes the waiting poll after data was added. Returns when `is_full()` is false."""
        self._wake()
        while is_full():
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    # Methods that the reader calls.

    def taken(self) -> None:
        """Wakes the task that waits in `added`, because a poll has taken data from the buffer."""
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    async def wait(self) -> None:
        """Waits until data is added, or until no further data can come."""
        if not self.is_running:
            return
        if self._waiter is None:
            self._waiter = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._waiter)

    async def close(self) -> None:
        """Cancels the task, and waits for its running read."""
        task, self._task = self._task, None
        if task is not None:
            await cancel_and_wait([task])
        if self._reading is not None:
            await wait_all([self._reading])
            if not self._reading.cancelled():
                self._reading.exception()  # Otherwise asyncio logs the error as never retrieved.

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


TELL_TIMEOUT_S = 5.0
"""Maximum time that `close` waits for the server to accept the last positions of the group."""


class Message(NamedTuple):
    """One message of a log, as received."""

    content: Any
    """The content that `decode` converts to an element."""
    position: Any
    """The position of the split after this message."""
    timestamp: int
    """Time at which the log stored the message, in ms since 1970."""
    where: str
    """A description of the message, for error messages."""


@dataclass(slots=True)
class _Chunk:
    split_id: str
    messages: Sequence[Message]
    last: bool
    next: int = 0


class StreamReader(BaseReader[Any]):
    """A reader of several splits of a log at once.

    The `timestamps` of a batch are the times that the log has stored with the messages.
    """

    def __init__(
        self,
        ctx: SourceContext,
        decode: Callable[[Any], Any],
        on_error: OnError,
        *,
        prepare: Callable[[Sequence[Message]], Awaitable[None]] | None = None,
        capacity: int = BUFFER_RECORDS,
    ) -> None:
        self.ctx = ctx
        self.current_split = ""
        self.timestamps: list[int] | None = None
        self.finished_splits: set[str] = set()
        self.splits: dict[str, Split] = {}
        """The splits that were assigned so far. `run` looks here repeatedly, because splits may be
        added.
        """
        self._decode = decode
        self._prepare = prepare
        """Fetches the data that decoding needs, such as schemas."""
        self._malformed = Malformed(ctx, on_error)
        self._capacity = capacity
        self._positions: dict[str, Any] = {}
        self._chunks: deque[_Chunk] = deque()
        self._buffered = 0
        self.held: frozenset[str] = frozenset()
        """Splits that are paused: their messages are not polled now, and do not count as buffered.

        A subclass with `holds_splits` stops putting messages of these splits into the buffer.
        """
        self._pump = ReadAhead(ctx.host, type(self).__name__)

    async def run(self) -> None:
        """Reads all of `splits` from their positions. Returns when all were read to their end.

        If this method raises an error, `poll_batch` raises it.
        """
        raise TypeError(f"{type(self).__name__} must define run(self)")

    def content_of(self, content: Any) -> bytes:
        """Returns the bytes of a message that cannot be decoded, for the side output."""
        return bytes(content)

    async def put(self, split_id: str, messages: Sequence[Message], *, last: bool = False) -> None:
        """Adds the next messages of a split to the buffer, then waits while the buffer is full.

        `last` means that the split has been read to its end.
        """
        if self._prepare is not None and messages:
            await self._prepare(messages)
        self._chunks.append(_Chunk(split_id, messages, last))
        if split_id not in self.held:
            self._buffered += len(messages)
        await self._pump.added(lambda: self._buffered >= self._capacity)

    async def open(self, splits: Sequence[Split]) -> None:
        begins = not self.splits
        for split in splits:
            self.splits[split.id] = split
            self._positions[split.id] = split.position
        if begins and splits:  # The running task finds the splits that are added later.
            self._pump.start(self.run)

    def poll_batch(self, max_records: int) -> list[Any] | None:
        while self._chunks:
            chunk = self._chunks[0]
            if self.held and chunk.split_id in self.held:
                others = (one for one in self._chunks if one.split_id not in self.held)
                if (chunk := next(others, chunk)).split_id in self.held:
                    break
            values = self._take(chunk, max_records)
            if chunk.next == len(chunk.messages):
                # Fast: the chunk is the first of its split, so it is near the front.
                self._chunks.remove(chunk)
                if chunk.last:
                    self.finished_splits.add(chunk.split_id)
            if values:
                self.current_split = chunk.split_id
                return values
        if self._pump.error is not None:
            raise self._pump.error
        return None

    def _take(self, chunk: _Chunk, max_records: int) -> list[Any]:
        values: list[Any] = []
        timestamps: list[int] = []
        start, end = chunk.next, min(chunk.next + max_records, len(chunk.messages))
        decode, messages = self._decode, chunk.messages
        for i in range(start, end):
            message = messages[i]
            try:
                values.append(decode(message.content))
            except MALFORMED as error:
                if self._malformed.fails and values:
                    end = i  # The good messages are emitted before the error is raised.
                    break
                self._malformed.report(
                    self.content_of(message.content), f"{message.where}: {error}", error
                )
            else:
                timestamps.append(message.timestamp)
        if end > start:
            self._positions[chunk.split_id] = messages[end - 1].position
        chunk.next = end
        self._buffered -= end - start
        if self._buffered <= self._capacity // 2:
            self._pump.taken()
        self.timestamps = timestamps
        return values

    def hold(self, splits: Collection[str]) -> None:
        self.held = frozenset(splits)
        left = (one for one in self._chunks if one.split_id not in self.held)
        self._buffered = sum(len(one.messages) - one.next for one in left)
        self._pump.taken()

    async def wait(self) -> None:
        if all(one.split_id in self.held for one in self._chunks):
            await self._pump.wait()

    @property
    def pending_records(self) -> int:
        """Number of received messages that were not polled yet.

        Subclasses that know the length of the log add the messages that were not received yet.
        """
        return self._buffered

    @property
    def finished(self) -> bool:
        return not self._pump.is_running and not self._chunks and self._pump.error is None

    def position(self, split_id: str) -> Any:
        return self._positions[split_id]

    async def close(self) -> None:
        await self._pump.close()


class AcknowledgingReader(StreamReader):
    """A reader of a queue, whose server sends a message again until it is acknowledged.

    A message is acknowledged once a completed checkpoint covers it, or when it is polled if the job
    takes no checkpoints. The position of a message is its receipt, which is passed to
    `acknowledge`. Checkpoints contain no position, because the server knows which messages are not
    acknowledged.
    """

    acknowledges_polled = False
    """Whether messages are acknowledged when they are polled, even in a job with checkpoints."""

    def __init__(
        self,
        ctx: SourceContext,
        decode: Callable[[Any], Any],
        on_error: OnError,
        *,
        prepare: Callable[[Sequence[Message]], Awaitable[None]] | None = None,
        capacity: int,
    ) -> None:
        super().__init__(ctx, decode, on_error, prepare=prepare, capacity=capacity)
        self._polled: list[Any] = []
        """Receipts of the polled messages that no checkpoint covers yet, in order."""
        self._covered: dict[int, list[Any]] = {}
        """Maps a checkpoint id to the receipts of the messages polled since the checkpoint before
        it.
        """

    def acknowledge(self, receipts: list[Any]) -> None:
        """Acknowledges the messages of `receipts`, in the order in which they were polled. Never
        blocks.
        """
        raise TypeError(f"{type(self).__name__} must define acknowledge(self, receipts)")

    def forget_unpolled(self) -> None:
        """Drops the buffered messages that were not polled. The server sends them again."""
        self._chunks.clear()
        self._buffered = 0

    def _take(self, chunk: _Chunk, max_records: int) -> list[Any]:
        first = chunk.next
        values = super()._take(chunk, max_records)
        self._polled += [message.position for message in chunk.messages[first : chunk.next]]
        if self.acknowledges_polled or not self.ctx.checkpointing:
            receipts, self._polled = self._polled, []
            self.acknowledge(receipts)
        return values

    def position(self, split_id: str) -> Any:
        return None

    def checkpoint(self, checkpoint_id: int) -> None:
        if self._polled:
            self._covered[checkpoint_id], self._polled = self._polled, []

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        for id_ in sorted(id_ for id_ in self._covered if id_ <= checkpoint_id):
            self.acknowledge(self._covered.pop(id_))


class GroupReader(StreamReader):
    """A reader that commits the positions of completed checkpoints to a consumer group of the log.

    A subclass commits the positions in `untold` when it has a connection.
    """

    def __init__(
        self,
        ctx: SourceContext,
        decode: Callable[[Any], Any],
        on_error: OnError,
        group: str | None,
        *,
        prepare: Callable[[Sequence[Message]], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(ctx, decode, on_error, prepare=prepare)
        self._group = group
        self._taken: dict[int, dict[str, Any]] = {}
        """Maps a checkpoint id to the position of each split at the checkpoint's barrier."""
        self.untold: dict[str, Any] = {}
        """Positions of the splits in the last completed checkpoint, until they are committed to the
        group.
        """

    async def tell_at_end(self) -> None:
        """Commits the positions in `untold` to the group over a new connection. Called when the
        reader closes.
        """
        raise TypeError(f"{type(self).__name__} must define tell_at_end(self)")

    def checkpoint(self, checkpoint_id: int) -> None:
        if self._group is not None:
            self._taken[checkpoint_id] = dict(self._positions)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        for id_ in [id_ for id_ in self._taken if id_ <= checkpoint_id]:
            self.untold = self._taken.pop(id_)

    async def close(self) -> None:
        await super().close()
        if not self.untold:
            return
        try:
            async with asyncio.timeout(TELL_TIMEOUT_S):
                await self.tell_at_end()
        # The group is only for monitoring: the job does not depend on it.
        except Exception as error:  # noqa: BLE001
            logger.warning(
                "the last position of the group %r could not be published: %r", self._group, error
            )
