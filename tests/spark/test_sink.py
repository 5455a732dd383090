"""A stream into Spark: rows that fit a schema, each once, however often a commit is tried."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.core.errors import GraphError, StateError
from aioflow.spark.bridge.connector import spark as frames
from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.bridge.sink import BATCH_ROWS, FrameCommitter, FrameSink, FrameWriter
from aioflow.spark.failures import SparkError
from aioflow.spark.versions import Feature
from tests.io.driver import Runtime, SinkContext, system_context
from tests.spark.versions import since

SCHEMA = "id bigint, name string"


@dataclass
class Item:
    id: int
    name: str


def items(first: int, last: int) -> list[dict[str, Any]]:
    return [{"id": i, "name": f"item {i}"} for i in range(first, last)]


async def ids_in(spark: SparkBridge, directory: Path) -> list[int]:
    session = await spark.session()
    rows = await spark.call(lambda: session.read.parquet(str(directory)).select("id").collect())
    return sorted(row.id for row in rows)


@contextlib.asynccontextmanager
async def writing(
    sink: FrameSink, attempt: int = 0, restored: int | None = None
) -> AsyncIterator[tuple[FrameWriter, FrameCommitter]]:
    async with system_context() as machine:
        ctx: Any = SinkContext(machine.host, runtime=Runtime(attempt=attempt))
        writer = sink.writer(ctx)
        if restored is not None:
            writer.restored(restored)
        await writer.open()
        yield writer, sink.committer(ctx)


async def test_rows_become_part_files_that_spark_reads(spark: SparkBridge, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flow = af.Flow("items")
    flow.source(items(0, 25_000)).sink(frames(spark, into=out, schema=SCHEMA))
    await flow.execute()

    assert await ids_in(spark, out) == list(range(25_000))


@pytest.mark.parametrize(
    "record",
    [{"name": "a", "id": 1, "more": 2}, Item(1, "a"), (1, "a")],
    ids=["dict", "dataclass", "tuple"],
)
async def test_records_are_rows_by_field_or_by_place(
    spark: SparkBridge, tmp_path: Path, record: Any
) -> None:
    flow = af.Flow("one")
    flow.source([record]).sink(frames(spark, into=tmp_path / "out", schema=SCHEMA))
    await flow.execute()

    assert await ids_in(spark, tmp_path / "out") == [1]


@pytest.mark.parametrize("format", ["json", "orc"])
async def test_table_in_another_format_is_read_in_it(
    spark: SparkBridge, tmp_path: Path, format: str
) -> None:
    flow = af.Flow("formats")
    flow.source(items(0, 30)).sink(
        frames(spark, into=tmp_path / "out", schema=SCHEMA, format=format)
    )
    await flow.execute()

    session = await spark.session()
    rows = await spark.call(
        lambda: session.read.format(format).load(str(tmp_path / "out")).collect()
    )
    assert sorted((row.id, row.name) for row in rows) == [
        (one["id"], one["name"]) for one in items(0, 30)
    ]


@pytest.mark.parametrize("format", ["jdbc", "noop", "console"])
async def test_a_format_that_writes_no_files_is_refused_before_any_row(
    spark: SparkBridge, tmp_path: Path, format: str
) -> None:
    """As a batch of files with this mode, JDBC would empty the table first."""
    flow = af.Flow("formats")
    flow.source(items(0, 1)).sink(
        frames(spark, into=tmp_path / "out", schema=SCHEMA, format=format)
    )

    with pytest.raises(
        SparkError, match=f"format='{format}' does not write part files.*: give a function as into="
    ):
        await flow.execute()


async def test_other_formats_take_the_options_of_sparks_writer(
    spark: SparkBridge, tmp_path: Path
) -> None:
    flow = af.Flow("csv")
    flow.source(items(0, 3)).sink(
        frames(
            spark,
            into=tmp_path / "out",
            schema=SCHEMA,
            format="csv",
            options={"header": "true", "sep": ";"},
        )
    )
    await flow.execute()

    texts = [path.read_text() for path in sorted((tmp_path / "out").glob("part-*.csv"))]
    assert texts == ["id;name\n0;item 0\n1;item 1\n2;item 2\n"]


async def test_a_function_gets_a_frame_and_the_id_of_the_batch(
    spark: SparkBridge, tmp_path: Path
) -> None:
    seen: list[tuple[str, list[int]]] = []

    def write(frame: Any, batch_id: str) -> None:
        seen.append((batch_id, sorted(row.id for row in frame.collect())))

    flow = af.Flow("function")
    flow.source(items(0, 100)).sink(frames(spark, into=write, schema=SCHEMA, spool=tmp_path))
    await flow.execute()

    ((batch_id, ids),) = seen
    assert ids == list(range(100)) and batch_id.startswith("0000000000-")


class FailsAt(af.MapFunction[dict[str, Any], dict[str, Any]]):
    """Fails at a row once, when some checkpoint is behind it."""

    failed = False

    def map(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 15_000 and not FailsAt.failed:
            FailsAt.failed = True
            raise OSError("once")
        return row


async def test_a_flow_that_fails_writes_each_row_once(spark: SparkBridge, tmp_path: Path) -> None:
    FailsAt.failed = False
    out = tmp_path / "out"
    flow = af.Flow("failing")
    flow.source(items(0, 20_000)).throttle(20_000).map(FailsAt).sink(
        frames(spark, into=out, schema=SCHEMA)
    )
    await flow.execute(
        checkpoints=(tmp_path / "store").as_uri(),
        every="100ms",
        restart=af.fixed_delay(attempts=3, delay="10ms"),
    )

    assert FailsAt.failed
    assert await ids_in(spark, out) == list(range(20_000))


async def test_committing_again_writes_nothing_twice(spark: SparkBridge, tmp_path: Path) -> None:
    sink = frames(spark, into=tmp_path / "out", schema=SCHEMA)
    async with writing(sink) as (writer, committer):
        writer.write_batch(items(0, 10), None)
        prepared = await writer.prepare(1)
        await committer.commit(prepared)
        await committer.commit(prepared)

    assert await ids_in(spark, tmp_path / "out") == list(range(10))


class DiesAfterWriting(FrameCommitter):
    """Dies after Spark has written everything, before it is noted."""

    async def _write(self, staged: Any, reader: Any) -> None:
        await super()._write(staged, reader)
        raise OSError("killed")


class DiesWhileRenaming:
    """Dies after half of the files have their names, before it is noted."""

    def __init__(self, sink: FrameSink) -> None:
        self._sink = sink

    def write(self, session: Any, frame: Any, batch_id: str) -> None:
        self._sink.target.write(session, frame, batch_id)
        directory = Path(self._sink.target.path)  # type: ignore[union-attr]
        parts = sorted(directory.glob("part-*"))
        assert len(parts) == 3
        for part in parts[1:]:
            part.unlink()
        raise OSError("killed")


async def test_a_commit_that_died_after_its_write_writes_nothing_twice(
    spark: SparkBridge, tmp_path: Path
) -> None:
    sink = frames(spark, into=tmp_path / "out", schema=SCHEMA)
    async with writing(sink) as (writer, committer):
        writer.write_batch(items(0, 3 * BATCH_ROWS), None)
        prepared = await writer.prepare(1)
        with pytest.raises(OSError, match="killed"):
            await DiesAfterWriting(writer._ctx.host, sink).commit(prepared)
        await committer.commit(prepared)

    assert await ids_in(spark, tmp_path / "out") == list(range(3 * BATCH_ROWS))


async def test_a_commit_that_died_between_two_files_completes_them(
    spark: SparkBridge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioflow.spark.bridge.sink.TASK_BYTES", 1)  # A file for each Arrow batch.
    sink = frames(spark, into=tmp_path / "out", schema=SCHEMA)
    dying = frames(spark, into=tmp_path / "out", schema=SCHEMA)
    dying.target = DiesWhileRenaming(sink)  # type: ignore[assignment]
    async with writing(sink) as (writer, committer):
        writer.write_batch(items(0, 3 * BATCH_ROWS), None)
        prepared = await writer.prepare(1)
        with pytest.raises(OSError, match="killed"):
            await FrameCommitter(writer._ctx.host, dying).commit(prepared)
        await committer.commit(prepared)

    assert await ids_in(spark, tmp_path / "out") == list(range(3 * BATCH_ROWS))


async def test_a_new_attempt_deletes_what_was_begun_later_and_keeps_what_was_prepared(
    spark: SparkBridge, tmp_path: Path
) -> None:
    sink = frames(spark, into=tmp_path / "out", schema=SCHEMA)
    async with writing(sink) as (writer, _):
        writer.write_batch(items(0, 10), None)
        prepared = await writer.prepare(1)
        writer.write_batch(items(10, 20), None)
        await writer.flush()  # And then the process is gone.
    spool = next((tmp_path / "out" / "_aioflow" / "spool").iterdir())
    assert len(list(spool.glob("*.arrow"))) == 2

    async with writing(sink, attempt=1, restored=1) as (_, committer):
        assert len(list(spool.glob("*.arrow"))) == 1
        await committer.commit(prepared)
    assert await ids_in(spark, tmp_path / "out") == list(range(10))


async def test_a_spool_that_was_emptied_is_an_error_and_no_silence(
    spark: SparkBridge, tmp_path: Path
) -> None:
    sink = frames(spark, into=tmp_path / "out", schema=SCHEMA)
    async with writing(sink) as (writer, committer):
        writer.write_batch(items(0, 10), None)
        prepared = await writer.prepare(1)
        for path in (tmp_path / "out").rglob("*.arrow"):
            path.unlink()
        with pytest.raises(
            StateError, match=r"10 rows for .*, prepared for checkpoint 1, .* not there any more"
        ):
            await committer.commit(prepared)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"id": "seven", "name": "a"},
            r"got .*'seven'.*, whose id does not fit int64: expected 'id bigint, name string'",
        ),
        ({"id": 2**70, "name": "a"}, "whose id does not fit int64"),
        ({"id": 1}, "which has the fields id: expected 'id bigint, name string'"),
        ((1, "a", 2), "which has no such field"),
    ],
    ids=["text for a number", "too large", "missing", "too many"],
)
async def test_a_record_that_does_not_fit_is_named_with_what_was_expected(
    spark: SparkBridge, tmp_path: Path, record: Any, message: str
) -> None:
    flow = af.Flow("misfit")
    flow.source([{"id": 0, "name": "fits"}, record]).sink(
        frames(spark, into=tmp_path / "out", schema=SCHEMA)
    )

    with pytest.raises(ValueError, match=message):
        await flow.execute()


async def test_a_schema_that_is_none_is_refused_before_any_row(
    spark: SparkBridge, tmp_path: Path
) -> None:
    flow = af.Flow("schema")
    flow.source(items(0, 1)).sink(frames(spark, into=tmp_path / "out", schema="id bigint,, name"))

    with pytest.raises(SparkError, match="schema='id bigint,, name' of spark") as caught:
        await flow.execute()
    assert caught.value.condition == "PARSE_SYNTAX_ERROR"


async def test_a_format_that_spark_does_not_know_is_named(
    spark: SparkBridge, tmp_path: Path
) -> None:
    flow = af.Flow("format")
    flow.source(items(0, 1)).sink(
        frames(spark, into=tmp_path / "out", schema=SCHEMA, format="nosuch")
    )

    with pytest.raises(
        SparkError, match=r"format='nosuch' is none that this Spark knows, .*spark\.jars\.packages"
    ):
        await flow.execute()


async def test_a_write_that_spark_refuses_fails_the_flow_with_its_cause(
    spark: SparkBridge, tmp_path: Path
) -> None:
    def write(frame: Any, batch_id: str) -> None:
        frame.write.saveAsTable("no.such.catalog.here")

    flow = af.Flow("refused")
    flow.source(items(0, 1)).sink(frames(spark, into=write, schema=SCHEMA, spool=tmp_path))

    with pytest.raises(SparkError) as caught:
        await flow.execute()
    assert "\tat " not in str(caught.value)


async def test_missing_arguments_are_reported_at_build_time(
    spark: SparkBridge, tmp_path: Path
) -> None:
    with pytest.raises(GraphError, match="got no schema="):
        frames(spark, into=tmp_path)  # type: ignore[call-overload]
    with pytest.raises(GraphError, match="got no spool="):
        frames(spark, into=lambda frame, batch_id: None, schema=SCHEMA)
    with pytest.raises(GraphError, match="got no spool="):
        frames(spark, into="s3a://bucket/out", schema=SCHEMA)
    with pytest.raises(
        GraphError, match="got both what to read and into= or table=, or two of them, or none"
    ):
        frames(spark)


# Tables.


@pytest.fixture
async def table(
    spark: SparkBridge, tmp_path: Path
) -> AsyncIterator[Callable[[str], Awaitable[str]]]:
    """Makes a table with the given columns and format, outside of the catalog's own place.

    It is gone with the test.
    """

    async def make(text: str) -> str:
        await spark.sql(f"CREATE TABLE kept ({text} LOCATION '{tmp_path}/kept'")
        return "kept"

    yield make
    await spark.sql("DROP TABLE IF EXISTS kept")


async def rows_of(spark: SparkBridge, query: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in await spark.call((await spark.sql(query)).collect))


@since(Feature.TABLES)
@pytest.mark.parametrize(
    "text",
    [
        "id bigint, name string) USING parquet",
        "id bigint, name string) USING json",
        "name string, id bigint) USING csv OPTIONS (sep ';', header 'true')",
        "id bigint, name string) USING parquet PARTITIONED BY (name)",
        "name string, id bigint) USING csv PARTITIONED BY (name)",
    ],
)
async def test_a_table_gets_each_row_once_however_often_a_commit_is_tried(
    spark: SparkBridge, tmp_path: Path, table: Callable[[str], Awaitable[str]], text: str
) -> None:
    sink = frames(spark, table=await table(text), schema=SCHEMA, spool=tmp_path / "spool")
    some = [{"id": i, "name": f"of {i % 3}"} for i in range(2 * BATCH_ROWS)]
    async with writing(sink) as (writer, committer):
        for number, part in enumerate((some[:BATCH_ROWS], some[BATCH_ROWS:]), start=1):
            writer.write_batch(part, None)
            prepared = await writer.prepare(number)
            with pytest.raises(OSError, match="killed"):
                await DiesAfterWriting(writer._ctx.host, sink).commit(prepared)
            await committer.commit(prepared)

    assert await rows_of(spark, "SELECT id, name FROM kept") == [
        (one["id"], one["name"]) for one in some
    ]
    assert await rows_of(spark, "SELECT count(*) FROM kept WHERE name = 'of 1'") == [
        (len(some) // 3 + 1,)
    ]


@since(Feature.TABLES)
@pytest.mark.parametrize(
    ("text", "given", "says"),
    [
        (
            "id bigint, text string) USING parquet",
            {},
            "is id bigint, name string, and the table has id bigint, text string: give",
        ),
        (
            "id int, name string) USING parquet",
            {},
            "and the table has id int, name string: give those",
        ),
        (
            "id bigint, name string) USING parquet",
            {"format": "csv"},
            "format='csv' is not that of table 'kept', .* 'parquet'",
        ),
        (
            "id bigint, name string) USING parquet CLUSTERED BY (id) INTO 2 BUCKETS",
            {},
            "table 'kept' has buckets, .* function as into=",
        ),
    ],
    ids=["name", "type", "format", "buckets"],
)
async def test_a_table_that_cannot_take_the_rows_is_refused_before_any(
    spark: SparkBridge,
    tmp_path: Path,
    table: Callable[[str], Awaitable[str]],
    text: str,
    given: dict[str, Any],
    says: str,
) -> None:
    flow = af.Flow("refused")
    flow.source(items(0, 1)).sink(
        frames(spark, table=await table(text), schema=SCHEMA, spool=tmp_path / "spool", **given)
    )

    with pytest.raises(SparkError, match=says):
        await flow.execute()


@since(Feature.TABLES)
async def test_a_table_that_would_be_forgotten_with_the_session_is_refused(
    spark: SparkBridge, tmp_path: Path
) -> None:
    sink = frames(spark, table="nowhere", schema=SCHEMA, spool=tmp_path / "spool")
    flow = af.Flow("refused")
    flow.source(items(0, 1)).sink(sink)
    with pytest.raises(
        SparkError,
        match=r"table 'nowhere' would be forgotten with this session .* keep the catalog, config=",
    ):
        await flow.execute()

    await spark.sql("CREATE VIEW nowhere AS SELECT 1L AS id, 'a' AS name")
    try:
        with pytest.raises(
            SparkError,
            match=r"table 'nowhere' is a VIEW of .* expected one that Spark keeps in part files",
        ):
            await flow.execute()
    finally:
        await spark.sql("DROP VIEW nowhere")


async def test_a_database_gets_each_row_once_by_the_id_of_the_batch(
    spark: SparkBridge, tmp_path: Path
) -> None:
    """The id is written with the rows, in one transaction, as in docs/spark.md."""
    url = f"jdbc:derby:{tmp_path}/database;create=true"
    session: Any = await spark.session()

    def insert(frame: Any, batch_id: str) -> None:
        from pyspark.sql.functions import col, lit

        reader = frame.sparkSession.read
        if not made or reader.jdbc(url, "items").where(col("batch") == batch_id).isEmpty():
            frame.withColumn("batch", lit(batch_id)).coalesce(1).write.jdbc(
                url, "items", mode="append", properties=types
            )
        made.append(batch_id)

    made: list[str] = []
    types = {"createTableColumnTypes": "name VARCHAR(100), batch VARCHAR(100)"}
    sink = frames(spark, into=insert, schema=SCHEMA, spool=tmp_path / "spool")
    async with writing(sink) as (writer, committer):
        for number in (1, 2):
            writer.write_batch(items(100 * number, 100 * number + 100), None)
            prepared = await writer.prepare(number)
            with pytest.raises(OSError, match="killed"):
                await DiesAfterWriting(writer._ctx.host, sink).commit(prepared)
            await committer.commit(prepared)

    rows = await spark.call(lambda: session.read.jdbc(url, "items").select("id").collect())
    assert sorted(row.id for row in rows) == list(range(100, 300))
