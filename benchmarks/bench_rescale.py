"""How long live rescales hold up the results of a running job, with kills of workers in between.

    python benchmarks/bench_rescale.py [--rescales 100] [--keys 100000] [--rate 2000] [--kill 10]

A job counts by key on worker processes, whose number goes 1, 4, 2, 3 and around again, while
numbers are pushed at a steady rate. Right before every tenth rescale a worker is killed. A pause is
the longest time without a result, from the beginning of a rescale until half a second after it;
`killed_ms` is the longest of those behind a kill, which the other figures leave out. Each count of
each key must come, and the last one last; anything else ends the run with an error. A rescale that
is refused, because a new worker does not start in time, is counted and tried again. `--seconds`
ends the run early, after the rescale that then runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from statistics import quantiles
from time import perf_counter
from typing import Any

import aioflow as af
from aioflow.core.errors import RescaleError
from benchmarks.bench_throughput import environment, print_rows

WORKERS = (4, 2, 3, 1)
BURST_S = 0.02
SETTLED_S = 0.5


class Results:
    """What comes out of the job: checks the counts, and notes the longest time without a result."""

    def __init__(self, keys: int) -> None:
        self.keys = keys
        self.seen: set[tuple[int, int]] = set()
        self.last: dict[int, int] = {}
        self.longest_s = 0.0
        self.latest_s = perf_counter()

    def take(self, row: tuple[int, int]) -> None:
        now = perf_counter()
        self.longest_s = max(self.longest_s, now - self.latest_s)
        self.latest_s = now
        self.seen.add(row)
        self.last[row[0]] = row[1]

    def wrong(self, pushed: int) -> Iterator[str]:
        """Yields what is missing or out of order after `pushed` numbers."""
        for key in range(min(self.keys, pushed)):
            count = (pushed - key - 1) // self.keys + 1
            if self.last.get(key) != count:
                yield f"key {key}: the last count is {self.last.get(key)}, expected {count}"
            if not all((key, one) in self.seen for one in range(1, count + 1)):
                yield f"key {key}: a count is missing"


def workers_of(job: Any) -> list[int]:
    return [worker.pid for worker in job._cluster.processes.known.values() if worker.pid]


async def run(options: argparse.Namespace) -> dict[str, Any]:
    keys, results, pauses, killed = options.keys, Results(options.keys), list[float](), [0.0]
    flow = af.Flow("rescaled")
    events = flow.source(af.io.push(), uid="events")
    events.key_by(lambda n: n % keys).count(uid="count").sink(results.take)
    pushed, refused, deadline = 0, 0, perf_counter() + options.seconds
    with tempfile.TemporaryDirectory() as store:
        async with flow.run(
            workers=1, checkpoints=store, every="1s", restart=af.fixed_delay(1_000, "0s")
        ) as job:

            async def push(count: int) -> None:
                nonlocal pushed
                await job.input(events).put_many(range(pushed, pushed + count))
                pushed += count

            is_loading = True

            async def load() -> None:
                while is_loading:
                    await push(int(options.rate * BURST_S))
                    await asyncio.sleep(BURST_S)

            await push(keys)
            while len(results.seen) < keys:  # noqa: ASYNC110  # Results come by a plain call.
                await asyncio.sleep(0.1)
            loading = asyncio.create_task(load())
            for number, wanted in enumerate(cycle(WORKERS), 1):
                await asyncio.sleep(SETTLED_S)
                results.longest_s, results.latest_s = 0.0, perf_counter()
                is_killed = options.kill > 0 and number % options.kill == 0
                if is_killed:
                    with suppress(ProcessLookupError):
                        os.kill(workers_of(job)[-1], signal.SIGKILL)
                while True:
                    try:
                        await job.rescale(workers=wanted)
                        break
                    except RescaleError:
                        refused += 1
                await asyncio.sleep(SETTLED_S)
                (killed if is_killed else pauses).append(results.longest_s)
                if number >= options.rescales or perf_counter() > deadline:
                    break
            is_loading = False  # A put that was cancelled may count all the same.
            await loading
            for _ in range(600):
                if len(results.seen) >= pushed:
                    break
                await asyncio.sleep(0.1)
            await job.stop(savepoint=False)
    for what in results.wrong(pushed):
        raise SystemExit(f"after {len(pauses) + len(killed) - 1} rescales: {what}")
    cuts = quantiles(pauses, n=100, method="inclusive") if len(pauses) > 1 else pauses * 99
    return {
        "keys": keys,
        "rescales": len(pauses) + len(killed) - 1,
        "kills": len(killed) - 1,
        "refused": refused,
        "pushed": pushed,
        "p50_ms": round(1e3 * cuts[49]),
        "p99_ms": round(1e3 * cuts[98]),
        "longest_ms": round(1e3 * max(pauses)),
        "killed_ms": round(1e3 * max(killed)),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rescales", type=int, default=100)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--rate", type=int, default=2_000)
    parser.add_argument("--kill", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1e9)
    row = asyncio.run(run(parser.parse_args(arguments)))
    report = {**environment(), "unit": "ms by the clock", "rows": [row]}
    print_rows([row], list(row))
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
