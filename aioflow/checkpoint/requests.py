"""The requests for checkpoints and their order. After Flink's CheckpointRequestDecider.

Savepoints go before checkpoints; within a kind the order is first come, first served. Periodic
checkpoints go last and have no entry here: the coordinator looks at the clock when the queue is
empty.
"""

from __future__ import annotations

from dataclasses import dataclass

from aioflow.checkpoint.completed import CheckpointKind

__all__ = ["REQUESTS_MAX", "Request", "RequestQueue"]

REQUESTS_MAX = 1000
"""Maximum number of waiting requests; beyond, the last in order is turned away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`number` is chosen by the requester, and the answer quotes it.

    None: the engine itself asks, and needs no answer.
    """

    kind: CheckpointKind
    number: int | None = None
    directory: str = ""
    """Of a savepoint: the URL that its files go to."""
    final: bool = False
    """Whether it is the final one of a job that has reached the end of its data."""
    tries: int = 0
    """Number of earlier tries that met a task which was about to end."""


class RequestQueue:
    """Requests that wait for their turn."""

    def __init__(self, requests_max: int = REQUESTS_MAX) -> None:
        self._max = requests_max
        self._queues: tuple[list[Request], list[Request]] = ([], [])
        """Savepoints, checkpoints."""

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def add(self, request: Request) -> Request | None:
        """Returns the request that was turned away, if any."""
        self._queues[0 if request.kind.is_savepoint else 1].append(request)
        if len(self) <= self._max:
            return None
        return next(queue.pop() for queue in reversed(self._queues) if queue)

    @property
    def first(self) -> Request | None:
        return next((queue[0] for queue in self._queues if queue), None)

    def take(self) -> Request:
        """Remove the first one."""
        return next(queue.pop(0) for queue in self._queues if queue)

    def clear(self) -> list[Request]:
        """Remove all, in their order."""
        requests = [request for queue in self._queues for request in queue]
        for queue in self._queues:
            queue.clear()
        return requests
