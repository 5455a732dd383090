"""Answers calls that start long operations, in Flink's format.

POST returns a request id; GET with that id returns the status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from aioflow.cluster.execution_graph import JobStatus
from aioflow.core.errors import CheckpointError, GraphError
from aioflow.graph.rescaling import rescaled
from aioflow.monitoring.calls import Answer, BadRequest, Call, Conflict, Unavailable
from aioflow.monitoring.monitor import check_request_id
from aioflow.monitoring.rest_jobs import failure_cause

if TYPE_CHECKING:
    from aioflow.monitoring.view import JobView

__all__ = [
    "checkpoint",
    "checkpoint_status",
    "client_heartbeat",
    "end_cluster",
    "requirements",
    "rescaling",
    "rescaling_status",
    "savepoint",
    "savepoint_disposal",
    "savepoint_status",
    "set_requirements",
    "stop",
]

SAVEPOINTS, CHECKPOINTS, RESCALINGS = "savepoint", "checkpoint", "rescaling"
"""Kinds of requests. A stop is requested under the savepoints, as in Flink."""

FORMATS = ("CANONICAL", "NATIVE")
TYPES = ("CONFIGURED", "FULL", "INCREMENTAL")
POLL_S = 0.05
SCHEMES = ("file", "memory", "s3", "gs", "az")


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


async def checkpoint(call: Call) -> Any:
    """Answers POST /jobs/:jobid/checkpoints."""
    view = _running(call)
    kind = call.text("checkpointType") or TYPES[0]
    if kind not in TYPES:
        raise BadRequest(f"checkpointType is {kind[:40]!r}, expected one of {', '.join(TYPES)}")

    async def work() -> dict[str, Any]:
        return {"checkpointId": await view.master.checkpoint()}

    return await _begin(call, CHECKPOINTS, work)


async def rescaling(call: Call) -> Any:
    """Answers PATCH /jobs/:jobid/rescaling?parallelism=N."""
    text = call.query.get("parallelism", "")
    if not (text.isascii() and text.isdecimal()) or len(text) > 6:
        raise BadRequest(f"parallelism is {text[:40]!r}, expected a number")
    return await _rescale(call, int(text), {})


def requirements(call: Call) -> Any:
    """Answers GET /jobs/:jobid/resource-requirements."""
    view = call.job
    return {
        view.vertex_ids[vertex.id]: {
            "parallelism": {"lowerBound": vertex.parallelism, "upperBound": vertex.parallelism}
        }
        for vertex in view.graph.vertices
    }


async def set_requirements(call: Call) -> Any:
    """Answers PUT /jobs/:jobid/resource-requirements: the upper bounds are what is wanted."""
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


def rescaling_status(call: Call) -> Any:
    """Answers GET /jobs/:jobid/rescaling/:triggerid."""
    return _status(call, RESCALINGS)


def savepoint_status(call: Call) -> Any:
    """Answers GET /jobs/:jobid/savepoints/:triggerid."""
    return _status(call, SAVEPOINTS)


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
    if not operation.task.done():
        return {"status": {"id": "IN_PROGRESS"}, "operation": None}
    if operation.task.cancelled():
        result: dict[str, Any] = {
            "failure-cause": failure_cause(CheckpointError("the endpoint was closed"))
        }
    elif (error := operation.task.exception()) is not None:
        result = {"failure-cause": failure_cause(error)}
    else:
        result = operation.task.result()
    return {"status": {"id": "COMPLETED"}, "operation": result}


def _running(call: Call) -> JobView:
    """Returns the job if it is not over, or if the request is known already.

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
    """Returns the URL of the directory in the body, None if missing.

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


# Calls of Flink without an equivalent here. They are answered, so that clients go on.


def savepoint_disposal(call: Call) -> Any:
    """Refuses POST /savepoint-disposal: a request from the network never deletes anything."""
    raise Conflict("savepoints are not deleted here: remove the directory of the savepoint")


def client_heartbeat(call: Call) -> Any:
    """Answers PATCH /jobs/:jobid/clientHeartbeat, without effect.

    Jobs here do not end with the client that watches them.
    """
    _ = call.job
    return {}


def end_cluster(call: Call) -> Any:
    """Refuses DELETE /cluster: only a signal or `aioflow cluster stop` ends the process."""
    raise Conflict("the process is not ended over HTTP: aioflow cluster stop, or a signal, does it")
