"""Where a ResourceManager gets workers from, if they do not come by themselves: somebody who starts
them elsewhere.

Each worker registers like any TaskManager, under an id that was never used before; what was started
and will not come is reported, and the ResourceManager alone decides what is started instead. So
there is one restart policy, whoever owns the machines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["WorkerProvider"]


class WorkerProvider(Protocol):
    """Called on the loop of the ResourceManager, and must not hold it."""

    @property
    def workers(self) -> int:
        """So many there should be at any time."""

    @property
    def slots(self) -> int:
        """Of each worker."""

    def start_workers(self, count: int, failed: Callable[[], object]) -> None:
        """Begin to start so many.

        `failed` is called once for each that will not register, on whichever thread; it is safe
        there.
        """

    def registered(self, worker_id: str) -> None:
        """This worker has come."""

    def lost(self, worker_id: str) -> None:
        """This worker is given up, though it may still run: end it, so that it does not hold the
        place of its replacement.
        """
