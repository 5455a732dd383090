"""Sockets of the operating system, through whichever event loop runs. Part of `SystemHost`."""

from __future__ import annotations

import asyncio
import socket
import ssl as ssl_module
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioflow.core.host import Listener, ProtocolFactory, ProtocolT

__all__ = ["SystemNetwork"]

TLS_HANDSHAKE_TIMEOUT_S = 10.0
"""Maximum time for the TLS handshake of a peer, before its protocol is made.

The loops' own limit of a minute is too long for unauthorised peers.
"""


class SystemNetwork:
    """The `Network` of the real machine."""

    __slots__ = ()

    async def connect(
        self,
        protocol_factory: ProtocolFactory[ProtocolT],
        host: str,
        port: int,
        *,
        ssl: ssl_module.SSLContext | None = None,
        server_hostname: str | None = None,
    ) -> tuple[asyncio.Transport, ProtocolT]:
        # Both asyncio and uvloop switch Nagle's algorithm off themselves.
        return await asyncio.get_running_loop().create_connection(
            protocol_factory,
            host,
            port,
            ssl=ssl,
            server_hostname=server_hostname,
            ssl_handshake_timeout=None if ssl is None else TLS_HANDSHAKE_TIMEOUT_S,
        )

    async def listen(
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str,
        port: int,
        *,
        ssl: ssl_module.SSLContext | None = None,
    ) -> Listener:
        loop = asyncio.get_running_loop()
        timeout_s = None if ssl is None else TLS_HANDSHAKE_TIMEOUT_S
        return _SystemListener(
            await loop.create_server(
                protocol_factory, host, port, ssl=ssl, ssl_handshake_timeout=timeout_s
            )
        )


class _SystemListener:
    __slots__ = ("_server", "port")

    def __init__(self, server: asyncio.Server) -> None:
        self._server = server
        self.port: int = server.sockets[0].getsockname()[1]

    def close(self) -> None:
        server = self._server
        loop = server.get_loop()
        if not isinstance(loop, asyncio.SelectorEventLoop):
            server.close()
            return
        # A connection that asyncio has accepted gets its transport a turn later, and if the server
        # was closed meanwhile it is dropped with its socket open (python/cpython#109564). So
        # nothing more is accepted from now on, and what was accepted goes first.
        for listening in server.sockets:
            loop.remove_reader(listening)
            with suppress(
                OSError
            ):  # Not every system ends a listener so; there it ends a turn later.
                listening.shutdown(socket.SHUT_RDWR)
        loop.call_soon(server.close)
