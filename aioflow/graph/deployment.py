"""Deployment descriptors of one subtask: plain data that the JobMaster makes, and from which a
TaskExecutor runs the subtask.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from aioflow.core.scope import ExecutionAttemptId

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
    """The state of one attempt of a subtask, with Flink's names.

    The states for which `is_terminal` is True are final. An attempt reports one of them exactly
    once.
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


class PartitionId(msgspec.Struct, frozen=True):
    """The id of a result partition: the output of one attempt for one edge. Its text form is sent
    over the network.
    """

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
    """One channel of a gate: says which subpartition of which producer the channel reads."""

    partition: PartitionId
    subpartition_index: int
    location: str = ""
    """Data address of the producer's worker, `HOST:PORT`; empty if the producer runs in the same
    process.
    """


@dataclass(frozen=True, slots=True)
class InputGateDescriptor:
    """One input gate of a subtask: all channels of one edge.

    `keyed` tells whether the batches carry keys, `may_be_overtaken` whether barriers may overtake
    the data.
    """

    edge_id: int
    input_index: int
    keyed: bool
    channels: tuple[InputChannelDescriptor, ...]
    may_be_overtaken: bool = False
    producer: str = ""
    """Name of the vertex whose output the gate reads."""


class ResultPartitionDescriptor(msgspec.Struct, frozen=True):
    """The output of a subtask for one edge: one subpartition for each consumer subtask that gets
    records of it.
    """

    partition: PartitionId
    partitioning: Partitioning
    operator_index: int
    side: OutputTag[Any] | None
    consumers: range
    """Indices of the consumer subtasks; subpartition i belongs to `consumers[i]`."""
    announces: bool = False
    """Whether checkpoints are announced to the consumers before the barriers are sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDeploymentDescriptor:
    """All that is needed to run one attempt of one subtask."""

    job_name: str
    attempt: ExecutionAttemptId
    vertex: JobVertex
    inputs: tuple[InputGateDescriptor, ...]
    outputs: tuple[ResultPartitionDescriptor, ...]
    splits: tuple[Split, ...] = field(default=())
    """Splits that the subtask reads; empty if its vertex has no source."""
    restore: TaskRestore | None = None
    """The state from which the subtask starts; None means that all state starts empty."""

    @property
    def task_name(self) -> str:
        """The name of the subtask in logs and notes on errors."""
        return self.vertex.task_name(self.attempt.subtask_index)
