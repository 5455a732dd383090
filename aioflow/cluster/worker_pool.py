"""The worker processes of one job: started by exec, watched by heartbeats, ended with the job.

A worker is lost when its process or its connection ends, or when it is silent for too long. It is
fenced before `on_lost` is called: its connection is cut, its unread messages are dropped, and its
process is killed. So a worker that only slept cannot go on beside its replacement. A lost worker
stays lost.

    STARTING --open_job answered--> OPEN --ended, cut off, silent, or told to end--> LOST
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.cluster.heartbeat import (
    HeartbeatMonitor,
    HeartbeatOptions,
    Reason,
    SendHeartbeat,
    TimedOut,
)
from aioflow.cluster.rpc import RpcConnection, RpcServer
from aioflow.core.aio import cancel_and_wait, wait_all
from aioflow.core.errors import Broken, Closed, ProcessCrashed, note_once
from aioflow.core.wire.serializers import Codec
from aioflow.protocol.handshake import PeerRole

if TYPE_CHECKING:
    from aioflow.core.host import Host, Process

__all__ = ["WORKER_HEARTBEAT", "WorkerPool", "WorkerProcess"]

logger = logging.getLogger(__name__)

WORKER_HEARTBEAT = HeartbeatOptions(interval_s=1.0, timeout_s=60.0, suspicion_s=0.2)
"""A function may block its worker's loop: loading a model takes tens of seconds.

The end of a process is noticed at once, without heartbeats. The suspicion leaves time for its exit
code, which arrives after the end of its connection.
"""

MASTER_SILENCE_FACTOR = 5
"""Factor by which a worker waits longer for its job master's heartbeats.

A program may block its own loop for minutes (a notebook cell). The end of its process is noticed at
once.
"""

START_TIMEOUT_S = 60.0
"""Timeout from exec to a loaded job, which imports the program's modules."""

EXIT_TIMEOUT_S = 5.0
"""How long a worker may take to end after its connection was closed."""

CRASHES = frozenset(
    [
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGABRT,
        signal.SIGTRAP,
        signal.SIGSYS,
    ]
)
"""Signals that a process causes itself.

All others come from outside: from an operator, or from the kernel when memory runs out.
"""

Handlers = dict[str, Callable[..., Any]]


class WorkerState(Enum):
    """The state of a worker in its pool."""

    STARTING = "is starting"
    OPEN = "is open"
    LOST = "is gone"


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """One worker.

    `location`: where other processes read its partitions. `metrics`: its last report.
    """

    id: str
    hello: asyncio.Future[RpcConnection] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    state: WorkerState = WorkerState.STARTING
    process: Process | None = None
    connection: RpcConnection | None = None
    location: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    loss: Broken | None = None
    """Why the worker is LOST."""

    @property
    def is_open(self) -> bool:
        return self.state is WorkerState.OPEN

    @property
    def pid(self) -> int:
        """The process id; 0 before the process was started."""
        return 0 if self.process is None else self.process.pid

    def tell(self, method: str, *args: Any) -> None:
        """Sends a notification, if the worker is connected."""
        if self.connection is not None:
            self.connection.notify(method, *args)

    def __str__(self) -> str:
        return f"{self.id} (process {self.pid})"


class WorkerPool:
    """The workers of one job.

    `open_worker(worker)` prepares a connected worker and returns its location. `on_lost(worker)` is
    called for each OPEN worker that is lost. `handlers` take the worker as their first argument.
    """

    def __init__(
        self,
        host: Host,
        secret: bytes,
        heartbeat: HeartbeatOptions,
        handlers: Handlers,
        open_worker: Callable[[WorkerProcess], Awaitable[str]],
        on_lost: Callable[[WorkerProcess], None],
    ) -> None:
        self._host = host
        self._secret = secret
        self.heartbeat = heartbeat
        self._handlers = handlers
        self._open_worker = open_worker
        self._on_lost = on_lost
        self._monitor = HeartbeatMonitor(heartbeat)
        roles = frozenset([PeerRole.TASKMANAGER])
        self._server = RpcServer(
            host, secret, Codec(), roles, self._on_peer, self._on_connection_closed
        )
        self._workers: dict[str, WorkerProcess] = {}
        self._numbers = itertools.count(1)
        self._exits: dict[asyncio.Task[None], WorkerProcess] = {}
        self._beating: asyncio.Task[None] | None = None
        self._address = ""
        self._closing = False

    async def listen(self) -> None:
        """Starts to listen for workers and to watch them."""
        self._address = f"127.0.0.1:{await self._server.listen()}"
        self._beating = asyncio.get_running_loop().create_task(self._beat(), name="heartbeats")

    @property
    def open(self) -> list[WorkerProcess]:
        """Workers that take tasks, oldest first."""
        return [worker for worker in self._workers.values() if worker.is_open]

    @property
    def all(self) -> list[WorkerProcess]:
        """All workers, including starting and lost ones, oldest first."""
        return list(self._workers.values())

    def silence_s(self, worker: WorkerProcess) -> float:
        """Returns the seconds since a worker was last heard."""
        return self._monitor.silence_s(worker.id, self._host.clock.monotonic())

    def __getitem__(self, worker_id: str) -> WorkerProcess:
        return self._workers[worker_id]

    async def start_worker(self) -> WorkerProcess:
        """Starts a worker and returns it once it is ready.

        Raises Broken if it does not start, or the error of loading the job there.
        """
        worker = WorkerProcess(f"worker-{next(self._numbers)}")
        self._workers[worker.id] = worker
        # -P: the working directory is only on the path if it is on this process's path.
        argv = [
            sys.executable,
            "-P",
            "-m",
            "aioflow.cluster.worker_program",
            self._address,
            worker.id,
        ]
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        try:
            worker.process = await self._host.procs.exec(
                argv, env={"PYTHONPATH": paths}, secret=self._secret
            )
        except OSError as error:
            raise Broken(
                f"{worker.id} could not be started with {sys.executable}: {error}"
            ) from error
        exit_watch = asyncio.get_running_loop().create_task(
            self._watch_exit(worker, worker.process), name=f"exit of {worker.id}"
        )
        self._exits[exit_watch] = worker
        try:
            await self._get_ready(worker, exit_watch)
        except BaseException as error:
            self.lose(worker, f"it did not open the job: {error!r}")
            raise
        worker.state = WorkerState.OPEN
        self._monitor.monitor(worker.id, self._host.clock.monotonic())
        return worker

    async def _get_ready(self, worker: WorkerProcess, exit_watch: asyncio.Task[None]) -> None:
        deadline = asyncio.timeout(START_TIMEOUT_S)
        try:
            async with deadline:
                worker.connection = await worker.hello
                worker.location = await self._open_worker(worker)
        except TimeoutError as error:
            if not deadline.expired():
                raise  # A TimeoutError of the program.
            raise Broken(f"{worker} did not get ready within {START_TIMEOUT_S:g} s") from error
        except Broken:
            await wait_all(
                [exit_watch], timeout_s=self.heartbeat.suspicion_s
            )  # The exit code says more.
            if worker.loss is not None:
                raise worker.loss from None
            raise
        except Exception as error:
            note_once(error, f"while {worker} opened the job")
            raise

    def lose(self, worker: WorkerProcess, why: str, *, crashed: bool = False) -> None:
        """Fences `worker`, so that its later messages do not count, and calls `on_lost`.

        Idempotent.

        `crashed`: its own program caused the end, and may do so again.
        """
        if worker.state is WorkerState.LOST:
            return
        was_open = worker.is_open
        worker.state = WorkerState.LOST
        worker.loss = (ProcessCrashed if crashed else Broken)(f"{worker} is gone: {why}")
        self._monitor.unmonitor(worker.id)
        if worker.process is not None:
            worker.process.kill()
        if worker.connection is not None:
            worker.connection.abort(worker.loss)
        if not worker.hello.done():
            worker.hello.set_exception(worker.loss)
            worker.hello.exception()  # Marks it as retrieved; there may be no waiter yet.
        if was_open and not self._closing:
            logger.warning("%s", worker.loss)
            self._on_lost(worker)

    async def close(self) -> None:
        """Ends every worker, by force after EXIT_TIMEOUT_S. No process is left."""
        self._closing = True
        if self._beating is not None:
            await cancel_and_wait([self._beating])
        await self._server.close()
        if not await wait_all(list(self._exits), timeout_s=EXIT_TIMEOUT_S):
            for worker in self._exits.values():
                logger.warning("%s does not end by itself, it is killed", worker)
                self.lose(worker, "it did not end by itself")
            await wait_all(list(self._exits))

    # The end of a worker.

    async def _watch_exit(self, worker: WorkerProcess, process: Process) -> None:
        code = await process.wait()
        self._exits = {task: other for task, other in self._exits.items() if other is not worker}
        how = f"by {_signal_name(-code)}" if code < 0 else f"with exit code {code}"
        self.lose(worker, f"its process ended {how}", crashed=code > 0 or -code in CRASHES)

    def _on_connection_closed(self, connection: RpcConnection) -> None:
        for worker in self._workers.values():
            if (
                worker.connection is connection and worker.is_open
            ):  # For a starting worker, `_get_ready` fails instead.
                self._obey(self._monitor.connection_ended(worker.id, self._host.clock.monotonic()))

    async def _beat(self) -> None:
        while True:
            now = self._host.clock.monotonic()
            self._obey(self._monitor.tick(now))
            due = self._monitor.next_due()
            longest = min(
                self.heartbeat.interval_s, self.heartbeat.suspicion_s or self.heartbeat.interval_s
            )
            await asyncio.sleep(longest if due is None else min(longest, max(0.0, due - now)))

    def _obey(self, instructions: list[Any]) -> None:
        for instruction in instructions:
            match instruction:
                case SendHeartbeat(worker_id):
                    self._workers[worker_id].tell("ping")
                case TimedOut(worker_id, Reason.SILENCE):
                    self.lose(
                        self._workers[worker_id],
                        f"no sign of life for {self.heartbeat.timeout_s:g} s",
                    )
                case TimedOut(worker_id, reason):
                    self.lose(self._workers[worker_id], reason.value)

    # Messages of workers.

    def _on_peer(self, connection: RpcConnection) -> Handlers:
        return {"hello": partial(self._on_hello, connection), "alive": self._on_alive}

    def _on_alive(self, worker_id: str, held_s: float) -> None:
        """Handles a heartbeat from a thread of the worker, on a connection of its own.

        The process lives, even while a function blocks its loop.
        """
        worker = self._workers.get(worker_id)
        if worker is None or worker.state is WorkerState.LOST:
            raise Closed(f"{worker_id!r} is none of the workers here any more")
        self._monitor.lives(worker_id, self._host.clock.monotonic())

    def _on_hello(self, connection: RpcConnection, worker_id: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is None or worker.hello.done():
            raise Closed(f"{worker_id!r} says hello, and is not awaited")
        connection.handlers = {
            name: partial(self._heard, worker, handler) for name, handler in self._handlers.items()
        }
        worker.hello.set_result(connection)

    def _heard(self, worker: WorkerProcess, handler: Callable[..., Any], *args: Any) -> Any:
        """Passes on a message, which counts as a heartbeat.

        Messages of a lost worker are dropped.
        """
        if worker.state is WorkerState.LOST:
            return None
        self._monitor.received(worker.id, self._host.clock.monotonic())
        return handler(worker, *args)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
