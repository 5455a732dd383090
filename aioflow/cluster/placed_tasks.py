"""The tasks of one job on a cluster: the processes that run them, and the requests to them.

A task runs in a TaskManager, in the process that submitted the job, or in this process. If the job
runs inside its own program, tasks that stay in the program are reached by direct calls. Requests to
one process stay in order. A request to a lost process is dropped.

A healthy process watches the end of its own cancelled tasks (`task/ending.py`). This module
watches the processes: if a function blocks the event loop of a process, the cancellation never
arrives.

Taps are subscriptions of the submitter, or watchers in the JobManager. Each tap has a number. The
submitter numbers its taps from 1; watchers here have negative numbers. Every TaskManager gets every
tap, even if it joins later. If a subscription may miss rows, rows that a slow submitter does not
take in time are counted and dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle
import msgspec

from aioflow.cluster.job_session import AttemptKey, attempt_key
from aioflow.cluster.split_discovery import pack_splits
from aioflow.core.aio import OrderedTaskGroup, cancel_and_wait, wait_all
from aioflow.core.errors import Broken, JobNotRunning, TypeNotSupported
from aioflow.core.wire.batch import decode_batch
from aioflow.graph.deployment import ExecutionAttemptId, TaskDeploymentDescriptor
from aioflow.task.closing import CLEANUP_TIMEOUT_S

if TYPE_CHECKING:
    from aioflow.cluster.gateways import OnMissed
    from aioflow.cluster.rpc import RpcConnection
    from aioflow.cluster.task_executor import TaskExecutor
    from aioflow.core.elements import CheckpointBarrier, RecordBatch
    from aioflow.core.scope import TapPlace
    from aioflow.core.wire.serializers import Codec
    from aioflow.operators.source import Split

__all__ = [
    "GRACE_S",
    "SUBMITTER",
    "JobPeer",
    "JobPeers",
    "JobTaps",
    "PlacedTasks",
    "Submitter",
    "until_overdue",
]

SUBMITTER = ""
"""Stands for the submitting process where a worker id is expected."""


class JobPeer(msgspec.Struct):
    """A process that is connected to the JobMaster.

    `location` is the address at which other processes read the partitions of this process; empty if
    it runs no tasks.
    """

    connection: RpcConnection
    location: str


class JobPeers:
    """The connected processes of a job, by worker id. The submitter is one of them while it is
    connected."""

    def __init__(self) -> None:
        self._peers: dict[str, JobPeer] = {}
        self._worker_ids: dict[str, str] = {}
        """Worker ids by location, including those of lost workers."""

    def get(self, worker_id: str | None) -> JobPeer | None:
        """Returns the process of a worker, or None if the worker is not connected."""
        return None if worker_id is None else self._peers.get(worker_id)

    def all(self) -> list[JobPeer]:
        """Returns the connected processes, oldest first."""
        return list(self._peers.values())

    def joined(self, worker_id: str, connection: RpcConnection, location: str) -> bool:
        """Adds a process. Returns False if the process is known already with this location and
        connection."""
        known = self._peers.get(worker_id)
        if known is not None and known.location == location and known.connection is connection:
            return False
        self._peers[worker_id] = JobPeer(connection, location)
        if worker_id != SUBMITTER:
            self._worker_ids[location] = worker_id
        return True

    def left(self, worker_id: str) -> bool:
        """Removes a process. Returns False if the process was not connected."""
        return self._peers.pop(worker_id, None) is not None

    def worker_at(self, location: str) -> str:
        """Returns the id of the TaskManager that is, or was, at `location`; empty if there was
        none."""
        return self._worker_ids.get(location, "")

    def location_of(self, worker_id: str) -> str:
        """Returns the address of the job's tasks on this worker; empty if it has none."""
        peer = self._peers.get(worker_id)
        return "" if peer is None else peer.location

    def ask(self, worker_id: str, method: str, *args: Any) -> list[asyncio.Future[None]]:
        """Sends a request to a worker, in order after all earlier requests.

        Errors in the answer are ignored, because the end of the connection or of the task shows the
        failure. Each returned future is done once there is an answer, or there can be none. The
        list is empty if the worker is not connected.
        """
        peer = self._peers.get(worker_id)
        if peer is None or not peer.connection.is_open:
            return []
        return [peer.connection.ask(method, *args)]

    def ask_all(self, method: str, *args: Any) -> None:
        """Sends a request to all processes, including the submitter."""
        for worker_id in self._peers:
            self.ask(worker_id, method, *args)

    def ask_taskmanagers(self, method: str, *args: Any) -> list[asyncio.Future[None]]:
        """Sends a request to all processes except the submitter. Returns the same kind of futures
        as `ask`."""
        return [
            answer
            for worker_id in self._peers
            if worker_id != SUBMITTER
            for answer in self.ask(worker_id, method, *args)
        ]


Watcher = Callable[["RecordBatch"], None]


class Submitter(msgspec.Struct, eq=False):
    """The process that submitted a job, and stays connected.

    `location` is empty if the process runs no tasks. `taps` maps the id of each tap to its place
    and to whether it may miss rows.
    """

    connection: RpcConnection
    location: str = ""
    taps: dict[int, tuple[TapPlace, bool]] = msgspec.field(default_factory=dict)
    missed: dict[int, int] = msgspec.field(default_factory=dict)
    """Number of rows that were dropped because the process does not keep up, by tap id."""


class _Watch(msgspec.Struct, frozen=True):
    """A tap of a watcher in this process."""

    place: TapPlace
    watcher: Watcher
    on_missed: OnMissed | None
    may_miss: bool


class JobTaps:
    """The taps of one job. `submitter` is None while the submitter is not connected."""

    def __init__(
        self, job_id: str, peers: JobPeers, codec: Codec, submitter: Submitter | None
    ) -> None:
        self.submitter = submitter
        self._job_id = job_id
        self._peers = peers
        self._codec = codec
        self._watchers: dict[int, _Watch] = {}
        self._watched = 0

    def tell(self, worker_id: str) -> None:
        """Sends all taps to a TaskManager that has opened the job."""
        taps = {} if self.submitter is None else self.submitter.taps
        for tap_id, (place, may_miss) in taps.items():
            self._peers.ask(worker_id, "add_tap", self._job_id, place, tap_id, may_miss)
        for tap_id, watch in self._watchers.items():
            self._peers.ask(worker_id, "add_tap", self._job_id, watch.place, tap_id, watch.may_miss)

    def watch(
        self, place: TapPlace, watcher: Watcher, on_missed: OnMissed | None, *, may_miss: bool
    ) -> list[asyncio.Future[None]]:
        """Adds a watcher in this process.

        Returns a future for each TaskManager, which is done once the TaskManager has the tap, or is
        gone.
        """
        self._watched += 1
        self._watchers[-self._watched] = _Watch(place, watcher, on_missed, may_miss)
        return self._peers.ask_taskmanagers(
            "add_tap", self._job_id, place, -self._watched, may_miss
        )

    def unwatch(self, place: TapPlace, watcher: Watcher) -> None:
        """Removes a watcher that `watch` added."""
        for tap_id in [
            tap_id
            for tap_id, watch in self._watchers.items()
            if (watch.place, watch.watcher) == (place, watcher)
        ]:
            del self._watchers[tap_id]
            self._peers.ask_taskmanagers("remove_tap", self._job_id, place, tap_id)

    def add(self, place: TapPlace, tap_id: int, may_miss: bool) -> list[asyncio.Future[None]]:
        """Adds a subscription of the submitter. Returns the same kind of futures as `watch`."""
        if self.submitter is not None:
            self.submitter.taps[tap_id] = place, may_miss
        return self._peers.ask_taskmanagers("add_tap", self._job_id, place, tap_id, may_miss)

    def remove(self, place: TapPlace, tap_id: int) -> None:
        """Removes a subscription that `add` added."""
        if self.submitter is not None:
            self.submitter.taps.pop(tap_id, None)
        self._peers.ask_taskmanagers("remove_tap", self._job_id, place, tap_id)

    def notify(self, method: str, *args: Any) -> None:
        """Sends a notification to the submitter if it is connected."""
        if self.submitter is not None:
            self.submitter.connection.notify(method, *args)

    def tapped(self, tap_id: int, content: bytes, rows: int, missed: int, refused: str) -> None:
        """Passes a batch on to the watcher of the tap or to the submitter. `refused` is the reason
        why the batch cannot be sent, or empty."""
        watch = self._watchers.get(tap_id)
        if watch is not None:
            if content:
                watch.watcher(decode_batch(content, self._codec, "a subscription"))
            if watch.on_missed is not None and (missed or refused):
                watch.on_missed(missed, TypeNotSupported(refused) if refused else None)
            return
        submitter = self.submitter
        if submitter is None or tap_id not in submitter.taps:
            return
        missed += submitter.missed.pop(tap_id, 0)
        if submitter.taps[tap_id][1] and not submitter.connection.is_writable:
            submitter.missed[tap_id] = missed + rows
        else:
            submitter.connection.notify("tapped", tap_id, content, missed, refused)


logger = logging.getLogger(__name__)


class PlacedTasks:
    """The `TaskExecutorGateway` of a JobMaster.

    `submit(descriptor)` deploys a task once there is a slot. `cancel_waiting(attempt)` cancels a
    task that waits for a slot. `overdue(worker_id, attempt, why)` is called if a cancelled task
    does not end in time.
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
        """Executor of the tasks that stay in the program, if the job runs inside the program;
        otherwise None."""
        self.placed: dict[ExecutionAttemptId, str] = {}
        """Worker id of the process in which each attempt runs that has not ended."""
        self._watches: dict[ExecutionAttemptId, asyncio.Task[None]] = {}
        """Tasks that check whether cancelled attempts end in time."""

    def ended(self, attempt: ExecutionAttemptId) -> None:
        """Stops watching an attempt that has ended."""
        self.placed.pop(attempt, None)
        watch = self._watches.pop(attempt, None)
        if watch is not None:
            watch.cancel()

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
            if attempt not in self._watches:
                self._watches[attempt] = self._group.create_task(
                    self._watch(worker_id, attempt, answers), name=f"cancel {attempt}"
                )

    async def _watch(
        self, worker_id: str, attempt: ExecutionAttemptId, answers: Sequence[asyncio.Future[None]]
    ) -> None:
        why = await until_overdue(answers, self._cancellation_timeout_s)
        self._watches.pop(attempt, None)
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

        In the JobManager of a cluster, any watcher may miss records. Taps of the submitter have
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

    async def describe_checkpoint(self, attempt: ExecutionAttemptId, checkpoint_id: int) -> str:
        worker_id = self.placed.get(attempt)
        if self.here is not None and worker_id == SUBMITTER:
            return await self.here.describe_checkpoint(attempt, checkpoint_id)
        peer = self.peers.get(worker_id)
        if peer is None:
            raise JobNotRunning("the task runs nowhere now")
        key = attempt_key(attempt)
        return str(await peer.connection.call("describe_checkpoint", key, checkpoint_id))

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
"""Extra time in s for messages in transit, beyond the timeouts that the process itself applies."""


async def until_overdue(answers: Sequence[asyncio.Future[Any]], timeout_s: float) -> str:
    """Waits until a cancelled task is overdue, and returns the reason for an error message.

    `answers` are futures that are done when the task's process has received the cancellation.
    """
    if not await wait_all(answers, timeout_s=timeout_s):
        return (
            f"was cancelled {timeout_s:g} s ago, and its process does not answer: a function "
            "holds its event loop"
        )
    # Functions end first, then the function of a source, then all are closed.
    longest = 3 * timeout_s + CLEANUP_TIMEOUT_S + GRACE_S
    await asyncio.sleep(longest)
    return f"has not ended {longest:g} s after it was cancelled"
