"""Encodes texts with one list of entries that grows from batch to batch.

A long-running source sees the same words again and again. With a list of entries for each batch,
every reader of the columns would have to look up each word again. With one list for all batches, a
reader looks up a word once, and the rest is arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from aioflow.core.column_batch import CodedColumn
from aioflow.core.entry_tables import GrowingList

__all__ = ["ENTRIES_MAX", "GrowingEntries"]

ENTRIES_MAX = 65_536
"""Number of entries after which a new list begins. Words recur, but names of requests do not, and
each column keeps a list.
"""


class GrowingEntries(dict[Any, int]):
    """Maps each distinct text to a code: its index in the list `entries`. None has code -1.

    After `entries_max` texts a new list begins.
    """

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
        """Whether the list of entries is full, so that the next column begins a new list."""
        return len(self.entries) >= self._entries_max

    def __missing__(self, text: Any) -> int:
        code = self[text] = len(self.entries)
        self.entries.append(text)
        return code

    def column(self, texts: Iterable[Any], count: int) -> CodedColumn:
        """Returns a coded column of `count` texts, which may be None."""
        if self.is_full:
            self._begin()
        return CodedColumn(np.fromiter(map(self.__getitem__, texts), np.int32, count), self.entries)

    def recoded(self, column: CodedColumn) -> CodedColumn:
        """Returns the column with codes into these entries. Each entry of `column` is looked up
        once.
        """
        places = self.column(column.entries, len(column.entries))
        if not len(places):
            return column
        codes = places.codes.take(column.codes, mode="wrap")
        if int(column.codes.min(initial=0)) < 0:
            codes[column.codes < 0] = -1
        return CodedColumn(codes, places.entries)
