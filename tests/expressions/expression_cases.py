"""The meaning of every expression, as data: one table for rows, columns and Spark.

A case is an expression, the row that it reads, and what it gives: a value (compared with its type),
or the class of the error.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any

from aioflow.expressions.nodes import Expr, as_expression
from aioflow.expressions.roots import col, lit, when
from aioflow.expressions.trees import Apply, Operation

__all__ = ["APPLY", "CASES", "ExpressionCase"]


@dataclass(frozen=True, slots=True, eq=False)
class ExpressionCase:
    """`error` is set when computing the row must fail; then `expected` means nothing."""

    expression: Expr[Any]
    row: dict[str, Any]
    expected: Any = None
    error: type[Exception] | None = None

    def __str__(self) -> str:
        return f"{self.expression!r} of {self.row!r}"


def _of(*cases: tuple[Expr[Any], dict[str, Any], Any]) -> list[ExpressionCase]:
    return [
        ExpressionCase(e, row, error=expected)
        if isinstance(expected, type) and issubclass(expected, Exception)
        else ExpressionCase(e, row, expected)
        for e, row, expected in cases
    ]


A = {"a": 7, "b": 2}
NAN = math.nan
TS = 1_700_000_123_456  # 2023-11-14 22:15:23.456 UTC, a Tuesday
MOMENT = datetime(2023, 11, 14, 22, 15, 23, 456_789, tzinfo=UTC)

ARITHMETIC = _of(
    (col.a, A, 7),
    (col("a"), A, 7),
    (lit(3), A, 3),
    (col.a + col.b, A, 9),
    (col.a - 10, A, -3),
    (10 - col.a, A, 3),
    (col.a * 1.5, A, 10.5),
    (col.a / col.b, A, 3.5),
    (col.a / 7, A, 1.0),
    (col.a // col.b, A, 3),
    (col.a % col.b, A, 1),
    (col.a**col.b, A, 49),
    (2**col.a, A, 128),
    (-col.a, A, -7),
    (abs(col.a - 9), A, 2),
    ((col.b - col.a).abs(), A, 5),
    (col.a // col.b, {"a": -7, "b": 2}, -4),
    (col.a % col.b, {"a": -7, "b": 2}, 1),
    (col.a % col.b, {"a": 7, "b": -2}, -1),
    (col.a // col.b, {"a": -7.5, "b": 2.0}, -4.0),
    (col.a % col.b, {"a": -7.5, "b": 2.0}, 0.5),
    (col.a + col.b, {"a": "x", "b": "y"}, "xy"),
    (col.a + 1, {"a": "x"}, TypeError),
    (col.a + 1, {"a": 2**62}, 2**62 + 1),
)

DIVISION_BY_ZERO = _of(
    (col.a / 0, A, None),
    (col.a // 0, A, None),
    (col.a % 0, A, None),
    (col.a / col.b, {"a": 1, "b": 0}, None),
    (col.a / col.b, {"a": 1.0, "b": 0.0}, None),
    (col.a // col.b, {"a": 1.5, "b": -0.0}, None),
    (col.a % col.b, {"a": 0, "b": 0}, None),
    (col.a / (col.b - 2) + 1, A, None),
    ((col.a + col.b) / (col.a - 7), A, None),
    (col.a**-1, {"a": 0}, None),
    ((col.a / 0).fill_null(-1), A, -1),
)

NONE = _of(
    (col.a, {"a": None}, None),
    (col.a + 1, {"a": None}, None),
    (1 + col.a, {"a": None}, None),
    (col.a * col.b, {"a": None, "b": 0}, None),
    (col.a * col.b, {"a": 0, "b": None}, None),
    (col.a / col.b, {"a": None, "b": 0}, None),
    (-col.a, {"a": None}, None),
    (col.a.abs(), {"a": None}, None),
    (col.a.round(1), {"a": None}, None),
    (col.a.cast(int), {"a": None}, None),
    (col.a == None, {"a": None}, None),  # noqa: E711  (builds an expression)
    (col.a == col.b, {"a": None, "b": None}, None),
    (col.a != 1, {"a": None}, None),
    (col.a < 1, {"a": None}, None),
    (col.a.is_in([1, None]), {"a": None}, None),
    (col.a.is_in([1, None]), {"a": 2}, False),
    (col.a.is_null(), {"a": None}, True),
    (col.a.is_null(), {"a": 0}, False),
    ((col.a + 1).is_null(), {"a": None}, True),
    (col.a.fill_null(5), {"a": None}, 5),
    (col.a.fill_null(5), {"a": 0}, 0),
    (col.a.fill_null(col.b), {"a": None, "b": None}, None),
    (col.a.fill_null(col.b).fill_null(3) + 1, {"a": None, "b": None}, 4),
    ((col.a + 1).is_null() == col.a.is_null(), {"a": None}, True),
    (col.s.str.lower(), {"s": None}, None),
    (col.s.str.contains(col.t), {"s": "abc", "t": None}, None),
    (col.s.str.concat(col.t, "!"), {"s": "abc", "t": None}, None),
    (col.t.dt.year, {"t": None}, None),
    (col.u["id"], {"u": None}, None),
    (col.u["id"]["x"], {"u": {"id": None}}, None),
)

COMPARISON = _of(
    (col.a == 7, A, True),
    (col.a != 7, A, False),
    (col.a > col.b, A, True),
    (col.a >= 7, A, True),
    (col.a < 7, A, False),
    (col.a <= 6, A, False),
    (lit(1) < col.a, A, True),
    (col.a == col.b, {"a": 1, "b": 1.0}, True),
    (col.a == col.b, {"a": 1, "b": "1"}, False),
    (col.a < col.b, {"a": 1, "b": "1"}, TypeError),
    (col.a < col.b, {"a": "Z", "b": "a"}, True),
    (col.a.is_in([1, 7]), A, True),
    (col.a.is_in([]), A, False),
    (col.a.is_in(["7"]), A, False),
    (col.price * 1.08 > 10, {"price": 9.5}, True),
)

NAN_CASES = _of(
    (col.a, {"a": NAN}, NAN),
    (col.a + 1, {"a": NAN}, NAN),
    (col.a == col.a, {"a": NAN}, False),
    (col.a != col.a, {"a": NAN}, True),
    (col.a < 1, {"a": NAN}, False),
    (col.a.is_null(), {"a": NAN}, False),
    (col.a.fill_null(1.0), {"a": NAN}, NAN),
    (col.a.is_in([NAN, 1.0]), {"a": NAN}, False),
    (col.a.round(1), {"a": NAN}, NAN),
    (1 / col.a, {"a": NAN}, NAN),
    (col.a**0.5, {"a": -4.0}, NAN),
    (col.a**400, {"a": 10.0}, math.inf),
    (col.a**401, {"a": -10.0}, -math.inf),
    (col.a * 10.0, {"a": 1e308}, math.inf),
)

T, F, N = True, False, None
KLEENE = [
    ExpressionCase(e, {"p": p, "q": q}, expected)
    for p, q, conjunction, disjunction in [
        (T, T, T, T), (T, F, F, T), (T, N, N, T),
        (F, T, F, T), (F, F, F, F), (F, N, F, N),
        (N, T, N, T), (N, F, F, N), (N, N, N, N),
    ]
    for e, expected in [
        (col.p & col.q, conjunction),
        (col.p | col.q, disjunction),
        ((col.p == True) & (col.q == True), conjunction),  # noqa: E712
        ((col.p == True) | (col.q == True), disjunction),  # noqa: E712
        (~(col.p & col.q), None if conjunction is None else not conjunction),
        (~col.p | ~col.q, None if conjunction is None else not conjunction),
        (when(col.p & col.q).then(1).otherwise(0), 1 if conjunction else 0),
        (when(col.p | col.q).then(1).otherwise(0), 1 if disjunction else 0),
        ((col.p & col.q).is_null(), conjunction is None),
        (col.p.is_null() | col.q, True if p is None else q),
    ]
]  # fmt: skip

LOGIC = _of(
    (~col.a, {"a": True}, False),
    (~col.a, {"a": None}, None),
    (col.a & True, {"a": 1}, TypeError),
    (~col.a, {"a": 0}, TypeError),
    (col.a | False, {"a": "yes"}, TypeError),
    ((col.a > 1) & (col.a < 9) & ~(col.b == 3), A, True),
    # A field that is read more than once, where not every way of evaluation has read it.
    ((col.a > col.b) & (col.b > 1), {"a": None, "b": 0}, False),
    ((col.a > col.b) & (col.b > 1), {"a": None, "b": 2}, None),
    ((col.a > col.b) | (col.b > 1), {"a": None, "b": 2}, True),
    ((col.a > col.b) | (col.b > 1), {"a": 1, "b": None}, None),
    ((col.a + 1).is_null() == (col.a > 0), {"a": 1}, False),
    ((col.a + 1).is_null() == (col.a > 0), {"a": None}, None),
    (
        when(col.a > col.b).then(col.b).when(col.b > 1).then(-col.b).otherwise(col.a),
        {"a": None, "b": 2},
        -2,
    ),
    (
        when(col.a > col.b).then(col.b).when(col.b > 1).then(-col.b).otherwise(col.a),
        {"a": None, "b": None},
        None,
    ),
    # The right side is not computed where the left decides.
    ((col.a != 7) & (col.a.cast(str).cast(bool)), A, False),
    ((col.a == 7) | (col.a.cast(str).cast(bool)), A, True),
)

CONDITIONAL = _of(
    (when(col.a > 5).then("big").otherwise("small"), A, "big"),
    (when(col.a > 9).then("big").otherwise("small"), A, "small"),
    (when(col.a > 9).then("big"), A, None),
    (when(col.a > 9).then(1).when(col.a > 5).then(2).otherwise(3), A, 2),
    (when(col.a > 9).then(1).when(col.a > 8).then(5).otherwise(col.b), A, 2),
    (when(col.a > 9).then(1).otherwise(0), {"a": None}, 0),
    (when(~(col.a > 9)).then(1).otherwise(0), {"a": None}, 0),
    (when(col.a != 0).then(10 / col.a).otherwise(-1.0), {"a": 0}, -1.0),
    # The branch that is not taken is not computed.
    (when(col.a.is_null()).then(0).otherwise(col.a.cast(int)), {"a": None}, 0),
    (when(col.s == "x").then(0).otherwise(col.s.cast(int)), {"s": "x"}, 0),
    (when(col.a).then(1).otherwise(0), {"a": 1}, TypeError),
    (when(col.a > 1).then(col.b).otherwise(col.a) + col.b, A, 4),
)

CASTS = _of(
    (col.a.cast(int), {"a": "42"}, 42),
    (col.a.cast(int), {"a": " -42 "}, -42),
    (col.a.cast(int), {"a": 3.99}, 3),
    (col.a.cast(int), {"a": -3.99}, -3),
    (col.a.cast(int), {"a": True}, 1),
    (col.a.cast(int), {"a": "x"}, ValueError),
    (col.a.cast(int), {"a": "1.5"}, ValueError),
    (col.a.cast(int), {"a": "1_000"}, ValueError),
    (col.a.cast(int), {"a": "٣"}, ValueError),
    (col.a.cast(int), {"a": NAN}, ValueError),
    (col.a.cast(int), {"a": math.inf}, ValueError),
    (col.a.cast(int, strict=False), {"a": "x"}, None),
    (col.a.cast(int, strict=False), {"a": NAN}, None),
    (col.a.cast(int, strict=False) + 1, {"a": "x"}, None),
    (col.a.cast(int, strict=False) + 1, {"a": "1"}, 2),
    (col.a.cast(float), {"a": "2.5"}, 2.5),
    (col.a.cast(float), {"a": "nan"}, NAN),
    (col.a.cast(float), {"a": 2}, 2.0),
    (col.a.cast(float), {"a": ""}, ValueError),
    (col.a.cast(str), {"a": 7}, "7"),
    (col.a.cast(str), {"a": 7.5}, "7.5"),
    (col.a.cast(str), {"a": True}, "True"),
    (col.a.cast(bool), {"a": 0}, False),
    (col.a.cast(bool), {"a": -0.5}, True),
    (col.a.cast(bool), {"a": "True"}, True),
    (col.a.cast(bool), {"a": "no"}, False),
    (col.a.cast(bool), {"a": "perhaps"}, ValueError),
    (col.a.cast(bool, strict=False), {"a": "perhaps"}, None),
)

ROUNDING = _of(
    (col.a.round(), {"a": 0.5}, 0.0),
    (col.a.round(), {"a": 1.5}, 2.0),
    (col.a.round(), {"a": 2.5}, 2.0),
    (col.a.round(), {"a": -0.5}, -0.0),
    (round(col.a, 1), {"a": 0.25}, 0.2),
    (round(col.a, 1), {"a": 0.75}, 0.8),
    (col.a.round(2), {"a": 1.5}, 1.5),
    (col.a.round(), {"a": 7}, 7),
    (col.a.round(-1), {"a": 25}, 20),
    (col.a.round(-1), {"a": 35}, 40),
)

TEXT = _of(
    (col.s.str.lower(), {"s": "ÄbC"}, "äbc"),
    (col.s.str.upper(), {"s": "äbC"}, "ÄBC"),
    (col.s.str.strip(), {"s": " a b\t"}, "a b"),
    (col.s.str.strip("xy"), {"s": "xyaxy"}, "a"),
    (col.s.str.lstrip(), {"s": " a "}, "a "),
    (col.s.str.rstrip(), {"s": " a "}, " a"),
    (col.s.str.len(), {"s": "añ😀"}, 3),
    (col.s.str.contains("b"), {"s": "abc"}, True),
    (col.s.str.contains("."), {"s": "abc"}, False),
    (col.s.str.contains(""), {"s": "abc"}, True),
    (col.s.str.contains(col.t), {"s": "abc", "t": "c"}, True),
    (col.s.str.starts_with("ab"), {"s": "abc"}, True),
    (col.s.str.ends_with("ab"), {"s": "abc"}, False),
    (col.s.str.slice(1, 2), {"s": "a😀cd"}, "😀c"),
    (col.s.str.slice(2), {"s": "abcd"}, "cd"),
    (col.s.str.slice(-3, 2), {"s": "abcd"}, "bc"),
    (col.s.str.slice(-2), {"s": "abcd"}, "cd"),
    (col.s.str.slice(9, 2), {"s": "abcd"}, ""),
    (col.s.str.replace("a", "x"), {"s": "banana"}, "bxnxnx"),
    (col.s.str.concat("-", col.t), {"s": "a", "t": "b"}, "a-b"),
    (col.s.str.split(","), {"s": "a,b,,c"}, ["a", "b", "", "c"]),
    (col.s.str.split(), {"s": " a  b "}, ["a", "b"]),
    (col.s.str.split(",")[1], {"s": "a,b"}, "b"),
    (col.s.str.lower().str.strip() == "x", {"s": " X "}, True),
    (col.s.str.lower(), {"s": 1}, AttributeError),
)

TIME = _of(
    (col.t.dt.year, {"t": TS}, 2023),
    (col.t.dt.month, {"t": TS}, 11),
    (col.t.dt.day, {"t": TS}, 14),
    (col.t.dt.hour, {"t": TS}, 22),
    (col.t.dt.minute, {"t": TS}, 15),
    (col.t.dt.second, {"t": TS}, 23),
    (col.t.dt.millisecond, {"t": TS}, 456),
    (col.t.dt.weekday, {"t": TS}, 1),
    (col.t.dt.date, {"t": TS}, date(2023, 11, 14)),
    (col.t.dt.hour(), {"t": TS}, 22),
    (col.t.dt.year, {"t": -1}, 1969),
    (col.t.dt.hour, {"t": -1}, 23),
    (col.t.dt.weekday, {"t": 0}, 3),
    (col.t.dt.year, {"t": MOMENT}, 2023),
    (col.t.dt.second, {"t": MOMENT}, 23),
    (col.t.dt.epoch_ms, {"t": MOMENT}, TS),
    (col.t.dt.epoch_ms, {"t": MOMENT.replace(tzinfo=None)}, TS),
    (col.t.dt.epoch_ms, {"t": date(1970, 1, 2)}, 86_400_000),
    (col.t.dt.truncate("1m"), {"t": TS}, 1_700_000_100_000),
    (col.t.dt.truncate(timedelta(hours=1)), {"t": TS}, 1_699_999_200_000),
    (col.t.dt.truncate("1s"), {"t": -1}, -1000),
    (col.t.dt.truncate("1m"), {"t": MOMENT}, datetime(2023, 11, 14, 22, 15, tzinfo=UTC)),
    (col.t.dt.truncate("1ms"), {"t": MOMENT}, MOMENT.replace(microsecond=456_000)),
    (col.t.dt.year, {"t": "2023"}, TypeError),
)

NESTED = _of(
    (col["user"]["id"], {"user": {"id": 5}}, 5),
    (col.user["id"] + 1, {"user": {"id": 5}}, 6),
    (col.user["tags"][1], {"user": {"tags": ["a", "b"]}}, "b"),
    (col.user["id"] == col.user["other"], {"user": {"id": 5, "other": 5}}, True),
    (col.user["id"].fill_null(0) + col.user["n"], {"user": {"id": None, "n": 4}}, 4),
    (col.user["name"], {"user": {"id": 5}}, LookupError),
    (col.tags[5], {"tags": [1]}, LookupError),
    (col.missing, A, LookupError),
    (col.missing.fill_null(1), A, LookupError),
)


def _minus(a: Any, b: Any) -> Any:
    return a - b


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), "none")


def _minus_on_arrays(a: Any, b: Any) -> Any:
    from aioflow.columns.numbers import combine

    return combine("-", a, b)


MINUS = Operation(name="minus", function=_minus)
INLINE_MINUS = Operation(
    name="inline_minus",
    function=_minus,
    source="{0} - {1}",
    arrays=_minus_on_arrays,
    gives_none=True,
)
FIRST = Operation(name="first", function=_first, takes_none=True)
EQUAL = Operation(name="equal", function=operator.eq, gives_bool=True)


def _apply(operation: Operation, *operands: Any) -> Expr[Any]:
    return Apply(operation, tuple(map(as_expression, operands)))


APPLY = {one.name: partial(_apply, one) for one in (MINUS, INLINE_MINUS, FIRST, EQUAL)}
"""Functions that build the expressions of `APPLIED`, by the names that `repr` writes."""

APPLIED = _of(
    (_apply(MINUS, col.a, col.b), A, 5),
    (_apply(MINUS, col.a, 1), A, 6),
    (_apply(MINUS, col.a, col.b), {"a": None, "b": 2}, None),
    (_apply(MINUS, col.a, col.b), {"a": 1, "b": None}, None),
    (_apply(MINUS, 9, 2), A, 7),
    (_apply(MINUS, col.a, col.b), {"a": "x", "b": 2}, TypeError),
    (_apply(INLINE_MINUS, col.a, col.b), A, 5),
    (_apply(INLINE_MINUS, col.a, col.b), {"a": 1, "b": None}, None),
    (_apply(INLINE_MINUS, col.a, -3), A, 10),
    (_apply(INLINE_MINUS, col.a, 0.5), A, 6.5),
    (_apply(INLINE_MINUS, col.a + col.b, col.b * 2), A, 5),
    (_apply(INLINE_MINUS, _apply(MINUS, col.a, 1), col.a) + col.b, A, 1),
    (_apply(FIRST, col.a, col.b), {"a": None, "b": 2}, 2),
    (_apply(FIRST, col.a, col.b), {"a": None, "b": None}, "none"),
    (_apply(FIRST, col.a), {"a": None}, "none"),
    (_apply(FIRST, col.a + 1, col.a * 2, col.b), {"a": None, "b": 2}, 2),
    (_apply(FIRST, col.a, "x").str.upper(), {"a": None}, "X"),
    (_apply(EQUAL, col.a, 7) & (col.b == 2), A, True),
    (~_apply(EQUAL, col.a, 7), A, False),
)

CASES: list[ExpressionCase] = [
    *ARITHMETIC, *DIVISION_BY_ZERO, *NONE, *COMPARISON, *NAN_CASES, *KLEENE, *LOGIC, *CONDITIONAL,
    *CASTS, *ROUNDING, *TEXT, *TIME, *NESTED, *APPLIED,
]  # fmt: skip
