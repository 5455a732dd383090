"""Doubles at the seams of a task's checkpoints: who answers, and where state is written."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from aioflow.checkpoint.completed import CheckpointStats, SubtaskState
from aioflow.core.elements import CancelCheckpointMarker, CheckpointBarrier, RecordBatch
from aioflow.graph.deployment import ExecutionAttemptId
from aioflow.network.channels import ProducerState
from aioflow.network.partition import ResultPartition
from aioflow.operators.operator import Operator
from aioflow.state.snapshot import StateFile
from aioflow.task.environment import CheckpointTaskOptions
from tests.task.running import Bench, Logged


class Answers:
    """A `CheckpointResponder` that keeps what it hears."""

    def __init__(self) -> None:
        self.acknowledged: dict[int, tuple[SubtaskState, CheckpointStats]] = {}
        self.declined: list[tuple[int, str, BaseException | None]] = []
        self.ended = 0

    def acknowledge_checkpoint(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        state: SubtaskState,
        stats: CheckpointStats,
    ) -> None:
        self.acknowledged[checkpoint_id] = state, stats

    def decline_checkpoint(
        self,
        attempt: ExecutionAttemptId,
        checkpoint_id: int,
        reason: str,
        error: BaseException | None,
    ) -> None:
        self.declined.append((checkpoint_id, reason, error))

    def end_of_data_reached(self, attempt: ExecutionAttemptId) -> None:
        self.ended += 1

    def ask_producer(
        self, attempt: ExecutionAttemptId, answer: Callable[[ProducerState], None]
    ) -> None:
        answer(ProducerState.RUNNING)


class HeldStore:
    """A `StateStore` in memory. While `held` a write waits; with `error` set it fails."""

    def __init__(self) -> None:
        self.held = False
        self.error: Exception | None = None
        self.open = asyncio.Event()
        self.writing = 0
        self.cancelled = 0
        self.files: list[bytes] = []

    def output(self, directory: str = "") -> HeldStore:
        return self

    def input(self) -> HeldStore:
        return self

    async def write(self, chunks: AsyncIterator[bytes]) -> StateFile:
        content = b"".join([chunk async for chunk in chunks])
        self.writing += 1
        try:
            if self.error is not None:
                raise self.error
            if self.held:
                await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.writing -= 1
        self.files.append(content)
        return StateFile(
            "", len(content), hashlib.blake2b(content, digest_size=16).digest(), content
        )

    async def read(self, file: StateFile) -> bytes:
        assert file.content is not None
        return file.content


class Snapshotted(Logged):
    """Logs its part in checkpoints too, and sees barriers that went out before."""

    output: ResultPartition | None = None

    def prepare_snapshot_pre_barrier(self, checkpoint_id: int) -> RecordBatch:
        self._at("prepare")
        return RecordBatch([])

    def snapshot_state(self, checkpoint_id: int) -> Any:
        self._at("snapshot")
        return None

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._at(f"complete {checkpoint_id}")

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._at(f"aborted {checkpoint_id}")


def checkpointed(
    *vertices: list[Any], inputs: int = 1, **options: Any
) -> tuple[Bench, Answers, HeldStore]:
    """A bench whose tasks take checkpoints."""
    bench = Bench(
        *vertices,
        inputs=inputs,
        checkpoints=CheckpointTaskOptions(store="memory://here"),
        **options,
    )
    answers, store = Answers(), HeldStore()
    bench.environment.responder = answers
    bench.environment.store = store
    return bench, answers, store


class Reader:
    """Reads what a task without a consumer task sends: elements in order, going on behind every
    barrier.
    """

    def __init__(self, partition: ResultPartition, index: int = 0) -> None:
        self._subpartition = partition.subpartitions[index]
        self._subpartition.create_read_view(lambda priority: None)
        self.read: list[Any] = []

    def poll(self) -> list[Any]:
        """Everything that came, records unpacked."""
        while (polled := self._subpartition.poll()) is not None:
            element = polled[0]
            if isinstance(element, RecordBatch):
                self.read += element.values
            else:
                self.read.append(element)
                self._subpartition.resume_consumption()
        return self.read

    def has_barrier(self, checkpoint_id: int) -> bool:
        return any(
            isinstance(e, CheckpointBarrier) and e.checkpoint_id == checkpoint_id
            for e in self.poll()
        )

    @property
    def markers(self) -> list[int]:
        return [e.checkpoint_id for e in self.poll() if isinstance(e, CancelCheckpointMarker)]


def factories(
    log: list[str], names: str = "abc", cls: type[Any] = Snapshotted, **special: type[Operator]
) -> list[Any]:
    """Factories of one logged operator for each name."""
    return [lambda name=name: special.get(name, cls)(name, log) for name in names]
