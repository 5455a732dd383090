"""Answers calls about vertices and their subtasks, in Flink's format: states, times, back pressure,
watermarks and processes.

Flame graphs show how event loops and tasks spend their time. A graph covers one process, or the
tasks of a vertex in all processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.graph.deployment import ExecutionState
from aioflow.monitoring.answers import VERTEX, BadRequest, NotFound, get
from aioflow.monitoring.monitor import Call
from aioflow.monitoring.rest_jobs import SHOWN_STATES, io_metrics, state_counts, vertex_status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioflow.inspection.process import Stack
    from aioflow.monitoring.view import SubtaskView

__all__ = [
    "attempt",
    "backpressure",
    "loop_graph",
    "subtask",
    "subtask_times",
    "tree",
    "vertex",
    "vertex_graph",
    "vertex_taskmanagers",
    "watermarks",
]

LOW_SHARE, HIGH_SHARE = 0.1, 0.5
"""Limits for the share of time under back pressure. The level is "ok" up to the first limit, "high"
above the second, and "low" between them.
"""


@get(VERTEX, "Vertex", "A vertex with its subtasks")
def vertex(call: Call) -> Any:
    view, one, now = call.job, call.vertex, call.now_ms
    metrics = call.monitor.metrics(view).of_vertex(one)
    subtasks = [_subtask_body(each, [metrics[each.index]], now) for each in view.subtasks(one)]
    return {
        "id": view.vertex_ids[one.id],
        "name": one.name,
        "parallelism": one.parallelism,
        "maxParallelism": one.max_parallelism,
        "now": now,
        "subtasks": subtasks,
        "aggregated": _aggregated(subtasks),
    }


def _subtask_body(
    one: SubtaskView, metrics: Sequence[Mapping[str, float]], now: int
) -> dict[str, Any]:
    """Returns one subtask in Flink's format.

    `start_time` repeats `start-time`, as Flink does for old clients.
    """
    return {
        "subtask": one.index,
        "status": one.state.value,
        "attempt": one.attempt,
        "host": one.host,
        "endpoint": one.host,
        "start-time": one.start_ms,
        "end-time": one.end_ms,
        "duration": one.duration_ms(now),
        "metrics": io_metrics(metrics),
        "taskmanager-id": one.worker_id,
        "status-duration": one.status_durations(now),
        "other-concurrent-attempts": [],
        "start_time": one.start_ms,
    }


def _aggregated(subtasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def spread(part: str, name: str) -> dict[str, Any]:
        values = [
            one[part][name]
            for one in subtasks
            if isinstance(one[part][name], (int, float)) and one[part][name] >= 0
        ]
        if not values:
            return {
                "min": -1,
                "max": -1,
                "avg": -1,
                "sum": -1,
                "median": -1,
                "p25": -1,
                "p75": -1,
                "p95": -1,
            }
        ordered = sorted(values)
        ranks = {"median": 0.5, "p25": 0.25, "p75": 0.75, "p95": 0.95}
        return {
            "min": ordered[0],
            "max": ordered[-1],
            "avg": sum(ordered) / len(ordered),
            "sum": sum(ordered),
            **{
                label: ordered[min(int(len(ordered) * share), len(ordered) - 1)]
                for label, share in ranks.items()
            },
        }

    numbers = [name for name in io_metrics([]) if not name.endswith("-complete")]
    states = [state.value for state in ExecutionState if not state.is_terminal]
    return {
        "metrics": {name: spread("metrics", name) for name in numbers},
        "status-duration": {state: spread("status-duration", state) for state in states},
    }


@get(f"{VERTEX}/backpressure", "BackPressure", "How much of its time each subtask is held back")
def backpressure(call: Call) -> Any:
    view, one = call.job, call.vertex
    metrics = call.monitor.metrics(view).of_vertex(one)
    if not any("backPressuredTimeMsPerSecond" in each for each in metrics):
        return {
            "status": "deprecated",
            "backpressureLevel": None,
            "backpressure-level": None,
            "end-timestamp": None,
            "subtasks": [],
        }
    subtasks: list[dict[str, Any]] = []
    for each in view.subtasks(one):
        ratio = _share(metrics[each.index], "backPressuredTimeMsPerSecond")
        subtasks.append(
            {
                "subtask": each.index,
                "attempt-number": each.attempt,
                "backpressureLevel": _level(ratio),
                "backpressure-level": _level(ratio),
                "ratio": ratio,
                "idleRatio": _share(metrics[each.index], "idleTimeMsPerSecond"),
                "busyRatio": _share(metrics[each.index], "busyTimeMsPerSecond"),
                "other-concurrent-attempts": [],
            }
        )
    worst = max(body["ratio"] for body in subtasks)
    return {
        "status": "ok",
        "backpressureLevel": _level(worst),
        "backpressure-level": _level(worst),
        "end-timestamp": call.now_ms,
        "subtasks": subtasks,
    }


def _share(metrics: Mapping[str, float], name: str) -> float:
    return round(min(max(metrics.get(name, 0.0) / 1000.0, 0.0), 1.0), 4)


def _level(ratio: float) -> str:
    return "ok" if ratio <= LOW_SHARE else ("low" if ratio <= HIGH_SHARE else "high")


@get(f"{VERTEX}/watermarks", "Metrics", "The input watermark of each subtask")
def watermarks(call: Call) -> Any:
    view, one = call.job, call.vertex
    metrics = call.monitor.metrics(view).of_vertex(one)
    return [
        {"id": f"{index}.currentInputWatermark", "value": str(round(each["currentInputWatermark"]))}
        for index, each in enumerate(metrics)
        if "currentInputWatermark" in each
    ]


@get(f"{VERTEX}/subtasktimes", "SubtaskTimes", "When each subtask reached each state")
def subtask_times(call: Call) -> Any:
    view, one, now = call.job, call.vertex, call.now_ms
    return {
        "id": view.vertex_ids[one.id],
        "name": one.name,
        "now": now,
        "subtasks": [
            {
                "subtask": each.index,
                "host": each.host,
                "endpoint": each.host,
                "duration": each.duration_ms(now),
                "timestamps": {state.value: each.times_ms.get(state, 0) for state in SHOWN_STATES},
            }
            for each in view.subtasks(one)
        ],
    }


@get(f"{VERTEX}/taskmanagers", "VertexTaskManagers", "A vertex by process")
def vertex_taskmanagers(call: Call) -> Any:
    view, one, now = call.job, call.vertex, call.now_ms
    metrics = call.monitor.metrics(view).of_vertex(one)
    places: dict[tuple[str, str], list[SubtaskView]] = {}
    for each in view.subtasks(one):
        places.setdefault((each.worker_id, each.host), []).append(each)
    found = []
    for (worker_id, host), subtasks in places.items():
        bodies = [_subtask_body(each, [metrics[each.index]], now) for each in subtasks]
        start = min((each.start_ms for each in subtasks if each.start_ms >= 0), default=-1)
        end = (
            max(each.end_ms for each in subtasks)
            if all(each.end_ms >= 0 for each in subtasks)
            else -1
        )
        found.append(
            {
                "host": host,
                "endpoint": host,
                "status": vertex_status(subtasks),
                "start-time": start,
                "end-time": end,
                "duration": -1 if start < 0 else max((now if end < 0 else end) - start, 0),
                "metrics": io_metrics([metrics[each.index] for each in subtasks]),
                "status-counts": state_counts(subtasks),
                "taskmanager-id": worker_id,
                "aggregated": _aggregated(bodies),
            }
        )
    return {"id": view.vertex_ids[one.id], "name": one.name, "now": now, "taskmanagers": found}


@get(f"{VERTEX}/subtasks/{{subtaskindex}}", "Subtask", "The current attempt of a subtask")
def subtask(call: Call) -> Any:
    view, one, index = call.job, call.vertex, call.subtask
    metrics = call.monitor.metrics(view).of_subtask(one.id, index)
    return _subtask_body(view.subtasks(one)[index], [metrics], call.now_ms)


@get(
    f"{VERTEX}/subtasks/{{subtaskindex}}/attempts/{{attempt}}",
    "Subtask",
    "One attempt of a subtask",
)
def attempt(call: Call) -> Any:
    view, one, index, number = call.job, call.vertex, call.subtask, call.number("attempt")
    for each in view.attempts(one, index):
        if each.attempt == number:
            metrics = call.monitor.metrics(view).of_subtask(one.id, index)
            return _subtask_body(each, [metrics], call.now_ms)
    raise NotFound(
        f"subtask {index} of vertex {one.name!r} has no attempt {number} that is remembered"
    )


SECONDS, SECONDS_MAX = 1.0, 10.0


@get(
    "/aioflow/flamegraph",
    "FlameGraph",
    "What the loop spends its time on",
    "seconds",
    "taskmanager",
)
async def loop_graph(call: Call) -> Any:
    """Answers GET /aioflow/flamegraph with a graph of everything that the event loop of a process
    runs, by task.
    """
    stacks: Counter[Stack] = Counter()
    for task, stack, count in await call.monitor.ask(call.process, "flames", _seconds(call)):
        stacks[(task or "the loop itself", *stack)] += count
    return {"endTimestamp": call.now_ms, "data": tree(stacks, "root")}


@get(f"{VERTEX}/flamegraph", "FlameGraph", "Where its tasks are", "type", "subtaskindex", "seconds")
async def vertex_graph(call: Call) -> Any:
    """Answers GET .../vertices/:vertexid/flamegraph?type=full|on_cpu|off_cpu.

    `off_cpu` shows the stacks of tasks that wait.
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
    """Returns the stacks as a tree in Flink's format. Each node has `name`, `value` and `children`,
    the child with the largest value first. `name` is the name of the root.
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
