"""A worker inside a Python process of a Spark executor, which runs as long as the flow does.

The worker is an ordinary TaskManager of the JobManager in the program that runs the flow. It ends
when the JobManager releases it, when the connection to the JobManager ends, or when it hears
nothing from the JobManager. So no worker is left on the executors, even if the driver dies.

This module is loaded before it is known which libraries the executors have, so it imports nothing
but the standard library.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import threading

    from aioflow.cluster.taskmanager import TaskManager
    from aioflow.core.host import Host

__all__ = ["LACKS", "NEEDED", "RETRIED", "SERVED", "WorkerTask"]

NEEDED = ("aiohttp", "cloudpickle", "msgpack", "msgspec")
"""Libraries that must be installed on the executors. aioflow itself is shipped with the job."""

SERVED, RETRIED, LACKS = "served", "retried", "lacks"
"""The ways in which a worker's Spark job can end: the worker has served, the attempt was a retry by
Spark, or the executor lacks a library.
"""

SILENCE_S = 6.0
"""Time in seconds without a message of the driver, after which the driver counts as lost.

The driver answers from a thread of its own, even while the loop of the program is blocked.
"""

CHECK_S = 0.5
GRACE_S = 2.0
"""Maximum time for a worker without a driver to end by itself, in seconds. After that the worker's
process is killed, because a function that blocks would keep it alive for ever.
"""

LOST_DRIVER = 3
"""Exit code of a worker that has lost its driver."""


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """The function for `mapPartitions` that runs a worker.

    Its only result is a pair: how the worker ended (SERVED, RETRIED or LACKS), and details.
    """

    worker_id: str
    host: str
    port: int
    secret: bytes = field(repr=False)
    """Secret of the cluster, which is sent with the task over Spark's own connections."""
    slots: int = 1
    tls: tuple[str, str, str] | None = None
    """Paths of certificate, key and authority on the executor's machine."""
    allow_plaintext: bool = False
    needed: tuple[str, ...] = NEEDED

    def __call__(self, rows: Iterator[Any]) -> Iterator[tuple[str, str]]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "Spark runs it in a task"
        lacking = [name for name in self.needed if find_spec(name) is None]
        if lacking:
            yield (
                LACKS,
                f"{sys.executable} (Python {platform.python_version()}) on {platform.node()} "
                f"lacks {', '.join(lacking)}",
            )
        elif context.attemptNumber():
            # The ResourceManager alone decides which worker is started again, and has already
            # asked for another one.
            yield RETRIED, f"attempt {context.attemptNumber()}"
        else:
            self._serve()
            yield SERVED, ""

    def _serve(self) -> None:
        import asyncio

        from aioflow.api.runner import new_event_loop

        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        import threading

        from aioflow.cluster.heartbeat import HeartbeatOptions, OwnPauses
        from aioflow.cluster.leadership import LeaderRetrieval
        from aioflow.cluster.taskmanager import TaskManager, TaskManagerOptions

        host = self._secured()
        options = TaskManagerOptions(
            jobmanagers=LeaderRetrieval(((self.host, self.port),)),
            slots=self.slots,
            network_bytes=None,
            bind=_reached_from(self.host, self.port),
            follows=False,
            heartbeat=HeartbeatOptions(timeout_s=SILENCE_S, own_pauses=OwnPauses.COUNTED),
        )
        manager = TaskManager(host, self.secret, options, self.worker_id)
        manager.inspector.start()  # Early, so that the first request finds a history.
        over = threading.Event()
        watching = host.blocking(
            _end_with_driver, manager, host, over, dedicated=True, name="aioflow-driver"
        )
        try:
            await manager.run()
        finally:
            over.set()
            await watching
            await host.close()

    def _secured(self) -> Host:
        from aioflow.core.system_host import SystemHost
        from aioflow.network.security import SecuredHost, Security, TlsFiles

        if self.tls is None and not self.allow_plaintext:
            return SystemHost()
        contexts = None
        if self.tls is not None:
            certificate, key, authority = self.tls
            contexts = TlsFiles(certificate=certificate, key=key, authority=authority).load()
        return SecuredHost(
            SystemHost(), Security(tls=contexts, allow_plaintext=self.allow_plaintext)
        )


def _reached_from(host: str, port: int) -> str:
    """Returns the address from which this machine reaches the driver. Other workers connect to this
    address.

    Sends nothing.
    """
    import socket

    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _end_with_driver(manager: TaskManager, host: Host, over: threading.Event) -> None:
    """Ends the process of the worker when the driver is silent or has ended. Runs in a thread,
    because a function may block the loop.
    """
    parent = os.getppid()
    while not over.wait(CHECK_S):
        heard_at = manager.heard_at
        is_silent = heard_at is not None and host.clock.monotonic() - heard_at > SILENCE_S
        if is_silent or os.getppid() != parent:
            if not over.wait(GRACE_S):
                os._exit(LOST_DRIVER)
            return
