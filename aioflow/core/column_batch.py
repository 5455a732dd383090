"""Columns, which hold the values of one field of many records, and batches of columns that read
like a list of rows.

A `ColumnBatch` takes the place of a list of values in `RecordBatch.values`. It has a length, it can
be sliced, and iterating over it yields rows, which are made once. So every operator supports it,
and an operator that reads columns saves the rows. The times, keys and watermarks of such a batch
are columns too, and read like lists.

Invariants: a column never changes once it is made. Slices of a column are views where a view is
cheap. `to_list` returns plain Python values of the types that a row would hold (int, not int64).
This module does not import numpy: it only calls methods of arrays, so a program of rows does not
load it.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "COLUMN_RECORDS_MAX",
    "CodedColumn",
    "Column",
    "ColumnBatch",
    "NumberColumn",
    "ObjectColumn",
    "first_not_below",
    "gathered",
    "highest",
    "lowest",
]

COLUMN_RECORDS_MAX: Final = 65_536
"""Maximum number of rows that one step processes at a time.

The number is large enough to make the fixed cost of a batch small, even if its rows are divided
among several consumers. It is small enough for the one or two number columns of a step to fit into
the cache of a core.
"""


class Column(Sequence[Any]):
    """The values of one field of many records. A column reads like a list; `take` and slices return
    columns.
    """

    __slots__ = ("_items",)

    _items: list[Any] | None

    @abstractmethod
    def take(self, indices: np.ndarray) -> Column:
        """Returns the values at `indices`, in that order."""

    @abstractmethod
    def part(self, which: slice) -> Column:
        """Returns the slice `which` of the column, as a column."""

    @abstractmethod
    def _one(self, index: int) -> Any:
        """Returns the value at one index as a plain Python value, without converting the other
        values.
        """

    @abstractmethod
    def _make_list(self) -> list[Any]:
        """Makes the list of all values, which the caller keeps."""

    def to_list(self) -> list[Any]:
        """Returns plain Python values, made once. The list must not be changed."""
        items = self._items
        if items is None:
            items = self._items = self._make_list()
        return items

    def __getitem__(self, index: int | slice) -> Any:
        return self.part(index) if isinstance(index, slice) else self._one(index)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.to_list())

    def __radd__(self, other: Any) -> list[Any]:
        # Supports `[x] * n + column`, as for lists.
        return other + self.to_list() if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)})"


class NumberColumn(Column):
    """A column of bool, int64 or float64 values.

    `valid` is true for each value that is not None. If `valid` is None, no value is None. The items
    of `values` that stand for None have no meaning.
    """

    __slots__ = ("valid", "values")

    def __init__(self, values: np.ndarray, valid: np.ndarray | None = None) -> None:
        self.values = values
        self.valid = valid
        self._items = None

    def __len__(self) -> int:
        return len(self.values)

    def take(self, indices: np.ndarray) -> NumberColumn:
        if self.valid is None:
            return NumberColumn(gathered(self.values, indices))
        valid = self.valid.take(indices)
        # After a filter usually no value is None, and a column without None is cheaper from here
        # on.
        return NumberColumn(gathered(self.values, indices), None if valid.all() else valid)

    def part(self, which: slice) -> NumberColumn:
        return NumberColumn(self.values[which], None if self.valid is None else self.valid[which])

    def _one(self, index: int) -> Any:
        return self.values[index].item() if self.valid is None or self.valid[index] else None

    def _make_list(self) -> list[Any]:
        items: list[Any] = self.values.tolist()
        if self.valid is None:
            return items
        return [
            item if there else None for item, there in zip(items, self.valid.tolist(), strict=True)
        ]


class CodedColumn(Column):
    """A column whose values are indices into the list `entries`; index -1 means None.

    Entries may be anything but None, and need not differ. `entries` may grow at its end while
    columns share it, and is never changed otherwise.
    """

    __slots__ = ("codes", "entries")

    def __init__(self, codes: np.ndarray, entries: list[Any]) -> None:
        self.codes = codes
        self.entries = entries
        self._items = None

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, indices: np.ndarray) -> CodedColumn:
        return CodedColumn(gathered(self.codes, indices), self.entries)

    def part(self, which: slice) -> CodedColumn:
        return CodedColumn(self.codes[which], self.entries)

    def _one(self, index: int) -> Any:
        code = self.codes[index]
        return None if code < 0 else self.entries[code]

    def _make_list(self) -> list[Any]:
        entries, codes = self.entries, self.codes.tolist()
        if len(entries) > len(codes):
            # A few records must not cost as much as all entries, because a slow consumer takes a
            # batch in small parts.
            return [None if code < 0 else entries[code] for code in codes]
        return list(map([*entries, None].__getitem__, codes))


class ObjectColumn(Column):
    """A column of values of any types, stored as they are."""

    __slots__ = ("items",)

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self._items = None

    def __len__(self) -> int:
        return len(self.items)

    def take(self, indices: np.ndarray) -> ObjectColumn:
        return ObjectColumn(list(map(self.items.__getitem__, indices.tolist())))

    def part(self, which: slice) -> ObjectColumn:
        return ObjectColumn(self.items[which])

    def _one(self, index: int) -> Any:
        return self.items[index]

    def _make_list(self) -> list[Any]:
        return self.items


class ColumnBatch(Column):
    """Records as columns of one length.

    Each row is a dict from field name to value, or a tuple if the names are positions (0, 1, ...).
    With `make`, each row is the result of `make`, called with the row's values in field order. The
    batch is itself a column whose values are the rows, so a field may hold records.
    """

    __slots__ = ("_length", "columns", "make")

    def __init__(
        self, columns: Mapping[Any, Column], length: int, make: Callable[..., Any] | None = None
    ) -> None:
        self.columns = columns
        self.make = make
        self._length = length
        self._items = None

    def __len__(self) -> int:
        return self._length

    @property
    def has_positions(self) -> bool:
        """Whether rows are tuples, with fields read by position."""
        return 0 in self.columns

    def take(self, indices: np.ndarray) -> ColumnBatch:
        return ColumnBatch(
            {name: column.take(indices) for name, column in self.columns.items()},
            len(indices),
            self.make,
        )

    def part(self, which: slice) -> ColumnBatch:
        length = len(range(*which.indices(self._length)))
        return ColumnBatch(
            {name: column.part(which) for name, column in self.columns.items()}, length, self.make
        )

    def _one(self, index: int) -> Any:
        if self._items is not None:
            return self._items[index]
        return self._row([column[index] for column in self.columns.values()])

    def _row(self, values: list[Any]) -> Any:
        if self.make is not None:
            return self.make(*values)
        return tuple(values) if self.has_positions else dict(zip(self.columns, values, strict=True))

    def _make_list(self) -> list[Any]:
        if not self.columns:
            return [{} for _ in range(self._length)]
        lists = [column.to_list() for column in self.columns.values()]
        if self.make is not None:
            return list(map(self.make, *lists))
        rows = zip(*lists, strict=True)
        if self.has_positions:
            return list(rows)
        names = tuple(self.columns)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def __repr__(self) -> str:
        return f"ColumnBatch({self._length} rows of {', '.join(map(str, self.columns))})"


def gathered(array: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Returns the items of `array` at int64 `indices`.

    Indexing items of several bytes takes half the time of `take`; items of one byte use `take`.
    """
    return array[indices] if array.itemsize > 1 else array.take(indices)


def first_not_below(times: Sequence[int], least: int, start: int, stop: int) -> int:
    """Returns the first index from `start` to `stop` (exclusive) whose time is at least `least`.

    `times` must not decrease in this range. Returns `stop` if there is no such time.
    """
    if isinstance(times, NumberColumn):
        return start + int(times.values[start:stop].searchsorted(least))
    return bisect_left(times, least, start, stop)


def lowest(times: Sequence[int]) -> int:
    """Returns the lowest of the timestamps `times`, a list or a column."""
    return (
        min(times)
        if type(times) is list or not isinstance(times, NumberColumn)
        else int(times.values.min())
    )


def highest(times: Sequence[int]) -> int:
    """Returns the highest of the timestamps `times`, a list or a column."""
    return (
        max(times)
        if type(times) is list or not isinstance(times, NumberColumn)
        else int(times.values.max())
    )
