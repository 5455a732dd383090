"""Queries of Nexmark over two worker processes give what DuckDB gives: an aggregate, windows, joins with timers, a side input."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.nexmark.events import Nexmark
from benchmarks.nexmark.judge import Judge
from benchmarks.nexmark.suite import QUERIES

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    judge = Judge(Nexmark(rate=50, group=7), 1_800)
    yield judge
    judge.close()


@pytest.mark.parametrize("name", ["q0", "q2", "q5", "q17", "q20", "q22"])
async def test_a_query_on_columns_over_two_workers_gives_what_duckdb_gives(name: str, judge: Judge) -> None:
    verdict = await judge.judge(QUERIES[name], parallelism=2, columns=True, workers=2)
    assert not verdict.difference


@pytest.mark.parametrize("name", ["q5", "q6", "q8", "q11", "q13", "q16", "q19", "q20"])
async def test_a_query_over_two_workers_gives_what_duckdb_gives(name: str, judge: Judge) -> None:
    verdict = await judge.judge(QUERIES[name], parallelism=2, workers=2)
    assert not verdict.difference
    assert verdict.answers > 0
