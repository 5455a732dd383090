"""How long the loop is held at most while much falls due at once: windows and timers of a million
keys.

    python benchmarks/bench_holds.py [--keys 1000000] [--only tumbling instant] [--collector python]

Beside each flow a plain task of the same loop asks for its turn, again and again: what it waits for
is the longest that mail, a heartbeat or a request of the service can wait. By the CPU time of the
thread, which others on the machine do not change. The garbage collector is set as in a worker
process, unless it is asked for as Python sets it; its longest collection stands beside each figure,
and is part of it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns, thread_time
from typing import Any

import aioflow as af
from aioflow.cluster.collector import COLLECTED_AFTER, Collector
from benchmarks.bench_throughput import environment, loop_factory, print_rows

GOAL_MS = 100
"""No hold is to be longer."""

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


FLOWS: dict[str, Callable[[int], af.Flow]] = {
    flow.__name__: flow for flow in (tumbling, sliding, sessions, instant, instants, clock)
}


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
            await FLOWS[name](keys).execute()
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
