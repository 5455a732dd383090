"""Joins against the textbook, for every cut of both inputs, and case by case."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import aioflow as af
from aioflow.core.elements import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    RecordBatch,
    TimeWindow,
    empty_batch,
)
from aioflow.core.errors import GraphError, StateError
from aioflow.core.functions import OutputTag, Pair
from aioflow.operators import results
from aioflow.operators.join.joins import FIRED, CoGroupOperator
from aioflow.operators.join.stream_joins import (
    PARTLY_JOINED,
    IntervalJoinOperator,
    RegularJoinOperator,
)
from aioflow.operators.join.window_join import WindowJoinOperator
from aioflow.operators.window.assigners import SlidingWindows, TumblingWindows, session, tumbling
from aioflow.state.rocksdb import RocksDB
from aioflow.state.snapshot import InlineState

from .context import Context, drive_inputs, opened, values_of
from .parts import PARALLELISMS, in_parts
from .reference import Sided, co_groups, interval_pairs

START = MIN_WATERMARK
SIZES = st.sampled_from([1, 7, 1024, 3])
KEYS: Any = st.one_of(st.integers(0, 40), st.sampled_from(["a", "b", None, (1, "x"), 0.5, True]))
STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from("ab"), st.integers(-12, 12)), max_size=60
)


def two_streams(steps: list[tuple[int, str, int]], delay: int, origin: int) -> list[Sided]:
    """Records of both sides in order of arrival; the watermark is the minimum over the sides."""
    records: list[Sided] = []
    highest: list[int | None] = [None, None]
    for i, (side, key, jitter) in enumerate(steps):
        timestamp = origin + i // 2 + jitter
        watermark = (
            START if None in highest else min(h for h in highest if h is not None) - delay - 1
        )
        records.append(Sided(side, key, i, timestamp, watermark))
        before = highest[side]
        highest[side] = timestamp if before is None else max(before, timestamp)
    return records


def batches(records: list[Sided], final: int, size: int) -> list[tuple[int, RecordBatch]]:
    """Runs of one side, at most `size` long."""
    cut: list[tuple[int, RecordBatch]] = []
    position = 0
    while position < len(records):
        side, end = records[position].side, position
        while end < len(records) and records[end].side == side and end - position < size:
            end += 1
        part = records[position:end]
        after = records[end].watermark if end < len(records) else final
        cut.append(
            (
                side,
                RecordBatch(
                    [r.value for r in part],
                    [r.timestamp for r in part],
                    [r.key for r in part],
                    [r.watermark for r in part],
                    after,
                ),
            )
        )
        position = end
    return [*cut, (0, RecordBatch([], None, None, None, final))]


@given(
    STEPS,
    st.integers(0, 15),
    st.integers(-40, 40),
    st.integers(1, 12),
    st.integers(1, 12),
    SIZES,
    st.integers(1, 3),
)
@settings(max_examples=200, deadline=None)
async def test_co_group_gives_the_groups_of_the_textbook_for_every_cut(
    steps: Any, delay: int, origin: int, size: int, slide: int, cut: int, resume: int
) -> None:
    records = two_streams(steps, delay, origin)
    assigner = SlidingWindows(size, slide) if size != slide else TumblingWindows(size)
    operator = await opened(
        CoGroupOperator(assigner, lambda key, lefts, rights: [(key, lefts, rights)])
    )

    rows = drive_inputs(operator, batches(records, MAX_WATERMARK, cut), resume)

    expected = co_groups(records, MAX_WATERMARK, size, slide)
    assert [(*row, timestamp) for row, timestamp, _ in rows] == [
        (key, lefts, rights, end - 1) for key, _, end, lefts, rights in expected
    ]


@given(
    STEPS, st.integers(0, 15), st.integers(-40, 40), st.integers(1, 12), SIZES, st.integers(1, 3)
)
@settings(max_examples=200, deadline=None)
async def test_a_window_join_gives_one_row_for_each_pair(
    steps: Any, delay: int, origin: int, size: int, cut: int, resume: int
) -> None:
    records = two_streams(steps, delay, origin)
    operator = await opened(
        WindowJoinOperator(TumblingWindows(size), lambda left, right: (left, right))
    )

    rows = drive_inputs(operator, batches(records, MAX_WATERMARK, cut), resume)

    assert [(row, timestamp) for row, timestamp, _ in rows] == [
        ((left, right), end - 1)
        for _, _, end, lefts, rights in co_groups(records, MAX_WATERMARK, size, size)
        for left in lefts
        for right in rights
    ]


@given(
    STEPS,
    st.integers(0, 15),
    st.integers(-40, 40),
    st.integers(-8, 8),
    st.integers(0, 8),
    SIZES,
    st.integers(1, 3),
)
@settings(max_examples=300, deadline=None)
async def test_an_interval_join_gives_the_pairs_of_the_textbook_for_every_cut(
    steps: Any, delay: int, origin: int, lower: int, length: int, cut: int, resume: int
) -> None:
    records = two_streams(steps, delay, origin)
    operator = await opened(
        IntervalJoinOperator(lambda left, right, ctx: [(left, right)], lower, lower + length)
    )

    rows = drive_inputs(operator, batches(records, MAX_WATERMARK, cut), resume)

    expected, late = interval_pairs(records, lower, lower + length)
    assert [(*row, timestamp) for row, timestamp, _ in rows] == expected
    assert operator.ctx.dropped() == late
    for table in ("interval-join-left", "interval-join-right"):
        assert operator.ctx.keyed_state.table(table).namespaces() == []
    assert operator.ctx.timers["interval-join-timers"].event_time_timers() == []


@given(
    st.lists(st.tuples(st.integers(0, 1), KEYS, st.integers(-12, 12)), max_size=60),
    st.integers(0, 15),
    st.integers(-8, 8),
    st.integers(0, 8),
    st.integers(15, 400),
    SIZES,
    st.integers(1, 3),
)
@settings(max_examples=300, deadline=None)
async def test_an_interval_join_of_many_keys_drops_what_is_over_within_an_instant(
    steps: Any, delay: int, lower: int, length: int, scale: int, cut: int, resume: int
) -> None:
    """Most keys occur once, and the interval is so long that elements are dropped later."""
    lower, upper = lower * scale, (lower + length) * scale
    records = [
        Sided(side, key, value, time * scale + value, max(START, mark * scale))
        for side, key, value, time, mark in two_streams(steps, delay, 0)
    ]
    operator = await opened(
        IntervalJoinOperator(lambda left, right, ctx: [(left, right)], lower, upper)
    )
    expected, late = interval_pairs(records, lower, upper)
    instant = (max(0, upper) + max(0, -lower)) // 64 + 1
    tables = [
        (operator.ctx.keyed_state.table(table), kept_for)
        for table, kept_for in (
            ("interval-join-left", max(0, upper)),
            ("interval-join-right", max(0, -lower)),
        )
    ]

    rows = []
    for side, batch in batches(records, MAX_WATERMARK, cut):
        rows += drive_inputs(operator, [(side, batch)], resume)
        for table, kept_for in tables:
            for times, _ in table.peek().values():
                held = times if isinstance(times, list) else [times]
                over = sum(time + kept_for + instant <= batch.watermark for time in held)
                assert 2 * over <= len(held)

    assert [(*row, timestamp) for row, timestamp, _ in rows] == expected
    assert operator.ctx.dropped() == late
    assert [table.namespaces() for table, _ in tables] == [[], []]
    assert operator.ctx.timers["interval-join-timers"].event_time_timers() == []


async def test_an_interval_join_drops_few_elements_at_one_instant() -> None:
    """First the keys are rare, so that instants are far apart, then there are many."""
    operator = await opened(IntervalJoinOperator(lambda left, right, ctx: [], 0, 640_000))
    times = [*range(0, 1_000_000, 10_000), *(1_000_000 + i // 5 for i in range(20_000))]
    keys = list(range(len(times)))
    operator.process_input(0, RecordBatch(times, times, keys, [START] * len(times), START))
    timers = operator.ctx.timers["interval-join-timers"].event_time_timers()
    assert sorted(key for _, key, _ in timers) == keys
    counts = Counter(due for due, _, _ in timers)
    assert len(counts) < len(times) // 64
    assert max(counts.values()) <= 16 * 256


@pytest.mark.parametrize("first", range(0, 200, 50))
async def test_a_checkpoint_amid_the_pairs_of_an_interval_join_changes_nothing(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS_FIRST", 1)
    for seed in range(first, first + 50):
        draw = random.Random(seed)
        parallelisms = draw.choice(PARALLELISMS)
        steps = [
            (draw.randint(0, 1), draw.choice("aab"), draw.randint(-12, 12))
            for _ in range(draw.choice([10, 30, 60]))
        ]
        lower, length, rows_of_pair = draw.randint(-20, 8), draw.randint(0, 40), draw.randint(0, 2)
        records = two_streams(steps, draw.choice([5, 40]), 0)
        # The rest of several records cannot be given to other subtasks, see `test_column_joins`.
        size = 3 if max(parallelisms) == 1 else 1
        whole = batches(records, MAX_WATERMARK, size)

        def pair(left: int, right: int, ctx: Any, count: int = rows_of_pair) -> Any:
            return [(left, right)] * count

        make = partial(IntervalJoinOperator, pair, lower, lower + length)
        rows, former = await in_parts(draw, make, whole, range(1, len(whole) + 1), parallelisms)

        expected, _ = interval_pairs(records, lower, lower + length)
        found = [((left, right), time) for left, right, time in expected] * rows_of_pair
        assert sorted(rows) == sorted(found), f"seed {seed}"
        for context in former:
            for table in ("interval-join-left", "interval-join-right", PARTLY_JOINED):
                assert not context.keyed_state.table(table).namespaces(), f"seed {seed}"


@pytest.mark.parametrize("first", range(0, 200, 50))
async def test_a_checkpoint_amid_the_pairs_of_whole_streams_changes_nothing(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS_FIRST", 1)
    for seed in range(first, first + 50):
        draw = random.Random(seed)
        parallelisms = draw.choice(PARALLELISMS)
        steps = [
            (draw.randint(0, 1), draw.choice("aab"), draw.randint(-12, 12))
            for _ in range(draw.choice([10, 30, 60]))
        ]
        records = two_streams(steps, draw.choice([5, 40]), 0)
        # The rest of several records cannot be given to other subtasks, see `test_column_joins`.
        whole = batches(records, MAX_WATERMARK, 3 if max(parallelisms) == 1 else 1)
        firing = range(1, len(whole) + 1)
        rows, former = await in_parts(
            draw, lambda: RegularJoinOperator([None, None]), whole, firing, parallelisms
        )

        expected, before = list[Any](), list[Any]()
        for side, batch in whole:
            for one in zip(batch.keys or (), batch.values, batch.timestamps or (), strict=True):
                for other_side, other in before:
                    if other_side != side and other[0] == one[0]:
                        pair = (other, one) if side else (one, other)
                        expected.append((Pair(pair[0][1], pair[1][1]), one[2]))
                before.append((side, one))
        assert sorted(rows) == sorted(expected), f"seed {seed}"
        for context in former:
            assert not context.keyed_state.table(PARTLY_JOINED).namespaces(), f"seed {seed}"


async def test_partners_that_expire_after_a_checkpoint_do_not_hide_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(results, "RESULTS_FIRST", 1)
    context, hot = Context(has_event_time=False), RecordBatch(["one"], None, ["k"])
    join = await opened(RegularJoinOperator(["10ms", "10ms"]), context)
    for now_ms, lefts in [(0, range(5)), (6, range(5, 10))]:
        context.now_ms = now_ms
        join.process_input(0, RecordBatch(list(lefts), None, ["k"] * 5))
    context.now_ms = 8
    rows = join.process_input(1, hot).values
    while len(rows) < 7:
        rows += join.resume(1).values
    assert join.unprocessed().batch.values == ["one"]
    join.snapshot_state(1)

    context = Context(context, has_event_time=False, now_ms=12)
    join = await opened(RegularJoinOperator(["10ms", "10ms"]), context)
    rows += join.process_input(1, hot).values
    while join.has_pending:
        rows += join.resume(1).values
    assert rows == [Pair(left, "one") for left in range(10)]


async def test_pairs_without_event_time_have_no_times() -> None:
    join = await opened(RegularJoinOperator([None, None]), Context(has_event_time=False))
    join.process_input(0, RecordBatch([1, 2], None, ["k", "k"]))
    out = join.process_input(1, RecordBatch([3], None, ["k"]))
    assert (out.values, out.timestamps, out.watermarks) == ([Pair(1, 3), Pair(2, 3)], None, None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: WindowJoinOperator(TumblingWindows(10), Pair),
        lambda: IntervalJoinOperator(lambda left, right, ctx: [Pair(left, right)], 0, 9),
        lambda: RegularJoinOperator([None, None]),
    ],
    ids=["window", "interval", "regular"],
)
async def test_pairs_behind_a_checkpoint_come_once_in_the_job_that_goes_on(make: Any) -> None:
    """A checkpoint after each piece of a hot key leaves neither entries nor timers behind."""
    operator, count = await opened(make()), 30
    keys = ["hot"] * count + ["cold"]
    rows, checkpoints = list[Any](), 0
    for side in (0, 1):
        times = [side] * len(keys)
        batch = RecordBatch(list(range(len(keys))), times, keys, [START] * len(keys), START)
        for item in (batch, empty_batch(20 if side else START)):
            out = operator.process_input(side, item)
            rows += out.values
            while operator.has_pending:
                if operator.unprocessed() is not None:
                    operator.snapshot_state(checkpoints)
                    checkpoints += 1
                rows += operator.resume(7).values

    hot = [Pair(left, right) for left in range(count) for right in range(count)]
    assert checkpoints > count
    assert sorted(rows) == sorted([*hot, Pair(count, count)])
    state = operator.ctx.keyed_state
    assert not any(state.table(name).namespaces() for name in (FIRED, PARTLY_JOINED))
    assert not state.table("window-contents").namespaces()
    for timers in operator.ctx.timers.values():
        assert not timers.event_time_timers()


async def test_both_bounds_of_an_interval_are_included() -> None:
    operator = await opened(IntervalJoinOperator(lambda left, right, ctx: [(left, right)], -2, 3))
    records = [Sided(0, "k", "L", 10, START)] + [Sided(1, "k", t, t, START) for t in (7, 8, 13, 14)]
    rows = drive_inputs(operator, batches(records, 100, 1))
    assert [(row, timestamp) for row, timestamp, _ in rows] == [(("L", 8), 10), (("L", 13), 13)]


async def test_elements_are_kept_as_long_as_a_partner_may_come_and_no_longer() -> None:
    operator = await opened(IntervalJoinOperator(lambda left, right, ctx: [], -2, 3))
    held = [
        operator.ctx.keyed_state.table(name).of(None)
        for name in ("interval-join-left", "interval-join-right")
    ]
    drive_inputs(operator, batches([Sided(0, "k", "L", 10, 0), Sided(1, "k", "R", 10, 0)], 11, 1))
    assert [dict(table) for table in held] == [{"k": (10, "L")}, {"k": (10, "R")}]
    drive_inputs(operator, batches([], 12, 1))
    assert [list(table) for table in held] == [["k"], []]
    drive_inputs(operator, batches([], 13, 1))
    assert [list(table) for table in held] == [[], []]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9), st.booleans()), max_size=80),
    st.lists(st.integers(900, 999), max_size=3),
)
@example([(time, 0, True) for time in range(1, 31)], [999])
@example([(time, 0, True) for time in range(1, 31)], [999, 999])
async def test_elements_far_ahead_keep_no_others(
    steps: list[tuple[int, int, bool]], ahead: list[int]
) -> None:
    """At most half of what is kept of a key finds no partner any more, in any order of times."""
    operator = await opened(IntervalJoinOperator(lambda left, right, ctx: [], -2, 3))
    table = operator.ctx.keyed_state.table("interval-join-left")
    drive_inputs(operator, batches([Sided(0, "k", "ahead", time, 0) for time in ahead], 0, 9))
    watermark = 0
    for step, jitter, moves in steps:
        records = [Sided(0, "k", "L", watermark + step + jitter, watermark)]
        watermark += step * moves
        drive_inputs(operator, batches(records, watermark, 1))
        held = table.peek().get("k", ([],))[0]
        times = held if isinstance(held, list) else [held]
        assert 2 * sum(time + 3 <= watermark for time in times) <= len(times)
    drive_inputs(operator, batches([], MAX_WATERMARK, 1))
    assert table.namespaces() == []


async def test_a_snapshot_has_no_element_that_came_after_it() -> None:
    """A timer of the key fires and drops nothing, while the snapshot is being written."""
    operator = await opened(IntervalJoinOperator(lambda left, right, ctx: [], -2, 3))
    records = [Sided(0, "k", time, time, 0) for time in (10, 20, 30)]
    drive_inputs(operator, batches(records, 0, 1))
    state = operator.ctx.keyed_state
    snapshot = state.begin_snapshot(1)
    drive_inputs(operator, batches([], 13, 1))
    drive_inputs(operator, batches([Sided(0, "k", 40, 40, 13)], 13, 1))
    handle = await snapshot.write(InlineState())
    restored = Context().keyed_state
    await restored.restore_from([handle], InlineState())
    assert restored.table("interval-join-left").peek() == {"k": ([10, 20, 30], [10, 20, 30])}


async def test_a_snapshot_amid_pairs_has_no_element_that_came_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(results, "RESULTS_FIRST", 1)
    operator = await opened(IntervalJoinOperator(lambda left, right, ctx: [(left, right)], 0, 9))
    lefts = [Sided(0, "k", "L", time, 0) for time in (1, 2)]
    drive_inputs(operator, batches(lefts, 0, 2))
    keys = ["k", "m", "k"]
    rows = operator.process_input(1, RecordBatch([0, 1, 2], [3, 4, 5], keys, [0, 0, 0], 0)).values
    while len(rows) < 3:
        rows += operator.resume(1).values
    assert operator.has_pending
    state = operator.ctx.keyed_state
    snapshot = state.begin_snapshot(1)
    while operator.has_pending:
        operator.resume(1)
    handle = await snapshot.write(InlineState())
    restored = Context().keyed_state
    await restored.restore_from([handle], InlineState())
    assert restored.table("interval-join-right").peek() == {"k": (3, 0), "m": (4, 1)}
    assert state.table("interval-join-right").peek() == {"k": ([3, 5], [0, 2]), "m": (4, 1)}


async def test_an_interval_join_finds_what_rocksdb_has_on_disk() -> None:
    def paid(state: Any) -> Any:
        flow = af.Flow("paid")
        lefts, rights = (
            flow.source(
                [(key, count // 3) for count, key in enumerate(keys)],
                watermarks=af.WatermarkStrategy.bounded_out_of_orderness(
                    "0s", timestamp=lambda row: row[1]
                ),
            ).key_by(lambda row: row[0])
            for keys in (range(3_000), [*range(0, 3_000, 7), *range(2_000)])
        )
        joined = lefts.interval_join(rights, "-2s", "2s").process(
            lambda left, right, ctx: [(left, right)]
        )
        return joined.collect(state=state)

    assert sorted(await paid(RocksDB(cache_entries=500))) == sorted(await paid("heap"))


async def test_the_function_of_an_interval_join_sees_both_times_and_side_outputs() -> None:
    tag: OutputTag[Any] = OutputTag("seen")

    def pair(left: str, right: str, ctx: Any) -> Any:
        ctx.output(
            tag,
            (
                ctx.left_timestamp,
                ctx.right_timestamp,
                ctx.timestamp,
                ctx.current_key,
                ctx.current_watermark,
            ),
        )
        yield left + right

    operator = await opened(IntervalJoinOperator(pair, 0, 10))
    records = [Sided(0, "k", "L", 5, START), Sided(1, "k", "R", 7, 3)]
    assert values_of(drive_inputs(operator, batches(records, 3, 1))) == ["LR"]
    assert operator.ctx.side == [("seen", (5, 7, 7, "k", 3), 7, 3)]


async def test_late_elements_of_a_window_join_are_counted_and_not_kept() -> None:
    operator = await opened(
        CoGroupOperator(tumbling("10ms"), lambda key, lefts, rights: [(lefts, rights)])
    )
    records = [Sided(0, "k", "a", 1, START), Sided(1, "k", "late", 2, 9), Sided(1, "k", "b", 12, 9)]
    assert values_of(drive_inputs(operator, batches(records, 30, 1))) == [(["a"], []), ([], ["b"])]
    assert operator.ctx.dropped() == 1
    assert operator.ctx.side == []


async def test_a_session_gap_function_of_a_join_gets_the_element_of_either_side() -> None:
    operator = await opened(
        CoGroupOperator(session(lambda value: value), lambda key, lefts, rights: [(lefts, rights)])
    )
    records = [Sided(0, "k", 5, 0, START), Sided(1, "k", 20, 4, START), Sided(0, "k", 1, 23, START)]
    assert values_of(drive_inputs(operator, batches(records, 30, 1))) == [([5, 1], [20])]


async def test_records_of_one_side_survive_a_restore() -> None:
    def join() -> IntervalJoinOperator:
        return IntervalJoinOperator(lambda left, right, ctx: [(left, right)], 0, 10)

    first = await opened(join())
    drive_inputs(first, batches([Sided(0, "k", "L", 5, START)], 6, 1))
    second = await opened(join(), Context(first.ctx))
    records = [Sided(1, "k", "late", 6, START), Sided(1, "k", "R", 7, START)]
    assert values_of(drive_inputs(second, batches(records, 40, 1))) == [("L", "R")]
    assert second.ctx.dropped() == 1
    assert second.ctx.keyed_state.table("interval-join-left").namespaces() == []


async def test_elements_in_lists_of_one_are_found_after_a_restore() -> None:
    """Earlier versions wrote every element so."""
    first = await opened(IntervalJoinOperator(lambda left, right, ctx: [(left, right)], 0, 10))
    table = first.ctx.keyed_state.table("interval-join-left")
    for key in "kl":
        table.of_key(None, key)[key] = ([5], ["L"])
        first.ctx.timers["interval-join-timers"].register_event_time_timer(key, 0, 15)
    records = [Sided(1, "k", "R", 7, START), Sided(0, "k", "M", 6, START)]
    rows = drive_inputs(first, batches([*records, Sided(1, "k", "S", 8, START)], 14, 1))
    assert values_of(rows) == [("L", "R"), ("M", "R"), ("L", "S"), ("M", "S")]
    drive_inputs(first, batches([], 16, 1))
    assert table.namespaces() == []


async def test_an_interval_join_without_event_time_says_what_is_missing() -> None:
    with pytest.raises(StateError, match="watermark strategy"):
        await opened(
            IntervalJoinOperator(lambda left, right, ctx: [], 0, 1), Context(has_event_time=False)
        )


def test_bounds_in_the_wrong_order_are_a_build_error() -> None:
    with pytest.raises(GraphError, match="lower is 2 ms, expected at most upper, 1 ms"):
        IntervalJoinOperator(lambda left, right, ctx: [], 2, 1)


class OfItsOwnLength:
    """An assigner of the program: the element is the length of its window."""

    is_event_time, is_merging = True, False
    default_trigger = TumblingWindows(1).default_trigger

    def assign(self, value: int, timestamp: int) -> list[TimeWindow]:
        return [TimeWindow(0, value)]


@pytest.mark.parametrize("kind", [CoGroupOperator, WindowJoinOperator])
async def test_an_assigner_of_the_program_gets_the_elements(kind: Any) -> None:
    two_lists = kind is CoGroupOperator
    join = (lambda key, ls, rs: [(ls, rs)]) if two_lists else (lambda left, right: (left, right))
    operator = await opened(kind(OfItsOwnLength(), join))
    ends = RecordBatch([], None, None, None, MAX_WATERMARK)
    given = [
        (side, RecordBatch([10, 20], [5, 5], ["a", "a"], [START] * 2, START)) for side in (0, 1)
    ]
    rows = values_of(drive_inputs(operator, [*given, (0, ends), (1, ends)]))
    assert rows == ([([10], [10]), ([20], [20])] if two_lists else [(10, 10), (20, 20)])


@pytest.mark.parametrize("kind", [CoGroupOperator, WindowJoinOperator])
async def test_the_rest_of_a_batch_amid_windows_that_fire_belongs_to_its_side(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint stores the rest, and a restore passes it to its input."""
    monkeypatch.setattr(results, "RESULTS_FIRST", 1)
    monkeypatch.setattr(results, "PIECE_NS", 0)

    def make() -> Any:
        joined = (
            (lambda key, ls, rs: [(key, ls, rs)])
            if kind is CoGroupOperator
            else (lambda left, right: (left, right))
        )
        return kind(tumbling("10ms"), joined)

    keys = ["a", "b", "c"]
    operator = await opened(make())
    for side, value in ((0, "left"), (1, "right")):
        given = RecordBatch([value] * 3, [5] * 3, keys, [START] * 3, START)
        assert operator.process_input(side, given).values == []
    first = operator.process_input(1, RecordBatch(["late"], [15], ["a"], [12], 12)).values
    assert len(first) == 1
    rest = operator.unprocessed()
    assert rest is not None
    assert (rest.input_index, rest.batch.values) == (1, ["late"])
    restored = await opened(make(), Context(operator.ctx))
    rows = drive_inputs(
        restored,
        [
            (rest.input_index, rest.batch),
            (0, RecordBatch(["later"], [16], ["a"], [12], 12)),
            (0, RecordBatch([], None, None, None, MAX_WATERMARK)),
        ],
        1,
    )
    expected = (
        [(key, ["left"], ["right"]) for key in keys] + [("a", ["later"], ["late"])]
        if kind is CoGroupOperator
        else [("left", "right")] * 3 + [("later", "late")]
    )
    assert first + values_of(rows) == expected
