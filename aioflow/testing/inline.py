"""Blocking calls in loops without threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["settle"]

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
