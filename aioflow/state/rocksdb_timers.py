"""Timers of the RocksDB backend: in memory, as in the heap backend, and rows of the database in a
checkpoint.

Timers stay in the queues, because the next timer must be known without a read, and timers are
small. The cost of a checkpoint is proportional to the timers that were set, deleted or fired since
the last: these become rows of the new files.
"""

from __future__ import annotations

from typing import Any, ClassVar

from aioflow.state.changes import MISSING
from aioflow.state.rocksdb_cache import Cache, Space
from aioflow.state.timers import NO_TIMER, Entry, Timer, TimerQueue

__all__ = ["TimerSpace", "open_queue"]


class TimerSpace(Space):
    """The timers of one service in one time domain: (timestamp, key, namespace) -> order."""

    __slots__ = ("queue",)
    queue: TimerQueue

    is_timers: ClassVar[bool] = True

    def lookup(self, key: Any) -> Any:
        timestamp, inner, namespace = key
        return self.queue.order_of(timestamp, (inner, namespace)) or MISSING

    def on_addition(self, timestamp: int, timer: Timer) -> None:
        self.touch_one((timestamp, *timer))

    def on_removal(self, entry: Entry) -> None:
        key = entry[:3]
        self.touch_one(key)
        self.forget(key)


def open_queue(cache: Cache, name: str) -> TimerSpace:
    """Returns a queue and its space, which notes each change."""
    space = cache.new_space(name, None, TimerSpace)
    space.queue = TimerQueue(name, space.on_removal, space.on_addition)
    space.queue.mark = NO_TIMER
    return space
