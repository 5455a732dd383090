"""Times to live: keyed state whose values expire some time after they were last written.

Values are stored as `(written_ms, value)`; elements of a list and entries of a map have their own
times. A write refreshes the time, a read never does. Expired values are never returned. An expired
value is removed when it is accessed; each write also removes a few others, and a snapshot leaves
expired values out.

`ExpiryIndex` finds the values to remove at a write. It groups writes into coarse slices of time, so
that each removal finds expired values and no table is ever scanned.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from aioflow.core.states import StateDescriptor
from aioflow.core.timeunits import to_ms
from aioflow.state.views import (
    MISSING,
    AggregatingView,
    ListView,
    MapView,
    Owner,
    ReducingView,
    Table,
    ValueView,
    View,
    register_namespaced,
)

__all__ = ["VIEWS", "ExpiryIndex", "convert"]

REMOVED_PER_WRITE = 4
"""Number of values removed at each write: above the one value that a write can add, so that the
backlog shrinks, and small enough not to be noticed.
"""

SLICES = 8
"""Number of slices of a time to live: a value is removed at most 1/8 of its time after it expires.
"""


class ExpiryIndex:
    """An index of the pairs (namespace, key) that may have expired, by the time slice of their last
    write.
    """

    __slots__ = ("_oldest_end", "_slices", "_width", "ttl_ms")

    def __init__(self, ttl_ms: int) -> None:
        self.ttl_ms = ttl_ms
        self._width = max(1, ttl_ms // SLICES)
        # Dicts serve as ordered sets, so that two writes in one slice are noted once.
        self._slices: dict[int, dict[tuple[Any, Any], None]] = {}
        self._oldest_end: int | None = None

    def note(self, namespace: Any, key: Any, written_ms: int) -> None:
        """Notes that a part of `key` was written at `written_ms`."""
        number = written_ms // self._width
        entries = self._slices.get(number)
        if entries is None:
            entries = self._slices[number] = {}
            self._find_oldest()
        entries[namespace, key] = None

    def take_ended(self, now_ms: int, limit: int) -> list[tuple[Any, Any]]:
        """Removes and returns up to `limit` (namespace, key) whose writes in one slice have all
        expired.

        Each pair is returned once.
        """
        if self._oldest_end is None or now_ms < self._oldest_end:
            return []
        number = min(self._slices)
        entries = self._slices[number]
        taken = [entries.popitem()[0] for _ in range(min(limit, len(entries)))]
        if not entries:
            del self._slices[number]
            self._find_oldest()
        return taken

    def _find_oldest(self) -> None:
        self._oldest_end = (
            (min(self._slices) + 1) * self._width - 1 + self.ttl_ms if self._slices else None
        )


class TimedView(View):
    """The common base of the states with a time to live. It reads a key's stored value without
    expired parts, and notes writes.
    """

    def prepare(self) -> None:
        super().prepare()
        ttl = self.descriptor.ttl
        assert ttl is not None, "a timed view is made for a descriptor with a ttl"
        self._ttl_ms = to_ms(ttl, f"ttl of state {self.descriptor.name!r}")
        self._now_ms = self._backend.now_ms
        index = self._table.index
        if index is None:
            # The index belongs to the table, because the views of windows come and go.
            index = self._table.index = ExpiryIndex(self._ttl_ms)
            for namespace in self._table.namespaces():
                for key, stored in self._table.peek(namespace).items():
                    for written_ms in self.times(stored):
                        index.note(namespace, key, written_ms)
        self._index: ExpiryIndex = index

    def alive(self, stored: Any, now_ms: int) -> Any:
        """Returns `stored` if no part has expired, a copy of the unexpired parts, or `MISSING`."""
        return MISSING if now_ms - stored[0] >= self._ttl_ms else stored

    def times(self, stored: Any) -> Iterable[int]:
        """Yields the write times of the parts of `stored`."""
        return (stored[0],)

    def still_alive(self) -> Callable[[Any], Any]:
        now = self._now_ms()
        return lambda stored: self.alive(stored, now)

    def _settle(self, namespace: Any, key: Any, now_ms: int) -> Any:
        # Removes the expired parts of one key; returns the rest.
        stored = self._table.peek(namespace).get(key, MISSING)
        if stored is MISSING:
            return MISSING
        left = self.alive(stored, now_ms)
        if left is MISSING:
            del self._table.of_key(namespace, key)[key]
            self._table.removed(namespace, key)
        elif left is not stored:
            self._table.of_key(namespace, key)[key] = left
        return left

    def _current(self) -> Any:
        # Returns the unexpired part for the current key.
        key = self._backend.current_key
        stored = self._entries.get(key, MISSING)
        if stored is MISSING:
            return MISSING
        now = self._now_ms()
        left = self.alive(stored, now)
        return left if left is stored else self._settle(self._namespace, key, now)

    def _written(self, now_ms: int) -> None:
        # The current key was written. Removes a few expired entries, of any key.
        index = self._index
        index.note(self._namespace, self._backend.current_key, now_ms)
        for namespace, key in index.take_ended(now_ms, REMOVED_PER_WRITE):
            self._settle(namespace, key, now_ms)


class TimedValueView(TimedView, ValueView):
    """`ValueState` with a time to live."""

    __slots__ = ()

    def value(self) -> Any:
        stored = self._current()
        return copy.copy(self._default) if stored is MISSING else stored[1]

    def update(self, value: Any) -> None:
        if value is None:
            self.clear()
            return
        now = self._now_ms()
        key = self._backend.current_key
        if (dirty := self._dirty) is not None and key not in dirty:
            dirty[key] = key in self._entries
        self._store[key] = (now, value)
        self._written(now)

    def show(self, stored: Any) -> Any:
        left = self.alive(stored, self._now_ms())
        return MISSING if left is MISSING else left[1]


class TimedListView(TimedView, ListView):
    """`ListState` with a time to live for each element."""

    __slots__ = ()

    def get(self) -> list[Any]:
        stored = self._current()
        return [] if stored is MISSING else [value for _, value in stored]

    def add(self, value: Any) -> None:
        if value is None:
            raise self.none_refused()
        self._append([value])

    def add_all(self, values: Iterable[Any]) -> None:
        added = self.checked(values)
        if added:
            self._append(added)

    def update(self, values: Iterable[Any]) -> None:
        new = self.checked(values)
        self.clear()
        if new:
            self._append(new)

    def show(self, stored: Any) -> Any:
        left = self.alive(stored, self._now_ms())
        return MISSING if left is MISSING else [value for _, value in left]

    def alive(self, stored: Any, now_ms: int) -> Any:
        ended = now_ms - self._ttl_ms
        if all(written_ms > ended for written_ms, _ in stored):
            return stored
        return [element for element in stored if element[0] > ended] or MISSING

    def times(self, stored: Any) -> Iterable[int]:
        return {written_ms: None for written_ms, _ in stored}

    def _append(self, values: list[Any]) -> None:
        # Expired elements stay until they are read or the index finds them. Searching for them here
        # would examine the whole list each time.
        now = self._now_ms()
        added = [(now, value) for value in values]
        key = self._backend.current_key
        if (dirty := self._dirty) is not None and key not in dirty:
            dirty[key] = key in self._entries
        stored = self._entries.get(key)
        if stored is None:
            self._store[key] = added
        else:
            stored.extend(added)
        self._written(now)


class TimedMapView(TimedView, MapView):
    """`MapState` with a time to live for each entry."""

    __slots__ = ()

    def get(self, key: Any, default: Any = None) -> Any:
        # Only this entry is examined, not the whole map.
        stored = self._entries.get(self._backend.current_key)
        if stored is None:
            return default
        entry = stored.get(key)
        if entry is None:
            return default
        if self._now_ms() - entry[0] >= self._ttl_ms:
            self.remove(key)
            return default
        return entry[1]

    def put(self, key: Any, value: Any) -> None:
        now = self._now_ms()
        current = self._backend.current_key
        if (dirty := self._dirty) is not None and current not in dirty:
            dirty[current] = current in self._entries
        stored = self._entries.get(current)
        if stored is None:
            self._store[current] = {key: (now, value)}
        else:
            stored[key] = (now, value)
        self._written(now)

    def contains(self, key: Any) -> bool:
        return self.get(key, MISSING) is not MISSING

    def keys(self) -> list[Any]:
        stored = self._current()
        return [] if stored is MISSING else list(stored)

    def values(self) -> list[Any]:
        stored = self._current()
        return [] if stored is MISSING else [value for _, value in stored.values()]

    def items(self) -> list[tuple[Any, Any]]:
        stored = self._current()
        return [] if stored is MISSING else [(key, value) for key, (_, value) in stored.items()]

    def is_empty(self) -> bool:
        stored = self._entries.get(self._backend.current_key)
        if stored is None:
            return True
        # One unexpired entry is enough. Examining all entries of a large map each time would be
        # slow.
        ended = self._now_ms() - self._ttl_ms
        return (
            not any(written_ms > ended for written_ms, _ in stored.values())
            and self._current() is MISSING
        )

    def show(self, stored: Any) -> Any:
        left = self.alive(stored, self._now_ms())
        return MISSING if left is MISSING else {key: value for key, (_, value) in left.items()}

    def alive(self, stored: Any, now_ms: int) -> Any:
        ended = now_ms - self._ttl_ms
        if all(written_ms > ended for written_ms, _ in stored.values()):
            return stored
        return {key: entry for key, entry in stored.items() if entry[0] > ended} or MISSING

    def times(self, stored: Any) -> Iterable[int]:
        return {written_ms: None for written_ms, _ in stored.values()}


class TimedReducingView(TimedView, ReducingView):
    """`ReducingState` with a time to live: each `add` refreshes all of it."""

    __slots__ = ()

    def get(self) -> Any:
        stored = self._current()
        return None if stored is MISSING else stored[1]

    def add(self, value: Any) -> None:
        stored = self._current()
        now = self._now_ms()
        key = self._backend.current_key
        if (dirty := self._dirty) is not None and key not in dirty:
            dirty[key] = key in self._entries
        self._store[key] = (now, value if stored is MISSING else self._fn(stored[1], value))
        self._written(now)

    def show(self, stored: Any) -> Any:
        left = self.alive(stored, self._now_ms())
        return MISSING if left is MISSING else left[1]


class TimedAggregatingView(TimedView, AggregatingView):
    """`AggregatingState` with a time to live: each `add` refreshes all of it."""

    __slots__ = ()

    def get(self) -> Any:
        stored = self._current()
        return None if stored is MISSING else self._agg.get_result(stored[1])

    def add(self, value: Any) -> None:
        stored = self._current()
        accumulator = self._agg.create_accumulator() if stored is MISSING else stored[1]
        now = self._now_ms()
        key = self._backend.current_key
        if (dirty := self._dirty) is not None and key not in dirty:
            dirty[key] = key in self._entries
        self._store[key] = (now, self._agg.add(value, accumulator))
        self._written(now)

    def show(self, stored: Any) -> Any:
        left = self.alive(stored, self._now_ms())
        return MISSING if left is MISSING else self._agg.get_result(left[1])


VIEWS: dict[str, Callable[[Owner, Table, StateDescriptor], View]] = {
    "value": TimedValueView,
    "list": TimedListView,
    "map": TimedMapView,
    "reducing": TimedReducingView,
    "aggregating": TimedAggregatingView,
}
"""Kind of a descriptor -> its view, with a time to live."""

register_namespaced(
    TimedValueView, TimedListView, TimedMapView, TimedReducingView, TimedAggregatingView
)


def convert(table: Table, kind: str, now_ms: int | None) -> None:
    """Adds the time `now_ms` to the values of an untimed table, or with None removes all times."""
    table.index = None
    for namespace in table.namespaces():
        for key, stored in list(table.peek(namespace).items()):
            table.of_key(namespace, key)[key] = _convert(stored, kind, now_ms)


def _convert(stored: Any, kind: str, now_ms: int | None) -> Any:
    if kind == "list":
        return (
            [(now_ms, value) for value in stored]
            if now_ms is not None
            else [value for _, value in stored]
        )
    if kind == "map":
        return {
            key: entry[1] if now_ms is None else (now_ms, entry) for key, entry in stored.items()
        }
    return stored[1] if now_ms is None else (now_ms, stored)
