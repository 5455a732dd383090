"""Each query of Nexmark over two worker processes, as rows and on columns, gives what DuckDB
gives.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.nexmark.events import Nexmark
from benchmarks.nexmark.judge import Judge
from benchmarks.nexmark.suite import QUERIES

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    judge = Judge(Nexmark(seed=0, rate=50, group=7), 1_800)
    yield judge
    judge.close()


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("name", QUERIES)
async def test_a_query_over_two_workers_gives_what_duckdb_gives(
    name: str, columns: bool, judge: Judge
) -> None:
    verdict = await judge.judge(QUERIES[name], parallelism=2, columns=columns, workers=2)
    assert not verdict.difference
    assert verdict.answers > 0
