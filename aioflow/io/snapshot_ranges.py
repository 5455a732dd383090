"""The ranges of a snapshot that was interrupted: which changes its rows already contain.

A snapshot cannot be opened again after its connection is gone. So the rows that are left are read
in a later snapshot, as of a later place in the log, while the changes are read from the first
place on. Each key is thus in a range that was read as of one place, and a change before this place
is already in its row. Such changes are left out, and a change of the key itself may become a
deletion or an insert. After DBLog (Andreakis and Papapanagiotou, 2020), without its marks in the
log: a slot names the place of its snapshot.

A range is [table, last key, as of]: the keys of the table after the range before, up to the last
key. None is the end of the table. A key is compared as Python compares it, so it has types of
`ORDERED_TYPES` alone. An empty list as the last key marks a table without such a key: it was read
again from its beginning, and no change is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["SnapshotRanges"]


class SnapshotRanges:
    """The ranges of all tables. Immutable."""

    def __init__(self, ranges: Sequence[Sequence[Any]]) -> None:
        """Makes the ranges from the part of a position that tells them."""
        self._ranges: dict[str, list[tuple[tuple[Any, ...] | None, int]]] = {}
        for table, last, as_of in ranges:
            self._ranges.setdefault(table, []).append(
                (None if last is None else tuple(last), as_of)
            )
        self.end = max((as_of for _, _, as_of in ranges), default=0)
        """From this place on no change is left out."""

    def contains(self, table: str, key: tuple[Any, ...], commit: int) -> bool:
        """Returns whether the row with `key` was read with what was committed at `commit`."""
        for last, as_of in self._ranges.get(table, ()):
            if last == ():
                return False
            if last is None or key <= last:
                return commit < as_of
        return False

    def truncates(self, table: str, commit: int) -> bool | None:
        """Returns whether a truncate at `commit` changes rows that were read: all, or none of them.

        None: some of them.
        """
        ranges = self._ranges.get(table, [])
        if any(last == () for last, _ in ranges):
            return True
        later = [commit >= as_of for _, as_of in ranges]
        if all(later):
            return True
        return None if any(later) else False
