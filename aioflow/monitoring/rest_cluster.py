"""Answers calls about the cluster and its processes, in Flink's format.

Values that only a JVM has are 0 or -1.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import aioflow
from aioflow.cluster.execution_graph import JobStatus
from aioflow.inspection.redaction import HIDDEN, is_secret_name, redacted
from aioflow.monitoring.calls import Answer, Call, NotFound, Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflow.monitoring.view import WorkerView

__all__ = [
    "config",
    "find_worker",
    "jobmanager_config",
    "jobmanager_environment",
    "no_logs",
    "nothing",
    "overview",
    "taskmanager",
    "taskmanagers",
]

FLINK_VERSION = "1.20"
"""Version of Flink whose REST format is used; aioflow's own version is shown beside it."""

COMMIT = "unknown"


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


def jobmanager_config(call: Call) -> Any:
    settings = call.monitor.watched.settings()
    return [
        {"key": key, "value": HIDDEN if is_secret_name(key) else redacted(value)}
        for key, value in settings.items()
    ]


def jobmanager_environment(call: Call) -> Any:
    """Answers GET /jobmanager/environment, with the Python runtime as `jvm`.

    Arguments of the process are not shown: they may hold secrets.
    """
    version = f"{platform.python_implementation()} {platform.python_version()}"
    return {
        "jvm": {"version": version, "arch": platform.machine(), "options": []},
        "classpath": "",
        "loop": call.monitor.loop_name,
    }


def taskmanagers(call: Call) -> Any:
    return {"taskmanagers": [_worker(call, worker) for worker in call.monitor.workers()]}


async def taskmanager(call: Call) -> Any:
    worker = find_worker(call)
    try:
        memory = await call.monitor.ask(worker.id, "memory")
    except Unavailable:
        memory = {"peak": 0, "collectors": []}
    return {
        **_worker(call, worker),
        "allocatedSlots": [
            {"jobId": job_id, "resource": _resource(1.0)} for job_id in worker.job_ids
        ],
        "metrics": _memory(memory, call.monitor.watched.worker_metrics(worker.id)),
    }


def find_worker(call: Call) -> WorkerView:
    """Returns the worker that the path names. Raises NotFound."""
    wanted = call.params["taskmanagerid"]
    for worker in call.monitor.workers():
        if worker.id == wanted:
            return worker
    raise NotFound(f"no taskmanager {wanted[:80]!r} is here; list them at /taskmanagers")


def _worker(call: Call, worker: WorkerView) -> dict[str, Any]:
    _, _, port = worker.location.rpartition(":")
    return {
        "id": worker.id,
        "path": f"aioflow://{worker.location or worker.id}",
        "dataPort": int(port) if port.isdecimal() else -1,
        "jmxPort": -1,
        "timeSinceLastHeartbeat": call.now_ms - worker.silence_ms,
        "slotsNumber": worker.slots,
        "freeSlots": worker.free_slots,
        "totalResource": _resource(float(worker.slots)),
        "freeResource": _resource(float(worker.free_slots)),
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
            "networkMemory": 0,
            "managedMemory": 0,
            "jvmMetaspace": 0,
            "jvmOverhead": 0,
            "totalFlinkMemory": 0,
            "totalProcessMemory": round(_told(call, worker).get("Status.Process.Memory.Peak", 0)),
        },
        "blocked": False,
    }


def _resource(cores: float) -> dict[str, Any]:
    return {
        "cpuCores": cores,
        "taskHeapMemory": 0,
        "taskOffHeapMemory": 0,
        "managedMemory": 0,
        "networkMemory": 0,
        "extendedResources": {},
    }


def _told(call: Call, worker: WorkerView) -> Mapping[str, float]:
    """Returns the metrics of a process itself. Those of another process are the last ones that it
    sent.
    """
    return (
        call.monitor.process.metrics()
        if worker.is_here
        else call.monitor.watched.worker_metrics(worker.id)
    )


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


def no_logs(call: Call) -> Any:
    """Answers calls for the list of log files with an empty list.

    Logs go where the program sends them; the last records are at /aioflow/logs.
    """
    if "taskmanagerid" in call.params:
        find_worker(call)
    return {"logs": []}


def nothing(call: Call) -> Any:
    """Answers calls for files that a process does not keep with an empty text."""
    find_worker(call)
    return Answer("", content_type="text/plain")
