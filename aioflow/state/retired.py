"""Frees in slices the objects that a completed checkpoint has made obsolete.

Freeing the keys of a million rows at once would block the loop for a hundred milliseconds. The keys
of a file are stored in tuples, which other objects may share, so only the references to them are
dropped here. The notes of a generation are emptied in place. So a generation must be added only
when no snapshot reads it any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat, starmap
from typing import TYPE_CHECKING, Any

from aioflow.state.heap_keys import KEYS_A_SLICE, SpokenKeys

if TYPE_CHECKING:
    from aioflow.state.changes import Generation
    from aioflow.state.heap_keys import Pace

__all__ = ["Retired"]

FREED_A_KEY = 8
"""Number of references freed in the time in which a snapshot examines one key: about 0.1 us each.
"""

FREED_A_SLICE = FREED_A_KEY * KEYS_A_SLICE


class Retired:
    """A collection of obsolete keys and notes, which `release` frees in slices."""

    __slots__ = ("_notes", "_parts")

    def __init__(self) -> None:
        self._parts: list[Sequence[Any]] = []
        self._notes: list[set[Any] | dict[Any, Any] | list[Any]] = []

    def add_keys(self, void: Iterable[SpokenKeys]) -> None:
        """Adds keys that the files of checkpoints no longer need."""
        for spoken in void:
            self._parts += spoken.tuples()

    def add_generations(self, generations: Iterable[Generation]) -> None:
        """Adds generations that no snapshot reads any more."""
        for generation in generations:
            self._notes += [keys for _, keys in generation.noted()]
            self._notes += [notes.removed for notes in generation.timers.values()]

    async def release(self, pace: Pace) -> None:
        """Frees all added objects. May be called again while it runs."""
        while self._parts:
            freed = 0
            while self._parts and freed < FREED_A_SLICE:
                freed += len(self._parts.pop())
            await pace.looked_at(freed // FREED_A_KEY)
        while self._notes:
            notes = self._notes[-1]
            take: Callable[[], Any] = notes.popitem if isinstance(notes, dict) else notes.pop
            freed = min(len(notes), FREED_A_SLICE)
            deque(
                starmap(take, repeat((), freed)), maxlen=0
            )  # The fastest way to call `take` for each.
            if not notes:
                self._notes.pop()
            await pace.looked_at(1 + freed // FREED_A_KEY)
