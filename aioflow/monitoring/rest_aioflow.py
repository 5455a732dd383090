"""Answers calls under /aioflow, which Flink does not have, such as those about the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioflow.monitoring.calls import BadRequest, Call
from aioflow.monitoring.rest_cluster import find_worker

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["asyncio_view", "processes", "series", "thread_dump", "worker_thread_dump"]

SLOW_SHOWN = 50
SERIES_SHOWN = 200


async def asyncio_view(call: Call) -> Any:
    """Answers GET /aioflow/asyncio?taskmanager= about the event loop of a process.

    If no process is named, the answer shows the lag and the tasks of the answering process, and the
    slow callbacks and the unfinished calls of all processes.
    """
    loop = await call.monitor.ask(call.process, "loop")
    slow: list[dict[str, Any]] = []
    in_flight: list[dict[str, Any]] = []
    for place, metrics in _operators(call):
        if metrics.get("slowCallbacks"):
            slow.append(
                {
                    **place,
                    "count": metrics["slowCallbacks"],
                    "slowest-ms": metrics.get("slowestCallbackMs", 0),
                }
            )
        if "asyncCallsInFlight" in metrics:
            in_flight.append(
                {
                    **place,
                    "in-flight": metrics["asyncCallsInFlight"],
                    "capacity": metrics.get("asyncCallsMax", 0),
                }
            )
    slow.sort(key=lambda one: (-one["slowest-ms"], -one["count"]))
    return {
        "now": call.now_ms,
        **loop,
        "slow-callbacks": slow[:SLOW_SHOWN],
        "async-calls": in_flight,
    }


def _operators(call: Call) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Yields each operator of each subtask: the fields that identify it, and its metrics."""
    for view in call.monitor.jobs():
        index = call.monitor.metrics(view)
        places = {
            (vertex.id, one.index): one.worker_id
            for vertex in view.graph.vertices
            for one in view.subtasks(vertex)
        }
        for (vertex_id, subtask), metrics in index.all().items():
            if call.process is not None and places[vertex_id, subtask] != call.process:
                continue
            found: dict[str, dict[str, float]] = {}
            for name, value in metrics.items():
                operator, metric = index.operator_of(vertex_id, name)
                if operator:
                    found.setdefault(operator, {})[metric] = value
            name = view.graph.vertex(vertex_id).name
            task = {
                "job-id": view.id,
                "vertex-id": view.vertex_ids[vertex_id],
                "task": name,
                "subtask": subtask,
            }
            task["taskmanager-id"] = places[vertex_id, subtask]
            for operator, values in found.items():
                yield {**task, "operator": operator}, values


def processes(call: Call) -> Any:
    """Answers GET /aioflow/processes: a summary of this process, then of the others.

    Null is a value that a process has not reported yet.
    """
    monitor = call.monitor
    workers = monitor.workers()
    tasks = [
        one.worker_id
        for view in monitor.jobs()
        for vertex in view.graph.vertices
        for one in view.subtasks(vertex)
        if one.is_alive
    ]
    found = (
        []
        if any(worker.is_here for worker in workers)
        else [_process("", 0, 0, monitor.process.metrics(), is_here=True)]
    )
    for worker in workers:
        told = (
            monitor.process.metrics()
            if worker.is_here
            else monitor.watched.worker_metrics(worker.id)
        )
        found.append(
            _process(
                worker.id, tasks.count(worker.id), worker.silence_ms, told, is_here=worker.is_here
            )
        )
    return {"processes": found}


def _process(
    worker_id: str, tasks: int, silence_ms: int, told: Mapping[str, float], *, is_here: bool
) -> dict[str, Any]:
    return {
        "id": worker_id,
        "is-here": is_here,
        "tasks": tasks,
        "silence-ms": silence_ms,
        "lag-ms": told.get("Status.Loop.lagMs"),
        "lag-max-ms": told.get("Status.Loop.lagMsMax"),
        "cpu-s": told.get("Status.Process.CPU.Time"),
        "memory": told.get("Status.Process.Memory.Peak"),
    }


async def thread_dump(call: Call) -> Any:
    """Answers GET /jobmanager/thread-dump with the stacks of the threads of this process."""
    return {"threadInfos": await call.monitor.ask(None, "threads")}


async def worker_thread_dump(call: Call) -> Any:
    """Answers GET /taskmanagers/:taskmanagerid/thread-dump with the stacks of the threads of that
    process.
    """
    return {"threadInfos": await call.monitor.ask(find_worker(call).id, "threads")}


def series(call: Call) -> Any:
    """Answers GET /aioflow/jobs/:jobid/series?metric=&since= with the last ten minutes of metrics.

    Without `metric` it lists the existing names. A part of a name may be `*`:
    `*.*.busyTimeMsPerSecond` is that of every subtask of every vertex.
    """
    view = call.job
    buffer = call.monitor.sampler.series(view)
    wanted = call.wanted("metric")
    if wanted is None:
        return {"now": call.now_ms, "interval": 1000, "metrics": buffer.names}
    since = call.query.get("since", "0")
    if not (since.isascii() and since.isdecimal()) or len(since) > 18:
        raise BadRequest(f"since is {since[:40]!r}, expected a time in ms")
    names = [
        name
        for pattern in wanted
        for name in ([pattern] if "*" not in pattern else _matching(pattern, buffer.names))
    ]
    times, values = buffer.read(names[:SERIES_SHOWN], int(since))
    return {"now": call.now_ms, "interval": 1000, "times": times, "series": values}


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    wanted = pattern.split(".", 2)
    split = [(name, name.split(".", 2)) for name in names]
    return [
        name
        for name, parts in split
        if len(parts) == len(wanted)
        and all(want in ("*", part) for want, part in zip(wanted, parts, strict=True))
    ]
