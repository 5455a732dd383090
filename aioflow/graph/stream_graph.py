"""The flow as data: one node for each operator, one edge for each stream between two of them.

The API builds it, and a run never changes it: it binds no loop and opens nothing. Node ids count
from 0 in the order of building.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import GraphError
from aioflow.operators.traits import BY_RECORD, OperatorTraits

if TYPE_CHECKING:
    from aioflow.core.functions import OutputTag
    from aioflow.operators.aggregate.local import LocalAggregate
    from aioflow.operators.operator import Operator
    from aioflow.operators.source import BaseSource
    from aioflow.operators.watermarks import WatermarkStrategy

__all__ = ["Chaining", "Partitioning", "ShipStrategy", "StreamEdge", "StreamGraph", "StreamNode"]

DEFAULT_SLOT_SHARING_GROUP = "default"


class ShipStrategy(Enum):
    """The way in which an exchange distributes records over the consumer's subtasks.

    The value is the name in graphs and REST.
    """

    FORWARD = "FORWARD"
    REBALANCE = "REBALANCE"
    RESCALE = "RESCALE"
    SHUFFLE = "SHUFFLE"
    BROADCAST = "BROADCAST"
    GLOBAL = "GLOBAL"
    HASH = "HASH"
    CUSTOM = "CUSTOM"

    @property
    def pointwise(self) -> bool:
        """Whether a producer subtask reaches only some consumer subtasks."""
        return self in (ShipStrategy.FORWARD, ShipStrategy.RESCALE)

    @property
    def may_be_overtaken(self) -> bool:
        """Whether barriers may overtake records of the exchange.

        Overtaken records are distributed again when the parallelism changes. This is impossible if
        it matters which subtask gets a record, and if only user code or the connections of the job
        determine it.
        """
        return self in (
            ShipStrategy.REBALANCE,
            ShipStrategy.SHUFFLE,
            ShipStrategy.GLOBAL,
            ShipStrategy.HASH,
        )


class Chaining(Enum):
    """Whether an operator may share a task with the one before it."""

    ALWAYS = "always"
    HEAD = "head"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Partitioning:
    """A ship strategy with its function.

    For HASH the function computes the key of a record. For CUSTOM it chooses a subtask from the
    value and the number of subtasks.
    """

    strategy: ShipStrategy
    function: Any = None
    fields: tuple[str | int, ...] | None = None
    """Fields of columnar records that the consumer reads; others are not sent. None: all."""
    keys_alone: bool = False
    """Whether the consumer reads only the key of a record, which can be sent instead."""
    taken: tuple[Any, ...] | None = None
    """The one function that gives everything the consumer reads of a record; empty if it counts.

    Its result can be sent instead of the record, in batches marked `taken`. None: it reads more.
    """
    local: LocalAggregate | None = None
    """Aggregate that shrinks a batch with few keys before it is sent. None: no such aggregate."""
    written: str = "key_by"
    """Name of the method to which the user passed the key function, for error messages."""
    by_parallelism: bool = field(default=False, compare=False)
    """Whether the planner chose the strategy: forward between tasks of equal parallelism, otherwise
    a rebalance.
    """


@dataclass(frozen=True, slots=True)
class StreamEdge:
    """A stream from node `source` to input `input_index` of node `target`. `side` is the name of
    the side output that it reads, if any.

    `partitioning` None means forward if both nodes have the same parallelism, otherwise rebalance.
    """

    source: int
    target: int
    input_index: int = 0
    partitioning: Partitioning | None = None
    side: OutputTag[Any] | None = None


@dataclass(slots=True, kw_only=True)
class StreamNode:
    """A node of the graph: one operator, or a source.

    `factory` makes a new operator for each subtask. A source node has `source` and no factory.
    """

    id: int
    kind: str
    """map, filter, window, sink, ...: shown in the graph, and part of derived uids."""
    name: str
    uid: str | None = None
    """The user's uid, None if `StreamGraph.uids` derives one."""
    factory: Callable[[], Operator] | None = None
    traits: OperatorTraits = BY_RECORD
    """What the operator states about itself for the planner."""
    part_files: tuple[str, str] | None = None
    """Directory and suffix of the part files that a sink writes."""
    source: BaseSource[Any] | None = None
    watermarks: WatermarkStrategy[Any] | None = None
    """The strategy of a source node, applied to each split separately."""
    read_first: int | None = None
    """Input that is read first: the sources of all other inputs begin when it has ended or is idle.
    None: no input is read first.
    """
    parallelism: int | None = None
    """Number of subtasks. None: the parallelism of the flow."""
    parallelism_max: int | None = None
    """Maximum parallelism that the operator itself allows: 1 if its work cannot be divided."""
    keyed: bool = False
    """Whether its input comes straight from `key_by`, so that it has keyed state."""
    event_time: bool = False
    """Whether a watermark strategy is set upstream or by the node itself."""
    stateful: bool = False
    sink: bool = False
    stays_here: bool = False
    """Whether the operator must run in the process of the program that runs the flow.

    Such an operator holds a list of results, an input of the program, or a function as sink.
    """
    chaining: Chaining = Chaining.ALWAYS
    slot_sharing_group: str = DEFAULT_SLOT_SHARING_GROUP
    remark: str = ""
    """Reason why the operator runs as it does (on rows, by slices, per window), for `explain()`."""
    side_tags: tuple[OutputTag[Any], ...] | None = None
    """Tags of the node's possible side outputs. None: unknown, its function chooses tags while it
    runs.
    """


@dataclass(slots=True)
class StreamGraph:
    """A flow as nodes, in the order in which they were built, and the edges between them."""

    name: str
    parallelism: int = 1
    max_parallelism: int = 128
    nodes: dict[int, StreamNode] = field(default_factory=dict)
    edges: list[StreamEdge] = field(default_factory=list)

    def add_node(self, node: StreamNode) -> StreamNode:
        self.nodes[node.id] = node
        return node

    def add_edge(self, edge: StreamEdge) -> None:
        self.edges.append(edge)

    def next_id(self) -> int:
        return max(self.nodes, default=-1) + 1

    def inputs_of(self, node_id: int) -> list[StreamEdge]:
        """Returns the edges into a node, by input index."""
        return sorted(
            (edge for edge in self.edges if edge.target == node_id),
            key=lambda edge: edge.input_index,
        )

    def outputs_of(self, node_id: int) -> list[StreamEdge]:
        return [edge for edge in self.edges if edge.source == node_id]

    def parallelism_of(self, node: StreamNode) -> int:
        wanted = self.parallelism if node.parallelism is None else node.parallelism
        return wanted if node.parallelism_max is None else min(wanted, node.parallelism_max)

    def upstream_of(self, node_ids: Iterable[int]) -> set[int]:
        """Returns the nodes and all nodes that they depend on."""
        needed: set[int] = set()
        open_ids = list(node_ids)
        while open_ids:
            node_id = open_ids.pop()
            if node_id not in needed:
                needed.add(node_id)
                open_ids.extend(edge.source for edge in self.edges if edge.target == node_id)
        return needed

    def restricted_to(self, node_ids: set[int]) -> StreamGraph:
        """Returns the subgraph of these nodes, with their ids.

        The nodes keep their uids, so that state is found under the same names.
        """
        uids = self.uids()
        return StreamGraph(
            self.name,
            self.parallelism,
            self.max_parallelism,
            {i: replace(node, uid=uids[i]) for i, node in self.nodes.items() if i in node_ids},
            [edge for edge in self.edges if edge.source in node_ids and edge.target in node_ids],
        )

    def copy(self) -> StreamGraph:
        """Returns a copy that can be extended without changing this graph."""
        return StreamGraph(
            self.name, self.parallelism, self.max_parallelism, dict(self.nodes), list(self.edges)
        )

    def topological(self) -> list[int]:
        """Returns the node ids, producers first, otherwise in the order of building.

        Raises GraphError for a cycle.
        """
        missing = dict.fromkeys(self.nodes, 0)
        consumers: dict[int, list[int]] = {node_id: [] for node_id in self.nodes}
        for edge in self.edges:
            missing[edge.target] += 1
            consumers[edge.source].append(edge.target)
        ready = [node_id for node_id, count in missing.items() if count == 0]
        heapq.heapify(ready)
        ordered: list[int] = []
        while ready:
            node_id = heapq.heappop(ready)
            ordered.append(node_id)
            for target in consumers[node_id]:
                missing[target] -= 1
                if missing[target] == 0:
                    heapq.heappush(ready, target)
        if len(ordered) < len(self.nodes):
            names = ", ".join(repr(self.nodes[i].name) for i, count in missing.items() if count)
            raise GraphError(
                f"the flow has a cycle through {names}: a stream cannot feed an operator upstream "
                "of itself"
            )
        return ordered

    def uids(self) -> dict[int, str]:
        """Returns the uid of each node: the user's, or derived from its kind and its inputs.

        A derived uid does not change when a sink, a collect or a subscription is added, nor when
        unrelated nodes move. Nodes with the same derived uid are numbered in order.
        """
        uids: dict[int, str] = {}
        seen: dict[str, int] = {}
        for node_id in self.topological():
            node = self.nodes[node_id]
            if node.uid is not None:
                if node.uid in seen:
                    other = next(
                        self.nodes[known].name for known, uid in uids.items() if uid == node.uid
                    )
                    raise GraphError(
                        f"two operators have uid {node.uid!r}, {other!r} and {node.name!r}; a uid "
                        "names one operator's state"
                    )
                uids[node_id] = node.uid
                seen[node.uid] = 1
                continue
            read = ",".join(
                f"{uids[e.source]}/{e.input_index}/{e.side.name if e.side else ''}"
                for e in self.inputs_of(node_id)
            )
            base = f"{node.kind}-{zlib.crc32(f'{node.kind}({read})'.encode()):08x}"
            count = seen[base] = seen.get(base, 0) + 1
            uids[node_id] = base if count == 1 else f"{base}-{count}"
        return {node_id: uids[node_id] for node_id in self.nodes}
