"""The metrics of a job by vertex and subtask, read at most once in a while.

Tasks name their metrics "task name (1/4).operator.metric"; names of users may hold any character, so a name is taken apart by the names
that the job graph gives, once, and remembered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from aioflow.task.metrics import unique_names

if TYPE_CHECKING:
    from aioflow.graph.job_graph import JobGraph, JobVertex

__all__ = ["MetricIndex", "OperatorMetric", "shown_value"]

FRESH_S = 0.2
"""Whoever asks within this time is given what the one before was: a hundred readers a second cost five readings."""

Subtask = tuple[int, int]
"""Vertex and index."""

OperatorMetric = tuple[str, str]
"""Operator, empty for the task itself, and metric."""


class MetricIndex:
    """`read()` gives all metrics of the job by dotted name; `now()` monotonic seconds."""

    def __init__(self, graph: JobGraph, read: Callable[[], Mapping[str, float]], now: Callable[[], float]) -> None:
        self._read = read
        self._now = now
        self._read_at: float | None = None
        self._by_subtask: dict[Subtask, dict[str, float]] = {}
        self._places: dict[str, tuple[Subtask, str] | None] = {}
        """Where a name belongs, and what it is called there."""
        self._split: dict[tuple[int, str], OperatorMetric] = {}
        self._prefixes = _prefixes(graph)
        self._operators = {vertex.id: unique_names([node.name for node in vertex.nodes]) for vertex in graph.vertices}

    def of_subtask(self, vertex_id: int, index: int) -> dict[str, float]:
        """Name -> value; those of operators begin with the operator's name."""
        return self.all().get((vertex_id, index), {})

    def of_vertex(self, vertex: JobVertex) -> list[dict[str, float]]:
        """Of each subtask."""
        found = self.all()
        return [found.get((vertex.id, index), {}) for index in range(vertex.parallelism)]

    def all(self) -> dict[Subtask, dict[str, float]]:
        """Of all subtasks. Not to be changed by the caller."""
        now = self._now()
        if self._read_at is None or now - self._read_at >= FRESH_S:
            self._read_at = now
            self._by_subtask = self._sorted(self._read())
        return self._by_subtask

    def operator_of(self, vertex_id: int, name: str) -> OperatorMetric:
        """Takes the name of a subtask's metric apart."""
        known = self._split.get((vertex_id, name))
        if known is None:
            operators = [o for o in self._operators.get(vertex_id, ()) if name.startswith(f"{o}.")]
            operator = max(operators, key=len, default="")
            known = self._split[vertex_id, name] = operator, name[len(operator) + 1 :] if operator else name
        return known

    def _sorted(self, metrics: Mapping[str, float]) -> dict[Subtask, dict[str, float]]:
        found: dict[Subtask, dict[str, float]] = {}
        places = self._places
        for name, value in metrics.items():
            place = places[name] if name in places else self._place(name)
            if place is not None:
                subtask, short = place
                found.setdefault(subtask, {})[short] = value
        return found

    def _place(self, name: str) -> tuple[Subtask, str] | None:
        place, at = None, name.find(".")
        while at >= 0:
            subtask = self._prefixes.get(name[:at])
            if subtask is not None:
                place = subtask, name[at + 1 :]  # The longest that fits: another task may be called like the beginning of this one.
            at = name.find(".", at + 1)
        self._places[name] = place
        return place


def _prefixes(graph: JobGraph) -> dict[str, Subtask]:
    """What the metrics of each subtask begin with: of several vertices of one name all but one add their id."""
    prefixes: dict[str, Subtask] = {}
    for vertex in graph.vertices:
        for index in range(vertex.parallelism):
            task = f"{vertex.name} ({index + 1}/{vertex.parallelism})"
            prefixes.setdefault(task, (vertex.id, index))
            prefixes[f"{task} #{vertex.id}"] = vertex.id, index
    return prefixes


def shown_value(value: float) -> str:
    """As REST shows metrics: always a string."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return str(value)
