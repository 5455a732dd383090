"""Shows all metrics in Prometheus format, with the names and labels of Flink's reporter.

The text before each value rarely changes, so it is built once. A scrape only inserts the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.monitoring.calls import Answer, Call
from aioflow.monitoring.rest_metrics import cluster_metrics, job_metrics

if TYPE_CHECKING:
    from aioflow.graph.job_graph import JobVertex
    from aioflow.monitoring.metric_index import MetricIndex
    from aioflow.monitoring.monitor import Monitor
    from aioflow.monitoring.view import JobView

__all__ = ["CONTENT_TYPE", "Exposition", "labels_of", "metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FRESH_S = 0.2
"""Time for which a page is reused, in seconds, as for the metrics themselves."""

_UNFIT = re.compile(r"[^a-zA-Z0-9:_]")

_SPLIT = re.compile(r"split\.(.*)\.watermark\.(\w+)", re.DOTALL)
"""Pattern of a metric of one split of a source. The split becomes a label."""

_LATENCY = re.compile(r"latency\.(.*)\.(\w+)", re.DOTALL)
"""Pattern of the latency from one source. The source becomes a label."""


def metrics(call: Call) -> Any:
    """Answers GET /metrics with the page for Prometheus."""
    return Answer(call.monitor.exposition.page(), content_type=CONTENT_TYPE)


class Exposition:
    """The page of one endpoint for Prometheus, built again when it is too old."""

    def __init__(self, monitor: Monitor) -> None:
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
        cluster = cluster_metrics(monitor)
        jobs = [(view, job_metrics(view, now_ms), monitor.metrics(view)) for view in monitor.jobs()]
        values = list(cluster.values())
        names: list[Any] = [*cluster]
        workers = {
            worker.id: monitor.watched.worker_metrics(worker.id) for worker in monitor.workers()
        }
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
