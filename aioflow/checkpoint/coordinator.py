"""Coordinates the checkpoints of one job: when to trigger the next one, which tasks have
acknowledged, and which checkpoints complete or fail.

The coordinator only decides. Each method handles one event, such as the report of a task, and
returns instructions, which the JobMaster carries out in order. Time is an argument. Every message
of a task names its attempt, and messages of an older attempt change nothing.

    requested  --slot free, all tasks running--> PENDING
    PENDING    --last acknowledgement--> STORING --stored--> completed
    PENDING    --declined, expired, subsumed, a task lost--> aborted
    STORING    --not stored, expired, subsumed, job restarted--> aborted,
               and what may have been stored is deleted

A checkpoint is complete when its metadata is durable. Only then are tasks notified, and sinks
commit. A complete checkpoint subsumes every earlier checkpoint that is unfinished. The complete
checkpoint also covers commits that earlier checkpoints left unconfirmed: a sink commits everything
that was prepared up to the complete checkpoint. Ids only rise, over restarts and restores too. A
savepoint that does not stop the job subsumes nothing, and its completion is not announced to tasks.
The job never restarts from such a savepoint. So sinks commit nothing when it completes.
`request_decider.py` decides which checkpoint is taken next, and when. The design follows Flink's
CheckpointCoordinator and CheckpointFailureManager.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from aioflow.checkpoint.completed import (
    CheckpointKind,
    CheckpointRetention,
    CheckpointStats,
    CompletedCheckpoint,
    Discard,
    SubtaskState,
)
from aioflow.checkpoint.instructions import (
    Answer,
    CheckpointFailureReason,
    CoordinatorOptions,
    FailJob,
    FailureCounter,
    Instruction,
    Moment,
    NotifyAborted,
    NotifyComplete,
    Store,
    Trigger,
    WakeAt,
    WarnBehind,
)
from aioflow.checkpoint.plan import CheckpointedVertex, CheckpointRefused, SubtaskTable
from aioflow.checkpoint.request_decider import CheckpointTurns, PendingCheckpoint, Request
from aioflow.checkpoint.statistics import CheckpointStatistics
from aioflow.core.elements import CheckpointBarrier
from aioflow.core.errors import CheckpointError, ValueNotSupported, message_of
from aioflow.core.scope import ExecutionAttemptId

__all__ = ["CheckpointCoordinator"]

_RETRIED = (CheckpointFailureReason.TASK_FAILURE, CheckpointFailureReason.TASK_CLOSING)
"""If the savepoint of a stop fails for one of these reasons, it is tried again, and the stop goes
on."""

_CLOSING = (
    CheckpointFailureReason.TASK_CLOSING,
    CheckpointFailureReason.CANCELLATION_BARRIER,
)
"""Reasons for an abort that are not errors: a task ended while the checkpoint was pending. The
reason is reported by this task or by a task downstream.
"""

CLOSING_TRIES = 5
"""Number of times that a requested checkpoint or savepoint is tried again because a task ended."""

LATE_INTERVALS = 3
LATE_MS = 5_000
"""Age of a checkpoint, in intervals and in ms, above which a warning is logged.

The next warning comes at twice the age at which the last one came, so checkpoints that all take
equally long cause only one warning. Once a checkpoint takes less than an interval, warnings start
again at this first age.
"""

_ENDED_BADLY_MAX = 1000
"""Number of failed checkpoints that are remembered. State files in acknowledgements of older ones
are left to the sweep of unreferenced files.
"""


class CheckpointCoordinator:
    """Coordinates the checkpoints of one job.

    `vertices` are in topological order. `first_id` is larger than every checkpoint id in the flow's
    store.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        vertices: Sequence[CheckpointedVertex],
        *,
        flow: str = "",
        job_id: str = "",
        first_id: int = 1,
    ) -> None:
        self.options = options
        self.statistics = CheckpointStatistics(vertices)
        self._flow = flow
        self._job_id = job_id
        self._next_id = first_id
        self._subtasks = SubtaskTable(vertices)
        self._describe(vertices)
        self._retention = CheckpointRetention(options.retain)
        self._turns = CheckpointTurns(options, self._subtasks)
        self._failures = FailureCounter(options.tolerable_failures)
        self._pending: dict[int, PendingCheckpoint] = {}
        """Checkpoints under way, by id in ascending order, including those being stored."""
        self._doomed: dict[int, CompletedCheckpoint] = {}
        """Checkpoints that were aborted while they were stored. The store may hold them or not."""
        self._ended_badly: dict[int, None] = {}
        self._finished: dict[tuple[str, int], None] = {}
        self._needs_full = False
        """Whether the next checkpoint must be full. This holds until the first completion after a
        restore without claim, because new checkpoints must not refer to files of the restored
        checkpoint.
        """
        self._wake_at_s: float | None = None
        interval_ms = options.interval_ms
        self._late_at_first_ms = (
            inf if interval_ms is None else max(LATE_INTERVALS * interval_ms, LATE_MS)
        )
        self._late_ms = self._late_at_first_ms
        """Age of a checkpoint, in ms, at which the next warning is logged."""
        self._is_over = False

    def _describe(self, vertices: Sequence[CheckpointedVertex]) -> None:
        """Notes the vertices that later checkpoints contain."""
        self._operators = tuple(operator for vertex in vertices for operator in vertex.operators)
        self._uids = {vertex.vertex_id: vertex.uid for vertex in vertices}
        self._order = [
            (vertex.uid, index) for vertex in vertices for index in range(vertex.parallelism)
        ]

    @property
    def latest(self) -> CompletedCheckpoint | None:
        """The checkpoint that a restart begins with: the newest checkpoint that tasks were notified
        of, or the restored checkpoint. None if there is neither.
        """
        return self._retention.latest

    @property
    def is_ending(self) -> bool:
        """Whether the final checkpoint is complete. Then the tasks end, and no further checkpoint
        is taken."""
        return self._turns.final_is_complete

    @property
    def next_id(self) -> int:
        return self._next_id

    # Events of the job.

    def restored(self, checkpoint: CompletedCheckpoint, now: Moment, *, claim: bool) -> None:
        """Notes that the job begins with `checkpoint`. Call this method before tasks are deployed.

        With `claim` the checkpoint belongs to this job, and is deleted when newer checkpoints are
        complete.
        """
        self._next_id = max(self._next_id, checkpoint.checkpoint_id + 1)
        self._retention.restored(checkpoint, claim=claim)
        self._needs_full = not claim
        self.statistics.restored(
            checkpoint.checkpoint_id, checkpoint.kind, checkpoint.location, now.ms
        )

    def kept(self, older: CompletedCheckpoint) -> None:
        """Notes an `older` checkpoint that a former run retained. The checkpoint is treated like
        the checkpoints of this job.

        Call this method before `restored`, oldest checkpoint first.
        """
        self._retention.restored(older, claim=True)

    def restart(self, subtasks: Iterable[tuple[int, int]], now: Moment) -> list[Instruction]:
        """Prepares for a restart of `subtasks`, (vertex id, index) pairs, from the checkpoint
        `latest`.

        All unfinished checkpoints are aborted.
        """
        for vertex_id, index in subtasks:
            self._subtasks.reset(vertex_id, index)
            self._finished.pop((self._uids[vertex_id], index), None)
        instructions = self._abort_all(
            CheckpointFailureReason.TASK_FAILURE, "the job restarts", now
        )
        self._turns.restarted(now)
        latest = self.latest
        if latest is not None:
            self.statistics.restored(latest.checkpoint_id, latest.kind, latest.location, now.ms)
        return self._after(instructions, now)

    def rescaled(self, vertices: Sequence[CheckpointedVertex], now: Moment) -> list[Instruction]:
        """Replaces the vertices by the same vertices at another parallelism. The caller then calls
        `restart`.

        Unfinished checkpoints are aborted, because they belong to the former tasks.
        """
        instructions = self._abort_all(
            CheckpointFailureReason.TASK_FAILURE, "the job is rescaled", now
        )
        changed = self._subtasks.rescaled(vertices)
        uids = {self._uids[vertex_id] for vertex_id in changed}
        for subtask in [one for one in self._finished if one[0] in uids]:
            del self._finished[subtask]
        self._describe(vertices)
        self.statistics.rescaled(vertices)
        return instructions

    def shutdown(self, now: Moment) -> list[Instruction]:
        """Ends the coordination because the job is over. Aborts all checkpoints, refuses all
        requests.
        """
        instructions = self._abort_all(CheckpointFailureReason.SHUTDOWN, "", now)
        for request in self._turns.give_up():
            instructions += self._refuse(request, CheckpointFailureReason.SHUTDOWN, "")
        self._is_over = True
        return self._after(instructions, now)

    def tick(self, now: Moment) -> list[Instruction]:
        """Handles everything that is due at `now`: timeouts, warnings, and the next checkpoint.

        An early call is harmless: the returned `WakeAt` contains the next time to call.
        """
        self._wake_at_s = None
        instructions: list[Instruction] = []
        for pending in list(self._pending.values()):
            if now.s >= pending.expires_s and pending.id in self._pending:
                detail = pending.missing(self.options.timeout_ms, self._subtasks.name_of)
                instructions += self._abort(pending, CheckpointFailureReason.EXPIRED, detail, now)
        instructions += self._warnings(now)
        if not self._is_over and self.latest is not None and self._turns.repeats(now):
            instructions.append(NotifyComplete(self.latest.checkpoint_id))
        return self._after(instructions, now)

    # Events of tasks.

    def task_running(self, attempt: ExecutionAttemptId, now: Moment) -> list[Instruction]:
        self._subtasks.running(attempt)
        return self._after([], now)

    def task_finished(self, attempt: ExecutionAttemptId, now: Moment) -> list[Instruction]:
        """Notes that a task has finished. Later checkpoints repeat its last state.

        Checkpoints that still wait for the task are aborted.
        """
        if not self._subtasks.finished(attempt):
            return []
        self._finished[self._uids[attempt.vertex_id], attempt.subtask_index] = None
        instructions: list[Instruction] = []
        for pending in list(self._pending.values()):
            if attempt in pending.waiting:
                detail = f"{self._subtasks.name_of(attempt)} has finished"
                instructions += self._abort(
                    pending, CheckpointFailureReason.TASK_CLOSING, detail, now
                )
        return self._after(instructions, now)

    def task_lost(self, attempt: ExecutionAttemptId, now: Moment) -> list[Instruction]:
        """Notes that a task has failed, was cancelled, or is being cancelled.

        All pending checkpoints are aborted, except those that are already being stored.
        """
        if not self._subtasks.lost(attempt):
            return []
        instructions: list[Instruction] = []
        for pending in list(self._pending.values()):
            if pending.storing is None:
                detail = f"{self._subtasks.name_of(attempt)} is gone"
                instructions += self._abort(
                    pending, CheckpointFailureReason.TASK_FAILURE, detail, now
                )
        return self._after(instructions, now)

    def end_of_data_reached(self, attempt: ExecutionAttemptId, now: Moment) -> list[Instruction]:
        """Notes that a task has processed all its data, and waits for the final checkpoint.

        While a stop waits for its savepoint, no task may end with another checkpoint, because tasks
        downstream would not take the final one. So checkpoints that wait for this task are aborted.
        """
        self._subtasks.end_of_data(attempt)
        instructions: list[Instruction] = []
        for pending in list(self._pending.values()):
            if (
                self._turns.is_stopping
                and attempt in pending.waiting
                and not pending.request.kind.is_savepoint
            ):
                if pending.request.number is not None:
                    self._turns.add(pending.request)  # The final checkpoint will answer it.
                    pending.request = replace(pending.request, number=None)
                detail = f"{self._subtasks.name_of(attempt)} was stopped before it"
                instructions += self._abort(
                    pending, CheckpointFailureReason.TASK_CLOSING, detail, now
                )
        return self._after(instructions, now)

    def acknowledge(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        state: SubtaskState,
        stats: CheckpointStats,
        now: Moment,
    ) -> list[Instruction]:
        """Notes that a subtask has written its part of a checkpoint.

        The files of `state` are deleted if it comes too late, or from an attempt that takes no part
        in the checkpoint.
        """
        pending = self._pending.get(checkpoint_id)
        if pending is None or attempt not in pending.waiting:
            is_strange = pending is not None and attempt not in pending.plan.acknowledging
            if is_strange or checkpoint_id in self._ended_badly:
                return self._discard(self._retention.unreferenced(state))
            # A duplicate, or unknown: deleting a file that may be referred to would be worse than
            # an orphan.
            return []
        deleted = self._retention.deleted(state)
        if deleted:
            detail = f"by {self._subtasks.name_of(attempt)}: {deleted[0]}"
            instructions = self._abort(pending, CheckpointFailureReason.FILES_DELETED, detail, now)
            return self._after(
                instructions + self._discard(self._retention.unreferenced(state)), now
            )
        del pending.waiting[attempt]
        pending.states[self._uids[attempt.vertex_id], attempt.subtask_index] = state
        self._retention.refer(checkpoint_id, [state])
        self.statistics.acknowledged(
            checkpoint_id, attempt.vertex_id, attempt.subtask_index, stats, now.ms
        )
        if pending.waiting:
            return []
        checkpoint = pending.complete(
            self._flow, self._job_id, self._operators, self._order, now.ms
        )
        return [Store(checkpoint)]

    def decline(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        reason: str,
        now: Moment,
        error: BaseException | None = None,
    ) -> list[Instruction]:
        """Aborts a checkpoint that a subtask could not take.

        `reason` is the name of a CheckpointFailureReason; an unknown name counts as DECLINED.
        """
        if reason == CheckpointFailureReason.TASK_CLOSING:
            self._subtasks.closing(attempt)
        pending = self._pending.get(checkpoint_id)
        if (
            pending is None
            or pending.storing is not None
            or attempt not in pending.plan.acknowledging
        ):
            return []
        known = CheckpointFailureReason.__members__.get(reason, CheckpointFailureReason.DECLINED)
        detail = f"by {self._subtasks.name_of(attempt)}" + (
            "" if error is None else f": {type(error).__name__}: {message_of(error)}"
        )
        return self._after(self._abort(pending, known, detail, now, error), now)

    # Events of the store.

    def stored(self, checkpoint_id: int, location: str, now: Moment) -> list[Instruction]:
        """Completes checkpoint `checkpoint_id`, which is now durable at the URL `location`."""
        doomed = self._doomed.pop(checkpoint_id, None)
        if doomed is not None:
            # The metadata must not outlive the files. The location says where the metadata is.
            return self._discard(
                self._retention.failed(checkpoint_id, replace(doomed, location=location))
            )
        pending = self._pending.pop(checkpoint_id)
        assert pending.storing is not None, (
            f"checkpoint {checkpoint_id} was stored before it was acknowledged"
        )
        checkpoint = replace(pending.storing, location=location)
        self._turns.completed(pending.request, now)
        self._failures.succeeded(checkpoint_id)
        if (
            self.options.interval_ms is not None
            and now.s - pending.begun_s < self.options.interval_ms / 1000
        ):
            self._late_ms = self._late_at_first_ms
        self.statistics.completed(checkpoint_id, location, now.ms)
        instructions: list[Instruction] = []
        discard = self._retention.ended(checkpoint_id)
        if checkpoint.kind is not CheckpointKind.SAVEPOINT:
            self._needs_full = False
            instructions.append(NotifyComplete(checkpoint_id))
            builds_on_older = [p.id for p in self._pending.values() if not p.barrier.full]
            older = self._retention.completed(checkpoint, builds_on_older)
            discard = Discard(
                (*discard.checkpoints, *older.checkpoints), (*discard.files, *older.files)
            )
            for other in list(self._pending.values()):
                if other.id < checkpoint_id and not other.request.kind.is_savepoint:
                    number, other.request = (
                        other.request.number,
                        replace(other.request, number=None),
                    )
                    detail = f"checkpoint {checkpoint_id} is complete"
                    instructions += self._abort(
                        other, CheckpointFailureReason.SUBSUMED, detail, now
                    )
                    if number is not None:  # The newer one contains more than was asked for.
                        instructions.append(Answer(number, checkpoint))
        if pending.request.number is not None:
            instructions.append(Answer(pending.request.number, checkpoint))
        if self._turns.final_is_complete:
            instructions += self._answer_the_rest(checkpoint)
        return self._after(instructions + self._discard(discard), now)

    def not_stored(
        self, checkpoint_id: int, error: BaseException, now: Moment
    ) -> list[Instruction]:
        """Aborts checkpoint `checkpoint_id`, because storing it failed or the outcome is
        unknown."""
        doomed = self._doomed.pop(checkpoint_id, None)
        if doomed is not None:
            return self._discard(self._retention.failed(checkpoint_id, doomed))
        pending = self._pending[checkpoint_id]
        detail = f"{type(error).__name__}: {message_of(error)}"
        return self._after(
            self._abort(
                pending, CheckpointFailureReason.IO_EXCEPTION, detail, now, error, is_known=True
            ),
            now,
        )

    # Requests of users. The caller chooses `number`, and an `Answer` quotes it.

    def request_checkpoint(self, number: int, now: Moment) -> list[Instruction]:
        """Requests a checkpoint outside the interval. The `Answer` to this request has the same
        `number`."""
        return self._request(Request(kind=CheckpointKind.CHECKPOINT, number=number), now)

    def request_hold(self, number: int, now: Moment) -> list[Instruction]:
        """Requests a checkpoint that pauses all tasks until they are cancelled, or until the
        checkpoint is aborted.

        While the tasks are paused, the job has processed exactly what the checkpoint contains.
        """
        request = Request(kind=CheckpointKind.CHECKPOINT, number=number, holds=True)
        return self._request(request, now)

    def request_savepoint(self, number: int, directory: str, now: Moment) -> list[Instruction]:
        """Requests a savepoint while the job goes on, with files below the URL `directory`."""
        return self._request(
            Request(kind=CheckpointKind.SAVEPOINT, number=number, directory=directory), now
        )

    def request_stop(
        self, number: int, now: Moment, *, savepoint: bool = True, directory: str = ""
    ) -> list[Instruction]:
        """Requests the final checkpoint of a job whose sources are being stopped.

        The final checkpoint is a savepoint in `directory`, or with `savepoint=False` a plain
        checkpoint.
        """
        if self._is_over or self._turns.is_stopping:
            refused = Request(kind=CheckpointKind.SYNC_SAVEPOINT, number=number)
            if self._is_over:
                return self._refuse(refused, CheckpointFailureReason.SHUTDOWN, "")
            return self._refuse(
                refused,
                CheckpointFailureReason.TOO_MANY_REQUESTS,
                "the job is being stopped already",
            )
        kind = CheckpointKind.SYNC_SAVEPOINT if savepoint else CheckpointKind.CHECKPOINT
        self._turns.stop(Request(kind=kind, number=number, directory=directory, final=True))
        return self._after([], now)

    # Consequences.

    def _request(self, request: Request, now: Moment) -> list[Instruction]:
        if self._is_over:
            return self._refuse(request, CheckpointFailureReason.SHUTDOWN, "")
        turned_away = self._turns.add(request)
        instructions: list[Instruction] = []
        if turned_away is not None:
            instructions += self._refuse(turned_away, CheckpointFailureReason.TOO_MANY_REQUESTS, "")
        return self._after(instructions, now)

    def _after(self, instructions: list[Instruction], now: Moment) -> list[Instruction]:
        """Triggers the checkpoints that may be triggered now, and asks for the next `tick`.

        Every event ends with this call.
        """
        while not self._is_over and len(self._pending) < self.options.max_concurrent:
            request = self._turns.take(now, alone=not self._pending)
            if request is None:
                break
            instructions += self._trigger(request, now)
        due = self._next_due()
        if due != self._wake_at_s:
            self._wake_at_s = due
            instructions.append(WakeAt(due))
        return instructions

    def _next_due(self) -> float | None:
        if self._is_over:
            return None
        times = [pending.expires_s for pending in self._pending.values()]
        times += [self._late_s(pending) for pending in self._pending.values()]
        due = self._turns.next_due(has_slot=len(self._pending) < self.options.max_concurrent)
        if due is not None:
            times.append(due)
        due = min(times, default=inf)
        return None if due == inf else due

    def _warnings(self, now: Moment) -> list[Instruction]:
        warnings: list[Instruction] = []
        for pending in self._pending.values():
            if now.s >= self._late_s(pending) and self.options.interval_ms is not None:
                age_ms = round((now.s - pending.begun_s) * 1000)
                self._late_ms = 2.0 * age_ms
                warnings.append(
                    WarnBehind(
                        pending.id,
                        age_ms,
                        self.options.interval_ms,
                        pending.waits_for(self._subtasks.name_of),
                        next(iter(pending.waiting), None),
                    )
                )
        return warnings

    def _late_s(self, pending: PendingCheckpoint) -> float:
        """Returns the time of the next warning that `pending` is late, on the monotonic clock."""
        return inf if pending.request.kind.is_savepoint else pending.begun_s + self._late_ms / 1000

    def _trigger(self, request: Request, now: Moment) -> list[Instruction]:
        plan = self._subtasks.plan()
        if isinstance(plan, CheckpointRefused):
            return self._refuse(request, plan.reason, plan.detail)
        options, is_savepoint = self.options, request.kind.is_savepoint
        may_overtake = not (is_savepoint or request.final or request.holds)
        aligned_timeout_ms = options.aligned_timeout_ms if may_overtake else None
        barrier = CheckpointBarrier(
            self._next_id,
            now.ms,
            savepoint=is_savepoint,
            unaligned=may_overtake and (options.unaligned or aligned_timeout_ms == 0),
            aligned_timeout_ms=None if options.unaligned else aligned_timeout_ms,
            full=is_savepoint or self._needs_full,
            directory=request.directory,
            final=request.final,
            holds=request.holds,
        )
        self._next_id += 1
        finished = {subtask: self._finished_state(subtask) for subtask in self._finished}
        self._pending[barrier.checkpoint_id] = PendingCheckpoint(
            barrier=barrier,
            request=request,
            plan=plan,
            begun_s=now.s,
            expires_s=now.s + options.timeout_ms / 1000,
            waiting=dict.fromkeys(plan.acknowledging),
            states=finished,
        )
        self._retention.refer(barrier.checkpoint_id, finished.values())
        self._turns.triggered(request, now)
        self.statistics.triggered(barrier.checkpoint_id, request.kind, now.ms, plan.finished)
        return [Trigger(barrier, plan.triggered)]

    def _finished_state(self, subtask: tuple[str, int]) -> SubtaskState:
        """Returns the state of a finished subtask as the newest checkpoint holds it.

        The files of the newest checkpoint are retained, while older files of the subtask may be
        deleted by now. Data in flight is left out: the subtask has processed its input, and its
        output is processed or kept downstream.
        """
        last = None if self.latest is None else self.latest.subtasks.get(subtask)
        return (
            SubtaskState(finished=True)
            if last is None
            else replace(last, finished=True, channels=())
        )

    def _abort_all(
        self, reason: CheckpointFailureReason, detail: str, now: Moment
    ) -> list[Instruction]:
        return [
            i
            for pending in list(self._pending.values())
            for i in self._abort(pending, reason, detail, now)
        ]

    def _abort(
        self,
        pending: PendingCheckpoint,
        reason: CheckpointFailureReason,
        detail: str,
        now: Moment,
        cause: BaseException | None = None,
        *,
        is_known: bool = False,
    ) -> list[Instruction]:
        """Aborts `pending`, and returns the resulting instructions.

        `is_known` tells whether it is certain that no write of the checkpoint's metadata is still
        in progress.
        """
        del self._pending[pending.id]
        self._ended_badly[pending.id] = None
        if len(self._ended_badly) > _ENDED_BADLY_MAX:
            del self._ended_badly[min(self._ended_badly)]
        error = _failed(str(pending), reason, detail)
        error.__cause__ = cause
        self.statistics.failed(pending.id, reason, str(error), now.ms)
        latest = 0 if self.latest is None else self.latest.checkpoint_id
        # The tasks report all other reasons, or one of them fails.
        told = detail if reason is CheckpointFailureReason.IO_EXCEPTION else ""
        instructions: list[Instruction] = [NotifyAborted(pending.id, latest, reason, told)]
        instructions += self._consequences(pending, reason, error, now)
        if pending.storing is None or is_known:
            return instructions + self._discard(self._retention.failed(pending.id, pending.storing))
        # A delete now could be overtaken by the write that is still under way.
        self._doomed[pending.id] = pending.storing
        return instructions

    def _consequences(
        self,
        pending: PendingCheckpoint,
        reason: CheckpointFailureReason,
        error: CheckpointError,
        now: Moment,
    ) -> list[Instruction]:
        request = pending.request
        self._turns.failed(request, now)
        # State holds a value that cannot be encoded. The requester of a savepoint gets the error.
        # A job that takes checkpoints fails for good: it would have nothing to restart from, and
        # another attempt would come to the same value.
        hopeless = not request.kind.is_savepoint and isinstance(error.__cause__, ValueNotSupported)
        may_retry = reason in _RETRIED or not (request.kind.is_savepoint or hopeless)
        still_stops = request.final and request.number is not None and may_retry
        if still_stops:
            # The job restarts, or a task has ended regularly. A plain checkpoint is retried as
            # usual.
            self._turns.stop(request)
        if (
            request.number is not None
            and not request.final
            and reason in _CLOSING
            and request.tries < CLOSING_TRIES
        ):
            turned_away = self._turns.add(replace(request, tries=request.tries + 1))
            return (
                []
                if turned_away is None
                else self._refuse(turned_away, CheckpointFailureReason.TOO_MANY_REQUESTS, "")
            )
        is_answered = request.number is not None and not still_stops
        instructions: list[Instruction] = (
            [Answer(request.number, None, error)]
            if is_answered and request.number is not None
            else []
        )
        if hopeless:
            return [*instructions, FailJob(error, for_good=True)]
        if still_stops and request.kind.is_savepoint:
            return instructions
        if (
            request.kind is CheckpointKind.SYNC_SAVEPOINT
            and reason is not CheckpointFailureReason.SHUTDOWN
        ):
            # The sources are stopped, so the job cannot go on as if no stop had been requested.
            return [*instructions, FailJob(error)]
        if not request.kind.is_savepoint and reason.counts:
            too_many = self._failures.failed(pending.id, error)
            if too_many is not None:
                instructions.append(FailJob(too_many))
        return instructions

    def _answer_the_rest(self, final: CompletedCheckpoint) -> list[Instruction]:
        """Answers all queued requests with the final checkpoint.

        No checkpoint follows the final one, which contains everything that a requested checkpoint
        would contain.
        """
        instructions: list[Instruction] = []
        for request in self._turns.clear():
            if request.kind.is_savepoint or request.holds or request.number is None:
                instructions += self._refuse(request, CheckpointFailureReason.SHUTDOWN, "")
            else:
                instructions.append(Answer(request.number, final))
        return instructions

    def _refuse(
        self, request: Request, reason: CheckpointFailureReason, detail: str
    ) -> list[Instruction]:
        if request.number is None:
            return []
        what = "a savepoint" if request.kind.is_savepoint else "a checkpoint"
        return [
            Answer(
                request.number,
                None,
                _failed(f"{what} of {self._flow or 'the job'}", reason, detail),
            )
        ]

    def _discard(self, discard: Discard) -> list[Instruction]:
        for checkpoint in discard.checkpoints:
            self.statistics.discarded(checkpoint.checkpoint_id)
        return [discard] if discard else []


def _failed(what: str, reason: CheckpointFailureReason, detail: str) -> CheckpointError:
    return CheckpointError(f"{what} failed: {reason.sentence}" + (f" ({detail})" if detail else ""))
