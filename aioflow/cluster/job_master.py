"""Runs one job: carries out the decisions of the ExecutionGraph.

All calls come from the job's event loop. The future `terminated` completes at the end of the job;
the error of a failed job is in `error`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from aioflow.advice.runtime import RepeatedFailure
from aioflow.checkpoint.instructions import InOrder
from aioflow.cluster.execution_graph import (
    CancelTask,
    Deploy,
    ExecutionGraph,
    Instruction,
    JobEnded,
    JobStatus,
    ScheduleRestart,
)
from aioflow.cluster.job_history import JobHistory
from aioflow.cluster.rescaling import Rescaling
from aioflow.cluster.split_discovery import SourceLimits, SplitDiscovery
from aioflow.core.aio import wait_all
from aioflow.core.errors import CheckpointError, RescaleError, message_of, note_once
from aioflow.core.user_code import check_own_task, user_error
from aioflow.core.wire.serializers import Codec
from aioflow.graph.deployment import ExecutionAttemptId, ExecutionState, TaskDeploymentDescriptor
from aioflow.network.channels import ProducerState
from aioflow.operators.source import discover_splits

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from aioflow.checkpoint.completed import CheckpointStats, SubtaskState
    from aioflow.checkpoint.instructions import CheckpointSettings
    from aioflow.checkpoint.statistics import CheckpointStatistics
    from aioflow.cluster.gateways import TaskExecutorGateway
    from aioflow.cluster.job_checkpoints import JobCheckpoints
    from aioflow.cluster.restart import RestartPolicy
    from aioflow.cluster.restoring import GivenSavepoint
    from aioflow.core.aio import OrderedTaskGroup
    from aioflow.core.host import Host
    from aioflow.graph.job_graph import JobGraph
    from aioflow.operators.source import Split

__all__ = ["CHECKPOINTS_CLOSE_S", "JobMaster"]

logger = logging.getLogger(__name__)

CHECKPOINTS_CLOSE_S = 30.0
"""How long the last writes and deletions of checkpoints may take after the end of a job."""


class JobMaster:
    """Runs one job.

    `fencing_token` identifies this leader; workers refuse requests with an older token.
    """

    def __init__(
        self,
        host: Host,
        job_id: str,
        graph: JobGraph,
        restart: RestartPolicy,
        group: OrderedTaskGroup,
        checkpoints: CheckpointSettings | None = None,
        codec: Codec | None = None,
        *,
        recovered: bool = False,
    ) -> None:
        self._host = host
        self._group = group
        self._recovered = recovered
        self._discovered: dict[int, list[Split]] = {}
        self._checkpoints: JobCheckpoints | None = None
        self._begins_with: JobCheckpoints | GivenSavepoint | None = None
        # Imported only where they are used: without checkpoints a small program starts faster.
        if checkpoints is not None and checkpoints.store is None:
            from aioflow.cluster.restoring import GivenSavepoint

            self._begins_with = GivenSavepoint(host, checkpoints, codec or Codec())
        elif checkpoints is not None:
            from aioflow.cluster.job_checkpoints import JobCheckpoints

            self._checkpoints = JobCheckpoints(
                host,
                job_id,
                graph,
                checkpoints,
                codec or Codec(),
                self._fail_and_restart,
                self.fail,
            )
            self._begins_with = self._checkpoints
        self._workers: TaskExecutorGateway | None = None
        self.stop_drains: bool | None = None
        """Whether the sources were stopped with `drain`; None if they were not stopped. Workers
        that join later get this value too.
        """
        self.fencing_token = host.ids.new("fencing")
        self.executions = ExecutionGraph(job_id, graph, restart, has_run=recovered)
        self.terminated: asyncio.Future[JobStatus] = asyncio.get_running_loop().create_future()
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that completes once every task has run, or the job is over.

        By then, errors of opening the operators are known.
        """
        self.stop_refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that is only used for a job in another process, because `stop` of a local job
        raises at once."""
        self.timestamps_ms: dict[JobStatus, int] = {}
        """Wall-clock time in ms at which the job last entered each status."""
        self.history = JobHistory()
        self.checkpoint_settings = checkpoints
        self._restarts = 0
        self._repeated_failure = RepeatedFailure(graph.name)
        """Number of restarts that were logged."""
        self._instructions = InOrder(self._do)
        self._discovery = SplitDiscovery(host, self.executions, self._discovered)
        self._limits = SourceLimits(self.executions, self._limit_source)
        self._rescaling = Rescaling(self.executions, self._checkpoints, self._carry_out)
        self._note_status(JobStatus.CREATED)

    @property
    def status(self) -> JobStatus:
        return self.executions.status

    @property
    def error(self) -> BaseException | None:
        """The last error that failed or restarted the job."""
        return self.executions.failure

    @property
    def checkpoint_statistics(self) -> CheckpointStatistics | None:
        """Statistics of the checkpoints; None without checkpoints, or before they are open."""
        return None if self._checkpoints is None else self._checkpoints.statistics

    async def start(self, workers: TaskExecutorGateway) -> None:
        """Finds the splits of every source, and then deploys the tasks."""
        self._workers = workers
        if self.stop_drains is not None:
            workers.stop_sources(self.executions.job_id, drain=self.stop_drains)
        splits = self._discovered
        what = "while the checkpoints of the job were read"
        try:
            if self._checkpoints is not None:
                await self._checkpoints.open(recovered=self._recovered)
                if self._checkpoints.is_stopping:
                    # The former leader took the savepoint: sinks commit, and the job ends.
                    self.stop(savepoint=False)
            for vertex in self.executions.graph.vertices:
                if vertex.head.source is not None:
                    what = f"in discover() of source {vertex.head.name!r}"
                    splits[vertex.id] = await discover_splits(vertex.head.source, self._host)
                    check_own_task()
            what = "while the state of the job was distributed to its tasks"
            if self._checkpoints is not None:
                self._checkpoints.run_with(workers)
            if self._begins_with is not None:
                graph = self.executions.graph
                point = await self._begins_with.restore_point(graph, splits)
                self.executions.restore(point.states, point.splits)
        # A source that cannot be read fails the job like a failed task.
        except BaseException as caught:  # noqa: BLE001
            error = user_error(caught)
            note_once(error, what)
            self.fail(error)
            return
        if self.status is JobStatus.CREATED:
            self._carry_out(self.executions.start(splits))
            for vertex in self._discovery.vertices.values():
                _ = self._group.create_task(
                    self._discovery.watch(vertex, workers), name=f"discover {vertex.name}"
                )

    def cancel(self) -> None:
        """Ends the job without a result."""
        self._carry_out(self.executions.cancel())

    def fail(self, error: BaseException) -> None:
        """Ends the job as failed, without a retry."""
        self._carry_out_failure(error, self.executions.fail(error))

    def stop(
        self, *, drain: bool = False, savepoint: bool = True, directory: str | None = None
    ) -> None:
        """Ends the sources at their present positions, or as soon as they run.

        Records in flight reach the sinks. With `drain` event time ends too. With checkpoints and
        `savepoint`, the last checkpoint is a savepoint, under the store or at the URL `directory`.
        If `directory` is given for a job without checkpoints, stops nothing and raises
        CheckpointError.
        """
        if directory is not None:
            self._with_checkpoints()
        if self._checkpoints is not None:
            self._checkpoints.stop(savepoint=savepoint, directory=directory)
        self.stop_drains = drain
        if self._workers is not None:
            self._workers.stop_sources(self.executions.job_id, drain=drain)

    async def savepoint(self, directory: str | None = None) -> str:
        """Takes a savepoint under the store, or at the URL `directory`.

        Returns the savepoint's URL. Raises CheckpointError if this fails, and JobNotRunning if the
        job is not running.
        """
        return await self._with_checkpoints().savepoint(directory)

    async def savepoints(self) -> list[str]:
        """Lists URLs of the savepoints under the store.

        Raises RestoreError if the store cannot be read.
        """
        return await self._with_checkpoints().store.savepoints()

    async def checkpoint(self) -> int:
        """Takes a checkpoint now.

        Returns the checkpoint's number once it has completed. Raises CheckpointError if this fails,
        and JobNotRunning if the job is not running.
        """
        return await self._with_checkpoints().checkpoint()

    async def rescale(
        self, graph: JobGraph, resources: AbstractAsyncContextManager[None] | None = None
    ) -> None:
        """Rescales the job to `graph`, the job's graph at another parallelism. See
        `Rescaling.run`."""
        if self.stop_drains is not None:
            raise RescaleError(f"job {graph.name!r} is being stopped, it cannot be rescaled")
        self._rescaling.check()
        # Runs in a task of its own, because the tasks must not stay held when the caller goes away.
        work = self._group.create_task(self._rescaling.outcome(graph, resources), name="rescale")
        await wait_all([work])
        error = self._rescaling.ended() if work.cancelled() else work.result()
        if error is not None:
            raise error

    def adapt(self, graph: JobGraph) -> None:
        """Restarts the job with `graph`, the job's graph at another parallelism. No task of the job
        may be running.
        """
        self._carry_out(self.executions.rescale(graph))

    @property
    def stopped_with(self) -> str | None:
        """URL of the savepoint with which the job ended; None if there is none."""
        made = None if self._checkpoints is None else self._checkpoints.stopped_with
        return made.location if made is not None and made.kind.is_savepoint else None

    @property
    def stop_error(self) -> CheckpointError | None:
        """The reason why the savepoint at the end of the job could not be taken; None if there is
        none."""
        return None if self._checkpoints is None else self._checkpoints.stop_error

    async def close(self) -> None:
        """Finishes the checkpoints of a job whose tasks have all ended, and releases the lease."""
        if self._checkpoints is not None:
            await self._checkpoints.close(finished=self.status is JobStatus.FINISHED)

    async def suspend(self) -> None:
        """Stops without cleaning up, because another leader continues the job."""
        if self._checkpoints is not None:
            await self._checkpoints.abandon()

    def _with_checkpoints(self) -> JobCheckpoints:
        if self._checkpoints is None:
            raise CheckpointError(
                f"job {self.executions.graph.name!r} has no checkpoints: run it with "
                "checkpoints=URL"
            )
        return self._checkpoints

    # JobMasterGateway.

    def acknowledge_checkpoint(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        state: SubtaskState,
        stats: CheckpointStats,
    ) -> None:
        if self._checkpoints is not None:
            self._checkpoints.acknowledge(attempt, checkpoint_id, state, stats)

    def decline_checkpoint(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        reason: str,
        error: BaseException | None,
    ) -> None:
        if self._checkpoints is not None:
            self._checkpoints.decline(attempt, checkpoint_id, reason, error)

    def end_of_data_reached(self, attempt: ExecutionAttemptId) -> None:
        if self._checkpoints is not None:
            self._checkpoints.end_of_data_reached(attempt)

    def ask_producer(
        self, attempt: ExecutionAttemptId, answer: Callable[[ProducerState], None]
    ) -> None:
        answer(self.producer_state(attempt))

    def producer_state(self, attempt: ExecutionAttemptId) -> ProducerState:
        """Returns the state of producer `attempt`: whether its missing partition exists by now, may
        still be created, or is gone."""
        state = self.executions.state_of(attempt)
        if state in (ExecutionState.RUNNING, ExecutionState.FINISHED):
            return ProducerState.RUNNING
        ended = state is None or state is ExecutionState.CANCELING or state.is_terminal
        return ProducerState.GONE if ended else ProducerState.AWAITED

    def report_progress(self, attempt: ExecutionAttemptId, watermark: int) -> None:
        self._limits.report(attempt, watermark)

    def _limit_source(self, attempt: ExecutionAttemptId, watermark: int) -> None:
        assert self._workers is not None, "only a task that was deployed has a limit"
        self._workers.limit_source(attempt, watermark)

    def update_task_state(
        self, attempt: ExecutionAttemptId, state: ExecutionState, error: BaseException | None
    ) -> None:
        self._note_task(attempt, state)
        failure = self.error
        instructions = self.executions.update(
            attempt, state, error, self._host.clock.monotonic(), self._host.rng.random()
        )
        self._limits.task_state(attempt, state)
        if self._checkpoints is not None:
            self._checkpoints.task_state(attempt, state)
        # A task canceled without a request has failed, unless a failed task already gave the cause.
        is_consequence = state is ExecutionState.CANCELED and self.error is not failure
        if state is ExecutionState.CANCELED:
            error = self.error if is_consequence else None
        if error is not None:
            # A failure that ends the job is raised by `run`. A failure that the job survives is
            # only reported here.
            level = (
                logging.WARNING
                if self.status in (JobStatus.RUNNING, JobStatus.RESTARTING)
                else logging.INFO
            )
            told = "; ".join(
                [f"{type(error).__name__}: {message_of(error)}", *getattr(error, "__notes__", ())]
            )
            logger.log(
                level,
                "job %r: task %s is %s: %s",
                self.executions.graph.name,
                attempt,
                state.value,
                told,
            )
            where = self.executions.locations.get((attempt.vertex_id, attempt.subtask_index), "")
            self.history.failed(
                error,
                self._host.clock.wall_ms(),
                attempt,
                where,
                is_root=self.error is error,
                is_consequence=is_consequence,
            )
        self._carry_out(instructions)

    def _carry_out(self, instructions: list[Instruction]) -> None:
        """Carries out `instructions` in order, and notes what has changed."""
        self._note_status(self.status)
        if not self.started.done() and (self.executions.all_have_run or self.status.is_terminal):
            self.started.set_result(None)
        self._rescaling.changed()
        self._instructions.carry_out(instructions)

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case Deploy(descriptor):
                self._deploy(descriptor)
            case CancelTask(attempt):
                assert self._workers is not None
                if self._checkpoints is not None:
                    self._checkpoints.task_state(attempt, ExecutionState.CANCELING)
                self._note_task(attempt, ExecutionState.CANCELING)
                self._workers.cancel_task(attempt)
            case ScheduleRestart(region, epoch, delay_s):
                self._tell_of_restart(delay_s)
                _ = self._group.create_task(
                    self._restart_later(region, epoch, delay_s), name="restart"
                )
            case JobEnded(status, _):
                logger.info(
                    "job %s (%s) is %s",
                    self.executions.graph.name,
                    self.executions.job_id,
                    status.value,
                )
                if not self.terminated.done():
                    self.terminated.set_result(status)

    def _tell_of_restart(self, delay_s: float) -> None:
        """Logs a restart. After a failure this is a warning with the cause."""
        executions, begins, cause = self.executions, self._begins_with, self.error
        is_failure, self._restarts = executions.restarts > self._restarts, executions.restarts
        logger.log(
            logging.WARNING if is_failure else logging.INFO,
            "job %r (%s) restarts in %.1f s from %s%s",
            executions.graph.name,
            executions.job_id,
            delay_s,
            "the beginning, because it has no checkpoints" if begins is None else begins.told,
            f": restart {executions.restarts}, after {type(cause).__name__}: {message_of(cause)}"
            if is_failure and cause is not None
            else "",
        )
        if is_failure and cause is not None:
            self._repeated_failure.add(cause)

    def _deploy(self, descriptor: TaskDeploymentDescriptor) -> None:
        assert self._workers is not None
        attempt = descriptor.attempt
        if not self.executions.awaits_deployment(attempt):
            # An earlier deployment failed at once. This task never ran, so no worker will report
            # its end.
            self.update_task_state(attempt, ExecutionState.CANCELED, None)
            return
        self._note_task(attempt, ExecutionState.DEPLOYING)
        self._discovery.deployed(descriptor)
        try:
            self._workers.submit_task(descriptor, self.fencing_token)
        # A task that cannot be deployed has failed, like any other.
        except Exception as error:  # noqa: BLE001
            self.update_task_state(attempt, ExecutionState.FAILED, error)

    def slot_is_there(self, attempt: ExecutionAttemptId, there: bool) -> None:
        """Sets whether a task that awaits deployment waits for its slot (SCHEDULED) or has it.

        This is for monitoring only.
        """
        if self.executions.slot_is_there(attempt, there):
            self._note_task(
                attempt, ExecutionState.DEPLOYING if there else ExecutionState.SCHEDULED
            )

    async def _restart_later(self, region: int, epoch: int, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        if self._begins_with is not None:
            graph = self.executions.next_graph
            try:
                point = await self._begins_with.restore_point(graph, self._discovered)
            except Exception as error:  # noqa: BLE001  # Usually the store is down for a while.
                self._restart_failed(region, epoch, error)
                return
            if self.executions.awaits_restart(region, epoch):
                self.executions.restore(point.states, point.splits)
                if self._checkpoints is not None:
                    self._checkpoints.restarts(graph, self.executions.subtasks_of(region))
        self._carry_out(self.executions.restart_due(region, epoch))

    def _restart_failed(self, region: int, epoch: int, error: Exception) -> None:
        logger.warning("job %s cannot be restored now: %s", self.executions.job_id, error)
        now, jitter = self._host.clock.monotonic(), self._host.rng.random()
        self._carry_out(self.executions.restart_failed(region, epoch, error, now, jitter))

    def _fail_and_restart(self, error: BaseException) -> None:
        """Restarts the job as if every task had failed with this error."""
        logger.warning("job %s: %s", self.executions.job_id, error)
        self._carry_out_failure(
            error,
            self.executions.fail_all(error, self._host.clock.monotonic(), self._host.rng.random()),
        )

    def _carry_out_failure(self, error: BaseException, instructions: list[Instruction]) -> None:
        """Carries out a failure of the whole job.

        A job that is over, or being cancelled, records no further failure.
        """
        if self.error is error:
            self.history.failed(error, self._host.clock.wall_ms(), None, "", is_root=True)
        self._carry_out(instructions)

    def _note_status(self, status: JobStatus) -> None:
        now_ms = self._host.clock.wall_ms()
        if self.history.status(status.value, now_ms):
            self.timestamps_ms[status] = now_ms

    def _note_task(self, attempt: ExecutionAttemptId, state: ExecutionState) -> None:
        where = self.executions.locations.get((attempt.vertex_id, attempt.subtask_index), "")
        self.history.task(attempt, state, self._host.clock.wall_ms(), where)
