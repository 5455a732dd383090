"""A cluster of one: deployment, stop, cancel, taps and state of tasks that are still opening,
and partitions that are given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aioflow as af
from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.local import LocalCluster
from aioflow.cluster.restart import RestartPolicy, fixed_delay, no_restart
from aioflow.core.errors import Closed, JobNotRunning
from aioflow.core.system_host import SystemHost
from aioflow.graph.deployment import ExecutionAttemptId
from aioflow.task.environment import TaskOptions

pytestmark = pytest.mark.timeout(300)


class Opening(af.ProcessFunction[int, int]):
    """An operator whose `open` waits for the test."""

    opened: asyncio.Event
    go_on: asyncio.Event

    async def open(self, ctx: Any) -> None:
        Opening.opened.set()
        await Opening.go_on.wait()

    def process_element(self, value: int, ctx: Any) -> list[int]:
        return [value]


@pytest.fixture(autouse=True)
def events() -> None:
    Opening.opened, Opening.go_on = asyncio.Event(), asyncio.Event()


@asynccontextmanager
async def running(
    flow: af.Flow, restart: RestartPolicy | None = None
) -> AsyncIterator[tuple[LocalCluster, asyncio.Task[JobStatus]]]:
    host = SystemHost()
    cluster = LocalCluster(host, flow.job_graph(), restart or no_restart(), TaskOptions())
    runner = asyncio.get_running_loop().create_task(cluster.run())
    try:
        yield cluster, runner
    finally:
        cluster.job_master.cancel()
        await asyncio.gather(runner, return_exceptions=True)
        await host.close()


def endless(flow: af.Flow) -> Any:
    async def count() -> AsyncIterator[int]:
        i = 0
        while True:
            yield i
            i += 1
            await asyncio.sleep(0)

    return flow.source(count)


async def test_stop_reaches_tasks_that_are_still_opening() -> None:
    """A source that was told to stop before it was open ends as soon as it is."""
    flow = af.Flow("stops")
    endless(flow).process(Opening()).sink(af.io.blackhole())
    async with running(flow) as (cluster, runner):
        await Opening.opened.wait()
        cluster.job_master.stop(drain=False)
        Opening.go_on.set()
        assert await runner is JobStatus.FINISHED


async def test_stop_while_a_region_waits_for_its_restart_holds_for_what_is_deployed_then() -> None:
    calls = 0

    def fails_once(x: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            cluster.job_master.stop(drain=False)
            raise ValueError
        return x

    flow = af.Flow("stops")
    endless(flow).map(fails_once).sink(af.io.blackhole())
    async with running(flow, fixed_delay(1, "1ms")) as (cluster, runner):
        assert await runner is JobStatus.FINISHED


async def test_a_tap_added_while_user_code_opens_sees_every_record() -> None:
    flow = af.Flow("taps")
    stream = flow.source(range(10)).process(Opening())
    stream.sink(af.io.blackhole())
    seen: list[int] = []
    async with running(flow) as (cluster, runner):
        await Opening.opened.wait()
        (node_id,) = [upstream.node_id for upstream in stream.upstreams]
        cluster.task_executor.add_tap(
            cluster.job_id, node_id, lambda batch: seen.extend(batch.values)
        )
        Opening.go_on.set()
        assert await runner is JobStatus.FINISHED
    assert seen == list(range(10))


async def test_a_removed_tap_is_forgotten() -> None:
    flow = af.Flow("taps")
    endless(flow).sink(af.io.blackhole())
    async with running(flow) as (cluster, _):
        tap = lambda batch: None
        cluster.task_executor.add_tap(cluster.job_id, 0, tap)
        cluster.task_executor.remove_tap(cluster.job_id, 0, tap)
        assert cluster.task_executor._taps == {}


async def test_a_task_under_a_stale_token_is_refused() -> None:
    """B1.4."""
    flow = af.Flow("fenced")
    endless(flow).process(Opening()).sink(af.io.blackhole())
    async with running(flow) as (cluster, _):
        await Opening.opened.wait()
        before = len(cluster.task_executor.tasks)
        descriptor = cluster.task_executor.tasks[0].descriptor
        with pytest.raises(Closed, match="leads no more"):
            cluster.task_executor.submit_task(descriptor, "an older one")
        assert len(cluster.task_executor.tasks) == before


async def test_state_of_a_task_that_does_not_run_cannot_be_asked() -> None:
    flow = af.Flow("state")
    endless(flow).process(Opening()).sink(af.io.blackhole())
    async with running(flow) as (cluster, _):
        await Opening.opened.wait()
        attempt = cluster.task_executor.tasks[0].descriptor.attempt
        for asked in (attempt, ExecutionAttemptId(cluster.job_id, 99, 0, 0)):
            with pytest.raises(JobNotRunning, match="does not run"):
                await cluster.task_executor.query_state(asked, 0, lambda backend: None)


async def test_a_question_that_a_task_does_not_get_to_says_that_the_task_ended() -> None:
    """The error is not a CancelledError, because the caller was not cancelled."""
    flow = af.Flow("state")
    stream = endless(flow).key_by(lambda x: x % 2).count()
    stream.sink(af.io.blackhole())
    async with running(flow) as (cluster, _):
        await cluster.job_master.started
        task = cluster.task_executor.tasks[-1]
        (node_id,) = [upstream.node_id for upstream in stream.upstreams]
        question = asyncio.ensure_future(
            cluster.task_executor.query_state(task.descriptor.attempt, node_id, lambda backend: 1)
        )
        await asyncio.sleep(0)  # Its mail is written. There may have been another one before.
        cluster.job_master.cancel()
        for mail in task._processor.mailbox._queue.pop_all():
            mail.try_cancel()
        with pytest.raises(JobNotRunning, match="ended before"):
            await question


async def test_partitions_are_forgotten_when_they_were_read_and_when_the_job_is_over() -> None:
    flow = af.Flow("partitions")
    flow.source(range(10)).rebalance().map(lambda x: x, parallelism=2).process(Opening()).sink(
        af.io.blackhole()
    )
    async with running(flow) as (cluster, runner):
        executor = cluster.task_executor
        await Opening.opened.wait()
        assert len(executor._partitions) > 0
        Opening.go_on.set()
        assert await runner is JobStatus.FINISHED
        assert len(executor._partitions) == 0
        assert executor._environment.pool._pools == []


async def test_cancelling_the_run_waits_until_its_tasks_are_gone() -> None:
    closed = []

    class Closes(Opening):
        async def close(self) -> None:
            await asyncio.sleep(0)
            closed.append(1)

    flow = af.Flow("cancelled")
    endless(flow).process(Closes()).sink(af.io.blackhole())
    async with running(flow) as (cluster, runner):
        await Opening.opened.wait()
        runner.cancel()
        with pytest.raises(asyncio.CancelledError):
            await runner
        assert closed == [1]
        assert cluster.job_master.status is JobStatus.CANCELED
