"""The slices of windows as cells: one `Cells` for each slice that batches of columns have added to.

What is here and not yet in the table goes there with `settle`. Whoever is about to write to a slice by rows calls `release` before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from aioflow.columns.cells import Cells
from aioflow.columns.expressions import NotOnColumns
from aioflow.columns.keys import KeyEncoder
from aioflow.columns.plans import Inputs, Plan
from aioflow.core.column_batch import Column, ColumnBatch, NumberColumn
from aioflow.core.functions import WindowResult

__all__ = ["SliceColumns"]

KEYS_MIN = 100_000
"""Codes of keys that are gone are given up when there are so many, and four times as many as a slice has keys."""

TableOf = Callable[[int, list[Any]], MutableMapping[Any, Any]]
"""What the slice that starts there holds, to change these keys of it."""


class SliceColumns:
    """All cells of one operator. `table_of` and `peek` lead to the table."""

    def __init__(self, plan: Plan, table_of: TableOf, peek: Callable[[int], Mapping[Any, Any]]) -> None:
        self._plan = plan
        self._table_of = table_of
        self._peek = peek
        self._encoder = KeyEncoder()
        self._cells: dict[int, Cells] = {}
        self._count_before = 0
        """Keys of the slice that went last: the next one, which has few yet, will have about as many."""

    def prepare(self, keys: Any, values: Any) -> tuple[np.ndarray, list[Inputs]]:
        """The codes of `keys`, and what the aggregates take of `values`. Raises NotOnColumns."""
        if not isinstance(values, ColumnBatch):
            raise NotOnColumns("the values are no records of columns")
        inputs = self._plan.inputs(values)
        if len(self._encoder) > KEYS_MIN and len(self._encoder) > 4 * max(self._count_before, *(c.count for c in self._cells.values()), 0):
            for start in list(self._cells):
                self.release(start)
            self._encoder = KeyEncoder()
        codes = self._encoder.encode_plain(keys)
        if codes is None:
            raise NotOnColumns("keys that are neither ints nor texts")
        return codes, inputs

    def fold(self, start: int, codes: np.ndarray, inputs: list[Inputs], which: np.ndarray | None, *, new: bool) -> None:
        """Add records to the slice at `start`; `new` tells that the table has nothing of it. Raises NotOnColumns: nothing was added."""
        cells = self._cells.get(start)
        if cells is None:
            cells = Cells(self._plan, complete=new)
        cells.fold(codes, inputs, which, self._encoder.entries, None if cells.complete else self._peek(start))
        self._cells[start] = cells

    def settle(self, start: int | None = None) -> None:
        """Bring a slice, or all, into the table."""
        for at, cells in self._cells.items() if start is None else ((start, self._cells.get(start)),):
            if cells is not None:
                cells.write(lambda keys, at=at: self._table_of(at, keys), self._encoder.entries)  # type: ignore[misc]

    def release(self, start: int) -> None:
        """Rows are about to be added to this slice."""
        self.settle(start)
        self._cells.pop(start, None)

    def drop(self, start: int) -> None:
        """No window needs the slice any more."""
        cells = self._cells.pop(start, None)
        if cells is not None:
            self._count_before = cells.count

    def results(self, starts: Sequence[int], begin: int, end: int) -> ColumnBatch | None:
        """The results of the window [begin, end) made of these slices; None if the table has something of them that is not here."""
        found = [self._cells.get(start) for start in starts]
        cells = [one for one in found if one is not None and one.complete]
        if len(cells) < len(found):
            return None
        whole, codes = cells[0], cells[0].arrival
        if len(cells) > 1:
            try:
                whole, codes = cells[0].merged(cells[1:], len(self._encoder))
            except NotOnColumns:
                return None
        count = len(codes)
        columns: dict[str, Column] = {
            "key": self._encoder.decode(codes),
            "start": NumberColumn(np.full(count, begin, np.int64)),
            "end": NumberColumn(np.full(count, end, np.int64)),
            "value": whole.results(codes),
        }
        return ColumnBatch(columns, count, WindowResult)
