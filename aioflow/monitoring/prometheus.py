"""All metrics as Prometheus reads them, under the names and labels of Flink's reporter, gathered when somebody asks.

What a line begins with never changes, so it is put together once: a scrape writes numbers behind it.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from aioflow.monitoring.calls import Answer, Call
from aioflow.monitoring.rest_metrics import cluster_metrics, job_metrics

if TYPE_CHECKING:
    from aioflow.graph.job_graph import JobVertex
    from aioflow.monitoring.monitor import Monitor
    from aioflow.monitoring.view import JobView

__all__ = ["CONTENT_TYPE", "Exposition", "metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FRESH_S = 0.2
"""As long as the metrics themselves are kept: two scrapers at the same time cost one."""

_UNFIT = re.compile(r"[^a-zA-Z0-9:_]")

_SPLIT = re.compile(r"split\.(.*)\.watermark\.(\w+)", re.DOTALL)
"""A metric of one split of a source: the split becomes a label."""


def metrics(call: Call) -> Any:
    """GET /metrics."""
    return Answer(call.monitor.exposition.text(), content_type=CONTENT_TYPE)


class Exposition:
    """The page of one endpoint."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._lines: dict[tuple[str, int, int, str], tuple[str, str]] = {}
        """(job, vertex, subtask, name) -> (family, what the line begins with)."""
        self._text = ""
        self._made_at: float | None = None

    def text(self) -> str:
        """The page of now, or of a moment ago."""
        now = self._monitor.host.clock.monotonic()
        if self._made_at is None or now - self._made_at >= FRESH_S:
            self._text, self._made_at = self._make(), now
        return self._text

    def _make(self) -> str:
        monitor, now_ms = self._monitor, self._monitor.host.clock.wall_ms()
        families: dict[str, dict[str, float]] = {}
        for name, value in cluster_metrics(monitor).items():
            family = f"flink_jobmanager_{_name(name)}"
            families.setdefault(family, {})[family] = value
        views = monitor.jobs()
        for view in views:
            labels = _labels(job_id=view.id, job_name=view.name)
            for name, value in job_metrics(view, now_ms).items():
                family = f"flink_jobmanager_job_{_name(name)}"
                families.setdefault(family, {})[f"{family}{labels}"] = value
            self._add_tasks(view, families)
        known = {view.id for view in views}
        if any(key[0] not in known for key in self._lines):
            self._lines = {key: line for key, line in self._lines.items() if key[0] in known}
        parts = []
        for family, lines in families.items():
            parts.append(f"# TYPE {family} gauge\n")
            parts += [f"{line} {value if type(value) is int else _number(value)}\n" for line, value in lines.items()]
        return "".join(parts)

    def _add_tasks(self, view: JobView, families: dict[str, dict[str, float]]) -> None:
        index, lines = self._monitor.metrics(view), self._lines
        for (vertex_id, subtask), values in index.all().items():
            for name, value in values.items():
                key = view.id, vertex_id, subtask, name
                line = lines.get(key)
                if line is None:
                    operator, metric = index.operator_of(vertex_id, name)
                    line = lines[key] = self._line(view, view.graph.vertex(vertex_id), subtask, operator, metric)
                # By its text, because two names may be one once they are written as Prometheus wants: it refuses a page with twins.
                families.setdefault(line[0], {})[line[1]] = value

    def _line(self, view: JobView, vertex: JobVertex, subtask: int, operator: str, metric: str) -> tuple[str, str]:
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
        split = _SPLIT.fullmatch(metric)
        if split is not None:
            labels["split"], metric = split[1], f"split.watermark.{split[2]}"
        family = f"{scope}_{_name(metric)}"
        return family, f"{family}{_labels(**labels)}"


def _name(name: str) -> str:
    return _UNFIT.sub("_", name)


def _labels(**labels: str) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    text = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return text.encode("utf-8", "replace").decode("utf-8")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")


