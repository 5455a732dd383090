"""Starts worker processes by exec on this machine. `WorkerProcesses` is the `WorkerProvider` of one
job; `job_processes` starts the processes of a TaskManager's jobs.

    started --registers--> there --ends, is silent, or is stopped--> lost
            --ends, or does not register in time--> its start has failed

A lost worker is killed before its loss is reported. So a worker that was only suspended cannot go
on beside its replacement. No process outlives `close`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aioflow.cluster.heartbeat import HeartbeatOptions
from aioflow.core.aio import wait_all, wait_first
from aioflow.core.errors import Broken, ProcessCrashed

if TYPE_CHECKING:
    from aioflow.core.host import Host, Process

__all__ = ["JOB", "WORKER_HEARTBEAT", "WorkerProcess", "WorkerProcesses"]

logger = logging.getLogger(__name__)

JOB = "--job"
"""First argument of `worker_program` for the process of a job."""

WORKER_HEARTBEAT = HeartbeatOptions(interval_s=1.0, timeout_s=60.0, suspicion_s=0.2)
"""Heartbeats of workers. The timeout is long, because a function may block the loop of its worker;
loading a model takes tens of seconds.

The end of a process is noticed at once, without heartbeats. `suspicion_s` leaves time for the exit
code, which arrives after the end of the connection.
"""

PROGRAM_SILENCE_FACTOR = 5
"""A worker waits this many times longer for heartbeats of the program than the program waits for
heartbeats of the worker.

A program may block its own loop for minutes (a notebook cell). The end of the program's process is
noticed at once.
"""

START_TIMEOUT_S = 60.0
"""Timeout from exec to the registration."""

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
"""Signals that a process causes by its own fault.

All other signals come from outside: from an administrator, or from the kernel when memory runs out.
"""


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """One worker process, from its start to its end."""

    id: str
    process: Process | None = None
    registered: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    loss: Broken | None = None
    """The reason why the worker is lost; None while it is not lost."""

    @property
    def pid(self) -> int:
        """The process id; 0 before the process was started."""
        return 0 if self.process is None else self.process.pid

    def lose(self, why: str, *, crashed: bool = False) -> Broken:
        """Kills the process because of `why`, and returns the first reason of its loss.

        `crashed` means that the code in the process caused the end, and may do so again.
        """
        if self.loss is None:
            self.loss = (ProcessCrashed if crashed else Broken)(f"{self} is gone: {why}")
        if self.process is not None:
            self.process.kill()
        return self.loss

    async def live(self, host: Host, arguments: Sequence[str], secret: bytes) -> None:
        """Starts the process with the `arguments` of `worker_program`, and waits for its end.

        The worker must register within `START_TIMEOUT_S`. On return, `loss` says how the process
        ended.
        """
        # -P: the working directory is only on the path if it is on this process's path.
        argv = [sys.executable, "-P", "-m", "aioflow.cluster.worker_program", *arguments]
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        try:
            process = await host.procs.exec(argv, env={"PYTHONPATH": paths}, secret=secret)
        except OSError as error:
            self.loss = Broken(f"{self.id} could not be started with {sys.executable}: {error}")
            self.loss.__cause__ = error
            return
        self.process = process
        if self.loss is not None:
            process.kill()
        end = asyncio.get_running_loop().create_task(process.wait(), name=f"exit of {self.id}")
        if not await wait_first([end, self.registered], timeout_s=START_TIMEOUT_S):
            self.lose(f"it did not register within {START_TIMEOUT_S:g} s")
        code = await end
        how = f"by {_signal_name(-code)}" if code < 0 else f"with exit code {code}"
        self.lose(f"its process ended {how}", crashed=code > 0 or -code in CRASHES)

    def __str__(self) -> str:
        return f"{self.id} (process {self.pid})"


class WorkerProcesses:
    """The workers of one job; a `WorkerProvider`.

    `start_failed(loss)` is called for each worker that did not register. `lose(worker_id, why)` is
    called for each registered worker whose process has ended.
    """

    def __init__(
        self,
        host: Host,
        secret: bytes,
        workers: int,
        slots: int,
        heartbeat: HeartbeatOptions,
        start_failed: Callable[[Broken], None],
        lose: Callable[[str, str], None],
    ) -> None:
        self.workers = workers
        self.slots = slots
        self.address = ""
        """`host:port` at which workers register."""
        self._host = host
        self._secret = secret
        self._heartbeat = heartbeat
        self._start_failed = start_failed
        self._lose = lose
        self.known: dict[str, WorkerProcess] = {}
        """Workers whose process has not ended, by id, oldest first."""
        self._numbers = itertools.count(1)
        self._lives: dict[asyncio.Task[None], WorkerProcess] = {}
        self._closing = False

    # For the ResourceManager.

    def start_workers(self, count: int, failed: Callable[[], object]) -> None:
        for _ in range(0 if self._closing else count):
            worker = WorkerProcess(f"worker-{next(self._numbers)}")
            self.known[worker.id] = worker
            life = asyncio.get_running_loop().create_task(
                self._live(worker, failed), name=f"process of {worker.id}"
            )
            self._lives[life] = worker
            life.add_done_callback(self._lives.pop)

    def registered(self, worker_id: str) -> None:
        worker = self.known.get(worker_id)
        if worker is not None and not worker.registered.done():
            worker.registered.set_result(None)

    def lost(self, worker_id: str, reason: str) -> Broken | None:
        worker = self.known.get(worker_id)
        return None if worker is None else worker.lose(reason)

    def begin_closing(self) -> None:
        """Starts no further worker. From now on a worker that ends does not count as lost."""
        self._closing = True

    async def close(self) -> None:
        """Ends every worker, and kills those that have not ended within `EXIT_TIMEOUT_S`. No
        process is left."""
        self.begin_closing()
        for worker in self._lives.values():
            if not worker.registered.done():
                worker.lose("the job was over before it had started")
        if not await wait_all(list(self._lives), timeout_s=EXIT_TIMEOUT_S):
            for worker in self._lives.values():
                logger.warning("%s does not end by itself, it is killed", worker)
                worker.lose("it did not end by itself")
            await wait_all(list(self._lives))

    # One worker.

    async def _live(self, worker: WorkerProcess, failed: Callable[[], object]) -> None:
        """Starts a worker and waits for the end of its process."""
        beat = self._heartbeat
        silence_s = beat.timeout_s * PROGRAM_SILENCE_FACTOR
        arguments = [
            self.address,
            worker.id,
            str(self.slots),
            str(beat.interval_s),
            str(silence_s),
        ]
        await worker.live(self._host, arguments, self._secret)
        if self._closing:
            return
        assert worker.loss is not None
        if worker.registered.done():
            self._lose(worker.id, str(worker.loss))
        else:
            logger.warning("%s", worker.loss)
            self._start_failed(worker.loss)
            failed()
        del self.known[worker.id]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
