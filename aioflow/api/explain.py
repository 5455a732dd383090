"""Describes how a flow will run: its tasks, their operators, the exchanges between them, and
why.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from aioflow.expressions.nodes import is_expression
from aioflow.graph.job_graph import JobGraph, build_job_graph
from aioflow.graph.stream_graph import ShipStrategy
from aioflow.operators.inlining import why_off
from aioflow.operators.traits import ONE_BY_ONE

if TYPE_CHECKING:
    from aioflow.api.build import Upstream
    from aioflow.graph.job_graph import JobEdge
    from aioflow.graph.stream_graph import StreamGraph, StreamNode
    from aioflow.operators.source import BaseSource

__all__ = ["explain", "explain_graph"]


def explain(graph: StreamGraph, streams: list[Upstream]) -> str:
    """Describes the part of the flow that `streams` depend on."""
    needed = graph.upstream_of([stream.node_id for stream in streams])
    return explain_graph(build_job_graph(graph.restricted_to(needed)))


def explain_graph(graph: JobGraph) -> str:
    """Describes a graph in one paragraph for each task, producers first.

    A paragraph lists the inputs of the task, with their partitioning, and then its operators in
    order. If this process cannot inline functions, the second line says why.
    """
    count = len(graph.vertices)
    lines = [
        f"flow {graph.name!r}: {count} task{'s' * (count > 1)}, "
        f"{'bounded' if graph.bounded else 'unbounded'}"
    ]
    if (reason := why_off()) is not None:
        lines.append(f"functions are called, none is inlined: {reason}")
    of_columns = any(
        _may_give_columns(node.source) for vertex in graph.vertices for node in vertex.nodes
    )
    gives_columns: dict[int, bool] = {}
    numbers = {vertex.id: number for number, vertex in enumerate(graph.vertices, 1)}
    for vertex in graph.vertices:
        inputs = graph.inputs_of(vertex.id)
        lines.append(f"\ntask {numbers[vertex.id]}, parallelism {vertex.parallelism}")
        for edge in inputs:
            producer = graph.vertex(edge.source).nodes[edge.operator_index].name
            side = f", side output {edge.side.name!r}" if edge.side is not None else ""
            place = (
                f" as input {edge.input_index + 1}"
                if any(other.input_index for other in inputs)
                else ""
            )
            lines.append(
                f"  <- {producer} (task {numbers[edge.source]}){side}{place}, {_dealt_out(edge)}"
            )
        columns = bool(inputs) and all(
            gives_columns[edge.source] and edge.side is None and _keeps(edge) for edge in inputs
        )
        keyed_by_function = any(
            edge.partitioning.strategy is ShipStrategy.HASH
            and not is_expression(edge.partitioning.function)
            for edge in inputs
        )
        dealt_out = any(gives_columns[edge.source] and not _keeps(edge) for edge in inputs)
        given = ONE_BY_ONE if dealt_out else "the step before gives rows"
        previous: StreamNode | None = None
        in_spark = False
        for node in vertex.nodes:
            how, columns = _how(node, previous, columns, keyed_by_function, given, of_columns)
            in_spark = _is_in_spark(node, previous, in_spark)
            lines.append(
                f"  {node.name}: {how}{IN_SPARK if in_spark and node.source is None else ''}"
            )
            previous = node
            given = (
                "the source gives rows" if node.source is not None else "the step before gives rows"
            )
        gives_columns[vertex.id] = columns
    return "\n".join(lines)


DEALT_OUT = {
    ShipStrategy.FORWARD: "forward: each subtask to the one of its index",
    ShipStrategy.HASH: "by key",
    ShipStrategy.REBALANCE: "rebalance: round robin over all subtasks",
    ShipStrategy.RESCALE: "rescale: round robin within a group of subtasks",
    ShipStrategy.SHUFFLE: "shuffle: at random",
    ShipStrategy.BROADCAST: "broadcast: each record to every subtask",
    ShipStrategy.GLOBAL: "global: all to the first subtask",
    ShipStrategy.CUSTOM: "by partition_custom",
}


def _dealt_out(edge: JobEdge) -> str:
    """Returns how an exchange distributes records, as text with the key or function that it
    uses.
    """
    function = edge.partitioning.function
    if function is None:
        return DEALT_OUT[edge.partitioning.strategy]
    name = getattr(function, "__name__", type(function).__name__)
    shown = repr(function) if is_expression(function) else "a function" if "<" in name else name
    return f"{DEALT_OUT[edge.partitioning.strategy]}: {shown}"


IN_SPARK = ", as far as both mean the same by Spark itself with on=af.Spark(...)"


def _is_in_spark(node: StreamNode, previous: StreamNode | None, in_spark: bool) -> bool:
    """Returns whether Spark itself may run the operator, after reading a DataFrame.

    `in_spark` tells whether Spark runs the previous operator.
    """
    if node.source is not None:
        return node.source.in_spark and node.watermarks is None
    if not in_spark or (previous is not None and previous.kind == "select"):
        return False
    return node.traits.fuses and node.traits.why_rows is None


def _keeps(edge: JobEdge) -> bool:
    """Returns whether batches of columns stay columns on this exchange. An exchange that
    distributes records one by one converts them to rows.
    """
    return edge.partitioning.strategy not in (ShipStrategy.SHUFFLE, ShipStrategy.CUSTOM)


def _how(
    node: StreamNode,
    previous: StreamNode | None,
    columns: bool,
    keyed_by_function: bool,
    given: str,
    of_columns: bool,
) -> tuple[str, bool]:
    """Returns how an operator runs, and whether it emits columns.

    `columns` tells whether the operator receives columns. `given` is the reason why it receives
    rows, if it does. `of_columns` tells whether any source of the flow may produce columns, so that
    advice about them is useful.
    """
    if node.source is not None:
        bounded = "bounded" if node.source.bounded else "unbounded"
        gives = node.source.columnar
        kind = node.remark or ("columns" if gives else "rows")
        return (
            f"source, {bounded}, {'event time by split' if node.event_time else 'no event time'}, "
            f"{kind}",
            gives,
        )
    reason = node.traits.why_rows_by(key_function=keyed_by_function) if of_columns else None
    if not columns:
        reason = reason or given
    parts = [_in_units(node.remark)] if node.remark else []
    parts.append("on columns" if reason is None else f"on rows: {reason}")
    if node.traits.fuses and previous is not None and previous.traits.fuses:
        parts.append("fused with the one before")
    if node.keyed:
        parts.append("keyed state")
    return ", ".join(parts), reason is None


def _may_give_columns(source: BaseSource[Any] | None) -> bool:
    """Returns whether a source produces columns, or could do so."""
    return source is not None and (source.columnar or source.offers_columns)


def _in_units(remark: str) -> str:
    """Replaces milliseconds in a remark by durations as written in a program, such as 5m."""
    return re.sub(r"\b(\d+) ms\b", lambda found: _duration(int(found[1])), remark)


def _duration(ms: int) -> str:
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if ms and ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"
