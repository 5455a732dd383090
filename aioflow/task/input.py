"""What comes into a task, from gates or from a source reader, behind one small contract. After
Flink's StreamTaskInput.

`emit_next` hands at most one batch to the chain and says what to expect next; it never blocks.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aioflow.core.availability import Availability
    from aioflow.core.elements import Event, RecordBatch

__all__ = ["InputConsumer", "InputStatus", "TaskInput"]


class InputStatus(Enum):
    """What `emit_next` found."""

    MORE_AVAILABLE = "call again"
    NOTHING_AVAILABLE = "wait for availability"
    END_OF_DATA = "every input ended and drained"
    STOPPED = "every input ended, at least one without draining"


class InputConsumer(Protocol):
    """Where the elements of an input go: the task."""

    def on_batch(self, batch: RecordBatch, input_index: int) -> None: ...
    def on_status(self, idle: bool) -> None: ...
    def on_end_of_input(self, input_index: int) -> None:
        """Input `input_index` ended and drained, while others go on."""

    def on_event(self, event: Event) -> None:
        """Any event that is neither time nor end: latency markers."""


class TaskInput(Protocol):
    """One side of the task's contract with whatever feeds it."""

    @property
    def availability(self) -> Availability: ...
    def emit_next(self, max_records: int) -> InputStatus: ...
    def close(self) -> None: ...
