"""Metrics of a mailbox loop: time parked, mail rate, and mail latency.

A task is parked while it awaits mail with its default action suspended. Only this time is counted,
under the *reason* of the suspension ("input", "output", ...). So idle and soft back-pressured time
are exact, and busy time is the rest. A probe mail measures latency about once a second. Its age
counts from the time at which it should have been written. So if the loop was blocked then, the
latency includes that time.

All times are in seconds, by the clock of the mailbox processor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aioflow.core.errors import MailboxClosed
from aioflow.mailbox.mailbox import Mail, TaskMailbox

__all__ = ["SLOW_REMEDY", "LatencyProbe", "MailboxMetrics", "SlowActions"]

logger = logging.getLogger(__name__)

RATE_WINDOW_S = 1.0
"""Minimum period over which a rate is measured. A reading before its end returns the last rate
again.
"""

SLOW_REMEDY = "make what it calls cheaper, or async"
"""Advice for a slow action that belongs to no operator, such as that of a source or a mail."""

SLOW_LOG_INTERVAL_S = 10.0
"""Minimum time between two warnings of slow actions, because an operator that is slow is slow for
every batch.
"""


class MailboxMetrics:
    """The metrics of one processor. The mailbox loop writes the metrics. Any code on the thread of
    the event loop may read them.
    """

    __slots__ = (
        "_longest",
        "_mailbox",
        "_now",
        "_parked_at",
        "_parked_reason",
        "_rate",
        "_rate_at",
        "_rate_taken",
        "_times",
        "latency_count",
        "latency_ms",
        "latency_ms_max",
        "slow_actions",
    )

    def __init__(self, mailbox: TaskMailbox, now: Callable[[], float]) -> None:
        self._mailbox = mailbox
        self._now = now
        self._times: dict[str, float] = {}
        self._longest: dict[str, float] = {}
        self._parked_at = 0.0
        self._parked_reason: str | None = None
        self._rate = 0.0
        self._rate_at: float | None = None
        self._rate_taken = 0
        self.latency_ms = 0.0
        """Age of the latest probe mail when it ran, in milliseconds."""
        self.latency_ms_max = 0.0
        self.latency_count = 0
        self.slow_actions = 0
        """Number of actions or slices that blocked the loop for longer than the threshold."""

    @property
    def mails(self) -> int:
        """Number of mails that were ever taken from the mailbox."""
        return self._mailbox.taken

    @property
    def queue_size(self) -> int:
        return self._mailbox.size

    def start(self) -> None:
        """Notes that the mailbox loop begins to run. The first call starts the measurement of
        rates.
        """
        if self._rate_at is None:
            self._rate_at = self._now()

    def mails_per_second(self) -> float:
        """Returns the number of mails per second, measured over at least one second."""
        now = self._now()
        elapsed = 0.0 if self._rate_at is None else now - self._rate_at
        if elapsed >= RATE_WINDOW_S:
            taken = self._mailbox.taken
            self._rate = (taken - self._rate_taken) / elapsed
            self._rate_at, self._rate_taken = now, taken
        return self._rate

    def time_in(self, reason: str) -> float:
        """Returns how many seconds the task has waited for `reason` so far, including the current
        wait.
        """
        time = self._times.get(reason, 0.0)
        if self._parked_reason == reason:
            time += self._now() - self._parked_at
        return time

    def take_longest(self, reason: str) -> float:
        """Returns the longest wait for `reason` since the last call, in seconds.

        Includes the current wait.
        """
        longest = self._longest.pop(reason, 0.0)
        return (
            max(longest, self._now() - self._parked_at)
            if self._parked_reason == reason
            else longest
        )

    def park(self, reason: str) -> None:
        """Notes that the task begins to wait for mail, with its default action suspended for
        `reason`.
        """
        self._parked_at = self._now()
        self._parked_reason = reason

    def unpark(self) -> None:
        """Notes that the task no longer waits for mail."""
        reason, self._parked_reason = self._parked_reason, None
        assert reason is not None
        stay = self._now() - self._parked_at
        self._times[reason] = self._times.get(reason, 0.0) + stay
        if stay > self._longest.get(reason, 0.0):
            self._longest[reason] = stay

    def record_latency(self, seconds: float) -> None:
        latency_ms = max(seconds, 0.0) * 1000.0
        self.latency_ms = latency_ms
        self.latency_count += 1
        if latency_ms > self.latency_ms_max:
            self.latency_ms_max = latency_ms


class LatencyProbe:
    """Writes one mail every `interval_s` from `start` to `stop`, and records how long each mail
    waited.
    """

    __slots__ = ("_active", "_due_at", "_handle", "_interval_s", "_mailbox", "_metrics", "_now")

    def __init__(
        self,
        mailbox: TaskMailbox,
        metrics: MailboxMetrics,
        now: Callable[[], float],
        interval_s: float,
    ) -> None:
        self._mailbox = mailbox
        self._metrics = metrics
        self._now = now
        self._interval_s = interval_s
        self._active = False
        self._due_at = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts probing, unless started already. Must be called on the event loop."""
        if not self._active:
            self._active = True
            self._arm()

    def _arm(self) -> None:
        self._due_at = self._now() + self._interval_s
        self._handle = asyncio.get_running_loop().call_later(self._interval_s, self._write)

    def stop(self) -> None:
        self._active = False
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _write(self) -> None:
        self._handle = None
        try:
            self._mailbox.put(Mail(self._measure, description="measure mailbox latency"))
        except MailboxClosed:
            pass  # The task is ending, so no latency is left to measure.

    def _measure(self) -> None:
        self._metrics.record_latency(self._now() - self._due_at)
        if self._active and self._handle is None:
            # A probe of an earlier run may still be in the queue.
            self._arm()


class SlowActions:
    """The default listener for slow actions. It logs warnings that name the action, at a limited
    rate.
    """

    __slots__ = ("_last_at", "_now")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._last_at: float | None = None

    def __call__(
        self,
        description: str,
        seconds: float,
        remedy: str = SLOW_REMEDY,
        cpu_s: float | None = None,
        stack: str = "",
    ) -> None:
        """Logs a warning about an action that took `seconds`, unless the last warning is less than
        `SLOW_LOG_INTERVAL_S` old.

        `cpu_s` is the CPU time that the thread used during the action, None if unknown. `stack` is
        a stack trace of the thread, empty if there is none.
        """
        now = self._now()
        if self._last_at is None or now - self._last_at >= SLOW_LOG_INTERVAL_S:
            self._last_at = now
            logger.warning(
                "%s held the event loop for %.0f ms%s, expected less than 100; everything on this "
                "loop waited: %s%s",
                description,
                seconds * 1000.0,
                "" if cpu_s is None else f" ({cpu_s * 1000:.0f} ms of processor time)",
                remedy,
                stack,
            )
