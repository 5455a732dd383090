"""Looks for new splits of running sources (`discover_every`) and sends them to subtasks.

A split belongs to one subtask as long as its attempt lives, even if it may not have arrived. It is
then sent again, and a subtask that has it already ignores it. So each split is read once. A restart
assigns all splits again: those of the checkpoint continue at their positions, the others start from
the beginning. Splits found meanwhile are assigned by the next look.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from aioflow.checkpoint.source_state import SplitState, decode_source_state, encode_source_state
from aioflow.core.user_code import check_own_task, take_back_cancellation, user_error
from aioflow.graph.deployment import ExecutionState
from aioflow.operators.source import Split, discover_splits, discovery_interval_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aioflow.core.host import Host
    from aioflow.core.wire.serializers import Codec
    from aioflow.graph.deployment import ExecutionAttemptId, TaskDeploymentDescriptor
    from aioflow.graph.job_graph import JobGraph, JobVertex

__all__ = ["SplitDiscovery", "Subtask", "Subtasks", "pack_splits", "unpack_splits"]

logger = logging.getLogger(__name__)


class Subtask(Protocol):
    """A subtask of a source: its newest attempt and the state of that attempt."""

    @property
    def attempt(self) -> ExecutionAttemptId: ...
    @property
    def state(self) -> ExecutionState: ...


class Subtasks(Protocol):
    """The subtasks of a job that are managed here, by vertex and index."""

    @property
    def graph(self) -> JobGraph: ...
    @property
    def executions(self) -> Mapping[tuple[int, int], Subtask]: ...


class SplitTaker(Protocol):
    """Sends splits to the subtask that reads them."""

    async def add_splits(self, attempt: ExecutionAttemptId, splits: Sequence[Split]) -> None: ...


class SplitDiscovery:
    """Split discovery of one job.

    `found`: known splits of each source vertex; this adds new ones.
    """

    def __init__(self, host: Host, executions: Subtasks, found: Mapping[int, list[Split]]) -> None:
        self._host = host
        self._executions = executions
        self._found = found
        self._handed: dict[ExecutionAttemptId, dict[str, None]] = {}
        """Ids of the splits that were assigned to each living attempt."""
        self._in_doubt: dict[ExecutionAttemptId, list[Split]] = {}
        """Assigned splits that may not have arrived."""
        self.vertices = {
            vertex.id: vertex
            for vertex in executions.graph.vertices
            if _interval_s(vertex) is not None
        }
        """The vertices whose sources are searched repeatedly."""
        for vertex in self.vertices.values():
            source = vertex.head.source
            if source is not None and source.finder is not None:
                source.finder.forget()

    def deployed(self, descriptor: TaskDeploymentDescriptor) -> None:
        """Notes the deployment of a subtask."""
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
        """Looks for new splits of one of `vertices` until cancelled.

        A failed look is logged and tried again.
        """
        every_s = _interval_s(vertex)
        assert every_s is not None, "it is one of those"
        while True:
            await asyncio.sleep(every_s)
            try:
                # The current vertex: its parallelism may have changed.
                await self._look(self._executions.graph.vertex(vertex.id), workers)
                check_own_task()
            # A lost file share comes back; known splits are read on meanwhile.
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
            return  # A later look finds them too.
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
    """Encodes splits for a message. Raises TypeNotSupported unless they are plain data."""
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
