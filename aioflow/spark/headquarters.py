"""Runs a JobManager inside the program that runs a flow, in a separate thread and event loop.

Its workers are elsewhere and end when they do not hear from it for some seconds. A program may
block its own loop for longer than that, so the JobManager cannot run there. It leads only this one
run: it has no rival for its lease, and its files are deleted with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from aioflow.checkpoint.lease import LeaseOptions
from aioflow.cluster.heartbeat import HeartbeatOptions
from aioflow.cluster.jobmanager import JobManager, JobManagerOptions
from aioflow.core.aio import wait_first
from aioflow.core.errors import Broken
from aioflow.core.system_host import SystemHost
from aioflow.network.security import SecuredHost

if TYPE_CHECKING:
    from aioflow.cluster.worker_provider import WorkerProvider
    from aioflow.core.host import Host
    from aioflow.network.security import Security

__all__ = ["Headquarters"]

ALONE = LeaseOptions(lease_s=86_400.0, renew_s=3_600.0, stop_s=60.0)
"""Options of a lease that does not run out, because there is no other candidate."""


@dataclass(slots=True)
class _Running:
    loop: asyncio.AbstractEventLoop
    manager: JobManager
    address: tuple[str, int]


class Headquarters:
    """An embedded JobManager, used as an async context manager.

    `address` is where workers and clients connect.
    """

    def __init__(
        self,
        host: Host,
        secret: bytes,
        bind: str,
        security: Security,
        provider: WorkerProvider,
        *,
        request_timeout_s: float,
        silence_s: float,
    ) -> None:
        """Stores the arguments. A worker that is silent for longer than `silence_s` seconds counts
        as lost.
        """
        self._host = host
        self._secret = secret
        self._bind = bind
        self._security = security
        self._provider = provider
        self._request_timeout_s = request_timeout_s
        self._heartbeat = HeartbeatOptions(timeout_s=silence_s, suspicion_s=0.0)
        self._running: _Running | None = None
        self._loop = asyncio.get_running_loop()
        self._listening: asyncio.Future[None] = self._loop.create_future()
        self._thread: asyncio.Future[None] | None = None

    @property
    def address(self) -> tuple[str, int]:
        assert self._running is not None, "it listens inside its async with"
        return self._running.address

    async def __aenter__(self) -> Self:
        self._thread = self._host.blocking(self._run, dedicated=True, name="aioflow-jobmanager")
        try:
            await wait_first([self._listening, self._thread])
        except asyncio.CancelledError:
            await self._end()
            raise
        if not self._listening.done():
            self._thread.result()
            raise Broken("the jobmanager of this program ended before it listened")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        error = await self._end()
        if error is not None:
            raise error

    async def _end(self) -> BaseException | None:
        """Stops the JobManager as soon as possible. Returns the error that it ended with, if
        any.
        """
        assert self._thread is not None, "it is entered"
        await wait_first([self._listening, self._thread])
        if self._running is not None and not self._thread.done():
            with contextlib.suppress(
                RuntimeError
            ):  # The loop is closed, because the JobManager has just ended by itself.
                self._running.loop.call_soon_threadsafe(self._running.manager.stop)
        await wait_first([self._thread])
        return self._thread.exception()

    # In the thread.

    def _run(self) -> None:
        data = tempfile.mkdtemp(prefix="aioflow-spark-workers-")
        try:
            asyncio.run(self._live(data))
        finally:
            shutil.rmtree(data, ignore_errors=True)

    async def _live(self, data: str) -> None:
        host = SecuredHost(SystemHost(), self._security)
        options = JobManagerOptions(
            data=data,
            bind=self._bind,
            port=0,
            request_timeout_s=self._request_timeout_s,
            lease=ALONE,
            heartbeat=self._heartbeat,
        )

        def on_listening(bind: str, port: int) -> None:
            self._running = _Running(asyncio.get_running_loop(), manager, (bind, port))
            self._loop.call_soon_threadsafe(self._on_listening)

        manager = JobManager(host, self._secret, options, on_listening, self._provider)
        try:
            await manager.run()
        finally:
            await host.close()

    # On the loop of the program.

    def _on_listening(self) -> None:
        if not self._listening.done():
            self._listening.set_result(None)
