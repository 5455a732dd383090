"""Standalone clusters of real processes: submitted jobs run as in one process, and lost processes
are replaced (I1, I2, I4 to I6).
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.cluster.heartbeat import HeartbeatOptions
from aioflow.cluster.leadership import parse_address
from tests.integration.cluster_flows import short
from tests.integration.clusters import FLOWS, ROOT, Cluster, aioflow, until

WORDCOUNT = f"{ROOT / 'examples' / 'wordcount.py'}:flow"

pytestmark = [pytest.mark.timeout(300)]


def listening(*argv: str | Path) -> tuple[int, str]:
    """Starts a JobManager, ends it by SIGTERM once it has said something.

    Returns its code, and what it said.
    """
    command = [sys.executable, "-m", "aioflow", *map(str, argv)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.terminate()
        return process.wait(100), said


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_word_count_on_a_cluster_gives_what_one_process_gives_and_stop_leaves_no_process(
    cluster: Cluster,
) -> None:
    """I1, I2: submitted, run by two TaskManagers, listed as FINISHED; idle TaskManagers stay
    (I2).
    """
    here = aioflow("run", WORDCOUNT, "-q")
    assert "2 taskmanagers with 4 slots" in cluster.start(workers=2, slots=2)
    pids = cluster.pids()
    assert len(pids) == 3
    assert all(map(is_alive, pids))

    submitted = cluster.ask("submit", WORDCOUNT)

    assert submitted.returncode == 0, submitted.stderr
    printed = cluster.log("taskmanager-1") + cluster.log("taskmanager-2")
    assert [
        line for line in printed.splitlines() if re.match(r" *\d+ \w+$", line)
    ] == here.stdout.splitlines()
    assert cluster.job(submitted.stdout.split()[0]) == "FINISHED"
    status = aioflow("cluster", "status", "--data", cluster.data).stdout
    assert status.count("2 slots, ") == 2
    assert "wordcount" in status
    elsewhere = ("--at", cluster.address, "--secret-file", cluster.secret)
    assert aioflow("cluster", "status", *elsewhere).stdout == status
    stopped = aioflow("cluster", "stop", "--data", cluster.data)
    assert (stopped.returncode, stopped.stdout) == (0, "cluster stopped\n"), stopped.stderr
    assert not any(map(is_alive, pids))
    assert aioflow("cluster", "stop", "--data", cluster.data).returncode == 2


def test_jobs_are_listed_cancelled_and_stopped_by_the_beginning_of_their_id(
    cluster: Cluster,
) -> None:
    cluster.start(workers=1, slots=2)
    first, second = cluster.submit("endless"), cluster.submit("endless")
    until(lambda: cluster.job(first) == cluster.job(second) == "RUNNING", "both run")
    assert [line.split()[:2] for line in cluster.ask("list").stdout.splitlines()] == [
        [first, "RUNNING"],
        [second, "RUNNING"],
    ]
    cancelled = cluster.ask("cancel", first[:12])
    assert (cancelled.returncode, cancelled.stdout) == (0, f"{first}  CANCELED\n"), cancelled.stderr
    stopped = cluster.ask("stop", second)
    assert stopped.returncode == 0, stopped.stderr
    assert "FINISHED" in stopped.stderr
    nothing = cluster.ask("cancel", "ffff-no-such-job")
    assert nothing.returncode == 2
    assert "no job has an id that begins with 'ffff-no-such-job'" in nothing.stderr
    failed = cluster.ask("submit", f"{FLOWS}:failing")
    assert failed.returncode == 1
    assert "ValueError: no 1" in failed.stderr
    refused = cluster.ask("submit", f"{FLOWS}:at_home", "--detach")
    assert refused.returncode == 2
    assert "runs in the submitting process" in refused.stderr


def test_peer_without_the_secret_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start(workers=0)
    wrong = tmp_path / "wrong"
    wrong.write_text("another secret of good length")
    wrong.chmod(0o600)
    for argv in (
        ["list", "--at", cluster.address],
        ["taskmanager", "--jobmanager", cluster.address],
    ):
        refused = aioflow(*argv, "--secret-file", wrong)
        assert refused.returncode != 0
        assert "secret" in refused.stderr
    assert "no jobs" in cluster.ask("list").stdout
    wrong.chmod(0o640)
    readable = aioflow("list", "--at", cluster.address, "--secret-file", wrong)
    assert readable.returncode == 2
    assert f"chmod 600 {wrong}" in readable.stderr


def test_a_job_manager_says_why_it_cannot_listen(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        taken = aioflow("jobmanager", "--port", port, "--data", tmp_path / "data")
    assert taken.returncode == 2
    assert f"port {port} is in use" in taken.stderr
    assert (tmp_path / "data" / "secret").stat().st_mode & 0o777 == 0o600
    open_to_all = aioflow("jobmanager", "--bind", "0.0.0.0", "--data", tmp_path / "data")
    assert open_to_all.returncode == 2
    assert "--secret-file" in open_to_all.stderr
    secret = tmp_path / "data" / "secret"
    code, said = listening(
        "jobmanager", "--port", "0", "--data", tmp_path / "absent", "--secret-file", secret
    )
    assert code == 0
    assert said.startswith("jobmanager listens at 127.0.0.1:")
    unanswered = aioflow(
        "list", "--at", f"127.0.0.1:{port}", "--secret-file", tmp_path / "data" / "secret"
    )
    assert unanswered.returncode == 2
    assert "no jobmanager listens" in unanswered.stderr


def test_a_job_without_slots_waits_until_more_come(cluster: Cluster) -> None:
    """I2: later slots fulfil the requirements of a job that waits."""
    cluster.start(workers=1, slots=2, request_timeout="10m")
    waits = cluster.submit("wide")
    until(lambda: cluster.slots() == [(2, 0)], "it has what there is")
    until(lambda: "(waits for 2 slots)" in cluster.ask("list").stdout, "it says what it waits for")
    assert re.fullmatch(
        rf"{waits}  RUNNING 0/\d+ tasks \(waits for 2 slots\)  wide\n", cluster.ask("list").stdout
    )
    joined = cluster.spawn(
        "taskmanager",
        "--jobmanager",
        cluster.address,
        "--slots",
        "2",
        "--secret-file",
        str(cluster.secret),
    )
    until(lambda: cluster.job(waits) == "FINISHED", "the job has got its slots")
    joined.terminate()
    assert joined.wait(100) == 0


def test_a_job_that_waits_for_slots_is_cancelled_and_gives_back_those_it_has(
    cluster: Cluster,
) -> None:
    cluster.start(workers=1, slots=2, request_timeout="10m")
    waits = cluster.submit("wide")
    until(lambda: cluster.slots() == [(2, 0)], "it has what there is")
    assert cluster.ask("cancel", waits).stdout == f"{waits}  CANCELED\n"
    until(lambda: cluster.slots() == [(2, 2)], "the slots are free again")


def test_a_job_that_the_cluster_cannot_hold_fails_and_says_how_many_slots_it_needs(
    cluster: Cluster,
) -> None:
    """I2: unfulfillable requirements end as NoResourceAvailable."""
    cluster.start(workers=1, slots=1, request_timeout="2s")
    short = cluster.ask("submit", f"{FLOWS}:two_groups")
    assert short.returncode == 1
    assert "NoResourceAvailable" in short.stderr
    assert "needs 2 slots and got 1" in short.stderr


def test_jobs_wait_in_line_for_slots_that_other_jobs_have(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """They wait much longer than for slots that do not exist, and each of them says so once."""
    cluster.start(workers=1, slots=2, request_timeout="500ms")

    async def submit() -> list[str]:
        on = af.RemoteCluster(cluster.data, secret=cluster.secret)
        jobs = [asyncio.create_task(short().execute(on=on)) for _ in range(8)]
        return [(await job).status for job in jobs]

    assert asyncio.run(submit()) == ["FINISHED"] * 8
    waited = "waits in line: other jobs have the slots that it needs"
    assert 3 <= cluster.log("jobmanager").count(waited) <= 6
    assert waited in caplog.text, "their program says so too"


def test_a_job_in_line_is_shown_as_waiting_and_starts_once_another_one_ends(
    cluster: Cluster,
) -> None:
    cluster.start(workers=1, slots=1, request_timeout="500ms")
    first = cluster.submit("endless")
    until(lambda: cluster.slots() == [(1, 0)], "the first job has the slot")
    second = cluster.spawn(
        "submit", f"{FLOWS}:wide", "--at", cluster.address, "--secret-file", str(cluster.secret)
    )
    until(lambda: "waits for 4 slots" in cluster.ask("list").stdout, "the second one waits")
    until(lambda: "waits in line" in cluster.log("jobmanager"), "the log says why")
    assert second.poll() is None
    cluster.ask("cancel", first)
    assert second.wait(120) == 0


def test_a_job_with_too_few_slots_runs_with_those_that_are_there(cluster: Cluster) -> None:
    """Without checkpoints it stays so, and says so once."""
    cluster.start(workers=1, slots=2, request_timeout="1s")
    short = cluster.ask("submit", f"{FLOWS}:wide")
    assert short.returncode == 0, short.stderr
    log = cluster.log("jobmanager")
    assert log.count("needs 4 slots and has got 2 in time: it runs with fewer subtasks") == 1
    assert "for good, because it has no checkpoints" in log

    async def collect() -> list[object]:
        flow = af.Flow("collected", parallelism=5)
        counts = flow.source(range(400)).key_by(lambda n: n % 16).count()
        return await counts.collect(on=af.RemoteCluster(cluster.data))

    assert len(asyncio.run(collect())) == 400


def test_a_job_with_checkpoints_uses_slots_that_come_later(
    cluster: Cluster, tmp_path: Path
) -> None:
    """And goes on with fewer once they are gone."""
    cluster.start(workers=1, slots=1, request_timeout="1s")
    store = str(tmp_path / "store")
    job = cluster.submit("wide_endless", "--checkpoints", store, "--every", "100ms")
    fewer = "needs 4 slots and has got 1 in time"
    until(lambda: fewer in cluster.log("jobmanager"), "it has waited for long enough")
    until(lambda: "waits for 3 slots" in cluster.ask("list").stdout, "it runs with one slot")
    until(lambda: cluster.job(job) == "RUNNING", "it runs")
    more = cluster.spawn(
        "taskmanager", "--jobmanager", cluster.address, "--secret-file", str(cluster.secret),
        "--slots", "4",
    )  # fmt: skip
    until(lambda: sum(free for _, free in cluster.slots()) == 1, "it has four slots of five")
    grown = "is rescaled: 'count -> blackhole' 1 -> 4"
    until(lambda: grown in cluster.log("jobmanager"), "it uses them")
    until(lambda: "RUNNING 5/5 tasks  " in cluster.ask("list").stdout, "it waits for none")
    more.kill()
    until(lambda: "waits for 3 slots" in cluster.ask("list").stdout, "it goes on with one slot")
    until(lambda: cluster.job(job) == "RUNNING", "it runs again")


def test_a_job_outlives_its_job_manager(cluster: Cluster) -> None:
    """I6: the job is stored before it is acknowledged; the next leader with the same data runs
    it again on TaskManagers that return.
    """
    cluster.start(workers=1, slots=1)
    job = cluster.submit("endless")
    until(lambda: cluster.job(job) == "RUNNING", "it runs")
    os.kill(cluster.pids()[0], signal.SIGKILL)
    address = cluster.address
    cluster.spawn("jobmanager", "--data", str(cluster.data), "--port", address.rpartition(":")[2])
    until(lambda: cluster.job(job) == "RUNNING", "it runs again")
    until(
        lambda: cluster.log("taskmanager-1").count("is registered with 1 slot at") >= 2,
        "the taskmanager is back",
    )
    until(lambda: cluster.slots() == [(1, 0)], "its slot is taken again")
    stopped = cluster.ask("stop", job)
    assert (stopped.returncode, "FINISHED" in stopped.stderr) == (0, True), stopped.stderr


def test_caller_that_waits_for_a_job_follows_it_to_the_next_leader(cluster: Cluster) -> None:
    """The commands find the cluster by its secret, on any port, and outlive a JobManager like the
    job.
    """
    cluster.start(workers=1, slots=1)
    first = cluster.address
    cluster.spawn("jobmanager", "--data", str(cluster.data), "--port", "0")
    until(lambda: cluster.address != first, "the standby listens")
    submitter = cluster.spawn("submit", f"{FLOWS}:endless", "--secret-file", str(cluster.secret))
    job_id = re.compile(r"^[0-9a-f]{32}$", re.MULTILINE)
    until(lambda: job_id.search(cluster.log("extra")) is not None, "it is submitted")
    (job,) = job_id.findall(cluster.log("extra"))
    until(lambda: cluster.job(job) == "RUNNING", "it runs")
    os.kill(cluster.pids()[0], signal.SIGKILL)
    until(lambda: cluster.job(job) == "RUNNING", "it runs under the next leader")
    assert submitter.poll() is None
    stopped = aioflow("stop", job, "--secret-file", cluster.secret)
    assert (stopped.returncode, "FINISHED" in stopped.stderr) == (0, True), stopped.stderr
    assert submitter.wait(60) == 0


def test_a_cluster_without_its_job_manager_says_how_to_go_on(cluster: Cluster) -> None:
    cluster.start(workers=1, slots=1)
    job_manager, task_manager = cluster.pids()
    os.kill(job_manager, signal.SIGKILL)
    until(lambda: not is_alive(job_manager), "it is gone")
    status = aioflow("cluster", "status", "--data", cluster.data)
    assert status.returncode == 2
    assert (
        f"it is gone, processes {task_manager} of its cluster still run; end them with aioflow "
        "cluster stop" in status.stderr
    )
    assert aioflow("cluster", "stop", "--data", cluster.data).returncode == 0
    again = aioflow("list", "--secret-file", cluster.secret)
    assert "start a cluster with aioflow cluster start" in again.stderr


def test_a_job_ends_with_the_process_that_runs_a_part_of_it(cluster: Cluster) -> None:
    cluster.start(workers=1, slots=1)
    argv = [
        "submit",
        f"{FLOWS}:endless_at_home",
        "--at",
        cluster.address,
        "--secret-file",
        str(cluster.secret),
    ]
    submitter = cluster.spawn(*argv)
    job_id = re.compile(r"^[0-9a-f]{32}$", re.MULTILINE)
    until(
        lambda: (
            "\n-20\n" in cluster.log("extra") and job_id.search(cluster.log("extra")) is not None
        ),
        "results come home",
    )
    (job,) = job_id.findall(cluster.log("extra"))
    assert cluster.job(job) == "RUNNING"
    submitter.kill()
    until(lambda: cluster.job(job) == "CANCELED", "the job is cancelled")
    until(lambda: cluster.slots() == [(1, 1)], "its slot is free")


async def test_a_program_pushes_into_a_job_on_a_cluster_and_learns_when_the_cluster_is_gone(
    cluster: Cluster,
) -> None:
    await asyncio.to_thread(cluster.start, workers=2, slots=1)
    flow = af.Flow("pushed")
    events = flow.source(af.io.push())
    doubled = events.map(twice)
    on = af.RemoteCluster(cluster.address, secret=cluster.secret.read_text())
    with pytest.raises(af.Broken, match=r"the connection to the cluster at .* ended"):
        async with flow.run(on=on) as job:
            async with job.subscribe(doubled) as rows:
                received = aiter(rows)
                for n in range(3):
                    await job.input(events).put(n)
                    assert await anext(received) == 2 * n
            assert any("twice" in name or "numRecords" in name for name in job.metrics()), (
                job.metrics()
            )
            assert job.status == "RUNNING"
            for pid in cluster.pids():
                os.kill(pid, signal.SIGKILL)
            await job.wait()
    assert job.status == "FAILED"


def twice(n: int) -> int:
    return 2 * n


async def test_files_found_later_and_side_outputs_reach_their_readers(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The JobManager finds the files, TaskManagers read them, and the program that submitted the
    job looks on.
    """
    await asyncio.to_thread(cluster.start, workers=2, slots=1)
    inbox, bad = tmp_path / "inbox", af.OutputTag[Any]("bad")
    inbox.mkdir()
    flow = af.Flow("found", parallelism=2)
    numbers = flow.source(af.io.lines(inbox, discover_every="50ms")).map(int, on_error=bad)
    async with flow.run(
        on=af.RemoteCluster(cluster.address, secret=cluster.secret),
        subscribe=[numbers, numbers.side(bad)],
    ) as job:
        async with job.subscribe(numbers) as rows, job.subscribe(numbers.side(bad)) as failures:
            received, failed = aiter(rows), aiter(failures)
            for n in range(4):
                (tmp_path / "new").write_text(f"{n}\nx{n}\n")
                (tmp_path / "new").rename(inbox / f"f{n}")
                assert await anext(received) == n
                assert (await anext(failed)).value == f"x{n}"


@dataclass(frozen=True)
class Reading:
    sensor: str
    value: int


def read(n: int) -> Reading:
    return Reading("ab"[n % 2], n)


async def test_a_source_of_the_program_waits_until_a_cluster_has_read_another_input(
    cluster: Cluster,
) -> None:
    """C3.3, over the JobManager: reports of TaskManagers, and a limit for the submitter."""
    await asyncio.to_thread(cluster.start, workers=2, slots=1)

    async def rules() -> AsyncIterator[str]:
        for _ in range(50):
            await asyncio.sleep(0.002)
            yield "rule"

    flow = af.Flow("first", parallelism=2)
    first, pushed = flow.source(rules), flow.source(af.io.push())
    both = pushed.rebalance().connect(first.broadcast(), read_first="right").map(str, str)
    async with (
        asyncio.timeout(60),
        flow.run(
            on=af.RemoteCluster(cluster.address, secret=cluster.secret), subscribe=[both]
        ) as job,
        job.subscribe(both, buffer=1_000) as rows,
    ):
        await job.input(pushed).put_many(["event"] * 10)
        received = aiter(rows)
        got = [await anext(received) for _ in range(110)]
        # Each of the two subtasks has its own order.
        assert got.index("event") >= 50


async def test_a_program_collects_what_a_cluster_computes(cluster: Cluster) -> None:
    """Values of the program's own classes come back; functions as sinks are called here."""
    await asyncio.to_thread(cluster.start, workers=2, slots=2)
    on = af.RemoteCluster(cluster.address, secret=cluster.secret)
    seen: list[Reading] = []
    flow = af.Flow("readings", parallelism=2)
    readings = flow.source(range(200)).map(read)
    sums = (
        readings.key_by(lambda r: r.sensor)
        .window(af.global_window(at_end=True))
        .aggregate(af.sum(lambda r: r.value))
    )
    rows = await sums.collect(on=on)
    assert sorted((row.key, row.value) for row in rows) == [("a", 9900), ("b", 10000)]
    readings.sink(seen.append)
    result = await flow.execute(on=on)
    assert result.status == "FINISHED"
    assert sorted(seen, key=lambda r: r.value) == [read(n) for n in range(200)]
    with pytest.raises(ValueError, match="no 7"):
        await flow.source([7]).map(refuse).collect(on=on)


def refuse(n: int) -> int:
    raise ValueError(f"no {n}")


def hold(n: int) -> int:
    time.sleep(HeartbeatOptions().timeout_s + 2.0)
    return n


async def test_a_task_manager_whose_function_blocks_is_not_given_up_and_says_where_it_blocks(
    cluster: Cluster,
) -> None:
    """R25: its heartbeats come from a thread, on a connection of their own, in both directions."""
    await asyncio.to_thread(cluster.start, workers=1, slots=1)
    on = af.RemoteCluster(cluster.address, secret=cluster.secret)
    assert await af.Flow("blocks").source([1]).map(hold).collect(on=on) == [1]
    log = cluster.log("taskmanager-1")
    assert "the event loop has been held for" in log
    assert "time.sleep(HeartbeatOptions().timeout_s + 2.0)" in log
    assert 1 <= log.count("is registered") <= cluster.terms()


async def first_rows(job: af.Job, stream: af.DataStream[Any]) -> list[Any]:
    """A few that come from now on."""
    async with asyncio.timeout(120), job.subscribe(stream) as rows:
        return [await anext(aiter(rows)) for _ in range(3)]


@pytest.mark.parametrize("at_home", [False, True], ids=["all there", "a part here"])
@pytest.mark.parametrize("found", ["by the lease", "among addresses"])
async def test_a_job_and_its_handle_go_on_under_a_standby_at_another_address(
    cluster: Cluster, at_home: bool, found: str
) -> None:
    """I6, I5.3: TaskManagers and the submitter find the new leader; the handle, its subscriptions
    and its sinks go on.
    """
    await asyncio.to_thread(cluster.start, workers=1, slots=1)
    first = cluster.address
    cluster.spawn("jobmanager", "--data", str(cluster.data), "--port", "0")
    await asyncio.to_thread(until, lambda: cluster.address != first, "the standby listens")
    where = cluster.data if found == "by the lease" else f"{first}, {cluster.address}"
    flow = af.Flow("followed")
    counts = flow.source(slow_ticks).key_by(lambda n: n % 2).count()
    seen: list[Any] = []
    counts.sink(seen.append if at_home else af.io.blackhole())
    async with flow.run(
        on=af.RemoteCluster(where, secret=cluster.secret), stop_timeout="60s"
    ) as job:
        assert len(await first_rows(job, counts)) == 3
        async with job.subscribe(counts, buffer=100, overflow="drop_oldest") as rows:
            os.kill(cluster.pids()[0], signal.SIGKILL)
            async with asyncio.timeout(120):
                while (
                    job._cluster._client.address == parse_address(first) or job.status != "RUNNING"
                ):
                    await asyncio.sleep(0.02)
            received, so_far = aiter(rows), len(seen)
            async with asyncio.timeout(120):
                for _ in range(150):  # More than are kept of the time before.
                    await anext(received)
            assert await job.state(counts).get(0) is not None
        assert len(await first_rows(job, counts)) == 3
        if at_home:
            await asyncio.to_thread(until, lambda: len(seen) > so_far, "the sink here goes on")
        await job.stop()
    assert job.status == "FINISHED"
    assert "goes on" not in cluster.log("taskmanager-1")
    registered = cluster.log("taskmanager-1").count("is registered with 1 slot at")
    assert 2 <= registered <= cluster.terms()


async def test_standby_redirects_callers_to_the_leader(cluster: Cluster) -> None:
    """I6.1: two candidates, one leads; commands and TaskManagers that know the other one only
    come to the leader all the same.
    """
    await asyncio.to_thread(cluster.start, workers=0)
    first = cluster.address
    cluster.spawn("jobmanager", "--data", str(cluster.data), "--port", "0")
    await asyncio.to_thread(until, lambda: cluster.address != first, "the standby listens")
    cluster.spawn(
        "taskmanager",
        "--jobmanager",
        cluster.address,
        "--slots",
        "3",
        "--secret-file",
        str(cluster.secret),
    )
    await asyncio.to_thread(
        until, lambda: cluster.slots() == [(3, 3)], "the taskmanager has found the leader"
    )
    listed = await asyncio.to_thread(cluster.ask, "list")
    assert (listed.returncode, listed.stdout) == (0, "no jobs\n"), listed.stderr
    status = await asyncio.to_thread(aioflow, "cluster", "status", "--data", cluster.data)
    assert f"jobmanager   {first}\n" in status.stdout, status.stderr
    assert "fenced_total 0\n" in status.stdout


async def slow_ticks() -> AsyncIterator[int]:
    n = 0
    while True:
        yield n
        n += 1
        await asyncio.sleep(0.005)


async def test_a_job_restarts_on_another_task_manager_when_its_own_is_killed(
    cluster: Cluster,
) -> None:
    """I4, I5: the TaskManager's end is known by its connection; its tasks fail, the restart
    strategy places them elsewhere.
    """
    await asyncio.to_thread(cluster.start, workers=2, slots=1)
    flow = af.Flow("survivor")
    counts = flow.source(slow_ticks).key_by(lambda n: n % 2).count()
    on = af.RemoteCluster(cluster.address, secret=cluster.secret)
    async with flow.run(on=on, restart=af.fixed_delay(3, "200ms")) as job:
        async with job.subscribe(counts) as rows:
            assert await anext(aiter(rows)) is not None
        assert await job.state(counts).get(0) is not None
        # A running job has its slot: the status shows it without another heartbeat.
        status = await asyncio.to_thread(aioflow, "cluster", "status", "--data", cluster.data)
        busy = re.search(r"taskmanager  (\w+)  1 slot, 0 free", status.stdout)
        assert busy is not None, status.stdout + status.stderr
        number = next(
            n for n in (1, 2) if f"taskmanager {busy[1]} " in cluster.log(f"taskmanager-{n}")
        )
        os.kill(cluster.pids()[number], signal.SIGKILL)
        async with asyncio.timeout(120):
            while job._cluster.job_master.executions.restarts == 0 or job.status != "RUNNING":
                await asyncio.sleep(0.02)
        async with job.subscribe(counts) as rows:
            assert await anext(aiter(rows)) is not None
        await job.stop()
    assert job.status == "FINISHED"


async def two_then_one(*, directory: str) -> AsyncIterator[int]:
    yield 2
    while not Path(directory, "waits").exists():
        await asyncio.sleep(0.01)
    yield 1


async def hold_and_fail(n: int, *, directory: str) -> int:
    """The first call for 1 holds its event loop. The first one for 2 fails then."""
    held, waits = Path(directory, "held"), Path(directory, "waits")
    if n == 1 and not held.exists():
        held.touch()
        while not Path(directory, "over").exists():
            time.sleep(0.05)
    if n == 2 and not waits.exists():
        waits.touch()
        while not held.exists():
            await asyncio.sleep(0.01)
        raise ValueError("restart")
    return n


async def test_a_job_goes_on_elsewhere_while_a_function_holds_its_taskmanager(
    cluster: Cluster,
) -> None:
    """The ResourceManager gives the job another slot, and the TaskManager comes back."""
    await asyncio.to_thread(cluster.start, workers=3, slots=1)
    flow = af.Flow("held", parallelism=2)
    directory = str(cluster.data)
    rows = (
        flow.source(partial(two_then_one, directory=directory))
        .rebalance()
        .map(partial(hold_and_fail, directory=directory))
    )
    where = af.RemoteCluster(cluster.data, secret=cluster.secret)
    restart = af.fixed_delay(3, "10ms")
    async with asyncio.timeout(60):
        found = await rows.collect(on=where, restart=restart, cancellation_timeout="500ms")
    assert sorted(found) == [1, 2]
    (cluster.data / "over").touch()
    await asyncio.to_thread(until, lambda: cluster.slots() == [(1, 1)] * 3, "it registers again")
