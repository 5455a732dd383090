"""Computes generated elements as columns, from expressions of their index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aioflow.columns.expressions import ColumnSelect, NotOnColumns
from aioflow.core.column_batch import ColumnBatch, NumberColumn
from aioflow.expressions.nodes import as_expression
from aioflow.expressions.rows import columns_to_function

__all__ = ["GeneratedColumns"]


class GeneratedColumns:
    """A function that makes the elements of a range of indices as columns.

    It makes rows instead if an expression cannot be computed on columns, so that an error names the
    faulty element.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._select = ColumnSelect({name: as_expression(e) for name, e in fields.items()})
        self._row = columns_to_function(fields)

    def __call__(self, indices: range) -> Sequence[Any]:
        index = NumberColumn(np.arange(indices.start, indices.stop, indices.step, dtype=np.int64))
        try:
            return self._select(ColumnBatch({"index": index}, len(indices)))
        except NotOnColumns:
            return [self._row({"index": i}) for i in indices]
