"""Aggregation before a keyed exchange: a batch sends one record for each key to the window, and
that record stands for the others.

The best element of a window is the best of the best elements of its batches; so with a maximum, and
what came first or last. If a batch holds few keys, the sender folds it by the window's own
aggregate and sends the contents of the accumulators. These are written, read and folded
again once a key instead of once a record. It is Flink's local aggregation, without a buffer and
without a second kind of record: what is sent is added as any other record is, and state knows
nothing of it.

Invariants: the results are the same, and in the same order.

* A batch is folded only if it lies in one slice and no window of that slice ends within it. So all
  of its records are live or all are late, wherever the window is, and those that are sent may all
  see the watermark that was in force before the first of them.
* Keys come in the order of their first record, as does what the window gives out.
* The aggregate gives the same wherever batches are cut. A sum does not, not even of a batch of
  ints: behind a float of another batch each addition rounds.
* The records left out are not visible anywhere else: with allowed lateness each late record would
  give a result of its own, and late elements may be read. `numLateRecordsDropped` counts what was
  sent.
* What is best is compared by a type that is ordered from end to end (`_ORDERED`), as far as what is
  held shows it.
* The functions of the aggregate only compute (`inlining`). Where one fails, the records go as they
  are, and the window names the one to blame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

from aioflow.core.column_batch import highest, lowest
from aioflow.core.elements import RecordBatch
from aioflow.core.expressions import is_expression
from aioflow.operators.aggregates import BuiltIn, First, Last, Max, MaxBy, Min, MinBy
from aioflow.operators.inlining import body_of
from aioflow.operators.slice_grid import SliceGrid

__all__ = ["LocalAggregate", "local_aggregate"]

SAMPLE = 16
"""Records of a batch that are folded first, to see how many keys it has: 4 ns a record of a
batch of 1,024.
"""
SAMPLE_KEYS_MAX = 4
"""With more keys among those the batch goes as it is: folding it costs 90 ns a record, dealing
out a record and what follows 150 to 400.
"""


@dataclass(frozen=True, slots=True)
class LocalAggregate:
    """The aggregate of the window, and its slices."""

    aggregate: BuiltIn
    grid: SliceGrid

    def fold(self, batch: RecordBatch, key_of: Callable[[Any], Any]) -> RecordBatch | None:
        """The records, with keys, that stand for those of `batch`; None if all of them have to
        go.
        """
        values, timestamps, watermarks = batch.values, batch.timestamps, batch.watermarks
        if type(values) is not list or len(values) <= SAMPLE or timestamps is None:
            return None
        held: dict[Any, Any] = {}
        if not self._add(held, values[:SAMPLE], key_of) or len(held) > SAMPLE_KEYS_MAX:
            return None
        if _sent(self.aggregate, list(held.values())) is None:
            return None
        start = self.grid.slice_start(lowest(timestamps))
        end = start + self.grid.width
        if highest(timestamps) >= end or (watermarks is not None and watermarks[-1] >= end - 1):
            return None
        if not self._add(held, values[SAMPLE:], key_of):
            return None
        sent = _sent(self.aggregate, list(held.values()))
        if sent is None:
            return None
        count = len(sent)
        times = [timestamps[0]] * count  # They may be a column.
        before = None if watermarks is None else [watermarks[0]] * count
        return RecordBatch(
            sent,
            times,
            list(held),
            before,
            batch.watermark,
            type(self.aggregate) not in _OF_ELEMENTS,
        )

    def _add(self, held: dict[Any, Any], values: list[Any], key_of: Callable[[Any], Any]) -> bool:
        """Whether the functions of the application take all of `values`."""
        try:
            self.aggregate.fold(held, list(map(key_of, values)), values)
        # Of the key it comes again for the record itself; any other is the consumer's.
        except Exception:  # noqa: BLE001
            return False
        return True


def local_aggregate(aggregate: object, grid: SliceGrid) -> LocalAggregate | None:
    """Returns how to fold batches for a window of `aggregate` before they are sent, or None.

    The window's late elements must have no reader.
    """
    if (
        not isinstance(aggregate, BuiltIn)
        or type(aggregate) not in _FOLDED
        or aggregate.where is not None
        or grid.lateness
    ):
        return None
    fn = aggregate.fn
    return (
        LocalAggregate(aggregate, grid)
        if fn is None or is_expression(fn) or body_of(fn) is not None
        else None
    )


_OF_ELEMENTS = frozenset((MinBy, MaxBy))
"""Their accumulators hold elements, and those of the others what is taken of them."""

_OF_ONE = frozenset((First, Last))

_FOLDED = frozenset((*_OF_ELEMENTS, *_OF_ONE, Min, Max))

_ORDERED = frozenset((int, float, bool, str, bytes, Decimal, date, timedelta))
"""Scores of which the best is the same wherever batches are cut: they have one order, and
aggregates know NaN. Tuples that hold NaN, sets, and times of day of several zones have none."""


def _sent(aggregate: BuiltIn, held: list[Any]) -> list[Any] | None:
    """What to add in the place of all that went into each accumulator; None if there is no such
    thing.
    """
    kind = type(aggregate)
    if kind in _OF_ONE:
        return [value for (value,) in held]
    if kind in _OF_ELEMENTS:
        if None in held or not _ORDERED.issuperset(type(score) for score, _ in held):
            return None
        return [element for _, element in held]
    return held if _ORDERED.issuperset(type(value) for value in held if value is not None) else None
