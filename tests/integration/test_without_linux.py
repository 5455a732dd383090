"""A job, in one process and over workers, without what Linux alone has: other systems have
neither epoll nor /proc.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ELSEWHERE = """
import builtins, io, os, select, selectors, signal, socket, sys

ONLY_LINUX = {
    select: ["epoll"],
    selectors: ["EpollSelector"],
    socket: ["TCP_USER_TIMEOUT", "TCP_QUICKACK", "AF_NETLINK", "SO_REUSEPORT", "SOCK_CLOEXEC"],
    signal: ["pidfd_send_signal"],
    os: [
        "pidfd_open", "memfd_create", "eventfd", "splice", "copy_file_range", "fdatasync",
        "posix_fadvise", "posix_fallocate", "sched_getaffinity", "sched_setaffinity",
        "O_TMPFILE", "O_DIRECT", "O_DSYNC", "pipe2", "getrandom", "process_cpu_count",
    ],
}
for module, names in ONLY_LINUX.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
selectors.DefaultSelector = selectors.PollSelector
sys.modules["uvloop"] = None


def without_proc(call):
    def checked(path, *args, **kwargs):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc"):
            raise FileNotFoundError(2, "there is no /proc", os.fspath(path))
        return call(path, *args, **kwargs)

    return checked


builtins.open = io.open = without_proc(io.open)
for name in ("readlink", "listdir", "scandir", "stat", "open"):
    setattr(os, name, without_proc(getattr(os, name)))
"""

PROGRAM = """
import asyncio, os, select, sys

import aioflow as af

WORKERS = int(sys.argv[1])


class Pid(af.MapFunction):
    async def open(self, ctx):
        assert not hasattr(select, "epoll") and not os.path.exists("/proc/self")

    def map(self, n):
        return os.getpid(), n


async def main():
    flow = af.Flow("elsewhere", parallelism=2)
    pids = flow.source(range(1000)).rebalance().map(Pid())
    options = {"workers": WORKERS} if WORKERS else {}
    rows = await pids.key_by(lambda row: row[1] % 7).reduce(lambda a, b: b).collect(
        checkpoints=sys.argv[2], every="50ms", **options
    )
    print(len(rows), len({pid for pid, _ in rows} - {os.getpid()}))


asyncio.run(main())
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_job_runs_without_what_only_linux_has(tmp_path: Path, workers: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(ELSEWHERE)
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py", str(workers), tmp_path / "checkpoints"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["1000", str(workers)], done.stderr
