"""What a TaskManager passes on between the JobManager and the processes of its jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from aioflow.cluster.job_processes import JobProcess, JobProcesses
from aioflow.cluster.worker import serve_job
from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import Broken
from aioflow.core.host import Process
from aioflow.core.system_host import SystemHost
from aioflow.graph.deployment import ExecutionAttemptId
from aioflow.inspection.process import LogTail, merged
from tests.cluster.test_workers import Child


class ProcessesInLoop:
    """Processes that run in this loop. `argv` are the arguments of each."""

    def __init__(self) -> None:
        self.argv: list[Sequence[str]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.children: list[Child] = []

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        secret: bytes | None = None,
    ) -> Process:
        assert secret is not None
        self.argv.append(argv)
        child = Child(1000 + len(self.children))
        self.children.append(child)
        self.tasks.append(asyncio.create_task(self._serve(argv, secret, child)))
        return child

    async def _serve(self, argv: Sequence[str], secret: bytes, child: Child) -> None:
        host = SystemHost()
        serving = asyncio.create_task(
            serve_job(host, secret, list(argv)[list(argv).index("--job") + 1 :])
        )
        ended = asyncio.create_task(child.wait())
        try:
            await asyncio.wait([serving, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait([serving, ended])
            await host.close()
            child.end(0)


class Owner:
    """A TaskManager that records the messages of its job processes."""

    def __init__(self) -> None:
        self.is_writable = True
        self.told: list[tuple[Any, ...]] = []
        self.lost: list[tuple[JobProcess, Broken]] = []

    def tell(self, method: str, *args: Any) -> None:
        self.told.append((method, *args))

    async def ask(self, method: str, *args: Any) -> Any:
        return (method, *args)

    def task_ended(self, attempt: ExecutionAttemptId) -> None: ...

    def process_lost(self, process: JobProcess, loss: Broken) -> None:
        self.lost.append((process, loss))


@pytest.fixture
async def played() -> AsyncIterator[tuple[JobProcesses, ProcessesInLoop, Owner]]:
    host, played, owner = SystemHost(), ProcessesInLoop(), Owner()
    host.procs = played  # type: ignore[assignment]
    processes = JobProcesses(host, b"s" * 32, owner, LogTail())
    await processes.listen()
    yield processes, played, owner
    await processes.close()
    await cancel_and_wait(played.tasks)
    await host.close()


async def test_spare_process_is_taken_first(
    played: tuple[JobProcesses, ProcessesInLoop, Owner],
) -> None:
    processes, started, owner = played
    processes.keep_spare()
    processes.keep_spare()
    first = processes.take()
    second = processes.take()
    async with asyncio.timeout(60):
        for process in (first, second):
            error = await process.open("job", 1, b"", "tm", "127.0.0.1", 1 << 20, {})
            assert error, "an empty program cannot be loaded"
    assert len(started.argv) == 2
    assert first is not second
    assert owner.lost == []


async def test_rows_for_a_slow_jobmanager_are_counted_and_reported_later(
    played: tuple[JobProcesses, ProcessesInLoop, Owner],
) -> None:
    processes, _, owner = played
    process = JobProcess(1)
    process.job_id = "job"
    process.missed = {1: 0}
    owner.is_writable = False
    processes._tell(process, "tapped", ("job", 1, b"rows", 5, 2, ""))
    processes._tell(process, "tapped", ("job", 2, b"rows", 5, 0, ""))
    assert owner.told == [("tapped", "job", 2, b"rows", 5, 0, "")], "it may miss none"
    processes._tell(process, "report", ("job", "tm", {}))
    assert owner.told[1:] == [("tapped", "job", 1, b"", 0, 7, ""), ("report", "job", "tm", {})]
    owner.is_writable = True
    processes._tell(process, "tapped", ("job", 1, b"rows", 5, 0, ""))
    assert owner.told[-1] == ("tapped", "job", 1, b"rows", 5, 0, "")


def test_processes_of_a_taskmanager_answer_a_monitor_as_one() -> None:
    lag = {"last": 1.0, "max": 3.0}
    one = {
        "loop": "uvloop",
        "lag-ms": lag,
        "holds": [{"time": 1}],
        "late-unexplained": 1,
        "task-count": 1,
        "tasks": [{"name": "a"}],
    }
    other = {
        **one,
        "lag-ms": {"last": 2.0, "max": 2.0},
        "holds": [{"time": 2}],
        "task-count": 2,
    }
    both = merged("loop", [one, other])
    assert both["lag-ms"] == {"last": 2.0, "max": 3.0}
    assert both["holds"] == [{"time": 2}, {"time": 1}]
    assert (both["late-unexplained"], both["task-count"], len(both["tasks"])) == (2, 3, 2)
    collectors = [{"name": "generation 0", "count": 2}]
    memory = {"peak": 10, "collectors": collectors}
    assert merged("memory", [memory, memory]) == {
        "peak": 20,
        "collectors": [{"name": "generation 0", "count": 4}],
    }
    assert merged("threads", [["a"], ["b"]]) == ["a", "b"]
    assert merged("logs", [["a"], ["b"]]) == ["a"], "the TaskManager has the logs of all"
