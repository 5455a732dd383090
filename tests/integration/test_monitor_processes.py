"""The view of worker processes in a job's endpoint: their loops, tasks, flames, logs and memory,
requested over RPC.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from tests.integration.clusters import Cluster
from tests.integration.processes import open_workers
from tests.monitoring.watching import PATIENCE_S, Client, check, watched


async def _numbers() -> AsyncIterator[int]:
    number = 0
    while True:
        number += 1
        yield number
        await asyncio.sleep(0.002)


def _spin(number: int) -> int:
    """Work that a look from outside finds."""
    return sum(range(20_000)) + number


def _noted(number: int) -> int:
    if number % 51 == 0:
        logging.getLogger("aioflow.test").warning("number %d with token=canary-77aa", number)
    return number


def pipeline() -> af.Flow:
    flow = af.Flow("processes", parallelism=2)
    flow.source(_numbers, name="numbers").rebalance().map(_spin, name="spin").map(
        _noted, name="noted"
    ).sink(af.io.blackhole())
    return flow


async def worker_ids(client: Client) -> list[str]:
    managers = (await client.get("/taskmanagers"))["taskmanagers"]
    return [one["id"] for one in managers if one["id"] != "local"]


async def spinning(client: Client) -> str:
    return next(
        vertex_id
        for name, vertex_id in (await client.vertices()).items()
        if name.startswith("spin")
    )


async def test_each_worker_tells_about_its_loop_its_tasks_and_its_log() -> None:
    async with watched(pipeline(), workers=2, stop_timeout="0s") as client:
        workers = await worker_ids(client)
        assert len(workers) == 2
        for worker_id in workers:
            asked = f"taskmanager={worker_id}"
            body = await client.until(
                f"/aioflow/asyncio?{asked}",
                lambda body: any(task["name"].startswith("spin") for task in body["tasks"]),
            )
            check(body, "Asyncio")
            assert {task["name"] for task in body["tasks"]}.isdisjoint({"monitor sampling"})
            logs = await client.until(
                f"/aioflow/logs?{asked}&level=WARNING", lambda body: body["records"]
            )
            check(logs, "LogRecords")
            assert "canary-77aa" not in str(logs)
            status, text = await client.ask(f"/taskmanagers/{worker_id}/log")
            assert status == 200 and "aioflow.test: number" in text
            dump = await client.get(f"/taskmanagers/{worker_id}/thread-dump")
            assert any(info["threadName"].startswith("spin") for info in dump["threadInfos"])
            detail = await client.get(f"/taskmanagers/{worker_id}")
            check(detail, "TaskManagerDetails")
            assert (
                detail["metrics"]["heapUsed"] > 1 << 20 and detail["metrics"]["garbageCollectors"]
            )
            detail = await client.until(
                f"/taskmanagers/{worker_id}",
                lambda body: body["memoryConfiguration"]["networkMemory"] == 64 << 20,
            )
            assert detail["totalResource"]["networkMemory"] == 64
            assert 0 < detail["freeResource"]["networkMemory"] <= 64
            (slot,) = detail["allocatedSlots"]
            assert slot["resource"]["networkMemory"] == 64
            names = "Status.Loop.lagMsMax,Status.Process.CPU.Time,Status.Process.Memory.Peak"
            place = f"/taskmanagers/{worker_id}/metrics?get={names}"
            await client.until(
                place, lambda body: len(body) == 3 and all(float(one["value"]) >= 0 for one in body)
            )
        body = await client.until(
            "/aioflow/processes",
            lambda body: {one["network-total"] for one in body["processes"]} == {64 << 20},
        )
        check(body, "Processes")
        assert (await client.ask("/aioflow/asyncio?taskmanager=unknown"))[0] == 404


async def test_the_flame_graph_of_a_vertex_is_of_all_processes_that_run_it() -> None:
    async with watched(pipeline(), workers=2, stop_timeout="0s") as client:
        vertex_id = await spinning(client)
        place = f"{client.path}/vertices/{vertex_id}/flamegraph"
        flames = await client.until(
            f"{place}?type=on_cpu&seconds=2", lambda body: body["data"]["value"] > 0
        )
        check(flames, "FlameGraph")
        waiting = await client.until(
            f"{place}?type=off_cpu", lambda body: body["data"]["value"] == 2
        )
        assert waiting["data"]["children"]
        (worker_id, _) = await worker_ids(client)
        # On a busy machine a second may have few samples, and none of this function.
        await client.until(
            f"/aioflow/flamegraph?seconds=1&taskmanager={worker_id}",
            lambda body: "_spin" in str(body),
        )


async def test_lost_worker_is_reported_and_hides_no_other() -> None:
    async with watched(
        pipeline(), workers=2, stop_timeout="0s", restart=af.fixed_delay(100, "50ms")
    ) as client:
        workers: Any = await worker_ids(client)
        # The process is to be ended as the machine would.
        lost = next(worker for worker in open_workers(client.job) if worker.id == workers[0])
        lost.process.kill()
        async with asyncio.timeout(PATIENCE_S):
            while (await client.ask(f"/aioflow/asyncio?taskmanager={lost.id}"))[0] not in (
                404,
                503,
            ):
                await asyncio.sleep(0.05)
        place = f"{client.path}/vertices/{await spinning(client)}/flamegraph?type=off_cpu"
        await client.until(place, lambda body: body["data"]["value"] == 2)


async def test_a_slow_operator_is_busy_and_what_feeds_it_is_held_back() -> None:
    """A function that waits 2 ms for each record, one at a time: busy in its own worker, and
    back pressure up to the source.
    """

    async def slow(number: int) -> int:
        await asyncio.sleep(0.002)
        return number

    def numbers() -> Any:
        number = 0
        while True:
            number += 1
            yield number

    flow = af.Flow("held back", parallelism=2)
    made = (
        flow.source(numbers, name="numbers")
        .rebalance()
        .map(lambda number: number, name="plain")
        .rebalance()
    )
    made.map(slow, name="slow", concurrency=1).sink(af.io.blackhole())
    async with watched(flow, workers=2, stop_timeout="0s") as client:
        vertices = await client.vertices()
        named = {name.split(" -> ")[0]: vertex_id for name, vertex_id in vertices.items()}

        def level(wanted: str) -> Any:
            return lambda body: (
                body["subtasks"]
                and all(one["backpressure-level"] == wanted for one in body["subtasks"])
            )

        for name in ("numbers", "plain"):
            body = await client.until(
                f"{client.path}/vertices/{named[name]}/backpressure", level("high")
            )
            check(body, "BackPressure")
        body = await client.until(
            f"{client.path}/vertices/{named['slow']}/backpressure",
            lambda body: all(one["busyRatio"] > 0.8 for one in body["subtasks"]),
        )
        assert all(one["backpressure-level"] == "ok" for one in body["subtasks"])
        body = await client.until(
            "/aioflow/processes",
            lambda body: (
                [one["network-used"] > 0 for one in body["processes"]] == [False, True, True]
            ),
        )
        for worker in body["processes"][1:]:
            detail = await client.until(
                f"/taskmanagers/{worker['id']}",
                lambda body: 0 < body["freeResource"]["networkMemory"] < 64,
            )
            assert detail["metrics"]["nettyShuffleMemoryUsed"] > 0
        shares = "busyTimeMsPerSecond,idleTimeMsPerSecond,backPressuredTimeMsPerSecond"
        for vertex in (await client.get(client.path))["vertices"]:
            for index in range(vertex["parallelism"]):
                values = await client.get(
                    f"{client.path}/vertices/{vertex['id']}/subtasks/{index}/metrics?get={shares}"
                )
                assert sum(float(one["value"]) for one in values) == pytest.approx(1000, abs=50)


async def test_the_process_that_submitted_a_job_shows_what_the_cluster_knows_of_it(
    tmp_path: Path,
) -> None:
    """Checkpoints, attempts with their processes, what failed, and the loops of the
    TaskManagers, at the submitter's own endpoint.
    """
    cluster = Cluster(tmp_path / "cluster")
    cluster.data.mkdir(mode=0o700)
    try:
        await asyncio.to_thread(cluster.start, workers=1, slots=4)
        options: dict[str, Any] = {
            "checkpoints": f"file://{tmp_path}/checkpoints",
            "every": "200ms",
            "stop_timeout": "0s",
        }
        options |= {
            "on": af.RemoteCluster(cluster.address, secret=cluster.secret),
            "restart": af.fixed_delay(3, "10ms"),
        }
        async with watched(failing_once(str(tmp_path / "failed")), **options) as client:
            body = await client.until(
                f"{client.path}/checkpoints", lambda body: body["counts"]["completed"] >= 2
            )
            check(body, "Checkpoints")
            assert body["history"][0]["tasks"]
            failures = await client.until(
                f"{client.path}/exceptions", lambda body: body["exceptionHistory"]["entries"]
            )
            check(failures, "Exceptions")
            assert failures["exceptionHistory"]["entries"][0]["exceptionName"] == "ValueError"
            managers = await client.until(
                "/taskmanagers", lambda body: len(body["taskmanagers"]) == 2
            )
            check(managers, "TaskManagers")
            (worker_id,) = [one["id"] for one in managers["taskmanagers"] if one["id"] != "local"]
            for vertex_id in (await client.vertices()).values():

                def there(body: Any) -> bool:
                    return {one["taskmanager-id"] for one in body["subtasks"]} == {worker_id}

                await client.until(f"{client.path}/vertices/{vertex_id}", there)
            inside = await client.get(f"/aioflow/asyncio?taskmanager={worker_id}")
            check(inside, "Asyncio")
            assert any(task["name"].startswith("fail once") for task in inside["tasks"])
            assert await client.until(
                f"/taskmanagers/{worker_id}/metrics?get=Status.Loop.lagMs", bool
            )
    finally:
        await asyncio.to_thread(cluster.close)


def failing_once(marker: str) -> af.Flow:
    """The first to find no file of this name makes it, and fails."""

    def fail(number: int) -> int:
        if number > 100 and not Path(marker).exists():
            Path(marker).touch()
            raise ValueError(f"no {number}")
        return number

    flow = af.Flow("far away", parallelism=1)
    flow.source(_numbers, name="numbers").rebalance().map(fail, name="fail once").sink(
        af.io.blackhole()
    )
    return flow
