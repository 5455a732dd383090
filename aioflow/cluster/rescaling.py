"""Rescales a running job: on request, or because it has too few slots.

A rescaling stops the job at a checkpoint, and goes on from there at another parallelism:

    1  slots and worker processes for the new parallelism are made ready
    2  a checkpoint while the job goes on, so that the next one has little to write
    3  a checkpoint that holds every task: sources pause at their barrier
    4  the tasks end, and those of the new graph start from that checkpoint

Nothing is processed after the barriers of step 3, so no result comes twice, even in a sink that
commits nothing. If a checkpoint fails, the tasks go on as before. If a task fails meanwhile, the
job restarts as always, and the rescaling is tried again. If the job waits for a restart anyway,
that restart uses the new parallelism. If the network memory does not suffice for the new tasks, the
former ones start again from the same checkpoint.

With too few slots a job runs at a lower parallelism that they allow, and at a higher one when more
slots come:

    waits for slots --request timeout over, some are there--> runs at less, still wants all
    waits for slots --request timeout over, other jobs have them--> waits in line
    runs at less --more have come, and none for `SETTLE_S`--> is rescaled to what they allow

The first of these steps interrupts no running task, because all tasks still wait. The last step
needs checkpoints; a job without checkpoints keeps its lower parallelism.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING

from aioflow.cluster.execution_graph import ExecutionGraph, Instruction, JobStatus
from aioflow.cluster.scheduler import slots_needed
from aioflow.core.errors import AioflowError, CheckpointError, JobNotRunning, RescaleError, counted
from aioflow.graph.deployment import ExecutionState
from aioflow.graph.job_graph import same_parallelism, with_parallelism

if TYPE_CHECKING:
    from aioflow.cluster.execution_graph import ExecutionGraph
    from aioflow.cluster.job_checkpoints import JobCheckpoints
    from aioflow.core.aio import OrderedTaskGroup
    from aioflow.graph.job_graph import JobGraph

__all__ = ["SETTLE_S", "AdaptiveParallelism", "Rescaling", "fitting"]

logger = logging.getLogger(__name__)

TRIES = 10
"""Maximum number of times that a rescaling begins again after a restart of the job."""


class Rescaling:
    """The rescaling of one job, at most one at a time.

    `carry_out(instructions)` is a method of the JobMaster. The JobMaster calls `changed` whenever
    it carries out instructions.
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
        """Rescales as `run` does, but returns the error of `run` instead of raising it; None after
        a success.

        The job runs this method in its task group, where raising an error would end the job.
        """
        try:
            await self.run(graph, resources)
        except Exception as error:  # noqa: BLE001  # Raised where the rescaling was asked for.
            return error
        return None

    async def run(
        self, graph: JobGraph, resources: AbstractAsyncContextManager[None] | None = None
    ) -> None:
        """Rescales the job to `graph`, and returns once every task of `graph` runs.

        The context manager `resources` is entered before step 2, and left when all new tasks run.
        Without `resources`, a job that has this parallelism already stays as it is. Raises
        RescaleError if the job goes on as it was, and JobNotRunning if it has ended.
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
        """Raises RescaleError if an unfinished source function cannot continue at a position. After
        the rescaling it would be called again, and repeat its elements from the beginning.
        """
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
        """Pauses all tasks with a checkpoint, and returns once the checkpoint contains all their
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
        """Returns the error for a job that cannot be rescaled because of its `status`."""
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


SETTLE_S = 10.0
"""A job with too few slots is rescaled when no further slot has arrived for this time in s.

So workers that start together cause only one rescaling.
"""

_STARTED = (ExecutionState.INITIALIZING, ExecutionState.RUNNING, ExecutionState.CANCELING)


def fitting(graph: JobGraph, slots: int) -> JobGraph | None:
    """Returns `graph` at the largest parallelism for which `slots` slots suffice; None if they
    suffice for none."""
    roaming = {v.id: v.parallelism for v in graph.vertices if not v.stays_here}
    for width in range(max(roaming.values(), default=1), 0, -1):
        smaller = with_parallelism(graph, {id_: min(n, width) for id_, n in roaming.items()})
        if slots_needed(smaller) <= slots:
            return smaller
    return None


class AdaptiveParallelism:
    """The parallelism of one job whose slots may be too few.

    `rescale(graph)` is a method of the JobMaster. `slots()` returns how many slots the job has.
    `can_grow` tells whether the job has checkpoints from which it can continue with more slots.
    """

    def __init__(
        self,
        executions: ExecutionGraph,
        rescale: Callable[[JobGraph], Awaitable[None]],
        group: OrderedTaskGroup,
        slots: Callable[[], int],
        warn_submitter: Callable[[str], None],
        *,
        can_grow: bool,
    ) -> None:
        self._executions = executions
        self._rescale = rescale
        self._group = group
        self._slots = slots
        self._warn_submitter = warn_submitter
        self._can_grow = can_grow
        self._wanted: JobGraph | None = None
        """The graph at the wanted parallelism, while the job runs at a lower one; otherwise None.
        """
        self._timer: asyncio.TimerHandle | None = None
        self._in_line = False
        """Whether the log already says that the job waits for slots of other jobs."""

    @property
    def slots_wanted(self) -> int:
        """Number of slots that the wanted parallelism needs; 0 if the job runs at this parallelism,
        or cannot grow."""
        return slots_needed(self._wanted) if self._wanted is not None and self._can_grow else 0

    def choose(self) -> None:
        """Forgets the wanted graph, because the user gave the job another parallelism."""
        self._wanted = None
        self._stop_timer()

    def shrink(self) -> JobGraph | None:
        """Returns the graph at a lower parallelism that fits the present slots. Returns None if
        there is none, or if tasks have started."""
        executions, slots = self._executions, self._slots()
        if any(execution.state in _STARTED for execution in executions.executions.values()):
            return None
        wanted = self._wanted or executions.next_graph
        smaller = fitting(wanted, slots)
        if smaller is None or same_parallelism(smaller, executions.next_graph):
            return None
        self._wanted = wanted
        logger.warning(
            "job %s needs %s and has got %d in time: it runs with fewer subtasks, %s",
            executions.job_id,
            counted(slots_needed(wanted), "slot"),
            slots,
            "and with more once there are slots for them"
            if self._can_grow
            else "for good, because it has no checkpoints to go on from with more",
        )
        return smaller

    def waits_in_line(self, existing: int) -> bool:
        """Returns whether `existing`, the number of all slots, would suffice for the job at any
        parallelism. Logs a warning when the job begins to wait in line.
        """
        executions = self._executions
        if fitting(executions.next_graph, existing) is None:
            return False
        if not self._in_line:
            self._in_line = True
            message = (
                f"job {executions.job_id} waits in line: other jobs have the slots that it needs"
            )
            logger.warning("%s", message)
            self._warn_submitter(message)
        return True

    def slots_came(self) -> None:
        """Rescales a job that runs with too few slots, so that it uses all slots that it has now.
        First waits until no further slots have come for `SETTLE_S`.
        """
        self._in_line = False
        if self._wanted is not None and self._can_grow:
            self._stop_timer()
            self._timer = asyncio.get_running_loop().call_later(SETTLE_S, self._settled)

    def close(self) -> None:
        """Ends the wait for further slots, at the end of the job."""
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _settled(self) -> None:
        self._timer = None
        if self._wanted is not None and not self._executions.status.is_terminal:
            _ = self._group.create_task(self._grow(self._wanted), name="use more slots")

    async def _grow(self, wanted: JobGraph) -> None:
        larger = fitting(wanted, self._slots())
        if larger is None:
            return
        try:
            await self._rescale(larger)
        except AioflowError as error:
            logger.info("job %s: %s", self._executions.job_id, error)
            self.slots_came()  # Tries again after a while.
            return
        if self._wanted is wanted and same_parallelism(larger, wanted):
            self._wanted = None
