"""Two jobs on one TaskManager: the code of one misbehaves, and the other goes on."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.core.errors import ProcessCrashed
from tests.integration.clusters import Cluster, until
from tests.integration.processes import alive

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One TaskManager with two slots."""
    made = Cluster(tmp_path_factory.mktemp("isolated") / "cluster")
    made.start(workers=1, slots=2)
    yield made
    made.close()


async def positioned(position: int | None) -> AsyncIterator[tuple[int, int]]:
    n = position or 0
    while True:
        yield n, n + 1
        n += 1
        await asyncio.sleep(0.005)


def noted(n: int, *, directory: Path, wrong: Callable[[], Any]) -> int:
    """Writes the id of the process at the first call, and goes wrong at the fourth."""
    if n == 0:
        (directory / "pid").write_text(str(os.getpid()))
    if n == 3:
        wrong()
    return n


async def swallows(n: int, *, directory: Path) -> int:
    noted(n, directory=directory, wrong=(directory / "held").touch)
    while n == 3:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
    return n


class SwallowsInClose(af.MapFunction[int, int]):
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def map(self, value: int) -> int:
        return noted(value, directory=self.directory, wrong=(self.directory / "held").touch)

    async def close(self) -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)


def holds(directory: Path) -> None:
    (directory / "held").touch()
    time.sleep(3600)


def crashes() -> None:
    ctypes.string_at(0)


def is_killed_for_its_memory() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.asynccontextmanager
async def neighbour(cluster: Cluster) -> AsyncIterator[None]:
    """Runs another job on the TaskManager, which must not notice what happens in the block."""
    flow = af.Flow("neighbour")
    counts = flow.source(positioned).key_by(lambda n: 0).count()
    on = af.RemoteCluster(cluster.data, secret=cluster.secret)
    async with (
        flow.run(on=on, restart=af.no_restart(), subscribe=[counts]) as job,
        job.subscribe(counts, buffer=100, overflow="drop_oldest") as rows,
    ):
        received = aiter(rows)
        before = (await anext(received))[1]
        yield
        async with asyncio.timeout(60):
            for _ in range(200):  # More than are kept of the time before.
                after = (await anext(received))[1]
        assert after > before
        assert job.status == "RUNNING"
        await job.stop()
    assert job.status == "FINISHED"
    assert cluster.log("taskmanager-1").count("is registered") <= cluster.terms()


def free_slots(cluster: Cluster, count: int) -> bool:
    return cluster.slots() == [(2, count)]


@pytest.mark.parametrize(
    ("wrong", "how"),
    [
        (partial(os._exit, 7), "exit code 7"),
        (crashes, "SIGSEGV"),
        (os.abort, "SIGABRT"),
        (is_killed_for_its_memory, "SIGKILL"),
    ],
    ids=["exits", "crashes", "aborts", "is killed"],
)
async def test_process_that_ends_fails_its_own_job_and_its_slot_comes_back(
    cluster: Cluster, tmp_path: Path, wrong: Callable[[], Any], how: str
) -> None:
    flow = af.Flow("wrong")
    flow.source(positioned).map(partial(noted, directory=tmp_path, wrong=wrong)).sink(
        af.io.blackhole()
    )
    on = af.RemoteCluster(cluster.data, secret=cluster.secret)
    async with neighbour(cluster):
        with pytest.raises(af.Broken, match=f"its process ended (by|with) {how}"):
            await flow.execute(on=on, restart=af.no_restart())
        await asyncio.to_thread(until, lambda: free_slots(cluster, 1), "its slot comes back")


KINDS = {
    "swallows": ("operator 'map(it)', subtask 1/1 did not end within 0.5 s",),
    "swallows in close()": ("close() of operator 'map(it)', subtask 1/1 did not end within 1 s",),
    "blocks the loop": (),
    "blocks a thread": (
        "operator 'map(it)', subtask 1/1 did not end within 0.5 s",
        "a thread cannot be interrupted",
    ),
}
"""How a function goes on after its cancellation, and what the log of its TaskManager says."""


def stuck(kind: str, directory: Path) -> af.Flow:
    functions: dict[str, Any] = {
        "swallows": partial(swallows, directory=directory),
        "swallows in close()": SwallowsInClose(directory),
    }
    function = functions.get(
        kind, partial(noted, directory=directory, wrong=partial(holds, directory))
    )
    flow = af.Flow("stuck")
    rows = flow.source(positioned).map(function, name="map(it)", blocking=kind == "blocks a thread")
    rows.sink(af.io.blackhole())
    return flow


async def is_over(cluster: Cluster, directory: Path) -> None:
    pid = int((directory / "pid").read_text())
    await asyncio.to_thread(until, lambda: not alive(pid), "its process ends")
    await asyncio.to_thread(until, lambda: free_slots(cluster, 1), "its slot comes back")


@pytest.mark.parametrize("kind", KINDS)
async def test_function_that_does_not_end_is_ended_with_the_process_of_its_job(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    on = af.RemoteCluster(cluster.data, secret=cluster.secret)
    flow = stuck(kind, tmp_path)
    before = len(cluster.log("taskmanager-1"))
    async with neighbour(cluster):
        async with flow.run(on=on, cancellation_timeout="500ms") as job:
            await asyncio.to_thread(until, (tmp_path / "held").exists, "the fourth call has begun")
            async with asyncio.timeout(60):
                await job.cancel()
            assert job.status == "CANCELED"
        await is_over(cluster, tmp_path)
    log = cluster.log("taskmanager-1")[before:]
    for told in KINDS[kind]:
        assert told in log


def fails_once_held(n: int, *, directory: Path) -> int:
    if (directory / "held").exists():
        raise ValueError("first")
    return n


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "blocks the loop"])
async def test_job_fails_with_its_first_error_although_another_function_does_not_end(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    """Both run in one process. A held loop would also hold the function that fails."""
    on = af.RemoteCluster(cluster.data, secret=cluster.secret)
    flow = stuck(kind, tmp_path)
    failing = flow.source(positioned).map(partial(fails_once_held, directory=tmp_path))
    failing.sink(af.io.blackhole())
    before = len(cluster.log("taskmanager-1"))
    async with neighbour(cluster):
        with pytest.raises(ValueError, match="first") as caught:
            async with asyncio.timeout(120):
                await flow.execute(on=on, restart=af.no_restart(), cancellation_timeout="500ms")
        await is_over(cluster, tmp_path)
    log = cluster.log("taskmanager-1")[before:]
    for told in KINDS[kind]:
        assert told in log
    assert "map(it)" in "".join(caught.value.__notes__), "the operator is named, too"


async def test_job_restarts_on_its_taskmanager_after_its_process_was_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    flow = af.Flow("restarts")
    rows = flow.source(positioned).map(
        partial(noted, directory=tmp_path, wrong=partial(_kill_once, tmp_path))
    )
    on = af.RemoteCluster(cluster.data, secret=cluster.secret)
    async with (
        neighbour(cluster),
        flow.run(
            on=on,
            restart=af.fixed_delay(3, "10ms"),
            checkpoints=tmp_path / "checkpoints",
            every="100ms",
            subscribe=[rows],
        ) as job,
    ):
        async with asyncio.timeout(120), job.subscribe(rows) as received:
            seen = [await anext(aiter(received)) for _ in range(50)]
        assert max(seen) > 3
        await job.stop()
    assert job.status == "FINISHED"


def _kill_once(directory: Path) -> None:
    if not (directory / "killed").exists():
        (directory / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
async def test_process_of_a_job_ends_with_its_killed_taskmanager(tmp_path: Path) -> None:
    """This includes a process whose interpreter is held by a function."""
    cluster = Cluster(tmp_path / "cluster")
    cluster.start(workers=1, slots=1)
    flow = af.Flow("held")
    wrong = partial(_hold_interpreter_once, tmp_path)
    rows = flow.source(positioned).map(partial(noted, directory=tmp_path, wrong=wrong))
    on = af.RemoteCluster(cluster.data, secret=cluster.secret)
    try:
        async with (
            flow.run(on=on, restart=af.fixed_delay(10, "100ms"), subscribe=[rows]) as job,
            job.subscribe(rows) as received,
        ):
            await asyncio.to_thread(until, (tmp_path / "held").exists, "the interpreter is held")
            pid = int((tmp_path / "pid").read_text())
            os.kill(cluster.pids()[1], signal.SIGKILL)
            await asyncio.to_thread(until, lambda: not alive(pid), "the process ends")
            # The job goes on with the TaskManager that replaces the killed one.
            async with asyncio.timeout(120):
                while await anext(aiter(received)) < 4:
                    pass
            await job.stop()
    finally:
        cluster.close()


def _hold_interpreter_once(directory: Path) -> None:
    if not (directory / "held").exists():
        (directory / "held").touch()
        sum(range(1 << 62))


async def test_memory_runs_out_for_the_process_of_a_job_before_its_taskmanager(
    cluster: Cluster,
) -> None:
    flow = af.Flow("score")
    rows = flow.source([1]).map(lambda _: Path("/proc/self/oom_score_adj").read_text())
    on = af.RemoteCluster(cluster.data, secret=cluster.secret)
    [score] = await rows.collect(on=on)
    own = Path(f"/proc/{cluster.pids()[1]}/oom_score_adj").read_text()
    assert int(score) > int(own)


async def test_code_that_ends_its_process_while_it_is_loaded_fails_its_own_job(
    cluster: Cluster, tmp_path: Path
) -> None:
    flow = af.Flow("unloadable")
    flow.source([1]).map(Exiting()).sink(af.io.blackhole())
    on = af.RemoteCluster(cluster.data, secret=cluster.secret)
    async with neighbour(cluster):
        with pytest.raises(ProcessCrashed, match="exit code 9"):
            await flow.execute(on=on, restart=af.no_restart())


class Exiting:
    """Ends each process that loads it but the one of the JobManager, which loads it too."""

    def __init__(self) -> None:
        self.state = 1

    def __call__(self, n: int) -> int:
        return n

    def __setstate__(self, state: Any) -> None:
        if "--job" in Path("/proc/self/cmdline").read_text().split("\0"):
            os._exit(9)
        self.__dict__.update(state)


async def test_job_after_one_whose_process_has_ended_gets_its_slot_at_once(
    cluster: Cluster,
) -> None:
    """The slot may be on its way to the job that has failed, which needs it no more."""
    on = af.RemoteCluster(cluster.data, secret=cluster.secret)
    async with neighbour(cluster):
        for _ in range(3):
            flow = af.Flow("exits")
            flow.source([1]).map(os._exit).sink(af.io.blackhole())
            async with asyncio.timeout(25):  # A slot that no JobMaster takes is kept for 30 s.
                with pytest.raises(af.Broken, match="exit code 1"):
                    await flow.execute(on=on, restart=af.no_restart())
