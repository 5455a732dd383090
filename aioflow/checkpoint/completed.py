"""Completed checkpoints as plain data, how many are retained, and which files may be deleted.

Checkpoints share files: an incremental checkpoint refers to files of older ones. A file is deleted
when no retained and no pending checkpoint refers to it any more. Savepoints belong to the user:
nothing here deletes them.

`SubtaskState` is the contribution of one subtask to a checkpoint, as plain data. The subtask sends
this data with its acknowledgement, and the metadata lists it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from aioflow.state.snapshot import KeyedStateHandle, StateFile

__all__ = [
    "HEAD_BYTES",
    "ChannelSide",
    "ChannelStateHandle",
    "CheckpointKind",
    "CheckpointRetention",
    "CheckpointStats",
    "CheckpointedOperator",
    "CompletedCheckpoint",
    "Discard",
    "OperatorStateHandle",
    "SubtaskState",
    "files_of",
]


@dataclass(frozen=True, slots=True)
class OperatorStateHandle:
    """The handles of one operator's state in one subtask. A field is None if the operator has no
    state of this kind.
    """

    uid: str
    keyed: KeyedStateHandle | None = None
    operator: StateFile | None = None
    """Operator state: split, union and broadcast, encoded."""
    source: StateFile | None = None
    """State of a source: its splits with their positions and their event time, encoded."""


class ChannelSide(StrEnum):
    """The place where data in flight waits. It determines the meaning of `index` in a
    `ChannelStateHandle`."""

    INPUT = "input"
    """Data at the consumer, in input channel `index`."""
    OUTPUT = "output"
    """Data at the producer, in subpartition `index`."""
    CHAIN = "chain"
    """Data in the task, in front of operator `index`; the operators of a chain count from 1. Index
    0 is data that a source has read and not emitted."""
    RESTORED = "restored"
    """Data that the task has restored itself and not processed yet.

    The file also holds the event time of the whole input.
    """


HEAD_BYTES = 14
"""Length in bytes of the head of a file with data in flight: version, event time in front of the
data, number of channels.
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

        Event time alone need not be restored, because the sources send it again.
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

    Durations are in ms, and sizes in bytes. The fields have the names of Flink's REST API.
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


class CheckpointKind(StrEnum):
    """The kind of a checkpoint: an ordinary checkpoint, or a savepoint for the user."""

    CHECKPOINT = "CHECKPOINT"
    """A checkpoint of the engine. Restarts begin with it. It is deleted once newer checkpoints
    complete.
    """
    SAVEPOINT = "SAVEPOINT"
    """A savepoint of the user, taken while the job continues.

    A restart uses the savepoint only on request, and sinks commit nothing when it completes.
    """
    SYNC_SAVEPOINT = "SYNC_SAVEPOINT"
    """The savepoint with which a stopped job ends: sinks commit once it is complete."""

    @property
    def is_savepoint(self) -> bool:
        return self is not CheckpointKind.CHECKPOINT


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointedOperator:
    """An operator of the checkpointed job, with or without state."""

    uid: str
    name: str
    parallelism: int
    max_parallelism: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedCheckpoint:
    """A consistent cut through the whole job, with the content of its metadata.

    Times are wall-clock milliseconds.
    """

    checkpoint_id: int
    kind: CheckpointKind = CheckpointKind.CHECKPOINT
    flow: str = ""
    job_id: str = ""
    triggered_ms: int = 0
    completed_ms: int = 0
    """Time when the last subtask acknowledged the checkpoint."""
    operators: tuple[CheckpointedOperator, ...] = ()
    subtasks: Mapping[tuple[str, int], SubtaskState] = field(default_factory=dict)
    """State of each subtask, by (uid of the head of its chain, subtask index).

    Finished subtasks have the state with which they finished.
    """
    directory: str = ""
    """URL of the directory that was requested for a savepoint; empty for a savepoint in the flow's
    store, and for a checkpoint."""
    location: str = ""
    """URL of the stored checkpoint; empty until it is stored."""


class Discard(msgspec.Struct, frozen=True):
    """Instruction to delete the metadata of `checkpoints`, and then `files`.

    The order matters: no metadata may remain that refers to a deleted file. Repeating the
    instruction does no harm.
    """

    checkpoints: tuple[CompletedCheckpoint, ...] = ()
    files: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.checkpoints or self.files)


def files_of(states: Iterable[SubtaskState]) -> list[str]:
    """Returns the names of all files that `states` refer to, each once, in order.

    Inline content of a handle has no file.
    """
    names: dict[str, None] = {}
    for state in states:
        for file in state.files():
            if file.name:
                names[file.name] = None
    return list(names)


_DELETED_MAX = 16
"""Number of deleted checkpoints whose files are remembered. A task that has missed more completions
in a row than this is assumed to report no more.
"""


class _Dropped(msgspec.Struct):
    """A checkpoint that is no longer retained, but kept because pending checkpoints may build on
    it. `waits_for` holds the ids of these pending checkpoints.
    """

    checkpoint: CompletedCheckpoint
    waits_for: set[int]


class CheckpointRetention:
    """Retains the `retain` newest completed checkpoints, and counts the references to each file.

    References from each checkpoint count, pending or completed. A checkpoint is "ours" if this job
    may delete it.
    """

    def __init__(self, retain: int) -> None:
        if retain < 1:
            raise ValueError(
                f"retain is {retain}, expected at least 1: a job without a completed checkpoint "
                "has nothing to restart from"
            )
        self._retain = retain
        self._kept: list[CompletedCheckpoint] = []
        self._not_ours: set[int] = set()
        """Ids that are never deleted: savepoints, and checkpoints restored without a claim."""
        self._dropped: list[_Dropped] = []
        self._owned: dict[int, dict[str, None]] = {}
        self._references: dict[str, int] = {}
        self._deleted: deque[frozenset[str]] = deque(maxlen=_DELETED_MAX)

    @property
    def checkpoints(self) -> tuple[CompletedCheckpoint, ...]:
        """The retained checkpoints, oldest first."""
        return tuple(self._kept)

    @property
    def latest(self) -> CompletedCheckpoint | None:
        """The checkpoint that a restart begins with; None before the first checkpoint has
        completed."""
        return self._kept[-1] if self._kept else None

    def restored(self, checkpoint: CompletedCheckpoint, *, claim: bool) -> None:
        """Retains `checkpoint`, with which the job begins.

        With `claim` the checkpoint is deleted like the checkpoints of this job, and otherwise
        never.
        """
        self.refer(checkpoint.checkpoint_id, checkpoint.subtasks.values())
        self._kept.append(checkpoint)
        if not claim or checkpoint.kind.is_savepoint:
            self._not_ours.add(checkpoint.checkpoint_id)

    def refer(self, owner: int, states: Iterable[SubtaskState]) -> None:
        """Notes that checkpoint `owner`, an id, refers to the files of `states`. Repeating the call
        changes nothing.
        """
        owned = self._owned.setdefault(owner, {})
        for name in files_of(states):
            if name not in owned:
                owned[name] = None
                self._references[name] = self._references.get(name, 0) + 1

    def completed(self, checkpoint: CompletedCheckpoint, pending: Collection[int]) -> Discard:
        """Retains `checkpoint`, which is durable now, as the newest.

        Returns the files to delete. `pending` holds the ids of unfinished checkpoints that may
        build on an older checkpoint.
        """
        self._kept.append(checkpoint)
        if checkpoint.kind.is_savepoint:
            self._not_ours.add(checkpoint.checkpoint_id)
        excess = len([c for c in self._kept if not c.kind.is_savepoint]) - self._retain
        for old in self._kept[:-1]:
            # The first own checkpoint replaces a restored one, even if that is not ours.
            if old.checkpoint_id in self._not_ours or excess > 0:
                excess -= not old.kind.is_savepoint
                self._kept.remove(old)
                self._dropped.append(_Dropped(old, set(pending)))
        return self._settle()

    def ended(self, checkpoint_id: int) -> Discard:
        """Notes that a pending checkpoint or savepoint has completed.

        Returns what to delete: older checkpoints that were kept only for this one are no longer
        needed. The references of a savepoint are never removed.
        """
        for dropped in self._dropped:
            dropped.waits_for.discard(checkpoint_id)
        return self._settle()

    def failed(self, checkpoint_id: int, metadata: CompletedCheckpoint | None = None) -> Discard:
        """Drops a pending checkpoint that failed. Returns the instruction to delete the files that
        only this checkpoint refers to.

        `metadata` is given if parts of the checkpoint's metadata may have been stored; these are
        then deleted as well.
        """
        files = self._forget(checkpoint_id)
        rest = self.ended(checkpoint_id)
        return Discard(
            (*(() if metadata is None else (metadata,)), *rest.checkpoints), (*files, *rest.files)
        )

    def unreferenced(self, state: SubtaskState) -> Discard:
        """Returns the instruction to delete the files of `state` that no checkpoint refers to. The
        state came too late for its checkpoint.
        """
        return Discard(
            (), tuple(name for name in files_of([state]) if name not in self._references)
        )

    def deleted(self, state: SubtaskState) -> list[str]:
        """Returns the files that `state` refers to but that are already deleted.

        This happens if the writing task built on a checkpoint, and did not know yet that a newer
        checkpoint had replaced it.
        """
        return [
            name
            for name in files_of([state])
            if name not in self._references and any(name in gone for gone in self._deleted)
        ]

    def _settle(self) -> Discard:
        """Returns the deletion of dropped checkpoints that no pending checkpoint builds on."""
        checkpoints: list[CompletedCheckpoint] = []
        files: list[str] = []
        for dropped in [d for d in self._dropped if not d.waits_for]:
            self._dropped.remove(dropped)
            checkpoint = dropped.checkpoint
            if checkpoint.checkpoint_id in self._not_ours:
                # The references of a savepoint are never removed. So later checkpoints that use its
                # files do not delete them.
                continue
            checkpoints.append(checkpoint)
            free = self._forget(checkpoint.checkpoint_id)
            if free:
                self._deleted.append(frozenset(free))
            files += free
        return Discard(tuple(checkpoints), tuple(files))

    def _forget(self, owner: int) -> list[str]:
        """Removes the references of checkpoint `owner`, an id. Returns the names of the files that
        nothing refers to any more."""
        free: list[str] = []
        for name in self._owned.pop(owner, {}):
            count = self._references[name] - 1
            if count:
                self._references[name] = count
            else:
                del self._references[name]
                free.append(name)
        return free
