"""Adds operators to the graph of a flow. All methods of streams use this module.

`connect(other, read_first=...)` is checked here. That argument makes the sources of one side wait
until all elements of the other side were read. The wait cannot end if a source would wait for
itself, directly or through other operators with `read_first`. Nor can the wait end if the job could
never tell that the first side was read to its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.advice.hints import sink_hint
from aioflow.core.errors import GraphError, did_you_mean
from aioflow.core.functions import has_operator_state
from aioflow.expressions.nodes import is_expression
from aioflow.graph.stream_graph import (
    Chaining,
    Partitioning,
    ShipStrategy,
    StreamEdge,
    StreamGraph,
    StreamNode,
)
from aioflow.io.memory import FunctionSource
from aioflow.io.pushing import PushSource
from aioflow.operators import traits
from aioflow.operators.async_io import AsyncSinkOperator
from aioflow.operators.function_sink import FunctionSink, as_sink, calling
from aioflow.operators.global_commit import (
    CommittablesSink,
    GlobalCommitterOperator,
    SinkWriterOperator,
)
from aioflow.operators.operator import make_operator
from aioflow.operators.sink import SinkOperator
from aioflow.operators.stateless import is_async
from aioflow.operators.traits import AWAITED_IN_TURN, BY_RECORD, OperatorTraits
from aioflow.operators.watermarks import WatermarkStrategy

if TYPE_CHECKING:
    from aioflow.core.functions import OutputTag
    from aioflow.core.scope import TapPlace
    from aioflow.graph.stream_graph import StreamGraph
    from aioflow.operators.operator import Operator
    from aioflow.operators.sink import BaseSink

__all__ = [
    "READ_FIRST",
    "OperatorOptions",
    "Upstream",
    "add_operator",
    "add_sink",
    "check_read_first",
    "check_watermarks",
    "event_time_of",
    "name_of",
    "operator_options",
    "refuse_pushed",
    "warn_of_empty_side",
    "warn_of_loose_ends",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Upstream:
    """A stream that an operator reads, and how its records are distributed.

    The stream is the output of a node, or one of its side outputs.
    """

    node_id: int
    side: OutputTag[Any] | None = None
    partitioning: Partitioning | None = None

    @property
    def place(self) -> TapPlace:
        """The output at which a tap can observe the records of the stream."""
        return self.node_id if self.side is None else (self.node_id, self.side.name)

    def partitioned(self, strategy: ShipStrategy, function: Any = None, **more: Any) -> Upstream:
        """Returns the same stream with another partitioning. `more` holds further fields of the new
        `Partitioning`.
        """
        return Upstream(self.node_id, self.side, Partitioning(strategy, function, **more))


@dataclass(frozen=True, slots=True)
class OperatorOptions:
    """The options that every operator has: `name=`, `uid=`, `parallelism=`."""

    name: str | None = None
    uid: str | None = None
    parallelism: int | None = None


def check_parallelism(name: str, parallelism: object) -> None:
    """Raises GraphError for an invalid parallelism. None is valid: it means the parallelism of the
    flow.
    """
    if parallelism is None:
        return
    if not isinstance(parallelism, int):
        raise GraphError(
            f"{name}: parallelism must be a whole number, got {type(parallelism).__name__}: "
            f"{parallelism!r}"
        )
    if parallelism < 1:
        raise GraphError(f"{name}: parallelism must be at least 1, got {parallelism}")


def check_place(graph: StreamGraph, name: str, options: OperatorOptions) -> None:
    """Raises GraphError for an invalid name, uid or parallelism.

    A uid must be unique in `graph`. The parallelism must not exceed the number of key groups.
    """
    for option, given in (("name", options.name), ("uid", options.uid)):
        if given is not None and not (isinstance(given, str) and given):
            kind = "" if given == "" else f"{type(given).__name__}: "
            raise GraphError(
                f"operator {name!r}: {option} must be a text that is not empty, got {kind}{given!r}"
            )
    if options.parallelism is not None and options.parallelism > graph.max_parallelism:
        raise GraphError(
            f"operator {name!r} has parallelism {options.parallelism}; expected 1 to "
            f"max_parallelism={graph.max_parallelism}"
        )
    if options.uid is not None:
        other = next((node.name for node in graph.nodes.values() if node.uid == options.uid), None)
        if other is not None:
            raise GraphError(
                f"two operators have uid {options.uid!r}, {other!r} and {name!r}; a uid names one "
                "operator's state"
            )


def add_operator(
    graph: StreamGraph,
    kind: str,
    inputs: list[list[Upstream]],
    factory: Callable[[], Operator],
    options: OperatorOptions,
    *,
    function: Any = None,
    event_time: bool | None = None,
    keyed: bool | None = None,
    stateful: bool = False,
    sink: bool = False,
    stays_here: bool = False,
    chaining: Chaining = Chaining.ALWAYS,
    parallelism_max: int | None = None,
    remark: str = "",
    side_tags: tuple[OutputTag[Any], ...] | None = None,
    traits: OperatorTraits = BY_RECORD,
) -> StreamNode:
    """Adds one operator to `graph`, and returns its node.

    `inputs` holds one list of streams for each input of the operator; several streams in a list
    form a union. The operator has keyed state if all its streams come straight from a `key_by`,
    unless `keyed` says otherwise. The operator has event time if all its streams have event time,
    unless `event_time` says otherwise.
    """
    name = options.name or name_of(kind, function)
    check_parallelism(options.name or kind, options.parallelism)
    check_place(graph, name, options)
    streams = [stream for one in inputs for stream in one]
    node = graph.add_node(
        StreamNode(
            id=graph.next_id(),
            kind=kind,
            name=name,
            uid=options.uid,
            factory=factory,
            parallelism=options.parallelism,
            parallelism_max=parallelism_max,
            keyed=is_keyed(streams) if keyed is None else keyed,
            event_time=event_time_of(graph, streams) if event_time is None else event_time,
            stateful=stateful,
            sink=sink,
            stays_here=stays_here,
            chaining=chaining,
            slot_sharing_group=graph.nodes[streams[0].node_id].slot_sharing_group,
            remark=remark,
            side_tags=side_tags,
            traits=traits,
        )
    )
    for input_index, one in enumerate(inputs):
        for stream in one:
            graph.add_edge(
                StreamEdge(stream.node_id, node.id, input_index, stream.partitioning, stream.side)
            )
    return node


def warn_of_empty_side(graph: StreamGraph, nodes: list[StreamNode], tag: OutputTag[Any]) -> None:
    """Warns if none of `nodes` can ever emit to the side output `tag`.

    This is not an error, because the side output is a valid stream.
    """
    if any(node.side_tags is None or tag in node.side_tags for node in nodes):
        return
    own = dict.fromkeys(one.name for node in nodes for one in node.side_tags or ())
    above = [graph.nodes[i] for i in sorted(graph.upstream_of(node.id for node in nodes))]
    makers = [node.name for node in above if tag in (node.side_tags or ())]
    functions = [node.name for node in above if node.side_tags is None and node.kind == "process"]
    if makers or (functions and not own):
        whose = " or ".join(map(repr, makers or functions))
        remedy = (
            "it reads the operator that made the stream, nothing upstream: take it of the stream "
            f"that {whose} made"
        )
    else:
        remedy = (
            f"it has {', '.join(map(repr, own)) or 'no side output'}{did_you_mean(tag.name, own)}"
        )
    logger.warning(
        "side(%r) of %s will stay empty: %s",
        tag,
        " and ".join(repr(node.name) for node in nodes),
        remedy,
    )


def refuse_pushed(graph: StreamGraph, call: str) -> None:
    """Raises GraphError if a flow that runs without a job handle reads from `af.io.push()`.

    Without a handle no element can be pushed, and the flow would never end. `call` names the user's
    call in the error.
    """
    for node in graph.nodes.values():
        if isinstance(node.source, PushSource):
            raise GraphError(
                f"{call} of flow {graph.name!r} would never end: its source {node.name!r} is "
                "af.io.push(), and only a job handle can push; use "
                "`async with flow.run() as job`, job.input(stream) to push and "
                "job.subscribe(stream) to read"
            )


def warn_of_loose_ends(graph: StreamGraph) -> None:
    """Logs a warning for streams without a reader, in a run whose caller cannot subscribe to them.

    This is not an error: the functions of the flow may be run for their side effects.
    """
    read = {edge.source for edge in graph.edges}
    loose = [
        repr(node.name) for node in graph.nodes.values() if not node.sink and node.id not in read
    ]
    if loose:
        logger.warning(
            "flow %r: nothing takes what %s gives: end it with .sink(...), or "
            ".sink(af.io.blackhole()) where only what its functions do "
            "counts; for the elements themselves `await stream.collect()`",
            graph.name,
            " and what ".join(loose),
        )


def event_time_of(graph: StreamGraph, streams: list[Upstream]) -> bool:
    """Whether all of `streams` have a watermark strategy upstream."""
    return all(graph.nodes[stream.node_id].event_time for stream in streams)


def is_keyed(streams: list[Upstream]) -> bool:
    """Whether all of `streams` come straight from a `key_by`, as keyed state requires."""
    return all(
        stream.partitioning is not None and stream.partitioning.strategy is ShipStrategy.HASH
        for stream in streams
    )


def name_of(kind: str, function: Any) -> str:
    """Returns the default name of an operator: its kind, and the name of its function if useful."""
    if function is None or is_expression(function):
        return kind
    name = getattr(function, "__name__", None) or type(function).__name__
    return kind if "<" in name or name in ("function", "partial") else f"{kind}({name})"


def check_watermarks(name: str, strategy: object) -> None:
    """Raises GraphError if `strategy` is not a WatermarkStrategy, for example a timestamp
    function.
    """
    if not isinstance(strategy, WatermarkStrategy):
        expected = (
            'af.WatermarkStrategy.bounded_out_of_orderness("5s", timestamp=fn), or another of its '
            "kinds"
        )
        raise GraphError(
            f"{name}: watermarks is {type(strategy).__name__}: {strategy!r}, expected a strategy, "
            f"like {expected}"
        )


def operator_options(named: dict[str, Any]) -> OperatorOptions:
    """Removes the options of the operator from `named`, the keyword arguments of a select, and
    returns these options.

    `name`, `uid` and `parallelism` are options unless they are expressions.
    """
    options = [
        option
        for option in ("name", "uid", "parallelism")
        if option in named and not is_expression(named[option])
    ]
    return OperatorOptions(**{option: named.pop(option) for option in options})


def add_sink(
    graph: StreamGraph, streams: list[Upstream], sink: Any, options: OperatorOptions
) -> None:
    """Adds an operator to `graph` that writes the elements of `streams` to `sink`.

    Raises GraphError if `sink` is not a sink, or if a source of `streams` refuses this sink.
    """
    if not callable(sink) and (remedy := sink_hint(sink)):
        raise GraphError(
            f"sink() takes a Sink or a function of one element, got {type(sink).__name__}: "
            f"{sink!r}{remedy}"
        )
    target = as_sink(sink)
    calls = isinstance(target, FunctionSink)
    target.check_sink()
    options = OperatorOptions(
        options.name or target.name or type(target).__name__, options.uid, options.parallelism
    )
    for node_id in sorted(graph.upstream_of(stream.node_id for stream in streams)):
        if (source := graph.nodes[node_id].source) is not None:
            source.refuse_sink(target)
    if target.commits_globally:
        add_global_sink(graph, streams, target, options)
        return
    awaits = calls and is_async(sink, "__call__")
    if awaits:
        factory = partial(make_operator, AsyncSinkOperator, sink)
    elif calls:
        factory = partial(make_operator, calling, sink)
    else:
        factory = partial(make_operator, SinkOperator, target)
    part_files = target.part_files
    warn_of_shared_files(graph, target, part_files)
    node = add_operator(
        graph,
        "sink",
        [streams],
        factory,
        options,
        sink=True,
        stateful=calls and has_operator_state(sink),
        stays_here=target.stays_here,
        parallelism_max=target.parallelism_max,
        traits=AWAITED_IN_TURN if awaits else BY_RECORD if calls else traits.sink(target),
    )
    node.part_files = part_files


def warn_of_shared_files(
    graph: StreamGraph, sink: BaseSink[Any], part_files: tuple[str, str] | None
) -> None:
    """Logs a warning if another sink of the flow writes the same kind of files to the same
    directory.

    This is not an error, because both sinks may be meant to write to one directory. `part_files`
    holds the directory and the kind of the files of `sink`, or is None.
    """
    other = next(
        (node for node in graph.nodes.values() if part_files and node.part_files == part_files),
        None,
    )
    if other is not None:
        logger.warning(
            "flow %r: %r and the sink %r write to the same directory, so a reader gets the rows of "
            "both mixed: give one another directory, or unite the streams before one sink",
            graph.name,
            sink,
            other.name,
        )


def add_global_sink(
    graph: StreamGraph, streams: list[Upstream], target: BaseSink[Any], options: OperatorOptions
) -> None:
    """Adds the writers of `target`, and after them the single task that commits for all of them."""
    writer = add_operator(
        graph,
        "sink",
        [streams],
        partial(make_operator, SinkWriterOperator, target),
        options,
        stays_here=target.stays_here,
        parallelism_max=target.parallelism_max,
        traits=traits.sink(target),
    )
    committer = CommittablesSink(target, f"{writer.name} committer")
    # Barriers do not overtake data on a `rescale` exchange. The single committer gets everything.
    committables = Upstream(writer.id).partitioned(ShipStrategy.RESCALE)
    add_operator(
        graph,
        "committer",
        [[committables]],
        partial(make_operator, GlobalCommitterOperator, committer),
        OperatorOptions(committer.name, options.uid and f"{options.uid}-committer"),
        event_time=False,
        sink=True,
        stays_here=target.stays_here,
        parallelism_max=committer.parallelism_max,
        traits=traits.sink(committer),
    )


READ_FIRST = ("left", "right")
"""The sides of connected streams, by input index."""


def check_read_first(
    graph: StreamGraph, left: list[Upstream], right: list[Upstream], read_first: Any
) -> None:
    """Raises GraphError or ValueError if the side `read_first` ("left" or "right") cannot be read
    first."""
    if read_first not in READ_FIRST:
        raise ValueError(f"read_first is {read_first!r}, expected 'left', 'right' or None")
    sides = [[one.node_id for one in side] for side in (left, right)]
    first = sides.pop(READ_FIRST.index(read_first))
    before, after = _sources(graph, first), _sources(graph, sides[0])
    waits = _waits(graph)
    needed = dict.fromkeys(before)
    left_over = list(before)
    while left_over:  # The first side may wait for others.
        for one in waits.get(left_over.pop(), ()):
            if one not in needed:
                needed[one] = None
                left_over.append(one)
    for source in after:
        if source in needed:
            name = graph.nodes[source].name
            raise GraphError(
                f"connect(..., read_first={read_first!r}): source {name!r} would wait until it is "
                "read itself; read the two sides from different sources"
            )
    for node_id in first:
        _check_ends(graph, graph.nodes[node_id], read_first)


def _check_ends(
    graph: StreamGraph, node: StreamNode, read_first: str, *, becomes_idle: bool = True
) -> None:
    """Raises GraphError if the job could never tell that the stream of `node` was read to its end.

    `becomes_idle` is False if an operator downstream of `node` passes no idleness on. `read_first`
    is only for the error.
    """
    source, strategy = node.source, node.watermarks
    if source is not None:
        endless = not source.bounded and not isinstance(source, FunctionSource)
        has_idleness = strategy is not None and strategy.idle_after_ms is not None
        if endless and not (has_idleness and becomes_idle):
            raise GraphError(
                f"connect(..., read_first={read_first!r}): source {node.name!r} does not end, so "
                "it counts as read once it is idle: give it watermarks= with idle_after=, such as "
                'af.WatermarkStrategy.monotonous_timestamps(timestamp=fn, idle_after="1s")'
            )
        return
    if node.kind == "timestamps":
        assert isinstance(node.factory, partial), "made by assign_timestamps_and_watermarks()"
        if node.factory.args[-1].idle_after_ms is not None:
            return
        becomes_idle = False
    for edge in graph.inputs_of(node.id):
        _check_ends(graph, graph.nodes[edge.source], read_first, becomes_idle=becomes_idle)


def _waits(graph: StreamGraph) -> dict[int, list[int]]:
    """Maps each source that has to wait to the sources that it waits for, by node id."""
    waits: dict[int, list[int]] = {}
    for node in graph.nodes.values():
        if node.read_first is not None:
            edges = graph.inputs_of(node.id)
            first = [edge.source for edge in edges if edge.input_index == node.read_first]
            rest = [edge.source for edge in edges if edge.input_index != node.read_first]
            for source in _sources(graph, rest):
                waits.setdefault(source, []).extend(_sources(graph, first))
    return waits


def _sources(graph: StreamGraph, nodes: Iterable[int]) -> list[int]:
    """Returns the ids of the sources upstream of the nodes with the ids `nodes`."""
    found: dict[int, None] = {}
    left = list(nodes)
    while left:
        at = left.pop()
        if at not in found:
            found[at] = None
            left += [edge.source for edge in graph.inputs_of(at)]
    return [one for one in found if graph.nodes[one].source is not None]
