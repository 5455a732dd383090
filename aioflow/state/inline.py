"""State without files: the content of each file stays in its handle."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

from aioflow.core.errors import RestoreError
from aioflow.state.handles import StateFile

__all__ = ["InlineState"]

DIGEST_BYTES = 16


class InlineState:
    """A `StateOutput` and a `StateInput`, for snapshots that live in memory only."""

    async def write(self, chunks: AsyncIterator[bytes]) -> StateFile:
        content = b"".join([chunk async for chunk in chunks])
        return StateFile("", len(content), _digest(content), content)

    async def read(self, file: StateFile) -> bytes:
        content = file.content
        if content is None:
            raise RestoreError(
                f"cannot read state file {file.name!r} here: its content is not in its handle"
            )
        if len(content) != file.size or _digest(content) != file.digest:
            raise RestoreError(
                f"inline state of {file.size} bytes is not what was written: its size or digest "
                "differs"
            )
        return content


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
