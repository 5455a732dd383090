"""The lag of an event loop: code that blocks the loop also delays a call that is due at a known
time.
"""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["LoopLag"]

LAG_EVERY_S = 0.1
LAGS_MAX = 600
"""Number of measurements in a minute."""


class LoopLag:
    """Measures between `start` and `stop`, on the running loop."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque(maxlen=LAGS_MAX)
        self._handle: asyncio.TimerHandle | None = None
        self._due_at = 0.0

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._due_at = loop.time() + LAG_EVERY_S
        self._handle = loop.call_at(self._due_at, self._measure)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _measure(self) -> None:
        self._lags.append(max(asyncio.get_running_loop().time() - self._due_at, 0.0))
        self.start()

    @property
    def last_ms(self) -> float:
        """0.0 before the first measurement, as `max_ms`."""
        return round(self._lags[-1] * 1000, 3) if self._lags else 0.0

    @property
    def max_ms(self) -> float:
        """Over the last minute."""
        return round(max(self._lags, default=0.0) * 1000, 3)

    def milliseconds(self) -> dict[str, float]:
        """Over the last minute; zeros before the first measurement."""
        ordered = sorted(self._lags)
        if not ordered:
            return {"last": 0.0, "p50": 0.0, "p99": 0.0, "max": 0.0}

        def at(share: float) -> float:
            return round(ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1000, 3)

        return {"last": self.last_ms, "p50": at(0.5), "p99": at(0.99), "max": self.max_ms}
