"""The interfaces of the roles to each other, of a provider of workers, and of a running job.

The roles call each other directly in one process, and by RPC between processes. Every runner
returns a `RunningJob`: `LocalCluster`, `EmbeddedCluster`, `RemoteRun` and `SparkRun`. The methods
of `RunningJob` itself answer for a job without worker processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.core.errors import Broken, RescaleError

if TYPE_CHECKING:
    from aioflow.checkpoint.completed import CheckpointStats, SubtaskState
    from aioflow.checkpoint.instructions import CheckpointSettings
    from aioflow.checkpoint.statistics import CheckpointStatistics
    from aioflow.cluster.execution_graph import ExecutionGraph, JobStatus
    from aioflow.cluster.job_history import JobHistory, WorkerReport
    from aioflow.core.elements import CheckpointBarrier, RecordBatch
    from aioflow.core.host import Host
    from aioflow.core.scope import TapPlace
    from aioflow.graph.deployment import (
        ExecutionAttemptId,
        ExecutionState,
        TaskDeploymentDescriptor,
    )
    from aioflow.network.channels import ProducerState
    from aioflow.operators.source import Split

__all__ = [
    "JobMasterGateway",
    "JobMasterView",
    "OnMissed",
    "RunningJob",
    "TapGateway",
    "TaskExecutorGateway",
    "TaskReader",
    "WorkerProvider",
]

OnMissed = Callable[[int, Exception | None], None]
"""Function that is called with the number of records that a watcher missed, and with the error (or
None) if they cannot be encoded.
"""


class TapGateway(Protocol):
    """Gives access to the elements that operators emit."""

    def add_tap(
        self,
        job_id: str,
        place: TapPlace,
        tap: Callable[[RecordBatch], None],
        on_missed: OnMissed | None = None,
    ) -> Sequence[asyncio.Future[None]]:
        """Lets `tap` see the output of `place` in every subtask, now and after a restart.

        With `on_missed`, records may be dropped while the connection to the watcher is full. The
        tap is active at once in this process. Returns a future for each other process of the job.
        The future is done when the tap is active there, or when that process is lost.
        """

    def remove_tap(
        self, job_id: str, place: TapPlace, tap: Callable[[RecordBatch], None]
    ) -> None: ...


class TaskReader(TapGateway, Protocol):
    """Reads from the tasks of a job, wherever they run: their output and their state."""

    async def query_state(
        self, attempt: ExecutionAttemptId, node_id: int, query: Callable[[Any], Any]
    ) -> Any:
        """Runs `query` on the keyed backend between two slices of the task, and returns the result.

        The result is Any because `query` chooses it.
        """


class TaskExecutorGateway(TaskReader, Protocol):
    """The requests of a JobMaster to a worker.

    `fencing_token` is the token of the JobMaster; a stale token is refused.
    """

    def submit_task(self, descriptor: TaskDeploymentDescriptor, fencing_token: str) -> None:
        """Deploys and starts a task.

        Raises an error if the token is stale, or if the attempt is known already.
        """

    def cancel_task(self, attempt: ExecutionAttemptId) -> None:
        """Asks a task to end; its end is reported as usual. Unknown attempts are ignored."""

    def trigger_checkpoint(self, attempt: ExecutionAttemptId, barrier: CheckpointBarrier) -> None:
        """Tells a task to begin a checkpoint, because no upstream task will send it the barrier.

        The task acknowledges or declines the checkpoint.
        """

    def notify_checkpoint_complete(self, job_id: str, checkpoint_id: int) -> None:
        """Tells every task of the job that checkpoint `checkpoint_id` and all earlier ones are
        durable.
        """

    def notify_checkpoint_aborted(
        self, job_id: str, checkpoint_id: int, latest_completed: int | None
    ) -> None:
        """Tells tasks that a checkpoint will not complete.

        `latest_completed` is the id of the last checkpoint that completed; None if there is none.
        """

    async def describe_checkpoint(self, attempt: ExecutionAttemptId, checkpoint_id: int) -> str:
        """Returns the phase of a checkpoint in a task, and what the task is doing, in words for the
        log."""

    def stop_sources(self, job_id: str, *, drain: bool) -> None:
        """Stops the sources of a job at their present positions. With `drain` event time ends
        there.
        """

    def limit_source(self, attempt: ExecutionAttemptId, watermark: int) -> None:
        """Lets a source begin, and read while its event time is at most `watermark`.

        MAX_WATERMARK is no limit.
        """

    async def add_splits(self, attempt: ExecutionAttemptId, splits: Sequence[Split]) -> None:
        """Sends more splits to a running source, which ignores splits that it has already.

        Raises an error if the splits may not have arrived. The caller then sends them again.
        """


class JobMasterGateway(Protocol):
    """The reports of a worker to a JobMaster."""

    def update_task_state(
        self, attempt: ExecutionAttemptId, state: ExecutionState, error: BaseException | None
    ) -> None: ...

    def acknowledge_checkpoint(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        state: SubtaskState,
        stats: CheckpointStats,
    ) -> None:
        """Reports that all state of a subtask is written."""

    def decline_checkpoint(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        reason: str,
        error: BaseException | None,
    ) -> None:
        """Reports that a subtask takes no part in a checkpoint.

        `reason` is the name of a `CheckpointFailureReason`.
        """

    def end_of_data_reached(self, attempt: ExecutionAttemptId) -> None:
        """Reports that the subtask has processed every record.

        The subtask ends once a checkpoint that starts after this has completed.
        """

    def ask_producer(
        self, attempt: ExecutionAttemptId, answer: Callable[[ProducerState], None]
    ) -> None:
        """Calls `answer` with the state of a producer whose partition is missing.

        A consumer that misses the partition must know whether to ask for it again. The design
        follows Flink's requestPartitionProducerState.
        """

    def report_progress(self, attempt: ExecutionAttemptId, watermark: int) -> None:
        """Reports the event time that a source has reached, so that aligned sources can be limited.

        An operator that reads one input first reports MAX_WATERMARK once that input is read.
        """


class WorkerProvider(Protocol):
    """Starts workers for a ResourceManager, if workers are not started by others.

    Each worker registers like any TaskManager, under an unused id. A worker that will not register
    is reported as failed. Only the ResourceManager decides which workers are started to replace it.
    So there is one restart policy for all kinds of machines. The methods run on the
    ResourceManager's loop and must not block.
    """

    @property
    def workers(self) -> int:
        """Number of workers that should run at any time."""

    @property
    def slots(self) -> int:
        """Number of slots of each worker."""

    def start_workers(self, count: int, failed: Callable[[], object]) -> None:
        """Begins to start `count` workers, and returns at once.

        `failed` is called once for each worker that will not register. The provider may call
        `failed` from any thread.
        """

    def registered(self, worker_id: str) -> None:
        """Notes that this worker has registered."""

    def lost(self, worker_id: str, reason: str) -> Broken | None:
        """Notes that this worker is lost.

        The worker may still run, so the provider ends it to make room for its replacement. Returns
        the error of the tasks that ran there, if the provider can say more than `reason`.
        """


class JobMasterView(Protocol):
    """The JobMaster of a running job, or its last reported state if it is in another process."""

    @property
    def status(self) -> JobStatus: ...
    @property
    def error(self) -> BaseException | None:
        """The last error that failed or restarted the job."""

    @property
    def executions(self) -> ExecutionGraph: ...
    @property
    def timestamps_ms(self) -> Mapping[JobStatus, int]:
        """Wall-clock time in ms at which the job last entered each status."""

    @property
    def history(self) -> JobHistory: ...
    @property
    def checkpoint_settings(self) -> CheckpointSettings | None: ...
    @property
    def checkpoint_statistics(self) -> CheckpointStatistics | None: ...
    @property
    def started(self) -> asyncio.Future[None]:
        """Future that completes once every task has run, or the job is over."""

    @property
    def terminated(self) -> asyncio.Future[JobStatus]:
        """Future that completes at the end of the job, with its status."""

    @property
    def stop_refused(self) -> asyncio.Future[None]:
        """Future that fails if the last stop is refused after `stop` returned. The job then goes
        on."""

    @property
    def stopped_with(self) -> str | None:
        """URL of the savepoint with which the job ended; None if there is none."""

    @property
    def stop_error(self) -> BaseException | None:
        """The reason why the savepoint at the end of the job could not be taken; None if there is
        none."""

    def cancel(self) -> None: ...
    def stop(
        self, *, drain: bool = False, savepoint: bool = True, directory: str | None = None
    ) -> None: ...
    async def savepoint(self, directory: str | None = None) -> str: ...
    async def savepoints(self) -> list[str]: ...
    async def checkpoint(self) -> int: ...


class RunningJob(Protocol):
    """One job, which exists as long as `run` runs. All methods are called on the loop that runs the
    job."""

    host: Host
    job_id: str
    job_master: JobMasterView
    task_executor: TaskReader

    async def run(self) -> JobStatus:
        """Runs the job to its end. Cancelling this call cancels the job."""

    def metrics(self) -> Mapping[str, float]:
        """Returns all metrics by dotted name. Metrics of another process are from its last
        report."""

    async def rescale(
        self,
        parallelism: int | None,
        of_operators: Mapping[str, int],
        workers: int | None = None,
    ) -> None:
        """Changes the parallelism of the running job, or the number of its worker processes.

        `parallelism` replaces the parallelism of the flow; `of_operators` maps uids of single
        operators to their parallelism. Returns once all new tasks run. Raises GraphError for an
        invalid parallelism, JobNotRunning if the job has ended, and RescaleError if it cannot be
        rescaled.
        """
        raise RescaleError(
            f"job {self.job_master.executions.graph.name!r} runs where its parallelism is fixed: "
            "stop it with a savepoint, and run the flow from it with another parallelism"
        )

    def refuse_state(self, operator: str) -> None:
        """Raises GraphError if this cluster cannot answer queries for the state of `operator`."""
        return None

    # The processes that run the job.

    @property
    def location(self) -> str:
        """Address at which other processes read the partitions of this process; empty if no process
        does."""
        return ""

    def own_metrics(self) -> Mapping[str, float]:
        """Returns the metrics of this process itself, without the metrics of its tasks."""
        return {}

    @property
    def worker_count(self) -> int:
        """Number of worker processes that the job should have; 0 if the job starts none."""
        return 0

    def workers(self) -> Sequence[WorkerReport]:
        """Returns a report of each process besides this one: worker processes of the job, or
        TaskManagers of the cluster. Oldest first."""
        return ()

    def worker_at(self, location: str) -> str:
        """Returns the id of the worker that is, or was, at `location`; empty for this process."""
        return ""

    async def refresh(self) -> None:
        """Fetches the data that only other processes have.

        Raises AioflowError if the other processes do not answer.
        """
        return None

    async def ask_worker(self, worker_id: str, what: str, *args: Any) -> Any:
        """Asks a worker process about itself: see `ProcessInspector.ask`. Raises Broken if the
        worker is gone."""
        raise Broken(f"worker {worker_id} is gone")
