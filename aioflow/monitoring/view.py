"""The endpoint's view of jobs and their processes.

`Monitored` is all that an application sees. It shows a single job, or a JobManager with all its
jobs. A job may run in one process, with worker processes, or on a cluster. A `JobView`
reads the JobMaster, which is the same in all three cases. All reads are synchronous and take place
on the event loop. Times are wall-clock ms, and -1 if the event has not happened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from aioflow.cluster.job_history import AttemptRecord, status_of
from aioflow.core.errors import JobNotRunning
from aioflow.graph.deployment import ExecutionState
from aioflow.protocol.framing import SEGMENT_BYTES

if TYPE_CHECKING:
    from collections import deque

    from aioflow.checkpoint.instructions import CheckpointSettings
    from aioflow.checkpoint.statistics import CheckpointStatistics
    from aioflow.cluster.execution_graph import JobStatus
    from aioflow.cluster.gateways import JobMasterView, RunningJob, TapGateway
    from aioflow.cluster.job_history import FailureRecord
    from aioflow.cluster.jobmanager import JobManager
    from aioflow.core.host import Host
    from aioflow.graph.deployment import ExecutionAttemptId
    from aioflow.graph.job_graph import JobGraph, JobVertex

__all__ = [
    "JobView",
    "Monitored",
    "MonitoredCluster",
    "MonitoredJob",
    "SubtaskView",
    "WorkerView",
    "monitored",
    "vertex_hex",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """The view of a process that runs tasks. It is this process if the job has no other."""

    id: str
    location: str = ""
    """`host:port` where other processes read the partitions of this worker. Tasks identify their
    process by this address.
    """
    slots: int
    free_slots: int
    silence_ms: int = 0
    """Time in ms since the last heartbeat of the process."""
    is_here: bool = False
    """Whether the worker is this process."""
    job_ids: tuple[str, ...] = ()
    """Ids of the jobs that occupy the process's slots, one id for each occupied slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtaskView:
    """The view of one attempt of one subtask."""

    index: int
    attempt: int
    state: ExecutionState
    host: str
    worker_id: str
    times_ms: Mapping[ExecutionState, int] = field(default_factory=dict)

    @property
    def start_ms(self) -> int:
        return self.times_ms.get(ExecutionState.DEPLOYING, -1)

    @property
    def end_ms(self) -> int:
        return self.times_ms.get(self.state, -1) if self.state.is_terminal else -1

    @property
    def is_alive(self) -> bool:
        """Whether the attempt runs or is about to run."""
        return not self.state.is_terminal

    def duration_ms(self, now_ms: int) -> int:
        """Returns for how many ms the attempt has run until `now_ms`, or until its end. Returns -1
        before its start.
        """
        return (
            -1
            if self.start_ms < 0
            else max((now_ms if self.end_ms < 0 else self.end_ms) - self.start_ms, 0)
        )

    def status_durations(self, now_ms: int) -> dict[str, int]:
        """Returns the time in ms that the attempt spent in each non-terminal state. The time is -1
        if the attempt never was in the state.
        """
        order = sorted(self.times_ms.items(), key=lambda entry: entry[1])
        ends = [at for _, at in order[1:]] + [now_ms]
        # Empty for a task that has not reported yet.
        spent = {state: max(end - at, 0) for (state, at), end in zip(order, ends, strict=False)}
        return {
            state.value: spent.get(state, -1) for state in ExecutionState if not state.is_terminal
        }


QueryState = Callable[["ExecutionAttemptId", int, Callable[[Any], Any]], Any]
"""The type of functions that query keyed state. The arguments are the id of the attempt, the id of
the node, and the query. The function returns an awaitable of the query's result.

The query runs between two slices of the task.
"""


Rescale = Callable[[int | None, Mapping[str, int]], Awaitable[None]]
"""The type of functions that continue the job at another parallelism. The arguments are the
parallelism of the flow, and a mapping of uids to the parallelism of single operators.
"""


class JobView:
    """The view of one job.

    `read_metrics()` returns all metrics of the job by dotted name. `worker_at(location)` returns
    the id of the process at a location.
    """

    def __init__(
        self,
        master: JobMasterView,
        read_metrics: Callable[[], Mapping[str, float]],
        worker_at: Callable[[str], str],
        query_state: QueryState | None = None,
        taps: TapGateway | None = None,
        state_backend: str = "",
        rescale: Rescale | None = None,
    ) -> None:
        self.master = master
        self.rescale = rescale
        """Function that changes the parallelism of the job. None if that is not possible."""
        self.read_metrics = read_metrics
        self._worker_at = worker_at
        self._query_state = query_state
        self.taps = taps
        """Gives access to samples of the output of operators. None if samples are not available."""
        self.state_backend = state_backend
        graph = master.executions.graph
        self.vertex_ids = {vertex.id: vertex_hex(vertex) for vertex in graph.vertices}
        self._numbers = {hex_id: number for number, hex_id in self.vertex_ids.items()}

    @property
    def id(self) -> str:
        return self.master.executions.job_id

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def graph(self) -> JobGraph:
        return self.master.executions.graph

    @property
    def status(self) -> JobStatus:
        return self.master.status

    @property
    def restarts(self) -> int:
        return self.master.executions.restarts

    @property
    def start_ms(self) -> int:
        return min(self.master.timestamps_ms.values(), default=-1)

    @property
    def end_ms(self) -> int:
        return self.master.timestamps_ms.get(self.status, -1) if self.status.is_terminal else -1

    @property
    def changed_ms(self) -> int:
        """Time of the last change of the job's state, in ms since 1970."""
        return max(self.master.timestamps_ms.values(), default=-1)

    def duration_ms(self, now_ms: int) -> int:
        """Returns for how many ms the job has run until `now_ms`, or until its end."""
        return max((now_ms if self.end_ms < 0 else self.end_ms) - self.start_ms, 0)

    def vertex(self, vertex_id: str) -> JobVertex | None:
        """Returns the vertex with the id `vertex_id`, as in `vertex_hex`. Returns None if there is
        no such vertex.
        """
        number = self._numbers.get(vertex_id)
        return None if number is None else self.graph.vertex(number)

    def subtasks(self, vertex: JobVertex) -> list[SubtaskView]:
        """Returns the current attempt of each subtask of a vertex."""
        return [self._subtask(vertex, index) for index in range(vertex.parallelism)]

    def attempts(self, vertex: JobVertex, index: int) -> list[SubtaskView]:
        """Returns all remembered attempts of one subtask, oldest first. The last is the current
        attempt.
        """
        current = self._subtask(vertex, index)
        records = self._records(vertex, index)
        earlier = [
            self._view(index, record, record.state)
            for record in records
            if record.attempt < current.attempt
        ]
        return [*earlier, current]

    def _subtask(self, vertex: JobVertex, index: int) -> SubtaskView:
        execution = self.master.executions.executions[vertex.id, index]
        attempt = execution.attempt.attempt
        record = next(
            (record for record in self._records(vertex, index) if record.attempt == attempt), None
        )
        if record is None:
            location = self.master.executions.locations.get((vertex.id, index), "")
            record = AttemptRecord(attempt, execution.state, location, {})
        return self._view(index, record, execution.state)

    def _view(self, index: int, record: AttemptRecord, state: ExecutionState) -> SubtaskView:
        worker_id = self._worker_at(record.location)
        return SubtaskView(
            index=index,
            attempt=record.attempt,
            state=state,
            host=record.location or worker_id,
            worker_id=worker_id,
            times_ms=record.times_ms,
        )

    def worker_ids(self) -> set[str]:
        """Returns the ids of the processes that now have a task of this job."""
        return {
            one.worker_id
            for vertex in self.graph.vertices
            for one in self.subtasks(vertex)
            if not one.state.is_terminal
        }

    def worker_at(self, location: str) -> str:
        """Returns the id of the process at `location`."""
        return self._worker_at(location)

    def _records(
        self, vertex: JobVertex, index: int
    ) -> deque[AttemptRecord] | tuple[AttemptRecord, ...]:
        return self.master.history.attempts.get((vertex.id, index), ())

    @property
    def failures(self) -> Sequence[FailureRecord]:
        """The remembered failures, oldest first."""
        return tuple(self.master.history.failures)

    @property
    def checkpoint_settings(self) -> CheckpointSettings | None:
        return self.master.checkpoint_settings

    @property
    def checkpoints(self) -> CheckpointStatistics | None:
        return self.master.checkpoint_statistics

    async def query_state(
        self, vertex: JobVertex, index: int, node_id: int, query: Callable[[Any], Any]
    ) -> Any:
        """Returns the result of `query`, which gets the keyed state backend of one operator in one
        subtask.

        Raises JobNotRunning if the subtask is not running, or if this view cannot query state.
        """
        execution = self.master.executions.executions[vertex.id, index]
        if self._query_state is None or execution.state is not ExecutionState.RUNNING:
            raise JobNotRunning(
                f"subtask {index} of {vertex.name!r} is {execution.state.value}, its state cannot "
                "be read now"
            )
        return await self._query_state(execution.attempt, node_id, query)


@runtime_checkable
class Monitored(Protocol):
    """The jobs and processes that an endpoint shows."""

    @property
    def host(self) -> Host: ...

    def jobs(self) -> Sequence[JobView]:
        """Returns running jobs and jobs that ended lately, oldest first."""

    def expected_jobs(self) -> Sequence[JobView]:
        """Returns the jobs that should run now. The process is ready if they run."""
        return self.jobs()

    def workers(self) -> Sequence[WorkerView]: ...

    async def refresh(self) -> None:
        """Fetches data that only other processes have. Called once a second.

        Raises AioflowError or TimeoutError while these processes do not answer.
        """

    def settings(self) -> Mapping[str, str]:
        """Returns the configuration of the cluster, without secrets."""

    def metrics(self) -> Mapping[str, float]:
        """Returns the metrics that only this kind of cluster has."""
        return {}

    async def ask_worker(self, worker_id: str, what: str, *args: Any) -> Any:
        """Asks another process about itself, and returns its answer (see `ProcessInspector.ask`).

        Raises Broken if the process is gone.
        """

    def worker_metrics(self, worker_id: str, job_id: str | None = None) -> Mapping[str, float]:
        """Returns the metrics of one process itself by dotted name, without metrics of its tasks.

        A TaskManager has a process for each job. `job_id` selects one of these processes. None
        means all these processes together.
        """


def vertex_hex(vertex: JobVertex) -> str:
    """Returns the id of a vertex in REST: 32 hex digits that depend only on the uids of its
    operators.

    So the id is the same in every run of the program, even if other operators are added.
    """
    return hashlib.blake2b(
        "\x00".join(vertex.uids).encode("utf-8", "surrogatepass"), digest_size=16
    ).hexdigest()


LARGEST = ("Status.Loop.lagMs", "Status.Loop.lagMsMax", "Status.Shuffle.Netty.RequestedMemoryUsage")
"""Metrics for which a TaskManager shows the largest value of its processes, instead of the sum."""

NETTY = "Status.Shuffle.Netty."
"""Prefix of the metrics of network memory."""

HERE = "local"
"""Id of this process among the workers."""


@runtime_checkable
class _HasView(Protocol):
    def monitored(self) -> Monitored: ...


class MonitoredJob(Monitored):
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

    def worker_metrics(self, worker_id: str, job_id: str | None = None) -> Mapping[str, float]:
        if worker_id == HERE:
            return self._running.own_metrics()
        return next((one.status for one in self._running.workers() if one.id == worker_id), {})

    async def ask_worker(self, worker_id: str, what: str, *args: Any) -> Any:
        return await self._running.ask_worker(worker_id, what, *args)


class MonitoredCluster(Monitored):
    """The view of a JobManager with its TaskManagers and its jobs, including some that have
    ended.
    """

    def __init__(self, manager: JobManager) -> None:
        self._manager = manager
        self._views: dict[str, JobView] = {}

    @property
    def host(self) -> Host:
        return self._manager.host

    def metrics(self) -> Mapping[str, float]:
        """Returns the number of messages that the cluster has refused."""
        return {"fenced_total": self._manager.fenced_total}

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

    def expected_jobs(self) -> Sequence[JobView]:
        """Returns the jobs that have not ended."""
        return [view for view in self.jobs() if not view.status.is_terminal]

    async def refresh(self) -> None:
        """Does nothing, because the JobManager in this process has all data."""

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

    def worker_metrics(self, worker_id: str, job_id: str | None = None) -> Mapping[str, float]:
        """Returns the summed metrics of the job processes of a TaskManager. If no job runs there,
        returns the last metrics of the job that ran last.

        Without `job_id`, the network memory is that of the whole TaskManager, even if no job runs
        there.
        """
        known = self._manager.known_jobs()
        jobs = [job for id, job in known.items() if job_id in (None, id)]
        found: dict[str, float] = {}
        running = [one for one in jobs if not one.status.is_terminal]
        for job in running or jobs[-1:]:
            for name, value in status_of(job.metrics_of(worker_id)).items():
                former = found.get(name, 0.0)
                found[name] = max(former, value) if name in LARGEST else former + value
        budget = 0 if job_id is not None else self._manager.network_bytes(worker_id)
        if budget:
            used = found.get(f"{NETTY}UsedMemory", 0.0) if running else 0.0
            for unit, size in (("", 1), ("Segments", SEGMENT_BYTES)):
                found[f"{NETTY}TotalMemory{unit}"] = float(budget // size)
                found[f"{NETTY}UsedMemory{unit}"] = -(-used // size)
                found[f"{NETTY}AvailableMemory{unit}"] = max(0.0, budget - used) // size
        return found

    async def ask_worker(self, worker_id: str, what: str, *args: Any) -> Any:
        return await self._manager.ask_taskmanager(worker_id, what, *args)


def monitored(what: object) -> Monitored:
    """Returns the view of `what`. This is a Monitored, an object that has one (an `af.Job`), or a
    JobManager.

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
