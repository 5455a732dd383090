"""Decides which checkpoint is taken next, and when. The design follows Flink's
CheckpointRequestDecider.

Savepoints come first, then the final checkpoint, requested checkpoints, and periodic ones. Within a
kind the order is first come, first served. Periodic checkpoints have no entry in the queue: the
coordinator looks at the clock when the queue is empty.

    The final checkpoint:
    AHEAD      --every subtask has processed its data--> UNDER_WAY --complete--> COMPLETE
    UNDER_WAY  --failed--> AHEAD, again after a while
    COMPLETE   --the job restarts--> AHEAD

No checkpoint is taken after the final one, because the tasks are ending. While a checkpoint pauses
the tasks for a rescaling, and until the tasks of the rescaled job run, all requests wait.
`PendingCheckpoint` is an unfinished checkpoint, with the tasks that must still acknowledge it and
the state that the other tasks have reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from aioflow.checkpoint.completed import (
    CheckpointedOperator,
    CheckpointKind,
    CompletedCheckpoint,
    SubtaskState,
)
from aioflow.checkpoint.instructions import CoordinatorOptions, Moment
from aioflow.checkpoint.plan import CheckpointPlan, CheckpointRefused, SubtaskTable
from aioflow.core.elements import CheckpointBarrier
from aioflow.core.scope import ExecutionAttemptId

__all__ = ["REQUESTS_MAX", "CheckpointTurns", "PendingCheckpoint", "Request", "RequestQueue"]

REQUESTS_MAX = 1000
"""Maximum number of waiting requests. Beyond this number, the request that is last in order is
refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for a checkpoint or savepoint.

    `number` is chosen by the requester and returned in the answer. None means a request of the
    engine itself, which needs no answer.
    """

    kind: CheckpointKind
    number: int | None = None
    directory: str = ""
    """URL of the directory for the files of a savepoint."""
    final: bool = False
    """Whether the checkpoint is the final one of a job, at the end of its data."""
    holds: bool = False
    """Whether tasks process nothing after the checkpoint, because the job restarts from it."""
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
        """Adds a request. If the queue is full, removes the request that is last in order and
        returns it."""
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


FINAL_RETRY_S = 1.0
"""Delay before a failed final checkpoint is retried. The tasks wait for the final checkpoint, but a
full store must not be asked in a loop.
"""

FINAL_REPEAT_S = 5.0
"""Interval at which waiting tasks are notified again that the final checkpoint is complete. The
repetition is needed because no later checkpoint will notify them.
"""


class _Final(Enum):
    AHEAD = auto()
    UNDER_WAY = auto()
    COMPLETE = auto()


class _Hold(Enum):
    NONE = "tasks process their input"
    HELD = "tasks process nothing, because of a checkpoint"
    RESTARTING = "the job restarts from that checkpoint"


class CheckpointTurns:
    """Queues requests, times periodic checkpoints, and tracks the final checkpoint.

    `subtasks` tells which subtasks run; it is only read here.
    """

    def __init__(self, options: CoordinatorOptions, subtasks: SubtaskTable) -> None:
        self._options = options
        self._subtasks = subtasks
        self._requests = RequestQueue()
        self._stop: Request | None = None
        """The user's request to stop, which is answered with the final checkpoint; None if there is
        none."""
        self._hold = _Hold.NONE
        self._final = _Final.AHEAD
        self._final_at_s = 0.0
        """Time when the final checkpoint is retried, or when tasks are notified of its completion
        again."""
        self._periodic_at_s: float | None = None
        self._last_completion_s: float | None = None

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested whose final checkpoint is not triggered yet."""
        return self._stop is not None

    @property
    def final_is_complete(self) -> bool:
        """Whether the final checkpoint is complete. After it, no further checkpoint is taken unless
        the job restarts.
        """
        return self._final is _Final.COMPLETE

    # Requests.

    def add(self, request: Request) -> Request | None:
        """Queues a request. If the queue is full, returns the request that was removed."""
        return self._requests.add(request)

    def stop(self, request: Request) -> None:
        """Sets `request` as the request that is answered with the final checkpoint."""
        self._stop = request

    def clear(self) -> list[Request]:
        """Removes all queued requests, and returns them in order. A requested stop is kept."""
        return self._requests.clear()

    def give_up(self) -> list[Request]:
        """Removes all queued requests and a requested stop, and returns them."""
        waiting = self._requests.clear()
        if self._stop is not None:
            waiting.append(self._stop)
            self._stop = None
        return waiting

    # Outcomes.

    def triggered(self, request: Request, now: Moment) -> None:
        """Notes that a checkpoint was triggered. The interval to the next one begins at `now`."""
        if request.final:
            self._final = _Final.UNDER_WAY
        if request.holds:
            self._hold = _Hold.HELD
        if self._options.interval_ms is not None and not request.kind.is_savepoint:
            self._periodic_at_s = now.s + self._options.interval_ms / 1000

    def completed(self, request: Request, now: Moment) -> None:
        """Notes that a checkpoint completed. The minimum pause begins at `now`."""
        self._last_completion_s = now.s
        if request.final:
            self._final, self._final_at_s = _Final.COMPLETE, now.s + FINAL_REPEAT_S

    def failed(self, request: Request, now: Moment) -> None:
        """Notes that a checkpoint failed. A final checkpoint is retried after a while."""
        if request.final:
            self._final, self._final_at_s = _Final.AHEAD, now.s + FINAL_RETRY_S
        if request.holds:
            self._hold = _Hold.NONE

    def restarted(self, now: Moment) -> None:
        """Notes that ended tasks run again, so that another final checkpoint is needed."""
        if self._final is _Final.COMPLETE:
            self._final, self._final_at_s = _Final.AHEAD, now.s
        if self._hold is _Hold.HELD:
            self._hold = _Hold.RESTARTING

    # Decisions.

    def take(self, now: Moment, *, alone: bool = True) -> Request | None:
        """Returns the request to trigger now, None if there is none.

        `alone` tells that no checkpoint is under way. A request that pauses the tasks waits for
        this, because the job restarts after its checkpoint. If all data is processed, the final
        checkpoint comes first, and a request that pauses the tasks is then refused.
        """
        if self._final is not _Final.AHEAD or self._waits_for_rescaling():
            return None
        first, all_at_end = self._requests.first, self._subtasks.all_at_end
        if first is not None and first.holds and not (alone or all_at_end):
            return None
        if first is not None and first.tries and self._subtasks.any_closing:
            first = None  # It failed because a task is about to end, and would fail again.
        if first is not None and first.kind.is_savepoint:
            return self._requests.take()
        if all_at_end:
            return self._final_request() if now.s >= self._final_at_s else None
        if self._stop is not None and self._subtasks.any_at_end:
            return None
        if first is not None:
            return self._requests.take()
        due = self._periodic_due(now)
        return Request(kind=CheckpointKind.CHECKPOINT) if due is not None and now.s >= due else None

    def repeats(self, now: Moment) -> bool:
        """Whether it is time to notify tasks again that the final checkpoint is complete."""
        if not self._awaits_the_end or now.s < self._final_at_s:
            return False
        self._final_at_s = now.s + FINAL_REPEAT_S
        return True

    def next_due(self, *, has_slot: bool) -> float | None:
        """Returns when to ask again even if no event happens, in seconds of the monotonic clock, or
        None.

        `has_slot` tells whether a further checkpoint may be triggered, given the limit of
        concurrent ones.
        """
        if self._awaits_the_end:
            return self._final_at_s
        if not has_slot or self._final is not _Final.AHEAD or self._waits_for_rescaling():
            return None
        if self._subtasks.all_at_end:
            return self._final_at_s
        first = self._requests.first
        return None if first is not None and first.holds else self._periodic_due(None)

    def _waits_for_rescaling(self) -> bool:
        """Whether a rescaling has paused the tasks, or some of the new tasks do not run yet."""
        if self._hold is _Hold.RESTARTING and isinstance(self._subtasks.plan(), CheckpointPlan):
            self._hold = _Hold.NONE
        return self._hold is not _Hold.NONE

    @property
    def _awaits_the_end(self) -> bool:
        """Whether the final checkpoint is complete, but tasks may not know this yet."""
        return self._final is _Final.COMPLETE and self._subtasks.any_at_end

    def _final_request(self) -> Request:
        if self._stop is None:
            return Request(kind=CheckpointKind.CHECKPOINT, final=True)
        request, self._stop = self._stop, None
        return request

    def _periodic_due(self, now: Moment | None) -> float | None:
        """Returns when the next periodic checkpoint is due. Returns None if there are no periodic
        checkpoints, or if not all tasks run.

        The first one is due an interval after all tasks have started to run.
        """
        interval_ms = self._options.interval_ms
        if interval_ms is None or isinstance(self._subtasks.plan(), CheckpointRefused):
            return None
        if self._stop is not None and self._subtasks.any_at_end:
            return None
        if self._periodic_at_s is None:
            if now is None:
                return None
            self._periodic_at_s = now.s + interval_ms / 1000
        if self._last_completion_s is None:
            return self._periodic_at_s
        return max(self._periodic_at_s, self._last_completion_s + self._options.min_pause_ms / 1000)


@dataclass(slots=True, kw_only=True)
class PendingCheckpoint:
    """A checkpoint that was triggered and has not completed or failed yet.

    `waiting` holds the attempts that must still acknowledge. `states` holds the state of the other
    subtasks, by (uid of the vertex, subtask index). `states` contains finished subtasks from the
    beginning.
    """

    barrier: CheckpointBarrier
    request: Request
    plan: CheckpointPlan
    begun_s: float
    expires_s: float
    waiting: dict[ExecutionAttemptId, None]
    states: dict[tuple[str, int], SubtaskState] = field(default_factory=dict)
    storing: CompletedCheckpoint | None = None
    """The checkpoint that is being stored, set once all tasks have acknowledged."""

    @property
    def id(self) -> int:
        return self.barrier.checkpoint_id

    def __str__(self) -> str:
        return f"{'savepoint' if self.request.kind.is_savepoint else 'checkpoint'} {self.id}"

    def complete(
        self,
        flow: str,
        job_id: str,
        operators: tuple[CheckpointedOperator, ...],
        order: Iterable[tuple[str, int]],
        now_ms: int,
    ) -> CompletedCheckpoint:
        """Returns the checkpoint to store. All tasks must have acknowledged.

        `order` lists the subtasks, (uid, index), in the order in which the metadata lists them.
        """
        self.storing = CompletedCheckpoint(
            checkpoint_id=self.id,
            kind=self.request.kind,
            flow=flow,
            job_id=job_id,
            triggered_ms=self.barrier.timestamp_ms,
            completed_ms=now_ms,
            operators=operators,
            subtasks={subtask: self.states[subtask] for subtask in order},
            directory=self.request.directory,
        )
        return self.storing

    def missing(self, timeout_ms: int, name_of: Callable[[ExecutionAttemptId], str]) -> str:
        """Returns the part of an error message that names the tasks which have not acknowledged
        within `timeout_ms`.
        """
        if self.storing is not None:
            return f"{timeout_ms} ms have passed, and it is still being stored"
        return f"{timeout_ms} ms have passed without a word of {self.waits_for(name_of)}"

    def waits_for(self, name_of: Callable[[ExecutionAttemptId], str]) -> str:
        """Returns the name of a task that has not acknowledged, and the number of the others.

        Returns "the store" if all tasks have acknowledged and the checkpoint is being stored.
        """
        if self.storing is not None:
            return "the store"
        rest = len(self.waiting) - 1
        return name_of(next(iter(self.waiting))) + (f" and {rest} more" if rest else "")
