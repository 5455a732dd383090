"""Stores to test with, and checkpoints to put into them."""

from __future__ import annotations

import errno
from collections.abc import AsyncGenerator, Iterable, Sequence

from aioflow.checkpoint.completed import (
    ChannelSide,
    ChannelStateHandle,
    CheckpointedOperator,
    CheckpointKind,
    CompletedCheckpoint,
    OperatorStateHandle,
    SubtaskState,
)
from aioflow.checkpoint.objects import Chunks, ObjectStore
from aioflow.checkpoint.store import FlowStore
from aioflow.state.snapshot import CANONICAL, KeyedStateHandle, StateFile, StateOutput

LARGE = bytes(range(256)) * 100
"""A value too large to travel in a handle."""


async def chunks(content: bytes, size: int = 1000) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


async def subtask(output: StateOutput, index: int = 0) -> SubtaskState:
    """A state of every kind, its files written to `output`."""
    first, last = index * 64, index * 64 + 63
    written = (await output.write(chunks(LARGE)), await output.write(chunks(b"small")))
    keyed = KeyedStateHandle(CANONICAL, 128, first, last, written, {"n": 1})
    count = OperatorStateHandle(
        "count", keyed=keyed, operator=await output.write(chunks(b"list state"))
    )
    source = OperatorStateHandle(
        "source", source=await output.write(chunks(b"position %d" % index))
    )
    return SubtaskState(
        (source, count),
        (ChannelStateHandle(3, ChannelSide.INPUT, 1, await output.write(chunks(LARGE[:20_000]))),),
    )


async def checkpoint(
    store: FlowStore,
    number: int,
    kind: CheckpointKind = CheckpointKind.CHECKPOINT,
    directory: str = "",
) -> CompletedCheckpoint:
    """A checkpoint with files, not stored yet."""
    output = store.output(directory)
    return CompletedCheckpoint(
        checkpoint_id=number,
        kind=kind,
        flow="wörd count",
        job_id="job-1",
        triggered_ms=1000 * number,
        completed_ms=1000 * number + 7,
        operators=(
            CheckpointedOperator(uid="source", name="lines", parallelism=2, max_parallelism=128),
            CheckpointedOperator(uid="count", name="count", parallelism=2, max_parallelism=128),
        ),
        subtasks={("source", index): await subtask(output, index) for index in range(2)},
        directory=directory,
    )


def files(checkpoint: CompletedCheckpoint) -> list[StateFile]:
    """All files that it refers to, with those in handles."""
    found: list[StateFile] = []
    for state in checkpoint.subtasks.values():
        for operator in state.operators:
            if operator.keyed is not None:
                found += operator.keyed.files
            found += [file for file in (operator.operator, operator.source) if file is not None]
        found += [channel.file for channel in state.channels]
    return found


async def contents(store: FlowStore, checkpoint: CompletedCheckpoint) -> list[bytes]:
    """All state that it refers to, read from where it lies."""
    return [await store.input().read(file) for file in files(checkpoint)]


class Failing:
    """An `ObjectStore` that passes everything on and fails where it is told to.

    `before`: calls that do nothing and fail, `after`: calls that do their work and then fail, as
    with a reply that was lost.
    """

    shared = True

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self.before: set[str] = set()
        self.after: set[str] = set()

    @property
    def url(self) -> str:
        return self._objects.url

    def _check(self, kind: set[str], call: str) -> None:
        if call in kind:
            raise OSError(errno.ENOSPC, "No space left on device", self.url)

    async def create(self, name: str, chunks: Chunks) -> bool:
        self._check(self.before, "create")
        created = await self._objects.create(name, chunks)
        self._check(self.after, "create")
        return created

    async def read(self, name: str) -> bytes:
        self._check(self.before, "read")
        return await self._objects.read(name)

    async def delete(self, names: Iterable[str]) -> None:
        self._check(self.before, "delete")
        await self._objects.delete(names)
        self._check(self.after, "delete")

    async def names(self, prefix: str = "") -> list[str]:
        self._check(self.before, "names")
        return await self._objects.names(prefix)

    async def missing(self, names: Sequence[str]) -> list[str]:
        return await self._objects.missing(names)

    async def modified_ms(self, name: str) -> int:
        return await self._objects.modified_ms(name)

    async def harden(self) -> None:
        self._check(self.before, "harden")
        await self._objects.harden()

    async def sweep(self, before_ms: int) -> None:
        await self._objects.sweep(before_ms)
