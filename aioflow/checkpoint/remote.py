"""Objects in an object store: S3 and what speaks its protocol, Google Cloud Storage, Azure. Needs the extra `[s3]` (obstore).

Credentials, region and endpoint come from the environment, as for that store's own tools (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL` ...).
The requests are made by threads of obstore, out of sight of `Host`: this is the one store that cannot be simulated.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from aioflow.checkpoint.objects import Chunks, check_name

__all__ = ["RemoteObjects"]

PART_BYTES = 8 << 20
"""Content up to here is one conditional request; above it is sent in parts of this size, as it comes."""


class RemoteObjects:
    """An `ObjectStore` over obstore. `store`: instead of the one that the URL names.

    A request creates or fails atomically. What is sent in parts cannot be made conditional everywhere, so whoever creates large objects
    draws their names, and two that create one at the same moment may both think that they did.
    """

    shared = True

    def __init__(self, url: str, store: Any = None) -> None:  # Any: obstore's stores share no class.
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
                return await self._create_large(name, head, chunks)
        try:
            await obstore.put_async(self._store, name, b"".join(head), mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        except BaseError as error:
            raise self._refused("create", name, error) from error
        return True

    async def read(self, name: str) -> bytes:
        try:
            found = await obstore.get_async(self._store, check_name(name))
            return bytes(await found.bytes_async())
        except FileNotFoundError as error:
            raise FileNotFoundError(f"there is no {name} in {self.url}") from error
        except BaseError as error:
            raise self._refused("read", name, error) from error

    async def delete(self, names: Iterable[str]) -> None:
        doomed = [check_name(name) for name in names]
        if not doomed:
            return
        try:
            await obstore.delete_async(self._store, doomed)
        except FileNotFoundError:
            # Some stores say so, and then they may have stopped there.
            for name in doomed:
                await self._delete_one(name)
        except BaseError as error:
            raise self._refused("delete", f"{len(doomed)} objects, the first {doomed[0]}", error) from error

    async def names(self, prefix: str = "") -> list[str]:
        found: list[str] = []
        try:
            async for metas in obstore.list(self._store, prefix.rstrip("/") or None, chunk_size=1000):
                found += [meta["path"] for meta in metas]
        except BaseError as error:
            raise self._refused("list", prefix or "all", error) from error
        return sorted(found)

    async def modified_ms(self, name: str) -> int:
        try:
            meta = await obstore.head_async(self._store, check_name(name))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"there is no {name} in {self.url}") from error
        except BaseError as error:
            raise self._refused("look at", name, error) from error
        return int(meta["last_modified"].timestamp() * 1000)

    async def sweep(self, before_ms: int) -> None:
        """Parts of what was never finished are not visible here; a rule of the bucket removes them."""

    async def _create_large(self, name: str, head: list[bytes], rest: Chunks) -> bool:
        async def stream() -> AsyncGenerator[bytes, None]:
            yield b"".join(head)
            async for chunk in rest:
                yield chunk

        content = stream()
        try:
            await obstore.head_async(self._store, name)
            return False
        except FileNotFoundError:
            pass
        except BaseError as error:
            raise self._refused("look at", name, error) from error
        try:
            await obstore.put_async(self._store, name, content, use_multipart=True, chunk_size=PART_BYTES)
        except BaseError as error:
            raise self._refused("create", name, error) from error
        finally:
            await content.aclose()
        return True

    async def _delete_one(self, name: str) -> None:
        try:
            await obstore.delete_async(self._store, name)
        except FileNotFoundError:
            pass
        except BaseError as error:
            raise self._refused("delete", name, error) from error

    def _refused(self, what: str, name: str, error: BaseError) -> OSError:
        # The rest of the text is the debug output of another language.
        first = str(error).partition("\n")[0]
        return OSError(f"{self.url} did not {what} {name}: {first}")
