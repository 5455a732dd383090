"""Where expressions begin: `col` names a field, `lit` is a constant, `when` asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aioflow.core.expressions import Column, Expr, Part, When, as_expression, field_name

__all__ = ["col", "lit", "when"]


class _Columns(Part):
    """`col`: `col.price`, `col("any name")`, `col["user"]["id"]`, and `col[0]` for elements that are tuples."""

    __slots__ = ()

    def __call__(self, name: str | int) -> Expr[Any]:
        return Column(field_name(name))

    def __getitem__(self, name: str | int) -> Expr[Any]:
        return Column(field_name(name))

    def __getattr__(self, name: str) -> Expr[Any]:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # Copying and introspection ask for these; col("__name__") still reads such a field.
        return Column(name)

    def __repr__(self) -> str:
        return "col"

    def __reduce__(self) -> str:
        return "col"

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("col cannot be iterated: name a field, col.price or col('any name')")


col = _Columns()
"""Names a field of the element: `col.price`, `col("any name")`."""


def lit(value: Any) -> Expr[Any]:
    """A constant. Needed only where no other operand is an expression."""
    return as_expression(value)


def when(condition: Any) -> When:
    """`when(c).then(a).when(d).then(b).otherwise(e)`. A condition that is None is not true."""
    return When(as_expression(condition))
