"""The common parts of the readers of changes: a buffer of changes, and the position of the reader.
A position may be within a transaction or a snapshot.

A place is an integer that stands for a point in the server's log. Later points have larger places.
A position is None at the beginning, and otherwise a list:

    ["snapshot", start, ranges, table, key, as_of]   a row of the snapshot was read
        `start` is the place where the changes begin, and `as_of` the place of this snapshot. `key`
        has the texts of the row's key. `ranges` are the ranges that were read before.
    ["log", end, commit, count, ranges]              all transactions before `end` were read, and
        the first `count` changes of the transaction at `commit`

A reader may append its own items to the list.

A checkpoint may fall within a transaction. After a restore the server sends this transaction again
from its beginning, with the same changes, and the reader skips the first `count`. The reader stops
reading the socket while its buffer is full, so memory is bounded for any transaction.

A snapshot cannot be opened again after its connection is gone. So the remaining rows are read in a
later snapshot, as of a later place in the log. The changes are still read from `start` on. Each key
belongs to a range that was read as of one place, and its row contains all changes before this
place. The reader drops these changes. So an update that moves a row to another key may become a
deletion or an insert. The method is that of DBLog (Andreakis and Papapanagiotou, 2020). It needs no
watermarks in the log, because the server reports the place of a snapshot.

A range is [table, last key, as of]: the keys of the table after the previous range, up to the last
key. None as the last key means the end of the table. Python compares the keys, so a key may only
have types that Python orders as the server does. An empty list as the last key marks a table
without such a key. Such a table is read again from its beginning, and none of its changes is
dropped.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from aioflow.core.errors import StateError
from aioflow.io.backoff import Backoff
from aioflow.io.brokers.readers import Message, StreamReader

if TYPE_CHECKING:
    from aioflow.io.changes import ChangesConfig
    from aioflow.operators.source import SourceContext, Split

__all__ = [
    "LOG",
    "SNAPSHOT",
    "ChangeLog",
    "ChangeReader",
    "Frames",
    "Position",
    "RowsOf",
    "SnapshotRanges",
]

BUFFERED_BYTES = 16 << 20
"""Maximum size of the buffered rows. One block of messages may exceed it."""

RECEIVED_BYTES = 1 << 20
"""Number of unprocessed bytes at which reading from the socket pauses."""

SNAPSHOT, LOG = "snapshot", "log"

Position = list[Any]

F = TypeVar("F")
"""A message of a server's protocol."""

N = TypeVar("N", bound="Named")


class Named(Protocol):
    """The interface of a table: any object with a name."""

    @property
    def name(self) -> str: ...


class RowsOf(Protocol):
    """The interface through which `ChangeLog` uses the rows of a table. Each reader has its own
    type of row.
    """

    @property
    def table(self) -> str:
        """The name of the table, as in `tables=`."""
        ...

    def key_of(self, row: Any) -> dict[str, Any]:
        """Returns the key of a row: the values of the key columns by name."""
        ...


class Frames(asyncio.Protocol, Generic[F]):
    """Collects the messages of a server, over a connection that a client library has opened.

    Invariant: at most about `RECEIVED_BYTES` and one message wait in memory. At this bound the
    socket is not read, and the server waits.
    """

    def __init__(
        self, transport: Any, complete: Callable[[bytearray], tuple[list[F], int]]
    ) -> None:
        """`complete(buffer)` returns the complete messages at the start of a buffer, and their
        total length.
        """
        self._transport = transport
        self._complete = complete
        self._buffer = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self.lost: BaseException | None = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) >= RECEIVED_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.lost = exc or ConnectionResetError("the server has closed the connection")
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> list[F]:
        """Waits for messages. Returns all messages that have arrived, at least one. Raises OSError
        if the connection ended.
        """
        while True:
            if frames := self._taken():
                return frames
            if self.lost is not None:
                raise ConnectionResetError(str(self.lost)) from self.lost
            if self._paused:  # One message is larger than the buffer.
                self._paused = False
                self._transport.resume_reading()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _taken(self) -> list[F]:
        frames, length = self._complete(self._buffer)
        if length:
            del self._buffer[:length]
            if self._paused and len(self._buffer) < RECEIVED_BYTES // 2:
                self._paused = False
                self._transport.resume_reading()
        return frames


class ChangeReader(StreamReader):
    """Reads the one split of a source of changes.

    A subclass defines `read`, which connects and reads, and `change`, which converts the content of
    a message to a change.
    """

    def __init__(self, ctx: SourceContext, config: ChangesConfig) -> None:
        super().__init__(ctx, self._made, config.on_error)
        self.config = config
        self.behind: Position | None = None
        """The position after the last message that was put into the buffer. None before the
        first.
        """
        self._bytes = 0

    @abstractmethod
    async def read(self, backoff: Backoff) -> None:
        """Connects, and reads to the end. Resets `backoff` once data has arrived."""

    @abstractmethod
    def change(self, content: Any) -> Any:
        """Converts the content of a message to a change. Its last item is its size in bytes."""

    @abstractmethod
    def is_away(self, error: Exception) -> bool:
        """Returns whether `error` means that the server cannot be reached now."""

    @abstractmethod
    def explained(self, error: Exception) -> BaseException | None:
        """Returns an error that tells the user how to fix the server's `error`, or None for an
        error without a known remedy.
        """

    async def open(self, splits: Sequence[Split]) -> None:
        if splits:
            self.behind = splits[0].position
        await super().open(splits)

    def position(self, split_id: str) -> Position | None:
        if not self._chunks:
            # Kept, because a checkpoint may contain this position, and later positions must not be
            # before it.
            self._positions[split_id] = self.behind
        position: Position | None = self._positions[split_id]
        return position

    def _made(self, content: Any) -> Any:
        self._bytes -= content[-1]
        return self.change(content)

    async def hand_over(
        self, messages: list[Message], size: int, behind: Position, *, last: bool = False
    ) -> None:
        """Puts messages of `size` bytes into the buffer, and waits while the buffer is full.
        `behind` is the position after these messages. `last` means that no message follows.
        """
        self.behind, self._bytes = behind, self._bytes + size
        (split_id,) = self.splits
        if messages or last:
            await self.put(split_id, messages, last=last)
        if self._bytes > BUFFERED_BYTES:
            await self._pump.added(lambda: self._bytes > BUFFERED_BYTES // 2 and bool(self._chunks))

    async def read_tables(
        self,
        tables: Sequence[N],
        start: int,
        as_of: int,
        read: Callable[[N, Position, list[str]], Awaitable[None]],
    ) -> None:
        """Reads the rows of all remaining tables, as of the place `as_of` in the log.

        `start` is the place where the changes begin. `read(table, begin, key)` reads the rows of a
        table whose key is greater than `key`, a list of texts. `begin` has the first items of the
        positions of these rows.
        """
        ranges: list[list[Any]] = []
        if self.behind is not None:
            ranges, interrupted, key, read_as_of = self.behind[2:6]
            # A table without a comparable key is read again from its beginning.
            ranges = [*ranges, [interrupted, key, read_as_of if key else start]]
        for table in tables:
            read_before = [last for name, last, _ in ranges if name == table.name]
            if None not in read_before:
                last = read_before[-1] if read_before else []
                await read(table, [SNAPSHOT, start, ranges], last)
                ranges = [*ranges, [table.name, None, as_of]]
        left = ranges if any(at > start for _, _, at in ranges) else None
        self.behind = [LOG, start, 0, 0, left]

    async def read_rows(
        self,
        pages: AsyncIterator[list[list[bytes | None]]],
        rows: RowsOf,
        key: Sequence[int],
        encoding: str,
        begin: Position,
        as_of: int,
        place: str,
    ) -> None:
        """Puts the rows of a table, whose cells are texts, into the buffer.

        `key` has the indexes of the key columns by which the rows are ordered. `encoding` is the
        encoding of their texts. `place` is `as_of` as a text.
        """
        where, now_ms = f"row of {rows.table!r}", self.ctx.host.clock.wall_ms()
        async for page in pages:
            messages, size = [], 0
            for cells in page:
                length = sum([len(cell) for cell in cells if cell is not None])
                size += length
                texts = [(cells[i] or b"").decode(encoding) for i in key]
                content = (rows, "read", None, False, cells, place, now_ms, length)
                messages.append(Message(content, [*begin, rows.table, texts, as_of], now_ms, where))
            await self.hand_over(messages, size, messages[-1].position)

    async def run(self) -> None:
        backoff = Backoff(self.ctx.host.rng, self.config.backoff)
        await backoff.persistently(
            partial(self.read, backoff), self.config, self.is_away, self.explained
        )


class ChangeLog:
    """Tracks the position within the log: the transaction, and the number of its changes that were
    read.
    """

    def __init__(
        self,
        config: ChangesConfig,
        begin: Position,
        end: int | None,
        ranges: SnapshotRanges | None,
    ) -> None:
        """`begin` is the position to start from, and `ranges` are the ranges in this position, with
        decoded keys. The reader ends at the place `end`, or never if `end` is None.
        """
        _, self.done, self._cut, self._count, self._told_ranges, *self.more = begin
        self._config = config
        self._end = end
        self._ranges = ranges
        self._commit = 0
        self._number = 0
        self._skip = 0
        self._place, self._timestamp_ms = "", 0
        self.inside = False
        """Whether a transaction has begun and not ended."""
        self.behind = begin
        self.at_end = end is not None and self.done >= end

    def reached(self, place: int) -> None:
        """Notes that all transactions before `place` were read."""
        if place <= self.done:
            return
        if self._ranges is not None and place >= self._ranges.end:
            self._ranges = self._told_ranges = None
        self.done = place
        # The server sends a transaction again until the reader has read it to its end.
        if self._cut < place:
            self._cut = self._count = 0
        self.behind = [LOG, place, self._cut, self._count, self._told_ranges, *self.more]
        self.at_end = self._end is not None and place >= self._end

    def begin(self, commit: int, place: str, timestamp_ms: int) -> None:
        """Notes that a transaction begins. `commit` is the place of the transaction in the log, and
        `place` is this place as text.
        """
        if self._end is not None and commit >= self._end:
            self.at_end = True
            return
        self.inside = True
        self._commit, self._number = commit, 0
        self._skip = self._count if commit == self._cut else 0
        self._place, self._timestamp_ms = place, timestamp_ms

    def commit(self, end: int) -> None:
        """Notes that the transaction has ended, and that the next place in the log is `end`."""
        self.inside = False
        self.reached(end)

    def is_new(self) -> bool:
        """Counts a change. Returns False if the change was already read before a restore."""
        self._number += 1
        return self._number > self._skip

    def truncate(self, messages: list[Message], table: str) -> None:
        """Adds a truncate of `table` to `messages`, unless the snapshot was read after the
        truncate.
        """
        if self._ranges is not None:
            changes = self._ranges.truncates(table, self._commit)
            if changes is None:
                raise StateError(
                    f"{self._config!r}: table {table!r} was truncated while its rows were "
                    "read over a restart: start with restore=None, fresh=True for a new snapshot"
                )
            if not changes:
                return
        self._put(messages, (None, "truncate", table, False, None), 0)

    def add(
        self,
        messages: list[Message],
        rows: RowsOf,
        kind: str,
        old: Any,
        whole: bool,
        new: Any,
        size: int,
    ) -> int:
        """Adds a change of the kind `kind` to `messages`. Returns its size, or 0 if the snapshot
        contains the change.

        `old` is the row before the change, and `new` the row after it; None if there is none.
        `whole` says whether `old` has all columns, or only those of the key.
        """
        if self._ranges is not None:
            had = old if old is not None else new
            assert had is not None
            in_old = in_new = self._contains(rows, had)
            if kind == "update" and old is not None and new is not None:
                in_new = self._contains(rows, new)
            if in_old and in_new:
                return 0
            if in_old:
                kind, old, whole = "insert", None, False
            elif in_new:
                kind, new = "delete", None
        self._put(messages, (rows, kind, old, whole, new), size)
        return size

    def _contains(self, rows: RowsOf, row: Any) -> bool:
        assert self._ranges is not None
        return self._ranges.contains(rows.table, tuple(rows.key_of(row).values()), self._commit)

    def _put(self, messages: list[Message], content: tuple[Any, ...], size: int) -> None:
        self.behind = [
            LOG, self.done, self._commit, self._number, self._told_ranges, *self.more
        ]  # fmt: skip
        messages.append(
            Message(
                (*content, self._place, self._timestamp_ms, size),
                self.behind,
                self._timestamp_ms,
                f"change at {self._place}",
            )
        )


class SnapshotRanges:
    """The ranges of all tables that snapshots have read. Immutable."""

    def __init__(self, ranges: Sequence[Sequence[Any]]) -> None:
        """Makes the object from the ranges of a position, with decoded keys."""
        self._ranges: dict[str, list[tuple[tuple[Any, ...] | None, int]]] = {}
        for table, last, as_of in ranges:
            self._ranges.setdefault(table, []).append(
                (None if last is None else tuple(last), as_of)
            )
        self.end = max((as_of for _, _, as_of in ranges), default=0)
        """Changes at this place in the log, or later, are in no snapshot."""

    def contains(self, table: str, key: tuple[Any, ...], commit: int) -> bool:
        """Returns whether the snapshot that read the range of `key` already contains the
        transaction at `commit`.
        """
        for last, as_of in self._ranges.get(table, ()):
            if last == ():
                return False
            if last is None or key <= last:
                return commit < as_of
        return False

    def truncates(self, table: str, commit: int) -> bool | None:
        """Returns whether a truncate at `commit` removes the rows that the snapshots of `table`
        have read.

        True means that the truncate removes all of these rows, False that it removes none, and None
        that it removes some.
        """
        ranges = self._ranges.get(table, [])
        if any(last == () for last, _ in ranges):
            return True
        later = [commit >= as_of for _, as_of in ranges]
        if all(later):
            return True
        return None if any(later) else False
