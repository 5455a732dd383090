"""Frees what state lets go of at once, like the window of a million keys that has fired, a slice at a time.

To free a key and its value takes some 50 ns, so a million of them hold the loop for 50 ms, and the mail of all its tasks with them.
Memory comes back within as many turns of the loop as there are slices. Without a running loop it comes back at once: nobody waits.
"""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["FREED_A_TURN", "bury"]

FREED_A_TURN = 16_384
"""Entries freed in one turn of the loop: about a millisecond."""


def bury(entries: dict[Any, Any]) -> None:
    """Empty `entries`, at which nobody looks any more. The caller lets go of it."""
    if len(entries) <= FREED_A_TURN:
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    loop.call_soon(_free, loop, entries)


def _free(loop: asyncio.AbstractEventLoop, entries: dict[Any, Any]) -> None:
    take = entries.popitem
    for _ in range(FREED_A_TURN):
        take()
    if len(entries) > FREED_A_TURN:
        loop.call_soon(_free, loop, entries)
