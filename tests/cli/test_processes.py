"""The processes of a cluster are known from their command lines, for any starter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aioflow.cli import cluster_access, local_cluster
from aioflow.cli.cluster_access import jobmanagers_of, processes_of
from aioflow.cli.command import main


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which `/proc` shows what `running` puts there."""
    monkeypatch.setattr(cluster_access, "PROC", tmp_path / "proc")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    return tmp_path


def running(machine: Path, pid: int, *argv: str, cwd: str = "home") -> None:
    (machine / cwd).mkdir(exist_ok=True)
    (machine / "proc" / str(pid)).mkdir()
    (machine / "proc" / str(pid) / "cmdline").write_bytes(
        b"".join(word.encode() + b"\0" for word in argv)
    )
    (machine / "proc" / str(pid) / "cwd").symlink_to(machine / cwd)


def test_those_of_a_directory_are_found_however_it_is_spelled(machine: Path) -> None:
    data = machine / "home" / "data"
    running(
        machine,
        12,
        "/venv/bin/python",
        "-m",
        "aioflow",
        "jobmanager",
        "--data",
        str(data),
        "--port",
        "0",
    )
    running(machine, 9, "python3.11", "/venv/bin/aioflow", "jobmanager", "--data", "data")
    running(
        machine,
        100,
        "python",
        "-X",
        "dev",
        "-m",
        "aioflow",
        "taskmanager",
        "--slots",
        "2",
        "--data=../home/./data",
    )
    (machine / "link").symlink_to(data)
    running(machine, 3, "python", "-m", "aioflow", "taskmanager", "--data", str(machine / "link"))

    assert processes_of(data) == processes_of(machine / "link") == [3, 9, 12, 100]
    assert jobmanagers_of(data) == [9, 12]


def test_a_jobmanager_without_a_directory_has_the_usual_one_of_where_it_was_started(
    machine: Path,
) -> None:
    running(machine, 5, "python", "-m", "aioflow", "jobmanager")
    running(machine, 6, "python", "-m", "aioflow", "jobmanager", cwd="elsewhere")
    running(machine, 7, "python", "-m", "aioflow", "taskmanager")

    assert processes_of(machine / "home" / ".aioflow") == [5]


def test_other_programs_and_those_that_are_gone_are_passed_over(machine: Path) -> None:
    data = str(machine / "home" / "data")
    running(machine, 5, "timeout", "60", "python", "-m", "aioflow", "jobmanager", "--data", data)
    running(machine, 6, "python", "-m", "aioflow", "cluster", "stop", "--data", data)
    running(machine, 7, "vim", "aioflow", "jobmanager", "--data", data)
    running(machine, 8, "python", "-m", "aioflow", "jobmanager", "--data", f"{data}-other")
    running(machine, 9)  # One that has ended, and is not waited for yet.
    (machine / "proc" / "10").mkdir()

    assert processes_of(Path(data)) == []


def test_a_system_that_does_not_tell_has_none(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_access, "PROC", machine / "nowhere")

    assert processes_of(machine) == []


def test_ctrl_c_during_starting_a_process_of_a_cluster_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was forked, but whose program has not begun, has the command line of its
    parent: it would not be found.
    """
    forked: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def interrupted(command: Any, **options: Any) -> Any:
        forked.append(start([sys.executable, "-c", "import time; time.sleep(60)"]))
        os.kill(os.getpid(), signal.SIGINT)
        return forked[-1]

    monkeypatch.setattr(local_cluster.subprocess, "Popen", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["cluster", "start", "--data", str(tmp_path / "cluster"), "--port", "0"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
        ended = [process.poll() for process in forked]
        for process in forked:
            process.kill()
    assert ended == [-signal.SIGKILL]
    assert not (tmp_path / "cluster" / "pids").exists()


@pytest.mark.parametrize(
    ("workers", "slots", "expected"),
    [(None, None, (3, 1)), (2, None, (2, 3)), (None, 4, (1, 4)), (2, 4, (2, 4))],
)
def test_by_default_each_processor_has_a_process_so_that_jobs_do_not_share_one(
    workers: int | None, slots: int | None, expected: tuple[int, int], monkeypatch: Any
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert local_cluster.shape_of(workers, slots) == expected


def test_without_proc_they_are_found_in_the_list_of_ps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_access, "PROC", tmp_path / "proc")
    data = tmp_path / "data"
    waits = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        [*waits, "aioflow", "jobmanager", "--data", str(data)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert processes_of(data) == jobmanagers_of(data) == [process.pid]
        assert processes_of(tmp_path) == []
        process.communicate(b"\n")
