"""Renders an expression as the source text that builds it, for `repr`, with no more parentheses
than necessary.
"""

from __future__ import annotations

import keyword
from typing import Any

from aioflow.core.expressions import (
    COMPARISONS,
    Binary,
    Call,
    Case,
    Cast,
    Column,
    Expr,
    Field,
    FillNull,
    IsIn,
    IsNull,
    Literal,
    Round,
    Then,
    Unary,
)

__all__ = ["render"]

_PRECEDENCE = {"==": 1, "!=": 1, "<": 1, "<=": 1, ">": 1, ">=": 1, "|": 2, "&": 3, "+": 4, "-": 4}
_PRECEDENCE |= {"*": 5, "/": 5, "//": 5, "%": 5}
_UNARY_PRECEDENCE = 6
_POWER_PRECEDENCE = 7
_PRECEDENCE["**"] = _POWER_PRECEDENCE
_PRIMARY = 8


def render(e: Expr[Any]) -> str:
    """Returns the source text of `e`."""
    return _render(e)[0]


def _render(e: Expr[Any]) -> tuple[str, int]:
    """Returns the source text of `e`, and the precedence of its outermost operator."""
    match e:
        case Column(_name=name):
            plain = isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)
            if plain and not str(name).startswith("__"):
                return f"col.{name}", _PRIMARY
            return f"col({name!r})", _PRIMARY
        case Literal(_value=value):
            return f"lit({_constant(value)})", _PRIMARY
        case Unary(_operator="abs", _operand=operand):
            return f"{_receiver(operand)}.abs()", _PRIMARY
        case Unary(_operator=operator, _operand=operand):
            return f"{operator}{_wrap(operand, _UNARY_PRECEDENCE)}", _UNARY_PRECEDENCE
        case Binary(_operator=operator, _left=left, _right=right):
            return _render_binary(operator, left, right)
        case Field(_operand=operand, _name=name):
            return f"{_receiver(operand)}[{name!r}]", _PRIMARY
        case IsNull(_operand=operand):
            return f"{_receiver(operand)}.is_null()", _PRIMARY
        case FillNull(_operand=operand, _value=value):
            return f"{_receiver(operand)}.fill_null({_argument(value)})", _PRIMARY
        case IsIn(_operand=operand, _values=values):
            return f"{_receiver(operand)}.is_in([{', '.join(map(_constant, values))}])", _PRIMARY
        case Cast(_operand=operand, _to=to, _strict=strict):
            return (
                f"{_receiver(operand)}.cast({to.__name__}{'' if strict else ', strict=False'})",
                _PRIMARY,
            )
        case Round(_operand=operand, _digits=digits):
            return f"{_receiver(operand)}.round({digits or ''})", _PRIMARY
        case Call(_name=name, _operand=operand, _arguments=arguments):
            if name == "dt.truncate":
                return f"{_receiver(operand)}.dt.truncate('{arguments[0]}ms')", _PRIMARY
            shown = list(arguments)
            while shown and shown[-1] is None:
                shown.pop()
            return f"{_receiver(operand)}.{name}({', '.join(map(_argument, shown))})", _PRIMARY
        case Case(_branches=branches, _default=default):
            text = "".join(
                f".when({_argument(c)}).then({_argument(v)})" for c, v in branches
            ).removeprefix(".")
            return (
                text if isinstance(e, Then) else f"{text}.otherwise({_argument(default)})"
            ), _PRIMARY
    return f"{type(e).__name__}({', '.join(map(repr, e._children))})", _PRIMARY


def _render_binary(operator: str, left: Expr[Any], right: Expr[Any]) -> tuple[str, int]:
    strength = _PRECEDENCE[operator]
    # Comparisons do not chain and ** binds to the right: both need their left side tighter than
    # themselves.
    left_strength = strength + 1 if strength in (1, _POWER_PRECEDENCE) else strength
    right_strength = strength if operator == "**" else strength + 1
    plain = isinstance(left, Literal) is not isinstance(
        right, Literal
    )  # One side must stay an expression.
    # A constant that stands left of a comparison would come back mirrored: 1 < col.x is col.x > 1.
    # And text % x is Python's own formatting.
    left_plain = plain and operator not in COMPARISONS and operator != "%"
    left_text = _wrap(left, left_strength, plain=left_plain)
    return f"{left_text} {operator} {_wrap(right, right_strength, plain=plain)}", strength


def _wrap(e: Expr[Any], strength: int, plain: bool = False) -> str:
    if plain and isinstance(e, Literal):
        text = _constant(e._value)
        return f"({text})" if text.startswith("-") else text
    text, own = _render(e)
    return text if own >= strength else f"({text})"


def _receiver(e: Expr[Any]) -> str:
    return _wrap(e, _PRIMARY)


def _argument(value: Any) -> str:
    if isinstance(value, Literal):
        return _constant(value._value)
    return repr(value) if isinstance(value, Expr) else _constant(value)


def _constant(value: Any) -> str:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f"float({str(value)!r})"
    return repr(value)
