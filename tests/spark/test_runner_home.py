"""The ends of a flow that stay in the program: how they end together. No Java here."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from aioflow.spark.runner.home import Feeding, HomeStage


class Stage:
    """Writes, or fails with `error`, when it is told that it is the end.

    `ended` tells how it did, `committed` what became of it.
    """

    def __init__(self, name: str, error: Exception | None = None, *, writes: bool = False) -> None:
        self.name = name
        self.ended = ""
        self.committed = False
        self._error = error
        self._writes = writes
        self._told = asyncio.Event()

    def end(self) -> asyncio.Future[None]:
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._writes:
            written.set_result(None)
        if self._error is not None:
            self._told.set()
        return written

    def commit(self) -> None:
        self.committed = True
        self._told.set()

    async def run(self) -> None:
        try:
            await self._told.wait()
            if self._error is not None:
                raise self._error
        finally:
            await asyncio.sleep(0)  # Closing takes a turn of the loop.
            self.ended = self.name


async def test_a_stage_that_fails_at_its_end_leaves_no_other_one_running() -> None:
    stages = [Stage("fails", OSError("disk full")), Stage("still writes")]
    with pytest.raises(OSError, match="disk full"):
        async with Feeding(cast("list[HomeStage]", stages)):
            pass
    assert [stage.ended for stage in stages] == ["fails", "still writes"]


async def test_a_cancelled_end_leaves_no_stage_running() -> None:
    stages: list[Any] = [Stage("one"), Stage("two")]

    async def feed() -> None:
        async with Feeding(stages):
            pass

    feeding = asyncio.get_running_loop().create_task(feed())
    for _ in range(5):
        await asyncio.sleep(0)
    feeding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await feeding
    assert [stage.ended for stage in stages] == ["one", "two"]


async def test_nothing_is_committed_before_all_have_written() -> None:
    written, fails = Stage("written", writes=True), Stage("fails", OSError("disk full"))
    stages = cast("list[HomeStage]", [written, fails])
    for some in (stages, stages[::-1]):
        with pytest.raises(OSError, match="disk full"):
            async with Feeding(some):
                pass
        assert not written.committed


async def test_all_commit_when_all_have_written() -> None:
    stages = [Stage("one", writes=True), Stage("two", writes=True)]
    async with Feeding(cast("list[HomeStage]", stages)):
        pass
    assert [stage.committed for stage in stages] == [True, True]
