"""The queue of requests for checkpoints and savepoints. After Flink's CheckpointRequestDecider.

Savepoints go before checkpoints; requests of the same kind are served in order of arrival. Periodic
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
    """A request for a checkpoint or savepoint.

    The requester chooses `number`, and the answer contains it. None means a request of the engine
    itself, which needs no answer.
    """

    kind: CheckpointKind
    number: int | None = None
    directory: str = ""
    """URL of the directory for the files of a savepoint."""
    final: bool = False
    """Whether the checkpoint is the final one of a job, at the end of its data."""
    tries: int = 0
    """Number of earlier tries that failed because a task was about to end."""


class RequestQueue:
    """The queue of requests for checkpoints and savepoints, in the order in which they will be
    served.
    """

    def __init__(self, requests_max: int = REQUESTS_MAX) -> None:
        self._max = requests_max
        self._queues: tuple[list[Request], list[Request]] = ([], [])
        """Queue of savepoints, and queue of checkpoints."""

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def add(self, request: Request) -> Request | None:
        """Adds a request. If the queue is full, removes the last one in order and returns it."""
        self._queues[0 if request.kind.is_savepoint else 1].append(request)
        if len(self) <= self._max:
            return None
        return next(queue.pop() for queue in reversed(self._queues) if queue)

    @property
    def first(self) -> Request | None:
        return next((queue[0] for queue in self._queues if queue), None)

    def take(self) -> Request:
        """Removes the first request and returns it."""
        return next(queue.pop(0) for queue in self._queues if queue)

    def clear(self) -> list[Request]:
        """Removes all requests, and returns them in order."""
        requests = [request for queue in self._queues for request in queue]
        for queue in self._queues:
            queue.clear()
        return requests
