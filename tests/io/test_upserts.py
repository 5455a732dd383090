"""Changes of a SQLite table by key: upserts, deletions, a kind by record, and what is refused."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.core.errors import GraphError
from aioflow.io.tables.postgres_tables import postgres
from aioflow.io.tables.sqlite_tables import sqlite
from aioflow.io.tables.table_sinks import PIECE_ROWS, Piece, decode_piece
from tests.io.driver import SinkContext, system_context, write


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


async def test_the_latest_row_of_a_key_wins_over_batches_and_checkpoints(
    tmp_path: Path, ctx: SinkContext, sql: Any
) -> None:
    sql("CREATE TABLE t (a INT, b TEXT, n INT, kept INT DEFAULT 7, PRIMARY KEY (a, b))")
    sink = sqlite(tmp_path / "a.db", "t", mode="upsert")
    rows = [{"a": i % 3, "b": "x", "n": i} for i in range(2 * PIECE_ROWS + 5)]
    await write(sink, ctx, rows)
    assert sql("SELECT * FROM t ORDER BY a") == [
        (0, "x", 2 * PIECE_ROWS + 4, 7),
        (1, "x", 2 * PIECE_ROWS + 2, 7),
        (2, "x", 2 * PIECE_ROWS + 3, 7),
    ]
    sql("UPDATE t SET kept = 8")
    await write(sink, ctx, [{"a": 1, "b": "x", "n": 1}], checkpoint_id=2)
    assert sql("SELECT * FROM t WHERE a = 1") == [(1, "x", 1, 8)]  # Other columns stay.


async def test_records_say_themselves_whether_they_delete(
    tmp_path: Path, ctx: SinkContext, sql: Any
) -> None:
    sql("CREATE TABLE t (id INT NOT NULL UNIQUE, n INT NOT NULL)")
    sink = sqlite(
        tmp_path / "a.db", "t", columns=["id", "n"], key="id", mode=lambda change: change["op"]
    )
    await write(
        sink,
        ctx,
        [{"op": "upsert", "id": i, "n": i} for i in (1, 2, 3)],
        [{"op": "delete", "id": 1}, {"op": "delete", "id": 2}, {"op": "upsert", "id": 2, "n": 9}],
        [{"op": "delete", "id": 4}],
    )
    assert sql("SELECT * FROM t ORDER BY id") == [(2, 9), (3, 3)]
    with pytest.raises(
        ValueError, match=r"returned 'update' for .*, expected 'upsert' or 'delete'"
    ):
        await write(sink, ctx, [{"op": "update", "id": 1}])
    with pytest.raises(ValueError, match="lacks the key, expected 'id'"):
        await write(sink, ctx, [{"op": "delete"}])


async def test_a_sink_that_deletes_needs_the_key_alone(
    tmp_path: Path, ctx: SinkContext, sql: Any
) -> None:
    sql("CREATE TABLE t (id INT, n INT)")
    sql("INSERT INTO t VALUES (1, 1), (1, 2), (2, 3)")
    await write(sqlite(tmp_path / "a.db", "t", key="id", mode="delete"), ctx, [{"id": 1, "z": 0}])
    assert sql("SELECT * FROM t") == [(2, 3)]


async def test_a_table_of_keys_alone_takes_a_key_twice(
    tmp_path: Path, ctx: SinkContext, sql: Any
) -> None:
    sql("CREATE TABLE t (id TEXT PRIMARY KEY)")
    await write(sqlite(tmp_path / "a.db", "t", mode="upsert"), ctx, [("a",), ("b",), ("a",)])
    assert sql("SELECT id FROM t ORDER BY id") == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("key", "record", "error", "message"),
    [
        ("y", {"x": 1, "y": 1}, GraphError, "has no unique constraint on 'y'"),
        ("part", {"x": 1, "part": 1}, GraphError, "has no unique constraint on 'part'"),
        (["x", "y"], {"x": 1, "y": 1}, GraphError, "has no unique constraint on 'x', 'y'"),
        ("z", {"x": 1}, GraphError, "has no column 'z' for key="),
        ("x", {"x": None}, ValueError, "the key 'x' is None in .* expected a value"),
        ("x", {"x": float("nan")}, ValueError, "the key 'x' is nan"),
        ("x", {"y": 1}, ValueError, "without the key 'x'"),
    ],
)
async def test_a_key_that_identifies_no_row_is_refused(
    tmp_path: Path, ctx: SinkContext, sql: Any, key: Any, record: Any, error: Any, message: str
) -> None:
    sql("CREATE TABLE t (x INT UNIQUE, y INT, part INT)")
    sql("CREATE UNIQUE INDEX some ON t (part) WHERE y > 0")
    sql("CREATE UNIQUE INDEX spelled ON t (abs(y))")
    with pytest.raises(error, match=message):
        await write(sqlite(tmp_path / "a.db", "t", key=key, mode="upsert"), ctx, [record])


async def test_a_table_without_a_primary_key_needs_key(
    tmp_path: Path, ctx: SinkContext, sql: Any
) -> None:
    sql("CREATE TABLE t (x INT)")
    with pytest.raises(GraphError, match="has no primary key: name by key= the columns"):
        await write(sqlite(tmp_path / "a.db", "t", mode="upsert"), ctx, [{"x": 1}])


@pytest.mark.parametrize("make", [sqlite, lambda *a, **k: postgres("postgresql://h/d", "t", **k)])
def test_a_mode_that_does_not_fit_is_refused_when_it_is_given(make: Any, tmp_path: Path) -> None:
    for options, message in (
        ({"mode": "replace"}, "mode is 'replace', expected 'append', 'upsert', 'delete'"),
        ({"mode": lambda record: "upsert"}, "name the columns to write by columns="),
        ({"mode": "upsert", "key": ["a", "b"], "columns": ["a"]}, "the key 'b' is not among"),
    ):
        with pytest.raises(GraphError, match=message):
            make(tmp_path / "a.db", "t", **options)


async def test_a_source_reads_in_the_order_of_one_column(tmp_path: Path, sql: Any) -> None:
    sql("CREATE TABLE t (x INT)")
    for table in (
        sqlite(tmp_path / "a.db", "t", key=["x", "y"]),
        postgres("postgresql://127.0.0.1:1/d", "t", key=["x", "y"]),
    ):
        with pytest.raises(
            GraphError, match=r"stands as a source, and key= is .*one unique column"
        ):
            await table.discover()


def test_a_piece_of_an_earlier_release_is_appended() -> None:
    piece = Piece(3, ["a"], [(1,), (2,)], [])
    assert decode_piece(3, piece.content("test")) == piece
    change = Piece(0, ["a", "b"], [(1, 2, False), (1, None, True)], ["a"])
    assert decode_piece(0, change.content("test")) == change


async def test_a_flow_counts_into_a_table(tmp_path: Path, sql: Any) -> None:
    """Without checkpoints: at least once, and the table has the latest count of each word."""
    sql("CREATE TABLE counts (word TEXT PRIMARY KEY, n INT)")
    flow = af.Flow("counts", parallelism=2)
    words = flow.source(af.io.datagen(lambda i: f"w{i % 7}", count=700))
    words.key_by(lambda word: word).count().map(lambda pair: {"word": pair[0], "n": pair[1]}).sink(
        sqlite(tmp_path / "a.db", "counts", mode="upsert")
    )
    await flow.execute()
    assert sql("SELECT * FROM counts ORDER BY word") == [(f"w{i}", 100) for i in range(7)]
