"""Mistakes of cluster users and faults of the world: each is reported with its remedy, nothing
hangs, nothing stays behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

import aioflow as af
from tests.integration.clusters import FLOWS, ROOT, Cluster, aioflow, until
from tests.integration.processes import alive

pytestmark = [pytest.mark.timeout(300)]

JOB_ID = re.compile(r"^[0-9a-f]{32}$", re.MULTILINE)


@pytest.fixture
def unused() -> str:
    """An address of this machine at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def secret_file(folder: Path, text: str = "a secret of good length, known to no other") -> Path:
    path = folder / "other-secret"
    path.write_text(text)
    path.chmod(0o600)
    return path


def numbers() -> af.Flow:
    flow = af.Flow("numbers")
    flow.source([1, 2, 3]).sink(af.io.blackhole())
    return flow


# An address without a listener, or with a stranger.


@pytest.mark.parametrize(
    "command",
    [["list"], ["cancel", "a"], ["stop", "a"], ["savepoint", "a"], ["submit", f"{FLOWS}:ending"]],
)
def test_command_without_a_jobmanager_says_where_it_looked_and_names_the_remedy(
    command: list[str], unused: str, tmp_path: Path
) -> None:
    done = aioflow(*command, "--at", unused, "--secret-file", secret_file(tmp_path))
    assert done.returncode == 2
    said = (
        f"aioflow {command[0]}: no jobmanager listens at {unused}: start a cluster with aioflow "
        "cluster start, or name one with --at\n"
    )
    assert done.stderr == said


def test_a_name_that_is_no_machine_is_named(tmp_path: Path) -> None:
    done = aioflow(
        "list", "--at", "no-such-machine.invalid:6123", "--secret-file", secret_file(tmp_path)
    )
    assert done.returncode == 2
    assert "no jobmanager can be reached at no-such-machine.invalid:6123 (" in done.stderr
    assert "start a cluster with aioflow cluster start" in done.stderr


async def test_error_for_a_program_without_a_jobmanager_names_the_address_and_the_remedy(
    unused: str,
) -> None:
    on = af.RemoteCluster(unused, secret="a secret of good length, known to no other")
    async with asyncio.timeout(60):
        with pytest.raises(
            ConnectionError,
            match=(
                f"no jobmanager listens at {unused}: start a cluster with aioflow cluster start, or"
            ),
        ):
            await numbers().execute(on=on)


async def test_error_for_a_program_whose_secret_is_wrong_says_so(cluster: Cluster) -> None:
    await asyncio.to_thread(cluster.start, workers=0)
    on = af.RemoteCluster(cluster.address, secret="a secret of good length, known to no other")
    async with asyncio.timeout(60):
        with pytest.raises(af.AioflowError, match="does not know this secret"):
            await numbers().execute(on=on)


class Refusing(socketserver.BaseRequestHandler):
    """Answers what it does not understand as web servers do. (`http.server` waits for the end of
    a line: few nonces have one.)
    """

    def handle(self) -> None:
        self.request.recv(1024)
        self.request.sendall(
            b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
            b"this is a web server"
        )


def test_a_server_of_another_kind_is_not_taken_for_a_jobmanager(tmp_path: Path) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        where = "{}:{}".format(*server.server_address)
        try:
            done = aioflow("list", "--at", where, "--secret-file", secret_file(tmp_path))
        finally:
            server.shutdown()
            thread.join()
    assert done.returncode == 2
    assert f"the jobmanager at {where} does not know this secret, or is none" in done.stderr


# Starting.


def test_a_cluster_whose_port_or_dashboard_is_taken_says_so_and_leaves_no_process(
    cluster: Cluster,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        taken = aioflow("cluster", "start", "--data", cluster.data, "--port", port)
        assert (
            taken.returncode,
            f"port {port} is in use: another jobmanager may run there" in taken.stderr,
        ) == (2, True), taken.stderr
        shown = aioflow(
            "cluster",
            "start",
            "--data",
            cluster.data,
            "--port",
            "0",
            "--monitor",
            f"127.0.0.1:{port}",
        )
        assert (
            shown.returncode,
            f"--monitor 127.0.0.1:{port} cannot be listened at" in shown.stderr,
        ) == (2, True), shown.stderr
    assert not any(map(alive, cluster.pids()))
    assert "1 slot" in cluster.start(workers=1, slots=1)


def test_a_second_start_in_the_same_directory_is_refused(cluster: Cluster) -> None:
    cluster.start(workers=0)
    again = aioflow("cluster", "start", "--data", cluster.data, "--port", "0")
    assert again.returncode == 2
    assert (
        f"a cluster runs with {cluster.data} already (processes {cluster.pids()[0]}); stop it first"
        in again.stderr
    )


def test_a_taskmanager_finds_the_secret_in_the_directory_that_it_is_given(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Finds it where the JobManager of that directory has created it; otherwise says where it
    looked.
    """
    done = aioflow("taskmanager", "--data", tmp_path)
    assert (done.returncode, f"there is no secret file {tmp_path}/secret: name" in done.stderr) == (
        2,
        True,
    ), done.stderr
    cluster.start(workers=0)
    cluster.spawn("taskmanager", "--data", str(cluster.data))
    until(lambda: cluster.slots() == [(1, 1)], "it has registered")


def heed() -> None:
    """Restores Ctrl-C in a new process: a shell that starts a process in the background makes it
    ignore Ctrl-C, which is inherited.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_while_a_cluster_starts_leaves_nothing(cluster: Cluster) -> None:
    """Whenever it comes: before the JobManager listens, and while TaskManagers are on their way."""
    for moment in ("jobmanager.log", "taskmanager-1.log"):
        (cluster.data / moment).unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "aioflow",
            "cluster",
            "start",
            "--data",
            str(cluster.data),
            "--port",
            "0",
            "--workers",
            "2",
        ]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            preexec_fn=heed,
        ) as process:
            until((cluster.data / moment).exists, f"{moment} is there")
            pids = (
                cluster.pids() if (cluster.data / "pids").exists() else []
            )  # The first may be on its way.
            process.send_signal(signal.SIGINT)
            assert (process.wait(100), process.communicate()) == (130, ("", ""))
        until(lambda pids=pids: not any(map(alive, pids)), "all are gone")  # type: ignore[misc]
        assert not (cluster.data / "pids").exists()


def test_a_reader_that_has_left_is_no_error_of_a_command_that_asks(cluster: Cluster) -> None:
    cluster.start(workers=0)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        for unbuffered in ("", "1"):
            command = [
                sys.executable,
                "-m",
                "aioflow",
                "list",
                "--at",
                cluster.address,
                "--secret-file",
                str(cluster.secret),
            ]
            environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=writing,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            assert (done.returncode, done.stderr) == (1, "")
    finally:
        os.close(writing)


# Jobs.


def test_ctrl_c_of_a_submission_leaves_the_job_running_and_says_how_to_end_it(
    cluster: Cluster,
) -> None:
    cluster.start(workers=1, slots=1)
    command = [
        sys.executable,
        "-m",
        "aioflow",
        "submit",
        f"{FLOWS}:endless",
        "--at",
        cluster.address,
        "--secret-file",
        str(cluster.secret),
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=heed,
    ) as process:
        assert process.stdout is not None
        job = process.stdout.readline().strip()
        until(lambda: cluster.job(job) == "RUNNING", "it runs")
        process.send_signal(signal.SIGINT)
        code, (_, err) = process.wait(100), process.communicate()
    assert (code, err) == (
        130,
        f"aioflow submit: job {job} goes on; aioflow cancel {job[:8]} ends it\n",
    )
    assert cluster.job(job) == "RUNNING"


def test_a_job_that_fails_says_in_which_operator_and_at_which_record(cluster: Cluster) -> None:
    """The message is that of `aioflow run`; a list has one line for each job."""
    cluster.start(workers=1, slots=1)
    failed = cluster.ask("submit", f"{FLOWS}:failing")
    assert failed.returncode == 1
    assert failed.stderr == (
        "failing: FAILED: ValueError: no 1\n  in operator 'map(fail)', subtask 1/1, at record 1\n"
    )
    listed = cluster.ask("list").stdout
    assert listed == f"{failed.stdout.strip()}  FAILED        failing  ValueError: no 1\n"
    at_home = cluster.ask("submit", f"{FLOWS}:failing_at_home")
    assert (at_home.returncode, at_home.stderr) == (
        1,
        failed.stderr.replace("failing:", "failing_at_home:"),
    )


def test_requests_about_a_finished_job_are_answered(cluster: Cluster) -> None:
    cluster.start(workers=1, slots=1)
    job = cluster.submit("failing")
    until(lambda: cluster.job(job) == "FAILED", "it has failed")
    for command, done, code in (
        ("cancel", "cancelled", 0),
        ("stop", "stopped", 1),
        ("savepoint", "saved", 1),
    ):
        told = cluster.ask(command, job)
        assert (told.returncode, told.stderr) == (
            code,
            f"failing: had ended already, FAILED: nothing was {done}\n",
        ), command


def test_a_savepoint_of_a_job_without_checkpoints_is_refused_with_the_remedy(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A stop that asks for one would leave nothing: it is refused too, and the job goes on."""
    cluster.start(workers=1, slots=1)
    job = cluster.submit("endless")
    until(lambda: cluster.job(job) == "RUNNING", "it runs")
    where = str(tmp_path / "savepoints")
    for command, *options in (
        ("savepoint",),
        ("stop", "--savepoint", where),
        ("stop", "--drain", "--savepoint", where),
    ):
        done = cluster.ask(command, job, *options)
        assert (done.returncode, done.stdout) == (1, "")
        told = (
            rf"aioflow {command}: job 'endless' has no checkpoints.*: run it with --checkpoints "
            r"URL\n"
        )
        assert re.fullmatch(told, done.stderr), done.stderr
        assert cluster.job(job) == "RUNNING"
    assert cluster.ask("stop", job).returncode == 0


def test_two_jobs_of_one_flow_do_not_share_its_state(cluster: Cluster, tmp_path: Path) -> None:
    """The second fails at once, and says who has the flow; the first goes on."""
    cluster.start(workers=2, slots=1)
    store = str(tmp_path / "store")
    first = cluster.submit("endless", "--checkpoints", store)
    until(lambda: cluster.job(first) == "RUNNING", "the first runs")
    second = cluster.ask("submit", f"{FLOWS}:endless", "--checkpoints", store)
    assert second.returncode == 1
    assert "Stop that job first, or give this one another store or flow name" in second.stderr
    assert cluster.job(first) == "RUNNING"


def test_a_taskmanager_that_dies_while_a_job_comes_is_replaced(cluster: Cluster) -> None:
    """The JobManager of `cluster start` starts another one, and the job gets its slots there."""
    cluster.start(workers=1, slots=1, request_timeout="10m")
    os.kill(cluster.pids()[1], signal.SIGKILL)
    job = cluster.submit("at_once", "--restarts", "100")
    until(lambda: cluster.job(job) == "FINISHED", "the job ends")
    said = "taskmanager 1 ended by signal 9, another one takes its place in 1 s (1 of 10)"
    assert said in cluster.log("jobmanager")
    pids = cluster.pids()
    assert len(pids) == 3
    stopped = aioflow("cluster", "stop", "--data", cluster.data)
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert not any(map(alive, pids))


# Processes that were started by hand.


def test_stop_ends_a_jobmanager_that_was_started_again_by_hand_at_another_port(
    cluster: Cluster,
) -> None:
    cluster.start(workers=1, slots=1)
    for pid in cluster.pids():
        os.kill(pid, signal.SIGKILL)
    first = cluster.address
    again = cluster.spawn("jobmanager", "--data", str(cluster.data), "--port", "0")
    until(lambda: cluster.address != first, "it listens at another port")
    until(lambda: "no jobs" in cluster.ask("list").stdout, "it leads")
    second = aioflow("cluster", "start", "--data", cluster.data, "--port", "0")
    assert (
        f"a cluster runs with {cluster.data} already (processes {again.pid}); stop it first"
        in second.stderr
    )

    stopped = aioflow("cluster", "stop", "--data", cluster.data)

    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (0, "cluster stopped\n", "")
    assert again.wait(60) == 0


def test_stop_ends_a_standby_too_and_no_other_leads_afterwards(cluster: Cluster) -> None:
    cluster.start(workers=1, slots=1)
    first = cluster.address
    standby = cluster.spawn(
        "jobmanager", "--data", os.path.relpath(cluster.data, ROOT), "--port", "0"
    )
    until(lambda: cluster.address != first, "the standby listens")
    by_hand = cluster.spawn("taskmanager", f"--data={cluster.data}")
    until(lambda: len(cluster.slots()) == 2, "a further TaskManager has registered")

    stopped = aioflow("cluster", "stop", "--data", cluster.data)

    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (0, "cluster stopped\n", "")
    assert standby.wait(60) == by_hand.wait(60) == 0
    assert not any(map(alive, (standby.pid, by_hand.pid)))
    again = aioflow("cluster", "stop", "--data", cluster.data)
    assert (again.returncode, again.stderr) == (
        2,
        f"aioflow cluster: no cluster runs with {cluster.data}\n",
    )


def test_a_cluster_with_a_dashboard_says_where_it_is(cluster: Cluster) -> None:
    started = aioflow(
        "cluster",
        "start",
        "--data",
        cluster.data,
        "--port",
        "0",
        "--workers",
        "0",
        "--monitor",
        "127.0.0.1:0",
    )

    said = re.search(r"^dashboard at (http://127\.0\.0\.1:\d+)$", started.stdout, re.MULTILINE)
    assert said is not None, started.stdout + started.stderr
    with urllib.request.urlopen(f"{said[1]}/overview", timeout=60) as answer:
        assert json.load(answer)["slots-total"] == 0


def test_a_job_that_runs_when_its_cluster_is_stopped_goes_on_at_the_next_start(
    cluster: Cluster,
) -> None:
    """I6: also without checkpoints and without a restart policy, because TaskManagers that leave
    with the cluster are no failure of a job.
    """
    cluster.start(workers=2, slots=1)
    job = cluster.submit("endless")
    until(lambda: "RUNNING 2/2 tasks" in cluster.ask("list").stdout, "it runs")

    assert aioflow("cluster", "stop", "--data", cluster.data).returncode == 0

    assert "has ended as" not in cluster.log("jobmanager")
    cluster.start(workers=1, slots=1)
    until(lambda: cluster.job(job) == "RUNNING", "it runs again")
