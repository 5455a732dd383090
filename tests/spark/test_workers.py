"""Workers inside Spark's executors: what is killed is replaced and nothing is lost or counted
twice; nothing outlives the program.

A process can have one Spark context, so each test runs a program of its own (`workers_program`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.clusters import ROOT, until
from tests.integration.processes import alive
from tests.spark.brief import BRIEF

WITHIN_S = 280.0

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    # A standalone cluster names the folder of an application by the second in which it began. Two
    # that begin in one second share it, and refuse each other's files.
    pytest.mark.xdist_group("spark-workers"),
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("java"),
]


@contextmanager
def program(
    scenario: str, master: str, folder: Path
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """The program, and the file that its standard output goes to.

    Killed at the end if it is still there.
    """
    said = folder / "said"
    argv = [sys.executable, "-m", "tests.spark.workers_program", scenario, master, str(folder)]
    with said.open("w") as out, (folder / "log").open("w") as log:
        process = subprocess.Popen(argv, stdout=out, stderr=log, text=True, cwd=ROOT)
    try:
        yield process, said
    finally:
        process.kill()
        process.wait()


def test_a_flow_goes_on_with_fewer_workers_if_not_all_find_room(tmp_path: Path) -> None:
    with program("fewer", "local-cluster[1,2,1024]", tmp_path) as (process, said):
        process.wait(800)

    assert said.read_text().splitlines() == ["runs in 1 process", "ended FINISHED []"], (
        tmp_path / "log"
    ).read_text()


def test_processes_killed_under_load_are_replaced_and_every_record_counts_once(
    tmp_path: Path,
) -> None:
    with program("faults", "local-cluster[2,1,1024]", tmp_path) as (process, said):
        process.wait(800)

    assert said.read_text().splitlines() == [
        "runs in 2 processes",
        "a worker was killed, runs in 2 processes",
        "a Spark job was cancelled, runs in 2 processes",
        "an executor was killed, runs in 2 processes",
        "the program held its loop, restarts more: 0",
        "ended FINISHED []",
    ], (tmp_path / "log").read_text()


def test_on_a_standalone_cluster_a_killed_program_leaves_nothing_behind(tmp_path: Path) -> None:
    with standalone(tmp_path) as master, program("endless", master, tmp_path) as (process, said):
        until(
            lambda: "pids" in said.read_text() or process.poll() is not None,
            "the flow runs again after a worker was killed",
            WITHIN_S,
        )
        assert process.poll() is None, (tmp_path / "log").read_text()
        pids = [int(pid) for pid in said.read_text().split()[1:]]
        assert len(pids) >= 3, "two workers, and their executors"
        assert all(alive(pid) for pid in pids)
        assert foreign_listeners([process.pid, *pids]) == []

        process.kill()

        until(
            lambda: not any(alive(pid) for pid in pids),
            "workers and executors have ended",
            WITHIN_S,
        )


@contextmanager
def standalone(folder: Path) -> Iterator[str]:
    """A master and two workers with a core each, from the wheel: it has no start scripts, so
    their classes are started by name.
    """
    import pyspark

    home = Path(pyspark.__file__).parent
    quiet = {
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_NO_DAEMONIZE": "1",
        "SPARK_DAEMON_MEMORY": "256m",
    }
    environ = {
        **os.environ,
        **quiet,
        "SPARK_WORKER_DIR": str(folder / "work"),
        "SPARK_DAEMON_JAVA_OPTS": BRIEF,
    }
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *argv: str) -> Path:
        log = folder / f"{name}.log"
        with log.open("wb") as out:
            command = [
                str(home / "bin" / "spark-class"),
                f"org.apache.spark.deploy.{argv[0]}",
                "--host",
                "127.0.0.1",
                *argv[1:],
            ]
            started.append(
                subprocess.Popen(command, stdout=out, stderr=out, env=environ, cwd=folder)
            )
        return log

    try:
        log = start("master", "master.Master", "--port", "0", "--webui-port", "0")
        until(lambda: "I have been elected leader" in log.read_text(), "a master", WITHIN_S)
        found = re.search(r"Starting Spark master at (spark://\S+)", log.read_text())
        assert found is not None
        worker = ("worker.Worker", "--webui-port", "0", "--cores", "1", "--memory", "1g", found[1])
        for log in [start("worker-1", *worker), start("worker-2", *worker)]:
            until(
                lambda log=log: "Successfully registered with master" in log.read_text(),
                "a worker",
                WITHIN_S,
            )  # type: ignore[misc]
        yield found[1]
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def foreign_listeners(pids: list[int]) -> list[str]:
    """Returns the addresses other than loopback at which these processes listen."""
    inodes = {}
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(descriptor)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes[target[8:-1]] = pid
    found = []
    for table, any_host in (("tcp", "0100007F"), ("tcp6", "0000000000000000FFFF00000100007F")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, state = fields[1].split(":")[0], fields[3]
            if (
                state == "0A"
                and fields[9] in inodes
                and address not in (any_host, "00000000000000000000000001000000")
            ):
                found.append(f"process {inodes[fields[9]]} at {fields[1]}")
    return found
