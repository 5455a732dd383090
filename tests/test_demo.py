"""Every number of the demonstration, against the same year computed by DuckDB from the same
files.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest

from aioflow.cli.demo import QUIET_MS, Report, build_flow
from aioflow.cli.demo_data import FlightLog, find_data
from aioflow.cli.progress import Watcher, run_flow
from tests.integration.clusters import Cluster

pytestmark = [pytest.mark.examples, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
DAY_MS = 86_400_000
NIGHT_MS = 5 * 3_600_000
OUT_OF_ORDER_MS = 2 * 3_600_000


@pytest.fixture(scope="module")
def report() -> Report:
    report = Report()
    run_flow(build_flow(find_data(), report), Watcher())
    return report


@pytest.fixture(scope="module")
def db() -> duckdb.DuckDBPyConnection:
    """`flown`: one row a departure in order of arrival `n`, with the watermark that stands when
    it comes. `arrived`: cancelled ones too.
    """
    folder = find_data()
    flights = pd.read_csv(folder / "flights.csv.zip")
    # Not from `time_hour`, which the demonstration reads: from the local date and clock.
    local = pd.to_datetime(flights[["year", "month", "day", "hour", "minute"]]).dt.tz_localize(
        "America/New_York"
    )
    flights["scheduled"] = local.astype("int64") // 1_000_000
    flights["line"] = flights.index
    weather = pd.read_csv(folder / "weather.csv")
    weather["time"] = pd.to_datetime(weather["time_hour"]).astype("int64") // 1_000_000_000 * 1000
    airlines = pd.read_csv(folder / "airlines.csv")
    connection = duckdb.connect()
    for name, frame in {"csv": flights, "weather": weather, "airlines": airlines}.items():
        connection.register(f"{name}_frame", frame)
        connection.execute(f"create table {name} as select * from {name}_frame")
    connection.execute(f"""
        create table arrived as
        select *, max(scheduled) over before - {OUT_OF_ORDER_MS} - 1 as watermark,
               max(moment) over before - 1 as clock
        from (
            select *, row_number() over (order by moment, line) as n,
                   (scheduled - {NIGHT_MS}) // {DAY_MS} * {DAY_MS} + {NIGHT_MS} as day_start
            from (
                select line, carrier, flight, origin, dest, scheduled, dep_delay as delay, dep_time,
                       scheduled + coalesce(dep_delay, 0) * 60000 as moment
                from csv
            )
        )
        window before as (order by n rows between unbounded preceding and 1 preceding)
    """)
    connection.execute(f"""
        create table flown as
        select *, coalesce(day_start + {DAY_MS} - 1 <= watermark, false) as late
        from arrived where delay is not null
    """)
    connection.execute("""
        create table days as
        select name as airline, day_start, count(*) as flights, sum(delay) as minutes,
               max(delay) as worst, count(*) filter (delay > 15) as late15
        from flown join airlines using (carrier) where not late group by all
    """)
    return connection


def rows(db: duckdb.DuckDBPyConnection, query: str) -> list[tuple[Any, ...]]:
    return db.execute(query).fetchall()


AIRLINES = (
    "select airline, sum(flights), sum(minutes), max(worst), sum(late15) from days group by all"
)
WORST_DAYS = """
    select airline, day_start, flights, minutes, worst, late15
    from days where flights >= 50 order by minutes / flights desc limit 5
"""
LATE = "select carrier, flight, origin, dest, scheduled, delay from flown where late"
CANCELLED = "select origin, count(*) from arrived where delay is null group by all"
SKIES = """
    select case when visib < 2 then 'visibility under 2 miles' when precip > 0 then 'rain or snow'
                when try_cast(wind_speed as double) > 25 then 'wind over 25 mph'
                else 'fair' end as sky,
           count(*), sum(delay), count(*) filter (delay > 15)
    from flown join weather on weather.origin = flown.origin and weather.time <= moment
                               and weather.time > moment - 3600000
    group by sky
"""
SILENCES = f"""
    with gaps as (
        select origin, lag(moment) over (partition by origin order by n) as since,
               lag(n) over (partition by origin order by n) as n_since, moment as until, n, clock
        from flown
    )
    select origin, since, until,
           (select count(*) from arrived a
            where a.origin = gaps.origin and a.delay is null and a.n > n_since and a.n < gaps.n)
    from gaps where clock >= since + {QUIET_MS}
"""


def test_departures_equal_the_content_of_the_files(
    db: duckdb.DuckDBPyConnection,
) -> None:
    """The date of a row is the date of the schedule: schedule and delay give the clock time of
    departure, for every row.
    """
    ((wrong,),) = rows(
        db,
        """
        select count(*) from flown
        where strftime(
                  make_timestamptz(moment::bigint * 1000) at time zone 'America/New_York', '%H%M'
              )::int <> dep_time::int % 2400
    """,
    )

    assert wrong == 0


def test_departures_come_in_the_order_in_which_the_planes_left(
    db: duckdb.DuckDBPyConnection,
) -> None:
    expected = rows(
        db, "select carrier, flight, origin, dest, scheduled, delay from arrived order by n"
    )

    assert [tuple(flight) for flight in FlightLog(find_data())] == expected


def test_the_year_of_each_airline_is_what_a_query_over_all_rows_gives(
    report: Report, db: duckdb.DuckDBPyConnection
) -> None:
    computed = {(year.key, *year.value.values()) for year in report.airlines}

    assert computed == set(rows(db, AIRLINES))
    assert len(report.airlines) == 16


def test_the_worst_days_come_worst_first(report: Report, db: duckdb.DuckDBPyConnection) -> None:
    assert [tuple(day) for day in report.worst_days] == rows(db, WORST_DAYS)


def test_exactly_the_departures_behind_the_watermark_of_their_day_are_late(
    report: Report, db: duckdb.DuckDBPyConnection
) -> None:
    assert sorted(tuple(flight) for flight in report.late) == sorted(rows(db, LATE))
    assert report.late


def test_no_departure_is_lost(report: Report) -> None:
    counted = sum(year.value["flights"] for year in report.airlines)

    assert counted + len(report.late) + sum(report.cancelled.values()) == 336_776


def test_cancelled_flights_are_counted_by_airport(
    report: Report, db: duckdb.DuckDBPyConnection
) -> None:
    assert report.cancelled == dict(rows(db, CANCELLED))


def test_each_departure_meets_the_weather_of_its_hour(
    report: Report, db: duckdb.DuckDBPyConnection
) -> None:
    assert {(sky.key, *sky.value.values()) for sky in report.skies} == set(rows(db, SKIES))


def test_an_alarm_is_raised_for_each_silence_and_ends_with_it(
    report: Report, db: duckdb.DuckDBPyConnection
) -> None:
    ended = {tuple(alarm) for alarm in report.alarms if alarm.until is not None}
    raised = {(alarm.origin, alarm.since) for alarm in report.alarms if alarm.until is None}
    last = set(rows(db, "select origin, max(moment) from flown group by origin"))

    assert ended == set(rows(db, SILENCES))
    # When the year is over every airport is quiet, and those alarms stay open.
    assert raised == {(origin, since) for origin, since, *_ in ended} | last
    assert (
        len(
            [
                origin
                for origin, since, *_ in ended
                if since in range(1_360_300_000_000, 1_360_400_000_000)
            ]
        )
        == 3
    )  # The blizzard.


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of two TaskManagers."""
    made = Cluster(tmp_path / "cluster")
    try:
        made.start(workers=2, slots=1)
        yield made
    finally:
        made.close()


ON_A_CLUSTER = """
import sys
from pathlib import Path
import aioflow as af
from aioflow.api import flow, options
from aioflow.cli import main
on = af.RemoteCluster(sys.argv[1], secret=Path(sys.argv[2]))
flow.parse_options = lambda given: options.parse_options({**given, "on": on, "workers": 0})
sys.exit(main(["demo"]))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("program", "progress"),
    [
        (["-m", "aioflow", "demo"], True),
        (["-m", "aioflow", "demo", "-w", "2"], True),
        (["examples/flight_delays.py"], False),
        (["-c", ON_A_CLUSTER], True),
    ],
    ids=["command", "over two workers", "example", "on a cluster"],
)
def test_the_programs_print_these_numbers_into_a_pipe(
    request: pytest.FixtureRequest,
    db: duckdb.DuckDBPyConnection,
    program: list[str],
    progress: bool,
) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    if ON_A_CLUSTER in program:
        cluster: Cluster = request.getfixturevalue("cluster")
        program = [*program, cluster.address, str(cluster.secret)]
    run = subprocess.run(
        [sys.executable, *program],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert run.returncode == 0, run.stderr
    assert "\x1b" not in run.stdout + run.stderr
    table = [" ".join(line.split()) for line in run.stdout.splitlines()]
    years = sorted(rows(db, AIRLINES), key=lambda year: -year[2] / year[1])
    assert table[1:17] == [
        f"{airline} {flights:,} {minutes / flights:.1f} min {worst:,.0f} min {late15 / flights:.1%}"
        for airline, flights, minutes, worst, late15 in years
    ]
    for airline, _, flights, minutes, worst, _ in rows(db, WORST_DAYS):
        assert any(
            line.endswith(f"{airline} {flights} {minutes / flights:.1f} min {worst:.0f} min")
            for line in table
        )
    for sky, flights, minutes, late15 in rows(db, SKIES):
        assert f"{sky} {flights:,} {minutes / flights:.1f} min {late15 / flights:.1%}" in table
    for origin, since, until, cancelled in rows(db, SILENCES):
        end = f"{(until - since) / 3_600_000:.1f} h {cancelled} cancelled meanwhile"
        assert any(line.startswith(origin) and line.endswith(end) for line in table)
    late = rows(db, LATE)
    mean = sum(flight[-1] for flight in late) / len(late)
    assert (
        f"Too late for their day, and not in its figures: {len(late)} flights, delayed by "
        f"{mean:.0f} min in the mean" in table
    )
    assert "Cancelled: 8,255 flights (EWR 3,239, JFK 1,863, LGA 3,153)" in table
    (rate,) = [line for line in table if line.startswith("336,776 flights in ")]
    assert "; the start took " in rate
    assert ("records read" in run.stderr) is progress
