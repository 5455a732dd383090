"""The operator harness: what goes in, what comes out, time, state, and snapshots."""

from __future__ import annotations

import asyncio
import gc
import pickle
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import aioflow as af
from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK
from aioflow.core.errors import Closed, GraphError, RestoreError, StateError
from aioflow.core.keygroups import key_group, range_for_subtask
from aioflow.core.wire.serializers import Codec
from aioflow.operators.process.functions import KeyedProcessOperator
from aioflow.operators.stateless import StatelessKind, StatelessOperator, StatelessStep
from aioflow.testing import HarnessSnapshot, ManualClock, OperatorHarness

LATE_TAG = af.OutputTag[int]("odd")


class Counting(af.KeyedProcessFunction[str, str, Any]):
    """Counts the elements of a key; timers of both kinds tell the key."""

    def open(self, ctx: Any) -> None:
        self.count = ctx.get_state(af.ValueStateDescriptor("count", default=0))

    def process_element(self, value: str, ctx: Any) -> Iterator[Any]:
        self.count.update(self.count.value() + 1)
        if ctx.timestamp is not None:
            ctx.timer_service.register_event_time_timer(ctx.timestamp + 10)
        ctx.timer_service.register_processing_time_timer(
            ctx.timer_service.current_processing_time + 1_000
        )
        yield value, self.count.value()

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[Any]:
        yield "timer", timestamp, ctx.current_key


def first(value: Any) -> Any:
    return value[0]


def test_a_plain_function_maps_each_element() -> None:
    with OperatorHarness(lambda x: x + 1) as h:
        h.push(1)
        h.push(2, ts=7)
        assert h.take(timestamps=True) == [(2, None), (3, 7)]
        assert h.take() == []


def test_a_generator_function_of_one_element_is_flat_mapped() -> None:
    def twice(x: int) -> Iterator[int]:
        yield x
        yield x

    with OperatorHarness(twice) as h:
        h.push(4)
        assert h.take() == [4, 4]


def test_a_function_of_value_and_context_is_a_process_function() -> None:
    def split(value: int, ctx: Any) -> Iterator[int]:
        if value % 2:
            ctx.output(LATE_TAG, value)
        else:
            yield value

    with OperatorHarness(split) as h:
        for value in range(5):
            h.push(value, ts=value)
        assert h.take() == [0, 2, 4]
        assert h.side(LATE_TAG) == [1, 3]
        assert h.side("odd") == []


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (af.col.x * 2, [6]),
        (type("Half", (af.FilterFunction,), {"filter": lambda self, row: row["x"] > 5}), []),
        (
            type("Rows", (af.FlatMapFunction,), {"flat_map": lambda self, row: [row["x"]] * 2})(),
            [3, 3],
        ),
        (StatelessOperator([StatelessStep(StatelessKind.MAP, lambda row: row["x"])]), [3]),
    ],
)
def test_expressions_classes_and_operators_run(function: Any, expected: list[Any]) -> None:
    with OperatorHarness(function) as h:
        h.push({"x": 3})
        assert h.take() == expected


def test_an_object_of_the_test_is_the_one_that_runs_and_is_closed_once() -> None:
    class Log(af.MapFunction[int, int]):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def open(self, ctx: Any) -> None:
            self.calls.append("open")

        def map(self, value: int) -> int:
            self.calls.append("map")
            return value

        def close(self) -> None:
            self.calls.append("close")

    log = Log()
    with OperatorHarness(log) as h:
        h.push(1)
    h.close()
    assert log.calls == ["open", "map", "close"]


def test_unclosed_harness_closes_its_function_when_it_is_dropped() -> None:
    class Log(af.MapFunction[int, int]):
        closed: list[int] = []

        def map(self, value: int) -> int:
            return value

        def close(self) -> None:
            self.closed.append(1)

    h = OperatorHarness(Log())
    h.push(1)
    del h
    gc.collect()
    assert Log.closed == [1]


def test_a_keyed_function_needs_a_key() -> None:
    with pytest.raises(GraphError, match="key="):
        OperatorHarness(Counting())


def test_keyed_state_is_kept_and_shown_for_each_key() -> None:
    with OperatorHarness(Counting, key=first) as h:
        for word in ("ab", "ac", "b"):
            h.push(word, ts=0)
        assert h.take() == [("ab", 1), ("ac", 2), ("b", 1)]
        assert [h.state("count", key) for key in "abc"] == [2, 1, 0]
        with pytest.raises(StateError, match="'count'"):
            h.state("nonsense", "a")


def test_event_time_timers_fire_with_the_watermark_in_order() -> None:
    with OperatorHarness(Counting(), key=first) as h:
        h.push("b", ts=5)
        h.push("a", ts=1)
        h.take()
        assert [(t.timestamp, t.key) for t in h.timers() if t.time == "event"] == [
            (11, "a"),
            (15, "b"),
        ]
        h.watermark(14)
        assert h.take(timestamps=True) == [(("timer", 11, "a"), 11)]
        h.watermark(15)
        assert h.take() == [("timer", 15, "b")]
        assert h.current_watermark == 15


def test_processing_time_stands_still_until_it_is_advanced() -> None:
    with OperatorHarness(Counting(), key=first, clock=1_700_000_000_000) as h:
        h.push("a")
        h.take()
        h.advance(999)
        assert h.take() == []
        h.advance(1)
        assert h.take() == [("timer", 1_700_000_001_000, "a")]
        assert h.timers() == []


def test_a_clock_can_be_shared() -> None:
    clock = ManualClock(50)
    a, b = (
        OperatorHarness(Counting(), key=first, clock=clock),
        OperatorHarness(Counting(), key=first, clock=clock),
    )
    a.push("a")
    b.push("b")
    a.take(), b.take()
    a.advance(1_000)
    assert a.take() == [("timer", 1_050, "a")]
    b.advance(0)
    assert b.take() == [("timer", 1_050, "b")]


def test_time_cannot_go_back() -> None:
    with OperatorHarness(Counting(), key=first) as h, pytest.raises(ValueError, match="back"):
        h.advance(-1)


async def slow(x: int) -> int:
    await asyncio.sleep(0.5)
    return x * 2


def test_an_async_function_completes_as_time_is_advanced() -> None:
    with OperatorHarness(slow) as h:
        h.push(4)
        h.advance(499)
        assert h.take() == []
        h.advance(1)
        assert h.take() == [8]


async def test_a_harness_works_inside_of_a_running_loop() -> None:
    me = asyncio.current_task()
    with OperatorHarness(slow) as h:
        h.push(4)
        await asyncio.sleep(0)
        h.advance(500)
        assert h.take() == [8]
    assert asyncio.current_task() is me
    assert await asyncio.wait_for(asyncio.sleep(0, "goes on"), 60) == "goes on"


def test_finish_waits_for_what_is_under_way_and_ends_event_time() -> None:
    h = OperatorHarness(slow)
    h.push(3)
    h.finish()
    assert h.take() == [6]
    assert h.current_watermark == MAX_WATERMARK
    with pytest.raises(Closed, match="make a new one"):
        h.push(1)


def test_finish_fires_all_event_time_timers() -> None:
    h = OperatorHarness(Counting(), key=first)
    h.push("a", ts=10**9)
    h.take()
    h.finish()
    assert h.take() == [("timer", 10**9 + 10, "a"), ("timer", 1_000, "a")]


def test_an_async_process_function_is_awaited_between_elements() -> None:
    class Slow(af.KeyedProcessFunction[str, str, str]):
        async def process_element(self, value: str, ctx: Any) -> AsyncIterator[str]:
            await asyncio.sleep(0.01)
            yield value * 2

    with OperatorHarness(Slow(), key=first) as h:
        h.push("a")
        with pytest.raises(RuntimeError, match="advance"):
            h.snapshot()
        h.advance(10)
        assert h.take() == ["aa"]


def test_an_error_of_user_code_comes_out_of_the_push_that_led_to_it() -> None:
    h = OperatorHarness(lambda x: 1 // x)
    h.push(1)
    with pytest.raises(ZeroDivisionError) as caught:
        h.push(0)
    assert "record 0" in caught.value.__notes__[0]
    assert h.take() == [1]
    with pytest.raises(Closed, match="failed"):
        h.push(1)
    h.close()


def test_an_error_of_open_comes_out_of_the_constructor() -> None:
    class Bad(af.MapFunction[int, int]):
        def open(self, ctx: Any) -> None:
            raise OSError("no such host")

    with pytest.raises(OSError, match="no such host") as raised:
        OperatorHarness(Bad())
    assert any("in open() of operator 'Bad'" in note for note in raised.value.__notes__)


def test_a_function_that_waits_for_ever_is_reported_at_finish() -> None:
    async def never(x: int) -> int:
        await asyncio.get_running_loop().create_future()
        return x

    h = OperatorHarness(never)
    h.push(1)
    with pytest.raises(RuntimeError, match="never comes"):
        h.finish()


def test_resources_are_opened_for_the_harness_and_closed_with_it() -> None:
    log: list[str] = []

    @af.resource
    async def number() -> AsyncIterator[int]:
        log.append("open")
        yield 40
        log.append("close")

    def add(x: int, n: int = af.use(number)) -> int:
        return x + n

    with OperatorHarness(add) as h:
        h.push(2)
        assert h.take() == [42]
    assert log == ["open", "close"]


# --------------------------------------------------------------------------------------------------
# two inputs


class Both(af.CoProcessFunction[int, str, Any]):
    def process_element1(self, value: int, ctx: Any) -> Iterator[Any]:
        yield 1, value, ctx.current_watermark

    def process_element2(self, value: str, ctx: Any) -> Iterator[Any]:
        yield 2, value, ctx.current_watermark


def test_two_inputs_share_the_lower_watermark() -> None:
    with OperatorHarness(Both()) as h:
        h.push(1, ts=1)
        h.watermark(10)
        h.push("a", ts=1, input=2)
        h.watermark(5, input=2)
        h.push(2, ts=11)
        assert h.take() == [(1, 1, None), (2, "a", None), (1, 2, 5)]
        assert h.current_watermark == 5
        with pytest.raises(ValueError, match="1 to 2"):
            h.push(1, input=3)


def test_an_idle_input_does_not_hold_the_watermark_back() -> None:
    with OperatorHarness(Both()) as h:
        h.watermark(10)
        assert h.current_watermark == MIN_WATERMARK
        h.idle(input=2)
        assert h.current_watermark == 10
        h.watermark(30, input=2)  # Active again.
        h.watermark(20)
        assert h.current_watermark == 20
        h.watermark(40)
        assert h.current_watermark == 30


def test_the_broadcast_side_has_no_key() -> None:
    rules = af.MapStateDescriptor("rules")

    class Rules(af.KeyedBroadcastProcessFunction[str, str, tuple[str, int], Any]):
        def process_element(self, value: str, ctx: Any) -> Iterator[Any]:
            yield value, ctx.get_broadcast_state(rules).get(value)

        def process_broadcast_element(self, value: tuple[str, int], ctx: Any) -> None:
            ctx.get_broadcast_state(rules).put(*value)

    with OperatorHarness(Rules(), key=first) as h:
        h.push(("a", 3), input=2)
        h.push("a")
        assert h.take() == [("a", 3)]


# --------------------------------------------------------------------------------------------------
# streams


def windows() -> Any:
    flow = af.Flow("windows")
    events = flow.source(
        [("", 0)], watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda e: e[1])
    )
    return events.key_by(first).window(af.tumbling("10ms")).aggregate(af.count())


def test_a_stream_runs_the_operators_of_its_chain_without_the_source() -> None:
    stream = af.Flow("f").source([1]).map(lambda x: x + 1).filter(lambda x: x % 2).map(str)
    with OperatorHarness(stream) as h:
        for value in (1, 2, 3):
            h.push(value)
        assert h.take() == ["3"]


def test_a_keyed_stream_brings_its_key_and_late_elements_are_reported() -> None:
    with OperatorHarness(windows()) as h:
        for event in (("a", 1), ("a", 5), ("b", 3)):
            h.push(event, ts=event[1])
        h.watermark(9)
        assert h.take() == [("a", 0, 10, 2), ("b", 0, 10, 1)]
        h.push(("a", 4), ts=4)
        assert h.late() == [("a", 4)]
        assert h.take() == []
        assert h.metrics()["window.numLateRecordsDropped"] == 1


def test_state_of_a_window_is_found_by_the_window() -> None:
    flow = af.Flow("sessions")
    events = flow.source(
        [("", 0)], watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda e: e[1])
    )
    with OperatorHarness(
        events.key_by(first).window(af.session("10ms"), lateness="5ms").aggregate(af.count())
    ) as h:
        h.push(("a", 1), ts=1)
        assert h.state("window-contents", "a", window=(1, 11)) == 1
        assert h.timers()[0].window == (1, 11)
        assert h.state("window-contents", "a", window=(2, 11)) is None


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (lambda flow, source: source, "is a source"),
        (lambda flow, source: source.map(str).union(flow.source([2])), "union"),
        (lambda flow, source: source.map(str).side(LATE_TAG), "side output"),
    ],
)
def test_flow_that_is_no_single_chain_is_refused(stream: Any, message: str) -> None:
    flow = af.Flow("f")
    with pytest.raises(GraphError, match=message):
        OperatorHarness(stream(flow, flow.source([1])))


def test_a_window_function_alone_is_refused_with_the_remedy() -> None:
    with pytest.raises(GraphError, match="needs a window"):
        OperatorHarness(af.ProcessWindowFunction(), key=first)


# --------------------------------------------------------------------------------------------------
# snapshot, restore


def test_a_restored_harness_goes_on_where_the_snapshot_was_taken() -> None:
    h = OperatorHarness(Counting(), key=first)
    h.push("a", ts=1)
    h.advance(400)
    snapshot = h.snapshot()
    h.push("a", ts=2)  # Does not touch the snapshot.
    r = OperatorHarness.restore(snapshot)
    r.push("a", ts=3)
    assert r.take() == [("a", 2)]
    r.watermark(11)
    r.advance(600)
    assert r.take() == [("timer", 11, "a"), ("timer", 1_000, "a")]


@pytest.mark.parametrize("how", ["count", "session"])
@pytest.mark.parametrize(
    ("before", "after"), [([1], True), ([1.0], 1), ([1, 1.0], True), ([True], 1)]
)
def test_equal_keys_keep_the_first_spelling_over_restores(
    how: str, before: list[Any], after: Any
) -> None:
    in_order = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda value: 0)
    source = af.Flow("spelling").source([0], watermarks=in_order).key_by(lambda value: value)
    if how == "count":
        flow: Any = source.count()
    else:
        flow = (
            source.window(af.session(lambda value: 10))
            .aggregate(af.count())
            .map(lambda result: (result.key, result.value))
        )
    h = OperatorHarness(flow)
    for key in before:
        h.push(key, ts=1)
    for count, key in enumerate([after, after], len(before) + 1):
        h = OperatorHarness.restore(h.snapshot())
        h.push(key, ts=count)
    h.watermark(100)
    assert repr(h.take()[-1]) == repr((before[0], len(before) + 2))


def test_key_groups_are_split_over_the_new_parallelism() -> None:
    keys = [chr(ord("a") + i) for i in range(20)]
    h = OperatorHarness(Counting(), key=first)
    for key in keys:
        h.push(key, ts=1)
    snapshot = h.snapshot()
    seen: list[Any] = []
    for index in range(3):
        r = OperatorHarness.restore(snapshot, parallelism=3, index=index)
        mine = [key for key in keys if key_group(key, 128) in range_for_subtask(index, 3, 128)]
        assert [r.state("count", key) for key in keys] == [int(key in mine) for key in keys]
        r.watermark(11)
        seen += [row[2] for row in r.take()]
        foreign = next(key for key in keys if key not in mine)
        with pytest.raises(ValueError, match="belongs to subtask"):
            r.push(foreign)
    assert sorted(seen) == keys


def test_snapshots_of_all_subtasks_come_together_again() -> None:
    h = OperatorHarness(Counting(), key=first)
    for key in "abcdef":
        h.push(key, ts=1)
    parts = [OperatorHarness.restore(h.snapshot(), 2, index).snapshot() for index in range(2)]
    r = OperatorHarness.restore(parts)
    assert [r.state("count", key) for key in "abcdef"] == [1] * 6
    assert len(r.timers()) == 12


def test_a_snapshot_can_be_pickled_with_local_functions() -> None:
    h = OperatorHarness(Counting(), key=lambda v: v[0])
    h.push("a", ts=1)
    r = OperatorHarness.restore(pickle.loads(pickle.dumps(h.snapshot())))
    r.push("ab", ts=1)
    assert r.take() == [("ab", 2)]


def test_the_state_in_a_snapshot_is_data_for_the_codec() -> None:
    h = OperatorHarness(windows())
    h.push(("a", 1), ts=1)
    operators = h.snapshot().operators
    codec = Codec()
    snapshot = HarnessSnapshot(
        h.snapshot().plan, codec.decode(codec.encode(operators, owner="snapshot")), 0
    )
    r = OperatorHarness.restore(snapshot)
    r.watermark(9)
    assert r.take() == [("a", 0, 10, 1)]


def test_operator_state_and_checkpointed_functions_are_in_the_snapshot() -> None:
    class Buffering(af.ProcessFunction[int, int], af.CheckpointedFunction):
        def initialize_state(self, ctx: Any) -> None:
            self.state = ctx.operator_state.get_list_state("buffer")
            self.buffer = list(self.state.get())

        def snapshot_state(self, ctx: Any) -> None:
            self.state.update(self.buffer)

        def process_element(self, value: int, ctx: Any) -> list[int]:
            self.buffer.append(value)
            return [sum(self.buffer)]

    h = OperatorHarness(Buffering)
    for value in (1, 2, 3):
        h.push(value)
    parts = [OperatorHarness.restore(h.snapshot(), 2, index) for index in range(2)]
    for part in parts:
        part.push(0)
    assert sorted(part.take()[0] for part in parts) == [3, 3]


def test_async_calls_under_way_are_in_the_snapshot_and_called_again() -> None:
    h = OperatorHarness(slow)
    h.push(5)
    r = OperatorHarness.restore(h.snapshot())
    r.advance(500)
    assert r.take() == [10]


def test_a_snapshot_restores_into_a_new_version_of_the_program() -> None:
    class Loud(Counting):
        def process_element(self, value: str, ctx: Any) -> Iterator[Any]:
            yield f"{value} {self.count.value()}!"

    h = OperatorHarness(Counting(), key=first)
    h.push("a")
    r = OperatorHarness.restore(h.snapshot(), stream_or_fn=Loud(), key=first)
    r.push("a")
    assert r.take() == ["a 1!"]
    stream = af.Flow("f").source([1]).map(str).map(str)
    with pytest.raises(RestoreError, match="1 operators"):
        OperatorHarness.restore(h.snapshot(), stream_or_fn=stream)


def test_an_operator_object_is_copied_for_the_restore() -> None:
    h = OperatorHarness(KeyedProcessOperator(Counting()), key=first)
    h.push("a")
    r = OperatorHarness.restore(h.snapshot())
    r.push("a")
    assert r.take() == [("a", 2)]
