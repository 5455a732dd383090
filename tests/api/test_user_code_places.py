"""Every place where user code is called, and what it may do there: the job fails by name, or
ends complete. It never loses an element.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_overloads

import pyarrow as pa
import pytest

import aioflow as af
from aioflow.api.streams import CoGroupedStreams, IntervalJoin, JoinedStreams
from aioflow.operators.sink import Committer
from aioflow.operators.source import SourceReader

pytestmark = pytest.mark.timeout(60)
"""Far above the duration of any test here: only a hang is cut off."""

VALUES = range(6)
BAD = 3

Act = Callable[[], None]


class Bare(BaseException):
    """No Exception."""


def raise_cancelled() -> None:
    raise asyncio.CancelledError


def cancel_own_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


def take_a_cancelled_result() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    future.result()


def raising(error: type[BaseException]) -> Act:
    def act() -> None:
        raise error("of user code")

    act.__name__ = f"raise_{error.__name__}"
    return act


ACTS: list[Act] = [
    raise_cancelled,
    cancel_own_task,
    *map(raising, (ValueError, af.ProducerFailed, Bare, SystemExit)),
]
MORE_ACTS: list[Act] = [
    take_a_cancelled_result,
    *map(raising, (af.MailboxClosed, StopAsyncIteration, KeyboardInterrupt, GeneratorExit)),
]
"""More acts of the same kinds; not in the fast lane."""


@dataclass
class Run:
    """One flow in which one place misbehaves.

    `out` gets what arrives; `complete` says what that is if nothing is lost.
    """

    deed: Act
    folder: Path
    """Where files of this run are."""
    acted: bool = False
    out: list[Any] = field(default_factory=list)
    complete: int = len(VALUES)
    options: dict[str, Any] = field(default_factory=dict)
    read: Callable[[], Sequence[Any]] | None = None
    """Reads what arrived, if that is not in `out`."""
    close: Callable[[], None] = lambda: None
    flow: af.Flow = field(default_factory=lambda: af.Flow("f"))

    def __deepcopy__(self, memo: Any) -> Run:
        """Each subtask has a copy of a function; what happened is noted once."""
        return self

    def act(self) -> None:
        self.acted = True
        self.deed()

    def trip(self, value: Any) -> Any:
        if value == BAD:
            self.act()
        return value

    def source(self, values: Any = VALUES, **options: Any) -> Any:
        return self.flow.source(values, **options)

    def timed(self) -> Any:
        return self.source(
            watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda v: v * 1000)
        )

    def windows(self, **options: Any) -> Any:
        return self.timed().key_by(lambda v: v).window(af.tumbling("1s"), **options)


PLACES: dict[str, Callable[[Run], Any]] = {}
COVERED: dict[str, str] = {}
"""Callable of the API: the place that calls it."""


def place(*covers: str) -> Callable[[Callable[[Run], Any]], Callable[[Run], Any]]:
    def keep(build: Callable[[Run], Any]) -> Callable[[Run], Any]:
        PLACES[build.__name__] = build
        COVERED.update(dict.fromkeys(covers, build.__name__))
        return build

    return keep


# Functions of streams.


@place("DataStream.map.fn", "KeyedStream.map.fn")
def map_(run: Run) -> Any:
    return run.source().map(lambda v: run.trip(v) * 1)


@place("DataStream.filter.fn", "KeyedStream.filter.fn")
def filter_(run: Run) -> Any:
    return run.source().filter(lambda v: run.trip(v) is not None)


@place("DataStream.flat_map.fn", "KeyedStream.flat_map.fn")
def flat_map(run: Run) -> Any:
    return run.source().flat_map(lambda v: [run.trip(v)])


@place()
def flat_map_generator(run: Run) -> Any:
    def function(value: int) -> Iterator[int]:
        yield run.trip(value)

    return run.source().flat_map(function)


@place("DataStream.map_batches.fn", "KeyedStream.map_batches.fn")
def map_batches(run: Run) -> Any:
    return run.source().map_batches(lambda values: [run.trip(v) for v in values], max_size=2)


@place()
def map_in_a_thread(run: Run) -> Any:
    return run.source().map(lambda v: run.trip(v), blocking=True)


@place()
def async_map(run: Run) -> Any:
    async def function(value: int) -> int:
        run.trip(value)
        await asyncio.sleep(0)
        return value

    return run.source().map(function, timeout="10s", retry=af.Retry(2, backoff="1ms"))


@place()
def async_map_in_any_order(run: Run) -> Any:
    async def function(value: int) -> int:
        await asyncio.sleep(0)
        return int(run.trip(value))

    return run.source().map(function, ordered=False, concurrency=3)


@place()
def async_filter(run: Run) -> Any:
    async def function(value: int) -> bool:
        await asyncio.sleep(0)
        return run.trip(value) is not None

    return run.source().filter(function)


@place()
def async_flat_map(run: Run) -> Any:
    async def function(value: int) -> AsyncIterator[int]:
        await asyncio.sleep(0)
        yield run.trip(value)

    return run.source().flat_map(function)


@place()
def async_map_batches(run: Run) -> Any:
    async def function(values: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return [run.trip(value) for value in values]

    return run.source().map_batches(function, max_size=2)


@place(
    *(
        f"{owner}.{method}.on_timeout"
        for owner in ("DataStream", "KeyedStream")
        for method in ("map", "filter", "flat_map")
    )
)
def on_timeout(run: Run) -> Any:
    async def function(value: int) -> int:
        if value == BAD:
            await asyncio.sleep(60)
        return value

    return run.source().map(function, timeout="10ms", on_timeout=lambda v: run.trip(v))


# Functions of elements that come as columns.


def columns(run: Run) -> Any:
    return run.source(af.io.arrow(pa.table({"v": list(VALUES)})))


@place()
def map_of_columns(run: Run) -> Any:
    return columns(run).map(lambda row: run.trip(row["v"]))


@place()
def async_map_of_columns(run: Run) -> Any:
    async def function(row: Any) -> int:
        await asyncio.sleep(0)
        return int(run.trip(row["v"]))

    return columns(run).map(function)


@place()
def async_filter_of_columns(run: Run) -> Any:
    async def function(row: Any) -> bool:
        await asyncio.sleep(0)
        return run.trip(row["v"]) is not None

    return columns(run).filter(function)


@place()
def map_batches_of_columns(run: Run) -> Any:
    return columns(run).map_batches(lambda rows: [run.trip(row["v"]) for row in rows])


@place()
def process_of_columns(run: Run) -> Any:
    def function(row: Any, ctx: Any) -> Iterator[int]:
        yield run.trip(row["v"])

    return columns(run).process(function)


@place("DataStream.key_by.fn", "KeyedStream.key_by.fn")
def key_by(run: Run) -> Any:
    return run.source().key_by(lambda v: run.trip(v)).count()


@place("DataStream.partition_custom.fn", "KeyedStream.partition_custom.fn")
def partition_custom(run: Run) -> Any:
    return run.source().partition_custom(lambda v, n: run.trip(v) % n).map(lambda v: v)


@place("KeyedStream.reduce.fn")
def reduce(run: Run) -> Any:
    return run.source().key_by(lambda v: 0).reduce(lambda a, b: run.trip(b))


@place("KeyedStream.sum.fn", "KeyedStream.min.fn", "KeyedStream.max.fn")
def sum_(run: Run) -> Any:
    return run.source().key_by(lambda v: 0).sum(lambda v: run.trip(v))


@place("DataStream.sink.sink", "KeyedStream.sink.sink")
def sink_function(run: Run) -> None:
    run.source().sink(lambda v: run.out.append(run.trip(v)))


@place()
def async_sink_function(run: Run) -> None:
    async def write(value: int) -> None:
        run.out.append(run.trip(value))
        await asyncio.sleep(0)

    run.source().sink(write)


# Event time.


@place(
    "WatermarkStrategy.monotonous_timestamps.timestamp",
    "WatermarkStrategy.bounded_out_of_orderness.timestamp",
    "WatermarkStrategy.no_watermarks.timestamp",
)
def timestamp(run: Run) -> Any:
    return run.source(
        watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda v: run.trip(v))
    )


@place("WatermarkStrategy.punctuated.fn", "WatermarkStrategy.punctuated.timestamp")
def punctuated(run: Run) -> Any:
    return run.source().assign_timestamps_and_watermarks(
        af.WatermarkStrategy.punctuated(lambda v, t: run.trip(v), timestamp=lambda v: v)
    )


@place("WatermarkStrategy.custom.timestamp", "WatermarkStrategy.custom.generator")
def custom_generator(run: Run) -> Any:
    class Generator:
        def on_event(self, value: int, timestamp: int) -> int | None:
            return int(run.trip(value))

    return run.source(watermarks=af.WatermarkStrategy.custom(Generator, timestamp=lambda v: v))


# Process functions.


class Process(af.KeyedProcessFunction[int, int, int]):
    def __init__(self, run: Run, where: str) -> None:
        self.run, self.where = run, where

    def at(self, where: str) -> None:
        if where == self.where:
            self.run.act()

    def open(self, ctx: Any) -> None:
        self.at("open")

    def process_element(self, value: int, ctx: Any) -> Iterator[int]:
        if value == BAD:
            self.at("process_element")
        if self.where == "on_timer":
            ctx.timer_service.register_event_time_timer(value * 1000 + 1)
        yield value

    def on_timer(self, timestamp: int, ctx: Any) -> None:
        if timestamp == BAD * 1000 + 1:
            self.at("on_timer")

    def finish(self) -> None:
        self.at("finish")

    def close(self) -> None:
        self.at("close")


def in_process_function(where: str) -> Callable[[Run], Any]:
    def build(run: Run) -> Any:
        return run.timed().key_by(lambda v: v).process(Process(run, where))

    build.__name__ = f"process_function_{where}"
    return build


for _where in ("process_element", "on_timer", "finish"):
    place(f"ProcessFunction.{_where}", "DataStream.process.fn", "KeyedStream.process.fn")(
        in_process_function(_where)
    )
for _where in ("open", "close"):
    place(f"Function.{_where}")(in_process_function(_where))


@place(
    "CoProcessFunction.process_element1",
    "CoProcessFunction.process_element2",
    "CoProcessFunction.on_timer",
    "ConnectedStreams.process.fn",
)
def co_process(run: Run) -> Any:
    class Two(af.CoProcessFunction[int, int, int]):
        def process_element1(self, value: int, ctx: Any) -> list[int]:
            return [run.trip(value)]

        def process_element2(self, value: int, ctx: Any) -> list[int]:
            return []

    return run.source().connect(run.source([7])).process(Two())


@place("ConnectedStreams.map.f1", "ConnectedStreams.map.f2")
def co_map(run: Run) -> Any:
    run.complete += 1
    return run.source().connect(run.source([7])).map(lambda v: run.trip(v), lambda v: v)


@place("ConnectedStreams.flat_map.f1", "ConnectedStreams.flat_map.f2")
def co_flat_map(run: Run) -> Any:
    run.complete += 1
    return run.source([7]).connect(run.source()).flat_map(lambda v: [v], lambda v: [run.trip(v)])


@place("ConnectedStreams.key_by.left", "ConnectedStreams.key_by.right")
def co_key_by(run: Run) -> Any:
    run.complete += 1
    return (
        run.source()
        .connect(run.source([7]))
        .key_by(lambda v: run.trip(v), lambda v: v)
        .map(lambda v: v, lambda v: v)
    )


@place(
    "BroadcastProcessFunction.process_element",
    "BroadcastProcessFunction.process_broadcast_element",
    "BroadcastProcessFunction.on_timer",
)
def broadcast(run: Run) -> Any:
    class Ruled(af.BroadcastProcessFunction[int, int, int]):
        def process_element(self, value: int, ctx: Any) -> list[int]:
            return [value]

        def process_broadcast_element(self, value: int, ctx: Any) -> None:
            run.trip(value)

    rules = run.source().broadcast(af.MapStateDescriptor[int, int]("rules"))
    return run.source().connect(rules).process(Ruled())


class AsyncProcess(af.KeyedProcessFunction[int, int, int]):
    """Its methods wait, and then misbehave."""

    def __init__(self, run: Run, where: str) -> None:
        self.run, self.where = run, where

    async def process_element(self, value: int, ctx: Any) -> list[int]:
        await asyncio.sleep(0)
        if self.where == "process_element":
            self.run.trip(value)
        ctx.timer_service.register_event_time_timer(value * 1000 + 1)
        return [value]

    async def on_timer(self, timestamp: int, ctx: Any) -> list[int]:
        await asyncio.sleep(0)
        if self.where == "on_timer" and timestamp == BAD * 1000 + 1:
            self.run.act()
        return []


@place()
def async_process_element(run: Run) -> Any:
    return run.timed().key_by(lambda v: v).process(AsyncProcess(run, "process_element"))


@place()
def async_on_timer(run: Run) -> Any:
    return run.timed().key_by(lambda v: v).process(AsyncProcess(run, "on_timer"))


# Windows and joins.


@place("WindowedStream.aggregate.window_fn", "WindowedStream.reduce.window_fn")
def window_function(run: Run) -> Any:
    return run.windows().aggregate(af.count(), lambda key, ctx, results: [run.trip(key)])


@place("WindowedStream.reduce.fn")
def window_reduce(run: Run) -> Any:
    run.complete = 1
    return (
        run.timed().key_by(lambda v: 0).window(af.tumbling("1h")).reduce(lambda a, b: run.trip(b))
    )


@place("WindowedStream.process.fn", "ProcessWindowFunction.process")
def window_process(run: Run) -> Any:
    return run.windows().process(lambda key, ctx, values: [run.trip(v) for v in values])


@place()
def session_process(run: Run) -> Any:
    sessions = run.timed().key_by(lambda v: v).window(af.session("500ms"))
    return sessions.process(lambda key, ctx, values: [run.trip(v) for v in values])


@place("ProcessWindowFunction.clear")
def window_clear(run: Run) -> Any:
    class Whole(af.ProcessWindowFunction[int, int, int]):
        def process(self, key: int, ctx: Any, elements: Sequence[int]) -> list[int]:
            return list(elements)

        def clear(self, ctx: Any) -> None:
            run.act()

    return run.windows().process(Whole())


class Counting(af.AggregateFunction[int, int, int]):
    def __init__(self, run: Run, where: str) -> None:
        self.run, self.where = run, where

    def at(self, where: str) -> None:
        if where == self.where:
            self.run.act()

    def create_accumulator(self) -> int:
        self.at("create_accumulator")
        return 0

    def add(self, value: int, accumulator: int) -> int:
        if value == BAD:
            self.at("add")
        return accumulator + 1

    def get_result(self, accumulator: int) -> int:
        self.at("get_result")
        return accumulator

    def merge(self, a: int, b: int) -> int:
        self.at("merge")
        return a + b


def aggregated(where: str) -> Callable[[Run], Any]:
    def build(run: Run) -> Any:
        return run.windows().aggregate(Counting(run, where))

    def merging(run: Run) -> Any:
        run.complete = 1
        values = run.source(
            [0, 5, 3],
            watermarks=af.WatermarkStrategy.bounded_out_of_orderness(
                "1m", timestamp=lambda v: v * 1000
            ),
        )
        return values.key_by(lambda v: 0).window(af.session("3s")).aggregate(Counting(run, where))

    build.__name__ = merging.__name__ = f"aggregate_{where}"
    return merging if where == "merge" else build


for _where in ("create_accumulator", "add", "get_result", "merge"):
    place(f"AggregateFunction.{_where}")(aggregated(_where))


@place("KeyedStream.aggregate.agg", "WindowedStream.aggregate.agg")
def running_aggregate(run: Run) -> Any:
    return run.source().key_by(lambda v: v).aggregate(Counting(run, "add"))


class Firing(af.Trigger[int]):
    def __init__(self, run: Run, where: str) -> None:
        self.run, self.where = run, where

    def at(self, where: str) -> None:
        if where == self.where:
            self.run.act()

    def on_element(self, value: int, timestamp: Any, window: Any, ctx: Any) -> af.TriggerResult:
        if value == BAD:
            self.at("on_element")
        ctx.register_event_time_timer(window.end - 1)
        return af.TriggerResult.CONTINUE

    def on_event_time(self, time: int, window: Any, ctx: Any) -> af.TriggerResult:
        self.at("on_event_time")
        return af.TriggerResult.FIRE

    def on_merge(self, window: Any, ctx: Any) -> None:
        self.at("on_merge")
        ctx.register_event_time_timer(window.end - 1)

    def clear(self, window: Any, ctx: Any) -> None:
        self.at("clear")


def triggered(where: str) -> Callable[[Run], Any]:
    def build(run: Run) -> Any:
        firing = Firing(run, where)
        if where == "on_merge":
            run.complete = 1
            return (
                run.timed()
                .key_by(lambda v: 0)
                .window(af.session("2s"), trigger=firing)
                .aggregate(Counting(run, "nowhere"))
            )
        return run.windows(trigger=firing).aggregate(Counting(run, "nowhere"))

    build.__name__ = f"trigger_{where}"
    return build


for _where in ("on_element", "on_event_time", "on_merge", "clear"):
    place(f"Trigger.{_where}")(triggered(_where))


@place("Evictor.evict_before", "Evictor.evict_after")
def evictor(run: Run) -> Any:
    class Keeps(af.Evictor[int]):
        def evict_before(self, elements: list[Any], window: Any, ctx: Any) -> list[Any]:
            run.act()
            return elements

    return run.windows(evictor=Keeps()).process(lambda key, ctx, values: values)


@place("session.gap")
def session_gap(run: Run) -> Any:
    return (
        run.timed()
        .key_by(lambda v: v)
        .window(af.session(lambda v: run.trip(v) + 1))
        .aggregate(Counting(run, "nowhere"))
    )


@place(
    "JoinedStreams.where.key",
    "JoinedStreams.equal_to.key",
    "CoGroupedStreams.where.key",
    "CoGroupedStreams.equal_to.key",
)
def join_key(run: Run) -> Any:
    joined = run.timed().join(run.timed()).where(lambda v: run.trip(v)).equal_to(lambda v: v)
    return joined.window(af.tumbling("1s")).apply(lambda a, b: a)


@place("JoinedStreams.apply.fn")
def join_apply(run: Run) -> Any:
    joined = run.timed().join(run.timed()).where(lambda v: v).equal_to(lambda v: v)
    return joined.window(af.tumbling("1s")).apply(lambda a, b: run.trip(a))


@place("CoGroupedStreams.apply.fn")
def co_group(run: Run) -> Any:
    grouped = run.timed().co_group(run.timed()).where(lambda v: v).equal_to(lambda v: v)
    return grouped.window(af.tumbling("1s")).apply(
        lambda key, lefts, rights: [run.trip(v) for v in lefts]
    )


@place("IntervalJoin.process.fn")
def interval_join(run: Run) -> Any:
    left, right = run.timed().key_by(lambda v: v), run.timed().key_by(lambda v: v)
    return left.interval_join(right, "-1ms", "1ms").process(lambda a, b, ctx: [run.trip(a)])


# State, resources, metrics.


def checkpointed(where: str) -> Callable[[Run], Any]:
    def build(run: Run) -> Any:
        class Counts(af.MapFunction[int, int]):
            def initialize_state(self, ctx: Any) -> None:
                if where == "initialize_state":
                    run.act()

            def snapshot_state(self, ctx: Any) -> None:
                if where == "snapshot_state":
                    run.act()

            def map(self, value: int) -> int:
                return value

        run.options = {
            "checkpoints": f"memory://{where}-{id(run)}",
            "every": "1h",
            "restart": af.no_restart(),
        }
        return run.source().map(Counts())

    build.__name__ = where
    return build


for _where in ("initialize_state", "snapshot_state"):
    place(f"CheckpointedFunction.{_where}")(checkpointed(_where))


@place("MapFunction.map", "FilterFunction.filter", "FlatMapFunction.flat_map")
def map_function(run: Run) -> Any:
    class Trips(af.MapFunction[int, int]):
        def map(self, value: int) -> int:
            return int(run.trip(value))

    return run.source().map(Trips())


@place("ReducingStateDescriptor.fn")
def reducing_state(run: Run) -> Any:
    class Sums(af.KeyedProcessFunction[int, int, int]):
        def open(self, ctx: Any) -> None:
            descriptor = af.ReducingStateDescriptor("sum", lambda a, b: run.trip(b))
            self.sum = ctx.get_reducing_state(descriptor)

        def process_element(self, value: int, ctx: Any) -> list[int]:
            self.sum.add(value)
            return [value]

    return run.source().key_by(lambda v: 0).process(Sums())


@place("AggregatingStateDescriptor.agg")
def aggregating_state(run: Run) -> Any:
    class Counts(af.KeyedProcessFunction[int, int, int]):
        def open(self, ctx: Any) -> None:
            descriptor = af.AggregatingStateDescriptor("n", Counting(run, "add"))
            self.count = ctx.get_aggregating_state(descriptor)

        def process_element(self, value: int, ctx: Any) -> list[int]:
            self.count.add(value)
            return [value]

    return run.source().key_by(lambda v: 0).process(Counts())


class Registered:
    """A value of a type with functions of its own, of which that of `where` misbehaves."""

    run: Run | None = None
    where = ""

    def __init__(self, value: int) -> None:
        self.value = value

    @classmethod
    def at(cls, where: str) -> None:
        if cls.run is not None and cls.where == where:
            cls.run.act()

    def encode(self) -> int:
        self.at("encode")
        return self.value

    @classmethod
    def decode(cls, value: int) -> Registered:
        cls.at("decode")
        return cls(value)


af.register_type(Registered, encode=Registered.encode, decode=Registered.decode)


class Latest(af.KeyedProcessFunction[int, int, int]):
    """Keeps the latest element, as a value of the registered type."""

    def open(self, ctx: Any) -> None:
        self.latest = ctx.get_state(af.ValueStateDescriptor("latest"))

    def process_element(self, value: int, ctx: Any) -> list[int]:
        self.latest.value()
        self.latest.update(Registered(value))
        return [value]


@place("register_type.encode")
def type_encode(run: Run) -> Any:
    Registered.run, Registered.where = run, "encode"
    run.options = {
        "checkpoints": f"memory://encode-{id(run)}",
        "every": "1h",
        "restart": af.no_restart(),
    }
    return run.source().key_by(lambda v: 0).process(Latest())


@place("register_type.decode")
async def type_decode(run: Run) -> Any:
    """State of a run before is read."""
    Registered.run = None
    store = f"memory://decode-{id(run)}"
    before = af.Flow("f")
    numbers = before.source(af.io.push(), uid="numbers")
    latest = numbers.key_by(lambda v: 0).process(Latest(), uid="latest")
    latest.sink(af.io.blackhole(), uid="out")
    async with before.run(checkpoints=store, every="1h") as job:
        await job.input(numbers).put(0)
        saved = await job.stop()
    Registered.run, Registered.where = run, "decode"
    run.options = {
        "checkpoints": store,
        "every": "1h",
        "restart": af.no_restart(),
        "restore": saved,
        "allow_non_restored": True,
    }
    return run.source().key_by(lambda v: 0).process(Latest(), uid="latest")


def resource(where: str) -> Callable[[Run], Any]:
    def build(run: Run) -> Any:
        @af.resource
        def client() -> Iterator[int]:
            if where == "enter":
                run.act()
            yield 1
            if where == "exit":
                run.act()

        def function(value: int, client: int = af.use(client)) -> int:
            return value

        return run.source().map(function)

    build.__name__ = f"resource_{where}"
    return build


for _where in ("enter", "exit"):
    place(f"resource.{_where}")(resource(_where))


@place("MetricGroup.gauge")
def gauge(run: Run) -> Any:
    class Measured(af.MapFunction[int, int]):
        def open(self, ctx: Any) -> None:
            ctx.metrics.gauge("mine", self.measure)
            self.metrics = ctx.metrics

        def measure(self) -> float:
            run.act()
            return 1.0

        def map(self, value: int) -> int:
            found = [v for name, v in self.metrics.snapshot().items() if name.endswith("mine")]
            assert len(found) == 1
            assert math.isnan(found[0]) or found == [1.0]
            return value

    return run.source().map(Measured())


# Sources and sinks.


class Source:
    """A source whose methods, and those of its reader, misbehave."""

    bounded = True

    def __init__(self, run: Run, where: str) -> None:
        self.run, self.where = run, where
        self.left = list(VALUES)
        self.finished = False

    def at(self, where: str) -> None:
        if where == self.where:
            self.run.act()

    async def discover(self) -> list[af.Split]:
        self.at("discover")
        return [af.Split("0")]

    def reader(self, ctx: Any) -> Source:
        self.at("reader")
        return self

    async def open(self, splits: Any) -> None:
        self.at("open")

    def poll_batch(self, max_records: int) -> list[int] | None:
        if self.left and self.left[0] == BAD:
            self.at("poll_batch")
        if not self.left:
            self.finished = self.where != "position"  # Until a checkpoint asks for it.
            return None
        return [self.left.pop(0)]

    async def wait(self) -> None:
        self.at("wait")
        await asyncio.sleep(0)

    def position(self, split_id: str) -> int:
        self.at("position")
        return 0

    async def close(self) -> None:
        self.at("close")


class Sink:
    """A sink whose methods, and those of its writer and committer, misbehave."""

    full = True

    def __init__(self, run: Run, where: str) -> None:
        self.run, self.where = run, where
        self.waiting: list[int] = []

    def at(self, where: str) -> None:
        if where == self.where:
            self.run.act()

    def writer(self, ctx: Any) -> Sink:
        self.at("writer")
        return self

    def committer(self) -> Sink:
        return self

    def write_batch(self, values: Sequence[int], timestamps: Any) -> None:
        if BAD in values:
            self.at("write_batch")
        self.waiting += values

    async def flush(self) -> None:
        self.at("flush")

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        self.at("prepare")
        waiting, self.waiting = self.waiting, []
        return waiting

    async def commit(self, committables: Sequence[Any]) -> None:
        self.at("commit")
        self.run.out += committables

    async def abort(self, committables: Sequence[Any]) -> None: ...

    async def close(self) -> None:
        self.at("close_writer")


def of_source(where: str) -> Callable[[Run], Any]:
    def build(run: Run) -> Any:
        if where == "position":
            run.options = {
                "checkpoints": f"memory://position-{id(run)}",
                "every": "10ms",
                "restart": af.no_restart(),
            }
        return run.source(Source(run, where))

    build.__name__ = f"source_{where}"
    return build


def of_sink(where: str) -> Callable[[Run], Any]:
    def build(run: Run) -> None:
        run.source().sink(Sink(run, where))

    build.__name__ = f"sink_{where}"
    return build


for _where in ("discover", "reader"):
    place(f"Source.{_where}")(of_source(_where))
for _where in ("open", "poll_batch", "position", "close"):
    place(f"SourceReader.{_where}")(of_source(_where))
for _where in ("write_batch", "flush", "prepare"):
    place(f"SinkWriter.{_where}")(of_sink(_where))
place("Sink.writer")(of_sink("writer"))
place("Committer.commit")(of_sink("commit"))
place("SinkWriter.close")(of_sink("close_writer"))


@place()
def plain_generator(run: Run) -> Any:
    def numbers() -> Iterator[int]:
        for value in VALUES:
            yield run.trip(value)

    return run.source(numbers)


@place()
def async_generator(run: Run) -> Any:
    async def numbers() -> Any:
        for value in VALUES:
            run.trip(value)
            await asyncio.sleep(0)
            yield value

    return run.source(numbers)


@place()
def generator_with_positions(run: Run) -> Any:
    def numbers(position: int | None) -> Iterator[tuple[int, int]]:
        for value in VALUES[position or 0 :]:
            yield run.trip(value), value + 1

    return run.source(numbers)


# Connectors.


@place("io.datagen.fn")
def datagen(run: Run) -> Any:
    return run.source(af.io.datagen(run.trip, count=len(VALUES)))


@place("io.hybrid.first")
def hybrid_first(run: Run) -> Any:
    return run.source(af.io.hybrid(lambda: map(run.trip, VALUES), []))


@place("io.hybrid.then")
def hybrid_then(run: Run) -> Any:
    def then(end: Any) -> list[int]:
        run.act()
        return list(VALUES)

    return run.source(af.io.hybrid([], then))


@place("io.http.items")
async def http_items(run: Run) -> Any:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps(list(VALUES)).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    run.close = server.close
    port = server.sockets[0].getsockname()[1]
    address = f"http://127.0.0.1:{port}/"
    return run.source(af.io.http(address, "1h", items=lambda values: map(run.trip, values)))


@place("io.sqlite.mode", "io.postgres.mode", "io.mysql.mode")
def table_mode(run: Run) -> None:
    path = run.folder / "rows.db"

    def query(sql: str) -> list[Any]:
        with closing(sqlite3.connect(path)) as database, database:
            return database.execute(sql).fetchall()

    def mode(row: dict[str, int]) -> Any:
        run.trip(row["v"])
        return "upsert"

    query("create table rows (v integer primary key)")
    run.read = lambda: query("select v from rows")
    sink = af.io.sqlite(path, "rows", columns=["v"], key="v", mode=mode)
    run.source().map(lambda v: {"v": v}).sink(sink)


@place()
def type_of_a_file(run: Run) -> Any:
    @dataclass
    class Row:
        v: int

        def __post_init__(self) -> None:
            run.trip(self.v)

    path = run.folder / "rows.jsonl"
    path.write_text("".join(f'{{"v": {value}}}\n' for value in VALUES))
    return run.source(af.io.jsonl(path, Row))


IN_A_THREAD = ("plain_generator", "generator_with_positions", "map_in_a_thread")
DOCUMENTED = {"gauge": "a gauge that raises is shown as NaN"}
"""Acts after which the job continues."""

ELSEWHERE = {
    "SourceReader.wait": "test_user_code_cancels",
    "SourceReader.finished": "a property; called beside poll_batch",
    "Source.bounded": "a property, read while the flow is built",
    "Sink.committer": "called while the flow is built, and where the committer begins",
    "Committer.abort": "for commits by hand; the engine never calls it",
    "Trigger.on_processing_time": "as on_event_time, from the mail of a timer",
    "Trigger.can_merge": "a property, read while the flow is built",
    "WatermarkStrategy.create.now_ms": "the engine's clock",
    "io.kafka.topic": "called for each record as a function of a map, before it is sent",
    "io.kafka.key": "as topic",
    "io.kafka.headers": "as topic",
    "io.mqtt.topic": "called in write_batch, which has a place here",
    "io.rabbitmq.routing_key": "called in write_batch, which has a place here",
    "io.rabbitmq.message_id": "as routing_key",
    "io.rabbitmq.headers": "as routing_key",
    "io.spark.what": "a function of Spark, in a process of Spark",
    "io.spark.into": "a function of Spark, in a process of Spark",
    "resource.factory": "a generator; called where it is entered",
}
"""Callables of the API that have no place of their own here, and why."""


CASES = [
    pytest.param(place, act, id=f"{place}-{act.__name__}", marks=marks)
    for acts, marks in ((ACTS, ()), (MORE_ACTS, (pytest.mark.slow,)))
    for act in acts
    for place in PLACES
    # A thread has no task of its own, and no loop.
    if not (place in IN_A_THREAD and act in (cancel_own_task, take_a_cancelled_result))
]


@pytest.mark.parametrize(("place", "act"), CASES)
async def test_misbehaving_user_code_fails_the_job_by_name_or_the_job_ends_complete(
    place: str, act: Act, tmp_path: Path
) -> None:
    run = Run(act, tmp_path)
    stream = PLACES[place](run)
    if inspect.iscoroutine(stream):
        stream = await stream
    if stream is not None:
        stream.sink(run.out.append)
    error: BaseException | None = None
    try:
        async with asyncio.timeout(50):
            await run.flow.execute(**run.options)
    except BaseException as caught:
        error = caught
    finally:
        run.close()
    assert run.acted, "the table calls it"
    if error is None:
        assert place in DOCUMENTED or act is cancel_own_task, "what it raised is lost"
        out = run.out if run.read is None else run.read()
        assert len(out) == run.complete, "never FINISHED with less"
        return
    assert not isinstance(error, (asyncio.CancelledError, TimeoutError))
    # Python itself replaces a StopAsyncIteration that leaves an async generator, and names it as
    # the cause.
    told = [error, error.__cause__] if isinstance(error.__cause__, StopAsyncIteration) else [error]
    notes = str(error) + "".join(
        note
        for one in told
        for note in getattr(one, "__notes__", ())
        if note.startswith("aioflow: ")
    )
    assert any(
        word in notes
        for word in ("operator '", "source '", "resource '", "sink '", "discover() of")
    ), (error, notes)


def functions_of(method: Any) -> set[str]:
    """The parameters of a method that take a function, over its overloads."""
    forms = [*get_overloads(inspect.unwrap(method)), method]
    return {
        parameter.name
        for form in forms
        for parameter in inspect.signature(form).parameters.values()
        if re.search(r"Callable|Function|\bMode\b", str(parameter.annotation))
        or parameter.name == "fn"
    }


def callables_of_the_api() -> set[str]:
    """Parameters that take a function, and methods that users implement."""
    found: set[str] = set()
    streams = (
        af.DataStream,
        af.KeyedStream,
        af.WindowedStream,
        af.ConnectedStreams,
        JoinedStreams,
        CoGroupedStreams,
        IntervalJoin,
    )
    for owner in (*streams, af.WatermarkStrategy):
        for name, method in inspect.getmembers(owner, callable):
            if name.startswith("_"):
                continue
            found |= {f"{owner.__name__}.{name}.{one}" for one in functions_of(method)}
    connectors = {name: getattr(af.io, name) for name in af.io.__all__}
    for name, connector in connectors.items():
        if not inspect.ismodule(connector):
            found |= {f"io.{name}.{one}" for one in functions_of(connector)}
    others = (af.register_type, af.ReducingStateDescriptor, af.AggregatingStateDescriptor)
    for other in (*others, af.session, af.resource):
        found |= {f"{other.__name__}.{one}" for one in functions_of(other)}
    implemented = (
        *(
            af.Function,
            af.MapFunction,
            af.FilterFunction,
            af.FlatMapFunction,
            af.ProcessFunction,
            af.CoProcessFunction,
        ),
        *(
            af.BroadcastProcessFunction,
            af.ProcessWindowFunction,
            af.AggregateFunction,
            af.CheckpointedFunction,
            af.Trigger,
            af.Evictor,
        ),
        *(af.Source, SourceReader, af.Sink, af.SinkWriter, Committer),
    )
    for owner in implemented:
        found.update(f"{owner.__name__}.{name}" for name in vars(owner) if not name.startswith("_"))
    return found


def test_the_table_of_places_is_complete() -> None:
    missing = callables_of_the_api() - COVERED.keys() - ELSEWHERE.keys()
    assert not missing, (
        f"user code is called there, and no place of this table does it: {sorted(missing)}"
    )
    assert len(PLACES) >= 60
