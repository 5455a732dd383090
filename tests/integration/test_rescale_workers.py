"""Jobs over worker processes and clusters that are rescaled while they run, some with a kill."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

import aioflow as af
from tests.integration.processes import alive, eventually

if TYPE_CHECKING:
    from aioflow.cluster.embedded import EmbeddedCluster
    from aioflow.cluster.worker_processes import WorkerProcesses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def counted(pushed: int, rows: list[Any]) -> None:
    """Checks that all counts of `pushed` numbers came, the last ones last."""
    for key in range(20):
        of_key = [count for k, count in rows if k == key]
        assert set(of_key) == set(range(1, pushed // 20 + 1))
        assert of_key[-1] == pushed // 20


def processes_of(job: af.Job) -> WorkerProcesses:
    return cast("EmbeddedCluster", job._cluster).processes


def open_pids(job: af.Job) -> list[int]:
    known = processes_of(job)._known.values()
    return [worker.pid for worker in known if worker.pid and alive(worker.pid)]


@pytest.mark.parametrize("kill", [False, True])
async def test_workers_are_added_and_removed_while_the_job_runs(tmp_path: Path, kill: bool) -> None:
    """The push source stays in the program. Without a kill each row comes once."""
    flow, rows = af.Flow("workers"), list[Any]()
    events = flow.source(af.io.push(), uid="events")
    events.key_by(lambda n: n % 20).count(uid="count").sink(rows.append)
    put = 0
    restart = af.fixed_delay(100, "0s")
    options: dict[str, Any] = {"checkpoints": tmp_path, "every": "200ms", "restart": restart}
    async with flow.run(workers=1, **options) as job:

        async def push(n: int) -> None:
            nonlocal put
            await job.input(events).put_many(range(put, put + n))
            put += n

        await push(400)
        for wanted in (3, 2):
            rescaling = asyncio.create_task(job.rescale(workers=wanted))
            while not rescaling.done():
                await push(20)
                await asyncio.sleep(0.01)
                if kill and processes_of(job).workers == wanted:
                    kill = False
                    os.kill(open_pids(job)[0], signal.SIGKILL)
            await rescaling
            assert [vertex.parallelism for vertex in job.graph.vertices][1] == wanted
            await eventually(lambda wanted=wanted: len(open_pids(job)) == wanted)  # type: ignore[misc]
        await push(-put % 20 + 400)
        await eventually(lambda: len(set(rows)) == put)
    if not job._cluster.job_master.executions.restarts:
        assert len(rows) == put
    counted(put, rows)
