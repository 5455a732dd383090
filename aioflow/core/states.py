"""The state objects of user code: one for each keyed state, bound to the key of the current
element.

A descriptor declares the state, and the runtime context returns the object in `open`. The function
keeps the object. A lookup returns `T | OrNone`, because the key may have no value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar, overload

__all__ = ["AggregatingState", "ListState", "MapState", "OrNone", "ReducingState", "ValueState"]

OrNone: TypeAlias = Any
"""Beside a type in a union: a value that may be None, but never is in a correct program.

It is Any for type checkers. A test of None before each `ctx.timestamp + 60_000` would only annoy.
"""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")


# It gives T as well: Any beside it hides that.
class ValueState(Protocol[T]):  # type: ignore[misc]
    """The state that holds one value for the current key."""

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


# It gives T as well: Any beside it hides that.
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
