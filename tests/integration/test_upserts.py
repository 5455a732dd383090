"""Changes of a PostgreSQL table by key, on a real server: their order, refusals, wrong addresses,
and kills of workers and of the server.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import aioflow as af
from aioflow.core.errors import GraphError
from aioflow.io.tables.postgres_tables import CONNECT_TIMEOUT_S, postgres
from aioflow.io.tables.table_sinks import PIECE_ROWS
from tests.integration.processes import eventually, open_workers
from tests.integration.upsert_flows import counted, expected
from tests.io.driver import Runtime, SinkContext, write
from tests.io.postgres_server import USER, PostgresServer, postgres_server


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


async def test_the_latest_row_of_a_key_wins_as_the_database_compares_keys(
    server: PostgresServer, schema: str, dsn: str, ctx: SinkContext
) -> None:
    server.query(
        schema,
        "CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level2', deterministic = "
        "false); CREATE TABLE t (a INT GENERATED ALWAYS AS IDENTITY, b TEXT COLLATE loose, n INT, "
        "doc JSON, kept INT DEFAULT 7, PRIMARY KEY (b, a))",
    )
    rows = [{"a": 1, "b": "Xx"[i % 2], "n": i, "doc": [i]} for i in range(2 * PIECE_ROWS + 5)]
    await write(postgres(dsn, "t", mode="upsert"), ctx, rows)
    last = 2 * PIECE_ROWS + 4
    assert server.query(schema, "SELECT a, n, doc, kept FROM t") == [f"1|{last}|[{last}]|7"]
    await write(
        postgres(dsn, f"{schema}.t", key=["a", "b"], mode="delete"), ctx, [{"a": 1, "b": "X"}]
    )
    assert server.query(schema, "SELECT count(*) FROM t") == ["0"]


async def test_a_deletion_needs_the_key_alone_and_keeps_its_place_in_the_order(
    server: PostgresServer, schema: str, dsn: str, ctx: SinkContext
) -> None:
    server.query(schema, "CREATE TABLE t (id INT PRIMARY KEY, n INT NOT NULL)")
    sink = postgres(dsn, "t", columns=["id", "n"], mode=lambda row: row["op"])
    records = [{"op": "upsert", "id": i, "n": i} for i in range(4)]
    records += [{"op": "delete", "id": 1}, {"op": "delete", "id": 2}]
    records += [{"op": "upsert", "id": 2, "n": 9}]
    await write(sink, ctx, records)
    assert server.query(schema, "SELECT * FROM t ORDER BY id") == ["0|0", "2|9", "3|3"]


async def test_row_without_a_key_or_that_the_table_refuses_fails_before_the_checkpoint(
    server: PostgresServer, schema: str, dsn: str, ctx: SinkContext
) -> None:
    server.query(
        schema,
        "CREATE TABLE t (id INT PRIMARY KEY, x INT CHECK (x < 10), y INT UNIQUE DEFERRABLE, z INT);"
        "CREATE UNIQUE INDEX ON t (z) WHERE x > 0; CREATE TABLE bare (x INT)",
    )
    for options, record, error, message in (
        ({"key": "x"}, {"x": 1}, GraphError, "has no unique constraint on 'x', which an upsert"),
        ({"key": "y"}, {"y": 1}, GraphError, "has no unique constraint on 'y'"),
        ({"key": "z"}, {"z": 1}, GraphError, "has no unique constraint on 'z'"),
        ({"key": "w"}, {"w": 1}, GraphError, "has no column 'w' for key="),
        ({}, {"id": None, "x": 1}, ValueError, "the key 'id' is None"),
        ({}, {"id": 1, "w": 1}, ValueError, "has no column 'w', expected some of"),
        ({}, {"id": 1, "x": 11}, asyncpg.CheckViolationError, "violates check constraint"),
    ):
        with pytest.raises(error, match=message):
            await write(postgres(dsn, "t", mode="upsert", **options), ctx, [record])
    with pytest.raises(GraphError, match="has no primary key: name by key="):
        await write(postgres(dsn, "bare", mode="upsert"), ctx, [{"x": 1}])
    with pytest.raises(GraphError, match="has no table 'absent': create it"):
        await write(postgres(dsn, "absent", mode="upsert"), ctx, [{"x": 1}])
    assert server.query(
        schema, "SELECT (SELECT count(*) FROM t) + (SELECT count(*) FROM aioflow_staged)"
    ) == ["0"]


async def test_a_commit_that_is_repeated_changes_nothing(
    server: PostgresServer, schema: str, dsn: str, ctx: SinkContext
) -> None:
    server.query(schema, "CREATE TABLE t (id INT PRIMARY KEY, n INT)")
    sink = postgres(dsn, "t", mode="upsert")
    writer, committer = sink.writer(ctx), sink.committer()
    await writer.open()
    prepared = []
    for checkpoint_id in (1, 2):
        writer.write_batch([{"id": 1, "n": checkpoint_id}], None)
        prepared.append(await writer.prepare(checkpoint_id))
        await committer.commit(prepared[-1])
    await committer.commit(prepared[0])  # A late copy of the first request.
    assert server.query(schema, "SELECT n FROM t") == ["2"]
    await writer.close()
    await committer.close()


async def test_trials_that_lock_the_same_rows_in_another_order_are_repeated(
    server: PostgresServer, schema: str, dsn: str, ctx: SinkContext
) -> None:
    """One deletes even ids and then replaces the odd ones; the other does the reverse."""
    server.query(schema, "CREATE TABLE t (id INT PRIMARY KEY, n INT)")
    server.query(schema, f"INSERT INTO t SELECT i, 0 FROM generate_series(1, {PIECE_ROWS}) i")
    # Between the two statements of a trial there is time for those of the other.
    server.query(
        schema,
        "CREATE FUNCTION pause() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(0.3); RETURN NULL; END $$; "
        "CREATE TRIGGER pause BEFORE INSERT ON t FOR EACH STATEMENT EXECUTE FUNCTION pause()",
    )

    async def one(subtask: int) -> None:
        def kind(row: dict[str, int]) -> Any:
            return "delete" if (row["id"] % 2 == 0) is (subtask == 0) else "upsert"

        context = SinkContext(ctx.host, runtime=Runtime(subtask_index=subtask, parallelism=2))
        writer = postgres(dsn, "t", columns=["id", "n"], mode=kind).writer(context)
        await writer.open()
        for _ in range(2):
            writer.write_batch([{"id": i + 1, "n": 1} for i in range(PIECE_ROWS)], None)
            await writer.flush()
        await writer.close()

    await asyncio.gather(one(0), one(1))
    assert "deadlock detected" in server.log.read_text()
    assert server.query(schema, "SELECT sum(n) FROM t") == ["0"]


async def test_a_wrong_password_and_a_wrong_host_are_named_within_ten_seconds(
    ctx: SinkContext, tmp_path: Path
) -> None:
    assert CONNECT_TIMEOUT_S < 10
    with postgres_server() as server:
        server.query("public", f"ALTER USER {USER} PASSWORD 'right'")
        hba = server.directory / "data" / "pg_hba.conf"
        hba.write_text("local all all scram-sha-256\n")
        server.reload()
        wrong = server.dsn.replace(USER, f"{USER}:wrong", 1)
        async with asyncio.timeout(10):
            with pytest.raises(asyncpg.InvalidPasswordError) as refused:
                await write(postgres(wrong, "t", mode="upsert"), ctx, [])
        assert any("refused the connection" in note for note in refused.value.__notes__)
        assert "wrong" not in "".join(refused.value.__notes__)
    with socket.socket() as silent:  # Accepts, and never answers.
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        async with asyncio.timeout(10):
            with pytest.raises(
                TimeoutError, match=rf"127\.0\.0\.1:{port} did not answer within 8 s"
            ):
                await write(postgres(f"postgresql://u@127.0.0.1:{port}/d", "t"), ctx, [])
    async with asyncio.timeout(10):
        with pytest.raises(OSError, match=r"the server nowhere\.invalid cannot be reached"):
            await write(postgres("postgresql://u@nowhere.invalid/d", "t"), ctx, [])


async def grown(server: PostgresServer, schema: str) -> None:
    """Returns once more changes are committed than now."""
    count = "SELECT count(*) FROM notes"
    (before,) = server.query(schema, count)
    await eventually(lambda: server.query(schema, count) != [before])


async def test_kills_of_workers_and_of_the_server_leave_the_exact_table(tmp_path: Path) -> None:
    """Each change is applied once: a trigger notes it, and no note comes twice."""
    total = 150_000
    with postgres_server() as server:
        dsn = server.create("killed")
        server.query(
            "killed",
            "CREATE TABLE counts (key INT PRIMARY KEY, n INT);"
            "CREATE TABLE notes (key INT, n INT);"
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "INSERT INTO killed.notes VALUES (NEW.key, NEW.n); RETURN NEW; END $$;"
            "CREATE TRIGGER note AFTER INSERT OR UPDATE ON counts FOR EACH ROW "
            "EXECUTE FUNCTION note()",
        )
        async with counted(dsn, total).run(
            workers=2,
            checkpoints=tmp_path / "store",
            every="150ms",
            restart=af.fixed_delay(200, "100ms"),
        ) as job:
            for kill in range(6):
                await grown(server, "killed")
                if kill % 2:
                    server.crash()
                    await asyncio.sleep(0.3)
                    server.start()
                elif workers := open_workers(job):
                    os.kill(workers[kill // 2 % len(workers)].pid, signal.SIGKILL)
            result = await job.wait()
        assert result.restarts >= 2
        assert server.query("killed", "SELECT * FROM counts ORDER BY key") == expected(total)
        assert (
            server.query("killed", "SELECT 1 FROM notes GROUP BY key, n HAVING count(*) > 1") == []
        )
        assert server.query("killed", "SELECT count(*) FROM aioflow_staged") == ["0"]
