"""A job for the tests of the coordinator: two sources, a keyed count, a sink; its tasks answer
when the test says so.
"""

from __future__ import annotations

from typing import TypeVar

from aioflow.checkpoint.completed import (
    CheckpointedOperator,
    CheckpointStats,
    CompletedCheckpoint,
    OperatorStateHandle,
    SubtaskState,
)
from aioflow.checkpoint.coordinator import CheckpointCoordinator
from aioflow.checkpoint.instructions import (
    Answer,
    CoordinatorOptions,
    Instruction,
    Moment,
    Store,
    Trigger,
    WakeAt,
)
from aioflow.checkpoint.plan import CheckpointedVertex, VertexInput
from aioflow.core.scope import ExecutionAttemptId
from aioflow.state.snapshot import CANONICAL, KeyedStateHandle, StateFile

T = TypeVar("T")

SOURCE, COUNT, SINK = 0, 1, 2
KEYS = [(SOURCE, 0), (SOURCE, 1), (COUNT, 0), (COUNT, 1), (SINK, 0)]


def operator(uid: str, parallelism: int, max_parallelism: int = 128) -> CheckpointedOperator:
    return CheckpointedOperator(
        uid=uid, name=uid.title(), parallelism=parallelism, max_parallelism=max_parallelism
    )


VERTICES = (
    CheckpointedVertex(vertex_id=SOURCE, name="Source", operators=(operator("source", 2),)),
    CheckpointedVertex(
        vertex_id=COUNT,
        name="Count",
        operators=(operator("count", 2),),
        inputs=(VertexInput(SOURCE),),
    ),
    CheckpointedVertex(
        vertex_id=SINK, name="Sink", operators=(operator("sink", 1),), inputs=(VertexInput(COUNT),)
    ),
)


def attempt(vertex_id: int, index: int, number: int = 0) -> ExecutionAttemptId:
    return ExecutionAttemptId("0" * 32, vertex_id, index, number)


def state(*names: str, uid: str = "count") -> SubtaskState:
    """State in the files with these names."""
    files = tuple(StateFile(name, 1, b"") for name in names)
    return SubtaskState((OperatorStateHandle(uid, KeyedStateHandle(CANONICAL, 128, 0, 63, files)),))


class Job:
    """Drives a coordinator; every method returns the instructions of its stimulus, without
    WakeAt, which is kept.
    """

    def __init__(
        self,
        *,
        first_id: int = 1,
        vertices: tuple[CheckpointedVertex, ...] = VERTICES,
        **options: object,
    ) -> None:
        self.coordinator = CheckpointCoordinator(
            CoordinatorOptions(**options),  # type: ignore[arg-type]
            vertices,
            flow="counts",
            job_id="0" * 32,
            first_id=first_id,
        )
        self.keys = [(v.vertex_id, index) for v in vertices for index in range(v.parallelism)]
        self.attempts = dict.fromkeys(self.keys, 0)
        self.s = 100.0
        self.wake_at_s: float | None = None

    @property
    def now(self) -> Moment:
        return Moment(self.s, 1_000_000 + round(self.s * 1000))

    def of(self, vertex_id: int, index: int) -> ExecutionAttemptId:
        return attempt(vertex_id, index, self.attempts[vertex_id, index])

    def heard(self, instructions: list[Instruction]) -> list[Instruction]:
        for instruction in instructions:
            if isinstance(instruction, WakeAt):
                self.wake_at_s = instruction.at_s
        return [i for i in instructions if not isinstance(i, WakeAt)]

    def run(self, keys: list[tuple[int, int]] | None = None) -> list[Instruction]:
        return [
            i
            for key in (self.keys if keys is None else keys)
            for i in self.heard(self.coordinator.task_running(self.of(*key), self.now))
        ]

    def advance(self, ms: int) -> list[Instruction]:
        """Time passes; the coordinator is called when it asked for it, and only then."""
        end = round(self.s + ms / 1000, 6)
        instructions: list[Instruction] = []
        while self.wake_at_s is not None and self.wake_at_s <= end + 1e-9:
            self.s = max(self.s, self.wake_at_s)
            before, self.wake_at_s = self.wake_at_s, None
            instructions += self.heard(self.coordinator.tick(self.now))
            if self.wake_at_s == before:
                raise AssertionError(
                    f"the coordinator wants to be woken at {before} again, and did nothing then"
                )
        self.s = end
        return instructions

    def ack(
        self,
        key: tuple[int, int],
        checkpoint_id: int,
        content: SubtaskState | None = None,
        **stats: int,
    ) -> list[Instruction]:
        content = SubtaskState() if content is None else content
        return self.heard(
            self.coordinator.acknowledge(
                self.of(*key), checkpoint_id, content, CheckpointStats(**stats), self.now
            )
        )

    def ack_all(self, checkpoint_id: int, *names: str) -> CompletedCheckpoint:
        """Every subtask acknowledges, the first count with the files of these names; what is to
        be stored comes back.
        """
        instructions: list[Instruction] = []
        for key in self.keys:
            instructions += self.ack(
                key, checkpoint_id, state(*names) if key == (COUNT, 0) else None
            )
        (store,) = instructions
        assert isinstance(store, Store)
        return store.checkpoint

    def stored(self, checkpoint_id: int) -> list[Instruction]:
        return self.heard(
            self.coordinator.stored(checkpoint_id, f"file:///{checkpoint_id}", self.now)
        )

    def complete(self, checkpoint_id: int, *names: str) -> list[Instruction]:
        self.ack_all(checkpoint_id, *names)
        return self.stored(checkpoint_id)

    def not_stored(self, checkpoint_id: int) -> list[Instruction]:
        return self.heard(
            self.coordinator.not_stored(checkpoint_id, OSError("no space left on device"), self.now)
        )

    def decline(
        self, key: tuple[int, int], checkpoint_id: int, reason: str, error: Exception | None = None
    ) -> list[Instruction]:
        error = error or ValueError("user code")
        return self.heard(
            self.coordinator.decline(self.of(*key), checkpoint_id, reason, self.now, error)
        )

    def lost(self, key: tuple[int, int]) -> list[Instruction]:
        return self.heard(self.coordinator.task_lost(self.of(*key), self.now))

    def finished(self, key: tuple[int, int]) -> list[Instruction]:
        return self.heard(self.coordinator.task_finished(self.of(*key), self.now))

    def at_end(self, *keys: tuple[int, int]) -> list[Instruction]:
        return [
            i
            for key in keys
            for i in self.heard(self.coordinator.end_of_data_reached(self.of(*key), self.now))
        ]

    def restart(self) -> list[Instruction]:
        """All tasks are lost, and run again with their next attempts."""
        instructions = self.heard(self.coordinator.restart(self.keys, self.now))
        for key in self.keys:
            self.attempts[key] += 1
        return instructions + self.run()

    def checkpoint(self, number: int) -> list[Instruction]:
        return self.heard(self.coordinator.request_checkpoint(number, self.now))

    def savepoint(self, number: int, directory: str = "file:///sp") -> list[Instruction]:
        return self.heard(self.coordinator.request_savepoint(number, directory, self.now))

    def stop(
        self, number: int, *, savepoint: bool = True, directory: str = "file:///sp"
    ) -> list[Instruction]:
        return self.heard(
            self.coordinator.request_stop(
                number, self.now, savepoint=savepoint, directory=directory
            )
        )

    def shutdown(self) -> list[Instruction]:
        return self.heard(self.coordinator.shutdown(self.now))


def only(kind: type[T], instructions: list[Instruction]) -> list[T]:
    return [i for i in instructions if isinstance(i, kind)]


def triggered(instructions: list[Instruction]) -> list[int]:
    """Ids of what was triggered."""
    return [trigger.barrier.checkpoint_id for trigger in only(Trigger, instructions)]


def answered(instructions: list[Instruction]) -> dict[int, str]:
    """Request -> what it was told: where the checkpoint is, or the error."""
    return {
        a.number: str(a.error) if a.checkpoint is None else a.checkpoint.location
        for a in only(Answer, instructions)
    }
