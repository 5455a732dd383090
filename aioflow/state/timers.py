"""Timers of keys by event time and by processing time: each fires exactly once, in a fixed order,
and is part of every checkpoint.

A timer is (timestamp, key, namespace); a second registration of the same timer has no effect.
Timers fire in order of their timestamps; timers of equal timestamps in order of registration. A due
timer that is registered while others fire also fires in the same call.

Event time is continuous: while a timer fires, `current_watermark` is that timer's timestamp,
however far the watermark jumps. So the event time that a timer observes, and the timers that it
registers, do not depend on where batches begin and end.

Timers of one timestamp share a bucket, and the heap orders only distinct timestamps. So the
thousand keys of a window cost one heap entry, keys are never compared, and a deletion is a dict
deletion. A bucket with one timer is this timer itself. With several timers it is a dict, in order
of registration. A bucket that has begun to fire is iterated in place. Its dict must not change
size, so deletions mark entries and late registrations go to a second dict.

Each timer has the number of its registration, which only rises. So new timers need no notes for a
snapshot: they are the timers with higher numbers than the last snapshot, in the newest buckets and
in the few older ones that have grown. Only a timer that the last snapshot may contain is reported
when it is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Any, Protocol

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK
from aioflow.state.backend import NO_KEY
from aioflow.state.deferred_free import free_in_slices
from aioflow.state.format import TIMERS
from aioflow.state.snapshot import TableMeta

__all__ = ["NO_TIMER", "Cancelable", "InternalTimerService", "TimerQueue"]

NO_TIMER = MAX_WATERMARK + 1
"""Value of `next_event_time` if there is no timer. It is above every timestamp, so that the fast
path needs one comparison.
"""

FIRED_PER_MAIL = 1024
"""Number of processing-time timers fired in one mail.

Further due timers fire in the next mail, so that other mail runs in between.
"""

FIRED_PER_MAIL_MAX = 16 * FIRED_PER_MAIL
"""Largest number of timers that one mail fires.

The number doubles with each mail that leaves due timers behind. A task takes mail once a turn, and
processes some thousand records in a turn.
"""

MAIL_MS = 20
"""Time in ms after which a mail does not fire another `FIRED_PER_MAIL` timers."""

Timer = tuple[Any, Any]
"""A timer without its timestamp: (key, namespace)."""

DUE_SAMPLED = 256
"""Sample size, in timestamps, for estimating the number of due timers."""

FEW_TIMERS = 8
"""Maximum number of timers in a bucket that are deleted one by one as they fire. In a larger dict,
finding the first entry would be a long search past the deleted ones.
"""

_NONE: dict[Timer, int] = {}
_ALONE = {tuple}

Entry = tuple[int, Any, Any, int]
"""One registration of a timer: (timestamp, key, namespace, order). `order` is the registration
number.
"""


class Cancelable(Protocol):
    """The interface of a timer of the runtime that can be cancelled."""

    def cancel(self) -> None: ...


class TimerBackend(Protocol):
    """The part of a keyed backend's interface that timers use."""

    current_key: Any

    def attach_timers(self, service: InternalTimerService) -> None:
        """Makes the timers and the event time of `service` part of every snapshot.

        Passes the restored timers to the service.
        """


class Firing:
    """The state of a bucket whose timers have begun to fire."""

    __slots__ = ("entries", "late", "left", "pending")

    def __init__(self, entries: dict[Timer, int]) -> None:
        self.entries = entries
        """Maps each timer to its registration number, which becomes 0 once the timer has fired or
        was deleted.
        """
        self.left = iter(entries.items())
        self.pending = len(entries)
        """Number of `entries` that are not 0."""
        self.late: dict[Timer, int] = {}
        """Timers that were registered since the bucket began to fire."""


Bucket = Entry | dict[Timer, int] | Firing
"""The timers of one timestamp: a single timer, several as a dict from timer to registration number,
or a `Firing`.
"""


class TimerQueue:
    """The timers of one time domain, in order.

    Suited to millions of timers: register, delete and pop cost a few dict operations and a share of
    a heap operation.
    """

    __slots__ = (
        "_added",
        "_buckets",
        "_heap",
        "_removed",
        "grown",
        "mark",
        "meta",
        "name",
        "next_time",
        "order",
        "popped",
    )

    def __init__(
        self,
        name: str = "",
        removed: Callable[[Entry], None] | None = None,
        added: Callable[[int, Timer], None] | None = None,
    ) -> None:
        """Makes an empty queue. `added` is called for each new timer. `removed` is called for each
        removed timer whose registration number is at most the attribute `mark`, which snapshots
        set.

        Both callbacks are called before the change.
        """
        self.name = name
        self.meta = TableMeta(TIMERS)
        self.order = 0
        """Registration number of the last timer."""
        self.popped = 0
        """Number of timers that were popped because they were due."""
        self.mark = 0
        self.grown: set[int] | None = None
        """Timestamps of the buckets that got further timers after their first timer. None if these
        timestamps are not noted.
        """
        self._removed = removed
        self._added = added
        self._heap: list[int] = []
        self._buckets: dict[int, Bucket] = {}
        self.next_time: int = NO_TIMER

    def __len__(self) -> int:
        return sum(1 for _ in self.items())

    def add(self, key: Any, namespace: Any, timestamp: int) -> bool:
        """Adds the timer and returns whether it is new."""
        timer = (key, namespace)
        bucket = self._buckets.get(timestamp)
        if bucket is None:
            timer in _NONE  # noqa: B015  # The look-up raises for `NO_KEY`.
            if self._added is not None:
                self._added(timestamp, timer)
            self.order = order = self.order + 1
            # Like `_put`, but inlined.
            self._buckets[timestamp] = (timestamp, key, namespace, order)
            heappush(self._heap, timestamp)
            if timestamp < self.next_time:
                self.next_time = timestamp
            return True
        if isinstance(bucket, tuple):
            held = {bucket[1:3]: bucket[3]}
        elif isinstance(bucket, dict):
            held = bucket
        else:
            if bucket.entries.get(timer):
                return False
            held = bucket.late
        if timer in held:
            return False
        if self._added is not None:
            self._added(timestamp, timer)
        if self.grown is not None:
            self.grown.add(timestamp)
        self.order = held[timer] = self.order + 1
        if isinstance(bucket, tuple):
            self._buckets[timestamp] = held
        return True

    def delete(self, key: Any, namespace: Any, timestamp: int) -> None:
        """Removes a timer. Does nothing if the timer is missing."""
        bucket = self._buckets.get(timestamp)
        timer = (key, namespace)
        if isinstance(bucket, tuple):
            if bucket[1:3] == timer:
                if bucket[3] <= self.mark and self._removed is not None:
                    self._removed(bucket)
                self._drop(timestamp)
        elif isinstance(bucket, dict):
            if order := bucket.get(timer):
                self._report(timestamp, timer, order)
                del bucket[timer]
                if not bucket:
                    self._drop(timestamp)
        elif bucket is not None:
            if order := bucket.entries.get(timer):
                self._spend(timestamp, bucket, timer, order)
            elif order := bucket.late.get(timer):
                self._report(timestamp, timer, order)
                del bucket.late[timer]

    def pop(self, limit: int) -> tuple[int, Any, Any] | None:
        """Removes and returns the first timer (timestamp, key, namespace) up to `limit`, or returns
        None.
        """
        while (timestamp := self.next_time) <= limit:
            bucket = self._buckets[timestamp]
            if isinstance(bucket, tuple):
                if bucket[3] <= self.mark and self._removed is not None:
                    self._removed(bucket)
                self._drop(timestamp)
                self.popped += 1
                return bucket[:3]
            if isinstance(bucket, dict):
                if len(bucket) <= FEW_TIMERS:
                    timer, order = next(iter(bucket.items()))
                    if order <= self.mark:
                        self._report(timestamp, timer, order)
                    del bucket[timer]
                    if not bucket:
                        self._drop(timestamp)
                    self.popped += 1
                    return timestamp, timer[0], timer[1]
                bucket = self._buckets[timestamp] = Firing(bucket)
            for timer, order in bucket.left:
                if order:
                    self.popped += 1
                    self._spend(timestamp, bucket, timer, order)
                    return timestamp, timer[0], timer[1]
        return None

    def pop_together(self, limit: int, count: int) -> tuple[int, list[Timer]] | None:
        """Does the same as `pop` for up to `count` timers of the same timestamp.

        Returns the timestamp and the timers, or None.
        """
        timestamp = self.next_time
        if timestamp > limit:
            return None
        bucket = self._buckets[timestamp]
        if isinstance(bucket, tuple):
            if bucket[3] <= self.mark and self._removed is not None:
                self._removed(bucket)
            self._drop(timestamp)
            self.popped += 1
            return timestamp, [bucket[1:3]]
        if isinstance(bucket, dict):
            if len(bucket) <= count:
                if self.mark:
                    for timer, order in bucket.items():
                        self._report(timestamp, timer, order)
                self._drop(timestamp)
                self.popped += len(bucket)
                return timestamp, list(bucket)
            bucket = self._buckets[timestamp] = Firing(bucket)
        timers: list[Timer] = []
        for timer, order in bucket.left:
            if order:
                timers.append(timer)
                self._spend(timestamp, bucket, timer, order)
                if len(timers) == count or not bucket.pending:
                    break
        self.popped += len(timers)
        return timestamp, timers

    def take_all(self) -> Iterator[tuple[int, Any, Any]]:
        """Removes and yields the current timers, one by one, in firing order.

        Timers that are added meanwhile are neither removed nor yielded. Each timer stays in the
        queue until it is yielded, so a timer that is deleted before that is not yielded.
        """
        newest = self.order
        for timestamp in sorted(self._buckets):
            for timer in self.timers_at(timestamp):
                if 0 < self.order_of(timestamp, timer) <= newest:
                    self.delete(*timer, timestamp)
                    self.popped += 1
                    yield timestamp, *timer

    def items(self) -> Iterator[tuple[int, Any, Any]]:
        """Yields all timers; those of one timestamp in firing order."""
        for timestamp in self._buckets:
            for key, namespace in self.timers_at(timestamp):
                yield timestamp, key, namespace

    def adopt(self, timestamp: int, entries: dict[Timer, int]) -> None:
        """Adds restored timers of `timestamp`, in firing order, without noting a change."""
        if len(entries) == 1:
            ((timer, order),) = entries.items()
            self._put(timestamp, (timestamp, *timer, order))
        else:
            self._put(timestamp, entries)
        self.order = max(self.order, *entries.values())

    # For a snapshot.

    def order_of(self, timestamp: int, timer: Timer) -> int:
        """Returns the number of the registration of a timer, or 0 if there is no such timer."""
        bucket = self._buckets.get(timestamp)
        if isinstance(bucket, tuple):
            return bucket[3] if bucket[1:3] == timer else 0
        if isinstance(bucket, dict):
            return bucket.get(timer, 0)
        return 0 if bucket is None else bucket.entries.get(timer) or bucket.late.get(timer, 0)

    def registered(
        self, timestamps: Iterable[int], after: int, upto: int
    ) -> tuple[list[Entry], list[int]]:
        """Returns the timers of the `timestamps` that have only one timer. Omits timers whose
        registration number is not above `after`, or is above `upto`.

        Also returns the `timestamps` that have several timers.
        """
        buckets = list(map(self._buckets.get, timestamps))
        crowded: list[int] = []
        if set(map(type, buckets)) != _ALONE:
            crowded = [
                timestamp
                for timestamp, bucket in zip(timestamps, buckets, strict=True)
                if bucket is not None and type(bucket) is not tuple
            ]
            buckets = [bucket for bucket in buckets if type(bucket) is tuple]
        found: list[Any] = buckets
        if after or self.order > upto:
            found = [entry for entry in found if after < entry[3] <= upto]
        return found, crowded

    def together_at(
        self, timestamp: int, count: int, after: int = 0
    ) -> Iterator[tuple[list[Timer], list[int]]]:
        """Yields the timers of `timestamp` and the numbers of their registrations, up to `count`
        at a time.

        The number is 0 for a timer that has fired. Timers registered up to number `after` may be
        left out, and so may timers that are added or removed while this runs.
        """
        bucket = self._buckets.get(timestamp)
        if isinstance(bucket, Firing):
            late = list(bucket.late.items())
            # The size of this dict does not change until it is freed.
            items = iter(bucket.entries.items())
            try:
                while some := list(islice(items, count)):
                    yield [timer for timer, _ in some], [order for _, order in some]
            except RuntimeError:
                pass  # All have fired.
            for start in range(0, len(late), count):
                some = late[start : start + count]
                yield [timer for timer, _ in some], [order for _, order in some]
        elif isinstance(bucket, dict):
            timers = self.timers_at(timestamp, after)
            orders = list(map(bucket.__getitem__, timers) if after else bucket.values())
            for start in range(0, len(timers), count):
                yield timers[start : start + count], orders[start : start + count]
        elif bucket is not None:
            yield [bucket[1:3]], [bucket[3]]

    def due_about(self, limit: int) -> int:
        """Returns an estimate of how many timers are due at `limit`, from a sample of the
        timestamps.
        """
        if self.next_time > limit:
            return 0
        step = max(1, len(self._heap) // DUE_SAMPLED)
        sample = [
            self._buckets.get(timestamp) for timestamp in self._heap[::step] if timestamp <= limit
        ]
        return step * sum(map(_size_of, sample))

    def timers_at(self, timestamp: int, after: int = 0) -> list[Timer]:
        """Returns the timers of `timestamp` in firing order. Timers registered up to number `after`
        may be left out.
        """
        bucket = self._buckets.get(timestamp)
        if isinstance(bucket, tuple):
            return [bucket[1:3]]
        if isinstance(bucket, dict):
            if not after:
                return list(bucket)
            newest = []
            for timer, order in reversed(bucket.items()):
                if order <= after:
                    break
                newest.append(timer)
            return newest[::-1]
        if bucket is None:
            return []
        return [timer for timer, order in bucket.entries.items() if order] + list(bucket.late)

    def timestamps(self, after: int) -> list[int]:
        """Returns the timestamps of the buckets whose first timer was registered after number
        `after`. May also return other timestamps.
        """
        if not after:
            return list(self._buckets)
        newest = []
        for timestamp in reversed(self._buckets):
            bucket = self._buckets[timestamp]
            if isinstance(bucket, tuple):
                first = bucket[3]
            elif isinstance(bucket, dict):
                first = next(iter(bucket.values()))
            else:
                first = after + 1  # Its first timers have fired, so their numbers are unknown.
            if first <= after:
                break
            newest.append(timestamp)
        return newest[::-1]

    def _put(self, timestamp: int, bucket: Bucket) -> None:
        self._buckets[timestamp] = bucket
        heappush(self._heap, timestamp)
        if timestamp < self.next_time:
            self.next_time = timestamp

    def _report(self, timestamp: int, timer: Timer, order: int) -> None:
        if order <= self.mark and self._removed is not None:
            self._removed((timestamp, *timer, order))

    def _spend(self, timestamp: int, bucket: Firing, timer: Timer, order: int) -> None:
        # A bucket that has begun to fire loses a timer. After its last timer, those registered
        # meanwhile fire.
        if order <= self.mark:
            self._report(timestamp, timer, order)
        bucket.entries[timer] = 0
        bucket.pending -= 1
        if not bucket.pending:
            if bucket.late:
                self._buckets[timestamp] = bucket.late
            else:
                self._drop(timestamp)
            free_in_slices(bucket.entries)

    def _drop(self, timestamp: int) -> None:
        # Timestamps whose bucket is gone stay in the heap until they reach its top, or outnumber
        # the others: sessions delete the timer of each element but the last, and would otherwise
        # leave them all behind.
        heap, buckets = self._heap, self._buckets
        del buckets[timestamp]
        if self.grown:
            self.grown.discard(timestamp)
        if len(heap) > 2 * len(buckets) + 64:
            heap[:] = buckets
            heapify(heap)
        while heap and heap[0] not in buckets:
            heappop(heap)
        self.next_time = heap[0] if heap else NO_TIMER


class InternalTimerService:
    """The timers of one operator's subtask. The design follows Flink's InternalTimerServiceImpl.

    `on_event_time` and `on_processing_time` are called with (timestamp, key, namespace), and with
    the backend's current key set. `register_physical(timestamp_ms, callback)` schedules
    `callback(timestamp_ms)` as mail after the wall clock has passed the timestamp. At most one
    physical timer is registered, for the earliest processing-time timer.
    """

    _event: TimerQueue
    _processing: TimerQueue
    register_event_time_timer: Callable[[Any, Any, int], object]
    """Registers a timer of (key, namespace, timestamp)."""
    delete_event_time_timer: Callable[[Any, Any, int], None]
    """Deletes a timer of (key, namespace, timestamp). Does nothing if the timer is missing."""

    def __init__(
        self,
        name: str,
        backend: TimerBackend,
        on_event_time: Callable[[int, Any, Any], None],
        on_processing_time: Callable[[int, Any, Any], None],
        register_physical: Callable[[int, Callable[[int], None]], Cancelable],
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        """Makes the service and attaches it to `backend`. `now_ms` is the wall clock. Without
        `now_ms`, a mail fires the timers up to the timestamp for which the mail was scheduled.
        """
        self.name = name
        self.current_watermark = MIN_WATERMARK
        """Current event time. While an event-time timer fires, the current event time is at least
        the timer's timestamp.
        """
        self.on_processing_done: Callable[[], None] | None = None
        """Called after a run of processing-time timers, to emit their output as one batch."""
        self._backend = backend
        self._on_event_time = on_event_time
        self._on_processing_time = on_processing_time
        self._register_physical = register_physical
        self._now_ms = _no_clock if now_ms is None else now_ms
        self._fired_per_mail = FIRED_PER_MAIL
        self._goal = MIN_WATERMARK
        """The watermark up to which timers are firing now, or fired last."""
        self._physical: Cancelable | None = None
        self._physical_time = NO_TIMER
        self.attach(TimerQueue(), TimerQueue(), MIN_WATERMARK)
        backend.attach_timers(self)

    @property
    def next_event_time(self) -> int:
        """Timestamp of the first event-time timer, `NO_TIMER` if there is none."""
        return self._event.next_time

    @property
    def event_time_done(self) -> int:
        """The latest event time up to which all timers have fired. It is exact even while due
        timers are firing.
        """
        return min(self.current_watermark, self._event.next_time - 1)

    @property
    def left_to_fire(self) -> int:
        """Approximate number of event-time timers that are due, but have not fired yet."""
        return self._event.due_about(self._goal)

    @property
    def next_processing_time(self) -> int:
        return self._processing.next_time

    @property
    def fired(self) -> int:
        """Number of timers that have fired, in both domains, since the start or the restore."""
        return self._event.popped + self._processing.popped

    def register_processing_time_timer(self, key: Any, namespace: Any, timestamp: int) -> None:
        self._processing.add(key, namespace, timestamp)
        if timestamp < self._physical_time:
            self._schedule()

    def delete_processing_time_timer(self, key: Any, namespace: Any, timestamp: int) -> None:
        # The physical timer stays: it finds nothing due and is scheduled again. That is cheaper
        # than moving it at each deletion.
        self._processing.delete(key, namespace, timestamp)

    def pop_due(self, watermark: int) -> tuple[int, Any, Any] | None:
        """Pops the first event-time timer due at `watermark`, and advances event time to the
        timer's timestamp.

        Returns (timestamp, key, namespace) and sets the current key. Returns None when all have
        fired: event time is then `watermark`. A watermark below the current one counts as the
        current one. This method is for operators that run timers themselves; the callback is not
        called.
        """
        if watermark < self.current_watermark:
            watermark = self.current_watermark
        timer = self._event.pop(watermark)
        if timer is None:
            self.current_watermark = watermark
        else:
            self._goal = watermark
            # The end of event time is handled once, after all records, independent of the borders
            # of batches.
            reached = watermark if watermark == MAX_WATERMARK else timer[0]
            if reached > self.current_watermark:
                self.current_watermark = reached
            self._backend.current_key = timer[1]
        return timer

    def pop_due_together(self, watermark: int, count: int) -> tuple[int, list[Timer]] | None:
        """Does the same as `pop_due` for up to `count` timers of one timestamp.

        Returns the timestamp, and (key, namespace) of each timer. Does not set the current key.
        """
        if watermark < self.current_watermark:
            watermark = self.current_watermark
        due = self._event.pop_together(watermark, count)
        self._goal = watermark
        reached = watermark if due is None or watermark == MAX_WATERMARK else due[0]
        if reached > self.current_watermark:
            self.current_watermark = reached
        return due

    def take_waiting(self) -> Iterator[tuple[int, Any, Any]]:
        """Removes and yields the pending processing-time timers in order. Called at the end of the
        input, when no clock will reach them.

        Sets the current key to the key of each timer; does not call the callback. Timers that are
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
        """Replaces the timers and the event time of the service with the given ones. So records
        that were late before a restore are still late.

        After a drain, the stored event time is the end of time. The service then resets it, because
        otherwise every record would be late. The backend calls this for each new service. Overdue
        processing-time timers fire with the first mail.
        """
        self._event, self._processing = event, processing
        # Functions may call these for each element, so they are the queue's own methods.
        self.register_event_time_timer, self.delete_event_time_timer = event.add, event.delete
        self.current_watermark = MIN_WATERMARK if watermark == MAX_WATERMARK else watermark
        self._schedule()

    def close(self) -> None:
        """Cancels the physical timer. No further timer fires."""
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
        # A busy task takes mail less often than once a millisecond. If each mail fired only the
        # timers of one timestamp, the number of due timers would grow without end.
        begun_ms = self._now_ms()
        due = max(timestamp_ms, begun_ms - 1)
        fire, pop, backend = self._on_processing_time, self._processing.pop, self._backend
        try:
            for fired in count(1):
                timer = pop(due)
                if timer is None:
                    self._fired_per_mail = FIRED_PER_MAIL
                    break
                backend.current_key = timer[1]
                fire(*timer)
                if fired % FIRED_PER_MAIL == 0 and (
                    fired >= self._fired_per_mail or self._now_ms() - begun_ms >= MAIL_MS
                ):
                    self._fired_per_mail = min(2 * fired, FIRED_PER_MAIL_MAX)
                    break
        finally:
            backend.current_key = NO_KEY
        if self.on_processing_done is not None:
            self.on_processing_done()
        self._schedule()


def _size_of(bucket: Bucket | None) -> int:
    if bucket is None:
        return 0
    if isinstance(bucket, tuple):
        return 1
    return len(bucket) if isinstance(bucket, dict) else bucket.pending + len(bucket.late)


def _no_clock() -> int:
    return 0


def _timestamp(timer: tuple[int, Any, Any]) -> int:
    return timer[0]
