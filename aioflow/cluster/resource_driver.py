"""Carries out the decisions of the SlotManager.

Requests slots from TaskManagers, watches their heartbeats, and notifies jobs of slots that they get
or lose.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from aioflow.cluster.heartbeat import (
    HeartbeatMonitor,
    HeartbeatOptions,
    Reason,
    SendHeartbeat,
    TimedOut,
)
from aioflow.cluster.heartbeat import Instruction as HeartbeatInstruction
from aioflow.cluster.resource_manager import (
    Instruction,
    LoseProcess,
    NotEnoughResources,
    OpensSlowly,
    ReleaseWorker,
    RequestSlot,
    SlotManager,
    SlotManagerOptions,
    SlotsLost,
    StartWorker,
)
from aioflow.cluster.slots import SlotStatus
from aioflow.core.aio import OrderedTaskGroup
from aioflow.core.errors import AioflowError, Broken, counted

if TYPE_CHECKING:
    from aioflow.cluster.cluster_job import ClusterJob
    from aioflow.cluster.gateways import WorkerProvider
    from aioflow.cluster.rpc import RpcConnection
    from aioflow.core.host import Host

__all__ = ["ResourceManager"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _TaskManager:
    connection: RpcConnection
    registration: int
    isolated: bool = False
    """Whether the TaskManager runs each job in a process of its own."""
    network_bytes: int = 0
    """Network memory of all processes of the TaskManager together, in bytes."""
    fenced_total: int = 0


class ResourceManager:
    """The ResourceManager of one leader. Use it as `async with`.

    `jobs` holds the running jobs by id. `address` identifies this process to TaskManagers. Without
    a `provider`, TaskManagers are started by others and register by themselves.
    """

    def __init__(
        self,
        host: Host,
        token: int,
        options: SlotManagerOptions,
        heartbeat: HeartbeatOptions,
        jobs: Mapping[str, ClusterJob],
        address: str,
        provider: WorkerProvider | None = None,
    ) -> None:
        self._host = host
        self._provider = provider
        self._token = token
        self._jobs = jobs
        self._address = address
        self._heartbeat = heartbeat
        self._slots = SlotManager(token, options, host.clock.monotonic())
        self._monitor = HeartbeatMonitor(heartbeat)
        self._workers: dict[str, _TaskManager] = {}
        self._fenced_by_the_gone = 0
        self._group = OrderedTaskGroup()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        if self._provider is not None:
            self._carry_out(self._slots.tick(self._host.clock.monotonic()))
        _ = self._group.create_task(self._run_timers(), name="slots and heartbeats")
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self._group.cancel_children()
        await self._group.__aexit__(None, None, None)

    def overview(self) -> list[tuple[str, int, int]]:
        """Returns (id, slots, free slots) of each TaskManager. Slots that were just given to a job
        are not free.
        """
        return self._slots.overview()

    def taskmanagers(self) -> list[tuple[str, int, int, float]]:
        """Returns (id, slots, free slots, seconds since last heard) of each TaskManager."""
        now = self._host.clock.monotonic()
        return [(*line, self._monitor.silence_s(line[0], now)) for line in self.overview()]

    def network_bytes(self, worker_id: str) -> int:
        """Returns the network memory of a TaskManager in bytes; 0 if the TaskManager is gone."""
        worker = self._workers.get(worker_id)
        return 0 if worker is None else worker.network_bytes

    @property
    def fenced_total(self) -> int:
        """Number of messages of replaced processes that were refused, here and in the
        TaskManagers."""
        return (
            self._slots.fenced_total
            + self._fenced_by_the_gone
            + sum(worker.fenced_total for worker in self._workers.values())
        )

    # TaskManagers.

    def register(
        self,
        connection: RpcConnection,
        worker_id: str,
        report: Sequence[SlotStatus],
        *,
        isolated: bool = False,
        network_bytes: int = 0,
    ) -> int:
        """Registers a TaskManager and returns the number of its registration.

        A TaskManager that registers again has ended its tasks.
        """
        if worker_id in self._workers:
            self._lost(worker_id, "it registers again")
        registration, instructions = self._slots.register_worker(
            self._token, worker_id, report, self._host.clock.monotonic()
        )
        self._workers[worker_id] = _TaskManager(connection, registration, isolated, network_bytes)
        self._monitor.monitor(worker_id, self._host.clock.monotonic())
        if self._provider is not None:
            self._provider.registered(worker_id)
        logger.info("taskmanager %s is registered with %s", worker_id, counted(len(report), "slot"))
        self._carry_out(instructions)
        return registration

    def heartbeat(
        self, worker_id: str, registration: int, report: Sequence[SlotStatus], fenced_total: int = 0
    ) -> None:
        """Handles a heartbeat of a TaskManager. `fenced_total` is the number of messages that the
        TaskManager has refused so far."""
        self._monitor.received(worker_id, self._host.clock.monotonic())
        worker = self._workers.get(worker_id)
        if worker is not None and worker.registration == registration:
            worker.fenced_total = fenced_total
        self._carry_out(
            self._slots.slot_report(
                self._token, worker_id, registration, report, self._host.clock.monotonic()
            )
        )

    def alive(self, worker_id: str, registration: int) -> None:
        """Notes that the process of the TaskManager lives, although its loop may be blocked and
        send no slot report."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.registration == registration:
            self._monitor.lives(worker_id, self._host.clock.monotonic())

    def slot_freed(self, worker_id: str, registration: int, allocation_id: str) -> None:
        self._carry_out(
            self._slots.slot_freed(
                self._token, worker_id, registration, allocation_id, self._host.clock.monotonic()
            )
        )

    def connection_ended(self, connection: RpcConnection) -> None:
        """Declares a TaskManager lost when its connection ends.

        The TaskManager then ends its tasks, and may register again. A provider has `suspicion_s` to
        say how the TaskManager's process ended.
        """
        for worker_id, worker in list(self._workers.items()):
            if worker.connection is not connection:
                continue
            if self._provider is None:
                self._lost(worker_id, "its connection ended")
            else:
                self._obey(self._monitor.connection_ended(worker_id, self._host.clock.monotonic()))

    def lose(self, worker_id: str, reason: str) -> None:
        """Declares a TaskManager lost, for a reason that the caller knows. Idempotent."""
        if worker_id in self._workers:
            self._lost(worker_id, reason)

    def lose_job(self, job_id: str, worker_id: str, reason: str) -> None:
        """Ends a job's process that does not carry out a request.

        If the TaskManager itself is that process, the TaskManager is declared lost.
        """
        worker = self._workers.get(worker_id)
        if worker is not None and worker.isolated:
            worker.connection.notify("end_job", job_id, reason)
        else:
            self.lose(worker_id, reason)

    def job_over(self, job_id: str) -> None:
        """Ends processes that still load the code of a job that has ended, because an import may
        hang."""
        for worker_id in self._slots.opening(job_id):
            if self._workers[worker_id].isolated:
                self.lose_job(job_id, worker_id, "its job ended before it was opened")

    async def ask(self, worker_id: str, method: str, *args: Any) -> Any:
        """Calls a TaskManager for monitoring. Raises Broken if the TaskManager is gone."""
        worker = self._workers.get(worker_id)
        if worker is None:
            raise Broken(f"taskmanager {worker_id} is gone")
        return await worker.connection.call(method, *args)

    def release_all(self, reason: str) -> None:
        """Releases every TaskManager."""
        for worker in self._workers.values():
            worker.connection.notify("release", reason)

    def _lost(self, worker_id: str, reason: str) -> None:
        worker = self._workers.pop(worker_id)
        self._fenced_by_the_gone += worker.fenced_total
        self._monitor.unmonitor(worker_id)
        loss = None if self._provider is None else self._provider.lost(worker_id, reason)
        if loss is None:
            logger.warning("taskmanager %s is lost: %s", worker_id, reason)
        else:
            logger.warning("%s", loss)
        # Its unread messages are dropped: a replacement may run its tasks.
        worker.connection.abort(loss or Broken(f"taskmanager {worker_id} is lost: {reason}"))
        # Jobs first: they want replacements for lost slots, which must not come from the lost
        # worker.
        instructions = self._slots.unregister_worker(
            self._token, worker_id, worker.registration, self._host.clock.monotonic()
        )
        for job in list(self._jobs.values()):
            job.worker_lost(worker_id, loss)
        self._carry_out(instructions)

    def resize(
        self, workers: int, slots_per_worker: int, leaving: frozenset[str] = frozenset()
    ) -> None:
        """Sets how many workers to keep. Workers in `leaving` do not count, and are released when
        idle.
        """
        now = self._host.clock.monotonic()
        self._carry_out(self._slots.resize(workers, slots_per_worker, leaving, now))

    # Jobs.

    def slots_accepted(self, worker_id: str, allocation_ids: Sequence[str]) -> None:
        self._slots.slots_accepted(worker_id, allocation_ids)

    def declare(self, job_id: str, slots: int) -> None:
        """Sets the total number of slots that a job wants."""
        job = self._jobs.get(job_id)
        token = self._token if job is None else job.token
        now = self._host.clock.monotonic()
        self._carry_out(self._slots.declare(self._token, job_id, token, slots, self._address, now))

    # Instructions.

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case RequestSlot():
                    _ = self._group.create_task(
                        self._request(instruction), name=f"request slot of {instruction.worker_id}"
                    )
                case NotEnoughResources(job_id, wanted, available, existing):
                    job = self._jobs.get(job_id)
                    # No warning for a job that already runs with fewer slots, or waits in line.
                    if job is None or job.deployer.no_resources(available, existing):
                        told = "job %s needs %s, there %s %d"
                        needed = counted(wanted, "slot")
                        verb = "is" if available == 1 else "are"
                        logger.warning(told, job_id, needed, verb, available)
                case ReleaseWorker(worker_id, reason):
                    worker = self._workers.pop(worker_id, None)
                    if worker is not None:
                        self._monitor.unmonitor(worker_id)
                        worker.connection.notify("release", reason)
                        for job in list(self._jobs.values()):
                            job.worker_lost(worker_id)
                case LoseProcess(worker_id, job_id, reason):
                    self.lose_job(job_id, worker_id, reason)
                case OpensSlowly(worker_id, job_id, waited_s):
                    logger.warning(
                        "job %s waits for taskmanager %s, which has not opened it for %.0f s: it "
                        "still imports the program, its own log says where; it counts as lost "
                        "after %g s",
                        job_id,
                        worker_id,
                        waited_s,
                        self._slots.options.open_timeout_s,
                    )
                case SlotsLost(job_id, worker_id):
                    if job_id in self._jobs:
                        self._jobs[job_id].worker_lost(worker_id)
                case StartWorker(count) if self._provider is not None:
                    self._provider.start_workers(
                        count,
                        partial(
                            asyncio.get_running_loop().call_soon_threadsafe, self._start_failed
                        ),
                    )
                case StartWorker(count):
                    logger.info(
                        "%d more taskmanagers are wanted; in this cluster they come by themselves",
                        count,
                    )

    def _start_failed(self) -> None:
        self._carry_out(self._slots.worker_start_failed(1, self._host.clock.monotonic()))

    async def _request(self, request: RequestSlot) -> None:
        worker = self._workers.get(request.worker_id)
        if worker is None or worker.registration != request.registration:
            return
        key = (self._token, request.worker_id, request.registration, request.allocation_id)
        status: SlotStatus | None = None
        try:
            other = await worker.connection.call(
                "request_slot",
                request.index,
                request.job_id,
                request.allocation_id,
                request.address,
            )
        except AioflowError as error:
            logger.warning(
                "slot %d of taskmanager %s was not given: %s",
                request.index,
                request.worker_id,
                error,
            )
        else:
            if other is None:
                self._carry_out(self._slots.slot_granted(*key))
                return
            status = SlotStatus(*other)
        self._carry_out(self._slots.slot_refused(*key, status, self._host.clock.monotonic()))

    async def _run_timers(self) -> None:
        beat = self._heartbeat
        while True:
            await asyncio.sleep(min(beat.interval_s / 4, beat.suspicion_s or beat.interval_s))
            now = self._host.clock.monotonic()
            self._carry_out(self._slots.tick(now))
            self._obey(self._monitor.tick(now))

    def _obey(self, instructions: Sequence[HeartbeatInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case SendHeartbeat(worker_id, _):
                    self._workers[worker_id].connection.notify("heartbeat")
                case TimedOut(worker_id, Reason.SILENCE):
                    self._lost(worker_id, f"no sign of life for {self._heartbeat.timeout_s:g} s")
                case TimedOut(worker_id, reason):
                    self._lost(worker_id, reason.value)
