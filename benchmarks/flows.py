"""The workloads as a user writes them: plain lambdas, and a sink that is a function of one
element.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aioflow as af
from benchmarks.workloads import MASK, Events, Result

__all__ = ["BatchSink", "Summed", "w1", "w2", "w3"]


@dataclass(slots=True)
class Summed:
    """The place for a flow's result."""

    outputs: int = 0
    checksum: int = 0

    @property
    def result(self) -> Result:
        return self.outputs, self.checksum


@dataclass(slots=True)
class BatchSink:
    """The same checksum taken batch by batch: what a sink costs that does not look at each
    element by itself.
    """

    summed: Summed
    weight: Callable[[Any], int]
    name: str = field(default="batches", init=False)

    def writer(self, ctx: object) -> BatchSink:
        return self

    def committer(self) -> None:
        return None

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        self.summed.outputs += len(values)
        self.summed.checksum += sum(map(self.weight, values))

    async def flush(self) -> None:
        """Nothing is buffered."""

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        return []


def _function_sink(summed: Summed) -> Callable[[tuple[Any, int]], None]:
    def add(row: tuple[Any, int]) -> None:
        summed.outputs += 1
        summed.checksum += row[1]

    return add


def w1(words: list[str], n: int | None, summed: Summed, *, batch_sink: bool = False) -> af.Flow:
    """Running count of each word, over a keyed exchange; without `n` for ever."""
    flow = af.Flow("w1")
    counts = (
        flow.source(af.io.datagen(lambda i: words[i & MASK], count=n)).key_by(lambda w: w).count()
    )
    counts.sink(BatchSink(summed, lambda row: row[1]) if batch_sink else _function_sink(summed))
    return flow


def w2(events: Events, n: int, summed: Summed) -> af.Flow:
    """Count and sum of each user in tumbling windows of 10 s, over a keyed exchange."""
    flow = af.Flow("w2")
    users, lateness, values = events.users, events.lateness_ms, events.values

    def add(row: af.WindowResult) -> None:
        summed.outputs += 1
        summed.checksum += int(row.value["total"] * 8)

    def event(i: int) -> tuple[int, float, int]:
        k = i & MASK
        return users[k], values[k], i // 10 + 1000 - lateness[k]

    watermarks = af.WatermarkStrategy.bounded_out_of_orderness("1s", timestamp=lambda e: e[2])
    (
        flow.source(af.io.datagen(event, count=n), watermarks=watermarks)
        .key_by(lambda e: e[0])
        .window(af.tumbling("10s"))
        .aggregate(af.agg(n=af.count(), total=af.sum(lambda e: e[1])))
        .sink(add)
    )
    return flow


def calls(
    call: Callable[[int], Awaitable[int]], concurrency: int, n: int, summed: Summed
) -> af.Flow:
    """One async call for each record."""
    flow = af.Flow("calls")
    rows = flow.source(range(n)).map(call, concurrency=concurrency).map(lambda x: (x, x))
    rows.sink(_function_sink(summed))
    return flow


def w3(n: int, summed: Summed) -> af.Flow:
    """Map, filter, map, flat_map: one chain, no exchange."""
    flow = af.Flow("w3")
    (
        flow.source(range(n))
        .map(lambda x: (x * 31 + 7) & 0x7FFF_FFFF)
        .filter(lambda x: x & 3 != 0)
        .map(lambda x: (x & 1023, x))
        .flat_map(lambda t: (t, (t[0], t[1] >> 1)))
        .sink(_function_sink(summed))
    )
    return flow
