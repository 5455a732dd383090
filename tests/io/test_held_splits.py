"""Splits of a log that are ahead in event time: held back, without blocking those behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from aioflow.io.brokers.readers import Message, StreamReader
from aioflow.operators.source import Split
from tests.io.driver import Context, next_batch, system_context

CAPACITY = 4


@pytest.fixture
async def ctx() -> AsyncIterator[Context]:
    async with system_context() as context:
        yield context


class Log(StreamReader):
    """Reads a page of each split in turn, of the splits that are not held."""

    holds_splits = True

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx, str, "fail", capacity=CAPACITY)
        self.read: dict[str, int] = {}

    async def run(self) -> None:
        while True:
            for split_id in self.splits:
                if split_id not in self.held:
                    first = self.read.get(split_id, 0)
                    self.read[split_id] = first + CAPACITY
                    page = [
                        Message(f"{split_id}{n}", n + 1, n, split_id)
                        for n in range(first, first + CAPACITY)
                    ]
                    await self.put(split_id, page)
            await asyncio.sleep(0)


async def test_a_held_split_takes_no_room_and_comes_in_order_later(ctx: Context) -> None:
    """G4.5"""
    reader = Log(ctx)
    await reader.open([Split("a"), Split("b")])
    assert await next_batch(reader, 1) == ["a0"]
    reader.hold(["a"])
    for page in range(5):
        for n in range(CAPACITY):
            assert await next_batch(reader, 1) == [f"b{page * CAPACITY + n}"]
    assert reader.read["a"] <= 2 * CAPACITY
    assert (reader.position("a"), reader.position("b")) == (1, 5 * CAPACITY)
    reader.hold(["a", "b"])
    assert reader.poll_batch(10) is None
    reader.hold([])
    found: list[str] = []
    while "a7" not in found:
        found += await next_batch(reader, 1) or []
    assert [one for one in found if one.startswith("a")] == [f"a{n}" for n in range(1, 8)]
    await reader.close()


async def test_a_reader_whose_splits_are_all_held_waits(ctx: Context) -> None:
    reader = Log(ctx)
    await reader.open([Split("a")])
    await next_batch(reader, 1)
    reader.hold(["a"])
    waiting = asyncio.ensure_future(reader.wait())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done() or reader.poll_batch(1) is None
    await reader.close()
    await asyncio.wait([waiting])
