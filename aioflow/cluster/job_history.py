"""The history of a job for monitoring, and the report about the job that its submitter reads.

The history holds attempts with the times of their states, and failures. It is plain data that only
the JobMaster changes. Its size is bounded: it keeps the latest attempts of each subtask and the
latest failures of the job. Errors are kept as text, because an exception object keeps the frames of
user code alive. Secrets are removed once, when a failure is recorded. Times are wall-clock ms.

The JobManager sends the report as plain msgpack data, in the same form as the statistics. The
submitter asks once a second, and only while the job is being watched. Otherwise monitoring a job
costs nothing.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from aioflow.checkpoint.statistics import (
    CheckpointCounts,
    CheckpointRecord,
    CheckpointStatistics,
    LatestCheckpoints,
)
from aioflow.core.errors import RemoteError, RemoteProtocolError, message_of
from aioflow.core.user_code import format_folded
from aioflow.graph.deployment import ExecutionAttemptId, ExecutionState
from aioflow.inspection.redaction import redacted

__all__ = [
    "AttemptRecord",
    "CheckpointsReport",
    "FailureRecord",
    "JobHistory",
    "JobReport",
    "WorkerReport",
    "decode_report",
    "encode_report",
    "statistics_of",
    "status_of",
]

ATTEMPTS_MAX = 16
"""Maximum number of attempts that are kept of each subtask; Flink's
`cluster.max-attempts-history-size`."""

FAILURES_MAX = 16
"""Maximum number of failures that are kept of each job; Flink's `web.exception-history-size`."""

CONCURRENT_MAX = 100
"""Maximum number of concurrent failures that are kept with one failure, because all tasks of a
large job may fail for the same reason."""

TEXT_CHARACTERS_MAX = 32_768
"""Maximum number of characters that are kept of each message, note and stack."""

LOST = "the task is gone without an error"


@dataclass(slots=True)
class AttemptRecord:
    """The record of one attempt of a subtask."""

    attempt: int
    state: ExecutionState
    location: str
    """Location where the attempt runs, as `host:port`; empty in a cluster of one."""
    times_ms: dict[ExecutionState, int]
    """Time at which the attempt reached each state, in wall-clock ms."""


@dataclass(slots=True)
class FailureRecord:
    """The record of one failure.

    `concurrent` holds the tasks that failed while the job was already ending because of this
    failure.
    """

    name: str
    message: str
    stack: str
    notes: tuple[str, ...]
    """Notes of the engine: operator, subtask and record."""
    timestamp_ms: int
    attempt: ExecutionAttemptId | None
    """Attempt of the task that failed; None if the job as a whole failed."""
    location: str
    concurrent: list[FailureRecord] = field(default_factory=list)
    is_consequence: bool = False
    """Whether the task ended CANCELED without a request.

    The failure of another task caused this end, and replaces this entry.
    """


class JobHistory:
    """The attempts and failures of a job. `attempts` holds the attempts of each (vertex id,
    subtask), oldest first; `failures` are oldest first."""

    def __init__(self) -> None:
        self.attempts: dict[tuple[int, int], deque[AttemptRecord]] = {}
        self.failures: deque[FailureRecord] = deque(maxlen=FAILURES_MAX)
        self.failures_total = 0
        self._status: str | None = None
        self._status_since_ms = 0
        self._spent_ms: dict[str, int] = {}

    def status(self, name: str, now_ms: int) -> bool:
        """Notes that the job has been in status `name` since `now_ms`. Returns whether the status
        changed."""
        if name == self._status:
            return False
        if self._status is not None:
            self._spent_ms[self._status] = self.time_in(self._status, now_ms)[1]
        self._status, self._status_since_ms = name, now_ms
        return True

    def time_in(self, name: str, now_ms: int) -> tuple[int, int]:
        """Returns how long the job has been in status `name`, in ms: the present stay (0 if it has
        left the status), and the total.
        """
        here = max(now_ms - self._status_since_ms, 0) if name == self._status else 0
        return here, self._spent_ms.get(name, 0) + here

    def task(
        self, attempt: ExecutionAttemptId, state: ExecutionState, now_ms: int, location: str
    ) -> None:
        """Records the new state of a task.

        A report that comes after the end or the cancellation of the task changes nothing.
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
        if state is ExecutionState.SCHEDULED:  # Its deployment waits: there was no slot.
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
        """Records the failure of a task, or of the job if `attempt` is None.

        `is_root` tells that the job was not already ending because of another failure.
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
        """Returns the newest attempt of a subtask; None before it was deployed."""
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
    """Formats the stack of an error as Python does. An error from another process contains the text
    of its stack."""
    told = error.traceback_text if isinstance(error, RemoteError) else ""
    return redacted(told or format_folded(error), TEXT_CHARACTERS_MAX)


STATUS = "Status."
"""Prefix of the metrics of a process."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The report of a process that runs tasks of a job, other than the program itself."""

    id: str
    slots: int
    free_slots: int
    silence_ms: int
    location: str
    """Location where the tasks of this job run in the process; empty if it has none."""
    status: dict[str, float] = field(default_factory=dict)
    """The status metrics that the process last reported, by name."""


@dataclass(frozen=True, slots=True)
class CheckpointsReport:
    """The checkpoint statistics of a job; `records` are newest last."""

    counts: CheckpointCounts
    latest: LatestCheckpoints
    records: list[CheckpointRecord]


@dataclass(frozen=True, slots=True)
class AttemptsReport:
    """The attempts of one subtask, oldest first."""

    vertex_id: int
    subtask: int
    attempts: list[AttemptRecord]


@dataclass(frozen=True, slots=True)
class JobReport:
    """The complete current details of a job."""

    attempts: list[AttemptsReport]
    failures: list[FailureRecord]
    failures_total: int
    checkpoints: CheckpointsReport | None
    workers: list[WorkerReport]

    def put_into(self, history: JobHistory) -> None:
        """Replaces the attempts and failures in `history` by the attempts and failures of this
        report."""
        history.attempts = {
            (one.vertex_id, one.subtask): deque(one.attempts, maxlen=ATTEMPTS_MAX)
            for one in self.attempts
        }
        history.failures.clear()
        history.failures.extend(self.failures)
        history.failures_total = self.failures_total


def encode_report(
    history: JobHistory, statistics: CheckpointStatistics | None, workers: list[WorkerReport]
) -> bytes:
    """Encodes the details of a job. `statistics` is None for a job without checkpoints."""
    checkpoints = None
    if statistics is not None:
        checkpoints = CheckpointsReport(
            statistics.counts, statistics.latest, list(reversed(statistics.history))
        )
    attempts = [
        AttemptsReport(*place, list(records)) for place, records in history.attempts.items()
    ]
    return msgspec.msgpack.encode(
        JobReport(attempts, list(history.failures), history.failures_total, checkpoints, workers)
    )


def decode_report(content: bytes) -> JobReport:
    """Decodes the details of a job. Raises RemoteProtocolError if another version of aioflow
    encoded them."""
    try:
        return msgspec.msgpack.decode(content, type=JobReport)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(
            f"the JobManager's report of a job cannot be decoded: {error}"
        ) from error


def status_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of a process itself, which are the first entries of `metrics`, before the
    metrics of its tasks."""
    return dict(itertools.takewhile(lambda entry: entry[0].startswith(STATUS), metrics.items()))


def statistics_of(report: CheckpointsReport) -> CheckpointStatistics:
    """Converts a report to `CheckpointStatistics`, as a job in this process keeps them."""
    made = CheckpointStatistics(())
    made.adopt(report.counts, report.latest, report.records)
    return made
