"""The JobManager inside a program ends with its users. No Java here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from aioflow.core.aio import wait_first
from aioflow.core.system_host import SystemHost
from aioflow.network.security import Security
from aioflow.spark.workers.provider import EmbeddedJobManager


class Unwanted:
    """A provider whose workers are never wanted."""

    workers, slots = 0, 1

    def start_workers(self, count: int, failed: Callable[[], object]) -> None: ...
    def registered(self, worker_id: str) -> None: ...
    def lost(self, worker_id: str, reason: str) -> None: ...


def is_there() -> bool:
    return any(thread.name == "aioflow-jobmanager" for thread in threading.enumerate())


async def test_a_start_that_is_cancelled_leaves_no_jobmanager_behind() -> None:
    host = SystemHost()
    made = EmbeddedJobManager(
        host, b"s" * 32, "127.0.0.1", Security(), Unwanted(), request_timeout_s=60, silence_s=10
    )
    starting = asyncio.get_running_loop().create_task(made.__aenter__())
    while not is_there():
        await asyncio.sleep(0)
    starting.cancel()
    await wait_first([starting])
    assert starting.cancelled()
    assert made._thread is not None and made._thread.done()
    await host.close()
