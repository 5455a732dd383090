"""The input of a task, from gates or from a source reader. After Flink's StreamTaskInput.

`emit_next` passes at most one batch to the chain and returns what to expect next. It never blocks.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aioflow.core.elements import LatencyMarker, RecordBatch

__all__ = ["InputConsumer", "InputStatus"]


class InputStatus(Enum):
    """Result of `emit_next`."""

    MORE_AVAILABLE = "call again"
    NOTHING_AVAILABLE = "wait for availability"
    END_OF_DATA = "every input ended and drained"
    STOPPED = "every input ended, at least one without draining"


class InputConsumer(Protocol):
    """The receiver of the elements of a task's input, implemented by `loop.Intake`."""

    def on_batch(self, batch: RecordBatch, input_index: int) -> None: ...
    def on_status(self, idle: bool) -> None: ...
    def on_end_of_input(self, input_index: int) -> None:
        """Handles the end of input `input_index`, which was drained, while other inputs go on."""

    def on_marker(self, marker: LatencyMarker) -> None:
        """Handles a latency marker, which arrives in its order among the records."""
