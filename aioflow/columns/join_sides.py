"""Stores the records of both sides of a window join, by slice of event time, in columns.

Records since the last `settle` are pending in memory. `settle` writes them to a table of keyed
state: sorted by key group, and one chunk of bytes for each group. The key of a chunk is an int that
belongs to its records' key group, made from the number of its first record. So splitting state by
key group splits chunks exactly where rows would be split. That holds for a restore with another
parallelism and for the files of a backend. An incremental checkpoint writes only the new chunks.

Long operations are iterators, so that the event loop can run between their steps. A read visits the
table and the pending records. While a `gather` is unfinished, no records may be added or settled.
So a query from another program does not call `settle`; it returns only the records in the table.
Between two steps of a `settle` each slice is either completely pending or completely settled. Codes
of keys are discarded only when nothing is pending.

The namespace of the table is (side, start of the slice, size, slide and offset of the windows). A
value is a batch with the columns key, arrival and value, encoded by `column_codec`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping, MutableMapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from aioflow.columns.chunk_keys import int_in_group
from aioflow.columns.keys import KeyEncoder
from aioflow.columns.pairing import Held, together
from aioflow.core.column_batch import Column, ColumnBatch, NumberColumn
from aioflow.core.column_codec import decode_column, encode_stretches
from aioflow.core.keygroups import key_groups

if TYPE_CHECKING:
    from aioflow.core.serializers import Codec

__all__ = ["PENDING_MAX", "ChunkTable", "JoinSides", "Namespace", "Row", "rows_of"]

PENDING_MAX = 32_768
"""Number of pending records from which on they are settled, so that a checkpoint finds little to
write.
"""

KEYS_MIN = 100_000
"""Minimum number of codes before all codes are discarded. There must also be twice as many as when
the first slices were dropped after the last time.
"""

CHUNKS_MAX = 64
"""Maximum number of chunks that one step reads, or fewer with `READ_MAX` records: a chunk of a hot
key has thousands.
"""

READ_MAX = 131_072

CHUNKS_WRITTEN_MAX = 512
"""Number of chunks that one step writes, 20 us each. 1,800 slices have tens of thousands."""

ROWS_MAX = 4_096
"""Number of records that one step converts to rows."""

Namespace = tuple[int, int, int, int, int]
"""Side, start of the slice, size, slide and offset of its windows."""

Row = tuple[int, int, int, Any, Any, int]
"""Number in the order of arrival, side, start of the slice, key, value, and the end up to which its
windows are computed by rows.
"""


class ChunkTable(Protocol):
    """The operations of a table of keyed state that `JoinSides` needs."""

    def of(self, namespace: Any, keys: Sequence[Any]) -> MutableMapping[Any, Any]: ...
    def peek(self, namespace: Any) -> Mapping[Any, Any]: ...
    def namespaces(self) -> list[Any]: ...
    def drop(self, namespace: Any) -> None: ...


class JoinSides:
    """The records of both sides of a join, in all windows of one definition.

    A side is 0 (left) or 1 (right). `starts` holds the start of each slice that is not empty,
    sorted.
    """

    def __init__(
        self,
        table: ChunkTable,
        windows: tuple[int, int, int],
        max_parallelism: int,
        codec: Codec,
        owner: str,
    ) -> None:
        """Makes an empty store. `windows` contains the size, slide and offset of the windows, in
        milliseconds.

        `owner` is named in the error for a value that cannot be encoded.
        """
        self._table = table
        self._windows = windows
        self._max_parallelism = max_parallelism
        self._codec = codec
        self._owner = owner
        self._encoder = KeyEncoder()
        self._groups = np.empty(0, np.int64)  # The key group of each code.
        self._keys_max = KEYS_MIN
        self._keys_counted = False  # Whether `_keys_max` belongs to this encoder.
        self._pending: dict[tuple[int, int], list[Held]] = {}
        self._pending_count = 0
        self._read: dict[
            tuple[int, int], Held
        ] = {}  # Settled records by (side, start of slice), for the next window with them.
        found = {namespace[:2] for namespace in table.namespaces() if namespace[2:] == windows}
        self.starts: list[int] = sorted({start for _, start in found})
        self._starts_of: tuple[list[int], ...] = tuple(
            sorted(start for side, start in found if side == of) for of in (0, 1)
        )

    # Adding records.

    def encode(self, keys: Any) -> np.ndarray | None:
        """Returns the codes of `keys`. Returns None if they are neither ints nor texts, and must be
        processed as rows.
        """
        if len(self._encoder) > self._keys_max and not self._pending:
            self._read.clear()
            # The same keys may come again at once, for example from the list of a channel. So the
            # limit is doubled until the number of live keys is known.
            self._keys_max, self._keys_counted = 2 * len(self._encoder), False
            self._encoder = KeyEncoder()
            self._groups = self._groups[:0]
        codes = self._encoder.encode_plain(keys)
        known = len(self._groups)
        if known < len(self._encoder):  # Computed now, so that a snapshot need not wait for it.
            new = key_groups(self._encoder.entries[known:], self._max_parallelism)
            self._groups = np.concatenate([self._groups, np.array(new, np.int64)])
        return codes

    def add(self, side: int, start: int, held: Held) -> None:
        """Adds records of one side to the slice that starts at `start`."""
        self._pending.setdefault((side, start), []).append(held)
        self._pending_count += len(held)
        _insert(self._starts_of[side], start)
        _insert(self.starts, start)

    @property
    def is_full(self) -> bool:
        """Whether so many records are pending that `settle` should be called."""
        return self._pending_count >= PENDING_MAX

    def settle(self) -> Iterator[None]:
        """Writes all pending records into the table. Yields after each part, so that other tasks
        can run.
        """
        chunks = 0
        while self._pending:
            side, start = slot = next(iter(self._pending))
            held = together(self._pending[slot])
            chunks += self._settle(side, start, held)
            del self._pending[slot]
            self._pending_count -= len(held)
            if chunks >= CHUNKS_WRITTEN_MAX:
                yield
                chunks = 0

    def _settle(self, side: int, start: int, held: Held) -> int:
        """Writes the records of one slice into the table. Returns the number of chunks."""
        groups = self._groups[held.codes].astype(np.uint16)  # Two bytes are sorted in linear time.
        order = groups.argsort(kind="stable")
        groups, held = groups[order], held.take(order)
        columns: dict[Any, Column] = {
            "key": self._encoder.decode(held.codes),
            "arrival": NumberColumn(held.arrivals),
            "value": held.values,
        }
        bounds = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(groups)]
        # After a restore, arrival numbers continue from the highest of all subtasks: no two
        # chunks share a number.
        numbers, of_group = held.arrivals[bounds[:-1]].tolist(), groups[bounds[:-1]].tolist()
        keys = [
            int_in_group(number + 1, group) for number, group in zip(numbers, of_group, strict=True)
        ]
        chunks = encode_stretches(ColumnBatch(columns, len(held)), bounds, self._codec, self._owner)
        self._table.of((side, start, *self._windows), keys).update(zip(keys, chunks, strict=True))
        self._read.pop((side, start), None)
        return len(keys)

    # Reading records.

    def has(self, side: int, begin: int, stop: int) -> bool:
        """Whether a slice that starts from `begin` up to `stop` (exclusive) holds a record of
        `side`.
        """
        starts = self._starts_of[side]
        index = bisect_left(starts, begin)
        return index < len(starts) and starts[index] < stop

    def gather(self, side: int, begin: int, stop: int) -> Generator[None, None, Held]:
        """Returns the records of `side` in the slices that start from `begin` up to `stop`
        (exclusive). There must be at least one.

        Yields after each part, so that other tasks can run.
        """
        parts: list[Held] = []
        starts = self._starts_of[side]
        for start in starts[bisect_left(starts, begin) : bisect_left(starts, stop)]:
            slot = side, start
            read = self._read.get(slot)
            if read is None:
                chunks, count, records = [], 0, 0
                for content in self._contents(slot):
                    chunk = self._decode(content)
                    chunks.append(chunk)
                    count, records = count + 1, records + len(chunk)
                    if count == CHUNKS_MAX or records >= READ_MAX:
                        yield
                        count = records = 0
                if chunks:
                    read = self._read[slot] = together(chunks)
            if read is not None:
                parts.append(read)
            pending = self._pending.get(slot)
            if pending:
                whole = together(pending)
                pending[:] = [whole]
                parts.append(whole)
        return together(parts)

    def _contents(self, slot: tuple[int, int]) -> Iterator[bytes]:
        # By items, because RocksDB looks up each value separately.
        return map(itemgetter(1), self._table.peek((*slot, *self._windows)).items())

    def keys_of(self, codes: np.ndarray) -> Column:
        """Returns a column of the keys that have the codes `codes`."""
        return self._encoder.decode(codes)

    def _decode(self, content: bytes) -> Held:
        keys, arrivals, values = _parts_of(content, self._codec)
        return Held(self._encoder.encode(keys), arrivals.values, values)

    def rows(self, stop: int, until: int) -> Generator[None, None, Iterator[Row]]:
        """Returns the records of both sides in slices before `stop`, as rows, in order of arrival.

        Calls `settle` first. Yields after each part, so that other tasks can run. `until` becomes
        the last item of each row.
        """
        yield from self.settle()
        found: list[Row] = []
        arrivals = [np.empty(0, np.int64)]
        rest = ROWS_MAX
        for start in self.starts[: bisect_left(self.starts, stop)]:
            for side in (0, 1):
                for content in self._contents((side, start)):
                    keys, numbers, values = _parts_of(content, self._codec)
                    arrivals.append(numbers.values)
                    for begin in range(0, len(keys), ROWS_MAX):
                        which = np.arange(begin, min(begin + ROWS_MAX, len(keys)))
                        found += _rows(
                            keys.take(which),
                            numbers.take(which),
                            values.take(which),
                            side,
                            start,
                            until,
                        )
                        rest -= len(which)
                        if rest <= 0:
                            yield
                            rest = ROWS_MAX
        order = np.concatenate(arrivals).argsort(
            kind="stable"
        )  # A tenth of the time that a list takes.
        return map(found.__getitem__, order.tolist())

    def forget(self, below: int) -> None:
        """Drops the slices that start before `below`, because no window needs them any more."""
        starts = self.starts
        if starts and starts[0] < below and not self._keys_counted:
            # A window has fired: the number of the keys that it read, and of those that came since,
            # is about the number of live keys.
            self._keys_max, self._keys_counted = max(KEYS_MIN, 2 * len(self._encoder)), True
        while starts and starts[0] < below:
            start = starts.pop(0)
            for slot in ((0, start), (1, start)):
                if self._starts_of[slot[0]][:1] == [start]:
                    del self._starts_of[slot[0]][0]
                self._read.pop(slot, None)
                self._pending_count -= sum(map(len, self._pending.pop(slot, ())))
                self._table.drop((*slot, *self._windows))


def _insert(starts: list[int], start: int) -> None:
    index = bisect_left(starts, start)
    if index == len(starts) or starts[index] != start:
        starts.insert(index, start)


def rows_of(content: bytes, codec: Codec, side: int, start: int, until: int) -> list[Row]:
    """Returns the records of the chunk `content` as rows, in the order of the chunk."""
    return _rows(*_parts_of(content, codec), side, start, until)


def _rows(
    keys: Column, arrivals: Column, values: Column, side: int, start: int, until: int
) -> list[Row]:
    return [
        (arrival, side, start, key, value, until)
        for arrival, key, value in zip(arrivals, keys, values, strict=True)
    ]


def _parts_of(content: bytes, codec: Codec) -> tuple[Column, NumberColumn, Column]:
    chunk = decode_column(content, codec)
    assert isinstance(chunk, ColumnBatch)
    arrivals = chunk.columns["arrival"]
    assert isinstance(arrivals, NumberColumn)
    return chunk.columns["key"], arrivals, chunk.columns["value"]
