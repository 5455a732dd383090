"""The interfaces between the roles, and the one of a provider that starts workers.

The roles call each other directly in one process, and by RPC between processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from aioflow.checkpoint.completed import CheckpointStats, SubtaskState
    from aioflow.core.elements import CheckpointBarrier, RecordBatch
    from aioflow.core.errors import Broken
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
    "OnMissed",
    "TapGateway",
    "TaskExecutorGateway",
    "TaskReader",
    "WorkerProvider",
]

OnMissed = Callable[[int, Exception | None], None]
"""Called with the number of records that a watcher missed, or with why it can see none."""


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

        With `on_missed`, records may be dropped while the way to `tap` is full. In this process the
        tap is active at once. In another process it is active once that process's future is done.
        The future of a lost process is done too.
        """

    def remove_tap(
        self, job_id: str, place: TapPlace, tap: Callable[[RecordBatch], None]
    ) -> None: ...


class TaskReader(TapGateway, Protocol):
    """Reads from the tasks of a job, wherever they run: their output and their state."""

    async def query_state(
        self, attempt: ExecutionAttemptId, node_id: int, query: Callable[[Any], Any]
    ) -> Any:
        """Runs `query(keyed backend)` between two slices of the task and returns its result.

        The result is Any because `query` chooses it.
        """


class TaskExecutorGateway(TaskReader, Protocol):
    """The requests of a JobMaster to a worker.

    `fencing_token` is the JobMaster's; a stale one is refused.
    """

    def submit_task(self, descriptor: TaskDeploymentDescriptor, fencing_token: str) -> None:
        """Deploys and starts a task.

        Raises if the token is stale or the attempt is known already.
        """

    def cancel_task(self, attempt: ExecutionAttemptId) -> None:
        """Asks a task to end; its end is reported as usual. Unknown attempts are ignored."""

    def trigger_checkpoint(self, attempt: ExecutionAttemptId, barrier: CheckpointBarrier) -> None:
        """Lets a task begin a checkpoint if no upstream task will send it the barrier.

        The task acknowledges or declines it.
        """

    def notify_checkpoint_complete(self, job_id: str, checkpoint_id: int) -> None:
        """Tells every task of the job that checkpoint `checkpoint_id` and all before it are
        durable.
        """

    def notify_checkpoint_aborted(
        self, job_id: str, checkpoint_id: int, latest_completed: int | None
    ) -> None:
        """Tells tasks that a checkpoint will not complete.

        `latest_completed`: the last that did.
        """

    def stop_sources(self, job_id: str, *, drain: bool) -> None:
        """Ends the sources of a job where they are; with `drain` event time ends with them."""

    def limit_source(self, attempt: ExecutionAttemptId, watermark: int) -> None:
        """Lets a source begin, and read while its event time is at most `watermark`.

        MAX_WATERMARK is no limit.
        """

    async def add_splits(self, attempt: ExecutionAttemptId, splits: Sequence[Split]) -> None:
        """Sends more splits to a running source, which ignores those that it has already.

        Raises if they may not have arrived: then send them again.
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
        """All state of a subtask is written."""

    def decline_checkpoint(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        reason: str,
        error: BaseException | None,
    ) -> None:
        """A subtask takes no part in a checkpoint.

        `reason`: name of a `CheckpointFailureReason`.
        """

    def end_of_data_reached(self, attempt: ExecutionAttemptId) -> None:
        """The subtask has processed every record.

        It ends after the completion of a checkpoint that it takes from now on.
        """

    def ask_producer(
        self, attempt: ExecutionAttemptId, answer: Callable[[ProducerState], None]
    ) -> None:
        """Calls `answer` with the state of a producer whose partition is missing.

        A consumer whose partition is missing must know whether to ask again. After
        Flink's requestPartitionProducerState.
        """

    def report_progress(self, attempt: ExecutionAttemptId, watermark: int) -> None:
        """Reports the event time that a source has reached, for sources aligned with it.

        An operator that reads one input first reports MAX_WATERMARK once that input is read.
        """


class WorkerProvider(Protocol):
    """Starts workers for a ResourceManager, if workers do not come by themselves.

    Each worker registers like any TaskManager, under an unused id. A worker that will not register
    is reported as failed. Only the ResourceManager decides which workers are started instead. So
    there is one restart policy for all kinds of machines. The methods run on the ResourceManager's
    loop and must not block.
    """

    @property
    def workers(self) -> int:
        """Number of workers that should run at any time."""

    @property
    def slots(self) -> int:
        """Number of slots of each worker."""

    def start_workers(self, count: int, failed: Callable[[], object]) -> None:
        """Begins to start `count` workers.

        `failed` is called once for each worker that will not register. It is safe to call from any
        thread.
        """

    def registered(self, worker_id: str) -> None:
        """Notes that this worker has registered."""

    def lost(self, worker_id: str, reason: str) -> Broken | None:
        """Notes that this worker is lost.

        It may still run: end it to make room for its replacement. Returns the error of the tasks
        that ran there, if the provider can say more than `reason`.
        """
