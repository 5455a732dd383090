"""Answers calls about the cluster and its processes, in Flink's format.

Values that only a JVM has are 0 or -1.

The module also answers the calls under /aioflow, which Flink does not have, such as calls about the
event loop.
"""

from __future__ import annotations

import logging
import platform
from typing import TYPE_CHECKING, Any

import aioflow
from aioflow.cluster.execution_graph import JobStatus
from aioflow.inspection.process import RECORDS_MAX
from aioflow.inspection.redaction import HIDDEN, is_secret_name, redacted
from aioflow.monitoring.answers import Answer, BadRequest, NotFound, Unavailable, get
from aioflow.monitoring.monitor import Call

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from aioflow.monitoring.view import WorkerView

__all__ = [
    "asyncio_view",
    "config",
    "find_worker",
    "jobmanager_config",
    "jobmanager_environment",
    "no_logs",
    "nothing",
    "overview",
    "processes",
    "series",
    "tail",
    "taskmanager",
    "taskmanagers",
    "thread_dump",
    "worker_log",
    "worker_thread_dump",
]

FLINK_VERSION = "1.20"
"""Version of Flink whose REST format is used. The answer also has aioflow's own version."""

COMMIT = "unknown"


@get("/overview", "Overview", "The cluster at a glance")
def overview(call: Call) -> Any:
    statuses = [job.status for job in call.monitor.jobs()]
    workers = call.monitor.workers()
    running = sum(not status.is_terminal for status in statuses)
    return {
        "taskmanagers": len(workers),
        "slots-total": sum(worker.slots for worker in workers),
        "slots-available": sum(worker.free_slots for worker in workers),
        "taskmanagers-blocked": 0,
        "slots-free-and-blocked": 0,
        "jobs-running": running,
        "jobs-finished": statuses.count(JobStatus.FINISHED),
        "jobs-cancelled": statuses.count(JobStatus.CANCELED),
        "jobs-failed": statuses.count(JobStatus.FAILED),
        "flink-version": FLINK_VERSION,
        "flink-commit": COMMIT,
        "aioflow-version": aioflow.__version__,
    }


@get("/config", "DashboardConfig", "What a dashboard needs to know")
def config(call: Call) -> Any:
    return {
        "refresh-interval": 3000,
        "timezone-name": "UTC",
        "timezone-offset": 0,
        "flink-version": FLINK_VERSION,
        "flink-revision": f"aioflow {aioflow.__version__}",
        "features": {
            "web-submit": False,
            "web-cancel": call.monitor.options.enable_control,
            "web-history": False,
            "web-rescale": False,
        },
    }


@get("/jobmanager/config", "Settings", "Settings, without secrets")
def jobmanager_config(call: Call) -> Any:
    settings = call.monitor.watched.settings()
    return [
        {"key": key, "value": HIDDEN if is_secret_name(key) else redacted(value)}
        for key, value in settings.items()
    ]


@get("/jobmanager/environment", "Environment", "What runs this process")
def jobmanager_environment(call: Call) -> Any:
    """Answers GET /jobmanager/environment, with the Python runtime as `jvm`.

    Arguments of the process are not shown, because they may contain secrets.
    """
    version = f"{platform.python_implementation()} {platform.python_version()}"
    return {
        "jvm": {"version": version, "arch": platform.machine(), "options": []},
        "classpath": "",
        "loop": call.monitor.loop_name,
    }


@get("/taskmanagers", "TaskManagers", "The processes that run tasks")
def taskmanagers(call: Call) -> Any:
    return {"taskmanagers": [_worker(call, worker) for worker in call.monitor.workers()]}


@get("/taskmanagers/{taskmanagerid}", "TaskManagerDetails", "One process")
async def taskmanager(call: Call) -> Any:
    worker = find_worker(call)
    try:
        memory = await call.monitor.ask(worker.id, "memory")
    except Unavailable:
        memory = {"peak": 0, "collectors": []}
    return {
        **_worker(call, worker),
        "allocatedSlots": [
            {"jobId": job_id, "resource": _resource(1.0, _share(call, worker, job_id))}
            for job_id in worker.job_ids
        ],
        "metrics": _memory(memory, call.monitor.watched.worker_metrics(worker.id)),
    }


NETWORK_USED = "Status.Shuffle.Netty.UsedMemory"
NETWORK_TOTAL = "Status.Shuffle.Netty.TotalMemory"
"""Names of the metrics of a process for the memory that buffers data between tasks, in bytes."""


def find_worker(call: Call) -> WorkerView:
    """Returns the worker that the path names. Raises NotFound if there is no such worker."""
    wanted = call.params["taskmanagerid"]
    for worker in call.monitor.workers():
        if worker.id == wanted:
            return worker
    raise NotFound(f"no taskmanager {wanted[:80]!r} is here; list them at /taskmanagers")


def _share(call: Call, worker: WorkerView, job_id: str) -> float:
    """Returns the network memory of one slot of a job, in bytes."""
    told = call.monitor.watched.worker_metrics(worker.id, job_id)
    return told.get(NETWORK_TOTAL, 0) / worker.job_ids.count(job_id)


def _worker(call: Call, worker: WorkerView) -> dict[str, Any]:
    told = _told(call, worker)
    total = told.get(NETWORK_TOTAL, 0)
    _, _, port = worker.location.rpartition(":")
    return {
        "id": worker.id,
        "path": f"aioflow://{worker.location or worker.id}",
        "dataPort": int(port) if port.isdecimal() else -1,
        "jmxPort": -1,
        "timeSinceLastHeartbeat": call.now_ms - worker.silence_ms,
        "slotsNumber": worker.slots,
        "freeSlots": worker.free_slots,
        "totalResource": _resource(float(worker.slots), total),
        "freeResource": _resource(
            float(worker.free_slots), max(0, total - told.get(NETWORK_USED, 0))
        ),
        "hardware": {
            "cpuCores": call.monitor.cpu_count,
            "physicalMemory": 0,
            "freeMemory": 0,
            "managedMemory": 0,
        },
        "memoryConfiguration": {
            "frameworkHeap": 0,
            "taskHeap": 0,
            "frameworkOffHeap": 0,
            "taskOffHeap": 0,
            "networkMemory": round(total),
            "managedMemory": 0,
            "jvmMetaspace": 0,
            "jvmOverhead": 0,
            "totalFlinkMemory": 0,
            "totalProcessMemory": round(told.get("Status.Process.Memory.Peak", 0)),
        },
        "blocked": False,
    }


def _resource(cores: float, network_bytes: float) -> dict[str, Any]:
    """Returns a resource profile. Its memory is in MiB, as in Flink; other answers have bytes."""
    return {
        "cpuCores": cores,
        "taskHeapMemory": 0,
        "taskOffHeapMemory": 0,
        "managedMemory": 0,
        "networkMemory": round(network_bytes / (1 << 20), 3),
        "extendedResources": {},
    }


def _told(call: Call, worker: WorkerView) -> Mapping[str, float]:
    """Returns the metrics of a worker's process, without metrics of its tasks. If it is another
    process, returns the last metrics that it sent.
    """
    told = call.monitor.watched.worker_metrics(worker.id)
    return {**told, **call.monitor.process.metrics()} if worker.is_here else told


def _memory(memory: Mapping[str, Any], told: Mapping[str, float]) -> dict[str, Any]:
    names = ("heap", "nonHeap", "direct", "mapped")
    body: dict[str, Any] = {}
    for name in names[:2]:
        used = memory["peak"] if name == "heap" else 0
        body |= {f"{name}Used": used, f"{name}Committed": used, f"{name}Max": -1}
    for name in names[2:]:
        body |= {f"{name}Count": 0, f"{name}Used": 0, f"{name}Max": 0}
    for kind in ("Segments", ""):
        for state in ("Available", "Used", "Total"):
            body[f"nettyShuffleMemory{kind}{state}"] = round(
                told.get(f"Status.Shuffle.Netty.{state}Memory{kind}", 0)
            )
    return {**body, "garbageCollectors": [{**one, "time": -1} for one in memory["collectors"]]}


@get("/taskmanagers/{taskmanagerid}/logs", "Logs", "Log files; there are none")
@get("/jobmanager/logs", "Logs", "Log files; there are none")
def no_logs(call: Call) -> Any:
    """Answers calls for the list of log files with an empty list.

    The program decides where its logs go. The last log records are at /aioflow/logs.
    """
    if "taskmanagerid" in call.params:
        find_worker(call)
    return {"logs": []}


@get("/taskmanagers/{taskmanagerid}/stdout", "Text", "Its output; it is kept elsewhere")
def nothing(call: Call) -> Any:
    """Answers with an empty text. This is for calls that ask for files which a process does not
    have.
    """
    find_worker(call)
    return Answer("", content_type="text/plain")


SLOW_SHOWN = 50
SERIES_SHOWN = 200


@get(
    "/aioflow/asyncio",
    "Asyncio",
    "The event loop: lag, slow callbacks, tasks, calls",
    "taskmanager",
)
async def asyncio_view(call: Call) -> Any:
    """Answers GET /aioflow/asyncio?taskmanager= about the event loop of a process.

    Lag, tasks and the last callbacks that blocked the loop are those of the named process, by
    default of the answering process. Slow callbacks and unfinished calls come from the tasks of all
    processes.
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
    """Yields for each operator of each subtask the fields that identify it, and its metrics."""
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


@get("/aioflow/processes", "Processes", "This process and those that run tasks, in short")
def processes(call: Call) -> Any:
    """Answers GET /aioflow/processes with a summary of each process, this process first.

    A value is null until the process has reported it.
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
        found.append(
            _process(
                worker.id,
                tasks.count(worker.id),
                worker.silence_ms,
                _told(call, worker),
                is_here=worker.is_here,
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
        "network-used": told.get(NETWORK_USED),
        "network-total": told.get(NETWORK_TOTAL),
    }


@get("/jobmanager/thread-dump", "ThreadDump", "Tasks and threads of this process")
async def thread_dump(call: Call) -> Any:
    """Answers GET /jobmanager/thread-dump with the stacks of the threads of this process."""
    return {"threadInfos": await call.monitor.ask(None, "threads")}


@get("/taskmanagers/{taskmanagerid}/thread-dump", "ThreadDump", "Tasks and threads")
async def worker_thread_dump(call: Call) -> Any:
    """Answers GET /taskmanagers/:taskmanagerid/thread-dump with the stacks of the threads of that
    process.
    """
    return {"threadInfos": await call.monitor.ask(find_worker(call).id, "threads")}


@get("/aioflow/jobs/{jobid}/series", "Series", "The last ten minutes of metrics", "metric", "since")
def series(call: Call) -> Any:
    """Answers GET /aioflow/jobs/:jobid/series?metric=&since= with the last ten minutes of metrics.

    Without `metric` the answer lists the existing names. A part of a name may be `*`. For example,
    `*.*.busyTimeMsPerSecond` selects every subtask of every vertex.
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


SHOWN = 200


@get(
    "/aioflow/logs", "LogRecords", "The last log records", "after", "level", "limit", "taskmanager"
)
async def tail(call: Call) -> Any:
    """Answers GET /aioflow/logs?after=&level=&limit= with the last log records."""
    numbers = {}
    for name, otherwise in (("after", 0), ("limit", SHOWN)):
        text = call.query.get(name, str(otherwise))
        if not (text.isascii() and text.isdecimal()) or len(text) > 12:
            raise BadRequest(f"{name} is {text[:40]!r}, expected a number")
        numbers[name] = int(text)
    level = logging.getLevelNamesMapping().get(call.query.get("level", "DEBUG").upper())
    if level is None:
        raise BadRequest(f"level is {call.query['level'][:40]!r}, expected one like WARNING")
    records = await call.monitor.ask(
        call.process, "logs", numbers["after"], level, min(numbers["limit"], RECORDS_MAX)
    )
    return {"records": records}


@get("/taskmanagers/{taskmanagerid}/log", "Text", "Its last log records")
async def worker_log(call: Call) -> Any:
    """Answers GET /taskmanagers/:taskmanagerid/log with the records kept in memory, as text."""
    records = await call.monitor.ask(find_worker(call).id, "logs", 0, logging.NOTSET, RECORDS_MAX)
    lines = [
        f"{one['time']} {one['level']} {one['logger']}: {one['message']}\n{one['stack']}"
        for one in records
    ]
    return Answer("".join(lines), content_type="text/plain")
