"""Requests to a task from outside, answered between two slices: state queries, more splits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import Closed

if TYPE_CHECKING:
    from aioflow.core.errors import JobNotRunning
    from aioflow.mailbox.executor import MailboxExecutor

__all__ = ["answered"]


async def answered(
    executor: MailboxExecutor,
    question: Callable[[], Any],
    over: JobNotRunning,
    what: str = "query state",
) -> Any:
    """Returns the result of `question()`, awaited if necessary, run as mail `what` of the task.

    Raises `over` if the task ends first.
    """
    try:
        future = executor.submit(question, what)
    except Closed as closed:
        raise over from closed
    try:
        return await future
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if future.cancelled() and (task is None or not task.cancelling()):
            raise over from None  # The mail was dropped; the caller was not cancelled.
        raise
