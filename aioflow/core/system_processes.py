"""Processes of the machine: starts child processes, and identifies this process.

Part of `SystemHost`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aioflow.core.host import ProcessIdentity

if TYPE_CHECKING:
    from aioflow.core.host import Process

__all__ = ["SECRET_FD_ENV", "SystemProcesses"]

SECRET_FD_ENV = "AIOFLOW_SECRET_FD"
"""Environment variable with the descriptor from which a started process can read its secret once.
"""


class _SystemProcess:
    __slots__ = ("_process", "pid")

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(
                ProcessLookupError
            ):  # It ended between the look and the signal.
                self._process.send_signal(number)


class SystemProcesses:
    """The `Processes` of the operating system."""

    __slots__ = ()

    def identity(self) -> ProcessIdentity:
        pid = os.getpid()
        return ProcessIdentity(socket.gethostname(), pid, _machine(), _start_time(pid) or "")

    def usage(self) -> tuple[float, int]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        # The unit of the peak is a byte on macOS and a KiB elsewhere.
        peak_bytes = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return used.ru_utime + used.ru_stime, peak_bytes

    def has_ended(self, process: ProcessIdentity) -> bool:
        # Another boot, another machine or another container: its numbers mean nothing here.
        if not process.machine or process.machine != _machine():
            return False
        return _start_time(process.pid) != process.started

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        secret: bytes | None = None,
    ) -> Process:
        environment = {**os.environ, **(env or {})}
        environment.pop(SECRET_FD_ENV, None)
        if secret is None:
            return _SystemProcess(await asyncio.create_subprocess_exec(*argv, env=environment))
        if (
            len(secret) > 4096
        ):  # The minimum size of a pipe: writing never blocks, even before the child reads.
            raise ValueError(f"secret for {argv[0]} has {len(secret)} bytes, expected at most 4096")
        read_end, write_end = os.pipe()
        try:
            with open(write_end, "wb") as pipe:  # noqa: ASYNC230  # It fits into the pipe.
                pipe.write(secret)
            environment[SECRET_FD_ENV] = str(read_end)
            return _SystemProcess(
                await asyncio.create_subprocess_exec(*argv, env=environment, pass_fds=(read_end,))
            )
        finally:
            os.close(read_end)

    def take_secret(self) -> bytes | None:
        number = os.environ.pop(SECRET_FD_ENV, None)
        if number is None:
            return None
        with open(int(number), "rb") as pipe:
            return pipe.read()


def _machine() -> str:
    """Returns an id of the machine's present boot and of the namespace of its process numbers; ""
    if unknown.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """Returns the start time of a running process, in ticks since boot.

    Returns None if there is none, or if it has ended and its parent has not noticed yet.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The name of the program comes first and may hold spaces and parentheses.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
