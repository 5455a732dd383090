"""What a mailbox loop says about itself: where its time went, how much mail it ran, and how long
mail waits.

Time is counted only while the task is parked, awaiting mail with its default action suspended,
under the *reason* that was given for the suspension ("input", "output", ...). So idle and soft
back-pressured time are exact, and busy time is the rest. Latency is measured by a probe mail, about
one a second: its age is counted from the moment at which it was due to be written, so that a loop
that was blocked at that moment shows too.

All times are read from the clock that the processor was given, in seconds.
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
"""The shortest time over which a rate is computed; asked sooner, the last rate is repeated."""

SLOW_REMEDY = "make what it calls cheaper, or async"
"""Of an action that is of no operator: a source, or what mail brings."""

SLOW_LOG_INTERVAL_S = 10.0
"""How often slow actions are logged when nobody else listens: an action that is slow once is
slow for every batch.
"""


class MailboxMetrics:
    """The numbers of one processor. Written by its loop, read by anyone on the loop's thread."""

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
        """Age of the latest probe mail when it ran."""
        self.latency_ms_max = 0.0
        self.latency_count = 0
        self.slow_actions = 0
        """How many actions, or slices of the default action, held the loop for longer than the
        threshold.
        """

    @property
    def mails(self) -> int:
        """How many mails were ever taken."""
        return self._mailbox.taken

    @property
    def queue_size(self) -> int:
        return self._mailbox.size

    def start(self) -> None:
        """The loop begins to run; the first time, rates begin here."""
        if self._rate_at is None:
            self._rate_at = self._now()

    def mails_per_second(self) -> float:
        """Rate since the previous reading that lay at least a second back, or since the loop was
        first run.
        """
        now = self._now()
        elapsed = 0.0 if self._rate_at is None else now - self._rate_at
        if elapsed >= RATE_WINDOW_S:
            taken = self._mailbox.taken
            self._rate = (taken - self._rate_taken) / elapsed
            self._rate_at, self._rate_taken = now, taken
        return self._rate

    def time_in(self, reason: str) -> float:
        """Seconds parked for `reason` so far, the present stay included."""
        time = self._times.get(reason, 0.0)
        if self._parked_reason == reason:
            time += self._now() - self._parked_at
        return time

    def take_longest(self, reason: str) -> float:
        """The longest stay for `reason` that ended since this was last asked, or that goes on;
        seconds.
        """
        longest = self._longest.pop(reason, 0.0)
        return (
            max(longest, self._now() - self._parked_at)
            if self._parked_reason == reason
            else longest
        )

    def park(self, reason: str) -> None:
        """The task begins to wait for mail, its default action suspended for `reason`."""
        self._parked_at = self._now()
        self._parked_reason = reason

    def unpark(self) -> None:
        """The wait is over."""
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
    """Writes one mail every `interval_s` between `start` and `stop`, and records how long each
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
        """Begins to probe, unless it does already. On the loop."""
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
            pass  # The task is ending; there is nothing left to measure.

    def _measure(self) -> None:
        self._metrics.record_latency(self._now() - self._due_at)
        if (
            self._active and self._handle is None
        ):  # One left in the queue by an earlier run may come on top.
            self._arm()


class SlowActions:
    """The listener for slow actions when the owner gave none: a warning that names the action,
    now and then.
    """

    __slots__ = ("_last_at", "_now")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._last_at: float | None = None

    def __call__(self, description: str, seconds: float, remedy: str = SLOW_REMEDY) -> None:
        now = self._now()
        if self._last_at is None or now - self._last_at >= SLOW_LOG_INTERVAL_S:
            self._last_at = now
            logger.warning(
                "%s held the event loop for %.0f ms, expected less than 100; everything on this "
                "loop waited: %s",
                description,
                seconds * 1000.0,
                remedy,
            )
