"""Joins of two keyed streams: by window (`join`, `co_group`) and by distance in event time
(`interval_join`).

A co-group is a window over the tagged union of both inputs: an element is kept as (input, value),
in order of arrival. The window join of pairs, which may keep columns instead, has a module of its
own, `window_join`. An interval join keeps, for each key and side, the elements that may still find
a partner, sorted by time. In both, the watermarks of the batches are those of the operator, the
minimum over its inputs. Late elements are counted and dropped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Iterable, Iterator
from importlib.util import find_spec
from itertools import count, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from aioflow.advice.runtime import KeysMet
from aioflow.core.elements import (
    MAX_WATERMARK,
    RecordBatch,
    TimeWindow,
    empty_batch,
    last_instant,
)
from aioflow.core.errors import GraphError, StateError, describe_record, note_once
from aioflow.core.functions import fresh
from aioflow.core.keygroups import KeyGroupRange, key_group
from aioflow.operators.operator import Operator, Unprocessed
from aioflow.operators.process.context import OperatorProcessContext
from aioflow.operators.results import PLAIN_RESULTS, ResumableOutput, UserFunction, elements_of
from aioflow.operators.stateless import describe_place
from aioflow.operators.window.assigners import (
    GlobalWindows,
    SessionWindows,
    SliceGrid,
    SlidingWindows,
    TumblingWindows,
    WindowAssigner,
)
from aioflow.operators.window.operator import WindowOperator
from aioflow.state.backend import INTERNAL_PREFIX, NO_KEY, require_keyed

if TYPE_CHECKING:
    from aioflow.columns.hash_join import Row
    from aioflow.core.states import ListState
    from aioflow.operators.window.assigners import Evictor
    from aioflow.operators.window.triggers import Trigger
    from aioflow.state.backend import KeyedStateBackend, StateTable
    from aioflow.state.timers import InternalTimerService

__all__ = [
    "PARTLY_JOINED",
    "PROGRESS",
    "CoGroupOperator",
    "IntervalJoinContext",
    "IntervalJoinOperator",
    "make_interval_join",
    "make_window_join",
]

COLUMNS = f"{INTERNAL_PREFIX}join-columns"
"""Name of the table of chunks, see `columns.hash_join`.

It contains bytes under generated ints, which queries must not show as keys.
"""

PROGRESS = f"{INTERNAL_PREFIX}join-progress"
"""Name of the union list state for `window_join`.

Each subtask writes (first key group, last key group, until, number of records received).
"""

FIRED = f"{INTERNAL_PREFIX}join-fired"
"""Name of the table (start of window, end) -> key -> True, which lists the keys that a window had
fired when a checkpoint interrupted it.

A key of which only some pairs were emitted has their number instead, and the numbers of its records
on the left and on the right. Fired keys of rows are not listed: they are no longer in the window.
"""

ROWS_MAX = 1_024
"""Number of windows that get rows from columns between two yields."""

TIMERS = "interval-join-timers"
BUFFERS = ("interval-join-left", "interval-join-right")

PARTLY_JOINED = f"{INTERNAL_PREFIX}interval-join-partly"
"""Name of the table key -> (input, number of emitted pairs) of the element that a checkpoint
interrupted. It is the next element of that key.
"""


class CoGroupOperator(WindowOperator):
    """An operator that calls `fn(key, lefts, rights)` for each key and window in which at least one
    side has an element.

    The function returns the results of the window.
    """

    inputs = 2

    _chunks: StateTable
    _fired: StateTable | None = None
    """The table `FIRED`, while it has entries: a checkpoint has interrupted a window."""
    _progress: ListState[Any]
    _side = 0
    """The input of the batch that is being processed."""

    def __init__(
        self,
        assigner: WindowAssigner,
        function: Any,
        *,
        trigger: Trigger[Any] | None = None,
        evictor: Evictor[Any] | None = None,
        lateness_ms: int = 0,
    ) -> None:
        if isinstance(assigner, SessionWindows) and callable(assigner.gap):
            assigner = SessionWindows(_UntaggedGap(assigner.gap), assigner.is_event_time)
        elif not isinstance(
            assigner, TumblingWindows | SlidingWindows | SessionWindows | GlobalWindows
        ):
            assigner = _Untagged(assigner)  # Its windows may depend on the element.
        super().__init__(
            assigner,
            process=self._join_elements,
            trigger=trigger,
            evictor=evictor,
            lateness_ms=lateness_ms,
        )
        self._met = KeysMet()
        self._function = UserFunction(function, "apply")
        self._functions.append(self._function)

    def initialize_state(self) -> None:
        super().initialize_state()
        self._progress = self.ctx.operator_state.get_union_list_state(PROGRESS)

    async def open(self) -> None:
        await super().open()
        self._chunks = self._state.table(COLUMNS)
        if FIRED in self._state.names():
            self._fired = self._state.table(FIRED)
        self._restore_columns()

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        self._progress.clear()
        return super().snapshot_state(checkpoint_id)

    def process_input(self, index: int, batch: RecordBatch) -> RecordBatch:
        if self._met.is_open:
            self._met.see(index, batch.keys, self.ctx.name)
        tagged = [(index, value) for value in batch.values]
        self._side = index
        return self.process_batch(
            RecordBatch(tagged, batch.timestamps, batch.keys, batch.watermarks, batch.watermark)
        )

    def unprocessed(self) -> Unprocessed | None:
        """Returns the input records that come after the windows that fire."""
        rest = super().unprocessed()
        if rest is None:
            return None
        if type(rest.batch.values) is list:  # A batch of columns has no tags.
            rest.batch.values = [value for _, value in rest.batch.values]
        return rest._replace(input_index=self._side)

    def _advance(self, watermark: int) -> Iterator[None]:
        reached = self._timers.current_watermark
        yield from super()._advance(watermark)
        yield from self._fire_columns(watermark, reached)
        if self._fired is not None:
            for window in self._fired.namespaces():
                if last_instant(window[1]) <= watermark:
                    self._fired.drop(window)
            if not self._fired.namespaces():
                self._fired = None

    def _fire_columns(self, watermark: int, reached: int) -> Iterator[None]:
        """Fires the windows of columns up to `watermark`, if the join has some.

        Their results follow the results of rows. `reached` is the event time before.
        """
        return iter(())

    def _join_elements(self, key: Any, ctx: Any, elements: list[tuple[int, Any]]) -> Iterable[Any]:
        lefts = [value for index, value in elements if index == 0]
        rights = [value for index, value in elements if index == 1]
        return elements_of(self._function.call(key, lefts, rights), f"co_group {self.ctx.name!r}")

    # State of a join that ran on columns (`window_join`). This operator converts it to rows.

    def _restore_columns(self) -> None:
        own = self._state.key_group_range
        found = [
            (own.intersection(KeyGroupRange(first, last)), until, arrived)
            for first, last, until, arrived in self._progress.get()
        ]
        chunks = self._chunks.namespaces()
        if self._assigner.is_merging and chunks:
            raise StateError(
                f"join {self.ctx.name!r}: its state is of windows that are no sessions, which "
                "session windows cannot go on with: "
                "give it another uid, or the windows that it had"
            )
        if chunks and find_spec("numpy") is None:
            raise StateError(
                f"join {self.ctx.name!r}: its state holds columns, and numpy is not installed "
                "here: pip install 'aioflow[columns]'"
            )
        self._arrived = max((arrived for _, _, arrived in found), default=0)
        self._take_over(
            chunks, [(groups, until) for groups, until, _ in found if groups is not None]
        )

    def _take_over(self, chunks: list[Any], shares: list[tuple[KeyGroupRange, int]]) -> None:
        """Converts all `chunks` to rows.

        `shares` contains key groups, each with the end up to which its windows are rows already, or
        have fired.
        """
        self._take_as_rows(chunks, shares, MAX_WATERMARK)
        for namespace in chunks:
            self._chunks.drop(namespace)

    def _take_as_rows(
        self, chunks: list[Any], shares: list[tuple[KeyGroupRange, int]], until: int
    ) -> None:
        """Converts chunks of the key groups in `shares` to rows.

        Only windows that end after the group's end in `shares`, and not after `until`, are
        converted.
        """
        if not chunks:
            return
        from aioflow.columns.hash_join import rows_of

        state = self._state
        rows: dict[tuple[int, ...], list[Row]] = {}
        for namespace in chunks:
            side, start, *windows = namespace
            for key, content in self._chunks.peek(namespace).items():
                group = key_group(key, state.max_parallelism)
                reached = [end for groups, end in shares if group in groups]
                if reached:
                    rows.setdefault(tuple(windows), []).extend(
                        rows_of(content, state.codec, side, start, max(reached))
                    )
        for windows, found in rows.items():
            found.sort(key=itemgetter(0))
            for _ in self._add_rows(found, SliceGrid(*windows), until):
                pass

    def _add_rows(self, rows: Iterable[Row], grid: SliceGrid, until: int) -> Iterator[None]:
        """Adds each record to its windows, in `grid`, that end later than the end given in the
        record's row.

        Windows that end after `until` are left out.
        """
        state, fired, rest = self._state, self._fired, ROWS_MAX
        for _, side, start, key, value, behind in rows:
            state.set_current_key(key)
            end, last = (
                max(grid.first_end(start), grid.next_end(behind - 1)),
                min(grid.last_end(start), until),
            )
            while end <= last:
                window = TimeWindow(end - grid.size, end)
                namespace = tuple(window)
                if fired is None or fired.peek(namespace).get(key) is not True:
                    self._add_to_window(key, (side, value), start, window, namespace)
                end += grid.slide
                rest -= 1
            if rest <= 0:
                state.clear_current_key()
                yield
                rest = ROWS_MAX
        state.clear_current_key()


class _Untagged:
    """An assigner for tagged elements, which gives the element itself to another assigner."""

    def __init__(self, assigner: WindowAssigner) -> None:
        self._assigner = assigner
        self.is_event_time = assigner.is_event_time
        self.is_merging = assigner.is_merging

    def assign(self, value: tuple[int, Any], timestamp: int) -> Any:
        return self._assigner.assign(value[1], timestamp)

    def default_trigger(self) -> Trigger[Any]:
        return self._assigner.default_trigger()

    def __str__(self) -> str:
        return str(self._assigner)


class _UntaggedGap:
    """A session gap function for tagged elements, which calls the user's gap function with the
    element itself.
    """

    __slots__ = ("_gap",)

    def __init__(self, gap: Callable[[Any], Any]) -> None:
        self._gap = gap

    def __call__(self, tagged: tuple[int, Any]) -> Any:
        return self._gap(tagged[1])


class IntervalJoinContext(OperatorProcessContext):
    """The context of `fn(left, right, ctx)`. Its `timestamp` is the larger one of the two
    elements.
    """

    __slots__ = ("left_timestamp", "right_timestamp")

    left_timestamp: int
    right_timestamp: int


class IntervalJoinOperator(Operator):
    """An operator that joins pairs with `left + lower <= right <= left + upper` of their
    timestamps, in event time.

    The bounds are in ms and inclusive. `fn(left, right, ctx)` returns the results of one pair, at
    the larger of the two timestamps, when the second of them arrives. The partners of an element
    are joined in the order of their time, and at equal times in the order of arrival.
    """

    inputs = 2

    _buffers: tuple[StateTable, StateTable]
    _out: ResumableOutput
    _state: KeyedStateBackend
    _timers: InternalTimerService
    _join_ctx: IntervalJoinContext
    _batch: RecordBatch | None = None
    """The batch that is being processed, which is of input `_side`."""
    _side = 0
    _position = 0
    """Number of its processed records."""
    _joined: int | None = None
    """Number of pairs of the next record that were emitted, None between two records."""
    _is_listed = False
    """Whether a checkpoint has listed that record."""
    _partly: StateTable | None = None
    """The table `PARTLY_JOINED`, while it has entries."""

    def __init__(self, function: Any, lower_ms: int, upper_ms: int) -> None:
        if lower_ms > upper_ms:
            raise GraphError(
                f"interval_join: lower is {lower_ms} ms, expected at most upper, {upper_ms} ms"
            )
        self._met = KeysMet()
        self._function = UserFunction(function, "process_element")
        # All relative to the time of an arriving element: the bounds of its partners' times, and
        # the time until which it may find one.
        self._bounds = ((lower_ms, upper_ms), (-upper_ms, -lower_ms))
        self._kept_for = (max(0, upper_ms), max(0, -lower_ms))

    def initialize_state(self) -> None:
        self._function.initialize_state(self.ctx)

    async def open(self) -> None:
        ctx = self.ctx
        self._out = ResumableOutput(ctx.host.clock.perf_ns)
        self._state = require_keyed(ctx.keyed_state, ctx.name)
        if not ctx.has_event_time:
            raise StateError(
                f"interval_join {ctx.name!r}: no watermark strategy upstream; give watermarks= to "
                "the sources: it joins by event time"
            )
        self._buffers = (
            self._state.table(BUFFERS[0], transient=True),
            self._state.table(BUFFERS[1], transient=True),
        )
        self._timers = ctx.timer_service(TIMERS, self._clean, self._clean)
        self._join_ctx = IntervalJoinContext(ctx, self._state, self._timers)
        self._late_dropped = ctx.runtime.metrics.counter("numLateRecordsDropped")
        if PARTLY_JOINED in self._state.names():
            self._partly = self._state.table(PARTLY_JOINED)
        await self._function.open(ctx)

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        if self._joined is not None and self._batch is not None:
            assert self._batch.keys is not None  # Checked in process_input.
            key = self._batch.keys[self._position]
            self._partly = self._state.table(PARTLY_JOINED)
            self._partly.of_key(None, key)[key] = (self._side, self._joined)
            self._is_listed = True
        return self._function.snapshot_state(self.ctx)

    async def close(self) -> None:
        await self._function.close()

    def process_input(self, index: int, batch: RecordBatch) -> RecordBatch:
        if batch.values and (batch.keys is None or batch.timestamps is None):
            raise StateError(
                f"interval_join {self.ctx.name!r}: a batch without "
                f"{'timestamps' if batch.keys else 'keys'}; both inputs need "
                "key_by directly before it and a watermark strategy upstream"
            )
        if self._met.is_open:
            self._met.see(index, batch.keys, self.ctx.name)
        if not batch.values and batch.watermark < self._timers.next_event_time:
            if batch.watermark > self._timers.current_watermark:
                self._timers.current_watermark = batch.watermark
            self._out.passed(batch.watermark)
            return empty_batch(self._out.watermark)
        self._join_ctx.collect_sides()
        self._batch, self._side, self._position = batch, index, 0
        try:
            return self._out.start(self._run(index, batch), batch.watermark)
        finally:
            self._join_ctx.flush_sides()

    @property
    def has_pending(self) -> bool:
        return self._out.pending

    def unprocessed(self) -> Unprocessed | None:
        """Returns the records from the one on whose pairs are emitted now, none while elements are
        dropped. The state has the number of its emitted pairs.
        """
        if self._batch is None:
            return None
        watermark = self._timers.current_watermark
        return Unprocessed.rest_of(self._batch, self._position, watermark, self._side)

    def resume(self, max_records: int) -> RecordBatch:
        self._join_ctx.collect_sides()
        try:
            return self._out.resume(max_records)
        finally:
            self._join_ctx.flush_sides()

    def _run(self, index: int, batch: RecordBatch) -> Iterator[None]:
        timers, others, marks = self._timers, self._buffers[1 - index], batch.watermarks
        lower, upper = self._bounds[index]
        current = timers.current_watermark
        if batch.values:
            assert batch.keys is not None  # Both are checked in process_input.
            assert batch.timestamps is not None
            for position, value, key, time, mark in zip(
                count(),
                batch.values,
                batch.keys,
                batch.timestamps,
                repeat(current) if marks is None else marks,
            ):
                if mark > current:
                    current = timers.current_watermark = mark
                if time <= current:
                    self._late_dropped.inc(1)
                    continue
                # A restored element comes back at its event time, so it is not late now either.
                before = 0 if self._partly is None else self._joined_before(index, key)
                held = others.peek().get(key)
                if held is not None:
                    times = held[0]
                    first, end = bisect_left(times, time + lower), bisect_right(times, time + upper)
                    if first < end:
                        self._position, partners = position, range(first, end)
                        yield from self._join(index, key, value, time, held, partners, before)
                self._keep(index, key, value, time)
        self._position = len(batch.values)
        yield from self._drop_until(max(current, batch.watermark))
        self._batch = None

    def _joined_before(self, index: int, key: Any) -> int:
        """Removes and returns the number of pairs that the next element of `key` has emitted."""
        assert self._partly is not None
        side: int
        joined: int
        side, joined = self._partly.peek(None).get(key, (index, 0))
        if side != index or not joined:
            return 0
        del self._partly.of_replaced(None, key)[key]
        self._partly.removed(None, key)
        if not self._partly.namespaces():
            self._partly = None
        return joined

    def _join(
        self,
        index: int,
        key: Any,
        value: Any,
        time: int,
        held: tuple[list[int], list[Any]],
        partners: range,
        before: int,
    ) -> Iterator[None]:
        """Joins an element of input `index` with its `partners`, elements of `held`.

        The pairs with the first `before` of them were emitted before a restore.
        """
        ctx, out, state, call = self._join_ctx, self._out, self._state, self._function.call
        watermark = self._timers.current_watermark
        times, values = held
        ctx.watermark = watermark
        state.current_key = key
        for i in partners[before:] if before else partners:
            other, other_time = values[i], times[i]
            if index == 0:
                left, right = value, other
                ctx.left_timestamp, ctx.right_timestamp = time, other_time
            else:
                left, right = other, value
                ctx.left_timestamp, ctx.right_timestamp = other_time, time
            ctx.timestamp = timestamp = time if time > other_time else other_time
            try:
                result = call(left, right, ctx)
                if result is not None:
                    for row in (
                        result
                        if type(result) in PLAIN_RESULTS
                        else elements_of(result, f"interval_join {self.ctx.name!r}")
                    ):
                        out.add(row, timestamp, watermark)
            except BaseException as error:
                pair = f"{describe_record(left)} and {describe_record(right)}"
                note_once(
                    error,
                    f"in {describe_place(self.ctx)}, at {pair} of key {describe_record(key)}",
                )
                raise
            out.tried()
            if out.full:
                state.current_key = NO_KEY
                self._joined = i + 1 - partners.start
                yield
                self._joined = None
                if self._is_listed:
                    self._is_listed = False
                    self._joined_before(index, key)
                state.current_key = key
        state.current_key = NO_KEY

    def _keep(self, index: int, key: Any, value: Any, time: int) -> None:
        """Adds an element to the elements of its key. A timer is due at the latest when half of
        them can find no partner any more.
        """
        table = self._buffers[index].of_key(None, key)
        held: tuple[list[int], list[Any]] | None = table.get(key)
        if held is None:
            table[key] = ([time], [value])
            self._timers.register_event_time_timer(key, index, time + self._kept_for[index])
            return
        times, values = held
        if time >= times[-1]:
            times.append(time)
            values.append(value)
        else:
            position = bisect_right(times, time)
            if 2 * position <= len(times):  # The present timer may belong to a later element.
                self._timers.register_event_time_timer(key, index, time + self._kept_for[index])
            times.insert(position, time)
            values.insert(position, value)
        table[key] = held

    def _drop_until(self, watermark: int) -> Iterator[None]:
        """Drops elements that find no partner from `watermark` on.

        Emits nothing, but may take long.
        """
        timers, out = self._timers, self._out
        if watermark < timers.next_event_time:
            timers.current_watermark = watermark
            return
        while (timer := timers.pop_due(watermark)) is not None:
            self._clean(*timer)
            out.tried()
            if out.full:
                self._state.clear_current_key()
                yield
        self._state.clear_current_key()

    def _clean(self, time: int, key: Any, index: int) -> None:
        """Drops the elements up to `time` on side `index`, which can find no partner any more.

        The elements are dropped only when they are half of all elements of the key. So the next
        timer of the key is due when its middle element expires, and the cost for each element does
        not depend on the number of elements. Until then new elements cannot join with expired ones.
        """
        buffer, kept_for = self._buffers[index], self._kept_for[index]
        held = buffer.peek().get(key)
        if held is None:
            return
        times, values = held
        gone = bisect_right(times, time - kept_for)
        if gone == len(times):
            del buffer.of_replaced(None, key)[key]
            buffer.removed(None, key)
            return
        if 2 * gone >= len(times):
            times, values = times[gone:], values[gone:]
            buffer.of_replaced(None, key)[key] = (times, values)
        self._timers.register_event_time_timer(key, index, times[len(times) // 2] + kept_for)


def make_window_join(
    operator: type[CoGroupOperator],
    assigner: WindowAssigner,
    fn: Any,
    trigger: Trigger[Any] | None,
    evictor: Evictor[Any] | None,
    lateness_ms: int,
) -> Operator:
    """Returns the operator for one subtask that joins two streams in windows."""
    return operator(assigner, fresh(fn), trigger=trigger, evictor=evictor, lateness_ms=lateness_ms)


def make_interval_join(fn: Any, lower_ms: int, upper_ms: int) -> Operator:
    """Returns the operator for one subtask that joins two streams by the distance in time."""
    return IntervalJoinOperator(fresh(fn), lower_ms, upper_ms)
