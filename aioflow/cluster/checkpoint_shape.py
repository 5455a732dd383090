"""What a job graph looks like to its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from aioflow.checkpoint.completed import CheckpointedOperator
from aioflow.checkpoint.plan import CheckpointedVertex, VertexInput
from aioflow.graph.job_graph import JobEdge, JobGraph, JobVertex, connected_subtasks
from aioflow.graph.stream_graph import ShipStrategy

__all__ = ["checkpointed_vertices"]


def checkpointed_vertices(graph: JobGraph) -> tuple[CheckpointedVertex, ...]:
    """The vertices of `graph`, producers first."""
    return tuple(
        CheckpointedVertex(
            vertex_id=vertex.id,
            name=vertex.name,
            operators=tuple(
                _operator(vertex, node.name, uid)
                for node, uid in zip(vertex.nodes, vertex.uids, strict=True)
            ),
            inputs=tuple(_input(graph, edge) for edge in graph.inputs_of(vertex.id)),
        )
        for vertex in graph.vertices
    )


def _operator(vertex: JobVertex, name: str, uid: str) -> CheckpointedOperator:
    return CheckpointedOperator(
        uid=uid, name=name, parallelism=vertex.parallelism, max_parallelism=vertex.max_parallelism
    )


def _input(graph: JobGraph, edge: JobEdge) -> VertexInput:
    strategy = edge.partitioning.strategy
    return VertexInput(
        edge.source,
        _producers(graph, edge),
        edge_id=edge.id,
        keyed=strategy is ShipStrategy.HASH,
        may_be_overtaken=strategy.may_be_overtaken,
    )


def _producers(graph: JobGraph, edge: JobEdge) -> tuple[Sequence[int], ...] | None:
    """Lists for each consumer the producers that reach it; None if all of them do."""
    if not edge.partitioning.strategy.pointwise:
        return None
    producers, consumers = (
        graph.vertex(edge.source).parallelism,
        graph.vertex(edge.target).parallelism,
    )
    reached = [
        connected_subtasks(edge.partitioning.strategy, producer, producers, consumers)
        for producer in range(producers)
    ]
    return tuple(
        tuple(p for p in range(producers) if consumer in reached[p])
        for consumer in range(consumers)
    )
