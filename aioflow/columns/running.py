"""Computes running aggregates on columns: a result for each record.

The accumulators of an operator are kept in one `Cells` object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from aioflow.columns.cells import Cells
from aioflow.columns.expressions import NotOnColumns
from aioflow.columns.keys import KeyEncoder
from aioflow.columns.plans import Plan
from aioflow.core.column_batch import ColumnBatch

__all__ = ["KEYS_MAX", "RunningColumns"]

KEYS_MAX = 1_000_000
"""Number of keys at which the cells are emptied: the table may be on disk, larger than memory."""


class RunningColumns:
    """The running aggregate of one operator. It holds changes that its state table does not contain
    yet.

    `table_of` returns the table for writing given keys, and `peek` returns the table for reading.
    `is_one_spelling` checks that equal keys have the same type. The memory is emptied when it has
    more than `keys_max` keys.
    """

    def __init__(
        self,
        plan: Plan,
        table_of: Callable[[list[Any]], MutableMapping[Any, Any]],
        peek: Callable[[], Mapping[Any, Any]],
        is_one_spelling: Callable[[Iterable[Any]], bool],
        keys_max: int = KEYS_MAX,
    ) -> None:
        self._plan = plan
        self._table_of = table_of
        self._peek = peek
        self._is_one_spelling = is_one_spelling
        self._keys_max = keys_max
        self._encoder = KeyEncoder()
        self._cells: Cells | None = None
        self._spelled = 0
        """Number of keys whose types were checked."""

    @property
    def held(self) -> int:
        """Number of keys in memory."""
        return len(self._encoder)

    def process(self, keys: Any, values: Any) -> ColumnBatch:
        """Returns a pair (key, result so far) for each record.

        Raises NotOnColumns before any change.
        """
        if not isinstance(values, ColumnBatch):
            raise NotOnColumns("the values are no records of columns")
        if len(self._encoder) > self._keys_max:
            self.release()
            self._encoder, self._spelled = KeyEncoder(), 0
        inputs = self._plan.inputs(values)
        codes = self._encoder.encode_plain(keys)
        entries = self._encoder.entries
        new, self._spelled = entries[self._spelled :], len(entries)
        if codes is None or not self._is_one_spelling(new):
            raise NotOnColumns(
                "keys that are neither ints nor texts, or have been spelled in another way"
            )
        cells = self._cells or Cells(self._plan, complete=False)
        results = cells.running(codes, inputs, entries, self._peek())
        self._cells = cells
        return ColumnBatch({0: keys, 1: results}, len(values))

    def settle(self) -> None:
        """Writes all changes since the last call into the table of keyed state."""
        if self._cells is not None:
            for _ in self._cells.write(self._table_of, self._encoder.entries):
                pass

    def release(self) -> None:
        """Writes all changes into the table, and forgets the accumulators.

        Call it before rows write to the table.
        """
        self.settle()
        self._cells = None
