"""What a TaskExecutor needs to run one subtask: pure data, made by the JobMaster from the
JobGraph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from aioflow.core.ids import ExecutionAttemptId

if TYPE_CHECKING:
    from aioflow.checkpoint.assignment import TaskRestore
    from aioflow.core.functions import OutputTag
    from aioflow.graph.job_graph import JobVertex
    from aioflow.graph.stream_graph import Partitioning
    from aioflow.operators.source import Split

__all__ = [
    "ExecutionAttemptId",
    "ExecutionState",
    "InputChannelDescriptor",
    "InputGateDescriptor",
    "PartitionId",
    "ResultPartitionDescriptor",
    "TaskDeploymentDescriptor",
]


class ExecutionState(Enum):
    """The life of one attempt, in Flink's spelling.

    Only `is_terminal` states are final; each is reported once.
    """

    CREATED = "CREATED"
    SCHEDULED = "SCHEDULED"
    DEPLOYING = "DEPLOYING"
    INITIALIZING = "INITIALIZING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    CANCELING = "CANCELING"
    CANCELED = "CANCELED"
    FAILED = "FAILED"

    @property
    def is_terminal(self) -> bool:
        return self in (ExecutionState.FINISHED, ExecutionState.CANCELED, ExecutionState.FAILED)


@dataclass(frozen=True, slots=True)
class PartitionId:
    """What one attempt produces for one edge. As text it is its name on the wire."""

    edge_id: int
    producer: ExecutionAttemptId

    def __str__(self) -> str:
        producer = self.producer
        return (
            f"{producer.job_id}-{self.edge_id}-{producer.vertex_id}-"
            f"{producer.subtask_index}#{producer.attempt}"
        )


@dataclass(frozen=True, slots=True)
class InputChannelDescriptor:
    """One channel: a subpartition of a producer's partition."""

    partition: PartitionId
    subpartition_index: int
    location: str = ""
    """Where the producer runs: `HOST:PORT` of its worker's data plane, empty in a cluster of
    one.
    """


@dataclass(frozen=True, slots=True)
class InputGateDescriptor:
    """All channels of one edge into one logical input.

    `keyed`: its batches carry keys. `may_be_overtaken`: by barriers.
    """

    edge_id: int
    input_index: int
    keyed: bool
    channels: tuple[InputChannelDescriptor, ...]
    may_be_overtaken: bool = False


@dataclass(frozen=True, slots=True)
class ResultPartitionDescriptor:
    """What a subtask produces for one edge: a subpartition for each consumer subtask it reaches."""

    partition: PartitionId
    partitioning: Partitioning
    operator_index: int
    side: OutputTag[Any] | None
    consumers: range
    """Indices of the consumer subtasks; subpartition i belongs to `consumers[i]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDeploymentDescriptor:
    """One attempt of one subtask, ready to run."""

    job_name: str
    attempt: ExecutionAttemptId
    vertex: JobVertex
    inputs: tuple[InputGateDescriptor, ...]
    outputs: tuple[ResultPartitionDescriptor, ...]
    splits: tuple[Split, ...] = field(default=())
    """For a source vertex: what this subtask reads."""
    restore: TaskRestore | None = None
    """State to begin with. None: everything begins empty."""

    @property
    def task_name(self) -> str:
        """As logs and notes spell it."""
        return self.vertex.task_name(self.attempt.subtask_index)
