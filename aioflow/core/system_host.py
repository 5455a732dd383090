"""The `Host` of the real machine: clocks, ids, threads for blocking calls, sockets and processes.

The files are in `core.system_files`.
"""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import logging
import os
import random
import re
import resource
import secrets
import signal
import socket
import ssl as ssl_module
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from aioflow.core.host import ProcessIdentity, ThreadTimes
from aioflow.core.system_files import SystemFileSystem

if TYPE_CHECKING:
    from aioflow.core.host import Frame, Listener, Process, ProtocolFactory, ProtocolT

__all__ = ["SECRET_FD_ENV", "SystemHost", "SystemNetwork", "SystemProcesses"]

T = TypeVar("T")
Args = TypeVarTuple("Args")

logger = logging.getLogger(__name__)

MAX_WORKERS = 8
"""Number of threads of the shared pool: enough to overlap disk waits, few enough to stay cheap
beside one busy loop.
"""

CLOSE_TIMEOUT_S = 10.0
"""Maximum time that `close` waits for threads that are still working, before it abandons them."""

GIVEN_UP_S = 0.5
"""Maximum time that `close` waits for threads whose caller was cancelled.

Some of these threads are about to end, because they were asked to.
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
        called = name or str(getattr(fn, "__qualname__", "a blocking call"))
        return loop.run_in_executor(
            self._pool, lambda: _without_stop(called, lambda: in_context(fn, *args))
        )

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
                result = _without_stop(name, call)
            except BaseException as exc:  # noqa: BLE001  # Carried to the loop, where it is raised.
                error = exc
            # The loop may be closed already, if its owner gave up waiting for this thread.
            with suppress(RuntimeError):
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
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle)

        # Joining blocks, so it runs in a thread as well. That is a daemon, because the joined
        # thread may never end.
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
            joiner.join()  # The joiner has finished, so this returns at once.
            if alive := [thread.name for thread in threads if thread.is_alive()]:
                logger.warning(
                    "threads are left behind in an abandoned blocking call, and end "
                    "with it, or with the process: %s",
                    ", ".join(alive),
                )


class _SystemClock:
    """Reads the machine's clocks. The methods are the C functions themselves, so that each reading
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


TLS_HANDSHAKE_TIMEOUT_S = 10.0
"""Maximum time for the TLS handshake of a peer, before its protocol is made.

The event loops' own limit of a minute is too long for unauthorised peers.
"""


class SystemNetwork:
    """The `Network` of the real machine."""

    __slots__ = ()

    async def connect(
        self,
        protocol_factory: ProtocolFactory[ProtocolT],
        host: str,
        port: int,
        *,
        ssl: ssl_module.SSLContext | None = None,
        server_hostname: str | None = None,
    ) -> tuple[asyncio.Transport, ProtocolT]:
        # Both asyncio and uvloop switch Nagle's algorithm off themselves.
        return await asyncio.get_running_loop().create_connection(
            protocol_factory,
            host,
            port,
            ssl=ssl,
            server_hostname=server_hostname,
            ssl_handshake_timeout=None if ssl is None else TLS_HANDSHAKE_TIMEOUT_S,
        )

    async def listen(
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str,
        port: int,
        *,
        ssl: ssl_module.SSLContext | None = None,
    ) -> Listener:
        loop = asyncio.get_running_loop()
        timeout_s = None if ssl is None else TLS_HANDSHAKE_TIMEOUT_S
        return _SystemListener(
            await loop.create_server(
                protocol_factory, host, port, ssl=ssl, ssl_handshake_timeout=timeout_s
            )
        )


class _SystemListener:
    __slots__ = ("_server", "port")

    def __init__(self, server: asyncio.Server) -> None:
        self._server = server
        self.port: int = server.sockets[0].getsockname()[1]

    def close(self) -> None:
        server = self._server
        loop = server.get_loop()
        if not isinstance(loop, asyncio.SelectorEventLoop):
            server.close()
            return
        # A connection that asyncio has accepted gets its transport a turn later, and if the server
        # was closed meanwhile it is dropped with its socket open (python/cpython#109564). So this
        # stops accepting first, and lets accepted connections get their transports.
        for listening in server.sockets:
            loop.remove_reader(listening)
            with suppress(OSError):
                # Not every system can shut down a listener; there it ends a turn later.
                listening.shutdown(socket.SHUT_RDWR)
        loop.call_soon(server.close)


SECRET_FD_ENV = "AIOFLOW_SECRET_FD"
"""Environment variable with the descriptor from which a started process can read its secret once.
"""


class _SystemProcess:
    __slots__ = ("_process", "pid")

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):  # It ended after the check.
                self._process.send_signal(number)


MAIN_THREAD_ENV = "AIOFLOW_MAIN_THREAD_OF"
"""Environment variable with the id of the process whose main thread started this process."""

PR_SET_PDEATHSIG = 1
"""Number of the prctl option that sends a signal at the parent's end, from linux/prctl.h."""

FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
"""Matches the line of a frame in the output of faulthandler."""


class SystemProcesses:
    """The `Processes` of the operating system."""

    __slots__ = ()

    def identity(self) -> ProcessIdentity:
        pid = os.getpid()
        return ProcessIdentity(socket.gethostname(), pid, _machine(), _start_time(pid) or "")

    def usage(self) -> tuple[float, int]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        # The unit of the peak is a byte on macOS and a KiB elsewhere.
        peak_bytes = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return used.ru_utime + used.ru_stime, peak_bytes

    def thread_times(self) -> Callable[[], ThreadTimes]:
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"

        def read() -> ThreadTimes:
            try:
                with open(path) as file:
                    waited_ns = int(file.read().split()[1])
            except (OSError, IndexError, ValueError):
                waited_ns = 0
            return ThreadTimes(time.thread_time(), waited_ns / 1e9, time.process_time())

        return read

    def thread_frames(self, thread: int) -> list[Frame]:
        # Walking frames in Python is not safe. The other thread may run meanwhile and end its
        # frames. Python 3.11 then returned objects that were no frames.
        import tempfile  # Loads 14 modules, and only a blocked loop needs it.

        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            text = file.read().decode("utf-8", "replace")
        block = text.partition(f"0x{thread:016x} ")[2].partition("\n\n")[0]
        return [(file, int(line), name) for file, line, name in FRAME.findall(block)]

    def has_ended(self, process: ProcessIdentity) -> bool:
        # The process belongs to another boot, machine or container, where its numbers have another
        # meaning.
        if not process.machine or process.machine != _machine():
            return False
        return _start_time(process.pid) != process.started

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        secret: bytes | None = None,
    ) -> Process:
        environment = {**os.environ, **(env or {})}
        environment.pop(SECRET_FD_ENV, None)
        environment.pop(MAIN_THREAD_ENV, None)
        if threading.current_thread() is threading.main_thread():
            environment[MAIN_THREAD_ENV] = str(os.getpid())
        if secret is None:
            return _SystemProcess(await asyncio.create_subprocess_exec(*argv, env=environment))
        if len(secret) > 4096:
            # The minimum size of a pipe: writing never blocks, even before the child reads.
            raise ValueError(f"secret for {argv[0]} has {len(secret)} bytes, expected at most 4096")
        read_end, write_end = os.pipe()
        try:
            with open(write_end, "wb") as pipe:  # noqa: ASYNC230  # It fits into the pipe.
                pipe.write(secret)
            environment[SECRET_FD_ENV] = str(read_end)
            return _SystemProcess(
                await asyncio.create_subprocess_exec(*argv, env=environment, pass_fds=(read_end,))
            )
        finally:
            os.close(read_end)

    def take_secret(self) -> bytes | None:
        number = os.environ.pop(SECRET_FD_ENV, None)
        if number is None:
            return None
        with open(int(number), "rb") as pipe:
            return pipe.read()


def prefer_when_memory_is_short() -> None:
    """Makes the kernel end this process, rather than others of the user, when memory runs out."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


def end_with_parent() -> bool:
    """Makes the kernel kill this process when its parent ends. Returns whether the kernel will do
    this.

    This works even while a function holds the interpreter and so stops all Python threads. Only
    Linux offers this. It is used only if the parent's main thread started this process. The reason
    is that the kernel kills the process when the starting thread ends, even if the parent goes on.
    A parent that has ended before this call is not noticed.
    """
    started_by = os.environ.pop(MAIN_THREAD_ENV, None)
    if sys.platform != "linux" or started_by != str(os.getppid()):
        return False
    import ctypes  # Costs a millisecond, which only processes of workers need.

    return bool(ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) == 0)


def _without_stop(name: str, call: Callable[[], T]) -> T:
    """Returns `call()`. Raises RuntimeError for a StopIteration, which a future refuses."""
    try:
        return call()
    except StopIteration as error:
        raise RuntimeError(f"{name} raised StopIteration") from error


def _machine() -> str:
    """Returns an id of the machine's current boot and of the namespace of process numbers; "" if
    unknown.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """Returns the start time of a running process, in ticks since boot.

    Returns None if there is no such process, or if it has ended and its parent has not waited for
    it yet.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The name of the program comes first and may hold spaces and parentheses.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
