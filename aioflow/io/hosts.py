"""The host for work outside of a task: finding splits, committing.

The caller of a connector may lend its own host.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aioflow.core.system_host import SystemHost

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["lent"]


@asynccontextmanager
async def lent(host: Host | None) -> AsyncIterator[Host]:
    """Yields `host` and leaves it open, or without one a new `SystemHost` that is closed
    afterwards.
    """
    if host is not None:
        yield host
        return
    machine = SystemHost()
    try:
        yield machine
    finally:
        await machine.close()
