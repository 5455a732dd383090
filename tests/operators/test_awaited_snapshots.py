"""State of several functions of one operator whose snapshots are awaitable: each is awaited."""

from __future__ import annotations

import asyncio
import gc
import warnings
from typing import Any

import pytest

from aioflow.core.functions import CheckpointedFunction
from aioflow.operators.stateless import ConnectedRowsOperator, StatelessKind
from tests.operators.context import Context


class Kept(CheckpointedFunction):
    """Takes its time to write its state."""

    def __init__(self, name: str, written: list[str], error: Exception | None = None) -> None:
        self.name, self.written, self.error = name, written, error

    def initialize_state(self, ctx: Any) -> None: ...

    async def snapshot_state(self, ctx: Any) -> None:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.written.append(self.name)

    def __call__(self, value: Any) -> Any:
        return value


def connected(first: Kept, second: Kept) -> ConnectedRowsOperator:
    operator = ConnectedRowsOperator(StatelessKind.MAP, first, second)
    operator.setup(Context())
    return operator


async def test_both_sides_of_a_connected_map_are_awaited() -> None:
    written: list[str] = []
    ongoing = connected(Kept("first", written), Kept("second", written)).snapshot_state(1)
    assert ongoing is not None
    await ongoing
    assert written == ["first", "second"]


async def test_error_comes_out_and_no_coroutine_is_left_unawaited() -> None:
    written: list[str] = []
    error = ValueError("of the first")
    ongoing = connected(Kept("first", written, error), Kept("second", written)).snapshot_state(1)
    assert ongoing is not None
    with pytest.raises(ValueError, match="of the first"):
        await ongoing
    assert written == []


async def test_cancelled_snapshot_leaves_no_coroutine_unawaited() -> None:
    """Python would complain of it, where it is let go: a warning, which fails this test."""
    begun = asyncio.Event()

    class Waits(Kept):
        async def snapshot_state(self, ctx: Any) -> None:
            begun.set()
            await asyncio.Event().wait()

    written: list[str] = []
    ongoing = connected(Waits("first", written), Kept("second", written)).snapshot_state(1)
    assert ongoing is not None
    task = asyncio.ensure_future(ongoing)
    await begun.wait()
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del ongoing, task
        gc.collect()
    assert [str(one.message) for one in complaints] == []
    assert written == []
