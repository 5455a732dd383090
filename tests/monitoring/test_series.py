"""Ten minutes of metrics in a ring, and how names of metrics are taken apart."""

from __future__ import annotations

import math

from aioflow.monitoring.monitor import SeriesBuffer


def test_values_come_back_in_the_order_of_time() -> None:
    buffer = SeriesBuffer()
    for second in range(5):
        buffer.add(100 + second, {"a": second, "b": -second})
    assert buffer.read(["a", "b", "unknown"]) == (
        [100, 101, 102, 103, 104],
        {"a": [0, 1, 2, 3, 4], "b": [0, -1, -2, -3, -4]},
    )
    assert buffer.read(["a"], since_ms=102) == ([103, 104], {"a": [3, 4]})
    assert buffer.read(["a"], since_ms=104) == ([], {"a": []})


def test_only_the_last_points_are_kept() -> None:
    buffer = SeriesBuffer(points_max=3)
    for second in range(1, 8):
        buffer.add(second, {"a": second})
    assert buffer.read(["a"]) == ([5, 6, 7], {"a": [5, 6, 7]})


def test_series_that_did_not_exist_at_a_moment_is_none_then() -> None:
    """A metric that comes late, one that goes, and one that is not a number."""
    buffer = SeriesBuffer(points_max=4)
    buffer.add(1, {"early": 1})
    buffer.add(2, {"early": 2, "late": 2})
    buffer.add(3, {"late": math.nan})
    assert buffer.read(["early", "late"]) == (
        [1, 2, 3],
        {"early": [1, 2, None], "late": [None, 2, None]},
    )
    for second in range(4, 9):
        buffer.add(second, {"late": second})
    assert buffer.read(["early", "late"]) == (
        [5, 6, 7, 8],
        {"early": [None] * 4, "late": [5, 6, 7, 8]},
    )


def test_first_of_too_many_series_are_kept() -> None:
    buffer = SeriesBuffer(series_max=2)
    buffer.add(1, {"a": 1, "b": 2, "c": 3})
    buffer.add(2, {"a": 1, "b": 2, "c": 3})
    assert buffer.names == ["a", "b"]
