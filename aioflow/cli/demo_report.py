"""The report of the demonstration as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from aioflow.cli.demo import QUIET_MS, Report

__all__ = ["next_lines", "report_lines"]


def report_lines(report: Report, *, seconds: float, workers: int = 0) -> Iterator[str]:
    """Yields the lines of the report on a year of flights.

    The job took `seconds`, with `workers` worker processes.
    """
    yield from _airlines(report)
    yield from _worst_days(report)
    yield from _weather(report)
    yield from _alarms(report)
    yield from _end(report, seconds, workers)


def next_lines(command: str) -> Iterator[str]:
    """Yields lines that suggest what to try next. The user starts the program by `command`."""
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


def _end(report: Report, seconds: float, workers: int) -> Iterator[str]:
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
    yield f"{events:,} flights in {seconds:.1f} s: {events / seconds:,.0f} a second, {where}"


def _day(moment: datetime) -> str:
    return f"{moment:%a} {moment.day:>2} {moment:%b}"


def _new_york() -> tzinfo:
    try:
        return ZoneInfo("America/New_York")
    except ZoneInfoNotFoundError:
        # A machine without the time zone database shows standard time.
        return timezone(timedelta(hours=-5), "EST")
