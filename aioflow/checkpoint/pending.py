"""An unfinished checkpoint: the tasks that must still acknowledge it, and the state of the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from aioflow.checkpoint.completed import CheckpointedOperator, CompletedCheckpoint
from aioflow.checkpoint.plan import CheckpointPlan
from aioflow.checkpoint.requests import Request
from aioflow.checkpoint.subtask import SubtaskState
from aioflow.core.elements import CheckpointBarrier
from aioflow.core.ids import ExecutionAttemptId

__all__ = ["PendingCheckpoint"]


@dataclass(slots=True, kw_only=True)
class PendingCheckpoint:
    """A checkpoint that was triggered and has not completed or failed yet.

    `waiting` holds the attempts that must still acknowledge. `states` holds the state of the
    others, by uid of the vertex and subtask index. It contains finished subtasks from the
    beginning.
    """

    barrier: CheckpointBarrier
    request: Request
    plan: CheckpointPlan
    begun_s: float
    expires_s: float
    waiting: dict[ExecutionAttemptId, None]
    states: dict[tuple[str, int], SubtaskState] = field(default_factory=dict)
    storing: CompletedCheckpoint | None = None
    """The checkpoint that is being stored, set once all tasks have acknowledged."""

    @property
    def id(self) -> int:
        return self.barrier.checkpoint_id

    def __str__(self) -> str:
        return f"{'savepoint' if self.request.kind.is_savepoint else 'checkpoint'} {self.id}"

    def complete(
        self,
        flow: str,
        job_id: str,
        operators: tuple[CheckpointedOperator, ...],
        order: Iterable[tuple[str, int]],
        now_ms: int,
    ) -> CompletedCheckpoint:
        """Returns the checkpoint to store. All tasks must have acknowledged.

        `order` lists the subtasks, (uid, index), in the order in which the metadata lists them.
        """
        self.storing = CompletedCheckpoint(
            checkpoint_id=self.id,
            kind=self.request.kind,
            flow=flow,
            job_id=job_id,
            triggered_ms=self.barrier.timestamp_ms,
            completed_ms=now_ms,
            operators=operators,
            subtasks={subtask: self.states[subtask] for subtask in order},
            directory=self.request.directory,
        )
        return self.storing

    def missing(self, timeout_ms: int, name_of: Callable[[ExecutionAttemptId], str]) -> str:
        """Returns a part of a message that names the tasks which have not acknowledged after
        `timeout_ms`.
        """
        if self.storing is not None:
            return f"{timeout_ms} ms have passed, and it is still being stored"
        return f"{timeout_ms} ms have passed without a word of {self.waits_for(name_of)}"

    def waits_for(self, name_of: Callable[[ExecutionAttemptId], str]) -> str:
        """Returns the names of the tasks that have not acknowledged, or "the store"."""
        if self.storing is not None:
            return "the store"
        rest = len(self.waiting) - 1
        return name_of(next(iter(self.waiting))) + (f" and {rest} more" if rest else "")
