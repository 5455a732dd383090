"""When it is told that something is tried again and again in vain: the first time, then ever more
seldom. Decides, does nothing.

A log that says the same twice a second hides what else it has to say; one that says it once does
not tell that it still is so.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Patience"]

FIRST_S = 5.0
"""Between the first time and the second; each further one takes twice as long."""

MOST_S = 600.0


@dataclass(slots=True)
class Patience:
    """One thing that is tried. `now` is seconds of a monotonic clock."""

    _since: float | None = None
    _tell_at: float = 0.0
    _interval_s: float = FIRST_S

    def failed(self, now: float) -> float | None:
        """A try failed. Returns for how long all have, in seconds, if that is to be told now."""
        if self._since is None:
            self._since, self._interval_s = now, FIRST_S
        elif now < self._tell_at:
            return None
        else:
            self._interval_s = min(2 * self._interval_s, MOST_S)
        self._tell_at = now + self._interval_s
        return now - self._since

    def succeeded(self, now: float) -> float | None:
        """A try came off. Returns how long that took; None if none before it had failed."""
        took = None if self._since is None else now - self._since
        self._since = None
        return took
