"""The endpoint over real processes: workers of a run, a JobManager, the command line."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from tests.integration.clusters import ROOT, Cluster, ask_url, until
from tests.monitoring.watching import CONTROL, TOKEN, Client, check, watched


async def test_tasks_in_workers_are_shown_with_their_process() -> None:
    """Metrics, attempts, state and checkpoints of what runs elsewhere; a worker that is lost and
    replaced is another attempt.
    """
    flow = af.Flow("far", parallelism=2)
    events = flow.source(af.io.push(), name="events")
    events.rebalance().map(abs, name="abs").key_by(abs).count(name="counts", uid="counts").sink(
        af.io.blackhole()
    )
    options = {"checkpoints": "memory://far", "every": "1h", "restart": af.fixed_delay(5, "0s")}
    async with watched(
        flow, workers=2, monitor_options={**CONTROL, "show_data": True}, **options
    ) as client:
        await client.job.input(events).put_many(range(100))
        await client.until(
            client.path, lambda job: job["vertices"][-1]["metrics"]["read-records"] == 100
        )
        workers = (await client.get("/taskmanagers"))["taskmanagers"]
        assert [one["id"] for one in workers] == ["local", "worker-1", "worker-2"]
        check({"taskmanagers": workers}, "TaskManagers")
        ids = await client.vertices()
        counts = next(path for name, path in ids.items() if name.startswith("counts"))
        body = await client.get(f"{client.path}/vertices/{counts}")
        check(body, "Vertex")
        assert {one["taskmanager-id"] for one in body["subtasks"]} == {"worker-1", "worker-2"}
        check(
            await client.get(f"{client.path}/vertices/{counts}/taskmanagers"), "VertexTaskManagers"
        )
        assert (await client.get(f"{client.path}/vertices/{counts}/flamegraph?type=off_cpu"))[
            "data"
        ]["value"] == 2
        state = (await client.get(f"/aioflow{client.path}/state"))["operators"][0]
        assert sum(part["states"][0]["keys"] for part in state["subtasks"]) == 100
        assert (await client.get(f"/aioflow{client.path}/state/counts/running?key=7"))[
            "value"
        ] == "1"
        status, answer = await client.change("POST", f"{client.path}/checkpoints")
        assert status == 202
        done = await client.until(
            f"{client.path}/checkpoints/{answer['request-id']}",
            lambda body: body["status"]["id"] == "COMPLETED",
        )
        assert done["operation"]["checkpointId"] == 1
        detail = await client.get(f"{client.path}/checkpoints/details/1/subtasks/{counts}")
        check(detail, "CheckpointSubtasks")
        assert [one["status"] for one in detail["subtasks"]] == ["completed", "completed"]


def twins(last: Any) -> tuple[af.Flow, Any]:
    """Two tasks are called "out", each sees another part of the numbers; `last` is the sink of
    the second, whose slots are its own.
    """
    flow = af.Flow("twins")
    numbers = flow.source(af.io.push(), name="numbers")
    numbers.filter(lambda n: n < 50, name="half").rebalance().sink(af.io.blackhole(), name="out")
    numbers.filter(lambda n: n < 10, name="few").slot_sharing_group("apart").rebalance().sink(
        last, name="out"
    )
    return flow, numbers


async def both_are_told(client: Client, numbers: Any) -> None:
    """Pushes records, and waits until REST and Prometheus show both."""
    await client.job.input(numbers).put_many(range(100))

    def seen(job: Any) -> list[int]:
        return [
            vertex["metrics"]["read-records"]
            for vertex in job["vertices"]
            if vertex["name"] == "out"
        ]

    await client.until(client.path, lambda job: seen(job) == [50, 10])
    page = await client.get("/metrics?names=flink")
    assert sorted(
        re.findall(
            r'^flink_taskmanager_job_task_numRecordsIn{.*task_name="out".*} (\d+)$', page, re.M
        )
    ) == ["10", "50"]


async def test_tasks_of_one_name_in_two_processes_keep_their_own_metrics() -> None:
    """One of the two is in a worker, the other in the process that runs the flow: neither hides the
    other.
    """
    taken: list[int] = []
    flow, numbers = twins(taken.append)
    async with watched(flow, workers=2) as client:
        await both_are_told(client, numbers)


@pytest.fixture
def cluster(cluster: Cluster) -> Cluster:
    cluster.data.mkdir(mode=0o700)
    return cluster


def records_seen(url: str, token: str) -> list[Any]:
    """The records of the first event of a tap that has some."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            if line.startswith(b"data: ") and (records := json.loads(line[6:])["records"]):
                return list(records)
    return []


def test_a_jobmanager_shows_its_jobs_also_those_that_are_over(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Standalone: jobs, processes, metrics and exceptions; a job is cancelled with the token,
    and stays to be looked at.
    """
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    data = ["--data", str(cluster.data)]
    options = [
        "--monitor",
        "127.0.0.1:0",
        "--monitor-token-file",
        str(token),
        "--enable-control",
        "--request-timeout",
        "10m",
    ]
    cluster.spawn("jobmanager", *data, "--port", "0", *options)
    found: list[str] = []

    def is_served() -> bool:
        found[:] = re.findall(r"dashboard at (\S+)", cluster.log("extra"))
        return bool(found) and (cluster.data / "address").exists()

    until(is_served, "the jobmanager listens")
    url = found[0]
    until(lambda: ask_url(f"{url}/overview")[0] == 200, "it answers")
    assert ask_url(f"{url}/jobmanager/metrics?get=fenced_total")[1] == [
        {"id": "fenced_total", "value": "0"}
    ]
    job_id = cluster.submit("endless")
    path = f"{url}/jobs/{job_id}"
    until(
        lambda: {one["status"] for one in ask_url(path)[1].get("vertices", ())} == {"SCHEDULED"},
        "its tasks wait for slots",
    )
    assert ask_url(path)[1]["vertices"][0]["start-time"] == -1
    cluster.spawn(
        "taskmanager",
        *data,
        "--jobmanager",
        cluster.address,
        "--slots",
        "4",
        "--secret-file",
        str(cluster.secret),
    )
    until(lambda: ask_url(f"{url}/overview")[1]["slots-total"] == 4, "a taskmanager is registered")
    until(
        lambda: ask_url(path)[1]["vertices"][-1]["metrics"]["read-records"] > 0, "its metrics come"
    )
    check(ask_url(path)[1], "Job")
    check(ask_url(f"{url}/taskmanagers")[1], "TaskManagers")
    (worker,) = ask_url(f"{url}/taskmanagers")[1]["taskmanagers"]
    check(ask_url(f"{url}/taskmanagers/{worker['id']}")[1], "TaskManagerDetails")
    assert ask_url(f"{url}/taskmanagers/{worker['id']}")[1]["allocatedSlots"][0]["jobId"] == job_id
    for vertex in ask_url(path)[1]["vertices"]:
        body = ask_url(f"{path}/vertices/{vertex['id']}")[1]
        check(body, "Vertex")
        assert {one["taskmanager-id"] for one in body["subtasks"]} == {worker["id"]}
        check(ask_url(f"{path}/vertices/{vertex['id']}/backpressure")[1], "BackPressure")
    inside = ask_url(f"{url}/aioflow/asyncio?taskmanager={worker['id']}")[1]
    check(inside, "Asyncio")
    tasks = {f"{vertex['name']}-1" for vertex in ask_url(path)[1]["vertices"]}
    assert tasks <= {task["name"] for task in inside["tasks"]}
    assert tasks.isdisjoint(task["name"] for task in ask_url(f"{url}/aioflow/asyncio")[1]["tasks"])
    until(
        lambda: ask_url(f"{url}/aioflow/logs?taskmanager={worker['id']}")[1]["records"],
        "the taskmanager's log is there",
    )
    reader = next(node for node in ask_url(path)[1]["plan"]["nodes"] if node.get("inputs"))
    seen = records_seen(
        f"{url}/aioflow/jobs/{job_id}/tap?edge={reader['inputs'][0]['id']}-{reader['id']}", TOKEN
    )
    assert seen
    assert ask_url(path, "PATCH")[0] == 401
    assert ask_url(path, "PATCH", TOKEN)[0] == 202
    until(lambda: ask_url(f"{path}/status")[1].get("status") == "CANCELED", "the job is cancelled")
    until(lambda: ask_url(f"{url}/overview")[1]["jobs-running"] == 0, "it counts as over")
    check(ask_url(path)[1], "Job")

    failing = cluster.submit("failing")
    until(
        lambda: ask_url(f"{url}/jobs/{failing}/status")[1].get("status") == "FAILED",
        "the other job fails",
    )
    body = ask_url(f"{url}/jobs/{failing}/exceptions")[1]
    check(body, "Exceptions")
    assert body["exceptionHistory"]["entries"][0]["exceptionName"] == "ValueError"
    assert "no 1" in body["root-exception"]
    assert {one["status"] for one in ask_url(f"{url}/jobs")[1]["jobs"]} == {"CANCELED", "FAILED"}


async def test_a_job_on_a_cluster_shows_its_restart_policy_and_tasks_of_one_name_apart(
    cluster: Cluster,
) -> None:
    """The endpoint is in the process that submitted the job; each of the two tasks has its own
    TaskManager.
    """
    await asyncio.to_thread(cluster.start, workers=2, slots=1)
    on = af.RemoteCluster(cluster.address, secret=cluster.secret)
    flow, numbers = twins(af.io.blackhole())
    async with watched(flow, on=on, restart=af.fixed_delay(3, "5s")) as client:
        await both_are_told(client, numbers)
        config = (await client.get(f"{client.path}/config"))["execution-config"]
        assert config["restart-strategy"] == "fixed delay: 3 restarts, 5 s apart"
        places = []
        for vertex in (await client.get(client.path))["vertices"]:
            if vertex["name"] == "out":  # Where its task is, is told a moment later.
                place = f"{client.path}/vertices/{vertex['id']}"
                body = await client.until(
                    place, lambda body: body["subtasks"][0]["taskmanager-id"] != "local"
                )
                places.append(body["subtasks"][0]["taskmanager-id"])
        assert len(set(places)) == 2


async def test_a_run_from_the_command_line_says_where_its_dashboard_is(tmp_path: Path) -> None:
    import sys

    program = tmp_path / "program.py"
    built = "flow.source(af.io.datagen(lambda n: n, rate=10)).sink(af.io.blackhole())"
    program.write_text(f"import aioflow as af\nflow = af.Flow('slow')\n{built}\n")
    command = [
        sys.executable,
        "-m",
        "aioflow",
        "run",
        f"{program}:flow",
        "--monitor",
        "127.0.0.1:0",
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(60):
            while not (
                found := re.search(rb"dashboard at (\S+)", line := await process.stderr.readline())
            ):
                assert line
        url = found[1].decode()
        status, body = await asyncio.to_thread(ask_url, f"{url}/jobs")
        assert (status, [one["status"] for one in body["jobs"]]) == (200, ["RUNNING"])
    finally:
        process.terminate()
        await process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--monitor", "0.0.0.0:0"], "expected a token"),
        (["--monitor", "nowhere"], "HOST:PORT"),
        (["--enable-control"], "about --monitor"),
        (["--monitor", "127.0.0.1:0", "--enable-control"], "expected a token"),
        (
            ["--monitor", "127.0.0.1:0", "--monitor-token-file", "/nonexistent/token"],
            "cannot be read",
        ),
    ],
)
def test_wrong_options_are_wrong_usage(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from aioflow.cli import main

    program = tmp_path / "program.py"
    program.write_text(
        "import aioflow as af\nflow = af.Flow('short')\nflow.source([1]).sink(af.io.blackhole())\n"
    )
    assert main(["run", f"{program}:flow", *arguments]) == 2
    assert complaint in capsys.readouterr().err
