"""A sink of one record a second behind records of any size: the memory of a process stays within
its network memory and what its tasks have in hand.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from benchmarks.bench_hostile import watched_workers
from tests.integration.clusters import Cluster

pytestmark = [pytest.mark.timeout(200)]

MIB = 1 << 20
BUDGET = 16 * MIB
SIZES = [10, 4096, MIB]
PARALLELISM = 2
IN_HAND_MAX = 8 * MIB
"""Memory of the records that sources, writers and consumers have in hand, and of the allocator."""

QUIET_S = 2.0
"""How long a run is observed once its memory has stopped to grow."""


class Row:
    """Makes rows of `size` bytes."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __reduce__(self) -> tuple[Any, ...]:
        return Row, (self._size,)

    def __call__(self, number: int) -> tuple[int, bytes]:
        return number % 1000, os.urandom(1) * self._size


def key(row: tuple[int, bytes]) -> int:
    return row[0]


def nothing(row: object) -> None:
    """A sink."""


def resident(pid: int) -> int:
    """The memory of a process, in bytes; 0 if it has ended, as that of the job before does."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def children(pids: list[int]) -> list[int]:
    """The processes that these have started: those of a TaskManager run its jobs."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
                if int(fields[1]) in pids:
                    found.append(int(entry.name))
    return found


async def peak(
    size: int, workers: int, rate: int | None, data: str = "", managers: Sequence[int] = ()
) -> int:
    """The largest memory of a process of the job, until it has not grown for a while.

    `data` is the directory of a cluster that runs it, with the TaskManagers `managers`.
    """
    flow = af.Flow("network memory", parallelism=PARALLELISM)
    rows = flow.source(af.io.datagen(Row(size), splits=PARALLELISM, rate=rate), name="fast")
    rows.key_by(key).throttle(1).sink(nothing)
    loop, most = asyncio.get_running_loop(), 0
    with watched_workers() as started:
        place: dict[str, Any] = {"workers": workers, "network_memory": BUDGET}
        if data:
            place = {"on": af.RemoteCluster(Path(data))}
        async with flow.run(**place) as job:
            pids = children(list(managers)) if data else started.pids if workers else [os.getpid()]
            assert pids
            grown_at = loop.time()
            while loop.time() < grown_at + QUIET_S:
                await asyncio.sleep(0.02)
                now = max(map(resident, pids))
                if now > most + MIB // 4:
                    grown_at = loop.time()
                most = max(most, now)
            await job.cancel()
    return most


def measured(size: int, workers: int, data: str = "", managers: Sequence[int] = ()) -> int:
    """The memory over the idle job, in a program of its own: no test before it has left any."""
    program = (
        "import asyncio\n"
        "from tests.integration.test_network_memory import peak\n"
        f"place = ({data!r}, {managers!r})\n"
        f"idle = asyncio.run(peak(10, {workers}, 2, *place))\n"
        f"print(asyncio.run(peak({size}, {workers}, None, *place)) - idle)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("size", SIZES)
def test_data_before_a_slow_sink_takes_no_more_than_the_network_memory(size: int) -> None:
    """D3, E4.1: all in one process."""
    over = measured(size, 0)
    print(f"{size} bytes in one process: {over / MIB:.1f} MiB over the idle job")
    assert over <= BUDGET + IN_HAND_MAX


@pytest.mark.parametrize("size", SIZES)
def test_data_between_workers_takes_no_more_than_the_network_memory_of_each(size: int) -> None:
    """D3, E3, E4.1: over the connection between two workers."""
    over = measured(size, 2)
    print(f"{size} bytes over two workers: {over / MIB:.1f} MiB over the idle job")
    assert over <= BUDGET + IN_HAND_MAX


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_data_on_a_cluster_takes_no_more_than_the_network_memory_of_each(
    size: int, tmp_path: Path
) -> None:
    """D3, E3, E4.1: between two TaskManagers, in the processes that they have for the job."""
    cluster = Cluster(tmp_path / "cluster")
    try:
        cluster.start(workers=2, slots=1, network_memory=BUDGET)
        over = measured(size, 0, str(cluster.data), cluster.pids())
    finally:
        cluster.close()
    print(f"{size} bytes on a cluster: {over / MIB:.1f} MiB over the idle job")
    assert over <= BUDGET + IN_HAND_MAX


async def test_memory_below_what_a_job_requires_is_an_error_that_says_how_much() -> None:
    flow = af.Flow("too small", parallelism=4)
    rows = flow.source(af.io.datagen(int, count=10, splits=4))
    with pytest.raises(af.InsufficientBuffers) as caught:
        await rows.key_by(int).map(str).collect(network_memory="64KiB")
    assert "required 32768 bytes, but only 0 of 65536 are left" in str(caught.value)
    assert 'network_memory="96KiB"' in str(caught.value)
