"""The `Host` of the real machine: its clocks and ids, and the threads for blocking calls.

Files, sockets and processes are in `core.system_files`, `core.system_network` and
`core.system_processes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple

from aioflow.core.system_files import SystemFileSystem
from aioflow.core.system_network import SystemNetwork
from aioflow.core.system_processes import SystemProcesses

__all__ = ["SystemHost"]

T = TypeVar("T")
Args = TypeVarTuple("Args")

logger = logging.getLogger(__name__)

MAX_WORKERS = 8
"""Threads of the shared pool: enough to overlap disk waits, few enough to stay cheap beside one
busy loop.
"""

CLOSE_TIMEOUT_S = 10.0
"""Maximum time that `close` waits for threads whose work has not ended before it abandons them."""

GIVEN_UP_S = 0.5
"""Maximum time that `close` waits for threads whose caller was cancelled.

Some of them are about to end, because they were asked to.
"""


class SystemHost:
    """The real machine. Creates no thread before the first `blocking` call and binds to no loop."""

    def __init__(
        self,
        *,
        max_workers: int = MAX_WORKERS,
        seed: int | None = None,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        if max_workers < 1:
            raise ValueError(f"max_workers is {max_workers}, expected at least 1")
        self._max_workers = max_workers
        self._close_timeout_s = close_timeout_s
        self._pool: ThreadPoolExecutor | None = None
        self._dedicated: list[tuple[threading.Thread, asyncio.Future[Any]]] = []
        self._closed = False
        self.clock = _SystemClock()
        self.rng = random.Random(seed)
        self.ids = _SystemIds()
        self.fs = SystemFileSystem(self)
        self.net = SystemNetwork()
        self.procs = SystemProcesses()

    def blocking(
        self,
        fn: Callable[[*Args], T],
        *args: *Args,
        dedicated: bool = False,
        name: str | None = None,
    ) -> asyncio.Future[T]:
        """Runs `fn(*args)` on the pool, or on a thread of its own. See `Host.blocking`."""
        if self._closed:
            raise RuntimeError(
                f"host is closed, cannot run {name or getattr(fn, '__name__', fn)}: call before "
                "close()"
            )
        loop = asyncio.get_running_loop()
        in_context = contextvars.copy_context().run  # As asyncio.to_thread does.
        if dedicated:
            return self._start_thread(
                loop,
                lambda: in_context(fn, *args),
                name or f"aioflow-{getattr(fn, '__name__', 'call')}",
            )
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                self._max_workers, thread_name_prefix="aioflow-blocking"
            )
        return loop.run_in_executor(self._pool, in_context, fn, *args)

    def _start_thread(
        self, loop: asyncio.AbstractEventLoop, call: Callable[[], T], name: str
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.done():
                return  # The waiter was cancelled while the call went on.
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]  # No error: the result is a T.

        def run() -> None:
            result: T | None = None
            error: BaseException | None = None
            try:
                result = call()
            except StopIteration as exc:
                # A future refuses StopIteration; say what happened instead.
                error = RuntimeError(f"{name} raised StopIteration")
                error.__cause__ = exc
            except BaseException as exc:  # noqa: BLE001  # Carried to the loop, where it is raised.
                error = exc
            # The loop may be closed already, if its owner gave up waiting for this thread.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result, error)

        self._dedicated = [
            (thread, waiting) for thread, waiting in self._dedicated if thread.is_alive()
        ]
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._dedicated.append((thread, future))
        thread.start()
        return future

    def buggify(self, point: str, probability: float) -> bool:
        """Returns False, because only simulations take rare branches on purpose."""
        return False

    async def close(self) -> None:
        """Joins the threads, for at most `close_timeout_s`; a warning names those that do not end.

        A dedicated thread whose caller was cancelled gets only `GIVEN_UP_S`.
        """
        if self._closed:
            return
        self._closed = True
        pool, threads = self._pool, [thread for thread, _ in self._dedicated]
        if pool is None and not threads:
            return
        given_up = {thread for thread, waiting in self._dedicated if waiting.cancelled()}
        loop = asyncio.get_running_loop()
        joined: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not joined.done():
                joined.set_result(None)

        def join() -> None:
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
            for thread in threads:
                if thread not in given_up:
                    thread.join()
            deadline = time.monotonic() + GIVEN_UP_S
            for thread in threads:
                thread.join(max(deadline - time.monotonic(), 0.0))
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle)

        # Joining blocks, so it gets a thread too; it is a daemon because what it waits for may
        # never end.
        joiner = threading.Thread(target=join, name="aioflow-close", daemon=True)
        joiner.start()
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await joined
        except TimeoutError:
            alive = [thread.name for thread in threads if thread.is_alive()]
            logger.warning(
                "host closed with blocking calls still running after %.1f s (dedicated threads: "
                "%s)",
                self._close_timeout_s,
                ", ".join(alive) or "none",
            )
        else:
            joiner.join()  # The thread only has to return.
            if alive := [thread.name for thread in threads if thread.is_alive()]:
                logger.warning(
                    "threads are left behind in an abandoned blocking call, and end "
                    "with it, or with the process: %s",
                    ", ".join(alive),
                )


class _SystemClock:
    """Reads the machine's clocks; the methods are the C functions themselves, so that a reading
    costs one call.
    """

    __slots__ = ("monotonic", "perf_ns")

    def __init__(self) -> None:
        self.monotonic: Callable[[], float] = time.monotonic
        self.perf_ns: Callable[[], int] = time.perf_counter_ns

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class _SystemIds:
    __slots__ = ()

    def new(self, kind: str) -> str:
        return secrets.token_hex(16)
