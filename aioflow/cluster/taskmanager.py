"""A TaskManager: offers its slots to the jobs of a cluster, and runs their tasks.

A TaskManager registers at the JobManager with the content of its slots, and sends heartbeats. It
loads a job's code with the first slot of that job, and then offers the slot. A TaskManager of a
cluster loads each job into a process of its own. A TaskManager that was started for a single job is
itself the process of this job. When a TaskManager loses the JobManager, its tasks end, but it
connects again. It keeps the slots of its jobs for a while for their next JobMasters. The slot table
of the TaskManager is authoritative; the JobManager has a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from aioflow.cluster.heartbeat import (
    HeartbeatMonitor,
    HeartbeatOptions,
    OwnPauses,
    SendHeartbeat,
    TimedOut,
)
from aioflow.cluster.job_processes import JobProcess, JobProcesses
from aioflow.cluster.job_session import REQUESTS, AttemptKey, JobSession, pack_error
from aioflow.cluster.leadership import LeaderRetrieval, NoLeader, connect_to_leader
from aioflow.cluster.open_jobs import OpenJobs, log_failure
from aioflow.cluster.pulse import Pulse
from aioflow.cluster.rpc import RpcConnection
from aioflow.cluster.shipping import load_job
from aioflow.cluster.slots import (
    ConnectToJobMaster,
    FailTasks,
    Instruction,
    OfferSlots,
    SlotFreed,
    SlotOccupied,
    TaskSlotTable,
)
from aioflow.core.aio import cancel_and_wait, wait_all
from aioflow.core.errors import AioflowError, Broken, Closed, counted
from aioflow.core.timeunits import LogBackoff
from aioflow.core.wire.serializers import Codec
from aioflow.graph.deployment import ExecutionAttemptId
from aioflow.inspection.process import ProcessInspector, merged
from aioflow.network.local_pool import NETWORK_MEMORY_BYTES, NetworkBufferPool
from aioflow.protocol.handshake import PeerRole

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine

    from aioflow.cluster.collector import Collector
    from aioflow.core.host import Host
    from aioflow.network.security import TlsFiles

__all__ = ["TaskManager", "TaskManagerOptions"]

logger = logging.getLogger(__name__)

PEER = "jobmanager"
REGISTER_S = 30.0
"""Maximum time for the answer to a registration.

A JobManager that takes longer is stopped or cut off, so the TaskManager looks for another one.
"""

REPORT_S = 0.5
"""Interval at which metrics of jobs are sent."""

FIND_S = 30.0
"""How long a TaskManager with `follows=False` looks for its JobManager."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskManagerOptions:
    """Options of a TaskManager.

    `jobmanagers` says where to find the leader. `bind` is the address at which other processes read
    the partitions of this process.
    """

    jobmanagers: LeaderRetrieval
    slots: int = 1
    bind: str = "127.0.0.1"
    slot_timeout_s: float = 30.0
    """How long a slot is kept for a job that has lost its JobMaster."""
    network_bytes: int | None = NETWORK_MEMORY_BYTES
    """Network memory for all jobs, in bytes. None: the options of the only job give the amount."""
    reconnect_s: float = 0.5
    isolated: bool = False
    """Whether each job runs in a process of its own."""
    tls: TlsFiles | None = None
    """TLS files of the host, for the processes of jobs; None without TLS."""
    configuration: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Configuration values that jobs do not set themselves, such as `rocksdb.path`."""
    preloaded: tuple[str, ...] = ()
    """Modules that the process of a job imports before it gets the job."""
    follows: bool = True
    """Whether the TaskManager registers at the next JobManager when it has lost its JobManager.

    If not, it waits up to `FIND_S` for its JobManager, and ends when it has lost this JobManager.
    """
    heartbeat: HeartbeatOptions = dataclasses.field(
        default_factory=lambda: HeartbeatOptions(own_pauses=OwnPauses.COUNTED)
    )


class TaskManager:
    """A TaskManager of a cluster, which runs until `run` is cancelled, or until the JobManager
    releases it."""

    def __init__(
        self,
        host: Host,
        secret: bytes,
        options: TaskManagerOptions,
        own_id: str | None = None,
        end_process: Callable[[str], None] | None = None,
        collector: Collector | None = None,
    ) -> None:
        """Makes a TaskManager. `own_id` is an unused id that the starting process has chosen; None:
        a new id.

        `end_process(why)` ends this process, as in `JobSession`. `collector` is given only in a
        process that runs nothing else.
        """
        self._collector = collector
        self._end_process = end_process
        self._host = host
        self._secret = secret
        self._options = options
        self.id = own_id or host.ids.new("taskmanager")
        self.inspector = ProcessInspector(host)
        """Inspector of this process, for monitoring."""
        self._table = TaskSlotTable(options.slots, options.slot_timeout_s)
        self._pool = (
            None if options.network_bytes is None else NetworkBufferPool(options.network_bytes)
        )
        self._processes = (
            JobProcesses(host, secret, self, self.inspector.logs, options.tls, options.preloaded)
            if options.isolated
            else None
        )
        self._jobs = OpenJobs(self, self._table, host, options.reconnect_s)
        self._tasks: dict[asyncio.Task[None], None] = {}
        self.connection: RpcConnection | None = None
        """Connection to the JobManager; None while there is none."""
        self._registration = 0
        self._log_backoff = LogBackoff()
        self._monitor = HeartbeatMonitor(options.heartbeat, lambda _: self._report())
        self._pulse: Pulse | None = None
        self._disconnected = asyncio.Event()
        self._released = False
        self._accepted = False
        """Whether a JobManager has accepted the secret. From then on every failure is temporary."""
        self._heard_at: float | None = None

    @property
    def heard_at(self) -> float | None:
        """Monotonic time at which the JobManager last answered a thread of this process, even while
        the loop is blocked.

        None if this process was never registered.
        """
        return self._heard_at if self._pulse is None else self._pulse.heard_at

    def unready_reasons(self) -> list[str]:
        """Returns why this process cannot take tasks now; an empty list if it can."""
        if self._released:
            return ["this TaskManager is stopped"]
        if self._pulse is None:
            return [f"not registered at a JobManager of {self._options.jobmanagers}"]
        return []

    async def run(self) -> None:
        """Serves one JobManager after the other. Raises Broken if the first one refuses the secret.

        With `follows=False` it serves only one JobManager, and raises OSError or NoLeader if it
        does not find this JobManager.
        """
        if self._processes is not None:
            await self._processes.listen()
        find_until = self._host.clock.monotonic() + FIND_S
        timers = asyncio.get_running_loop().create_task(
            self._run_timers(), name="slots and heartbeats"
        )
        reports = asyncio.get_running_loop().create_task(self._run_reports(), name="metrics")
        collecting = (
            []
            if self._collector is None
            else [
                asyncio.get_running_loop().create_task(
                    self._collector.collect(), name="collect garbage"
                )
            ]
        )
        try:
            while not self._released:
                try:
                    await self._serve()
                except Broken as error:
                    if not self._accepted and not self._released:
                        raise
                    self._waits(logging.WARNING, error)
                except (OSError, NoLeader) as error:
                    if (
                        not self._options.follows
                        and not self._accepted
                        and self._host.clock.monotonic() >= find_until
                    ):
                        raise
                    self._waits(logging.INFO, error)
                except Closed as error:
                    logger.info("taskmanager %s is not needed: %s", self.id[:8], error)
                    break
                if self._registration and not self._options.follows:
                    break
                if not self._released:
                    await asyncio.sleep(self._options.reconnect_s)
        finally:
            await cancel_and_wait([timers, reports, *collecting, *self._jobs.opening, *self._tasks])
            closings = [
                asyncio.get_running_loop().create_task(session.close(), name="close a session")
                for session in self._jobs.left
            ]
            await wait_all(closings)
            if self._processes is not None:
                await self._processes.close()
            if self.connection is not None:
                await self.connection.close()
            await self.inspector.close()
            for failure in await cancel_and_wait(closings):
                raise failure

    def stop(self) -> None:
        """Ends the tasks, and then makes `run` return."""
        self._released = True
        self._disconnected.set()
        if self.connection is not None:
            self.connection.abort(Closed("this taskmanager is stopped"))

    def _waits(self, level: int, error: Exception) -> None:
        """Logs, at growing intervals, that the TaskManager looks for a JobManager."""
        waited_s = self._log_backoff.failed(self._host.clock.monotonic())
        if waited_s is not None and not self._released:
            since = f", for {waited_s:.0f} s now" if waited_s else ""
            logger.log(
                level,
                "taskmanager %s waits for the jobmanager at %s%s: %s",
                self.id[:8],
                self._options.jobmanagers,
                since,
                error,
            )

    async def _serve(self) -> None:
        """Serves one connection from its beginning to its end."""
        self._disconnected.clear()
        address, connection = await connect_to_leader(
            self._host,
            self._secret,
            PeerRole.TASKMANAGER,
            self._options.jobmanagers,
            self._handlers(),
            self._on_closed,
        )
        self.connection, self._accepted = connection, True
        try:
            async with asyncio.timeout(REGISTER_S):
                self._registration = await connection.call(
                    "register",
                    self.id,
                    self._report(),
                    self._processes is not None,
                    self._options.network_bytes or 0,
                )
            waited_s = self._log_backoff.succeeded(self._host.clock.monotonic())
            after = "" if waited_s is None else f", after {waited_s:.0f} s without a jobmanager"
            where = "{}:{}".format(*address)
            logger.info(
                "taskmanager %s is registered with %s at %s%s",
                self.id[:8],
                counted(self._options.slots, "slot"),
                where,
                after,
            )
            if self._processes is not None:
                self._processes.keep_spare()
            self._monitor.monitor(PEER, self._host.clock.monotonic())
            for job_id in dict.fromkeys(
                status.job_id for status in self._table.report() if status.job_id is not None
            ):
                self._jobs.open(job_id)
            who = (self.id, self._registration)
            interval_s = self._options.heartbeat.interval_s
            async with Pulse(
                self._host, self._secret, PeerRole.TASKMANAGER, address, interval_s, who
            ) as self._pulse:
                await self._disconnected.wait()
        finally:
            self._heard_at, self._pulse = self.heard_at, None
            self._monitor.unmonitor(PEER)
            self.connection = None
            await connection.close()
            self._jobs.job_masters_lost()

    def _on_closed(self, connection: RpcConnection) -> None:
        self._disconnected.set()

    # Requests of the JobManager.

    def _handlers(self) -> dict[str, Callable[..., Any]]:
        return {
            "heartbeat": self._on_heartbeat,
            "request_slot": self._on_request_slot,
            **{name: partial(self._to_session, name) for name in REQUESTS},
            "submit_task": self._on_submit_task,
            "free_slot": self._on_free_slot,
            "job_over": self._on_job_over,
            "close_job": self._jobs.close,
            "end_job": self._on_end_job,
            "inspect": self._on_inspect,
            "release": self._on_release,
        }

    def _to_session(self, request: str, what: str | AttemptKey, *args: Any) -> Any:
        """Passes a request about `what`, a job id or an attempt, on to the session of the job."""
        session = self._jobs.session(what if isinstance(what, str) else what[0])
        return session.requests[request](what, *args)

    def _on_heartbeat(self) -> None:
        self._monitor.received(PEER, self._host.clock.monotonic())

    def _on_request_slot(
        self, index: int, job_id: str, allocation_id: str, address: str
    ) -> tuple[Any, ...] | None:
        """Reserves a slot for a job, and returns None.

        If the slot is taken, returns its content: (index, job id, allocation id).
        """
        try:
            self.carry_out(
                self._table.request(
                    index, job_id, allocation_id, address, self._host.clock.monotonic()
                )
            )
        except SlotOccupied as error:
            return msgspec.structs.astuple(error.status)
        return None

    def _on_submit_task(
        self, job_id: str, token: int, key: AttemptKey, allocation_id: str, content: bytes
    ) -> Awaitable[None] | None:
        attempt, session = ExecutionAttemptId(*key), self._jobs.session(job_id)
        self._table.add_task(attempt, allocation_id, token)
        try:
            answer = session.requests["submit_task"](job_id, token, key, allocation_id, content)
        except BaseException:
            self.task_ended(attempt)
            raise
        return None if answer is None else self._submitted(attempt, answer)

    async def _submitted(self, attempt: ExecutionAttemptId, answer: Awaitable[None]) -> None:
        try:
            await answer
        except AioflowError:
            self.task_ended(attempt)
            raise

    async def _on_inspect(self, what: str, *args: Any) -> Any:
        """Answers as `ProcessInspector.ask` does, for this process and the processes of its jobs
        together."""
        if self._processes is None:
            return await self.inspector.ask(what, *args)
        own = asyncio.get_running_loop().create_task(
            self.inspector.ask(what, *args), name=f"inspect {what}"
        )
        try:
            others = await self._processes.ask(what, *args, until=own)
            return merged(what, [own.result(), *others])
        finally:
            await cancel_and_wait([own])

    def _on_end_job(self, job_id: str, why: str) -> None:
        """Ends a job's process that does not carry out a request."""
        if self._processes is not None:
            self._processes.lose(job_id, why)

    def _on_free_slot(self, allocation_id: str, token: int, reason: str) -> None:
        self.carry_out(self._table.free_slot(allocation_id, token, reason))

    def _on_job_over(self, job_id: str, token: int) -> None:
        self.carry_out(self._table.job_over(job_id, token))
        self._jobs.close_unused()

    def give_up(self, why: str) -> None:
        """Asks the JobManager to end this process."""
        self.tell("give_up", self.id, why)

    def _on_release(self, reason: str) -> None:
        logger.info("taskmanager %s is sent home: %s", self.id[:8], reason)
        self._released = True
        self._disconnected.set()

    # Instructions of the slot table.

    def carry_out(self, instructions: list[Instruction]) -> None:
        """Carries out instructions of the slot table."""
        for instruction in instructions:
            match instruction:
                case ConnectToJobMaster(job_id, _):
                    self._jobs.open(job_id)
                case OfferSlots():
                    self.begin(self._offer(instruction), "offer slots")
                case FailTasks(attempts, reason):
                    # After a release it disconnects itself, so no JobMaster is lost.
                    why = "it was told to end" if self._released else reason
                    logger.info("taskmanager %s ends %d tasks: %s", self.id[:8], len(attempts), why)
                    for attempt in attempts:
                        session = self._jobs.sessions.get(attempt.job_id)
                        if session is not None:
                            session.cancel_task(attempt)
                        if isinstance(session, JobProcess):
                            self.begin(self._watch(attempt, session), f"end {attempt}")
                case SlotFreed(_, job_id, allocation_id, reason):
                    self.tell(
                        "slot_freed", self.id, self._registration, job_id, allocation_id, reason
                    )
                    self._share_memory(job_id)
                    self._jobs.close_unused()

    async def _watch(self, attempt: ExecutionAttemptId, process: JobProcess) -> None:
        """Ends `process` if its cancelled task `attempt` does not end in time."""
        why = await process.until_overdue()
        if self._table.holds(attempt) and self._jobs.sessions.get(attempt.job_id) is process:
            process.worker.lose(f"its task {attempt} {why}")

    def _memory_of(self, job_id: str) -> int:
        """Returns the share of the network memory for a job in bytes, in proportion to its slots
        here."""
        total = self._options.network_bytes or NETWORK_MEMORY_BYTES
        return total * self._table.slots_of(job_id) // self._options.slots

    def _share_memory(self, job_id: str) -> None:
        session = self._jobs.sessions.get(job_id)
        if isinstance(session, JobProcess) and self._jobs.has_slot(job_id):
            session.resize(self._memory_of(job_id))

    # Reports of the processes of jobs.

    def tell(self, method: str, *args: Any) -> None:
        """Sends a report to the JobManager, if one is connected."""
        if self.connection is not None:
            self.connection.notify(method, *args)

    def task_ended(self, attempt: ExecutionAttemptId) -> None:
        """Notes that a task has released its resources."""
        self.carry_out(self._table.task_ended(attempt))

    def process_lost(self, process: JobProcess, loss: Broken) -> None:
        """Handles the unexpected end of a job's process: reports the loss of its tasks, and gives
        its slots back."""
        job_id = process.job_id
        if self._jobs.sessions.get(job_id) is not process:
            return  # Another process has its slots.
        del self._jobs.sessions[job_id]
        # First the report why the tasks of the job are lost. Then its slots are given away.
        self.tell("process_lost", self.id, job_id, process.token, pack_error(loss, Codec()))
        self.carry_out(self._table.give_back(job_id, str(loss)))

    async def _offer(self, offer: OfferSlots) -> None:
        session, connection = self._jobs.sessions.get(offer.job_id), self.connection
        if session is None or connection is None or session.token != offer.token:
            return
        offers = [(slot.allocation_id, slot.index) for slot in offer.slots]
        try:
            accepted, rejected = await connection.call(
                "offer_slots", self.id, offer.job_id, offer.token, session.location, offers
            )
            self.carry_out(
                self._table.offer_answered(
                    offer.job_id, offer.token, offer.offer, tuple(accepted), tuple(rejected)
                )
            )
        except Broken:
            return  # The end of the connection is handled elsewhere.
        except AioflowError as error:
            logger.info("slots of job %s were not taken: %s", offer.job_id, error)
            self._jobs.drop(offer.job_id)

    async def load(self, job_id: str, token: int, content: bytes) -> bytes:
        """Loads the code of a job, and adds its session to the open jobs.

        Returns the packed error of the code, empty if there is none. May also raise the error.
        """
        if self._processes is not None:
            return await self._open_apart(self._processes, job_id, token, content)
        await self._open_here(job_id, token, content)
        return b""

    async def _open_here(self, job_id: str, token: int, content: bytes) -> None:
        """Loads the code of a job into this process. Raises the errors of the code."""
        what = f"job {job_id} on taskmanager {self.id}"
        with contextlib.nullcontext() if self._pulse is None else self._pulse.loading(what):
            job = load_job(content)
        session = JobSession(
            self._host,
            self._secret,
            job_id,
            job,
            token,
            self.tell,
            self.ask,
            lambda: self.is_writable,
            self._on_task_end,
            self._end_process,
            partial(self._report_metrics, job_id),
            self._pool,
        )
        await session.open(self._options.bind)
        self._jobs.sessions[job_id] = session
        if self._collector is not None:
            # Loaded code stays for ever, so the collector need not walk it again.
            gc.collect()
            gc.freeze()

    async def _open_apart(
        self, processes: JobProcesses, job_id: str, token: int, content: bytes
    ) -> bytes:
        """Loads the code of a job into a process of its own.

        Returns the packed error of the code, empty if there is none. Raises Broken if the process
        has ended.
        """
        process = processes.take()
        failure = b""
        try:
            memory = self._memory_of(job_id)
            bind = self._options.bind
            settings = dict(self._options.configuration)
            failure = await process.open(job_id, token, content, self.id, bind, memory, settings)
        finally:
            if failure or not process.location:
                process.is_closing = True
                process.worker.lose("its job could not be opened")
        if failure:
            logger.warning("job %s cannot be opened: its code could not be loaded", job_id)
        elif self.connection is not None:
            self._jobs.sessions[job_id] = process
            self._share_memory(job_id)
        return failure

    def _on_task_end(self, attempt: ExecutionAttemptId) -> None:
        if self._collector is not None:
            self._collector.look_everywhere()
        self.task_ended(attempt)

    # Messages and time.

    async def ask(self, method: str, *args: Any) -> Any:
        """Asks the JobMaster of a job, by calling `method` with `args`. Raises Broken if there is
        no JobManager."""
        if self.connection is None:
            raise Broken("there is no jobmanager now")
        return await self.connection.call(method, *args)

    @property
    def is_writable(self) -> bool:
        """Whether optional messages are sent to the JobManager, rather than dropped."""
        return self.connection is not None and self.connection.is_writable

    def _report(self) -> list[tuple[Any, ...]]:
        return [msgspec.structs.astuple(status) for status in self._table.report()]

    def begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Starts a task that `run` ends."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        log_failure(task)

    async def _run_timers(self) -> None:
        while True:
            await asyncio.sleep(self._options.heartbeat.interval_s / 4)
            now = self._host.clock.monotonic()
            self.carry_out(self._table.tick(now))
            if self._pulse is not None:
                # The thread heard the JobManager while a function blocked this loop: that was no
                # silence.
                self._monitor.lives(PEER, self._pulse.heard_at)
            for instruction in self._monitor.tick(now):
                match instruction:
                    case SendHeartbeat(_, payload):
                        self.tell(
                            "heartbeat",
                            self.id,
                            self._registration,
                            payload,
                            self._table.fenced_total,
                        )
                    case TimedOut(_, reason):
                        logger.warning(
                            "taskmanager %s gives its jobmanager up: %s", self.id[:8], reason.value
                        )
                        self._disconnected.set()

    async def _run_reports(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            for session in self._jobs.sessions.values():
                session.report()

    def _report_metrics(self, job_id: str) -> None:
        session = self._jobs.sessions.get(job_id)
        if not isinstance(session, JobSession):
            return
        own = self.inspector.metrics() if self.inspector.runs else {}
        self.tell("report", job_id, self.id, {**own, **session.metrics.snapshot()})
        session.tell_missed()
