"""Durations as users write them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.timeunits import to_ms, to_seconds


@pytest.mark.parametrize(
    ("duration", "ms"),
    [
        ("100ms", 100),
        ("5s", 5_000),
        ("1m", 60_000),
        ("2h", 7_200_000),
        ("1d", 86_400_000),
        ("1.5s", 1_500),
        ("0.1s", 100),
        ("0s", 0),
        ("-5s", -5_000),
        (" 10 ms ", 10),
        (timedelta(seconds=1.5), 1_500),
        (timedelta(days=-1), -86_400_000),
    ],
)
def test_a_duration_is_read_in_its_unit(duration: Any, ms: int) -> None:
    assert to_ms(duration) == ms
    assert to_seconds(duration) == ms / 1_000


@given(st.timedeltas())
def test_a_timedelta_keeps_its_milliseconds_exactly(delta: timedelta) -> None:
    whole = delta - timedelta(microseconds=delta.microseconds % 1_000)
    assert to_ms(whole) == whole // timedelta(milliseconds=1)
    assert to_seconds(delta) == delta.total_seconds()


@pytest.mark.parametrize(
    "text", ["", "5", "s", "5 sec", "5S", "1m30s", "1e3s", "५s", "1.s", ".5s", "nan s", "5s\n6s"]
)
def test_a_text_that_is_no_duration_is_refused_by_name(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"lateness is .*, expected a timedelta, or a number and a unit"
    ):
        to_ms(text, "lateness")


@pytest.mark.parametrize("value", [5, 1.5, None, True, b"5s"])
def test_a_bare_number_is_refused_because_it_has_no_unit(value: Any) -> None:
    with pytest.raises(TypeError, match=r"every is .* of type \w+, expected a timedelta"):
        to_ms(value, "every")


def test_a_fraction_that_would_be_lost_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number of milliseconds"):
        to_ms("0.5ms")
    with pytest.raises(ValueError, match="whole number of milliseconds"):
        to_ms(timedelta(microseconds=1))
    with pytest.raises(ValueError, match="whole number of microseconds"):
        to_seconds("0.0001ms")
    assert to_seconds("0.5ms") == 0.0005
