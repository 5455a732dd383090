"""The options of a run, checked before anything starts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from aioflow.api.checkpoint_options import CheckpointOptions, check_checkpoint_options, store_url
from aioflow.checkpoint.instructions import LATEST
from aioflow.checkpoint.urls import flow_url, join_url
from aioflow.cluster.autoscaler import Autoscaler
from aioflow.cluster.restart import RestartPolicy, no_restart, once_running
from aioflow.core.errors import did_you_mean
from aioflow.core.timeunits import to_ms, to_seconds
from aioflow.monitoring.options import served_options
from aioflow.network.local_pool import network_bytes
from aioflow.state.backend import check_backend
from aioflow.task.environment import CheckpointTaskOptions, TaskOptions

if TYPE_CHECKING:
    from aioflow.checkpoint.instructions import CheckpointSettings
    from aioflow.cluster.gateways import RunningJob
    from aioflow.cluster.heartbeat import HeartbeatOptions
    from aioflow.core.host import Host
    from aioflow.graph.job_graph import JobGraph

__all__ = ["RunArguments", "RunOptions", "Runner", "parse_options"]

COLLECTED = ".collected"
"""Folder in a store for runs that only collect. No flow can have this folder, because `encode_flow`
never returns this name."""

POLICIES = ("no_restart", "fixed_delay", "exponential_delay", "failure_rate")
"""Names of the functions of `aioflow` that make a restart policy."""


FOREIGN = {
    **dict.fromkeys(
        ("checkpoint_interval", "checkpointing_interval", "interval", "checkpoint_every"),
        'every="10s", beside checkpoints=',
    ),
    **dict.fromkeys(
        ("checkpoint_dir", "checkpoint_location", "checkpoint_path", "state_dir", "checkpointing"),
        "checkpoints=, a directory or a URL",
    ),
    **dict.fromkeys(("state_backend", "backend"), 'state="heap" or state="rocksdb"'),
    **dict.fromkeys(
        ("restart_strategy", "restarts", "retries", "max_restarts"),
        'restart=af.fixed_delay(attempts=3, delay="1s")',
    ),
    **dict.fromkeys(("savepoint", "from_savepoint", "restore_from"), "restore=PATH"),
    **dict.fromkeys(("processes", "num_workers", "cpus"), "workers=N"),
    **dict.fromkeys(("cluster", "runner", "master"), 'on=, like on=af.RemoteCluster("host:6123")'),
    **dict.fromkeys(
        ("parallelism", "max_parallelism", "default_parallelism"),
        "parallelism= of af.Flow(...) or of an operator",
    ),
    **dict.fromkeys(("network_buffers", "buffer_memory"), 'network_memory="64MiB"'),
    **dict.fromkeys(("ui", "rest", "dashboard"), 'monitor="HOST:PORT"'),
}
"""Maps names of options in other engines to their spelling in aioflow."""


class Runner(Protocol):
    """The interface of a place where flows run, for the option `on=`."""

    def start(
        self,
        host: Host,
        graph: JobGraph,
        restart: RestartPolicy,
        options: TaskOptions,
        checkpoints: CheckpointSettings | None,
    ) -> RunningJob:
        """Returns the run of one job, not yet started. Raises the errors that prevent a run."""


class RunArguments(TypedDict, total=False):
    """The keyword arguments of `flow.run`, `flow.execute`, `collect` and `af.run`, for type
    checkers and editors. A function that passes them on takes `**options: Unpack[af.RunArguments]`.
    """

    workers: int | Autoscaler
    on: Runner | None
    checkpoints: str | PathLike[str] | None
    every: str | timedelta
    unaligned: bool | str | timedelta
    timeout: str | timedelta
    min_pause: str | timedelta
    max_concurrent: int
    retain: int
    tolerable_failures: int | None
    restore: str | PathLike[str] | None
    fresh: bool
    allow_non_restored: bool
    checkpoint_key: bytes | PathLike[str] | None
    local_recovery: bool | str | PathLike[str]
    state: Any  # Reason: the interface of objects that make backends is internal.
    restart: RestartPolicy
    monitor: str | None
    monitor_options: Mapping[str, Any]
    stop_timeout: str | timedelta
    cancellation_timeout: str | timedelta
    latency_tracking: str | timedelta | None
    network_memory: int | str
    strict: bool
    subscribe: Sequence[Any]  # Reason: streams of any type.
    debug: bool | None
    heartbeat: HeartbeatOptions | None
    host: Host | None
    tasks: TaskOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(CheckpointOptions):
    """The options of `flow.run(**options)`."""

    workers: int | Autoscaler = 0
    """Number of worker processes, or an `af.Autoscaler`. 0: everything runs in this loop.

    Parts of this program (results, inputs, functions as sinks) always run in this process.
    """
    on: Runner | None = None
    """Other place to run the flow: `af.RemoteCluster("host:port", secret=...)`,
    `af.Spark("local[4]")`. None: here.
    """
    state: Any = "heap"
    """State backend: its name, or an object that makes backends."""
    restart: RestartPolicy = field(default_factory=no_restart)
    """Policy that says when a failed job restarts.

    With `checkpoints` the default is `af.exponential_delay()`, which restarts the job after a
    failure of its program only once all tasks have run.
    """
    monitor: str | None = None
    """Address `"HOST:PORT"` at which the dashboard, REST and `/metrics` are served during the
    run. Port 0: any free port.
    """
    monitor_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the monitoring endpoint, by names of `MonitorOptions`: `{"token": ...,
    "enable_control": True}`. By default the endpoint answers requests from this machine, and
    changes nothing.
    """
    stop_timeout: str | timedelta = "30s"
    """Maximum time of a graceful stop, after which the job is cancelled."""
    cancellation_timeout: str | timedelta = "30s"
    """Maximum time for functions to end once the job is cancelled, or has failed. After it the job
    fails with `af.CancellationTimeout`, which names the operator that does not end."""
    latency_tracking: str | timedelta | None = None
    """Time between two markers that each source sends, like "1s", to measure the latency to each
    operator. None: no markers."""
    network_memory: int | str = "64MiB"
    """Memory of each process for data between its tasks: a number of bytes, or a text like
    `"256MiB"`. A producer waits when its share is full. Each process of a cluster has a limit of
    its own for all jobs."""
    strict: bool = False
    """Whether to refuse values that cannot be sent to another process, instead of warning once
    for each edge.
    """
    subscribe: Sequence[Any] = ()
    """Streams whose subscription must not miss a record: the job collects their records from the
    start until `job.subscribe`.
    """
    heartbeat: HeartbeatOptions | None = None
    """Heartbeats of worker processes.

    None: one heartbeat a second, and a process counts as dead after a minute of silence. The end of
    a process is noticed at once.
    """
    debug: bool | None = None
    """Whether to detect functions that change values shared with other operators. None: only in
    asyncio's debug mode."""
    host: Host | None = None
    """The clock, the files and the network of the run. None: the real ones of this machine."""
    tasks: TaskOptions = field(default_factory=TaskOptions)
    """Options of tasks, such as the sizes of batches and slices."""

    @property
    def worker_count(self) -> int:
        """Number of worker processes at first."""
        return self.workers.min if isinstance(self.workers, Autoscaler) else self.workers

    def that_collect(self) -> RunOptions:
        """Returns the options of a run that collects rows in a list or an iterator of the program.

        Rows in memory are gone with the program, so such a run restores no state of another run.
        Such a run has its own place in the store, and does not touch the state of ordinary runs of
        the flow.
        """
        if self.checkpoints is None:
            return self
        store = join_url(store_url(self.checkpoints, "checkpoints"), COLLECTED)
        if self.restore in (None, LATEST):
            return replace(self, checkpoints=store, restore=None, fresh=True)
        return replace(self, checkpoints=store)

    def task_options(self, flow: str) -> TaskOptions:
        """Returns the options of each task of `flow`. Called on the loop that runs the tasks."""
        settings = self.checkpoint_settings()
        checkpoints = (
            None
            if settings is None or settings.store is None
            else CheckpointTaskOptions(store=flow_url(settings.store, flow))
        )
        debug = (
            self.tasks.debug or asyncio.get_running_loop().get_debug()
            if self.debug is None
            else self.debug
        )
        return replace(
            self.tasks,
            state_backend=self.state,
            checkpoints=checkpoints,
            local_recovery=self.local_directory,
            debug=debug,
            replays=self.restart.retries,
            cancellation_timeout_s=self.cancellation_timeout_s,
            latency_interval_ms=self.latency_interval_ms,
            network_bytes=network_bytes(self.network_memory),
            strict=self.strict or self.tasks.strict,
        )

    @property
    def stop_timeout_s(self) -> float:
        return to_seconds(self.stop_timeout, "stop_timeout")

    @property
    def cancellation_timeout_s(self) -> float:
        return to_seconds(self.cancellation_timeout, "cancellation_timeout")

    @property
    def latency_interval_ms(self) -> int | None:
        if self.latency_tracking is None:
            return self.tasks.latency_interval_ms
        return to_ms(self.latency_tracking, "latency_tracking")


def parse_options(given: Mapping[str, Any]) -> RunOptions:
    """Returns `RunOptions` from keyword arguments.

    Raises TypeError for an unknown option. The error names the most similar option that exists.
    """
    _check_names(given)
    options = RunOptions(**given)
    _check_workers(options)
    _check_restart(options)
    check_backend(options.state)
    _check_subscribe(options)
    _check_place(options)
    if options.stop_timeout_s < 0:
        raise ValueError(f"stop_timeout must not be negative, got {options.stop_timeout!r}")
    if options.cancellation_timeout_s < 0:
        raise ValueError(
            f"cancellation_timeout must not be negative, got {options.cancellation_timeout!r}"
        )
    if options.latency_interval_ms is not None and options.latency_interval_ms <= 0:
        raise ValueError(
            f"latency_tracking is {options.latency_tracking!r}, expected the time between two "
            "markers, more than 0, or None for no markers"
        )
    network_bytes(options.network_memory)
    if options.monitor is not None:
        served_options(options.monitor, options.monitor_options)
    elif options.monitor_options:
        raise ValueError(
            'monitor_options= is about an endpoint, and there is none: give monitor="HOST:PORT" too'
        )
    check_checkpoint_options(given, options)
    if options.checkpoints is not None and "restart" not in given:
        # With checkpoints, state survives a failure, so the default is to restart.
        options = replace(options, restart=once_running())
    return options


def _check_names(given: Iterable[str]) -> None:
    known = [f.name for f in fields(RunOptions)]
    for name in given:
        if name not in known:
            hint = (
                f"; it is spelled {FOREIGN[name]}"
                if name in FOREIGN
                else did_you_mean(name, known, "{}=") or f"; expected some of {', '.join(known)}"
            )
            raise TypeError(f"run option {name}= is not known{hint}")


def _check_workers(options: RunOptions) -> None:
    if isinstance(options.workers, Autoscaler):
        if options.checkpoints is None:
            raise ValueError(
                "workers=af.Autoscaler(...) needs checkpoints=: the job goes on from one with more "
                "or fewer processes"
            )
    elif (
        not isinstance(options.workers, int)
        or isinstance(options.workers, bool)
        or options.workers < 0
    ):
        raise ValueError(
            f"workers must be a number of processes, got {options.workers!r}: without processes "
            "of its own it is workers=0"
        )


def _check_restart(options: RunOptions) -> None:
    policy: object = options.restart  # Callers may pass other types than the annotation says.
    if not isinstance(policy, RestartPolicy):
        what = f"{type(policy).__name__}: {policy!r}"
        hint = did_you_mean(policy, POLICIES, "af.{}(...)") if isinstance(policy, str) else ""
        raise TypeError(
            'restart= takes a policy, like af.fixed_delay(attempts=3, delay="1s"), got '
            f"{what}{hint}"
        )


def _check_subscribe(options: RunOptions) -> None:
    streams: object = options.subscribe  # Callers may pass other types than it says.
    if not hasattr(streams, "upstreams") and not isinstance(streams, Iterable):
        what = f"{type(streams).__name__}: {streams!r}"
        raise TypeError(f"subscribe= takes a list of streams, like subscribe=[stream], got {what}")
    if hasattr(options.subscribe, "upstreams"):
        raise TypeError(
            "subscribe= takes a list of streams, got one: write subscribe=[stream] of "
            f"{options.subscribe!r}"
        )


def _check_place(options: RunOptions) -> None:
    place: object = options.on  # Callers may pass other types than it says.
    if isinstance(place, str):
        written = (
            f"af.Spark({place.partition('=')[2] or 'local[*]'!r})"
            if place.startswith(("spark", "local"))
            else f"af.RemoteCluster({place!r}, secret=...)"
        )
        raise TypeError(f"on= takes a place to run, got the text {place!r}: write on={written}")
    if options.on is not None and (options.workers or not hasattr(options.on, "start")):
        raise ValueError(
            "on= takes a place to run, like af.RemoteCluster(...), and no workers= beside it; "
            f"got {options.on!r}"
        )
