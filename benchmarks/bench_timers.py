"""How long a checkpoint takes that is asked for while a million timers fire.

    python benchmarks/bench_timers.py [--keys 1000000] [--state heap rocksdb] [--rounds 3]

Each run sets a timer for each key and then lets all of them become due. A checkpoint is asked for
when the first have fired, and another one whenever the last has completed, until all have fired. A
figure is the CPU time of the process from the request to the completion: with what fires meanwhile,
without what else the machine does. `first` is the first checkpoint of a run, which contains all
timers; `later` is the longest of the others.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from statistics import median
from time import process_time, thread_time
from typing import Any, Literal

import aioflow as af
from benchmarks.bench_holds import INSTANT, ending, first, ignore, second
from benchmarks.bench_throughput import environment, loop_factory, print_rows

GOAL_MS = 500
"""No checkpoint is to take longer."""

BARRIERS: dict[str, bool] = {"aligned": False, "unaligned": True}


class Timed(af.KeyedProcessFunction[int, tuple[int, int], int]):
    """Sets a timer for each key: at one instant, or each at an instant of its own."""

    fired = 0

    def __init__(self, *, spread: bool, keeps: bool) -> None:
        self.spread = spread
        self.keeps = keeps

    def open(self, ctx: af.RuntimeContext) -> None:
        self.seen = ctx.get_state(af.ValueStateDescriptor("seen", default=0))

    def process_element(self, value: tuple[int, int], ctx: Any) -> None:
        if value[1] < INSTANT:
            at = INSTANT + value[0] if self.spread else INSTANT
            ctx.timer_service.register_event_time_timer(at)
            if self.keeps:
                self.seen.update(1)

    def on_timer(self, timestamp: int, ctx: Any) -> tuple[int, ...]:
        type(self).fired += 1
        if self.keeps:
            self.seen.clear()
        return (timestamp,)


CASES: dict[str, dict[str, bool]] = {
    "instant": {"spread": False, "keeps": False},
    "instants": {"spread": True, "keeps": False},
    "state": {"spread": True, "keeps": True},
}


async def watch(holds: list[float]) -> None:
    """Notes the longest time, in seconds of CPU time, that the loop was held."""
    while True:
        asked = thread_time()
        await asyncio.sleep(0)
        holds[0] = max(holds[0], thread_time() - asked)


def quiet(make: Callable[[int], tuple[int, int]], count: int) -> Any:
    """Returns a source of `count` elements, after which nothing comes."""

    async def feed(position: int | None) -> AsyncIterator[tuple[tuple[int, int], int]]:
        for i in range(position or 0, count):
            yield make(i), i + 1
        await asyncio.Event().wait()

    return feed


async def measure(
    case: str, keys: int, state: Literal["heap", "rocksdb"], barrier: str, *, flood: bool
) -> dict[str, Any]:
    """Runs once; returns CPU seconds of each checkpoint, and the longest hold of the loop."""
    flow = af.Flow("timers")
    make = ending(keys, 2 * INSTANT + keys)
    times = af.WatermarkStrategy.monotonous_timestamps(timestamp=second)
    source: Any = af.io.datagen(make) if flood else quiet(make, keys + 1)
    made = flow.source(source, watermarks=times).key_by(first)
    made.process(Timed(**CASES[case])).sink(ignore)
    Timed.fired = 0
    taken: list[float] = []
    holds = [0.0]
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory, "store").as_uri()
        async with flow.run(
            checkpoints=store, every="1h", state=state, unaligned=BARRIERS[barrier]
        ) as job:
            while not Timed.fired:  # noqa: ASYNC110  # Its turn comes between two slices.
                await asyncio.sleep(0)
            watching = asyncio.create_task(watch(holds))
            while not taken or Timed.fired < keys:
                begun = process_time()
                await job.checkpoint()
                taken.append(process_time() - begun)
            watching.cancel()
            await job.stop(savepoint=False)
    if Timed.fired != keys:
        raise SystemExit(f"{Timed.fired} timers fired, expected {keys}")
    return {"taken": taken, "hold": holds[0]}


def row(
    case: str, keys: int, state: Any, barrier: str, rounds: int, *, flood: bool
) -> dict[str, Any]:
    """The medians of some runs, in ms."""
    runs = []
    for _ in range(rounds):
        gc.collect()
        with asyncio.Runner(loop_factory=loop_factory("uvloop")) as runner:
            runs.append(runner.run(measure(case, keys, state, barrier, flood=flood)))
    return {
        "case": case,
        "state": state,
        "barrier": barrier,
        "first_ms": round(1e3 * median(run["taken"][0] for run in runs)),
        "later_ms": round(1e3 * median(max(run["taken"][1:], default=0.0) for run in runs)),
        "count": len(runs[0]["taken"]),
        "hold_ms": round(1e3 * median(run["hold"] for run in runs), 1),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--state", nargs="+", default=["heap"], choices=["heap", "rocksdb"])
    parser.add_argument("--barrier", nargs="+", default=list(BARRIERS), choices=list(BARRIERS))
    parser.add_argument("--flood", action="store_true", help="elements behind the timers, no end")
    options = parser.parse_args(arguments)
    rows = [
        row(case, options.keys, state, barrier, options.rounds, flood=options.flood)
        for state in options.state
        for case in options.case
        for barrier in options.barrier
    ]
    report = {
        **environment(),
        "unit": "ms of the process's CPU time",
        "goal_ms": GOAL_MS,
        "keys": options.keys,
        "rows": rows,
    }
    print_rows(rows, list(rows[0]))
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
