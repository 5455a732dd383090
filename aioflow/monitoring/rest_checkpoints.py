"""Answers calls about checkpoints, in Flink's format. The fields of these answers are in snake
case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from aioflow.checkpoint.statistics import CheckpointRecord, CheckpointStatus, Distribution
from aioflow.inspection.redaction import redacted
from aioflow.monitoring.calls import Call, NotFound

if TYPE_CHECKING:
    from aioflow.checkpoint.statistics import RestoredRecord, SubtaskRecord, VertexRecord
    from aioflow.monitoring.view import JobView

__all__ = ["checkpoints", "config", "details", "record_body", "subtask_details"]

LONG_MAX = 2**63 - 1
"""Number that Flink shows for an interval that never ends, and for no limit."""


def checkpoints(call: Call) -> Any:
    view = call.job
    statistics = view.checkpoints
    if statistics is None:
        none = Distribution()
        return {
            "counts": {"restored": 0, "total": 0, "in_progress": 0, "completed": 0, "failed": 0},
            "summary": {name: asdict(none) for name in SUMMARY},
            "latest": {"completed": None, "savepoint": None, "failed": None, "restored": None},
            "history": [],
        }
    summary, latest = statistics.summary, statistics.latest
    return {
        "counts": asdict(statistics.counts),
        "summary": {
            "checkpointed_size": asdict(summary.checkpointed_size),
            "state_size": asdict(summary.state_size),
            "end_to_end_duration": asdict(summary.end_to_end_duration),
            "alignment_buffered": asdict(Distribution()),
            "processed_data": asdict(summary.processed_data),
            "persisted_data": asdict(summary.persisted_data),
        },
        "latest": {
            "completed": None if latest.completed is None else record_body(view, latest.completed),
            "savepoint": None if latest.savepoint is None else record_body(view, latest.savepoint),
            "failed": None if latest.failed is None else record_body(view, latest.failed),
            "restored": None if latest.restored is None else _restored(latest.restored),
        },
        "history": [record_body(view, record) for record in statistics.history],
    }


SUMMARY = (
    "checkpointed_size",
    "state_size",
    "end_to_end_duration",
    "alignment_buffered",
    "processed_data",
    "persisted_data",
)


def record_body(view: JobView, record: CheckpointRecord) -> dict[str, Any]:
    """Returns one checkpoint as the history lists it."""
    body: dict[str, Any] = {
        "className": record.status.value.lower(),
        "id": record.id,
        "status": record.status.value,
        "is_savepoint": record.is_savepoint,
        "savepointFormat": "CANONICAL" if record.is_savepoint else None,
        "trigger_timestamp": record.trigger_timestamp,
        "latest_ack_timestamp": record.latest_ack_timestamp,
        "checkpointed_size": record.checkpointed_size,
        "state_size": record.state_size,
        "end_to_end_duration": record.end_to_end_duration,
        "alignment_buffered": 0,
        "processed_data": record.processed_data,
        "persisted_data": record.persisted_data,
        "num_subtasks": record.num_subtasks,
        "num_acknowledged_subtasks": record.num_acknowledged_subtasks,
        "checkpoint_type": record.checkpoint_type,
        "tasks": {
            view.vertex_ids[vertex_id]: _task(vertex_id, task, record)
            for vertex_id, task in record.tasks.items()
        },
    }
    match record.status:
        case CheckpointStatus.COMPLETED:
            body |= {"external_path": redacted(record.external_path), "discarded": record.discarded}
        case CheckpointStatus.FAILED:
            body |= {
                "failure_timestamp": record.failure_timestamp,
                "failure_message": redacted(record.failure_message),
            }
        case CheckpointStatus.IN_PROGRESS:
            pass
    return body


def _task(vertex_id: int, task: VertexRecord, record: CheckpointRecord) -> dict[str, Any]:
    stats = [one.stats for one in task.subtasks.values()]
    latest = max((one.ack_timestamp for one in task.subtasks.values()), default=-1)
    return {
        "id": record.id,
        "status": CheckpointStatus.COMPLETED.value
        if task.num_acknowledged_subtasks == task.num_subtasks
        else record.status.value,
        "latest_ack_timestamp": latest,
        "checkpointed_size": sum(one.checkpointed_size for one in stats),
        "state_size": sum(one.state_size for one in stats),
        "end_to_end_duration": -1 if latest < 0 else max(latest - record.trigger_timestamp, 0),
        "alignment_buffered": 0,
        "processed_data": sum(one.alignment_processed for one in stats),
        "persisted_data": sum(one.alignment_persisted for one in stats),
        "num_subtasks": task.num_subtasks,
        "num_acknowledged_subtasks": task.num_acknowledged_subtasks,
    }


def _restored(record: RestoredRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "restore_timestamp": record.restore_timestamp,
        "is_savepoint": record.is_savepoint,
        "external_path": redacted(record.external_path),
    }


def config(call: Call) -> Any:
    view = call.job
    settings = view.checkpoint_settings
    if settings is None or settings.store is None:
        raise NotFound(f"job {view.id} has no checkpoints: run it with checkpoints=URL")
    return {
        "mode": "exactly_once",
        "interval": settings.every_ms,
        "timeout": settings.timeout_ms,
        "min_pause": settings.min_pause_ms,
        "max_concurrent": 1,
        "externalization": {"enabled": True, "delete_on_cancellation": False},
        "state_backend": view.state_backend,
        "checkpoint_storage": redacted(settings.store),
        "unaligned_checkpoints": settings.unaligned or settings.aligned_timeout_ms is not None,
        "tolerable_failed_checkpoints": 2**31 - 1
        if settings.tolerable_failures is None
        else settings.tolerable_failures,
        "aligned_checkpoint_timeout": settings.aligned_timeout_ms or 0,
        "checkpoints_after_tasks_finish": True,
        "state_changelog_enabled": False,
        "changelog_periodic_materialization_interval": LONG_MAX,
        "changelog_storage": "",
    }


def _record(call: Call) -> CheckpointRecord:
    view, number = call.job, call.number("checkpointid")
    statistics = view.checkpoints
    record = None if statistics is None else statistics.record(number)
    if record is None:
        raise NotFound(f"checkpoint {number} of job {view.id} is not remembered")
    return record


def details(call: Call) -> Any:
    return record_body(call.job, _record(call))


def subtask_details(call: Call) -> Any:
    record, vertex = _record(call), call.vertex
    task = record.tasks.get(vertex.id)
    if task is None:
        raise NotFound(f"vertex {vertex.name!r} has no part in checkpoint {record.id}")
    acknowledged = list(task.subtasks.values())
    return {
        **_task(vertex.id, task, record),
        "summary": {
            "checkpointed_size": _spread([one.stats.checkpointed_size for one in acknowledged]),
            "state_size": _spread([one.stats.state_size for one in acknowledged]),
            "end_to_end_duration": _spread([one.end_to_end_duration for one in acknowledged]),
            "checkpoint_duration": {
                "sync": _spread([one.stats.sync_ms for one in acknowledged]),
                "async": _spread([one.stats.async_ms for one in acknowledged]),
            },
            "alignment": {
                "buffered": _spread([0 for _ in acknowledged]),
                "processed": _spread([one.stats.alignment_processed for one in acknowledged]),
                "persisted": _spread([one.stats.alignment_persisted for one in acknowledged]),
                "duration": _spread([one.stats.alignment_ms for one in acknowledged]),
            },
            "start_delay": _spread([one.stats.start_delay_ms for one in acknowledged]),
        },
        "subtasks": [
            _subtask(index, task.subtasks.get(index), record) for index in range(task.num_subtasks)
        ],
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return asdict(Distribution.of([round(value) for value in values]))


def _subtask(index: int, one: SubtaskRecord | None, record: CheckpointRecord) -> dict[str, Any]:
    if one is None:
        return {"index": index, "status": "pending_or_failed"}
    stats = one.stats
    return {
        "index": index,
        "status": "completed",
        "ack_timestamp": one.ack_timestamp,
        "end_to_end_duration": one.end_to_end_duration,
        "checkpointed_size": stats.checkpointed_size,
        "state_size": stats.state_size,
        "checkpoint": {"sync": round(stats.sync_ms), "async": stats.async_ms},
        "alignment": {
            "buffered": 0,
            "processed": stats.alignment_processed,
            "persisted": stats.alignment_persisted,
            "duration": stats.alignment_ms,
        },
        "start_delay": stats.start_delay_ms,
        "unaligned_checkpoint": stats.unaligned,
        "aborted": record.status is CheckpointStatus.FAILED,
    }
