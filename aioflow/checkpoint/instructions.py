"""The interface of the checkpoint coordinator as data: its options, the two clocks, its
instructions.
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
    """Now, by both clocks: durations are measured on the first, timestamps for others come from
    the second.
    """

    s: float
    """Monotonic."""
    ms: int
    """Wall clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions:
    """How checkpoints are taken."""

    interval_ms: int | None = None
    """From trigger to trigger. None: only when asked for, and at the end."""
    timeout_ms: int = 600_000
    """From trigger to durable."""
    min_pause_ms: int = 0
    """From the last completion to the next one that the interval triggers."""
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
    """The instruction to send `barrier` to `attempts`.

    An attempt that cannot be reached counts as one that declined the checkpoint.
    """

    barrier: CheckpointBarrier
    attempts: tuple[ExecutionAttemptId, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Make it durable, metadata last; report `stored` or `not_stored`."""

    checkpoint: CompletedCheckpoint


@dataclass(frozen=True, slots=True)
class NotifyComplete:
    """Tell every running task: it is durable, commit everything that was prepared up to it.

    It may be repeated.
    """

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class NotifyAborted:
    """Tell every running task.

    `latest_completed` is the newest that sinks may commit up to, 0: none.
    """

    checkpoint_id: int
    latest_completed: int
    reason: CheckpointFailureReason


@dataclass(frozen=True, slots=True)
class FailJob:
    """Fail the job as a task's error would: it restarts from the last completed checkpoint, if
    its policy allows.
    """

    error: CheckpointError
    for_good: bool = False
    """No restart can help."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to request `number`: either `checkpoint` or `error`."""

    number: int
    checkpoint: CompletedCheckpoint | None = None
    error: CheckpointError | None = None


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Call `tick` at this monotonic time; it replaces the one before.

    None: time alone changes nothing.
    """

    at_s: float | None


@dataclass(frozen=True, slots=True)
class WarnBehind:
    """Warn that checkpoint `checkpoint_id` falls behind: it is `age_ms` old.

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
