"""The options of the checkpoint coordinator, its two clocks, and the instructions that it
returns.

`CheckpointFailureReason` lists the reasons why a checkpoint may fail, for tasks, coordinator and
statistics. `FailureCounter` counts the failures, of which a job tolerates a limited number.
`InOrder` carries out instructions. The design follows Flink's CheckpointFailureReason and
CheckpointFailureManager.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from aioflow.checkpoint.completed import CompletedCheckpoint, Discard
from aioflow.core.elements import CheckpointBarrier
from aioflow.core.errors import CheckpointError
from aioflow.core.scope import ExecutionAttemptId, enter_scope, leave_scope

__all__ = [
    "LATEST",
    "Answer",
    "CheckpointFailureReason",
    "CheckpointSettings",
    "CoordinatorOptions",
    "Discard",
    "FailJob",
    "FailureCounter",
    "InOrder",
    "Instruction",
    "Moment",
    "NotifyAborted",
    "NotifyComplete",
    "Store",
    "Trigger",
    "WakeAt",
    "WarnBehind",
]

T = TypeVar("T")


class CheckpointFailureReason(StrEnum):
    """The reason why a checkpoint failed.

    The value of a member equals its name, and is sent with a decline. `sentence` is the text for
    people.
    """

    # Reported by tasks.
    DECLINED = "DECLINED"
    ASYNC_EXCEPTION = "ASYNC_EXCEPTION"
    TASK_NOT_READY = "TASK_NOT_READY"
    TASK_CLOSING = "TASK_CLOSING"
    DECLINED_SUBSUMED = "DECLINED_SUBSUMED"
    CANCELLATION_BARRIER = "CANCELLATION_BARRIER"
    ABORT_NOTIFIED = "ABORT_NOTIFIED"
    CALLS_GO_ON = "CALLS_GO_ON"

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
        """The reason in words, as a part of an error message."""
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
    CheckpointFailureReason.ABORT_NOTIFIED: "the coordinator had aborted it",
    CheckpointFailureReason.CALLS_GO_ON: (
        "a task could not be stopped in time, because of a call in a thread"
    ),
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

    `tolerable` is the number of failures in a row that the job tolerates; None means any number.
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


class Moment(msgspec.Struct, frozen=True):
    """The current time on both clocks.

    Durations are measured with the monotonic clock; timestamps for other processes are wall-clock.
    """

    s: float
    """Seconds of the monotonic clock."""
    ms: int
    """Milliseconds of the wall clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions:
    """Options of the checkpoints of a job."""

    interval_ms: int | None = None
    """Time from trigger to trigger. None: checkpoints only on request, and at the end."""
    timeout_ms: int = 600_000
    """Maximum time from the trigger until the checkpoint is durable."""
    min_pause_ms: int = 0
    """Minimum time from the last completion to the next periodic trigger."""
    max_concurrent: int = 1
    """Maximum number of checkpoints under way at a time, savepoints included."""
    retain: int = 1
    tolerable_failures: int | None = None
    """Number of failures in a row that are tolerated; one more fails the job. None: any number."""
    unaligned: bool = False
    aligned_timeout_ms: int | None = None
    """With `unaligned`: time after the trigger at which an aligned checkpoint becomes unaligned.
    None: checkpoints are unaligned from the start.
    """

    def __post_init__(self) -> None:
        for name, least in (
            ("interval_ms", 1),
            ("timeout_ms", 1),
            ("min_pause_ms", 0),
            ("max_concurrent", 1),
            ("tolerable_failures", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}, expected at least {least}")
        if self.max_concurrent > 1 and (self.unaligned or self.aligned_timeout_ms is not None):
            raise ValueError(
                f"max_concurrent is {self.max_concurrent}, expected 1: unaligned checkpoints are "
                "taken one at a time"
            )


class Trigger(msgspec.Struct, frozen=True):
    """Instruction to send `barrier` to `attempts`.

    An attempt that cannot be reached counts as one that declined the checkpoint.
    """

    barrier: CheckpointBarrier
    attempts: tuple[ExecutionAttemptId, ...]


class Store(msgspec.Struct, frozen=True):
    """Instruction to store `checkpoint` durably, metadata last, and then to call `stored` or
    `not_stored`.
    """

    checkpoint: CompletedCheckpoint


class NotifyComplete(msgspec.Struct, frozen=True):
    """Instruction to tell every running task that the checkpoint is durable.

    Sinks then commit everything that was prepared up to this checkpoint. The instruction may be
    repeated.
    """

    checkpoint_id: int


class NotifyAborted(msgspec.Struct, frozen=True):
    """Instruction to tell every running task that the checkpoint was aborted.

    `latest_completed` is the newest checkpoint that sinks may commit up to, 0 if there is none.
    `detail` is the error in words, for the log.
    """

    checkpoint_id: int
    latest_completed: int
    reason: CheckpointFailureReason
    detail: str = ""


class FailJob(msgspec.Struct, frozen=True):
    """Instruction to fail the job as the error of a task would fail it.

    The job restarts from the last completed checkpoint, if its restart policy allows.
    """

    error: CheckpointError
    for_good: bool = False
    """Whether the job must not restart, because the error would occur again."""


class Answer(msgspec.Struct, frozen=True):
    """Instruction to answer request `number` with `checkpoint` or `error`."""

    number: int
    checkpoint: CompletedCheckpoint | None = None
    error: CheckpointError | None = None


class WakeAt(msgspec.Struct, frozen=True):
    """Instruction to call `tick` at a time of the monotonic clock. This instruction replaces the
    previous `WakeAt`.

    If the time is None, no call of `tick` is needed until another event happens.
    """

    at_s: float | None


class WarnBehind(msgspec.Struct, frozen=True):
    """Instruction to warn that checkpoint `checkpoint_id` is late: it is `age_ms` old.

    `waits_for` names the tasks that have not acknowledged the checkpoint. `attempt` is the first of
    these tasks, which can be asked what it waits for. `attempt` is None if all tasks have
    acknowledged, and the checkpoint is being written to the store.
    """

    checkpoint_id: int
    age_ms: int
    interval_ms: int
    waits_for: str
    attempt: ExecutionAttemptId | None = None


Instruction = (
    Trigger
    | Store
    | NotifyComplete
    | NotifyAborted
    | Discard
    | FailJob
    | Answer
    | WakeAt
    | WarnBehind
)


LATEST = "latest"
"""Value of `restore` that means the newest completed checkpoint or savepoint of the flow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """The checkpoint settings of one job.

    Times are in ms. URLs are complete: a local directory is `file:///...`.
    """

    store: str | None
    """URL of the store, which holds many flows.

    None: the job takes no checkpoints and can only start from the savepoint `restore`.
    """
    every_ms: int = 10_000
    unaligned: bool = False
    """Whether a checkpoint is unaligned from its start."""
    aligned_timeout_ms: int | None = None
    """A checkpoint becomes unaligned if a barrier has been under way for longer than this time;
    None: never."""
    timeout_ms: int = 600_000
    min_pause_ms: int = 0
    max_concurrent: int = 1
    retain: int = 1
    tolerable_failures: int | None = None
    """Number of failed checkpoints in a row that the job tolerates; None: any number."""
    restore: str | None = LATEST
    """Origin of the state: `LATEST`, the URL of a savepoint, or None to begin without state."""
    fresh: bool = False
    allow_non_restored: bool = False
    key: bytes | None = field(default=None, repr=False)
    """Key of the MAC of metadata.

    None: metadata has no MAC, so anyone who can write to the store can change it.
    """


class InOrder(Generic[T]):
    """Carries out instructions by `do`, in order.

    `do` may itself cause further instructions, for example after a failed deployment. These are
    queued behind all others.
    """

    __slots__ = ("_do", "_is_running", "_waiting")

    def __init__(self, do: Callable[[T], None]) -> None:
        self._do = do
        self._waiting: deque[T] = deque()
        self._is_running = False

    def carry_out(self, instructions: Iterable[T]) -> None:
        """Carries out `instructions`. If another call is carrying out instructions already, queues
        them for this call."""
        self._waiting.extend(instructions)
        if self._is_running:
            return
        self._is_running = True
        token = enter_scope(None)  # In one process, the caller may be a task.
        try:
            while self._waiting:
                self._do(self._waiting.popleft())
        finally:
            leave_scope(token)
            self._is_running = False
