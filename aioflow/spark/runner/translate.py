"""Turns a flow's graph into the stages of a Spark job.

It decides which tasks run together, where records are shuffled, and what is refused. A stage is a
tree of the flow's tasks (`JobVertex`) that need no exchange between them. Each subtask of a stage
is a Spark task. Their number is the parallelism of the task at the root of the tree. So
`parallelism=` means the same as without Spark, and a flow of parallelism 1 has one order. A source
is the exception. If every operator after it looks at one record at a time, each of its splits is a
Spark task of its own.

    source -> map -> flat_map  ==key_by==>  window -> map  ==collect==>  this program

Tasks with a side output or two consumers are still one stage: their rows carry the number of the
edge. Tasks that stay in this program (`collect`, functions as sinks, and sinks that print) are
stages of one subtask that run here.

Nothing in this module calls Spark. A flow that Spark cannot run is refused here, before anything
starts, with an error that names the operator and the remedy.

`FrameRows` reads the rows of a DataFrame inside the Spark task that computed them. The rows come as
Arrow batches. They are converted to elements in slices, as the flow asks for elements. Each
partition is a split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import GraphError
from aioflow.graph.job_graph import JobEdge
from aioflow.graph.stream_graph import Partitioning, ShipStrategy
from aioflow.io.memory import FunctionSource
from aioflow.io.standard_output import StdoutSink
from aioflow.operators.sink import SinkOperator
from aioflow.operators.source import BaseReader, BaseSource, Split
from aioflow.spark.bridge.source import FrameSource
from aioflow.spark.streaming.source import StreamSource

if TYPE_CHECKING:
    import pyarrow as pa

    from aioflow.graph.job_graph import JobGraph, JobVertex
    from aioflow.graph.stream_graph import StreamNode
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = [
    "BY_RECORD",
    "FrameRows",
    "SparkPlan",
    "Stage",
    "plan_flow",
    "plan_stages",
    "with_ends_apart",
    "with_printing_apart",
]


class FrameRows(BaseSource[Any]):
    """A source that replaces a `FrameSource` in a job of Spark.

    The payload of a split is an iterator of Arrow record batches, which the source reads.
    """

    bounded = True

    def __init__(self, make: Callable[[dict[str, Any]], Any] | None, *, batches: bool) -> None:
        self._make = make
        self._batches = batches

    @property
    def gives_dicts(self) -> bool:
        """Whether an element is a plain dict of the columns."""
        return self._make is None and not self._batches

    async def discover(self) -> list[Split]:
        """Returns no splits, because Spark itself assigns a partition to each task."""
        return []

    def reader(self, ctx: SourceContext) -> SourceReader[Any]:
        return _RowReader(self._make, batches=self._batches)


class _RowReader(BaseReader[Any]):
    finished: bool

    def __init__(self, make: Callable[[dict[str, Any]], Any] | None, *, batches: bool) -> None:
        self._make = make
        self._whole = batches
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._batch: pa.RecordBatch | None = None
        self._offset = 0
        self.finished = False

    async def open(self, splits: Sequence[Split]) -> None:
        for split in splits:
            self._batches = split.payload

    def poll_batch(self, max_records: int) -> list[Any] | None:
        """Returns the next elements. Blocks until Spark has a batch, because nothing else runs in
        this process.
        """
        while self._batch is None or self._offset >= self._batch.num_rows:
            self._batch = next(self._batches, None)
            self._offset = 0
            if self._batch is None:
                self.finished = True
                return None
        if self._whole:
            self._offset = self._batch.num_rows
            return [self._batch]
        piece = self._batch.slice(self._offset, max_records)
        self._offset += piece.num_rows
        rows: list[Any] = piece.to_pylist()
        make = self._make
        return rows if make is None else [make(row) for row in rows]

    async def wait(self) -> None:
        """Does nothing: `poll_batch` itself waits."""

    def position(self, split_id: str) -> None:
        """Returns None, because this source has no positions. A lost task reads its partition from
        the beginning again.
        """

    async def close(self) -> None:
        """Does nothing: there is nothing to release."""


BY_RECORD = frozenset({"map", "filter", "flat_map", "select", "map_batches", "sink", "collect"})
"""Kinds of operators that process each record alone, so that their parallelism does not matter."""

SPREADING = frozenset(
    {ShipStrategy.FORWARD, ShipStrategy.REBALANCE, ShipStrategy.RESCALE, ShipStrategy.SHUFFLE}
)
"""Ship strategies under which each record goes to one subtask, no matter which."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Tasks of a flow that Spark runs together, without an exchange between them. `id` is the id of
    the first vertex, the root.
    """

    id: int
    vertices: tuple[JobVertex, ...]
    """Vertices of the stage, producers first."""
    inputs: tuple[JobEdge, ...]
    """Exchanges that the root reads, by input number; empty for a source."""
    inner: tuple[JobEdge, ...]
    """Edges between two vertices of this stage."""
    outputs: tuple[JobEdge, ...]
    """Exchanges to other stages."""
    at_home: bool
    """Whether the stage runs in the program that submits the flow."""
    by_split: bool
    """Whether each split of a source is a subtask of its own."""

    @property
    def root(self) -> JobVertex:
        return self.vertices[0]

    @property
    def is_source(self) -> bool:
        return self.root.head.source is not None

    @property
    def reads_frame(self) -> bool:
        """Whether the stage is a source that Spark reads itself."""
        return isinstance(self.root.head.source, FrameRows)

    @property
    def parallelism(self) -> int:
        """Number of subtasks. It does not apply to a source with `by_split`, which has a subtask
        for each split.
        """
        return 1 if self.at_home else self.root.parallelism

    def nodes(self) -> Iterator[StreamNode]:
        for vertex in self.vertices:
            yield from vertex.nodes


@dataclass(frozen=True, slots=True)
class SparkPlan:
    """All stages of a flow, producers first."""

    graph: JobGraph
    stages: tuple[Stage, ...]

    def stage(self, stage_id: int) -> Stage:
        return next(stage for stage in self.stages if stage.id == stage_id)

    def target_of(self, edge: JobEdge) -> Stage:
        """Returns the stage that reads an exchange."""
        return self.stage(edge.target)

    def describe(self) -> str:
        """Returns one line for each stage, for logs."""

        def place(stage: Stage) -> str:
            if stage.at_home:
                return "here"
            return "by split" if stage.by_split else f"{stage.parallelism} subtasks"

        return "\n".join(
            f"{place(stage)}: " + ", ".join(vertex.name for vertex in stage.vertices)
            for stage in self.stages
        )


def plan_flow(graph: JobGraph) -> SparkPlan:
    """Returns the stages of a bounded flow. Raises GraphError for a flow that Spark cannot run."""
    for vertex in graph.vertices:
        _check_source(vertex)
    return plan_stages(with_printing_apart(graph))


def plan_stages(graph: JobGraph) -> SparkPlan:
    """Returns the stages of `graph`. Operators that stay in this program must already be vertices
    of their own.
    """
    graph = _with_frames_there(graph)
    home = {vertex.id for vertex in graph.vertices if vertex.stays_here}
    for edge in graph.edges:
        if edge.source in home:
            name = graph.vertex(edge.source).name
            raise GraphError(
                f"{name!r} stays in this program, and what follows it would run in Spark: let it "
                "be the end of its stream"
            )
    merged = {edge.target: edge for edge in graph.edges if _is_fused(graph, edge, home)}
    root_of: dict[int, int] = {}
    for vertex in graph.vertices:  # Producers come first, so their roots are known.
        root_of[vertex.id] = root_of[merged[vertex.id].source] if vertex.id in merged else vertex.id
    return SparkPlan(
        graph,
        tuple(
            _stage(graph, root, root_of, merged, home) for root in dict.fromkeys(root_of.values())
        ),
    )


def _stage(
    graph: JobGraph, root: int, root_of: dict[int, int], merged: dict[int, JobEdge], home: set[int]
) -> Stage:
    vertices = tuple(vertex for vertex in graph.vertices if root_of[vertex.id] == root)
    members = {vertex.id for vertex in vertices}
    inner = tuple(edge for edge in merged.values() if edge.target in members)
    return Stage(
        id=root,
        vertices=vertices,
        inputs=tuple(edge for edge in graph.edges if edge.target == root),
        inner=inner,
        outputs=tuple(edge for edge in graph.edges if edge.source in members and edge not in inner),
        at_home=root in home,
        by_split=vertices[0].head.source is not None and all(map(_is_by_record, vertices)),
    )


def _check_source(vertex: JobVertex) -> None:
    node = vertex.head
    source: object = node.source
    if vertex.waits:
        raise GraphError(
            f"source {node.name!r} waits until another stream is read (read_first=), which a job "
            "of Spark does not do: run the flow here, or with on=af.SparkWorkers(...)"
        )
    if node.source is None or isinstance(source, FrameSource):
        return
    if node.stays_here:
        raise GraphError(
            f"source {node.name!r} is fed by this program while the flow runs, and a job of Spark "
            "reads its input by itself: run the flow "
            "here or with workers=, or write the elements to files first"
        )
    # Whether a function's iterator ends is not known in advance.
    if not node.source.bounded and not isinstance(node.source, FunctionSource):
        raise GraphError(
            f"source {node.name!r} never ends, and on=af.Spark(...) runs flows that do: give it "
            "an end, or run the flow on machines of "
            "Spark with on=af.SparkWorkers(...)"
        )


def with_printing_apart(graph: JobGraph) -> JobGraph:
    """Returns a graph in which sinks that write to standard output stay in this program."""
    return with_ends_apart(graph, _prints)


def with_ends_apart(graph: JobGraph, stays: Callable[[StreamNode], bool]) -> JobGraph:
    """Returns a graph in which each last operator for which `stays` is true stays in this program.

    Such an operator becomes a vertex of its own.
    """
    vertices: list[JobVertex] = []
    edges = list(graph.edges)
    for vertex in graph.vertices:
        *others, last = vertex.nodes
        if not stays(last):
            vertices.append(vertex)
            continue
        here = replace(last, stays_here=True)
        if not others:
            vertices.append(replace(vertex, nodes=(here,)))
            continue
        vertices.append(
            replace(
                vertex,
                name=" -> ".join(node.name for node in others),
                nodes=tuple(others),
                uids=vertex.uids[:-1],
            )
        )
        vertices.append(
            replace(vertex, id=last.id, name=last.name, nodes=(here,), uids=vertex.uids[-1:])
        )
        edges.append(
            JobEdge(
                len(edges),
                vertex.id,
                last.id,
                0,
                Partitioning(ShipStrategy.FORWARD),
                len(others) - 1,
                None,
            )
        )
    return replace(graph, vertices=tuple(vertices), edges=tuple(edges))


def _with_frames_there(graph: JobGraph) -> JobGraph:
    """Returns a graph in which DataFrames are read by Spark's tasks, not by this program."""
    vertices = []
    for vertex in graph.vertices:
        # For mypy, a source that needs the host is not a Source.
        source: object = vertex.head.source
        if isinstance(source, FrameSource | StreamSource):
            rows = FrameRows(source.make, batches=source.batches)
            vertex = replace(
                vertex,
                nodes=(replace(vertex.head, source=rows, stays_here=False), *vertex.nodes[1:]),
            )
        vertices.append(vertex)
    return replace(graph, vertices=tuple(vertices))


def _prints(node: StreamNode) -> bool:
    """Returns whether a sink writes to standard output. Such a sink must not run on Spark's
    executors, whose output is not shown anywhere.
    """
    factory: Callable[..., object] | None = node.factory
    return (
        isinstance(factory, partial)
        and factory.args[:1] == (SinkOperator,)
        and len(factory.args) > 1
        and isinstance(factory.args[1], StdoutSink)
    )


def _is_fused(graph: JobGraph, edge: JobEdge, home: set[int]) -> bool:
    """Returns whether the consumer of `edge` runs in the same Spark tasks as its producer."""
    source, target = graph.vertex(edge.source), graph.vertex(edge.target)
    if (
        source.id in home
        or target.id in home
        or len(graph.inputs_of(target.id)) != 1
        or target.head.keyed
    ):
        return False
    strategy = edge.partitioning.strategy
    if strategy is ShipStrategy.FORWARD:
        return True  # Both have the same parallelism, and subtask i sends to subtask i.
    return strategy in SPREADING and _is_by_record(target)


def _is_by_record(vertex: JobVertex) -> bool:
    return all(
        node.source is not None or (node.kind in BY_RECORD and not node.stateful and not node.keyed)
        for node in vertex.nodes
    )
