"""How long a record takes from the source to the sink, over a keyed exchange and a running count,
at a steady rate.

    python benchmarks/bench_latency.py [--rates 10000 50000] [--seconds 5]
                                       [--loops uvloop asyncio cpu] [--keys 1000000]

A record is the time at which it was made; the sink subtracts that. No setting is changed from one
rate to the other. Timers of both loops tick in milliseconds, so records are made in bursts of (rate
/ 1000), as they come from a socket too; a record counts from when it was made. The same again with
a checkpoint each second of a state of --keys keys, of which each record changes one; the first,
which writes all of them, is not counted. Absolute times, so the machine should be idle; "one turn"
is what a loop takes to run a callback, as calibration, and "loop_percent" how much of a processor
the thread of the loop took meanwhile: where it did not get what it needed, that is what is
measured. --loops=cpu is a loop whose clock counts the CPU time of its thread (`cpu_clock`): what
the work of this process alone makes a record wait, on a machine that is not idle. A process that
keeps a million accumulators is held up by Python's garbage collector each time that walks all of
them. --collector=worker lets it collect as aioflow's worker processes do.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import thread_time
from typing import Any

import aioflow as af
from aioflow.cluster.collector import COLLECTED_AFTER, Collector
from benchmarks.bench_throughput import environment, loop_factory, print_rows
from benchmarks.cpu_clock import cpu_loop

KEYS = 1000

WARM_UP = 0.2
"""The share of records at the beginning that do not count."""


@dataclass(slots=True)
class Load:
    """The used share of the time that the thread of the loop could have used."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def begin(self) -> None:
        self.wall_s, self.cpu_s = time.perf_counter_ns() / 1e9, thread_time()

    def end(self) -> None:
        self.wall_s, self.cpu_s = (
            time.perf_counter_ns() / 1e9 - self.wall_s,
            thread_time() - self.cpu_s,
        )

    @property
    def percent(self) -> int:
        return round(100 * self.cpu_s / self.wall_s)


async def measure(rate: int, count: int) -> list[int]:
    """Latencies in ns, in order of arrival."""
    latencies: list[int] = []
    flow = af.Flow("latency")
    (
        flow.source(
            af.io.datagen(lambda i: (i % KEYS, time.perf_counter_ns()), rate=rate, count=count)
        )
        .key_by(lambda record: record[0])
        .aggregate(af.agg(n=af.count(), made=af.last(lambda record: record[1])))
        .sink(lambda row: latencies.append(time.perf_counter_ns() - row[1]["made"]))
    )
    await flow.execute()
    return latencies


async def measure_with_checkpoints(
    rate: int,
    seconds: float,
    keys: int,
    load: Load | None = None,
    collector: Collector | None = None,
) -> list[int]:
    """The same while a checkpoint of `keys` keys is taken each second, after the first one, which
    writes all of them.

    `collector`: as a worker process has one.
    """
    latencies: list[int] = []
    load = load or Load()
    filled, all_there, enough = 0, asyncio.Event(), asyncio.Event()
    flow = af.Flow("latency")
    there: Any = flow.source(af.io.datagen(lambda i: (i, 0), count=keys))
    coming: Any = flow.source(
        af.io.datagen(lambda i: (i * 2_654_435_761 % keys, time.perf_counter_ns()), rate=rate)
    )

    def arrived(row: Any) -> None:
        nonlocal filled
        if row[1]["made"]:
            latencies.append(time.perf_counter_ns() - row[1]["made"])
            if len(latencies) >= rate * seconds:
                enough.set()
        else:
            filled += 1
            if filled == keys:
                all_there.set()

    made = there.union(coming).key_by(lambda record: record[0])
    made.aggregate(af.agg(n=af.count(), made=af.last(lambda record: record[1]))).sink(arrived)
    collecting = None if collector is None else asyncio.create_task(collector.collect())
    with tempfile.TemporaryDirectory() as directory:
        async with flow.run(
            checkpoints=Path(directory, "store").as_uri(), every="1s", stop_timeout="60s"
        ) as job:
            await all_there.wait()
            await job.checkpoint()
            latencies.clear()
            enough.clear()
            load.begin()
            await enough.wait()
            load.end()
            counted = latencies[:]
            await job.stop(savepoint=False)
    if collecting is not None:
        collecting.cancel()
    return counted


async def one_turn(times: int = 2000) -> list[int]:
    """Returns the duration of a turn of the loop, in ns."""
    turns = []
    for _ in range(times):
        begun = time.perf_counter_ns()
        await asyncio.sleep(0)
        turns.append(time.perf_counter_ns() - begun)
    return turns


def summary(nanoseconds: list[int]) -> dict[str, float]:
    """Percentiles in ms."""
    ordered = sorted(nanoseconds)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1e6, 4)

    return {"p50_ms": at(0.5), "p90_ms": at(0.9), "p99_ms": at(0.99), "max_ms": at(1.0)}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rates", type=int, nargs="+", default=[10_000, 50_000], help="records a second"
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument(
        "--loops", nargs="+", default=["uvloop", "asyncio"], choices=["uvloop", "asyncio", "cpu"]
    )
    parser.add_argument(
        "--keys",
        type=int,
        default=1_000_000,
        help="in the state of the runs with checkpoints; 0: none of these",
    )
    parser.add_argument("--collector", choices=["python", "worker"], default="python")
    options = parser.parse_args(arguments)
    before, collector = gc.get_threshold(), Collector(time.perf_counter_ns)
    if options.collector == "worker":
        gc.set_threshold(*COLLECTED_AFTER)
        gc.callbacks.append(collector.hear)
    try:
        rows = run(options, collector if options.collector == "worker" else None)
    finally:
        if options.collector == "worker":
            gc.callbacks.remove(collector.hear)
        gc.set_threshold(*before)
    report = {
        **environment(),
        "unit": "ms, records per second",
        "collector": options.collector,
        "latency": rows,
    }
    print_rows(
        rows,
        ["what", "loop", "rate", "records", "p50_ms", "p90_ms", "p99_ms", "max_ms", "loop_percent"],
    )
    print(json.dumps(report))
    return report


@contextmanager
def running(loop: str) -> Iterator[asyncio.Runner]:
    if loop == "cpu":
        with cpu_loop() as (_, made), asyncio.Runner(loop_factory=lambda: made) as runner:
            yield runner
    else:
        with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
            yield runner


def run(options: argparse.Namespace, collector: Collector | None) -> list[dict[str, Any]]:
    """The rows of the table."""
    rows: list[dict[str, Any]] = []
    for loop in options.loops:
        with running(loop) as runner:
            load = Load()
            load.begin()
            turns = runner.run(one_turn())
            load.end()
            rows.append(
                {
                    "what": "one turn",
                    "loop": loop,
                    "rate": 0,
                    "records": 0,
                    **summary(turns),
                    "loop_percent": load.percent,
                }
            )
            for rate in options.rates:
                count = max(1, int(rate * options.seconds))
                load.begin()
                latencies = runner.run(measure(rate, count))
                load.end()
                assert len(latencies) == count, f"{len(latencies)} of {count} records arrived"
                counted = latencies[int(count * WARM_UP) :]
                row = {
                    "what": "source to sink",
                    "loop": loop,
                    "rate": rate,
                    "records": len(counted),
                    **summary(counted),
                }
                rows.append({**row, "loop_percent": load.percent})
            for rate in options.rates if options.keys else ():
                counted = runner.run(
                    measure_with_checkpoints(rate, options.seconds, options.keys, load, collector)
                )
                row = {
                    "what": "with checkpoints",
                    "loop": loop,
                    "rate": rate,
                    "records": len(counted),
                    **summary(counted),
                }
                rows.append({**row, "loop_percent": load.percent})
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
