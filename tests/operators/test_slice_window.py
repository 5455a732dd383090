"""The fast path of windows against the textbook: the same rows in the same order, however the
input was cut.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK
from aioflow.core.functions import AggregateFunction, OutputTag, WindowResult
from aioflow.core.keygroups import KeyGroupRange, key_group
from aioflow.operators.aggregate import functions
from aioflow.operators.results import RESULTS_FIRST
from aioflow.operators.window.assigners import (
    SliceGrid,
    SlidingWindows,
    TumblingWindows,
    sliding,
    tumbling,
)
from aioflow.operators.window.slices import SliceWindowOperator

from . import context
from .context import Context, cut, drive, values_of
from .reference import Record, sliding_windows, windows_of

LATE: OutputTag[Any] = OutputTag("late")
SIZES = st.sampled_from([[1], [7], [1024], [3, 1, 5, 2]])


class Collect(AggregateFunction[Any, list[Any], list[Any]]):
    """Keeps every value, so that a lost, doubled or displaced record shows.

    `merge` changes what it is given.
    """

    def create_accumulator(self) -> list[Any]:
        return []

    def add(self, value: Any, accumulator: list[Any]) -> list[Any]:
        accumulator.append(value)
        return accumulator

    def merge(self, a: list[Any], b: list[Any]) -> list[Any]:
        a.extend(b)
        return a

    def get_result(self, accumulator: list[Any]) -> list[Any]:
        return list(accumulator)

    def fold(self, table: dict[Any, list[Any]], keys: list[Any], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            table.setdefault(key, []).append(value)


async def opened(assigner: Any, lateness: int = 0, ctx: Context | None = None) -> Any:
    return await context.opened(
        SliceWindowOperator(assigner, Collect(), lateness_ms=lateness, late_tag=LATE), ctx
    )


def out_of_order(steps: list[tuple[str, int]], delay: int, origin: int) -> tuple[list[Record], int]:
    """Records at `origin` plus random jitter; the watermark is the running maximum minus `delay`
    minus 1.
    """
    records, highest = [], None
    for i, (key, jitter) in enumerate(steps):
        timestamp = origin + i // 2 + jitter
        watermark = MIN_WATERMARK if highest is None else highest - delay - 1
        records.append(Record(key, i, timestamp, watermark))
        highest = timestamp if highest is None else max(highest, timestamp)
    return records, MIN_WATERMARK if highest is None else highest - delay - 1


STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-12, 12)), max_size=60)


@given(
    STEPS,
    st.integers(0, 15),
    st.integers(-40, 40),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(-11, 11),
    st.integers(0, 9),
    SIZES,
    st.booleans(),
    st.integers(1, 3),
)
@settings(max_examples=300, deadline=None)
async def test_slices_give_the_rows_of_the_textbook_for_every_cut(
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
) -> None:
    size, slide = max(size, slide), min(size, slide)
    offset = offset % slide
    assigner = (
        SlidingWindows(size, slide, offset) if slide < size else TumblingWindows(size, offset)
    )
    records, final = out_of_order(steps, delay, origin)
    final = MAX_WATERMARK if ends else final
    operator = await opened(assigner, lateness)

    rows = drive(operator, cut(records, final, sizes), resume)

    expected, late = sliding_windows(records, final, size, slide, offset, lateness)

    def normal(row: tuple[Any, ...]) -> tuple[Any, ...]:
        key, start, end, values, timestamp, watermark = row
        return end, watermark, timestamp, start, key, sorted(values)

    got = [(*row, timestamp, watermark) for row, timestamp, watermark in rows]
    # Between firings the order is fixed; of one window that fires, the keys are compared as a set
    # here.
    assert sorted(map(normal, got)) == sorted(map(normal, expected))
    assert [(row[1], row[2]) for row, *_ in rows] == [(row.start, row.end) for row in expected]
    assert [value for _, value, _, _ in operator.ctx.side] == late
    assert operator.ctx.dropped() == len(late)


@given(
    STEPS,
    st.integers(0, 15),
    st.integers(-40, 40),
    st.sampled_from([(10, 10), (10, 5), (6, 4), (7, 3)]),
    st.integers(0, 5),
    SIZES,
)
@settings(max_examples=100, deadline=None)
async def test_the_sequence_does_not_depend_on_where_batches_are_cut(
    steps: Any, delay: int, origin: int, shape: tuple[int, int], lateness: int, sizes: Any
) -> None:
    records, _ = out_of_order(steps, delay, origin)
    runs = []
    for cuts in ([1024], sizes):
        operator = await opened(SlidingWindows(*shape), lateness)
        runs.append((drive(operator, cut(records, MAX_WATERMARK, cuts)), operator.ctx.side))
    assert runs[0] == runs[1]


async def test_a_window_fires_at_its_last_instant_and_not_before() -> None:
    """G1.3"""
    operator = await opened(tumbling("10ms"))
    rows = drive(operator, cut([("k", "a", 3, MIN_WATERMARK)], 8, [1]))
    assert rows == []
    assert drive(operator, cut([], 9, [1])) == [(WindowResult("k", 0, 10, ["a"]), 9, 8)]


async def test_late_elements_fire_again_within_the_lateness_and_are_dropped_after() -> None:
    """G1.3"""
    operator = await opened(tumbling("10ms"), lateness=5)
    records = [("k", "a", 3, -5), ("k", "b", 4, 9), ("k", "c", 5, 13), ("k", "d", 6, 14)]
    rows = drive(operator, cut(records, 14, [2]))
    assert rows == [
        (WindowResult("k", 0, 10, ["a"]), 9, 8),
        (WindowResult("k", 0, 10, ["a", "b"]), 9, 9),
        (WindowResult("k", 0, 10, ["a", "b", "c"]), 9, 13),
    ]
    assert operator.ctx.side == [("late", "d", 6, 14)]
    assert operator.ctx.dropped() == 1


class Greedy(Collect):
    """An aggregate whose `merge` returns its second argument, and changes the returned value the
    next time.
    """

    def merge(self, a: list[Any], b: list[Any]) -> list[Any]:
        if not a:
            return b
        a.extend(b)
        return a


async def test_slices_survive_a_merge_that_gives_back_what_it_was_given() -> None:
    operator = await context.opened(SliceWindowOperator(sliding("30ms", "10ms"), Greedy()))
    records = [("k", t, t, MIN_WATERMARK) for t in (5, 15, 25)]
    rows = values_of(drive(operator, cut(records, MAX_WATERMARK, [1])))
    assert [row.value for row in rows] == [[5], [5, 15], [5, 15, 25], [15, 25], [25]]


@pytest.mark.parametrize("shape", [(30, 10), (320, 10)])
async def test_slices_survive_merges_of_accumulators_that_change_in_place(
    shape: tuple[int, int],
) -> None:
    aggregate = functions.agg(n=functions.count(), mean=functions.mean())
    operator = await context.opened(SliceWindowOperator(SlidingWindows(*shape), aggregate))
    records = [Record("k", t % 7, t, t - 1) for t in range(0, 700, 5)]
    rows = [(*row, t, w) for row, t, w in drive(operator, cut(records, MAX_WATERMARK, [9]))]

    def fold(values: list[int]) -> dict[str, Any]:
        return {"n": len(values), "mean": sum(values) / len(values)}

    assert rows == [
        tuple(row) for row in sliding_windows(records, MAX_WATERMARK, *shape, fold=fold)[0]
    ]


async def test_a_window_fn_makes_the_rows_of_slices_too() -> None:
    def rows_of(key: str, window: Any, value: list[int]) -> Any:
        yield key, window.end, len(value)
        yield "again"

    operator = await context.opened(
        SliceWindowOperator(tumbling("10ms"), Collect(), window_fn=rows_of)
    )
    records = [("k", t, t, MIN_WATERMARK) for t in (5, 6)]
    assert drive(operator, cut(records, 9, [2])) == [(("k", 10, 2), 9, 8), ("again", 9, 8)]


async def test_record_is_held_once_for_any_number_of_its_windows() -> None:
    operator = await opened(sliding("10s", "1s"))
    drive(operator, cut([("k", "a", 500, MIN_WATERMARK)], MIN_WATERMARK, [1]))
    table = operator.ctx.keyed_state.table("window-slices")
    assert [(start, dict(table.of(start))) for start in table.namespaces()] == [(0, {"k": ["a"]})]


async def test_state_is_gone_when_no_window_needs_the_slice_any_more() -> None:
    operator = await opened(sliding("10ms", "5ms"), lateness=2)
    records = [("k", "a", 3, MIN_WATERMARK)]
    table = operator.ctx.keyed_state.table("window-slices")
    drive(operator, cut(records, 10, [1]))
    assert table.namespaces() == [0]
    drive(operator, cut([], 11, [1]))
    assert table.namespaces() == []


async def test_a_long_firing_is_resumed_in_pieces_of_the_asked_size() -> None:
    operator = await opened(tumbling("10ms"))
    count = 5_000
    records = [(i, i, 1, MIN_WATERMARK) for i in range(count)]
    (batch, _) = cut(records, MAX_WATERMARK, [count])
    out = operator.process_batch(batch)
    pieces = [len(out)]
    assert out.watermark == 8
    while operator.has_pending:
        out = operator.resume(700)
        pieces.append(len(out))
    assert out.watermark == MAX_WATERMARK
    assert sum(pieces) == count
    assert pieces[:5] == [RESULTS_FIRST, 64, 128, 256, 512]
    assert set(pieces[5:-2]) == {700}


@given(
    STEPS,
    st.integers(0, 15),
    st.integers(-40, 40),
    st.sampled_from([(16, 1), (24, 2), (40, 3), (30, 2)]),
    st.integers(-2, 2),
    st.integers(0, 9),
    SIZES,
    st.integers(1, 3),
)
@settings(max_examples=300, deadline=None)
async def test_windows_of_many_slices_give_the_rows_of_the_textbook_for_every_cut(
    steps: Any,
    delay: int,
    origin: int,
    shape: tuple[int, int],
    offset: int,
    lateness: int,
    sizes: Any,
    resume: int,
) -> None:
    records, _ = out_of_order(steps, delay, origin)
    offset = max(-shape[1] + 1, min(offset, shape[1] - 1))
    operator = await opened(SlidingWindows(*shape, offset), lateness)

    rows = drive(operator, cut(records, MAX_WATERMARK, sizes), resume)

    expected, late = sliding_windows(records, MAX_WATERMARK, *shape, offset, lateness)

    def normal(row: tuple[Any, ...]) -> tuple[Any, ...]:
        key, start, end, values, timestamp, watermark = row
        return end, watermark, timestamp, start, key, sorted(values)

    got = [(*row, timestamp, watermark) for row, timestamp, watermark in rows]
    assert sorted(map(normal, got)) == sorted(map(normal, expected))
    assert operator.ctx.dropped() == len(late)
    assert operator.ctx.keyed_state.table("window-slices").namespaces() == []
    assert operator._slices.runs._runs == {}


async def test_a_window_of_many_slices_merges_each_accumulator_a_few_times() -> None:
    merges = 0

    class Counting(Collect):
        def merge(self, a: list[Any], b: list[Any]) -> list[Any]:
            nonlocal merges
            merges += 1
            return super().merge(a, b)

    operator = await context.opened(SliceWindowOperator(SlidingWindows(64, 1), Counting()))
    count = 1_000
    records = [("k", t, t, t - 1) for t in range(count)]
    rows = values_of(drive(operator, cut(records, count - 1, [100])))
    assert [row.value for row in rows[500:502]] == [list(range(437, 501)), list(range(438, 502))]
    # A run has two halves, merged into a new accumulator; a window is covered by at most 2 *
    # log2(64) runs. All slices: 64.
    assert merges / count <= 2 + 12


@given(
    STEPS,
    st.integers(0, 15),
    st.integers(-40, 40),
    st.sampled_from([(6, 2), (10, 2), (14, 2), (10, 4)]),
    st.integers(0, 9),
    SIZES,
)
@settings(max_examples=200, deadline=None)
async def test_counts_of_windows_of_few_slices_are_those_of_the_textbook_for_every_cut(
    steps: Any, delay: int, origin: int, shape: tuple[int, int], lateness: int, sizes: Any
) -> None:
    records, _ = out_of_order(steps, delay, origin)
    operator = await context.opened(
        SliceWindowOperator(SlidingWindows(*shape), functions.count(), lateness_ms=lateness)
    )

    rows = values_of(drive(operator, cut(records, MAX_WATERMARK, sizes)))

    expected, _ = sliding_windows(records, MAX_WATERMARK, *shape, 0, lateness)
    assert sorted((row.end, row.key, row.value) for row in rows) == sorted(
        (row.end, row.key, len(row.value)) for row in expected
    )
    assert operator._slices.runs._runs == {}


class CountingMerges(functions.Count):
    """Says how many accumulators were merged into others."""

    merges = 0

    def __init__(self, *, regroups: bool = True) -> None:
        super().__init__(None, None)
        self.regroups = regroups

    @property
    def merger(self) -> Any:
        merger = super().merger
        assert merger is not None

        def counting(merged: Any, items: Any) -> None:
            items = list(items)
            self.merges += len(items)
            merger(merged, items)

        return counting


@pytest.mark.parametrize(("regroups", "merges"), [(True, 9 / 4), (False, 4)])
async def test_windows_of_few_slices_share_merges_where_any_grouping_gives_the_same(
    *, regroups: bool, merges: float
) -> None:
    count = CountingMerges(regroups=regroups)
    operator = await context.opened(SliceWindowOperator(SlidingWindows(10, 2), count))
    slices = 400
    records = [("k", t, t, t - 1) for t in range(2 * slices)]
    rows = values_of(drive(operator, cut(records, 2 * slices - 1, [100])))
    assert [row.value for row in rows] == [2, 4, 6, 8] + [10] * (slices - 4)
    assert count.merges / slices == pytest.approx(merges, rel=0.05)


def test_only_what_does_not_round_says_that_any_grouping_gives_the_same() -> None:
    parts = {"n": functions.count(), "first": functions.first(), "last": functions.last()}
    assert functions.resolve_aggregate(functions.agg(**parts)).regroups
    assert not functions.resolve_aggregate(functions.agg(**parts, mean=functions.mean())).regroups
    assert not functions.resolve_aggregate(functions.sum()).regroups
    assert not functions.resolve_aggregate(Collect()).regroups


SHAPES = st.sampled_from([(10, 10), (10, 5), (6, 4)])


@given(STEPS, st.integers(1, 60), SHAPES, st.integers(0, 5))
@settings(max_examples=100, deadline=None)
async def test_a_restored_operator_goes_on_as_if_nothing_had_happened(
    steps: Any, at: int, shape: tuple[int, int], lateness: int
) -> None:
    records, _ = out_of_order(steps, 3, 0)
    whole = await opened(SlidingWindows(*shape), lateness)
    expected = values_of(drive(whole, cut(records, MAX_WATERMARK, [1])))

    first = await opened(SlidingWindows(*shape), lateness)
    reached = records[at].watermark if at < len(records) else MAX_WATERMARK
    before = values_of(drive(first, cut(records[:at], reached, [1])))
    first.snapshot_state(1)
    second = await opened(SlidingWindows(*shape), lateness, Context(first.ctx))
    # The source may need a while to reach again the watermark that it had:
    # nothing fires twice, what was late stays late.
    replayed = [
        r._replace(watermark=MIN_WATERMARK) if r.watermark <= reached else r for r in records[at:]
    ]
    after = values_of(drive(second, cut(replayed, MAX_WATERMARK, [7])))

    # A snapshot keeps the order of keys within a key group only.
    assert sorted(before + after, key=lambda row: (row.end, row.key)) == sorted(
        expected, key=lambda row: (row.end, row.key)
    )
    assert [row.end for row in before + after] == [row.end for row in expected]
    assert [value for _, value, _, _ in first.ctx.side + second.ctx.side] == [
        v for _, v, _, _ in whole.ctx.side
    ]


@given(STEPS, STEPS, SHAPES, st.integers(0, 5), st.integers(0, 30), SIZES)
@settings(max_examples=100, deadline=None)
async def test_key_groups_that_had_got_further_before_a_rescaled_restore_do_not_fire_again(
    steps: Any, more: Any, shape: tuple[int, int], lateness: int, gap: int, sizes: Any
) -> None:
    ranges = [
        KeyGroupRange(0, 30),
        KeyGroupRange(31, 127),
    ]  # Key a is in the first, b and c are in the second.
    records, reached = out_of_order(steps, 3, 0)
    later = [
        Record(key, 1_000 + i, 30 + i // 2 + jitter, reached)
        for i, (key, jitter) in enumerate(more)
    ]
    former, before, expected = [], [], []
    for groups, ahead in zip(ranges, (0, gap), strict=True):
        mine = [record for record in records if key_group(record.key, 128) in groups]
        now = reached + ahead if mine else reached
        operator = await opened(SlidingWindows(*shape), lateness, Context(groups=groups))
        before += drive(operator, cut(mine, now, sizes))
        operator.snapshot_state(1)
        former.append(operator)
        own = [record for record in later if key_group(record.key, 128) in groups]
        alone = await opened(SlidingWindows(*shape), lateness, Context(operator.ctx, groups=groups))
        expected += values_of(drive(alone, cut(own, MAX_WATERMARK, sizes)))

    merged = await opened(
        SlidingWindows(*shape), lateness, Context(*(operator.ctx for operator in former))
    )
    rows = values_of(drive(merged, cut(later, MAX_WATERMARK, sizes)))

    def normal(row: Any) -> Any:
        return row.end, row.key, sorted(row.value)

    assert sorted(map(normal, rows)) == sorted(map(normal, expected))


@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(-30, 30),
    st.integers(-100, 100),
    st.integers(-100, 100),
    st.integers(0, 20),
)
def test_the_grid_agrees_with_windows_found_one_by_one(
    size: int, slide: int, offset: int, timestamp: int, watermark: int, lateness: int
) -> None:
    size, slide = max(size, slide), min(size, slide)
    grid = SliceGrid(size, slide, offset, lateness)
    ends = sorted(end for _, end in windows_of(timestamp, size, slide, offset))
    start = grid.slice_start(timestamp)
    assert start <= timestamp < start + grid.width
    assert (grid.first_end(start), grid.last_end(start)) == (ends[0], ends[-1])
    dropped = ends[-1] - 1 + lateness <= watermark
    assert (timestamp < grid.late_below(watermark)) == dropped
    touches_fired = any(end - 1 <= watermark < end - 1 + lateness for end in ends)
    if dropped or touches_fired:
        assert timestamp < grid.live_from(watermark)
    elif ends[0] - 1 > watermark:
        assert timestamp >= grid.live_from(watermark)


async def test_an_error_of_the_aggregate_names_the_record_that_caused_it() -> None:
    operator = await context.opened(
        SliceWindowOperator(tumbling("10ms"), functions.sum(lambda v: 1 // v))
    )
    with pytest.raises(ZeroDivisionError) as caught:
        drive(operator, cut([("k", 1, 1, MIN_WATERMARK), ("j", 0, 2, MIN_WATERMARK)], 0, [2]))
    assert "window" in caught.value.__notes__[0]
    assert caught.value.__notes__[0].endswith("at record 0 of key 'j'")


async def test_an_error_of_the_window_function_names_the_window_and_its_key() -> None:
    by_total = SliceWindowOperator(
        tumbling("10ms"), functions.sum(), window_fn=lambda key, window, total: 1 // total
    )
    operator = await context.opened(by_total)
    with pytest.raises(ZeroDivisionError) as caught:
        drive(
            operator,
            cut([("k", 1, 1, MIN_WATERMARK), ("j", 0, 2, MIN_WATERMARK)], MAX_WATERMARK, [2]),
        )
    assert caught.value.__notes__[0].endswith("window (0, 10) of key 'j'")


async def test_a_stream_without_timestamps_is_refused_with_the_remedy() -> None:
    operator = await opened(tumbling("10ms"))
    (batch, _) = cut([("k", "a", 3, MIN_WATERMARK)], MIN_WATERMARK, [1])
    batch.timestamps = None
    with pytest.raises(Exception, match="watermark strategy"):
        operator.process_batch(batch)
