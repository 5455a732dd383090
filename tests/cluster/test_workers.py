"""The pool and the cluster of worker processes without the processes: what is decided when one is
lost, and where tasks go.

The workers here are the peers of real connections, so that they can misbehave. With real processes:
tests/integration/test_workers.py.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.heartbeat import HeartbeatOptions
from aioflow.cluster.rpc import RpcConnection, connect_rpc
from aioflow.cluster.worker_pool import WorkerPool, WorkerProcess
from aioflow.cluster.workers import WorkersCluster
from aioflow.core.errors import Broken
from aioflow.core.host import Process
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.serializers import Codec
from aioflow.graph.job_graph import build_job_graph
from aioflow.protocol.handshake import PeerRole
from aioflow.task.environment import TaskOptions

ROOT = Path(__file__).parents[2]

QUICK = HeartbeatOptions(interval_s=0.02, timeout_s=0.15, suspicion_s=0.05)


class Child:
    """A process that is only played: `kill` ends it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def end(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            self._ended.set()

    def terminate(self) -> None:
        self.end(-15)

    def kill(self) -> None:
        self.end(-9)


class Processes:
    """Instead of starting programs: remembers what was to be started, and lets `play` be the
    worker.
    """

    def __init__(self, play: Callable[[str, tuple[str, int], bytes, Child], Any]) -> None:
        self.children: list[Child] = []
        self.argv: list[Sequence[str]] = []
        self._play = play
        self._tasks: list[asyncio.Task[None]] = []

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        secret: bytes | None = None,
    ) -> Process:
        assert secret is not None
        assert not any(secret.hex() in part for part in argv)
        child = Child(1000 + len(self.children))
        self.children.append(child)
        self.argv.append(argv)
        host, _, port = argv[-2].rpartition(":")
        self._tasks.append(
            asyncio.create_task(self._play(argv[-1], (host, int(port)), secret, child))
        )
        return child

    def take_secret(self) -> bytes | None:
        return None


class Peers:
    """Workers that say hello and answer; tests make them go on from there."""

    def __init__(self) -> None:
        self.connections: dict[str, RpcConnection] = {}
        self.pings = 0

    def _ping(self) -> None:
        self.pings += 1

    async def play(
        self, worker_id: str, address: tuple[str, int], secret: bytes, child: Child
    ) -> None:
        handlers: dict[str, Callable[..., Any]] = {"ping": self._ping}
        connection = await connect_rpc(
            SystemHost(),
            secret,
            Codec(),
            PeerRole.TASKMANAGER,
            address,
            handlers,
            lambda _: child.end(0),
        )
        self.connections[worker_id] = connection
        connection.notify("hello", worker_id)


@asynccontextmanager
async def pool(
    peers: Peers, heartbeat: HeartbeatOptions = QUICK
) -> AsyncIterator[tuple[WorkerPool, list[str], list[WorkerProcess]]]:
    host = SystemHost()
    host.procs = Processes(peers.play)  # type: ignore[assignment]
    said: list[str] = []
    lost: list[WorkerProcess] = []

    async def open_worker(worker: WorkerProcess) -> str:
        return f"at {worker.id}"

    def say(worker: WorkerProcess, what: str) -> None:
        said.append(f"{worker.id} {what}")

    made = WorkerPool(host, b"s" * 32, heartbeat, {"say": say}, open_worker, lost.append)
    await made.listen()
    try:
        yield made, said, lost
    finally:
        await made.close()
        for connection in peers.connections.values():
            await connection.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_worker_that_says_hello_and_opens_the_job_takes_tasks() -> None:
    peers = Peers()
    async with pool(peers) as (workers, said, _):
        worker = await workers.start_worker()
        assert worker.is_open
        assert worker.location == "at worker-1"
        peers.connections["worker-1"].notify("say", "something")
        await until(lambda: said == ["worker-1 something"])


async def test_a_silent_worker_is_given_up_killed_and_not_heard_any_more() -> None:
    """R2."""
    peers = Peers()
    async with pool(peers) as (workers, said, lost):
        worker = await workers.start_worker()
        await until(lambda: lost == [worker])
        assert peers.pings > 2
        assert "no sign of life for 0.15 s" in str(worker.loss)
        assert worker.process is not None
        assert worker.process.returncode == -9
        peers.connections["worker-1"].notify("say", "I am back")
        await asyncio.sleep(0.05)
        assert said == []
        assert workers.open == []


async def test_every_message_of_a_worker_is_a_sign_of_life() -> None:
    peers = Peers()
    async with pool(peers) as (workers, _, lost):
        await workers.start_worker()
        for _ in range(20):
            peers.connections["worker-1"].notify("say", "here")
            await asyncio.sleep(0.02)
        assert lost == []


async def test_the_exit_code_is_told_although_the_connection_ends_first() -> None:
    peers = Peers()
    async with pool(peers) as (workers, _, lost):
        worker = await workers.start_worker()
        child: Any = worker.process
        connection = peers.connections["worker-1"]
        connection.on_connection_lost = lambda *_: None  # type: ignore[method-assign]
        await connection.close()
        child.end(7)
        await until(lambda: lost == [worker])
        assert (
            str(worker.loss)
            == "worker-1 (process 1000) is gone: its process ended with exit code 7"
        )


async def test_a_loss_is_told_once() -> None:
    peers = Peers()
    async with pool(peers) as (workers, _, lost):
        worker = await workers.start_worker()
        workers.lose(worker, "first")
        workers.lose(worker, "second")
        await asyncio.sleep(0.1)
        assert lost == [worker]
        assert str(worker.loss) == "worker-1 (process 1000) is gone: first"


async def test_a_stranger_with_the_secret_and_a_name_that_is_taken_is_cut_off() -> None:
    peers = Peers()
    async with pool(peers, HeartbeatOptions(interval_s=1, timeout_s=30)) as (workers, said, lost):
        worker = await workers.start_worker()
        gone = asyncio.Event()
        host, _, port = workers._address.rpartition(":")
        double = await connect_rpc(
            SystemHost(),
            b"s" * 32,
            Codec(),
            PeerRole.TASKMANAGER,
            (host, int(port)),
            {},
            lambda _: gone.set(),
        )
        double.notify("hello", "worker-1")
        double.notify("say", "it is me")
        await asyncio.wait_for(gone.wait(), 60)
        assert said == []
        assert worker.is_open
        assert lost == []


async def test_a_worker_that_ends_while_it_starts_says_how() -> None:
    class Dies(Peers):
        async def play(
            self, worker_id: str, address: tuple[str, int], secret: bytes, child: Child
        ) -> None:
            child.end(3)

    async with pool(Dies()) as (workers, _, lost):
        with pytest.raises(
            Broken, match=r"worker-1 \(process 1000\) is gone: its process ended with exit code 3"
        ):
            await workers.start_worker()
        assert lost == []  # Its starter knows.


# Placement.


def cluster_of(parallelism: int, workers: int) -> WorkersCluster:
    flow = af.Flow("placed", parallelism=parallelism)
    flow.source([1]).rebalance().map(str).key_by(str).count().sink(lambda row: None)
    graph = build_job_graph(flow.graph, apart=True)
    return WorkersCluster(SystemHost(), graph, af.no_restart(), TaskOptions(), workers)


def add_workers(cluster: WorkersCluster, *ids: str) -> list[WorkerProcess]:
    added = []
    for worker_id in ids:
        worker = WorkerProcess(worker_id, location=f"{worker_id}:1")
        worker.state = type(worker.state).OPEN
        cluster.pool._workers[worker_id] = worker
        added.append(worker)
    return added


async def test_subtask_i_goes_to_worker_i_and_what_is_the_programs_stays() -> None:
    cluster = cluster_of(parallelism=4, workers=2)
    add_workers(cluster, "a", "b")
    cluster._place()
    here = {vertex.id for vertex in cluster._graph.vertices if vertex.stays_here}

    assert here
    assert all(
        place == ("" if vertex in here else "ab"[index % 2])
        for (vertex, index), place in cluster._placed.items()
    )


async def test_a_replacement_gets_the_places_of_the_lost_worker_and_no_other_task_moves() -> None:
    cluster = cluster_of(parallelism=4, workers=2)
    lost, _ = add_workers(cluster, "a", "b")
    cluster._place()
    before = dict(cluster._placed)
    lost.state = type(lost.state).LOST
    add_workers(cluster, "c")
    cluster._place()

    assert cluster._placed == {
        where: "c" if place == "a" else place for where, place in before.items()
    }
    assert "a:1" not in cluster.job_master.executions.locations.values()


async def test_other_workers_take_over_without_a_replacement_and_without_others_none_does() -> None:
    cluster = cluster_of(parallelism=4, workers=2)
    first, second = add_workers(cluster, "a", "b")
    cluster._place()
    first.state = type(first.state).LOST
    cluster._place()
    assert set(cluster._placed.values()) == {"", "b"}
    second.state = type(second.state).LOST
    with pytest.raises(Broken, match="no worker is left"):
        cluster._place()


async def test_a_job_cancelled_before_its_workers_are_there_is_cancelled() -> None:
    class Never(Peers):
        async def play(
            self, worker_id: str, address: tuple[str, int], secret: bytes, child: Child
        ) -> None:
            """A worker hangs in its imports."""

    cluster = cluster_of(parallelism=1, workers=1)
    processes = Processes(Never().play)
    cluster.host.procs = processes  # type: ignore[misc]
    running = asyncio.create_task(cluster.run())
    await until(lambda: len(processes.children) == 1)
    cluster.job_master.cancel()

    assert await asyncio.wait_for(running, 60) is JobStatus.CANCELED
    assert processes.children[0].returncode == -9


async def test_a_job_cancelled_when_a_worker_has_died_says_nothing_more_about_it() -> None:
    """Ctrl-C in a terminal ends a worker that is still being loaded, and cancels the job that
    waits for the others.
    """

    class FirstDies(Peers):
        async def play(
            self, worker_id: str, address: tuple[str, int], secret: bytes, child: Child
        ) -> None:
            if worker_id == "worker-1":
                child.end(-2)

    async def cancelled() -> JobStatus:
        cluster = cluster_of(parallelism=2, workers=2)
        cluster.host.procs = Processes(FirstDies().play)  # type: ignore[misc]
        running = asyncio.create_task(cluster.run())
        await until(
            lambda: (
                len(cluster.pool.all) == 2
                and [task.get_name() for task in asyncio.all_tasks()].count("start worker") == 1
            )
        )
        cluster.job_master.cancel()
        return await asyncio.wait_for(running, 60)

    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: complaints.append(str(context))
    )
    assert await cancelled() is JobStatus.CANCELED
    gc.collect()
    assert complaints == []


def test_the_program_of_a_worker_is_deaf_to_the_terminal_before_it_loads_anything() -> None:
    program = (
        "import runpy, signal, sys, types\n"
        "worker = types.ModuleType('aioflow.cluster.worker')\n"
        "worker.main = lambda argv: [signal.raise_signal(number) for number in (signal.SIGINT, "
        "signal.SIGTERM)] and 7\n"
        "sys.modules[worker.__name__] = worker\n"
        "runpy.run_module('aioflow.cluster.worker_program', run_name='__main__')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (7, "")
