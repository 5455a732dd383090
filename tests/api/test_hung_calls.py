"""Checkpoints while all calls of an async operator hang: they complete, and every element that
waits comes out once after a restore.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import aioflow as af

pytestmark = pytest.mark.timeout(120)

COUNT = 60
"""Elements: more than a full queue, and fewer than all channels hold."""


class Gate:
    """Calls of every kind that hang until the gate is opened."""

    def __init__(self) -> None:
        self.is_open = False
        self._opened = asyncio.Event()
        self._for_threads = threading.Event()
        self.sunk: list[int] = []

    def open(self) -> None:
        self.is_open = True
        self._opened.set()
        self._for_threads.set()

    async def map(self, value: int) -> int:
        await self._opened.wait()
        return value

    async def flat_map(self, value: int) -> list[int]:
        return [await self.map(value)]

    async def filter(self, value: int) -> bool:
        return await self.map(value) >= 0

    async def batch(self, values: list[int]) -> list[int]:
        return [await self.map(value) for value in values]

    def in_thread(self, value: int) -> int:
        self._for_threads.wait()
        return value

    async def sink(self, value: int) -> None:
        self.sunk.append(await self.map(value))


OPERATORS: dict[str, Any] = {
    "map": lambda s, gate: s.map(gate.map, concurrency=2, uid="calls"),
    "unordered": lambda s, gate: s.map(gate.map, concurrency=2, ordered=False, uid="calls"),
    "flat_map": lambda s, gate: s.flat_map(gate.flat_map, concurrency=2, uid="calls"),
    "filter": lambda s, gate: s.filter(gate.filter, concurrency=2, uid="calls"),
    "thread": lambda s, gate: s.map(gate.in_thread, blocking=True, concurrency=2, uid="calls"),
    "batches": lambda s, gate: s.map_batches(gate.batch, max_size=2, uid="calls"),
    "twice": lambda s, gate: (
        s.map(gate.map, concurrency=2, uid="calls")
        .key_by(lambda value: value % 5)
        .map(gate.map, concurrency=2, uid="more")
    ),
    "sink": None,
}


def build(gate: Gate, operator: str, edge: str, source: Any) -> af.Flow:
    flow = af.Flow("hung")
    numbers = flow.source(source, uid="numbers")
    if edge == "keyed":
        numbers = numbers.key_by(lambda value: value % 7)
    elif edge == "rebalance":
        numbers = numbers.rebalance()
    if operator == "sink":
        numbers.sink(gate.sink, uid="calls")
    else:
        OPERATORS[operator](numbers, gate).sink(gate.sunk.append, uid="sunk")
    return flow


@pytest.mark.parametrize("unaligned", [False, True])
@pytest.mark.parametrize("edge", ["forward", "keyed"])
@pytest.mark.parametrize("operator", OPERATORS)
async def test_checkpoints_complete_while_all_calls_hang(
    operator: str, edge: str, unaligned: bool, tmp_path: Path
) -> None:
    """J5.5: each element comes out once after a restore."""
    gate, options = Gate(), {"checkpoints": f"file://{tmp_path}", "unaligned": unaligned}
    try:
        async with build(gate, operator, edge, list(range(COUNT))).run(**options) as job:
            await asyncio.sleep(0.05)
            for _ in range(3):
                async with asyncio.timeout(60):
                    await job.checkpoint()
            asyncio.get_running_loop().call_later(0.2, gate.open)  # A thread cannot be cancelled.
            await job.cancel()
        assert gate.sunk == []
    finally:
        gate.open()
    gate = Gate()
    gate.open()
    async with build(gate, operator, edge, list(range(COUNT))).run(**options) as job:
        await job.wait()
    assert sorted(gate.sunk) == list(range(COUNT))


@pytest.mark.parametrize("edge", ["forward", "keyed"])
async def test_a_savepoint_completes_while_all_calls_hang(edge: str, tmp_path: Path) -> None:
    gate = Gate()
    async with build(gate, "map", edge, list(range(COUNT))).run(
        checkpoints=f"file://{tmp_path}/c"
    ) as job:
        async with asyncio.timeout(60):
            saved = await job.savepoint(f"file://{tmp_path}/s")
        await job.cancel()
    gate = Gate()
    gate.open()
    async with build(gate, "map", edge, list(range(COUNT))).run(restore=saved) as job:
        await job.wait()
    assert sorted(gate.sunk) == list(range(COUNT))


@pytest.mark.parametrize("edge", ["forward", "keyed", "rebalance"])
async def test_checkpoints_do_not_fill_an_operator_whose_calls_hang(
    edge: str, tmp_path: Path
) -> None:
    read = 0

    async def endless() -> AsyncIterator[int]:
        nonlocal read
        while True:
            read += 1
            yield read
            await asyncio.sleep(0)

    gate = Gate()
    async with build(gate, "map", edge, endless).run(checkpoints=f"file://{tmp_path}") as job:
        for number in range(12):
            async with asyncio.timeout(60):
                await job.checkpoint()
            if number == 3:
                early = read
            await asyncio.sleep(0.02)
        await job.cancel()
    assert read < early + 5_000


async def test_a_checkpoint_waits_for_few_elements_of_an_async_process_function(
    tmp_path: Path,
) -> None:
    """While an element awaits, its function may have changed state."""
    turns: asyncio.Queue[None] = asyncio.Queue()
    sunk: list[int] = []

    async def slow(value: int, ctx: Any) -> list[int]:
        await turns.get()
        return [value]

    flow = af.Flow("slow")
    flow.source(list(range(COUNT)), uid="numbers").process(slow, uid="slow").sink(sunk.append)
    async with flow.run(checkpoints=f"file://{tmp_path}") as job:
        await asyncio.sleep(0.05)
        checkpoint = asyncio.ensure_future(job.checkpoint())
        async with asyncio.timeout(60):
            while not checkpoint.done():
                turns.put_nowait(None)
                await asyncio.wait([checkpoint], timeout=0.2)
        await checkpoint
        before = len(sunk)
        await job.cancel()
    assert before < COUNT // 3
    for _ in range(COUNT):
        turns.put_nowait(None)
    async with flow.run(checkpoints=f"file://{tmp_path}") as job:
        await job.wait()
    assert sorted(set(sunk)) == list(range(COUNT))


async def held(value: int, until: str) -> int:
    """Hangs until there is a file `until`."""
    while not Path(until).exists():
        await asyncio.sleep(0.01)
    return value


@pytest.mark.parametrize(("edge", "unaligned"), [("forward", True), ("keyed", False)])
async def test_checkpoints_over_two_workers_complete_while_all_calls_hang(
    edge: str, unaligned: bool, tmp_path: Path
) -> None:
    opened = tmp_path / "open"

    def build_held() -> af.Flow:
        flow = af.Flow("held", parallelism=2)
        numbers = flow.source(list(range(COUNT)), uid="numbers")
        if edge == "keyed":
            numbers = numbers.key_by(abs)
        numbers.map(partial(held, until=str(opened)), concurrency=2, uid="calls").sink(
            af.io.jsonl(tmp_path / "out"), uid="files"
        )
        return flow

    options: dict[str, Any] = {
        "workers": 2,
        "checkpoints": f"file://{tmp_path}/store",
        "unaligned": unaligned,
    }
    async with build_held().run(**options) as job:
        for _ in range(2):
            async with asyncio.timeout(60):
                await job.checkpoint()
        await job.cancel()
    opened.touch()
    async with build_held().run(**options) as job:
        await job.wait()
    parts = (tmp_path / "out").glob("part-*")
    numbers = [int(line) for part in parts for line in part.read_text().splitlines()]
    assert sorted(numbers) == list(range(COUNT))
