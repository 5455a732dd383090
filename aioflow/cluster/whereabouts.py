"""Finding the leading JobManager, from addresses or from the lease in the cluster's directory.

A client asks any JobManager that it can reach: each knows the leader from the lease. A dead leader
stays in the lease until the lease expires. So connections to it may be refused for some seconds,
and the client must try again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aioflow.checkpoint.lease import current_holder
from aioflow.cluster.leadership import DirectoryLeases
from aioflow.cluster.rpc import Handlers, RpcConnection, connect_rpc
from aioflow.core.errors import AioflowError, Broken, Closed
from aioflow.core.wire.serializers import Codec

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.protocol.handshake import PeerRole

__all__ = [
    "DATA",
    "LEASE_DIRECTORY",
    "NobodyLeads",
    "Whereabouts",
    "connect_to_leader",
    "parse_address",
    "parse_addresses",
]

logger = logging.getLogger(__name__)

DATA = Path(".aioflow")
"""Default directory of a cluster's jobs, secret and logs, in the directory where it was started."""

LEASE_DIRECTORY = "leader"
"""Directory of the lease, inside the directory of a cluster."""

ANSWER_S = 5.0
"""Timeout for the question who leads. A slower JobManager is stopped or cut off."""

Address = tuple[str, int]


class NobodyLeads(AioflowError):
    """JobManagers can be reached, but none of them leads now.

    One will within seconds: ask again.
    """


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where to find JobManagers: their `addresses`, or `data`, the directory of their lease.

    One of the two is enough. This process must be able to read `data`.
    """

    addresses: tuple[Address, ...] = ()
    data: str | None = None

    async def known(self, host: Host) -> list[Address]:
        """Returns the addresses to ask, first the leader in the lease.

        Raises FileNotFoundError if there is none.
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
    where: Whereabouts,
    handlers: Handlers,
    on_closed: Callable[[RpcConnection], None],
) -> tuple[Address, RpcConnection]:
    """Connects to the leading JobManager. Returns its address and the connection.

    Raises OSError if no JobManager can be reached (TimeoutError: it does not answer), NobodyLeads
    if some can but none leads, Broken if one refuses the secret.
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
        raise NobodyLeads(
            f"no jobmanager leads now; {where} can be reached, try again in a few seconds"
        )
    raise broken or errors[0]


def parse_address(text: str) -> Address:
    """Parses HOST:PORT. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"expected HOST:PORT, got {text!r}")
    return host, int(port)


def parse_addresses(text: str) -> tuple[Address, ...]:
    """Parses one or more HOST:PORT, separated by commas. Raises ValueError."""
    return tuple(parse_address(one.strip()) for one in text.split(","))
