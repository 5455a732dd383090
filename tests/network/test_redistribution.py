"""Sharing segments over pools: the table of D5, and what holds for any pools."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.network.local_pool import redistribute


@pytest.mark.parametrize(
    "total, bounds, sizes",
    [
        (10, [(1, None)], [10]),  # D5.1
        (10, [(1, None), (1, None)], [5, 5]),  # D5.1
        (100, [(24, 24), (1, None)], [24, 76]),  # D5.2
        (10, [(1, 10)], [10]),  # D5.3
        (8, [(1, 10)], [8]),  # D5.3
        (8, [(1, 10), (1, 10)], [4, 4]),  # D5.3
        (6, [(1, 10), (1, 10)], [3, 3]),  # D5.3
        (4, [(1, 10), (1, 10)], [2, 2]),  # D5.3
        (3, [(1, 10), (1, 10), (1, 10)], [1, 1, 1]),  # D5.4
        (100, [(1, 5), (2, 7)], [5, 7]),
        (5, [], []),
        (7, [(3, 3), (4, 4)], [3, 4]),
    ],
)
def test_sizes(total: int, bounds: list[tuple[int, int | None]], sizes: list[int]) -> None:
    """D5.1, D5.2, D5.3, D5.4: the sizes; test_buffers has the sequences."""
    assert redistribute(total, bounds) == sizes


def test_three_segments_for_two_pools_are_all_distributed_and_no_pool_starves() -> None:
    """D5.4"""
    sizes = redistribute(3, [(1, 10), (1, 10)])
    assert sorted(sizes) == [1, 2]


def test_less_than_the_minimums_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="less than the minimums"):
        redistribute(2, [(1, None), (2, None)])


pool_bounds = st.tuples(st.integers(0, 20), st.none() | st.integers(0, 40)).map(
    lambda pair: (pair[0], None if pair[1] is None else pair[0] + pair[1])
)


@given(st.lists(pool_bounds, max_size=8), st.integers(0, 200))
def test_every_size_is_within_bounds_and_nothing_is_left_over(
    bounds: list[tuple[int, int | None]], spare: int
) -> None:
    total = sum(low for low, _ in bounds) + spare
    sizes = redistribute(total, bounds)
    for (low, high), size in zip(bounds, sizes, strict=True):
        assert low <= size
        assert high is None or size <= high
    wanted = [total if high is None else high for _, high in bounds]
    assert sum(sizes) == min(total, sum(wanted))


@given(pool_bounds, st.integers(1, 8), st.integers(0, 200))
def test_pools_with_equal_bounds_differ_by_at_most_one(
    bounds: tuple[int, int | None], count: int, spare: int
) -> None:
    sizes = redistribute(bounds[0] * count + spare, [bounds] * count)
    assert max(sizes) - min(sizes) <= 1
