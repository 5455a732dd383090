"""Sends only what the consumer of a keyed exchange reads: some fields, one value, or the key alone.

A parameter `whole` lists the places (outputs of operators) whose records are observed by taps, so
that they must keep all fields.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aioflow.expressions.nodes import is_expression
from aioflow.graph.stream_graph import Partitioning, ShipStrategy, StreamGraph, StreamNode

if TYPE_CHECKING:
    from aioflow.core.ids import TapPlace

__all__ = ["emits_late_elements", "fields_read", "taken_by", "with_projection"]


def with_projection(
    graph: StreamGraph,
    node: StreamNode,
    partitioning: Partitioning,
    whole: Collection[TapPlace] = (),
) -> Partitioning:
    """Returns `partitioning`, extended by the parts of a record that its consumer `node` reads, so
    that only these are sent.

    It is returned unchanged if the consumer's output may contain other parts of the record.
    """
    if partitioning.strategy is not ShipStrategy.HASH:
        return partitioning
    by_expression = is_expression(partitioning.function) and not node.traits.keeps_columns
    return replace(
        partitioning,
        fields=fields_read(graph, node, whole) if by_expression else None,
        keys_alone=node.traits.counts,
        taken=taken_by(graph, node, whole),
    )


def fields_read(
    graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace]
) -> tuple[str | int, ...] | None:
    """Returns the fields of a record that the operator of `node` itself reads.

    Returns None if it reads all fields, or if whole records come out, as in a window whose late
    elements are read.
    """
    return None if emits_late_elements(graph, node, whole) else node.traits.reads


def taken_by(
    graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace]
) -> tuple[Callable[[Any], Any], ...] | None:
    """Returns the function for the only part of a record that an aggregate or a window reads.

    Returns None if whole records are sent, for example to a single subtask, or if late elements are
    read.
    """
    if graph.parallelism_of(node) == 1 or emits_late_elements(graph, node, whole):
        return None
    return node.traits.taken


def emits_late_elements(graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace]) -> bool:
    """Returns whether anybody reads the late elements of a window."""
    if any(out.side is not None for out in graph.outputs_of(node.id)):
        return True
    return any(not isinstance(place, int) and place[0] == node.id for place in whole)
