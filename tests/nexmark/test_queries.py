"""Each query of Nexmark gives what DuckDB gives of the same events."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.nexmark.duck import difference
from benchmarks.nexmark.events import Nexmark
from benchmarks.nexmark.judge import PARTS, Judge
from benchmarks.nexmark.suite import QUERIES

COUNT = 1_800
SECONDS = Nexmark(rate=50)
"""Seconds of events: half a minute has several windows of ten seconds."""
HOURS = Nexmark(seed=3, rate=1 / 60, group=20)
"""A day and six hours, out of order by up to twenty minutes: all times of the day, and two days."""


@pytest.fixture(scope="module")
def seconds() -> Iterator[Judge]:
    judge = Judge(SECONDS, COUNT)
    yield judge
    judge.close()


@pytest.fixture(scope="module")
def hours() -> Iterator[Judge]:
    judge = Judge(HOURS, COUNT)
    yield judge
    judge.close()


@pytest.mark.parametrize("name", QUERIES)
async def test_a_query_over_three_subtasks_gives_what_duckdb_gives(
    name: str, seconds: Judge
) -> None:
    verdict = await seconds.judge(QUERIES[name], parallelism=3)
    assert not verdict.difference


@pytest.mark.parametrize("name", QUERIES)
async def test_a_query_on_columns_gives_what_duckdb_gives(name: str, seconds: Judge) -> None:
    verdict = await seconds.judge(QUERIES[name], parallelism=3, columns=True)
    assert not verdict.difference


@pytest.mark.parametrize("name", QUERIES)
async def test_a_query_on_columns_over_days_out_of_order_gives_what_duckdb_gives(
    name: str, hours: Judge
) -> None:
    verdict = await hours.judge(QUERIES[name], columns=True)
    assert not verdict.difference


@pytest.mark.parametrize("name", QUERIES)
async def test_a_query_over_days_out_of_order_gives_what_duckdb_gives(
    name: str, hours: Judge
) -> None:
    verdict = await hours.judge(QUERIES[name])
    assert not verdict.difference


def test_no_answer_is_empty_so_that_each_comparison_says_something(
    seconds: Judge, hours: Judge
) -> None:
    for name, query in QUERIES.items():
        assert seconds.expected(query) or hours.expected(query), name
    assert len({day for day, *_ in hours.expected(QUERIES["q15"])}) == 2
    assert {row[3] for row in hours.expected(QUERIES["q14"])} == {
        "dayTime",
        "nightTime",
        "otherTime",
    }
    assert len({start for *_, start in seconds.expected(QUERIES["q12"])}) == PARTS


def test_a_difference_is_said_with_an_example_of_each_side() -> None:
    assert difference([(1,), (2,)], [(2,), (1,)]) == ""
    assert (
        difference([(1,), (1,)], [(1,)])
        == "1 rows of 2 are the flow's alone, 0 of 1 DuckDB's alone; for example (1,)"
    )
    assert difference([(1,)], [(3,)]) == (
        "1 rows of 1 are the flow's alone, 1 of 1 DuckDB's alone; for example (1,); for "
        "example (3,)"
    )
