"""Replaces the records of some sources by stand-ins: cheap objects with the same fields.

Making a NamedTuple from a line of JSON costs several times what it takes to read the line. A
stand-in is possible if the records go straight into a keyed exchange that sends only keys, or one
field (`operators.aggregate.projection`). Functions with known bodies (`operators.inlining`) must
read the times, the keys and that field. Then no user code sees the stand-in. Stand-ins are only
used with worker processes: subscriptions and in-flight data there encode the record itself. Within
one process a subscriber would see the stand-in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aioflow.expressions.nodes import is_expression
from aioflow.graph.optimize.projection import with_projection
from aioflow.graph.stream_graph import ShipStrategy, StreamEdge, StreamGraph, StreamNode
from aioflow.operators.inlining import body_of
from aioflow.operators.watermarks import WatermarkKind

if TYPE_CHECKING:
    from aioflow.core.ids import TapPlace
    from aioflow.operators.watermarks import WatermarkStrategy

__all__ = ["with_stand_ins"]

_FIELD = re.compile(r"\.([A-Za-z_]\w*)")

_BY_TIME = (WatermarkKind.BOUNDED, WatermarkKind.NONE, WatermarkKind.INGESTION)
"""Watermark strategies that read only the timestamp of a record."""


def with_stand_ins(graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace]) -> StreamNode:
    """Returns a source node that emits simpler objects if only fields of its records are read,
    otherwise `node` itself.

    `whole` are the places whose records are observed by taps.
    """
    offer = getattr(node.source, "with_stand_ins", None)
    if offer is None or node.id in whole or getattr(node.source, "columnar", False):
        return node
    found = offer()
    if found is None:
        return node
    source, fields = found
    edges = [edge for edge in graph.outputs_of(node.id) if edge.side is None]
    if (
        not edges
        or not _read_by_times(node.watermarks, fields)
        or not all(_read_by(graph, edge, fields, whole) for edge in edges)
    ):
        return node
    return replace(node, source=source)


def _read_by_times(strategy: WatermarkStrategy[Any] | None, fields: Collection[str]) -> bool:
    if strategy is None:
        return True
    return strategy.kind in _BY_TIME and (
        strategy.timestamp is None or _reads_fields(strategy.timestamp, fields)
    )


def _read_by(
    graph: StreamGraph, edge: StreamEdge, fields: Collection[str], whole: Collection[TapPlace]
) -> bool:
    """Returns whether the consumer at `edge` gets only keys, and at most one field of the
    records.
    """
    if edge.partitioning is None or edge.partitioning.strategy is not ShipStrategy.HASH:
        return False
    partitioning = with_projection(graph, graph.nodes[edge.target], edge.partitioning, whole)
    if not _reads_fields(partitioning.function, fields):
        return False
    # A field of a stand-in always exists. Other functions may fail, and then records are sent
    # whole.
    return partitioning.keys_alone or (
        partitioning.taken is not None and all(_is_field(one, fields) for one in partitioning.taken)
    )


def _reads_fields(function: Any, fields: Collection[str]) -> bool:
    """Whether `function` reads nothing but `fields` of its argument."""
    body = None if is_expression(function) else body_of(function)
    if body is None or len(body.pieces) < 2:
        return False
    read = [_FIELD.match(piece) for piece in body.pieces[1:]]
    return all(found is not None and found[1] in fields for found in read)


def _is_field(function: Callable[[Any], Any], fields: Collection[str]) -> bool:
    body = body_of(function)
    return (
        body is not None
        and body.pieces[0] == ""
        and body.pieces[1:] in {(f".{name}",) for name in fields}
    )
