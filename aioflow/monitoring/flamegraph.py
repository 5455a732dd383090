"""Makes flame graphs, in Flink's format, that show how event loops and tasks spend their time.

A graph covers one process, or the tasks of a vertex in all processes.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from aioflow.monitoring.calls import BadRequest, Call, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioflow.inspection.flames import Stack

__all__ = ["loop_graph", "tree", "vertex_graph"]

SECONDS, SECONDS_MAX = 1.0, 10.0


async def loop_graph(call: Call) -> Any:
    """Answers GET /aioflow/flamegraph: everything that the loop of a process runs, by task."""
    stacks: Counter[Stack] = Counter()
    for task, stack, count in await call.monitor.ask(call.process, "flames", _seconds(call)):
        stacks[(task or "the loop itself", *stack)] += count
    return {"endTimestamp": call.now_ms, "data": tree(stacks, "root")}


async def vertex_graph(call: Call) -> Any:
    """Answers GET .../vertices/:vertexid/flamegraph?type=full|on_cpu|off_cpu.

    `off_cpu` shows where waiting tasks wait.
    """
    kind = call.query.get("type", "full").lower()
    if kind not in ("full", "on_cpu", "off_cpu"):
        raise BadRequest(f"type is {kind[:40]!r}, expected full, on_cpu or off_cpu")
    view, vertex, wanted = call.job, call.vertex, call.query.get("subtaskindex")
    if wanted is not None and not (
        wanted.isascii()
        and wanted.isdecimal()
        and len(wanted) < 9
        and int(wanted) < vertex.parallelism
    ):
        raise NotFound(f"vertex {vertex.name!r} has no subtask {wanted[:20]!r}")
    seconds = _seconds(call)
    subtasks = [one for one in view.subtasks(vertex) if wanted is None or one.index == int(wanted)]
    names = {f"{vertex.name}-{one.index + 1}" for one in subtasks}
    processes = {one.worker_id for one in subtasks if not one.state.is_terminal}
    stacks: Counter[Stack] = Counter()
    if kind != "off_cpu":
        for samples in await call.monitor.ask_all(processes, "flames", seconds):
            _add(stacks, ((stack, count) for task, stack, count in samples if task in names))
    if kind != "on_cpu":
        for waiting in await call.monitor.ask_all(processes, "waiting", sorted(names)):
            _add(stacks, ((stack, 1) for stack in waiting))
    return {"endTimestamp": call.now_ms, "data": tree(stacks, "root")}


def _add(stacks: Counter[Stack], found: Iterable[tuple[Iterable[str], int]]) -> None:
    for stack, count in found:
        stacks[tuple(stack)] += count


def _seconds(call: Call) -> float:
    text = call.query.get("seconds", str(SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= SECONDS_MAX:
        raise BadRequest(f"seconds is {text[:40]!r}, expected a number up to {SECONDS_MAX:g}")
    return seconds


def tree(stacks: Counter[Stack], name: str) -> dict[str, Any]:
    """Returns the stacks as a tree in Flink's format: {name, value, children}, widest child
    first.
    """
    root: dict[str, Any] = {"name": name, "value": sum(stacks.values()), "children": []}
    below: dict[int, dict[str, dict[str, Any]]] = {}
    for stack, count in stacks.items():
        node = root
        for place in stack:
            children = below.setdefault(id(node), {})
            child = children.get(place)
            if child is None:
                child = children[place] = {"name": place, "value": 0, "children": []}
                node["children"].append(child)
            child["value"] += count
            node = child
    _sort(root)
    return root


def _sort(node: dict[str, Any]) -> None:
    node["children"].sort(key=lambda child: (-child["value"], child["name"]))
    for child in node["children"]:
        _sort(child)
