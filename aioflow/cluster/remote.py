"""`on=af.RemoteCluster(...)`: runs a flow of this program on an existing cluster.

The job handle is the same as for a local job.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioflow.cluster.dispatcher import UnknownJob
from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.gateways import RunningJob
from aioflow.cluster.job_history import WorkerReport, decode_report, statistics_of
from aioflow.cluster.job_session import unpack_error
from aioflow.cluster.leadership import DATA, LeaderRetrieval, NoLeader, parse_addresses
from aioflow.cluster.remote_home import RemoteHome, RemoteJobMaster
from aioflow.cluster.submission import RETRY_S, ClusterClient, submission_of
from aioflow.core.aio import cancel_and_wait, wait_first
from aioflow.core.errors import AioflowError, Broken, Closed, RescaleError, StaleLeader
from aioflow.graph.deployment import ExecutionAttemptId, ExecutionState
from aioflow.graph.job_graph import rescaled
from aioflow.network.security import SecuredHost, Security, TlsFiles, given_secret

if TYPE_CHECKING:
    from aioflow.checkpoint.instructions import CheckpointSettings
    from aioflow.cluster.restart import RestartPolicy
    from aioflow.core.host import Host
    from aioflow.graph.job_graph import JobGraph
    from aioflow.task.environment import TaskOptions

__all__ = ["RemoteCluster", "RemoteRun"]

logger = logging.getLogger(__name__)

RETURN_TIMEOUT_S = 60.0
"""How long a run looks for the next leader after it lost its JobManager: several lease
durations."""

REFRESH_S = 5.0
"""How long the JobManager may take to answer `refresh`."""

CANCEL_TIMEOUT_S = 10.0
"""How long a cancelled run waits for the cluster to report the end of the job."""

END_TIMEOUT_S = 120.0
"""How long a cancelled job may take to end before its handle gives up.

This is longer than the tasks of a job take to close, even if the leader changes meanwhile.
"""


@dataclass(frozen=True, slots=True)
class RemoteCluster:
    """A cluster to run a flow on.

    Use it as `await flow.execute(on=af.RemoteCluster("host:6123", secret=...))`.

    `address`: one or more `host:port` of JobManagers, separated by commas, of which one leads. Or
    the `Path` of the cluster's directory, where the lease names the leader. When another JobManager
    becomes the leader, the job and this handle continue there. Without checkpoints the job starts
    from the beginning. `secret`: the shared secret of the cluster, or the `Path` of its file. The
    default is the secret in the cluster's directory, or in `.aioflow` if `address` is no directory.
    `bind`: the address of this machine at which the cluster reaches the parts of the job that stay
    in this process. Such parts are functions as sinks, `collect` and pushed inputs. `tls`:
    certificate files of this process, if the cluster uses TLS. `allow_plaintext`: needed for a
    `bind` other than loopback without TLS.
    """

    address: str | Path
    secret: bytes | str | Path | None = field(default=None, repr=False)
    bind: str = "127.0.0.1"
    tls: TlsFiles | None = None
    allow_plaintext: bool = False

    def __post_init__(self) -> None:
        _ = self.where

    @property
    def where(self) -> LeaderRetrieval:
        """Where to find the JobManagers. Raises ValueError if `address` is malformed."""
        return (
            LeaderRetrieval(data=str(self.address))
            if isinstance(self.address, Path)
            else LeaderRetrieval(parse_addresses(self.address))
        )

    def start(
        self,
        host: Host,
        graph: JobGraph,
        restart: RestartPolicy,
        options: TaskOptions,
        checkpoints: CheckpointSettings | None = None,
    ) -> RemoteRun:
        """Makes the run of one job.

        Raises GraphError if the flow cannot be shipped, CheckpointError for a store that other
        processes cannot reach, NotAuthenticated for an invalid secret.
        """
        if self.tls is not None or self.allow_plaintext:
            host = SecuredHost(host, Security.of(self.tls, allow_plaintext=self.allow_plaintext))
        secret = self._directory / "secret" if self.secret is None else self.secret
        return RemoteRun(
            host, graph, restart, options, checkpoints, self.where, given_secret(secret), self.bind
        )

    @property
    def _directory(self) -> Path:
        """The directory of the cluster: `address` if it is a `Path`, otherwise `DATA`."""
        return self.address if isinstance(self.address, Path) else DATA


class RemoteRun(RunningJob):
    """One job on a cluster."""

    job_master: RemoteJobMaster

    def __init__(
        self,
        host: Host,
        graph: JobGraph,
        restart: RestartPolicy,
        options: TaskOptions,
        checkpoints: CheckpointSettings | None,
        where: LeaderRetrieval,
        secret: bytes,
        bind: str,
    ) -> None:
        self.host = host
        self.job_id = host.ids.new("job")
        self.job_master = RemoteJobMaster(host, self.job_id, graph, restart)
        self.job_master.checkpoint_settings = checkpoints
        self._submission = submission_of(graph, restart, options, checkpoints)
        self._secret = secret
        self._bind = bind
        self._where = str(where)
        self._home = RemoteHome(
            host,
            secret,
            self.job_id,
            graph,
            options,
            bind,
            lambda: self._client.connection,
            lambda: self._submitted and not self.job_master.terminated.done(),
        )
        self.task_executor = self._home
        self._client = ClusterClient(host, where, secret, self._handlers())
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that is done when the connection to the leader ends before the job does."""
        self._has_returned = False
        self._giving_up: asyncio.TimerHandle | None = None
        """Timer that is set when the job is cancelled. The timer limits how long the run waits for
        the end of the job.
        """
        self.job_master.on_cancel = self._on_cancel
        self._asking: dict[asyncio.Task[None], None] = {}
        self._submitted = False
        self._metrics: dict[str, float] = {}
        self._workers: list[WorkerReport] = []
        """The TaskManagers of the cluster at the last `refresh`."""

    async def run(self) -> JobStatus:
        """Submits the job and follows it to its end. Cancelling this call cancels the job."""
        self._client.on_closed = self._on_closed
        async with self._client:
            asking = asyncio.get_running_loop().create_task(
                self._client.watch_leader(), name=f"leader of job {self.job_id[:8]}"
            )
            try:
                location = await self._home.open()
                if self.job_master.cancel_asked:
                    self.job_master.set_status(JobStatus.CANCELED)
                    return JobStatus.CANCELED
                try:
                    await self._client.submit_attached(
                        self.job_id,
                        self._submission,
                        location=location,
                        taps=self._home.told_taps(),
                    )
                    self.job_master.submitted(self._ask, self._call)
                except (Broken, StaleLeader, NoLeader) as error:
                    self._client.hang_up(error)
                    await self._return()
                self._submitted = True
                logger.info(
                    "job %s (%s) is submitted to %s",
                    self._submission.name,
                    self.job_id,
                    self._where,
                )
                return await self._follow()
            except asyncio.CancelledError:
                self.job_master.cancel()
                await wait_first([self.job_master.terminated], timeout_s=CANCEL_TIMEOUT_S)
                raise
            finally:
                if self._giving_up is not None:
                    self._giving_up.cancel()
                await cancel_and_wait([asking])
                await self._home.close()

    async def _follow(self) -> JobStatus:
        """Follows the job to its end, across changes of the leader."""
        while True:
            await wait_first([self.job_master.terminated, self._lost])
            if self.job_master.terminated.done():
                return self.job_master.terminated.result()
            try:
                await self._return()
            except (OSError, AioflowError) as error:
                self._give_up(
                    f"was not found again when the connection to the cluster at {self._where} had "
                    f"ended: {error}"
                )

    async def _return(self) -> None:
        """Finds the current leader, and attaches to the job there.

        A job that is not submitted yet is submitted, unless the leader has it. Raises OSError or
        AioflowError if no leader is found, or if the leader does not know a job that was submitted.
        """
        logger.warning(
            "the connection to the cluster at %s ended; job %s is looked for under its next leader",
            self._where,
            self.job_id,
        )
        if self._submitted:
            self.job_master.set_status(JobStatus.RESTARTING)
        await self._home.close()  # Tasks here belonged to the leader that is gone.
        self._has_returned = True
        deadline = self.host.clock.monotonic() + RETURN_TIMEOUT_S
        while True:
            await self._client.connect_again(deadline - self.host.clock.monotonic())
            self._lost = asyncio.get_running_loop().create_future()
            try:
                await self._attach()
                break
            except (Broken, StaleLeader, NoLeader):  # It no longer led when it got the request.
                if self.host.clock.monotonic() >= deadline or self.job_master.terminated.done():
                    raise
                self._client.hang_up(Closed("this jobmanager leads no more"))
                await self._home.close()
                await asyncio.sleep(RETRY_S)
        logger.info(
            "job %s goes on under the jobmanager at %s:%d", self.job_id, *self._client.address
        )
        # No leader has received the requests made meanwhile.
        self.job_master.submitted(self._ask, self._call)

    async def _attach(self) -> None:
        """Attaches to the job at the present leader. Submits a job that no leader has taken yet."""
        location, taps = await self._home.open(), self._home.told_taps()
        try:
            await self._client.attach(self.job_id, location=location, taps=taps)
        except UnknownJob:
            if self._submitted:
                raise
            await self._client.submit_attached(
                self.job_id, self._submission, location=location, taps=taps
            )

    def _on_cancel(self) -> None:
        if self._giving_up is None:
            what = (
                f"was cancelled, and the cluster at {self._where} has not said for "
                f"{END_TIMEOUT_S:g} s that it has ended"
            )
            self._giving_up = asyncio.get_running_loop().call_later(
                END_TIMEOUT_S, self._give_up, what
            )

    def _give_up(self, what: str) -> None:
        """Fails this handle, because it will not learn the end of the job."""
        if not self.job_master.terminated.done():
            error = self.job_master.error = Broken(
                f"job {self.job_id} {what}; it may go on: aioflow list --at {self._where}"
            )
            logger.warning("%s", error)
            self.job_master.set_status(JobStatus.FAILED)
            self._client.hang_up(error)

    def _call(self, method: str, *args: Any) -> Awaitable[Any]:
        return self._client.connection.call(method, *args)

    def _ask(self, method: str, *args: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._ask_quietly(method, args), name=method)
        self._asking[task] = None
        task.add_done_callback(self._asking.pop)

    async def _ask_quietly(self, method: str, args: tuple[Any, ...]) -> None:
        try:
            await self._client.connection.call(method, *args)
        except UnknownJob as error:
            self._give_up(f"is not known to the cluster at {self._where}: {error}")
        except (Broken, StaleLeader, NoLeader) as error:
            logger.warning(
                "the cluster at %s did not %s job %s, its next leader is asked: %s",
                self._where,
                method,
                self.job_id,
                error,
            )
        except Exception as error:  # noqa: BLE001  # Of any class: it was raised there.
            if method == "stop":
                self.job_master.refuse_stop(error)
            else:
                logger.warning(
                    "the cluster at %s did not %s job %s: %s",
                    self._where,
                    method,
                    self.job_id,
                    error,
                )

    # Notifications of the JobManager.

    def _handlers(self) -> dict[str, Callable[..., Any]]:
        return {
            "status": self._on_status,
            "stop_failed": self._on_stop_failed,
            "ended": self._on_ended,
            "metrics": self._on_metrics,
            "warning": partial(logger.warning, "%s"),
            **self._home.handlers(),
        }

    def _on_status(
        self,
        status: str,
        started: bool,
        restarts: int,
        error: bytes,
        states: list[tuple[int, int, int, str]],
    ) -> None:
        if self.job_master.status.is_terminal:
            return
        graph = self.job_master.executions
        graph.restarts = restarts
        self.job_master.error = unpack_error(error, self._home.codec) or self.job_master.error
        graph.mirror(Counter(vertex_id for vertex_id, *_ in states))
        for vertex_id, subtask, attempt, state in states:
            execution = graph.executions[vertex_id, subtask]
            execution.attempt = ExecutionAttemptId(self.job_id, vertex_id, subtask, attempt)
            execution.state = ExecutionState(state)
            self.job_master.note_task(execution.attempt, execution.state)
        # `ended` reports the end, once it is stored.
        if not JobStatus(status).is_terminal:
            self.job_master.set_status(JobStatus(status))
        if started and not JobStatus(status).is_terminal and not self.job_master.started.done():
            self.job_master.started.set_result(None)

    def _on_stop_failed(self, error: bytes) -> None:
        self.job_master.stop_error = unpack_error(error, self._home.codec)

    def _on_ended(self, status: str, error: bytes, savepoint: str) -> None:
        self.job_master.stopped_with = savepoint or None
        if JobStatus(status) is JobStatus.FAILED:
            self.job_master.error = self.job_master.error or unpack_error(error, self._home.codec)
        if (
            self._has_returned
            and JobStatus(status) is JobStatus.CANCELED
            and not self.job_master.cancel_asked
        ):
            self.job_master.error = Broken(
                f"the connection to the cluster at {self._where} ended, and job {self.job_id} "
                "with it: this process runs a part of the job"
            )
            self.job_master.set_status(JobStatus.FAILED)
            return
        self.job_master.set_status(JobStatus(status))

    def _on_closed(self) -> None:
        if not self._lost.done():
            self._lost.set_result(None)

    def _on_metrics(self, metrics: dict[str, float]) -> None:
        self._metrics = metrics

    async def rescale(
        self,
        parallelism: int | None,
        of_operators: Mapping[str, int],
        workers: int | None = None,
    ) -> None:
        graph = self.job_master.executions.graph
        if workers is not None:
            raise RescaleError(
                f"job {graph.name!r} runs on a cluster, whose workers are not its own: give "
                "parallelism=, it uses the slots that are there"
            )
        rescaled(graph, parallelism, of_operators)  # Raises for what cannot be, before it is sent.
        await self.job_master.rescale(parallelism, of_operators)

    # For monitoring.

    def metrics(self) -> dict[str, float]:
        return {**self._metrics, **self._home.metrics()}

    def own_metrics(self) -> dict[str, float]:
        return self._home.own_metrics()

    def workers(self) -> list[WorkerReport]:
        return self._workers

    def worker_at(self, location: str) -> str:
        return next((one.id for one in self._workers if location and one.location == location), "")

    async def refresh(self) -> None:
        """Asks the JobMaster for attempts, failures, checkpoints and processes.

        Raises AioflowError if the JobMaster does not answer.
        """
        if not self._submitted or self.job_master.terminated.done():
            return
        async with asyncio.timeout(REFRESH_S):
            report = decode_report(await self._client.connection.call("job_report", self.job_id))
        report.put_into(self.job_master.history)
        self.job_master.checkpoint_statistics = (
            None if report.checkpoints is None else statistics_of(report.checkpoints)
        )
        self._workers = report.workers

    async def ask_worker(self, worker_id: str, what: str, *args: Any) -> Any:
        return await self._client.connection.call("ask_taskmanager", worker_id, what, *args)
