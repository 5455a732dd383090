"""Holds the accumulators of many keys in arrays, as a write-back cache for a table of keyed state.

The arrays have one element for each key, at the index that a `KeyEncoder` gave the key (its code).
The state backend remains the owner of state: a `Cells` object caches one namespace of a table. The
cache is written to the table in the form that rows use. This happens before a snapshot, a query, or
an operation on rows reads that namespace. If the table already has an accumulator for a key, it is
loaded when the key first occurs. So a savepoint does not depend on how a result was computed.

Records are added in their order (`np.add.at` adds one by one), so sums of floats equal those of
rows bit by bit. Arrays cannot hold some values exactly: ints beyond 64 bits, alternating ints and
floats, zeros of both signs under min and max. Such batches must be computed as rows, so
`NotOnColumns` is raised before any change.

`RunningColumns` computes running aggregates: a result for each record. The accumulators of an
operator are kept in one `Cells` object.

`SliceColumns` computes window aggregates, with one `Cells` object for each slice of event time.
`settle` writes unwritten content into the table. `release` must be called before code for rows adds
records to a slice. Both, and `results` of a window, return iterators, so that the event loop can
run between their steps. Between two steps a query may read the state, which calls `settle` first,
but no records may be added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from aioflow.columns.build import repeat
from aioflow.columns.expressions import NotOnColumns
from aioflow.columns.kernels import (
    Groups,
    Inputs,
    Leaf,
    LeafKind,
    Plan,
    Tally,
    check_merge,
    copied,
    grown,
    tally_of,
)
from aioflow.columns.keys import KeyEncoder, arrivals
from aioflow.core.column_batch import COLUMN_RECORDS_MAX, Column, ColumnBatch
from aioflow.core.functions import WindowResult

__all__ = ["KEYS_MAX", "WRITTEN_MAX", "Cells", "Merged", "RunningColumns", "SliceColumns"]

WRITTEN_MAX = 16_384
"""Maximum number of keys that one step writes. Such a step takes about 10 ms."""

_LIMIT = 2**63


class Cells:
    """Arrays that hold the accumulators of all keys in one namespace of a state table. For example,
    a namespace is one slice of event time.

    `complete` is whether the arrays contain every key that the table has in this namespace.
    """

    def __init__(self, plan: Plan, *, complete: bool) -> None:
        self.plan = plan
        self.complete = complete
        self._leaves = [Leaf(leaf.kind) for leaf in plan.leaves]
        self._seen = np.zeros(0, np.bool_)
        self._dirty = np.zeros(0, np.bool_)
        self._arrived: list[np.ndarray] = []
        self._count = 0
        self._written = 0
        """Number of arrays in `_arrived` whose keys are in the table."""

    def fold(
        self,
        codes: np.ndarray,
        inputs: list[Inputs],
        which: np.ndarray | None,
        entries: list[Any],
        held: Mapping[Any, Any] | None,
    ) -> None:
        """Adds records to the accumulators of their keys, which have the codes `codes`.

        `which` contains the indices of the records in the batch of `inputs`; None means the whole
        batch. `entries` are the keys by code. `held` is the content of the table; None if the table
        is empty. Raises NotOnColumns before any change.
        """
        tally = tally_of(codes, len(entries))
        self._admit(codes, tally, inputs, entries, held)
        self._dirty[codes if tally is None else tally[0]] = True
        for leaf, given in zip(self._leaves, inputs, strict=True):
            leaf.add(codes, given, which, tally)

    def running(
        self,
        codes: np.ndarray,
        inputs: list[Inputs],
        entries: list[Any],
        held: Mapping[Any, Any] | None,
    ) -> Column:
        """Adds records one after the other, and returns the aggregate's result after each record.
        The parameters are those of `fold`.

        Raises NotOnColumns before any change.
        """
        groups = Groups(codes)
        tally = groups.codes, groups.lengths
        self._admit(codes, tally, inputs, entries, held)
        parts = [
            leaf.running(groups, given) for leaf, given in zip(self._leaves, inputs, strict=True)
        ]
        self._dirty[groups.codes] = True
        for leaf, given in zip(self._leaves, inputs, strict=True):
            leaf.add(codes, given, None, tally)
        return (
            parts[0]
            if self.plan.names is None
            else ColumnBatch(dict(zip(self.plan.names, parts, strict=True)), len(codes))
        )

    def _admit(
        self,
        codes: np.ndarray,
        tally: Tally | None,
        inputs: list[Inputs],
        entries: list[Any],
        held: Mapping[Any, Any] | None,
    ) -> None:
        """Makes room for records whose keys have the codes `codes`, and loads accumulators of new
        keys from the table.

        `tally` contains the number of records for each code, or is None. Raises NotOnColumns if the
        records cannot be added.
        """
        count, size = len(codes), len(entries)
        for leaf, given in zip(self._leaves, inputs, strict=True):
            leaf.admit(given, count)
        if len(self._seen) < size:
            self._seen, self._dirty = grown(self._seen, size), grown(self._dirty, size)
        size = len(self._seen)
        present = codes if tally is None else tally[0]
        unseen = np.flatnonzero(~self._seen.take(present))
        new = None
        if len(unseen):
            first = codes
            if len(unseen) * 4 < len(present):  # Most codes have occurred before.
                first = codes[unseen if tally is None else np.flatnonzero(~self._seen.take(codes))]
            new = arrivals(
                first, np.unique(codes[unseen]) if tally is None else present[unseen], size
            )
        seeds = None if new is None or held is None else self._seeds(new, inputs, entries, held)
        for leaf, given in zip(self._leaves, inputs, strict=True):
            leaf.grow(size, given)
        if new is not None:
            self._seen[new] = True
            self._arrived.append(new)
            self._count += len(new)
        if seeds is not None:
            for leaf, (totals, counts, at) in zip(self._leaves, seeds, strict=True):
                leaf.counts[at] = counts
                if leaf.values is not None:
                    leaf.values[at] = totals
                    if leaf.values.dtype.kind == "i":
                        leaf.bound += max((abs(total) for total in totals), default=0)

    def _seeds(
        self, new: np.ndarray, inputs: list[Inputs], entries: list[Any], held: Mapping[Any, Any]
    ) -> list[tuple[list[Any], list[int], list[int]]]:
        """Returns the accumulators that the table has for the `new` codes, as lists of totals,
        counts and codes, for each basic aggregate.
        """
        found: list[tuple[list[Any], list[int], list[int]]] = [([], [], []) for _ in self._leaves]
        for code in new.tolist():
            accumulator = held.get(entries[code], _ABSENT)
            if accumulator is _ABSENT:
                continue
            parts = [accumulator] if self.plan.names is None else accumulator
            for leaf, given, part, (totals, counts, at) in zip(
                self._leaves, inputs, parts, found, strict=True
            ):
                total, count = leaf.unpack(
                    part, None if given.values is None else given.values.dtype
                )
                totals.append(total)
                counts.append(count)
                at.append(code)
        for leaf, given, (totals, _, _) in zip(self._leaves, inputs, found, strict=True):
            if (
                given.values is None
                or given.values.dtype.kind != "i"
                or leaf.kind not in (LeafKind.SUM, LeafKind.MEAN)
            ):
                continue
            if (
                leaf.bound
                + max((abs(total) for total in totals), default=0)
                + given.greatest * len(given.values)
                >= _LIMIT
            ):
                raise NotOnColumns("a sum could leave 64 bits")
        return found

    def write(
        self, table_of: Callable[[list[Any]], MutableMapping[Any, Any]], entries: list[Any]
    ) -> Iterator[int]:
        """Writes all changes into the table, in order of the keys' first occurrence.

        Yields the number of written keys after each part. No records may be added until the
        iterator ends. The caller may abandon the iterator. The next call then writes the remaining
        changes.
        """
        dirty = self._dirty
        if not dirty.any():
            return
        new = self._arrived[self._written :]
        first = np.concatenate(new) if new else np.zeros(0, np.int64)
        others = dirty.copy()
        others[first] = False
        codes = np.concatenate([first, np.flatnonzero(others)])
        for begin in range(0, len(codes), WRITTEN_MAX):
            part = codes[begin : begin + WRITTEN_MAX]
            keys = list(map(entries.__getitem__, part.tolist()))
            columns = [leaf.accumulators(part) for leaf in self._leaves]
            accumulators = (
                columns[0] if self.plan.names is None else map(list, zip(*columns, strict=True))
            )
            table_of(keys).update(zip(keys, accumulators, strict=True))
            dirty[part] = False
            if begin + len(part) == len(codes):
                self._written = len(self._arrived)
            yield len(part)

    @property
    def count(self) -> int:
        """Number of keys."""
        return self._count

    @property
    def arrival(self) -> np.ndarray:
        """The codes of all keys, in the order in which the keys first occurred."""
        if len(self._arrived) > 2:
            self._arrived, self._written = _joined(self._arrived, self._written)
        return np.concatenate([np.zeros(0, np.int64), *self._arrived])

    def results(self, codes: np.ndarray) -> Column:
        """Returns the aggregate's result for each key, given by its code in `codes`."""
        return self._results(self._leaves, codes)

    def _results(self, leaves: Sequence[Leaf], codes: np.ndarray) -> Column:
        parts = [leaf.results(codes) for leaf in leaves]
        return (
            parts[0]
            if self.plan.names is None
            else ColumnBatch(dict(zip(self.plan.names, parts, strict=True)), len(codes))
        )


class Merged:
    """The accumulators of several slices of event time, merged.

    There is at least one slice, and the slices are in order of time. Results can be computed for
    any subset of the keys.
    """

    def __init__(self, slices: Sequence[Cells]) -> None:
        """Raises NotOnColumns if the slices cannot be merged on columns."""
        self._slices = slices
        if len(slices) > 1:
            for leaves in zip(*(cells._leaves for cells in slices), strict=True):
                check_merge(leaves)

    def codes(self) -> np.ndarray:
        """Returns the codes of all keys: earlier slices first, keys of a slice in order of first
        occurrence.
        """
        first, *later = self._slices
        if not later:
            return first.arrival
        seen = copied(first._seen, max(len(cells._seen) for cells in later))
        order = [first.arrival]
        for cells in later:
            codes = cells.arrival
            order.append(codes[~seen[codes]])
            seen[codes] = True
        return np.concatenate(order)

    def results(self, codes: np.ndarray) -> Column:
        """Returns the aggregate's result over all slices for each key, given by its code in
        `codes`.
        """
        first, *later = self._slices
        if not later:
            return first.results(codes)
        leaves = [leaf.taken(codes) for leaf in first._leaves]
        for cells in later:
            for mine, leaf in zip(leaves, cells._leaves, strict=True):
                mine.merge(leaf.taken(codes))
        return first._results(leaves, np.arange(len(codes)))


_ABSENT: Any = object()


def _joined(arrived: list[np.ndarray], written: int) -> tuple[list[np.ndarray], int]:
    """Joins the first `written` arrays to one array, and all other arrays to another. Returns those
    of the two arrays that are not empty, and how many of them hold written codes (0 or 1).
    """
    pieces = [piece for piece in (arrived[:written], arrived[written:]) if piece]
    return [np.concatenate(piece) for piece in pieces], min(written, 1)


KEYS_MAX = 1_000_000
"""Number of keys above which the cells are written to the table and emptied. The table may be on
disk and larger than memory.
"""


class RunningColumns:
    """The running aggregate of one operator. `settle` and `release` write its changes to the state
    table.

    `table_of(keys)` returns the table for writing the keys, and `peek()` the table for reading.
    `is_one_spelling(keys)` returns whether equal keys always have the same type, to judge by the
    types of all keys so far. If more than `keys_max` keys are in memory, all are written and
    dropped.
    """

    def __init__(
        self,
        plan: Plan,
        table_of: Callable[[list[Any]], MutableMapping[Any, Any]],
        peek: Callable[[], Mapping[Any, Any]],
        is_one_spelling: Callable[[Iterable[Any]], bool],
        keys_max: int = KEYS_MAX,
    ) -> None:
        self._plan = plan
        self._table_of = table_of
        self._peek = peek
        self._is_one_spelling = is_one_spelling
        self._keys_max = keys_max
        self._encoder = KeyEncoder()
        self._cells: Cells | None = None
        self._spelled = 0
        """Number of keys whose types were checked."""

    @property
    def held(self) -> int:
        """Number of keys in memory."""
        return len(self._encoder)

    def process(self, keys: Any, values: Any) -> ColumnBatch:
        """Adds the records. Returns a pair for each record: its key, and the key's result so far.

        Raises NotOnColumns before any change.
        """
        if not isinstance(values, ColumnBatch):
            raise NotOnColumns("the values are no records of columns")
        if len(self._encoder) > self._keys_max:
            self.release()
            self._encoder, self._spelled = KeyEncoder(), 0
        inputs = self._plan.inputs(values)
        codes = self._encoder.encode_plain(keys)
        entries = self._encoder.entries
        new, self._spelled = entries[self._spelled :], len(entries)
        if codes is None or not self._is_one_spelling(new):
            raise NotOnColumns(
                "keys that are neither ints nor texts, or have been spelled in another way"
            )
        cells = self._cells or Cells(self._plan, complete=False)
        results = cells.running(codes, inputs, entries, self._peek())
        self._cells = cells
        return ColumnBatch({0: keys, 1: results}, len(values))

    def settle(self) -> None:
        """Writes all changes since the last call into the table of keyed state."""
        if self._cells is not None:
            for _ in self._cells.write(self._table_of, self._encoder.entries):
                pass

    def release(self) -> None:
        """Writes all changes into the table, and forgets the accumulators.

        It must be called before code for rows writes to the table.
        """
        self.settle()
        self._cells = None


KEYS_MIN = 100_000
"""Number of codes above which all codes may be discarded. This happens if there are also more than
four times as many codes as keys in any slice.
"""

SLICE_KEYS = 64
"""Number of keys that cost about as much to write as one more slice."""

TableOf = Callable[[int, list[Any]], MutableMapping[Any, Any]]
"""The type of functions that return the table for writing keys. The arguments are the start of the
slice and the keys.
"""


class SliceColumns:
    """The slices of one window operator that are held in columns.

    `table_of(start, keys)` returns the table of a slice for writing the keys. `peek(start)` returns
    it for reading.
    """

    def __init__(
        self, plan: Plan, table_of: TableOf, peek: Callable[[int], Mapping[Any, Any]]
    ) -> None:
        self._plan = plan
        self._table_of = table_of
        self._peek = peek
        self._encoder = KeyEncoder()
        self._cells: dict[int, Cells] = {}
        self._count_before = 0
        """Number of keys of the slice that was dropped last. It estimates the size of the next
        slice, which is still growing.
        """

    @property
    def starts(self) -> list[int]:
        """The start of each slice that is held in columns."""
        return list(self._cells)

    def make_room(self) -> Iterator[None]:
        """Discards the codes of all keys if many of the keys are no longer in any slice. It must be
        called before `prepare`.

        Yields after each part of the work, like `settle`.
        """
        count = len(self._encoder)
        if count > KEYS_MIN and count > 4 * max(
            self._count_before, *(cells.count for cells in self._cells.values()), 0
        ):
            yield from self.release(self.starts)
            self._encoder = KeyEncoder()

    def prepare(self, keys: Any, values: Any) -> tuple[np.ndarray, list[Inputs]]:
        """Returns the codes of `keys`, and the inputs of the aggregates from `values`.

        Raises NotOnColumns if `values` is not a `ColumnBatch`, or if an aggregate cannot use it.
        Also raises it for keys that `KeyEncoder.encode_plain` does not support.
        """
        if not isinstance(values, ColumnBatch):
            raise NotOnColumns("the values are no records of columns")
        inputs = self._plan.inputs(values)
        codes = self._encoder.encode_plain(keys)
        if codes is None:
            raise NotOnColumns("keys that are neither ints nor texts")
        return codes, inputs

    def fold(
        self,
        start: int,
        codes: np.ndarray,
        inputs: list[Inputs],
        which: np.ndarray | None,
        *,
        new: bool,
    ) -> None:
        """Adds records to the slice that starts at `start`. `new` means that the table has no data
        for the slice.

        Raises NotOnColumns before any change.
        """
        cells = self._cells.get(start)
        if cells is None:
            cells = Cells(self._plan, complete=new)
        cells.fold(
            codes,
            inputs,
            which,
            self._encoder.entries,
            None if cells.complete else self._peek(start),
        )
        self._cells[start] = cells

    def settle(self) -> Iterator[None]:
        """Writes all changes into the table. Yields after each part of the work.

        No records may be added until the iterator has ended.
        """
        return self._settle(self.starts)

    def _settle(self, starts: Iterable[int]) -> Iterator[None]:
        written = 0
        for start in starts:
            cells = self._cells[start]
            for count in cells.write(
                lambda keys, at=start: self._table_of(at, keys),  # type: ignore[misc]
                self._encoder.entries,
            ):
                written += count + SLICE_KEYS
                if written >= WRITTEN_MAX:
                    yield
                    written = 0

    def release(self, starts: Sequence[int]) -> Iterator[None]:
        """Writes the slices that start at `starts` into the table, and forgets them. Yields after
        each part of the work.

        It must be called before code for rows adds records to these slices.
        """
        yield from self._settle(starts)
        for start in starts:
            del self._cells[start]

    def drop(self, start: int) -> None:
        """Drops a slice, because no window needs it any more."""
        cells = self._cells.pop(start, None)
        if cells is not None:
            self._count_before = cells.count

    def results(self, starts: Sequence[int], begin: int, end: int) -> Iterator[ColumnBatch] | None:
        """Returns an iterator over the results of the window from `begin` to `end`, which consists
        of the slices that start at `starts`.

        Returns None if this object lacks keys that the table has for these slices, or if the slices
        cannot be merged on columns. No records may be added until the iterator has ended.
        """
        cells = [one for one in map(self._cells.get, starts) if one is not None and one.complete]
        if len(cells) < len(starts):
            return None
        try:
            return self._pieces(Merged(cells), begin, end)
        except NotOnColumns:
            return None

    def _pieces(self, merged: Merged, begin: int, end: int) -> Iterator[ColumnBatch]:
        codes = merged.codes()
        for first in range(0, len(codes), COLUMN_RECORDS_MAX):
            part = codes[first : first + COLUMN_RECORDS_MAX]
            columns: dict[str, Column] = {
                "key": self._encoder.decode(part),
                "start": repeat(begin, len(part)),
                "end": repeat(end, len(part)),
                "value": merged.results(part),
            }
            yield ColumnBatch(columns, len(part), WindowResult)
