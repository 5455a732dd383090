"""Level-triggered availability of input, or of room in the output.

The design follows Flink's AvailabilityProvider. A provider is available or not. A caller that finds
a provider unavailable may request a future of its own, which completes when the provider becomes
available again. The hot path reads `is_available`, a plain attribute, and touches no future at all.
Spurious wake-ups are allowed, because a waiter checks again after each wake-up. No wake-up is ever
lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

__all__ = ["AVAILABLE", "Availability", "all_of"]


class Availability:
    """A flag, with a future that waiters can await while the flag is down."""

    __slots__ = ("_callbacks", "is_available")

    def __init__(self, available: bool = False) -> None:
        self.is_available = available
        self._callbacks: list[Callable[[], None]] = []

    def set_available(self) -> None:
        """Raises the flag and wakes all waiters. Idempotent."""
        self.is_available = True
        if self._callbacks:
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()

    def set_unavailable(self) -> None:
        """Lowers the flag.

        Futures that were returned earlier stay valid: they complete at the next `set_available`.
        """
        self.is_available = False

    def get_available_future(self) -> asyncio.Future[None]:
        """Returns a future that completes when the flag is raised. Each caller gets a future of its
        own, and may cancel it.

        Must be called on the loop.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        wake = partial(_complete, future)
        self.on_available(wake)
        if not future.done():
            future.add_done_callback(lambda _: self._withdraw(wake))
        return future

    def _withdraw(self, callback: Callable[[], None]) -> None:
        """Forgets the callback of a future that was cancelled by its waiter."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    def on_available(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once, synchronously, when the flag is raised, or at once if it is
        already up.
        """
        if self.is_available:
            callback()
        else:
            self._callbacks.append(callback)


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


AVAILABLE = Availability(available=True)
"""A provider that is always available. It must never be lowered."""


def all_of(providers: Sequence[Availability]) -> Availability:
    """Returns a provider that becomes available once each of `providers` has been available at some
    time since this call.

    The provider is valid for one wait. Call `all_of` again for each further wait.
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
