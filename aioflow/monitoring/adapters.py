"""Adapts everything that runs jobs to the view of the monitoring endpoint.

A job may run in one process, with worker processes, or on a cluster. A JobManager has several jobs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from aioflow.cluster.gateways import TapGateway
from aioflow.core.errors import Broken
from aioflow.monitoring.view import JobView, WorkerView

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflow.cluster.jobmanager import JobManager
    from aioflow.cluster.remote import RemoteRun
    from aioflow.cluster.worker_pool import WorkerPool
    from aioflow.core.host import Host
    from aioflow.graph.deployment import ExecutionAttemptId
    from aioflow.monitoring.view import JobMasterView, Monitored

__all__ = ["MonitoredCluster", "MonitoredJob", "monitored"]

STATUS = "Status."
"""Prefix of the metrics of a process."""

MEMORY = "Status.Shuffle."

HERE = "local"
"""Id of this process among the workers."""


class _Counted(Protocol):
    """The metrics that every job has. A job on Spark has no others."""

    def snapshot(self) -> Mapping[str, float]: ...


@runtime_checkable
class _Metrics(_Counted, Protocol):
    def own_values(self) -> Mapping[str, float]:
        """Returns the metrics of this process itself."""


class _Tasks(TapGateway, Protocol):
    async def query_state(
        self, attempt: ExecutionAttemptId, node_id: int, query: Callable[[Any], Any]
    ) -> Any: ...


@runtime_checkable
class _HasPool(Protocol):
    """A cluster with worker processes of its own."""

    @property
    def pool(self) -> WorkerPool: ...


class RunsJob(Protocol):
    """A running job: a LocalCluster, a WorkersCluster or a RemoteRun."""

    @property
    def host(self) -> Host: ...
    @property
    def job_id(self) -> str: ...
    @property
    def job_master(self) -> JobMasterView: ...
    @property
    def metrics(self) -> _Counted: ...
    @property
    def task_executor(self) -> _Tasks: ...


class MonitoredJob:
    """View of one job and the processes that were started for it."""

    def __init__(self, cluster: RunsJob, state_backend: str) -> None:
        self._cluster = cluster
        # Looked up once, because every answer uses it for each subtask.
        self._pool = cluster.pool if isinstance(cluster, _HasPool) else None
        self._remote = cast("RemoteRun", cluster) if hasattr(cluster, "ask_taskmanager") else None
        self._job = JobView(
            cluster.job_master,
            cluster.metrics.snapshot,
            self._worker_at,
            cluster.task_executor.query_state,
            cluster.task_executor,
            state_backend,
        )

    @property
    def host(self) -> Host:
        return self._cluster.host

    def jobs(self) -> Sequence[JobView]:
        return (self._job,)

    def workers(self) -> Sequence[WorkerView]:
        slots = max(vertex.parallelism for vertex in self._job.graph.vertices)
        taken = () if self._job.status.is_terminal else (self._job.id,) * slots
        location = getattr(self._cluster, "location", "")
        here = WorkerView(
            id=HERE,
            location=location,
            slots=slots,
            free_slots=slots - len(taken),
            is_here=True,
            job_ids=taken,
        )
        if self._remote is not None:
            others = [
                WorkerView(
                    id=one.id,
                    location=one.location,
                    slots=one.slots,
                    free_slots=one.free_slots,
                    silence_ms=one.silence_ms,
                    job_ids=(self._job.id,)
                    * (bool(one.location) and not self._job.status.is_terminal),
                )
                for one in self._remote.workers
            ]
            return (here, *others)
        pool = self._pool
        if pool is None:
            return (here,)
        others = [
            WorkerView(
                id=worker.id,
                location=worker.location,
                slots=slots,
                free_slots=slots - len(taken),
                silence_ms=round(pool.silence_s(worker) * 1000),
                job_ids=taken,
            )
            for worker in pool.open
        ]
        return (here, *others)

    def _worker_at(self, location: str) -> str:
        if self._pool is not None:
            for worker in self._pool.all:
                if worker.location == location:
                    return worker.id
        if self._remote is not None and location:
            return next(
                (worker.id for worker in self._remote.workers if worker.location == location), HERE
            )
        return HERE

    async def refresh(self) -> None:
        if self._remote is not None:
            await self._remote.refresh()

    def settings(self) -> Mapping[str, str]:
        master = self._job.master
        checkpoints = master.checkpoint_settings
        shown = {"job.name": self._job.name, "restart-strategy": str(master.executions.restart)}
        if checkpoints is not None and checkpoints.store is not None:
            shown |= {
                "execution.checkpointing.interval": f"{checkpoints.every_ms} ms",
                "execution.checkpointing.dir": checkpoints.store,
                "execution.checkpointing.num-retained": str(checkpoints.retain),
            }
        return shown

    def worker_metrics(self, worker_id: str) -> Mapping[str, float]:
        if self._pool is not None:
            for worker in self._pool.all:
                if worker.id == worker_id:
                    return _status(worker.metrics)
        if self._remote is not None and worker_id != HERE:
            return next(
                (worker.status for worker in self._remote.workers if worker.id == worker_id), {}
            )
        if not isinstance(self._cluster.metrics, _Metrics):
            return {}
        return self._cluster.metrics.own_values()

    async def ask_worker(self, worker_id: str, what: str, *args: Any) -> Any:
        if self._remote is not None:
            return await self._remote.ask_taskmanager(worker_id, what, *args)
        if self._pool is not None:
            for worker in self._pool.open:
                if worker.id == worker_id and worker.connection is not None:
                    return await worker.connection.call("inspect", what, *args)
        raise Broken(f"worker {worker_id} is gone")


class MonitoredCluster:
    """View of a JobManager with its TaskManagers and its jobs, including some that have ended."""

    def __init__(self, manager: JobManager) -> None:
        self._manager = manager
        self._views: dict[str, JobView] = {}

    @property
    def host(self) -> Host:
        return self._manager.host

    @property
    def fenced_total(self) -> int:
        """Number of messages that the cluster has refused (see `JobManager.fenced_total`)."""
        return self._manager.fenced_total

    def jobs(self) -> Sequence[JobView]:
        known = self._manager.known_jobs()
        # The view of a job is reused, because its cached metrics belong to it.
        self._views = {
            job_id: self._views.get(job_id)
            or JobView(
                job.job_master,
                job.all_metrics,
                job.worker_at,
                job.read_state,
                job,
                job.state_backend,
            )
            for job_id, job in known.items()
        }
        return tuple(self._views.values())

    async def refresh(self) -> None:
        """Does nothing: the JobManager has all data in this process."""

    def workers(self) -> Sequence[WorkerView]:
        running = [view for view in self.jobs() if not view.status.is_terminal]
        found = []
        for worker_id, slots, free, silence_s in self._manager.taskmanagers():
            jobs = tuple(view.id for view in running if worker_id in view.worker_ids())
            found.append(
                WorkerView(
                    id=worker_id,
                    slots=slots,
                    free_slots=free,
                    silence_ms=round(silence_s * 1000),
                    job_ids=jobs,
                )
            )
        return tuple(found)

    def settings(self) -> Mapping[str, str]:
        options = self._manager.options
        return {
            "jobmanager.bind-host": options.bind,
            "jobmanager.rpc.port": str(options.port),
            "high-availability.storageDir": options.data,
            "heartbeat.interval": f"{options.heartbeat.interval_s:g} s",
            "heartbeat.timeout": f"{options.heartbeat.timeout_s:g} s",
            "slot.request.timeout": f"{options.request_timeout_s:g} s",
        }

    def worker_metrics(self, worker_id: str) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for job in self._manager.known_jobs().values():
            for name, value in _status(job.metrics_of(worker_id)).items():
                # Each job has its own network memory in the process, so that metric is summed.
                found[name] = value + (found.get(name, 0) if name.startswith(MEMORY) else 0)
        return found

    async def ask_worker(self, worker_id: str, what: str, *args: Any) -> Any:
        return await self._manager.ask_taskmanager(worker_id, what, *args)


def _status(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of the process itself, without those of its tasks."""
    return dict(itertools.takewhile(lambda entry: entry[0].startswith(STATUS), metrics.items()))


def monitored(what: object) -> Monitored:
    """Returns the view of `what`: a Monitored, an object with one (an `af.Job`), or a JobManager.

    Raises TypeError for anything else.
    """
    from aioflow.cluster.jobmanager import JobManager  # Imports modules that only clusters need.

    if isinstance(what, JobManager):
        return MonitoredCluster(what)
    made = what.monitored() if hasattr(what, "monitored") else what
    if hasattr(made, "jobs") and hasattr(made, "workers"):
        return cast("Monitored", made)
    raise TypeError(
        "monitor_app() takes a job (of `async with flow.run() as job`) or a JobManager, got "
        f"{type(what).__name__}: {what!r}"
    )
