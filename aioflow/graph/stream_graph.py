"""The flow as data: one node for each operator, one edge for each stream between two of them.

The API builds the graph, and a run never changes it. The graph is pure data: it holds no event loop
and no open files. Node ids count from 0, in the order in which nodes are built.
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

    The value is the name of the strategy in displayed graphs and in the REST API.
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
        """Whether each producer subtask sends only to some consumer subtasks."""
        return self in (ShipStrategy.FORWARD, ShipStrategy.RESCALE)

    @property
    def may_be_overtaken(self) -> bool:
        """Whether barriers may overtake records of the exchange.

        Checkpoints then contain the overtaken records. A restore with another parallelism must
        distribute these records again, which is possible only if the strategy alone decides where a
        record goes. It is impossible if the producer's subtask or user code decides, or if every
        subtask gets a copy.
        """
        return self in (
            ShipStrategy.REBALANCE,
            ShipStrategy.SHUFFLE,
            ShipStrategy.GLOBAL,
            ShipStrategy.HASH,
        )


class Chaining(Enum):
    """Whether an operator may be chained: share a task with the operator before it or after it."""

    ALWAYS = "always"
    HEAD = "head"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Partitioning:
    """A ship strategy and its function.

    For HASH the function computes the key of a record. For CUSTOM it chooses a subtask from the
    value and the number of subtasks.
    """

    strategy: ShipStrategy
    function: Any = None
    fields: tuple[str | int, ...] | None = None
    """Fields of columnar records that the consumer reads; other fields are not sent. None means all
    fields.
    """
    keys_alone: bool = False
    """Whether the consumer reads only the key of a record. Then the key can be sent instead of the
    record.
    """
    taken: tuple[Any, ...] | None = None
    """The one function through which the consumer reads a record, as a tuple of one item.

    Its result can be sent instead of the record, in batches marked `taken`. The tuple is empty if
    the consumer only counts records. None means that the consumer reads more.
    """
    local: LocalAggregate | None = None
    """Aggregate that reduces a batch with few keys before it is sent; None if there is none."""
    written: str = "key_by"
    """Name of the method to which the user passed the key function, for error messages."""
    by_parallelism: bool = field(default=False, compare=False)
    """Whether the planner chose the strategy: forward between tasks of equal parallelism, otherwise
    a rebalance.
    """


@dataclass(frozen=True, slots=True)
class StreamEdge:
    """A stream from node `source` to input `input_index` of node `target`. `side` is the name of
    the side output of `source` that the stream reads; None means the main output.

    If `partitioning` is None, the strategy is forward if both nodes have the same parallelism,
    otherwise rebalance.
    """

    source: int
    target: int
    input_index: int = 0
    partitioning: Partitioning | None = None
    side: OutputTag[Any] | None = None


@dataclass(slots=True, kw_only=True)
class StreamNode:
    """A node of the graph: one operator, or a source.

    `factory` makes a new operator for each subtask. A source node has a `source` instead of a
    factory.
    """

    id: int
    kind: str
    """Kind of the operator: map, filter, window, sink, ... It is shown in the graph, and is part of
    derived uids.
    """
    name: str
    uid: str | None = None
    """The uid that the user has set; None if `StreamGraph.uids` derives the uid."""
    factory: Callable[[], Operator] | None = None
    traits: OperatorTraits = BY_RECORD
    """The properties of the operator that the planner needs."""
    part_files: tuple[str, str] | None = None
    """Directory and suffix of the part files that a sink writes; None if it writes none."""
    source: BaseSource[Any] | None = None
    watermarks: WatermarkStrategy[Any] | None = None
    """The watermark strategy of a source node, which is applied to each split separately; None if
    it has none.
    """
    read_first: int | None = None
    """Index of the input that is read first: the sources of all other inputs begin when this input
    has ended or is idle. None means that no input is read first.
    """
    parallelism: int | None = None
    """Number of subtasks; None means the default parallelism of the flow."""
    parallelism_max: int | None = None
    """Maximum parallelism that the operator itself allows, for example 1 if its work cannot be
    divided. None means no limit.
    """
    keyed: bool = False
    """Whether the input comes directly from `key_by`, so that the operator has keyed state."""
    event_time: bool = False
    """Whether a watermark strategy is set upstream or by the node itself."""
    stateful: bool = False
    sink: bool = False
    stays_here: bool = False
    """Whether the operator must run in the process of the program that runs the flow.

    Such an operator uses an object of the program: a list of results, an input, or a function as
    sink.
    """
    chaining: Chaining = Chaining.ALWAYS
    slot_sharing_group: str = DEFAULT_SLOT_SHARING_GROUP
    remark: str = ""
    """The reason why the operator runs on rows, by slices, or per window, as `explain()` shows
    it.
    """
    side_tags: tuple[OutputTag[Any], ...] | None = None
    """Tags of the possible side outputs of the node. None means unknown, because the function
    chooses tags while it runs.
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
        """Returns the edges into a node, sorted by input index."""
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
        """Returns the ids of `node_ids` and of all nodes upstream of them."""
        needed: set[int] = set()
        open_ids = list(node_ids)
        while open_ids:
            node_id = open_ids.pop()
            if node_id not in needed:
                needed.add(node_id)
                open_ids.extend(edge.source for edge in self.edges if edge.target == node_id)
        return needed

    def restricted_to(self, node_ids: set[int]) -> StreamGraph:
        """Returns the subgraph of the nodes with these ids. The nodes keep their ids.

        They also keep their uids, so that their state is found under the same names.
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
        """Returns the node ids, each producer before its consumers, otherwise in the order in which
        nodes were built.

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
        """Returns the uid of each node: the one that the user has set, or one that is derived from
        the kind and the inputs of the node.

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
