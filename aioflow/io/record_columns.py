"""Converts decoded records to columns with the same values as the rows.

If the record type determines a field's type, the field's values are not checked again. Without a
record type, records become columns if they are dicts with the same keys in the same order. Any
other block stays a list of rows, which every operator accepts as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_not, itemgetter
from typing import Any

import numpy as np

from aioflow.columns.build import GrowingEntries, column_of
from aioflow.core.column_batch import Column, ColumnBatch, NumberColumn, ObjectColumn
from aioflow.io.bodies import lines_of_objects
from aioflow.io.conversion import certain_hints_of, without_none

__all__ = ["FieldColumns", "RecordColumns", "count_objects"]

_NEW_LINE, _OPENS, _CLOSES = b"\n{}"

_NUMBERS: dict[Any, Any] = {int: np.int64, float: np.float64, bool: np.bool_}


class FieldColumns:
    """Converts the values of one field to a column, batch by batch.

    `hint` is the type of all values, or None if unknown.
    """

    def __init__(self, hint: Any = None) -> None:
        kind = without_none(hint)
        self._dtype = _NUMBERS.get(kind)
        self._is_nullable = kind is not hint
        self._is_text = kind is str
        self._entries = GrowingEntries()

    def __call__(self, items: list[Any]) -> Column:
        if self._dtype is not None:
            valid, numbers = None, items
            if self._is_nullable:
                valid = np.fromiter(map(is_not, items, repeat(None)), np.bool_, len(items))
                if valid.all():
                    valid = None
                else:
                    numbers = [0 if item is None else item for item in items]
            try:
                return NumberColumn(np.fromiter(numbers, self._dtype, len(items)), valid)
            except OverflowError:
                return ObjectColumn(items)
        if self._is_text or (
            items and type(items[0]) is str and list(map(type, items)).count(str) == len(items)
        ):
            return self._entries.column(items, len(items))
        return column_of(items)


def count_objects(data: bytes) -> int | None:
    """Returns the number of lines in `data` if each line begins with `{` and ends with `}`,
    otherwise None.

    Uses numpy, because plain Python would cost as much as decoding a field.
    """
    if b"\r" in data or not data.startswith(b"{") or not data.endswith((b"}", b"}\n")):
        return lines_of_objects(data)
    marks = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(marks[:-1] == _NEW_LINE)
    if (marks[ends - 1] != _CLOSES).any() or (marks[ends + 1] != _OPENS).any():
        return None
    return len(ends) + 1


class RecordColumns:
    """Converts lists of records to batches of columns.

    `type` is the type of the records. None means dicts, which are converted if all have the same
    keys.
    """

    def __init__(self, type: type[Any] | None) -> None:
        self._type = type
        hints = {} if type is None else certain_hints_of(type)
        self._fields = {name: FieldColumns(hint) for name, hint in hints.items()}
        self._wanted: frozenset[str] | None = None

    def narrow(self, names: Sequence[str]) -> None:
        """Limits the columns to the fields `names`. The rows of the batches are then dicts instead
        of records of the type.

        If records lack one of `names`, all their fields still become columns.
        """
        if self._type is None:
            self._wanted = frozenset(names)
        elif set(names) < set(self._fields):
            self._fields = {name: make for name, make in self._fields.items() if name in names}
            self._type = None

    @property
    def names(self) -> Sequence[str]:
        """The field names of the record type; empty without a type."""
        return tuple(self._fields)

    def of_columns(self, columns: Mapping[str, Column], count: int) -> ColumnBatch:
        """Returns a batch of `count` rows with `columns`."""
        return ColumnBatch(columns, count, self._type)

    def of_objects(self, records: Sequence[Any]) -> ColumnBatch:
        """Returns `records` as a batch of columns. The records are instances of the record type, or
        of a type with the same fields.
        """
        columns = {
            name: make(list(map(attrgetter(name), records))) for name, make in self._fields.items()
        }
        return ColumnBatch(columns, len(records), self._type)

    def of_dicts(self, records: list[Any]) -> ColumnBatch | list[Any]:
        """Returns `records` as a batch of columns if they are dicts with the same keys, otherwise
        unchanged.
        """
        if not records or set(map(type, records)) != {dict}:
            return records
        names = tuple(records[0])
        if (
            not names
            or list(map(tuple, records)).count(names) < len(records)
            or not all(type(name) is str for name in names)
        ):
            return records
        if self._wanted is not None and self._wanted < set(names):
            names = tuple(name for name in names if name in self._wanted)
        for name in names:
            if name not in self._fields:
                self._fields[name] = FieldColumns()
        return ColumnBatch(
            {name: self._fields[name](list(map(itemgetter(name), records))) for name in names},
            len(records),
        )
