"""Leader election, and how a client finds the leader.

One of several candidates leads while it holds the lease (`checkpoint.lease`). A client asks any
JobManager that it can reach, because each JobManager knows the leader from the lease. Or the client
reads the lease in the cluster's directory itself. A dead leader stays in the lease until the lease
expires. So connections to the leader may be refused for some seconds, and the client must try
again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioflow.checkpoint.lease import (
    Lease,
    LeaseKeeper,
    LeaseOptions,
    LeaseStore,
    ObjectLeases,
    current_holder,
)
from aioflow.checkpoint.objects import DirectoryObjects
from aioflow.cluster.rpc import Handlers, RpcConnection, connect_rpc
from aioflow.core.aio import cancel_and_wait, wait_first
from aioflow.core.errors import AioflowError, Broken, Closed, StaleLeader
from aioflow.core.wire.serializers import Codec

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.protocol.handshake import PeerRole

__all__ = [
    "DATA",
    "LEASE_DIRECTORY",
    "DirectoryLeases",
    "LeaderElection",
    "LeaderRetrieval",
    "Leadership",
    "NoLeader",
    "connect_to_leader",
    "parse_address",
    "parse_addresses",
]

logger = logging.getLogger(__name__)


class Leadership(Lease):
    """The term of one leader. Call `check` at every step that is visible to others."""

    def check(self) -> None:
        """Raises StaleLeader unless this candidate leads at this moment.

        Once this method has raised, it raises for ever, even if a renewal in progress still
        succeeds. The reason is that the caller has stopped its work for good. Another leader does
        the remaining work.
        """
        if not self.is_valid:
            self.revoke()
            candidate = self.info.holder.partition("\n")[0]
            raise StaleLeader(
                f"{candidate} led with fencing token {self.token} and could not renew its lease: "
                "another may lead now, stop acting"
            )


class DirectoryLeases(ObjectLeases):
    """A LeaseStore in a directory that holds nothing else."""

    def __init__(self, host: Host, path: str) -> None:
        super().__init__(DirectoryObjects(host, path))


class LeaderElection:
    """A candidate for the leadership. `address` is the address that it publishes as leader."""

    def __init__(
        self, host: Host, leases: LeaseStore, address: str, options: LeaseOptions | None = None
    ) -> None:
        self._host = host
        self._leases = leases
        self._address = address
        self._options = options or LeaseOptions()
        self._keeper = LeaseKeeper(host, leases, address, address, self._options)
        self.candidate = self._keeper.candidate
        """Identifies this run of the candidate; a restarted candidate has another value."""

    async def run(
        self,
        lead: Callable[[Leadership], Coroutine[Any, Any, object]],
        given_up: asyncio.Event | None = None,
    ) -> None:
        """Contends for the lease until `given_up` is set, and runs `lead(leadership)` while it
        leads.

        `lead` is cancelled when the lease is lost, and then has `LeaseOptions.stop_s` to end. `run`
        returns when `lead` returns. An error of `lead` is raised after the lease was released. If
        `lead` raises StaleLeader, `run` contends again.
        """
        given_up = given_up or asyncio.Event()
        while (leadership := await self._win(given_up)) is not None:
            logger.info("%s leads with fencing token %d", self._address, leadership.token)
            work = asyncio.get_running_loop().create_task(
                lead(leadership), name=f"leader {leadership.token}"
            )
            keeper = asyncio.get_running_loop().create_task(
                self._keeper.keep(leadership), name=f"lease {leadership.token}"
            )
            errors: list[BaseException] = []
            try:
                await wait_first([work, keeper])
                over = work.done()
            finally:
                errors += await cancel_and_wait([work])
                errors += await cancel_and_wait([keeper])
                await self._keeper.resign(leadership)
            # StaleLeader means that the work noticed the lost lease and stopped as it should.
            errors = [error for error in errors if not isinstance(error, StaleLeader)]
            if errors:
                raise errors[0]
            if over and not work.cancelled() and work.exception() is None:
                return
            logger.warning(
                "%s lost its lease with fencing token %d", self._address, leadership.token
            )

    async def _win(self, given_up: asyncio.Event) -> Leadership | None:
        """Waits until this candidate leads. Returns None if `given_up` was set first."""
        options, clock = self._options, self._host.clock
        seen, since, before = -1, 0.0, ""
        ending = asyncio.get_running_loop().create_task(given_up.wait(), name="candidate")
        try:
            while not given_up.is_set():
                try:
                    head = await current_holder(self._leases)
                    now = clock.monotonic()
                    if head is not None and head.number != seen:
                        seen, since = head.number, now
                    is_free = (
                        head is None
                        or head.address is None
                        or head.holder == self.candidate
                        or self._keeper.has_ended(head)
                    )
                    if is_free or now - since >= options.take_over_s:
                        leadership = await self._keeper.take(
                            1 if head is None else head.number + 1, Leadership
                        )
                        if leadership is not None:
                            return leadership
                    elif head is not None and head.address is not None and head.address != before:
                        before = head.address
                        logger.info("%s stands by: %s leads", self._address, before)
                    self._keeper.works()
                except OSError as error:
                    self._keeper.failed(error)
                # Randomised, so that candidates do not all try at the same moment.
                await wait_first(
                    [ending], timeout_s=options.renew_s * self._host.rng.uniform(0.25, 0.5)
                )
            return None
        finally:
            await cancel_and_wait([ending])


DATA = Path(".aioflow")
"""Default directory of a cluster's jobs, secret and logs, in the directory where it was started."""

LEASE_DIRECTORY = "leader"
"""Directory of the lease, inside the directory of a cluster."""

ANSWER_S = 5.0
"""Timeout for the question to a JobManager which one leads. A JobManager that takes longer is
stopped or cut off."""

Address = tuple[str, int]


class NoLeader(AioflowError):
    """JobManagers can be reached, but none of them leads now.

    A JobManager will lead within seconds, so ask again.
    """


@dataclass(frozen=True, slots=True)
class LeaderRetrieval:
    """Where to find JobManagers: at their `addresses`, or by `data`, the cluster's directory with
    the lease.

    One of the two is enough. This process must be able to read `data`.
    """

    addresses: tuple[Address, ...] = ()
    data: str | None = None

    async def known(self, host: Host) -> list[Address]:
        """Returns the addresses of JobManagers to ask, beginning with the leader that the lease
        names.

        Raises FileNotFoundError if no address is known.
        """
        found: dict[Address, None] = {}
        if self.data is not None:
            info = await current_holder(DirectoryLeases(host, f"{self.data}/{LEASE_DIRECTORY}"))
            if info is not None and info.address is not None:
                found[parse_address(info.address)] = None
        found.update(dict.fromkeys(self.addresses))
        if not found:
            raise FileNotFoundError(
                f"no jobmanager has led in {self.data} yet: start one with aioflow jobmanager "
                f"--data {self.data}"
            )
        return list(found)

    def __str__(self) -> str:
        return (
            ", ".join("{}:{}".format(*address) for address in self.addresses)
            or f"the directory {self.data}"
        )


async def connect_to_leader(
    host: Host,
    secret: bytes,
    role: PeerRole,
    where: LeaderRetrieval,
    handlers: Handlers,
    on_closed: Callable[[RpcConnection], None],
) -> tuple[Address, RpcConnection]:
    """Connects to the leading JobManager. Returns its address and the connection.

    Raises OSError if no JobManager can be reached (TimeoutError if it does not answer). Raises
    NoLeader if some can be reached but none leads, and Broken if one refuses the secret.
    """
    chosen: RpcConnection | None = None

    def closed(connection: RpcConnection) -> None:
        if connection is chosen:
            on_closed(connection)

    ask, asked, errors = await where.known(host), set[Address](), list[Exception]()
    answered = False
    for address in ask:  # Grows by the addresses that JobManagers name.
        if address in asked:
            continue
        asked.add(address)
        connection: RpcConnection | None = None
        try:
            async with asyncio.timeout(ANSWER_S):
                connection = await connect_rpc(
                    host, secret, Codec(), role, address, handlers, closed
                )
                leader = await connection.call("leader")
        except TimeoutError:
            if connection is not None:
                connection.abort(Closed("this jobmanager does not answer"))
            silence = (
                "the jobmanager at {}:{} does not answer: it is stopped, cut off, overloaded or "
                "none"
            )
            errors.append(TimeoutError(silence.format(*address)))
            continue
        except (OSError, Broken) as error:
            errors.append(error)
            continue
        answered = True
        if leader == "here":
            chosen = connection
            return address, connection
        connection.abort(Closed("this jobmanager does not lead"))
        if leader:
            ask.append(parse_address(leader))
    broken = next((error for error in errors if isinstance(error, Broken)), None)
    if answered:
        raise NoLeader(
            f"no jobmanager leads now; {where} can be reached, try again in a few seconds"
        )
    raise broken or errors[0]


def parse_address(text: str) -> Address:
    """Parses the text HOST:PORT. Raises ValueError if it is malformed."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"expected HOST:PORT, got {text!r}")
    return host, int(port)


def parse_addresses(text: str) -> tuple[Address, ...]:
    """Parses one or more HOST:PORT, separated by commas. Raises ValueError if one is malformed."""
    return tuple(parse_address(one.strip()) for one in text.split(","))
