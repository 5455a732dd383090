"""Decides which checkpoint is taken next, and when.

Savepoints come first, then the final checkpoint, then requested checkpoints, then periodic ones.
The state of the final checkpoint:

    AHEAD      --every subtask has processed all its data--> UNDER_WAY --complete--> COMPLETE
    UNDER_WAY  --failed--> AHEAD, again after a while
    COMPLETE   --the job restarts--> AHEAD

Nothing is taken after the final checkpoint: the tasks are ending. After Flink's
CheckpointRequestDecider.
"""

from __future__ import annotations

from enum import Enum, auto

from aioflow.checkpoint.completed import CheckpointKind
from aioflow.checkpoint.instructions import CoordinatorOptions, Moment
from aioflow.checkpoint.plan import CheckpointRefused, SubtaskTable
from aioflow.checkpoint.requests import Request, RequestQueue

__all__ = ["CheckpointTurns"]

FINAL_RETRY_S = 1.0
"""A failed final checkpoint is retried after this long: the tasks wait for it, and a full store
must not be asked in a loop.
"""

FINAL_REPEAT_S = 5.0
"""The completion of the final checkpoint is repeated after this long, while tasks wait for it: no
later one will tell them.
"""


class _Final(Enum):
    AHEAD = auto()
    UNDER_WAY = auto()
    COMPLETE = auto()


class CheckpointTurns:
    """Queues requests, times periodic checkpoints, and tracks the final checkpoint.

    `subtasks` is read, never changed.
    """

    def __init__(self, options: CoordinatorOptions, subtasks: SubtaskTable) -> None:
        self._options = options
        self._subtasks = subtasks
        self._requests = RequestQueue()
        self._stop: Request | None = None
        """The request of a user's stop: the final checkpoint is made for it."""
        self._final = _Final.AHEAD
        self._final_at_s = 0.0
        """Time when the final checkpoint is retried, or its completion is notified again."""
        self._periodic_at_s: float | None = None
        self._last_completion_s: float | None = None

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested whose final checkpoint is not triggered yet."""
        return self._stop is not None

    @property
    def final_is_complete(self) -> bool:
        """Whether the final checkpoint is complete. Nothing more is taken then, unless the job
        restarts.
        """
        return self._final is _Final.COMPLETE

    # Requests.

    def add(self, request: Request) -> Request | None:
        """Queues a request. If the queue is full, returns the request that was removed."""
        return self._requests.add(request)

    def stop(self, request: Request) -> None:
        """Sets `request` as the request that the final checkpoint answers."""
        self._stop = request

    def clear(self) -> list[Request]:
        """Removes all queued requests, and returns them in order. A requested stop stays."""
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
        """Notes that a checkpoint was triggered; the interval counts from here."""
        if request.final:
            self._final = _Final.UNDER_WAY
        if self._options.interval_ms is not None and not request.kind.is_savepoint:
            self._periodic_at_s = now.s + self._options.interval_ms / 1000

    def completed(self, request: Request, now: Moment) -> None:
        """Notes that a checkpoint completed; the minimum pause counts from here."""
        self._last_completion_s = now.s
        if request.final:
            self._final, self._final_at_s = _Final.COMPLETE, now.s + FINAL_REPEAT_S

    def failed(self, request: Request, now: Moment) -> None:
        """Notes that a checkpoint failed. A final one is retried after a while."""
        if request.final:
            self._final, self._final_at_s = _Final.AHEAD, now.s + FINAL_RETRY_S

    def restarted(self, now: Moment) -> None:
        """Notes that ended tasks run again, so that another final checkpoint is needed."""
        if self._final is _Final.COMPLETE:
            self._final, self._final_at_s = _Final.AHEAD, now.s

    # Decisions.

    def take(self, now: Moment) -> Request | None:
        """Returns the request to trigger now, None if there is none."""
        if self._final is not _Final.AHEAD:
            return None
        first = self._requests.first
        if first is not None and first.tries and self._subtasks.any_closing:
            first = None  # It failed because a task is about to end, and would fail again.
        if first is not None and first.kind.is_savepoint:
            return self._requests.take()
        if self._subtasks.all_at_end:
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

        Without a slot no further checkpoint can be triggered.
        """
        if self._awaits_the_end:
            return self._final_at_s
        if not has_slot or self._final is not _Final.AHEAD:
            return None
        return self._final_at_s if self._subtasks.all_at_end else self._periodic_due(None)

    @property
    def _awaits_the_end(self) -> bool:
        """Whether the final checkpoint is complete, and tasks may not know that yet."""
        return self._final is _Final.COMPLETE and self._subtasks.any_at_end

    def _final_request(self) -> Request:
        if self._stop is None:
            return Request(kind=CheckpointKind.CHECKPOINT, final=True)
        request, self._stop = self._stop, None
        return request

    def _periodic_due(self, now: Moment | None) -> float | None:
        """Returns when the next periodic checkpoint is due, None if never or not all tasks run.

        The first one is due an interval after all tasks run.
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
