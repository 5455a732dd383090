"""Sources of a running job: looks for new splits, and limits how far sources may read.

`discover_every` of a source says how often to look. A split belongs to one subtask as long as the
subtask's attempt lives, even if the split may not have arrived there. The split is then sent again,
and a subtask that already has it ignores it. So each split is read once. A restart assigns all
splits again: splits of the checkpoint continue at their positions, the others start from the
beginning. Splits that are found meanwhile are assigned when the discovery looks next.

Sources of one alignment group wait for the slowest of them. A source may also have to wait until
another input of an operator was read. Tasks report their progress, and get limits in answer
(`TaskExecutorGateway.limit_source`). A limit holds back only the reading of a source. So barriers,
timers and everything downstream go on.

*Alignment*: the event time of a subtask is at most that of the slowest subtask of the group plus
the drift. Ended and idle subtasks do not count. No limit is set before every subtask of the group
has reported.

*Reading first*: a source that has to wait begins with its first limit. The limit is sent when every
subtask of each operator that the source waits for has reported. After a restart the source waits
again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from aioflow.checkpoint.source_state import SplitState, decode_source_state, encode_source_state
from aioflow.core.elements import MAX_WATERMARK
from aioflow.core.user_code import check_own_task, take_back_cancellation, user_error
from aioflow.graph.deployment import ExecutionState
from aioflow.operators.source import Split, discover_splits, discovery_interval_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aioflow.cluster.execution_graph import ExecutionGraph
    from aioflow.core.host import Host
    from aioflow.core.wire.serializers import Codec
    from aioflow.graph.deployment import ExecutionAttemptId, TaskDeploymentDescriptor
    from aioflow.graph.job_graph import JobGraph, JobVertex
    from aioflow.operators.watermarks import WatermarkAlignment

__all__ = ["SourceLimits", "SplitDiscovery", "Subtask", "Subtasks", "pack_splits", "unpack_splits"]

logger = logging.getLogger(__name__)


class Subtask(Protocol):
    """A subtask of a source: its newest attempt and the state of that attempt."""

    @property
    def attempt(self) -> ExecutionAttemptId: ...
    @property
    def state(self) -> ExecutionState: ...


class Subtasks(Protocol):
    """The interface to the graph and the subtasks of a job. `executions` is by (vertex id, subtask
    index)."""

    @property
    def graph(self) -> JobGraph: ...
    @property
    def executions(self) -> Mapping[tuple[int, int], Subtask]: ...


class SplitTaker(Protocol):
    """The interface of a worker that sends splits to the subtask that reads them."""

    async def add_splits(self, attempt: ExecutionAttemptId, splits: Sequence[Split]) -> None: ...


class SplitDiscovery:
    """Split discovery of one job.

    `found` holds the known splits of each source, by vertex id. The discovery adds new splits.
    """

    def __init__(self, host: Host, executions: Subtasks, found: Mapping[int, list[Split]]) -> None:
        self._host = host
        self._executions = executions
        self._found = found
        self._handed: dict[ExecutionAttemptId, dict[str, None]] = {}
        """Ids of the splits that were assigned to each living attempt."""
        self._in_doubt: dict[ExecutionAttemptId, list[Split]] = {}
        """Assigned splits that may not have arrived, by attempt."""
        self.vertices = {
            vertex.id: vertex
            for vertex in executions.graph.vertices
            if _interval_s(vertex) is not None
        }
        """The vertices whose sources repeatedly look for new splits, by vertex id."""
        for vertex in self.vertices.values():
            source = vertex.head.source
            if source is not None and source.finder is not None:
                source.finder.forget()

    def deployed(self, descriptor: TaskDeploymentDescriptor) -> None:
        """Notes the deployment of a subtask with the splits in `descriptor`."""
        attempt = descriptor.attempt
        if attempt.vertex_id not in self.vertices:
            return
        for old in [
            one
            for one in self._handed
            if (one.vertex_id, one.subtask_index) == (attempt.vertex_id, attempt.subtask_index)
        ]:
            del self._handed[old]
            self._in_doubt.pop(old, None)
        self._handed[attempt] = dict.fromkeys(split.id for split in descriptor.splits)

    async def watch(self, vertex: JobVertex, workers: SplitTaker) -> None:
        """Looks for new splits of `vertex`, one of `vertices`, until cancelled.

        A failure is logged, and the discovery looks again after the interval.
        """
        every_s = _interval_s(vertex)
        assert every_s is not None, "it is one of those"
        while True:
            await asyncio.sleep(every_s)
            try:
                # The current vertex: its parallelism may have changed.
                await self._look(self._executions.graph.vertex(vertex.id), workers)
                check_own_task()
            # A lost file share may come back; reading of known splits goes on meanwhile.
            except BaseException as raised:  # noqa: BLE001
                error = user_error(raised)
                await take_back_cancellation()
                logger.warning(
                    "no new splits of source %r are found now: %r", vertex.head.name, error
                )

    async def _look(self, vertex: JobVertex, workers: SplitTaker) -> None:
        assert vertex.head.source is not None, "only sources have splits"
        found = await discover_splits(vertex.head.source, self._host)
        attempts = [
            self._executions.executions.get((vertex.id, index))
            for index in range(vertex.parallelism)
        ]
        running = [
            one.attempt
            for one in attempts
            if one is not None and one.state is ExecutionState.RUNNING
        ]
        if len(running) < vertex.parallelism:
            return  # A later look finds these splits too.
        handed = [self._handed[attempt] for attempt in running]
        for ids in handed:
            found = [split for split in found if split.id not in ids]
        known = {split.id for split in self._found[vertex.id]} if found else set()
        for split in found:
            index = min(range(len(handed)), key=lambda one: len(handed[one]))
            handed[index][split.id] = None
            self._in_doubt.setdefault(running[index], []).append(split)
            if split.id not in known:
                self._found[vertex.id].append(split)
        for attempt in running:
            if splits := self._in_doubt.get(attempt):
                await self._hand_out(attempt, splits, workers)

    async def _hand_out(
        self, attempt: ExecutionAttemptId, splits: list[Split], workers: SplitTaker
    ) -> None:
        try:
            await workers.add_splits(attempt, splits)
        # After any error the next look sends them again.
        except Exception as error:  # noqa: BLE001
            logger.info(
                "%d splits may not have reached %s, and are sent again: %r",
                len(splits),
                attempt,
                error,
            )
            return
        self._in_doubt.pop(attempt, None)
        logger.info(
            "%s reads %d more splits: %s",
            attempt,
            len(splits),
            ", ".join(split.id for split in splits[:5]),
        )


def pack_splits(splits: Sequence[Split], codec: Codec) -> bytes:
    """Encodes splits for a message. Raises TypeNotSupported if a split is not plain data."""
    rows = [
        SplitState(split.id, split.position, split.payload, split.watermark) for split in splits
    ]
    return encode_source_state(rows, codec, "a source's splits")


def unpack_splits(content: bytes, codec: Codec) -> list[Split]:
    """Decodes the output of `pack_splits`."""
    found = decode_source_state(content, codec, "a source's splits")
    return [Split(split.id, split.position, split.payload, split.watermark) for split in found]


def _interval_s(vertex: JobVertex) -> float | None:
    source = vertex.head.source
    return None if source is None else discovery_interval_s(source)


Place = tuple[int, int]
"""A subtask, as (vertex id, subtask index)."""

TAKES_LIMITS = (ExecutionState.INITIALIZING, ExecutionState.RUNNING)


class SourceLimits:
    """The limits up to which the sources of one job may read. `limit(attempt, watermark)` sends a
    limit to a source."""

    def __init__(
        self, executions: ExecutionGraph, limit: Callable[[ExecutionAttemptId, int], None]
    ) -> None:
        self._executions = executions
        self._limit = limit
        self._graph: JobGraph | None = None
        self._aligned: dict[int, WatermarkAlignment] = {}
        """The alignment of each source that has one, by vertex id."""
        self._waits: dict[int, list[int]] = {}
        """Maps the vertex id of each source that waits to the vertex ids of the operators that it
        waits for."""
        self._progress: dict[Place, tuple[ExecutionAttemptId, int]] = {}
        self._sent: dict[Place, tuple[ExecutionAttemptId, int]] = {}

    def report(self, attempt: ExecutionAttemptId, watermark: int) -> None:
        """Handles the report of a task: the event time of a source, or MAX_WATERMARK once an
        operator has read its first input."""
        self._progress[attempt.vertex_id, attempt.subtask_index] = attempt, watermark
        self.update()

    def task_state(self, attempt: ExecutionAttemptId, state: ExecutionState) -> None:
        """Handles the new state of a task."""
        self._analyse()
        if not (self._aligned or self._waits):
            return
        if state is ExecutionState.RUNNING:
            # A limit sent before the task was there is lost.
            self._sent.pop((attempt.vertex_id, attempt.subtask_index), None)
        if state in (ExecutionState.RUNNING, ExecutionState.FINISHED):
            self.update()

    def update(self) -> None:
        """Sends the limits that have changed to the sources."""
        self._analyse()
        limits: dict[int, int] = {}
        for vertex, alignment in self._aligned.items():
            slowest = self._slowest(alignment.group)
            if slowest is not None:
                limits[vertex] = (
                    slowest if slowest == MAX_WATERMARK else slowest + alignment.max_drift_ms
                )
        for vertex in self._waits:
            if not self._may_begin(vertex):
                limits.pop(vertex, None)
            else:
                limits.setdefault(vertex, MAX_WATERMARK)
        for vertex, watermark in limits.items():
            for place in self._subtasks(vertex):
                self._send(place, watermark)

    def _send(self, place: Place, watermark: int) -> None:
        execution = self._executions.executions.get(place)
        if execution is None or execution.state not in TAKES_LIMITS:
            return
        if self._sent.get(place) != (execution.attempt, watermark):
            self._sent[place] = execution.attempt, watermark
            self._limit(execution.attempt, watermark)

    def _slowest(self, group: str) -> int | None:
        """Returns the least event time of the subtasks in an alignment group. Returns None before
        every subtask has reported."""
        vertices = [
            one
            for one, alignment in self._aligned.items()
            if alignment.group == group and self._may_begin(one)
        ]
        marks = [self._reached(place) for one in vertices for place in self._subtasks(one)]
        known = [mark for mark in marks if mark is not None]
        return min(known, default=MAX_WATERMARK) if len(known) == len(marks) else None

    def _may_begin(self, vertex: int) -> bool:
        """Returns whether every input that the source of `vertex` waits for is read."""
        return all(
            self._reached(place) == MAX_WATERMARK
            for operator in self._waits.get(vertex, ())
            for place in self._subtasks(operator)
        )

    def _reached(self, place: Place) -> int | None:
        """Returns the event time that the current attempt of a subtask last reported; None if it
        has not reported."""
        execution = self._executions.executions.get(place)
        if execution is None:
            return None
        if execution.state is ExecutionState.FINISHED:
            return MAX_WATERMARK
        attempt, watermark = self._progress.get(place, (None, 0))
        return watermark if attempt == execution.attempt else None

    def _subtasks(self, vertex: int) -> list[Place]:
        parallelism = self._executions.graph.vertex(vertex).parallelism
        return [(vertex, index) for index in range(parallelism)]

    def _analyse(self) -> None:
        graph = self._executions.graph
        if graph is self._graph:
            return
        self._graph, self._aligned, self._waits = graph, {}, {}
        for vertex in graph.vertices:
            strategy = vertex.head.watermarks
            if strategy is not None and strategy.alignment is not None:
                self._aligned[vertex.id] = strategy.alignment
            for source in graph.waiting_for(vertex.id):
                self._waits.setdefault(source, []).append(vertex.id)
