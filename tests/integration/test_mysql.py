"""MySQL tables on a real server of MariaDB: values, keys, refusals, and kills of workers and of the
server.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import signal
import socket
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import asyncmy.errors
import pytest

import aioflow as af
from aioflow.core.errors import GraphError
from aioflow.io.tables.mysql_client import CONNECT_TIMEOUT_S
from aioflow.io.tables.mysql_tables import mysql
from aioflow.io.tables.table_sinks import PIECE_ROWS
from aioflow.io.tables.table_sources import PAGE_ROWS
from tests.integration.processes import eventually, open_workers
from tests.integration.upsert_flows import counted, expected
from tests.io.driver import SinkContext, read_all, write
from tests.io.mysql_server import PASSWORD, MysqlServer, mysql_server


class Count(NamedTuple):
    word: str
    n: int


@pytest.fixture(scope="module")
def server() -> Iterator[MysqlServer]:
    with mysql_server() as running:
        yield running


async def test_values_come_out_as_they_went_in(
    server: MysqlServer, schema: str, dsn: str, ctx: SinkContext
) -> None:
    server.query(
        schema,
        "CREATE TABLE t (id VARCHAR(36) PRIMARY KEY, big BIGINT UNSIGNED, price DECIMAL(9, 2), "
        'x DOUBLE, ok BOOL, at DATETIME(6), day DATE, doc JSON, data BLOB, `50%"` TEXT)',
    )
    at = datetime.datetime(2024, 5, 6, 7, 8, 9, 500_000)
    row = {
        "id": UUID(int=1), "big": 2**64 - 1, "price": Decimal("1.10"), "x": 0.1, "ok": True,
        "at": at.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
        "day": at.date(), "doc": {"a": [1, None]}, "data": b"\0\xff'\\%s",
        '50%"': "o'\\\n\U0001f600%s",
    }  # fmt: skip
    for mode in ("append", "upsert"):
        await write(mysql(dsn, "t", mode=mode), ctx, [row])
        read = {**row, "id": str(UUID(int=1)), "at": at - datetime.timedelta(hours=2), "ok": 1}
        read["doc"] = '{"a":[1,null]}'
        assert await read_all(mysql(dsn, "t"), ctx) == [read]
        if mode == "append":
            server.query(schema, "DELETE FROM t")


async def test_rows_of_a_query_and_of_another_database_are_read_page_by_page(
    server: MysqlServer, schema: str, dsn: str, ctx: SinkContext
) -> None:
    count = 2 * PAGE_ROWS + 7
    server.query(
        schema,
        f"CREATE TABLE t AS SELECT concat('w', seq) AS word, seq AS n FROM seq_1_to_{count}",
    )
    rows = [Count(f"w{i}", i) for i in range(1, count + 1)]
    assert await read_all(mysql(dsn, f"{schema}.t", Count, key="n"), ctx) == rows
    source = mysql(dsn, "t", Count, key="n", query="SELECT word, n FROM t WHERE n % 2 = 0")
    assert await read_all(source, ctx) == [one for one in rows if one.n % 2 == 0]
    with pytest.raises(GraphError, match="has no primary key of one column: name a unique column"):
        await mysql(dsn, "t").discover()


async def test_the_latest_row_of_a_key_wins_as_the_database_compares_keys(
    server: MysqlServer, schema: str, dsn: str, ctx: SinkContext
) -> None:
    server.query(
        schema,
        "CREATE TABLE t (a INT, b VARCHAR(9) COLLATE utf8mb4_general_ci, n INT, kept INT DEFAULT "
        "7, PRIMARY KEY (b, a)); CREATE TABLE keys_alone (id INT PRIMARY KEY)",
    )
    last = 2 * PIECE_ROWS + 4
    rows = [{"a": 1, "b": "Xx"[i % 2], "n": i} for i in range(last + 1)]
    await write(mysql(dsn, "t", mode="upsert"), ctx, rows)
    assert server.query(schema, "SELECT a, n, kept FROM t") == [f"1\t{last}\t7"]
    await write(mysql(dsn, "t", key=["a", "b"], mode="delete"), ctx, [{"a": 1, "b": "X"}])
    assert server.query(schema, "SELECT count(*) FROM t") == ["0"]
    await write(mysql(dsn, "keys_alone", mode="upsert"), ctx, [(1,), (2,), (1,)])
    assert server.query(schema, "SELECT id FROM keys_alone ORDER BY id") == ["1", "2"]


@pytest.mark.parametrize("more", ["", ", UNIQUE (n)"], ids=["one_key", "two_keys"])
async def test_a_deletion_needs_the_key_alone_and_keeps_its_place_in_the_order(
    server: MysqlServer, schema: str, ctx: SinkContext, more: str
) -> None:
    name = f"{schema[:40]}{len(more)}"
    dsn = server.create(name)
    server.query(name, f"CREATE TABLE t (id INT PRIMARY KEY, n INT NOT NULL{more})")
    sink = mysql(dsn, "t", columns=["id", "n"], mode=lambda row: row["op"])
    records = [{"op": "upsert", "id": i, "n": i} for i in range(4)]
    records += [{"op": "delete", "id": 1}, {"op": "delete", "id": 2}]
    records += [{"op": "upsert", "id": 2, "n": 9}, {"op": "upsert", "id": 2, "n": 9}]
    await write(sink, ctx, records)
    assert server.query(name, "SELECT * FROM t ORDER BY id") == ["0\t0", "2\t9", "3\t3"]
    if more:  # MySQL's ON DUPLICATE KEY would replace the row with that `n`.
        with pytest.raises(asyncmy.errors.IntegrityError, match="Duplicate entry '9'"):
            await write(sink, ctx, [{"op": "upsert", "id": 5, "n": 9}], checkpoint_id=2)


async def test_row_that_the_table_refuses_fails_before_the_checkpoint(
    server: MysqlServer, schema: str, dsn: str, ctx: SinkContext
) -> None:
    server.query(
        schema,
        "CREATE TABLE t (id INT PRIMARY KEY, x VARCHAR(3)); CREATE TABLE old (id INT PRIMARY KEY) "
        "ENGINE = MyISAM",
    )
    for table, options, record, error, message in (
        ("t", {}, {"id": 1, "x": "long"}, asyncmy.errors.DataError, "Data too long for column 'x'"),
        ("t", {}, {"id": 1, "y": 1}, ValueError, "has no column 'y', expected some of"),
        ("t", {"key": "x"}, {"x": "a"}, GraphError, "has no unique constraint on 'x'"),
        ("t", {}, {"id": None}, ValueError, "the key 'id' is None"),
        ("old", {}, {"id": 1}, GraphError, "engine MyISAM, which has no transactions.*InnoDB"),
        ("absent", {}, {"id": 1}, GraphError, "has no table 'absent'.*create it"),
    ):
        with pytest.raises(error, match=message):
            await write(mysql(dsn, table, mode="upsert", **options), ctx, [record])
    assert server.query(
        schema, "SELECT (SELECT count(*) FROM t) + (SELECT count(*) FROM aioflow_staged)"
    ) == ["0"]


async def test_a_wrong_address_and_a_wrong_password_are_named_within_ten_seconds(
    server: MysqlServer, dsn: str, ctx: SinkContext
) -> None:
    assert CONNECT_TIMEOUT_S < 10
    with pytest.raises(asyncmy.errors.OperationalError, match="Access denied") as refused:
        await write(mysql(dsn.replace(PASSWORD, "wrong"), "t"), ctx, [])
    assert any("refused the connection" in note for note in refused.value.__notes__)
    assert "wrong" not in "".join(refused.value.__notes__)
    with socket.socket() as silent:  # Accepts, and never answers.
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        async with asyncio.timeout(10):
            with pytest.raises(TimeoutError, match=rf"127\.0\.0\.1:{port} did not answer within"):
                await write(mysql(f"mysql://u@127.0.0.1:{port}/d", "t"), ctx, [])
    with pytest.raises(ConnectionError, match=rf"127\.0\.0\.1:{port} cannot be reached"):
        await write(mysql(f"mysql://u@127.0.0.1:{port}/d", "t"), ctx, [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("postgresql://h/d", "expected a URL as dsn, mysql://USER"),
        ("mysql://h", "names no database"),
        ("mysql://h/d?ssl=1", "the dsn has 'ssl', expected only unix_socket="),
    ],
)
def test_a_dsn_that_leads_nowhere_is_refused_when_it_is_given(given: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        mysql(given, "t")


async def test_kills_of_workers_and_of_the_server_leave_the_exact_table(tmp_path: Path) -> None:
    """Each change is applied once: a trigger notes it, and no note comes twice."""
    total = 20_000
    with mysql_server() as server:
        dsn = server.create("killed")
        server.query(
            "killed",
            "CREATE TABLE counts (`key` INT PRIMARY KEY, n INT);"
            "CREATE TABLE notes (`key` INT, n INT);"
            "CREATE TRIGGER ins AFTER INSERT ON counts FOR EACH ROW INSERT INTO notes VALUES "
            "(NEW.`key`, NEW.n); CREATE TRIGGER upd AFTER UPDATE ON counts FOR EACH ROW INSERT "
            "INTO notes VALUES (NEW.`key`, NEW.n)",
        )
        count = "SELECT count(*) FROM notes"

        def noted() -> Any:
            return server.query("killed", count)

        async with counted(dsn, total, table=af.io.mysql).run(
            workers=2,
            checkpoints=tmp_path / "store",
            every="150ms",
            restart=af.fixed_delay(200, "100ms"),
        ) as job:
            ending = asyncio.ensure_future(job.wait())
            for kill in range(3):
                before = noted()

                def has_more(before: Any = before) -> bool:
                    return ending.done() or noted() != before

                await eventually(has_more)
                if kill % 2:
                    server.stop()
                    await asyncio.to_thread(server.start)
                elif workers := open_workers(job):
                    os.kill(workers[kill // 2 % len(workers)].pid, signal.SIGKILL)
            result = await ending
        assert result.restarts >= 1
        rows = server.query("killed", "SELECT * FROM counts ORDER BY `key`")
        assert rows == [row.replace("|", "\t") for row in expected(total)]
        twice = "SELECT 1 FROM notes GROUP BY `key`, n HAVING count(*) > 1"
        assert server.query("killed", twice) == []
        assert server.query("killed", "SELECT count(*) FROM aioflow_staged") == ["0"]
