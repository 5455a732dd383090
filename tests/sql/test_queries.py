"""Tests of random queries of SQL beside DuckDB, on rows and on columns."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

import pytest

import aioflow as af
from tests.sql.random_queries import Tables, check, check_prefixes, query


class Address(TypedDict):
    city: str


class User(TypedDict):
    id: int
    address: Address


class Row(NamedTuple):
    one: int
    user: User


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
