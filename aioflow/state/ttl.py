"""Times to live: keyed state whose values expire some time after they were last written.

Values are stored as `(written_ms, value)`; elements of a list and entries of a map have their own
times. Each write refreshes the time. With `refresh_on_read`, each read refreshes the time too.
Expired values are never returned, except with `return_expired`, until they are removed. An expired
value is removed when it is accessed (not with `return_expired`). A write also removes expired
values of other keys, and a snapshot leaves expired values out. From time to time the task removes
some too (`TimedView.expire`).

Two indexes find the values to remove. `ExpiryIndex` groups writes into coarse slices of time, so
that expired values are found without scanning a table. It contains every key, so it is for tables
in memory. `SweepIndex` reads a larger table again and again, some rows every few writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from aioflow.core.states import StateDescriptor, StateTtl
from aioflow.state.snapshot import ATOMS, copy_of_default
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

__all__ = ["VIEWS", "ExpiryIndex", "SweepIndex", "TimedView", "convert"]

REMOVED_PER_WRITE = 4
"""Maximum number of expired values that one write removes. A write adds at most one value, so the
number of expired values shrinks.
"""

SLICES = 8
"""Number of slices into which a time to live is divided. So a value is removed at most 1/8 of its
time to live after it has expired.
"""

SWEEP_WRITES = 16
"""Number of writes between two steps of a sweep."""

SWEEP_ROWS = 64
"""Number of rows read in a step of a sweep.

These are four rows a write, so a pass ends even if the table grows. At most a third of the rows of
a full table have expired.
"""


EXPIRED_A_STEP = 256
"""Maximum number of values that the task removes at once, which takes about 1 ms."""

STEP_MS = 20
"""Time between two steps of the task while there is more to remove."""

WAIT_MS_MAX = 3_600_000
"""Longest time between two searches of the task for expired values."""


class ExpiryIndex:
    """An index of pairs (namespace, key) by the time slice of their last write. Finds the pairs
    that may have expired.
    """

    __slots__ = (
        "_latest",
        "_latest_begin",
        "_latest_end",
        "_oldest_end",
        "_slices",
        "_width",
        "quiet_from_ms",
        "quiet_until_ms",
        "ttl_ms",
    )

    def __init__(self, ttl_ms: int) -> None:
        self.ttl_ms = ttl_ms
        self._width = max(1, ttl_ms // SLICES)
        # Dicts serve as ordered sets, so that two writes in one slice are noted once.
        self._slices: dict[int, dict[tuple[Any, Any], None]] = {}
        self._oldest_end: int | None = None
        self._latest: dict[tuple[Any, Any], None] = {}
        """The pairs of the latest slice, which lasts from `_latest_begin` to before
        `_latest_end`.
        """
        self._latest_begin = self._latest_end = 0
        self.quiet_from_ms = self.quiet_until_ms = 0
        """From `quiet_from_ms` to before `quiet_until_ms`, a second write of a value need not be
        noted, because the value is already in the current slice, and no slice has expired.
        """

    def note(self, namespace: Any, key: Any, written_ms: int) -> None:
        """Notes that a part of the value of `key` was written at `written_ms`."""
        if not self._latest_begin <= written_ms < self._latest_end:
            self._open(written_ms)
        self._latest[namespace, key] = None

    def written(self, namespace: Any, key: Any, now_ms: int) -> Sequence[tuple[Any, Any]]:
        """Notes a write, and returns some pairs (namespace, key) whose values may have expired."""
        if not self._latest_begin <= now_ms < self._latest_end:
            self._open(now_ms)
        self._latest[namespace, key] = None
        oldest = self._oldest_end
        if oldest is None or now_ms < oldest:
            return ()
        return self.take_ended(now_ms, REMOVED_PER_WRITE)

    def _open(self, written_ms: int) -> None:
        """Makes the slice of `written_ms` the latest one."""
        number = written_ms // self._width
        entries = self._slices.get(number)
        if entries is None:
            entries = self._slices[number] = {}
            self._find_oldest()
        self._latest = entries
        self._latest_begin = number * self._width
        self._latest_end = self._latest_begin + self._width
        self._find_quiet()

    def take_ended(self, now_ms: int, limit: int) -> list[tuple[Any, Any]]:
        """Removes and returns up to `limit` pairs (namespace, key) of a slice whose writes have all
        expired.

        Each pair is returned once per slice.
        """
        if self._oldest_end is None or now_ms < self._oldest_end:
            return []
        number = min(self._slices)
        entries = self._slices[number]
        taken = [entries.popitem()[0] for _ in range(min(limit, len(entries)))]
        if not entries:
            del self._slices[number]
            self._find_oldest()
            if entries is self._latest:
                self._latest_end = self._latest_begin
                self._find_quiet()
        return taken

    def step(self, now_ms: int) -> tuple[Sequence[tuple[Any, Any]], bool]:
        """Removes and returns some pairs (namespace, key) whose values may have expired. Also
        returns whether there may be more such pairs.
        """
        taken = self.take_ended(now_ms, EXPIRED_A_STEP)
        return taken, bool(taken)

    def _find_oldest(self) -> None:
        self._oldest_end = (
            (min(self._slices) + 1) * self._width - 1 + self.ttl_ms if self._slices else None
        )
        self._find_quiet()

    def _find_quiet(self) -> None:
        self.quiet_from_ms, self.quiet_until_ms = self._latest_begin, self._latest_end
        if self._oldest_end is not None:
            self.quiet_until_ms = min(self._latest_end, self._oldest_end)


class SweepIndex:
    """Finds expired values by passes over a table that may be larger than memory.

    A pass begins at the earliest 1 / `SLICES` of the time to live after the previous pass began.
    """

    __slots__ = ("_alive", "_chunks", "_due_ms", "_pass", "_width", "_writes")

    quiet_from_ms: ClassVar[int] = 0
    quiet_until_ms: ClassVar[int] = 0
    """The interval from `quiet_from_ms` to `quiet_until_ms` is empty, so every write is passed to
    `written`.
    """

    def __init__(
        self,
        ttl_ms: int,
        chunks: Callable[[int], Iterator[list[tuple[Any, Any, Any]]]],
        alive: Callable[[Any, int], Any],
    ) -> None:
        """For `chunks` see `Table`. `alive(stored, now_ms)` returns the unexpired part of a stored
        value, or `MISSING`.
        """
        self._width = max(1, ttl_ms // SLICES)
        self._chunks = chunks
        self._alive = alive
        self._pass: Iterator[list[tuple[Any, Any, Any]]] | None = None
        self._due_ms: int | None = None
        """Earliest time of the next pass, or None if the next pass may begin at once."""
        self._writes = 0

    def written(self, namespace: Any, key: Any, now_ms: int) -> Sequence[tuple[Any, Any]]:
        """Counts a write. After every `SWEEP_WRITES` writes, also reads some rows, and returns
        (namespace, key) of the rows that have expired.
        """
        self._writes += 1
        if self._writes < SWEEP_WRITES:
            return ()
        self._writes = 0
        return self._read(now_ms) or ()

    def step(self, now_ms: int) -> tuple[Sequence[tuple[Any, Any]], bool]:
        """Reads some rows, independently of the number of writes. Returns (namespace, key) of the
        rows that have expired, and whether the pass goes on.
        """
        ended: list[tuple[Any, Any]] = []
        for _ in range(EXPIRED_A_STEP // SWEEP_ROWS):
            some = self._read(now_ms)
            if some is None:
                return ended, False
            ended += some
        return ended, True

    def _read(self, now_ms: int) -> list[tuple[Any, Any]] | None:
        """Reads some rows and returns (namespace, key) of the expired ones. Returns None at the end
        of a pass, or if no pass is due.
        """
        if self._pass is None:
            if self._due_ms is not None and now_ms < self._due_ms:
                return None
            self._pass, self._due_ms = self._chunks(SWEEP_ROWS), now_ms + self._width
        chunk = next(self._pass, None)
        if chunk is None:
            self._pass = None
            return None
        alive = self._alive
        return [
            (namespace, key)
            for namespace, key, stored in chunk
            if alive(stored, now_ms) is not stored
        ]


class TimedView(View):
    """The common base of the states with a time to live. It reads a key's stored value without
    expired parts, and notes writes.
    """

    def prepare(self) -> None:
        super().prepare()
        assert self.descriptor.ttl is not None, "a timed view is made for a descriptor with a ttl"
        ttl = StateTtl.of(self.descriptor.ttl, self.descriptor.name)
        self._ttl_ms = ttl.ms(self.descriptor.name)
        self._refreshes = ttl.refresh_on_read
        self._returns_expired = ttl.return_expired
        self._now_ms = self._backend.now_ms
        index = self._table.index
        if index is None:
            # The index belongs to the table, because the views of windows come and go.
            index = self._table.index = self._new_index()
        self._index: ExpiryIndex | SweepIndex = index

    def _new_index(self) -> ExpiryIndex | SweepIndex:
        table = self._table
        if table.chunks is not None:
            return SweepIndex(self._ttl_ms, table.chunks, self.alive)
        index = ExpiryIndex(self._ttl_ms)
        for namespace in table.namespaces():
            for key, stored in table.peek(namespace).items():
                for written_ms in self.times(stored):
                    index.note(namespace, key, written_ms)
        return index

    def alive(self, stored: Any, now_ms: int) -> Any:
        """Returns `stored` if no part has expired, a copy of the unexpired parts, or `MISSING`."""
        return MISSING if now_ms - stored[0] >= self._ttl_ms else stored

    def times(self, stored: Any) -> Iterable[int]:
        """Yields the write times of the parts of `stored`."""
        return (stored[0],)

    def refreshed(self, stored: Any, now_ms: int) -> Any:
        """Returns `stored` with the write time `now_ms` for those parts that have not expired."""
        return now_ms, stored[1]

    def visible(self, stored: Any) -> Any:
        """Returns the part of `stored` that readers see, or `MISSING`."""
        return stored if self._returns_expired else self.alive(stored, self._now_ms())

    def still_alive(self) -> Callable[[Any], Any]:
        now = self._now_ms()
        return lambda stored: self.alive(stored, now)

    def expire(self) -> int:
        """Removes some expired values, of any key, and returns the time in ms until the next
        call.
        """
        now = self._now_ms()
        ended, goes_on = self._index.step(now)
        for namespace, key in ended:
            self._settle(namespace, key, now)
        return STEP_MS if goes_on else min(max(STEP_MS, self._ttl_ms // SLICES), WAIT_MS_MAX)

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
        # Returns the visible part for the current key.
        key = self._backend.current_key
        stored = self._entries.get(key, MISSING)
        if stored is MISSING or self._returns_expired:
            return stored
        now = self._now_ms()
        left = self.alive(stored, now)
        return left if left is stored else self._settle(self._namespace, key, now)

    def _read(self) -> Any:
        # Returns the visible part for the current key, and refreshes its time if reads do.
        stored = self._current()
        if self._refreshes and stored is not MISSING:
            now = self._now_ms()
            if any(now > written_ms > now - self._ttl_ms for written_ms in self.times(stored)):
                self._put(stored := self.refreshed(stored, now))
                self._written(now)
        return stored

    def _put(self, stored: Any) -> None:
        # Sets the stored value of the current key.
        key = self._backend.current_key
        if (dirty := self._dirty) is not None and key not in dirty:
            dirty[key] = key in self._entries
        self._store[key] = stored

    def _written(self, now_ms: int, before: Any = None) -> None:
        # The current key was written. `before` is what was there, with its time. Removes a few
        # expired entries, of any key.
        index = self._index
        if (
            before is not None
            and before is not MISSING
            and index.quiet_from_ms <= before[0] <= now_ms < index.quiet_until_ms
        ):
            return
        for namespace, key in index.written(self._namespace, self._backend.current_key, now_ms):
            self._settle(namespace, key, now_ms)


class TimedValueView(TimedView, ValueView):
    """`ValueState` with a time to live."""

    __slots__ = ()

    def value(self) -> Any:
        stored = self._entries.get(self._backend.current_key, MISSING)
        if stored is not MISSING:
            if not self._refreshes and self._now_ms() - stored[0] < self._ttl_ms:
                return stored[1]
            stored = self._read()
            if stored is not MISSING:
                return stored[1]
        default = self._default
        return default if type(default) in ATOMS else copy_of_default(default)

    def update(self, value: Any) -> None:
        if value is None:
            self.clear()
            return
        key, now = self._backend.current_key, self._now_ms()
        if (dirty := self._dirty) is not None and key not in dirty:
            dirty[key] = key in self._entries
        index = self._index
        since = index.quiet_from_ms
        # The former value is read from memory only: `SweepIndex` has no quiet time.
        before = self._entries.get(key) if since <= now < index.quiet_until_ms else None
        self._store[key] = now, value
        if before is not None and since <= before[0] <= now:
            return
        # Does the same as `_written`, inline.
        for namespace, ended in index.written(self._namespace, key, now):
            self._settle(namespace, ended, now)

    def show(self, stored: Any) -> Any:
        left = self.visible(stored)
        return MISSING if left is MISSING else left[1]


class TimedListView(TimedView, ListView):
    """`ListState` with a time to live for each element."""

    __slots__ = ()

    def get(self) -> list[Any]:
        stored = self._read()
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
        left = self.visible(stored)
        return MISSING if left is MISSING else [value for _, value in left]

    def alive(self, stored: Any, now_ms: int) -> Any:
        ended = now_ms - self._ttl_ms
        if all(written_ms > ended for written_ms, _ in stored):
            return stored
        return [element for element in stored if element[0] > ended] or MISSING

    def times(self, stored: Any) -> Iterable[int]:
        return {written_ms: None for written_ms, _ in stored}

    def refreshed(self, stored: Any, now_ms: int) -> Any:
        ended = now_ms - self._ttl_ms
        return [element if element[0] <= ended else (now_ms, element[1]) for element in stored]

    def _append(self, values: list[Any]) -> None:
        # Expired elements stay until they are read or the index finds them. Searching for them here
        # would examine the whole list each time.
        now = self._now_ms()
        self.extend([(now, value) for value in values])
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
        now = self._now_ms()
        if now - entry[0] >= self._ttl_ms:
            if self._returns_expired:
                return entry[1]
            self.remove(key)
            return default
        if self._refreshes and now > entry[0]:
            self.put(key, entry[1])
        return entry[1]

    def put(self, key: Any, value: Any) -> None:
        now = self._now_ms()
        current = self._backend.current_key
        if (dirty := self._dirty) is not None and current not in dirty:
            dirty[current] = current in self._entries
        stored = self._entries.get(current)
        before = None
        if stored is None:
            self._store[current] = {key: (now, value)}
        else:
            before = stored.get(key)
            stored[key] = (now, value)
        self._written(now, before)

    def contains(self, key: Any) -> bool:
        return self.get(key, MISSING) is not MISSING

    def keys(self) -> list[Any]:
        stored = self._read()
        return [] if stored is MISSING else list(stored)

    def values(self) -> list[Any]:
        stored = self._read()
        return [] if stored is MISSING else [value for _, value in stored.values()]

    def items(self) -> list[tuple[Any, Any]]:
        stored = self._read()
        return [] if stored is MISSING else [(key, value) for key, (_, value) in stored.items()]

    def is_empty(self) -> bool:
        stored = self._entries.get(self._backend.current_key)
        if stored is None or self._returns_expired:
            return not stored
        # One unexpired entry is enough. Examining all entries of a large map each time would be
        # slow.
        ended = self._now_ms() - self._ttl_ms
        return (
            not any(written_ms > ended for written_ms, _ in stored.values())
            and self._current() is MISSING
        )

    def show(self, stored: Any) -> Any:
        left = self.visible(stored)
        return MISSING if left is MISSING else {key: value for key, (_, value) in left.items()}

    def alive(self, stored: Any, now_ms: int) -> Any:
        ended = now_ms - self._ttl_ms
        if all(written_ms > ended for written_ms, _ in stored.values()):
            return stored
        return {key: entry for key, entry in stored.items() if entry[0] > ended} or MISSING

    def times(self, stored: Any) -> Iterable[int]:
        return {written_ms: None for written_ms, _ in stored.values()}

    def refreshed(self, stored: Any, now_ms: int) -> Any:
        ended = now_ms - self._ttl_ms
        return {
            key: entry if entry[0] <= ended else (now_ms, entry[1]) for key, entry in stored.items()
        }


class TimedReducingView(TimedView, ReducingView):
    """`ReducingState` with a time to live: each `add` refreshes the whole value."""

    __slots__ = ()

    def get(self) -> Any:
        stored = self._read()
        return None if stored is MISSING else stored[1]

    def add(self, value: Any) -> None:
        stored = self._current()
        now = self._now_ms()
        self._put((now, value if stored is MISSING else self._fn(stored[1], value)))
        self._written(now, stored)

    def show(self, stored: Any) -> Any:
        left = self.visible(stored)
        return MISSING if left is MISSING else left[1]


class TimedAggregatingView(TimedView, AggregatingView):
    """`AggregatingState` with a time to live: each `add` refreshes the whole value."""

    __slots__ = ()

    def get(self) -> Any:
        stored = self._read()
        return None if stored is MISSING else self._agg.get_result(stored[1])

    def add(self, value: Any) -> None:
        stored = self._current()
        accumulator = self._agg.create_accumulator() if stored is MISSING else stored[1]
        now = self._now_ms()
        self._put((now, self._agg.add(value, accumulator)))
        self._written(now, stored)

    def show(self, stored: Any) -> Any:
        left = self.visible(stored)
        return MISSING if left is MISSING else self._agg.get_result(left[1])


VIEWS: dict[str, Callable[[Owner, Table, StateDescriptor], View]] = {
    "value": TimedValueView,
    "list": TimedListView,
    "map": TimedMapView,
    "reducing": TimedReducingView,
    "aggregating": TimedAggregatingView,
}
"""Maps the kind of a descriptor to the constructor of its view with a time to live."""

register_namespaced(
    TimedValueView, TimedListView, TimedMapView, TimedReducingView, TimedAggregatingView
)


def convert(table: Table, kind: str, now_ms: int | None) -> None:
    """Adds the write time `now_ms` to the values of an untimed table. If `now_ms` is None, removes
    the times from the values of a timed table.
    """
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
