"""Copies of the state that this process wrote, so that a task which is restored here need not read
it from the store.

A process that survives the failure of others still has the state that its tasks wrote for the
checkpoint to restore. A copy belongs to the checkpoints that refer to it: it is kept as long as one
of them may be restored. A copy is used only if its size and digest match the handle in the
checkpoint; otherwise the store is read. Names of state files are never used twice, so any subtask,
attempt or key group may have written or may read a file. After Flink's TaskLocalStateStore and
BackendRestorerProcedure.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from aioflow.checkpoint.completed import files_of
from aioflow.checkpoint.state_files import DIGEST_BYTES
from aioflow.checkpoint.subtask import SubtaskState
from aioflow.core.errors import RestoreError
from aioflow.state.handles import StateFile, StateInput, StateOutput

__all__ = ["LOCAL_BYTES_MAX", "FirstOf", "LocalCopies", "LocalState"]

logger = logging.getLogger(__name__)

LOCAL_BYTES_MAX = 64 << 20
"""Maximum number of bytes that a process keeps in memory for a job.

State beyond that is read from the store, as if it had been written elsewhere.
"""


class LocalCopies:
    """What one subtask writes for one checkpoint, as far as it fits into `bytes_max`."""

    def __init__(self, output: StateOutput, bytes_max: int) -> None:
        self._output = output
        self._room = bytes_max
        self.content: dict[str, tuple[bytes, ...]] = {}

    async def write(self, chunks: AsyncIterator[bytes]) -> StateFile:
        """As `StateOutput.write`."""
        seen: list[bytes] = []
        size = 0

        async def passing() -> AsyncGenerator[bytes, None]:
            nonlocal size
            async for chunk in chunks:
                size += len(chunk)
                if size <= self._room:
                    seen.append(chunk)
                else:
                    seen.clear()
                yield chunk

        stream = passing()
        try:
            file = await self._output.write(stream)
        finally:
            await stream.aclose()
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()
        if file.content is None and size <= self._room:
            self._room -= size
            self.content[file.name] = tuple(seen)
        return file


class LocalState:
    """The copies of one job in one process."""

    def __init__(self, bytes_max: int = LOCAL_BYTES_MAX) -> None:
        self._max = bytes_max
        self._size = 0
        self._content: dict[str, tuple[bytes, ...]] = {}
        self._parts: dict[int, dict[str, None]] = {}
        """Checkpoint -> the names of its files that are here."""
        self.reads = 0
        """Number of reads that did not need the store."""

    def __len__(self) -> int:
        return len(self._content)

    def copies(self, output: StateOutput) -> LocalCopies:
        """An output that copies what is written to `output`. Nothing is kept before `keep`."""
        return LocalCopies(output, self._max - self._size)

    def keep(self, checkpoint_id: int, state: SubtaskState, copies: LocalCopies) -> None:
        """A subtask has written its part, and will say so."""
        part = self._parts.setdefault(checkpoint_id, {})
        for name in files_of([state]):
            fresh = copies.content.get(name)
            size = sum(map(len, fresh or ()))
            if fresh is not None and name not in self._content and self._size + size <= self._max:
                self._content[name] = fresh
                self._size += size
            if name in self._content:
                part[name] = None

    def completed(self, checkpoint_id: int) -> None:
        """Drop the copies of older checkpoints: they will not be restored."""
        for older in [one for one in self._parts if one < checkpoint_id]:
            del self._parts[older]
        self._let_go()

    def aborted(self, checkpoint_id: int) -> None:
        """Drop its copies: it will not be restored."""
        if self._parts.pop(checkpoint_id, None) is not None:
            self._let_go()

    def _let_go(self) -> None:
        wanted = {name for part in self._parts.values() for name in part}
        for name in [name for name in self._content if name not in wanted]:
            self._size -= sum(map(len, self._content.pop(name)))

    def input(self, store: StateInput) -> StateInput:
        """Reads what is here, and everything else from `store`."""
        return FirstOf((self, store))

    async def read(self, file: StateFile) -> bytes:
        """As a `StateInput`. Raises RestoreError for what is not here."""
        chunks = self._content.get(file.name) if file.content is None else None
        if chunks is None:
            raise NotHere(f"state file {file.name} was not written by this process")
        content = b"".join(chunks)
        if (
            len(content) != file.size
            or hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest() != file.digest
        ):
            raise RestoreError(
                f"the copy of state file {file.name} in this process does not match its digest"
            )
        self.reads += 1
        return content


class NotHere(RestoreError):
    """There is no local copy, which is normal."""


class FirstOf:
    """A `StateInput` over alternatives: the first that has a file gives it, and the others are not
    asked. Each is tried once, in order.
    """

    def __init__(self, inputs: Sequence[StateInput]) -> None:
        self._inputs = inputs

    async def read(self, file: StateFile) -> bytes:
        """Raises what the last alternative raised, with what the others said."""
        refused: list[RestoreError] = []
        for alternative in self._inputs[:-1]:
            try:
                return await alternative.read(file)
            except NotHere:
                pass
            except RestoreError as error:
                logger.warning("the next place is asked: %s", error)
                refused.append(error)
        try:
            return await self._inputs[-1].read(file)
        except RestoreError as error:
            for before in refused:
                error.add_note(f"aioflow: tried before: {before}")
            raise
