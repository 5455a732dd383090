"""Answers calls for Flink's accumulators with the counters that functions made through their
runtime context.

Metrics are collected without their kind. So every whole number that an operator reports under a
name without a dot counts as a counter, apart from the engine's own names. The values are summed
over subtasks and operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from aioflow.monitoring.calls import Call
from aioflow.task.metrics import RECORDS

if TYPE_CHECKING:
    from aioflow.graph.job_graph import JobVertex
    from aioflow.monitoring.view import JobView

__all__ = ["job_accumulators", "results", "subtask_accumulators", "vertex_accumulators"]

OF_THE_ENGINE = frozenset(
    (
        *RECORDS,
        "currentInputWatermark",
        "currentOutputWatermark",
        "slowCallbacks",
        "slowestCallbackMs",
        "numLateRecordsDropped",
        "numRecordsInErrors",
        "asyncCallsInFlight",
        "asyncCallsMax",
    )
)
"""Names of the metrics that the engine itself reports for operators."""


def _counted(
    call: Call, view: JobView, vertex: JobVertex, metrics: Mapping[str, float]
) -> dict[str, int]:
    """Returns the user's counters of one subtask, by name, summed over its operators."""
    index, found = call.monitor.metrics(view), dict[str, int]()
    for name, value in metrics.items():
        operator, metric = index.operator_of(vertex.id, name)
        if (
            operator
            and isinstance(value, int)
            and "." not in metric
            and metric not in OF_THE_ENGINE
        ):
            found[metric] = found.get(metric, 0) + value
    return found


def _of_vertex(call: Call, view: JobView, vertex: JobVertex) -> list[dict[str, int]]:
    return [
        _counted(call, view, vertex, metrics)
        for metrics in call.monitor.metrics(view).of_vertex(vertex)
    ]


def _sum(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total


def _bodies(counted: Mapping[str, int]) -> list[dict[str, str]]:
    return [
        {"name": name, "type": "LongCounter", "value": str(value)}
        for name, value in counted.items()
    ]


def results(call: Call) -> dict[str, int]:
    """Returns the user's counters of the whole job, by name."""
    view = call.job
    return _sum(one for vertex in view.graph.vertices for one in _of_vertex(call, view, vertex))


def job_accumulators(call: Call) -> Any:
    """Answers GET /jobs/:jobid/accumulators."""
    return {
        "job-accumulators": [],
        "user-task-accumulators": _bodies(results(call)),
        "serialized-user-task-accumulators": {},
    }


def vertex_accumulators(call: Call) -> Any:
    """Answers GET .../vertices/:vertexid/accumulators."""
    view, vertex = call.job, call.vertex
    return {
        "id": view.vertex_ids[vertex.id],
        "user-accumulators": _bodies(_sum(_of_vertex(call, view, vertex))),
    }


def subtask_accumulators(call: Call) -> Any:
    """Answers GET .../vertices/:vertexid/subtasks/accumulators."""
    view, vertex = call.job, call.vertex
    counted = _of_vertex(call, view, vertex)
    subtasks = [
        {
            "subtask": one.index,
            "attempt": one.attempt,
            "host": one.host,
            "endpoint": one.host,
            "user-accumulators": _bodies(counted[one.index]),
        }
        for one in view.subtasks(vertex)
    ]
    return {
        "id": view.vertex_ids[vertex.id],
        "parallelism": vertex.parallelism,
        "subtasks": subtasks,
    }
