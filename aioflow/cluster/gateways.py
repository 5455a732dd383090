"""Who may ask whom for what: the seams between the roles.

In one process they are direct calls, between processes RPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from aioflow.checkpoint.subtask import CheckpointStats, SubtaskState
    from aioflow.core.elements import CheckpointBarrier, RecordBatch
    from aioflow.core.ids import TapPlace
    from aioflow.graph.deployment import (
        ExecutionAttemptId,
        ExecutionState,
        TaskDeploymentDescriptor,
    )
    from aioflow.operators.source import Split

__all__ = ["JobMasterGateway", "OnMissed", "TapGateway", "TaskExecutorGateway"]

OnMissed = Callable[[int, Exception | None], None]
"""Tells a watcher how many records went by unseen, or why none can be seen at all."""


class TapGateway(Protocol):
    """Where what operators emit can be seen."""

    def add_tap(
        self,
        job_id: str,
        place: TapPlace,
        tap: Callable[[RecordBatch], None],
        on_missed: OnMissed | None = None,
    ) -> Sequence[asyncio.Future[None]]:
        """Let `tap` see what `place` emits, in every subtask, now and after a restart.

        With `on_missed` records may go by while the way to `tap` is full. Here it sees them at
        once; in other processes that run tasks now once what is returned is done, as it is when
        they are gone.
        """

    def remove_tap(
        self, job_id: str, place: TapPlace, tap: Callable[[RecordBatch], None]
    ) -> None: ...


class TaskExecutorGateway(TapGateway, Protocol):
    """What a JobMaster asks a worker for.

    `fencing_token` is the JobMaster's; a stale one is refused.
    """

    def submit_task(self, descriptor: TaskDeploymentDescriptor, fencing_token: str) -> None:
        """Deploy and start. Raises if the token is stale or the attempt is known already."""

    def cancel_task(self, attempt: ExecutionAttemptId) -> None:
        """Ask a task to end; its end is reported as usual. Unknown attempts are ignored."""

    def trigger_checkpoint(self, attempt: ExecutionAttemptId, barrier: CheckpointBarrier) -> None:
        """Let a task begin a checkpoint, because no task upstream will send it the barrier.

        It is acknowledged or declined.
        """

    def notify_checkpoint_complete(self, job_id: str, checkpoint_id: int) -> None:
        """Checkpoint `checkpoint_id` and all before it are durable: every task of the job hears
        of it.
        """

    def notify_checkpoint_aborted(
        self, job_id: str, checkpoint_id: int, latest_completed: int | None
    ) -> None:
        """Checkpoint `checkpoint_id` will not complete; `latest_completed` has, if any."""

    def stop_sources(self, job_id: str, *, drain: bool) -> None:
        """End the sources of a job where they are; with `drain` event time ends with them."""

    async def add_splits(self, attempt: ExecutionAttemptId, splits: Sequence[Split]) -> None:
        """More splits for a source that runs; those it has it ignores.

        Raises when they may not have arrived: then send them again.
        """

    async def query_state(
        self, attempt: ExecutionAttemptId, node_id: int, query: Callable[[Any], Any]
    ) -> Any:
        """Run `query(keyed backend)` between two slices of the task and return what it gives."""


class JobMasterGateway(Protocol):
    """What a worker tells a JobMaster."""

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
        """Every record is processed; the subtask waits for a checkpoint that it takes from now
        on to complete, then it ends.
        """
