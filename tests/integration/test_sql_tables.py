"""Scripts in SQL on real servers: INSERT INTO tables with PRIMARY KEY, while workers are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pytest

import aioflow as af
from tests.integration.processes import eventually, open_workers
from tests.io.kafka.brokers import Brokers, MockCluster, kafka_cluster, produced
from tests.io.mysql_server import mysql_server
from tests.io.postgres_server import postgres_server
from tests.sql.random_queries import latest

QUERY = "SELECT shop, day, count(*) AS n, sum(price) AS total, max(price) AS most"
CONDITION = "WHERE price <> 13 GROUP BY shop, day HAVING sum(price) > 40"
SALES = 6_000


def sale(n: int) -> dict[str, Any]:
    return {"shop": f"s{n % 7}", "day": n % 50, "price": n * 7919 % 101}


async def sales(position: Any) -> AsyncIterator[tuple[dict[str, Any], int]]:
    """Sales at about 8,000 a second."""
    for n in range(position or 0, SALES):
        yield sale(n), n + 1
        if n % 40 == 39:
            await asyncio.sleep(0.005)


def script(connector: str) -> str:
    return f"""
        CREATE TABLE totals (shop VARCHAR(9), day INT, n BIGINT, total BIGINT, most BIGINT,
          PRIMARY KEY (shop, day) NOT ENFORCED)
        WITH ('connector' = '{connector}', 'dsn' = '${{SHOP_DSN}}', 'table' = 'totals');
        INSERT INTO totals {QUERY} FROM sales {CONDITION}"""


def by_duckdb() -> list[str]:
    rows = [sale(n) for n in range(SALES)]
    values = ", ".join(f"('{row['shop']}', {row['day']}, {row['price']})" for row in rows)
    query = f"{QUERY} FROM (VALUES {values}) AS sales(shop, day, price) {CONDITION} ORDER BY 1, 2"
    return ["|".join(map(str, row)) for row in duckdb.sql(query).fetchall()]


@pytest.mark.parametrize(
    ("connector", "start"), [("postgres", postgres_server), ("mysql", mysql_server)]
)
async def test_kills_of_workers_leave_the_table_that_duckdb_computes(
    connector: str, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State in RocksDB, two workers, each killed once: the rows are those of the whole input."""
    with start() as server:
        monkeypatch.setenv("SHOP_DSN", server.create("shop"))
        server.query(
            "shop",
            "CREATE TABLE totals (shop VARCHAR(9), day INT, n BIGINT, total BIGINT, most BIGINT, "
            "PRIMARY KEY (shop, day))",
        )

        def rows() -> list[str]:
            found = server.query("shop", "SELECT * FROM totals ORDER BY shop, day")
            return [row.replace("\t", "|") for row in found]

        flow = af.Flow("sales", parallelism=2)
        source = flow.source(partial(sales), uid="sales")
        columns = {"shop": "STRING", "day": "INT", "price": "BIGINT"}
        flow.sql_script(script(connector), sales=source, schemas={"sales": columns})
        async with asyncio.timeout(100):
            async with flow.run(
                workers=2,
                state="rocksdb",
                checkpoints=tmp_path / "store",
                every="150ms",
                restart=af.fixed_delay(200, "100ms"),
            ) as job:
                ending = asyncio.ensure_future(job.wait())
                for kill in range(2):
                    before = rows()

                    def has_more(before: list[str] = before) -> bool:
                        return ending.done() or rows() != before

                    await eventually(has_more)
                    if workers := open_workers(job):
                        os.kill(workers[kill % len(workers)].pid, signal.SIGKILL)
                result = await ending
        assert result.restarts >= 1
        assert rows() == by_duckdb()


@pytest.fixture
def cluster() -> Iterator[Brokers | MockCluster]:
    with kafka_cluster() as running:
        yield running


async def test_a_topic_of_debezium_is_a_table_of_its_latest_rows(
    cluster: Brokers | MockCluster,
) -> None:
    """Events of a row are in one partition, in order; a deletion has a tombstone behind it."""
    rows: dict[int, int] = {}
    events: list[tuple[int, bytes | None]] = []
    for n in range(400):
        number, value = n * 7 % 40, n * 7919 % 101
        before = {"id": number, "value": rows[number]} if number in rows else None
        after = None if before is not None and value % 3 == 0 else {"id": number, "value": value}
        op = "d" if after is None else "c" if before is None else "u"
        body = msgspec.json.encode({"before": before, "after": after, "op": op, "ts_ms": n})
        events.append((number % 2, body))
        if after is None:
            del rows[number]
            events.append((number % 2, None))
        else:
            rows[number] = value
    await produced(cluster, "debezium", events)
    flow = af.Flow("topic", parallelism=3)
    stream = flow.sql(
        f"""CREATE TABLE t (id INT, value INT, PRIMARY KEY (id) NOT ENFORCED) WITH (
              'connector' = 'kafka', 'bootstrap' = '{cluster.bootstrap}',
              'topic' = 'debezium', 'until' = 'latest', 'format' = 'debezium_json');
            SELECT id % 4 AS k, count(*) AS n, sum(value) AS total FROM t GROUP BY id % 4""",
        updates=True,
    )
    async with asyncio.timeout(100):
        found = latest(await stream.collect())
    expected: dict[int, list[int]] = {}
    for number, value in rows.items():
        expected.setdefault(number % 4, []).append(value)
    assert sorted(found, key=lambda row: row["k"]) == [
        {"k": k, "n": len(values), "total": sum(values)} for k, values in sorted(expected.items())
    ]
