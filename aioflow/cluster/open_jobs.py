"""The jobs that are open on a TaskManager. A job is opened with its first slot, and closed when it
no longer needs this process.

A job is open while this process has a session of the job. A session belongs to one JobMaster, which
the session's fencing token identifies. The next JobMaster gets a session of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.cluster.job_session import pack_error
from aioflow.core.errors import AioflowError, Broken, Closed, JobNotRunning
from aioflow.core.wire.serializers import Codec

if TYPE_CHECKING:
    from aioflow.cluster.rpc import RpcConnection
    from aioflow.cluster.slots import Instruction, TaskSlotTable
    from aioflow.core.host import Host
    from aioflow.graph.deployment import ExecutionAttemptId

__all__ = ["OpenJobs", "Session", "log_failure"]

logger = logging.getLogger(__name__)


class Session(Protocol):
    """A job that is open here: a `JobSession`, or a `JobProcess` that runs a `JobSession`."""

    token: int
    location: str
    requests: dict[str, Callable[..., Any]]
    """Maps each name in `REQUESTS` to the function that answers this request. The function returns
    an awaitable if the job has a process of its own.
    """

    @property
    def has_run(self) -> bool: ...
    @property
    def report(self) -> Callable[[], None]: ...
    def cancel_task(self, attempt: ExecutionAttemptId) -> None: ...
    async def close(self) -> None: ...


class Opener(Protocol):
    """The interface of the TaskManager for its open jobs."""

    @property
    def id(self) -> str: ...
    @property
    def connection(self) -> RpcConnection | None:
        """Connection to the JobManager; None while there is none."""

    async def load(self, job_id: str, token: int, content: bytes) -> bytes:
        """Loads the code of a job, and adds its session to the open jobs.

        Returns the packed error of the code, empty if there is none. May also raise the error.
        """

    def carry_out(self, instructions: list[Instruction]) -> None:
        """Carries out instructions of the slot table."""

    def begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Starts a task that belongs to the TaskManager."""

    def tell(self, method: str, *args: Any) -> None:
        """Sends a report to the JobManager, if one is connected."""


class OpenJobs:
    """The sessions of one TaskManager. `retry_s` is the pause in s before another try to open a
    job."""

    def __init__(self, opener: Opener, table: TaskSlotTable, host: Host, retry_s: float) -> None:
        self._opener = opener
        self._table = table
        self._host = host
        self._retry_s = retry_s
        self.sessions: dict[str, Session] = {}
        self._closing: dict[Session, None] = {}
        """Sessions that are being closed."""
        self._opening: dict[str, asyncio.Task[None]] = {}
        """Tasks that find the JobMaster of a job and load the job's code, by job id."""

    def session(self, job_id: str) -> Session:
        """Returns the session of an open job. Raises Closed if the job is not open."""
        session = self.sessions.get(job_id)
        if session is None:
            raise Closed(
                f"job {job_id} is not open on taskmanager {self._opener.id}: it has no slot here"
            )
        return session

    def job_masters_lost(self) -> None:
        """Notes that the connection to all JobMasters has ended."""
        for job_id, session in self.sessions.items():
            self._opener.carry_out(
                self._table.job_master_lost(job_id, session.token, self._host.clock.monotonic())
            )
        self.close_unused()

    def has_slot(self, job_id: str) -> bool:
        """Returns whether a slot of this TaskManager belongs to the job."""
        return any(status.job_id == job_id for status in self._table.report())

    # Opening.

    def open(self, job_id: str) -> None:
        """Begins to open a job, unless this has begun already."""
        if job_id not in self._opening:
            task = asyncio.get_running_loop().create_task(
                self._open(job_id), name=f"open job {job_id[:8]}"
            )
            self._opening[job_id] = task
            task.add_done_callback(lambda ended: self._on_opened(job_id, ended))

    def _on_opened(self, job_id: str, opening: asyncio.Task[None]) -> None:
        del self._opening[job_id]
        log_failure(opening)
        self.close_unused()  # The slot may be freed by now.

    async def _open(self, job_id: str) -> None:
        """Gets the code from the JobMaster, loads it, and offers the job's slots to the JobMaster.

        Tries again until there is a JobMaster, or the slot is freed.
        """
        while (connection := self._opener.connection) is not None and self.has_slot(job_id):
            try:
                token, content = await connection.call("open_job", self._opener.id, job_id)
            except Broken:
                return
            except JobNotRunning as error:
                # It ended while the slot was on its way.
                self._opener.carry_out(self._table.give_back(job_id, str(error)))
                return
            except AioflowError as error:
                logger.debug("job %s cannot be opened yet: %s", job_id, error)
                await asyncio.sleep(self._retry_s)
                continue
            failure = await self._load(job_id, token, content)
            if failure:
                await self._refuse(job_id, token, failure)
            else:
                self._opener.carry_out(self._connected(job_id, token))
            return

    async def _load(self, job_id: str, token: int, content: bytes) -> bytes:
        """Loads a job, unless it is open for this JobMaster. Returns the packed error of its code,
        empty if there is none.

        If the job is open for another JobMaster, that session is closed first.
        """
        old = self.sessions.get(job_id)
        if old is not None and old.token != token:
            await old.close()
            self.sessions.pop(job_id, None)
            old = None
        if old is not None:
            return b""
        try:
            return await self._opener.load(job_id, token, content)
        # User code: any error belongs to the job.
        except Exception as error:  # noqa: BLE001
            logger.warning("job %s cannot be opened: %r", job_id, error)
            return pack_error(error, Codec())

    async def _refuse(self, job_id: str, token: int, failure: bytes) -> None:
        """Reports a job whose code cannot be loaded, and gives its slots back."""
        self._opener.tell("job_not_opened", self._opener.id, job_id, token, failure)
        # The slot may be requested again at once.
        await asyncio.sleep(self._retry_s)
        self._connected(job_id, token)
        self._opener.carry_out(self._table.job_over(job_id, token))

    def _connected(self, job_id: str, token: int) -> list[Instruction]:
        return self._table.job_master_connected(job_id, token, self._host.clock.monotonic())

    # Closing.

    def drop(self, job_id: str) -> None:
        """Gives back the slots of a job whose JobMaster does not accept them."""
        session = self.sessions.get(job_id)
        if session is not None:
            try:
                self._opener.carry_out(self._table.job_over(job_id, session.token))
            except AioflowError as error:
                logger.debug("job %s is gone already: %s", job_id, error)
            self.close_unused()

    async def close(self, job_id: str) -> None:
        """Closes a finished job, and raises the errors of closing its resources."""
        session = self.sessions.pop(job_id, None)
        if session is not None:
            self._drop_token(job_id, session.token)
            await self._close(session)

    def close_unused(self) -> None:
        """Closes the jobs that no longer need this process.

        A job whose tasks have finished here stays until it is over. Other processes may still read
        the output of these tasks, and shared resources are closed at the end of the job.
        """
        for job_id, session in list(self.sessions.items()):
            if self.has_slot(job_id) or job_id in self._opening:
                continue
            if not (session.has_run and self._table.is_connected(job_id)):
                del self.sessions[job_id]
                self._drop_token(job_id, session.token)
                self._opener.begin(self._close(session), f"close job {job_id[:8]}")

    async def _close(self, session: Session) -> None:
        """Closes a session that serves no job any more.

        If this call is cancelled, the session stays in `left`, and the TaskManager closes it when
        the TaskManager ends.
        """
        self._closing[session] = None
        await session.close()
        del self._closing[session]

    def _drop_token(self, job_id: str, token: int) -> None:
        """Disconnects the JobMaster of a job whose code is closed here.

        The slot table then does not offer the next slot to this JobMaster.
        """
        try:
            self._opener.carry_out(self._table.job_over(job_id, token))
        except AioflowError:
            return

    # The end of the TaskManager.

    @property
    def opening(self) -> list[asyncio.Task[None]]:
        """Tasks that open jobs."""
        return list(self._opening.values())

    @property
    def left(self) -> list[Session]:
        """Sessions that are not closed yet, in the order in which they are to be closed."""
        return [*self._closing, *self.sessions.values()]


def log_failure(task: asyncio.Task[None]) -> None:
    """Logs the error of a task that has ended, unless it was cancelled."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed: %r", task.get_name(), error)
