"""Checks whether timestamps are milliseconds, as they should be, or present times in another unit.

Seconds taken for milliseconds are in January 1970, and a whole day falls into one window of a
minute and a half, without an error. So the first timestamp of each source is checked, and no other.
No clock is read: the range of present times is some decades wide, and far from the same numbers in
milliseconds.
"""

from __future__ import annotations

import logging

from aioflow.core.scope import current_scope

__all__ = ["warn_of_unit"]

logger = logging.getLogger(__name__)

TODAY_S = range(1_000_000_000, 2_500_000_000)
"""From 2001 to 2049."""
YEAR_S = 31_556_952

UNITS = (
    ("seconds", 1, "* 1000"),
    ("microseconds", 1_000_000, "// 1000"),
    ("nanoseconds", 1_000_000_000, "// 1_000_000"),
)
"""Name of the unit, units per second, and the conversion to milliseconds as text."""


def warn_of_unit(timestamp: int) -> None:
    """Logs a warning if `timestamp` probably has another unit than milliseconds.

    `timestamp` is the first one of the operator whose scope is the current one.
    """
    for unit, per_second, remedy in UNITS:
        if timestamp // per_second in TODAY_S:
            scope = current_scope()
            logger.warning(
                "the first timestamp of operator %r is %d: in milliseconds that is in the year "
                "%d, in %s it is in %d; event time is "
                "milliseconds since the epoch, so give what timestamp= gives %s",
                None if scope is None else scope.operator,
                timestamp,
                _year(timestamp // 1000),
                unit,
                _year(timestamp // per_second),
                remedy,
            )


def _year(seconds: int) -> int:
    return 1970 + seconds // YEAR_S
