"""aioflow: a stateful stream processor that lives inside an asyncio service. Flink's StreamTask
runtime, rebuilt for Python.

    import aioflow as af
    flow = af.Flow("wordcount")
    counts = flow.source(af.io.lines("genesis.txt")).flat_map(str.split).key_by(str.lower).count()
    counts.sink(af.io.stdout())
    af.run(flow)

Names are loaded when they are first used, so importing the package costs little.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "api.flow": "Flow",
    "api.streams": "DataStream KeyedStream ConnectedStreams BroadcastStream WindowedStream",
    "api.job": "Job JobResult",
    "api.options": "RunArguments",
    "api.subscription": "Subscription",
    "api.runner": "run",
    "api.settings": "configured",
    "checkpoint.savepoint": "Savepoint",
    "cluster.autoscaler": "Autoscaler",
    "cluster.collector": "tune_gc",
    "cluster.execution_graph": "JobStatus",
    "cluster.remote": "RemoteCluster",
    "cluster.restart": "RestartPolicy exponential_delay failure_rate fixed_delay no_restart",
    "core.elements": "GlobalWindow MAX_WATERMARK TimeWindow",
    "core.errors": (
        "AioflowError Broken CancellationTimeout CheckpointError Closed GraphError "
        "InsufficientBuffers JobCanceled JobError JobFailed "
        "JobNotRunning LocalProtocolError MailboxClosed MalformedInput NoResourceAvailable "
        "NotAuthenticated ProducerFailed ProtocolError "
        "RemoteError "
        "RemoteProtocolError RescaleError RestoreError StateError TypeNotSupported"
    ),
    "expressions.roots": "col left lit right when",
    "expressions.nodes": "Expr",
    "core.functions": (
        "AggregateFunction BroadcastProcessFunction CheckpointedFunction CoProcessFunction Failed "
        "FilterFunction FlatMapFunction "
        "Function KeyedBroadcastProcessFunction KeyedCoProcessFunction KeyedProcessFunction "
        "MapFunction OutputTag Pair ProcessContext "
        "ProcessFunction ProcessWindowFunction RuntimeContext TimerService TriggerResult "
        "WindowContext WindowResult"
    ),
    "core.signatures": "Resource resource use",
    "operators.call_pool": "Retry",
    "core.scope": "current_scope",
    "core.states": (
        "AggregatingStateDescriptor ListStateDescriptor MapStateDescriptor "
        "ReducingStateDescriptor StateTtl ValueStateDescriptor "
        "AggregatingState ListState MapState RawKeyedState ReducingState ValueState"
    ),
    "core.wire.types": "register_type",
    "inspection.json_logs": "JsonFormatter",
    "io.changes": "Change Upsert",
    "monitoring.app": "monitor_app",
    "monitoring.options": "MonitorArguments",
    "network.security": "TlsFiles",
    "operators.aggregate.functions": (
        "agg collect count distinct first last max max_by mean min min_by sum top"
    ),
    "operators.sink": "CommitId Committer GlobalCommitter Sink SinkWriter",
    "operators.source": "Source SourceContext SourceReader Split",
    "operators.window.triggers": (
        "Trigger continuous early on_count on_processing_time on_watermark purging"
    ),
    "operators.watermarks": "WatermarkStrategy",
    "operators.window.assigners": (
        "Evictor global_window keep_last keep_within session sliding tumbling"
    ),
    "spark.failures": "SparkError",
    "spark.runner.runner": "Spark",
    "spark.bridge.session": "SparkBridge",
    "spark.workers.runner": "SparkWorkers",
    "sql.errors": "SqlError",
}
"""Module -> the public names that live there."""

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

_SHADOWING = frozenset({"sum", "min", "max"})
"""Public, but a star import would replace the built-ins."""

_UNSHADOWED = [name for name in _HOME_OF if name not in _SHADOWING]
__all__ = sorted(["io", "testing", *_UNSHADOWED])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is not None:
        value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    elif name in ("io", "testing"):
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, "io", "testing"})
