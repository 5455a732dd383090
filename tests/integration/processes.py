"""Looking at processes, and waiting for what other processes do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

__all__ = ["alive", "eventually"]


async def eventually(condition: Callable[[], bool], *, within_s: float = 20.0) -> None:
    """Returns once `condition()` is true; fails when that takes too long."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process runs, or sleeps; one that is only not waited for yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
