"""Timers of keys: by event time and by processing time, exactly once each, in a fixed order, part of every checkpoint.

A timer is (timestamp, key, namespace); registering it twice is registering it once. Timers fire in order of their
timestamps, equal timestamps in order of registration. A timer that is registered while others fire, and is due, fires
in the same advance.

Event time is continuous: while a timer fires, `current_watermark` is that timer's timestamp, however far the watermark
jumps. So what a timer sees, and what it registers, does not depend on where batches were cut.

Timers of one timestamp share a bucket, a dict in order of registration, and the heap orders distinct timestamps only:
the thousand keys of a window cost one heap entry, keys are never compared, and a deletion is a dict deletion. A bucket
that has begun to fire is iterated in place: its dict must not change size, so deletions mark and late registrations go
to a second dict beside it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK
from aioflow.core.keygroups import KeyGroupRange, key_group
from aioflow.state.backend import NO_KEY
from aioflow.state.snapshot import TimerSnapshot, check_max_parallelism

__all__ = ["NO_TIMER", "Cancelable", "InternalTimerService", "TimerQueue"]

NO_TIMER = MAX_WATERMARK + 1
"""Above every timestamp: `next_event_time` when there is no timer, so that the fast path is one comparison."""

FIRED_PER_MAIL = 1024
"""Processing-time timers fired in one mail. The rest follows in the next, so that other mail gets its turn."""

Bucket = dict[tuple[Any, Any], bool]


class Cancelable(Protocol):
    """A physical timer."""

    def cancel(self) -> None: ...


class KeyContext(Protocol):
    """What the timers need of a keyed backend."""

    current_key: Any
    max_parallelism: int
    key_group_range: KeyGroupRange


class TimerQueue:
    """Timers of one time domain. Millions are fine; register, delete and pop cost a dict operation and a share of a heap one."""

    __slots__ = ("_buckets", "_firing", "_heap", "_late", "_pending", "next_time")

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._buckets: dict[int, Bucket] = {}
        self._firing: dict[int, Iterator[tuple[tuple[Any, Any], bool]]] = {}
        self._pending: dict[int, int] = {}
        self._late: dict[int, Bucket] = {}
        self.next_time: int = NO_TIMER

    def __len__(self) -> int:
        return sum(1 for _ in self.items())

    def add(self, timestamp: int, key: Any, namespace: Any) -> bool:
        """Whether the timer is new."""
        bucket = self._buckets.get(timestamp)
        if bucket is None:
            self._buckets[timestamp] = {(key, namespace): True}
            heapq.heappush(self._heap, timestamp)
            if timestamp < self.next_time:
                self.next_time = timestamp
            return True
        if timestamp in self._firing:
            if bucket.get((key, namespace)):
                return False
            bucket = self._late.setdefault(timestamp, {})
        size = len(bucket)
        bucket[key, namespace] = True
        return len(bucket) > size

    def delete(self, timestamp: int, key: Any, namespace: Any) -> None:
        """Removes a timer; one that does not exist is no error."""
        bucket = self._buckets.get(timestamp)
        if bucket is None:
            return
        timer = (key, namespace)
        if timestamp in self._firing:
            if bucket.get(timer):
                bucket[timer] = False
                self._one_less(timestamp)
            else:
                self._late.get(timestamp, {}).pop(timer, None)
            return
        bucket.pop(timer, None)
        if not bucket:
            del self._buckets[timestamp]
            self._tidy()

    def pop(self, limit: int) -> tuple[int, Any, Any] | None:
        """Takes the first timer with timestamp <= `limit`: (timestamp, key, namespace), or None."""
        while self.next_time <= limit:
            timestamp = self.next_time
            bucket = self._buckets[timestamp]
            timers = self._firing.get(timestamp)
            if timers is None:
                timers = self._firing[timestamp] = iter(bucket.items())
                self._pending[timestamp] = len(bucket)
            for timer, pending in timers:
                if pending:
                    bucket[timer] = False
                    self._one_less(timestamp)
                    return timestamp, timer[0], timer[1]
        return None

    def items(self) -> Iterator[tuple[int, Any, Any]]:
        """All timers; those of one timestamp in the order in which they will fire."""
        for timestamp, bucket in self._buckets.items():
            for (key, namespace), pending in bucket.items():
                if pending:
                    yield timestamp, key, namespace
            for key, namespace in self._late.get(timestamp, ()):
                yield timestamp, key, namespace

    def _one_less(self, timestamp: int) -> None:
        # A bucket that has begun to fire lost a timer. After its last one come those registered meanwhile.
        self._pending[timestamp] -= 1
        if not self._pending[timestamp]:
            del self._firing[timestamp], self._pending[timestamp]
            late = self._late.pop(timestamp, None)
            if late:
                self._buckets[timestamp] = late
            else:
                del self._buckets[timestamp]
                self._tidy()

    def _tidy(self) -> None:
        # Timestamps whose bucket is gone stay in the heap until they reach its top, or outnumber the others: sessions delete
        # the timer of each element but the last, and would otherwise leave them all behind.
        heap, buckets = self._heap, self._buckets
        if len(heap) > 2 * len(buckets) + 64:
            heap[:] = buckets
            heapq.heapify(heap)
        while heap and heap[0] not in buckets:
            heapq.heappop(heap)
        self.next_time = heap[0] if heap else NO_TIMER


class InternalTimerService:
    """The timers of one operator's subtask. After Flink's InternalTimerServiceImpl.

    `on_event_time` and `on_processing_time` are called with (timestamp, key, namespace) and the backend's current key
    set. `register_physical(timestamp_ms, callback)` asks for `callback(timestamp_ms)` as mail once the wall clock has
    passed it; only one is ever registered, for the earliest processing-time timer.
    """

    def __init__(
        self,
        name: str,
        backend: KeyContext,
        on_event_time: Callable[[int, Any, Any], None],
        on_processing_time: Callable[[int, Any, Any], None],
        register_physical: Callable[[int, Callable[[int], None]], Cancelable],
    ) -> None:
        self.name = name
        self.current_watermark = MIN_WATERMARK
        """The watermark reached; while an event-time timer fires, at least its timestamp."""
        self.on_processing_done: Callable[[], None] | None = None
        """Called after a run of processing-time timers: the place to emit what they gave, as one batch."""
        self._backend = backend
        self._on_event_time = on_event_time
        self._on_processing_time = on_processing_time
        self._register_physical = register_physical
        self._event = TimerQueue()
        self._processing = TimerQueue()
        self._physical: Cancelable | None = None
        self._physical_time = NO_TIMER

    @property
    def next_event_time(self) -> int:
        """Timestamp of the first event-time timer, `NO_TIMER` when there is none."""
        return self._event.next_time

    @property
    def next_processing_time(self) -> int:
        return self._processing.next_time

    def register_event_time_timer(self, key: Any, namespace: Any, timestamp: int) -> None:
        self._event.add(timestamp, key, namespace)

    def delete_event_time_timer(self, key: Any, namespace: Any, timestamp: int) -> None:
        self._event.delete(timestamp, key, namespace)

    def register_processing_time_timer(self, key: Any, namespace: Any, timestamp: int) -> None:
        self._processing.add(timestamp, key, namespace)
        if timestamp < self._physical_time:
            self._schedule()

    def delete_processing_time_timer(self, key: Any, namespace: Any, timestamp: int) -> None:
        # The physical timer stays: it finds nothing due and moves on. Cheaper than moving it at each deletion.
        self._processing.delete(timestamp, key, namespace)

    def pop_due(self, watermark: int) -> tuple[int, Any, Any] | None:
        """Takes the first event-time timer due at `watermark`, as (timestamp, key, namespace), and moves event time to it.

        The current key is set to the timer's. None when all have fired: event time is then `watermark`. A watermark
        below the current one counts as the current one. For operators that run timers themselves; the callback is not
        called.
        """
        if watermark < self.current_watermark:
            watermark = self.current_watermark
        timer = self._event.pop(watermark)
        if timer is None:
            self.current_watermark = watermark
        else:
            # The end of event time is no step of it: it comes once, after all records, wherever batches were cut.
            reached = watermark if watermark == MAX_WATERMARK else timer[0]
            if reached > self.current_watermark:
                self.current_watermark = reached
            self._backend.current_key = timer[1]
        return timer

    def advance_watermark(self, watermark: int, max_timers: int = NO_TIMER) -> bool:
        """Fires what is due at `watermark`, at most `max_timers`. Whether all of it has fired; if not, call again to go on."""
        on_event_time, pop_due = self._on_event_time, self.pop_due
        fired = 0
        try:
            while fired < max_timers:
                timer = pop_due(watermark)
                if timer is None:
                    return True
                fired += 1
                on_event_time(*timer)
        finally:
            if fired:
                self._backend.current_key = NO_KEY
        # The last one may have been the last of all.
        if self._event.next_time <= max(watermark, self.current_watermark):
            return False
        self.current_watermark = max(watermark, self.current_watermark)
        return True

    def event_time_timers(self) -> list[tuple[int, Any, Any]]:
        """All event-time timers as (timestamp, key, namespace) in the order in which they will fire."""
        return sorted(self._event.items(), key=_timestamp)

    def processing_time_timers(self) -> list[tuple[int, Any, Any]]:
        return sorted(self._processing.items(), key=_timestamp)

    def snapshot(self) -> TimerSnapshot:
        """All timers by key group. Between two elements, or between two slices of an advance."""
        return TimerSnapshot(
            self.name,
            self._backend.max_parallelism,
            self.current_watermark,
            self._by_group(self._event),
            self._by_group(self._processing),
        )

    def restore(self, snapshots: Sequence[TimerSnapshot]) -> None:
        """Takes the timers of the backend's key groups out of the snapshots of all former subtasks.

        Event time goes on at the lowest watermark that they had reached. Processing-time timers that are overdue fire
        with the first mail.
        """
        event: list[tuple[int, int, int, Any, Any]] = []
        processing: list[tuple[int, int, int, Any, Any]] = []
        for origin, snapshot in enumerate(snapshots):
            check_max_parallelism(snapshot.max_parallelism, self._backend.max_parallelism, f"timer service {self.name!r}")
            for found, groups in ((event, snapshot.event_time), (processing, snapshot.processing_time)):
                for group, timers in groups.items():
                    if group in self._backend.key_group_range:
                        found.extend((timestamp, order, origin, key, namespace) for timestamp, order, key, namespace in timers)
        for queue, found in ((self._event, event), (self._processing, processing)):
            # The order among equal timestamps is each former subtask's own; the subtask's number breaks ties.
            for timestamp, _, _, key, namespace in sorted(found, key=_place):
                queue.add(timestamp, key, namespace)
        if snapshots:
            self.current_watermark = max(self.current_watermark, min(snapshot.watermark for snapshot in snapshots))
        self._schedule()

    def close(self) -> None:
        """Cancels the physical timer; nothing fires any more."""
        if self._physical is not None:
            self._physical.cancel()
            self._physical = None
        self._physical_time = NO_TIMER

    def _by_group(self, queue: TimerQueue) -> dict[int, list[tuple[int, int, Any, Any]]]:
        groups: dict[int, list[tuple[int, int, Any, Any]]] = {}
        group_of: dict[Any, int] = {}
        max_parallelism = self._backend.max_parallelism
        for order, (timestamp, key, namespace) in enumerate(queue.items()):
            group = group_of.get(key)
            if group is None:
                group = group_of[key] = key_group(key, max_parallelism)
            groups.setdefault(group, []).append((timestamp, order, key, namespace))
        return groups

    def _schedule(self) -> None:
        # Makes the physical timer the one of the earliest processing-time timer.
        earliest = self._processing.next_time
        if earliest != self._physical_time:
            self.close()
            if earliest != NO_TIMER:
                self._physical_time = earliest
                self._physical = self._register_physical(earliest, self._on_physical)

    def _on_physical(self, timestamp_ms: int) -> None:
        self._physical, self._physical_time = None, NO_TIMER
        # Due is what the physical timer stood for, not what the clock says now: the same run fires the same timers.
        fire, pop, backend = self._on_processing_time, self._processing.pop, self._backend
        try:
            for _ in range(FIRED_PER_MAIL):
                timer = pop(timestamp_ms)
                if timer is None:
                    break
                backend.current_key = timer[1]
                fire(*timer)
        finally:
            backend.current_key = NO_KEY
        if self.on_processing_done is not None:
            self.on_processing_done()
        self._schedule()


def _timestamp(timer: tuple[int, Any, Any]) -> int:
    return timer[0]


def _place(timer: tuple[int, int, int, Any, Any]) -> tuple[int, int, int]:
    return timer[:3]
