"""Each operator of the guide, and small programs of users, against the loop that a Python
programmer would write, in one process, alternating in one run.

    python -m benchmarks.bench_operators [--records 100000] [--rounds 5] [--only NAME ...]
                                         [--programs]

The ratio is the CPU time of the flow over that of the loop, from the start of the flow to its end:
the median over the rounds of the two times of one round, with the least and the greatest. Both give
their outputs to a list. The outputs of both are compared first, without their order. `--only` takes
the beginning of a name, too. `--programs` runs the programs of `user_programs` instead of the
operators.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import aioflow as af
from benchmarks.bench_throughput import environment, loop_factory, print_rows
from benchmarks.operator_cases import CASES, Case, Data
from benchmarks.user_programs import PROGRAMS

__all__ = ["main", "measure"]

HIGH = 3.0
"""Ratio that no operator should exceed."""


def run_flow(case: Case, rows: Any) -> tuple[list[Any], float]:
    out: list[Any] = []
    flow = af.Flow("operator")
    case.flow(flow, rows).sink(out.append)

    async def execute() -> float:
        begun = process_time()
        await flow.execute()
        return process_time() - begun

    with asyncio.Runner(loop_factory=loop_factory("uvloop")) as runner:
        return out, runner.run(execute())


def run_loop(case: Case, rows: Any) -> tuple[list[Any], float]:
    begun = process_time()
    out = case.loop(rows)
    return out, process_time() - begun


def check(case: Case, rows: Any) -> int:
    """Returns the number of outputs. Ends the run if the flow and the loop differ."""
    given, expected = run_flow(case, rows)[0], run_loop(case, rows)[0]
    if given != expected and sorted(given, key=_order) != sorted(expected, key=_order):
        raise SystemExit(
            f"{case.name}: the flow gives {len(given)} outputs such as {given[:2]}, the loop "
            f"{len(expected)} such as {expected[:2]}"
        )
    return len(given)


def _order(row: Any) -> str:
    return repr(tuple(row) if isinstance(row, tuple) else row)  # No names, which the loop has not.


def measure(case: Case, data: Data, rounds: int) -> dict[str, Any]:
    rows = case.rows(data)
    gc.collect()
    gc.freeze()  # The collector does not walk the input, which in real life is not in memory.
    try:
        outputs = check(case, rows)
        pairs = [(run_loop(case, rows)[1], run_flow(case, rows)[1]) for _ in range(rounds)]
    finally:
        gc.unfreeze()
    ratios = sorted(flow / loop for loop, flow in pairs)
    return {
        "operator": case.name,
        "outputs": outputs,
        "loop_ns": round(median(loop for loop, _ in pairs) / data.records * 1e9),
        "flow_ns": round(median(flow for _, flow in pairs) / data.records * 1e9),
        "ratio": round(median(ratios), 2),
        "spread": [round(ratios[0], 2), round(ratios[-1], 2)],
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[""])
    parser.add_argument("--programs", action="store_true")
    options = parser.parse_args(arguments)
    cases = [Case(*program) for program in PROGRAMS] if options.programs else CASES
    chosen = [case for case in cases if case.name.startswith(tuple(options.only))]
    if not chosen:
        raise SystemExit(
            f"no operator {options.only}, expected some of {', '.join(case.name for case in cases)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        data = Data(options.records, Path(folder))
        rows = [measure(case, data, options.rounds) for case in chosen]
    rows.sort(key=lambda row: -row["ratio"])
    print_rows(rows, ["operator", "outputs", "loop_ns", "flow_ns", "ratio", "spread"])
    ratios = [row["ratio"] for row in rows]
    summary = {
        "median": median(ratios),
        "above": sum(ratio > HIGH for ratio in ratios),
    }
    print(f"median {summary['median']:.2f}, above {HIGH:.0f}: {summary['above']} of {len(rows)}")
    report = {
        "benchmark": "operators",
        **environment(),
        "unit": "ns of CPU time a record of the input; ratio = flow / loop",
        "records": options.records,
        "rounds": options.rounds,
        "operators": rows,
        **summary,
    }
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
