"""The process of a worker, without Spark around it: it ends with its driver, also while a function holds its loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import aioflow as af
from aioflow.cluster.restart import no_restart
from aioflow.cluster.submission import ClusterClient, submission_of
from aioflow.cluster.whereabouts import Whereabouts
from aioflow.core.host import SystemHost
from aioflow.graph.job_graph import build_job_graph
from aioflow.network.security import Security
from aioflow.spark.headquarters import Headquarters
from aioflow.spark.worker import LOST_DRIVER
from aioflow.task.environment import TaskOptions
from tests.integration.processes import eventually

SECRET = b"s" * 32
SERVE = "import sys; from aioflow.spark.worker import WorkerTask; WorkerTask('worker-1', '127.0.0.1', int(sys.argv[1]), b's' * 32)._serve()"

pytestmark = pytest.mark.integration


class Provider:
    """Starts the processes as Spark's Python workers would be, but for Spark."""

    workers, slots = 1, 1

    def __init__(self, headquarters: Callable[[], Headquarters]) -> None:
        self._headquarters = headquarters
        self._loop = asyncio.get_running_loop()
        self.process: subprocess.Popen[bytes] | None = None
        self.came = asyncio.Event()
        self.left = asyncio.Event()

    def start_workers(self, count: int, failed: Callable[[], object]) -> None:
        if self.process is None:
            _, port = self._headquarters().address
            self.process = subprocess.Popen([sys.executable, "-c", SERVE, str(port)])

    def registered(self, worker_id: str) -> None:
        self._loop.call_soon_threadsafe(self.came.set)

    def lost(self, worker_id: str) -> None:
        self._loop.call_soon_threadsafe(self.left.set)


def holds(n: int, place: str) -> int:
    """Blocks the loop of its worker: no function should, and some do."""
    Path(place).touch()
    time.sleep(10_000)
    return n


async def test_an_idle_worker_ends_with_its_driver_by_itself() -> None:
    host = SystemHost()
    provider = Provider(lambda: headquarters)
    headquarters = Headquarters(host, SECRET, "127.0.0.1", Security(), provider, request_timeout_s=60, silence_s=10)
    async with headquarters, asyncio.timeout(120):
        await provider.came.wait()
    assert provider.process is not None
    await eventually(lambda: provider.process.poll() is not None)
    assert provider.process.poll() == 0
    await host.close()


async def test_a_worker_whose_loop_is_held_ends_with_its_driver_all_the_same(tmp_path: Path) -> None:
    host = SystemHost()
    provider = Provider(lambda: headquarters)
    headquarters = Headquarters(host, SECRET, "127.0.0.1", Security(), provider, request_timeout_s=60, silence_s=60)
    place = str(tmp_path / "held")
    async with headquarters, asyncio.timeout(120):
        flow = af.Flow("f")
        flow.source(range(3)).map(lambda n: holds(n, place)).sink(af.io.jsonl(tmp_path / "out"))
        job = submission_of(build_job_graph(flow.graph), no_restart(), TaskOptions())
        async with ClusterClient(host, Whereabouts((headquarters.address,)), SECRET) as client:
            await client.submit("job", job)
        await eventually(lambda: Path(place).exists())
        assert provider.process is not None and provider.process.poll() is None
    await eventually(lambda: provider.process.poll() is not None)
    assert provider.process.poll() == LOST_DRIVER
    await host.close()
