"""Frames as sources and as results, and what a notebook shows of flows, streams and jobs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pandas
import polars
import pyarrow as pa
import pytest

import aioflow as af

ROWS = [{"city": "Oslo", "n": 1}, {"city": "Rome", "n": 2}, {"city": "Oslo", "n": 3}]
TABLE = pa.Table.from_pylist(ROWS)


@pytest.mark.parametrize(
    "frame",
    [
        lambda: pandas.DataFrame(ROWS),
        lambda: pandas.DataFrame(ROWS).set_index("city"),
        lambda: polars.DataFrame(ROWS),
        lambda: TABLE,
        lambda: TABLE.to_batches()[0],
        lambda: pa.RecordBatchReader.from_batches(TABLE.schema, TABLE.to_batches()),
    ],
    ids=["pandas", "pandas with an index", "polars", "table", "batch", "reader"],
)
async def test_rows_of_a_frame_are_dicts(frame: Any) -> None:
    stream = af.Flow("cities").source(frame())
    assert await stream.collect() == ROWS
    assert await stream.collect() == ROWS, "a reader is read once, and the flow runs again"


async def test_expressions_read_the_columns_of_a_frame() -> None:
    stream = af.Flow("cities").source(polars.DataFrame(ROWS)).filter(af.col.n > 1)
    counts = stream.key_by(af.col.city).aggregate(af.sum(af.col.n))
    assert sorted(await counts.collect()) == [("Oslo", 3), ("Rome", 2)]


class Visit(NamedTuple):
    city: str
    n: int


@dataclass
class Stay:
    city: str
    n: int


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (ROWS, {"city": ["Oslo", "Rome", "Oslo"], "n": [1, 2, 3]}),
        ([{"a": 1}, {"b": 2}], {"a": [1, None], "b": [None, 2]}),
        ([Visit("Oslo", 1)], {"city": ["Oslo"], "n": [1]}),
        ([Stay("Oslo", 1)], {"city": ["Oslo"], "n": [1]}),
        ([("Oslo", 1), ("Rome", 2)], {"f0": ["Oslo", "Rome"], "f1": [1, 2]}),
        ([1, 2], {"value": [1, 2]}),
        ([], {}),
    ],
)
async def test_elements_become_columns(rows: list[Any], columns: dict[str, list[Any]]) -> None:
    stream = af.Flow("tables").source(rows)
    table = await stream.to_arrow()
    assert isinstance(table, pa.Table)
    assert table.to_pydict() == columns
    frame = await stream.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == list(columns)
    other = await stream.to_polars()
    assert isinstance(other, polars.DataFrame)
    assert other.to_dict(as_series=False) == columns


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([1, "a"], "column 'value' is no column of Arrow"),
        ([{"a": 1}, {"a": "x"}], "column 'a' is no column of Arrow"),
        ([Visit("a", 1), ("b", 2)], "is of type tuple, and the elements before it are of type"),
        ([(1,), (1, 2)], "the tuples have different lengths"),
    ],
)
async def test_elements_that_are_no_table_are_refused_by_name(rows: list[Any], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        await af.Flow("tables").source(rows).to_arrow()


def test_import_loads_no_frame_library() -> None:
    code = (
        "import sys, aioflow as af; af.Flow('f').source([1]).map(abs)._repr_html_(); "
        "assert not {'pandas', 'polars', 'pyarrow', 'numpy', 'IPython'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_notebook_shows_a_flow_as_its_graph() -> None:
    flow = af.Flow("cities")
    assert flow._repr_mimebundle_() == {"text/plain": repr(flow)}
    flow.source(TABLE, name="visits").key_by(af.col.city).count().sink(af.io.blackhole())
    shown = flow._repr_mimebundle_(include=None, exclude=None)
    assert shown["text/plain"] == repr(flow)
    assert shown["image/svg+xml"].startswith("<svg")
    assert "visits" in shown["image/svg+xml"]


def test_picture_of_a_flow_is_valid_for_any_names() -> None:
    flow = af.Flow("cities\x01")
    flow.source([1], name="a\x00b\x1b[0m\ud800").map(str, name="<&>\x7f\n").sink(print)
    picture = flow._repr_mimebundle_()["image/svg+xml"]
    ElementTree.fromstring(picture.encode())
    assert "a\ufffdb" in picture


async def test_a_reader_that_was_read_before_is_refused_or_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = TABLE.to_reader()
    flow = af.Flow("cities")
    assert await flow.source(reader).collect() == ROWS
    with pytest.raises(af.GraphError, match="RecordBatchReader of pyarrow that another source has"):
        af.Flow("again").source(reader)
    elsewhere = TABLE.to_reader()
    elsewhere.read_all()
    assert await af.Flow("empty").source(elsewhere).collect() == []
    assert "without rows, perhaps because it was read before" in caplog.text


def test_notebook_shows_schema_and_first_rows_of_what_is_in_memory(tmp_path: Path) -> None:
    flow = af.Flow("cities")
    table = flow.source(TABLE)._repr_html_()
    for text in ("<td>city</td><td>string</td>", "<td>&#x27;Oslo&#x27;</td><td>1</td>"):
        assert text in table
    visits = flow.source([Visit("<b>", 1)])._repr_html_()
    assert "<td>city</td><td>str</td>" in visits
    assert "&lt;b&gt;" in visits
    assert "Oslo" not in flow.source(TABLE).map(dict)._repr_html_(), "it would need a run"
    file = flow.source(af.io.jsonl(tmp_path / "none.jsonl", Stay))._repr_html_()
    assert "<td>n</td><td>int</td>" in file


async def test_notebook_shows_the_numbers_of_a_job() -> None:
    flow = af.Flow("cities")
    events = flow.source(af.io.push(), name="events")
    counts = events.map(str, name="shown")
    counts.sink(af.io.blackhole())
    async with flow.run() as job, job.subscribe(counts) as rows:
        await job.input(events).put_many([1, 2, 3])
        async with asyncio.timeout(30):
            for _ in range(3):
                await anext(rows)
        shown = job._repr_html_()
        assert "RUNNING" in shown
        assert "<th>records out</th>" in shown
        assert "shown" in shown


class OwnFrame(pandas.DataFrame):
    """A frame of another package, such as geopandas."""


async def test_frame_of_a_subclass_has_no_column_for_an_index_without_a_name() -> None:
    frame = OwnFrame({"n": [1, 2]}, index=[7, 8])
    assert await af.Flow("own").source(frame).collect() == [{"n": 1}, {"n": 2}]


async def test_categories_of_polars_are_texts() -> None:
    frame = polars.DataFrame({"city": polars.Series(["Oslo", None], dtype=polars.Categorical)})
    assert await af.Flow("cities").source(frame).collect() == [{"city": "Oslo"}, {"city": None}]


def test_frames_whose_rows_would_lose_values_are_refused() -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["n", "n"])
    with pytest.raises(af.GraphError, match="with two columns 'n', and rows are dicts"):
        af.Flow("twice").source(table)
    frame = polars.DataFrame({"o": polars.Series([object()], dtype=polars.Object)})
    with pytest.raises(af.GraphError, match="Python objects in column 'o'"):
        af.Flow("objects").source(frame)


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_element_without_a_repr_is_shown_by_its_type() -> None:
    shown = af.Flow("odd").source([Unspeakable()])._repr_html_()
    assert "&lt;Unspeakable whose repr raised RuntimeError&gt;" in shown


async def test_keys_that_give_one_column_are_refused() -> None:
    with pytest.raises(TypeError, match=r"two keys give the same name of a column, among \[1, '1'"):
        await af.Flow("keys").source([{1: 2, "1": 3}]).to_arrow()
