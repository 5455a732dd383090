"""The details of a job that its submitter shows to users: checkpoints, attempts and failures.

The JobManager sends them as plain msgpack data in the shapes of the statistics themselves. The
submitter asks once a second, and only while the job is being watched. Otherwise a job costs it
nothing.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
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

__all__ = [
    "ToldCheckpoints",
    "ToldJob",
    "ToldWorker",
    "decode_told",
    "statistics_of",
    "status_of",
    "tell",
]


STATUS = "Status."
"""Prefix of the metrics of a process."""


@dataclass(frozen=True, slots=True)
class ToldWorker:
    """A process that runs tasks of a job, other than the program itself."""

    id: str
    slots: int
    free_slots: int
    silence_ms: int
    location: str
    """Where the tasks of this job run on it; empty if it has none."""
    status: dict[str, float] = field(default_factory=dict)
    """The status metrics it last reported."""


@dataclass(frozen=True, slots=True)
class ToldCheckpoints:
    """Checkpoint statistics; `records` newest last."""

    counts: CheckpointCounts
    latest: LatestCheckpoints
    records: list[CheckpointRecord]


@dataclass(frozen=True, slots=True)
class ToldAttempts:
    """The attempts of one subtask, oldest first."""

    vertex_id: int
    subtask: int
    attempts: list[AttemptRecord]


@dataclass(frozen=True, slots=True)
class ToldJob:
    """The complete current details of a job."""

    attempts: list[ToldAttempts]
    failures: list[FailureRecord]
    failures_total: int
    checkpoints: ToldCheckpoints | None
    workers: list[ToldWorker]

    def put_into(self, history: JobHistory) -> None:
        """Replaces the attempts and failures in `history`."""
        history.attempts = {
            (one.vertex_id, one.subtask): deque(one.attempts, maxlen=ATTEMPTS_MAX)
            for one in self.attempts
        }
        history.failures.clear()
        history.failures.extend(self.failures)
        history.failures_total = self.failures_total


def tell(master: JobMaster, workers: list[ToldWorker]) -> bytes:
    """Encodes the details of a job."""
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
    """Decodes the details of a job. Raises RemoteProtocolError for those of another version."""
    try:
        return msgspec.msgpack.decode(content, type=ToldJob)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(
            f"what the JobManager tells about a job is not understood: {error}"
        ) from error


def status_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of a process itself, which come before those of its tasks."""
    return dict(itertools.takewhile(lambda entry: entry[0].startswith(STATUS), metrics.items()))


def statistics_of(told: ToldCheckpoints) -> CheckpointStatistics:
    """Returns reported checkpoints as the statistics that a job in this process keeps."""
    made = CheckpointStatistics(())
    made.adopt(told.counts, told.latest, told.records)
    return made
