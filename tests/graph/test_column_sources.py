"""Which sources give columns, and which fields travel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.graph.job_graph import build_job_graph

e = af.col
TIMES = af.WatermarkStrategy.bounded_out_of_orderness("1s", timestamp=e.ts)
BY_FUNCTION: Any = af.WatermarkStrategy.bounded_out_of_orderness("1s", timestamp=lambda row: row["ts"])


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
    "window": lambda s: written(s.key_by(e.user).window(af.tumbling("1s")).aggregate(af.sum(e.value))),
    "sink": written,
    "steps": lambda s: written(s.filter(e.value > 0).select(user=e.user).rebalance()),
    "steps and aggregate": lambda s: written(s.filter(e.value > 0).key_by(e.user).max(e.value)),
    "times in mid-stream": lambda s: written(s.assign_timestamps_and_watermarks(TIMES).key_by(e.user).count()),
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
    "times by a function": lambda s: written(s.assign_timestamps_and_watermarks(BY_FUNCTION).key_by(e.user).count()),
}


def source_of(shape: Callable[[Any], None], source: Any, times: Any = TIMES) -> Any:
    flow = af.Flow("columns")
    shape(flow.source(source, watermarks=times))
    return build_job_graph(flow.graph).vertices[0].head.source


@pytest.mark.parametrize("shape", USED)
def test_columns_are_made_where_they_are_put_to_use(shape: str, tmp_path: Path) -> None:
    assert source_of(USED[shape], af.io.jsonl(tmp_path)).columnar
    assert source_of(USED[shape], af.io.datagen({"ts": e.index, "user": 1, "value": 2}, count=1)).columnar


@pytest.mark.parametrize("shape", UNUSED)
def test_rows_are_made_where_something_takes_rows(shape: str, tmp_path: Path) -> None:
    source = af.io.jsonl(tmp_path)
    assert source_of(UNUSED[shape], source) is source


def test_times_by_a_function_take_rows(tmp_path: Path) -> None:
    source = af.io.jsonl(tmp_path)
    for times in (BY_FUNCTION, af.WatermarkStrategy.ingestion_time(), af.WatermarkStrategy.punctuated(lambda value: None, timestamp=e.ts)):
        assert source_of(USED["aggregate"], source, times) is source


def fields(stream: Any) -> list[Any]:
    return [edge.partitioning.fields for edge in build_job_graph(stream.flow.graph).edges]


def test_what_an_aggregate_or_a_window_does_not_read_does_not_travel(tmp_path: Path) -> None:
    def keyed() -> Any:
        return af.Flow("fields").source(af.io.jsonl(tmp_path), watermarks=TIMES).key_by(e.user)

    assert fields(keyed().count()) == [()]
    assert fields(keyed().aggregate(af.agg(n=af.count(where=e.flag), s=af.sum(e.a + e.b)))) == [("flag", "a", "b")]
    assert fields(keyed().sum(lambda row: row["value"])) == [None]
    windowed = keyed().window(af.tumbling("1s")).aggregate(af.sum(e.value))
    assert fields(windowed) == [("value",)]
    windowed.late.sink(print)
    assert fields(windowed)[0] is None, "late elements come out whole"
    assert fields(keyed().window(af.session("1s")).aggregate(af.sum(e.value))) == [None]
    assert fields(keyed().process(lambda value, ctx: None)) == [None]
