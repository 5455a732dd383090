"""Looking at processes, and waiting for what other processes do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

__all__ = ["alive", "eventually", "has_taken"]


async def eventually(condition: Callable[[], bool], *, within_s: float = 120.0) -> None:
    """Returns once `condition()` is true; fails when that takes too long."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def has_taken(pid: int, number: int) -> bool:
    """Whether the process has taken the signals of that number that were sent to it: two that
    wait become one.
    """
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return not any(int(status[kind], 16) >> (number - 1) & 1 for kind in ("SigPnd", "ShdPnd"))


def alive(pid: int) -> bool:
    """Whether the process runs, or sleeps; one that is only not waited for yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
