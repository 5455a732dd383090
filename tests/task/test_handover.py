"""How much a source hands over at once: what its chain is through with in a moment, measured
until the chain is empty again.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aioflow as af
from aioflow.core.column_batch import COLUMN_RECORDS_MAX, ColumnBatch, ObjectColumn
from aioflow.operators.source import Split
from aioflow.task.chain import ChainStatus
from aioflow.task.source_input import HAND_OVER_NS, HandOver

IDLE, MORE, BLOCKED = ChainStatus.IDLE, ChainStatus.MORE, ChainStatus.BLOCKED


def quick(hand_over: HandOver, times: int) -> None:
    for _ in range(times):
        hand_over.handed(hand_over.records)
        hand_over.ran(0, 10 * hand_over.records, IDLE)


def test_a_chain_of_which_nothing_is_known_gets_one_record_and_a_quick_one_ever_more() -> None:
    hand_over = HandOver()
    assert hand_over.records == 1
    quick(hand_over, 10)
    assert hand_over.records == 1024
    quick(hand_over, 10)
    assert hand_over.records == COLUMN_RECORDS_MAX


def test_slow_work_is_answered_by_smaller_batches() -> None:
    hand_over = HandOver()
    quick(hand_over, 10)
    hand_over.handed(1000)
    hand_over.ran(0, 2 * HAND_OVER_NS, MORE)
    assert hand_over.records == 1024, "it is not through"
    hand_over.ran(0, 2 * HAND_OVER_NS, IDLE)
    assert hand_over.records == 250


def test_the_wait_for_an_operator_counts_and_the_turns_of_others_do_not() -> None:
    hand_over = HandOver()
    quick(hand_over, 10)
    hand_over.handed(8)
    hand_over.ran(0, 100, MORE)
    hand_over.ran(50 * HAND_OVER_NS, 50 * HAND_OVER_NS + 100, MORE)
    hand_over.ran(90 * HAND_OVER_NS, 90 * HAND_OVER_NS + 100, BLOCKED)
    hand_over.ran(92 * HAND_OVER_NS, 92 * HAND_OVER_NS, BLOCKED)
    hand_over.ran(94 * HAND_OVER_NS, 94 * HAND_OVER_NS, IDLE)
    assert hand_over.records == 1, "eight in four moments"


def test_less_than_one_record_is_never_asked_for() -> None:
    hand_over = HandOver()
    hand_over.handed(1)
    hand_over.ran(0, 1000 * HAND_OVER_NS, IDLE)
    assert hand_over.records == 1


def test_work_that_no_source_gave_changes_nothing() -> None:
    hand_over = HandOver()
    hand_over.ran(0, 1000 * HAND_OVER_NS, IDLE)
    hand_over.handed(0)
    hand_over.ran(0, 10, IDLE)
    assert hand_over.records == 1


class Counting:
    """Gives as many records as it is asked for."""

    bounded = False
    finished = False

    def __init__(self) -> None:
        self.given = 0

    async def discover(self) -> list[Split]:
        return [Split("0")]

    def reader(self, ctx: Any) -> Counting:
        return self

    async def open(self, splits: Any) -> None: ...

    def poll_batch(self, max_records: int) -> list[int]:
        first = self.given
        self.given += max_records
        return list(range(first, self.given))

    async def wait(self) -> None: ...

    def position(self, split_id: str) -> int:
        return self.given

    async def close(self) -> None: ...


async def test_a_sink_that_awaits_each_record_is_given_few_ahead_of_it() -> None:
    """A checkpoint, or a stop, waits for what the source has handed over."""
    source, done, ahead = Counting(), asyncio.Event(), []

    async def slow(value: int) -> None:
        await asyncio.sleep(0.02)
        ahead.append(source.given - value)
        if value == 20:
            done.set()

    flow = af.Flow("few ahead")
    flow.source(source).sink(slow)
    async with flow.run() as job:
        async with asyncio.timeout(60):
            await done.wait()
        await job.cancel()
    assert max(ahead) <= 5


class CountingColumns(Counting):
    """Gives as many rows of columns as it is asked for."""

    columnar = True
    asked = 0

    def poll_batch(self, max_records: int) -> Any:
        rows = list(super().poll_batch(max_records))
        self.asked = max(self.asked, max_records)
        return ColumnBatch({"n": ObjectColumn(rows)}, len(rows))


async def test_an_async_function_behind_columns_is_given_few_ahead_of_it() -> None:
    """The function is a task of its own, so records that have left the source delay a checkpoint as
    well. Twenty calls at a time, of a twentieth of a second each, make four hundred a second: as
    many as the four batches that the task then requests.
    """
    source, done, seen = CountingColumns(), asyncio.Event(), 0

    async def slow(row: Any) -> None:
        nonlocal seen
        await asyncio.sleep(0.05)
        seen += 1
        if seen == 200:
            source.asked = 0
        if seen == 400:
            done.set()

    flow = af.Flow("few columns ahead")
    flow.source(source).map(slow, concurrency=20).sink(af.io.blackhole())
    async with flow.run() as job:
        async with asyncio.timeout(60):
            await done.wait()
        await job.cancel()
    assert source.asked < 400
    assert source.given < 400 + 1_000
