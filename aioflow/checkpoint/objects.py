"""Defines the smallest store that checkpoints need: named objects that are created once and whole,
and never change.

A local directory, the memory of a process and an object store can all be such a store. Leases and
completed checkpoints need no more, because only creation must be atomic. Names are segments of
`[A-Za-z0-9_.-]`, joined by slashes, so that they mean the same everywhere and cannot point outside
the store.

`MemoryObjects` keeps objects in the memory of this process. This store is for tests, and for
services that need exactly-once only across failures of their own code. The same store name refers
to the same objects as long as the process lives, also for later jobs.

`DirectoryObjects` keeps objects as files in a local directory, or in one that several machines
share. A file is first written under a temporary name that no object can have, and fsynced. It is
then renamed if its final name is free, and the directory is fsynced. So a reader sees the whole
object or none, even after a kill or a loss of power.
"""

from __future__ import annotations

import asyncio
import logging
import os.path
import posixpath
import re
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

from aioflow.core.aio import wait_all

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = [
    "Chunks",
    "DirectoryObjects",
    "MemoryObjects",
    "ObjectStore",
    "check_name",
    "collect",
    "is_name",
    "to_the_end",
]

Chunks = AsyncIterator[bytes]

SEGMENT = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


class ObjectStore(Protocol):
    """A store of named objects under one root.

    Methods raise OSError if the store fails, and FileNotFoundError if no object has the name.
    """

    @property
    def url(self) -> str:
        """The URL of the root, without a slash at its end. Errors show this URL, and
        `urls.open_objects` opens the store again when given this URL.
        """

    @property
    def shared(self) -> bool:
        """Whether another process that opens `url` sees the same objects."""

    async def create(self, name: str, chunks: Chunks) -> bool:
        """Creates an object, which is durable and whole when this returns True.

        Returns False, with nothing changed, if a durable object of that name exists. If several
        callers create the same name at the same moment, one wins. On an object store this is
        guaranteed only for small content (`cloud_objects`). After an OSError the object may exist
        or not.
        """

    async def read(self, name: str) -> bytes:
        """Returns the content of an object."""

    async def delete(self, names: Iterable[str]) -> None:
        """Deletes the objects with these names; names without an object are ignored."""

    async def names(self, prefix: str = "") -> list[str]:
        """Returns the names of all objects below `prefix`, sorted. `prefix` consists of whole
        segments.

        Objects that are created or deleted during the call may be missing or listed.
        """

    async def missing(self, names: Sequence[str]) -> list[str]:
        """Returns those of `names` that have no object here, although another process has created
        the object.

        Only a directory can lack objects, because another machine may have a different directory at
        the same path.
        """

    async def modified_ms(self, name: str) -> int:
        """Returns when the object was created, in wall-clock milliseconds of the store."""

    async def harden(self) -> None:
        """Makes every visible object durable.

        The creator of a visible object may have died before it made the object durable. Call this
        method before acting on the objects that exist.
        """

    async def sweep(self, before_ms: int) -> None:
        """Deletes unfinished objects of writers that died before `before_ms` (wall clock).

        Does nothing for stores that hide unfinished objects.
        """


def is_name(name: str) -> bool:
    """Whether `name` is a valid name of an object."""
    return all(SEGMENT.match(segment) and segment not in (".", "..") for segment in name.split("/"))


def check_name(name: str) -> str:
    """Returns `name`. Raises ValueError if it is not a valid name of an object."""
    if not is_name(name):
        raise ValueError(
            f"object name {name!r}: expected segments of 1 to 64 of the characters A-Z a-z 0-9 _ "
            ". - joined by slashes"
        )
    return name


async def collect(chunks: Chunks) -> bytes:
    """Returns all chunks joined."""
    return b"".join([chunk async for chunk in chunks])


async def to_the_end(step: Awaitable[bool]) -> bool:
    """Awaits `step`, which must not be abandoned halfway, and returns its result.

    A cancellation is raised only once the step has ended. The reason is that a call in another
    thread cannot be cancelled. If its caller left, the object could appear after all processes had
    agreed that it does not exist.
    """
    future = asyncio.ensure_future(step)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await wait_all([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # The cancellation wins.
        raise cancelled
    return future.result()


_STORES: dict[str, dict[str, tuple[bytes, int]]] = {}
"""Maps a store's name to its objects: the content and creation time (wall clock, ms) of each, by
name.

The objects outlive the jobs of the process, as a disk outlives processes.
"""


class MemoryObjects:
    """An `ObjectStore` in memory, under `name` or `name/prefix`. Other processes do not see its
    objects.
    """

    shared = False

    def __init__(self, host: Host, path: str) -> None:
        store, _, below = path.strip("/").partition("/")
        self._clock = host.clock
        self._objects = _STORES.setdefault(store, {})
        self._below = f"{below}/" if below else ""
        self.url = f"memory://{store}/{below}".rstrip("/")

    async def create(self, name: str, chunks: Chunks) -> bool:
        key = self._key(name)
        if key in self._objects:
            return False
        made = (await collect(chunks), self._clock.wall_ms())
        return self._objects.setdefault(key, made) is made

    async def read(self, name: str) -> bytes:
        return self._get(name)[0]

    async def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._objects.pop(self._key(name), None)

    async def names(self, prefix: str = "") -> list[str]:
        start = self._below + (f"{prefix.rstrip('/')}/" if prefix else "")
        return sorted(key[len(self._below) :] for key in self._objects if key.startswith(start))

    async def missing(self, names: Sequence[str]) -> list[str]:
        return []

    async def modified_ms(self, name: str) -> int:
        return self._get(name)[1]

    async def harden(self) -> None:
        """Does nothing: memory lasts exactly as long as the process."""

    async def sweep(self, before_ms: int) -> None:
        """Does nothing: unfinished objects are never visible."""

    def _key(self, name: str) -> str:
        return self._below + check_name(name)

    def _get(self, name: str) -> tuple[bytes, int]:
        found = self._objects.get(self._key(name))
        if found is None:
            raise FileNotFoundError(f"there is no {name} in {self.url}")
        return found


logger = logging.getLogger(__name__)

ASIDE = "~"
"""Mark in the temporary names of files that are being written. No object's name contains it."""

WRITE_BYTES = 1 << 20
"""Number of bytes collected for one write: enough that switching to a thread costs little."""


class DirectoryObjects:
    """An `ObjectStore` in a directory.

    The directory is created with the first object. Only the owner of the directory has access.
    """

    shared = True

    def __init__(self, host: Host, path: str) -> None:
        self._host = host
        self._fs = host.fs
        self._root = os.path.abspath(path)
        self._made: set[str] = set()
        """Directories that this object has created or found."""
        self.url = "file://" + quote(self._root)

    async def create(self, name: str, chunks: Chunks) -> bool:
        target = self._path(name)
        directory = posixpath.dirname(target)
        aside = f"{target}{ASIDE}{self._host.ids.new('file')}"
        if directory not in self._made:
            await self._make(directory)
        data, last = await _take(chunks)
        if not last:
            return await self._create_large(target, aside, data, chunks)
        try:
            return await self._fs.create(target, data, aside=aside, within=self._root)
        except FileNotFoundError:
            # Deleting the last object of a directory removes the directory. Create it again.
            await self._make(directory)
            return await self._fs.create(target, data, aside=aside, within=self._root)

    async def read(self, name: str) -> bytes:
        path = self._path(name)
        await self._fs.check_inside(path, self._root)
        return await self._fs.read(path)

    async def delete(self, names: Iterable[str]) -> None:
        if paths := [self._path(name) for name in names]:
            await self._fs.remove(paths, within=self._root)

    async def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in (await self._walk(prefix.rstrip("/")))[1] if is_name(name))

    async def missing(self, names: Sequence[str]) -> list[str]:
        stats = await self._fs.stats([self._path(name) for name in names])
        return [name for name, stat in zip(names, stats, strict=True) if stat is None]

    async def modified_ms(self, name: str) -> int:
        return (await self._fs.stat(self._path(name))).modified_ms

    async def harden(self) -> None:
        directories, _ = await self._walk("")
        for directory in directories:
            with suppress(FileNotFoundError):  # The directory was empty, and was removed meanwhile.
                await self._fs.fsync_dir(f"{self._root}/{directory}" if directory else self._root)

    async def sweep(self, before_ms: int) -> None:
        for name in (await self._walk(""))[1]:
            base = posixpath.basename(name)
            path = f"{self._root}/{name}"
            if (
                ASIDE in base
                and is_name(base.partition(ASIDE)[0])
                and (await self._fs.stat(path)).modified_ms < before_ms
            ):
                logger.info("removing %s, which was never finished", path)
                await self._discard(path)

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    async def _make(self, directory: str) -> None:
        """Creates a directory and its parents, durably."""
        try:
            await self._fs.mkdirs(directory, private=True)
        except (FileExistsError, NotADirectoryError) as error:
            what = (
                f"{error.filename or directory} is a file, expected a directory: checkpoints are "
                "kept in many files"
            )
            raise NotADirectoryError(what) from error
        self._made.add(directory)

    async def _create_large(self, target: str, aside: str, data: bytes, chunks: Chunks) -> bool:
        """Creates a large object in several writes: first `data`, then the rest of `chunks`."""
        directory = posixpath.dirname(target)
        await self._fs.check_inside(directory, self._root)
        if await self._fs.exists(target):
            async for _ in chunks:
                pass  # Read the generator to its end: otherwise it would stay open.
            return False
        try:
            try:
                await self._fs.append(aside, data)
            except FileNotFoundError:
                await self._make(directory)
                await self._fs.append(aside, data)
            last = False
            while not last:
                data, last = await _take(chunks)
                await self._fs.append(aside, data, sync=last)
            created = await self._fs.rename_new(aside, target)
        except BaseException:
            await self._discard(aside)
            raise
        if not created:
            await self._discard(aside)
        await self._fs.fsync_dir(directory)
        return created

    async def _walk(self, below: str) -> tuple[list[str], list[str]]:
        """Returns the names of all directories and of all files below a directory, relative to the
        root.
        """
        directories: list[str] = []
        found: list[str] = []
        pending = [below]
        while pending:
            directory = pending.pop()
            path = f"{self._root}/{directory}" if directory else self._root
            try:
                entries = await self._fs.scan(path)
            except (FileNotFoundError, NotADirectoryError):
                continue  # The directory was never created, or it was removed meanwhile.
            await self._fs.check_inside(path, self._root)
            directories.append(directory)
            for name, is_dir in entries:
                (pending if is_dir else found).append(f"{directory}/{name}" if directory else name)
        return directories, found

    async def _discard(self, path: str) -> None:
        try:
            await self._fs.delete(path)
        except OSError as error:
            logger.debug("%s stays behind: %s", path, error)


async def _take(chunks: Chunks) -> tuple[bytes, bool]:
    """Reads chunks until they hold `WRITE_BYTES` or end.

    Returns the bytes, and whether the chunks have ended.
    """
    taken: list[bytes] = []
    size = 0
    async for chunk in chunks:
        taken.append(chunk)
        size += len(chunk)
        if size >= WRITE_BYTES:
            return b"".join(taken), False
    return b"".join(taken), True
