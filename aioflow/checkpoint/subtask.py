"""What one subtask contributes to a checkpoint, as plain data: its acknowledgement carries it, the metadata lists it."""

from __future__ import annotations

from dataclasses import dataclass

from aioflow.state.handles import KeyedStateHandle, StateFile

__all__ = ["ChannelStateHandle", "CheckpointStats", "OperatorStateHandle", "SubtaskState"]


@dataclass(frozen=True, slots=True)
class OperatorStateHandle:
    """The state of one operator in one subtask. None: it has none of that kind."""

    uid: str
    keyed: KeyedStateHandle | None = None
    operator: StateFile | None = None
    """Operator state: split, union and broadcast, encoded."""
    source: StateFile | None = None
    """Of a source: its splits with their positions and their event time, encoded."""


@dataclass(frozen=True, slots=True)
class ChannelStateHandle:
    """Data in flight on one exchange that an unaligned checkpoint overtook."""

    edge_id: int
    side: str
    """`input` (queued at the consumer), `output` (queued at the producer), `chain` (in front of an operator of the task), or `restored`
    (of a channel that the exchange had before it was rescaled)."""
    index: int
    """Channel of the gate, subpartition of the partition, operator of the chain (from 1; 0: a source without any), or a number."""
    file: StateFile


@dataclass(frozen=True, slots=True)
class SubtaskState:
    """All state of one subtask at one checkpoint."""

    operators: tuple[OperatorStateHandle, ...] = ()
    channels: tuple[ChannelStateHandle, ...] = ()
    finished: bool = False
    """Whether its input had ended and it had finished before the checkpoint: nothing is left to process."""


@dataclass(frozen=True, slots=True)
class CheckpointStats:
    """How one subtask's checkpoint went. Durations in ms, sizes in bytes; the names are those of Flink's REST API."""

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
