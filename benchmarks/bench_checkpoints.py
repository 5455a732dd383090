"""The cost of a checkpoint each second for a running word count: CPU time with and without, in
turns within one job.

    python benchmarks/bench_checkpoints.py [--pairs 30] [--slice 3] [--state heap|rocksdb ...]

One job runs; for a few seconds a checkpoint is asked for each second, for as many none is, and so
on. A slice's figure is the CPU time of the whole process, threads that write included, for each
record of that slice. What is compared are neighbours, whose order changes from pair to pair: what
else the machine does, and how warm the process is, changes little within seconds, and what does
change falls on both. CPU time is counted in units of a plain loop of the same word count, run a few
milliseconds of each slice (`pace.py`): a processor that becomes slower in between says nothing of
checkpoints. `cpu_s` are plain seconds. Seconds are those of the process's CPU time: on a machine
that does other things too, a checkpoint still comes to as many records as it does where the job has
a processor to itself. Reported are the median over the pairs, its quartiles, and half the width of
the 95 % interval of the median, which says what the run could have shown. Dirty keys are noted in
both kinds of slices: that price is bench_state.py's. A job whose checksum is not that of the bare
loop ends the run with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import median, quantiles
from time import process_time
from typing import Any, Literal

import aioflow as af
from benchmarks import bare, flows
from benchmarks.bench_throughput import environment, loop_factory, print_rows
from benchmarks.pace import Pace
from benchmarks.workloads import make_words

GOAL_PERCENT = {"heap": 5.0, "rocksdb": 15.0}
"""CPU time that checkpoints may add, by state backend."""

WARM_UP_PAIRS = 2
PACE_RECORDS = 4_000


@dataclass(slots=True)
class Slice:
    """The cost of a few seconds of the job, and the number of checkpoints completed in them."""

    records: int
    cpu_s: float
    checkpoints: int
    pace: Pace

    @property
    def per_million(self) -> float:
        """CPU seconds a million records."""
        return self.cpu_s * 1e6 / self.records

    @property
    def cost(self) -> float:
        """CPU time a record, in records of the plain loop."""
        return self.cpu_s / self.records * self.pace.records / self.pace.cpu_s


async def run_slice(
    job: af.Job, summed: flows.Summed, words: list[str], seconds: float, every_s: float | None
) -> Slice:
    """Let the job run; with `every_s` take a checkpoint that often, the first at once.

    The last is complete when the slice ends.
    """
    pace = Pace(partial(bare.w1, words), PACE_RECORDS)
    pacing = asyncio.create_task(pace.keep())
    records, begun, taken = summed.outputs, process_time(), 0
    while (passed := process_time() - begun) < seconds:
        due = seconds if every_s is None else taken * every_s
        if passed >= due:
            await job.checkpoint()
            taken += 1
        else:
            await asyncio.sleep(min(due, seconds) - passed)
    slice_ = Slice(summed.outputs - records, process_time() - begun - pace.cpu_s, taken, pace)
    pacing.cancel()
    await pacing
    return slice_


async def compare(
    words: list[str], state: Literal["heap", "rocksdb"], pairs: int, seconds: float, every_s: float
) -> dict[str, Any]:
    """The row of one backend."""
    summed = flows.Summed()
    plain: list[Slice] = []
    kept: list[Slice] = []
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory, "store").as_uri()
        async with flows.w1(words, None, summed).run(
            checkpoints=store, every="1h", state=state, stop_timeout="60s"
        ) as job:
            await job.checkpoint()
            for number in range(WARM_UP_PAIRS + pairs):
                turn = ((plain, None), (kept, every_s))
                for slices, interval in turn if number % 2 else turn[::-1]:
                    slices.append(await run_slice(job, summed, words, seconds, interval))
            await job.stop(savepoint=False)
    if summed.result != (expected := bare.w1(words, summed.outputs)):
        raise SystemExit(f"(outputs, checksum) is {summed.result}, expected {expected}")
    plain, kept = plain[WARM_UP_PAIRS:], kept[WARM_UP_PAIRS:]
    added = sorted(
        100 * (with_it.cost / without.cost - 1)
        for with_it, without in zip(kept, plain, strict=True)
    )
    low, middle, high = quantiles(added, n=4)
    # Interval of the median, by rank: no shape of the noise is assumed.
    reach = 0.98 * sqrt(pairs)
    span = added[max(0, int(pairs / 2 - reach))], added[min(pairs - 1, int(pairs / 2 + reach))]
    return {
        "state": state,
        "pairs": pairs,
        "records": summed.outputs,
        "checkpoints": sum(one.checkpoints for one in kept),
        "cpu_s_per_million": round(median(one.per_million for one in plain), 3),
        "with_checkpoints": round(median(one.per_million for one in kept), 3),
        "equal": round(median(one.cost for one in plain), 3),
        "equal_with": round(median(one.cost for one in kept), 3),
        "ms_a_checkpoint": round(
            median(
                _price_ms(with_it, without) for with_it, without in zip(kept, plain, strict=True)
            ),
            1,
        ),
        "added_percent": round(middle, 1),
        "quartiles": [round(low, 1), round(high, 1)],
        "shows_percent": round((span[1] - span[0]) / 2, 1),
        "goal": GOAL_PERCENT[state],
    }


def _price_ms(with_it: Slice, without: Slice) -> float:
    """CPU time that one checkpoint of a pair took, at the speed of the slice that had it."""
    return 1000 * with_it.cpu_s * (1 - without.cost / with_it.cost) / with_it.checkpoints


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--slice", type=float, default=3.0, metavar="SECONDS", dest="seconds")
    parser.add_argument(
        "--every",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="between checkpoints, in slices that have some",
    )
    parser.add_argument(
        "--state", choices=tuple(GOAL_PERCENT), nargs="+", default=list(GOAL_PERCENT)
    )
    options = parser.parse_args(arguments)
    if options.pairs < 4:
        parser.error(
            f"--pairs is {options.pairs}, expected at least 4: quartiles of fewer say nothing"
        )
    words = make_words()
    gc.freeze()
    rows: list[dict[str, Any]] = []
    try:
        for state in options.state:
            with asyncio.Runner(loop_factory=loop_factory("uvloop")) as runner:
                rows.append(
                    runner.run(compare(words, state, options.pairs, options.seconds, options.every))
                )
            print_rows(rows[-1:], list(rows[-1]))
    finally:
        gc.unfreeze()
    report = {
        **environment(),
        "unit": "CPU seconds a million records; equal, added: in units of the plain loop; medians",
        "rows": rows,
    }
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
