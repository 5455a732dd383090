"""Timers of keys by event time and by processing time: each fires exactly once, in a fixed order,
and is part of every checkpoint.

A timer is (timestamp, key, namespace); a second registration of the same timer has no effect.
Timers fire in order of their timestamps, equal timestamps in order of registration. A timer that is
registered while others fire, and is due, fires in the same advance.

Event time is continuous: while a timer fires, `current_watermark` is that timer's timestamp,
however far the watermark jumps. So the event time that a timer observes, and the timers that it
registers, do not depend on the borders of batches.

Timers of one timestamp share a bucket, a dict in order of registration; the heap orders only
distinct timestamps. So the thousand keys of a window cost one heap entry, keys are never compared,
and a deletion is a dict deletion. A bucket that has begun to fire is iterated in place. Its dict
must not change size, so deletions mark entries and late registrations go to a second dict. For a
snapshot a bucket is a namespace of a table, which is dropped when its timestamp has fired.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK
from aioflow.state.backend import NO_KEY
from aioflow.state.burial import bury
from aioflow.state.changes import MISSING, ChangeLog, Space
from aioflow.state.format import TIMERS
from aioflow.state.snapshot import TableMeta

__all__ = ["NO_TIMER", "Cancelable", "InternalTimerService", "TimerQueue"]

NO_TIMER = MAX_WATERMARK + 1
"""Value of `next_event_time` without a timer: above every timestamp, so that the fast path is one
comparison.
"""

FIRED_PER_MAIL = 1024
"""Number of processing-time timers fired in one mail.

Further due timers fire in the next mail, so that other mail runs in between.
"""

Timer = tuple[Any, Any]
"""(key, namespace)"""


class Cancelable(Protocol):
    """The interface of a timer of the runtime that can be cancelled."""

    def cancel(self) -> None: ...


class TimerBackend(Protocol):
    """The interface that timers use of a keyed backend."""

    current_key: Any

    def attach_timers(self, service: InternalTimerService) -> None:
        """Makes the timers and the event time of `service` part of every snapshot.

        Passes the restored timers to the service.
        """


class Bucket(Space):
    """The timers of one timestamp: (key, namespace) -> order of registration, 0 once fired."""

    __slots__ = ("firing", "late", "pending")

    def __init__(self, table: Any, timestamp: int) -> None:
        super().__init__(table, timestamp, notes_births=True)
        self.firing: Iterator[tuple[Timer, int]] | None = None
        self.pending = 0
        """Number of timers under iteration that have not fired."""
        self.late: dict[Timer, int] | None = None

    def lookup(self, keys: Sequence[Timer]) -> list[Any]:
        held, late = self.entries, self.late or {}
        return [held.get(timer) or late.get(timer) or MISSING for timer in keys]

    def held(self, key: Timer) -> Any:
        return self.entries.get(key) or (self.late and self.late.get(key)) or MISSING

    def keys(self, start: int, count: int) -> list[Timer]:
        held = [*self.entries, *self.late] if self.late else self.entries
        return list(islice(held, start, start + count))

    def release(self) -> None:
        super().release()
        late, self.late = self.late, None
        if late:
            bury(late)


class TimerQueue:
    """Timers of one time domain.

    Suited to millions of timers: register, delete and pop cost a few dict operations and a share of
    a heap operation.
    """

    __slots__ = ("_buckets", "_heap", "_log", "meta", "name", "next_time", "order", "popped")

    def __init__(self, log: ChangeLog | None = None, name: str = "") -> None:
        self.name = name
        self.meta = TableMeta(TIMERS)
        self.order = 0
        """Registration number of the last timer."""
        self.popped = 0
        """Number of timers that were popped because they were due."""
        self._log = ChangeLog() if log is None else log
        self._heap: list[int] = []
        self._buckets: dict[int, Bucket] = {}
        self.next_time: int = NO_TIMER

    def __len__(self) -> int:
        return sum(1 for _ in self.items())

    def add(self, timestamp: int, key: Any, namespace: Any) -> bool:
        """Adds the timer and returns whether it is new."""
        timer = (key, namespace)
        bucket = self._buckets.get(timestamp)
        if bucket is None:
            bucket = self._bucket(timestamp)
            held = bucket.entries
        elif bucket.firing is None:
            held = bucket.entries
        else:
            if bucket.entries.get(timer):
                return False
            if bucket.late is None:
                bucket.late = {}
            held = bucket.late
        if timer in held:
            return False
        if bucket.born < self._log.since:
            self._log.touch_one(bucket, timer)
        self.order = held[timer] = self.order + 1
        return True

    def delete(self, timestamp: int, key: Any, namespace: Any) -> None:
        """Removes a timer; a missing timer is no error."""
        bucket = self._buckets.get(timestamp)
        if bucket is None:
            return
        timer = (key, namespace)
        if bucket.firing is not None:
            if bucket.entries.get(timer):
                self._spend(bucket, timer)
            elif bucket.late and timer in bucket.late:
                if bucket.born < self._log.since:
                    self._log.touch_one(bucket, timer)
                del bucket.late[timer]
                self._log.forget(bucket, timer)
        elif timer in bucket.entries:
            if bucket.born < self._log.since:
                self._log.touch_one(bucket, timer)
            del bucket.entries[timer]
            self._log.forget(bucket, timer)
            if not bucket.entries:
                self._drop(bucket)

    def pop(self, limit: int) -> tuple[int, Any, Any] | None:
        """Removes and returns the first timer (timestamp, key, namespace) up to `limit`, or returns
        None.
        """
        while self.next_time <= limit:
            timestamp = self.next_time
            bucket = self._buckets[timestamp]
            timers = bucket.firing
            if timers is None:
                timers = bucket.firing = iter(bucket.entries.items())
                bucket.pending = len(bucket.entries)
            for timer, order in timers:
                if order:
                    self.popped += 1
                    self._spend(bucket, timer)
                    return timestamp, timer[0], timer[1]
        return None

    def take_all(self) -> Iterator[tuple[int, Any, Any]]:
        """Removes and yields the present timers, one by one, in firing order.

        Timers that are added meanwhile stay. Each timer stays in the queue until it is yielded, so
        a timer that is deleted before is not yielded.
        """
        newest = self.order
        for timestamp in sorted(self._buckets):
            bucket = self._buckets.get(timestamp)
            if bucket is None:
                continue
            for timer in [*bucket.entries, *(bucket.late or ())]:
                order = bucket.entries.get(timer) or (bucket.late or {}).get(timer)
                if order and order <= newest:
                    self.delete(timestamp, *timer)
                    self.popped += 1
                    yield timestamp, *timer

    def items(self) -> Iterator[tuple[int, Any, Any]]:
        """Yields all timers; those of one timestamp in firing order."""
        for timestamp, bucket in self._buckets.items():
            for (key, namespace), order in bucket.entries.items():
                if order:
                    yield timestamp, key, namespace
            for key, namespace in bucket.late or ():
                yield timestamp, key, namespace

    def spaces(self) -> list[Space]:
        """Returns the buckets, for a snapshot."""
        return list(self._buckets.values())

    def find(self, timestamp: int) -> Bucket | None:
        return self._buckets.get(timestamp)

    def adopt(self, timestamp: int, entries: dict[Timer, int]) -> Bucket:
        """Adds restored timers of `timestamp`, in firing order, without noting a change."""
        bucket = self._bucket(timestamp)
        bucket.entries = entries
        self.order = max(self.order, *entries.values())
        return bucket

    def _bucket(self, timestamp: int) -> Bucket:
        bucket = self._buckets[timestamp] = Bucket(self, timestamp)
        self._log.born(bucket)
        heapq.heappush(self._heap, timestamp)
        if timestamp < self.next_time:
            self.next_time = timestamp
        return bucket

    def _spend(self, bucket: Bucket, timer: Timer) -> None:
        # A bucket that has begun to fire loses a timer. After its last timer, those registered
        # meanwhile fire.
        if noted := bucket.born < self._log.since:
            self._log.touch_one(bucket, timer)
        bucket.entries[timer] = 0
        if noted:
            self._log.forget(bucket, timer)
        bucket.pending -= 1
        if not bucket.pending:
            bucket.firing = None
            if bucket.late:
                spent, bucket.entries, bucket.late = bucket.entries, bucket.late, None
                bury(spent)
            else:
                self._drop(bucket)

    def _drop(self, bucket: Bucket) -> None:
        # Timestamps whose bucket is gone stay in the heap until they reach its top, or outnumber
        # the others: sessions delete the timer of each element but the last, and would otherwise
        # leave them all behind.
        heap, buckets = self._heap, self._buckets
        del buckets[bucket.namespace]
        self._log.drop(bucket)
        if len(heap) > 2 * len(buckets) + 64:
            heap[:] = buckets
            heapq.heapify(heap)
        while heap and heap[0] not in buckets:
            heapq.heappop(heap)
        self.next_time = heap[0] if heap else NO_TIMER


class InternalTimerService:
    """The timers of one operator's subtask. After Flink's InternalTimerServiceImpl.

    `on_event_time` and `on_processing_time` are called with (timestamp, key, namespace), and with
    the backend's current key set. `register_physical(timestamp_ms, callback)` schedules
    `callback(timestamp_ms)` as mail after the wall clock has passed the timestamp. At most one
    physical timer is registered, for the earliest processing-time timer.
    """

    def __init__(
        self,
        name: str,
        backend: TimerBackend,
        on_event_time: Callable[[int, Any, Any], None],
        on_processing_time: Callable[[int, Any, Any], None],
        register_physical: Callable[[int, Callable[[int], None]], Cancelable],
    ) -> None:
        self.name = name
        self.current_watermark = MIN_WATERMARK
        """The watermark reached; while an event-time timer fires, at least its timestamp."""
        self.on_processing_done: Callable[[], None] | None = None
        """Called after a run of processing-time timers, to emit their output as one batch."""
        self._backend = backend
        self._on_event_time = on_event_time
        self._on_processing_time = on_processing_time
        self._register_physical = register_physical
        self._event = TimerQueue()
        self._processing = TimerQueue()
        self._physical: Cancelable | None = None
        self._physical_time = NO_TIMER
        backend.attach_timers(self)

    @property
    def next_event_time(self) -> int:
        """Timestamp of the first event-time timer, `NO_TIMER` if there is none."""
        return self._event.next_time

    @property
    def next_processing_time(self) -> int:
        return self._processing.next_time

    @property
    def fired(self) -> int:
        """Number of timers that have fired, in both domains, since the start or the restore."""
        return self._event.popped + self._processing.popped

    def register_event_time_timer(self, key: Any, namespace: Any, timestamp: int) -> None:
        self._event.add(timestamp, key, namespace)

    def delete_event_time_timer(self, key: Any, namespace: Any, timestamp: int) -> None:
        self._event.delete(timestamp, key, namespace)

    def register_processing_time_timer(self, key: Any, namespace: Any, timestamp: int) -> None:
        self._processing.add(timestamp, key, namespace)
        if timestamp < self._physical_time:
            self._schedule()

    def delete_processing_time_timer(self, key: Any, namespace: Any, timestamp: int) -> None:
        # The physical timer stays: it finds nothing due and moves on. Cheaper than moving it at
        # each deletion.
        self._processing.delete(timestamp, key, namespace)

    def pop_due(self, watermark: int) -> tuple[int, Any, Any] | None:
        """Pops the first event-time timer due at `watermark`, and advances event time to it.

        Returns (timestamp, key, namespace) and sets the current key. Returns None when all have
        fired: event time is then `watermark`. A watermark below the current one counts as the
        current one. For operators that run timers themselves; the callback is not called.
        """
        if watermark < self.current_watermark:
            watermark = self.current_watermark
        timer = self._event.pop(watermark)
        if timer is None:
            self.current_watermark = watermark
        else:
            # The end of event time is handled once, after all records, independent of the borders
            # of batches.
            reached = watermark if watermark == MAX_WATERMARK else timer[0]
            if reached > self.current_watermark:
                self.current_watermark = reached
            self._backend.current_key = timer[1]
        return timer

    def take_waiting(self) -> Iterator[tuple[int, Any, Any]]:
        """Removes and yields the present processing-time timers in order, because no clock will
        reach them.

        Sets the current key to that of the timer; does not call the callback. Timers that are
        registered meanwhile are kept and not yielded.
        """
        for timer in self._processing.take_all():
            self._backend.current_key = timer[1]
            yield timer

    def advance_watermark(self, watermark: int, max_timers: int = NO_TIMER) -> bool:
        """Fires the timers that are due at `watermark`, at most `max_timers`.

        Returns whether all of them have fired; if not, call again to continue.
        """
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
        # The last timer that fired may have been the last one in the queue.
        if self._event.next_time <= max(watermark, self.current_watermark):
            return False
        self.current_watermark = max(watermark, self.current_watermark)
        return True

    def event_time_timers(self) -> list[tuple[int, Any, Any]]:
        """Returns all event-time timers as (timestamp, key, namespace) in firing order."""
        return sorted(self._event.items(), key=_timestamp)

    def processing_time_timers(self) -> list[tuple[int, Any, Any]]:
        return sorted(self._processing.items(), key=_timestamp)

    def attach(self, event: TimerQueue, processing: TimerQueue, watermark: int) -> None:
        """Takes over these timers and the event time `watermark`, so that late records stay late.

        After a drain, the watermark stands at the end of time. The service then resets it, because
        otherwise every later record would be late. The backend calls this for each new service.
        Overdue processing-time timers fire with the first mail.
        """
        self._event, self._processing = event, processing
        self.current_watermark = MIN_WATERMARK if watermark == MAX_WATERMARK else watermark
        self._schedule()

    def close(self) -> None:
        """Cancels the physical timer; no timer fires any more."""
        if self._physical is not None:
            self._physical.cancel()
            self._physical = None
        self._physical_time = NO_TIMER

    def _schedule(self) -> None:
        # Sets the physical timer to the earliest processing-time timer.
        earliest = self._processing.next_time
        if earliest != self._physical_time:
            self.close()
            if earliest != NO_TIMER:
                self._physical_time = earliest
                self._physical = self._register_physical(earliest, self._on_physical)

    def _on_physical(self, timestamp_ms: int) -> None:
        self._physical, self._physical_time = None, NO_TIMER
        # Timers are due by the physical timer's timestamp, not by the clock, so that equal runs
        # fire equal timers.
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
