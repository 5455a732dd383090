"""The same job graph at another parallelism: the chains and the exchanges stay as they are.

A task keeps all operators of its chain, so its state is found again, and data in flight too. An
exchange that the planner chose by parallelism is forward between equal tasks, else a rebalance.
Tasks joined by `forward()` of the user keep one parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aioflow.core.errors import GraphError, did_you_mean
from aioflow.graph.job_graph import JobEdge, JobGraph, JobVertex
from aioflow.graph.stream_graph import ShipStrategy

__all__ = [
    "check_workers",
    "parallelism_max",
    "parallelism_of_flow",
    "rescaled",
    "same_parallelism",
    "with_parallelism",
]


def parallelism_max(vertex: JobVertex) -> int:
    """Returns the largest parallelism that the task can have."""
    own = [node.parallelism_max for node in vertex.nodes if node.parallelism_max is not None]
    return min([vertex.max_parallelism, *own])


def parallelism_of_flow(graph: JobGraph) -> int:
    """Returns the parallelism of the operators that have none of their own."""
    counts = [v.parallelism for v in graph.vertices if _is_of_flow(v)]
    return max(counts, default=1)


def _is_of_flow(vertex: JobVertex) -> bool:
    return all(node.parallelism is None for node in vertex.nodes)


def check_workers(name: str, workers: object) -> None:
    """Raises GraphError if `workers` is no number of processes."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise GraphError(f"job {name!r} cannot have workers={workers!r}: expected 1 or more")


def rescaled(
    graph: JobGraph, parallelism: int | None, of_operators: Mapping[str, int] | None = None
) -> JobGraph:
    """Returns `graph` with `parallelism` where the flow's own applied, and that of single tasks.

    Operators that the flow gives a parallelism of their own keep it. `of_operators` names tasks by
    the uid of any operator in them. Raises GraphError, also for an unknown uid.
    """
    wanted: dict[int, int] = {}
    if parallelism is not None:
        most = max((vertex.max_parallelism for vertex in graph.vertices), default=1)
        _check("the job", parallelism, most, f"max_parallelism={most} of the flow")
        for vertex in graph.vertices:
            if _is_of_flow(vertex):
                wanted[vertex.id] = min(parallelism, parallelism_max(vertex))
    for uid, count in (of_operators or {}).items():
        vertex = _vertex_with(graph, uid)
        most = parallelism_max(vertex)
        limit = (
            f"max_parallelism={most} of the flow"
            if most == vertex.max_parallelism
            else f"{most}, because one of its operators cannot be split further"
        )
        _check(f"operator {uid!r} (task {vertex.name!r})", count, most, limit)
        wanted[vertex.id] = count
    for group in _forward_groups(graph):
        asked = [wanted[vertex.id] for vertex in group if vertex.id in wanted]
        if len(group) > 1 and asked:
            count = min(min(asked), *(parallelism_max(vertex) for vertex in group))
            wanted.update({vertex.id: count for vertex in group})
    return with_parallelism(graph, wanted)


def with_parallelism(graph: JobGraph, wanted: Mapping[int, int]) -> JobGraph:
    """Returns `graph` with another parallelism of the vertices in `wanted`, by id."""
    vertices = tuple(
        vertex
        if wanted.get(vertex.id, vertex.parallelism) == vertex.parallelism
        else replace(vertex, parallelism=wanted[vertex.id])
        for vertex in graph.vertices
    )
    counts = {vertex.id: vertex.parallelism for vertex in vertices}
    edges = tuple(_fitted(edge, counts) for edge in graph.edges)
    return replace(graph, vertices=vertices, edges=edges)


def same_parallelism(one: JobGraph, other: JobGraph) -> bool:
    """Returns whether all tasks of two forms of a graph have the same parallelism."""
    pairs = zip(one.vertices, other.vertices, strict=True)
    return all(a.parallelism == b.parallelism for a, b in pairs)


def _fitted(edge: JobEdge, counts: Mapping[int, int]) -> JobEdge:
    """Returns an exchange that fits the parallelism of both ends."""
    if not edge.partitioning.by_parallelism:
        return edge
    same = counts[edge.source] == counts[edge.target]
    strategy = ShipStrategy.FORWARD if same else ShipStrategy.REBALANCE
    if edge.partitioning.strategy is strategy:
        return edge
    return replace(edge, partitioning=replace(edge.partitioning, strategy=strategy))


def _forward_groups(graph: JobGraph) -> list[list[JobVertex]]:
    """Returns the vertices, those joined by the user's `forward()` in one list."""
    group_of = {vertex.id: [vertex] for vertex in graph.vertices}
    for edge in graph.edges:
        if edge.partitioning.strategy is ShipStrategy.FORWARD and (
            not edge.partitioning.by_parallelism
        ):
            first, second = group_of[edge.source], group_of[edge.target]
            if first is not second:
                first += second
                group_of.update({vertex.id: first for vertex in second})
    return list({id(group): group for group in group_of.values()}.values())


def _vertex_with(graph: JobGraph, uid: str) -> JobVertex:
    for vertex in graph.vertices:
        if uid in vertex.uids:
            return vertex
    known = [one for vertex in graph.vertices for one in vertex.uids]
    given = [n.uid for v in graph.vertices for n in v.nodes if n.uid is not None]
    have = ", ".join(map(repr, given)) or "none that the flow names: give it uid="
    raise GraphError(
        f"job {graph.name!r} has no operator with uid {uid!r}: uids are {have}"
        f"{did_you_mean(uid, known)}"
    )


def _check(what: str, count: object, most: int, limit: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise GraphError(
            f"the parallelism of {what} must be a whole number, got {type(count).__name__}: "
            f"{count!r}"
        )
    if not 1 <= count <= most:
        most_text = limit if most == 1 else f"1 to {limit}"
        raise GraphError(f"{what} cannot have parallelism {count}: expected {most_text}")
