"""Sessions a batch at a time: against the textbook and the operator of all windows, and what
they leave behind.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, empty_batch
from aioflow.core.functions import OutputTag, ProcessWindowFunction, WindowResult
from aioflow.core.states import ValueStateDescriptor
from aioflow.operators.aggregate import functions
from aioflow.operators.window.assigners import SessionWindows, session
from aioflow.operators.window.operator import WindowOperator
from aioflow.operators.window.plan import ReduceAggregate
from aioflow.operators.window.sessions import SessionWindowOperator

from . import context
from .compared import Compared
from .context import Context, cut, drive, values_of
from .reference import session_windows
from .test_slice_window import SIZES, STEPS, Collect, out_of_order

LATE: OutputTag[Any] = OutputTag("late")
START = MIN_WATERMARK


async def opened(
    gap: int, aggregate: Any = None, ctx: Context | None = None, **options: Any
) -> Any:
    operator = SessionWindowOperator(
        SessionWindows(gap), aggregate or Collect(), late_tag=LATE, **options
    )
    return await context.opened(operator, ctx)


def left_behind(operator: Any) -> tuple[Any, Any]:
    return operator.ctx.keyed_state.items("sessions"), operator.ctx.timers[
        "window-timers"
    ].event_time_timers()


@given(
    STEPS,
    st.integers(0, 15),
    st.integers(-40, 40),
    st.integers(1, 8),
    SIZES,
    st.booleans(),
    st.integers(1, 3),
)
@settings(max_examples=300, deadline=None)
async def test_sessions_give_the_rows_of_the_textbook_for_every_cut(
    steps: Any, delay: int, origin: int, gap: int, sizes: Any, ends: bool, resume: int
) -> None:
    records, final = out_of_order(steps, delay, origin)
    final = MAX_WATERMARK if ends else final
    operator = await opened(gap)

    rows = drive(operator, cut(records, final, sizes), resume)

    expected, late = session_windows(records, final, gap)
    got = [(*row[:3], sorted(row[3]), timestamp, watermark) for row, timestamp, watermark in rows]
    assert sorted(got) == sorted(tuple(row) for row in expected)
    assert [row[2] for row in got] == [row.end for row in expected]
    assert [value for _, value, _, _ in operator.ctx.side] == late
    assert operator.ctx.dropped() == len(late)
    if ends:
        assert left_behind(operator) == ([], [])


@given(STEPS, st.integers(0, 15), st.integers(1, 8), SIZES)
@settings(max_examples=200, deadline=None)
async def test_the_order_of_elements_in_a_session_is_that_of_the_operator_of_all_windows(
    steps: Any, delay: int, gap: int, sizes: Any
) -> None:
    records, _ = out_of_order(steps, delay, 0)
    one = await context.opened(
        WindowOperator(SessionWindows(gap), aggregate=Collect(), late_tag=LATE)
    )
    other = await opened(gap)
    rows = [
        sorted(drive(operator, cut(records, MAX_WATERMARK, cuts)), key=repr)
        for operator, cuts in ((one, [1]), (other, sizes))
    ]
    assert rows[0] == rows[1]
    assert one.ctx.side == other.ctx.side


@given(STEPS, st.integers(0, 15), st.integers(1, 8), SIZES)
@settings(max_examples=100, deadline=None)
async def test_the_sequence_does_not_depend_on_where_batches_are_cut(
    steps: Any, delay: int, gap: int, sizes: Any
) -> None:
    records, _ = out_of_order(steps, delay, 0)
    runs = []
    for cuts in ([1024], sizes):
        operator = await opened(gap)
        runs.append((drive(operator, cut(records, MAX_WATERMARK, cuts)), operator.ctx.side))
    assert runs[0] == runs[1]


@given(STEPS, st.integers(1, 60), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
async def test_a_restored_operator_goes_on_as_if_nothing_had_happened(
    steps: Any, at: int, gap: int
) -> None:
    records, _ = out_of_order(steps, 3, 0)
    whole = await opened(gap)
    expected = drive(whole, cut(records, MAX_WATERMARK, [1]))

    first = await opened(gap)
    reached = records[at].watermark if at < len(records) else MAX_WATERMARK
    before = drive(first, cut(records[:at], reached, [1]))
    second = await opened(gap, ctx=Context(first.ctx))
    replayed = [
        r._replace(watermark=MIN_WATERMARK) if r.watermark <= reached else r for r in records[at:]
    ]
    after = drive(second, cut(replayed, MAX_WATERMARK, [7]))

    assert values_of(before + after) == values_of(expected)
    assert [value for _, value, _, _ in first.ctx.side + second.ctx.side] == [
        value for _, value, _, _ in whole.ctx.side
    ]


@pytest.mark.parametrize(
    ("aggregate", "result"),
    [
        (functions.agg(n=functions.count(), mean=functions.mean()), {"n": 3, "mean": 2.0}),
        (functions.distinct(), 3),
        (ReduceAggregate(lambda a, b: a * 10 + b), 132),
        (Collect, [1, 3, 2]),
    ],
)
async def test_sessions_that_an_element_joins_are_merged(aggregate: Any, result: Any) -> None:
    operator = await opened(5, aggregate)
    records = [("k", 1, 0, START), ("k", 3, 10, START), ("k", 2, 5, START)]
    assert drive(operator, cut(records, 14, [3])) == [(WindowResult("k", 0, 15, result), 14, 13)]
    assert left_behind(operator) == ([], [])


async def test_continued_session_has_one_timer_for_any_number_of_its_elements() -> None:
    operator = await opened(10)
    records = [("k", t, t, START) for t in range(1_000)]
    assert drive(operator, cut(records, START, [100])) == []
    assert operator.ctx.timers["window-timers"].event_time_timers() == [(9, "k", None)]
    assert values_of(drive(operator, cut([], MAX_WATERMARK, [1]))) == [
        WindowResult("k", 0, 1_009, list(range(1_000)))
    ]


async def test_element_too_late_for_its_own_session_still_joins_an_open_one() -> None:
    operator = await opened(10)
    records = [("k", "open", 20, 0), ("k", "joins", 11, 25), ("j", "late", 11, 25)]
    assert values_of(drive(operator, cut(records, MAX_WATERMARK, [3]))) == [
        WindowResult("k", 11, 30, ["open", "joins"])
    ]
    assert operator.ctx.side == [("late", "late", 11, 25)]


async def test_among_many_open_sessions_of_a_key_one_is_found_by_few_comparisons() -> None:
    operator, count = await opened(5, functions.count()), 2_000
    records = [("k", i, Compared(10 * (i * 7 % count)), START) for i in range(count)]
    with Compared.counting() as compared:
        drive(operator, cut(records, START, [1]))
        rows = drive(operator, cut([], MAX_WATERMARK, [1]))
    assert [row.start for row in values_of(rows)] == [10 * i for i in range(count)]
    assert compared() < 100 * count


async def test_open_sessions_that_state_of_before_holds_in_any_order_go_on() -> None:
    first = await opened(5)
    drive(first, cut([("k", i, start, START) for i, start in enumerate((20, 0, 10))], START, [3]))
    table = first.ctx.keyed_state.table("sessions")
    table.of(None, ["k"])["k"] = [[20, 25, [0]], [0, 5, [1]], [10, 15, [2]]]
    second = await opened(5, ctx=Context(first.ctx))
    rows = drive(second, cut([("k", 3, 13, START), ("k", 4, 17, START)], MAX_WATERMARK, [2]))
    assert values_of(rows) == [
        WindowResult("k", 0, 5, [1]),
        WindowResult("k", 10, 25, [2, 3, 0, 4]),
    ]
    assert left_behind(second) == ([], [])


async def test_queries_show_the_open_sessions_of_a_key() -> None:
    operator = await opened(5, functions.count())
    drive(
        operator, cut([("k", "a", 0, START), ("k", "b", 20, START), ("k", "c", 21, START)], 0, [3])
    )
    assert operator.ctx.keyed_state.query("sessions", "k") == [(0, 5, 1), (20, 26, 2)]


async def test_a_window_fn_makes_the_rows() -> None:
    def rows_of(key: str, window: Any, value: list[int]) -> Any:
        yield key, window.start, window.end, len(value)
        yield "again"

    operator = await opened(5, window_fn=rows_of)
    assert drive(operator, cut([("k", 1, 1, START)], 5, [1])) == [
        (("k", 1, 6, 1), 5, 4),
        ("again", 5, 4),
    ]


async def test_a_long_firing_is_resumed_in_pieces_of_the_asked_size() -> None:
    operator = await opened(10)
    count = 5_000
    (batch, _) = cut([(i, i, 1, START) for i in range(count)], MAX_WATERMARK, [count])
    pieces = [len(operator.process_batch(batch))]
    while operator.has_pending:
        pieces.append(len(operator.resume(700)))
    assert sum(pieces) == count
    assert max(pieces) == 700


async def test_an_error_of_user_code_names_the_record_or_the_window() -> None:
    operator = await opened(
        10, functions.sum(lambda v: 1 // v), window_fn=lambda key, window, total: 1 // total
    )
    with pytest.raises(ZeroDivisionError) as adding:
        drive(operator, cut([("k", 1, 1, START), ("j", 0, 2, START)], 0, [2]))
    assert adding.value.__notes__[0].endswith("at record 0 of key 'j'")
    operator = await opened(10, functions.sum(), window_fn=lambda key, window, total: 1 // total)
    with pytest.raises(ZeroDivisionError) as firing:
        drive(operator, cut([("j", 0, 1, START)], MAX_WATERMARK, [1]))
    assert firing.value.__notes__[0].endswith("window (1, 11) of key 'j'")


async def test_a_stream_without_timestamps_is_refused_with_the_remedy() -> None:
    operator = await context.opened(SessionWindowOperator(session("5ms"), functions.count()))
    with pytest.raises(Exception, match="watermark strategy upstream"):
        operator.process_batch(context.untimed("k", 1))


# --------------------------------------------------------------------------------------------------
# functions of all elements


class Described(ProcessWindowFunction[Any, Any, Any]):
    """Numbers the sessions of a key, and tells all that the context says."""

    def process(self, key: Any, ctx: Any, elements: Any) -> Any:
        number = ctx.global_state.get_state(ValueStateDescriptor("number", 0))
        number.update(number.value() + 1)
        ctx.output(LATE, (key, number.value()))
        yield key, tuple(ctx.window), number.value(), ctx.current_watermark, elements

    def clear(self, ctx: Any) -> None:
        number = ctx.global_state.get_state(ValueStateDescriptor("cleared", 0))
        number.update(number.value() + 1)


def seen(operator: Any, rows: Any) -> Any:
    state = operator.ctx.keyed_state
    return (
        sorted(rows, key=repr),
        sorted(operator.ctx.side, key=repr),
        *(sorted(state.items(name)) for name in ("number", "cleared") if name in state.names()),
    )


async def processing(ctx: Context | None = None, gap: int = 5, function: Any = None) -> Any:
    made = SessionWindowOperator(
        SessionWindows(gap), process=function or Described(), late_tag=LATE
    )
    return await context.opened(made, ctx)


async def processing_as_before(gap: int = 5) -> Any:
    made = WindowOperator(SessionWindows(gap), process=Described(), late_tag=LATE)
    return await context.opened(made)


@given(STEPS, st.integers(0, 15), st.integers(1, 8), SIZES)
@settings(max_examples=200, deadline=None)
async def test_a_function_gets_what_the_operator_of_all_windows_gives_it(
    steps: Any, delay: int, gap: int, sizes: Any
) -> None:
    records, _ = out_of_order(steps, delay, 0)
    one, other = await processing_as_before(gap), await processing(gap=gap)
    rows = [
        drive(operator, cut(records, MAX_WATERMARK, cuts))
        for operator, cuts in ((one, [1]), (other, sizes))
    ]
    assert seen(one, rows[0]) == seen(other, rows[1])
    assert left_behind(other) == ([], [])


@given(STEPS, st.integers(1, 60), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
async def test_sessions_of_an_earlier_version_go_on_with_their_elements(
    steps: Any, at: int, gap: int
) -> None:
    records, _ = out_of_order(steps, 3, 0)
    whole = await processing(gap=gap)
    expected = drive(whole, cut(records, MAX_WATERMARK, [1]))

    first = await processing_as_before(gap)
    reached = records[at].watermark if at < len(records) else MAX_WATERMARK
    before = drive(first, cut(records[:at], reached, [1]))
    second = await processing(Context(first.ctx), gap)
    replayed = [
        r._replace(watermark=MIN_WATERMARK) if r.watermark <= reached else r for r in records[at:]
    ]
    after = drive(second, cut(replayed, MAX_WATERMARK, [7]))

    assert sorted(values_of(before + after), key=repr) == sorted(values_of(expected), key=repr)
    assert left_behind(second) == ([], [])
    for name in ("window-contents", "window-sessions"):
        assert second.ctx.keyed_state.table(name).namespaces() == []


async def test_sessions_that_fired_do_not_fire_again_when_the_lateness_is_taken_away() -> None:
    first = await context.opened(
        WindowOperator(SessionWindows(5), process=Described(), lateness_ms=1_000, late_tag=LATE)
    )
    records = [("k", 1, 0, START), ("j", 1, 1, START), ("k", 2, 20, 15)]
    fired = drive(first, cut(records, 16, [1]))
    assert {row[:2] for row in values_of(fired)} == {("k", (0, 5)), ("j", (1, 6))}
    second = await processing(Context(first.ctx))
    assert sorted(second.ctx.keyed_state.items("cleared")) == [
        ("j", 1),
        ("k", 1),
    ]
    left = drive(second, cut([("k", 3, 22, 16)], MAX_WATERMARK, [1]))
    assert [row[:2] for row in values_of(left)] == [("k", (20, 27))]
    assert left_behind(second) == ([], [])


async def test_many_results_of_one_session_leave_in_pieces_between_which_no_checkpoint_is() -> None:
    def counted(key: Any, ctx: Any, elements: Any) -> Any:
        for i in range(2_000):
            yield key, ctx.window.start, i

    operator = await processing(function=counted)
    operator.process_batch(next(iter(cut([("k", 1, 0, START), ("j", 1, 1, START)], START, [2]))))
    pieces = [operator.process_batch(empty_batch(MAX_WATERMARK))]
    while operator.has_pending:
        left = -sum(len(piece.values) for piece in pieces) % 2_000
        assert (operator.unprocessed() is None) is (left > 0)
        pieces.append(operator.resume(1_024))
    assert [row for piece in pieces for row in piece.values] == [
        (key, start, i) for key, start in (("k", 0), ("j", 1)) for i in range(2_000)
    ]
    assert max(len(piece.values) for piece in pieces) <= 1_024
    assert left_behind(operator) == ([], [])


async def test_a_failing_function_names_the_session_and_its_key() -> None:
    def failing(key: Any, ctx: Any, elements: Any) -> Any:
        return [1 // 0]

    operator = await processing(function=failing)
    with pytest.raises(ZeroDivisionError) as caught:
        drive(operator, cut([("k", 1, 0, START)], MAX_WATERMARK, [1]))
    assert any("window (0, 5) of key 'k'" in note for note in caught.value.__notes__)
