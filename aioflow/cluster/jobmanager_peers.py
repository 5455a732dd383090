"""The peers of a JobManager: TaskManagers, whose calls it answers, and the submitters of its jobs.

A submitter gets the status and the end of its job, may run a part of the job, and attaches to the
next leader. A submitter is known from its submission, or its return, until its connection or its
job ends. All calls are on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.cluster.cluster_job import ClusterJob
from aioflow.cluster.dispatcher import UnknownJob
from aioflow.cluster.job_session import pack_error, unpack_error
from aioflow.cluster.scheduler import SlotOffer
from aioflow.cluster.slots import SlotStatus
from aioflow.core.errors import AioflowError, Broken, JobNotRunning, StaleLeader
from aioflow.core.wire.serializers import Codec
from aioflow.graph.deployment import ExecutionAttemptId

if TYPE_CHECKING:
    from aioflow.cluster.dispatcher import Dispatcher
    from aioflow.cluster.job_session import AttemptKey
    from aioflow.cluster.placed_tasks import Submitter
    from aioflow.cluster.resource_driver import ResourceManager
    from aioflow.cluster.rpc import RpcConnection

__all__ = ["SUBMITTER_RETURNS_S", "Submitters", "TaskManagerCalls"]


class TaskManagerCalls:
    """Answers the calls of TaskManagers.

    `jobs` holds the running jobs by id. `registers(connection)` waits until there is a
    ResourceManager for a new TaskManager, and returns it. `resources()` returns the current
    ResourceManager, or None.
    """

    def __init__(
        self,
        jobs: Mapping[str, ClusterJob],
        registers: Callable[[RpcConnection], Awaitable[ResourceManager]],
        resources: Callable[[], ResourceManager | None],
        ended: Container[str] = (),
    ) -> None:
        """`ended` contains the ids of jobs that have ended."""
        self._ended = ended
        self._jobs = jobs
        self._registers = registers
        self._resources = resources
        self.fenced_total = 0
        """Number of refused messages that were meant for another JobMaster."""

    def handlers(self, connection: RpcConnection) -> dict[str, Callable[..., Any]]:
        """Returns the functions that answer the calls of a TaskManager over `connection`, by method
        name."""
        return {
            "register": partial(self._register, connection),
            "heartbeat": self._on_heartbeat,
            "alive": self._on_alive,
            "give_up": self._on_give_up,
            "open_job": self._open_job,
            "offer_slots": partial(self._offer_slots, connection),
            "job_not_opened": self._job_not_opened,
            "process_lost": self._process_lost,
            "slot_freed": self._slot_freed,
            "update_task_state": partial(self.to_job, ClusterJob.on_task_state),
            "acknowledge_checkpoint": partial(self.to_job, ClusterJob.on_acknowledged),
            "decline_checkpoint": partial(self.to_job, ClusterJob.on_declined),
            "end_of_data_reached": partial(self.to_job, ClusterJob.on_end_of_data),
            "report_progress": partial(self.to_job, ClusterJob.on_progress),
            "producer_state": partial(self.to_job, _producer_state),
            "tapped": partial(self.to_job, ClusterJob.tapped),
            "report": partial(self.to_job, ClusterJob.report),
        }

    def to_job(self, tell: Callable[..., Any], job_id: str, *what: Any) -> Any:
        """Calls `tell(job, *what)` for the job with this id, unless the job has just ended."""
        if job_id in self._jobs:
            return tell(self._jobs[job_id], *what)
        return None

    async def _register(
        self,
        connection: RpcConnection,
        worker_id: str,
        report: Sequence[tuple[Any, ...]],
        isolated: bool,
        network_bytes: int,
    ) -> int:
        resources = await self._registers(connection)
        slots = [SlotStatus(*line) for line in report]
        return resources.register(
            connection, worker_id, slots, isolated=isolated, network_bytes=network_bytes
        )

    def _on_heartbeat(
        self,
        worker_id: str,
        registration: int,
        report: Sequence[tuple[Any, ...]],
        fenced_total: int,
    ) -> None:
        resources = self._resources()
        if resources is not None:
            resources.heartbeat(
                worker_id, registration, [SlotStatus(*line) for line in report], fenced_total
            )

    def _on_alive(self, worker_id: str, registration: int, held_s: float) -> None:
        """Handles a heartbeat from a thread of the TaskManager, on a connection of its own."""
        resources = self._resources()
        if resources is None:
            raise StaleLeader(
                f"taskmanager {worker_id} says that it lives to a jobmanager that does not lead"
            )
        resources.alive(worker_id, registration)

    def _on_give_up(self, worker_id: str, reason: str) -> None:
        """Ends a TaskManager at its own request, because a function still runs although its task
        was cancelled.
        """
        resources = self._resources()
        if resources is not None:
            resources.lose(worker_id, reason)

    def _open_job(self, worker_id: str, job_id: str) -> tuple[int, bytes]:
        if job_id not in self._jobs and job_id in self._ended:
            raise JobNotRunning(f"job {job_id} has ended, it needs no slot")
        job = self._job(job_id)
        return job.token, job.content

    def _offer_slots(
        self,
        connection: RpcConnection,
        worker_id: str,
        job_id: str,
        token: int,
        location: str,
        offers: Sequence[tuple[str, int]],
    ) -> tuple[Any, Any]:
        job = self._job(job_id)
        if job.token != token:
            self.fenced_total += 1
            raise StaleLeader(
                f"slots were offered to the job master of {job_id} with token {token}, its token "
                f"is {job.token}"
            )
        answer = job.offered(
            worker_id, connection, location, [SlotOffer(*offer) for offer in offers]
        )
        resources = self._resources()
        if resources is not None:
            resources.slots_accepted(worker_id, answer[0])
        return answer

    def _job(self, job_id: str) -> ClusterJob:
        job = self._jobs.get(job_id)
        if job is None:
            raise UnknownJob(f"job {job_id} does not run here; list the jobs")
        return job

    def _job_not_opened(self, worker_id: str, job_id: str, token: int, error: bytes) -> None:
        job = self._jobs.get(job_id)
        if job is not None and job.token == token:
            job.not_opened(worker_id, error)

    def _process_lost(self, worker_id: str, job_id: str, token: int, error: bytes) -> None:
        """Handles the end of the process of a job. The TaskManager and its other jobs go on."""
        job = self._jobs.get(job_id)
        if job is not None and job.token == token:
            loss = unpack_error(error, Codec())
            assert isinstance(loss, Broken), "a TaskManager says how a process ended"
            job.worker_lost(worker_id, loss)

    def _slot_freed(
        self, worker_id: str, registration: int, job_id: str, allocation_id: str, reason: str
    ) -> None:
        if job_id in self._jobs:
            self._jobs[job_id].slot_freed(worker_id, allocation_id)
        resources = self._resources()
        if resources is not None:
            resources.slot_freed(worker_id, registration, allocation_id)


def _producer_state(job: ClusterJob, key: AttemptKey) -> str:
    """Answers a consumer that misses the partition of a producer."""
    return job.job_master.producer_state(ExecutionAttemptId(*key)).value


SUBMITTER_RETURNS_S = 30.0
"""How long a new leader waits for a submitter that runs a part of a job."""


class Submitters:
    """The submitters of the running jobs, by job id."""

    def __init__(self) -> None:
        self._known: dict[str, Submitter] = {}
        self._awaited: dict[str, asyncio.Future[Submitter]] = {}
        """Futures for the submitters that recovered jobs wait for, by job id."""
        self._following: dict[asyncio.Task[None], None] = {}

    def get(self, job_id: str) -> Submitter | None:
        """Returns the submitter of a job. Returns None if the submitter did not stay or is not
        connected, or if the job is over.
        """
        return self._known.get(job_id)

    def add(self, job_id: str, submitter: Submitter) -> None:
        """Adds the submitter of a new job, which stays connected."""
        self._known[job_id] = submitter

    def returned(self, job_id: str, submitter: Submitter) -> bool:
        """Adds a submitter that has found this leader.

        Returns False if no `wait_for` waits for this submitter.
        """
        self._known[job_id] = submitter
        awaited = self._awaited.get(job_id)
        if awaited is None or awaited.done():
            return False
        awaited.set_result(submitter)
        return True

    def remove(self, job_id: str) -> None:
        """Removes the submitter of a job that is over or was refused."""
        self._known.pop(job_id, None)

    def lost(self, connection: RpcConnection) -> list[str]:
        """Removes the submitters that used `connection`, which has ended. Returns the ids of their
        jobs."""
        jobs = [
            job_id
            for job_id, submitter in self._known.items()
            if submitter.connection is connection
        ]
        for job_id in jobs:
            del self._known[job_id]
        return jobs

    def clear(self) -> None:
        """Forgets all submitters, because this process no longer leads."""
        self._known.clear()

    async def wait_for(self, job_id: str) -> Submitter | None:
        """Waits for the submitter of a job to return. Returns None if it does not within
        `SUBMITTER_RETURNS_S`."""
        returns: asyncio.Future[Submitter] = asyncio.get_running_loop().create_future()
        self._awaited[job_id] = returns
        try:
            async with asyncio.timeout(SUBMITTER_RETURNS_S):
                return await returns
        except TimeoutError:
            return None
        finally:
            del self._awaited[job_id]

    def follow(self, dispatcher: Dispatcher, job_id: str, connection: RpcConnection | None) -> None:
        """Notifies `connection`, if given, once the job has ended, and then forgets the job's
        submitter.

        The wait ends at the latest when `dispatcher` ends.
        """
        following = self._tell_the_end(dispatcher, job_id, connection)
        task = asyncio.get_running_loop().create_task(following, name=f"follow {job_id}")
        self._following[task] = None
        task.add_done_callback(self._following.pop)

    async def _tell_the_end(
        self, dispatcher: Dispatcher, job_id: str, connection: RpcConnection | None
    ) -> None:
        try:
            view = await dispatcher.wait(job_id)
        except AioflowError:
            return  # Leadership is lost; the connection ends with it.
        self.remove(job_id)
        if connection is not None:
            connection.notify(
                "ended", view.status.value, pack_error(view.cause, Codec()), view.savepoint
            )
