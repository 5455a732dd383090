"""The year of flights with Spark, as `make demo` runs it, against the same year computed by
DuckDB from the same files.
"""

from __future__ import annotations

import importlib
import re
import zipfile
from pathlib import Path

import duckdb
import pytest

from aioflow.cli.demo_data import find_data
from aioflow.spark.bridge.session import SparkBridge

YEAR = """
    with flown as (
        select *, time_hour + to_minutes(minute::int + dep_delay::int) as moment
        from flights where dep_delay is not null
    )
    select case when visib is null then 'not observed'
                when visib < 2 then 'visibility under 2 miles' when precip > 0 then 'rain or snow'
                when wind_speed > 25 then 'wind over 25 mph' else 'fair' end as sky,
           count(*), avg(dep_delay), avg((dep_delay > 15)::int)
    from flown left join weather
         on weather.origin = flown.origin and weather.time_hour = date_trunc('hour', moment)
    group by sky order by 3 desc
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_year_of_flights_with_spark_equals_a_query_over_all_rows_in_both_runs(
    tmp_path: Path, spark: SparkBridge, capsys: pytest.CaptureFixture[str]
) -> None:
    await importlib.import_module("examples.spark_flights").main(spark.master)

    db, data = duckdb.connect(), find_data()
    zipfile.ZipFile(data / "flights.csv.zip").extract("flights.csv", tmp_path)
    for name, path in (("flights", tmp_path / "flights.csv"), ("weather", data / "weather.csv")):
        db.execute(f"create table {name} as select * from read_csv('{path}', nullstr='NA')")
    expected = [
        f"{sky} {n:,} {mean:.1f} min {late:.1%}"
        for sky, n, mean, late in db.execute(YEAR).fetchall()
    ]
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    head = lines.index("Weather at departure flights mean >15 min")
    assert lines[head + 1 : head + 1 + len(expected)] == expected
    assert len(expected) == 5
    # The blizzard of February closed all three airports for a night and a morning.
    assert sum("Fri 08 Feb" in line for line in lines) == 3
    assert re.fullmatch(r"Both runs gave the same [\d,]+ windows and 5 silences\.", lines[-1])
