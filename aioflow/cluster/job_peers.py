"""The processes that have opened one job, and what its JobMaster asks of them: each in order,
one that is gone in vain.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import AioflowError

if TYPE_CHECKING:
    from aioflow.cluster.rpc import RpcConnection

__all__ = ["SUBMITTER", "JobPeer", "JobPeers"]

logger = logging.getLogger(__name__)

SUBMITTER = ""
"""Stands for the submitting process where a worker id is expected."""


@dataclass(slots=True)
class JobPeer:
    """One process.

    `location` is where the others find what its tasks produce; empty if it runs none.
    """

    connection: RpcConnection
    location: str


class JobPeers:
    """By worker id. The submitter is one of them while it is connected."""

    def __init__(self) -> None:
        self._peers: dict[str, JobPeer] = {}
        self._worker_ids: dict[str, str] = {}
        """By location, whoever was there."""
        self._asking: dict[asyncio.Task[None], None] = {}

    def get(self, worker_id: str | None) -> JobPeer | None:
        """None: it is not here, or not any more."""
        return None if worker_id is None else self._peers.get(worker_id)

    def joined(self, worker_id: str, connection: RpcConnection, location: str) -> bool:
        """False if it was here already: at the same place, on the same connection."""
        known = self._peers.get(worker_id)
        if known is not None and known.location == location and known.connection is connection:
            return False
        self._peers[worker_id] = JobPeer(connection, location)
        if worker_id != SUBMITTER:
            self._worker_ids[location] = worker_id
        return True

    def left(self, worker_id: str) -> bool:
        """False if it was not here."""
        return self._peers.pop(worker_id, None) is not None

    def worker_at(self, location: str) -> str:
        """The TaskManager that is, or was, found there; empty: nobody was."""
        return self._worker_ids.get(location, "")

    def location_of(self, worker_id: str) -> str:
        """Where the tasks of the job are found there; empty if it has none."""
        peer = self._peers.get(worker_id)
        return "" if peer is None else peer.location

    def ask(self, worker_id: str, method: str, *args: Any) -> list[asyncio.Future[None]]:
        """Ask behind what was asked before. Its failure is seen elsewhere: by the end of the
        connection, or of the task.

        Returns what is done once there is an answer, or there can be none; nothing if nobody was
        asked.
        """
        peer = self._peers.get(worker_id)
        if peer is None or not peer.connection.is_open:
            return []
        task = asyncio.get_running_loop().create_task(
            _quietly(peer.connection, method, args), name=method
        )
        self._asking[task] = None  # Nobody else keeps it from being collected.
        task.add_done_callback(self._asking.pop)
        return [task]

    def ask_all(self, method: str, *args: Any) -> None:
        """The submitter too."""
        for worker_id in self._peers:
            self.ask(worker_id, method, *args)

    def ask_taskmanagers(self, method: str, *args: Any) -> list[asyncio.Future[None]]:
        """All but the submitter. Returns as `ask` does."""
        return [
            answer
            for worker_id in self._peers
            if worker_id != SUBMITTER
            for answer in self.ask(worker_id, method, *args)
        ]


async def _quietly(connection: RpcConnection, method: str, args: tuple[Any, ...]) -> None:
    try:
        await connection.call(method, *args)
    except AioflowError as error:
        logger.debug("%s was not done: %s", method, error)
