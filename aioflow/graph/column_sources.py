"""Which sources of a flow give columns: those that can, where what follows has use for them. And
which columns are read, and travel.

Some sources are columnar by themselves. Others, as files of JSON lines, decode into either, and the
program does not say which: it says what it does with the records. Columns are made where they stay
columns up to where they are put to use, by an aggregate, a window or a sink; a function on the way
gets rows, and those are best made at once. Why a source gives rows stands in the remark of its
node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aioflow.core.expression_trees import column_names
from aioflow.core.expressions import is_expression
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
    """A source node whose source gives columns, where it can and they are of use; else `node` with
    the reason in its remark.

    Of a source that never has any, the reason is only found for whoever wants it `explained`:
    nothing of what follows is made for it. `whole`: places that somebody looks at, besides those
    that follow.
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
    # Beside `with_columns`.
    reason = obstacle or source.why_rows  # type: ignore[attr-defined]
    return replace(node, remark=f"rows: {reason}")


def _narrowed(graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace]) -> StreamNode:
    """A source node whose source makes no columns that nobody reads, where it can leave them
    out.
    """
    offer = getattr(node.source, "with_fields", None)
    read = None if offer is None else _read_behind(graph, node, whole)
    if not read or not all(isinstance(name, str) for name in read):
        return node
    # It is not None: there is something to read.
    return replace(node, source=offer(tuple(sorted(read))))  # type: ignore[misc]


def fields_seen(
    graph: StreamGraph, place: TapPlace, whole: Collection[TapPlace] = ()
) -> list[str] | None:
    """The fields of records that whoever looks at `place` sees, where others are left out as nobody
    reads them. None: all there are.

    `whole`: as it was when the graph was built. Late elements of a window have come the way of what
    it aggregates.
    """
    for node_id in sorted(graph.upstream_of([place if isinstance(place, int) else place[0]])):
        node = with_columns(
            graph, graph.nodes[node_id], whole=(*whole, node_id)
        )  # None of its fields left out.
        read = _read_behind(graph, node, whole) if getattr(node.source, "columnar", False) else None
        if read is None or _read_behind(graph, node, (*whole, place)) is not None:
            continue
        if not isinstance(place, int) or _narrowed(graph, node, whole).source is not node.source:
            return sorted(map(str, read))
    return None


def _read_behind(
    graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace]
) -> set[str | int] | None:
    """The fields that the steps behind `node` read of its records, and itself for their times;
    None: records come out whole.
    """
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
    """What one consumer reads."""
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
        fields = getattr(step.function, "__columns__", None)
        if fields is not None:
            return read | set(column_names(*fields.values()))
        behind = _read_behind(graph, node, whole)
        return None if behind is None else read | set(column_names(step.function)) | behind
    fields = _fields_of(graph, node.id, operator, whole)
    return None if fields is None else read | set(fields)


def _fields_of(
    graph: StreamGraph, node_id: int, operator: Operator, whole: Collection[TapPlace]
) -> tuple[str | int, ...] | None:
    """The fields that an aggregate or a window reads; None: something comes out whole, or it is
    neither.

    A window whose late elements somebody reads is one: those come out whole.
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
    """`partitioning`, with the fields that the consumer reads where it is known, and nothing
    else of a record comes out of it.
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
    """Whether the late elements that `place` stands for are not whole, or not all, as something
    else was sent in their place.
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
    """All that an aggregate or a window takes of a record, where records are dealt out to several
    of it; None: they are sent whole.

    As for columns, a window whose late elements somebody reads has to get them whole.
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
    """How a batch is folded before it is dealt out to several of a window; None: all of its
    records are sent.
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
    """Whether somebody reads the late elements of a window."""
    if any(out.side is not None for out in graph.outputs_of(node_id)):
        return True
    return any(not isinstance(place, int) and place[0] == node_id for place in whole)


def _counts(operator: Operator) -> bool:
    """Whether it looks at no record, only at how many there are of each key, and gives none out.

    A window of event time gives out late elements, to whoever subscribes to them while it runs.
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
    """Which step behind `node` makes rows, and why; None if columns are put to use by all that
    follows.
    """
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
    """Why columns become rows on the way: whoever deals records out one by one, or by a
    function, makes rows of them.
    """
    if partitioning is None:
        return None
    if partitioning.strategy is ShipStrategy.HASH:
        return None if is_expression(partitioning.function) else BY_FUNCTION
    return (
        ONE_BY_ONE if partitioning.strategy in (ShipStrategy.SHUFFLE, ShipStrategy.CUSTOM) else None
    )
