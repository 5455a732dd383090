"""Describes an aggregate that can be computed on columns, and computes its inputs from a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from aioflow.columns.expressions import ColumnExpression, NotOnColumns
from aioflow.core.column_batch import ColumnBatch, NumberColumn
from aioflow.expressions.nodes import Expr

__all__ = ["Inputs", "LeafKind", "LeafSpec", "Plan"]


class LeafKind(Enum):
    """The kind of a basic aggregate, such as a sum or a count."""

    COUNT = "count"
    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """A basic aggregate of the expression `fn`, over the records for which `where` is true.

    `fn` is None for a count. `where` is None for all records.
    """

    kind: LeafKind
    fn: Expr[Any] | None
    where: Expr[Any] | None


@dataclass(slots=True)
class Inputs:
    """The input of one basic aggregate from a batch.

    `values` is None for a count. `chosen` is the mask of the records that are included, None for
    all.
    """

    values: np.ndarray | None
    chosen: np.ndarray | None
    greatest: int = 0
    """Largest magnitude of the values, if they are ints."""


class Plan:
    """An aggregate that can be computed on columns. It consists of one or more basic aggregates,
    the leaves.

    `names` are the names of the leaves in the result of `agg`; None for a single leaf without a
    name.
    """

    def __init__(self, leaves: Sequence[LeafSpec], names: Sequence[str] | None) -> None:
        self.leaves = tuple(leaves)
        self.names = None if names is None else tuple(names)
        self._fns = [None if leaf.fn is None else ColumnExpression(leaf.fn) for leaf in leaves]
        self._wheres = [
            None if leaf.where is None else ColumnExpression(leaf.where) for leaf in leaves
        ]

    def inputs(self, batch: ColumnBatch) -> list[Inputs]:
        """Returns the input of each basic aggregate from `batch`. Raises NotOnColumns."""
        return [self._input(i, batch) for i in range(len(self.leaves))]

    def _input(self, i: int, batch: ColumnBatch) -> Inputs:
        kind, fn, where = self.leaves[i].kind, self._fns[i], self._wheres[i]
        chosen = None if where is None else where.true(batch)
        if kind is LeafKind.COUNT:
            return Inputs(None, chosen)
        assert fn is not None, "all but a count are of something"
        column = fn(batch)
        if not isinstance(column, NumberColumn):
            raise NotOnColumns(f"{fn.expression!r} gives values that are no 64-bit numbers")
        values = column.values
        if column.valid is not None:
            chosen = column.valid if chosen is None else chosen & column.valid
        if values.dtype.kind == "b":
            if kind in (LeafKind.MIN, LeafKind.MAX):
                raise NotOnColumns(
                    f"{fn.expression!r} gives bools, and the least of them is a bool"
                )
            values = values.astype(np.int64)
        counted = values if chosen is None else values[chosen]
        if values.dtype.kind == "i":
            greatest = max(abs(int(counted.min())), abs(int(counted.max()))) if len(counted) else 0
            return Inputs(values, chosen, greatest)
        if kind in (LeafKind.MIN, LeafKind.MAX) and np.signbit(counted[counted == 0]).any():
            raise NotOnColumns("-0.0 equals 0.0, and the first of them counts")
        return Inputs(values, chosen)
