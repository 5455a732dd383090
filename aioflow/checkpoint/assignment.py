"""Assigns the state of a completed checkpoint to the subtasks of a job, also at a new parallelism.

State is found by the uid of its operator, in whichever chain the operator is now. Keyed state is
assigned by key group. A subtask gets the handles of all former subtasks that hold key groups of its
range, and reads only these groups. Operator state goes to every subtask, in the order of the former
subtasks, and each subtask computes its share. A former subtask is a subtask of the job that took
the checkpoint.

The splits of a source are assigned here too, once the caller has read their positions. This module
itself reads and writes nothing.

No state is lost silently: state of a removed operator fails the restore, unless non-restored state
was allowed. The design follows Flink's StateAssignmentOperation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Protocol

from aioflow.checkpoint.completed import (
    ChannelSide,
    CheckpointedOperator,
    CompletedCheckpoint,
    OperatorStateHandle,
)
from aioflow.checkpoint.plan import CheckpointedVertex, VertexInput
from aioflow.checkpoint.source_state import SplitState
from aioflow.core.errors import RestoreError
from aioflow.core.keygroups import KeyGroupRange, range_for_subtask
from aioflow.state.snapshot import KeyedStateHandle, StateFile

__all__ = [
    "ChannelRestore",
    "FoundSplit",
    "InFlightRestore",
    "OperatorRestore",
    "RestorePlan",
    "TaskRestore",
    "assign_splits",
    "plan_restore",
]


@dataclass(frozen=True, slots=True)
class OperatorRestore:
    """The state from which one operator of one subtask is restored."""

    keyed: tuple[KeyedStateHandle, ...] = ()
    """Handles that hold key groups of this subtask's range, in ascending order. The handles may
    hold other key groups too.
    """
    operator: tuple[StateFile | None, ...] = ()
    """Operator state of each former subtask, in order; None for a subtask without state. Empty if
    no former subtask had any.
    """


@dataclass(frozen=True, slots=True)
class ChannelRestore:
    """Data of an unaligned checkpoint that waited in one channel of a former subtask."""

    edge_id: int
    index: int
    files: tuple[StateFile, ...]
    """Files with the data that waited at the consumer, then with the data at the producer."""
    has_head: bool
    """Whether the first file has the event time (watermark) in front of the data."""


@dataclass(frozen=True, slots=True)
class InFlightRestore:
    """Data in flight of one former subtask, which a restored subtask processes before new input."""

    subtask: int
    """Index of the former subtask."""
    is_only: bool
    """Whether the task had only this one subtask in the checkpointed job."""
    chain: tuple[tuple[int, StateFile], ...]
    """Pairs (index of an operator, file with the data that waited in front of this operator), last
    operator first.
    """
    restored: StateFile | None
    """File with the data that the former subtask itself had restored but not processed. The file
    also holds the event time of the former subtask's input."""
    channels: tuple[ChannelRestore, ...]
    dealt: bool = False
    """Whether the parallelism has changed. Then each restored subtask processes the records of its
    own keys. The restored subtask with `takes_rest` also processes all records without a key."""
    takes_rest: bool = True


@dataclass(frozen=True, slots=True)
class TaskRestore:
    """The state from which one subtask is restored.

    The subtask counts as restored even if there is no state for it.
    """

    checkpoint_id: int
    operators: Mapping[str, OperatorRestore] = field(default_factory=dict)
    """State of each operator, by its uid."""
    in_flight: tuple[InFlightRestore, ...] = ()
    """Data in flight of each former subtask, in the order of the former subtasks."""
    same_exchanges: frozenset[int] = frozenset()
    """Ids of the input exchanges that have the same channels as in the checkpoint, so that each
    channel continues where it was.
    """
    others: tuple[StateFile | None, ...] | None = None
    """Files with the event time of the former subtasks that `in_flight` lacks; an entry is None for
    a subtask without a file. Set only if records of these former subtasks may continue in this
    subtask. Their event time then holds back the watermark, so that the records do not become late.
    """
    allow_non_restored: bool = False
    """Whether state that an operator does not use is dropped; otherwise it fails the restore.
    """


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The state from which a whole job is restored."""

    tasks: Mapping[tuple[int, int], TaskRestore]
    """State of every subtask of the job, by vertex id and index."""
    sources: Mapping[int, tuple[StateFile | None, ...]]
    """For each source, by vertex id: the files with the encoded split positions of its former
    subtasks. An entry is None for a subtask without positions. The caller reads these files for
    `assign_splits`."""


class FoundSplit(Protocol):
    """A split that a source discovered."""

    @property
    def id(self) -> str: ...
    @property
    def position(self) -> Any: ...
    @property
    def payload(self) -> Any: ...


def plan_restore(
    checkpoint: CompletedCheckpoint,
    vertices: Sequence[CheckpointedVertex],
    *,
    allow_non_restored: bool = False,
) -> RestorePlan:
    """Assigns the state of `checkpoint` to the subtasks of `vertices`.

    Raises RestoreError if the state does not fit the vertices. The error says what does not fit and
    what to do.
    """
    former = {operator.uid: _Former(checkpoint, operator) for operator in checkpoint.operators}
    _collect(checkpoint, former)
    wanted = {operator.uid for vertex in vertices for operator in vertex.operators}
    if not allow_non_restored:
        _refuse_unmatched(
            checkpoint,
            [f for uid, f in former.items() if uid not in wanted and f.has_state],
            vertices,
        )
    tasks: dict[tuple[int, int], TaskRestore] = {}
    sources: dict[int, tuple[StateFile | None, ...]] = {}
    in_flight = (
        InFlightPlan(checkpoint, vertices) if _keeps_channels(checkpoint, vertices) else None
    )
    for vertex in vertices:
        found = [
            (operator, former[operator.uid])
            for operator in vertex.operators
            if operator.uid in former
        ]
        for index in range(vertex.parallelism):
            operators = {operator.uid: state.restore(operator, index) for operator, state in found}
            task = TaskRestore(
                checkpoint.checkpoint_id, operators, allow_non_restored=allow_non_restored
            )
            tasks[vertex.vertex_id, index] = (
                task if in_flight is None else in_flight.restore(task, vertex, index)
            )
        for _, state in found:
            if state.is_source:
                sources[vertex.vertex_id] = state.source
    return RestorePlan(tasks, sources)


def assign_splits(
    former: Sequence[Sequence[SplitState]], found: Iterable[FoundSplit], parallelism: int
) -> list[list[SplitState]]:
    """Returns the splits that each of the `parallelism` subtasks reads.

    These are the splits of the `former` subtasks, at their positions in the checkpoint, and the new
    splits in `found`.

    A known split keeps its position and its first payload; a finished split stays finished. With
    the same parallelism a split stays with its subtask; otherwise all splits are distributed again
    in order. A new split goes to the subtask with the fewest unfinished splits. Raises RestoreError
    when two former subtasks read the same split.
    """
    dealt: list[list[SplitState]] = [[] for _ in range(parallelism)]
    known: dict[str, int] = {}
    for index, splits in enumerate(former):
        for split in splits:
            if split.id in known:
                raise RestoreError(
                    f"split {split.id!r} was read by the former subtasks {known[split.id]} and "
                    f"{index}, expected by one: "
                    "the checkpoint is damaged, or the source gave two splits the same id"
                )
            known[split.id] = index
    if len(former) == parallelism:
        for index, splits in enumerate(former):
            dealt[index] += splits
    else:
        everything = [split for splits in former for split in splits]
        # Unfinished splits are distributed separately, so that the work is spread evenly.
        for one_sort in (
            [s for s in everything if not s.finished],
            [s for s in everything if s.finished],
        ):
            for number, split in enumerate(one_sort):
                dealt[number % parallelism].append(split)
    unfinished = [sum(not split.finished for split in splits) for splits in dealt]
    for new in found:
        if new.id not in known:
            known[new.id] = -1
            idlest = min(range(parallelism), key=unfinished.__getitem__)
            unfinished[idlest] += 1
            dealt[idlest].append(SplitState(new.id, new.position, new.payload))
    return dealt


class _Former:
    """One operator of the checkpoint: the state handles of its former subtasks, in order."""

    def __init__(self, checkpoint: CompletedCheckpoint, operator: CheckpointedOperator) -> None:
        self._checkpoint = checkpoint
        self.operator = operator
        self._handles: list[OperatorStateHandle | None] = [None] * operator.parallelism
        self.keyed: list[KeyedStateHandle] = []
        self.source: tuple[StateFile | None, ...] = ()

    def add(self, index: int, handle: OperatorStateHandle) -> None:
        if not 0 <= index < len(self._handles):
            raise self._damaged(f"has a subtask {index}, expected 0 to {len(self._handles) - 1}")
        if self._handles[index] is not None:
            raise self._damaged(f"has two states for subtask {index}")
        self._handles[index] = handle

    def settle(self) -> None:
        """Sorts the keyed state once all handles are added. Raises RestoreError if key groups
        overlap.
        """
        handles = [handle for handle in self._handles if handle is not None]
        self.keyed = sorted(
            (h.keyed for h in handles if h.keyed is not None), key=lambda keyed: keyed.first_group
        )
        self.source = tuple(None if handle is None else handle.source for handle in self._handles)
        for before, after in zip(self.keyed, self.keyed[1:], strict=False):
            if after.first_group <= before.last_group:
                raise self._damaged(f"has key group {after.first_group} in two subtasks")

    @property
    def is_source(self) -> bool:
        return any(positions is not None for positions in self.source)

    @property
    def has_state(self) -> bool:
        return (
            bool(self.keyed)
            or self.is_source
            or any(h is not None and h.operator is not None for h in self._handles)
        )

    def restore(self, now: CheckpointedOperator, index: int) -> OperatorRestore:
        """Returns the state for subtask `index` of the same operator in the new job. `now`
        describes this operator."""
        own = range_for_subtask(index, now.parallelism, now.max_parallelism)
        for keyed in self.keyed:
            if keyed.max_parallelism != now.max_parallelism:
                raise RestoreError(
                    f"{_title(self._checkpoint)}: the keyed state of operator {now.name!r} (uid "
                    f"{now.uid}) has "
                    f"{keyed.max_parallelism} key groups, the flow has max_parallelism "
                    f"{now.max_parallelism}; the number is fixed for "
                    "the life of the state: build the flow with "
                    f"max_parallelism={keyed.max_parallelism}"
                )
        met = [
            k
            for k in self.keyed
            if own.intersection(KeyGroupRange(k.first_group, k.last_group)) is not None
        ]
        blobs = tuple(None if handle is None else handle.operator for handle in self._handles)
        return OperatorRestore(tuple(met), blobs if any(blob is not None for blob in blobs) else ())

    def _damaged(self, what: str) -> RestoreError:
        operator = self.operator
        return RestoreError(
            f"{_title(self._checkpoint)}: operator {operator.name!r} (uid {operator.uid}) {what}; "
            "the metadata is damaged, restore another one"
        )


def _collect(checkpoint: CompletedCheckpoint, former: Mapping[str, _Former]) -> None:
    """Adds every state handle to its operator, even if operators are chained differently now."""
    for (head, index), state in checkpoint.subtasks.items():
        for handle in state.operators:
            operator = former.get(handle.uid)
            if operator is None:
                raise RestoreError(
                    f"{_title(checkpoint)}: subtask {index} of {head} has state of an operator "
                    f"{handle.uid} that is not in its list of "
                    "operators; the metadata is damaged, restore another one"
                )
            operator.add(index, handle)
    for operator in former.values():
        operator.settle()


def _refuse_unmatched(
    checkpoint: CompletedCheckpoint, lost: Sequence[_Former], vertices: Sequence[CheckpointedVertex]
) -> None:
    if not lost:
        return
    known = {operator.uid for operator in checkpoint.operators}
    new = {o.name: o.uid for vertex in vertices for o in vertex.operators if o.uid not in known}
    lines = []
    for one in lost:
        namesake = new.get(one.operator.name)
        hint = (
            f", the flow has a new one of that name with uid {namesake}"
            if namesake is not None
            else ""
        )
        lines.append(f"{one.operator.name!r} (uid {one.operator.uid}{hint})")
    raise RestoreError(
        f"{_title(checkpoint)} holds state of operators that the flow does not have: "
        f"{', '.join(lines)}; give them their uids back with "
        "uid=, or begin without that state with allow_non_restored=True"
    )


_IN_TASK = (ChannelSide.CHAIN, ChannelSide.RESTORED)
"""Sides of channel state that belong to no exchange."""


def _keeps_channels(
    checkpoint: CompletedCheckpoint, vertices: Sequence[CheckpointedVertex]
) -> bool:
    """Returns whether the checkpoint contains data in flight.

    Raises RestoreError if it does, but the operators or exchanges of the flow have changed since
    the checkpoint.
    """
    if not any(
        channel.is_data for state in checkpoint.subtasks.values() for channel in state.channels
    ):
        return False
    chains = {vertex.uid: [operator.uid for operator in vertex.operators] for vertex in vertices}
    edges = {read.edge_id for vertex in vertices for read in vertex.inputs}
    fits = [operator.uid for operator in checkpoint.operators] == [
        uid for chain in chains.values() for uid in chain
    ]
    for (head, _), state in checkpoint.subtasks.items():
        uids = [handle.uid for handle in state.operators]
        fits = fits and (not uids or uids == chains.get(head))
        fits = fits and all(
            channel.edge_id in edges or channel.side in _IN_TASK for channel in state.channels
        )
    if not fits:
        raise RestoreError(
            f"{_title(checkpoint)} holds data in flight between operators, because it is unaligned "
            f"or was taken while timers fired, and {_change(checkpoint, vertices)}, or restore a "
            "savepoint, which holds none"
        )
    return True


def _change(checkpoint: CompletedCheckpoint, vertices: Sequence[CheckpointedVertex]) -> str:
    """Returns the part of an error message that says what has changed in the flow since
    `checkpoint`, and what to do."""
    former = {operator.uid: operator for operator in checkpoint.operators}
    now = {operator.uid: operator for vertex in vertices for operator in vertex.operators}
    heads_then, heads_now = {head for head, _ in checkpoint.subtasks}, {v.uid for v in vertices}
    rescaled = [
        one for uid, one in former.items() if now.get(uid, one).parallelism != one.parallelism
    ]
    moved = [one for uid, one in former.items() if (uid in heads_then) is not (uid in heads_now)]
    if former.keys() != now.keys() or not rescaled or not moved:
        return (
            "the flow has changed since; restore it with the same operators, chained alike, and "
            "the same exchanges between them"
        )
    rescaled.sort(key=moved.__contains__, reverse=True)
    operator, changed = moved[0], rescaled[0]
    own, shared = "a task of its own", "one task with the operator before it"
    then, after = (own, shared) if operator.uid in heads_then else (shared, own)
    return (
        f"at another parallelism {operator.name!r} (uid {operator.uid}) has {after}, formerly "
        f"{then}; start at the former parallelism, where {changed.name!r} had "
        f"{changed.parallelism}, and change it with job.rescale(), which keeps the tasks"
    )


class InFlightPlan:
    """Assigns the data in flight of `checkpoint` to the subtasks of the same operators.

    The parallelism may have changed. The unit of assignment is a former subtask: the data that
    waited in its chain, the data that it had restored but not processed, and its channels. In a
    channel, the data that waited at the consumer comes first, then the data at the producer. Every
    new subtask that owns keys of the unit reads the whole unit.
    """

    def __init__(
        self, checkpoint: CompletedCheckpoint, vertices: Sequence[CheckpointedVertex]
    ) -> None:
        self._parallelism = {
            operator.uid: operator.parallelism for operator in checkpoint.operators
        }
        self._uids = {vertex.vertex_id: vertex.uid for vertex in vertices}
        self._now = {vertex.vertex_id: vertex.parallelism for vertex in vertices}
        consumers = {read.edge_id: vertex.uid for vertex in vertices for read in vertex.inputs}
        self._finished = {place for place, state in checkpoint.subtasks.items() if state.finished}
        self._files: dict[tuple[str, int], dict[tuple[ChannelSide, int, int], StateFile]] = {}
        """Maps the former subtask that processes the data to its files, by (side, exchange, index
        of the channel).
        """
        for (head, subtask), state in checkpoint.subtasks.items():
            for channel in state.channels:
                side, edge_id = channel.side, channel.edge_id
                if side is ChannelSide.OUTPUT:
                    place, number = (consumers[edge_id], channel.index), subtask
                else:
                    place, number = (head, subtask), channel.index
                self._files.setdefault(place, {})[side, edge_id, number] = channel.file

    def restore(self, task: TaskRestore, vertex: CheckpointedVertex, index: int) -> TaskRestore:
        """Returns `task` with the data in flight for subtask `index` of `vertex`."""
        former = self._parallelism[vertex.uid]
        dealt = former != vertex.parallelism
        found = []
        for subtask in range(former):
            rest = subtask % vertex.parallelism == index
            if (vertex.uid, subtask) in self._finished:
                continue
            if rest or (dealt and self._share_keys(vertex, subtask, index)):
                found.append(self._of(vertex, subtask, dealt=dealt, rest=rest))
        others: tuple[StateFile | None, ...] | None = None
        if dealt and former > 1 and any(read.producers is not None for read in vertex.inputs):
            own = {one.subtask for one in found}
            others = tuple(
                self._files.get((vertex.uid, subtask), {}).get((ChannelSide.RESTORED, 0, 0))
                for subtask in range(former)
                if subtask not in own and (vertex.uid, subtask) not in self._finished
            )
        same = frozenset(
            read.edge_id for read in vertex.inputs if not dealt and self._is_same(read)
        )
        return replace(task, in_flight=tuple(found), same_exchanges=same, others=others)

    def _is_same(self, read: VertexInput) -> bool:
        return self._parallelism[self._uids[read.vertex_id]] == self._now[read.vertex_id]

    def _share_keys(self, vertex: CheckpointedVertex, subtask: int, index: int) -> bool:
        if not any(read.keyed for read in vertex.inputs):
            return False
        groups = vertex.operators[0].max_parallelism
        then = range_for_subtask(subtask, self._parallelism[vertex.uid], groups)
        return range_for_subtask(index, vertex.parallelism, groups).intersection(then) is not None

    def _of(
        self, vertex: CheckpointedVertex, subtask: int, *, dealt: bool, rest: bool
    ) -> InFlightRestore:
        files = self._files.get((vertex.uid, subtask), {})
        chain = [
            (place, file) for (side, _, place), file in files.items() if side is ChannelSide.CHAIN
        ]
        chain.sort(key=itemgetter(0), reverse=True)
        ends = {which[1:] for which in files if which[0] not in _IN_TASK}
        channels = []
        for edge_id, index in sorted(ends):
            first, second = (
                files.get((side, edge_id, index))
                for side in (ChannelSide.INPUT, ChannelSide.OUTPUT)
            )
            waiting = tuple(file for file in (first, second) if file is not None)
            channels.append(ChannelRestore(edge_id, index, waiting, has_head=first is not None))
        restored = files.get((ChannelSide.RESTORED, 0, 0))
        only = self._parallelism[vertex.uid] == 1
        return InFlightRestore(
            subtask, only, tuple(chain), restored, tuple(channels), dealt=dealt, takes_rest=rest
        )


def _title(checkpoint: CompletedCheckpoint) -> str:
    what = "savepoint" if checkpoint.kind.is_savepoint else "checkpoint"
    where = checkpoint.location or f"of flow {checkpoint.flow!r}"
    return f"{what} {checkpoint.checkpoint_id} {where}"
