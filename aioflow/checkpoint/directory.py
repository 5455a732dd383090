"""Objects as files of a local directory, or of one that machines share.

A file is written beside its place under a name that no object can have, fsynced, moved to its name if nothing has that, and its directory
is fsynced: a reader sees the whole object or none, whatever is killed or loses power.
"""

from __future__ import annotations

import logging
import os.path
import posixpath
from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import quote

from aioflow.checkpoint.objects import Chunks, check_name, is_name

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["DirectoryObjects"]

logger = logging.getLogger(__name__)

ASIDE = "~"
"""Stands in the names of files that are being written, and in no name of an object."""

WRITE_BYTES = 1 << 20
"""How much is collected for one write: large enough that the way to the thread and back does not count."""


class DirectoryObjects:
    """An `ObjectStore` in a directory, which is made when the first object is. Directories are for their owner alone."""

    shared = True

    def __init__(self, host: Host, path: str) -> None:
        self._host = host
        self._fs = host.fs
        self._root = os.path.abspath(path)
        self._real_root: str | None = None
        self._made: set[str] = set()
        """Directories that were there when we looked."""
        self.url = "file://" + quote(self._root)

    async def create(self, name: str, chunks: Chunks) -> bool:
        target = self._path(name)
        directory = posixpath.dirname(target)
        aside = f"{target}{ASIDE}{self._host.ids.new('file')}"
        if directory in self._made:
            await self._check_inside(directory)
        else:
            await self._make(directory)
        if await self._fs.exists(target):
            return False
        try:
            await self._write(aside, chunks)
            created = await self._fs.rename_new(aside, target)
        except BaseException:
            await self._discard(aside)
            raise
        if not created:
            await self._discard(aside)
            return False
        await self._fs.fsync_dir(directory)
        return True

    async def read(self, name: str) -> bytes:
        path = self._path(name)
        await self._check_inside(path)
        return await self._fs.read(path)

    async def delete(self, names: Iterable[str]) -> None:
        emptied: dict[str, None] = {}
        for name in names:
            path = self._path(name)
            directory = posixpath.dirname(path)
            if directory not in emptied:
                await self._check_inside(directory)
            if await self._fs.delete(path):
                emptied[directory] = None
        for directory in emptied:
            await self._fs.fsync_dir(directory)
        for directory in emptied:
            await self._remove_empty(directory)

    async def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in await self._walk(prefix.rstrip("/")) if is_name(name))

    async def modified_ms(self, name: str) -> int:
        return (await self._fs.stat(self._path(name))).modified_ms

    async def sweep(self, before_ms: int) -> None:
        for name in await self._walk(""):
            base = posixpath.basename(name)
            path = f"{self._root}/{name}"
            if ASIDE in base and is_name(base.partition(ASIDE)[0]) and (await self._fs.stat(path)).modified_ms < before_ms:
                logger.info("removing %s, which was never finished", path)
                await self._discard(path)

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    async def _make(self, directory: str) -> None:
        """Make a directory and those above it, and their names durable."""
        missing = []
        path = directory
        while path != "/" and not await self._fs.exists(path):
            missing.append(path)
            path = posixpath.dirname(path)
        if missing:
            try:
                await self._fs.mkdirs(directory, private=True)
            except (FileExistsError, NotADirectoryError) as error:
                what = f"{error.filename or directory} is a file, expected a directory: checkpoints are kept in many files"
                raise NotADirectoryError(what) from error
            for made in reversed(missing):
                await self._fs.fsync_dir(posixpath.dirname(made))
        await self._check_inside(directory)
        self._made.add(directory)

    async def _write(self, path: str, chunks: Chunks) -> None:
        pending: list[bytes] = []
        size = 0
        async for chunk in chunks:
            pending.append(chunk)
            size += len(chunk)
            if size >= WRITE_BYTES:
                await self._append(path, b"".join(pending))
                pending, size = [], 0
        # Also when nothing is left: an empty object is a file too.
        await self._append(path, b"".join(pending), sync=True)

    async def _append(self, path: str, data: bytes, *, sync: bool = False) -> None:
        try:
            await self._fs.append(path, data, sync=sync)
        except FileNotFoundError:
            # Whoever deleted the last object of a directory removed it too. From now on it has one.
            await self._make(posixpath.dirname(path))
            await self._fs.append(path, data, sync=sync)

    async def _walk(self, below: str) -> list[str]:
        """Names of all files at or below a directory, relative to the root."""
        found: list[str] = []
        pending = [below]
        while pending:
            directory = pending.pop()
            path = f"{self._root}/{directory}" if directory else self._root
            try:
                entries = await self._fs.scan(path)
            except FileNotFoundError:
                continue  # Nothing was created yet, or somebody removed it meanwhile.
            except NotADirectoryError:
                found.append(directory)
                continue
            await self._check_inside(path)
            for name, is_dir in entries:
                (pending if is_dir else found).append(f"{directory}/{name}" if directory else name)
        return found

    async def _check_inside(self, path: str) -> None:
        """Refuse a path that symbolic links lead out of the root. The root itself may be one."""
        if self._real_root is None:
            self._real_root = await self._fs.real_path(self._root)
        real = await self._fs.real_path(path)
        if real != self._real_root and not real.startswith(self._real_root.rstrip("/") + "/"):
            raise PermissionError(f"{path} leads to {real} by a symbolic link, expected a place below {self._real_root}: remove the link")

    async def _remove_empty(self, directory: str) -> None:
        """Remove directories that hold nothing any more, up to the root, which stays."""
        while directory != self._root:
            try:
                await self._fs.delete(directory)
            except OSError:
                return  # Something is in it.
            directory = posixpath.dirname(directory)

    async def _discard(self, path: str) -> None:
        try:
            await self._fs.delete(path)
        except OSError as error:
            logger.debug("%s stays behind: %s", path, error)
