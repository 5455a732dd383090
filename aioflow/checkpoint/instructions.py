"""The options of the checkpoint coordinator, its two clocks, and the instructions that it
returns.
"""

from __future__ import annotations

from dataclasses import dataclass

from aioflow.checkpoint.completed import CompletedCheckpoint, Discard
from aioflow.checkpoint.failure import CheckpointFailureReason
from aioflow.core.elements import CheckpointBarrier
from aioflow.core.errors import CheckpointError
from aioflow.core.ids import ExecutionAttemptId

__all__ = [
    "Answer",
    "CoordinatorOptions",
    "Discard",
    "FailJob",
    "Instruction",
    "Moment",
    "NotifyAborted",
    "NotifyComplete",
    "Store",
    "Trigger",
    "WakeAt",
    "WarnBehind",
]


@dataclass(frozen=True, slots=True)
class Moment:
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
    """Number of checkpoints under way at a time, savepoints included."""
    retain: int = 1
    tolerable_failures: int | None = None
    """Number of failures in a row that are tolerated; one more fails the job. None: any number."""
    unaligned: bool = False
    aligned_timeout_ms: int | None = None
    """With `unaligned`: time after the trigger when an aligned checkpoint becomes unaligned. None:
    checkpoints are unaligned from the start.
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


@dataclass(frozen=True, slots=True)
class Trigger:
    """Instruction to send `barrier` to `attempts`.

    An attempt that cannot be reached counts as one that declined the checkpoint.
    """

    barrier: CheckpointBarrier
    attempts: tuple[ExecutionAttemptId, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Instruction to store `checkpoint` durably, metadata last, and to report `stored` or
    `not_stored`.
    """

    checkpoint: CompletedCheckpoint


@dataclass(frozen=True, slots=True)
class NotifyComplete:
    """Instruction to tell every running task that the checkpoint is durable.

    Sinks then commit everything that was prepared up to it. The instruction may be repeated.
    """

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class NotifyAborted:
    """Instruction to tell every running task that the checkpoint was aborted.

    `latest_completed` is the newest checkpoint that sinks may commit up to, 0 if there is none.
    """

    checkpoint_id: int
    latest_completed: int
    reason: CheckpointFailureReason


@dataclass(frozen=True, slots=True)
class FailJob:
    """Instruction to fail the job as a task's error would.

    The job restarts from the last completed checkpoint, if its restart policy allows.
    """

    error: CheckpointError
    for_good: bool = False
    """Whether the job must not restart, because the error would occur again."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Instruction to answer request `number` with `checkpoint` or `error`."""

    number: int
    checkpoint: CompletedCheckpoint | None = None
    error: CheckpointError | None = None


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Instruction to call `tick` at a time of the monotonic clock. It replaces the previous
    `WakeAt`.

    None: no call is needed until something else happens.
    """

    at_s: float | None


@dataclass(frozen=True, slots=True)
class WarnBehind:
    """Instruction to warn that checkpoint `checkpoint_id` is late: it is `age_ms` old.

    `waits_for` names the tasks that have not acknowledged it.
    """

    checkpoint_id: int
    age_ms: int
    interval_ms: int
    waits_for: str


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
