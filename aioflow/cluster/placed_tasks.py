"""The tasks of one job on a cluster, by the process that runs each.

A task runs in a TaskManager, in the process that submitted the job, or here. If the job runs inside
its own program, tasks that stay in the program are reached by direct calls.

A healthy process watches the end of its own cancelled tasks (`task/ending.py`). This module
watches the processes: if a function blocks the event loop of a process, the cancellation never
arrives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle

from aioflow.cluster.job_peers import SUBMITTER, JobPeers, JobTaps, Submitter
from aioflow.cluster.job_session import AttemptKey, attempt_key
from aioflow.cluster.split_discovery import pack_splits
from aioflow.core.aio import OrderedTaskGroup, cancel_and_wait, wait_all
from aioflow.core.errors import Broken, JobNotRunning
from aioflow.graph.deployment import ExecutionAttemptId, TaskDeploymentDescriptor
from aioflow.task.closing import CLEANUP_TIMEOUT_S

if TYPE_CHECKING:
    from aioflow.cluster.gateways import OnMissed
    from aioflow.cluster.task_executor import TaskExecutor
    from aioflow.core.elements import CheckpointBarrier, RecordBatch
    from aioflow.core.scope import TapPlace
    from aioflow.core.wire.serializers import Codec
    from aioflow.operators.source import Split

__all__ = ["GRACE_S", "PlacedTasks", "until_overdue"]

logger = logging.getLogger(__name__)


class PlacedTasks:
    """The `TaskExecutorGateway` of a JobMaster.

    `submit(descriptor)` deploys a task later, and `cancel_waiting(attempt)` cancels one that waits.
    `overdue(worker_id, attempt, why)` is called for a cancelled task that does not end.
    """

    def __init__(
        self,
        job_id: str,
        codec: Codec,
        submitter: Submitter | None,
        group: OrderedTaskGroup,
        cancellation_timeout_s: float,
        submit: Callable[[TaskDeploymentDescriptor], None],
        cancel_waiting: Callable[[ExecutionAttemptId], None],
        overdue: Callable[[str, ExecutionAttemptId, str], None],
    ) -> None:
        self._job_id = job_id
        self._codec = codec
        self._group = group
        self._cancellation_timeout_s = cancellation_timeout_s
        self._submit = submit
        self._cancel_waiting = cancel_waiting
        self._overdue = overdue
        self.peers = JobPeers()
        if submitter is not None:
            self.peers.joined(SUBMITTER, submitter.connection, submitter.location)
        self.taps = JobTaps(job_id, self.peers, codec, submitter)
        self.here: TaskExecutor | None = None
        """Runs the tasks that stay in the program, if the job runs inside of it."""
        self.placed: dict[ExecutionAttemptId, str] = {}
        """Where each attempt that has not ended runs."""

    def submit_task(self, descriptor: TaskDeploymentDescriptor, fencing_token: str) -> None:
        self._submit(descriptor)

    def cancel_task(self, attempt: ExecutionAttemptId) -> None:
        worker_id = self.placed.get(attempt)
        if worker_id is None:
            self._cancel_waiting(attempt)
        elif worker_id == SUBMITTER and self.here is not None:
            self.here.cancel_task(attempt)
        else:
            answers = self.peers.ask(worker_id, "cancel_task", attempt_key(attempt))
            _ = self._group.create_task(
                self._watch(worker_id, attempt, answers), name=f"cancel {attempt}"
            )

    async def _watch(
        self, worker_id: str, attempt: ExecutionAttemptId, answers: Sequence[asyncio.Future[None]]
    ) -> None:
        why = await until_overdue(answers, self._cancellation_timeout_s)
        if self.placed.get(attempt) == worker_id:
            self._overdue(worker_id, attempt, why)

    def stop_sources(self, job_id: str, *, drain: bool) -> None:
        if self.here is not None:
            self.here.stop_sources(job_id, drain=drain)
        self.peers.ask_all("stop_sources", job_id, drain)

    def limit_source(self, attempt: ExecutionAttemptId, watermark: int) -> None:
        worker_id = self.placed.get(attempt)
        if worker_id == SUBMITTER and self.here is not None:
            self.here.limit_source(attempt, watermark)
        elif worker_id is not None:
            self.peers.ask(worker_id, "limit_source", attempt_key(attempt), watermark)

    def trigger_checkpoint(self, attempt: ExecutionAttemptId, barrier: CheckpointBarrier) -> None:
        worker_id = self.placed.get(attempt)
        if worker_id == SUBMITTER and self.here is not None:
            self.here.trigger_checkpoint(attempt, barrier)
        elif worker_id is not None:
            self.peers.ask(worker_id, "trigger_checkpoint", attempt_key(attempt), barrier)

    def notify_checkpoint_complete(self, job_id: str, checkpoint_id: int) -> None:
        if self.here is not None:
            self.here.notify_checkpoint_complete(job_id, checkpoint_id)
        self.peers.ask_all("notify_checkpoint_complete", job_id, checkpoint_id)

    def notify_checkpoint_aborted(
        self, job_id: str, checkpoint_id: int, latest_completed: int | None
    ) -> None:
        if self.here is not None:
            self.here.notify_checkpoint_aborted(job_id, checkpoint_id, latest_completed)
        self.peers.ask_all("notify_checkpoint_aborted", job_id, checkpoint_id, latest_completed)

    def add_tap(
        self,
        job_id: str,
        place: TapPlace,
        tap: Callable[[RecordBatch], None],
        on_missed: OnMissed | None = None,
    ) -> Sequence[asyncio.Future[None]]:
        """Adds a tap for a watcher in this process.

        In the JobManager of a cluster it may always miss records. Taps of the submitter have
        numbers of their own: see `add_remote_tap`.
        """
        may_miss = on_missed is not None or self.here is None
        if self.here is not None:
            self.here.add_tap(job_id, place, tap)
        return self.taps.watch(place, tap, on_missed, may_miss=may_miss)

    def remove_tap(self, job_id: str, place: TapPlace, tap: Callable[[RecordBatch], None]) -> None:
        """Removes a tap that `add_tap` added."""
        if self.here is not None:
            self.here.remove_tap(job_id, place, tap)
        self.taps.unwatch(place, tap)

    async def query_state(
        self, attempt: ExecutionAttemptId, node_id: int, query: Callable[[Any], Any]
    ) -> Any:
        if self.here is not None and self.placed.get(attempt) == SUBMITTER:
            return await self.here.query_state(attempt, node_id, query)
        try:
            content = await self.query_remote_state(
                attempt_key(attempt), node_id, cloudpickle.dumps(query)
            )
        except Broken as error:
            raise JobNotRunning(
                f"the process that ran {attempt} is gone, its state cannot be read now; try again "
                "once the job runs"
            ) from error
        return self._codec.decode(content)

    async def add_splits(self, attempt: ExecutionAttemptId, splits: Sequence[Split]) -> None:
        worker_id = self.placed.get(attempt)
        if self.here is not None and worker_id == SUBMITTER:
            await self.here.add_splits(attempt, splits)
            return
        peer = self.peers.get(worker_id)
        if peer is None:
            raise JobNotRunning(f"attempt {attempt} runs nowhere now, it takes no splits")
        await peer.connection.call(
            "add_splits", attempt_key(attempt), pack_splits(splits, self._codec)
        )

    async def query_remote_state(self, key: AttemptKey, node_id: int, query: bytes) -> bytes:
        worker_id = self.placed.get(ExecutionAttemptId(*key))
        peer = self.peers.get(worker_id)
        if peer is None:
            raise JobNotRunning(
                f"attempt {ExecutionAttemptId(*key)} runs nowhere now; try again once the job runs"
            )
        return bytes(await peer.connection.call("query_state", key, node_id, query))

    async def close_sessions(self, timeout_s: float) -> None:
        """Closes the resources of a finished job in the TaskManagers, and raises their errors."""
        closings = [
            asyncio.get_running_loop().create_task(
                peer.connection.call("close_job", self._job_id), name="close job"
            )
            for peer in self.peers.all()
            if peer.connection.is_open
        ]
        try:
            if not await wait_all(closings, timeout_s=timeout_s):
                logger.warning(
                    "closing the resources of the job took longer than %.1f s", timeout_s
                )
        finally:
            errors = await cancel_and_wait(closings)
        for error in errors:
            if not isinstance(error, Broken):
                raise error


GRACE_S = 5.0
"""Extra time for messages in transit, beyond the timeout of the process."""


async def until_overdue(answers: Sequence[asyncio.Future[Any]], timeout_s: float) -> str:
    """Waits until a task is overdue and returns the reason.

    `answers`: done when its process has received the cancellation.
    """
    if not await wait_all(answers, timeout_s=timeout_s):
        return (
            f"was cancelled {timeout_s:g} s ago, and its process does not answer: a function "
            "holds its event loop"
        )
    longest = (
        2 * timeout_s + CLEANUP_TIMEOUT_S + GRACE_S
    )  # Functions end first, then that of the source.
    await asyncio.sleep(longest)
    return f"has not ended {longest:g} s after it was cancelled"
