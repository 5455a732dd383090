"""Files of the operating system.

Part of `SystemHost`. All calls run on the host's thread pool, except the two that return a file
handle.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

from aioflow.core.host import FileStat

if TYPE_CHECKING:
    import builtins

    from aioflow.core.host import Host

__all__ = [
    "SystemFileSystem",
    "append_durably",
    "check_inside",
    "create_file",
    "delete_path",
    "fsync_path",
    "make_directories",
    "put_file",
    "remove_files",
    "rename_new",
]


class SystemFileSystem:
    """The `FileSystem` of the real machine."""

    __slots__ = ("_host",)

    def __init__(self, host: Host) -> None:
        self._host = host

    async def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        def call() -> bytes:
            with open(path, "rb") as file:
                file.seek(offset)
                return file.read(-1 if length is None else length)

        return await self._host.blocking(call)

    async def write(self, path: str, data: bytes, *, sync: bool = False) -> None:
        await self._host.blocking(put_file, path, "wb", data, sync)

    async def append(self, path: str, data: bytes, *, sync: bool = False) -> None:
        if sync and hasattr(os, "O_DSYNC"):
            await self._host.blocking(append_durably, path, data)
        else:
            await self._host.blocking(put_file, path, "ab", data, sync)

    async def fsync(self, path: str) -> None:
        await self._host.blocking(fsync_path, path)

    async def fsync_dir(self, path: str) -> None:
        await self._host.blocking(fsync_path, path)

    async def rename(self, source: str, target: str) -> None:
        await self._host.blocking(os.replace, source, target)

    async def rename_new(self, source: str, target: str) -> bool:
        return await self._host.blocking(rename_new, source, target)

    async def delete(self, path: str, *, recursive: bool = False) -> bool:
        return await self._host.blocking(delete_path, path, recursive)

    async def create(self, path: str, data: bytes, *, aside: str, within: str) -> bool:
        return await self._host.blocking(create_file, path, data, aside, within)

    async def remove(self, paths: Sequence[str], *, within: str) -> None:
        await self._host.blocking(remove_files, paths, within)

    async def check_inside(self, path: str, within: str) -> None:
        await self._host.blocking(check_inside, path, within)

    async def list(self, path: str) -> list[str]:
        return sorted(await self._host.blocking(os.listdir, path))

    async def scan(self, path: str) -> builtins.list[tuple[str, bool]]:
        def call() -> builtins.list[tuple[str, bool]]:
            with os.scandir(path) as entries:
                return sorted((entry.name, entry.is_dir()) for entry in entries)

        return await self._host.blocking(call)

    async def stat(self, path: str) -> FileStat:
        return await self._host.blocking(_stat, path)

    async def stats(self, paths: Sequence[str]) -> builtins.list[FileStat | None]:
        def call() -> builtins.list[FileStat | None]:
            return [_stat_of_what_is_there(path) for path in paths]

        return await self._host.blocking(call)

    async def exists(self, path: str) -> bool:
        return await self._host.blocking(os.path.exists, path)

    async def mkdirs(self, path: str, *, private: bool = False) -> None:
        await self._host.blocking(make_directories, path, 0o700 if private else 0o777)

    def open_read(self, path: str) -> BinaryIO:
        return open(path, "rb")


# Functions that make more than one system call. Each of them blocks.


def put_file(path: str, mode: str, data: bytes, sync: bool) -> None:
    """Writes `data` to a file. `mode` is the mode in which the file is opened, for appending or
    replacing.
    """
    with open(path, mode) as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def append_durably(path: str, data: bytes) -> None:
    """Appends `data` to a file, and returns when the data is on disk. Needs O_DSYNC."""
    # With O_DSYNC the write itself syncs. `open` and `fsync` would make five more system calls.
    # After each of them this thread waits for the GIL, if the event loop is busy.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_DSYNC
    descriptor = os.open(path, flags, 0o666)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)


def fsync_path(path: str) -> None:
    """Makes a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_new(source: str, target: str) -> bool:
    """Moves a file to a free name. Returns False if the name is in use."""
    # Only `link` creates a name portably and fails if the name exists. A crash before the old name
    # is removed leaves two names of one whole file. The caller then calls this again.
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        if not os.path.samefile(source, target):
            return False
    os.unlink(source)
    return True


def create_file(path: str, data: bytes, aside: str, within: str) -> bool:
    """Creates the file `path` atomically and durably. Returns False if the name exists already.

    The data is written to the file `aside` first, which is then renamed.
    """
    directory = os.path.dirname(path)
    check_inside(directory, within)
    if os.path.exists(path):
        fsync_path(directory)
        return False
    try:
        put_file(aside, "wb", data, True)
        created = rename_new(aside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)
        raise
    if not created:
        os.unlink(aside)
    fsync_path(directory)
    return created


def remove_files(paths: Sequence[str], within: str) -> None:
    """Removes the files `paths`, and then the empty directories below `within`, durably."""
    emptied: dict[str, None] = {}
    for path in paths:
        directory = os.path.dirname(path)
        if directory not in emptied:
            check_inside(directory, within)
        if delete_path(path, recursive=False):
            emptied[directory] = None
    for directory in emptied:
        fsync_path(directory)
    for directory in emptied:
        with suppress(OSError):  # A directory is not empty.
            while directory != within:
                os.rmdir(directory)
                directory = os.path.dirname(directory)


def check_inside(path: str, within: str) -> None:
    """Raises PermissionError if symbolic links lead `path` out of the directory `within`."""
    real, root = os.path.realpath(path), os.path.realpath(within)
    if real != root and not real.startswith(root.rstrip("/") + "/"):
        raise PermissionError(
            f"{path} leads to {real} by a symbolic link, expected a place below {root}: remove "
            "the link"
        )


def _stat(path: str) -> FileStat:
    status = os.stat(path)
    is_dir = stat.S_ISDIR(status.st_mode)
    return FileStat(
        status.st_size,
        status.st_mtime_ns // 1_000_000,
        is_dir,
        (status.st_dev, status.st_ino) if is_dir else None,
    )


def _stat_of_what_is_there(path: str) -> FileStat | None:
    try:
        return _stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return None


def make_directories(path: str, mode: int) -> None:
    """Creates a directory and its parents with `mode`, durably."""
    # Not os.makedirs, whose mode is for the last directory only.
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for made in reversed(missing):
        try:
            os.mkdir(made, mode)
        except FileExistsError:
            if not os.path.isdir(made):
                raise
        else:
            fsync_path(os.path.dirname(made) or os.curdir)


def delete_path(path: str, recursive: bool) -> bool:
    """Removes a file, an empty directory or, if `recursive`, a whole tree. Returns False if `path`
    did not exist.
    """
    try:
        if not os.path.isdir(path) or os.path.islink(path):
            os.remove(path)
        elif recursive:
            import shutil  # Imported late: it loads three compressors.

            shutil.rmtree(path)
        else:
            os.rmdir(path)
    except FileNotFoundError:
        return False
    return True
