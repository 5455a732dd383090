"""The common parts of the event loops of tests: blocking calls without threads, and the end of
leftovers.

The coroutines and generators that a finished run left suspended cannot affect the next run.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable
from types import CoroutineType
from typing import Any, TypeVar

__all__ = ["close_chain", "end_generator", "settle"]

T = TypeVar("T")


def settle(future: asyncio.Future[T], func: Callable[..., T], args: tuple[Any, ...]) -> None:
    """Calls `func` and sets its result on `future`, unless `future` is done already."""
    if future.done():
        return
    try:
        future.set_result(func(*args))
    except StopIteration as error:
        wrapped = RuntimeError("blocking call raised StopIteration")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    except BaseException as error:  # noqa: BLE001  # Raised where the call is awaited.
        future.set_exception(error)


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
