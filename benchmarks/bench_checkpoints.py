"""What a checkpoint each second costs a running word count: CPU time with and without, alternating in one run.

    python benchmarks/bench_checkpoints.py [--records 4000000] [--rounds 5] [--every 1s]

State is on the heap, checkpoints go to files. The ratio of a round is CPU time with checkpoints / without, of the whole process, and
what is reported is the median over the rounds. A flow whose checksum is not that of the bare loop ends the run with an error.
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
from time import perf_counter, process_time
from typing import Any

from benchmarks import bare, flows
from benchmarks.bench_throughput import Timing, environment, loop_factory, print_rows
from benchmarks.workloads import POOL, Result, make_words

GOAL_PERCENT = 5.0
"""CPU time that checkpoints may add."""


def run(words: list[str], records: int, checkpoints: dict[str, Any]) -> tuple[Result, Timing]:
    """What the flow gave, and what it took."""
    summed = flows.Summed()
    flow = flows.w1(words, records, summed)

    async def execute() -> Timing:
        cpu, wall = process_time(), perf_counter()
        await flow.execute(**checkpoints)
        return Timing(process_time() - cpu, perf_counter() - wall)

    with asyncio.Runner(loop_factory=loop_factory("uvloop")) as runner:
        timing = runner.run(execute())
    return summed.result, timing


def compare(records: int, rounds: int, every: str) -> dict[str, Any]:
    words = make_words(min(POOL, records))
    gc.freeze()
    expected = bare.w1(words, records)
    plain: list[Timing] = []
    kept: list[Timing] = []
    try:
        for number in range(rounds + 1):
            with tempfile.TemporaryDirectory() as directory:
                store = {"checkpoints": Path(directory, "store").as_uri(), "every": every}
                for timings, options in ((plain, {}), (kept, store)):
                    result, timing = run(words, records, options)
                    if result != expected:
                        raise SystemExit(f"(outputs, checksum) is {result}, expected {expected}")
                    if number:  # The first round warms up.
                        timings.append(timing)
    finally:
        gc.unfreeze()
    added = sorted(100 * (with_it.cpu / without.cpu - 1) for with_it, without in zip(kept, plain, strict=True))
    return {
        "every": every,
        "records": records,
        "cpu_s_per_million": round(median(timing.cpu for timing in plain) * 1e6 / records, 3),
        "with_checkpoints": round(median(timing.cpu for timing in kept) * 1e6 / records, 3),
        "seconds": round(median(timing.wall for timing in kept), 2),
        "added_percent": round(median(added), 1),
        "spread": [round(added[0], 1), round(added[-1], 1)],
        "goal": GOAL_PERCENT,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", default="1s")
    options = parser.parse_args(arguments)
    row = compare(options.records, options.rounds, options.every)
    print_rows([row], list(row))
    report = {**environment(), "unit": "CPU seconds per million records; medians over the rounds", **row}
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
