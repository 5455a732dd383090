"""Adapters that let one monitoring endpoint show every kind of run in the same form.

A job may run in one process, with worker processes, or on a cluster. A JobManager has several jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from aioflow.cluster.told import status_of
from aioflow.monitoring.view import JobView, Monitored, WorkerView

if TYPE_CHECKING:
    from aioflow.cluster.jobmanager import JobManager
    from aioflow.cluster.running_job import RunningJob
    from aioflow.core.host import Host

__all__ = ["MonitoredCluster", "MonitoredJob", "monitored"]

MEMORY = "Status.Shuffle."

HERE = "local"
"""Id of this process among the workers."""


@runtime_checkable
class _HasView(Protocol):
    def monitored(self) -> Monitored: ...


class MonitoredJob:
    """The view of one job and the processes that were started for it."""

    def __init__(self, running: RunningJob, state_backend: str) -> None:
        self._running = running
        self._job = JobView(
            running.job_master,
            running.metrics,
            self._worker_at,
            running.task_executor.query_state,
            running.task_executor,
            state_backend,
            running.rescale,
        )

    @property
    def host(self) -> Host:
        return self._running.host

    def jobs(self) -> Sequence[JobView]:
        return (self._job,)

    def workers(self) -> Sequence[WorkerView]:
        slots = max(vertex.parallelism for vertex in self._job.graph.vertices)
        is_over = self._job.status.is_terminal
        here = WorkerView(
            id=HERE,
            location=self._running.location,
            slots=slots,
            free_slots=slots if is_over else 0,
            is_here=True,
            job_ids=() if is_over else (self._job.id,) * slots,
        )
        others = [
            WorkerView(
                id=one.id,
                location=one.location,
                slots=one.slots,
                free_slots=one.free_slots,
                silence_ms=one.silence_ms,
                job_ids=(self._job.id,) * (bool(one.location) and not is_over),
            )
            for one in self._running.workers()
        ]
        return (here, *others)

    def _worker_at(self, location: str) -> str:
        return self._running.worker_at(location) or HERE

    async def refresh(self) -> None:
        await self._running.refresh()

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
        if worker_id == HERE:
            return self._running.own_metrics()
        return next((one.status for one in self._running.workers() if one.id == worker_id), {})

    async def ask_worker(self, worker_id: str, what: str, *args: Any) -> Any:
        return await self._running.ask_worker(worker_id, what, *args)


class MonitoredCluster:
    """The view of a JobManager with its TaskManagers and its jobs, including some that have
    ended.
    """

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
                job.tasks.query_state,
                job.tasks,
                job.state_backend,
                partial(self._manager.rescale, job_id),
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
            for name, value in status_of(job.metrics_of(worker_id)).items():
                # Each job has its own network memory in the process, so that metric is summed.
                found[name] = value + (found.get(name, 0) if name.startswith(MEMORY) else 0)
        return found

    async def ask_worker(self, worker_id: str, what: str, *args: Any) -> Any:
        return await self._manager.ask_taskmanager(worker_id, what, *args)


def monitored(what: object) -> Monitored:
    """Returns the view of `what`: a Monitored, an object with one (an `af.Job`), or a JobManager.

    Raises TypeError for anything else.
    """
    from aioflow.cluster.jobmanager import JobManager  # Imports modules that only clusters need.

    if isinstance(what, JobManager):
        return MonitoredCluster(what)
    made = what.monitored() if isinstance(what, _HasView) else what
    if isinstance(made, Monitored):
        return made
    raise TypeError(
        "monitor_app() takes a job (of `async with flow.run() as job`) or a JobManager, got "
        f"{type(what).__name__}: {what!r}"
    )
