"""Checks the argument of `stream.sink(...)`, and adds the operator that writes to a Sink or calls a
function.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.advice.hints import sink_hint
from aioflow.api.build import OperatorOptions, Upstream, add_operator, make_operator
from aioflow.core.errors import GraphError
from aioflow.core.functions import has_operator_state
from aioflow.operators import traits
from aioflow.operators.async_io import AsyncSinkOperator
from aioflow.operators.sink import FunctionSink, SinkOperator, as_sink, calling
from aioflow.operators.stateless import is_async
from aioflow.operators.traits import AWAITED_IN_TURN, BY_RECORD

if TYPE_CHECKING:
    from aioflow.graph.stream_graph import StreamGraph

__all__ = ["add_sink"]


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
    if (check := getattr(target, "check_sink", None)) is not None:
        check()
    for node_id in sorted(graph.upstream_of(stream.node_id for stream in streams)):
        refuse = getattr(graph.nodes[node_id].source, "refuse_sink", None)
        if refuse is not None:
            refuse(target)
    awaits = calls and is_async(sink, "__call__")
    if awaits:
        factory = partial(make_operator, AsyncSinkOperator, sink)
    elif calls:
        factory = partial(make_operator, calling, sink)
    else:
        factory = partial(make_operator, SinkOperator, target)
    add_operator(
        graph,
        "sink",
        [streams],
        factory,
        OperatorOptions(
            options.name or getattr(target, "name", None) or type(target).__name__,
            options.uid,
            options.parallelism,
        ),
        sink=True,
        stateful=calls and has_operator_state(sink),
        stays_here=bool(getattr(target, "stays_here", False)),
        parallelism_max=getattr(target, "parallelism_max", None),
        traits=AWAITED_IN_TURN if awaits else BY_RECORD if calls else traits.sink(target),
    )
