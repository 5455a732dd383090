"""Deploys the tasks of one job: gets slots for them, and submits each task to the process that has
its slot.

The SlotScheduler decides; this module carries out its decisions. Tasks that the JobMaster deploys
in one turn wait here until there are slots for all of them. Each descriptor then gets the locations
of its producers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.job_session import attempt_key
from aioflow.cluster.placed_tasks import SUBMITTER
from aioflow.cluster.rescaling import AdaptiveParallelism
from aioflow.cluster.scheduler import (
    DeclareRequirement,
    FreeSlot,
    Instruction,
    OfferAnswer,
    Placed,
    PlacementFailed,
    SlotScheduler,
    SubtasksLost,
)
from aioflow.core.contexts import asynccontextmanager
from aioflow.core.errors import Broken, GraphError, RescaleError

if TYPE_CHECKING:
    from aioflow.cluster.job_master import JobMaster
    from aioflow.cluster.placed_tasks import JobPeer, PlacedTasks
    from aioflow.cluster.scheduler import SlotOffer
    from aioflow.cluster.shipping import ShippedJob
    from aioflow.cluster.task_executor import TaskExecutor
    from aioflow.core.aio import OrderedTaskGroup
    from aioflow.core.host import Host
    from aioflow.graph.deployment import ExecutionAttemptId, TaskDeploymentDescriptor

__all__ = ["TaskDeployer"]

SUBMIT_S = 300.0
"""Maximum time for a process to answer a deployment.

A function may block the event loop of the process meanwhile; loading a large model takes minutes.
"""


class TaskDeployer:
    """The slots of one job, and the tasks that wait for them.

    `declare(slots)` tells the ResourceManager how many slots the job wants. `failed(attempt,
    error)` reports a task that cannot be deployed, or has lost its slot. `overdue(worker_id,
    attempt, why)` is called if a process does not answer the deployment of `attempt`.
    """

    def __init__(
        self,
        host: Host,
        job: ShippedJob,
        token: int,
        job_master: JobMaster,
        tasks: PlacedTasks,
        group: OrderedTaskGroup,
        declare: Callable[[int], None],
        failed: Callable[[ExecutionAttemptId, BaseException], None],
        overdue: Callable[[str, ExecutionAttemptId, str], None],
        *,
        can_grow: bool,
    ) -> None:
        """Makes a deployer. `can_grow` tells whether the job has checkpoints from which it can
        continue with more slots.
        """
        self._host = host
        self._shipped = job
        self._token = token
        self._job_master = job_master
        self._tasks = tasks
        self._group = group
        self._declare = declare
        self._failed = failed
        self._overdue = overdue
        self._job_id = job_master.executions.job_id
        self._scheduler = SlotScheduler(self._job_id, job.graph)
        self._rescales = 0
        """Number of rescalings of the job that the scheduler has been informed of."""
        self._adaptive = AdaptiveParallelism(
            job_master.executions,
            job_master.rescale,
            group,
            lambda: self._scheduler.slots_held,
            lambda message: tasks.taps.notify("warning", message),
            can_grow=can_grow,
        )
        self._waiting: list[TaskDeploymentDescriptor] = []
        """Tasks that were given to `deploy` in this turn of the loop."""
        self._requests: dict[int, list[TaskDeploymentDescriptor]] = {}
        """Tasks that wait for slots, by the number of the request."""
        self._reserved: asyncio.Future[None] | None = None
        """Future that is done once the slots of a rescaling are there. None if no rescaling is
        under way."""
        self._early_loss: Broken | None = None
        """The loss of a worker before the job asked for slots; None if there was none."""
        self._over = False

    @property
    def slots_missing(self) -> int:
        """Number of slots that the job waits for."""
        return self._scheduler.slots_missing

    def deploy(self, descriptor: TaskDeploymentDescriptor) -> None:
        """Deploys a task once there are slots for all tasks of this turn of the loop."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._request_slots)
        self._waiting.append(descriptor)

    def withdraw(self, attempt: ExecutionAttemptId) -> None:
        """Forgets a task that was cancelled while it waited for a slot."""
        for number, batch in list(self._requests.items()):
            batch[:] = [descriptor for descriptor in batch if descriptor.attempt != attempt]
            if not batch:
                del self._requests[number]
                self._carry_out(self._scheduler.withdraw(number))

    def finished(self, attempt: ExecutionAttemptId) -> None:
        """Gives back the slot of a finished task. If the region of the task restarts, the task
        requests a slot again.
        """
        if not self._over:
            subtask = attempt.vertex_id, attempt.subtask_index
            self._carry_out(self._scheduler.released([subtask]))

    def end(self) -> None:
        """Deploys nothing more: the job is over."""
        self._over = True
        self._adaptive.close()

    def release(self) -> None:
        """Gives all slots back, at the end of the job."""
        self._carry_out(self._scheduler.close())

    # Slots.

    def offered(self, worker_id: str, offers: Sequence[SlotOffer]) -> OfferAnswer:
        """Accepts the offered slots that the job needs. Returns which slots are accepted and
        rejected.
        """
        answer, *rest = self._scheduler.offered(worker_id, offers)
        assert isinstance(answer, OfferAnswer)
        self._carry_out(rest)
        if answer.accepted:
            self._adaptive.slots_came()
        return answer

    def slot_freed(self, worker_id: str, allocation_id: str) -> None:
        """Handles the loss of one slot."""
        if not self._over:
            self._carry_out(self._scheduler.slot_lost(worker_id, allocation_id))

    def worker_lost(self, worker_id: str, loss: Broken | None) -> None:
        """Handles the loss of a process with its slots. `loss` is the reason, given as the error of
        its tasks."""
        self._carry_out(self._scheduler.worker_lost(worker_id), loss)

    def rescaled(self) -> None:
        """Notes that the user has chosen the present parallelism of the job."""
        self._adaptive.choose()
        if not self._over:
            self._carry_out(self._scheduler.reserve(0))

    @asynccontextmanager
    async def slots_reserved(
        self, slots: int, leaving: frozenset[str] = frozenset()
    ) -> AsyncIterator[None]:
        """Reserves `slots` slots for the rescaling inside the block, on workers that are not in
        `leaving`.

        The new tasks run in these slots. Raises RescaleError if there are not enough slots.
        """
        self._reserved = asyncio.get_running_loop().create_future()
        try:
            self._carry_out(self._scheduler.reserve(slots, leaving))
            await self._reserved
            yield
        finally:
            self._reserved = None
            if not self._over:
                self._carry_out(self._scheduler.reserve(self._adaptive.slots_wanted))

    def no_resources(self, available: int, existing: int) -> bool:
        """Handles a shortage of slots: the job can get only `available` slots. Returns whether to
        log a warning.

        A job whose tasks all wait begins at a lower parallelism that fits its slots. If its slots
        suffice for no parallelism, it waits in line, provided that `existing`, the number of all
        slots of the cluster, would suffice.
        """
        waits = bool(self._requests) or self._reserved is not None
        self._refuse_slots(
            f"{self._scheduler.slots_declared} slots are needed, and there are {available} for it; "
            "start more workers, give them more slots, or ask for a lower parallelism"
        )
        smaller = self._adaptive.shrink() if self._requests else None
        if smaller is None:
            if self._requests and self._adaptive.waits_in_line(existing):
                self._carry_out(self._scheduler.wait_in_line())
                return False
            self._carry_out(self._scheduler.no_resources(available))
        else:
            # The slots stay here, although their tasks, which never ran, are cancelled.
            self._carry_out(self._scheduler.reserve(self._scheduler.slots_held))
            self._job_master.adapt(smaller)
        return waits

    def _refuse_slots(self, why: str) -> None:
        """Fails a rescaling that waits for slots, with the reason `why`."""
        if self._reserved is not None and not self._reserved.done():
            name = self._job_master.executions.graph.name
            self._reserved.set_exception(RescaleError(f"job {name!r} goes on as it was: {why}"))

    def start_failed(self, loss: Broken) -> None:
        """Handles the loss of a worker of this job alone before tasks were deployed to it.

        The tasks that wait for slots fail, so that the restart policy decides. If the job has not
        asked for slots yet, its tasks fail when it asks, with the first loss as their error.
        """
        asks_soon = bool(self._waiting) or self._job_master.status is JobStatus.CREATED
        if not self._requests and asks_soon:
            self._early_loss = self._early_loss or loss
            return
        self._early_loss = None
        self._refuse_slots(f"{loss}")
        self.fail_waiting(loss)

    def fail_waiting(self, failure: BaseException) -> None:
        """Fails the tasks that wait for slots."""
        for number, batch in list(self._requests.items()):
            del self._requests[number]
            for descriptor in batch:
                self._failed(descriptor.attempt, failure)
            self._carry_out(self._scheduler.withdraw(number))

    # Deployment.

    def _request_slots(self) -> None:
        batch, self._waiting = self._waiting, []
        batch = [
            descriptor
            for descriptor in batch
            if self._job_master.executions.awaits_deployment(descriptor.attempt)
        ]
        if not batch or self._over:
            return
        roaming = [_subtask(descriptor) for descriptor in batch if not descriptor.vertex.stays_here]
        executions = self._job_master.executions
        if self._rescales != executions.rescales:
            self._rescales = executions.rescales
            self._carry_out(self._scheduler.rescaled(executions.next_graph))
        if not roaming:
            self._deploy(batch, {})
            return
        number, instructions = self._scheduler.request(roaming)
        self._requests[number] = batch
        self._carry_out(instructions)
        if self._reserved is None:
            self._carry_out(self._scheduler.reserve(self._adaptive.slots_wanted))
        if self._early_loss is not None and number in self._requests:
            self.start_failed(self._early_loss)
            return
        for descriptor in self._requests.get(number, ()):
            self._job_master.slot_is_there(descriptor.attempt, False)

    def _carry_out(self, instructions: Sequence[Instruction], loss: Broken | None = None) -> None:
        """Carries out `instructions` of the scheduler. `loss` is the error of the subtasks that
        they report as lost.
        """
        for instruction in instructions:
            match instruction:
                case DeclareRequirement(_, slots):
                    self._declare(slots)
                case Placed(number, slots):
                    batch = self._requests.pop(number, None)
                    if batch is not None:
                        self._deploy(batch, slots)
                case PlacementFailed(number, _, error):
                    for descriptor in self._requests.pop(number, []):
                        self._failed(descriptor.attempt, error)
                case FreeSlot(worker_id, allocation_id):
                    self._tasks.peers.ask(
                        worker_id,
                        "free_slot",
                        allocation_id,
                        self._token,
                        f"job {self._job_id} needs it no more",
                    )
                case SubtasksLost(worker_id, subtasks):
                    lost = loss or Broken(
                        f"a slot of taskmanager {worker_id} is gone, and the tasks in it with it"
                    )
                    for subtask in subtasks:
                        execution = self._job_master.executions.executions.get(subtask)
                        if execution is None:
                            continue  # It is not deployed yet, because the job is being rescaled.
                        if execution.attempt in self._tasks.placed:
                            self._failed(execution.attempt, lost)
                case OfferAnswer():
                    pass  # `offered` returns it to the TaskManager.
        reserved = self._reserved
        if reserved is not None and not reserved.done() and self._scheduler.is_reserved:
            reserved.set_result(None)

    def _deploy(self, batch: list[TaskDeploymentDescriptor], slots: Any) -> None:
        executions = self._job_master.executions
        for descriptor in batch:
            worker_id = (
                SUBMITTER if descriptor.vertex.stays_here else slots[_subtask(descriptor)][0]
            )
            if self._tasks.here is not None and worker_id == SUBMITTER:
                location = self._tasks.here.location
            else:
                location = self._tasks.peers.location_of(worker_id)
            executions.locations[_subtask(descriptor)] = location
        located = [executions.located(descriptor) for descriptor in batch]
        _ = self._group.create_task(self._submit_all(located, slots), name="deploy tasks")

    async def _submit_all(self, batch: list[TaskDeploymentDescriptor], slots: Any) -> None:
        """Submits tasks. A task that is cancelled before its submission counts as waiting, and
        never runs.
        """
        here = self._tasks.here
        leaving = [one for one in batch if here is None or not one.vertex.stays_here]
        # In a thread: state and splits may be large.
        contents = await self._host.blocking(self._shipped.ship_tasks, leaving)
        for descriptor in batch:
            attempt = descriptor.attempt
            if not self._job_master.executions.awaits_deployment(attempt):
                continue
            self._job_master.slot_is_there(attempt, True)
            stays_here = descriptor.vertex.stays_here
            place = (SUBMITTER, "") if stays_here else slots[_subtask(descriptor)]
            worker_id, allocation_id = place
            self._tasks.placed[attempt] = worker_id
            if here is not None and stays_here:
                self._submit_here(descriptor, here)
            else:
                self._submit(attempt, worker_id, allocation_id, contents[attempt])

    def _submit_here(self, descriptor: TaskDeploymentDescriptor, executor: TaskExecutor) -> None:
        try:
            executor.submit_task(descriptor, self._job_master.fencing_token)
        # A task that cannot be deployed has failed, like any other.
        except Exception as error:  # noqa: BLE001
            self._failed(descriptor.attempt, error)

    def _submit(
        self,
        attempt: ExecutionAttemptId,
        worker_id: str,
        allocation_id: str,
        content: bytes | GraphError,
    ) -> None:
        peer = self._tasks.peers.get(worker_id)
        try:
            if isinstance(content, GraphError):
                raise content
            if peer is None:
                raise Broken(f"the process that should run {attempt} is gone")
            # Called now, awaited later, so that an immediate cancellation cannot overtake it.
            answer = peer.connection.call(
                "submit_task",
                self._job_id,
                self._token,
                attempt_key(attempt),
                allocation_id,
                content,
            )
        # A task that cannot be deployed has failed, like any other.
        except Exception as error:  # noqa: BLE001
            self._not_submitted(attempt, error, peer)
            return
        _ = self._group.create_task(
            self._submitted(attempt, worker_id, answer, peer), name=f"submit {attempt}"
        )

    async def _submitted(
        self,
        attempt: ExecutionAttemptId,
        worker_id: str,
        answer: Coroutine[Any, Any, Any],
        peer: JobPeer,
    ) -> None:
        try:
            async with asyncio.timeout(SUBMIT_S) as deadline:
                await answer
        except Exception as error:  # noqa: BLE001  # As above.
            if not deadline.expired():
                self._not_submitted(attempt, error, peer)
            elif self._tasks.placed.get(attempt) == worker_id:
                why = f"was submitted {SUBMIT_S:g} s ago, and its process does not answer"
                self._overdue(worker_id, attempt, f"{why}: a function holds its event loop")

    def _not_submitted(
        self, attempt: ExecutionAttemptId, error: Exception, peer: JobPeer | None
    ) -> None:
        if self._tasks.here is not None and peer is not None and not peer.connection.is_open:
            return  # The worker is lost: `worker_lost` reports why.
        self._failed(attempt, error)


def _subtask(descriptor: TaskDeploymentDescriptor) -> tuple[int, int]:
    return descriptor.attempt.vertex_id, descriptor.attempt.subtask_index
