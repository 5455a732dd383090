"""Windows of processing time in slices: against the operator of all windows on one clock, and
across restores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflow.core.elements import MIN_WATERMARK, RecordBatch
from aioflow.core.errors import StateError
from aioflow.core.functions import WindowResult
from aioflow.core.keygroups import KeyGroupRange, key_group
from aioflow.operators.aggregate import functions
from aioflow.operators.window.assigners import SlidingWindows, TumblingWindows, sliding, tumbling
from aioflow.operators.window.operator import WindowOperator
from aioflow.operators.window.slices import ClockWindowOperator

from . import context
from .context import Context, Physical, untimed
from .test_slice_window import Collect


class Clock(Context):
    """A timer for a millisecond fires when that is over, as that of a task does."""

    def register_processing_timer(
        self, timestamp_ms: int, callback: Callable[[int], None]
    ) -> Physical:
        return super().register_processing_timer(timestamp_ms + 1, lambda _: callback(timestamp_ms))


TEN = tumbling("10s", time="processing")
SLIDING = sliding("10s", "5s", time="processing")


async def opened(assigner: Any, ctx: Context, aggregate: Any = None, **options: Any) -> Any:
    return await context.opened(
        ClockWindowOperator(assigner, aggregate or Collect(), **options), ctx
    )


def drained(operator: Any, out: Any) -> list[Any]:
    """The values of `out` and of all that is pending."""
    values = list(out.values)
    while operator.has_pending:
        values += operator.resume(3).values
    return values


def passed(operator: Any, ms: int) -> list[Any]:
    """Returns the output of the operator while the clock advances by `ms`, a millisecond at a
    time.
    """
    values = []
    for _ in range(ms):
        values += operator.ctx.advance(1)
        while operator.has_pending:
            values += operator.resume(3).values
    return values


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.lists(st.sampled_from("abc"), max_size=4)), max_size=25
    ),
    st.sampled_from([(7, 7), (10, 5), (9, 6), (4, 1)]),
    st.integers(0, 3),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
async def test_slices_of_the_clock_give_what_the_operator_of_all_windows_gives(
    steps: Any, shape: tuple[int, int], offset: int, ends: bool
) -> None:
    """G6.1"""
    size, slide = shape
    if slide == size:
        assigner: Any = TumblingWindows(size, offset, False)
    else:
        assigner = SlidingWindows(size, slide, offset % slide, False)
    general = await context.opened(
        WindowOperator(assigner, aggregate=Collect()), Clock(has_event_time=False)
    )
    sliced = await opened(assigner, Clock(has_event_time=False))
    given_out: list[list[Any]] = []
    for operator in (general, sliced):
        values: list[Any] = []
        for number, (pause, keys) in enumerate(steps):
            values += passed(operator, pause)
            operator.process_batch(RecordBatch([number] * len(keys), None, keys))
        values += drained(operator, operator.finish()) if ends else passed(operator, 30)
        given_out.append(values)
        assert operator.ctx.keyed_state.table("window-slices").namespaces() == []
    # Keys of one window come in any order, windows in that of their ends.
    assert [row.end for row in given_out[1]] == [row.end for row in given_out[0]]
    assert sorted(given_out[1]) == sorted(given_out[0])


async def test_the_clock_alone_decides_and_one_timer_stands_for_all_keys() -> None:
    """G6.1"""
    ctx = Clock(now_ms=1_000)
    operator = await opened(TEN, ctx, functions.sum())
    # Timestamps and watermarks of the records mean nothing to the windows, and pass.
    out = operator.process_batch(
        RecordBatch([1, 2, 3], [5, 99_999, 7], ["k", "k", "j"], [0, 50_000, 50_000], 100_000)
    )
    assert (out.values, out.watermark) == ([], 100_000)
    assert len(ctx._physical) == 1
    assert ctx.advance(8_999) == []
    assert ctx.advance(1) == [WindowResult("k", 0, 10_000, 3), WindowResult("j", 0, 10_000, 3)]
    (batch,) = ctx.emitted
    assert (batch.timestamps, batch.watermarks, batch.watermark) == (
        [9_999, 9_999],
        [100_000, 100_000],
        100_000,
    )
    assert ctx._physical == []
    assert ctx.advance(100_000) == []


async def test_a_long_firing_leaves_the_loop_after_each_piece() -> None:
    ctx = Clock(has_event_time=False)
    operator = await opened(TEN, ctx, functions.count())
    operator.process_batch(RecordBatch([0] * 5_000, None, list(range(5_000))))
    pieces = [len(ctx.advance(10_000))]
    while operator.has_pending:
        pieces.append(len(operator.resume(700)))
    assert sum(pieces) == 5_000
    assert max(pieces) == 700
    # Only then does the next window get its timer.
    operator.process_batch(untimed("k", 1))
    assert ctx.advance(10_000) == [WindowResult("k", 10_000, 20_000, 1)]


async def test_a_clock_that_is_put_back_opens_no_window_again() -> None:
    ctx = Clock(has_event_time=False)
    operator = await opened(TEN, ctx, functions.count())
    operator.process_batch(untimed("k", 1))
    assert ctx.advance(10_000) == [WindowResult("k", 0, 10_000, 1)]
    ctx.now_ms = 5_000
    operator.process_batch(untimed("k", 2))
    assert ctx.advance(15_000) == [WindowResult("k", 10_000, 20_000, 1)]


async def test_windows_that_ended_while_nothing_ran_fire_at_once_after_a_restore() -> None:
    ctx = Clock(has_event_time=False)
    operator = await opened(SLIDING, ctx, functions.count())
    operator.process_batch(untimed("k", 1))
    assert ctx.advance(5_000) == [WindowResult("k", -5_000, 5_000, 1)]
    operator.snapshot_state(1)
    again = Clock(ctx, has_event_time=False, now_ms=60_000)
    await opened(SLIDING, again, functions.count())
    assert again.advance(0) == [WindowResult("k", 0, 10_000, 1)]
    assert again.advance(100_000) == []


@pytest.mark.parametrize("fired", [True, False], ids=["a window has fired", "none has"])
@pytest.mark.parametrize("years", [1, 10])
async def test_windows_continue_after_a_restore_though_the_clock_had_been_years_ahead(
    years: int, fired: bool
) -> None:
    """Records of a job that is restored on a clock that is right again wait for their own
    window, and not for years.
    """
    wrong = years * 365 * 86_400_000
    ctx = Clock(has_event_time=False, now_ms=wrong)
    operator = await opened(TEN, ctx, functions.count())
    operator.process_batch(untimed("k", 1))
    if fired:
        assert ctx.advance(10_000) == [WindowResult("k", wrong, wrong + 10_000, 1)]
    operator.snapshot_state(1)
    again = Clock(ctx, has_event_time=False, now_ms=60_000)
    operator = await opened(TEN, again, functions.count())
    operator.process_batch(untimed("k", 2, 3))
    (row,) = again.advance(10_000)
    assert (row.end - row.start, row.value) == (10_000, 2 if fired else 3)
    operator.process_batch(untimed("k", 4))
    (row,) = again.advance(10_000)
    assert row.value == 1


@pytest.mark.parametrize("later", [0, 3_000, 60_000])
async def test_key_groups_that_had_got_further_before_a_rescaled_restore_do_not_fire_again(
    later: int,
) -> None:
    ranges = [
        KeyGroupRange(0, 30),
        KeyGroupRange(31, 127),
    ]  # Key a is in the first, b is in the second.
    former = []
    for key, groups, now in (("a", ranges[0], 5_000), ("b", ranges[1], 4_999)):
        assert key_group(key, 128) in groups
        ctx = Clock(has_event_time=False, groups=groups)
        operator = await opened(SLIDING, ctx, functions.count())
        operator.process_batch(untimed(key, 1))
        fired = ctx.advance(now)
        assert fired == ([WindowResult("a", -5_000, 5_000, 1)] if key == "a" else [])
        operator.snapshot_state(1)
        former.append(ctx)
    merged = Clock(*former, has_event_time=False, now_ms=5_000 + later)
    operator = await opened(SLIDING, merged, functions.count())
    rows = [
        WindowResult("b", -5_000, 5_000, 1),
        WindowResult("a", 0, 10_000, 1),
        WindowResult("b", 0, 10_000, 1),
    ]
    assert sorted(merged.advance(20_000), key=lambda row: (row.end, row.key)) == rows


async def test_windows_that_are_open_at_the_end_fire_then() -> None:
    ctx = Clock(has_event_time=False)
    operator = await opened(SLIDING, ctx, functions.count())
    operator.process_batch(untimed("a", 1))
    operator.process_batch(untimed("b", 2))
    values = drained(operator, operator.finish())
    assert values == [
        WindowResult(key, start, start + 10_000, 1) for start in (-5_000, 0) for key in "ab"
    ]
    await operator.close()
    assert ctx.advance(100_000) == []


async def test_a_window_fn_makes_the_rows_and_a_batch_without_keys_is_refused() -> None:
    ctx = Clock(has_event_time=False)
    operator = await opened(
        TEN, ctx, functions.count(), window_fn=lambda key, window, n: (key, window.end, n)
    )
    operator.process_batch(untimed("k", 1, 2))
    assert ctx.advance(10_000) == [("k", 10_000, 2)]
    with pytest.raises(StateError, match="put key_by directly before window"):
        operator.process_batch(RecordBatch([1], None, None, None, MIN_WATERMARK))
