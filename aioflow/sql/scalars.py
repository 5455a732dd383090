"""Compiles scalar expressions of SQL to column expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sqlglot import exp

from aioflow.expressions.nodes import Expr
from aioflow.sql.types import SqlType

__all__ = ["Functions", "Scalar", "UserFunction", "async_calls", "compile_scalar"]


class Field(Protocol):
    """A column that a name stands for: its type, and `key`, its name in the dict of the row."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> SqlType: ...
    @property
    def nullable(self) -> bool: ...
    @property
    def key(self) -> str: ...


class Scope(Protocol):
    """The columns that an expression may read."""

    def resolve(self, column: exp.Column) -> Field:
        """Returns the field that a column names. Raises SqlError."""
        ...


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A Python function that a query may call, with the type of its results."""

    function: Callable[..., Any]
    type: SqlType
    nullable: bool = True
    is_async: bool = False


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of the user by their names, which are found in any case."""

    by_name: Mapping[str, UserFunction] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A compiled expression: `expression` reads the dict of a row by the keys of its fields."""

    type: SqlType
    nullable: bool
    expression: Expr[Any]

    @property
    def function(self) -> Callable[[Mapping[str, Any]], Any]:
        """The same computation as a function of a row."""
        raise NotImplementedError


def async_calls(node: exp.Expression, functions: Functions) -> list[exp.Expression]:
    """Returns the calls of async user functions in `node`, innermost first.

    The planner computes them before, and puts a column in the place of each.
    """
    raise NotImplementedError


def compile_scalar(node: exp.Expression, scope: Scope, functions: Functions) -> Scalar:
    """Compiles a scalar expression. Raises SqlError at the node that has no meaning."""
    raise NotImplementedError
