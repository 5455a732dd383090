"""Delta and Iceberg on real tables: what a commit holds, repetitions, conflicts, upserts, columns,
and reading by versions.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import aioflow as af
from aioflow.core.errors import GraphError, RestoreError, StateError
from aioflow.io.lakes import lake_tables as lakes
from aioflow.io.lakes.lake_rows import latest_rows
from aioflow.io.lakes.lake_tables import CommitConflict, LakeCommitter
from aioflow.operators.sink import CommitId
from tests.io.driver import Runtime, SinkContext, next_batch, read_all, system_context
from tests.io.lake_tables import KINDS, Lake, lake, start_threads

start_threads()

ORDERS = pa.schema([("id", pa.int64()), ("city", pa.string()), ("total", pa.float64())])


@pytest.fixture
async def ctx() -> AsyncIterator[SinkContext]:
    async with system_context() as context:
        yield SinkContext(context.host)


@pytest.fixture(params=KINDS)
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    return lake(request.param, tmp_path)


def order(id: int, city: str = "Oslo", total: float = 1.0) -> dict[str, Any]:
    return {"id": id, "city": city, "total": total}


def by_id(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["id"])


async def prepared(sink: Any, ctx: SinkContext, *records: Any, subtask: int = 0) -> list[Any]:
    """Returns the committables of a writer, as they come from a checkpoint."""
    ctx.runtime = Runtime(subtask_index=subtask, parallelism=2)
    writer = sink.writer(ctx)
    try:
        await writer.open()
        for record in records:
            writer.write_batch([record], None)
        files = await writer.prepare(1)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(files))  # type: ignore[no-any-return]
    finally:
        await writer.close()


async def commit(
    sink: Any, ctx: SinkContext, files: list[Any], checkpoint: int = 1, run: str = "run"
) -> None:
    committer = sink.global_committer(ctx)
    try:
        await committer.commit([(CommitId("flow/orders", run, checkpoint), files)])
    finally:
        await committer.close()


# Sinks.


async def test_a_flow_makes_one_commit_for_all_writers(table: Lake) -> None:
    table.create(ORDERS)
    flow = af.Flow("orders", parallelism=3)
    numbers = flow.source(range(30)).rebalance()
    numbers.map(order).sink(table.connector(), uid="lake")
    await flow.execute(checkpoints=f"memory://{type(table).__name__}", every="1h")
    assert by_id(table.rows()) == [order(i) for i in range(30)]
    assert len(table.commits()) == 1
    assert table.files() == table.named()
    assert len(table.named()) == 3


async def test_columns_stay_columns_up_to_the_files(table: Lake) -> None:
    table.create(ORDERS)
    rows = pa.Table.from_pylist([order(i) for i in range(200_000)], ORDERS)
    flow = af.Flow("columns")
    late = flow.source(af.io.arrow(rows)).filter(af.col.id >= 100_000)
    explained = late.sink(table.connector()).explain()
    assert "takes records" not in explained, explained
    await flow.execute()
    assert len(table.rows()) == 100_000
    assert len(table.named()) == 1


async def test_a_repeated_commit_changes_nothing(table: Lake, ctx: SinkContext) -> None:
    table.create(ORDERS)
    sink = table.connector()
    one = await prepared(sink, ctx, order(1))
    two = await prepared(sink, ctx, order(2), subtask=1)
    await commit(sink, ctx, one, 1)
    await commit(sink, ctx, two, 2)
    for files, checkpoint in ((one, 1), (two, 2), (one, 1)):
        await commit(sink, ctx, files, checkpoint)
    await commit(sink, ctx, await prepared(sink, ctx, order(3)), 1, run="later")
    assert by_id(table.rows()) == [order(1), order(2), order(3)]
    assert [checkpoint for _, _, checkpoint in table.commits()] == [1, 2, 1]


async def test_checkpoints_are_known_again_one_by_one(table: Lake, ctx: SinkContext) -> None:
    """A restore has two in its state: one was committed before the crash, and the other not."""
    table.create(ORDERS)
    sink = table.connector()
    first, second = [await prepared(sink, ctx, order(i)) for i in (1, 2)]
    await commit(sink, ctx, first, 1)
    both = [(CommitId("flow/orders", "run", i), files) for i, files in ((1, first), (2, second))]
    committer = sink.global_committer(ctx)
    for _ in range(2):
        await committer.commit(both)
    await committer.close()
    assert by_id(table.rows()) == [order(1), order(2)]
    assert [checkpoint for *_, checkpoint in table.commits()] == [1, 2]


async def test_a_failure_behind_the_commit_does_not_repeat_the_rows(
    table: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task fails after the library has committed, and before the engine notes it."""
    table.create(ORDERS)
    commit, failures = LakeCommitter.commit, ["commit"]

    async def failing(self: Any, prepared: Any) -> None:
        await commit(self, prepared)
        if failures:
            raise StateError(failures.pop())

    monkeypatch.setattr(LakeCommitter, "commit", failing)
    flow = af.Flow("failing", parallelism=2)
    flow.source(range(20)).rebalance().map(order).sink(table.connector(), uid="lake")
    result = await flow.execute(
        checkpoints=f"memory://failing-{type(table).__name__}",
        every="1h",
        restart=af.fixed_delay(3, "1ms"),
    )
    assert result.restarts == 1
    assert by_id(table.rows()) == [order(i) for i in range(20)]
    assert len(table.commits()) == 1


async def test_two_committers_of_one_checkpoint_cannot_both_commit(
    table: Lake, ctx: SinkContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is taken for dead, and commits beside the one that replaced it."""
    table.create(ORDERS)
    sink = table.connector()
    files = await prepared(sink, ctx, order(1))
    module = af.io.delta.__module__ if hasattr(sink, "path") else af.io.iceberg.__module__
    writes = _inner_commit(module)
    late = asyncio.Event()

    async def meanwhile() -> None:
        await commit(sink, ctx, files)
        late.set()

    loop, original, first = asyncio.get_running_loop(), writes.original, [True]

    def slow(*args: Any, **options: Any) -> Any:
        if first.pop() if first else False:
            asyncio.run_coroutine_threadsafe(meanwhile(), loop).result(20)
        return original(*args, **options)

    monkeypatch.setattr(writes.owner, writes.name, slow)
    await commit(sink, ctx, files)
    assert late.is_set()
    assert table.rows() == [order(1)]
    assert len(table.commits()) == 1


class _inner_commit:
    """The library's call that writes the new version, after the look for the id."""

    def __init__(self, module: str) -> None:
        if "delta" in module:
            from deltalake import DeltaTable

            self.owner: Any = DeltaTable
            self.name = "create_write_transaction"
        else:
            from pyiceberg.table import Transaction

            self.owner = Transaction
            self.name = "commit_transaction"
        self.original = getattr(self.owner, self.name)


async def test_a_commit_of_others_that_comes_between_is_tried_again(
    table: Lake, ctx: SinkContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.create(ORDERS)
    sink = table.connector()
    files = await prepared(sink, ctx, order(1))
    module = af.io.delta.__module__ if hasattr(sink, "path") else af.io.iceberg.__module__
    writes, left = _inner_commit(module), [2, 3]

    def disturbed(*args: Any, **options: Any) -> Any:
        if left:
            monkeypatch.setattr(writes.owner, writes.name, writes.original)
            table.append([order(left.pop())])
            monkeypatch.setattr(writes.owner, writes.name, disturbed)
        return writes.original(*args, **options)

    monkeypatch.setattr(writes.owner, writes.name, disturbed)
    await commit(sink, ctx, files)
    monkeypatch.undo()
    assert [row["id"] for row in by_id(table.rows())] == [1, 2, 3]


async def test_files_outside_of_the_table_are_refused(table: Lake, ctx: SinkContext) -> None:
    """A checkpoint may have been forged, or may be that of another sink."""
    table.create(ORDERS)
    sink = table.connector(mode="upsert", key="id")
    (file,) = await prepared(sink, ctx, order(1))
    for path in ("/etc/passwd", "../part-0.parquet", 7):
        forged = {**file, "path": path} if isinstance(file, dict) else [path, *file[1:]]
        with pytest.raises(RestoreError, match="which is no data file of this table"):
            await commit(sink, ctx, [forged])
    with pytest.raises(RestoreError, match="which is no data file of this table"):
        await commit(sink, ctx, ["another"])
    assert table.rows() == []


async def test_endless_conflicts_end_with_an_error(
    table: Lake, ctx: SinkContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.create(ORDERS)
    monkeypatch.setattr(lakes, "CONFLICTS_MAX", 3)
    sink = table.connector()
    files = await prepared(sink, ctx, order(1))
    committer = sink.global_committer(ctx)

    def conflict(*args: Any) -> None:
        raise CommitConflict("another")

    monkeypatch.setattr(committer._table, "commit", conflict)
    with pytest.raises(ConnectionError, match="3 other commits came before"):
        await committer.commit([(CommitId("flow/orders", "run", 1), files)])
    await committer.close()


async def test_a_conflict_of_delta_is_reported_without_a_backtrace(
    tmp_path: Path, ctx: SinkContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = lake("delta", tmp_path)
    table.create(ORDERS)
    sink = table.connector()
    files = await prepared(sink, ctx, order(1))
    committer = sink.global_committer(ctx)

    def conflict(*args: Any) -> None:
        from deltalake.exceptions import CommitFailedError

        raise CommitFailedError("version 1 exists\n\nStack backtrace:\n   0: deltalake::commit")

    monkeypatch.setattr(committer._table, "_append", conflict)
    with pytest.raises(CommitConflict) as told:
        await asyncio.to_thread(
            committer._table.commit, [(CommitId("flow/orders", "run", 1), files)]
        )
    assert str(told.value) == "version 1 exists"
    await committer.close()


async def test_partitions_and_types_are_those_of_the_table(table: Lake, ctx: SinkContext) -> None:
    day, at = datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC)
    schema = pa.schema(
        [
            ("id", pa.int32()),
            ("day", pa.date32()),
            ("city", pa.string()),
            ("at", pa.timestamp("us", "UTC")),
            ("price", pa.decimal128(9, 2)),
            ("tags", pa.list_(pa.string())),
            ("raw", pa.binary()),
        ]
    )
    table.create(schema, ["day", "city"])
    rows = [
        {
            "id": i,
            "day": day + datetime.timedelta(i % 2),
            "city": ["Oslo", "a/b c=d%", None][i % 3],
            "at": at,
            "price": Decimal("1.25"),
            "tags": ["x", None],
            "raw": b"\x00\xff",
        }
        for i in range(6)
    ]
    sink = table.connector()
    await commit(sink, ctx, await prepared(sink, ctx, *rows))
    assert by_id(table.rows()) == rows
    assert len(table.named()) == 6
    assert by_id(await read_all(table.connector(), ctx)) == rows


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"id": 1, "note": "x"},
            r"has no column 'note' \(.*string\), expected some of 'id', 'city'",
        ),
        ({"id": "1"}, r"column 'id' is int64, and the records have .*string"),
        ({"id": 1.5}, r"column 'id' is int64, and the records have double"),
        ({"id": 1, "city": 7}, r"column 'city' is .*string, and the records have int64"),
    ],
)
async def test_a_record_that_does_not_fit_is_refused_by_column_and_types(
    table: Lake, ctx: SinkContext, record: dict[str, Any], message: str
) -> None:
    table.create(ORDERS)
    with pytest.raises(GraphError, match=message):
        await prepared(table.connector(), ctx, record)


async def test_a_required_column_without_a_value_is_refused(table: Lake, ctx: SinkContext) -> None:
    table.create(pa.schema([pa.field("id", pa.int64(), nullable=False), ("n", pa.int64())]))
    with pytest.raises(GraphError, match="column 'id' is required, and 1 of 1 records"):
        sink = table.connector()
        await prepared(sink, ctx, {"id": 1, "n": 1}, {"n": 2})


async def test_new_columns_are_added_by_two_writers_at_once(table: Lake, ctx: SinkContext) -> None:
    table.create(ORDERS)
    sink = table.connector(evolve=True)
    old = await prepared(sink, ctx, order(0))
    await commit(sink, ctx, old, 1)
    writers = [sink.writer(ctx) for _ in range(2)]
    for writer in writers:
        await writer.open()
    for i, writer in enumerate(writers, 1):
        writer.write_batch([order(i)], None)
        writer.write_batch([order(i + 2) | {"note": "x"}], None)
    both = await asyncio.gather(*(writer.prepare(2) for writer in writers))
    for writer in writers:
        await writer.close()
    await commit(sink, ctx, both[0] + both[1], 2)
    assert {row["id"]: row["note"] for row in table.rows()} == {
        0: None, 1: None, 2: None, 3: "x", 4: "x"
    }  # fmt: skip
    assert len(table.commits()) == 2


NESTED = pa.schema(
    [
        ("id", pa.int64()),
        ("at", pa.struct([("x", pa.int64()), ("y", pa.string())])),
        ("many", pa.list_(pa.struct([("x", pa.int64())]))),
        ("named", pa.map_(pa.string(), pa.struct([("x", pa.int64())]))),
        ("is_new", pa.bool_()),
    ]
)


async def test_nested_columns_are_read_again(table: Lake, ctx: SinkContext) -> None:
    table.create(NESTED)
    sink = table.connector()
    rows = [
        {"id": 1, "at": {"x": 1, "y": "a"}, "many": [{"x": 1}, None], "is_new": True},
        {"id": 2, "at": None, "many": [], "is_new": None},
        {"id": 3, "at": None, "many": None, "is_new": None},
    ]
    await commit(sink, ctx, await prepared(sink, ctx, *rows), 1)

    read = await af.Flow("read").source(table.connector()).collect()
    assert read == [{**row, "named": None} for row in rows]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"at": {"x": 1, "z": 2}}, "the column has no field 'z'"),
        ({"at": {"x": "1"}}, "field 'x': the types are of different kinds"),
        ({"many": [{"x": 1, "z": 2}]}, "the column has no field 'z'"),
        ({}, "records without any field"),
    ],
)
async def test_fields_that_would_be_lost_are_refused(
    row: dict[str, Any], says: str, table: Lake, ctx: SinkContext
) -> None:
    table.create(NESTED)
    with pytest.raises(GraphError, match=says):
        await prepared(table.connector(), ctx, row)


async def test_a_new_column_without_a_value_is_not_added(table: Lake, ctx: SinkContext) -> None:
    table.create(ORDERS)
    sink = table.connector(evolve=True)
    await commit(sink, ctx, await prepared(sink, ctx, order(0) | {"note": None}), 1)
    assert table.rows() == [order(0)]
    with pytest.raises(GraphError, match="has no column ''"):
        await prepared(sink, ctx, order(1) | {"": 1})


async def test_an_upsert_is_one_commit_in_which_the_latest_row_of_a_key_wins(
    table: Lake, ctx: SinkContext
) -> None:
    table.create(ORDERS)
    sink = table.connector(mode="upsert", key="id")
    await commit(sink, ctx, await prepared(sink, ctx, *map(order, range(6))), 1)
    changes = await prepared(sink, ctx, order(1, total=2.0), order(7), order(1, total=3.0))
    changes += await prepared(sink, ctx, order(1, total=4.0), order(2, "Rome"), subtask=1)
    before = len(table.versions())
    await commit(sink, ctx, changes, 2)
    assert len(table.versions()) == before + 1
    wanted = [order(0), order(1, total=4.0), order(2, "Rome"), *map(order, (3, 4, 5, 7))]
    assert by_id(table.rows()) == wanted
    await commit(sink, ctx, changes, 2)
    await commit(sink, ctx, await prepared(sink, ctx, order(9)), 3)
    assert by_id(table.rows()) == [*wanted, order(9)]
    assert [checkpoint for *_, checkpoint in table.commits()] == [1, 2, 3]


async def test_an_upsert_by_two_columns_in_partitions(table: Lake, ctx: SinkContext) -> None:
    table.create(ORDERS, ["city"])
    sink = table.connector(mode="upsert", key=["city", "id"])
    first = [order(i, city) for i in (1, 2) for city in ("Oslo", "Rome")]
    await commit(sink, ctx, await prepared(sink, ctx, *first), 1)
    await commit(sink, ctx, await prepared(sink, ctx, order(1, "Rome", 5.0), order(3)), 2)
    found = sorted((row["id"], row["city"], row["total"]) for row in table.rows())
    assert found == [
        (1, "Oslo", 1.0), (1, "Rome", 5.0), (2, "Oslo", 1.0), (2, "Rome", 1.0), (3, "Oslo", 1.0)
    ]  # fmt: skip


async def test_a_record_without_a_key_is_refused(table: Lake, ctx: SinkContext) -> None:
    table.create(ORDERS)
    with pytest.raises(GraphError, match="column 'id' is in key=, and 1 of 1 records"):
        await prepared(table.connector(mode="upsert", key="id"), ctx, {"city": "Oslo"})
    with pytest.raises(GraphError, match="has no column 'nr', which key= names"):
        await prepared(table.connector(mode="upsert", key="nr"), ctx, order(1))


async def test_a_missing_table_and_wrong_options_are_named(table: Lake, ctx: SinkContext) -> None:
    async with asyncio.timeout(10):
        with pytest.raises(GraphError, match="create it before the job starts"):
            await prepared(table.connector(), ctx, order(1))
        with pytest.raises(GraphError, match="create it before the job starts"):
            await table.connector().discover()
    for options, message in (
        ({"mode": "upsert"}, 'mode="upsert" needs key='),
        ({"mode": "merge"}, "mode is 'merge', expected 'append' or 'upsert'"),
        ({"key": "id"}, 'key= is for mode="upsert"'),
        ({"deletes": "drop"}, "deletes is 'drop', expected 'refuse' or 'skip'"),
        ({"columns": "id"}, "expected a list of names"),
        ({"poll": "0s"}, "poll is '0s', expected more than nothing"),
    ):
        with pytest.raises(GraphError, match=message):
            table.connector(**options)


def test_latest_rows_keep_the_order_of_the_last_ones() -> None:
    rows = pa.table({"k": [1, 2, 1, 3, 2], "n": [0, 1, 2, 3, 4]})
    assert latest_rows(rows, ["k"]).to_pydict() == {"k": [1, 3, 2], "n": [2, 3, 4]}


# Sources.


async def test_a_version_is_read_with_some_columns(table: Lake, ctx: SinkContext) -> None:
    table.create(ORDERS)
    table.append([order(1), order(2)])
    first = table.versions()[-1]
    table.append([order(3)])
    named = "version" if table.connector().name == "delta" else "snapshot"
    assert by_id(await read_all(table.connector(), ctx)) == [order(1), order(2), order(3)]
    old = table.connector(columns=["id"], **{named: first})
    assert by_id(await read_all(old, ctx)) == [{"id": 1}, {"id": 2}]
    with pytest.raises(GraphError, match=f"has no {named} 999"):
        await table.connector(**{named: 999}).discover()


async def test_increments_follow_the_first_version_without_a_gap(
    table: Lake, ctx: SinkContext
) -> None:
    table.create(ORDERS)
    table.append([order(1), order(2)])
    source = table.connector(poll="10ms")
    (split,) = await source.discover()
    reader = source.reader(ctx)
    await reader.open([split])
    seen = [await next_batch(reader, 1) for _ in range(2)]
    for i in (3, 4):
        table.append([order(i)])
    position = reader.position(split.id)
    seen += [await next_batch(reader, 1) for _ in range(2)]
    await reader.close()
    assert sorted(batch[0]["id"] for batch in seen if batch) == [1, 2, 3, 4]
    # A restart from the position between reads the rest, and nothing twice.
    again = source.reader(ctx)
    position = msgspec.msgpack.decode(msgspec.msgpack.encode(position))
    await again.open([af.Split(split.id, position, split.payload)])
    rest = [await next_batch(again, 1) for _ in range(2)]
    assert [batch[0]["id"] for batch in rest if batch] == [3, 4]
    await again.close()


async def test_a_deletion_is_refused_or_left_out(table: Lake, ctx: SinkContext) -> None:
    table.create(ORDERS)
    table.append([order(1)])
    for deletes in ("refuse", "skip"):
        source = table.connector(poll="10ms", deletes=deletes)
        (split,) = await source.discover()
        reader = source.reader(ctx)
        await reader.open([split])
        await next_batch(reader)
        table.append([order(2), order(3)])
        assert by_id(await next_batch(reader) or []) == [order(2), order(3)]
        table.delete("id = 2")
        table.append([order(4)])
        if deletes == "refuse":
            with pytest.raises(GraphError, match="deletes or replaces rows"):
                await next_batch(reader)
        else:
            assert await next_batch(reader) == [order(4)]
        await reader.close()
        table.delete("id > 1")


async def test_a_position_that_the_table_forgot_is_refused(table: Lake, ctx: SinkContext) -> None:
    table.create(ORDERS)
    table.append([order(1)])
    source = table.connector(poll="10ms")
    reader = source.reader(ctx)
    await reader.open([af.Split("0", [77, True, 0, 0], 77)])
    with pytest.raises(RestoreError, match=r"(version|snapshot) 77"):
        await next_batch(reader)
    await reader.close()


async def test_a_table_feeds_another_in_one_flow(table: Lake, ctx: SinkContext) -> None:
    """Snapshot and increments, over a restart with a savepoint."""
    table.create(ORDERS)
    table.append([order(1)])
    seen: list[int] = []
    for last in (2, 3):
        flow = af.Flow("follow")
        rows = flow.source(table.connector(poll="10ms"), uid="lake")
        rows.sink(lambda row: seen.append(row["id"]), uid="seen")
        async with flow.run(checkpoints="memory://follow" + table.connector().name) as job:
            table.append([order(last)])
            async with asyncio.timeout(20):
                while last not in seen:
                    await asyncio.sleep(0.01)
            await job.stop()
    assert seen == [1, 2, 3]
