"""The window join on columns: stores the records of both sides, by slice of event time, and
computes the pairs with equal keys.

Records since the last `settle` are pending in memory. `settle` writes them to a table of keyed
state, as one chunk of bytes for each key group. The key of a chunk is an int, made from the number
of the first record in the chunk. This int has the same key group as the records in the chunk. So
splitting state by key group splits chunks exactly where rows would be split. This holds for a
restore with another parallelism and for the files of a backend. An incremental checkpoint writes
only the new chunks.

Long operations are iterators, so that the event loop can run between their steps. A read covers the
table and the pending records. While a `gather` is unfinished, no records may be added or settled.
So an external state query does not call `settle`; it returns only the records in the table. Between
two steps of a `settle` each slice is either completely pending or completely settled. Codes of keys
are discarded only when nothing is pending.

The namespace of the table is (side, start of the slice, size, slide and offset of the windows). A
value is a batch with the columns key, arrival and value, encoded by `core.wire.columns`.

Pairs are in the order in which their keys first arrived on either side. For one key, the pairs of
each left record with all right records come before the pairs of the next left record. The records
of each side are in order of arrival. A join of rows gives the same order.

The key group of an int follows from the CRC-32 of its canonical bytes. The last four of these bytes
are the lowest 32 bits of the int. Four bytes can take a CRC from any value to any other value. So
these 32 bits are chosen to get the wanted key group, by computing the CRC backwards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol
from zlib import crc32

import numpy as np

from aioflow.columns.build import concat
from aioflow.columns.keys import KeyEncoder
from aioflow.core.column_batch import Column, ColumnBatch, NumberColumn
from aioflow.core.functions import Pair
from aioflow.core.keygroups import canonical_key, key_groups
from aioflow.core.wire.columns import decode_column, encode_stretches

if TYPE_CHECKING:
    from aioflow.core.wire.serializers import Codec

__all__ = [
    "PENDING_MAX",
    "ChunkTable",
    "Fired",
    "Held",
    "JoinSides",
    "Namespace",
    "Pairing",
    "Row",
    "Runs",
    "blocks",
    "int_in_group",
    "rows_of",
    "together",
]

_PLACE_BITS = 32
_PLACE = (1 << _PLACE_BITS) - 1
_SORTED_MAX = 1 << 31

BLOCK_RECORDS = 65_536
"""Approximate number of records in a block of a large window. Sorting a block takes 8 ms."""

_BINS_BITS = 20
_LATEST = 2**63 - 1


@dataclass(slots=True)
class Held:
    """Records of one side of a join, as columns.

    Each record has the code of its key, its number in the common order of arrival of both sides,
    and its value.
    """

    codes: np.ndarray
    arrivals: np.ndarray
    values: Column

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, indices: np.ndarray) -> Held:
        return Held(self.codes[indices], self.arrivals[indices], self.values.take(indices))

    def part(self, begin: int, stop: int) -> Held:
        which = slice(begin, stop)
        return Held(self.codes[which], self.arrivals[which], self.values.part(which))


def together(parts: Sequence[Held]) -> Held:
    """Returns the concatenation of one or more `parts`."""
    if len(parts) == 1:
        return parts[0]
    codes = np.concatenate([part.codes for part in parts])
    arrivals = np.concatenate([part.arrivals for part in parts])
    return Held(codes, arrivals, concat([part.values for part in parts]))


def blocks(
    left: Sequence[Held], right: Sequence[Held]
) -> Generator[tuple[Held, Held] | None, None, None]:
    """Divides a window by key, so that no step takes long, even for a large window.

    `left` and `right` are the parts of each side. Yields the records of both sides for each block
    of keys, and None between two steps. Blocks are in the order in which their keys first arrived
    on either side. In a large window, keys that occur on only one side are left out. A key with
    very many records is a block of its own.
    """
    parts, sides = [*left, *right], (left, right)
    if sum(map(len, parts)) <= 2 * BLOCK_RECORDS:
        yield together(left), together(right)
        return
    size = 1 + max(int(part.codes.max()) for part in parts)
    first = np.full(size, _LATEST)
    seen = np.zeros((2, size), np.bool_)
    for side, of_side in enumerate(sides):
        for part in of_side:
            np.minimum.at(first, part.codes, part.arrivals)
            seen[side, part.codes] = True
            yield None
    meets = seen[0] & seen[1]
    least = min(int(part.arrivals.min()) for part in parts)
    span = max(int(part.arrivals.max()) for part in parts) - least
    shift = max(0, span.bit_length() - _BINS_BITS)
    counts = np.zeros((span >> shift) + 1, np.int64)  # By the first arrival of the key.
    for part in parts:
        counts += np.bincount(
            (first[part.codes[meets[part.codes]]] - least) >> shift, minlength=len(counts)
        )
        yield None
    # An odd number is the block of a bin with very many records: later bins have other numbers.
    numbers = 2 * ((counts.cumsum() - counts) // BLOCK_RECORDS) + (counts > BLOCK_RECORDS)
    yield None
    found: tuple[dict[int, list[Held]], ...] = ({}, {})
    for side, of_side in enumerate(sides):
        for part in of_side:
            which = np.flatnonzero(meets[part.codes])
            if not len(which):
                continue
            of_each = numbers[(first[part.codes[which]] - least) >> shift]
            order = _sorted(of_each) & _PLACE
            of_each, taken = of_each[order], part.take(which[order])
            bounds = [0, *(np.flatnonzero(np.diff(of_each)) + 1).tolist(), len(of_each)]
            for begin, stop in pairwise(bounds):
                found[side].setdefault(int(of_each[begin]), []).append(taken.part(begin, stop))
            yield None
    for number in sorted(found[0]):
        yield together(found[0].pop(number)), together(found[1].pop(number))


@dataclass(slots=True)
class Fired:
    """The keys of one window of which pairs were emitted before a restore, by the key's code."""

    whole: np.ndarray
    """For each code of a key: whether all pairs of the key were emitted."""
    parts: dict[int, tuple[int, int, int]]
    """The keys of which some pairs were emitted. Maps the code of such a key to the number of these
    pairs, and the numbers of the key's records on the left and on the right.
    """


class Pairing:
    """All pairs of records from `left` and `right` with equal keys, except those of `fired`.

    Any range of the pairs can be made separately, because a frequent key may have millions of
    pairs. The caller makes the `Runs` of each side in a separate step, because sorting millions of
    records takes long.
    """

    def __init__(self, left: Runs, right: Runs, fired: Fired | None = None) -> None:
        self._left, self._right = left.values, right.values
        in_left, in_right = _met(left.keys, right.keys)
        if fired is not None:
            are_left = ~fired.whole[left.keys[in_left]]
            in_left, in_right = in_left[are_left], in_right[are_left]
        order = np.minimum(left.first[in_left], right.first[in_right]).argsort(kind="stable")
        in_left, in_right = in_left[order], in_right[order]
        self._left_order, self._right_order = left.order, right.order
        self._left_start, self._right_start = left.starts[in_left], right.starts[in_right]
        self._keys = left.keys[in_left]
        self._height, self._width = left.counts[in_left], right.counts[in_right]
        self._skipped = np.zeros(len(order), np.int64)
        """Number of pairs of each key that were emitted before a restore."""
        for code, (skipped, height, width) in ({} if fired is None else fired.parts).items():
            at = self._keys == code
            self._skipped[at] = skipped
            # Later records were late for the window.
            self._height[at] = np.minimum(self._height[at], height)
            self._width[at] = np.minimum(self._width[at], width)
        pairs = self._height * self._width - self._skipped
        self._stops = pairs.cumsum()
        self._begins = self._stops - pairs

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def part(self, begin: int, stop: int) -> ColumnBatch:
        """Returns the pairs with the numbers from `begin` up to `stop` (exclusive). The range must
        not be empty.
        """
        first, last = (
            self._stops.searchsorted(begin, "right"),
            self._stops.searchsorted(stop - 1, "right") + 1,
        )
        counts = np.minimum(self._stops[first:last], stop) - np.maximum(
            self._begins[first:last], begin
        )
        # One run is one key: per-run values are computed once, and repeated for its pairs.
        within = np.arange(begin, stop) - (
            self._begins[first:last] - self._skipped[first:last]
        ).repeat(counts)
        left, right = (
            self._left_start[first:last].repeat(counts),
            self._right_start[first:last].repeat(counts),
        )
        width = self._width[first:last]
        if len(width) and int(width.max()) > 1:
            rows, at = np.divmod(within, width.repeat(counts))
            left += rows
            right += at
        else:
            left += within
        values = {
            "left": self._left.take(self._left_order[left]),
            "right": self._right.take(self._right_order[right]),
        }
        return ColumnBatch(values, stop - begin, Pair)

    def emitted(self, stop: int) -> tuple[np.ndarray, dict[int, tuple[int, int, int]]]:
        """Returns the codes of the keys whose pairs all have numbers below `stop`.

        Also returns the key of which only some pairs have numbers below `stop`, in the form of
        `Fired.parts`. This dict is empty if there is no such key.
        """
        at = int(self._stops.searchsorted(stop, "right"))
        if at == len(self._stops) or stop <= self._begins[at]:
            return self._keys[:at], {}
        number = stop - self._begins[at] + self._skipped[at]
        part = int(number), int(self._height[at]), int(self._width[at])
        return self._keys[:at], {int(self._keys[at]): part}


class Runs:
    """The records of one side, sorted by key and then by arrival.

    A run consists of all records with one key. The arrays `keys`, `starts`, `counts` and `first`
    have an item for each run: the code of its key, its start and length in the sorted order, and
    the arrival number of its first record.
    """

    __slots__ = ("counts", "first", "keys", "order", "starts", "values")

    def __init__(self, held: Held) -> None:
        self.values, codes, arrivals = held.values, held.codes, held.arrivals
        by_arrival = None
        if len(arrivals) > 1 and not (arrivals[1:] >= arrivals[:-1]).all():
            since = arrivals - arrivals.min()
            by_arrival = (
                _sorted(since) & _PLACE
                if int(since.max()) < _SORTED_MAX
                else since.argsort(kind="stable")
            )
            codes, arrivals = codes[by_arrival], arrivals[by_arrival]
        sorted_ = _sorted(codes)
        places = sorted_ & _PLACE
        sorted_ >>= _PLACE_BITS
        self.starts = np.flatnonzero(np.concatenate([[True], sorted_[1:] != sorted_[:-1]]))
        self.keys = sorted_[self.starts]
        self.counts = np.diff(self.starts, append=len(codes))
        self.first = arrivals[places[self.starts]]
        self.order = places if by_arrival is None else by_arrival[places]


def _met(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the positions in `left` and in `right` of the keys that both contain.

    Codes of keys are small, so a lookup table takes a third of the time of sorting. For few keys
    with large codes a binary search is faster.
    """
    if not (len(left) and len(right)):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    size = int(max(left[-1], right[-1])) + 1  # Codes are sorted: the last one is the highest.
    if size > 8 * (len(left) + len(right)):
        at = right.searchsorted(left)
        at[at == len(right)] = 0
        in_left = np.flatnonzero(right[at] == left)
        return in_left, at[in_left]
    place = np.full(size, -1, np.int64)
    place[right] = np.arange(len(right))
    found = place[left]
    in_left = np.flatnonzero(found >= 0)
    return in_left, found[in_left]


def _sorted(numbers: np.ndarray) -> np.ndarray:
    """Returns `numbers` in sorted order. Each number in the result is shifted left by 32 bits, and
    has its original index in the lower bits.

    The numbers must be below `_SORTED_MAX`. This is faster than numpy's `argsort`.
    """
    both = (numbers << _PLACE_BITS) | np.arange(len(numbers))
    both.sort()
    return both


_BITS = 32
_ONES = (1 << _BITS) - 1


def int_in_group(number: int, group: int) -> int:
    """Returns a positive int whose key group is `group`. Different numbers give different ints."""
    head = canonical_key(number << _BITS)[:-4]
    register = crc32(head) ^ _ONES
    return number << _BITS | int.from_bytes(
        (register ^ _four_bytes_before(group)).to_bytes(4, "little"), "big"
    )


@cache
def _four_bytes_before(checksum: int) -> int:
    """Returns the value of the CRC register that becomes `checksum` after four zero bytes."""
    register = checksum ^ _ONES
    for _ in range(4):
        index = _BY_TOP[register >> 24]
        register = ((register ^ _TABLE[index]) << 8 | index) & _ONES
    return register


_TABLE = [crc32(bytes([index]), _ONES) ^ _ONES for index in range(256)]
_BY_TOP = {entry >> 24: index for index, entry in enumerate(_TABLE)}


PENDING_MAX = 32_768
"""Number of pending records at which they are written into the table. So a checkpoint has little to
write.
"""

KEYS_MIN = 100_000
"""Number of codes above which all codes may be discarded. This happens if their number has also
doubled since slices were first dropped after the last discard.
"""

CHUNKS_MAX = 64
"""Maximum number of chunks that one step reads. A step also ends at `READ_MAX` records, because a
chunk of a frequent key has thousands of records.
"""

READ_MAX = 131_072

CHUNKS_WRITTEN_MAX = 512
"""Maximum number of chunks that one step writes, which takes 20 us for each chunk. A join with
1,800 slices has tens of thousands of chunks.
"""

ROWS_MAX = 4_096
"""Maximum number of records that one step converts to rows."""

Namespace = tuple[int, int, int, int, int]
"""The side, the start of the slice, and the size, slide and offset of the windows, in ms."""

Row = tuple[int, int, int, Any, Any, int]
"""Number in the order of arrival, side, start of the slice, key, value, and the end up to which
rows compute the record's windows.
"""


class ChunkTable(Protocol):
    """The operations of a table of keyed state that `JoinSides` needs."""

    def of(self, namespace: Any, keys: Sequence[Any]) -> MutableMapping[Any, Any]: ...
    def peek(self, namespace: Any) -> Mapping[Any, Any]: ...
    def namespaces(self) -> list[Any]: ...
    def drop(self, namespace: Any) -> None: ...


class JoinSides:
    """The records of both sides of a join, in all windows of one definition.

    A side is 0 (left) or 1 (right). `starts` is the sorted list of the starts of the slices that
    are not empty.
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

        `owner` is the name of the operator in the error for a value that cannot be encoded.
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
        self._read: dict[tuple[int, int], list[Held]] = {}
        """Settled records that were read from the table, by side and start of the slice. They are
        kept for the next window that contains the slice.
        """
        found = {namespace[:2] for namespace in table.namespaces() if namespace[2:] == windows}
        self.starts: list[int] = sorted({start for _, start in found})
        self._starts_of: tuple[list[int], ...] = tuple(
            sorted(start for side, start in found if side == of) for of in (0, 1)
        )

    # Adding records.

    def encode(self, keys: Any) -> np.ndarray | None:
        """Returns the codes of `keys`, or None if the keys are neither ints nor texts and must be
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
        if known < len(self._encoder):
            # Computed here, so that a snapshot need not wait for the result.
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
        """Whether enough records are pending to call `settle`."""
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

    def gather(self, side: int, begin: int, stop: int) -> Generator[None, None, list[Held]]:
        """Returns the records of `side` in the slices that start from `begin` up to `stop`
        (exclusive), in parts of about `READ_MAX` records at most.

        There must be at least one record. Yields after each part, so that other tasks can run.
        """
        parts: list[Held] = []
        starts = self._starts_of[side]
        for start in starts[bisect_left(starts, begin) : bisect_left(starts, stop)]:
            slot = side, start
            read = self._read.get(slot)
            if read is None:
                whole: list[Held] = []
                chunks: list[Held] = []
                count = records = 0
                for content in self._contents(slot):
                    chunk = self._decode(content)
                    chunks.append(chunk)
                    count, records = count + 1, records + len(chunk)
                    if records >= READ_MAX:
                        whole.append(together(chunks))
                        chunks, records, count = [], 0, CHUNKS_MAX
                    if count >= CHUNKS_MAX:
                        yield
                        count = 0
                if chunks:
                    whole.append(together(chunks))
                read = self._read[slot] = whole
            parts += read
            pending = self._pending.get(slot)
            if pending:
                pending[:] = [together(pending)]
                parts += pending
        return parts

    def _contents(self, slot: tuple[int, int]) -> Iterator[bytes]:
        # Iterates over items, because RocksDB would look up each value separately.
        return map(itemgetter(1), self._table.peek((*slot, *self._windows)).items())

    def fired(self, entries: Mapping[Any, Any], keys_max: int) -> Generator[None, None, Fired]:
        """Returns the keys of `entries` as `Fired`. `entries` maps a key to True if all its pairs
        were emitted, otherwise to a value of `Fired.parts`.

        It must be called after `gather`. Yields after each `keys_max` keys.
        """
        whole, parts, items = [], dict[int, tuple[int, int, int]](), iter(entries.items())
        while chunk := list(islice(items, keys_max)):
            codes = self._encoder.encode([key for key, _ in chunk])
            whole.append(codes[[held is True for _, held in chunk]])
            for code, (_, held) in zip(codes.tolist(), chunk, strict=True):
                if held is not True:
                    parts[code] = tuple(held)
            yield
        flags = np.zeros(len(self._encoder), np.bool_)
        for codes in whole:
            flags[codes] = True
        return Fired(flags, parts)

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
        # A tenth of the time that a list takes.
        order = np.concatenate(arrivals).argsort(kind="stable")
        return map(found.__getitem__, order.tolist())

    def forget(self, below: int) -> None:
        """Drops the slices that start before `below`, because no window needs them any more."""
        starts = self.starts
        if starts and starts[0] < below and not self._keys_counted:
            # A window has fired. The live keys are about the keys that it read and the keys that
            # arrived since.
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
