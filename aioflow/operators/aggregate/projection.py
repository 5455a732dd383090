"""Extracts from each element the one value that an aggregate reads, so that this value, or nothing,
is sent instead of the element.

For a sum of one field over several processes, each whole record would otherwise be written, read
and decoded for that field. The sender calls the function that the aggregate would have called, and
marks the batch (`RecordBatch.taken`). If the call fails, the whole records are sent, and the
aggregate fails at that record, or drops it as late. So the function must only compute: the
requirement is the same as for inlining it in a loop (`inlining`).

Some aggregates run on columns: `count sum mean min max` of expressions, and `agg` of these. numpy
is imported only on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import describe_record
from aioflow.expressions.nodes import is_expression
from aioflow.expressions.trees import column_names
from aioflow.operators.aggregate.folding import FoldingAggregate
from aioflow.operators.aggregate.functions import Agg, BuiltIn, Count
from aioflow.operators.inlining import body_of

if TYPE_CHECKING:
    from aioflow.columns.kernels import Plan

__all__ = [
    "at_record",
    "between_records",
    "fields_read",
    "of_taken",
    "plan_columns",
    "taken_by",
    "why_rows",
]


def taken_by(aggregate: object) -> tuple[Callable[[Any], Any], ...] | None:
    """Returns the one function by which `aggregate` reads an element; empty if it only counts.

    Returns None if it reads more than that, or is unknown. With `where=` the aggregate does not
    call the function for every element, so the sender must not call it.
    """
    found: dict[tuple[str, ...], Callable[[Any], Any]] = {}
    for part in aggregate.parts.values() if isinstance(aggregate, Agg) else [aggregate]:
        if (
            not isinstance(part, BuiltIn)
            or part.where is not None
            or not (type(part) is Count or part.reads_one)
        ):
            return None
        if type(part) is Count:
            continue
        body = body_of(part.fn)
        if body is None or body.is_argument:
            return None
        found[body.pieces] = part.fn  # type: ignore[assignment]  # Not None, because it has a body.
    return tuple(found.values()) if len(found) <= 1 else None


def of_taken(aggregate: FoldingAggregate) -> FoldingAggregate:
    """Returns a copy of `aggregate` that reads extracted values instead of elements.

    The accumulators stay the same. After a restore, in-flight data of an unaligned checkpoint may
    be processed by changed code. Its values were extracted by the former code, so they are
    aggregated as the former code would have done. A `where=` that was added since does not apply,
    because it would need the elements.
    """
    made = copy(aggregate)
    if isinstance(made, Agg):
        made.parts = {name: of_taken(part) for name, part in made.parts.items()}
    elif isinstance(made, BuiltIn):
        made.fn = made.where = None
    return made


def at_record(value: Any, key: Any, *, taken: bool) -> str:
    """Describes the failing record for a message, or the value extracted from it."""
    of_key = f"of key {describe_record(key)}"
    return (
        f"at {describe_record(value)}, taken of a record {of_key}"
        if taken
        else f"at record {describe_record(value)} {of_key}"
    )


def between_records(values: Sequence[Any], *, taken: bool) -> str:
    """Describes a range of records for a message; the failing record is one of `values`."""
    ends = f"{describe_record(values[0])} and {describe_record(values[-1])}"
    return f"between {ends}, taken of records" if taken else f"between records {ends}"


def why_rows(aggregate: FoldingAggregate) -> str | None:
    """Returns the reason why `aggregate` needs rows, as shown by `explain()`, or None if it can use
    columns.
    """
    for part in _parts(aggregate):
        if not isinstance(part, BuiltIn) or not part.has_column_form:
            return (
                f"{part!r} works on Python values: count sum mean min max of expressions work on "
                "columns"
            )
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
                LeafKind(part.name),
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
