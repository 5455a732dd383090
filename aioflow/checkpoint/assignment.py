"""Who restores what: a completed checkpoint, dealt out to the subtasks of a job whose parallelism may be another.

State is found by the uid of its operator, wherever in a chain that stands now. Keyed state goes by key group: a subtask gets the handles of
all former subtasks that hold groups of its range, and takes those. Operator state goes to everybody, in the order of the former subtasks:
each computes its share. The splits of a source are dealt out here, once their positions were read. Pure: nothing is read or written.

Nothing is lost silently: state of an operator that is there no more refuses the restore, unless that was allowed.
After Flink's StateAssignmentOperation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from aioflow.checkpoint.completed import CheckpointedOperator, CompletedCheckpoint
from aioflow.checkpoint.plan import CheckpointedVertex, VertexInput
from aioflow.checkpoint.source_state import SplitState
from aioflow.checkpoint.subtask import ChannelSide, OperatorStateHandle
from aioflow.core.errors import RestoreError
from aioflow.core.keygroups import KeyGroupRange, range_for_subtask
from aioflow.state.handles import KeyedStateHandle, StateFile

__all__ = ["FoundSplit", "InFlightRestore", "OperatorRestore", "RestorePlan", "TaskRestore", "assign_splits", "plan_restore"]


@dataclass(frozen=True, slots=True)
class OperatorRestore:
    """What one operator of one subtask takes over."""

    keyed: tuple[KeyedStateHandle, ...] = ()
    """Those that hold key groups of this subtask's range, in ascending order; they may hold others besides."""
    operator: tuple[StateFile | None, ...] = ()
    """One for each former subtask, in their order, None where it had none; empty if no one had any."""


@dataclass(frozen=True, slots=True)
class InFlightRestore:
    """Data that was in flight in one place, for one subtask to process before anything new."""

    edge_id: int
    side: ChannelSide
    """Never `OUTPUT`: the consumer takes over what waited at the producer."""
    index: int
    files: tuple[StateFile, ...]
    """One after the other: what waited at the consumer, then what waited at the producer."""
    has_head: bool = True
    """Whether the first file tells what event time stood at in front of the data."""
    dealt: bool = False
    """Whether it is dealt out anew: what has keys goes by its keys, and the rest is for this subtask if `takes_rest`."""
    takes_rest: bool = True


@dataclass(frozen=True, slots=True)
class TaskRestore:
    """What one subtask takes over. It counts as restored even if that is nothing."""

    checkpoint_id: int
    operators: Mapping[str, OperatorRestore] = field(default_factory=dict)
    """By uid."""
    channels: tuple[InFlightRestore, ...] = ()
    """Data that was in flight, to be processed before anything else."""
    allow_non_restored: bool = False
    """Whether state that an operator has no use for is left behind; otherwise it refuses the restore."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What a job takes over."""

    tasks: Mapping[tuple[int, int], TaskRestore]
    """By vertex id and index: every subtask of the job has one."""
    sources: Mapping[int, tuple[StateFile | None, ...]]
    """By id of a source's vertex: the positions of the former subtasks, encoded, in their order; None where one had none. To be read for
    `assign_splits`."""


class FoundSplit(Protocol):
    """A split as a source discovers it."""

    @property
    def id(self) -> str: ...
    @property
    def position(self) -> Any: ...
    @property
    def payload(self) -> Any: ...


def plan_restore(
    checkpoint: CompletedCheckpoint, vertices: Sequence[CheckpointedVertex], *, allow_non_restored: bool = False
) -> RestorePlan:
    """Deal `checkpoint` out to the subtasks of `vertices`. Raises RestoreError, which says what does not fit and what to do."""
    former = {operator.uid: _Former(checkpoint, operator) for operator in checkpoint.operators}
    _collect(checkpoint, former)
    wanted = {operator.uid for vertex in vertices for operator in vertex.operators}
    if not allow_non_restored:
        _refuse_unmatched(checkpoint, [f for uid, f in former.items() if uid not in wanted and f.has_state], vertices)
    tasks: dict[tuple[int, int], TaskRestore] = {}
    sources: dict[int, tuple[StateFile | None, ...]] = {}
    in_flight = InFlightPlan(checkpoint, vertices) if _keeps_channels(checkpoint, vertices) else None
    for vertex in vertices:
        found = [(operator, former[operator.uid]) for operator in vertex.operators if operator.uid in former]
        for index in range(vertex.parallelism):
            operators = {operator.uid: state.restore(operator, index) for operator, state in found}
            channels = in_flight.restore(vertex, index) if in_flight is not None else ()
            tasks[vertex.vertex_id, index] = TaskRestore(checkpoint.checkpoint_id, operators, channels, allow_non_restored)
        for _, state in found:
            if state.is_source:
                sources[vertex.vertex_id] = state.source
    if in_flight is not None and not in_flight.is_dealt_out:
        raise _changed(checkpoint)
    return RestorePlan(tasks, sources)


def assign_splits(former: Sequence[Sequence[SplitState]], found: Iterable[FoundSplit], parallelism: int) -> list[list[SplitState]]:
    """The splits of each of `parallelism` subtasks: those of the `former` subtasks where they stood, and those `found` besides.

    A split that was known keeps its position, and the payload that it was begun with; one that was read to its end stays so. With an
    unchanged parallelism a split stays with its subtask; otherwise they are dealt out anew, in their order. What is new goes where the
    fewest unfinished ones are. Raises RestoreError when two former subtasks read the same split.
    """
    dealt: list[list[SplitState]] = [[] for _ in range(parallelism)]
    known: dict[str, int] = {}
    for index, splits in enumerate(former):
        for split in splits:
            if split.id in known:
                raise RestoreError(
                    f"split {split.id!r} was read by the former subtasks {known[split.id]} and {index}, expected by one: "
                    "the checkpoint is damaged, or the source gave two splits the same id"
                )
            known[split.id] = index
    if len(former) == parallelism:
        for index, splits in enumerate(former):
            dealt[index] += splits
    else:
        everything = [split for splits in former for split in splits]
        # Apart, so that the work is spread and not only the names of what is done.
        for one_sort in ([s for s in everything if not s.finished], [s for s in everything if s.finished]):
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
    """One operator as the checkpoint knows it: the handles of its subtasks, in their order."""

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
        """All handles are here."""
        handles = [handle for handle in self._handles if handle is not None]
        self.keyed = sorted((h.keyed for h in handles if h.keyed is not None), key=lambda keyed: keyed.first_group)
        self.source = tuple(None if handle is None else handle.source for handle in self._handles)
        for before, after in zip(self.keyed, self.keyed[1:], strict=False):
            if after.first_group <= before.last_group:
                raise self._damaged(f"has key group {after.first_group} in two subtasks")

    @property
    def is_source(self) -> bool:
        return any(positions is not None for positions in self.source)

    @property
    def has_state(self) -> bool:
        return bool(self.keyed) or self.is_source or any(h is not None and h.operator is not None for h in self._handles)

    def restore(self, now: CheckpointedOperator, index: int) -> OperatorRestore:
        """The part of subtask `index` of the operator as it is now."""
        own = range_for_subtask(index, now.parallelism, now.max_parallelism)
        for keyed in self.keyed:
            if keyed.max_parallelism != now.max_parallelism:
                raise RestoreError(
                    f"{_title(self._checkpoint)}: the keyed state of operator {now.name!r} (uid {now.uid}) has "
                    f"{keyed.max_parallelism} key groups, the flow has max_parallelism {now.max_parallelism}; the number is fixed for "
                    f"the life of the state: build the flow with max_parallelism={keyed.max_parallelism}"
                )
        met = [k for k in self.keyed if own.intersection(KeyGroupRange(k.first_group, k.last_group)) is not None]
        blobs = tuple(None if handle is None else handle.operator for handle in self._handles)
        return OperatorRestore(tuple(met), blobs if any(blob is not None for blob in blobs) else ())

    def _damaged(self, what: str) -> RestoreError:
        operator = self.operator
        return RestoreError(
            f"{_title(self._checkpoint)}: operator {operator.name!r} (uid {operator.uid}) {what}; "
            "the metadata is damaged, restore another one"
        )


def _collect(checkpoint: CompletedCheckpoint, former: Mapping[str, _Former]) -> None:
    """Put every handle to its operator: chains may have been cut differently since."""
    for (head, index), state in checkpoint.subtasks.items():
        for handle in state.operators:
            operator = former.get(handle.uid)
            if operator is None:
                raise RestoreError(
                    f"{_title(checkpoint)}: subtask {index} of {head} has state of an operator {handle.uid} that is not in its list of "
                    "operators; the metadata is damaged, restore another one"
                )
            operator.add(index, handle)
    for operator in former.values():
        operator.settle()


def _refuse_unmatched(checkpoint: CompletedCheckpoint, lost: Sequence[_Former], vertices: Sequence[CheckpointedVertex]) -> None:
    if not lost:
        return
    known = {operator.uid for operator in checkpoint.operators}
    new = {o.name: o.uid for vertex in vertices for o in vertex.operators if o.uid not in known}
    lines = []
    for one in lost:
        namesake = new.get(one.operator.name)
        hint = f", the flow has a new one of that name with uid {namesake}" if namesake is not None else ""
        lines.append(f"{one.operator.name!r} (uid {one.operator.uid}{hint})")
    raise RestoreError(
        f"{_title(checkpoint)} holds state of operators that the flow does not have: {', '.join(lines)}; give them their uids back with "
        "uid=, or begin without that state with allow_non_restored=True"
    )


def _keeps_channels(checkpoint: CompletedCheckpoint, vertices: Sequence[CheckpointedVertex]) -> bool:
    """Whether there are data in flight to hand out. They fit the very exchanges that they were taken from, and no others."""
    if not any(state.channels for state in checkpoint.subtasks.values()):
        return False
    chains = {vertex.uid: [operator.uid for operator in vertex.operators] for vertex in vertices}
    edges = {read.edge_id for vertex in vertices for read in vertex.inputs}
    fits = [operator.uid for operator in checkpoint.operators] == [uid for chain in chains.values() for uid in chain]
    for (head, _), state in checkpoint.subtasks.items():
        uids = [handle.uid for handle in state.operators]
        fits = fits and (not uids or uids == chains.get(head))
        fits = fits and all(channel.edge_id in edges or channel.side is ChannelSide.CHAIN for channel in state.channels)
    if not fits:
        raise _changed(checkpoint)
    return True


def _changed(checkpoint: CompletedCheckpoint) -> RestoreError:
    return RestoreError(
        f"{_title(checkpoint)} is unaligned, it holds data in flight between operators, and the flow has changed since; restore it with "
        "the same operators, chained alike, and the same exchanges between them, or restore a savepoint, which holds none"
    )


class InFlightPlan:
    """Deals out the data in flight of `checkpoint`, which was taken of the same operators, at whatever parallelism.

    What waited at the producer of a channel follows what waited at its consumer. Where neither side of an exchange was rescaled a channel
    goes on as itself. Otherwise its former channels are read beside the new ones: by key, or each as a whole by one subtask.
    """

    def __init__(self, checkpoint: CompletedCheckpoint, vertices: Sequence[CheckpointedVertex]) -> None:
        self._parallelism = {operator.uid: operator.parallelism for operator in checkpoint.operators}
        self._uids = {vertex.vertex_id: vertex.uid for vertex in vertices}
        self._now = {vertex.vertex_id: vertex.parallelism for vertex in vertices}
        self._files = {
            (head, subtask, channel.edge_id, channel.side, channel.index): channel.file
            for (head, subtask), state in checkpoint.subtasks.items()
            for channel in state.channels
        }
        self._left = dict.fromkeys(self._files)

    @property
    def is_dealt_out(self) -> bool:
        """Whether all of it has been given to somebody, once every subtask has its part: an exchange that became another one may reach
        fewer subtasks."""
        return not self._left

    def restore(self, vertex: CheckpointedVertex, index: int) -> tuple[InFlightRestore, ...]:
        """The part of subtask `index` of `vertex`."""
        found: list[InFlightRestore] = []
        for read in vertex.inputs:
            found += self._same(vertex, index, read) if self._is_same(vertex, read) else self._dealt(vertex, index, read)
        former = self._parallelism[vertex.uid]
        dealt = former != vertex.parallelism
        for (head, subtask, edge_id, side, place), file in self._files.items():
            if head == vertex.uid and side in (ChannelSide.CHAIN, ChannelSide.RESTORED) and (dealt or subtask == index):
                rest = subtask % vertex.parallelism == index
                found.append(InFlightRestore(edge_id, side, place, (file,), dealt=dealt, takes_rest=rest))
                self._left.pop((head, subtask, edge_id, side, place), None)
        return tuple(found)

    def _is_same(self, vertex: CheckpointedVertex, read: VertexInput) -> bool:
        producer = self._uids[read.vertex_id]
        return self._parallelism[vertex.uid] == vertex.parallelism and self._parallelism[producer] == self._now[read.vertex_id]

    def _same(self, vertex: CheckpointedVertex, index: int, read: VertexInput) -> list[InFlightRestore]:
        producer = self._uids[read.vertex_id]
        count = self._parallelism[producer] if read.producers is None else len(read.producers[index])
        made = (self._channel(vertex.uid, index, producer, channel, read, ChannelSide.INPUT, channel) for channel in range(count))
        return [restore for restore in made if restore is not None]

    def _dealt(self, vertex: CheckpointedVertex, index: int, read: VertexInput) -> list[InFlightRestore]:
        # Whatever the exchange is now: one that was dealt out in turn becomes one to one when both sides are as many, and its data remain.
        producer = self._uids[read.vertex_id]
        found: list[InFlightRestore] = []
        for subtask in range(self._parallelism[vertex.uid]):
            rest = subtask % vertex.parallelism == index
            if read.keyed or rest:
                for channel in range(self._parallelism[producer]):
                    restore = self._channel(vertex.uid, subtask, producer, channel, read, ChannelSide.RESTORED, len(found))
                    if restore is not None:
                        found.append(replace(restore, dealt=True, takes_rest=rest))
        return found

    def _channel(
        self, consumer: str, subtask: int, producer: str, channel: int, read: VertexInput, side: ChannelSide, place: int
    ) -> InFlightRestore | None:
        """What was on its way from subtask `channel` of the producer to subtask `subtask` of the consumer."""
        at_consumer = (consumer, subtask, read.edge_id, ChannelSide.INPUT, channel)
        at_producer = (producer, channel, read.edge_id, ChannelSide.OUTPUT, subtask)
        first, second = self._files.get(at_consumer), self._files.get(at_producer)
        self._left.pop(at_consumer, None)
        self._left.pop(at_producer, None)
        files = tuple(file for file in (first, second) if file is not None)
        return InFlightRestore(read.edge_id, side, place, files, has_head=first is not None) if files else None


def _title(checkpoint: CompletedCheckpoint) -> str:
    what = "savepoint" if checkpoint.kind.is_savepoint else "checkpoint"
    where = checkpoint.location or f"of flow {checkpoint.flow!r}"
    return f"{what} {checkpoint.checkpoint_id} {where}"
