"""A compiled expression with its type, and its conversion to another type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from sqlglot import exp

from aioflow.expressions.nodes import Binary, Expr, Literal
from aioflow.expressions.rows import compile_row
from aioflow.sql import values as v
from aioflow.sql.errors import SqlError
from aioflow.sql.types import (
    ANY,
    BOOLEAN,
    BYTES,
    DATE,
    DECIMAL,
    FLOAT,
    INTEGER,
    NULL,
    NUMERIC,
    STRING,
    TIMESTAMP,
    SqlType,
    unify,
)

__all__ = ["Scalar", "cast", "common_type", "folded", "literal", "widened"]


@dataclass(frozen=True, slots=True)
class Scalar:
    """A compiled expression: `expression` reads the dict of a row by the keys of its fields."""

    type: SqlType
    nullable: bool
    expression: Expr[Any]

    @property
    def function(self) -> Callable[[Mapping[str, Any]], Any]:
        """The same computation as a function of a row."""
        return compile_row(self.expression)

    @property
    def constant(self) -> Any:
        """The value of the expression if it is a literal, else None."""
        return self.expression._value if isinstance(self.expression, Literal) else None


def literal(kind: SqlType, value: Any) -> Scalar:
    return Scalar(kind, value is None, Literal(value))


def common_type(kinds: Sequence[SqlType]) -> SqlType | None:
    """Returns the type to which values of all `kinds` can be converted, or None."""
    found: SqlType | None = NULL
    for kind in kinds:
        found = found and unify(found, kind)
    return found


def widened(given: Scalar, kind: SqlType) -> Expr[Any]:
    """Returns the expression of a number, converted to the numeric type `kind`. This type must be
    at least as wide as the number's own type.
    """
    if given.type == kind or given.type in (NULL, ANY) or kind not in (FLOAT, DECIMAL):
        return given.expression
    if given.constant is not None:
        return Literal(float(given.constant) if kind == FLOAT else Decimal(given.constant))
    if kind == FLOAT:
        return given.expression.cast(float)
    return v.apply(v.to_decimal, given.expression, True)


def cast(given: Scalar, to: SqlType, strict: bool, node: exp.Expr) -> Scalar:
    x, source, null = given.expression, given.type, given.nullable
    if source == NULL:
        return Scalar(to, True, Literal(None))
    if to == ANY or (source == to and to.scale is None):
        return Scalar(to, null, x)
    scalar = (*NUMERIC, BOOLEAN, STRING, ANY)
    made: Expr[Any] | None = None
    match to.name:
        case "BOOLEAN" if source in NUMERIC:
            made = Binary("!=", x, Literal(0))
        case "BOOLEAN" | "FLOAT" if source in scalar:
            made = x.cast(bool if to == BOOLEAN else float, strict)
        case "INTEGER" if source == FLOAT:
            made = v.apply(v.round_even, x) if strict else v.apply(v.to_integer, x, strict)
        case "INTEGER" if source in (BOOLEAN, STRING):
            made = x.cast(int, strict)
        case "INTEGER" if source in scalar:
            made = v.apply(v.to_integer, x, strict)
        case "DECIMAL" if source in scalar:
            made = v.apply(v.to_decimal, x, strict, *([] if to.scale is None else [to.scale]))
        case "STRING" if source in (INTEGER, FLOAT):
            made = x.cast(str)
        case "STRING" if source in (*scalar, BYTES):
            made = v.apply(v.text_of, x)
        case "STRING" if source in (TIMESTAMP, DATE):
            made = v.apply(v.time_text if source == TIMESTAMP else v.date_text, x)
        case "BYTES" if source == STRING:
            made = v.apply(str.encode, x, name="encode")
        case "TIMESTAMP" | "DATE" if source in (STRING, TIMESTAMP, DATE, ANY):
            made = v.apply(v.to_time, x, strict) if source in (STRING, ANY) else x
            made = made.dt.truncate("1d") if to == DATE and source != DATE else made
        case _ if source == ANY or unify(source, to) == to:
            made = x
    if made is None:
        way = (
            ": write UNIX_TIMESTAMP(t), or TO_TIMESTAMP_LTZ(x, 3)"
            if {source, to} & {TIMESTAMP, DATE} and {source, to} & set(NUMERIC)
            else ""
        )
        raise SqlError(f"there is no cast from {source} to {to}{way}", node)
    return Scalar(to, null or not strict, made)


def folded(made: Scalar) -> Scalar:
    """Returns `made`. If it is an operation on literals, returns a literal with its value."""
    children = made.expression._children
    if not children or not all(isinstance(child, Literal) for child in children):
        return made
    try:
        found = made.function({})
    except (ValueError, ArithmeticError):
        return made  # Fail only when a row needs the value.
    return Scalar(made.type, found is None, Literal(found))
