"""Completed checkpoints as plain data, how many of them are kept, and which files may be deleted.

A file belongs to every checkpoint that refers to it: increments share what has not changed. It is
deleted when no completed checkpoint that is kept and no pending one refers to it any more.
Savepoints belong to the user: nothing here deletes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from aioflow.checkpoint.subtask import SubtaskState

__all__ = [
    "CheckpointKind",
    "CheckpointRetention",
    "CheckpointedOperator",
    "CompletedCheckpoint",
    "Discard",
    "files_of",
]


class CheckpointKind(StrEnum):
    """The purpose of a checkpoint."""

    CHECKPOINT = "CHECKPOINT"
    """For the engine: restarts begin from it; deleted once newer ones are complete."""
    SAVEPOINT = "SAVEPOINT"
    """For the user, while the job goes on: a restart never uses it unless asked to, and sinks
    commit nothing on it.
    """
    SYNC_SAVEPOINT = "SYNC_SAVEPOINT"
    """The last act of a job that is stopped: sinks commit on it."""

    @property
    def is_savepoint(self) -> bool:
        return self is not CheckpointKind.CHECKPOINT


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointedOperator:
    """One operator of the job that the checkpoint was taken of, whether it has state or not."""

    uid: str
    name: str
    parallelism: int
    max_parallelism: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedCheckpoint:
    """A consistent cut through the whole job: what its metadata says. Times are wall-clock ms."""

    checkpoint_id: int
    kind: CheckpointKind = CheckpointKind.CHECKPOINT
    flow: str = ""
    job_id: str = ""
    triggered_ms: int = 0
    completed_ms: int = 0
    """When the last subtask acknowledged it."""
    operators: tuple[CheckpointedOperator, ...] = ()
    subtasks: Mapping[tuple[str, int], SubtaskState] = field(default_factory=dict)
    """By uid of the head of its chain, and index.

    Finished ones are here with what they had when they finished.
    """
    directory: str = ""
    """Of a savepoint: the URL that was asked for; empty: under the flow's store."""
    location: str = ""
    """URL of what was stored, known once it is."""


@dataclass(frozen=True, slots=True)
class Discard:
    """Delete the metadata of `checkpoints`, if there is any, and after that `files`. Repeating it
    does no harm.

    The order matters: metadata must never be left that refers to a deleted file.
    """

    checkpoints: tuple[CompletedCheckpoint, ...] = ()
    files: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.checkpoints or self.files)


def files_of(states: Iterable[SubtaskState]) -> list[str]:
    """Names of all files that `states` refer to, each once, in order. Inline content of a handle
    has no file.
    """
    names: dict[str, None] = {}
    for state in states:
        for file in state.files():
            if file.name:
                names[file.name] = None
    return list(names)


_DELETED_MAX = 16
"""The files of this many deleted checkpoints are remembered. A task that missed more completions in
a row no longer reports.
"""


@dataclass(slots=True)
class _Dropped:
    """A checkpoint that is no longer retained, but that a pending one may build on."""

    checkpoint: CompletedCheckpoint
    waits_for: set[int]


class CheckpointRetention:
    """Retains the `retain` newest completed checkpoints, and counts the references to each file.

    The owner of a reference is a checkpoint, by its id, pending or completed.
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
        """The checkpoint that a restart begins with."""
        return self._kept[-1] if self._kept else None

    def restored(self, checkpoint: CompletedCheckpoint, *, claim: bool) -> None:
        """The job begins with `checkpoint`.

        With `claim` it is ours, and deleted like our own; otherwise it is never deleted.
        """
        self.refer(checkpoint.checkpoint_id, checkpoint.subtasks.values())
        self._kept.append(checkpoint)
        if not claim or checkpoint.kind.is_savepoint:
            self._not_ours.add(checkpoint.checkpoint_id)

    def refer(self, owner: int, states: Iterable[SubtaskState]) -> None:
        """Checkpoint `owner` refers to the files of `states`. Repeating it changes nothing."""
        owned = self._owned.setdefault(owner, {})
        for name in files_of(states):
            if name not in owned:
                owned[name] = None
                self._references[name] = self._references.get(name, 0) + 1

    def completed(self, checkpoint: CompletedCheckpoint, pending: Collection[int]) -> Discard:
        """`checkpoint` is durable, and the newest one.

        `pending`: ids of checkpoints under way that may build on an older one.
        """
        self._kept.append(checkpoint)
        if checkpoint.kind.is_savepoint:
            self._not_ours.add(checkpoint.checkpoint_id)
        excess = len([c for c in self._kept if not c.kind.is_savepoint]) - self._retain
        for old in self._kept[:-1]:
            # The first completed one replaces a restored checkpoint, even if that is not ours.
            if old.checkpoint_id in self._not_ours or excess > 0:
                excess -= not old.kind.is_savepoint
                self._kept.remove(old)
                self._dropped.append(_Dropped(old, set(pending)))
        return self._settle()

    def ended(self, checkpoint_id: int) -> Discard:
        """A pending checkpoint or savepoint completed: nothing waits for it any more.

        The references of a savepoint stay for ever.
        """
        for dropped in self._dropped:
            dropped.waits_for.discard(checkpoint_id)
        return self._settle()

    def failed(self, checkpoint_id: int, metadata: CompletedCheckpoint | None = None) -> Discard:
        """A pending checkpoint failed: files that only it refers to are deleted.

        `metadata`: set if parts of it may have been stored.
        """
        files = self._forget(checkpoint_id)
        rest = self.ended(checkpoint_id)
        return Discard(
            (*(() if metadata is None else (metadata,)), *rest.checkpoints), (*files, *rest.files)
        )

    def unreferenced(self, state: SubtaskState) -> Discard:
        """The files of a late state that may be deleted: those without another reference."""
        return Discard(
            (), tuple(name for name in files_of([state]) if name not in self._references)
        )

    def deleted(self, state: SubtaskState) -> list[str]:
        """The deleted files that `state` refers to. Its writer did not know yet that the checkpoint
        it built on was subsumed.
        """
        return [
            name
            for name in files_of([state])
            if name not in self._references and any(name in gone for gone in self._deleted)
        ]

    def all_ours(self) -> Discard:
        """Everything that is retained and ours, for a job that leaves nothing to resume."""
        for checkpoint in self._kept:
            self._dropped.append(_Dropped(checkpoint, set()))
        self._kept.clear()
        for dropped in self._dropped:
            dropped.waits_for.clear()
        return self._settle()

    def _settle(self) -> Discard:
        """Delete the dropped checkpoints that no pending one waits for."""
        checkpoints: list[CompletedCheckpoint] = []
        files: list[str] = []
        for dropped in [d for d in self._dropped if not d.waits_for]:
            self._dropped.remove(dropped)
            checkpoint = dropped.checkpoint
            if checkpoint.checkpoint_id in self._not_ours:
                # Its references stay for ever: checkpoints that still build on its files must not
                # delete them either.
                continue
            checkpoints.append(checkpoint)
            free = self._forget(checkpoint.checkpoint_id)
            if free:
                self._deleted.append(frozenset(free))
            files += free
        return Discard(tuple(checkpoints), tuple(files))

    def _forget(self, owner: int) -> list[str]:
        """Drop the references of `owner`. Returns the files without further references."""
        free: list[str] = []
        for name in self._owned.pop(owner, {}):
            count = self._references[name] - 1
            if count:
                self._references[name] = count
            else:
                del self._references[name]
                free.append(name)
        return free
