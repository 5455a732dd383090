"""The code that runs in the process of one job: it serves the job's session to the TaskManager that
started the process.

The process ends with its connection to the TaskManager. A thread sends heartbeats, and logs the
place where a function blocks the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.cluster.heartbeat import HeartbeatOptions
from aioflow.cluster.job_session import REQUESTS, JobSession, attempt_key, pack_error
from aioflow.cluster.pulse import Pulse
from aioflow.cluster.rpc import RpcConnection, connect_rpc
from aioflow.cluster.shipping import load_job
from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import Broken, Closed
from aioflow.core.wire.serializers import Codec
from aioflow.inspection.process import LogTail, ProcessInspector
from aioflow.network.local_pool import NetworkBufferPool
from aioflow.protocol.handshake import PeerRole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflow.cluster.collector import Collector
    from aioflow.core.host import Host
    from aioflow.graph.deployment import ExecutionAttemptId

__all__ = ["JobServer"]

logger = logging.getLogger(__name__)

REPORT_S = 0.5
"""Interval between two reports of the metrics of the job."""

STUCK = 4
"""Exit code of a process that ends because a user function does not return."""

STUCK_S = 5.0
"""Time that the TaskManager has to kill a process that has asked to be killed."""


class _SentLogs(LogTail):
    """Sends the log records to the TaskManager, which keeps the records of all its processes."""

    def __init__(self, server: JobServer) -> None:
        super().__init__()
        self._server = server
        self._loop = asyncio.get_running_loop()

    def add(self, record: dict[str, Any]) -> None:
        if not self._loop.is_closed():
            # The record may come from any thread.
            self._loop.call_soon_threadsafe(self._server.send, "log", record)


class JobServer:
    """Serves the session of one job to the TaskManager at `address`, until the TaskManager closes
    the session.
    """

    def __init__(
        self,
        host: Host,
        secret: bytes,
        address: tuple[str, int],
        own_id: str,
        collector: Collector | None = None,
        preloaded: Sequence[str] = (),
    ) -> None:
        """Makes a server. `preloaded` are the modules to import before the job comes."""
        self._preloaded = preloaded
        self._host = host
        self._secret = secret
        self._address = address
        self._own_id = own_id
        self._collector = collector
        self._inspector = ProcessInspector(host, _SentLogs(self))
        self._connection: RpcConnection | None = None
        self._pulse: Pulse | None = None
        self._session: JobSession | None = None
        self._pool: NetworkBufferPool | None = None
        self._job_id = self._worker_id = ""
        self._disconnected = asyncio.Event()

    async def run(self) -> None:
        """Runs until the connection ends. Raises OSError or Broken if there is no TaskManager."""
        self._connection = await connect_rpc(
            self._host,
            self._secret,
            Codec(),
            PeerRole.TASKMANAGER,
            self._address,
            self._handlers(),
            lambda _: self._disconnected.set(),
        )
        create_task = asyncio.get_running_loop().create_task
        helpers = [create_task(self._run_reports(), name="metrics")]
        if self._collector is not None:
            helpers.append(create_task(self._collector.collect(), name="collect garbage"))
        interval_s = HeartbeatOptions().interval_s
        who = (self._own_id,)
        try:
            await self._connection.call("register", self._own_id)
            self._inspector.start()
            for module in self._preloaded:
                importlib.import_module(module)
            self._freeze()
            async with Pulse(
                self._host, self._secret, PeerRole.TASKMANAGER, self._address, interval_s, who
            ) as self._pulse:
                await self._disconnected.wait()
        finally:
            await cancel_and_wait(helpers)
            await self._close()
            await self._connection.close()
            await self._inspector.close()

    def send(self, method: str, *args: Any) -> None:
        """Sends a notification to the TaskManager."""
        if self._connection is not None:
            self._connection.notify(method, *args)

    # Requests of the TaskManager.

    def _handlers(self) -> dict[str, Any]:
        return {
            "open": self._open,
            "close": self._close,
            "ping": lambda: None,
            "resize": self._resize,
            "inspect": self._inspector.ask,
            **{name: partial(self._on_request, name) for name in REQUESTS},
        }

    async def _open(
        self,
        job_id: str,
        token: int,
        content: bytes,
        worker_id: str,
        bind: str,
        network_bytes: int,
        configuration: dict[str, str],
    ) -> tuple[str, float, bytes]:
        """Loads the job. Returns the location of the session, the cancellation timeout in s, and
        the packed error of the code, empty if there is none.
        """
        assert self._pulse is not None, "the TaskManager knows this process"
        self._job_id, self._worker_id = job_id, worker_id
        self._pool = NetworkBufferPool(network_bytes)
        try:
            with self._pulse.loading(f"job {job_id} on taskmanager {worker_id}"):
                job = load_job(content)
            job.options = replace(job.options, configuration=configuration)
            session = JobSession(
                self._host,
                self._secret,
                job_id,
                job,
                token,
                self._tell,
                self._ask,
                self._is_writable,
                self._on_task_end,
                self._end_process,
                self._report,
                self._pool,
            )
            await session.open(bind)
        # User code: any error belongs to the job.
        except Exception as error:  # noqa: BLE001
            return "", 0.0, pack_error(error, Codec())
        self._session = session
        self._freeze()
        return session.location, job.options.cancellation_timeout_s, b""

    def _freeze(self) -> None:
        """Freezes the loaded code, so that the garbage collector does not walk it again. The code
        is never freed."""
        if self._collector is not None:
            gc.collect()
            gc.freeze()

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _resize(self, network_bytes: int) -> None:
        if self._pool is not None:
            self._pool.resize(network_bytes)

    def _on_request(self, name: str, *args: Any) -> Any:
        if self._session is None:
            raise Closed(f"job {self._job_id} is not open in this process")
        return self._session.requests[name](*args)

    # Reports of the session.

    def _tell(self, method: str, *args: Any) -> None:
        self.send("tell", method, args)

    async def _ask(self, method: str, *args: Any) -> Any:
        if self._connection is None:
            raise Broken("there is no taskmanager now")
        return await self._connection.call("ask", method, args)

    def _is_writable(self) -> bool:
        return self._connection is not None and self._connection.is_writable

    def _on_task_end(self, attempt: ExecutionAttemptId) -> None:
        if self._collector is not None:
            self._collector.look_everywhere()
        self.send("task_ended", attempt_key(attempt))

    def _end_process(self, why: str) -> None:
        """Asks the TaskManager to kill this process. Without an answer the process ends itself
        after `STUCK_S`."""
        logger.error("the process of job %s ends: %s", self._job_id, why)
        self.send("stuck", why)
        asyncio.get_running_loop().call_later(STUCK_S, os._exit, STUCK)

    def _report(self) -> None:
        if self._session is not None:
            metrics = {**self._inspector.metrics(), **self._session.metrics.snapshot()}
            self._tell("report", self._job_id, self._worker_id, metrics)
            self._session.tell_missed()

    async def _run_reports(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            self._report()
