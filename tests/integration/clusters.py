"""A cluster of real processes in a directory of its own, driven by the command line, as the
tests of clusters use it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from aioflow.cluster.leadership import LeaderRetrieval
from aioflow.cluster.submission import ClusterClient
from aioflow.core.errors import AioflowError
from aioflow.core.system_host import SystemHost
from aioflow.network.security import read_secret

__all__ = ["FLOWS", "ROOT", "Cluster", "aioflow", "until"]

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
FLOWS = Path(__file__).parent / "cluster_flows.py"


def aioflow(*argv: str | Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aioflow", *map(str, argv)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, check=False
    )


def ask_url(url: str, method: str = "GET", token: str = "") -> tuple[int, Any]:
    """Returns status and JSON of the answer of a monitoring endpoint."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def until(condition: Callable[[], bool], what: str, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout} s"
        time.sleep(0.05)


class Cluster:
    """A cluster in a directory, driven by the command line.

    All its remaining processes are killed at the end.
    """

    def __init__(self, data: Path) -> None:
        self.data = data
        self.extra: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        *,
        workers: int = 2,
        slots: int = 2,
        request_timeout: str = "30s",
        network_memory: int = 64 << 20,
    ) -> str:
        options = [
            "--workers",
            str(workers),
            "--slots",
            str(slots),
            "--port",
            "0",
            "--request-timeout",
            request_timeout,
            "--network-memory",
            str(network_memory),
        ]
        started = aioflow("cluster", "start", "--data", self.data, *options)
        assert started.returncode == 0, started.stderr
        return started.stdout

    @property
    def address(self) -> str:
        return (self.data / "address").read_text().strip()

    @property
    def secret(self) -> Path:
        return self.data / "secret"

    def pids(self) -> list[int]:
        return [int(line) for line in (self.data / "pids").read_text().split()]

    def ask(self, command: str, *argv: str) -> subprocess.CompletedProcess[str]:
        return aioflow(command, *argv, "--at", self.address, "--secret-file", self.secret)

    def asked(self, question: Callable[[ClusterClient], Coroutine[Any, Any, T]]) -> T:
        """Returns the JobManager's answer, requested from here: a process for each question would
        take most of the time of a test.
        """

        async def ask() -> T:
            host = SystemHost()
            try:
                async with ClusterClient(
                    host, LeaderRetrieval(data=str(self.data)), read_secret(str(self.secret))
                ) as client:
                    return await question(client)
            finally:
                await host.close()

        return asyncio.run(ask())

    def job(self, job_id: str) -> str:
        """The status of a job; "unknown" while no JobManager answers."""
        try:
            return next(
                (
                    line.status.value
                    for line in self.asked(ClusterClient.jobs)
                    if line.job_id == job_id
                ),
                "unknown",
            )
        except (AioflowError, OSError):
            return "unknown"

    def slots(self) -> list[tuple[int, int]]:
        """(slots, free ones) of each TaskManager; nothing while no JobManager answers."""
        try:
            return [(slots, free) for _, slots, free in self.asked(ClusterClient.taskmanagers)]
        except (AioflowError, OSError):
            return []

    def submit(self, flow: str, *argv: str) -> str:
        done = self.ask("submit", f"{FLOWS}:{flow}", "--detach", *argv)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def spawn(self, *argv: str) -> subprocess.Popen[bytes]:
        with (self.data / "extra.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "aioflow", *argv], stdout=log, stderr=log, cwd=ROOT
            )
        self.extra.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.data / f"{name}.log").read_text()

    def terms(self) -> int:
        """How many times a JobManager began to lead.

        A slow disk can cost a leader its lease. TaskManagers then register once more.
        """
        return sum(
            path.read_text().count("leads with fencing token") for path in self.data.glob("*.log")
        )

    def close(self) -> None:
        for process in self.extra:
            process.kill()
            process.wait()
        if (self.data / "pids").exists():
            for pid in self.pids():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
