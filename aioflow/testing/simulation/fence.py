"""Keeps simulated code off the real machine.

While a fence stands, opening a file or a socket, starting a thread or a process, or sleeping for
real raises `SimFenceBroken` on the spot, and ends the run even if that error is swallowed. Imports,
tracebacks, logging and the test runner keep their access.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from aioflow.testing.simulation.errors import SimFenceBroken
from aioflow.testing.simulation.loop import SimLoop

__all__ = ["fence"]

_FENCED = frozenset(
    {
        "_thread.start_joinable_thread", "_thread.start_new_thread", "open", "os.exec", "os.fork",
        "os.forkpty", "os.listdir", "os.mkdir", "os.posix_spawn", "os.remove", "os.rename",
        "os.rmdir", "os.scandir", "os.system", "socket.__new__", "socket.bind", "socket.connect",
        "socket.getaddrinfo", "socket.gethostbyname", "subprocess.Popen", "time.sleep",
    }
)  # fmt: skip

_PASS = (
    "importlib", "_frozen_importlib", "zipimport", "linecache", "traceback", "logging", "warnings",
    "inspect", "tokenize", "_pytest", "pluggy", "coverage", "pdb", "bdb",
)  # fmt: skip
"""Modules whose own access to the machine is no business of a simulation."""

_fenced_loop: SimLoop | None = None
_installed = False


@contextlib.contextmanager
def fence(loop: SimLoop) -> Iterator[None]:
    """Fences in all code that runs on `loop` while the block lasts."""
    global _fenced_loop, _installed
    if not _installed:
        sys.addaudithook(
            _hook
        )  # It cannot be taken out again; without a fenced loop it costs one comparison.
        _installed = True
    before, _fenced_loop = _fenced_loop, loop
    try:
        # Before Python 3.13 these two raise no audit event.
        with (
            _guard(time, "sleep", "time.sleep"),
            _guard(threading.Thread, "start", "_thread.start_new_thread"),
        ):
            yield
    finally:
        _fenced_loop = before


@contextlib.contextmanager
def _guard(owner: object, name: str, event: str) -> Iterator[None]:
    """Treat calls of one function as the audit event that it does not raise."""
    real = getattr(owner, name)

    def guarded(*args: Any) -> object:  # Any: the arguments of the real function.
        _refuse(event, args[0])
        return real(*args)

    setattr(owner, name, guarded)
    try:
        yield
    finally:
        setattr(owner, name, real)


def _hook(event: str, args: tuple[object, ...]) -> None:
    if _fenced_loop is not None and event in _FENCED:
        _refuse(event, args[0] if args else None)


def _refuse(event: str, subject: object) -> None:
    loop = _fenced_loop
    if loop is None or not _is_simulated(sys._getframe(1)):
        return
    shown = f"{event} ({subject!r})" if subject is not None else event
    error = SimFenceBroken(
        f"process {loop.current.name} reached for the real machine: {shown}. Go through the Host, "
        "or switch the fence off (fence=False) if the test means it"
    )
    loop.fail(error)
    raise error


def _is_simulated(frame: FrameType | None) -> bool:
    """Tell whether a callback of the loop is on the stack with nothing privileged above it."""
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module.startswith(_PASS):
            return False
        if frame.f_code is SimLoop._run_once.__code__:
            return True
        frame = frame.f_back
    return False
