"""Configures Python's garbage collector for a process that runs flows, and freezes long-lived
objects.

Workers use these settings, `af.run` uses them until its flow ends, and a service from its call of
`af.tune_gc` on.

A full collection walks every container in the process, at 20 to 90 ns each. With ten million
accumulators, this blocks the loop for most of a second. Python starts a full collection each time
the number of containers has grown by a quarter. So objects that survive a slow full collection are
frozen, and the next collection walks new objects only.

Frozen objects that later become cyclic garbage would never be found. So from time to time a
complete collection walks everything. In a process that makes such garbage, the complete collection
runs once the frozen part has doubled. The complete collection runs much later in a process whose
collections find next to no garbage. Processes with large state are typically of this kind, because
they hold plain values.

A young collection walks the objects made since the last one. The interpreter starts one when
allocations exceed deallocations by ten thousand. If each record replaces an accumulator,
allocations hardly exceed deallocations, so the interpreter starts no young collection for a second
or more. By then the objects are out of the processor's cache, and the collection takes 60 ms. So
this module collects the young generation itself every fifty milliseconds, while most of these
objects are still cached. If fewer than ten thousand objects are made in that time, the interpreter
never collects the older generations either. So this module also runs full collections from time to
time.

The state of an ended task, such as one that restarts, becomes cyclic garbage too. `look_everywhere`
requests a collection that finds it.

Invariant: the frozen part is at most `LATER` times its size after the last complete collection, or
takes at most `LATER * COMPLETE_FROM_NS` to walk.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Protocol

from aioflow.core.contexts import contextmanager
from aioflow.core.system_host import SystemHost

__all__ = [
    "COLLECTED_AFTER",
    "COMPLETE_FROM_NS",
    "FREEZE_FROM_NS",
    "FULL_EVERY_S",
    "LATER",
    "YOUNG",
    "Collector",
    "Generations",
    "collector_of_process",
    "install_collector",
    "tune_gc",
    "tuned_gc",
]

logger = logging.getLogger(__name__)

COLLECTED_AFTER = (10_000, 10, 2)
"""Thresholds of the interpreter's collector in a worker process.

A batch makes thousands of tuples that live until the next batch, and a window makes as many
accumulators. With Python's own thresholds (700, 10, 10), a window of rows costs a ninth more. With
the thresholds here, a full collection comes after 300,000 surviving objects, and walks only these
objects, in 30 to 40 ms. A process that the engine does not own keeps its thresholds.
"""

FREEZE_FROM_NS = 5_000_000
"""If a full collection takes at least this long, its survivors are frozen. A faster collection does
not disturb the loop.
"""

COMPLETE_FROM_NS = 100_000_000
"""Walking time of the frozen part from which a complete collection may walk it again."""

LATER = 16
"""Growth factor of the frozen part in a process that makes next to no cyclic garbage."""

OBJECT_NS = 50
"""Approximate time to walk one object."""

YOUNG_EVERY_S = 0.05
"""Interval of young collections. At 50,000 records a second, each takes half a millisecond."""

FULL_EVERY_S = 10.0
"""Longest time between two full collections. A task that restarts leaves cyclic garbage."""

PYTHONS_OWN = ((700, 10, 10), (2_000, 10, 10), (2_000, 10, 0))
"""Thresholds of the interpreter's collector in the supported versions of Python."""

YOUNG, FULL = 0, 2
"""The youngest and the oldest generation."""


class Generations(Protocol):
    """The part of module `gc` that a `Collector` uses."""

    def freeze(self) -> None: ...
    def unfreeze(self) -> None: ...
    def collect(self, generation: int, /) -> int: ...


class Collector:
    """Observes each collection, and decides which objects the next collections walk.

    The method `hear` has to be added to `gc.callbacks`.
    """

    def __init__(self, perf_ns: Callable[[], int], generations: Generations = gc) -> None:
        self._perf_ns = perf_ns
        self._generations = generations
        self._begun_ns = 0
        self._is_complete = False
        self._makes_garbage = False
        """Whether collections find cyclic garbage."""
        self._aside_ns = 0
        """Time in ns of the full collections since the last complete one, as far as their survivors
        were frozen."""
        self._complete_ns = COMPLETE_FROM_NS
        """Duration of the last complete collection in ns, at least `COMPLETE_FROM_NS`."""
        self._must_be_complete = False

    def look_everywhere(self) -> None:
        """Makes the next full collection a complete one, because many frozen objects may be garbage
        now."""
        self._must_be_complete = True

    async def collect(self) -> None:
        """Collects the young generation often, and all generations from time to time. Runs until
        cancelled."""
        while True:
            for _ in range(round(FULL_EVERY_S / YOUNG_EVERY_S) - 1):
                await asyncio.sleep(YOUNG_EVERY_S)
                self._generations.collect(YOUNG)
            await asyncio.sleep(YOUNG_EVERY_S)
            self._generations.collect(FULL)

    def hear(self, phase: str, info: dict[str, int]) -> None:
        """Notes that a garbage collection has begun (`phase` is "start") or ended."""
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


def install_collector() -> Collector:
    """Sets the thresholds of this process, and returns the collector that observes it from now
    on.
    """
    gc.set_threshold(*COLLECTED_AFTER)
    collector = Collector(SystemHost().clock.perf_ns)
    gc.callbacks.append(collector.hear)
    return collector


def collector_of_process() -> Collector | None:
    """Returns the collector that observes this process, or None."""
    for callback in gc.callbacks:
        owner = getattr(callback, "__self__", None)
        if isinstance(owner, Collector):
            return owner
    return None


def tune_gc() -> None:
    """Sets Python's garbage collector for a process that holds many objects and runs flows.

    With Python's own settings, the collector walks all objects of the process again and again,
    because flows make many objects. This function collects once and freezes the remaining objects,
    so that later collections walk new objects only. From then on objects that survive a slow full
    collection are frozen, too. Frozen objects are walked again from time to time, so cyclic garbage
    among them is still freed. Objects without cycles are freed at once, as always. The settings
    hold until the process ends; another call freezes the objects that were made since.

    `af.run`, `aioflow run` and workers choose these settings by themselves. In a service that runs
    flows itself, nothing changes without this call.
    """
    if collector_of_process() is None:
        # The collection below walks everything, so the next complete one is not due soon.
        install_collector().look_everywhere()
    gc.collect()
    gc.freeze()
    _log_settings("af.tune_gc()")


@contextmanager
def tuned_gc(who: str) -> Iterator[None]:
    """Sets the collector of this process inside the block, and restores it afterwards.

    If the program has chosen settings of its own, or has called `tune_gc`, they stay as they are.
    `who` is the beginning of the log record.
    """
    before = gc.get_threshold()
    if before not in PYTHONS_OWN or not gc.isenabled() or collector_of_process() is not None:
        logger.info("%s leaves the garbage collector as the program has set it: %s", who, before)
        yield
        return
    frozen_before = gc.get_freeze_count()
    # No collection before, unlike `tune_gc`: in a program with large data it takes longer than the
    # start of the flow. The first complete collection finds the garbage.
    gc.freeze()
    collector = install_collector()
    _log_settings(who)
    try:
        yield
    finally:
        gc.callbacks.remove(collector.hear)
        gc.set_threshold(*before)
        if not frozen_before:
            gc.unfreeze()


def _log_settings(who: str) -> None:
    logger.info(
        "%s has set the garbage collector: thresholds %s instead of Python's own, %d objects are "
        "frozen",
        who,
        gc.get_threshold(),
        gc.get_freeze_count(),
    )
