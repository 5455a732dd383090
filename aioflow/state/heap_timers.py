"""The timers of the heap backend, as snapshots read them.

A timer never changes between its registration and its removal, and registrations are numbered. So a
generation (see `changes`) notes only the number of the last registration before it, and the older
timers that were removed during it. The timers of a past moment are the current timers that were
registered by then, and the timers removed since then. Timers need no copy: a snapshot collects the
objects that the queue holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

from aioflow.state.changes import MISSING, Generation, Space, TimerNotes, registered_before
from aioflow.state.timers import Entry, Timer, TimerQueue

__all__ = ["TimerPart", "TimerSpace", "columns_of", "entries_of", "timers_before"]

TIMERS_A_PART = 2048
"""Number of timers examined at once."""

_TIMESTAMP = itemgetter(0)
_KEY = itemgetter(1)
_TIMER = itemgetter(slice(1, 3))
_ORDER = itemgetter(3)


class TimerSpace(Space):
    """All timers of one timer service in one time domain, as a `Space` whose keys are the
    registrations of timers.
    """

    __slots__ = ("_removed", "queue")

    is_timers: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        self.queue = TimerQueue(name, self._on_removal)
        super().__init__(self.queue, None)
        self._removed: dict[int, Entry] = {}

    def turn(self) -> TimerNotes:
        """Begins the notes of a new generation and returns them. The queue fills them from now
        on.
        """
        notes = TimerNotes(self.queue.order)
        self.queue.mark, self.queue.grown, self._removed = notes.mark, notes.grown, notes.removed
        return notes

    def pause(self) -> None:
        """Stops noting removals in the current generation."""
        self.queue.mark, self.queue.grown = 0, None

    def skip(self, keys: Iterable[Entry]) -> None:
        """Makes new registrations get higher numbers than `keys`, the timers that a restored file
        contains.

        Otherwise a removed timer of the file would count as registered after the file was written.
        """
        self.queue.order = max(self.queue.order, *map(_ORDER, keys))

    def columns(self, keys: Sequence[Entry]) -> tuple[Iterable[int], Iterable[Any]]:
        return map(_TIMESTAMP, keys), map(_TIMER, keys)

    def group_keys(self, keys: Sequence[Entry]) -> list[Any]:
        return list(map(_KEY, keys))

    def orders_at(
        self, later: Generation | None, keys: Sequence[Entry], known_after: int
    ) -> list[Any]:
        """Returns the number of each registration in `keys` that existed when generation `later`
        began.

        For a timer that had been removed, the result is `MISSING`. Timers registered after number
        `known_after` are known to exist, and are not looked up.
        """
        orders = list(map(_ORDER, keys))
        if min(orders, default=0) > known_after:
            return orders
        order_of = self.queue.order_of
        removed = list(self._removed_since(later))
        return [
            order
            if order > known_after
            or order_of(timestamp, (key, namespace)) == order
            or any(of.get(order) == entry for of in removed)
            else MISSING
            for entry in keys
            for timestamp, key, namespace, order in (entry,)
        ]

    def registered(
        self, later: Generation | None, after: int, grown: Iterable[int]
    ) -> Iterator[TimerPart]:
        """Yields, in parts, the timers that existed when generation `later` began, and were
        registered after number `after`.

        `grown` are the timestamps that may have got further timers after their first. Between two
        parts timers may be added and removed.
        """
        upto, removed = registered_before(later, self), self._removed_since(later)
        return timers_before(self.queue, upto, removed, after, grown)

    def _removed_since(self, later: Generation | None) -> Iterator[dict[int, Entry]]:
        while later is not None:
            notes = later.timers.get(self)
            if notes is not None and notes.removed:
                yield notes.removed
            later = later.next

    def _on_removal(self, entry: Entry) -> None:
        self._removed[entry[3]] = entry


class Together(NamedTuple):
    """Several timers of one timestamp."""

    timestamp: int
    timers: list[Timer]
    orders: list[int]


TimerPart = list[Entry] | Together
"""Some timers, as a list of entries or a `Together`. The timers never change."""


def timers_before(
    queue: TimerQueue,
    upto: int,
    removed: Iterable[dict[int, Entry]],
    after: int = 0,
    grown: Iterable[int] = (),
) -> Iterator[TimerPart]:
    """Yields the timers with registration numbers above `after` and up to `upto`, in parts.

    `removed` contains the timers that were removed after registration `upto`; it may grow
    meanwhile. A timer that is removed between two parts may be yielded twice. This is rare, because
    the latest timestamps come first, while timers fire from the earliest on. For `grown`, see
    `TimerSpace.registered`.
    """
    timestamps = queue.timestamps(after)
    if after:
        timestamps += sorted(set(grown).difference(timestamps))
    for stop in range(len(timestamps), 0, -TIMERS_A_PART):
        some = timestamps[max(0, stop - TIMERS_A_PART) : stop]
        part, crowded = queue.registered(some, after, upto)
        yield part
        for timestamp in crowded:
            for timers, orders in queue.together_at(timestamp, TIMERS_A_PART, after):
                yield _between(timestamp, timers, orders, after, upto)
    for gone in removed:
        # Timers that are removed from now on were already yielded above.
        entries = list(gone.values())
        for start in range(0, len(entries), TIMERS_A_PART):
            yield [
                entry
                for entry in entries[start : start + TIMERS_A_PART]
                if after < entry[3] <= upto
            ]


def _between(
    timestamp: int, timers: list[Timer], orders: list[int], after: int, upto: int
) -> Together:
    if after or not all(orders) or max(orders) > upto:
        wanted = [after < order <= upto for order in orders]
        timers, orders = list(compress(timers, wanted)), list(compress(orders, wanted))
    return Together(timestamp, timers, orders)


def entries_of(part: TimerPart) -> list[Entry]:
    """Returns the timers of `part` as entries."""
    if isinstance(part, list):
        return part
    timestamp, timers, orders = part
    return [
        (timestamp, key, namespace, order)
        for (key, namespace), order in zip(timers, orders, strict=True)
    ]


def columns_of(part: TimerPart) -> tuple[list[int], list[Any], list[Any], list[int]]:
    """Returns timestamps, keys, namespaces and registration numbers of the timers of `part`."""
    if isinstance(part, list):
        return (
            [timestamp for timestamp, _, _, _ in part],
            [key for _, key, _, _ in part],
            [namespace for _, _, namespace, _ in part],
            [order for _, _, _, order in part],
        )
    timestamp, timers, orders = part
    return (
        [timestamp] * len(timers),
        [key for key, _ in timers],
        [namespace for _, namespace in timers],
        orders,
    )
