"""The initial state of a job: which checkpoint or savepoint it starts from, and the part of it that
each task restores.

`checkpointed_vertices` describes the vertices of a job graph to checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from aioflow.checkpoint.assignment import assign_splits, plan_restore
from aioflow.checkpoint.completed import CheckpointedOperator
from aioflow.checkpoint.instructions import LATEST, CheckpointSettings
from aioflow.checkpoint.plan import CheckpointedVertex, VertexInput
from aioflow.checkpoint.source_state import decode_source_state
from aioflow.checkpoint.store import RESTORE_ONLY, FlowStore, open_store, read_checkpoint
from aioflow.core.errors import RestoreError, did_you_mean
from aioflow.graph.job_graph import JobEdge, JobGraph, JobVertex, connected_subtasks
from aioflow.graph.stream_graph import ShipStrategy
from aioflow.operators.source import Split

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aioflow.checkpoint.assignment import TaskRestore
    from aioflow.checkpoint.completed import CompletedCheckpoint
    from aioflow.checkpoint.objects import ObjectStore
    from aioflow.checkpoint.source_state import SplitState
    from aioflow.core.host import Host
    from aioflow.core.wire.serializers import Codec
    from aioflow.graph.job_graph import JobGraph
    from aioflow.operators.source import BaseSource

__all__ = [
    "GivenSavepoint",
    "RestorePoint",
    "checkpointed_vertices",
    "found_checkpoint",
    "restore_point",
    "start_over",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The initial state and splits of each task, by (vertex id, subtask). A task without an entry
    starts empty."""

    states: Mapping[tuple[int, int], TaskRestore] = field(default_factory=dict)
    splits: Mapping[tuple[int, int], Sequence[Split]] = field(default_factory=dict)


class GivenSavepoint:
    """The savepoint that a job without checkpoints starts from.

    The job starts from the savepoint again after each failure.
    """

    def __init__(self, host: Host, settings: CheckpointSettings, codec: Codec) -> None:
        self._host = host
        self._settings = settings
        self._codec = codec
        self._store = open_store(RESTORE_ONLY, host)

    @property
    def told(self) -> str:
        """The point from which the job starts, in words for log messages."""
        return f"the savepoint {self._settings.restore}"

    async def restore_point(
        self, graph: JobGraph, discovered: Mapping[int, Sequence[Split]]
    ) -> RestorePoint:
        """Returns the state and splits that newly deployed tasks of `graph` start with.

        `discovered` holds the splits of each source, by vertex id, in the order of discovery.
        """
        assert self._settings.restore is not None, "settings without a store must name a savepoint"
        found = await _read(self._settings.restore, self._host, self._settings.key)
        allow = self._settings.allow_non_restored
        return await restore_point(
            found, graph, self._store, self._codec, discovered, allow_non_restored=allow
        )


async def found_checkpoint(
    host: Host, store: FlowStore, settings: CheckpointSettings, recovered: str | None
) -> CompletedCheckpoint | None:
    """Returns the checkpoint that a job starts from; None if the job starts empty. Raises
    RestoreError if it cannot be read.

    `recovered` is the id of a job that ran under an earlier leader, or None. If that job has
    completed a checkpoint, it continues from there, and `settings` are ignored.
    """
    if recovered is not None:
        newest = await store.newest()
        if newest is not None and newest.job_id == recovered:
            return newest
    if settings.restore == LATEST:
        return await store.newest()
    if settings.restore is not None:
        return await _read(settings.restore, host, settings.key, store.objects)
    if not settings.fresh and recovered is None:
        newest = await store.newest()
        if newest is not None and await store.ended_ms(newest) is None:
            raise RestoreError(
                f"{store.url} holds {newest.location} of an unfinished job, and restore=None "
                "would begin without it: say "
                'restore="latest", or nothing, to go on from there; give fresh=True beside '
                "restore=None to give it up"
            )
    return None


async def _read(
    url: str, host: Host, key: bytes | None, root: ObjectStore | None = None
) -> CompletedCheckpoint:
    """Reads the checkpoint that `restore=` names. Raises RestoreError if this fails."""
    try:
        return await read_checkpoint(url, host, key, root=root)
    except RestoreError as error:
        hint = did_you_mean(url.rpartition("/")[2].lower(), [LATEST], "restore={!r}")
        if not hint:
            raise
        raise RestoreError(f"{error}{hint}") from error


async def start_over(store: FlowStore, number: int) -> None:
    """Abandons the checkpoints up to `number`, so that later runs do not go back to them.

    Raises CheckpointError if the store fails.
    """
    if number:
        await store.finish(number)


async def restore_point(
    checkpoint: CompletedCheckpoint | None,
    graph: JobGraph,
    store: FlowStore,
    codec: Codec,
    discovered: Mapping[int, Sequence[Split]],
    *,
    allow_non_restored: bool,
    job_id: str = "",
) -> RestorePoint:
    """Returns the part of `checkpoint` that each task of `graph` restores.

    `discovered` holds the splits of each source, by vertex id. `job_id` is the job that the tasks
    belong to. Raises RestoreError if the state cannot be restored.
    """
    if checkpoint is None:
        return RestorePoint()
    plan = plan_restore(
        checkpoint, checkpointed_vertices(graph), allow_non_restored=allow_non_restored
    )
    files = store.input()
    splits: dict[tuple[int, int], Sequence[Split]] = {}
    for vertex_id, positions in plan.sources.items():
        vertex = graph.vertex(vertex_id)
        what = f"source {vertex.head.name!r} in {checkpoint.location}"
        former = [
            [] if file is None else decode_source_state(await files.read(file), codec, what)
            for file in positions
        ]
        source = vertex.head.source
        if checkpoint.job_id != job_id and source is not None and source.per_run:
            # The source ended with the elements of an earlier run; this run has its own.
            former = [[replace(split, finished=False) for split in splits] for splits in former]
        former, known = _recognised(former, source, discovered.get(vertex_id, ()), what)
        # A bounded source reads the splits of its first start. A file that has grown since would be
        # cut into other splits.
        bounded = source is not None and source.bounded
        found = () if bounded and any(former) else known
        for index, dealt in enumerate(assign_splits(former, found, vertex.parallelism)):
            splits[vertex_id, index] = [
                Split(s.id, s.position, s.payload, s.watermark, s.finished) for s in dealt
            ]
    return RestorePoint(plan.tasks, splits)


def _recognised(
    former: list[list[SplitState]],
    source: BaseSource[Any] | None,
    found: Sequence[Split],
    what: str,
) -> tuple[list[list[SplitState]], Sequence[Split]]:
    """Returns the splits of `former` with their current ids, and the splits of `found` that are
    new.

    Returns both arguments unchanged if the source has no `finder` that recognises splits (see
    `Source`).
    """
    finder = None if source is None else source.finder
    if finder is None:
        return former, found
    before = [split for splits in former for split in splits]
    now, found = finder.recognise(before, found)
    changed = [(split.id, new) for split, new in zip(before, now, strict=True) if split.id != new]
    if changed:
        logger.warning(
            "%s: %d splits go by other names now; %r is taken for %r",
            what,
            len(changed),
            *changed[0],
        )
    names = iter(now)
    return [[replace(split, id=next(names)) for split in splits] for splits in former], found


def checkpointed_vertices(graph: JobGraph) -> tuple[CheckpointedVertex, ...]:
    """Returns the vertices of `graph` as checkpoints describe them, producers first."""
    return tuple(
        CheckpointedVertex(
            vertex_id=vertex.id,
            name=vertex.name,
            operators=tuple(
                _operator(vertex, node.name, uid)
                for node, uid in zip(vertex.nodes, vertex.uids, strict=True)
            ),
            inputs=tuple(_input(graph, edge) for edge in graph.inputs_of(vertex.id)),
        )
        for vertex in graph.vertices
    )


def _operator(vertex: JobVertex, name: str, uid: str) -> CheckpointedOperator:
    return CheckpointedOperator(
        uid=uid, name=name, parallelism=vertex.parallelism, max_parallelism=vertex.max_parallelism
    )


def _input(graph: JobGraph, edge: JobEdge) -> VertexInput:
    strategy = edge.partitioning.strategy
    return VertexInput(
        edge.source,
        _producers(graph, edge),
        edge_id=edge.id,
        keyed=strategy is ShipStrategy.HASH,
        may_be_overtaken=strategy.may_be_overtaken,
    )


def _producers(graph: JobGraph, edge: JobEdge) -> tuple[Sequence[int], ...] | None:
    """Returns, for each consumer, the indexes of the producers that send to it. Returns None if all
    producers send to all consumers."""
    if not edge.partitioning.strategy.pointwise:
        return None
    producers, consumers = (
        graph.vertex(edge.source).parallelism,
        graph.vertex(edge.target).parallelism,
    )
    reached = [
        connected_subtasks(edge.partitioning.strategy, producer, producers, consumers)
        for producer in range(producers)
    ]
    return tuple(
        tuple(p for p in range(producers) if consumer in reached[p])
        for consumer in range(consumers)
    )
