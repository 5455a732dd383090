"""Decides which subtasks take part in a checkpoint (FLIP-147).

Some are triggered, some have to acknowledge, and some have finished already. Only tasks without a
running upstream task are triggered: sources, and tasks whose producers have all finished. Every
running task acknowledges. Reports of an attempt that is not the newest of its subtask are ignored.
The design follows Flink's DefaultCheckpointPlanCalculator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from aioflow.checkpoint.completed import CheckpointedOperator
from aioflow.checkpoint.instructions import CheckpointFailureReason
from aioflow.core.scope import ExecutionAttemptId

__all__ = [
    "CheckpointPlan",
    "CheckpointRefused",
    "CheckpointedVertex",
    "SubtaskTable",
    "VertexInput",
]

_NAMED_MAX = 3
"""Maximum number of missing subtasks that an error message names; the others are only counted."""


@dataclass(frozen=True, slots=True)
class VertexInput:
    """The description of an exchange from which a vertex reads."""

    vertex_id: int
    producers: tuple[Sequence[int], ...] | None = None
    """For a pointwise exchange: the producers that each subtask reads. None: every subtask reads
    all producers.
    """
    edge_id: int = -1
    """Id of the exchange."""
    keyed: bool = False
    """Whether the exchange partitions records by key."""
    may_be_overtaken: bool = False
    """Whether an unaligned checkpoint may overtake and store records of this exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointedVertex:
    """A vertex of the job, which is a chain of operators, as the coordinator sees it.

    `operators` begins with the head of the chain. All operators have the same parallelism.
    """

    vertex_id: int
    name: str
    operators: tuple[CheckpointedOperator, ...]
    inputs: tuple[VertexInput, ...] = ()

    @property
    def uid(self) -> str:
        """The uid of the head operator, which names the vertex in a checkpoint."""
        return self.operators[0].uid

    @property
    def parallelism(self) -> int:
        return self.operators[0].parallelism


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The attempts that a checkpoint triggers, and the attempts that have to acknowledge it.

    The attempts are in the order of the vertices, producers first.
    """

    triggered: tuple[ExecutionAttemptId, ...]
    acknowledging: tuple[ExecutionAttemptId, ...]
    finished: tuple[tuple[int, int], ...]
    """Subtasks that have nothing left to process, as (vertex id, index)."""


@dataclass(frozen=True, slots=True)
class CheckpointRefused:
    """The result of `SubtaskTable.plan` when no checkpoint can be taken now, with the reason."""

    reason: CheckpointFailureReason
    detail: str


class _Phase(Enum):
    DOWN = "not running: not yet, no more, or being restarted"
    RUNNING = "running"
    AT_END = "running, and through with its data: it waits for the final checkpoint"
    FINISHED = "finished"


@dataclass(slots=True)
class _Subtask:
    name: str
    phase: _Phase = _Phase.DOWN
    attempt: ExecutionAttemptId | None = None
    is_closing: bool = False
    """Whether the subtask is about to end, and takes no part in further checkpoints."""


class SubtaskTable:
    """The state of each subtask of a job, as reported by the attempts of the subtask.

    `vertices` are in topological order.
    """

    def __init__(self, vertices: Sequence[CheckpointedVertex]) -> None:
        self.vertices = tuple(vertices)
        self._subtasks = _subtasks_of(vertices)

    def rescaled(self, vertices: Sequence[CheckpointedVertex]) -> list[int]:
        """Replaces the vertices by the same vertices at another parallelism.

        Returns the ids of the vertices that have changed. The subtasks of these vertices count as
        running once they report RUNNING.
        """
        former = {vertex.vertex_id: vertex.parallelism for vertex in self.vertices}
        changed = [v.vertex_id for v in vertices if v.parallelism != former[v.vertex_id]]
        known = self._subtasks
        self.vertices = tuple(vertices)
        self._subtasks = {
            place: new if place[0] in changed else known[place]
            for place, new in _subtasks_of(vertices).items()
        }
        return changed

    def running(self, attempt: ExecutionAttemptId) -> None:
        """Notes that `attempt` runs. A newer attempt of a subtask replaces the older one."""
        known = self._subtasks.get((attempt.vertex_id, attempt.subtask_index))
        if known is None:
            return  # A late report of a former parallelism.
        if known.attempt is None or attempt.attempt > known.attempt.attempt:
            known.attempt, known.phase, known.is_closing = attempt, _Phase.RUNNING, False

    def end_of_data(self, attempt: ExecutionAttemptId) -> None:
        """Notes that `attempt` has reached the end of its data."""
        known = self._current(attempt)
        if known is not None and known.phase is _Phase.RUNNING:
            known.phase = _Phase.AT_END

    def closing(self, attempt: ExecutionAttemptId) -> None:
        """Notes that `attempt` is about to end."""
        known = self._current(attempt)
        if known is not None:
            known.is_closing = True

    def finished(self, attempt: ExecutionAttemptId) -> bool:
        """Notes that `attempt` has finished. Returns False if this changes nothing."""
        known = self._current(attempt)
        if known is None or known.phase not in (_Phase.RUNNING, _Phase.AT_END):
            return False
        known.phase = _Phase.FINISHED
        return True

    def lost(self, attempt: ExecutionAttemptId) -> bool:
        """Notes that `attempt` has failed or was cancelled. Returns False if this changes
        nothing.
        """
        known = self._current(attempt)
        if known is None or known.phase is _Phase.DOWN:
            return False
        known.phase = _Phase.DOWN
        return True

    def reset(self, vertex_id: int, index: int) -> None:
        """Notes that a subtask will be redeployed: reports of its last attempt no longer count."""
        self._subtasks[vertex_id, index].phase = _Phase.DOWN

    def name_of(self, attempt: ExecutionAttemptId) -> str:
        """Returns the name of `attempt`, for log and error messages."""
        return (
            f"{self._subtasks[attempt.vertex_id, attempt.subtask_index].name}, attempt "
            f"{attempt.attempt}"
        )

    @property
    def running_attempts(self) -> tuple[ExecutionAttemptId, ...]:
        return tuple(
            subtask.attempt
            for subtask in self._subtasks.values()
            if subtask.attempt is not None and subtask.phase in (_Phase.RUNNING, _Phase.AT_END)
        )

    @property
    def any_closing(self) -> bool:
        """Whether any running subtask is about to end."""
        return any(
            subtask.is_closing and subtask.phase in (_Phase.RUNNING, _Phase.AT_END)
            for subtask in self._subtasks.values()
        )

    @property
    def any_at_end(self) -> bool:
        """Whether any subtask has reached the end of its data and waits for the final
        checkpoint.
        """
        return any(subtask.phase is _Phase.AT_END for subtask in self._subtasks.values())

    @property
    def all_at_end(self) -> bool:
        """Whether every unfinished subtask has reached the end of its data, and there is at least
        one such subtask.
        """
        phases = {subtask.phase for subtask in self._subtasks.values()}
        return _Phase.AT_END in phases and phases <= {_Phase.AT_END, _Phase.FINISHED}

    def plan(self) -> CheckpointPlan | CheckpointRefused:
        """Returns which subtasks take part in a checkpoint that is triggered now, or why none can
        be taken."""
        missing = [s.name for s in self._subtasks.values() if s.phase is _Phase.DOWN]
        if missing:
            return CheckpointRefused(
                CheckpointFailureReason.NOT_ALL_TASKS_RUNNING, f"missing are {_named(missing)}"
            )
        finished = tuple(key for key, s in self._subtasks.items() if s.phase is _Phase.FINISHED)
        if len(finished) == len(self._subtasks):
            return CheckpointRefused(CheckpointFailureReason.ALL_TASKS_FINISHED, "the job ends")
        gone = dict.fromkeys(finished)
        triggered: list[ExecutionAttemptId] = []
        for vertex in self.vertices:
            for index in range(vertex.parallelism):
                attempt = self._subtasks[vertex.vertex_id, index].attempt
                assert attempt is not None
                if (vertex.vertex_id, index) not in gone and self._has_no_producer(
                    vertex, index, gone
                ):
                    triggered.append(attempt)
        return CheckpointPlan(tuple(triggered), self.running_attempts, finished)

    def _has_no_producer(
        self, vertex: CheckpointedVertex, index: int, gone: dict[tuple[int, int], None]
    ) -> bool:
        if not gone:
            return not vertex.inputs
        for read in vertex.inputs:
            producers = (
                range(self._parallelism(read.vertex_id))
                if read.producers is None
                else read.producers[index]
            )
            if any((read.vertex_id, producer) not in gone for producer in producers):
                return False
        return True

    def _parallelism(self, vertex_id: int) -> int:
        return next(vertex.parallelism for vertex in self.vertices if vertex.vertex_id == vertex_id)

    def _current(self, attempt: ExecutionAttemptId) -> _Subtask | None:
        known = self._subtasks.get((attempt.vertex_id, attempt.subtask_index))
        return known if known is not None and known.attempt == attempt else None


def _subtasks_of(vertices: Sequence[CheckpointedVertex]) -> dict[tuple[int, int], _Subtask]:
    return {
        (vertex.vertex_id, index): _Subtask(f"{vertex.name} ({index + 1}/{vertex.parallelism})")
        for vertex in vertices
        for index in range(vertex.parallelism)
    }


def _named(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED_MAX
    return ", ".join(names[:_NAMED_MAX]) + (f" and {rest} more" if rest > 0 else "")
