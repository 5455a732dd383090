"""The reasons why a checkpoint fails, and how many failures a job tolerates.

Tasks, coordinator and statistics share the list of reasons. After Flink's CheckpointFailureReason
and CheckpointFailureManager.
"""

from __future__ import annotations

from enum import StrEnum

from aioflow.core.errors import CheckpointError

__all__ = ["CheckpointFailureReason", "FailureCounter"]


class CheckpointFailureReason(StrEnum):
    """The reason why a checkpoint failed.

    The value equals the name, and is sent with a decline. `sentence` is the text for people.
    """

    # Reported by tasks.
    DECLINED = "DECLINED"
    ASYNC_EXCEPTION = "ASYNC_EXCEPTION"
    TASK_NOT_READY = "TASK_NOT_READY"
    TASK_CLOSING = "TASK_CLOSING"
    DECLINED_SUBSUMED = "DECLINED_SUBSUMED"
    CANCELLATION_BARRIER = "CANCELLATION_BARRIER"
    INPUT_END_OF_STREAM = "INPUT_END_OF_STREAM"
    ABORT_NOTIFIED = "ABORT_NOTIFIED"

    # Found by the coordinator.
    EXPIRED = "EXPIRED"
    IO_EXCEPTION = "IO_EXCEPTION"
    SUBSUMED = "SUBSUMED"
    FILES_DELETED = "FILES_DELETED"
    TASK_FAILURE = "TASK_FAILURE"
    NOT_ALL_TASKS_RUNNING = "NOT_ALL_TASKS_RUNNING"
    ALL_TASKS_FINISHED = "ALL_TASKS_FINISHED"
    TOO_MANY_REQUESTS = "TOO_MANY_REQUESTS"
    SHUTDOWN = "SHUTDOWN"

    @property
    def sentence(self) -> str:
        """The reason in words, as a part of a message."""
        return _SENTENCES[self]

    @property
    def counts(self) -> bool:
        """Whether a failure for this reason counts towards `tolerable_failures`.

        Failures for other reasons have consequences of their own.
        """
        return self in _COUNTED


_COUNTED = frozenset(
    {
        CheckpointFailureReason.DECLINED,
        CheckpointFailureReason.ASYNC_EXCEPTION,
        CheckpointFailureReason.EXPIRED,
        CheckpointFailureReason.IO_EXCEPTION,
    }
)

_SENTENCES = {
    CheckpointFailureReason.DECLINED: "a task could not take its snapshot",
    CheckpointFailureReason.ASYNC_EXCEPTION: "a task could not write its snapshot",
    CheckpointFailureReason.TASK_NOT_READY: "a task was not running yet",
    CheckpointFailureReason.TASK_CLOSING: "a task was ending",
    CheckpointFailureReason.DECLINED_SUBSUMED: (
        "the barrier of a newer checkpoint came before all of its own had"
    ),
    CheckpointFailureReason.CANCELLATION_BARRIER: "a task upstream cancelled it",
    CheckpointFailureReason.INPUT_END_OF_STREAM: "an input ended during the alignment",
    CheckpointFailureReason.ABORT_NOTIFIED: "the coordinator had aborted it",
    CheckpointFailureReason.EXPIRED: "it was not complete within the timeout",
    CheckpointFailureReason.IO_EXCEPTION: "it could not be stored",
    CheckpointFailureReason.SUBSUMED: "a newer one completed first",
    CheckpointFailureReason.FILES_DELETED: (
        "a task did not know yet that what it built on was subsumed, and files of that are deleted"
    ),
    CheckpointFailureReason.TASK_FAILURE: (
        "a task failed or was cancelled, and the job goes back to its last checkpoint"
    ),
    CheckpointFailureReason.NOT_ALL_TASKS_RUNNING: "not all tasks that it needs are running",
    CheckpointFailureReason.ALL_TASKS_FINISHED: (
        "all tasks have finished, so nothing is left to take one of"
    ),
    CheckpointFailureReason.TOO_MANY_REQUESTS: (
        "too many checkpoints and savepoints were asked for before"
    ),
    CheckpointFailureReason.SHUTDOWN: "the job is over",
}


class FailureCounter:
    """Counts the checkpoints that failed since the last success.

    `tolerable` failures in a row are tolerated, any number if None.
    """

    def __init__(self, tolerable: int | None) -> None:
        self._tolerable = tolerable
        self._failed: dict[int, None] = {}
        self._succeeded = 0

    def failed(self, checkpoint_id: int, error: CheckpointError) -> CheckpointError | None:
        """Counts the failure of a checkpoint.

        Returns the error that fails the job if there are now too many failures, otherwise None.
        """
        if self._tolerable is None or checkpoint_id <= self._succeeded:
            return None
        self._failed[checkpoint_id] = None
        if len(self._failed) <= self._tolerable:
            return None
        count = len(self._failed)
        self._failed.clear()
        too_many = CheckpointError(
            f"{count} checkpoints failed in a row, {self._tolerable} are tolerated; the last one: "
            f"{error}"
        )
        too_many.__cause__ = error
        return too_many

    def succeeded(self, checkpoint_id: int) -> None:
        """Notes that a checkpoint completed: earlier failures no longer count."""
        if checkpoint_id > self._succeeded:
            self._succeeded = checkpoint_id
            self._failed.clear()
