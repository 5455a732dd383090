"""Processing time and its timers: a due timer writes a mail that runs its callback.

Timestamps are wall-clock milliseconds. A timer for `timestamp_ms` fires one millisecond later, when
that millisecond is complete, like Watermark(T). After registration the delay is measured by the
loop's monotonic clock. So a step of the wall clock neither delays a timer nor fires it twice. If
processing time jumps ahead, for example after the machine slept, timers fire earlier by the length
of the jump. Jumps are looked for at each registration, and while timers wait.

All timers share one timer of the loop. Timers that are due together run in the order of
registration, because the heap is sorted by `(deadline, seq)`. asyncio's own heap does not keep this
order. The design follows Flink's SystemProcessingTimeService and ProcessingTimeServiceImpl.

Invariant: a callback runs as mail, at most once per registration (for a repeated timer, once per
period), and never after `cancel`.

Processing time follows the wall clock as long as that runs evenly, otherwise the monotonic clock. A
wall clock may step: an administrator sets it, or a machine wakes from sleep. A broken time server
may set it ten years ahead for a moment. Windows, timers and times to live need a time that advances
by one second per second. So processing time does not follow a step at once. A step is detected as a
difference from the monotonic clock:

    forward     followed once it has lasted for `SETTLE_S`; everything due in between fires
    backward    never followed; processing time keeps its lead until the wall clock catches up

Each step is logged once. Drift of up to `TOLERANCE_MS` between two readings is followed at once.

Invariant: readings never decrease.
"""

from __future__ import annotations

import asyncio
import enum
import heapq
import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from aioflow.core.elements import MIN_WATERMARK
from aioflow.core.errors import MailboxClosed

if TYPE_CHECKING:
    from aioflow.core.host import Clock

__all__ = [
    "SETTLE_S",
    "TOLERANCE_MS",
    "ProcessingClock",
    "ProcessingTimeService",
    "ProcessingTimer",
    "TimerExecutor",
]

TimerCallback = Callable[[int], object]
"""A callback, called with the registered timestamp in ms, not with the current time. It may return
an awaitable.
"""

DEADLINE_TOLERANCE_S = 1e-6
"""Maximum time in seconds by which a timer of the event loop may fire too early."""

JUMP_S = 0.25
"""Minimum advance of the wall clock over the loop's clock that counts as a jump, in seconds."""

LOOK_S, LOOK_MAX_S = 10.0, 60.0
"""Minimum and maximum time in seconds between two checks of the clock while timers wait. Between
these bounds, the clock is checked after a sixteenth of the time to the next timer.

The clock of a machine that has just started may be wrong until it is set. So a timer that seems to
be due in ten years may be due in a minute.
"""

HEAP_SLACK = 64
"""Number by which cancelled timers in the heap may exceed live timers before the heap is
cleaned.
"""


class TimerExecutor(Protocol):
    """The methods of a MailboxExecutor that the timer service uses."""

    def execute(self, fn: Callable[[], object], description: str, *args: object) -> None: ...

    @property
    def is_owner(self) -> bool: ...


class TimerState(enum.Enum):
    PENDING = "pending"
    """The timer waits for its deadline."""
    QUEUED = "queued"
    """The timer's mail is in the mailbox, or its callback runs."""
    DONE = "done"
    """The timer has fired, was cancelled, or was refused by a quiesced service."""


class Repeat(enum.Enum):
    NEVER = "never"
    RATE = "rate"
    """Repeated: the next deadline is one period after the last deadline."""
    DELAY = "delay"
    """Repeated: the next deadline is one period after the callback has run."""


class ProcessingTimer:
    """A registered timer. `timestamp_ms` is the argument of the next callback."""

    __slots__ = (
        "_service",
        "callback",
        "deadline_s",
        "period_ms",
        "repeat",
        "state",
        "timestamp_ms",
    )

    def __init__(
        self,
        service: ProcessingTimeService,
        timestamp_ms: int,
        callback: TimerCallback,
        deadline_s: float = 0.0,
        repeat: Repeat = Repeat.NEVER,
        period_ms: int = 0,
    ) -> None:
        self._service = service
        self.timestamp_ms = timestamp_ms
        self.callback = callback
        self.deadline_s = deadline_s
        self.repeat = repeat
        self.period_ms = period_ms
        self.state = TimerState.PENDING

    def cancel(self) -> None:
        """Prevents further calls of the callback, even if its mail is already queued.

        Idempotent.
        """
        self._service.cancel_timer(self)


class ProcessingTimeService:
    """The processing-time timers of one operator. All methods must be called on the thread of the
    event loop.

    The mail of a timer has the priority of `executor`. `now_ms` returns the processing time in
    milliseconds. Delays are measured by the clock of the running event loop.
    """

    __slots__ = (
        "_ahead_s",
        "_closed",
        "_executor",
        "_handle",
        "_heap",
        "_idle",
        "_now_ms",
        "_pending",
        "_quiesced",
        "_running",
        "_seq",
    )

    def __init__(self, now_ms: Callable[[], int], executor: TimerExecutor) -> None:
        self._now_ms = now_ms
        self._ahead_s: float | None = None
        """Difference in seconds between processing time and the clock of the loop at the last
        check; None before.
        """
        self._executor = executor
        self._heap: list[tuple[float, int, ProcessingTimer]] = []
        self._seq = 0
        self._pending = 0
        self._running = 0
        self._handle: asyncio.TimerHandle | None = None
        self._quiesced = False
        self._closed = False
        self._idle: asyncio.Future[None] | None = None

    def current_processing_time(self) -> int:
        """Returns the processing time in milliseconds."""
        return self._now_ms()

    def register_timer(self, timestamp_ms: int, callback: TimerCallback) -> ProcessingTimer:
        """Calls `callback(timestamp_ms)` once this millisecond is over, or soon if it is in the
        past.

        After `quiesce`, accepts the timer, which then never fires. Raises MailboxClosed after
        `shutdown`.
        """
        return self._register(timestamp_ms, callback, Repeat.NEVER, 0)

    def schedule_at_fixed_rate(
        self, callback: TimerCallback, initial_delay_ms: int, period_ms: int
    ) -> ProcessingTimer:
        """Calls `callback` every `period_ms`, first after `initial_delay_ms`.

        The timestamps passed to the callback are one period apart. Calls that are overdue because
        the task was busy are made one after another, with at most one mail in the queue.
        """
        return self._register(self._now_ms() + initial_delay_ms, callback, Repeat.RATE, period_ms)

    def schedule_with_fixed_delay(
        self, callback: TimerCallback, initial_delay_ms: int, period_ms: int
    ) -> ProcessingTimer:
        """Does the same as `schedule_at_fixed_rate`, but the next period begins when the callback
        has run.
        """
        return self._register(self._now_ms() + initial_delay_ms, callback, Repeat.DELAY, period_ms)

    async def quiesce(self) -> None:
        """Cancels all waiting timers, accepts no more, and waits for running callbacks.

        A timer whose mail is already queued still runs, because queued mail is processed at the end
        of the input. If the owner of the mailbox calls, the method does not wait, because a
        callback that is running must be the caller.
        """
        self._quiesced = True
        self._cancel_all()
        if self._running and not self._executor.is_owner:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def shutdown(self) -> None:
        """Cancels all timers. Later registrations raise MailboxClosed. Idempotent."""
        self._closed = True
        self._cancel_all()

    def cancel_timer(self, timer: ProcessingTimer) -> None:
        """Implements `ProcessingTimer.cancel`.

        The entry of the timer stays in the heap, without the callback, at most until its deadline.
        """
        was_pending = timer.state is TimerState.PENDING
        timer.state = TimerState.DONE
        timer.callback = _nothing
        if was_pending:
            self._pending -= 1
            if self._pending == 0:
                self._cancel_all()
            elif len(self._heap) > 2 * self._pending + HEAP_SLACK:
                self._heap = [entry for entry in self._heap if entry[2].state is TimerState.PENDING]
                heapq.heapify(self._heap)

    def _register(
        self, timestamp_ms: int, callback: TimerCallback, repeat: Repeat, period_ms: int
    ) -> ProcessingTimer:
        if self._closed:
            raise MailboxClosed(
                f"timer for {timestamp_ms} refused: the timer service is shut down, its task is "
                "ending"
            )
        if repeat is not Repeat.NEVER and period_ms <= 0:
            raise ValueError(f"period of a repeated timer is {period_ms} ms, expected at least 1")
        delay_ms = max(timestamp_ms - self._look(), 0) + 1
        timer = ProcessingTimer(self, timestamp_ms, callback, 0.0, repeat, period_ms)
        if self._quiesced:
            timer.state = TimerState.DONE
        else:
            self._arm(timer, asyncio.get_running_loop().time() + delay_ms / 1000.0)
        return timer

    def _look(self) -> int:
        """Returns the processing time in milliseconds, and adapts the timers if it has jumped
        ahead.

        After a jump, waiting timers that are not repeated fire earlier by the length of the jump,
        in the same order.
        """
        now_ms = self._now_ms()
        ahead_s = now_ms / 1000.0 - asyncio.get_running_loop().time()
        before, self._ahead_s = self._ahead_s, ahead_s
        if before is not None and ahead_s - before > JUMP_S and self._pending:
            for _, _, timer in self._heap:
                if timer.repeat is Repeat.NEVER:
                    timer.deadline_s -= ahead_s - before
            self._heap = [
                (timer.deadline_s, seq, timer)
                for _, seq, timer in self._heap
                if timer.state is TimerState.PENDING
            ]
            heapq.heapify(self._heap)
            self._set_alarm()
        return now_ms

    def _arm(self, timer: ProcessingTimer, deadline_s: float) -> None:
        timer.state = TimerState.PENDING
        timer.deadline_s = deadline_s
        self._pending += 1
        self._seq += 1
        heapq.heappush(self._heap, (deadline_s, self._seq, timer))
        if self._heap[0][2] is timer:
            self._set_alarm()

    def _set_alarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        loop, deadline_s = asyncio.get_running_loop(), self._heap[0][0]
        now_s = loop.time()
        look_s = now_s + max(LOOK_S, min(LOOK_MAX_S, (deadline_s - now_s) / 16))
        self._handle = loop.call_at(min(deadline_s, look_s), self._on_alarm)

    def _on_alarm(self) -> None:
        """Writes the mail of every due timer, in order, and sets the loop's timer for the next
        one.
        """
        self._handle = None
        if self._pending:
            self._look()
        heap = self._heap
        due = asyncio.get_running_loop().time() + DEADLINE_TOLERANCE_S
        while heap and (heap[0][0] <= due or heap[0][2].state is not TimerState.PENDING):
            timer = heapq.heappop(heap)[2]
            if timer.state is TimerState.PENDING:
                self._pending -= 1
                timer.state = TimerState.QUEUED
                try:
                    self._executor.execute(
                        partial(self._fire, timer), "timer for %d", timer.timestamp_ms
                    )
                except MailboxClosed:  # The task is ending, so its timers no longer fire.
                    timer.state = TimerState.DONE
        if heap:
            self._set_alarm()
        else:
            self._cancel_alarm()

    def _fire(self, timer: ProcessingTimer) -> object:
        """Runs the callback of `timer` in the owner. Returns the callback's awaitable, if any."""
        if timer.state is not TimerState.QUEUED:
            return None  # The timer was cancelled while its mail was queued.
        self._running += 1
        try:
            result = timer.callback(timer.timestamp_ms)
        except BaseException:
            self._finish(timer, again=False)
            raise
        if result is not None and inspect.isawaitable(result):
            return self._await(timer, result)
        self._finish(timer, again=True)
        return None

    async def _await(self, timer: ProcessingTimer, result: object) -> None:
        again = False
        try:
            assert inspect.isawaitable(result)
            await result
            again = True
        finally:
            self._finish(timer, again)

    def _finish(self, timer: ProcessingTimer, again: bool) -> None:
        self._running -= 1
        if self._running == 0 and self._idle is not None:
            idle, self._idle = self._idle, None
            idle.set_result(None)
        if timer.state is not TimerState.QUEUED:
            return  # The timer was cancelled by its callback, or while that was awaiting.
        if not again or timer.repeat is Repeat.NEVER or self._quiesced or self._closed:
            timer.state = TimerState.DONE
            return
        period_s = timer.period_ms / 1000.0
        timer.timestamp_ms += timer.period_ms
        base_s = (
            timer.deadline_s if timer.repeat is Repeat.RATE else asyncio.get_running_loop().time()
        )
        self._arm(timer, base_s + period_s)

    def _cancel_all(self) -> None:
        for _, _, timer in self._heap:
            if timer.state is TimerState.PENDING:
                timer.state = TimerState.DONE
        self._heap.clear()
        self._pending = 0
        self._cancel_alarm()

    def _cancel_alarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def _nothing(_: int) -> None:
    """Does nothing. Replaces the callback of a cancelled timer, so that the heap does not keep that
    callback alive.
    """


logger = logging.getLogger(__name__)

TOLERANCE_MS = 500
"""Maximum difference in ms between the clocks that counts as drift, not as a step."""

SETTLE_S = 10.0
"""Number of seconds for which a step forward must last before processing time follows it."""


class ProcessingClock:
    """A clock whose method `read` returns the processing time in ms since 1970-01-01 UTC.

    All tasks of a process share one object.
    """

    __slots__ = (
        "_clock",
        "_even_ms",
        "_last_ms",
        "_lead_ms",
        "_reached_ms",
        "_read_s",
        "_stepped_s",
    )

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lead_ms = 0
        """Number of ms by which processing time is ahead of a wall clock that was put back."""
        self._reached_ms = self._last_ms = clock.wall_ms()
        self._read_s = clock.monotonic()
        """Monotonic time in seconds at which processing time was `_reached_ms`."""
        self._stepped_s: float | None = None
        """Monotonic time at which a step forward was detected; None if there is none to follow."""
        self._even_ms = self._reached_ms + TOLERANCE_MS
        """Processing time up to which `read` need not read the monotonic clock.

        Processing time is read often, and reading the monotonic clock would double the cost.
        """

    def read(self) -> int:
        """Returns the processing time in ms since 1970-01-01 UTC.

        This is a method and not `__call__`, because Python 3.11 and later call methods without a
        new C frame.
        """
        now_ms = self._clock.wall_ms() + self._lead_ms
        if not self._last_ms <= now_ms <= self._even_ms:
            now_ms = max(self._last_ms, self._compared(now_ms))
        self._last_ms = now_ms
        return now_ms

    def _compared(self, now_ms: int) -> int:
        now_s = self._clock.monotonic()
        expected_ms = self._reached_ms + round((now_s - self._read_s) * 1000.0)
        ahead_ms = now_ms - expected_ms
        if -TOLERANCE_MS <= ahead_ms <= TOLERANCE_MS:
            self._stepped_s = None
        elif ahead_ms < 0:
            logger.warning(
                "the wall clock was set back by %.1f s: processing time follows the monotonic "
                "clock, and stays ahead until the wall clock has caught up or the process ends",
                -ahead_ms / 1000.0,
            )
            self._lead_ms -= ahead_ms
            self._stepped_s = None
            now_ms = expected_ms
        elif ahead_ms <= self._lead_ms:
            # The clock was corrected again.
            self._lead_ms -= ahead_ms
            now_ms = expected_ms
        elif self._stepped_s is None:
            logger.warning(
                "the wall clock jumped ahead by %.1f s, because it was set or the machine slept: "
                "processing time follows if this lasts for %g s",
                (ahead_ms - self._lead_ms) / 1000.0,
                SETTLE_S,
            )
            self._stepped_s, self._even_ms = now_s, MIN_WATERMARK
            return expected_ms
        elif now_s - self._stepped_s < SETTLE_S:
            return expected_ms
        else:
            logger.warning(
                "processing time follows the wall clock, and jumps by %.1f s",
                (ahead_ms - self._lead_ms) / 1000.0,
            )
            now_ms -= self._lead_ms
            self._lead_ms, self._stepped_s = 0, None
        self._reached_ms, self._read_s, self._even_ms = now_ms, now_s, now_ms + TOLERANCE_MS
        return now_ms
