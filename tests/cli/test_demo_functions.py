"""A case of the demonstration's functions that the year of flights does not contain: names that
come late.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aioflow as af
from aioflow.cli.demo import NAMES, AirlineDay, NameAirline
from aioflow.cli.demo_data import Airline

FIGURES = {"flights": 2, "minutes": 30, "worst": 20, "late15": 1}


async def named_after_they_waited(names: list[Airline]) -> list[AirlineDay]:
    """The days of two airlines, whose names are read only once every day has come."""
    days = [
        af.WindowResult(carrier, start, start + 10, FIGURES)
        for start in (0, 10)
        for carrier in ("AA", "UA")
    ]
    all_came = asyncio.Event()
    came = []

    class Watched(NameAirline):
        def process_element(self, day: Any, ctx: af.ProcessContext) -> Iterator[AirlineDay]:
            yield from super().process_element(day, ctx)
            came.append(day)
            if len(came) == len(days):
                all_came.set()

    async def airlines() -> AsyncIterator[Airline]:
        await all_came.wait()
        for airline in names:
            yield airline

    flow = af.Flow("names")
    stream = flow.source(
        days,
        watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda day: day.end - 1),
    )
    late_names = flow.source(airlines)
    return (
        await stream.key_by(lambda day: day.key)
        .connect(late_names.broadcast(NAMES))
        .process(Watched)
        .collect()
    )


async def test_a_day_waits_for_the_name_of_its_airline() -> None:
    rows = await named_after_they_waited([Airline("UA", "United"), Airline("AA", "American")])

    assert sorted(rows) == [
        AirlineDay(name, start, **FIGURES) for name in ("American", "United") for start in (0, 10)
    ]


async def test_a_day_whose_airline_has_no_name_keeps_the_code() -> None:
    rows = await named_after_they_waited([Airline("UA", "United")])

    assert sorted({row.airline for row in rows}) == ["AA", "United"]
    assert len(rows) == 4
