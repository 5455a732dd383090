"""The task that reads ahead of polls, and when messages are acknowledged; without files."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from aioflow.core.system_host import SystemHost
from aioflow.io.brokers.readers import AcknowledgingReader, Message, ReadAhead
from aioflow.operators.source import Split
from tests.io.driver import Context, system_context, take
from tests.task.running import until


@pytest.fixture
async def ahead() -> AsyncIterator[ReadAhead]:
    host = SystemHost()
    made = ReadAhead(host, "reader")
    try:
        yield made
    finally:
        await made.close()
        await host.close()


async def test_it_waits_while_enough_is_there_and_goes_on_when_something_is_taken(
    ahead: ReadAhead,
) -> None:
    items: list[int] = []

    async def read() -> None:
        for number in range(5):
            items.append(await ahead.blocking(int, str(number)))
            await ahead.added(lambda: len(items) >= 2)

    ahead.start(read)
    for number in range(4):
        await until(lambda: len(items) == 2)
        assert ahead.is_running
        assert items.pop(0) == number
        ahead.taken()
    await until(lambda: not ahead.is_running)
    assert items == [4]


async def test_waiter_is_woken_by_new_data_and_by_the_end(ahead: ReadAhead) -> None:
    more = asyncio.Event()

    async def read() -> None:
        await more.wait()
        more.clear()
        await ahead.added(lambda: False)
        await more.wait()

    begun: list[int] = []

    async def wait(number: int) -> None:
        begun.append(number)
        await ahead.wait()

    ahead.start(read)
    for turn in (1, 2):
        waiting = [asyncio.create_task(wait(turn)) for _ in range(2)]
        await until(lambda turn=turn: begun.count(turn) == 2)
        more.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*waiting)
    await until(lambda: not ahead.is_running)
    await ahead.wait()  # Nothing will come any more.


async def test_it_is_not_started_twice_but_again_when_it_has_ended(ahead: ReadAhead) -> None:
    runs: list[str] = []
    end = asyncio.Event()

    async def read() -> None:
        runs.append("begun")
        await end.wait()

    ahead.start(read)
    ahead.start(read)
    await until(lambda: runs == ["begun"])
    end.set()
    await until(lambda: not ahead.is_running)
    ahead.start(read)
    await until(lambda: runs == ["begun", "begun"])


async def test_an_error_is_kept_and_ends_the_wait(ahead: ReadAhead) -> None:
    async def read() -> None:
        await ahead.blocking(int, "no number")

    ahead.start(read)
    async with asyncio.timeout(60):
        await ahead.wait()
    assert isinstance(ahead.error, ValueError)
    assert not ahead.is_running


async def test_closing_waits_for_the_read_that_has_begun(ahead: ReadAhead) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert may_end.wait(60)
        ended.set()

    async def read() -> None:
        await ahead.blocking(slow)

    ahead.start(read)
    await until(begun.is_set)
    closing = asyncio.create_task(ahead.close())
    await until(lambda: not ahead.is_running)
    await asyncio.wait([closing], timeout=0.1)  # It would be through by now, did it not wait.
    assert not closing.done()
    may_end.set()
    await closing
    assert ended.is_set()
    assert ahead.error is None


class _Queue(AcknowledgingReader):
    """Numbers whose receipts are the numbers."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx, lambda content: content, "fail", capacity=100)
        self.acknowledged: list[int] = []

    async def run(self) -> None:
        await self.put("q", [Message(n, n, 0, "") for n in range(8)])

    def acknowledge(self, receipts: list[int]) -> None:
        self.acknowledged += receipts


async def test_a_message_is_acknowledged_once_a_completed_checkpoint_covers_it() -> None:
    async with system_context() as ctx:
        reader = _Queue(ctx)
        await reader.open([Split("q")])
        await take(reader, 3)
        reader.checkpoint(1)
        await take(reader, 2)
        reader.checkpoint(2)
        await take(reader, 1)
        reader.checkpoint(3)
        assert reader.acknowledged == []
        reader.checkpoint_completed(2)  # The first one was aborted.
        assert reader.acknowledged == [0, 1, 2, 3, 4]
        reader.checkpoint_completed(3)
        assert reader.acknowledged == [0, 1, 2, 3, 4, 5]
        await reader.close()
        ctx.checkpointing = False
        reader = _Queue(ctx)
        await reader.open([Split("q")])
        await take(reader, 3)
        assert reader.acknowledged == [0, 1, 2]
        await reader.close()
