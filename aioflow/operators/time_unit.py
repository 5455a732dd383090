"""Checks whether timestamps are milliseconds, as they should be, or a present time in another unit.

Seconds taken for milliseconds are in January 1970, and all of a day falls into one window of a
minute and a half: nothing fails. So the first timestamp of each source is looked at, and no other.
No clock is read: "today" is some decades wide, and as milliseconds far from all of them.
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
"""Name, how many are one second, and what makes milliseconds of them."""


def warn_of_unit(timestamp: int) -> None:
    """Log a warning if `timestamp`, the first of the operator whose scope this is, is probably
    of another unit.
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
