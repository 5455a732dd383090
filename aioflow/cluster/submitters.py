"""The connected processes that submitted jobs.

Each gets the status and the end of its job, may run a part of it, and attaches to the next leader.
A process is known from its submission, or its return, until its connection or its job ends. All
calls are on the event loop.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aioflow.cluster.job_session import pack_error
from aioflow.core.errors import AioflowError
from aioflow.core.wire.serializers import Codec

if TYPE_CHECKING:
    from aioflow.cluster.dispatcher import Dispatcher
    from aioflow.cluster.placed_tasks import Submitter
    from aioflow.cluster.rpc import RpcConnection

__all__ = ["SUBMITTER_RETURNS_S", "Submitters"]

SUBMITTER_RETURNS_S = 30.0
"""How long a new leader waits for a submitter that runs a part of a job."""


class Submitters:
    """The submitters by job."""

    def __init__(self) -> None:
        self._known: dict[str, Submitter] = {}
        self._awaited: dict[str, asyncio.Future[Submitter]] = {}
        """Recovered jobs that wait for their submitters."""
        self._following: dict[asyncio.Task[None], None] = {}

    def get(self, job_id: str) -> Submitter | None:
        """Returns None if the submitter did not stay, is not connected, or the job is over."""
        return self._known.get(job_id)

    def add(self, job_id: str, submitter: Submitter) -> None:
        """Adds the submitter of a new job, which stays connected."""
        self._known[job_id] = submitter

    def returned(self, job_id: str, submitter: Submitter) -> bool:
        """Adds a submitter that has found this leader.

        Returns False if no `wait_for` waits for it.
        """
        self._known[job_id] = submitter
        awaited = self._awaited.get(job_id)
        if awaited is None or awaited.done():
            return False
        awaited.set_result(submitter)
        return True

    def remove(self, job_id: str) -> None:
        """Removes the submitter of a job that is over or was refused."""
        self._known.pop(job_id, None)

    def lost(self, connection: RpcConnection) -> list[str]:
        """Returns the jobs whose submitter used `connection`, which has ended."""
        jobs = [
            job_id
            for job_id, submitter in self._known.items()
            if submitter.connection is connection
        ]
        for job_id in jobs:
            del self._known[job_id]
        return jobs

    def clear(self) -> None:
        """Forgets all submitters, because this process no longer leads."""
        self._known.clear()

    async def wait_for(self, job_id: str) -> Submitter | None:
        """Waits for a submitter to return; None if it does not within SUBMITTER_RETURNS_S."""
        returns: asyncio.Future[Submitter] = asyncio.get_running_loop().create_future()
        self._awaited[job_id] = returns
        try:
            async with asyncio.timeout(SUBMITTER_RETURNS_S):
                return await returns
        except TimeoutError:
            return None
        finally:
            del self._awaited[job_id]

    def follow(self, dispatcher: Dispatcher, job_id: str, connection: RpcConnection | None) -> None:
        """Notifies `connection` once the job has ended, and then forgets its submitter.

        It ends with `dispatcher` at the latest.
        """
        following = self._tell_the_end(dispatcher, job_id, connection)
        task = asyncio.get_running_loop().create_task(following, name=f"follow {job_id}")
        self._following[task] = None
        task.add_done_callback(self._following.pop)

    async def _tell_the_end(
        self, dispatcher: Dispatcher, job_id: str, connection: RpcConnection | None
    ) -> None:
        try:
            view = await dispatcher.wait(job_id)
        except AioflowError:
            return  # Leadership is lost; the connection ends with it.
        self.remove(job_id)
        if connection is not None:
            connection.notify(
                "ended", view.status.value, pack_error(view.cause, Codec()), view.savepoint
            )
