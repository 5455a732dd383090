"""Scripts in SQL on real servers: INSERT INTO tables with PRIMARY KEY, while workers are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pytest

import aioflow as af
from tests.integration.processes import eventually, open_workers
from tests.io.mysql_server import mysql_server
from tests.io.postgres_server import postgres_server

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
