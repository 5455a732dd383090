"""The functions with which expressions begin: `col` names a field, `left` and `right` name a field
of one side of a pair, `lit` makes a constant, and `when` begins a case.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aioflow.expressions.nodes import Column, Expr, Field, Part, When, as_expression, field_name

__all__ = ["col", "left", "lit", "right", "when"]


class _Columns(Part):
    """The type of `col`.

    A field is written `col.price` or `col("any name")`, a nested field `col["user"]["id"]`, and an
    item of a tuple `col[0]`.
    """

    __slots__ = ()

    def __call__(self, name: str | int) -> Expr[Any]:
        return Column(field_name(name))

    def __getitem__(self, name: str | int) -> Expr[Any]:
        return Column(field_name(name))

    def __getattr__(self, name: str) -> Expr[Any]:
        if name.startswith("__") and name.endswith("__"):
            # Copying and introspection ask for these; col("__name__") still reads such a field.
            raise AttributeError(name)
        return Column(name)

    def __repr__(self) -> str:
        return "col"

    def __reduce__(self) -> str:
        return "col"

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("col cannot be iterated: name a field, col.price or col('any name')")


col = _Columns()
"""Names a field of the element: `col.price`, `col("any name")`."""


class _Side(Part):
    """The type of `left` and `right`: `left.price` is `col.left["price"]`."""

    __slots__ = ("_side",)

    def __init__(self, side: str) -> None:
        self._side = side

    def __call__(self, name: str | int) -> Expr[Any]:
        return Field(Column(self._side), field_name(name))

    def __getitem__(self, name: str | int) -> Expr[Any]:
        return self(name)

    def __getattr__(self, name: str) -> Expr[Any]:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self(name)

    def __repr__(self) -> str:
        return self._side

    def __reduce__(self) -> str:
        return self._side

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            f"{self._side} cannot be iterated: name a field, {self._side}.price or "
            f"{self._side}('any name')"
        )


left = _Side("left")
"""Names a field of the left side of a pair: `left.price`, `left("any name")`."""

right = _Side("right")
"""Names a field of the right side of a pair."""


def lit(value: Any) -> Expr[Any]:
    """Returns a constant as an expression. Needed only if no other operand is an expression."""
    return as_expression(value)


def when(condition: Any) -> When:
    """Begins a case: `when(c).then(a).when(d).then(b).otherwise(e)`.

    A condition that is None counts as false.
    """
    return When(as_expression(condition))
