"""Applies stateless steps to whole batches: `filter` and `map` by expressions, and `select`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aioflow.columns.event_time import taken
from aioflow.columns.expressions import ColumnExpression, ColumnSelect, NotOnColumns
from aioflow.core.column_batch import ColumnBatch
from aioflow.core.elements import RecordBatch
from aioflow.expressions.nodes import Expr
from aioflow.expressions.trees import column_names

__all__ = ["ColumnSteps"]


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
