"""Stores objects in S3 and compatible stores, Google Cloud Storage or Azure.

Needs the extra `[s3]` (obstore). Credentials, region and endpoint come from the environment, as for
the stores' own tools (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL` ...).

The library obstore sends the requests itself, not through the engine's `Host`. So this is the only
store that cannot be simulated. This module uses the blocking calls of obstore, in threads of the
host. With the async calls, processes crashed at exit, because obstore's threads call back into an
interpreter that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from aioflow.checkpoint.objects import Chunks, check_name

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["RemoteObjects"]

T = TypeVar("T")

PART_BYTES = 8 << 20
"""Content up to this size is one conditional request; larger content is sent in parts of this size.
"""


class RemoteObjects:
    """An `ObjectStore` over obstore. If `store` is given, it is used instead of the store that the
    URL names.

    A small object is created by one request, which is atomic. An upload in parts cannot be made
    conditional everywhere. So callers draw random names for large objects. If two callers create
    the same name at the same moment, `create` may return True to both.
    """

    shared = True

    def __init__(
        self, host: Host, url: str, store: Any = None
    ) -> None:  # Any: obstore's stores share no class.
        self._host = host
        self.url = url.rstrip("/")
        self._store = from_url(self.url) if store is None else store

    async def create(self, name: str, chunks: Chunks) -> bool:
        check_name(name)
        head: list[bytes] = []
        size = 0
        async for chunk in chunks:
            head.append(chunk)
            size += len(chunk)
            if size > PART_BYTES:
                return await self._create_large(name, b"".join(head), chunks)
        return await self._call("create", name, self._put_new, name, b"".join(head))

    async def read(self, name: str) -> bytes:
        return await self._call("read", name, self._get, check_name(name))

    async def delete(self, names: Iterable[str]) -> None:
        doomed = [check_name(name) for name in names]
        if doomed:
            await self._call("delete", ", ".join(doomed[:3]), self._delete, doomed)

    async def names(self, prefix: str = "") -> list[str]:
        return sorted(
            await self._call("list", prefix or "everything", self._list, prefix.rstrip("/") or None)
        )

    async def missing(self, names: Sequence[str]) -> list[str]:
        return []

    async def modified_ms(self, name: str) -> int:
        meta = await self._call("look at", name, self._head, check_name(name))
        return int(meta["last_modified"].timestamp() * 1000)

    async def harden(self) -> None:
        """Does nothing: visible objects are durable."""

    async def sweep(self, before_ms: int) -> None:
        """Does nothing, because parts of unfinished uploads are not visible here. A lifecycle rule
        of the bucket has to remove them.
        """

    async def _create_large(self, name: str, head: bytes, rest: Chunks) -> bool:
        try:
            await self._call("look at", name, self._head, name)
            return False
        except FileNotFoundError:
            pass
        writer = await self._call("create", name, self._open, name)
        await self._call("create", name, writer.write, head)
        async for chunk in rest:
            await self._call("create", name, writer.write, chunk)
        # An upload that does not get here leaves invisible parts.
        await self._call("create", name, writer.close)
        return True

    # Each blocks, and runs in a thread.

    def _put_new(self, name: str, data: bytes) -> bool:
        try:
            obstore.put(self._store, name, data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        return True

    def _open(self, name: str) -> Any:
        return obstore.open_writer(self._store, name, buffer_size=PART_BYTES)

    def _get(self, name: str) -> bytes:
        return bytes(obstore.get(self._store, name).bytes())

    def _head(self, name: str) -> Any:
        return obstore.head(self._store, name)

    def _list(self, prefix: str | None) -> list[str]:
        return [
            meta["path"]
            for metas in obstore.list(self._store, prefix, chunk_size=1000)
            for meta in metas
        ]

    def _delete(self, names: list[str]) -> None:
        # If the store reports a missing object, it may have stopped there: delete one by one.
        try:
            obstore.delete(self._store, names)
        except FileNotFoundError:
            for name in names:
                try:
                    obstore.delete(self._store, name)
                except FileNotFoundError:
                    pass

    async def _call(self, what: str, name: str, call: Callable[..., T], *args: Any) -> T:
        """Runs `call` in a thread, and returns its result.

        A failure of the store becomes an OSError that names the store and the request, `what` and
        `name`.
        """
        try:
            return await self._host.blocking(call, *args)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"there is no {name} in {self.url}") from error
        except BaseError as error:
            # The rest of the text is the debug output of another language.
            first = str(error).partition("\n")[0]
            raise OSError(f"{self.url} did not {what} {name}: {first}") from error
