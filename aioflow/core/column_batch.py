"""Columns: the values of a field of many records as one array, and a batch of them that reads like
a list of rows.

A `ColumnBatch` stands where a list of values stands, in `RecordBatch.values`. It has a length, it
can be cut, and iterating over it gives rows, made once. So every operator understands it, and
one that reads columns saves the rows. Times, keys and watermarks beside it are columns too, which
read like the lists of ints that they stand for.

Invariants: a column never changes once it is made; parts of it are views where that is cheap; what
comes out of `to_list` is plain Python values of the types that a row would hold (int, not int64).
Nothing here imports numpy: it only calls methods of arrays, so a program of rows does not load it.
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
"""Rows that one step takes at a time, some of which go to each of several consumers: enough to make
what a batch costs small beside them, and columns of numbers, of which a step has one or two in
hand, still fit into the cache of a core.
"""


class Column(Sequence[Any]):
    """The values of one field. Reads like a list; `take` and slices give columns."""

    __slots__ = ("_items",)

    _items: list[Any] | None

    @abstractmethod
    def take(self, indices: np.ndarray) -> Column:
        """The values at `indices`, in that order."""

    @abstractmethod
    def part(self, which: slice) -> Column:
        """The values of a stretch."""

    @abstractmethod
    def _one(self, index: int) -> Any:
        """One plain value, without making the others."""

    @abstractmethod
    def _make_list(self) -> list[Any]:
        """All of them. What it gives is kept."""

    def to_list(self) -> list[Any]:
        """Plain Python values, made once; not to be changed."""
        items = self._items
        if items is None:
            items = self._items = self._make_list()
        return items

    def __getitem__(self, index: int | slice) -> Any:
        return self.part(index) if isinstance(index, slice) else self._one(index)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.to_list())

    def __radd__(self, other: Any) -> list[Any]:
        # `[x] * n + column`, as one puts lists together.
        return other + self.to_list() if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)})"


class NumberColumn(Column):
    """bool, int64 or float64.

    `valid` tells where there is a value; None: everywhere. What stands elsewhere means nothing.
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
        # What is left of a filter has mostly all its values, and without a look at each it is
        # cheaper from here on.
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
    """Each value is one of `entries`, by its index; -1 is None. Entries may be anything but None,
    and need not differ.

    `entries` may grow at its end while columns share it, and is never changed otherwise.
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
            # A few records must not cost what all entries do: a slow consumer takes a batch in
            # small parts.
            return [None if code < 0 else entries[code] for code in codes]
        return list(map([*entries, None].__getitem__, codes))


class ObjectColumn(Column):
    """Values of any types, as they are."""

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
    """Records as columns of one length. Its rows are dicts of the field names; tuples if the names
    are positions, 0, 1, ...; or what `make` gives of the values in their order.

    It is a column itself, whose values are the rows: a field may hold records.
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
    """The items of `array` at int64 `indices`: for items of several bytes half of what `take`
    costs, for single bytes `take` itself.
    """
    return array[indices] if array.itemsize > 1 else array.take(indices)


def first_not_below(times: Sequence[int], least: int, start: int, stop: int) -> int:
    """Where the first of at least `least` is in the stretch of `times` from `start` to `stop`,
    which never decreases; `stop`: nowhere.
    """
    if isinstance(times, NumberColumn):
        return start + int(times.values[start:stop].searchsorted(least))
    return bisect_left(times, least, start, stop)


def lowest(times: Sequence[int]) -> int:
    """The least of some timestamps, be they a list or a column."""
    return (
        min(times)
        if type(times) is list or not isinstance(times, NumberColumn)
        else int(times.values.min())
    )


def highest(times: Sequence[int]) -> int:
    """The greatest of some timestamps, be they a list or a column."""
    return (
        max(times)
        if type(times) is list or not isinstance(times, NumberColumn)
        else int(times.values.max())
    )
