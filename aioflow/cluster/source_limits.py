"""Limits how far sources may read. Sources of one alignment group wait for the slowest of them. A
source may also have to wait until another input of an operator was read.

Tasks report their progress, and get limits in answer (`TaskExecutorGateway.limit_source`). A limit
holds back only the reading of a source. So barriers, timers and everything downstream go on.

*Alignment*: the event time of a subtask is at most that of the slowest subtask of the group plus
the drift. Ended and idle subtasks do not count. Nothing is limited before each has reported.

*Reading first*: a source that has to wait begins with its first limit. The limit is sent when every
subtask of each operator that the source waits for has reported. After a restart it waits again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aioflow.core.elements import MAX_WATERMARK
from aioflow.graph.deployment import ExecutionState

if TYPE_CHECKING:
    from aioflow.cluster.execution_graph import ExecutionGraph
    from aioflow.core.scope import ExecutionAttemptId
    from aioflow.graph.job_graph import JobGraph
    from aioflow.operators.watermarks import WatermarkAlignment

__all__ = ["SourceLimits"]

Place = tuple[int, int]
"""Vertex and subtask."""

TAKES_LIMITS = (ExecutionState.INITIALIZING, ExecutionState.RUNNING)


class SourceLimits:
    """The limits of one job. `limit(attempt, watermark)` sends a limit to a source."""

    def __init__(
        self, executions: ExecutionGraph, limit: Callable[[ExecutionAttemptId, int], None]
    ) -> None:
        self._executions = executions
        self._limit = limit
        self._graph: JobGraph | None = None
        self._aligned: dict[int, WatermarkAlignment] = {}
        """Vertices of sources with an alignment."""
        self._waits: dict[int, list[int]] = {}
        """Vertex of a source -> the vertices of the operators that it waits for."""
        self._progress: dict[Place, tuple[ExecutionAttemptId, int]] = {}
        self._sent: dict[Place, tuple[ExecutionAttemptId, int]] = {}

    def report(self, attempt: ExecutionAttemptId, watermark: int) -> None:
        """Handles the report of a task: its event time, or that its first input is read."""
        self._progress[attempt.vertex_id, attempt.subtask_index] = attempt, watermark
        self.update()

    def task_state(self, attempt: ExecutionAttemptId, state: ExecutionState) -> None:
        """Handles the new state of a task."""
        self._analyse()
        if not (self._aligned or self._waits):
            return
        if state is ExecutionState.RUNNING:
            # A limit sent before the task was there is lost.
            self._sent.pop((attempt.vertex_id, attempt.subtask_index), None)
        if state in (ExecutionState.RUNNING, ExecutionState.FINISHED):
            self.update()

    def update(self) -> None:
        """Sends the limits that have changed."""
        self._analyse()
        limits: dict[int, int] = {}
        for vertex, alignment in self._aligned.items():
            slowest = self._slowest(alignment.group)
            if slowest is not None:
                limits[vertex] = (
                    slowest if slowest == MAX_WATERMARK else slowest + alignment.max_drift_ms
                )
        for vertex in self._waits:
            if not self._may_begin(vertex):
                limits.pop(vertex, None)
            else:
                limits.setdefault(vertex, MAX_WATERMARK)
        for vertex, watermark in limits.items():
            for place in self._subtasks(vertex):
                self._send(place, watermark)

    def _send(self, place: Place, watermark: int) -> None:
        execution = self._executions.executions.get(place)
        if execution is None or execution.state not in TAKES_LIMITS:
            return
        if self._sent.get(place) != (execution.attempt, watermark):
            self._sent[place] = execution.attempt, watermark
            self._limit(execution.attempt, watermark)

    def _slowest(self, group: str) -> int | None:
        """Returns the least event time in a group, or None before every subtask has reported."""
        vertices = [
            one
            for one, alignment in self._aligned.items()
            if alignment.group == group and self._may_begin(one)
        ]
        marks = [self._reached(place) for one in vertices for place in self._subtasks(one)]
        known = [mark for mark in marks if mark is not None]
        return min(known, default=MAX_WATERMARK) if len(known) == len(marks) else None

    def _may_begin(self, vertex: int) -> bool:
        """Returns whether every input that a source waits for is read."""
        return all(
            self._reached(place) == MAX_WATERMARK
            for operator in self._waits.get(vertex, ())
            for place in self._subtasks(operator)
        )

    def _reached(self, place: Place) -> int | None:
        """Returns what the current attempt of a subtask has reported last."""
        execution = self._executions.executions.get(place)
        if execution is None:
            return None
        if execution.state is ExecutionState.FINISHED:
            return MAX_WATERMARK
        attempt, watermark = self._progress.get(place, (None, 0))
        return watermark if attempt == execution.attempt else None

    def _subtasks(self, vertex: int) -> list[Place]:
        parallelism = self._executions.graph.vertex(vertex).parallelism
        return [(vertex, index) for index in range(parallelism)]

    def _analyse(self) -> None:
        graph = self._executions.graph
        if graph is self._graph:
            return
        self._graph, self._aligned, self._waits = graph, {}, {}
        for vertex in graph.vertices:
            strategy = vertex.head.watermarks
            if strategy is not None and strategy.alignment is not None:
                self._aligned[vertex.id] = strategy.alignment
            for source in graph.waiting_for(vertex.id):
                self._waits.setdefault(source, []).append(vertex.id)
