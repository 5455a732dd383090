"""Lists every route of the endpoint. The router, the OpenAPI document and the tests use the
list.
"""

from __future__ import annotations

from dataclasses import dataclass

from aioflow.monitoring import (
    data_views,
    events,
    prometheus,
    rest_checkpoints,
    rest_cluster,
    rest_jobs,
    rest_metrics,
    rest_operations,
    rest_vertices,
)
from aioflow.monitoring.calls import Handler

__all__ = ["ROUTES", "Route"]


@dataclass(frozen=True, slots=True)
class Route:
    """A route of the endpoint.

    `schema` names the JSON Schema of the answer in `schemas`. `query` lists the parameters that the
    handler reads, all optional.
    """

    method: str
    path: str
    handler: Handler
    schema: str
    summary: str
    query: tuple[str, ...] = ()
    body: str = ""
    """Name of the JSON Schema of a changing call's body."""
    status: int = 200


def _get(path: str, handler: Handler, schema: str, summary: str, *query: str) -> Route:
    return Route("GET", path, handler, schema, summary, query)


def _start(path: str, handler: Handler, body: str, summary: str) -> Route:
    return Route("POST", path, handler, "Triggered", summary, body=body, status=202)


VERTEX = "/jobs/{jobid}/vertices/{vertexid}"

ROUTES: tuple[Route, ...] = (
    _get("/overview", rest_cluster.overview, "Overview", "The cluster at a glance"),
    _get("/config", rest_cluster.config, "DashboardConfig", "What a dashboard needs to know"),
    # Jobs.
    _get("/jobs", rest_jobs.jobs, "Jobs", "Ids and states of all jobs"),
    _get(
        "/jobs/overview",
        rest_jobs.jobs_overview,
        "JobsOverview",
        "All jobs with times and counts of tasks",
    ),
    _get(
        "/jobs/metrics",
        rest_metrics.jobs,
        "AggregatedMetrics",
        "Metrics over jobs",
        "get",
        "agg",
        "jobs",
    ),
    _get("/jobs/{jobid}", rest_jobs.job, "Job", "A job with its vertices"),
    _get("/jobs/{jobid}/status", rest_jobs.status, "JobStatus", "The state of a job"),
    _get("/jobs/{jobid}/plan", rest_jobs.plan, "JobPlan", "The job graph"),
    _get("/jobs/{jobid}/config", rest_jobs.config, "JobConfig", "How a job runs"),
    _get(
        "/jobs/{jobid}/exceptions",
        rest_jobs.exceptions,
        "Exceptions",
        "What failed, newest first",
        "maxExceptions",
    ),
    _get(
        "/jobs/{jobid}/metrics", rest_metrics.job, "Metrics", "Metrics of a job as a whole", "get"
    ),
    _get(
        "/jobs/{jobid}/accumulators",
        rest_jobs.job_accumulators,
        "Accumulators",
        "What the program counts",
    ),
    _get(
        "/jobs/{jobid}/execution-result",
        rest_jobs.execution_result,
        "ExecutionResult",
        "How a job ended",
    ),
    Route(
        "PATCH", "/jobs/{jobid}", rest_jobs.cancel, "Empty", "Cancel a job", ("mode",), status=202
    ),
    # Vertices.
    _get(VERTEX, rest_vertices.vertex, "Vertex", "A vertex with its subtasks"),
    _get(
        f"{VERTEX}/backpressure",
        rest_vertices.backpressure,
        "BackPressure",
        "How much of its time each subtask is held back",
    ),
    _get(
        f"{VERTEX}/watermarks",
        rest_vertices.watermarks,
        "Metrics",
        "The input watermark of each subtask",
    ),
    _get(
        f"{VERTEX}/subtasktimes",
        rest_vertices.subtask_times,
        "SubtaskTimes",
        "When each subtask reached each state",
    ),
    _get(
        f"{VERTEX}/taskmanagers",
        rest_vertices.vertex_taskmanagers,
        "VertexTaskManagers",
        "A vertex by process",
    ),
    _get(
        f"{VERTEX}/accumulators",
        rest_jobs.vertex_accumulators,
        "VertexAccumulators",
        "What its operators count",
    ),
    _get(f"{VERTEX}/metrics", rest_metrics.vertex, "Metrics", "Metrics of all subtasks", "get"),
    _get(
        f"{VERTEX}/jm-operator-metrics",
        rest_metrics.operators,
        "Metrics",
        "Metrics of coordinators",
        "get",
    ),
    _get(
        f"{VERTEX}/flamegraph",
        rest_vertices.vertex_graph,
        "FlameGraph",
        "Where its tasks are",
        "type",
        "subtaskindex",
        "seconds",
    ),
    _get(
        f"{VERTEX}/subtasks/accumulators",
        rest_jobs.subtask_accumulators,
        "SubtaskAccumulators",
        "By subtask",
    ),
    _get(
        f"{VERTEX}/subtasks/metrics",
        rest_metrics.subtasks,
        "AggregatedMetrics",
        "Metrics over subtasks",
        "get",
        "agg",
        "subtasks",
    ),
    _get(
        f"{VERTEX}/subtasks/{{subtaskindex}}",
        rest_vertices.subtask,
        "Subtask",
        "The current attempt of a subtask",
    ),
    _get(
        f"{VERTEX}/subtasks/{{subtaskindex}}/metrics",
        rest_metrics.subtask,
        "Metrics",
        "Metrics of a subtask",
        "get",
    ),
    _get(
        f"{VERTEX}/subtasks/{{subtaskindex}}/attempts/{{attempt}}",
        rest_vertices.attempt,
        "Subtask",
        "One attempt of a subtask",
    ),
    # Checkpoints.
    _get(
        "/jobs/{jobid}/checkpoints",
        rest_checkpoints.checkpoints,
        "Checkpoints",
        "Checkpoints, newest first",
    ),
    _get(
        "/jobs/{jobid}/checkpoints/config",
        rest_checkpoints.config,
        "CheckpointConfig",
        "How checkpoints are taken",
    ),
    _get(
        "/jobs/{jobid}/checkpoints/details/{checkpointid}",
        rest_checkpoints.details,
        "Checkpoint",
        "One checkpoint",
    ),
    _get(
        "/jobs/{jobid}/checkpoints/details/{checkpointid}/subtasks/{vertexid}",
        rest_checkpoints.subtask_details,
        "CheckpointSubtasks",
        "One vertex in one checkpoint",
    ),
    _get(
        "/jobs/{jobid}/events",
        events.events,
        "Events",
        "What changes, once a second (text/event-stream)",
    ),
    # Operations.
    _start(
        "/jobs/{jobid}/savepoints",
        rest_operations.savepoint,
        "SavepointRequest",
        "Make a savepoint",
    ),
    _get(
        "/jobs/{jobid}/savepoints/{triggerid}",
        rest_operations.savepoint_status,
        "OperationStatus",
        "How far a savepoint or stop is",
    ),
    _start("/jobs/{jobid}/stop", rest_operations.stop, "StopRequest", "Stop with a savepoint"),
    _start(
        "/jobs/{jobid}/checkpoints",
        rest_operations.checkpoint,
        "CheckpointRequest",
        "Take a checkpoint",
    ),
    _get(
        "/jobs/{jobid}/checkpoints/{triggerid}",
        rest_operations.checkpoint_status,
        "OperationStatus",
        "How far a checkpoint is",
    ),
    Route(
        "POST",
        "/savepoint-disposal",
        rest_operations.savepoint_disposal,
        "Empty",
        "Is refused",
        body="DisposalRequest",
    ),
    Route(
        "PATCH",
        "/jobs/{jobid}/rescaling",
        rest_operations.rescaling,
        "Triggered",
        "Let the job go on at another parallelism",
        ("parallelism",),
        status=202,
    ),
    _get(
        "/jobs/{jobid}/rescaling/{triggerid}",
        rest_operations.rescaling_status,
        "OperationStatus",
        "How far a rescaling is",
    ),
    _get(
        "/jobs/{jobid}/resource-requirements",
        rest_operations.requirements,
        "Requirements",
        "The parallelism of each vertex",
    ),
    Route(
        "PUT",
        "/jobs/{jobid}/resource-requirements",
        rest_operations.set_requirements,
        "Triggered",
        "Set the parallelism of vertices",
        body="Anything",
    ),
    Route(
        "PATCH",
        "/jobs/{jobid}/clientHeartbeat",
        rest_operations.client_heartbeat,
        "Empty",
        "Is accepted",
        body="Anything",
    ),
    Route("DELETE", "/cluster", rest_operations.end_cluster, "Empty", "Is refused"),
    # Routes that Flink does not have.
    _get(
        "/aioflow/asyncio",
        rest_cluster.asyncio_view,
        "Asyncio",
        "The event loop: lag, slow callbacks, tasks, calls",
        "taskmanager",
    ),
    _get(
        "/aioflow/processes",
        rest_cluster.processes,
        "Processes",
        "This process and those that run tasks, in short",
    ),
    _get(
        "/aioflow/flamegraph",
        rest_vertices.loop_graph,
        "FlameGraph",
        "What the loop spends its time on",
        "seconds",
        "taskmanager",
    ),
    _get(
        "/aioflow/logs",
        rest_cluster.tail,
        "LogRecords",
        "The last log records",
        "after",
        "level",
        "limit",
        "taskmanager",
    ),
    _get(
        "/aioflow/jobs/{jobid}/series",
        rest_cluster.series,
        "Series",
        "The last ten minutes of metrics",
        "metric",
        "since",
    ),
    _get(
        "/aioflow/jobs/{jobid}/state",
        data_views.overview,
        "StateOverview",
        "Keyed state: operators, names, numbers of keys",
    ),
    _get(
        "/aioflow/jobs/{jobid}/state/{operator}/{name}",
        data_views.look_up,
        "StateValue",
        "The value of a key",
        "key",
        "text",
    ),
    _get(
        "/aioflow/jobs/{jobid}/tap",
        data_views.tap,
        "Events",
        "Some of the records on an edge (text/event-stream)",
        "edge",
    ),
    _get("/metrics", prometheus.metrics, "Text", "All metrics, for Prometheus"),
    # Processes.
    _get(
        "/taskmanagers", rest_cluster.taskmanagers, "TaskManagers", "The processes that run tasks"
    ),
    _get(
        "/taskmanagers/metrics",
        rest_metrics.taskmanagers,
        "AggregatedMetrics",
        "Metrics over processes",
        "get",
        "agg",
        "taskmanagers",
    ),
    _get(
        "/taskmanagers/{taskmanagerid}",
        rest_cluster.taskmanager,
        "TaskManagerDetails",
        "One process",
    ),
    _get(
        "/taskmanagers/{taskmanagerid}/metrics",
        rest_metrics.taskmanager,
        "Metrics",
        "Metrics of a process",
        "get",
    ),
    _get(
        "/taskmanagers/{taskmanagerid}/thread-dump",
        rest_cluster.worker_thread_dump,
        "ThreadDump",
        "Tasks and threads",
    ),
    _get(
        "/taskmanagers/{taskmanagerid}/log", rest_cluster.worker_log, "Text", "Its last log records"
    ),
    _get(
        "/taskmanagers/{taskmanagerid}/stdout",
        rest_cluster.nothing,
        "Text",
        "Its output; it is kept elsewhere",
    ),
    _get(
        "/taskmanagers/{taskmanagerid}/logs",
        rest_cluster.no_logs,
        "Logs",
        "Log files; there are none",
    ),
    _get(
        "/jobmanager/metrics",
        rest_metrics.jobmanager,
        "Metrics",
        "Metrics of the cluster and of this process",
        "get",
    ),
    _get(
        "/jobmanager/config",
        rest_cluster.jobmanager_config,
        "Settings",
        "Settings, without secrets",
    ),
    _get(
        "/jobmanager/environment",
        rest_cluster.jobmanager_environment,
        "Environment",
        "What runs this process",
    ),
    _get(
        "/jobmanager/thread-dump",
        rest_cluster.thread_dump,
        "ThreadDump",
        "Tasks and threads of this process",
    ),
    _get("/jobmanager/logs", rest_cluster.no_logs, "Logs", "Log files; there are none"),
)
