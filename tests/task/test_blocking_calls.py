"""Calls in threads: which of them a rescaling waits for."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from aioflow.task.blocking_calls import BlockingCalls


class Threads:
    """A host whose calls end when a test says so."""

    def __init__(self) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def blocking(self, call: Any) -> asyncio.Future[Any]:
        return self.future


async def test_a_call_that_has_just_ended_does_not_outlast_the_wait() -> None:
    """The loop has not run the callbacks of its future yet."""
    threads, context = Threads(), cast("Any", object())
    calls = BlockingCalls(cast("Any", threads))
    calls.start(context, print)
    assert await calls.outlasting(0.0) is context
    threads.future.set_result(None)
    assert await calls.outlasting(60.0) is None
