"""The phase of a task, from its deployment to its end."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["TaskLife", "TaskPhase"]


class TaskPhase(IntEnum):
    """Phases in their order; a task enters each at most once, and may skip some."""

    CREATED = 0
    """Deployed. Its partitions are registered, and no user code was called."""
    OPENING = 1
    """Operators are made, restored and opened."""
    RUNNING = 2
    """The mailbox loop moves records."""
    ENDED = 3
    """The input has ended. Results of async functions may still come."""
    FINISHING = 4
    """Operators are between their last element and their end: no checkpoint is taken."""
    LINGERING = 5
    """Waits for the checkpoint that commits everything."""
    LEAVING = 6
    """The end goes downstream."""
    CLOSED = 7
    """The loop is over, and parts are closed."""


class TaskLife:
    """The phase of one task, for all of its parts."""

    __slots__ = ("phase",)

    def __init__(self) -> None:
        self.phase = TaskPhase.CREATED

    @property
    def is_running(self) -> bool:
        """Whether the mailbox loop serves requests from outside."""
        return TaskPhase.RUNNING <= self.phase < TaskPhase.CLOSED

    @property
    def has_ended(self) -> bool:
        """Whether no more records come."""
        return self.phase >= TaskPhase.ENDED
