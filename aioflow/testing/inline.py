"""Blocking calls in loops without threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["settle"]

T = TypeVar("T")


def settle(future: asyncio.Future[T], func: Callable[..., T], args: tuple[Any, ...]) -> None:
    """Call `func` for whoever waits for `future`, if anybody still does."""
    if future.done():
        return
    try:
        future.set_result(func(*args))
    except StopIteration as error:
        wrapped = RuntimeError("blocking call raised StopIteration")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    except BaseException as error:  # noqa: BLE001  # Carried to whoever awaits the call.
        future.set_exception(error)
