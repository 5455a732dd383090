"""Looking at processes, and waiting for what other processes do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import aioflow as af
    from aioflow.cluster.embedded import EmbeddedCluster
    from aioflow.cluster.worker_processes import WorkerProcess

__all__ = ["alive", "eventually", "has_taken", "open_workers"]


async def eventually(condition: Callable[[], bool], *, within_s: float = 120.0) -> None:
    """Returns once `condition()` is true; fails when that takes too long."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def has_taken(pid: int, number: int) -> bool:
    """Whether the process has taken the signals of that number that were sent to it: two that
    wait become one.
    """
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return not any(int(status[kind], 16) >> (number - 1) & 1 for kind in ("SigPnd", "ShdPnd"))


def alive(pid: int) -> bool:
    """Whether the process runs, or sleeps; one that is only not waited for yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def open_workers(job: af.Job) -> list[WorkerProcess]:
    """The workers of a job that have registered and are not lost, oldest first."""
    known = cast("EmbeddedCluster", job._cluster).processes.known.values()
    return [worker for worker in known if worker.registered.done() and worker.loss is None]
