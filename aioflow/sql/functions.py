"""The SQL functions by name, with the types of their arguments and results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from aioflow.expressions.nodes import Expr, Literal
from aioflow.sql import values as v
from aioflow.sql.types import (
    BOOLEAN,
    DATE,
    DECIMAL,
    FLOAT,
    INTEGER,
    NUMERIC,
    STRING,
    TIMESTAMP,
    SqlType,
)

__all__ = ["CALENDAR", "FUNCTIONS", "LETTERS", "PARTS", "REFUSED", "UNITS_MS", "Builtin"]

UNITS_MS = {
    "MILLISECOND": 1, "SECOND": 1000, "MINUTE": 60_000, "HOUR": 3_600_000, "DAY": v.DAY_MS,
    "WEEK": 7 * v.DAY_MS,
}  # fmt: skip
CALENDAR = {"MONTH": 1, "QUARTER": 3, "YEAR": 12}
"""Maps units of time to their length in months."""

PARTS: dict[str, Callable[[Expr[Any]], Expr[Any]]] = {
    "YEAR": lambda t: t.dt.year,
    "QUARTER": lambda t: (t.dt.month + 2) // 3,
    "MONTH": lambda t: t.dt.month,
    "WEEK": lambda t: v.apply(v.iso_week, t),
    "DAY": lambda t: t.dt.day,
    "DAYOFMONTH": lambda t: t.dt.day,
    "DOW": lambda t: (t.dt.weekday + 1) % 7,
    "DAYOFWEEK": lambda t: (t.dt.weekday + 1) % 7 + 1,
    "ISODOW": lambda t: t.dt.weekday + 1,
    "DAYOFYEAR": lambda t: v.apply(v.day_of_year, t),
    "DOY": lambda t: v.apply(v.day_of_year, t),
    "HOUR": lambda t: t.dt.hour,
    "MINUTE": lambda t: t.dt.minute,
    "SECOND": lambda t: t.dt.second,
    "MILLISECOND": lambda t: t % 60_000,
    "EPOCH": lambda t: t / 1000,
}

LETTERS: dict[str, tuple[SqlType, ...]] = {
    "S": (STRING,),
    "I": (INTEGER,),
    "N": NUMERIC,
    "F": (FLOAT, INTEGER, DECIMAL),
    "T": (TIMESTAMP, DATE),
    "B": (BOOLEAN,),
    "A": (),
    "C": (),
}
"""Maps the letter of a parameter to the types that its argument may have. A and C accept any type;
an argument C is converted to text.
"""


@dataclass(frozen=True, slots=True)
class Builtin:
    """An SQL function. `parameters` has a letter of `LETTERS` for each parameter. Letters after "?"
    are optional parameters, and a final "*" repeats the last parameter.

    `type` is the type of the result; None means the common type of the arguments whose letter is
    N or A. `nullable` says whether the result may be NULL. None means that it may be NULL if an
    argument may be NULL.
    """

    parameters: str
    type: SqlType | None
    build: Callable[..., Expr[Any]]
    nullable: bool | None = None

    def letters(self, count: int) -> str | None:
        """Returns the letter of each argument; None if `count` is not allowed."""
        required, _, optional = self.parameters.rstrip("*").partition("?")
        known = required + optional
        if self.parameters.endswith("*"):
            known += known[-1] * max(0, count - len(known))
        return known[:count] if len(required) <= count <= len(known) else None

    @property
    def count(self) -> str:
        required, _, optional = self.parameters.rstrip("*").partition("?")
        if self.parameters.endswith("*"):
            return f"{len(required)} or more"
        return f"{len(required)} to {len(required + optional)}" if optional else str(len(required))


def _of(
    parameters: str, kind: SqlType | None, function: Callable[..., Any], **traits: Any
) -> Builtin:
    """Wraps a function on plain Python values as an SQL function."""
    nullable = traits.pop("nullable", None)
    return Builtin(parameters, kind, partial(v.apply, function, **traits), nullable)


def _real(parameters: str, function: Callable[..., float]) -> Builtin:
    """Wraps a function on floats as an SQL function, which gives NULL outside its domain."""
    name = function.__name__
    build = partial(v.apply, partial(v.real, function), name=name, gives_none=True)
    return Builtin(parameters, FLOAT, build, True)


def _regular(function: Callable[..., Any], flags: int) -> Callable[..., Expr[Any]]:
    """Returns a builder for `function`, which compiles a literal regular expression to check it.

    `flags` is the position of the flags among the arguments.
    """

    def build(text: Expr[Any], pattern: Expr[Any], *rest: Expr[Any]) -> Expr[Any]:
        given = [pattern, *rest[flags - 2 :]]
        texts = [one._value if isinstance(one, Literal) else None for one in given]
        v.regex(texts[0] or "", *(one or "" for one in texts[1:]))
        return v.apply(function, text, pattern, *rest)

    return build


def _formatted(java: bool) -> Callable[[Expr[Any], Expr[Any]], Expr[Any]]:
    def build(time: Expr[Any], pattern: Expr[Any]) -> Expr[Any]:
        return v.apply(v.format_time, time, _pattern(pattern, java))

    return build


def _pattern(pattern: Expr[Any], java: bool) -> str:
    if not isinstance(pattern, Literal) or not isinstance(pattern._value, str):
        raise ValueError("the pattern must be a literal")
    text = pattern._value
    return v.java_pattern(text) if java and "%" not in text else text


def _to_timestamp(text: Expr[Any], pattern: Expr[Any] | None = None) -> Expr[Any]:
    if pattern is None:
        return v.apply(v.to_time, text, True)
    return v.apply(v.scan_time, text, _pattern(pattern, True))


def _from_number(number: Expr[Any], precision: Expr[Any] | None = None) -> Expr[Any]:
    digits = precision._value if isinstance(precision, Literal) else 3
    if digits not in (0, 3):
        raise ValueError("the precision is 0 (seconds) or 3 (milliseconds)")
    return number * 1000 if digits == 0 else number


def _rounded(x: Expr[Any], digits: Expr[Any] | None = None) -> Expr[Any]:
    return v.apply(v.round_away, x) if digits is None else v.apply(v.round_digits, x, digits)


def _substring(text: Expr[Any], *given: Expr[Any]) -> Expr[Any]:
    start, *length = [e._value if isinstance(e, Literal) else -1 for e in given]
    if start is None or start < 1 or None in length or -1 in length:
        return v.apply(v.substring, text, *given)
    return text.str.slice(start - 1, *length)


def _joined(*parts: Expr[Any]) -> Expr[Any]:
    first, *others = (part.fill_null("") for part in parts)
    return first.str.concat(*others) if others else first


def _log(*given: Expr[Any]) -> Expr[Any]:
    """Returns the expression of a logarithm. A single argument is the number, with base 10, as in
    PostgreSQL. Two arguments are the base and the number.
    """
    base, of = given if len(given) == 2 else (Literal(10.0), given[0])
    bases = {10.0: math.log10, 2.0: math.log2}
    known = bases.get(base._value) if isinstance(base, Literal) else None
    if known is not None:
        return v.apply(partial(v.real, known), of, name=known.__name__, gives_none=True)
    return v.apply(partial(v.real, v.logarithm), base, of, name="log", gives_none=True)


FUNCTIONS: dict[str, Builtin] = {
    "ABS": _of("N", None, v.absolute),
    "FLOOR": _of("N", None, v.floor),
    "CEIL": _of("N", None, v.ceil),
    "ROUND": Builtin("N?I", None, _rounded),
    "TRUNC": _of("N?I", None, v.truncate_digits),
    "SIGN": _of("N", None, lambda x: type(x)((x > 0) - (x < 0)), name="sign"),
    "POWER": _of("FF", FLOAT, v.raise_to, nullable=True),
    "SQRT": _real("F", math.sqrt),
    "CBRT": _real("F", math.cbrt),
    "LN": _real("F", math.log),
    "LOG": Builtin("F?F", FLOAT, _log, True),
    "EXP": _real("F", math.exp),
    "SIN": _real("F", math.sin),
    "COS": _real("F", math.cos),
    "TAN": _real("F", math.tan),
    "ATAN2": _real("FF", math.atan2),
    "RADIANS": _real("F", math.radians),
    "DEGREES": _real("F", math.degrees),
    "GREATEST": _of("A*", None, v.greatest),
    "LEAST": _of("A*", None, v.least),
    "UPPER": Builtin("S", STRING, lambda s: s.str.upper()),
    "LOWER": Builtin("S", STRING, lambda s: s.str.lower()),
    "LENGTH": Builtin("S", INTEGER, lambda s: s.str.len()),
    "SUBSTRING": Builtin("SI?I", STRING, _substring),
    "LEFT": _of("SI", STRING, lambda s, n: s[:n], name="left"),
    "RIGHT": _of("SI", STRING, v.right),
    "LPAD": _of("SI?S", STRING, v.lpad),
    "RPAD": _of("SI?S", STRING, v.rpad),
    "REPEAT": _of("SI", STRING, lambda s, n: s * n, name="repeat"),
    "REVERSE": _of("S", STRING, lambda s: s[::-1], name="reverse"),
    "INITCAP": _of("S", STRING, v.initcap),
    "REPLACE": _of("SSS", STRING, lambda s, a, b: s.replace(a, b) if a else s, name="replace"),
    "STR_POSITION": _of("SS", INTEGER, lambda s, part: s.find(part) + 1, name="position"),
    "STARTS_WITH": Builtin("SS", BOOLEAN, lambda s, part: s.str.starts_with(part)),
    "ENDS_WITH": Builtin("SS", BOOLEAN, lambda s, part: s.str.ends_with(part)),
    "CONTAINS": Builtin("SS", BOOLEAN, lambda s, part: s.str.contains(part)),
    "CONCAT": Builtin("C*", STRING, _joined, False),
    "CONCAT_WS": _of("SC*", STRING, v.joined_with, nullable=True),
    "SPLIT_INDEX": _of("SSI", STRING, v.split_index, nullable=True),
    "SPLIT_PART": _of("SSI", STRING, v.split_part),
    "ASCII": _of("S", INTEGER, lambda s: ord(s[0]) if s else 0, name="ascii"),
    "CHR": _of("I", STRING, chr),
    "REGEXP_LIKE": Builtin("SS?S", BOOLEAN, _regular(v.regexp_like, 2)),
    "REGEXP_EXTRACT": Builtin("SS?IS", STRING, _regular(v.regexp_extract, 3), True),
    "REGEXP_REPLACE": Builtin("SSS?S", STRING, _regular(v.regexp_replace, 3)),
    "MD5": Builtin("S", STRING, lambda s: v.apply(v.digest, s, "md5")),
    "SHA1": Builtin("S", STRING, lambda s: v.apply(v.digest, s, "sha1")),
    "SHA256": Builtin("S", STRING, lambda s: v.apply(v.digest, s, "sha256")),
    "HASH_CODE": _of("A", INTEGER, v.hash_code),
    "DATE_FORMAT": Builtin("TS", STRING, _formatted(True)),
    "STRFTIME": Builtin("TS", STRING, _formatted(False)),
    "TO_TIMESTAMP": Builtin("S?S", TIMESTAMP, _to_timestamp),
    "TO_DATE": Builtin("S?S", DATE, lambda *given: _to_timestamp(*given).dt.truncate("1d")),
    "TO_TIMESTAMP_LTZ": Builtin("I?I", TIMESTAMP, _from_number),
    "UNIX_TIMESTAMP": Builtin("T", INTEGER, lambda t: t // 1000),
    "CARDINALITY": _of("A", INTEGER, len),
    "PI": Builtin("", FLOAT, lambda: Literal(math.pi)),
}
_ALIASES = {
    "CEILING": "CEIL", "SUBSTR": "SUBSTRING", "STRPOS": "STR_POSITION",
    "REGEXP_MATCHES": "REGEXP_LIKE", "REGEXP": "REGEXP_LIKE", "POW": "POWER", "TRUNCATE": "TRUNC",
    "HASH": "HASH_CODE", "SHA": "SHA1", "ARRAY_SIZE": "CARDINALITY",
}  # fmt: skip
FUNCTIONS |= {alias: FUNCTIONS[name] for alias, name in _ALIASES.items()}

_LATER = "; its value would change on each restart: write a function of yours"
_NAMES = "CURRENT_TIMESTAMP CURRENT_DATE NOW RAND RANDOM UUID PROCTIME"
REFUSED = dict.fromkeys(_NAMES.split(), _LATER)
