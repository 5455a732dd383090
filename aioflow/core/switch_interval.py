"""Limits how long a thread waits for the interpreter beside a busy loop.

A thread that has waited for the switch interval asks the holder to release the interpreter, and is
then certain to run. The count restarts each time that the holder releases it by itself. A loop does
so once a turn, in its `select`, and takes the interpreter back before the other thread is awake.
Turns are shorter than Python's default interval of 5 ms. So beside a busy loop a thread waits until
it runs by chance: for the few files of a checkpoint, seconds were measured. With an interval below
the length of a turn it waits at most for the interval. If no thread waits, the interval has no
effect.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["switch_interval"]

_lock = threading.Lock()
_wanted: list[float] = []
_found: list[float] = []
"""The interval before the first use of `switch_interval`, and the interval that it set last."""


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """Limits the interval of the process to `seconds` within the block; the shortest limit applies.

    An interval that the program sets meanwhile is kept.
    """
    with _lock:
        if not _wanted:
            _found[:] = [sys.getswitchinterval()] * 2
        _wanted.append(seconds)
        _apply()
    try:
        yield
    finally:
        with _lock:
            _wanted.remove(seconds)
            _apply()


def _apply() -> None:
    before, ours = _found
    if sys.getswitchinterval() == ours:
        sys.setswitchinterval(min([before, *_wanted]))
        _found[1] = sys.getswitchinterval()  # Kept in whole microseconds.
