"""Limits the connections that are not authenticated yet, and logs refused connections.

Each listener allows only a limited number of unauthenticated connections at a time, so that
strangers cost little. The first refused connection is logged at once. Later ones are counted in at
most one line a minute, so that a flood of connections shows in the log but does not flood it.
`tune` sets the socket options of connections between the processes of a cluster.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Generic, Protocol, TypeVar

from aioflow.core.errors import NotAuthenticated

__all__ = [
    "EVERY_S",
    "SILENCE_MS",
    "WAITING_MAX",
    "Guest",
    "Refusals",
    "WaitingRoom",
    "peer_of",
    "tune",
]

EVERY_S = 60.0


class Refusals:
    """Counts the refused connections of one listener, and logs them at a limited rate.

    `subject` names the listener in log messages, as in "the monitoring endpoint".
    """

    __slots__ = ("_logger", "_silent", "_silent_until_s", "_subject", "total")

    def __init__(self, logger: logging.Logger, subject: str) -> None:
        self._logger = logger
        self._subject = subject
        self._silent = 0
        self._silent_until_s = float("-inf")
        self.total = 0
        """Number of connections that were refused so far."""

    def add(self, peer: str, reason: object) -> None:
        """Counts a refused connection.

        Logs it, with the number of refusals since the last log line, unless that line is less than
        a minute old.
        """
        self.total += 1
        now = asyncio.get_running_loop().time()
        if now < self._silent_until_s:
            self._silent += 1
            return
        self._silent_until_s = now + EVERY_S
        more, self._silent = self._silent, 0
        self._logger.warning(
            "%s refused a connection from %s: %s%s",
            self._subject,
            peer,
            reason,
            _since(more, self.total),
        )

    def close(self) -> None:
        """Logs the number of refused connections that are not logged yet."""
        more, self._silent = self._silent, 0
        if more:
            self._logger.warning(
                "%s refused %d more connections, %d in all", self._subject, more, self.total
            )


def _since(more: int, total: int) -> str:
    return f"; {more} more were refused since the last line, {total} in all" if more else ""


logger = logging.getLogger(__name__)

WAITING_MAX = 64
"""Maximum number of connections to one listener that are not authenticated yet."""


class Guest(Protocol):
    """The methods that the waiting room uses of an accepted connection that is not authenticated
    yet.
    """

    @property
    def peer(self) -> str: ...
    def abort(self, error: Exception | None = None) -> None: ...


GuestT = TypeVar("GuestT", bound=Guest)


class WaitingRoom(Generic[GuestT]):
    """The accepted connections of a listener that have not sent their first frame yet.

    If there are more than `WAITING_MAX`, the oldest is rejected. An honest peer sends its first
    frame within milliseconds, so a stranger who fills the room cannot keep honest peers out for
    long.
    """

    __slots__ = ("_is_closed", "_refusals", "_waiting")

    def __init__(self, subject: str) -> None:
        """Makes an empty room. `subject` names the listener in warnings."""
        self._waiting: dict[GuestT, None] = {}
        self._is_closed = False
        self._refusals = Refusals(logger, subject)

    @property
    def rejected(self) -> int:
        """Number of connections rejected so far."""
        return self._refusals.total

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, connection: GuestT) -> None:
        self._waiting[connection] = None
        if self._is_closed:
            connection.abort(NotAuthenticated("the listener was closed"))
        elif len(self._waiting) > WAITING_MAX:
            oldest = next(iter(self._waiting))
            # Removed now, because `connection_lost` comes only in the next loop turn, when more
            # may have connected.
            self.reject(
                oldest,
                NotAuthenticated(
                    f"it had to make room: {WAITING_MAX} newer connections were waiting"
                ),
            )
            oldest.abort()

    def leave(self, connection: GuestT) -> None:
        """Removes a connection that is authenticated and has sent a frame."""
        self._waiting.pop(connection, None)

    def reject(self, connection: GuestT, error: Exception | None) -> None:
        """Counts and logs a connection that ended too early. Has no effect if the connection is not
        in the room.
        """
        if connection in self._waiting:
            del self._waiting[connection]
            if not self._is_closed:
                self._refusals.add(connection.peer, error or "it ended before it had proved itself")

    def close(self) -> list[GuestT]:
        """Aborts the waiting connections and returns them. Later connections are aborted too."""
        self._is_closed = True
        self._refusals.close()
        waiting = list(self._waiting)
        for connection in waiting:
            connection.abort()
        return waiting


WRITE_BUFFER_BYTES = 1 << 20
"""Number of bytes in the transport's write buffer from which on the owner of the connection must
pause.
"""

SILENCE_MS = 10_000
"""Time in ms after which TCP gives up on a peer that acknowledges nothing."""


def peer_of(transport: asyncio.BaseTransport | None) -> str:
    """Returns the address of the peer, for log and error messages."""
    name = None if transport is None else transport.get_extra_info("peername")
    return "unknown" if name is None else f"{name[0]}:{name[1]}"


def tune(transport: asyncio.Transport) -> None:
    """Disables Nagle's algorithm, and limits the time for which a peer may leave data
    unacknowledged.

    The limit is not set for connections on one machine. The kernel loses no data there, and closes
    the sockets of a dead process. Has no effect on a simulated transport, which has no socket.
    """
    transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
    sock = transport.get_extra_info("socket")
    if sock is None:
        return
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT") and sock.getsockname()[0] != sock.getpeername()[0]:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
    except OSError as error:  # The peer is gone already; `connection_lost` reports it.
        logger.debug("options of a new connection cannot be set: %s", error)
