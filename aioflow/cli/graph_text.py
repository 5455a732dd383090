"""Shows the tasks of a flow as text, and as a Mermaid flowchart."""

from __future__ import annotations

from aioflow.api.explain import explain_graph
from aioflow.graph.job_graph import JobEdge, JobGraph

__all__ = ["edge_label", "mermaid", "text"]


def text(graph: JobGraph) -> str:
    """Returns a text that lists each task, its operators and inputs, and why they run as they
    do.
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
