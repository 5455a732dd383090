"""Local copies of state as files: a task that is restored on the same machine reads them before the
store.

Each process has a directory of its own for a job, whose name contains the process and the job. So a
process that replaces a killed process finds the copies of the killed one. Copies need no fsync:
`LocalState` compares each copy with the digest in the checkpoint, and reads the store if a copy is
damaged. A copy that cannot be written is left out.

The directory is removed when the job ends in this process. Directories of killed processes are
removed once a checkpoint has completed: later restores do not need them.
"""

from __future__ import annotations

import hashlib
import logging
import posixpath
from typing import TYPE_CHECKING

from aioflow.core.errors import RestoreError
from aioflow.core.host import ProcessIdentity

if TYPE_CHECKING:
    from aioflow.checkpoint.state_files import Copy
    from aioflow.core.host import Host

__all__ = ["LOCAL_FILE_BYTES_MAX", "LocalFiles"]

logger = logging.getLogger(__name__)

LOCAL_FILE_BYTES_MAX = 16 << 30
"""Maximum number of bytes that a process keeps on its disk for a job."""

PREFIX = "aioflow-local"

WRITE_BYTES = 1 << 20
"""Number of bytes collected for one write."""


class LocalFiles:
    """Copies of state in a directory below `base`. The first copy creates this directory."""

    def __init__(self, host: Host, base: str, job: str) -> None:
        """Keeps the copies below the directory `base`; "" stands for the machine's directory of
        temporary files.

        `job` identifies the job among all jobs that use `base`, also after a restart.
        """
        self._host = host
        self._base = base = base or _temporary_directory()
        self._job = hashlib.blake2b(job.encode(), digest_size=8).hexdigest()
        name = f"{PREFIX}_{host.procs.identity().spell()}_{self._job}_{host.ids.new('local')}"
        self._own = posixpath.join(base, name)
        self._is_made = False
        self._is_broken = False
        """Whether a failure to write has been logged. Only the first failure is logged."""
        self._others: list[str] | None = None
        """Directories of other processes for this job; None if they were not looked up since the
        last checkpoint."""
        self._is_sweep_due = False
        self._is_swept = False
        """Whether old directories were removed since the last restore."""
        self._dropped: list[str] = []
        self._copies = 0

    def begin(self) -> Copy:
        """Returns a new, empty copy."""
        self._copies += 1
        return _FileCopy(self, f"{self._own}/part-{self._copies}")

    async def append(self, path: str, content: bytes) -> bool:
        """Appends `content` to a file of this process. Returns whether this worked."""
        try:
            if not self._is_made:
                await self._host.fs.mkdirs(self._own, private=True)
                self._is_made = True
            await self._host.fs.append(path, content)
        except OSError as error:
            self._failed(error)
            return False
        return True

    async def rename(self, path: str, name: str) -> str | None:
        """Renames the file `path` to the name of its state file. Returns the new path, or None if
        this failed."""
        target = f"{self._own}/{_plain(name)}"
        try:
            await self._host.fs.rename(path, target)
        except OSError as error:
            self._failed(error)
            return None
        return target

    async def read(self, path: str) -> bytes:
        """Returns the content of a file. Raises RestoreError if the file cannot be read."""
        try:
            return await self._host.fs.read(path)
        except OSError as error:
            raise RestoreError(f"the local copy {path} cannot be read: {error}") from error

    def drop(self, path: str) -> None:
        """Marks a file, which the next `clean` removes."""
        self._dropped.append(path)

    async def find(self, name: str) -> Copy | None:
        """Returns the copy of file `name` that another process has left here, or None."""
        if self._others is None:
            self._others = await self._found()
        for directory in self._others:
            path = f"{directory}/{_plain(name)}"
            if await self._host.fs.exists(path):
                return _FileCopy(self, path)
        return None

    async def clean(self) -> None:
        """Removes dropped copies, and old directories of processes that have ended."""
        dropped, self._dropped = self._dropped, []
        for path in dropped:
            await self._delete(path)
        if self._is_sweep_due:
            self._is_sweep_due, self._is_swept = False, True
            for directory in await self._found():
                owner = ProcessIdentity.parse(posixpath.basename(directory).split("_")[1])
                if owner is not None and self._host.procs.has_ended(owner):
                    await self._delete(directory)

    def completed(self) -> None:
        """Notes that a checkpoint completed: copies of processes that have ended are no longer
        needed.
        """
        if self._others is not None or not self._is_swept:
            self._others = None
            self._is_sweep_due = True

    async def close(self) -> None:
        """Removes the directory of this process, and the directories of processes that have
        ended."""
        if self._is_made:
            await self._delete(self._own)
        await self.clean()

    async def _found(self) -> list[str]:
        """Returns the directories of other processes for this job."""
        try:
            names = await self._host.fs.list(self._base)
        except OSError:
            return []  # The directory does not exist yet.
        found = []
        for name in names:
            parts = name.split("_")
            if len(parts) == 4 and parts[0] == PREFIX and parts[2] == self._job:
                found.append(posixpath.join(self._base, name))
        return [directory for directory in found if directory != self._own]

    async def _delete(self, path: str) -> None:
        try:
            await self._host.fs.delete(path, recursive=True)
        except OSError as error:
            logger.debug("%s cannot be removed: %s", path, error)

    def _failed(self, error: OSError) -> None:
        if not self._is_broken:
            self._is_broken = True
            logger.warning(
                "local copies of state cannot be written below %s, so a restore may read more from "
                "the store: %s",
                self._base,
                error,
            )


class _FileCopy:
    """A `Copy` in a file of `LocalFiles`."""

    __slots__ = ("_files", "_gathered", "_path", "_size")

    def __init__(self, files: LocalFiles, path: str) -> None:
        self._files = files
        self._path: str | None = path
        """Path of the file; None if the copy could not be written."""
        self._gathered: list[bytes] = []
        self._size = 0

    async def add(self, chunk: bytes) -> None:
        self._gathered.append(chunk)
        self._size += len(chunk)
        if self._size >= WRITE_BYTES:
            await self._write()

    async def name(self, name: str) -> bool:
        await self._write()
        if self._path is not None:
            self._path = await self._files.rename(self._path, name)
        return self._path is not None

    async def read(self) -> bytes:
        if self._path is None:
            raise RestoreError("a local copy of state was not written")
        return await self._files.read(self._path)

    def drop(self) -> None:
        if self._path is not None:
            self._files.drop(self._path)
            self._path = None

    async def _write(self) -> None:
        content, self._gathered, self._size = b"".join(self._gathered), [], 0
        if self._path is not None and not await self._files.append(self._path, content):
            self.drop()


def _temporary_directory() -> str:
    import tempfile  # Here: it loads three compressors.

    return tempfile.gettempdir()


def _plain(name: str) -> str:
    """Returns a plain file name for the state file `name`, which may be a URL."""
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
