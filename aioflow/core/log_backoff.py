"""Exponential backoff for a repeated log message. This module decides when to log, but does not log
itself.

If a message is repeated twice a second, it hides other messages. If it is logged only once, the log
does not show that the problem persists.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LogBackoff"]

FIRST_S = 5.0
"""Time between the first message and the second; it doubles after each one."""

MOST_S = 600.0


@dataclass(slots=True)
class LogBackoff:
    """The backoff of the log messages about one retried operation. `now` is in seconds of a
    monotonic clock.
    """

    _since: float | None = None
    _tell_at: float = 0.0
    _interval_s: float = FIRST_S

    def failed(self, now: float) -> float | None:
        """Notes a failed try.

        If it is time to log, returns for how many seconds the tries have failed so far, otherwise
        None.
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
