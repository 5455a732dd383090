"""The window join: pairs every left element with every right element of the same key and window, as
rows or on columns.

On rows the join is a window over the tagged union of both inputs. With event-time windows the join
may also run on columns: records are kept as columns by slice (`columns.hash_join`), and all pairs
of a window are made at once when it fires. Both forms may occur in one run, because one input may
send rows, or a batch may have keys that columns do not support. So every window is held in one of
the two forms:

* windows that end at or before `_until` are held as rows, or have fired. Later windows are held as
  columns. A record that belongs to windows of both forms is held in both forms;
* before a row is added, the columns of its windows are converted to rows, in the order in which
  they arrived, and `_until` advances to the end of these windows;
* when a window of columns fires, `_until` advances to its end.

A checkpoint may interrupt the firing of a window of columns. Then `_until` is still the end of the
previous window, and the state lists the keys whose pairs were emitted (`joins.FIRED`). After the
restore the window fires the other keys, as columns or as rows. A checkpoint may also interrupt the
pairs of one key of rows. Then the state lists the number of emitted pairs, and timers that were
popped but have not fired are registered again.

So neither the order of results nor lateness depends on which batches arrived as columns. After a
restore the highest `_until` of the former subtasks applies to all key groups. If the `_until` of a
key group was lower, its columns are converted to rows up to the highest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from aioflow.core.column_batch import ColumnBatch, first_not_below, highest
from aioflow.core.elements import MIN_WATERMARK, RecordBatch, last_instant
from aioflow.core.functions import Pair
from aioflow.operators.join.joins import FIRED, CoGroupOperator
from aioflow.operators.results import flush_in_slices
from aioflow.operators.window.assigners import (
    SliceGrid,
    SlidingWindows,
    TumblingWindows,
    WindowAssigner,
)
from aioflow.operators.window.operator import CONTENTS
from aioflow.operators.window.slice_store import by_slice

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from aioflow.columns.hash_join import JoinSides, Pairing, Row
    from aioflow.core.keygroups import KeyGroupRange
    from aioflow.operators.window.assigners import Evictor
    from aioflow.operators.window.runs import Unfired
    from aioflow.operators.window.triggers import Trigger

__all__ = ["WindowJoinOperator", "why_rows"]

logger = logging.getLogger(__name__)

PAIRS_MAX = 65_536
"""Maximum number of pairs in one piece of the output."""

PAIRS_LISTED = 16
"""Maximum number of pairs that a key of rows emits as a list instead of one by one."""

KEYS_LISTED = 16_384
"""Number of keys of an interrupted window that are written or read between two yields, in 2 ms."""

WINDOWS_MAX = 64
"""Maximum number of windows with one empty side, or of slices of a batch, that are processed
between two yields.
"""

FAR = 100
"""Number of windows ahead of the watermark from which on a row probably has a wrong time.

A warning in the log names such a row.
"""


class _Hot(NamedTuple):
    """A key whose records are held as rows and whose pairs are emitted in pieces."""

    key: Any
    window: tuple[int, ...]
    before: int
    """Number of results that the operator had emitted before the first pair of this key."""
    height: int
    width: int
    """Number of the key's records on the right; `height` is the number on the left."""


class WindowJoinOperator(CoGroupOperator):
    """A join operator that emits `fn(left, right)` for each pair of elements with the same key and
    window. All pairs of one left element come before those of the next.

    With `Pair` as `fn` the join may run on columns.
    """

    def __init__(
        self,
        assigner: WindowAssigner,
        function: Any,
        *,
        trigger: Trigger[Any] | None = None,
        evictor: Evictor[Any] | None = None,
        lateness_ms: int = 0,
    ) -> None:
        super().__init__(
            assigner, function, trigger=trigger, evictor=evictor, lateness_ms=lateness_ms
        )
        self.reads_columns = why_rows(assigner, function, trigger, evictor, lateness_ms) is None
        self._grid = _grid_of(assigner)
        self._sides: JoinSides | None = None  # Made for the first batch of columns.
        self._until = MIN_WATERMARK
        self._arrived = 0
        self._warned = False
        self._firing: tuple[int, int] | None = None
        """Start and end of the window of columns that fires now; None if no such window fires."""
        self._given: list[Any] = []
        """Codes of the keys that the window `_firing` has fired and `FIRED` does not list yet."""
        self._pairs: Pairing | None = None
        """The pairs of the block of keys that the window `_firing` fires now."""
        self._made = 0
        """Number of pairs in `_pairs` that were emitted."""
        self._rests_amid_pairs = (
            assigner.is_event_time
            and (trigger is None or trigger == assigner.default_trigger())
            and evictor is None
            and not lateness_ms
        )
        """Whether a checkpoint may interrupt the pairs of one key: a window fires only once, by a
        timer that can be registered again.
        """
        self._hot: _Hot | None = None
        """The last key of rows whose pairs were made one by one; None if there is none."""

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        if self.at_rest and self.unfired is not None and self._hot is not None:
            self._list_hot(self._hot, self.unfired)
        # Done here, where no work is pending, because `settle_state` may be called while a window
        # fires.
        written = super().snapshot_state(checkpoint_id)
        if self.reads_columns:
            groups = self._state.key_group_range
            self._progress.update([(groups.start, groups.end, self._until, self._arrived)])
            if self._sides is not None:
                return flush_in_slices(chain(self._sides.settle(), self._list_fired()), written)
        return written

    def _list_fired(self) -> Iterator[None]:
        """Adds to the table `FIRED` the keys that the interrupted window `_firing` has fired."""
        window, sides, parts = self._firing, self._sides, dict[int, tuple[int, int, int]]()
        if window is None or sides is None:
            return
        import numpy as np

        given = self._given[:]
        if self._pairs is not None:
            codes, parts = self._pairs.emitted(self._made)
            given.append(codes)
        if self._fired is None:
            self._fired = self._state.table(FIRED)
        table = self._fired
        for codes in given:
            for at in range(0, len(codes), KEYS_LISTED):
                keys = sides.keys_of(codes[at : at + KEYS_LISTED]).to_list()
                table.of(window, keys).update(dict.fromkeys(keys, True))
                yield
        if parts:
            keys = sides.keys_of(np.array(list(parts))).to_list()
            table.of(window, keys).update(zip(keys, parts.values(), strict=True))
        self._given.clear()

    def _list_hot(self, hot: _Hot, unfired: Unfired) -> None:
        """Notes in the table `FIRED` how many pairs the key `hot` has emitted, and registers the
        timers in `unfired` again.

        If the job continues without a restore, these timers find no contents, and the note is
        dropped when event time passes the window.
        """
        if self._fired is None:
            self._fired = self._state.table(FIRED)
        made = self._out.count - hot.before
        self._fired.of_key(hot.window, hot.key)[hot.key] = (made, hot.height, hot.width)
        time, left = unfired
        for key, namespace in left:
            self._timers.register_event_time_timer(key, namespace, time)

    def _rest_amid_results(self) -> Iterator[None]:
        """Yields once, amid the pairs of a key. At this yield a checkpoint can store what is
        left.
        """
        hot, unfired, timers = self._hot, self.unfired, self._timers
        if hot is None or unfired is None or not self._rests_amid_pairs:
            yield
            return
        reached = timers.current_watermark
        timers.current_watermark = max(self._reached, min(reached, unfired[0] - 1))
        self.at_rest = True
        yield
        self.at_rest = False
        timers.current_watermark = reached

    def _join_elements(self, key: Any, ctx: Any, elements: list[tuple[int, Any]]) -> Iterable[Any]:
        self._hot = None
        if len(elements) == 1:
            return ()
        lefts = [value for index, value in elements if index == 0]
        rights = [value for index, value in elements if index == 1]
        call, window, skipped = self._function.call, tuple(ctx.window), 0
        fired = None if self._fired is None else self._fired.peek(window).get(key)
        if fired is True:
            return ()  # All its pairs were emitted before a restore. These records were late.
        if fired is not None:
            # Before a restore, the key had these records, and some of its pairs were emitted.
            skipped, height, width = fired
            lefts, rights = lefts[:height], rights[:width]
        elif len(lefts) * len(rights) <= PAIRS_LISTED:
            return [call(left, right) for left in lefts for right in rights]
        self._hot = _Hot(key, window, self._out.count - skipped, len(lefts), len(rights))
        if not skipped:
            return (call(left, right) for left in lefts for right in rights)
        row, column = divmod(skipped, len(rights))
        begun, lefts = lefts[row : row + 1], lefts[row + 1 :]
        return chain(
            (call(left, right) for left in begun for right in rights[column:]),
            (call(left, right) for left in lefts for right in rights),
        )

    # Input.

    def process_input(self, index: int, batch: RecordBatch) -> RecordBatch:
        if self._met.is_open:
            self._met.see(index, batch.keys, self.ctx.name)
        values = batch.values
        if (
            self.reads_columns
            and len(values)
            and batch.timestamps is not None
            and isinstance(values, ColumnBatch)
        ):
            sides = self._sides or self._new_sides()
            codes = sides.encode(batch.keys)
            if codes is not None:
                self._batch, self._position, self._side = batch, 0, index
                return self._out.start(self._run_columns(index, batch, codes), batch.watermark)
        elif not len(values) and (
            self._fired is not None or (self._sides is not None and self._sides.starts)
        ):
            self._batch, self._position, self._side = batch, 0, index
            return self._out.start(self._run(batch), batch.watermark)
        return super().process_input(index, batch)

    def _run(self, batch: RecordBatch) -> Iterator[None]:
        if self.reads_columns and batch.timestamps:
            grid, latest = self._grid, highest(batch.timestamps)
            self._warn_of(latest)
            yield from self._leave_to_rows(grid.last_end(grid.slice_start(latest)))
        yield from super()._run(batch)

    def _run_columns(self, index: int, batch: RecordBatch, codes: Any) -> Iterator[None]:
        """Adds a batch of columns of input `index`, in parts between which windows may fire.

        `codes` are the encoded keys of the records.
        """
        import numpy as np

        from aioflow.columns.expressions import times_array
        from aioflow.columns.hash_join import Held

        values, timestamps, watermarks = batch.values, batch.timestamps, batch.watermarks
        timers, count = self._timers, len(values)
        assert timestamps is not None  # Checked in process_input.
        times = times_array(timestamps)
        numbers = np.arange(self._arrived, self._arrived + count)
        # The batch has columns.
        whole = Held(codes, numbers, values)  # type: ignore[arg-type]
        self._arrived += count
        begin = 0
        while begin < count:
            stop = count
            if watermarks is not None:
                if watermarks[begin] > timers.current_watermark:
                    self._position = begin
                    yield from self._advance(watermarks[begin])
                stop = first_not_below(
                    watermarks, self._grid.next_end(timers.current_watermark) - 1, begin, count
                )
            which = np.arange(begin, stop)[
                times[begin:stop]
                >= max(self._grid.late_below(timers.current_watermark), MIN_WATERMARK)
            ]
            self._late_dropped.inc(stop - begin - len(which))
            if len(which):
                yield from self._add_columns(
                    index, times[which], whole if len(which) == count else whole.take(which)
                )
            begin = stop
        self._position = count
        if batch.watermark > timers.current_watermark:
            yield from self._advance(batch.watermark)
        self._batch = None

    def _add_columns(self, index: int, times: Any, held: Any) -> Iterator[None]:
        """Adds records (`held`) of input `index` that are not late. No window is due between
        them.
        """
        import numpy as np

        grid, sides = self._grid, self._sides
        assert sides is not None
        # A window without records may have passed; later records are late for it.
        passed = grid.next_end(self._timers.current_watermark) - grid.slide
        until = self._until = max(self._until, passed)
        early = np.flatnonzero(times < max(self._columns_from(), MIN_WATERMARK))
        if len(early):
            starts = map(grid.slice_start, times[early].tolist())
            part = held.take(early)
            keys = sides.keys_of(part.codes)
            rows: Iterator[Row] = (
                (arrival, index, start, key, value, passed)
                for arrival, start, key, value in zip(
                    part.arrivals.tolist(), starts, keys, part.values, strict=True
                )
            )
            yield from self._add_rows(rows, grid, until)
        for count, (start, which) in enumerate(by_slice(times, grid), 1):
            if grid.last_end(start) > until:
                sides.add(index, start, held if which is None else held.take(which))
            if count % WINDOWS_MAX == 0:
                yield
        if sides.is_full:
            yield from sides.settle()

    def _columns_from(self) -> int:
        """Returns the timestamp below which a record belongs to a window that is held as rows.

        A record with this timestamp or a later one is only in windows that end after `_until`.
        """
        return self._grid.next_end(self._until - 1) - self._grid.slide

    # Rows.

    def _leave_to_rows(self, end: int) -> Iterator[None]:
        """Converts all windows that end at or before `end` from columns to rows."""
        if end <= self._until:
            return
        before, self._until = self._until, end
        if self._sides is not None and self._sides.starts:
            rows = yield from self._sides.rows(end, before)
            yield from self._add_rows(rows, self._grid, end)
            self._forget_slices()

    def _warn_of(self, time: int) -> None:
        """Logs a warning about a row at `time` far ahead of the watermark.

        Because of such a row, all windows up to its last window are held as rows. If the row is a
        year ahead, the join uses no columns for a year.
        """
        watermark = self._timers.current_watermark
        if self._warned or watermark == MIN_WATERMARK or time - watermark <= FAR * self._grid.size:
            return
        self._warned = True
        logger.warning(
            "join %r: a row at %d ms comes at watermark %d ms, more than %d windows ahead: up to "
            "there the join makes rows of all that "
            "comes, at several times the cost of columns; if that time is wrong, filter such rows "
            "out before the join",
            self.ctx.name, time, watermark, FAR,
        )  # fmt: skip

    # Firing.

    def _fire_columns(self, watermark: int, reached: int) -> Iterator[None]:
        sides, grid = self._sides, self._grid
        if sides is None:
            return
        passed = 0
        while sides.starts:
            end = max(grid.first_end(sides.starts[0]), grid.next_end(self._until - 1))
            if last_instant(end) > watermark:
                break
            begin = end - grid.size
            if sides.has(0, begin, end) and sides.has(1, begin, end):
                for _ in self._fire(sides, begin, end):
                    # The window of columns before this one was the last to fire.
                    is_reading = self._firing is None
                    yield from self._rest(max(reached, last_instant(end - grid.slide)), is_reading)
                passed = 0
            elif (passed := passed + 1) == WINDOWS_MAX:
                yield from self._rest(max(reached, last_instant(end - grid.slide)), False)
                passed = 0
            self._until = end
            self._forget_slices()
        self._timers.current_watermark = max(self._timers.current_watermark, watermark)

    def _rest(self, reached: int, is_reading: bool) -> Iterator[None]:
        """Yields once, so that a checkpoint can store the windows of columns that have not fired
        yet.

        The checkpoint records `reached` as event time, so these windows fire after a restore. No
        checkpoint can be taken while records are read from state (`is_reading`).
        """
        self._timers.current_watermark = reached
        self.at_rest = not is_reading
        yield
        self.at_rest = False

    def _fire(self, sides: JoinSides, begin: int, end: int) -> Iterator[None]:
        """Emits all pairs of the window of columns from `begin` to `end`.

        Both sides have records in the window. Yields at least once, also without pairs.
        """
        from aioflow.columns.hash_join import Pairing, Runs, blocks

        out, window = self._out, (begin, end)
        left = yield from sides.gather(0, begin, end)
        right = yield from sides.gather(1, begin, end)
        fired = None
        if self._fired is not None and window in self._fired.namespaces():
            fired = yield from sides.fired(self._fired.peek(window), KEYS_LISTED)
        self._firing, has_pairs = window, False
        for block in blocks(left, right):
            if block is None:
                yield
                continue
            runs = []
            for held in block:
                if len(held) > PAIRS_MAX:
                    yield
                runs.append(Runs(held))
                if len(held) > PAIRS_MAX:
                    yield
            pairs = Pairing(runs[0], runs[1], fired)
            self._pairs, self._made = pairs, 0
            for at in range(0, len(pairs), PAIRS_MAX):
                if not out.empty:
                    yield
                self._made = min(at + PAIRS_MAX, len(pairs))
                has_pairs = True
                out.add_columns(
                    pairs.part(at, self._made), last_instant(end), last_instant(end) - 1
                )
                yield
            self._given.append(pairs.emitted(len(pairs))[0])
            self._pairs = None
        if not has_pairs:
            yield
        self._firing = None
        self._given.clear()
        if self._fired is not None:
            self._fired.drop(window)

    def _forget_slices(self) -> None:
        """Drops the slices whose windows all have fired or are held as rows."""
        assert self._sides is not None
        self._sides.forget(self._grid.next_end(self._until - 1) - self._grid.size)

    # Restoring.

    def _new_sides(self) -> JoinSides:
        from aioflow.columns.hash_join import JoinSides

        state, grid = self._state, self._grid
        windows = (grid.size, grid.slide, grid.offset)
        self._sides = JoinSides(
            self._chunks, windows, state.max_parallelism, state.codec, self.ctx.name
        )
        return self._sides

    def _take_over(self, chunks: list[Any], shares: list[tuple[KeyGroupRange, int]]) -> None:
        """Continues with the chunks of the former subtasks.

        Columns are converted to rows if the `_until` of their key groups was lower than that of
        others, or if the windows have changed.
        """
        if not self.reads_columns:
            super()._take_over(chunks, shares)
            return
        grid = self._grid
        own = [
            namespace
            for namespace in chunks
            if namespace[2:] == (grid.size, grid.slide, grid.offset)
        ]
        super()._take_over([namespace for namespace in chunks if namespace not in own], shares)
        ends = [namespace[1] for namespace in self._state.table(CONTENTS).namespaces() if namespace]
        self._until = max([MIN_WATERMARK, *(until for _, until in shares), *ends])
        if own:
            behind = [(groups, until) for groups, until in shares if until < self._until]
            self._take_as_rows(own if behind else [], behind, self._until)
            self._new_sides()
            self._forget_slices()


def _grid_of(assigner: WindowAssigner) -> SliceGrid:
    if isinstance(assigner, SlidingWindows):
        return SliceGrid(assigner.size, assigner.slide, assigner.offset)
    return (
        SliceGrid(assigner.size, assigner.size, assigner.offset)
        if isinstance(assigner, TumblingWindows)
        else SliceGrid(1, 1)
    )


def why_rows(
    assigner: WindowAssigner, function: Any, trigger: Any, evictor: Any, lateness_ms: int
) -> str | None:
    """Returns the reason why a join cannot run on columns, or None if it can."""
    if function is not Pair:
        return (
            "apply calls a function: pairs(), or select(<name>=af.left.<field>, ...), joins on "
            "columns"
        )
    if not isinstance(assigner, TumblingWindows | SlidingWindows) or not assigner.is_event_time:
        return "only tumbling and sliding windows of event time join on columns"
    if isinstance(assigner, SlidingWindows) and assigner.slide > assigner.size:
        return "there is time between its windows: windows that overlap or touch join on columns"
    if trigger is not None and trigger != assigner.default_trigger():
        return "it has a trigger of its own: windows that fire at their end join on columns"
    if evictor is not None:
        return "an evictor needs the elements of each window one by one"
    return (
        "late elements may fire a window again: without lateness= it joins on columns"
        if lateness_ms
        else None
    )
