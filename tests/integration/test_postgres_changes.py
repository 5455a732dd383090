"""Changes of PostgreSQL's tables on a real server: the snapshot and what follows, types, restarts
in the midst of both, the slot, and what is refused.
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
from uuid import UUID

import asyncpg
import pytest

import aioflow as af
from aioflow.core.errors import GraphError, StateError
from aioflow.io.capture.postgres_catalog import drop_postgres_slot
from aioflow.io.capture.postgres_change_source import postgres_changes
from aioflow.io.changes import upserts_of
from aioflow.operators.source import Split
from tests.integration.change_flows import (
    TABLES,
    Writer,
    at_position,
    change_through_kills,
    copied,
    lines,
    opened,
    plain,
    reads_as_changed,
)
from tests.io.driver import Context, read_all, system_context, take
from tests.io.postgres_server import USER, PostgresServer, postgres_server


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server(wal_level="logical", max_replication_slots="40") as running:
        yield running


@pytest.fixture
async def ctx() -> AsyncIterator[Context]:
    async with system_context() as context:
        context.replays = True
        yield context


async def test_rows_come_first_and_then_each_change_in_the_order_of_the_commits(
    server: PostgresServer, schema: str, dsn: str, ctx: Context
) -> None:
    await server.run(
        schema,
        "CREATE TABLE t (id INT PRIMARY KEY, n INT); INSERT INTO t VALUES (1, 10), (2, 20);"
        "CREATE TABLE u (id INT PRIMARY KEY); ALTER TABLE u REPLICA IDENTITY FULL;"
        "CREATE TABLE other (id INT)",
    )
    source = postgres_changes(dsn, ["t", f"{schema}.u"], slot=schema)
    async with opened(source, ctx) as reader:
        read = await take(reader, 2)
        assert [plain(one) for one in read] == [
            ("read", "t", {"id": i}, None, {"id": i, "n": 10 * i}) for i in (1, 2)
        ]
        await server.run(
            schema,
            "BEGIN; INSERT INTO t VALUES (3, 30); INSERT INTO u VALUES (7), (8); COMMIT;"
            "BEGIN; INSERT INTO t VALUES (9, 9); ROLLBACK; INSERT INTO other VALUES (1);"
            "UPDATE t SET n = n + 1 WHERE id = 1; UPDATE t SET id = 5 WHERE id = 2;"
            "UPDATE u SET id = 9 WHERE id = 8; DELETE FROM u WHERE id = 7; DELETE FROM t "
            "WHERE id = 5; TRUNCATE t, u",
        )
        full = f"{schema}.u"
        changes = await take(reader, 10)
        assert [plain(one) for one in changes] == [
            ("insert", "t", {"id": 3}, None, {"id": 3, "n": 30}),
            ("insert", full, {"id": 7}, None, {"id": 7}),
            ("insert", full, {"id": 8}, None, {"id": 8}),
            ("update", "t", {"id": 1}, None, {"id": 1, "n": 11}),
            ("update", "t", {"id": 2}, None, {"id": 5, "n": 20}),
            ("update", full, {"id": 8}, {"id": 8}, {"id": 9}),
            ("delete", full, {"id": 7}, {"id": 7}, None),
            ("delete", "t", {"id": 5}, None, None),
            ("truncate", "t", {}, None, None),
            ("truncate", full, {}, None, None),
        ]
        assert changes[0].position == changes[2].position != changes[3].position
        now_ms = ctx.host.clock.wall_ms()
        assert all(0 <= now_ms - change.timestamp_ms < 600_000 for change in changes)
        assert reader.timestamps[-1] == changes[-1].timestamp_ms


class Row(NamedTuple):
    id: int
    name: str | None


async def test_values_of_the_snapshot_and_of_changes_are_the_same(
    server: PostgresServer, schema: str, dsn: str, ctx: Context
) -> None:
    await server.run(
        schema,
        "CREATE TYPE mood AS ENUM ('sad', 'so so'); CREATE DOMAIN cents AS NUMERIC;"
        "CREATE TABLE t (id INT PRIMARY KEY, big BIGINT, price NUMERIC, cents cents, x FLOAT8, "
        "ok BOOL, at TIMESTAMPTZ, plain TIMESTAMP, day DATE, hour TIME, doc JSONB, raw JSON, "
        "uid UUID, data BYTEA, mood mood, moods mood[], tags TEXT[], grid INT[][], gone TEXT, "
        "twice INT GENERATED ALWAYS AS (id * 2) STORED, never DATE, net INET)",
    )
    values = (
        "9007199254740993, 1.10, 2.50, 1.5, true, '2024-05-06 07:08:09.5+02', "
        "'2024-05-06 07:08:09', '2024-05-06', '07:08:09', '{\"a\": [1, null]}', '\"text\"', "
        "'00000000-0000-0000-0000-000000000001', '\\x00ff', 'so so', '{sad,\"so so\"}', "
        '\'{"a,\\"\\\\\\\\",NULL,"NULL",""}\', \'{{1,2},{3,4}}\', NULL, DEFAULT, \'infinity\', '
        "'10.0.0.1'"
    )
    await server.run(schema, f"INSERT INTO t VALUES (1, {values})")
    source = postgres_changes(dsn, "t", slot=schema)
    async with opened(source, ctx) as reader:
        (first,) = await take(reader, 1)
        await server.run(schema, f"INSERT INTO t VALUES (2, {values})")
        (second,) = await take(reader, 1)
    expected = {
        "big": 9007199254740993, "price": Decimal("1.10"), "cents": Decimal("2.50"), "x": 1.5,
        "ok": True, "at": datetime.datetime(2024, 5, 6, 5, 8, 9, 500_000, datetime.UTC),
        "plain": datetime.datetime(2024, 5, 6, 7, 8, 9), "day": datetime.date(2024, 5, 6),
        "hour": datetime.time(7, 8, 9), "doc": {"a": [1, None]}, "raw": "text", "uid": UUID(int=1),
        "data": b"\0\xff", "mood": "so so", "moods": ["sad", "so so"],
        "tags": ['a,"\\\\', None, "NULL", ""], "grid": [[1, 2], [3, 4]], "gone": None,
        "never": "infinity", "net": "10.0.0.1",
    }  # fmt: skip
    assert first.after == {"id": 1, **expected}
    assert second.after == {"id": 2, **expected}


async def test_a_large_value_that_stays_is_named_or_taken_from_the_row_before(
    server: PostgresServer, schema: str, dsn: str, ctx: Context
) -> None:
    large = "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 500) i)"
    await server.run(
        schema,
        "CREATE TABLE t (id INT PRIMARY KEY, n INT, large TEXT); CREATE TABLE u (LIKE t INCLUDING "
        f"ALL); ALTER TABLE u REPLICA IDENTITY FULL; INSERT INTO t VALUES (1, 1, {large}); "
        "INSERT INTO u SELECT * FROM t",
    )
    source = postgres_changes(dsn, ["t", "u"], slot=schema)
    async with opened(source, ctx) as reader:
        rows = await take(reader, 2)
        await server.run(schema, "UPDATE t SET n = 2; UPDATE u SET n = 2")
        lacking, whole = await take(reader, 2)
    assert len(rows[0].after["large"]) == 16_000
    assert lacking.after == {"id": 1, "n": 2}
    assert lacking.unchanged == ("large",)
    assert whole.after == {**rows[1].after, "n": 2}
    assert whole.before == rows[1].after
    with pytest.raises(StateError, match=r"lacks the large value of 'large'.*REPLICA IDENTITY"):
        upserts_of(lacking)


async def test_a_column_of_the_key_that_was_renamed_stays_in_the_key(
    server: PostgresServer, schema: str, dsn: str, ctx: Context
) -> None:
    await server.run(
        schema,
        "CREATE TABLE t (id INT PRIMARY KEY, n INT); INSERT INTO t VALUES (1, 1)",
    )
    source = postgres_changes(dsn, "t", slot=schema)
    async with opened(source, ctx) as reader:
        await take(reader, 1)
        for sql in (
            "ALTER TABLE t RENAME COLUMN id TO number",
            "INSERT INTO t VALUES (2, 2)",
            "DELETE FROM t WHERE number = 1",
        ):
            await server.run(schema, sql)
        assert [plain(one) for one in await take(reader, 2)] == [
            ("insert", "t", {"number": 2}, None, {"number": 2, "n": 2}),
            ("delete", "t", {"number": 1}, None, None),
        ]


async def test_a_table_that_was_renamed_is_read_further(
    server: PostgresServer, schema: str, dsn: str, ctx: Context
) -> None:
    await server.run(
        schema,
        "CREATE TABLE t (id INT PRIMARY KEY, n INT); INSERT INTO t VALUES (1, 1)",
    )
    source = postgres_changes(dsn, "t", slot=schema)
    async with opened(source, ctx) as reader:
        await take(reader, 1)
        for sql in ("ALTER TABLE t RENAME TO u", "INSERT INTO u VALUES (2, 2)"):
            await server.run(schema, sql)
        assert [plain(one) for one in await take(reader, 1)] == [
            ("insert", "t", {"id": 2}, None, {"id": 2, "n": 2}),
        ]


async def test_changes_whose_key_is_gone_are_refused(
    server: PostgresServer, schema: str, dsn: str, ctx: Context
) -> None:
    for table, change in {
        "t": "RENAME COLUMN id TO number; ALTER TABLE t REPLICA IDENTITY FULL",
        "u": "DROP COLUMN id",
    }.items():
        await server.run(schema, f"CREATE TABLE {table} (id SERIAL PRIMARY KEY, n INT)")
        source = postgres_changes(dsn, table, slot=f"{table}_of_lost_key")
        async with opened(source, ctx) as reader:
            for sql in (
                f"INSERT INTO {table} (n) VALUES (1)",
                f"ALTER TABLE {table} {change}",
                f"INSERT INTO {table} (n) VALUES (2)",
            ):
                await server.run(schema, sql)
            with pytest.raises(af.StateError, match=f"the primary key of table '{table}' was id"):
                await take(reader, 2)


async def test_rows_of_a_type_and_what_is_not_of_it(
    server: PostgresServer, schema: str, dsn: str, ctx: Context
) -> None:
    await server.run(schema, "CREATE TABLE t (id INT PRIMARY KEY, name TEXT, more INT)")
    bad: af.OutputTag[Any] = af.OutputTag("bad")
    source = postgres_changes(dsn, "t", Row, slot=schema, on_error=bad)
    async with opened(source, ctx) as reader:
        await server.run(schema, "INSERT INTO t VALUES (1, 'a')")
        assert (await take(reader, 1))[0].after == Row(1, "a")


@pytest.mark.parametrize("cut", [0, 1, 3, 5, 6, 8, 11])
async def test_a_restart_anywhere_goes_on_behind_the_last_change(
    server: PostgresServer, schema: str, cut: int, ctx: Context
) -> None:
    """The snapshot, a transaction of three tables, and the rows that changed meanwhile."""
    schema = f"{schema}_{cut}"
    dsn = server.create(schema)
    await server.run(
        schema,
        "CREATE TABLE t (a TEXT, b INT, n INT, PRIMARY KEY (b, a)); CREATE TABLE u (id UUID "
        "PRIMARY KEY, n INT);"
        "INSERT INTO t SELECT chr(65 + i % 2), i / 2, 0 FROM generate_series(0, 4) i; "
        "INSERT INTO u VALUES ('00000000-0000-0000-0000-000000000001', 1)",
    )
    source = postgres_changes(dsn, ["t", "u"], slot=schema, until="latest")
    (split,) = await source.discover()
    reader, _ = await at_position(source, ctx, split.position)
    first = await take(reader, min(cut, 6), 1)
    position = reader.position("0")
    await reader.close()
    await server.run(
        schema,
        "BEGIN; UPDATE t SET n = 1; INSERT INTO u VALUES ('00000000-0000-0000-0000-000000000002', "
        "2); DELETE FROM t WHERE b = 1; COMMIT; UPDATE t SET b = 9 - b; DELETE FROM u WHERE n = 1",
    )
    (split,) = await source.discover()
    reader, _ = await at_position(source, ctx, position, split.payload)
    first += await take(reader, cut - len(first), 1)
    position = reader.position("0")
    await take(reader, 2)
    await reader.close()
    rest = await read_all(source, ctx, [Split("0", position, split.payload)], 2)
    told = [(one.position, one.kind, one.table, repr(one.key)) for one in first + rest]
    assert len(set(told)) == len(told)
    tables: dict[str, dict[Any, Any]] = {"t": {}, "u": {}}
    for change in first + rest:
        rows = tables[change.table]
        key = tuple(change.key.values())
        if change.kind in ("insert", "read"):
            assert key not in rows
        else:
            del rows[key]
        if change.after is not None:
            new = tuple(change.after[name] for name in change.key)
            assert new not in rows
            rows[new] = change.after
    assert sorted(tables["t"]) == [(7, "A"), (9, "A"), (9, "B")]
    assert [row["n"] for row in tables["t"].values()] == [1, 1, 1]
    assert [row["n"] for row in tables["u"].values()] == [2]


@pytest.mark.parametrize("seed", range(4))
async def test_random_transactions_and_restarts_give_the_table(
    server: PostgresServer, schema: str, seed: int, ctx: Context
) -> None:
    name = f"{schema}_{seed}"
    dsn = server.create(name)
    full = [f"ALTER TABLE {table} REPLICA IDENTITY FULL" for table in "ab"]
    await asyncio.to_thread(server.query, name, "; ".join([*TABLES, *full]))
    source = postgres_changes(dsn, ["a", "b"], slot=name)
    ended = postgres_changes(dsn, ["a", "b"], slot=name, until="latest")

    async def change(sql: str) -> None:
        await asyncio.to_thread(server.query, name, sql)

    found = await reads_as_changed(source, ended, ctx, Random(seed), change)
    for table in "ab":
        rows = await asyncio.to_thread(server.query, name, f"SELECT * FROM {table}")
        assert lines(found.get(table, {}), "|", "") == sorted(rows)


async def test_a_table_without_a_key_is_read_again_after_a_restart_in_its_midst(
    server: PostgresServer, schema: str, dsn: str, ctx: Context
) -> None:
    await server.run(
        schema,
        "CREATE TABLE t (n INT); ALTER TABLE t REPLICA IDENTITY FULL;INSERT INTO t VALUES (1), (2)",
    )
    source = postgres_changes(dsn, "t", slot=schema, until="latest")
    reader, _ = await at_position(source, ctx, (await source.discover())[0].position)
    (first,) = await take(reader, 1, 1)
    position = reader.position("0")
    await reader.close()
    await server.run(schema, "UPDATE t SET n = 3 WHERE n = 1")
    (split,) = await source.discover()
    rest = await read_all(source, ctx, [Split("0", position, split.payload)])
    assert first.after == {"n": 1}
    assert [(one.kind, one.after) for one in rest] == [
        ("read", {"n": 2}), ("read", {"n": 3}), ("update", {"n": 3}),
    ]  # fmt: skip


async def _confirmed(server: PostgresServer, schema: str) -> str:
    (found,) = await server.run(
        schema,
        f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{schema}'",
    )
    return found


async def test_the_slot_moves_when_a_checkpoint_is_complete_also_while_nothing_comes(
    server: PostgresServer, schema: str, dsn: str, ctx: Context
) -> None:
    await server.run(schema, "CREATE TABLE t (id INT PRIMARY KEY); CREATE TABLE other (id INT)")
    source = postgres_changes(dsn, "t", slot=schema, snapshot=False)
    async with opened(source, ctx) as reader:
        async with asyncio.timeout(120):
            while not await server.run(
                schema,
                f"SELECT 1 FROM pg_replication_slots WHERE active AND slot_name = '{schema}'",
            ):
                await asyncio.sleep(0.05)
            began = await _confirmed(server, schema)
            await server.run(schema, "INSERT INTO t VALUES (1)")
            await take(reader, 1)
            while reader.position("0")[2]:  # The end of the transaction is still to come.
                await asyncio.sleep(0.01)
            reader.checkpoint(1)
            await asyncio.sleep(0.2)
            assert await _confirmed(server, schema) == began
            reader.checkpoint_completed(1)
            while await _confirmed(server, schema) == began:
                await asyncio.sleep(0.05)
            # Other tables fill the log: the position follows the keepalives.
            await server.run(schema, "INSERT INTO other SELECT generate_series(1, 1000)")
            (end,) = await server.run(schema, "SELECT pg_current_wal_lsn()")
            checkpoint_id = 1
            while await server.run(
                schema,
                f"SELECT confirmed_flush_lsn < '{end}' FROM pg_replication_slots "
                f"WHERE slot_name = '{schema}'",
            ) == ["t"]:
                checkpoint_id += 1
                reader.checkpoint(checkpoint_id)
                reader.checkpoint_completed(checkpoint_id)
                await asyncio.sleep(0.05)


async def test_a_flow_begins_where_the_slot_stands_without_a_snapshot(
    server: PostgresServer, schema: str, dsn: str, ctx: Context
) -> None:
    await server.run(schema, "CREATE TABLE t (id INT PRIMARY KEY); INSERT INTO t VALUES (1)")
    source = postgres_changes(dsn, "t", slot=schema, snapshot=False, until="latest")
    assert await read_all(source, ctx) == []
    await server.run(schema, "INSERT INTO t VALUES (2)")
    assert [one.after for one in await read_all(source, ctx)] == [{"id": 2}]
    assert [one.after for one in await read_all(source, ctx)] == [{"id": 2}]  # No checkpoint.
    again = postgres_changes(dsn, "t", slot=schema, until="latest")
    assert [one.kind for one in await read_all(again, ctx)] == ["read", "read"]
    assert await drop_postgres_slot(dsn, schema)
    assert not await drop_postgres_slot(dsn, schema)
    assert (
        await server.run(schema, f"SELECT 1 FROM pg_publication WHERE pubname = '{schema}'") == []
    )


async def test_a_large_transaction_waits_at_the_server(
    server: PostgresServer, schema: str, dsn: str, ctx: Context
) -> None:
    await server.run(schema, "CREATE TABLE t (id INT PRIMARY KEY, pad TEXT)")
    source = postgres_changes(dsn, "t", slot=schema, snapshot=False, until="latest")
    await read_all(source, ctx)
    await server.run(
        schema,
        "INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(1, 30000) i",
    )
    (split,) = await source.discover()
    reader: Any = source.reader(ctx)
    await reader.open([split])
    try:
        read = await take(reader, 1)
        for _ in range(20):
            await asyncio.sleep(0.02)
        assert reader.pending_records < 8192
        read += await take(reader, 1 << 60)
        assert [one.after["id"] for one in read] == list(range(1, 30_001))
    finally:
        await reader.close()


async def test_a_server_that_restarts_goes_on_in_the_snapshot_and_in_the_log(
    server: PostgresServer, schema: str, dsn: str, ctx: Context
) -> None:
    await server.run(
        schema,
        "CREATE TABLE t (id INT PRIMARY KEY, pad TEXT); INSERT INTO t SELECT i, repeat('x', 2000) "
        "FROM generate_series(1, 20000) i",
    )
    source = postgres_changes(dsn, "t", slot=schema)
    async with opened(source, ctx) as reader:
        rows: set[int] = set()

        async def read_until(wanted: set[int]) -> None:
            async with asyncio.timeout(60):
                while rows != wanted:
                    for change in await take(reader, 1):
                        assert (change.kind == "delete") is (change.key["id"] in rows)
                        (rows.discard if change.kind == "delete" else rows.add)(change.key["id"])

        async def restart(sql: str) -> None:
            await asyncio.to_thread(server.crash)
            await asyncio.to_thread(server.start, wal_level="logical", max_replication_slots="40")
            await server.run(schema, sql)

        await read_until(set(range(1, 101)))
        await restart("DELETE FROM t WHERE id > 19000 OR id < 3; INSERT INTO t VALUES (99999, 'y')")
        await read_until({*range(3, 19_001), 99_999})
        await restart("INSERT INTO t VALUES (99998, 'y')")
        await read_until({*range(3, 19_001), 99_998, 99_999})


async def test_what_cannot_be_read_is_refused_with_the_way_out(
    server: PostgresServer, schema: str, dsn: str, ctx: Context
) -> None:
    await server.run(
        schema,
        "CREATE TABLE t (id INT PRIMARY KEY); CREATE TABLE bare (id INT); CREATE VIEW seen AS "
        "SELECT * FROM t; CREATE TABLE u (id INT "
        "PRIMARY KEY); CREATE ROLE reader LOGIN; CREATE ROLE replicator LOGIN REPLICATION; "
        f"GRANT USAGE ON SCHEMA {schema} TO reader, replicator",
    )
    as_reader = dsn.replace(f"{USER}@", "reader@")
    as_replicator = dsn.replace(f"{USER}@", "replicator@")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for given, tables, message in (
        (f"postgresql://{USER}@127.0.0.1:{port}/postgres", "t", "cannot be reached"),
        (dsn, "absent", "has no table 'absent': create it"),
        (dsn, "seen", "'seen' is a view, whose changes the server does not log"),
        (dsn, "bare", "has no replica identity.*add a primary key"),
        (as_replicator, "t", "may not create the publication.*CREATE PUBLICATION"),
    ):
        with pytest.raises(Exception, match=message):
            await postgres_changes(given, tables, slot=schema).discover()
    await postgres_changes(dsn, "t", slot=schema).discover()  # Makes the publication.
    for given, tables, message in (
        (as_replicator, "t", "may not read table 't': GRANT SELECT ON .* TO"),
        (dsn, ["t", "u"], "lacks table 'u': ALTER PUBLICATION"),
    ):
        with pytest.raises(GraphError, match=message):
            await postgres_changes(given, tables, slot=schema).discover()
    await server.run(schema, "GRANT SELECT ON t TO reader, replicator")
    with pytest.raises(GraphError, match=r"may not replicate.*ALTER ROLE name REPLICATION"):
        await postgres_changes(as_reader, "t", slot=schema).discover()
    await postgres_changes(as_replicator, "t", slot=schema).discover()
    await server.run(
        schema,
        f"SELECT pg_create_logical_replication_slot('{schema}_x', 'test_decoding')",
    )
    with pytest.raises(GraphError, match=r"with the plugin 'test_decoding'.*name another"):
        await postgres_changes(dsn, "t", slot=f"{schema}_x", publication=schema).discover()
    await server.run(schema, f"SELECT pg_drop_replication_slot('{schema}_x')")


async def test_a_slot_that_another_job_uses_or_was_dropped_is_named(
    server: PostgresServer, schema: str, dsn: str, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioflow.io.capture.postgres_catalog.IN_USE_WAIT_S", 0.3)
    await server.run(schema, "CREATE TABLE t (id INT PRIMARY KEY); INSERT INTO t VALUES (1)")
    source = postgres_changes(dsn, "t", slot=schema, until="latest")
    (split,) = await source.discover()
    unending = postgres_changes(dsn, "t", slot=schema)
    reader, _ = await at_position(unending, ctx, split.position)
    try:
        await take(reader, 1)
        await server.run(schema, "INSERT INTO t VALUES (2)")
        await take(reader, 1)
        with pytest.raises(GraphError, match=r"is in use by another connection.*name another"):
            await unending.discover()
        position = reader.position("0")
    finally:
        await reader.close()
    await source.discover()
    await server.run(
        schema,
        f"SELECT pg_replication_slot_advance('{schema}', pg_current_wal_lsn())",
    )
    await server.run(schema, "INSERT INTO t VALUES (3)")
    await server.run(
        schema,
        f"SELECT pg_replication_slot_advance('{schema}', pg_current_wal_lsn())",
    )
    with pytest.raises(StateError, match=r"and the checkpoint is at .*fresh=True"):
        await read_all(source, ctx, [Split("0", position)])
    await drop_postgres_slot(dsn, schema)
    await source.discover()
    with pytest.raises(StateError, match=r"was dropped, so the changes after .*fresh=True"):
        await read_all(source, ctx, [Split("0", position)])


async def test_a_server_without_logical_log_or_that_removed_it_is_named(ctx: Context) -> None:
    with postgres_server() as server:
        dsn = server.create("one")
        server.query("one", "CREATE TABLE t (id INT PRIMARY KEY)")
        source = postgres_changes(dsn, "t", slot="one", until="latest")
        with pytest.raises(GraphError, match="has wal_level = replica, expected logical: set wal"):
            await source.discover()
        server.crash()
        server.start(wal_level="logical", max_slot_wal_keep_size="1MB")
        await read_all(source, ctx)
        (begin,) = server.query(
            "one", "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots"
        )
        for _ in range(4):
            server.query("one", "INSERT INTO t SELECT coalesce(max(id), 0) + 1 FROM t")
            server.query("one", "SELECT pg_switch_wal()")
        server.query("one", "CHECKPOINT")
        with pytest.raises(StateError, match=r"has removed the log that slot 'one' needs.*fresh"):
            await read_all(source, ctx, [Split("0", ["log", int(begin), 0, 0, None])])
        server.query("one", f"ALTER USER {USER} PASSWORD 'right'")
        (server.directory / "data" / "pg_hba.conf").write_text("local all all scram-sha-256\n")
        server.reload()
        wrong = dsn.replace(USER, f"{USER}:wrong", 1)
        async with asyncio.timeout(10):
            with pytest.raises(asyncpg.InvalidPasswordError) as refused:
                await postgres_changes(wrong, "t", slot="one").discover()
        assert any("refused the connection" in note for note in refused.value.__notes__)
        right = postgres_changes(dsn.replace(USER, f"{USER}:right", 1), "t", slot="one")
        await right.discover()  # The replication connection proves the password by SCRAM, too.


async def test_the_flow_of_the_page_keeps_a_copy_in_another_schema(
    server: PostgresServer, schema: str, dsn: str
) -> None:
    page = Path("docs/howto/changes.md").read_text()
    example: dict[str, Any] = {}
    exec(re.findall(r"```python[^\n]*\n(.*?)```", page, re.DOTALL)[0], example)
    target = server.create(f"{schema}_copy")
    create = "CREATE TABLE orders (id INT PRIMARY KEY, n INT);"
    await server.run(f"{schema}_copy", create)
    await server.run(
        schema,
        f"{create} INSERT INTO orders SELECT i, i FROM generate_series(1, 5) i",
    )

    async def reaches(rows: list[str]) -> None:
        async with asyncio.timeout(60):
            while rows != await server.run(f"{schema}_copy", "SELECT * FROM orders ORDER BY id"):
                await asyncio.sleep(0.1)

    flow = example["copy"](dsn, target)
    async with flow.run(checkpoints="memory://copied", every="200ms") as job:
        await reaches([f"{i}|{i}" for i in range(1, 6)])
        await server.run(
            schema,
            "UPDATE orders SET id = 9 WHERE id = 1; DELETE FROM orders WHERE id = 2; "
            "INSERT INTO orders VALUES (6, 6); UPDATE orders SET n = 0 WHERE id = 3",
        )
        await reaches(["3|0", "4|4", "5|5", "6|6", "9|1"])
        await job.cancel()
    assert await drop_postgres_slot(dsn, "orders")


async def test_kills_of_workers_and_of_the_server_leave_the_exact_copy(tmp_path: Path) -> None:
    """The state fails for each change that is doubled or missing."""
    settings = {"wal_level": "logical"}
    with postgres_server(**settings) as server:
        dsn, target = server.create("killed"), server.create("killed_copy")
        table = "CREATE TABLE t (id INT PRIMARY KEY, n INT)"
        server.query(
            "killed", f"{table}; INSERT INTO t SELECT i, 0 FROM generate_series(1, 6000) i"
        )
        server.query("killed_copy", table)

        open_connection: list[asyncpg.Connection] = []

        async def execute(statements: list[str]) -> list[int] | None:
            lost = False
            while True:
                try:
                    if not open_connection:
                        open_connection.append(await asyncpg.connect(dsn))
                    if lost:  # The transaction may be committed, or not.
                        found = await open_connection[0].fetch("SELECT id FROM t")
                        return [one[0] for one in found]
                    await open_connection[0].execute("; ".join(["BEGIN", *statements, "COMMIT"]))
                    return None
                except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                    lost = True
                    while open_connection:
                        open_connection.pop().terminate()
                    await asyncio.sleep(0.1)

        changes = af.io.postgres_changes(dsn, "t", slot="killed")
        flow = copied(changes, af.io.postgres(target, "t", mode="upsert"))

        def crash() -> None:
            server.crash()
            server.start(**settings)

        async def same() -> bool:
            query = "SELECT * FROM t ORDER BY id"
            wanted = await asyncio.to_thread(server.query, "killed", query)
            return wanted == await asyncio.to_thread(server.query, "killed_copy", query)

        try:
            await change_through_kills(flow, tmp_path / "store", Writer(execute), crash, same)
        finally:
            while open_connection:
                await open_connection.pop().close()


def test_upserts_stand_on_the_source() -> None:
    changes = postgres_changes("postgresql://h/d", "t")
    with pytest.raises(GraphError, match=r"upserts.. stands behind 'filter'.*call it directly on"):
        af.Flow("f").source(changes).filter(lambda change: True).upserts()
    with pytest.raises(GraphError, match="on_truncate is 'skip', expected 'fail' or 'ignore'"):
        af.Flow("f").source(changes).upserts(on_truncate="skip")  # type: ignore[arg-type]


async def test_a_script_in_sql_reads_tables_whose_rows_change(
    server: PostgresServer, schema: str, dsn: str
) -> None:
    await server.run(
        schema,
        "CREATE TABLE orders (id INT PRIMARY KEY, item TEXT NOT NULL, price NUMERIC(9, 2) NOT NULL,"
        " at TIMESTAMPTZ); CREATE TABLE items (name TEXT PRIMARY KEY, kind TEXT);"
        "CREATE TABLE totals (kind TEXT PRIMARY KEY, n INT, total NUMERIC);"
        "CREATE TABLE dear (id INT PRIMARY KEY, twice NUMERIC, at TIMESTAMPTZ);"
        "INSERT INTO items VALUES ('tea', 'food'), ('cup', 'ware');"
        "INSERT INTO orders VALUES (1, 'tea', 1.50, '2026-01-31Z'), (2, 'cup', 7, NULL),"
        "(3, 'tea', 9, NULL)",
    )

    def table(name: str, columns: str, **options: str) -> str:
        given = ", ".join(f"'{one}' = '{text}'" for one, text in {"dsn": dsn, **options}.items())
        return f"CREATE TABLE {name} ({columns}) WITH ({given});"

    def changes(name: str, columns: str) -> str:
        more = {"connector": "postgres_changes", "tables": name, "slot": f"{schema}_{name}"}
        return table(name, columns, **more)

    flow = af.Flow("changes", parallelism=2)
    flow.sql_script(
        changes(
            "orders",
            "id BIGINT PRIMARY KEY NOT ENFORCED, item STRING NOT NULL, price DECIMAL(9, 2) NOT NULL"
            ", at TIMESTAMP_LTZ(3), twice AS price * 2",
        )
        + changes("items", "name STRING PRIMARY KEY NOT ENFORCED, kind STRING")
        + table(
            "totals", "kind STRING PRIMARY KEY NOT ENFORCED, n BIGINT, total DECIMAL",
            connector="postgres", table="totals",
        )
        + table(
            "dear", "id BIGINT PRIMARY KEY NOT ENFORCED, twice DECIMAL, at TIMESTAMP_LTZ(3)",
            connector="postgres", table="dear",
        )
        + """
        INSERT INTO totals SELECT kind, count(*), sum(price) FROM orders JOIN items ON item = name
          GROUP BY kind;
        INSERT INTO dear SELECT id, twice, at FROM orders WHERE twice > 5"""
    )  # fmt: skip

    async def becomes(query: str, expected: list[str]) -> None:
        async with asyncio.timeout(120):
            while await server.run(schema, query) != expected:
                await asyncio.sleep(0.05)

    totals, dear = "SELECT * FROM totals ORDER BY 1", "SELECT id, twice FROM dear ORDER BY 1"
    async with flow.run(checkpoints="memory://postgres-changes", every="100ms") as job:
        await becomes(totals, ["food|2|10.50", "ware|1|7.00"])
        await becomes(dear, ["2|14.00", "3|18.00"])
        await server.run(
            schema,
            "UPDATE orders SET price = 4, at = '2026-02-01Z' WHERE id = 1;"
            "DELETE FROM orders WHERE id = 2; UPDATE orders SET id = 5 WHERE id = 3;"
            "UPDATE items SET kind = 'drink' WHERE name = 'tea'",
        )
        await becomes(totals, ["drink|2|13.00"])
        await becomes(dear, ["1|8.00", "5|18.00"])
        at = "SELECT at AT TIME ZONE 'UTC' FROM dear WHERE id = 1"
        assert await server.run(schema, at) == ["2026-02-01 00:00:00"]
        await job.stop()
