"""Parses durations as users write them: a `timedelta`, or a text such as "100ms" "5s" "1.5s" "1m"
"2h" "1d".

A bare number is refused, because its unit is unknown; a parameter that takes a number says its
unit in its name (`timestamp_ms`). Durations may be negative (the lower bound of an interval join);
code that needs a positive one checks it: `positive_ms` raises GraphError while the flow is built.

`LogBackoff` decides when a repeated message is logged, but does not log itself. If a message is
repeated twice a second, it hides other messages. If it is logged only once, the log does not show
that the problem persists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction

from aioflow.core.errors import GraphError, did_you_mean

__all__ = [
    "Duration",
    "LogBackoff",
    "is_event_time",
    "positive_ms",
    "signed_ms",
    "to_ms",
    "to_seconds",
]

Duration = str | timedelta
"""A length of time, as parameters accept it."""

_ACCEPTED = "a timedelta, or a number and a unit such as '100ms', '5s', '1.5s', '1m', '2h' or '1d'"
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_TEXT = re.compile(r"\s*([+-]?[0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)\s*", re.ASCII)


def to_ms(duration: Duration, name: str = "duration") -> int:
    """Returns `duration` in whole milliseconds. Errors name the parameter `name`.

    Raises TypeError for a value of another type, and ValueError for a text that is no duration. A
    duration with a fraction of a millisecond raises ValueError too, because the fraction would be
    lost.
    """
    micros = _micros(duration, name)
    if micros % 1_000:
        raise ValueError(f"{name} is {duration!r}, expected a whole number of milliseconds")
    return micros // 1_000


def to_seconds(duration: Duration, name: str = "duration") -> float:
    """Returns `duration` in seconds.

    Raises the errors of `to_ms`, but accepts fractions of a millisecond, down to a microsecond.
    """
    return _micros(duration, name) / 1_000_000


def _micros(duration: object, name: str) -> int:
    if isinstance(duration, timedelta):
        return (duration.days * 86_400 + duration.seconds) * 1_000_000 + duration.microseconds
    if not isinstance(duration, str):
        raise TypeError(
            f"{name} is {duration!r} of type {type(duration).__name__}, expected {_ACCEPTED}"
        )
    match = _TEXT.fullmatch(duration)
    if match is None:
        raise ValueError(f"{name} is {duration!r}, expected {_ACCEPTED}")
    micros = Fraction(match[1]) * (_UNIT_MS[match[2]] * 1_000)
    if micros.denominator != 1:
        raise ValueError(f"{name} is {duration!r}, expected a whole number of microseconds")
    return micros.numerator


FIRST_S = 5.0
"""Time between the first message and the second; it doubles after each one."""

MOST_S = 600.0


@dataclass(slots=True)
class LogBackoff:
    """The backoff of the log messages about one retried operation. `now` is in seconds of a
    monotonic clock.
    """

    _since: float | None = None
    _tell_at: float = 0.0
    _interval_s: float = FIRST_S

    def failed(self, now: float) -> float | None:
        """Notes a failed try.

        If a message is due, returns the number of seconds for which the tries have failed so far,
        otherwise None.
        """
        if self._since is None:
            self._since, self._interval_s = now, FIRST_S
        elif now < self._tell_at:
            return None
        else:
            self._interval_s = min(2 * self._interval_s, MOST_S)
        self._tell_at = now + self._interval_s
        return now - self._since

    def succeeded(self, now: float) -> float | None:
        """Notes a success. Returns the number of seconds for which tries had failed before; None if
        no try had failed.
        """
        took = None if self._since is None else now - self._since
        self._since = None
        return took


TIMES = ("event", "processing")


def positive_ms(duration: Duration, function: str, argument: str) -> int:
    """Returns `duration` in ms, above 0. Raises GraphError naming `function` and `argument`."""
    ms = _ms(duration, function, argument)
    if ms <= 0:
        raise GraphError(f"{function}: {argument} is {duration!r}, expected more than 0 ms")
    return ms


def signed_ms(duration: Duration | int, function: str, argument: str) -> int:
    """Returns `duration` in ms, of any sign; an int is a number of ms."""
    return duration if type(duration) is int else _ms(duration, function, argument)


def _ms(duration: Duration | int, function: str, argument: str) -> int:
    try:
        # `to_ms` itself refuses numbers, with a reason.
        return to_ms(duration, argument)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise GraphError(f"{function}: {error}") from error


def is_event_time(time: str, function: str) -> bool:
    """Returns whether `time` is "event" rather than "processing"."""
    if time not in TIMES:
        hint = did_you_mean(time, TIMES)
        raise GraphError(f"{function}: time is {time!r}, expected 'event' or 'processing'{hint}")
    return time == "event"
