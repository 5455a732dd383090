"""Throughput of whole flows in one process against the bare loop, alternating in one run; then the
cost of each stage.

    python benchmarks/bench_throughput.py [--records 2000000] [--rounds 5] [--only w1 w3]
                                          [--loops uvloop asyncio] [--collect-pools]

Ratios are of CPU time, since a busy neighbour on the machine changes wall time and not this; each
is the median over the rounds of (bare loop / flow), both taken in the same round. A flow whose
checksum is not that of the bare loop ends the run with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import aioflow as af
from aioflow.core.elements import BATCH_RECORDS_MAX
from aioflow.task.chain import SLICE_NS
from benchmarks import bare, flows
from benchmarks.stages import measured
from benchmarks.workloads import POOL, Result, make_events, make_words

GOALS = {
    "w1": 0.35,
    "w1-batch-sink": 0.35,
    "w2": 0.4,
    "w3": 0.6,
    "async-none-64": 0.1,
    "async-zero-64": 0.6,
    "async-1ms-64": 0.9,
    "async-1ms-1000": 0.9,
}
"""The ratio to the bare loop that each must keep.

Those of async calls, `async-PAUSE-CONCURRENCY`, run only by name. Their bare loop is a pool of
tasks that are used again. Without a pause it never leaves its first task, so that ratio says
little.
"""

WARM_UP = 20_000


@dataclass(frozen=True, slots=True)
class Workload:
    """One comparison: the bare loop, and the flow that must give the same result."""

    name: str
    bare: Callable[[int], Result]
    flow: Callable[[int, flows.Summed], af.Flow]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one execution."""

    cpu: float
    wall: float


def workloads(names: list[str], pool: int) -> list[Workload]:
    """The named workloads over the first `pool` entries of the data."""
    made = []
    words = make_words(pool) if any(name.startswith("w1") for name in names) else []
    events = make_events(pool if "w2" in names else 0)
    for name in names:
        match name:
            case "w1":
                made.append(
                    Workload(name, lambda n: bare.w1(words, n), lambda n, s: flows.w1(words, n, s))
                )
            case "w1-batch-sink":
                made.append(
                    Workload(
                        name,
                        lambda n: bare.w1(words, n),
                        lambda n, s: flows.w1(words, n, s, batch_sink=True),
                    )
                )
            case "w2":
                made.append(
                    Workload(
                        name, lambda n: bare.w2(events, n), lambda n, s: flows.w2(events, n, s)
                    )
                )
            case "w3":
                made.append(Workload(name, bare.w3fn, flows.w3))
            case _ if name in GOALS:
                _, pause, concurrency = name.split("-")
                call, at_once = bare.CALLS[pause], int(concurrency)
                made.append(
                    Workload(
                        name,
                        partial(bare.calls, call, at_once),
                        partial(flows.calls, call, at_once),
                    )
                )
            case _:
                raise SystemExit(f"unknown workload {name!r}, expected some of {', '.join(GOALS)}")
    return made


def run_bare(workload: Workload, n: int) -> tuple[Result, Timing]:
    cpu, wall = process_time(), perf_counter()
    result = workload.bare(n)
    return result, Timing(process_time() - cpu, perf_counter() - wall)


def run_flow(workload: Workload, n: int, loop: str) -> tuple[Result, Timing]:
    summed = flows.Summed()
    flow = workload.flow(n, summed)

    async def execute() -> Timing:
        cpu, wall = process_time(), perf_counter()
        await flow.execute()
        return Timing(process_time() - cpu, perf_counter() - wall)

    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        timing = runner.run(execute())
    return summed.result, timing


def loop_factory(loop: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if loop == "asyncio":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


def compare(workload: Workload, n: int, rounds: int, loops: list[str]) -> list[dict[str, Any]]:
    """Returns one row for each loop: rates, and the ratio to the bare loop."""
    bare_timings: list[Timing] = []
    timings: dict[str, list[Timing]] = {loop: [] for loop in loops}
    for loop in loops:
        run_flow(workload, min(n, WARM_UP), loop)
    for _ in range(rounds):
        expected, timing = run_bare(workload, n)
        bare_timings.append(timing)
        for loop in loops:
            result, timing = run_flow(workload, n, loop)
            if result != expected:
                raise SystemExit(
                    f"{workload.name} on {loop}: (outputs, checksum) is {result}, expected "
                    f"{expected}"
                )
            timings[loop].append(timing)
    rows = []
    for loop in loops:
        ratios = sorted(b.cpu / t.cpu for b, t in zip(bare_timings, timings[loop], strict=True))
        rows.append(
            {
                "workload": workload.name,
                "loop": loop,
                "records": n,
                "bare_records_per_cpu_s": round(n / median(t.cpu for t in bare_timings)),
                "records_per_cpu_s": round(n / median(t.cpu for t in timings[loop])),
                "records_per_s": round(n / median(t.wall for t in timings[loop])),
                "ratio": round(median(ratios), 3),
                "ratio_spread": [round(ratios[0], 3), round(ratios[-1], 3)],
                "goal": GOALS[workload.name],
            }
        )
    return rows


def stage_costs(workload: Workload, n: int, loop: str, runs: int = 3) -> list[dict[str, Any]]:
    """Exclusive time of each stage in ns a record, the least of `runs`; "rest" is the mailbox,
    the event loop, start and end.
    """
    least: dict[str, dict[str, Any]] = {}
    for _ in range(runs):
        with measured() as stages:
            _, timing = run_flow(workload, n, loop)
        rows = [stage.row(n) for stage in stages.values()]
        rest = timing.wall * 1e9 - sum(stage.ns for stage in stages.values())
        rows.append(
            {"stage": "rest", "ns_per_record": round(rest / n, 1), "batches": 0, "mean_batch": 0}
        )
        for row in rows:
            if (
                row["stage"] not in least
                or row["ns_per_record"] < least[row["stage"]]["ns_per_record"]
            ):
                least[row["stage"]] = row
    return [{"workload": workload.name, **row} for row in least.values()]


def environment() -> dict[str, Any]:
    """The environment of the figures."""
    root = Path(__file__).resolve().parent.parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "machine": (
            f"{platform.machine()}, {os.cpu_count()} processors, {platform.system()} "
            f"{platform.release()}"
        ),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or "unknown",
        "batch_records_max": BATCH_RECORDS_MAX,
        "slice_ms": SLICE_NS / 1e6,
        "unit": (
            "records per second; ratio = CPU time of the bare loop / CPU time of the flow, median "
            "over the rounds [least, greatest]"
        ),
    }


def print_rows(rows: list[dict[str, Any]], columns: list[str]) -> None:
    """A plain table."""
    cells = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )
    print()


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " - ".join(map(_cell, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=list(GOALS)[:4], metavar="NAME")
    parser.add_argument(
        "--loops", nargs="+", default=["uvloop", "asyncio"], choices=["uvloop", "asyncio"]
    )
    parser.add_argument(
        "--collect-pools", action="store_true", help="let the garbage collector walk the pools, too"
    )
    options = parser.parse_args(arguments)
    report: dict[str, Any] = {
        **environment(),
        "rounds": options.rounds,
        "collect_pools": options.collect_pools,
    }
    report |= {"throughput": [], "stages": []}
    made = workloads(options.only, min(POOL, options.records))
    if not options.collect_pools:
        # A full collection would walk the millions of entries of our own data, which in real life
        # are not in this process.
        gc.freeze()
    try:
        for workload in made:
            report["throughput"] += compare(
                workload, options.records, options.rounds, options.loops
            )
            report["stages"] += stage_costs(workload, options.records, options.loops[0])
    finally:
        gc.unfreeze()
    columns = [
        "workload",
        "loop",
        "bare_records_per_cpu_s",
        "records_per_cpu_s",
        "records_per_s",
        "ratio",
        "ratio_spread",
        "goal",
    ]
    print_rows(report["throughput"], columns)
    print_rows(report["stages"], ["workload", "stage", "ns_per_record", "batches", "mean_batch"])
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
