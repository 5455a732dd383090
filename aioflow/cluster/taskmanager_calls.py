"""The calls of TaskManagers to a JobManager, for its ResourceManager and its JobMasters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.cluster.cluster_job import ClusterJob
from aioflow.cluster.dispatcher import UnknownJob
from aioflow.cluster.job_session import unpack_error
from aioflow.cluster.scheduler import SlotOffer
from aioflow.cluster.slots import SlotStatus
from aioflow.core.errors import Broken, JobNotRunning, StaleLeader
from aioflow.core.wire.serializers import Codec
from aioflow.graph.deployment import ExecutionAttemptId

if TYPE_CHECKING:
    from aioflow.cluster.job_session import AttemptKey
    from aioflow.cluster.resource_driver import ResourceManager
    from aioflow.cluster.rpc import RpcConnection

__all__ = ["TaskManagerCalls"]


class TaskManagerCalls:
    """Answers the calls of TaskManagers.

    `jobs`: the running jobs by id. `registers(connection)` returns the ResourceManager for a new
    TaskManager, as soon as there is one. `resources()` returns the current one.
    """

    def __init__(
        self,
        jobs: Mapping[str, ClusterJob],
        registers: Callable[[RpcConnection], Awaitable[ResourceManager]],
        resources: Callable[[], ResourceManager | None],
        ended: Container[str] = (),
    ) -> None:
        """`ended`: the ids of jobs that are over."""
        self._ended = ended
        self._jobs = jobs
        self._registers = registers
        self._resources = resources
        self.fenced_total = 0
        """Refused messages that were meant for another JobMaster."""

    def handlers(self, connection: RpcConnection) -> dict[str, Callable[..., Any]]:
        """Returns the handlers of one connection."""
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
        """Passes a message on to a job, unless the job has just ended."""
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
        """A heartbeat from a thread of the TaskManager, on a connection of its own."""
        resources = self._resources()
        if resources is None:
            raise StaleLeader(
                f"taskmanager {worker_id} says that it lives to a jobmanager that does not lead"
            )
        resources.alive(worker_id, registration)

    def _on_give_up(self, worker_id: str, reason: str) -> None:
        """A TaskManager asks for its end: a function goes on although its task was cancelled."""
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
        """Handles the end of the process of a job. Its TaskManager and other jobs there go on."""
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
