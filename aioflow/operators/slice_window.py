"""Tumbling and sliding event-time windows that add each record once: to its slice.

A slice is a stretch of time of the greatest common divisor of size and slide, so every window is a whole number of
slices. State is one table, slice start -> key -> accumulator; a window merges its slices when it fires. For the default
trigger, no evictor and an aggregate that can merge; `clock_window` has those of processing time, everything else is
`window.WindowOperator`.

Invariants:

* what is due is due at fixed instants (ends of windows, and ends plus lateness), whether or not anything is stored there.
  Between two of them (`_deadline`) no timestamp changes its class: live, late but allowed, dropped. So a batch is cut
  there and nowhere else, and a batch that lies in one slice and reaches no deadline costs one bulk fold;
* a window fires when the watermark in force reaches `end - 1`, and its results have `end - 2` in force before them: event
  time is continuous. Where more was in force already, that stays;
* keys come out in the order of their first arrival in a slice, earlier slices first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from itertools import compress, islice, repeat
from typing import TYPE_CHECKING, Any

from aioflow.core.column_batch import highest, lowest
from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.errors import StateError, note_once
from aioflow.core.functions import OutputTag, WindowResult
from aioflow.core.keygroups import KeyGroupRange, key_group
from aioflow.operators.aggregates import Agg, resolve_aggregate
from aioflow.operators.column_aggregates import plan_columns, why_rows
from aioflow.operators.folding import FoldingAggregate, UserAggregate
from aioflow.operators.operator import Operator
from aioflow.operators.resumable import ResumableOutput
from aioflow.operators.same_aggregate import check_same_aggregate
from aioflow.operators.slice_grid import SliceGrid
from aioflow.operators.slice_runs import SliceRuns, merge_parts, merge_tables
from aioflow.operators.stateless import describe_place
from aioflow.operators.userfunction import UserFunction, describe_record
from aioflow.operators.windowing import SlidingWindows, TimeWindow, TumblingWindows, window_fn_results
from aioflow.state.backend import require_keyed

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from aioflow.columns.slices import SliceColumns
    from aioflow.core.column_batch import ColumnBatch
    from aioflow.core.functions import AggregateFunction
    from aioflow.core.states import ListState
    from aioflow.state.backend import KeyedStateBackend, StateTable

__all__ = ["SliceWindowOperator"]

SLICES = "window-slices"
"""Name of the table slice start -> key -> accumulator."""

PROGRESS = "window-progress"
"""Name of the union list state of (first key group, last key group, watermark reached) of each subtask."""

RUNS_FROM = 8
"""Slices a window from which on runs of them pay: below, covering it by runs saves fewer merges than making them costs."""

_make_result = partial(tuple.__new__, WindowResult)
_ABSENT = object()


class SliceWindowOperator(Operator):
    """Emits `WindowResult(key, start, end, result)` at `end - 1`, or what `window_fn(key, window, result)` makes of it."""

    _progress: ListState[Any]
    _state: KeyedStateBackend
    _table: StateTable

    def __init__(
        self,
        assigner: TumblingWindows | SlidingWindows,
        aggregate: AggregateFunction[Any, Any, Any],
        *,
        window_fn: Callable[[Any, TimeWindow, Any], Any] | None = None,
        lateness_ms: int = 0,
        late_tag: OutputTag[Any] | None = None,
    ) -> None:
        slide = assigner.slide if isinstance(assigner, SlidingWindows) else assigner.size
        self._grid = SliceGrid(assigner.size, slide, assigner.offset, lateness_ms)
        self._width, self._offset = self._grid.width, self._grid.offset
        self._aggregate = resolve_aggregate(aggregate)
        # `merge` of a user may give back its second argument and change it the next time; the slices are needed again.
        self._merge_copies = _is_of_user(self._aggregate)
        self._window_fn = None if window_fn is None else UserFunction(window_fn, "__call__")
        self._late_tag = late_tag
        self.reads_columns = why_rows(self._aggregate) is None
        self._columns: SliceColumns | None = None  # Made for the first batch of columns.
        self._starts: list[int] = []  # Starts of the slices that hold something, in order.
        self._runs = SliceRuns(self._aggregate, self._merge_copies, self._numbered, self._any_in)
        self._runs_to = MIN_WATERMARK  # Slices from here on are in no run.
        self._out = ResumableOutput()
        self._ahead: list[tuple[KeyGroupRange, int]] = []
        self._watermark = MIN_WATERMARK
        self._deadline = self._live_from = self._late_below = 0
        self._moved_to(MIN_WATERMARK)

    def initialize_state(self) -> None:
        check_same_aggregate(self.ctx, self._aggregate)
        self._progress = self.ctx.operator_state.get_union_list_state(PROGRESS)

    @property
    def aggregate(self) -> FoldingAggregate:
        """What it computes."""
        return self._aggregate

    @property
    def next_due(self) -> int:
        """The watermark from which on it has something to do, whatever comes; above all of them when it holds nothing."""
        if not self._starts:
            return MAX_WATERMARK
        return max(self._deadline, self._grid.first_end(self._starts[0]) - 1)

    def settle_state(self) -> None:
        if self._columns is not None:
            self._columns.settle()

    def snapshot_state(self, checkpoint_id: int) -> None:
        self.settle_state()
        groups = self._state.key_group_range
        self._progress.update([(groups.start, groups.end, self._watermark)])

    async def open(self) -> None:
        self._state = require_keyed(self.ctx.keyed_state, self.ctx.name)
        self._table = self._state.table(SLICES, result=self._aggregate.get_result)
        self._starts = sorted(self._table.namespaces())
        self._restore_progress()
        self._late_dropped = self.ctx.runtime.metrics.counter("numLateRecordsDropped")
        if self._window_fn is not None:
            await self._window_fn.open(self.ctx)

    async def close(self) -> None:
        if self._window_fn is not None:
            await self._window_fn.close()

    # ------------------------------------------------------------------------------------------------------------- input

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        values = batch.values
        if values:
            timestamps, watermarks = batch.timestamps, batch.watermarks
            if timestamps is None or batch.keys is None:
                raise StateError(
                    f"window {self.ctx.name}: a batch without {'keys' if timestamps else 'timestamps'}; event-time "
                    "windows stand after key_by, with a watermark strategy upstream"
                )
            reached = self._watermark if watermarks is None else watermarks[-1]
            least = lowest(timestamps)
            start = least - (least - self._offset) % self._width
            if (
                reached < self._deadline
                and least >= self._live_from
                and highest(timestamps) < start + self._width
                and not self._ahead
            ):
                if type(values) is not list and self.reads_columns:
                    self._fold_columns(values, timestamps, batch.keys)
                else:
                    self._fold(start, batch.keys, values)
            else:
                return self._out.start(self._run(batch), batch.watermark)
        if batch.watermark >= self._deadline:
            return self._out.start(self._run(batch, len(values)), batch.watermark)
        if batch.watermark > self._watermark:
            self._watermark = batch.watermark
        self._out.passed(batch.watermark)
        return empty_batch(self._out.watermark)

    @property
    def has_pending(self) -> bool:
        return self._out.pending

    def resume(self, max_records: int) -> RecordBatch:
        return self._out.resume(max_records)

    def _run(self, batch: RecordBatch, begin: int = 0) -> Iterator[None]:
        """The rest of `batch` from record `begin` on, cut at the deadlines. Yields whenever enough was emitted."""
        values, timestamps, keys, watermarks = batch.values, batch.timestamps, batch.keys, batch.watermarks
        count = len(values)
        while begin < count:
            assert timestamps is not None and keys is not None  # Checked in process_batch.
            if watermarks is None:
                stop = count
            else:
                if watermarks[begin] >= self._deadline:
                    yield from self._advance(watermarks[begin])
                stop = bisect_left(watermarks, self._deadline, begin, count)
            before = None if watermarks is None else watermarks[begin:stop]
            yield from self._add(values[begin:stop], timestamps[begin:stop], keys[begin:stop], before)
            begin = stop
        if batch.watermark >= self._deadline:
            yield from self._advance(batch.watermark)
        elif batch.watermark > self._watermark:
            self._watermark = batch.watermark

    def _moved_to(self, watermark: int) -> None:
        grid = self._grid
        self._watermark = watermark
        self._deadline = grid.deadline(watermark)
        self._live_from = grid.live_from(watermark)
        self._late_below = grid.late_below(watermark)
        if self._ahead:
            self._ahead = [(groups, reached) for groups, reached in self._ahead if reached > watermark]

    def _restore_progress(self) -> None:
        """Go on where the former subtasks were: no window fires twice, and what was late stays late.

        They had reached one watermark, as a barrier that is aligned cuts all of them at the same. If not, this subtask goes
        on at the lowest, and `_ahead` holds the key groups that had got further, until it has caught up with them. Those that were
        at the end of time begin anew: a job that was drained goes on behind it.
        """
        own = self._state.key_group_range
        found = [(own.intersection(KeyGroupRange(first, last)), reached) for first, last, reached in self._progress.get()]
        shared = [(groups, reached) for groups, reached in found if groups is not None and reached != MAX_WATERMARK]
        if shared:
            self._ahead = shared
            self._moved_to(min(reached for _, reached in shared))

    def _reached(self, key: Any) -> int:
        """The watermark that the group of `key` had reached before a restore; the present one if that is not lower."""
        group = key_group(key, self._state.max_parallelism)
        return max([self._watermark, *(reached for groups, reached in self._ahead if group in groups)])

    # --------------------------------------------------------------------------------------------------------------- add

    def _add(
        self, values: list[Any], timestamps: list[int], keys: list[Any], watermarks: list[int] | None
    ) -> Iterator[None]:
        """Add records between which nothing is due."""
        live_from = self._live_from
        least = lowest(timestamps)
        if type(values) is not list and self.reads_columns and not self._ahead:
            if least < live_from:
                values, timestamps, keys = yield from self._add_late_rows(values, timestamps, keys, watermarks)
            if len(values):
                self._fold_columns(values, timestamps, keys)
            return
        if least < live_from or self._ahead:
            live = [timestamp >= live_from for timestamp in timestamps]
            if self._ahead:
                live = [flag and self._reached(key) == self._watermark for flag, key in zip(live, keys, strict=True)]
            for i, flag in enumerate(live):
                if not flag:
                    # After a restore the input may still be behind what was reached.
                    watermark = self._watermark if watermarks is None else max(watermarks[i], self._watermark)
                    yield from self._add_late(values[i], timestamps[i], keys[i], watermark)
            values, keys = list(compress(values, live)), list(compress(keys, live))
            timestamps = list(compress(timestamps, live))
            if not timestamps:
                return
            least = min(timestamps)
        width, fold = self._width, self._fold
        start, last = self._grid.slice_start(least), self._grid.slice_start(highest(timestamps))
        if start == last:
            fold(start, keys, values)
            return
        if last - start == width:
            # Out-of-order records around a boundary are the common case: two slices by two C loops each.
            later = [t >= last for t in timestamps]
            earlier = [not flag for flag in later]
            for slice_start, chosen in ((start, earlier), (last, later)):
                fold(slice_start, list(compress(keys, chosen)), list(compress(values, chosen)))
            return
        groups: dict[int, tuple[list[Any], list[Any]]] = {}
        offset = self._offset
        for timestamp, key, value in zip(timestamps, keys, values, strict=True):
            slice_start = timestamp - (timestamp - offset) % width
            group = groups.get(slice_start)
            if group is None:
                group = groups[slice_start] = ([], [])
            group[0].append(key)
            group[1].append(value)
        for slice_start, (slice_keys, slice_values) in groups.items():
            fold(slice_start, slice_keys, slice_values)

    def _add_late_rows(
        self, values: Any, timestamps: Any, keys: Any, watermarks: Any
    ) -> Generator[None, None, tuple[Any, Any, Any]]:
        """Add those of a batch of columns that may be late, one by one. Gives the others."""
        import numpy as np

        from aioflow.columns.event_time import taken

        live = np.asarray(timestamps.values if hasattr(timestamps, "values") else timestamps) >= self._live_from
        for i in np.flatnonzero(~live).tolist():
            # After a restore the input may still be behind what was reached.
            watermark = self._watermark if watermarks is None else max(watermarks[i], self._watermark)
            yield from self._add_late(values[i], timestamps[i], keys[i], watermark)
        others = np.flatnonzero(live)
        return values.take(others), taken(timestamps, others), taken(keys, others)

    def _fold_columns(self, values: Any, timestamps: Any, keys: Any) -> None:
        """Add a batch of columns, all of it live, slice by slice; as rows what has to be."""
        import numpy as np

        from aioflow.columns.event_time import taken
        from aioflow.columns.expressions import NotOnColumns

        columns = self._columns
        if columns is None:
            from aioflow.columns.slices import SliceColumns

            columns = self._columns = SliceColumns(plan_columns(self._aggregate), self._table.of, self._table.peek)
        try:
            codes, inputs = columns.prepare(keys, values)
        except NotOnColumns:
            codes, inputs = None, []
        times = np.asarray(timestamps.values if hasattr(timestamps, "values") else timestamps)
        # Most batches are of one slice or two, for which to compare costs less than a division for each record.
        first, last = self._grid.slice_start(int(times.min())), self._grid.slice_start(int(times.max()))
        starts = [first, last] if last - first <= self._width else np.unique(times - (times - self._offset) % self._width).tolist()
        for start in dict.fromkeys(starts):
            if first == last:
                which = None
            elif start == last:
                which = np.flatnonzero(times >= last)
            else:
                which = np.flatnonzero((times >= start) & (times < start + self._width) if start > first else times < first + self._width)
            if codes is not None:
                try:
                    columns.fold(start, codes if which is None else codes[which], inputs, which, new=start not in self._known(start))
                    self._note(start)
                    continue
                except NotOnColumns:
                    pass
            if which is None:
                self._fold(start, list(keys), list(values))
            else:
                self._fold(start, list(taken(keys, which)), list(values.take(which)))

    def _known(self, start: int) -> tuple[int, ...]:
        """`start` if that slice holds something."""
        index = bisect_left(self._starts, start)
        return (start,) if index < len(self._starts) and self._starts[index] == start else ()

    def _add_late(self, value: Any, timestamp: int, key: Any, watermark: int) -> Iterator[None]:
        """One record that may be late for windows: drop it if it is for all of them, else re-fire those that have fired."""
        reached, late_below = watermark, self._late_below
        if self._ahead:
            reached = max(watermark, self._reached(key))
            late_below = self._grid.late_below(reached)
        if timestamp < late_below:
            self._late_dropped.inc(1)
            if self._late_tag is not None:
                self.ctx.side_output(self._late_tag, value, timestamp, watermark)
            return
        start = self._grid.slice_start(timestamp)
        self._fold(start, [key], [value])
        yield from self._refire(key, start, reached, watermark)

    def _refire(self, key: Any, start: int, reached: int, watermark: int) -> Iterator[None]:
        """Emit again the windows of `key` with slice `start` that had fired at `reached`, but may still change."""
        grid = self._grid
        end = max(grid.first_end(start), grid.next_end(reached - grid.lateness))
        while end <= grid.last_end(start) and end - 1 <= reached:
            tables = self._tables_of(end)
            self._emit(end, watermark, [key], self._results([key], tables))
            if self._out.full:
                yield
            end += grid.slide

    def _fold(self, start: int, keys: list[Any], values: list[Any]) -> None:
        """Add records to slice `start`."""
        try:
            self._aggregate.fold(self._slice(start, keys), keys, values)
        except Exception as error:
            self._find_culprit(error, keys, values)
            raise

    def _find_culprit(self, error: Exception, keys: list[Any], values: list[Any]) -> None:
        """Name the record that makes the fold fail, found by folding each alone; without luck, the first and the last."""
        for key, value in zip(keys, values, strict=True):
            try:
                self._aggregate.fold({}, [key], [value])
            except type(error):
                note_once(error, f"in {describe_place(self.ctx)}, at record {describe_record(value)} of key {describe_record(key)}")
                return
            except Exception:  # noqa: BLE001  # Another error than the one that is reported: not the culprit.
                continue
        between = f"{describe_record(values[0])} and {describe_record(values[-1])}"
        note_once(error, f"in {describe_place(self.ctx)}, between records {between}")

    def _slice(self, start: int, keys: list[Any]) -> MutableMapping[Any, Any]:
        """What slice `start` holds, to change `keys` in it."""
        self._note(start)
        if self._columns is not None:
            self._columns.release(start)
        # Asked anew for each batch, as the backend may put another mapping in its place.
        return self._table.of(start, keys)

    def _note(self, start: int) -> None:
        """Slice `start` holds something, and is about to be changed."""
        if start < self._runs_to:
            self._runs.drop((start - self._offset) // self._width)
        starts = self._starts
        # Nearly always the newest one.
        if not starts or starts[-1] != start:
            index = bisect_left(starts, start)
            if index == len(starts) or starts[index] != start:
                starts.insert(index, start)

    # -------------------------------------------------------------------------------------------------------------- fire

    def _advance(self, watermark: int) -> Iterator[None]:
        """Fire the windows that end up to `watermark`, in order, and forget the slices that no window needs any more."""
        grid, starts = self._grid, self._starts
        end = grid.next_end(self._watermark)
        while end - 1 <= watermark:
            index = bisect_left(starts, end - grid.size)
            if index == len(starts):
                break
            if starts[index] >= end:
                # Nothing is stored in this window: go to the first one that holds the next slice.
                end = grid.first_end(starts[index])
                continue
            yield from self._fire(end)
            # Everything up to here is done: should a snapshot or an error come now, it finds this window fired.
            self._moved_to(end - 1)
            end += grid.slide
        self._moved_to(watermark)
        while starts and starts[0] < self._late_below:
            start = starts.pop(0)
            self._table.drop(start)
            if self._columns is not None:
                self._columns.drop(start)
            self._runs.drop((start - self._offset) // self._width)

    def _fire(self, end: int) -> Iterator[None]:
        """All results of the window that ends at `end`."""
        if self._columns is not None and (results := self._column_results(end)) is not None:
            if not self._out.empty:
                yield
            self._out.add_columns(results, end - 1, end - 2)
            yield
            return
        tables = yield from self._cover(end)
        aggregate, out = self._aggregate, self._out
        if len(tables) > 1 and not self._ahead and type(tables[0]) is dict:  # A window on disk need not fit into memory.
            tables = [(yield from merge_tables(aggregate, self._merge_copies, tables))]
        for j, table in enumerate(tables):
            earlier = tables[:j]
            later = tables[j:]
            items = iter(table.items())
            while chunk := list(islice(items, max(1, out.room))):
                if len(tables) == 1 and not self._ahead:
                    self._emit(end, end - 2, [key for key, _ in chunk], aggregate.results([held for _, held in chunk]))
                else:
                    keys = _not_in([key for key, _ in chunk], earlier) if earlier else [key for key, _ in chunk]
                    if self._ahead:
                        keys = [key for key in keys if self._reached(key) < end - 1]
                    self._emit(end, end - 2, keys, self._results(keys, later))
                if out.full:
                    yield

    def _column_results(self, end: int) -> ColumnBatch | None:
        """The results of the window as columns, if they are all that is needed. Runs of slices are merged in another order."""
        assert self._columns is not None
        starts = self._starts[bisect_left(self._starts, end - self._grid.size) : bisect_left(self._starts, end)]
        if self._window_fn is not None or self._ahead or len(starts) >= RUNS_FROM:
            return None
        return self._columns.results(starts, end - self._grid.size, end)

    def _cover(self, end: int) -> Generator[None, None, list[Mapping[Any, Any]]]:
        """What the window that ends at `end` is merged from, in order of time: its slices, or runs of them if they are many."""
        grid, starts = self._grid, self._starts
        count = grid.size // grid.width
        if bisect_left(starts, end) - bisect_left(starts, end - grid.size) < RUNS_FROM:
            return self._tables_of(end)
        self._runs_to = end
        self.settle_state()
        stop = (end - grid.offset) // grid.width
        return (yield from self._runs.cover(stop - count, stop))

    def _tables_of(self, end: int) -> list[Mapping[Any, Any]]:
        """The slices of the window that ends at `end`, in order."""
        starts, peek = self._starts, self._table.peek
        self.settle_state()
        begin, stop = bisect_left(starts, end - self._grid.size), bisect_left(starts, end)
        return [peek(start) for start in starts[begin:stop]]

    def _numbered(self, number: int) -> Mapping[Any, Any]:
        return self._table.peek(number * self._width + self._offset)

    def _any_in(self, first: int, stop: int) -> bool:
        starts, width, offset = self._starts, self._width, self._offset
        index = bisect_left(starts, first * width + offset)
        return index < len(starts) and starts[index] < stop * width + offset

    def _results(self, keys: list[Any], tables: list[Mapping[Any, Any]]) -> list[Any]:
        """The result of each of `keys` over `tables`, which are in order of time."""
        aggregate = self._aggregate
        get_result = aggregate.get_result
        copies = self._merge_copies
        gets = [table.get for table in tables]
        results = []
        for key in keys:
            parts = [held for get in gets if (held := get(key, _ABSENT)) is not _ABSENT]
            results.append(get_result(parts[0] if len(parts) == 1 else merge_parts(aggregate, copies, parts)))
        return results

    def _emit(self, end: int, watermark: int, keys: list[Any], values: list[Any]) -> None:
        start = end - self._grid.size
        if self._window_fn is not None:
            call, window, add = self._window_fn.call, TimeWindow(start, end), self._out.add
            for key, value in zip(keys, values, strict=True):
                for made in window_fn_results(call(key, window, value)):
                    add(made, end - 1, watermark)
            return
        results = map(_make_result, zip(keys, repeat(start), repeat(end), values, strict=False))
        self._out.add_all(results, len(keys), end - 1, watermark)


def _not_in(keys: list[Any], tables: list[Mapping[Any, Any]]) -> list[Any]:
    """Those of `keys` that no table holds."""
    found = []
    for key in keys:
        for table in tables:
            if key in table:
                break
        else:
            found.append(key)
    return found


def _is_of_user(aggregate: FoldingAggregate) -> bool:
    if isinstance(aggregate, Agg):
        return any(map(_is_of_user, aggregate.parts.values()))
    return isinstance(aggregate, UserAggregate)
