"""Stateless steps on columns: `filter` and `map` by expressions, and `select`, each on the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aioflow.columns.event_time import taken
from aioflow.columns.expressions import ColumnExpression, ColumnSelect, NotOnColumns
from aioflow.core.column_batch import ColumnBatch
from aioflow.core.elements import RecordBatch
from aioflow.core.expressions import Expr

__all__ = ["ColumnSteps"]


class ColumnSteps:
    """A run of steps. Each is the expression that a filter keeps by, or the fields of a select."""

    def __init__(self, steps: Sequence[Expr[Any] | Mapping[str, Expr[Any]]]) -> None:
        self._steps = [ColumnExpression(step) if isinstance(step, Expr) else ColumnSelect(step) for step in steps]

    def __call__(self, batch: RecordBatch) -> RecordBatch:
        """What is left of `batch`, its times and watermarks with it; keys are dropped. Raises NotOnColumns, and nothing was done."""
        values: Any = batch.values
        kept: np.ndarray | None = None  # All.
        for step in self._steps:
            if not isinstance(values, ColumnBatch):
                raise NotOnColumns("the values are no records of columns")
            if isinstance(step, ColumnSelect):
                values = step(values)
                continue
            chosen = np.flatnonzero(step.true(values))
            if len(chosen) < len(values):
                values = values.take(chosen)
                kept = chosen if kept is None else kept[chosen]
        if kept is None:
            return RecordBatch(values, batch.timestamps, None, batch.watermarks, batch.watermark)
        if not len(kept):
            return RecordBatch([], None, None, None, batch.watermark)
        return RecordBatch(values, taken(batch.timestamps, kept), None, taken(batch.watermarks, kept), batch.watermark)
