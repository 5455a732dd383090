"""Ends a run in which one callback never comes back: limits of steps and of virtual time count only
between callbacks.

A timer of the kernel counts the processor time of this process, so a machine under load changes
nothing; it costs nothing per callback and no seed notices it. It looks twice: a callback that was
under way at the last look already, and still is, has had its time.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from aioflow.testing.simulation.errors import SimLivelock
from aioflow.testing.simulation.loop import SimLoop

__all__ = ["watchdog"]

FRAMES_SHOWN = 12


class Interrupted(BaseException):
    """Raised where the callback is, to get out of it.

    No Exception: what loops for ever may catch all of those.
    """


@contextmanager
def watchdog(loop: SimLoop, limit_s: float) -> Iterator[None]:
    """Fail the run of `loop` with SimLivelock, which shows the stack, when one callback takes more
    than `limit_s` of processor time, to twice that. Only the main thread of a program hears its
    timer: elsewhere nothing is watched.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = -1

    def look(_signal: int, frame: FrameType | None) -> None:
        nonlocal seen
        if loop.steps != seen:
            seen = loop.steps
            return
        where = "".join(traceback.format_stack(frame)[-FRAMES_SHOWN:])
        loop.fatal = SimLivelock(
            f"seed {loop.seed!r}: step {loop.steps}, of process {loop.current.name}, is not over "
            f"after {limit_s:g} s of processor time; it "
            f"is here:\n{where}"
        )
        raise Interrupted

    former = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s, limit_s)
    try:
        yield
    except Interrupted:
        assert loop.fatal is not None, "it is set before anything is interrupted"
        raise loop.fatal from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, former)
