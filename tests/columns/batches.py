"""Batches of columns out of rows, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aioflow.columns.build import column_of
from aioflow.core.column_batch import ColumnBatch

__all__ = ["batch_of_rows"]


def batch_of_rows(rows: Sequence[dict[str, Any]]) -> ColumnBatch:
    """The columns of rows that all have the fields of the first."""
    names = tuple(rows[0]) if rows else ()
    return ColumnBatch({name: column_of([row[name] for row in rows]) for name in names}, len(rows))
