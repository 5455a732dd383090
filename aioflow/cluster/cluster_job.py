"""One job in the JobManager: its JobMaster, its slots, and the processes that run its tasks.

The JobMaster deploys as it would in one process. Tasks that it deploys in one turn wait here until
there are slots for all of them. Each descriptor then gets the locations of its producers. Tasks
that cannot leave the submitting process run there. Every report of a TaskManager carries the token
of its JobMaster; reports for an older JobMaster are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.checkpoint.completed import CheckpointStats
from aioflow.checkpoint.instructions import CheckpointSettings
from aioflow.checkpoint.metadata import decode_subtask
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
from aioflow.cluster.placed_tasks import SUBMITTER, JobPeer, PlacedTasks, Submitter
from aioflow.cluster.rescaling import AdaptiveParallelism
from aioflow.cluster.scheduler import (
    DeclareRequirement,
    FreeSlot,
    Instruction,
    OfferAnswer,
    Placed,
    PlacementFailed,
    SlotOffer,
    SlotScheduler,
    SubtasksLost,
    slots_needed,
)
from aioflow.cluster.shipping import load_job
from aioflow.core.aio import OrderedTaskGroup, close_within, wait_all
from aioflow.core.contexts import asynccontextmanager
from aioflow.core.errors import Broken, GraphError, RemoteError, RescaleError, note_once
from aioflow.core.wire.serializers import Codec
from aioflow.graph.deployment import ExecutionAttemptId, ExecutionState, TaskDeploymentDescriptor
from aioflow.graph.job_graph import rescaled, same_parallelism, with_parallelism

if TYPE_CHECKING:
    from aioflow.checkpoint.completed import SubtaskState
    from aioflow.cluster.job_store import PersistedJob
    from aioflow.cluster.restart import RestartPolicy
    from aioflow.cluster.rpc import RpcConnection
    from aioflow.cluster.shipping import ShippedJob
    from aioflow.cluster.task_executor import TaskExecutor
    from aioflow.core.host import Host
    from aioflow.core.scope import TapPlace
    from aioflow.graph.job_graph import JobGraph
    from aioflow.network.channels import ProducerState

__all__ = ["ClusterJob", "needs_submitter"]

logger = logging.getLogger(__name__)

SUBMIT_S = 300.0
"""Maximum time for a process to answer a deployment.

A function may hold its event loop meanwhile: loading a large model takes minutes.
"""

SUSPEND_S = 5.0
"""How long a suspended JobMaster may take to close its checkpoints."""


class ClusterJob:
    """A `JobRunner` of the Dispatcher. `tasks` is the `TaskExecutorGateway` of its JobMaster.

    `declare(job_id, slots)` tells the ResourceManager how many slots the job wants, and
    `lose(worker_id, why)` that its process in a TaskManager counts as lost.
    `on_over(job_id)` is called when the job holds nothing here any more.
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
        """`content`: the job as TaskManagers load it.

        `group`: runs the tasks of a job whose `run` is not called.
        """
        self.job_id = job_id
        self.token = token
        self.content = content
        self._declare = declare
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
        self._scheduler = SlotScheduler(job_id, job.graph)
        self._rescales = 0
        """Rescalings that the scheduler knows."""
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
        self._waiting: list[TaskDeploymentDescriptor] = []
        self._requests: dict[int, list[TaskDeploymentDescriptor]] = {}
        self.fenced_total = 0
        """Dropped reports that were meant for another JobMaster of the job."""
        self._adaptive = AdaptiveParallelism(
            self.job_master.executions,
            self.job_master.rescale,
            self._group,
            lambda: self._scheduler.slots_held,
            partial(self.tasks.taps.notify, "warning"),
            can_grow=checkpoints is not None and checkpoints.store is not None,
        )
        self._reserved: asyncio.Future[None] | None = None
        """Done once the slots of a rescaling are there; while one waits for them."""
        self._early_loss: Broken | None = None
        """Loss of a worker before the job asked for slots."""
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

        Raises GraphError if the job needs its submitter, and that is gone.
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
                self._over = True
                self._adaptive.close()
                self.tasks.peers.ask_all("job_over", self.job_id, self.token)
                self._publish_now()
                self._carry_out(self._scheduler.close())
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
        """Lets the job go on at another parallelism. See `RunningJob.rescale`."""
        graph = rescaled(self.job_master.executions.graph, parallelism, of_operators)
        await self.rescale_to(graph)

    async def rescale_to(
        self, graph: JobGraph, resources: AbstractAsyncContextManager[None] | None = None
    ) -> None:
        """Lets the job go on with `graph`, inside `resources`, which has the slots for it."""
        executions = self.job_master.executions
        if resources is None and not same_parallelism(graph, executions.graph):
            needed = slots_needed(graph)
            resources = self.slots_reserved(max(needed, slots_needed(executions.graph)))
        await self.job_master.rescale(graph, resources)
        self._adaptive.choose()
        if not self._over:
            self._carry_out(self._scheduler.reserve(0))
        self._publish()

    @asynccontextmanager
    async def slots_reserved(
        self, slots: int, leaving: frozenset[str] = frozenset()
    ) -> AsyncIterator[None]:
        """Gets `slots` for the rescaling inside the block, on workers that are not in `leaving`.

        The new tasks run on these. Raises RescaleError if there are not enough slots.
        """
        self._reserved = asyncio.get_running_loop().create_future()
        try:
            self._carry_out(self._scheduler.reserve(slots, leaving))
            await self._reserved
            yield
        finally:
            self._reserved = None
            if not self._over:
                self._carry_out(self._scheduler.reserve(self._adaptive.slots_wanted))

    @property
    def stopped_with(self) -> str | None:
        return self.job_master.stopped_with

    @property
    def stop_error(self) -> BaseException | None:
        return self.job_master.stop_error

    # Requests of the JobMaster, through `tasks`.

    def _wait_for_slot(self, descriptor: TaskDeploymentDescriptor) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._request_slots)
        self._waiting.append(descriptor)
        self._publish()

    def _cancel_waiting(self, attempt: ExecutionAttemptId) -> None:
        """Cancels a task that still waits for a slot, so it never ran."""
        self.update_task_state(attempt, ExecutionState.CANCELED, None)
        for number, batch in list(self._requests.items()):
            batch[:] = [descriptor for descriptor in batch if descriptor.attempt != attempt]
            if not batch:
                del self._requests[number]
                self._carry_out(self._scheduler.withdraw(number))

    def _overdue(self, worker_id: str, attempt: ExecutionAttemptId, why: str) -> None:
        """Declares a process of the job lost because it has not ended or begun a task in time."""
        if worker_id != SUBMITTER:
            self._lose(worker_id, f"its task {attempt} {why}")
            return
        logger.error("job %s: task %s %s, in the submitting process", self.job_id, attempt, why)
        self._failed(attempt, Broken(f"task {attempt} {why}"))

    # Deployment.

    def _request_slots(self) -> None:
        batch, self._waiting = self._waiting, []
        batch = [
            descriptor
            for descriptor in batch
            if self.job_master.executions.awaits_deployment(descriptor.attempt)
        ]
        if not batch or self._over:
            return
        roaming = [_subtask(descriptor) for descriptor in batch if not descriptor.vertex.stays_here]
        executions = self.job_master.executions
        if self._rescales != executions.rescales:
            self._rescales = executions.rescales
            self._carry_out(self._scheduler.rescaled(executions.next_graph))
        if not roaming:
            self._deploy(batch, {})
            return
        number, instructions = self._scheduler.request(roaming)
        self._requests[number] = batch
        self._carry_out(instructions)
        if self._reserved is None:
            self._carry_out(self._scheduler.reserve(self._adaptive.slots_wanted))
        if self._early_loss is not None and number in self._requests:
            self.start_failed(self._early_loss)
            return
        for descriptor in self._requests.get(number, ()):
            self.job_master.slot_is_there(descriptor.attempt, False)

    def _carry_out(self, instructions: Sequence[Instruction], loss: Broken | None = None) -> None:
        """Carries out `instructions`. `loss`: why the subtasks that they lose are lost."""
        for instruction in instructions:
            match instruction:
                case DeclareRequirement(job_id, slots):
                    self._declare(job_id, slots)
                case Placed(number, slots):
                    batch = self._requests.pop(number, None)
                    if batch is not None:
                        self._deploy(batch, slots)
                case PlacementFailed(number, _, error):
                    for descriptor in self._requests.pop(number, []):
                        self._failed(descriptor.attempt, error)
                case FreeSlot(worker_id, allocation_id):
                    self.tasks.peers.ask(
                        worker_id,
                        "free_slot",
                        allocation_id,
                        self.token,
                        f"job {self.job_id} needs it no more",
                    )
                case SubtasksLost(worker_id, subtasks):
                    lost = loss or Broken(
                        f"a slot of taskmanager {worker_id} is gone, and the tasks in it with it"
                    )
                    for subtask in subtasks:
                        execution = self.job_master.executions.executions.get(subtask)
                        if execution is None:
                            continue  # It is not deployed yet, because the job is being rescaled.
                        if execution.attempt in self.tasks.placed:
                            self._failed(execution.attempt, lost)
                case OfferAnswer():
                    pass  # `offered` returns it to the TaskManager.
        reserved = self._reserved
        if reserved is not None and not reserved.done() and self._scheduler.is_reserved:
            reserved.set_result(None)

    def _deploy(self, batch: list[TaskDeploymentDescriptor], slots: Any) -> None:
        executions = self.job_master.executions
        for descriptor in batch:
            worker_id = (
                SUBMITTER if descriptor.vertex.stays_here else slots[_subtask(descriptor)][0]
            )
            if self.tasks.here is not None and worker_id == SUBMITTER:
                location = self.tasks.here.location
            else:
                location = self.tasks.peers.location_of(worker_id)
            executions.locations[_subtask(descriptor)] = location
        located = [executions.located(descriptor) for descriptor in batch]
        _ = self._group.create_task(self._submit_all(located, slots), name="deploy tasks")

    async def _submit_all(self, batch: list[TaskDeploymentDescriptor], slots: Any) -> None:
        """Submits tasks. One that is cancelled before counts as waiting, so it never runs."""
        here = self.tasks.here
        leaving = [one for one in batch if here is None or not one.vertex.stays_here]
        # In a thread: state and splits may be large.
        contents = await self._host.blocking(self._shipped.ship_tasks, leaving)
        for descriptor in batch:
            attempt = descriptor.attempt
            if not self.job_master.executions.awaits_deployment(attempt):
                continue
            self.job_master.slot_is_there(attempt, True)
            stays_here = descriptor.vertex.stays_here
            place = (SUBMITTER, "") if stays_here else slots[_subtask(descriptor)]
            worker_id, allocation_id = place
            self.tasks.placed[attempt] = worker_id
            if here is not None and stays_here:
                self._submit_here(descriptor, here)
            else:
                self._submit(attempt, worker_id, allocation_id, contents[attempt])

    def _submit_here(self, descriptor: TaskDeploymentDescriptor, executor: TaskExecutor) -> None:
        try:
            executor.submit_task(descriptor, self.job_master.fencing_token)
        # A task that cannot be deployed has failed, like any other.
        except Exception as error:  # noqa: BLE001
            self._failed(descriptor.attempt, error)

    def _failed(self, attempt: ExecutionAttemptId, error: BaseException) -> None:
        self.update_task_state(attempt, ExecutionState.FAILED, error)

    def _submit(
        self,
        attempt: ExecutionAttemptId,
        worker_id: str,
        allocation_id: str,
        content: bytes | GraphError,
    ) -> None:
        peer = self.tasks.peers.get(worker_id)
        try:
            if isinstance(content, GraphError):
                raise content
            if peer is None:
                raise Broken(f"the process that should run {attempt} is gone")
            # Called now, awaited later, so that an immediate cancellation cannot overtake it.
            answer = peer.connection.call(
                "submit_task",
                self.job_id,
                self.token,
                attempt_key(attempt),
                allocation_id,
                content,
            )
        # A task that cannot be deployed has failed, like any other.
        except Exception as error:  # noqa: BLE001
            self._not_submitted(attempt, error, peer)
            return
        _ = self._group.create_task(
            self._submitted(attempt, worker_id, answer, peer), name=f"submit {attempt}"
        )

    async def _submitted(
        self,
        attempt: ExecutionAttemptId,
        worker_id: str,
        answer: Coroutine[Any, Any, Any],
        peer: JobPeer,
    ) -> None:
        try:
            async with asyncio.timeout(SUBMIT_S) as deadline:
                await answer
        except Exception as error:  # noqa: BLE001  # As above.
            if not deadline.expired():
                self._not_submitted(attempt, error, peer)
            elif self.tasks.placed.get(attempt) == worker_id:
                why = f"was submitted {SUBMIT_S:g} s ago, and its process does not answer"
                self._overdue(worker_id, attempt, f"{why}: a function holds its event loop")

    def _not_submitted(
        self, attempt: ExecutionAttemptId, error: Exception, peer: JobPeer | None
    ) -> None:
        if self.tasks.here is not None and peer is not None and not peer.connection.is_open:
            return  # The worker is lost: `worker_lost` reports why.
        self._failed(attempt, error)

    # JobMasterGateway, called by the tasks in this process and by the reports of the others.

    def update_task_state(
        self, attempt: ExecutionAttemptId, state: ExecutionState, error: BaseException | None
    ) -> None:
        if state.is_terminal:
            self.tasks.placed.pop(attempt, None)
        self.job_master.update_task_state(attempt, state, error)
        if not self._over and self.job_master.executions.has_finished(attempt):
            # Its region asks for a slot again if it restarts.
            subtask = attempt.vertex_id, attempt.subtask_index
            self._carry_out(self._scheduler.released([subtask]))
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
        """Returns which slots of a TaskManager, which opened the job at `location`, are accepted.

        The others are returned by their allocation ids.
        """
        if self._over:
            return (), tuple(offer.allocation_id for offer in offers)
        if self.tasks.peers.joined(worker_id, connection, location):
            if (drain := self.job_master.stop_drains) is not None:
                self.tasks.peers.ask(worker_id, "stop_sources", self.job_id, drain)
            self.tasks.taps.tell(worker_id)
        answer, *rest = self._scheduler.offered(worker_id, offers)
        assert isinstance(answer, OfferAnswer)
        self._carry_out(rest)
        if answer.accepted:
            self._adaptive.slots_came()
        return answer.accepted, answer.rejected

    def not_opened(self, worker_id: str, error: bytes) -> None:
        """A TaskManager could not load the code, so no other can either.

        A replacement may: its error may be that of a file or a server, so the restart policy
        decides.
        """
        failure = self._error(error) or Broken("a taskmanager could not open the job")
        note_once(failure, f"while {worker_id} opened the job")
        if self.tasks.here is not None and not self.job_master.executions.has_run:
            self.job_master.fail(failure)
        self._fail_waiting(failure)

    def start_failed(self, loss: Broken) -> None:
        """A worker of this job alone was lost before tasks were deployed to it.

        The tasks that wait for slots fail, so that the restart policy decides. If the job has not
        begun, its first tasks will fail, with the first of these losses.
        """
        if not self._requests and self.status is JobStatus.CREATED:
            self._early_loss = self._early_loss or loss
            return
        self._early_loss = None
        self._refuse_slots(f"{loss}")
        self._fail_waiting(loss)

    def _fail_waiting(self, failure: BaseException) -> None:
        """Fails the tasks that wait for slots."""
        for number, batch in list(self._requests.items()):
            del self._requests[number]
            for descriptor in batch:
                self._failed(descriptor.attempt, failure)
            self._carry_out(self._scheduler.withdraw(number))

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
        if not self._over:
            self._carry_out(self._scheduler.slot_lost(worker_id, allocation_id))

    def worker_lost(self, worker_id: str, loss: Broken | None = None) -> None:
        """Handles the loss of a TaskManager, of its connection or of its process for this job."""
        ran = worker_id in self.tasks.placed.values()
        if self.tasks.peers.left(worker_id):
            self._metrics.pop(worker_id, None)
            self._carry_out(self._scheduler.worker_lost(worker_id), loss)
        if self.tasks.here is not None and loss is not None and not ran and not self._over:
            self.start_failed(loss)

    def no_resources(self, available: int, existing: int) -> bool:
        """Handles missing slots. Returns whether that is worth a warning.

        A job whose tasks all wait begins with the slots that are there. If these are too few, it
        waits in line while the `existing` ones suffice, which include those of other jobs.
        """
        waits = bool(self._requests) or self._reserved is not None
        self._refuse_slots(
            f"{self._scheduler.slots_declared} slots are needed, and there are {available} for it; "
            "start more workers, give them more slots, or ask for a lower parallelism"
        )
        smaller = self._adaptive.shrink() if self._requests else None
        if smaller is None:
            if self._requests and self._adaptive.waits_in_line(existing):
                self._carry_out(self._scheduler.wait_in_line())
                return False
            self._carry_out(self._scheduler.no_resources(available))
        else:
            # The slots stay here, although their tasks, which never ran, are cancelled.
            self._carry_out(self._scheduler.reserve(self._scheduler.slots_held))
            self.job_master.adapt(smaller)
        return waits

    def _refuse_slots(self, why: str) -> None:
        """Ends a rescaling that waits for slots."""
        if self._reserved is not None and not self._reserved.done():
            name = self.job_master.executions.graph.name
            self._reserved.set_exception(RescaleError(f"job {name!r} goes on as it was: {why}"))

    def report(self, worker_id: str, metrics: dict[str, float]) -> None:
        self._metrics[worker_id] = metrics
        if self.tasks.taps.submitter is not None:
            self.tasks.taps.notify("metrics", self.all_metrics())

    def tapped(self, tap_id: int, content: bytes, rows: int, missed: int, refused: str) -> None:
        """Hands on a batch of a subscription, or the reason why there is none.

        If the tap may miss rows, rows for a slow reader are only counted.
        """
        self.tasks.taps.tapped(tap_id, content, rows, missed, refused)

    # For monitoring.

    def metrics_of(self, worker_id: str) -> dict[str, float]:
        """The last metrics that one process reported for this job."""
        return self._metrics.get(worker_id, {})

    def all_metrics(self) -> dict[str, float]:
        """The metrics of all processes, merged."""
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
        """Returns (running tasks, finished tasks, all tasks, slots that the job waits for)."""
        states = [execution.state for execution in self.job_master.executions.executions.values()]
        running, finished = (
            states.count(ExecutionState.RUNNING),
            states.count(ExecutionState.FINISHED),
        )
        return running, finished, len(states), self._scheduler.slots_missing

    @property
    def state_backend(self) -> str:
        """Where the tasks of the job keep their state."""
        return str(self._shipped.options.state_backend)

    def worker_at(self, location: str) -> str:
        """The TaskManager that runs, or ran, tasks of this job at `location`.

        Empty if there was none.
        """
        return self.tasks.peers.worker_at(location)

    def location_of(self, worker_id: str) -> str:
        """Where a TaskManager runs tasks of this job; empty if it runs none."""
        return self.tasks.peers.location_of(worker_id)

    # Calls of the submitter.

    def submitter_returned(self, submitter: Submitter) -> None:
        """The process that submitted the job has connected again.

        A process that runs a part of the job returns too late: the job is being cancelled.
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
        """Done once all TaskManagers that run the job now have the tap."""
        return wait_all(self.tasks.taps.add(place, tap_id, may_miss))

    def remove_remote_tap(self, place: TapPlace, tap_id: int) -> None:
        self.tasks.taps.remove(place, tap_id)

    def end(self) -> None:
        """Takes no more reports, when the job is over."""
        self._over = True
        self._adaptive.close()

    def _error(self, content: bytes) -> BaseException | None:
        error = unpack_error(content, self._codec)
        if self.tasks.here is not None and isinstance(error, RemoteError):
            # A function that calls sys.exit() ends the program, as it does in one process.
            return exit_request(error, content, self._codec) or error
        return error

    # Messages to the submitter.

    def _publish(self) -> None:
        """Publishes in the next loop turn, so that many changes become one message."""
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


def _subtask(descriptor: TaskDeploymentDescriptor) -> tuple[int, int]:
    return descriptor.attempt.vertex_id, descriptor.attempt.subtask_index


def needs_submitter(job: PersistedJob) -> bool:
    """Whether a part of the job cannot leave the process that submitted it."""
    return any(vertex.stays_here for vertex in load_job(job.graph).graph.vertices)
