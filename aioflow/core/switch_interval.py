"""Limits how long a thread waits for the interpreter beside a busy loop.

A thread that has waited for the switch interval asks the holder to let go, and then gets its turn
for certain. The count restarts each time that the holder lets go by itself, which a loop does
once a turn, in its `select`; and it takes the interpreter back before the other thread is awake.
Turns are shorter than the interval of 5 ms that Python begins with, so beside a busy loop a thread
waits until chance gives it a turn: measured were seconds for the few files of a checkpoint. With an
interval below the length of a turn it waits no longer than that. Where no thread waits, nothing
changes.
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
"""What was set before the first was wanted, and what was set here last."""


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """Inside, the interval of the process is at most so long; the shortest wanted counts.

    What the program sets meanwhile, stays.
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
