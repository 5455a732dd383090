"""The slices of one operator, as rows in the table or as columns in front of it, and the merge of
windows from them.

The state is one table, which maps slice start -> key -> accumulator. `starts` contains the starts
of the slices that are not empty, in order. Batches of columns are added to arrays. The arrays are
written to the table before rows are added to a slice, and before a snapshot or a query.

A run consists of neighbouring slices that are merged, so that a window of many slices fires at the
cost of a few. A run has 2**level slices, and starts at a multiple of its length. It is merged from
its two halves when a window first needs it. So each slice is merged about once on each level. A
window of n slices is covered by at most 2 log2(n) runs. A run is a cache over the slices: no
snapshot contains it, and a late record for a slice drops the runs that contain this slice. Runs
take about as much memory as the slices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING, Any

from aioflow.core.elements import MIN_WATERMARK
from aioflow.operators.aggregate.folding import FoldingAggregate, UserAggregate
from aioflow.operators.aggregate.functions import Agg
from aioflow.operators.aggregate.local import plan_columns
from aioflow.state.snapshot import frozen_copy

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from aioflow.columns.accumulators import SliceColumns
    from aioflow.core.column_batch import ColumnBatch
    from aioflow.operators.window.assigners import SliceGrid
    from aioflow.state.backend import StateTable

__all__ = ["SliceRuns", "SliceStore", "by_slice", "merge_parts", "merge_tables"]

MERGES_AT_ONCE = 1_024
"""Number of keys that are merged between two yields if each merge is a function call."""

LOOP_MERGES_AT_ONCE = 4_096
"""Number of keys that a generated loop merges between two yields.

Merging this many takes 0.3 ms for counts, and 1.6 ms for several aggregates together. A yield adds
some 15 us.
"""

COPIED_AT_ONCE = 16_384
"""Number of keys that are copied between two yields, in 1 to 2 ms."""

Table = Mapping[Any, Any]

_NOTHING: Table = {}

_NO_VALUE: Any = object()


def merge_parts(aggregate: FoldingAggregate, copies: bool, parts: list[Any]) -> Any:
    """Merges two or more accumulators, in order of time, into a new one.

    `copies` tells whether to merge copies, because a user's `merge` may change either argument.
    """
    if copies:
        parts = [frozen_copy(part) for part in parts]
    elif aggregate.in_place:
        parts = [aggregate.create_accumulator(), *parts]
    return reduce(aggregate.merge, parts)


def merge_tables(
    aggregate: FoldingAggregate, copies: bool, tables: list[Table]
) -> Generator[None, None, Table]:
    """Merges `tables`, in order of time, into one table: for each key, the accumulators are merged.

    `copies` has the same meaning as in `merge_parts`.

    No accumulator of `tables` is changed. There is one lookup for each key of each table; going key
    by key over all tables costs three times as much. Yields while there is much to merge.
    """
    merged = yield from _copied(tables[0])
    if not copies and (merger := aggregate.merger) is not None:
        for table in tables[1:]:
            for number, items in enumerate(_parts(table)):
                if number:
                    yield
                merger(merged, items)
        return merged
    get, merge = merged.get, aggregate.merge
    changes = copies or aggregate.in_place
    own: set[Any] = set()  # Keys whose accumulator was made here.
    for table in tables[1:]:
        for done, (key, held) in enumerate(table.items(), 1):
            before = get(key, _NO_VALUE)
            if before is _NO_VALUE:
                merged[key] = held
            elif not changes:
                merged[key] = merge(before, held)
            elif key in own:
                merged[key] = merge(before, frozen_copy(held) if copies else held)
            else:
                own.add(key)
                merged[key] = merge_parts(aggregate, copies, [before, held])
            if done % MERGES_AT_ONCE == 0:
                yield
    return merged


def _parts(table: Table) -> Iterator[Iterable[tuple[Any, Any]]]:
    """Yields the items of `table` in parts of `LOOP_MERGES_AT_ONCE`.

    Each part must be read before the next is requested. Iterating over `dict.items()` directly
    takes 0.6 of the time, because Python then reuses one tuple for all items.
    """
    items = iter(table.items())
    if type(table) is dict:
        for _ in range(0, len(table), LOOP_MERGES_AT_ONCE):
            yield islice(items, LOOP_MERGES_AT_ONCE)
    else:  # The number of keys may be expensive to find out.
        while part := list(islice(items, LOOP_MERGES_AT_ONCE)):
            yield part


def _copied(table: Table) -> Generator[None, None, dict[Any, Any]]:
    """Copies `table` to a new dict. Yields in between, because copying a million keys blocks the
    loop for 60 ms.
    """
    if len(table) <= COPIED_AT_ONCE:
        return dict(table)
    copy: dict[Any, Any] = {}
    items = iter(table.items())
    while len(copy) < len(table):
        copy.update(islice(items, COPIED_AT_ONCE))
        yield
    return copy


class SliceRuns:
    """The runs of a table of slices. They can cover any range of slices, by slice number.

    `slice_of(number)` returns the mapping from key to accumulator of a slice, empty if there is no
    such slice. `any_in(first, stop)` returns whether a slice in this range (without `stop`) has
    keys.
    """

    __slots__ = ("_aggregate", "_any_in", "_copies", "_levels", "_merged", "_runs", "_slice_of")

    def __init__(
        self,
        aggregate: FoldingAggregate,
        copies: bool,
        slice_of: Callable[[int], Table],
        any_in: Callable[[int, int], bool],
    ) -> None:
        self._aggregate = aggregate
        self._copies = copies
        self._slice_of = slice_of
        self._any_in = any_in
        self._runs: dict[tuple[int, int], Table] = {}
        self._levels = 0
        self._merged = 0
        """Number of keys merged since the last yield, over all tables, because hundreds of small
        tables take as long as a large one.
        """

    def cover(self, first: int, stop: int) -> Generator[None, None, list[Table]]:
        """Returns the tables of slices and runs that together cover the slices from number `first`
        up to `stop` (exclusive), in order.

        Yields while there is much to merge.
        """
        tables = []
        while first < stop:
            length = first & -first or 1 << (stop - first).bit_length()
            while first + length > stop:
                length >>= 1
            level = length.bit_length() - 1
            table = yield from self._run(level, first >> level)
            if table:
                tables.append(table)
            first += length
        return tables

    def drop(self, number: int) -> None:
        """Drops the runs that contain slice `number`, because the slice changes or is dropped."""
        for level in range(1, self._levels + 1):
            self._runs.pop((level, number >> level), None)

    def _run(self, level: int, index: int) -> Generator[None, None, Table]:
        if level == 0:
            return self._slice_of(index)
        run = self._runs.get((level, index))
        if run is not None:
            return run
        if not self._any_in(index << level, (index + 1) << level):
            return _NOTHING
        left = yield from self._run(level - 1, 2 * index)
        right = yield from self._run(level - 1, 2 * index + 1)
        merged = yield from merge_tables(self._aggregate, self._copies, [left, right])
        self._runs[level, index] = merged
        self._levels = max(self._levels, level)
        self._merged += len(right)
        if self._merged >= MERGES_AT_ONCE:
            self._merged = 0
            yield
        return merged


BYTE = 256

RUNS_FROM = 8
"""Minimum number of slices of a window that is merged from runs, for any aggregate and state
backend.
"""

RUNS_FROM_IN_MEMORY = 3
"""Minimum number of slices of a window that is merged from runs, if state is in memory and the
aggregate `regroups`.

With runs, a window of five slices of 5,000 keys costs 0.64 as much. Runs occupy memory, which a few
slices on disk do not. Columns are merged in order of time, without runs. So a result that depends
on the grouping, such as a sum of floats, would differ between runs and columns.
"""

_ABSENT = object()


class SliceStore:
    """The contents of the slices from which the windows of `grid` are computed."""

    __slots__ = (
        "_aggregate",
        "_columns",
        "_grid",
        "_merge_copies",
        "_runs_to",
        "_table",
        "runs",
        "starts",
    )

    def __init__(self, table: StateTable, grid: SliceGrid, aggregate: FoldingAggregate) -> None:
        self._table = table
        self._grid = grid
        self._aggregate = aggregate
        # A user's `merge` may return its second argument and change it the next time, but the
        # slices are needed again.
        self._merge_copies = _is_of_user(aggregate)
        self._columns: SliceColumns | None = None  # Made for the first batch of columns.
        self.starts: list[int] = sorted(table.namespaces())
        self.runs = SliceRuns(aggregate, self._merge_copies, self._numbered, self._any_in)
        self._runs_to = MIN_WATERMARK  # Start of the first slice that is in no run.

    @property
    def on_columns(self) -> bool:
        """Whether any slice is held as columns."""
        return self._columns is not None and bool(self._columns.starts)

    def settle(self) -> Iterator[None]:
        """Writes all columns to the table. Yields while there is much to write."""
        if self._columns is not None:
            yield from self._columns.settle()

    def release(self, first: int, last: int) -> Iterator[None]:
        """Writes the columns of slices to the table: of those that start at `first` or later, but
        not after `last`.

        Called before rows are added to these slices. Yields like `settle`.
        """
        if self._columns is not None:
            yield from self._columns.release(
                [start for start in self._columns.starts if first <= start <= last]
            )

    # Adding records.

    def slice(self, start: int, keys: list[Any]) -> MutableMapping[Any, Any]:
        """Returns the mapping from key to accumulator of slice `start`. The caller may change the
        entries of `keys`.

        `release` must have been called for this slice.
        """
        self._note(start)
        # Looked up for each batch, because the backend may replace the mapping.
        return self._table.of(start, keys)

    def fold_columns(
        self,
        values: Any,
        timestamps: Any,
        keys: Any,
        fold: Callable[[int, list[Any], list[Any]], None],
    ) -> Iterator[None]:
        """Adds a batch of columns, slice by slice. Yields like `settle`.

        Calls `fold(start, keys, values)` for slices to which records must be added as rows.
        """
        from aioflow.columns.expressions import NotOnColumns, taken, times_array

        columns, grid = self._columns, self._grid
        if columns is None:
            from aioflow.columns.accumulators import SliceColumns

            columns = self._columns = SliceColumns(
                plan_columns(self._aggregate), self._table.of, self._table.peek
            )
        yield from columns.make_room()
        try:
            codes, inputs = columns.prepare(keys, values)
        except NotOnColumns:
            codes, inputs = None, []
        times = times_array(timestamps)
        for start, which in by_slice(times, grid):
            if codes is not None:
                try:
                    columns.fold(
                        start,
                        codes if which is None else codes[which],
                        inputs,
                        which,
                        new=not self._holds(start),
                    )
                    self._note(start)
                    continue
                except NotOnColumns:
                    pass
            yield from self.release(start, start)
            if which is None:
                fold(start, list(keys), list(values))
            else:
                fold(start, list(taken(keys, which)), list(values.take(which)))

    def _holds(self, start: int) -> bool:
        index = bisect_left(self.starts, start)
        return index < len(self.starts) and self.starts[index] == start

    def _note(self, start: int) -> None:
        """Notes that slice `start` is not empty and is about to change."""
        if start < self._runs_to:
            self.runs.drop(self._number(start))
        starts = self.starts
        # The slice is nearly always the newest one.
        if not starts or starts[-1] != start:
            index = bisect_left(starts, start)
            if index == len(starts) or starts[index] != start:
                starts.insert(index, start)

    def forget(self, below: int) -> None:
        """Drops the slices that begin before `below`, which no window needs any more."""
        starts = self.starts
        while starts and starts[0] < below:
            start = starts.pop(0)
            self._table.drop(start)
            if self._columns is not None:
                self._columns.drop(start)
            self.runs.drop(self._number(start))

    # Reading windows.

    def column_results(self, end: int) -> Iterator[ColumnBatch] | None:
        """Returns the results of the window that ends at `end`, in pieces, if all its contents are
        held as columns.

        Otherwise returns None. Also returns None if the window has enough slices for runs, because
        runs merge in another order.
        """
        if self._columns is None:
            return None
        begin = end - self._grid.size
        starts = self.starts[bisect_left(self.starts, begin) : bisect_left(self.starts, end)]
        return None if len(starts) >= RUNS_FROM else self._columns.results(starts, begin, end)

    def tables_of(self, end: int) -> list[Mapping[Any, Any]]:
        """Returns the tables of the slices of the window that ends at `end`, in order. Call
        `settle` before.
        """
        starts, peek = self.starts, self._table.peek
        begin, stop = bisect_left(starts, end - self._grid.size), bisect_left(starts, end)
        return [peek(start) for start in starts[begin:stop]]

    def cover(self, end: int) -> Generator[None, None, list[Mapping[Any, Any]]]:
        """Returns the tables that make up the window that ends at `end`, in order of time: its
        slices or, if they are many, runs.
        """
        grid, starts = self._grid, self.starts
        yield from self.settle()
        if bisect_left(starts, end) - bisect_left(starts, end - grid.size) < RUNS_FROM:
            tables = self.tables_of(end)
            if (
                not self._aggregate.regroups
                or len(tables) < RUNS_FROM_IN_MEMORY
                or type(tables[0]) is not dict
            ):
                return tables
        self._runs_to = end
        stop = self._number(end)
        return (yield from self.runs.cover(stop - grid.size // grid.width, stop))

    def merged(self, tables: list[Mapping[Any, Any]]) -> Generator[None, None, Mapping[Any, Any]]:
        """Merges `tables`, in order of time, into one table. Yields while there is much to
        merge.
        """
        return (yield from merge_tables(self._aggregate, self._merge_copies, tables))

    def results(self, keys: list[Any], tables: list[Mapping[Any, Any]]) -> list[Any]:
        """Returns the result of each of `keys` over `tables`, which are in order of time."""
        aggregate = self._aggregate
        get_result = aggregate.get_result
        copies = self._merge_copies
        gets = [table.get for table in tables]
        results = []
        for key in keys:
            parts = [held for get in gets if (held := get(key, _ABSENT)) is not _ABSENT]
            results.append(
                get_result(parts[0] if len(parts) == 1 else merge_parts(aggregate, copies, parts))
            )
        return results

    def _number(self, start: int) -> int:
        return (start - self._grid.offset) // self._grid.width

    def _numbered(self, number: int) -> Mapping[Any, Any]:
        return self._table.peek(number * self._grid.width + self._grid.offset)

    def _any_in(self, first: int, stop: int) -> bool:
        starts, width, offset = self.starts, self._grid.width, self._grid.offset
        index = bisect_left(starts, first * width + offset)
        return index < len(starts) and starts[index] < stop * width + offset


def by_slice(times: Any, grid: SliceGrid) -> Iterator[tuple[int, Any]]:
    """For each slice that has records, yields its start and the indices of its records in `times`.

    The slices are in order. None in place of the indices means all records.
    """
    import numpy as np

    width = grid.width
    first, last = grid.slice_start(int(times.min())), grid.slice_start(int(times.max()))
    if first == last:
        yield first, None
    elif last - first == width:
        later = times >= last
        yield first, np.flatnonzero(~later)
        yield last, np.flatnonzero(later)
    else:
        # Comparing bytes is cheap, so for a few slices all records are compared with each slice.
        numbers = (times - first) // width
        few = last - first < BYTE * width
        found = np.flatnonzero(np.bincount(numbers)) if few else np.unique(numbers)
        if few:
            numbers = numbers.astype(np.uint8)
        for number in found.tolist():
            yield first + number * width, np.flatnonzero(numbers == number)


def _is_of_user(aggregate: FoldingAggregate) -> bool:
    if isinstance(aggregate, Agg):
        return any(map(_is_of_user, aggregate.parts.values()))
    return isinstance(aggregate, UserAggregate)
