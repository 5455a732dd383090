"""Indexes the metrics of a job by vertex and subtask. Metrics are read at most every `FRESH_S`.

Tasks name their metrics "task name (1/4).operator.metric". Names of users may hold any character.
So a name is parsed with the help of the names in the job graph, once, and the result is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from aioflow.task.metrics import unique_names

if TYPE_CHECKING:
    from aioflow.graph.job_graph import JobGraph, JobVertex

__all__ = ["MetricIndex", "OperatorMetric", "shown_value"]

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


def shown_value(value: float) -> str:
    """Returns a value as text, as REST shows it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return str(value)
