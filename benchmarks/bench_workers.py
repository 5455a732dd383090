"""What two worker processes bring against one process, and what a record over a connection takes; ratios, alternating in one run.

    python benchmarks/bench_workers.py [--records 2000000] [--rounds 3] [--only count work latency]

`count`: running count of uniform keys, half the records cross between the workers. `work`: the same with 5 us of Python work a record
behind the exchange. `latency`: 10,000 records a second through a keyed exchange whose two sides are in different processes. All flows make
their records themselves, in as many subtasks as they have, so that nothing but the exchange is between the processes. The start of
processes is not in the figures: a rate is that from a fifth to nine tenths of the records, by the clock that all processes of a machine
share. The ratio by CPU time says what idle processors would give: a busy neighbour changes the other one, which also holds what is waited.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
from dataclasses import dataclass
from statistics import median
from time import monotonic, process_time
from typing import Any

import aioflow as af

GOALS = {"count": 1.2, "work": 1.85}
"""Two workers over one process."""
LATENCY_GOALS_MS = {"p50": 1.0, "p99": 5.0}

PARALLELISM = 2
KEYS = 10_000
RATE = 10_000
"""Records a second of the latency flow."""
WORK = range(640)
"""Adding these takes about 5 us; a busy neighbour makes it no less."""
STEP = 1_000
"""Records from one mark to the next."""
MIX = 2_654_435_761
"""Knuth's multiplicative hash: keys without order."""


def make_key(i: int) -> int:
    return i * MIX % KEYS


def identity(key: int) -> int:
    return key


def work(row: tuple[int, int]) -> tuple[int, int]:
    """5 us of computing."""
    sum(WORK)
    return row


Mark = tuple[float, int, float]


class Marks:
    """Lets through, of every `STEP` records, when the last one came, and the process and its CPU time: so few that they cost nothing."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, row: object) -> tuple[Mark, ...]:
        self.count += 1
        return () if self.count % STEP else ((monotonic(), os.getpid(), process_time()),)


def stamped(i: int) -> tuple[int, float]:
    return i * MIX % KEYS, monotonic()


def stamp_key(record: tuple[int, float]) -> int:
    return record[0]


def age(record: tuple[int, float]) -> float:
    return monotonic() - record[1]


@dataclass(frozen=True, slots=True)
class Rate:
    """Records a second in the middle of the run: as it was, and as it is when each process has a processor to itself and never waits."""

    wall: float
    cpu: float


async def rate(name: str, records: int, workers: int) -> Rate:
    flow = af.Flow(name, parallelism=PARALLELISM)
    source = flow.source(af.io.datagen(make_key, count=records, splits=PARALLELISM))
    counted = source.key_by(identity).count()
    if name == "work":
        counted = counted.map(work)
    marks = sorted(await counted.flat_map(Marks()).collect(workers=workers))
    if not records // STEP - PARALLELISM <= len(marks) <= records // STEP:
        raise SystemExit(f"{name} with workers={workers}: {len(marks)} marks came, expected one for each {STEP} of {records} records")
    marks = marks[len(marks) // 5 : len(marks) * 9 // 10]
    wall = (len(marks) - 1) * STEP / (marks[-1][0] - marks[0][0])
    cpu = 0.0
    for process in {mark[1] for mark in marks}:
        own = [mark[2] for mark in marks if mark[1] == process]
        cpu += (len(own) - 1) * STEP / (own[-1] - own[0])
    return Rate(wall, cpu)


async def latency(records: int, workers: int) -> dict[str, float]:
    """Milliseconds from the making of a record to the operator behind the exchange."""
    flow = af.Flow("latency", parallelism=PARALLELISM)
    source = flow.source(af.io.datagen(stamped, count=records, rate=RATE, splits=PARALLELISM))
    ages = sorted((await source.key_by(stamp_key).map(age).collect(workers=workers))[records // 10 :])
    return {f"p{p}": round(ages[min(len(ages) - 1, len(ages) * p // 100)] * 1e3, 3) for p in (50, 99)}


async def compare(name: str, records: int, rounds: int) -> dict[str, Any]:
    """One row: both rates, and the median of the ratios of the rounds."""
    one, two = [], []
    for _ in range(rounds):
        one.append(await rate(name, records, 0))
        two.append(await rate(name, records, PARALLELISM))
    ratios = sorted(b.wall / a.wall for a, b in zip(one, two, strict=True))
    return {
        "workload": name,
        "records": records,
        "one_process_per_s": round(median(r.wall for r in one)),
        "two_workers_per_s": round(median(r.wall for r in two)),
        "ratio": round(median(ratios), 3),
        "ratio_spread": [round(ratios[0], 3), round(ratios[-1], 3)],
        "cpu_ratio": round(median(b.cpu / a.cpu for a, b in zip(one, two, strict=True)), 3),
        "goal": GOALS[name],
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, {platform.system()} {platform.release()}",
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "rounds": options.rounds,
        "throughput": [await compare(name, options.records, options.rounds) for name in GOALS if name in options.only],
    }
    if "latency" in options.only:
        report["latency_ms"] = {
            "one process": await latency(RATE * options.seconds, 0),
            "two workers": await latency(RATE * options.seconds, PARALLELISM),
            "goal": LATENCY_GOALS_MS,
        }
    return report


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=4, help="of the latency flow")
    parser.add_argument("--only", nargs="+", default=[*GOALS, "latency"], choices=[*GOALS, "latency"])
    report = asyncio.run(measure(parser.parse_args(arguments)))
    for row in report["throughput"]:
        rates = f"{row['one_process_per_s']:>10,}/s {row['two_workers_per_s']:>10,}/s"
        print(f"{row['workload']:8} {rates}  x{row['ratio']} {row['ratio_spread']}, by CPU x{row['cpu_ratio']}")
    for name, row in report.get("latency_ms", {}).items():
        print(f"latency {name:12} {row}")
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
