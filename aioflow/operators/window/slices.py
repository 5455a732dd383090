"""Tumbling and sliding event-time windows that add each record once: to its slice.

The length of a slice is the greatest common divisor of size and slide, so every window is a whole
number of slices. `slice_store` keeps the slices; a window merges its slices when it fires. This
needs the default trigger, no evictor and an aggregate that can merge. `WindowOperator` implements
all other windows.

Invariants:

* work is due at fixed instants: the ends of windows, and the ends plus lateness. `_deadline` is the
  next of them. Between two instants no timestamp changes its class: live, late but allowed, or
  dropped. So a batch is divided only at these instants, and a batch that lies in one slice and
  reaches no deadline costs one bulk fold;
* a window fires when the watermark in force reaches `end - 1`. The watermark before its results is
  `end - 2`, as if event time were continuous, or the last watermark if that is higher;
* keys are emitted in the order of their first arrival in a slice, earlier slices first. A snapshot
  keeps that order within each key group only: in a window that was open at a restore, the earlier
  keys are emitted group by group.

A checkpoint may interrupt a window between two of its keys. The checkpoint lists the keys that the
window has fired (`FIRED`). After the restore these keys are ahead of the watermark, and the window
fires only the others.

Windows of processing time (`ClockWindowOperator`) use slices too, so that one call adds a whole
batch with all its keys.

The clock takes the place of event time: all records of a batch arrive at one instant, and no record
is ever late. One timer of the operator serves all keys; it fires every window that has ended.
Results have the time `end - 1`, and the watermark of the records is in force for them.

After a restore the clock may be behind, because it is the clock of another machine, or because it
was wrong before. A window that has fired stays closed, and no window may have to wait until the
clock has caught up. So the operator's own time continues where it was, at the pace of the clock.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from itertools import chain, compress, islice
from typing import TYPE_CHECKING, Any

from aioflow.core.column_batch import first_not_below, highest, lowest
from aioflow.core.elements import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    RecordBatch,
    TimeWindow,
    empty_batch,
    last_instant,
)
from aioflow.core.errors import StateError, note_once
from aioflow.core.functions import OutputTag
from aioflow.core.keygroups import KeyGroupRange, key_group
from aioflow.operators.aggregate.functions import explain_failure
from aioflow.operators.aggregate.local import at_record, between_records, why_rows
from aioflow.operators.operator import Unprocessed
from aioflow.operators.results import flush_in_slices
from aioflow.operators.stateless import describe_place
from aioflow.operators.window.aggregating import AddingWindowOperator
from aioflow.operators.window.assigners import (
    SliceGrid,
    SlidingWindows,
    TumblingWindows,
    window_results,
)
from aioflow.operators.window.slice_store import SliceStore
from aioflow.state.backend import INTERNAL_PREFIX

if TYPE_CHECKING:
    from aioflow.core.functions import AggregateFunction
    from aioflow.core.states import ListState
    from aioflow.operators.operator import ProcessingTimeTimer
    from aioflow.state.backend import StateTable

__all__ = ["ClockWindowOperator", "SliceWindowOperator", "window_grid"]

SLICES = "window-slices"
"""Name of the table that maps slice start -> key -> accumulator."""

PROGRESS = "window-progress"
"""Name of the union list state with (first key group, last key group, watermark) of each
subtask.
"""

FIRED = f"{INTERNAL_PREFIX}window-fired"
"""Name of the table that maps window end -> key -> True.

The table lists the keys that a window had fired when a checkpoint interrupted the window.
"""


def window_grid(assigner: TumblingWindows | SlidingWindows, lateness_ms: int) -> SliceGrid:
    """Returns the grid that computes the bounds of the slices and windows of `assigner`."""
    slide = assigner.slide if isinstance(assigner, SlidingWindows) else assigner.size
    return SliceGrid(assigner.size, slide, assigner.offset, lateness_ms)


class SliceWindowOperator(AddingWindowOperator):
    """An event-time window operator that emits `WindowResult(key, start, end, result)` with
    timestamp `end - 1`.

    With `window_fn`, emits the results of `window_fn(key, window, result)` instead.
    """

    _progress: ListState[Any]
    _slices: SliceStore
    _fired: StateTable | None = None
    """The table `FIRED`; None before a checkpoint first interrupts a window."""
    _fired_ends: tuple[int, ...] = ()
    """Ends of the windows that checkpoints had interrupted before a restore, latest first.

    The keys that `FIRED` lists for these windows are ahead of the watermark.
    """
    _firing: int | None = None
    """End of the window that fires now; None if no window fires."""

    def __init__(
        self,
        assigner: TumblingWindows | SlidingWindows,
        aggregate: AggregateFunction[Any, Any, Any],
        *,
        window_fn: Callable[[Any, TimeWindow, Any], Any] | None = None,
        lateness_ms: int = 0,
        late_tag: OutputTag[Any] | None = None,
    ) -> None:
        super().__init__(aggregate, window_fn, late_tag)
        self._grid = window_grid(assigner, lateness_ms)
        self._width, self._offset = self._grid.width, self._grid.offset
        self.reads_columns = why_rows(self._aggregate) is None
        self._ahead: list[tuple[KeyGroupRange, int]] = []
        self._given: list[Sequence[Any]] = []
        """Keys that the window `_firing` has fired and `FIRED` does not list yet."""
        self._watermark = MIN_WATERMARK
        self._deadline = self._live_from = self._late_below = 0
        self._moved_to(MIN_WATERMARK)

    def initialize_state(self) -> None:
        super().initialize_state()
        self._progress = self.ctx.operator_state.get_union_list_state(PROGRESS)

    @property
    def next_due(self) -> int:
        """The watermark at which the window next has work to do without further input.

        The value is MAX_WATERMARK if there are no records.
        """
        starts = self._slices.starts
        return (
            max(self._deadline, last_instant(self._grid.first_end(starts[0])))
            if starts
            else MAX_WATERMARK
        )

    def settle_state(self) -> None:
        for _ in self._slices.settle():
            pass

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        groups = self._state.key_group_range
        self._progress.update([(groups.start, groups.end, self._watermark)])
        return flush_in_slices(chain(self._slices.settle(), self._list_fired()))

    def _list_fired(self) -> Iterator[None]:
        """Adds to the table `FIRED` the keys that the interrupted window `_firing` has fired."""
        end, given = self._firing, self._given
        if end is None:
            return
        while given:
            keys = list(given.pop())
            if self._fired is None:
                self._fired = self._state.table(FIRED)
            self._fired.of(end, keys).update(dict.fromkeys(keys, True))
            yield

    async def open(self) -> None:
        await super().open()
        table = self._state.table(SLICES, result=self._aggregate.get_result)
        self._slices = SliceStore(table, self._grid, self._aggregate)
        self._restore_progress()
        if FIRED in self._state.names():
            self._fired = self._state.table(FIRED)
            self._fired_ends = tuple(sorted(self._fired.namespaces(), reverse=True))
            self._moved_to(self._watermark)

    @property
    def _is_ahead(self) -> bool:
        """Whether some keys have fired windows that the watermark has not reached yet, after a
        restore.
        """
        return bool(self._ahead or self._fired_ends)

    # Input.

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        values = batch.values
        if values:
            timestamps, watermarks = batch.timestamps, batch.watermarks
            if timestamps is None or batch.keys is None:
                raise self._unfit(batch)
            self._fold_by(batch)
            reached = self._watermark if watermarks is None else watermarks[-1]
            least, latest = lowest(timestamps), highest(timestamps)
            start = least - (least - self._offset) % self._width
            is_plain = (
                type(values) is list or not self.reads_columns
            ) and not self._slices.on_columns
            if (
                is_plain
                and reached < self._deadline
                and least >= self._live_from
                and latest < start + self._width
                and not self._is_ahead
            ):
                self._fold(start, batch.keys, values)
            else:
                self._batch, self._position = batch, 0
                return self._out.start(self._run(batch, least, latest), batch.watermark)
        if batch.watermark >= self._deadline:
            self._batch, self._position = batch, len(values)
            return self._out.start(self._advance(batch.watermark), batch.watermark)
        if batch.watermark > self._watermark:
            self._watermark = batch.watermark
        self._out.passed(batch.watermark)
        return empty_batch(self._out.watermark)

    def _run(self, batch: RecordBatch, least: int, latest: int) -> Iterator[None]:
        """Processes `batch`, divided where windows fire. `least` and `latest` are its lowest and
        its highest timestamp.

        Yields whenever enough results were emitted.
        """
        watermarks, begin, count = batch.watermarks, 0, len(batch.values)
        while begin < count:
            if watermarks is None:
                stop = count
            else:
                if watermarks[begin] >= self._deadline:
                    self._position = begin
                    yield from self._advance(watermarks[begin])
                stop = first_not_below(watermarks, self._deadline, begin, count)
            if stop - begin == count:
                yield from self._add(batch, least, latest)
            else:
                part = batch.slice(begin, stop)
                assert part.timestamps is not None  # Checked in process_batch.
                yield from self._add(part, lowest(part.timestamps), highest(part.timestamps))
            begin = stop
        self._position = count
        if batch.watermark >= self._deadline:
            yield from self._advance(batch.watermark)
        elif batch.watermark > self._watermark:
            self._watermark = batch.watermark

    @property
    def _event_time_reached(self) -> int:
        return self._watermark

    def _moved_to(self, watermark: int) -> None:
        grid = self._grid
        self._watermark = watermark
        self._deadline = grid.deadline(watermark)
        self._live_from = grid.live_from(watermark)
        self._late_below = grid.late_below(watermark)
        if self._ahead:
            self._ahead = [
                (groups, reached) for groups, reached in self._ahead if reached > watermark
            ]
        if self._fired is not None:
            for end in self._fired.namespaces():
                if last_instant(end) <= watermark:
                    self._fired.drop(end)
            self._fired_ends = tuple(
                end for end in self._fired_ends if last_instant(end) > watermark
            )

    def _restore_progress(self) -> None:
        """Continues at the progress of the former subtasks, so that no window fires twice and late
        records stay late.

        With aligned barriers the former subtasks had all reached the same watermark. Otherwise this
        subtask continues at the lowest of their watermarks. `_ahead` holds the key groups with a
        higher watermark until this subtask has reached it. Key groups at MAX_WATERMARK start again
        without a watermark, because a drained job may continue with new input.
        """
        own = self._state.key_group_range
        found = [
            (own.intersection(KeyGroupRange(first, last)), reached)
            for first, last, reached in self._progress.get()
        ]
        shared = [
            (groups, reached)
            for groups, reached in found
            if groups is not None and reached != MAX_WATERMARK
        ]
        if shared:
            self._ahead = shared
            self._moved_to(min(reached for _, reached in shared))

    def _reached(self, key: Any) -> int:
        """Returns the watermark up to which the windows of `key` have fired.

        After a restore this may be higher than the present watermark.
        """
        least, fired = self._watermark, self._fired
        for end in self._fired_ends:
            if fired is not None and key in fired.peek(end):
                least = max(least, last_instant(end))
                break
        if not self._ahead:
            return least
        group = key_group(key, self._state.max_parallelism)
        return max([least, *(reached for groups, reached in self._ahead if group in groups)])

    # Adding records.

    def _add(self, batch: RecordBatch, least: int, latest: int) -> Iterator[None]:
        """Adds the records of `batch`, between which no work is due.

        `least` and `latest` are the lowest and the highest timestamp.
        """
        values, timestamps, keys, watermarks = (
            batch.values,
            batch.timestamps,
            batch.keys,
            batch.watermarks,
        )
        assert timestamps is not None and keys is not None  # Checked in process_batch.
        live_from = self._live_from
        if type(values) is not list and self.reads_columns and not self._is_ahead:
            if least < live_from:
                values, timestamps, keys = yield from self._add_late_rows(
                    values, timestamps, keys, watermarks
                )
            if len(values):
                yield from self._slices.fold_columns(values, timestamps, keys, self._fold)
            return
        if least < live_from or self._is_ahead:
            values, timestamps, keys = yield from self._add_late_records(
                values, timestamps, keys, watermarks
            )
            if not timestamps:
                return
            least, latest = min(timestamps), max(timestamps)
        width, fold = self._width, self._fold
        start, last = self._grid.slice_start(least), self._grid.slice_start(latest)
        yield from self._slices.release(start, last)
        if start == last:
            fold(start, keys, values)
            return
        if last - start == width:
            # Out-of-order records around a boundary are the common case.
            parted = _parted(keys, timestamps, last)
            for slice_start, slice_keys, slice_values in zip(
                (start, last),
                parted,
                parted if values is keys else _parted(values, timestamps, last),
                strict=True,
            ):
                fold(slice_start, slice_keys, slice_values)
            return
        self._fold_by_slice(values, timestamps, keys)

    def _fold_by_slice(
        self, values: Sequence[Any], timestamps: Sequence[int], keys: Sequence[Any]
    ) -> None:
        """Adds records of any number of slices, all of which are in memory."""
        groups: dict[int, tuple[list[Any], list[Any]]] = {}
        width, offset = self._width, self._offset
        for timestamp, key, value in zip(timestamps, keys, values, strict=True):
            slice_start = timestamp - (timestamp - offset) % width
            group = groups.get(slice_start)
            if group is None:
                group = groups[slice_start] = ([], [])
            group[0].append(key)
            group[1].append(value)
        for slice_start, (slice_keys, slice_values) in groups.items():
            self._fold(slice_start, slice_keys, slice_values)

    def _add_late_records(
        self, values: Any, timestamps: Any, keys: Any, watermarks: Any
    ) -> Generator[None, None, tuple[list[Any], list[int], list[Any]]]:
        """Adds those records of a batch that may be late, one by one. Returns (values, timestamps,
        keys) of the others.
        """
        live_from = self._live_from
        live = [timestamp >= live_from for timestamp in timestamps]
        if self._is_ahead:
            live = [
                flag and self._reached(key) == self._watermark
                for flag, key in zip(live, keys, strict=True)
            ]
        for i, flag in enumerate(live):
            if not flag:
                # After a restore, the input may be behind the event time that was reached.
                watermark = (
                    self._watermark if watermarks is None else max(watermarks[i], self._watermark)
                )
                yield from self._add_late(values[i], timestamps[i], keys[i], watermark)
        return (
            list(compress(values, live)),
            list(compress(timestamps, live)),
            list(compress(keys, live)),
        )

    def _add_late_rows(
        self, values: Any, timestamps: Any, keys: Any, watermarks: Any
    ) -> Generator[None, None, tuple[Any, Any, Any]]:
        """Does the same as `_add_late_records` for a batch of columns."""
        import numpy as np

        from aioflow.columns.expressions import taken, times_array

        live = times_array(timestamps) >= self._live_from
        for i in np.flatnonzero(~live).tolist():
            # After a restore, the input may be behind the event time that was reached.
            watermark = (
                self._watermark if watermarks is None else max(watermarks[i], self._watermark)
            )
            yield from self._add_late(values[i], timestamps[i], keys[i], watermark)
        others = np.flatnonzero(live)
        return values.take(others), taken(timestamps, others), taken(keys, others)

    def _add_late(self, value: Any, timestamp: int, key: Any, watermark: int) -> Iterator[None]:
        """Adds one record that may be late. Its windows that have fired already fire again.

        A record that is late for all its windows is dropped.
        """
        reached, late_below = watermark, self._late_below
        if self._is_ahead:
            reached = max(watermark, self._reached(key))
            late_below = self._grid.late_below(reached)
        if timestamp < late_below:
            self._drop_late(value, timestamp, watermark)
            return
        start = self._grid.slice_start(timestamp)
        yield from self._slices.release(start, start)
        self._fold(start, [key], [value])
        yield from self._refire(key, start, reached, watermark)

    def _refire(self, key: Any, start: int, reached: int, watermark: int) -> Iterator[None]:
        """Emits again the results of `key` for the windows that contain slice `start` and had fired
        when event time was `reached`.

        Windows beyond their lateness are left out.
        """
        grid = self._grid
        yield from self._slices.settle()
        end = max(grid.first_end(start), grid.next_end(reached - grid.lateness))
        while end <= grid.last_end(start) and last_instant(end) <= reached:
            self._emit(
                end, watermark, [key], self._slices.results([key], self._slices.tables_of(end))
            )
            if self._out.full:
                yield
            end += grid.slide

    def _fold(self, start: int, keys: list[Any], values: list[Any]) -> None:
        """Adds records to slice `start`."""
        try:
            self._folding.fold(self._slices.slice(start, keys), keys, values)
        except Exception as error:
            self._find_culprit(error, keys, values)
            raise

    def _find_culprit(self, error: Exception, keys: list[Any], values: list[Any]) -> None:
        """Adds a note to `error` that names the record for which the fold fails, found by folding
        each record alone.

        If no record fails alone, the note names the first and the last record.
        """
        taken = self._folding is not self._aggregate
        for key, value in zip(keys, values, strict=True):
            try:
                self._folding.fold({}, [key], [value])
            except type(error):
                explain_failure(self._folding, error, value)
                note_once(
                    error, f"in {describe_place(self.ctx)}, {at_record(value, key, taken=taken)}"
                )
                return
            # A different error, so this record is not the cause.
            except Exception:  # noqa: BLE001
                continue
        note_once(error, f"in {describe_place(self.ctx)}, {between_records(values, taken=taken)}")

    # Firing.

    def _advance(self, watermark: int) -> Iterator[None]:
        """Fires the windows that `watermark` has passed, in order, and drops slices that are no
        longer needed.
        """
        grid, starts, out = self._grid, self._slices.starts, self._out
        end = grid.next_end(self._watermark)
        while last_instant(end) <= watermark:
            index = bisect_left(starts, end - grid.size)
            if index == len(starts):
                break
            if starts[index] >= end:
                # This window is empty: continue with the first one that contains the next slice.
                end = grid.first_end(starts[index])
                continue
            pieces = out.pieces
            self._firing = end
            yield from self._fire(end)
            self._firing = None
            self._given.clear()
            # Everything up to here is done, so a snapshot taken now counts this window as fired.
            self._moved_to(last_instant(end))
            if out.pieces != pieces:  # Many small windows share a piece.
                self._at_rest = True
                yield
                self._at_rest = False
            end += grid.slide
        self._moved_to(watermark)
        self._slices.forget(self._late_below)

    def _fire(self, end: int) -> Iterator[None]:
        """Emits all results of the window that ends at `end`."""
        slices, aggregate, out = self._slices, self._aggregate, self._out
        # A window function, or keys that are ahead, need each result.
        pieces = (
            slices.column_results(end) if self._window_fn is None and not self._is_ahead else None
        )
        if pieces is not None:
            for piece in pieces:
                if not out.empty:
                    yield
                out.add_columns(piece, last_instant(end), last_instant(end) - 1)
                yield
            return
        parts = tables = yield from slices.cover(end)
        if len(tables) > 1 and not self._is_ahead and type(tables[0]) is dict:
            # A window on disk need not fit into memory.
            tables = [(yield from slices.merged(tables))]
        out.tried(len(parts))
        # A table on disk cannot be read on after a checkpoint.
        can_rest = all(type(table) is dict for table in tables)
        if len(tables) == 1 and not self._is_ahead and type(tables[0]) is dict:
            yield from self._fire_table(end, tables[0], can_rest)
            return
        for j, table in enumerate(tables):
            earlier = tables[:j]
            later = tables[j:]
            items = iter(table.items())
            while chunk := list(islice(items, max(1, out.room))):
                if len(tables) == 1 and not self._is_ahead:
                    keys = [key for key, _ in chunk]
                    self._emit(
                        end,
                        last_instant(end) - 1,
                        keys,
                        aggregate.results([held for _, held in chunk]),
                    )
                else:
                    keys = (
                        _not_in([key for key, _ in chunk], earlier)
                        if earlier
                        else [key for key, _ in chunk]
                    )
                    if self._is_ahead:
                        keys = [key for key in keys if self._reached(key) < last_instant(end)]
                    self._emit(end, last_instant(end) - 1, keys, slices.results(keys, later))
                self._given.append(keys)
                out.tried(len(chunk))
                if out.full:
                    yield from self._rest(can_rest)

    def _fire_table(self, end: int, table: dict[Any, Any], can_rest: bool) -> Iterator[None]:
        """Emits the results of the window that ends at `end`, whose accumulators are all in
        `table`.

        `can_rest` tells whether a checkpoint can be taken between two keys.
        """
        out, results = self._out, self._aggregate.results
        # Keys and accumulators are kept separately, because splitting pairs costs three times as
        # much.
        keys_left, held_left = iter(table), iter(table.values())
        while keys := list(islice(keys_left, max(1, out.room))):
            self._emit(end, last_instant(end) - 1, keys, results(islice(held_left, len(keys))))
            self._given.append(keys)
            if out.full:
                yield from self._rest(can_rest)

    def _rest(self, can_rest: bool) -> Iterator[None]:
        """Yields once. If `can_rest`, a checkpoint can store the keys that have not fired at this
        yield.
        """
        self._at_rest = can_rest
        yield
        self._at_rest = False

    def _emit(self, end: int, watermark: int, keys: list[Any], values: list[Any]) -> None:
        start = end - self._grid.size
        if self._window_fn is not None:
            self._out.tried(len(keys))
            self._emit_made(self._window_fn.call, TimeWindow(start, end), watermark, keys, values)
            return
        results = window_results(keys, start, end, values)
        self._out.add_all(results, len(keys), last_instant(end), watermark)


def _parted(
    items: Sequence[Any], timestamps: Sequence[int], instant: int
) -> tuple[list[Any], list[Any]]:
    """Returns two lists: the `items` with timestamps before `instant`, and the other items.

    Flags and `itertools.compress` would take twice as long.
    """
    earlier: list[Any] = []
    later: list[Any] = []
    for item, timestamp in zip(items, timestamps, strict=True):
        if timestamp < instant:
            earlier.append(item)
        else:
            later.append(item)
    return earlier, later


def _not_in(keys: list[Any], tables: list[Mapping[Any, Any]]) -> list[Any]:
    """Returns the `keys` that no table contains."""
    found = []
    for key in keys:
        for table in tables:
            if key in table:
                break
        else:
            found.append(key)
    return found


logger = logging.getLogger(__name__)


class ClockWindowOperator(SliceWindowOperator):
    """A processing-time window operator that emits `WindowResult(key, start, end, result)`, or the
    output of `window_fn` for it.

    A window fires once the clock has reached `end`.
    """

    _timer: ProcessingTimeTimer | None = None
    _event_time = MIN_WATERMARK
    """The watermark of the input."""
    _lead = 0
    """Number of ms by which the operator's time is ahead of the clock."""
    _due = MIN_WATERMARK
    """The instant for which the timer last fired; windows that end up to it are due."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reads_columns = False

    async def open(self) -> None:
        await super().open()
        self._continue()
        self._schedule()

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        if batch.values:
            if batch.keys is None:
                raise StateError(
                    f"window {self.ctx.name!r}: a batch without keys; put key_by directly before "
                    "window"
                )
            self._fold_by(batch)
            self._fold(self._grid.slice_start(self._now()), list(batch.keys), list(batch.values))
            if self._timer is None:
                self._schedule()
        if batch.watermark > self._event_time:
            self._event_time = batch.watermark
        self._out.passed(batch.watermark)
        return empty_batch(self._out.watermark)

    def finish(self) -> RecordBatch:
        """Fires the remaining windows in order, because the input has ended before their end.

        Returns the first piece of the results. `has_pending` reports the others.
        """
        return self._out.start(self._advance(MAX_WATERMARK), self._event_time)

    @property
    def comes_to_rest(self) -> bool:
        return self._out.pending

    def unprocessed(self) -> Unprocessed | None:
        """Returns a rest without records, because records that follow the firing windows have not
        arrived yet.
        """
        if not self._at_rest or not self._out.pending:
            return None
        return Unprocessed(0, empty_batch(), self._event_time)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await super().close()

    def _now(self) -> int:
        """Returns the time of the operator, in ms.

        This time is after the end of all windows that have fired, even if the clock was put back a
        little.
        """
        now = self.ctx.processing_time() + self._lead
        return max(now, *self._later_than())

    def _later_than(self) -> list[int]:
        """Returns times in ms before which no further element may be added: one for each kind of
        progress.
        """
        reached = [self._watermark, *(reached for _, reached in self._ahead)]
        reached += map(last_instant, self._fired_ends)
        return [instant + 1 for instant in reached]

    def _continue(self) -> None:
        """Sets the operator's time after a restore: the time that was reached before, or the clock
        if that is later.
        """
        starts = self._slices.starts
        reached = [*self._later_than(), *starts[-1:]]
        self._lead = max(0, max(reached) - self.ctx.processing_time())
        if self._lead > 0:
            logger.warning(
                "window %r: the clock is %.1f s behind what the checkpoint had reached: its "
                "windows continue from there, at the "
                "pace of the clock, so that none waits for it",
                self.ctx.name,
                self._lead / 1000.0,
            )

    def _schedule(self) -> None:
        """Registers the timer for the end of the first window that is not empty."""
        self._timer = None
        starts = self._slices.starts
        if starts:
            end = max(self._grid.next_end(self._watermark), self._grid.first_end(starts[0]))
            self._timer = self.ctx.register_processing_timer(end - 1 - self._lead, self._on_time)

    def _on_time(self, timestamp: int) -> None:
        # While earlier windows still emit results, the next timer is not registered.
        self._due = timestamp + self._lead
        batch = self._out.start(self._fire_due(), self._event_time)
        if batch.values or self.has_pending:  # Work without results has to continue, too.
            self.ctx.emit(batch)

    def _fire_due(self) -> Iterator[None]:
        yield from self._advance(self._due)
        self._schedule()

    def _emit(self, end: int, watermark: int, keys: list[Any], values: list[Any]) -> None:
        super()._emit(end, self._event_time, keys, values)
