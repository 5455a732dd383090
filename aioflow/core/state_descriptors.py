"""Declarations of keyed and operator state: name, type, time to live.

A descriptor is pure data. After a restore, state is identified by its name; the same name declared
differently is an error. Times to live count from the last write, in processing time; an expired
value is never returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, TypeVar

from aioflow.core.signatures import check_takes

__all__ = [
    "AggregatingStateDescriptor",
    "ListStateDescriptor",
    "MapStateDescriptor",
    "ReducingStateDescriptor",
    "StateDescriptor",
    "ValueStateDescriptor",
]

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class StateDescriptor:
    """The common base of all descriptors.

    `ttl` is the time to live, a duration ("1d", timedelta), or None for ever. The class has no
    slots, because a frozen dataclass with slots cannot be made as `ValueStateDescriptor[int]("n")`.
    """

    name: str
    ttl: str | timedelta | None = field(default=None, kw_only=True)

    @property
    def kind(self) -> str:
        """The kind of state, as errors and savepoints spell it: value, list, map, reducing,
        aggregating.
        """
        return type(self).__name__.removesuffix("StateDescriptor").lower()


@dataclass(frozen=True)
class ValueStateDescriptor(StateDescriptor, Generic[T]):
    """Declares one value for each key. `default` is the result of `value()` before the first
    update.
    """

    default: T | None = None


@dataclass(frozen=True)
class ListStateDescriptor(StateDescriptor, Generic[T]):
    """Declares a list of elements for each key."""


@dataclass(frozen=True)
class MapStateDescriptor(StateDescriptor, Generic[K, V]):
    """Declares a map for each key, or a broadcast state. The time to live counts for each entry."""


@dataclass(frozen=True)
class ReducingStateDescriptor(StateDescriptor, Generic[T]):
    """Declares one value for each key; `fn(old, added)` merges each added element."""

    fn: Callable[[T, T], T]

    def __post_init__(self) -> None:
        check_takes(self.fn, f"ReducingStateDescriptor({self.name!r})", "old, added")


@dataclass(frozen=True)
class AggregatingStateDescriptor(StateDescriptor, Generic[T]):
    """Declares one accumulator for each key, kept by an `AggregateFunction`.

    `get()` returns its result, of type T.
    """

    agg: Any  # An AggregateFunction of any types: the descriptor only carries it.
