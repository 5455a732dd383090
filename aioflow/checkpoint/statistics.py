"""Statistics of a job's checkpoints for monitoring. The fields have the names of Flink's REST API.

Only the coordinator changes this plain data. Monitoring reads it between two steps of the
coordinator. Times are wall-clock milliseconds, or -1 for an event that has not happened. Durations
are milliseconds, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from aioflow.checkpoint.completed import CheckpointKind, CheckpointStats
from aioflow.checkpoint.instructions import CheckpointFailureReason
from aioflow.checkpoint.plan import CheckpointedVertex

__all__ = [
    "CheckpointCounts",
    "CheckpointRecord",
    "CheckpointStatistics",
    "CheckpointStatus",
    "Distribution",
    "LatestCheckpoints",
    "RestoredRecord",
    "SubtaskRecord",
    "SummaryStatistics",
    "VertexRecord",
]


class CheckpointStatus(StrEnum):
    """The status of a checkpoint: in progress, completed or failed."""

    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class SubtaskRecord:
    """The acknowledgement of one checkpoint by one subtask."""

    index: int
    ack_timestamp: int
    end_to_end_duration: int
    """Milliseconds from the trigger to the acknowledgement."""
    stats: CheckpointStats


@dataclass(slots=True)
class VertexRecord:
    """The acknowledgements of all subtasks of one vertex in one checkpoint."""

    vertex_id: int
    name: str
    num_subtasks: int
    """Number of subtasks, including finished subtasks, which acknowledge nothing."""
    finished_subtasks: int
    subtasks: dict[int, SubtaskRecord] = field(default_factory=dict)
    """Acknowledgements by subtask index, in order of arrival."""

    @property
    def num_acknowledged_subtasks(self) -> int:
        return len(self.subtasks) + self.finished_subtasks


@dataclass(slots=True, kw_only=True)
class CheckpointRecord:
    """The statistics of one checkpoint or savepoint, from its trigger on."""

    id: int
    kind: CheckpointKind
    trigger_timestamp: int
    tasks: dict[int, VertexRecord]
    status: CheckpointStatus = CheckpointStatus.IN_PROGRESS
    unaligned: bool = False
    """Whether the checkpoint was unaligned in at least one subtask."""
    latest_ack_timestamp: int = -1
    completed_timestamp: int = -1
    """Time when the whole checkpoint was durable."""
    external_path: str = ""
    """Location of the completed checkpoint."""
    discarded: bool = False
    """Whether the checkpoint was deleted because newer checkpoints completed."""
    failure_timestamp: int = -1
    failure_reason: CheckpointFailureReason | None = None
    failure_message: str = ""

    @property
    def is_savepoint(self) -> bool:
        return self.kind.is_savepoint

    @property
    def checkpoint_type(self) -> str:
        if self.kind is CheckpointKind.CHECKPOINT and self.unaligned:
            return "UNALIGNED_CHECKPOINT"
        return self.kind.value

    @property
    def num_subtasks(self) -> int:
        return sum(task.num_subtasks for task in self.tasks.values())

    @property
    def num_acknowledged_subtasks(self) -> int:
        return sum(task.num_acknowledged_subtasks for task in self.tasks.values())

    @property
    def end_to_end_duration(self) -> int:
        """Milliseconds from the trigger to the latest acknowledgement, or to the failure."""
        end = max(self.latest_ack_timestamp, self.failure_timestamp)
        return -1 if end < 0 else max(end - self.trigger_timestamp, 0)

    @property
    def state_size(self) -> int:
        return sum(record.stats.state_size for record in self._records())

    @property
    def checkpointed_size(self) -> int:
        return sum(record.stats.checkpointed_size for record in self._records())

    @property
    def processed_data(self) -> int:
        """Number of records that were processed during the alignment."""
        return sum(record.stats.alignment_processed for record in self._records())

    @property
    def persisted_data(self) -> int:
        return sum(record.stats.alignment_persisted for record in self._records())

    def _records(self) -> Iterable[SubtaskRecord]:
        return (record for task in self.tasks.values() for record in task.subtasks.values())


@dataclass(frozen=True, slots=True)
class RestoredRecord:
    """The checkpoint from which the job, or a part of it, was restored."""

    id: int
    restore_timestamp: int
    is_savepoint: bool
    external_path: str


@dataclass(slots=True)
class CheckpointCounts:
    """How many checkpoints were triggered, completed and so on since the coordinator started."""

    restored: int = 0
    total: int = 0
    in_progress: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(slots=True)
class LatestCheckpoints:
    """The newest checkpoint of each kind, even if the history no longer contains it."""

    completed: CheckpointRecord | None = None
    savepoint: CheckpointRecord | None = None
    failed: CheckpointRecord | None = None
    restored: RestoredRecord | None = None


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution (minimum, maximum, percentiles) of one figure over the completed checkpoints
    of the history. All values are 0 if there are none.
    """

    min: float = 0
    max: float = 0
    avg: float = 0
    p50: float = 0
    p90: float = 0
    p95: float = 0
    p99: float = 0
    p999: float = 0

    @staticmethod
    def of(values: Sequence[float]) -> Distribution:
        """Returns the distribution of `values`. Percentiles are elements of `values`, without
        interpolation.
        """
        if not values:
            return Distribution()
        ordered = sorted(values)
        ranks = (
            ordered[min(int(len(ordered) * share), len(ordered) - 1)]
            for share in (0.5, 0.9, 0.95, 0.99, 0.999)
        )
        return Distribution(ordered[0], ordered[-1], sum(ordered) / len(ordered), *ranks)


@dataclass(frozen=True, slots=True)
class SummaryStatistics:
    """The distributions of all figures over the completed checkpoints of the history."""

    checkpointed_size: Distribution
    state_size: Distribution
    end_to_end_duration: Distribution
    processed_data: Distribution
    persisted_data: Distribution


class CheckpointStatistics:
    """The statistics of a job's checkpoints.

    `history` holds the last `history_max` checkpoints that have ended, and all that are in
    progress, newest first.
    """

    def __init__(self, vertices: Sequence[CheckpointedVertex], history_max: int = 20) -> None:
        self.counts = CheckpointCounts()
        self.latest = LatestCheckpoints()
        self._vertices = tuple(vertices)
        self._history_max = history_max
        self._records: dict[int, CheckpointRecord] = {}

    @property
    def history(self) -> list[CheckpointRecord]:
        return list(reversed(self._records.values()))

    def record(self, checkpoint_id: int) -> CheckpointRecord | None:
        """Returns the details of one checkpoint; None if the history no longer contains it."""
        return self._records.get(checkpoint_id)

    @property
    def summary(self) -> SummaryStatistics:
        completed = [r for r in self._records.values() if r.status is CheckpointStatus.COMPLETED]
        return SummaryStatistics(
            Distribution.of([r.checkpointed_size for r in completed]),
            Distribution.of([r.state_size for r in completed]),
            Distribution.of([r.end_to_end_duration for r in completed]),
            Distribution.of([r.processed_data for r in completed]),
            Distribution.of([r.persisted_data for r in completed]),
        )

    def adopt(
        self,
        counts: CheckpointCounts,
        latest: LatestCheckpoints,
        records: Sequence[CheckpointRecord],
    ) -> None:
        """Replaces all statistics by the statistics of another process. `records` are oldest
        first."""
        self.counts, self.latest = counts, latest
        self._records = {record.id: record for record in records}

    # Events of the coordinator.

    def rescaled(self, vertices: Sequence[CheckpointedVertex]) -> None:
        """Notes the vertices of later checkpoints, after a rescaling."""
        self._vertices = tuple(vertices)

    def triggered(
        self,
        checkpoint_id: int,
        kind: CheckpointKind,
        now_ms: int,
        finished: Sequence[tuple[int, int]],
    ) -> None:
        done = [vertex_id for vertex_id, _ in finished]
        tasks = {
            v.vertex_id: VertexRecord(v.vertex_id, v.name, v.parallelism, done.count(v.vertex_id))
            for v in self._vertices
        }
        self._records[checkpoint_id] = CheckpointRecord(
            id=checkpoint_id, kind=kind, trigger_timestamp=now_ms, tasks=tasks
        )
        self.counts.total += 1
        self.counts.in_progress += 1
        self._forget()

    def acknowledged(
        self, checkpoint_id: int, vertex_id: int, index: int, stats: CheckpointStats, now_ms: int
    ) -> None:
        record = self._records[checkpoint_id]
        duration = max(now_ms - record.trigger_timestamp, 0)
        record.tasks[vertex_id].subtasks[index] = SubtaskRecord(index, now_ms, duration, stats)
        record.latest_ack_timestamp = max(record.latest_ack_timestamp, now_ms)
        record.unaligned = record.unaligned or stats.unaligned

    def completed(self, checkpoint_id: int, external_path: str, now_ms: int) -> None:
        record = self._records[checkpoint_id]
        record.completed_timestamp = now_ms
        record.status = CheckpointStatus.COMPLETED
        record.external_path = external_path
        self.counts.in_progress -= 1
        self.counts.completed += 1
        if record.is_savepoint:
            self.latest.savepoint = record
        else:
            self.latest.completed = record
        self._forget()

    def failed(
        self, checkpoint_id: int, reason: CheckpointFailureReason, message: str, now_ms: int
    ) -> None:
        record = self._records[checkpoint_id]
        record.status = CheckpointStatus.FAILED
        record.failure_timestamp, record.failure_reason, record.failure_message = (
            now_ms,
            reason,
            message,
        )
        self.counts.in_progress -= 1
        self.counts.failed += 1
        self.latest.failed = record
        self._forget()

    def restored(
        self, checkpoint_id: int, kind: CheckpointKind, external_path: str, now_ms: int
    ) -> None:
        self.counts.restored += 1
        self.latest.restored = RestoredRecord(
            checkpoint_id, now_ms, kind.is_savepoint, external_path
        )

    def discarded(self, checkpoint_id: int) -> None:
        for record in (self._records.get(checkpoint_id), self.latest.completed):
            if record is not None and record.id == checkpoint_id:
                record.discarded = True

    def _forget(self) -> None:
        over = [
            r.id for r in self._records.values() if r.status is not CheckpointStatus.IN_PROGRESS
        ]
        for checkpoint_id in over[: max(len(over) - self._history_max, 0)]:
            del self._records[checkpoint_id]
