"""A job with too few slots runs at the parallelism that they allow, and at more when more come.

    waits for slots --request timeout over, some are there--> runs at less, still wants all
    waits for slots --request timeout over, other jobs have them--> waits in line
    runs at less --more have come, and none for `SETTLE_S`--> is rescaled to what they allow

The first step restarts nothing that runs: its tasks still wait. The second one needs checkpoints; a
job without them stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from aioflow.cluster.scheduler import slots_needed
from aioflow.core.errors import AioflowError
from aioflow.graph.deployment import ExecutionState
from aioflow.graph.job_graph import same_parallelism, with_parallelism

if TYPE_CHECKING:
    from aioflow.cluster.job_master import JobMaster
    from aioflow.core.aio import OrderedTaskGroup
    from aioflow.graph.job_graph import JobGraph

__all__ = ["SETTLE_S", "AdaptiveParallelism", "fitting"]

logger = logging.getLogger(__name__)

SETTLE_S = 10.0
"""Time without a further slot after which a job is rescaled to the slots that are there.

Workers that start together then cost one rescaling.
"""

_STARTED = (ExecutionState.INITIALIZING, ExecutionState.RUNNING, ExecutionState.CANCELING)


def fitting(graph: JobGraph, slots: int) -> JobGraph | None:
    """Returns `graph` at the largest parallelism that `slots` allow; None if they are too few for
    any."""
    roaming = {v.id: v.parallelism for v in graph.vertices if not v.stays_here}
    for width in range(max(roaming.values(), default=1), 0, -1):
        smaller = with_parallelism(graph, {id_: min(n, width) for id_, n in roaming.items()})
        if slots_needed(smaller) <= slots:
            return smaller
    return None


class AdaptiveParallelism:
    """The parallelism of one job whose slots may be too few.

    `slots()` returns how many the job has. `can_grow`: whether it has checkpoints.
    """

    def __init__(
        self,
        job_master: JobMaster,
        group: OrderedTaskGroup,
        slots: Callable[[], int],
        warn_submitter: Callable[[str], None],
        *,
        can_grow: bool,
    ) -> None:
        self._job_master = job_master
        self._group = group
        self._slots = slots
        self._warn_submitter = warn_submitter
        self._can_grow = can_grow
        self._wanted: JobGraph | None = None
        """The job as it should be, while it runs at less."""
        self._timer: asyncio.TimerHandle | None = None
        self._in_line = False
        """Whether the log says that the job waits for slots of other jobs."""

    @property
    def slots_wanted(self) -> int:
        """Number of slots that the job asks for beyond those of its tasks; 0 if it has all."""
        return slots_needed(self._wanted) if self._wanted is not None and self._can_grow else 0

    def choose(self) -> None:
        """Forgets the wanted graph, because the user gave the job another parallelism."""
        self._wanted = None
        self._stop_timer()

    def shrink(self) -> JobGraph | None:
        """Returns the graph that fits the present slots if all tasks wait for slots, else None."""
        executions, slots = self._job_master.executions, self._slots()
        if any(execution.state in _STARTED for execution in executions.executions.values()):
            return None
        wanted = self._wanted or executions.next_graph
        smaller = fitting(wanted, slots)
        if smaller is None or same_parallelism(smaller, executions.next_graph):
            return None
        self._wanted = wanted
        logger.warning(
            "job %s needs %d slots and has got %d in time: it runs with fewer subtasks, %s",
            executions.job_id,
            slots_needed(wanted),
            slots,
            "and with more once there are slots for them"
            if self._can_grow
            else "for good, because it has no checkpoints to go on from with more",
        )
        return smaller

    def waits_in_line(self, existing: int) -> bool:
        """Returns whether all slots would suffice, at any parallelism. Logs the first yes."""
        executions = self._job_master.executions
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
        """Waits until no more slots come, then lets the job use them."""
        self._in_line = False
        if self._wanted is not None and self._can_grow:
            self._stop_timer()
            self._timer = asyncio.get_running_loop().call_later(SETTLE_S, self._settled)

    def close(self) -> None:
        """Ends the wait, at the end of the job."""
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _settled(self) -> None:
        self._timer = None
        if self._wanted is not None and not self._job_master.status.is_terminal:
            _ = self._group.create_task(self._grow(self._wanted), name="use more slots")

    async def _grow(self, wanted: JobGraph) -> None:
        larger = fitting(wanted, self._slots())
        if larger is None:
            return
        try:
            await self._job_master.rescale(larger)
        except AioflowError as error:
            logger.info("job %s: %s", self._job_master.executions.job_id, error)
            self.slots_came()  # Tries again after a while.
            return
        if self._wanted is wanted and same_parallelism(larger, wanted):
            self._wanted = None
