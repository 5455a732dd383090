"""One TCP connection between two processes of a cluster, and its handshake.

Both sides prove that they know the cluster's secret. After this handshake, received bytes are
decoded into frames for the owner of the connection. Nothing is parsed before the handshake is done.
A peer that connects must finish the handshake and send its first frame within a few seconds. Until
then its connection is in a `WaitingRoom`, which holds a limited number of connections. The owner
calls `write` while `is_writable` is True. It should combine small writes, because the connection
does not. Between machines and without TLS, every frame carries a MAC of the session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

from aioflow.core.aio import wait_all
from aioflow.core.errors import NotAuthenticated, ProtocolError
from aioflow.network.admission import peer_of, tune
from aioflow.network.security import is_loopback
from aioflow.protocol.framing import Frame, FrameDecoder, FrameEncoder, FrameType
from aioflow.protocol.handshake import (
    ClientHandshake,
    Handshaken,
    ServerHandshake,
    Side,
    direction_key,
)

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.network.admission import WaitingRoom

__all__ = [
    "HANDSHAKE_TIMEOUT_S",
    "AuthenticatedConnection",
    "ConnectionOwner",
    "close_all",
    "fresh_nonce",
    "fresh_secret",
]

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
"""Maximum time of a handshake in seconds.

A busy machine may need a second. A port scanner cannot keep a connection open for longer than this.
"""

CLOSE_TIMEOUT_S = 2.0
"""Maximum time in seconds for which closing waits until all data is written."""


class ConnectionOwner(Protocol):
    """The owner of a connection, which handles its frames.

    The connection makes all calls from the event loop, and `on_frames` and `on_writable` only after
    `on_connected`.
    """

    def on_connected(self, connection: AuthenticatedConnection) -> None: ...
    def on_frames(self, connection: AuthenticatedConnection, frames: list[Frame]) -> None:
        """Handles received frames, in order. If it raises a ProtocolError, the connection ends."""

    def on_writable(self, connection: AuthenticatedConnection) -> None: ...
    def on_connection_lost(
        self, connection: AuthenticatedConnection, error: Exception | None
    ) -> None:
        """Handles the end of the connection. Called once, even if the connection ended before
        `on_connected`.
        """


class AuthenticatedConnection(asyncio.Protocol):
    """A connection that exchanges frames only after both sides are authenticated.

    `accepted` are the frame types that the peer may send. `handshake` determines which side this
    is. A server passes the `room` in which its new connections wait.
    """

    def __init__(
        self,
        handshake: ClientHandshake | ServerHandshake,
        accepted: frozenset[FrameType],
        owner: ConnectionOwner,
        room: WaitingRoom[AuthenticatedConnection] | None = None,
    ) -> None:
        self._handshake = handshake
        self._accepted = accepted
        self.owner = owner
        self._room = room
        self._transport: asyncio.Transport | None = None
        self._decoder: FrameDecoder | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None
        self.encoder: FrameEncoder | None = None
        """Encoder of the frames that this side sends; None before the handshake is done."""
        self.is_writable = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that is done when the connection has ended and its owner was notified."""

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses.
        transport = self._transport = cast("asyncio.Transport", transport)
        tune(transport)
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, self._on_late)
        if isinstance(self._handshake, ClientHandshake):
            self._send(self._handshake.start())
        if self._room is not None:
            self._room.enter(self)

    def data_received(self, data: bytes) -> None:
        self.bytes_received += len(data)
        try:
            decoder = self._decoder
            if decoder is None:
                data = self._prove(data)
                decoder = self._decoder
            if data and decoder is not None:
                frames = decoder.receive(data)
                if frames:
                    if self._timer is not None:
                        self._let_in()
                    self.owner.on_frames(self, frames)
        except NotAuthenticated as error:
            self.abort(error)
        except ProtocolError as error:
            if self._timer is None:
                logger.warning("the connection with %s is closed: %s", self.peer, error)
            self.abort(error)

    def eof_received(self) -> None:
        """Called by asyncio when the peer has ended its side. Returning None makes the transport
        close itself.
        """

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        if self._decoder is not None:
            self.is_writable = True
            self.owner.on_writable(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_writable = False
        self._cancel_timer()
        error = self._error or exc
        if self._room is not None:
            self._room.reject(self, error)
        if not self.closed.done():
            self.closed.set_result(None)
        self.owner.on_connection_lost(self, error)

    # For the owner.

    @property
    def peer(self) -> str:
        """Address of the peer, for log and error messages."""
        return peer_of(self._transport)

    @property
    def _is_protected(self) -> bool:
        """Whether TLS or the loopback interface protects data in transit, so that frames need no
        MAC.
        """
        transport = self._transport
        if transport is None:
            return False
        return transport.get_extra_info("ssl_object") is not None or is_loopback(
            transport.get_extra_info("peername")
        )

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Writes the pieces in order.

        Drops them if the connection has ended; `on_connection_lost` reports the end.
        """
        self._send(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def close(self) -> None:
        """Closes the connection once all data is written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self, error: Exception | None = None) -> None:
        """Closes the connection at once. `error` is passed to `on_connection_lost`."""
        self._error = self._error or error
        if self._transport is not None:
            self._transport.abort()

    def _send(self, data: bytes | memoryview) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self.bytes_sent += len(data)
            self._transport.write(data)

    # The handshake.

    def _prove(self, data: bytes) -> bytes:
        """Feeds received bytes to the handshake.

        Returns the bytes in `data` that follow the handshake; b"" while the handshake is not done.
        """
        answer = self._handshake.receive(data)
        if answer:
            self._send(answer)
        done = self._handshake.done
        if done is None:
            return b""
        self._open(done)
        return done.leftover

    def _open(self, done: Handshaken) -> None:
        own, peer = (
            (Side.CLIENT, Side.SERVER)
            if isinstance(self._handshake, ClientHandshake)
            else (Side.SERVER, Side.CLIENT)
        )
        keyed = not self._is_protected
        self.encoder = FrameEncoder(direction_key(done.session_key, own) if keyed else None)
        self._decoder = FrameDecoder(
            self._accepted, direction_key(done.session_key, peer) if keyed else None
        )
        self.is_writable = True
        if own is Side.CLIENT:  # The server leaves the room only after a first frame.
            self._cancel_timer()
        self.owner.on_connected(self)

    def _let_in(self) -> None:
        self._cancel_timer()
        if self._room is not None:
            self._room.leave(self)

    def _on_late(self) -> None:
        missing = "finish the handshake" if self._decoder is None else "say a first frame"
        self.abort(
            NotAuthenticated(f"{self.peer} did not {missing} within {HANDSHAKE_TIMEOUT_S:g} s")
        )

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def close_all(connections: Sequence[AuthenticatedConnection]) -> None:
    """Closes all connections once their data is written, and waits until they are closed.

    Aborts the connections that are still open after `CLOSE_TIMEOUT_S`.
    """
    for connection in connections:
        connection.close()
    closed = [connection.closed for connection in connections]
    if not await wait_all(closed, timeout_s=CLOSE_TIMEOUT_S):
        for connection in connections:
            connection.abort()
        await wait_all(closed)


def fresh_nonce(host: Host) -> bytes:
    """Returns 32 bytes that were never used before.

    The bytes are two ids that `host` has made; they are random, except in the simulation.
    """
    return bytes.fromhex(host.ids.new("nonce") + host.ids.new("nonce"))


def fresh_secret(host: Host) -> bytes:
    """Returns a new secret of 32 bytes, for processes that are started together and share it."""
    return bytes.fromhex(host.ids.new("secret") + host.ids.new("secret"))
