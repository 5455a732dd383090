"""How long a record takes from the source to the sink, over a keyed exchange and a running count, at a steady rate.

    python benchmarks/bench_latency.py [--rates 10000 50000] [--seconds 5] [--loops uvloop asyncio] [--keys 1000000]

A record is the time at which it was made; the sink subtracts that. No setting is changed from one rate to the other. Timers of both loops
tick in milliseconds, so records are made in bursts of (rate / 1000), as they come from a socket too; a record counts from when it was made.
The same again with a checkpoint each second of a state of --keys keys, of which each record changes one; the first, which writes all of
them, is not counted. Absolute times, so the machine should be idle; "one turn" is what a loop takes to run a callback, as calibration.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import aioflow as af
from benchmarks.bench_throughput import environment, loop_factory, print_rows

KEYS = 1000

WARM_UP = 0.2
"""The share of records at the beginning that do not count."""


async def measure(rate: int, count: int) -> list[int]:
    """Latencies in ns, in order of arrival."""
    latencies: list[int] = []
    flow = af.Flow("latency")
    (
        flow.source(af.io.datagen(lambda i: (i % KEYS, perf_counter_ns()), rate=rate, count=count))
        .key_by(lambda record: record[0])
        .aggregate(af.agg(n=af.count(), made=af.last(lambda record: record[1])))
        .sink(lambda row: latencies.append(perf_counter_ns() - row[1]["made"]))
    )
    await flow.execute()
    return latencies


async def measure_with_checkpoints(rate: int, seconds: float, keys: int) -> list[int]:
    """The same while a checkpoint of `keys` keys is taken each second, after the first one, which writes all of them."""
    latencies: list[int] = []
    filled, all_there, enough = 0, asyncio.Event(), asyncio.Event()
    flow = af.Flow("latency")
    there: Any = flow.source(af.io.datagen(lambda i: (i, 0), count=keys))
    coming: Any = flow.source(af.io.datagen(lambda i: (i * 2_654_435_761 % keys, perf_counter_ns()), rate=rate))

    def arrived(row: Any) -> None:
        nonlocal filled
        if row[1]["made"]:
            latencies.append(perf_counter_ns() - row[1]["made"])
            if len(latencies) >= rate * seconds:
                enough.set()
        else:
            filled += 1
            if filled == keys:
                all_there.set()

    made = there.union(coming).key_by(lambda record: record[0])
    made.aggregate(af.agg(n=af.count(), made=af.last(lambda record: record[1]))).sink(arrived)
    with tempfile.TemporaryDirectory() as directory:
        async with flow.run(checkpoints=Path(directory, "store").as_uri(), every="1s", stop_timeout="60s") as job:
            await all_there.wait()
            await job.checkpoint()
            latencies.clear()
            enough.clear()
            await enough.wait()
            counted = latencies[:]
            await job.stop(savepoint=False)
    return counted


async def one_turn(times: int = 2000) -> list[int]:
    """What a turn of the loop takes, in ns."""
    turns = []
    for _ in range(times):
        begun = perf_counter_ns()
        await asyncio.sleep(0)
        turns.append(perf_counter_ns() - begun)
    return turns


def summary(nanoseconds: list[int]) -> dict[str, float]:
    """Percentiles in ms."""
    ordered = sorted(nanoseconds)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1e6, 4)

    return {"p50_ms": at(0.5), "p90_ms": at(0.9), "p99_ms": at(0.99), "max_ms": at(1.0)}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=[10_000, 50_000], help="records a second")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--loops", nargs="+", default=["uvloop", "asyncio"], choices=["uvloop", "asyncio"])
    parser.add_argument("--keys", type=int, default=1_000_000, help="in the state of the runs with checkpoints; 0: none of these")
    options = parser.parse_args(arguments)
    rows = []
    for loop in options.loops:
        with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
            rows.append({"what": "one turn", "loop": loop, "rate": 0, "records": 0, **summary(runner.run(one_turn()))})
            for rate in options.rates:
                count = max(1, int(rate * options.seconds))
                latencies = runner.run(measure(rate, count))
                assert len(latencies) == count, f"{len(latencies)} of {count} records arrived"
                counted = latencies[int(count * WARM_UP) :]
                rows.append({"what": "source to sink", "loop": loop, "rate": rate, "records": len(counted), **summary(counted)})
            for rate in options.rates if options.keys else ():
                counted = runner.run(measure_with_checkpoints(rate, options.seconds, options.keys))
                rows.append({"what": "with checkpoints", "loop": loop, "rate": rate, "records": len(counted), **summary(counted)})
    report = {**environment(), "unit": "ms, records per second", "latency": rows}
    print_rows(rows, ["what", "loop", "rate", "records", "p50_ms", "p90_ms", "p99_ms", "max_ms"])
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
