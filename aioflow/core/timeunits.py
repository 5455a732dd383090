"""Parses durations as users write them: a `timedelta`, or a text such as "100ms" "5s" "1.5s" "1m"
"2h" "1d".

A bare number is refused, because its unit is unknown; a parameter that takes a number says its
unit in its name (`timestamp_ms`). Durations may be negative (the lower bound of an interval join);
code that needs a positive one checks it.
"""

from __future__ import annotations

import re
from datetime import timedelta
from fractions import Fraction

__all__ = ["Duration", "to_ms", "to_seconds"]

Duration = str | timedelta
"""A length of time, as parameters accept it."""

_ACCEPTED = "a timedelta, or a number and a unit such as '100ms', '5s', '1.5s', '1m', '2h' or '1d'"
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_TEXT = re.compile(r"\s*([+-]?[0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)\s*", re.ASCII)


def to_ms(duration: Duration, name: str = "duration") -> int:
    """Returns `duration` in whole milliseconds; `name` is the parameter in errors.

    Raises TypeError for a value of another type, ValueError for a text that is no duration, and for
    a fraction of a millisecond, which would be lost.
    """
    micros = _micros(duration, name)
    if micros % 1_000:
        raise ValueError(f"{name} is {duration!r}, expected a whole number of milliseconds")
    return micros // 1_000


def to_seconds(duration: Duration, name: str = "duration") -> float:
    """Returns `duration` in seconds.

    Raises as `to_ms` does, for fractions of a microsecond only.
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
