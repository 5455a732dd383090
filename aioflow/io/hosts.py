"""Provides a host (access to files and the executor) for work outside of a task, such as finding
splits and committing.

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
    """Yields `host` and leaves it open. Without one, yields a new `SystemHost` and closes it
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
