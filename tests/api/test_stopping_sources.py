"""Stopping a job whose source goes on: a step that is under way in a thread is left to itself,
nothing waits for more elements, and none is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.testing import run_simulated

pytestmark = pytest.mark.timeout(120)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


class Blocks:
    """0, 1, 2 as fast as they are read, and then a step that blocks until the test lets it go
    on.
    """

    def __init__(self) -> None:
        self.release = threading.Event()
        self.blocked = threading.Event()
        self.log: list[str] = []
        self.threads: list[threading.Thread] = []

    def read(self, position: int | None) -> Iterator[tuple[int, int]]:
        self.threads.append(threading.current_thread())
        try:
            for n in range(position or 0, 6):
                if n == 3 and not self.release.is_set():
                    self.blocked.set()
                    self.release.wait()
                    self.log.append("the step went on to its end")
                yield n, n + 1
        except BaseException as error:
            self.log.append(f"interrupted by {error!r}")
            raise
        finally:
            self.log.append("closed")


def numbers(blocks: Blocks, rows: list[Any]) -> af.Flow:
    flow = af.Flow("blocking")
    flow.source(blocks.read, uid="numbers").key_by(lambda n: 0).count(uid="count").sink(rows.append)
    return flow


@pytest.mark.parametrize("drain", [False, True], ids=["stop", "drain"])
async def test_a_stop_with_a_savepoint_interrupts_no_thread_of_a_source_and_loses_nothing(
    tmp_path: Path, drain: bool
) -> None:
    """A11.6: the savepoint stands between two elements although the thread is in the middle of a
    step.
    """
    blocks, rows = Blocks(), list[Any]()
    async with numbers(blocks, rows).run(checkpoints=tmp_path, every="1h") as job:
        await asyncio.to_thread(blocks.blocked.wait)
        await eventually(lambda: len(rows) == 3)
        stopping = asyncio.ensure_future(job.stop(drain=drain))
        await eventually(lambda: job.status is af.JobStatus.FINISHED)
        assert blocks.log == [], "the thread was left alone"
        blocks.release.set()  # Only the thread is left to wait for, for a while.
        path = await stopping
    assert path is not None
    await asyncio.to_thread(blocks.threads[0].join)
    # The source saw that it is no longer read. Its generator was closed at its position, in its own
    # thread.
    assert blocks.log[0] == "the step went on to its end"
    assert blocks.log[-1] == "closed"

    result = await numbers(blocks, rows).execute(checkpoints=tmp_path, restore=path)
    assert result.status == "FINISHED"
    assert rows == [(0, n) for n in range(1, 7)]
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_a_savepoint_is_taken_while_the_thread_of_a_source_blocks_and_the_job_goes_on(
    tmp_path: Path,
) -> None:
    """A11.1, A11.6: the savepoint counts exactly the elements before its position."""
    blocks, rows = Blocks(), list[Any]()
    async with numbers(blocks, rows).run(checkpoints=tmp_path / "store", every="1h") as job:
        await asyncio.to_thread(blocks.blocked.wait)
        await eventually(lambda: len(rows) == 3)
        path = await job.savepoint()
        blocks.release.set()
        await job.wait()
    assert rows == [(0, n) for n in range(1, 7)]
    again: list[Any] = []
    await numbers(blocks, again).execute(restore=path)
    assert again == [(0, n) for n in range(4, 7)]
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_a_cancel_does_not_wait_for_a_step_that_never_ends() -> None:
    """A11.6, B3.1: the job is over; its thread ends with the step."""
    blocks, rows = Blocks(), list[Any]()
    async with numbers(blocks, rows).run() as job:
        await asyncio.to_thread(blocks.blocked.wait)
        cancelling = asyncio.ensure_future(job.cancel())
        await eventually(lambda: job.status is af.JobStatus.CANCELED)
        assert blocks.log == []
        blocks.release.set()
        await cancelling
    await asyncio.to_thread(blocks.threads[0].join)
    assert blocks.log[-1] == "closed"
    await asyncio.get_running_loop().shutdown_default_executor()


@pytest.mark.parametrize("savepoint", [None, False], ids=["savepoint", "none"])
async def test_a_stop_does_not_wait_for_a_list_to_fill(
    tmp_path: Path, savepoint: bool | None
) -> None:
    """Nothing will fill it: its elements go to the sink, and the stop is not over its time."""

    async def endless(position: int | None) -> AsyncIterator[tuple[int, int]]:
        for n in range(position or 0, 5):
            yield n, n + 1
        await asyncio.Event().wait()

    async def squares(values: list[int]) -> list[int]:
        return [value * value for value in values]

    rows = list[int]()
    flow = af.Flow("lists")
    flow.source(endless, uid="numbers").map_batches(
        squares, max_size=3, max_wait="1d", uid="squares"
    ).sink(rows.append)
    async with flow.run(checkpoints=tmp_path, every="1h", stop_timeout="1h") as job:
        await eventually(lambda: len(rows) == 3)
        async with asyncio.timeout(60):
            path = await job.stop(savepoint=savepoint)
    assert (path is None, job.status, rows) == (savepoint is False, "FINISHED", [0, 1, 4, 9, 16])


def test_the_end_of_the_input_waits_for_no_full_list() -> None:
    """Covers lists that follow each other in one task, too."""

    async def squares(numbers: list[int]) -> list[int]:
        return [number * number for number in numbers]

    flow = af.Flow("lists")
    keyed = flow.source([1, 2, 3]).key_by(abs).sum()
    lists = (
        keyed.map(lambda pair: pair[1])
        .map_batches(squares, max_size=5, max_wait="1d")
        .map_batches(list, max_wait="1d")
    )
    run = run_simulated(flow, collect=[lists])
    assert run.outputs == ([1, 4, 9],)
    assert run.virtual_s < 3_600
