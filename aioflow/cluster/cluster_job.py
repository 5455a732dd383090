"""One job in the JobManager: its JobMaster, its slots, and the processes that run its tasks.

The JobMaster deploys as it would in one process. Tasks that it deploys in one turn wait here until
there are slots for all of them. Each descriptor then gets the locations of its producers. Tasks
that cannot leave the submitting process run there. Every report of a TaskManager carries the token
of its JobMaster; reports for an older JobMaster are dropped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import pickle
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.checkpoint.completed import CheckpointStats
from aioflow.checkpoint.metadata import decode_subtask
from aioflow.cluster.checkpoint_settings import CheckpointSettings
from aioflow.cluster.job_master import CHECKPOINTS_CLOSE_S, JobMaster
from aioflow.cluster.job_peers import SUBMITTER, JobPeers
from aioflow.cluster.job_session import AttemptKey, attempt_key, pack_error, unpack_error
from aioflow.cluster.job_taps import JobTaps, Submitter
from aioflow.cluster.overdue import until_overdue
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
)
from aioflow.cluster.shipping import load_job
from aioflow.cluster.split_discovery import pack_splits
from aioflow.core.aio import OrderedTaskGroup, close_within, wait_all
from aioflow.core.errors import Broken, GraphError, JobNotRunning
from aioflow.core.wire.serializers import Codec
from aioflow.graph.deployment import ExecutionAttemptId, ExecutionState, TaskDeploymentDescriptor

if TYPE_CHECKING:
    from aioflow.cluster.execution_graph import JobStatus
    from aioflow.cluster.job_store import PersistedJob
    from aioflow.cluster.rpc import RpcConnection
    from aioflow.core.elements import CheckpointBarrier, RecordBatch
    from aioflow.core.host import Host
    from aioflow.core.ids import TapPlace
    from aioflow.operators.source import Split

__all__ = ["ClusterJob", "needs_submitter"]

logger = logging.getLogger(__name__)

SUSPEND_S = 5.0
"""How long a suspended JobMaster may take to close its checkpoints."""


class ClusterJob:
    """A `JobRunner` of the Dispatcher, and the `TaskExecutorGateway` of its JobMaster.

    `declare(job_id, slots)` tells the ResourceManager how many slots the job wants.
    `on_over(job_id)` is called when the job holds nothing here any more.
    """

    def __init__(
        self,
        host: Host,
        job: PersistedJob,
        token: int,
        declare: Callable[[str, int], None],
        submitter: Submitter | None,
        on_over: Callable[[str], None],
        recovered: bool = False,
    ) -> None:
        self.job_id = job.job_id
        self.token = token
        self.content = job.graph
        self._declare = declare
        self._on_over = on_over
        self._shipped = load_job(job.graph)
        graph = self._shipped.graph
        at_home = [vertex.name for vertex in graph.vertices if vertex.stays_here]
        if at_home and (submitter is None or not submitter.location):
            raise GraphError(
                f"job {job.name!r} cannot run without the process that submitted it, which is "
                f"gone: {', '.join(at_home)} "
                "holds functions or results of that process; submit it again, or use a sink that "
                "is a Sink object"
            )
        self._codec = Codec(self._shipped.types)
        self._group = OrderedTaskGroup()
        self._host = host
        self.job_master = JobMaster(
            host,
            job.job_id,
            graph,
            pickle.loads(job.config["restart"]),
            self._group,
            checkpoints=CheckpointSettings(**job.config["checkpoints"])
            if job.config.get("checkpoints")
            else None,
            codec=self._codec,
            recovered=recovered,
        )
        self._scheduler = SlotScheduler(job.job_id, graph)
        self._peers = JobPeers()
        if submitter is not None:
            self._peers.joined(SUBMITTER, submitter.connection, submitter.location)
        self._taps = JobTaps(job.job_id, self._peers, self._codec, submitter)
        self._waiting: list[TaskDeploymentDescriptor] = []
        self._requests: dict[int, list[TaskDeploymentDescriptor]] = {}
        self._placed: dict[ExecutionAttemptId, str] = {}
        """Where each attempt that has not ended runs."""
        self._stop_drains: bool | None = None
        self.fenced_total = 0
        """Dropped reports that were meant for another JobMaster of the job."""
        self._publishing = False
        self._over = False
        self._metrics: dict[str, dict[str, float]] = {}

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
                _ = self._group.create_task(self.job_master.start(self), name="start")
                status = await asyncio.shield(self.job_master.terminated)
                self._group.cancel_children()
                await close_within(
                    self.job_master.close(),
                    CHECKPOINTS_CLOSE_S,
                    what=f"the checkpoints of job {self.job_id}",
                )
                if self._taps.submitter is not None and self.stop_error is not None:
                    self._taps.submitter.connection.notify(
                        "stop_failed", pack_error(self.stop_error, self._codec)
                    )
                return status
            finally:
                self._over = True
                self._peers.ask_all("job_over", self.job_id, self.token)
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

    @property
    def stopped_with(self) -> str | None:
        return self.job_master.stopped_with

    @property
    def stop_error(self) -> BaseException | None:
        return self.job_master.stop_error

    # TaskExecutorGateway, for the JobMaster.

    async def ready(self) -> None:
        """Returns at once: a restart waits for its slots like a start."""

    def submit_task(self, descriptor: TaskDeploymentDescriptor, fencing_token: str) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._request_slots)
        self._waiting.append(descriptor)
        self._publish()

    def cancel_task(self, attempt: ExecutionAttemptId) -> None:
        worker_id = self._placed.get(attempt)
        if worker_id is not None:
            answers = self._peers.ask(worker_id, "cancel_task", attempt_key(attempt))
            _ = self._group.create_task(
                self._watch(worker_id, attempt, answers), name=f"cancel {attempt}"
            )
            return
        # It still waits for a slot, so it never ran.
        self.job_master.update_task_state(attempt, ExecutionState.CANCELED, None)
        for number, batch in list(self._requests.items()):
            batch[:] = [descriptor for descriptor in batch if descriptor.attempt != attempt]
            if not batch:
                del self._requests[number]
                self._carry_out(self._scheduler.withdraw(number))

    async def _watch(
        self, worker_id: str, attempt: ExecutionAttemptId, answers: Sequence[asyncio.Future[None]]
    ) -> None:
        """Declares a TaskManager lost if it does not end a cancelled task in time.

        Its tasks end once its event loop is free again.
        """
        why = await until_overdue(answers, self._shipped.options.cancellation_timeout_s)
        if self._placed.get(attempt) != worker_id:
            return
        logger.error(
            "job %s: task %s %s; taskmanager %s counts as lost",
            self.job_id,
            attempt,
            why,
            worker_id or "of the submitter",
        )
        if worker_id == SUBMITTER:
            self._placed.pop(attempt)
            self.job_master.update_task_state(
                attempt, ExecutionState.FAILED, Broken(f"task {attempt} {why}")
            )
            self._publish()
        else:
            self.worker_lost(worker_id)

    def stop_sources(self, job_id: str, *, drain: bool) -> None:
        self._stop_drains = drain
        self._peers.ask_all("stop_sources", job_id, drain)

    def trigger_checkpoint(self, attempt: ExecutionAttemptId, barrier: CheckpointBarrier) -> None:
        worker_id = self._placed.get(attempt)
        if worker_id is not None:
            self._peers.ask(worker_id, "trigger_checkpoint", attempt_key(attempt), barrier)

    def notify_checkpoint_complete(self, job_id: str, checkpoint_id: int) -> None:
        self._peers.ask_all("notify_checkpoint_complete", job_id, checkpoint_id)

    def notify_checkpoint_aborted(
        self, job_id: str, checkpoint_id: int, latest_completed: int | None
    ) -> None:
        self._peers.ask_all("notify_checkpoint_aborted", job_id, checkpoint_id, latest_completed)

    def add_tap(
        self,
        job_id: str,
        place: TapPlace,
        tap: Callable[[RecordBatch], None],
        on_missed: object = None,
    ) -> Sequence[asyncio.Future[None]]:
        """Adds a tap for a watcher in this process, which may miss records.

        Taps of the submitter have numbers of their own: see `add_remote_tap`.
        """
        return self._taps.watch(place, tap)

    def remove_tap(self, job_id: str, place: TapPlace, tap: Callable[[RecordBatch], None]) -> None:
        """Removes a tap that `add_tap` added."""
        self._taps.unwatch(place, tap)

    async def query_state(
        self, attempt: ExecutionAttemptId, node_id: int, query: Callable[[Any], Any]
    ) -> Any:
        return await self.query_remote_state(attempt_key(attempt), node_id, pickle.dumps(query))

    async def add_splits(self, attempt: ExecutionAttemptId, splits: Sequence[Split]) -> None:
        peer = self._peers.get(self._placed.get(attempt, ""))
        if peer is None:
            raise JobNotRunning(f"attempt {attempt} runs nowhere now, it takes no splits")
        await peer.connection.call(
            "add_splits", attempt_key(attempt), pack_splits(splits, self._codec)
        )

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
        if not roaming:
            self._deploy(batch, {})
            return
        number, instructions = self._scheduler.request(roaming)
        self._requests[number] = batch
        self._carry_out(instructions)
        for descriptor in self._requests.get(number, ()):
            self.job_master.slot_is_there(descriptor.attempt, False)

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
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
                        self.job_master.update_task_state(
                            descriptor.attempt, ExecutionState.FAILED, error
                        )
                    self._publish()
                case FreeSlot(worker_id, allocation_id):
                    self._peers.ask(
                        worker_id,
                        "free_slot",
                        allocation_id,
                        self.token,
                        f"job {self.job_id} needs it no more",
                    )
                case SubtasksLost(worker_id, subtasks):
                    lost = Broken(
                        f"a slot of taskmanager {worker_id} is gone, and the tasks in it with it"
                    )
                    for subtask in subtasks:
                        attempt = self.job_master.executions.executions[subtask].attempt
                        if self._placed.pop(attempt, None) is not None:
                            self.job_master.update_task_state(attempt, ExecutionState.FAILED, lost)
                    self._publish()
                case OfferAnswer():
                    pass  # `offered` returns it to the TaskManager.

    def _deploy(self, batch: list[TaskDeploymentDescriptor], slots: Any) -> None:
        executions = self.job_master.executions
        for descriptor in batch:
            worker_id = (
                SUBMITTER if descriptor.vertex.stays_here else slots[_subtask(descriptor)][0]
            )
            peer = self._peers.get(worker_id)
            executions.locations[_subtask(descriptor)] = "" if peer is None else peer.location
            self._placed[descriptor.attempt] = worker_id
        for descriptor in batch:
            attempt = descriptor.attempt
            if not executions.awaits_deployment(attempt):
                self._placed.pop(attempt, None)
                continue
            self.job_master.slot_is_there(attempt, True)
            content = self._shipped.ship_task(self._located(descriptor))
            allocation_id = "" if descriptor.vertex.stays_here else slots[_subtask(descriptor)][1]
            _ = self._group.create_task(
                self._submit(attempt, allocation_id, content), name=f"submit {attempt}"
            )

    def _located(self, descriptor: TaskDeploymentDescriptor) -> TaskDeploymentDescriptor:
        """Returns the descriptor with the current locations of its producers.

        They were unknown when the descriptor was made.
        """
        locations = self.job_master.executions.locations
        inputs = []
        for gate in descriptor.inputs:
            channels = []
            for channel in gate.channels:
                producer = channel.partition.producer
                channels.append(
                    dataclasses.replace(
                        channel, location=locations[producer.vertex_id, producer.subtask_index]
                    )
                )
            inputs.append(dataclasses.replace(gate, channels=tuple(channels)))
        return dataclasses.replace(descriptor, inputs=tuple(inputs))

    async def _submit(
        self, attempt: ExecutionAttemptId, allocation_id: str, content: bytes
    ) -> None:
        try:
            peer = self._peers.get(self._placed.get(attempt, SUBMITTER))
            if peer is None:
                raise Broken(f"the process that should run {attempt} is gone")
            await peer.connection.call(
                "submit_task", self.job_id, self.token, attempt_key(attempt), allocation_id, content
            )
        # A task that cannot be deployed has failed, like any other.
        except Exception as error:  # noqa: BLE001
            self._placed.pop(attempt, None)
            self.job_master.update_task_state(attempt, ExecutionState.FAILED, error)
            self._publish()

    # Reports of TaskManagers.

    def offered(
        self, worker_id: str, connection: RpcConnection, location: str, offers: Sequence[SlotOffer]
    ) -> tuple[Any, Any]:
        """A TaskManager has opened the job at `location` and offers slots.

        Returns the accepted offers and the allocation ids of the rejected ones.
        """
        if self._over:
            return (), tuple(offer.allocation_id for offer in offers)
        if self._peers.joined(worker_id, connection, location):
            if self._stop_drains is not None:
                self._peers.ask(worker_id, "stop_sources", self.job_id, self._stop_drains)
            self._taps.tell(worker_id)
        answer, *rest = self._scheduler.offered(worker_id, offers)
        assert isinstance(answer, OfferAnswer)
        self._carry_out(rest)
        return answer.accepted, answer.rejected

    def not_opened(self, error: bytes) -> None:
        """A TaskManager could not load the code, so no other can either."""
        failure = unpack_error(error, self._codec) or Broken("a taskmanager could not open the job")
        for number, batch in list(self._requests.items()):
            del self._requests[number]
            for descriptor in batch:
                self.job_master.update_task_state(
                    descriptor.attempt, ExecutionState.FAILED, failure
                )
            self._carry_out(self._scheduler.withdraw(number))
        self._publish()

    def on_task_state(self, token: int, key: AttemptKey, state: str, error: bytes) -> None:
        attempt, reached = ExecutionAttemptId(*key), ExecutionState(state)
        if token != self.token:
            self.fenced_total += 1
            return
        if self._over:
            return
        if reached.is_terminal:
            self._placed.pop(attempt, None)
        self.job_master.update_task_state(attempt, reached, unpack_error(error, self._codec))
        self._publish()

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
            self.job_master.acknowledge_checkpoint(
                attempt, checkpoint_id, told, CheckpointStats(*stats)
            )

    def on_declined(
        self, token: int, key: AttemptKey, checkpoint_id: int, reason: str, error: bytes
    ) -> None:
        if token == self.token and not self._over:
            self.job_master.decline_checkpoint(
                ExecutionAttemptId(*key), checkpoint_id, reason, unpack_error(error, self._codec)
            )

    def on_end_of_data(self, token: int, key: AttemptKey) -> None:
        if token == self.token and not self._over:
            self.job_master.end_of_data_reached(ExecutionAttemptId(*key))

    def slot_freed(self, worker_id: str, allocation_id: str) -> None:
        self._carry_out(self._scheduler.slot_lost(worker_id, allocation_id))

    def worker_lost(self, worker_id: str) -> None:
        """A TaskManager or its connection is lost. It ends its tasks by itself."""
        if self._peers.left(worker_id):
            self._metrics.pop(worker_id, None)
            self._carry_out(self._scheduler.worker_lost(worker_id))

    def no_resources(self, available: int) -> None:
        self._carry_out(self._scheduler.no_resources(available))

    def report(self, worker_id: str, metrics: dict[str, float]) -> None:
        self._metrics[worker_id] = metrics
        if self._taps.submitter is not None:
            self._taps.submitter.connection.notify("metrics", self.all_metrics())

    def tapped(self, tap_id: int, content: bytes, rows: int, missed: int, refused: str) -> None:
        """Hands on a batch of a subscription, or the reason why there is none.

        If the tap may miss rows, rows for a slow reader are only counted.
        """
        self._taps.tapped(tap_id, content, rows, missed, refused)

    # For monitoring.

    def metrics_of(self, worker_id: str) -> dict[str, float]:
        """The last metrics that one process reported for this job."""
        return self._metrics.get(worker_id, {})

    def all_metrics(self) -> dict[str, float]:
        """The metrics of all processes, merged."""
        return {
            name: value for metrics in self._metrics.values() for name, value in metrics.items()
        }

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
        return self._peers.worker_at(location)

    def location_of(self, worker_id: str) -> str:
        """Where a TaskManager runs tasks of this job; empty if it runs none."""
        return self._peers.location_of(worker_id)

    async def read_state(
        self, attempt: ExecutionAttemptId, node_id: int, query: Callable[[Any], Any]
    ) -> Any:
        """As `query_state`, for a reader in this process."""
        return self._codec.decode(await self.query_state(attempt, node_id, query))

    # Calls of the submitter.

    def submitter_returned(self, submitter: Submitter) -> None:
        """The process that submitted the job has connected again.

        A process that runs a part of the job returns too late: the job is being cancelled.
        """
        if submitter.location or self._over:
            return
        self._taps.submitter = submitter
        self._peers.joined(SUBMITTER, submitter.connection, submitter.location)
        for tap_id, (place, may_miss) in submitter.taps.items():
            self._taps.add(place, tap_id, may_miss)
        self._publish()

    def submitter_lost(self) -> None:
        """Cancels the job if the submitting process ran a part of it. Otherwise the job goes on."""
        submitter, self._taps.submitter = self._taps.submitter, None
        self._peers.left(SUBMITTER)
        if submitter is not None and submitter.location and not self._over:
            logger.warning(
                "job %s is cancelled: the process that submitted it is gone, and runs a part of it",
                self.job_id,
            )
            for attempt in [a for a, worker_id in self._placed.items() if worker_id == SUBMITTER]:
                del self._placed[attempt]
                self.job_master.update_task_state(
                    attempt, ExecutionState.FAILED, Broken("the submitting process is gone")
                )
            self.cancel()

    def add_remote_tap(self, place: TapPlace, tap_id: int, may_miss: bool) -> Awaitable[bool]:
        """Done once all TaskManagers that run the job now have the tap."""
        return wait_all(self._taps.add(place, tap_id, may_miss))

    def remove_remote_tap(self, place: TapPlace, tap_id: int) -> None:
        self._taps.remove(place, tap_id)

    async def query_remote_state(self, key: AttemptKey, node_id: int, query: bytes) -> bytes:
        worker_id = self._placed.get(ExecutionAttemptId(*key))
        peer = self._peers.get(worker_id)
        if peer is None:
            raise JobNotRunning(
                f"attempt {ExecutionAttemptId(*key)} runs nowhere now; try again once the job runs"
            )
        return bytes(await peer.connection.call("query_state", key, node_id, query))

    # Messages to the submitter.

    def _publish(self) -> None:
        """Publishes in the next loop turn, so that many changes become one message."""
        if not self._publishing and self._taps.submitter is not None:
            self._publishing = True
            asyncio.get_running_loop().call_soon(self._publish_now)

    def _publish_now(self) -> None:
        self._publishing = False
        if self._taps.submitter is not None:
            graph = self.job_master.executions
            states = [
                (*attempt_key(e.attempt)[1:], e.state.value) for e in graph.executions.values()
            ]
            error = pack_error(self.error, self._codec)
            started = self.job_master.started.done()
            self._taps.submitter.connection.notify(
                "status", self.status.value, started, graph.restarts, error, states
            )


def _subtask(descriptor: TaskDeploymentDescriptor) -> tuple[int, int]:
    return descriptor.attempt.vertex_id, descriptor.attempt.subtask_index


def needs_submitter(job: PersistedJob) -> bool:
    """Whether a part of the job cannot leave the process that submitted it."""
    return any(vertex.stays_here for vertex in load_job(job.graph).graph.vertices)
