"""Slots of a job: how many it needs, what goes where, and what stays where it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aioflow.cluster.scheduler import (
    DeclareRequirement,
    FreeSlot,
    Instruction,
    NoResourceAvailable,
    OfferAnswer,
    Placed,
    PlacementFailed,
    SlotOffer,
    SlotScheduler,
    SubtasksLost,
    places_of,
)
from aioflow.graph.job_graph import JobGraph, JobVertex


def vertex(number: int, parallelism: int, group: str = "default") -> JobVertex:
    return JobVertex(number, f"v{number}", (), (), parallelism, 128, group)


def graph(*vertices: JobVertex) -> JobGraph:
    return JobGraph("test", vertices, ())


def all_of(job: JobGraph) -> list[tuple[int, int]]:
    return [(v.id, i) for v in job.vertices for i in range(v.parallelism)]


def of_type(kind: type, instructions: Iterable[Instruction]) -> list:  # type: ignore[type-arg]
    return [i for i in instructions if isinstance(i, kind)]


def offers(*numbers: int) -> list[SlotOffer]:
    return [SlotOffer(f"a{n}", n) for n in numbers]


def placed(instructions: Iterable[Instruction]) -> dict[tuple[int, int], tuple[str, str]]:
    (one,) = of_type(Placed, instructions)
    return dict(one.slots)


def test_a_group_needs_its_widest_vertex_and_a_job_the_sum_over_groups() -> None:
    """I8.1."""
    assert len(places_of(graph(vertex(1, 4), vertex(2, 2), vertex(3, 3)))) == 4
    assert (
        len(places_of(graph(vertex(1, 4), vertex(2, 2, "other"), vertex(3, 3, "other")))) == 4 + 3
    )


def test_different_groups_never_share_a_place() -> None:
    """I8."""
    for place in places_of(graph(vertex(1, 2, "a"), vertex(2, 2, "b"), vertex(3, 1, "a"))):
        assert {("a" if v in (1, 3) else "b") for v, _ in place.subtasks} == {place.group}


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from("ab")), min_size=1, max_size=6))
def test_every_subtask_has_one_slot_with_one_of_each_vertex_and_equally_wide_ones_agree(
    shapes: list[tuple[int, str]],
) -> None:
    """I8.1, I8.2: so both ends of a forward edge share their slots."""
    job = graph(*(vertex(i, p, g) for i, (p, g) in enumerate(shapes)))
    places = places_of(job)
    place_of = {subtask: n for n, place in enumerate(places) for subtask in place.subtasks}
    assert sorted(s for place in places for s in place.subtasks) == sorted(all_of(job))
    for place in places:
        assert place.subtasks
        assert max(Counter(v for v, _ in place.subtasks).values()) == 1
    for a, shape in enumerate(shapes):
        for b in (b for b, other in enumerate(shapes) if other == shape):
            for index in range(shape[0]):
                assert place_of[a, index] == place_of[b, index]


def test_narrow_vertices_are_spread_over_the_places() -> None:
    job = graph(vertex(1, 4), vertex(2, 2))
    assert [n for n, p in enumerate(places_of(job)) if any(v == 2 for v, _ in p.subtasks)] == [0, 2]


def test_the_requirement_is_declared_once_and_the_request_waits_for_the_last_slot() -> None:
    job = graph(vertex(1, 3), vertex(2, 2))
    scheduler = SlotScheduler("job", job)
    number, instructions = scheduler.request(all_of(job))
    assert instructions == [DeclareRequirement("job", 3)]
    assert scheduler.offered("w1", offers(1, 2)) == [OfferAnswer("w1", ("a1", "a2"), ())]
    instructions = scheduler.offered("w2", offers(3))
    assert instructions[0] == OfferAnswer("w2", ("a3",), ())
    (one,) = of_type(Placed, instructions)
    assert one.request == number
    assert sorted(one.slots) == sorted(all_of(job))


def test_subtasks_are_spread_over_workers_by_what_each_has_to_do() -> None:
    job = graph(vertex(1, 4), vertex(2, 2), vertex(3, 3))
    scheduler = SlotScheduler("job", job)
    scheduler.request(all_of(job))
    scheduler.offered("w1", offers(1, 2))
    slots = placed(scheduler.offered("w2", offers(3, 4)))
    assert Counter(worker for worker, _ in slots.values()) == {"w1": 5, "w2": 4}


def test_offers_beyond_the_need_are_rejected_and_repeated_ones_accepted_again() -> None:
    """I4.1: the worker frees what is rejected."""
    job = graph(vertex(1, 2))
    scheduler = SlotScheduler("job", job)
    assert scheduler.offered("w", offers(9)) == [OfferAnswer("w", (), ("a9",))]
    scheduler.request(all_of(job))
    assert scheduler.offered("w", offers(1, 2, 3))[0] == OfferAnswer("w", ("a1", "a2"), ("a3",))
    assert scheduler.offered("w", offers(1, 3))[0] == OfferAnswer("w", ("a1",), ("a3",))
    assert scheduler.offered("thief", offers(1))[0] == OfferAnswer("thief", (), ("a1",))


def test_a_restart_after_a_task_failure_goes_back_to_the_same_slots() -> None:
    """I8.2 and local recovery: nothing was lost, so nothing moves."""
    job = graph(vertex(1, 2), vertex(2, 2))
    scheduler = SlotScheduler("job", job)
    scheduler.request(all_of(job))
    before = placed(scheduler.offered("w", offers(1, 2)))
    _, instructions = scheduler.request(all_of(job))
    assert placed(instructions) == before
    assert of_type(DeclareRequirement, instructions) == []


def test_after_the_loss_of_a_worker_the_others_stay_and_neighbours_move_together() -> None:
    """I8.2, I5.1."""
    job = graph(vertex(1, 4), vertex(2, 2), vertex(3, 4))
    scheduler = SlotScheduler("job", job)
    scheduler.request(all_of(job))
    scheduler.offered("w1", offers(1, 2))
    before = placed(scheduler.offered("w2", offers(3, 4)))
    (lost,) = scheduler.worker_lost("w1")
    assert isinstance(lost, SubtasksLost)
    assert sorted(lost.subtasks) == sorted(s for s, (worker, _) in before.items() if worker == "w1")
    assert scheduler.slots_declared == 4, "the replacement is wanted while the restart is delayed"
    assert scheduler.offered("w3", offers(5, 6, 7))[0] == OfferAnswer("w3", ("a5", "a6"), ("a7",))
    _, instructions = scheduler.request(all_of(job))
    after = placed(instructions)
    for subtask, (worker, allocation) in before.items():
        assert (
            after[subtask] == (worker, allocation) if worker == "w2" else after[subtask][0] == "w3"
        )
    for index in range(4):
        assert after[1, index] == after[3, index]


def test_a_slot_that_is_offered_again_after_a_cut_gets_its_old_subtasks() -> None:
    """Sticky by allocation: state on the worker's disk is under it."""
    job = graph(vertex(1, 3))
    scheduler = SlotScheduler("job", job)
    scheduler.request(all_of(job))
    before = placed(scheduler.offered("w", offers(1, 2, 3)))
    scheduler.worker_lost("w")
    scheduler.offered("w", offers(3, 1, 2))
    _, instructions = scheduler.request(all_of(job))
    assert placed(instructions) == before


def test_a_new_slot_on_the_old_worker_is_preferred_over_any_on_another() -> None:
    job = graph(vertex(1, 2))
    scheduler = SlotScheduler("job", job)
    scheduler.request(all_of(job))
    scheduler.offered("w1", offers(1))
    before = placed(scheduler.offered("w2", offers(2)))
    scheduler.worker_lost("w1")
    scheduler.worker_lost("w2")
    scheduler.offered("w2", offers(12))
    scheduler.offered("w1", offers(11))
    _, instructions = scheduler.request(all_of(job))
    assert {s: worker for s, (worker, _) in placed(instructions).items()} == {
        s: worker for s, (worker, _) in before.items()
    }


def test_a_slot_is_free_only_when_all_that_share_it_were_released() -> None:
    """I8.3."""
    job = graph(vertex(1, 1), vertex(2, 1), vertex(3, 1))
    scheduler = SlotScheduler("job", job)
    scheduler.request(all_of(job))
    scheduler.offered("w", offers(1))
    assert scheduler.released([(1, 0)]) == []
    assert scheduler.released([(3, 0), (1, 0)]) == []
    assert scheduler.slot_of((2, 0)) == ("w", "a1")
    assert scheduler.slot_of((1, 0)) is None
    assert scheduler.released([(2, 0)]) == [FreeSlot("w", "a1"), DeclareRequirement("job", 0)]


def test_a_finished_region_that_has_to_run_again_asks_for_its_slots_again() -> None:
    job = graph(vertex(1, 2))
    scheduler = SlotScheduler("job", job)
    scheduler.request(all_of(job))
    scheduler.offered("w", offers(1, 2))
    scheduler.released(all_of(job))
    _, instructions = scheduler.request(all_of(job))
    assert instructions == [DeclareRequirement("job", 2)]


def test_a_place_that_a_waiting_request_wants_is_not_freed_in_between() -> None:
    job = graph(vertex(1, 1), vertex(2, 2))
    scheduler = SlotScheduler("job", job)
    scheduler.request([(1, 0)])
    scheduler.offered("w", offers(1))
    number, _ = scheduler.request([(2, 0), (2, 1)])
    assert scheduler.released([(1, 0)]) == []
    assert scheduler.withdraw(number) == [FreeSlot("w", "a1"), DeclareRequirement("job", 0)], (
        "nor kept without a use"
    )


def test_without_resources_the_waiting_request_fails_and_what_runs_is_untouched() -> None:
    """I2.1, as the job sees it."""
    job = graph(vertex(1, 1, "a"), vertex(2, 2, "b"))
    scheduler = SlotScheduler("job", job)
    scheduler.request([(1, 0)])
    scheduler.offered("w", offers(1))
    number, _ = scheduler.request([(2, 0), (2, 1)])
    scheduler.offered("w", offers(2))
    instructions = scheduler.no_resources(available=2)
    (failed,) = of_type(PlacementFailed, instructions)
    assert (failed.request, failed.subtasks) == (number, ((2, 0), (2, 1)))
    assert isinstance(failed.error, NoResourceAvailable)
    assert "needs 3 slots and got 2 in time" in str(failed.error)
    assert instructions[1:] == [FreeSlot("w", "a2"), DeclareRequirement("job", 1)]
    assert scheduler.slot_of((1, 0)) == ("w", "a1")


def test_in_line_a_job_gives_back_slots_that_do_not_suffice_and_wants_them_still() -> None:
    """Otherwise two jobs might each keep what the other one lacks."""
    job = graph(vertex(1, 1, "a"), vertex(2, 2, "b"))
    scheduler = SlotScheduler("job", job)
    scheduler.request([(1, 0)])
    scheduler.offered("w", offers(1))
    number, _ = scheduler.request([(2, 0), (2, 1)])
    scheduler.offered("w", offers(2))
    assert scheduler.wait_in_line() == [FreeSlot("w", "a2")]
    assert (scheduler.slots_declared, scheduler.slots_missing) == (3, 2)
    (done,) = of_type(Placed, scheduler.offered("w", offers(2, 3)))
    assert done.request == number


def test_one_lost_slot_loses_its_subtasks_only_and_only_once() -> None:
    job = graph(vertex(1, 2))
    scheduler = SlotScheduler("job", job)
    scheduler.request(all_of(job))
    slots = placed(scheduler.offered("w", offers(1, 2)))
    lost = next(s for s, (_, allocation) in slots.items() if allocation == "a1")
    assert scheduler.slot_lost("other", "a1") == []
    assert scheduler.slot_lost("w", "a1") == [SubtasksLost("w", (lost,))]
    assert scheduler.slot_lost("w", "a1") == []
    assert scheduler.slot_of(lost) is None


def test_the_end_of_the_job_gives_everything_back() -> None:
    job = graph(vertex(1, 2))
    scheduler = SlotScheduler("job", job)
    scheduler.request([(1, 0)])
    scheduler.offered("w", offers(1))
    scheduler.request([(1, 1)])
    assert scheduler.close() == [FreeSlot("w", "a1"), DeclareRequirement("job", 0)]
    assert scheduler.offered("w", offers(2)) == [OfferAnswer("w", (), ("a2",))]
    assert scheduler.close() == []


class Machine(RuleBasedStateMachine):
    """Workers come, offer and go; regions are requested and released.

    Throughout, slots are complete and their number is right.
    """

    def __init__(self) -> None:
        super().__init__()
        self.job = graph(vertex(1, 3), vertex(2, 2), vertex(3, 2, "b"), vertex(4, 3))
        self.regions = {
            "x": [(v, i) for v, i in all_of(self.job) if v in (1, 2)],
            "y": [(3, 0), (3, 1)],
            "z": [(4, 0), (4, 1), (4, 2)],
        }
        self.scheduler = SlotScheduler("job", self.job)
        self.running: dict[tuple[int, int], tuple[str, str]] = {}
        self.waiting: dict[int, str] = {}
        self.slots: dict[str, str] = {}
        self.declared = 0
        self.count = 0

    def do(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case DeclareRequirement(_, slots):
                    assert slots != self.declared, "declared although nothing changed"
                    self.declared = slots
                case OfferAnswer(worker, accepted, _):
                    for allocation in accepted:
                        self.slots[allocation] = worker
                case Placed(request, slots):
                    assert set(slots) == set(self.regions[self.waiting.pop(request)]), (
                        "in part, or more than was asked"
                    )
                    for subtask, (worker, allocation) in slots.items():
                        assert self.slots[allocation] == worker
                        self.running[subtask] = (worker, allocation)
                case PlacementFailed(request, _, _):
                    del self.waiting[request]
                case FreeSlot(worker, allocation):
                    assert self.slots.pop(allocation) == worker
                    assert (worker, allocation) not in self.running.values(), (
                        "freed although a subtask sits in it"
                    )
                case SubtasksLost(_, subtasks):
                    for subtask in subtasks:
                        self.running.pop(subtask, None)

    @rule(region=st.sampled_from("xyz"))
    def start_or_restart(self, region: str) -> None:
        if region in self.waiting.values():
            return
        # The number is needed before the instructions are judged: a request may be placed at once.
        number, instructions = self.scheduler.request(self.regions[region])
        self.waiting[number] = region
        self.do(instructions)

    @rule(region=st.sampled_from("xyz"), data=st.data())
    def release_some(self, region: str, data: st.DataObject) -> None:
        if region in self.waiting.values():
            return
        some = data.draw(st.lists(st.sampled_from(self.regions[region]), unique=True))
        for subtask in some:
            self.running.pop(subtask, None)
        self.do(self.scheduler.released(some))

    @rule(worker=st.sampled_from(["w1", "w2", "w3"]), number=st.integers(1, 3))
    def offer(self, worker: str, number: int) -> None:
        fresh = [SlotOffer(f"a{self.count + i}", i) for i in range(number)]
        self.count += number
        self.do(self.scheduler.offered(worker, fresh))

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def offer_again(self, data: st.DataObject) -> None:
        allocation = data.draw(st.sampled_from(sorted(self.slots)))
        instructions = self.scheduler.offered(self.slots[allocation], [SlotOffer(allocation, 0)])
        assert instructions[0] == OfferAnswer(self.slots[allocation], (allocation,), ())
        self.do(instructions)

    @rule(worker=st.sampled_from(["w1", "w2", "w3"]))
    def lose_worker(self, worker: str) -> None:
        self.slots = {a: w for a, w in self.slots.items() if w != worker}
        self.do(self.scheduler.worker_lost(worker))
        assert all(w != worker for w, _ in self.running.values())

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def lose_slot(self, data: st.DataObject) -> None:
        allocation = data.draw(st.sampled_from(sorted(self.slots)))
        self.do(self.scheduler.slot_lost(self.slots.pop(allocation), allocation))
        assert all(a != allocation for _, a in self.running.values())

    @rule()
    def give_up(self) -> None:
        self.do(self.scheduler.no_resources(0))
        assert not self.waiting

    @invariant()
    def slots_are_what_was_declared_at_most(self) -> None:
        assert self.scheduler.slots_declared == self.declared
        assert len(self.slots) <= self.declared <= self.scheduler.slots_needed

    @invariant()
    def what_waits_lacks_a_slot(self) -> None:
        if self.waiting:
            assert len(self.slots) < self.declared

    @invariant()
    def one_place_one_slot(self) -> None:
        vertices: dict[str, list[int]] = {}
        for (vertex_id, _), (_, allocation) in self.running.items():
            vertices.setdefault(allocation, []).append(vertex_id)
        for inside in vertices.values():
            assert len(inside) == len(set(inside))
            assert not {3} < set(inside), "sharing groups mixed"
        for index in range(3):
            if (1, index) in self.running and (4, index) in self.running:
                assert self.running[1, index] == self.running[4, index], (
                    "equally wide subtasks came apart"
                )
        for subtask, slot in self.running.items():
            assert self.scheduler.slot_of(subtask) == slot


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


# Rescaling.


def running(parallelism: int, worker: str = "tm") -> SlotScheduler:
    """A job whose tasks have their slots, all on one worker."""
    job = graph(vertex(1, parallelism))
    scheduler = SlotScheduler("job", job)
    scheduler.request(all_of(job))
    assert placed(scheduler.offered(worker, offers(*range(parallelism))))
    return scheduler


def test_a_reservation_asks_for_slots_and_keeps_them_until_it_ends() -> None:
    scheduler = running(1)
    assert scheduler.reserve(3) == [DeclareRequirement("job", 3)]
    assert not scheduler.is_reserved
    scheduler.offered("other", [SlotOffer("b1", 0), SlotOffer("b2", 1)])
    assert scheduler.is_reserved
    told = scheduler.reserve(0)
    assert len(of_type(FreeSlot, told)) == 2
    assert of_type(DeclareRequirement, told) == [DeclareRequirement("job", 1)]


def test_a_rescaled_job_leaves_workers_and_is_spread_over_the_others() -> None:
    scheduler = running(2)
    scheduler.reserve(2, frozenset(["tm"]))
    assert scheduler.slots_declared == 4, "the old tasks keep their slots meanwhile"
    scheduler.offered("new", [SlotOffer("b1", 0)])
    scheduler.offered("newer", [SlotOffer("b2", 0)])
    assert scheduler.is_reserved
    job = graph(vertex(1, 2))
    told = scheduler.rescaled(job)
    assert {slot.worker_id for slot in of_type(FreeSlot, told)} == {"tm"}
    _, told = scheduler.request(all_of(job))
    assert sorted(worker for worker, _ in placed(told).values()) == ["new", "newer"]


def test_a_smaller_job_gives_back_slots_of_the_worker_with_the_most() -> None:
    scheduler = running(3)
    scheduler.reserve(4)
    scheduler.offered("other", [SlotOffer("b1", 0)])
    job = graph(vertex(1, 2))
    scheduler.rescaled(job)
    _, told = scheduler.request(all_of(job))
    told += scheduler.reserve(0)
    assert [slot.worker_id for slot in of_type(FreeSlot, told)] == ["tm", "tm"]
    assert sorted(worker for worker, _ in placed(told).values()) == ["other", "tm"]
