"""The part of one subtask in a checkpoint, as plain data.

The subtask sends it with its acknowledgement, and the metadata of the checkpoint lists it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from aioflow.state.handles import KeyedStateHandle, StateFile

__all__ = [
    "HEAD_BYTES",
    "ChannelSide",
    "ChannelStateHandle",
    "CheckpointStats",
    "OperatorStateHandle",
    "SubtaskState",
]


@dataclass(frozen=True, slots=True)
class OperatorStateHandle:
    """The handles of the state of one operator in one subtask. A field is None if the operator has
    no state of that kind.
    """

    uid: str
    keyed: KeyedStateHandle | None = None
    operator: StateFile | None = None
    """Operator state: split, union and broadcast, encoded."""
    source: StateFile | None = None
    """State of a source: its splits with their positions and their event time, encoded."""


class ChannelSide(StrEnum):
    """The place where data in flight waits; it determines the meaning of a handle's `index`."""

    INPUT = "input"
    """Data at the consumer, in input channel `index`."""
    OUTPUT = "output"
    """Data at the producer, in subpartition `index`."""
    CHAIN = "chain"
    """Data in the task, in front of operator `index`, which counts from 1. Index 0 is data that a
    source has read and not emitted."""
    RESTORED = "restored"
    """Data that the task has restored itself and not processed yet.

    It also holds the event time of the whole input.
    """


HEAD_BYTES = 14
"""Length of the head of a file of data in flight: version, event time in front of the data,
number of channels.
"""


@dataclass(frozen=True, slots=True)
class ChannelStateHandle:
    """The handle of the data that waited at one place when an unaligned checkpoint overtook it."""

    edge_id: int
    side: ChannelSide
    index: int
    file: StateFile

    @property
    def is_data(self) -> bool:
        """Whether the file contains records, and not only the event time of the whole input.

        Event time alone need not be restored: the sources send it again.
        """
        return self.side is not ChannelSide.RESTORED or self.file.size > HEAD_BYTES


@dataclass(frozen=True, slots=True)
class SubtaskState:
    """All state of one subtask at one checkpoint."""

    operators: tuple[OperatorStateHandle, ...] = ()
    channels: tuple[ChannelStateHandle, ...] = ()
    finished: bool = False
    """Whether the subtask had finished before the checkpoint, so that nothing is left to
    process.
    """

    def files(self) -> Iterator[StateFile]:
        """Yields all files that the state refers to, in order."""
        for operator in self.operators:
            if operator.keyed is not None:
                yield from operator.keyed.files
            if operator.operator is not None:
                yield operator.operator
            if operator.source is not None:
                yield operator.source
        for channel in self.channels:
            yield channel.file


@dataclass(frozen=True, slots=True)
class CheckpointStats:
    """Statistics of one subtask's part in a checkpoint.

    Durations in ms, sizes in bytes; the names are those of Flink's REST API.
    """

    start_delay_ms: int = 0
    """Time from the trigger to the first barrier at this subtask."""
    alignment_ms: int = 0
    alignment_processed: int = 0
    """Number of records processed between the first and the last barrier."""
    alignment_persisted: int = 0
    """Size of the data in flight that became part of the checkpoint."""
    sync_ms: float = 0.0
    async_ms: int = 0
    state_size: int = 0
    """Size of all state that the checkpoint refers to."""
    checkpointed_size: int = 0
    """Size of the state that was written for this checkpoint."""
    unaligned: bool = False
