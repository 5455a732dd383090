"""Slots of a worker: who may have one, who may put tasks in, and when it is free again."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aioflow.cluster.scheduler import SlotOffer
from aioflow.cluster.slots import (
    ConnectToJobMaster,
    FailTasks,
    Instruction,
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


def attempt(job: str = "job", index: int = 0, number: int = 0) -> ExecutionAttemptId:
    return ExecutionAttemptId(job, 1, index, number)


def tasks_in(table: TaskSlotTable, allocation_id: str) -> list[ExecutionAttemptId]:
    return [
        task for slot in table._slots if slot.allocation_id == allocation_id for task in slot.tasks
    ]


def active(slots: int = 1) -> TaskSlotTable:
    """Slot 0 is ACTIVE for "job", allocation "a0", JobMaster with token 1."""
    table = TaskSlotTable(slots, timeout_s=10.0)
    table.request(0, "job", "a0", "jm:1", 0.0)
    table.job_master_connected("job", 1, 0.0)
    assert table.offer_answered("job", 1, 1, ("a0",), ()) == []
    assert table.state(0) is SlotState.ACTIVE
    return table


def test_slots_of_a_job_whose_process_is_lost_are_free_and_open_it_again() -> None:
    table = active(2)
    table.add_task(attempt(), "a0", 1)
    table.request(1, "other", "b1", "jm:1", 0.0)
    assert table.give_back("job", "its process ended") == [
        SlotFreed(0, "job", "a0", "its process ended")
    ]
    assert table.report() == (SlotStatus(0), SlotStatus(1, "other", "b1"))
    assert not table.holds(attempt())
    assert table.task_ended(attempt()) == []
    assert table.request(0, "job", "a2", "jm:1", 1.0) == [ConnectToJobMaster("job", "jm:1")]


def test_only_requests_of_a_replaced_job_master_are_fenced() -> None:
    """One that has just lost its connection is refused too, and was not replaced."""
    table = active()
    table.job_master_lost("job", 1, 0.0)
    with pytest.raises(StaleLeader):
        table.add_task(attempt(), "a0", 1)
    assert table.fenced_total == 0
    table.job_master_connected("job", 2, 0.0)
    with pytest.raises(StaleLeader):
        table.add_task(attempt(), "a0", 1)
    assert table.fenced_total == 1


def test_a_requested_slot_is_offered_once_its_job_master_is_connected_then_it_is_active() -> None:
    """I4: request, connect, offer, accept."""
    table = TaskSlotTable(2, timeout_s=10.0)
    assert table.request(1, "job", "a1", "jm:1", 0.0) == [ConnectToJobMaster("job", "jm:1")]
    assert table.state(1) is SlotState.ALLOCATED
    assert table.report() == (SlotStatus(0), SlotStatus(1, "job", "a1"))
    assert table.job_master_connected("job", 7, 1.0) == [
        OfferSlots("job", 7, 1, (SlotOffer("a1", 1),))
    ]
    assert table.offer_answered("job", 7, 1, ("a1",), ()) == []
    assert table.state(1) is SlotState.ACTIVE
    assert table.request(0, "job", "a0", "jm:1", 2.0) == [
        OfferSlots("job", 7, 2, (SlotOffer("a0", 0),))
    ], "it is connected already"


def test_a_rejected_slot_is_free_again() -> None:
    """I4.1."""
    table = TaskSlotTable(2)
    table.request(0, "job", "a0", "jm:1", 0.0)
    table.request(1, "job", "a1", "jm:1", 0.0)
    table.job_master_connected("job", 1, 0.0)
    (freed,) = table.offer_answered("job", 1, 1, ("a1",), ("a0",))
    assert isinstance(freed, SlotFreed)
    assert (freed.index, freed.job_id, freed.allocation_id) == (0, "job", "a0")
    assert [table.state(i) for i in range(2)] == [SlotState.FREE, SlotState.ACTIVE]


def test_an_offer_left_out_of_the_answer_counts_as_rejected() -> None:
    """I4.1: the slot would never be used."""
    table = TaskSlotTable(1)
    table.request(0, "job", "a0", "jm:1", 0.0)
    table.job_master_connected("job", 1, 0.0)
    assert [type(i) for i in table.offer_answered("job", 1, 1, (), ())] == [SlotFreed]


def test_the_answer_to_an_older_offer_does_not_judge_slots_offered_since() -> None:
    table = TaskSlotTable(2)
    table.request(0, "job", "a0", "jm:1", 0.0)
    table.job_master_connected("job", 1, 0.0)
    table.request(1, "job", "a1", "jm:1", 0.0)
    assert table.offer_answered("job", 1, 1, ("a0",), ()) == []
    assert [table.state(i) for i in range(2)] == [SlotState.ACTIVE, SlotState.ALLOCATED]


def test_a_deployment_that_overtakes_the_answer_accepts_the_slot() -> None:
    table = TaskSlotTable(1)
    table.request(0, "job", "a0", "jm:1", 0.0)
    table.job_master_connected("job", 1, 0.0)
    table.add_task(attempt(), "a0", 1)
    assert table.state(0) is SlotState.ACTIVE
    assert table.offer_answered("job", 1, 1, ("a0",), ()) == []
    assert table.tick(100.0) == []


def test_the_same_request_twice_changes_nothing_and_another_is_refused_with_the_truth() -> None:
    table = active()
    assert table.request(0, "job", "a0", "jm:1", 1.0) == []
    with pytest.raises(SlotOccupied, match="ACTIVE for job job") as caught:
        table.request(0, "other", "b0", "jm:2", 1.0)
    assert caught.value.status == SlotStatus(0, "job", "a0")
    with pytest.raises(SlotOccupied):
        table.request(0, "job", "a9", "jm:1", 1.0)
    with pytest.raises(ValueError, match="slots 0 to 0"):
        table.request(1, "job", "a1", "jm:1", 1.0)


def test_when_the_job_master_is_lost_tasks_fail_the_slot_is_held_and_later_freed() -> None:
    """I4.2."""
    table = active()
    table.add_task(attempt(), "a0", 1)
    (fail,) = table.job_master_lost("job", 1, 5.0)
    assert isinstance(fail, FailTasks)
    assert fail.attempts == (attempt(),)
    assert table.state(0) is SlotState.ALLOCATED
    assert table.task_ended(attempt()) == []
    assert table.report() == (SlotStatus(0, "job", "a0"),), "not for others yet"
    assert table.tick(14.9) == []
    (freed,) = table.tick(15.0)
    assert isinstance(freed, SlotFreed)
    assert table.report() == (SlotStatus(0),)


def test_a_slot_held_too_long_with_a_task_inside_is_free_only_after_the_task() -> None:
    """I4.2, I8.3."""
    table = active()
    table.add_task(attempt(), "a0", 1)
    table.job_master_lost("job", 1, 5.0)
    assert [type(i) for i in table.tick(15.0)] == [FailTasks]
    assert table.state(0) is SlotState.RELEASING
    assert [type(i) for i in table.task_ended(attempt())] == [SlotFreed]


def test_the_next_job_master_is_offered_what_was_held_once_nothing_of_the_old_is_left() -> None:
    """I5.3: tasks of the old leader are gone before the new one deploys."""
    table = active()
    table.add_task(attempt(), "a0", 1)
    table.job_master_lost("job", 1, 5.0)
    assert table.job_master_connected("job", 2, 6.0) == []
    with pytest.raises(SlotNotActive, match="ALLOCATED"):
        table.add_task(attempt(number=1), "a0", 2)
    assert table.task_ended(attempt()) == [OfferSlots("job", 2, 2, (SlotOffer("a0", 0),))]
    table.offer_answered("job", 2, 2, ("a0",), ())
    assert table.tick(15.0) == [], "taken: the timeout is over"
    assert table.state(0) is SlotState.ACTIVE


def test_a_newer_job_master_replaces_one_that_was_never_seen_to_go() -> None:
    """I5.3: the old connection may hang."""
    table = active()
    table.add_task(attempt(), "a0", 1)
    instructions = table.job_master_connected("job", 2, 6.0)
    assert [type(i) for i in instructions] == [FailTasks]
    assert table.job_master_lost("job", 1, 7.0) == [], (
        "the end of the old connection ends nothing of the new"
    )
    assert table.task_ended(attempt()) == [OfferSlots("job", 2, 2, (SlotOffer("a0", 0),))]


def test_messages_of_a_stale_job_master_are_refused() -> None:
    """B1, I6: fencing."""
    table = active()
    table.job_master_connected("job", 2, 1.0)
    for call in (
        lambda: table.job_master_connected("job", 1, 2.0),
        lambda: table.add_task(attempt(), "a0", 1),
        lambda: table.free_slot("a0", 1, "not needed"),
        lambda: table.offer_answered("job", 1, 2, ("a0",), ()),
        lambda: table.job_over("job", 1),
    ):
        with pytest.raises(StaleLeader, match=r"fencing token 1 .* token 2"):
            call()
    assert table.report() == (SlotStatus(0, "job", "a0"),)
    table.add_task(attempt(), "a0", 2)


def test_the_old_leader_stays_refused_while_its_job_has_a_slot_here() -> None:
    """The token outlives the connection."""
    table = active()
    table.job_master_connected("job", 2, 1.0)
    table.job_master_lost("job", 2, 2.0)
    with pytest.raises(StaleLeader):
        table.job_master_connected("job", 1, 3.0)


def test_a_task_is_refused_where_its_job_has_no_active_slot() -> None:
    """B1.4: submitTask is rejected if the slot is absent or inactive."""
    table = active(slots=2)
    with pytest.raises(SlotNotActive, match="no slot has it"):
        table.add_task(attempt(), "a7", 1)
    with pytest.raises(StaleLeader, match="no job master is connected"):
        table.add_task(attempt("other"), "a0", 1)
    table.request(1, "other", "b1", "jm:2", 0.0)
    table.job_master_connected("other", 1, 0.0)
    with pytest.raises(SlotNotActive, match="is ACTIVE for job job"):
        table.add_task(attempt("other"), "a0", 1)
    table.add_task(attempt(), "a0", 1)
    table.free_slot("a0", 1, "over")
    with pytest.raises(SlotNotActive, match="RELEASING"):
        table.add_task(attempt(index=1), "a0", 1)


def test_a_slot_is_free_only_when_all_tasks_that_share_it_have_ended() -> None:
    """I8.3."""
    table = active()
    for index in range(3):
        table.add_task(attempt(index=index), "a0", 1)
    (fail,) = table.free_slot("a0", 1, "the job is over")
    assert isinstance(fail, FailTasks)
    assert len(fail.attempts) == 3
    assert table.free_slot("a0", 1, "again") == []
    assert table.task_ended(attempt(index=0)) == []
    assert table.task_ended(attempt(index=2)) == []
    assert table.report() == (SlotStatus(0, "job", "a0"),)
    with pytest.raises(SlotOccupied, match="RELEASING"):
        table.request(0, "job", "a0", "jm:1", 1.0)
    assert table.task_ended(attempt(index=1)) == [SlotFreed(0, "job", "a0", "the job is over")]
    assert table.task_ended(attempt(index=1)) == []
    assert table.free_slot("a0", 1, "gone already") == []


def test_the_end_of_a_job_frees_its_slots_and_no_others() -> None:
    table = active(slots=2)
    table.request(1, "other", "b1", "jm:2", 0.0)
    assert table.job_over("job", 1) == [SlotFreed(0, "job", "a0", "job job is over")]
    assert table.report() == (SlotStatus(0), SlotStatus(1, "other", "b1"))


def test_a_worker_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TaskSlotTable(0)


class Machine(RuleBasedStateMachine):
    """Two jobs, leaders that come and go, answers that are late: nothing leaks, nothing is
    shared, nothing of an old leader runs on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = TaskSlotTable(3, timeout_s=10.0)
        self.now = 0.0
        self.count = 0
        self.leader: dict[str, int] = {}  # connected leader by job, as the model sees it
        self.tasks: dict[ExecutionAttemptId, str] = {}  # living tasks: allocation
        self.told: set[ExecutionAttemptId] = set()
        self.owner: dict[ExecutionAttemptId, int] = {}
        self.offers: list[OfferSlots] = []

    def do(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case FailTasks(attempts, _):
                    self.told.update(attempts)
                case OfferSlots(job, token, _, slots):
                    assert self.leader[job] == token, "offered to a leader that is not"
                    for slot in slots:
                        assert slot.allocation_id not in self.tasks.values(), (
                            "offered with a task inside"
                        )
                        assert self.table.state(slot.index) is SlotState.ALLOCATED
                    self.offers.append(instruction)
                case SlotFreed(_, _, allocation, _):
                    assert allocation not in self.tasks.values(), "free with a task inside"

    @rule(index=st.integers(0, 2), job=st.sampled_from(["a", "b"]))
    def request(self, index: int, job: str) -> None:
        self.count += 1
        free = self.table.state(index) is SlotState.FREE
        try:
            self.do(self.table.request(index, job, f"{job}-{self.count}", "jm", self.now))
            assert free
        except SlotOccupied:
            assert not free

    @rule(job=st.sampled_from(["a", "b"]), token=st.integers(1, 4))
    def connect(self, job: str, token: int) -> None:
        current = self.leader.get(job, 0)
        if token >= current:
            self.leader[job] = token
        try:
            instructions = self.table.job_master_connected(job, token, self.now)
        except StaleLeader:
            self.leader = (
                {**self.leader, job: current}
                if current
                else {j: t for j, t in self.leader.items() if j != job}
            )
            return
        assert token >= current, "an older leader took over"
        self.do(instructions)

    @rule(job=st.sampled_from(["a", "b"]), token=st.integers(1, 4))
    def lose(self, job: str, token: int) -> None:
        if self.leader.get(job) == token:
            del self.leader[job]
        self.do(self.table.job_master_lost(job, token, self.now))

    @rule(data=st.data(), accept=st.booleans())
    def answer(self, data: st.DataObject, accept: bool) -> None:
        if not self.offers:
            return
        offer = data.draw(st.sampled_from(self.offers))
        ids = tuple(slot.allocation_id for slot in offer.slots)
        try:
            self.do(
                self.table.offer_answered(
                    offer.job_id,
                    offer.token,
                    offer.offer,
                    ids if accept else (),
                    () if accept else ids,
                )
            )
        except StaleLeader:
            assert self.leader.get(offer.job_id) != offer.token

    @rule(index=st.integers(0, 2), token=st.integers(1, 4))
    def deploy(self, index: int, token: int) -> None:
        status = self.table.report()[index]
        if status.job_id is None or status.allocation_id is None:
            return
        self.count += 1
        new = ExecutionAttemptId(status.job_id, 1, 0, self.count)
        try:
            self.table.add_task(new, status.allocation_id, token)
        except StaleLeader:
            assert self.leader.get(status.job_id) != token
            return
        except SlotNotActive:
            assert self.table.state(index) is not SlotState.ACTIVE
            return
        assert self.leader.get(status.job_id) == token, "a stale leader deployed"
        for task, allocation in self.tasks.items():
            assert allocation != status.allocation_id or self.owner[task] == token, (
                "beside a task of the old leader"
            )
        self.tasks[new] = status.allocation_id
        self.owner[new] = token

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.tasks:
            ended = data.draw(st.sampled_from(sorted(self.tasks, key=str)))
            del self.tasks[ended]
            self.do(self.table.task_ended(ended))

    @rule(index=st.integers(0, 2))
    def free(self, index: int) -> None:
        status = self.table.report()[index]
        if status.job_id in self.leader and status.allocation_id is not None:
            self.do(self.table.free_slot(status.allocation_id, self.leader[status.job_id], "test"))

    @rule(job=st.sampled_from(["a", "b"]))
    def end_job(self, job: str) -> None:
        if job in self.leader:
            token = self.leader.pop(job)
            self.do(self.table.job_over(job, token))

    @rule(step=st.sampled_from([0.5, 3.0, 11.0]))
    def wait(self, step: float) -> None:
        self.now += step
        self.do(self.table.tick(self.now))
        due = self.table.next_due()
        assert due is None or due > self.now

    @invariant()
    def every_task_is_where_it_was_put_and_of_the_leader_or_told_to_end(self) -> None:
        inside = {
            a: s.allocation_id
            for s in self.table.report()
            if s.allocation_id
            for a in tasks_in(self.table, s.allocation_id)
        }
        assert inside == self.tasks
        for task in self.tasks:
            assert self.leader.get(task.job_id) == self.owner[task] or task in self.told

    @invariant()
    def every_reserved_slot_becomes_free_some_day(self) -> None:
        for status in self.table.report():
            state = self.table.state(status.index)
            assert (state is SlotState.FREE) == (status.job_id is None)
            if state is SlotState.ALLOCATED:
                assert self.table.next_due() is not None
            if state is SlotState.RELEASING:
                assert tasks_in(self.table, status.allocation_id or "")


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
