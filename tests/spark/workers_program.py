"""A program whose flow runs on workers inside Spark's executors while those are killed:
`tests/spark/test_workers.py` reads what it prints.

    python -m tests.spark.workers_program SCENARIO MASTER FOLDER

`faults`: a Python worker is killed, then the Spark job of one is cancelled, then an executor is
killed, and the program's own loop is blocked; the flow ends with `mistakes` in its output.
`fewer`: only one of two workers finds room; the flow goes on with it and ends.
`endless`: one worker is killed, the output still has each number once, and the flow runs until the
program is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import aioflow as af
from aioflow.api.job import Job
from aioflow.spark.workers import provider, runner
from aioflow.spark.workers.runner import SparkWorkersRun
from aioflow.spark.workers.worker import SILENCE_S
from tests.integration.exactly_once_flows import committed, key, mistakes, numbers
from tests.integration.processes import alive, eventually
from tests.spark.brief import BRIEF

WITHIN_S = 280.0
"""Seconds of patience for a machine with much other work."""

HELD_S = SILENCE_S + 1
"""Longer than workers wait for a driver that is silent."""


def noted(n: int, folder: str) -> int:
    """Leaves the id of its process behind."""
    place = f"{folder}/pids/{os.getpid()}"
    if not os.path.exists(place):
        Path(place).touch()
    return n


def counted(folder: Path) -> af.Flow:
    """Counts of numbers by key, as part files. It ends when there is a file `folder`/stop."""
    flow = af.Flow("counted", parallelism=2)
    source = flow.source(partial(numbers, stop=str(folder / "stop")), uid="numbers")
    there = source.rebalance().map(partial(noted, folder=str(folder)))
    there.key_by(key).count(uid="count").sink(af.io.jsonl(folder / "out"), uid="files")
    return flow


def is_exact(folder: Path) -> bool:
    """Whether what is written so far counts each number once. Looked at between two files that
    come, it may not be; a number that is there twice stays so."""
    counts: dict[int, list[int]] = {}
    for found, count in committed(folder):
        counts.setdefault(found, []).append(count)
    return all(sorted(some) == list(range(1, len(some) + 1)) for some in counts.values())


class Watched:
    """The run of a flow, and the processes that it runs in."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.folder = folder
        cluster = job._cluster
        assert isinstance(cluster, SparkWorkersRun)
        self.run = cluster

    def pids(self) -> list[int]:
        """Returns the pids of workers that run tasks, or did not clean up."""
        return [
            pid
            for pid in sorted(int(name.name) for name in (self.folder / "pids").iterdir())
            if alive(pid)
        ]

    async def runs_on_two(self, *without: int) -> list[int]:
        """Once the job runs in two processes, none of which is one of `without`, and has
        committed more than before.
        """

        def two() -> bool:
            return len(set(self.pids()) - set(without)) == 2

        await eventually(two, within_s=WITHIN_S)
        before = len(committed(self.folder))
        await eventually(lambda: len(committed(self.folder)) > before, within_s=WITHIN_S)
        return [pid for pid in self.pids() if pid not in without]

    async def restarts(self, count: int) -> None:
        await eventually(
            lambda: (
                self.job.metrics() is not None and self.run.job_master.executions.restarts >= count
            ),
            within_s=WITHIN_S,
        )

    def cancel_spark_job(self) -> None:
        """Cancels the job of the oldest worker, as an operator of the cluster would in Spark's web
        interface.
        """
        context = self.run._bridge._process.session.sparkContext
        context._jsc.sc().cancelJob(min(context.statusTracker().getActiveJobsIds()))


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def faults(job: Watched) -> None:
    first = await job.runs_on_two()
    print("runs in", len(first), "processes", flush=True)

    os.kill(first[0], signal.SIGKILL)
    await job.restarts(1)
    second = await job.runs_on_two(first[0])
    print("a worker was killed, runs in", len(second), "processes", flush=True)

    await asyncio.get_running_loop().run_in_executor(None, job.cancel_spark_job)
    await eventually(lambda: not all(alive(pid) for pid in second), within_s=WITHIN_S)
    await job.restarts(2)
    third = await job.runs_on_two(*(pid for pid in second if not alive(pid)))
    print("a Spark job was cancelled, runs in", len(third), "processes", flush=True)

    executor = parent(parent(third[0]))
    assert b"CoarseGrainedExecutorBackend" in Path(f"/proc/{executor}/cmdline").read_bytes()
    os.kill(executor, signal.SIGKILL)
    await job.restarts(3)
    await eventually(lambda: not alive(third[0]), within_s=WITHIN_S)
    fourth = await job.runs_on_two(third[0])
    print("an executor was killed, runs in", len(fourth), "processes", flush=True)

    restarts = job.run.job_master.executions.restarts
    time.sleep(HELD_S)
    await job.runs_on_two()
    print(
        "the program held its loop, restarts more:",
        job.run.job_master.executions.restarts - restarts,
        flush=True,
    )

    (job.folder / "stop").touch()
    result = await job.job.wait()
    print("ended", result.status, mistakes(job.folder), flush=True)


async def fewer(job: Watched) -> None:
    await eventually(lambda: len(committed(job.folder)) > 20, within_s=WITHIN_S)
    print("runs in", len(job.pids()), "process", flush=True)
    (job.folder / "stop").touch()
    result = await job.job.wait()
    print("ended", result.status, mistakes(job.folder), flush=True)


async def endless(job: Watched) -> None:
    first = await job.runs_on_two()
    os.kill(first[0], signal.SIGKILL)
    await job.restarts(1)
    there = await job.runs_on_two(first[0])
    await eventually(lambda: is_exact(job.folder), within_s=WITHIN_S)
    executors = {parent(parent(pid)) for pid in there}
    print("pids", *there, *sorted(executors), flush=True)
    await job.job.wait()


async def main(scenario: str, master: str, folder: Path) -> None:
    (folder / "pids").mkdir()
    config = {
        "spark.executor.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": BRIEF,
        "spark.executor.extraJavaOptions": BRIEF,
    }
    if scenario == "fewer":  # One executor fits into the memory of the machine.
        config |= {"spark.executor.cores": "1", "spark.executor.memory": "700m"}
        provider.START_TIMEOUT_S, runner.REQUEST_TIMEOUT_S = 60.0, 5.0
    place = af.SparkWorkers(master, workers=2, config=config)
    settings = {"checkpoints": folder / "checkpoints", "every": "300ms"}
    async with counted(folder).run(
        on=place, restart=af.fixed_delay(attempts=20, delay="200ms"), **settings
    ) as job:
        await {"faults": faults, "fewer": fewer, "endless": endless}[scenario](Watched(job, folder))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
