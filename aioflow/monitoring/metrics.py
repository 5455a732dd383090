"""The metrics of jobs by vertex and subtask, and the page of all metrics for Prometheus.

Tasks name their metrics "task name (1/4).operator.metric". Names of users may hold any character.
So a name is parsed with the help of the names in the job graph, once, and the result is kept.
Metrics are read at most every `FRESH_S`.

The page has the names and labels of Flink's reporter. The text before each value rarely changes, so
it is built once. A scrape only inserts the numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.checkpoint.statistics import CheckpointStatus
from aioflow.cluster.execution_graph import JobStatus
from aioflow.task.metrics import unique_names

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.graph.job_graph import JobGraph, JobVertex
    from aioflow.monitoring.view import JobView

__all__ = [
    "CONTENT_TYPE",
    "Exposition",
    "MetricIndex",
    "OperatorMetric",
    "job_metrics",
    "labels_of",
    "shown_value",
]

FRESH_S = 0.2
"""Time for which a reading is reused, in seconds: a hundred calls a second cost five readings."""

Subtask = tuple[int, int]
"""Vertex id and subtask index."""

OperatorMetric = tuple[str, str]
"""Name of the operator, empty for the task itself, and name of the metric."""


class MetricIndex:
    """The metrics of one job by vertex and subtask.

    `read()` returns all metrics of the job by dotted name; `now()` returns monotonic seconds.
    """

    def __init__(
        self, graph: JobGraph, read: Callable[[], Mapping[str, float]], now: Callable[[], float]
    ) -> None:
        self._read = read
        self._now = now
        self._read_at: float | None = None
        self._values: list[float] = []
        self._by_subtask: dict[Subtask, dict[str, float]] | None = None
        """Metrics by subtask, built from the last reading when first needed."""
        self._names: list[str] = []
        """Names of the metrics in the last reading.

        They change only when tasks start or programs make metrics, so `_plan` is kept meanwhile.
        """
        self._plan: list[tuple[Subtask, list[str], list[int]]] = []
        """For each subtask: the names of its metrics, and the indices of their values."""
        self.version = 0
        """Number that changes whenever the names do."""
        self._split: dict[tuple[int, str], OperatorMetric] = {}
        self._prefixes = {
            vertex.metrics_name(index): (vertex.id, index)
            for vertex in graph.vertices
            for index in range(vertex.parallelism)
        }
        self._operators = {
            vertex.id: unique_names([node.name for node in vertex.nodes])
            for vertex in graph.vertices
        }

    def of_subtask(self, vertex_id: int, index: int) -> dict[str, float]:
        """Returns the metrics of one subtask by name. An operator's metrics begin with its name."""
        return self.all().get((vertex_id, index), {})

    def of_vertex(self, vertex: JobVertex) -> list[dict[str, float]]:
        """Returns the metrics of each subtask of a vertex."""
        found = self.all()
        return [found.get((vertex.id, index), {}) for index in range(vertex.parallelism)]

    def all(self) -> dict[Subtask, dict[str, float]]:
        """Returns the metrics of all subtasks. The caller must not change the result."""
        self._refresh()
        if self._by_subtask is None:
            values = self._values
            self._by_subtask = {
                subtask: dict(zip(shorts, [values[at] for at in places], strict=True))
                for subtask, shorts, places in self._plan
            }
        return self._by_subtask

    def values(self) -> list[float]:
        """Returns all values in the order of `all`. Their names change only when `version` does."""
        self._refresh()
        return [self._values[at] for _, _, places in self._plan for at in places]

    def operator_of(self, vertex_id: int, name: str) -> OperatorMetric:
        """Splits the name of a subtask's metric into operator and metric."""
        known = self._split.get((vertex_id, name))
        if known is None:
            operators = [o for o in self._operators.get(vertex_id, ()) if name.startswith(f"{o}.")]
            operator = max(operators, key=len, default="")
            known = self._split[vertex_id, name] = (
                operator,
                name[len(operator) + 1 :] if operator else name,
            )
        return known

    def _refresh(self) -> None:
        now = self._now()
        # There are no metrics before the tasks begin. A user who has just started the job must not
        # see that state for another fifth of a second.
        if self._read_at is not None and self._plan and now - self._read_at < FRESH_S:
            return
        self._read_at, metrics = now, self._read()
        names = list(metrics)
        if names != self._names:
            self._names, self._plan = names, self._planned(names)
            self.version += 1
        self._values, self._by_subtask = list(metrics.values()), None

    def _planned(self, names: Sequence[str]) -> list[tuple[Subtask, list[str], list[int]]]:
        found: dict[Subtask, tuple[list[str], list[int]]] = {}
        for number, name in enumerate(names):
            place = self._place(name)
            if place is not None:
                subtask, short = place
                shorts, places = found.setdefault(subtask, ([], []))
                shorts.append(short)
                places.append(number)
        return [(subtask, *lists) for subtask, lists in found.items()]

    def _place(self, name: str) -> tuple[Subtask, str] | None:
        place, at = None, name.find(".")
        while at >= 0:
            subtask = self._prefixes.get(name[:at])
            if subtask is not None:
                place = (
                    subtask,
                    name[at + 1 :],
                    # The longest match: one task's name may be the beginning of another's.
                )
            at = name.find(".", at + 1)
        return place


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


def shown_value(value: float) -> str:
    """Returns a value as text, as REST shows it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return str(value)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

"""Time for which a page is reused, in seconds, as for the metrics themselves."""

_UNFIT = re.compile(r"[^a-zA-Z0-9:_]")

_SPLIT = re.compile(r"split\.(.*)\.watermark\.(\w+)", re.DOTALL)
"""Pattern of a metric of one split of a source. The split becomes a label."""

_LATENCY = re.compile(r"latency\.(.*)\.(\w+)", re.DOTALL)
"""Pattern of the latency from one source. The source becomes a label."""


class _Measured(Protocol):
    """The part of a `Monitor` that the page shows."""

    @property
    def host(self) -> Host: ...
    def jobs(self) -> Sequence[JobView]: ...
    def metrics(self, view: JobView) -> MetricIndex: ...
    def cluster_metrics(self) -> dict[str, float]: ...
    def worker_metrics(self) -> dict[str, Mapping[str, float]]: ...


class Exposition:
    """The page of one endpoint for Prometheus, built again when it is too old."""

    def __init__(self, monitor: _Measured) -> None:
        self._monitor = monitor
        self._names: tuple[Any, ...] = ()
        """Names of all metrics in the order of reading. While they stay the same, the page changes
        only in its numbers.
        """
        self._order: list[int] = []
        """Index of the value of each line of the page."""
        self._beginnings: list[str] = []
        """Text before each value, including the end of the previous line."""
        self._page = b""
        self._made_at: float | None = None

    def page(self) -> bytes:
        """Returns the page, at most `FRESH_S` old."""
        now = self._monitor.host.clock.monotonic()
        if self._made_at is None or now - self._made_at >= FRESH_S:
            self._page, self._made_at = self._make().encode(), now
        return self._page

    def _make(self) -> str:
        monitor, now_ms = self._monitor, self._monitor.host.clock.wall_ms()
        cluster = monitor.cluster_metrics()
        jobs = [(view, job_metrics(view, now_ms), monitor.metrics(view)) for view in monitor.jobs()]
        values = list(cluster.values())
        names: list[Any] = [*cluster]
        workers = monitor.worker_metrics()
        for worker_id, told in workers.items():
            values += told.values()
            names += (worker_id, *told)
        for view, own, index in jobs:
            values += own.values()
            values += index.values()
            names += (view, *own, index, index.version)
        if tuple(names) != self._names:
            self._names = tuple(names)
            self._lay_out(self._lines(cluster, workers, jobs))
        parts = []
        for beginning, place in zip(self._beginnings, self._order, strict=True):
            value = values[place]
            # The difference is NaN for NaN and infinities.
            parts.append(
                f"{beginning}{+value}" if value - value == 0 else f"{beginning}{_not_finite(value)}"
            )
        return "".join(parts) + "\n"

    def _lines(
        self,
        cluster: Mapping[str, float],
        workers: Mapping[str, Mapping[str, float]],
        jobs: Sequence[tuple[JobView, Mapping[str, float], MetricIndex]],
    ) -> list[tuple[str, str]]:
        """Returns (family, beginning of the line) of each metric, in the order of reading."""
        lines = [
            (family, family) for family in (f"flink_jobmanager_{_name(name)}" for name in cluster)
        ]
        for worker_id, told in workers.items():
            labels = _labels(tm_id=worker_id)
            lines += [
                (family, f"{family}{labels}")
                for family in (f"flink_taskmanager_{_name(name)}" for name in told)
            ]
        for view, own, index in jobs:
            labels = _labels(job_id=view.id, job_name=view.name)
            lines += [
                (family, f"{family}{labels}")
                for family in (f"flink_jobmanager_job_{_name(name)}" for name in own)
            ]
            for (vertex_id, subtask), metrics in index.all().items():
                vertex = view.graph.vertex(vertex_id)
                lines += [
                    self._line(view, vertex, subtask, *index.operator_of(vertex_id, name))
                    for name in metrics
                ]
        return lines

    def _lay_out(self, lines: Sequence[tuple[str, str]]) -> None:
        families: dict[str, dict[str, int]] = {}
        for place, (family, line) in enumerate(lines):
            # Keyed by text, because two names may become one in Prometheus's spelling:
            # it refuses a page with duplicates.
            families.setdefault(family, {})[line] = place
        self._order, self._beginnings, end = [], [], ""
        for family, found in families.items():
            head = f"{end}# TYPE {family} gauge\n"
            for line, place in found.items():
                self._order.append(place)
                self._beginnings.append(f"{head}{line} ")
                head = end = "\n"

    def _line(
        self, view: JobView, vertex: JobVertex, subtask: int, operator: str, metric: str
    ) -> tuple[str, str]:
        labels = {
            "job_id": view.id,
            "job_name": view.name,
            "task_id": view.vertex_ids[vertex.id],
            "task_name": vertex.name,
            "subtask_index": str(subtask),
        }
        scope = "flink_taskmanager_job_task"
        if operator:
            scope = f"{scope}_operator"
            labels["operator_name"] = operator
        more, metric = labels_of(metric)
        labels |= more
        family = f"{scope}_{_name(metric)}"
        return family, f"{family}{_labels(**labels)}"


def labels_of(metric: str) -> tuple[dict[str, str], str]:
    """Returns the labels that are part of a metric's name, a split or a source, and the rest of the
    name.
    """
    if (found := _SPLIT.fullmatch(metric)) is not None:
        return {"split": found[1]}, f"split.watermark.{found[2]}"
    if (found := _LATENCY.fullmatch(metric)) is not None:
        return {"source": found[1]}, f"latency.{found[2]}"
    return {}, metric


def _name(name: str) -> str:
    return _UNFIT.sub("_", name)


def _labels(**labels: str) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    text = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return text.encode("utf-8", "replace").decode("utf-8")


def _not_finite(value: float) -> str:
    return "NaN" if value != value else ("+Inf" if value > 0 else "-Inf")
