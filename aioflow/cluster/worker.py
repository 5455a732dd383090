"""A worker process of `workers=N`: a TaskManager for the one job of the program that started it.

    python -m aioflow.cluster.worker_program HOST:PORT WORKER_ID SLOTS INTERVAL_S SILENCE_S

The secret comes through an inherited descriptor, never through arguments. The process ends with its
connection, and with the program: its tasks must not go on beside their replacements. A terminal or
a service manager sends signals to the whole process group. The worker ignores them; the program
handles them and ends its workers.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aioflow.cluster.collector import COLLECTED_AFTER, collector_of_process
from aioflow.cluster.heartbeat import HeartbeatOptions, OwnPauses
from aioflow.cluster.taskmanager import TaskManager, TaskManagerOptions
from aioflow.cluster.whereabouts import Whereabouts, parse_address
from aioflow.core.errors import Broken, NotAuthenticated
from aioflow.core.system_host import SystemHost

if TYPE_CHECKING:
    from aioflow.cluster.collector import Collector
    from aioflow.core.host import Host

__all__ = ["main", "taskmanager_of"]

logger = logging.getLogger(__name__)

PARENT_CHECK_S = 0.5
PARENT_GRACE_S = 2.0
"""How long a worker may take to end after its parent died.

A blocking function would otherwise keep it for ever.
"""

FINISHED, UNREACHABLE, LOST_PROGRAM = 0, 1, 3
"""Exit codes."""


def taskmanager_of(
    host: Host, secret: bytes, arguments: Sequence[str], collector: Collector | None = None
) -> TaskManager:
    """Makes the TaskManager of this process from its command line."""
    address, worker_id, slots, interval_s, silence_s = arguments
    options = TaskManagerOptions(
        jobmanagers=Whereabouts((parse_address(address),)),
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


def main(arguments: Sequence[str]) -> int:
    """Runs the process and returns its exit code."""
    gc.set_threshold(*COLLECTED_AFTER)
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
    watching = host.blocking(_end_with_parent, parent, over, dedicated=True, name="aioflow-parent")
    try:
        manager = taskmanager_of(host, secret, arguments, collector_of_process(host.clock.perf_ns))
        manager.inspector.start()
        await manager.run()
        return FINISHED
    except (OSError, Broken) as error:
        logger.error("%s cannot reach its program at %s: %s", arguments[1], arguments[0], error)
        return UNREACHABLE
    finally:
        if os.getppid() != parent:
            os._exit(
                LOST_PROGRAM
            )  # The parent is gone, and cannot end a process that a thread of user code keeps.
        over.set()
        await watching
        await host.close()


def _end_with_parent(parent: int, over: threading.Event) -> None:
    """Ends the process soon after its parent died.

    It runs in a thread, because a function may block the loop.
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
