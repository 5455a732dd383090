"""The process of a worker, without Spark around it: it ends with its driver, also while a
function holds its loop.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import aioflow as af
from aioflow.cluster.leadership import LeaderRetrieval
from aioflow.cluster.restart import no_restart
from aioflow.cluster.submission import ClusterClient, submission_of
from aioflow.core.system_host import SystemHost
from aioflow.graph.job_graph import build_job_graph
from aioflow.network.security import Security, TlsFiles
from aioflow.spark.workers.provider import EmbeddedJobManager
from aioflow.spark.workers.worker import LOST_DRIVER, RETRIED, WorkerTask
from aioflow.task.environment import TaskOptions
from tests.integration.clusters import ROOT
from tests.integration.processes import eventually
from tests.network.certificates import Authority

SECRET = b"s" * 32
SERVE = "import pickle, sys; pickle.load(sys.stdin.buffer)._serve()"

pytestmark = pytest.mark.integration


class Provider:
    """Starts the processes as Spark's Python workers would be, but for Spark."""

    workers, slots = 1, 1

    def __init__(self) -> None:
        self.job_manager: EmbeddedJobManager | None = None
        self.tls: tuple[str, str, str] | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.came = threading.Event()

    def start_workers(self, count: int, failed: Callable[[], object]) -> None:
        if self.process is None:
            assert self.job_manager is not None
            task = WorkerTask("worker-1", *self.job_manager.address, SECRET, tls=self.tls)
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, cwd=ROOT
            )
            assert self.process.stdin is not None
            with self.process.stdin as pipe:
                pipe.write(pickle.dumps(task))

    def registered(self, worker_id: str) -> None:
        self.came.set()

    def lost(self, worker_id: str, reason: str) -> None: ...

    def is_over(self) -> bool:
        return self.process is not None and self.process.poll() is not None


def holds(n: int, place: str) -> int:
    """Blocks the loop of its worker: no function should, and some do."""
    Path(place).touch()
    time.sleep(10_000)
    return n


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.wait()


@asynccontextmanager
async def job_manager_for(
    provider: Provider, silence_s: float, tls: TlsFiles | None = None
) -> AsyncIterator[tuple[SystemHost, EmbeddedJobManager]]:
    host, security = SystemHost(), Security(tls=None if tls is None else tls.load())
    made = EmbeddedJobManager(
        host, SECRET, "127.0.0.1", security, provider, request_timeout_s=60, silence_s=silence_s
    )
    provider.job_manager = made
    async with made:
        await eventually(provider.came.is_set)
        yield host, made
    await host.close()


async def test_an_idle_worker_ends_with_its_driver_by_itself(provider: Provider) -> None:
    async with job_manager_for(provider, 10):
        assert not provider.is_over()
    await eventually(provider.is_over, within_s=40)
    assert provider.process is not None and provider.process.returncode == 0


# In debug mode it logs a TLS handshake that ends with the worker: its heartbeat may just connect.
@pytest.mark.expects_asyncio_errors
async def test_a_worker_with_a_certificate_comes_over_tls(
    provider: Provider, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("worker")
    provider.tls = files.certificate, files.key, files.authority
    async with job_manager_for(provider, 10, authority.issue("driver")):
        assert not provider.is_over()
    await eventually(provider.is_over, within_s=40)
    assert provider.process is not None and provider.process.returncode == 0


async def test_a_worker_whose_loop_is_held_ends_with_its_driver_all_the_same(
    provider: Provider, tmp_path: Path
) -> None:
    place = str(tmp_path / "held")
    flow = af.Flow("f")
    flow.source(range(3)).map(lambda n: holds(n, place)).sink(af.io.jsonl(tmp_path / "out"))
    async with job_manager_for(provider, 60) as (host, job_manager):
        async with ClusterClient(host, LeaderRetrieval((job_manager.address,)), SECRET) as client:
            await client.submit(
                "job",
                submission_of(build_job_graph(flow.graph), no_restart(), TaskOptions()),
                timeout_s=30.0,
            )
        await eventually(lambda: Path(place).exists())
        assert not provider.is_over()
    await eventually(provider.is_over, within_s=40)
    assert provider.process is not None and provider.process.returncode == LOST_DRIVER


def test_a_second_attempt_of_spark_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class SecondAttempt:
        def attemptNumber(self) -> int:
            return 1

    monkeypatch.setattr("pyspark.TaskContext.get", SecondAttempt)
    assert list(WorkerTask("worker-1", "127.0.0.1", 1, SECRET)(iter(()))) == [
        (RETRIED, "attempt 1")
    ]
