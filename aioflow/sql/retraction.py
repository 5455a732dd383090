"""Aggregates that support retraction: a value can be removed when its row is deleted or replaced.

COUNT, SUM and AVG subtract. MIN, MAX and COUNT(DISTINCT) count equal values in a map of keyed
state, and search this map only if the least or greatest value is deleted. Other aggregates are
computed again from all their values, in order of arrival.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from functools import reduce
from typing import Any

from aioflow.core.functions import AggregateFunction
from aioflow.expressions.nodes import Column
from aioflow.expressions.rows import compile_predicate, compile_row
from aioflow.operators.aggregate import functions as af
from aioflow.sql import values as v

__all__ = ["Retractable", "retractable"]


class Retractable:
    """An aggregate from which values can be removed. This class itself is COUNT."""

    initial: Any = 0
    keeps_values = False
    """Whether the aggregate keeps a map of its values in keyed state."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.where = None if part.where is None else compile_predicate(part.where)

    def changed(self, accumulator: Any, row: Any, change: int, values: Any) -> Any:
        """Returns the accumulator after a row was inserted (`change` 1) or deleted (-1). `values`
        is the map of the aggregate's values, None without `keeps_values`.
        """
        return accumulator + change if self.where is None or self.where(row) else accumulator

    def result(self, accumulator: Any, values: Any) -> Any:
        return accumulator


class _OfValues(Retractable):
    """An aggregate of the values of an expression."""

    takes_none = False

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self.read = compile_row(part.fn)

    def changed(self, accumulator: Any, row: Any, change: int, values: Any) -> Any:
        if self.where is not None and not self.where(row):
            return accumulator
        value = self.read(row)
        if value is None and not self.takes_none:
            return accumulator
        return self._with(accumulator, value, change, values)

    def _with(self, accumulator: Any, value: Any, change: int, values: Any) -> Any:
        raise AssertionError(f"{type(self).__name__} does not say how to change")


class _Total(_OfValues):
    """SUM and AVG. Sums of floats are exact, because the rounding error of a large float would
    otherwise remain after its deletion.

    The accumulator has the sum of the finite numbers, and the count of all numbers. It also has the
    counts of floats, of NaN, of infinity and of minus infinity. The sum of floats is a numerator
    and a denominator, because a Fraction cannot be serialized.
    """

    initial = (0, 0, 0, 0, 0, 0)

    def _with(self, accumulator: Any, value: Any, change: int, values: Any) -> Any:
        total, count, floats, *rest = accumulator
        if type(value) is float:
            floats += change
            if math.isfinite(value):
                value = Fraction(value)
            else:
                rest[0 if value != value else 1 if value > 0 else 2] += change
                value = 0
        if change < 0:
            value = value.copy_negate() if type(value) is Decimal else -value
        total = v.total(_number(total), value)
        if isinstance(total, Fraction):
            total = total.as_integer_ratio()
        return (total, count + change, floats, *rest)

    def result(self, accumulator: Any, values: Any) -> Any:
        total, count, floats, nan, most, least = accumulator
        total = _number(total)
        if not count:
            return None if isinstance(self.part, af.Mean) else 0
        if floats:
            if nan or (most and least):
                total = math.nan
            elif most or least:
                total = math.inf if most else -math.inf
            else:
                total = _float(total)
        elif isinstance(total, Fraction):  # All floats were deleted.
            total = int(total)
        return v.quotient(total, count) if isinstance(self.part, af.Mean) else total


def _number(total: Any) -> Any:
    return Fraction(*total) if isinstance(total, tuple | list) else total


def _float(exact: Fraction | int) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


class _Counted(_OfValues):
    """COUNT(DISTINCT). Its map has the number of rows with each value."""

    keeps_values = True

    def _with(self, accumulator: Any, value: Any, change: int, values: Any) -> Any:
        key = _text(value)
        _, count = values.get(key) or (value, 0)
        if count + change > 0:
            values.put(key, (value, count + change))
        else:
            values.remove(key)
        return self._after(accumulator, value, values, (count > 0, count + change > 0))

    def _after(self, accumulator: Any, value: Any, values: Any, there: tuple[bool, bool]) -> Any:
        """Returns the new accumulator. `there` says whether the value existed before the change,
        and whether it exists after the change.
        """
        return accumulator - there[0] + there[1]


class _Extreme(_Counted):
    """MIN and MAX. The accumulator is the least or greatest value."""

    initial = None

    def _after(self, accumulator: Any, value: Any, values: Any, there: tuple[bool, bool]) -> Any:
        if there[1]:
            return self.part.merge(accumulator, value)
        if value == accumulator or accumulator != accumulator:
            return reduce(self.part.merge, (one for one, _ in values.values()), None)
        return accumulator


class _Kept(_OfValues):
    """Any other aggregate. Its map has the sequence numbers of the insertions of each value.

    The accumulator is the number of values that have been inserted.
    """

    keeps_values = True

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self.takes_none = isinstance(part, af.Collect | af.First | af.Last)
        self.again = type(part)(Column("value"), None)

    def _with(self, accumulator: Any, value: Any, change: int, values: Any) -> Any:
        key = _text(value)
        _, places = values.get(key) or (value, ())
        places = (*places, accumulator) if change > 0 else places[1:]
        if places:
            values.put(key, (value, places))
        else:
            values.remove(key)
        return accumulator + (change > 0)

    def result(self, accumulator: Any, values: Any) -> Any:
        found = ((place, value) for value, places in values.values() for place in places)
        made = self.again.create_accumulator()
        for _, value in sorted(found, key=lambda one: one[0]):
            made = self.again.add({"value": value}, made)
        return self.again.get_result(made)


def _text(value: Any) -> str:
    """Returns a text that is the same for equal values: 1, 1.0 and TRUE are equal, as in Python."""
    if isinstance(value, bool | float | Decimal) and math.isfinite(value) and value == int(value):
        value = int(value)
    return repr(value)


def retractable(part: AggregateFunction[Any, Any, Any]) -> Retractable:
    """Returns the retractable form of an aggregate."""
    if isinstance(part, af.Count):
        return Retractable(part)
    if isinstance(part, af.Sum | af.Mean):
        return _Total(part)
    if isinstance(part, af.Min | af.Max):
        return _Extreme(part)
    return _Counted(part) if isinstance(part, af.Distinct) else _Kept(part)
