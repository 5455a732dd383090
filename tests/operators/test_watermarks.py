"""Watermark strategies: from the data alone, the same wherever batches are cut."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.expressions.roots import col
from aioflow.operators.watermarks import (
    IdlenessTimer,
    TimestampsAndWatermarksOperator,
    WatermarkStrategy,
)
from aioflow.state.operator_state import HeapOperatorStateBackend, redistribute

Strategy = WatermarkStrategy[Any]


def identity(value: int) -> int:
    return value


def after_each(strategy: Strategy, timestamps: list[int]) -> list[int]:
    """The watermark after each record, fed one by one."""
    generator = strategy.create()
    return [generator.apply([timestamp], [timestamp])[2] for timestamp in timestamps]


# Built-in strategies.


def test_bounded_out_of_orderness_lags_by_the_delay_and_one() -> None:
    """G1.1"""
    strategy: Strategy = WatermarkStrategy.bounded_out_of_orderness("5ms")
    assert after_each(strategy, [10, 8, 12, 12]) == [4, 4, 6, 6]


def test_monotonous_timestamps_lag_by_one() -> None:
    strategy: Strategy = WatermarkStrategy.monotonous_timestamps()
    assert after_each(strategy, [10, 8, -5, 11]) == [9, 9, 9, 10]


def test_negative_timestamps_are_timestamps() -> None:
    assert after_each(WatermarkStrategy.monotonous_timestamps(), [-10, -3]) == [-11, -4]


def test_watermark_before_the_first_record_is_min_and_stays_so_without_strategy() -> None:
    generator = WatermarkStrategy[Any].no_watermarks().create()
    assert generator.current == MIN_WATERMARK
    assert generator.apply([1], None) == (None, None, MIN_WATERMARK)
    assert generator.apply([1], [7]) == ([7], None, MIN_WATERMARK)
    generator.restore(5)
    stamped = WatermarkStrategy[int].no_watermarks(timestamp=lambda x: x * 10).create()
    assert stamped.apply([1, 2], None) == ([10, 20], None, MIN_WATERMARK)


def test_list_holds_the_watermark_in_force_before_each_record() -> None:
    generator = WatermarkStrategy[Any].bounded_out_of_orderness("1ms").create()
    assert generator.apply([0, 0, 0, 0], [10, 20, 15, 30]) == (
        [10, 20, 15, 30],
        [MIN_WATERMARK, 8, 18, 18],
        28,
    )


def test_list_is_none_when_the_watermark_does_not_move_among_the_records() -> None:
    generator = WatermarkStrategy[Any].monotonous_timestamps().create()
    assert generator.apply([0], [10]) == ([10], None, 9)
    assert generator.apply([0, 0], [3, 10]) == ([3, 10], None, 9)
    assert generator.apply([0, 0], [3, 11]) == ([3, 11], None, 10), (
        "it moves after the last one only"
    )
    assert generator.apply([], []) == ([], None, 10)


@pytest.mark.parametrize("timestamp", [lambda e: e["ts"], col.ts])
def test_timestamp_is_a_function_or_an_expression(timestamp: Any) -> None:
    generator = WatermarkStrategy[Any].monotonous_timestamps(timestamp=timestamp).create()
    assert generator.apply([{"ts": 5}, {"ts": 6}], [0, 0])[0] == [5, 6]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (1.5, r"1\.5 of type float.*int\(\.\.\.\)"),
        (None, r"None of type NoneType.*every record have the field"),
        (datetime(2024, 1, 1, tzinfo=UTC), r"datetime.*int\(t\.timestamp\(\) \* 1000\)"),
        ("2024", r"'2024' of type str.*parse it"),
        (True, "True of type bool"),
        (Decimal(3), "of type Decimal"),
    ],
)
def test_invalid_timestamp_is_refused_naming_it(bad: Any, message: str) -> None:
    for strategy in (
        WatermarkStrategy[Any].monotonous_timestamps(timestamp=lambda value: value),
        WatermarkStrategy[Any].no_watermarks(timestamp=lambda value: value),
        WatermarkStrategy[Any].punctuated(
            lambda value, timestamp: None, timestamp=lambda value: value
        ),
    ):
        generator = strategy.create()
        with pytest.raises(TypeError, match=message):
            generator.apply([1, bad], None)
        assert generator.current == MIN_WATERMARK, "a refused batch moves nothing"


def test_a_datetime_given_by_an_expression_is_refused_with_the_expression_to_write() -> None:
    generator = WatermarkStrategy[Any].monotonous_timestamps(timestamp=col.at).create()
    with pytest.raises(TypeError, match=r"datetime.*; use col\.at\.dt\.epoch_ms\(\)$"):
        generator.apply([{"at": datetime(2024, 1, 1, tzinfo=UTC)}], None)
    generator = (
        WatermarkStrategy[Any].monotonous_timestamps(timestamp=col.at.dt.epoch_ms()).create()
    )
    assert generator.apply([{"at": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)}], None)[0] == [1000]


def test_records_without_timestamps_need_a_function() -> None:
    with pytest.raises(TypeError, match="no timestamps: give the watermark strategy timestamp="):
        WatermarkStrategy[Any].monotonous_timestamps().create().apply([1], None)


def test_timestamp_beyond_64_bits_is_refused() -> None:
    generator = WatermarkStrategy[Any].monotonous_timestamps().create()
    with pytest.raises(ValueError, match="expected 64-bit"):
        generator.apply([1], [2**63])
    assert generator.current == MIN_WATERMARK


def test_error_of_the_timestamp_function_is_its_own() -> None:
    generator = WatermarkStrategy[Any].monotonous_timestamps(timestamp=lambda e: e["ts"]).create()
    with pytest.raises(KeyError, match="ts"):
        generator.apply([{}], None)


def test_a_stop_iteration_of_the_timestamp_function_is_an_error_at_its_record() -> None:
    """`map` would take it for its own end, and the records behind it would have no timestamps."""
    generator = (
        WatermarkStrategy[Any].monotonous_timestamps(timestamp=lambda e: next(iter(e))).create()
    )
    with pytest.raises(RuntimeError, match="the timestamp function raised StopIteration"):
        generator.apply([[1], [], [3]], None)
    assert generator.failed_at == 1


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: WatermarkStrategy.bounded_out_of_orderness("-1s"), ValueError, "delay is '-1s'"),
        (lambda: WatermarkStrategy.bounded_out_of_orderness(5), TypeError, "delay is 5"),
        (
            lambda: WatermarkStrategy.monotonous_timestamps(idle_after="0s"),
            ValueError,
            "idle_after is '0s'",
        ),
        (
            lambda: WatermarkStrategy.monotonous_timestamps(timestamp="ts").create(),
            TypeError,
            "timestamp= is 'ts'",
        ),
        (lambda: WatermarkStrategy.ingestion_time().create(), TypeError, "needs a clock"),
        (
            lambda: WatermarkStrategy.custom(dict).create(),
            TypeError,
            "expected an object with on_event",
        ),
    ],
)
def test_wrong_strategy_is_refused_with_what_was_expected(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


# Strategies that ask the application.


def test_punctuated_asks_after_each_record_and_never_falls() -> None:
    strategy: Strategy = WatermarkStrategy.punctuated(
        lambda value, timestamp: timestamp if value == "mark" else None
    )
    generator = strategy.create()
    out = generator.apply(["x", "mark", "y", "mark", "z"], [1, 5, 6, 3, 7])
    assert out == ([1, 5, 6, 3, 7], [MIN_WATERMARK, MIN_WATERMARK, 5, 5, 5], 5)
    assert generator.apply(["x"], [9]) == ([9], None, 5)


def test_punctuated_takes_a_function_of_the_element_alone() -> None:
    generator = (
        WatermarkStrategy[Any]
        .punctuated(lambda value: value["wm"], timestamp=lambda value: 0)
        .create()
    )
    assert generator.apply([{"wm": 3}, {"wm": None}], None) == ([0, 0], [MIN_WATERMARK, 3], 3)


def test_watermark_that_is_no_int_is_refused() -> None:
    generator = WatermarkStrategy[Any].punctuated(lambda value, timestamp: 1.5).create()
    with pytest.raises(TypeError, match=r"fn of punctuated\(\) gave 1\.5 of type float"):
        generator.apply([1], [1])


class EverySecond:
    """A generator of an application: tells the timestamp of every second record."""

    def __init__(self) -> None:
        self.count = 0

    def on_event(self, value: Any, timestamp: int) -> int | None:
        self.count += 1
        return timestamp if self.count % 2 == 0 else None


@pytest.mark.parametrize("generator", [EverySecond, EverySecond(), lambda: EverySecond()])
def test_custom_generator_is_created_for_each_subtask(generator: Any) -> None:
    strategy: Strategy = WatermarkStrategy.custom(generator)
    for _ in range(2):
        assert after_each(strategy, [1, 2, 3, 4]) == [MIN_WATERMARK, 2, 2, 4]


def test_ingestion_time_is_the_clock_at_arrival_and_never_falls() -> None:
    """G6.2"""
    clock = SimpleNamespace(now=100)
    generator = WatermarkStrategy[Any].ingestion_time().create(lambda: clock.now)
    assert generator.apply([1, 2], [7, 7]) == ([100, 100], [MIN_WATERMARK, 99], 99)
    clock.now = 50
    assert generator.apply([1, 2], None) == ([100, 100], None, 99)
    clock.now = 101
    assert generator.apply([1], None) == ([101], None, 100)
    assert generator.apply([], None) == ([], None, 100)


def test_strategy_is_data_that_can_travel() -> None:
    strategy: Strategy = WatermarkStrategy.bounded_out_of_orderness(
        "5s", timestamp=identity
    ).with_idleness("30s")
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy == strategy
    assert (copy.delay_ms, copy.idle_after_ms, copy.emits_watermarks) == (5_000, 30_000, True)
    assert not WatermarkStrategy[Any].no_watermarks().emits_watermarks


def in_force(strategy: Strategy, batches: list[list[int]]) -> list[tuple[int, int]]:
    """(timestamp, watermark in force before it) of each record, and the end."""
    generator = strategy.create()
    seen, watermark = [], MIN_WATERMARK
    for timestamps in batches:
        times, watermarks, after = generator.apply(timestamps, timestamps)
        seen += list(zip(times or [], watermarks or [watermark] * len(timestamps), strict=True))
        assert watermarks is None or sorted(watermarks) == watermarks
        assert after >= watermark
        watermark = after
    return [*seen, (0, watermark)]


@given(
    timestamps=st.lists(st.integers(-50, 50), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    delay=st.integers(0, 20),
)
@pytest.mark.parametrize("kind", ["bounded", "punctuated", "custom"])
def test_watermarks_do_not_depend_on_where_batches_are_cut(
    kind: str, timestamps: list[int], cuts: list[int], delay: int
) -> None:
    """G1, and the promise of event time: the same sequence of (record, watermark in force)."""
    strategies: dict[str, Strategy] = {
        "bounded": WatermarkStrategy.bounded_out_of_orderness(f"{delay}ms"),
        "punctuated": WatermarkStrategy.punctuated(
            lambda value, timestamp: timestamp if timestamp % 3 == 0 else None
        ),
        "custom": WatermarkStrategy.custom(EverySecond),
    }
    bounds = [0, *sorted(min(cut, len(timestamps)) for cut in cuts), len(timestamps)]
    pieces = [timestamps[start:stop] for start, stop in pairwise(bounds)]
    whole = in_force(strategies[kind], [timestamps])
    assert whole == in_force(strategies[kind], pieces)
    assert whole == in_force(strategies[kind], [[timestamp] for timestamp in timestamps])


@given(timestamps=st.lists(st.integers(-50, 50), min_size=1, max_size=30), delay=st.integers(0, 20))
def test_bounded_watermark_is_the_maximum_so_far_less_delay_and_one(
    timestamps: list[int], delay: int
) -> None:
    """G1"""
    seen = in_force(WatermarkStrategy.bounded_out_of_orderness(f"{delay}ms"), [timestamps])
    expected = [MIN_WATERMARK] + [
        max(timestamps[: n + 1]) - delay - 1 for n in range(len(timestamps))
    ]
    assert [watermark for _, watermark in seen] == expected


# Idleness.


def test_idleness_counts_from_the_first_time_nothing_was_there() -> None:
    timer = IdlenessTimer(1_000)
    assert not timer.check(10_000), "not polled yet"
    assert timer.nothing(10_000) == 11_000
    assert timer.nothing(10_500) == 11_000
    assert not timer.check(10_999)
    assert timer.check(11_000)
    assert not timer.check(11_000), "said once"
    assert timer.nothing(11_000) is None
    assert timer.records()
    assert not timer.records()
    assert timer.nothing(12_000) == 13_000


def test_idle_time_pauses_while_the_source_is_not_polled() -> None:
    timer = IdlenessTimer(1_000)
    timer.nothing(0)
    timer.pause(600)
    timer.pause(700)
    assert not timer.check(5_000)
    assert timer.nothing(5_000) == 5_400
    assert not timer.check(5_399)
    assert timer.check(5_400)


# The operator.


class Context:
    """The parts of a task that the operator needs; the test moves the clock."""

    def __init__(self, restored: Any = None, index: int = 0, parallelism: int = 1) -> None:
        self.now = 1_000
        self.sent: list[bool] = []
        self.registered: list[tuple[int, Callable[[int], None]]] = []
        self.runtime = SimpleNamespace(subtask_index=index, parallelism=parallelism)
        self.operator_state = HeapOperatorStateBackend()
        if restored is not None:
            self.operator_state.restore(restored)

    def processing_time(self) -> int:
        return self.now

    def emit_status(self, idle: bool) -> None:
        self.sent.append(idle)

    def register_processing_timer(self, timestamp_ms: int, callback: Callable[[int], None]) -> Any:
        entry = (timestamp_ms, callback)
        self.registered.append(entry)
        return SimpleNamespace(cancel=lambda: self.registered.remove(entry))

    def advance(self, now: int) -> None:
        while due := [entry for entry in self.registered if entry[0] <= now]:
            self.registered.remove(due[0])
            self.now = max(self.now, due[0][0])
            due[0][1](due[0][0])
        self.now = now


async def opened(
    strategy: Strategy, ctx: Context | None = None
) -> tuple[TimestampsAndWatermarksOperator, Context]:
    operator, ctx = TimestampsAndWatermarksOperator(strategy), ctx or Context()
    operator.setup(ctx)  # type: ignore[arg-type]  # The part of a context that this operator uses.
    operator.initialize_state()
    await operator.open()
    return operator, ctx


async def test_operator_replaces_the_watermarks_from_upstream_but_for_the_end() -> None:
    """G1.4"""
    operator, _ = await opened(WatermarkStrategy.monotonous_timestamps(timestamp=identity))
    out = operator.process_batch(RecordBatch([5, 7], [1, 1], ["k", "l"], [0, 3], 900))
    assert (out.values, out.timestamps, out.keys, out.watermarks, out.watermark) == (
        [5, 7],
        [5, 7],
        ["k", "l"],
        [MIN_WATERMARK, 4],
        6,
    )
    assert operator.process_batch(empty_batch(950)).watermark == 6
    assert operator.process_batch(empty_batch(MAX_WATERMARK)).watermark == MAX_WATERMARK


async def test_operator_says_idle_after_silence_and_active_before_the_next_record() -> None:
    """G3.6"""
    strategy: Strategy = WatermarkStrategy.monotonous_timestamps(
        timestamp=identity, idle_after="1s"
    )
    operator, ctx = await opened(strategy)
    ctx.advance(1_900)
    operator.process_batch(RecordBatch([1]))
    ctx.advance(2_899)
    assert ctx.sent == []
    ctx.advance(2_900)
    assert ctx.sent == [True]
    ctx.advance(60_000)
    assert (ctx.sent, ctx.registered) == ([True], [])
    operator.process_batch(empty_batch())
    assert ctx.sent == [True]
    operator.process_batch(RecordBatch([2]))
    assert ctx.sent == [True, False], (
        "said while the batch is processed: it goes out before what is returned"
    )
    ctx.advance(61_000)
    assert ctx.sent == [True, False, True]


async def test_operator_that_never_got_a_record_is_idle() -> None:
    operator, ctx = await opened(WatermarkStrategy.monotonous_timestamps(idle_after="1s"))
    ctx.advance(2_000)
    assert ctx.sent == [True]
    await operator.close()


async def test_operator_without_idleness_registers_no_timer_and_close_cancels_it() -> None:
    _, ctx = await opened(WatermarkStrategy.monotonous_timestamps())
    assert ctx.registered == []
    operator, ctx = await opened(WatermarkStrategy.monotonous_timestamps(idle_after="1s"))
    assert len(ctx.registered) == 1
    await operator.close()
    assert ctx.registered == []


@pytest.mark.parametrize(("parallelism", "expected"), [(2, [99, 49]), (3, [49, 49, 49])])
async def test_watermark_reached_is_restored_so_that_late_stays_late(
    parallelism: int, expected: list[int]
) -> None:
    """H6: own where the subtasks are the same, the slowest of before where they are not."""
    strategy: Strategy = WatermarkStrategy.monotonous_timestamps(timestamp=identity)
    snapshots = []
    for index, newest in enumerate((100, 50)):
        operator, ctx = await opened(strategy, Context(index=index, parallelism=2))
        operator.process_batch(RecordBatch([newest]))
        operator.snapshot_state(1)
        snapshots.append(ctx.operator_state.snapshot())
    reached = []
    for index, snapshot in enumerate(redistribute(snapshots, parallelism)):
        operator, _ = await opened(strategy, Context(snapshot, index, parallelism))
        reached.append(operator.process_batch(RecordBatch([10])).watermark)
    assert reached == expected
