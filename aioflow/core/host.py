"""The only interface between aioflow and the machine.

`Host` contains all external services of the runtime: clocks, randomness, ids, files, the network,
blocking calls and processes. `SystemHost` implements them on the machine;
`aioflow.testing.simulation.SimulatedHost` implements virtual ones.

Invariant: no other module of the runtime reads a clock, draws a random number, opens a file or a
socket, or starts a thread or a process. Timers need no wrapper: they use the running event loop, so
`asyncio.sleep` and `asyncio.timeout` are virtual whenever the loop is.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import random
import secrets
import ssl as ssl_module
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeVar, TypeVarTuple

from aioflow.core.system_files import FileStat, SystemFileSystem
from aioflow.core.system_network import SystemNetwork
from aioflow.core.system_processes import SECRET_FD_ENV, ProcessIdentity, SystemProcesses

if TYPE_CHECKING:
    import builtins

__all__ = [
    "SECRET_FD_ENV", "Clock", "FileStat", "FileSystem", "Host", "Ids", "Listener", "Network",
    "Process", "Processes", "ProcessIdentity", "ProtocolFactory", "Rng", "SystemHost",
]  # fmt: skip

T = TypeVar("T")
E = TypeVar("E")
ProtocolT = TypeVar("ProtocolT", bound=asyncio.BaseProtocol)
Args = TypeVarTuple("Args")

ProtocolFactory = Callable[[], ProtocolT]

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


class Clock(Protocol):
    """Three readings of time; only `wall_ms` may step backwards."""

    def monotonic(self) -> float:
        """Seconds on the clock that `loop.time()` also shows."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        ...

    def perf_ns(self) -> int:
        """Nanoseconds from an arbitrary origin, for the length of short work; costs some 40 ns
        to read.
        """
        ...


class Rng(Protocol):
    """The part of `random.Random` that the runtime uses: back-off jitter, sampling, shuffling."""

    def random(self) -> float: ...

    def uniform(self, a: float, b: float) -> float: ...

    def randrange(self, start: int, stop: int | None = None) -> int: ...

    def getrandbits(self, k: int, /) -> int: ...

    def choice(self, seq: Sequence[E]) -> E: ...

    def expovariate(self, lambd: float) -> float: ...


class Ids(Protocol):
    """A generator of identifiers that no other host makes."""

    def new(self, kind: str) -> str:
        """Returns 32 lower-case hexadecimal digits.

        `kind` ("job", "attempt") names the purpose, for traces only.
        """
        ...


class FileSystem(Protocol):
    """Files by path. Nothing survives loss of power before `fsync` (content) and `fsync_dir`
    (names).

    Errors are the built-in ones: `FileNotFoundError`, `FileExistsError`, `OSError` with its
    `errno`.
    """

    async def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Returns `length` bytes from `offset`, fewer at the end of the file.

        Returns all bytes that follow if `length` is None.
        """
        ...

    async def write(self, path: str, data: bytes, *, sync: bool = False) -> None:
        """Replaces the whole content; with `sync` also calls fsync.

        Readers may see a part: write another file, then rename it.
        """
        ...

    async def append(self, path: str, data: bytes, *, sync: bool = False) -> None:
        """Appends to the file, which is created if it is missing."""
        ...

    async def fsync(self, path: str) -> None:
        """Makes the content of a file survive loss of power."""
        ...

    async def fsync_dir(self, path: str) -> None:
        """Makes the names in a directory (created, renamed, deleted) survive loss of power."""
        ...

    async def rename(self, source: str, target: str) -> None:
        """Moves a file or directory and replaces a target file: a reader sees the old file or the
        new one.
        """
        ...

    async def rename_new(self, source: str, target: str) -> bool:
        """Moves a file to a free name. Returns False, with nothing changed, if the name is in use.

        Of several concurrent moves one succeeds.
        """
        ...

    async def delete(self, path: str, *, recursive: bool = False) -> bool:
        """Removes a file or an empty directory, or a whole tree if `recursive`.

        Returns False if the path did not exist.
        """
        ...

    async def create(self, path: str, data: bytes, *, aside: str, within: str) -> bool:
        """Creates a file atomically and durably. Returns False if the name is in use.

        The existing name is then durable as well. The data is written to `aside`, in the same
        directory, which is then renamed. After an error `aside` may exist. Raises PermissionError
        as `check_inside` does.
        """
        ...

    async def remove(self, paths: Sequence[str], *, within: str) -> None:
        """Removes existing files, and then the empty directories below `within`, durably.

        Raises PermissionError as `check_inside` does.
        """
        ...

    async def check_inside(self, path: str, within: str) -> None:
        """Raises PermissionError if symbolic links lead `path` out of the directory `within`.

        `within` itself may be a link.
        """
        ...

    async def list(self, path: str) -> list[str]:
        """Returns the names in a directory, sorted."""
        ...

    async def scan(self, path: str) -> builtins.list[tuple[str, bool]]:
        """Returns the names in a directory, sorted, each with whether it is a directory.

        It is one call for any number of names.
        """
        ...

    async def stat(self, path: str) -> FileStat:
        """Returns size, modification time and kind."""
        ...

    async def stats(self, paths: Sequence[str]) -> builtins.list[FileStat | None]:
        """Returns the result of `stat` for each path, in one call.

        The result is None for a missing path or a dangling link.
        """
        ...

    async def exists(self, path: str) -> bool:
        """Returns whether a file or directory has this path."""
        ...

    async def mkdirs(self, path: str, *, private: bool = False) -> None:
        """Creates a directory and its parents, durably; does nothing if it exists.

        `private`: only the owner may enter the created directories.
        """
        ...

    def open_read(self, path: str) -> BinaryIO:
        """Opens a file for reading. Blocks: only inside a function given to `Host.blocking`."""
        ...

    def open_write(self, path: str, *, append: bool = False) -> BinaryIO:
        """Opens a file for writing, emptied unless `append`.

        Blocks: only inside a function given to `Host.blocking`.
        """
        ...


class Listener(Protocol):
    """A bound port that accepts connections until closed."""

    @property
    def port(self) -> int:
        """The bound port: the real one if 0 was requested."""
        ...

    def close(self) -> None:
        """Stops accepting; accepted connections stay open."""
        ...


class Network(Protocol):
    """Connections over asyncio transports. Names are resolved here and nowhere else."""

    async def connect(
        self,
        protocol_factory: ProtocolFactory[ProtocolT],
        host: str,
        port: int,
        *,
        ssl: ssl_module.SSLContext | None = None,
        server_hostname: str | None = None,
    ) -> tuple[asyncio.Transport, ProtocolT]:
        """Opens a connection.

        Raises `OSError` (refused, unreachable, timed out). Limit its time with `asyncio.timeout`.
        """
        ...

    async def listen(
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str,
        port: int,
        *,
        ssl: ssl_module.SSLContext | None = None,
    ) -> Listener:
        """Accepts connections, one protocol each; port 0 selects a free port.

        Raises `OSError` if the port is in use.
        """
        ...


class Process(Protocol):
    """A process that this host started."""

    @property
    def pid(self) -> int:
        """Number of the process on this machine."""
        ...

    @property
    def returncode(self) -> int | None:
        """The return code; None while the process runs, negative for the signal that ended it."""
        ...

    async def wait(self) -> int:
        """Waits until the process has ended and returns its return code."""
        ...

    def terminate(self) -> None:
        """Asks the process to end (SIGTERM); does nothing if it has ended."""
        ...

    def kill(self) -> None:
        """Ends the process at once (SIGKILL); does nothing if it has ended."""
        ...


class Processes(Protocol):
    """Starts processes by exec, never by fork."""

    def identity(self) -> ProcessIdentity:
        """Returns the identity of this process."""
        ...

    def usage(self) -> tuple[float, int]:
        """Returns the processor time of this process in seconds, and its peak memory in bytes."""
        ...

    def has_ended(self, process: ProcessIdentity) -> bool:
        """Returns whether a process is known to have ended.

        False: the process runs, or its state is unknown here.
        """
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        secret: bytes | None = None,
    ) -> Process:
        """Starts `argv` with `env` added to this environment; a dead parent does not end the
        process.

        `secret` (at most 4,096 bytes) is passed to the child through an inherited pipe, never by
        argument or environment; the child reads it with `take_secret`.
        """
        ...

    def take_secret(self) -> bytes | None:
        """Returns the secret from the parent process at the first call; None if there is none."""
        ...


class Host(Protocol):
    """All external services of the runtime.

    It is passed as the first argument; there is no global host.
    """

    @property
    def clock(self) -> Clock: ...

    @property
    def rng(self) -> Rng: ...

    @property
    def ids(self) -> Ids: ...

    @property
    def fs(self) -> FileSystem: ...

    @property
    def net(self) -> Network: ...

    @property
    def procs(self) -> Processes: ...

    def blocking(
        self,
        fn: Callable[[*Args], T],
        *args: *Args,
        dedicated: bool = False,
        name: str | None = None,
    ) -> asyncio.Future[T]:
        """Runs `fn(*args)` where it may block, and returns a future of its result on the running
        loop.

        The function has the context variables of the caller. Short calls share a bounded pool.
        `dedicated` gives the call a thread of its own, for work that lasts as long as a task does
        (a source's generator), so that it never starves the pool. Cancelling the future does not
        stop a running call, so long work needs its own way to be stopped.
        """
        ...

    def buggify(self, point: str, probability: float) -> bool:
        """Returns whether to take the rare branch at `point`.

        The seed decides in a simulation; a real machine returns False.
        """
        ...

    async def close(self) -> None:
        """Ends the threads of this host.

        Later `blocking` calls raise `RuntimeError`; a second call does nothing.
        """
        ...


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
        """Returns False: rare branches are for simulations."""
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
            joiner.join()  # It has nothing left to do but return.
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
