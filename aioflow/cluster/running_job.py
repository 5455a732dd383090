"""The interface of a running job, which every runner returns.

`LocalCluster`, `EmbeddedCluster`, `RemoteRun` and `SparkRun` implement it. The defaults are those
of a job without processes of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.core.errors import Broken, RescaleError

if TYPE_CHECKING:
    import asyncio

    from aioflow.checkpoint.instructions import CheckpointSettings
    from aioflow.checkpoint.statistics import CheckpointStatistics
    from aioflow.cluster.execution_graph import ExecutionGraph, JobStatus
    from aioflow.cluster.gateways import TaskReader
    from aioflow.cluster.job_history import JobHistory, WorkerReport
    from aioflow.core.host import Host

__all__ = ["JobMasterView", "RunningJob"]


class JobMasterView(Protocol):
    """The JobMaster of a running job, or its last reported state if it is in another process."""

    @property
    def status(self) -> JobStatus: ...
    @property
    def error(self) -> BaseException | None:
        """The last error that failed or restarted the job."""

    @property
    def executions(self) -> ExecutionGraph: ...
    @property
    def timestamps_ms(self) -> Mapping[JobStatus, int]:
        """When the job last entered each state."""

    @property
    def history(self) -> JobHistory: ...
    @property
    def checkpoint_settings(self) -> CheckpointSettings | None: ...
    @property
    def checkpoint_statistics(self) -> CheckpointStatistics | None: ...
    @property
    def started(self) -> asyncio.Future[None]:
        """Completes once every task has run, or the job is over."""

    @property
    def terminated(self) -> asyncio.Future[JobStatus]:
        """Completes at the end of the job."""

    @property
    def stop_refused(self) -> asyncio.Future[None]:
        """Fails if the last stop is refused after `stop` returned; the job then goes on."""

    @property
    def stopped_with(self) -> str | None:
        """URL of the savepoint that the job ended with."""

    @property
    def stop_error(self) -> BaseException | None:
        """Why the savepoint at the end of the job could not be taken."""

    def cancel(self) -> None: ...
    def stop(
        self, *, drain: bool = False, savepoint: bool = True, directory: str | None = None
    ) -> None: ...
    async def savepoint(self, directory: str | None = None) -> str: ...
    async def savepoints(self) -> list[str]: ...
    async def checkpoint(self) -> int: ...


class RunningJob(Protocol):
    """One job, for as long as `run` runs. Everything is called on the loop that runs it."""

    host: Host
    job_id: str
    job_master: JobMasterView
    task_executor: TaskReader

    async def run(self) -> JobStatus:
        """Runs the job to its end. A cancellation cancels the job."""

    def metrics(self) -> Mapping[str, float]:
        """All metrics by dotted name; those of another process are its last report."""

    async def rescale(
        self,
        parallelism: int | None,
        of_operators: Mapping[str, int],
        workers: int | None = None,
    ) -> None:
        """Lets the job go on at another parallelism, or with other worker processes.

        `parallelism` replaces that of the flow; `of_operators` is by uid. Returns once all new
        tasks run. Raises RescaleError, GraphError or JobNotRunning.
        """
        raise RescaleError(
            f"job {self.job_master.executions.graph.name!r} runs where its parallelism is fixed: "
            "stop it with a savepoint, and run the flow from it with another parallelism"
        )

    def refuse_state(self, operator: str) -> None:
        """Raises GraphError where the state of tasks can never be read."""
        return None

    # The processes that run the job.

    @property
    def location(self) -> str:
        """Where other processes read the partitions of this one; empty if none does."""
        return ""

    def own_metrics(self) -> Mapping[str, float]:
        """The metrics of this process itself, without those of its tasks."""
        return {}

    @property
    def worker_count(self) -> int:
        """Number of worker processes that the job should have; 0: it starts none."""
        return 0

    def workers(self) -> Sequence[WorkerReport]:
        """The other processes, oldest first."""
        return ()

    def worker_at(self, location: str) -> str:
        """Returns the id of the worker that is, or was, at `location`; empty for this process."""
        return ""

    async def refresh(self) -> None:
        """Fetches what only other processes know. Raises AioflowError if they do not answer."""
        return None

    async def ask_worker(self, worker_id: str, what: str, *args: Any) -> Any:
        """Asks another process about itself: see `ProcessInspector.ask`. Raises Broken."""
        raise Broken(f"worker {worker_id} is gone")
