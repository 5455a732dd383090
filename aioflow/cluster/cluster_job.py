"""One job in the JobManager: its JobMaster, its slots, and the processes that run its tasks.

The JobMaster deploys tasks as in a single process; the TaskDeployer gets the slots for them. Tasks
that cannot leave the submitting process run in it. Every report of a TaskManager carries the token
of its JobMaster; reports for an older JobMaster are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.checkpoint.completed import CheckpointStats
from aioflow.checkpoint.instructions import CheckpointSettings
from aioflow.checkpoint.metadata import decode_subtask
from aioflow.cluster.deployer import TaskDeployer
from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.job_history import WorkerReport, status_of
from aioflow.cluster.job_master import CHECKPOINTS_CLOSE_S, JobMaster
from aioflow.cluster.job_session import (
    AttemptKey,
    attempt_key,
    exit_request,
    pack_error,
    unpack_error,
)
from aioflow.cluster.placed_tasks import SUBMITTER, PlacedTasks, Submitter
from aioflow.cluster.scheduler import (
    SlotOffer,
    slots_needed,
)
from aioflow.cluster.shipping import load_job
from aioflow.core.aio import OrderedTaskGroup, close_within, wait_all
from aioflow.core.errors import Broken, GraphError, RemoteError, note_once
from aioflow.core.wire.serializers import Codec
from aioflow.graph.deployment import ExecutionAttemptId, ExecutionState, TaskDeploymentDescriptor
from aioflow.graph.job_graph import rescaled, same_parallelism, with_parallelism

if TYPE_CHECKING:
    from aioflow.checkpoint.completed import SubtaskState
    from aioflow.cluster.job_store import PersistedJob
    from aioflow.cluster.restart import RestartPolicy
    from aioflow.cluster.rpc import RpcConnection
    from aioflow.cluster.shipping import ShippedJob
    from aioflow.core.host import Host
    from aioflow.core.scope import TapPlace
    from aioflow.graph.job_graph import JobGraph
    from aioflow.network.channels import ProducerState

__all__ = ["ClusterJob", "needs_submitter"]

logger = logging.getLogger(__name__)

SUSPEND_S = 5.0
"""How long a suspended JobMaster may take to close its checkpoints."""


class ClusterJob:
    """A `JobRunner` of the Dispatcher.

    `tasks` is the `TaskExecutorGateway` of the JobMaster, and `deployer` holds the slots of the
    tasks.

    `declare(job_id, slots)` tells the ResourceManager how many slots the job wants, and
    `lose(worker_id, why)` tells the ResourceManager that the job's process in that TaskManager
    counts as lost. `on_over(job_id)` is called when the job no longer holds any resources in this
    process.
    """

    def __init__(
        self,
        host: Host,
        job_id: str,
        job: ShippedJob,
        content: bytes,
        restart: RestartPolicy,
        checkpoints: CheckpointSettings | None,
        token: int,
        declare: Callable[[str, int], None],
        lose: Callable[[str, str], None],
        submitter: Submitter | None,
        on_over: Callable[[str], None] = lambda _: None,
        *,
        recovered: bool = False,
        group: OrderedTaskGroup | None = None,
    ) -> None:
        """Makes a job. `content` is the encoded job that TaskManagers load. `group` is the task
        group for background work of a job whose `run` is not called.
        """
        self.job_id = job_id
        self.token = token
        self.content = content
        self._lose = lose
        self._on_over = on_over
        self._shipped = job
        self._codec = Codec(job.types)
        self._group = OrderedTaskGroup() if group is None else group
        self._host = host
        self.job_master = JobMaster(
            host,
            job_id,
            job.graph,
            restart,
            self._group,
            checkpoints=checkpoints,
            codec=self._codec,
            recovered=recovered,
        )
        self.tasks = PlacedTasks(
            job_id,
            self._codec,
            submitter,
            self._group,
            job.options.cancellation_timeout_s,
            self._wait_for_slot,
            self._cancel_waiting,
            self._overdue,
        )
        self.fenced_total = 0
        """Number of dropped reports that were meant for another JobMaster of the job."""
        self.deployer = TaskDeployer(
            host,
            job,
            token,
            self.job_master,
            self.tasks,
            self._group,
            partial(declare, job_id),
            self._failed,
            self._overdue,
            can_grow=checkpoints is not None and checkpoints.store is not None,
        )
        self._publishing = False
        self._over = False
        self._metrics: dict[str, dict[str, float]] = {}

    @classmethod
    def submitted(
        cls,
        host: Host,
        job: PersistedJob,
        token: int,
        declare: Callable[[str, int], None],
        lose: Callable[[str, str], None],
        submitter: Submitter | None,
        on_over: Callable[[str], None],
        recovered: bool = False,
    ) -> ClusterJob:
        """Makes the job of a cluster.

        Raises GraphError if the job needs its submitter, but the submitter is gone.
        """
        shipped = load_job(job.graph)
        parallelism = {int(id_): n for id_, n in job.config.get("parallelism", {}).items()}
        shipped.graph = with_parallelism(shipped.graph, parallelism)
        at_home = [vertex.name for vertex in shipped.graph.vertices if vertex.stays_here]
        if at_home and (submitter is None or not submitter.location):
            raise GraphError(
                f"job {job.name!r} cannot run without the process that submitted it, which is "
                f"gone: {', '.join(at_home)} "
                "holds functions or results of that process; submit it again, or use a sink that "
                "is a Sink object"
            )
        checkpoints = job.config.get("checkpoints")
        return cls(
            host,
            job.job_id,
            shipped,
            job.graph,
            pickle.loads(job.config["restart"]),
            CheckpointSettings(**checkpoints) if checkpoints else None,
            token,
            declare,
            lose,
            submitter,
            on_over,
            recovered=recovered,
        )

    # JobRunner.

    @property
    def status(self) -> JobStatus:
        return self.job_master.status

    @property
    def error(self) -> BaseException | None:
        return self.job_master.error

    async def run(self) -> JobStatus:
        async with self._group:
            try:
                _ = self._group.create_task(self.job_master.start(self.tasks), name="start")
                status = await asyncio.shield(self.job_master.terminated)
                self._group.cancel_children()
                await close_within(
                    self.job_master.close(),
                    CHECKPOINTS_CLOSE_S,
                    what=f"the checkpoints of job {self.job_id}",
                )
                if self.stop_error is not None:
                    self.tasks.taps.notify("stop_failed", pack_error(self.stop_error, self._codec))
                return status
            finally:
                self.end()
                self.tasks.peers.ask_all("job_over", self.job_id, self.token)
                self._publish_now()
                self.deployer.release()
                self._group.cancel_children()
                await close_within(
                    self.job_master.suspend(),
                    SUSPEND_S,
                    what=f"the checkpoints of job {self.job_id}",
                )
                self._on_over(self.job_id)

    def cancel(self) -> None:
        self.job_master.cancel()
        self._publish()

    def stop(self, *, drain: bool, savepoint: bool, directory: str | None) -> None:
        self.job_master.stop(drain=drain, savepoint=savepoint, directory=directory)

    async def rescale(self, parallelism: int | None, of_operators: Mapping[str, int]) -> None:
        """Changes the parallelism of the running job. See `RunningJob.rescale`."""
        graph = rescaled(self.job_master.executions.graph, parallelism, of_operators)
        await self.rescale_to(graph)

    async def rescale_to(
        self, graph: JobGraph, resources: AbstractAsyncContextManager[None] | None = None
    ) -> None:
        """Rescales the job to `graph`, the job's graph at another parallelism. The context manager
        `resources` reserves the slots for it.
        """
        executions = self.job_master.executions
        if resources is None and not same_parallelism(graph, executions.graph):
            needed = slots_needed(graph)
            resources = self.deployer.slots_reserved(max(needed, slots_needed(executions.graph)))
        await self.job_master.rescale(graph, resources)
        self.deployer.rescaled()
        self._publish()

    @property
    def stopped_with(self) -> str | None:
        return self.job_master.stopped_with

    @property
    def stop_error(self) -> BaseException | None:
        return self.job_master.stop_error

    # Requests of the JobMaster, through `tasks`.

    def _wait_for_slot(self, descriptor: TaskDeploymentDescriptor) -> None:
        self.deployer.deploy(descriptor)
        self._publish()

    def _cancel_waiting(self, attempt: ExecutionAttemptId) -> None:
        """Cancels a task that waits for a slot and therefore has never run."""
        self.update_task_state(attempt, ExecutionState.CANCELED, None)
        self.deployer.withdraw(attempt)

    def _overdue(self, worker_id: str, attempt: ExecutionAttemptId, why: str) -> None:
        """Declares a process of the job lost because it has not ended or begun a task in time."""
        if worker_id != SUBMITTER:
            self._lose(worker_id, f"its task {attempt} {why}")
            return
        logger.error("job %s: task %s %s, in the submitting process", self.job_id, attempt, why)
        self._failed(attempt, Broken(f"task {attempt} {why}"))

    def _failed(self, attempt: ExecutionAttemptId, error: BaseException) -> None:
        self.update_task_state(attempt, ExecutionState.FAILED, error)

    # JobMasterGateway, called by the tasks in this process and by the reports of the others.

    def update_task_state(
        self, attempt: ExecutionAttemptId, state: ExecutionState, error: BaseException | None
    ) -> None:
        if state.is_terminal:
            self.tasks.ended(attempt)
        self.job_master.update_task_state(attempt, state, error)
        if self.job_master.executions.has_finished(attempt):
            self.deployer.finished(attempt)
        self._publish()

    def acknowledge_checkpoint(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        state: SubtaskState,
        stats: CheckpointStats,
    ) -> None:
        self.job_master.acknowledge_checkpoint(attempt, checkpoint_id, state, stats)

    def decline_checkpoint(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        reason: str,
        error: BaseException | None,
    ) -> None:
        self.job_master.decline_checkpoint(attempt, checkpoint_id, reason, error)

    def end_of_data_reached(self, attempt: ExecutionAttemptId) -> None:
        self.job_master.end_of_data_reached(attempt)

    def ask_producer(
        self, attempt: ExecutionAttemptId, answer: Callable[[ProducerState], None]
    ) -> None:
        self.job_master.ask_producer(attempt, answer)

    def report_progress(self, attempt: ExecutionAttemptId, watermark: int) -> None:
        self.job_master.report_progress(attempt, watermark)

    # Reports of TaskManagers.

    def offered(
        self, worker_id: str, connection: RpcConnection, location: str, offers: Sequence[SlotOffer]
    ) -> tuple[Any, Any]:
        """Handles the slots offered by a TaskManager that has opened the job at `location`.

        Returns the allocation ids of the accepted and of the rejected slots.
        """
        if self._over:
            return (), tuple(offer.allocation_id for offer in offers)
        if self.tasks.peers.joined(worker_id, connection, location):
            if (drain := self.job_master.stop_drains) is not None:
                self.tasks.peers.ask(worker_id, "stop_sources", self.job_id, drain)
            self.tasks.taps.tell(worker_id)
        answer = self.deployer.offered(worker_id, offers)
        return answer.accepted, answer.rejected

    def not_opened(self, worker_id: str, error: bytes) -> None:
        """Handles a TaskManager that could not load the code of the job.

        Other TaskManagers would fail as well. But a later attempt may succeed, if a file or a
        server was missing. So the restart policy decides.
        """
        failure = self._error(error) or Broken("a taskmanager could not open the job")
        note_once(failure, f"while {worker_id} opened the job")
        if self.tasks.here is not None and not self.job_master.executions.has_run:
            self.job_master.fail(failure)
        self.deployer.fail_waiting(failure)

    def on_task_state(self, token: int, key: AttemptKey, state: str, error: bytes) -> None:
        attempt, reached = ExecutionAttemptId(*key), ExecutionState(state)
        if token != self.token:
            self.fenced_total += 1
            return
        if not self._over:
            self.update_task_state(attempt, reached, self._error(error))

    def on_acknowledged(
        self,
        token: int,
        key: AttemptKey,
        checkpoint_id: int,
        state: list[Any],
        stats: tuple[Any, ...],
    ) -> None:
        if token == self.token and not self._over:
            attempt = ExecutionAttemptId(*key)
            told = decode_subtask(state, f"the acknowledgement of {attempt}")
            self.acknowledge_checkpoint(attempt, checkpoint_id, told, CheckpointStats(*stats))

    def on_declined(
        self, token: int, key: AttemptKey, checkpoint_id: int, reason: str, error: bytes
    ) -> None:
        if token == self.token and not self._over:
            self.decline_checkpoint(
                ExecutionAttemptId(*key), checkpoint_id, reason, unpack_error(error, self._codec)
            )

    def on_end_of_data(self, token: int, key: AttemptKey) -> None:
        if token == self.token and not self._over:
            self.end_of_data_reached(ExecutionAttemptId(*key))

    def on_progress(self, token: int, key: AttemptKey, watermark: int) -> None:
        if token == self.token and not self._over:
            self.report_progress(ExecutionAttemptId(*key), watermark)

    def slot_freed(self, worker_id: str, allocation_id: str) -> None:
        self.deployer.slot_freed(worker_id, allocation_id)

    def worker_lost(self, worker_id: str, loss: Broken | None = None) -> None:
        """Handles the loss of a TaskManager, of its connection or of its process for this job."""
        ran = worker_id in self.tasks.placed.values()
        if self.tasks.peers.left(worker_id):
            self._metrics.pop(worker_id, None)
            self.deployer.worker_lost(worker_id, loss)
        if self.tasks.here is not None and loss is not None and not ran and not self._over:
            self.deployer.start_failed(loss)

    def report(self, worker_id: str, metrics: dict[str, float]) -> None:
        self._metrics[worker_id] = metrics
        if self.tasks.taps.submitter is not None:
            self.tasks.taps.notify("metrics", self.all_metrics())

    def tapped(self, tap_id: int, content: bytes, rows: int, missed: int, refused: str) -> None:
        """Passes a batch of a subscription on, or the reason `refused` why it cannot be sent.

        If the tap may miss rows, rows for a slow reader are dropped and counted.
        """
        self.tasks.taps.tapped(tap_id, content, rows, missed, refused)

    # For monitoring.

    def metrics_of(self, worker_id: str) -> dict[str, float]:
        """Returns the last metrics that one process reported for this job."""
        return self._metrics.get(worker_id, {})

    def all_metrics(self) -> dict[str, float]:
        """Returns the metrics of all processes, merged."""
        return {
            name: value for metrics in self._metrics.values() for name, value in metrics.items()
        }

    def report_of_worker(
        self, worker_id: str, slots: int, free_slots: int, silence_s: float
    ) -> WorkerReport:
        """Describes a TaskManager for users of this job."""
        return WorkerReport(
            worker_id,
            slots,
            free_slots,
            round(silence_s * 1000),
            self.location_of(worker_id),
            status_of(self.metrics_of(worker_id)),
        )

    def progress(self) -> tuple[int, int, int, int]:
        """Returns the numbers of running tasks, of finished tasks, of all tasks, and of slots that
        the job waits for."""
        states = [execution.state for execution in self.job_master.executions.executions.values()]
        running, finished = (
            states.count(ExecutionState.RUNNING),
            states.count(ExecutionState.FINISHED),
        )
        return running, finished, len(states), self.deployer.slots_missing

    @property
    def state_backend(self) -> str:
        """Name of the state backend of the job."""
        return str(self._shipped.options.state_backend)

    def worker_at(self, location: str) -> str:
        """Returns the id of the TaskManager that runs, or ran, tasks of this job at `location`.

        Empty if there was none.
        """
        return self.tasks.peers.worker_at(location)

    def location_of(self, worker_id: str) -> str:
        """Returns the address at which a TaskManager runs tasks of this job; empty if it runs
        none."""
        return self.tasks.peers.location_of(worker_id)

    # Calls of the submitter.

    def submitter_returned(self, submitter: Submitter) -> None:
        """Handles the return of the process that submitted the job.

        If the submitter runs a part of the job, it returns too late, because the job is being
        cancelled already.
        """
        if submitter.location or self._over:
            return
        self.tasks.taps.submitter = submitter
        self.tasks.peers.joined(SUBMITTER, submitter.connection, submitter.location)
        for tap_id, (place, may_miss) in submitter.taps.items():
            self.tasks.taps.add(place, tap_id, may_miss)
        self._publish()

    def submitter_lost(self) -> None:
        """Cancels the job if the submitting process ran a part of it. Otherwise the job goes on."""
        submitter, self.tasks.taps.submitter = self.tasks.taps.submitter, None
        self.tasks.peers.left(SUBMITTER)
        if submitter is not None and submitter.location and not self._over:
            logger.warning(
                "job %s is cancelled: the process that submitted it is gone, and runs a part of it",
                self.job_id,
            )
            placed = self.tasks.placed
            for attempt in [a for a, worker_id in placed.items() if worker_id == SUBMITTER]:
                self._failed(attempt, Broken("the submitting process is gone"))
            self.cancel()

    def add_remote_tap(self, place: TapPlace, tap_id: int, may_miss: bool) -> Awaitable[bool]:
        """Adds a tap for another process. Returns once all TaskManagers of the job have the tap."""
        return wait_all(self.tasks.taps.add(place, tap_id, may_miss))

    def remove_remote_tap(self, place: TapPlace, tap_id: int) -> None:
        self.tasks.taps.remove(place, tap_id)

    def end(self) -> None:
        """Ignores all reports from now on, because the job is over."""
        self._over = True
        self.deployer.end()

    def _error(self, content: bytes) -> BaseException | None:
        error = unpack_error(content, self._codec)
        if self.tasks.here is not None and isinstance(error, RemoteError):
            # A function that calls sys.exit() ends the program, as it does in one process.
            return exit_request(error, content, self._codec) or error
        return error

    # Messages to the submitter.

    def _publish(self) -> None:
        """Publishes the state of the job in the next loop turn, so that many changes become one
        message."""
        if not self._publishing and self.tasks.taps.submitter is not None:
            self._publishing = True
            asyncio.get_running_loop().call_soon(self._publish_now)

    def _publish_now(self) -> None:
        self._publishing = False
        if self.tasks.taps.submitter is not None:
            graph = self.job_master.executions
            states = [
                (*attempt_key(e.attempt)[1:], e.state.value) for e in graph.executions.values()
            ]
            error = pack_error(self.error, self._codec)
            started = self.job_master.started.done()
            self.tasks.taps.notify(
                "status", self.status.value, started, graph.restarts, error, states
            )


def needs_submitter(job: PersistedJob) -> bool:
    """Whether a part of the job cannot leave the process that submitted it."""
    return any(vertex.stays_here for vertex in load_job(job.graph).graph.vertices)
