"""Projects elements to the one value, or to nothing, that an aggregate reads: this travels instead
of the element.

A sum of one field that is dealt out over processes would else have every record written, read and
made again for that field. The sender calls the function that the aggregate would have called, and
marks the batch (`RecordBatch.taken`). If the call fails, the whole records go on, and the
aggregate fails at the record to blame, or passes over it as late. So the function
must be one that does nothing but compute: one that could as well stand in the loop itself
(`inlining`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

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
from aioflow.operators.userfunction import describe_record

__all__ = ["at_record", "between_records", "of_taken", "taken_by"]

_TAKE_ONE = frozenset((Sum, Mean, Min, Max, First, Last, Collect, Distinct))
"""They read what `fn` gives of an element, and nothing else of it."""


def taken_by(aggregate: object) -> tuple[Callable[[Any], Any], ...] | None:
    """The one function of an element by which `aggregate` reads it, none if it only counts; None:
    it reads more than that, or is not known.

    With `where=` a function is not called for every element, so it is not to be called before.
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
        found[body.pieces] = part.fn  # type: ignore[assignment]  # It has a body.
    return tuple(found.values()) if len(found) <= 1 else None


def of_taken(aggregate: FoldingAggregate) -> FoldingAggregate:
    """Returns a copy of `aggregate` that reads extracted values instead of elements.

    The accumulators stay the same. The in-flight data of an unaligned checkpoint may meet changed
    code after a restore. It was extracted before the barrier, so it counts as the former code
    counted. A `where=` that was added since does not apply, because it would need the elements.
    """
    made = copy(aggregate)
    if isinstance(made, Agg):
        made.parts = {name: of_taken(part) for name, part in made.parts.items()}
    elif isinstance(made, BuiltIn):
        made.fn = made.where = None
    return made


def at_record(value: Any, key: Any, *, taken: bool) -> str:
    """For a message: which record is to blame, or what was `taken` of it, where the record
    itself is not here.
    """
    of_key = f"of key {describe_record(key)}"
    return (
        f"at {describe_record(value)}, taken of a record {of_key}"
        if taken
        else f"at record {describe_record(value)} {of_key}"
    )


def between_records(values: Sequence[Any], *, taken: bool) -> str:
    """As `at_record`, where it is one of `values`."""
    ends = f"{describe_record(values[0])} and {describe_record(values[-1])}"
    return f"between {ends}, taken of records" if taken else f"between records {ends}"
