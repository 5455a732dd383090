"""Checks `connect(other, read_first=...)`: sources of one side wait until the other side is read.

This cannot work if a source would wait for itself, directly or through other such operators. It
cannot work either if the end of the first side would never be known.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import GraphError
from aioflow.io.memory import FunctionSource

if TYPE_CHECKING:
    from aioflow.api.build import Upstream
    from aioflow.graph.stream_graph import StreamGraph, StreamNode

__all__ = ["READ_FIRST", "check_read_first"]

READ_FIRST = ("left", "right")
"""The sides of connected streams, by input index."""


def check_read_first(
    graph: StreamGraph, left: list[Upstream], right: list[Upstream], read_first: Any
) -> None:
    """Raises GraphError or ValueError if one side of two streams cannot be read first."""
    if read_first not in READ_FIRST:
        raise ValueError(f"read_first is {read_first!r}, expected 'left', 'right' or None")
    sides = [[one.node_id for one in side] for side in (left, right)]
    first = sides.pop(READ_FIRST.index(read_first))
    before, after = _sources(graph, first), _sources(graph, sides[0])
    waits = _waits(graph)
    needed = dict.fromkeys(before)
    left_over = list(before)
    while left_over:  # The first side may wait for others.
        for one in waits.get(left_over.pop(), ()):
            if one not in needed:
                needed[one] = None
                left_over.append(one)
    for source in after:
        if source in needed:
            name = graph.nodes[source].name
            raise GraphError(
                f"connect(..., read_first={read_first!r}): source {name!r} would wait until it is "
                "read itself; read the two sides from different sources"
            )
    for node_id in first:
        _check_ends(graph, graph.nodes[node_id], read_first)


def _check_ends(
    graph: StreamGraph, node: StreamNode, read_first: str, *, becomes_idle: bool = True
) -> None:
    """Raises GraphError if the stream of `node` would never be known to be read.

    `becomes_idle` is false below an operator that reports no idleness.
    """
    source, strategy = node.source, node.watermarks
    if source is not None:
        endless = not source.bounded and not isinstance(source, FunctionSource)
        has_idleness = strategy is not None and strategy.idle_after_ms is not None
        if endless and not (has_idleness and becomes_idle):
            raise GraphError(
                f"connect(..., read_first={read_first!r}): source {node.name!r} does not end, so "
                "it counts as read once it is idle: give it watermarks= with idle_after=, such as "
                'af.WatermarkStrategy.monotonous_timestamps(timestamp=fn, idle_after="1s")'
            )
        return
    if node.kind == "timestamps":
        assert isinstance(node.factory, partial), "made by assign_timestamps_and_watermarks()"
        if node.factory.args[-1].idle_after_ms is not None:
            return
        becomes_idle = False
    for edge in graph.inputs_of(node.id):
        _check_ends(graph, graph.nodes[edge.source], read_first, becomes_idle=becomes_idle)


def _waits(graph: StreamGraph) -> dict[int, list[int]]:
    """Returns the sources that each waiting source waits for."""
    waits: dict[int, list[int]] = {}
    for node in graph.nodes.values():
        if node.read_first is not None:
            edges = graph.inputs_of(node.id)
            first = [edge.source for edge in edges if edge.input_index == node.read_first]
            rest = [edge.source for edge in edges if edge.input_index != node.read_first]
            for source in _sources(graph, rest):
                waits.setdefault(source, []).extend(_sources(graph, first))
    return waits


def _sources(graph: StreamGraph, nodes: Iterable[int]) -> list[int]:
    """Returns the sources above `nodes`."""
    found: dict[int, None] = {}
    left = list(nodes)
    while left:
        at = left.pop()
        if at not in found:
            found[at] = None
            left += [edge.source for edge in graph.inputs_of(at)]
    return [one for one in found if graph.nodes[one].source is not None]
