"""Runs a program under one seed and returns the result.

The watchdog ends a run in which one callback never returns, because the limits of steps and of
virtual time are checked only between callbacks. The fence keeps simulated code off the real
machine. While it is in force, opening a file or a socket, starting a thread or a process, or
sleeping for real raises `SimFenceBroken` at once. The run ends even if code catches this error.
Imports, tracebacks, logging and the test runner may still access the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, TypeVar

from aioflow.core.aio import cancel_and_wait
from aioflow.core.contexts import contextmanager
from aioflow.testing.simulation.host import SimulatedHost, Simulation
from aioflow.testing.simulation.loop import START_S, SimLoop
from aioflow.testing.simulation.process import SimFenceBroken, SimLivelock
from aioflow.testing.simulation.transport import NetworkOptions

__all__ = ["SimResult", "simulate"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult(Generic[T]):
    """The result of a simulated run."""

    value: T
    """Result of `main`."""
    trace_crc: int
    """Checksum of all events. Two runs with the same checksum had the same events."""
    steps: int
    """Number of callbacks that ran."""
    virtual_s: float
    """Virtual seconds that passed."""
    errors: list[str]
    """Errors that were never awaited, and tasks that `main` left behind, each with its process."""
    trace: list[str] | None
    """The events that `trace_crc` covers. None without `keep_trace`."""


def simulate(
    main: Callable[[SimulatedHost], Coroutine[Any, Any, T]],
    seed: int | str,
    *,
    max_steps: int = 1_000_000,
    max_virtual_s: float = float("inf"),
    perturb: bool = True,
    network: NetworkOptions | None = None,
    fence: bool = True,
    keep_trace: bool = False,
    max_callback_s: float = 20.0,
) -> SimResult[T]:
    """Runs `main(host)` in virtual time under `seed`, and returns its result.

    `main` is the process that cannot be killed. It starts other processes with `host.sim.spawn`,
    which end when `main` ends. `perturb` lets the seed stall processes and vary time slices.
    `fence` fails the run when simulated code uses the real machine. `max_callback_s` is the maximum
    processor time of one callback. Raises the error of `main`, `SimDeadlock`, `SimLivelock`,
    `SimFenceBroken`, or the first AssertionError of any task. A note on the error names the seed.
    """
    collecting = gc.isenabled()
    gc.disable()  # Finalizers would run at moments that no seed decides.
    loop = SimLoop(
        seed,
        max_steps=max_steps,
        max_virtual_s=max_virtual_s,
        perturb=perturb,
        keep_trace=keep_trace,
    )
    try:
        sim = Simulation(loop, network)
        with (
            watchdog(loop, max_callback_s),
            fenced(loop) if fence else contextlib.nullcontext(),
        ):
            value = loop.run_until_complete(main(sim.root))
            loop.run_until_complete(_clean_up(loop))
        loop.note("END", loop.steps)
        return SimResult(
            value=value,
            trace_crc=loop.crc,
            steps=loop.steps,
            virtual_s=loop.time() - START_S,
            errors=loop.errors,
            trace=loop.trace,
        )
    except BaseException as error:
        error.add_note(
            f"simulation: seed {seed!r} failed at step {loop.steps}, virtual "
            f"{loop.time() - START_S:.6f} s, "
            f"trace {loop.crc:08x}; the same seed repeats it"
        )
        raise
    finally:
        loop.finish()
        if collecting:
            gc.enable()


async def _clean_up(loop: SimLoop) -> None:
    """Cleans up after `main` as `asyncio.run` does, and reports the tasks that `main` left."""
    me = asyncio.current_task()
    left = [task for task in loop.root.tasks if task is not me]
    loop.errors.extend(
        f"{loop.root.name}: task {task.get_name()} was left pending" for task in left
    )
    for error in await cancel_and_wait(left):
        loop.errors.append(f"{loop.root.name}: task left pending ended with {error!r}")
    await loop.close_own_generators()


FRAMES_SHOWN = 12


class Interrupted(BaseException):
    """Raised inside a callback that does not end, to interrupt it.

    It is not a subclass of Exception, because an endless loop may catch every Exception.
    """


@contextmanager
def watchdog(loop: SimLoop, limit_s: float) -> Iterator[None]:
    """Fails the run of `loop` with SimLivelock, which shows the stack, when one callback takes too
    much processor time. It checks once per `limit_s`, so a callback is ended after one to two times
    `limit_s`.

    The signal of the timer reaches only the main thread, so runs in other threads are not watched.
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
"""Modules that may access the real machine, for imports, tracebacks, logging and the test runner.
"""

_fenced_loop: SimLoop | None = None
_installed = False


@contextmanager
def fenced(loop: SimLoop) -> Iterator[None]:
    """Keeps all code that runs on `loop` off the real machine while the `with` block lasts."""
    global _fenced_loop, _installed
    if not _installed:
        # An audit hook cannot be removed. Without a fenced loop it costs one comparison.
        sys.addaudithook(_hook)
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


@contextmanager
def _guard(owner: object, name: str, event: str) -> Iterator[None]:
    """Treats calls of the function `name` of `owner` like the audit event `event`. The function
    itself raises no audit event in older versions of Python.
    """
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
    """Returns whether `frame` was called by a callback of the loop, not through a module of
    `_PASS`.
    """
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module.startswith(_PASS):
            return False
        if frame.f_code is SimLoop._run_once.__code__:
            return True
        frame = frame.f_back
    return False
