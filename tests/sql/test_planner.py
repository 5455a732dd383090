"""What the planner makes of a query: results of windows and joins, schemas, NULL keys, and the
queries that it refuses.
"""

from __future__ import annotations

import dataclasses
import re
import traceback
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypedDict

import msgspec
import pyarrow as pa
import pydantic
import pytest

import aioflow as af
from aioflow.sql.keyed import Over
from aioflow.testing import OperatorHarness

TIMES: Any = af.WatermarkStrategy.bounded_out_of_orderness("5s", timestamp=af.col.ts)
BIDS = [
    {"item": "tea", "user": "ann", "price": 3, "ts": 1_000},
    {"item": "tea", "user": "bob", "price": 5, "ts": 4_000},
    {"item": "cup", "user": None, "price": 7, "ts": 5_000},
    {"item": None, "user": "ann", "price": 9, "ts": 12_000},
    {"item": None, "user": "bob", "price": None, "ts": 13_000},
    {"item": "tea", "user": "ann", "price": 1, "ts": 21_000},
]
SELLERS = [
    {"item": "tea", "seller": "eve", "ts": 2_000},
    {"item": None, "seller": "tom", "ts": 12_500},
    {"item": "cup", "seller": "joe", "ts": 30_000},
]
WINDOW = "TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '10' SECOND))"


def planned(query: str, *, columns: bool = False, **options: Any) -> Any:
    flow = af.Flow("planned")
    tables = {
        name: flow.source(
            af.io.arrow(pa.Table.from_pylist(rows)) if columns else rows, watermarks=TIMES
        )
        for name, rows in (("bids", BIDS), ("sellers", SELLERS))
        if name in query
    }
    return flow.sql(query, **tables, **options)


async def rows_of(query: str, **options: Any) -> list[tuple[Any, ...]]:
    """The rows of a query, the same on rows and on columns."""
    found = [
        sorted(
            (tuple(row.values()) for row in await planned(query, columns=c, **options).collect()),
            key=repr,
        )
        for c in (False, True)
    ]
    assert found[0] == found[1]
    return found[0]


# Rows before a row.


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("sum(price) OVER (PARTITION BY item ORDER BY ts)", [3, 8, 7, 9, 9, 9]),
        ("sum(price) OVER (ORDER BY ts ROWS BETWEEN 1 PRECEDING AND CURRENT ROW)",
         [3, 8, 12, 16, 9, 1]),
        ("count(*) OVER (ORDER BY ts RANGE BETWEEN INTERVAL '4' SECOND PRECEDING AND CURRENT ROW)",
         [1, 2, 3, 1, 2, 1]),
        ("LAG(price) OVER (PARTITION BY item ORDER BY ts)", [None, 3, None, None, 9, 5]),
        ("LAG(price, 2, 0) OVER (ORDER BY ts)", [0, 0, 3, 5, 7, 9]),
        ("ROW_NUMBER() OVER (PARTITION BY item ORDER BY ts)", [1, 2, 1, 1, 2, 3]),
        ("max(price) OVER (ORDER BY ts) - price", [0, 0, 0, 0, None, 8]),
    ],
)  # fmt: skip
async def test_over_aggregates_the_rows_before_each_row(call: str, expected: list[Any]) -> None:
    rows = sorted(await rows_of(f"SELECT ts, {call} AS found FROM bids"))
    assert [found for _, found in rows] == expected


async def test_rows_of_over_keep_their_time() -> None:
    query = """SELECT max(total) AS most, window_end FROM TUMBLE(
        (SELECT ts, sum(price) OVER (ORDER BY ts) AS total FROM bids), ts, INTERVAL '10' SECOND)
        GROUP BY window_start, window_end"""
    assert await rows_of(query) == [(15, 10_000), (24, 20_000), (25, 30_000)]


def test_a_frame_keeps_only_its_rows_and_leaves_out_late_ones() -> None:
    over = Over(af.agg(n=af.count()), None, by_rows=False, size=1_000, name="o")
    with OperatorHarness(over, key=lambda row: 0) as harness:
        for time in (0, 500, 1_200, 5_000):
            harness.push({"t": time}, time)
        harness.watermark(4_000)
        harness.push({"t": 3_000}, 3_000)
        harness.watermark(9_000)
        assert [row["o"]["n"] for row in harness.take()] == [1, 2, 2, 1]
        assert harness.state("past", 0) == [(5_000, {"t": 5_000})]


# Windows.


async def test_a_null_is_a_group_of_its_own() -> None:
    query = f"SELECT item, count(*) AS n FROM {WINDOW} GROUP BY item, window_start, window_end"
    assert await rows_of(query) == [("cup", 1), ("tea", 1), ("tea", 2), (None, 2)]
    both = f"SELECT item, user, count(*) FROM {WINDOW} GROUP BY item, user, window_end"
    assert len(await rows_of(both)) == 6


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ("TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '10' SECOND)", [(0, 3), (10, 2), (20, 1)]),
        (
            "TUMBLE(DATA => TABLE bids, TIMECOL => DESCRIPTOR(ts), SIZE => INTERVAL '10' SECOND, "
            "OFFSET => INTERVAL '2' SECOND)",
            [(-8, 1), (12, 3), (2, 2)],
        ),
        (
            "HOP(TABLE bids, DESCRIPTOR(ts), INTERVAL '10' SECOND, INTERVAL '20' SECOND)",
            [(-10, 3), (0, 5), (10, 3), (20, 1)],
        ),
        (
            "CUMULATE(TABLE bids, DESCRIPTOR(ts), INTERVAL '10' SECOND, INTERVAL '20' SECOND)",
            [(0, 3), (0, 5), (20, 1), (20, 1)],
        ),
        ("SESSION(TABLE bids, DESCRIPTOR(ts), INTERVAL '5' SECOND)", [(1, 3), (12, 2), (21, 1)]),
    ],
)
async def test_each_window_counts_the_rows_within(window: str, expected: list[Any]) -> None:
    query = "SELECT window_start, count(*) AS n FROM {} GROUP BY window_start, window_end"
    for text in (f"TABLE({window})", window.replace("TABLE bids", "bids")):
        rows = await rows_of(query.format(text))
        assert [(start // 1000, n) for start, n in rows] == expected


async def test_windows_as_functions_are_those_of_table_functions() -> None:
    new = (
        f"SELECT count(*), window_start, window_end FROM {WINDOW} GROUP BY window_start, window_end"
    )
    old = (
        "SELECT count(*), TUMBLE_START(ts, INTERVAL '10' SECOND), TUMBLE_END(ts, INTERVAL '10' "
        "SECOND) FROM bids GROUP BY TUMBLE(ts, INTERVAL '10' SECOND)"
    )
    assert await rows_of(old) == await rows_of(new)


async def test_results_of_windows_have_windows_of_their_own() -> None:
    rows = await rows_of(
        f"""WITH small AS (
                SELECT count(*) AS n, window_time AS at FROM {WINDOW}
                GROUP BY window_start, window_end)
            SELECT sum(n), max(n), window_end
            FROM TABLE(TUMBLE(TABLE small, DESCRIPTOR(at), INTERVAL '20' SECOND))
            GROUP BY window_start, window_end"""
    )
    assert rows == [(1, 1, 40_000), (5, 3, 20_000)]


async def test_windows_without_groups_are_fields_of_each_row() -> None:
    rows = await rows_of(
        f"SELECT price, window_start FROM {WINDOW} WHERE window_end > ts + INTERVAL '7' SECOND"
    )
    assert rows == [(1, 20_000), (3, 0), (9, 10_000)]
    hop = "HOP(bids, ts, INTERVAL '10' SECOND, INTERVAL '20' SECOND)"
    assert len(await rows_of(f"SELECT price, window_start FROM {hop}")) == 12
    again = f"""SELECT window_start, count(*) FROM (SELECT * FROM {hop} WHERE price > 1)
                GROUP BY window_start, window_end"""
    assert await rows_of(again) == [(-10_000, 3), (0, 4), (10_000, 1)]


async def test_a_map_is_made_of_keys_and_columns() -> None:
    assert await rows_of("SELECT MAP['a', price, 'b', 2]['a'] AS x, MAP['k', item] FROM bids") == [
        *sorted(((row["price"], {"k": row["item"]}) for row in BIDS), key=repr)
    ]


async def test_having_and_a_column_of_group_by_may_be_expressions() -> None:
    rows = await rows_of(
        f"""SELECT UPPER(item) AS name, sum(price) * 2 + 1 AS twice FROM {WINDOW}
            GROUP BY UPPER(item), window_start, window_end HAVING count(*) > 1"""
    )
    assert rows == [("TEA", 17), (None, 19)]


async def test_distinct_within_a_window_gives_each_row_once() -> None:
    rows = await rows_of(f"SELECT DISTINCT user, window_end FROM {WINDOW}")
    assert len(rows) == 6
    assert len(await rows_of(f"SELECT DISTINCT item, window_end FROM {WINDOW}")) == 4


async def test_the_best_rows_of_each_window_are_ranked() -> None:
    query = """SELECT item, price, place, window_start FROM (
                   SELECT *, ROW_NUMBER() OVER (
                       PARTITION BY window_start, window_end ORDER BY price DESC, item) AS place
                   FROM {}) WHERE place <= 2"""
    expected = [("cup", 7, 1, 0), ("tea", 1, 1, 20_000), ("tea", 5, 2, 0)]
    nulls = [(None, 9, 1, 10_000), (None, None, 2, 10_000)]
    assert await rows_of(query.format(WINDOW)) == expected + nulls
    assert await rows_of(query.format(f"(SELECT * FROM {WINDOW})")) == expected + nulls


async def test_the_first_row_of_each_key_is_the_earliest() -> None:
    query = """SELECT item, price FROM (
                   SELECT *, ROW_NUMBER() OVER (PARTITION BY item ORDER BY ts) AS n FROM bids)
               WHERE n = 1"""
    assert await rows_of(query) == [("cup", 7), ("tea", 3), (None, 9)]


async def test_the_first_row_of_a_key_may_arrive_after_a_later_one() -> None:
    flow = af.Flow("late")
    rows = [{"item": "tea", "ts": ts} for ts in (4_000, 1_000, 20_000)]
    query = """SELECT ts FROM (
                   SELECT *, ROW_NUMBER() OVER (PARTITION BY item ORDER BY ts) AS n FROM bids)
               WHERE n = 1"""
    stream = flow.sql(query, bids=flow.source(rows, watermarks=TIMES))
    assert await stream.collect() == [{"ts": 1_000}]


@pytest.mark.parametrize(
    "source",
    [
        "TUMBLE(t, {}, INTERVAL '1' DAY) GROUP BY window_end",
        "t GROUP BY TUMBLE({}, INTERVAL '1' DAY)",
    ],
)
@pytest.mark.parametrize("schemas", [None, {"t": {"ts": "BIGINT", "at": "BIGINT", "x": str}}])
async def test_records_without_the_time_of_a_window_fail_with_its_name(
    source: str, schemas: Any
) -> None:
    def counts(name: str) -> Any:
        flow = af.Flow("mapped")
        stream = flow.source(BIDS, watermarks=TIMES).map(dict)
        query = f"SELECT count(*) AS n FROM {source.format(name)}"
        return flow.sql(query, t=stream, schemas=schemas)

    assert await counts("ts").collect() == [{"n": 6}]
    with pytest.raises(LookupError, match="no field 'at' in a dict with item, user") as caught:
        await counts("at").collect()
    assert "in operator 'DESCRIPTOR(at)'" in caught.value.__notes__[0]
    if schemas is not None:
        with pytest.raises(af.SqlError, match="x is STRING, but the time of a row is a TIMESTAMP"):
            counts("x")


# Joins.


async def test_a_null_in_a_join_key_meets_nothing() -> None:
    condition = "bids.item = sellers.item"
    for where in (
        "",
        " AND bids.ts BETWEEN sellers.ts - INTERVAL '1' DAY AND sellers.ts + INTERVAL '1' DAY",
    ):
        query = f"SELECT price, seller FROM bids JOIN sellers ON {condition}{where}"
        assert await rows_of(query) == [(1, "eve"), (3, "eve"), (5, "eve"), (7, "joe")]
    table = planned("SELECT price, s.v FROM bids JOIN s ON item = k", s=[{"k": None, "v": 1}])
    assert await table.collect() == []


async def test_windows_are_joined_inner_and_outer() -> None:
    sides = """(SELECT item, count(*) AS n, window_start AS s, window_end AS e FROM {} GROUP BY
                item, window_start, window_end)"""
    left = sides.format(WINDOW)
    right = sides.format(WINDOW.replace("bids", "sellers"))
    query = """SELECT l.item, l.n, r.n FROM {} l {} JOIN {} r
               ON l.item = r.item AND l.s = r.s AND l.e = r.e"""
    both, alone = [("tea", 2, 1)], [("cup", 1, None), ("tea", 1, None), (None, 2, None)]
    assert await rows_of(query.format(left, "", right)) == both
    assert await rows_of(query.format(left, "LEFT", right)) == sorted(both + alone, key=repr)
    full = await rows_of(query.format(left, "FULL", right))
    assert full == sorted([*both, *alone, (None, None, 1), (None, None, 1)], key=repr)


async def test_rows_are_joined_within_an_interval() -> None:
    query = """SELECT price, seller FROM bids b, sellers s
               WHERE b.item = s.item AND b.ts >= s.ts AND b.ts < s.ts + INTERVAL '2' SECOND"""
    assert await rows_of(query) == []
    assert await rows_of(query.replace("<", "<=")) == [(5, "eve")]


async def test_a_table_is_looked_up() -> None:
    table = [{"item": "tea", "kind": "drink"}, {"item": "tea", "kind": "leaf"}]
    query = "SELECT price, kind FROM bids b {} JOIN kinds k ON b.item = k.item AND price < 5"
    assert await rows_of(query.format(""), kinds=table) == [
        (1, "drink"), (1, "leaf"), (3, "drink"), (3, "leaf"),
    ]  # fmt: skip
    rows = await rows_of(query.format("LEFT"), kinds=pa.Table.from_pylist(table))
    assert len(rows) == 8
    assert (5, None) in rows


async def test_three_streams_are_joined_and_united() -> None:
    joined = """SELECT a.price, b.price, s.seller FROM bids a JOIN sellers s ON a.item = s.item
                JOIN bids b ON b.item = s.item AND b.price > a.price"""
    assert await rows_of(joined) == [(1, 3, "eve"), (1, 5, "eve"), (3, 5, "eve")]
    united = "SELECT item, price FROM bids WHERE price > 6 UNION ALL SELECT seller, ts FROM sellers"
    with pytest.raises(af.SqlError, match="cast one of them"):
        planned(united, columns=True)
    united = united.replace("ts FROM", "UNIX_TIMESTAMP(ts) FROM")
    assert await rows_of(united) == [("cup", 7), ("eve", 2), ("joe", 30), ("tom", 12), (None, 9)]


async def test_a_window_groups_the_pairs_of_a_join_within_an_interval() -> None:
    query = """WITH pairs AS (
                   SELECT item, {} AS at FROM bids b JOIN sellers s USING (item)
                   WHERE s.ts BETWEEN b.ts - INTERVAL '{}' SECOND AND b.ts + INTERVAL '{}' SECOND)
               SELECT item, count(*), window_end FROM TUMBLE(pairs, at, INTERVAL '3' SECOND)
               GROUP BY item, window_start, window_end"""
    both = [("tea", 1, 3_000), ("tea", 1, 6_000)]
    assert await rows_of(query.format("GREATEST(b.ts, s.ts)", 3, 3)) == both
    assert await rows_of(query.format("GREATEST(s.ts, b.ts)", 3, 3)) == both
    # Within an interval to one side the later column is known.
    assert await rows_of(query.format("s.ts", 0, 3)) == both[:1]
    assert await rows_of(query.format("b.ts", 3, 0)) == both[1:]
    for wrong, lower in (("s.ts", 3), ("b.ts", 3), ("b.ts", 0), ("GREATEST(b.ts, b.price)", 3)):
        with pytest.raises(af.SqlError, match=r"at is not the event.*GREATEST\(a.ts, b.ts\)"):
            planned(query.format(wrong, lower, 3))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("", {("tea", 0)}),
        ("LEFT", {("tea", 0), ("cup", 0), ("tea", 20_000), (None, 10_000)}),
        ("RIGHT", {("tea", 0), ("cup", 30_000), (None, 10_000)}),
        ("FULL", {("tea", 0), ("cup", 0), ("tea", 20_000), (None, 10_000), ("cup", 30_000)}),
    ],
)
async def test_a_column_of_using_is_one_and_has_the_value_of_the_side_that_is_there(
    kind: str, expected: set[Any]
) -> None:
    sellers = WINDOW.replace("bids", "sellers")
    joined = f"""(SELECT * FROM {WINDOW}) bids {kind} JOIN (SELECT * FROM {sellers}) sellers
                 USING (item, window_start, window_end)"""
    assert set(await rows_of(f"SELECT item, window_start FROM {joined}")) == expected
    (first, *_) = await planned(f"SELECT * FROM {joined}").collect()
    assert [name for name in first if name.startswith(("item", "window_start"))] == [
        "item", "window_start",
    ]  # fmt: skip
    both = await rows_of(f"SELECT bids.item, sellers.item FROM {joined} WHERE item = 'cup'")
    sides = {"LEFT": [("cup", None)], "RIGHT": [(None, "cup")]}
    assert both == sides.get(kind, [("cup", None), (None, "cup")] if kind == "FULL" else [])


async def test_a_column_of_using_is_a_key_of_the_next_join() -> None:
    query = "SELECT item, b.price FROM bids JOIN sellers USING (item) JOIN bids b USING (item)"
    assert len(await rows_of(query)) == 10
    with pytest.raises(af.SqlError, match="'ts' is ambiguous: bids and sellers and b"):
        planned(query.replace("b.price", "ts"), columns=True)


# Tables and functions.


class Pair(NamedTuple):
    key: str
    n: int


@dataclasses.dataclass
class Data:
    key: str
    n: int


class Typed(TypedDict):
    key: str
    n: int


class Struct(msgspec.Struct):
    key: str
    n: int


class Model(pydantic.BaseModel):
    key: str
    n: int


@pytest.mark.parametrize(
    ("row", "schema"),
    [
        (Pair("a", 1), None),
        (Data("a", 1), None),
        (Struct("a", 1), None),
        (Model(key="a", n=1), None),
        ({"key": "a", "n": 1}, None),
        ({"key": "a", "n": 1}, Typed),
        ({"key": "a", "n": 1}, {"key": "VARCHAR", "n": "BIGINT"}),
        ({"key": "a", "n": 1}, {"key": str, "n": int | None}),
        ({"key": "a", "n": 1}, pa.schema({"key": pa.string(), "n": pa.int64()})),
    ],
    ids=str,
)
async def test_a_schema_is_that_of_the_rows_or_declared(row: Any, schema: Any) -> None:
    flow = af.Flow("schema")
    declared = None if schema is None else {"t": schema}
    rows = flow.source([row])
    assert await flow.sql("SELECT * FROM t", t=rows, schemas=declared).collect() == [
        {"key": "a", "n": 1}
    ]
    with pytest.raises(af.SqlError, match="did you mean key"):
        flow.sql("SELECT kay FROM t", t=rows, schemas=declared)


async def test_a_stream_of_unknown_columns_is_read_by_name() -> None:
    flow = af.Flow("open")
    rows = flow.source(lambda: iter([{"a": 1, "b": 2}]))
    assert await flow.sql("SELECT a + b AS c FROM t", t=rows).collect() == [{"c": 3}]
    assert await flow.sql("SELECT * FROM t WHERE a = 1", t=rows).collect() == [{"a": 1, "b": 2}]
    with pytest.raises(af.SqlError, match="declare them with schemas="):
        flow.sql("SELECT x.a FROM t x JOIN t y ON x.a = y.a", t=rows)


async def test_a_list_of_dicts_gives_names_without_types() -> None:
    def made(condition: str, **options: Any) -> Any:
        rows = af.Flow("untyped")
        query = f"SELECT item FROM t WHERE {condition}"
        return rows.sql(query, t=rows.source([{"item": "tea", "temp": 30}]), **options)

    for condition in ("temp > '25'", "item > 5"):
        with pytest.raises(TypeError, match="not supported between instances"):
            await made(condition).collect()
    schemas = {"t": {"item": str, "temp": int}}
    assert await made("temp > '25'", schemas=schemas).collect() == [{"item": "tea"}]
    with pytest.raises(af.SqlError, match="STRING and INTEGER do not go together"):
        made("item > 5", schemas=schemas)


async def test_a_datetime_is_read_as_milliseconds() -> None:
    at = datetime(2024, 1, 2, 3, tzinfo=UTC)
    for rows in ([{"at": at}], af.io.arrow(pa.table({"at": [at]}))):
        flow = af.Flow("times")
        stream = flow.sql(
            "SELECT HOUR(at), at FROM t", t=flow.source(rows), schemas={"t": {"at": datetime}}
        )
        assert [tuple(row.values()) for row in await stream.collect()] == [(3, 1704164400000)]


async def test_a_query_reads_the_stream_of_another_with_its_windows() -> None:
    flow = af.Flow("chain")
    bids = flow.source(BIDS, watermarks=TIMES)
    counts = flow.sql(
        f"SELECT item, count(*) AS n, window_start, window_end FROM {WINDOW} GROUP BY item, "
        "window_start, window_end",
        bids=bids,
    )
    most = flow.sql("SELECT max(n) AS n FROM counts GROUP BY window_end", counts=counts)
    assert await most.filter(af.col.n > 1).collect() == [{"n": 2}, {"n": 2}]


async def slow_double(x: int | None) -> int:
    return 2 * (x or 0)


async def test_async_functions_are_awaited_anywhere_in_a_query() -> None:
    functions = {"double": slow_double, "plus": lambda a, b: a + b}
    query = "SELECT DOUBLE(price) AS twice, plus(price, 1) FROM bids WHERE double(price) > 8"
    assert await rows_of(query, functions=functions) == [(10, 6), (14, 8), (18, 10)]


async def test_columns_of_one_name_get_a_number() -> None:
    rows = await planned("SELECT item, user AS item, 1 + 1 FROM bids WHERE price = 3").collect()
    assert rows == [{"item": "tea", "item_1": "ann", "EXPR$2": 2}]


async def test_a_name_is_found_exactly_first_then_without_case() -> None:
    flow = af.Flow("case")
    rows = flow.source([{"a": 1, "A": 2, "Only": 3}])
    assert await flow.sql('SELECT A, "a" AS b, only FROM t', T=rows).collect() == [
        {"A": 2, "b": 1, "only": 3}
    ]
    with pytest.raises(af.SqlError, match="no column 'only'"):
        flow.sql('SELECT "only" FROM t', t=rows)


# Refused.


@pytest.mark.parametrize(
    ("query", "message", "place"),
    [
        ("SELECT prize FROM bids", "there are item, user, price, ts; did you mean price?", "prize"),
        ("SELECT x.price FROM bids b", "no table 'x' in FROM", "x.price"),
        ("SELECT * FROM bid", "no table 'bid'; there are bids; did you mean bids?", "bid"),
        ("SELECT item FROM bids a JOIN sellers b USING (ts)", "'item' is ambiguous", "item"),
        ("SELECT item FROM bids WHERE", "not SQL: something is missing", "WHERE"),
        ("SELECT item, count(*) FROM bids GROUP BY item", "give updates=True", "item"),
        ("SELECT count(*) FROM bids", "without a window", "count(*)"),
        (
            f"SELECT item FROM {WINDOW} GROUP BY item",
            "GROUP BY lacks the window; add window_start, window_end",
            "item",
        ),
        (
            f"SELECT count(*) FROM {WINDOW}",
            "an aggregate lacks the window; write GROUP BY window_start, window_end",
            "count",
        ),
        (
            f"SELECT DISTINCT item FROM {WINDOW}",
            "SELECT DISTINCT lacks the window; add window_start, window_end",
            "item",
        ),
        (f"SELECT item, count(*) FROM {WINDOW} GROUP BY window_end", "item must stand in", "item"),
        ("SELECT item FROM bids ORDER BY price", "ORDER BY of a stream", "price"),
        ("SELECT item FROM bids LIMIT 3", "LIMIT of a stream", "3"),
        ("SELECT item FROM bids EMIT CHANGES", "there is no EMIT", "CHANGES"),
        ("SELECT item, count(*) FROM bids GROUP BY item EMIT FINAL", "there is no EMIT", "EMIT"),
        (
            "SELECT item FROM bids INTERSECT SELECT item FROM sellers",
            "the rows of INTERSECT change with the rows of both sides; give updates=True",
            "item FROM sellers",
        ),
        (
            "SELECT item FROM bids EXCEPT ALL SELECT item FROM sellers",
            "rows of EXCEPT change",
            "item FROM sellers",
        ),
        (
            "SELECT 1 FROM bids b WHERE NOT EXISTS (SELECT 1 FROM sellers s WHERE s.item = b.item)",
            'rows of NOT EXISTS change when the inner query gets a row; give updates="changes"',
            "",
        ),
        (
            "SELECT * FROM bids LEFT JOIN sellers ON bids.item = sellers.item",
            'a LEFT JOIN of whole streams corrects its results; give updates="changes"',
            "",
        ),
        ("SELECT 1 FROM bids a JOIN bids b ON a.ts < b.ts", "needs an equality", ""),
        (
            "SELECT 1 FROM bids a JOIN sellers FOR SYSTEM_TIME AS OF a.ts s ON a.item = s.item",
            "FOR SYSTEM_TIME AS OF takes a bounded table, and s is a stream",
            "sellers",
        ),
        (
            f"SELECT max(price, 2) FROM {WINDOW} GROUP BY window_start, window_end",
            "MAX takes one argument, not 2",
            "max",
        ),
        (
            "SELECT 1 FROM bids WHERE item IN (SELECT item FROM sellers) OR price > 3",
            "can only stand in FROM",
            "item FROM sellers",
        ),
        (
            "SELECT 1 FROM bids WHERE item NOT IN (SELECT item FROM sellers)",
            "write NOT EXISTS",
            "item NOT IN",
        ),
        (
            "SELECT 1 FROM bids b WHERE EXISTS (SELECT 1 FROM sellers)",
            "EXISTS needs an equality",
            "1 FROM sellers",
        ),
        (
            "SELECT 1 FROM bids b WHERE EXISTS (SELECT 1 FROM sellers s WHERE s.item < b.item)",
            "by = alone",
            "s.item < b.item",
        ),
        (
            "SELECT 1 FROM bids b WHERE b.price IN (SELECT max(1) FROM sellers s WHERE s.item = "
            "b.item GROUP BY s.item)",
            "GROUP cannot stand",
            "",
        ),
        (
            "SELECT 1 FROM bids b WHERE EXISTS (SELECT max(1) FROM sellers s WHERE s.item = "
            "b.item)",
            "an aggregate cannot stand",
            "max(1)",
        ),
        (
            "SELECT 1 FROM bids WHERE item IN (SELECT item, item FROM sellers)",
            "IN (SELECT ...) takes one column",
            "item IN (SELECT item, item FROM sellers)",
        ),
        ("SELECT * EXCEPT (item) FROM (SELECT item FROM bids)", "leaves out all columns", "*"),
        ("SELECT count(*) FROM bids GROUP BY item WITH ROLLUP", "write ROLLUP (a, b)", ""),
        (
            "SELECT count(*), GROUPING(price) FROM bids GROUP BY ROLLUP (item)",
            "GROUPING takes columns of GROUP BY",
            "",
        ),
        (
            "SELECT sum(price) OVER v FROM bids WINDOW w AS (ORDER BY ts)",
            "WINDOW does not define 'v'; there are w",
            "v FROM",
        ),
        ("SELECT * EXCEPT (prize) FROM bids", "no column 'prize'; did you mean price?", "prize"),
        (
            "SELECT item, count(*) FROM bids GROUP BY ROLLUP (1)",
            "write the column itself",
            "1",
        ),
        (
            "SELECT sum(price) OVER (PARTITION BY item) FROM bids",
            "OVER is only supported in the order of event time",
            "sum",
        ),
        ("SELECT sum(price) OVER (ORDER BY ts DESC) FROM bids", "OVER is only supported in", "sum"),
        ("SELECT NTILE(2) OVER (ORDER BY ts) FROM bids", "OVER is not supported", "NTILE"),
        ("SELECT LEAD(price) OVER (ORDER BY ts) FROM bids", "write LAG, which gives", "LEAD"),
        (
            "SELECT LAG(price IGNORE NULLS) OVER (ORDER BY ts) FROM bids",
            "only known for FIRST_VALUE and LAST_VALUE",
            "LAG",
        ),
        (
            "SELECT sum(price) OVER (ORDER BY ts ROWS BETWEEN CURRENT ROW AND 1 FOLLOWING) "
            "FROM bids",
            "must end at CURRENT ROW",
            "sum",
        ),
        (
            "SELECT sum(price) OVER (ORDER BY ts, item RANGE BETWEEN INTERVAL '1' SECOND PRECEDING "
            "AND CURRENT ROW) FROM bids",
            "takes ORDER BY the time alone",
            "sum",
        ),
        ("SELECT ROW_NUMBER() OVER (ORDER BY price) AS n FROM bids", "limits the rank", "ROW"),
        (
            "WITH r AS (SELECT *, ROW_NUMBER() OVER (ORDER BY price) AS n FROM bids) "
            "SELECT * FROM r WHERE n > 1",
            "limits the rank from above, WHERE rank <= n or rank BETWEEN a AND b",
            "ROW",
        ),
        (
            "SELECT * FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY item ORDER BY ts DESC) AS n "
            "FROM bids) WHERE n = 1",
            "rank within a window",
            "ROW_NUMBER",
        ),
        ("SELECT 1 FROM TUMBLE(bids, price, INTERVAL '1' DAY)", "not the event time", "price"),
        ("SELECT 1 FROM TUMBLE(bids, ts, INTERVAL '1' MONTH)", "no fixed length", "MONTH"),
        ("SELECT 1 FROM TUMBLE(bids, ts)", "TUMBLE lacks SIZE", "TUMBLE"),
        ("SELECT 1 FROM TABLE(TUMBEL(TABLE bids))", "TABLE(...) takes TUMBLE", "TUMBEL"),
        ("INSERT INTO x SELECT * FROM bids", "INSERT is not supported", ""),
        ("SELECT PROCTIME() AS p FROM bids", "which only windows and AS OF can use", "PROCTIME"),
        (
            "SELECT * FROM bids MATCH_RECOGNIZE (PARTITION BY item ORDER BY ts "
            "MEASURES A.price AS p ONE ROW PER MATCH PATTERN (A) DEFINE A AS A.price > 1)",
            "MATCH_RECOGNIZE is not supported; use process()",
            "item",
        ),
        ("SELECT item FROM bids; SELECT 1", "CREATE VIEW", ""),
        ("", "empty text", ""),
    ],
)
def test_a_query_is_refused_at_its_place(query: str, message: str, place: str) -> None:
    with pytest.raises(af.SqlError) as caught:
        planned(f"{query}\n-- bids", schemas=None)
    error = caught.value
    assert message in str(error)
    if place:
        assert error.line == 1 and error.column is not None
        assert query[error.column - 1 :].startswith(place) or place in query[error.column - 1 :]
        assert str(error).splitlines()[-1].strip(" ").strip("^") == ""


def test_a_query_of_an_endless_stream_is_not_taken_by_in() -> None:
    """After its time to live a value would come again, and with it the rows that it lets pass."""
    flow = af.Flow("endless")
    rows = flow.source(af.io.push(), name="rows")
    columns = {"x": int, "y": int}
    query = "SELECT x FROM t WHERE x IN (SELECT y FROM {of})"
    with pytest.raises(af.SqlError, match="rows appends rows for ever"):
        flow.sql(query.format(of="t"), t=rows, schemas={"t": columns}, ttl="1h")
    grouped = "(SELECT y, count(*) AS n FROM t GROUP BY y)"
    for of, updates in (("u", False), (grouped, "changes")):
        given: dict[str, Any] = {"u": [{"y": 1}]} if of == "u" else {}
        schemas = {"t": columns, **({"u": {"y": int}} if given else {})}
        text = query.format(of=of)
        flow.sql(text, t=rows, schemas=schemas, ttl="1h", updates=updates, **given)


def test_a_join_of_endless_streams_asks_for_a_time_to_live() -> None:
    flow = af.Flow("endless")
    rows = flow.source(af.io.push(), name="rows")
    query = "SELECT a.x FROM t a JOIN t b ON a.x = b.x"
    with pytest.raises(af.SqlError, match=r'rows does not end.*ttl="1h"'):
        flow.sql(query, t=rows, schemas={"t": {"x": int}})
    flow.sql(query, t=rows, schemas={"t": {"x": int}}, ttl="1h")


@pytest.mark.parametrize(
    "query",
    [
        f"SELECT count(*) FROM {WINDOW} GROUP BY window_start, window_end",
        "SELECT count(*) FROM bids GROUP BY TUMBLE(ts, INTERVAL '1' DAY)",
        "SELECT 1 FROM bids a JOIN bids b ON a.item = b.item AND a.ts BETWEEN b.ts AND b.ts",
        "SELECT item FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY window_end ORDER BY ts) AS n "
        f"FROM {WINDOW}) WHERE n = 1",
    ],
)
def test_windows_without_watermarks_are_refused_at_their_place(query: str) -> None:
    flow = af.Flow("none")
    with pytest.raises(af.SqlError, match=r"needs event time.*watermarks=.*PROCTIME") as caught:
        flow.sql(query, bids=flow.source(BIDS))
    assert caught.value.line == 1
    assert "time=" not in str(caught.value)


def test_sources_that_do_not_end_are_named_once() -> None:
    flow = af.Flow("endless")
    tables = {"t": flow.source(af.io.push(), name="in"), "u": flow.source(af.io.push(), name="in")}
    tables["v"] = flow.source(af.io.push(), name="out")
    schemas = {name: {"x": int} for name in tables}
    query = "SELECT t.x FROM t JOIN u ON t.x = u.x"
    two = {name: tables[name] for name in "tu"}
    with pytest.raises(af.SqlError, match="for ever, and in does not end;"):
        flow.sql(query, **two, schemas={name: schemas[name] for name in two})
    query += " JOIN v ON v.x = t.x"
    with pytest.raises(af.SqlError, match="in does not end;"):
        flow.sql(query, **tables, schemas=schemas)
    query = "SELECT t.x FROM t JOIN v ON t.x = v.x"
    with pytest.raises(af.SqlError, match="for ever, and in and out do not end;"):
        two = {name: tables[name] for name in "tv"}
        flow.sql(query, **two, schemas={name: schemas[name] for name in two})


def test_a_table_that_the_query_does_not_read_is_refused() -> None:
    flow = af.Flow("unread")
    bids, items = flow.source(BIDS), [{"item": "tea"}]
    with pytest.raises(af.GraphError, match="got items, which the query does not read"):
        flow.sql("SELECT price FROM bids", bids=bids, items=items)
    with pytest.raises(af.GraphError, match="got bids, which"):
        flow.sql("WITH bids AS (SELECT * FROM items) SELECT * FROM bids", bids=bids, items=items)
    flow.sql("SELECT price FROM bids JOIN ITEMS USING (item)", bids=bids, items=items)


def test_an_error_has_no_frames_of_the_planner() -> None:
    with pytest.raises(af.SqlError) as caught:
        planned("SELECT prize + 1 FROM bids")
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert not [one for one in frames if "sqlglot" in one.filename or one.name == "resolve"]
    assert len([one for one in frames if "aioflow/sql" in one.filename]) == 1


def test_tables_and_schemas_are_checked() -> None:
    flow, other = af.Flow("one"), af.Flow("two")
    with pytest.raises(af.GraphError, match="build both in one flow"):
        flow.sql("SELECT 1 FROM t", t=other.source([1]))
    with pytest.raises(af.GraphError, match="expected a stream of this flow"):
        flow.sql("SELECT 1 FROM t", t=5)
    with pytest.raises(af.GraphError, match="expected tables that sql"):
        flow.sql("SELECT 1 FROM t", t=flow.source([1]), schemas={"u": Typed})
    with pytest.raises(af.GraphError, match="no type of SQL"):
        flow.sql("SELECT 1 FROM t", t=flow.source([1]), schemas={"t": {"a": "NUMBRE"}})


# Windows and groups that do not match.


@pytest.mark.parametrize("kind", ["HOP", "CUMULATE"])
@pytest.mark.parametrize("side", ["", "LEFT"])
async def test_windows_that_overlap_are_joined_row_by_row(kind: str, side: str) -> None:
    window = kind + "(TABLE {}, DESCRIPTOR(ts), INTERVAL '10' SECOND, INTERVAL '20' SECOND)"
    query = (
        f"SELECT b.ts, s.ts, b.window_start, b.window_end FROM {window.format('bids')} b "
        f"{side} JOIN {window.format('sellers')} s ON b.item = s.item "
        "AND b.window_start = s.window_start AND b.window_end = s.window_end"
    )
    pairs = {(1_000, 2_000), (4_000, 2_000)}
    starts = [(-10_000, 10_000), (0, 20_000)] if kind == "HOP" else [(0, 10_000), (0, 20_000)]
    found = {row for row in await rows_of(query) if row[1] is not None and row[0] < 5_000}
    assert found == {(*pair, *bounds) for pair in pairs for bounds in starts}


def test_windows_of_one_end_alone_are_not_joined_if_their_starts_differ() -> None:
    query = (
        f"SELECT b.ts FROM {WINDOW} b JOIN TUMBLE(sellers, ts, INTERVAL '5' SECOND) s "
        "ON b.window_end = s.window_end"
    )
    with pytest.raises(af.SqlError, match="join on window_start, too"):
        planned(query)


async def test_a_session_is_that_of_its_partition_and_not_of_its_groups() -> None:
    window = "SESSION(TABLE bids{}, DESCRIPTOR(ts), INTERVAL '5' SECOND)"
    by_item = window.format(" PARTITION BY item")
    whole = f"SELECT window_start, count(*) FROM {by_item} GROUP BY window_start, window_end"
    assert await rows_of(whole) == [(1_000, 2), (12_000, 2), (21_000, 1), (5_000, 1)]
    query = (
        f"SELECT item, window_start, count(*) FROM {window.format('')} "
        "GROUP BY item, window_start, window_end"
    )
    assert await rows_of(query) == [
        ("cup", 1_000, 1),
        ("tea", 1_000, 2),
        ("tea", 21_000, 1),
        (None, 12_000, 2),
    ]
    ranked = (
        "SELECT ts FROM (SELECT ts, ROW_NUMBER() OVER (PARTITION BY window_start, window_end "
        f"ORDER BY ts) AS place FROM {by_item}) WHERE PLACE <= 1"
    )
    assert await rows_of(ranked) == [(1_000,), (12_000,), (21_000,), (5_000,)]


async def test_nan_is_the_greatest_number_of_a_ranking() -> None:
    flow = af.Flow("nan")
    rows = [{"price": price, "ts": 1_000} for price in (float("nan"), 5.0, 1.0)]
    query = (
        "SELECT price FROM (SELECT price, ROW_NUMBER() OVER (PARTITION BY window_start, "
        "window_end ORDER BY price) AS place FROM TUMBLE(bids, ts, INTERVAL '1' SECOND)) "
        "WHERE place <= 2"
    )
    stream = flow.sql(query, bids=flow.source(rows, watermarks=TIMES))
    assert await stream.collect() == [{"price": 1.0}, {"price": 5.0}]


@pytest.mark.parametrize(
    ("order", "first"),
    [
        ("price", 1.0),
        ("price DESC", 5.0),
        ("price NULLS FIRST", None),
        ("price DESC NULLS FIRST", None),
    ],
)
async def test_null_ranks_last_unless_the_query_says_first(order: str, first: float | None) -> None:
    flow = af.Flow("nulls")
    rows = [{"price": price, "ts": 1_000} for price in (5.0, None, 1.0)]
    query = (
        "SELECT price FROM (SELECT price, ROW_NUMBER() OVER (PARTITION BY window_start, "
        f"window_end ORDER BY {order}) AS place FROM TUMBLE(bids, ts, INTERVAL '1' SECOND)) "
        "WHERE place <= 1"
    )
    stream = flow.sql(query, bids=flow.source(rows, watermarks=TIMES))
    assert await stream.collect() == [{"price": first}]


async def test_a_union_of_numbers_has_the_wider_type() -> None:
    query = (
        "SELECT n + 0.5 AS n FROM (SELECT CAST(price AS DECIMAL(9, 2)) AS n FROM bids "
        "UNION ALL SELECT price / 2.0 FROM bids) AS both WHERE n > 8"
    )
    schema = {"item": str, "user": str, "price": int, "ts": "TIMESTAMP"}
    assert await planned(query, schemas={"bids": schema}).collect() == [{"n": 9.5}]


@pytest.mark.parametrize(
    ("query", "message", "place"),
    [
        ("SELECT item FROM bids WHERE price", "a condition takes BOOLEAN", "price"),
        ("SELECT item FROM bids WHERE 'x'", "a condition takes BOOLEAN", None),
        (
            "SELECT TUMBLE_START(ts, INTERVAL '2' SECOND) FROM bids "
            "GROUP BY TUMBLE(ts, INTERVAL '1' SECOND)",
            "needs the arguments of the windows",
            None,
        ),
        (
            "SELECT HOP_END(ts, INTERVAL '1' SECOND) FROM bids "
            "GROUP BY TUMBLE(ts, INTERVAL '1' SECOND)",
            "needs the arguments of the windows",
            None,
        ),
        ("SELECT count(*) FROM bids GROUP BY TUMBLE()", "TUMBLE takes a time", None),
        (
            "SELECT item FROM bids UNION ALL BY NAME SELECT user FROM bids",
            "in the same order",
            None,
        ),
        (
            "SELECT count(*) FROM CUMULATE(bids, ts, INTERVAL '5' SECOND, INTERVAL '10' SECOND) "
            "GROUP BY window_start",
            "CUMULATE need window_end",
            "window_start",
        ),
        ("SELECT CAST(item AS NOPE) FROM bids", "no type NOPE", "item"),
        ("SELECT count(*) FROM TUMBLE() -- bids", r"but got \)$", None),
    ],
)
def test_what_means_nothing_or_another_window_is_refused(
    query: str, message: str, place: str | None
) -> None:
    with pytest.raises(af.SqlError) as caught:
        planned(
            query,
            schemas={
                "bids": {"item": str, "user": str, "price": int, "ts": "TIMESTAMP"},
            },
        )
    error = caught.value
    assert re.search(message, error.message)
    assert error.line == 1
    if place is not None:
        assert error.span is not None
        assert query[slice(*error.span)] == place
