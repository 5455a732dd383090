"""The page of all metrics for Prometheus, in three styles.

* `PROMETHEUS`: the families of `metric_families`, in Prometheus's text format.
* `OPENMETRICS`: the same families in the OpenMetrics format, which also has units.
* `FLINK`: the names and labels of Flink's reporter, all gauges, for dashboards made for Flink.

Invariant: the text before each value rarely changes, so it is built once. A scrape only inserts the
numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.monitoring.metric_families import Family, Kind, family_of
from aioflow.monitoring.metrics import FRESH_S, MetricIndex, job_metrics, labels_of

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.monitoring.view import JobView, WorkerView

__all__ = ["CONTENT_TYPES", "Exposition", "Style"]


class Style(Enum):
    """The names and the format of a page."""

    PROMETHEUS = auto()
    OPENMETRICS = auto()
    FLINK = auto()


_TEXT = "text/plain; version=0.0.4; charset=utf-8"

CONTENT_TYPES = {
    Style.PROMETHEUS: _TEXT,
    Style.OPENMETRICS: "application/openmetrics-text; version=1.0.0; charset=utf-8",
    Style.FLINK: _TEXT,
}


class _Measured(Protocol):
    """The interface of a `Monitor` that the page reads."""

    @property
    def host(self) -> Host: ...
    def jobs(self) -> Sequence[JobView]: ...
    def workers(self) -> Sequence[WorkerView]: ...
    def metrics(self, view: JobView) -> MetricIndex: ...
    def cluster_metrics(self) -> dict[str, float]: ...
    def worker_metrics(self) -> dict[str, Mapping[str, float]]: ...


@dataclass(frozen=True, slots=True)
class _Metric:
    """Describes one metric that was read: its owner, its name, and its labels."""

    scope: str
    """The kind of the owner: cluster, process, job, task or operator."""
    flink_scope: str
    owner: tuple[Any, ...]
    """Key that identifies the owner among all owners of the same scope."""
    name: str
    """Name of the metric, without the labels that are part of the name in Flink."""
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the page, without its value."""

    family: Family
    text: str
    """Text of the line before the value."""
    place: int
    """Index of the value in the list of all values."""
    times: int = -1
    """Index of a second value by which the value is multiplied; -1 if there is none."""


class Exposition:
    """The page of one endpoint in one style. It is built again when it is older than `FRESH_S`."""

    def __init__(self, monitor: _Measured, style: Style = Style.PROMETHEUS) -> None:
        self._monitor = monitor
        self._style = style
        self._names: tuple[Any, ...] = ()
        """Names of all metrics in the order in which they are read. While they stay the same, only
        the numbers of the page change.
        """
        self._parts: list[tuple[str, int, Callable[[float], float] | None, int]] = []
        """For each line of the page: the text before the value, including the end of the previous
        line; the index of the value; the function that converts the value, or None; and the index
        of a second value by which it is multiplied, or -1."""
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
        for worker_id, reported in workers.items():
            values += reported.values()
            names += (worker_id, *reported)
        for view, own, index in jobs:
            values += own.values()
            values += index.values()
            names += (view, *own, index, index.version)
        if tuple(names) != self._names:
            self._names = tuple(names)
            self._lay_out(self._metrics(cluster, workers, jobs))
        written = []
        for text, place, convert, times in self._parts:
            value = values[place]
            if convert is not None:
                value = convert(value)
            if times >= 0:
                value *= values[times]
            # The difference is NaN for NaN and infinities.
            written.append(
                f"{text}{+value}" if value - value == 0 else f"{text}{_not_finite(value)}"
            )
        end = "\n# EOF\n" if self._style is Style.OPENMETRICS else "\n"
        return "".join(written) + end

    def _metrics(
        self,
        cluster: Mapping[str, float],
        workers: Mapping[str, Mapping[str, float]],
        jobs: Sequence[tuple[JobView, Mapping[str, float], MetricIndex]],
    ) -> list[_Metric]:
        """Returns a description of each metric, in the order in which the values are read."""
        here = next((one.id for one in self._monitor.workers() if one.is_here), "jobmanager")
        flink = "flink_jobmanager"
        found = [
            _Metric("process", flink, (here,), name, {"process": here})
            if name.startswith("Status.")
            else _Metric("cluster", flink, (), name, {})
            for name in cluster
        ]
        for worker_id, reported in workers.items():
            labels = {"process": worker_id}
            found += [
                _Metric("process", "flink_taskmanager", (worker_id,), name, labels)
                for name in reported
            ]
        for view, own, index in jobs:
            labels = {"job_id": view.id, "job_name": view.name}
            found += [_Metric("job", f"{flink}_job", (view.id,), name, labels) for name in own]
            for (vertex_id, subtask), metrics in index.all().items():
                vertex = view.graph.vertex(vertex_id)
                task = {
                    **labels,
                    "task_id": view.vertex_ids[vertex_id],
                    "task_name": vertex.name,
                    "subtask_index": str(subtask),
                }
                for name in metrics:
                    operator, metric = index.operator_of(vertex_id, name)
                    more, metric = labels_of(metric)
                    scope = "operator" if operator else "task"
                    owner = (view.id, vertex_id, subtask, operator, *more.values())
                    flink_scope = "flink_taskmanager_job_task" + "_operator" * bool(operator)
                    if operator:
                        more = {"operator_name": operator, **more}
                    found.append(_Metric(scope, flink_scope, owner, metric, {**task, **more}))
        return found

    def _lay_out(self, metrics: Sequence[_Metric]) -> None:
        lines = (
            _flink_lines(metrics)
            if self._style is Style.FLINK
            else _lines(metrics, is_open=self._style is Style.OPENMETRICS)
        )
        families: dict[str, dict[str, _Line]] = {}
        for line in lines:
            # Keyed by text, because two names may become one in Prometheus's spelling: it refuses
            # a page with duplicates.
            families.setdefault(line.family.name, {})[line.text] = line
        self._parts, end = [], ""
        for found in families.values():
            head = end + self._head(next(iter(found.values())).family, families)
            for line in found.values():
                self._parts.append(
                    (f"{head}{line.text} ", line.place, line.family.convert, line.times)
                )
                head = end = "\n"

    def _head(self, family: Family, taken: Container[str]) -> str:
        """Returns the comment lines that come before the values of a family. `taken` has the names
        of all families.
        """
        if self._style is Style.FLINK:
            return f"# TYPE {family.name} gauge\n"
        name, kind = family.name, family.kind.value
        if self._style is Style.PROMETHEUS:
            return f"# HELP {name} {family.help}\n# TYPE {name} {kind}\n"
        if family.kind is Kind.COUNTER:
            # OpenMetrics names a counter without its suffix. The program may have that name, too.
            short = name.removesuffix("_total")
            name, kind = (name, "unknown") if short in taken else (short, kind)
        elif family.kind is Kind.UNKNOWN:
            kind = "unknown"
        unit = name.rpartition("_")[2]
        return f"# HELP {name} {family.help}\n# TYPE {name} {kind}\n" + (
            f"# UNIT {name} {unit}\n" if unit in UNITS else ""
        )


UNITS = ("bytes", "ratio", "seconds")
"""Last words of the names of families that have a unit."""


def _lines(metrics: Sequence[_Metric], *, is_open: bool) -> list[_Line]:
    """Returns the lines of the metrics with aioflow's own names. `is_open` selects the OpenMetrics
    format.
    """
    owned: dict[tuple[Any, ...], dict[str, int]] = {}
    for place, metric in enumerate(metrics):
        owned.setdefault((metric.scope, metric.owner), {})[metric.name] = place
    lines = []
    for number, metric in enumerate(metrics):
        siblings = owned[metric.scope, metric.owner]
        found = family_of(metric.scope, metric.name, siblings)
        if found is None:
            continue
        labels = _labels(**metric.labels, **found.labels)
        text = f"{found.family.name}{found.suffix}{labels}"
        lines.append(_Line(found.family, text, number, siblings.get(found.times, -1)))
    return lines


def _flink_lines(metrics: Sequence[_Metric]) -> list[_Line]:
    """Returns the lines of the metrics with Flink's names and labels."""
    lines = []
    for number, metric in enumerate(metrics):
        name = f"{metric.flink_scope}_{_name(metric.name)}"
        labels = dict(metric.labels)
        if (process := labels.pop("process", None)) and metric.flink_scope == "flink_taskmanager":
            labels["tm_id"] = process
        family = Family(name, Kind.GAUGE, "")
        lines.append(_Line(family, f"{name}{_labels(**labels) if labels else ''}", number))
    return lines


_UNFIT = re.compile(r"[^a-zA-Z0-9:_]")


def _name(name: str) -> str:
    return _UNFIT.sub("_", name)


def _labels(**labels: str) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    text = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return text.encode("utf-8", "replace").decode("utf-8")


def _not_finite(value: float) -> str:
    return "NaN" if value != value else ("+Inf" if value > 0 else "-Inf")
