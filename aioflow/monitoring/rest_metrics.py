"""Answers calls about metrics, in Flink's format.

Without the parameter `get` the answer is a list of names. With `get` it has the values of the
metrics that the parameter names. A single value is text, and an aggregated value is a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.monitoring.answers import VERTEX, Answer, BadRequest, get
from aioflow.monitoring.metrics import job_metrics, shown_value
from aioflow.monitoring.monitor import Call
from aioflow.monitoring.prometheus import CONTENT_TYPES, Style
from aioflow.monitoring.rest_cluster import find_worker

if TYPE_CHECKING:
    pass

__all__ = [
    "job",
    "jobmanager",
    "jobs",
    "operators",
    "prometheus",
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
"""Maximum number of names of metrics in one call."""


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
    """Returns the values of `known` whose names the query parameter `name` lists, or all values if
    the parameter is missing.
    """
    wanted = call.wanted(name)
    return (
        list(known.values()) if wanted is None else [known[one] for one in wanted if one in known]
    )


@get(f"{VERTEX}/metrics", "Metrics", "Metrics of all subtasks", "get")
def vertex(call: Call) -> Any:
    """Answers with the metrics of all subtasks of a vertex. Each name begins with the index of the
    subtask: `0.numRecordsIn`, `0.map.numRecordsIn`.
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


@get(
    f"{VERTEX}/subtasks/metrics",
    "AggregatedMetrics",
    "Metrics over subtasks",
    "get",
    "agg",
    "subtasks",
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


@get(f"{VERTEX}/subtasks/{{subtaskindex}}/metrics", "Metrics", "Metrics of a subtask", "get")
def subtask(call: Call) -> Any:
    return _by_name(call, call.monitor.metrics(call.job).of_subtask(call.vertex.id, call.subtask))


@get(f"{VERTEX}/jm-operator-metrics", "Metrics", "Metrics of coordinators", "get")
def operators(call: Call) -> Any:
    """Answers calls for metrics of operator coordinators, which have no metrics in aioflow."""
    _ = call.vertex
    return _by_name(call, {})


@get("/jobs/{jobid}/metrics", "Metrics", "Metrics of a job as a whole", "get")
def job(call: Call) -> Any:
    return _by_name(call, job_metrics(call.job, call.now_ms))


@get("/jobs/metrics", "AggregatedMetrics", "Metrics over jobs", "get", "agg", "jobs")
def jobs(call: Call) -> Any:
    views = {view.id: view for view in call.monitor.jobs()}
    return _aggregated(
        call, [job_metrics(view, call.now_ms) for view in _chosen(call, "jobs", views)]
    )


@get("/jobmanager/metrics", "Metrics", "Metrics of the cluster and of this process", "get")
def jobmanager(call: Call) -> Any:
    return _by_name(call, call.monitor.cluster_metrics())


@get(
    "/taskmanagers/metrics",
    "AggregatedMetrics",
    "Metrics over processes",
    "get",
    "agg",
    "taskmanagers",
)
def taskmanagers(call: Call) -> Any:
    workers = {worker.id: worker for worker in call.monitor.workers()}
    return _aggregated(
        call,
        [_worker_metrics(call, worker.id) for worker in _chosen(call, "taskmanagers", workers)],
    )


@get("/taskmanagers/{taskmanagerid}/metrics", "Metrics", "Metrics of a process", "get")
def taskmanager(call: Call) -> Any:
    return _by_name(call, _worker_metrics(call, find_worker(call).id))


def _worker_metrics(call: Call, worker_id: str) -> dict[str, float]:
    """Returns the metrics of a process, without the metrics of its tasks. The latter belong to the
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


def prefers_openmetrics(accepted: str) -> bool:
    """Whether a client with the header `Accept: {accepted}` prefers OpenMetrics to plain text."""
    weights: dict[str, float] = {}
    for part in accepted.split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        weight = 1.0
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name.strip().lower() == "q":
                weight = float(value) if _WEIGHT.fullmatch(value := value.strip()) else 0.0
        weights[kind.lower()] = max(weight, weights.get(kind.lower(), 0.0))
    anything = weights.get("*/*", 0.0)
    plain = weights.get("text/plain", weights.get("text/*", anything))
    wanted = weights.get(OPENMETRICS, 0.0)
    return wanted > 0 and wanted >= plain


OPENMETRICS = "application/openmetrics-text"
_WEIGHT = re.compile(r"(0(\.[0-9]{0,3})?|1(\.0{0,3})?)")


@get("/metrics", "Text", "All metrics, for Prometheus", "names")
def prometheus(call: Call) -> Any:
    """Answers GET /metrics?names=, with Flink's names for `names=flink`.

    The format is OpenMetrics if the client's header `Accept` asks for it.
    """
    names = call.query.get("names", "aioflow")
    if names not in ("aioflow", "flink"):
        raise BadRequest(f"names is {names[:40]!r}, expected aioflow or flink")
    accepted = "" if call.request is None else call.request.headers.get("Accept", "")
    style = Style.FLINK if names == "flink" else Style.PROMETHEUS
    if style is Style.PROMETHEUS and prefers_openmetrics(accepted):
        style = Style.OPENMETRICS
    return Answer(call.monitor.page(style), content_type=CONTENT_TYPES[style])
