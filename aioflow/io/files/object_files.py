"""Accesses files in S3 and compatible stores, Google Cloud Storage or Azure: objects are read by
ranges and written by uploads.

Needs the extra `[s3]` (obstore). Credentials, region and endpoint come from the environment, as for
the store's own tools. The blocking calls of obstore run in threads of the host, for the reason that
`checkpoint.cloud_objects` gives.

With obstore, a process cannot complete an upload that another process has begun. So an upload ends
at the barrier, as a hidden object, and the commit copies this object to its visible name. A copy
within a store is one request, and readers see the whole object or none.

Invariant: everything that this module leaves behind is visible in a listing of its directory, with
one exception. If the process is killed during an upload above `UPLOAD_BYTES`, the store keeps the
hidden parts of the upload. A lifecycle rule of the bucket must remove them.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from aioflow.core.contexts import contextmanager
from aioflow.core.host import FileStat
from aioflow.io.files.patterns import fixed_part, has_pattern, is_matched

if TYPE_CHECKING:
    import builtins

    from aioflow.core.host import Host

__all__ = ["ObjectFiles", "StoreError"]

UPLOAD_BYTES = 8 << 20
"""Content up to this size is uploaded in one request, larger content in parts of this size."""

UPLOADS_AT_ONCE = 4
"""Maximum number of parts of one upload that are sent at the same time. This bounds the memory of
the upload.
"""

READ_BYTES = 2 << 20
"""Number of bytes that one request reads from an object."""

RETRY: Any = {"max_retries": 10, "retry_timeout": timedelta(seconds=30)}
"""Retries within obstore. After these the call fails, and a restart of the job tries again."""

T = TypeVar("T")


class StoreError(ConnectionError):
    """A request that an object store did not answer, or refused."""


@contextmanager
def _named(what: str, url: str) -> Iterator[None]:
    """Within the block, replaces an error of the store by an OSError that names `url` and the
    failed action `what`.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "there is no such object", url) from error
    except BaseError as error:
        # The rest of the message is the body of the answer, or debug output of Rust.
        reason = str(error).partition("\n")[0].partition(": <?xml")[0]
        raise StoreError(
            errno.EIO,
            f"the object store did not {what}: {reason}{_advice(error, reason, url)}",
            url,
        ) from error


def _advice(error: BaseError, reason: str, url: str) -> str:
    bucket = url.partition("://")[2].partition("/")[0]
    if "404 Not Found" in reason:
        return f"; expected a bucket {bucket} at the endpoint of the environment"
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
        return f"; expected credentials in the environment that have rights to {bucket}"
    return ""


class ObjectFiles:
    """A `FileAccess` to object stores. Paths are URLs, such as `s3://bucket/prefix/name`.

    Stores have no real directories: a directory exists while an object is below it.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._uploads: dict[str, Any] = {}

    # Reading.

    async def find(self, url: str) -> dict[str, FileStat]:
        """Returns the objects that `url` refers to, sorted: one object, the objects in a directory,
        or all that match a pattern.
        """
        return await self._call("list", url, self._find, url)

    def _find(self, url: str) -> dict[str, FileStat]:
        itself = self._stat(url)
        if itself is not None:
            return {url: itself}
        is_pattern = has_pattern(url)
        directory = fixed_part(url) if is_pattern else url
        below = url[len(directory) :].strip("/").split("/") if is_pattern else ["*"]
        store, key = _place(directory)
        metas = (
            obstore.list_with_delimiter(store, key or None)["objects"]
            if len(below) == 1
            else [meta for some in obstore.list(store, key or None) for meta in some]
        )
        found = {}
        for meta in sorted(metas, key=lambda meta: meta["path"]):
            name = meta["path"][len(key) :].strip("/")
            if name and is_matched(name.split("/"), below):
                found[f"{directory.rstrip('/')}/{name}"] = _stat_of(meta)
        return found

    async def list(self, path: str) -> list[str]:
        def names() -> list[str]:
            store, key = _place(path)
            metas = obstore.list_with_delimiter(store, key or None)["objects"]
            return sorted(meta["path"][len(key) :].strip("/") for meta in metas)

        return await self._call("list", path, names)

    async def stats(self, paths: Sequence[str]) -> builtins.list[FileStat | None]:
        return [await self._call("look at", path, self._stat, path) for path in paths]

    async def exists(self, path: str) -> bool:
        def look() -> bool:
            store, key = _place(path)
            return self._stat(path) is not None or any(
                len(some) > 0 for some in obstore.list(store, key or None, chunk_size=1)
            )

        return await self._call("look at", path, look)

    @staticmethod
    def _stat(url: str) -> FileStat | None:
        store, key = _place(url)
        try:
            return _stat_of(obstore.head(store, key)) if key else None
        except FileNotFoundError:
            return None

    def open_read(self, path: str) -> BinaryIO:
        store, key = _place(path)
        with _named("open", path):
            opened = _Object(store, key, path)
        return cast("BinaryIO", io.BufferedReader(opened, READ_BYTES))

    # Writing.

    async def append(self, path: str, data: bytes) -> None:
        upload = self._uploads.get(path)
        if upload is None:
            store, key = _place(path)
            upload = self._uploads[path] = obstore.open_writer(
                store, key, buffer_size=UPLOAD_BYTES, max_concurrency=UPLOADS_AT_ONCE
            )
        await self._call("take", path, upload.write, data)

    async def fsync(self, path: str) -> None:
        await self._call("take", path, self._uploads.pop(path).close)

    async def fsync_dir(self, path: str) -> None:
        """Does nothing: visible objects are durable."""

    async def rename_new(self, source: str, target: str) -> bool:
        """Copies an object to a name that no other object ever uses, and deletes the source."""
        store, key = _place(source)
        await self._call("copy", source, obstore.copy, store, key, _place(target)[1])
        await self.delete(source)
        return True

    async def delete(self, path: str) -> bool:
        upload = self._uploads.pop(path, None)
        if upload is not None:
            # Leaving the block with an error aborts the upload.
            ended = InterruptedError("the upload is given up")
            await self._call("abort", path, upload.__exit__, type(ended), ended, None)
        store, key = _place(path)
        try:
            await self._call("delete", path, obstore.delete, store, key)
        except FileNotFoundError:  # Only some stores report a missing object.
            return upload is not None
        return True

    async def _call(self, what: str, url: str, call: Callable[..., T], *args: Any) -> T:
        with _named(what, url):
            return await self._host.blocking(call, *args)


class _Object(io.RawIOBase):
    """An object that is read by ranges. Its content must not change meanwhile."""

    def __init__(self, store: Any, key: str, url: str) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._url = url
        meta = obstore.head(store, key)
        self._size: int = meta["size"]
        self._tag = meta["e_tag"]
        self._offset = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._size}[whence]
        self._offset = max(base + offset, 0)
        return self._offset

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._offset + len(view), self._size)
        if end <= self._offset:
            return 0
        options: Any = {"range": (self._offset, end)}
        if self._tag is not None:
            options["if_match"] = self._tag  # A replaced object is an error, not a mixture.
        with _named("give the same content as when the object was opened", self._url):
            data = obstore.get(self._store, self._key, options=options).bytes()
        view[: len(data)] = memoryview(data)
        self._offset += len(data)
        return len(data)


def _stat_of(meta: Any) -> FileStat:
    return FileStat(meta["size"], int(meta["last_modified"].timestamp() * 1000), is_dir=False)


def _place(url: str) -> tuple[Any, str]:
    """Returns the store of `url`, and the object's key in the bucket."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    settings = tuple(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))
    )
    return _opened(f"{scheme}://{bucket}", settings), key.strip("/")


@lru_cache(maxsize=16)
def _opened(root: str, settings: tuple[tuple[str, str], ...]) -> Any:
    """Returns the store at `root`, cached with its connections. `settings` are the environment
    variables that obstore uses.
    """
    return from_url(root, retry_config=RETRY)
