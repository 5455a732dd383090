"""What an aggregate takes of an element, where that is one thing or nothing: it may travel in the place of the element.

A sum of one field that is dealt out over processes would else have every record written, read and made again for that field. Whoever deals
records out calls the function that the aggregate would have called, and says so of the batch (`RecordBatch.taken`); where that fails,
the whole records go on, and the aggregate fails at the one which is to blame, or passes over it as late. So the function must be
one that does nothing but compute: one that could as well stand in the loop itself (`inlining`).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from aioflow.operators.aggregates import Agg, BuiltIn, Collect, Count, Distinct, First, Last, Max, Mean, Min, Sum
from aioflow.operators.folding import FoldingAggregate
from aioflow.operators.inlining import body_of

__all__ = ["of_taken", "taken_by"]

_TAKE_ONE = frozenset((Sum, Mean, Min, Max, First, Last, Collect, Distinct))
"""They read what `fn` gives of an element, and nothing else of it."""


def taken_by(aggregate: object) -> tuple[Callable[[Any], Any], ...] | None:
    """The one function of an element by which `aggregate` reads it, none if it only counts; None: it reads more than that, or is not known.

    With `where=` a function is not called for every element, so it is not to be called before.
    """
    found: dict[tuple[str, ...], Callable[[Any], Any]] = {}
    for part in aggregate.parts.values() if isinstance(aggregate, Agg) else [aggregate]:
        if not isinstance(part, BuiltIn) or part.where is not None or not (type(part) is Count or type(part) in _TAKE_ONE):
            return None
        if type(part) is Count:
            continue
        body = body_of(part.fn)
        if body is None or body.is_argument:
            return None
        found[body.pieces] = part.fn  # type: ignore[assignment]  # It has a body.
    return tuple(found.values()) if len(found) <= 1 else None


def of_taken(aggregate: FoldingAggregate) -> FoldingAggregate:
    """The same aggregate, with the same accumulators, over what it takes of elements."""
    made = copy(aggregate)
    if isinstance(made, Agg):
        made.parts = {name: of_taken(part) for name, part in made.parts.items()}
    elif isinstance(made, BuiltIn):
        made.fn = None
    return made
