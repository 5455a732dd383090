"""Ids that several layers pass on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ExecutionAttemptId", "TapPlace"]

TapPlace = int | tuple[int, str]
"""A tap on a job: the output of an operator, by the id of its node.

For a side output, the id and the name of the tag.
"""


@dataclass(frozen=True, slots=True)
class ExecutionAttemptId:
    """One try to run one subtask. `job_id` is 32 hex digits, `attempt` counts from 0."""

    job_id: str
    vertex_id: int
    subtask_index: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.job_id[:8]}-{self.vertex_id}-{self.subtask_index}#{self.attempt}"
