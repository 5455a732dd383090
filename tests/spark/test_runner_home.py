"""The ends of a flow that stay in the program: how they end together. No Java here."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from aioflow.spark.runner import _Feeding
from aioflow.spark.runner_home import HomeStage


class Stage:
    """Ends when it is told to, or with `error` then. `ended` tells how it did."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name = name
        self.ended = ""
        self._error = error
        self._told = asyncio.Event()

    def end(self) -> None:
        if self._error is not None:
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
        async with _Feeding(cast("list[HomeStage]", stages)):
            pass
    assert [stage.ended for stage in stages] == ["fails", "still writes"]


async def test_a_cancelled_end_leaves_no_stage_running() -> None:
    stages: list[Any] = [Stage("one"), Stage("two")]

    async def feed() -> None:
        async with _Feeding(stages):
            pass

    feeding = asyncio.get_running_loop().create_task(feed())
    for _ in range(5):
        await asyncio.sleep(0)
    feeding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await feeding
    assert [stage.ended for stage in stages] == ["one", "two"]
