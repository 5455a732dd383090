"""Decides which sources of a flow produce batches of columns, and which columns are read and sent.

Some sources always produce columns. Others, such as files of JSON lines, can produce columns or
rows (one Python object per record). The program does not choose: its use of the records decides. A
source produces columns if they stay columns until an aggregate, a window or a sink uses them. A
function on the way needs rows, and those are best made at once. The remark of a source's node says
why it produces rows.

A parameter `whole` lists the places (outputs of operators) whose records are observed by taps, so
that they must keep all fields.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aioflow.expressions.nodes import is_expression
from aioflow.expressions.rows import columns_of
from aioflow.expressions.trees import column_names
from aioflow.graph.stream_graph import (
    Partitioning,
    ShipStrategy,
    StreamEdge,
    StreamGraph,
    StreamNode,
)
from aioflow.operators.clock_window import ClockWindowOperator
from aioflow.operators.column_aggregates import fields_read
from aioflow.operators.column_aggregates import why_rows as why_rows_of
from aioflow.operators.column_reasons import BY_FUNCTION, ONE_BY_ONE, why_rows, why_rows_for_times
from aioflow.operators.folding import FoldingAggregate
from aioflow.operators.local_aggregate import LocalAggregate, local_aggregate
from aioflow.operators.running import RunningAggregateOperator
from aioflow.operators.slice_window import SliceWindowOperator
from aioflow.operators.stateless import StatelessOperator
from aioflow.operators.taking import taken_by
from aioflow.operators.watermarks import TimestampsAndWatermarksOperator

if TYPE_CHECKING:
    from aioflow.core.ids import TapPlace
    from aioflow.operators.operator import Operator

__all__ = ["fields_seen", "is_taken_apart", "with_columns", "with_fields"]

NO_COLUMNS = (
    "rows: its elements are Python values, and those of parquet, arrow, jsonl, csv and datagen of "
    "expressions can be columns"
)
NOT_USED = "nothing puts columns to use: an aggregate, a window or a sink of parquet or arrow does"


def with_columns(
    graph: StreamGraph,
    node: StreamNode,
    *,
    explained: bool = False,
    whole: Collection[TapPlace] = (),
) -> StreamNode:
    """Returns a source node whose source produces columns, if that is possible and useful.

    Otherwise returns `node` with the reason in its remark. For a source that never produces columns
    the reason is only looked up if `explained`, because that instantiates operators.
    """
    source, by_row = node.source, why_rows_for_times(node.watermarks)
    if source is None:
        return node
    if getattr(source, "columnar", False):
        if by_row:
            return replace(
                node, remark=f"columns, of which rows are made for their times: {by_row}"
            )
        return _narrowed(graph, node, whole)
    offer = getattr(source, "with_columns", None)
    if offer is None and not explained:
        return node
    obstacle = by_row or _obstacle(graph, node)
    if offer is None:
        return node if obstacle else replace(node, remark=NO_COLUMNS)
    if obstacle is None and (columnar := offer()) is not None:
        return _narrowed(graph, replace(node, source=columnar), whole)
    # A source with `with_columns` also has `why_rows`.
    reason = obstacle or source.why_rows  # type: ignore[attr-defined]
    return replace(node, remark=f"rows: {reason}")


def _narrowed(graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace]) -> StreamNode:
    """Returns a source node that leaves out unread columns, if its source can do that."""
    offer = getattr(node.source, "with_fields", None)
    read = None if offer is None else _read_behind(graph, node, whole)
    if not read or not all(isinstance(name, str) for name in read):
        return node
    # `offer` is not None, because some field is read.
    return replace(node, source=offer(tuple(sorted(read))))  # type: ignore[misc]


def fields_seen(
    graph: StreamGraph, place: TapPlace, whole: Collection[TapPlace] = ()
) -> list[str] | None:
    """Returns the fields that an observer of `place` sees, None if it sees all.

    The observer sees fewer fields if unread ones are left out. `whole` must be the same as when the
    graph was built. Late elements of a window come from the input of its aggregate.
    """
    for node_id in sorted(graph.upstream_of([place if isinstance(place, int) else place[0]])):
        node = with_columns(
            graph, graph.nodes[node_id], whole=(*whole, node_id)
        )  # With all of its fields.
        read = _read_behind(graph, node, whole) if getattr(node.source, "columnar", False) else None
        if read is None or _read_behind(graph, node, (*whole, place)) is not None:
            continue
        if not isinstance(place, int) or _narrowed(graph, node, whole).source is not node.source:
            return sorted(map(str, read))
    return None


def _read_behind(
    graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace]
) -> set[str | int] | None:
    """Returns the fields that later steps, and the event time of `node`, read; None for all."""
    if node.id in whole:
        return None
    times = node.watermarks.timestamp if node.watermarks is not None else None
    read = set(column_names(times)) if is_expression(times) else set[str | int]()
    for edge in graph.outputs_of(node.id):
        if edge.side is not None:
            continue
        found = _read_by(graph, edge, whole)
        if found is None:
            return None
        read |= found
    return read


def _read_by(
    graph: StreamGraph, edge: StreamEdge, whole: Collection[TapPlace]
) -> set[str | int] | None:
    """Returns the fields that the consumer at `edge` reads; None for all."""
    if _why_exchanged_as_rows(edge.partitioning) is not None:
        return None
    node = graph.nodes[edge.target]
    assert node.factory is not None, "what has an input is no source"
    operator = node.factory()
    by_key = edge.partitioning is not None and edge.partitioning.strategy is ShipStrategy.HASH
    read = (
        set(column_names(edge.partitioning.function))
        if by_key and edge.partitioning is not None
        else set[str | int]()
    )
    if isinstance(operator, StatelessOperator) and why_rows(operator) is None:
        (step,) = operator.steps
        columns = columns_of(step.function)
        if columns is not None:
            return read | set(column_names(*columns.values()))
        behind = _read_behind(graph, node, whole)
        return None if behind is None else read | set(column_names(step.function)) | behind
    fields = _fields_of(graph, node.id, operator, whole)
    return None if fields is None else read | set(fields)


def _fields_of(
    graph: StreamGraph, node_id: int, operator: Operator, whole: Collection[TapPlace]
) -> tuple[str | int, ...] | None:
    """Returns the fields that an aggregate or a window reads.

    Returns None for other operators, and if whole records come out, as in a window whose late
    elements are read.
    """
    if (
        not isinstance(operator, (RunningAggregateOperator, SliceWindowOperator))
        or not operator.reads_columns
    ):
        return None
    if _gives_elements_out(graph, node_id, whole):
        return None
    assert isinstance(operator.aggregate, FoldingAggregate), "others read rows"
    return fields_read(operator.aggregate)


def with_fields(
    graph: StreamGraph,
    edge: StreamEdge,
    partitioning: Partitioning,
    whole: Collection[TapPlace] = (),
) -> Partitioning:
    """Returns `partitioning` with what the consumer reads of a record, so that the rest is not
    sent.

    It is left as it is if the consumer's output may contain other parts of the record.
    """
    factory = graph.nodes[edge.target].factory
    if partitioning.strategy is not ShipStrategy.HASH or factory is None:
        return partitioning
    operator = factory()
    fields = (
        _fields_of(graph, edge.target, operator, whole)
        if is_expression(partitioning.function)
        else None
    )
    return replace(
        partitioning,
        fields=fields,
        keys_alone=_counts(operator),
        taken=_taken_by(graph, edge.target, operator, whole),
        local=_folded_by(graph, edge.target, operator, whole),
    )


def is_taken_apart(graph: StreamGraph, place: TapPlace, whole: Collection[TapPlace] = ()) -> bool:
    """Whether late elements at `place` are incomplete, because only a part of each record was
    sent.
    """
    if isinstance(place, int):
        return False
    factory = graph.nodes[place[0]].factory
    if factory is None:
        return False
    operator = factory()
    return any(
        found(graph, place[0], operator, whole) is not None for found in (_taken_by, _folded_by)
    )


def _taken_by(
    graph: StreamGraph, node_id: int, operator: Operator, whole: Collection[TapPlace]
) -> tuple[Callable[[Any], Any], ...] | None:
    """Returns the function for the only part of a record that an aggregate or a window reads.

    Returns None if whole records are sent, for example to a single subtask, or if late elements are
    read.
    """
    if (
        not isinstance(operator, (RunningAggregateOperator, SliceWindowOperator))
        or graph.parallelism_of(graph.nodes[node_id]) == 1
    ):
        return None
    return None if _gives_elements_out(graph, node_id, whole) else taken_by(operator.aggregate)


def _folded_by(
    graph: StreamGraph, node_id: int, operator: Operator, whole: Collection[TapPlace]
) -> LocalAggregate | None:
    """Returns how a batch is aggregated before it is sent to the subtasks of a window.

    Returns None if all its records are sent.
    """
    if (
        not isinstance(operator, SliceWindowOperator)
        or graph.parallelism_of(graph.nodes[node_id]) == 1
    ):
        return None
    return (
        None
        if _gives_elements_out(graph, node_id, whole)
        else local_aggregate(operator.aggregate, operator.grid)
    )


def _gives_elements_out(graph: StreamGraph, node_id: int, whole: Collection[TapPlace]) -> bool:
    """Whether the late elements of a window are read."""
    if any(out.side is not None for out in graph.outputs_of(node_id)):
        return True
    return any(not isinstance(place, int) and place[0] == node_id for place in whole)


def _counts(operator: Operator) -> bool:
    """Whether an operator only counts records per key, and gives no record out.

    Event-time windows give out late elements, for subscriptions made while they run.
    """
    if not isinstance(operator, (RunningAggregateOperator, ClockWindowOperator)):
        return False
    aggregate = operator.aggregate
    return (
        isinstance(aggregate, FoldingAggregate)
        and why_rows_of(aggregate) is None
        and not fields_read(aggregate)
    )


def _obstacle(graph: StreamGraph, node: StreamNode) -> str | None:
    """Returns the reason why a step after `node` needs rows; None if all consumers use columns."""
    edges = [edge for edge in graph.outputs_of(node.id) if edge.side is None]
    found = (_obstacle_on(graph, edge) for edge in edges)
    return next((one for one in found if one is not None), None) if edges else NOT_USED


def _obstacle_on(graph: StreamGraph, edge: StreamEdge) -> str | None:
    node = graph.nodes[edge.target]
    assert node.factory is not None, "what has an input is no source"
    operator = node.factory()
    reason = _why_exchanged_as_rows(edge.partitioning) or why_rows(operator)
    if reason is not None:
        return f"for {node.name!r}, {reason}"
    if isinstance(operator, (StatelessOperator, TimestampsAndWatermarksOperator)):
        return _obstacle(graph, node)
    return None


def _why_exchanged_as_rows(partitioning: Partitioning | None) -> str | None:
    """Returns the reason why an exchange sends rows, None if it can send columns.

    It sends rows if it distributes records one by one, or by a function.
    """
    if partitioning is None:
        return None
    if partitioning.strategy is ShipStrategy.HASH:
        return None if is_expression(partitioning.function) else BY_FUNCTION
    return (
        ONE_BY_ONE if partitioning.strategy in (ShipStrategy.SHUFFLE, ShipStrategy.CUSTOM) else None
    )
