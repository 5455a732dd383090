"""The expression of a key of several parts. It stands in `key_by` alone, never in another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aioflow.expressions.nodes import Expr, T

__all__ = ["Composite"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Composite(Expr[T]):
    """A tuple of the values of `_parts`, each of which may be None."""

    _parts: tuple[Expr[Any], ...]

    @property
    def _children(self) -> tuple[Expr[Any], ...]:
        return self._parts

    def __repr__(self) -> str:
        return repr(self._parts)
