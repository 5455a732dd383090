"""What two worker processes bring against one process, and what a record over a connection takes; ratios, alternating in one run.

    python benchmarks/bench_workers.py [--records 2000000] [--rounds 3] [--only count work latency]

`count`: running count of uniform keys, half the records cross between the workers. `work`: the same with 5 us of Python work a record
behind the exchange. `latency`: 10,000 records a second through a keyed exchange whose two sides are in different processes. All flows make
their records themselves, in as many subtasks as they have, so that nothing but the exchange is between the processes. The start of
processes is not in the figures: a rate is that from a fifth to nine tenths of the records, by the clock that all processes of a machine
share. The ratio by CPU time says what idle processors would give: a busy neighbour changes the other one, which also holds what is waited.

Two processors are seldom twice one: they share caches, a memory bus, perhaps a core. `bare` is the same user work in plain loops without
aioflow, in two processes at once against one, by CPU: what the machine has to give. The work of 5 us is measured, too, before anything
else runs: how long a fixed loop takes differs by a factor of four between machines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic, process_time, thread_time
from typing import Any

import aioflow as af

GOALS = {"count": 1.2, "work": 1.85}
"""Two workers over one process."""
LATENCY_GOALS_MS = {"p50": 1.0, "p99": 5.0}

PARALLELISM = 2
KEYS = 10_000
RATE = 10_000
"""Records a second of the latency flow."""
WORK_S = 5e-6
"""User work a record of the flow `work`."""
STEP = 20_000
"""Records from one mark to the next: each mark is a record of its own on its way to this process, and a frame if it travels alone."""
AGES = 500
BARE_RECORDS = 200_000
ROOT = Path(__file__).parents[1]
MIX = 2_654_435_761
"""Knuth's multiplicative hash: keys without order."""


def make_key(i: int) -> int:
    return i * MIX % KEYS


def identity(key: int) -> int:
    return key


class Work:
    """Adds `numbers` numbers for each record, and lets it through."""

    def __init__(self, numbers: int) -> None:
        self.numbers = range(numbers)

    def __call__(self, row: Any) -> Any:
        sum(self.numbers)
        return row


def calibrated() -> int:
    """How many numbers can be added in `WORK_S` when nobody disturbs: by the best of many tries."""
    tried = Work(1_000)
    best = 1.0
    for _ in range(2_000):
        begun = thread_time()
        tried(None)
        best = min(best, thread_time() - begun)
    return round(1_000 * WORK_S / best)


def bare(name: str, numbers: int) -> float:
    """CPU seconds of one process for the user work of `BARE_RECORDS` records, in a plain loop."""
    counts: dict[int, int] = {}
    work = Work(numbers)
    begun = process_time()
    for i in range(BARE_RECORDS):
        key = identity(make_key(i))
        counts[key] = counts.get(key, 0) + 1
        if name == "work":
            work((key, counts[key]))
    return process_time() - begun


def bare_ratio(name: str, numbers: int) -> float:
    """What two bare processes at once do in a CPU second each, over what one does."""
    command = [sys.executable, str(Path(__file__)), "--bare", name, str(numbers)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(count: int) -> float:
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(count)]
        return sum(1 / json.loads(process.communicate()[0]) for process in running)

    return run(PARALLELISM) / run(1)


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


class Ages:
    """How old each record is when it comes, `AGES` of them at a time: what is told of them must not be traffic of its own."""

    def __init__(self) -> None:
        self.ages: list[float] = []

    def __call__(self, record: tuple[int, float]) -> tuple[list[float], ...]:
        self.ages.append(monotonic() - record[1])
        if len(self.ages) < AGES:
            return ()
        ages, self.ages = self.ages, []
        return (ages,)


@dataclass(frozen=True, slots=True)
class Rate:
    """Records a second in the middle of the run: as it was, and as it is when each process has a processor to itself and never waits."""

    wall: float
    cpu: float


async def rate(name: str, records: int, workers: int, numbers: int = 0) -> Rate:
    flow = af.Flow(name, parallelism=PARALLELISM)
    source = flow.source(af.io.datagen(make_key, count=records, splits=PARALLELISM))
    counted = source.key_by(identity).count()
    if name == "work":
        counted = counted.map(Work(numbers))
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
    told = await source.key_by(stamp_key).flat_map(Ages()).collect(workers=workers)
    ages = sorted(age for one in told[len(told) // 10 :] for age in one)
    return {f"p{p}": round(ages[min(len(ages) - 1, len(ages) * p // 100)] * 1e3, 3) for p in (50, 99)}


async def compare(name: str, records: int, rounds: int, numbers: int) -> dict[str, Any]:
    """One row: both rates, and the median of the ratios of the rounds."""
    one, two, machine = [], [], []
    for _ in range(rounds):
        one.append(await rate(name, records, 0, numbers))
        two.append(await rate(name, records, PARALLELISM, numbers))
        machine.append(bare_ratio(name, numbers))
    ratios = sorted(b.wall / a.wall for a, b in zip(one, two, strict=True))
    by_cpu = sorted(b.cpu / a.cpu for a, b in zip(one, two, strict=True))
    return {
        "workload": name,
        "records": records,
        "one_process_per_s": round(median(r.wall for r in one)),
        "two_workers_per_s": round(median(r.wall for r in two)),
        "ratio": round(median(ratios), 3),
        "ratio_spread": [round(ratios[0], 3), round(ratios[-1], 3)],
        "cpu_ratio": round(median(by_cpu), 3),
        "cpu_ratio_spread": [round(by_cpu[0], 3), round(by_cpu[-1], 3)],
        "bare_cpu_ratio": round(median(machine), 3),
        "goal": GOALS[name],
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    numbers = calibrated()
    report: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, {platform.system()} {platform.release()}",
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "rounds": options.rounds,
        "work_numbers": numbers,
        "throughput": [await compare(name, options.records, options.rounds, numbers) for name in GOALS if name in options.only],
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
    parser.add_argument("--bare", nargs=2, metavar=("WORKLOAD", "NUMBERS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.bare:
        taken = bare(options.bare[0], int(options.bare[1]))
        print(taken)
        return {"cpu_s": taken}
    report = asyncio.run(measure(options))
    for row in report["throughput"]:
        rates = f"{row['one_process_per_s']:>10,}/s {row['two_workers_per_s']:>10,}/s"
        by_cpu = f"by CPU x{row['cpu_ratio']} {row['cpu_ratio_spread']}, bare x{row['bare_cpu_ratio']}"
        print(f"{row['workload']:8} {rates}  x{row['ratio']} {row['ratio_spread']}, {by_cpu}")
    for name, row in report.get("latency_ms", {}).items():
        print(f"latency {name:12} {row}")
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
