"""Explains the error that an expression raised for a row, such as a missing field or text for a
number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from aioflow.core.functions import Pair
from aioflow.expressions.nodes import (
    LOGICAL,
    Binary,
    Call,
    Column,
    Expr,
    Field,
    Literal,
)
from aioflow.expressions.source import RowKind
from aioflow.expressions.trees import column_names, walk
from aioflow.expressions.values import MissingFieldError, field_names, missing

__all__ = ["CONTAINERS", "ROW_ERRORS", "explain", "note_text"]

ROW_ERRORS = (TypeError, AttributeError, LookupError)
"""Errors that generated code raises for a row of the other kind, or without the field."""

CONTAINERS = frozenset({dict, list, tuple, str})
"""Plain values that have no fields to be read by attribute."""

_SIDES = ("left", "right")


def explain(row: Any, kind: RowKind, error: Exception, expressions: tuple[Expr[Any], ...]) -> None:
    """Raises MissingFieldError if `row` lacks a field of the expressions.

    Otherwise adds a note about numbers and text to `error`.
    """
    if isinstance(error, MissingFieldError):
        for expression in expressions:
            if any(isinstance(e, Field) for e in walk(expression)):
                raise MissingFieldError(f"{error}; read by the expression {expression!r}") from None
    for expression in expressions:
        for name in column_names(expression):
            try:
                if kind is RowKind.MAPPING or isinstance(name, int):
                    row[name]
                elif type(row) in CONTAINERS:
                    raise AttributeError
                else:
                    getattr(row, name)
            except ROW_ERRORS:
                said = f"{missing(name, row)}{_of_a_pair(name, row, expression)}"
                raise MissingFieldError(f"{said}; read by the expression {expression!r}") from None
    if isinstance(error, (TypeError, AttributeError)):
        note_text(error, row, *expressions)


def _of_a_pair(name: str | int, row: Any, expression: Expr[Any]) -> str:
    """Returns an addition to the message that `row` has no field `name`, or "".

    If `row` is a pair, the addition names the sides that have the field. If `expression` reads a
    side of a row that is no pair, the addition says so.
    """
    if isinstance(row, Pair):
        having = [
            _of_side(side, name) for side in _SIDES if name in field_names(getattr(row, side))
        ]
        return f": write {' or '.join(having)}" if having else ""
    for e in walk(expression):
        if (
            isinstance(e, Field)
            and isinstance(e._operand, Column)
            and e._operand._name == name
            and name in _SIDES
        ):
            own = f"; write af.{Column(e._name)!r}" if e._name in field_names(row) else ""
            return f": af.{name} is for the pairs of a join{own}"
    return ""


def _of_side(side: str, name: str | int) -> str:
    return (
        f"af.{side}.{name}"
        if isinstance(name, str) and name.isidentifier()
        else f"af.{side}({name!r})"
    )


def note_text(error: BaseException, row: Any, *expressions: Expr[Any]) -> None:
    """Adds a note to `error`, which `expressions` raised for `row`, if text and number are mixed
    up.

    The note says that a field is text where a number is needed, or the reverse. For an expression
    that is only a field, a number is needed.
    """
    call = next(_no_texts(row, expressions), None)
    if call is not None:
        e, name = call._operand, call._name
        error.add_note(
            f"{e!r} is {type(_field(row, e)).__name__}, and .{name} reads text: write "
            f"{e!r}.cast(str).{name}(...)"
        )
    elif not isinstance(error, TypeError) or "str" not in str(error):
        return
    elif (joined := next(_joined(row, expressions), None)) is not None:
        plain, other = joined
        write = (
            f"{str(other._value)!r} for {other._value}"
            if isinstance(other, Literal)
            else f"{other!r}.cast(str) for {other!r}"
        )
        error.add_note(f"{plain!r} is text, and + joins texts: write {write}")
    elif (text := next(_texts(row, expressions), None)) is not None:
        remedy = (
            f"{text!r}.cast(int) or .cast(float) makes a number of it; of CSV files type= does so "
            "for all fields"
        )
        error.add_note(f"{text!r} is text: {remedy}")


def _texts(row: Any, expressions: Sequence[Expr[Any]]) -> Iterator[Column[Any]]:
    for expression in expressions:
        if isinstance(expression, Column) and _is_text(row, expression):
            yield expression
        for e in walk(expression):
            if isinstance(e, Binary) and e._operator not in LOGICAL:
                for one, other in ((e._left, e._right), (e._right, e._left)):
                    joins = e._operator == "+" and _spells_no_number(_value(row, one))
                    if (
                        isinstance(one, Column)
                        and _is_text(row, one)
                        and not _is_text(row, other)
                        and not joins
                    ):
                        yield one


def _joined(row: Any, expressions: Sequence[Expr[Any]]) -> Iterator[tuple[Expr[Any], Expr[Any]]]:
    """Yields the two operands of each sum of a number and a text that is not numeric."""
    for expression in expressions:
        for e in walk(expression):
            if isinstance(e, Binary) and e._operator == "+":
                for one, other in ((e._left, e._right), (e._right, e._left)):
                    if _spells_no_number(_value(row, one)) and isinstance(
                        _value(row, other), (int, float, Decimal)
                    ):
                        yield one, other


def _spells_no_number(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return True
    return False


def _no_texts(row: Any, expressions: Sequence[Expr[Any]]) -> Iterator[Call[Any]]:
    """Yields the operations on text whose operand is a field that contains a number."""
    for expression in expressions:
        for e in walk(expression):
            if (
                isinstance(e, Call)
                and e._name.startswith("str.")
                and isinstance(_field(row, e._operand), (int, float, Decimal))
            ):
                yield e


def _field(row: Any, e: Expr[Any]) -> Any:
    """Returns the value of the field `e` in `row`; None if `e` is no field, or is missing."""
    if not isinstance(e, Column):
        return None
    try:
        return (
            row[e._name]
            if isinstance(row, dict) or isinstance(e._name, int)
            else getattr(row, e._name)
        )
    except (LookupError, AttributeError, TypeError):
        return None


def _value(row: Any, e: Expr[Any]) -> Any:
    """Returns the constant `e`, or the value of the field `e` in `row`."""
    return e._value if isinstance(e, Literal) else _field(row, e)


def _is_text(row: Any, e: Expr[Any]) -> bool:
    return isinstance(_value(row, e), str)
