"""Prevents state of one aggregate from being read as state of another. An operator records its
aggregate in operator state and compares it at a restore.

An accumulator does not identify its aggregate: the int of a count would silently continue as a sum.
All functions of users count as the same aggregate here; users themselves are responsible for their
accumulators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflow.core.errors import RestoreError
from aioflow.operators.aggregate.functions import Agg, BuiltIn
from aioflow.operators.stateless import describe_place
from aioflow.state.backend import INTERNAL_PREFIX

if TYPE_CHECKING:
    from aioflow.operators.operator import OperatorContext

__all__ = ["AGGREGATE", "check_same_aggregate"]

AGGREGATE = f"{INTERNAL_PREFIX}aggregate"
"""Union list state: the aggregate of each subtask."""

REDUCE = "reduce"
OWN = "a function of its own"


def check_same_aggregate(ctx: OperatorContext, aggregate: object) -> None:
    """Raises RestoreError if the restored state belongs to another aggregate.

    Called in `initialize_state`. `aggregate` None means `reduce`. State of an earlier version,
    which did not record the aggregate, is accepted.
    """
    name = REDUCE if aggregate is None else _name(aggregate)
    state = ctx.operator_state.get_union_list_state(AGGREGATE)
    for before in state.get():
        if before != name:
            raise RestoreError(
                f"{describe_place(ctx)} computes {name}, and the state that it is given under its "
                f"uid was computed by {before}: give the "
                "new operator a uid of its own, and begin it without state with "
                "allow_non_restored=True"
            )
    state.update([name])


def _name(aggregate: object) -> str:
    if isinstance(aggregate, Agg):
        return f"agg({', '.join(map(_name, aggregate.parts.values()))})"
    return aggregate.name if isinstance(aggregate, BuiltIn) else OWN
