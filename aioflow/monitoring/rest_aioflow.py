"""What only an asyncio engine has to show: under /aioflow, apart from Flink's paths."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aioflow.monitoring.await_stacks import tasks_by_name, thread_infos
from aioflow.monitoring.calls import BadRequest, Call
from aioflow.monitoring.rest_cluster import find_worker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["asyncio_view", "series", "thread_dump", "worker_thread_dump"]

SLOW_SHOWN = 50
SERIES_SHOWN = 200


def asyncio_view(call: Call) -> Any:
    """GET /aioflow/asyncio. Lag and tasks are of this process; slow callbacks and calls in flight of all."""
    monitor = call.monitor
    slow: list[dict[str, Any]] = []
    in_flight: list[dict[str, Any]] = []
    for place, metrics in _operators(call):
        if metrics.get("slowCallbacks"):
            slow.append({**place, "count": metrics["slowCallbacks"], "slowest-ms": metrics.get("slowestCallbackMs", 0)})
        if "asyncCallsInFlight" in metrics:
            in_flight.append({**place, "in-flight": metrics["asyncCallsInFlight"], "capacity": metrics.get("asyncCallsMax", 0)})
    slow.sort(key=lambda one: (-one["slowest-ms"], -one["count"]))
    tasks = list(asyncio.all_tasks())
    return {
        "now": call.now_ms,
        "loop": monitor.loop_name,
        "debug": asyncio.get_running_loop().get_debug(),
        "lag-ms": monitor.sampler.lag.milliseconds(),
        "slow-callbacks": slow[:SLOW_SHOWN],
        "async-calls": in_flight,
        "task-count": len(tasks),
        "tasks": tasks_by_name(tasks),
    }


def _operators(call: Call) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Each operator of each subtask: where it is, and its own metrics."""
    for view in call.monitor.jobs():
        index = call.monitor.metrics(view)
        for (vertex_id, subtask), metrics in index.all().items():
            found: dict[str, dict[str, float]] = {}
            for name, value in metrics.items():
                operator, metric = index.operator_of(vertex_id, name)
                if operator:
                    found.setdefault(operator, {})[metric] = value
            name = view.graph.vertex(vertex_id).name
            task = {"job-id": view.id, "vertex-id": view.vertex_ids[vertex_id], "task": name, "subtask": subtask}
            for operator, values in found.items():
                yield {**task, "operator": operator}, values


def thread_dump(call: Call) -> Any:
    """GET /jobmanager/thread-dump."""
    return {"threadInfos": thread_infos()}


def worker_thread_dump(call: Call) -> Any:
    """GET /taskmanagers/:taskmanagerid/thread-dump: of this process; of another one nothing is known here."""
    return {"threadInfos": thread_infos() if find_worker(call).is_here else []}


def series(call: Call) -> Any:
    """GET /aioflow/jobs/:jobid/series?metric=&since=: the last ten minutes. Without `metric` the names that there are.

    A part of a name may be `*`: `*.*.busyTimeMsPerSecond` is that of every subtask of every vertex.
    """
    view = call.job
    buffer = call.monitor.sampler.series(view)
    wanted = call.wanted("metric")
    if wanted is None:
        return {"now": call.now_ms, "interval": 1000, "metrics": buffer.names}
    since = call.query.get("since", "0")
    if not (since.isascii() and since.isdecimal()) or len(since) > 18:
        raise BadRequest(f"since is {since[:40]!r}, expected a time in ms")
    names = [name for pattern in wanted for name in ([pattern] if "*" not in pattern else _matching(pattern, buffer.names))]
    times, values = buffer.read(names[:SERIES_SHOWN], int(since))
    return {"now": call.now_ms, "interval": 1000, "times": times, "series": values}


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    wanted = pattern.split(".", 2)
    split = [(name, name.split(".", 2)) for name in names]
    return [
        name
        for name, parts in split
        if len(parts) == len(wanted) and all(want in ("*", part) for want, part in zip(wanted, parts, strict=True))
    ]
