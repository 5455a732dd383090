"""The reasons why a step turns columns into rows, and the advice how to avoid it: for `explain()`,
and for the choice of a source's output.

A reason is one clause, followed by a colon and the advice. None says that columns stay columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioflow.expressions.nodes import is_expression
from aioflow.operators import column_aggregates
from aioflow.operators.async_wait import AsyncWaitOperator
from aioflow.operators.clock_window import ClockWindowOperator
from aioflow.operators.folding import FoldingAggregate
from aioflow.operators.running import RunningAggregateOperator
from aioflow.operators.session_window import SessionWindowOperator
from aioflow.operators.sink import SinkOperator
from aioflow.operators.slice_window import SliceWindowOperator
from aioflow.operators.stateless import StatelessKind, StatelessOperator
from aioflow.operators.watermarks import TimestampsAndWatermarksOperator, WatermarkKind
from aioflow.operators.window_join import WindowJoinOperator

if TYPE_CHECKING:
    from aioflow.operators.operator import Operator
    from aioflow.operators.watermarks import WatermarkStrategy

__all__ = ["BY_FUNCTION", "ONE_BY_ONE", "why_rows", "why_rows_for_times"]

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
"""Strategies that read columns, if the timestamp is an expression."""


def why_rows(operator: Operator, *, keyed_by_function: bool = False) -> str | None:
    """Returns why `operator` turns columns into rows, or None if it does not."""
    if isinstance(operator, StatelessOperator):
        return _of_steps(operator)
    if isinstance(operator, TimestampsAndWatermarksOperator):
        return why_rows_for_times(operator.strategy)
    if isinstance(operator, SinkOperator):
        return (
            None
            if operator.sink_reads_columns
            else "the sink takes records: sinks of parquet and arrow take columns"
        )
    if isinstance(operator, SessionWindowOperator):
        return "sessions have no columnar form: tumbling and sliding windows of event time have"
    if isinstance(operator, ClockWindowOperator):
        return "windows of processing time have no columnar form: those of event time have"
    if isinstance(operator, (RunningAggregateOperator, SliceWindowOperator)) and isinstance(
        operator.aggregate, FoldingAggregate
    ):
        return BY_FUNCTION if keyed_by_function else column_aggregates.why_rows(operator.aggregate)
    if isinstance(operator, WindowJoinOperator):
        return BY_FUNCTION if keyed_by_function and operator.why_rows is None else operator.why_rows
    if isinstance(operator, AsyncWaitOperator):
        return "calls that are awaited, each on its own: what stands before them may be on columns"
    if operator.reads_columns:
        return None
    return "it takes one record at a time: what stands before it may be on columns"


def _of_steps(operator: StatelessOperator) -> str | None:
    if not operator.calls_functions:
        return None
    step = operator.steps[operator.column_steps]
    if step.kind is StatelessKind.MAP and is_expression(step.function):
        return (
            "map by an expression gives values, not records: select(<name>=...) gives records of "
            "columns"
        )
    return _CALLS[step.kind]


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
