"""Answers calls about metrics, in Flink's format.

The answer is a list of names without the parameter `get`, with `get` the values as text, and
numbers where values are aggregated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.checkpoint.statistics import CheckpointStatus
from aioflow.cluster.execution_graph import JobStatus
from aioflow.monitoring.adapters import MonitoredCluster
from aioflow.monitoring.calls import BadRequest, Call
from aioflow.monitoring.metric_index import shown_value
from aioflow.monitoring.rest_cluster import find_worker

if TYPE_CHECKING:
    from aioflow.monitoring.monitor import Monitor
    from aioflow.monitoring.view import JobView

__all__ = [
    "cluster_metrics",
    "job",
    "job_metrics",
    "jobmanager",
    "jobs",
    "operators",
    "subtask",
    "subtasks",
    "taskmanager",
    "taskmanagers",
    "vertex",
]

AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "max": max,
    "sum": sum,
    "avg": lambda values: sum(values) / len(values),
}

WANTED_MAX = 2_000
"""Maximum number of names in one call."""


def _by_name(call: Call, metrics: Mapping[str, float]) -> Any:
    wanted = call.wanted("get")
    if wanted is None:
        return [{"id": name} for name in metrics]
    return [
        {"id": name, "value": shown_value(metrics[name])}
        for name in wanted[:WANTED_MAX]
        if name in metrics
    ]


def _aggregated(call: Call, sets: Iterable[Mapping[str, float]]) -> Any:
    found = list(sets)
    wanted, aggregates = call.wanted("get"), call.wanted("agg")
    for name in aggregates or ():
        if name not in AGGREGATES:
            raise BadRequest(f"agg has {name[:20]!r}, expected some of {', '.join(AGGREGATES)}")
    if wanted is None:
        return [{"id": name} for name in dict.fromkeys(name for one in found for name in one)]
    bodies = []
    for name in wanted[:WANTED_MAX]:
        values = [one[name] for one in found if name in one and not math.isnan(one[name])]
        if values:
            bodies.append(
                {
                    "id": name,
                    **{
                        label: float(AGGREGATES[label](values))
                        for label in aggregates or AGGREGATES
                    },
                }
            )
    return bodies


def _chosen(call: Call, name: str, known: Mapping[str, Any]) -> list[Any]:
    """Returns the values whose names the query parameter `name` lists, or all."""
    wanted = call.wanted(name)
    return (
        list(known.values()) if wanted is None else [known[one] for one in wanted if one in known]
    )


def vertex(call: Call) -> Any:
    """Answers with the metrics of all subtasks of a vertex, each name after its subtask:
    `0.numRecordsIn`, `0.map.numRecordsIn`.
    """
    subtasks = call.monitor.metrics(call.job).of_vertex(call.vertex)
    return _by_name(
        call,
        {
            f"{index}.{name}": value
            for index, one in enumerate(subtasks)
            for name, value in one.items()
        },
    )


def subtasks(call: Call) -> Any:
    found = call.monitor.metrics(call.job).of_vertex(call.vertex)
    text = call.wanted("subtasks")
    return _aggregated(
        call, found if text is None else [found[index] for index in _ranges(text, len(found))]
    )


def _ranges(parts: Sequence[str], count: int) -> list[int]:
    """Returns the numbers in a list such as `0,2-4`, all below `count`."""
    wanted: list[int] = []
    for part in parts:
        first, _, last = part.partition("-")
        if not all(
            text.isascii() and text.isdecimal() and len(text) < 10
            for text in (first, last or first)
        ):
            raise BadRequest(f"subtasks has {part[:20]!r}, expected a number or a range like 0-3")
        wanted.extend(range(int(first), min(int(last or first), count - 1) + 1))
    return [index for index in wanted if index < count]


def subtask(call: Call) -> Any:
    return _by_name(call, call.monitor.metrics(call.job).of_subtask(call.vertex.id, call.subtask))


def operators(call: Call) -> Any:
    """Answers calls for metrics of operator coordinators, which report none here."""
    _ = call.vertex
    return _by_name(call, {})


def job(call: Call) -> Any:
    return _by_name(call, job_metrics(call.job, call.now_ms))


def jobs(call: Call) -> Any:
    views = {view.id: view for view in call.monitor.jobs()}
    return _aggregated(
        call, [job_metrics(view, call.now_ms) for view in _chosen(call, "jobs", views)]
    )


def job_metrics(view: JobView, now_ms: int) -> dict[str, float]:
    """Returns the metrics of a job as a whole.

    `lastCheckpointExternalPath` is text, and is at /checkpoints.
    """
    times = view.master.timestamps_ms
    status = view.status
    metrics: dict[str, float] = {
        "numRestarts": view.restarts,
        "fullRestarts": view.restarts,
        "numRescales": view.master.executions.rescales,
        "uptime": max(now_ms - times[JobStatus.RUNNING], 0)
        if status is JobStatus.RUNNING and JobStatus.RUNNING in times
        else -1,
        "downtime": max(now_ms - times[status], 0)
        if status in (JobStatus.RESTARTING, JobStatus.FAILING)
        else 0,
    }
    for one in (each for each in JobStatus if not each.is_terminal):
        name, (now, ever) = one.value.lower(), view.master.history.time_in(one.value, now_ms)
        metrics |= {
            f"{name}State": int(status is one),
            f"{name}Time": now,
            f"{name}TimeTotal": ever,
        }
    statistics = view.checkpoints
    if statistics is not None:
        counts, latest = statistics.counts, statistics.latest
        newest = latest.completed
        restored = latest.restored
        metrics |= {
            "numberOfInProgressCheckpoints": counts.in_progress,
            "inProgressCheckpointAge": max(
                (
                    now_ms - r.trigger_timestamp
                    for r in statistics.history
                    if r.status is CheckpointStatus.IN_PROGRESS
                ),
                default=0,
            ),
            "numberOfCompletedCheckpoints": counts.completed,
            "numberOfFailedCheckpoints": counts.failed,
            "totalNumberOfCheckpoints": counts.total,
            "lastCompletedCheckpointId": -1 if newest is None else newest.id,
            "lastCheckpointDuration": -1 if newest is None else newest.end_to_end_duration,
            "lastCheckpointSize": -1 if newest is None else newest.checkpointed_size,
            "lastCheckpointFullSize": -1 if newest is None else newest.state_size,
            "lastCheckpointProcessedData": -1 if newest is None else newest.processed_data,
            "lastCheckpointPersistedData": -1 if newest is None else newest.persisted_data,
            "lastCheckpointRestoreTimestamp": -1
            if restored is None
            else restored.restore_timestamp,
        }
    return metrics


def jobmanager(call: Call) -> Any:
    return _by_name(call, cluster_metrics(call.monitor))


def cluster_metrics(monitor: Monitor) -> dict[str, float]:
    """Returns the metrics of the cluster, and of this process."""
    workers = monitor.workers()
    fenced = (
        {"fenced_total": monitor.watched.fenced_total}
        if isinstance(monitor.watched, MonitoredCluster)
        else {}
    )
    return {
        **fenced,
        "numRegisteredTaskManagers": len(workers),
        "numRunningJobs": sum(not view.status.is_terminal for view in monitor.jobs()),
        "taskSlotsAvailable": sum(worker.free_slots for worker in workers),
        "taskSlotsTotal": sum(worker.slots for worker in workers),
        **monitor.process.metrics(),
    }


def taskmanagers(call: Call) -> Any:
    workers = {worker.id: worker for worker in call.monitor.workers()}
    return _aggregated(
        call,
        [_worker_metrics(call, worker.id) for worker in _chosen(call, "taskmanagers", workers)],
    )


def taskmanager(call: Call) -> Any:
    return _by_name(call, _worker_metrics(call, find_worker(call).id))


def _worker_metrics(call: Call, worker_id: str) -> dict[str, float]:
    """Returns the metrics of a process, without those of its tasks, which belong to the
    vertices.
    """
    monitor = call.monitor
    here = next((worker.is_here for worker in monitor.workers() if worker.id == worker_id), False)
    tasks = [
        one
        for view in monitor.jobs()
        for each in view.graph.vertices
        for one in view.subtasks(each)
    ]
    found: dict[str, float] = {
        "numRunningTasks": sum(
            one.worker_id == worker_id and not one.state.is_terminal for one in tasks
        )
    }
    return {
        **found,
        **monitor.watched.worker_metrics(worker_id),
        **(monitor.process.metrics() if here else {}),
    }
