"""Who asked for a checkpoint, and whose turn it is. After Flink's CheckpointRequestDecider.

Savepoints go before checkpoints, within a sort first come, first served. What the clock asks for
goes last: it is no entry here, the coordinator looks at the clock when nobody waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from aioflow.checkpoint.completed import CheckpointKind

__all__ = ["REQUESTS_MAX", "Request", "RequestQueue"]

REQUESTS_MAX = 1000
"""So many wait at most; beyond, the last in order is turned away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`number` is the asker's: the answer goes by it.

    None: the engine itself asks, and nobody waits for an answer.
    """

    kind: CheckpointKind
    number: int | None = None
    directory: str = ""
    """Of a savepoint: the URL that its files go to."""
    final: bool = False
    """The last one of a job that is through with its data."""
    tries: int = 0
    """How often it was begun before, and met a task that was about to end."""


class RequestQueue:
    """Requests that wait for their turn."""

    def __init__(self, requests_max: int = REQUESTS_MAX) -> None:
        self._max = requests_max
        self._queues: tuple[list[Request], list[Request]] = ([], [])
        """Savepoints, checkpoints."""

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def add(self, request: Request) -> Request | None:
        """Returns the request that had to go, if one had to."""
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
