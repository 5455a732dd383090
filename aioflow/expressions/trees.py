"""Functions that examine expressions: the nodes of a tree, equality of two trees, the fields that a
tree reads, and whether it always gives a bool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from aioflow.expressions.nodes import (
    BOOLEAN_CALLS,
    COMPARISONS,
    LOGICAL,
    Binary,
    Call,
    Case,
    Cast,
    Column,
    Expr,
    FillNull,
    IsIn,
    IsNull,
    Literal,
    Unary,
)
from aioflow.expressions.operations import Apply

__all__ = ["column_names", "is_boolean", "same_as", "walk"]


def walk(expression: Expr[Any]) -> Iterator[Expr[Any]]:
    """Yields the expression and all its parts, parents first."""
    yield expression
    for child in expression._children:
        yield from walk(child)


def same_as(a: Expr[Any], b: object) -> bool:
    """Returns whether two trees are equal: same nodes, same literals of the same types.

    (`==` builds an expression.)
    """
    if type(a) is not type(b):
        return False
    names = [f.name for f in fields(a)]  # type: ignore[arg-type]
    return all(_same(getattr(a, name), getattr(b, name)) for name in names)


def column_names(*expressions: Expr[Any]) -> tuple[str | int, ...]:
    """Returns the fields that the expressions read, each once, in the order of first use."""
    return tuple(
        dict.fromkeys(e._name for x in expressions for e in walk(x) if isinstance(e, Column))
    )


def is_boolean(expression: Expr[Any]) -> bool:
    """Returns whether the value of the expression can only be True, False or None.

    A bare column may hold anything.
    """
    match expression:
        case Binary(_operator=operator):
            return operator in COMPARISONS or operator in LOGICAL
        case Unary(_operator=operator):
            return operator == "~"
        case IsNull() | IsIn():
            return True
        case Cast(_to=to):
            return to is bool
        case Literal(_value=value):
            return value is None or isinstance(value, bool)
        case Call(_name=name):
            return name in BOOLEAN_CALLS
        case Apply(_operation=operation):
            return operation.gives_bool
        case FillNull(_operand=operand, _value=value):
            return is_boolean(operand) and is_boolean(value)
        case Case(_branches=branches, _default=default):
            return all(is_boolean(value) for _, value in branches) and is_boolean(default)
    return False


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Expr):
        return same_as(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float):
        # Distinguishes 0.0 from -0.0, and treats NaN as the same literal as NaN.
        return repr(a) == repr(b)
    return bool(a == b)
