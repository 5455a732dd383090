"""The JobMaster carries out the decisions of the graph, in order, whichever answers the workers
give at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from aioflow.checkpoint.instructions import CheckpointSettings
from aioflow.checkpoint.urls import flow_url
from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.job_master import JobMaster
from aioflow.cluster.restart import RestartPolicy, fixed_delay, no_restart
from aioflow.cluster.task_executor import TaskExecutor
from aioflow.core.aio import OrderedTaskGroup
from aioflow.core.elements import CheckpointBarrier
from aioflow.core.errors import CheckpointError, ProducerFailed, StaleLeader
from aioflow.core.metrics import MetricGroup
from aioflow.core.system_host import SystemHost
from aioflow.graph.deployment import ExecutionAttemptId, ExecutionState, TaskDeploymentDescriptor
from aioflow.graph.job_graph import JobGraph, build_job_graph
from aioflow.graph.stream_graph import (
    Partitioning,
    ShipStrategy,
    StreamEdge,
    StreamGraph,
    StreamNode,
)
from aioflow.network.channels import ProducerState
from aioflow.operators.source import Split, completed
from aioflow.task.environment import CheckpointTaskOptions, TaskOptions


def line(count: int, source: Any = None) -> JobGraph:
    """`count` vertices in a line, each of one subtask."""
    graph = StreamGraph("line")
    first = None if source is None else completed(source)
    for i in range(count):
        graph.add_node(StreamNode(id=i, kind="op", name=f"op{i}", source=None if i else first))
        if i:
            graph.add_edge(StreamEdge(i - 1, i, partitioning=Partitioning(ShipStrategy.REBALANCE)))
    return build_job_graph(graph)


class Workers:
    """A worker that only takes notes; refuses the vertices in `refused`."""

    def __init__(self, refused: dict[int, Exception] | None = None) -> None:
        self.refused = refused or {}
        self.submitted: list[ExecutionAttemptId] = []
        self.tokens: set[str] = set()
        self.canceled: list[ExecutionAttemptId] = []
        self.stopped: list[bool] = []

    def submit_task(self, descriptor: TaskDeploymentDescriptor, fencing_token: str) -> None:
        error = self.refused.get(descriptor.attempt.vertex_id)
        if error is not None:
            raise error
        self.submitted.append(descriptor.attempt)
        self.tokens.add(fencing_token)

    def cancel_task(self, attempt: ExecutionAttemptId) -> None:
        self.canceled.append(attempt)

    def stop_sources(self, job_id: str, *, drain: bool) -> None:
        self.stopped.append(drain)

    def add_tap(self, job_id: str, node_id: int, tap: Callable[..., None]) -> None: ...
    def remove_tap(self, job_id: str, node_id: int, tap: Callable[..., None]) -> None: ...
    async def query_state(
        self, attempt: ExecutionAttemptId, node_id: int, query: Callable[[Any], Any]
    ) -> Any: ...


@pytest.fixture
async def group() -> AsyncIterator[OrderedTaskGroup]:
    async with OrderedTaskGroup() as group:
        yield group
        group.cancel_children()


def master(
    group: OrderedTaskGroup, graph: JobGraph, restart: RestartPolicy | None = None
) -> JobMaster:
    return JobMaster(SystemHost(), "0" * 32, graph, restart or no_restart(), group)


def report(
    job: JobMaster, vertex: int, state: ExecutionState, error: BaseException | None = None
) -> None:
    job.update_task_state(job.executions.executions[vertex, 0].attempt, state, error)


async def test_every_task_is_submitted_under_the_leaders_token(group: OrderedTaskGroup) -> None:
    job, workers = master(group, line(3)), Workers()
    await job.start(workers)
    assert [attempt.vertex_id for attempt in workers.submitted] == [0, 1, 2]
    assert workers.tokens == {job.fencing_token}


async def test_a_consumer_learns_whether_its_producer_comes_runs_or_is_gone(
    group: OrderedTaskGroup,
) -> None:
    job = master(group, line(2), fixed_delay(1, "0s"))
    first = job.executions.executions[0, 0].attempt
    told: list[ProducerState] = []
    job.ask_producer(first, told.append)
    await job.start(Workers())
    job.ask_producer(first, told.append)
    assert told == [ProducerState.AWAITED] * 2
    report(job, 0, ExecutionState.RUNNING)
    assert job.producer_state(first) is ProducerState.RUNNING
    report(job, 1, ExecutionState.RUNNING)
    report(job, 1, ExecutionState.FAILED, ValueError("user"))
    assert job.producer_state(first) is ProducerState.GONE, "it is cancelled"
    report(job, 0, ExecutionState.CANCELED)
    assert job.producer_state(first) is ProducerState.GONE
    while job.status is not JobStatus.RUNNING:
        await asyncio.sleep(0)
    assert job.producer_state(first) is ProducerState.GONE, "another attempt has replaced it"
    second = job.executions.executions[0, 0].attempt
    assert job.producer_state(second) is ProducerState.AWAITED
    report(job, 0, ExecutionState.FINISHED)
    assert job.producer_state(second) is ProducerState.RUNNING, "its output is still there"


async def test_a_deployment_that_fails_ends_the_job_and_later_ones_are_not_made(
    group: OrderedTaskGroup,
) -> None:
    """B1: otherwise the third task would run although the job is failing, and would never be
    cancelled.
    """
    error = ValueError("no such function")
    job, workers = master(group, line(3)), Workers(refused={1: error})
    await job.start(workers)
    assert [attempt.vertex_id for attempt in workers.submitted] == [0]
    assert 0 in [attempt.vertex_id for attempt in workers.canceled]
    report(job, 0, ExecutionState.CANCELED)
    assert await job.terminated is JobStatus.FAILED
    assert job.error is error
    assert job.started.done()


async def test_a_deployment_that_fails_is_a_failed_attempt_and_the_next_one_is_deployed(
    group: OrderedTaskGroup,
) -> None:
    """I3.1"""
    job, workers = (
        master(group, line(3), fixed_delay(1, "0ms")),
        Workers(refused={1: ValueError("connection lost")}),
    )
    await job.start(workers)
    assert [(a.vertex_id, a.attempt) for a in workers.submitted] == [(0, 0)]
    workers.refused.clear()
    report(job, 0, ExecutionState.CANCELED)
    while len(workers.submitted) < 4:
        await asyncio.sleep(0)
    assert [(a.vertex_id, a.attempt) for a in workers.submitted[1:]] == [(0, 1), (1, 1), (2, 1)]
    assert job.status is JobStatus.RUNNING


async def test_a_restart_is_deployed_after_its_delay(group: OrderedTaskGroup) -> None:
    job, workers = master(group, line(2), fixed_delay(1, "0ms")), Workers()
    await job.start(workers)
    report(job, 0, ExecutionState.FAILED, ValueError())
    report(job, 1, ExecutionState.CANCELED)
    while len(workers.submitted) < 4:
        await asyncio.sleep(0)
    assert [(a.vertex_id, a.attempt) for a in workers.submitted[2:]] == [(0, 1), (1, 1)]
    assert job.status is JobStatus.RUNNING


async def test_started_completes_when_every_task_has_run(group: OrderedTaskGroup) -> None:
    job = master(group, line(2))
    await job.start(Workers())
    report(job, 0, ExecutionState.RUNNING)
    assert not job.started.done()
    report(job, 1, ExecutionState.FINISHED)
    assert job.started.done()


async def test_a_source_that_cannot_find_its_splits_fails_the_job(group: OrderedTaskGroup) -> None:
    class Lost:
        bounded = True

        async def discover(self) -> list[Split]:
            raise OSError("gone")

    job, workers = master(group, line(2, Lost())), Workers()
    await job.start(workers)
    assert await job.terminated is JobStatus.FAILED
    assert isinstance(job.error, OSError)
    assert job.error.__notes__ == ["aioflow: in discover() of source 'op0'"]
    assert workers.submitted == []


async def test_a_source_that_looks_for_splits_through_something_cancelled_fails_the_job(
    group: OrderedTaskGroup,
) -> None:
    """No caller cancelled the search. If it ended in silence, the job would never begin."""

    class Cut:
        bounded = True

        async def discover(self) -> list[Split]:
            await cancelled
            return []

    cancelled = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    job = master(group, line(2, Cut()))
    await group.create_task(job.start(Workers()))
    assert job.status is JobStatus.FAILED
    assert isinstance(job.error, RuntimeError)
    assert job.error.__notes__ == ["aioflow: in discover() of source 'op0'"]


async def test_a_job_cancelled_while_it_looks_for_splits_deploys_nothing(
    group: OrderedTaskGroup,
) -> None:
    class Slow:
        bounded = True

        async def discover(self) -> list[Split]:
            job.cancel()
            return []

    job, workers = master(group, line(2, Slow())), Workers()
    await job.start(workers)
    assert await job.terminated is JobStatus.CANCELED
    assert workers.submitted == []


async def test_times_of_each_status_are_kept(group: OrderedTaskGroup) -> None:
    job = master(group, line(1))
    await job.start(Workers())
    job.cancel()
    report(job, 0, ExecutionState.CANCELED)
    statuses = [JobStatus.CREATED, JobStatus.RUNNING, JobStatus.CANCELLING, JobStatus.CANCELED]
    assert list(job.timestamps_ms) == statuses
    assert sorted(job.timestamps_ms.values()) == list(job.timestamps_ms.values())


async def test_a_stop_with_a_savepoint_of_a_job_without_checkpoints_is_refused(
    group: OrderedTaskGroup,
) -> None:
    job, workers = master(group, line(1)), Workers()
    await job.start(workers)
    with pytest.raises(
        CheckpointError, match="job 'line' has no checkpoints: run it with checkpoints=URL"
    ):
        job.stop(directory="file:///savepoints")
    assert workers.stopped == []


async def test_a_job_that_is_stopped_before_it_begins_is_stopped_when_it_does(
    group: OrderedTaskGroup,
) -> None:
    job, workers = master(group, line(2)), Workers()
    job.stop(drain=True)
    assert workers.stopped == []
    await job.start(workers)
    assert workers.stopped == [True]
    assert len(workers.submitted) == 2


class Endless:
    """A source that ends only when it is stopped."""

    bounded = False

    async def discover(self) -> list[Split]:
        return [Split("0")]

    def reader(self, ctx: Any) -> Any:
        return self

    finished = False

    async def open(self, splits: Any) -> None: ...

    def poll_batch(self, max_records: int) -> None:
        return None

    async def wait(self) -> None:
        await asyncio.Event().wait()

    def position(self, split_id: str) -> int:
        return 7

    async def close(self) -> None: ...


async def test_a_job_whose_leader_died_behind_the_savepoint_of_its_stop_ends_with_it() -> None:
    """I5.3: the tasks had not ended yet, sinks may not have committed.

    The next leader lets them do so, and does not run the job on.
    """
    settings = CheckpointSettings(store="memory://stopped-and-left", every_ms=3_600_000)
    task_options = TaskOptions(
        checkpoints=CheckpointTaskOptions(store=flow_url(settings.store, "line"))
    )
    host = SystemHost()

    async def led(job_id: str, *, recovered: bool) -> JobMaster:
        async with OrderedTaskGroup() as group:
            job = JobMaster(
                host,
                job_id,
                line(1, Endless()),
                no_restart(),
                group,
                checkpoints=settings,
                recovered=recovered,
            )
            executor = TaskExecutor(
                host, job, job.fencing_token, MetricGroup(host.clock.monotonic), task_options
            )
            async with executor:
                _ = group.create_task(job.start(executor), name="start")
                if not recovered:
                    await job.started
                    job.stop(drain=False)
                status = await job.terminated
            assert status is JobStatus.FINISHED
            await job.close()
            return job

    first = await led("1" * 32, recovered=False)
    assert first.stopped_with is not None
    # The other leader finds what there was when the savepoint was made, and a job that it believes
    # to run.
    second = await led("1" * 32, recovered=True)
    assert second.stopped_with == first.stopped_with
    assert second.stop_error is None
    await host.close()


class Silent(Workers):
    """A worker that never acknowledges a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.triggered = asyncio.Event()

    def trigger_checkpoint(self, attempt: ExecutionAttemptId, barrier: CheckpointBarrier) -> None:
        self.triggered.set()

    def notify_checkpoint_complete(self, job_id: str, checkpoint_id: int) -> None: ...
    def notify_checkpoint_aborted(
        self, job_id: str, checkpoint_id: int, latest_completed: int | None
    ) -> None: ...


@pytest.mark.parametrize("ask", [JobMaster.checkpoint, JobMaster.savepoint])
async def test_waiter_for_a_checkpoint_learns_that_the_leader_goes_away(
    group: OrderedTaskGroup, ask: Callable[..., Any]
) -> None:
    """I5.3: the job goes on under the next one, which knows nothing of what this one was asked."""
    settings = CheckpointSettings(store="memory://left-while-asked", every_ms=3_600_000)
    host = SystemHost()
    job = JobMaster(host, "2" * 32, line(1, Endless()), no_restart(), group, checkpoints=settings)
    workers = Silent()
    await job.start(workers)
    report(job, 0, ExecutionState.RUNNING)
    asking = asyncio.ensure_future(ask(job))
    await workers.triggered.wait()
    await job.suspend()
    async with asyncio.timeout(20):
        with pytest.raises(StaleLeader, match="ask the next one"):
            await asking
    await host.close()


async def test_a_task_canceled_unasked_is_in_the_history_until_the_failure_behind_it_is_known(
    group: OrderedTaskGroup,
) -> None:
    job = master(group, line(2))
    await job.start(Workers())
    report(job, 1, ExecutionState.CANCELED, ProducerFailed("consequence"))
    assert [failure.message for failure in job.history.failures] == ["consequence"]
    report(job, 0, ExecutionState.FAILED, ValueError("cause"))
    assert [failure.message for failure in job.history.failures] == ["cause"]
    assert job.history.failures_total == 1
    assert await job.terminated is JobStatus.FAILED
    assert isinstance(job.error, ValueError)
