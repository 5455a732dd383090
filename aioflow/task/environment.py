"""Options of a task from its run, and resources from its worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from aioflow.checkpoint.local_files import LOCAL_FILE_BYTES_MAX
from aioflow.checkpoint.state_files import LOCAL_BYTES_MAX, LocalState
from aioflow.core.elements import BATCH_RECORDS_MAX
from aioflow.core.wire.serializers import Codec
from aioflow.mailbox.timers import ProcessingClock
from aioflow.network.local_pool import NETWORK_MEMORY_BYTES
from aioflow.task.chain import SLICE_NS
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
    from aioflow.task.context import Resources
    from aioflow.task.snapshot import StateStore

__all__ = [
    "CheckpointResponder",
    "CheckpointTaskOptions",
    "PartitionRegistry",
    "TaskEnvironment",
    "TaskOptions",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTaskOptions:
    """Settings of a task that takes part in checkpoints."""

    store: str
    """URL of the flow's root in the store; each process opens it for itself.

    `memory://` keeps all content in the acknowledgements.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """Options of a run for its tasks; measurements chose the defaults."""

    batch_records_max: int = BATCH_RECORDS_MAX
    slice_ns: int = SLICE_NS
    flush_max_age_ns: int = FLUSH_MAX_AGE_NS
    state_backend: str | StateBackend = "heap"
    configuration: Mapping[str, str] = field(default_factory=dict)
    """Configuration of the cluster, for what the program leaves open."""
    checkpoints: CheckpointTaskOptions | None = None
    """Settings of checkpoints. If set, prepared data becomes visible with a checkpoint."""
    replays: bool = False
    """Whether the job may restart its sources at their positions.

    A source then keeps data that it cannot read twice.
    """
    debug: bool = False
    """Whether to detect functions that change shared values."""
    strict: bool = False
    """Whether the first value of an edge must be encodable for another process.

    Otherwise only a warning is logged.
    """
    cancellation_timeout_s: float = 30.0
    """How long functions may take to end once their task is cancelled."""
    latency_interval_ms: int | None = None
    """Time between two latency markers of a source. None: no markers."""
    local_state_bytes: int = LOCAL_BYTES_MAX
    """Bytes of checkpointed state that a process keeps in memory for local restores. 0: all from
    the store.
    """
    local_recovery: str | None = None
    """Directory for copies of checkpointed state, instead of memory; "": that of temporary files.
    """
    local_recovery_bytes: int = LOCAL_FILE_BYTES_MAX
    """Bytes of copies that a process keeps in `local_recovery`."""
    network_bytes: int = NETWORK_MEMORY_BYTES
    """Bytes of data in flight that the tasks of a process may hold together."""

    @property
    def checkpointing(self) -> bool:
        """Whether checkpoints are taken."""
        return self.checkpoints is not None


class CheckpointResponder(Protocol):
    """Receives the reports of this worker's tasks: the job master, or its gateway in the worker.

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
        """Reports that every record is processed.

        The subtask ends after the next checkpoint that completes.
        """

    def report_progress(self, attempt: ExecutionAttemptId, watermark: int) -> None:
        """Reports the event time of a source; for an operator MAX: its first input is read."""


class PartitionRegistry(Protocol):
    """Registers the partitions of this worker, and opens channels to those of all workers."""

    def register(self, partition_id: PartitionId, partition: ResultPartition) -> None: ...
    def open_gate(
        self, descriptors: Sequence[InputChannelDescriptor]
    ) -> tuple[list[InputChannel], LocalBufferPool | None]:
        """Opens the channels of a gate, local or remote.

        Returns them with the memory of the remote ones, which the gate destroys.
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
    """Encodes users' state, with the types of the job."""
    store: StateStore | None = None
    """Store of the job's flow, where checkpoints are taken or restored."""
    local_state: LocalState = field(default_factory=LocalState)
    """Local copies of the state that this worker's tasks wrote."""
    responder: CheckpointResponder | None = None
    on_stuck: Callable[[ExecutionAttemptId, CancellationTimeout], None] | None = None
    """Ends the process because of a task that does not end.

    None: the process is the user's program, so the task is given up.
    """
    watch: LoopWatch | None = None
    """The watch of the loop, while tasks run; None in a simulation."""
    advised: set[str] = field(default_factory=set)
    """Advice about running tasks that was logged."""
    checked_edges: set[int] = field(default_factory=set)
    """Edges whose first value was checked."""
    processing_ms: Callable[[], int] = field(init=False)
    """The clock of processing-time windows, timers and times to live."""

    def __post_init__(self) -> None:
        self.processing_ms = ProcessingClock(self.host.clock).read
