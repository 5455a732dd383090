"""The state objects of user code, and the descriptors that declare keyed and operator state.

The runtime context returns one object for each keyed state in `open`, bound to the key of the
current element. The function keeps the object. A lookup returns `T | OrNone`, because the key may
have no value.

A descriptor declares the name, type and time to live of a state. It is pure data. After a restore,
state is identified by its name; the same name declared differently is an error. Times to live are
measured in processing time, from the last write; `StateTtl` has options.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, overload

from aioflow.core.signatures import check_takes
from aioflow.core.timeunits import to_ms

__all__ = [
    "AggregatingState",
    "AggregatingStateDescriptor",
    "ListState",
    "ListStateDescriptor",
    "MapState",
    "MapStateDescriptor",
    "OrNone",
    "RawKeyedState",
    "ReducingState",
    "ReducingStateDescriptor",
    "StateDescriptor",
    "StateTtl",
    "ValueState",
    "ValueStateDescriptor",
]

OrNone: TypeAlias = Any
"""Marks, in a union with another type, a value that may be None but is never None in a correct
program.

Type checkers see Any, so `ctx.timestamp + 60_000` needs no check for None.
"""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")


# T is also a result, but mypy does not see it beside Any.
class ValueState(Protocol[T]):  # type: ignore[misc]
    """State that holds one value for the current key."""

    def value(self) -> T | OrNone:
        """Returns the value, or the descriptor's default."""

    def update(self, value: T | None) -> None:
        """Sets the value; None clears it."""

    def clear(self) -> None: ...


class ListState(Protocol[T]):
    """The state that holds a list for the current key. None cannot be an element."""

    def get(self) -> list[T]:
        """Returns a new list of the elements; changing the list does not change the state."""

    def add(self, value: T) -> None: ...
    def add_all(self, values: Iterable[T]) -> None: ...
    def update(self, values: Iterable[T]) -> None:
        """Replaces the whole list; an empty list clears the state."""

    def clear(self) -> None: ...


class MapState(Protocol[K, V]):
    """The state that holds a map for the current key.

    `keys`, `values` and `items` return lists, so the map may be changed during an iteration.
    """

    @overload
    def get(self, key: K) -> V | OrNone: ...
    @overload
    def get(self, key: K, default: D) -> V | D: ...
    def put(self, key: K, value: V) -> None: ...
    def put_all(self, entries: Mapping[K, V]) -> None: ...
    def remove(self, key: K) -> None: ...
    def contains(self, key: K) -> bool: ...
    def keys(self) -> list[K]: ...
    def values(self) -> list[V]: ...
    def items(self) -> list[tuple[K, V]]: ...
    def is_empty(self) -> bool: ...
    def clear(self) -> None: ...


# T is also a result, but mypy does not see it beside Any.
class ReducingState(Protocol[T]):  # type: ignore[misc]
    """The state that holds the reduction of the elements added for the current key."""

    def get(self) -> T | OrNone:
        """Returns the reduction; None if no element was added."""

    def add(self, value: T) -> None: ...
    def clear(self) -> None: ...


class AggregatingState(Protocol[T_co]):
    """The state that holds the aggregate of the elements added for the current key; T is the type
    of its result.
    """

    def get(self) -> T_co | OrNone:
        """Returns the aggregate's result; None if no element was added."""

    def add(self, value: Any) -> None: ...
    def clear(self) -> None: ...


class RawKeyedState(Protocol):
    """State as bytes for each key group. A function writes it in `snapshot_state` and reads it in
    `initialize_state`.
    """

    @property
    def key_groups(self) -> range:
        """The key groups of this subtask."""

    def group_of(self, key: Hashable) -> int:
        """Returns the key group of a key."""

    def get(self) -> dict[int, bytes]:
        """Returns the bytes of each key group that has some."""

    def update(self, contents: Mapping[int, bytes]) -> None:
        """Replaces the bytes of all key groups. A group that is not in `contents` then has no
        bytes.
        """


@dataclass(frozen=True, slots=True)
class StateTtl:
    """A time to live with options, for the `ttl=` of a descriptor. After Flink's StateTtlConfig."""

    time: str | timedelta
    """Time after which a value expires."""
    refresh_on_read: bool = field(default=False, kw_only=True)
    """Whether a read counts like a write, so that a value expires `time` after its last use."""
    return_expired: bool = field(default=False, kw_only=True)
    """Whether an expired value is returned until it is removed. If False, an expired value is never
    returned.
    """

    def __post_init__(self) -> None:
        to_ms(self.time, "time of StateTtl")
        for name in ("refresh_on_read", "return_expired"):
            given = getattr(self, name)
            if type(given) is not bool:
                raise TypeError(f"{name} of StateTtl is {given!r}, expected True or False")

    @staticmethod
    def of(ttl: str | timedelta | StateTtl, name: str) -> StateTtl:
        """Returns `ttl` of state `name` as a time to live; a duration has the default options."""
        if isinstance(ttl, StateTtl):
            return ttl
        to_ms(ttl, f"ttl of state {name!r}")  # Its error names the state.
        return StateTtl(ttl)

    def ms(self, name: str) -> int:
        """Returns the time in ms. `name` is the name of the state, for errors."""
        return to_ms(self.time, f"ttl of state {name!r}")


@dataclass(frozen=True)
class StateDescriptor:
    """The common base of all descriptors.

    `ttl` is the time to live: a duration ("1d", timedelta), a `StateTtl`, or None for ever. The
    class has no slots, because a frozen dataclass with slots cannot be made as
    `ValueStateDescriptor[int]("n")`.
    """

    name: str
    ttl: str | timedelta | StateTtl | None = field(default=None, kw_only=True)

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
    """Declares a map for each key, or a broadcast state. The time to live applies to each entry."""


@dataclass(frozen=True)
class ReducingStateDescriptor(StateDescriptor, Generic[T]):
    """Declares one value for each key; `fn(old, added)` merges each added element."""

    fn: Callable[[T, T], T]

    def __post_init__(self) -> None:
        check_takes(self.fn, f"ReducingStateDescriptor({self.name!r})", "old, added")


@dataclass(frozen=True)
class AggregatingStateDescriptor(StateDescriptor, Generic[T]):
    """Declares one accumulator for each key, kept by an `AggregateFunction`.

    `get()` returns the result of the aggregate, of type T.
    """

    agg: Any  # An AggregateFunction of any types: the descriptor only carries it.
