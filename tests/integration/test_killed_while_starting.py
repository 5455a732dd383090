"""Processes that are killed while a job starts: a fault of the machine, which the restart policy
judges like any other.

Each stage of a start is a function of the worker's own program. A `sitecustomize` in the worker's
path kills the process there, the first times that one arrives at it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.cluster.deployer import TaskDeployer
from tests.integration.clusters import FLOWS, Cluster, aioflow
from tests.integration.processes import open_workers

pytestmark = [pytest.mark.timeout(300)]

KILLER = """
import importlib, os, signal, sys

def kill_once():
    for number in range(int(os.environ["KILLED_TIMES"])):
        try:
            path = os.path.join({folder!r}, f"killed-{{number}}")
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        os.kill(os.getpid(), getattr(signal, os.environ["KILLED_BY"]))

def wrapped(function):
    def killing(*args, **kwargs):
        kill_once()
        return function(*args, **kwargs)
    return killing

program, _, place = os.environ.get("KILLED_AT", "none").partition("|")
if program in " ".join(sys.orig_argv):
    if not place:
        kill_once()
    else:
        module, _, name = place.partition(":")
        owner = importlib.import_module(module)
        *path, name = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, name, wrapped(getattr(owner, name)))
"""

WORKER = "worker_program"
STAGES = {
    "exec": WORKER,
    "the connection": WORKER + "|aioflow.cluster.taskmanager:connect_to_leader",
    "the import of the job": WORKER + "|aioflow.cluster.taskmanager:load_job",
    "the handshake": WORKER + "|aioflow.cluster.job_session:JobSession.open",
    "the deployment": WORKER + "|aioflow.cluster.taskmanager:TaskManager._on_submit_task",
    "the opening": WORKER + "|aioflow.task.runtime:OperatorRuntime.open",
    "the restore": WORKER + "|aioflow.state.heap:HeapKeyedStateBackend.restore_from",
}
"""Functions that a worker calls at each stage of its start."""


class Killer:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(KILLER.format(folder=str(folder)))
        monkeypatch.syspath_prepend(folder)

    def kill(self, stage: str, times: int = 1, by: str = "SIGKILL") -> None:
        for name, value in {
            "KILLED_AT": stage,
            "KILLED_TIMES": str(times),
            "KILLED_BY": by,
        }.items():
            self._monkeypatch.setenv(name, value)

    @property
    def killed(self) -> int:
        return len(list(self._folder.glob("killed-*")))


@pytest.fixture
def killer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Killer:
    return Killer(tmp_path / "killer", monkeypatch)


COUNT, KEYS = 200, 5


async def numbers(position: Any) -> AsyncIterator[tuple[int, int]]:
    for n in range(position or 0, COUNT):
        yield n, n + 1
        await asyncio.sleep(0)


def counts(source: Any = numbers, step: Any = int) -> af.DataStream[tuple[int, int]]:
    flow = af.Flow("starting", parallelism=2)
    return (
        flow.source(source, uid="numbers")
        .rebalance()
        .map(step)
        .key_by(lambda n: n % KEYS)
        .count(uid="count")
    )


EXPECTED = sorted((k, n) for k in range(KEYS) for n in range(1, COUNT // KEYS + 1))


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "the restore"])
async def test_a_worker_that_is_killed_while_it_starts_is_replaced_as_the_policy_says(
    stage: str, killer: Killer
) -> None:
    killer.kill(STAGES[stage], times=3)
    rows = await counts().collect(workers=2, restart=af.fixed_delay(5, "10ms"))
    assert sorted(rows) == EXPECTED
    assert killer.killed == 3


@pytest.mark.parametrize("stage", ["exec", "the handshake", "the opening"])
async def test_with_checkpoints_a_worker_that_is_killed_while_it_starts_is_replaced_by_default(
    stage: str, killer: Killer, tmp_path: Path
) -> None:
    killer.kill(STAGES[stage])
    rows = await counts().collect(workers=2, checkpoints=(tmp_path / "store").as_uri(), every="10s")
    assert sorted(rows) == EXPECTED
    assert killer.killed == 1


@pytest.mark.parametrize(
    "stage", ["exec", "the import of the job", "the deployment", "the opening"]
)
async def test_without_restart_a_worker_that_is_killed_while_it_starts_ends_the_job_by_name(
    stage: str, killer: Killer, tmp_path: Path
) -> None:
    killer.kill(STAGES[stage])
    with pytest.raises(
        af.Broken, match=r"worker-\d \(process \d+\) is gone: its process ended by SIGKILL"
    ):
        await counts().collect(
            workers=2, checkpoints=(tmp_path / "store").as_uri(), restart=af.no_restart()
        )


async def test_a_worker_lost_while_the_job_is_about_to_ask_for_slots_ends_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request_slots = TaskDeployer._request_slots
    losses = [af.Broken("a worker is gone")]

    def lose_a_worker_first(deployer: TaskDeployer) -> None:
        while losses:
            deployer.start_failed(losses.pop())
        request_slots(deployer)

    monkeypatch.setattr(TaskDeployer, "_request_slots", lose_a_worker_first)
    with pytest.raises(af.Broken, match="a worker is gone"):
        await counts().collect(workers=2, restart=af.no_restart())


async def test_a_policy_that_is_used_up_while_workers_start_ends_the_job(killer: Killer) -> None:
    killer.kill(STAGES["exec"], times=100)
    with pytest.raises(af.Broken, match="its process ended by SIGKILL"):
        await counts().collect(workers=2, restart=af.fixed_delay(2, "10ms"))


@pytest.mark.parametrize("stage", ["exec", "the opening"])
async def test_a_worker_that_crashes_while_it_starts_ends_the_job_by_default(
    stage: str, killer: Killer, tmp_path: Path
) -> None:
    """It would crash again, and the caller waits for the reason."""
    killer.kill(STAGES[stage], by="SIGSEGV")
    with pytest.raises(af.Broken, match="its process ended by SIGSEGV"):
        await counts().collect(workers=2, checkpoints=(tmp_path / "store").as_uri())


class Fails(af.MapFunction[int, int]):
    def open(self, ctx: Any) -> None:
        raise ValueError("no such table")

    def map(self, n: int) -> int:
        return n


async def test_an_error_of_user_code_at_the_first_opening_stays_final_by_default(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="no such table"):
        await counts(step=Fails()).collect(workers=2, checkpoints=(tmp_path / "store").as_uri())


async def endless(position: Any) -> AsyncIterator[tuple[int, int]]:
    n = position or 0
    while True:
        yield n, n + 1
        n += 1
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("stage", ["exec", "the restore", "the opening"])
async def test_workers_that_are_killed_while_a_job_is_restored_lose_nothing(
    stage: str, killer: Killer, tmp_path: Path
) -> None:
    rows: list[tuple[int, int]] = []
    options: dict[str, Any] = {
        "workers": 2,
        "checkpoints": (tmp_path / "store").as_uri(),
        "every": "10s",
    }
    for turn in range(2):
        if turn:
            killer.kill(STAGES[stage], times=2)
        stream = counts(endless)
        stream.sink(rows.append, uid="rows")
        async with stream.flow.run(**options) as job:
            before = len(rows)
            async with asyncio.timeout(100):
                while len(rows) < before + 50:
                    await asyncio.sleep(0.01)
            await job.stop()
    assert killer.killed == 2
    most = {key: max(n for k, n in rows if k == key) for key in range(KEYS)}
    assert sorted(rows) == sorted((k, n) for k in range(KEYS) for n in range(1, most[k] + 1))


async def test_replacements_that_are_killed_while_they_start_are_replaced_too(
    killer: Killer, tmp_path: Path
) -> None:
    """There is one worker, so that none is left meanwhile."""
    rows: list[tuple[int, int]] = []
    stream = counts(endless)
    stream.sink(rows.append, uid="rows")
    options: dict[str, Any] = {
        "checkpoints": (tmp_path / "store").as_uri(),
        "every": "10s",
        "restart": af.fixed_delay(10, "10ms"),
    }
    async with stream.flow.run(workers=1, **options) as job, asyncio.timeout(100):
        while not rows:
            await asyncio.sleep(0.01)
        killer.kill(STAGES["exec"], times=3)
        (worker,) = open_workers(job)
        os.kill(worker.pid, signal.SIGKILL)
        while killer.killed < 3 or not open_workers(job) or job.status is not af.JobStatus.RUNNING:
            await asyncio.sleep(0.01)
        await job.stop()


ON_A_CLUSTER = {
    "the slots": "taskmanager|aioflow.cluster.open_jobs:OpenJobs._open",
    "the import of the job": WORKER + "|aioflow.cluster.job_process:load_job",
    "the deployment": WORKER + "|aioflow.cluster.task_executor:TaskExecutor.submit_task",
    "the opening": STAGES["the opening"],
}
"""The first stage is in the TaskManager, the others are in the process that it starts for the job.
"""


@pytest.mark.parametrize("stage", ON_A_CLUSTER)
def test_process_of_a_cluster_that_is_killed_while_a_job_starts_is_replaced(
    stage: str, killer: Killer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, with checkpoints: the job waits for slots."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "killer"))
    killer.kill(ON_A_CLUSTER[stage])
    cluster = Cluster(tmp_path / "cluster")
    try:
        cluster.start(workers=2, slots=4)
        at = ["--at", cluster.address, "--data", str(cluster.data)]
        done = aioflow(
            "submit", f"{FLOWS}:wide", "--checkpoints", (tmp_path / "store").as_uri(), *at
        )
        assert done.returncode == 0, done.stderr
        assert killer.killed == 1
    finally:
        cluster.close()
