"""Tests of random queries of SQL beside DuckDB, on rows and on columns."""

from __future__ import annotations

import pytest

from tests.sql.random_queries import Tables, check, query


@pytest.mark.parametrize("first", range(1_000_000, 1_000_040, 20))
def test_random_queries_give_what_duckdb_gives(first: int) -> None:
    told: list[str] = []
    check(range(first, first + 20), told.append)
    assert not told, "\n".join(told)


def test_judge_sees_a_wrong_answer() -> None:
    tables = Tables(5)
    text = query(3)
    assert tables.difference(text) is None
    wrong = type(text)(text.ours, f"SELECT * FROM ({text.duck}) LIMIT 0")
    assert tables.difference(wrong) is not None
