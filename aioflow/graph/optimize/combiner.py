"""Aggregates each batch before it is sent to the subtasks of a window, where the window allows
this.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from aioflow.graph.optimize.projection import emits_late_elements, taken_by
from aioflow.graph.stream_graph import Partitioning, ShipStrategy, StreamGraph, StreamNode

if TYPE_CHECKING:
    from aioflow.core.ids import TapPlace
    from aioflow.operators.aggregate.local import LocalAggregate

__all__ = ["is_taken_apart", "with_combiner"]


def with_combiner(
    graph: StreamGraph,
    node: StreamNode,
    partitioning: Partitioning,
    whole: Collection[TapPlace] = (),
) -> Partitioning:
    """Returns `partitioning`, extended by the aggregate that reduces each batch before it is sent
    to the consumer `node`.
    """
    if partitioning.strategy is not ShipStrategy.HASH:
        return partitioning
    return replace(partitioning, local=_combiner_of(graph, node, whole))


def _combiner_of(
    graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace]
) -> LocalAggregate | None:
    """Returns the aggregate that reduces a batch before it is sent to the window `node`.

    Returns None if all records are sent, because they go to a single subtask or because late
    elements are read.
    """
    if graph.parallelism_of(node) == 1 or emits_late_elements(graph, node, whole):
        return None
    return node.traits.combiner


def is_taken_apart(graph: StreamGraph, place: TapPlace, whole: Collection[TapPlace] = ()) -> bool:
    """Whether late elements at `place` are incomplete, because only a part of each record was
    sent.
    """
    if isinstance(place, int):
        return False
    node = graph.nodes[place[0]]
    return taken_by(graph, node, whole) is not None or _combiner_of(graph, node, whole) is not None
