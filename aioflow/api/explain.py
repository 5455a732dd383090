"""How a flow will run, in words: its tasks, the operators in each, the exchanges between them, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflow.core.expressions import is_expression
from aioflow.graph.job_graph import JobGraph, build_job_graph
from aioflow.graph.stream_graph import ShipStrategy
from aioflow.operators.async_wait import AsyncWaitOperator
from aioflow.operators.column_aggregates import why_rows
from aioflow.operators.folding import FoldingAggregate
from aioflow.operators.running import RunningAggregateOperator
from aioflow.operators.sink import SinkOperator
from aioflow.operators.slice_window import SliceWindowOperator
from aioflow.operators.stateless import StatelessOperator
from aioflow.operators.watermarks import TimestampsAndWatermarksOperator

if TYPE_CHECKING:
    from typing import Any

    from aioflow.api.streams import DataStream
    from aioflow.graph.job_graph import JobEdge
    from aioflow.graph.stream_graph import StreamNode

__all__ = ["explain", "explain_graph"]


def explain(stream: DataStream[Any]) -> str:
    """The part of the flow that `stream` depends on."""
    graph = stream.flow.graph
    needed = graph.upstream_of([upstream.node_id for upstream in stream.upstreams])
    return explain_graph(build_job_graph(graph.restricted_to(needed)))


def explain_graph(graph: JobGraph) -> str:
    """One paragraph a task, producers first."""
    lines = [f"flow {graph.name!r}: {len(graph.vertices)} tasks, {'bounded' if graph.bounded else 'unbounded'}"]
    of_columns = any(getattr(node.source, "columnar", False) for vertex in graph.vertices for node in vertex.nodes)
    gives_columns: dict[int, bool] = {}
    for vertex in graph.vertices:
        lines.append(f"\ntask {vertex.id}, parallelism {vertex.parallelism}")
        inputs = graph.inputs_of(vertex.id)
        for edge in inputs:
            side = f", side output {edge.side.name!r}" if edge.side is not None else ""
            lines.append(f"  <- task {edge.source} by {edge.partitioning.strategy.value}{side}")
        columns = bool(inputs) and all(gives_columns[edge.source] and edge.side is None and _keeps(edge) for edge in inputs)
        keyed_by_function = any(
            edge.partitioning.strategy is ShipStrategy.HASH and not is_expression(edge.partitioning.function) for edge in inputs
        )
        before = "the exchange" if any(gives_columns[edge.source] and not _keeps(edge) for edge in inputs) else "the step"
        previous: StreamNode | None = None
        in_spark = False
        for node in vertex.nodes:
            rows = f"{before} before gives rows" if of_columns else None
            how, columns = _how(node, previous, columns, keyed_by_function, rows)
            in_spark = _is_in_spark(node, previous, in_spark)
            lines.append(f"  {node.name}: {how}{IN_SPARK if in_spark and node.source is None else ''}")
            previous, before = node, "the step"
        gives_columns[vertex.id] = columns
    return "\n".join(lines)


IN_SPARK = ", as far as both mean the same by Spark itself with on=af.Spark(...)"


def _is_in_spark(node: StreamNode, previous: StreamNode | None, in_spark: bool) -> bool:
    """Whether Spark may do it where it reads a DataFrame; `in_spark`: whether it may do the one before."""
    if node.source is not None:
        return bool(getattr(node.source, "in_spark", False)) and node.watermarks is None
    if not in_spark or node.factory is None or (previous is not None and previous.kind == "select"):
        return False
    operator = node.factory()
    return isinstance(operator, StatelessOperator) and operator.reads_columns


def _keeps(edge: JobEdge) -> bool:
    """Whether columns stay columns on the way: what deals records out one by one makes rows of them."""
    return edge.partitioning.strategy not in (ShipStrategy.SHUFFLE, ShipStrategy.CUSTOM)


def _how(
    node: StreamNode, previous: StreamNode | None, columns: bool, keyed_by_function: bool, rows: str | None
) -> tuple[str, bool]:
    """How it runs, and whether it gives columns; `columns`: it is given them; `rows`: why not, None where no source has any."""
    if node.source is not None:
        bounded = "bounded" if node.source.bounded else "unbounded"
        gives = bool(getattr(node.source, "columnar", False))
        kind = ", columns" if gives else ""
        return f"source, {bounded}, {'event time by split' if node.event_time else 'no event time'}{kind}", gives
    assert node.factory is not None
    operator = node.factory()
    if columns:
        reason = _why_rows_of_columns(operator, keyed_by_function)
        how = "on columns" if reason is None else f"on rows: {reason}"
    else:
        able = rows is not None and _why_rows_of_columns(operator, keyed_by_function) is None
        reason = how = f"on rows: {rows if able else _why_rows(operator)}"
    parts = [f"{node.remark}, {how}" if columns and node.remark else node.remark or how]
    behind = None if previous is None or previous.factory is None else previous.factory()
    if isinstance(operator, StatelessOperator) and isinstance(behind, StatelessOperator):
        parts.append("fused with the one before")
    if node.keyed:
        parts.append("keyed state")
    return ", ".join(parts), reason is None


def _why_rows_of_columns(operator: object, keyed_by_function: bool) -> str | None:
    """Why an operator that is given columns makes rows of them; None if it does not."""
    if isinstance(operator, TimestampsAndWatermarksOperator):
        return None
    if isinstance(operator, StatelessOperator):
        if operator.reads_columns:
            return None
        (step,) = operator.steps
        return f"{step.kind.value} by an expression gives values, not records" if is_expression(step.function) else "it calls a function"
    if isinstance(operator, (RunningAggregateOperator, SliceWindowOperator)):
        if keyed_by_function:
            return "the keys are given by a function"
        return why_rows(operator.aggregate) if isinstance(operator.aggregate, FoldingAggregate) else _why_rows(operator)
    if isinstance(operator, SinkOperator):
        return None if operator.sink_reads_columns else "the sink takes records"
    return _why_rows(operator)


def _why_rows(operator: object) -> str:
    if isinstance(operator, StatelessOperator):
        return "one generated loop over Python values"
    if isinstance(operator, AsyncWaitOperator):
        return "calls that are awaited, each on its own"
    return f"{type(operator).__name__} works on Python values"
