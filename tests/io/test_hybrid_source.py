"""`hybrid(first, then)`: the switch, its position, and what the second source may do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.core.errors import GraphError
from aioflow.io.hybrid_source import HybridEnd, hybrid
from aioflow.operators.source import Split
from tests.integration.processes import eventually
from tests.io.driver import Context, next_batch, read_all, system_context, take

COUNT = 20
SWITCH = 8


@pytest.fixture
async def ctx() -> AsyncIterator[Context]:
    async with system_context() as context:
        context.replays = True
        yield context


def files(directory: Path) -> Any:
    """Two files of the numbers below `SWITCH`."""
    for name, part in (("a", range(5)), ("b", range(5, SWITCH))):
        (directory / f"{name}.txt").write_text("".join(f"{i}\n" for i in part))
    return af.io.lines(directory)


class Live:
    """Numbers from a position on; counts how often it was begun."""

    def __init__(self) -> None:
        self.ends: list[HybridEnd[str]] = []

    def __call__(self, end: HybridEnd[str]) -> Any:
        self.ends.append(end)
        begin = int(end.last or -1) + 1

        def read(position: int | None = None) -> Any:
            for i in range(begin if position is None else position, COUNT):
                yield str(i), i + 1

        return read


ALL = [str(i) for i in range(COUNT)]


async def test_the_function_gets_the_end_of_the_first_source(tmp_path: Path, ctx: Context) -> None:
    live = Live()
    assert await read_all(hybrid(files(tmp_path), live), ctx) == ALL
    (end,) = live.ends
    assert (end.last, end.count) == (str(SWITCH - 1), SWITCH)
    assert len(end.positions) == 2


@pytest.mark.parametrize("cut", range(COUNT + 1))
async def test_a_restore_at_any_element_goes_on_with_the_next_one(
    cut: int, tmp_path: Path, ctx: Context
) -> None:
    live = Live()
    source = hybrid(files(tmp_path), live)
    reader = source.reader(ctx)
    await reader.open(await source.discover())
    assert await take(reader, cut, 1) == ALL[:cut]
    position = reader.position("0")
    await take(reader, 3, 1)  # The position stays as it was.
    await reader.close()
    again = Live()
    restored = hybrid(files(tmp_path), again)
    assert await read_all(restored, ctx, [Split("0", position)]) == ALL[cut:]
    assert [(end.last, end.count) for end in again.ends] == [(str(SWITCH - 1), SWITCH)]
    if cut > SWITCH:  # The end is part of the position.
        assert again.ends == live.ends


async def test_a_position_during_the_switch_repeats_and_loses_nothing(
    tmp_path: Path, ctx: Context
) -> None:
    """The second source cannot be reached yet: a checkpoint meanwhile is one of the first."""
    is_there = asyncio.Event()

    class Slow:
        bounded = True

        async def discover(self) -> list[Split]:
            await is_there.wait()
            return [Split("slow")]

        def reader(self, ctx: Any) -> Any:
            return af.io.datagen(str, count=3).reader(ctx)  # type: ignore[arg-type]

    first = files(tmp_path)
    source = hybrid(first, af.io.datagen(str, count=3))
    source.then = Slow()
    reader = source.reader(ctx)
    await reader.open(await source.discover())
    assert await take(reader, SWITCH, 3) == ALL[:SWITCH]
    assert reader.poll_batch(1) is None
    waiting = asyncio.ensure_future(reader.wait())
    await asyncio.sleep(0)
    position = reader.position("0")
    assert not reader.finished
    waiting.cancel()
    await asyncio.wait([waiting])
    await reader.close()
    after = hybrid(first, ["x"])
    assert await read_all(after, ctx, [Split("0", position)]) == ["x"]


async def test_three_sources_are_read_one_after_the_other(ctx: Context) -> None:
    source = hybrid(hybrid([1, 2], [3]), lambda end: [end.count, end.last])
    assert await read_all(source, ctx) == [1, 2, 3, 3, 3]


async def test_columns_of_the_first_source_come_as_rows(ctx: Context) -> None:
    table = af.io.datagen({"i": af.col.index * 2}, count=3)
    assert await read_all(hybrid(table, [{"i": 7}]), ctx) == [
        {"i": 0},
        {"i": 2},
        {"i": 4},
        {"i": 7},
    ]


async def test_new_splits_of_the_second_source_are_found_also_after_a_restore(
    tmp_path: Path, ctx: Context
) -> None:
    live = tmp_path / "live"
    live.mkdir()
    (live / "a.txt").write_text("live a\n")
    source = hybrid(["old"], af.io.lines(live, discover_every="10ms"))
    reader = source.reader(ctx)
    await reader.open(await source.discover())
    assert await take(reader, 2, 1) == ["old", "live a"]
    (live / "b.txt").write_text("live b\n")
    assert await next_batch(reader, 1) == ["live b"]
    position = reader.position("0")
    await reader.close()
    (live / "c.txt").write_text("live c\n")
    reader = source.reader(ctx)
    await reader.open([Split("0", position)])
    assert await next_batch(reader, 1) == ["live c"]
    (live / "d.txt").write_text("live d\n")
    assert await next_batch(reader, 1) == ["live d"]
    assert not reader.finished
    await reader.close()


def test_what_is_no_hybrid_is_refused() -> None:
    with pytest.raises(GraphError, match=r"hybrid\(\) got push\(\), which has an inlet"):
        hybrid([1], af.io.push())
    with pytest.raises(GraphError, match=r"first, which never ends"):
        hybrid(af.io.datagen(str, rate=1), [1])
    with pytest.raises(GraphError, match="then of hybrid"):
        hybrid([1], lambda: [2])
    with pytest.raises(GraphError, match="a list, tuple or range"):
        hybrid([1], 5)  # type: ignore[call-overload]


@pytest.mark.parametrize("fails_at", [3, SWITCH - 1, SWITCH, SWITCH + 3])
async def test_a_job_that_restarts_in_either_phase_is_exactly_once(
    fails_at: int, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    failures = iter([True])
    rows: list[tuple[str, int]] = []
    go_on = asyncio.Event()

    async def fragile(value: str) -> str:
        if int(value) == fails_at and not go_on.is_set():
            await go_on.wait()
        if int(value) == fails_at and next(failures, False):
            raise OSError("away")
        return value

    flow = af.Flow("hybrid")
    source = flow.source(hybrid(files(tmp_path / "in"), Live()), uid="both")
    counts = source.map(fragile).key_by(lambda value: "all").aggregate(af.collect(), uid="list")
    counts.sink(rows.append)
    options: Any = {"checkpoints": tmp_path / "store", "every": "1h"}
    async with flow.run(restart=af.fixed_delay(1, "1ms"), **options) as job:
        await eventually(lambda: len(rows) == fails_at)
        checkpoint = asyncio.ensure_future(job.checkpoint())
        await asyncio.sleep(0.05)
        go_on.set()
        await asyncio.wait([checkpoint])
        await job.wait()
        checkpoint.cancelled() or checkpoint.exception()
    assert rows[-1] == ("all", ALL)
