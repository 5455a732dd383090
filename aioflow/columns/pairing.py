"""Computes the pairs of records with equal keys on two sides of a join, on columns.

Keys are in the order in which they first arrived on either side. Within a key, each left record is
paired with all right records before the next left record; each side is in order of arrival. A join
of rows gives the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aioflow.columns.making import concat
from aioflow.core.column_batch import Column, ColumnBatch
from aioflow.core.functions import Pair

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Held", "Pairing", "Runs", "together"]

_PLACE_BITS = 32
_PLACE = (1 << _PLACE_BITS) - 1
_SORTED_MAX = 1 << 31


@dataclass(slots=True)
class Held:
    """Records of one side of a join, as columns.

    Each record has the code of its key, its number in the order of arrival of both sides, and its
    value.
    """

    codes: np.ndarray
    arrivals: np.ndarray
    values: Column

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, indices: np.ndarray) -> Held:
        return Held(self.codes[indices], self.arrivals[indices], self.values.take(indices))


def together(parts: Sequence[Held]) -> Held:
    """Returns the concatenation of `parts`, of which there must be at least one."""
    if len(parts) == 1:
        return parts[0]
    codes = np.concatenate([part.codes for part in parts])
    arrivals = np.concatenate([part.arrivals for part in parts])
    return Held(codes, arrivals, concat([part.values for part in parts]))


class Pairing:
    """All pairs of records from `left` and `right` with equal keys.

    Any range of the pairs can be made separately, because a frequent key may have millions. The
    caller makes the `Runs` of each side in a separate step, because sorting millions of records
    takes long.
    """

    def __init__(self, left: Runs, right: Runs) -> None:
        self._left, self._right = left.values, right.values
        in_left, in_right = _met(left.keys, right.keys)
        order = np.minimum(left.first[in_left], right.first[in_right]).argsort(kind="stable")
        in_left, in_right = in_left[order], in_right[order]
        self._left_order, self._right_order = left.order, right.order
        self._left_start, self._right_start = left.starts[in_left], right.starts[in_right]
        self._width = right.counts[in_right]
        pairs = left.counts[in_left] * self._width
        self._stops = pairs.cumsum()
        self._begins = self._stops - pairs

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def part(self, begin: int, stop: int) -> ColumnBatch:
        """Returns the pairs with the numbers from `begin` up to `stop` (exclusive), of which there
        must be at least one.
        """
        first, last = (
            self._stops.searchsorted(begin, "right"),
            self._stops.searchsorted(stop - 1, "right") + 1,
        )
        counts = np.minimum(self._stops[first:last], stop) - np.maximum(
            self._begins[first:last], begin
        )
        # One run is one key: per-run values are computed once, and repeated for its pairs.
        within = np.arange(begin, stop) - self._begins[first:last].repeat(counts)
        left, right = (
            self._left_start[first:last].repeat(counts),
            self._right_start[first:last].repeat(counts),
        )
        width = self._width[first:last]
        if len(width) and int(width.max()) > 1:
            rows, at = np.divmod(within, width.repeat(counts))
            left += rows
            right += at
        else:
            left += within
        values = {
            "left": self._left.take(self._left_order[left]),
            "right": self._right.take(self._right_order[right]),
        }
        return ColumnBatch(values, stop - begin, Pair)


class Runs:
    """The records of one side, sorted by key and then by arrival.

    A run is all records with one key. For each run there are the key, the start and count in the
    sorted order, and the arrival of the first record.
    """

    __slots__ = ("counts", "first", "keys", "order", "starts", "values")

    def __init__(self, held: Held) -> None:
        self.values, codes, arrivals = held.values, held.codes, held.arrivals
        by_arrival = None
        if len(arrivals) > 1 and not (arrivals[1:] >= arrivals[:-1]).all():
            since = arrivals - arrivals.min()
            by_arrival = (
                _sorted(since) & _PLACE
                if int(since.max()) < _SORTED_MAX
                else since.argsort(kind="stable")
            )
            codes, arrivals = codes[by_arrival], arrivals[by_arrival]
        sorted_ = _sorted(codes)
        places = sorted_ & _PLACE
        sorted_ >>= _PLACE_BITS
        self.starts = np.flatnonzero(np.concatenate([[True], sorted_[1:] != sorted_[:-1]]))
        self.keys = sorted_[self.starts]
        self.counts = np.diff(self.starts, append=len(codes))
        self.first = arrivals[places[self.starts]]
        self.order = places if by_arrival is None else by_arrival[places]


def _met(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the positions in `left` and in `right` of the keys that both contain.

    Codes of keys are small, so a lookup table is used; it takes a third of the time of sorting.
    """
    if not (len(left) and len(right)):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    place = np.full(
        int(max(left[-1], right[-1])) + 1, -1, np.int64
    )  # Keys of runs are in order: the last is the highest.
    place[right] = np.arange(len(right))
    found = place[left]
    in_left = np.flatnonzero(found >= 0)
    return in_left, found[in_left]


def _sorted(numbers: np.ndarray) -> np.ndarray:
    """Returns the sorted `numbers`. Each is shifted left by 32 bits, and its original index is in
    the lower bits.

    The numbers are below `_SORTED_MAX`. numpy sorts numbers faster than it computes their order.
    """
    both = (numbers << _PLACE_BITS) | np.arange(len(numbers))
    both.sort()
    return both
