"""A small event loop whose time stands still until a test advances it, and a `Host` for it.

The operator harness runs operators on this loop. Tasks, futures and timeouts are asyncio's own. The
loop runs in the caller's thread, even if another loop is running in this thread. Unlike the
simulation it varies nothing: callbacks run in the order of asyncio, and take no time.

Invariant: time moves only inside `run_to`, from timer to timer, never beyond the given limit.

The parts that all event loops of tests share are here too: blocking calls without threads, and the
cleanup of coroutines and generators that a finished run left suspended. They cannot affect the next
run.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextvars import Context
from types import CoroutineType
from typing import Any, TypeVar, TypeVarTuple

from aioflow.core.contexts import contextmanager
from aioflow.core.system_host import SystemHost

__all__ = [
    "VirtualHost",
    "VirtualLoop",
    "close_chain",
    "end_generator",
    "outside_of_loops",
    "settle",
]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CALLBACKS_MAX = 1_000_000
"""Maximum number of callbacks in one call of `run_to`. If there are more, code runs in a loop
without waiting for time or input.
"""

TOLERANCE_S = 1e-6
"""Number of seconds by which a timer may fire early. Floats of the size of today's time have a
resolution of 0.2 us. An error of this size does not show in milliseconds.
"""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time, which begins at `now_s` seconds. It has no sockets. Blocking
    calls run in the loop's thread.
    """

    _ready: deque[asyncio.Handle]  # asyncio's own queue, which `call_soon` appends to.

    def __init__(self, now_s: float) -> None:
        super().__init__()
        self._now_s = now_s
        self._limit_s = now_s
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_made = 0
        self._callbacks_left = 0

    def time(self) -> float:
        return self._now_s

    def wall_ms(self) -> int:
        """Returns the virtual time in whole milliseconds."""
        return int(self._now_s * 1000 + 0.01)

    def run_to(self, limit_s: float) -> None:
        """Runs everything that is due up to `limit_s`, until nothing is ready.

        May be called while another loop runs.
        """
        self._limit_s = limit_s
        self._callbacks_left = CALLBACKS_MAX
        with outside_of_loops():
            self.run_forever()
        if limit_s != float("inf"):
            self._now_s = max(self._now_s, limit_s)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_made += 1
        # Timers with equal deadlines fire in order of creation, which asyncio's own heap does not
        # guarantee.
        heapq.heappush(self._timers, (when, self._timers_made, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: cancelled timers are dropped when they are due."""

    def _run_once(self) -> None:
        timers, ready = self._timers, self._ready
        if not ready:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            if not timers or timers[0][0] > self._limit_s + TOLERANCE_S:
                self.stop()
                return
            self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            ready.append(heapq.heappop(timers)[2])
        self._callbacks_left -= len(ready)
        if self._callbacks_left < 0:
            raise RuntimeError(
                f"more than {CALLBACKS_MAX} callbacks ran without waiting for time: something spins"
            )
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    # The executor is never used: there are no threads here.
    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Calls `func` in the thread of the loop, in the loop's next iteration."""
        future: asyncio.Future[T] = self.create_future()
        self.call_soon(settle, future, func, args)
        return future

    def _write_to_self(self) -> None:
        """Does nothing: there is no selector for `call_soon_threadsafe` to wake."""

    def __del__(self) -> None:
        """Suppresses asyncio's warning about an unclosed loop. This loop holds no system resources,
        so it need not be closed.
        """


class VirtualHost:
    """A `Host` on a `VirtualLoop`, with the loop's time, repeatable random numbers and ids, and the
    files, network and processes of the real machine. Blocking calls run inline.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        machine = SystemHost(seed=0)
        self.clock = _LoopClock(loop)
        self.rng = machine.rng
        self.ids = _Ids()
        self.fs = machine.fs
        self.net = machine.net
        self.procs = machine.procs
        self._loop = loop

    def blocking(
        self, fn: Callable[[*Ts], T], *args: *Ts, dedicated: bool = False, name: str | None = None
    ) -> asyncio.Future[T]:
        """Runs `fn(*args)` in the thread of the loop, in the loop's next iteration."""
        return self._loop.run_in_executor(None, fn, *args)

    def buggify(self, point: str, probability: float) -> bool:
        """Returns False, because only simulations take rare branches."""
        return False

    async def close(self) -> None:
        """Does nothing: the host holds no resources."""


class _LoopClock:
    """The clock of a `VirtualHost`. Readings of `perf_ns` are 1 us apart, so measured work takes
    the same time in every run.
    """

    __slots__ = ("monotonic", "perf_ns", "wall_ms")

    def __init__(self, loop: VirtualLoop) -> None:
        self.monotonic: Callable[[], float] = loop.time
        self.wall_ms: Callable[[], int] = loop.wall_ms
        self.perf_ns: Callable[[], int] = itertools.count(0, 1_000).__next__


class _Ids:
    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made = itertools.count(1)

    def new(self, kind: str) -> str:
        return f"{next(self._made):032x}"


@contextmanager
def outside_of_loops() -> Iterator[None]:
    """Allows another loop to run inside the running loop. This is for tests that are coroutines and
    use a harness.
    """
    outer = asyncio._get_running_loop()
    if outer is None:
        yield
        return
    # Python 3.12 and later; before, tasks are kept for each loop.
    swap = getattr(asyncio.tasks, "_swap_current_task", None)
    task = None if swap is None else swap(outer, None)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
        if swap is not None:
            swap(outer, task)


def settle(future: asyncio.Future[T], func: Callable[..., T], args: tuple[Any, ...]) -> None:
    """Calls `func` and sets its result or error on `future`. Does nothing if `future` is done."""
    if future.done():
        return
    try:
        future.set_result(func(*args))
    except StopIteration as error:
        wrapped = RuntimeError("blocking call raised StopIteration")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    except BaseException as error:  # noqa: BLE001  # Raised where the call is awaited.
        future.set_exception(error)


CLOSES_MAX = 8
"""Maximum number of awaits in the cleanup of one coroutine that are interrupted. After that the
coroutine stays unfinished.
"""


def end_generator(agen: AsyncGenerator[Any, Any]) -> None:
    """Closes an async generator whose loop has stopped."""
    # One step ends the coroutine, unless it awaits in a `finally`.
    try:
        agen.aclose().send(None)
    except BaseException:  # noqa: BLE001  # StopIteration, or an error of its cleanup.
        return
    # Generators have this attribute; the abstract class does not.
    close_chain(agen.ag_await)  # type: ignore[attr-defined]


def close_chain(awaited: Any) -> None:
    """Closes the coroutine `awaited` and the coroutines that it awaits, the innermost first. If the
    cleanup of a coroutine awaits, the coroutine is closed again, up to `CLOSES_MAX` times.
    """
    chain = []
    while isinstance(awaited, CoroutineType):
        chain.append(awaited)
        awaited = awaited.cr_await
    frame = (
        chain[0].cr_frame
        if chain and inspect.getcoroutinestate(chain[0]) == inspect.CORO_CREATED
        else None
    )
    if frame is not None:
        # A task that has not started yet may still hold a coroutine that it would have awaited.
        chain += [value for value in frame.f_locals.values() if isinstance(value, CoroutineType)]
    for coro in reversed(chain):
        for _ in range(CLOSES_MAX):
            try:
                coro.close()
                break
            except RuntimeError:
                continue  # The coroutine awaited again. That await cannot complete, so it ends too.
            except BaseException:  # noqa: BLE001  # An error of its cleanup.
                break
