"""The submitter's side of a job on a cluster: the part of the job that stays in this process, and a
stand-in for the JobMaster.

Collected results, pushed inputs and local functions cannot leave the process. So the process is a
worker for them, from submission to the end of the connection, and again under the next leader. The
subscriptions of the process outlive connections and leaders.

The stand-in holds the state that the JobMaster last reported, and passes requests on to the
JobMaster.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle

from aioflow.cluster.execution_graph import ExecutionGraph, JobStatus
from aioflow.cluster.job_history import JobHistory
from aioflow.cluster.job_session import REQUESTS, JobSession, attempt_key
from aioflow.cluster.shipping import local_job
from aioflow.core.errors import Broken, JobNotRunning, TypeNotSupported
from aioflow.core.wire.batch import decode_batch
from aioflow.core.wire.serializers import Codec

if TYPE_CHECKING:
    from aioflow.checkpoint.instructions import CheckpointSettings
    from aioflow.checkpoint.statistics import CheckpointStatistics
    from aioflow.cluster.gateways import OnMissed
    from aioflow.cluster.restart import RestartPolicy
    from aioflow.cluster.rpc import RpcConnection
    from aioflow.core.elements import RecordBatch
    from aioflow.core.host import Host
    from aioflow.core.scope import TapPlace
    from aioflow.graph.deployment import ExecutionAttemptId, ExecutionState
    from aioflow.graph.job_graph import JobGraph
    from aioflow.task.environment import TaskOptions

__all__ = ["RemoteHome", "RemoteJobMaster"]


@dataclass(frozen=True, slots=True)
class _Tap:
    place: TapPlace
    take: Callable[[RecordBatch], None]
    on_missed: OnMissed | None


class RemoteHome:
    """The local part of a job, and the `TaskReader` of its subscriptions and queries.

    `connection()` returns the connection to the leader. `runs()` returns whether the leader has a
    JobMaster of the job.
    """

    def __init__(
        self,
        host: Host,
        secret: bytes,
        job_id: str,
        graph: JobGraph,
        options: TaskOptions,
        bind: str,
        connection: Callable[[], RpcConnection],
        runs: Callable[[], bool],
    ) -> None:
        self._host = host
        self._secret = secret
        self._job_id = job_id
        self._job = local_job(graph, options)
        self.codec = Codec(self._job.types)
        self._bind = bind
        self._connection = connection
        self._runs = runs
        self._session: JobSession | None = None
        self._taps: dict[int, _Tap] = {}
        self._tap_numbers = itertools.count(1)

    async def open(self) -> str:
        """Makes this process a worker for the part of the job that stays here.

        Returns the address for other processes; empty if no part of the job stays here.
        """
        if not any(vertex.stays_here for vertex in self._job.graph.vertices):
            return ""
        session = JobSession(
            self._host,
            self._secret,
            self._job_id,
            self._job,
            0,
            lambda *what: self._connection().notify(*what),
            lambda *what: self._connection().call(*what),
            lambda: self._connection().is_writable,
            lambda _: None,
        )
        await session.open(self._bind)
        for tap in self._taps.values():
            session.executor.add_tap(self._job_id, tap.place, tap.take)
        self._session = session
        await session.discover_at_home()
        return session.location

    async def close(self) -> None:
        """Ends the tasks that run here."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # Metrics and subscriptions.

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the tasks that run here."""
        return {} if self._session is None else self._session.metrics.snapshot()

    def own_metrics(self) -> dict[str, float]:
        """Returns the metrics of this process itself."""
        return {} if self._session is None else self._session.metrics.own_values()

    def told_taps(self) -> dict[int, tuple[TapPlace, bool]]:
        """Maps the number of each subscription to its place and to whether it may miss rows."""
        return {
            tap_id: (tap.place, tap.on_missed is not None) for tap_id, tap in self._taps.items()
        }

    def add_tap(
        self,
        job_id: str,
        place: TapPlace,
        tap: Callable[[RecordBatch], None],
        on_missed: OnMissed | None = None,
    ) -> Sequence[asyncio.Future[None]]:
        tap_id = next(self._tap_numbers)
        self._taps[tap_id] = _Tap(place, tap, on_missed)
        if self._session is not None:
            self._session.executor.add_tap(job_id, place, tap)
        if not self._runs():
            return ()
        return [self._connection().ask("add_tap", job_id, place, tap_id, on_missed is not None)]

    def remove_tap(self, job_id: str, place: TapPlace, tap: Callable[[RecordBatch], None]) -> None:
        if self._session is not None:
            self._session.executor.remove_tap(job_id, place, tap)
        for tap_id in [i for i, one in self._taps.items() if (one.place, one.take) == (place, tap)]:
            del self._taps[tap_id]
            if self._runs():
                self._connection().notify("remove_tap", job_id, place, tap_id)

    async def query_state(
        self, attempt: ExecutionAttemptId, node_id: int, query: Callable[[Any], Any]
    ) -> Any:
        content = cloudpickle.dumps(query)
        return self.codec.decode(
            await self._connection().call(
                "query_state", self._job_id, attempt_key(attempt), node_id, content
            )
        )

    # Calls of the JobManager.

    def handlers(self) -> dict[str, Callable[..., Any]]:
        return {
            "tapped": self._on_tapped,
            "job_over": self._on_job_over,
            **{name: partial(self._to_session, name) for name in REQUESTS},
        }

    def _to_session(self, request: str, *args: Any) -> Any:
        if self._session is None:
            raise Broken(f"nothing of job {self._job_id} runs in the process that submitted it")
        return self._session.requests[request](*args)

    def _on_tapped(self, tap_id: int, content: bytes, missed: int, refused: str) -> None:
        tap = self._taps.get(tap_id)
        if tap is None:
            return
        if tap.on_missed is not None and (missed or refused):
            tap.on_missed(missed, TypeNotSupported(refused) if refused else None)
        if content:
            tap.take(decode_batch(content, self.codec, "a subscription"))

    def _on_job_over(self, job_id: str, token: int) -> None:
        if self._session is not None:
            self._session.executor.cancel_all()


class RemoteJobMaster:
    """The stand-in for the JobMaster of a job on a cluster. `restart` is the policy that was sent
    with the job."""

    def __init__(self, host: Host, job_id: str, graph: JobGraph, restart: RestartPolicy) -> None:
        self._host = host
        self.executions = ExecutionGraph(job_id, graph, restart)
        self.error: BaseException | None = None
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.terminated: asyncio.Future[JobStatus] = asyncio.get_running_loop().create_future()
        self.timestamps_ms: dict[JobStatus, int] = {}
        self.history = JobHistory()
        """The history of the job, with the reported states of its tasks."""
        self.checkpoint_settings: CheckpointSettings | None = None
        self.checkpoint_statistics: CheckpointStatistics | None = None
        """The statistics that the remote JobMaster keeps, as of the last `refresh`."""
        self.ask: Callable[..., None] | None = None
        """Function that sends a request to the JobMaster; None before the job is submitted."""
        self.call: Callable[..., Awaitable[Any]] | None = None
        """Function that sends a request to the JobMaster and awaits the answer; None before the job
        is submitted."""
        self.cancel_asked = False
        self.on_cancel: Callable[[], None] = lambda: None
        self._stop: tuple[bool, bool, str | None] | None = None
        self.stopped_with: str | None = None
        """URL of the savepoint with which the job ended; None if there is none."""
        self.stop_error: BaseException | None = None
        self.stop_refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that fails if the cluster refuses the last stop. The job then goes on."""
        self.set_status(JobStatus.CREATED)

    @property
    def status(self) -> JobStatus:
        return self.executions.status

    def cancel(self) -> None:
        """Ends the job without a result. A job that is over stays as it is."""
        self.cancel_asked = True
        if not self.status.is_terminal:
            self.on_cancel()
            if self.ask is not None:
                self.ask("cancel", self.executions.job_id)

    def stop(
        self, *, drain: bool = False, savepoint: bool = True, directory: str | None = None
    ) -> None:
        """Ends the sources of the job."""
        self._stop = drain, savepoint, directory
        if self.stop_refused.done():
            self.stop_refused = asyncio.get_running_loop().create_future()
        if self.ask is not None:
            self.ask("stop", self.executions.job_id, *self._stop)

    def refuse_stop(self, error: Exception) -> None:
        """Notes that the cluster cannot stop the job in the requested way."""
        self._stop = None
        if not self.stop_refused.done():
            self.stop_refused.set_exception(error)
            self.stop_refused.exception()  # Marks it as retrieved; there may be no waiter.

    async def savepoint(self, directory: str | None = None) -> str:
        """Takes a savepoint under the store, or below the URL `directory`. Returns the savepoint's
        URL."""
        return str(await self._called("savepoint", directory))

    async def savepoints(self) -> list[str]:
        """Lists URLs of the savepoints under the store."""
        return list(await self._called("savepoints"))

    async def checkpoint(self) -> int:
        """Takes a checkpoint now. Returns the checkpoint's number once it has completed."""
        return int(await self._called("checkpoint"))

    async def rescale(self, parallelism: int | None, of_operators: Mapping[str, int]) -> None:
        """Changes the parallelism of the running job. Returns once all new tasks run."""
        await self._called("rescale", parallelism, dict(of_operators))

    async def _called(self, method: str, *args: Any) -> Any:
        if self.call is None:
            raise JobNotRunning(
                f"job {self.executions.job_id} is not submitted yet, it cannot be asked for a "
                f"{method}"
            )
        return await self.call(method, self.executions.job_id, *args)

    def submitted(self, ask: Callable[..., None], call: Callable[..., Awaitable[Any]]) -> None:
        """Sets the functions that reach the JobMaster, and sends a pending cancel or stop."""
        self.ask, self.call = ask, call
        if self.cancel_asked:
            self.cancel()
        elif self._stop is not None:
            ask("stop", self.executions.job_id, *self._stop)

    def note_task(self, attempt: ExecutionAttemptId, state: ExecutionState) -> None:
        """Records the current state of a task."""
        self.history.task(attempt, state, self._host.clock.wall_ms(), "")

    def set_status(self, status: JobStatus) -> None:
        self.executions.status = status
        now_ms = self._host.clock.wall_ms()
        if self.history.status(status.value, now_ms):
            self.timestamps_ms[status] = now_ms
        if status.is_terminal and not self.started.done():
            self.started.set_result(None)
        if status.is_terminal and not self.terminated.done():
            self.terminated.set_result(status)
