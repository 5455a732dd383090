"""Texts as codes into entries that grow from batch to batch: whoever has met them before knows them by the list that they are in.

A source that goes on for long sees the same words again and again. With a dictionary for each batch every reader of it would look each
word up anew; with one for all of them it does so once, and the rest is arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from aioflow.core.column_batch import CodedColumn, ColumnBatch
from aioflow.core.entry_tables import GrowingList

__all__ = ["ENTRIES_MAX", "GrowingColumns", "GrowingEntries"]

ENTRIES_MAX = 65_536
"""With so many it begins anew: words come again, names of requests do not, and what is kept here is kept for each column."""


class GrowingEntries(dict[Any, int]):
    """Gives each text, of equal ones the first, the next code; None has -1."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        super().__init__()
        self._entries_max = entries_max
        self._begin()

    def _begin(self) -> None:
        self.clear()
        self[None] = -1
        self.entries = GrowingList()

    def __missing__(self, text: Any) -> int:
        code = self[text] = len(self.entries)
        self.entries.append(text)
        return code

    def column(self, texts: Iterable[Any], count: int) -> CodedColumn:
        """The column of `count` texts, or None."""
        if len(self.entries) >= self._entries_max:
            self._begin()
        return CodedColumn(np.fromiter(map(self.__getitem__, texts), np.int32, count), self.entries)

    def recoded(self, column: CodedColumn) -> CodedColumn:
        """The same column with these entries: each of its own is looked up once."""
        places = self.column(column.entries, len(column.entries))
        if not len(places):
            return column
        codes = places.codes[column.codes]
        return CodedColumn(np.where(column.codes < 0, np.int32(-1), codes), places.entries)


RECORDS_PER_ENTRY = 8
"""Where a page has fewer records of each of its texts, to look the texts up costs more than their readers save."""


class GrowingColumns:
    """Gives the texts of page after page one list of entries for each column."""

    def __init__(self) -> None:
        self._entries: dict[Any, GrowingEntries] = {}

    def __call__(self, page: ColumnBatch) -> ColumnBatch:
        columns = {name: self._recoded(name, column) for name, column in page.columns.items()}
        return ColumnBatch(columns, len(page), page.make)

    def _recoded(self, name: Any, column: Any) -> Any:
        if not isinstance(column, CodedColumn) or len(column.entries) * RECORDS_PER_ENTRY > len(column):
            return column
        if list(map(type, column.entries)).count(str) < len(column.entries):
            return column
        entries = self._entries.get(name)
        if entries is None:
            entries = self._entries[name] = GrowingEntries()
        return entries.recoded(column)
