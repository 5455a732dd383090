"""Compiles SQL aggregates to aggregates of the engine.

COUNT, SUM, AVG, MIN and MAX are aggregates of the engine, which run on columns. `where=` leaves out
NULLs. The SUM of a group without a value is NULL. So SUM also counts its values, unless each group
certainly has a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from sqlglot import exp

from aioflow.core.functions import AggregateFunction
from aioflow.expressions.nodes import Binary, Case, Column, Expr, Literal, Unary
from aioflow.expressions.rows import compile_row
from aioflow.operators.aggregate import functions as af
from aioflow.operators.aggregate.folding import LoopWriter
from aioflow.sql import values as v
from aioflow.sql.casts import Scalar
from aioflow.sql.errors import SqlError
from aioflow.sql.scalars import Functions, arguments_of, compile_scalar
from aioflow.sql.scope import Scope
from aioflow.sql.types import (
    ANY,
    BOOLEAN,
    DECIMAL,
    FLOAT,
    INTEGER,
    NUMERIC,
    STRING,
    SqlType,
    array_of,
)

__all__ = ["Aggregate", "compile_aggregate", "is_aggregate", "of_part"]


@dataclass(frozen=True, slots=True)
class Aggregate:
    """A compiled aggregate.

    `parts` are the arguments of `af.agg(**parts)`. The name of a part is its repr, so the parts of
    several aggregates merge with `|`, and equal parts are computed once. `result` computes the
    value from the dict of the results of the parts.
    """

    type: SqlType
    nullable: bool
    parts: Mapping[str, AggregateFunction[Any, Any, Any]]
    result: Expr[Any]


class Distinct(AggregateFunction[Any, dict[Any, None], list[Any]]):
    """Collects the distinct values of an expression, except None, in order of arrival."""

    def __init__(self, fn: Expr[Any], where: Expr[Any] | None) -> None:
        self.fn, self.where = fn, where
        self._value = compile_row(fn if where is None else Case(((where, fn),), Literal(None)))

    def create_accumulator(self) -> dict[Any, None]:
        return {}

    def add(self, value: Any, accumulator: dict[Any, None]) -> dict[Any, None]:
        found = self._value(value)
        if found is not None:
            accumulator[found] = None
        return accumulator

    def merge(self, a: dict[Any, None], b: dict[Any, None]) -> dict[Any, None]:
        return a | b

    def get_result(self, accumulator: dict[Any, None]) -> list[Any]:
        return list(accumulator)

    def __repr__(self) -> str:
        shown = "" if self.where is None else f", where={self.where!r}"
        return f"{type(self).__name__.lower()}_values({self.fn!r}{shown})"


class DecimalSum(af.Sum):
    """Computes the sum of DECIMALs. Python's `+` would round the sum to 28 digits."""

    name = "decimal_sum"
    has_column_form = False

    def _write(self, writer: LoopWriter, slot: str) -> None:
        add = writer.constant(v.EXACT.add)
        writer.line(f"if (x := {writer.value(self.fn)}) is not None: {slot} = {add}({slot}, x)")

    def write_merge(self, a: str, b: str) -> Any:
        return None

    def merge(self, a: Any, b: Any) -> Any:
        return v.EXACT.add(a, b)


class DecimalMean(af.Mean):
    """Computes the mean of DECIMALs. The accumulator is [sum, number of values]."""

    name = "decimal_mean"
    has_column_form = False

    def _write(self, writer: LoopWriter, slot: str) -> None:
        add = writer.constant(v.EXACT.add)
        with writer.block(f"if (x := {writer.value(self.fn)}) is not None:"):
            writer.line(f"part = {slot}")
            writer.line(f"part[0] = {add}(part[0], x)")
            writer.line("part[1] += 1")

    def write_result(self, writer: LoopWriter, slot: str) -> str:
        divide = writer.constant(v.quotient)
        return f"({divide}({slot}[0], {slot}[1]) if {slot}[1] else None)"

    def write_merge(self, a: str, b: str) -> Any:
        return None

    def merge(self, a: Any, b: Any) -> Any:
        return [v.EXACT.add(a[0], b[0]), a[1] + b[1]]


class Moments(Distinct):
    """Computes [number, mean, sum of squared distances to the mean] of numbers by Welford's
    algorithm.
    """

    def create_accumulator(self) -> Any:
        return [0, 0.0, 0.0]

    def add(self, value: Any, accumulator: Any) -> Any:
        found = self._value(value)
        if found is not None:
            count, mean, squares = accumulator
            distance = float(found) - mean
            mean += distance / (count + 1)
            return [count + 1, mean, squares + distance * (float(found) - mean)]
        return accumulator

    def merge(self, a: Any, b: Any) -> Any:
        count = a[0] + b[0]
        if not count:
            return a
        distance = b[1] - a[1]
        squares = a[2] + b[2] + distance * distance * a[0] * b[0] / count
        return [count, a[1] + distance * b[0] / count, squares]

    def get_result(self, accumulator: Any) -> Any:
        return list(accumulator)


def spread(moments: list[Any], *, sample: bool, root: bool) -> float | None:
    """Returns the variance from the results of `Moments`, or its square root with `root`. `sample`
    selects the sample variance. Returns None if there are too few values.
    """
    count, _, squares = moments
    if count <= sample:
        return None
    variance: float = squares / (count - sample)
    return math.sqrt(variance) if root else variance


def is_aggregate(node: exp.Expr) -> bool:
    """Returns whether `node` is a call of an aggregate, with or without FILTER."""
    return isinstance(node.this if isinstance(node, exp.Filter) else node, exp.AggFunc) or (
        isinstance(node, exp.Anonymous) and node.name.upper() in _ANONYMOUS
    )


def compile_aggregate(node: exp.Expr, scope: Scope, functions: Functions) -> Aggregate:
    """Compiles the call of an aggregate, with a FILTER around it if there is one. Raises
    SqlError.
    """
    where: Expr[Any] | None = None
    call = node
    if isinstance(node, exp.Filter):
        call = node.this
        condition = compile_scalar(node.expression.this, scope, functions)
        if not condition.type.may_be(BOOLEAN):
            raise SqlError(f"FILTER takes a condition, not {condition.type}", node.expression)
        where = condition.expression
    name = call.name.upper() if isinstance(call, exp.Anonymous) else call.key.upper()
    name = _ANONYMOUS.get(name, name)
    given = [one for one in arguments_of(call) if not isinstance(one, exp.Star)]
    is_distinct = bool(given) and isinstance(given[0], exp.Distinct)
    if is_distinct:
        given = [*given[0].expressions, *given[1:]]
    for one in given:
        if isinstance(one, exp.Order):
            raise SqlError(
                "ORDER BY inside an aggregate is not supported; sort the result in a function of "
                "functions=",
                one,
            )
        if any(map(is_aggregate, one.walk())):
            raise SqlError(
                "an aggregate cannot stand inside an aggregate; compute the inner one in a "
                "subquery",
                one,
            )
    if name == "COUNT" and len(given) > 1:
        scalars = [compile_scalar(one, scope, functions) for one in given]
        made = v.apply(_tuple, *(one.expression for one in scalars), name="tuple")
        of = Scalar(ANY, any(one.nullable for one in scalars), made)
    elif given:
        of = compile_scalar(given[0], scope, functions)
    elif name == "COUNT":
        return of_part(af.count(where=where), INTEGER, False)
    else:
        raise SqlError(f"{name} takes an argument", call)
    maker = _AGGREGATES.get(name)
    if maker is None:
        raise SqlError(f"the aggregate {name} is not supported{_instead(name)}", call)
    kinds, kind, make = maker
    if len(given) > 1 and name not in ("COUNT", "GROUPCONCAT"):
        raise SqlError(f"{name} takes one argument, not {len(given)}", call)
    if kinds and not of.type.may_be(*kinds):
        expected = "a number" if kinds == NUMERIC else kinds[0]
        raise SqlError(f"{name} takes {expected}, not {of.type}: write a CAST", call)
    kind = of.type if kind is None or (of.type == DECIMAL and kind == FLOAT) else kind
    return make(_Call(name, of, where, is_distinct, given[1:], kind, call))


def _tuple(*values: Any) -> tuple[Any, ...]:
    return values


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of an aggregate function during compilation. `of` is its first argument, `where` its
    FILTER, and `others` are its further arguments.
    """

    name: str
    of: Scalar
    where: Expr[Any] | None
    is_distinct: bool
    others: list[exp.Expr]
    type: SqlType
    node: exp.Expr

    @property
    def present(self) -> Expr[Any] | None:
        """Condition for including a row: its value is not NULL, and FILTER is true. None includes
        all rows.
        """
        if not self.of.nullable:
            return self.where
        present: Expr[Any] = Unary("~", self.of.expression.is_null())
        return present if self.where is None else Binary("&", present, self.where)

    @property
    def may_be_empty(self) -> bool:
        return self.of.nullable or self.where is not None

    def values(self) -> AggregateFunction[Any, Any, Any]:
        """Returns the aggregate that collects the values, without NULLs."""
        if self.is_distinct:
            return Distinct(self.of.expression, self.where)
        return af.collect(self.of.expression, where=self.present)


def of_part(
    part: AggregateFunction[Any, Any, Any],
    kind: SqlType,
    nullable: bool,
    finish: Callable[[Expr[Any]], Expr[Any]] | None = None,
) -> Aggregate:
    """Returns an aggregate with a single part. `finish` computes the aggregate's value from the
    result of the part. None means that the value is this result.
    """
    result: Expr[Any] = Column(repr(part))
    return Aggregate(kind, nullable, {repr(part): part}, finish(result) if finish else result)


def _count(call: _Call) -> Aggregate:
    if call.is_distinct:
        return of_part(af.distinct(call.of.expression, where=call.where), INTEGER, False)
    return of_part(af.count(where=call.present), INTEGER, False)


def _count_if(call: _Call) -> Aggregate:
    met = call.of.expression
    where = met if call.where is None else Binary("&", met, call.where)
    return of_part(af.count(where=where), INTEGER, False)


def _sum(call: _Call) -> Aggregate:
    if call.is_distinct:
        return _finished(call, partial(reduce, v.total))
    add: Any = DecimalSum if call.of.type == DECIMAL else af.sum
    total: Any = add(call.of.expression, where=call.where)
    if not call.may_be_empty:
        return of_part(total, call.type, False)
    count: Any = af.count(where=call.present)
    is_there: Expr[Any] = Binary(">", Column(repr(count)), Literal(0))
    value: Expr[Any] = Case(((is_there, Column(repr(total))),), Literal(None))
    return Aggregate(call.type, True, {repr(total): total, repr(count): count}, value)


def _mean(call: _Call) -> Aggregate:
    if call.is_distinct:
        return _finished(call, v.mean)
    return _direct(DecimalMean if call.of.type == DECIMAL else af.mean)(call)


def _direct(aggregate: Callable[..., Any]) -> Callable[[_Call], Aggregate]:
    """Returns the function that compiles calls of `aggregate`. The aggregate itself must skip None,
    and return None if there is no value.
    """

    def make(call: _Call) -> Aggregate:
        part = aggregate(call.of.expression, where=call.where)
        return of_part(part, call.type, call.may_be_empty)

    return make


def _present(aggregate: Callable[..., Any]) -> Callable[[_Call], Aggregate]:
    """Returns the function that compiles calls of `aggregate`. The aggregate itself does not skip
    None, so the call excludes None with `where=`.
    """

    def make(call: _Call) -> Aggregate:
        part = aggregate(call.of.expression, where=call.present)
        return of_part(part, call.type, call.may_be_empty)

    return make


def _every(aggregate: Callable[..., Any]) -> Callable[[_Call], Aggregate]:
    def make(call: _Call) -> Aggregate:
        part = aggregate(call.of.expression.cast(int), where=call.where)
        return of_part(part, BOOLEAN, call.may_be_empty, lambda x: Binary("==", x, Literal(1)))

    return make


def _spread(sample: bool, root: bool) -> Callable[[_Call], Aggregate]:
    def make(call: _Call) -> Aggregate:
        if call.is_distinct:
            raise SqlError(f"{call.name}(DISTINCT ...) is not supported", call.node)
        name = "stddev" if root else "variance"
        finish = partial(spread, sample=sample, root=root)
        part = Moments(call.of.expression, call.where)
        return of_part(part, FLOAT, True, lambda x: v.apply(finish, x, name=name, gives_none=True))

    return make


def _finished(call: _Call, finish: Callable[[list[Any]], Any]) -> Aggregate:
    """Returns the aggregate that applies `finish` to the list of values. Its value is None if the
    list is empty.
    """
    function = partial(_unless_empty, finish)
    name = call.name.lower()
    return of_part(
        call.values(),
        call.type,
        call.may_be_empty,
        lambda x: v.apply(function, x, name=name, gives_none=True),
    )


def _unless_empty(finish: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    return finish(values) if values else None


def _array(call: _Call) -> Aggregate:
    part: Any = call.values()
    if not call.is_distinct:  # Unlike all other aggregates, it keeps NULLs.
        part = af.collect(call.of.expression, where=call.where)
    function = partial(_unless_empty, list)
    return of_part(
        part,
        array_of(call.of.type),
        call.where is not None,
        lambda x: v.apply(function, x, name="array", gives_none=True),
    )


def _joined(call: _Call) -> Aggregate:
    separator = call.others[0] if call.others else exp.Literal.string(",")
    if not isinstance(separator, exp.Literal):
        raise SqlError(f"the separator of {call.name} must be a literal", call.node)
    return _finished(call, separator.name.join)


_Maker = tuple[tuple[SqlType, ...], SqlType | None, Callable[[_Call], Aggregate]]

_AGGREGATES: dict[str, _Maker] = {
    "COUNT": ((), INTEGER, _count),
    "COUNTIF": ((BOOLEAN,), INTEGER, _count_if),
    "SUM": (NUMERIC, None, _sum),
    "AVG": (NUMERIC, FLOAT, _mean),
    "MIN": ((), None, _direct(af.min)),
    "MAX": ((), None, _direct(af.max)),
    "FIRSTVALUE": ((), None, _present(af.first)),
    "LASTVALUE": ((), None, _present(af.last)),
    "ANYVALUE": ((), None, _present(af.first)),
    "LOGICALAND": ((BOOLEAN,), None, _every(af.min)),
    "LOGICALOR": ((BOOLEAN,), None, _every(af.max)),
    "STDDEV": (NUMERIC, FLOAT, _spread(sample=True, root=True)),
    "STDDEVSAMP": (NUMERIC, FLOAT, _spread(sample=True, root=True)),
    "STDDEVPOP": (NUMERIC, FLOAT, _spread(sample=False, root=True)),
    "VARIANCE": (NUMERIC, FLOAT, _spread(sample=True, root=False)),
    "VARIANCEPOP": (NUMERIC, FLOAT, _spread(sample=False, root=False)),
    "MEDIAN": (NUMERIC, FLOAT, lambda call: _finished(call, v.median)),
    "ARRAYAGG": ((), None, _array),
    "GROUPCONCAT": ((STRING,), None, _joined),
}
"""Maps the name of an aggregate to the accepted types of the argument, the type of the result, and
the function that compiles a call.
"""

_ANONYMOUS = {"LISTAGG": "GROUPCONCAT", "EVERY": "LOGICALAND", "FIRST": "FIRSTVALUE"}


def _instead(name: str) -> str:
    if name.startswith("APPROX"):
        return ": write COUNT(DISTINCT x)"
    return ": write an aggregate of Python after the query"
