"""Answers calls about jobs, their plans and their exceptions, in Flink's format.

Fields are in kebab case here, and in snake case in `rest_checkpoints`.

Calls for Flink's accumulators are answered with the counters that functions made through their
runtime context. Metrics are collected without their kind. So every whole number that an operator
reports under a name without a dot counts as a counter, apart from the engine's own names. The
values are summed over subtasks and operators.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.cluster.execution_graph import JobStatus
from aioflow.graph.deployment import ExecutionState
from aioflow.inspection.redaction import redacted
from aioflow.monitoring.answers import VERTEX, Answer, BadRequest, Conflict, get, route
from aioflow.monitoring.monitor import Call
from aioflow.monitoring.view import vertex_hex
from aioflow.task.metrics import RECORDS

if TYPE_CHECKING:
    from aioflow.cluster.job_history import FailureRecord
    from aioflow.graph.job_graph import JobGraph, JobVertex
    from aioflow.monitoring.view import JobView, SubtaskView

__all__ = [
    "SHOWN_STATES",
    "cancel",
    "config",
    "exceptions",
    "execution_result",
    "failure_cause",
    "io_metrics",
    "job",
    "job_accumulators",
    "jobs",
    "jobs_overview",
    "plan",
    "plan_of",
    "plan_of_graph",
    "results",
    "state_counts",
    "status",
    "subtask_accumulators",
    "vertex_accumulators",
    "vertex_body",
    "vertex_status",
]

OF_THE_ENGINE = frozenset(
    (
        *RECORDS,
        "currentInputWatermark",
        "currentOutputWatermark",
        "slowCallbacks",
        "slowestCallbackMs",
        "numLateRecordsDropped",
        "numRecordsInErrors",
        "asyncCallsInFlight",
        "asyncCallsMax",
    )
)
"""Names of the metrics that the engine itself reports for operators."""


def _counted(
    call: Call, view: JobView, vertex: JobVertex, metrics: Mapping[str, float]
) -> dict[str, int]:
    """Returns the user's counters of one subtask, by name, summed over its operators."""
    index, found = call.monitor.metrics(view), dict[str, int]()
    for name, value in metrics.items():
        operator, metric = index.operator_of(vertex.id, name)
        if (
            operator
            and isinstance(value, int)
            and "." not in metric
            and metric not in OF_THE_ENGINE
        ):
            found[metric] = found.get(metric, 0) + value
    return found


def _of_vertex(call: Call, view: JobView, vertex: JobVertex) -> list[dict[str, int]]:
    return [
        _counted(call, view, vertex, metrics)
        for metrics in call.monitor.metrics(view).of_vertex(vertex)
    ]


def _sum(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total


def _bodies(counted: Mapping[str, int]) -> list[dict[str, str]]:
    return [
        {"name": name, "type": "LongCounter", "value": str(value)}
        for name, value in counted.items()
    ]


def results(call: Call) -> dict[str, int]:
    """Returns the user's counters of the whole job, by name."""
    view = call.job
    return _sum(one for vertex in view.graph.vertices for one in _of_vertex(call, view, vertex))


@get("/jobs/{jobid}/accumulators", "Accumulators", "What the program counts")
def job_accumulators(call: Call) -> Any:
    """Answers GET /jobs/:jobid/accumulators."""
    return {
        "job-accumulators": [],
        "user-task-accumulators": _bodies(results(call)),
        "serialized-user-task-accumulators": {},
    }


@get(f"{VERTEX}/accumulators", "VertexAccumulators", "What its operators count")
def vertex_accumulators(call: Call) -> Any:
    """Answers GET .../vertices/:vertexid/accumulators."""
    view, vertex = call.job, call.vertex
    return {
        "id": view.vertex_ids[vertex.id],
        "user-accumulators": _bodies(_sum(_of_vertex(call, view, vertex))),
    }


@get(f"{VERTEX}/subtasks/accumulators", "SubtaskAccumulators", "By subtask")
def subtask_accumulators(call: Call) -> Any:
    """Answers GET .../vertices/:vertexid/subtasks/accumulators."""
    view, vertex = call.job, call.vertex
    counted = _of_vertex(call, view, vertex)
    subtasks = [
        {
            "subtask": one.index,
            "attempt": one.attempt,
            "host": one.host,
            "endpoint": one.host,
            "user-accumulators": _bodies(counted[one.index]),
        }
        for one in view.subtasks(vertex)
    ]
    return {
        "id": view.vertex_ids[vertex.id],
        "parallelism": vertex.parallelism,
        "subtasks": subtasks,
    }


FAILURES_SHOWN = 20


@get("/jobs", "Jobs", "Ids and states of all jobs")
def jobs(call: Call) -> Any:
    return {"jobs": [{"id": one.id, "status": one.status.value} for one in call.monitor.jobs()]}


@get("/jobs/overview", "JobsOverview", "All jobs with times and counts of tasks")
def jobs_overview(call: Call) -> Any:
    return {"jobs": [_overview(one, call.now_ms) for one in call.monitor.jobs()]}


def _overview(view: JobView, now_ms: int) -> dict[str, Any]:
    counts = state_counts([one for vertex in view.graph.vertices for one in view.subtasks(vertex)])
    return {
        "jid": view.id,
        "name": view.name,
        "start-time": view.start_ms,
        "end-time": view.end_ms,
        "duration": view.duration_ms(now_ms),
        "state": view.status.value,
        "last-modification": view.changed_ms,
        "tasks": {
            "total": sum(counts.values()),
            **{state.lower(): count for state, count in counts.items()},
        },
        "pending-operators": 0,
    }


@get("/jobs/{jobid}", "Job", "A job with its vertices")
def job(call: Call) -> Any:
    view, now = call.job, call.now_ms
    times = {status.value: at for status, at in view.master.timestamps_ms.items()}
    vertices = [vertex_body(call, view, vertex, now) for vertex in view.graph.vertices]
    statuses = [one["status"] for one in vertices]
    return {
        "jid": view.id,
        "name": view.name,
        "isStoppable": False,
        "state": view.status.value,
        "job-type": "STREAMING",
        "start-time": view.start_ms,
        "end-time": view.end_ms,
        "duration": view.duration_ms(now),
        "maxParallelism": max(
            (vertex.max_parallelism for vertex in view.graph.vertices), default=-1
        ),
        "now": now,
        "timestamps": {name: times.get(name, 0) for name in JOB_STATES},
        "vertices": vertices,
        "status-counts": {state.value: statuses.count(state.value) for state in SHOWN_STATES},
        "plan": plan_of(view),
        "pending-operators": 0,
    }


JOB_STATES = (*(status.value for status in JobStatus), "SUSPENDED", "RECONCILING")
"""Names of all job states in Flink. No job of aioflow is ever in the last two states, but clients
may expect them.
"""

SHOWN_STATES = tuple(ExecutionState)


def vertex_body(call: Call, view: JobView, vertex: JobVertex, now: int) -> dict[str, Any]:
    """Returns a vertex in the form that the list of vertices has in the answer about a job."""
    subtasks = view.subtasks(vertex)
    starts = [one.start_ms for one in subtasks if one.start_ms >= 0]
    start = min(starts, default=-1)
    end = (
        max((one.end_ms for one in subtasks), default=-1)
        if all(one.end_ms >= 0 for one in subtasks)
        else -1
    )
    return {
        "id": view.vertex_ids[vertex.id],
        "slotSharingGroupId": vertex.slot_sharing_group,
        "name": vertex.name,
        "maxParallelism": vertex.max_parallelism,
        "parallelism": vertex.parallelism,
        "status": vertex_status(subtasks),
        "start-time": start,
        "end-time": end,
        "duration": -1 if start < 0 else max((now if end < 0 else end) - start, 0),
        "tasks": state_counts(subtasks),
        "metrics": io_metrics(call.monitor.metrics(view).of_vertex(vertex)),
    }


def io_metrics(subtasks: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Returns the input and output counts of a vertex, or of one of its subtasks.

    Bytes are counted when records are encoded.
    """

    def known(name: str) -> bool:
        return bool(subtasks) and all(name in one for one in subtasks)

    def total(name: str) -> int:
        return round(sum(one.get(name, 0) for one in subtasks))

    busy = [one.get("accumulateBusyTimeMs", math.nan) for one in subtasks]
    return {
        "read-bytes": total("numBytesIn"),
        "read-bytes-complete": known("numBytesIn"),
        "write-bytes": total("numBytesOut"),
        "write-bytes-complete": known("numBytesOut"),
        "read-records": total("numRecordsIn"),
        "read-records-complete": known("numRecordsIn"),
        "write-records": total("numRecordsOut"),
        "write-records-complete": known("numRecordsOut"),
        "accumulated-backpressured-time": total("accumulateBackPressuredTimeMs"),
        "accumulated-idle-time": total("accumulateIdleTimeMs"),
        "accumulated-busy-time": "NaN" if any(map(math.isnan, busy)) else round(sum(busy)),
    }


def vertex_status(subtasks: Sequence[SubtaskView]) -> str:
    """Returns the state of a vertex from the states of its subtasks. The most alarming state wins,
    as in Flink's ExecutionJobVertex.
    """
    states = [one.state for one in subtasks]
    for state in (
        ExecutionState.FAILED,
        ExecutionState.CANCELING,
        ExecutionState.CANCELED,
        ExecutionState.INITIALIZING,
    ):
        if state in states:
            return str(state.value)
    if states and all(state is ExecutionState.FINISHED for state in states):
        return str(ExecutionState.FINISHED.value)
    if ExecutionState.RUNNING in states or ExecutionState.FINISHED in states:
        return str(ExecutionState.RUNNING.value)
    for state in (ExecutionState.DEPLOYING, ExecutionState.SCHEDULED):
        if state in states:
            return str(state.value)
    return str(ExecutionState.CREATED.value)


def state_counts(subtasks: Sequence[SubtaskView]) -> dict[str, int]:
    states = [one.state for one in subtasks]
    return {**{state.value: states.count(state) for state in SHOWN_STATES}, "RECONCILING": 0}


@get("/jobs/{jobid}/status", "JobStatus", "The state of a job")
def status(call: Call) -> Any:
    return {"status": call.job.status.value}


@get("/jobs/{jobid}/plan", "JobPlan", "The job graph")
def plan(call: Call) -> Any:
    return {"plan": plan_of(call.job)}


def plan_of(view: JobView) -> dict[str, Any]:
    """Returns the job graph in Flink's format, producers first."""
    return {"jid": view.id, **plan_of_graph(view.graph)}


def plan_of_graph(graph: JobGraph) -> dict[str, Any]:
    """Returns the graph in Flink's format, without the id of a job."""
    ids = {vertex.id: vertex_hex(vertex) for vertex in graph.vertices}
    nodes = []
    for vertex in graph.vertices:
        node: dict[str, Any] = {
            "id": ids[vertex.id],
            "parallelism": vertex.parallelism,
            "operator": "",
            "operator_strategy": "",
            "description": vertex.name,
            "optimizer_properties": {},
        }
        inputs = [
            {
                "num": number,
                "id": ids[edge.source],
                "ship_strategy": edge.partitioning.strategy.value,
                "exchange": "pipelined_bounded",
            }
            for number, edge in enumerate(graph.inputs_of(vertex.id))
        ]
        if inputs:
            node["inputs"] = inputs
        nodes.append(node)
    return {"name": graph.name, "type": "STREAMING", "nodes": nodes}


@get("/jobs/{jobid}/config", "JobConfig", "How a job runs")
def config(call: Call) -> Any:
    view = call.job
    return {
        "jid": view.id,
        "name": view.name,
        "execution-config": {
            "execution-mode": "PIPELINED",
            "restart-strategy": str(view.master.executions.restart),
            "job-parallelism": max(
                (vertex.parallelism for vertex in view.graph.vertices), default=1
            ),
            "object-reuse-mode": True,
            "user-config": {},
        },
    }


@get("/jobs/{jobid}/exceptions", "Exceptions", "What failed, newest first", "maxExceptions")
def exceptions(call: Call) -> Any:
    text = call.query.get("maxExceptions", str(FAILURES_SHOWN))
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise BadRequest(f"maxExceptions is {text[:40]!r}, expected a number")
    view, most = call.job, int(text)
    newest = list(reversed(view.failures))
    shown = newest[:most]
    root = newest[0] if newest else None
    every = [
        one
        for failure in newest
        for one in (failure, *failure.concurrent)
        if one.attempt is not None
    ]
    hidden = view.master.history.failures_total > len(shown)
    return {
        "root-exception": None if root is None else root.stack,
        "timestamp": None if root is None else root.timestamp_ms,
        "all-exceptions": [_task_failure(view, one) for one in every[:most]],
        "truncated": len(every) > most,
        "exceptionHistory": {
            "entries": [
                {
                    **_failure(view, one),
                    "concurrentExceptions": [_failure(view, other) for other in one.concurrent],
                }
                for one in shown
            ],
            "truncated": hidden,
        },
    }


def _task_failure(view: JobView, failure: FailureRecord) -> dict[str, Any]:
    body = _failure(view, failure)
    return {
        "exception": body["stacktrace"],
        "task": body["taskName"],
        "location": body["location"],
        "endpoint": body["endpoint"],
        "timestamp": failure.timestamp_ms,
        "taskManagerId": body["taskManagerId"],
    }


def _failure(view: JobView, failure: FailureRecord) -> dict[str, Any]:
    """Returns a failure in Flink's format. The field `notes` is aioflow's own.

    `notes` names the operator, the subtask and the record.
    """
    task = None
    if failure.attempt is not None:
        vertex = view.graph.vertex(failure.attempt.vertex_id)
        task = (
            f"{vertex.name} ({failure.attempt.subtask_index + 1}/{vertex.parallelism}) - "
            f"execution #{failure.attempt.attempt}"
        )
    worker_id = None if task is None else view.worker_at(failure.location)
    where = failure.location or worker_id
    return {
        "exceptionName": failure.name,
        "stacktrace": failure.stack,
        "timestamp": failure.timestamp_ms,
        "taskName": task,
        "location": where,
        "endpoint": where,
        "taskManagerId": worker_id,
        "failureLabels": {},
        "message": failure.message,
        "notes": list(failure.notes),
        "attempt": None if failure.attempt is None else failure.attempt.attempt,
        "vertex-id": None
        if failure.attempt is None
        else view.vertex_ids[failure.attempt.vertex_id],
        "subtask": None if failure.attempt is None else failure.attempt.subtask_index,
    }


# Clients of Flink expect these calls for accumulators. The nearest equivalent is user metrics of
# RuntimeContext, which are also under /metrics.


@get("/jobs/{jobid}/execution-result", "ExecutionResult", "How a job ended")
def execution_result(call: Call) -> Any:
    view = call.job
    if not view.status.is_terminal:
        return {"status": {"id": "IN_PROGRESS"}, "job-execution-result": None}
    result: dict[str, Any] = {
        "id": view.id,
        "application-status": {"FINISHED": "SUCCEEDED", "CANCELED": "CANCELED"}.get(
            view.status.value, "FAILED"
        ),
        "accumulator-results": results(call),
        "net-runtime": view.duration_ms(call.now_ms),
    }
    if view.master.error is not None and view.status is JobStatus.FAILED:
        result["failure-cause"] = failure_cause(view.master.error)
    return {"status": {"id": "COMPLETED"}, "job-execution-result": result}


def failure_cause(error: BaseException) -> dict[str, Any]:
    """Returns the error of an operation in Flink's format, without a serialized Java object."""
    return {
        "class": type(error).__qualname__,
        "stack-trace": redacted(f"{type(error).__qualname__}: {error}"),
        "serialized-throwable": "",
    }


@route("PATCH", "/jobs/{jobid}", "Empty", "Cancel a job", ("mode",), status=202)
def cancel(call: Call) -> Any:
    """Answers PATCH /jobs/:jobid?mode=cancel.

    Cancelling a cancelled job again has no effect. The call fails if the job ended in another way.
    """
    mode = call.query.get("mode", "cancel")
    if mode != "cancel":
        raise BadRequest(
            f"mode is {mode[:40]!r}, expected cancel; to stop a job: POST /jobs/:jobid/stop"
        )
    view = call.job
    if view.status in (JobStatus.FINISHED, JobStatus.FAILED):
        raise Conflict(f"job {view.id} is {view.status.value}, it cannot be cancelled any more")
    view.master.cancel()
    return Answer({}, status=202)
