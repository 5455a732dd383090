"""Window assigners of SQL: cumulative windows, and windows whose bounds are fields of records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aioflow.core.elements import TimeWindow
from aioflow.operators.window.triggers import Trigger, on_watermark

__all__ = ["CumulativeWindows", "FieldWindows"]

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CumulativeWindows:
    """Assigner of windows that begin every `size` ms and grow by `step` ms up to `size`."""

    step: int
    size: int
    is_event_time: bool = True
    is_merging: bool = field(default=False, init=False)

    def assign(self, value: Any, timestamp: int) -> list[TimeWindow]:
        start = timestamp - timestamp % self.size
        first = timestamp - (timestamp - start) % self.step + self.step
        ends = range(first, start + self.size + 1, self.step)
        return [TimeWindow(start, end) for end in ends]

    def default_trigger(self) -> Trigger[Any]:
        return on_watermark()

    def __str__(self) -> str:
        return f"cumulative({self.step} ms up to {self.size} ms)"


@dataclass(frozen=True, slots=True)
class FieldWindows:
    """Assigner of the window whose bounds are in two fields of the record."""

    start: str
    end: str
    is_event_time: bool = field(default=True, init=False)
    is_merging: bool = field(default=False, init=False)

    def assign(self, value: Row, timestamp: int) -> tuple[TimeWindow]:
        return (TimeWindow(value[self.start], value[self.end]),)

    def default_trigger(self) -> Trigger[Any]:
        return on_watermark()

    def __str__(self) -> str:
        return f"the window in the fields {self.start} and {self.end}"
