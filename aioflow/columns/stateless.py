"""Applies stateless steps to whole batches of columns: `filter`, `map`, `select`, and the
assignment of event time.

The timestamps and watermarks equal those of the generators and valves that process rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aioflow.columns.expressions import ColumnExpression, ColumnSelect, NotOnColumns
from aioflow.core.column_batch import ColumnBatch, NumberColumn
from aioflow.core.elements import RecordBatch
from aioflow.expressions.nodes import Expr
from aioflow.expressions.trees import column_names

__all__ = ["ColumnSteps", "TimesOf", "bounded", "clamped", "raised", "taken", "times_array"]


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


def times_array(timestamps: Sequence[int]) -> np.ndarray:
    """Returns the timestamps of a batch as an array. A column is not copied."""
    return np.asarray(timestamps.values if isinstance(timestamps, NumberColumn) else timestamps)


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


class ColumnSteps:
    """A sequence of steps. Each step is either the expression of a filter, or the fields of a
    select.
    """

    def __init__(self, steps: Sequence[Expr[Any] | Mapping[str, Expr[Any]]]) -> None:
        self._steps = [
            (ColumnExpression(step), _read_behind(steps[i + 1 :]))
            if isinstance(step, Expr)
            else (ColumnSelect(step), None)
            for i, step in enumerate(steps)
        ]

    def __call__(self, batch: RecordBatch) -> RecordBatch:
        """Returns the batch after all steps, with its timestamps and watermarks but without keys.

        Raises NotOnColumns before any change.
        """
        values: Any = batch.values
        kept: np.ndarray | None = None  # None: all records.
        for step, fields in self._steps:
            if not isinstance(values, ColumnBatch):
                raise NotOnColumns("the values are no records of columns")
            if isinstance(step, ColumnSelect):
                values = step(values)
                continue
            chosen = np.flatnonzero(step.true(values))
            if len(chosen) < len(values):
                if fields is not None:
                    values = ColumnBatch(
                        {name: column for name, column in values.columns.items() if name in fields},
                        len(values),
                    )
                values = values.take(chosen)
                kept = chosen if kept is None else kept[chosen]
        if kept is None:
            return RecordBatch(values, batch.timestamps, None, batch.watermarks, batch.watermark)
        if not len(kept):
            return RecordBatch([], None, None, None, batch.watermark)
        return RecordBatch(
            values,
            taken(batch.timestamps, kept),
            None,
            taken(batch.watermarks, kept),
            batch.watermark,
        )


def _read_behind(
    steps: Sequence[Expr[Any] | Mapping[str, Expr[Any]]],
) -> frozenset[str | int] | None:
    """Returns the fields that the later `steps` read, up to and including the first select.

    Returns None if there is no select, so that whole records come out.
    """
    read: list[str | int] = []
    for step in steps:
        if not isinstance(step, Expr):
            return frozenset((*read, *column_names(*step.values())))
        read += column_names(step)
    return None
