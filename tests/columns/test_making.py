"""Columns put together: the values of all, type for type, in the best form that they have in
common.
"""

from __future__ import annotations

from typing import Any

import pytest

from aioflow.columns.build import column_of, concat
from aioflow.core.column_batch import CodedColumn, Column, ColumnBatch, NumberColumn, ObjectColumn
from tests.columns.batches import batch_of_rows


@pytest.mark.parametrize(
    ("lists", "form"),
    [
        ([[1, 2], [3]], NumberColumn),
        ([[1, None], [3]], NumberColumn),
        ([[1.5], [None, 2.0]], NumberColumn),
        ([[1], [None, None]], NumberColumn),
        ([[1], [2.0]], ObjectColumn),
        ([[1], [2**70]], ObjectColumn),
        ([["a", None], ["b", "a"]], CodedColumn),
        ([[None], ["b"]], CodedColumn),
        ([["a"], [1]], ObjectColumn),
        ([[True], [1]], ObjectColumn),
    ],
)
def test_columns_behind_each_other_have_the_values_of_all(
    lists: list[list[Any]], form: type[Column]
) -> None:
    made = concat([column_of(items) for items in lists])
    expected = [item for items in lists for item in items]
    assert [(type(item), item) for item in made] == [(type(item), item) for item in expected]
    assert type(made) is form


def test_entries_that_columns_share_are_taken_once() -> None:
    whole = column_of(["a", "b", None, "a"])
    made = concat([whole[:2], whole[2:], column_of(["c"])])
    assert list(made) == ["a", "b", None, "a", "c"]
    assert made.entries == ["a", "b", "c"]
    assert concat([whole[:1], whole[3:]]).entries is whole.entries


def test_batches_stay_columns_where_they_have_the_same_fields_and_are_rows_otherwise() -> None:
    one, other = batch_of_rows([{"a": 1, "b": "x"}]), batch_of_rows([{"a": 2, "b": "y"}])
    made = concat([one, other])
    assert type(made) is ColumnBatch
    assert list(made) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    mixed = concat([one, batch_of_rows([{"b": 1}])])
    assert type(mixed) is ObjectColumn
    assert list(mixed) == [{"a": 1, "b": "x"}, {"b": 1}]
