"""Checks whether the keys of the two sides of a join can be equal at all.

If keys are numbers on one side and text on the other, the join silently has no results. So the
first key of each side is checked, and no other. The check logs a warning and raises no error,
because later keys may have other types.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from aioflow.operators.userfunction import describe_record

__all__ = ["KeysMet"]

logger = logging.getLogger(__name__)

KINDS: dict[type, str] = {
    str: "text",
    bytes: "bytes",
    **dict.fromkeys((bool, int, float, Decimal), "a number"),
    datetime: "a datetime",
    date: "a date",
    timedelta: "a timedelta",
    UUID: "a UUID",
}
"""Types whose values never equal values of a type of another kind.

For other types, such as those of a program, this is unknown.
"""


class KeysMet:
    """The first key of each side of one subtask.

    `is_open` is true until both keys are known; check it before each batch.
    """

    __slots__ = ("_first", "is_open")

    def __init__(self) -> None:
        self.is_open = True
        self._first: list[tuple[Any, ...]] = [(), ()]

    def see(self, side: int, keys: Sequence[Any] | None, operator: str) -> None:
        """Notes the first key that arrived on one side. Once both sides have a key, logs a warning
        if such keys can never be equal.
        """
        if keys is None or not len(keys) or self._first[side]:
            return
        self._first[side] = (keys[0],)
        if not all(self._first):
            return
        self.is_open = False
        ((left,), (right,)) = self._first
        found = _difference(left, right)
        if found is not None:
            logger.warning(
                "operator %r: nothing may ever meet: the first key of the left, %s, is %s, and "
                "that of the right, %s, is %s; make them "
                "alike, as with af.col.user.cast(str) or str(row.user)",
                operator,
                describe_record(left),
                found[0],
                describe_record(right),
                found[1],
            )


def _difference(left: Any, right: Any) -> tuple[str, str] | None:
    """Returns the names of the kinds of both keys if the kinds differ. Returns None if they do not
    differ or are unknown.
    """
    if isinstance(left, tuple) and isinstance(right, tuple):
        if len(left) != len(right):
            return f"a tuple of {len(left)}", f"one of {len(right)}"
        return next(
            (
                found
                for pair in zip(left, right, strict=True)
                if (found := _difference(*pair)) is not None
            ),
            None,
        )
    kinds = ["a tuple" if isinstance(one, tuple) else KINDS.get(type(one)) for one in (left, right)]
    return (kinds[0], kinds[1]) if kinds[0] and kinds[1] and kinds[0] != kinds[1] else None
