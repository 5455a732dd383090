"""The slices of one operator, as rows in the table or as columns in front of it, and the merge of
windows from them.

State is one table, slice start -> key -> accumulator. `starts` are the starts of the slices that
are not empty, in order. Batches of columns are added to arrays. The arrays are written to the table
before rows change a slice, and before a snapshot or a query. A window of many slices is covered by
merged runs of slices (`slice_runs`), which a change of a slice drops.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from aioflow.core.elements import MIN_WATERMARK
from aioflow.operators.aggregates import Agg
from aioflow.operators.column_aggregates import plan_columns
from aioflow.operators.folding import FoldingAggregate, UserAggregate
from aioflow.operators.slice_runs import SliceRuns, merge_parts, merge_tables

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from aioflow.columns.accumulators import SliceColumns
    from aioflow.core.column_batch import ColumnBatch
    from aioflow.operators.slice_grid import SliceGrid
    from aioflow.state.backend import StateTable

__all__ = ["SliceStore", "by_slice"]

BYTE = 256

RUNS_FROM = 8
"""Number of slices of a window from which runs of slices cover it, for every aggregate and state
backend.
"""

RUNS_FROM_IN_MEMORY = 3
"""Number of slices from which runs pay for an aggregate that may be merged in any grouping, in
memory.

Five slices of 5,000 keys each cost 0.64 as much. Runs are in memory, but a few slices on disk need
not be. A result that depends on the grouping, like a sum of floats, has to be the same as on
columns, which are merged in order of time.
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
        """Whether the columns hold any data."""
        return self._columns is not None and bool(self._columns.starts)

    def settle(self) -> Iterator[None]:
        """Writes all columns to the table; yields while there is much to write."""
        if self._columns is not None:
            yield from self._columns.settle()

    def release(self, first: int, last: int) -> Iterator[None]:
        """Writes the columns of the slices that begin from `first` to `last` to the table.

        Called before rows are added to them. Yields like `settle`.
        """
        if self._columns is not None:
            yield from self._columns.release(
                [start for start in self._columns.starts if first <= start <= last]
            )

    # Adding records.

    def slice(self, start: int, keys: list[Any]) -> MutableMapping[Any, Any]:
        """Returns the accumulators of slice `start`, in which `keys` may be changed.

        The columns of the slice must have been released.
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

        Slices that need rows are added by `fold(start, keys, values)`.
        """
        import numpy as np

        from aioflow.columns.expressions import NotOnColumns
        from aioflow.columns.stateless import taken

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
        times = np.asarray(timestamps.values if hasattr(timestamps, "values") else timestamps)
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
        """Returns the results of the window that ends at `end`, in pieces, if all of its content is
        held in columns.

        Otherwise returns None. Also returns None if runs would cover the window, because runs merge
        in another order.
        """
        if self._columns is None:
            return None
        begin = end - self._grid.size
        starts = self.starts[bisect_left(self.starts, begin) : bisect_left(self.starts, end)]
        return None if len(starts) >= RUNS_FROM else self._columns.results(starts, begin, end)

    def tables_of(self, end: int) -> list[Mapping[Any, Any]]:
        """Returns the slices of the window that ends at `end`, in order. Call `settle` before."""
        starts, peek = self.starts, self._table.peek
        begin, stop = bisect_left(starts, end - self._grid.size), bisect_left(starts, end)
        return [peek(start) for start in starts[begin:stop]]

    def cover(self, end: int) -> Generator[None, None, list[Mapping[Any, Any]]]:
        """Returns the parts of the window that ends at `end`, in order of time: its slices, or runs
        of slices if they are many.
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
        """Merges `tables`, in order of time, into one. Yields while there is much to merge."""
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
    """Yields for each slice with records its start and the indices of its records in `times`.

    The slices are in order; None stands for all indices.
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
