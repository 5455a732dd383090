"""The job graph as far as checkpoints are concerned: its vertices with their operators, and who can send a barrier to whom."""

from __future__ import annotations

from aioflow.checkpoint.completed import CheckpointedOperator
from aioflow.checkpoint.plan import CheckpointedVertex, VertexInput
from aioflow.graph.job_graph import JobEdge, JobGraph, JobVertex, connected_subtasks

__all__ = ["checkpoint_shape"]


def checkpoint_shape(graph: JobGraph) -> tuple[CheckpointedVertex, ...]:
    """In the order of the graph, producers first."""
    return tuple(_vertex(graph, vertex) for vertex in graph.vertices)


def _vertex(graph: JobGraph, vertex: JobVertex) -> CheckpointedVertex:
    operators = tuple(
        CheckpointedOperator(uid=uid, name=node.name, parallelism=vertex.parallelism, max_parallelism=vertex.max_parallelism)
        for node, uid in zip(vertex.nodes, vertex.uids, strict=True)
    )
    inputs = tuple(VertexInput(edge.source, _producers(graph, vertex, edge)) for edge in graph.inputs_of(vertex.id))
    return CheckpointedVertex(vertex_id=vertex.id, name=vertex.name, operators=operators, inputs=inputs)


def _producers(graph: JobGraph, vertex: JobVertex, edge: JobEdge) -> tuple[tuple[int, ...], ...] | None:
    strategy = edge.partitioning.strategy
    if not strategy.pointwise:
        return None
    producers = graph.vertex(edge.source).parallelism
    reached = [connected_subtasks(strategy, producer, producers, vertex.parallelism) for producer in range(producers)]
    return tuple(tuple(p for p in range(producers) if index in reached[p]) for index in range(vertex.parallelism))
