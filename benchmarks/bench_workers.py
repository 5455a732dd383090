"""The gain of two worker processes over one process, and the latency of a record over a connection;
ratios, alternating in one run.

    python benchmarks/bench_workers.py [--records 400000] [--rounds 11] [--only count work latency]

`count`: running count of uniform keys, half the records cross between the workers. `work`: the same
with 5 us of Python work a record behind the exchange. `latency`: 10,000 records a second through a
keyed exchange whose two sides are in different processes. All flows make their records themselves,
in as many subtasks as they have, so that nothing but the exchange is between the processes. The
start of processes is not in the figures: a rate is that from a fifth to nine tenths of the records,
by the clock that all processes of a machine share. Slices are short and many, each of one process
beside one of two workers, now this one first and now the other.

A rented processor changes its speed by a factor of two from one second to the next, without a word
in its statistics: then ratios have two peaks, and tell which slice met which speed. So each process
runs the same user work in a plain loop every few thousand records and counts what a CPU second is
worth there and then. `equal` is the ratio of what a CPU second of the flow brings, each measured in
that loop: what two processors of one speed would give. `wall` and `cpu` are as they were. `bare` is
the plain loop in two processes at once against one: what the machine has to give.

Beside them: the CPU time of each worker over the time that passed (`busy`; below 1 it waited, or
others had the processor), how often a second it gave the processor up to wait (`waits`: that is
ours) or had to (`preempted`: by another process), and the share of all processors that the
machine's owner took (`stolen`). The work of 5 us is measured, too, before anything else runs: how
long a fixed loop takes differs by a factor of four between machines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, quantiles
from time import monotonic, process_time, thread_time
from typing import Any, NamedTuple

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
STEP = 10_000
"""Records from one mark to the next: each mark is a record of its own on its way to this
process, and a frame if it travels alone.
"""
AGES = 500
BARE_S = 1.0
"""How long bare loops run side by side."""
SAMPLE_S = 3e-4
"""How long the bare loop runs at each mark: a few hundredths of the time between two."""
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
    """How many numbers can be added in `WORK_S` on an idle machine: by the best of many tries."""
    tried = Work(1_000)
    best = 1.0
    for _ in range(2_000):
        begun = thread_time()
        tried(None)
        best = min(best, thread_time() - begun)
    return round(1_000 * WORK_S / best)


def bare(name: str, numbers: int, records: int) -> float:
    """CPU seconds of the user work of `records` records in a plain loop."""
    counts: dict[int, int] = {}
    out: list[Any] = []
    work = Work(numbers)
    begun = thread_time()
    for i in range(records):
        key = identity(make_key(i))
        count = counts[key] = counts.get(key, 0) + 1
        row = (key, count)
        out.append(work(row) if name == "work" else row)
    return thread_time() - begun


def bare_rate(name: str, numbers: int) -> float:
    """Records a CPU second of this process in the plain loop, for about `BARE_S`."""
    records = 10_000
    begun, done, taken = monotonic(), 0, 0.0
    while monotonic() - begun < BARE_S:
        taken += bare(name, numbers, records)
        done += records
    return done / taken


def bare_ratio(name: str, numbers: int) -> float:
    """Returns the work of two simultaneous bare processes per CPU second of each, relative to that
    of one.
    """
    command = [sys.executable, str(Path(__file__)), "--bare", name, str(numbers)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(count: int) -> float:
        running = [
            subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(count)
        ]
        return sum(float(json.loads(process.communicate()[0])) for process in running)

    return run(PARALLELISM) / run(1)


class Mark(NamedTuple):
    """One process at one moment."""

    at: float
    process: int
    cpu: float
    """Seconds, without those of the plain loop."""
    speed: float
    """Records a CPU second of the plain loop, now."""
    waits: int
    preempted: int


class Marks:
    """Lets through a mark of every `STEP` records, and nothing else: so few that they cost
    nothing.
    """

    def __init__(self, name: str, numbers: int, sample: int) -> None:
        self.count = 0
        self.spent = 0.0
        self.loop = (name, numbers, sample)

    def __call__(self, row: object) -> tuple[Mark, ...]:
        self.count += 1
        return () if self.count % STEP else (self.mark(),)

    def mark(self) -> Mark:
        begun = process_time()
        speed = self.loop[2] / bare(*self.loop)
        used = resource.getrusage(resource.RUSAGE_SELF)
        now = process_time()
        self.spent += now - begun
        return Mark(
            monotonic(), os.getpid(), now - self.spent, speed, used.ru_nvcsw, used.ru_nivcsw
        )


def stamped(i: int) -> tuple[int, float]:
    return i * MIX % KEYS, monotonic()


def stamp_key(record: tuple[int, float]) -> int:
    return record[0]


class Ages:
    """Collects the age of each record on arrival.

    It reports `AGES` of them at a time, so that the reports are no traffic of their own.
    """

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
    """The middle of one run."""

    wall: float
    """Records a second."""
    cpu: float
    """Records a second if each process had a processor to itself and never waited."""
    equal: float
    """The same in records of the plain loop: 1 if the flow cost nothing beyond the user work, in
    one process.
    """
    speed: float
    """Records a CPU second of the plain loop, mean of the processes."""
    busy: tuple[float, ...]
    waits: float
    preempted: float
    stolen: float


def processors() -> tuple[int, int]:
    """Returns the ticks of all processors since the machine started, and those that its owner took.

    (0, 0) where the system does not count them.
    """
    try:
        ticks = [int(one) for one in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0, 0
    return sum(ticks), ticks[7]


async def rate(name: str, records: int, workers: int, numbers: int, sample: int) -> Rate:
    flow = af.Flow(name, parallelism=PARALLELISM)
    source = flow.source(af.io.datagen(make_key, count=records, splits=PARALLELISM))
    counted = source.key_by(identity).count()
    if name == "work":
        counted = counted.map(Work(numbers))
    ticks, stolen = processors()
    told = await counted.flat_map(Marks(name, numbers, sample)).collect(workers=workers)
    ticks, stolen = processors()[0] - ticks, processors()[1] - stolen
    marks = sorted(Mark(*mark) for mark in told)
    # Subtasks that share a process have a mark each, and the last few records of each none.
    if not records // STEP - PARALLELISM <= len(marks) <= records // STEP:
        raise SystemExit(
            f"{name} with workers={workers}: {len(marks)} marks came, expected one for each "
            f"{STEP} of {records} records"
        )
    marks = marks[len(marks) // 5 : len(marks) * 9 // 10]
    elapsed = marks[-1].at - marks[0].at
    cpu = equal = 0.0
    speeds, busy, waits, preempted = [], [], 0, 0
    for process in sorted({mark.process for mark in marks}):
        own = [mark for mark in marks if mark.process == process]
        first, last = own[0], own[-1]
        speed = median(mark.speed for mark in own)
        its = (len(own) - 1) * STEP / (last.cpu - first.cpu)
        cpu += its
        equal += its / speed
        speeds.append(speed)
        busy.append(round((last.cpu - first.cpu) / (last.at - first.at), 2))
        waits += last.waits - first.waits
        preempted += last.preempted - first.preempted
    wall = (len(marks) - 1) * STEP / elapsed
    return Rate(
        wall,
        cpu,
        equal,
        mean(speeds),
        tuple(busy),
        waits / elapsed,
        preempted / elapsed,
        stolen / max(ticks, 1),
    )


def spread(figures: Sequence[float]) -> list[float]:
    """Quartiles: first, median, third."""
    return [
        round(figure, 3)
        for figure in (
            quantiles(figures, n=4, method="inclusive") if len(figures) > 1 else [figures[0]] * 3
        )
    ]


async def latency(records: int, workers: int) -> dict[str, float]:
    """Milliseconds from the making of a record to the operator behind the exchange."""
    flow = af.Flow("latency", parallelism=PARALLELISM)
    source = flow.source(af.io.datagen(stamped, count=records, rate=RATE, splits=PARALLELISM))
    told = await source.key_by(stamp_key).flat_map(Ages()).collect(workers=workers)
    ages = sorted(age for one in told[len(told) // 10 :] for age in one)
    return {
        f"p{p}": round(ages[min(len(ages) - 1, len(ages) * p // 100)] * 1e3, 3) for p in (50, 99)
    }


async def compare(name: str, records: int, rounds: int, numbers: int) -> dict[str, Any]:
    """Returns one row: the quartiles of the ratios of the rounds, and the state of the machine
    meanwhile.
    """
    sample = max(1, round(SAMPLE_S / bare(name, numbers, 2_000) * 2_000))
    both: dict[int, list[Rate]] = {0: [], PARALLELISM: []}
    machine = []
    for turn in range(rounds):
        for workers in (0, PARALLELISM) if turn % 2 == 0 else (PARALLELISM, 0):
            both[workers].append(await rate(name, records, workers, numbers, sample))
        machine.append(bare_ratio(name, numbers))
    one, two = both[0], both[PARALLELISM]
    pairs = list(zip(one, two, strict=True))
    everyone = one + two
    return {
        "workload": name,
        "records": records,
        "one_process_per_s": round(median(r.wall for r in one)),
        "two_workers_per_s": round(median(r.wall for r in two)),
        "wall": spread([b.wall / a.wall for a, b in pairs]),
        "cpu": spread([b.cpu / a.cpu for a, b in pairs]),
        "equal": spread([b.equal / a.equal for a, b in pairs]),
        "bare": spread(machine),
        "busy": [spread([min(r.busy) for r in two]), spread([max(r.busy) for r in two])],
        "waits_per_s": round(median(r.waits for r in two)),
        "preempted_per_s": round(median(r.preempted for r in two)),
        "speed": spread([r.speed / median(r.speed for r in everyone) for r in everyone]),
        "stolen": round(mean(r.stolen for r in everyone), 3),
        "goal": GOALS[name],
        "rounds": [{"one": asdict(a), "two": asdict(b)} for a, b in pairs],
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    numbers = calibrated()
    report: dict[str, Any] = {
        "machine": (
            f"{platform.machine()}, {os.cpu_count()} processors, {platform.system()} "
            f"{platform.release()}"
        ),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "rounds": options.rounds,
        "work_numbers": numbers,
        "throughput": [
            await compare(name, options.records, options.rounds, numbers)
            for name in GOALS
            if name in options.only
        ],
    }
    if "latency" in options.only:
        report["latency_ms"] = {
            "one process": await latency(RATE * options.seconds, 0),
            "two workers": await latency(RATE * options.seconds, PARALLELISM),
            "goal": LATENCY_GOALS_MS,
        }
    return report


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=int, default=4, help="of the latency flow")
    parser.add_argument(
        "--only", nargs="+", default=[*GOALS, "latency"], choices=[*GOALS, "latency"]
    )
    parser.add_argument("--bare", nargs=2, metavar=("WORKLOAD", "NUMBERS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.bare:
        per_s = bare_rate(options.bare[0], int(options.bare[1]))
        print(per_s)
        return {"bare_per_s": per_s}
    report = asyncio.run(measure(options))
    for row in report["throughput"]:
        rates = f"{row['one_process_per_s']:>10,}/s {row['two_workers_per_s']:>10,}/s"
        ratios = ", ".join(
            f"{kind} x{row[kind][1]} [{row[kind][0]}, {row[kind][2]}]"
            for kind in ("wall", "cpu", "equal", "bare")
        )
        print(f"{row['workload']:8} {rates}  {ratios}")
        least, most = row["busy"]
        seen = (
            f"waits {row['waits_per_s']}/s, preempted {row['preempted_per_s']}/s, stolen "
            f"{row['stolen']:.1%}, speed {row['speed']}"
        )
        print(f"{'':8} workers busy {least[1]} and {most[1]}, {seen}")
    for name, row in report.get("latency_ms", {}).items():
        print(f"latency {name:12} {row}")
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
