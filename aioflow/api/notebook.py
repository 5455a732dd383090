"""Flows, streams and jobs as notebooks show them. Showing one runs nothing."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import AioflowError, describe_record, message_of
from aioflow.graph.job_graph import build_job_graph
from aioflow.io.arrow_files import ArrowTable
from aioflow.io.frames import attribute_names
from aioflow.io.memory import IterableSource

if TYPE_CHECKING:
    from aioflow.api.build import Upstream
    from aioflow.graph.job_graph import JobGraph
    from aioflow.graph.stream_graph import StreamGraph

__all__ = ["show_flow", "show_job", "show_stream"]

ROWS_MAX = 5
CHARACTERS_MAX = 60
COLUMNS = {
    "numRecordsIn": "records in",
    "numRecordsOut": "records out",
    "busyTimeMsPerSecond": "busy",
    "backPressuredTimeMsPerSecond": "back-pressured",
    "slowCallbacks": "held the loop",
}
"""Metric -> the heading of its column."""


def show_flow(graph: StreamGraph) -> dict[str, str]:
    """Returns the picture of a flow; the text of the error if the flow is not complete."""
    from aioflow.api.drawing import svg

    if not graph.nodes:
        return {}
    try:
        return {"image/svg+xml": svg(build_job_graph(graph))}
    except AioflowError as error:
        return {"text/html": f"<pre>{escape(message_of(error))}</pre>"}


def show_stream(title: str, graph: StreamGraph, upstreams: Sequence[Upstream]) -> str:
    """Returns the schema of a stream, and its first rows if a source has them in memory."""
    nodes = [graph.nodes[upstream.node_id] for upstream in upstreams]
    head = f"<b>{escape(title)}</b>"
    if len(nodes) != 1 or upstreams[0].side is not None:
        return head
    source = nodes[0].source
    if isinstance(source, ArrowTable):
        schema = [(field.name, str(field.type)) for field in source.table.schema]
        return head + _schema(schema) + _rows(source.table.slice(0, ROWS_MAX).to_pylist())
    if isinstance(source, IterableSource) and isinstance(source.items, list | tuple | range):
        rows = list(islice(source.items, ROWS_MAX))
        kinds = list(dict.fromkeys(map(type, rows)))
        return head + (_schema(_fields(kinds[0])) if len(kinds) == 1 else "") + _rows(rows)
    return head + _schema(_fields(None if source is None else source.record_type))


def show_job(
    title: str, graph: JobGraph, metrics: Mapping[str, float], monitor_url: str | None
) -> str:
    """Returns the numbers of each task, added up over its subtasks."""
    lines = []
    for vertex in graph.vertices:
        numbers = [_sum(metrics, vertex.name, name) for name in COLUMNS]
        shown = [f"{number:,.0f}" for number in numbers]
        lines.append([vertex.name, str(vertex.parallelism), *shown])
    link = (
        ""
        if monitor_url is None
        else (f' <a href="{escape(monitor_url, quote=True)}">dashboard</a>')
    )
    heads = ["task", "parallelism", *COLUMNS.values()]
    return f"<b>{escape(title)}</b>{link}{_table(heads, lines)}"


def _sum(metrics: Mapping[str, float], task: str, metric: str) -> float:
    # The subtasks of a task are "NAME (1/2)", and then the name of the metric.
    found = [
        value
        for name, value in metrics.items()
        if name.startswith(f"{task} (") and name.partition(").")[2] == metric
    ]
    return sum(found) / (len(found) if found and metric.endswith("PerSecond") else 1)


def _fields(kind: Any) -> list[tuple[str, str]]:
    names = attribute_names(kind) if isinstance(kind, type) else None
    if names is None:
        return [] if kind is None or kind is dict else [("value", _named(kind))]
    try:
        hints = typing.get_type_hints(kind)
    except Exception:  # noqa: BLE001  # A name that is not there.
        hints = {}
    return [(name, _named(hints.get(name, Any))) for name in names]


def _named(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)


def _schema(fields: Sequence[tuple[str, str]]) -> str:
    return "" if not fields else _table(["field", "type"], fields)


def _rows(rows: Sequence[Any]) -> str:
    if rows and all(type(row) is dict for row in rows):
        names = list(dict.fromkeys(name for row in rows for name in row))
        return _table(names, [[describe_record(row.get(name)) for name in names] for row in rows])
    return _table(["first elements"], [[describe_record(row)] for row in rows])


def _table(heads: Sequence[Any], lines: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{_cell(head)}</th>" for head in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in line) + "</tr>" for line in lines
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    text = str(value)
    return escape(text if len(text) <= CHARACTERS_MAX else f"{text[:CHARACTERS_MAX]}…")
