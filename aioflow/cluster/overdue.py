"""How long a task in another process may take to end once it is cancelled.

A healthy process watches its own tasks (`task/end_watch.py`). This module watches the processes:
if a function blocks the event loop of a process, the cancellation does not even get there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aioflow.core.aio import wait_all
from aioflow.task.closing import CLEANUP_TIMEOUT_S

__all__ = ["until_overdue"]

GRACE_S = 5.0
"""Extra time for messages in transit, beyond the timeout of the process."""


async def until_overdue(answers: Sequence[asyncio.Future[Any]], timeout_s: float) -> str:
    """Waits until a task is overdue and returns the reason.

    `answers`: done when its process has received the cancellation.
    """
    if not await wait_all(answers, timeout_s=timeout_s):
        return (
            f"was cancelled {timeout_s:g} s ago, and its process does not answer: a function "
            "holds its event loop"
        )
    longest = (
        2 * timeout_s + CLEANUP_TIMEOUT_S + GRACE_S
    )  # Functions end first, then that of the source.
    await asyncio.sleep(longest)
    return f"has not ended {longest:g} s after it was cancelled"
