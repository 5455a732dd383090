"""A JobManager: accepts jobs, hands out the slots of TaskManagers, and runs a JobMaster per job.

One process contends for the lease in its data directory. While it leads, it is the Dispatcher, the
ResourceManager and all JobMasters. Jobs are stored in that directory before they are acknowledged,
so the next leader finds them. TaskManagers and submitters connect to one address, and prove that
they know the secret. Their requests wait while there is no leader.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.checkpoint.lease import LeaseOptions, current_holder
from aioflow.cluster.cluster_job import ClusterJob, needs_submitter
from aioflow.cluster.dispatcher import Dispatcher, JobView, UnknownJob
from aioflow.cluster.heartbeat import HeartbeatOptions
from aioflow.cluster.job_history import encode_report
from aioflow.cluster.job_session import AttemptKey
from aioflow.cluster.job_store import JobStore, PersistedJob
from aioflow.cluster.jobmanager_peers import Submitters, TaskManagerCalls
from aioflow.cluster.leadership import (
    LEASE_DIRECTORY,
    DirectoryLeases,
    LeaderElection,
    Leadership,
    NoLeader,
)
from aioflow.cluster.placed_tasks import Submitter
from aioflow.cluster.resource_driver import ResourceManager
from aioflow.cluster.resource_manager import SlotManagerOptions
from aioflow.cluster.rpc import RpcConnection, RpcServer
from aioflow.core.aio import wait_first
from aioflow.core.errors import JobNotRunning, NotAuthenticated
from aioflow.core.wire.serializers import Codec
from aioflow.network.security import is_loopback
from aioflow.protocol.handshake import PeerRole

if TYPE_CHECKING:
    from aioflow.cluster.dispatcher import JobRunner
    from aioflow.cluster.gateways import WorkerProvider
    from aioflow.cluster.job_master import JobMaster
    from aioflow.core.host import Host
    from aioflow.core.scope import TapPlace

__all__ = ["JobManager", "JobManagerOptions", "check_bind"]

logger = logging.getLogger(__name__)

RECOVERY_S = 2.0
"""Time that a new leader waits for TaskManagers of its predecessor before it hands out slots."""

LOOK_S = 1.0
"""Interval at which a request that waits for this process to lead checks whether another process
leads.
"""

ENDED_MAX = 20
"""Number of ended jobs that keep their details."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobManagerOptions:
    """Options of a JobManager. `data` is the directory of the lease and the jobs. `port` 0 stands
    for any free port."""

    data: str
    bind: str = "127.0.0.1"
    port: int = 6123
    request_timeout_s: float = 30.0
    """A job that lacks slots for this long runs with the slots that it has.

    If other jobs have the slots that it needs, the job waits in line. If the cluster has too few
    slots for any parallelism, the job fails with NoResourceAvailable.
    """
    lease: LeaseOptions = field(
        default_factory=lambda: LeaseOptions(lease_s=15.0, renew_s=2.0, stop_s=3.0)
    )
    """Durations of the leader's lease. A disk that stalls for ten seconds must not cost the leader
    its lease, because each job of the cluster would restart. Kubernetes elects leaders with the
    same durations.
    """
    heartbeat: HeartbeatOptions = field(default_factory=HeartbeatOptions)


@dataclass(slots=True)
class _Leading:
    """State that exists only while this process leads."""

    token: int
    dispatcher: Dispatcher
    resources: ResourceManager


class JobManager:
    """Runs a JobManager for as long as `run` runs.

    `on_listening(host, port)` is called once peers can connect. `provider` starts TaskManagers when
    there are too few. Without a provider, TaskManagers are started by others and register by
    themselves.
    """

    def __init__(
        self,
        host: Host,
        secret: bytes,
        options: JobManagerOptions,
        on_listening: Callable[[str, int], None],
        provider: WorkerProvider | None = None,
    ) -> None:
        self._host = host
        self._provider = provider
        self._options = options
        self._on_listening = on_listening
        roles = frozenset([PeerRole.SUBMITTER, PeerRole.TASKMANAGER])
        self._server = RpcServer(host, secret, Codec(), roles, self._handlers, self._on_closed)
        self._leading: asyncio.Future[_Leading] = asyncio.get_running_loop().create_future()
        self._jobs: dict[str, ClusterJob] = {}
        self._ended: dict[str, ClusterJob] = {}
        """The last jobs that have ended, by job id, for monitoring."""
        self._submitters = Submitters()
        self._peers: dict[RpcConnection, None] = {}
        self._stopping = asyncio.Event()
        self._shutting_down = False
        """Whether the cluster ends with this leader."""
        self._leases = DirectoryLeases(host, f"{options.data}/{LEASE_DIRECTORY}")
        self._address = ""
        self._fenced = 0
        self._taskmanagers = TaskManagerCalls(
            self._jobs, self._registers, self._now_resources, self._ended
        )

    async def run(self) -> None:
        """Runs until `stop` or a cancellation.

        Raises OSError if this process cannot listen at the address.
        """
        options = self._options
        port = await self._server.listen(options.bind, options.port)
        try:
            self._address = f"{options.bind}:{port}"
            self._on_listening(options.bind, port)
            await self._host.fs.mkdirs(options.data)
            await LeaderElection(self._host, self._leases, self._address, options.lease).run(
                self._lead, self._stopping
            )
        finally:
            if not self._leading.done():
                self._leading.cancel()
            await self._server.close()

    def stop(self) -> None:
        """Releases the lease and ends. Jobs stay stored and run again under the next leader."""
        self._stopping.set()

    async def _lead(self, leadership: Leadership) -> None:
        recovery_s = RECOVERY_S if leadership.token > 1 else 0.0
        slots = SlotManagerOptions(
            workers_max=0,
            idle_timeout_s=None,
            request_timeout_s=self._options.request_timeout_s,
            recovery_s=recovery_s,
        )
        provider = self._provider
        if provider is not None:
            slots = slots.with_provider(provider)
        resources = ResourceManager(
            self._host,
            leadership.token,
            slots,
            self._options.heartbeat,
            self._jobs,
            f"{self._options.bind}",
            provider,
        )
        store = JobStore(self._host, f"{self._options.data}/jobs", leadership)
        dispatcher = Dispatcher(self._host, store, leadership, partial(self._make_job, resources))
        try:
            async with resources:
                async with dispatcher:
                    self._leading.set_result(_Leading(leadership.token, dispatcher, resources))
                    try:
                        await self._stopping.wait()
                    finally:
                        # New requests wait for the next leader from now on. So do requests that
                        # waited for this leader, if it never came to lead: their future is only
                        # replaced once it is done.
                        self._leading = asyncio.get_running_loop().create_future()
                # After the jobs have released their tasks; otherwise they would fail.
                if self._shutting_down:
                    resources.release_all("the cluster is stopped")
        finally:
            self._jobs.clear()
            self._ended.clear()
            self._submitters.clear()
            # Connected peers must learn that this leader is gone.
            for connection in list(self._peers):
                await connection.close()

    async def _make_job(
        self, resources: ResourceManager, job: PersistedJob, token: int, recovered: bool
    ) -> JobRunner:
        submitter = self._submitters.get(job.job_id)
        if recovered and submitter is None and needs_submitter(job):
            submitter = await self._submitters.wait_for(job.job_id)
        made = ClusterJob.submitted(
            self._host,
            job,
            token,
            resources.declare,
            partial(resources.lose_job, job.job_id),
            submitter,
            partial(self._job_over, resources),
            recovered,
        )
        self._jobs[job.job_id] = made
        return made

    def _job_over(self, resources: ResourceManager, job_id: str) -> None:
        self._forget(job_id)
        resources.job_over(job_id)

    def _forget(self, job_id: str) -> None:
        job = self._jobs.pop(job_id, None)
        if job is not None:
            self._fenced += job.fenced_total
            self._ended[job_id] = job
            for oldest in list(self._ended)[:-ENDED_MAX]:
                del self._ended[oldest]

    @property
    def is_stopping(self) -> bool:
        """Whether this process, or the whole cluster, was told to end."""
        return self._shutting_down or self._stopping.is_set()

    # For monitoring.

    @property
    def host(self) -> Host:
        return self._host

    @property
    def options(self) -> JobManagerOptions:
        return self._options

    @property
    def fenced_total(self) -> int:
        """Number of messages of replaced leaders, workers and attempts that the cluster has
        refused.

        Counted since this process became the leader.
        """
        leading = self._now_leading()
        elsewhere = 0 if leading is None else leading.resources.fenced_total
        return (
            self._fenced
            + self._taskmanagers.fenced_total
            + elsewhere
            + sum(job.fenced_total for job in self._jobs.values())
        )

    def known_jobs(self) -> dict[str, ClusterJob]:
        """Returns the running jobs and the last ended jobs, by job id; empty while another process
        leads."""
        return {} if self._now_leading() is None else {**self._ended, **self._jobs}

    def taskmanagers(self) -> list[tuple[str, int, int, float]]:
        """Returns (id, slots, free slots, seconds since last heard) of each TaskManager."""
        leading = self._now_leading()
        if leading is None:
            return []
        return leading.resources.taskmanagers()

    def network_bytes(self, worker_id: str) -> int:
        """Returns the network memory of a TaskManager in bytes; 0 if the TaskManager is gone."""
        leading = self._now_leading()
        return 0 if leading is None else leading.resources.network_bytes(worker_id)

    async def _job_report(self, job_id: str) -> bytes:
        """Returns the encoded report of a job for its submitting process, which shows it to
        users."""
        job = self.known_jobs().get(job_id)
        if job is None:
            raise UnknownJob(f"job {job_id} is not known here; list the jobs")
        master = job.job_master
        workers = [job.report_of_worker(*line) for line in self.taskmanagers()]
        return encode_report(master.history, master.checkpoint_statistics, workers)

    async def ask_taskmanager(self, worker_id: str, what: str, *args: Any) -> Any:
        """Asks a TaskManager about itself: see `ProcessInspector.ask`.

        Raises Broken if the TaskManager is gone.
        """
        return await (await self._leader()).resources.ask(worker_id, "inspect", what, *args)

    async def _leader(self) -> _Leading:
        """Waits until this process leads.

        Raises NoLeader if the lease names another leader, which must get the request.
        """
        while not self._leading.done():
            await wait_first([self._leading], timeout_s=LOOK_S)
            if not self._leading.done() and (where := await self._say_who_leads()) not in (
                "",
                "here",
            ):
                raise NoLeader(
                    f"the jobmanager at {self._address} leads no more, the one at {where} does: "
                    "ask there"
                )
        return self._leading.result()

    def _now_leading(self) -> _Leading | None:
        return (
            self._leading.result()
            if self._leading.done() and not self._leading.cancelled()
            else None
        )

    async def _registers(self, connection: RpcConnection) -> ResourceManager:
        leading = await self._leader()
        self._peers[connection] = None
        return leading.resources

    def _now_resources(self) -> ResourceManager | None:
        leading = self._now_leading()
        return None if leading is None else leading.resources

    # Peers.

    def _handlers(self, connection: RpcConnection) -> dict[str, Callable[..., Any]]:
        return {
            "leader": self._say_who_leads,
            **self._taskmanagers.handlers(connection),
            # Submitters.
            "submit": partial(self._submit, connection),
            "attach": partial(self._attach, connection),
            "jobs": self._list_jobs,
            "wait": self._wait,
            "cancel": self._cancel,
            "stop": self._stop,
            "savepoint": self._savepoint,
            "savepoints": self._savepoints,
            "checkpoint": self._checkpoint,
            "rescale": self.rescale,
            "overview": self._overview,
            "shutdown": self._shutdown,
            "add_tap": partial(self._taskmanagers.to_job, ClusterJob.add_remote_tap),
            "remove_tap": partial(self._taskmanagers.to_job, ClusterJob.remove_remote_tap),
            "query_state": self._query_state,
            "job_report": self._job_report,
            "ask_taskmanager": self.ask_taskmanager,
        }

    def _on_closed(self, connection: RpcConnection) -> None:
        self._peers.pop(connection, None)
        for job_id in self._submitters.lost(connection):
            if job_id in self._jobs:
                self._jobs[job_id].submitter_lost()
        leading = self._now_leading()
        if leading is not None:
            leading.resources.connection_ended(connection)

    async def _say_who_leads(self) -> str:
        """Returns "here" if this process leads, otherwise the address of the leader, or "" if none
        is known."""
        if self._now_leading() is not None:
            return "here"
        try:
            info = await current_holder(self._leases)
        except OSError as error:
            logger.warning("the leader is unknown, because the lease could not be read: %s", error)
            return ""
        return "" if info is None or info.address in (None, self._address) else str(info.address)

    def _job(self, job_id: str) -> ClusterJob:
        job = self._jobs.get(job_id)
        if job is None:
            raise UnknownJob(f"job {job_id} does not run here; list the jobs")
        return job

    # Submitters.

    async def _submit(
        self,
        connection: RpcConnection,
        job_id: str,
        name: str,
        content: bytes,
        config: dict[str, Any],
        attach: bool,
        location: str,
        taps: dict[int, tuple[TapPlace, bool]],
    ) -> int:
        """Submits a job and returns the token of the JobMaster.

        With `attach`, changes of the job's status and its end are sent over `connection`.
        """
        leading = await self._leader()
        self._peers[connection] = None
        if attach:
            self._submitters.add(job_id, Submitter(connection, location, dict(taps)))
        try:
            await leading.dispatcher.submit(
                PersistedJob(job_id=job_id, name=name, graph=content, config=config)
            )
        except BaseException:
            self._submitters.remove(job_id)
            raise
        self._submitters.follow(leading.dispatcher, job_id, connection if attach else None)
        return leading.token

    async def _attach(
        self,
        connection: RpcConnection,
        job_id: str,
        location: str,
        taps: dict[int, tuple[TapPlace, bool]],
    ) -> int:
        """Attaches the submitting process of a job to this leader, after the process has found the
        leader.

        The process gets the status and the end of the job, and runs its part of the job again.
        """
        leading = await self._leader()
        self._peers[connection] = None
        await leading.dispatcher.until_stored(job_id)
        submitter = Submitter(connection, location, dict(taps))
        if not self._submitters.returned(job_id, submitter) and job_id in self._jobs:
            self._jobs[job_id].submitter_returned(submitter)
        self._submitters.follow(leading.dispatcher, job_id, connection)
        return leading.token

    async def _list_jobs(self) -> list[tuple[Any, ...]]:
        """Lists each job as `_packed` encodes it, with `ClusterJob.progress` if its JobMaster is
        here."""
        views = (await self._leader()).dispatcher.jobs()
        return [
            (
                *_packed(view),
                *(self._jobs[view.job_id].progress() if view.job_id in self._jobs else ()),
            )
            for view in views
        ]

    async def _wait(self, job_id: str) -> tuple[Any, ...]:
        return _packed(await (await self._leader()).dispatcher.wait(job_id))

    async def _cancel(self, job_id: str) -> None:
        await (await self._leader()).dispatcher.cancel(job_id)

    async def _stop(self, job_id: str, drain: bool, savepoint: bool, directory: str | None) -> None:
        (await self._leader()).dispatcher.stop(
            job_id, drain=drain, savepoint=savepoint, directory=directory
        )

    async def _savepoint(self, job_id: str, directory: str | None) -> str:
        return await (await self._running(job_id)).savepoint(directory)

    async def _savepoints(self, job_id: str) -> list[str]:
        return await (await self._running(job_id)).savepoints()

    async def _checkpoint(self, job_id: str) -> int:
        return await (await self._running(job_id)).checkpoint()

    async def rescale(
        self, job_id: str, parallelism: int | None, of_operators: Mapping[str, int]
    ) -> None:
        """Changes the parallelism of a running job, and stores the new parallelism for the next
        leader.

        Raises UnknownJob if the job is not known, and JobNotRunning if it has ended. Raises
        GraphError for an invalid parallelism, and RescaleError if the job cannot be rescaled.
        """
        await self._running(job_id)
        job, dispatcher = self._job(job_id), (await self._leader()).dispatcher
        await job.rescale(parallelism, of_operators)
        graph = job.job_master.executions.graph
        counts = {str(vertex.id): vertex.parallelism for vertex in graph.vertices}
        await dispatcher.keep(job_id, parallelism=counts)

    async def _running(self, job_id: str) -> JobMaster:
        view = (await self._leader()).dispatcher.job(job_id)
        if view.status.is_terminal:
            raise JobNotRunning(
                f"job {job_id} has ended as {view.status.value}, its state can be saved no more; "
                "see its last checkpoint"
            )
        return self._job(job_id).job_master

    async def _overview(self) -> dict[str, Any]:
        leading = await self._leader()
        return {
            "token": leading.token,
            "taskmanagers": leading.resources.overview(),
            "fenced_total": self.fenced_total,
        }

    async def _shutdown(self) -> int:
        """Ends the whole cluster and returns the pid of this process.

        Jobs are left as they are, TaskManagers are released, and then this process ends.
        """
        await self._leader()
        self._shutting_down = True
        asyncio.get_running_loop().call_later(0.1, self.stop)  # After the answer is sent.
        return self._host.procs.identity().pid

    async def _query_state(self, job_id: str, key: AttemptKey, node_id: int, query: bytes) -> bytes:
        return await self._job(job_id).tasks.query_remote_state(key, node_id, query)


def check_bind(address: str, secret_given: bool) -> None:
    """Raises NotAuthenticated if other machines can connect and no secret was given explicitly."""
    if not is_loopback(address) and not secret_given:
        raise NotAuthenticated(
            f"{address} can be reached from other machines: give the secret that they share with "
            "--secret-file"
        )


def _packed(view: JobView) -> tuple[Any, ...]:
    return tuple(dataclasses.asdict(dataclasses.replace(view, cause=None)).values())[:7]
