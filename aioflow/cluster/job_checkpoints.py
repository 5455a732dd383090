"""Carries out the checkpoints of one job, as the CheckpointCoordinator decides.

`JobCheckpoints` holds the store, the lease and the clock.

They are opened before the first task is deployed, and closed after the last task has ended. In
between, every stimulus of the JobMaster goes through the coordinator, and the coordinator's
instructions are carried out in order. Slow work (writing metadata, deleting files) runs in a task
of its own, and the end of that task is another stimulus. Invariants: nothing is written into the
store of a flow without the flow's lease. A restart begins only when all existing checkpoints are
known.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.checkpoint.completed import CheckpointKind, CompletedCheckpoint
from aioflow.checkpoint.coordinator import CheckpointCoordinator
from aioflow.checkpoint.instructions import (
    LATEST,
    Answer,
    CheckpointSettings,
    CoordinatorOptions,
    Discard,
    FailJob,
    InOrder,
    Instruction,
    Moment,
    NotifyAborted,
    NotifyComplete,
    Store,
    Trigger,
    WakeAt,
    WarnBehind,
)
from aioflow.checkpoint.store import FlowStore, open_store
from aioflow.checkpoint.sweeping import GRACE_MS, sweep, sweep_state
from aioflow.checkpoint.urls import flow_url, join_url
from aioflow.cluster.restoring import (
    RestorePoint,
    checkpointed_vertices,
    found_checkpoint,
    restore_point,
    start_over,
)
from aioflow.core.aio import CANCEL_GRACE_S, cancel_and_wait, end_task, wait_all
from aioflow.core.errors import (
    AioflowError,
    CheckpointError,
    JobNotRunning,
    RestoreError,
    StaleLeader,
    message_of,
)
from aioflow.graph.deployment import ExecutionState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aioflow.checkpoint.completed import CheckpointStats, SubtaskState
    from aioflow.checkpoint.lease import FlowLease
    from aioflow.checkpoint.statistics import CheckpointStatistics
    from aioflow.core.elements import CheckpointBarrier
    from aioflow.core.host import Host
    from aioflow.core.wire.serializers import Codec
    from aioflow.graph.deployment import ExecutionAttemptId
    from aioflow.graph.job_graph import JobGraph
    from aioflow.operators.source import Split

__all__ = ["CheckpointedTasks", "JobCheckpoints"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
"""Time that the store gets to complete its pending work after the end of the job.

Even a slow store needs less time.
"""


ANSWER_S = 2.0
"""How long a task may take to say what a late checkpoint waits for."""


class CheckpointedTasks(Protocol):
    """The calls of the TaskExecutorGateway about checkpoints, which reach the tasks of a job."""

    def trigger_checkpoint(
        self, attempt: ExecutionAttemptId, barrier: CheckpointBarrier
    ) -> None: ...
    def notify_checkpoint_complete(self, job_id: str, checkpoint_id: int) -> None: ...
    def notify_checkpoint_aborted(
        self, job_id: str, checkpoint_id: int, latest_completed: int | None
    ) -> None: ...
    async def describe_checkpoint(self, attempt: ExecutionAttemptId, checkpoint_id: int) -> str: ...


class JobCheckpoints:
    """Carries out the checkpoints of one job.

    `on_fail(error)` fails the job like the error of a task. `on_lost(error)` fails it for good,
    because a restart would change nothing.
    """

    def __init__(
        self,
        host: Host,
        job_id: str,
        graph: JobGraph,
        settings: CheckpointSettings,
        codec: Codec,
        on_fail: Callable[[BaseException], None],
        on_lost: Callable[[BaseException], None],
    ) -> None:
        self._host = host
        self._job_id = job_id
        self._graph = graph
        self._settings = settings
        self._codec = codec
        self._on_fail = on_fail
        self._on_lost = on_lost
        assert settings.store is not None, "without a store there are no checkpoints"
        self.store: FlowStore = open_store(flow_url(settings.store, graph.name), host, settings.key)
        self._coordinator: CheckpointCoordinator | None = None
        self._tasks: CheckpointedTasks | None = None
        self._carry_out = InOrder(self._do).carry_out
        self._beside: dict[asyncio.Task[None], None] = {}
        """Background tasks in progress: writes, deletions, and at most one warning."""
        self._warning: asyncio.Task[None] | None = None
        self._lease: FlowLease | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[CompletedCheckpoint]] = {}
        self._stop_number: int | None = None
        self._stop_asked: tuple[bool, str | None] | None = None
        self._opening: asyncio.Future[None] | None = None
        self._over = False
        self._swept_s = 0.0
        """Monotonic time when the store was last searched for unreferenced files."""
        self._first_id = 1
        self._savepoint_before: CompletedCheckpoint | None = None
        self._told: CompletedCheckpoint | None = None
        """The checkpoint that the user asked to restore, until the store has recorded this;
        otherwise None."""
        self.stopped_with: CompletedCheckpoint | None = None
        """The checkpoint with which a stopped job ended; None if there is none."""
        self.stop_error: CheckpointError | None = None
        """The reason why the job could not be stopped with a savepoint; None if there is none."""

    @property
    def statistics(self) -> CheckpointStatistics | None:
        """Statistics of the checkpoints; None before `open`."""
        return None if self._coordinator is None else self._coordinator.statistics

    # Life cycle.

    async def open(self, *, recovered: bool = False) -> None:
        """Finds the checkpoint that the job starts from.

        `recovered` means that the job ran before, under a leader that is gone. The job then
        continues from its own newest checkpoint, not from the one with which it was first started.
        Raises CheckpointError while another job holds the lease of the flow, and RestoreError if
        the checkpoint cannot be restored.
        """
        self._opening = asyncio.get_running_loop().create_future()
        try:
            await self._open(recovered)
        finally:
            self._opening.set_result(None)
        self._ask_for_stop()

    async def _open(self, recovered: bool) -> None:
        settings = self._settings
        self._lease = await self.store.hold(self._on_lost)
        # One id is left free, for a checkpoint that the user names with `restore`.
        self._first_id = first_id = await self.store.highest() + (
            1 if settings.restore in (None, LATEST) else 2
        )
        options = CoordinatorOptions(
            interval_ms=settings.every_ms,
            timeout_ms=settings.timeout_ms,
            min_pause_ms=settings.min_pause_ms,
            max_concurrent=settings.max_concurrent,
            retain=settings.retain,
            tolerable_failures=settings.tolerable_failures,
            unaligned=settings.unaligned,
            aligned_timeout_ms=settings.aligned_timeout_ms,
        )
        vertices = checkpointed_vertices(self._graph)
        found = await found_checkpoint(
            self._host, self.store, settings, self._job_id if recovered else None
        )
        if found is None and settings.restore is None and not recovered:
            await start_over(self.store, first_id - 1)
        await sweep(
            self.store,
            self._host,
            retain=settings.retain,
            keep=() if found is None else (found.checkpoint_id,),
        )
        self._swept_s = self._host.clock.monotonic()
        self._coordinator = CheckpointCoordinator(
            options, vertices, flow=self._graph.name, job_id=self._job_id, first_id=first_id
        )
        if found is not None:
            for other in await self._others(found):
                self._coordinator.kept(other)
            is_ours = found.location.startswith(f"{self.store.url}/")
            self._coordinator.restored(
                found, self._now(), claim=is_ours and not found.kind.is_savepoint
            )
            is_own = recovered and found.job_id == self._job_id
            self._told = found if settings.restore not in (None, LATEST) and not is_own else None
            if is_own and found.kind is CheckpointKind.SYNC_SAVEPOINT:
                self._savepoint_before = found
            logger.info("job %r begins with %s", self._graph.name, found.location)
            await self._tell_of_end(found)

    @property
    def is_stopping(self) -> bool:
        """Whether the former leader died while the job was stopping.

        The savepoint of the stop was taken, but not all tasks of the job had ended.
        """
        return self._savepoint_before is not None

    async def _others(self, found: CompletedCheckpoint) -> list[CompletedCheckpoint]:
        """Returns the other checkpoints that former runs left, newer or older than `found`.

        These checkpoints may share files with `found`. Shared files must not be deleted before
        `found` is deleted.
        """
        finished = await self.store.finished()
        others = []
        for number in await self.store.checkpoints():
            if (
                number > finished
                and join_url(self.store.url, f"checkpoints/{number}") != found.location
            ):
                try:
                    others.append(await self.store.checkpoint(number))
                except RestoreError as error:
                    logger.warning("another checkpoint is left as it is: %s", error)
        return others

    @property
    def is_ending(self) -> bool:
        """Whether the job is over, or its tasks end after the final checkpoint."""
        return self._over or (self._coordinator is not None and self._coordinator.is_ending)

    def run_with(self, tasks: CheckpointedTasks) -> None:
        """Sets the tasks that checkpoint messages go to from now on."""
        self._tasks = tasks

    @property
    def told(self) -> str:
        """The point from which the next attempt of the job starts, in words for log messages."""
        latest = self._opened().latest
        if latest is None:
            return "the beginning, because no checkpoint has completed"
        if latest.kind.is_savepoint:
            return f"the savepoint {latest.location}"
        return f"checkpoint {latest.checkpoint_id}"

    async def restore_point(
        self, graph: JobGraph, discovered: Mapping[int, Sequence[Split]]
    ) -> RestorePoint:
        """Returns the state and splits that newly deployed tasks of `graph` start with.

        `discovered` holds the splits of each source, by vertex id, in the order of discovery.
        """
        coordinator = self._opened()
        # It must be known whether a checkpoint that is being stored completes.
        await self._nothing_beside()
        await self.store.settle()
        latest = coordinator.latest
        # This job took savepoints after `latest`. The tasks that are deployed now drop the
        # transactions that were prepared for them.
        await self.store.leave_behind(
            max(self._first_id - 1, 0 if latest is None else latest.checkpoint_id)
        )
        point = await restore_point(
            latest,
            graph,
            self.store,
            self._codec,
            discovered,
            allow_non_restored=self._settings.allow_non_restored,
            job_id=self._job_id,
        )
        if self._told is not None:  # Only now it is known that the checkpoint fits this flow.
            await self.store.begin_with(self._told, self._first_id - 1)
            self._told = None
        now_s = self._host.clock.monotonic()
        if now_s - self._swept_s >= GRACE_MS / 1000:  # No file can be old enough before that.
            self._swept_s = now_s
            _ = self._begin(self._sweep_state(), f"sweep of the state of job {self._job_id}")
        return point

    async def _sweep_state(self) -> None:
        await sweep_state(self.store, self._host)

    def restarts(self, graph: JobGraph, subtasks: Sequence[tuple[int, int]]) -> None:
        """Notes that `subtasks` of `graph`, given as (vertex id, index), restart from the last
        `restore_point`.
        """
        if graph is not self._graph:
            self._graph = graph
            vertices = checkpointed_vertices(graph)
            self._carry_out(self._opened().rescaled(vertices, self._now()))
        self._carry_out(self._opened().restart(subtasks, self._now()))

    async def close(self, *, finished: bool) -> None:
        """Closes the checkpoints of a job whose last task has ended.

        If the job `finished` by itself, its last checkpoint is kept, and a later run that starts
        from it has nothing to do. A job with `collect` leaves nothing to resume, because its rows
        are in memory only. If the store does not answer, the call gives up after `CLOSE_TIMEOUT_S`.
        """
        self._over = True
        try:
            if not await self._in_time(partial(self._wind_up, finished)):
                if (
                    self._stop_number is not None
                    and self.stopped_with is None
                    and self.stop_error is None
                ):
                    self.stop_error = CheckpointError(
                        f"{self.store.url} did not answer: no savepoint is known to be made"
                    )
                for task in list(self._beside):
                    end_task(task)
                await wait_all(list(self._beside), timeout_s=CANCEL_GRACE_S)
        finally:
            await self._in_time(self._release)

    async def _in_time(self, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        limit = asyncio.timeout(CLOSE_TIMEOUT_S)
        try:
            async with limit:
                await work()
        except TimeoutError:
            if not limit.expired():
                raise
            logger.warning(
                "job %r: %s has not answered for %g s and is given up",
                self._graph.name,
                self.store.url,
                CLOSE_TIMEOUT_S,
            )
            return False
        return True

    async def _wind_up(self, finished: bool) -> None:
        if self._opening is not None:
            await self._opening
        coordinator = self._coordinator
        if coordinator is not None:
            asked = self.stopped_with is not None or self.stop_error is not None
            if finished and not asked:
                await self._keep_end(coordinator)
            self._carry_out(coordinator.shutdown(self._now()))
        if self._timer is not None:
            self._timer.cancel()
        await self._nothing_beside()

    async def abandon(self) -> None:
        """Stops at once and leaves the store as it is.

        Callers that wait for a checkpoint or savepoint get StaleLeader.
        """
        self._over = True
        for answer in self._waiting.values():
            if not answer.done():
                what = (
                    f"the leader of job {self._job_id} goes away, and does not do what it was "
                    "asked; ask the next one"
                )
                answer.set_exception(StaleLeader(what))
        if self._timer is not None:
            self._timer.cancel()
        try:
            await cancel_and_wait(list(self._beside))
        finally:
            # Also after a cancellation: an unreleased lease is renewed as long as the process
            # lives.
            await self._release()

    async def _release(self) -> None:
        if self._lease is not None:
            await self._lease.release()

    async def _tell_of_end(self, found: CompletedCheckpoint) -> None:
        ended_ms = await self.store.ended_ms(found)
        if ended_ms is not None:
            logger.warning(
                "flow %r finished already at %s: this run goes on from its last checkpoint, reads "
                "nothing again and writes nothing twice; "
                "restore=None, fresh=True runs it again from the beginning",
                self._graph.name,
                datetime.fromtimestamp(ended_ms / 1000, UTC).isoformat(timespec="seconds"),
            )

    async def _keep_end(self, coordinator: CheckpointCoordinator) -> None:
        """Records in the store that the job ended by itself with its latest checkpoint.

        A failure of the store is only logged. The next run then does not know that it has nothing
        to do.
        """
        last = coordinator.latest
        try:
            if last is not None and last.location == join_url(
                self.store.url, f"checkpoints/{last.checkpoint_id}"
            ):
                await self.store.end(last.checkpoint_id)
        except CheckpointError as error:
            logger.warning(
                "job %r has finished, but its next run will not say so: %s",
                self._graph.name,
                error,
            )

    # Stimuli.

    def task_state(self, attempt: ExecutionAttemptId, state: ExecutionState) -> None:
        """Reports the new state of a task."""
        coordinator = self._coordinator
        if coordinator is None:
            return
        match state:
            case ExecutionState.RUNNING:
                self._carry_out(coordinator.task_running(attempt, self._now()))
            case ExecutionState.FINISHED:
                self._carry_out(coordinator.task_finished(attempt, self._now()))
            case ExecutionState.CANCELING | ExecutionState.CANCELED | ExecutionState.FAILED:
                self._carry_out(coordinator.task_lost(attempt, self._now()))

    def acknowledge(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        state: SubtaskState,
        stats: CheckpointStats,
    ) -> None:
        self._carry_out(
            self._opened().acknowledge(attempt, checkpoint_id, state, stats, self._now())
        )

    def decline(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        reason: str,
        error: BaseException | None,
    ) -> None:
        self._carry_out(self._opened().decline(attempt, checkpoint_id, reason, self._now(), error))

    def end_of_data_reached(self, attempt: ExecutionAttemptId) -> None:
        self._carry_out(self._opened().end_of_data_reached(attempt, self._now()))

    def stop(self, *, savepoint: bool, directory: str | None) -> None:
        """Requests the final checkpoint of a stopping job. With `savepoint` it is a savepoint,
        under the store or in `directory`.

        `directory` is a URL, or None for the store.
        """
        if self._stop_asked is None and not self._over:
            if directory is not None:
                # Raises for an invalid URL before anything is stopped.
                self.store.savepoint_url(directory)
            self._stop_asked = savepoint, directory
            self._ask_for_stop()

    def _ask_for_stop(self) -> None:
        coordinator = self._coordinator
        if coordinator is not None and self._stop_asked is not None:
            savepoint, directory = self._stop_asked
            self._stop_number = number = next(self._numbers)
            where = self.store.savepoint_url(directory) if savepoint else ""
            self._carry_out(
                coordinator.request_stop(number, self._now(), savepoint=savepoint, directory=where)
            )

    async def savepoint(self, directory: str | None) -> str:
        """Takes a savepoint and returns its URL. Raises CheckpointError if this fails."""
        number = next(self._numbers)
        where = self.store.savepoint_url(directory)
        return (
            await self._answered(number, self._opened().request_savepoint, number, where)
        ).location

    async def checkpoint(self) -> int:
        """Takes a checkpoint and returns its number. Raises CheckpointError if this fails."""
        number = next(self._numbers)
        return (
            await self._answered(number, self._opened().request_checkpoint, number)
        ).checkpoint_id

    async def hold(self) -> int:
        """Takes a checkpoint after which all tasks pause, and returns its number.

        If the checkpoint fails, the tasks go on, and CheckpointError is raised.
        """
        number = next(self._numbers)
        return (await self._answered(number, self._opened().request_hold, number)).checkpoint_id

    async def _answered(
        self, number: int, request: Callable[..., list[Instruction]], *args: Any
    ) -> CompletedCheckpoint:
        if self._over:
            raise self._not_running()
        answer: asyncio.Future[CompletedCheckpoint] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._carry_out(request(*args, self._now()))
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    # Instructions.

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case Trigger(barrier, attempts):
                logger.debug("job %s: checkpoint %d begins", self._job_id, barrier.checkpoint_id)
                assert self._tasks is not None
                for attempt in attempts:
                    self._tasks.trigger_checkpoint(attempt, barrier)
            case Store(checkpoint):
                _ = self._begin(
                    self._store(checkpoint), f"store checkpoint {checkpoint.checkpoint_id}"
                )
            case NotifyComplete(checkpoint_id):
                logger.info("job %r: checkpoint %d is complete", self._graph.name, checkpoint_id)
                if self._tasks is not None:
                    self._tasks.notify_checkpoint_complete(self._job_id, checkpoint_id)
            case NotifyAborted(checkpoint_id, latest_completed, reason, detail):
                level = logging.WARNING if reason.counts else logging.INFO
                logger.log(
                    level,
                    "job %r: checkpoint %d is given up: %s%s",
                    self._graph.name,
                    checkpoint_id,
                    reason.sentence,
                    f" ({detail})" if detail else "",
                )
                if self._tasks is not None:
                    self._tasks.notify_checkpoint_aborted(
                        self._job_id, checkpoint_id, latest_completed
                    )
            case Discard():
                _ = self._begin(self.store.discard(instruction), "delete checkpoints")
            case FailJob(error, for_good):
                (self._on_lost if for_good else self._on_fail)(error)
            case Answer(number, checkpoint, error):
                self._answer(number, checkpoint, error)
            case WakeAt(at_s):
                self._wake_at(at_s)
            case WarnBehind():
                name = "warn of a late checkpoint"
                self._warning = self._begin(self._warn_behind(instruction), name)

    async def _warn_behind(self, late: WarnBehind) -> None:
        """Logs that a checkpoint is late, with the checkpoint's phase in the first missing task and
        what this task is doing.
        """
        if late.attempt is None or self._tasks is None:
            phase = "all tasks have acknowledged, and the checkpoint is being committed"
        else:
            try:
                async with asyncio.timeout(ANSWER_S):
                    phase = await self._tasks.describe_checkpoint(late.attempt, late.checkpoint_id)
            except TimeoutError:
                phase = "its process does not answer, perhaps because a function holds its loop"
            except AioflowError as error:
                phase = message_of(error)
            except Exception as error:  # noqa: BLE001  # A warning must not fail the job.
                phase = f"its phase is unknown, {type(error).__name__}: {message_of(error)}"
        logger.warning(
            "job %r: checkpoint %d is not complete after %d ms and waits for %s: %s; checkpoints "
            "fall behind, one is due each %d ms (every=); until it completes, sinks do not commit, "
            "pushed elements stay in memory and a restart goes further back",
            self._graph.name,
            late.checkpoint_id,
            late.age_ms,
            late.waits_for,
            phase,
            late.interval_ms,
        )

    async def _store(self, checkpoint: CompletedCheckpoint) -> None:
        try:
            stored = await self.store.complete(checkpoint)
        # An error of any kind: the checkpoint is not stored, and the job goes on.
        except Exception as error:  # noqa: BLE001
            self._carry_out(self._opened().not_stored(checkpoint.checkpoint_id, error, self._now()))
        else:
            self._carry_out(
                self._opened().stored(checkpoint.checkpoint_id, stored.location, self._now())
            )

    def _answer(
        self, number: int, checkpoint: CompletedCheckpoint | None, error: CheckpointError | None
    ) -> None:
        if number == self._stop_number:
            self.stopped_with = self._savepoint_before or checkpoint
            # A job that had already ended by itself could not be stopped.
            self.stop_error = None if self._over else error
        waiting = self._waiting.pop(number, None)
        if waiting is None or waiting.done():
            return
        if checkpoint is not None:
            waiting.set_result(checkpoint)
        else:
            waiting.set_exception(self._not_running() if self._over or error is None else error)

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._beside[task] = None
        task.add_done_callback(self._ended)
        return task

    async def _nothing_beside(self) -> None:
        """Waits until all background work has ended. Cancels a pending warning, which may wait for
        a task that does not answer.

        An asyncio task that has just ended stays listed until the loop runs its callback. Waiting
        for such a task would return at once, so that the loop would never get to run.
        """
        if self._warning is not None:
            self._warning.cancel()
        while under_way := [task for task in self._beside if not task.done()]:
            await wait_all(under_way)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._beside.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_lost(error)

    def _wake_at(self, at_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at_s is not None and not self._over:
            delay_s = max(0.0, at_s - self._host.clock.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake, at_s)

    def _wake(self, at_s: float) -> None:
        self._timer = None
        now = self._now()
        if now.s < at_s:  # The loop's clock is coarser.
            self._wake_at(at_s)
        else:
            self._carry_out(self._opened().tick(now))

    def _now(self) -> Moment:
        return Moment(self._host.clock.monotonic(), self._host.clock.wall_ms())

    def _opened(self) -> CheckpointCoordinator:
        if self._coordinator is None:
            raise self._not_running()
        return self._coordinator

    def _not_running(self) -> JobNotRunning:
        what = "is over" if self._over else "does not run yet"
        return JobNotRunning(
            f"job {self._graph.name!r} ({self._job_id}) {what}, no checkpoint or savepoint can be "
            "taken of it; one that is stopped with "
            "job.stop() ends with a savepoint, and returns its path"
        )
