"""Stores objects as files in a local directory, or in one that several machines share.

A file is written first under a temporary name that no object can have, and fsynced. It is then
renamed if its final name is free, and its directory is fsynced. So a reader sees the whole object
or none, even after a kill or a loss of power.
"""

from __future__ import annotations

import logging
import os.path
import posixpath
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import quote

from aioflow.checkpoint.objects import Chunks, check_name, is_name

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["DirectoryObjects"]

logger = logging.getLogger(__name__)

ASIDE = "~"
"""Mark in the temporary names of files that are being written. No object's name contains it."""

WRITE_BYTES = 1 << 20
"""Number of bytes collected for one write: so large that the thread switch costs little."""


class DirectoryObjects:
    """An `ObjectStore` in a directory.

    The directory is created with the first object. Only its owner has access.
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
                continue  # Nothing was created below it, or it was removed meanwhile.
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
