"""Writes data that is held in front of the state backends into them, in slices, so that the event
loop keeps running during a large snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator

__all__ = ["settled_by_turns"]

_DONE = object()


def settled_by_turns(
    settling: Iterator[None], written: Awaitable[None] | None = None
) -> Awaitable[None] | None:
    """Begins `settling`, an iterator that yields while there is much to do.

    Returns an awaitable for the remaining work, followed by `written`.
    """
    return written if next(settling, _DONE) is _DONE else _rest(settling, written)


async def _rest(settling: Iterator[None], written: Awaitable[None] | None) -> None:
    await asyncio.sleep(0)
    for _ in settling:
        await asyncio.sleep(0)
    if written is not None:
        await written
