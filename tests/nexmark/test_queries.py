"""Each query of Nexmark gives what DuckDB gives of the same events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

import aioflow as af
from aioflow.testing import run_simulated
from benchmarks.nexmark.duck import Tables, difference
from benchmarks.nexmark.events import Event, Nexmark
from benchmarks.nexmark.query import flow_of
from benchmarks.nexmark.suite import QUERIES

COUNT = 1_800
SECONDS = Nexmark(rate=50)
"""Half a minute of events: some windows of ten seconds."""
HOURS = Nexmark(seed=3, rate=1 / 60, group=20)
"""A day and six hours, out of order by up to twenty minutes: all times of the day, and two days."""


@pytest.fixture(scope="module", params=[(SECONDS, 3), (HOURS, 1)], ids=["seconds-3", "hours-1"])
def asked(request: pytest.FixtureRequest) -> Iterator[tuple[Nexmark, int, Tables]]:
    nexmark, parallelism = request.param
    tables = Tables([nexmark(index) for index in range(COUNT)])
    yield nexmark, parallelism, tables
    tables.close()


@pytest.mark.parametrize("name", [name for name in QUERIES if name != "q12"])
async def test_a_query_gives_what_duckdb_gives(name: str, asked: tuple[Nexmark, int, Tables]) -> None:
    nexmark, parallelism, tables = asked
    query = QUERIES[name]
    _, stream = flow_of(query, af.io.datagen(nexmark, count=COUNT), nexmark, parallelism=parallelism)
    given = list(query.answer(await stream.collect()))
    assert not difference(given, tables.answer(query))


def test_windows_of_the_clock_hold_what_came_while_it_stood_in_them() -> None:
    """q12: the simulated clock stands in the middle of a window of ten seconds while a part of the events comes, then goes on by ten."""
    part = COUNT // 5

    async def in_parts() -> AsyncIterator[Event]:
        for index in range(COUNT):
            if index and index % part == 0:
                await asyncio.sleep(10)
            yield SECONDS(index)

    query = QUERIES["q12"]
    flow, stream = flow_of(query, in_parts, SECONDS, parallelism=2)
    tables = Tables([SECONDS(index) for index in range(COUNT)], [1_000_005_000 + index // part * 10_000 for index in range(COUNT)])
    try:
        run = run_simulated(flow, clock=1_000_005_000, collect=[stream], perturb=False)
        expected = tables.answer(query)
        assert len({start for _, _, start in expected}) == 5
        assert not difference(list(query.answer(run.outputs[0])), expected)
    finally:
        tables.close()


def test_no_answer_is_empty_so_that_each_comparison_says_something() -> None:
    with_days, with_windows = Tables([HOURS(i) for i in range(COUNT)]), Tables([SECONDS(i) for i in range(COUNT)])
    try:
        for name, query in QUERIES.items():
            if name != "q12":
                assert with_days.answer(query) or with_windows.answer(query), name
        assert len({day for day, *_ in with_days.answer(QUERIES["q15"])}) == 2
        assert {row[3] for row in with_days.answer(QUERIES["q14"])} == {"dayTime", "nightTime", "otherTime"}
    finally:
        with_days.close()
        with_windows.close()


def test_a_difference_is_said_with_an_example_of_each_side() -> None:
    assert difference([(1,), (2,)], [(2,), (1,)]) == ""
    assert difference([(1,), (1,)], [(1,)]) == "1 rows of 2 are the flow's alone, 0 of 1 DuckDB's alone; for example (1,)"
    assert difference([(1,)], [(3,)]) == "1 rows of 1 are the flow's alone, 1 of 1 DuckDB's alone; for example (1,); for example (3,)"
