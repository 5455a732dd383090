"""Holds the numbers of one aggregate, such as a sum, for many keys in arrays.

The index in an array is the key's code. Each operation has the same effect as on rows: the records
are added one by one, in their order, to one accumulator for each key.

A `Plan` describes an aggregate that can be computed on columns, and computes its inputs from a
batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import repeat
from typing import Any

import numpy as np

from aioflow.columns.build import column_of
from aioflow.columns.expressions import ColumnExpression, NotOnColumns
from aioflow.core.column_batch import Column, ColumnBatch, NumberColumn, ObjectColumn
from aioflow.expressions.nodes import Expr

__all__ = [
    "Groups",
    "Inputs",
    "Leaf",
    "LeafKind",
    "LeafSpec",
    "Plan",
    "Tally",
    "check_merge",
    "copied",
    "grown",
    "tally_of",
]


class LeafKind(Enum):
    """The kind of a basic aggregate, such as a sum or a count."""

    COUNT = "count"
    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """A basic aggregate of the expression `fn`, over the records for which `where` is true.

    `fn` is None for a count. `where` is None for all records.
    """

    kind: LeafKind
    fn: Expr[Any] | None
    where: Expr[Any] | None


@dataclass(slots=True)
class Inputs:
    """The input of one basic aggregate from a batch.

    `values` is None for a count. `chosen` is the mask of the records that are included; None means
    all records.
    """

    values: np.ndarray | None
    chosen: np.ndarray | None
    greatest: int = 0
    """Largest absolute value of the values, if they are ints."""


class Plan:
    """An aggregate that can be computed on columns. It consists of one or more basic aggregates,
    the leaves.

    `names` are the names of the leaves in the result of `agg`. None means that the result is that
    of a single leaf, without a name.
    """

    def __init__(self, leaves: Sequence[LeafSpec], names: Sequence[str] | None) -> None:
        self.leaves = tuple(leaves)
        self.names = None if names is None else tuple(names)
        self._fns = [None if leaf.fn is None else ColumnExpression(leaf.fn) for leaf in leaves]
        self._wheres = [
            None if leaf.where is None else ColumnExpression(leaf.where) for leaf in leaves
        ]

    def inputs(self, batch: ColumnBatch) -> list[Inputs]:
        """Returns the input of each basic aggregate from `batch`.

        Raises NotOnColumns if an argument or a condition cannot be computed on columns, or if an
        argument is not numeric. Also raises it if the result could differ from the result on rows.
        """
        return [self._input(i, batch) for i in range(len(self.leaves))]

    def _input(self, i: int, batch: ColumnBatch) -> Inputs:
        kind, fn, where = self.leaves[i].kind, self._fns[i], self._wheres[i]
        chosen = None if where is None else where.true(batch)
        if kind is LeafKind.COUNT:
            return Inputs(None, chosen)
        assert fn is not None, "all but a count are of something"
        column = fn(batch)
        if not isinstance(column, NumberColumn):
            raise NotOnColumns(f"{fn.expression!r} gives values that are no 64-bit numbers")
        values = column.values
        if column.valid is not None:
            chosen = column.valid if chosen is None else chosen & column.valid
        if values.dtype.kind == "b":
            if kind in (LeafKind.MIN, LeafKind.MAX):
                raise NotOnColumns(
                    f"{fn.expression!r} gives bools, and the least of them is a bool"
                )
            values = values.astype(np.int64)
        counted = values if chosen is None else values[chosen]
        if values.dtype.kind == "i":
            greatest = max(abs(int(counted.min())), abs(int(counted.max()))) if len(counted) else 0
            return Inputs(values, chosen, greatest)
        if kind in (LeafKind.MIN, LeafKind.MAX) and np.signbit(counted[counted == 0]).any():
            raise NotOnColumns("-0.0 equals 0.0, and the first of them counts")
        return Inputs(values, chosen)


_LIMIT = 2**63


class Groups:
    """The records of a batch grouped by code, each group in order of arrival.

    Codes are below 2**32.
    """

    def __init__(self, codes: np.ndarray) -> None:
        # numpy sorts 16 bits by radix, in a tenth of the time of wider numbers. So more codes are
        # sorted twice.
        self._order = order = np.argsort(codes.astype(np.uint16), kind="stable")
        if len(codes) and int(codes.max()) >= 1 << 16:
            self._order = order = order[
                np.argsort((codes >> 16).astype(np.uint16)[order], kind="stable")
            ]
        ordered = codes[order]
        self._first = (
            np.concatenate(([0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1))
            if len(codes)
            else np.zeros(0, np.int64)
        )
        self.codes = ordered[self._first]
        """Code of each group."""
        self.lengths = np.diff(self._first, append=len(codes))
        """Number of records of each group."""

    def counted(self, before: np.ndarray) -> np.ndarray:
        """Returns for each record the number of records in its group so far, including this record.

        The count of a group starts from the number that `before` has for the group.
        """
        counts = np.repeat(before + 1 - self._first, self.lengths)
        counts += np.arange(len(counts))
        return self._as_they_came(counts)

    def sums(self, values: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Returns for each record the sum of the `values` (ints) in its group so far, including
        this record.

        The sum of a group starts from the number that `before` has for the group.
        """
        ordered = values[self._order]
        sums = np.cumsum(ordered)
        sums += np.repeat(before - sums.take(self._first) + ordered.take(self._first), self.lengths)
        return self._as_they_came(sums)

    def places(self) -> np.ndarray:
        """Returns for each record the index of its group."""
        return self._as_they_came(np.repeat(np.arange(len(self.codes)), self.lengths))

    def _as_they_came(self, ordered: np.ndarray) -> np.ndarray:
        out = np.empty_like(ordered)
        out[self._order] = ordered
        return out


Tally = tuple[np.ndarray, np.ndarray]
"""The distinct codes of a batch, and the number of records of each code."""


def tally_of(codes: np.ndarray, size: int) -> Tally | None:
    """Counts how often each code occurs in `codes`, which are all below `size`.

    Returns None if there are so few records that it is cheaper to process each record.
    """
    if len(codes) * 4 <= size:
        return None
    counts = np.bincount(codes, minlength=size)
    found = np.flatnonzero(counts)
    return found, counts[found]


class Leaf:
    """The arrays of one basic aggregate, such as a sum, for all keys.

    The index is the code of the key. The array `values` holds the sum, the minimum or the maximum.
    The array `counts` holds the number of values, or whether there is a value.
    """

    __slots__ = ("bound", "counts", "kind", "values")

    def __init__(self, kind: LeafKind) -> None:
        self.kind = kind
        self.values: np.ndarray | None = None  # The array gets the dtype of the first values.
        self.counts = np.zeros(0, np.int64)
        self.bound = 0
        """Upper bound of the absolute values of all sums of ints."""

    def admit(self, given: Inputs, count: int) -> None:
        """Raises NotOnColumns if the values of a batch cannot be added exactly."""
        if given.values is None:
            return
        if self.values is not None and self.values.dtype != given.values.dtype:
            raise NotOnColumns("ints and floats come in turns")
        if given.values.dtype.kind == "i" and self.kind in (LeafKind.SUM, LeafKind.MEAN):
            bound = self.bound + given.greatest * count
            if bound >= _LIMIT and self.values is not None and len(self.values):
                self.bound = max(abs(int(self.values.min())), abs(int(self.values.max())))
                bound = self.bound + given.greatest * count
            if bound >= _LIMIT:
                raise NotOnColumns("a sum could leave 64 bits")

    def grow(self, size: int, given: Inputs) -> None:
        if len(self.counts) < size:
            self.counts = grown(self.counts, size)
        if given.values is not None:
            if self.values is None:
                self.values = np.zeros(size, given.values.dtype)
            elif len(self.values) < size:
                self.values = grown(self.values, size)

    def unpack(self, held: Any, dtype: np.dtype[Any] | None) -> tuple[Any, int]:
        """Returns the value and the count of `held`, an accumulator in the form that row operators
        store.

        Raises NotOnColumns for an accumulator that the arrays cannot hold.
        """
        if self.kind is LeafKind.COUNT:
            total, count = None, held
        elif self.kind is LeafKind.MEAN:
            total, count = held
        elif held is None or (self.kind is LeafKind.SUM and type(held) is int and held == 0):
            total, count = 0, 0
        else:
            total, count = held, 1
        if type(count) is not int or count >= _LIMIT:
            raise NotOnColumns("a count that is none")
        if dtype is not None and count:
            wanted = int if dtype.kind == "i" else float
            if type(total) is not wanted or (wanted is int and abs(total) >= _LIMIT):
                raise NotOnColumns("ints and floats come in turns")
            if (
                self.kind in (LeafKind.MIN, LeafKind.MAX)
                and total == 0
                and math.copysign(1, total) < 0
            ):
                raise NotOnColumns("-0.0 equals 0.0, and the first of them counts")
        return total if count else 0, count

    def add(
        self, codes: np.ndarray, given: Inputs, which: np.ndarray | None, tally: Tally | None
    ) -> None:
        """Adds values to the accumulators of the keys that have the codes `codes`. `which` contains
        the indices of the records in the batch of `given`; None means all records.

        `tally` is how often each code occurs; None if not known.
        """
        values = given.values if given.values is None or which is None else given.values[which]
        if given.chosen is not None:
            counted = given.chosen if which is None else given.chosen[which]
            codes, tally = codes[counted], None
            values = None if values is None else values[counted]
        if not len(codes):
            return
        is_best = self.kind in (LeafKind.MIN, LeafKind.MAX)
        # The first value of a key is taken as it is, even NaN.
        first = self.counts[codes] == 0 if is_best else None
        tally = tally or tally_of(codes, len(self.counts))
        if tally is None:
            np.add.at(self.counts, codes, 1)
        else:
            where, times = tally
            self.counts[where] += times
        if values is None:
            return
        assert self.values is not None, "grown before"
        if first is None:
            self.bound += given.greatest * len(codes)
            with np.errstate(all="ignore"):  # Infinities and NaN are valid results.
                np.add.at(self.values, codes, values)
            return
        if first.any():
            self.values[codes[first][::-1]] = values[first][::-1]
        with np.errstate(all="ignore"):
            (np.fmin if self.kind is LeafKind.MIN else np.maximum).at(self.values, codes, values)

    def running(self, groups: Groups, given: Inputs) -> Column:
        """Returns the aggregate's result after each record of `groups`. Does not modify the
        accumulator arrays.
        """
        codes, chosen = groups.codes, given.chosen
        before = self.counts.take(codes)
        counts = (
            groups.counted(before)
            if chosen is None
            else groups.sums(chosen.astype(np.int64), before)
        )
        if self.kind is LeafKind.COUNT:
            return NumberColumn(counts)
        assert self.values is not None, "grown before"
        assert given.values is not None, "all but a count are of something"
        held, values = self.values.take(codes), given.values
        if self.kind in (LeafKind.SUM, LeafKind.MEAN) and values.dtype.kind == "i":
            totals = groups.sums(values if chosen is None else np.where(chosen, values, 0), held)
        else:
            totals = self._one_by_one(held, before, groups.places(), values, chosen)
        if self.kind is LeafKind.MEAN:
            pairs = zip(totals.tolist(), counts.tolist(), strict=True)
            return column_of([total / count if count else None for total, count in pairs])
        if counts.all():
            return NumberColumn(totals)
        if self.kind is LeafKind.SUM and totals.dtype.kind == "i":
            return NumberColumn(totals)
        none = 0 if self.kind is LeafKind.SUM else None
        return ObjectColumn(
            [
                total if count else none
                for total, count in zip(totals.tolist(), counts.tolist(), strict=True)
            ]
        )

    def _one_by_one(
        self,
        before: np.ndarray,
        counts: np.ndarray,
        places: np.ndarray,
        values: np.ndarray,
        chosen: np.ndarray | None,
    ) -> np.ndarray:
        """Returns the running results of a sum of floats, of min or of max. These must be computed
        record by record.
        """
        held: list[Any] = [
            value if count else None
            for value, count in zip(before.tolist(), counts.tolist(), strict=True)
        ]
        kind = self.kind
        out: list[Any] = []
        there = repeat(True, len(values)) if chosen is None else chosen.tolist()
        for place, x, counted in zip(places.tolist(), values.tolist(), there, strict=True):
            old = held[place]
            if counted:
                if old is None:
                    new = 0 + x if kind in (LeafKind.SUM, LeafKind.MEAN) else x
                elif kind is LeafKind.MIN:
                    new = x if x < old or old != old else old
                elif kind is LeafKind.MAX:
                    new = x if x > old or x != x else old
                else:
                    new = old + x
                held[place] = old = new
            out.append(0 if old is None else old)
        return np.array(out, values.dtype)

    def taken(self, codes: np.ndarray) -> Leaf:
        """Returns a copy that contains only the accumulators of the keys with the codes `codes`, in
        that order.

        A code beyond the end of the arrays has no values.
        """
        copy = Leaf(self.kind)
        copy.counts = _taken(self.counts, codes)
        copy.values = None if self.values is None else _taken(self.values, codes)
        return copy

    def merge(self, other: Leaf) -> None:
        """Merges the accumulators of a later slice into the accumulators with the same codes.

        The result is the same as if the accumulators of rows were merged one by one.
        """
        if other.values is not None:
            if self.values is None:
                self.values = np.zeros(len(self.counts), other.values.dtype)
            mine, new = self.values, other.values
            with np.errstate(all="ignore"):
                if self.kind in (LeafKind.SUM, LeafKind.MEAN):
                    both = mine + new
                else:
                    both = (np.fmin if self.kind is LeafKind.MIN else np.maximum)(mine, new)
            self.values = np.where(other.counts == 0, mine, np.where(self.counts == 0, new, both))
        self.counts += other.counts

    def accumulators(self, codes: np.ndarray) -> list[Any]:
        """Returns the accumulator of each key, given by its code in `codes`, in the form that row
        operators store.
        """
        counts = self.counts[codes]
        if self.kind is LeafKind.COUNT:
            return counts.tolist()  # type: ignore[no-any-return]
        values = [0] * len(codes) if self.values is None else self.values[codes].tolist()
        if self.kind is LeafKind.MEAN:
            return [
                [value if count else 0, count]
                for value, count in zip(values, counts.tolist(), strict=True)
            ]
        if counts.all():
            return values
        none = 0 if self.kind is LeafKind.SUM else None
        return [
            value if count else none for value, count in zip(values, counts.tolist(), strict=True)
        ]

    def results(self, codes: np.ndarray) -> Column:
        """Returns the aggregate's result for each key, given by its code in `codes`."""
        if self.kind is LeafKind.COUNT:
            return NumberColumn(self.counts[codes])
        if self.kind is not LeafKind.MEAN and self.values is not None and self.counts[codes].all():
            return NumberColumn(self.values[codes])
        if self.kind is LeafKind.MEAN:
            return ObjectColumn(
                [total / count if count else None for total, count in self.accumulators(codes)]
            )
        return ObjectColumn(self.accumulators(codes))


def check_merge(leaves: Sequence[Leaf]) -> None:
    """Raises NotOnColumns if the accumulators of one aggregate cannot be merged as arrays. `leaves`
    has the accumulators of each slice.
    """
    filled = [leaf for leaf in leaves if leaf.values is not None]
    dtypes = {leaf.values.dtype for leaf in filled if leaf.values is not None}
    if len(dtypes) > 1:
        raise NotOnColumns("ints and floats come in turns")
    summed = leaves[0].kind in (LeafKind.SUM, LeafKind.MEAN)
    if (
        summed
        and any(dtype.kind == "i" for dtype in dtypes)
        and sum(leaf.bound for leaf in filled) >= _LIMIT
    ):
        raise NotOnColumns("a sum could leave 64 bits")


def _taken(array: np.ndarray, codes: np.ndarray) -> np.ndarray:
    if len(codes) and int(codes.max()) >= len(array):
        there = codes < len(array)
        found = np.zeros(len(codes), array.dtype)
        found[there] = array[codes[there]]
        return found
    return array[codes]  # type: ignore[no-any-return]


def grown(array: np.ndarray, size: int) -> np.ndarray:
    """Returns an array of at least `size` items, padded with zeros.

    Returns the same array if it is long enough, otherwise a copy at least twice as long.
    """
    return array if size <= len(array) else copied(array, max(size, 2 * len(array)))


def copied(array: np.ndarray, size: int) -> np.ndarray:
    """Returns a copy of at least `size` items, padded with zeros."""
    copy = np.zeros(max(size, len(array)), array.dtype)
    copy[: len(array)] = array
    return copy
