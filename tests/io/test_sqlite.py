"""SQLite tables: what can be a row, what is refused and when, and reading in the order of a key."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import enum
import sqlite3
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import aioflow as af
from aioflow.core.errors import GraphError, StateError
from aioflow.io.tables.sqlite_tables import sqlite
from aioflow.io.tables.table_sinks import PIECE_ROWS
from tests.io.driver import SinkContext, read_all, system_context, write


class Count(NamedTuple):
    word: str
    n: int


@dataclass
class Trade:
    symbol: str
    price: float | None = None


@pytest.fixture
async def ctx() -> AsyncIterator[SinkContext]:
    async with system_context() as context:
        yield SinkContext(context.host)


@pytest.fixture
def sql(tmp_path: Path) -> Callable[..., list[Any]]:
    def run(statement: str, *values: Any) -> list[Any]:
        with closing(sqlite3.connect(tmp_path / "a.db")) as connection, connection:
            return connection.execute(statement, values).fetchall()

    return run


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    "records",
    [
        [{"word": "a", "n": 1}, {"n": 2, "word": "b"}],
        [Count("a", 1), Count("b", 2)],
        [("a", 1), ["b", 2]],
    ],
    ids=["dicts in any order", "NamedTuples", "by place"],
)
async def test_records_become_rows(
    tmp_path: Path, ctx: SinkContext, sql: Any, records: list[Any]
) -> None:
    sql("CREATE TABLE counts (word TEXT, n INTEGER)")
    await write(sqlite(tmp_path / "a.db", "counts"), ctx, records)
    assert sql("SELECT word, n FROM counts") == [("a", 1), ("b", 2)]


async def test_columns_that_no_record_has_get_their_default(
    tmp_path: Path, ctx: SinkContext, sql: Any
) -> None:
    sql("CREATE TABLE trades (id INTEGER PRIMARY KEY, symbol TEXT, price REAL DEFAULT 7.5)")
    await write(
        sqlite(tmp_path / "a.db", "trades", columns=["symbol"]),
        ctx,
        [Trade("A", 1.0), {"symbol": "B", "other": 1}],
    )
    assert sql("SELECT * FROM trades") == [(1, "A", 7.5), (2, "B", 7.5)]


async def test_values_are_kept_as_sqlite_has_them(
    tmp_path: Path, ctx: SinkContext, sql: Any
) -> None:
    sql("CREATE TABLE t (x)")
    values = [
        None, True, -(2**63), 1.5, "é", b"\0", Colour.RED,
        datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), datetime.date(2026, 1, 2),
        decimal.Decimal("1.10"), uuid.UUID(int=1),
    ]  # fmt: skip
    await write(sqlite(tmp_path / "a.db", "t"), ctx, [{"x": value} for value in values])
    assert [row[0] for row in sql("SELECT x FROM t")] == [
        None, 1, -(2**63), 1.5, "é", b"\0", "red", "2026-01-02T00:00:00+00:00", "2026-01-02",
        "1.10", str(uuid.UUID(int=1)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("record", "error", "message"),
    [
        ({"x": [1]}, TypeError, r"column 'x' got \[1\] of type list, expected None, a number"),
        (
            {"x": 2**63},
            ValueError,
            "column 'x' got 9223372036854775808, expected an integer of 64 bits",
        ),
        ({"x": 1, "y": 2}, ValueError, r"has no column 'y', expected some of 'x', 'z'"),
        ((1,), ValueError, "expected a record with the columns x, z"),
    ],
)
async def test_a_record_that_is_no_row_is_refused_when_it_is_written(
    tmp_path: Path, ctx: SinkContext, sql: Any, record: Any, error: type[Exception], message: str
) -> None:
    sql("CREATE TABLE t (x, z)")
    with pytest.raises(error, match=message):
        await write(sqlite(tmp_path / "a.db", "t"), ctx, [record])


async def test_all_records_have_the_columns_of_the_first(
    tmp_path: Path, ctx: SinkContext, sql: Any
) -> None:
    sql("CREATE TABLE t (x, y)")
    with pytest.raises(
        ValueError, match=r"got \{'x': 1, 'y': 2\}, expected a record with the columns x"
    ):
        await write(sqlite(tmp_path / "a.db", "t"), ctx, [{"x": 1}, {"x": 1, "y": 2}])


async def test_a_row_that_the_table_refuses_fails_before_the_checkpoint(
    tmp_path: Path, ctx: SinkContext, sql: Any
) -> None:
    """A later error could not be handled: the commit would fail for ever."""
    sql("CREATE TABLE t (x INTEGER NOT NULL CHECK (x < 10))")
    writer = sqlite(tmp_path / "a.db", "t").writer(ctx)  # type: ignore[arg-type]
    await writer.open()
    writer.write_batch([{"x": 1}, {"x": 11}], None)
    with pytest.raises(sqlite3.IntegrityError) as caught:
        await writer.flush()
    assert caught.value.__notes__ == [
        f"aioflow: in table 't' of {tmp_path}/a.db, at row {{'x': 11}}"
    ]
    await writer.close()
    assert (sql("SELECT * FROM t"), sql("SELECT * FROM aioflow_staged")) == ([], [])


async def test_names_with_any_characters_are_quoted(
    tmp_path: Path, ctx: SinkContext, sql: Any
) -> None:
    evil = 'x"; DROP TABLE t; --'
    sql("CREATE TABLE t (id)")
    sql('CREATE TABLE "x""; DROP TABLE t; --" ("a ""b""")')
    await write(sqlite(tmp_path / "a.db", evil), ctx, [{'a "b"': 1}])
    assert await read_all(sqlite(tmp_path / "a.db", evil), ctx) == [{'a "b"': 1}]
    assert sql("SELECT count(*) FROM t") == [(0,)]
    for wrong in ("", "a\0b"):
        with pytest.raises(GraphError, match="expected a name that is not empty"):
            sqlite(tmp_path / "a.db", wrong)


async def test_rows_that_were_staged_and_are_gone_are_an_error_and_not_nothing(
    tmp_path: Path, ctx: SinkContext, sql: Any
) -> None:
    """R23: data lost before its commit stops the job, and is never skipped."""
    sql("CREATE TABLE t (x)")
    sink = sqlite(tmp_path / "a.db", "t")
    writer, committer = sink.writer(ctx), sink.committer(ctx)  # type: ignore[arg-type]
    await writer.open()
    writer.write_batch([{"x": 1}], None)
    prepared = await writer.prepare(3)
    sql("DELETE FROM aioflow_staged")
    with pytest.raises(
        StateError, match=r"0 of 1 pieces .* staged for checkpoint 3 .* the database was set back"
    ):
        await committer.commit(prepared)
    await writer.close()
    await committer.close()


async def test_a_job_restored_from_an_older_savepoint_commits_under_numbers_that_were_used(
    tmp_path: Path, ctx: SinkContext, sql: Any
) -> None:
    """The number of a checkpoint alone never decides that rows are dropped."""
    sql("CREATE TABLE t (x)")
    sink = sqlite(tmp_path / "a.db", "t")
    for value in (1, 2):
        writer, committer = sink.writer(ctx), sink.committer(ctx)  # type: ignore[arg-type]
        writer.restored(5)
        await writer.open()
        writer.write_batch([{"x": value}], None)
        await committer.commit(await writer.prepare(6))
        await writer.close()
        await committer.close()
    assert sql("SELECT x FROM t") == [(1,), (2,)]


async def test_batches_that_rescaled_subtasks_commit_out_of_order_can_be_committed_again(
    tmp_path: Path, ctx: SinkContext, sql: Any
) -> None:
    """Two batches of one writer go to two subtasks at a restore; the next restore commits both
    once more.
    """
    sql("CREATE TABLE t (x)")
    sink = sqlite(tmp_path / "a.db", "t")
    writer, committer = sink.writer(ctx), sink.committer(ctx)  # type: ignore[arg-type]
    await writer.open()
    prepared = []
    for number in (4, 5):
        writer.write_batch([{"x": number}], None)
        prepared.append(await writer.prepare(number))
    older, newer = prepared
    for batch in (newer, older, newer, older):
        await committer.commit(batch)
    await writer.close()
    await committer.close()
    assert sql("SELECT x FROM t") == [(5,), (4,)]


async def test_without_checkpoints_rows_go_straight_into_the_table(
    tmp_path: Path, ctx: SinkContext, sql: Any
) -> None:
    sql("CREATE TABLE t (x)")
    ctx.checkpointing = False
    writer = sqlite(tmp_path / "a.db", "t").writer(ctx)  # type: ignore[arg-type]
    await writer.open()
    writer.write_batch([{"x": i} for i in range(PIECE_ROWS)], None)
    assert writer.full
    await writer.flush()
    assert sql("SELECT count(*) FROM t") == [(PIECE_ROWS,)]
    await writer.close()
    assert sql("SELECT name FROM sqlite_master") == [("t",)]


async def test_without_checkpoints_a_row_does_not_wait_for_many(tmp_path: Path, sql: Any) -> None:
    sql("CREATE TABLE counts (word TEXT, n INTEGER)")
    words: asyncio.Queue[Count] = asyncio.Queue()
    flow = af.Flow("slow")
    flow.source(af.io.queue(words)).sink(sqlite(tmp_path / "a.db", "counts"))
    async with flow.run() as job:
        await words.put(Count("a", 1))
        async with asyncio.timeout(10):
            while not sql("SELECT * FROM counts"):
                await asyncio.sleep(0.01)
        await job.cancel()


async def test_the_file_and_the_table_must_exist(
    tmp_path: Path, ctx: SinkContext, sql: Any
) -> None:
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        await read_all(sqlite(tmp_path / "none.db", "t"), ctx)
    sql("CREATE TABLE t (x)")
    with pytest.raises(GraphError, match="has no table 'u'"):
        await read_all(sqlite(tmp_path / "a.db", "u"), ctx)
    with pytest.raises(GraphError, match="has no table 'u': create it before the job starts"):
        await write(sqlite(tmp_path / "a.db", "u"), ctx, [{"x": 1}])


async def test_rows_are_read_by_type_and_in_the_order_of_the_key(
    tmp_path: Path, ctx: SinkContext, sql: Any
) -> None:
    sql("CREATE TABLE t (word TEXT, n INTEGER)")
    for word, n in (("b", 2), ("a", 1), ("c", 3)):
        sql("INSERT INTO t VALUES (?, ?)", word, n)
    path = tmp_path / "a.db"
    assert await read_all(sqlite(path, "t"), ctx) == [
        {"word": "b", "n": 2},
        {"word": "a", "n": 1},
        {"word": "c", "n": 3},
    ]
    assert await read_all(sqlite(path, "t", Count, key="word"), ctx) == [
        Count("a", 1),
        Count("b", 2),
        Count("c", 3),
    ]
    assert await read_all(sqlite(path, "t", columns=["n"], key="n"), ctx) == [
        {"n": 1},
        {"n": 2},
        {"n": 3},
    ]


async def test_rows_that_come_in_while_it_reads_are_for_another_run(
    tmp_path: Path, ctx: SinkContext, sql: Any
) -> None:
    sql("CREATE TABLE t (x)")
    sql("INSERT INTO t VALUES (1)")
    source = sqlite(tmp_path / "a.db", "t")
    splits = await source.discover(ctx.host)
    sql("INSERT INTO t VALUES (2)")
    assert await read_all(source, ctx, splits) == [{"x": 1}]


@pytest.mark.parametrize(
    ("table", "key", "message"),
    [
        (
            "(x INTEGER, y TEXT PRIMARY KEY) WITHOUT ROWID",
            "rowid",
            "has no rowid: name a unique column by key=, expected one of x, y",
        ),
        ("(x, y)", "z", "has no column 'z' for key="),
        ("(x, y)", "y", "is NULL in 1 rows"),
    ],
)
async def test_a_key_that_is_none_is_refused(
    tmp_path: Path, ctx: SinkContext, sql: Any, table: str, key: str, message: str
) -> None:
    sql(f"CREATE TABLE t {table}")
    if key == "y":
        sql("INSERT INTO t (x) VALUES (1)")
    with pytest.raises(GraphError, match=message):
        await read_all(sqlite(tmp_path / "a.db", "t", key=key), ctx)


async def test_a_key_of_two_rows_is_an_error_and_no_row_is_passed_over(
    tmp_path: Path, ctx: SinkContext, sql: Any
) -> None:
    sql("CREATE TABLE t (x)")
    for _ in range(2):
        sql("INSERT INTO t VALUES (1)")
    with pytest.raises(ValueError, match="the key 'x' is 1 in two rows, expected it to be unique"):
        await read_all(sqlite(tmp_path / "a.db", "t", key="x"), ctx)


async def test_a_flow_reads_one_table_and_writes_another(tmp_path: Path, sql: Any) -> None:
    sql("CREATE TABLE words (word TEXT)")
    sql("CREATE TABLE counts (word TEXT, n INTEGER)")
    for word in ("a", "b", "a"):
        sql("INSERT INTO words VALUES (?)", word)
    flow = af.Flow("tables")
    words = flow.source(af.io.sqlite(tmp_path / "a.db", "words"))
    words.key_by(lambda row: row["word"]).count().map(lambda pair: Count(*pair)).sink(
        af.io.sqlite(tmp_path / "a.db", "counts")
    )
    await flow.execute()
    assert sql("SELECT word, max(n) FROM counts GROUP BY word") == [("a", 2), ("b", 1)]


class Switched(NamedTuple):
    x: int
    on: bool
    ever: bool | None = None


async def test_a_bool_is_read_as_it_was_written(tmp_path: Path, ctx: SinkContext, sql: Any) -> None:
    sql('CREATE TABLE t (x INT, "on" INT, ever INT)')
    rows = [Switched(1, True, False), Switched(0, False)]
    await write(sqlite(tmp_path / "a.db", "t"), ctx, rows)
    assert await read_all(sqlite(tmp_path / "a.db", "t", Switched), ctx) == rows
