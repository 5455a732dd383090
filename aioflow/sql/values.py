"""Functions on plain values that SQL has and expressions lack. Each becomes an `Operation`.

No function is called with None. A value outside its domain gives None.
"""

from __future__ import annotations

import calendar
import functools
import hashlib
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_DOWN, ROUND_HALF_UP, Context, Decimal, InvalidOperation
from typing import Any

from aioflow.expressions.nodes import Expr, as_expression
from aioflow.expressions.trees import Apply, Operation
from aioflow.expressions.values import epoch_ms

__all__ = ["DAY_MS", "apply", "java_pattern", "json_path", "like_pattern", "parse_time"]

EXACT = Context(prec=76, rounding=ROUND_HALF_UP)
"""Context for arithmetic of DECIMALs. Sums and products of numbers with 38 digits are exact."""
QUOTIENTS = Context(prec=38, rounding=ROUND_HALF_UP)
"""Context for the division of DECIMALs."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY_MS = 86_400_000
_TIME = re.compile(
    r"(\d{4})-(\d\d?)-(\d\d?)(?:[ T](\d\d?):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?)?"
    r" ?(Z|UTC|[+-]\d\d(?::?\d\d)?)?"
)


def apply(function: Callable[..., Any], *operands: Any, **traits: Any) -> Expr[Any]:
    """Returns the expression that applies `function` to the operands, which are expressions or
    plain values.

    `traits` override fields of the function's `Operation`.
    """
    operation = _OPERATIONS.get(function) or Operation(
        name=traits.get("name") or function.__name__, function=function
    )
    return Apply(replace(operation, **traits), tuple(map(as_expression, operands)))


_OPERATIONS: dict[Callable[..., Any], Operation] = {}


def _operation(**traits: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _OPERATIONS[function] = Operation(name=function.__name__, function=function, **traits)
        return function

    return register


# Numbers. The forms on arrays are exact, or return None, so that the function is called per value.


def _finite(*numbers: Any) -> bool:
    """Returns whether all arrays hold only finite floats, or ints above -2**63."""
    import numpy as np

    return all(
        number.kind in "if"
        and (
            np.isfinite(number.values).all()
            if number.kind == "f"
            else number.bounds()[0] > -(2**63)
        )
        for number in numbers
    )


def _divided(take: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Computes a division on arrays. The result is None in a row whose divisor is zero."""
    import numpy as np

    from aioflow.columns.numbers import remainder as remainder_of
    from aioflow.core.column_batch import NumberColumn

    above_zero = a.kind == b.kind == "i" and type(b.values) is int and b.values > 0
    if above_zero and len(a.values) and a.values.min() >= 0:  # Then Python's, which is faster.
        plain = remainder_of if take is _remainders else operator.floordiv
        return NumberColumn(plain(a.values, b.values), a.valid)
    if not _finite(a, b) or (a.kind != b.kind and not (a.exact_as_float() and b.exact_as_float())):
        return None
    x, y = np.broadcast_arrays(a.values, b.values)
    there = y != 0
    for number in (a, b):
        there = there if number.valid is None else there & number.valid
    return NumberColumn(take(x, np.where(y == 0, 1, y)), None if there.all() else there)


def _remainders(x: Any, y: Any) -> Any:
    import numpy as np

    return np.fmod(x, y)


def _quotients(x: Any, y: Any) -> Any:
    import numpy as np

    return (x - np.fmod(x, y)) // y if x.dtype.kind == y.dtype.kind == "i" else x / y


def _elementwise(floats: Callable[[Any], Any], a: Any) -> Any:
    """Applies the function `floats` to an array of floats. Returns an array of ints unchanged."""
    from aioflow.core.column_batch import NumberColumn

    if not _finite(a):
        return None
    return NumberColumn(floats(a.values) if a.kind == "f" else a.values, a.valid)


def _absolutes(a: Any) -> Any:
    import numpy as np

    from aioflow.core.column_batch import NumberColumn

    return NumberColumn(np.abs(a.values), a.valid) if _finite(a) else None


def _floors(x: Any) -> Any:
    import numpy as np

    return np.floor(x)


def _ceilings(x: Any) -> Any:
    import numpy as np

    return np.ceil(x)


def _rounded(x: Any) -> Any:
    import numpy as np

    return np.copysign(np.trunc(np.abs(x)) + (np.abs(x) % 1 >= 0.5), x)


@_operation(gives_none=True, arrays=functools.partial(_divided, _remainders))
def remainder(a: Any, b: Any) -> Any:
    """Returns the remainder of a truncating division, with the sign of `a`."""
    if b == 0:
        return None
    if type(a) is float or type(b) is float:
        return math.fmod(a, b) if math.isfinite(a) else math.nan
    if Decimal in (type(a), type(b)):
        return EXACT.remainder(a, b)
    return a % b if (a >= 0) == (b > 0) else -(-a % b)


@_operation(gives_none=True, arrays=functools.partial(_divided, _quotients))
def divide(a: Any, b: Any) -> Any:
    """Returns the quotient. For two ints it is truncated towards zero."""
    if b == 0:
        return None
    if type(a) is int and type(b) is int:
        return a // b if (a >= 0) == (b > 0) else -(-a // b)
    return quotient(a, b)


def quotient(a: Any, b: Any) -> Any:
    return QUOTIENTS.divide(a, b) if Decimal in (type(a), type(b)) else a / b


def total(a: Any, b: Any) -> Any:
    """Returns the sum. Python's `+` would round a sum of Decimals to 28 digits."""
    return EXACT.add(a, b) if type(b) is Decimal else a + b


def mean(values: list[Any]) -> Any:
    return quotient(functools.reduce(total, values), len(values))


def median(values: list[Any]) -> Any:
    """Returns the median. The median of ints is a float, like their mean."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return mean(ordered[half - 1 + len(ordered) % 2 : half + 1])


@_operation(arrays=_absolutes)
def absolute(x: Any) -> Any:
    """Returns the absolute value. `abs` would round a Decimal to 28 digits."""
    return x.copy_abs() if type(x) is Decimal else abs(x)


@_operation(arrays=functools.partial(_elementwise, _rounded))
def round_away(x: Any) -> Any:
    """Rounds to a whole number, half away from zero."""
    if type(x) is float:
        if not math.isfinite(x):
            return x
        whole = math.copysign(math.trunc(x), x)
        return whole + math.copysign(1.0, x) if abs(x - whole) >= 0.5 else whole
    return x if type(x) is int else x.quantize(Decimal(1), context=EXACT)


@_operation()
def round_digits(x: Any, digits: int) -> Any:
    """Rounds to `digits` decimals, half away from zero. A float is multiplied by a power of ten,
    rounded, and divided by the power.
    """
    if type(x) is float:
        scale = 10.0 ** abs(digits)
        scaled = x * scale if digits >= 0 else x / scale
        if not math.isfinite(scaled):
            return x
        return round_away(scaled) / scale if digits >= 0 else round_away(scaled) * scale
    if type(x) is int:
        return (
            x
            if digits >= 0
            else int(Decimal(x).quantize(Decimal(1).scaleb(-digits), context=EXACT))
        )
    return x.quantize(Decimal(1).scaleb(-digits), context=EXACT)


@_operation(arrays=functools.partial(_elementwise, _floors))
def floor(x: Any) -> Any:
    return _whole(math.floor, x)


@_operation(arrays=functools.partial(_elementwise, _ceilings))
def ceil(x: Any) -> Any:
    return _whole(math.ceil, x)


def _whole(function: Callable[[Any], int], x: Any) -> Any:
    if type(x) is int or x - x != 0:  # Infinite, or NaN.
        return x
    # The sign keeps -0.0, as arrays do.
    return math.copysign(function(x), x) if type(x) is float else type(x)(function(x))


def real(function: Callable[..., float], *given: Any) -> float | None:
    """Returns the result of `function` for the numbers `given`. Returns None outside the function's
    domain, and infinity on overflow.
    """
    try:
        return function(*given)
    except (ValueError, ZeroDivisionError):
        return None
    except OverflowError:
        return math.inf


def logarithm(base: float, x: float) -> float:
    return math.log(x) / math.log(base)


@_operation()
def truncate_digits(x: Any, digits: int = 0) -> Any:
    """Rounds towards zero to `digits` decimals. Negative `digits` round to a power of ten."""
    if type(x) is int:
        rest = abs(x) % 10 ** max(-digits, 0)
        return x - rest if x > 0 else x + rest
    if type(x) is Decimal:
        return x.quantize(Decimal(1).scaleb(-digits), ROUND_DOWN, EXACT)
    return _whole(math.trunc, x * 10**digits) / 10**digits if digits else _whole(math.trunc, x)


@_operation(gives_none=True)
def raise_to(base: Any, exponent: Any) -> Any:
    found = real(math.pow, float(base), float(exponent))
    return -found if found == math.inf and base < 0 and exponent % 2 == 1 else found


@_operation(takes_none=True, gives_none=True)
def greatest(*values: Any) -> Any:
    return max((value for value in values if value is not None), default=None)


@_operation(takes_none=True, gives_none=True)
def least(*values: Any) -> Any:
    return min((value for value in values if value is not None), default=None)


# Text.


def like_pattern(pattern: str, escape: str | None, fold: bool) -> re.Pattern[str]:
    """Returns the regular expression of a LIKE pattern, for use with `fullmatch`."""
    parts, signs = [], iter(pattern)
    for char in signs:
        if char == escape:
            parts.append(re.escape(next(signs, "")))
        else:
            parts.append({"%": ".*", "_": "."}.get(char) or re.escape(char))
    return re.compile("".join(parts), re.DOTALL | (re.IGNORECASE if fold else 0))


@_operation(gives_bool=True)
def like(text: str, pattern: str, escape: str, fold: bool) -> bool:
    return _patterns(pattern, escape, fold).fullmatch(text) is not None


_patterns = functools.lru_cache(maxsize=256)(like_pattern)


def matches(pattern: re.Pattern[str], text: str) -> bool:
    return pattern.fullmatch(text) is not None


@functools.lru_cache(maxsize=512)
def regex(pattern: str, flags: str = "") -> re.Pattern[str]:
    """Returns the compiled regular expression of a pattern. Raises ValueError for an unknown flag,
    and `re.error` for an invalid pattern.
    """
    if wrong := set(flags) - {*"gci"}:
        raise ValueError(f"unknown flag {min(wrong)!r}, expected i (any case), c (exact case) or g")
    return re.compile(pattern, re.IGNORECASE if "i" in flags else 0)


@_operation(gives_bool=True)
def regexp_like(text: str, pattern: str, flags: str = "") -> bool:
    return regex(pattern, flags).search(text) is not None


@_operation(gives_none=True)
def regexp_extract(text: str, pattern: str, group: int = 0, flags: str = "") -> str | None:
    found = regex(pattern, flags).search(text)
    return None if found is None else found[group]


@_operation()
def regexp_replace(text: str, pattern: str, new: str, flags: str = "") -> str:
    return regex(pattern, flags).sub(new, text, count=0 if "g" in flags else 1)


@_operation()
def substring(text: str, start: int, length: int | None = None) -> str:
    begin = start - 1 if start >= 0 else len(text) + start
    end = len(text) if length is None else begin + length
    begin, end = min(begin, end), max(begin, end)  # A negative length counts backwards.
    return text[max(begin, 0) : max(end, 0)]


@_operation()
def right(text: str, count: int) -> str:
    return text[max(len(text) - count, 0) :] if count >= 0 else text[-count:]


@_operation()
def lpad(text: str, length: int, fill: str = " ") -> str:
    short = max(length - len(text), 0)
    return (fill * short)[:short] + text[: max(length, 0)]


@_operation()
def rpad(text: str, length: int, fill: str = " ") -> str:
    return (text + fill * max(length - len(text), 0))[: max(length, 0)]


@_operation()
def initcap(text: str) -> str:
    return re.sub(r"[^\W_]+", lambda word: word[0].capitalize(), text)


@_operation(takes_none=True, gives_none=True)
def joined_with(separator: str | None, *texts: str | None) -> str | None:
    return None if separator is None else separator.join(text for text in texts if text is not None)


@_operation(gives_none=True)
def split_index(text: str, separator: str, index: int) -> str | None:
    """Splits `text`, and returns part `index`, counted from 0; None if there is no such part, as in
    Flink.
    """
    parts = text.split(separator) if separator else [text]
    return parts[index] if 0 <= index < len(parts) else None


@_operation()
def split_part(text: str, separator: str, index: int) -> str:
    """Splits `text`, and returns part `index`, counted from 1, or from the end for negative
    numbers. Returns "" if there is no such part.
    """
    parts = text.split(separator) if separator else [text]
    index = index - 1 if index > 0 else len(parts) + index if index else -1
    return parts[index] if 0 <= index < len(parts) else ""


@_operation()
def digest(value: Any, algorithm: str) -> str:
    data = value if isinstance(value, bytes) else value.encode()
    return hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()


@_operation()
def hash_code(value: Any) -> int:
    """Returns an int of 63 bits that depends only on the value."""
    data = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(data, "big") >> 1


# Conversions. A value that cannot be converted raises an error with `strict`, and otherwise gives
# None.


def _converts(function: Callable[[Any], Any], value: Any, strict: bool, to: str) -> Any:
    try:
        return function(value)
    except (ValueError, TypeError, ArithmeticError, InvalidOperation):
        if not strict:
            return None
        raise ValueError(f"cannot cast {value!r:.60} to {to}; TRY_CAST would give NULL") from None


@_operation()
def text_of(value: Any) -> str:
    """Returns a value of any type as text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, bytes):
        return value.decode()
    return value if isinstance(value, str) else str(value)


@_operation(gives_none=True)
def to_decimal(value: Any, strict: bool, scale: int | None = None) -> Any:
    def convert(value: Any) -> Decimal:
        found = Decimal(
            str(value).strip()
            if isinstance(value, (float, str))
            else int(value)
            if isinstance(value, bool)
            else value
        )
        if not found.is_finite():
            raise ValueError
        return found if scale is None else round_digits(found, scale)

    return _converts(convert, value, strict, "DECIMAL")


@_operation()
def decimal_of(value: Any, column: str, scale: int | None = None) -> Any:
    """Converts a value that a connector has read for `column` to a DECIMAL."""
    try:
        return to_decimal(value, True, scale)
    except ValueError:
        raise ValueError(
            f"the column {column} is {value!r:.60}, expected a number for its type DECIMAL"
        ) from None


@_operation(gives_none=True)
def to_integer(value: Any, strict: bool) -> Any:
    """Converts a value of any type to INTEGER. A float is rounded half to even, a Decimal half away
    from zero.
    """

    def convert(value: Any) -> int:
        if isinstance(value, str) and ("_" in value or not value.isascii()):
            raise ValueError
        if isinstance(value, float):
            return round(value)
        return int(round_away(value) if isinstance(value, Decimal) else value)

    return _converts(convert, value, strict, "INTEGER")


def _whole_numbers(a: Any) -> Any:
    from aioflow.columns.numbers import cast_number, number_of, round_number

    rounded = round_number(a, 0)
    number = None if rounded is None else number_of(rounded)
    return None if number is None else cast_number(number, int)


@_operation(source="round({0})", arrays=_whole_numbers)
def round_even(x: float) -> int:
    return round(x)


def parse_time(text: str) -> int:
    """Returns the milliseconds since 1970 of a text such as "2026-01-31 10:00:00.5+01:00"."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r:.60} is not a time; write it as 2026-01-31 10:00:00.000")
    year, month, day, hour, minute, second = (int(part or 0) for part in found.groups()[:6])
    fraction, zone = found.groups()[6:]
    moment = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    if zone is not None and zone not in ("Z", "UTC"):
        hours, minutes = int(zone[1:3]), int(zone[3:].lstrip(":") or 0)
        moment -= timedelta(hours=hours, minutes=minutes) * (-1 if zone[0] == "-" else 1)
    return epoch_ms(moment) + int(f"{fraction or '':0<3}"[:3])


@_operation(gives_none=True)
def to_time(value: Any, strict: bool) -> Any:
    return _converts(parse_time, value, strict, "TIMESTAMP")


# Time, in milliseconds.


@_operation()
def time_of(value: Any) -> int:
    """Returns the milliseconds since 1970 of a time: an int, a datetime, a date, or a text."""
    return parse_time(value) if isinstance(value, str) else epoch_ms(value)


@_operation()
def debezium_time(value: Any, column: str, is_date: bool) -> int:
    """Returns the milliseconds since 1970 of a time in a Debezium message. In a message without a
    schema, a date is a number of days. Any other int raises ValueError, because its unit is not
    known.
    """
    if type(value) is not int:
        ms: int = time_of(value)
        return ms - ms % DAY_MS if is_date else ms
    if is_date:
        return int(value) * DAY_MS
    raise ValueError(
        f"the column {column} is {value}, which can be in ms, µs or ns: have Debezium write its "
        f"schemas (value.converter.schemas.enable=true), or declare {column} BIGINT and compute a "
        f"time, as in at_ms AS TO_TIMESTAMP_LTZ({column} / 1000, 3)"
    )


@_operation()
def moment_of(ms: int) -> datetime:
    return _datetime(ms)


@_operation()
def naive_moment_of(ms: int) -> datetime:
    return _datetime(ms).replace(tzinfo=None)


@_operation()
def date_of(ms: int) -> date:
    return _datetime(ms).date()


@functools.lru_cache(maxsize=256)
def _moment(days: int) -> datetime:
    return _EPOCH + timedelta(days=days)


def _datetime(ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=ms)


@_operation()
def time_text(ms: int) -> str:
    day, rest = divmod(ms, DAY_MS)
    seconds, fraction = divmod(rest, 1000)
    text = f"{_moment(day):%Y-%m-%d} {seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{text}.{fraction:03}".rstrip("0") if fraction else text


@_operation()
def date_text(ms: int) -> str:
    return f"{_moment(ms // DAY_MS):%Y-%m-%d}"


@_operation()
def day_of_year(ms: int) -> int:
    return _moment(ms // DAY_MS).timetuple().tm_yday


@_operation()
def iso_week(ms: int) -> int:
    return _moment(ms // DAY_MS).isocalendar().week


@_operation()
def add_months(ms: int, months: int) -> int:
    """Adds calendar months to a time. If the new month lacks the day, its last day is taken."""
    day, rest = divmod(ms, DAY_MS)
    date = _moment(day)
    year, month = divmod(date.year * 12 + date.month - 1 + months, 12)
    last = calendar.monthrange(year, month + 1)[1]
    moved = date.replace(year=year, month=month + 1, day=min(date.day, last))
    return epoch_ms(moved) + rest


@_operation()
def months_between(start: int, end: int) -> int:
    """Returns the number of whole months from `start` to `end`."""
    one, other = _datetime(start), _datetime(end)
    months = (other.year - one.year) * 12 + other.month - one.month
    over = add_months(start, months) - end
    return (
        months - 1 if months > 0 and over > 0 else months + 1 if months < 0 and over < 0 else months
    )


@_operation()
def truncate_to(ms: int, unit: str) -> int:
    """Returns the beginning of the week, month, quarter or year that contains the time `ms`."""
    date = _moment(ms // DAY_MS)
    match unit:
        case "WEEK":
            date -= timedelta(days=date.weekday())
        case "MONTH":
            date = date.replace(day=1)
        case "QUARTER":
            date = date.replace(month=(date.month - 1) // 3 * 3 + 1, day=1)
        case _:
            date = date.replace(month=1, day=1)
    return epoch_ms(date)


_JAVA = {
    "yyyy": "%Y", "uuuu": "%Y", "yy": "%y", "MMMM": "%B", "MMM": "%b", "MM": "%m", "dd": "%d",
    "HH": "%H", "hh": "%I", "mm": "%M", "ss": "%S", "SSS": "%g", "a": "%p", "EEEE": "%A",
    "EEE": "%a", "DDD": "%j", "M": "%-m", "d": "%-d", "H": "%-H",
}  # fmt: skip
_JAVA_PART = re.compile(r"'([^']*)'|([A-Za-z])\2*|[^A-Za-z']")


def java_pattern(pattern: str) -> str:
    """Converts a pattern of Java's DateTimeFormatter to one of `strftime`.

    Raises ValueError if the pattern has letters that `_JAVA` does not map.
    """
    made = []
    for found in _JAVA_PART.finditer(pattern):
        part = found[0]
        if found[1] is not None:
            made.append(found[1].replace("%", "%%") or "'")
        elif found[2] is None:
            made.append(part.replace("%", "%%"))
        elif part in _JAVA:
            made.append(_JAVA[part])
        else:
            raise ValueError(f"unknown letters {part!r}, expected some of {', '.join(_JAVA)}")
    return "".join(made)


@_operation()
def format_time(ms: int, pattern: str) -> str:
    """Formats a time by a `strftime` pattern. `%g` stands for the milliseconds, as in DuckDB."""
    return _datetime(ms).strftime(pattern.replace("%g", f"{ms % 1000:03}"))


@_operation(gives_none=True)
def scan_time(text: str, pattern: str) -> int:
    return epoch_ms(datetime.strptime(text, pattern.replace("%g", "%f").replace("%-", "%")))


# Nested values.


@_operation(gives_none=True)
def element(value: Any, key: Any) -> Any:
    """Returns the item of a map with the key `key`, or of an array at the position `key`, counted
    from 1. Returns None if there is no such item.
    """
    if isinstance(value, Mapping):
        return value.get(key)
    index = key - 1 if key > 0 else len(value) + key if key else -1
    return value[index] if 0 <= index < len(value) else None


@_operation(takes_none=True)
def make_array(*values: Any) -> list[Any]:
    return list(values)


def make_row(names: tuple[str, ...], *values: Any) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


def json_path(path: str) -> tuple[str | int, ...]:
    """Returns the steps of a path such as "$.a.b[0]".

    Raises ValueError if `path` is not `$`, followed by names and indexes.
    """
    parts = re.findall(r"\.(\w+)|\[(\d+)\]|\['([^']+)'\]", path)
    if re.fullmatch(r"(lax )?\$(\.\w+|\[\d+\]|\['[^']+'\])*", path) is None:
        raise ValueError(f"{path!r} is not a path; write '$.name' or '$.list[0].name'")
    return tuple(name or quoted or int(index) for name, index, quoted in parts)


def json_value(steps: tuple[str | int, ...], scalar: bool, text: str) -> str | None:
    """Returns, as text, the value at the path `steps` in the JSON `text`. Returns None if there is
    no value.

    With `scalar`, also returns None for an object, a list and a null.
    """
    try:
        found = json.loads(text)
        for step in steps:
            found = found[step]
    except (ValueError, LookupError, TypeError):
        return None
    if scalar and (found is None or isinstance(found, (dict, list))):
        return None
    return text_of(found) if scalar else json.dumps(found, separators=(",", ":"))
