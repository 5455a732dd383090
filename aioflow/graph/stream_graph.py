"""The flow as data: one node an operator, one edge a stream between two of them.

Built by the API, never changed by a run: it binds no loop and opens nothing. Node ids count from 0
in the order of building.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import GraphError

if TYPE_CHECKING:
    from aioflow.core.functions import OutputTag
    from aioflow.operators.local_aggregate import LocalAggregate
    from aioflow.operators.operator import Operator
    from aioflow.operators.source import Source
    from aioflow.operators.watermarks import WatermarkStrategy

__all__ = ["Chaining", "Partitioning", "ShipStrategy", "StreamEdge", "StreamGraph", "StreamNode"]

DEFAULT_SLOT_SHARING_GROUP = "default"


class ShipStrategy(Enum):
    """How records choose among the subtasks of the consumer; the value is the name that graphs
    and REST show.
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
        """Whether barriers may overtake its records, which are dealt out anew when the parallelism
        changes. Where it matters which subtask a record was sent to, and only user code or the
        wiring knows, that cannot be done.
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
    """A ship strategy with the function it needs: of the key (HASH), or of the value and the
    number of subtasks (CUSTOM).
    """

    strategy: ShipStrategy
    function: Any = None
    fields: tuple[str | int, ...] | None = None
    """Those that the consumer reads of records of columns: others need not travel. None: all."""
    keys_alone: bool = False
    """Whether the consumer looks at no record, only at its key, which may travel in its place."""
    taken: tuple[Any, ...] | None = None
    """The one function by which the consumer takes of a record all that it reads of it, none if it
    only counts: where records are dealt out what that gives may travel in their place, in batches
    that say so. None: it reads more.
    """
    local: LocalAggregate | None = None
    """How a batch of few keys is folded before it is dealt out. None: all records go."""
    written: str = "key_by"
    """Where the user gave the function of the key, as an error names it."""


@dataclass(frozen=True, slots=True)
class StreamEdge:
    """A stream from `source` to input `input_index` of `target`. `side` reads a side output instead
    of the main one.

    `partitioning` None: forward when both have the same parallelism, otherwise rebalance.
    """

    source: int
    target: int
    input_index: int = 0
    partitioning: Partitioning | None = None
    side: OutputTag[Any] | None = None


@dataclass(slots=True, kw_only=True)
class StreamNode:
    """One operator.

    `factory` makes a fresh one for each subtask; a source node has `source` and no factory.
    """

    id: int
    kind: str
    """map, filter, window, sink, ...: what the graph shows and uids are derived from."""
    name: str
    uid: str | None = None
    """As the user gave it; `StreamGraph.uid_of` derives one otherwise."""
    factory: Callable[[], Operator] | None = None
    source: Source[Any] | None = None
    watermarks: WatermarkStrategy[Any] | None = None
    """The strategy of a source node; it sees each split on its own."""
    parallelism: int | None = None
    """None: the flow's."""
    parallelism_max: int | None = None
    """An upper bound that the operator itself sets: 1 for what cannot be split."""
    keyed: bool = False
    """Whether its input comes straight from `key_by`: it has keyed state."""
    event_time: bool = False
    """Whether a watermark strategy stands upstream of it (or is its own)."""
    stateful: bool = False
    sink: bool = False
    stays_here: bool = False
    """Whether it holds something of the program that runs the flow (a result list, an input, a
    function as sink), so that it runs in that process also when others are in workers."""
    chaining: Chaining = Chaining.ALWAYS
    slot_sharing_group: str = DEFAULT_SLOT_SHARING_GROUP
    remark: str = ""
    """Why it runs as it does (rows, slices, per window): what `explain()` says."""
    side_tags: tuple[OutputTag[Any], ...] | None = None
    """The side outputs that it may have. None: its function decides that while it runs."""


@dataclass(slots=True)
class StreamGraph:
    """Nodes in the order in which they were built, and the edges between them."""

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
        """Edges into a node, by input index."""
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
        """The nodes and everything that they depend on."""
        needed: set[int] = set()
        open_ids = list(node_ids)
        while open_ids:
            node_id = open_ids.pop()
            if node_id not in needed:
                needed.add(node_id)
                open_ids.extend(edge.source for edge in self.edges if edge.target == node_id)
        return needed

    def restricted_to(self, node_ids: set[int]) -> StreamGraph:
        """The part with just these nodes; ids stay.

        Uids are pinned first, so that state is found under the same names.
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
        """A graph that can be extended without touching this one."""
        return StreamGraph(
            self.name, self.parallelism, self.max_parallelism, dict(self.nodes), list(self.edges)
        )

    def topological(self) -> list[int]:
        """Node ids, producers first; otherwise in the order of building.

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
        """The uid of each node: the user's, or derived from what the node is and what it reads.

        A derived uid does not change when a sink, a collect or a subscription is added, nor when
        unrelated nodes move. Two nodes that would derive the same one are told apart by their
        order.
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
