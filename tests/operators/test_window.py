"""Windows of any assigner, trigger and evictor: against the textbook for every cut of the input,
and case by case.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.errors import StateError
from aioflow.core.functions import (
    AggregateFunction,
    OutputTag,
    ProcessWindowFunction,
    TriggerResult,
    WindowResult,
)
from aioflow.core.states import ValueStateDescriptor
from aioflow.expressions.roots import col
from aioflow.operators import key_spelling, results
from aioflow.operators.key_spelling import KeySpelling
from aioflow.operators.window.assigners import (
    Evictor,
    SessionWindows,
    SlidingWindows,
    TumblingWindows,
    global_window,
    keep_last,
    keep_within,
    session,
    sliding,
    tumbling,
)
from aioflow.operators.window.operator import WindowOperator
from aioflow.operators.window.sessions import SessionWindowOperator
from aioflow.operators.window.slices import SliceWindowOperator
from aioflow.operators.window.triggers import (
    Trigger,
    continuous,
    early,
    on_count,
    on_processing_time,
    on_watermark,
    purging,
)

from .context import Context, cut, drive, opened, untimed, values_of
from .reference import Record, session_windows, sliding_windows
from .test_slice_window import SIZES, STEPS, Collect, out_of_order

LATE: OutputTag[Any] = OutputTag("late")
START = MIN_WATERMARK


class Total(AggregateFunction[int, int, int]):
    def create_accumulator(self) -> int:
        return 0

    def add(self, value: int, accumulator: int) -> int:
        return accumulator + value

    def merge(self, a: int, b: int) -> int:
        return a + b

    def get_result(self, accumulator: int) -> int:
        return accumulator


class Elements(ProcessWindowFunction[Any, Any, Any]):
    """Emits the elements as they came."""

    def process(self, key: Any, ctx: Any, elements: Any) -> Any:
        yield key, ctx.window.start, ctx.window.end, list(elements)


async def window(assigner: Any, context: Context | None = None, **options: Any) -> Any:
    if not {"process", "aggregate"} & options.keys():
        options["process"] = Elements()
    return await opened(WindowOperator(assigner, late_tag=LATE, **options), context)


@given(
    STEPS,
    st.integers(0, 15),
    st.integers(-40, 40),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(-5, 5),
    st.integers(0, 9),
    SIZES,
    st.booleans(),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
async def test_time_windows_give_the_rows_of_the_textbook_for_every_cut(
    steps: Any,
    delay: int,
    origin: int,
    size: int,
    slide: int,
    offset: int,
    lateness: int,
    sizes: Any,
    ends: bool,
    resume: int,
    elements: bool,
) -> None:
    assigner = (
        TumblingWindows(size, offset) if size == slide else SlidingWindows(size, slide, offset)
    )
    records, final = out_of_order(steps, delay, origin)
    final = MAX_WATERMARK if ends else final
    options: Any = {"process": Elements()} if elements else {"aggregate": Collect()}
    operator = await window(assigner, lateness_ms=lateness, **options)

    rows = drive(operator, cut(records, final, sizes), resume)

    expected, late = sliding_windows(records, final, size, slide, offset, lateness)
    # Also the order of keys: those of one window fire in the order in which they first came.
    assert [(*row, timestamp, watermark) for row, timestamp, watermark in rows] == [
        tuple(row) for row in expected
    ]
    # The textbook counts what is late for its windows; a gap between windows swallows an element
    # unless it is late, too.
    assert [value for _, value, _, _ in operator.ctx.side][: len(late)] == late or slide > size
    assert operator.ctx.dropped() == len(operator.ctx.side)


@given(
    STEPS,
    st.integers(0, 15),
    st.integers(-40, 40),
    st.integers(1, 8),
    st.integers(0, 9),
    SIZES,
    st.booleans(),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
async def test_sessions_give_the_rows_of_the_textbook_for_every_cut(
    steps: Any,
    delay: int,
    origin: int,
    gap: int,
    lateness: int,
    sizes: Any,
    ends: bool,
    resume: int,
    elements: bool,
) -> None:
    records, final = out_of_order(steps, delay, origin)
    final = MAX_WATERMARK if ends else final
    options: Any = {"process": Elements()} if elements else {"aggregate": Collect()}
    operator = await window(SessionWindows(gap), lateness_ms=lateness, **options)

    rows = drive(operator, cut(records, final, sizes), resume)

    expected, late = session_windows(records, final, gap, lateness)
    got = [(*row[:3], sorted(row[3]), timestamp, watermark) for row, timestamp, watermark in rows]
    assert sorted(got) == sorted(tuple(row) for row in expected)
    assert [row[2] for row in got] == [row.end for row in expected]
    assert [value for _, value, _, _ in operator.ctx.side] == late
    if ends:
        assert operator.ctx.keyed_state.table("window-contents").namespaces() == []
        assert operator.ctx.keyed_state.table("window-sessions").namespaces() == []
        assert operator.ctx.timers["window-timers"].event_time_timers() == []


@given(
    STEPS,
    st.integers(1, 60),
    st.sampled_from([TumblingWindows(7), SlidingWindows(9, 4), SessionWindows(5)]),
)
@settings(max_examples=60, deadline=None)
async def test_a_restored_operator_goes_on_as_if_nothing_had_happened(
    steps: Any, at: int, assigner: Any
) -> None:
    records, _ = out_of_order(steps, 3, 0)
    whole = await window(assigner, aggregate=Collect(), lateness_ms=4)
    expected = drive(whole, cut(records, MAX_WATERMARK, [1]))

    first = await window(assigner, aggregate=Collect(), lateness_ms=4)
    reached = records[at].watermark if at < len(records) else MAX_WATERMARK
    before = drive(first, cut(records[:at], reached, [1]))
    second = await window(assigner, Context(first.ctx), aggregate=Collect(), lateness_ms=4)
    after = drive(second, cut(records[at:], MAX_WATERMARK, [1]))

    assert values_of(before + after) == values_of(expected)


class Called(Trigger[Any]):
    """A trigger that does the same as another one, so that no element is part of a run."""

    def __init__(self, inner: Trigger[Any]) -> None:
        self._inner = inner

    def on_element(self, value: Any, timestamp: Any, window: Any, ctx: Any) -> TriggerResult:
        return self._inner.on_element(value, timestamp, window, ctx)

    def on_event_time(self, time: int, window: Any, ctx: Any) -> TriggerResult:
        return self._inner.on_event_time(time, window, ctx)

    def clear(self, window: Any, ctx: Any) -> None:
        self._inner.clear(window, ctx)


COUNTED: dict[str, tuple[Any, dict[str, Any]]] = {
    "count window": (global_window(), {"trigger": purging(on_count(3))}),
    "sliding count window": (global_window(), {"trigger": on_count(2), "evictor": keep_last(3)}),
    "each element": (global_window(), {"trigger": purging(on_count(1))}),
    "counts of time": (tumbling("10ms"), {"trigger": on_count(2), "lateness_ms": 3}),
    "purged counts of time": (sliding("9ms", "3ms"), {"trigger": purging(on_count(2))}),
    "kept within": (tumbling("10ms"), {"trigger": on_watermark(), "evictor": keep_within("4ms")}),
    "purged at the end": (tumbling("7ms"), {"trigger": purging(on_watermark())}),
    "at the end of all": (global_window(at_end=True), {"trigger": on_watermark()}),
    "in steps": (tumbling("10ms"), {"trigger": continuous("3ms")}),
    "in steps of sliding windows": (sliding("9ms", "3ms"), {"trigger": continuous("2ms")}),
    "in steps, purged": (tumbling("10ms"), {"trigger": purging(continuous("3ms"))}),
    "in steps, late": (tumbling("10ms"), {"trigger": continuous("3ms"), "lateness_ms": 4}),
    "in steps, kept": (tumbling("8ms"), {"trigger": continuous("3ms"), "evictor": keep_last(2)}),
}


@pytest.mark.parametrize("name", COUNTED)
@given(STEPS, SIZES, st.integers(0, 60), st.integers(1, 3), st.booleans())
@settings(max_examples=40, deadline=None)
async def test_a_run_of_elements_does_what_its_elements_do_one_by_one(
    name: str, steps: Any, sizes: Any, at: int, resume: int, elements: bool
) -> None:
    assigner, options = COUNTED[name]
    records, _ = out_of_order(steps, 3, 0)
    reached = records[at].watermark if at < len(records) else MAX_WATERMARK
    options = {**options, **({"process": Elements()} if elements else {"aggregate": Total()})}
    called = {**options, "trigger": Called(options["trigger"])}

    async def rows(first: Any, second: Any) -> Any:
        before = await window(assigner, **first)
        given = drive(before, cut(records[:at], reached, sizes), resume)
        after = await window(assigner, Context(before.ctx), **second)
        given += drive(after, cut(records[at:], MAX_WATERMARK, sizes), resume)
        return given, before.ctx.side + after.ctx.side, before.ctx.dropped() + after.ctx.dropped()

    one_by_one = await rows(called, called)
    assert await rows(options, options) == one_by_one
    assert await rows(options, called) == one_by_one
    assert await rows(called, options) == one_by_one


KINDS: dict[str, Any] = {
    "tumbling": lambda: WindowOperator(tumbling("10ms"), process=Elements()),
    "session": lambda: WindowOperator(session("5ms"), process=Elements()),
    "slices": lambda: SliceWindowOperator(tumbling("10ms"), Collect()),
    "sessions by key": lambda: SessionWindowOperator(session("5ms"), Collect()),
}


@pytest.mark.parametrize(
    ("before", "now"), [(before, now) for before in KINDS for now in KINDS if before != now]
)
async def test_state_of_windows_of_another_kind_is_refused(before: str, now: str) -> None:
    first = await opened(KINDS[before]())
    drive(first, cut([("k", 1, 3, START)], 4, [1]))
    first.snapshot_state(1)
    restored = Context(first.ctx)

    if {before, now} == {"tumbling", "session"}:
        with pytest.raises(
            StateError,
            match=(
                r"its state is of .*, which .* cannot go on with: give it another uid, or the "
                r"windows that"
            ),
        ):
            await opened(KINDS[now](), restored)
    else:  # The task refuses late elements without a reader.
        await opened(KINDS[now](), restored)
        assert restored.keyed_state.unclaimed()


@pytest.mark.parametrize(("before", "now"), [("tumbling", "session"), ("session", "tumbling")])
async def test_windows_of_another_kind_go_on_where_no_window_is_open(before: str, now: str) -> None:
    first = await opened(KINDS[before]())
    drive(first, cut([("k", 1, 3, START)], 20, [1]))
    first.snapshot_state(1)
    operator = await opened(KINDS[now](), Context(first.ctx))
    assert [
        row[3] for row in values_of(drive(operator, cut([("k", 2, 30, 20)], MAX_WATERMARK, [1])))
    ] == [[2]]


async def test_late_elements_fire_again_within_the_lateness_and_are_dropped_after() -> None:
    """G1.3"""
    operator = await window(tumbling("10ms"), aggregate=Total(), lateness_ms=5)
    records = [("k", 1, 3, -5), ("k", 1, 4, 9), ("k", 1, 5, 13), ("k", 7, 6, 14)]
    assert drive(operator, cut(records, 14, [4])) == [
        (WindowResult("k", 0, 10, 1), 9, 8),
        (WindowResult("k", 0, 10, 2), 9, 9),
        (WindowResult("k", 0, 10, 3), 9, 13),
    ]
    assert operator.ctx.side == [("late", 7, 6, 14)]
    assert operator.ctx.dropped() == 1


async def test_sessions_that_touch_merge_and_keep_all_elements() -> None:
    operator = await window(session("5ms"))
    records = [
        ("k", "a", 0, START),
        ("k", "c", 10, START),
        ("k", "b", 5, START),
        ("k", "d", 16, START),
    ]
    assert values_of(drive(operator, cut(records, 30, [1]))) == [
        ("k", 0, 15, ["a", "c", "b"]),
        ("k", 16, 21, ["d"]),
    ]


async def test_windows_that_merge_leave_no_timers_and_no_trigger_state_behind() -> None:
    operator = await window(session("5ms"), trigger=early("5s"), lateness_ms=3)
    timers, state = operator.ctx.timers["window-timers"], operator.ctx.keyed_state
    drive(operator, cut([("k", "a", 0, START), ("k", "b", 9, START)], START, [1]))
    operator.ctx.advance(100)
    drive(operator, cut([("k", "c", 5, START)], START, [1]))
    assert timers.event_time_timers() == [(13, "k", (0, 14)), (16, "k", (0, 14))]
    # The firing that was due first stays due.
    assert timers.processing_time_timers() == [(5_000, "k", (0, 14))]
    assert [state.items("trigger-next-fire", namespace=w) for w in ((0, 5), (9, 14))] == [[], []]


async def test_a_window_that_is_over_leaves_no_trigger_state_behind() -> None:
    operator = await window(tumbling("10ms"), trigger=on_count(2))
    drive(operator, cut([("k", "a", 0, START)], 5, [1]))
    assert operator.ctx.keyed_state.items("trigger-count", namespace=(0, 10)) == [("k", 1)]
    drive(operator, cut([], 9, [1]))
    assert operator.ctx.keyed_state.items("trigger-count", namespace=(0, 10)) == []
    assert operator.ctx.keyed_state.table("window-contents").namespaces() == []


async def test_the_gap_may_be_a_function_of_the_element() -> None:
    operator = await window(session(lambda v: v if isinstance(v, int) else "3ms"))
    records = [("k", 10, 0, START), ("k", "x", 11, START)]
    assert values_of(drive(operator, cut(records, 30, [1]))) == [
        ("k", 0, 10, [10]),
        ("k", 11, 14, ["x"]),
    ]


async def test_the_gap_may_be_an_expression_over_the_element() -> None:
    operator = await window(session(col.gap * 2))
    records = [("k", {"gap": 5}, 0, START), ("k", {"gap": 1}, 11, START)]
    rows = values_of(drive(operator, cut(records, 30, [1])))
    assert [row[1:3] for row in rows] == [(0, 10), (11, 13)]


async def test_a_gap_function_that_gives_no_length_is_an_error_naming_it() -> None:
    operator = await window(session(lambda v: 0))
    with pytest.raises(ValueError, match="gap function gave 0 for 'a'"):
        drive(operator, cut([("k", "a", 0, START)], 0, [1]))


# --------------------------------------------------------------------------------------------------
# triggers


async def test_purging_drops_the_contents_at_each_firing() -> None:
    operator = await window(global_window(), aggregate=Total(), trigger=purging(on_count(2)))
    out = operator.process_batch(untimed("k", 1, 2, 3, 4, 5))
    assert out.values == [WindowResult("k", None, None, 3), WindowResult("k", None, None, 7)]
    assert out.timestamps is None


async def test_on_count_without_purging_keeps_what_came() -> None:
    operator = await window(global_window(), aggregate=Total(), trigger=on_count(2))
    assert [r.value for r in operator.process_batch(untimed("k", 1, 2, 3, 4, 5)).values] == [3, 10]


async def test_on_count_counts_over_sessions_that_merge() -> None:
    operator = await window(session("5ms"), trigger=on_count(3))
    records = [("k", "a", 0, START), ("k", "b", 9, START), ("k", "c", 5, START)]
    # Two elements so far in windows of their own; the third joins them, and is the third of what
    # they became.
    assert values_of(drive(operator, cut(records, START, [3]))) == [("k", 0, 14, ["a", "b", "c"])]


async def test_a_global_window_at_end_gives_one_result_a_key_at_the_final_watermark() -> None:
    operator = await window(
        global_window(at_end=True), Context(has_event_time=False), aggregate=Total()
    )
    operator.process_batch(untimed("a", 1, 2))
    operator.process_batch(untimed("b", 5))
    assert operator.process_batch(empty_batch(10)).values == []
    out = operator.process_batch(empty_batch(MAX_WATERMARK))
    assert out.values == [WindowResult("a", None, None, 3), WindowResult("b", None, None, 5)]


async def test_continuous_fires_at_each_interval_and_at_the_end() -> None:
    operator = await window(tumbling("10ms"), aggregate=Total(), trigger=continuous("4ms"))
    records = [("k", 1, 1, START), ("k", 1, 6, 3), ("k", 1, 7, 5)]
    rows = drive(operator, cut(records, 20, [1]))
    assert [(row.value, watermark) for row, _, watermark in rows] == [(2, 3), (3, 7), (3, 8)]


@pytest.mark.parametrize("sizes", [[1], [2], [4]])
@pytest.mark.parametrize("reached", [5, 6, 9])
async def test_result_of_an_overdue_timer_has_the_watermark_in_force_for_every_cut(
    reached: int, sizes: list[int]
) -> None:
    """The late element has its next firing at 5, which is in the past."""
    operator = await window(global_window(), aggregate=Total(), trigger=continuous("5ms"))
    records = [("a", 1, 20, START), ("k", 2, 3, reached), ("a", 3, 20, reached), ("a", 4, 20, 10)]
    rows = drive(operator, cut(records, 12, sizes))
    assert [(row[0], timestamp, watermark) for row, timestamp, watermark in rows] == [
        ("k", 5, reached)
    ]


async def test_early_fires_by_the_clock_until_the_watermark_then_for_late_elements() -> None:
    context = Context()
    operator = await window(
        tumbling("10ms"), context, aggregate=Total(), trigger=early("5s"), lateness_ms=10
    )
    assert drive(operator, cut([("k", 1, 1, START)], START, [1])) == []
    assert [r.value for r in context.advance(4_999)] == []
    assert [r.value for r in context.advance(1)] == [1]
    drive(operator, cut([("k", 1, 2, 0)], 0, [1]))
    assert [r.value for r in context.advance(5_000)] == [2]
    assert [r.value for r in values_of(drive(operator, cut([], 9, [1])))] == [2]
    assert context.advance(60_000) == []
    assert [r.value for r in values_of(drive(operator, cut([("k", 1, 3, 10)], 10, [1])))] == [3]
    assert context.advance(60_000) == []


async def test_on_processing_time_fires_after_a_delay_from_the_first_element_since_firing() -> None:
    context = Context(has_event_time=False, now_ms=1_234)
    operator = await window(
        global_window(), context, aggregate=Total(), trigger=on_processing_time("5s")
    )
    operator.process_batch(untimed("k", 1))
    assert context.advance(3_000) == []
    operator.process_batch(untimed("k", 1))
    assert [r.value for r in context.advance(2_000)] == [2]
    assert context.advance(60_000) == []
    operator.process_batch(untimed("k", 1))
    assert [r.value for r in context.advance(5_000)] == [3]


class FireOnZero(Trigger[int]):
    """A user's trigger with state, that counts the firings of its window."""

    fired: ValueStateDescriptor[int] = ValueStateDescriptor("fired", 0)

    def on_element(self, value: int, timestamp: int | None, window: Any, ctx: Any) -> TriggerResult:
        state = ctx.get_partitioned_state(self.fired)
        if value or state.value() == 2:
            return TriggerResult.CONTINUE
        state.update(state.value() + 1)
        return TriggerResult.FIRE_AND_PURGE


async def test_a_trigger_of_the_user_has_state_per_key_and_window() -> None:
    operator = await window(tumbling("10ms"), trigger=FireOnZero())
    zeros = [("k", 0, t, START) for t in (1, 2, 3, 11, 12)] + [("j", 0, 1, START)]
    rows = values_of(drive(operator, cut(zeros, 0, [2])))
    assert [row[:2] for row in rows] == [("k", 0), ("k", 0), ("k", 10), ("k", 10), ("j", 0)]


async def test_an_event_time_timer_without_a_watermark_strategy_is_refused_when_set() -> None:
    operator = await window(tumbling("10ms"), Context(has_event_time=False))
    with pytest.raises(StateError, match="no watermark strategy"):
        drive(operator, cut([("k", 1, 1, START)], START, [1]))


# --------------------------------------------------------------------------------------------------
# evictors


async def test_keep_last_drops_older_elements_for_good() -> None:
    operator = await window(global_window(), trigger=on_count(2), evictor=keep_last(3))
    out = operator.process_batch(untimed("k", 1, 2, 3, 4, 5, 6))
    assert [row[3] for row in out.values] == [[1, 2], [2, 3, 4], [4, 5, 6]]


async def test_keep_within_counts_back_from_the_newest_element() -> None:
    operator = await window(tumbling("10ms"), aggregate=Total(), evictor=keep_within("3ms"))
    records = [("k", 1, 2, START), ("k", 10, 5, START), ("k", 100, 3, START)]
    assert [row.value for row in values_of(drive(operator, cut(records, 9, [3])))] == [110]


async def test_an_evictor_of_the_user_may_drop_after_the_function_has_seen_them() -> None:
    class Consume(Evictor[int]):
        def evict_after(self, elements: Any, window: Any, ctx: Any) -> Any:
            return [element for element in elements if element.value % 2]

    operator = await window(global_window(), trigger=on_count(2), evictor=Consume())
    assert [row[3] for row in operator.process_batch(untimed("k", 1, 2, 3, 4)).values] == [
        [1, 2],
        [1, 3, 4],
    ]


# --------------------------------------------------------------------------------------------------
# functions


async def test_window_fn_gets_the_one_result_and_its_window() -> None:
    operator = await window(
        tumbling("10ms"), aggregate=Total(), window_fn=lambda key, w, total: (key, w.end, total)
    )
    assert values_of(drive(operator, cut([("k", 1, 1, START), ("k", 2, 2, START)], 9, [2]))) == [
        ("k", 10, 3)
    ]


async def test_a_process_window_function_as_window_fn_gets_a_list_of_one() -> None:
    operator = await window(tumbling("10ms"), aggregate=Total(), window_fn=Elements())
    assert values_of(drive(operator, cut([("k", 1, 1, START), ("k", 2, 2, START)], 9, [2]))) == [
        ("k", 0, 10, [3])
    ]


class Firings(ProcessWindowFunction[Any, Any, Any]):
    """Counts firings per window and per key."""

    def process(self, key: Any, ctx: Any, elements: Any) -> Any:
        window = ctx.window_state.get_state(ValueStateDescriptor("firings", 0))
        total = ctx.global_state.get_state(ValueStateDescriptor("total", 0))
        window.update(window.value() + 1)
        total.update(total.value() + 1)
        ctx.output(LATE, ctx.current_watermark)
        return [(ctx.window.start, window.value(), total.value())]

    def clear(self, ctx: Any) -> None:
        ctx.window_state.get_state(ValueStateDescriptor("firings", 0)).clear()


async def test_a_process_window_function_has_state_per_window_and_per_key() -> None:
    operator = await window(tumbling("10ms"), process=Firings(), lateness_ms=5)
    records = [("k", 1, 1, START), ("k", 1, 2, 9), ("k", 1, 11, 9)]
    assert values_of(drive(operator, cut(records, 30, [1]))) == [(0, 1, 1), (0, 2, 2), (10, 1, 3)]
    assert operator.ctx.side == [("late", 9, 9, 8), ("late", 9, 9, 9), ("late", 19, 19, 18)]
    assert operator.ctx.keyed_state.table("window-contents").namespaces() == []
    assert operator.ctx.keyed_state.items("firings", namespace=(0, 10)) == []


async def test_session_windows_have_no_state_of_their_own() -> None:
    operator = await window(session("5ms"), process=Firings())
    with pytest.raises(StateError, match="use global_state"):
        drive(operator, cut([("k", 1, 1, START)], 30, [1]))


# --------------------------------------------------------------------------------------------------
# processing time


async def test_processing_time_windows_fire_by_the_clock_only() -> None:
    """G6.1"""
    context = Context(now_ms=1_000)
    operator = await window(tumbling("10s", time="processing"), context, aggregate=Total())
    # Timestamps and watermarks of the records mean nothing here.
    drive(operator, [RecordBatch([1, 2], [5, 99_999], ["k", "k"], [0, 50_000], 100_000)])
    assert context.advance(8_998) == []
    assert context.advance(1) == [WindowResult("k", 0, 10_000, 3)]
    (batch,) = context.emitted
    assert batch.timestamps == [9_999]
    assert context.keyed_state.table("window-contents").namespaces() == []


async def test_processing_time_sessions_end_when_the_clock_passes_the_gap() -> None:
    context = Context(has_event_time=False)
    operator = await window(session("5s", time="processing"), context, aggregate=Total())
    operator.process_batch(untimed("k", 1))
    assert context.advance(3_000) == []
    operator.process_batch(untimed("k", 2))
    assert context.advance(4_998) == []
    assert context.advance(1) == [WindowResult("k", 0, 8_000, 3)]


async def test_windows_of_processing_time_that_are_open_at_the_end_fire_then() -> None:
    context = Context(has_event_time=False)
    operator = await window(sliding("10s", "5s", time="processing"), context, aggregate=Total())
    operator.process_batch(untimed("a", 1))
    operator.process_batch(untimed("b", 2))
    assert operator.finish().values == [
        WindowResult("a", -5_000, 5_000, 1),
        WindowResult("b", -5_000, 5_000, 2),
        WindowResult("a", 0, 10_000, 1),
        WindowResult("b", 0, 10_000, 2),
    ]
    assert context.advance(100_000) == []
    assert context.keyed_state.table("window-contents").namespaces() == []


@pytest.mark.parametrize(
    "assigner", [tumbling("10ms"), session("10ms")], ids=["tumbling", "session"]
)
@pytest.mark.parametrize(
    ("trigger", "results"),
    [
        (on_processing_time("1s"), [2]),
        (purging(on_processing_time("1s")), [2]),
        (continuous("1s", time="processing"), [2]),
        (on_processing_time(), [2]),
        (early("1s"), [2]),
        (on_count(3), []),
    ],
    ids=repr,
)
async def test_windows_of_event_time_emit_at_the_end_what_the_clock_would_have_emitted(
    assigner: Any, trigger: Any, results: Any
) -> None:
    operator = await window(assigner, aggregate=Total(), trigger=trigger)
    rows = drive(
        operator,
        cut([("k", 1, 0, MIN_WATERMARK), ("k", 1, 1, MIN_WATERMARK)], MAX_WATERMARK, [1024]),
    )
    assert [row.value for row in values_of(rows)] + [
        row.value for row in operator.finish().values
    ] == results
    assert operator.ctx.keyed_state.table("window-contents").namespaces() == []


async def test_an_error_of_user_code_names_the_record_or_the_window() -> None:
    operator = await window(
        tumbling("10ms"), aggregate=Total(), window_fn=lambda key, w, total: 1 // total
    )
    with pytest.raises(TypeError) as adding:
        drive(operator, cut([("k", "text", 1, START)], 0, [1]))
    assert adding.value.__notes__[0].endswith("at record 'text' of key 'k'")
    with pytest.raises(ZeroDivisionError) as firing:
        drive(operator, cut([("j", 0, 1, START)], 9, [1]))
    assert firing.value.__notes__[0].endswith("window (0, 10) of key 'j'")


async def test_a_batch_without_keys_names_the_remedy() -> None:
    operator = await window(tumbling("10ms"))
    with pytest.raises(StateError, match="key_by"):
        operator.process_batch(RecordBatch([1], [1]))


async def test_keys_of_one_window_come_out_in_the_order_of_their_first_arrival() -> None:
    operator = await window(sliding("4ms", "2ms"))
    records = [
        Record(key, i, t, START)
        for i, (key, t) in enumerate([("z", 3), ("a", 1), ("m", 0), ("z", 2)])
    ]
    rows = values_of(drive(operator, cut(records, 3, [2])))
    assert [(row[0], row[2]) for row in rows] == [("a", 2), ("m", 2), ("z", 4), ("a", 4), ("m", 4)]


SPELLED_ALIKE = [True, 1, 1.0, Decimal(1)]
"""Spellings of one key."""


@pytest.mark.parametrize(
    ("assigner", "options"),
    [
        (global_window(), {"trigger": purging(on_count(2))}),
        (global_window(), {"aggregate": Total(), "trigger": purging(on_count(2))}),
        (session("5ms"), {}),
        (sliding("20ms", "10ms"), {}),
        (tumbling("10ms"), {"trigger": on_count(2)}),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])
async def test_the_first_spelling_of_a_key_is_the_one_shown(
    assigner: Any, options: Any, size: int
) -> None:
    operator = await window(assigner, **options)
    records = [(key, i, 2 * i, START) for i, key in enumerate(SPELLED_ALIKE)]
    found = values_of(drive(operator, cut(records, MAX_WATERMARK, [size] * 4)))
    assert found
    assert {repr(row[0]) for row in found} == {"True"}


async def test_spellings_of_keys_without_state_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_spelling, "REMEMBERED_MAX", 3)
    spelling = KeySpelling()
    for key in range(10):
        assert spelling.shown([float(key)], iter([7.0])) == [key]
    assert repr(spelling.shown([7, 9], iter([7.0]))) == "[7.0, 9]"


async def interrupted(
    monkeypatch: pytest.MonkeyPatch, before: list[RecordBatch], amid: RecordBatch, **options: Any
) -> tuple[WindowOperator, RecordBatch, list[Any]]:
    """Returns an operator restored from a checkpoint amid the timers that `amid` fires, the rest of
    `amid`, and the results before the checkpoint.
    """
    monkeypatch.setattr(results, "RESULTS_FIRST", 1)
    monkeypatch.setattr(results, "PIECE_NS", 0)
    operator = await window(**options)
    assert drive(operator, before) == []
    first = operator.process_batch(amid).values
    rest = operator.unprocessed()
    assert rest is not None
    return await window(context=Context(operator.ctx), **options), rest.batch, list(first)


async def test_timers_left_at_the_restored_instant_fire_before_the_next_element(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"assigner": session("10ms"), "aggregate": Total()}
    before = cut([("k", 1, 0, START), ("l", 1, 0, START)], START, [2])
    (amid, *_) = cut([("k", 2, 9, 9), ("l", 2, 9, 9)], 30, [2])
    operator, rest, first = await interrupted(monkeypatch, before, amid, **options)
    rows = first + values_of(drive(operator, [rest]))
    assert sorted(rows) == [("k", 0, 10, 1), ("k", 9, 19, 2), ("l", 0, 10, 1), ("l", 9, 19, 2)]


LATE_FIRINGS: dict[str, Any] = {
    "assigner": global_window(),
    "aggregate": Total(),
    "trigger": continuous("5ms"),
}
LATE_ONES = [("k", 1, 3, 10), ("l", 1, 3, 10)]
"""Elements whose next firing is at 5, in the past."""


async def test_overdue_timers_after_a_restore_wait_for_the_next_advance() -> None:
    first = await window(**LATE_FIRINGS)
    drive(first, cut([("a", 1, 40, START)], 10, [1]))
    operator = await window(context=Context(first.ctx), **LATE_FIRINGS)
    assert drive(operator, cut(LATE_ONES, 10, [1])) == []
    assert len(drive(operator, cut([], 11, [1]))) == 2


async def test_a_checkpoint_amid_overdue_timers_stores_the_event_time_that_was_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = cut([("a", 1, 40, START), *LATE_ONES], 10, [3])
    (amid, *_) = cut([("a", 1, 40, 20)], 20, [1])
    operator, rest, first = await interrupted(monkeypatch, before, amid, **LATE_FIRINGS)
    assert operator._timers.current_watermark == 10
    assert [row.key for row in first + values_of(drive(operator, [rest]))] == ["k", "l"]
