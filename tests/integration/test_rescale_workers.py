"""Jobs over worker processes and clusters that are rescaled while they run, some with a kill."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

import aioflow as af
from benchmarks import bench_rescale
from tests.integration.clusters import Cluster, until
from tests.integration.processes import alive, eventually

if TYPE_CHECKING:
    from aioflow.cluster.embedded import EmbeddedCluster
    from aioflow.cluster.worker_processes import WorkerProcesses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def counted(pushed: int, rows: list[Any]) -> None:
    """Checks that all counts of `pushed` numbers came, the last ones last."""
    for key in range(20):
        of_key = [count for k, count in rows if k == key]
        assert set(of_key) == set(range(1, pushed // 20 + 1))
        assert of_key[-1] == pushed // 20


def processes_of(job: af.Job) -> WorkerProcesses:
    return cast("EmbeddedCluster", job._cluster).processes


def open_pids(job: af.Job) -> list[int]:
    known = processes_of(job).known.values()
    return [worker.pid for worker in known if worker.pid and alive(worker.pid)]


def has_processes(job: af.Job, count: int) -> bool:
    return len(open_pids(job)) == count


@pytest.mark.parametrize("kill", [False, True])
async def test_workers_are_added_and_removed_while_the_job_runs(tmp_path: Path, kill: bool) -> None:
    """The push source stays in the program. Without a kill each row comes once."""
    flow, rows = af.Flow("workers"), list[Any]()
    events = flow.source(af.io.push(), uid="events")
    events.key_by(lambda n: n % 20).count(uid="count").sink(rows.append)
    put = 0
    restart = af.fixed_delay(100, "0s")
    options: dict[str, Any] = {"checkpoints": tmp_path, "every": "200ms", "restart": restart}
    async with flow.run(workers=1, **options) as job:

        async def push(n: int) -> None:
            nonlocal put
            await job.input(events).put_many(range(put, put + n))
            put += n

        await push(400)
        for wanted in (3, 2):
            rescaling = asyncio.create_task(job.rescale(workers=wanted))
            while not rescaling.done():
                await push(20)
                await asyncio.sleep(0.01)
                if kill and processes_of(job).workers == wanted:
                    kill = False
                    os.kill(open_pids(job)[0], signal.SIGKILL)
            await rescaling
            assert [vertex.parallelism for vertex in job.graph.vertices][1] == wanted
            await eventually(partial(has_processes, job, wanted))
        await push(-put % 20 + 400)
        await eventually(lambda: len(set(rows)) == put)
    if not job._cluster.job_master.executions.restarts:
        assert len(rows) == put
    counted(put, rows)


def test_pauses_of_rescales_with_kills_are_reported() -> None:
    report = bench_rescale.main(
        ["--rescales", "2", "--keys", "200", "--rate", "500", "--kill", "2"]
    )
    (row,) = report["rows"]
    assert (row["rescales"], row["kills"]) == (2, 1)


async def test_workers_whose_memory_does_not_suffice_go_on_as_they_were(tmp_path: Path) -> None:
    flow, rows = af.Flow("memory", parallelism=2), list[Any]()
    events = flow.source(af.io.push(), uid="events")
    counts = events.key_by(lambda n: n % 20).count(uid="count")
    counts.key_by(lambda row: row[0]).map(tuple, uid="again").sink(rows.append)
    options: dict[str, Any] = {"checkpoints": tmp_path, "every": "200ms", "workers": 2}
    memory: dict[str, Any] = {"network_memory": "900KiB", "restart": af.no_restart()}
    async with flow.run(**options, **memory) as job:
        await job.input(events).put_many(range(400))
        with pytest.raises(af.RescaleError, match="goes on as it was: Insufficient network memory"):
            await job.rescale(parallelism=12)
        assert max(vertex.parallelism for vertex in job.graph.vertices) == 2
        await job.input(events).put_many(range(400, 800))
        await eventually(lambda: len(rows) >= 800)
        await job.rescale(parallelism=3)
        await job.input(events).put_many(range(800, 1200))
        await eventually(lambda: len(rows) >= 1200)
        await eventually(lambda: len(open_pids(job)) == 2)
    assert len(rows) == 1200
    counted(1200, rows)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "cluster")
    yield made
    made.close()


def taken(cluster: Cluster) -> int:
    return sum(slots - free for slots, free in cluster.slots())


def test_a_job_of_a_cluster_is_rescaled_and_its_next_leader_knows(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start(workers=2, slots=2, request_timeout="2s")
    job = cluster.submit("rescaled", "--checkpoints", str(tmp_path / "store"), "--every", "200ms")
    until(lambda: taken(cluster) == 1, "it runs")

    assert cluster.ask("rescale", job, "3").returncode == 0
    assert taken(cluster) == 3
    assert cluster.ask("rescale", job, "4", "--operator", "count").returncode == 0
    assert taken(cluster) == 4
    too_many = cluster.ask("rescale", job, "5")
    assert too_many.returncode == 1
    assert "goes on as it was: 5 slots are needed, and there are 4" in too_many.stderr
    unknown = cluster.ask("rescale", job, "2", "--operator", "cuont")
    assert unknown.returncode == 2
    assert "did you mean 'count'?" in unknown.stderr
    assert cluster.ask("rescale", job, "2").returncode == 0
    until(lambda: taken(cluster) == 2, "it gives back what it needs no more")

    os.kill(cluster.pids()[0], signal.SIGKILL)
    port = cluster.address.rpartition(":")[2]
    cluster.spawn("jobmanager", "--data", str(cluster.data), "--port", port)
    until(lambda: taken(cluster) == 2, "the next leader knows")
    assert cluster.job(job) == "RUNNING"


def test_the_handle_of_a_job_on_a_cluster_rescales_it(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start(workers=1, slots=3, request_timeout="1s")

    async def main() -> None:
        flow, rows = af.Flow("handle"), list[Any]()
        events = flow.source(af.io.push(), uid="events")
        counts = events.key_by(lambda n: n % 20).count(uid="count")
        counts.sink(rows.append)
        remote = af.RemoteCluster(cluster.data)
        async with flow.run(on=remote, checkpoints=tmp_path / "store", every="200ms") as job:
            for wanted in (3, 1, 2):
                await job.input(events).put_many(range(200))
                await job.rescale("count", wanted)
                assert [v.parallelism for v in job.graph.vertices if "count" in v.uids] == [wanted]
                assert await job.state(counts).get(3) is not None
            with pytest.raises(af.RescaleError, match="goes on as it was"):
                await job.rescale("count", 4)
            await job.input(events).put_many(range(200))
            await eventually(lambda: len(rows) >= 800)
        assert len(rows) == 800
        assert sorted(count for key, count in rows if key == 0) == list(range(1, 41))

    asyncio.run(main())


async def test_workers_take_the_parallelism_with_them_as_far_as_it_goes(tmp_path: Path) -> None:
    flow, rows = af.Flow("ratio", parallelism=2, max_parallelism=8), list[Any]()
    events = flow.source(af.io.push(), uid="events").rebalance().map(str, uid="named")
    events.sink(rows.append)
    async with flow.run(workers=1, checkpoints=tmp_path, every="1s") as job:

        def width() -> int:
            return next(v.parallelism for v in job.graph.vertices if "named" in v.uids)

        await job.rescale(parallelism=3)
        await job.rescale(workers=2)
        assert width() == 6, "in proportion to what the user asked for last"
        await job.rescale(workers=3)
        assert width() == 8, "max_parallelism, not 9"
        await job.rescale(workers=1)
        assert width() == 3, "nothing is lost by rounding"


def burn(n: int) -> int:
    """Keeps its process busy for some milliseconds."""
    return sum(range(40_000)) % 7 + n


async def test_an_autoscaler_adds_workers_to_a_busy_job_and_ends_them_later(tmp_path: Path) -> None:
    flow, rows = af.Flow("scaled"), list[Any]()
    events = flow.source(af.io.push(), uid="events").rebalance()
    events.map(burn, uid="burn").sink(rows.append)
    workers = af.Autoscaler(1, 2, window="2s")
    async with flow.run(workers=workers, checkpoints=tmp_path, every="1s") as job:
        inlet, put = job.input(events), 0

        def width() -> int:
            return next(v.parallelism for v in job.graph.vertices if "burn" in v.uids)

        async with asyncio.timeout(120):
            while width() == 1:
                await inlet.put_many(range(put, put + 50))
                put += 50
        await eventually(lambda: len(rows) >= put)
        await eventually(lambda: width() == 1 and len(open_pids(job)) == 1)
    assert len(rows) == put
