"""A cluster of worker processes for one flow: distributes its tasks and forwards their messages.

The process that runs the flow is a worker too, for parts that cannot leave it: collected results,
pushed inputs, local functions as sinks. All other tasks are distributed. Subtask i of every
operator goes to worker i, round robin, so that neighbours share a worker and few records cross
processes. A flow of parallelism 1 runs in one worker. The tasks of a lost worker fail. The job's
restart strategy decides what follows, and a restart waits for the replacement of the worker.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle

from aioflow.checkpoint.completed import CheckpointStats
from aioflow.checkpoint.metadata import decode_subtask
from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.job_master import CHECKPOINTS_CLOSE_S, JobMaster
from aioflow.cluster.overdue import until_overdue
from aioflow.cluster.running_job import RunningJob
from aioflow.cluster.shipping import local_job, ship_job
from aioflow.cluster.split_discovery import pack_splits
from aioflow.cluster.task_executor import RESOURCES_CLOSE_S, TaskExecutor
from aioflow.cluster.told import ToldWorker, status_of
from aioflow.cluster.worker_pool import (
    MASTER_SILENCE_FACTOR,
    WORKER_HEARTBEAT,
    WorkerPool,
    WorkerProcess,
)
from aioflow.core.aio import OrderedTaskGroup, cancel_and_wait, close_within, end_task, wait_all
from aioflow.core.errors import Broken, JobNotRunning, RemoteError, TypeNotSupported
from aioflow.core.metrics import MetricGroup
from aioflow.core.wire.batch import decode_batch
from aioflow.core.wire.serializers import Codec
from aioflow.graph.deployment import ExecutionAttemptId, ExecutionState, TaskDeploymentDescriptor
from aioflow.network.connection import fresh_secret
from aioflow.network.data_plane import DataPlane
from aioflow.protocol.errors import rebuild_error
from aioflow.protocol.framing import FrameType
from aioflow.protocol.messages import ErrorResponse, decode_message
from aioflow.task.closing import attach_errors

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from aioflow.cluster.checkpoint_settings import CheckpointSettings
    from aioflow.cluster.gateways import OnMissed
    from aioflow.cluster.heartbeat import HeartbeatOptions
    from aioflow.cluster.restart import RestartPolicy
    from aioflow.cluster.rpc import RpcConnection
    from aioflow.core.elements import CheckpointBarrier, RecordBatch
    from aioflow.core.host import Host
    from aioflow.core.ids import TapPlace
    from aioflow.graph.job_graph import JobGraph
    from aioflow.operators.source import Split
    from aioflow.task.environment import TaskOptions

__all__ = ["WorkersCluster"]

logger = logging.getLogger(__name__)

HERE = ""
"""The worker id of the process that runs the flow."""

CLOSE_TIMEOUT_S = RESOURCES_CLOSE_S + 5.0
"""How long workers may take to close shared resources after the job has finished."""

Tap = Callable[["RecordBatch"], None]


@dataclass(frozen=True, slots=True)
class _Tap:
    place: TapPlace
    tap: Tap
    on_missed: OnMissed | None


class WorkersCluster(RunningJob):
    """Runs one job over `count` worker processes."""

    job_master: JobMaster
    task_executor: WorkersCluster

    def __init__(
        self,
        host: Host,
        graph: JobGraph,
        restart: RestartPolicy,
        options: TaskOptions,
        count: int,
        heartbeat: HeartbeatOptions | None = None,
        checkpoints: CheckpointSettings | None = None,
    ) -> None:
        self._group = OrderedTaskGroup()
        self.host = host
        self.job_id = host.ids.new("job")
        self._graph = graph
        self._content = ship_job(graph, options)
        self._job = local_job(graph, options)
        self._cancellation_timeout_s = options.cancellation_timeout_s
        self._codec = Codec(self._job.types)
        self._count = count
        secret = fresh_secret(host)
        self._metrics = MetricGroup(host.clock.monotonic)
        self.job_master = JobMaster(
            host, self.job_id, graph, restart, self._group, self._ready, checkpoints, self._codec
        )
        self._here = TaskExecutor(
            host,
            self.job_master,
            self.job_master.fencing_token,
            self._metrics,
            options,
            self._codec,
        )
        self._data_plane = DataPlane(host, secret, self._codec, self._here.partitions)
        self._location = ""
        handlers: dict[str, Callable[..., Any]] = {
            "update_task_state": self._on_task_state,
            "task_stuck": self._on_stuck,
            "acknowledge_checkpoint": self._on_acknowledged,
            "decline_checkpoint": self._on_declined,
            "end_of_data_reached": self._on_end_of_data,
            "tapped": self._on_tapped,
            "report": self._on_report,
        }
        self.pool = WorkerPool(
            host, secret, heartbeat or WORKER_HEARTBEAT, handlers, self._open_worker, self._on_lost
        )
        self._starting: asyncio.Task[None] | None = None
        self._filling: asyncio.Task[None] | None = None
        self._placed: dict[tuple[int, int], str] = {}
        self._deployed: dict[ExecutionAttemptId, str] = {}
        """Attempts on other processes that have not ended."""
        self._cancelling: dict[ExecutionAttemptId, asyncio.Task[None]] = {}
        self._taps: dict[int, _Tap] = {}
        self._tap_numbers = itertools.count(1)
        self._stop_drains: bool | None = None
        self.task_executor = self

    # Life cycle.

    async def run(self) -> JobStatus:
        """Starts the workers, deploys, and waits for the end.

        A cancellation cancels the job; no process outlives it.
        """
        failure: Exception | None = None
        async with self._group:
            try:
                async with self._here:
                    self._starting = self._group.create_task(self._start(), name="start")
                    try:
                        status = await asyncio.shield(self.job_master.terminated)
                    except BaseException:
                        self.job_master.cancel()
                        raise
                if status is JobStatus.FINISHED:
                    await self._close_jobs()
            except Exception as error:  # noqa: BLE001  # Kept as it is: the group would wrap it.
                failure = error
            finally:
                self._group.cancel_children()
                await close_within(self._close(), CLOSE_TIMEOUT_S, what="the workers")
                await close_within(
                    self.job_master.close(),
                    CHECKPOINTS_CLOSE_S,
                    what=f"the checkpoints of job {self.job_id}",
                )
        if failure is not None:
            if status is not JobStatus.FAILED or self.job_master.error is None:
                raise failure
            attach_errors(self.job_master.error, [failure])
        return status

    async def _start(self) -> None:
        try:
            self._location = f"127.0.0.1:{await self._data_plane.listen()}"
            self._here.join(self._data_plane, self._location)
            await self.pool.listen()
            await self._begin()
        # A job whose workers cannot be started has failed.
        except Exception as error:  # noqa: BLE001
            self.job_master.fail(error)
            return
        await self.job_master.start(self)

    async def _begin(self) -> None:
        """Starts all workers.

        If one is lost meanwhile, the restart policy decides whether it is replaced.
        """
        while len(self.pool.open) < self._count:
            try:
                await self._fill()
            except Broken as error:
                if not any(error is worker.loss for worker in self.pool.all):
                    raise
                await self.job_master.start_failed(error)
        self._place()

    async def _open_worker(self, worker: WorkerProcess) -> str:
        assert worker.connection is not None
        beat = self.pool.heartbeat
        location: str = await worker.connection.call(
            "open_job",
            self._content,
            self.job_master.fencing_token,
            beat.interval_s,
            beat.timeout_s * MASTER_SILENCE_FACTOR,
        )
        # Messages that the other workers got before.
        for tap_id, one in self._taps.items():
            worker.tell("add_tap", self.job_id, one.place, tap_id, one.on_missed is not None)
        if self._stop_drains is not None:
            worker.tell("stop_sources", self.job_id, self._stop_drains)
        return location

    async def _fill(self) -> None:
        """Starts all missing workers at once.

        Raises the error of one that did not start, or was lost meanwhile.
        """
        starts = [
            asyncio.get_running_loop().create_task(self.pool.start_worker(), name="start worker")
            for _ in range(self._count - len(self.pool.open))
        ]
        try:
            await wait_all(starts)
        finally:
            # Includes ended ones: after a cancellation their errors would stay unretrieved.
            errors = await cancel_and_wait(starts)
        for start in starts:
            if (
                not start.cancelled()
                and start.exception() is None
                and (loss := start.result().loss) is not None
            ):
                errors.append(loss)
        if errors:
            # An error of the program comes first: a retry would not help.
            raise next((error for error in errors if not isinstance(error, Broken)), errors[0])

    async def _ready(self) -> None:
        """Waits for the replacements of lost workers, and moves the subtasks of those to them.

        With fewer workers, the rest share the subtasks. Raises Broken if no worker is left.
        """
        if self._filling is None or self._filling.done():
            self._filling = self._group.create_task(self._refill(), name="replace workers")
        await asyncio.shield(self._filling)
        self._place()

    async def _refill(self) -> None:
        try:
            await self._fill()
        # The other workers go on; `_place` raises if there are none.
        except Exception as error:  # noqa: BLE001
            logger.warning(
                "a worker could not be replaced, %d of %d are there: %r",
                len(self.pool.open),
                self._count,
                error,
            )

    def _place(self) -> None:
        """Places the subtasks that have no worker yet, or whose worker is lost."""
        workers = self.pool.open
        if not workers:
            raise Broken("no worker is left, and none can be started")
        # All subtasks of a lost worker go together to a worker without any, if there is one.
        idle = [worker for worker in workers if worker.id not in self._placed.values()]
        heirs: dict[str, WorkerProcess] = {}
        locations = self.job_master.executions.locations
        for vertex in self._graph.vertices:
            for index in range(vertex.parallelism):
                place = self._placed.get((vertex.id, index))
                if vertex.stays_here:
                    self._placed[vertex.id, index], locations[vertex.id, index] = (
                        HERE,
                        self._location,
                    )
                    continue
                if place is None:
                    worker = workers[index % len(workers)]
                elif self.pool[place].is_open:
                    continue
                else:
                    if place not in heirs and idle:
                        heirs[place] = idle.pop(0)
                    worker = heirs.get(place) or workers[index % len(workers)]
                self._placed[vertex.id, index], locations[vertex.id, index] = (
                    worker.id,
                    worker.location,
                )

    async def _close_jobs(self) -> None:
        """Closes shared resources in the workers.

        Errors fail the job, as they do in one process.
        """
        closings = [
            asyncio.get_running_loop().create_task(
                worker.connection.call("close_job"), name=f"close {worker.id}"
            )
            for worker in self.pool.open
            if worker.connection is not None and worker.connection.is_open
        ]
        try:
            if not await wait_all(closings, timeout_s=CLOSE_TIMEOUT_S):
                logger.warning(
                    "closing the resources of the job took longer than %.1f s", CLOSE_TIMEOUT_S
                )
        finally:
            await cancel_and_wait([closing for closing in closings if not closing.done()])
        for closing in closings:
            if (
                not closing.cancelled()
                and (error := closing.exception()) is not None
                and not isinstance(error, Broken)
            ):
                raise error

    async def _close(self) -> None:
        await cancel_and_wait(list(self._cancelling.values()))
        # No worker may be started while the workers are ended.
        await cancel_and_wait(
            [task for task in (self._starting, self._filling) if task is not None]
        )
        await self.pool.close()
        await self._data_plane.close()

    # For monitoring.

    @property
    def location(self) -> str:
        return self._location

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for worker in self.pool.all:  # Oldest first: for a task that has moved, later values win.
            found.update(worker.metrics)
        return {**found, **self._metrics.snapshot()}

    def own_metrics(self) -> dict[str, float]:
        return self._metrics.own_values()

    def workers(self) -> list[ToldWorker]:
        slots = max(vertex.parallelism for vertex in self._graph.vertices)
        return [
            ToldWorker(
                worker.id,
                slots,
                slots if self.job_master.status.is_terminal else 0,
                round(self.pool.silence_s(worker) * 1000),
                worker.location,
                status_of(worker.metrics),
            )
            for worker in self.pool.open
        ]

    def worker_at(self, location: str) -> str:
        return next((one.id for one in self.pool.all if one.location == location), "")

    async def ask_worker(self, worker_id: str, what: str, *args: Any) -> Any:
        for worker in self.pool.open:
            if worker.id == worker_id and worker.connection is not None:
                return await worker.connection.call("inspect", what, *args)
        raise Broken(f"worker {worker_id} is gone")

    # TaskExecutorGateway: each call goes to the process that runs the task.

    def submit_task(self, descriptor: TaskDeploymentDescriptor, fencing_token: str) -> None:
        attempt = descriptor.attempt
        place = self._placed[attempt.vertex_id, attempt.subtask_index]
        if place == HERE:
            self._here.submit_task(descriptor, fencing_token)
            return
        worker = self.pool[place]
        if worker.connection is None or not worker.is_open:
            raise worker.loss or Broken(
                f"{worker} {worker.state.value}; {descriptor.task_name} cannot be deployed there"
            )
        # Called now, awaited later, so that an immediate cancellation cannot overtake it.
        answer = worker.connection.call(
            "submit_task", self._job.ship_task(descriptor), fencing_token
        )
        self._deployed[attempt] = place
        _ = self._group.create_task(
            self._submitted(attempt, worker.connection, answer), name=f"submit {attempt}"
        )

    async def _submitted(
        self,
        attempt: ExecutionAttemptId,
        connection: RpcConnection,
        answer: Coroutine[Any, Any, Any],
    ) -> None:
        try:
            await answer
        # A task that cannot be deployed has failed, like any other.
        except Exception as error:  # noqa: BLE001
            if not connection.is_open:
                return  # The worker is lost: `_on_lost` reports it.
            self._ended(attempt)
            self.job_master.update_task_state(attempt, ExecutionState.FAILED, error)

    def cancel_task(self, attempt: ExecutionAttemptId) -> None:
        place = self._deployed.get(attempt, HERE)
        if place == HERE:
            self._here.cancel_task(attempt)
            return
        worker = self.pool[place]
        if attempt not in self._cancelling and worker.connection is not None:
            answers = [worker.connection.ask("cancel_task", _key(attempt))]
            self._cancelling[attempt] = self._group.create_task(
                self._watch(worker, attempt, answers), name=f"cancel {attempt}"
            )

    async def _watch(
        self,
        worker: WorkerProcess,
        attempt: ExecutionAttemptId,
        answers: Sequence[asyncio.Future[None]],
    ) -> None:
        why = await until_overdue(answers, self._cancellation_timeout_s)
        if self._deployed.get(attempt) == worker.id:
            self.pool.lose(worker, f"its task {attempt} {why}")

    def stop_sources(self, job_id: str, *, drain: bool) -> None:
        self._stop_drains = drain
        self._here.stop_sources(job_id, drain=drain)
        for worker in self.pool.open:
            worker.tell("stop_sources", job_id, drain)

    def trigger_checkpoint(self, attempt: ExecutionAttemptId, barrier: CheckpointBarrier) -> None:
        place = self._deployed.get(attempt, HERE)
        if place == HERE:
            self._here.trigger_checkpoint(attempt, barrier)
        else:
            self.pool[place].tell("trigger_checkpoint", _key(attempt), barrier)

    def notify_checkpoint_complete(self, job_id: str, checkpoint_id: int) -> None:
        self._here.notify_checkpoint_complete(job_id, checkpoint_id)
        for worker in self.pool.open:
            worker.tell("notify_checkpoint_complete", job_id, checkpoint_id)

    def notify_checkpoint_aborted(
        self, job_id: str, checkpoint_id: int, latest_completed: int | None
    ) -> None:
        self._here.notify_checkpoint_aborted(job_id, checkpoint_id, latest_completed)
        for worker in self.pool.open:
            worker.tell("notify_checkpoint_aborted", job_id, checkpoint_id, latest_completed)

    def add_tap(
        self, job_id: str, place: TapPlace, tap: Tap, on_missed: OnMissed | None = None
    ) -> Sequence[asyncio.Future[None]]:
        self._here.add_tap(job_id, place, tap)
        tap_id = next(self._tap_numbers)
        self._taps[tap_id] = _Tap(place, tap, on_missed)
        what = ("add_tap", job_id, place, tap_id, on_missed is not None)
        return [
            worker.connection.ask(*what)
            for worker in self.pool.open
            if worker.connection is not None
        ]

    def remove_tap(self, job_id: str, place: TapPlace, tap: Tap) -> None:
        self._here.remove_tap(job_id, place, tap)
        for tap_id in [i for i, one in self._taps.items() if (one.place, one.tap) == (place, tap)]:
            del self._taps[tap_id]
            for worker in self.pool.open:
                worker.tell("remove_tap", job_id, place, tap_id)

    async def query_state(
        self, attempt: ExecutionAttemptId, node_id: int, query: Callable[[Any], Any]
    ) -> Any:
        place = self._placed[attempt.vertex_id, attempt.subtask_index]
        if place == HERE:
            return await self._here.query_state(attempt, node_id, query)
        worker = self.pool[place]
        try:
            if worker.connection is None:
                raise Broken(f"{worker} has no connection")
            content = await worker.connection.call(
                "query_state", _key(attempt), node_id, cloudpickle.dumps(query)
            )
        except Broken as error:
            raise JobNotRunning(
                f"{worker} is gone, its state cannot be read now; try again once the job runs"
            ) from error
        return self._codec.decode(content)

    async def add_splits(self, attempt: ExecutionAttemptId, splits: Sequence[Split]) -> None:
        place = self._deployed.get(attempt, HERE)
        if place == HERE:
            await self._here.add_splits(attempt, splits)
            return
        worker = self.pool[place]
        if worker.connection is None:
            raise Broken(f"{worker} has no connection")
        await worker.connection.call("add_splits", _key(attempt), pack_splits(splits, self._codec))

    # Messages of workers.

    def _on_task_state(
        self, worker: WorkerProcess, key: tuple[str, int, int, int], state: str, told: bytes
    ) -> None:
        attempt, reached = ExecutionAttemptId(*key), ExecutionState(state)
        if self._deployed.get(attempt) != worker.id:
            return  # Another worker has the attempt, or it is over.
        if reached.is_terminal:
            self._ended(attempt)
        self.job_master.update_task_state(attempt, reached, self._error(told) if told else None)

    def _on_stuck(self, worker: WorkerProcess, key: tuple[str, int, int, int], told: str) -> None:
        """Ends the process of a cancelled task whose user code goes on."""
        if self._deployed.get(ExecutionAttemptId(*key)) == worker.id:
            self.pool.lose(worker, told)

    def _on_acknowledged(
        self,
        worker: WorkerProcess,
        key: tuple[str, int, int, int],
        checkpoint_id: int,
        state: list[Any],
        stats: tuple[Any, ...],
    ) -> None:
        attempt = ExecutionAttemptId(*key)
        told = decode_subtask(state, f"the acknowledgement of {attempt}")
        self.job_master.acknowledge_checkpoint(
            attempt, checkpoint_id, told, CheckpointStats(*stats)
        )

    def _on_declined(
        self,
        worker: WorkerProcess,
        key: tuple[str, int, int, int],
        checkpoint_id: int,
        reason: str,
        told: bytes,
    ) -> None:
        self.job_master.decline_checkpoint(
            ExecutionAttemptId(*key), checkpoint_id, reason, self._error(told) if told else None
        )

    def _on_end_of_data(self, worker: WorkerProcess, key: tuple[str, int, int, int]) -> None:
        self.job_master.end_of_data_reached(ExecutionAttemptId(*key))

    def _ended(self, attempt: ExecutionAttemptId) -> None:
        self._deployed.pop(attempt, None)
        watch = self._cancelling.pop(attempt, None)
        if watch is not None and watch is not asyncio.current_task():
            end_task(watch)

    def _error(self, told: bytes) -> BaseException:
        response = decode_message(FrameType.ERROR_RESPONSE, told)
        assert isinstance(response, ErrorResponse), "the schema of ERROR_RESPONSE"
        error = rebuild_error(response, self._codec)
        if isinstance(error, RemoteError) and error.type_name == "SystemExit":
            # A function that calls sys.exit() ends the program, as it does in one process.
            args = (
                [] if response.arguments is None else self._codec.decode_batch(response.arguments)
            )
            exit_request = SystemExit(*args)
            exit_request.__cause__ = error
            for note in response.notes:
                exit_request.add_note(note)
            return exit_request
        return error

    def _on_tapped(
        self, worker: WorkerProcess, tap_id: int, content: bytes, missed: int, refused: str
    ) -> None:
        one = self._taps.get(tap_id)
        if one is None:
            return
        if content:
            one.tap(decode_batch(content, self._codec, "a subscription"))
        if one.on_missed is not None and (missed or refused):
            one.on_missed(missed, TypeNotSupported(refused) if refused else None)

    def _on_report(self, worker: WorkerProcess, metrics: dict[str, float]) -> None:
        worker.metrics = metrics

    def _on_lost(self, worker: WorkerProcess) -> None:
        """Fails the tasks of a lost worker.

        If the job goes on, the replacement starts while the restart is still delayed.
        """
        for attempt in [a for a, place in self._deployed.items() if place == worker.id]:
            self._ended(attempt)
            self.job_master.update_task_state(attempt, ExecutionState.FAILED, worker.loss)
        if self.job_master.status is JobStatus.RESTARTING and (
            self._filling is None or self._filling.done()
        ):
            self._filling = self._group.create_task(self._refill(), name="replace workers")


def _key(attempt: ExecutionAttemptId) -> tuple[str, int, int, int]:
    return attempt.job_id, attempt.vertex_id, attempt.subtask_index, attempt.attempt
