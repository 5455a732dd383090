"""The demonstration: 336,776 flights out of New York in 2013, in the order in which the planes
left.

The event time of a flight is its *scheduled* departure. So late data occurs naturally: the record
of a plane that left five hours late is five hours late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import aioflow as af
from aioflow.cli.demo_data import Airline, Flight, FlightLog, Observation, WeatherLog, find_data

__all__ = ["AirlineDay", "Alarm", "Report", "build_flow", "flow", "next_lines", "report_lines"]

QUIET_MS = 9 * 3_600_000
"""Time without a departure after which an airport raises an alarm.

A usual night is shorter.
"""

NIGHT = "5h"
"""Offset of day windows from midnight UTC. 05:00 UTC is midnight in New York in winter, and 01:00
in summer.
"""

CANCELLED = af.OutputTag[Flight]("cancelled")
NAMES = af.MapStateDescriptor[str, str]("airline names")


def build_flow(folder: Path, report: Report) -> af.Flow:
    """Returns the flow of the demonstration. It reads the files of `folder`, and fills `report`."""
    flow = af.Flow("flight-delays")
    flights = flow.source(
        FlightLog(folder),
        name="flights",
        watermarks=af.WatermarkStrategy.bounded_out_of_orderness(
            "2h", timestamp=lambda flight: flight.scheduled
        ),
    )
    weather = flow.source(
        WeatherLog(folder),
        name="weather",
        watermarks=af.WatermarkStrategy.monotonous_timestamps(
            timestamp=lambda observation: observation.time
        ),
    )
    airlines = flow.source(af.io.csv(folder / "airlines.csv", Airline), name="airlines")

    # The same flights with the real departure as event time. With this time nothing is late.
    happened = flights.assign_timestamps_and_watermarks(
        af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda flight: flight.moment),
        name="as it happened",
    )

    delay_by_airline(flights, airlines, report)
    delay_by_weather(happened, weather, report)
    happened.key_by(lambda flight: flight.origin).process(QuietAirport, name="quiet airports").sink(
        report.alarms.append, name="report"
    )
    return flow


# Windows in event time, late data, and names from a broadcast stream.


def delay_by_airline(
    flights: af.DataStream[Flight], airlines: af.DataStream[Airline], report: Report
) -> None:
    """Computes the delays of each airline by day and for the year, and the worst days of all
    airlines.

    The window of a day closes two hours after its last minute, in event time.
    """
    departed = flights.process(without_cancelled, name="departed")
    days = (
        departed.key_by(lambda flight: flight.carrier)
        .window(af.tumbling("1d", offset=NIGHT))
        .aggregate(
            af.agg(
                flights=af.count(),
                minutes=af.sum(lambda flight: flight.delay),
                worst=af.max(lambda flight: flight.delay),
                late15=af.count(where=lambda flight: flight.delay > 15),
            ),
            name="airline days",
        )
    )
    named = (
        days.key_by(lambda day: day.key)
        .connect(airlines.broadcast(NAMES))
        .process(NameAirline, name="airline names")
    )
    years = (
        named.key_by(lambda day: day.airline)
        .window(af.global_window(at_end=True))
        .aggregate(
            af.agg(
                flights=af.sum(lambda day: day.flights),
                minutes=af.sum(lambda day: day.minutes),
                worst=af.max(lambda day: day.worst),
                late15=af.sum(lambda day: day.late15),
            ),
            name="airline years",
        )
    )
    worst_days = (
        named.filter(lambda day: day.flights >= 50, name="50 flights or more")
        .key_by(lambda day: "all")
        .window(af.global_window(at_end=True))
        .aggregate(af.top(5, by=lambda day: day.mean), name="worst days")
    )

    years.sink(report.airlines.append, name="report")
    worst_days.sink(lambda result: report.worst_days.extend(result.value), name="report")
    days.late.sink(report.late.append, name="late for their day")
    departed.side(CANCELLED).key_by(lambda flight: flight.origin).count(name="cancelled").sink(
        report.count_cancelled, name="report"
    )


def without_cancelled(flight: Flight, ctx: af.ProcessContext) -> Iterator[Flight]:
    """Yields flights that left, and sends cancelled flights to a side output."""
    if flight.delay is None:
        ctx.output(CANCELLED, flight)
    else:
        yield flight


class AirlineDay(NamedTuple):
    """The departures of one airline on one day. `start` is in ms since 1970, and delays are in
    minutes.
    """

    airline: str
    start: int
    flights: int
    minutes: int
    worst: int
    late15: int

    @property
    def mean(self) -> float:
        """Mean delay in minutes."""
        return self.minutes / self.flights


class NameAirline(af.KeyedBroadcastProcessFunction[str, Any, Airline, AirlineDay]):
    """Replaces the carrier's code by the airline's name.

    An `AirlineDay` waits in state until the airline's name is known. The stream of airlines has no
    event time. So it holds back this operator's watermark until the stream has been read to its
    end. A timer at the day's own time fires only then, when all names are known.
    """

    def open(self, ctx: af.RuntimeContext) -> None:
        self.waiting = ctx.get_list_state(af.ListStateDescriptor[Any]("waiting"))

    def process_broadcast_element(self, airline: Airline, ctx: af.ProcessContext) -> None:
        ctx.get_broadcast_state(NAMES).put(airline.carrier, airline.name)

    def process_element(self, day: Any, ctx: af.ProcessContext) -> Iterator[AirlineDay]:
        name = ctx.get_broadcast_state(NAMES).get(day.key)
        if name is not None:
            yield AirlineDay(name, day.start, **day.value)
        else:
            self.waiting.add(day)
            ctx.timer_service.register_event_time_timer(ctx.timestamp)

    def on_timer(self, timestamp: int, ctx: af.ProcessContext) -> Iterator[AirlineDay]:
        name = ctx.get_broadcast_state(NAMES).get(ctx.current_key) or ctx.current_key
        for day in self.waiting.get():
            yield AirlineDay(name, day.start, **day.value)
        self.waiting.clear()


# Two streams joined by time.


def delay_by_weather(
    departures: af.DataStream[Flight], weather: af.DataStream[Observation], report: Report
) -> None:
    """Computes the delay of departures by weather, joined by airport and hour."""
    skies = (
        departures.filter(lambda flight: flight.delay is not None, name="not cancelled")
        .key_by(lambda flight: flight.origin)
        # Observations are hourly, and departures are whole minutes. So exactly one observation lies
        # within these bounds, both included.
        .interval_join(weather.key_by(lambda observation: observation.origin), "-59m", "0m")
        .process(
            lambda flight, observation, ctx: [(observation.sky, flight.delay)],
            name="weather at departure",
        )
    )
    years = (
        skies.key_by(lambda pair: pair[0])
        .window(af.global_window(at_end=True))
        .aggregate(
            af.agg(
                flights=af.count(),
                minutes=af.sum(lambda pair: pair[1]),
                late15=af.count(where=lambda pair: pair[1] > 15),
            ),
            name="delay by weather",
        )
    )
    years.sink(report.skies.append, name="report")


# Keyed state and timers.


class Alarm(NamedTuple):
    """An alarm: no plane left airport `origin` from `since` to `until`. `until` is None while the
    alarm lasts.

    Times are in ms. `cancelled` is the number of flights cancelled after `since`. When the input
    ends, no airport has further departures, so the last alarms never end.
    """

    origin: str
    since: int
    until: int | None
    cancelled: int


class QuietAirport(af.KeyedProcessFunction[str, Flight, Alarm]):
    """Raises an alarm when no plane has left an airport for nine hours.

    The next departure ends the alarm.
    """

    def open(self, ctx: af.RuntimeContext) -> None:
        self.last = ctx.get_state(af.ValueStateDescriptor[int]("last departure"))
        self.alarmed = ctx.get_state(af.ValueStateDescriptor("alarmed", default=False))
        self.cancelled = ctx.get_state(af.ValueStateDescriptor("cancelled since", default=0))

    def process_element(self, flight: Flight, ctx: af.ProcessContext) -> Iterator[Alarm]:
        if flight.delay is None:
            self.cancelled.update(self.cancelled.value() + 1)
            return
        last, now = self.last.value(), flight.moment
        if self.alarmed.value():
            yield Alarm(flight.origin, last, now, self.cancelled.value())
            self.alarmed.clear()
        elif last is not None:
            ctx.timer_service.delete_event_time_timer(last + QUIET_MS)
        ctx.timer_service.register_event_time_timer(now + QUIET_MS)
        self.last.update(now)
        self.cancelled.clear()

    def on_timer(self, timestamp: int, ctx: af.ProcessContext) -> Iterator[Alarm]:
        self.alarmed.update(True)
        yield Alarm(ctx.current_key, self.last.value(), None, self.cancelled.value())


def flow() -> af.Flow:
    """Returns the flow of the demonstration on the installed data. The flow's report is not shown.

    Use it, for example, with `aioflow graph aioflow.cli.demo:flow`.
    """
    return build_flow(find_data(), Report())


@dataclass(slots=True)
class Report:
    """The results of the demonstration in plain lists, which the flow's sinks fill while it
    runs.
    """

    airlines: list[Any] = field(default_factory=list)
    """One WindowResult for each airline, over the year. Its value has the numbers of flights,
    minutes of delay, the longest delay, and the number of delays above 15 minutes.
    """
    worst_days: list[AirlineDay] = field(default_factory=list)
    skies: list[Any] = field(default_factory=list)
    """One WindowResult for each kind of weather. Its value has the number of flights, the minutes
    of delay, and the number of delays above 15 minutes.
    """
    alarms: list[Alarm] = field(default_factory=list)
    """Alarms. An alarm is added when it is raised, and again when it ends."""
    late: list[Flight] = field(default_factory=list)
    """Flights that came after the window of their day had closed."""
    cancelled: dict[str, int] = field(default_factory=dict)
    """Cancelled flights by airport."""

    def count_cancelled(self, count: tuple[str, int]) -> None:
        """Stores the running count of cancelled flights of one airport."""
        self.cancelled[count[0]] = count[1]


def report_lines(report: Report, result: af.JobResult, *, workers: int = 0) -> Iterator[str]:
    """Yields the lines of the report on a year of flights.

    `result` is the result of the job. `workers` is the number of its worker processes, 0 if it ran
    in this process.
    """
    yield from _airlines(report)
    yield from _worst_days(report)
    yield from _weather(report)
    yield from _alarms(report)
    yield from _end(report, result, workers)


def next_lines(command: str) -> Iterator[str]:
    """Yields lines that suggest what to try next. `command` is the command that starts the
    program.
    """
    yield "What to try next"
    for line, what in (
        (f"{command} graph aioflow.cli.demo:flow --svg flow.svg", "how this ran, as a picture"),
        (f"{command} run aioflow.cli.demo:flow", "the same again, without the report"),
        ("aioflow/cli/demo.py", "the flow itself; examples/ has smaller ones"),
    ):
        yield f"  {line:<{len(command) + 48}}{what}"


def _airlines(report: Report) -> Iterator[str]:
    yield (
        f"{'Departure delay by airline, 2013':<34}"
        f"{'flights':>9}{'mean':>11}{'worst':>11}{'>15 min':>10}"
    )
    for year in sorted(
        report.airlines, key=lambda year: -year.value["minutes"] / year.value["flights"]
    ):
        flights, minutes, worst, late15 = year.value.values()
        yield (
            f"  {year.key:<32}{flights:>9,}{minutes / flights:>7.1f} min{worst:>7,} "
            f"min{late15 / flights:>10.1%}"
        )
    yield ""


def _worst_days(report: Report) -> Iterator[str]:
    yield f"{'Worst days of an airline':<34}{'flights':>9}{'mean':>11}{'worst':>11}"
    for day in report.worst_days:
        date = datetime.fromtimestamp(day.start / 1000, UTC)
        yield (
            f"  {_day(date)}  {day.airline:<24}{day.flights:>9,}{day.mean:>7.1f} "
            f"min{day.worst:>7,} min"
        )
    yield ""


def _weather(report: Report) -> Iterator[str]:
    yield f"{'Weather at departure':<34}{'flights':>9}{'mean':>11}{'':>11}{'>15 min':>10}"
    for sky in sorted(report.skies, key=lambda sky: -sky.value["minutes"] / sky.value["flights"]):
        flights, minutes, late15 = sky.value.values()
        yield (
            f"  {sky.key:<32}{flights:>9,}{minutes / flights:>7.1f} "
            f"min{'':>11}{late15 / flights:>10.1%}"
        )
    yield ""


def _alarms(report: Report) -> Iterator[str]:
    yield f"Airports that nothing left for {QUIET_MS // 3_600_000} hours (New York time)"
    zone = _new_york()
    for alarm in report.alarms:
        if alarm.until is None:
            continue  # The row that ends the alarm says more.
        since, until = (
            datetime.fromtimestamp(ms / 1000, zone) for ms in (alarm.since, alarm.until)
        )
        hours = (alarm.until - alarm.since) / 3_600_000
        period = f"{_day(since)} {since:%H:%M} to {_day(until)} {until:%H:%M}"
        yield (
            f"  {alarm.origin}  {period:<38}{hours:>5.1f} h{alarm.cancelled:>6,} cancelled "
            "meanwhile"
        )
    yield ""


def _end(report: Report, result: af.JobResult, workers: int) -> Iterator[str]:
    cancelled = ", ".join(
        f"{origin} {count:,}" for origin, count in sorted(report.cancelled.items())
    )
    yield f"Cancelled: {sum(report.cancelled.values()):,} flights ({cancelled})"
    late = [flight.delay or 0 for flight in report.late]
    if late:
        mean = sum(late) / len(late)
        yield (
            f"Too late for their day, and not in its figures: {len(late)} flights, delayed by "
            f"{mean:.0f} min in the mean"
        )
    events = (
        sum(year.value["flights"] for year in report.airlines)
        + len(late)
        + sum(report.cancelled.values())
    )
    where = f"over {workers} worker processes" if workers else "in one process"
    seconds = max(result.duration_ms - result.startup_ms, 1) / 1000
    yield (
        f"{events:,} flights in {seconds:.1f} s: {events / seconds:,.0f} a second, {where}; the "
        f"start took {result.startup_ms / 1000:.1f} s more"
    )


def _day(moment: datetime) -> str:
    return f"{moment:%a} {moment.day:>2} {moment:%b}"


def _new_york() -> tzinfo:
    try:
        return ZoneInfo("America/New_York")
    except ZoneInfoNotFoundError:
        # A machine without the time zone database shows standard time.
        return timezone(timedelta(hours=-5), "EST")
