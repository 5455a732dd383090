"""A cluster of one: JobMaster and TaskExecutor in this loop, joined by direct calls."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.gateways import RunningJob
from aioflow.cluster.job_master import CHECKPOINTS_CLOSE_S, JobMaster
from aioflow.cluster.task_executor import TaskExecutor
from aioflow.core.aio import OrderedTaskGroup, close_within
from aioflow.core.errors import RescaleError
from aioflow.core.metrics import MetricGroup
from aioflow.graph.job_graph import rescaled
from aioflow.task.closing import attach_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflow.checkpoint.instructions import CheckpointSettings
    from aioflow.cluster.restart import RestartPolicy
    from aioflow.core.host import Host
    from aioflow.graph.job_graph import JobGraph
    from aioflow.task.environment import TaskOptions

__all__ = ["LocalCluster"]


class LocalCluster(RunningJob):
    """Runs one job for as long as `run` runs.

    `job_master` and `task_executor` can be used while `run` runs.
    """

    job_master: JobMaster
    task_executor: TaskExecutor

    def __init__(
        self,
        host: Host,
        graph: JobGraph,
        restart: RestartPolicy,
        options: TaskOptions,
        checkpoints: CheckpointSettings | None = None,
    ) -> None:
        self._group = OrderedTaskGroup()
        self.host = host
        self.job_id = host.ids.new("job")
        self._metrics = MetricGroup(host.clock.monotonic)
        self.job_master = JobMaster(
            host, self.job_id, graph, restart, self._group, checkpoints=checkpoints
        )
        self.task_executor = TaskExecutor(
            host, self.job_master, self.job_master.fencing_token, self._metrics, options
        )

    async def run(self) -> JobStatus:
        """Deploys the job and waits for its end.

        Cancelling this call cancels the job, and waits until its tasks have ended.
        """
        failure: Exception | None = None
        async with self._group:
            try:
                async with self.task_executor:
                    # Runs in a task of its own, because slow split discovery must not delay the
                    # cancellation of the job.
                    _ = self._group.create_task(
                        self.job_master.start(self.task_executor), name="start"
                    )
                    try:
                        # Shielded: the job master owns the future and completes it after the last
                        # task.
                        status = await asyncio.shield(self.job_master.terminated)
                    except asyncio.CancelledError:
                        self.job_master.cancel()
                        raise
            # An error from closing the worker is kept as it is: the group would wrap it.
            except Exception as error:  # noqa: BLE001
                failure = error
            finally:
                self._group.cancel_children()
                await close_within(
                    self.job_master.close(),
                    CHECKPOINTS_CLOSE_S,
                    what=f"the checkpoints of job {self.job_id}",
                )
        if failure is not None:
            if status is not JobStatus.FAILED or self.job_master.error is None:
                raise failure
            attach_errors(self.job_master.error, [failure])
        return status

    async def rescale(
        self,
        parallelism: int | None,
        of_operators: Mapping[str, int],
        workers: int | None = None,
    ) -> None:
        graph = self.job_master.executions.graph
        if workers is not None:
            raise RescaleError(
                f"job {graph.name!r} runs in this process: it has no workers to add or remove "
                "unless it begins with workers=N; give parallelism="
            )
        await self.job_master.rescale(rescaled(graph, parallelism, of_operators))

    def metrics(self) -> dict[str, float]:
        return dict(self._metrics.snapshot())

    def own_metrics(self) -> dict[str, float]:
        return self._metrics.own_values()
