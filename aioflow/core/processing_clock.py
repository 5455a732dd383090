"""Processing time: the wall clock as long as it runs evenly, otherwise the monotonic clock.

A wall clock steps: an operator sets it, or a machine wakes from sleep. A broken time server may set
it ten years ahead for a moment. Windows, timers and times to live need a time that advances a
second a second. So processing time does not follow a step at once. A step shows as a difference
from the monotonic clock:

    forward     followed once it has lasted for `SETTLE_S`; everything due in between fires
    backward    never followed; processing time keeps its lead until the wall clock catches up

Each step is logged once. Drift of up to `TOLERANCE_MS` between two readings is followed at once.

Invariant: readings never decrease.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aioflow.core.elements import MIN_WATERMARK

if TYPE_CHECKING:
    from aioflow.core.host import Clock

__all__ = ["SETTLE_S", "TOLERANCE_MS", "ProcessingClock"]

logger = logging.getLogger(__name__)

TOLERANCE_MS = 500
"""Maximum difference to the monotonic clock that counts as drift, not as a step."""

SETTLE_S = 10.0
"""Time for which a step forward must last before it is followed."""


class ProcessingClock:
    """The processing time in ms since 1970-01-01 UTC, by its method `read`.

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
        "_wall_ms",
    )

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wall_ms = clock.wall_ms
        self._lead_ms = 0
        """Lead of processing time over the wall clock, which was put back."""
        self._reached_ms = self._last_ms = clock.wall_ms()
        self._read_s = clock.monotonic()
        """Monotonic time at which `_reached_ms` was compared with the clock."""
        self._stepped_s: float | None = None
        """Monotonic time at which a step forward was seen that is not followed yet."""
        self._even_ms = self._reached_ms + TOLERANCE_MS
        """Wall clock time up to which the monotonic clock is not read.

        Processing time is read often, and one reading of that clock costs as much as all the rest.
        """

    def read(self) -> int:
        """Returns the processing time.

        A method, because Python 3.11 and later run methods without a new frame of C.
        """
        now_ms = self._wall_ms() + self._lead_ms
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
                "the wall clock was put back by %.1f s: processing time goes on by the monotonic "
                "clock, and is ahead by that until "
                "the process ends or the wall clock has caught up",
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
                "the wall clock is ahead by %.1f s all at once, as after a sleep of the machine, "
                "or because it was set: processing time "
                "follows when that has lasted for %g s",
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
