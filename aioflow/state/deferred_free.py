"""Frees large amounts of state in slices, such as a fired window of a million keys.

Freeing a key and its value takes about 50 ns. A million of them would block the loop for 50 ms, and
with it the mail of all its tasks. So the entries are freed slice by slice, one slice in each turn
of the loop. The slices are shared: a thousand windows that fire in one turn are freed as gradually
as one window that is a thousand times as large. Without a running loop no task waits, so the memory
is freed at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

__all__ = ["FREED_A_TURN", "free_in_slices"]

FREED_A_TURN = 16_384
"""Number of entries freed in one turn of the loop, which takes about a millisecond."""

FEW = 64
"""Maximum size of a dict that is freed at once, because queueing it would cost as much."""


class _DeferredFree:
    """A queue of dicts that are freed slice by slice on one event loop."""

    __slots__ = ("_freed", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[dict[Any, Any]] = deque()
        self._freed = 0
        """Number of entries freed in this turn. While it is not 0, `_turn` is scheduled."""

    def take(self, loop: asyncio.AbstractEventLoop, entries: dict[Any, Any]) -> None:
        if not self._freed and not self._waiting:
            loop.call_soon(self._turn, loop)
        if not self._waiting and self._freed + len(entries) <= FREED_A_TURN:
            self._freed += len(entries)
        else:
            self._waiting.append(entries)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        left = FREED_A_TURN
        while self._waiting:
            entries = self._waiting[0]
            if len(entries) <= left:
                left -= len(entries)
                self._waiting.popleft()
                continue
            take = entries.popitem
            for _ in range(left):
                take()
            break
        self._freed = 0
        if self._waiting:
            loop.call_soon(self._turn, loop)


_graves: WeakKeyDictionary[asyncio.AbstractEventLoop, _DeferredFree] = WeakKeyDictionary()


def free_in_slices(entries: dict[Any, Any]) -> None:
    """Frees the contents of `entries` in slices. The caller must not use `entries` afterwards."""
    if len(entries) <= FEW:
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    grave = _graves.get(loop)
    if grave is None:
        grave = _graves[loop] = _DeferredFree()
    grave.take(loop, entries)
