"""A clock that counts the CPU time of one thread, and a loop that lives by it: what others on the
machine take does not count.

Where the loop has nothing to do, time is skipped to the next timer, in milliseconds as both real
loops sleep. So a latency is what the work of this very process makes of it, on a machine that is
never idle. What is left out: the wait for the interpreter's lock and for disks, what the caches
lose to others, and that asyncio's turns take several times what uvloop's do.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

__all__ = ["CpuClock", "cpu_loop"]

NAP_S = 0.001
"""Interval, by the wall clock, at which an idle loop checks whether a thread has work for it."""


class CpuClock:
    """The CPU clock of the thread that creates it.

    To other threads it stands still between two readings of this one.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._skipped_ns = 0
        self._now_ns = 0

    def ns(self) -> int:
        if threading.get_ident() == self._thread:
            self._now_ns = time.thread_time_ns() + self._skipped_ns
        return self._now_ns

    def s(self) -> float:
        return self.ns() / 1e9

    def skip(self, seconds: float) -> None:
        """Nothing happens for so long."""
        self._skipped_ns += int(seconds * 1e9)


class _Selector(selectors.DefaultSelector):
    """Skips time in place of sleeping."""

    def __init__(self, clock: CpuClock) -> None:
        super().__init__()
        self.clock = clock
        self.turn_s = 0.0
        """Start of this turn of the loop, in whole ms: the time that uvloop reports during the
        turn.
        """

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        left = math.inf if timeout is None else math.ceil(timeout * 1e3) / 1e3
        while not ready and left > 0:
            ready = super().select(NAP_S)
            self.clock.skip(min(left, NAP_S))
            left -= NAP_S
        self.turn_s = math.floor(self.clock.s() * 1e3) / 1e3
        return ready


class _CpuLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: CpuClock) -> None:
        self._by = _Selector(clock)
        super().__init__(self._by)

    def time(self) -> float:
        return self._by.turn_s


@contextmanager
def cpu_loop() -> Iterator[tuple[CpuClock, asyncio.AbstractEventLoop]]:
    """A loop by a new clock, which is also what `time.monotonic` and `time.perf_counter_ns` tell
    meanwhile.
    """
    clock = CpuClock()
    with patch("time.monotonic", clock.s), patch("time.perf_counter_ns", clock.ns):
        yield clock, _CpuLoop(clock)
