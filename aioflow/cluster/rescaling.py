"""Rescales a running job: stops it at a checkpoint, and goes on from there at another parallelism.

    1  slots and worker processes for the new parallelism are made ready
    2  a checkpoint while the job goes on, so that the next one has little to write
    3  a checkpoint that holds every task: sources pause at their barrier
    4  the tasks end, and those of the new graph start from that checkpoint

Nothing is processed after the barriers of step 3, so no result comes twice, even in a sink that
commits nothing. If a checkpoint fails, the tasks go on as before. If a task fails meanwhile, the
job restarts as always, and the rescaling is tried again. If the job waits for a restart anyway,
that restart has the new parallelism. If the network memory does not suffice for the new tasks, the
former ones start again from the same checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING

from aioflow.cluster.execution_graph import ExecutionGraph, Instruction, JobStatus
from aioflow.core.errors import CheckpointError, JobNotRunning, RescaleError
from aioflow.graph.deployment import ExecutionState
from aioflow.graph.job_graph import same_parallelism

if TYPE_CHECKING:
    from aioflow.cluster.job_checkpoints import JobCheckpoints
    from aioflow.graph.job_graph import JobGraph

__all__ = ["Rescaling"]

logger = logging.getLogger(__name__)

TRIES = 10
"""Number of times that a rescaling begins again after a restart of the job."""


class Rescaling:
    """The rescaling of one job, at most one at a time.

    `carry_out(instructions)` is that of the JobMaster, which calls `changed` after each of its own.
    """

    def __init__(
        self,
        executions: ExecutionGraph,
        checkpoints: JobCheckpoints | None,
        carry_out: Callable[[list[Instruction]], None],
    ) -> None:
        self._executions = executions
        self._checkpoints = checkpoints
        self._carry_out = carry_out
        self._under_way = False
        self._waits: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def changed(self) -> None:
        """Wakes the rescaling if the job has reached the state that it waits for."""
        for condition, future in self._waits:
            if not future.done() and (self._executions.status.is_terminal or condition()):
                future.set_result(None)

    async def outcome(
        self, graph: JobGraph, resources: AbstractAsyncContextManager[None] | None
    ) -> Exception | None:
        """Does `run`, and returns its error: the group of the job would end the job for it."""
        try:
            await self.run(graph, resources)
        except Exception as error:  # noqa: BLE001  # Raised where the rescaling was asked for.
            return error
        return None

    async def run(
        self, graph: JobGraph, resources: AbstractAsyncContextManager[None] | None = None
    ) -> None:
        """Returns once every task of `graph` runs.

        `resources` is entered before the job is held, and left after. Without it a job of that
        parallelism stays as it is. Raises RescaleError or JobNotRunning if the job goes on as it
        was, or has ended.
        """
        checkpoints = self.check()
        if resources is None and same_parallelism(graph, self._executions.graph):
            return
        self._under_way = True
        try:
            async with resources or nullcontext():
                await self._hold(checkpoints)
                logger.info("job %s is rescaled: %s", self._executions.job_id, self._changes(graph))
                self._carry_out(self._executions.rescale(graph))
                await self._until(self._is_done)
                self._refuse_ended()
                self._executions.rescaled()
        finally:
            self._under_way = False
        # The new processes stay, because the tasks of the former parallelism run there.
        if (refusal := self._executions.refusal) is not None:
            raise RescaleError(
                f"job {self._executions.graph.name!r} goes on as it was: {refusal}"
            ) from refusal

    def check(self) -> JobCheckpoints:
        """Returns the checkpoints of the job. Raises the errors that `run` would raise at once."""
        name = self._executions.graph.name
        self._refuse_ended()
        if self._under_way:
            raise RescaleError(f"job {name!r} is being rescaled already: wait for that one")
        if self._checkpoints is None:
            raise RescaleError(
                f"job {name!r} has no checkpoints, so it cannot go on at another parallelism: run "
                'it with checkpoints=URL; "memory://NAME" keeps them in this process'
            )
        self._refuse_lossy_sources()
        return self._checkpoints

    def _refuse_lossy_sources(self) -> None:
        """Refuses a job whose source function would be called again from its beginning."""
        executions = self._executions
        for vertex in executions.graph.vertices:
            source = vertex.head.source
            execution = executions.executions[vertex.id, 0]
            if source and not source.replayable and execution.state is not ExecutionState.FINISHED:
                raise RescaleError(
                    f"job {executions.graph.name!r} goes on as it was: source function "
                    f"{vertex.head.name!r} would be called again from its beginning; let it take "
                    "one parameter `position` and yield (value, position)"
                )

    def _changes(self, graph: JobGraph) -> str:
        pairs = zip(self._executions.graph.vertices, graph.vertices, strict=True)
        changed = [
            f"{new.name!r} {old.parallelism} -> {new.parallelism}"
            for old, new in pairs
            if old.parallelism != new.parallelism
        ]
        return ", ".join(changed) or "other workers"

    async def _hold(self, checkpoints: JobCheckpoints) -> None:
        """Returns once no task processes anything more, and a checkpoint contains all their
        work."""
        for tries_left in reversed(range(TRIES)):
            if self._executions.is_down:
                return
            await self._until(lambda: self._executions.runs and self._executions.all_have_run)
            self._refuse_ended()
            restarts = self._executions.restarts
            try:
                await checkpoints.checkpoint()
                await checkpoints.hold()
                return
            except CheckpointError as error:
                self._refuse_ended()
                if checkpoints.is_ending:
                    raise self.ended("about to end: it has processed all of its data") from error
                if not tries_left or self._executions.restarts == restarts:
                    raise RescaleError(
                        f"job {self._executions.graph.name!r} goes on as it was: {error}"
                    ) from error

    def _is_done(self) -> bool:
        return not self._executions.is_rescaling and self._executions.all_have_run

    def _refuse_ended(self) -> None:
        if self._executions.status not in (JobStatus.RUNNING, JobStatus.RESTARTING):
            raise self.ended()

    def ended(self, status: str = "") -> JobNotRunning:
        """Returns the error of a job that cannot be rescaled because of its `status`."""
        executions = self._executions
        return JobNotRunning(
            f"job {executions.graph.name!r} ({executions.job_id}) is "
            f"{status or executions.status.value}, only a job that runs can be rescaled"
        )

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Waits until `condition()` holds, or the job has ended."""
        if self._executions.status.is_terminal or condition():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        wait = condition, future
        self._waits.append(wait)
        try:
            await future
        finally:
            self._waits.remove(wait)
