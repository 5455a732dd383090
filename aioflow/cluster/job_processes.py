"""The processes of a TaskManager's jobs: one process for each job, and a spare process for the next
job.

The code of a job never runs in the process of the TaskManager. So a function that blocks, exits,
crashes or fills the memory ends the tasks of its own job only. The TaskManager keeps the slots and
the connection to the JobManager, and relays messages:

    JobManager <-- one connection --> TaskManager <-- one connection a job --> process of the job

Records between processes do not pass through the TaskManager, because each process has a data
plane. A process serves one job under one JobMaster, and is not used again. Starting a process takes
longer than all other steps at the start of a job. So a spare process, which has imported the
engine, waits for the next job.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.cluster.job_session import REQUESTS, AttemptKey, attempt_key
from aioflow.cluster.placed_tasks import GRACE_S, until_overdue
from aioflow.cluster.rpc import RpcConnection, RpcServer
from aioflow.cluster.task_executor import RESOURCES_CLOSE_S
from aioflow.cluster.worker_processes import EXIT_TIMEOUT_S, JOB, WorkerProcess
from aioflow.core.aio import cancel_and_wait, wait_all, wait_first
from aioflow.core.errors import Broken
from aioflow.core.wire.serializers import Codec
from aioflow.graph.deployment import ExecutionAttemptId
from aioflow.network.security import security_of
from aioflow.protocol.handshake import PeerRole
from aioflow.task.closing import CLEANUP_TIMEOUT_S

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.inspection.process import LogTail
    from aioflow.network.security import TlsFiles

__all__ = ["JobProcess", "JobProcesses"]

logger = logging.getLogger(__name__)

SPARE_AFTER_S = 1.0
"""Delay of the next spare process after the start of a job, because starting it at once would slow
the job down."""

ANSWER_S = 1.0
"""Extra time for the process of a job to answer a question of a monitor, after the TaskManager
itself has answered."""


class JobProcess:
    """The session of a job in a process of its own, as its TaskManager sees it.

    The functions in `requests` pass the requests of the JobMaster on to the process, and return
    awaitables of the answers. Before a job is opened in the process, it is a spare process.
    """

    def __init__(self, number: int) -> None:
        self.worker = WorkerProcess(f"job-process-{number}")
        self.life: asyncio.Task[None] | None = None
        """Task that is done once the process has ended; None before the start."""
        self.connection: RpcConnection | None = None
        self.job_id = ""
        self.token = 0
        self.location = ""
        self.has_run = False
        self.is_closing = False
        """Whether the end of the process is expected."""
        self.missed: dict[int, int] = {}
        """Number of dropped rows that are not reported yet, by tap id. Contains only taps that may
        miss rows."""
        self._cancellation_timeout_s = 0.0
        self.requests: dict[str, Callable[..., Any]] = {
            name: partial(self._request, name) for name in REQUESTS
        }

    def _request(self, name: str, *args: Any) -> Coroutine[Any, Any, Any]:
        self.has_run = self.has_run or name == "submit_task"
        if name == "add_tap" and args[3]:
            self.missed.setdefault(args[2], 0)
        elif name == "remove_tap":
            self.missed.pop(args[2], None)
        return self.call(name, *args)

    def call(self, method: str, *args: Any) -> Coroutine[Any, Any, Any]:
        """Calls `method` of the process at once, and returns an awaitable of the answer. If the
        process is gone, raises the reason of its loss, or Broken."""
        if self.connection is None or not self.connection.is_open:
            raise self.worker.loss or Broken(f"{self.worker} is gone")
        return self.connection.call(method, *args)

    async def open(
        self,
        job_id: str,
        token: int,
        content: bytes,
        worker_id: str,
        bind: str,
        network_bytes: int,
        configuration: dict[str, str],
    ) -> bytes:
        """Loads a job into the process. Returns the packed error of its code, empty if there is
        none. Raises Broken if the process is gone."""
        assert self.life is not None, "the process is started first"
        self.job_id, self.token = job_id, token
        await wait_first([self.worker.registered, self.life])
        try:
            self.location, self._cancellation_timeout_s, error = await self.call(
                "open", job_id, token, content, worker_id, bind, network_bytes, configuration
            )
        except Broken as broken:
            # How the process ended is known a moment after its connection has ended.
            await wait_all([self.life])
            raise self.worker.loss or broken from broken
        return bytes(error)

    def resize(self, network_bytes: int) -> None:
        """Sets the share of the network memory that the process may use."""
        if self.connection is not None:
            self.connection.notify("resize", network_bytes)

    def report(self) -> None:
        """Does nothing: the process reports its metrics itself."""

    def cancel_task(self, attempt: ExecutionAttemptId) -> None:
        if self.connection is not None:
            _ = self.connection.ask("cancel_task", attempt_key(attempt))

    async def until_overdue(self) -> str:
        """Waits as long as a cancelled task may take to end. Then returns why the task is overdue,
        for an error message."""
        answers = [] if self.connection is None else [self.connection.ask("ping")]
        return await until_overdue(answers, self._cancellation_timeout_s)

    async def close(self) -> None:
        """Closes the job as `JobSession.close` does, and ends the process, by force if
        necessary."""
        self.is_closing = True
        timeout_s = self._cancellation_timeout_s
        longest_s = 3 * timeout_s + CLEANUP_TIMEOUT_S + RESOURCES_CLOSE_S + GRACE_S
        try:
            answers = [] if self.connection is None else [self.connection.ask("ping")]
            if await wait_all(answers, timeout_s=timeout_s):
                async with asyncio.timeout(longest_s):
                    await self.call("close")
            else:
                self.worker.lose("a function holds its event loop")
        except TimeoutError:
            self.worker.lose(f"it has not closed its job within {longest_s:g} s")
        except Broken:
            pass  # It is gone already.
        finally:
            await self.end()

    async def end(self) -> None:
        """Ends the process; kills it if it has not ended within `EXIT_TIMEOUT_S`."""
        self.is_closing = True
        if self.connection is not None:
            await self.connection.close()
        elif self.worker.process is not None:
            self.worker.process.kill()
        lives = [] if self.life is None else [self.life]
        if not await wait_all(lives, timeout_s=EXIT_TIMEOUT_S):
            logger.warning("%s does not end by itself, it is killed", self.worker)
            self.worker.lose("it did not end by itself")
            await wait_all(lives)


class JobProcessOwner(Protocol):
    """The interface of a TaskManager for the processes of its jobs."""

    @property
    def is_writable(self) -> bool:
        """Whether the connection to the JobManager has room. While it has none, rows for
        subscribers that may miss rows are dropped and counted."""

    def tell(self, method: str, *args: Any) -> None:
        """Passes a report on to the JobManager."""

    async def ask(self, method: str, *args: Any) -> Any:
        """Passes a question on to the JobMaster. Raises Broken if there is no JobManager."""

    def task_ended(self, attempt: ExecutionAttemptId) -> None:
        """Notes that a task has released its resources."""

    def process_lost(self, process: JobProcess, loss: Broken) -> None:
        """Notes the unexpected end of a process that had opened a job."""


class JobProcesses:
    """Starts and ends the processes of jobs. `logs` keeps the log records of all these processes
    for monitoring."""

    def __init__(
        self,
        host: Host,
        secret: bytes,
        owner: JobProcessOwner,
        logs: LogTail,
        tls: TlsFiles | None = None,
        preloaded: Sequence[str] = (),
    ) -> None:
        """`tls` names the TLS files of `host`, which each process loads again; None without TLS.

        `preloaded` names modules that a process imports before it gets its job.
        """
        self._host = host
        self._secret = secret
        self._owner = owner
        self._logs = logs
        plaintext = "plaintext" if security_of(host).allow_plaintext else ""
        files = ("", "", "") if tls is None else (tls.certificate, tls.key, tls.authority)
        self._arguments = [" ".join(preloaded), *files, plaintext]
        roles = frozenset([PeerRole.TASKMANAGER])
        self._server = RpcServer(host, secret, Codec(), roles, self._handlers, lambda _: None)
        self._address = ""
        self._numbers = itertools.count(1)
        self._known: dict[str, JobProcess] = {}
        """Processes that have not ended, by the id of the process."""
        self._spare: JobProcess | None = None
        self._spare_due: asyncio.TimerHandle | None = None
        self._closing = False

    async def listen(self) -> None:
        """Starts to listen for connections of the processes. Call this before the first process is
        started."""
        self._address = f"127.0.0.1:{await self._server.listen()}"

    async def close(self) -> None:
        """Ends all processes."""
        self._closing = True
        if self._spare_due is not None:
            self._spare_due.cancel()
        ends = [
            asyncio.get_running_loop().create_task(process.end(), name=f"end {process.worker}")
            for process in self._known.values()
        ]
        await wait_all(ends)
        await cancel_and_wait(ends)
        await self._server.close()

    def keep_spare(self) -> None:
        """Starts a spare process if there is none."""
        self._spare_due = None
        if self._spare is None and not self._closing:
            self._spare = self._start()

    def take(self) -> JobProcess:
        """Returns a process for a job: the spare process, or a new one that is just starting."""
        process, self._spare = self._spare or self._start(), None
        if self._spare_due is not None:
            self._spare_due.cancel()
        self._spare_due = asyncio.get_running_loop().call_later(SPARE_AFTER_S, self.keep_spare)
        return process

    def lose(self, job_id: str, why: str) -> None:
        """Kills the process of a job."""
        for process in self._known.values():
            if process.job_id == job_id:
                process.worker.lose(why)

    async def ask(self, what: str, *args: Any, until: asyncio.Future[Any]) -> list[Any]:
        """Asks the processes of all jobs the question `what` about themselves: see
        `ProcessInspector.ask`.

        Leaves out processes that have not answered `ANSWER_S` after `until` is done.
        """
        asked = [
            asyncio.get_running_loop().create_task(
                process.call("inspect", what, *args), name=f"inspect {process.worker}"
            )
            for process in self._known.values()
            if process.job_id and process.connection is not None and process.connection.is_open
        ]
        try:
            await wait_all([until])
            await wait_all(asked, timeout_s=ANSWER_S)
            return [
                answer.result() for answer in asked if answer.done() and answer.exception() is None
            ]
        finally:
            await cancel_and_wait(asked)

    # One process.

    def _start(self) -> JobProcess:
        process = JobProcess(next(self._numbers))
        self._known[process.worker.id] = process
        process.life = asyncio.get_running_loop().create_task(
            self._live(process), name=f"process of {process.worker.id}"
        )
        return process

    async def _live(self, process: JobProcess) -> None:
        worker = process.worker
        await worker.live(
            self._host, [JOB, self._address, worker.id, *self._arguments], self._secret
        )
        del self._known[worker.id]
        if process is self._spare:
            self._spare = None
        if process.connection is not None:
            process.connection.abort(worker.loss or Broken(f"{worker} is gone"))
        if process.is_closing or self._closing:
            return
        assert worker.loss is not None
        logger.warning("%s", worker.loss)
        if process.location:
            self._owner.process_lost(process, worker.loss)

    # Calls of the processes.

    def _handlers(self, connection: RpcConnection) -> dict[str, Callable[..., Any]]:
        return {
            "register": partial(self._register, connection),
            "alive": lambda *_: None,
            "ask": lambda method, args: self._owner.ask(method, *args),
            "task_ended": self._task_ended,
            "log": self._logs.add,
        }

    def _register(self, connection: RpcConnection, worker_id: str) -> None:
        process = self._known.get(worker_id)
        if process is None or process.worker.registered.done():
            raise Broken(f"no process {worker_id} is expected here")
        process.connection = connection
        connection.handlers = {
            **connection.handlers,
            "tell": partial(self._tell, process),
            "stuck": process.worker.lose,
        }
        process.worker.registered.set_result(None)

    def _tell(self, process: JobProcess, method: str, args: Sequence[Any]) -> None:
        if method == "tapped" and args[1] in process.missed:
            job_id, tap_id, content, rows, missed, refused = args
            missed += process.missed[tap_id]
            if rows and not self._owner.is_writable:
                process.missed[tap_id] = missed + rows
                return
            process.missed[tap_id] = 0
            args = job_id, tap_id, content, rows, missed, refused
        elif method == "report":
            for tap_id, missed in process.missed.items():
                if missed:
                    process.missed[tap_id] = 0
                    self._owner.tell("tapped", process.job_id, tap_id, b"", 0, missed, "")
        self._owner.tell(method, *args)

    def _task_ended(self, key: AttemptKey) -> None:
        self._owner.task_ended(ExecutionAttemptId(*key))
