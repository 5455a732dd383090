"""A simulated disk: only synced data is certain to survive a loss of power.

All machines see one disk, like a shared store. An operation takes effect at some moment before its
caller gets the answer. As with an operation in a thread, cancelling the caller does not stop an
operation that has begun. Written bytes stay in the page cache of the writing machine until `fsync`,
and each new, renamed or deleted name until `fsync_dir`. When a machine loses power, its unsynced
bytes are kept, torn or dropped, and the last of its unsynced changes of names are undone. The seed
decides how many. New directories are durable at once, as on a journalling file system.

Invariant: nothing that was synced is ever lost, and the changes of names by one machine become
durable in the order in which they were made.

`SimFileSystem` is the disk as one process sees it: each operation takes time, and is recorded in
the trace under the name of the process. An operation is a generator, whose steps the disk runs one
after the other. Between two steps the process may be killed, and other processes may read the disk.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import posixpath
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from aioflow.core.host import FileStat
from aioflow.testing.simulation.loop import SimLoop
from aioflow.testing.simulation.process import SimMachine

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Generator, Sequence

    from aioflow.testing.simulation.process import SimProcess

__all__ = ["SimDisk", "SimFile", "SimFileSystem"]

T = TypeVar("T")

OPERATION_S = (1e-4, 1.5e-3)
"""Range of the delay before each step of an operation, in seconds. Half of the operations take
another such delay before the caller gets the answer.
"""

BEGUN_RATE = 0.5
"""Share of the operations that still happen although the caller was cancelled before they began."""

PARTIAL_RATE = 0.1
"""Share of the writes that reach the page cache in two parts. The process may be killed, or another
may read the file, between the two parts.
"""


@dataclass(slots=True, eq=False)
class SimFile:
    """An inode. Readers see the content `data`, and `synced` is the content on the disk. The page
    cache of the machine `writer` holds the difference.
    """

    writer: SimMachine
    modified_ms: int
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass(slots=True)
class _Rename:
    """An unsynced change of a file's name by `machine`. `source` is None if the file was created,
    and `target` is None if it was deleted.
    """

    machine: SimMachine
    source: str | None
    target: str | None
    file: SimFile


class SimDisk:
    """Contents and faults of the disk that all machines of a simulation share.

    The fields are the faults: `slow` multiplies the time of operations, and `full` makes writes
    fail with ENOSPC. `error_rate` is the share of operations that fail with EIO before they have
    done anything. `capacity` is the number of bytes that the disk holds. A write beyond it is cut
    off there and fails with ENOSPC, until files are deleted.
    """

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.slow = 1.0
        self.full = False
        self.capacity: int | None = None
        self.error_rate = 0.0
        self._rng = loop.stream("disk")
        self._faults = loop.stream("disk faults")
        self._names: dict[str, SimFile] = {}
        self._durable: dict[str, SimFile] = {}
        self._pending: list[_Rename] = []
        self._dirs: dict[str, None] = {"/": None}

    # Operations on whole files and names; each is atomic, `SimFileSystem` does the waiting.

    def operate(self, steps: Generator[None, None, T]) -> asyncio.Future[T]:
        """Runs the generator `steps` step by step, each step after a delay. Returns a future with
        the return value of the generator.

        The process may be killed before any step, or between the last step and the answer. The
        caller cannot distinguish these cases.
        """
        result: asyncio.Future[T] = self.loop.create_future()
        self.loop.call_later(self._delay_s(), self._begin, steps, result)
        return result

    def _delay_s(self) -> float:
        return self._rng.uniform(*OPERATION_S) * self.slow

    def _begin(self, steps: Generator[None, None, T], result: asyncio.Future[T]) -> None:
        if result.cancelled() and self._rng.random() >= BEGUN_RATE:
            steps.close()
        else:
            self._advance(steps, result)

    def _advance(self, steps: Generator[None, None, T], result: asyncio.Future[T]) -> None:
        try:
            next(steps)
        except StopIteration as end:
            if self._rng.random() < 0.5:
                self.loop.call_later(self._delay_s(), _settle, result, end.value)
            else:
                _settle(result, end.value)
        except Exception as error:  # noqa: BLE001  # Raised where the operation is awaited.
            if not result.done():
                result.set_exception(error)
        else:
            self.loop.call_later(self._delay_s(), self._advance, steps, result)

    def check(self, what: str, path: str, *, writes: bool = False) -> None:
        """Raises the OSError that the current faults ask for, if any."""
        if writes and self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if self.error_rate and self._faults.random() < self.error_rate:
            self.loop.note("EIO", what, path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    @property
    def used(self) -> int:
        """Total size of all files that have a name, in bytes."""
        return sum(len(file.data) for file in self._names.values())

    def fit(self, path: str, file: SimFile, machine: SimMachine, data: bytes) -> None:
        """Does nothing if `data` fits. Otherwise writes the part that fits, and raises ENOSPC."""
        if self.capacity is None or (room := self.capacity - self.used) >= len(data):
            return
        self.append(machine, file, data[: max(0, room)])
        self.loop.note("ENOSPC", path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def split(self, data: bytes) -> int:
        """Returns how many bytes of a write reach the page cache in the first step of the write.
        In most cases these are all bytes.
        """
        if len(data) > 1 and self._rng.random() < PARTIAL_RATE:
            return self._rng.randrange(1, len(data))
        return len(data)

    def file(self, path: str) -> SimFile:
        """Returns the file of this path."""
        found = self._names.get(path)
        if found is None:
            if path in self._dirs:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            raise _missing(path)
        return found

    def open(self, machine: SimMachine, path: str, *, empty: bool) -> SimFile:
        """Returns the file of this path for writing. Creates the file if it is missing, and with
        `empty` removes its content.
        """
        if path not in self._names:
            self._check_parent(path)
            if path in self._dirs:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            made = self._names[path] = SimFile(machine, self.loop.wall_ms())
            self._pending.append(_Rename(machine, None, path, made))
        file = self._names[path]
        if empty:
            file.data = bytearray()
        self._changed(machine, file)
        return file

    def append(self, machine: SimMachine, file: SimFile, data: bytes) -> None:
        """Adds bytes to the page cache of `machine`."""
        file.data += data
        self._changed(machine, file)

    def sync(self, path: str) -> None:
        """Makes the content of a file durable."""
        file = self.file(path)
        file.synced = bytes(file.data)

    def sync_dir(self, path: str) -> None:
        """Makes the names in a directory durable."""
        if path not in self._dirs:
            raise _missing(path)
        kept = []
        for change in self._pending:
            if path in (_parent(change.source), _parent(change.target)):
                _apply(self._durable, change)
            else:
                kept.append(change)
        self._pending = kept

    def rename(self, machine: SimMachine, source: str, target: str) -> None:
        """Renames a file, or a directory with all its content."""
        self._check_parent(target)
        if source in self._dirs:
            if target in self._names or self.list(target, missing_ok=True):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), target)
            for path in [path for path in self._dirs if _within(path, source)]:
                del self._dirs[path]
                self._dirs[target + path[len(source) :]] = None
            for path in [path for path in self._names if _within(path, source)]:
                self._change(machine, path, target + path[len(source) :])
            return
        self.file(source)
        if target in self._dirs:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
        self._change(machine, source, target)

    def delete(self, machine: SimMachine, path: str, *, recursive: bool) -> bool:
        """Removes a name, or a tree of names. Returns False if there is no such name."""
        if path in self._names:
            self._change(machine, path, None)
            return True
        if path not in self._dirs:
            return False
        if not recursive and self.list(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        for name in [name for name in self._names if _within(name, path)]:
            self._change(machine, name, None)
        for name in [name for name in self._dirs if _within(name, path)]:
            del self._dirs[name]
        return True

    def list(self, path: str, *, missing_ok: bool = False) -> list[str]:
        """Returns the names in a directory, sorted."""
        if path in self._names:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if path not in self._dirs and not missing_ok:
            raise _missing(path)
        return sorted(
            posixpath.basename(name)
            for names in (self._names, self._dirs)
            for name in names
            if _parent(name) == path
        )

    def mkdirs(self, path: str) -> None:
        """Makes a directory and its missing parent directories."""
        missing = []
        while path not in self._dirs:
            if path in self._names:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            missing.append(path)
            path = posixpath.dirname(path)
        for made in reversed(missing):
            self._dirs[made] = None

    def stat(self, path: str) -> FileStat:
        """Returns the size, the modification time and the kind (file or directory) of a path."""
        if path in self._dirs:
            return FileStat(0, 0, True)
        file = self.file(path)
        return FileStat(len(file.data), file.modified_ms, False)

    def exists(self, path: str) -> bool:
        """Returns whether a file or directory has this path."""
        return path in self._names or path in self._dirs

    def power_loss(self, machine: SimMachine) -> None:
        """Drops random parts of the changes that were only in the memory of `machine`: changes of
        files' content and of names.
        """
        rng = self._faults
        mine = [change for change in self._pending if change.machine is machine]
        kept = mine[: rng.randrange(len(mine) + 1)] if mine else []
        self._pending = [change for change in self._pending if change.machine is not machine]
        for change in kept:
            _apply(self._durable, change)
        names = dict(self._durable)
        for change in self._pending:
            _apply(names, change)
        # A file without a name may still be open in one process, so all files that have or had a
        # name are examined.
        for file in dict.fromkeys([*self._names.values(), *names.values()]):
            if file.writer is machine and file.data != file.synced:
                file.data = bytearray(self._torn(file))
                file.synced = bytes(file.data)
        self._names = names
        # A name may be restored from the platter although its directory has been removed since.
        for path in names:
            self.mkdirs(posixpath.dirname(path))

    def _torn(self, file: SimFile) -> bytes:
        """Returns a possible content of a file after a power loss: the synced bytes with none, some
        or all of the unsynced bytes.
        """
        rng, data, synced = self._faults, bytes(file.data), file.synced
        choice = rng.randrange(3)
        if choice == 0:
            return synced
        if choice == 1:
            return data
        start = len(synced) if data.startswith(synced) else 0
        return data[: rng.randrange(start, len(data) + 1)]

    def _change(self, machine: SimMachine, source: str, target: str | None) -> None:
        change = _Rename(machine, source, target, self._names[source])
        _apply(self._names, change)
        self._pending.append(change)

    def _changed(self, machine: SimMachine, file: SimFile) -> None:
        file.writer = machine
        file.modified_ms = self.loop.wall_ms()

    def _check_parent(self, path: str) -> None:
        if posixpath.dirname(path) not in self._dirs:
            raise _missing(posixpath.dirname(path))


def _settle(result: asyncio.Future[T], value: T) -> None:
    if not result.done():
        result.set_result(value)


def _apply(names: dict[str, SimFile], change: _Rename) -> None:
    """Applies the creation, renaming or deletion of a file to `names`, which maps paths to files.

    The old path is removed only if it still leads to the file.
    """
    if change.source is not None and names.get(change.source) is change.file:
        del names[change.source]
    if change.target is not None:
        names[change.target] = change.file


def _parent(path: str | None) -> str | None:
    return None if path is None or path == "/" else path.rpartition("/")[0] or "/"


def _within(path: str, top: str) -> bool:
    return path == top or path.startswith(top.rstrip("/") + "/")


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


class SimFileSystem:
    """The disk as one process sees it. Implements `FileSystem`."""

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
        """Does nothing: the simulated disk has no symbolic links."""

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

    async def _do(self, what: str, path: str, call: Callable[[str], T]) -> T:
        full = _normal(path)

        def steps() -> Generator[None, None, T]:
            yield from ()  # There is only one step.
            self._disk.check(what, full)
            result = call(full)
            self._note(what, full)
            return result

        return await self._disk.operate(steps())

    def _note(self, what: str, *details: object) -> None:
        self._disk.loop.note("DISK", self._process.name, what, *details)


def _normal(path: str) -> str:
    return posixpath.normpath(posixpath.join("/", path))
