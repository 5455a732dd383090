"""Event time in another unit than milliseconds is told once, by the first record."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

import aioflow as af

S = 1_700_000_000
"""A second in November 2023."""

TOLD: dict[str, tuple[int, str]] = {
    "seconds": (
        S,
        "in the year 1970, in seconds it is in 2023; event time is milliseconds since the epoch, "
        "so give what timestamp= gives * 1000",
    ),
    "microseconds": (
        S * 1_000_000,
        "in microseconds it is in 2023; event time is milliseconds since the epoch, so give what "
        "timestamp= gives // 1000",
    ),
    "nanoseconds": (
        S * 1_000_000_000,
        "in nanoseconds it is in 2023; event time is milliseconds since the epoch, so give what "
        "timestamp= gives // 1_000_000",
    ),
}


def by_function(value: Any) -> Any:
    return value["t"]


def at_source(flow: af.Flow, values: list[Any], strategy: Any) -> Any:
    return flow.source(values, name="trades", watermarks=strategy)


def in_mid_stream(flow: af.Flow, values: list[Any], strategy: Any) -> Any:
    return flow.source(values).assign_timestamps_and_watermarks(strategy, name="trades")


def of_columns(flow: af.Flow, values: list[Any], strategy: Any) -> Any:
    import pyarrow as pa

    return flow.source(
        af.io.arrow(pa.Table.from_pylist(values)), name="trades", watermarks=strategy
    )


async def warnings(
    place: Callable[..., Any], times: list[int], timestamp: Any, caplog: pytest.LogCaptureFixture
) -> list[str]:
    """Returns the warnings for a stream of these `times`."""
    strategy = af.WatermarkStrategy.bounded_out_of_orderness("1s", timestamp=timestamp)
    stream = place(af.Flow("units"), [{"t": time} for time in times], strategy)
    with caplog.at_level(logging.WARNING, "aioflow.advice.runtime"):
        assert len(await stream.collect()) == len(times)
    return caplog.messages


@pytest.mark.parametrize("place", [at_source, in_mid_stream, of_columns])
@pytest.mark.parametrize("unit", TOLD)
async def test_times_of_another_unit_are_warned_of_once(
    unit: str, place: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    first, told = TOLD[unit]
    (warned,) = await warnings(place, [first] * 5_000, af.col.t, caplog)
    assert warned.startswith(
        f"the first timestamp of operator 'trades' is {first}: in milliseconds that is in the year "
    )
    assert warned.endswith(told)


async def test_a_function_is_explained_as_an_expression_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert len(await warnings(at_source, [S, S + 1], by_function, caplog)) == 1


@pytest.mark.parametrize("place", [at_source, in_mid_stream, of_columns])
@pytest.mark.parametrize(
    "first", [0, 5, -S, 60_000, 999_999_999, 2_500_000_000, S * 1000, 4 * S * 1000, 10**14, 10**17]
)
async def test_milliseconds_of_any_time_that_anybody_uses_are_no_news(
    first: int, place: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A later record may look like seconds, because only the first record is examined."""
    assert await warnings(place, [first, S], af.col.t, caplog) == []


@pytest.mark.parametrize(
    ("timestamp", "told"),
    [
        (af.col.t, "use col.t.cast(int) if it is a number, or parse it first"),
        (by_function, "parse it first"),
    ],
)
async def test_error_for_a_time_that_is_text_says_how_it_becomes_a_number(
    timestamp: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    texts: list[Any] = ["5"]
    with pytest.raises(TypeError) as caught:
        await warnings(at_source, texts, timestamp, caplog)
    assert (
        str(caught.value)
        == f"timestamp is '5' of type str, expected int milliseconds since the epoch; {told}"
    )
