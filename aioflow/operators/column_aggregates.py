"""The aggregates that run on columns: `count sum mean min max` of expressions, and `agg` of these.

Imports numpy only on demand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflow.expressions.nodes import is_expression
from aioflow.expressions.trees import column_names
from aioflow.operators.aggregates import Agg, BuiltIn, Count, Max, Mean, Min, Sum

if TYPE_CHECKING:
    from aioflow.columns.kernels import Plan
    from aioflow.operators.folding import FoldingAggregate

__all__ = ["fields_read", "plan_columns", "why_rows"]

_KINDS: dict[type, str] = {Count: "count", Sum: "sum", Mean: "mean", Min: "min", Max: "max"}


def why_rows(aggregate: FoldingAggregate) -> str | None:
    """Returns the reason why `aggregate` needs rows, as shown by `explain()`, or None if it can use
    columns.
    """
    for part in _parts(aggregate):
        if type(part) not in _KINDS:
            return (
                f"{part!r} works on Python values: count sum mean min max of expressions work on "
                "columns"
            )
        assert isinstance(part, BuiltIn)
        if type(part) is not Count and not is_expression(part.fn):
            of = "a function" if part.fn is not None else "whole elements"
            return (
                f"{part.name} is of {of}: {part.name}(af.col.<field>), or of another expression, "
                "works on columns"
            )
        if part.where is not None and not is_expression(part.where):
            return f"where= of {part.name} is a function: an expression works on columns"
    return None


def plan_columns(aggregate: FoldingAggregate) -> Plan:
    """Returns `aggregate` as a plan on columns. `why_rows` must have returned None for it."""
    from aioflow.columns.kernels import LeafKind, LeafSpec, Plan

    leaves = []
    for part in _parts(aggregate):
        assert isinstance(part, BuiltIn)
        fn, where = part.fn, part.where
        leaves.append(
            LeafSpec(
                LeafKind(_KINDS[type(part)]),
                fn if is_expression(fn) else None,
                where if is_expression(where) else None,
            )
        )
    return Plan(leaves, list(aggregate.parts) if isinstance(aggregate, Agg) else None)


def fields_read(aggregate: FoldingAggregate) -> tuple[str | int, ...]:
    """Returns the fields of an element that `aggregate` reads; `why_rows` returned None for it."""
    parts = [part for part in _parts(aggregate) if isinstance(part, BuiltIn)]
    return column_names(
        *(one for part in parts for one in (part.fn, part.where) if is_expression(one))
    )


def _parts(aggregate: FoldingAggregate) -> list[FoldingAggregate]:
    return list(aggregate.parts.values()) if isinstance(aggregate, Agg) else [aggregate]
