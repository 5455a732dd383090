"""The flow as vertices: operators that can share a task are chained, other edges are exchanges.

Two neighbouring operators are chained under these conditions. They have the same parallelism and
slot sharing group. The edge between them is forward and reads no side output. The upstream operator
has no other consumer of its main output, the downstream operator has no other input, and neither
forbids chaining. A chain has no branches: an operator with two consumers is the end of its chain.
Validation happens here, so an invalid flow fails before anything runs.

A job graph can be rescaled without changing chains and exchanges. A task keeps all operators of its
chain, so that its state and its in-flight data can be restored. An exchange whose strategy the
planner chose by parallelism is forward between tasks of equal parallelism, otherwise a rebalance.
Tasks that the user joined by `forward()` keep the same parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import GraphError, did_you_mean
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
    from aioflow.core.scope import TapPlace

__all__ = [
    "JobEdge",
    "JobGraph",
    "JobVertex",
    "build_job_graph",
    "check_workers",
    "connected_subtasks",
    "parallelism_max",
    "parallelism_of_flow",
    "rescaled",
    "same_parallelism",
    "with_parallelism",
]


@dataclass(frozen=True, slots=True)
class JobEdge:
    """An exchange between two vertices.

    `operator_index` is the position of the producing operator in its chain, because any operator of
    a chain may have a side output.
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

    `id` is the id of the first node of the chain.
    """

    id: int
    name: str
    nodes: tuple[StreamNode, ...]
    uids: tuple[str, ...]
    parallelism: int
    max_parallelism: int
    slot_sharing_group: str
    waits: bool = False
    """Whether the source of the vertex waits until an operator downstream has read its first
    input.
    """
    shares_name: bool = False
    """Whether an earlier vertex has the same name. If so, the metric names of this vertex include
    its id.
    """
    awaits: bool = False
    """Whether an operator of the chain waits for calls, and meanwhile can keep its input in its
    state.
    """

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
        """Returns the name of a subtask in logs and notes on errors."""
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
        """Returns the edges into a vertex, sorted by input index. The edges of a union have the
        same index.
        """
        return sorted(
            (e for e in self.edges if e.target == vertex_id), key=lambda e: (e.input_index, e.id)
        )

    def outputs_of(self, vertex_id: int) -> list[JobEdge]:
        return [e for e in self.edges if e.source == vertex_id]

    def waiting_for(self, vertex_id: int) -> list[int]:
        """Returns the ids of the source vertices that wait until the first operator of `vertex_id`
        has read the input that it reads first.
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
        """Returns whether this vertex, or one downstream of it, has an operator that waits for
        calls (`JobVertex.awaits`).
        """
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

    `producers` and `consumers` are the numbers of subtasks. A pointwise strategy distributes the
    consumers over the producers as evenly as possible.
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

    With `apart`, operators that must stay in the program's process are not chained with others.
    `whole` lists the outputs of operators that taps observe. Records of these outputs keep all
    fields.
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


def parallelism_max(vertex: JobVertex) -> int:
    """Returns the largest parallelism that `vertex` can have."""
    own = [node.parallelism_max for node in vertex.nodes if node.parallelism_max is not None]
    return min([vertex.max_parallelism, *own])


def parallelism_of_flow(graph: JobGraph) -> int:
    """Returns the default parallelism of the flow: that of the operators without a parallelism of
    their own.
    """
    counts = [v.parallelism for v in graph.vertices if _is_of_flow(v)]
    return max(counts, default=1)


def _is_of_flow(vertex: JobVertex) -> bool:
    return all(node.parallelism is None for node in vertex.nodes)


def check_workers(name: str, workers: object) -> None:
    """Raises GraphError if `workers` is not a whole number of at least 1."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise GraphError(f"job {name!r} cannot have workers={workers!r}: expected 1 or more")


def rescaled(
    graph: JobGraph, parallelism: int | None, of_operators: Mapping[str, int] | None = None
) -> JobGraph:
    """Returns `graph` with `parallelism` in place of the flow's default parallelism.

    Operators with a parallelism of their own keep it. `of_operators` maps the uid of an operator to
    the parallelism of its task. Raises GraphError for an impossible value or an unknown uid.
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
    """Returns a copy of `graph` with a new parallelism for some vertices. `wanted` maps vertex ids
    to parallelisms.
    """
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
    """Returns whether each vertex has the same parallelism in `one` and in `other`, two versions of
    a graph.
    """
    pairs = zip(one.vertices, other.vertices, strict=True)
    return all(a.parallelism == b.parallelism for a, b in pairs)


def _fitted(edge: JobEdge, counts: Mapping[int, int]) -> JobEdge:
    """Returns `edge` with a strategy that fits the parallelism of both ends, which `counts`
    contains by vertex id.
    """
    if not edge.partitioning.by_parallelism:
        return edge
    same = counts[edge.source] == counts[edge.target]
    strategy = ShipStrategy.FORWARD if same else ShipStrategy.REBALANCE
    if edge.partitioning.strategy is strategy:
        return edge
    return replace(edge, partitioning=replace(edge.partitioning, strategy=strategy))


def _forward_groups(graph: JobGraph) -> list[list[JobVertex]]:
    """Returns all vertices in groups. Vertices that the user connected by `forward()` are in one
    group.
    """
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
