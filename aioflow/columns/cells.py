"""Accumulators of many keys as arrays, one place for each code of a `KeyEncoder`.

The state backend stays the owner of state: cells are a write-back cache in front of one namespace of a table. What they hold goes
into the table, in the very form that rows keep there, before a snapshot, a query, or an operation on rows touches that namespace; a key
that the table holds already is read from it when it first comes. So a savepoint does not tell how a result was computed.

The order of additions is that of the records (`np.add.at` adds one by one), so sums of floats are equal to those of rows, bit by bit. What
arrays cannot hold so (ints beyond 64 bits, ints and floats in turns, zeros of both signs under min and max) is left to rows:
`NotOnColumns` is raised before anything was changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from aioflow.columns.expressions import ColumnExpression, NotOnColumns
from aioflow.columns.keys import distinct
from aioflow.columns.making import column_of
from aioflow.core.column_batch import Column, ColumnBatch, NumberColumn, ObjectColumn
from aioflow.core.expressions import Expr

__all__ = ["Cells", "Inputs", "LeafKind", "LeafSpec", "Plan"]

_LIMIT = 2**63


class LeafKind(Enum):
    """What one number of a key is."""

    COUNT = "count"
    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One aggregate: of what, and of which records; None: of all."""

    kind: LeafKind
    fn: Expr[Any] | None
    where: Expr[Any] | None


@dataclass(slots=True)
class Inputs:
    """What one aggregate takes of a batch: the values, and which records have one (None: all)."""

    values: np.ndarray | None
    chosen: np.ndarray | None
    greatest: int = 0
    """The largest magnitude among ints."""


class Plan:
    """An aggregate on columns. `names` is None for a single one, else those of the dict that `agg` gives."""

    def __init__(self, leaves: Sequence[LeafSpec], names: Sequence[str] | None) -> None:
        self.leaves = tuple(leaves)
        self.names = None if names is None else tuple(names)
        self._fns = [None if leaf.fn is None else ColumnExpression(leaf.fn) for leaf in leaves]
        self._wheres = [None if leaf.where is None else ColumnExpression(leaf.where) for leaf in leaves]

    def inputs(self, batch: ColumnBatch) -> list[Inputs]:
        """What each aggregate takes of `batch`. Raises NotOnColumns."""
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
                raise NotOnColumns(f"{fn.expression!r} gives bools, and the least of them is a bool")
            values = values.astype(np.int64)
        counted = values if chosen is None else values[chosen]
        if values.dtype.kind == "i":
            greatest = max(abs(int(counted.min())), abs(int(counted.max()))) if len(counted) else 0
            return Inputs(values, chosen, greatest)
        if kind in (LeafKind.MIN, LeafKind.MAX) and np.signbit(counted[counted == 0]).any():
            raise NotOnColumns("-0.0 equals 0.0, and the first of them counts")
        return Inputs(values, chosen)


class Groups:
    """Records sorted by group, each group in order of arrival: for sums within it."""

    def __init__(self, places: np.ndarray) -> None:
        # Few groups sort by radix.
        small = len(places) <= 65_536
        self._order = np.argsort(places.astype(np.uint16) if small else places, kind="stable")
        ordered = places[self._order]
        self._first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        self._lengths = np.diff(np.append(self._first, len(places)))

    def sums(self, values: np.ndarray) -> np.ndarray:
        """The sum of ints of each record's group up to and with that record."""
        ordered = values[self._order]
        sums = np.cumsum(ordered)
        sums -= np.repeat(sums[self._first] - ordered[self._first], self._lengths)
        out = np.empty(len(values), np.int64)
        out[self._order] = sums
        return out


class _Leaf:
    """The numbers of one aggregate: a total or best value, and how many, or whether any, values it is of."""

    __slots__ = ("bound", "counts", "kind", "values")

    def __init__(self, kind: LeafKind) -> None:
        self.kind = kind
        self.values: np.ndarray | None = None  # Its dtype is that of the first values.
        self.counts = np.zeros(0, np.int64)
        self.bound = 0
        """No total of ints is larger."""

    def admit(self, given: Inputs, count: int) -> None:
        """Raises NotOnColumns if the values of a batch cannot be added."""
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
            self.counts = _grown(self.counts, size)
        if given.values is not None:
            if self.values is None:
                self.values = np.zeros(size, given.values.dtype)
            elif len(self.values) < size:
                self.values = _grown(self.values, size)

    def unpack(self, held: Any, dtype: np.dtype[Any] | None) -> tuple[Any, int]:
        """Value and count of an accumulator of rows. Raises NotOnColumns for one that the arrays cannot hold."""
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
            if self.kind in (LeafKind.MIN, LeafKind.MAX) and total == 0 and math.copysign(1, total) < 0:
                raise NotOnColumns("-0.0 equals 0.0, and the first of them counts")
        return total if count else 0, count

    def add(self, codes: np.ndarray, given: Inputs, which: np.ndarray | None) -> None:
        """Add the records at `which`, whose codes are `codes`."""
        values = given.values if given.values is None or which is None else given.values[which]
        if given.chosen is not None:
            counted = given.chosen if which is None else given.chosen[which]
            codes = codes[counted]
            values = None if values is None else values[counted]
        if not len(codes):
            return
        size = len(self.counts)
        if len(codes) * 4 > size:
            self.counts += np.bincount(codes, minlength=size)
        else:
            np.add.at(self.counts, codes, 1)
        if values is None:
            return
        assert self.values is not None, "grown before"
        if self.kind in (LeafKind.SUM, LeafKind.MEAN):
            self.bound += given.greatest * len(codes)
            with np.errstate(all="ignore"):
                np.add.at(self.values, codes, values)
            return
        # A key without a value yet takes its first one, whatever that is.
        first = self.counts[codes] == np.bincount(codes, minlength=size)[codes]
        if first.any():
            self.values[codes[first][::-1]] = values[first][::-1]
        (np.fmin if self.kind is LeafKind.MIN else np.maximum).at(self.values, codes, values)

    def running(self, found: np.ndarray, places: np.ndarray, groups: Groups, given: Inputs) -> Column:
        """The result after each record; `found[places]` are the codes."""
        there = np.ones(len(places), np.int64) if given.chosen is None else given.chosen.astype(np.int64)
        counts = self.counts[found][places] + groups.sums(there)
        if self.kind is LeafKind.COUNT:
            return NumberColumn(counts)
        assert self.values is not None, "grown before"
        assert given.values is not None, "all but a count are of something"
        before, values = self.values[found], given.values
        if self.kind in (LeafKind.SUM, LeafKind.MEAN) and values.dtype.kind == "i":
            totals = before[places] + groups.sums(np.where(there == 1, values, 0))
        else:
            totals = self._one_by_one(before, self.counts[found], places, values, there)
        if self.kind is LeafKind.MEAN:
            pairs = zip(totals.tolist(), counts.tolist(), strict=True)
            return column_of([total / count if count else None for total, count in pairs])
        if counts.all():
            return NumberColumn(totals)
        if self.kind is LeafKind.SUM and totals.dtype.kind == "i":
            return NumberColumn(totals)
        none = 0 if self.kind is LeafKind.SUM else None
        return ObjectColumn([total if count else none for total, count in zip(totals.tolist(), counts.tolist(), strict=True)])

    def _one_by_one(
        self, before: np.ndarray, counts: np.ndarray, places: np.ndarray, values: np.ndarray, there: np.ndarray
    ) -> np.ndarray:
        """Sums of floats, and best values: each needs the one before it."""
        held: list[Any] = [value if count else None for value, count in zip(before.tolist(), counts.tolist(), strict=True)]
        kind = self.kind
        out: list[Any] = []
        for place, x, counted in zip(places.tolist(), values.tolist(), there.tolist(), strict=True):
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

    def merge(self, other: _Leaf, codes: np.ndarray) -> None:
        """Add what a later slice holds of `codes`, as `merge` of the aggregate does with one accumulator after the other."""
        theirs = other.counts[codes]
        if other.values is not None:
            if self.values is None:
                self.values = np.zeros(len(self.counts), other.values.dtype)
            elif self.values.dtype != other.values.dtype:
                raise NotOnColumns("ints and floats come in turns")
            if self.values.dtype.kind == "i" and self.kind in (LeafKind.SUM, LeafKind.MEAN):
                self.bound += other.bound
                if self.bound >= _LIMIT:
                    raise NotOnColumns("a sum could leave 64 bits")
            mine, new = self.values[codes], other.values[codes]
            with np.errstate(all="ignore"):
                if self.kind in (LeafKind.SUM, LeafKind.MEAN):
                    both = mine + new
                else:
                    both = (np.fmin if self.kind is LeafKind.MIN else np.maximum)(mine, new)
            self.values[codes] = np.where(theirs == 0, mine, np.where(self.counts[codes] == 0, new, both))
        self.counts[codes] += theirs

    def accumulators(self, codes: np.ndarray) -> list[Any]:
        """In the form that rows keep."""
        counts = self.counts[codes]
        if self.kind is LeafKind.COUNT:
            return counts.tolist()  # type: ignore[no-any-return]
        values = [0] * len(codes) if self.values is None else self.values[codes].tolist()
        if self.kind is LeafKind.MEAN:
            return [[value if count else 0, count] for value, count in zip(values, counts.tolist(), strict=True)]
        if counts.all():
            return values
        none = 0 if self.kind is LeafKind.SUM else None
        return [value if count else none for value, count in zip(values, counts.tolist(), strict=True)]

    def results(self, codes: np.ndarray) -> Column:
        """What the aggregate gives for each of `codes`."""
        if self.kind is LeafKind.COUNT:
            return NumberColumn(self.counts[codes])
        if self.kind is not LeafKind.MEAN and self.values is not None and self.counts[codes].all():
            return NumberColumn(self.values[codes])
        if self.kind is LeafKind.MEAN:
            return ObjectColumn([total / count if count else None for total, count in self.accumulators(codes)])
        return ObjectColumn(self.accumulators(codes))


class Cells:
    """The accumulators of one namespace. `complete`: no key of it is in the table that is not here."""

    def __init__(self, plan: Plan, *, complete: bool) -> None:
        self.plan = plan
        self.complete = complete
        self._leaves = [_Leaf(leaf.kind) for leaf in plan.leaves]
        self._seen = np.zeros(0, np.bool_)
        self._dirty = np.zeros(0, np.bool_)
        self._arrived: list[np.ndarray] = []
        self._written = 0
        """How many of `_arrived` are in the table."""

    def fold(
        self, codes: np.ndarray, inputs: list[Inputs], which: np.ndarray | None, entries: list[Any], held: Mapping[Any, Any] | None
    ) -> None:
        """Add records, whose codes are `codes`. `which`: their places in the batch that `inputs` are of; None: they are all of it.

        `held` is what the table has, None when that is nothing. Raises NotOnColumns, and nothing was changed.
        """
        self.admit(codes, inputs, entries, held)
        self.add(codes, inputs, which)

    def admit(self, codes: np.ndarray, inputs: list[Inputs], entries: list[Any], held: Mapping[Any, Any] | None) -> None:
        """Make room for records of these codes. Raises NotOnColumns if they cannot be added."""
        count, size = len(codes), len(entries)
        for leaf, given in zip(self._leaves, inputs, strict=True):
            leaf.admit(given, count)
        if len(self._seen) < size:
            self._seen, self._dirty = _grown(self._seen, size), _grown(self._dirty, size)
        size = len(self._seen)
        known = self._seen[codes]
        new = None if known.all() else distinct(codes[~known], size)[0]
        seeds = None if new is None or held is None else self._seeds(new, inputs, entries, held)
        for leaf, given in zip(self._leaves, inputs, strict=True):
            leaf.grow(size, given)
        if new is not None:
            self._seen[new] = True
            self._arrived.append(new)
        if seeds is not None:
            for leaf, (totals, counts, at) in zip(self._leaves, seeds, strict=True):
                leaf.counts[at] = counts
                if leaf.values is not None:
                    leaf.values[at] = totals
                    if leaf.values.dtype.kind == "i":
                        leaf.bound += max((abs(total) for total in totals), default=0)

    def add(self, codes: np.ndarray, inputs: list[Inputs], which: np.ndarray | None) -> None:
        """Add records that were admitted."""
        self._dirty[codes] = True
        for leaf, given in zip(self._leaves, inputs, strict=True):
            leaf.add(codes, given, which)

    def running(self, codes: np.ndarray, inputs: list[Inputs]) -> Column:
        """The result after each record, for records that were admitted and are not yet added."""
        found, places = distinct(codes, len(self._seen))
        groups = Groups(places)
        parts = [leaf.running(found, places, groups, given) for leaf, given in zip(self._leaves, inputs, strict=True)]
        return parts[0] if self.plan.names is None else ColumnBatch(dict(zip(self.plan.names, parts, strict=True)), len(codes))

    def _seeds(
        self, new: np.ndarray, inputs: list[Inputs], entries: list[Any], held: Mapping[Any, Any]
    ) -> list[tuple[list[Any], list[int], list[int]]]:
        """What the table holds of codes that come for the first time, by leaf."""
        found: list[tuple[list[Any], list[int], list[int]]] = [([], [], []) for _ in self._leaves]
        for code in new.tolist():
            accumulator = held.get(entries[code], _ABSENT)
            if accumulator is _ABSENT:
                continue
            parts = [accumulator] if self.plan.names is None else accumulator
            for leaf, given, part, (totals, counts, at) in zip(self._leaves, inputs, parts, found, strict=True):
                total, count = leaf.unpack(part, None if given.values is None else given.values.dtype)
                totals.append(total)
                counts.append(count)
                at.append(code)
        for leaf, given, (totals, _, _) in zip(self._leaves, inputs, found, strict=True):
            if given.values is None or given.values.dtype.kind != "i" or leaf.kind not in (LeafKind.SUM, LeafKind.MEAN):
                continue
            if leaf.bound + max((abs(total) for total in totals), default=0) + given.greatest * len(given.values) >= _LIMIT:
                raise NotOnColumns("a sum could leave 64 bits")
        return found

    def write(self, table_of: Callable[[list[Any]], MutableMapping[Any, Any]], entries: list[Any]) -> None:
        """Bring what has changed into the table, keys in the order in which they came first."""
        dirty = self._dirty
        if not dirty.any():
            return
        new = self._arrived[self._written :]
        self._written = len(self._arrived)
        first = np.concatenate(new) if new else np.zeros(0, np.int64)
        dirty[first] = False
        codes = np.concatenate([first, np.flatnonzero(dirty)])
        dirty[:] = False
        keys = list(map(entries.__getitem__, codes.tolist()))
        parts = [leaf.accumulators(codes) for leaf in self._leaves]
        accumulators = parts[0] if self.plan.names is None else map(list, zip(*parts, strict=True))
        table_of(keys).update(zip(keys, accumulators, strict=True))

    @property
    def arrival(self) -> np.ndarray:
        """All codes, in the order in which they came first."""
        if len(self._arrived) > 2:
            self._arrived, self._written = _joined(self._arrived, self._written)
        return np.concatenate([np.zeros(0, np.int64), *self._arrived])

    def results(self, codes: np.ndarray) -> Column:
        """What the aggregate gives for each of `codes`."""
        parts = [leaf.results(codes) for leaf in self._leaves]
        return parts[0] if self.plan.names is None else ColumnBatch(dict(zip(self.plan.names, parts, strict=True)), len(codes))

    def merged(self, later: Sequence[Cells], size: int) -> tuple[Cells, np.ndarray]:
        """This slice and `later` ones together, and the codes of all: earlier slices first, in order of arrival."""
        whole = Cells(self.plan, complete=True)
        for mine, leaf in zip(whole._leaves, self._leaves, strict=True):
            mine.counts = _copied(leaf.counts, size)
            mine.values = None if leaf.values is None else _copied(leaf.values, size)
            mine.bound = leaf.bound
        seen = _copied(self._seen, size)
        order = [self.arrival]
        for cells in later:
            codes = cells.arrival
            for mine, leaf in zip(whole._leaves, cells._leaves, strict=True):
                mine.merge(leaf, codes)
            order.append(codes[~seen[codes]])
            seen[codes] = True
        return whole, np.concatenate(order)


_ABSENT: Any = object()


def _joined(arrived: list[np.ndarray], written: int) -> tuple[list[np.ndarray], int]:
    """At most two pieces: what is written, and what is not."""
    pieces = [piece for piece in (arrived[:written], arrived[written:]) if piece]
    return [np.concatenate(piece) for piece in pieces], min(written, 1)


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    return array if size <= len(array) else _copied(array, max(size, 2 * len(array)))


def _copied(array: np.ndarray, size: int) -> np.ndarray:
    copy = np.zeros(max(size, len(array)), array.dtype)
    copy[: len(array)] = array
    return copy
