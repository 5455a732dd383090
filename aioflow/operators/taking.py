"""Extracts from each element the one value that an aggregate reads, so that this value, or nothing,
is sent instead of the element.

For a sum of one field over several processes, each whole record would otherwise be written, read
and decoded for that field. The sender calls the function that the aggregate would have called, and
marks the batch (`RecordBatch.taken`). If the call fails, the whole records are sent, and the
aggregate fails at that record, or drops it as late. So the function must only compute: the
requirement is the same as for inlining it in a loop (`inlining`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from aioflow.core.errors import describe_record
from aioflow.operators.aggregates import (
    Agg,
    BuiltIn,
    Collect,
    Count,
    Distinct,
    First,
    Last,
    Max,
    Mean,
    Min,
    Sum,
)
from aioflow.operators.folding import FoldingAggregate
from aioflow.operators.inlining import body_of

__all__ = ["at_record", "between_records", "of_taken", "taken_by"]

_TAKE_ONE = frozenset((Sum, Mean, Min, Max, First, Last, Collect, Distinct))
"""Aggregates that read only the result of `fn` for an element."""


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
            or not (type(part) is Count or type(part) in _TAKE_ONE)
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
