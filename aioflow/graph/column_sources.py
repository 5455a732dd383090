"""Which sources of a flow give columns: those that can, where what follows has use for them. And which columns travel.

Some sources are columnar by themselves. Others, as files of JSON lines, decode into either, and the program does not say which: it says
what it does with the records. Columns are made where they stay columns up to where they are put to use, by an aggregate, a window or a
sink; a function on the way gets rows, and those are best made at once.
"""

from __future__ import annotations

from dataclasses import replace

from aioflow.core.expressions import is_expression
from aioflow.graph.stream_graph import Partitioning, ShipStrategy, StreamEdge, StreamGraph, StreamNode
from aioflow.operators.column_aggregates import fields_read
from aioflow.operators.folding import FoldingAggregate
from aioflow.operators.running import RunningAggregateOperator
from aioflow.operators.sink import SinkOperator
from aioflow.operators.stateless import StatelessOperator
from aioflow.operators.watermarks import TimestampsAndWatermarksOperator, WatermarkKind, WatermarkStrategy

__all__ = ["with_columns", "with_fields"]

_BY_EXPRESSION = (WatermarkKind.BOUNDED, WatermarkKind.NONE)
"""Strategies that read columns, if the timestamp is an expression."""


def with_columns(graph: StreamGraph, node: StreamNode) -> StreamNode:
    """A source node whose source gives columns, where it can and they are of use; else `node` itself."""
    offer = getattr(node.source, "with_columns", None)
    if offer is None or not _reads_times(node.watermarks) or not _are_used(graph, node):
        return node
    source = offer()
    return node if source is None else replace(node, source=source)


def with_fields(graph: StreamGraph, edge: StreamEdge, partitioning: Partitioning) -> Partitioning:
    """`partitioning`, with the fields that the consumer reads where it is known, and nothing else of a record comes out of it.

    A running aggregate is one: a window may give late elements out, whole.
    """
    factory = graph.nodes[edge.target].factory
    if partitioning.strategy is not ShipStrategy.HASH or not is_expression(partitioning.function) or factory is None:
        return partitioning
    operator = factory()
    if not isinstance(operator, RunningAggregateOperator) or not operator.reads_columns:
        return partitioning
    assert isinstance(operator.aggregate, FoldingAggregate), "others read rows"
    return replace(partitioning, fields=fields_read(operator.aggregate))


def _keeps_columns(partitioning: Partitioning) -> bool:
    """Whether columns stay columns on the way: who deals records out one by one, or by a function, makes rows of them."""
    if partitioning.strategy is ShipStrategy.HASH:
        return is_expression(partitioning.function)
    return partitioning.strategy not in (ShipStrategy.SHUFFLE, ShipStrategy.CUSTOM)


def _are_used(graph: StreamGraph, node: StreamNode) -> bool:
    edges = [edge for edge in graph.outputs_of(node.id) if edge.side is None]
    return bool(edges) and all(_is_used(graph, edge) for edge in edges)


def _is_used(graph: StreamGraph, edge: StreamEdge) -> bool:
    if edge.partitioning is not None and not _keeps_columns(edge.partitioning):
        return False
    node = graph.nodes[edge.target]
    assert node.factory is not None, "what has an input is no source"
    operator = node.factory()
    if isinstance(operator, TimestampsAndWatermarksOperator):
        return _reads_times(operator.strategy) and _are_used(graph, node)
    if isinstance(operator, SinkOperator):
        return operator.sink_reads_columns
    if isinstance(operator, StatelessOperator):
        return operator.reads_columns and not operator.calls_functions and _are_used(graph, node)
    return operator.reads_columns


def _reads_times(strategy: WatermarkStrategy[object] | None) -> bool:
    return strategy is None or (strategy.kind in _BY_EXPRESSION and (strategy.timestamp is None or is_expression(strategy.timestamp)))
