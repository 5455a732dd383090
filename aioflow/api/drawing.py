"""Shows a flow: as text, as a Mermaid flowchart, as an SVG picture, and in a notebook.

A notebook shows a flow as its picture, a stream as its schema and first rows, and a job as a table
of its tasks. Showing them runs nothing.

The picture shows producers left and consumers right, each task as a box with its chained operators.
A task stands one layer right of its farthest producer. An arrow that crosses a layer has a place of
its own there, so it bends around the boxes. Within a layer, boxes follow the mean height of their
producers, so that few arrows cross.
"""

from __future__ import annotations

import html
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from aioflow.api.explain import explain_graph
from aioflow.core.errors import AioflowError, describe_record, message_of
from aioflow.graph.job_graph import JobEdge, JobGraph, JobVertex, build_job_graph
from aioflow.io.files.arrow_files import ArrowTable
from aioflow.io.frames import attribute_names
from aioflow.io.memory import IterableSource

if TYPE_CHECKING:
    from aioflow.api.build import Upstream
    from aioflow.graph.stream_graph import StreamGraph

__all__ = ["edge_label", "mermaid", "show_flow", "show_job", "show_stream", "svg", "text"]

NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML does not allow, even escaped."""


def text(graph: JobGraph) -> str:
    """Returns a text that lists each task with its operators and inputs, and with the reasons why
    they run as they do.
    """
    return explain_graph(graph)


def mermaid(graph: JobGraph) -> str:
    """Returns a flowchart with a box for each task and its operators, and an arrow for each
    exchange.
    """
    lines = ["flowchart LR"]
    for vertex in graph.vertices:
        operators = "<br/>".join(_escaped(node.name) for node in vertex.nodes)
        shape = ('(["', '"])') if vertex.head.source is not None else ('["', '"]')
        lines.append(f"    t{vertex.id}{shape[0]}{operators}<br/>×{vertex.parallelism}{shape[1]}")
    for edge in graph.edges:
        lines.append(f'    t{edge.source} -- "{_escaped(edge_label(edge))}" --> t{edge.target}')
    return "\n".join(lines)


def edge_label(edge: JobEdge) -> str:
    """Returns the partitioning of an edge, and its side output if it has one."""
    strategy = edge.partitioning.strategy.value
    return strategy if edge.side is None else f"{edge.side.name}: {strategy}"


def _escaped(label: str) -> str:
    """Escapes a label for Mermaid, where `#` begins an entity code and must be replaced first."""
    for character, code in (
        ("#", "#35;"),
        ('"', "#quot;"),
        ("<", "#lt;"),
        (">", "#gt;"),
        ("\n", " "),
    ):
        label = label.replace(character, code)
    return label


CHARACTER = 7.3
"""Assumed width of a character in pixels, because the font cannot be measured here."""
LINE = 18
PAD = 12
HEADER = 24
COLUMN_GAP = 56
ROW_GAP = 28
MARGIN = 24
NAME_CHARACTERS_MAX = 34
SWEEPS = 4
"""Number of sweeps that improve the order within layers. More sweeps change little."""

STYLE = """
  svg { color-scheme: light dark; }
  text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2430; }
  .page { fill: #ffffff; }
  .title { font-size: 15px; font-weight: 600; }
  .box { fill: #f6f8fa; stroke: #8c98a9; }
  .source .head { fill: #d5ecdc; } .task .head { fill: #dbe6f6; } .sink .head { fill: #f3e3cf; }
  .quiet { fill: #667085; }
  .edge { fill: none; stroke: #667085; stroke-width: 1.4; }
  .tip { fill: #667085; }
  .label { font-size: 10px; fill: #475467; paint-order: stroke; stroke: #ffffff;
           stroke-width: 4px; text-anchor: middle; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e9ef; } .page { fill: #14171c; }
    .box { fill: #1c2128; stroke: #58657a; }
    .source .head { fill: #1f4a32; } .task .head { fill: #233a5e; } .sink .head { fill: #553d1d; }
    .quiet { fill: #98a2b3; } .edge { stroke: #98a2b3; } .tip { fill: #98a2b3; }
    .label { fill: #c3cad6; stroke: #14171c; }
  }
"""


@dataclass(slots=True, eq=False)
class Place:
    """A place in a layer of the picture. It holds the box of a task, or the arrow of an exchange
    that crosses the layer (`vertex` is None).
    """

    vertex: JobVertex | None
    layer: int
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0
    before: list[Place] = field(default_factory=list)
    after: list[Place] = field(default_factory=list)

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


def svg(graph: JobGraph) -> str:
    """Returns the picture as a stand-alone SVG document, for light and dark pages."""
    places, routes = _places(graph)
    layers = _layers(places)
    _order(layers)
    width, height = _arrange(layers, routes)
    width = max(width, len(_title(graph)) * CHARACTER * 1.3 + 2 * MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" '
        f'role="img" aria-label="{_attribute(_title(graph))}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width:.0f}" height="{height:.0f}"/>',
        f'<text class="title" x="{MARGIN}" y="{MARGIN + 8}">{escape(_title(graph))}</text>',
    ]
    parts += [_path(route) for _, route in routes]
    parts += [_box(place) for place in places if place.vertex is not None]
    parts += [_label(edge, route) for edge, route in routes]
    parts.append("</svg>")
    return NO_XML.sub("\ufffd", "\n".join(parts))


def _title(graph: JobGraph) -> str:
    count = len(graph.vertices)
    return (
        f"{graph.name}: {count} task{'s' if count > 1 else ''}, "
        f"{'bounded' if graph.bounded else 'unbounded'}"
    )


# The layout.


def _places(graph: JobGraph) -> tuple[list[Place], list[tuple[JobEdge, list[Place]]]]:
    """Returns all places, and for each exchange the places that its arrow connects.

    There is a place for each task, and for each exchange in each layer that it passes.
    """
    layer_of: dict[int, int] = {}
    for vertex in graph.vertices:  # Producers come first, so their layers are known.
        layer_of[vertex.id] = max(
            (layer_of[edge.source] + 1 for edge in graph.inputs_of(vertex.id)), default=0
        )
    # A source stands beside its first consumer, to keep its arrow short.
    for vertex in graph.vertices:
        readers = [layer_of[edge.target] for edge in graph.outputs_of(vertex.id)]
        if vertex.head.source is not None and readers:
            layer_of[vertex.id] = min(readers) - 1
    by_id = {vertex.id: _place(vertex, layer_of[vertex.id]) for vertex in graph.vertices}
    places = list(by_id.values())
    routes = []
    for edge in graph.edges:
        start, end = by_id[edge.source], by_id[edge.target]
        passing = [Place(None, layer, 0.0, LINE) for layer in range(start.layer + 1, end.layer)]
        places += passing
        route = [start, *passing, end]
        for one, other in pairwise(route):
            one.after.append(other)
            other.before.append(one)
        routes.append((edge, route))
    return places, routes


def _place(vertex: JobVertex, layer: int) -> Place:
    longest = max(len(name) for name in _names(vertex))
    return Place(
        vertex,
        layer,
        max(longest, 12) * CHARACTER + 2 * PAD,
        HEADER + LINE * len(vertex.nodes) + PAD,
    )


def _names(vertex: JobVertex) -> list[str]:
    return [
        node.name
        if len(node.name) <= NAME_CHARACTERS_MAX
        else f"{node.name[: NAME_CHARACTERS_MAX - 1]}…"
        for node in vertex.nodes
    ]


def _layers(places: Sequence[Place]) -> list[list[Place]]:
    layers: list[list[Place]] = [[] for _ in range(max(place.layer for place in places) + 1)]
    for place in places:
        layers[place.layer].append(place)
    return layers


def _order(layers: list[list[Place]]) -> None:
    """Sorts each layer by the mean position of its neighbours (Sugiyama's barycentre).

    Sweeps to the right and back, and keeps the best order.
    """
    position = {place: index for layer in layers for index, place in enumerate(layer)}

    def sort(layer: list[Place], *, backwards: bool) -> None:
        def mean(place: Place) -> float:
            near = place.after if backwards else place.before
            return sum(position[one] for one in near) / len(near) if near else position[place]

        layer.sort(key=mean)
        position.update({place: index for index, place in enumerate(layer)})

    best, fewest = [list(layer) for layer in layers], _crossings(layers, position)
    for sweep in range(2 * SWEEPS):
        backwards = sweep % 2 == 1
        for layer in reversed(layers) if backwards else layers:
            sort(layer, backwards=backwards)
        crossings = _crossings(layers, position)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    layers[:] = best


def _crossings(layers: Sequence[Sequence[Place]], position: dict[Place, int]) -> int:
    """Returns how many pairs of arrows cross between neighbouring layers."""
    crossings = 0
    for layer in layers:
        arrows = sorted(
            (position[place], position[other]) for place in layer for other in place.after
        )
        for index, (start, end) in enumerate(arrows):
            crossings += sum(
                1
                for other_start, other_end in arrows[:index]
                if other_start < start and other_end > end
            )
    return crossings


def _arrange(
    layers: list[list[Place]], routes: Sequence[tuple[JobEdge, list[Place]]]
) -> tuple[float, float]:
    """Sets x and y of every place. Returns the width and height of the picture."""
    top = MARGIN * 2 + LINE
    heights = [
        sum(place.height for place in layer) + ROW_GAP * (len(layer) - 1) for layer in layers
    ]
    tallest = max(heights)
    x: float = MARGIN
    for index, layer in enumerate(layers):
        y = top + (tallest - heights[index]) / 2
        column = max(place.width for place in layer)
        for place in layer:
            place.x = x + (column - place.width) / 2
            place.y = y
            if place.vertex is None:
                place.x, place.width = x, column
            y += place.height + ROW_GAP
        # The gap to the next layer must hold the widest label of an arrow that leaves this layer.
        labels = [
            len(edge_label(edge)) * CHARACTER for edge, route in routes if route[-2].layer == index
        ]
        x += column + COLUMN_GAP + max(labels, default=0.0)
    last = max(place.x + place.width for place in layers[-1])
    return last + MARGIN, top + tallest + MARGIN


# The drawing.


def _box(place: Place) -> str:
    vertex = place.vertex
    assert vertex is not None
    kind = (
        "source" if vertex.head.source is not None else "sink" if vertex.nodes[-1].sink else "task"
    )
    x, y, width, height = place.x, place.y, place.width, place.height
    lines = [
        f'<g class="{kind}"><title>{escape(vertex.name)}, parallelism {vertex.parallelism}</title>',
        f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        'rx="6"/>',
        f'<path class="head" d="M{x + 0.5:.1f} {y + HEADER:.1f}v-{HEADER - 6.5}q0 -6 6 '
        f'-6h{width - 13:.1f}q6 0 6 6v{HEADER - 6.5}z"/>',
        f'<text class="quiet" x="{x + PAD:.1f}" y="{y + 16:.1f}">{kind}</text>',
        f'<text class="quiet" x="{x + width - PAD:.1f}" y="{y + 16:.1f}" '
        f'text-anchor="end">×{vertex.parallelism}</text>',
    ]
    for row, name in enumerate(_names(vertex)):
        lines.append(
            f'<text x="{x + PAD:.1f}" y="{y + HEADER + LINE * row + 17:.1f}">{escape(name)}</text>'
        )
    lines.append("</g>")
    return "\n".join(lines)


def _path(route: Sequence[Place]) -> str:
    curves: list[str] = []
    for start, end in pairwise(route):
        x, y = start.x + start.width, _leaving(start, end)
        to_x, to_y = end.x - (6 if end.vertex is not None else 0), _arriving(start, end)
        bend = (to_x - x) / 2
        begin = f"{'L' if curves else 'M'}{x:.1f} {y:.1f}"
        curves.append(
            f"{begin}C{x + bend:.1f} {y:.1f} {to_x - bend:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
        )
    tip_x, tip_y = route[-1].x, _arriving(route[-2], route[-1])
    tip = f'<path class="tip" d="M{tip_x:.1f} {tip_y:.1f}l-9 -4.5v9z"/>'
    return f'<path class="edge" d="{"".join(curves)}"/>{tip}'


def _label(edge: JobEdge, route: Sequence[Place]) -> str:
    """Returns the SVG text with the label of an exchange, in the gap before the consumer."""
    start, end = route[-2], route[-1]
    x = (start.x + start.width + end.x) / 2
    y = (_leaving(start, end) + _arriving(start, end)) / 2 + 3.5
    return f'<text class="label" x="{x:.1f}" y="{y:.1f}">{escape(edge_label(edge))}</text>'


def _leaving(start: Place, end: Place) -> float:
    return _spread(
        start, sorted(start.after, key=lambda place: place.y).index(end), len(start.after)
    )


def _arriving(start: Place, end: Place) -> float:
    return _spread(end, sorted(end.before, key=lambda place: place.y).index(start), len(end.before))


def _spread(place: Place, index: int, count: int) -> float:
    """Returns the y coordinate at which arrow `index` of `count` meets the side of a place."""
    return place.y + place.height * (index + 1) / (count + 1)


def _attribute(text: str) -> str:
    return escape(text, {'"': "&quot;"})


# In notebooks.

ROWS_MAX = 5
CHARACTERS_MAX = 60
COLUMNS = {
    "numRecordsIn": "records in",
    "numRecordsOut": "records out",
    "busyTimeMsPerSecond": "busy",
    "backPressuredTimeMsPerSecond": "back-pressured",
    "slowCallbacks": "held the loop",
}
"""Maps the name of each metric in the table to the heading of its column."""


def show_flow(graph: StreamGraph) -> dict[str, str]:
    """Returns the SVG picture of a flow, or its error as HTML if the flow is not complete, by MIME
    type."""
    if not graph.nodes:
        return {}
    try:
        return {"image/svg+xml": svg(build_job_graph(graph))}
    except AioflowError as error:
        return {"text/html": f"<pre>{html.escape(message_of(error))}</pre>"}


def show_stream(title: str, graph: StreamGraph, upstreams: Sequence[Upstream]) -> str:
    """Returns HTML with the schema of a stream, and with its first rows if a source has them in
    memory."""
    nodes = [graph.nodes[upstream.node_id] for upstream in upstreams]
    head = f"<b>{html.escape(title)}</b>"
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
    """Returns an HTML table with the metrics of each task, summed over its subtasks."""
    lines = []
    for vertex in graph.vertices:
        numbers = [_sum(metrics, vertex.name, name) for name in COLUMNS]
        shown = [f"{number:,.0f}" for number in numbers]
        lines.append([vertex.name, str(vertex.parallelism), *shown])
    link = (
        ""
        if monitor_url is None
        else (f' <a href="{html.escape(monitor_url, quote=True)}">dashboard</a>')
    )
    heads = ["task", "parallelism", *COLUMNS.values()]
    return f"<b>{html.escape(title)}</b>{link}{_table(heads, lines)}"


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
    return html.escape(text if len(text) <= CHARACTERS_MAX else f"{text[:CHARACTERS_MAX]}…")
