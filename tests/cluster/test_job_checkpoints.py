"""Work that belongs to the checkpoints of one job is waited for, and ended work is not waited for
again.
"""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock

import pytest

from aioflow.checkpoint.instructions import CheckpointSettings, WarnBehind
from aioflow.cluster import job_checkpoints
from aioflow.cluster.job_checkpoints import JobCheckpoints
from aioflow.core.host import Host
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.serializers import Codec
from aioflow.graph.deployment import ExecutionAttemptId
from aioflow.graph.job_graph import build_job_graph
from aioflow.graph.stream_graph import StreamGraph, StreamNode
from aioflow.testing import simulate
from aioflow.testing.simulation import SimulatedHost
from tests.checkpoint_store.samples import LARGE, checkpoint, chunks


def job(store: str, host: Host | None = None) -> JobCheckpoints:
    graph = StreamGraph("beside")
    graph.add_node(StreamNode(id=0, kind="op", name="op"))

    def on_error(error: BaseException) -> None:
        raise error

    host = host or SystemHost()
    return JobCheckpoints(
        host,
        "0" * 32,
        build_job_graph(graph),
        CheckpointSettings(store=store),
        Codec(),
        on_error,
        on_error,
    )


async def test_a_restart_at_the_moment_at_which_a_write_has_ended_does_not_wait_for_it() -> None:
    """A task that is done stays listed until its callbacks run.

    Waiting for it returns at once. Repeated waits never gave the loop its turn, and the process
    stood still.
    """
    checkpoints = job("memory://just-ended")
    await checkpoints.open()
    ending = asyncio.get_running_loop().create_future()

    async def write() -> None:
        ending.set_result(None)

    checkpoints._begin(write(), "write")
    await ending
    assert [task.done() for task in checkpoints._beside] == [True]
    point = await checkpoints.restore_point(checkpoints._graph, {})
    assert point is not None
    checkpoints._begin(asyncio.sleep(0), "another")
    await checkpoints.close(finished=False)
    assert not [task for task in checkpoints._beside if not task.done()]


def test_state_that_killed_tasks_left_goes_with_a_later_restart() -> None:
    """A job that runs for months, and of which a worker dies each day, is not to fill its store."""

    async def main(host: SimulatedHost) -> None:
        checkpoints = job("/store", host)
        await checkpoints.open()
        kept = await checkpoints.store.complete(await checkpoint(checkpoints.store, 1))
        used = sorted(await checkpoints.store.objects.names("state"))
        orphan = await checkpoints.store.output().write(chunks(LARGE))
        await asyncio.sleep(300)
        await checkpoints.restore_point(checkpoints._graph, {})
        await checkpoints._nothing_beside()
        assert orphan.name in await checkpoints.store.objects.names(
            "state"
        )  # Its writer may still be alive.
        await asyncio.sleep(400)
        young = await checkpoints.store.output().write(chunks(LARGE))
        await checkpoints.restore_point(checkpoints._graph, {})
        await checkpoints._nothing_beside()
        assert sorted(await checkpoints.store.objects.names("state")) == sorted([*used, young.name])
        assert await checkpoints.store.checkpoint(1) == kept
        await checkpoints.close(finished=False)

    simulate(main, 1)


async def test_a_task_that_does_not_say_what_it_waits_for_holds_up_no_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_checkpoints, "ANSWER_S", 3600.0)
    checkpoints = job("memory://no-answer")
    await checkpoints.open()
    tasks, asked = AsyncMock(), asyncio.Event()

    async def hang(*_: object) -> str:
        asked.set()
        await asyncio.Event().wait()
        return ""

    tasks.describe_checkpoint.side_effect = hang
    checkpoints._tasks = tasks
    late = WarnBehind(1, 6_000, 2_000, "op (1/1)", ExecutionAttemptId("0" * 32, 0, 0, 0))
    checkpoints._carry_out([late])
    async with asyncio.timeout(30):
        await asked.wait()
        await checkpoints._nothing_beside()
    await checkpoints.close(finished=False)


async def test_a_task_that_cannot_say_what_it_waits_for_does_not_fail_its_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoints = job("memory://not-said")
    await checkpoints.open()
    tasks = checkpoints._tasks = AsyncMock()
    tasks.describe_checkpoint.side_effect = IndexError("list index out of range")
    late = WarnBehind(1, 6_000, 2_000, "op (1/1)", ExecutionAttemptId("0" * 32, 0, 0, 0))
    await checkpoints._warn_behind(late)
    assert "its phase is unknown, IndexError: list index out of range" in caplog.text
    await checkpoints.close(finished=False)
