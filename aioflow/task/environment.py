"""What a task is told by its run, and what its worker lends to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from aioflow.checkpoint.local_state import LOCAL_BYTES_MAX, LocalState
from aioflow.core.elements import BATCH_RECORDS_MAX
from aioflow.core.processing_clock import ProcessingClock
from aioflow.core.serializers import Codec
from aioflow.task.chain import SLICE_NS
from aioflow.task.output import FLUSH_MAX_AGE_NS

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflow.checkpoint.subtask import CheckpointStats, SubtaskState
    from aioflow.core.errors import CancellationTimeout
    from aioflow.core.host import Host
    from aioflow.core.metrics import MetricGroup
    from aioflow.graph.deployment import ExecutionAttemptId, InputChannelDescriptor, PartitionId
    from aioflow.network.buffers import NetworkBufferPool
    from aioflow.network.gate import InputChannel
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
    """What a task must know to take part in checkpoints."""

    store: str
    """URL of the flow's root in the store; each process opens it for itself.

    `memory://` keeps all content in the acknowledgements.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What a run may set about its tasks; the defaults are what the measurements chose."""

    batch_records_max: int = BATCH_RECORDS_MAX
    slice_ns: int = SLICE_NS
    flush_max_age_ns: int = FLUSH_MAX_AGE_NS
    state_backend: str | StateBackend = "heap"
    checkpoints: CheckpointTaskOptions | None = None
    """Given: checkpoints are taken; then they, and not the writers, make prepared data visible."""
    replays: bool = False
    """Whether the job may start its sources again where they were: then a source keeps what it
    cannot read twice.
    """
    debug: bool = False
    """Look for functions that change values which others see too."""
    strict: bool = False
    """Refuse a first value of an edge that could not travel to another process, instead of a
    warning.
    """
    cancellation_timeout_s: float = 30.0
    """How long functions may take to end once their task is cancelled."""
    local_state_bytes: int = LOCAL_BYTES_MAX
    """So much of what its tasks wrote for checkpoints a process keeps, for those that are
    restored there. 0: all is read from the store.
    """

    @property
    def checkpointing(self) -> bool:
        """Whether checkpoints are taken."""
        return self.checkpoints is not None


class CheckpointResponder(Protocol):
    """Who hears of this worker's checkpoints: the job master, or the way to it.

    Calls never block.
    """

    def acknowledge_checkpoint(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        state: SubtaskState,
        stats: CheckpointStats,
    ) -> None:
        """All state of the subtask is written."""

    def decline_checkpoint(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        reason: str,
        error: BaseException | None,
    ) -> None:
        """The subtask takes no part in it.

        `reason` is one of Flink's names, such as TASK_NOT_READY.
        """

    def end_of_data_reached(self, attempt: ExecutionAttemptId) -> None:
        """Every record is processed; the subtask ends after the next checkpoint that completes."""


class PartitionRegistry(Protocol):
    """Where the partitions of this worker are registered, and those of all workers are read."""

    def register(self, partition_id: PartitionId, partition: ResultPartition) -> None: ...
    def open_channel(self, index: int, descriptor: InputChannelDescriptor) -> InputChannel:
        """Channel `index` of a gate, local or remote, which reads what `descriptor` names."""


@dataclass(slots=True, kw_only=True)
class TaskEnvironment:
    """What a worker lends to each of its tasks."""

    host: Host
    partitions: PartitionRegistry
    pool: NetworkBufferPool
    resources: Resources
    metrics: MetricGroup
    options: TaskOptions
    codec: Codec = field(default_factory=Codec)
    """Encodes the state of users, with the types of the job."""
    store: StateStore | None = None
    """Of the job's flow, where checkpoints are taken or restored."""
    local_state: LocalState = field(default_factory=LocalState)
    """What this worker's tasks wrote there."""
    responder: CheckpointResponder | None = None
    on_stuck: Callable[[ExecutionAttemptId, CancellationTimeout], None] | None = None
    """Ends the process, because of a task that does not end.

    None: this is the program, which gives up such a task.
    """
    checked_edges: set[int] = field(default_factory=set)
    """Edges whose first value was looked at."""
    processing_ms: ProcessingClock = field(init=False)
    """The time of windows, timers and times to live that go by the clock."""

    def __post_init__(self) -> None:
        self.processing_ms = ProcessingClock(self.host.clock)
