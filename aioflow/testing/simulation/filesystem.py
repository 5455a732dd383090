"""The simulated disk as one process sees it: each operation takes its time, and is noted under the
name of the process.

What an operation does at which of its moments is a generator, whose steps the disk takes one after
the other: between two of them the process may be killed, and others may look.
"""

from __future__ import annotations

import io
import posixpath
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Generator, Sequence

    from aioflow.core.host import FileStat
    from aioflow.testing.simulation.disk import SimDisk, SimFile
    from aioflow.testing.simulation.process import SimMachine, SimProcess

__all__ = ["SimFileSystem"]

T = TypeVar("T")


class SimFileSystem:
    """The disk as one process sees it; a `FileSystem`."""

    def __init__(self, disk: SimDisk, process: SimProcess) -> None:
        self._disk = disk
        self._process = process

    async def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        def call(full: str) -> bytes:
            data = self._disk.file(full).data
            return bytes(data[offset:] if length is None else data[offset : offset + length])

        return await self._do("read", path, call)

    async def write(self, path: str, data: bytes, *, sync: bool = False) -> None:
        await self._write(path, data, sync, empty=True)

    async def append(self, path: str, data: bytes, *, sync: bool = False) -> None:
        await self._write(path, data, sync, empty=False)

    async def _write(self, path: str, data: bytes, sync: bool, *, empty: bool) -> None:
        await self._disk.operate(self._put(_normal(path), data, sync, empty=empty))

    def _put(
        self, full: str, data: bytes, sync: bool, *, empty: bool
    ) -> Generator[None, None, None]:
        disk, machine = self._disk, self._process.machine
        disk.check("write", full, writes=True)
        file = disk.open(machine, full, empty=empty)
        disk.fit(full, file, machine, data)
        cut = disk.split(data)
        disk.append(machine, file, data[:cut])
        if cut < len(data):
            yield
            disk.append(machine, file, data[cut:])
        self._note("write", full, len(data))
        if sync:
            yield
            disk.check("fsync", full)
            disk.sync(full)
            self._note("fsync", full)

    async def fsync(self, path: str) -> None:
        await self._do("fsync", path, self._disk.sync)

    async def fsync_dir(self, path: str) -> None:
        await self._do("fsync_dir", path, self._disk.sync_dir)

    async def rename(self, source: str, target: str) -> None:
        await self._do(
            "rename",
            source,
            lambda full: self._disk.rename(self._process.machine, full, _normal(target)),
        )

    async def rename_new(self, source: str, target: str) -> bool:
        def call(full: str) -> bool:
            self._disk.file(full)
            if self._disk.exists(_normal(target)):
                return False
            self._disk.rename(self._process.machine, full, _normal(target))
            return True

        return await self._do("rename_new", source, call)

    async def delete(self, path: str, *, recursive: bool = False) -> bool:
        return await self._do(
            "delete",
            path,
            lambda full: self._disk.delete(self._process.machine, full, recursive=recursive),
        )

    async def list(self, path: str) -> list[str]:
        return await self._do("list", path, self._disk.list)

    async def scan(self, path: str) -> builtins.list[tuple[str, bool]]:
        disk = self._disk
        return await self._do(
            "list",
            path,
            lambda full: [(name, disk.stat(f"{full}/{name}").is_dir) for name in disk.list(full)],
        )

    async def stat(self, path: str) -> FileStat:
        return await self._do("stat", path, self._disk.stat)

    async def stats(self, paths: Sequence[str]) -> builtins.list[FileStat | None]:
        disk = self._disk
        full = [_normal(path) for path in paths]
        return await self._do(
            "stat", "/", lambda _: [disk.stat(path) if disk.exists(path) else None for path in full]
        )

    async def exists(self, path: str) -> bool:
        return await self._do("exists", path, self._disk.exists)

    async def check_inside(self, path: str, within: str) -> None:
        """There are no links here."""

    async def create(self, path: str, data: bytes, *, aside: str, within: str) -> bool:
        disk, machine, full, beside = (
            self._disk,
            self._process.machine,
            _normal(path),
            _normal(aside),
        )

        def steps() -> Generator[None, None, bool]:
            if disk.exists(full):
                disk.check("fsync_dir", full)
                disk.sync_dir(posixpath.dirname(full))
                return False
            try:
                yield from self._put(beside, data, True, empty=True)
                yield
                disk.check("rename_new", full)
                created = not disk.exists(full)
                if created:
                    disk.rename(machine, beside, full)
            except OSError:
                if disk.exists(beside):
                    disk.delete(machine, beside, recursive=False)
                raise
            self._note("rename_new", full, created)
            yield
            if not created:
                disk.delete(machine, beside, recursive=False)
            disk.check("fsync_dir", full)
            disk.sync_dir(posixpath.dirname(full))
            self._note("fsync_dir", full)
            return created

        return await disk.operate(steps())

    async def remove(self, paths: Sequence[str], *, within: str) -> None:
        disk, machine, top = self._disk, self._process.machine, _normal(within)

        def steps() -> Generator[None, None, None]:
            emptied: dict[str, None] = {}
            for full in map(_normal, paths):
                disk.check("delete", full)
                if disk.delete(machine, full, recursive=False):
                    emptied[posixpath.dirname(full)] = None
                self._note("delete", full)
                yield
            for directory in emptied:
                disk.check("fsync_dir", directory)
                disk.sync_dir(directory)
                self._note("fsync_dir", directory)
                yield
            for directory in emptied:
                while directory != top and not disk.list(directory, missing_ok=True):
                    disk.delete(machine, directory, recursive=False)
                    directory = posixpath.dirname(directory)

        await disk.operate(steps())

    async def mkdirs(self, path: str, *, private: bool = False) -> None:
        await self._do("mkdirs", path, self._disk.mkdirs)

    def open_read(self, path: str) -> BinaryIO:
        return io.BytesIO(bytes(self._disk.file(_normal(path)).data))

    def open_write(self, path: str, *, append: bool = False) -> BinaryIO:
        full = _normal(path)
        self._disk.check("open", full, writes=True)
        file = self._disk.open(self._process.machine, full, empty=not append)
        # A raw file has all of BinaryIO that a writer needs; it is no subclass only by name.
        return cast("BinaryIO", _Writer(self._disk, self._process.machine, full, file))

    async def _do(self, what: str, path: str, call: Callable[[str], T]) -> T:
        full = _normal(path)

        def steps() -> Generator[None, None, T]:
            yield from ()  # There is but one step.
            self._disk.check(what, full)
            result = call(full)
            self._note(what, full)
            return result

        return await self._disk.operate(steps())

    def _note(self, what: str, *details: object) -> None:
        self._disk.loop.note("DISK", self._process.name, what, *details)


class _Writer(io.RawIOBase):
    """An open file that writes through to the page cache, at its end only."""

    def __init__(self, disk: SimDisk, machine: SimMachine, path: str, file: SimFile) -> None:
        super().__init__()
        self._disk = disk
        self._machine = machine
        self._path = path
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        if self.closed:
            raise ValueError("I/O operation on closed file.")
        # Anything with the buffer protocol.
        chunk = bytes(memoryview(data))  # type: ignore[arg-type]
        self._disk.check("write", self._path, writes=True)
        self._disk.fit(self._path, self._file, self._machine, chunk)
        self._disk.append(self._machine, self._file, chunk)
        return len(chunk)

    def tell(self) -> int:
        return len(self._file.data)


def _normal(path: str) -> str:
    return posixpath.normpath(posixpath.join("/", path))
