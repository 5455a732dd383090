"""A worker process: a TaskManager for the job of a program with `workers=N`, or the process of one
job of a TaskManager.

    python -m aioflow.cluster.worker_program HOST:PORT WORKER_ID SLOTS INTERVAL_S SILENCE_S
    python -m aioflow.cluster.worker_program --job HOST:PORT ID MODULES CERT KEY CA PLAINTEXT

In the second form, the process connects to the TaskManager at HOST:PORT; the last five arguments
may be empty. In this module, the program is the process that started the worker.

The secret comes through an inherited descriptor, never through arguments. The worker ends when its
connection or the program ends, because its tasks must not go on beside their replacements. A
terminal or a service manager sends signals to the whole process group. The worker ignores them; the
program handles them and ends its workers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aioflow.cluster.collector import COLLECTED_AFTER, install_collector
from aioflow.cluster.heartbeat import HeartbeatOptions, OwnPauses
from aioflow.cluster.leadership import LeaderRetrieval, parse_address
from aioflow.cluster.worker_processes import JOB
from aioflow.core.errors import Broken, NotAuthenticated
from aioflow.core.system_host import SystemHost, end_with_parent, prefer_when_memory_is_short
from aioflow.inspection.json_logs import JSON, LOG_FORMAT_ENV, configure_logging
from aioflow.network.security import SecuredHost, Security, TlsFiles

if TYPE_CHECKING:
    from aioflow.cluster.collector import Collector
    from aioflow.cluster.taskmanager import TaskManager
    from aioflow.core.host import Host

__all__ = ["main", "serve_job", "taskmanager_of"]

logger = logging.getLogger(__name__)

PARENT_CHECK_S = 0.5
PARENT_GRACE_S = 2.0
"""How long a worker may take to end after its parent process has died.

Without this limit, a blocking function would keep the worker alive for ever.
"""

FINISHED, UNREACHABLE, LOST_PROGRAM = 0, 1, 3
"""Exit codes of a worker process."""


def taskmanager_of(
    host: Host, secret: bytes, arguments: Sequence[str], collector: Collector | None = None
) -> TaskManager:
    """Makes the TaskManager of this process from its command line."""
    # Here: the process of a job needs no TaskManager, and a TaskManager no JobServer.
    from aioflow.cluster.taskmanager import TaskManager, TaskManagerOptions

    address, worker_id, slots, interval_s, silence_s = arguments
    options = TaskManagerOptions(
        jobmanagers=LeaderRetrieval((parse_address(address),)),
        slots=int(slots),
        network_bytes=None,
        follows=False,
        heartbeat=HeartbeatOptions(
            interval_s=float(interval_s),
            timeout_s=float(silence_s),
            own_pauses=OwnPauses.COUNTED,
        ),
    )
    manager = TaskManager(
        host, secret, options, worker_id, lambda why: manager.give_up(why), collector
    )
    return manager


async def serve_job(
    host: Host, secret: bytes, arguments: Sequence[str], collector: Collector | None = None
) -> None:
    """Serves one job to the TaskManager that started this process with these arguments."""
    from aioflow.cluster.job_process import JobServer

    address, own_id, modules, certificate, key, authority, plaintext = arguments
    tls = TlsFiles.of(certificate, key, authority, ("CERT", "KEY", "CA"))
    if tls is not None or plaintext:
        host = SecuredHost(host, Security.of(tls, allow_plaintext=bool(plaintext)))
    where = parse_address(address)
    await JobServer(host, secret, where, own_id, collector, modules.split()).run()


def main(arguments: Sequence[str]) -> int:
    """Runs the process and returns its exit code."""
    if arguments[0] == JOB or os.environ.get(LOG_FORMAT_ENV) == JSON:
        configure_logging()
    if arguments[0] == JOB:
        prefer_when_memory_is_short()
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        return runner.run(_main(arguments))


async def _main(arguments: Sequence[str]) -> int:
    host = SystemHost()
    secret = host.procs.take_secret()
    if secret is None:
        raise NotAuthenticated(
            "a worker is started by its program, which hands it the secret; there is none"
        )
    over, parent = threading.Event(), os.getppid()
    # If the parent has ended already, connecting fails below, before any code of the job runs.
    watching = (
        None
        if end_with_parent()
        else host.blocking(_watch_parent, parent, over, dedicated=True, name="aioflow-parent")
    )
    collector = install_collector()
    logger.info("the garbage collector of this worker has the thresholds %s", COLLECTED_AFTER)
    try:
        if arguments[0] == JOB:
            await serve_job(host, secret, arguments[1:], collector)
        else:
            manager = taskmanager_of(host, secret, arguments, collector)
            manager.inspector.start()
            await manager.run()
        return FINISHED
    except (OSError, Broken) as error:
        address, own_id = arguments[arguments[0] == JOB :][:2]
        logger.error("%s cannot reach its program at %s: %s", own_id, address, error)
        return UNREACHABLE
    finally:
        if os.getppid() != parent:
            # The parent is gone, and cannot end a process that a thread of user code keeps.
            os._exit(LOST_PROGRAM)
        over.set()
        if watching is not None:
            await watching
        await host.close()


def _watch_parent(parent: int, over: threading.Event) -> None:
    """Ends the process soon after its parent has died, on systems where the kernel does not do so.

    This function runs in a thread, because a user function may block the loop. A function that
    holds the interpreter stops this thread too.
    """
    while not over.wait(PARENT_CHECK_S):
        if os.getppid() != parent:
            if not over.wait(PARENT_GRACE_S):
                os._exit(LOST_PROGRAM)
            return


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
