"""The interface for starting workers, for a ResourceManager whose workers do not come by
themselves.

Each worker registers like any TaskManager, under an unused id. A worker that will not register is
reported as failed. Only the ResourceManager decides which workers are started instead. So there is
one restart policy for all kinds of machines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aioflow.core.errors import Broken

__all__ = ["WorkerProvider"]


class WorkerProvider(Protocol):
    """Starts workers. Its methods run on the ResourceManager's loop and must not block."""

    @property
    def workers(self) -> int:
        """Number of workers that should run at any time."""

    @property
    def slots(self) -> int:
        """Number of slots of each worker."""

    def start_workers(self, count: int, failed: Callable[[], object]) -> None:
        """Begins to start `count` workers.

        `failed` is called once for each worker that will not register. It is safe to call from any
        thread.
        """

    def registered(self, worker_id: str) -> None:
        """Notes that this worker has registered."""

    def lost(self, worker_id: str, reason: str) -> Broken | None:
        """Notes that this worker is lost.

        It may still run: end it to make room for its replacement. Returns the error of the tasks
        that ran there, if the provider can say more than `reason`.
        """
