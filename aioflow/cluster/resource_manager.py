"""The ResourceManager's decisions: which job gets which slot, and how many workers there are.

This module only decides; `resource_driver` carries out its instructions.

    JobMaster declares "2 slots"
        -> a registered worker has free ones: RequestSlot to that worker, which offers them to the
           JobMaster
        -> none free: StartWorker; the new worker registers with its slots; then the same

    slot: FREE --RequestSlot sent--> PENDING
          PENDING --worker confirms--> ALLOCATED --worker frees it--> FREE
          PENDING --worker refuses: it says what is there--> FREE or ALLOCATED

The workers know which slots are taken; this module keeps a copy, which their reports correct. So a
new leader needs no store. Workers register again with their reports, jobs declare their
requirements again, and running tasks are not touched. Meanwhile (`recovery_s`) no slot is given out
and no shortage is reported. Every message carries the token of its leader; messages for an older
leader are counted and dropped. Slots are spread: the worker with the fewest taken slots is asked
first. The design follows Flink's FineGrainedSlotManager and ActiveResourceManager.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from aioflow.cluster.slots import SlotStatus

if TYPE_CHECKING:
    from aioflow.cluster.gateways import WorkerProvider

__all__ = [
    "OPENS_SLOWLY_S",
    "Instruction",
    "LoseProcess",
    "NotEnoughResources",
    "OpensSlowly",
    "ReleaseWorker",
    "RequestSlot",
    "SlotManager",
    "SlotManagerOptions",
    "SlotsLost",
    "StartWorker",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotManagerOptions:
    """Options of a SlotManager. Times are in seconds."""

    slots_per_worker: int = 1
    """Expected number of slots of a started worker, to compute how many workers are needed.

    Registered workers report their number of slots themselves.
    """
    workers_min: int = 0
    """Number of workers that are kept although idle."""
    workers_max: int | None = None
    """Maximum number of workers; None means no limit. With 0 none is started: workers register by
    themselves, as in a standalone cluster."""
    idle_timeout_s: float | None = 30.0
    """A worker without a taken slot is released after this time; None: never."""
    request_timeout_s: float = 30.0
    """A shortage of slots is reported to the job after it has lasted for this time."""
    start_timeout_s: float = 60.0
    """A started worker that has not registered within this time counts as failed."""
    open_timeout_s: float = 300.0
    """A worker counts as lost if it has not opened a job within this time after it gave the job a
    slot.

    Importing the program and its libraries takes up to minutes; an import may also hang.
    """
    retry_s: float = 1.0
    """Time before the next try after a failed start or an unanswered request."""
    recovery_s: float = 0.0
    """How long workers and jobs may take to register again with a new leader."""

    def with_provider(self, provider: WorkerProvider) -> SlotManagerOptions:
        """Returns these options for workers that `provider` starts.

        There is no start timeout, because `provider` limits the time of a start and reports each
        failed start.
        """
        return replace(
            self,
            slots_per_worker=provider.slots,
            workers_min=provider.workers,
            workers_max=provider.workers,
            start_timeout_s=math.inf,
        )

    def __post_init__(self) -> None:
        if self.slots_per_worker < 1:
            raise ValueError(f"slots_per_worker is {self.slots_per_worker}, expected at least 1")
        if self.workers_max is not None and self.workers_max < self.workers_min:
            raise ValueError(
                f"workers_max is {self.workers_max}, expected at least workers_min, "
                f"{self.workers_min}"
            )


OPENS_SLOWLY_S = 10.0
"""Time after which the log names a worker that has not opened a job. Most imports are shorter."""


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Instruction to start `count` workers. Each worker registers by itself.

    Failed starts are reported with `worker_start_failed`.
    """

    count: int


@dataclass(frozen=True, slots=True)
class RequestSlot:
    """Instruction to ask the worker for slot `index`, for a job whose JobMaster is at `address`.

    The answer is reported with `slot_granted` or `slot_refused`.
    """

    worker_id: str
    registration: int
    index: int
    job_id: str
    allocation_id: str
    address: str


@dataclass(frozen=True, slots=True)
class ReleaseWorker:
    """Instruction to disconnect the worker, and to end it if this cluster started it. The worker is
    unknown from now on."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class LoseProcess:
    """Instruction to count the process of a job as lost. If the worker is the same process, it is
    lost too."""

    worker_id: str
    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class OpensSlowly:
    """Instruction to log that the worker has not opened the job yet, `waited_s` seconds after the
    slot was requested."""

    worker_id: str
    job_id: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class NotEnoughResources:
    """Instruction to tell the JobMaster that it has `available` slots, and cannot get the `wanted`
    number in time.

    `existing` is the number of all slots, most of which other jobs may have. `existing` is the
    largest such number since the last report, so that the replacement of a worker does not lower
    it.
    """

    job_id: str
    wanted: int
    available: int
    existing: int


@dataclass(frozen=True, slots=True)
class SlotsLost:
    """Instruction to tell the JobMaster that a worker is lost, with all its slots."""

    job_id: str
    worker_id: str


Instruction = (
    StartWorker
    | RequestSlot
    | ReleaseWorker
    | LoseProcess
    | OpensSlowly
    | NotEnoughResources
    | SlotsLost
)


@dataclass(slots=True)
class _Slot:
    index: int
    job_id: str | None = None
    allocation_id: str | None = None
    pending: bool = False
    address: str = ""
    retry_at: float | None = None
    """Time to repeat an unanswered request; None if none is unanswered.

    The worker may have accepted the request, and only another request can show this.
    """
    accept_by: float | None = None
    """Time by which the job must have accepted the slot that was requested for it; None once it
    has."""
    late_at: float | None = None
    """Time of the next log message about the job that the worker has not opened yet; None if there
    is none."""

    @property
    def is_free(self) -> bool:
        return self.allocation_id is None

    def set(self, job_id: str | None, allocation_id: str | None) -> None:
        if allocation_id != self.allocation_id:
            self.accept_by = self.late_at = None
        self.job_id, self.allocation_id = job_id, allocation_id
        self.pending = False
        self.retry_at = None


@dataclass(slots=True)
class _Worker:
    worker_id: str
    registration: int
    slots: list[_Slot]
    idle_since: float | None = None
    has_served: bool = False
    """Whether a job has ever accepted a slot of this worker."""

    @property
    def taken(self) -> int:
        return sum(1 for slot in self.slots if not slot.is_free)


@dataclass(slots=True)
class _Job:
    token: int
    address: str
    wanted: int
    short_since: float | None = None
    existing: int = 0
    """Largest number of slots in the cluster since the job's shortage began or was last
    reported."""


@dataclass(slots=True)
class SlotManager:
    """The slots of a cluster, as seen by the leader with this `token`.

    `now` is the time at which the leader began to lead.
    """

    token: int
    options: SlotManagerOptions
    now: float
    fenced_total: int = 0
    """Number of dropped messages that were meant for other leaders."""
    _workers: dict[str, _Worker] = field(default_factory=dict)
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _starting: list[float] = field(default_factory=list)
    """Deadlines of started workers that have not registered."""
    _start_again_at: float | None = None
    _recovered_at: float | None = None
    _leaving: frozenset[str] = frozenset()
    """Ids of workers whose slots are given to no job any more. Such a worker is released once none
    of its slots is taken."""
    _registrations: int = 0
    _allocations: int = 0

    def __post_init__(self) -> None:
        if self.options.recovery_s > 0:
            self._recovered_at = self.now + self.options.recovery_s

    @property
    def workers(self) -> list[str]:
        """Registered workers, oldest registration first."""
        return list(self._workers)

    def slots_of(self, job_id: str) -> list[tuple[str, int, str]]:
        """Returns (worker id, index, allocation id) of a job's slots, requested ones included."""
        return [
            (worker.worker_id, slot.index, slot.allocation_id)
            for worker in self._workers.values()
            for slot in worker.slots
            if slot.job_id == job_id and slot.allocation_id is not None
        ]

    def opening(self, job_id: str) -> list[str]:
        """Returns the workers that have slots for a job, but have not opened it yet: the job has
        accepted none of their slots.
        """
        unaccepted: dict[str, bool] = {}
        for worker in self._workers.values():
            for slot in worker.slots:
                if slot.job_id == job_id:
                    waits = slot.accept_by is not None
                    unaccepted[worker.worker_id] = unaccepted.get(worker.worker_id, True) and waits
        return [worker_id for worker_id, waits in unaccepted.items() if waits]

    def overview(self) -> list[tuple[str, int, int]]:
        """Returns (id, slots, free slots) of each worker.

        A requested slot is not free, even before the worker answers.
        """
        return [
            (worker.worker_id, len(worker.slots), len(worker.slots) - worker.taken)
            for worker in self._workers.values()
        ]

    # From workers.

    def register_worker(
        self, token: int, worker_id: str, report: Sequence[SlotStatus], now: float
    ) -> tuple[int, list[Instruction]]:
        """Registers a worker with `report`, the content of its slots, and voids its earlier
        registration.

        Returns the number of the registration, which later messages about the worker carry. The
        number is 0 if the message was for another leader.
        """
        if self._is_stale(token):
            return 0, []
        if self._workers.pop(worker_id, None) is None and self._starting:
            self._starting.pop(0)
        self._registrations += 1
        slots = [_Slot(status.index, status.job_id, status.allocation_id) for status in report]
        worker = self._workers[worker_id] = _Worker(worker_id, self._registrations, slots)
        worker.has_served = worker.taken > 0
        return self._registrations, self._after_change(now)

    def unregister_worker(
        self, token: int, worker_id: str, registration: int, now: float
    ) -> list[Instruction]:
        """Removes a worker that has left, whose connection has ended, or that is silent.

        A message about an older registration changes nothing.
        """
        worker = self._worker(token, worker_id, registration)
        if worker is None:
            return []
        del self._workers[worker_id]
        if worker.taken and not worker.has_served and self.options.workers_max != 0:
            # It ended while it loaded the program. That is a failed start, and so is tried later.
            self._start_again_at = now + self.options.retry_s
        jobs = dict.fromkeys(slot.job_id for slot in worker.slots if slot.job_id is not None)
        lost: list[Instruction] = [
            SlotsLost(job_id, worker_id) for job_id in jobs if job_id in self._jobs
        ]
        return lost + self._after_change(now)

    def slot_report(
        self,
        token: int,
        worker_id: str,
        registration: int,
        report: Iterable[SlotStatus],
        now: float,
    ) -> list[Instruction]:
        """Handles the slot report of a heartbeat.

        The report may be older than a request in transit, so it does not end a PENDING slot.
        """
        worker = self._worker(token, worker_id, registration)
        if worker is None:
            return []
        for status in report:
            slot = next((s for s in worker.slots if s.index == status.index), None)
            if slot is None or (slot.pending and status.allocation_id is None):
                continue
            slot.set(status.job_id, status.allocation_id)
        return self._after_change(now)

    def slot_granted(
        self, token: int, worker_id: str, registration: int, allocation_id: str
    ) -> list[Instruction]:
        """Notes that the worker has reserved the slot and offers it to the JobMaster."""
        worker = self._worker(token, worker_id, registration)
        if worker is not None:
            for slot in worker.slots:
                if slot.pending and slot.allocation_id == allocation_id:
                    slot.set(slot.job_id, allocation_id)
        return []

    def slot_refused(
        self,
        token: int,
        worker_id: str,
        registration: int,
        allocation_id: str,
        status: SlotStatus | None,
        now: float,
    ) -> list[Instruction]:
        """Notes that the worker refused a slot. `status` is the present content of the slot.

        If `status` is None, the worker did not answer, and is asked again.
        """
        worker = self._worker(token, worker_id, registration)
        if worker is None:
            return []
        for slot in worker.slots:
            if slot.pending and slot.allocation_id == allocation_id:
                if status is None:
                    slot.retry_at = now + self.options.retry_s
                else:
                    slot.set(status.job_id, status.allocation_id)
        return self._after_change(now)

    def slot_freed(
        self, token: int, worker_id: str, registration: int, allocation_id: str, now: float
    ) -> list[Instruction]:
        """Notes that the worker has freed a slot."""
        worker = self._worker(token, worker_id, registration)
        if worker is None:
            return []
        for slot in worker.slots:
            if slot.allocation_id == allocation_id:
                slot.set(None, None)
        return self._after_change(now)

    # From JobMasters.

    def slots_accepted(self, worker_id: str, allocation_ids: Iterable[str]) -> None:
        """Notes that a job accepted slots of the worker, which therefore has loaded the job's
        code."""
        worker = self._workers.get(worker_id)
        accepted = set(allocation_ids)
        for slot in () if worker is None else worker.slots:
            if worker is not None and slot.allocation_id in accepted:
                slot.accept_by = slot.late_at = None
                worker.has_served = True

    def declare(
        self, token: int, job_id: str, job_token: int, slots: int, address: str, now: float
    ) -> list[Instruction]:
        """Sets the number of slots that a job wants in all; 0 removes the requirement.

        A call of an older JobMaster of the job is dropped like a call of a stale leader. A job that
        wants fewer slots keeps all its slots, because only the job knows which ones to free. Slots
        of a lost JobMaster stay taken until their workers free them, so that the next JobMaster
        finds them.
        """
        if self._is_stale(token):
            return []
        known = self._jobs.get(job_id)
        if known is not None and job_token < known.token:
            self.fenced_total += 1
            return []
        if slots == 0:
            self._jobs.pop(job_id, None)
        else:
            job = self._jobs[job_id] = _Job(job_token, address, slots)
            if known is not None:
                job.short_since, job.existing = known.short_since, known.existing
        return self._after_change(now)

    # From the worker factory and time.

    def resize(
        self, workers: int, slots_per_worker: int, leaving: frozenset[str], now: float
    ) -> list[Instruction]:
        """Sets how many workers to keep. Workers in `leaving` do not count, and are released when
        idle.
        """
        self.options = replace(
            self.options,
            workers_min=workers,
            workers_max=workers,
            slots_per_worker=slots_per_worker,
        )
        self._leaving = leaving
        return self._after_change(now)

    def worker_start_failed(self, count: int, now: float) -> list[Instruction]:
        """Notes that `count` workers could not be started. The start is tried again later."""
        del self._starting[:count]
        self._start_again_at = now + self.options.retry_s
        return []

    def tick(self, now: float) -> list[Instruction]:
        """Returns the instructions that are due at `now`."""
        instructions: list[Instruction] = []
        if self._recovered_at is not None and now >= self._recovered_at:
            self._recovered_at = None
        self._starting = [deadline for deadline in self._starting if now < deadline]
        if self._start_again_at is not None and now >= self._start_again_at:
            self._start_again_at = None
        for worker in self._workers.values():
            for slot in worker.slots:
                if slot.retry_at is not None and now >= slot.retry_at:
                    slot.retry_at = None
                    instructions.append(self._request(worker, slot))
        instructions += self._lose_those_that_open_no_job(now)
        instructions += self._after_change(now)
        if self._recovered_at is None:
            instructions += self._tell_shortage(now)
            instructions += self._release_idle(now)
        return instructions

    def next_due(self) -> float | None:
        """Returns the time at which `tick` next has something to do; None if there is none."""
        due = list(self._starting)
        due += [at for at in (self._start_again_at, self._recovered_at) if at is not None]
        due += [
            slot.retry_at
            for worker in self._workers.values()
            for slot in worker.slots
            if slot.retry_at is not None
        ]
        due += [
            at
            for worker in self._workers.values()
            for slot in worker.slots
            for at in (slot.accept_by, slot.late_at)
            if at is not None
        ]
        if self._recovered_at is not None:
            return min(due)  # Before that no worker is released and no shortage is reported.
        due += [
            job.short_since + self.options.request_timeout_s
            for job in self._jobs.values()
            if job.short_since is not None
        ]
        if (
            self.options.idle_timeout_s is not None
            and len(self._workers) > self.options.workers_min
        ):
            idle = [w.idle_since for w in self._workers.values() if w.idle_since is not None]
            due += [since + self.options.idle_timeout_s for since in idle]
        return min(due, default=None)

    # Consequences.

    def _after_change(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        short = 0
        existing = self._existing()
        if self._recovered_at is None:
            for job_id, job in self._jobs.items():
                missing = job.wanted - len(self.slots_of(job_id))
                while missing > 0 and (found := self._find_free()) is not None:
                    worker, slot = found
                    self._allocations += 1
                    slot.set(job_id, f"{self.token}-{self._allocations}")
                    slot.pending = True
                    slot.accept_by = now + self.options.open_timeout_s
                    slot.late_at = now + OPENS_SLOWLY_S
                    slot.address = job.address
                    instructions.append(self._request(worker, slot))
                    missing -= 1
                if missing <= 0:
                    job.short_since = None
                else:
                    short += missing
                    if job.short_since is None:
                        job.short_since, job.existing = now, 0
                    job.existing = max(job.existing, existing)
        for worker in self._workers.values():
            if worker.taken:
                worker.idle_since = None
            elif worker.idle_since is None:
                worker.idle_since = now
        return instructions + self._release_leaving() + self._start_for(short, now)

    def _find_free(self) -> tuple[_Worker, _Slot] | None:
        """Returns a free slot of the worker with the fewest taken slots. Among equals, the oldest
        registration wins.
        """
        candidates = [
            worker
            for worker in self._workers.values()
            if worker.taken < len(worker.slots) and worker.worker_id not in self._leaving
        ]
        if not candidates:
            return None
        worker = min(candidates, key=lambda w: w.taken)
        return worker, next(slot for slot in worker.slots if slot.is_free)

    def _request(self, worker: _Worker, slot: _Slot) -> RequestSlot:
        assert slot.job_id is not None and slot.allocation_id is not None
        return RequestSlot(
            worker.worker_id,
            worker.registration,
            slot.index,
            slot.job_id,
            slot.allocation_id,
            slot.address,
        )

    def _start_for(self, short: int, now: float) -> list[Instruction]:
        options = self.options
        if self._start_again_at is not None:
            return []
        wanted = -(-short // options.slots_per_worker)
        staying = sum(worker_id not in self._leaving for worker_id in self._workers)
        if self._recovered_at is None:
            wanted = max(wanted, options.workers_min - staying)
        if options.workers_max is not None:
            wanted = min(wanted, options.workers_max - staying)
        count = wanted - len(self._starting)
        if count <= 0:
            return []
        self._starting += [now + options.start_timeout_s] * count
        return [StartWorker(count)]

    def _tell_shortage(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for job_id, job in self._jobs.items():
            if (
                job.short_since is not None
                and now >= job.short_since + self.options.request_timeout_s
            ):
                # A job may choose to wait on: the shortage is then reported again later.
                job.short_since = now
                available = len(self.slots_of(job_id))
                instructions.append(NotEnoughResources(job_id, job.wanted, available, job.existing))
                job.existing = self._existing()
        return instructions

    def _existing(self) -> int:
        """Returns the number of all slots, except those of leaving workers."""
        return sum(
            len(worker.slots)
            for worker in self._workers.values()
            if worker.worker_id not in self._leaving
        )

    def _lose_those_that_open_no_job(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for worker in self._workers.values():
            instructions += self._tell_slow(worker, now)
            late = next(
                (s for s in worker.slots if s.accept_by is not None and now >= s.accept_by), None
            )
            if late is not None and late.job_id is not None:
                timeout_s = self.options.open_timeout_s
                late.accept_by = now + timeout_s
                why = f"job {late.job_id} was not opened within {timeout_s:g} s"
                instructions.append(
                    LoseProcess(
                        worker.worker_id, late.job_id, f"{why}: an import of its program may hang"
                    )
                )
        return instructions

    def _tell_slow(self, worker: _Worker, now: float) -> list[Instruction]:
        """Returns instructions to log the jobs that the worker is slow to open: once, and again
        each time the waiting time has doubled.
        """
        waited: dict[str, float] = {}
        for slot in worker.slots:
            if slot.late_at is None or now < slot.late_at or now >= (slot.accept_by or now):
                continue
            assert slot.job_id is not None and slot.accept_by is not None
            waited_s = now - (slot.accept_by - self.options.open_timeout_s)
            slot.late_at = now + waited_s
            waited[slot.job_id] = max(waited_s, waited.get(slot.job_id, 0.0))
        return [OpensSlowly(worker.worker_id, *one) for one in waited.items()]

    def _release_idle(self, now: float) -> list[Instruction]:
        timeout = self.options.idle_timeout_s
        if timeout is None:
            return []
        instructions: list[Instruction] = []
        for worker in list(self._workers.values()):
            idle = worker.idle_since is not None and now >= worker.idle_since + timeout
            if idle and len(self._workers) > self.options.workers_min:
                del self._workers[worker.worker_id]
                instructions.append(
                    ReleaseWorker(
                        worker.worker_id, f"none of its slots was taken for {timeout:g} s"
                    )
                )
        return instructions

    def _release_leaving(self) -> list[Instruction]:
        idle = [
            worker_id
            for worker_id in self._leaving
            if worker_id in self._workers and not self._workers[worker_id].taken
        ]
        for worker_id in sorted(idle):
            del self._workers[worker_id]
        return [
            ReleaseWorker(worker_id, "the job goes on without it") for worker_id in sorted(idle)
        ]

    def _worker(self, token: int, worker_id: str, registration: int) -> _Worker | None:
        if self._is_stale(token):
            return None
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.registration == registration else None

    def _is_stale(self, token: int) -> bool:
        if token == self.token:
            return False
        self.fenced_total += 1
        return True
