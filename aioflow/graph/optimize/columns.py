"""Decides which sources of a flow produce batches of columns, and which columns are read and sent.

Some sources always produce columns. Others, such as files of JSON lines, can produce columns or
rows (one Python object per record). The program does not choose: its use of the records decides. A
source produces columns if they stay columns until an aggregate, a window or a sink uses them. A
function on the way needs rows, and those are best made at once. The remark of a source's node says
why it produces rows.

A parameter `whole` lists the places (outputs of operators) whose records are observed by taps, so
that they must keep all fields.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from aioflow.expressions.nodes import is_expression
from aioflow.expressions.trees import column_names
from aioflow.graph.optimize.projection import fields_read
from aioflow.graph.stream_graph import (
    Partitioning,
    ShipStrategy,
    StreamEdge,
    StreamGraph,
    StreamNode,
)
from aioflow.operators.traits import BY_FUNCTION, ONE_BY_ONE, why_rows_for_times

if TYPE_CHECKING:
    from aioflow.core.ids import TapPlace

__all__ = ["fields_seen", "with_columns"]

NO_COLUMNS = (
    "rows: its elements are Python values, and those of parquet, arrow, jsonl, csv and datagen of "
    "expressions can be columns"
)
NOT_USED = "nothing puts columns to use: an aggregate, a window or a sink of parquet or arrow does"


def with_columns(
    graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace] = ()
) -> StreamNode:
    """Returns a source node whose source produces columns, if that is possible and useful.

    Otherwise returns `node` with the reason in its remark.
    """
    source, by_row = node.source, why_rows_for_times(node.watermarks)
    if source is None:
        return node
    if getattr(source, "columnar", False):
        if by_row:
            return replace(
                node, remark=f"columns, of which rows are made for their times: {by_row}"
            )
        return _narrowed(graph, node, whole)
    offer = getattr(source, "with_columns", None)
    obstacle = by_row or _obstacle(graph, node)
    if offer is None:
        return node if obstacle else replace(node, remark=NO_COLUMNS)
    if obstacle is None and (columnar := offer()) is not None:
        return _narrowed(graph, replace(node, source=columnar), whole)
    # A source with `with_columns` also has `why_rows`.
    reason = obstacle or source.why_rows  # type: ignore[attr-defined]
    return replace(node, remark=f"rows: {reason}")


def _narrowed(graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace]) -> StreamNode:
    """Returns a source node that leaves out unread columns, if its source can do that."""
    offer = getattr(node.source, "with_fields", None)
    read = None if offer is None else _read_behind(graph, node, whole)
    if not read or not all(isinstance(name, str) for name in read):
        return node
    # `offer` is not None, because some field is read.
    return replace(node, source=offer(tuple(sorted(read))))  # type: ignore[misc]


def fields_seen(
    graph: StreamGraph, place: TapPlace, whole: Collection[TapPlace] = ()
) -> list[str] | None:
    """Returns the fields that an observer of `place` sees, None if it sees all.

    The observer sees fewer fields if unread ones are left out. `whole` must be the same as when the
    graph was built. Late elements of a window come from the input of its aggregate.
    """
    for node_id in sorted(graph.upstream_of([place if isinstance(place, int) else place[0]])):
        node = with_columns(
            graph, graph.nodes[node_id], whole=(*whole, node_id)
        )  # With all of its fields.
        read = _read_behind(graph, node, whole) if getattr(node.source, "columnar", False) else None
        if read is None or _read_behind(graph, node, (*whole, place)) is not None:
            continue
        if not isinstance(place, int) or _narrowed(graph, node, whole).source is not node.source:
            return sorted(map(str, read))
    return None


def _read_behind(
    graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace]
) -> set[str | int] | None:
    """Returns the fields that later steps, and the event time of `node`, read; None for all."""
    if node.id in whole:
        return None
    times = node.watermarks.timestamp if node.watermarks is not None else None
    read = set(column_names(times)) if is_expression(times) else set[str | int]()
    for edge in graph.outputs_of(node.id):
        if edge.side is not None:
            continue
        found = _read_by(graph, edge, whole)
        if found is None:
            return None
        read |= found
    return read


def _read_by(
    graph: StreamGraph, edge: StreamEdge, whole: Collection[TapPlace]
) -> set[str | int] | None:
    """Returns the fields that the consumer at `edge` reads; None for all."""
    if _why_exchanged_as_rows(edge.partitioning) is not None:
        return None
    node = graph.nodes[edge.target]
    fields = fields_read(graph, node, whole)
    if fields is None:
        return None
    read = set(fields)
    if edge.partitioning is not None and edge.partitioning.strategy is ShipStrategy.HASH:
        read |= set(column_names(edge.partitioning.function))
    if not node.traits.keeps_records:
        return read
    behind = _read_behind(graph, node, whole)
    return None if behind is None else read | behind


def _obstacle(graph: StreamGraph, node: StreamNode) -> str | None:
    """Returns the reason why a step after `node` needs rows; None if all consumers use columns."""
    edges = [edge for edge in graph.outputs_of(node.id) if edge.side is None]
    found = (_obstacle_on(graph, edge) for edge in edges)
    return next((one for one in found if one is not None), None) if edges else NOT_USED


def _obstacle_on(graph: StreamGraph, edge: StreamEdge) -> str | None:
    node = graph.nodes[edge.target]
    reason = _why_exchanged_as_rows(edge.partitioning) or node.traits.why_rows
    if reason is not None:
        return f"for {node.name!r}, {reason}"
    return _obstacle(graph, node) if node.traits.keeps_columns else None


def _why_exchanged_as_rows(partitioning: Partitioning | None) -> str | None:
    """Returns the reason why an exchange sends rows, None if it can send columns.

    It sends rows if it distributes records one by one, or by a function.
    """
    if partitioning is None:
        return None
    if partitioning.strategy is ShipStrategy.HASH:
        return None if is_expression(partitioning.function) else BY_FUNCTION
    return (
        ONE_BY_ONE if partitioning.strategy in (ShipStrategy.SHUFFLE, ShipStrategy.CUSTOM) else None
    )
