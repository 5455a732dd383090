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
from aioflow.state.timers import TimerQueue

__all__ = ["TimerSpace", "open_queue"]


class TimerSpace(Space):
    """The timers of one service in one time domain: (timestamp, key, namespace) -> order."""

    __slots__ = ("queue",)
    queue: TimerQueue

    is_timers: ClassVar[bool] = True

    def lookup(self, key: Any) -> Any:
        timestamp, inner, namespace = key
        bucket, timer = self.queue.find(timestamp), (inner, namespace)
        if bucket is None:
            return MISSING
        # 0 stands for a timer that has fired.
        return bucket.entries.get(timer) or (bucket.late or {}).get(timer) or MISSING


class _Log:
    """A log of the changes of a timer queue. Each change makes the row of the timer dirty."""

    __slots__ = ("_space",)

    since = 0
    """All buckets count as old as restored ones, so that each timer is noted."""

    def __init__(self, space: TimerSpace) -> None:
        self._space = space

    def born(self, bucket: Any) -> None:
        """Does nothing: the timers of a new bucket are noted one by one."""

    def touch_one(self, bucket: Any, timer: tuple[Any, Any]) -> None:
        self._space.touch_one((bucket.namespace, *timer))

    def forget(self, bucket: Any, timer: tuple[Any, Any]) -> None:
        self._space.forget((bucket.namespace, *timer))

    def drop(self, bucket: Any) -> None:
        """Does nothing: all timers of the bucket were touched before they were removed."""


def open_queue(cache: Cache, name: str) -> TimerSpace:
    """Returns a timer queue, and the space that stores its timers."""
    space = cache.new_space(name, None, TimerSpace)
    # The queue uses only these methods of a ChangeLog.
    space.queue = TimerQueue(_Log(space), name)  # type: ignore[arg-type]
    return space
