"""Slots of a cluster: who gets which, when workers are started and released, and how the roles
agree with each other.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from aioflow.cluster.resource_manager import (
    OPENS_SLOWLY_S,
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
from aioflow.cluster.scheduler import (
    DeclareRequirement,
    FreeSlot,
    OfferAnswer,
    Placed,
    PlacementFailed,
    SlotScheduler,
    SubtasksLost,
)
from aioflow.cluster.slots import (
    ConnectToJobMaster,
    FailTasks,
    OfferSlots,
    SlotFreed,
    SlotNotActive,
    SlotOccupied,
    SlotState,
    SlotStatus,
    TaskSlotTable,
)
from aioflow.core.errors import StaleLeader
from aioflow.graph.deployment import ExecutionAttemptId
from aioflow.graph.job_graph import JobGraph, JobVertex

OPTIONS = SlotManagerOptions(
    slots_per_worker=2,
    workers_max=10,
    idle_timeout_s=30.0,
    request_timeout_s=20.0,
    start_timeout_s=60.0,
)
STANDALONE = SlotManagerOptions(workers_max=0, idle_timeout_s=None, request_timeout_s=20.0)


def manager(options: SlotManagerOptions = OPTIONS) -> SlotManager:
    return SlotManager(1, options, 0.0)


def empty(slots: int = 2) -> tuple[SlotStatus, ...]:
    return tuple(SlotStatus(i) for i in range(slots))


def grant_all(rm: SlotManager, instructions: list[Instruction]) -> list[RequestSlot]:
    requests = [i for i in instructions if isinstance(i, RequestSlot)]
    for r in requests:
        assert rm.slot_granted(rm.token, r.worker_id, r.registration, r.allocation_id) == []
        rm.slots_accepted(r.worker_id, [r.allocation_id])
    return requests


# One coordinator by itself.


def test_with_free_slots_at_hand_a_declaration_asks_the_workers_for_them() -> None:
    """I2: the sequence with a worker that is registered already."""
    rm = manager()
    registration, instructions = rm.register_worker(1, "w", empty(), 0.0)
    assert instructions == []
    assert rm.declare(1, "job", 1, 1, "jm:1", 1.0) == [
        RequestSlot("w", registration, 0, "job", "1-1", "jm:1")
    ]
    assert sum(free for _, _, free in rm.overview()) == 1, "what was asked for is not given twice"


def test_without_free_slots_workers_are_started_and_asked_once_they_register() -> None:
    """I2: the sequence with a new worker."""
    rm = manager()
    assert rm.declare(1, "job", 1, 3, "jm:1", 0.0) == [StartWorker(2)]
    assert rm.declare(1, "job", 1, 4, "jm:1", 0.0) == [], "two of two slots are on their way"
    assert rm.declare(1, "job", 1, 5, "jm:1", 0.0) == [StartWorker(1)]
    _, instructions = rm.register_worker(1, "w1", empty(), 5.0)
    assert [type(i) for i in instructions] == [RequestSlot, RequestSlot]
    assert rm.tick(6.0) == [], "the others are still expected"


def test_slots_are_spread_over_workers() -> None:
    rm = manager()
    for name in ("w1", "w2", "w3"):
        rm.register_worker(1, name, empty(), 0.0)
    requests = grant_all(rm, rm.declare(1, "job", 1, 4, "jm", 0.0))
    assert Counter(r.worker_id for r in requests) == {"w1": 2, "w2": 1, "w3": 1}
    assert len({r.allocation_id for r in requests}) == 4


def test_a_job_that_cannot_have_its_slots_waits_and_is_then_reported() -> None:
    """I2.1: need 3, have 2."""
    rm = manager(STANDALONE)
    rm.register_worker(1, "w", empty(), 0.0)
    requests = grant_all(rm, rm.declare(1, "job", 1, 3, "jm", 1.0))
    assert len(requests) == 2
    assert rm.tick(20.9) == []
    assert rm.next_due() == 21.0
    assert rm.tick(21.0) == [NotEnoughResources("job", 3, 2, 2)]
    assert rm.tick(21.1) == [], "told once"
    assert rm.tick(41.0) == [NotEnoughResources("job", 3, 2, 2)], "and again, if it goes on waiting"


def test_message_for_a_job_behind_another_one_says_how_many_slots_exist() -> None:
    rm = manager(STANDALONE)
    rm.register_worker(1, "w", empty(), 0.0)
    grant_all(rm, rm.declare(1, "first", 1, 2, "jm", 0.0))
    rm.declare(1, "second", 1, 1, "jm", 1.0)
    assert rm.tick(21.0) == [NotEnoughResources("second", 1, 0, 2)]


def test_a_freed_slot_goes_to_the_job_that_waits_longest() -> None:
    rm = manager(STANDALONE)
    rm.register_worker(1, "w", empty(1), 0.0)
    (first,) = grant_all(rm, rm.declare(1, "first", 1, 1, "jm", 0.0))
    for name in ("second", "third"):
        rm.declare(1, name, 1, 1, "jm", 1.0)
    rm.declare(1, "first", 1, 0, "jm", 2.0)
    (request,) = rm.slot_freed(1, "w", first.registration, first.allocation_id, 2.0)
    assert isinstance(request, RequestSlot)
    assert request.job_id == "second"


def test_a_job_in_line_has_the_whole_time_for_the_replacement_of_a_worker() -> None:
    """It failed if its shortage was reported between the loss and the replacement."""
    rm = manager(STANDALONE)
    registration, _ = rm.register_worker(1, "w", empty(), 0.0)
    grant_all(rm, rm.declare(1, "first", 1, 2, "jm", 0.0))
    rm.declare(1, "second", 1, 1, "jm", 1.0)
    rm.unregister_worker(1, "w", registration, 20.0)
    told = [i for i in rm.tick(21.0) if isinstance(i, NotEnoughResources)]
    assert told == [NotEnoughResources("second", 1, 0, 2)]
    told = [i for i in rm.tick(41.0) if isinstance(i, NotEnoughResources)]
    assert NotEnoughResources("second", 1, 0, 0) in told, "no worker has replaced it"


def test_a_job_whose_last_slot_comes_in_time_gets_no_message() -> None:
    """I2.1, the other way."""
    rm = manager(STANDALONE)
    rm.declare(1, "job", 1, 2, "jm", 0.0)
    rm.register_worker(1, "w", empty(), 19.0)
    assert rm.tick(21.0) == []


def test_a_shortage_counts_from_its_beginning_although_the_wish_changes() -> None:
    rm = manager(STANDALONE)
    rm.declare(1, "job", 1, 2, "jm", 0.0)
    rm.declare(1, "job", 1, 3, "jm", 15.0)
    assert rm.tick(20.0) == [NotEnoughResources("job", 3, 0, 0)]


def test_a_worker_that_registers_again_does_not_double_its_slots() -> None:
    """I2.2."""
    rm = manager()
    rm.register_worker(1, "w", empty(), 0.0)
    (request,) = grant_all(rm, rm.declare(1, "job", 1, 1, "jm", 0.0))
    report = (SlotStatus(0, "job", request.allocation_id), SlotStatus(1))
    registration, instructions = rm.register_worker(1, "w", report, 1.0)
    assert instructions == []
    assert rm.workers == ["w"]
    assert sum(free for _, _, free in rm.overview()) == 1
    assert rm.slots_of("job") == [("w", 0, request.allocation_id)]
    assert rm.unregister_worker(1, "w", request.registration, 2.0) == [], (
        "the old connection ends late"
    )
    assert rm.workers == ["w"]
    assert rm.slot_freed(1, "w", request.registration, request.allocation_id, 2.0) == []
    assert sum(free for _, _, free in rm.overview()) == 1
    assert rm.slot_freed(1, "w", registration, request.allocation_id, 2.0) != []


def test_an_idle_worker_is_released_and_a_busy_one_is_not() -> None:
    """I2.3."""
    rm = manager()
    rm.register_worker(1, "busy", empty(), 0.0)
    grant_all(rm, rm.declare(1, "job", 1, 1, "jm", 0.0))
    rm.register_worker(1, "idle", empty(), 1.0)
    assert rm.tick(30.9) == []
    assert [i.worker_id for i in rm.tick(31.0) if isinstance(i, ReleaseWorker)] == ["idle"]
    assert rm.workers == ["busy"]


def test_idle_time_restarts_when_a_slot_is_freed() -> None:
    """I2.3."""
    rm = manager()
    rm.register_worker(1, "w", empty(), 0.0)
    (request,) = grant_all(rm, rm.declare(1, "job", 1, 1, "jm", 20.0))
    rm.declare(1, "job", 1, 0, "jm", 25.0)
    rm.slot_freed(1, "w", request.registration, request.allocation_id, 40.0)
    assert rm.tick(69.0) == []
    assert [type(i) for i in rm.tick(70.0)] == [ReleaseWorker]


def test_requested_number_of_workers_is_kept_and_started() -> None:
    rm = manager(SlotManagerOptions(workers_min=2, workers_max=3, idle_timeout_s=10.0))
    assert rm.tick(0.0) == [StartWorker(2)]
    for name in "abc":
        rm.register_worker(1, name, empty(1), 0.0)
    assert len([i for i in rm.tick(10.0) if isinstance(i, ReleaseWorker)]) == 1
    assert rm.declare(1, "job", 1, 9, "jm", 11.0)[-1] == StartWorker(1), "never more than the most"


def test_messages_for_another_leader_are_dropped_and_counted() -> None:
    """I2.4."""
    rm = SlotManager(5, OPTIONS, 0.0)
    registration, _ = rm.register_worker(5, "w", empty(), 0.0)
    rm.declare(5, "job", 1, 1, "jm", 0.0)
    for stale in (4, 6):
        assert rm.register_worker(stale, "x", empty(), 0.0) == (0, [])
        assert rm.unregister_worker(stale, "w", registration, 0.0) == []
        assert rm.slot_report(stale, "w", registration, empty(), 0.0) == []
        assert rm.slot_freed(stale, "w", registration, "5-1", 0.0) == []
        assert rm.slot_refused(stale, "w", registration, "5-1", SlotStatus(0), 0.0) == []
        assert rm.slot_granted(stale, "w", registration, "5-1") == []
        assert rm.declare(stale, "job", 1, 9, "jm", 0.0) == []
    assert rm.fenced_total == 14
    assert rm.workers == ["w"]
    assert rm.slots_of("job") == [("w", 0, "5-1")]


def test_a_replaced_job_master_does_not_change_what_its_successor_wants() -> None:
    """I2.4, for the job's own leader."""
    rm = manager(STANDALONE)
    rm.declare(1, "job", 2, 3, "jm:2", 0.0)
    assert rm.declare(1, "job", 1, 0, "jm:1", 1.0) == []
    assert rm.tick(20.0) == [NotEnoughResources("job", 3, 0, 0)]
    assert rm.fenced_total == 1


def test_when_a_worker_is_lost_its_jobs_are_notified_and_a_replacement_is_found() -> None:
    """I5: TM down."""
    rm = manager()
    registration, _ = rm.register_worker(1, "w1", empty(1), 0.0)
    grant_all(rm, rm.declare(1, "job", 1, 1, "jm", 0.0))
    assert rm.unregister_worker(1, "w1", registration, 5.0) == [
        SlotsLost("job", "w1"),
        StartWorker(1),
    ]
    rm.register_worker(1, "w2", empty(), 6.0)
    assert rm.slots_of("job") == [("w2", 0, "1-2")]


def test_workers_that_do_not_start_are_tried_again_after_a_while() -> None:
    rm = manager()
    assert rm.declare(1, "job", 1, 2, "jm", 0.0) == [StartWorker(1)]
    assert rm.worker_start_failed(1, 1.0) == []
    assert rm.tick(1.5) == [], "not in a storm"
    assert rm.next_due() == 2.0
    assert rm.tick(2.0) == [StartWorker(1)]
    assert StartWorker(1) in rm.tick(62.0), "nor is one waited for that never registers"


def test_a_worker_that_refuses_says_what_is_true_and_another_is_asked() -> None:
    rm = manager()
    first, _ = rm.register_worker(1, "w1", empty(1), 0.0)
    rm.declare(1, "job", 1, 1, "jm", 0.0)
    second, _ = rm.register_worker(1, "w2", empty(1), 0.0)
    instructions = rm.slot_refused(1, "w1", first, "1-1", SlotStatus(0, "other", "z"), 1.0)
    assert instructions == [RequestSlot("w2", second, 0, "job", "1-2", "jm")]
    assert rm.slots_of("other") == [("w1", 0, "z")]


def test_a_request_without_an_answer_is_made_again_for_the_same_slot() -> None:
    """The worker may have it: only the same request is harmless."""
    rm = manager()
    registration, _ = rm.register_worker(1, "w", empty(), 0.0)
    (request,) = rm.declare(1, "job", 1, 1, "jm", 0.0)
    assert rm.slot_refused(1, "w", registration, "1-1", None, 1.0) == []
    assert rm.tick(1.5) == []
    assert rm.tick(2.0) == [request]


def test_a_report_written_before_the_request_arrived_does_not_free_the_slot() -> None:
    rm = manager()
    registration, _ = rm.register_worker(1, "w", empty(1), 0.0)
    rm.declare(1, "job", 1, 1, "jm", 0.0)
    assert rm.slot_report(1, "w", registration, empty(1), 0.5) == []
    assert rm.slots_of("job") == [("w", 0, "1-1")]
    rm.slot_granted(1, "w", registration, "1-1")
    assert rm.slot_report(1, "w", registration, empty(1), 1.0) == [
        RequestSlot("w", registration, 0, "job", "1-2", "jm")
    ]


def test_a_new_leader_learns_the_slots_from_the_workers_and_touches_nothing_that_runs() -> None:
    """I5.2."""
    rm = SlotManager(
        2, SlotManagerOptions(recovery_s=5.0, request_timeout_s=1.0, idle_timeout_s=1.0), 100.0
    )
    assert rm.declare(2, "job", 1, 2, "jm", 100.0) == [], (
        "no worker is started for slots that are about to be reported"
    )
    rm.register_worker(2, "spare", empty(1), 100.5)
    assert rm.tick(103.0) == [], "nor given out, nor released, nor is anybody told of a shortage"
    assert rm.next_due() == 105.0
    report = (SlotStatus(0, "job", "1-1"), SlotStatus(1, "job", "1-2"))
    _, instructions = rm.register_worker(2, "w", report, 104.0)
    assert instructions == []
    assert [i for i in rm.tick(105.0) if not isinstance(i, ReleaseWorker)] == []
    assert [(w, a) for w, _, a in rm.slots_of("job")] == [("w", "1-1"), ("w", "1-2")]


def test_after_its_recovery_a_new_leader_replaces_what_did_not_come_back() -> None:
    """I5: TM and RM down together."""
    rm = SlotManager(2, SlotManagerOptions(recovery_s=5.0), 100.0)
    rm.declare(2, "job", 1, 2, "jm", 100.0)
    rm.register_worker(2, "w", (SlotStatus(0, "job", "1-1"),), 101.0)
    assert rm.tick(105.0) == [StartWorker(1)]


def test_slots_of_a_lost_job_master_stay_taken_for_its_successor() -> None:
    """I5.3."""
    rm = manager()
    rm.register_worker(1, "w", empty(1), 0.0)
    grant_all(rm, rm.declare(1, "job", 1, 1, "jm:1", 0.0))
    rm.declare(1, "job", 1, 0, "", 1.0)
    assert rm.declare(1, "other", 1, 1, "jm:9", 2.0) == [StartWorker(1)]
    assert rm.slots_of("other") == []
    assert [i for i in rm.declare(1, "job", 2, 1, "jm:2", 3.0) if isinstance(i, RequestSlot)] == []
    assert len(rm.slots_of("job")) == 1


def test_no_worker_is_started_for_a_job_without_a_job_master() -> None:
    """I5.3: its successor declares its own requirements."""
    rm = manager()
    registration, _ = rm.register_worker(1, "w", empty(1), 0.0)
    grant_all(rm, rm.declare(1, "job", 1, 1, "jm:1", 0.0))
    rm.declare(1, "job", 1, 0, "", 1.0)
    assert rm.unregister_worker(1, "w", registration, 2.0) == []
    assert rm.tick(100.0) == []


def test_a_worker_that_does_not_open_its_job_in_time_counts_as_lost() -> None:
    """I5: an import of its program hangs, though the process lives."""
    rm = manager()
    rm.register_worker(1, "w", empty(), 0.0)
    (request,) = (i for i in rm.declare(1, "job", 1, 1, "jm", 10.0) if isinstance(i, RequestSlot))
    rm.slot_granted(1, "w", request.registration, request.allocation_id)
    rm.tick(309.9)
    assert rm.next_due() == 310.0
    (lose,) = rm.tick(310.0)
    assert lose == LoseProcess("w", "job", lose.reason)  # type: ignore[union-attr]
    assert "job job was not opened within 300 s" in lose.reason


def test_a_worker_that_opens_its_job_slowly_is_named_early() -> None:
    """Once for each job, and again after twice the time."""
    rm = manager()
    rm.register_worker(1, "w", empty(), 0.0)
    for request in rm.declare(1, "job", 1, 2, "jm", 10.0):
        assert isinstance(request, RequestSlot)
        rm.slot_granted(1, "w", request.registration, request.allocation_id)
    assert rm.tick(10.0 + OPENS_SLOWLY_S - 0.1) == []
    assert rm.next_due() == 10.0 + OPENS_SLOWLY_S
    assert rm.tick(10.0 + OPENS_SLOWLY_S) == [OpensSlowly("w", "job", OPENS_SLOWLY_S)]
    assert rm.tick(10.0 + 2 * OPENS_SLOWLY_S - 0.1) == []
    assert rm.tick(10.0 + 2 * OPENS_SLOWLY_S) == [OpensSlowly("w", "job", 2 * OPENS_SLOWLY_S)]
    rm.slots_accepted("w", [allocation_id for _, _, allocation_id in rm.slots_of("job")])
    assert rm.tick(1000.0) == []


def test_a_worker_whose_slots_are_accepted_has_opened_its_job() -> None:
    rm = manager()
    rm.register_worker(1, "w", empty(), 0.0)
    grant_all(rm, rm.declare(1, "job", 1, 2, "jm", 10.0))
    assert rm.tick(1000.0) == []


def test_a_worker_that_ends_while_it_opens_its_job_is_replaced_after_a_while() -> None:
    """A program that crashes a process while it is imported would start processes without a
    pause.
    """
    rm = manager()
    registration, _ = rm.register_worker(1, "w", empty(), 0.0)
    rm.declare(1, "job", 1, 1, "jm", 10.0)
    assert rm.unregister_worker(1, "w", registration, 11.0) == [SlotsLost("job", "w")]
    assert rm.tick(11.9) == []
    assert rm.tick(12.0) == [StartWorker(1)]


@pytest.mark.parametrize("wrong", [{"slots_per_worker": 0}, {"workers_min": 3, "workers_max": 2}])
def test_options_that_cannot_work_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at least"):
        SlotManagerOptions(**wrong)  # type: ignore[arg-type]


# The roles together, joined by messages that take their time.


@dataclass
class Worker:
    name: str
    table: TaskSlotTable
    registration: int = 0
    tasks: dict[ExecutionAttemptId, str] = field(default_factory=dict)


@dataclass
class Master:
    job: JobGraph
    token: int
    scheduler: SlotScheduler
    running: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    failed: bool = False


class World:
    """One ResourceManager, workers and jobs.

    Each link is FIFO, which link delivers next is up to `rng`; `now` moves when all is quiet.
    """

    def __init__(self, seed: int, options: SlotManagerOptions) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.options = options
        self.rm = SlotManager(1, options, 0.0)
        self.workers: dict[str, Worker] = {}
        self.masters: dict[str, Master] = {}
        self.links: dict[tuple[str, str], deque[tuple[object, ...]]] = {}
        self.log: list[str] = []
        self.count = 0
        self.may_start = True

    def send(self, source: str, target: str, *message: object) -> None:
        self.links.setdefault((source, target), deque()).append(message)

    def cut(self, name: str) -> None:
        for link in list(self.links):
            if name in link:
                del self.links[link]

    def run(self, seconds: float = 0.0) -> None:
        end = self.now + seconds
        while True:
            full = sorted(link for link, queue in self.links.items() if queue)
            if full:
                link = self.rng.choice(full)
                self.deliver(*link, self.links[link].popleft())
                self.check()
            elif self.now < end:
                self.now += 0.5
                self.do_rm(self.rm.tick(self.now))
                for worker in list(self.workers.values()):
                    self.do_worker(worker, worker.table.tick(self.now))
            else:
                return

    # Each role carries out its instructions.

    def do_rm(self, instructions: list[Instruction]) -> None:
        for i in instructions:
            match i:
                case StartWorker(count):
                    self.log.append(f"rm: start {count}")
                    for _ in range(count):
                        if self.may_start:
                            self.start_worker()
                        else:
                            self.rm.worker_start_failed(1, self.now)
                case RequestSlot(worker, _, index, job, allocation, address):
                    self.log.append(f"rm -> {worker}: request slot {index} for {job}")
                    self.send("rm", worker, "request", index, job, allocation, address)
                case ReleaseWorker(worker, _):
                    self.log.append(f"rm -> {worker}: release")
                    self.kill_worker(worker)
                case NotEnoughResources(job, _, available, _):
                    self.send("rm", job, "no resources", available)
                case SlotsLost(job, worker):
                    self.send("rm", job, "lost", worker)

    def do_worker(  # type: ignore[type-arg]
        self, worker: Worker, instructions: list[object]
    ) -> None:
        for i in instructions:
            match i:
                case ConnectToJobMaster(job, _):
                    self.log.append(f"{worker.name} -> {job}: connect")
                    self.send(worker.name, job, "connect")
                case OfferSlots(job, token, offer, slots):
                    self.log.append(f"{worker.name} -> {job}: offer {len(slots)}")
                    self.send(worker.name, job, "offer", token, offer, slots)
                case FailTasks(attempts, _):
                    for attempt in attempts:
                        self.send(worker.name, worker.name, "task ended", attempt)
                case SlotFreed(_, job, allocation, _):
                    self.send(
                        worker.name, "rm", "freed", worker.registration, allocation, self.rm.token
                    )
                    self.send(worker.name, job, "freed", allocation)

    def do_master(self, name: str, instructions: list[object]) -> None:  # type: ignore[type-arg]
        master = self.masters[name]
        for i in instructions:
            match i:
                case DeclareRequirement(job, slots):
                    self.log.append(f"{name} -> rm: declare {slots}")
                    self.send(name, "rm", "declare", job, master.token, slots, self.rm.token)
                case OfferAnswer():
                    raise AssertionError("answered where it was offered")
                case Placed(_, slots):
                    self.log.append(f"{name}: placed {len(slots)}")
                    for subtask, (worker, allocation) in slots.items():
                        self.count += 1
                        master.running[subtask] = (worker, allocation)
                        attempt = ExecutionAttemptId(name, subtask[0], subtask[1], self.count)
                        self.send(name, worker, "deploy", attempt, allocation, master.token)
                case PlacementFailed(_, _, _):
                    master.failed = True
                case FreeSlot(worker, allocation):
                    self.send(name, worker, "free", allocation, master.token)
                case SubtasksLost(_, subtasks):
                    for subtask in subtasks:
                        master.running.pop(subtask, None)
                    self.place(name, subtasks)

    def place(self, name: str, subtasks: tuple[tuple[int, int], ...]) -> None:
        _, instructions = self.masters[name].scheduler.request(subtasks)
        self.do_master(name, instructions)  # type: ignore[arg-type]

    def deliver(self, source: str, target: str, message: tuple[object, ...]) -> None:
        if target == "rm":
            self.to_rm(source, message)
        elif target in self.workers:
            self.to_worker(self.workers[target], source, message)
        elif target in self.masters:
            self.to_master(target, source, message)

    def to_rm(self, source: str, message: tuple[object, ...]) -> None:
        rm, now = self.rm, self.now
        match message:
            case ("register", token, report):
                registration, instructions = rm.register_worker(
                    token,
                    source,
                    report,  # type: ignore[arg-type]
                    now,
                )
                if registration and source in self.workers:
                    self.workers[source].registration = registration
                self.do_rm(instructions)
            case ("granted", registration, allocation, token):
                rm.slot_granted(token, source, registration, allocation)  # type: ignore[arg-type]
            case ("refused", registration, allocation, status, token):
                refused = (token, source, registration, allocation, status, now)
                self.do_rm(rm.slot_refused(*refused))  # type: ignore[arg-type]
            case ("freed", registration, allocation, token):
                freed = (token, source, registration, allocation, now)
                self.do_rm(rm.slot_freed(*freed))  # type: ignore[arg-type]
            case ("declare", job, job_token, slots, token):
                declared = (token, job, job_token, slots, job, now)
                self.do_rm(rm.declare(*declared))  # type: ignore[arg-type]

    def to_worker(self, worker: Worker, source: str, message: tuple[object, ...]) -> None:
        table = worker.table
        try:
            match message:
                case ("request", index, job, allocation, address):
                    token = self.rm.token
                    try:
                        wanted = (index, job, allocation, address, self.now)
                        instructions = table.request(*wanted)  # type: ignore[arg-type]
                    except SlotOccupied as error:
                        self.send(
                            worker.name,
                            "rm",
                            "refused",
                            worker.registration,
                            allocation,
                            error.status,
                            token,
                        )
                        return
                    self.send(worker.name, "rm", "granted", worker.registration, allocation, token)
                    self.do_worker(worker, instructions)  # type: ignore[arg-type]
                case ("connected", token):
                    instructions = table.job_master_connected(source, token, self.now)
                    self.do_worker(worker, instructions)  # type: ignore[arg-type]
                case ("answer", token, offer, accepted, rejected):
                    number = len(accepted)  # type: ignore[arg-type]
                    self.log.append(f"{source} -> {worker.name}: accept {number}")
                    self.do_worker(
                        worker, table.offer_answered(source, token, offer, accepted, rejected)
                    )  # type: ignore[arg-type]
                case ("deploy", attempt, allocation, token):
                    table.add_task(attempt, allocation, token)  # type: ignore[arg-type]
                    worker.tasks[attempt] = allocation  # type: ignore[index, assignment]
                    self.log.append(f"{source} -> {worker.name}: deploy")
                case ("free", allocation, token):
                    self.do_worker(
                        worker, table.free_slot(allocation, token, "the job needs it no more")
                    )  # type: ignore[arg-type]
                case ("task ended", attempt):
                    worker.tasks.pop(attempt, None)  # type: ignore[arg-type]
                    self.do_worker(worker, table.task_ended(attempt))  # type: ignore[arg-type]
        except (StaleLeader, SlotNotActive):
            if message[0] == "deploy":
                self.send(worker.name, source, "freed", message[2])

    def to_master(self, name: str, source: str, message: tuple[object, ...]) -> None:
        master = self.masters[name]
        match message:
            case ("connect",):
                self.send(name, source, "connected", master.token)
            case ("offer", token, offer, slots):
                if token != master.token:
                    return
                answer, *rest = master.scheduler.offered(source, slots)  # type: ignore[arg-type]
                assert isinstance(answer, OfferAnswer)
                self.rm.slots_accepted(source, answer.accepted)
                self.send(name, source, "answer", token, offer, answer.accepted, answer.rejected)
                self.do_master(name, rest)  # type: ignore[arg-type]
            case ("freed", allocation):
                instructions = master.scheduler.slot_lost(source, allocation)
                self.do_master(name, instructions)  # type: ignore[arg-type]
            case ("lost", worker):
                self.do_master(name, master.scheduler.worker_lost(worker))  # type: ignore[arg-type]
            case ("no resources", available):
                instructions = master.scheduler.no_resources(available)
                self.do_master(name, instructions)  # type: ignore[arg-type]

    # Events of the cluster.

    def start_worker(self, slots: int = 2) -> str:
        self.count += 1
        name = f"w{self.count}"
        self.workers[name] = Worker(name, TaskSlotTable(slots, timeout_s=10.0))
        self.send(name, "rm", "register", self.rm.token, self.workers[name].table.report())
        return name

    def kill_worker(self, name: str) -> None:
        worker = self.workers.pop(name, None)
        self.cut(name)
        if worker is not None:
            if name not in self.rm.workers:
                self.rm.worker_start_failed(1, self.now)  # Its factory sees the process end.
            self.do_rm(
                self.rm.unregister_worker(self.rm.token, name, worker.registration, self.now)
            )
            for job, master in self.masters.items():
                self.do_master(job, master.scheduler.worker_lost(name))  # type: ignore[arg-type]

    def kill_rm(self) -> None:
        self.cut("rm")
        options = SlotManagerOptions(
            slots_per_worker=2,
            workers_max=self.options.workers_max,
            recovery_s=3.0,
            idle_timeout_s=30.0,
        )
        self.rm = SlotManager(self.rm.token + 1, options, self.now)
        for worker in self.workers.values():
            self.send(worker.name, "rm", "register", self.rm.token, worker.table.report())
        for name, master in self.masters.items():
            slots = master.scheduler.slots_declared
            assert slots is not None
            self.do_master(name, [DeclareRequirement(name, slots)])

    def submit(self, name: str, parallelism: int) -> None:
        job = JobGraph(
            name,
            (
                JobVertex(1, "a", (), (), parallelism, 128, "g"),
                JobVertex(2, "b", (), (), 1, 128, "g"),
            ),
            (),
        )
        self.masters[name] = Master(job, 1, SlotScheduler(name, job))
        self.place(name, tuple((v.id, i) for v in job.vertices for i in range(v.parallelism)))

    def kill_master(self, name: str) -> None:
        old = self.masters.pop(name)
        self.cut(name)
        self.do_rm(self.rm.declare(self.rm.token, name, old.token, 0, "", self.now))
        for worker in list(self.workers.values()):
            instructions = worker.table.job_master_lost(name, old.token, self.now)
            self.do_worker(worker, instructions)  # type: ignore[arg-type]
        self.masters[name] = Master(old.job, old.token + 1, SlotScheduler(name, old.job))
        self.place(name, tuple((v.id, i) for v in old.job.vertices for i in range(v.parallelism)))
        for worker in self.workers.values():
            self.send(worker.name, name, "connect")

    # Invariants.

    def check(self) -> None:
        for worker in self.workers.values():
            allocations = [s.allocation_id for s in worker.table.report() if s.allocation_id]
            assert len(allocations) == len(set(allocations))
            for attempt, allocation in worker.tasks.items():
                slot = next(s for s in worker.table.report() if s.allocation_id == allocation)
                assert slot.job_id == attempt.job_id, "a slot holds a task of another job"

    def settled(self) -> None:
        """All jobs run, the ResourceManager's copy equals the reports of workers, and no slot is
        taken without a job.
        """
        for name, master in self.masters.items():
            assert not master.failed
            assert len(master.running) == sum(v.parallelism for v in master.job.vertices), (
                f"{name} does not run"
            )
            for subtask, (worker, allocation) in master.running.items():
                holds = [
                    a for a, where in self.workers[worker].tasks.items() if where == allocation
                ]
                assert [
                    a
                    for a in holds
                    if (a.vertex_id, a.subtask_index) == subtask and a.job_id == name
                ]
            mine = {
                (w.name, s.allocation_id)
                for w in self.workers.values()
                for s in w.table.report()
                if s.job_id == name
            }
            assert mine == set(master.running.values())
            assert mine == {
                (worker, allocation) for worker, _, allocation in self.rm.slots_of(name)
            }
        for worker in self.workers.values():
            for status in worker.table.report():
                assert worker.table.state(status.index) in (SlotState.FREE, SlotState.ACTIVE)


def test_the_sequence_of_a_slot_from_a_new_worker() -> None:
    """I2, as the articles tell it: ask, start, register, request, offer, accept, deploy."""
    world = World(0, OPTIONS)
    world.submit("job", 1)
    world.run()
    assert world.log == [
        "job -> rm: declare 1",
        "rm: start 1",
        "rm -> w1: request slot 0 for job",
        "w1 -> job: connect",
        "w1 -> job: offer 1",
        "job: placed 2",
        "job -> w1: accept 1",
        "job -> w1: deploy",
        "job -> w1: deploy",
    ]
    world.settled()


def test_the_sequence_of_a_slot_from_a_worker_that_is_there() -> None:
    """I2, as the articles tell it: no worker is started, and the known JobMaster is not looked up
    again.
    """
    world = World(0, OPTIONS)
    world.start_worker()
    world.run()
    world.submit("job", 1)
    world.run()
    assert world.log[:5] == [
        "job -> rm: declare 1",
        "rm -> w1: request slot 0 for job",
        "w1 -> job: connect",
        "w1 -> job: offer 1",
        "job: placed 2",
    ]
    world.settled()


def test_a_killed_worker_is_replaced_and_the_job_runs_again() -> None:
    """I5.1."""
    world = World(3, OPTIONS)
    world.submit("job", 3)
    world.run()
    world.kill_worker(next(iter(world.workers)))
    world.run(5.0)
    world.settled()


def test_when_the_resource_manager_is_replaced_what_runs_is_untouched() -> None:
    """I5.2: no deployment and no offer happens."""
    world = World(4, OPTIONS)
    world.submit("job", 3)
    world.run()
    world.log.clear()
    before = dict(world.masters["job"].running)
    world.kill_rm()
    world.run(10.0)
    world.settled()
    assert world.masters["job"].running == before
    assert [
        line for line in world.log if "deploy" in line or "offer" in line or "start" in line
    ] == []


def test_the_next_job_master_gets_the_slots_that_were_held_for_it() -> None:
    """I5.3."""
    world = World(5, OPTIONS)
    world.submit("job", 3)
    world.run()
    before = set(world.masters["job"].running.values())
    world.log.clear()
    world.kill_master("job")
    world.run(20.0)
    world.settled()
    assert set(world.masters["job"].running.values()) == before
    assert [line for line in world.log if "start" in line] == []


def test_a_job_that_lacks_resources_fails_after_the_timeout_and_leaves_nothing_taken() -> None:
    """I2.1, end to end."""
    world = World(6, STANDALONE)
    world.start_worker()
    world.submit("job", 3)
    world.run(19.0)
    assert not world.masters["job"].failed
    world.run(25.0)
    assert world.masters["job"].failed
    assert [
        s for w in world.workers.values() for s in w.table.report() if s.job_id is not None
    ] == []


@pytest.mark.parametrize("block", range(8))
def test_cluster_settles_after_any_loss_and_interleaving_of_messages(block: int) -> None:
    """I5: the failure matrix of the three roles, alone and together, at any point of the
    sequence.
    """
    for seed in range(block * 25, block * 25 + 25):
        world = World(seed, OPTIONS)
        rng = random.Random(f"faults {seed}")
        for number in range(rng.randint(1, 3)):
            world.submit(f"job{number}", rng.randint(1, 3))
        for _ in range(rng.randint(1, 6)):
            for _ in range(rng.randint(0, 12)):
                full = sorted(link for link, queue in world.links.items() if queue)
                if full:
                    link = rng.choice(full)
                    world.deliver(*link, world.links[link].popleft())
                    world.check()
            match rng.randrange(4):
                case 0 if world.workers:
                    world.kill_worker(rng.choice(sorted(world.workers)))
                case 1:
                    world.kill_rm()
                case 2:
                    world.kill_master(rng.choice(sorted(world.masters)))
                case _:
                    world.run(rng.uniform(0, 3))
        try:
            world.run(60.0)
            world.settled()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_a_worker_that_leaves_gets_no_slots_and_goes_once_it_is_idle() -> None:
    options = SlotManagerOptions(workers_min=1, workers_max=1, idle_timeout_s=None)
    slots = manager(options)
    assert slots.tick(0.0) == [StartWorker(1)]
    number, _ = slots.register_worker(1, "old", [SlotStatus(0, "job", "a")], 0.0)
    told = slots.resize(1, 1, frozenset(["old"]), 1.0)
    assert told == [StartWorker(1)], "the one that leaves is replaced before it goes"
    slots.register_worker(1, "new", [SlotStatus(0, None, None)], 2.0)
    (request,) = slots.declare(1, "job", 1, 2, "", 3.0)
    assert isinstance(request, RequestSlot)
    assert request.worker_id == "new"
    told = slots.slot_freed(1, "old", number, "a", 4.0)
    assert [one.worker_id for one in told if isinstance(one, ReleaseWorker)] == ["old"]
    assert slots.workers == ["new"]
