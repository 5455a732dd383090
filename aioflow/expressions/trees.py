"""Further nodes of expressions, which users do not write, and functions that examine a tree. They
find its nodes, the fields that it reads, whether it equals another tree, and whether it always
gives a bool.

An `Operation` is a pure function for rows, which may have a second form for arrays. Code for rows
calls the function once for each value. Code for columns calls it once for each distinct text, so a
slow function costs little. A `Composite` is only a key of `key_by`, never a part of another
expression.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
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
    T,
    Unary,
)

__all__ = ["Apply", "Composite", "Operation", "column_names", "is_boolean", "same_as", "walk"]

_PRIMARY = 8  # Precedence of calls.


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A pure function of plain values.

    If an operand is None, `function` is not called and the result is None, unless `takes_none` is
    set.
    """

    name: str
    function: Callable[..., Any]
    source: str | None = None
    """Python source of the same computation. `{0}` and `{1}` stand for the operands, and `{f}` for
    the function that handles rare cases.
    """
    arrays: Callable[..., Any] | None = None
    """Function for the same computation on arrays, which gets a `columns.numbers.Number` for each
    operand. It returns a column, or None if arrays could give other results than `function`.
    """
    takes_none: bool = False
    gives_none: bool = False
    """Whether the result may be None although no operand is None."""
    gives_bool: bool = False


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Apply(Expr[T]):
    """An expression that applies an operation to the values of its operands."""

    _operation: Operation
    _operands: tuple[Expr[Any], ...]

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return self._operands

    def _render(self) -> tuple[str, int]:
        shown = (repr(e._value if isinstance(e, Literal) else e) for e in self._operands)
        return f"{self._operation.name}({', '.join(shown)})", _PRIMARY


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Composite(Expr[T]):
    """A tuple of the values of several expressions (`_parts`). Each value may be None."""

    _parts: tuple[Expr[Any], ...]

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return self._parts

    def __repr__(self) -> str:
        return repr(self._parts)


def walk(expression: Expr[Any]) -> Iterator[Expr[Any]]:
    """Yields the expression and all its parts, parents first."""
    yield expression
    for child in expression._children:
        yield from walk(child)


def same_as(a: Expr[Any], b: object) -> bool:
    """Returns whether two trees are equal: they have the same nodes, and the same literals of the
    same types. `==` cannot be used, because it builds an expression.
    """
    if type(a) is not type(b):
        return False
    names = [f.name for f in fields(a)]  # type: ignore[arg-type]
    return all(_same(getattr(a, name), getattr(b, name)) for name in names)


def column_names(*expressions: Expr[Any]) -> tuple[str | int, ...]:
    """Returns the names of the fields that the expressions read. Each name occurs once, in the
    order of first use.
    """
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
