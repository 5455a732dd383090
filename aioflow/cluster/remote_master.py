"""A stand-in for a JobMaster in another process: its last reported state.

Requests go to that JobMaster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from aioflow.cluster.execution_graph import ExecutionGraph, JobStatus
from aioflow.cluster.job_history import JobHistory
from aioflow.core.errors import JobNotRunning

if TYPE_CHECKING:
    from aioflow.checkpoint.instructions import CheckpointSettings
    from aioflow.checkpoint.statistics import CheckpointStatistics
    from aioflow.cluster.restart import RestartPolicy
    from aioflow.core.host import Host
    from aioflow.graph.deployment import ExecutionAttemptId, ExecutionState
    from aioflow.graph.job_graph import JobGraph

__all__ = ["RemoteJobMaster"]


class RemoteJobMaster:
    """`restart` is the policy sent with the job; the JobMaster reports its restarts."""

    def __init__(self, host: Host, job_id: str, graph: JobGraph, restart: RestartPolicy) -> None:
        self._host = host
        self.executions = ExecutionGraph(job_id, graph, restart)
        self.error: BaseException | None = None
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.terminated: asyncio.Future[JobStatus] = asyncio.get_running_loop().create_future()
        self.timestamps_ms: dict[JobStatus, int] = {}
        self.history = JobHistory()
        """The reported states of the tasks."""
        self.checkpoint_settings: CheckpointSettings | None = None
        self.checkpoint_statistics: CheckpointStatistics | None = None
        """Kept by the remote JobMaster; `refresh` copies it."""
        self.ask: Callable[..., None] | None = None
        """Sends a request, once the job is submitted."""
        self.call: Callable[..., Awaitable[Any]] | None = None
        """Sends a request and awaits its answer, once the job is submitted."""
        self.cancel_asked = False
        self.on_cancel: Callable[[], None] = lambda: None
        self._stop: tuple[bool, bool, str | None] | None = None
        self.stopped_with: str | None = None
        """URL of the savepoint that the job ended with."""
        self.stop_error: BaseException | None = None
        self.stop_refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails if the cluster refuses the last stop; the job then goes on."""
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
        """Notes that the cluster cannot stop the job that way."""
        self._stop = None
        if not self.stop_refused.done():
            self.stop_refused.set_exception(error)
            self.stop_refused.exception()  # Marks it as retrieved; there may be no waiter.

    async def savepoint(self, directory: str | None = None) -> str:
        """Takes a savepoint under the store, or at the URL `directory`. Returns its URL."""
        return str(await self._called("savepoint", directory))

    async def savepoints(self) -> list[str]:
        """Lists URLs of the savepoints under the store."""
        return list(await self._called("savepoints"))

    async def checkpoint(self) -> int:
        """Takes a checkpoint now. Returns its number once it is completed."""
        return int(await self._called("checkpoint"))

    async def rescale(self, parallelism: int | None, of_operators: Mapping[str, int]) -> None:
        """Lets the job go on at another parallelism. Returns once all new tasks run."""
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
