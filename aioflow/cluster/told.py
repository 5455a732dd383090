"""What a JobManager tells the process that submitted a job, when that shows the job to others: its
checkpoints, attempts and failures.

Plain data in msgpack with the shapes of the statistics themselves. It is asked for, once a second
and only while somebody watches: a job costs its submitter nothing otherwise.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from aioflow.checkpoint.statistics import (
    CheckpointCounts,
    CheckpointRecord,
    CheckpointStatistics,
    LatestCheckpoints,
)
from aioflow.cluster.job_history import ATTEMPTS_MAX, AttemptRecord, FailureRecord, JobHistory
from aioflow.core.errors import RemoteProtocolError

if TYPE_CHECKING:
    from aioflow.cluster.job_master import JobMaster

__all__ = ["ToldCheckpoints", "ToldJob", "ToldWorker", "decode_told", "statistics_of", "tell"]


@dataclass(frozen=True, slots=True)
class ToldWorker:
    """A TaskManager."""

    id: str
    slots: int
    free_slots: int
    silence_ms: int
    location: str
    """Where the tasks of this job are found there; empty if it has none."""
    status: dict[str, float] = field(default_factory=dict)
    """What it said of itself last."""


@dataclass(frozen=True, slots=True)
class ToldCheckpoints:
    """`records` newest last."""

    counts: CheckpointCounts
    latest: LatestCheckpoints
    records: list[CheckpointRecord]


@dataclass(frozen=True, slots=True)
class ToldAttempts:
    """Of one subtask, oldest first."""

    vertex_id: int
    subtask: int
    attempts: list[AttemptRecord]


@dataclass(frozen=True, slots=True)
class ToldJob:
    """All of it, as it is now."""

    attempts: list[ToldAttempts]
    failures: list[FailureRecord]
    failures_total: int
    checkpoints: ToldCheckpoints | None
    workers: list[ToldWorker]

    def put_into(self, history: JobHistory) -> None:
        """What is known here of attempts and failures becomes this."""
        history.attempts = {
            (one.vertex_id, one.subtask): deque(one.attempts, maxlen=ATTEMPTS_MAX)
            for one in self.attempts
        }
        history.failures.clear()
        history.failures.extend(self.failures)
        history.failures_total = self.failures_total


def tell(master: JobMaster, workers: list[ToldWorker]) -> bytes:
    """To be sent."""
    statistics = master.checkpoint_statistics
    checkpoints = None
    if statistics is not None:
        checkpoints = ToldCheckpoints(
            statistics.counts, statistics.latest, list(reversed(statistics.history))
        )
    history = master.history
    attempts = [ToldAttempts(*place, list(records)) for place, records in history.attempts.items()]
    return msgspec.msgpack.encode(
        ToldJob(attempts, list(history.failures), history.failures_total, checkpoints, workers)
    )


def decode_told(content: bytes) -> ToldJob:
    """Raises RemoteProtocolError for what another version may say."""
    try:
        return msgspec.msgpack.decode(content, type=ToldJob)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(
            f"what the JobManager tells about a job is not understood: {error}"
        ) from error


def statistics_of(told: ToldCheckpoints) -> CheckpointStatistics:
    """To be read like those of a job here."""
    made = CheckpointStatistics(())
    made.adopt(told.counts, told.latest, told.records)
    return made
