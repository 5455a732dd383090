"""The sources that give columns, and the fields that travel."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.core.column_batch import ColumnBatch
from aioflow.graph.job_graph import build_job_graph
from aioflow.graph.optimize import is_taken_apart
from aioflow.operators.source import discover_splits
from tests.io.driver import system_context

e = af.col
TIMES = af.WatermarkStrategy.bounded_out_of_orderness("1s", timestamp=e.ts)
BY_FUNCTION: Any = af.WatermarkStrategy.bounded_out_of_orderness(
    "1s", timestamp=lambda row: row["ts"]
)


def written(stream: Any) -> None:
    stream.sink(af.io.blackhole())


def both_ways(stream: Any) -> None:
    written(stream.key_by(e.user).count())
    stream.map(str).sink(af.io.blackhole())


def two_uses(stream: Any) -> None:
    written(stream.key_by(e.user).count())
    written(stream)


USED: dict[str, Callable[[Any], None]] = {
    "aggregate": lambda s: written(s.key_by(e.user).count()),
    "window": lambda s: written(
        s.key_by(e.user).window(af.tumbling("1s")).aggregate(af.sum(e.value))
    ),
    "sink": written,
    "steps": lambda s: written(s.filter(e.value > 0).select(user=e.user).rebalance()),
    "steps and aggregate": lambda s: written(s.filter(e.value > 0).key_by(e.user).max(e.value)),
    "times in mid-stream": lambda s: written(
        s.assign_timestamps_and_watermarks(TIMES).key_by(e.user).count()
    ),
    "two uses": two_uses,
}
UNUSED: dict[str, Callable[[Any], None]] = {
    "function": lambda s: written(s.map(str)),
    "function behind a step": lambda s: written(s.filter(e.value > 0).map(str)),
    "key by a function": lambda s: written(s.key_by(lambda row: row["user"]).count()),
    "aggregate of a function": lambda s: written(s.key_by(e.user).sum(lambda row: row["value"])),
    "shuffle": lambda s: written(s.shuffle()),
    "one of two": both_ways,
    "sink of records": lambda s: s.sink(print),
    "times by a function": lambda s: written(
        s.assign_timestamps_and_watermarks(BY_FUNCTION).key_by(e.user).count()
    ),
}


def source_of(shape: Callable[[Any], None], source: Any, times: Any = TIMES) -> Any:
    flow = af.Flow("columns")
    shape(flow.source(source, watermarks=times))
    return build_job_graph(flow.graph).vertices[0].head.source


@pytest.mark.parametrize("shape", USED)
def test_columns_are_made_where_they_are_put_to_use(shape: str, tmp_path: Path) -> None:
    assert source_of(USED[shape], af.io.jsonl(tmp_path)).columnar
    assert source_of(
        USED[shape], af.io.datagen({"ts": e.index, "user": 1, "value": 2}, count=1)
    ).columnar


@pytest.mark.parametrize("shape", UNUSED)
def test_rows_are_made_where_something_takes_rows(shape: str, tmp_path: Path) -> None:
    source = af.io.jsonl(tmp_path)
    assert source_of(UNUSED[shape], source) is source


def test_times_by_a_function_take_rows(tmp_path: Path) -> None:
    source = af.io.jsonl(tmp_path)
    for times in (
        BY_FUNCTION,
        af.WatermarkStrategy.ingestion_time(),
        af.WatermarkStrategy.punctuated(lambda value: None, timestamp=e.ts),
    ):
        assert source_of(USED["aggregate"], source, times) is source


def fields(stream: Any) -> list[Any]:
    return [edge.partitioning.fields for edge in build_job_graph(stream.flow.graph).edges]


def test_fields_that_an_aggregate_or_a_window_does_not_read_do_not_travel(tmp_path: Path) -> None:
    def keyed() -> Any:
        return af.Flow("fields").source(af.io.jsonl(tmp_path), watermarks=TIMES).key_by(e.user)

    assert fields(keyed().count()) == [()]
    assert fields(keyed().aggregate(af.agg(n=af.count(where=e.flag), s=af.sum(e.a + e.b)))) == [
        ("flag", "a", "b")
    ]
    assert fields(keyed().sum(lambda row: row["value"])) == [None]
    windowed = keyed().window(af.tumbling("1s")).aggregate(af.sum(e.value))
    assert fields(windowed) == [("value",)]
    windowed.late.sink(print)
    assert fields(windowed)[0] is None, "late elements come out whole"
    assert fields(keyed().window(af.session("1s")).aggregate(af.sum(e.value))) == [None]
    assert fields(keyed().process(lambda value, ctx: None)) == [None]


def test_a_count_of_keys_gets_the_keys_alone(tmp_path: Path) -> None:
    def alone(shape: Callable[[Any], Any], key: Any) -> list[bool]:
        stream = shape(af.Flow("alone").source(af.io.jsonl(tmp_path), watermarks=TIMES).key_by(key))
        return [edge.partitioning.keys_alone for edge in build_job_graph(stream.flow.graph).edges]

    clock = af.tumbling("1s", time="processing")
    for key in (e.user, lambda row: row["user"]):
        assert alone(lambda keyed: keyed.count(), key) == [True]
        assert alone(lambda keyed: keyed.aggregate(af.agg(n=af.count())), key) == [True]
        assert alone(lambda keyed: keyed.window(clock).aggregate(af.count()), key) == [True]
        assert alone(
            lambda keyed: keyed.aggregate(af.agg(n=af.count(), total=af.sum(e.value))), key
        ) == [False]
        assert alone(
            lambda keyed: keyed.aggregate(af.count(where=lambda row: row["flag"])), key
        ) == [False]
        late = "late elements come out whole for their subscribers"
        assert alone(lambda keyed: keyed.window(af.tumbling("1s")).aggregate(af.count()), key) == [
            False
        ], late
        assert alone(lambda keyed: keyed.reduce(max), key) == [False]


def test_all_that_an_aggregate_takes_of_a_record_goes_in_its_place() -> None:
    def taken(shape: Callable[[Any], Any], parallelism: int = 2) -> tuple[Any, ...] | None:
        flow = af.Flow("taken", parallelism=parallelism)
        stream = shape(
            flow.source([{"user": 1, "ts": 1}], watermarks=TIMES, parallelism=1).key_by(
                lambda row: row["user"]
            )
        )
        (edge,) = [
            edge
            for edge in build_job_graph(stream.flow.graph).edges
            if edge.partitioning.function is not None
        ]
        return edge.partitioning.taken

    value: Callable[[Any], Any] = lambda row: row["value"]
    total = af.agg(n=af.count(), total=af.sum(value))
    assert taken(lambda keyed: keyed.aggregate(total)) == (value,)
    assert taken(lambda keyed: keyed.window(af.tumbling("1s")).aggregate(total)) == (value,)
    assert taken(lambda keyed: keyed.window(af.tumbling("1s")).aggregate(af.count())) == ()
    assert taken(
        lambda keyed: keyed.window(af.tumbling("1s", time="processing")).aggregate(total)
    ) == (value,)
    assert taken(lambda keyed: keyed.aggregate(total), parallelism=1) is None, (
        "nothing is dealt out"
    )
    assert taken(lambda keyed: keyed.window(af.session("1s")).aggregate(total)) is None
    assert taken(lambda keyed: keyed.reduce(max)) is None


def test_batches_are_folded_before_they_are_distributed_to_windows_with_unread_late_ones() -> None:
    def is_folded(shape: Callable[[Any], Any], parallelism: int = 2) -> bool:
        flow = af.Flow("local", parallelism=parallelism)
        stream = shape(
            flow.source([{"user": 1, "ts": 1}], watermarks=TIMES, parallelism=1).key_by(
                lambda row: row["user"]
            )
        )
        (edge,) = [
            edge
            for edge in build_job_graph(stream.flow.graph).edges
            if edge.partitioning.function is not None
        ]
        return edge.partitioning.local is not None

    best: Any = af.max_by(lambda row: row["value"])
    window = af.tumbling("1s")
    assert is_folded(lambda keyed: keyed.window(window).aggregate(best))
    assert not is_folded(lambda keyed: keyed.window(window).aggregate(best), parallelism=1), (
        "nothing is dealt out"
    )
    assert not is_folded(lambda keyed: keyed.window(window, lateness="1s").aggregate(best)), (
        "each late element gives a result"
    )
    assert not is_folded(lambda keyed: keyed.window(window).aggregate(af.count()))
    assert not is_folded(lambda keyed: keyed.aggregate(best)), "each element gives a result"
    assert not is_folded(lambda keyed: keyed.window(af.session("1s")).aggregate(best))

    flow = af.Flow("local", parallelism=2)
    keyed = flow.source([{"user": 1, "ts": 1}], watermarks=TIMES, parallelism=1).key_by(
        lambda row: row["user"]
    )
    windowed = keyed.window(window).aggregate(best)
    place = windowed.late.upstreams[0].place
    assert is_taken_apart(flow.graph, place)
    assert not is_taken_apart(flow.graph, place, [place])
    windowed.late.sink(print)
    assert not is_taken_apart(flow.graph, place)
    assert not any(edge.partitioning.local for edge in build_job_graph(flow.graph).edges)


def test_a_window_whose_late_elements_are_read_gets_them_whole() -> None:
    flow = af.Flow("taken", parallelism=2)
    keyed = flow.source([{"user": 1, "ts": 1}], watermarks=TIMES, parallelism=1).key_by(
        lambda row: row["user"]
    )
    windowed = keyed.window(af.tumbling("1s")).aggregate(af.count())

    def taken(whole: Any = ()) -> list[Any]:
        return [
            edge.partitioning.taken
            for edge in build_job_graph(flow.graph, whole=whole).edges
            if edge.partitioning.function
        ]

    place = windowed.late.upstreams[0].place
    assert (taken(), is_taken_apart(flow.graph, place)) == ([()], True)
    assert (taken([place]), is_taken_apart(flow.graph, place, [place])) == ([None], False)
    windowed.late.sink(print)
    assert (taken(), is_taken_apart(flow.graph, place)) == ([None], False)


READ: dict[str, tuple[Callable[[Any], Any], list[str] | None]] = {
    "a key and a time": (lambda s: s.key_by(e.user).count(), ["ts", "user"]),
    "a window": (
        lambda s: (
            s.filter(e.flag)
            .key_by(e.user % 3)
            .window(af.tumbling("1s"))
            .aggregate(af.sum(e.a + e.b))
        ),
        ["a", "b", "flag", "ts", "user"],
    ),
    "a select": (
        lambda s: s.filter(e.a > 0).select(x=e.b).filter(e.x > 1).key_by(e.x).count(),
        ["a", "b", "ts"],
    ),
    "late elements": (
        lambda s: s.key_by(e.user).window(af.tumbling("1s")).aggregate(af.count()).late,
        None,
    ),
    "whole records": (lambda s: s.filter(e.a > 0).rebalance(), None),
}


def two_readers(stream: Any) -> Any:
    written(stream.key_by(e.user).count())
    return stream.filter(e.flag).select(x=e.a)


READ["two readers"] = (two_readers, ["a", "flag", "ts", "user"])


@pytest.mark.parametrize("shape", READ)
async def test_sources_make_no_unread_columns(shape: str, tmp_path: Path) -> None:
    """Holds for every format; the flow gives the same without them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    build, names = READ[shape]
    rows = [
        {"ts": i, "user": i % 5, "flag": i % 2 == 0, "a": i % 7, "b": i % 3, "word": f"w{i}"}
        for i in range(40)
    ]
    table = pa.Table.from_pylist(rows)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(table, tmp_path / "in.parquet")
    with pa.ipc.new_file(str(tmp_path / "in.arrow"), table.schema) as file:
        file.write_table(table)
    expected = list(
        map(repr, await build(af.Flow("rows").source(rows, watermarks=TIMES)).collect())
    )
    sources: list[Any] = [
        af.io.arrow(table),
        af.io.arrow(tmp_path / "in.arrow"),
        af.io.parquet(tmp_path / "in.parquet"),
    ]
    for source in [
        *sources,
        af.io.jsonl(tmp_path / "in.jsonl"),
        af.io.jsonl(tmp_path / "in.jsonl", Record),
    ]:
        flow = af.Flow("read")
        stream = build(flow.source(source, watermarks=TIMES))
        if shape != "whole records":  # Which are of the type, if there is one.
            assert sorted(map(repr, await stream.collect())) == sorted(expected)
        stream.sink(af.io.blackhole())
        head: Any = build_job_graph(flow.graph).vertices[0].head.source
        batch = await first_batch(head)
        if names is None:
            assert len(batch.columns) == 6
        else:
            assert sorted(batch.columns) == names


async def test_whole_records_are_read_if_one_lacks_a_field(tmp_path: Path) -> None:
    """So the error that names the missing field also shows the existing ones."""
    import pyarrow as pa

    (tmp_path / "in.jsonl").write_text('{"user": 1, "word": "w"}\n')
    for source in (
        af.io.arrow(pa.table({"user": [1], "word": ["w"]})),
        af.io.jsonl(tmp_path / "in.jsonl"),
    ):
        flow = af.Flow("read")
        counts = flow.source(source).key_by(e.user).sum(e.missing)
        head: Any = build_job_graph(flow.graph).vertices[0].head.source
        assert sorted((await first_batch(head)).columns) == ["user", "word"]
        with pytest.raises(LookupError, match="missing"):
            await counts.collect()


@dataclass
class Record:
    ts: int
    user: int
    flag: bool
    a: int
    b: int
    word: str


async def first_batch(source: Any) -> ColumnBatch:
    """The first columns that its reader gives."""
    async with system_context() as context, asyncio.timeout(60):
        reader = source.reader(context)
        await reader.open(await discover_splits(source, context.host))
        try:
            while (batch := reader.poll_batch(1_024)) is None:
                await reader.wait()
        finally:
            await reader.close()
    assert isinstance(batch, ColumnBatch)
    return batch


def test_planner_makes_no_operator(tmp_path: Path) -> None:
    flow = af.Flow("planned", parallelism=2)
    rows = flow.source(af.io.jsonl(tmp_path), watermarks=TIMES)
    late = rows.filter(e.value > 1).select(user=e.user, value=e.value, ts=e.ts)
    window = late.key_by(e.user).window(af.tumbling("1s")).aggregate(af.sum(e.value))
    window.sink(af.io.blackhole())
    made: list[str] = []
    for node in flow.graph.nodes.values():
        node.factory = node.factory and partial(made.append, node.name)

    build_job_graph(flow.graph, apart=True)
    window.explain()

    assert not made
