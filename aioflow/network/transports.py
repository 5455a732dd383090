"""Socket options for connections between the processes of a cluster."""

from __future__ import annotations

import asyncio
import logging
import socket

__all__ = ["SILENCE_MS", "peer_of", "tune"]

logger = logging.getLogger(__name__)

WRITE_BUFFER_BYTES = 1 << 20
"""Number of bytes that may wait in the transport before the owner must pause."""

SILENCE_MS = 10_000
"""Time after which TCP gives up on a peer that acknowledges nothing."""


def peer_of(transport: asyncio.BaseTransport | None) -> str:
    """Returns the address of the peer, for messages."""
    name = None if transport is None else transport.get_extra_info("peername")
    return "unknown" if name is None else f"{name[0]}:{name[1]}"


def tune(transport: asyncio.Transport) -> None:
    """Disables Nagle's algorithm, and limits the time that a peer may leave data unacknowledged.

    The limit does not apply on one machine. No data is lost there: data waits for a program that
    does not read now, and a dead program ends its sockets. A simulated transport has no socket.
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
