"""Computes timestamps and watermarks for a whole batch of columns.

The results equal those of the watermark generators and valves that process rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aioflow.columns.expressions import ColumnExpression, NotOnColumns
from aioflow.core.column_batch import ColumnBatch, NumberColumn

__all__ = ["TimesOf", "bounded", "clamped", "raised", "taken"]


class TimesOf:
    """A function that computes the timestamps of records by an expression."""

    def __init__(self, expression: Any) -> None:
        self._compute = ColumnExpression(expression)

    def __call__(self, values: Any) -> NumberColumn | None:
        """Returns the timestamps of a batch, in milliseconds.

        Returns None if they must be computed as rows, which also report invalid timestamps.
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
    """Returns the watermark before each record, and the highest timestamp after the last one.

    The watermark is always `lag` behind the highest timestamp so far, which is `highest` before the
    batch. The watermarks are None if only the last record may change the highest timestamp.
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
    """Returns `watermarks` with every value below `least` replaced by `least`."""
    return NumberColumn(np.maximum(watermarks.values, least))


def clamped(watermarks: NumberColumn, low: int, high: int) -> NumberColumn | None:
    """Returns the watermarks limited to [low, high], None if all of them become `low`."""
    if high <= low or int(watermarks.values[-1]) <= low:
        return None
    return NumberColumn(np.clip(watermarks.values, low, high))


def taken(items: Any, indices: np.ndarray) -> Any:
    """Returns the items of a list or column at `indices`, or None for None."""
    if items is None:
        return None
    return [items[i] for i in indices.tolist()] if type(items) is list else items.take(indices)
