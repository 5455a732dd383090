"""The options of a run for its tasks, and the resources of one job on one worker.

Resources are opened on first use, and closed after the last task, in reverse order. Each resource
lives inside one asyncio task of its own from enter to exit. The reason is that libraries tie cancel
scopes and context variables to the task that entered. Tasks that request a resource while it is
being opened wait for it. If opening fails, all of them get the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.checkpoint.local_files import LOCAL_FILE_BYTES_MAX
from aioflow.checkpoint.state_files import LOCAL_BYTES_MAX, LocalState
from aioflow.core.aio import end_task, wait_all
from aioflow.core.contexts import asynccontextmanager, contextmanager
from aioflow.core.elements import BATCH_RECORDS_MAX
from aioflow.core.errors import GraphError, note_once
from aioflow.core.signatures import Resource, injected_parameters
from aioflow.core.user_code import check_own_task, close_user_code, user_error
from aioflow.core.wire.serializers import Codec
from aioflow.mailbox.timers import ProcessingClock
from aioflow.network.local_pool import NETWORK_MEMORY_BYTES
from aioflow.task.chain import SLICE_NS
from aioflow.task.closing import attach_errors
from aioflow.task.output import FLUSH_MAX_AGE_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aioflow.checkpoint.completed import CheckpointStats, SubtaskState
    from aioflow.core.errors import CancellationTimeout
    from aioflow.core.host import Host
    from aioflow.core.metrics import MetricGroup
    from aioflow.graph.deployment import ExecutionAttemptId, InputChannelDescriptor, PartitionId
    from aioflow.inspection.loop_watch import LoopWatch
    from aioflow.network.gate import InputChannel
    from aioflow.network.local_pool import LocalBufferPool, NetworkBufferPool
    from aioflow.network.partition import ResultPartition
    from aioflow.state.backend import StateBackend
    from aioflow.task.checkpoint import StateStore
    from aioflow.task.context import Resources

__all__ = [
    "CheckpointResponder",
    "CheckpointTaskOptions",
    "PartitionRegistry",
    "ResourceScope",
    "TaskEnvironment",
    "TaskOptions",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTaskOptions:
    """Settings of a task that takes part in checkpoints."""

    store: str
    """URL of the flow's root directory in the store. Each process opens the store itself.

    `memory://` keeps all content in the acknowledgements.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """Options of a run for its tasks. The defaults were chosen by measurement."""

    batch_records_max: int = BATCH_RECORDS_MAX
    slice_ns: int = SLICE_NS
    flush_max_age_ns: int = FLUSH_MAX_AGE_NS
    state_backend: str | StateBackend = "heap"
    configuration: Mapping[str, str] = field(default_factory=dict)
    """Configuration of the cluster, for settings that the program does not make."""
    checkpoints: CheckpointTaskOptions | None = None
    """Settings of checkpoints; None without checkpoints. With checkpoints, the data that sinks
    prepare becomes visible when a checkpoint completes.
    """
    replays: bool = False
    """Whether the job may restart its sources at their positions.

    A source then keeps data that it cannot read twice.
    """
    debug: bool = False
    """Whether to detect functions that change shared values."""
    strict: bool = False
    """Whether it is an error if the first value of an edge cannot be encoded for another process.

    If False, only a warning is logged.
    """
    cancellation_timeout_s: float = 30.0
    """Time that functions have to end once their task is cancelled."""
    latency_interval_ms: int | None = None
    """Time between two latency markers of a source. If None, no markers are sent."""
    local_state_bytes: int = LOCAL_BYTES_MAX
    """Maximum bytes of checkpointed state that a process keeps in memory for local restores. 0:
    everything is restored from the store.
    """
    local_recovery: str | None = None
    """Directory for copies of checkpointed state. "" means the directory of temporary files, None
    means memory.
    """
    local_recovery_bytes: int = LOCAL_FILE_BYTES_MAX
    """Maximum bytes of copies that a process keeps in `local_recovery`."""
    network_bytes: int = NETWORK_MEMORY_BYTES
    """Maximum bytes of in-flight data of all tasks of a process together."""

    @property
    def checkpointing(self) -> bool:
        """Whether checkpoints are taken."""
        return self.checkpoints is not None


class CheckpointResponder(Protocol):
    """The receiver of the reports of this worker's tasks: the JobMaster, or its gateway in the
    worker.

    Calls never block.
    """

    def acknowledge_checkpoint(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        state: SubtaskState,
        stats: CheckpointStats,
    ) -> None:
        """Reports that all state of the subtask is written."""

    def decline_checkpoint(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        reason: str,
        error: BaseException | None,
    ) -> None:
        """Reports that the subtask takes no part in the checkpoint.

        `reason` is one of Flink's names, such as TASK_NOT_READY.
        """

    def end_of_data_reached(self, attempt: ExecutionAttemptId) -> None:
        """Reports that the subtask has processed all its records.

        The subtask ends once a checkpoint that starts after this has completed.
        """

    def report_progress(self, attempt: ExecutionAttemptId, watermark: int) -> None:
        """Reports the event time of a source. For an operator, MAX_WATERMARK reports that the
        operator has read the input that it must read first.
        """


class PartitionRegistry(Protocol):
    """Registers this worker's partitions, and opens channels to the partitions of all workers."""

    def register(self, partition_id: PartitionId, partition: ResultPartition) -> None: ...
    def open_gate(
        self, descriptors: Sequence[InputChannelDescriptor]
    ) -> tuple[list[InputChannel], LocalBufferPool | None]:
        """Opens the channels of a gate, local or remote.

        Returns the channels, and the buffer pool of the remote channels, which the gate has to
        destroy.
        """


@dataclass(slots=True, kw_only=True)
class TaskEnvironment:
    """Resources that a worker gives to each of its tasks."""

    host: Host
    partitions: PartitionRegistry
    pool: NetworkBufferPool
    resources: Resources
    metrics: MetricGroup
    options: TaskOptions
    codec: Codec = field(default_factory=Codec)
    """Encoder of users' state, with the types of the job."""
    store: StateStore | None = None
    """Store of the job's flow; None if checkpoints are neither taken nor restored."""
    local_state: LocalState = field(default_factory=LocalState)
    """Local copies of the state that this worker's tasks wrote."""
    responder: CheckpointResponder | None = None
    on_stuck: Callable[[ExecutionAttemptId, CancellationTimeout], None] | None = None
    """Ends the process because one of its tasks does not end.

    None if the process is the user's program: then the task is abandoned.
    """
    watch: LoopWatch | None = None
    """Reports code that blocks the event loop while tasks run; None in a simulation."""
    advised: set[str] = field(default_factory=set)
    """Advice about running tasks that was already logged."""
    checked_edges: set[int] = field(default_factory=set)
    """Ids of the edges whose first value was checked."""
    processing_ms: Callable[[], int] = field(init=False)
    """The clock of processing-time windows, timers and times to live."""

    def __post_init__(self) -> None:
        self.processing_ms = ProcessingClock(self.host.clock).read


class _Opened:
    """An opened resource: the task that owns it, its value, and the request to close it."""

    __slots__ = ("close", "error", "owner", "ready")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ready: asyncio.Future[Any] = loop.create_future()
        self.close: asyncio.Future[None] = loop.create_future()
        self.owner: asyncio.Task[None] | None = None
        self.error: BaseException | None = None
        """The error that closing the resource raised."""


class ResourceScope:
    """All resources of one job in this process. Call `get` from any task, and `close` after the
    last task.
    """

    def __init__(self) -> None:
        self._opened: dict[Resource, _Opened] = {}

    async def get(self, resource: Resource) -> Any:
        """Returns the value of `resource`; opens it, and the resources that it uses, on first use.

        If opening fails, the next call tries again.
        """
        entry = self._opened.get(resource)
        if entry is None:
            loop = asyncio.get_running_loop()
            entry = self._opened[resource] = _Opened(loop)
            entry.owner = loop.create_task(
                self._live(resource, entry), name=f"resource {resource.name}"
            )
        # Shielded: a cancelled caller must not cancel the opening for the others.
        return await asyncio.shield(entry.ready)

    async def close(self) -> None:
        """Closes all resources in reverse order of opening.

        Raises the first error, with the others attached.
        """
        first: BaseException | None = None
        for entry in reversed(list(self._opened.values())):
            assert entry.owner is not None, "get() starts it"
            if not entry.close.done():
                entry.close.set_result(None)
            if not entry.ready.done():
                end_task(entry.owner)  # Still opening, and no caller waits for it.
            try:
                await wait_all([entry.owner])
            except asyncio.CancelledError:  # Closing has timed out.
                for other in self._opened.values():
                    if other.owner is not None and not other.owner.done():
                        close_user_code(other.owner)
                raise
            if entry.error is not None and first is not None:
                attach_errors(first, [entry.error])
            first = first or entry.error
        self._opened.clear()
        if first is not None:
            raise first

    async def _live(self, resource: Resource, entry: _Opened) -> None:
        """Runs the whole life of one resource in one task: opens the resources that it uses, enters
        it, sets its value, waits for the close, and exits it.
        """
        try:
            arguments = {
                name: await self.get(other)
                for name, other in injected_parameters(resource.factory).items()
            }
            # The resources that it uses were opened before it, so they are closed after it.
            self._opened[resource] = self._opened.pop(resource)
            async with contextlib.AsyncExitStack() as stack:
                value = await _enter(resource, arguments, stack)
                if not entry.ready.done():
                    entry.ready.set_result(value)
                await entry.close
            check_own_task()
        # Raised where the resource is requested or closed.
        except BaseException as raised:  # noqa: BLE001
            try:
                error = user_error(raised)
            except asyncio.CancelledError:
                entry.ready.cancel()
                raise
            if entry.ready.done():
                if not isinstance(error, Exception):
                    # An error while closing must not end the program.
                    told = RuntimeError(f"user code raised {type(error).__name__}")
                    told.__cause__, error = error, told
                note_once(error, f"while closing resource {resource.name!r}")
                entry.error = error
                return
            self._opened.pop(resource, None)
            if isinstance(error, GeneratorExit):
                # A GeneratorExit would close the coroutine that awaits the resource.
                told = RuntimeError(f"user code raised {type(error).__name__}")
                told.__cause__, error = error, told
            note_once(error, f"while opening resource {resource.name!r}")
            entry.ready.set_exception(error)
            # Retrieved here, so that a failed opening without a waiter is not reported twice.
            entry.ready.exception()


async def _enter(
    resource: Resource, arguments: dict[str, Any], stack: contextlib.AsyncExitStack
) -> Any:
    made = resource.factory(**arguments)
    if inspect.isawaitable(made):
        made = await made
    if isinstance(made, AsyncIterator):
        return await stack.enter_async_context(asynccontextmanager(lambda: made)())
    if isinstance(made, Iterator):
        return stack.enter_context(contextmanager(lambda: made)())
    if hasattr(made, "__aenter__"):
        return await stack.enter_async_context(made)
    if hasattr(made, "__enter__"):
        return stack.enter_context(made)
    raise GraphError(
        f"resource {resource.name!r} gave {type(made).__name__}: expected a generator that yields "
        "once, or a context manager"
    )
