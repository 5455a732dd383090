"""Worker processes that are killed again and again under load: is the output exact, and how long until the next checkpoint is complete?

    python -m benchmarks.kill_run [--kills 100] [--workers 2] [--parallelism 3] [--every 1s]

Numbers are counted by key over the workers and written to part files. A worker is killed with -9 at a random moment after a checkpoint
was completed; the time from the kill to the next completed checkpoint is the time to recovery: it holds the detection, the restart delay
(10 ms), the start of a new process, the restore, and one checkpoint. In the end every number must have been counted exactly once. Absolute
times, so the machine should be idle; its load is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import aioflow as af
from benchmarks.bench_throughput import environment
from tests.integration.exactly_once_flows import committed, counted, mistakes

PAUSE_S = 0.5
"""The largest time between a checkpoint and the next kill."""


async def next_checkpoint(job: af.Job) -> None:
    """Wait until a checkpoint that began from now on is complete."""
    while True:
        try:
            await job.checkpoint()
        except af.CheckpointError:  # Not all tasks run yet, or it was given up with them.
            await asyncio.sleep(0.005)
        else:
            return


async def until(condition: Callable[[], bool]) -> None:
    """Poll: what is waited for happens in other processes."""
    while not condition():  # noqa: ASYNC110  # There is no event of it.
        await asyncio.sleep(0.002)


async def kill_run(
    folder: Path, *, kills: int, workers: int, parallelism: int, every: str, seed: int
) -> tuple[list[float], int, list[str]]:
    """Seconds from each kill to the next completed checkpoint, how many rows were written, and what is wrong with them."""
    chance = random.Random(seed)
    times = []
    async with counted(folder, parallelism=parallelism).run(
        workers=workers, checkpoints=folder / "store", every=every, restart=af.fixed_delay(10 * kills, "10ms")
    ) as job:
        for kill in range(kills):
            await next_checkpoint(job)
            await asyncio.sleep(chance.uniform(0, PAUSE_S))
            pool = job._cluster.pool  # type: ignore[union-attr]
            await until(lambda: len(pool.open) >= workers)  # noqa: B023  # Awaited in this turn.
            begun = perf_counter()
            os.kill(chance.choice(pool.open).pid, signal.SIGKILL)
            await until(lambda: job._cluster.job_master.executions.restarts > kill)  # noqa: B023  # Likewise.
            await next_checkpoint(job)
            times.append(perf_counter() - begun)
        (folder / "stop").touch()
        await job.wait()
    return times, len(committed(folder)), mistakes(folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--parallelism", type=int, default=3)
    parser.add_argument("--every", default="1s")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args(argv)
    logging.getLogger("aioflow").setLevel(logging.ERROR)  # Each kill is a handful of warnings.
    with tempfile.TemporaryDirectory() as directory:
        run = kill_run(
            Path(directory),
            kills=options.kills,
            workers=options.workers,
            parallelism=options.parallelism,
            every=options.every,
            seed=options.seed,
        )
        times, rows, wrong = asyncio.run(run)
    ordered = sorted(times)
    result = {
        "kills": options.kills,
        "rows": rows,
        "mistakes": wrong,
        "recovery_s": {
            "p50": round(ordered[len(ordered) // 2], 3),
            "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 3),
            "max": round(ordered[-1], 3),
        },
        "load_average": os.getloadavg(),
        "environment": environment(),
    }
    print(json.dumps(result, indent=2))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
