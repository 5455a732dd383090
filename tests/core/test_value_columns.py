"""Values that are built alike come out of their columns as they went in, all of them or one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.wire.serializers import (
    LEVELS_MAX,
    ROWS_MAX,
    WIDTH_MAX,
    lay_out,
    pick,
    put_together,
)
from aioflow.core.wire.values import SCALARS

shapes = st.recursive(
    st.sampled_from(
        [st.integers(), st.text(max_size=2), st.none(), st.floats(allow_nan=False) | st.booleans()]
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: st.tuples(*parts)),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: st.tuples(*parts).map(list)),
    ),
    max_leaves=6,
)


@given(shapes.flatmap(lambda shape: st.lists(shape, min_size=1, max_size=9)))
def test_values_come_out_of_their_columns_as_they_went_in(values: list[Any]) -> None:
    columns: list[Any] = []
    layout = lay_out(values, SCALARS, columns)
    assert layout is not None
    assert repr(put_together(layout, iter(columns))) == repr(values)
    assert repr([pick(layout, iter(columns), row) for row in range(len(values))]) == repr(values)


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else 1


@pytest.mark.parametrize(
    "values",
    [
        [[1], [1, 2]],
        [[1], (1,)],
        [[1], 1],
        [[1, {2}], [1, {2}]],
        [[], []],
        [[1, [2]], [1, 2]],
        [[0] * (WIDTH_MAX + 1)] * 4,
        [deep(LEVELS_MAX + 1)] * 4,
        [[0]] * (ROWS_MAX + 1),
    ],
)
def test_values_that_are_not_built_alike_have_no_columns(values: list[Any]) -> None:
    assert lay_out(values, SCALARS, []) is None


def test_value_that_contains_itself_has_no_columns() -> None:
    endless: list[Any] = []
    endless += [endless] * WIDTH_MAX
    assert lay_out([endless] * 4, SCALARS, []) is None
