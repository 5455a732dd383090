"""Hints for errors about expressions: the correct spelling. Imported at the first error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from aioflow.core.errors import did_you_mean
from aioflow.core.expression_namespaces import DtNamespace, StrNamespace
from aioflow.core.expression_trees import walk
from aioflow.core.expression_values import field_names
from aioflow.core.expressions import (
    COMPARISONS,
    LOGICAL,
    Binary,
    Call,
    Column,
    Expr,
    Field,
    Literal,
    Unary,
)
from aioflow.core.functions import Pair

__all__ = [
    "always_none",
    "no_attribute",
    "no_operation",
    "no_truth",
    "no_value",
    "no_values",
    "note_text",
    "of_a_pair",
]

METHODS = ("is_in", "is_null", "fill_null", "cast", "round", "abs", "str", "dt")
TEXT = tuple(name for name in vars(StrNamespace) if not name.startswith("_"))
TIME = tuple(name for name in vars(DtNamespace) if not name.startswith("_"))

SIDES = ("left", "right")

AGGREGATES = (
    "count",
    "sum",
    "min",
    "max",
    "mean",
    "collect",
    "top",
    "min_by",
    "max_by",
    "first",
    "last",
    "distinct",
)
"""Names of aggregates of many elements; an expression has one element."""

ELSEWHERE = {
    "astype": "cast(type)",
    "between": "is_in(values), or two comparisons with &",
    "coalesce": "fill_null(value)",
    "endswith": "str.ends_with(text)",
    "isna": "is_null()",
    "startswith": "str.starts_with(text)",
}
"""Names of methods of texts and of other libraries -> the spelling here."""


def no_truth(e: Expr[Any]) -> str:
    """Returns why `e` has no truth value, and the correct spelling of a condition."""
    text = (
        "an expression has no truth value: use & | ~ instead of and, or, not, is_in instead of "
        "`in`, when(...) instead of `if`"
    )
    if isinstance(e, Binary) and e._operator in COMPARISONS:
        for side in (e._right, e._left):
            if isinstance(side, Binary) and side._operator in LOGICAL:
                # `x > 1 & y < 5` is the chain x > (1 & y) < 5.
                first: Expr[Any] = Binary(
                    e._operator,
                    *((e._left, side._left) if side is e._right else (side._left, e._right)),
                )
                apart = f"({first!r}) {side._operator} ({_operand(side._right)} < 5)"
                return (
                    f"{text}; {side._operator} binds tighter than {e._operator}, so write each "
                    f"comparison in parentheses, like {apart}"
                )
        # Python has turned `1 < x` round to `x > 1`; of `y < x` the middle of the chain is on the
        # right.
        middle = e._left if isinstance(e._right, Literal) else e._right
        text += (
            f"; a chain like 1 < {middle!r} < 5 is two comparisons, ({middle!r} > 1) & "
            f"({middle!r} < 5)"
        )
    return text


def no_attribute(e: Expr[Any], name: str) -> str:
    """Returns the replacement for the attribute `name`, which expressions do not have."""
    shown = _operand(e)
    wrong, nested = (
        f"an expression has no method {name!r}",
        f"; if it is a nested field write {shown}[{name!r}]",
    )
    if name in TEXT:
        return f"{wrong}; for text write {shown}.str.{name}(...){nested}"
    if name in TIME:
        return f"{wrong}; for a time write {shown}.dt.{name}{nested}"
    if name in AGGREGATES:
        return f"{wrong}, it is of one element; for many write aggregate(af.{name}({e!r})){nested}"
    near = (
        f"; did you mean {shown}.{ELSEWHERE[name]}?"
        if name in ELSEWHERE
        else did_you_mean(name, METHODS, f"{shown}.{{}}")
    )
    return f"{wrong}{near}{nested}"


def no_operation(namespace: StrNamespace | DtNamespace, name: str) -> str:
    """Returns the operations of a namespace that has no operation `name`."""
    prefix, known = (".str", TEXT) if isinstance(namespace, StrNamespace) else (".dt", TIME)
    return (
        f"{prefix} has no operation {name!r}{did_you_mean(name, known, prefix + '.{}')}; it has "
        f"{', '.join(known)}"
    )


def no_value(e: Expr[Any], asked: str, method: str) -> str:
    """Returns why `e` cannot be `asked`, and the method that converts each value."""
    return (
        f"{asked} of {e!r}: an expression stands for a value of each element, not known here; "
        f"write {_operand(e)}.{method}"
    )


def no_values(e: Expr[Any], values: Sequence[Any]) -> str:
    """Returns why expressions are no values of `is_in`, and how `e` is compared with them."""
    shown = _operand(e)
    ways = (
        " | ".join(f"({shown} == {value!r})" for value in values if isinstance(value, Expr))
        or f"({shown} == col.other)"
    )
    return (
        "is_in expects plain values, known when the flow is built; to compare with other fields "
        f"write {ways}"
    )


def always_none(e: Expr[Any], operator: str) -> str:
    """Returns the warning about `e == None` and `e != None`."""
    shown = _operand(e)
    wanted = f"{shown}.is_null()" if operator == "==" else f"~{shown}.is_null()"
    return (
        f"{shown} {operator} None is None for every element, as any operation on None, so a "
        f"filter drops them all: write {wanted}"
    )


def of_a_pair(name: str | int, row: Any, expression: Expr[Any]) -> str:
    """Returns the end of a message that `row` has no field `name`, or "".

    If `row` is a pair, it names the sides that have the field. If `expression` reads a side of a
    row that is no pair, it says so.
    """
    if isinstance(row, Pair):
        having = [_of_side(side, name) for side in SIDES if name in field_names(getattr(row, side))]
        return f": write {' or '.join(having)}" if having else ""
    for e in walk(expression):
        if (
            isinstance(e, Field)
            and isinstance(e._operand, Column)
            and e._operand._name == name
            and name in SIDES
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
    """Yields both sides of each sum of a number and a text that is not numeric."""
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
    """Yields operations on text whose operand is a field that holds a number."""
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


def _operand(e: Expr[Any]) -> str:
    """Returns `e` as it is written before a method or an operator."""
    return f"({e!r})" if isinstance(e, (Binary, Unary)) else repr(e)
