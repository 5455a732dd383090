"""What is asked of a task from outside, and answered between two slices: about its state, or to
read more.
"""

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
    """What `question()` gives, or what awaiting that gives, as a mail `what` of the task.

    Raises `over` when the task ends before.
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
            raise over from None  # The mail was dropped, nobody cancelled the caller.
        raise
