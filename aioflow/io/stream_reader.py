"""The base classes of readers of external logs, such as Kafka topics. Messages arrive in chunks of
a split, and are decoded when they are polled.

A subclass defines `run`, one task that reads all splits side by side from their positions and
awaits `put` for each chunk.

Invariants: the task waits while the buffer is full, so a reader never holds more than its capacity
and one chunk. A malformed message is reported exactly when those before it have been polled, so it
also counts exactly once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from aioflow.io.buffered import BUFFER_RECORDS
from aioflow.io.malformed import MALFORMED, Malformed
from aioflow.io.read_ahead import ReadAhead
from aioflow.operators.source import BaseReader

if TYPE_CHECKING:
    from aioflow.io.malformed import OnError
    from aioflow.operators.source import SourceContext, Split

__all__ = ["GroupReader", "Message", "StreamReader"]

TELL_TIMEOUT_S = 5.0
"""Maximum time that a closing reader waits for a server to accept its last positions."""

logger = logging.getLogger(__name__)


class Message(NamedTuple):
    """One message of a log, as received."""

    content: Any
    """The content that `decode` converts to an element."""
    position: Any
    """The position after the message."""
    timestamp: int
    """Time when the log stored the message, in milliseconds."""
    where: str
    """Name of the message in an error."""


@dataclass(slots=True)
class _Chunk:
    split_id: str
    messages: Sequence[Message]
    last: bool
    next: int = 0


class StreamReader(BaseReader[Any]):
    """A reader of several splits of a log, side by side.

    `timestamps` of a batch are the timestamps of its messages in the log.
    """

    def __init__(
        self,
        ctx: SourceContext,
        decode: Callable[[Any], Any],
        on_error: OnError,
        *,
        capacity: int = BUFFER_RECORDS,
    ) -> None:
        self.ctx = ctx
        self.current_split = ""
        self.timestamps: list[int] | None = None
        self.finished_splits: set[str] = set()
        self.splits: dict[str, Split] = {}
        """The splits that were assigned so far. `run` checks it repeatedly, because splits may be
        added.
        """
        self._decode = decode
        self._malformed = Malformed(ctx, on_error)
        self._capacity = capacity
        self._positions: dict[str, Any] = {}
        self._chunks: deque[_Chunk] = deque()
        self._buffered = 0
        self._pump = ReadAhead(ctx.host, type(self).__name__)

    async def run(self) -> None:
        """Reads all of `splits` from their positions. Returns when all were read to their end.

        `poll_batch` raises the error of this method.
        """
        raise TypeError(f"{type(self).__name__} must define run(self)")

    def content_of(self, content: Any) -> bytes:
        """Returns the bytes of a message that cannot be decoded, for the side output."""
        return bytes(content)

    async def put(self, split_id: str, messages: Sequence[Message], *, last: bool = False) -> None:
        """Adds the next messages of a split to the buffer, then waits while the buffer is full.

        `last` means that the split has been read to its end.
        """
        self._chunks.append(_Chunk(split_id, messages, last))
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
            values = self._take(chunk, max_records)
            if chunk.next == len(chunk.messages):
                self._chunks.popleft()
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

    async def wait(self) -> None:
        if not self._chunks:
            await self._pump.wait()

    @property
    def pending_records(self) -> int:
        """Number of received messages that were not polled yet.

        Subclasses that know the length of the log add the remaining messages.
        """
        return self._buffered

    @property
    def finished(self) -> bool:
        return not self._pump.is_running and not self._chunks and self._pump.error is None

    def position(self, split_id: str) -> Any:
        return self._positions[split_id]

    async def close(self) -> None:
        await self._pump.close()


class GroupReader(StreamReader):
    """A reader that commits the positions of completed checkpoints to a consumer group of the log.

    A subclass commits the positions in `untold` when it has a connection.
    """

    def __init__(
        self, ctx: SourceContext, decode: Callable[[Any], Any], on_error: OnError, group: str | None
    ) -> None:
        super().__init__(ctx, decode, on_error)
        self._group = group
        self._taken: dict[int, dict[str, Any]] = {}
        """Checkpoint -> its positions."""
        self.untold: dict[str, Any] = {}
        """Positions of the last completed checkpoint that were not committed to the group yet."""

    async def tell_at_end(self) -> None:
        """Commits the positions in `untold` to the group when the reader closes, over a new
        connection.
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
                "the group %r was not told how far it is read at the end: %r", self._group, error
            )
