"""The traits of operators: what the planner knows of an operator without making one.

An operator states its traits when its node is added to the graph: which fields it reads, whether it
accepts columns, whether batches are aggregated before they are sent to it. The reason why an
operator needs rows is one clause, followed by a colon and advice on how to use columns; `explain()`
shows this text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from aioflow.expressions.nodes import Expr, is_expression
from aioflow.expressions.rows import columns_of
from aioflow.expressions.trees import column_names
from aioflow.operators.stateless import StatelessKind
from aioflow.operators.watermarks import WatermarkKind

if TYPE_CHECKING:
    from aioflow.operators.aggregate.folding import FoldingAggregate
    from aioflow.operators.aggregate.local import LocalAggregate
    from aioflow.operators.sink import BaseSink
    from aioflow.operators.watermarks import WatermarkStrategy
    from aioflow.operators.window.assigners import SliceGrid

__all__ = [
    "AWAITED",
    "AWAITED_IN_TURN",
    "BY_FUNCTION",
    "BY_RECORD",
    "ONE_BY_ONE",
    "SESSIONS",
    "OperatorTraits",
    "clock_window",
    "join",
    "running",
    "sink",
    "slices",
    "step",
    "timestamps",
    "why_rows_for_times",
]

BY_FUNCTION = (
    "the keys are given by a function: key_by(af.col.<field>), or another expression, keeps columns"
)
ONE_BY_ONE = "the exchange deals records out one by one: rebalance() or rescale() keep columns"

_CALLS = {
    StatelessKind.MAP: (
        "map calls a function: select(<name>=af.col.<field>, ...) computes on columns"
    ),
    StatelessKind.FILTER: (
        "filter calls a function: an expression, as filter(af.col.<field> > 0), computes on columns"
    ),
    StatelessKind.FLAT_MAP: (
        "flat_map gives any number of records: a union of two selects, or a filter, stays on "
        "columns"
    ),
}

_BY_EXPRESSION = (WatermarkKind.BOUNDED, WatermarkKind.NONE)
"""Watermark strategies that can read columns if the timestamp is an expression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTraits:
    """The properties of an operator that the planner needs. They are not pickled, because the graph
    is planned before it is sent to another process.
    """

    why_rows: str | None = "it takes one record at a time; the steps before it may be on columns"
    """Why the operator converts columns to rows; None if it does not."""
    awaits: bool = False
    """Whether the operator waits for calls, and can meanwhile keep its input in its state."""
    needs_key_expression: bool = False
    """Whether the operator accepts columns only if an expression computes their keys."""
    keeps_columns: bool = False
    """Whether the operator emits columns for columns, so that the next operators decide whether
    columns are useful.
    """
    reads: tuple[str | int, ...] | None = None
    """Fields of a record that the operator reads; None means all fields."""
    columns: Mapping[str, Expr[Any]] | None = None
    """The expressions of the fields that a `select` emits, by name; None for any other operator."""
    keeps_records: bool = False
    """Whether the operator emits records unchanged, so that the next operators may read their
    fields.
    """
    counts: bool = False
    """Whether the operator reads only the key of a record, and emits no input record."""
    taken: tuple[Callable[[Any], Any], ...] | None = None
    """The one function through which the operator reads a record, as a tuple of one item.

    The tuple is empty if the operator only counts records. None means that the operator reads more.
    """
    combiner: LocalAggregate | None = None
    """Aggregate that reduces each batch before it is sent to the operator; None if there is none.
    """
    fuses: bool = False
    """Whether the operator can be fused with neighbours that can be fused, too."""
    sink: BaseSink[Any] | None = None
    """The sink to which the operator writes; None for other operators."""

    def __reduce__(self) -> Any:
        return OperatorTraits, ()

    def why_rows_by(self, *, key_function: bool) -> str | None:
        """Returns the reason why the operator converts columns to rows, or None if it does not.

        `key_function` tells whether a function, not an expression, computes the keys.
        """
        return BY_FUNCTION if key_function and self.needs_key_expression else self.why_rows


BY_RECORD = OperatorTraits()
AWAITED = OperatorTraits(
    why_rows="calls that are awaited, each on its own: what stands before them may be on columns",
    awaits=True,
)
AWAITED_IN_TURN = OperatorTraits(awaits=True)
SESSIONS = OperatorTraits(
    why_rows="sessions have no columnar form: tumbling and sliding windows of event time have"
)


def step(kind: StatelessKind, function: Any) -> OperatorTraits:
    """Returns the traits of a `map`, `filter` or `flat_map` that runs inline."""
    columns = columns_of(function)
    if kind is StatelessKind.MAP and columns is not None:
        read = column_names(*columns.values())
        return OperatorTraits(
            why_rows=None, keeps_columns=True, reads=read, columns=columns, fuses=True
        )
    if not is_expression(function) or kind is StatelessKind.FLAT_MAP:
        return OperatorTraits(why_rows=_CALLS[kind], fuses=True)
    if kind is StatelessKind.FILTER:
        return OperatorTraits(
            why_rows=None,
            keeps_columns=True,
            reads=column_names(function),
            keeps_records=True,
            fuses=True,
        )
    return OperatorTraits(
        why_rows=(
            "map by an expression gives values, not records: select(<name>=...) gives records of "
            "columns"
        ),
        fuses=True,
    )


def timestamps(strategy: WatermarkStrategy[Any]) -> OperatorTraits:
    """Returns the traits of the operator that assigns timestamps and watermarks."""
    return OperatorTraits(why_rows=why_rows_for_times(strategy), keeps_columns=True)


def sink(target: BaseSink[Any]) -> OperatorTraits:
    """Returns the traits of the operator that writes to `target`."""
    return OperatorTraits(
        why_rows=(
            None
            if target.reads_columns
            else "the sink takes records: sinks of parquet and arrow take columns"
        ),
        sink=target,
    )


def running(aggregate: FoldingAggregate) -> OperatorTraits:
    """Returns the traits of a running aggregate."""
    return _aggregating(aggregate, counts=_counts(aggregate))


def slices(aggregate: FoldingAggregate, grid: SliceGrid) -> OperatorTraits:
    """Returns the traits of a window of event time that aggregates by slice.

    `counts` is False even for a window that only counts, because a running job may get
    subscriptions to its late elements.
    """
    return _aggregating(aggregate, combiner=_local().local_aggregate(aggregate, grid))


def clock_window(aggregate: FoldingAggregate, grid: SliceGrid) -> OperatorTraits:
    """Returns the traits of a window of processing time."""
    return OperatorTraits(
        why_rows="windows of processing time have no columnar form: those of event time have",
        counts=_counts(aggregate),
        taken=_local().taken_by(aggregate),
        combiner=_local().local_aggregate(aggregate, grid),
    )


def join(why_rows: str | None) -> OperatorTraits:
    """Returns the traits of a window join. `why_rows` is the reason why the join cannot run on
    columns, None if it can.
    """
    return OperatorTraits(why_rows=why_rows, needs_key_expression=why_rows is None)


def _aggregating(aggregate: FoldingAggregate, **more: Any) -> OperatorTraits:
    local = _local()
    why_rows = local.why_rows(aggregate)
    return OperatorTraits(
        why_rows=why_rows,
        needs_key_expression=True,
        reads=local.fields_read(aggregate) if why_rows is None else None,
        taken=local.taken_by(aggregate),
        **more,
    )


def _counts(aggregate: FoldingAggregate) -> bool:
    local = _local()
    return local.why_rows(aggregate) is None and not local.fields_read(aggregate)


def _local() -> ModuleType:
    """Imports and returns the module `aggregate.local`. Workers plan nothing, so they do not load
    it.
    """
    from aioflow.operators.aggregate import local

    return local


def why_rows_for_times(strategy: WatermarkStrategy[Any] | None) -> str | None:
    """Returns why timestamps and watermarks need rows, or None if they do not."""
    if strategy is None:
        return None
    if strategy.kind not in _BY_EXPRESSION:
        return (
            "its watermarks look at each record: bounded_out_of_orderness and "
            "monotonous_timestamps read columns"
        )
    if strategy.timestamp is not None and not is_expression(strategy.timestamp):
        return "timestamp= is a function: an expression, as af.col.<field>, reads columns"
    return None
