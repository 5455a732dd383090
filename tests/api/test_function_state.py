"""Operator state of functions: kept wherever a function may have some, refused at its line
everywhere else.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

import aioflow as af

pytestmark = pytest.mark.timeout(60)

_NAMES = itertools.count()

Build = Callable[[af.Flow, Any, Any], None]
"""`build(flow, stream, kept)`: puts what `kept` says into its place behind `stream`, and a sink."""


class Kept:
    """Counts its calls, over all runs. One for each place, with the classes that it hands out."""

    def __init__(self) -> None:
        self.began_with: list[int] = []
        self.calls = 0
        kept = self

        class Counts(af.CheckpointedFunction):
            def initialize_state(self, ctx: Any) -> None:
                self.count = sum(ctx.operator_state.get_list_state("count").get())
                kept.began_with.append(self.count)

            def snapshot_state(self, ctx: Any) -> None:
                ctx.operator_state.get_list_state("count").update([self.count])

            def seen(self) -> None:
                self.count += 1
                kept.calls += 1

        self.base: Any = Counts

    def calling(self, result: Callable[..., Any]) -> Any:
        """An object that can be called, and gives `result(*args)`."""

        class Calls(self.base):  # type: ignore[misc, name-defined]
            def __call__(self, *args: Any) -> Any:
                self.seen()
                return result(*args)

        return Calls()

    def method(self, name: str, base: type, result: Callable[..., Any]) -> Any:
        """A function class of `base` whose method `name` gives `result(*args)`."""

        def called(self: Any, *args: Any) -> Any:
            self.seen()
            return result(*args)

        return type("Calls", (base, self.base), {name: called})


class Awaited:
    """A function of a sink that is awaited."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def initialize_state(self, ctx: Any) -> None:
        self.inner.initialize_state(ctx)

    async def snapshot_state(self, ctx: Any) -> None:
        await asyncio.sleep(0)
        self.inner.snapshot_state(ctx)

    async def __call__(self, value: Any) -> None:
        await asyncio.sleep(0)
        self.inner(value)


class Opened(af.Function):
    """A function class as a sink."""

    is_open = False

    def open(self, ctx: af.RuntimeContext) -> None:
        self.is_open = True


class Writing:
    """A sink of its own whose writers have state."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def writer(self, ctx: Any) -> Any:
        return Writer(self.function)

    def committer(self) -> None:
        return None


class Writer:
    def __init__(self, function: Any) -> None:
        self.initialize_state, self.snapshot_state = (
            function.initialize_state,
            function.snapshot_state,
        )
        self._call = function

    def write_batch(self, values: Any, timestamps: Any) -> None:
        for value in values:
            self._call(value)

    async def flush(self) -> None:
        """Nothing waits."""

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        return []


def end(stream: Any) -> None:
    stream.sink(af.io.blackhole())


def key(x: Any) -> int:
    return 0


def window_join(a: Any, b: Any, method: str) -> Any:
    window = af.tumbling("1s", time="processing")
    return getattr(a, method)(b).where(key).equal_to(key).window(window, trigger=af.on_count(1))


def emitting(k: Any) -> Any:
    return k.method("process_element", af.ProcessFunction, lambda x, ctx: [x])


def windowed(k: Any) -> Any:
    return k.method("process", af.ProcessWindowFunction, lambda *_: [])


PLACES: dict[str, Build] = {
    "map": lambda f, s, k: end(s.map(k.method("map", af.MapFunction, lambda x: x))),
    "a callable in map": lambda f, s, k: end(s.map(k.calling(lambda x: x))),
    "filter": lambda f, s, k: end(
        s.filter(k.method("filter", af.FilterFunction, lambda x: True)())
    ),
    "map behind key_by": lambda f, s, k: end(
        s.key_by(key).map(k.method("map", af.MapFunction, lambda x: x))
    ),
    "blocking map": lambda f, s, k: end(
        s.map(k.calling(lambda x: x), blocking=True, concurrency=1)
    ),
    "map_batches": lambda f, s, k: end(s.map_batches(k.calling(lambda xs: xs), max_size=1)),
    "process": lambda f, s, k: end(s.process(emitting(k))),
    "running reduce": lambda f, s, k: end(s.key_by(key).reduce(k.calling(lambda a, b: b))),
    "window process": lambda f, s, k: end(s.key_by(key).count_window(1).process(windowed(k))),
    "window_fn": lambda f, s, k: end(
        s.key_by(key)
        .window(af.tumbling("1s"))
        .aggregate(af.count(), k.calling(lambda key, window, n: n))
    ),
    "window_fn of a count window": lambda f, s, k: end(
        s.key_by(key).count_window(1).aggregate(af.count(), k.calling(lambda *_: 1))
    ),
    "connected map": lambda f, s, k: end(
        s.connect(s).map(k.method("map", af.MapFunction, lambda x: x), str)
    ),
    "connected flat_map": lambda f, s, k: end(
        s.connect(s).flat_map(str, k.method("flat_map", af.FlatMapFunction, lambda x: [x])())
    ),
    "join": lambda f, s, k: end(window_join(s, s, "join").apply(k.calling(lambda a, b: a))),
    "co_group": lambda f, s, k: end(
        window_join(s, s, "co_group").apply(k.calling(lambda key, lefts, rights: lefts))
    ),
    "interval join": lambda f, s, k: end(
        s.key_by(key)
        .interval_join(s.key_by(key), "0s", "0s")
        .process(k.calling(lambda a, b, ctx: [a]))
    ),
    "sink": lambda f, s, k: s.sink(k.calling(lambda x: None)),
    "sink that is awaited": lambda f, s, k: s.sink(Awaited(k.calling(lambda x: None))),
    "function class as a sink": lambda f, s, k: s.sink(
        k.method("__call__", Opened, lambda x: None)
    ),
    "sink of its own": lambda f, s, k: s.sink(Writing(k.calling(lambda x: None))),
}


@pytest.mark.parametrize("place", PLACES)
async def test_counts_of_a_function_survive_a_savepoint(place: str) -> None:
    """H6.2"""
    store, kept = f"memory://test-function-state-{next(_NAMES)}", Kept()
    events: Any = None

    def build() -> af.Flow:
        nonlocal events
        flow = af.Flow("kept")
        strategy = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda x: x * 1000)
        events = flow.source(af.io.push(), uid="events", watermarks=strategy)
        PLACES[place](flow, events, kept)
        return flow

    for run in range(3):
        before = kept.calls
        async with build().run(checkpoints=store, every="1h") as job:
            assert kept.began_with[-1] == before, f"in run {run}"
            for i in range(4):
                await job.input(events).put(4 * run + i)
            async with asyncio.timeout(30):
                while kept.calls < before + 2:
                    await asyncio.sleep(0.001)
            await job.stop()
    assert len(kept.began_with) == 3


class Late(af.CheckpointedFunction):
    """Asks for its operator state where it needs it: with the first element, and when it is
    written.
    """

    def __init__(self, report: Callable[[int], None]) -> None:
        self.report = report

    def initialize_state(self, ctx: Any) -> None:
        self.ctx, self.count = ctx, None

    def snapshot_state(self, ctx: Any) -> None:
        if self.count is not None:
            ctx.operator_state.get_list_state("count").update([self.count])

    def __call__(self, value: Any) -> Any:
        if self.count is None:
            self.count = sum(self.ctx.operator_state.get_list_state("count").get())
        self.count += 1
        self.report(self.count)
        return value


class LateProcess(af.ProcessFunction[Any, Any]):
    """Like `Late`, but without declaring the state before."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self.report = report

    def open(self, ctx: Any) -> None:
        self.ctx = ctx

    def process_element(self, value: Any, ctx: Any) -> Any:
        state = self.ctx.operator_state.get_list_state("count")
        count = sum(state.get()) + 1
        state.update([count])
        self.report(count)
        yield value


@pytest.mark.parametrize("place", ["map", "process", "sink"])
async def test_operator_state_may_be_asked_for_late(place: str) -> None:
    """A run cannot know beforehand whether the function asks.

    A run without elements keeps the state too.
    """
    store, results = f"memory://test-function-state-{next(_NAMES)}", list[int]()
    events: Any = None

    def report(count: int) -> None:
        results.append(count)

    def build() -> af.Flow:
        nonlocal events
        flow = af.Flow("late")
        stream = events = flow.source(af.io.push(), uid="events")
        if place == "map":
            stream.map(Late(report), uid="late").sink(af.io.blackhole())
        elif place == "process":
            stream.process(LateProcess(report), uid="late").sink(af.io.blackhole())
        else:
            stream.sink(Late(report), uid="late")
        return flow

    for elements in (2, 0, 2):
        wanted = len(results) + elements
        async with build().run(checkpoints=store, every="1h", restart=af.no_restart()) as job:
            for i in range(elements):
                await job.input(events).put(i)
            async with asyncio.timeout(30):
                while len(results) < wanted:
                    await asyncio.sleep(0.001)
            await job.stop()
    assert results == [1, 2, 3, 4]


@pytest.mark.parametrize("allowed", [False, True])
async def test_operator_state_is_refused_to_what_can_never_ask_for_it(allowed: bool) -> None:
    """A plain function, for example."""
    store, results = f"memory://test-function-state-{next(_NAMES)}", list[int]()
    events: Any = None

    def report(count: int) -> None:
        results.append(count)

    def build(function: Any) -> af.Flow:
        nonlocal events
        flow = af.Flow("dropped")
        events = flow.source(af.io.push(), uid="events")
        events.map(function, uid="same").sink(af.io.blackhole())
        return flow

    options: dict[str, Any] = {"checkpoints": store, "every": "1h", "restart": af.no_restart()}
    async with build(Late(report)).run(**options) as job:
        await job.input(events).put(1)
        async with asyncio.timeout(30):
            while not results:
                await asyncio.sleep(0.001)
        await job.stop()
    if allowed:
        async with build(lambda value: value).run(
            **options, restore="latest", allow_non_restored=True
        ) as job:
            await job.stop()
        return
    with pytest.raises(
        af.RestoreError,
        match=r"has no use for the state 'count' .* an operator or a function of another kind",
    ):
        async with build(lambda value: value).run(**options):
            raise AssertionError("it must not run")
