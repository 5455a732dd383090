"""The file access that sources and sinks share: to the files of this machine, or of an object
store.

A path that is the URL of an object store, such as `s3://bucket/prefix`, refers to the store. All
other paths refer to files of the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO, Protocol

from aioflow.io.files.patterns import is_object_url

if TYPE_CHECKING:
    import builtins
    from collections.abc import Sequence

    from aioflow.core.host import FileStat, Host

__all__ = ["FileAccess", "file_access"]


class FileAccess(Protocol):
    """The part of the `FileSystem` interface that sources and sinks of files use. The access to
    object stores implements it too.

    In an object store `append` begins or continues an upload. The object does not exist before
    `fsync`, which completes the upload and allows no more appends.
    """

    async def list(self, path: str) -> list[str]:
        """Returns the names of the entries of a directory, sorted."""

    async def stats(self, paths: Sequence[str]) -> builtins.list[FileStat | None]:
        """Returns the size and the modification time of the file at each path, or None if there is
        no file.
        """

    async def exists(self, path: str) -> bool:
        """Returns whether a file or directory has this path."""

    async def append(self, path: str, data: bytes) -> None:
        """Appends `data` to the file, which is created if it is missing."""

    async def fsync(self, path: str) -> None:
        """Makes the content of a file durable."""

    async def fsync_dir(self, path: str) -> None:
        """Makes the entries of a directory durable."""

    async def rename_new(self, source: str, target: str) -> bool:
        """Moves a file to an unused name. Returns False, and changes nothing, if the name is in
        use.

        An object store cannot check whether the name is in use. There, callers must not use a name
        twice.
        """

    async def delete(self, path: str) -> bool:
        """Removes a file, complete or unfinished. Returns False if there was none."""

    def open_read(self, path: str) -> BinaryIO:
        """Opens a file for reading. This is a blocking call, so it is only made inside a function
        that `Host.blocking` runs.
        """


def file_access(host: Host, path: str) -> FileAccess:
    """Returns the access to the files at `path`: those of an object store for its URL, otherwise
    those of the host.
    """
    if not is_object_url(path):
        return host.fs
    from aioflow.io.files.object_files import ObjectFiles  # Its package is an extra.

    return ObjectFiles(host)
