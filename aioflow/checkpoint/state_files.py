"""Writes the state of subtasks as files of a store, and reads them.

Files are streamed, and digested on the way; reading checks the digest. Small state is stored inside
its handle: a file for each of a thousand small subtasks would cost a store more than their bytes
do. In a store that other processes cannot read, all state is stored so.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

from aioflow.checkpoint.objects import ObjectStore, is_name
from aioflow.checkpoint.urls import join_url, open_objects
from aioflow.core.errors import RestoreError
from aioflow.state.handles import StateFile

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["DIGEST_BYTES", "INLINE_BYTES", "FileInput", "FileOutput", "Places"]

INLINE_BYTES = 16 * 1024
"""State up to this size stays in the handle."""

DIGEST_BYTES = 16


class FileOutput:
    """A `StateOutput` that writes new files `state/<id>` to `objects`.

    With `absolute`, handles name the files by URL, otherwise relative to the flow's root.
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

    A plain name is in the flow's store, a URL in the store of its directory.
    """

    def __init__(self, host: Host, root: ObjectStore) -> None:
        self._host = host
        self._root = root
        self._others: dict[str, ObjectStore] = {}

    def find(self, name: str) -> tuple[ObjectStore, str]:
        """Returns the store, and the name of the file in it.

        Raises RestoreError for an invalid name of a file.
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
