"""The only interface between aioflow and the machine.

`Host` contains all external services of the runtime: clocks, randomness, ids, files, the network,
blocking calls and processes. `core.system_host` implements `Host` on the real machine;
`aioflow.testing.simulation.SimulatedHost` simulates it.

Invariant: only `core.system_host` and its parts read a clock, draw a random number, open a file or
a socket, or start a thread or a process. Timers need no wrapper: they use the running event loop,
so `asyncio.sleep` and `asyncio.timeout` are virtual whenever the loop is.
"""

from __future__ import annotations

import asyncio
import ssl as ssl_module
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeVar, TypeVarTuple
from urllib.parse import quote, unquote

import msgspec

if TYPE_CHECKING:
    import builtins

__all__ = [
    "Clock",
    "FileStat",
    "FileSystem",
    "Frame",
    "Host",
    "Ids",
    "Listener",
    "Network",
    "Process",
    "ProcessIdentity",
    "Processes",
    "ProtocolFactory",
    "Rng",
    "ThreadTimes",
]  # fmt: skip

T = TypeVar("T")
E = TypeVar("E")
ProtocolT = TypeVar("ProtocolT", bound=asyncio.BaseProtocol)
Args = TypeVarTuple("Args")

ProtocolFactory = Callable[[], ProtocolT]


class Clock(Protocol):
    """The clocks of a host. Only `wall_ms` may step backwards."""

    def monotonic(self) -> float:
        """Returns the time in seconds on the clock of `loop.time()`."""
        ...

    def wall_ms(self) -> int:
        """Returns milliseconds since 1970-01-01 UTC."""
        ...

    def perf_ns(self) -> int:
        """Returns nanoseconds from an arbitrary origin, to measure short work. A call costs some 40
        ns.
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
    """A generator of identifiers that are unique among all hosts."""

    def new(self, kind: str) -> str:
        """Returns 32 lower-case hexadecimal digits.

        `kind` ("job", "attempt") names the purpose, for traces only.
        """
        ...


@dataclass(frozen=True, slots=True)
class FileStat:
    """The result of `FileSystem.stat` for a path."""

    size: int
    modified_ms: int
    is_dir: bool
    place: tuple[int, int] | None = field(default=None, compare=False)
    """Identity of the file, equal for two paths that lead to the same file. None on systems without
    links.
    """


class FileSystem(Protocol):
    """Access to files by path.

    Nothing survives loss of power before `fsync` (content) and `fsync_dir` (names). Errors are the
    built-in ones: `FileNotFoundError`, `FileExistsError`, `OSError` with its `errno`.
    """

    async def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Returns `length` bytes from `offset`, fewer at the end of the file.

        Returns all bytes from `offset` on if `length` is None.
        """
        ...

    async def write(self, path: str, data: bytes, *, sync: bool = False) -> None:
        """Replaces the whole content of a file; with `sync` also calls fsync.

        Readers may see a partly written file. To avoid this, write another file, then rename it.
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
        """Moves a file or directory, and replaces a target file. A reader of `target` sees either
        the old file or the new one.
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

        If the name is in use, the existing file is durable when this returns. The data is first
        written to the file `aside` in the same directory, which is then renamed. After an error
        `aside` may exist. Raises PermissionError as `check_inside` does.
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
        """Returns the names in a directory, sorted, as pairs (name, whether the name is that of a
        directory).

        This takes one call for any number of names.
        """
        ...

    async def stat(self, path: str) -> FileStat:
        """Returns the size, the modification time and the kind (file or directory) of a path."""
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
        """Creates a directory and its parents, durably. Does nothing if the directory exists.

        With `private`, only the owner may enter the created directories.
        """
        ...

    def open_read(self, path: str) -> BinaryIO:
        """Opens a file for reading. Blocks, so it may be called only inside a function given to
        `Host.blocking`.
        """
        ...


class Listener(Protocol):
    """A bound port that accepts connections until closed."""

    @property
    def port(self) -> int:
        """The bound port; the real port if 0 was requested."""
        ...

    def close(self) -> None:
        """Stops accepting; accepted connections stay open."""
        ...


class Network(Protocol):
    """The network of a host: connections over asyncio transports. Host names are resolved here and
    nowhere else.
    """

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

        Raises `OSError` (refused, unreachable, timed out). Limit the time that this takes with
        `asyncio.timeout`.
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
        """Listens on `port`, and makes one protocol for each connection. Port 0 selects a free
        port.

        Raises `OSError` if the port is in use.
        """
        ...


class ProcessIdentity(msgspec.Struct, frozen=True):
    """The identity of a process among all past and present processes.

    Other processes on the same machine can read it.
    """

    host: str
    """Name of the machine, for log and error messages."""
    pid: int
    machine: str
    """Identifies one boot of one machine; "" if unknown."""
    started: str
    """Distinguishes the process from others that had or will have the same `pid` on the machine."""

    def spell(self) -> str:
        """Returns the identity as text for a file name. The text omits `host`, and contains no
        underscore.
        """
        parts = (self.machine, str(self.pid), self.started)
        return "+".join(quote(part, safe="").replace("_", "%5F") for part in parts)

    @staticmethod
    def parse(text: str) -> ProcessIdentity | None:
        """Returns the identity from the text that `spell` returned, or None if `text` is not such a
        text.
        """
        parts = [unquote(part) for part in text.split("+")]
        if len(parts) != 3 or not parts[1].isdecimal():
            return None
        return ProcessIdentity("", int(parts[1]), parts[0], parts[2])


class ThreadTimes(msgspec.Struct, frozen=True):
    """Clocks of a thread, in seconds."""

    cpu_s: float
    """Processor time of the thread."""
    waited_s: float
    """Time in which the thread was ready to run but had no processor; 0 on systems that do not
    report it.
    """
    process_cpu_s: float
    """Processor time of all threads of the process."""

    def minus(self, earlier: ThreadTimes) -> ThreadTimes:
        """Returns the times since `earlier`."""
        return ThreadTimes(
            self.cpu_s - earlier.cpu_s,
            self.waited_s - earlier.waited_s,
            self.process_cpu_s - earlier.process_cpu_s,
        )


Frame = tuple[str, int, str]
"""A stack frame: file, line and name of the function."""


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

    def thread_times(self) -> Callable[[], ThreadTimes] | None:
        """Returns a function that reads the clocks of the thread that calls it. Returns None if
        there are no threads, as in a simulation.
        """

    def thread_frames(self, thread: int) -> list[Frame]:
        """Returns the frames of a thread, innermost first. Returns an empty list on a host without
        threads.

        The thread does not run while its frames are read. May be called from any thread.
        """

    def has_ended(self, process: ProcessIdentity) -> bool:
        """Returns whether a process is known to have ended. Returns False if the process runs, or
        if its state is unknown here.
        """
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        secret: bytes | None = None,
    ) -> Process:
        """Starts the command `argv`. `env` is added to the environment of this process. The started
        process does not end with its parent.

        `secret` (at most 4,096 bytes) is passed to the child through an inherited pipe, never by
        argument or environment; the child reads it with `take_secret`.
        """
        ...

    def take_secret(self) -> bytes | None:
        """Returns the secret from the parent process at the first call; None if there is none."""
        ...


class Host(Protocol):
    """All external services of the runtime.

    Functions that need the host get it as their first argument; there is no global host.
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
        """Runs `fn(*args)` in a thread, where it may block, and returns a future of its result on
        the running loop.

        The function has the context variables of the caller. Short calls share a bounded pool.
        `dedicated` gives the call a thread of its own, so that it never starves the pool. A
        dedicated thread is for work that lasts as long as a task, like a source's generator.
        Cancelling the future does not stop a running call, so long work needs its own stop signal.
        """
        ...

    def buggify(self, point: str, probability: float) -> bool:
        """Returns whether the caller should take its rare branch, named `point`, so that tests
        reach it.

        The seed decides in a simulation; a real machine returns False.
        """
        ...

    async def close(self) -> None:
        """Ends the threads of this host.

        Later `blocking` calls raise `RuntimeError`; a second call does nothing.
        """
        ...
