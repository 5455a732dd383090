"""What one subtask contributes to a checkpoint, as plain data: its acknowledgement carries it,
the metadata lists it.
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
    """The state of one operator in one subtask. None: it has none of that kind."""

    uid: str
    keyed: KeyedStateHandle | None = None
    operator: StateFile | None = None
    """Operator state: split, union and broadcast, encoded."""
    source: StateFile | None = None
    """Of a source: its splits with their positions and their event time, encoded."""


class ChannelSide(StrEnum):
    """Where data in flight waits, and what is counted there."""

    INPUT = "input"
    """At the consumer, in a channel of its gate."""
    OUTPUT = "output"
    """At the producer, in a subpartition."""
    CHAIN = "chain"
    """In the task, in front of an operator: from 1; 0: what a source without any has read."""
    RESTORED = "restored"
    """Data in the task that it restored and has not processed.

    It also holds the event time of the whole input.
    """


HEAD_BYTES = 14
"""Head of a file of data in flight: version, event time in front of the data, number of
channels.
"""


@dataclass(frozen=True, slots=True)
class ChannelStateHandle:
    """Data in flight on one exchange that an unaligned checkpoint overtook."""

    edge_id: int
    side: ChannelSide
    index: int
    file: StateFile

    @property
    def is_data(self) -> bool:
        """Whether it is more than the event time of a whole input. Alone, that is not needed: the
        sources send it again.
        """
        return self.side is not ChannelSide.RESTORED or self.file.size > HEAD_BYTES


@dataclass(frozen=True, slots=True)
class SubtaskState:
    """All state of one subtask at one checkpoint."""

    operators: tuple[OperatorStateHandle, ...] = ()
    channels: tuple[ChannelStateHandle, ...] = ()
    finished: bool = False
    """Whether its input had ended and it had finished before the checkpoint: nothing is left to
    process.
    """

    def files(self) -> Iterator[StateFile]:
        """All that it refers to, in order."""
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
    """How one subtask's checkpoint went.

    Durations in ms, sizes in bytes; the names are those of Flink's REST API.
    """

    start_delay_ms: int = 0
    """From the trigger to the first barrier here."""
    alignment_ms: int = 0
    alignment_processed: int = 0
    """Records that were processed while barriers were awaited."""
    alignment_persisted: int = 0
    """Bytes in flight that became part of the checkpoint."""
    sync_ms: float = 0.0
    async_ms: int = 0
    state_size: int = 0
    """Bytes that the checkpoint refers to."""
    checkpointed_size: int = 0
    """Bytes that were written for it."""
    unaligned: bool = False
