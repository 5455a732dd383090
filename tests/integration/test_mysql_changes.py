"""Changes of MariaDB's tables on a real server: the snapshot and what follows, types, restarts in
the midst of both, the log, and what is refused.
"""

from __future__ import annotations

import asyncio
import datetime
import re
import socket
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

import aioflow as af
from aioflow.core.errors import GraphError, StateError
from aioflow.io.capture.mysql_change_source import mysql_changes
from aioflow.io.tables.mysql_client import MysqlConnection, is_away
from aioflow.operators.source import Split
from tests.integration.change_flows import (
    TABLES,
    Writer,
    applied,
    at_position,
    change_through_kills,
    check_files,
    copied,
    lines,
    plain,
    reads_as_changed,
)
from tests.io.driver import Context, read_all, system_context, take
from tests.io.mysql_server import LOGGED, PASSWORD, USER, MysqlServer, mysql_server


@pytest.fixture(scope="module")
def server() -> Iterator[MysqlServer]:
    with mysql_server(*LOGGED) as running:
        yield running


@pytest.fixture
async def ctx() -> AsyncIterator[Context]:
    async with system_context() as context:
        context.replays = True
        yield context


async def test_rows_come_first_and_then_each_change_in_the_order_of_the_commits(
    server: MysqlServer, schema: str, dsn: str, ctx: Context
) -> None:
    server.query(
        schema,
        "CREATE TABLE t (id INT PRIMARY KEY, n INT); INSERT INTO t VALUES (1, 10), (2, 20);"
        "CREATE TABLE u (id INT); CREATE TABLE other (id INT)",
    )
    full = f"{schema}.u"
    source = mysql_changes(dsn, ["t", full])
    reader, _ = await at_position(source, ctx, (await source.discover())[0].position)
    try:
        read = await take(reader, 2)
        assert [plain(one) for one in read] == [
            ("read", "t", {"id": i}, None, {"id": i, "n": 10 * i}) for i in (1, 2)
        ]
        await asyncio.to_thread(
            server.query,
            schema,
            "BEGIN; INSERT INTO t VALUES (3, 30); INSERT INTO u VALUES (7), (NULL); COMMIT;"
            "BEGIN; INSERT INTO t VALUES (9, 9); ROLLBACK; INSERT INTO other VALUES (1);"
            "UPDATE t SET n = n + 1 WHERE id = 1; UPDATE t SET id = 5 WHERE id = 2;"
            "DELETE FROM u WHERE id = 7; DELETE FROM t WHERE id = 5; "
            f"TRUNCATE /* all */ TABLE t; TRUNCATE `{schema}`.u; TRUNCATE other; "
            "INSERT INTO t VALUES (1, 1)",
        )
        changes = await take(reader, 10)
        assert [plain(one) for one in changes] == [
            ("insert", "t", {"id": 3}, None, {"id": 3, "n": 30}),
            ("insert", full, {}, None, {"id": 7}),
            ("insert", full, {}, None, {"id": None}),
            ("update", "t", {"id": 1}, {"id": 1, "n": 10}, {"id": 1, "n": 11}),
            ("update", "t", {"id": 2}, {"id": 2, "n": 20}, {"id": 5, "n": 20}),
            ("delete", full, {}, {"id": 7}, None),
            ("delete", "t", {"id": 5}, {"id": 5, "n": 20}, None),
            ("truncate", "t", {}, None, None),
            ("truncate", full, {}, None, None),
            ("insert", "t", {"id": 1}, None, {"id": 1, "n": 1}),
        ]
        assert changes[0].position == changes[2].position != changes[3].position
        assert re.fullmatch(r"log\.\d{6}:\d+", changes[0].position)
        now_ms = ctx.host.clock.wall_ms()
        assert all(0 <= now_ms - change.timestamp_ms < 600_000 for change in changes)
        assert reader.timestamps[-1] == changes[-1].timestamp_ms
    finally:
        await reader.close()


TYPES = {
    "tiny TINYINT UNSIGNED": ("250", 250),
    "small SMALLINT": ("-5", -5),
    "medium MEDIUMINT": ("-70000", -70000),
    "mediums MEDIUMINT UNSIGNED": ("16000000", 16_000_000),
    "made YEAR": ("2024", 2024),
    "ints INT UNSIGNED": ("4000000000", 4_000_000_000),
    "bigs BIGINT UNSIGNED": ("18446744073709551615", 2**64 - 1),
    "big BIGINT": ("-9223372036854775808", -(2**63)),
    "price DECIMAL(20, 5)": ("-12345678901.0012", Decimal("-12345678901.00120")),
    "whole DECIMAL(10, 0)": ("42", Decimal(42)),
    "part DECIMAL(9, 9)": ("-0.123456789", Decimal("-0.123456789")),
    "short FLOAT": ("1.1", 1.100000023841858),
    "x DOUBLE": ("0.1", 0.1),
    "day DATE": ("'2024-02-29'", datetime.date(2024, 2, 29)),
    "no_day DATE": ("'0000-00-00'", "0000-00-00"),
    "at DATETIME": ("'2024-05-06 07:08:09'", datetime.datetime(2024, 5, 6, 7, 8, 9)),
    "at1 DATETIME(1)": (
        "'2024-05-06 07:08:09.6'",
        datetime.datetime(2024, 5, 6, 7, 8, 9, 600_000),
    ),
    "at6 DATETIME(6)": (
        "'1000-05-06 07:08:09.678901'",
        datetime.datetime(1000, 5, 6, 7, 8, 9, 678_901),
    ),
    "no_month DATETIME(3)": ("'2024-00-00 01:00:00'", "2024-00-00 01:00:00.000"),
    "moment TIMESTAMP NULL": (
        "'2024-05-06 07:08:09'",
        datetime.datetime(2024, 5, 6, 4, 8, 9, tzinfo=datetime.UTC),
    ),
    "moment5 TIMESTAMP(5) NULL": (
        "'2024-05-06 07:08:09.67890'",
        datetime.datetime(2024, 5, 6, 4, 8, 9, 678_900, datetime.UTC),
    ),
    "no_moment TIMESTAMP(2) NULL": ("'0000-00-00'", "0000-00-00 00:00:00.00"),
    "hour TIME": ("'-12:34:56'", -datetime.timedelta(hours=12, minutes=34, seconds=56)),
    "hour3 TIME(3)": ("'-00:00:00.250'", -datetime.timedelta(milliseconds=250)),
    "hour6 TIME(6)": (
        "'838:59:58.123456'",
        datetime.timedelta(hours=838, minutes=59, seconds=58, microseconds=123_456),
    ),
    "mood ENUM('ä', 'b')": ("'ä'", "ä"),
    "no_mood ENUM('ä', 'b')": ("'wrong'", ""),
    "tags SET('x', 'ä', 'z')": ("'z,x'", "x,z"),
    "no_tags SET('x')": ("''", ""),
    "bit1 BIT(1)": ("b'1'", 1),
    "bit17 BIT(17)": ("b'10000000000000001'", 65537),
    "code CHAR(5)": ("'ab  '", "ab"),
    "name VARCHAR(10)": ("'ä€'", "ä€"),
    "long_name VARCHAR(300)": ("'z'", "z"),
    "western VARCHAR(20) CHARACTER SET latin1": ("'é€\x81'", "é€\x81"),
    "greek TEXT CHARACTER SET greek": ("'Ω'", "Ω"),
    "wide VARCHAR(10) CHARACTER SET utf16": ("'😀'", "😀"),
    "fixed BINARY(4)": ("'a\\0'", b"a\0\0\0"),
    "bytes VARBINARY(10)": ("'\\0b'", b"\0b"),
    "data BLOB": ("x'00ff'", b"\0\xff"),
    "pages LONGTEXT": ("repeat('ä', 70000)", "ä" * 70_000),
    "doc JSON": ('\'{"a": [1, null, "ü"]}\'', {"a": [1, None, "ü"]}),
    "place POINT": (
        "ST_PointFromText('POINT(1 2)')",
        bytes.fromhex("000000000101000000000000000000f03f0000000000000040"),
    ),
    "gone INT": ("NULL", None),
    "twice INT AS (id * 0 + 6) VIRTUAL": ("DEFAULT", 6),
    "stored INT AS (id * 0 + 7) STORED": ("DEFAULT", 7),
}
"""Column -> its value as SQL, and as read. The session of the writer is at +03:00."""


async def test_values_of_the_snapshot_and_of_changes_are_the_same(
    server: MysqlServer, schema: str, dsn: str, ctx: Context
) -> None:
    server.query(
        schema,
        f"CREATE TABLE t (id INT PRIMARY KEY, {', '.join(TYPES)}) CHARACTER SET utf8mb4",
    )
    insert = (
        "SET sql_mode = '', time_zone = '+03:00'; INSERT INTO t VALUES "
        f"(%s, {', '.join(sql for sql, _ in TYPES.values())})"
    )
    server.query(schema, insert % 1)
    source = mysql_changes(dsn, "t")
    reader, _ = await at_position(source, ctx)
    try:
        (first,) = await take(reader, 1)
        await asyncio.to_thread(server.query, schema, insert % 2)
        (second,) = await take(reader, 1)
    finally:
        await reader.close()
    expected = {name.split()[0]: value for name, (_, value) in TYPES.items()}
    assert first.after == {"id": 1, **expected}
    assert second.after == {"id": 2, **expected}


async def test_columns_are_those_of_the_time_of_the_change(
    server: MysqlServer, schema: str, dsn: str, ctx: Context
) -> None:
    server.query(schema, "CREATE TABLE t (id INT PRIMARY KEY, n INT); INSERT INTO t VALUES (1, 1)")
    source = mysql_changes(dsn, "t")
    reader, _ = await at_position(source, ctx)
    try:
        await take(reader, 1)
        position = reader.position("0")
        await asyncio.to_thread(
            server.query,
            schema,
            "INSERT INTO t VALUES (2, 2); ALTER TABLE t RENAME COLUMN id TO number; "
            "ALTER TABLE t ADD COLUMN more TEXT DEFAULT 'x' FIRST; UPDATE t SET n = 3 WHERE "
            "number = 1; CREATE TABLE new LIKE t; INSERT INTO new SELECT * FROM t; "
            "RENAME TABLE t TO old, new TO t; DELETE FROM t WHERE number = 1",
        )
        wanted = [
            ("insert", "t", {"id": 2}, None, {"id": 2, "n": 2}),
            (
                "update", "t", {"number": 1}, {"more": "x", "number": 1, "n": 1},
                {"more": "x", "number": 1, "n": 3},
            ),
            ("delete", "t", {"number": 1}, {"more": "x", "number": 1, "n": 3}, None),
        ]  # fmt: skip
        assert [plain(one) for one in await take(reader, 3)] == wanted
        again, _ = await at_position(source, ctx, position)
        try:  # The table is another one by now.
            assert [plain(one) for one in await take(again, 3)] == wanted
        finally:
            await again.close()
        await asyncio.to_thread(server.query, schema, "ALTER TABLE t DROP PRIMARY KEY")
        await asyncio.to_thread(server.query, schema, "INSERT INTO t VALUES ('y', 7, 7)")
        with pytest.raises(StateError, match="the primary key of table 't' was id, and is no lon"):
            await take(reader, 1)
    finally:
        await reader.close()


async def test_a_table_that_goes_is_named(
    server: MysqlServer, schema: str, dsn: str, ctx: Context
) -> None:
    create = "CREATE TABLE t (id INT PRIMARY KEY)"
    server.query(schema, "CREATE TABLE u (id INT)")
    for statement, message in (
        ("DROP TABLE u; RENAME TABLE t TO v", "table 't' was dropped or renamed: create it again"),
        (f"DROP TABLE t; {create}", "table 't', or a partition of it, was dropped .*fresh=True"),
    ):
        server.query(schema, create)
        reader, _ = await at_position(mysql_changes(dsn, "t", snapshot=False), ctx)
        try:
            while reader.position("0") is None:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(server.query, schema, statement)
            with pytest.raises(StateError, match=message):
                await take(reader, 1)
        finally:
            await reader.close()


class Row(NamedTuple):
    id: int
    ok: bool
    day: datetime.date | None = None


async def test_rows_of_a_type_and_what_is_not_of_it(
    server: MysqlServer, schema: str, dsn: str, ctx: Context
) -> None:
    server.query(schema, "CREATE TABLE t (id INT PRIMARY KEY, ok BOOL, day DATE, more INT)")
    bad: af.OutputTag[Any] = af.OutputTag("bad")
    server.query(
        schema,
        "SET sql_mode = ''; INSERT INTO t VALUES (1, true, '2024-05-06', 0), (2, false, "
        "'0000-00-00', 0)",
    )
    for on_error in (bad, "skip"):
        source = mysql_changes(dsn, "t", Row, on_error=on_error, until="latest")
        assert [one.after for one in await read_all(source, ctx)] == [
            Row(1, True, datetime.date(2024, 5, 6))
        ]
    assert len(ctx.sides) == 1


@pytest.mark.parametrize("cut", [0, 1, 3, 5, 6, 8, 11])
async def test_a_restart_anywhere_goes_on_behind_the_last_change(
    server: MysqlServer, schema: str, cut: int, ctx: Context
) -> None:
    """The snapshot, a transaction of two tables, and the rows that changed meanwhile."""
    schema = f"{schema}_{cut}"
    dsn = server.create(schema)
    server.query(
        schema,
        "CREATE TABLE t (a VARCHAR(9), b INT, n INT, PRIMARY KEY (b, a)); CREATE TABLE u (day DATE "
        "PRIMARY KEY, n INT); INSERT INTO t VALUES ('A', 0, 0), ('B', 0, 0), ('A', 1, 0), "
        "('B', 1, 0), ('A', 2, 0); INSERT INTO u VALUES ('2024-05-06', 1)",
    )
    source = mysql_changes(dsn, ["t", "u"], until="latest")
    (split,) = await source.discover()
    reader, _ = await at_position(source, ctx, split.position)
    first = await take(reader, min(cut, 6), 1)
    position = reader.position("0")
    await reader.close()
    await asyncio.to_thread(
        server.query,
        schema,
        "BEGIN; UPDATE t SET n = 1; INSERT INTO u VALUES ('2024-05-07', 2); DELETE FROM t WHERE "
        "b = 1; COMMIT; UPDATE t SET b = 9 - b; DELETE FROM u WHERE n = 1",
    )
    (split,) = await source.discover()
    reader, _ = await at_position(source, ctx, position, split.payload)
    first += await take(reader, cut - len(first), 1)
    position = reader.position("0")
    await take(reader, 2)
    await reader.close()
    rest = await read_all(source, ctx, [Split("0", position, split.payload)], 2)
    tables = applied(first + rest)
    assert sorted(tables["t"]) == [(7, "A"), (9, "A"), (9, "B")]
    assert [row["n"] for row in tables["t"].values()] == [1, 1, 1]
    assert [row["n"] for row in tables["u"].values()] == [2]


@pytest.mark.parametrize("seed", range(4))
async def test_random_transactions_and_restarts_give_the_table(
    server: MysqlServer, schema: str, seed: int, ctx: Context
) -> None:
    name = f"{schema}_{seed}"
    dsn = server.create(name)
    server.query(name, "; ".join(TABLES))

    async def change(sql: str) -> None:
        await asyncio.to_thread(server.query, name, sql)

    source, ended = mysql_changes(dsn, ["a", "b"]), mysql_changes(dsn, ["a", "b"], until="latest")
    found = await reads_as_changed(source, ended, ctx, Random(seed), change)
    for table in "ab":
        rows = await asyncio.to_thread(server.query, name, f"SELECT * FROM {table}")
        assert lines(found.get(table, {}), "\t", "NULL") == sorted(rows)


async def test_the_place_of_a_snapshot_is_exact_where_the_server_does_not_tell_it(
    server: MysqlServer, schema: str, dsn: str, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on MySQL: the tables are locked for a moment, while other programs change them."""
    rows_of = MysqlConnection.rows

    async def rows(self: MysqlConnection, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return [] if "binlog_snapshot" in sql else await rows_of(self, sql, *values)

    monkeypatch.setattr(MysqlConnection, "rows", rows)
    server.query(schema, "CREATE TABLE t (id INT PRIMARY KEY AUTO_INCREMENT, n INT)")
    write = "INSERT INTO t (n) VALUES (1); " * 200 + "DELETE FROM t WHERE id % 3 = 0"
    for _ in range(3):
        writing = asyncio.create_task(asyncio.to_thread(server.query, schema, write))
        reader, _ = await at_position(mysql_changes(dsn, "t"), ctx)
        try:
            read = await take(reader, 1, 1)
            await writing
            server.query(schema, "INSERT INTO t VALUES (999999, 0)")
            async with asyncio.timeout(60):
                while read[-1].key != {"id": 999_999} or read[-1].kind == "delete":
                    read += await take(reader, 1)
        finally:
            await reader.close()
        found = await asyncio.to_thread(server.query, schema, "SELECT * FROM t")
        assert lines(applied(read)["t"], "\t", "NULL") == sorted(found)
        server.query(schema, "DELETE FROM t WHERE id = 999999")


async def test_a_flow_without_a_snapshot_begins_at_the_end_of_the_log(
    server: MysqlServer, schema: str, dsn: str, ctx: Context
) -> None:
    server.query(schema, "CREATE TABLE t (id INT PRIMARY KEY); INSERT INTO t VALUES (1)")
    ended = mysql_changes(dsn, "t", snapshot=False, until="latest")
    assert await read_all(ended, ctx) == []
    reader, _ = await at_position(mysql_changes(dsn, "t", snapshot=False), ctx)
    try:
        while reader.position("0") is None:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(server.query, schema, "INSERT INTO t VALUES (2)")
        assert [one.after for one in await take(reader, 1)] == [{"id": 2}]
    finally:
        await reader.close()


async def test_a_large_transaction_waits_at_the_server(
    server: MysqlServer, schema: str, dsn: str, ctx: Context
) -> None:
    server.query(schema, "CREATE TABLE t (id INT PRIMARY KEY, pad TEXT)")
    source = mysql_changes(dsn, "t", snapshot=False, until="latest")
    reader, _ = await at_position(mysql_changes(dsn, "t", snapshot=False), ctx)
    try:
        while reader.position("0") is None:
            await asyncio.sleep(0.01)
        position = reader.position("0")
    finally:
        await reader.close()
    await asyncio.to_thread(
        server.query, schema, "INSERT INTO t SELECT seq, repeat('x', 2000) FROM seq_1_to_30000"
    )
    (split,) = await source.discover()
    reader, _ = await at_position(source, ctx, position, split.payload)
    try:
        read = await take(reader, 1)
        for _ in range(20):
            await asyncio.sleep(0.02)
        assert reader.pending_records < 16_384
        read += await take(reader, 5_000 - len(read), 500)
        position = reader.position("0")
        await reader.close()
        reader, _ = await at_position(source, ctx, position, split.payload)
        read += await take(reader, 1 << 60)
        assert [one.after["id"] for one in read] == list(range(1, 30_001))
    finally:
        await reader.close()


async def test_a_server_that_restarts_goes_on_in_the_snapshot_and_in_the_log(
    server: MysqlServer, schema: str, dsn: str, ctx: Context
) -> None:
    server.query(
        schema,
        "CREATE TABLE t (id INT PRIMARY KEY, pad TEXT); INSERT INTO t SELECT seq, "
        "repeat('x', 2000) FROM seq_1_to_20000",
    )
    reader, _ = await at_position(mysql_changes(dsn, "t"), ctx)
    try:
        rows: set[int] = set()

        async def read_until(wanted: set[int]) -> None:
            async with asyncio.timeout(60):
                while rows != wanted:
                    for change in await take(reader, 1):
                        assert (change.kind == "delete") is (change.key["id"] in rows)
                        (rows.discard if change.kind == "delete" else rows.add)(change.key["id"])

        async def restart(sql: str) -> None:
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
            await asyncio.to_thread(server.query, schema, sql)

        await read_until(set(range(1, 101)))
        await restart("DELETE FROM t WHERE id > 19000 OR id < 3; INSERT INTO t VALUES (99999, 'y')")
        await read_until({*range(3, 19_001), 99_999})
        await restart("INSERT INTO t VALUES (99998, 'y')")
        await read_until({*range(3, 19_001), 99_998, 99_999})
    finally:
        await reader.close()


async def test_what_cannot_be_read_is_refused_with_the_way_out(
    server: MysqlServer, schema: str, dsn: str, ctx: Context
) -> None:
    server.query(
        schema,
        "CREATE TABLE t (id INT PRIMARY KEY); CREATE VIEW seen AS SELECT * FROM t; "
        "CREATE TABLE plain (id INT) ENGINE = Aria; CREATE TABLE ids (id UUID); "
        "CREATE TABLE child (id INT PRIMARY KEY, t INT, CONSTRAINT up FOREIGN KEY (t) REFERENCES "
        "t (id) ON DELETE CASCADE); "
        f"CREATE USER reader IDENTIFIED BY '{PASSWORD}'; GRANT SELECT ON {schema}.* TO reader; "
        f"CREATE USER seer IDENTIFIED BY '{PASSWORD}'; GRANT BINLOG MONITOR ON *.* TO seer; "
        f"GRANT SELECT ON {schema}.t TO seer",
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for given, tables, message in (
        (f"mysql://{USER}:{PASSWORD}@127.0.0.1:{port}/x", "t", "cannot be reached"),
        (dsn, "absent", "has no table 'absent'.*create it"),
        (dsn, "seen", "'seen' is of the kind 'VIEW'.*expected a table of InnoDB"),
        (dsn, "plain", "with the engine Aria, expected a table of InnoDB"),
        (dsn, "ids", "column 'id' of table 'ids' has the type uuid, which is not read"),
        (dsn, "child", "foreign key 'up' of table 'child'.*on_cascade='ignore'"),
        (dsn.replace(USER, "reader"), "t", "GRANT REPLICATION SLAVE, REPLICATION CLIENT"),
        (dsn.replace(USER, "seer"), "t", "GRANT REPLICATION SLAVE, REPLICATION CLIENT"),
    ):
        with pytest.raises(Exception, match=message):
            await mysql_changes(given, tables).discover()
    await mysql_changes(dsn, "child", on_cascade="ignore").discover()


async def test_changes_that_the_log_tells_in_part_are_refused(
    server: MysqlServer, schema: str, dsn: str, ctx: Context
) -> None:
    server.query(schema, "CREATE TABLE t (id INT PRIMARY KEY, n INT); INSERT INTO t VALUES (1, 1)")
    for i, (statement, message) in enumerate(
        {
            "SET binlog_format = STATEMENT; INSERT INTO t VALUES (%s, 1)": "only its text",
            "SET binlog_row_image = MINIMAL; UPDATE t SET n = n + 1 WHERE id < %s": "only a part",
            "XA START 'x'; INSERT INTO t VALUES (%s, 1); XA END 'x'; XA PREPARE 'x'; "
            "XA COMMIT 'x'": "an XA transaction changed table 't'",
        }.items()
    ):
        reader, _ = await at_position(mysql_changes(dsn, "t", snapshot=False), ctx)
        try:
            while reader.position("0") is None:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(server.query, schema, statement % (10 + i))
            with pytest.raises(StateError, match=f"{message}.*fresh=True"):
                await take(reader, 1)
        finally:
            await reader.close()


async def test_a_server_whose_settings_do_not_fit_or_whose_log_is_gone_is_named(
    ctx: Context,
) -> None:
    with mysql_server(*LOGGED) as server:
        dsn = server.create("one")
        server.query("one", "CREATE TABLE t (id INT PRIMARY KEY)")
        source = mysql_changes(dsn, "t", until="latest")
        for name, value, wanted in (
            ("binlog_format", "MIXED", "ROW"),
            ("binlog_row_image", "MINIMAL", "FULL"),
            ("binlog_row_metadata", "NO_LOG", "FULL"),
        ):
            server.query("one", f"SET GLOBAL {name} = {value}")
            with pytest.raises(GraphError, match=f"has {name} = {value}, expected {wanted}: SET G"):
                await source.discover()
            server.query("one", f"SET GLOBAL {name} = {wanted}")
        reader, _ = await at_position(source, ctx, None, (await source.discover())[0].payload)
        while not reader.finished:
            assert reader.poll_batch(1) is None
            await asyncio.sleep(0.01)
        position = reader.position("0")
        await reader.close()
        server.query("one", "SET GLOBAL binlog_row_metadata = NO_LOG")
        server.query("one", "INSERT INTO t VALUES (1)")
        server.query("one", "SET GLOBAL binlog_row_metadata = FULL")
        (split,) = await source.discover()
        with pytest.raises(StateError, match="does not name the columns of table 't'"):
            await read_all(source, ctx, [Split("0", position, split.payload)])
        server.query("one", "FLUSH BINARY LOGS; INSERT INTO t VALUES (2)")
        while len(server.query("one", "SHOW BINARY LOGS")) > 1:  # A reader may still hold a file.
            server.query("one", "PURGE BINARY LOGS TO 'log.000002'")
        with pytest.raises(StateError, match=r"has removed the log after log.000001.*fresh=True"):
            await read_all(source, ctx, [Split("0", position)])
        (split,) = await source.discover()
        position = ["log", split.payload, 0, 0, None, 1]
        await asyncio.sleep(0)
        server.query("one", "RESET MASTER")
        with pytest.raises(StateError, match=r"removed the log after log.000002|was reset"):
            await read_all(source, ctx, [Split("0", position)])
        server.query("one", "FLUSH BINARY LOGS; " + "INSERT INTO t (id) VALUES (9); DELETE FROM t "
                     "WHERE id = 9; " * 20)  # fmt: skip
        with pytest.raises(StateError, match=r"the server's log was reset: log.000002"):
            await read_all(source, ctx, [Split("0", position)])
        server.restart_without("--log-bin=log")
        with pytest.raises(GraphError, match="has log_bin = OFF, expected ON: set log-bin and"):
            await source.discover()


async def test_a_transaction_that_a_crash_cut_off_is_not_read(
    server: MysqlServer, schema: str, dsn: str, ctx: Context
) -> None:
    """The end of a file is cut off within a transaction, as a crash leaves it."""
    server.query(schema, "CREATE TABLE t (id INT PRIMARY KEY)")
    reader, _ = await at_position(mysql_changes(dsn, "t"), ctx)
    while reader.position("0") is None or reader.position("0")[0] != "log":
        await asyncio.sleep(0.01)
    position = reader.position("0")
    await reader.close()
    server.query(schema, "INSERT INTO t VALUES (1); INSERT INTO t VALUES (2)")
    ((file, size, *_),) = [line.split("\t") for line in server.query(schema, "SHOW MASTER STATUS")]
    server.stop()
    with (server.directory / "data" / file).open("r+b") as log:
        log.truncate(int(size) - 31)  # The event of the commit.
    server.start()
    server.query(schema, "INSERT INTO t VALUES (3)")
    source = mysql_changes(dsn, "t", until="latest")
    (split,) = await source.discover()
    read = await read_all(source, ctx, [Split("0", position, split.payload)])
    assert [one.key["id"] for one in read] == [1, 3]


async def test_kills_of_workers_and_of_the_server_leave_the_exact_copies(
    server: MysqlServer, tmp_path: Path
) -> None:
    """The state fails for each change that is doubled or missing."""
    dsn, target = server.create("killed"), server.create("killed_copy")
    table = "CREATE TABLE t (id INT PRIMARY KEY, n INT)"
    server.query("killed", f"{table}; INSERT INTO t SELECT seq, 0 FROM seq_1_to_6000")
    server.query("killed_copy", table)
    opened_: list[MysqlConnection] = []

    async def execute(statements: list[str]) -> list[int] | None:
        lost = False
        while True:
            try:
                if not opened_:
                    opened_.append(await MysqlConnection.open(dsn, "writer"))
                if lost:  # The transaction may be committed, or not.
                    return [one[0] for one in await opened_[0].rows("SELECT id FROM t")]
                block = "; ".join(["START TRANSACTION", *statements, "COMMIT"])
                await opened_[0].execute(f"BEGIN NOT ATOMIC {block}; END")
                return None
            except Exception as error:
                if not is_away(error):
                    raise
                lost = True
                while opened_:
                    opened_.pop().abort()
                await asyncio.sleep(0.1)

    def crash() -> None:
        server.stop()
        server.start()

    async def rows(database: str) -> list[list[int]]:
        found = await asyncio.to_thread(server.query, database, "SELECT * FROM t ORDER BY id")
        return [[int(cell) for cell in line.split("\t")] for line in found]

    async def same() -> bool:
        return await rows("killed") == await rows("killed_copy")

    changes = mysql_changes(dsn, "t")
    flow = copied(changes, af.io.mysql(target, "t", mode="upsert"), tmp_path / "files")
    try:
        await change_through_kills(flow, tmp_path / "store", Writer(execute), crash, same)
    finally:
        while opened_:
            await opened_.pop().close()
    check_files(tmp_path / "files", await rows("killed"))


async def test_the_flow_of_the_page_keeps_a_copy_in_another_database(
    server: MysqlServer, schema: str, dsn: str
) -> None:
    page = await asyncio.to_thread(Path("docs/howto/changes.md").read_text)
    example: dict[str, Any] = {}
    exec(re.findall(r'```python title="copied_mysql.py"\n(.*?)```', page, re.DOTALL)[0], example)
    copy = schema[:40] + "_copy"
    target = server.create(copy)
    create = "CREATE TABLE orders (id INT PRIMARY KEY, n INT)"
    server.query(copy, create)
    server.query(schema, f"{create}; INSERT INTO orders VALUES (1, 1), (2, 2), (3, 3)")
    async with example["copy"](dsn, target).run(
        checkpoints="memory://copied", every="200ms"
    ) as job:
        await asyncio.sleep(0.5)
        await asyncio.to_thread(
            server.query,
            schema,
            "UPDATE orders SET id = 9 WHERE id = 1; DELETE FROM orders WHERE id = 2; UPDATE orders "
            "SET n = 0 WHERE id = 3",
        )
        async with asyncio.timeout(60):
            while await asyncio.to_thread(
                server.query, copy, "SELECT * FROM orders ORDER BY id"
            ) != ["3\t0", "9\t1"]:
                await asyncio.sleep(0.1)
        await job.cancel()


async def test_a_script_in_sql_reads_a_table_whose_rows_change(
    server: MysqlServer, schema: str, dsn: str
) -> None:
    server.query(
        schema,
        "CREATE TABLE orders (id INT PRIMARY KEY, item VARCHAR(9), price DECIMAL(9, 2));"
        "CREATE TABLE totals (item VARCHAR(9) PRIMARY KEY, total DECIMAL(9, 2));"
        "INSERT INTO orders VALUES (1, 'tea', 1.50), (2, 'cup', 7)",
    )
    flow = af.Flow("changes")
    flow.sql_script(f"""
        CREATE TABLE orders (id BIGINT PRIMARY KEY NOT ENFORCED, item STRING, price DECIMAL(9, 2))
          WITH ('connector' = 'mysql_changes', 'dsn' = '{dsn}', 'tables' = 'orders');
        CREATE TABLE totals (item STRING PRIMARY KEY NOT ENFORCED, total DECIMAL(9, 2))
          WITH ('connector' = 'mysql', 'dsn' = '{dsn}', 'table' = 'totals');
        INSERT INTO totals SELECT item, sum(price) FROM orders GROUP BY item""")

    async def becomes(expected: list[str]) -> None:
        query = "SELECT CONCAT(item, '|', total) FROM totals ORDER BY 1"
        async with asyncio.timeout(120):
            while await asyncio.to_thread(server.query, schema, query) != expected:
                await asyncio.sleep(0.05)

    async with flow.run(checkpoints="memory://mysql-changes", every="100ms") as job:
        await becomes(["cup|7.00", "tea|1.50"])
        change = (
            "UPDATE orders SET item = 'tea' WHERE id = 2; INSERT INTO orders VALUES (3, 'x', 1)"
        )
        await asyncio.to_thread(server.query, schema, change)
        await becomes(["tea|8.50", "x|1.00"])
        await job.stop()
