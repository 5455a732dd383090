"""Two further expressions beside those of `nodes`: an added operation, and a key of several parts.

An `Operation` is a pure function for rows, with a second form for arrays if there is one. Rows call
the function once for each value, columns once for each distinct text, so a slow function costs
little on columns. A `Composite` stands in `key_by` alone, never in another expression.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aioflow.expressions.nodes import Expr, Literal, T

__all__ = ["Apply", "Composite", "Operation"]

_PRIMARY = 8  # As all calls.


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A pure function of plain values.

    Its result is None if an operand is None, and then `function` is not called, unless
    `takes_none`.
    """

    name: str
    function: Callable[..., Any]
    source: str | None = None
    """Python source of the same computation. `{0}` and `{1}` stand for the operands, and `{f}` for
    the function that handles rare cases.
    """
    arrays: Callable[..., Any] | None = None
    """The same computation on a `columns.numbers.Number` for each operand. Its result is a column,
    or None where arrays would not give what `function` gives.
    """
    takes_none: bool = False
    gives_none: bool = False
    """Whether the result may be None although no operand is."""
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
