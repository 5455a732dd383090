"""Timestamps and watermarks on columns: the results of the generators and valves of rows, for a
whole batch at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aioflow.columns.expressions import ColumnExpression, NotOnColumns
from aioflow.core.column_batch import ColumnBatch, NumberColumn

__all__ = ["TimesOf", "bounded", "clamped", "raised", "taken"]


class TimesOf:
    """Reads timestamps by an expression."""

    def __init__(self, expression: Any) -> None:
        self._compute = ColumnExpression(expression)

    def __call__(self, values: Any) -> NumberColumn | None:
        """The timestamps of a batch. None if rows must compute them, which also find invalid
        timestamps.
        """
        if not isinstance(values, ColumnBatch):
            return None
        try:
            found = self._compute(values)
        except NotOnColumns:
            return None
        if (
            isinstance(found, NumberColumn)
            and found.values.dtype == np.int64
            and (found.valid is None or found.valid.all())
        ):
            return NumberColumn(found.values)
        return None


def bounded(times: NumberColumn, highest: int, lag: int) -> tuple[NumberColumn | None, int]:
    """The watermark in force before each record, None when it does not move among them, and the
    highest timestamp after the last record.

    `highest` is the highest before the first; the watermark is always `lag` behind it.
    """
    running = np.maximum.accumulate(times.values)
    np.maximum(running, highest, out=running)
    last = int(running[-1])
    if len(running) == 1 or int(running[-2]) == highest:
        return None, last
    before = np.empty(len(running), np.int64)
    before[0] = highest - lag
    np.subtract(running[:-1], lag, out=before[1:])
    return NumberColumn(before), last


def raised(watermarks: NumberColumn, least: int) -> NumberColumn:
    """The watermarks, none below `least`."""
    return NumberColumn(np.maximum(watermarks.values, least))


def clamped(watermarks: NumberColumn, low: int, high: int) -> NumberColumn | None:
    """Watermarks within [low, high]; None when all of them become `low`."""
    if high <= low or int(watermarks.values[-1]) <= low:
        return None
    return NumberColumn(np.clip(watermarks.values, low, high))


def taken(items: Any, indices: np.ndarray) -> Any:
    """A list or column at `indices`; None stays None."""
    if items is None:
        return None
    return [items[i] for i in indices.tolist()] if type(items) is list else items.take(indices)
