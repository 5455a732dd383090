"""`on=af.SparkWorkers(...)`: runs a flow on machines of Spark, by the engine itself with its own
state, timers and checkpoints.

    on = af.SparkWorkers("spark://host:7077", workers=4, slots=2)
    await flow.execute(on=on, checkpoints="s3://bucket/flows")

Spark starts the workers and owns their machines: each worker is one long task in an executor
(`provider`, `worker`). The JobManager in this program (`EmbeddedJobManager`) decides what the
workers run, and what happens when one is lost, as in any cluster. So the run ends with the program.
A flow that must outlive the program needs a cluster.

A Spark session for workers needs settings: enough cores, no second attempts, and protected secrets.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.leadership import LeaderRetrieval
from aioflow.cluster.remote import RemoteRun
from aioflow.cluster.scheduler import slots_needed
from aioflow.cluster.submission import ClusterClient
from aioflow.core.aio import cancel_and_wait, wait_first
from aioflow.core.errors import GraphError, NotAuthenticated, counted, note_once
from aioflow.network.connection import fresh_secret
from aioflow.network.security import SecuredHost, Security, TlsFiles, is_loopback
from aioflow.spark.bridge.calls import check_bridge, check_executors
from aioflow.spark.bridge.connect import is_connect
from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.bridge.settings import check_master
from aioflow.spark.failures import SparkError
from aioflow.spark.runner.translate import with_printing_apart
from aioflow.spark.workers.provider import EmbeddedJobManager, SparkProvider
from aioflow.spark.workers.worker import WorkerTask

if TYPE_CHECKING:
    from aioflow.checkpoint.instructions import CheckpointSettings
    from aioflow.cluster.restart import RestartPolicy
    from aioflow.core.host import Host
    from aioflow.graph.job_graph import JobGraph
    from aioflow.task.environment import TaskOptions

__all__ = [
    "SparkWorkers",
    "SparkWorkersRun",
    "check_cores",
    "check_secrecy",
    "found_in",
    "worker_config",
]

KEPT_FREE = 1
"""Number of cores that are left free for other jobs of a shared session. Without free cores these
jobs would wait for ever, because the workers' tasks do not end.
"""

_ENCRYPTION = ("spark.network.crypto.enabled", "spark.ssl.rpc.enabled")


def worker_config(settings: Mapping[str, str], workers: int) -> dict[str, str]:
    """Returns the default settings of a session that only runs `workers` workers. `settings` are
    the user's settings.
    """
    return {
        # A worker that ends is replaced by a new worker in a new process.
        "spark.task.maxFailures": "1",
        "spark.python.worker.reuse": "false",
        # A standalone master gives an application all cores that it has, unless told otherwise.
        "spark.cores.max": str(workers * int(settings.get("spark.task.cpus", "1"))),
    }


def check_cores(
    master: str, config: Mapping[str, str], workers: int, *, shared: bool, cores: int | None = None
) -> None:
    """Raises SparkError if the session has too few cores for `workers` workers.

    `shared` is whether other jobs use the session too. `cores` is the number of cores of a running
    session; None if not known.
    """
    if config.get("spark.speculation") == "true":
        raise SparkError(
            "spark.speculation is on: Spark would start workers a second time because they take "
            "long, and kill the first; set it to false"
        )
    each = int(config.get("spark.task.cpus", "1"))
    found = _cores_of(master, config) if cores is None else cores
    wanted = workers * each + (KEPT_FREE if shared else 0)
    if found is None or found >= wanted:
        return
    what = f"{workers} workers of {each} cores each" if each > 1 else f"{workers} workers"
    free = f" and {KEPT_FREE} must stay free for the other jobs of this session" if shared else ""
    raise SparkError(
        f"{master} has {found} cores, and {what} need {wanted}: each holds its core for as long "
        f"as the flow runs{free}; "
        "take fewer workers, or a master with more cores"
    )


def found_in(session: Any) -> tuple[int | None, dict[str, str]]:
    """Returns the number of cores of a running session, and its settings. The number is None if it
    may still change.

    Runs in a thread of the bridge.
    """
    context = session.sparkContext
    config = dict(context.getConf().getAll())
    return (
        context.defaultParallelism if re.fullmatch(r"local(\[.*\])?", context.master) else None
    ), config


def check_secrecy(
    address: str, config: Mapping[str, str], *, has_tls: bool, allow_plaintext: bool
) -> None:
    """Raises NotAuthenticated if an eavesdropper could read the records, or the secret on its way
    to the workers.
    """
    if is_loopback(address) or allow_plaintext:
        return
    if not has_tls:
        raise NotAuthenticated(
            f"workers of Spark on other machines would connect to {address} in plain text: give "
            "tls=af.TlsFiles(...), or say that the "
            "network may be trusted with allow_plaintext=True"
        )
    if not any(config.get(name) == "true" for name in _ENCRYPTION):
        raise NotAuthenticated(
            "the secret of the workers would travel in plain text in Spark's tasks: set "
            f"{' or '.join(_ENCRYPTION)} to true in config=, or "
            "say that the network may be trusted with allow_plaintext=True"
        )


def _cores_of(master: str, config: Mapping[str, str]) -> int | None:
    """Returns the number of cores of a session; None if it is not known before the start."""
    if master == "local":
        return 1
    if match := re.fullmatch(r"local\[(\d+|\*)(?:,\s*\d+)?\]", master):
        return (os.cpu_count() or 1) if match[1] == "*" else int(match[1])
    if match := re.fullmatch(r"local-cluster\[(\d+),\s*(\d+),\s*\d+\]", master):
        return int(match[1]) * int(match[2])
    limit = config.get("spark.cores.max")
    return None if limit is None else int(limit)


logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 60.0
"""Time in seconds after which a job that lacks slots starts with fewer slots. More workers may
register later.
"""

WORKER_SILENCE_S = 10.0
"""Maximum time without a heartbeat of a worker before it counts as lost, in seconds. A thread sends
the heartbeats, even while a function blocks the worker's loop.
"""


@dataclass(frozen=True, slots=True)
class SparkWorkers:
    """An option for `on=`: the flow runs in `workers` tasks of the Spark at `master`, each with
    `slots` slots.

    Without `master`, the master of the bridge, of spark-submit or of spark-defaults.conf is used,
    otherwise "local[*]". With `slots=None`, each worker has as many slots as the flow needs.
    `config` are settings of the Spark session that is started for the run. Alternatively, `bridge`
    is the service's own SparkBridge, which stays open after the run. For executors on other
    machines, `config` must contain the address at which they reach this machine
    (`spark.driver.host`). `tls` are the files of a certificate, at the same paths on all machines.
    `allow_plaintext` states that the network may be trusted.
    """

    master: str | None = None
    workers: int = 1
    slots: int | None = None
    config: Mapping[str, str] = field(default_factory=dict, repr=False)
    bridge: SparkBridge | None = None
    tls: TlsFiles | None = None
    allow_plaintext: bool = False

    def __post_init__(self) -> None:
        if self.master is not None:
            check_master(self.master)
        for name in ("workers", "slots"):
            number = getattr(self, name)
            if not (number is None and name == "slots") and (type(number) is not int or number < 1):
                raise ValueError(f"{name} is {number!r}, expected a number of at least 1")
        if self.bridge is not None:
            check_bridge(self.bridge, "bridge")
            check_executors(self.bridge)
            if self.master not in (None, self.bridge.master):
                raise ValueError(
                    f"bridge= is a session on {self.bridge.master!r}, and master= is "
                    f"{self.master!r}: give that of the bridge"
                )

    def start(
        self,
        host: Host,
        graph: JobGraph,
        restart: RestartPolicy,
        options: TaskOptions,
        checkpoints: CheckpointSettings | None = None,
    ) -> SparkWorkersRun:
        """Returns the run of one job.

        Raises GraphError if the flow cannot be sent to the workers, and SparkError if there are too
        few cores or slots.
        """
        graph = with_printing_apart(graph)  # The output of executors would not be visible.
        bridge, owned = self.bridge or self._bridge_of(graph), False
        if bridge is None:
            bridge, owned = SparkBridge(self.master, config=self.config), True
            bridge.defaults |= {"spark.app.name": f"aioflow {graph.name}"}
            bridge.defaults |= worker_config(bridge.settings, self.workers)
            check_secrecy(
                bridge.address,
                bridge.settings,
                has_tls=self.tls is not None,
                allow_plaintext=self.allow_plaintext,
            )
        check_cores(bridge.master, bridge.settings if owned else {}, self.workers, shared=not owned)
        security = Security.of(self.tls, allow_plaintext=self.allow_plaintext)
        return SparkWorkersRun(
            SecuredHost(host, security),
            graph,
            restart,
            options,
            checkpoints,
            self,
            bridge,
            security,
            address=bridge.address,
            owned=owned,
        )

    def slots_for(self, graph: JobGraph) -> int:
        """Returns the number of slots of each worker: as given, or the smallest number that is
        enough for the flow.

        Raises SparkError if the given number is too small.
        """
        needed = slots_needed(graph)
        if self.slots is None:
            return -(-needed // self.workers)
        there = self.workers * self.slots
        if there < needed:
            raise SparkError(
                f"flow {graph.name!r} needs {counted(needed, 'slot')}, and workers={self.workers} "
                f"with slots={self.slots} have {there}: give "
                f"slots={-(-needed // self.workers)}, or leave slots= out, or "
                f"workers={-(-needed // self.slots)}, or a smaller parallelism="
            )
        return self.slots

    def _bridge_of(self, graph: JobGraph) -> SparkBridge | None:
        """Returns the bridge that a source or sink of the flow uses, or None.

        A process can have only one session, so the workers share this session.
        """
        for vertex in graph.vertices:
            for node in vertex.nodes:
                # A sink is an argument of its operator's factory.
                for holder in (node.source, *getattr(node.factory, "args", ())):
                    bridge = getattr(holder, "bridge", None)
                    if not isinstance(bridge, SparkBridge) or is_connect(bridge.master):
                        continue  # A session of a Connect server is not the session of the workers.
                    if self.master not in (None, bridge.master):
                        raise GraphError(
                            f"operator {node.name!r} uses a Spark session on {bridge.master!r}, "
                            "and the workers would be on "
                            f"{self.master!r}: a program can have one session, give both the same "
                            "master"
                        )
                    return bridge
        return None


class SparkWorkersRun(RemoteRun):
    """The run of one job, on a cluster that exists only for this job. `owned` is whether the run
    closes the bridge at its end.
    """

    def __init__(
        self,
        host: Host,
        graph: JobGraph,
        restart: RestartPolicy,
        options: TaskOptions,
        checkpoints: CheckpointSettings | None,
        place: SparkWorkers,
        bridge: SparkBridge,
        security: Security,
        *,
        address: str,
        owned: bool,
    ) -> None:
        self._slots = place.slots_for(graph)  # Called first, because it may raise.
        secret = fresh_secret(host)
        super().__init__(
            host, graph, restart, options, checkpoints, LeaderRetrieval(), secret, address
        )
        self._place = place
        self._bridge = bridge
        self._is_owned = owned
        self._security = security
        self._cancelled_early: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> JobStatus:
        """Starts the workers, runs the job on them, and releases them.

        Cancelling this call cancels the job; no worker outlives it.
        """
        self.job_master.ask = self._ask_early
        try:
            async with AsyncExitStack() as stack:
                if self._is_owned:
                    await stack.enter_async_context(self._bridge)
                provider = await self._bring_up(stack)
                if provider is None:
                    self.job_master.set_status(JobStatus.CANCELED)
                    return JobStatus.CANCELED
                self.job_master.ask = None
                status = await super().run()
                error = self.job_master.error
                if (
                    status is JobStatus.FAILED
                    and error is not None
                    and provider.last_error is not None
                ):
                    note_once(
                        error,
                        "the last worker that was asked of Spark did not come: "
                        f"{provider.last_error}",
                    )
                return status
        # An error that keeps the workers from starting has failed the job.
        except Exception as error:  # noqa: BLE001
            self.job_master.error = error
            self.job_master.set_status(JobStatus.FAILED)
            return JobStatus.FAILED

    async def _bring_up(self, stack: AsyncExitStack) -> SparkProvider | None:
        """Starts all workers, and waits until they are registered.

        Returns None if the job was cancelled meanwhile. Raises SparkError for workers that do not
        start.
        """
        provider = SparkProvider(
            self._bridge, self._task_of, workers=self._place.workers, slots=self._slots
        )
        stack.push_async_callback(provider.close)
        job_manager = EmbeddedJobManager(
            self.host,
            self._secret,
            self._bind,
            self._security,
            provider,
            request_timeout_s=REQUEST_TIMEOUT_S,
            silence_s=WORKER_SILENCE_S,
        )
        session = asyncio.get_running_loop().create_task(
            self._check_session(), name="spark session"
        )
        stack.push_async_callback(cancel_and_wait, [session])
        await wait_first([session, self._cancelled_early])
        if self._cancelled_early.done():
            return None
        session.result()
        await stack.enter_async_context(job_manager)
        stack.callback(provider.begin_closing)
        self._where = "{}:{}".format(*job_manager.address)
        self._client = ClusterClient(
            self.host, LeaderRetrieval((job_manager.address,)), self._secret, self._handlers()
        )
        await wait_first([provider.ready, self._cancelled_early])
        if self._cancelled_early.done():
            return None
        provider.ready.result()
        logger.info(
            "%d workers with %d slots each are there, from Spark at %s",
            len(provider.present),
            self._slots,
            self._bridge.master,
        )
        return provider

    async def _check_session(self) -> None:
        """Starts the session, if there is none, and checks that workers can run in it."""
        session = await self._bridge.session()
        cores, config = await self._bridge.call(found_in, session)
        place, is_alone = self._place, self._is_owned and self._bridge.owns_session
        check_secrecy(
            self._bridge.address,
            config,
            has_tls=place.tls is not None,
            allow_plaintext=place.allow_plaintext,
        )
        check_cores(self._bridge.master, config, place.workers, shared=not is_alone, cores=cores)

    def _task_of(self, worker_id: str) -> WorkerTask:
        host, _, port = self._where.rpartition(":")
        tls = self._place.tls
        files = None if tls is None else (tls.certificate, tls.key, tls.authority)
        return WorkerTask(
            worker_id,
            host,
            int(port),
            self._secret,
            self._slots,
            files,
            self._place.allow_plaintext,
        )

    def _ask_early(self, method: str, *_: object) -> None:
        """Handles a request before there is a JobMaster. Only a cancellation has an effect.

        The caller repeats every other request once there is a JobMaster.
        """
        if method == "cancel" and not self._cancelled_early.done():
            self._cancelled_early.set_result(None)
