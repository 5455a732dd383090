"""The slots of one worker, with their jobs and tasks. This is the TaskExecutor's side of slots.

This module only decides; the TaskManager carries out its instructions.

    FREE --ResourceManager asks for a job--> ALLOCATED --JobMaster accepts, or deploys--> ACTIVE
    ALLOCATED --rejected, or not taken in time--> FREE
    ACTIVE --JobMaster lost: its tasks are failed--> ALLOCATED, kept for the next JobMaster for a
           while
    ALLOCATED, ACTIVE --freed--> FREE, or RELEASING while tasks are still inside
    RELEASING --last task ended--> FREE

Invariants: a slot has one job and one allocation from its request until it is FREE. It is FREE only
when no task is inside. Only the JobMaster that leads the job now may deploy a task into the slot.
Fencing tokens distinguish JobMasters: of two tokens, the larger belongs to the newer leader. A slot
is offered to a JobMaster only when no task of an older JobMaster is left in the slot. The design
follows Flink's TaskSlotTableImpl.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from aioflow.cluster.scheduler import SlotOffer
from aioflow.core.errors import AioflowError, StaleLeader
from aioflow.graph.deployment import ExecutionAttemptId

__all__ = [
    "ConnectToJobMaster",
    "FailTasks",
    "Instruction",
    "OfferSlots",
    "SlotFreed",
    "SlotNotActive",
    "SlotOccupied",
    "SlotState",
    "SlotStatus",
    "TaskSlotTable",
]


class SlotState(Enum):
    """State of a slot."""

    FREE = "FREE"
    ALLOCATED = "ALLOCATED"
    ACTIVE = "ACTIVE"
    RELEASING = "RELEASING"


class SlotOccupied(AioflowError):
    """The error for a requested slot that belongs to another allocation. `status` holds the present
    content of the slot."""

    def __init__(self, message: str, status: SlotStatus) -> None:
        super().__init__(message)
        self.status = status


class SlotNotActive(AioflowError):
    """The error for a task that is submitted to a slot that does not accept tasks of its job."""


class SlotStatus(msgspec.Struct, frozen=True):
    """The content of one slot, as a line of a slot report. Both ids are None for a slot that is
    FREE."""

    index: int
    job_id: str | None = None
    allocation_id: str | None = None


class ConnectToJobMaster(msgspec.Struct, frozen=True):
    """Instruction to find the leader of this job, to connect to it, and then to call
    `job_master_connected`."""

    job_id: str
    address: str


class OfferSlots(msgspec.Struct, frozen=True):
    """Instruction to offer `slots` to the JobMaster with this token.

    The answer is reported to `offer_answered` with the number `offer`. If the connection ends
    first, nothing is reported.
    """

    job_id: str
    token: int
    offer: int
    slots: tuple[SlotOffer, ...]


class FailTasks(msgspec.Struct, frozen=True):
    """Instruction to end `attempts`. Each end is reported to `task_ended`."""

    attempts: tuple[ExecutionAttemptId, ...]
    reason: str


class SlotFreed(msgspec.Struct, frozen=True):
    """Instruction to tell the ResourceManager, if one is connected, that a slot was freed.

    If the JobMaster of the job thereby loses a slot that it had, it is notified too.
    """

    index: int
    job_id: str
    allocation_id: str
    reason: str


Instruction = ConnectToJobMaster | OfferSlots | FailTasks | SlotFreed


class _Slot(msgspec.Struct):
    index: int
    state: SlotState = SlotState.FREE
    job_id: str = ""
    allocation_id: str = ""
    deadline: float | None = None
    """Time at which an ALLOCATED slot is freed unless a JobMaster has accepted it; None for other
    slots."""
    offer: int | None = None
    """Number of the offer whose answer is awaited; None if there is none."""
    reason: str = ""
    tasks: dict[ExecutionAttemptId, None] = msgspec.field(default_factory=dict)


class _JobMaster(msgspec.Struct):
    """The known leader of a job.

    The token is kept after the connection has ended, so that older leaders stay refused.
    """

    token: int
    connected: bool = True


class TaskSlotTable:
    """The slots of one worker. A slot that no JobMaster accepts is kept for `timeout_s` seconds,
    and then freed."""

    def __init__(self, slots: int, timeout_s: float = 10.0) -> None:
        if slots < 1:
            raise ValueError(f"a worker was given {slots} slots, expected at least 1")
        self.timeout_s = timeout_s
        self._slots = [_Slot(index) for index in range(slots)]
        self._job_masters: dict[str, _JobMaster] = {}
        self._offers = 0
        self.fenced_total = 0
        """Number of refused requests of replaced JobMasters."""

    def report(self) -> tuple[SlotStatus, ...]:
        """Returns the slot report for the ResourceManager, sent at registration and with
        heartbeats.

        RELEASING slots are reported as taken.
        """
        return tuple(self._status(slot) for slot in self._slots)

    def state(self, index: int) -> SlotState:
        return self._slots[index].state

    def next_due(self) -> float | None:
        """Returns the time at which `tick` next has something to do; None if there is none."""
        return min((s.deadline for s in self._slots if s.deadline is not None), default=None)

    # From the ResourceManager.

    def request(
        self, index: int, job_id: str, allocation_id: str, address: str, now: float
    ) -> list[Instruction]:
        """Reserves slot `index` for a job and offers it to the JobMaster at `address`.

        A repeated request changes nothing. Raises SlotOccupied if the slot is not FREE, and
        ValueError if there is no such slot.
        """
        if not 0 <= index < len(self._slots):
            raise ValueError(
                f"slot {index} was requested for job {job_id}, this worker has slots 0 to "
                f"{len(self._slots) - 1}"
            )
        slot = self._slots[index]
        if slot.state is not SlotState.FREE:
            if (slot.job_id, slot.allocation_id) == (
                job_id,
                allocation_id,
            ) and slot.state is not SlotState.RELEASING:
                return []
            raise SlotOccupied(
                f"slot {index} was requested for job {job_id} (allocation {allocation_id}): it is "
                f"{slot.state.value} for job {slot.job_id} "
                f"(allocation {slot.allocation_id}), expected FREE; take another",
                self._status(slot),
            )
        slot.state = SlotState.ALLOCATED
        slot.job_id, slot.allocation_id = job_id, allocation_id
        slot.deadline = now + self.timeout_s
        if self.is_connected(job_id):
            return self._offer(job_id)
        return [ConnectToJobMaster(job_id, address)]

    # From JobMasters.

    def job_master_connected(self, job_id: str, token: int, now: float) -> list[Instruction]:
        """Connects the leader of a job and offers it the slots kept for the job.

        A newer leader replaces an older one. Raises StaleLeader if a newer leader was connected
        before.
        """
        known = self._job_masters.get(job_id)
        instructions: list[Instruction] = []
        if known is not None:
            if token < known.token:
                raise self._stale(job_id, token, known.token, "connects")
            if token > known.token and known.connected:
                instructions += self.job_master_lost(job_id, known.token, now)
        self._job_masters[job_id] = _JobMaster(token)
        return instructions + self._offer(job_id)

    def job_master_lost(self, job_id: str, token: int, now: float) -> list[Instruction]:
        """Fails the tasks of a JobMaster whose connection is lost.

        The slots of the job are kept for the next JobMaster until the timeout. The end of a
        connection to an older JobMaster changes nothing.
        """
        known = self._job_masters.get(job_id)
        if known is None or known.token != token or not known.connected:
            return []
        known.connected = False
        attempts: list[ExecutionAttemptId] = []
        for slot in self._of_job(job_id):
            attempts += slot.tasks
            slot.offer = None
            if slot.state is SlotState.ACTIVE:
                slot.state = SlotState.ALLOCATED
                slot.deadline = now + self.timeout_s
        self._forget_job_master(job_id)
        if not attempts:
            return []
        return [FailTasks(tuple(attempts), f"the job master of job {job_id} is gone")]

    def job_over(self, job_id: str, token: int) -> list[Instruction]:
        """Frees the slots of a job that has ended, and forgets its JobMaster.

        Raises StaleLeader if `token` is not that of the present JobMaster.
        """
        self._check(job_id, token, "ends the job")
        self._job_masters[job_id].connected = False
        instructions: list[Instruction] = []
        for slot in self._of_job(job_id):
            instructions += self._free(slot, f"job {job_id} is over")
        self._forget_job_master(job_id)
        return instructions

    def offer_answered(
        self,
        job_id: str,
        token: int,
        offer: int,
        accepted: tuple[str, ...],
        rejected: tuple[str, ...],
    ) -> list[Instruction]:
        """Handles the answer to an offer. Slots that are neither accepted nor rejected count as
        rejected.

        Raises StaleLeader if the JobMaster no longer leads.
        """
        self._check(job_id, token, "answers an offer")
        instructions: list[Instruction] = []
        for slot in self._of_job(job_id):
            if slot.offer != offer:
                continue
            slot.offer = None
            if slot.state is not SlotState.ALLOCATED:
                continue
            if slot.allocation_id in accepted and slot.allocation_id not in rejected:
                self._activate(slot)
            else:
                instructions += self._free(slot, f"the job master of job {job_id} did not take it")
        return instructions

    def add_task(self, attempt: ExecutionAttemptId, allocation_id: str, token: int) -> None:
        """Adds a task to a slot.

        A deployment may arrive before the answer to the offer, and then accepts the slot as well.
        Raises StaleLeader if `token` is not that of the present JobMaster. Raises SlotNotActive if
        the slot does not belong to the task's job, or is being freed.
        """
        job_id = attempt.job_id
        self._check(job_id, token, f"deploys {attempt}")
        slot = self._find(allocation_id)
        # ALLOCATED and not on offer: tasks of an earlier JobMaster are still inside.
        on_offer = slot is not None and slot.offer is not None
        if (
            slot is None
            or slot.job_id != job_id
            or not (slot.state is SlotState.ACTIVE or on_offer)
        ):
            what = (
                "no slot has it"
                if slot is None
                else f"slot {slot.index} is {slot.state.value} for job {slot.job_id}"
            )
            raise SlotNotActive(
                f"attempt {attempt} was submitted to allocation {allocation_id}: {what}, expected "
                f"a slot that is ACTIVE for job {job_id}; "
                "request a slot again"
            )
        if slot.state is SlotState.ALLOCATED:
            self._activate(slot)
        slot.tasks[attempt] = None

    def free_slot(self, allocation_id: str, token: int, reason: str) -> list[Instruction]:
        """Frees a slot that the JobMaster no longer needs. Tasks inside it fail.

        Does nothing for an unknown allocation, which is free already. Raises StaleLeader if `token`
        is not that of the present JobMaster.
        """
        slot = self._find(allocation_id)
        if slot is None:
            return []
        self._check(slot.job_id, token, f"frees allocation {allocation_id}")
        return self._free(slot, reason)

    # From tasks and time.

    def give_back(self, job_id: str, reason: str) -> list[Instruction]:
        """Frees the slots of a job that has no task on this worker and will get none.

        After that the JobMaster counts as lost, so the next slot opens the job again.
        """
        if self.is_connected(job_id):
            self._job_masters[job_id].connected = False
        instructions: list[Instruction] = []
        for slot in self._of_job(job_id):
            slot.tasks.clear()
            slot.reason = slot.reason or reason
            slot.deadline = slot.offer = None
            instructions.append(self._make_free(slot))
        self._forget_job_master(job_id)
        return instructions

    def holds(self, attempt: ExecutionAttemptId) -> bool:
        """Whether the task of `attempt` is in a slot and has not ended yet."""
        return any(attempt in slot.tasks for slot in self._slots)

    def slots_of(self, job_id: str) -> int:
        """Returns how many slots of this worker a job has."""
        return len(self._of_job(job_id))

    def task_ended(self, attempt: ExecutionAttemptId) -> list[Instruction]:
        """Notes that a task has ended and released its resources."""
        for slot in self._slots:
            if attempt in slot.tasks:
                del slot.tasks[attempt]
                if slot.tasks:
                    return []
                if slot.state is SlotState.RELEASING:
                    return [self._make_free(slot)]
                return self._offer(slot.job_id)
        return []

    def tick(self, now: float) -> list[Instruction]:
        """Frees slots that no JobMaster accepted in time."""
        instructions: list[Instruction] = []
        for slot in self._slots:
            if slot.deadline is not None and now >= slot.deadline:
                instructions += self._free(
                    slot, f"no job master of job {slot.job_id} took it within {self.timeout_s:g} s"
                )
        return instructions

    # Consequences.

    def _offer(self, job_id: str) -> list[Instruction]:
        """Offers the slots that are reserved for the job, hold no task, and are not offered
        already."""
        if not self.is_connected(job_id):
            return []
        slots = [
            s
            for s in self._of_job(job_id)
            if s.state is SlotState.ALLOCATED and not s.tasks and s.offer is None
        ]
        if not slots:
            return []
        self._offers += 1
        for slot in slots:
            slot.offer = self._offers
        offered = tuple(SlotOffer(slot.allocation_id, slot.index) for slot in slots)
        return [OfferSlots(job_id, self._job_masters[job_id].token, self._offers, offered)]

    def _activate(self, slot: _Slot) -> None:
        slot.state = SlotState.ACTIVE
        slot.deadline = None
        slot.offer = None

    def _free(self, slot: _Slot, reason: str) -> list[Instruction]:
        if slot.state is SlotState.RELEASING:
            return []
        slot.reason = reason
        slot.deadline = None
        slot.offer = None
        if not slot.tasks:
            return [self._make_free(slot)]
        slot.state = SlotState.RELEASING
        return [FailTasks(tuple(slot.tasks), f"slot {slot.index} is freed: {reason}")]

    def _make_free(self, slot: _Slot) -> SlotFreed:
        freed = SlotFreed(slot.index, slot.job_id, slot.allocation_id, slot.reason)
        slot.state = SlotState.FREE
        slot.job_id = slot.allocation_id = slot.reason = ""
        self._forget_job_master(freed.job_id)
        return freed

    def _forget_job_master(self, job_id: str) -> None:
        """Forgets the JobMaster of a job if the job has no slot on this worker.

        While the job has a slot, the token is kept to refuse older leaders. Without a slot, an
        older leader can do no harm.
        """
        if not self.is_connected(job_id) and not self._of_job(job_id):
            self._job_masters.pop(job_id, None)

    def _status(self, slot: _Slot) -> SlotStatus:
        return (
            SlotStatus(slot.index)
            if slot.state is SlotState.FREE
            else SlotStatus(slot.index, slot.job_id, slot.allocation_id)
        )

    def _find(self, allocation_id: str) -> _Slot | None:
        return next(
            (
                s
                for s in self._slots
                if s.state is not SlotState.FREE and s.allocation_id == allocation_id
            ),
            None,
        )

    def _of_job(self, job_id: str) -> list[_Slot]:
        return [s for s in self._slots if s.state is not SlotState.FREE and s.job_id == job_id]

    def is_connected(self, job_id: str) -> bool:
        """Returns whether this worker is connected to a JobMaster of the job."""
        known = self._job_masters.get(job_id)
        return known is not None and known.connected

    def _is_current(self, job_id: str, token: int) -> bool:
        return self.is_connected(job_id) and self._job_masters[job_id].token == token

    def _check(self, job_id: str, token: int, what: str) -> None:
        if not self._is_current(job_id, token):
            known = self._job_masters.get(job_id)
            raise self._stale(job_id, token, None if known is None else known.token, what)

    def _stale(self, job_id: str, token: int, known: int | None, what: str) -> StaleLeader:
        # A JobMaster that merely lost its connection is not replaced.
        if known is not None and token < known:
            self.fenced_total += 1
        expected = (
            "no job master is connected"
            if known is None
            else f"the leader known here has token {known}"
        )
        return StaleLeader(
            f"the job master of job {job_id} with fencing token {token} {what}: {expected}; "
            "expected the connected leader, connect first"
        )
