"""Compiles scalar SQL expressions to expressions of the engine, and checks their types.

A node becomes an operation of the engine if this operation has the same meaning in SQL. Otherwise
it becomes an `Apply` of a function of `sql.values`. So one compiled expression serves rows and
columns. Decision 26 defines each operation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial, reduce
from typing import Any

from sqlglot import exp

from aioflow.core.errors import did_you_mean
from aioflow.expressions.nodes import (
    Binary,
    Case,
    Expr,
    IsIn,
    Literal,
    Unary,
)
from aioflow.expressions.nodes import Field as FieldOf
from aioflow.expressions.rows import compile_row
from aioflow.expressions.trees import Apply, Operation
from aioflow.sql import values as v
from aioflow.sql.casts import Scalar, cast, common_type, folded, literal, widened
from aioflow.sql.errors import SqlError
from aioflow.sql.functions import CALENDAR, FUNCTIONS, LETTERS, PARTS, REFUSED, UNITS_MS
from aioflow.sql.scope import Scope
from aioflow.sql.types import (
    ANY,
    BOOLEAN,
    DATE,
    DECIMAL,
    FLOAT,
    INTEGER,
    INTERVAL,
    NULL,
    NUMERIC,
    STRING,
    TIMESTAMP,
    SqlType,
    array_of,
    map_of,
    type_of_declaration,
)

__all__ = [
    "Functions",
    "UserFunction",
    "arguments_of",
    "async_calls",
    "compile_scalar",
]


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A Python function that a query may call, with the type of its results.

    The function is called with None for NULL.
    """

    function: Callable[..., Any]
    type: SqlType = ANY
    nullable: bool = True
    is_async: bool = False


@dataclass(frozen=True, slots=True)
class Functions:
    """The user's functions by name. The names are not case-sensitive."""

    by_name: Mapping[str, UserFunction] = field(default_factory=dict)

    def find(self, node: exp.Expr) -> UserFunction | None:
        """Returns the user's function that `node` calls, or None if it calls an SQL function."""
        if not self.by_name:
            return None
        folded = {name.casefold(): one for name, one in self.by_name.items()}
        return next((folded[n.casefold()] for n in _names(node) if n.casefold() in folded), None)


def async_calls(node: exp.Expr, functions: Functions) -> list[exp.Expr]:
    """Returns the calls of async user functions in `node`, innermost first.

    The planner computes the calls first, and replaces each by a column.
    """
    calls = [one for one in node.walk() if (found := functions.find(one)) and found.is_async]
    return sorted(calls, key=lambda call: -call.depth)


def compile_scalar(node: exp.Expr, scope: Scope, functions: Functions) -> Scalar:
    """Compiles a scalar expression. Raises SqlError at a node that is invalid or not supported."""
    return _Compiler(scope, functions).compile(node)


class _Compiler:
    def __init__(self, scope: Scope, functions: Functions) -> None:
        self.scope = scope
        self.functions = functions

    def compile(self, node: exp.Expr) -> Scalar:
        user = self.functions.find(node)
        if user is not None:
            return self._user(node, user)
        for name in _UNREAD.get(type(node), ()):
            if node.args.get(name):
                raise SqlError(f"{name.upper()} is not supported in {node.sql()}", node)
        handler = _NODES.get(type(node))
        if handler is not None:
            return folded(handler(self, node))
        if isinstance(node, exp.AggFunc | exp.Window | exp.Filter):
            raise SqlError(f"an aggregate cannot stand here: {node.sql()}", node)
        if isinstance(node, exp.Func):
            return folded(self._call(node))
        raise SqlError(f"{node.sql()} is not supported{_instead(node)}", node)

    # Names, literals, nested values.

    def column(self, node: exp.Column) -> Scalar:
        found = self.scope.resolve(node)
        return Scalar(found.type, found.nullable, found.expression)

    def _field(self, row: Scalar, name: str, node: exp.Expr) -> Scalar:
        if row.type.name == "MAP" and row.type.element is not None:
            return Scalar(row.type.element, True, v.apply(v.element, row.expression, name))
        if row.type not in (ANY, NULL) and row.type.name != "ROW":
            raise SqlError(f"{row.type} has no field {name!r}", node)
        fields = dict(row.type.fields)
        exact = name if name in fields else None
        alike = [exact] if exact else [one for one in fields if one.casefold() == name.casefold()]
        if row.type.name == "ROW" and len(alike) != 1:
            raise SqlError(f"no field {name!r} in {row.type}{did_you_mean(name, fields)}", node)
        name = alike[0] if alike else name
        return Scalar(fields.get(name, ANY), True, FieldOf(row.expression, name))

    def dot(self, node: exp.Dot) -> Scalar:
        return self._field(self.compile(node.this), node.expression.name, node)

    def bracket(self, node: exp.Bracket) -> Scalar:
        if isinstance(node.this, exp.Var):  # MAP['key', value, ...]
            keys, given = node.expressions[::2], node.expressions[1::2]
            names = tuple(str(self.compile(key).constant) for key in keys)
            expressions, kind, _ = self._unified(list(map(self.compile, given)), node)
            made = v.apply(partial(v.make_row, names), *expressions, name="map", takes_none=True)
            return Scalar(map_of(kind), False, made)
        value, key = self.compile(node.this), self.compile(node.expressions[0])
        if value.type.name == "ROW" and isinstance(key.constant, str):
            return self._field(value, key.constant, node)
        if value.type.name not in ("ARRAY", "MAP", "ANY"):
            raise SqlError(f"{value.type} has no elements", node)
        if value.type.name != "ANY":
            key = self._as("I" if value.type.name == "ARRAY" else "S", key, "[...]", node)
        read = v.apply(v.element, value.expression, key.expression)
        return Scalar(value.type.element or ANY, True, read)

    def array(self, node: exp.Array) -> Scalar:
        expressions, kind, _ = self._unified(list(map(self.compile, node.expressions)), node)
        return Scalar(array_of(kind), False, v.apply(v.make_array, *expressions))

    def literal(self, node: exp.Literal) -> Scalar:
        text = node.name
        if node.is_string:
            return literal(STRING, text)
        return literal(INTEGER, int(text)) if text.isdigit() else literal(FLOAT, float(text))

    # Types.

    def _unified(
        self, given: Sequence[Scalar], node: exp.Expr, convert: bool = True
    ) -> tuple[list[Expr[Any]], SqlType, bool]:
        """Returns the operands converted to their common type, this type, and whether any operand
        may be NULL.

        Without `convert`, numbers that Python compares exactly are not converted.
        """
        texts = [isinstance(one.constant, str) and one.type == STRING for one in given]
        others = [one.type for one, text in zip(given, texts, strict=True) if not text]
        if others and set(others) != {NULL} and not {STRING, ANY} & set(others):
            target = common_type(others)
            given = [
                self._read(one, target, node) if text and target else one
                for one, text in zip(given, texts, strict=True)
            ]
        if DECIMAL in (one.type for one in given):
            given = [
                literal(DECIMAL, Decimal(repr(one.constant)))
                if one.type == FLOAT and one.constant is not None
                else one
                for one in given
            ]
        kind = common_type([one.type for one in given])
        if kind is None:
            kinds = " and ".join(dict.fromkeys(str(one.type) for one in given))
            raise SqlError(f"{kinds} do not go together in {node.sql()}: write a CAST", node)
        expressions = [
            widened(one, kind) if convert or DECIMAL in (one.type, kind) else one.expression
            for one in given
        ]
        return expressions, kind, any(one.nullable for one in given)

    def _read(self, text: Scalar, kind: SqlType, node: exp.Expr) -> Scalar:
        """Converts a literal text to the type `kind`."""
        try:
            constant = compile_row(cast(text, kind, True, node).expression)({})
        except ValueError as error:
            raise SqlError(
                f"{text.constant!r} cannot be read as {kind}; write a literal of that type", node
            ) from error
        return literal(kind, constant)

    def _as(self, letter: str, given: Scalar, name: str, node: exp.Expr) -> Scalar:
        """Returns an argument of the function `name`, converted to a type that `letter` allows."""
        kinds = LETTERS[letter]
        if letter not in "ACS" and given.type == STRING and given.constant is not None:
            given = self._read(given, kinds[0], node)
        if letter not in "AC" and not given.type.may_be(*kinds):
            expected = " or ".join(map(str, kinds))
            raise SqlError(f"{name} takes {expected}, not {given.type}: write a CAST", node)
        return Scalar(FLOAT, given.nullable, widened(given, FLOAT)) if letter == "F" else given

    def condition(self, node: exp.Expr) -> Scalar:
        return self._as("B", self.compile(node), "a condition", node)

    # Operators.

    def arithmetic(self, node: exp.Binary) -> Scalar:
        sign = _SIGNS[type(node)]
        left, right = node.this, node.expression
        if isinstance(left, exp.Interval) and sign == "+":
            left, right = right, left
        if sign in "+-" and (months := _months(right)) is not None:
            time = self._as("T", self.compile(left), f"INTERVAL {sign}", node)
            moved = v.apply(v.add_months, time.expression, months if sign == "+" else -months)
            return Scalar(TIMESTAMP, time.nullable, moved)
        a, b = self.compile(left), self.compile(right)
        null = a.nullable or b.nullable
        kinds = (a.type, b.type)
        if INTERVAL in kinds or {DATE, TIMESTAMP} & set(kinds):
            return self._time_arithmetic(sign, a, b, null, node)
        (x, y), kind, null = self._unified([a, b], node, convert=False)
        if not kind.may_be(*NUMERIC):
            told = ": write || to join texts" if kind == STRING and sign == "+" else ""
            raise SqlError(f"{sign} takes numbers, not {kind}{told}", node)
        if sign in "+-*" and kind == DECIMAL:
            return Scalar(kind, null, v.apply(_EXACT[sign], x, y))
        if sign in "+-*":
            return Scalar(kind, null, Binary(sign, x, y))
        null = null or b.constant in (None, 0)
        if sign == "/" and kind == FLOAT:
            return Scalar(kind, null, Binary("/", x, y))
        return Scalar(kind, null, _divided(sign, x, y, kind))

    def _time_arithmetic(
        self, sign: str, a: Scalar, b: Scalar, null: bool, node: exp.Expr
    ) -> Scalar:
        x, y = a.expression, b.expression
        kinds = (a.type, b.type)
        days: Expr[Any] = Binary("*", y if b.type == INTEGER else x, Literal(v.DAY_MS))
        match sign, kinds:
            case "-", (one, other) if one == other == DATE:
                return Scalar(INTEGER, null, Binary("//", Binary("-", x, y), Literal(v.DAY_MS)))
            case "-", (one, other) if {one, other} <= {DATE, TIMESTAMP}:
                return Scalar(INTERVAL, null, Binary("-", x, y))
            case (("+" | "-"), (one, other)) if {one, other} == {DATE, INTEGER}:
                if one == DATE or sign == "+":
                    return Scalar(DATE, null, Binary(sign, x if one == DATE else y, days))
            case (("+" | "-"), (one, other)) if other == INTERVAL and one in (DATE, TIMESTAMP):
                return Scalar(TIMESTAMP, null, Binary(sign, x, y))
            case "+", (one, other) if one == INTERVAL and other in (DATE, TIMESTAMP):
                return Scalar(TIMESTAMP, null, Binary(sign, x, y))
            case (("+" | "-"), (one, other)) if one == other == INTERVAL:
                return Scalar(INTERVAL, null, Binary(sign, x, y))
            case "*", (one, other) if {one, other} == {INTERVAL, INTEGER}:
                return Scalar(INTERVAL, null, Binary(sign, x, y))
            case _, (one, other) if {ANY, NULL} & {one, other} and sign in "+-":
                return Scalar(
                    a.type if a.type not in (ANY, NULL) else ANY, null, Binary(sign, x, y)
                )
        raise SqlError(f"{a.type} {sign} {b.type} has no meaning: {node.sql()}", node)

    def negation(self, node: exp.Neg) -> Scalar:
        given = self.compile(node.this)
        if not given.type.may_be(*NUMERIC, INTERVAL):
            raise SqlError(f"- takes a number, not {given.type}", node)
        if given.constant is not None:
            return literal(given.type, -given.constant)
        x = given.expression
        minus = v.apply(v.EXACT.minus, x) if given.type == DECIMAL else Unary("-", x)
        return Scalar(given.type, given.nullable, minus)

    def comparison(self, node: exp.Binary) -> Scalar:
        (x, y), _, null = self._unified(
            [self.compile(node.this), self.compile(node.expression)], node, convert=False
        )
        sign = _COMPARISONS[type(node)]
        if sign in ("==", "!=") and isinstance(x, Apply) and isinstance(y, Literal):
            is_rest = x._operation.function is v.remainder
            if is_rest and y._value == 0:  # The sign of a zero is irrelevant.
                x = Binary("%", *x._operands)
        return Scalar(BOOLEAN, null, Binary(sign, x, y))

    def distinction(self, node: exp.Binary) -> Scalar:
        (x, y), _, _ = self._unified(
            [self.compile(node.this), self.compile(node.expression)], node, convert=False
        )
        same = Binary("==", x, y).fill_null(x.is_null() & y.is_null())  # NULL if x or y is NULL.
        return Scalar(BOOLEAN, False, same if isinstance(node, exp.NullSafeEQ) else ~same)

    def logic(self, node: exp.Binary) -> Scalar:
        a, b = self.condition(node.this), self.condition(node.expression)
        sign = "&" if isinstance(node, exp.And) else "|"
        return Scalar(BOOLEAN, a.nullable or b.nullable, Binary(sign, a.expression, b.expression))

    def inversion(self, node: exp.Not) -> Scalar:
        given = self.condition(node.this)
        return Scalar(BOOLEAN, given.nullable, Unary("~", given.expression))

    def test(self, node: exp.Is) -> Scalar:
        given, expected = self.compile(node.this), node.expression
        if isinstance(expected, exp.Null):
            return Scalar(BOOLEAN, False, given.expression.is_null())
        if not isinstance(expected, exp.Boolean):
            raise SqlError(f"IS takes NULL, TRUE or FALSE: {node.sql()}", node)
        truth = self._as("B", given, "IS", node).expression
        truth = truth if expected.this else Unary("~", truth)
        return Scalar(BOOLEAN, False, Case(((truth, Literal(True)),), Literal(False)))

    def membership(self, node: exp.In) -> Scalar:
        if not node.expressions:
            raise SqlError("IN takes a list of values here; write a join for a query", node)
        given = [self.compile(one) for one in (node.this, *node.expressions)]
        (x, *members), _, null = self._unified(given, node, convert=False)
        if not all(isinstance(one, Literal) for one in members):
            found: Expr[Any] = reduce(
                partial(Binary, "|"), (Binary("==", x, one) for one in members)
            )
            return Scalar(BOOLEAN, null, found)
        constants = [one._value for one in members if isinstance(one, Literal)]
        inside: Expr[Any] = IsIn(x, tuple(one for one in constants if one is not None))
        if None in constants:  # A value that is not found may still equal NULL.
            inside = Case(((inside, Literal(True)),), Literal(None))
        return Scalar(BOOLEAN, null, inside)

    def between(self, node: exp.Between) -> Scalar:
        given = [self.compile(one) for one in (node.this, node.args["low"], node.args["high"])]
        (x, low, high), _, null = self._unified(given, node, convert=False)
        found: Expr[Any] = Binary("&", Binary(">=", x, low), Binary("<=", x, high))
        if node.args.get("symmetric"):
            found = Binary("|", found, Binary("&", Binary(">=", x, high), Binary("<=", x, low)))
        return Scalar(BOOLEAN, null, found)

    def concatenation(self, node: exp.DPipe) -> Scalar:
        given = [self.compile(node.this), self.compile(node.expression)]
        if not {STRING, ANY, NULL} & {one.type for one in given}:
            raise SqlError(f"|| joins texts, not {given[0].type} and {given[1].type}", node)
        x, y = (cast(one, STRING, True, node).expression for one in given)
        return Scalar(STRING, any(one.nullable for one in given), x.str.concat(y))

    def like(self, node: exp.Expr, escape: str | None = None) -> Scalar:
        fold = isinstance(node, exp.ILike)
        given = [self.compile(node.this), self.compile(node.expression)]
        text, pattern = (self._as("S", one, "LIKE", node) for one in given)
        null, x = text.nullable or pattern.nullable, text.expression
        if not isinstance(pattern.constant, str):
            found = v.apply(v.like, x, pattern.expression, escape or "", fold)
        else:
            simple = None if fold or escape else _simple_like(x, pattern.constant)
            matches = partial(v.matches, v.like_pattern(pattern.constant, escape, fold))
            name = f"like[{pattern.constant}]"
            found = v.apply(matches, x, name=name, gives_bool=True) if simple is None else simple
        return Scalar(BOOLEAN, null, ~found if node.args.get("negate") else found)

    def escape(self, node: exp.Escape) -> Scalar:
        return self.like(node.this, node.expression.name)

    # Choices.

    def case(self, node: exp.Case) -> Scalar:
        subject, tests = node.this, []
        for branch in node.args["ifs"]:
            test = exp.EQ(this=subject, expression=branch.this) if subject else branch.this
            tests.append(self.condition(test).expression)
        results = [one.args["true"] for one in node.args["ifs"]]
        return self._case(tests, [*results, node.args.get("default") or exp.Null()], node)

    def if_(self, node: exp.If) -> Scalar:
        results = [node.args["true"], node.args.get("false") or exp.Null()]
        return self._case([self.condition(node.this).expression], results, node)

    def _case(self, tests: list[Expr[Any]], results: list[exp.Expr], node: exp.Expr) -> Scalar:
        (*chosen, default), kind, null = self._unified(list(map(self.compile, results)), node)
        return Scalar(kind, null, Case(tuple(zip(tests, chosen, strict=True)), default))

    def coalesce(self, node: exp.Coalesce) -> Scalar:
        given = [self.compile(one) for one in (node.this, *node.expressions)]
        expressions, kind, _ = self._unified(given, node)
        found = reduce(lambda a, b: b.fill_null(a), reversed(expressions))
        return Scalar(kind, all(one.nullable for one in given), found)

    def nullif(self, node: exp.Nullif) -> Scalar:
        first = self.compile(node.this)
        test = self.comparison(exp.EQ(this=node.this, expression=node.expression))
        null: Expr[Any] = Case(((test.expression, Literal(None)),), first.expression)
        return Scalar(first.type, True, null)

    # Calls.

    def cast(self, node: exp.Cast) -> Scalar:
        strict = not isinstance(node, exp.TryCast)
        made = cast(self.compile(node.this), type_of_declaration(node.to), strict, node)
        if strict and isinstance(node.this, exp.Literal):  # Such as TIMESTAMP '2026-01-31'.
            try:
                return literal(made.type, compile_row(made.expression)({}))
            except ValueError as error:
                raise SqlError(str(error).partition(";")[0], node) from error
        return made

    def interval(self, node: exp.Interval) -> Scalar:
        unit = _unit(node.args.get("unit"))
        if unit not in UNITS_MS:
            raise SqlError(
                f"{node.sql()} is not supported: write one number and one unit, such as "
                "INTERVAL '10' SECOND; MONTH and YEAR stand beside + and - of a time",
                node,
            )
        if node.this.is_string or isinstance(node.this, exp.Literal):
            try:
                return literal(INTERVAL, round(float(node.this.name) * UNITS_MS[unit]))
            except ValueError as error:
                raise SqlError(f"{node.this.name!r} is not a number of units", node) from error
        count = self._as("I", self.compile(node.this), "INTERVAL", node)
        return Scalar(INTERVAL, count.nullable, count.expression * UNITS_MS[unit])

    def extract(self, node: exp.Extract) -> Scalar:
        return self._part(node.name.upper().rstrip("S"), node.expression, node)

    def _part(self, part: str, of: exp.Expr, node: exp.Expr) -> Scalar:
        if part not in PARTS:
            raise SqlError(
                f"no part {part} of a time{did_you_mean(part, PARTS)}; there are "
                f"{', '.join(PARTS)}",
                node,
            )
        time = self._as("T", self.compile(of), part, node)
        kind = FLOAT if part == "EPOCH" else INTEGER
        return Scalar(kind, time.nullable, PARTS[part](time.expression))

    def truncated(self, node: exp.Expr) -> Scalar:
        unit = node.args.get("unit") or node.args.get("to")
        if unit is None:
            return self._call(node)
        name = _unit(unit)
        time = self._as("T", self.compile(node.this), "DATE_TRUNC", node)
        if isinstance(node, exp.Ceil) or name not in (*UNITS_MS, *CALENDAR):
            raise SqlError(f"{node.sql()} is not supported", node)
        if name in UNITS_MS and name != "WEEK":
            begin = time.expression.dt.truncate(f"{UNITS_MS[name]}ms")
        else:
            begin = v.apply(v.truncate_to, time.expression, name)
        return Scalar(TIMESTAMP, time.nullable, begin)

    def _time_call(self, name: str, node: exp.Expr, given: list[exp.Expr]) -> Scalar:
        """Compiles TIMESTAMPDIFF(unit, a, b) and TIMESTAMPADD(unit, n, t)."""
        unit = _unit(given[0])
        if len(given) != 3 or unit not in (*UNITS_MS, *CALENDAR):
            raise SqlError(f"{name} takes a unit such as SECOND and two values", node)
        a, b = self.compile(given[1]), self.compile(given[2])
        null = a.nullable or b.nullable
        if name == "TIMESTAMPADD":
            count, time = self._as("I", a, name, node), self._as("T", b, name, node)
            if unit in UNITS_MS:
                moved: Expr[Any] = time.expression + count.expression * UNITS_MS[unit]
            else:
                moved = v.apply(v.add_months, time.expression, count.expression * CALENDAR[unit])
            return Scalar(TIMESTAMP, null, moved)
        x, y = (self._as("T", one, name, node).expression for one in (a, b))
        if unit in UNITS_MS:
            return Scalar(INTEGER, null, v.apply(v.divide, y - x, UNITS_MS[unit]))
        return Scalar(
            INTEGER, null, v.apply(v.divide, v.apply(v.months_between, x, y), CALENDAR[unit])
        )

    def trim(self, node: exp.Trim) -> Scalar:
        given = [node.this, node.expression or exp.Literal.string(" ")]
        position = node.args.get("position")
        text, signs = (self._as("S", self.compile(one), "TRIM", node) for one in given)
        name = {"LEADING": "lstrip", "TRAILING": "rstrip"}.get(position or "", "strip")
        function = {"lstrip": str.lstrip, "rstrip": str.rstrip}.get(name, str.strip)
        stripped = v.apply(function, text.expression, signs.expression, name=name)
        return Scalar(STRING, text.nullable or signs.nullable, stripped)

    def pad(self, node: exp.Pad) -> Scalar:
        fill = node.args.get("fill_pattern") or exp.Literal.string(" ")
        name = "LPAD" if node.args.get("is_left") else "RPAD"
        return self._apply(name, [node.this, node.expression, fill], node)

    def json(self, node: exp.Expr) -> Scalar:
        given = arguments_of(node)
        return self._json("JSON_VALUE", given[0], given[1].sql().strip("'"), node)

    def _json(self, name: str, text: exp.Expr, path: str, node: exp.Expr) -> Scalar:
        try:
            steps = v.json_path(path)
        except ValueError as error:
            raise SqlError(f"{name}: {error}", node) from error
        given = self._as("S", self.compile(text), name, node)
        function = partial(v.json_value, steps, name != "JSON_QUERY")
        found = v.apply(function, given.expression, name=f"{name.lower()}[{path}]", gives_none=True)
        return Scalar(STRING, True, found)

    def _user(self, node: exp.Expr, user: UserFunction) -> Scalar:
        name = _names(node)[0]
        if user.is_async:
            raise SqlError(
                f"{name} is async and cannot be called here; call it in a subquery", node
            )
        operation = Operation(
            name=name,
            function=user.function,
            takes_none=True,
            gives_none=user.nullable,
            gives_bool=user.type == BOOLEAN,
        )
        given = [self.compile(one).expression for one in arguments_of(node)]
        return Scalar(user.type, user.nullable, Apply(operation, tuple(given)))

    def _call(self, node: exp.Expr) -> Scalar:
        given = arguments_of(node)
        names = [one.upper() for one in _names(node)]
        name = next((one for one in names if one in FUNCTIONS or one in PARTS), names[0])
        if name in ("TIMESTAMPDIFF", "TIMESTAMPADD", "TIMESTAMP_DIFF") and len(given) == 3:
            return self._time_call(name, node, given)
        if name in ("JSON_VALUE", "JSON_QUERY") and len(given) == 2:
            return self._json(name, given[0], given[1].name, node)
        if name in PARTS and len(given) == 1:
            return self._part(name, given[0], node)
        if name not in FUNCTIONS:
            known = [*FUNCTIONS, *PARTS, *map(str.upper, self.functions.by_name)]
            told = REFUSED.get(name) or did_you_mean(name, known, "{}")
            raise SqlError(f"no function {name}{told}", node)
        return self._apply(name, given, node)

    def _apply(self, name: str, given: list[exp.Expr], node: exp.Expr) -> Scalar:
        builtin = FUNCTIONS[name]
        letters = builtin.letters(len(given))
        if letters is None:
            raise SqlError(f"{name} takes {builtin.count} arguments, not {len(given)}", node)
        scalars = [
            self._as(letter, self.compile(one), name, one)
            for letter, one in zip(letters, given, strict=True)
        ]
        null = any(one.nullable for one in scalars)
        kind = builtin.type
        if kind is None:
            unified = [one for one, letter in zip(scalars, letters, strict=True) if letter in "NA"]
            expressions, kind, _ = self._unified(unified, node)
            expressions += [one.expression for one in scalars[len(unified) :]]
        else:
            expressions = [
                cast(one, STRING, True, node).expression if letter == "C" else one.expression
                for one, letter in zip(scalars, letters, strict=True)
            ]
        try:
            made = builtin.build(*expressions)
        except (ValueError, re.error) as error:
            raise SqlError(f"{name}: {error}", node) from error
        if builtin.nullable is not None:
            null = builtin.nullable
        return Scalar(kind, null, made)


def _divided(sign: str, x: Expr[Any], y: Expr[Any], kind: SqlType) -> Expr[Any]:
    """Returns the expression of a quotient or remainder. For positive ints it uses Python's own
    operator.
    """
    function = v.remainder if sign == "%" else v.divide
    if kind != INTEGER:
        found = v.apply(function, x, y)
        return v.apply(v.truncate_digits, found) if sign == "//" else found
    divisor = y._value if isinstance(y, Literal) else None
    positive = "{0} >= 0" if divisor else "{0} >= 0 < {1}"
    python = "%" if sign == "%" else "//"
    source = f"{{0}} {python} {{1}} if {positive} else {{f}}({{0}}, {{1}})"
    return v.apply(
        function,
        x,
        y,
        source=source if divisor is None or divisor > 0 else None,
        gives_none=not divisor,
    )


def _names(node: exp.Expr) -> list[str]:
    """Returns the names under which SQL knows the function that `node` calls."""
    if isinstance(node, exp.Anonymous):
        return [node.name]
    return node.sql_names() if isinstance(node, exp.Func) else []


def arguments_of(node: exp.Expr) -> list[exp.Expr]:
    """Returns the arguments of a call, in their order."""
    if isinstance(node, exp.Anonymous | exp.Initcap):
        return node.expressions or [node.this]
    found = (node.args.get(name) for name in node.arg_types)
    flat = [one for given in found for one in (given if isinstance(given, list) else [given])]
    return [one for one in flat if isinstance(one, exp.Expr)]


def _simple_like(x: Expr[Any], pattern: str) -> Expr[Any] | None:
    """Returns an expression for a LIKE that uses no regular expression. Returns None if the pattern
    needs a regular expression.
    """
    inner = pattern.strip("%")
    if "_" in inner or "%" in inner or "%%" in pattern or not inner:
        return None
    match pattern.startswith("%"), pattern.endswith("%"):
        case True, True:
            return x.str.contains(inner)
        case False, True:
            return x.str.starts_with(inner)
        case True, False:
            return x.str.ends_with(inner)
    return Binary("==", x, Literal(inner))


def _unit(node: exp.Expr | None) -> str:
    name = "" if node is None else node.name.upper()
    return name if name in UNITS_MS or name in CALENDAR else name.removesuffix("S")


def _months(node: exp.Expr) -> int | None:
    """Returns the number of months of an INTERVAL literal in calendar units. Returns None for all
    other nodes.
    """
    if not isinstance(node, exp.Interval) or not isinstance(node.this, exp.Literal):
        return None
    unit, count = _unit(node.args.get("unit")), node.this.name.strip()
    return CALENDAR[unit] * int(count) if unit in CALENDAR and count.lstrip("-").isdigit() else None


def _instead(node: exp.Expr) -> str:
    return next((f": {told}" for kind, told in _INSTEAD.items() if isinstance(node, kind)), "")


_INSTEAD: dict[type, str] = {
    exp.SimilarTo: "write REGEXP_LIKE",
    exp.BitwiseXor: "write POWER(a, b), or a function of yours",
    exp.AtTimeZone: "times are in UTC; write a function of yours",
    exp.Subquery: "a query cannot stand inside an expression; write a join",
    exp.Star: "* stands alone in SELECT and COUNT",
    exp.Placeholder: "a query has no parameters; write a constant, or compute in Python before it",
}

_UNREAD: dict[type, tuple[str, ...]] = {
    exp.Cast: ("format", "action", "default"),
    exp.TryCast: ("format", "action", "default"),
    exp.DateTrunc: ("zone",),
    exp.TimestampTrunc: ("zone",),
    exp.Trim: ("collation",),
}
"""For each type of node: the parts that change its meaning, but that its handler does not read."""

_SIGNS: dict[type, str] = {
    exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/", exp.Mod: "%", exp.IntDiv: "//",
}  # fmt: skip
_EXACT = {"+": v.EXACT.add, "-": v.EXACT.subtract, "*": v.EXACT.multiply}
_COMPARISONS: dict[type, str] = {
    exp.EQ: "==", exp.NEQ: "!=", exp.LT: "<", exp.LTE: "<=", exp.GT: ">", exp.GTE: ">=",
}  # fmt: skip
_NODES: dict[type, Callable[[_Compiler, Any], Scalar]] = {
    exp.Column: _Compiler.column,
    exp.Dot: _Compiler.dot,
    exp.Bracket: _Compiler.bracket,
    exp.Array: _Compiler.array,
    exp.Literal: _Compiler.literal,
    exp.Boolean: lambda _, node: literal(BOOLEAN, bool(node.this)),
    exp.Null: lambda _, node: literal(NULL, None),
    exp.Paren: lambda self, node: self.compile(node.this),
    exp.Neg: _Compiler.negation,
    exp.NullSafeEQ: _Compiler.distinction,
    exp.NullSafeNEQ: _Compiler.distinction,
    exp.And: _Compiler.logic,
    exp.Or: _Compiler.logic,
    exp.Not: _Compiler.inversion,
    exp.Is: _Compiler.test,
    exp.In: _Compiler.membership,
    exp.Between: _Compiler.between,
    exp.DPipe: _Compiler.concatenation,
    exp.Like: _Compiler.like,
    exp.ILike: _Compiler.like,
    exp.Escape: _Compiler.escape,
    exp.Case: _Compiler.case,
    exp.If: _Compiler.if_,
    exp.Coalesce: _Compiler.coalesce,
    exp.Nullif: _Compiler.nullif,
    exp.Cast: _Compiler.cast,
    exp.TryCast: _Compiler.cast,
    exp.Interval: _Compiler.interval,
    exp.Extract: _Compiler.extract,
    exp.DateTrunc: _Compiler.truncated,
    exp.TimestampTrunc: _Compiler.truncated,
    exp.Floor: _Compiler.truncated,
    exp.Ceil: _Compiler.truncated,
    exp.Trim: _Compiler.trim,
    exp.Pad: _Compiler.pad,
    exp.JSONExtract: _Compiler.json,
    exp.JSONExtractScalar: _Compiler.json,
    **dict.fromkeys(_SIGNS, _Compiler.arithmetic),
    **dict.fromkeys(_COMPARISONS, _Compiler.comparison),
}
