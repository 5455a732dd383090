"""The metrics of jobs by vertex and subtask.

Tasks name their metrics "task name (1/4).operator.metric". Names that users choose may contain any
character. So a name is parsed with the help of the names in the job graph. This is done once, and
the result is kept. Metrics are read at most every `FRESH_S`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from aioflow.checkpoint.statistics import CheckpointStatus
from aioflow.cluster.execution_graph import JobStatus
from aioflow.task.metrics import unique_names

if TYPE_CHECKING:
    from aioflow.graph.job_graph import JobGraph, JobVertex
    from aioflow.monitoring.view import JobView

__all__ = [
    "FRESH_S",
    "MetricIndex",
    "OperatorMetric",
    "job_metrics",
    "labels_of",
    "shown_value",
]

FRESH_S = 0.2
"""Time in seconds for which the metrics read last are used again. So a hundred calls in a second
cause only five readings.
"""

Subtask = tuple[int, int]
"""Vertex id and subtask index."""

OperatorMetric = tuple[str, str]
"""Name of the operator (empty for the task itself), and name of the metric."""


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

        These names change only when tasks start or programs make metrics. Until then `_plan` is
        kept.
        """
        self._plan: list[tuple[Subtask, list[str], list[int]]] = []
        """For each subtask: the names of its metrics, and the indices of their values in the last
        reading.
        """
        self.version = 0
        """Number that changes whenever the names of the metrics change."""
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
        """Returns the values of all metrics in the order of `all`. The names of the metrics stay
        the same as long as `version` does not change.
        """
        self._refresh()
        return [self._values[at] for _, _, places in self._plan for at in places]

    def operator_of(self, vertex_id: int, name: str) -> OperatorMetric:
        """Splits the name of a subtask's metric into the names of the operator and of the metric.
        The former is empty for a metric of the task itself.
        """
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

    Flink's `lastCheckpointExternalPath` is left out, because it is text. /checkpoints shows it.
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
    for one in (each for each in JobStatus if each.is_terminal):
        metrics[f"{one.value.lower()}State"] = int(status is one)
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
    """Returns the text that REST answers show for a value."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return str(value)


_SPLIT = re.compile(r"split\.(.*)\.watermark\.(\w+)", re.DOTALL)
"""Pattern of the name of a metric of one split of a source. The split becomes a label."""

_LATENCY = re.compile(r"latency\.(.*)\.(\w+)", re.DOTALL)
"""Pattern of the name of a latency metric for one source. The source becomes a label."""


def labels_of(metric: str) -> tuple[dict[str, str], str]:
    """Returns the labels that are part of a metric's name (a split or a source), and the rest of
    the name.
    """
    if (found := _SPLIT.fullmatch(metric)) is not None:
        return {"split": found[1]}, f"split.watermark.{found[2]}"
    if (found := _LATENCY.fullmatch(metric)) is not None:
        return {"source": found[1]}, f"latency.{found[2]}"
    return {}, metric
