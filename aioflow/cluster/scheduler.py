"""The JobMaster's side of slots: how many slots a job needs, and which subtasks run in which slot.

This module only decides; the TaskDeployer carries out its instructions.

Slot sharing: a slot holds at most one subtask of each vertex of a sharing group. So a group needs
as many slots as its widest vertex has subtasks, and a job needs the sum over its groups. A place is
the set of subtasks that share one slot. Subtask i of a vertex goes to place `i * width //
parallelism`. This spreads narrow vertices over the group and keeps pointwise neighbours together.
Both ends of a forward edge have the same parallelism, and only whole places are bound to slots. So
both ends share their slots without a co-location group.

    place: UNBOUND --request, slot at hand--> BOUND
           BOUND --all its subtasks released--> UNBOUND, its slot freed
                 --slot or worker lost--------> UNBOUND, still wanted: its subtasks will restart

The job declares how many slots it wants whenever that number changes; workers then offer slots. A
lost slot stays wanted, so its replacement is on its way during the restart delay. An offer of more
slots than the job wants is rejected. A request is placed when all of its places can be bound, never
in part. A place prefers its former slot, then its former worker, then the job's least loaded
worker. The design follows Flink's SlotSharingExecutionSlotAllocator and DefaultDeclarativeSlotPool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from aioflow.core.errors import NoResourceAvailable, counted
from aioflow.graph.job_graph import JobGraph, JobVertex

__all__ = [
    "DeclareRequirement",
    "FreeSlot",
    "Instruction",
    "NoResourceAvailable",
    "OfferAnswer",
    "Place",
    "Placed",
    "PlacementFailed",
    "SlotOffer",
    "SlotScheduler",
    "SubtasksLost",
    "places_of",
    "slots_needed",
]

Subtask = tuple[int, int]
"""Vertex id and index of the subtask, as in `ExecutionGraph.executions`."""


class SlotOffer(msgspec.Struct, frozen=True):
    """A slot that a worker offers.

    `allocation_id` identifies one use of the slot. `index` is the position of the slot on the
    worker.
    """

    allocation_id: str
    index: int


class Place(msgspec.Struct, frozen=True):
    """The subtasks that share one slot, at most one of each vertex of `group`.

    `subtasks` are in topological order.
    """

    group: str
    index: int
    subtasks: tuple[Subtask, ...]


class DeclareRequirement(msgspec.Struct, frozen=True):
    """Instruction to tell the ResourceManager how many slots the job wants.

    The number includes the slots that the job has.
    """

    job_id: str
    slots: int


class OfferAnswer(msgspec.Struct, frozen=True):
    """Instruction to answer the offer of a worker, which then activates the `accepted` slots and
    frees the `rejected` ones."""

    worker_id: str
    accepted: tuple[str, ...]
    rejected: tuple[str, ...]


class Placed(msgspec.Struct, frozen=True):
    """Instruction to deploy the subtasks of a request, each to the worker and the allocation in
    `slots`."""

    request: int
    slots: Mapping[Subtask, tuple[str, str]]
    """Maps each subtask to (worker id, allocation id)."""


class PlacementFailed(msgspec.Struct, frozen=True):
    """Instruction to fail the subtasks of a request that cannot be placed."""

    request: int
    subtasks: tuple[Subtask, ...]
    error: NoResourceAvailable


class FreeSlot(msgspec.Struct, frozen=True):
    """Instruction to give a slot back, because no subtask of this job uses it any more."""

    worker_id: str
    allocation_id: str


class SubtasksLost(msgspec.Struct, frozen=True):
    """Instruction to fail the current attempts of `subtasks`, because their slot is lost."""

    worker_id: str
    subtasks: tuple[Subtask, ...]


Instruction = DeclareRequirement | OfferAnswer | Placed | PlacementFailed | FreeSlot | SubtasksLost


def places_of(graph: JobGraph) -> list[Place]:
    """Returns the places of a job, one for each slot that it needs."""
    groups: dict[str, list[JobVertex]] = {}
    for vertex in graph.vertices:
        groups.setdefault(vertex.slot_sharing_group, []).append(vertex)
    places: list[Place] = []
    for group, vertices in groups.items():
        width = max(vertex.parallelism for vertex in vertices)
        subtasks: list[list[Subtask]] = [[] for _ in range(width)]
        for vertex in vertices:
            for index in range(vertex.parallelism):
                subtasks[index * width // vertex.parallelism].append((vertex.id, index))
        places += [Place(group, index, tuple(of_place)) for index, of_place in enumerate(subtasks)]
    return places


def slots_needed(graph: JobGraph) -> int:
    """Returns how many slots of workers a job takes, at least 1.

    A place takes no slot if all its subtasks stay in the program. Operators in the sharing group of
    such a subtask are spread over all places of the group. So they may take more slots than
    necessary.
    """
    roaming = {vertex.id for vertex in graph.vertices if not vertex.stays_here}
    places = [p for p in places_of(graph) if any(vertex in roaming for vertex, _ in p.subtasks)]
    return max(len(places), 1)


class _Slot(msgspec.Struct):
    worker_id: str
    allocation_id: str
    place: int | None = None


class _PlaceState(msgspec.Struct):
    place: Place
    held: dict[Subtask, None] = msgspec.field(default_factory=dict)
    """Subtasks that were placed here and not released.

    While there are any, the job wants a slot for the place.
    """
    slot: _Slot | None = None
    last_allocation: str | None = None
    last_worker: str | None = None


class SlotScheduler:
    """Assigns the subtasks of one job to slots. Slots are identified by worker id and allocation
    id, and subtasks by vertex id and index.
    """

    def __init__(self, job_id: str, graph: JobGraph) -> None:
        self.job_id = job_id
        self._places = [_PlaceState(place) for place in places_of(graph)]
        self._place_of = {
            subtask: number
            for number, state in enumerate(self._places)
            for subtask in state.place.subtasks
        }
        self._slots: dict[str, _Slot] = {}
        self._requests: dict[int, tuple[Subtask, ...]] = {}
        self._next_request = 0
        self._declared = 0
        self._reserved = 0
        """Number of slots that are kept or requested in total, even if no subtask needs them
        yet."""
        self._leaving: frozenset[str] = frozenset()
        """Ids of the workers whose slots the job gives back when it is rescaled."""
        self._closed = False

    @property
    def slots_needed(self) -> int:
        """Number of slots that the whole job takes."""
        return len(self._places)

    @property
    def slots_declared(self) -> int:
        """Number of slots that the job wants now, for placed and waiting subtasks."""
        return self._declared

    @property
    def slots_held(self) -> int:
        """Number of slots that the job has."""
        return len(self._slots)

    @property
    def slots_missing(self) -> int:
        """Number of slots that the job wants and does not have."""
        return max(0, self._declared - len(self._slots))

    def slot_of(self, subtask: Subtask) -> tuple[str, str] | None:
        """Returns the slot of a subtask as (worker id, allocation id). Returns None if the subtask
        is not placed, was released, or has lost its slot.
        """
        state = self._places[self._place_of[subtask]]
        if state.slot is None or subtask not in state.held:
            return None
        return state.slot.worker_id, state.slot.allocation_id

    # Stimuli.

    def request(self, subtasks: Iterable[Subtask]) -> tuple[int, list[Instruction]]:
        """Requests slots for `subtasks`, all or none, for a start or the restart of a region.

        Returns the number of the request and instructions. An instruction `Placed` or
        `PlacementFailed` with that number follows, unless the request is withdrawn.
        """
        assert not self._closed, f"job {self.job_id} has given back its slots and asks for more"
        number = self._next_request
        self._next_request += 1
        self._requests[number] = tuple(subtasks)
        return number, self._after_change()

    def withdraw(self, request: int) -> list[Instruction]:
        """Withdraws a request; a request that was answered already stays as it is."""
        self._requests.pop(request, None)
        return self._after_change()

    def offered(self, worker_id: str, offers: Sequence[SlotOffer]) -> list[Instruction]:
        """Handles an offer of slots by a worker.

        Slots that the job has already are accepted again, because the last answer may have been
        lost.
        """
        accepted: list[str] = []
        rejected: list[str] = []
        free = self._declared - len(self._slots)
        for offer in offers:
            known = self._slots.get(offer.allocation_id)
            if known is not None and known.worker_id == worker_id:
                accepted.append(offer.allocation_id)
            elif known is None and free > 0:
                free -= 1
                self._slots[offer.allocation_id] = _Slot(worker_id, offer.allocation_id)
                accepted.append(offer.allocation_id)
            else:
                rejected.append(offer.allocation_id)
        return [OfferAnswer(worker_id, tuple(accepted), tuple(rejected)), *self._after_change()]

    def released(self, subtasks: Iterable[Subtask]) -> list[Instruction]:
        """Releases subtasks that have ended and will not run again in their places.

        A slot is freed once all subtasks that shared it are released.
        """
        for subtask in subtasks:
            number = self._place_of.get(subtask)
            if number is not None:  # Otherwise it is one of a former parallelism.
                self._places[number].held.pop(subtask, None)
        return self._after_change()

    def reserve(self, slots: int, leaving: frozenset[str] = frozenset()) -> list[Instruction]:
        """Requests `slots` slots in total, not counting slots of workers in `leaving`.

        With 0 no slots are reserved. `is_reserved` tells whether the job has the reserved slots.
        """
        self._reserved, self._leaving = slots, leaving
        return self._after_change()

    @property
    def is_reserved(self) -> bool:
        """Whether the job has the slots that `reserve` asked for."""
        return len(self._slots) - self._leaving_slots >= self._reserved

    @property
    def _leaving_slots(self) -> int:
        return sum(slot.worker_id in self._leaving for slot in self._slots.values())

    def rescaled(self, graph: JobGraph) -> list[Instruction]:
        """Replaces the places by the places of `graph`, the same graph at another parallelism.

        The former subtasks have ended, or are being cancelled. Slots of leaving workers are freed.
        The next request binds the other slots to places, and frees the slots that are too many.
        """
        self._places = [_PlaceState(place) for place in places_of(graph)]
        self._place_of = {
            subtask: number
            for number, state in enumerate(self._places)
            for subtask in state.place.subtasks
        }
        self._requests.clear()
        instructions: list[Instruction] = []
        for slot in list(self._slots.values()):
            slot.place = None
            if slot.worker_id in self._leaving:
                instructions.append(self._free(slot))
        self._leaving = frozenset()
        self._reserved = min(self._reserved, slots_needed(graph))
        return instructions

    def slot_lost(self, worker_id: str, allocation_id: str) -> list[Instruction]:
        """Handles the loss of a slot, which the worker has freed itself or lost."""
        slot = self._slots.get(allocation_id)
        if slot is None or slot.worker_id != worker_id:
            return []
        return self._lose([slot]) + self._after_change()

    def worker_lost(self, worker_id: str) -> list[Instruction]:
        """Handles the loss of a worker with all its slots."""
        return (
            self._lose([slot for slot in self._slots.values() if slot.worker_id == worker_id])
            + self._after_change()
        )

    def no_resources(self, available: int) -> list[Instruction]:
        """Fails waiting requests, because the ResourceManager cannot meet the requirement.

        `available` is the number of slots that the ResourceManager has for this job.
        """
        instructions: list[Instruction] = []
        for number, subtasks in self._requests.items():
            error = NoResourceAvailable(
                f"job {self.job_id} needs {counted(self._declared, 'slot')} and got {available} in "
                "time: start more workers, give them more slots, or lower the parallelism"
            )
            instructions.append(PlacementFailed(number, subtasks, error))
        self._requests.clear()
        return instructions + self._after_change()

    def wait_in_line(self) -> list[Instruction]:
        """Gives back the unused slots, which do not suffice for the waiting requests. The requests
        keep waiting.

        Otherwise two jobs might each hold slots that the other job lacks.
        """
        unused = [slot for slot in self._slots.values() if slot.place is None]
        return [self._free(slot) for slot in unused]

    def close(self) -> list[Instruction]:
        """Frees all slots at the end of the job, even slots with subtasks in them."""
        instructions: list[Instruction] = [
            FreeSlot(slot.worker_id, slot.allocation_id) for slot in self._slots.values()
        ]
        self._closed = True
        self._requests.clear()
        self._slots.clear()
        for state in self._places:
            state.held.clear()
            state.slot = None
        return instructions + self._after_change()

    # Consequences.

    def _after_change(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        wanted = {number for number, state in enumerate(self._places) if state.held}
        wanted.update(
            self._place_of[subtask] for subtasks in self._requests.values() for subtask in subtasks
        )
        for slot in [
            s for s in self._slots.values() if s.place is not None and s.place not in wanted
        ]:
            instructions.append(self._free(slot))
        needed = len(wanted)
        if self._reserved:
            needed = max(needed, self._reserved + self._leaving_slots)
        # Slots that came for a withdrawn request, or that a rescaled job needs no more.
        while len(self._slots) > needed and (spare := self._spare()) is not None:
            instructions.append(self._free(spare))
        if needed != self._declared:
            self._declared = needed
            instructions.append(DeclareRequirement(self.job_id, self._declared))
        for number, subtasks in list(self._requests.items()):
            placed = self._try_place(number, subtasks)
            if placed is not None:
                del self._requests[number]
                instructions.append(placed)
        return instructions

    def _spare(self) -> _Slot | None:
        """Returns an unused slot of the worker that has the most slots of the job."""
        counts: dict[str, int] = {}
        for slot in self._slots.values():
            counts[slot.worker_id] = counts.get(slot.worker_id, 0) + 1
        unused = [slot for slot in self._slots.values() if slot.place is None]
        return max(unused, key=lambda slot: counts[slot.worker_id], default=None)

    def _try_place(self, number: int, subtasks: tuple[Subtask, ...]) -> Placed | None:
        places = list(dict.fromkeys(self._place_of[subtask] for subtask in subtasks))
        unbound = [place for place in places if self._places[place].slot is None]
        free = [slot for slot in self._slots.values() if slot.place is None]
        if len(unbound) > len(free):
            return None
        self._bind(unbound, free)
        slots: dict[Subtask, tuple[str, str]] = {}
        for subtask in subtasks:
            state = self._places[self._place_of[subtask]]
            assert state.slot is not None
            state.held[subtask] = None
            slots[subtask] = (state.slot.worker_id, state.slot.allocation_id)
        return Placed(number, slots)

    def _bind(self, unbound: list[int], free: list[_Slot]) -> None:
        """Binds each place to its former slot if this is free, otherwise to a slot of its former
        worker.

        The remaining places go to the least loaded workers, beginning with the fullest place.
        """
        left: list[int] = []
        for number in unbound:
            same = next(
                (s for s in free if s.allocation_id == self._places[number].last_allocation), None
            )
            if same is None:
                left.append(number)
            else:
                self._bind_one(number, same, free)
        unplaced: list[int] = []
        for number in left:
            same = next((s for s in free if s.worker_id == self._places[number].last_worker), None)
            if same is None:
                unplaced.append(number)
            else:
                self._bind_one(number, same, free)
        load: dict[str, int] = {}
        for slot in self._slots.values():
            tasks = 0 if slot.place is None else len(self._places[slot.place].place.subtasks)
            load[slot.worker_id] = load.get(slot.worker_id, 0) + tasks
        unplaced.sort(key=lambda number: -len(self._places[number].place.subtasks))
        for number in unplaced:
            slot = min(free, key=lambda s: load[s.worker_id])
            load[slot.worker_id] += len(self._places[number].place.subtasks)
            self._bind_one(number, slot, free)

    def _bind_one(self, number: int, slot: _Slot, free: list[_Slot]) -> None:
        state = self._places[number]
        free.remove(slot)
        slot.place = number
        state.slot = slot
        state.last_allocation, state.last_worker = slot.allocation_id, slot.worker_id

    def _free(self, slot: _Slot) -> FreeSlot:
        self._forget(slot)
        return FreeSlot(slot.worker_id, slot.allocation_id)

    def _forget(self, slot: _Slot) -> None:
        del self._slots[slot.allocation_id]
        if slot.place is not None:
            self._places[slot.place].slot = None

    def _lose(self, slots: list[_Slot]) -> list[Instruction]:
        lost: dict[str, list[Subtask]] = {}
        for slot in slots:
            self._forget(slot)
            if slot.place is not None:
                lost.setdefault(slot.worker_id, []).extend(self._places[slot.place].held)
        return [SubtasksLost(worker, tuple(subtasks)) for worker, subtasks in lost.items()]
