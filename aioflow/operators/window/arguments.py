"""Checks the arguments of windows, triggers and joins: durations and time domains.

Invalid arguments raise GraphError while the flow is built.
"""

from __future__ import annotations

from aioflow.core.errors import GraphError, did_you_mean
from aioflow.core.timeunits import Duration, to_ms

__all__ = ["is_event_time", "positive_ms", "signed_ms"]

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
