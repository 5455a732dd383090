"""Writes the state of subtasks as files of a store, and reads them.

Files are written as a stream, and their digest is computed on the way; reading checks the digest.
Small state is stored inside its handle, because a file for each of a thousand small subtasks would
cost more than the bytes do. If other processes cannot read the store, all state is stored inside
the handles.

`LocalState` keeps copies of the state files that this process wrote, in memory or on its disk
(`local_files`). A task that is restored in this process then need not read the files from the
store. A process that survives the failure of others still has the state that its tasks wrote for
the checkpoint to restore. A copy is kept as long as one of the checkpoints that refer to its file
may be restored. A copy is used only if its size and digest match the handle in the checkpoint;
otherwise the store is read. Names of state files are never used twice, so any subtask, attempt or
key group may have written or may read a file. The design follows Flink's TaskLocalStateStore and
BackendRestorerProcedure.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TYPE_CHECKING, Protocol

from aioflow.checkpoint.completed import SubtaskState, files_of
from aioflow.checkpoint.objects import ObjectStore, is_name
from aioflow.checkpoint.urls import join_url, open_objects
from aioflow.core.errors import RestoreError
from aioflow.state.snapshot import StateFile, StateInput, StateOutput

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = [
    "DIGEST_BYTES",
    "INLINE_BYTES",
    "LOCAL_BYTES_MAX",
    "Copy",
    "CopyPlace",
    "FileInput",
    "FileOutput",
    "FirstOf",
    "LocalCopies",
    "LocalState",
    "Places",
]

INLINE_BYTES = 16 * 1024
"""State up to this size stays in the handle."""

DIGEST_BYTES = 16


class FileOutput:
    """A `StateOutput` that writes new files `state/<id>` to `objects`.

    With `absolute`, handles name the files by URL, otherwise by their name relative to the flow's
    root.
    """

    def __init__(self, host: Host, objects: ObjectStore, *, absolute: bool = False) -> None:
        self._host = host
        self._objects = objects
        self._absolute = absolute

    async def write(self, chunks: AsyncIterator[bytes]) -> StateFile:
        content = _Digested(chunks)
        try:
            head: list[bytes] = []
            async for chunk in content:
                head.append(chunk)
                if self._objects.shared and content.size > INLINE_BYTES:
                    return await self._write(head, content)
            return StateFile("", content.size, content.digest(), b"".join(head))
        finally:
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()

    async def _write(self, head: list[bytes], rest: _Digested) -> StateFile:
        name = f"state/{self._host.ids.new('state')}"

        async def both() -> AsyncGenerator[bytes, None]:
            for chunk in head:
                yield chunk
            async for chunk in rest:
                yield chunk

        stream = both()
        try:
            # The name is random, so False only means that a reply was lost and the request
            # repeated.
            await self._objects.create(name, stream)
        finally:
            await stream.aclose()
        return StateFile(
            join_url(self._objects.url, name) if self._absolute else name, rest.size, rest.digest()
        )


class FileInput:
    """A `StateInput` that reads files relative to `objects`, the root of a flow, or by URL."""

    def __init__(self, host: Host, objects: ObjectStore) -> None:
        self._places = Places(host, objects)

    async def read(self, file: StateFile) -> bytes:
        content, where = file.content, "state inside the metadata"
        if content is None:
            objects, name = self._places.find(file.name)
            where = join_url(objects.url, name)
            try:
                content = await objects.read(name)
            except FileNotFoundError as error:
                raise RestoreError(
                    f"state file {where} is missing, a checkpoint that refers to it cannot be "
                    "restored"
                ) from error
            except OSError as error:
                raise RestoreError(f"state file {where} cannot be read: {error}") from error
        if len(content) != file.size:
            raise RestoreError(
                f"{where} has {len(content)} bytes, expected {file.size}: it is damaged, restore "
                "it from a copy"
            )
        if hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest() != file.digest:
            raise RestoreError(
                f"{where} does not match its digest: it is damaged, restore it from a copy"
            )
        return content


class Places:
    """Finds the store that holds a state file, from the name of the file.

    A plain name refers to the flow's store. A URL refers to the store at the URL of its directory.
    """

    def __init__(self, host: Host, root: ObjectStore) -> None:
        self._host = host
        self._root = root
        self._others: dict[str, ObjectStore] = {}

    def find(self, name: str) -> tuple[ObjectStore, str]:
        """Returns the store of the file `name`, and the file's name in that store.

        Raises RestoreError for an invalid file name.
        """
        objects, inner = self._root, name.removeprefix(f"{self._root.url}/")
        if "://" in inner:
            base, _, inner = inner.rpartition("/")
            # The opened store is reused, because opening may make connections.
            objects = self._others[base] = self._others.get(base) or open_objects(base, self._host)
        if not is_name(inner):
            raise RestoreError(
                f"a checkpoint names a state file {name!r}, which no file can be called: its "
                "metadata is damaged or forged"
            )
        return objects, inner


class _Digested:
    """An iterator that passes chunks on, and computes their total size and digest."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self.size = 0

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        chunk = await anext(self._chunks)
        self._hash.update(chunk)
        self.size += len(chunk)
        return chunk

    def digest(self) -> bytes:
        return self._hash.digest()


logger = logging.getLogger(__name__)

LOCAL_BYTES_MAX = 64 << 20
"""Maximum number of bytes that a process keeps in memory for a job.

State beyond that is read from the store, as if it had been written elsewhere.
"""


class Copy(Protocol):
    """The local copy of one state file. Its methods raise no OSError."""

    async def add(self, chunk: bytes) -> None:
        """Appends `chunk`."""

    async def name(self, name: str) -> bool:
        """Names a complete copy after its state file. Returns whether the copy can be read."""

    async def read(self) -> bytes:
        """Returns the content. Raises RestoreError if the copy cannot be read any more."""

    def drop(self) -> None:
        """Removes the copy, now or soon."""


class CopyPlace(Protocol):
    """The place where local copies are kept: memory, or a directory."""

    def begin(self) -> Copy:
        """Returns a new, empty copy."""

    async def find(self, name: str) -> Copy | None:
        """Returns the copy of file `name` that another process has left here, or None."""

    async def clean(self) -> None:
        """Removes dropped copies."""

    def completed(self) -> None:
        """Notes that a checkpoint completed: copies of processes that have ended are no longer
        needed.
        """

    async def close(self) -> None:
        """Removes all copies of this process."""


class _MemoryCopy:
    __slots__ = ("_chunks",)

    def __init__(self) -> None:
        self._chunks: list[bytes] = []

    async def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)

    async def name(self, name: str) -> bool:
        return True

    async def read(self) -> bytes:
        return b"".join(self._chunks)

    def drop(self) -> None:
        self._chunks.clear()


class _Memory:
    """Copies in the memory of this process. A `CopyPlace`."""

    def begin(self) -> Copy:
        return _MemoryCopy()

    async def find(self, name: str) -> Copy | None:
        return None

    async def clean(self) -> None:
        pass

    def completed(self) -> None:
        pass

    async def close(self) -> None:
        pass


class LocalCopies:
    """A `StateOutput` that also keeps local copies of the files that it writes, up to `bytes_max`
    bytes.

    One subtask uses it for one checkpoint.
    """

    def __init__(self, output: StateOutput, place: CopyPlace, bytes_max: int) -> None:
        self._output = output
        self._place = place
        self._room = bytes_max
        self.content: dict[str, tuple[Copy, int]] = {}
        """Maps the name of each written file to its copy and its size in bytes."""

    async def write(self, chunks: AsyncIterator[bytes]) -> StateFile:
        """Writes a state file to the output, like `StateOutput.write`, and keeps a copy if there is
        room."""
        await self._place.clean()
        copy: Copy | None = self._place.begin()
        size = 0

        async def passing() -> AsyncGenerator[bytes, None]:
            nonlocal size, copy
            async for chunk in chunks:
                size += len(chunk)
                if copy is not None:
                    if size <= self._room:
                        await copy.add(chunk)
                    else:
                        copy.drop()
                        copy = None
                yield chunk

        stream = passing()
        file: StateFile | None = None
        try:
            file = await self._output.write(stream)
        finally:
            await stream.aclose()
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()
            if copy is not None and (file is None or file.content is not None):
                copy.drop()
                copy = None
        if copy is not None and await copy.name(file.name):
            self._room -= size
            self.content[file.name] = copy, size
        return file

    def drop(self) -> None:
        """Drops the copies that were not kept."""
        for copy, _ in self.content.values():
            copy.drop()
        self.content.clear()


class LocalState:
    """The copies of state files of one job in one process, up to `bytes_max` bytes."""

    def __init__(self, bytes_max: int = LOCAL_BYTES_MAX, place: CopyPlace | None = None) -> None:
        """Keeps the copies in `place`, or in memory if it is None."""
        self._max = bytes_max
        self._place: CopyPlace = _Memory() if place is None else place
        self._size = 0
        self._content: dict[str, tuple[Copy, int]] = {}
        self._parts: dict[int, dict[str, None]] = {}
        """Maps each checkpoint id to the names of the checkpoint's files that have a copy here."""
        self.reads = 0
        """Number of files that were read from a local copy."""

    def __len__(self) -> int:
        return len(self._content)

    def copies(self, output: StateOutput) -> LocalCopies:
        """Returns an output that writes to `output` and also keeps local copies of what it writes.

        The caller must drop the copies that it does not pass to `keep`.
        """
        return LocalCopies(output, self._place, self._max - self._size)

    def keep(self, checkpoint_id: int, state: SubtaskState, copies: LocalCopies) -> None:
        """Keeps the copies of the files that `state` refers to. `state` is what a subtask has
        written for a checkpoint.

        Called before the subtask acknowledges the checkpoint.
        """
        part = self._parts.setdefault(checkpoint_id, {})
        for name in files_of([state]):
            fresh = copies.content.get(name)
            if (
                fresh is not None
                and name not in self._content
                and self._size + fresh[1] <= self._max
            ):
                self._content[name] = copies.content.pop(name)
                self._size += fresh[1]
            if name in self._content:
                part[name] = None

    def completed(self, checkpoint_id: int) -> None:
        """Drops the copies that only checkpoints older than `checkpoint_id` refer to, because these
        will not be restored."""
        for older in [one for one in self._parts if one < checkpoint_id]:
            del self._parts[older]
        self._let_go()
        self._place.completed()

    def aborted(self, checkpoint_id: int) -> None:
        """Drops the copies that only this checkpoint refers to, because it will not be restored."""
        if self._parts.pop(checkpoint_id, None) is not None:
            self._let_go()

    def _let_go(self) -> None:
        wanted = {name for part in self._parts.values() for name in part}
        for name in [name for name in self._content if name not in wanted]:
            copy, size = self._content.pop(name)
            self._size -= size
            copy.drop()

    def input(self, store: StateInput) -> StateInput:
        """Returns an input that reads local copies first, and all other files from `store`."""
        return FirstOf((self, store))

    async def read(self, file: StateFile) -> bytes:
        """Reads the copy of a state file.

        Raises NotHere if there is no copy, and RestoreError if the copy does not match its digest.
        """
        copy: Copy | None = None
        if file.content is None:
            kept = self._content.get(file.name)
            copy = await self._place.find(file.name) if kept is None else kept[0]
        if copy is None:
            raise NotHere(f"state file {file.name} was not written by this process")
        content = await copy.read()
        if (
            len(content) != file.size
            or hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest() != file.digest
        ):
            raise RestoreError(
                f"the local copy of state file {file.name} does not match its digest"
            )
        self.reads += 1
        return content

    async def close(self) -> None:
        """Removes all copies, because the job ends in this process."""
        await self._place.close()


class NotHere(RestoreError):
    """The error when the process has no local copy of a file. This is normal: the file is then read
    from the store.
    """


class FirstOf:
    """A `StateInput` that tries several inputs in order, each once, until one has the file."""

    def __init__(self, inputs: Sequence[StateInput]) -> None:
        self._inputs = inputs

    async def read(self, file: StateFile) -> bytes:
        """Reads a state file from the first input that has it.

        If all inputs fail, raises the error of the last input, with notes about the other errors.
        """
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
