"""Pages of Arrow: the rows that Arrow itself would give, and one list of texts for all of them."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.columns.arrow import ArrowPages
from aioflow.core.column_batch import CodedColumn

texts = st.lists(
    st.one_of(
        st.none(), st.sampled_from(["", "a", "b", "\U0001f600", "long " * 9]), st.text(max_size=2)
    ),
    max_size=60,
)
kinds = st.sampled_from(
    [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.binary()]
)


def page_of(items: list[Any], kind: Any) -> Any:
    """A table of several chunks, as a row group may have."""
    if kind == pa.binary():
        items = [None if item is None else item.encode() for item in items]
    halves = [pa.array(half, kind) for half in (items[: len(items) // 2], items[len(items) // 2 :])]
    return pa.table({"text": pa.chunked_array(halves, kind), "number": list(range(len(items)))})


@given(st.lists(st.tuples(texts, st.integers(1, 20), kinds), max_size=8))
def test_pages_have_the_rows_that_arrow_gives(
    given: list[tuple[list[str | None], int, Any]],
) -> None:
    pages, read = ArrowPages(), []
    for items, times, kind in given:
        page = page_of(items * times, kind)
        read.append((page.to_pylist(), pages.settle(pages.read(page))))
    for rows, batch in read:  # Later pages change nothing about those before.
        assert batch.to_list() == rows


@pytest.mark.parametrize("batches", [False, True], ids=["tables", "record batches"])
def test_texts_that_come_again_have_the_code_that_they_had(batches: bool) -> None:
    pages = ArrowPages()
    columns = []
    for words in (["a", "b"], ["b", "c"], ["c", "a", None], ["d"]):
        table = pa.table({"word": words * 50})
        columns.append(
            pages.settle(pages.read(table.to_batches()[0] if batches else table)).columns["word"]
        )
    assert all(isinstance(column, CodedColumn) for column in columns)
    entries = columns[0].entries
    assert all(column.entries is entries for column in columns)
    assert entries == ["a", "b", "c", "d"]


def test_texts_that_do_not_come_again_are_not_kept() -> None:
    pages = ArrowPages()
    first = pages.settle(pages.read(pa.table({"name": ["x"] * 100}))).columns["name"]
    names = [f"name {i}" for i in range(100)]
    column = pages.settle(pages.read(pa.table({"name": names}))).columns["name"]
    assert column.to_list() == names
    assert first.entries == ["x"]
    again = pages.settle(pages.read(pa.table({"name": ["y", "x"] * 50}))).columns["name"]
    assert again.to_list() == ["y", "x"] * 50
    assert again.entries is first.entries


def test_a_page_at_the_end_of_a_long_table_costs_what_it_holds() -> None:
    count = 8_000_000
    table = pa.table(
        {"n": pa.array(range(8), mask=np.arange(8) == 3).take(pa.array(np.arange(count) % 8))}
    )
    tracemalloc.start()
    try:
        column = ArrowPages().read(table.slice(count - 13, 8)).columns["n"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert column.to_list() == [None, 4, 5, 6, 7, 0, 1, 2]
    assert peak < 1 << 20
