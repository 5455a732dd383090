"""The optimisations of a flow's graph before it runs. They read the traits of operators.

`with_projection` sends only what the consumer of a keyed exchange reads: some fields, one value, or
the key alone. `with_combiner` aggregates each batch before it is sent to the subtasks of a window.

`with_columns` decides which sources produce batches of columns, and which columns are read and
sent. Some sources always produce columns. Others, such as files of JSON lines, can produce columns
or rows (one Python object per record). Which of the two depends on how the flow uses the records,
not on a choice of the user. A source produces columns if they stay columns until an aggregate, a
window or a sink uses them. If a function on the way needs rows, the source produces rows from the
start. The remark of a source's node says why it produces rows.

`with_stand_ins` replaces the records of some sources by cheap objects with the same fields. Making
a NamedTuple from a line of JSON costs several times what it takes to read the line. A stand-in is
possible if the records go straight into a keyed exchange that sends only keys, or one field
(`with_projection`). The functions that compute the times, the keys and that field must have known
bodies (`operators.inlining`). Then no user code sees the stand-in. Stand-ins are used only with
worker processes, because within one process a subscriber would see the stand-in.

A parameter `whole` lists the outputs of operators that taps observe. The records of these outputs
must keep all fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aioflow.expressions.nodes import is_expression
from aioflow.expressions.trees import column_names
from aioflow.graph.stream_graph import (
    Partitioning,
    ShipStrategy,
    StreamEdge,
    StreamGraph,
    StreamNode,
)
from aioflow.operators.inlining import body_of
from aioflow.operators.traits import BY_FUNCTION, ONE_BY_ONE, why_rows_for_times
from aioflow.operators.watermarks import WatermarkKind

if TYPE_CHECKING:
    from aioflow.core.scope import TapPlace
    from aioflow.operators.aggregate.local import LocalAggregate
    from aioflow.operators.watermarks import WatermarkStrategy

__all__ = [
    "emits_late_elements",
    "fields_read",
    "fields_seen",
    "is_taken_apart",
    "taken_by",
    "with_columns",
    "with_combiner",
    "with_projection",
    "with_stand_ins",
]


def with_projection(
    graph: StreamGraph,
    node: StreamNode,
    partitioning: Partitioning,
    whole: Collection[TapPlace] = (),
) -> Partitioning:
    """Returns `partitioning` with information on which parts of a record its consumer `node` reads.

    Then only these parts are sent. Records are sent as a whole if the consumer may emit them, for
    example to a side output that a tap observes. `whole` lists the outputs that taps observe.
    """
    if partitioning.strategy is not ShipStrategy.HASH:
        return partitioning
    by_expression = is_expression(partitioning.function) and not node.traits.keeps_columns
    return replace(
        partitioning,
        fields=fields_read(graph, node, whole) if by_expression else None,
        keys_alone=node.traits.counts,
        taken=taken_by(graph, node, whole),
    )


def fields_read(
    graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace]
) -> tuple[str | int, ...] | None:
    """Returns the fields of a record that the operator of `node` itself reads.

    Returns None if the operator reads all fields, or emits whole records. A window emits whole
    records if its side output of late elements has a reader. `whole` lists the outputs that taps
    observe.
    """
    return None if emits_late_elements(graph, node, whole) else node.traits.reads


def taken_by(
    graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace]
) -> tuple[Callable[[Any], Any], ...] | None:
    """Returns `OperatorTraits.taken` of `node`: the function through which an aggregate or a window
    reads a record.

    Returns None if records must be sent as a whole, for example if `node` has a single subtask, or
    if its side output of late elements has a reader. `whole` lists the outputs that taps observe.
    """
    if graph.parallelism_of(node) == 1 or emits_late_elements(graph, node, whole):
        return None
    return node.traits.taken


def emits_late_elements(graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace]) -> bool:
    """Returns whether a side output of `node` has a reader: a consumer in the flow, or a tap.

    `whole` lists the outputs that taps observe.
    """
    if any(out.side is not None for out in graph.outputs_of(node.id)):
        return True
    return any(not isinstance(place, int) and place[0] == node.id for place in whole)


def with_combiner(
    graph: StreamGraph,
    node: StreamNode,
    partitioning: Partitioning,
    whole: Collection[TapPlace] = (),
) -> Partitioning:
    """Returns `partitioning` with the aggregate that reduces each batch before it is sent to the
    consumer `node`, if there is one.

    `whole` lists the outputs that taps observe.
    """
    if partitioning.strategy is not ShipStrategy.HASH:
        return partitioning
    return replace(partitioning, local=_combiner_of(graph, node, whole))


def _combiner_of(
    graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace]
) -> LocalAggregate | None:
    """Returns the aggregate that reduces a batch before it is sent to the window `node`.

    Returns None if each record must be sent. This is so if `node` has a single subtask or no such
    aggregate. It is also so if a consumer or a tap reads the side output of late elements. `whole`
    lists the outputs that taps observe.
    """
    if graph.parallelism_of(node) == 1 or emits_late_elements(graph, node, whole):
        return None
    return node.traits.combiner


def is_taken_apart(graph: StreamGraph, place: TapPlace, whole: Collection[TapPlace] = ()) -> bool:
    """Returns whether late elements at `place` are incomplete, because only a part of each record
    is sent.

    `whole` lists the outputs that taps observe.
    """
    if isinstance(place, int):
        return False
    node = graph.nodes[place[0]]
    return taken_by(graph, node, whole) is not None or _combiner_of(graph, node, whole) is not None


NO_COLUMNS = (
    "rows: its elements are Python values, and those of parquet, arrow, jsonl, csv and datagen of "
    "expressions can be columns"
)
NOT_USED = "nothing puts columns to use: an aggregate, a window or a sink of parquet or arrow does"


def with_columns(
    graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace] = ()
) -> StreamNode:
    """Returns `node` with a source that produces columns, if that is possible and useful.

    Otherwise returns `node` with the reason in its remark. Taps observe the records at the places
    in `whole`.
    """
    source, by_row = node.source, why_rows_for_times(node.watermarks)
    if source is None:
        return node
    if source.columnar:
        if by_row:
            return replace(
                node, remark=f"columns, of which rows are made for their times: {by_row}"
            )
        return _narrowed(graph, node, whole)
    obstacle = by_row or _obstacle(graph, node)
    if not source.offers_columns:
        return node if obstacle else replace(node, remark=NO_COLUMNS)
    if obstacle is None and (columnar := source.with_columns()) is not None:
        return _narrowed(graph, replace(node, source=columnar), whole)
    return replace(node, remark=f"rows: {obstacle or source.why_rows}")


def _narrowed(graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace]) -> StreamNode:
    """Returns the source node `node` with a source that leaves out unread columns, if possible."""
    assert node.source is not None
    read = _read_behind(graph, node, whole)
    if not read or not all(isinstance(name, str) for name in read):
        return node
    return replace(node, source=node.source.with_fields(tuple(sorted(map(str, read)))))


def fields_seen(
    graph: StreamGraph, place: TapPlace, whole: Collection[TapPlace] = ()
) -> list[str] | None:
    """Returns the names of the fields that an observer of the records at `place` sees; None means
    all fields.

    The observer sees fewer fields if the source leaves out fields that no operator reads. `whole`
    lists the outputs that taps observe, as when the graph was built. Late elements of a window have
    the fields of its input.
    """
    for node_id in sorted(graph.upstream_of([place if isinstance(place, int) else place[0]])):
        # With all of its fields.
        node = with_columns(graph, graph.nodes[node_id], whole=(*whole, node_id))
        columnar = node.source is not None and node.source.columnar
        read = _read_behind(graph, node, whole) if columnar else None
        if read is None or _read_behind(graph, node, (*whole, place)) is not None:
            continue
        if not isinstance(place, int) or _narrowed(graph, node, whole).source is not node.source:
            return sorted(map(str, read))
    return None


def _read_behind(
    graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace]
) -> set[str | int] | None:
    """Returns the fields of the records of `node` that its event time and all later steps read;
    None means all fields.
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
    """Returns the fields that the consumer at `edge` and the steps after it read; None means all
    fields.
    """
    if _why_exchanged_as_rows(edge.partitioning) is not None:
        return None
    node = graph.nodes[edge.target]
    fields = fields_read(graph, node, whole)
    if fields is None:
        return None
    read = set(fields)
    if edge.partitioning is not None and edge.partitioning.strategy is ShipStrategy.HASH:
        read |= set(column_names(edge.partitioning.function))
    if not node.traits.keeps_records:
        return read
    behind = _read_behind(graph, node, whole)
    return None if behind is None else read | behind


def _obstacle(graph: StreamGraph, node: StreamNode) -> str | None:
    """Returns the reason why a step after `node` needs rows; None if all consumers use columns."""
    edges = [edge for edge in graph.outputs_of(node.id) if edge.side is None]
    found = (_obstacle_on(graph, edge) for edge in edges)
    return next((one for one in found if one is not None), None) if edges else NOT_USED


def _obstacle_on(graph: StreamGraph, edge: StreamEdge) -> str | None:
    node = graph.nodes[edge.target]
    reason = _why_exchanged_as_rows(edge.partitioning) or node.traits.why_rows
    if reason is not None:
        return f"for {node.name!r}, {reason}"
    return _obstacle(graph, node) if node.traits.keeps_columns else None


def _why_exchanged_as_rows(partitioning: Partitioning | None) -> str | None:
    """Returns the reason why an exchange sends rows, or None if it can send columns.

    An exchange sends rows if it chooses the target of each record at random, or by a function. An
    exchange by key sends rows if its key function is not an expression.
    """
    if partitioning is None:
        return None
    if partitioning.strategy is ShipStrategy.HASH:
        return None if is_expression(partitioning.function) else BY_FUNCTION
    return (
        ONE_BY_ONE if partitioning.strategy in (ShipStrategy.SHUFFLE, ShipStrategy.CUSTOM) else None
    )


_FIELD = re.compile(r"\.([A-Za-z_]\w*)")

_BY_TIME = (WatermarkKind.BOUNDED, WatermarkKind.NONE, WatermarkKind.INGESTION)
"""Watermark strategies that read only the timestamp of a record."""


def with_stand_ins(graph: StreamGraph, node: StreamNode, whole: Collection[TapPlace]) -> StreamNode:
    """Returns `node` with a source that emits stand-ins, if only fields of its records are read.
    Otherwise returns `node` itself.

    `whole` lists the outputs that taps observe.
    """
    if node.source is None or node.id in whole or node.source.columnar:
        return node
    found = node.source.with_stand_ins()
    if found is None:
        return node
    source, fields = found
    edges = [edge for edge in graph.outputs_of(node.id) if edge.side is None]
    if (
        not edges
        or not _read_by_times(node.watermarks, fields)
        or not all(_gets_only(graph, edge, fields, whole) for edge in edges)
    ):
        return node
    return replace(node, source=source)


def _read_by_times(strategy: WatermarkStrategy[Any] | None, fields: Collection[str]) -> bool:
    if strategy is None:
        return True
    return strategy.kind in _BY_TIME and (
        strategy.timestamp is None or _reads_fields(strategy.timestamp, fields)
    )


def _gets_only(
    graph: StreamGraph, edge: StreamEdge, fields: Collection[str], whole: Collection[TapPlace]
) -> bool:
    """Returns whether the exchange at `edge` sends of each record only its key, or its key and one
    of `fields`.

    Returns False if the key function may read more than `fields`.
    """
    if edge.partitioning is None or edge.partitioning.strategy is not ShipStrategy.HASH:
        return False
    partitioning = with_projection(graph, graph.nodes[edge.target], edge.partitioning, whole)
    if not _reads_fields(partitioning.function, fields):
        return False
    # A field of a stand-in always exists. Other functions may fail, and then records are sent
    # whole.
    return partitioning.keys_alone or (
        partitioning.taken is not None and all(_is_field(one, fields) for one in partitioning.taken)
    )


def _reads_fields(function: Any, fields: Collection[str]) -> bool:
    """Returns whether `function` is known to read nothing but `fields` of its argument."""
    body = None if is_expression(function) else body_of(function)
    if body is None or len(body.pieces) < 2:
        return False
    read = [_FIELD.match(piece) for piece in body.pieces[1:]]
    return all(found is not None and found[1] in fields for found in read)


def _is_field(function: Callable[[Any], Any], fields: Collection[str]) -> bool:
    body = body_of(function)
    return (
        body is not None
        and body.pieces[0] == ""
        and body.pieces[1:] in {(f".{name}",) for name in fields}
    )
