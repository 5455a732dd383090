"""What the garbage collector walks in a worker process: state that stays is put aside, and not
walked again and again.

A full collection walks every container in the process, 20 to 90 ns each: with ten million
accumulators it holds the loop for most of a second, each time their number has grown by a quarter.
So what survives a full collection that took long is frozen, and the next one walks what is new
only.

Garbage in cycles that was frozen before it became garbage would never be found. So from time to
time one collection walks everything: when as much was put aside as there was before, in a process
that makes such garbage; much later in one whose collections find next to none, as it is where state
holds values, and it is that process which has the large state.

A collection of the young walks what was made since the last one, and is due when ten thousand more
objects were made than went. Where each record puts an accumulator in the place of another that
never comes, or after a second's records, cold by then: 60 ms. So the young are collected by hand
all the while, fifty milliseconds' worth at a time, most of which are still in the processor's
cache. Where fewer than ten thousand objects are made in that time, the interpreter never finds a
collection due, of the older ones neither: they are collected by hand too, from time to time.

What ends at once, as the state of a task that is started anew does, is in cycles too: it is looked
for when it ends.

Invariant: what is frozen is at most `LATER` times what it was after the last complete collection,
or what takes `LATER * COMPLETE_FROM_NS`.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Protocol

__all__ = [
    "COMPLETE_FROM_NS",
    "FREEZE_FROM_NS",
    "FULL_EVERY_S",
    "LATER",
    "YOUNG",
    "Collector",
    "Generations",
    "collector_of_process",
]

FREEZE_FROM_NS = 5_000_000
"""A full collection that takes less holds nobody up, and what it found stays in sight."""

COMPLETE_FROM_NS = 100_000_000
"""So long must it have taken to walk what was put aside, before it is walked again."""

LATER = 16
"""So many times as much is put aside in a process that makes next to no garbage in cycles."""

OBJECT_NS = 50
"""To walk one object takes about so long."""

YOUNG_EVERY_S = 0.05
"""What 50,000 records in a second leave by then is half a millisecond's work."""

FULL_EVERY_S = 10.0
"""Longest time between two full collections. A task that restarts leaves garbage in cycles."""

YOUNG, FULL = 0, 2
"""The youngest and the oldest generation."""


class Generations(Protocol):
    """What can be done with them: the module `gc`."""

    def freeze(self) -> None: ...
    def unfreeze(self) -> None: ...
    def collect(self, generation: int, /) -> int: ...


class Collector:
    """Hears of each collection (`hear` is for `gc.callbacks`) and decides what the next ones
    walk.
    """

    def __init__(self, perf_ns: Callable[[], int], generations: Generations = gc) -> None:
        self._perf_ns = perf_ns
        self._generations = generations
        self._begun_ns = 0
        self._is_complete = False
        self._makes_garbage = False
        """Whether collections find garbage in cycles."""
        self._aside_ns = 0
        """What it took to walk all that was put aside since the last complete collection."""
        self._complete_ns = COMPLETE_FROM_NS
        """What that one took, or this."""
        self._must_be_complete = False

    def look_everywhere(self) -> None:
        """Much that was put aside may be garbage now: the next full collection walks all of it."""
        self._must_be_complete = True

    async def collect(self) -> None:
        """Collect the young generation often, and all generations from time to time, without
        end.
        """
        while True:
            for _ in range(round(FULL_EVERY_S / YOUNG_EVERY_S) - 1):
                await asyncio.sleep(YOUNG_EVERY_S)
                self._generations.collect(YOUNG)
            await asyncio.sleep(YOUNG_EVERY_S)
            self._generations.collect(FULL)

    def hear(self, phase: str, info: dict[str, int]) -> None:
        """A collection begins (`phase` is "start") or has ended."""
        if info["generation"] != FULL:
            return
        if phase == "start":
            due_ns = self._complete_ns * (1 if self._makes_garbage else LATER)
            self._is_complete = self._must_be_complete or self._aside_ns >= due_ns
            if self._is_complete:
                self._generations.unfreeze()
            self._begun_ns = self._perf_ns()
            return
        spent_ns = self._perf_ns() - self._begun_ns
        garbage_ns = info["collected"] * OBJECT_NS
        if self._is_complete:
            self._makes_garbage = not self._must_be_complete and garbage_ns * 10 >= spent_ns
            self._must_be_complete = False
            self._complete_ns, self._aside_ns = max(spent_ns, COMPLETE_FROM_NS), 0
            self._generations.freeze()
        elif spent_ns >= FREEZE_FROM_NS:
            self._makes_garbage |= garbage_ns * 100 >= spent_ns
            self._aside_ns += spent_ns
            self._generations.freeze()


def collector_of_process(perf_ns: Callable[[], int]) -> Collector:
    """From now on, and until the process ends: only for one that is ours alone."""
    collector = Collector(perf_ns)
    gc.callbacks.append(collector.hear)
    return collector
