"""Exponential backoff for a repeated log message. It decides when to log, but does not log itself.

A log that repeats a message twice a second hides other messages. A log with only one message does
not show that the problem persists.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Patience"]

FIRST_S = 5.0
"""Time between the first message and the second; it doubles after each one."""

MOST_S = 600.0


@dataclass(slots=True)
class Patience:
    """The backoff of one retried operation. `now` is seconds of a monotonic clock."""

    _since: float | None = None
    _tell_at: float = 0.0
    _interval_s: float = FIRST_S

    def failed(self, now: float) -> float | None:
        """Notes a failed try.

        If it is time to log, returns for how long tries have failed, in seconds.
        """
        if self._since is None:
            self._since, self._interval_s = now, FIRST_S
        elif now < self._tell_at:
            return None
        else:
            self._interval_s = min(2 * self._interval_s, MOST_S)
        self._tell_at = now + self._interval_s
        return now - self._since

    def succeeded(self, now: float) -> float | None:
        """Notes a success. Returns how long tries had failed before it; None if none had."""
        took = None if self._since is None else now - self._since
        self._since = None
        return took
