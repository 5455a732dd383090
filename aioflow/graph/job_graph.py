"""The flow as vertices: operators that can share a task are chained, other edges are exchanges.

Two neighbouring operators are chained under these conditions. The only edge between them is
forward, with the same parallelism and slot sharing group, and no side output. The upstream operator
has no other main consumer, the downstream operator has no other input, and neither forbids
chaining. A chain is a line; an operator with two consumers is its tail. Validation happens here, so
an invalid flow fails before anything runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import GraphError
from aioflow.graph.optimize import with_columns, with_combiner, with_projection, with_stand_ins
from aioflow.graph.stream_graph import (
    Chaining,
    Partitioning,
    ShipStrategy,
    StreamEdge,
    StreamGraph,
    StreamNode,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from aioflow.core.functions import OutputTag
    from aioflow.core.ids import TapPlace

__all__ = ["JobEdge", "JobGraph", "JobVertex", "build_job_graph", "connected_subtasks"]


@dataclass(frozen=True, slots=True)
class JobEdge:
    """An exchange between two vertices.

    `operator_index` is the position of the producer in its chain, because an operator in the middle
    of a chain may have a side output.
    """

    id: int
    source: int
    target: int
    input_index: int
    partitioning: Partitioning
    operator_index: int
    side: OutputTag[Any] | None


@dataclass(frozen=True, slots=True)
class JobVertex:
    """A chain of operators that run in one task, `parallelism` times.

    `id` is the id of its head node.
    """

    id: int
    name: str
    nodes: tuple[StreamNode, ...]
    uids: tuple[str, ...]
    parallelism: int
    max_parallelism: int
    slot_sharing_group: str
    waits: bool = False
    """Whether its source begins only when the first input of an operator downstream is read."""
    shares_name: bool = False
    """Whether an earlier vertex has the same name: its metrics then include its id."""
    awaits: bool = False
    """Whether an operator waits for calls, and keeps its input in its state meanwhile."""

    @property
    def head(self) -> StreamNode:
        return self.nodes[0]

    @property
    def stays_here(self) -> bool:
        """Whether an operator of the chain must run in the process of the program that runs the
        flow.
        """
        return any(node.stays_here for node in self.nodes)

    def task_name(self, index: int) -> str:
        """Returns the name of a subtask in logs and notes."""
        return f"{self.name} ({index + 1}/{self.parallelism})"

    def metrics_name(self, index: int) -> str:
        """Returns the metrics prefix of a subtask, which is unique in the job."""
        return f"{self.task_name(index)} #{self.id}" if self.shares_name else self.task_name(index)


@dataclass(frozen=True, slots=True)
class JobGraph:
    """The graph that a JobMaster deploys. The vertices are in topological order, producers
    first.
    """

    name: str
    vertices: tuple[JobVertex, ...]
    edges: tuple[JobEdge, ...]

    def inputs_of(self, vertex_id: int) -> list[JobEdge]:
        """Returns the edges into a vertex, by input index; the edges of a union share one index."""
        return sorted(
            (e for e in self.edges if e.target == vertex_id), key=lambda e: (e.input_index, e.id)
        )

    def outputs_of(self, vertex_id: int) -> list[JobEdge]:
        return [e for e in self.edges if e.source == vertex_id]

    def waiting_for(self, vertex_id: int) -> list[int]:
        """Returns the vertices of the sources that wait until the first input of an operator, the
        head of `vertex_id`, is read.
        """
        first = self.vertex(vertex_id).head.read_first
        if first is None:
            return []
        found: dict[int, None] = {}
        left = [edge.source for edge in self.inputs_of(vertex_id) if edge.input_index != first]
        while left:
            at = left.pop()
            if at not in found:
                found[at] = None
                left += [edge.source for edge in self.inputs_of(at)]
        # A JobManager does not have the source objects of the program.
        return [id_ for id_ in found if not self.inputs_of(id_)]

    def vertex(self, vertex_id: int) -> JobVertex:
        return next(v for v in self.vertices if v.id == vertex_id)

    def vertex_of_node(self, node_id: int) -> tuple[JobVertex, int]:
        """Returns the vertex that runs a node, and the node's position in the chain."""
        for vertex in self.vertices:
            for index, node in enumerate(vertex.nodes):
                if node.id == node_id:
                    return vertex, index
        raise KeyError(node_id)

    def awaits_behind(self, vertex_id: int) -> bool:
        """Returns whether an operator waits for calls in this vertex, or downstream of it."""
        return self.vertex(vertex_id).awaits or any(
            self.awaits_behind(edge.target) for edge in self.outputs_of(vertex_id)
        )

    @property
    def bounded(self) -> bool:
        """Whether every source ends by itself."""
        return all(v.head.source is None or v.head.source.bounded for v in self.vertices)


def connected_subtasks(
    strategy: ShipStrategy, producer: int, producers: int, consumers: int
) -> range:
    """Returns the indices of the consumer subtasks that receive records of subtask `producer`.

    Pointwise strategies distribute the consumers as evenly as possible, without gaps.
    """
    if not strategy.pointwise:
        return range(consumers)
    if producers >= consumers:
        target = producer * consumers // producers
        return range(target, target + 1)
    start = -(-producer * consumers // producers)
    return range(start, -(-(producer + 1) * consumers // producers))


def build_job_graph(
    graph: StreamGraph,
    *,
    apart: bool = False,
    whole: Collection[TapPlace] = (),
) -> JobGraph:
    """Chains operators, validates the flow, and numbers the exchanges.

    The operators in `apart` stay in the program's process and are not chained with others. `whole`
    are the places whose records are observed by taps, so that they keep all fields.
    """
    _validate(graph)
    uids = graph.uids()
    chained_into: dict[int, int] = {}
    for edge in graph.edges:
        if _chainable(graph, edge, apart):
            chained_into[edge.source] = edge.target
    # Outside edges only reach heads of chains, so heads in topological order are producers first.
    heads = [i for i in graph.topological() if i not in chained_into.values()]
    vertices: list[JobVertex] = []
    place: dict[int, tuple[int, int]] = {}
    for head in heads:
        chain = [head]
        while chain[-1] in chained_into:
            chain.append(chained_into[chain[-1]])
        first = with_columns(graph, graph.nodes[head], whole)
        first = with_stand_ins(graph, first, whole) if apart else first
        nodes = (first, *(graph.nodes[i] for i in chain[1:]))
        for index, node_id in enumerate(chain):
            place[node_id] = (head, index)
        name = " -> ".join(node.name for node in nodes)
        vertices.append(
            JobVertex(
                id=head,
                name=name,
                nodes=nodes,
                uids=tuple(uids[i] for i in chain),
                parallelism=graph.parallelism_of(nodes[0]),
                max_parallelism=graph.max_parallelism,
                slot_sharing_group=nodes[0].slot_sharing_group,
                shares_name=any(vertex.name == name for vertex in vertices),
                awaits=any(node.traits.awaits for node in nodes),
            )
        )
    edges: list[JobEdge] = []
    for edge in graph.edges:
        if chained_into.get(edge.source) == edge.target and edge.side is None:
            continue
        (source, operator_index), (target, _) = place[edge.source], place[edge.target]
        consumer = graph.nodes[edge.target]
        partitioning = with_projection(graph, consumer, _resolve(graph, edge), whole)
        partitioning = with_combiner(graph, consumer, partitioning, whole)
        edges.append(
            JobEdge(
                len(edges),
                source,
                target,
                edge.input_index,
                partitioning,
                operator_index,
                edge.side,
            )
        )
    made = JobGraph(graph.name, tuple(vertices), tuple(edges))
    waiting = {one for vertex in vertices for one in made.waiting_for(vertex.id)}
    if not waiting:
        return made
    vertices = [replace(vertex, waits=vertex.id in waiting) for vertex in vertices]
    return replace(made, vertices=tuple(vertices))


def _resolve(graph: StreamGraph, edge: StreamEdge) -> Partitioning:
    same = graph.parallelism_of(graph.nodes[edge.source]) == graph.parallelism_of(
        graph.nodes[edge.target]
    )
    if edge.partitioning is None:
        strategy = ShipStrategy.FORWARD if same else ShipStrategy.REBALANCE
        return Partitioning(strategy, by_parallelism=True)
    if edge.partitioning.strategy is ShipStrategy.FORWARD and not same:
        source, target = graph.nodes[edge.source], graph.nodes[edge.target]
        raise GraphError(
            f"forward() from {source.name!r} (parallelism {graph.parallelism_of(source)}) to "
            f"{target.name!r} "
            f"(parallelism {graph.parallelism_of(target)}): forward needs the same parallelism; "
            "use rebalance() or rescale()"
        )
    return edge.partitioning


def _chainable(graph: StreamGraph, edge: StreamEdge, apart: bool) -> bool:
    source, target = graph.nodes[edge.source], graph.nodes[edge.target]
    return (
        edge.side is None
        and _resolve(graph, edge).strategy is ShipStrategy.FORWARD
        and source.slot_sharing_group == target.slot_sharing_group
        and not (apart and source.stays_here is not target.stays_here)
        and source.chaining is not Chaining.NEVER
        and target.chaining is Chaining.ALWAYS
        and len(graph.inputs_of(target.id)) == 1
        and sum(1 for e in graph.outputs_of(source.id) if e.side is None) == 1
    )


def _validate(graph: StreamGraph) -> None:
    if not graph.nodes:
        raise GraphError(f"flow {graph.name!r} is empty: begin with flow.source(...)")
    for node in graph.nodes.values():
        parallelism = graph.parallelism_of(node)
        if not 1 <= parallelism <= graph.max_parallelism:
            raise GraphError(
                f"operator {node.name!r} has parallelism {parallelism}; expected 1 to "
                f"max_parallelism={graph.max_parallelism}"
            )
