"""What happened to the tasks of a job and why, for those who watch it: attempts with the times of
their states, and failures.

Plain data, changed by the JobMaster alone, read between two of its stimuli. Bounded: of each
subtask the latest attempts are kept, of the job the latest failures. Errors are kept as text,
because an error that is held holds the frames of user code. Secrets are taken out once, when a
failure is recorded. Times are wall-clock ms.
"""

from __future__ import annotations

import traceback
from collections import deque
from dataclasses import dataclass, field

from aioflow.core.errors import RemoteError, message_of
from aioflow.graph.deployment import ExecutionAttemptId, ExecutionState
from aioflow.inspection.redaction import redacted

__all__ = ["AttemptRecord", "FailureRecord", "JobHistory"]

ATTEMPTS_MAX = 16
"""Kept of each subtask; Flink's `cluster.max-attempts-history-size`."""

FAILURES_MAX = 16
"""Kept of each job; Flink's `web.exception-history-size`."""

CONCURRENT_MAX = 100
"""Kept of those that came with a failure: every task of a large job may fail for one reason."""

TEXT_CHARACTERS_MAX = 32_768
"""Kept of each message, note and stack."""

LOST = "the task is gone, and nobody said why"


@dataclass(slots=True)
class AttemptRecord:
    """One attempt of a subtask."""

    attempt: int
    state: ExecutionState
    location: str
    """Where it runs: `host:port`, empty in a cluster of one."""
    times_ms: dict[ExecutionState, int]
    """When it reached each state."""


@dataclass(slots=True)
class FailureRecord:
    """Something that failed; `concurrent` are the tasks that failed while the job was ending for
    it already.
    """

    name: str
    message: str
    stack: str
    notes: tuple[str, ...]
    """What the engine knows: operator, subtask and record."""
    timestamp_ms: int
    attempt: ExecutionAttemptId | None
    """None: the job as a whole."""
    location: str
    concurrent: list[FailureRecord] = field(default_factory=list)
    is_consequence: bool = False
    """Whether it comes from a task that ended CANCELED unasked.

    The failure that caused it takes its place.
    """


class JobHistory:
    """`attempts` by vertex and subtask, oldest first; `failures` oldest first."""

    def __init__(self) -> None:
        self.attempts: dict[tuple[int, int], deque[AttemptRecord]] = {}
        self.failures: deque[FailureRecord] = deque(maxlen=FAILURES_MAX)
        self.failures_total = 0
        self._status: str | None = None
        self._status_since_ms = 0
        self._spent_ms: dict[str, int] = {}

    def status(self, name: str, now_ms: int) -> bool:
        """The job is in this state from now on, or still is. Whether it was in another one."""
        if name == self._status:
            return False
        if self._status is not None:
            self._spent_ms[self._status] = self.time_in(self._status, now_ms)[1]
        self._status, self._status_since_ms = name, now_ms
        return True

    def time_in(self, name: str, now_ms: int) -> tuple[int, int]:
        """(ms that the job is in a state now, ms that it ever was)."""
        here = max(now_ms - self._status_since_ms, 0) if name == self._status else 0
        return here, self._spent_ms.get(name, 0) + here

    def task(
        self, attempt: ExecutionAttemptId, state: ExecutionState, now_ms: int, location: str
    ) -> None:
        """A task is in another state.

        What comes too late, behind its end or its cancelling, changes nothing.
        """
        records = self.attempts.setdefault(
            (attempt.vertex_id, attempt.subtask_index), deque(maxlen=ATTEMPTS_MAX)
        )
        known = next((record for record in records if record.attempt == attempt.attempt), None)
        if known is None:
            records.append(
                AttemptRecord(
                    attempt.attempt,
                    state,
                    location,
                    {ExecutionState.CREATED: now_ms, state: now_ms},
                )
            )
            return
        if known.state.is_terminal or (
            known.state is ExecutionState.CANCELING and not state.is_terminal
        ):
            return
        if state is ExecutionState.SCHEDULED:  # It was to be deployed, and there was no slot.
            known.times_ms.pop(ExecutionState.DEPLOYING, None)
        known.state = state
        known.location = location or known.location
        known.times_ms.setdefault(state, now_ms)

    def failed(
        self,
        error: BaseException | None,
        now_ms: int,
        attempt: ExecutionAttemptId | None,
        location: str,
        *,
        is_root: bool,
        is_consequence: bool = False,
    ) -> None:
        """A task, or the job (`attempt` None), failed.

        `is_root`: not while the job was ending for another failure.
        """
        record = FailureRecord(
            name="" if error is None else _name(error),
            message=LOST if error is None else redacted(message_of(error), TEXT_CHARACTERS_MAX),
            stack=LOST if error is None else _stack(error),
            notes=tuple(
                redacted(note.removeprefix("aioflow: "), TEXT_CHARACTERS_MAX)
                for note in getattr(error, "__notes__", ())
            ),
            timestamp_ms=now_ms,
            attempt=attempt,
            location=location,
            is_consequence=is_consequence,
        )
        if is_root and self.failures and self.failures[-1].is_consequence:
            self.failures[-1] = record
        elif is_root or not self.failures:
            self.failures_total += 1
            self.failures.append(record)
        elif len(self.failures[-1].concurrent) < CONCURRENT_MAX:
            self.failures[-1].concurrent.append(record)

    def latest(self, subtask: tuple[int, int]) -> AttemptRecord | None:
        """The newest attempt of a subtask; None before it was deployed."""
        records = self.attempts.get(subtask)
        return records[-1] if records else None


def _name(error: BaseException) -> str:
    if isinstance(error, RemoteError):
        return error.type_name
    kind = type(error)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _stack(error: BaseException) -> str:
    """As Python prints it; of an error of another process, as it was printed there."""
    told = error.traceback_text if isinstance(error, RemoteError) else ""
    return redacted(told or "".join(traceback.format_exception(error)), TEXT_CHARACTERS_MAX)
