"""The JSON Schema of every answer, for the OpenAPI document. Tests check real answers against them.

The schema of an object lists the fields that are always there. An answer may have more fields.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BODIES", "SCHEMAS"]

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
HEX: Schema = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
TIME: Schema = {
    "type": "integer",
    "minimum": -1,
    "description": "ms since the epoch, or a duration in ms; -1: not yet",
}
NAN: Schema = {"anyOf": [NUMBER, {"enum": ["NaN"]}]}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _enum(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _object(properties: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    schema = {"type": "object", "properties": {**properties, **(optional or {})}}
    return {**schema, "required": list(properties)} if properties else schema


def _only(properties: dict[str, Schema]) -> Schema:
    """Returns the schema of an object with the optional fields `properties` and no other fields."""
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _all(schema: Schema, *names: str) -> dict[str, Schema]:
    return dict.fromkeys(names, schema)


JOB_STATE = _enum(
    "INITIALIZING", "CREATED", "RUNNING", "FAILING", "FAILED", "CANCELLING", "CANCELED", "FINISHED",
    "RESTARTING", "SUSPENDED", "RECONCILING",
)  # fmt: skip
TASK_STATES = (
    "CREATED", "SCHEDULED", "DEPLOYING", "INITIALIZING", "RUNNING", "FINISHED", "CANCELING",
    "CANCELED", "FAILED", "RECONCILING",
)  # fmt: skip
TASK_STATE = _enum(*TASK_STATES)
STATE_COUNTS = _map(INTEGER)
LEVEL = _enum("ok", "low", "high")

IO_NUMBERS = (
    "read-bytes",
    "write-bytes",
    "read-records",
    "write-records",
    "accumulated-backpressured-time",
    "accumulated-idle-time",
)
IO_METRICS = _object(
    {
        **_all(INTEGER, *IO_NUMBERS),
        **_all(
            FLAG,
            "read-bytes-complete",
            "write-bytes-complete",
            "read-records-complete",
            "write-records-complete",
        ),
        "accumulated-busy-time": NAN,
    }
)
PLAN = _object(
    {
        "jid": HEX,
        "name": TEXT,
        "type": _enum("STREAMING", "BATCH"),
        "nodes": _list(
            _object(
                {
                    "id": HEX,
                    "parallelism": INTEGER,
                    **_all(TEXT, "operator", "operator_strategy", "description"),
                    "optimizer_properties": {"type": "object"},
                },
                {
                    "inputs": _list(
                        _object(
                            {"num": INTEGER, "id": HEX, "ship_strategy": TEXT, "exchange": TEXT}
                        )
                    )
                },
            )
        ),
    }
)
SUBTASK = _object(
    {
        **_all(INTEGER, "subtask", "attempt"),
        "status": TASK_STATE,
        **_all(TEXT, "host", "taskmanager-id"),
        **_all(TIME, "start-time", "end-time", "duration", "start_time"),
        "metrics": IO_METRICS,
        "status-duration": _map(INTEGER),
        "other-concurrent-attempts": _list({"type": "object"}),
    }
)
ACCUMULATOR = _object(_all(TEXT, "name", "type", "value"))

AGGREGATED = _object({"metrics": _map(_map(NUMBER)), "status-duration": _map(_map(NUMBER))})
DISTRIBUTION = _object(_all(NUMBER, "min", "max", "avg", "p50", "p90", "p95", "p99", "p999"))

_SIZES = (
    "checkpointed_size",
    "state_size",
    "alignment_buffered",
    "processed_data",
    "persisted_data",
)
_ACKNOWLEDGED = {
    **_all(TIME, "latest_ack_timestamp", "end_to_end_duration"),
    **_all(INTEGER, *_SIZES, "num_subtasks", "num_acknowledged_subtasks"),
}
CHECKPOINT_STATUS = _enum("IN_PROGRESS", "COMPLETED", "FAILED")
CHECKPOINT = _object(
    {
        "id": INTEGER,
        "status": CHECKPOINT_STATUS,
        "is_savepoint": FLAG,
        "savepointFormat": _or_null(TEXT),
        "trigger_timestamp": TIME,
        **_ACKNOWLEDGED,
        "checkpoint_type": _enum(
            "CHECKPOINT", "UNALIGNED_CHECKPOINT", "SAVEPOINT", "SYNC_SAVEPOINT"
        ),
        "tasks": _map(_object({"id": INTEGER, "status": CHECKPOINT_STATUS, **_ACKNOWLEDGED})),
    },
    {"external_path": TEXT, "discarded": FLAG, "failure_timestamp": TIME, "failure_message": TEXT},
)
FAILURE = _object(
    {
        "exceptionName": TEXT,
        "stacktrace": TEXT,
        "timestamp": TIME,
        **_all(_or_null(TEXT), "taskName", "location", "taskManagerId"),
        "message": TEXT,
        "notes": _list(TEXT),
    }
)
RESOURCE = _object(
    {
        **_all(
            NUMBER,
            "cpuCores",
            "taskHeapMemory",
            "taskOffHeapMemory",
            "managedMemory",
            "networkMemory",
        ),
        "extendedResources": {"type": "object"},
    }
)
WORKER = {
    "id": TEXT,
    "path": TEXT,
    **_all(INTEGER, "dataPort", "jmxPort", "timeSinceLastHeartbeat", "slotsNumber", "freeSlots"),
    **_all(RESOURCE, "totalResource", "freeResource"),
    "hardware": _object(_all(INTEGER, "cpuCores", "physicalMemory", "freeMemory", "managedMemory")),
    "memoryConfiguration": {"type": "object"},
    "blocked": FLAG,
}
_NETTY = tuple(
    f"nettyShuffleMemory{kind}{what}"
    for kind in ("Segments", "")
    for what in ("Available", "Used", "Total")
)
_PLACE = {"job-id": HEX, "vertex-id": HEX, "task": TEXT, "subtask": INTEGER, "operator": TEXT}
FLAME_NODE = _object({"name": TEXT, "value": INTEGER, "children": _list({"type": "object"})})

SCHEMAS: dict[str, Schema] = {
    "Errors": _object({"errors": _list(TEXT)}),
    "Empty": {"type": "object"},
    "Text": TEXT,
    "Events": TEXT,
    "Health": _object({"status": _enum("ok")}),
    "Readiness": _object({"status": _enum("ready", "not ready"), "reasons": _list(TEXT)}),
    "Overview": _object(
        {
            **_all(
                INTEGER,
                "taskmanagers",
                "slots-total",
                "slots-available",
                "taskmanagers-blocked",
                "slots-free-and-blocked",
            ),
            **_all(INTEGER, "jobs-running", "jobs-finished", "jobs-cancelled", "jobs-failed"),
            **_all(TEXT, "flink-version", "flink-commit"),
        }
    ),
    "DashboardConfig": _object(
        {
            **_all(INTEGER, "refresh-interval", "timezone-offset"),
            **_all(TEXT, "timezone-name", "flink-version", "flink-revision"),
            "features": _object(_all(FLAG, "web-submit", "web-cancel", "web-history")),
        }
    ),
    "Jobs": _object({"jobs": _list(_object({"id": HEX, "status": JOB_STATE}))}),
    "JobsOverview": _object(
        {
            "jobs": _list(
                _object(
                    {
                        "jid": HEX,
                        "name": TEXT,
                        "state": JOB_STATE,
                        **_all(TIME, "start-time", "end-time", "duration", "last-modification"),
                        "tasks": _object(
                            _all(INTEGER, "total", *(state.lower() for state in TASK_STATES))
                        ),
                    }
                )
            )
        }
    ),
    "Job": _object(
        {
            "jid": HEX,
            "name": TEXT,
            "isStoppable": FLAG,
            "state": JOB_STATE,
            **_all(TIME, "start-time", "end-time", "duration", "now"),
            "maxParallelism": INTEGER,
            "timestamps": _object(_all(TIME, *JOB_STATE["enum"])),
            "vertices": _list(
                _object(
                    {
                        "id": HEX,
                        "name": TEXT,
                        **_all(INTEGER, "maxParallelism", "parallelism"),
                        "status": TASK_STATE,
                        **_all(TIME, "start-time", "end-time", "duration"),
                        "tasks": STATE_COUNTS,
                        "metrics": IO_METRICS,
                    }
                )
            ),
            "status-counts": STATE_COUNTS,
            "plan": PLAN,
        }
    ),
    "JobStatus": _object({"status": JOB_STATE}),
    "JobPlan": _object({"plan": PLAN}),
    "JobConfig": _object(
        {
            "jid": HEX,
            "name": TEXT,
            "execution-config": _object(
                {
                    **_all(TEXT, "execution-mode", "restart-strategy"),
                    "job-parallelism": INTEGER,
                    "object-reuse-mode": FLAG,
                    "user-config": {"type": "object"},
                }
            ),
        }
    ),
    "Exceptions": _object(
        {
            "root-exception": _or_null(TEXT),
            "timestamp": _or_null(TIME),
            "all-exceptions": _list(
                _object(
                    {
                        "exception": TEXT,
                        "task": TEXT,
                        "location": _or_null(TEXT),
                        "timestamp": TIME,
                        "taskManagerId": _or_null(TEXT),
                    }
                )
            ),
            "truncated": FLAG,
            "exceptionHistory": _object(
                {
                    "entries": _list(
                        {"allOf": [FAILURE, _object({"concurrentExceptions": _list(FAILURE)})]}
                    ),
                    "truncated": FLAG,
                }
            ),
        }
    ),
    "Metrics": _list(_object({"id": TEXT}, {"value": TEXT})),
    "AggregatedMetrics": _list(_object({"id": TEXT}, _all(NUMBER, "min", "max", "avg", "sum"))),
    "Accumulators": _object(
        {
            "job-accumulators": _list({"type": "object"}),
            "user-task-accumulators": _list(ACCUMULATOR),
            "serialized-user-task-accumulators": {"type": "object"},
        }
    ),
    "VertexAccumulators": _object({"id": HEX, "user-accumulators": _list(ACCUMULATOR)}),
    "SubtaskAccumulators": _object(
        {
            "id": HEX,
            "parallelism": INTEGER,
            "subtasks": _list(
                _object(
                    {
                        **_all(INTEGER, "subtask", "attempt"),
                        **_all(TEXT, "host", "endpoint"),
                        "user-accumulators": _list(ACCUMULATOR),
                    }
                )
            ),
        }
    ),
    "ExecutionResult": _object(
        {
            "status": _object({"id": _enum("IN_PROGRESS", "COMPLETED")}),
            "job-execution-result": _or_null({"type": "object"}),
        }
    ),
    "Vertex": _object(
        {
            "id": HEX,
            "name": TEXT,
            **_all(INTEGER, "parallelism", "maxParallelism"),
            "now": TIME,
            "subtasks": _list(SUBTASK),
            "aggregated": AGGREGATED,
        }
    ),
    "Subtask": SUBTASK,
    "BackPressure": _object(
        {
            "status": _enum("ok", "deprecated"),
            **_all(_or_null(LEVEL), "backpressureLevel", "backpressure-level"),
            "end-timestamp": _or_null(TIME),
            "subtasks": _list(
                _object(
                    {
                        **_all(INTEGER, "subtask", "attempt-number"),
                        **_all(LEVEL, "backpressureLevel", "backpressure-level"),
                        **_all(
                            {"type": "number", "minimum": 0, "maximum": 1},
                            "ratio",
                            "idleRatio",
                            "busyRatio",
                        ),
                    }
                )
            ),
        }
    ),
    "SubtaskTimes": _object(
        {
            "id": HEX,
            "name": TEXT,
            "now": TIME,
            "subtasks": _list(
                _object(
                    {"subtask": INTEGER, "host": TEXT, "duration": TIME, "timestamps": _map(TIME)}
                )
            ),
        }
    ),
    "VertexTaskManagers": _object(
        {
            "id": HEX,
            "name": TEXT,
            "now": TIME,
            "taskmanagers": _list(
                _object(
                    {
                        **_all(TEXT, "host", "taskmanager-id"),
                        "status": TASK_STATE,
                        **_all(TIME, "start-time", "end-time", "duration"),
                        "metrics": IO_METRICS,
                        "status-counts": STATE_COUNTS,
                        "aggregated": AGGREGATED,
                    }
                )
            ),
        }
    ),
    "Checkpoints": _object(
        {
            "counts": _object(
                _all(INTEGER, "restored", "total", "in_progress", "completed", "failed")
            ),
            "summary": _object(_all(DISTRIBUTION, "end_to_end_duration", *_SIZES)),
            "latest": _object(
                {
                    **_all(_or_null(CHECKPOINT), "completed", "savepoint", "failed"),
                    "restored": _or_null(
                        _object(
                            {
                                "id": INTEGER,
                                "restore_timestamp": TIME,
                                "is_savepoint": FLAG,
                                "external_path": TEXT,
                            }
                        )
                    ),
                }
            ),
            "history": _list(CHECKPOINT),
        }
    ),
    "CheckpointConfig": _object(
        {
            "mode": _enum("exactly_once", "at_least_once"),
            **_all(
                INTEGER,
                "interval",
                "timeout",
                "min_pause",
                "max_concurrent",
                "tolerable_failed_checkpoints",
            ),
            **_all(
                INTEGER, "aligned_checkpoint_timeout", "changelog_periodic_materialization_interval"
            ),
            "externalization": _object(_all(FLAG, "enabled", "delete_on_cancellation")),
            **_all(TEXT, "state_backend", "checkpoint_storage", "changelog_storage"),
            **_all(
                FLAG,
                "unaligned_checkpoints",
                "checkpoints_after_tasks_finish",
                "state_changelog_enabled",
            ),
        }
    ),
    "Checkpoint": CHECKPOINT,
    "CheckpointSubtasks": _object(
        {
            "id": INTEGER,
            "status": CHECKPOINT_STATUS,
            **_ACKNOWLEDGED,
            "summary": _object(
                {
                    **_all(
                        DISTRIBUTION,
                        "checkpointed_size",
                        "state_size",
                        "end_to_end_duration",
                        "start_delay",
                    ),
                    "checkpoint_duration": _object(_all(DISTRIBUTION, "sync", "async")),
                    "alignment": _object(
                        _all(DISTRIBUTION, "buffered", "processed", "persisted", "duration")
                    ),
                }
            ),
            "subtasks": _list(_object({"index": INTEGER, "status": TEXT})),
        }
    ),
    "TaskManagers": _object({"taskmanagers": _list(_object(WORKER))}),
    "TaskManagerDetails": _object(
        {
            **WORKER,
            "allocatedSlots": _list(_object({"jobId": HEX, "resource": RESOURCE})),
            "metrics": _object(
                {
                    **_all(INTEGER, "heapUsed", *_NETTY),
                    "garbageCollectors": _list(
                        _object({"name": TEXT, "count": INTEGER, "time": INTEGER})
                    ),
                }
            ),
        }
    ),
    "Settings": _list(_object({"key": TEXT, "value": TEXT})),
    "Environment": _object(
        {"jvm": _object({"version": TEXT, "arch": TEXT, "options": _list(TEXT)}), "classpath": TEXT}
    ),
    "Logs": _object({"logs": _list(_object({"name": TEXT, "size": INTEGER, "mtime": INTEGER}))}),
    "ThreadDump": _object(
        {"threadInfos": _list(_object({"threadName": TEXT, "stringifiedThreadInfo": TEXT}))}
    ),
    "Triggered": _object({"request-id": HEX}),
    "OperationStatus": _object(
        {
            "status": _object({"id": _enum("IN_PROGRESS", "COMPLETED")}),
            "operation": _or_null({"type": "object"}),
        }
    ),
    "Requirements": _map(
        _object({"parallelism": _object(_all(INTEGER, "lowerBound", "upperBound"))})
    ),
    "FlameGraph": _object({"endTimestamp": TIME, "data": FLAME_NODE}),
    "Asyncio": _object(
        {
            "now": TIME,
            "loop": TEXT,
            "debug": FLAG,
            "lag-ms": _object(_all(NUMBER, "last", "p50", "p99", "max")),
            "slow-callbacks": _list(_object({**_PLACE, "count": NUMBER, "slowest-ms": NUMBER})),
            "holds": _list(
                _object(
                    {
                        "time": TIME,
                        **_all(TEXT, "job", "operator", "subtask", "task"),
                        **_all(NUMBER, "ms", "cpu-ms"),
                        "stack": _list(TEXT),
                    }
                )
            ),
            "late-unexplained": INTEGER,
            "async-calls": _list(_object({**_PLACE, "in-flight": NUMBER, "capacity": NUMBER})),
            "task-count": INTEGER,
            "tasks": _list(
                _object({"name": TEXT, "state": _enum("running", "waiting"), "stack": _list(TEXT)})
            ),
        }
    ),
    "Processes": _object(
        {
            "processes": _list(
                _object(
                    {
                        "id": TEXT,
                        "is-here": FLAG,
                        "tasks": INTEGER,
                        "silence-ms": INTEGER,
                        **{
                            name: _or_null(NUMBER)
                            for name in (
                                "lag-ms",
                                "lag-max-ms",
                                "cpu-s",
                                "memory",
                                "network-used",
                                "network-total",
                            )
                        },
                    }
                )
            )
        }
    ),
    "LogRecords": _object(
        {
            "records": _list(
                _object(
                    {
                        "number": INTEGER,
                        "time": TIME,
                        **_all(TEXT, "level", "logger", "message", "stack"),
                    }
                )
            )
        }
    ),
    "Series": _object(
        {"now": TIME, "interval": INTEGER},
        {"metrics": _list(TEXT), "times": _list(TIME), "series": _map(_list(_or_null(NUMBER)))},
    ),
    "StateOverview": _object(
        {
            "operators": _list(
                _object(
                    {
                        "operator": TEXT,
                        "name": TEXT,
                        "vertex-id": HEX,
                        "backend": TEXT,
                        "subtasks": _list(
                            _object(
                                {
                                    "subtask": INTEGER,
                                    "states": _or_null(
                                        _list(
                                            _object({"name": TEXT, "keys": INTEGER, "more": FLAG})
                                        )
                                    ),
                                    "task-checkpoint-size": _or_null(NUMBER),
                                }
                            )
                        ),
                    }
                )
            )
        }
    ),
    "StateValue": _object(
        {"name": TEXT},
        {
            "key": TEXT,
            "subtask": INTEGER,
            "found": FLAG,
            "value": _or_null(TEXT),
            "items": _list(_object({"key": TEXT, "value": TEXT})),
        },
    ),
}
"""JSON Schemas of answers, by the name under which a route refers to them."""

TRIGGER: Schema = {
    "type": "string",
    "pattern": "^[0-9a-f]{32}$",
    "description": "Of the client: the same id is the same request",
}
FORMAT = _enum("CANONICAL", "NATIVE")
DIRECTORY = _all(_or_null(TEXT), "target-directory", "targetDirectory")
"""Fields for the target directory. Flink uses one spelling for a savepoint and the other one for a
stop. In aioflow both calls accept both spellings.
"""

BODIES: dict[str, Schema] = {
    "SavepointRequest": _only(
        {**DIRECTORY, "cancel-job": FLAG, "formatType": FORMAT, "triggerId": TRIGGER}
    ),
    "StopRequest": _only({**DIRECTORY, "drain": FLAG, "formatType": FORMAT, "triggerId": TRIGGER}),
    "CheckpointRequest": _only(
        {"checkpointType": _enum("CONFIGURED", "FULL", "INCREMENTAL"), "triggerId": TRIGGER}
    ),
    "DisposalRequest": _only({"savepoint-path": TEXT}),
    "Anything": {"type": "object"},
}
"""JSON Schemas of the request bodies.

An unknown field is refused. Otherwise the misspelt field `drian` would stop a job without draining
it.
"""
