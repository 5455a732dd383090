"""One job in one process of a cluster: its code, its tasks and its data plane, under one JobMaster.

A TaskManager has a session for each job with a slot there. The submitting process has a session for
tasks that cannot leave it. Each session has its own data plane, so the types and partitions of two
jobs never mix. A session never outlives its JobMaster; the next JobMaster opens a new session.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable, Coroutine
from dataclasses import astuple, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from aioflow.checkpoint.instructions import CheckpointFailureReason
from aioflow.checkpoint.metadata import encode_subtask
from aioflow.cluster.split_discovery import SplitDiscovery, unpack_splits
from aioflow.cluster.task_executor import TaskExecutor
from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import AioflowError, Broken, Closed, TypeNotSupported
from aioflow.core.metrics import MetricGroup
from aioflow.core.wire.batch import encode_batch
from aioflow.core.wire.serializers import Codec
from aioflow.graph.deployment import ExecutionAttemptId, ExecutionState
from aioflow.graph.job_graph import with_parallelism
from aioflow.network.channels import ProducerState
from aioflow.network.data_plane import DataPlane
from aioflow.operators.source import discover_splits
from aioflow.protocol.errors import describe_error, rebuild_error
from aioflow.protocol.framing import FrameType
from aioflow.protocol.messages import decode_message, message_body

if TYPE_CHECKING:
    from aioflow.checkpoint.completed import CheckpointStats, SubtaskState
    from aioflow.cluster.shipping import ShippedJob
    from aioflow.core.elements import RecordBatch
    from aioflow.core.errors import CancellationTimeout, RemoteError
    from aioflow.core.host import Host
    from aioflow.core.scope import TapPlace
    from aioflow.graph.job_graph import JobGraph
    from aioflow.network.local_pool import NetworkBufferPool
    from aioflow.operators.source import Split

__all__ = [
    "REQUESTS",
    "AttemptKey",
    "JobSession",
    "attempt_key",
    "exit_request",
    "pack_error",
    "unpack_error",
]

logger = logging.getLogger(__name__)

REQUESTS = (
    "submit_task",
    "cancel_task",
    "stop_sources",
    "limit_source",
    "trigger_checkpoint",
    "notify_checkpoint_complete",
    "notify_checkpoint_aborted",
    "add_tap",
    "remove_tap",
    "describe_checkpoint",
    "query_state",
    "add_splits",
)
"""Names of the requests of a JobMaster. The first argument of each request is a job id or an
`AttemptKey`."""

AttemptKey = tuple[str, int, int, int]
"""The wire form of an attempt: job, vertex, subtask, attempt."""

Tell = Callable[..., None]
"""Function that sends a notification to the JobManager. Its arguments are a method's name and the
arguments of the method."""

Ask = Callable[..., Coroutine[Any, Any, Any]]
"""Function that calls the JobManager. It takes the method's name and arguments, and raises Broken
if no JobManager is connected."""

ASK_S = 5.0
"""Maximum time in s that a consumer waits for an answer about its producer. Then the consumer goes
on without an answer."""


class _HomeSubtask(msgspec.Struct):
    attempt: ExecutionAttemptId
    state: ExecutionState


class _Home:
    """The subtasks that run in this process."""

    def __init__(self, graph: JobGraph) -> None:
        self.graph = graph
        self.executions: dict[tuple[int, int], _HomeSubtask] = {}

    def deployed(self, attempt: ExecutionAttemptId) -> None:
        """Records the newest attempt of a subtask. Its number may be smaller than the last one,
        because a new JobMaster counts from 0."""
        self.executions[attempt.vertex_id, attempt.subtask_index] = _HomeSubtask(
            attempt, ExecutionState.DEPLOYING
        )

    def update(self, attempt: ExecutionAttemptId, state: ExecutionState) -> None:
        """Records a new state; reports of attempts before the newest one are ignored."""
        newest = self.executions.get((attempt.vertex_id, attempt.subtask_index))
        if newest is not None and newest.attempt == attempt:
            newest.state = state


class JobSession:
    """Runs the tasks of one job in this process.

    `tell` sends reports to the JobMaster that has `token`, and `ask` sends questions to it.
    `on_end(attempt)` is called when a task has released all its resources. While not
    `is_writable()`, rows for subscribers that may miss rows are counted and dropped. `requests`
    maps the names in `REQUESTS` to the functions that answer these requests of the JobMaster.
    """

    def __init__(
        self,
        host: Host,
        secret: bytes,
        job_id: str,
        job: ShippedJob,
        token: int,
        tell: Tell,
        ask: Ask,
        is_writable: Callable[[], bool],
        on_end: Callable[[ExecutionAttemptId], None],
        end_process: Callable[[str], None] | None = None,
        report: Callable[[], None] = lambda: None,
        pool: NetworkBufferPool | None = None,
    ) -> None:
        """`end_process(why)` is called for a cancelled task that does not end.

        If `end_process` is None, the engine does not own the process, so the task is given up.
        `report()` sends the metrics; it is called before the end of a task is reported. `pool` is
        the network memory; None: the session makes a pool of its own.
        """
        self._host = host
        self._job_id = job_id
        self._job = job
        self._codec = Codec(job.types)
        self._tell = tell
        self._ask = ask
        self._asking: dict[asyncio.Task[None], None] = {}
        """Tasks that ask about producers and have no answer yet."""
        self._is_writable = is_writable
        self._on_end = on_end
        self._taps: dict[int, Callable[[RecordBatch], None]] = {}
        self._missed: dict[int, int] = {}
        self._home = _Home(job.graph)
        self._splits: dict[int, list[Split]] = {}
        """Splits of sources that cannot leave this process, by vertex id. The JobMaster does not
        have these splits."""
        self._discovery: SplitDiscovery | None = None
        self._looking: list[asyncio.Task[None]] = []
        self._attempts: set[ExecutionAttemptId] = set()
        self._closing = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self._executor_token = str(token)
        self.token = token
        """Fencing token of the JobMaster. In the submitting process, the token is set with the
        first task."""
        self.metrics = MetricGroup(host.clock.monotonic)
        self._end_process = end_process
        self.report = report
        on_stuck = None if end_process is None else self._on_stuck
        self.executor = TaskExecutor(
            host, self, self._executor_token, self.metrics, job.options, self._codec, on_stuck, pool
        )
        self._data_plane = DataPlane(host, secret, self._codec, self.executor.partitions)
        self.location = ""
        """Address at which other processes read the partitions produced here; empty before
        `open`."""
        executor = self.executor
        self.requests: dict[str, Callable[..., Any]] = {
            "submit_task": self._on_submit_task,
            "cancel_task": self._on_cancel_task,
            "stop_sources": lambda job_id, drain: executor.stop_sources(job_id, drain=drain),
            "limit_source": lambda key, watermark: executor.limit_source(
                ExecutionAttemptId(*key), watermark
            ),
            "trigger_checkpoint": lambda key, barrier: executor.trigger_checkpoint(
                ExecutionAttemptId(*key), barrier
            ),
            "notify_checkpoint_complete": executor.notify_checkpoint_complete,
            "notify_checkpoint_aborted": executor.notify_checkpoint_aborted,
            "describe_checkpoint": lambda key, checkpoint_id: executor.describe_checkpoint(
                ExecutionAttemptId(*key), checkpoint_id
            ),
            "add_tap": self._on_add_tap,
            "remove_tap": self._on_remove_tap,
            "query_state": self._on_query_state,
            "add_splits": self._on_add_splits,
        }

    @property
    def has_run(self) -> bool:
        """Whether tasks of the job run here, or have run here."""
        return bool(self.executor.tasks)

    async def open(self, bind: str) -> None:
        """Listens for other processes at address `bind`; after that the session takes tasks."""
        self.location = f"{bind}:{await self._data_plane.listen(bind)}"
        self.executor.join(self._data_plane, self.location)
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._life = asyncio.get_running_loop().create_task(
            self._live(opened), name=f"session of job {self._job_id[:8]}"
        )
        await opened

    async def discover_at_home(self) -> None:
        """Finds the splits of the sources that stay in this process. Keeps looking for more splits
        if the sources have `discover_every`.
        """
        discovery = self._discovery = SplitDiscovery(self._host, self._home, self._splits)
        for vertex in self._job.graph.vertices:
            if vertex.head.source is not None and vertex.stays_here:
                self._splits[vertex.id] = await discover_splits(vertex.head.source, self._host)
                if vertex.id in discovery.vertices:
                    looking = discovery.watch(vertex, self.executor)
                    self._looking.append(
                        asyncio.get_running_loop().create_task(
                            looking, name=f"discover {vertex.name}"
                        )
                    )

    async def _live(self, opened: asyncio.Future[None]) -> None:
        try:
            async with self.executor:
                if opened.cancelled():
                    return  # `open` was cancelled, so there will be no tasks.
                opened.set_result(None)
                await self._closing.wait()
                self.executor.cancel_all()
        finally:
            await self._data_plane.close()

    async def close(self) -> None:
        """Cancels the running tasks and waits until they have ended and their resources are
        closed.
        """
        self._closing.set()
        looking, self._looking = self._looking, []
        await cancel_and_wait([*looking, *self._asking])
        if self._life is not None:
            await asyncio.shield(self._life)

    # Requests of the JobMaster.

    def _on_submit_task(
        self, job_id: str, token: int, key: AttemptKey, allocation_id: str, content: bytes
    ) -> None:
        self.token = token
        descriptor = self._job.load_task(content)
        splits = self._splits.get(descriptor.vertex.id)
        # Restored splits continue at their positions, even if this subtask has none.
        if splits is not None and (
            descriptor.restore is None
            or descriptor.vertex.uids[0] not in descriptor.restore.operators
        ):
            descriptor = replace(
                descriptor,
                splits=tuple(
                    splits[descriptor.attempt.subtask_index :: descriptor.vertex.parallelism]
                ),
            )
        if self._discovery is not None:
            vertex = descriptor.vertex
            self._home.graph = with_parallelism(self._home.graph, {vertex.id: vertex.parallelism})
            self._home.deployed(descriptor.attempt)
            self._discovery.deployed(descriptor)
        if self._closing.is_set():
            raise Closed(
                f"task {descriptor.task_name} came when its job was about to leave this process"
            )
        self._attempts.add(descriptor.attempt)
        try:
            self.executor.submit_task(descriptor, self._executor_token)
        except BaseException:
            self._attempts.discard(descriptor.attempt)
            raise

    def cancel_task(self, attempt: ExecutionAttemptId) -> None:
        """Cancels a task.

        A task that is not here has ended or never started, so CANCELED is reported for it.
        """
        if attempt in self._attempts:
            self.executor.cancel_task(attempt)
        else:
            self._tell(
                "update_task_state",
                self._job_id,
                self.token,
                attempt_key(attempt),
                ExecutionState.CANCELED.value,
                b"",
            )

    def _on_cancel_task(self, key: AttemptKey) -> None:
        self.cancel_task(ExecutionAttemptId(*key))

    def _on_add_tap(self, job_id: str, place: TapPlace, tap_id: int, may_miss: bool) -> None:
        """From now on, sends each batch that `place` emits in this process to the JobMaster, as
        report `tapped`."""
        if tap_id not in self._taps:
            tap = self._taps[tap_id] = partial(self._send_tapped, tap_id, may_miss)
            self.executor.add_tap(job_id, place, tap)

    def _on_remove_tap(self, job_id: str, place: TapPlace, tap_id: int) -> None:
        tap = self._taps.pop(tap_id, None)
        self._missed.pop(tap_id, None)
        if tap is not None:
            self.executor.remove_tap(job_id, place, tap)

    def _send_tapped(self, tap_id: int, may_miss: bool, batch: RecordBatch) -> None:
        rows = len(batch.values)
        if not rows:
            return
        if may_miss and not self._is_writable():
            self._missed[tap_id] = self._missed.get(tap_id, 0) + rows
            return
        try:
            content, refused = encode_batch(batch, self._codec, "a subscription"), ""
        except TypeNotSupported as error:
            content, refused = b"", str(error)
        self._tell(
            "tapped", self._job_id, tap_id, content, rows, self._missed.pop(tap_id, 0), refused
        )

    def tell_missed(self) -> None:
        """Reports the number of rows that were dropped since the last report."""
        for tap_id, missed in self._missed.items():
            self._tell("tapped", self._job_id, tap_id, b"", 0, missed, "")
        self._missed.clear()

    async def _on_query_state(self, key: AttemptKey, node_id: int, query: bytes) -> bytes:
        """Runs the pickled `query` on the state of a node. The job's codec encodes the result."""
        result = await self.executor.query_state(
            ExecutionAttemptId(*key), node_id, pickle.loads(query)
        )
        return bytes(self._codec.encode(result, owner="queried state"))

    async def _on_add_splits(self, key: AttemptKey, content: bytes) -> None:
        """Gives more splits to a source in this process. `content` is the output of
        `pack_splits`."""
        await self.executor.add_splits(
            ExecutionAttemptId(*key), unpack_splits(content, self._codec)
        )

    # JobMasterGateway, called by the TaskExecutor of this session.

    def update_task_state(
        self, attempt: ExecutionAttemptId, state: ExecutionState, error: BaseException | None
    ) -> None:
        if state.is_terminal:
            self.report()  # So that the final metrics of a job are complete.
        self._tell(
            "update_task_state",
            self._job_id,
            self.token,
            attempt_key(attempt),
            state.value,
            pack_error(error, self._codec),
        )
        self._home.update(attempt, state)
        if state.is_terminal:
            self._attempts.discard(attempt)
            self._on_end(attempt)

    def _on_stuck(self, attempt: ExecutionAttemptId, error: CancellationTimeout) -> None:
        """Ends this process, and reports the task as lost.

        The order matters, because a JobMaster may end once it knows that its last task has ended.
        """
        assert self._end_process is not None
        self._end_process(str(error))
        self.update_task_state(attempt, ExecutionState.FAILED, Broken(str(error)))

    def acknowledge_checkpoint(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        state: SubtaskState,
        stats: CheckpointStats,
    ) -> None:
        packed = encode_subtask(state), astuple(stats)
        try:
            self._tell(
                "acknowledge_checkpoint",
                self._job_id,
                self.token,
                attempt_key(attempt),
                checkpoint_id,
                *packed,
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
        told = pack_error(error, self._codec)
        self._tell(
            "decline_checkpoint",
            self._job_id,
            self.token,
            attempt_key(attempt),
            checkpoint_id,
            reason,
            told,
        )

    def end_of_data_reached(self, attempt: ExecutionAttemptId) -> None:
        self._tell("end_of_data_reached", self._job_id, self.token, attempt_key(attempt))

    def ask_producer(
        self, attempt: ExecutionAttemptId, answer: Callable[[ProducerState], None]
    ) -> None:
        task = asyncio.get_running_loop().create_task(
            self._ask_producer(attempt, answer), name=f"ask for {attempt}"
        )
        self._asking[task] = None
        task.add_done_callback(self._asking.pop)

    async def _ask_producer(
        self, attempt: ExecutionAttemptId, answer: Callable[[ProducerState], None]
    ) -> None:
        state: str | None = None
        try:
            async with asyncio.timeout(ASK_S):
                state = await self._ask("producer_state", self._job_id, attempt_key(attempt))
        except (AioflowError, TimeoutError) as error:
            logger.debug("the state of producer %s is not known: %r", attempt, error)
        answer(ProducerState.UNKNOWN if state is None else ProducerState(state))

    def report_progress(self, attempt: ExecutionAttemptId, watermark: int) -> None:
        key = attempt_key(attempt)
        self._tell("report_progress", self._job_id, self.token, key, watermark)


def attempt_key(attempt: ExecutionAttemptId) -> AttemptKey:
    return attempt.job_id, attempt.vertex_id, attempt.subtask_index, attempt.attempt


def pack_error(error: BaseException | None, codec: Codec) -> bytes:
    """Encodes an error for a message between processes. Returns empty bytes for None."""
    return b"" if error is None else message_body(describe_error(error, codec))


def unpack_error(content: bytes, codec: Codec) -> Exception | None:
    """Decodes the output of `pack_error`."""
    message: Any = decode_message(FrameType.ERROR_RESPONSE, content) if content else None
    return None if message is None else rebuild_error(message, codec)


def exit_request(error: RemoteError, content: bytes, codec: Codec) -> SystemExit | None:
    """Rebuilds a SystemExit of another process from `content`. Returns None for any other error.

    `error`, which has only the name of the class, becomes the cause of the SystemExit.
    """
    if error.type_name != "SystemExit":
        return None
    message: Any = decode_message(FrameType.ERROR_RESPONSE, content)
    args = [] if message.arguments is None else codec.decode_batch(message.arguments)
    request = SystemExit(*args)
    request.__cause__ = error
    for note in message.notes:
        request.add_note(note)
    return request
