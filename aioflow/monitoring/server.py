"""Serves an endpoint at an address of its own, beside a job or a JobManager."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web

from aioflow.core.aio import close_within
from aioflow.monitoring.adapters import monitored
from aioflow.monitoring.app import make_app
from aioflow.monitoring.monitor import Monitor
from aioflow.monitoring.options import parse_monitor_address, served_options

if TYPE_CHECKING:
    from aiohttp.web_protocol import RequestHandler

__all__ = ["serving"]

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 30.0
SHUTDOWN_S = 1.0
"""How long answers under way may take when the endpoint ends; streams of events would never end by themselves."""

CLOSE_S = 10.0

SILENCE_S = 20.0
"""A connection on which no request was whole for so long is closed: whoever sends a byte a minute would keep it for ever."""

CHECK_S = 5.0

FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


@asynccontextmanager
async def serving(what: Any, address: str, given: Mapping[str, Any]) -> AsyncIterator[str]:
    """Serve `what` inside the block; yields the URL. Raises OSError if the address cannot be listened at, naming it."""
    options = served_options(address, given)
    host, port = parse_monitor_address(address)
    monitor = Monitor(monitored(what), options)
    runner = web.AppRunner(
        make_app(monitor),
        access_log=None,
        handle_signals=False,
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=SHUTDOWN_S,
        handler_cancellation=True,
    )
    await runner.setup()
    try:
        assert runner.server is not None
        door = _Door(runner.server, monitor)
        try:
            listener = await monitor.host.net.listen(door.open, host, port)
        except OSError as error:
            raise _refused(error, address) from error
        sweeper = asyncio.get_running_loop().create_task(door.sweep(), name="monitor connections")
        try:
            shown = f"[{host}]" if ":" in host else host
            url = f"http://{shown}:{listener.port}"
            logger.info("monitoring at %s", url)
            yield url
        finally:
            listener.close()
            sweeper.cancel()
    finally:
        await close_within(runner.cleanup(), CLOSE_S, what="the monitoring endpoint")


def _refused(error: OSError, address: str) -> OSError:
    """The error of an address that cannot be listened at, with the option that named it."""
    code = error.errno or 0
    reason = os.strerror(code) if code > 0 else error.strerror or str(error)  # Names that are not found have numbers of their own.
    remedy = "; take another port, or port 0 for any free one" if code == errno.EADDRINUSE else ""
    return OSError(code, f"monitor={address!r} cannot be listened at: {reason}{remedy}")


class _Door:
    """Makes a protocol for each connection, and closes those that ask for nothing."""

    def __init__(self, server: web.Server, monitor: Monitor) -> None:
        self._server = server
        self._monitor = monitor
        self._idle_since: dict[RequestHandler, float] = {}

    def open(self) -> asyncio.BaseProtocol:
        if len(self._server.connections) >= self._monitor.options.connections_max:
            return _TurnedAway()
        return self._server()

    async def sweep(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_S)
            now, known = loop.time(), self._idle_since
            idle = [one for one in self._server.connections if one not in self._monitor.answering]
            self._idle_since = {one: known.get(one, now) for one in idle}
            for connection, since in self._idle_since.items():
                if now - since >= SILENCE_S:
                    connection.force_close()


class _TurnedAway(asyncio.Protocol):
    """For a connection too many: says so, and closes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(FULL)
        transport.close()
