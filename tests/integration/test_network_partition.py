"""Real TCP with a cut wire: channels go on without a loss, half-open peers are noticed, and no
process acts for a lost JobManager.

Each side is in a network namespace that the test makes itself, which needs root and iproute2. The
times are those of the fault; nothing here says how fast anything has to be.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aioflow.network.data_plane import GIVE_UP_S
from tests.integration.clusters import ROOT, until
from tests.integration.exactly_once_flows import committed, mistakes
from tests.integration.namespaces import FAR, NEAR, TwoMachines

pytestmark = [pytest.mark.timeout(300)]

PORT = 7101
CONTROL_PORT = 6123
RECORDS = 40_000


@pytest.fixture
def machines() -> Iterator[TwoMachines]:
    with TwoMachines() as made:
        yield made


class Consumer:
    """The consumer's process, and what it has said so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.last: dict[str, Any] = {}

    async def says(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first line from here on for which `condition` holds."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self.last = json.loads(line)
            if condition(self.last):
                return self.last
        raise AssertionError(f"the consumer ended; its last words were {self.last}")

    async def result(self) -> dict[str, Any]:
        return await self.says(lambda line: "complete" in line)


class Planes:
    """A producer on the far machine, a consumer on the near one."""

    def __init__(self, machines: TwoMachines) -> None:
        self._machines = machines
        self._processes: list[asyncio.subprocess.Process] = []

    async def _start(self, namespace: str, role: str) -> asyncio.subprocess.Process:
        script = (
            sys.executable,
            "-m",
            "tests.integration.plane_process",
            role,
            FAR,
            str(PORT),
            str(RECORDS),
        )
        process = await asyncio.create_subprocess_exec(
            *self._machines.command(namespace, *script),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self._processes.append(process)
        return process

    async def __aenter__(self) -> Consumer:
        producer = await self._start(self._machines.far, "produce")
        assert producer.stdout is not None
        assert json.loads(await producer.stdout.readline()) == {"port": PORT}
        return Consumer(await self._start(self._machines.near, "consume"))

    async def __aexit__(self, *exc_info: object) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.communicate()


async def test_a_wire_that_is_cut_for_two_seconds_costs_no_record(machines: TwoMachines) -> None:
    async with Planes(machines) as consumer:
        await consumer.says(lambda line: line.get("records", 0) >= 2_000)
        machines.cut()
        await asyncio.sleep(2.0)  # The fault itself.
        machines.mend()
        assert await consumer.result() == {
            "complete": True,
            "resets": consumer.last["resets"],
            "error": None,
        }


async def test_a_peer_behind_a_wire_that_stays_cut_is_noticed_and_read_on_when_it_is_back(
    machines: TwoMachines,
) -> None:
    """E5.5: no FIN and no reset ever comes."""
    async with Planes(machines) as consumer:
        await consumer.says(lambda line: line.get("records", 0) >= 2_000)
        machines.cut()
        await consumer.says(lambda line: line.get("resets", 0) >= 1)
        machines.mend()
        result = await consumer.result()
        assert (result["complete"], result["error"]) == (True, None)


async def test_a_peer_that_hears_and_cannot_be_heard_is_noticed_and_read_on(
    machines: TwoMachines,
) -> None:
    """E5.5: a blackhole in one direction only; what this side sends arrives."""
    async with Planes(machines) as consumer:
        await consumer.says(lambda line: line.get("records", 0) >= 2_000)
        machines.lose_what_far_says()
        await consumer.says(lambda line: line.get("resets", 0) >= 1)
        machines.hear_far_again()
        result = await consumer.result()
        assert (result["complete"], result["error"]) == (True, None)


class FarCluster:
    """A JobManager on the near machine, a TaskManager on the far one, and one `near` too if
    asked for; their logs are in `data`.
    """

    def __init__(self, machines: TwoMachines, data: Path) -> None:
        self._machines = machines
        self._data = data
        self._processes: list[subprocess.Popen[bytes]] = []
        data.mkdir()
        self._secret = data / "secret"
        self._secret.write_bytes(b"s" * 32)
        self._secret.chmod(0o600)

    def start(self, *, near: bool = False, slots: int = 1) -> None:
        shared = ["--secret-file", str(self._secret), "--allow-plaintext"]
        self._spawn(
            self._machines.near,
            "jobmanager",
            "--bind",
            NEAR,
            "--data",
            str(self._data / "jobs"),
            *shared,
        )
        until(lambda: (self._data / "jobs" / "address").exists(), "the jobmanager listens")
        join = ["--jobmanager", f"{NEAR}:{CONTROL_PORT}", "--slots", str(slots), *shared]
        self._spawn(self._machines.far, "taskmanager", "--bind", FAR, *join)
        if near:
            self._spawn(self._machines.near, "taskmanager", "--bind", NEAR, *join, log="near")

    def _spawn(self, namespace: str, name: str, *argv: str, log: str = "") -> None:
        with (self._data / f"{log or name}.log").open("wb") as log_file:
            command = self._machines.command(
                namespace, sys.executable, "-m", "aioflow", name, *argv
            )
            self._processes.append(
                subprocess.Popen(
                    command, stdout=log_file, stderr=log_file, cwd=ROOT, start_new_session=True
                )
            )

    def ask(self, *argv: str) -> str:
        at = ["--at", f"{NEAR}:{CONTROL_PORT}", "--secret-file", str(self._secret)]
        command = self._machines.command(
            self._machines.near, sys.executable, "-m", "aioflow", *argv, *at
        )
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self, job: str) -> str:
        return next(
            line.split()[1] for line in self.ask("list").splitlines() if line.startswith(job)
        )

    def log(self, name: str) -> str:
        return (self._data / f"{name}.log").read_text()

    def close(self) -> None:
        for process in self._processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def cluster(machines: TwoMachines, tmp_path: Path) -> Iterator[FarCluster]:
    made = FarCluster(machines, tmp_path / "cluster")
    yield made
    made.close()


def submitted(cluster: FarCluster, folder: Path) -> str:
    """Submits a job that counts exactly once, and returns its id once its tasks have worked."""
    flow = f"{Path(__file__).parent / 'exactly_once_flows.py'}:from_environment"
    options = ["--checkpoints", f"file://{folder}/store", "--every", "200ms", "--restarts", "100"]
    job = cluster.ask("submit", flow, "--detach", *options).strip()
    until(lambda: len(committed(folder)) > 1_000, "the job has got on")
    return job


def end(cluster: FarCluster, job: str, folder: Path) -> None:
    """Lets the job end, and checks its output."""
    (folder / "stop").touch()
    until(lambda: cluster.status(job) == "FINISHED", "the job has ended")
    assert mistakes(folder) == []


def test_a_partition_between_jobmanager_and_taskmanager_is_a_loss_on_each_side(
    machines: TwoMachines, cluster: FarCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I5.7: the JobManager fails what ran there and waits for slots; the TaskManager ends its
    tasks, comes back, runs the next attempt.
    """
    monkeypatch.setenv("EXACTLY_ONCE_FOLDER", str(tmp_path))
    cluster.start(slots=2)
    job = submitted(cluster, tmp_path)
    machines.cut()
    until(
        lambda: "is lost: no sign of life" in cluster.log("jobmanager"),
        "the JobManager has noticed",
    )
    until(
        lambda: re.search(r"ends [1-9]\d* tasks", cluster.log("taskmanager")) is not None,
        "so has the TaskManager",
    )
    machines.mend()
    until(lambda: cluster.log("taskmanager").count("is registered") == 2, "the TaskManager is back")
    before = len(committed(tmp_path))
    until(lambda: len(committed(tmp_path)) > before + 1_000, "the job has run again")
    end(cluster, job, tmp_path)


def test_a_link_between_workers_that_is_given_up_restarts_the_job_and_its_output_is_exact(
    machines: TwoMachines, cluster: FarCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JobManager reaches both workers all the time: only the consumers can tell it."""
    monkeypatch.setenv("EXACTLY_ONCE_FOLDER", str(tmp_path))
    cluster.start(near=True)
    job = submitted(cluster, tmp_path)
    machines.cut_all_but(CONTROL_PORT)
    gave_up = f"cannot be reached for {GIVE_UP_S:g} s"
    until(
        lambda: any(gave_up in cluster.log(name) for name in ("taskmanager", "near")),
        "a consumer has given up",
    )
    machines.join_all()
    before = len(committed(tmp_path))
    until(lambda: len(committed(tmp_path)) > before + 1_000, "the job has got on again")
    end(cluster, job, tmp_path)
