"""Finds the processes of this machine that belong to a cluster, by their command lines.

`aioflow cluster start` records the processes that it starts (`pids`). But a JobManager that died is
started again by hand, or by a supervisor. A standby and further TaskManagers are started by hand
too. `aioflow cluster stop` must find and end all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from aioflow.cluster.whereabouts import DATA

__all__ = ["jobmanagers_of", "processes_of"]

PROC = Path("/proc")
JOBMANAGER, TASKMANAGER = "jobmanager", "taskmanager"


def processes_of(data: Path) -> list[int]:
    """Returns the pids of JobManagers and TaskManagers on this machine with `--data` set to
    `data`.
    """
    return [pid for pid, _ in _found(data)]


def jobmanagers_of(data: Path) -> list[int]:
    """Returns the pids of the JobManagers on this machine with `--data` set to `data`: leaders and
    standbys.
    """
    return [pid for pid, command in _found(data) if command == JOBMANAGER]


def _found(data: Path) -> Iterator[tuple[int, str]]:
    """Yields (pid, command) of each process of the cluster. Needs `/proc`, without it yields
    nothing.
    """
    whole = os.path.realpath(data)
    for pid in sorted(int(entry.name) for entry in PROC.glob("[0-9]*") if entry.name.isdecimal()):
        try:
            argv = (
                (PROC / str(pid) / "cmdline")
                .read_bytes()
                .decode("utf-8", "surrogateescape")
                .split("\0")
            )
            command = _command(argv)
            directory = _data(argv, command) if command else None
            if (
                directory is not None
                and os.path.realpath((PROC / str(pid) / "cwd").readlink() / directory) == whole
            ):
                yield pid, command
        except OSError:  # The process has ended, or belongs to another user.
            continue


def _command(argv: list[str]) -> str:
    """Returns "jobmanager" or "taskmanager" if `argv` runs one, otherwise "".

    A program that only starts one, such as `timeout`, does not count.
    """
    if os.path.basename(argv[0]).startswith("python"):
        for program, command in pairwise(argv):
            if os.path.basename(program) == "aioflow" and command in (JOBMANAGER, TASKMANAGER):
                return command
    return ""


def _data(argv: list[str], command: str) -> str | None:
    """Returns the value of `--data` in `argv`, or its default.

    Returns None for a TaskManager without `--data`: its JobManager ends it.
    """
    given = None if command == TASKMANAGER else str(DATA)
    for option, value in zip(argv, [*argv[1:], ""], strict=True):
        if option == "--data":
            given = value
        elif option.startswith("--data="):
            given = option.removeprefix("--data=")
    return given
