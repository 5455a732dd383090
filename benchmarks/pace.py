"""The value of a CPU second at present: a plain loop, run for a moment again and again beside the
measured work.

A rented processor changes its speed by a factor of two from one second to the next, and memory that
others use makes every instruction dearer. Both fall on the plain loop as well, so CPU time in units
of that loop compares where seconds do not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from time import thread_time

__all__ = ["Pace"]

PAUSE_S = 0.05


class Pace:
    """Runs `loop(records)` and adds up what that took of the CPU time of this thread."""

    def __init__(self, loop: Callable[[int], object], records: int) -> None:
        self._loop = loop
        self._step = records
        self.records = 0
        self.cpu_s = 0.0

    def sample(self) -> None:
        begun = thread_time()
        self._loop(self._step)
        self.cpu_s += thread_time() - begun
        self.records += self._step

    async def keep(self) -> None:
        """Sample until cancelled, and end quietly then."""
        with suppress(asyncio.CancelledError):
            while True:
                self.sample()
                await asyncio.sleep(PAUSE_S)
