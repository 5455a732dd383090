"""The data plane of one process: a link to each other process with which it exchanges partitions.

The process that consumes connects to the process that produces, and connects again after a reset.
The first frame of a connection names its link. The side that connected closes an unused link, and
both sides forget it.

If a link has no connection for `GIVE_UP_S`, the consumer gives it up: every channel fails with
Broken, so the consuming tasks and the job fail. The producer only cleans up: it forgets the
consumer after `FORGET_S`, which is longer. A consumer whose process was paused may connect again
even later. It is then refused with Broken, and fails as well. So every lost consumer makes the job
fail, and no producer drops records of a consumer that continues.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import Broken, RemoteProtocolError
from aioflow.network.admission import WaitingRoom
from aioflow.network.connection import (
    HANDSHAKE_TIMEOUT_S,
    AuthenticatedConnection,
    close_all,
    fresh_nonce,
)
from aioflow.network.link import HEARTBEAT_S, HEARTBEATS_MISSED_MAX, Link, PartitionLookup
from aioflow.network.security import check_listen, security_of
from aioflow.protocol.framing import DATA_PLANE, NO_CHANNEL, Frame, FrameType
from aioflow.protocol.handshake import ClientHandshake, PeerRole, ServerHandshake

if TYPE_CHECKING:
    from aioflow.core.host import Host, Listener
    from aioflow.core.wire.serializers import Codec

__all__ = ["FORGET_S", "GIVE_UP_S", "UNUSED_S", "DataPlane"]

logger = logging.getLogger(__name__)

RECONNECT_S = (0.0, 0.02, 0.1, 0.3, 0.5)
"""Delays in seconds before each attempt to connect since the last progress. The last delay is
repeated.
"""

GIVE_UP_S = 30.0
"""Time in seconds without a connection after which the consumer fails the channels of a link.

This is longer than the delay of a process by a blocking call or by swapping. If a process ends, the
control connection reports this at once.
"""

FORGET_S = GIVE_UP_S + 1.5 * HEARTBEAT_S * (HEARTBEATS_MISSED_MAX + 1)
"""Time without a connection after which the producer drops the unread data of a link.

The consumer must give up before the producer does. It may notice a lost connection a whole
heartbeat cycle later than the producer.
"""

UNUSED_S = 5.0
"""Time in seconds for which a link without channels is kept, because a restarted job soon uses it
again.
"""

LINK_NAME_CHARS_MAX = 64


class DataPlane:
    """The data connections of this process: accepts connections of consumers, and connects to the
    processes whose partitions this process reads.
    """

    def __init__(
        self, host: Host, secret: bytes, codec: Codec, partitions: PartitionLookup
    ) -> None:
        self._host = host
        self._secret = secret
        self.codec = codec
        self._partitions = partitions
        self._listener: Listener | None = None
        self.waiting: WaitingRoom[AuthenticatedConnection] = WaitingRoom("the data plane")
        """Connections that have not named their link yet."""
        self._dialled: dict[tuple[str, int], Link] = {}
        self._accepted: dict[str, Link] = {}
        self._dialling: dict[Link, asyncio.Task[None]] = {}
        self._timers: dict[Link, asyncio.TimerHandle] = {}
        """Timers after which links end: accepted links without a connection, and unused links that
        this side connected.
        """
        self._closed = False

    async def listen(self, address: str = "127.0.0.1", port: int = 0) -> int:
        """Starts accepting data connections and returns the port.

        Raises NotAuthenticated for an unsafe address; see `check_listen`.
        """
        check_listen(self._host, address)
        tls = security_of(self._host).tls
        self._listener = await self._host.net.listen(
            self._accept, address, port, ssl=None if tls is None else tls.server
        )
        return self._listener.port

    def link_to(self, address: tuple[str, int]) -> Link:
        """Returns the link to the process that listens at `address`. If there is none, makes one
        and connects it.
        """
        link = self._dialled.get(address)
        if link is None:
            link = Link(
                self._host.ids.new("link"), self.codec, self._partitions, _Dialler(self, address)
            )
            self._dialled[address] = link
            self.dial(address, link)
        return link

    @property
    def links(self) -> list[Link]:
        """All links that are not forgotten: first the links that this side connected, then the
        others.
        """
        return [*self._dialled.values(), *self._accepted.values()]

    async def close(self) -> None:
        """Closes every link and the listener.

        Waits until all connections are closed. Idempotent.
        """
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        await cancel_and_wait(self._dialling.values())
        connections = [link.close() for link in self.links]
        await close_all(
            [
                connection
                for connection in [*connections, *self.waiting.close()]
                if connection is not None
            ]
        )
        self._dialled.clear()
        self._accepted.clear()

    # Dialling.

    def dial(self, address: tuple[str, int], link: Link) -> None:
        """Starts to connect `link` to `address`, unless this is in progress already."""
        if not self._closed and link not in self._dialling:
            self._dialling[link] = asyncio.get_running_loop().create_task(
                self._connect(address, link), name=f"dial {_text(address)}"
            )

    async def _connect(self, address: tuple[str, int], link: Link) -> None:
        """Tries to connect until an attempt succeeds. Fails the link if none has succeeded within
        `GIVE_UP_S`.
        """
        loop = asyncio.get_running_loop()
        error: Exception | None = None
        try:
            # A connection may be lost before this task is notified that it was made.
            while link.connection is None and not link.is_closed:
                deadline = link.silent_since + GIVE_UP_S
                if loop.time() >= deadline:
                    failure = Broken(
                        f"process at {_text(address)} cannot be reached for {GIVE_UP_S:g} s: "
                        f"{error!r}"
                    )
                    failure.__cause__ = error
                    logger.warning("%s", failure)
                    link.fail(failure)
                    self.forget(address, link)
                    return
                await asyncio.sleep(RECONNECT_S[min(link.attempts, len(RECONNECT_S) - 1)])
                link.attempts += 1
                try:
                    await self._try_connect(
                        address, link, min(loop.time() + HANDSHAKE_TIMEOUT_S, deadline)
                    )
                # After any error another try may succeed, and time is limited.
                except Exception as refused:  # noqa: BLE001
                    if error is None or loop.time() < deadline:
                        # The previous error says more than a try that was cut short.
                        error = refused
        finally:
            # Not in a callback, because from now on a lost connection must start the next attempt.
            del self._dialling[link]

    async def _try_connect(self, address: tuple[str, int], link: Link, deadline: float) -> None:
        opening = _Opening(link)
        handshake = ClientHandshake(self._secret, PeerRole.DATA, fresh_nonce(self._host))
        connection: AuthenticatedConnection | None = None
        tls = security_of(self._host).tls
        try:
            async with asyncio.timeout_at(deadline):
                _, connection = await self._host.net.connect(
                    partial(AuthenticatedConnection, handshake, DATA_PLANE, opening),
                    *address,
                    ssl=None if tls is None else tls.client,
                )
                await opening.opened
        except BaseException:
            if connection is not None:
                connection.abort()
            raise
        opening.hand_over(connection)

    def close_unused(self, address: tuple[str, int], link: Link) -> None:
        """Starts a timer that closes `link` after `UNUSED_S` if it is still unused then."""
        if not self._closed and not link.is_closed and link not in self._timers:
            timer = asyncio.get_running_loop().call_later(
                UNUSED_S, self._close_if_unused, address, link
            )
            self._timers[link] = timer

    def _close_if_unused(self, address: tuple[str, int], link: Link) -> None:
        self._timers.pop(link, None)
        if link.has_channels or link.is_closed:
            return
        self.forget(address, link)
        dialling = self._dialling.get(link)
        if dialling is not None:
            dialling.cancel()
        link.close()

    def forget(self, address: tuple[str, int], link: Link) -> None:
        """Forgets `link`, which this side connected, so that the next `link_to(address)` makes a
        new link.
        """
        if self._dialled.get(address) is link:
            del self._dialled[address]

    # Accepting.

    def _accept(self) -> asyncio.BaseProtocol:
        handshake = ServerHandshake(
            self._secret, fresh_nonce(self._host), frozenset([PeerRole.DATA])
        )
        return AuthenticatedConnection(handshake, DATA_PLANE, self, self.waiting)

    def on_connected(self, connection: AuthenticatedConnection) -> None:
        """Does nothing, because the first frame of the authenticated peer must come first; it names
        the link.
        """

    def on_frames(self, connection: AuthenticatedConnection, frames: list[Frame]) -> None:
        hello, *rest = frames
        name = hello.body.decode("ascii", "replace")
        if (
            hello.type is not FrameType.HELLO
            or not name.isalnum()
            or len(name) > LINK_NAME_CHARS_MAX
        ):
            raise RemoteProtocolError(
                f"a data connection began with {hello.type.name}, expected HELLO with the name of "
                "a link"
            )
        link = self._accepted.get(name)
        if link is None:
            link = self._accepted[name] = Link(name, self.codec, self._partitions, self)
        self._stop_timer(link)
        link.carry_on(connection)
        if rest:
            link.on_frames(connection, rest)

    def on_writable(self, connection: AuthenticatedConnection) -> None:
        """Does nothing, because no data is written before the peer's HELLO."""

    def on_connection_lost(
        self, connection: AuthenticatedConnection, error: Exception | None
    ) -> None:
        """Does nothing, because the waiting room handles connections that end before their
        HELLO.
        """

    # LinkOwner of accepted links.

    def on_link_lost(self, link: Link) -> None:
        """Starts a timer for the peer to connect again.

        A link without channels is forgotten at once.
        """
        if link.is_closed or not link.has_channels:
            self._forget_accepted(link)
        elif not self._closed:
            self._timers[link] = asyncio.get_running_loop().call_later(
                FORGET_S, self._give_up, link
            )

    def on_link_unused(self, link: Link) -> None:
        """Does nothing, because the peer has connected the link and so closes it."""

    def _give_up(self, link: Link) -> None:
        self._forget_accepted(link)
        link.fail(Broken(f"the peer of link {link.name[:8]} has not come back for {FORGET_S:g} s"))

    def _forget_accepted(self, link: Link) -> None:
        self._stop_timer(link)
        if self._accepted.get(link.name) is link:
            del self._accepted[link.name]

    def _stop_timer(self, link: Link) -> None:
        timer = self._timers.pop(link, None)
        if timer is not None:
            timer.cancel()


class _Dialler:
    """The `LinkOwner` of a link that this process has connected to `address`."""

    __slots__ = ("_address", "_data_plane")

    def __init__(self, data_plane: DataPlane, address: tuple[str, int]) -> None:
        self._data_plane = data_plane
        self._address = address

    def on_link_lost(self, link: Link) -> None:
        if link.is_closed:
            self._data_plane.forget(self._address, link)
        else:
            self._data_plane.dial(self._address, link)

    def on_link_unused(self, link: Link) -> None:
        self._data_plane.close_unused(self._address, link)


class _Opening:
    """The owner of a connection until its handshake is done.

    The dialling task gives the connection to the link only after the handshake. If connecting is
    cancelled, uvloop closes the transport without a call of `connection_lost`, even after the
    handshake. A link that had the connection already would then keep a dead connection for ever.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lost: Broken | None = None
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def hand_over(self, connection: AuthenticatedConnection) -> None:
        """Gives `connection` to the link. Raises Broken if the connection has ended meanwhile."""
        if self._lost is not None:
            raise self._lost
        if self._link.is_closed:
            connection.abort()
            return
        assert connection.encoder is not None, "it is open"
        connection.write(
            [connection.encoder.encode(FrameType.HELLO, NO_CHANNEL, 0, self._link.name.encode())]
        )
        self._link.carry_on(connection)

    def on_connected(self, connection: AuthenticatedConnection) -> None:
        if not self.opened.done():
            self.opened.set_result(None)

    def on_frames(self, connection: AuthenticatedConnection, frames: list[Frame]) -> None:
        raise RemoteProtocolError("frames came before this side said which link it carries on")

    def on_writable(self, connection: AuthenticatedConnection) -> None:
        """Does nothing, because the link does not write to the connection yet."""

    def on_connection_lost(
        self, connection: AuthenticatedConnection, error: Exception | None
    ) -> None:
        self._lost = Broken(f"the connection ended in the handshake: {error!r}")
        if not self.opened.done():
            self.opened.set_exception(self._lost)
            self.opened.exception()  # Marks the error as retrieved; there may be no waiter.


def _text(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
