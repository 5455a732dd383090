"""Timers beside RocksDB: in memory, as with the heap, and rows of the database in a checkpoint.

They stay in the queues, since what fires next must be known without a read, and a timer is small.
What a checkpoint costs is in proportion to the timers that were set, deleted or fired since the
last: these become rows, and so part of the files that are new.
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
        # 0 stands for one that has fired.
        return bucket.entries.get(timer) or (bucket.late or {}).get(timer) or MISSING


class _Log:
    """What a queue takes for its log of changes: each one makes a timer dirty."""

    __slots__ = ("_space",)

    since = 0
    """All buckets are as old as restored ones: each timer is noted."""

    def __init__(self, space: TimerSpace) -> None:
        self._space = space

    def born(self, bucket: Any) -> None:
        """Its timers are noted all the same."""

    def touch_one(self, bucket: Any, timer: tuple[Any, Any]) -> None:
        self._space.touch_one((bucket.namespace, *timer))

    def forget(self, bucket: Any, timer: tuple[Any, Any]) -> None:
        self._space.forget((bucket.namespace, *timer))

    def drop(self, bucket: Any) -> None:
        """All of its timers were touched before they went."""


def open_queue(cache: Cache, name: str) -> TimerSpace:
    """A queue and its space."""
    space = cache.new_space(name, None, TimerSpace)
    # It uses no more of a ChangeLog than this.
    space.queue = TimerQueue(_Log(space), name)  # type: ignore[arg-type]
    return space
