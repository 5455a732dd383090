"""The processes that take part in one job, the requests of its JobMaster to them, and its taps.

Requests to one process stay in order. A request to a lost process is dropped.

Taps are subscriptions of the submitter, and watchers in the JobManager. Each tap has a number. The
submitter numbers its taps from 1; watchers here have negative numbers. Every TaskManager gets every
tap, also one that joins later. If a subscription may miss rows, rows that a slow submitter does not
take in time are only counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import TypeNotSupported
from aioflow.core.wire.batch import decode_batch

if TYPE_CHECKING:
    from aioflow.cluster.gateways import OnMissed
    from aioflow.cluster.rpc import RpcConnection
    from aioflow.core.elements import RecordBatch
    from aioflow.core.scope import TapPlace
    from aioflow.core.wire.serializers import Codec

__all__ = ["SUBMITTER", "JobPeer", "JobPeers", "JobTaps", "Submitter"]

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


Watcher = Callable[["RecordBatch"], None]


@dataclass(slots=True, eq=False)
class Submitter:
    """The process that submitted a job and stays.

    `location` is empty if it runs no tasks; `taps`: tap id -> (place, may miss rows).
    """

    connection: RpcConnection
    location: str = ""
    taps: dict[int, tuple[TapPlace, bool]] = field(default_factory=dict)
    missed: dict[int, int] = field(default_factory=dict)
    """Rows of each subscription that were dropped because the process does not keep up."""


@dataclass(frozen=True, slots=True)
class _Watch:
    """A tap of a watcher in this process."""

    place: TapPlace
    watcher: Watcher
    on_missed: OnMissed | None
    may_miss: bool


class JobTaps:
    """The taps of one job. `submitter` is set while it is connected."""

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

        The returned futures are done once each TaskManager has the tap, or is gone.
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
        """Adds a subscription of the submitter. Returns as `watch` does."""
        if self.submitter is not None:
            self.submitter.taps[tap_id] = place, may_miss
        return self._peers.ask_taskmanagers("add_tap", self._job_id, place, tap_id, may_miss)

    def remove(self, place: TapPlace, tap_id: int) -> None:
        """Removes a subscription that `add` added."""
        if self.submitter is not None:
            self.submitter.taps.pop(tap_id, None)
        self._peers.ask_taskmanagers("remove_tap", self._job_id, place, tap_id)

    def notify(self, method: str, *args: Any) -> None:
        """Notifies the submitter if it is connected."""
        if self.submitter is not None:
            self.submitter.connection.notify(method, *args)

    def tapped(self, tap_id: int, content: bytes, rows: int, missed: int, refused: str) -> None:
        """Hands on a batch, or the reason why there is none."""
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
