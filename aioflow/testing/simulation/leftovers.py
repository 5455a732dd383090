"""Closes the coroutines and generators that a finished run left suspended.

They cannot affect the next run.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator
from types import CoroutineType
from typing import Any

__all__ = ["close_chain", "end_generator"]

CLOSES_MAX = 8
"""How many awaits of one coroutine's cleanup are cut short before it is left alone."""


def end_generator(agen: AsyncGenerator[Any, Any]) -> None:
    """Close an async generator where no loop runs any more."""
    # One step ends it, unless it awaits in its `finally`.
    try:
        agen.aclose().send(None)
    except BaseException:  # noqa: BLE001  # StopIteration, or an error of its cleanup.
        return
    # Generators have it, the abstract class does not.
    close_chain(agen.ag_await)  # type: ignore[attr-defined]


def close_chain(awaited: Any) -> None:
    """Close a coroutine and all that it waits for, the innermost first, each as often as its
    cleanup awaits.
    """
    chain = []
    while isinstance(awaited, CoroutineType):
        chain.append(awaited)
        awaited = awaited.cr_await
    frame = (
        chain[0].cr_frame
        if chain and inspect.getcoroutinestate(chain[0]) == inspect.CORO_CREATED
        else None
    )
    if frame is not None:
        # A task that never took its first step may have been given what it was to await.
        chain += [value for value in frame.f_locals.values() if isinstance(value, CoroutineType)]
    for coro in reversed(chain):
        for _ in range(CLOSES_MAX):
            try:
                coro.close()
                break
            except RuntimeError:
                continue  # It awaited again: the world is gone, so that await ends as well.
            except BaseException:  # noqa: BLE001  # An error of its cleanup.
                break
