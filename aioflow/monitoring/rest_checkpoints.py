"""Answers calls about checkpoints, and calls that start a savepoint, a checkpoint or a stop.

POST returns a request id. GET with this id returns the status of the operation. The fields of the
answers about checkpoints are in snake case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from aioflow.checkpoint.statistics import CheckpointRecord, CheckpointStatus, Distribution
from aioflow.cluster.execution_graph import JobStatus
from aioflow.core.errors import CheckpointError, GraphError
from aioflow.graph.job_graph import rescaled
from aioflow.inspection.redaction import redacted
from aioflow.monitoring.answers import (
    Answer,
    BadRequest,
    Conflict,
    NotFound,
    Unavailable,
    get,
    route,
    start,
)
from aioflow.monitoring.monitor import Call, check_request_id
from aioflow.monitoring.rest_jobs import failure_cause

if TYPE_CHECKING:
    from aioflow.checkpoint.statistics import RestoredRecord, SubtaskRecord, VertexRecord
    from aioflow.monitoring.view import JobView

__all__ = [
    "checkpoint",
    "checkpoint_status",
    "checkpoints",
    "client_heartbeat",
    "config",
    "details",
    "end_cluster",
    "record_body",
    "requirements",
    "rescaling",
    "rescaling_status",
    "savepoint",
    "savepoint_disposal",
    "savepoint_status",
    "set_requirements",
    "stop",
    "subtask_details",
]

LONG_MAX = 2**63 - 1
"""Number by which Flink's REST format expresses an infinite interval, or that there is no limit."""


@get("/jobs/{jobid}/checkpoints", "Checkpoints", "Checkpoints, newest first")
def checkpoints(call: Call) -> Any:
    view = call.job
    statistics = view.checkpoints
    if statistics is None:
        none = Distribution()
        return {
            "counts": {"restored": 0, "total": 0, "in_progress": 0, "completed": 0, "failed": 0},
            "summary": {name: asdict(none) for name in SUMMARY},
            "latest": {"completed": None, "savepoint": None, "failed": None, "restored": None},
            "history": [],
        }
    summary, latest = statistics.summary, statistics.latest
    return {
        "counts": asdict(statistics.counts),
        "summary": {
            "checkpointed_size": asdict(summary.checkpointed_size),
            "state_size": asdict(summary.state_size),
            "end_to_end_duration": asdict(summary.end_to_end_duration),
            "alignment_buffered": asdict(Distribution()),
            "processed_data": asdict(summary.processed_data),
            "persisted_data": asdict(summary.persisted_data),
        },
        "latest": {
            "completed": None if latest.completed is None else record_body(view, latest.completed),
            "savepoint": None if latest.savepoint is None else record_body(view, latest.savepoint),
            "failed": None if latest.failed is None else record_body(view, latest.failed),
            "restored": None if latest.restored is None else _restored(latest.restored),
        },
        "history": [record_body(view, record) for record in statistics.history],
    }


SUMMARY = (
    "checkpointed_size",
    "state_size",
    "end_to_end_duration",
    "alignment_buffered",
    "processed_data",
    "persisted_data",
)


def record_body(view: JobView, record: CheckpointRecord) -> dict[str, Any]:
    """Returns one checkpoint in the form that the list of checkpoints has in the answer."""
    body: dict[str, Any] = {
        "className": record.status.value.lower(),
        "id": record.id,
        "status": record.status.value,
        "is_savepoint": record.is_savepoint,
        "savepointFormat": "CANONICAL" if record.is_savepoint else None,
        "trigger_timestamp": record.trigger_timestamp,
        "latest_ack_timestamp": record.latest_ack_timestamp,
        "checkpointed_size": record.checkpointed_size,
        "state_size": record.state_size,
        "end_to_end_duration": record.end_to_end_duration,
        "alignment_buffered": 0,
        "processed_data": record.processed_data,
        "persisted_data": record.persisted_data,
        "num_subtasks": record.num_subtasks,
        "num_acknowledged_subtasks": record.num_acknowledged_subtasks,
        "checkpoint_type": record.checkpoint_type,
        "tasks": {
            view.vertex_ids[vertex_id]: _task(vertex_id, task, record)
            for vertex_id, task in record.tasks.items()
        },
    }
    match record.status:
        case CheckpointStatus.COMPLETED:
            body |= {"external_path": redacted(record.external_path), "discarded": record.discarded}
        case CheckpointStatus.FAILED:
            body |= {
                "failure_timestamp": record.failure_timestamp,
                "failure_message": redacted(record.failure_message),
            }
        case CheckpointStatus.IN_PROGRESS:
            pass
    return body


def _task(vertex_id: int, task: VertexRecord, record: CheckpointRecord) -> dict[str, Any]:
    stats = [one.stats for one in task.subtasks.values()]
    latest = max((one.ack_timestamp for one in task.subtasks.values()), default=-1)
    return {
        "id": record.id,
        "status": CheckpointStatus.COMPLETED.value
        if task.num_acknowledged_subtasks == task.num_subtasks
        else record.status.value,
        "latest_ack_timestamp": latest,
        "checkpointed_size": sum(one.checkpointed_size for one in stats),
        "state_size": sum(one.state_size for one in stats),
        "end_to_end_duration": -1 if latest < 0 else max(latest - record.trigger_timestamp, 0),
        "alignment_buffered": 0,
        "processed_data": sum(one.alignment_processed for one in stats),
        "persisted_data": sum(one.alignment_persisted for one in stats),
        "num_subtasks": task.num_subtasks,
        "num_acknowledged_subtasks": task.num_acknowledged_subtasks,
    }


def _restored(record: RestoredRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "restore_timestamp": record.restore_timestamp,
        "is_savepoint": record.is_savepoint,
        "external_path": redacted(record.external_path),
    }


@get("/jobs/{jobid}/checkpoints/config", "CheckpointConfig", "How checkpoints are taken")
def config(call: Call) -> Any:
    view = call.job
    settings = view.checkpoint_settings
    if settings is None or settings.store is None:
        raise NotFound(f"job {view.id} has no checkpoints: run it with checkpoints=URL")
    return {
        "mode": "exactly_once",
        "interval": settings.every_ms,
        "timeout": settings.timeout_ms,
        "min_pause": settings.min_pause_ms,
        "max_concurrent": 1,
        "externalization": {"enabled": True, "delete_on_cancellation": False},
        "state_backend": view.state_backend,
        "checkpoint_storage": redacted(settings.store),
        "unaligned_checkpoints": settings.unaligned or settings.aligned_timeout_ms is not None,
        "tolerable_failed_checkpoints": 2**31 - 1
        if settings.tolerable_failures is None
        else settings.tolerable_failures,
        "aligned_checkpoint_timeout": settings.aligned_timeout_ms or 0,
        "checkpoints_after_tasks_finish": True,
        "state_changelog_enabled": False,
        "changelog_periodic_materialization_interval": LONG_MAX,
        "changelog_storage": "",
    }


def _record(call: Call) -> CheckpointRecord:
    view, number = call.job, call.number("checkpointid")
    statistics = view.checkpoints
    record = None if statistics is None else statistics.record(number)
    if record is None:
        raise NotFound(f"checkpoint {number} of job {view.id} is not remembered")
    return record


@get("/jobs/{jobid}/checkpoints/details/{checkpointid}", "Checkpoint", "One checkpoint")
def details(call: Call) -> Any:
    return record_body(call.job, _record(call))


@get(
    "/jobs/{jobid}/checkpoints/details/{checkpointid}/subtasks/{vertexid}",
    "CheckpointSubtasks",
    "One vertex in one checkpoint",
)
def subtask_details(call: Call) -> Any:
    record, vertex = _record(call), call.vertex
    task = record.tasks.get(vertex.id)
    if task is None:
        raise NotFound(f"vertex {vertex.name!r} has no part in checkpoint {record.id}")
    acknowledged = list(task.subtasks.values())
    return {
        **_task(vertex.id, task, record),
        "summary": {
            "checkpointed_size": _spread([one.stats.checkpointed_size for one in acknowledged]),
            "state_size": _spread([one.stats.state_size for one in acknowledged]),
            "end_to_end_duration": _spread([one.end_to_end_duration for one in acknowledged]),
            "checkpoint_duration": {
                "sync": _spread([one.stats.sync_ms for one in acknowledged]),
                "async": _spread([one.stats.async_ms for one in acknowledged]),
            },
            "alignment": {
                "buffered": _spread([0 for _ in acknowledged]),
                "processed": _spread([one.stats.alignment_processed for one in acknowledged]),
                "persisted": _spread([one.stats.alignment_persisted for one in acknowledged]),
                "duration": _spread([one.stats.alignment_ms for one in acknowledged]),
            },
            "start_delay": _spread([one.stats.start_delay_ms for one in acknowledged]),
        },
        "subtasks": [
            _subtask(index, task.subtasks.get(index), record) for index in range(task.num_subtasks)
        ],
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return asdict(Distribution.of([round(value) for value in values]))


def _subtask(index: int, one: SubtaskRecord | None, record: CheckpointRecord) -> dict[str, Any]:
    if one is None:
        return {"index": index, "status": "pending_or_failed"}
    stats = one.stats
    return {
        "index": index,
        "status": "completed",
        "ack_timestamp": one.ack_timestamp,
        "end_to_end_duration": one.end_to_end_duration,
        "checkpointed_size": stats.checkpointed_size,
        "state_size": stats.state_size,
        "checkpoint": {"sync": round(stats.sync_ms), "async": stats.async_ms},
        "alignment": {
            "buffered": 0,
            "processed": stats.alignment_processed,
            "persisted": stats.alignment_persisted,
            "duration": stats.alignment_ms,
        },
        "start_delay": stats.start_delay_ms,
        "unaligned_checkpoint": stats.unaligned,
        "aborted": record.status is CheckpointStatus.FAILED,
    }


SAVEPOINTS, CHECKPOINTS, RESCALINGS = "savepoint", "checkpoint", "rescaling"
"""Kinds of requested operations. A stop counts as a savepoint, as in Flink."""

FORMATS = ("CANONICAL", "NATIVE")
TYPES = ("CONFIGURED", "FULL", "INCREMENTAL")
POLL_S = 0.05
SCHEMES = ("file", "memory", "s3", "gs", "az")


@start("/jobs/{jobid}/savepoints", "SavepointRequest", "Make a savepoint")
async def savepoint(call: Call) -> Any:
    """Answers POST /jobs/:jobid/savepoints."""
    view = _running(call)
    directory, cancels = (
        _directory(call, "target-directory", "targetDirectory"),
        call.flag("cancel-job"),
    )
    _check_format(call)

    async def work() -> dict[str, Any]:
        location = await view.master.savepoint(directory)
        if cancels:
            view.master.cancel()
        return {"location": location}

    return await _begin(call, SAVEPOINTS, work)


@start("/jobs/{jobid}/stop", "StopRequest", "Stop with a savepoint")
async def stop(call: Call) -> Any:
    """Answers POST /jobs/:jobid/stop."""
    view = _running(call)
    directory, drain = _directory(call, "targetDirectory", "target-directory"), call.flag("drain")
    _check_format(call)

    async def work() -> dict[str, Any]:
        view.master.stop(drain=drain, savepoint=True, directory=directory)
        # If the JobMaster is in another process, only its status is known here.
        while not view.status.is_terminal:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        error = view.master.stop_error
        if view.status is JobStatus.FAILED:
            error = error or view.master.error
        if error is not None:
            raise error
        return {"location": view.master.stopped_with}

    return await _begin(call, SAVEPOINTS, work)


@start("/jobs/{jobid}/checkpoints", "CheckpointRequest", "Take a checkpoint")
async def checkpoint(call: Call) -> Any:
    """Answers POST /jobs/:jobid/checkpoints."""
    view = _running(call)
    kind = call.text("checkpointType") or TYPES[0]
    if kind not in TYPES:
        raise BadRequest(f"checkpointType is {kind[:40]!r}, expected one of {', '.join(TYPES)}")

    async def work() -> dict[str, Any]:
        return {"checkpointId": await view.master.checkpoint()}

    return await _begin(call, CHECKPOINTS, work)


@route(
    "PATCH",
    "/jobs/{jobid}/rescaling",
    "Triggered",
    "Let the job go on at another parallelism",
    ("parallelism",),
    status=202,
)
async def rescaling(call: Call) -> Any:
    """Answers PATCH /jobs/:jobid/rescaling?parallelism=N."""
    text = call.query.get("parallelism", "")
    if not (text.isascii() and text.isdecimal()) or len(text) > 6:
        raise BadRequest(
            f"parallelism is {text[:40]!r}, expected a whole number from 1 on, such as 2"
        )
    return await _rescale(call, int(text), {})


@get("/jobs/{jobid}/resource-requirements", "Requirements", "The parallelism of each vertex")
def requirements(call: Call) -> Any:
    """Answers GET /jobs/:jobid/resource-requirements."""
    view = call.job
    return {
        view.vertex_ids[vertex.id]: {
            "parallelism": {"lowerBound": vertex.parallelism, "upperBound": vertex.parallelism}
        }
        for vertex in view.graph.vertices
    }


@route(
    "PUT",
    "/jobs/{jobid}/resource-requirements",
    "Triggered",
    "Set the parallelism of vertices",
    body="Anything",
)
async def set_requirements(call: Call) -> Any:
    """Answers PUT /jobs/:jobid/resource-requirements. Rescales the job to the upper bounds that the
    request has.
    """
    view, wanted = call.job, {}
    for vertex_id, given in call.body.items():
        vertex = view.vertex(vertex_id)
        if vertex is None:
            raise BadRequest(f"the job has no vertex {vertex_id[:40]!r}")
        bounds = given.get("parallelism") if isinstance(given, dict) else None
        count = bounds.get("upperBound") if isinstance(bounds, dict) else None
        if type(count) is not int:
            raise BadRequest(f"parallelism.upperBound of {vertex_id} is {count!r:.40}")
        wanted[vertex.uids[0]] = count
    answer = await _rescale(call, None, wanted)
    return Answer(answer.body, status=200)


async def _rescale(call: Call, parallelism: int | None, of_operators: dict[str, int]) -> Answer:
    view = _running(call)
    rescale = view.rescale
    if rescale is None:
        raise Unavailable("this endpoint only shows the job, it cannot rescale it")
    try:
        rescaled(view.graph, parallelism, of_operators)
    except GraphError as error:
        raise BadRequest(str(error)) from error

    async def work() -> dict[str, Any]:
        await rescale(parallelism, of_operators)
        return {}

    return await _begin(call, RESCALINGS, work)


@get("/jobs/{jobid}/rescaling/{triggerid}", "OperationStatus", "How far a rescaling is")
def rescaling_status(call: Call) -> Any:
    """Answers GET /jobs/:jobid/rescaling/:triggerid."""
    return _status(call, RESCALINGS)


@get("/jobs/{jobid}/savepoints/{triggerid}", "OperationStatus", "How far a savepoint or stop is")
def savepoint_status(call: Call) -> Any:
    """Answers GET /jobs/:jobid/savepoints/:triggerid."""
    return _status(call, SAVEPOINTS)


@get("/jobs/{jobid}/checkpoints/{triggerid}", "OperationStatus", "How far a checkpoint is")
def checkpoint_status(call: Call) -> Any:
    """Answers GET /jobs/:jobid/checkpoints/:triggerid."""
    return _status(call, CHECKPOINTS)


async def _begin(
    call: Call, kind: str, work: Callable[[], Coroutine[Any, Any, dict[str, Any]]]
) -> Answer:
    operations, given = call.monitor.operations, call.text("triggerId")
    request_id = call.monitor.host.ids.new("request") if given is None else check_request_id(given)
    job_id = call.params["jobid"]
    if not operations.known(job_id, kind, request_id):
        await operations.begin(job_id, kind, request_id, work())
    return Answer({"request-id": request_id}, status=202)


def _status(call: Call, kind: str) -> Any:
    operation = call.monitor.operations.find(call.params["jobid"], kind, call.params["triggerid"])
    if not operation.done():
        return {"status": {"id": "IN_PROGRESS"}, "operation": None}
    if operation.cancelled():
        result: dict[str, Any] = {
            "failure-cause": failure_cause(CheckpointError("the endpoint was closed"))
        }
    elif (error := operation.exception()) is not None:
        result = {"failure-cause": failure_cause(error)}
    else:
        result = operation.result()
    return {"status": {"id": "COMPLETED"}, "operation": result}


def _running(call: Call) -> JobView:
    """Returns the job if it has not ended. Also returns it if the call has the id of an earlier
    request.

    Raises Conflict otherwise.
    """
    view, given = call.job, call.text("triggerId")
    if view.status.is_terminal and not any(
        given is not None and call.monitor.operations.known(view.id, kind, given)
        for kind in (SAVEPOINTS, CHECKPOINTS, RESCALINGS)
    ):
        raise Conflict(f"job {view.id} is {view.status.value}, expected a job that runs")
    return view


def _check_format(call: Call) -> None:
    wanted = call.text("formatType")
    if wanted is not None and wanted not in FORMATS:
        raise BadRequest(f"formatType is {wanted[:40]!r}, expected one of {', '.join(FORMATS)}")


def _directory(call: Call, *names: str) -> str | None:
    """Returns the URL of the directory that one of the body's fields `names` has; None if missing.

    A path of this machine must be absolute.
    """
    where = call.text(*names)
    if not where:
        return None
    scheme, found, _ = where.partition("://")
    if found and scheme in SCHEMES and "\x00" not in where:
        return where
    if where.startswith("/") and "\x00" not in where:
        return f"file://{quote(where)}"
    raise BadRequest(
        f"{names[0]} is {where[:60]!r}, expected a whole path or a URL of {', '.join(SCHEMES)}"
    )


# Calls of Flink without an equivalent here. They are answered, so that clients do not fail.


@route("POST", "/savepoint-disposal", "Empty", "Is refused", body="DisposalRequest")
def savepoint_disposal(call: Call) -> Any:
    """Refuses POST /savepoint-disposal, because a request over the network may delete nothing."""
    raise Conflict("savepoints are not deleted here: remove the directory of the savepoint")


@route("PATCH", "/jobs/{jobid}/clientHeartbeat", "Empty", "Is accepted", body="Anything")
def client_heartbeat(call: Call) -> Any:
    """Answers PATCH /jobs/:jobid/clientHeartbeat, without effect.

    Jobs of aioflow do not end with the client that watches them.
    """
    _ = call.job
    return {}


@route("DELETE", "/cluster", "Empty", "Is refused")
def end_cluster(call: Call) -> Any:
    """Refuses DELETE /cluster. Only a signal or `aioflow cluster stop` ends the process."""
    raise Conflict("the process is not ended over HTTP: aioflow cluster stop, or a signal, does it")
