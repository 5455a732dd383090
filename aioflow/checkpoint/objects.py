"""Defines the smallest store that checkpoints need: named objects that are created once and whole,
and never change.

A local directory, the memory of a process and an object store can all provide it. Leases and
completed checkpoints need no more: only creation must be atomic. Names are segments of
`[A-Za-z0-9_.-]`, joined by slashes, so that they mean the same everywhere and cannot point outside
the store.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Protocol

from aioflow.core.aio import wait_all

__all__ = ["Chunks", "ObjectStore", "check_name", "collect", "is_name", "to_the_end"]

Chunks = AsyncIterator[bytes]

SEGMENT = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


class ObjectStore(Protocol):
    """A store of named objects under one root.

    Failures of the store are OSError; FileNotFoundError means that no object has the name.
    """

    @property
    def url(self) -> str:
        """The URL of the root, without a slash at its end. Errors show this URL, and
        `urls.open_objects` opens the store again when given this URL.
        """

    @property
    def shared(self) -> bool:
        """Whether another process that opens `url` sees the same objects."""

    async def create(self, name: str, chunks: Chunks) -> bool:
        """Creates an object, which is durable and whole when this returns True.

        Returns False, with nothing changed, if a durable object of that name exists. If several
        callers create the same name at the same moment, one wins. On an object store that holds
        only for small content (`remote`). After an OSError the object may exist or not.
        """

    async def read(self, name: str) -> bytes:
        """Returns the content of an object."""

    async def delete(self, names: Iterable[str]) -> None:
        """Deletes the objects with these names, as far as they exist."""

    async def names(self, prefix: str = "") -> list[str]:
        """Returns the names of all objects below `prefix`, sorted. `prefix` consists of whole
        segments.

        Objects created or deleted meanwhile may be missing or listed.
        """

    async def modified_ms(self, name: str) -> int:
        """Returns when the object was created, in wall-clock milliseconds of the store."""

    async def harden(self) -> None:
        """Makes every visible object durable.

        An object's creator may have died before it did so. Call this method before acting on the
        objects that exist.
        """

    async def sweep(self, before_ms: int) -> None:
        """Deletes unfinished objects of writers that died before `before_ms` (wall clock).

        Does nothing for stores that hide unfinished objects.
        """


def is_name(name: str) -> bool:
    """Whether `name` is a valid name of an object."""
    return all(SEGMENT.match(segment) and segment not in (".", "..") for segment in name.split("/"))


def check_name(name: str) -> str:
    """Returns `name`. Raises ValueError if it is not a valid name of an object."""
    if not is_name(name):
        raise ValueError(
            f"object name {name!r}: expected segments of 1 to 64 of the characters A-Z a-z 0-9 _ "
            ". - joined by slashes"
        )
    return name


async def collect(chunks: Chunks) -> bytes:
    """Returns all chunks joined."""
    return b"".join([chunk async for chunk in chunks])


async def to_the_end(step: Awaitable[bool]) -> bool:
    """Awaits a step that must not be abandoned halfway, and returns its result.

    A cancellation is raised only once the step has ended. The reason is that a call in another
    thread cannot be cancelled. If its caller left, the object could appear after all processes had
    agreed that it does not exist.
    """
    future = asyncio.ensure_future(step)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await wait_all([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # The cancellation wins.
        raise cancelled
    return future.result()
