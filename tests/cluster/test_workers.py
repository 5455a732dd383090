"""Worker processes of `workers=N` without the processes: what is decided when one is lost, and
where tasks go.

The processes are played, some of them by TaskManagers in this loop. With real processes:
tests/integration/test_workers.py.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.cluster.embedded import EmbeddedCluster
from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.heartbeat import HeartbeatOptions
from aioflow.cluster.rpc import RpcConnection, RpcServer, connect_rpc
from aioflow.cluster.shipping import ShippedJob, load_job
from aioflow.cluster.taskmanager import TaskManager
from aioflow.cluster.worker import taskmanager_of
from aioflow.cluster.worker_processes import WORKER_HEARTBEAT, WorkerProcesses
from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import Broken, ProcessCrashed
from aioflow.core.host import Process
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.serializers import Codec
from aioflow.graph.deployment import TaskDeploymentDescriptor
from aioflow.graph.job_graph import build_job_graph
from aioflow.protocol.handshake import PeerRole
from aioflow.task.environment import TaskOptions

ROOT = Path(__file__).parents[2]

QUICK = HeartbeatOptions(interval_s=0.02, timeout_s=0.15, suspicion_s=0.05)


class Child:
    """A played process. `kill` ends it."""

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


Play = Callable[[Sequence[str], bytes, Child], Any]
"""Plays a process from its arguments: address, worker id, slots and times."""


async def hang(arguments: Sequence[str], secret: bytes, child: Child) -> None:
    """Plays a process that hangs in its imports."""


class Processes:
    """Lets `play` be each process that is started."""

    def __init__(self, play: Play = hang) -> None:
        self.children: list[Child] = []
        self._play = play
        self.tasks: list[asyncio.Task[None]] = []

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
        self.tasks.append(asyncio.create_task(self._play(argv[-5:], secret, child)))
        return child

    def take_secret(self) -> bytes | None:
        return None

    def thread_times(self) -> None:
        """There is nothing to watch: the loop of these tests is the one of the tests."""


HOSTS: list[SystemHost] = []


def host_with(processes: Any) -> SystemHost:
    host = SystemHost()
    host.procs = processes
    HOSTS.append(host)
    return host


@pytest.fixture(autouse=True)
async def hosts_are_closed() -> AsyncIterator[None]:
    yield
    while HOSTS:
        await HOSTS.pop().close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


# The provider.


class Provided:
    """The workers of a provider, and what it has reported."""

    def __init__(self, processes: Any) -> None:
        self.failed: list[Broken] = []
        self.again = 0
        self.lost: list[tuple[str, str]] = []
        self.provider = WorkerProcesses(
            host_with(processes),
            b"s" * 32,
            2,
            1,
            WORKER_HEARTBEAT,
            self.failed.append,
            lambda worker_id, why: self.lost.append((worker_id, why)),
        )

    def start(self, count: int = 1) -> None:
        self.provider.start_workers(count, self._again)

    def _again(self) -> None:
        self.again += 1


@asynccontextmanager
async def provided(processes: Any, count: int = 1) -> AsyncIterator[Provided]:
    made = Provided(processes)
    made.start(count)
    try:
        yield made
    finally:
        await made.provider.close()


async def test_a_lost_worker_is_killed_and_the_first_reason_stays() -> None:
    """R2."""
    processes = Processes()
    async with provided(processes) as made:
        await until(lambda: bool(processes.children))
        made.provider.registered("worker-1")
        loss = made.provider.lost("worker-1", "no sign of life for 60 s")
        assert processes.children[0].returncode == -9
        assert str(loss) == "worker-1 (process 1000) is gone: no sign of life for 60 s"
        assert made.provider.lost("worker-1", "another") is loss


async def test_the_end_of_a_registered_process_is_a_loss_with_its_exit_code() -> None:
    processes = Processes()
    async with provided(processes) as made:
        await until(lambda: bool(processes.children))
        made.provider.registered("worker-1")
        processes.children[0].end(7)
        why = "worker-1 (process 1000) is gone: its process ended with exit code 7"
        await until(lambda: made.lost == [("worker-1", why)])
        assert made.failed == []
        assert made.again == 0


@pytest.mark.parametrize(
    ("code", "how", "kind"),
    [(3, "with exit code 3", ProcessCrashed), (-9, "by SIGKILL", Broken)],
)
async def test_a_process_that_ends_before_it_registers_is_a_failed_start(
    code: int, how: str, kind: type[Broken]
) -> None:
    async def dies(arguments: Sequence[str], secret: bytes, child: Child) -> None:
        child.end(code)

    async with provided(Processes(dies)) as made:
        await until(lambda: made.again == 1)
        (loss,) = made.failed
        assert type(loss) is kind
        assert str(loss) == f"worker-1 (process 1000) is gone: its process ended {how}"
        assert made.lost == []


async def test_a_program_that_cannot_be_started_is_a_failed_start() -> None:
    class Nowhere(Processes):
        async def exec(self, argv: Sequence[str], **_: Any) -> Process:
            raise FileNotFoundError(argv[0])

    async with provided(Nowhere()) as made:
        await until(lambda: made.again == 1)
        assert "worker-1 could not be started with" in str(made.failed[0])


async def test_close_ends_processes_that_have_not_registered_and_starts_no_more() -> None:
    processes = Processes()
    async with provided(processes, 2) as made:
        await until(lambda: len(processes.children) == 2)
        await made.provider.close()
        assert [child.returncode for child in processes.children] == [-9, -9]
        made.start()
        await asyncio.sleep(0)
        assert len(processes.children) == 2
    assert made.failed == []
    assert made.again == 0


# The cluster.


def cluster_of(
    parallelism: int,
    workers: int,
    play: Play = hang,
    *,
    restart: Any = None,
    heartbeat: HeartbeatOptions | None = None,
    source: Any = (1,),
) -> tuple[EmbeddedCluster, Processes]:
    flow = af.Flow("placed", parallelism=parallelism)
    flow.source(source).rebalance().map(str).key_by(str).count().sink(lambda row: None)
    graph = build_job_graph(flow.graph, apart=True)
    processes = Processes(play)
    host = host_with(processes)
    policy = af.no_restart() if restart is None else restart
    return EmbeddedCluster(host, graph, policy, TaskOptions(), workers, heartbeat), processes


async def endless() -> AsyncIterator[int]:
    while True:
        await asyncio.sleep(0.005)
        yield 1


async def serve(arguments: Sequence[str], secret: bytes, child: Child) -> None:
    """Plays a worker with a TaskManager in this loop."""
    manager = taskmanager_of(SystemHost(), secret, arguments)
    running = asyncio.create_task(manager.run())
    ended = asyncio.create_task(child.wait())
    try:
        await asyncio.wait([running, ended], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait([running, ended])
        child.end(0)


@asynccontextmanager
async def running(cluster: EmbeddedCluster, processes: Processes) -> AsyncIterator[None]:
    job = asyncio.create_task(cluster.run())
    try:
        await asyncio.wait([job, cluster.job_master.started], return_when="FIRST_COMPLETED")
        yield
    finally:
        cluster.job_master.cancel()
        await asyncio.wait_for(job, 60)
        if processes.tasks:
            await asyncio.wait(processes.tasks, timeout=60)  # Its workers have ended.
        await cancel_and_wait(processes.tasks)


def places(cluster: EmbeddedCluster) -> dict[tuple[int, int], str]:
    return {
        (attempt.vertex_id, attempt.subtask_index): worker_id
        for attempt, worker_id in cluster.task_executor.placed.items()
    }


async def test_subtask_i_of_all_operators_shares_a_worker_and_sinks_of_the_program_stay() -> None:
    cluster, processes = cluster_of(4, 2, serve, source=endless)
    async with running(cluster, processes):
        here = {vertex.id for vertex in cluster._job._shipped.graph.vertices if vertex.stays_here}
        found = places(cluster)
        assert here
        assert all(
            (worker_id == "") == (vertex in here) for (vertex, _), worker_id in found.items()
        )
        by_index = [
            {worker_id for (_, index), worker_id in found.items() if index == at and worker_id}
            for at in range(4)
        ]
        assert all(len(workers) == 1 for workers in by_index)
        assert sorted(worker for workers in by_index for worker in workers) == [
            "worker-1",
            "worker-1",
            "worker-2",
            "worker-2",
        ]


async def test_a_replacement_gets_the_places_of_the_lost_worker() -> None:
    restart = af.fixed_delay(3, "10ms")
    cluster, processes = cluster_of(4, 2, serve, source=endless, restart=restart)
    async with running(cluster, processes):
        before = places(cluster)
        processes.children[0].kill()
        await until(
            lambda: "worker-3" in places(cluster).values() and len(places(cluster)) == len(before)
        )
        names = {"worker-1": "worker-3"}
        assert places(cluster) == {at: names.get(one, one) for at, one in before.items()}


async def test_a_cancelled_task_is_watched_no_longer_than_until_it_has_ended() -> None:
    restart = af.fixed_delay(3, "10ms")
    cluster, processes = cluster_of(4, 2, serve, source=endless, restart=restart)
    async with running(cluster, processes):
        processes.children[0].kill()
        await until(lambda: "worker-3" in places(cluster).values())
        await until(
            lambda: not any(task.get_name().startswith("cancel ") for task in asyncio.all_tasks())
        )


async def test_a_silent_worker_is_given_up_and_killed() -> None:
    """R2."""
    connections: list[RpcConnection] = []

    async def says_nothing(arguments: Sequence[str], secret: bytes, child: Child) -> None:
        host, _, port = arguments[0].rpartition(":")
        address = host, int(port)
        role = PeerRole.TASKMANAGER
        handlers = {"heartbeat": lambda: None}
        connection = await connect_rpc(
            SystemHost(), secret, Codec(), role, address, handlers, lambda _: None
        )
        connections.append(connection)
        await connection.call("register", arguments[1], [], False, 0)

    cluster, processes = cluster_of(1, 1, says_nothing, heartbeat=QUICK)
    async with running(cluster, processes):
        assert cluster.job_master.status is JobStatus.FAILED
        assert "no sign of life for 0.15 s" in str(cluster.job_master.error)
        assert processes.children[0].returncode == -9
    for connection in connections:
        await connection.close()


async def test_a_job_cancelled_before_its_workers_are_there_is_cancelled() -> None:
    cluster, processes = cluster_of(1, 1)
    job = asyncio.create_task(cluster.run())
    await until(lambda: len(processes.children) == 1)
    cluster.job_master.cancel()

    assert await asyncio.wait_for(job, 60) is JobStatus.CANCELED
    assert processes.children[0].returncode == -9


async def test_a_job_cancelled_when_a_worker_has_died_says_nothing_more_about_it() -> None:
    """Ctrl-C in a terminal ends a worker that is still being loaded, and cancels the job that
    waits for the others.
    """

    async def first_dies(arguments: Sequence[str], secret: bytes, child: Child) -> None:
        if arguments[1] == "worker-1":
            child.end(-2)

    async def cancelled() -> JobStatus:
        restart = af.fixed_delay(3, "1h")
        cluster, _ = cluster_of(2, 2, first_dies, restart=restart)
        job = asyncio.create_task(cluster.run())
        await until(lambda: cluster.job_master.status is JobStatus.RESTARTING)
        cluster.job_master.cancel()
        return await asyncio.wait_for(job, 60)

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


async def few() -> AsyncIterator[int]:
    for number in range(20):
        await asyncio.sleep(0.005)
        yield number


async def test_worker_that_ends_after_the_job_is_no_loss_and_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, processes = cluster_of(3, 2, serve, source=few)
    at_once = RpcServer.close

    async def late(self: RpcServer) -> None:
        await at_once(self)
        await until(lambda: all(child.returncode is not None for child in processes.children))

    monkeypatch.setattr(RpcServer, "close", late)
    assert await cluster.run() is JobStatus.FINISHED
    assert len(processes.children) == 2
    assert "is gone" not in caplog.text
    assert any("numRecordsIn" in name for name in cluster.metrics())
    assert cluster.task_executor.placed == {}, "also without those of the program"
    await cancel_and_wait(processes.tasks)


async def test_failed_starts_that_no_task_waits_for_are_a_second_apart() -> None:
    async def first_serves(arguments: Sequence[str], secret: bytes, child: Child) -> None:
        if arguments[1] == "worker-1":
            await serve(arguments, secret, child)
        else:
            child.end(3)

    cluster, processes = cluster_of(
        1, 1, first_serves, source=endless, restart=af.fixed_delay(3, "1h")
    )
    async with running(cluster, processes):
        processes.children[0].kill()
        await until(lambda: len(processes.children) == 2)
        begun = asyncio.get_running_loop().time()
        await until(lambda: len(processes.children) == 4)
        assert asyncio.get_running_loop().time() - begun >= 1


async def test_descriptors_are_encoded_beside_the_loop_and_not_sent_after_a_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """State and splits may be large, and the loop of a JobManager serves all jobs."""
    begun, go_on = threading.Event(), threading.Event()
    ship_task, submitted = ShippedJob.ship_task, list[object]()

    def ship(self: ShippedJob, descriptor: TaskDeploymentDescriptor) -> bytes:
        assert threading.current_thread() is not threading.main_thread()
        begun.set()
        assert go_on.wait(60)
        return ship_task(self, descriptor)

    monkeypatch.setattr(ShippedJob, "ship_task", ship)
    monkeypatch.setattr(TaskManager, "_on_submit_task", lambda *args: submitted.append(args))
    cluster, processes = cluster_of(1, 1, serve)
    job = asyncio.create_task(cluster.run())
    await until(begun.is_set)
    cluster.job_master.cancel()
    go_on.set()
    assert await asyncio.wait_for(job, 60) is JobStatus.CANCELED
    assert submitted == []
    await cancel_and_wait(processes.tasks)


async def test_a_process_that_does_not_answer_a_deployment_counts_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(*args: object) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr("aioflow.cluster.deployer.SUBMIT_S", 0.1)
    monkeypatch.setattr(TaskManager, "_on_submit_task", never)
    cluster, processes = cluster_of(1, 1, serve)
    async with running(cluster, processes):
        assert cluster.job_master.status is JobStatus.FAILED
        assert "was submitted 0.1 s ago, and its process does not answer" in str(
            cluster.job_master.error
        )
        assert processes.children[0].returncode == -9


async def test_the_slot_of_finished_subtasks_is_free_while_others_still_read_their_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I8.3: the job stays open there until it is over."""
    go_on, got = asyncio.Event(), list[int]()
    monkeypatch.setattr("tests.cluster.test_workers.GO_ON", go_on)
    flow = af.Flow("freed", parallelism=2)
    numbers = flow.source([1, 2, 3, 4]).rebalance().map(int)
    numbers.rebalance().map(wait_to_go_on, parallelism=1, concurrency=1).sink(got.append)
    graph, processes = build_job_graph(flow.graph, apart=True), Processes(serve)
    host = host_with(processes)
    cluster = EmbeddedCluster(host, graph, af.no_restart(), TaskOptions(), 2)
    job = asyncio.create_task(cluster.run())
    await until(lambda: [free for _, _, free in cluster._resources.overview()] == [0, 1])
    assert got == []
    go_on.set()
    assert await asyncio.wait_for(job, 60) is JobStatus.FINISHED
    assert sorted(got) == [1, 2, 3, 4]
    await cancel_and_wait(processes.tasks)


GO_ON = asyncio.Event()


async def wait_to_go_on(number: int) -> int:
    await GO_ON.wait()
    return number


async def test_a_replacement_that_cannot_load_the_job_counts_as_a_failure_like_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file or a server that the program reads may be missing for a while."""
    loads = 0

    def load(content: bytes) -> ShippedJob:
        nonlocal loads
        loads += 1
        if loads == 2:
            raise OSError("its disk is not mounted yet")
        return load_job(content)

    monkeypatch.setattr("aioflow.cluster.taskmanager.load_job", load)
    # Without a delay the tasks wait for their slots when the error comes.
    restart = af.fixed_delay(3, "0s")
    cluster, processes = cluster_of(1, 1, serve, source=endless, restart=restart)
    async with running(cluster, processes):
        processes.children[0].kill()
        await until(lambda: loads == 3 and cluster.job_master.status is JobStatus.RUNNING)
        assert cluster.job_master.executions.restarts == 2
        assert "its disk is not mounted yet" in str(cluster.job_master.error)


async def test_worker_that_registers_after_the_end_of_the_job_ends_without_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its program would print the traceback of a job that has finished."""
    refused: list[BaseException | None] = []

    async def second_is_late(arguments: Sequence[str], secret: bytes, child: Child) -> None:
        if child.pid == 1000:
            return await serve(arguments, secret, child)
        await until(cluster.job_master.terminated.done)
        manager = taskmanager_of(SystemHost(), secret, arguments)
        refused.extend(await asyncio.gather(manager.run(), return_exceptions=True))
        child.end(0)

    at_once = RpcServer.close

    async def late(self: RpcServer) -> None:
        await until(lambda: bool(refused))
        await at_once(self)

    monkeypatch.setattr(RpcServer, "close", late)
    cluster, _ = cluster_of(1, 2, second_is_late)
    assert await cluster.run() is JobStatus.FINISHED
    assert refused == [None]
