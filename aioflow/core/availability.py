"""Level-triggered availability of input, or of room in the output.

The design follows Flink's AvailabilityProvider. A provider is available or not. A caller that finds
it unavailable may request the one future that completes when it becomes available again. The hot
path reads `is_available`, a plain attribute, and touches no future at all. Spurious wake-ups are
allowed, lost ones never: a waiter checks again after each wake-up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

__all__ = ["AVAILABLE", "Availability", "all_of"]


class Availability:
    """A flag, with a future that waiters can await while the flag is down."""

    __slots__ = ("_callbacks", "_future", "is_available")

    def __init__(self, available: bool = False) -> None:
        self.is_available = available
        self._future: asyncio.Future[None] | None = None
        self._callbacks: list[Callable[[], None]] = []

    def set_available(self) -> None:
        """Raises the flag and wakes all waiters. Idempotent."""
        self.is_available = True
        future, self._future = self._future, None
        if future is not None and not future.done():
            future.set_result(None)
        if self._callbacks:
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()

    def set_unavailable(self) -> None:
        """Lowers the flag.

        A future that was returned stays valid: it completes at the next `set_available`.
        """
        self.is_available = False

    def get_available_future(self) -> asyncio.Future[None]:
        """Returns the future that completes when available, the same one until then.

        Must be called on the loop.
        """
        if self._future is None or self._future.cancelled():
            self._future = asyncio.get_running_loop().create_future()
            if self.is_available:
                done, self._future = self._future, None
                done.set_result(None)
                return done
        return self._future

    def on_available(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once, synchronously, when the flag is raised; at once if it is up."""
        if self.is_available:
            callback()
        else:
            self._callbacks.append(callback)


AVAILABLE = Availability(available=True)
"""A provider that is always available. It must never be lowered."""


def all_of(providers: Sequence[Availability]) -> Availability:
    """Returns a provider that is available once each of `providers` was available since this call.

    Valid for one wait: build it again after each wait.
    """
    waiting = [p for p in providers if not p.is_available]
    combined = Availability(not waiting)
    missing = len(waiting)

    def one_more() -> None:
        nonlocal missing
        missing -= 1
        if missing == 0:
            combined.set_available()

    for provider in waiting:
        provider.on_available(one_more)
    return combined
