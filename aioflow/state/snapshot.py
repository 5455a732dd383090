"""The parts of a snapshot: declarations of tables, operator state as plain data, and immutable
copies.

`frozen_copy` copies the values that the job could still change, and shares the others. So a
snapshot can be encoded later.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from aioflow.core.errors import RestoreError

__all__ = ["OperatorSnapshot", "TableMeta", "Uncopied", "check_max_parallelism", "frozen_copy"]

ATOMS = frozenset(
    {type(None), bool, int, float, str, bytes, datetime, date, timedelta, Decimal, UUID}
)
"""Exact types whose values are immutable."""


@dataclass(frozen=True, slots=True)
class TableMeta:
    """The properties of a table that determine the form of its stored values."""

    kind: str
    """Value, list, map, reducing or aggregating; `table` for raw storage of a built-in operator."""
    timed: bool = False
    """Whether values are stored with the time of their last write, because the state has a time
    to live.
    """


@dataclass(slots=True)
class OperatorSnapshot:
    """All operator state of one subtask, by name of the state."""

    split: dict[str, list[Any]] = field(default_factory=dict)
    """List state: its elements are spread over the subtasks when the parallelism changes."""
    union: dict[str, list[Any]] = field(default_factory=dict)
    """Union list state: every subtask gets the elements of all subtasks."""
    broadcast: dict[str, dict[Any, Any]] = field(default_factory=dict)
    """Broadcast state: the same on every subtask."""
    uncopied: dict[str, str] = field(default_factory=dict)
    """Names of states that could not be copied -> the reason.

    Their values in this snapshot may change, and are not to be written.
    """


def check_max_parallelism(found: int, expected: int, what: str) -> None:
    """Raises RestoreError if `what` was written with another number of key groups than this job
    has.
    """
    if found != expected:
        raise RestoreError(
            f"{what} was written with max_parallelism={found}, but the operator has {expected}; "
            "max_parallelism is fixed for the "
            f"life of the state: set it to {found} again"
        )


class Uncopied:
    """A placeholder in a snapshot for a value that could not be copied.

    Encoding the placeholder raises an error with the value's name and `reason`. The class is no
    dataclass, because a dataclass could be encoded.
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


def frozen_copy(value: Any) -> Any:
    """Returns `value` itself if it is immutable, otherwise a deep copy that shares the immutable
    parts.
    """
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is tuple:
        return value if _all_atoms(value) else tuple(map(frozen_copy, value))
    if kind is list:
        return value[:] if _all_atoms(value) else list(map(frozen_copy, value))
    if kind is dict:
        if _all_atoms(list(value.values())):
            return value.copy()
        return {key: frozen_copy(item) for key, item in value.items()}
    return copy.deepcopy(value)


def _all_atoms(values: Sequence[Any]) -> bool:
    # One pass in C; most containers hold one or two types.
    return ATOMS.issuperset(map(type, values))
