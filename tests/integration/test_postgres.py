"""PostgreSQL tables on a real server: values, keys, refusals, two writers at once, and a
connection that is lost.
"""

from __future__ import annotations

import asyncio
import decimal
import uuid
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import aioflow as af
from aioflow.core.elements import RecordBatch
from aioflow.core.errors import GraphError
from aioflow.io.tables.postgres_tables import postgres
from aioflow.io.tables.table_sinks import PIECE_ROWS
from aioflow.io.tables.table_sources import PAGE_ROWS
from aioflow.operators.call_pool import Retry
from aioflow.operators.sink import SinkOperator
from tests.io.driver import Runtime, SinkContext, read_all, write
from tests.io.postgres_server import PostgresServer, postgres_server


class Count(NamedTuple):
    word: str
    n: int


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


async def test_values_come_out_as_they_went_in(
    server: PostgresServer, schema: str, dsn: str, ctx: SinkContext
) -> None:
    server.query(
        schema,
        "CREATE TABLE t (id UUID PRIMARY KEY, price NUMERIC, tags TEXT[], doc JSONB, raw JSON, "
        "data BYTEA)",
    )
    row = {
        "id": uuid.UUID(int=1), "price": decimal.Decimal("1.10"), "tags": ["a", None],
        "doc": {"a": [1, None]}, "raw": "text", "data": b"\0\xff",
    }  # fmt: skip
    await write(postgres(dsn, "t"), ctx, [row])
    assert await read_all(postgres(dsn, "t"), ctx) == [row]


async def test_a_row_that_the_table_refuses_fails_before_the_checkpoint(
    server: PostgresServer, schema: str, dsn: str, ctx: SinkContext
) -> None:
    server.query(schema, "CREATE TABLE t (x INT NOT NULL CHECK (x < 10))")
    sink = postgres(dsn, "t")
    for refused, message in (
        (11, "violates check constraint"),
        (None, "null value"),
        ("one", "cannot be interpreted as an integer"),
    ):
        with pytest.raises(Exception, match=message) as caught:
            await write(sink, ctx, [{"x": 1}, {"x": refused}])
        assert (
            "aioflow: in table 't', at one of 2 rows that begin with {'x': 1}"
            in caught.value.__notes__
        )
    assert server.query(
        schema, "SELECT (SELECT count(*) FROM t) + (SELECT count(*) FROM aioflow_staged)"
    ) == ["0"]


async def test_rows_of_a_schema_and_of_a_query_are_read_page_by_page(
    server: PostgresServer, schema: str, dsn: str, ctx: SinkContext
) -> None:
    count = 2 * PAGE_ROWS + 7
    server.query(
        schema,
        f"CREATE TABLE t AS SELECT 'w' || i AS word, i AS n FROM generate_series(1, {count}) i",
    )
    expected = [Count(f"w{i}", i) for i in range(1, count + 1)]
    assert await read_all(postgres(dsn, f"{schema}.t", Count, key="n"), ctx) == expected
    source = postgres(dsn, "t", Count, key="n", query="SELECT word, n FROM t WHERE n % 2 = 0")
    assert await read_all(source, ctx) == [one for one in expected if one.n % 2 == 0]


async def test_a_key_that_is_none_is_refused(
    server: PostgresServer, schema: str, dsn: str, ctx: SinkContext
) -> None:
    server.query(schema, "CREATE TABLE t (x INT, y INT); INSERT INTO t VALUES (1, NULL), (1, 2)")
    for source, message in (
        (postgres(dsn, "t"), "has no primary key of one column: name a unique column by key="),
        (postgres(dsn, "t", key="y"), "is NULL in 1 rows"),
        (postgres(dsn, "u", key="y"), "u"),
    ):
        with pytest.raises(Exception, match=message):
            await read_all(source, ctx)
    with pytest.raises(ValueError, match="the key 'x' is 1 in two rows"):
        await read_all(postgres(dsn, "t", key="x"), ctx)
    with pytest.raises(GraphError, match="a query needs key="):
        postgres(dsn, "t", query="SELECT 1")
    with pytest.raises(GraphError, match="has no table 'u': create it"):
        await write(postgres(dsn, "u"), ctx, [{"x": 1}])


async def test_writers_that_open_at_once_make_the_tables_once(
    server: PostgresServer, schema: str, dsn: str, ctx: SinkContext
) -> None:
    server.query(schema, "CREATE TABLE t (x INT)")

    async def one(subtask: int) -> None:
        context = SinkContext(ctx.host, runtime=Runtime(subtask_index=subtask, parallelism=8))
        await write(postgres(dsn, "t"), context, [{"x": subtask}] * (PIECE_ROWS + 1))

    await asyncio.gather(*(one(subtask) for subtask in range(8)))
    assert server.query(schema, "SELECT x, count(*) FROM t GROUP BY x ORDER BY x") == [
        f"{i}|{PIECE_ROWS + 1}" for i in range(8)
    ]
    assert server.query(schema, "SELECT generation FROM aioflow_sinks WHERE subtask = -1") == ["8"]


async def test_a_commit_goes_on_over_a_new_connection(
    server: PostgresServer, schema: str, dsn: str, ctx: SinkContext
) -> None:
    """R22: the connection ends between two commits; the next try connects again."""
    server.query(schema, "CREATE TABLE t (x INT)")
    operator = SinkOperator(postgres(dsn, "t"), Retry(5, backoff="1ms"))
    operator.setup(ctx)  # type: ignore[arg-type]
    operator.initialize_state()
    await operator.open()
    for checkpoint_id in (1, 2):
        operator.process_batch(RecordBatch([{"x": checkpoint_id}], None))
        await operator.snapshot_state(checkpoint_id)
    operator.notify_checkpoint_complete(1)
    await ctx.settled()
    server.query(
        schema,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND "
        "state = 'idle'",
    )
    operator.notify_checkpoint_complete(2)
    await ctx.settled()
    assert server.query(schema, "SELECT x FROM t ORDER BY x") == ["1", "2"]
    await operator.close()


async def test_a_flow_reads_one_table_and_writes_another(
    server: PostgresServer, schema: str, dsn: str
) -> None:
    server.query(
        schema,
        "CREATE TABLE words (id SERIAL PRIMARY KEY, word TEXT); INSERT INTO words (word) VALUES "
        "('a'), ('b'), ('a')",
    )
    server.query(schema, "CREATE TABLE counts (word TEXT, n INT)")
    flow = af.Flow("tables", parallelism=2)
    words = flow.source(af.io.postgres(dsn, "words"))
    words.key_by(lambda row: row["word"]).count().map(lambda pair: Count(*pair)).sink(
        af.io.postgres(dsn, "counts")
    )
    await flow.execute()
    assert server.query(schema, "SELECT word, max(n) FROM counts GROUP BY word ORDER BY word") == [
        "a|2",
        "b|1",
    ]
