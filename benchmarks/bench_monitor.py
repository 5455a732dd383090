"""The cost of the monitoring endpoint, and its response time while the job uses all of the loop.

    python benchmarks/bench_monitor.py [--seconds 10] [--rounds 3] [--parallelism 4]
                                       [--loops uvloop asyncio]

"answers": time from request to the end of the body, over kept connections, asked one after the
other by a process of its own, while every task of the job is at full load. "scrapes": CPU time of
the process with ten scrapes of /metrics a second, less that without, over wall time, beside a job
that stands still. "readers": records for each CPU second of the whole process with a hundred
requests a second, as a ratio to without, in alternating rounds. Wall times are absolute: they say
something on a machine with an idle processor for the asking process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import asynccontextmanager
from time import perf_counter, process_time
from typing import Any

import aioflow as af
from benchmarks.bench_throughput import environment, loop_factory, print_rows

KEYS = 1000

ASKING = """
import http.client, json, sys, time
host, port, rate, seconds, *paths = sys.argv[1:]
connection = http.client.HTTPConnection(host, int(port), timeout=60)
took, end, number = [], time.perf_counter() + float(seconds), 0
while time.perf_counter() < end:
    begun = time.perf_counter()
    connection.request("GET", paths[number % len(paths)])
    answer = connection.getresponse()
    answer.read()
    took.append(time.perf_counter() - begun)
    assert answer.status == 200, (paths[number % len(paths)], answer.status)
    number += 1
    time.sleep(max(0.0, 1 / float(rate) - (time.perf_counter() - begun)))
print(json.dumps(took))
"""
"""A process that asks `rate` times a second, and prints how long each answer took."""


def loaded(parallelism: int, *, waits: bool = False) -> af.Flow:
    """Two exchanges and a keyed count, over a source that never waits, or that always does."""
    flow = af.Flow("loaded", parallelism=parallelism)

    def numbers() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    async def nothing() -> Any:
        while True:
            await asyncio.sleep(3600)
            yield 0

    source = flow.source(nothing if waits else numbers, name="numbers")
    source.rebalance().map(lambda n: n % KEYS, name="keys").key_by(lambda key: key).count().sink(
        af.io.blackhole()
    )
    return flow


async def ask(url: str, rate: float, seconds: float, *paths: str) -> list[float]:
    """Seconds that each answer took."""
    host, _, port = url.removeprefix("http://").partition(":")
    command = [sys.executable, "-c", ASKING, host, port, str(rate), str(seconds), *paths]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0, "the asking process failed"
    return list(json.loads(out))


@asynccontextmanager
async def running(flow: af.Flow) -> Any:
    async with flow.run(monitor="127.0.0.1:0", stop_timeout="0s") as job:
        await asyncio.sleep(1.5)  # Until rates have a window.
        yield job


def paths_of(job: af.Job) -> list[str]:
    """The requests of a dashboard and an autoscaler."""
    from aioflow.monitoring.view import vertex_hex

    base = f"/jobs/{job.id}"
    last = f"{base}/vertices/{vertex_hex(job.graph.vertices[-1])}"
    return [
        base,
        "/jobs/overview",
        f"{last}/backpressure",
        f"{last}/metrics",
        f"{base}/checkpoints",
        "/metrics",
        "/aioflow/asyncio",
    ]


async def answers(parallelism: int, seconds: float) -> dict[str, Any]:
    """Latencies at full load."""
    async with running(loaded(parallelism)) as job:
        took = sorted(await ask(job.monitor_url, 50, seconds, *paths_of(job)))

    def at(share: float) -> float:
        return round(took[min(len(took) - 1, int(len(took) * share))] * 1000, 2)

    return {
        "what": "answers",
        "requests": len(took),
        "p50_ms": at(0.5),
        "p90_ms": at(0.9),
        "p99_ms": at(0.99),
        "max_ms": at(1.0),
    }


async def scrapes(parallelism: int, seconds: float) -> dict[str, Any]:
    """CPU time of ten scrapes a second, as a share of one processor."""
    async with running(loaded(parallelism, waits=True)) as job:
        shares = []
        for rate in (0, 10):
            wall, used = perf_counter(), process_time()
            if rate:
                await ask(job.monitor_url, rate, seconds, "/metrics")
            else:
                await asyncio.sleep(seconds)
            shares.append((process_time() - used) / (perf_counter() - wall))
        count = len(job.metrics())
    idle, asked = shares
    return {
        "what": "scrapes",
        "metrics": count,
        "idle_percent": round(idle * 100, 3),
        "percent": round((asked - idle) * 100, 3),
    }


async def readers(parallelism: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Records for each CPU second with a hundred requests a second, to without."""
    ratios = []
    async with running(loaded(parallelism)) as job:

        def records() -> float:
            return sum(
                value
                for name, value in job.metrics().items()
                if name.startswith("count") and name.endswith(").numRecordsIn")
            )

        paths = paths_of(job)[:4]
        for _ in range(rounds):
            rates = []
            for rate in (0, 100):
                before, used = records(), process_time()
                if rate:
                    await ask(job.monitor_url, rate, seconds, *paths)
                else:
                    await asyncio.sleep(seconds)
                rates.append((records() - before) / (process_time() - used))
            ratios.append(rates[1] / rates[0])
    return {
        "what": "readers",
        "ratio": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "greatest": round(max(ratios), 3),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parallelism", type=int, default=4)
    parser.add_argument(
        "--loops", nargs="+", default=["uvloop", "asyncio"], choices=["uvloop", "asyncio"]
    )
    options = parser.parse_args(arguments)
    rows = []
    for loop in options.loops:
        for work in (
            answers(options.parallelism, options.seconds),
            scrapes(options.parallelism, options.seconds),
            readers(options.parallelism, options.seconds / 2, options.rounds),
        ):
            with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
                rows.append({"loop": loop, **runner.run(work)})
    report = {
        **environment(),
        "unit": "ms, percent of one processor, ratio of records for each CPU second",
        "monitor": rows,
    }
    for what in ("answers", "scrapes", "readers"):
        found = [row for row in rows if row["what"] == what]
        print_rows(found, list(found[0]))
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main()
