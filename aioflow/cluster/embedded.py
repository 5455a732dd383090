"""`workers=N`: runs one job in worker processes, with a JobManager inside the program.

The workers are TaskManagers that a provider starts. The JobMaster, the ResourceManager, and the
tasks that cannot leave the program run in the program's loop. These tasks are collected results,
pushed inputs and functions as sinks. The JobMaster reaches these tasks by direct calls, and all
others as in any cluster. The job has no leader election and no store of jobs: it ends with the
program.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from aioflow.cluster.cluster_job import ClusterJob
from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.gateways import RunningJob
from aioflow.cluster.job_master import CHECKPOINTS_CLOSE_S, JobMaster
from aioflow.cluster.jobmanager_peers import TaskManagerCalls
from aioflow.cluster.placed_tasks import PlacedTasks
from aioflow.cluster.resource_driver import ResourceManager
from aioflow.cluster.resource_manager import SlotManagerOptions
from aioflow.cluster.rpc import RpcServer
from aioflow.cluster.scheduler import slots_needed
from aioflow.cluster.shipping import local_job, ship_job
from aioflow.cluster.task_executor import RESOURCES_CLOSE_S, TaskExecutor
from aioflow.cluster.worker_processes import WORKER_HEARTBEAT, WorkerProcesses
from aioflow.core.aio import OrderedTaskGroup, close_within
from aioflow.core.contexts import asynccontextmanager
from aioflow.core.errors import Closed
from aioflow.core.metrics import MetricGroup
from aioflow.core.wire.serializers import Codec
from aioflow.graph.job_graph import check_workers, parallelism_of_flow, rescaled
from aioflow.network.connection import fresh_secret
from aioflow.network.data_plane import DataPlane
from aioflow.protocol.handshake import PeerRole
from aioflow.task.closing import attach_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aioflow.checkpoint.instructions import CheckpointSettings
    from aioflow.cluster.heartbeat import HeartbeatOptions
    from aioflow.cluster.job_history import WorkerReport
    from aioflow.cluster.restart import RestartPolicy
    from aioflow.cluster.rpc import RpcConnection
    from aioflow.core.host import Host
    from aioflow.graph.job_graph import JobGraph
    from aioflow.task.environment import TaskOptions

__all__ = ["EmbeddedCluster"]

TOKEN = 1
"""Fencing token of the JobMaster. An embedded job has only one JobMaster."""

CLOSE_TIMEOUT_S = RESOURCES_CLOSE_S + 5.0
"""How long workers may take to close shared resources after the job has finished."""


class EmbeddedCluster(RunningJob):
    """Runs one job in `count` worker processes."""

    job_master: JobMaster
    task_executor: PlacedTasks

    def __init__(
        self,
        host: Host,
        graph: JobGraph,
        restart: RestartPolicy,
        options: TaskOptions,
        count: int,
        heartbeat: HeartbeatOptions | None = None,
        checkpoints: CheckpointSettings | None = None,
    ) -> None:
        self._group = OrderedTaskGroup()
        self.host = host
        self.job_id = host.ids.new("job")
        job = local_job(graph, options)
        self._job = ClusterJob(
            host,
            self.job_id,
            job,
            ship_job(graph, options),
            restart,
            checkpoints,
            TOKEN,
            lambda job_id, slots: self._resources.declare(job_id, slots),
            self._lose,
            None,
            group=self._group,
        )
        self.job_master = self._job.job_master
        self.task_executor = self._job.tasks
        secret = fresh_secret(host)
        codec = Codec(job.types)
        self._metrics = MetricGroup(host.clock.monotonic)
        self._here = TaskExecutor(
            host,
            self._job,
            self.job_master.fencing_token,
            self._metrics,
            options,
            codec,
        )
        self._data_plane = DataPlane(host, secret, codec, self._here.partitions)
        heartbeat = heartbeat or WORKER_HEARTBEAT
        slots = -(-slots_needed(graph) // count)
        self.processes = WorkerProcesses(
            host,
            secret,
            count,
            slots,
            heartbeat,
            self._job.deployer.start_failed,
            self._lose,
        )
        jobs = {self.job_id: self._job}
        # The restart policy counts the failed starts that tasks wait for.
        limits = SlotManagerOptions(idle_timeout_s=None, request_timeout_s=math.inf)
        limits = limits.with_provider(self.processes)
        self._resources = ResourceManager(host, TOKEN, limits, heartbeat, jobs, "", self.processes)
        self._calls = TaskManagerCalls(jobs, self._registers, self._now_resources)
        roles = frozenset([PeerRole.TASKMANAGER])
        self._server = RpcServer(host, secret, Codec(), roles, self._handlers, self._on_closed)
        self._closing = False
        self._workers, self._slots = count, slots
        self._ratio_of_workers = count
        self._ratio_of_parallelism = parallelism_of_flow(graph)
        """Parallelism of the flow that belongs to `_ratio_of_workers` processes. The user last gave
        this pair of numbers."""

    # Life cycle.

    async def run(self) -> JobStatus:
        """Starts the workers, deploys the job, and waits for its end.

        Cancelling this call cancels the job. No worker process outlives the call.
        """
        failure: Exception | None = None
        status: JobStatus | None = None
        async with self._group:
            try:
                async with self._here:
                    status = await self._run()
                if status is JobStatus.FINISHED:
                    await self._job.tasks.close_sessions(CLOSE_TIMEOUT_S)
            except Exception as error:  # noqa: BLE001  # Kept as it is: the group would wrap it.
                failure = error
            finally:
                self._group.cancel_children()
                await close_within(self._close(), CLOSE_TIMEOUT_S, what="the workers")
                await close_within(
                    self.job_master.close(),
                    CHECKPOINTS_CLOSE_S,
                    what=f"the checkpoints of job {self.job_id}",
                )
        if failure is not None:
            if status is not JobStatus.FAILED or self.job_master.error is None:
                raise failure
            attach_errors(self.job_master.error, [failure])
        assert status is not None, "an error was raised otherwise"
        return status

    async def _run(self) -> JobStatus:
        """Runs the job from the first worker to the end of the last task."""
        self._here.join(self._data_plane, f"127.0.0.1:{await self._data_plane.listen()}")
        self._job.tasks.here = self._here
        self.processes.address = f"127.0.0.1:{await self._server.listen()}"
        async with self._resources:
            try:
                _ = self._group.create_task(self.job_master.start(self._job.tasks), name="start")
                return await asyncio.shield(self.job_master.terminated)
            except BaseException:
                self.job_master.cancel()
                raise
            finally:
                self._closing = True
                self.processes.begin_closing()
                self._job.end()

    async def _close(self) -> None:
        self._resources.release_all("the job is over")
        await self._server.close()
        await self.processes.close()
        await self._data_plane.close()

    # Peers.

    def _handlers(self, connection: RpcConnection) -> dict[str, Callable[..., Any]]:
        return {"leader": lambda: "here", **self._calls.handlers(connection)}

    async def _registers(self, connection: RpcConnection) -> ResourceManager:
        if self._closing:
            raise Closed(f"job {self.job_id} is over, it takes no more workers")
        return self._resources

    def _now_resources(self) -> ResourceManager | None:
        return None if self._closing else self._resources

    def _lose(self, worker_id: str, why: str) -> None:
        if not self._closing:
            self._resources.lose(worker_id, why)

    def _on_closed(self, connection: RpcConnection) -> None:
        if not self._closing:
            self._resources.connection_ended(connection)

    # Rescaling.

    async def rescale(
        self,
        parallelism: int | None,
        of_operators: Mapping[str, int],
        workers: int | None = None,
    ) -> None:
        graph = self.job_master.executions.graph
        if workers is not None:
            check_workers(graph.name, workers)
        in_ratio = parallelism
        if workers is not None and parallelism is None and not of_operators:
            in_ratio = -(-self._ratio_of_parallelism * workers // self._ratio_of_workers)
            in_ratio = min(in_ratio, max(vertex.max_parallelism for vertex in graph.vertices))
        graph = rescaled(graph, in_ratio, of_operators)
        count = self._workers if workers is None else workers
        fits = count == self._workers and self._slots * count >= slots_needed(graph)
        await self._job.rescale_to(graph, None if fits else self._moved(graph, count))
        if parallelism is not None:
            self._ratio_of_parallelism, self._ratio_of_workers = parallelism, count

    @asynccontextmanager
    async def _moved(self, graph: JobGraph, count: int) -> AsyncIterator[None]:
        """Inside the block, the workers that the rescaled job needs are started. Workers that it no
        longer needs end once they are idle.

        The present workers are kept if their slots suffice. If the block fails, the new workers end
        instead.
        """
        needed, former, former_slots = slots_needed(graph), self._workers, self._slots
        there = {worker_id: slots for worker_id, slots, _ in self._resources.overview()}
        staying = list(there)[:count]
        slots = -(-needed // count)
        more = count - len(staying)
        if sum(there[worker_id] for worker_id in staying) + more * slots < needed:
            staying, more = [], count
        leaving = frozenset(there) - frozenset(staying)
        self._resize(count, slots, leaving)
        reserved = sum(there[worker_id] for worker_id in staying) + more * slots
        try:
            async with self._job.deployer.slots_reserved(reserved, leaving):
                yield
        except BaseException:
            now = frozenset(worker_id for worker_id, _, _ in self._resources.overview())
            if not self._closing:
                self._resize(former, former_slots, now - frozenset(there))
            raise

    def _resize(self, workers: int, slots: int, leaving: frozenset[str]) -> None:
        self._workers, self._slots = workers, slots
        self.processes.workers, self.processes.slots = workers, slots
        self._resources.resize(workers, slots, leaving)

    # For monitoring.

    @property
    def location(self) -> str:
        return self._here.location

    def metrics(self) -> dict[str, float]:
        return {**self._job.all_metrics(), **self._metrics.snapshot()}

    def own_metrics(self) -> dict[str, float]:
        return self._metrics.own_values()

    @property
    def worker_count(self) -> int:
        return self._workers

    def workers(self) -> list[WorkerReport]:
        is_over = self.job_master.status.is_terminal
        # By number: workers register in any order.
        known = sorted(self._resources.taskmanagers(), key=lambda one: (len(one[0]), one[0]))
        return [
            self._job.report_of_worker(worker_id, slots, slots if is_over else free, silence_s)
            for worker_id, slots, free, silence_s in known
        ]

    def worker_at(self, location: str) -> str:
        return self._job.worker_at(location)

    async def ask_worker(self, worker_id: str, what: str, *args: Any) -> Any:
        return await self._resources.ask(worker_id, "inspect", what, *args)
