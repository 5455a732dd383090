"""Longest time without a turn of the event loop, while windows, joins, timers, state or sources of
a million keys are processed.

    python benchmarks/bench_holds.py [--keys 1000000] [--only tumbling instant] [--collector python]

Beside each flow a plain task of the same loop asks for its turn, again and again. The longest wait
of this task is the longest wait of mail, a heartbeat or a request of the service. Waits are CPU
time of the thread, which other programs do not change. The garbage collector has the settings of a
worker process, or with `--collector python` those of Python. The longest collection stands beside
each figure, which includes the collection.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns, thread_time
from typing import Any

import aioflow as af
from aioflow.cluster.collector import COLLECTED_AFTER, Collector
from benchmarks.bench_throughput import environment, loop_factory, print_rows

GOAL_MS = 100
"""Maximum of each hold."""

INSTANT = 10_000
"""Event time at which everything is due."""


def ignore(_row: Any) -> None:
    """The sink of all flows here."""


def first(row: tuple[int, int]) -> int:
    return row[0]


def second(row: tuple[int, int]) -> int:
    return row[1]


def stream(flow: af.Flow, make: Callable[[int], tuple[int, int]], count: int) -> Any:
    """A keyed stream of (key, time)."""
    times = af.WatermarkStrategy.monotonous_timestamps(timestamp=second)
    return flow.source(af.io.datagen(make, count=count), watermarks=times).key_by(first)


def ending(keys: int, at: int) -> Callable[[int], tuple[int, int]]:
    """A record of each key at time 1, and one that brings the watermark to `at`."""
    return lambda i: (i, 1) if i < keys else (0, at)


def tumbling(keys: int) -> af.Flow:
    """A window of all keys fires, and is forgotten."""
    flow = af.Flow("tumbling")
    windows = stream(flow, ending(keys, 2 * INSTANT), keys + 1).window(af.tumbling("10s"))
    windows.aggregate(af.agg(n=af.count(), t=af.sum(second))).sink(ignore)
    return flow


def sliding(keys: int) -> af.Flow:
    """Windows of 600 slices, each with its share of the keys."""
    flow = af.Flow("sliding")
    made = stream(flow, lambda i: (i % max(1, keys // 100), i * 1_200_000 // keys), keys)
    made.window(af.sliding("10m", "1s")).aggregate(af.agg(n=af.count(), t=af.sum(second))).sink(
        ignore
    )
    return flow


def sessions(keys: int) -> af.Flow:
    """The sessions of all keys end."""
    flow = af.Flow("sessions")
    stream(flow, ending(keys, 2 * INSTANT), keys + 1).window(af.session("5s")).aggregate(
        af.count()
    ).sink(ignore)
    return flow


class Timed(af.KeyedProcessFunction):
    """A timer for each record: at one instant, or spread over as many as there are keys."""

    def __init__(self, spread: bool, processing: bool = False) -> None:
        self.spread = spread
        self.processing = processing

    def process_element(self, value: tuple[int, int], ctx: Any) -> None:
        if value[1] < INSTANT:
            at = INSTANT + value[0] if self.spread else INSTANT
            if self.processing:
                ctx.timer_service.register_processing_time_timer(at)
            else:
                ctx.timer_service.register_event_time_timer(at)

    def on_timer(self, timestamp: int, ctx: Any) -> tuple[int, ...]:
        return (timestamp,)


def instant(keys: int) -> af.Flow:
    """A timer of each key, all of one instant."""
    flow = af.Flow("instant")
    stream(flow, ending(keys, 2 * INSTANT), keys + 1).process(Timed(False)).sink(ignore)
    return flow


def instants(keys: int) -> af.Flow:
    """A timer of each key at an instant of its own."""
    flow = af.Flow("instants")
    stream(flow, ending(keys, 2 * INSTANT + keys), keys + 1).process(Timed(True)).sink(ignore)
    return flow


def clock(keys: int) -> af.Flow:
    """Timers of processing time, overdue when they are registered."""
    flow = af.Flow("clock")
    stream(flow, ending(keys, 2 * INSTANT), keys + 1).process(Timed(False, True)).sink(ignore)
    return flow


def columns(flow: af.Flow, count: int) -> Any:
    """A stream of columns, with a record of each key at time 1."""
    import pyarrow as pa

    table = pa.table({"k": range(count), "ts": [1] * count, "x": range(count)})
    times = af.WatermarkStrategy.monotonous_timestamps(timestamp=af.col.ts)
    return flow.source(af.io.arrow(table), watermarks=times)


def tumbling_columns(keys: int) -> af.Flow:
    """A window of all keys fires, on columns."""
    flow = af.Flow("tumbling-columns")
    windows = columns(flow, keys).key_by(af.col.k).window(af.tumbling("10s"))
    windows.aggregate(af.agg(n=af.count(), x=af.sum(af.col.x))).sink(ignore)
    return flow


def join_columns(keys: int) -> af.Flow:
    """A window of two sides of all keys fires, on columns."""
    flow = af.Flow("join-columns")
    joined = columns(flow, keys).join(columns(flow, keys)).where(af.col.k).equal_to(af.col.k)
    joined.window(af.tumbling("10s")).pairs().sink(ignore)
    return flow


def join_hot_columns(keys: int) -> af.Flow:
    """All records of one side have one key, on columns."""
    flow = af.Flow("join-hot-columns")
    joined = columns(flow, keys).join(columns(flow, 1))
    keyed = joined.where(af.col.k * 0).equal_to(af.col.k)
    keyed.window(af.tumbling("10s")).pairs().sink(ignore)
    return flow


def side(flow: af.Flow, keys: int) -> Any:
    """A record of each key, and one that ends all windows."""
    times = af.WatermarkStrategy.monotonous_timestamps(timestamp=second)
    made = ending(keys, 2 * INSTANT)
    return flow.source(af.io.datagen(made, count=keys + 1), watermarks=times)


def join(keys: int) -> af.Flow:
    """A window of two sides of all keys fires."""
    flow = af.Flow("join")
    left, right = side(flow, keys), side(flow, keys)
    joined = left.join(right).where(first).equal_to(first).window(af.tumbling("10s"))
    joined.apply(lambda one, other: one).sink(ignore)
    return flow


def join_hot(keys: int) -> af.Flow:
    """All elements of one side have one key."""
    flow = af.Flow("join-hot")
    left, right = side(flow, keys), side(flow, 1)
    joined = left.join(right).where(lambda _row: 0).equal_to(first).window(af.tumbling("10s"))
    joined.apply(lambda one, other: one).sink(ignore)
    return flow


def co_group(keys: int) -> af.Flow:
    """A window of two sides of all keys fires as groups."""
    flow = af.Flow("co-group")
    left, right = side(flow, keys), side(flow, keys)
    grouped = left.co_group(right).where(first).equal_to(first).window(af.tumbling("10s"))
    grouped.apply(lambda key, lefts, rights: [key]).sink(ignore)
    return flow


def interval_join(keys: int) -> af.Flow:
    """An element has a partner in each of the others, and then all are forgotten."""
    flow = af.Flow("interval-join")
    left, right = side(flow, keys), side(flow, 1)
    hot = left.key_by(lambda _row: 0)
    joined = hot.interval_join(right.key_by(first), "-1s", "1s")
    joined.process(lambda one, other, ctx: [one]).sink(ignore)
    return flow


def running(keys: int) -> af.Flow:
    """The counts of all keys, at the end of the input too."""
    flow = af.Flow("running")
    stream(flow, ending(keys, 2 * INSTANT), keys + 1).count().sink(ignore)
    return flow


def a_list(keys: int) -> af.Flow:
    """A source that has all its elements in one list."""
    flow = af.Flow("a-list")
    flow.source(list(range(keys))).map(lambda n: n + 1).sink(ignore)
    return flow


def huge_results(keys: int) -> af.Flow:
    """One element has a million results, as a list."""
    flow = af.Flow("huge-results")
    flow.source([keys]).flat_map(lambda n: list(range(n))).map(lambda n: n + 1).sink(ignore)
    return flow


def map_batches(keys: int) -> af.Flow:
    """One batch of all elements."""
    flow = af.Flow("map-batches")
    flow.source(af.io.datagen(lambda i: i, count=keys)).map_batches(
        lambda values: values, max_size=keys
    ).sink(ignore)
    return flow


RULES = af.MapStateDescriptor[int, int]("rules")


class Ruled(af.BroadcastProcessFunction):
    """Puts each rule into broadcast state."""

    def process_element(self, value: Any, ctx: Any) -> tuple[Any, ...]:
        return (value,)

    def process_broadcast_element(self, value: tuple[int, int], ctx: Any) -> None:
        ctx.get_broadcast_state(RULES).put(value[0], value[1])


def broadcast(keys: int) -> af.Flow:
    """Broadcast state of all keys, in checkpoints."""
    flow = af.Flow("broadcast")
    rules = flow.source(af.io.datagen(lambda i: (i, i), count=keys)).broadcast(RULES)
    flow.source([1]).connect(rules).process(Ruled()).sink(ignore)
    return flow


class Remembered(af.KeyedProcessFunction):
    """A value of each key, with a time to live."""

    def open(self, ctx: Any) -> None:
        self.seen = ctx.get_state(af.ValueStateDescriptor("seen", ttl="200ms"))

    def process_element(self, value: tuple[int, int], ctx: Any) -> None:
        self.seen.update(value[1])


def ttl(keys: int) -> af.Flow:
    """The values of all keys expire, while records come."""
    flow = af.Flow("ttl")
    stream(flow, lambda i: (i % keys, 1), 2 * keys).process(Remembered()).sink(ignore)
    return flow


class Listed(af.KeyedProcessFunction):
    """All elements in one state of one key."""

    def open(self, ctx: Any) -> None:
        self.all = ctx.get_list_state(af.ListStateDescriptor("all"))

    def process_element(self, value: Any, ctx: Any) -> None:
        self.all.add(value)


def hot_list(keys: int) -> af.Flow:
    """A list of a million elements of one key, in checkpoints."""
    flow = af.Flow("hot-list")
    flow.source(af.io.datagen(lambda i: i, count=keys)).key_by(lambda _n: 0).process(Listed()).sink(
        ignore
    )
    return flow


def file_sink(keys: int) -> af.Flow:
    """A file of all elements, committed at the end."""
    flow = af.Flow("file-sink")
    flow.source(af.io.datagen(lambda i: {"n": i}, count=keys)).sink(
        af.io.jsonl(tempfile.mkdtemp(prefix="holds-"))
    )
    return flow


def upserts(keys: int) -> af.Flow:
    """SQL that counts by key, with updates."""
    flow = af.Flow("sql-updates")
    rows = flow.source(af.io.datagen(lambda i: {"k": i, "x": i % 7}, count=keys))
    flow.sql("SELECT k, COUNT(*) AS n, MAX(x) AS x FROM r GROUP BY k", r=rows, updates=True).sink(
        ignore
    )
    return flow


def ranks(keys: int) -> af.Flow:
    """SQL that ranks a window of all keys, of which all elements are in one partition."""
    flow = af.Flow("sql-ranks")
    times = af.WatermarkStrategy.monotonous_timestamps(timestamp=af.col.ts)
    rows = flow.source(
        af.io.datagen(lambda i: {"k": i, "ts": 1, "x": i * 7919 % 1_000_003}, count=keys),
        watermarks=times,
    )
    flow.sql(
        "SELECT * FROM (SELECT k, x, window_start, window_end, ROW_NUMBER() OVER (PARTITION BY "
        "window_start, window_end ORDER BY x DESC) AS n FROM TABLE(TUMBLE(TABLE r, "
        "DESCRIPTOR(ts), INTERVAL '10' SECOND))) WHERE n <= 10",
        schemas={"r": {"k": int, "ts": int, "x": int}},
        r=rows,
    ).sink(ignore)
    return flow


def kept(keys: int) -> af.Flow:
    """The counts of all keys in checkpoints: a full one, and what changed."""
    flow = af.Flow("kept")
    stream(flow, lambda i: (i % keys, 1), 2 * keys).count(uid="count").sink(ignore)
    return flow


FLOWS: dict[str, Callable[[int], af.Flow]] = {
    flow.__name__: flow
    for flow in (
        tumbling, tumbling_columns, sliding, sessions, instant, instants, clock, join, join_hot,
        co_group, join_columns, join_hot_columns, interval_join, running, a_list, huge_results,
        map_batches, broadcast, ttl, hot_list, file_sink, upserts, ranks, kept,
    )
}  # fmt: skip

CHECKPOINTED = frozenset({"broadcast", "hot_list", "file_sink", "kept"})
"""Flows with checkpoints."""


@dataclass(slots=True)
class Holds:
    """The observations of one run, in ms."""

    longest: float = 0.0
    collection: float = 0.0


@contextmanager
def collecting(holds: Holds) -> Iterator[None]:
    """Notes how long collections take."""
    begun = 0.0

    def hear(phase: str, _info: dict[str, int]) -> None:
        nonlocal begun
        if phase == "start":
            begun = thread_time()
        else:
            holds.collection = max(holds.collection, (thread_time() - begun) * 1e3)

    gc.callbacks.append(hear)
    try:
        yield
    finally:
        gc.callbacks.remove(hear)


async def watch(holds: Holds) -> None:
    """Asks for a turn all the while."""
    while True:
        asked = thread_time()
        await asyncio.sleep(0)
        holds.longest = max(holds.longest, (thread_time() - asked) * 1e3)


def held(name: str, keys: int, collector: Collector | None) -> dict[str, Any]:
    """Runs once. `collector`: uses the collector of a worker process."""
    holds = Holds()

    async def execute() -> float:
        beside = [asyncio.create_task(watch(holds))]
        if collector is not None:
            beside.append(asyncio.create_task(collector.collect()))
        begun = thread_time()
        try:
            options: dict[str, Any] = {}
            if name in CHECKPOINTED:
                options = {"checkpoints": f"memory://holds-{name}", "every": "200ms"}
            await FLOWS[name](keys).execute(**options)
            return thread_time() - begun
        finally:
            for task in beside:
                task.cancel()

    gc.collect()
    gc.freeze()
    with collecting(holds), asyncio.Runner(loop_factory=loop_factory("uvloop")) as runner:
        seconds = runner.run(execute())
    return {
        "flow": name,
        "hold_ms": round(holds.longest, 1),
        "collection_ms": round(holds.collection, 1),
        "cpu_s": round(seconds, 2),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--only", nargs="+", default=list(FLOWS), choices=list(FLOWS))
    parser.add_argument("--collector", choices=["worker", "python"], default="worker")
    options = parser.parse_args(arguments)
    before, collector = gc.get_threshold(), Collector(perf_counter_ns)
    if options.collector == "worker":
        gc.set_threshold(*COLLECTED_AFTER)
        gc.callbacks.append(collector.hear)
    try:
        rows = [
            held(name, options.keys, collector if options.collector == "worker" else None)
            for name in options.only
        ]
    finally:
        if options.collector == "worker":
            gc.callbacks.remove(collector.hear)
        gc.set_threshold(*before)
        gc.unfreeze()
    report = {
        **environment(),
        "unit": "ms of the thread's CPU time",
        "goal_ms": GOAL_MS,
        "keys": options.keys,
        "holds": rows,
    }
    print_rows(rows, ["flow", "hold_ms", "collection_ms", "cpu_s"])
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
