"""A worker process: connects to its job master, loads one job, and runs its tasks.

It ends with the connection.

    python -m aioflow.cluster.worker_program HOST:PORT WORKER_ID

The secret comes through an inherited descriptor, never through arguments. When the job master is
lost, every task and the process end: the tasks must not go on beside their replacements. A terminal
or a service manager sends signals to the whole process group. The worker ignores them; the program
handles them and ends its workers.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import threading
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from aioflow.checkpoint.completed import CheckpointStats, SubtaskState
from aioflow.checkpoint.instructions import CheckpointFailureReason
from aioflow.checkpoint.metadata import encode_subtask
from aioflow.cluster.collector import Collector, collector_of_process
from aioflow.cluster.heartbeat import HeartbeatMonitor, HeartbeatOptions, SendHeartbeat, TimedOut
from aioflow.cluster.pulse import Pulse
from aioflow.cluster.rpc import RpcConnection, connect_rpc
from aioflow.cluster.shipping import ShippedJob, load_job
from aioflow.cluster.split_discovery import unpack_splits
from aioflow.cluster.task_executor import TaskExecutor
from aioflow.core.aio import cancel_and_wait
from aioflow.core.elements import CheckpointBarrier, RecordBatch
from aioflow.core.errors import (
    AioflowError,
    Broken,
    CancellationTimeout,
    Closed,
    NotAuthenticated,
    TypeNotSupported,
)
from aioflow.core.host import Host
from aioflow.core.ids import TapPlace
from aioflow.core.metrics import MetricGroup
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.batch import encode_batch
from aioflow.core.wire.serializers import Codec
from aioflow.graph.deployment import ExecutionAttemptId, ExecutionState
from aioflow.inspection.process import ProcessInspector
from aioflow.network.data_plane import DataPlane
from aioflow.protocol.errors import describe_error
from aioflow.protocol.handshake import PeerRole
from aioflow.protocol.messages import message_body

__all__ = ["Worker", "main"]

logger = logging.getLogger(__name__)

REPORT_S = 0.5
"""Maximum interval between reports of a worker's metrics.

Its heartbeat comes from a thread: see `pulse`.
"""

MASTER = "job master"

COLLECTED_AFTER = (10_000, 10, 2)
"""Thresholds of the garbage collector.

A batch makes thousands of tuples that live until the next one, and a window as many accumulators.
With Python's own (700, 10, 10) a window of rows costs a ninth more. A full collection comes after
300,000 surviving objects, and walks no more than those (`collector`), in 30 to 40 ms. A process
that the engine does not own keeps its thresholds.
"""

PARENT_CHECK_S = 0.5
PARENT_GRACE_S = 2.0
"""How long a worker may take to end after its parent died.

A blocking function would otherwise keep it for ever.
"""

FINISHED, UNREACHABLE, LOST_MASTER = 0, 1, 3
"""Exit codes."""


class Worker:
    """The worker's side of the control connection: handlers for its TaskExecutor."""

    def __init__(
        self, host: Host, secret: bytes, worker_id: str, collector: Collector | None = None
    ) -> None:
        """`collector`: only for a process that runs nothing else."""
        self._host = host
        self._collector = collector
        self._secret = secret
        self._worker_id = worker_id
        self._connection: RpcConnection | None = None
        self._job: ShippedJob | None = None
        self._codec = Codec()
        self._executor: TaskExecutor | None = None
        self._data_plane: DataPlane | None = None
        self._taps: dict[int, tuple[TapPlace, Callable[[RecordBatch], None]]] = {}
        self._missed: dict[int, int] = {}
        self._metrics = MetricGroup(host.clock.monotonic)
        self.inspector = ProcessInspector(host)
        """Inspector of this process, for monitoring."""
        self._metrics.gauges(
            list(self.inspector.metrics()), lambda: list(self.inspector.metrics().values())
        )
        self._monitor = HeartbeatMonitor()
        self._reporting: asyncio.Task[None] | None = None
        self._collecting: asyncio.Task[None] | None = None
        self._address = ("", 0)
        self._pulse: Pulse | None = None
        self.closed: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self, address: tuple[str, int]) -> int:
        """Runs until the job master disconnects or times out. Returns the exit code."""
        handlers: dict[str, Callable[..., Any]] = {
            "open_job": self.open_job,
            "close_job": self.close_job,
            "submit_task": self.submit_task,
            "cancel_task": self.cancel_task,
            "stop_sources": self.stop_sources,
            "trigger_checkpoint": self.trigger_checkpoint,
            "notify_checkpoint_complete": self.notify_checkpoint_complete,
            "notify_checkpoint_aborted": self.notify_checkpoint_aborted,
            "add_tap": self.add_tap,
            "remove_tap": self.remove_tap,
            "query_state": self.query_state,
            "add_splits": self.add_splits,
            "inspect": self.inspector.ask,
            "ping": self.ping,
        }
        self.inspector.start()
        self._connection = await connect_rpc(
            self._host,
            self._secret,
            Codec(),
            PeerRole.TASKMANAGER,
            address,
            handlers,
            self._on_closed,
        )
        self._address = address
        self._connection.notify("hello", self._worker_id)
        try:
            return await self.closed
        finally:
            await cancel_and_wait(
                [task for task in (self._reporting, self._collecting) if task is not None]
            )
            if self._pulse is not None:
                await self._pulse.__aexit__(None, None, None)
            if self._executor is not None:
                self._executor.cancel_all()
                await self.close_job()
            if self._data_plane is not None:
                await self._data_plane.close()
            await self._connection.close()
            await self.inspector.close()

    # Handlers.

    async def open_job(
        self, content: bytes, fencing_token: str, interval_s: float, timeout_s: float
    ) -> str:
        """Loads the job and listens for other workers. Returns this worker's data address."""
        job = self._job = load_job(content)
        self._codec = Codec(job.types)
        executor = TaskExecutor(
            self._host, self, fencing_token, self._metrics, job.options, self._codec, self._on_stuck
        )
        self._data_plane = DataPlane(self._host, self._secret, self._codec, executor.partitions)
        location = f"127.0.0.1:{await self._data_plane.listen()}"
        executor.join(self._data_plane, location)
        self._executor = await executor.__aenter__()
        # Loaded code stays for ever, so the collector need not walk it again.
        gc.collect()
        gc.freeze()
        self._monitor = HeartbeatMonitor(
            HeartbeatOptions(interval_s=min(REPORT_S, interval_s), timeout_s=timeout_s)
        )
        self._monitor.monitor(MASTER, self._host.clock.monotonic())
        self._reporting = asyncio.get_running_loop().create_task(self._report(), name="report")
        if self._collector is not None:
            self._collecting = asyncio.get_running_loop().create_task(
                self._collector.collect(), name="collect garbage"
            )
        who = (self._worker_id,)
        pulse = Pulse(
            self._host,
            self._secret,
            PeerRole.TASKMANAGER,
            self._address,
            min(REPORT_S, interval_s),
            who,
        )
        self._pulse = await pulse.__aenter__()
        return location

    async def close_job(self) -> None:
        """Waits for the tasks, which have ended or were cancelled, and closes their shared
        resources.

        Raises errors from closing.
        """
        executor, self._executor = self._executor, None
        if executor is not None:
            await executor.__aexit__(None, None, None)

    def submit_task(self, content: bytes, fencing_token: str) -> None:
        executor, job = self._open_job()
        executor.submit_task(job.load_task(content), fencing_token)

    def cancel_task(self, attempt: tuple[str, int, int, int]) -> None:
        if self._executor is not None:
            self._executor.cancel_task(ExecutionAttemptId(*attempt))

    def stop_sources(self, job_id: str, drain: bool) -> None:
        if self._executor is not None:
            self._executor.stop_sources(job_id, drain=drain)

    def trigger_checkpoint(
        self, attempt: tuple[str, int, int, int], barrier: CheckpointBarrier
    ) -> None:
        if self._executor is not None:
            self._executor.trigger_checkpoint(ExecutionAttemptId(*attempt), barrier)

    def notify_checkpoint_complete(self, job_id: str, checkpoint_id: int) -> None:
        if self._executor is not None:
            self._executor.notify_checkpoint_complete(job_id, checkpoint_id)

    def notify_checkpoint_aborted(
        self, job_id: str, checkpoint_id: int, latest_completed: int | None
    ) -> None:
        if self._executor is not None:
            self._executor.notify_checkpoint_aborted(job_id, checkpoint_id, latest_completed)

    def add_tap(self, job_id: str, place: TapPlace, tap_id: int, may_miss: bool) -> None:
        """Sends every batch that `place` emits here as `tapped` from now on.

        `may_miss`: batches are only counted while the connection falls behind.
        """
        if self._executor is None:
            return

        def tap(batch: RecordBatch) -> None:
            self._send_tapped(tap_id, batch, may_miss)

        self._taps[tap_id] = place, tap
        self._executor.add_tap(job_id, place, tap)

    def remove_tap(self, job_id: str, place: TapPlace, tap_id: int) -> None:
        entry = self._taps.pop(tap_id, None)
        self._missed.pop(tap_id, None)
        if entry is not None and self._executor is not None:
            self._executor.remove_tap(job_id, place, entry[1])

    async def query_state(
        self, attempt: tuple[str, int, int, int], node_id: int, query: bytes
    ) -> bytes:
        """Runs the pickled `query` on the state of a node. The job's codec encodes the result."""
        executor, _ = self._open_job()
        result = await executor.query_state(
            ExecutionAttemptId(*attempt), node_id, pickle.loads(query)
        )
        return self._codec.encode(result, owner="queried state")

    async def add_splits(self, attempt: tuple[str, int, int, int], content: bytes) -> None:
        executor, _ = self._open_job()
        await executor.add_splits(ExecutionAttemptId(*attempt), unpack_splits(content, self._codec))

    def ping(self) -> None:
        self._monitor.received(MASTER, self._host.clock.monotonic())

    # JobMasterGateway, called by the TaskExecutor.

    def update_task_state(
        self, attempt: ExecutionAttemptId, state: ExecutionState, error: BaseException | None
    ) -> None:
        if self._connection is None:
            return
        if state.is_terminal:
            self._send_report()  # So that the final metrics of a job are complete.
            if self._collector is not None:
                self._collector.look_everywhere()
        self._connection.notify(
            "update_task_state", _key(attempt), state.value, self._packed(error)
        )

    def acknowledge_checkpoint(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        state: SubtaskState,
        stats: CheckpointStats,
    ) -> None:
        if self._connection is None:
            return
        try:
            self._connection.notify(
                "acknowledge_checkpoint",
                _key(attempt),
                checkpoint_id,
                encode_subtask(state),
                astuple(stats),
            )
        except AioflowError as error:
            # Too large for one message: in-memory state is sent inside it.
            self.decline_checkpoint(
                attempt, checkpoint_id, CheckpointFailureReason.IO_EXCEPTION.name, error
            )

    def decline_checkpoint(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        reason: str,
        error: BaseException | None,
    ) -> None:
        if self._connection is not None:
            self._connection.notify(
                "decline_checkpoint", _key(attempt), checkpoint_id, reason, self._packed(error)
            )

    def end_of_data_reached(self, attempt: ExecutionAttemptId) -> None:
        if self._connection is not None:
            self._connection.notify("end_of_data_reached", _key(attempt))

    def _on_stuck(self, attempt: ExecutionAttemptId, error: CancellationTimeout) -> None:
        """Reports a stuck task; the program then ends this process."""
        if self._connection is not None:
            self._connection.notify("task_stuck", _key(attempt), str(error))

    def _packed(self, error: BaseException | None) -> bytes:
        return b"" if error is None else message_body(describe_error(error, self._codec))

    # Life cycle.

    def _open_job(self) -> tuple[TaskExecutor, ShippedJob]:
        if self._executor is None or self._job is None:
            raise Closed(
                f"{self._worker_id} has no job open; it was closed, or open_job never came"
            )
        return self._executor, self._job

    def _send_tapped(self, tap_id: int, batch: RecordBatch, may_miss: bool) -> None:
        """Sends a batch to its subscription; never blocks or fails the task."""
        connection = self._connection
        if connection is None or not batch.values:
            return
        if may_miss and not connection.is_writable:
            self._missed[tap_id] = self._missed.get(tap_id, 0) + len(batch.values)
            return
        try:
            content, error = encode_batch(batch, self._codec, "a subscription"), ""
        except TypeNotSupported as refused:
            content, error = b"", str(refused)
        connection.notify("tapped", tap_id, content, self._missed.pop(tap_id, 0), error)

    def _send_report(self) -> None:
        assert self._connection is not None
        self._connection.notify("report", dict(self._metrics.snapshot()))
        for tap_id, missed in self._missed.items():
            self._connection.notify("tapped", tap_id, b"", missed, "")
        self._missed.clear()

    async def _report(self) -> None:
        """Sends reports, and watches the heartbeats of the job master."""
        while not self.closed.done():
            for instruction in self._monitor.tick(self._host.clock.monotonic()):
                match instruction:
                    case SendHeartbeat():
                        self._send_report()
                    case TimedOut(_, reason):
                        logger.error(
                            "%s has lost its job master (%s) and ends",
                            self._worker_id,
                            reason.value,
                        )
                        self.closed.set_result(LOST_MASTER)
                        return
            await asyncio.sleep(self._monitor.options.interval_s)

    def _on_closed(self, connection: RpcConnection) -> None:
        if not self.closed.done():
            self.closed.set_result(FINISHED)


def _key(attempt: ExecutionAttemptId) -> tuple[str, int, int, int]:
    return attempt.job_id, attempt.vertex_id, attempt.subtask_index, attempt.attempt


def main(argv: list[str]) -> int:
    """Runs the process. Arguments: the address of its job master, and its own id."""
    gc.set_threshold(*COLLECTED_AFTER)
    where, worker_id = argv[:2]
    address, _, port = where.rpartition(":")
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        return runner.run(_main((address, int(port)), worker_id))


async def _main(address: tuple[str, int], worker_id: str) -> int:
    host = SystemHost()
    secret = host.procs.take_secret()
    if secret is None:
        raise NotAuthenticated(
            "a worker is started by its cluster, which hands it the secret; there is none"
        )
    over, parent = threading.Event(), os.getppid()
    watching = host.blocking(_end_with_parent, parent, over, dedicated=True, name="aioflow-parent")
    try:
        return await Worker(host, secret, worker_id, collector_of_process(host.clock.perf_ns)).run(
            address
        )
    except (OSError, Broken) as error:
        logger.error("%s cannot reach its job master at %s:%d: %s", worker_id, *address, error)
        return UNREACHABLE
    finally:
        if os.getppid() != parent:
            os._exit(
                LOST_MASTER
            )  # The parent is gone, and cannot end a process that a thread of user code keeps.
        over.set()
        await watching
        await host.close()


def _end_with_parent(parent: int, over: threading.Event) -> None:
    """Ends the process soon after its parent died.

    It runs in a thread, because a function may block the loop.
    """
    while not over.wait(PARENT_CHECK_S):
        if os.getppid() != parent:
            if not over.wait(PARENT_GRACE_S):
                os._exit(LOST_MASTER)
            return


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
