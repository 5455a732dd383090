"""Computes operations of expressions on arrays of numbers.

Each function returns None if numpy's result could differ from Python's for some value. These cases
are:

* An int would exceed 64 bits.
* An int beyond 2**53 is compared with a float, or divided by an int with `/` (Python is exact
  there).
* `//` and `%` of infinities and NaN.
* `**`, rounding to decimals, and a cast that could fail.

Bools count as ints, as in Python.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from aioflow.core.column_batch import CodedColumn, Column, NumberColumn
from aioflow.expressions import nodes as ex

__all__ = [
    "Number",
    "cast_number",
    "combine",
    "compare",
    "is_in",
    "negate",
    "number_of",
    "round_number",
    "time_part",
]

_EXACT = 2**53
"""Every int up to this magnitude is exact as a float."""

_LIMIT = 2**63
_DAY_MS = 86_400_000
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
"""Range of `datetime.date` in days since 1970."""

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip
_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


@dataclass(frozen=True, slots=True)
class Number:
    """An operand of an operation: an array of numbers, or one number for all rows.

    `valid` is the mask of the values that are not None; None means all values. `kind` is the kind
    of the numpy type: b (bool), i (int) or f (float).
    """

    values: Any
    valid: np.ndarray | None
    kind: str

    def as_ints(self) -> Any:
        """Returns the values, with bools as ints."""
        if self.kind != "b":
            return self.values
        return (
            self.values.astype(np.int64)
            if isinstance(self.values, np.ndarray)
            else int(self.values)
        )

    def bounds(self) -> tuple[int, int]:
        """Returns the smallest and the largest int; (0, 0) for an empty array."""
        values = self.values
        if not isinstance(values, np.ndarray):
            return int(values), int(values)
        return (int(values.min()), int(values.max())) if len(values) else (0, 0)

    def exact_as_float(self) -> bool:
        """Whether every value can be converted to float without loss."""
        if self.kind != "i":
            return True
        low, high = self.bounds()
        return low >= -_EXACT and high <= _EXACT


def number_of(operand: Column | ex.Literal[Any]) -> Number | None:
    """Returns the operand as a Number, or None if it is not numeric."""
    if isinstance(operand, NumberColumn):
        return Number(operand.values, operand.valid, operand.values.dtype.kind)
    if isinstance(operand, ex.Literal):
        value = operand._value
        if type(value) is int and -_LIMIT <= value < _LIMIT:
            return Number(value, None, "i")
        if type(value) is float:
            return Number(value, None, "f")
        if type(value) is bool:
            return Number(value, None, "b")
    return None


def _both(a: Number, b: Number) -> np.ndarray | None:
    if a.valid is None or b.valid is None:
        return b.valid if a.valid is None else a.valid
    both: np.ndarray = a.valid & b.valid
    return both


def compare(name: str, a: Number, b: Number) -> NumberColumn | None:
    """Computes the comparison `name`: `== != < <= >` or `>=`."""
    if "f" in (a.kind, b.kind) and not (a.exact_as_float() and b.exact_as_float()):
        return None
    return NumberColumn(_COMPARE[name](a.as_ints(), b.as_ints()), _both(a, b))


def combine(name: str, a: Number, b: Number) -> NumberColumn | None:
    """Computes the arithmetic operation `name`: `+ - * / //` or `%`.

    A division by zero gives None in that row.
    """
    floats = "f" in (a.kind, b.kind)
    x, y, valid = a.as_ints(), b.as_ints(), _both(a, b)
    if name in _COMBINE:
        if floats:
            return NumberColumn(_COMBINE[name](_float(x), _float(y)), valid)
        return (
            NumberColumn(_COMBINE[name](x, y), valid)
            if _fits(name, a.bounds(), b.bounds())
            else None
        )
    if name not in ("/", "//", "%"):
        return None
    if not floats and name == "%" and not isinstance(y, np.ndarray) and y > 0:
        return NumberColumn(remainder(x, y), valid)
    length = len(x) if isinstance(x, np.ndarray) else len(y)
    nonzero = y != 0 if isinstance(y, np.ndarray) else np.full(length, y != 0)
    if not nonzero.all():
        valid = nonzero if valid is None else valid & nonzero
        y = np.where(nonzero, y, 1)
    if name == "/":
        if not floats and not (a.exact_as_float() and b.exact_as_float()):
            return None
        return NumberColumn(_float(x) / _float(y), valid)
    if floats:
        x, y = _float(x), _float(y)
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            return None
    elif a.bounds()[0] == -_LIMIT:
        return None  # The least int divided by -1.
    return NumberColumn(np.floor_divide(x, y) if name == "//" else np.remainder(x, y), valid)


def remainder(x: np.ndarray, n: int) -> np.ndarray:
    """Returns `x % n` of ints, for one `n` above 0.

    This takes a tenth of the time of numpy's `%`, which divides value by value. Overflows in the
    computation cancel out.
    """
    if n & (n - 1) == 0:
        return x & (n - 1)
    return x - x // n * n  # type: ignore[no-any-return]


def _fits(name: str, a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether every result of `name` fits into 64 bits, for ints within the bounds `a` and `b`."""
    match name:
        case "+":
            ends = (a[0] + b[0], a[1] + b[1])
        case "-":
            ends = (a[0] - b[1], a[1] - b[0])
        case _:
            products = [x * y for x in a for y in b]
            ends = (min(products), max(products))
    return ends[0] >= -_LIMIT and ends[1] < _LIMIT


def _float(x: Any) -> Any:
    return x.astype(np.float64) if isinstance(x, np.ndarray) else np.float64(x)


def negate(name: str, a: Number) -> NumberColumn | None:
    """Computes the operation `name`, which is `-` or `abs`."""
    x = a.as_ints()
    if a.kind == "i" and a.bounds()[0] == -_LIMIT:
        return None
    return NumberColumn(-x if name == "-" else np.abs(x), a.valid)


def round_number(a: Number, digits: int) -> NumberColumn | None:
    """Rounds to `digits` decimals, half to even.

    Returns None for floats if `digits` is not 0, because numpy scales such numbers first, and
    Python does not.
    """
    if a.kind == "f":
        return NumberColumn(np.rint(a.values), a.valid) if digits == 0 else None
    return NumberColumn(a.as_ints(), a.valid) if digits >= 0 else None


def cast_number(a: Number, to: type) -> NumberColumn | None:
    """Converts the numbers `a` to the type `to`: bool, int or float. Text is not converted here."""
    x = a.values
    if to is bool:
        return NumberColumn(x != 0, a.valid)
    if to is float:
        return NumberColumn(x.astype(np.float64), a.valid)
    if to is not int:
        return None
    if a.kind == "f":
        present = x if a.valid is None else np.where(a.valid, x, 0.0)
        if not (np.abs(present) < float(_LIMIT)).all():  # NaN is not below the limit either.
            return None
        return NumberColumn(present.astype(np.int64), a.valid)
    return NumberColumn(a.as_ints(), a.valid)


def is_in(a: Number, members: tuple[Any, ...]) -> NumberColumn | None:
    """Returns whether each value equals one of `members`.

    Returns None if the type of a member is not str, bytes, bool, int, float or None. Also returns
    None if `a` has floats, and a member is an int beyond the range of exact floats.
    """
    found: list[Any] = []
    for member in members:
        if (
            member is None
            or type(member) in (str, bytes)
            or (type(member) is float and math.isnan(member))
        ):
            continue  # None, texts and NaN are equal to no number.
        if type(member) not in (bool, int, float):
            return None
        if a.kind == "f":
            if not -_EXACT <= member <= _EXACT and type(member) is not float:
                return None
            found.append(float(member))
        elif member == member // 1 and -_LIMIT <= member < _LIMIT and not math.isinf(member):
            found.append(int(member))
    x = a.as_ints()
    if not found:
        return NumberColumn(np.zeros(len(x), np.bool_), a.valid)
    return NumberColumn(np.isin(x, np.array(found, x.dtype)), a.valid)


def time_part(name: str, a: Number, every_ms: int = 1) -> Column | None:
    """Returns one part of each time of a column, such as "hour" or "date".

    The times are int milliseconds since 1970 in UTC. "truncate" rounds a time down to a multiple of
    `every_ms`. Returns None if the parts must be computed as rows.
    """
    if a.kind != "i":
        return None
    ms = a.values
    match name:
        case "epoch_ms":
            return NumberColumn(ms, a.valid)
        case "truncate":
            return (
                NumberColumn(ms // every_ms * every_ms, a.valid)
                if a.bounds()[0] >= -_LIMIT + every_ms
                else None
            )
        case "hour":
            return NumberColumn(remainder(ms // 3_600_000, 24), a.valid)
        case "minute":
            return NumberColumn(remainder(ms // 60_000, 60), a.valid)
        case "second":
            return NumberColumn(remainder(ms // 1000, 60), a.valid)
        case "millisecond":
            return NumberColumn(remainder(ms, 1000), a.valid)
        case "weekday":
            return NumberColumn(remainder(ms // _DAY_MS + 3, 7), a.valid)
    low, high = a.bounds()
    if not (low // _DAY_MS >= _FIRST_DAY and high // _DAY_MS <= _LAST_DAY):
        return None  # Outside of Python's dates.
    days = (ms // _DAY_MS).astype("M8[D]")
    match name:
        case "year":
            return NumberColumn(days.astype("M8[Y]").astype(np.int64) + 1970, a.valid)
        case "month":
            return NumberColumn(days.astype("M8[M]").astype(np.int64) % 12 + 1, a.valid)
        case "day":
            first = days.astype("M8[M]").astype("M8[D]")
            return NumberColumn((days - first).astype(np.int64) + 1, a.valid)
        case "date":
            distinct, codes = np.unique(days, return_inverse=True)
            if a.valid is not None:
                codes = np.where(a.valid, codes, -1)
            return CodedColumn(codes.astype(np.int32), distinct.astype(object).tolist())
    return None
