"""Compiles aggregates of SQL to aggregates of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlglot import exp

from aioflow.core.functions import AggregateFunction
from aioflow.expressions.nodes import Expr
from aioflow.sql.scalars import Functions, Scope
from aioflow.sql.types import SqlType

__all__ = ["Aggregate", "compile_aggregate", "is_aggregate"]


@dataclass(frozen=True, slots=True)
class Aggregate:
    """A compiled aggregate.

    `parts` go to `af.agg(**parts)`; their names say what they compute, so the parts of several
    aggregates merge with `|`, and equal ones are computed once. `result` is the value, read from
    the dict of the parts.
    """

    type: SqlType
    nullable: bool
    parts: Mapping[str, AggregateFunction[Any, Any, Any]]
    result: Expr[Any]


def is_aggregate(node: exp.Expression) -> bool:
    """Returns whether `node` is a call of an aggregate, with its FILTER if it has one."""
    raise NotImplementedError


def compile_aggregate(node: exp.Expression, scope: Scope, functions: Functions) -> Aggregate:
    """Compiles the call of an aggregate, a `Filter` around it included. Raises SqlError."""
    raise NotImplementedError
