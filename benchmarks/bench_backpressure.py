"""A sink ten times slower than its source, over two worker processes: what waits in between, and
what the rest of the connection notices.

    python benchmarks/bench_backpressure.py [--seconds 10]

`free` is the rate of source -> key_by -> sink without a brake. Then the sink of one pipeline is
throttled to a tenth of that, while a second one runs beside it over the same connections, its
source at a steady rate. Printed are: the records in flight (made and not yet sunk, counted where
they are made and sunk) against what the pools allow, memory of the workers, the rates of both
sources, and how long the control connection takes to answer a query of state. The neighbour's rate
is compared with the same job without the brake's pipeline.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import platform
import struct
import sys
import tempfile
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import aioflow as af
from aioflow.core.elements import BATCH_RECORDS_MAX
from aioflow.network.batch_size import BATCHES_PER_CHANNEL
from benchmarks.bench_hostile import watched_workers

PARALLELISM = 2
NEIGHBOUR_RATE = 20_000
PAYLOAD = "x" * 100
GOALS = {"neighbour": 0.9, "control_ms": 100.0}

IN_FLIGHT_MAX = (
    PARALLELISM * PARALLELISM * BATCH_RECORDS_MAX * (BATCHES_PER_CHANNEL + 2)
    + PARALLELISM * BATCH_RECORDS_MAX * 2
)
"""Records that the pools allow: for each channel its batches, the open one and one slice more;
for each consumer what it has in hand.
"""


class Counter:
    """Counts calls in a file of its own for each process, so that others can add them up at any
    moment.
    """

    def __init__(self, directory: str, name: str) -> None:
        self._place = directory, name
        self._memory: mmap.mmap | None = None
        self._count = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Counter, self._place

    def __call__(self, value: Any) -> Any:
        if self._memory is None:
            made = Path(self._place[0]) / f".{self._place[1]}-{os.getpid()}-{id(self)}"
            made.write_bytes(bytes(8))
            with made.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), 8)
            made.rename(
                made.with_name(made.name[1:])
            )  # From now on it is added up: never while it is empty.
        self._count += 1
        self._memory[:] = struct.pack("=q", self._count)
        return value

    @staticmethod
    def total(directory: str, name: str) -> int:
        return sum(
            struct.unpack("=q", path.read_bytes())[0] for path in Path(directory).glob(f"{name}-*")
        )


class MadeRow(Counter):
    """Makes rows, and counts them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return MadeRow, self._place

    def __call__(self, i: int) -> tuple[int, str]:
        super().__call__(i)
        return i % 1000, PAYLOAD


def row_key(row: tuple[int, str]) -> int:
    return row[0]


def braked(
    flow: af.Flow, directory: str, count: int | None, per_s: int | None
) -> af.DataStream[Any]:
    """The pipeline whose sink may be slow."""
    rows = flow.source(
        af.io.datagen(MadeRow(directory, "made"), count=count, splits=PARALLELISM), name="fast"
    )
    keyed = rows.key_by(row_key)
    stream = keyed.throttle(per_s // PARALLELISM) if per_s else keyed.map(tuple)
    return stream.map(Counter(directory, "sunk"))


def neighbour(flow: af.Flow, directory: str) -> af.DataStream[Any]:
    rows = flow.source(
        af.io.datagen(int, rate=NEIGHBOUR_RATE, splits=PARALLELISM), name="neighbour"
    )
    return (
        rows.key_by(lambda i: i % 100)
        .count(name="counted", uid="counted")
        .map(Counter(directory, "near"))
    )


def memory_mb(pids: list[int]) -> float:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def nothing(value: Any) -> None:
    """A sink."""


async def run(
    seconds: float, per_s: int | None, *, with_braked: bool, with_neighbour: bool
) -> dict[str, Any]:
    """Runs one job for this long and observes it from outside, without its start."""
    flow = af.Flow("back pressure", parallelism=PARALLELISM)
    answers: list[float] = []
    with tempfile.TemporaryDirectory() as directory, watched_workers() as workers:
        if with_braked:
            braked(flow, directory, None, per_s).sink(nothing)
        if with_neighbour:
            neighbour(flow, directory).sink(nothing)
        job_memory = []
        in_flight = []
        async with flow.run(workers=PARALLELISM) as job:
            names = (["sunk"] if with_braked else []) + (["near"] if with_neighbour else [])
            while True:  # Other processes count.
                if all(Counter.total(directory, name) for name in names):
                    break
                await asyncio.sleep(0.05)
            await asyncio.sleep(seconds / 4)
            begun = monotonic()
            first = {name: Counter.total(directory, name) for name in ("made", "sunk", "near")}
            while monotonic() - begun < seconds:
                await asyncio.sleep(0.05)
                sunk = Counter.total(directory, "sunk")
                in_flight.append(Counter.total(directory, "made") - sunk)
                job_memory.append(memory_mb(workers.pids))
                if with_neighbour:
                    asked = perf_counter()
                    await job.state("counted").get(1)
                    answers.append((perf_counter() - asked) * 1e3)
            took = monotonic() - begun
            rates = {name: (Counter.total(directory, name) - first[name]) / took for name in first}
            await job.cancel()
    answers.sort()
    return {
        "per_s": {name: round(rate) for name, rate in rates.items() if rate},
        "in_flight_max": max(in_flight) if with_braked else 0,
        "memory_mb": [round(job_memory[0], 1), round(max(job_memory), 1)],
        "control_ms": {"p50": round(answers[len(answers) // 2], 2), "max": round(answers[-1], 2)}
        if answers
        else {},
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    free = await run(options.seconds / 2, None, with_braked=True, with_neighbour=False)
    alone = await run(options.seconds, None, with_braked=False, with_neighbour=True)
    slow = await run(
        options.seconds,
        max(PARALLELISM, free["per_s"]["sunk"] // 10),
        with_braked=True,
        with_neighbour=True,
    )
    return {
        "machine": (
            f"{platform.machine()}, {os.cpu_count()} processors, {platform.system()} "
            f"{platform.release()}"
        ),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "free": free,
        "neighbour_alone": alone,
        "slow_sink": slow,
        "in_flight_allowed": IN_FLIGHT_MAX,
        "in_flight_kb": round(slow["in_flight_max"] * (len(PAYLOAD) + 5) / 1e3),
        "neighbour_ratio": round(slow["per_s"]["near"] / alone["per_s"]["near"], 3),
        "goals": GOALS,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    report = asyncio.run(measure(parser.parse_args(arguments)))
    for name in ("free", "neighbour_alone", "slow_sink"):
        print(f"{name:16} {report[name]}")
    print(
        f"in flight: at most {report['slow_sink']['in_flight_max']:,} of "
        f"{report['in_flight_allowed']:,} records"
    )
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
