"""Aggregation before a keyed exchange: the sender reduces each batch to one record per key.

For example, the maximum of a window is the maximum of the maxima of its batches. The first and the
last element of a window can be found in the same way. If a batch has few keys, the sender folds it
with the window's own aggregate and sends the contents of the accumulators to the window. So the
exchange and the window process one record per key instead of all records. This is Flink's local
aggregation, but without a buffer and without a second kind of record: the window adds a sent record
like any other record.

Invariants: the results are the same, and in the same order.

* A batch is folded only if it lies in one slice and no window of that slice ends within it. So all
  of its records are live or all are late, at any progress of the window. The watermark before the
  first record may be in force for all sent records.
* Keys are sent in the order of their first record, which is also the order of the window's results.
* The result of the aggregate does not depend on how the input is split into batches. So sums are
  never folded, not even sums of ints: once another batch holds a float, each later addition rounds.
* Nothing else shows that records are missing. The window allows no lateness, because each late
  record would emit a result. Its side output of late elements is not read. `numLateRecordsDropped`
  counts only the records that were sent.
* If the accumulator contains compared values, their type has a total order (`_ORDERED`).
* The functions of the aggregate only compute (`inlining`). If one fails, the records are sent
  unchanged, and the error is raised in the window, with a note that names the record.

If a batch is not folded, the sender may still extract from each element the one value that the
aggregate reads. It then sends this value instead of the element, or only the key if the aggregate
reads nothing. Otherwise a sum of one field would send every record as a whole. The sender calls the
function that the aggregate would have called, and marks the batch (`RecordBatch.taken`). If the
call fails, the whole records are sent, and the aggregate fails at that record, or drops it as late.
So the function must have no side effects, as for inlining it in a loop (`inlining`).

Some aggregates run on columns: `count sum mean min max` of expressions, and `agg` of these. numpy
is imported only on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from aioflow.core.column_batch import highest, lowest
from aioflow.core.elements import RecordBatch
from aioflow.core.errors import describe_record
from aioflow.expressions.nodes import is_expression
from aioflow.expressions.trees import column_names
from aioflow.operators.aggregate.folding import FoldingAggregate
from aioflow.operators.aggregate.functions import (
    Agg,
    BuiltIn,
    Count,
    First,
    Last,
    Max,
    MaxBy,
    Min,
    MinBy,
)
from aioflow.operators.inlining import body_of

if TYPE_CHECKING:
    from aioflow.columns.kernels import Plan
    from aioflow.operators.window.assigners import SliceGrid

__all__ = [
    "LocalAggregate",
    "at_record",
    "between_records",
    "fields_read",
    "local_aggregate",
    "of_taken",
    "plan_columns",
    "taken_by",
    "why_rows",
]

SAMPLE = 16
"""Number of records of a batch that are folded first to estimate its number of keys.

This costs 4 ns for each record of a batch of 1,024.
"""
SAMPLE_KEYS_MAX = 4
"""Maximum number of keys in the sample; with more keys the batch is sent unchanged.

Folding costs 90 ns a record; partitioning a record and all later work costs 150 to 400 ns.
"""


@dataclass(frozen=True, slots=True)
class LocalAggregate:
    """Folds batches before they are sent, with the aggregate and the slices of the window."""

    aggregate: BuiltIn
    grid: SliceGrid

    def fold(self, batch: RecordBatch, key_of: Callable[[Any], Any]) -> RecordBatch | None:
        """Returns a smaller batch of records with keys to send in place of `batch`.

        Returns None if `batch` is to be sent unchanged. `key_of` returns the key of an element.
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
        times = [timestamps[0]] * count  # A list, because the timestamps may be a column.
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
        """Adds `values` to the accumulators `held`. Returns False if a function of the application
        raises an error.
        """
        try:
            self.aggregate.fold(held, list(map(key_of, values)), values)
        # An error of the key function occurs again for the record; others occur at the consumer.
        except Exception:  # noqa: BLE001
            return False
        return True


def local_aggregate(aggregate: object, grid: SliceGrid) -> LocalAggregate | None:
    """Returns the object that folds batches before they are sent to a window of `aggregate`.

    Returns None if this is not possible. The side output of the window's late elements must not be
    read.
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
"""Aggregates whose accumulators hold elements; other accumulators hold values extracted from
elements.
"""

_OF_ONE = frozenset((First, Last))

_FOLDED = frozenset((*_OF_ELEMENTS, *_OF_ONE, Min, Max))

_ORDERED = frozenset((int, float, bool, str, bytes, Decimal, date, timedelta))
"""Types of compared values for which the best value does not depend on how the input is split into
batches.

They have a total order, and aggregates handle NaN. Tuples that contain NaN, sets, and times of day
of several zones have no total order.
"""


def _sent(aggregate: BuiltIn, held: list[Any]) -> list[Any] | None:
    """Returns the values to send, one for each accumulator in `held`.

    Adding such a value has the same effect as adding all elements of the accumulator. Returns None
    if this is not possible for all of them.
    """
    kind = type(aggregate)
    if kind in _OF_ONE:
        return [value for (value,) in held]
    if kind in _OF_ELEMENTS:
        if None in held or not _ORDERED.issuperset(type(score) for score, _ in held):
            return None
        return [element for _, element in held]
    return held if _ORDERED.issuperset(type(value) for value in held if value is not None) else None


def taken_by(aggregate: object) -> tuple[Callable[[Any], Any], ...] | None:
    """Returns a tuple with the one function through which `aggregate` reads an element.

    The tuple is empty if the aggregate only counts. Returns None if the aggregate reads more, or is
    not a known one. Also returns None with `where=`, because the aggregate then does not call the
    function for every element.
    """
    found: dict[tuple[str, ...], Callable[[Any], Any]] = {}
    for part in aggregate.parts.values() if isinstance(aggregate, Agg) else [aggregate]:
        if (
            not isinstance(part, BuiltIn)
            or part.where is not None
            or not (type(part) is Count or part.reads_one)
        ):
            return None
        if type(part) is Count:
            continue
        body = body_of(part.fn)
        if body is None or body.is_argument:
            return None
        found[body.pieces] = part.fn  # type: ignore[assignment]  # Not None, because it has a body.
    return tuple(found.values()) if len(found) <= 1 else None


def of_taken(aggregate: FoldingAggregate) -> FoldingAggregate:
    """Returns a copy of `aggregate` that reads extracted values instead of elements.

    The accumulators have the same form. After a restore, in-flight data of an unaligned checkpoint
    may be processed by changed code. The values in this data were extracted by the old code, so the
    function and the `where=` of the new code are not applied to them.
    """
    made = copy(aggregate)
    if isinstance(made, Agg):
        made.parts = {name: of_taken(part) for name, part in made.parts.items()}
    elif isinstance(made, BuiltIn):
        made.fn = made.where = None
    return made


def at_record(value: Any, key: Any, *, taken: bool) -> str:
    """Describes the failing record for an error message.

    With `taken`, `value` is not the record but the value that the sender extracted from it.
    """
    of_key = f"of key {describe_record(key)}"
    return (
        f"at {describe_record(value)}, taken of a record {of_key}"
        if taken
        else f"at record {describe_record(value)} {of_key}"
    )


def between_records(values: Sequence[Any], *, taken: bool) -> str:
    """Describes, for an error message, the range of records `values`, one of which fails.

    With `taken`, `values` are not records but values that the sender extracted from them.
    """
    ends = f"{describe_record(values[0])} and {describe_record(values[-1])}"
    return f"between {ends}, taken of records" if taken else f"between records {ends}"


def why_rows(aggregate: FoldingAggregate) -> str | None:
    """Returns the reason why `aggregate` needs rows, as shown by `explain()`, or None if it can use
    columns.
    """
    for part in _parts(aggregate):
        if not isinstance(part, BuiltIn) or not part.has_column_form:
            return (
                f"{part!r} works on Python values: count sum mean min max of expressions work on "
                "columns"
            )
        if type(part) is not Count and not is_expression(part.fn):
            of = "a function" if part.fn is not None else "whole elements"
            return (
                f"{part.name} is of {of}: {part.name}(af.col.<field>), or of another expression, "
                "works on columns"
            )
        if part.where is not None and not is_expression(part.where):
            return f"where= of {part.name} is a function: an expression works on columns"
    return None


def plan_columns(aggregate: FoldingAggregate) -> Plan:
    """Returns the plan that computes `aggregate` on columns. `why_rows` must have returned None for
    it.
    """
    from aioflow.columns.kernels import LeafKind, LeafSpec, Plan

    leaves = []
    for part in _parts(aggregate):
        assert isinstance(part, BuiltIn)
        fn, where = part.fn, part.where
        leaves.append(
            LeafSpec(
                LeafKind(part.name),
                fn if is_expression(fn) else None,
                where if is_expression(where) else None,
            )
        )
    return Plan(leaves, list(aggregate.parts) if isinstance(aggregate, Agg) else None)


def fields_read(aggregate: FoldingAggregate) -> tuple[str | int, ...]:
    """Returns the fields of an element that `aggregate` reads. `why_rows` must have returned None
    for it.
    """
    parts = [part for part in _parts(aggregate) if isinstance(part, BuiltIn)]
    return column_names(
        *(one for part in parts for one in (part.fn, part.where) if is_expression(one))
    )


def _parts(aggregate: FoldingAggregate) -> list[FoldingAggregate]:
    return list(aggregate.parts.values()) if isinstance(aggregate, Agg) else [aggregate]
