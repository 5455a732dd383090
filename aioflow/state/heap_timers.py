"""The timers of the heap backend, as a snapshot sees them.

A timer never changes between its registration and its removal, and registrations are numbered. So a
generation notes only the number of the last registration before it, and the older timers that were
removed in it. The timers of a moment are the present ones registered up to then, and those removed
since. They need no copy: what a snapshot collects is what the queue holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, ClassVar

from aioflow.state.changes import MISSING, Generation, Space, TimerNotes, registered_before
from aioflow.state.timers import Entry, TimerQueue

__all__ = ["TimerSpace"]

TIMERS_A_PART = 512
"""Number of timers examined at once."""

_TIMESTAMP = itemgetter(0)
_KEY = itemgetter(1)
_TIMER = itemgetter(slice(1, 3))
_ORDER = itemgetter(3)


class TimerSpace(Space):
    """All timers of one service in one time domain. Its keys are registrations of timers."""

    __slots__ = ("_removed", "queue")

    is_timers: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        self.queue = TimerQueue(name, self._on_removal)
        super().__init__(self.queue, None)
        self._removed: dict[int, Entry] = {}

    def turn(self) -> TimerNotes:
        """Returns the notes of a generation that begins now, which the queue keeps from now on."""
        notes = TimerNotes(self.queue.order)
        self.queue.mark, self.queue.grown, self._removed = notes.mark, notes.grown, notes.removed
        return notes

    def columns(self, keys: Sequence[Entry]) -> tuple[Iterable[int], Iterable[Any]]:
        return map(_TIMESTAMP, keys), map(_TIMER, keys)

    def group_keys(self, keys: Sequence[Entry]) -> list[Any]:
        return list(map(_KEY, keys))

    def orders_at(
        self, later: Generation | None, keys: Sequence[Entry], known_after: int
    ) -> list[Any]:
        """Returns the order of each registration before generation `later` began.

        Returns `MISSING` for a timer that had been removed. Those registered after `known_after`
        are known to be there.
        """
        order_of = self.queue.order_of
        removed = list(self._removed_since(later))
        return [
            order
            if order > known_after
            or order_of(timestamp, (key, namespace)) == order
            or any(order in of for of in removed)
            else MISSING
            for timestamp, key, namespace, order in keys
        ]

    def registered(
        self, later: Generation | None, after: int, grown: Iterable[int]
    ) -> Iterator[list[Entry]]:
        """Yields in parts the timers before generation `later` that were registered after `after`.

        Each is yielded once. `grown`: timestamps at which other timers may be older. Between two
        parts timers may come and go.
        """
        queue, upto = self.queue, registered_before(later, self)
        timestamps = queue.timestamps(after)
        if after:
            timestamps += sorted(set(grown).difference(timestamps))
        seen: set[int] = set()
        for start in range(0, len(timestamps), TIMERS_A_PART):
            part, crowded = queue.registered(timestamps[start : start + TIMERS_A_PART], after, upto)
            for timestamp in crowded:
                timers = queue.timers_at(timestamp, after)
                for first in range(0, len(timers), TIMERS_A_PART):
                    part += [
                        (timestamp, *timer, order)
                        for timer in timers[first : first + TIMERS_A_PART]
                        if after < (order := queue.order_of(timestamp, timer)) <= upto
                    ]
                    if len(part) >= TIMERS_A_PART:
                        seen.update(map(_ORDER, part))
                        yield part
                        part = []
            seen.update(map(_ORDER, part))
            yield part
        for removed in self._removed_since(later):
            yield [
                entry
                for order, entry in removed.items()
                if after < order <= upto and order not in seen
            ]

    def _removed_since(self, later: Generation | None) -> Iterator[dict[int, Entry]]:
        while later is not None:
            notes = later.timers.get(self)
            if notes is not None and notes.removed:
                yield notes.removed
            later = later.next

    def _on_removal(self, entry: Entry) -> None:
        self._removed[entry[3]] = entry
