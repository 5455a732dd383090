"""A file system on the simulated disk that stops at its n-th operation, and a power loss that keeps
what the test says.

`Crash` is no Exception: nothing that retries or cleans up after errors gets to see a process that
is gone.
"""

from __future__ import annotations

from typing import Any

from aioflow.testing.simulation.disk import SimFileSystem
from aioflow.testing.simulation.host import SimulatedHost

KILL = "kill"
"""The process dies alone: what it wrote is in the page cache of a machine that lives."""

POWER = {
    "lost": (0, 0),
    "torn": (1, 2),
    "kept": (2, 1),
    "names kept, bytes lost": (2, 0),
    "names kept, bytes torn": (2, 2),
    "names lost, bytes kept": (0, 1),
}
"""Shares of unsynced data that reach the platter: of the names none, half or all; of the bytes none
(0), all (1) or a part (2).
"""

FATES = (KILL, *POWER)


class Crash(BaseException):
    """The process is gone."""


class _Scripted:
    """Replaces the random numbers of the disk's faults."""

    def __init__(self, names: int | None, choice: int) -> None:
        self.names = names
        self.choice = choice

    def randrange(self, start: int, stop: int | None = None) -> int:
        if stop is not None:
            return (start + stop) // 2  # Where the bytes are torn.
        names, self.names = self.names, None
        return (
            self.choice if names is None else (start - 1) * names // 2
        )  # The names come first, once.


class CrashingFiles:
    """Counts the operations; stops before the n-th, in the midst of it (a write), or after it."""

    def __init__(
        self, host: SimulatedHost, crash_at: int | None = None, when: str = "before"
    ) -> None:
        self._fs: SimFileSystem = host.fs
        self._crash_at = crash_at
        self._when = when
        self.operations = 0
        self.crashed = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._fs, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.crashed:
                raise Crash
            self.operations += 1
            if self.operations != self._crash_at:
                return await method(*args, **kwargs)
            self.crashed = True
            if self._when == "after":
                await method(*args, **kwargs)
            elif self._when == "within" and name in ("append", "write"):
                path, data = args
                await method(path, data[: len(data) // 2])
            raise Crash

        return call

    def open_read(self, path: str) -> Any:
        return self._fs.open_read(path)


def lose_power(host: SimulatedHost, fate: str) -> None:
    """The machine of `host` loses its power; what that means for the disk is `fate`."""
    disk = host.sim.disk
    names, choice = POWER[fate]
    machine = disk.loop.root.machine
    asked_for_names = any(change.machine is machine for change in disk._pending)
    random = disk._faults
    disk._faults = _Scripted(  # type: ignore[assignment]
        names if asked_for_names else None, choice
    )
    disk.power_loss(machine)
    disk._faults = random


class HostWith:
    """A host whose files are others."""

    def __init__(self, host: SimulatedHost, fs: CrashingFiles) -> None:
        self.fs = fs
        self._host = host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)
