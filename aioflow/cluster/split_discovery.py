"""Looks again and again for new splits of the sources that ask for it (`discover_every`), and hands
them to subtasks that run.

A split goes to one subtask, and stays with it as long as that one's attempt lives, also when nobody
knows whether it arrived: then it is sent again, and whoever has it ignores it. So it is read once.
A restart deals all splits out anew: those of the checkpoint stand where they stood, the others are
begun; what was found meanwhile is handed out by the next look.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from aioflow.checkpoint.source_state import SplitState, decode_source_state, encode_source_state
from aioflow.core.timeunits import to_seconds
from aioflow.core.user_code import check_own_task, take_back_cancellation, user_error
from aioflow.graph.deployment import ExecutionState
from aioflow.operators.source import Split, discover_splits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aioflow.core.host import Host
    from aioflow.core.serializers import Codec
    from aioflow.graph.deployment import ExecutionAttemptId, TaskDeploymentDescriptor
    from aioflow.graph.job_graph import JobGraph, JobVertex

__all__ = ["SplitDiscovery", "Subtask", "Subtasks", "pack_splits", "unpack_splits"]

logger = logging.getLogger(__name__)


class Subtask(Protocol):
    """A subtask of a source: the attempt that is the newest, and how far that is."""

    @property
    def attempt(self) -> ExecutionAttemptId: ...
    @property
    def state(self) -> ExecutionState: ...


class Subtasks(Protocol):
    """Those of a job by vertex and index, as far as they are looked after from here."""

    @property
    def graph(self) -> JobGraph: ...
    @property
    def executions(self) -> Mapping[tuple[int, int], Subtask]: ...


class SplitTaker(Protocol):
    """Takes splits to the subtask that is to read them."""

    async def add_splits(self, attempt: ExecutionAttemptId, splits: Sequence[Split]) -> None: ...


class SplitDiscovery:
    """Of one job. `found`: the splits of each source vertex that are known, which grows here."""

    def __init__(self, host: Host, executions: Subtasks, found: Mapping[int, list[Split]]) -> None:
        self._host = host
        self._executions = executions
        self._found = found
        self._handed: dict[ExecutionAttemptId, dict[str, None]] = {}
        """Ids of the splits that each living attempt has, or was to get."""
        self._in_doubt: dict[ExecutionAttemptId, list[Split]] = {}
        """Those of them that may not have arrived."""
        self.vertices = {
            vertex.id: vertex for vertex in executions.graph.vertices if _looks_again(vertex)
        }
        """Those that are looked at again."""
        for vertex in self.vertices.values():
            if (finder := getattr(vertex.head.source, "finder", None)) is not None:
                finder.forget()

    def deployed(self, descriptor: TaskDeploymentDescriptor) -> None:
        """A subtask begins, or begins again."""
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
        """Look for new splits of one of `vertices` until cancelled.

        What cannot be looked at is logged, and tried again.
        """
        # It is one of those.
        given = vertex.head.source.discover_every  # type: ignore[union-attr]
        every_s = to_seconds(given, "discover_every")
        while True:
            await asyncio.sleep(every_s)
            try:
                await self._look(vertex, workers)
                check_own_task()
            # A share that is away comes back; what is read already is read on meanwhile.
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
        # Whatever it is: the next look sends them again.
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
    """For a message. Raises TypeNotSupported for what is no plain data."""
    rows = [
        SplitState(split.id, split.position, split.payload, split.watermark) for split in splits
    ]
    return encode_source_state(rows, codec, "a source's splits")


def unpack_splits(content: bytes, codec: Codec) -> list[Split]:
    """What `pack_splits` wrote."""
    found = decode_source_state(content, codec, "a source's splits")
    return [Split(split.id, split.position, split.payload, split.watermark) for split in found]


def _looks_again(vertex: JobVertex) -> bool:
    source = vertex.head.source
    return (
        source is not None
        and not source.bounded
        and getattr(source, "discover_every", None) is not None
    )
