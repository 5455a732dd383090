"""Makes columns from Python values, and concatenates columns.

`GrowingEntries` encodes texts with one list of entries that grows from batch to batch. A long-
running source sees the same words again and again. With a list of entries for each batch, every
reader of the columns would have to look up each word again. With one list for all batches, a reader
looks up a word once, and all other work is done on arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from aioflow.core.column_batch import CodedColumn, Column, ColumnBatch, NumberColumn, ObjectColumn
from aioflow.core.wire.columns import GrowingList

__all__ = [
    "ENTRIES_MAX",
    "GrowingEntries",
    "column_of",
    "concat",
    "gather",
    "repeat",
    "scatter",
]

_NUMBERS: dict[type, Any] = {bool: np.bool_, int: np.int64, float: np.float64}
_CODED = frozenset((str, bytes))
"""Types whose equal values are indistinguishable. So one entry can represent all equal values."""

_NONE = type(None)


def column_of(items: list[Any]) -> Column:
    """Returns a column of `items`. Each item keeps its value and type.

    The result is a column of objects if the types are mixed, or if an int exceeds 64 bits.
    """
    kinds = set(map(type, items))
    nullable = _NONE in kinds
    kinds.discard(_NONE)
    if not kinds:
        return nothing(len(items))
    if len(kinds) > 1:
        return ObjectColumn(items)
    (kind,) = kinds
    dtype = _NUMBERS.get(kind)
    if dtype is not None:
        valid = None
        if nullable:
            valid = np.fromiter((item is not None for item in items), np.bool_, len(items))
            items = [kind() if item is None else item for item in items]
        try:
            return NumberColumn(np.array(items, dtype), valid)
        except OverflowError:
            return ObjectColumn(
                items if valid is None else NumberColumn(np.array(items, object), valid).to_list()
            )
    if kind not in _CODED:
        return ObjectColumn(items)
    index: dict[Any, int] = {}
    if nullable:
        codes = [-1 if item is None else index.setdefault(item, len(index)) for item in items]
    else:
        codes = [index.setdefault(item, len(index)) for item in items]
    return CodedColumn(np.array(codes, np.int32), list(index))


def nothing(length: int) -> CodedColumn:
    """Returns a column that contains None `length` times."""
    return CodedColumn(np.full(length, -1, np.int32), [])


def repeat(value: Any, length: int) -> Column:
    """Returns a column that contains the same value `length` times."""
    dtype = _NUMBERS.get(type(value))
    if value is None:
        return nothing(length)
    if dtype is not None and (dtype is not np.int64 or -(2**63) <= value < 2**63):
        return NumberColumn(np.full(length, value, dtype))
    return CodedColumn(np.zeros(length, np.int32), [value])


def gather(column: Column, codes: np.ndarray) -> Column:
    """Returns a column with `column[code]` for each code, and None for code -1."""
    absent = codes < 0
    if not absent.any():
        return column.take(codes)
    if not len(column):
        return nothing(len(codes))
    found = column.take(np.where(absent, 0, codes))
    if isinstance(found, NumberColumn):
        return NumberColumn(found.values, ~absent if found.valid is None else found.valid & ~absent)
    if isinstance(found, CodedColumn):
        return CodedColumn(np.where(absent, -1, found.codes).astype(np.int32), found.entries)
    return ObjectColumn(
        [
            None if gone else item
            for gone, item in zip(absent.tolist(), found.to_list(), strict=True)
        ]
    )


def scatter(length: int, parts: Sequence[tuple[np.ndarray, Column]]) -> Column:
    """Returns a column with the values of each part at the indices of this part.

    Together the parts must have every index from 0 to below `length` once.
    """
    parts = [(where, column) for where, column in parts if len(where)]
    if len(parts) == 1 and len(parts[0][0]) == length:
        where, column = parts[0]
        back = np.empty(length, np.int64)
        back[where] = np.arange(length)
        return column.take(back)
    known = [(where, column) for where, column in parts if not _is_nothing(column)]
    kinds = {column.values.dtype for _, column in known if isinstance(column, NumberColumn)}
    if known and len(kinds) == 1 and all(isinstance(column, NumberColumn) for _, column in known):
        values = np.zeros(length, kinds.pop())
        valid = np.zeros(length, np.bool_)
        for where, column in known:
            assert isinstance(column, NumberColumn)
            values[where] = column.values
            valid[where] = True if column.valid is None else column.valid
        return NumberColumn(values, None if valid.all() else valid)
    if all(isinstance(column, CodedColumn) for _, column in known):
        codes = np.full(length, -1, np.int32)
        entries: list[Any] = []
        for where, column in known:
            assert isinstance(column, CodedColumn)
            codes[where] = np.where(column.codes < 0, -1, column.codes + len(entries))
            entries += column.entries
        return CodedColumn(codes, entries)
    items: list[Any] = [None] * length
    for where, column in known:
        for index, item in zip(where.tolist(), column.to_list(), strict=True):
            items[index] = item
    return column_of(items)


def concat(columns: Sequence[Column]) -> Column:
    """Returns one column with the values of one or more columns, in order.

    The result is a column of objects if the columns have no common form.
    """
    if len(columns) == 1:
        return columns[0]
    numbers = [column for column in columns if isinstance(column, NumberColumn)]
    coded = [column for column in columns if isinstance(column, CodedColumn)]
    batches = [column for column in columns if isinstance(column, ColumnBatch)]
    if len(numbers) == len(columns) and len({column.values.dtype for column in numbers}) == 1:
        values = np.concatenate([column.values for column in numbers])
        if all(column.valid is None for column in numbers):
            return NumberColumn(values)
        there = [
            np.ones(len(column), np.bool_) if column.valid is None else column.valid
            for column in numbers
        ]
        return NumberColumn(values, np.concatenate(there))
    if len(coded) == len(columns):
        return _concat_coded(coded)
    if (
        len(batches) == len(columns)
        and len({(tuple(batch.columns), batch.make) for batch in batches}) == 1
    ):
        first = batches[0]
        made = {name: concat([batch.columns[name] for batch in batches]) for name in first.columns}
        return ColumnBatch(made, sum(map(len, batches)), first.make)
    items = [item for column in columns for item in column.to_list()]
    return ObjectColumn(items) if batches else column_of(items)


def _concat_coded(columns: Sequence[CodedColumn]) -> CodedColumn:
    """Concatenates coded columns. If several columns share a list of entries, the result has this
    list only once.
    """
    if all(column.entries is columns[0].entries for column in columns):
        return CodedColumn(np.concatenate([column.codes for column in columns]), columns[0].entries)
    entries: list[Any] = []
    base: dict[int, int] = {}
    parts = []
    for column in columns:
        if id(column.entries) not in base:
            base[id(column.entries)] = len(entries)
            entries += column.entries
        parts.append(
            np.where(column.codes < 0, -1, column.codes + base[id(column.entries)]).astype(np.int32)
        )
    return CodedColumn(np.concatenate(parts), entries)


def _is_nothing(column: Column) -> bool:
    return isinstance(column, CodedColumn) and not (
        len(column.entries) and (column.codes >= 0).any()
    )


ENTRIES_MAX = 65_536
"""Number of entries after which a new list of entries begins. This bounds the memory of a column
whose texts rarely recur, such as ids of requests.
"""


class GrowingEntries(dict[Any, int]):
    """Maps each distinct text to a code, its index in the list `entries`. None has code -1.

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
        """Returns `column` with codes that are indices into this list of entries. Looks up each
        entry of `column` once.
        """
        places = self.column(column.entries, len(column.entries))
        if not len(places):
            return column
        codes = places.codes.take(column.codes, mode="wrap")
        if int(column.codes.min(initial=0)) < 0:
            codes[column.codes < 0] = -1
        return CodedColumn(codes, places.entries)
