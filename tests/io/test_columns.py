"""Parquet and Arrow: what comes out of the files as rows, positions in a checkpoint, and parts
in two phases.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

import aioflow as af
from aioflow.core.errors import GraphError
from aioflow.io.files.arrow_files import arrow, parquet
from aioflow.operators.source import Split, discover_splits
from tests.io.driver import SinkContext, next_batch, system_context

ROWS = [{"i": i, "s": None if i % 7 == 6 else f"s{i % 5}", "x": i / 8} for i in range(1_000)]
WHEN = datetime(2024, 2, 29, 12, 30, 15, 123_456, tzinfo=UTC)
TYPED = {
    "int8": (pa.int8(), [1, None, -3]),
    "uint64": (pa.uint64(), [1, 2**64 - 1, None]),
    "float32": (pa.float32(), [0.5, None, 2.5]),
    "bool": (pa.bool_(), [True, None, False]),
    "text": (pa.string(), ["ä", None, ""]),
    "large": (pa.large_string(), ["a", "b", "a"]),
    "bytes": (pa.binary(), [b"\x00", None, b"x"]),
    "coded": (pa.dictionary(pa.int8(), pa.string()), ["a", None, "a"]),
    "moment": (pa.timestamp("us", "UTC"), [WHEN, None, WHEN]),
    "day": (pa.date32(), [date(2024, 2, 29), None, date(1969, 1, 1)]),
    "decimal": (pa.decimal128(9, 2), [Decimal("1.50"), None, Decimal("-2.25")]),
    "list": (pa.list_(pa.int64()), [[1, 2], None, []]),
    "struct": (pa.struct([("a", pa.int64())]), [{"a": 1}, {"a": None}, {"a": 3}]),
    "gaps": (pa.struct([("a", pa.int64())]), [{"a": 1}, None, {"a": 3}]),
    "nothing": (pa.null(), [None, None, None]),
}


def typed() -> pa.Table:
    return pa.table({name: pa.array(values, kind) for name, (kind, values) in TYPED.items()})


def source_of(kind: str, path: Path, table: pa.Table, page_rows: int) -> Any:
    if kind == "table":
        return arrow(table)
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=page_rows)
        return parquet(path)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=page_rows)
    return arrow(path)


KINDS = ["table", "parquet", "ipc"]


@pytest.mark.parametrize("kind", KINDS)
async def test_values_are_those_of_python_type_for_type(kind: str, tmp_path: Path) -> None:
    expected = [{name: values[i] for name, (_, values) in TYPED.items()} for i in range(3)]
    found = await af.Flow("typed").source(source_of(kind, tmp_path / "f", typed(), 2)).collect()
    assert found == expected
    assert [[type(v) for v in row.values()] for row in found] == [
        [type(v) for v in row.values()] for row in expected
    ]


async def test_nanoseconds_end_at_microseconds() -> None:
    table = pa.table({"t": pa.array([1_700_000_000_123_456_789], pa.timestamp("ns"))})
    assert await af.Flow("nanos").source(arrow(table)).collect() == [
        {"t": datetime(2023, 11, 14, 22, 13, 20, 123_456)}
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 1, 299, 300, 301, 999, 1_000])
async def test_reading_goes_on_behind_the_last_row_that_was_polled(
    kind: str, at: int, tmp_path: Path
) -> None:
    source = source_of(kind, tmp_path / "f", pa.Table.from_pylist(ROWS), 300)
    async with system_context() as ctx:
        (split,) = await discover_splits(source, ctx.host)
        rows: list[Any] = []
        position = split.position
        for target in (at, len(ROWS)):
            reader = source.reader(ctx)
            await reader.open([Split(split.id, position, split.payload)])
            while len(rows) < target:
                batch = await next_batch(reader, min(128, target - len(rows)))
                assert batch is not None
                rows += batch
            position = reader.position(split.id)
            await reader.close()
    assert rows == ROWS
    reader = source.reader(ctx)
    await reader.open([Split(split.id, position, split.payload)])
    assert await next_batch(reader) is None
    assert reader.finished
    await reader.close()


async def test_a_large_parquet_file_is_cut_between_row_groups(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "f.parquet", row_group_size=100)
    async with system_context() as ctx:
        splits = await discover_splits(parquet(tmp_path, split_bytes=1), ctx.host)
    assert [tuple(split.payload)[1:3] for split in splits] == [(i, i + 1) for i in range(10)]
    flow = af.Flow("cut", parallelism=3)
    found = await flow.source(parquet(tmp_path, split_bytes=1)).collect()
    assert sorted(row["i"] for row in found) == list(range(1_000))


async def test_only_the_columns_that_are_asked_for_are_read(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "f.parquet")
    found = await af.Flow("some").source(parquet(tmp_path / "f.parquet", columns=["x"])).collect()
    assert found == [{"x": row["x"]} for row in ROWS]
    with pytest.raises(ValueError, match="has no column 'y', expected one of i, s, x"):
        await af.Flow("none").source(parquet(tmp_path / "f.parquet", columns=["y"])).collect()


async def test_file_of_another_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"no")
    with pytest.raises(ValueError, match="f is no Parquet file"):
        await af.Flow("bad").source(parquet(tmp_path / "f")).collect()
    with pytest.raises(ValueError, match="f is no file in Arrow's IPC format"):
        await af.Flow("bad").source(arrow(tmp_path / "f")).collect()
    with pytest.raises(GraphError, match="got a int"):
        arrow(3)


def test_without_the_extra_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioflow.io.arguments.find_spec", lambda name: None)
    with pytest.raises(GraphError, match=r"needs numpy and pyarrow: install aioflow\[columns\]"):
        parquet("x")


class Pair(NamedTuple):
    a: int
    b: str


def read_parts(directory: Path) -> list[list[dict[str, Any]]]:
    parts = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    return [
        (
            pq.read_table(path)
            if path.suffix == ".parquet"
            else pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        ).to_pylist()
        for path in parts
    ]


@pytest.mark.parametrize("make", [parquet, arrow])
async def test_parts_are_shown_when_they_are_committed(make: Any, tmp_path: Path) -> None:
    async with system_context() as machine:
        sink = make(tmp_path)
        ctx = SinkContext(machine.host)
        writer = sink.writer(ctx)
        await writer.open()
        writer.write_batch([{"a": 1, "b": "x"}, {"a": 2, "b": None}], None)
        await writer.flush()
        writer.write_batch([Pair(3, "y")], None)
        first = await writer.prepare(1)
        assert read_parts(tmp_path) == []
        writer.write_batch([Pair(4, "z")], None)
        await writer.flush()
        await sink.committer(ctx).commit(first)
        assert read_parts(tmp_path) == [
            [{"a": 1, "b": "x"}, {"a": 2, "b": None}, {"a": 3, "b": "y"}]
        ]
        await sink.committer(ctx).commit(await writer.prepare(2))
        await writer.close()
    assert read_parts(tmp_path)[1:] == [[{"a": 4, "b": "z"}]]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


async def test_records_of_other_types_begin_a_part_of_their_own(tmp_path: Path) -> None:
    async with system_context() as machine:
        sink = parquet(tmp_path)
        ctx = SinkContext(machine.host)
        writer = sink.writer(ctx)
        await writer.open()
        batches: Sequence[Any] = ([{"a": 1}], [{"a": 2}], [{"a": 2.5}], [{"b": 1.5}])
        for batch in batches:
            writer.write_batch(batch, None)
            await writer.flush()
        await sink.committer(ctx).commit(await writer.prepare(1))
        await writer.close()
    assert read_parts(tmp_path) == [[{"a": 1}, {"a": 2}], [{"a": 2.5}], [{"b": 1.5}]]


@pytest.mark.parametrize(
    ("before", "after", "types"),
    [
        (1, "text", "int64.*string"),
        ("text", 1, "string.*int64"),
        ("5", {"x": 1}, "string.*struct<x: int64>"),
        (1, {"x": 1}, "int64.*struct<x: int64>"),
        (1, [1], "int64.*list<"),
        (True, 1, "bool.*int64"),
        ({"x": 1}, {"x": "5"}, "struct<x: int64>.*struct<x: string>"),
        (1.5, datetime(2024, 1, 1, tzinfo=UTC), "double.*timestamp"),
    ],
)
@pytest.mark.parametrize("parted", [False, True], ids=["in a part", "after a part"])
async def test_a_column_that_changes_its_kind_is_refused_naming_it(
    before: Any, after: Any, types: str, parted: bool, tmp_path: Path
) -> None:
    async with system_context() as machine:
        ctx = SinkContext(machine.host)
        writer = parquet(tmp_path).writer(ctx)
        await writer.open()
        writer.write_batch([{"n": 1, "a": None}], None)
        writer.write_batch([{"n": 1, "a": before}], None)
        await (writer.prepare(1) if parted else writer.flush())
        writer.write_batch([{"n": 1, "a": after}], None)
        with pytest.raises(TypeError, match=rf"column 'a' held {types}.*cast\(str\)"):
            await writer.flush()
        await writer.close()


@pytest.mark.parametrize(
    ("before", "after"),
    [(1, 2.5), (1.5, 2), ({"x": 1}, {"x": 1, "y": 2}), ([], [1]), (None, "a"), (None, 1)],
)
async def test_a_column_of_one_kind_goes_on_and_loses_nothing(
    before: Any, after: Any, tmp_path: Path
) -> None:
    async with system_context() as machine:
        sink = parquet(tmp_path)
        ctx = SinkContext(machine.host)
        writer = sink.writer(ctx)
        await writer.open()
        for value in (before, after):
            writer.write_batch([{"a": value}], None)
            await writer.flush()
        await sink.committer(ctx).commit(await writer.prepare(1))
        await writer.close()
    assert [row for part in read_parts(tmp_path) for row in part] == [{"a": before}, {"a": after}]


@pytest.mark.parametrize("make", [parquet, arrow])
@pytest.mark.parametrize(
    "values",
    [
        (None, "a"),
        ("a", None, "b"),
        (None, 1, None),
        (None, None),
        ([], ["a"]),
        ([1], []),
        ({"x": None}, {"x": "a"}),
        ({"x": 1}, {"x": None}),
        ({"x": [None]}, {"x": ["a"]}),
    ],
)
async def test_parts_with_a_column_without_values_are_one_table(
    values: tuple[Any, ...], make: Any, tmp_path: Path
) -> None:
    """Each part is one checkpoint. Readers take the schema of the first part for all."""
    async with system_context() as machine:
        sink = make(tmp_path)
        ctx = SinkContext(machine.host)
        writer = sink.writer(ctx)
        await writer.open()
        for number, value in enumerate(values):
            writer.write_batch([{"a": value}], None)
            await writer.flush()
            await sink.committer(ctx).commit(await writer.prepare(number))
        await writer.close()
    table = pyarrow.dataset.dataset(tmp_path, format=make.__name__).to_table()
    expected = ["1" if value == 1 else value for value in values]
    known = expected if values[0] is None else list(values)
    assert table.column("a").to_pylist() == known


async def test_column_without_values_does_not_make_numbers_text(tmp_path: Path) -> None:
    flow = af.Flow("numbers")
    flow.source([{"a": None}, {"a": 1}]).sink(parquet(tmp_path))
    await flow.execute()
    assert [row for part in read_parts(tmp_path) for row in part] == [{"a": None}, {"a": 1}]


async def test_record_without_fields_is_refused(tmp_path: Path) -> None:
    flow = af.Flow("bare")
    flow.source([1, 2]).sink(parquet(tmp_path))
    with pytest.raises(TypeError, match="got a int, expected records with fields"):
        await flow.execute()


@pytest.mark.parametrize("make", [parquet, arrow])
async def test_columns_that_come_in_go_out_again(make: Any, tmp_path: Path) -> None:
    flow = af.Flow("through")
    rows = [{name: values[i] for name, (_, values) in TYPED.items()} for i in (0, 2)]
    flow.source(arrow(typed())).filter(~af.col.int8.is_null()).sink(make(tmp_path))
    await flow.execute()
    (part,) = read_parts(tmp_path)
    assert part == rows


async def test_a_stopped_job_goes_on_where_it_was_and_writes_each_record_once(
    tmp_path: Path,
) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "in.parquet", row_group_size=100)

    def flow() -> af.Flow:
        flow = af.Flow("copy")
        rows = flow.source(parquet(tmp_path / "in.parquet"), uid="in").throttle(
            200, per="10ms", uid="slow"
        )
        rows.select(i=af.col.i, s=af.col.s, x=af.col.x).sink(parquet(tmp_path / "out"), uid="out")
        return flow

    store = f"file://{tmp_path}/checkpoints"
    async with flow().run(checkpoints=store, every="20ms") as job:
        await job.stop()
    await flow().execute(checkpoints=store, every="20ms")
    found = [row for part in read_parts(tmp_path / "out") for row in part]
    assert sorted(found, key=lambda row: row["i"]) == ROWS


LOADING = """
import asyncio, sys, threading
import aioflow as af

loop_thread, loaded = threading.get_ident(), []

class Watch:
    def find_spec(self, name, path=None, target=None):
        if threading.get_ident() == loop_thread:
            if name.partition(".")[0] in ("numpy", "pandas", "pyarrow"):
                loaded.append(name)

async def main():
    flow = af.Flow("loading")
    rows = [{"i": i, "s": str(i), "x": None if i % 2 else 1.5, "l": [i], "d": {"y": i}}
            for i in range(10)]
    flow.source(rows).sink(getattr(af.io, sys.argv[1])(sys.argv[2]))
    sys.meta_path.insert(0, Watch())
    await flow.execute()

asyncio.run(main())
print(loaded)
"""


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_the_loop_does_not_wait_for_arrow_to_be_loaded(kind: str, tmp_path: Path) -> None:
    """The first table that is written loads hundreds of modules, pandas among them, which held
    the loop for a second at a checkpoint.
    """
    done = subprocess.run(
        [sys.executable, "-c", LOADING, kind, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
    assert [path.suffix for path in tmp_path.iterdir()] == [f".{kind}"]
