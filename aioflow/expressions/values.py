"""The helpers that compiled expressions call. Each helper applies one operation to a value that is
not None.

Python's own operations (`+`, `<`, `str.lower`) are not here; generated code uses them directly.
Every function is pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from aioflow.core.errors import AioflowError

__all__ = [
    "CASTS",
    "DATE_PARTS",
    "MissingFieldError",
    "cast_value",
    "describe_row",
    "epoch_ms",
    "field_names",
    "missing",
    "power",
    "read_field",
    "truncate",
    "truth",
]

_DAY_MS = 86_400_000
_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_TRUE = frozenset({"true", "t", "yes", "y", "1"})
_FALSE = frozenset({"false", "f", "no", "n", "0"})


class MissingFieldError(AioflowError, LookupError):
    """A row does not have the field that an expression reads.

    The message names the field, the expression and the fields of the row.
    """


def truth(value: Any) -> Any:
    """Returns `value` if it is a bool or None. Raises an error for other values.

    Logical operations reject values such as 0 and "", because columns and Spark do not agree on
    their truth.
    """
    if value is None or value is True or value is False:
        return value
    if type(value).__name__ in ("bool", "bool_"):  # numpy's bool is no subclass of bool.
        return bool(value)
    raise TypeError(
        f"a condition must be True, False or None, not {type(value).__name__}: compare it, or "
        "cast it to bool"
    )


def power(base: Any, exponent: Any) -> Any:
    """Returns `base ** exponent`.

    Zero to a negative power is a division by zero and gives None. An overflow gives infinity, and a
    result that is not real gives NaN.
    """
    try:
        result = base**exponent
    except ZeroDivisionError:
        return None
    except OverflowError:
        return -math.inf if base < 0 and exponent % 2 == 1 else math.inf
    return math.nan if isinstance(result, complex) else result


def read_field(value: Any, name: str | int) -> Any:
    """Returns a field of a nested value: by dict key, attribute or position."""
    try:
        return (
            value[name]
            if isinstance(name, int) or isinstance(value, Mapping)
            else getattr(value, name)
        )
    except (AttributeError, LookupError, TypeError):
        raise MissingFieldError(missing(name, value)) from None


def field_names(row: Any) -> list[str]:
    """Returns the names of the fields or keys of `row`, which an expression can read.

    Returns an empty list for a value without fields.
    """
    if isinstance(row, Mapping):
        return [str(name) for name in row]
    if is_dataclass(row):
        return [f.name for f in fields(row)]
    names = (
        getattr(row, "_fields", None)
        or getattr(row, "__struct_fields__", None)
        or getattr(row, "__dict__", None)
    )
    return [str(name) for name in names or ()]


def missing(name: str | int, row: Any) -> str:
    """Returns the message that `row` has no field `name`, or no item at the position `name`."""
    if isinstance(name, int) and isinstance(row, Sequence):
        return f"no position {name} in a {type(row).__name__} of {len(row)}"
    return f"no field {name!r} in {describe_row(row)}"


def describe_row(row: Any) -> str:
    """Returns a text with the type of `row` and its field names, but never its values."""
    names = field_names(row)
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return (
        f"a {type(row).__name__} with {shown}"
        if names
        else f"a {type(row).__name__} without fields"
    )


def _to_int(value: Any) -> int:
    if isinstance(value, str):
        # int() also reads "1_000" and digits of other scripts, which neither Arrow nor Spark do.
        if "_" in value or not value.isascii():
            raise ValueError
        return int(value)
    if isinstance(value, (bytes, date, timedelta)):
        raise TypeError
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, str) and ("_" in value or not value.isascii()):
        raise ValueError
    if isinstance(value, bytes):
        raise TypeError
    return float(value)


def _to_bool(value: Any) -> bool:
    if isinstance(value, str):
        text = value.strip().lower()
        if text in _TRUE:
            return True
        if text in _FALSE:
            return False
        raise ValueError
    return bool(value != 0)


def _to_str(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


CASTS: dict[type, Callable[[Any], Any]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
}
"""Maps the target type of `cast` to the function that converts a value.

Each function raises ValueError, TypeError or OverflowError for a value that cannot be converted.
"""


def cast_value(value: Any, to: type, strict: bool) -> Any:
    """Converts `value` to the type `to`.

    If this is impossible, raises ValueError, or returns None if not `strict`.
    """
    try:
        return CASTS[to](value)
    except (ValueError, TypeError, OverflowError):
        if not strict:
            return None
    shown = repr(value)
    shown = shown if len(shown) <= 40 else shown[:37] + "..."
    raise ValueError(
        f"cannot cast {shown} ({type(value).__name__}) to {to.__name__}; with strict=False it "
        "would be None"
    )


def epoch_ms(time: Any) -> int:
    """Returns the milliseconds since the epoch of a time, rounded down.

    The time is an int, which is returned unchanged, a datetime, or a date, which means its
    midnight. A naive datetime counts as UTC.
    """
    if isinstance(time, datetime):
        return (time.replace(tzinfo=UTC) - _EPOCH if time.tzinfo is None else time - _EPOCH) // _MS
    if isinstance(time, date):
        return (time.toordinal() - _EPOCH_ORDINAL) * _DAY_MS
    if isinstance(time, bool) or not hasattr(time, "__index__"):
        remedy = (
            ": give the source a type= that says datetime, or parse it by map(...)"
            if isinstance(time, str)
            else ""
        )
        raise TypeError(
            f".dt reads int milliseconds, a datetime or a date, not {type(time).__name__}{remedy}"
        )
    return int(time)


def _date(time: Any) -> date:
    return date.fromordinal(epoch_ms(time) // _DAY_MS + _EPOCH_ORDINAL)


def truncate(time: Any, every_ms: int) -> Any:
    """Returns `time` rounded down to a multiple of `every_ms` since the epoch.

    Returns an int for an int, and a datetime for a datetime.
    """
    milliseconds = epoch_ms(time)
    rest = milliseconds % every_ms
    if not isinstance(time, datetime):
        return milliseconds - rest
    step = timedelta(milliseconds=rest, microseconds=time.microsecond % 1000)
    if time.tzinfo is None:
        return time - step
    # Subtracting in a zone with summer time would shift it.
    return (time.astimezone(UTC) - step).astimezone(time.tzinfo)


DATE_PARTS: dict[str, Callable[[Any], Any]] = {
    "year": lambda t: _date(t).year,
    "month": lambda t: _date(t).month,
    "day": lambda t: _date(t).day,
    "hour": lambda t: epoch_ms(t) // 3_600_000 % 24,
    "minute": lambda t: epoch_ms(t) // 60_000 % 60,
    "second": lambda t: epoch_ms(t) // 1000 % 60,
    "millisecond": lambda t: epoch_ms(t) % 1000,
    "weekday": lambda t: (epoch_ms(t) // _DAY_MS + 3) % 7,
    "date": _date,
    "epoch_ms": epoch_ms,
}
"""Functions that return a part of a time in UTC, by the name of the part. Weekday 0 is Monday."""
