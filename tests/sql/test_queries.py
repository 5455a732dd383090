"""Tests of random queries of SQL beside DuckDB, on rows and on columns."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

import pytest

import aioflow as af
from tests.sql.random_expressions import Text
from tests.sql.random_queries import Tables, check, check_prefixes, query


class Address(TypedDict):
    city: str


class User(TypedDict):
    id: int
    address: Address


class Row(NamedTuple):
    one: int
    user: User


QUERIES = [
    "SELECT i, s FROM x UNION SELECT n, u FROM y ",
    "SELECT i FROM x UNION ALL SELECT i FROM x UNION SELECT n FROM y UNION ALL SELECT j FROM y ",
    "SELECT * EXCLUDE (ts, T) REPLACE (i + 1 AS i) FROM x ",
    "SELECT y.* EXCLUDE (id, ts), x.id FROM x JOIN y ON x.i = y.i",
    "SELECT * FROM x QUALIFY ROW_NUMBER() OVER (PARTITION BY i ORDER BY n DESC, id) <= 2",
    "SELECT DISTINCT i, ROW_NUMBER() OVER (PARTITION BY s ORDER BY id) AS r FROM x QUALIFY r < 3",
    "SELECT p.id FROM x p QUALIFY ROW_NUMBER() OVER (PARTITION BY p.i ORDER BY id) = 1 AND p.n > 1",
    "SELECT DISTINCT s FROM x QUALIFY ROW_NUMBER() OVER (PARTITION BY i ORDER BY id) < 3 AND n > 0",
    "SELECT * FROM x WHERE i IN (SELECT j FROM y WHERE b) AND n > 0",
    "SELECT id FROM x WHERE s IN (SELECT s FROM y UNION SELECT u FROM y ) AND b",
    "SELECT id FROM x AS p WHERE n IN (SELECT q.n + 1 FROM y AS q WHERE q.i = p.i)",
    "SELECT * FROM x AS p WHERE NOT EXISTS (SELECT 1 FROM y AS q WHERE p.i = q.i AND q.n > 1)",
    "SELECT id FROM x WHERE EXISTS (SELECT 1 FROM y WHERE x.i = y.i) AND NOT EXISTS (SELECT 1 "
    "FROM y WHERE x.s = y.s)",
    "SELECT id FROM x AS p WHERE EXISTS (SELECT 1 FROM y WHERE y.i = p.i AND y.n IN (SELECT z.n "
    "FROM y AS z WHERE z.b))",
    "SELECT id FROM x WHERE n IN (SELECT n FROM y WHERE EXISTS (SELECT 1 FROM x AS z WHERE z.i = "
    "y.i AND NOT z.b))",
    "SELECT x.i, I + 1 AS k, S, COUNT(*) AS c FROM x GROUP BY ROLLUP (i, x.s) HAVING COUNT(*) > 0",
    "SELECT i, COALESCE(s, '-') AS s, SUM(i) AS t, COUNT(*) AS c FROM x GROUP BY ROLLUP (i, s) "
    "HAVING COUNT(*) > 1",
    "SELECT b, i, s, MAX(n) AS m FROM x GROUP BY b, GROUPING SETS ((i, s), s)",
    "SELECT i + 1 AS k, b, COUNT(*) AS c FROM x GROUP BY CUBE (i + 1, b) HAVING COUNT(*) > 0",
    "SELECT x.i, s, COUNT(*) AS c, GROUPING(i, x.s) AS g FROM x GROUP BY CUBE (i, s) "
    "HAVING GROUPING(i) = 0",
    "SELECT i + 1 AS k, b, COUNT(*) + SUM(n) AS c FROM x GROUP BY ALL",
    "SELECT i FROM x UNION SELECT n FROM x EXCEPT SELECT i FROM y INTERSECT SELECT j FROM x ",
    "SELECT i, COUNT(*) AS c FROM x GROUP BY i INTERSECT SELECT i, COUNT(*) FROM x WHERE b OR "
    "n > 1 GROUP BY i",
    "SELECT COUNT(*) AS c FROM (SELECT i FROM x EXCEPT SELECT j FROM x WHERE b)",
    "SELECT id, SUM(i) OVER (v ROWS 1 PRECEDING) AS t, COUNT(*) OVER u AS c FROM x WINDOW w "
    "AS (PARTITION BY s), v AS (w ORDER BY ts, id), u AS (w ORDER BY ts)",
    "SELECT x.id FROM x WINDOW w AS (PARTITION BY i ORDER BY n DESC, id) "
    "QUALIFY ROW_NUMBER() OVER w <= 2",
    "SELECT id, RANK() OVER w AS r, DENSE_RANK() OVER w AS d FROM x WINDOW w AS (PARTITION BY b "
    "ORDER BY ts)",
    "SELECT id, FIRST_VALUE(i IGNORE NULLS) OVER w AS f, LAST_VALUE(i) OVER (w ROWS 2 PRECEDING) "
    "AS l FROM x WINDOW w AS (PARTITION BY s ORDER BY ts, id)",
]
"""Queries with the clauses that other clauses express."""


@pytest.mark.parametrize("text", QUERIES)
def test_clauses_that_become_others_give_what_duckdb_gives(text: str) -> None:
    for seed in (9, 6):  # 40 rows each, and none in y.
        told = Tables(seed).difference(Text(text, text))
        assert told is None, told


@pytest.mark.parametrize("first", range(1_000_000, 1_000_040, 20))
def test_random_queries_give_what_duckdb_gives(first: int) -> None:
    told: list[str] = []
    check(range(first, first + 20), told.append)
    assert not told, "\n".join(told)


def test_rows_that_change_are_right_after_each_row() -> None:
    assert check_prefixes(range(2)) is None


def test_judge_sees_a_wrong_answer() -> None:
    tables = Tables(5)
    text = query(3)
    assert tables.difference(text) is None
    wrong = type(text)(text.ours, f"SELECT * FROM ({text.duck}) LIMIT 0")
    assert tables.difference(wrong) is not None


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        ("one", 1),
        ("x.user['address'].city", "here"),
        ("user.id", 7),
        ("x.user.id", 7),
        ("USER.address.CITY", "here"),
        ("x.user.address.city", "here"),
    ],
)
async def test_fields_of_nested_records_are_read_with_and_without_the_table(
    read: str, expected: Any
) -> None:
    flow = af.Flow("nested")
    stream = flow.source([{"one": 1, "user": {"id": 7, "address": {"city": "here"}}}])
    found = flow.sql(f"SELECT {read} AS found FROM x", schemas={"x": Row}, x=stream)
    assert await found.collect() == [{"found": expected}]
