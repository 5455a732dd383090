"""Which sources of a flow give columns: those that can, where what follows has use for them. And which columns travel.

Some sources are columnar by themselves. Others, as files of JSON lines, decode into either, and the program does not say which: it says
what it does with the records. Columns are made where they stay columns up to where they are put to use, by an aggregate, a window or a
sink; a function on the way gets rows, and those are best made at once. Why a source gives rows stands in the remark of its node.
"""

from __future__ import annotations

from dataclasses import replace

from aioflow.core.expressions import is_expression
from aioflow.graph.stream_graph import Partitioning, ShipStrategy, StreamEdge, StreamGraph, StreamNode
from aioflow.operators.column_aggregates import fields_read
from aioflow.operators.column_reasons import BY_FUNCTION, ONE_BY_ONE, why_rows, why_rows_for_times
from aioflow.operators.folding import FoldingAggregate
from aioflow.operators.running import RunningAggregateOperator
from aioflow.operators.slice_window import SliceWindowOperator
from aioflow.operators.stateless import StatelessOperator
from aioflow.operators.watermarks import TimestampsAndWatermarksOperator

__all__ = ["with_columns", "with_fields"]

NO_COLUMNS = "rows: its elements are Python values, and those of parquet, arrow, jsonl, csv and datagen of expressions can be columns"
NOT_USED = "nothing puts columns to use: an aggregate, a window or a sink of parquet or arrow does"


def with_columns(graph: StreamGraph, node: StreamNode) -> StreamNode:
    """A source node whose source gives columns, where it can and they are of use; else `node` with the reason in its remark."""
    source, by_row = node.source, why_rows_for_times(node.watermarks)
    if source is None or getattr(source, "columnar", False):
        return replace(node, remark=f"columns, of which rows are made for their times: {by_row}") if source and by_row else node
    obstacle = by_row or _obstacle(graph, node)
    offer = getattr(source, "with_columns", None)
    if offer is None:
        return node if obstacle else replace(node, remark=NO_COLUMNS)
    if obstacle is None and (columnar := offer()) is not None:
        return replace(node, source=columnar)
    return replace(node, remark=f"rows: {obstacle or source.why_rows}")  # type: ignore[attr-defined]  # Beside `with_columns`.


def with_fields(graph: StreamGraph, edge: StreamEdge, partitioning: Partitioning) -> Partitioning:
    """`partitioning`, with the fields that the consumer reads where it is known, and nothing else of a record comes out of it.

    A running aggregate is one, and a window whose late elements nobody reads: those come out whole.
    """
    factory = graph.nodes[edge.target].factory
    if partitioning.strategy is not ShipStrategy.HASH or not is_expression(partitioning.function) or factory is None:
        return partitioning
    operator = factory()
    if not isinstance(operator, (RunningAggregateOperator, SliceWindowOperator)) or not operator.reads_columns:
        return partitioning
    if any(out.side is not None for out in graph.outputs_of(edge.target)):
        return partitioning
    assert isinstance(operator.aggregate, FoldingAggregate), "others read rows"
    return replace(partitioning, fields=fields_read(operator.aggregate))


def _obstacle(graph: StreamGraph, node: StreamNode) -> str | None:
    """Which step behind `node` makes rows, and why; None if columns are put to use by all that follows."""
    edges = [edge for edge in graph.outputs_of(node.id) if edge.side is None]
    found = (_obstacle_on(graph, edge) for edge in edges)
    return next((one for one in found if one is not None), None) if edges else NOT_USED


def _obstacle_on(graph: StreamGraph, edge: StreamEdge) -> str | None:
    node = graph.nodes[edge.target]
    assert node.factory is not None, "what has an input is no source"
    operator = node.factory()
    reason = _why_exchanged_as_rows(edge.partitioning) or why_rows(operator)
    if reason is not None:
        return f"for {node.name!r}, {reason}"
    if isinstance(operator, (StatelessOperator, TimestampsAndWatermarksOperator)):
        return _obstacle(graph, node)
    return None


def _why_exchanged_as_rows(partitioning: Partitioning | None) -> str | None:
    """Why columns become rows on the way: whoever deals records out one by one, or by a function, makes rows of them."""
    if partitioning is None:
        return None
    if partitioning.strategy is ShipStrategy.HASH:
        return None if is_expression(partitioning.function) else BY_FUNCTION
    return ONE_BY_ONE if partitioning.strategy in (ShipStrategy.SHUFFLE, ShipStrategy.CUSTOM) else None
