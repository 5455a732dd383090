"""Why a checkpoint did not complete: one list for tasks, coordinator and statistics. After Flink's CheckpointFailureReason."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["CheckpointFailureReason"]


class CheckpointFailureReason(StrEnum):
    """The name travels in a decline, the value is the sentence that people read. Equal to its value as a plain string."""

    # Told by tasks.
    DECLINED = "the task could not take its snapshot"
    ASYNC_EXCEPTION = "the task could not write its snapshot"
    TASK_NOT_READY = "the task was not running yet"
    TASK_CLOSING = "the task was ending"
    DECLINED_SUBSUMED = "the barrier of a newer checkpoint arrived before all of its own had"
    CANCELLATION_BARRIER = "a task upstream cancelled it"
    INPUT_END_OF_STREAM = "an input ended during the alignment"
    ABORT_NOTIFIED = "the coordinator had aborted it"

    # Found by the coordinator.
    EXPIRED = "it was not complete within the timeout"
    IO_EXCEPTION = "it could not be stored"
    SUBSUMED = "a newer one completed first"
    TASK_FAILURE = "a task that it needs failed, or was cancelled"
    NOT_ALL_TASKS_RUNNING = "not all tasks that it needs are running"
    ALL_TASKS_FINISHED = "all tasks have finished: there is nothing left to take a checkpoint of"
    TOO_MANY_REQUESTS = "too many checkpoints and savepoints were asked for already"
    COORDINATOR_SHUTDOWN = "the job is over"
    COORDINATOR_SUSPENDED = "the leader of the job changed"

    @property
    def counts(self) -> bool:
        """Whether only so many of it in a row are tolerated. The others are consequences of something that is dealt with elsewhere."""
        return self in _COUNTED


_COUNTED = frozenset(
    {
        CheckpointFailureReason.DECLINED,
        CheckpointFailureReason.ASYNC_EXCEPTION,
        CheckpointFailureReason.EXPIRED,
        CheckpointFailureReason.IO_EXCEPTION,
    }
)
