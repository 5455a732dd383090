"""A disk that is full, or fails, at one single operation of a run: each of them in turn, and what
is committed is exact all the same.

Seeds meet such moments by chance; here none is left out. R13, R14.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

import aioflow as af
from aioflow.testing.simulation import SimulatedHost, simulate

OUT, STORE = "/out", "file:///store"
RECORDS, KEYS = 24, 3
CHANGES = ("open", "write", "fsync", "fsync_dir", "rename", "rename_new", "delete")
"""Operations that need room, or make something durable."""
STRIDE = 4
OPTIONS: dict[str, Any] = {
    "checkpoints": STORE,
    "every": "6ms",
    "restart": af.exponential_delay("2ms", "20ms"),
}


async def numbers(position: Any) -> Any:
    for number in range(position or 0, RECORDS):
        await asyncio.sleep(0.002)
        yield number, number + 1


def flow() -> af.Flow:
    made = af.Flow("full", parallelism=2)
    counts = made.source(numbers, uid="numbers").key_by(lambda n: n % KEYS).count(uid="count")
    counts.sink(af.io.jsonl(OUT), uid="counts")
    counts.map(lambda row: [row[0], -row[1]]).sink(af.io.jsonl(OUT + "2"), uid="again")
    return made


class Trouble:
    """Lets the operations of a disk fail whose numbers are in `failing`, before they are done
    or, `late`, when they are.
    """

    def __init__(self, failing: range, *, late: bool) -> None:
        self.failing = failing
        self.late = late
        self.met = 0

    def install(self, host: SimulatedHost) -> None:
        disk: Any = host.sim.disk
        check, rename, sync = disk.check, disk.rename, disk.sync

        def checked(what: str, path: str, *, writes: bool = False) -> None:
            check(what, path, writes=writes)
            if what in CHANGES and not (self.late and what in ("rename", "rename_new", "fsync")):
                self.strike(path)

        def late(call: Callable[..., Any], path: int) -> Callable[..., Any]:
            def called(*args: Any) -> Any:
                done = call(*args)
                if self.late:
                    self.strike(args[path])
                return done

            return called

        disk.check, disk.rename, disk.sync = checked, late(rename, 1), late(sync, 0)

    def strike(self, path: str) -> None:
        self.met += 1
        if self.met in self.failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


async def service(host: SimulatedHost, trouble: Trouble) -> None:
    """Started again until it has finished, and once more behind that."""
    trouble.install(host)
    runs = 0
    async with asyncio.timeout(600):
        while runs < 2:
            try:
                await flow().execute(host=host, **OPTIONS)
                runs += 1
            except (OSError, af.AioflowError):
                await asyncio.sleep(0.01)


def rows(host: SimulatedHost, directory: str) -> list[Any]:
    disk = host.sim.disk
    names = [name for name in disk.list(directory, missing_ok=True) if not name.startswith(".")]
    return sorted(
        json.loads(line)
        for name in names
        for line in bytes(disk.file(f"{directory}/{name}").data).splitlines()
    )


def run(failing: range, *, late: bool) -> int:
    """How many operations there were. Fails unless each count is committed once, in both sinks."""
    trouble = Trouble(failing, late=late)

    async def main(host: SimulatedHost) -> None:
        await service(host, trouble)
        expected = sorted(
            [key, count] for key in range(KEYS) for count in range(1, RECORDS // KEYS + 1)
        )
        assert rows(host, OUT) == expected
        assert rows(host, OUT + "2") == sorted([key, -count] for key, count in expected)

    simulate(main, 1)
    return trouble.met


def run_killed(at: int) -> int:
    """Runs like `run`, but kills the service at operation number `at`, and restarts it until it has
    ended twice.
    """
    met = 0

    async def program(host: SimulatedHost) -> int:
        await flow().execute(host=host, **OPTIONS)
        return 0

    async def main(host: SimulatedHost) -> None:
        disk: Any = host.sim.disk
        check = disk.check

        def checked(what: str, path: str, *, writes: bool = False) -> None:
            nonlocal met
            check(what, path, writes=writes)
            met += what in CHANGES
            if met == at and what in CHANGES and host.sim.is_alive("service"):
                host.sim.loop.post_io(host.sim.loop.root, host.sim.kill, "service")

        disk.check = checked
        ended = [await host.sim.spawn("service", program).wait()]
        while ended.count(0) < 2:
            ended.append(await host.sim.restart("service").wait())
        assert len(ended) <= 3, f"one kill, and each other start ends with 0: {ended}"
        expected = sorted(
            [key, count] for key in range(KEYS) for count in range(1, RECORDS // KEYS + 1)
        )
        assert rows(host, OUT) == expected
        assert rows(host, OUT + "2") == sorted([key, -count] for key, count in expected)

    simulate(main, 1)
    return met


@pytest.mark.parametrize("part", range(STRIDE))
def test_wherever_a_bounded_service_is_killed_its_next_runs_write_nothing_twice(part: int) -> None:
    """The kills include moments after its last checkpoint, after the commit, after the mark of its
    end, and in the next run.
    """
    total = run_killed(0)
    assert total > 60
    for at in range(1 + part, total + 1, STRIDE):
        run_killed(at)


@pytest.mark.parametrize(
    "length", [1, *(pytest.param(more, marks=pytest.mark.slow) for more in (7, 40))]
)
@pytest.mark.parametrize(
    "late",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["refused", "done and not answered"],
)
@pytest.mark.parametrize("part", range(STRIDE))
def test_whichever_operation_of_a_disk_fails_everything_is_committed_once(
    part: int, late: bool, length: int
) -> None:
    """One operation fails, or it and all later ones."""
    total = run(range(0), late=late)
    assert total > 60, "there is something to fail"
    for first in range(1 + part, total + 1, STRIDE * max(1, length // 4)):
        run(range(first, first + length), late=late)
