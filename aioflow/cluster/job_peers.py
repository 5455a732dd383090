"""The processes that take part in one job, and the requests of its JobMaster to them.

Requests to one process stay in order. A request to a lost process is dropped.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioflow.cluster.rpc import RpcConnection

__all__ = ["SUBMITTER", "JobPeer", "JobPeers"]

SUBMITTER = ""
"""Stands for the submitting process where a worker id is expected."""


@dataclass(slots=True)
class JobPeer:
    """One process.

    `location` is the address at which other processes read its partitions; empty if it runs none.
    """

    connection: RpcConnection
    location: str


class JobPeers:
    """The processes by worker id. The submitter is one of them while it is connected."""

    def __init__(self) -> None:
        self._peers: dict[str, JobPeer] = {}
        self._worker_ids: dict[str, str] = {}
        """Worker ids by location, including those of lost workers."""

    def get(self, worker_id: str | None) -> JobPeer | None:
        """Returns None if the process is not, or no longer, connected."""
        return None if worker_id is None else self._peers.get(worker_id)

    def all(self) -> list[JobPeer]:
        """Returns the connected processes, oldest first."""
        return list(self._peers.values())

    def joined(self, worker_id: str, connection: RpcConnection, location: str) -> bool:
        """Adds a process. Returns False if it is known with this location and connection."""
        known = self._peers.get(worker_id)
        if known is not None and known.location == location and known.connection is connection:
            return False
        self._peers[worker_id] = JobPeer(connection, location)
        if worker_id != SUBMITTER:
            self._worker_ids[location] = worker_id
        return True

    def left(self, worker_id: str) -> bool:
        """Removes a process. Returns False if it was not there."""
        return self._peers.pop(worker_id, None) is not None

    def worker_at(self, location: str) -> str:
        """Returns the TaskManager that is, or was, at `location`; empty if there was none."""
        return self._worker_ids.get(location, "")

    def location_of(self, worker_id: str) -> str:
        """Returns the address of the job's tasks on this worker; empty if it has none."""
        peer = self._peers.get(worker_id)
        return "" if peer is None else peer.location

    def ask(self, worker_id: str, method: str, *args: Any) -> list[asyncio.Future[None]]:
        """Sends a request after all earlier ones.

        A failure shows elsewhere: by the end of the connection, or of the task. The returned
        futures are done once there is an answer, or there can be none. The list is empty if the
        worker is not connected.
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
        """Sends a request to all processes except the submitter. Returns as `ask` does."""
        return [
            answer
            for worker_id in self._peers
            if worker_id != SUBMITTER
            for answer in self.ask(worker_id, method, *args)
        ]
