"""Queries whose rows change: their upserts, the tables that these make, and what is refused."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

import aioflow as af
from aioflow.testing import run_simulated
from tests.sql.random_queries import latest
from tests.sql.test_planner import BIDS, TIMES, WINDOW

COUNTS = "SELECT item, count(*) AS n, max(price) AS most FROM bids GROUP BY item"
RANKED = """SELECT {columns} FROM (
                SELECT *, ROW_NUMBER() OVER (PARTITION BY item ORDER BY {order}) AS place
                FROM bids) WHERE {limit}"""


class Bid(NamedTuple):
    item: str
    price: int


def planned(
    query: str,
    *,
    columns: bool = False,
    updates: bool | str = True,
    parallelism: int = 3,
    **tables: Any,
) -> Any:
    flow = af.Flow("updates", parallelism=parallelism)
    source: Any = af.io.arrow(pa.Table.from_pylist(BIDS)) if columns else BIDS
    bids = flow.source(source, watermarks=TIMES)
    return flow.sql(query, updates=updates, bids=bids, **tables)  # type: ignore[call-overload]


async def changes_of(query: str) -> list[tuple[Any, ...]]:
    """The key and the row of each upsert, the same on rows and on columns. Several subtasks would
    give them in another order, but the same table.
    """
    tables = [
        sorted(map(repr, latest(await planned(query, parallelism=n).collect()))) for n in (1, 3)
    ]
    assert tables[0] == tables[1]
    found = []
    for columns in (False, True):
        upserts = await planned(query, columns=columns, parallelism=1).collect()
        found.append([(*u.key.values(), u.row and tuple(u.row.values())) for u in upserts])
    assert found[0] == found[1]
    return found[0]


def of_key(changes: list[tuple[Any, ...]], key: Any) -> list[Any]:
    return [change[-1] for change in changes if change[0] == key]


# The changes.


async def test_each_row_gives_the_row_of_its_group() -> None:
    changes = await changes_of(COUNTS)
    assert of_key(changes, "tea") == [("tea", 1, 3), ("tea", 2, 5), ("tea", 3, 5)]
    assert of_key(changes, None) == [(None, 1, 9), (None, 2, 9)]


@pytest.mark.parametrize(
    "query",
    [
        COUNTS + " HAVING count(*) <> 2",
        f"SELECT item, n, most FROM ({COUNTS}) WHERE n <> 2",
        f"WITH c AS ({COUNTS}) SELECT * FROM (SELECT * FROM c WHERE most > 0) WHERE n <> 2",
    ],
)
async def test_a_row_that_passes_no_more_is_deleted(query: str) -> None:
    changes = await changes_of(query)
    assert of_key(changes, "tea") == [("tea", 1, 3), None, ("tea", 3, 5)]
    assert of_key(changes, None) == [(None, 1, 9), None]


async def test_a_row_that_never_passed_is_not_deleted() -> None:
    assert await changes_of(COUNTS + " HAVING count(*) > 2") == [("tea", ("tea", 3, 5))]
    assert await changes_of(f"SELECT * FROM ({COUNTS}) WHERE item = 'cup'") == [
        ("cup", ("cup", 1, 7))
    ]


async def test_all_rows_are_one_group_whose_key_are_the_constants() -> None:
    upserts = await planned("SELECT 'all' AS id, sum(price) AS total FROM bids").collect()
    assert upserts[-1] == af.Upsert("", {"id": "all"}, {"id": "all", "total": 25})
    upserts = await planned("SELECT count(*) AS n FROM bids").collect()
    assert [one.row["n"] for one in upserts] == [1, 2, 3, 4, 5, 6]
    assert {str(one.key) for one in upserts} == {"{}"}


async def test_lists_of_earlier_rows_stay_as_they_were() -> None:
    changes = await changes_of("SELECT item, array_agg(price) AS prices FROM bids GROUP BY item")
    assert of_key(changes, "tea") == [("tea", [3]), ("tea", [3, 5]), ("tea", [3, 5, 1])]


async def test_distinct_rows_are_appended() -> None:
    for query in ("SELECT DISTINCT item FROM bids", "SELECT item FROM bids GROUP BY item"):
        for columns in (False, True):
            rows = await planned(query, columns=columns, updates=False).collect()
            assert sorted(str(row["item"]) for row in rows) == ["None", "cup", "tea"]


@pytest.mark.parametrize("order", ["ts DESC", "ts DESC, user"])
async def test_the_last_row_of_each_key_replaces_the_one_before(order: str) -> None:
    query = RANKED.format(columns="item, price", order=order, limit="place = 1")
    changes = await changes_of(query)
    assert of_key(changes, "tea") == [("tea", 3), ("tea", 5), ("tea", 1)]


async def test_ranks_move_when_a_row_comes_before_them() -> None:
    query = RANKED.format(columns="item, place, price", order="price DESC", limit="place <= 2")
    changes = await changes_of(query)
    assert of_key(changes, "tea") == [("tea", 1, 3), ("tea", 1, 5), ("tea", 2, 3)]
    second = await changes_of(query.replace("place <= 2", "place = 2"))
    assert of_key(second, "tea") == [("tea", 2, 3)]


RANKS = "SELECT *, ROW_NUMBER() OVER (PARTITION BY item ORDER BY price DESC) AS place FROM bids"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (
            "SELECT item, place, price FROM r WHERE place BETWEEN 2 AND 3",
            [("tea", 2, 3), ("tea", 3, 1)],
        ),
        ("SELECT item, place, price FROM r WHERE place > 1 AND 3 > place", [("tea", 2, 3)]),
        (
            f"SELECT r.item, r.price, c.n FROM r JOIN ({COUNTS}) c ON r.item = c.item "
            "WHERE r.place = 1",
            [("cup", 7, 1), ("tea", 5, 3)],
        ),
        (
            f"SELECT c.item, r.price FROM ({COUNTS}) c LEFT JOIN r ON r.item = c.item "
            "AND r.place <= 1 AND r.price < 6",
            [("cup", None), ("tea", 5), (None, None)],
        ),
    ],
)
async def test_ranks_have_a_name_in_with(query: str, expected: list[Any]) -> None:
    found = latest(await planned(f"WITH r AS ({RANKS}) {query}").collect())
    found = [tuple(row.values()) for row in found if row.get("place") is None or row["item"]]
    assert sorted(map(str, found)) == sorted(map(str, expected))


async def test_counts_run_on_columns_and_their_upserts_are_rows() -> None:
    plan = planned("SELECT price, count(*) AS n FROM bids GROUP BY price", columns=True).explain()
    assert [line for line in plan.splitlines() if "on rows" in line and "aggregate" in line] == []


async def test_a_query_reads_rows_that_change_from_another() -> None:
    flow = af.Flow("two")
    bids = flow.source(BIDS)
    counts = flow.sql(COUNTS, updates=True, bids=bids)
    few = flow.sql("SELECT item FROM counts WHERE n < 3", updates=True, counts=counts)
    assert latest(await few.collect()) == [{"item": "cup"}, {"item": None}]
    with pytest.raises(af.SqlError, match="rows of this query change; give updates=True"):
        flow.sql("SELECT * FROM counts", counts=counts)


# Rows that change, read by a query.


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (f"SELECT n, count(*) AS m FROM ({COUNTS}) GROUP BY n", [(1, 1), (2, 1), (3, 1)]),
        (f"SELECT max(most) AS a, min(n) AS b, sum(n) AS c FROM ({COUNTS})", [(9, 1, 6)]),
        (f"SELECT DISTINCT most < 8 AS few FROM ({COUNTS})", [(False,), (True,)]),
        (
            f"SELECT * FROM (SELECT item, ROW_NUMBER() OVER (ORDER BY n DESC) AS r FROM ({COUNTS}))"
            " WHERE r <= 2",
            [("tea", 1), (None, 2)],
        ),
        (
            f"SELECT a.item, a.n, b.most FROM ({COUNTS}) a LEFT JOIN ({COUNTS}) b "
            "ON a.item = b.item AND b.n > 1",
            [("cup", 1, None), ("tea", 3, 5), (None, 2, None)],
        ),
    ],
)
async def test_a_query_reads_rows_that_change(query: str, expected: list[Any]) -> None:
    for columns in (False, True):
        found = latest(await planned(query, columns=columns).collect())
        assert sorted(map(str, (tuple(row.values()) for row in found))) == sorted(
            map(str, expected)
        )


async def test_a_row_that_is_replaced_leaves_no_gap() -> None:
    query = f"SELECT 'all' AS id, max(most) AS most FROM ({COUNTS} HAVING item = 'tea')"
    changes = await changes_of(query)
    assert None not in of_key(changes, "all")


async def test_a_row_moves_up_when_one_before_it_goes() -> None:
    few = "SELECT item, min(price) AS least FROM bids WHERE item IS NOT NULL GROUP BY item"
    query = (
        f"SELECT * FROM (SELECT item, ROW_NUMBER() OVER (ORDER BY least DESC) AS r FROM ({few}))"
    )
    found = await planned(f"{query} WHERE r <= 1", parallelism=1).collect()
    assert [one.row["item"] for one in found] == ["tea", "cup"]
    bids = [{"item": "tea", "price": 9}, {"item": "cup", "price": 7}, {"item": "tea", "price": 1}]
    flow = af.Flow("up", parallelism=1)
    stream = flow.sql(f"{query} WHERE r <= 1", updates=True, bids=flow.source(bids))
    assert latest(await stream.collect()) == [{"item": "cup", "r": 1}]


async def test_changes_have_the_row_before() -> None:
    changes = await planned(COUNTS, updates="changes", parallelism=1).collect()
    tea = [one for one in changes if one.key == {"item": "tea"}]
    assert [one.kind for one in tea] == ["insert", "update", "update"]
    assert tea[1].before == {"item": "tea", "n": 1, "most": 3}
    assert tea[1].after == {"item": "tea", "n": 2, "most": 5}


async def test_rows_without_a_key_come_and_go() -> None:
    query = "SELECT a.price, b.price AS more FROM bids a LEFT JOIN bids b ON a.price < b.price"
    query += " AND a.item = b.item WHERE a.item = 'tea'"
    changes = await planned(query, updates="changes", parallelism=1).collect()
    assert {one.kind for one in changes} == {"insert", "delete"}
    assert all(one.key == {} for one in changes)
    rows = sorted(str(tuple(row.values())) for row in latest(changes))
    assert rows == ["(1, 3)", "(1, 5)", "(3, 5)", "(5, None)"]


class Reading(NamedTuple):
    sensor: str
    value: float


async def test_a_sum_forgets_what_was_taken_back() -> None:
    rows = [Reading("a", 0.1), Reading("b", 1e300), Reading("c", 0.2), Reading("d", float("inf"))]
    rows += [Reading(name, 0.5) for name in "bd"]
    flow = af.Flow("sums")
    last = """SELECT sensor, value FROM (
                  SELECT sensor, value, ROW_NUMBER() OVER (PARTITION BY sensor ORDER BY value) AS r
                  FROM readings) WHERE r = 1"""
    stream = flow.sql(
        f"SELECT 1 AS id, SUM(value) AS total, STDDEV_POP(value) AS spread, "
        f"ARRAY_AGG(value) AS every FROM ({last})",
        updates=True,
        schemas={"readings": Reading},
        readings=flow.source(rows),
    )
    (row,) = latest(await stream.collect())
    assert row["total"] == 0.1 + 0.2 + 0.5 + 0.5
    assert abs(row["spread"] - 0.17853571071357123) < 1e-12
    assert sorted(row["every"]) == [0.1, 0.2, 0.5, 0.5]


async def test_a_table_to_look_up_keeps_the_key_if_it_has_one_row_for_each() -> None:
    names = [{"item": "tea", "name": "Darjeeling"}]
    query = f"SELECT item, n, name FROM ({COUNTS}) c LEFT JOIN names USING (item)"
    rows = latest(await planned(query, names=names).collect())
    assert {"item": "tea", "n": 3, "name": "Darjeeling"} in rows and len(rows) == 3
    with pytest.raises(af.SqlError, match="a row can have several rows of the table"):
        planned(query, names=names * 2)


def test_a_pair_whose_row_has_expired_stays() -> None:
    async def rows() -> AsyncIterator[dict[str, Any]]:
        yield {"side": "a", "id": 1}
        await asyncio.sleep(3600)
        yield {"side": "b", "id": 1}
        yield {"side": "a", "id": 1}

    flow = af.Flow("expired")
    stream = flow.source(rows)
    pairs = flow.sql(
        "SELECT a.id, b.id AS other FROM a LEFT JOIN b USING (id)",
        updates="changes",
        schemas={"a": {"id": "BIGINT"}, "b": {"id": "BIGINT"}},
        ttl="1m",
        a=stream.filter(af.col.side == "a"),
        b=stream.filter(af.col.side == "b"),
    )
    (changes,) = run_simulated(flow, collect=[pairs]).outputs
    assert [(one.kind, (one.after or one.before)["other"]) for one in changes] == [
        ("insert", None),
        ("insert", 1),
    ]


def test_a_row_with_a_key_stays_in_a_join_until_it_is_replaced() -> None:
    async def rows() -> AsyncIterator[dict[str, Any]]:
        yield {"side": "a", "id": 1}
        await asyncio.sleep(3600)
        yield {"side": "b", "id": 1}

    flow = af.Flow("kept")
    stream = flow.source(rows)
    pairs = flow.sql(
        "SELECT b.id, n FROM b JOIN (SELECT id, count(*) AS n FROM a GROUP BY id) USING (id)",
        updates="changes",
        schemas={"a": {"id": "BIGINT"}, "b": {"id": "BIGINT"}},
        ttl="1m",
        a=stream.filter(af.col.side == "a"),
        b=stream.filter(af.col.side == "b"),
    )
    (changes,) = run_simulated(flow, collect=[pairs]).outputs
    assert [one.after for one in changes] == [{"id": 1, "n": 1}]


@pytest.mark.parametrize("test", ["id IN (SELECT id FROM u)", "NOT EXISTS ({})"])
def test_a_value_of_the_query_of_in_never_expires(test: str) -> None:
    async def rows() -> AsyncIterator[dict[str, Any]]:
        for number in (1, 2, 1, 3):
            yield {"id": number}
            await asyncio.sleep(3600)

    flow = af.Flow("stays")
    anti = test.startswith("NOT")
    found = flow.sql(
        f"SELECT id FROM t WHERE {test.format('SELECT 1 FROM u WHERE u.id = t.id')}",
        updates="changes" if anti else False,
        schemas={"t": {"id": "BIGINT"}, "u": {"id": "BIGINT"}},
        ttl="1m",
        t=flow.source(rows),
        u=[{"id": 1}, {"id": 1}, {"id": None}],
    )
    (given,) = run_simulated(flow, collect=[found]).outputs
    left = latest(given) if anti else given
    assert [row["id"] for row in left] == ([2, 3] if anti else [1, 1])


def test_a_pair_is_deleted_from_the_next_join_whichever_side_came_first() -> None:
    async def rows() -> AsyncIterator[dict[str, Any]]:
        for side in ("a", "b", "a", "b", "a"):
            yield {"side": side, "id": 1}
            await asyncio.sleep(1)

    flow = af.Flow("chain")
    stream = flow.source(rows)
    changes = flow.sql(
        """SELECT x.id, n, m, c.id AS other
           FROM (SELECT id, count(*) AS n FROM a GROUP BY id) x
           JOIN (SELECT id, count(*) AS m FROM b GROUP BY id) y ON x.id = y.id
           LEFT JOIN c ON x.id = c.id""",
        updates="changes",
        schemas={one: {"id": "BIGINT"} for one in "abc"},
        ttl="1h",
        a=stream.filter(af.col.side == "a"),
        b=stream.filter(af.col.side == "b"),
        c=stream.filter(af.col.side == "c"),
    )
    (found,) = run_simulated(flow, collect=[changes]).outputs
    left: Counter[str] = Counter()
    for one in found:
        left[repr(one.after)] += one.after is not None
        left[repr(one.before)] -= one.before is not None
    assert +left == {"{'id': 1, 'n': 3, 'm': 2, 'other': None}": 1}
    assert not -left


# Sinks.


def made(path: Path, columns: str) -> Path:
    with sqlite3.connect(path) as database:
        database.execute(f"CREATE TABLE counts ({columns})")
    database.close()
    return path


def rows_in(path: Path) -> list[Any]:
    database = sqlite3.connect(path)
    rows = database.execute("SELECT * FROM counts ORDER BY 1").fetchall()
    database.close()
    return rows


@pytest.mark.parametrize("checkpoints", [None, "memory://updates"])
async def test_a_table_has_the_latest_rows(tmp_path: Path, checkpoints: str | None) -> None:
    path = made(tmp_path / "counts.db", "item TEXT PRIMARY KEY, n INTEGER, most INTEGER")
    query = COUNTS.replace("FROM bids", "FROM bids WHERE item IS NOT NULL")
    stream = planned(query + " HAVING count(*) < 3")
    stream.sink(af.io.sqlite(path, "counts", mode="upsert"), parallelism=1)
    await stream.flow.execute(checkpoints=checkpoints)
    assert rows_in(path) == [("cup", 1, 7)]


def test_a_sink_that_does_not_replace_rows_is_refused(tmp_path: Path) -> None:
    stream, path = planned(COUNTS), tmp_path / "counts.db"
    with pytest.raises(af.GraphError, match="mode='append': give it mode=\"upsert\""):
        stream.sink(af.io.sqlite(path, "counts"))
    with pytest.raises(af.GraphError, match=r"have the key item, and key= of .* says n"):
        stream.sink(af.io.sqlite(path, "counts", mode="upsert", key="n"))
    with pytest.raises(af.GraphError, match="deletes none"):
        stream.sink(af.io.delta(tmp_path / "lake", mode="upsert", key="item"))
    stream.sink(af.io.sqlite(path, "counts", mode="upsert", key="item"))


@pytest.mark.parametrize(("parallelism", "keyed"), [(None, False), (2, True)])
def test_a_sink_of_another_parallelism_is_keyed(parallelism: int | None, keyed: bool) -> None:
    stream = planned(COUNTS)
    stream.sink(print, name="shown", parallelism=parallelism)
    graph = stream.flow.graph
    (sink,) = [node.id for node in graph.nodes.values() if node.name == "shown"]
    (edge,) = graph.inputs_of(sink)
    assert (edge.partitioning is not None) is keyed


async def test_an_appending_sink_behind_another_operator_fails(tmp_path: Path) -> None:
    path = made(tmp_path / "counts.db", "item TEXT, n INTEGER, most INTEGER")
    stream = planned(COUNTS)
    stream.filter(lambda change: True).sink(af.io.sqlite(path, "counts"))
    with pytest.raises(ValueError, match='deletes a row: give the sink mode="upsert"'):
        await stream.flow.execute()
    assert rows_in(path) == []


# Restored.


@pytest.mark.parametrize(
    "query",
    [
        "SELECT item, sum(price) AS c FROM bids GROUP BY item HAVING sum(price) % 2 = 0",
        "SELECT DISTINCT item, price FROM bids",
        RANKED.format(columns="place, item, price", order="price DESC", limit="place <= 3"),
        RANKED.format(columns="item, price", order="price", limit="place = 1"),
        "SELECT n, count(*) AS m, max(item) AS c FROM (SELECT item, count(*) AS n FROM bids GROUP "
        "BY item) GROUP BY n",
        """SELECT a.item, b.price, n FROM (SELECT item, max(price) AS price FROM bids GROUP BY item)
           a FULL JOIN (SELECT price, count(*) AS n FROM bids GROUP BY price) b
           ON a.price = b.price""",
        """SELECT n % 3 AS m, sum(half) AS halves, avg(half) AS mean FROM (
             SELECT item, count(*) AS n, sum(price * 0.1) AS half FROM bids GROUP BY item)
           GROUP BY n % 3""",
    ],
)
def test_a_query_that_is_restored_in_its_midst_gives_the_same_changes(query: str) -> None:
    bids = [Bid("abcdef"[n * n % 6], n * 37 % 101) for n in range(300)]

    def changes(failures: list[int]) -> list[Any]:
        positions = []

        async def source(position: Any) -> AsyncIterator[tuple[Bid, int]]:
            positions.append(position)
            for index in range(position or 0, len(bids)):
                if index % 20 == 0:
                    await asyncio.sleep(0.002)
                if index in failures:
                    failures.remove(index)
                    raise OSError("away")
                yield bids[index], index + 1

        flow = af.Flow("restored", parallelism=3)
        stream: Any = flow.sql(
            query,
            updates="DISTINCT" not in query,  # type: ignore[call-overload]
            schemas={"bids": Bid},
            ttl="1h",
            bids=flow.source(source),
        )
        times = len(failures)
        run = run_simulated(
            flow,
            collect=[stream],
            checkpoints=f"memory://restored-{times}-{hash(query)}",
            every="5ms",
            restart=af.fixed_delay(5, "1ms"),
        )
        assert len(positions) == times + 1 and all(positions[1:])
        if " m, " in query or "JOIN" in query:  # In which order rows come and go is not fixed.
            return sorted(map(repr, latest(run.outputs[0])))
        return sorted(map(repr, run.outputs[0]))

    assert changes([110, 210]) == changes([])


# Refused.


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (
            f"SELECT b.ts, c.n FROM bids b JOIN ({COUNTS}) c USING (item)",
            'a row of a stream that appends has no key; or give updates="changes"',
        ),
        (f"{COUNTS} UNION ALL {COUNTS}", "UNION ALL can have equal rows of both sides"),
        (f"SELECT item, slow(n) AS n FROM ({COUNTS})", "an async function of rows that change"),
        (
            f"WITH c AS ({COUNTS}) SELECT 1 FROM TUMBLE(c, most, INTERVAL '1' DAY)",
            "a window of rows that change",
        ),
        (
            f"SELECT count(*) AS n FROM ({COUNTS}) GROUP BY TUMBLE(most, INTERVAL '1' DAY)",
            "a window of rows that change",
        ),
        ("SELECT count(*) AS n FROM bids GROUP BY item", "the columns must have item"),
        (f"SELECT n FROM ({COUNTS})", "the columns must have item"),
        (
            "SELECT * FROM bids QUALIFY ROW_NUMBER() OVER (ORDER BY price) <= 2",
            "the columns must have the rank",
        ),
        (
            RANKED.format(columns="item, price", order="price", limit="place <= 2"),
            "the columns must have place",
        ),
        (
            RANKED.format(columns="*", order="price", limit="place = 1").replace(
                "PARTITION BY item", "PARTITION BY UPPER(item)"
            ),
            "PARTITION BY takes columns",
        ),
        ("SELECT item FROM bids", "rows of this query never change; leave out updates=True"),
        (f"SELECT count(*) AS n FROM {WINDOW} GROUP BY window_end", "never change; leave out"),
        ("SELECT sum(price) OVER (PARTITION BY item) FROM bids", "OVER is only supported in"),
        (f"SELECT sum(n) OVER (ORDER BY most) FROM ({COUNTS})", "OVER of rows that change"),
        ("SELECT 1 FROM bids a LEFT JOIN bids b ON a.ts = b.ts", "no key that says which row"),
    ],
)
def test_a_query_is_refused_by_name(query: str, message: str) -> None:
    async def slow(n: int) -> int:
        return n

    with pytest.raises(af.SqlError) as caught:
        planned(query, functions={"slow": slow})
    assert message in str(caught.value)
    assert caught.value.line is not None
