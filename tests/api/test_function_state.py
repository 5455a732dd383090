"""Operator state of functions: kept wherever a function may have some, refused at its line everywhere else."""

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
        self.initialize_state, self.snapshot_state = function.initialize_state, function.snapshot_state
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
    "filter": lambda f, s, k: end(s.filter(k.method("filter", af.FilterFunction, lambda x: True)())),
    "map behind key_by": lambda f, s, k: end(s.key_by(key).map(k.method("map", af.MapFunction, lambda x: x))),
    "blocking map": lambda f, s, k: end(s.map(k.calling(lambda x: x), blocking=True, concurrency=1)),
    "map_batches": lambda f, s, k: end(s.map_batches(k.calling(lambda xs: xs), max_size=1)),
    "process": lambda f, s, k: end(s.process(emitting(k))),
    "running reduce": lambda f, s, k: end(s.key_by(key).reduce(k.calling(lambda a, b: b))),
    "window process": lambda f, s, k: end(s.key_by(key).count_window(1).process(windowed(k))),
    "window_fn": lambda f, s, k: end(
        s.key_by(key).window(af.tumbling("1s")).aggregate(af.count(), k.calling(lambda key, window, n: n))
    ),
    "window_fn of a count window": lambda f, s, k: end(s.key_by(key).count_window(1).aggregate(af.count(), k.calling(lambda *_: 1))),
    "connected map": lambda f, s, k: end(s.connect(s).map(k.method("map", af.MapFunction, lambda x: x), str)),
    "connected flat_map": lambda f, s, k: end(s.connect(s).flat_map(str, k.method("flat_map", af.FlatMapFunction, lambda x: [x])())),
    "join": lambda f, s, k: end(window_join(s, s, "join").apply(k.calling(lambda a, b: a))),
    "co_group": lambda f, s, k: end(window_join(s, s, "co_group").apply(k.calling(lambda key, lefts, rights: lefts))),
    "interval join": lambda f, s, k: end(
        s.key_by(key).interval_join(s.key_by(key), "0s", "0s").process(k.calling(lambda a, b, ctx: [a]))
    ),
    "sink": lambda f, s, k: s.sink(k.calling(lambda x: None)),
    "sink that is awaited": lambda f, s, k: s.sink(Awaited(k.calling(lambda x: None))),
    "function class as a sink": lambda f, s, k: s.sink(k.method("__call__", Opened, lambda x: None)),
    "sink of its own": lambda f, s, k: s.sink(Writing(k.calling(lambda x: None))),
}


@pytest.mark.parametrize("place", PLACES)
async def test_what_a_function_counted_is_there_after_a_savepoint(place: str) -> None:
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
