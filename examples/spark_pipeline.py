"""Spark and a flow in one program: SQL cleans and joins, the flow follows each airport in event
time, Spark stores the windows.

Needs `pip install 'aioflow[spark]'` and Java 17. Three steps:

1. Spark reads departures and weather, drops what is broken and joins them by airport and hour.
2. The flow takes the result as a stream: hourly windows, and an alert when nothing has left an
   airport for three hours.
3. Spark writes the windows to Parquet, and reads them back.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aioflow as af

HOUR_MS = 3_600_000

DEPARTURES = """
    SELECT * FROM VALUES ('JFK', 5, 10, 4), ('JFK', 5, 40, 31), ('LGA', 5, 55, NULL),
                         ('LGA', 6, 5, 2), ('JFK', 6, 20, 9), (NULL, 6, 30, 1),
                         ('LGA', 10, 45, 75), ('JFK', 11, 15, 20)
                         AS departures(airport, hour, minute, delay)"""
WEATHER = """
    SELECT * FROM VALUES ('JFK', 5, 'fair'), ('LGA', 5, 'fair'), ('JFK', 6, 'rain'),
                         ('LGA', 6, 'fair'), ('LGA', 10, 'snow'), ('JFK', 11, 'fair')
                         AS weather(airport, hour, sky)"""
CLEANED = """
    SELECT airport, sky, delay, (hour * 60 + minute) * 60000 AS at
    FROM departures JOIN weather USING (airport, hour)
    WHERE airport IS NOT NULL AND delay IS NOT NULL ORDER BY at"""


class Departure(NamedTuple):
    """`at` is ms since midnight, `delay` is minutes."""

    airport: str
    sky: str
    delay: int
    at: int


class Silence(af.KeyedProcessFunction[str, Departure, str]):
    """Says when nothing has left an airport for three hours."""

    def open(self, ctx: af.RuntimeContext) -> None:
        self.due = ctx.get_state(af.ValueStateDescriptor[int]("due"))

    def process_element(self, departure: Departure, ctx: af.ProcessContext) -> None:
        if self.due.value() is not None:
            ctx.timer_service.delete_event_time_timer(self.due.value())
        self.due.update(departure.at + 3 * HOUR_MS)
        ctx.timer_service.register_event_time_timer(self.due.value())

    def on_timer(self, timestamp: int, ctx: af.ProcessContext) -> Iterator[str]:
        yield (
            f"{ctx.current_key} is silent since "
            f"{(timestamp - 3 * HOUR_MS) // 60_000 // 60}:{timestamp // 60_000 % 60:02}"
        )


def cleaned(session: Any) -> Any:
    """The departures with their weather, in one partition: their order is their time."""
    session.sql(DEPARTURES).createOrReplaceTempView("departures")
    session.sql(WEATHER).createOrReplaceTempView("weather")
    return session.sql(CLEANED).coalesce(1)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with af.SparkBridge("local[2]") as spark:
            windows = Path(folder, "windows")
            alerts: list[str] = []

            flow = af.Flow("departures")
            departures = flow.source(
                af.io.spark(spark, cleaned, Departure),
                watermarks=af.WatermarkStrategy.monotonous_timestamps(
                    timestamp=lambda departure: departure.at
                ),
            )
            departures.key_by(lambda departure: departure.airport).process(Silence).sink(
                alerts.append
            )
            (
                departures.key_by(lambda departure: departure.airport)
                .window(af.tumbling("1h"))
                .aggregate(
                    af.agg(flights=af.count(), mean=af.mean(lambda departure: departure.delay))
                )
                .map(
                    lambda window: (
                        window.key,
                        window.start // HOUR_MS,
                        window.value["flights"],
                        window.value["mean"],
                    )
                )
                .sink(
                    af.io.spark(
                        spark,
                        into=windows,
                        schema="airport string, hour bigint, flights bigint, mean double",
                    )
                )
            )
            await flow.execute()

            stored = await spark.sql(f"SELECT * FROM parquet.`{windows}` ORDER BY hour, airport")
            for row in await spark.call(stored.collect):
                print(
                    f"{row.hour:2}:00  {row.airport}  {row.flights} left, {row.mean:4.1f} minutes "
                    "late"
                )
            for alert in sorted(alerts):
                print(alert)


if __name__ == "__main__":
    asyncio.run(main())
