"""Functions of one element in all their forms: classes that await, async generators, operator
state, and errors told apart by key.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import aioflow as af

bad = af.OutputTag[af.Failed[int]]("bad")


class Doubled(af.MapFunction[int, int]):
    """Awaits in each of its methods."""

    async def open(self, ctx: af.RuntimeContext) -> None:
        await asyncio.sleep(0)
        self.factor = 2

    async def map(self, value: int) -> int:
        await asyncio.sleep(0)
        return value * self.factor

    async def close(self) -> None:
        await asyncio.sleep(0)


class Odd(af.FilterFunction[int]):
    async def filter(self, value: int) -> bool:
        return value % 2 == 1


class Twice(af.FlatMapFunction[int, int]):
    async def flat_map(self, value: int) -> list[int]:
        return [value, value]


class Counted(af.FlatMapFunction[int, int]):
    async def flat_map(self, value: int) -> AsyncIterator[int]:
        for number in range(value):
            yield number


async def counted(value: int) -> AsyncIterator[int]:
    for number in range(value):
        yield number


class Countable:
    """An object to call."""

    async def __call__(self, value: int) -> AsyncIterator[int]:
        for number in range(value):
            yield number


FORMS: dict[str, tuple[Callable[[Any], Any], list[int]]] = {
    "map, a class": (lambda s: s.map(Doubled), [2, 4, 6]),
    "map, its instance": (lambda s: s.map(Doubled()), [2, 4, 6]),
    "map, behind a key": (lambda s: s.key_by(lambda x: 0).map(Doubled, concurrency=2), [2, 4, 6]),
    "filter": (lambda s: s.filter(Odd), [1, 3]),
    "flat_map": (lambda s: s.flat_map(Twice, ordered=True), [1, 1, 2, 2, 3, 3]),
    "flat_map, a generator": (lambda s: s.flat_map(Counted), [0, 0, 1, 0, 1, 2]),
    "flat_map, a generator function": (
        lambda s: s.flat_map(counted, timeout="30s"),
        [0, 0, 1, 0, 1, 2],
    ),
    "flat_map, a callable object": (lambda s: s.flat_map(Countable()), [0, 0, 1, 0, 1, 2]),
}


@pytest.mark.parametrize("form", FORMS)
async def test_async_functions_are_awaited_in_every_form(form: str) -> None:
    build, expected = FORMS[form]
    assert await build(af.Flow("forms").source([1, 2, 3])).collect() == expected


async def test_an_async_generator_that_fails_sends_its_element_aside() -> None:
    async def picky(value: int) -> AsyncIterator[int]:
        yield value
        if value == 2:
            raise ValueError("no two")

    flow = af.Flow("picky")
    kept = flow.source([1, 2, 3]).flat_map(picky, on_error=bad)
    rows, failed = await flow.collect(kept, kept.side(bad))
    assert rows == [1, 3]
    assert [(one.value, one.error) for one in failed] == [(2, "no two")]


class Counts(af.MapFunction[int, tuple[int, int]]):
    """How often it saw each key; refuses elements of ten and more."""

    def open(self, ctx: af.RuntimeContext) -> None:
        self.seen = ctx.get_state(af.ValueStateDescriptor("seen", default=0))

    def map(self, value: int) -> tuple[int, int]:
        self.seen.update(self.seen.value() + 1)
        if value >= 10:
            raise ValueError(f"{value} is too many")
        return value, self.seen.value()


async def test_keyed_state_is_there_where_errors_are_sent_aside() -> None:
    flow = af.Flow("guarded", parallelism=2)
    counted = (
        flow.source([1, 2, 11, 1, 2]).key_by(lambda value: value % 10).map(Counts, on_error=bad)
    )
    rows, failed = await flow.collect(counted, counted.side(bad))
    assert sorted(rows) == [(1, 1), (1, 3), (2, 1), (2, 2)]
    assert [(one.value, one.error_type) for one in failed] == [(11, "ValueError")]


class Totals(af.MapFunction[int, int]):
    """The running sum over restarts, as operator state."""

    total = 0

    def initialize_state(self, ctx: af.RuntimeContext) -> None:
        self.kept = ctx.operator_state.get_list_state("total")
        self.total = sum(self.kept.get())

    def snapshot_state(self, ctx: af.RuntimeContext) -> None:
        self.kept.update([self.total])

    def map(self, value: int) -> int:
        self.total += value
        return self.total


class TotalsLater(Totals):
    """The same, with something to await."""

    async def snapshot_state(self, ctx: af.RuntimeContext) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.kept.update([self.total])


class TotalsAwaited(Totals):
    async def map(self, value: int) -> int:  # type: ignore[override]
        return super().map(value)


class TotalsOfWindows(af.ProcessWindowFunction[int, int, int]):
    initialize_state, snapshot_state, total = Totals.initialize_state, Totals.snapshot_state, 0

    def process(self, key: int, ctx: af.WindowContext, elements: Any) -> list[int]:
        self.total += sum(elements)
        return [self.total]


STATEFUL: dict[str, Callable[[Any], Any]] = {
    "alone": lambda s: s.map(Totals),
    "in a fused loop": lambda s: s.map(lambda x: x).map(TotalsLater).map(lambda x: x),
    "behind a key": lambda s: s.key_by(lambda x: 0).map(Totals),
    "awaited": lambda s: s.map(TotalsAwaited),
    "in a thread": lambda s: s.map(Totals, blocking=True, concurrency=1),
    "with errors aside": lambda s: s.map(Totals, on_error=bad),
    "in a window": lambda s: s.key_by(lambda x: 0).count_window(1).process(TotalsOfWindows),
}


@pytest.mark.parametrize("place", STATEFUL)
async def test_operator_state_of_a_function_is_restored_wherever_it_stands(place: str) -> None:
    store = f"memory://operator state {place}".replace(" ", "-").replace(",", "")

    async def run(values: list[int]) -> list[int]:
        flow = af.Flow("totals")
        pushed = flow.source(af.io.push())
        out: list[int] = []
        STATEFUL[place](pushed).sink(out.append)
        async with flow.run(checkpoints=store, every="1h") as job:
            await job.input(pushed).put_many(values)
        return out

    assert await run([1, 2]) == [1, 3]
    assert await run([4]) == [7]
