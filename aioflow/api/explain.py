"""How a flow will run, in words: its tasks, the operators in each, the exchanges between them, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflow.graph.job_graph import JobGraph, build_job_graph
from aioflow.operators.async_wait import AsyncWaitOperator
from aioflow.operators.stateless import StatelessOperator

if TYPE_CHECKING:
    from typing import Any

    from aioflow.api.streams import DataStream
    from aioflow.graph.stream_graph import StreamNode

__all__ = ["explain", "explain_graph"]


def explain(stream: DataStream[Any]) -> str:
    """The part of the flow that `stream` depends on."""
    graph = stream.flow.graph
    needed = graph.upstream_of([upstream.node_id for upstream in stream.upstreams])
    return explain_graph(build_job_graph(graph.restricted_to(needed)))


def explain_graph(graph: JobGraph) -> str:
    """One paragraph a task, producers first."""
    lines = [f"flow {graph.name!r}: {len(graph.vertices)} tasks, {'bounded' if graph.bounded else 'unbounded'}"]
    for vertex in graph.vertices:
        lines.append(f"\ntask {vertex.id}, parallelism {vertex.parallelism}")
        for edge in graph.inputs_of(vertex.id):
            side = f", side output {edge.side.name!r}" if edge.side is not None else ""
            lines.append(f"  <- task {edge.source} by {edge.partitioning.strategy.value}{side}")
        previous: StreamNode | None = None
        for node in vertex.nodes:
            lines.append(f"  {node.name}: {_how(node, previous)}")
            previous = node
    return "\n".join(lines)


def _how(node: StreamNode, previous: StreamNode | None) -> str:
    if node.source is not None:
        bounded = "bounded" if node.source.bounded else "unbounded"
        return f"source, {bounded}, {'event time by split' if node.event_time else 'no event time'}"
    assert node.factory is not None
    operator = node.factory()
    parts = [node.remark or f"on rows: {_why_rows(operator)}"]
    behind = None if previous is None or previous.factory is None else previous.factory()
    if isinstance(operator, StatelessOperator) and isinstance(behind, StatelessOperator):
        parts.append("fused with the one before")
    if node.keyed:
        parts.append("keyed state")
    return ", ".join(parts)


def _why_rows(operator: object) -> str:
    if isinstance(operator, StatelessOperator):
        return "one generated loop over Python values"
    if isinstance(operator, AsyncWaitOperator):
        return "calls that are awaited, each on its own"
    return f"{type(operator).__name__} works on Python values"
