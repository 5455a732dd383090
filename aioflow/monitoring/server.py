"""Serves an endpoint at its own address, beside a job or a JobManager."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from aioflow.core.aio import close_within
from aioflow.monitoring.adapters import monitored
from aioflow.monitoring.app import make_app
from aioflow.monitoring.monitor import Monitor
from aioflow.monitoring.options import parse_monitor_address, served_options
from aioflow.network.door import Door

__all__ = ["serving"]

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 30.0
SHUTDOWN_S = 1.0
"""Maximum time for answers under way when the endpoint ends. Streams of events would never end by
themselves.
"""

CLOSE_S = 10.0


@asynccontextmanager
async def serving(what: Any, address: str, given: Mapping[str, Any]) -> AsyncIterator[str]:
    """Serves `what`, a job or a JobManager, inside the block; yields the URL.

    Raises OSError, naming the address, if the server cannot listen there.
    """
    options = served_options(address, given)
    host, port = parse_monitor_address(address)
    monitor = Monitor(monitored(what), options)
    door = monitor.door = Door(options.connections_max, "the monitoring endpoint")
    runner = web.AppRunner(
        make_app(monitor),
        access_log=None,
        logger=door.complaints,
        handle_signals=False,
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=SHUTDOWN_S,
        handler_cancellation=True,
    )
    await runner.setup()
    try:
        assert runner.server is not None
        door.open(runner.server)
        try:
            listener = await monitor.host.net.listen(door, host, port)
        except OSError as error:
            raise _refused(error, address) from error
        try:
            shown = f"[{host}]" if ":" in host else host
            url = f"http://{shown}:{listener.port}"
            logger.info("monitoring at %s", url)
            yield url
        finally:
            listener.close()
    finally:
        await close_within(runner.cleanup(), CLOSE_S, what="the monitoring endpoint")
        door.close()


def _refused(error: OSError, address: str) -> OSError:
    """Returns the error of an address that the server cannot listen at, naming the option to
    change.
    """
    code = error.errno or 0
    reason = (
        os.strerror(code) if code > 0 else error.strerror or str(error)
    )  # Host names that are not found have special error numbers.
    remedy = "; take another port, or port 0 for any free one" if code == errno.EADDRINUSE else ""
    return OSError(code, f"monitor={address!r} cannot be listened at: {reason}{remedy}")
