"""The families of metrics on the page for Prometheus: name, type, help and unit of each.

A task names its metrics as Flink does. `family_of` returns the family and the labels under which
the page shows such a metric. Prometheus wants snake case, base units (seconds, bytes, ratios), and
counters that end in `_total`. Metrics that `rate()` or another family replaces have no family.

Metrics that user code makes with `ctx.metrics` are named `aioflow_user_NAME`. Processes send each
other only the values of these metrics, so their types follow from their names (see `_of_program`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK

__all__ = ["Family", "Kind", "Place", "family_of"]


class Kind(Enum):
    """The type of a family. The value is its name in Prometheus's text format."""

    COUNTER = "counter"
    GAUGE = "gauge"
    SUMMARY = "summary"
    UNKNOWN = "untyped"


Convert = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Family:
    """A family of metrics on the page for Prometheus."""

    name: str
    kind: Kind
    help: str
    convert: Convert | None = None
    """Function that converts the value of a metric to the value on the page. None if the values are
    equal.
    """


@dataclass(frozen=True, slots=True)
class Place:
    """Where one metric appears on the page: its family, its labels, and how its value is shown."""

    family: Family
    labels: Mapping[str, str] = field(default_factory=dict)
    suffix: str = ""
    """Text that follows the name of the family in the line, such as `_count` in a summary."""
    times: str = ""
    """Name of a metric by which the value is multiplied; "" for none. For example, a sum is the
    mean times the count.
    """


def _seconds(ms: float) -> float:
    return ms / 1000


def _seconds_of_nanos(nanos: float) -> float:
    return nanos / 1e9


def _share(ms_per_second: float) -> float:
    return ms_per_second / 1000


def _known_value(value: float) -> float:
    """Returns `value`, or NaN for -1, which means that an event has not happened."""
    return math.nan if value == -1 else value


def _known_seconds(ms: float) -> float:
    return math.nan if ms == -1 else ms / 1000


def _event_time(watermark: float) -> float:
    """Converts a watermark to seconds: NaN before the first watermark, infinity after the end."""
    if watermark <= MIN_WATERMARK:
        return math.nan
    return math.inf if watermark >= MAX_WATERMARK else watermark / 1000


def _counter(name: str, text: str, convert: Convert | None = None) -> Family:
    return Family(f"{name}_total", Kind.COUNTER, text, convert)


def _gauge(name: str, text: str, convert: Convert | None = None) -> Family:
    return Family(name, Kind.GAUGE, text, convert)


_CLUSTER = {
    "numRegisteredTaskManagers": _gauge("aioflow_taskmanagers", "Registered TaskManagers."),
    "numRunningJobs": _gauge("aioflow_jobs", "Jobs that have not ended."),
    "taskSlotsAvailable": _gauge("aioflow_slots_available", "Slots without a job."),
    "taskSlotsTotal": _gauge("aioflow_slots", "Slots of all TaskManagers."),
    "fenced_total": _counter(
        "aioflow_fenced_messages", "Refused messages of replaced leaders, workers and attempts."
    ),
}

_NETWORK = "Status.Shuffle.Netty"
_PROCESS = {
    "Status.Process.CPU.Time": _counter(
        "aioflow_process_cpu_seconds", "Processor time of the process."
    ),
    "Status.Process.Memory.Peak": _gauge(
        "aioflow_process_memory_peak_bytes", "Largest resident memory of the process so far."
    ),
    "Status.Loop.lagMs": _gauge(
        "aioflow_process_loop_lag_seconds", "Last lag of the event loop.", _seconds
    ),
    "Status.Loop.lagMsMax": _gauge(
        "aioflow_process_loop_lag_max_seconds", "Largest recent lag of the event loop.", _seconds
    ),
    f"{_NETWORK}.AvailableMemory": _gauge(
        "aioflow_process_network_memory_available_bytes", "Free memory for data between tasks."
    ),
    f"{_NETWORK}.UsedMemory": _gauge(
        "aioflow_process_network_memory_used_bytes", "Memory of the data between tasks."
    ),
    f"{_NETWORK}.TotalMemory": _gauge(
        "aioflow_process_network_memory_bytes", "Whole memory for data between tasks."
    ),
    f"{_NETWORK}.RequestedMemoryUsage": _gauge(
        "aioflow_process_network_memory_requested_ratio",
        "Share of the memory for data between tasks that tasks have requested.",
        lambda percent: percent / 100,
    ),
    f"{_NETWORK}.OverdraftMemory": _gauge(
        "aioflow_process_network_memory_overdraft_bytes",
        "Memory that pools use beyond their sizes.",
    ),
    f"{_NETWORK}.WaitingPools": _gauge(
        "aioflow_process_network_pools_waiting", "Pools without room."
    ),
}

_CHECKPOINT = "aioflow_job_last_checkpoint"
_JOB = {
    "numRestarts": _counter("aioflow_job_restarts", "Restarts of the job after failures."),
    "numRescales": _counter("aioflow_job_rescales", "Changes of the job's parallelism."),
    "uptime": _gauge(
        "aioflow_job_uptime_seconds", "Time since the job is RUNNING.", _known_seconds
    ),
    "downtime": _gauge(
        "aioflow_job_downtime_seconds",
        "Time since the failure that the job recovers from.",
        _seconds,
    ),
    "numberOfInProgressCheckpoints": _gauge(
        "aioflow_job_checkpoints_in_progress", "Checkpoints that have begun and not ended."
    ),
    "inProgressCheckpointAge": _gauge(
        "aioflow_job_checkpoint_in_progress_age_seconds",
        "Age of the oldest checkpoint that has not ended.",
        _seconds,
    ),
    "numberOfCompletedCheckpoints": _counter(
        "aioflow_job_checkpoints_completed", "Completed checkpoints."
    ),
    "numberOfFailedCheckpoints": _counter(
        "aioflow_job_checkpoints_failed", "Failed and aborted checkpoints."
    ),
    "totalNumberOfCheckpoints": _counter(
        "aioflow_job_checkpoints_triggered", "Checkpoints that have begun."
    ),
    "lastCompletedCheckpointId": _gauge(
        f"{_CHECKPOINT}_id", "Number of the last completed checkpoint.", _known_value
    ),
    "lastCheckpointDuration": _gauge(
        f"{_CHECKPOINT}_duration_seconds",
        "Duration of the last completed checkpoint.",
        _known_seconds,
    ),
    "lastCheckpointSize": _gauge(
        f"{_CHECKPOINT}_size_bytes", "Bytes that the last checkpoint wrote.", _known_value
    ),
    "lastCheckpointFullSize": _gauge(
        f"{_CHECKPOINT}_full_size_bytes", "Size of the state in the last checkpoint.", _known_value
    ),
    "lastCheckpointProcessedData": _gauge(
        f"{_CHECKPOINT}_processed_bytes",
        "Bytes that tasks processed while the barriers of the last checkpoint aligned.",
        _known_value,
    ),
    "lastCheckpointPersistedData": _gauge(
        f"{_CHECKPOINT}_persisted_bytes",
        "Data between tasks that the last unaligned checkpoint stored.",
        _known_value,
    ),
    "lastCheckpointRestoreTimestamp": _gauge(
        "aioflow_job_last_restore_timestamp_seconds",
        "Unix time of the last restore from a checkpoint.",
        _known_seconds,
    ),
}
_STATE = re.compile(r"([a-z]+)(State|TimeTotal)")
_JOB_STATE = _gauge("aioflow_job_state", "1 for the present status of the job, 0 for the others.")
_JOB_STATE_TIME = _counter(
    "aioflow_job_state_seconds", "Time that the job has spent in each status.", _seconds
)

_INPUT = "Shuffle.Netty.Input"
_OUTPUT = "Shuffle.Netty.Output.Buffers"
_TASK = {
    "idleTimeMsPerSecond": _gauge(
        "aioflow_task_idle_ratio", "Share of the time without input.", _share
    ),
    "busyTimeMsPerSecond": _gauge(
        "aioflow_task_busy_ratio", "Share of the time spent on records.", _share
    ),
    "backPressuredTimeMsPerSecond": _gauge(
        "aioflow_task_backpressured_ratio", "Share of the time without room for output.", _share
    ),
    "softBackPressuredTimeMsPerSecond": _gauge(
        "aioflow_task_soft_backpressured_ratio", "Share of the time parked without room.", _share
    ),
    "hardBackPressuredTimeMsPerSecond": _gauge(
        "aioflow_task_hard_backpressured_ratio",
        "Share of the time parked because the output of one record exceeded the room.",
        _share,
    ),
    "isBackPressured": _gauge(
        "aioflow_task_backpressured", "1 while the task waits for room for output, otherwise 0."
    ),
    "maxSoftBackPressuredTimeMs": _gauge(
        "aioflow_task_soft_backpressured_max_seconds",
        "Longest recent soft back pressure.",
        _seconds,
    ),
    "maxHardBackPressuredTimeMs": _gauge(
        "aioflow_task_hard_backpressured_max_seconds",
        "Longest recent hard back pressure.",
        _seconds,
    ),
    "accumulateIdleTimeMs": _counter(
        "aioflow_task_idle_seconds", "Time without input since the start.", _seconds
    ),
    "accumulateBackPressuredTimeMs": _counter(
        "aioflow_task_backpressured_seconds",
        "Time without room for output since the start.",
        _seconds,
    ),
    "accumulateBusyTimeMs": _counter(
        "aioflow_task_busy_seconds", "Time spent on records since the start.", _seconds
    ),
    "mailboxMailsPerSecond": _gauge(
        "aioflow_task_mailbox_mails_per_second", "Mails that the task handles in a second."
    ),
    "mailboxLatencyMs": _gauge(
        "aioflow_task_mailbox_latency_seconds", "Time that mails wait.", _seconds
    ),
    "mailboxQueueSize": _gauge("aioflow_task_mailbox_queue_size", "Mails that wait."),
    "slowCallbacks": _counter("aioflow_task_slow_callbacks", "Actions that held the event loop."),
    "numRecordsIn": _counter("aioflow_task_records_in", "Records that the task has read."),
    "numRecordsOut": _counter("aioflow_task_records_out", "Records that the task has emitted."),
    "numBuffersOut": _counter("aioflow_task_batches_out", "Batches that the task has emitted."),
    "numBytesOut": _counter("aioflow_task_out_bytes", "Bytes sent to other processes."),
    "numBytesIn": _counter("aioflow_task_in_bytes", "Bytes received from other processes."),
    "numFiredTimers": _counter("aioflow_task_timers_fired", "Timers that have fired."),
    "currentInputWatermark": _gauge(
        "aioflow_task_input_watermark_timestamp_seconds", "Event time of the input.", _event_time
    ),
    "currentOutputWatermark": _gauge(
        "aioflow_task_output_watermark_timestamp_seconds", "Event time of the output.", _event_time
    ),
    f"{_OUTPUT}.outputQueueLength": _gauge(
        "aioflow_task_output_queue_batches", "Batches that consumers have not taken."
    ),
    f"{_OUTPUT}.outputQueueSize": _gauge(
        "aioflow_task_output_queue_bytes", "Bytes that consumers have not taken."
    ),
    f"{_OUTPUT}.outPoolUsage": _gauge(
        "aioflow_task_output_pool_usage_ratio", "Used share of the room for output."
    ),
    f"{_INPUT}.numBytesInLocal": _counter(
        "aioflow_task_local_in_bytes", "Bytes received from tasks of the same process."
    ),
    f"{_INPUT}.numBytesInRemote": _counter(
        "aioflow_task_remote_in_bytes", "Bytes received from tasks of other processes."
    ),
    f"{_INPUT}.numBuffersInLocal": _counter(
        "aioflow_task_local_batches_in", "Batches received from tasks of the same process."
    ),
    f"{_INPUT}.numBuffersInRemote": _counter(
        "aioflow_task_remote_batches_in", "Batches received from tasks of other processes."
    ),
    f"{_INPUT}.Buffers.inputQueueLength": _gauge(
        "aioflow_task_input_queue_batches", "Batches that wait to be read."
    ),
    f"{_INPUT}.Buffers.inputQueueSize": _gauge(
        "aioflow_task_input_queue_bytes", "Bytes that wait to be read."
    ),
    f"{_INPUT}.Buffers.inPoolUsage": _gauge(
        "aioflow_task_input_pool_usage_ratio", "Used share of the room for input."
    ),
    f"{_INPUT}.Buffers.inputFloatingBuffersUsage": _gauge(
        "aioflow_task_input_floating_usage_ratio", "Used share of the floating buffers."
    ),
    f"{_INPUT}.Buffers.inputExclusiveBuffersUsage": _gauge(
        "aioflow_task_input_exclusive_usage_ratio", "Used share of the exclusive buffers."
    ),
    f"{_INPUT}.Buffers.inputCredits": _gauge(
        "aioflow_task_input_credits", "Buffers that producers in other processes may still fill."
    ),
    "debloatedBufferSize": _gauge("aioflow_task_batch_records", "Target size of an input batch."),
    "estimatedTimeToConsumeBuffersMs": _gauge(
        "aioflow_task_input_queue_seconds", "Estimated time to read the waiting input.", _seconds
    ),
    "checkpointStartDelayNanos": _gauge(
        "aioflow_task_checkpoint_start_delay_seconds",
        "Time from the start of the last checkpoint to its barrier.",
        _seconds_of_nanos,
    ),
    "checkpointAlignmentTime": _gauge(
        "aioflow_task_checkpoint_alignment_seconds",
        "Time from the first to the last barrier of the last checkpoint.",
        _seconds_of_nanos,
    ),
    "lastCheckpointSyncDuration": _gauge(
        "aioflow_task_checkpoint_sync_seconds",
        "Time for which the last checkpoint held the task.",
        _seconds,
    ),
    "lastCheckpointAsyncDuration": _gauge(
        "aioflow_task_checkpoint_async_seconds",
        "Time to write the last checkpoint beside the task.",
        _seconds,
    ),
    "lastCheckpointStateSize": _gauge(
        "aioflow_task_checkpoint_full_size_bytes", "Size of the state in the last checkpoint."
    ),
    "lastCheckpointedSize": _gauge(
        "aioflow_task_checkpoint_size_bytes", "Bytes that the last checkpoint wrote."
    ),
    "currentEmitEventTimeLag": _gauge(
        "aioflow_task_source_event_time_lag_seconds",
        "Time between the event and the emission of the last record.",
        _seconds,
    ),
    "sourceIdleTime": _gauge(
        "aioflow_task_source_idle_seconds", "Time since the source emitted a record.", _seconds
    ),
    "watermarkLag": _gauge(
        "aioflow_task_source_watermark_lag_seconds", "Time since the last watermark.", _seconds
    ),
    "pendingRecords": _gauge(
        "aioflow_task_source_pending_records", "Records that wait in the external system."
    ),
    "initializationTime": _gauge(
        "aioflow_task_initialization_seconds", "Time to open the operators of the task.", _seconds
    ),
    "split.watermark.currentWatermark": _gauge(
        "aioflow_task_split_watermark_timestamp_seconds", "Event time of the split.", _event_time
    ),
    "split.watermark.activeTimeMsPerSecond": _gauge(
        "aioflow_task_split_active_ratio", "Share of the time in which the split was read.", _share
    ),
    "split.watermark.idleTimeMsPerSecond": _gauge(
        "aioflow_task_split_idle_ratio", "Share of the time without elements in the split.", _share
    ),
    "latencyMsP99": _gauge(
        "aioflow_task_latency_p99_seconds", "99th percentile of the latency from sources.", _seconds
    ),
}
_OF_INPUT = re.compile(r"currentInput(\d+)Watermark")
_INPUT_WATERMARK = _gauge(
    "aioflow_task_one_input_watermark_timestamp_seconds",
    "Event time of one of several inputs.",
    _event_time,
)

_OPERATOR = {
    "numRecordsIn": _counter("aioflow_operator_records_in", "Records that the operator has read."),
    "numRecordsOut": _counter(
        "aioflow_operator_records_out", "Records that the operator has emitted."
    ),
    "currentInputWatermark": _gauge(
        "aioflow_operator_input_watermark_timestamp_seconds",
        "Event time of the operator's input.",
        _event_time,
    ),
    "currentOutputWatermark": _gauge(
        "aioflow_operator_output_watermark_timestamp_seconds",
        "Event time of the operator's output.",
        _event_time,
    ),
    "slowCallbacks": _counter(
        "aioflow_operator_slow_callbacks", "Calls of the operator that held the event loop."
    ),
    "slowestCallbackMs": _gauge(
        "aioflow_operator_slowest_callback_seconds",
        "Longest time for which the operator held the event loop.",
        _seconds,
    ),
    "asyncCallsInFlight": _gauge(
        "aioflow_operator_async_calls_in_flight", "Asynchronous calls that have not ended."
    ),
    "asyncCallsMax": _gauge(
        "aioflow_operator_async_calls_max", "Most asynchronous calls at the same time."
    ),
    "numLateRecordsDropped": _counter(
        "aioflow_operator_late_records_dropped", "Late records that were dropped."
    ),
    "numRecordsInErrors": _counter(
        "aioflow_operator_input_errors", "Input that could not be parsed and was skipped."
    ),
}
_LATENCY = "aioflow_operator_latency"
_SUMMARIES = {"latency": ("Latency from a source to the operator.", _seconds)}

_WITHOUT = re.compile(
    r"fullRestarts|[a-z]+Time|changelogBusyTimeMsPerSecond|currentFetchEventTimeLag"
    r"|split\.watermark\.pausedTimeMsPerSecond|Status\.Shuffle\.Netty\.\w+Segments"
    r"|(Shuffle\.Netty\.Input\.)?num\w+PerSecond"
)
"""Matches the names of metrics that have no family. `rate()` or another family replaces them, or
they are always 0.
"""

_TABLES: dict[str, dict[str, Family]] = {
    "cluster": _CLUSTER,
    "process": _PROCESS,
    "job": _JOB,
    "task": _TASK,
    "operator": _OPERATOR,
}

_QUANTILES = {"p50": "0.5", "p95": "0.95", "p99": "0.99"}


def family_of(scope: str, name: str, siblings: Collection[str]) -> Place | None:
    """Returns the `Place` of a metric on the page, or None if the page leaves the metric out.

    `scope` is cluster, process, job, task or operator. `name` is the name in Flink, without the
    labels that are part of it. `siblings` are the names of all metrics of the same owner.
    """
    family = _TABLES[scope].get(name)
    if family is not None:
        return Place(family)
    if scope == "job" and (state := _STATE.fullmatch(name)) is not None:
        family = _JOB_STATE if state[2] == "State" else _JOB_STATE_TIME
        return Place(family, {"state": state[1]})
    if scope == "task" and (one := _OF_INPUT.fullmatch(name)) is not None:
        return Place(_INPUT_WATERMARK, {"input": one[1]})
    if _WITHOUT.fullmatch(name):
        return None
    base, _, part = name.rpartition(".")
    if base in _SUMMARIES:
        text, convert = _SUMMARIES[base]
        return _of_summary(f"aioflow_{scope}_{base}_seconds", text, convert, base, part)
    return _of_program(name, base, part, siblings)


def _of_program(name: str, base: str, part: str, siblings: Collection[str]) -> Place:
    """Returns the `Place` of a metric that user code registered.

    A histogram or a meter is recognised by the metrics that belong to it, such as `NAME.count`. Any
    other metric whose name ends in "total" or "count" is a counter. All other metrics have the type
    "unknown".
    """
    text = "A metric of the program."
    is_meter = base in siblings and f"{base}.count" in siblings
    if base and part == "count" and is_meter:
        return Place(_counter(f"aioflow_user_{_snake(base)}", text))
    if f"{name}.count" in siblings:
        return Place(_gauge(f"aioflow_user_{_snake(name)}_per_second", text))
    if f"{base}.count" in siblings and part in ("count", "min", "max", "mean", *_QUANTILES):
        return _of_summary(f"aioflow_user_{_snake(base)}", text, None, base, part)
    snake = _snake(name)
    if snake.endswith(("total", "count")):
        return Place(_counter(f"aioflow_user_{re.sub('_?(total|count)$', '', snake)}", text))
    return Place(Family(f"aioflow_user_{snake}", Kind.UNKNOWN, text))


def _of_summary(name: str, text: str, convert: Convert | None, base: str, part: str) -> Place:
    """Returns the `Place` of one metric of a histogram: of `part`, such as the count or a quantile.
    Quantiles cover only the latest values.

    `name` is the name of the family, `text` its help, and `base` the name of the histogram.
    """
    if part in ("min", "max"):
        unit = "_seconds" if name.endswith("_seconds") else ""
        whole = f"{name.removesuffix(unit)}_{part}{unit}"
        which = "Smallest" if part == "min" else "Largest"
        return Place(_gauge(whole, f"{which} value so far. {text}", convert))
    family = Family(name, Kind.SUMMARY, text, convert)
    if part == "count":
        return Place(Family(name, Kind.SUMMARY, text), suffix="_count")
    if part == "mean":
        return Place(family, suffix="_sum", times=f"{base}.count")
    return Place(family, {"quantile": _QUANTILES[part]})


_UNFIT = re.compile(r"[^a-z0-9_]+")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def _snake(name: str) -> str:
    """Returns a name in snake case, with the characters that Prometheus allows."""
    return _UNFIT.sub("_", _HUMP.sub("_", name).lower()).strip("_") or "unnamed"
