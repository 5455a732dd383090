"""Texts as codes into entries that grow from batch to batch: whoever has met them before knows them
by the list that they are in.

A source that goes on for long sees the same words again and again. With a dictionary for each batch
every reader of it would look each word up anew; with one for all of them it does so once, and the
rest is arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from aioflow.core.column_batch import CodedColumn
from aioflow.core.entry_tables import GrowingList

__all__ = ["ENTRIES_MAX", "GrowingEntries"]

ENTRIES_MAX = 65_536
"""With so many it begins anew: words come again, names of requests do not, and what is kept here
is kept for each column.
"""


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

    @property
    def is_full(self) -> bool:
        """Whether the next column begins anew."""
        return len(self.entries) >= self._entries_max

    def __missing__(self, text: Any) -> int:
        code = self[text] = len(self.entries)
        self.entries.append(text)
        return code

    def column(self, texts: Iterable[Any], count: int) -> CodedColumn:
        """The column of `count` texts, or None."""
        if self.is_full:
            self._begin()
        return CodedColumn(np.fromiter(map(self.__getitem__, texts), np.int32, count), self.entries)

    def recoded(self, column: CodedColumn) -> CodedColumn:
        """The same column with these entries: each of its own is looked up once."""
        places = self.column(column.entries, len(column.entries))
        if not len(places):
            return column
        codes = places.codes.take(column.codes, mode="wrap")
        if int(column.codes.min(initial=0)) < 0:
            codes[column.codes < 0] = -1
        return CodedColumn(codes, places.entries)
