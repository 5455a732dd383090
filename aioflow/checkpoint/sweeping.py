"""Removes old files that crashed jobs and tasks left in the store of a flow.

Nothing that a completed checkpoint refers to is ever removed. Nothing at all is removed when a
completed checkpoint cannot be read, because its references are not known then.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from aioflow.checkpoint.completed import files_of
from aioflow.checkpoint.store import METADATA, FlowStore
from aioflow.core.errors import RestoreError

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["GRACE_MS", "sweep", "sweep_state"]

logger = logging.getLogger(__name__)

GRACE_MS = 10 * 60 * 1000
"""Minimum age of a file before it is removed.

A job that lost its lease may still write, and must not lose its files meanwhile.
"""


async def sweep(
    store: FlowStore,
    host: Host,
    *,
    retain: int,
    keep: Collection[int] = (),
    grace_ms: int = GRACE_MS,
) -> list[str]:
    """Removes what crashed jobs left, and returns the names of the removed files.

    The caller holds the lease, and its job has not written anything yet. Removed are:

    * checkpoints beyond the `retain` newest, except those numbered in `keep`,
    * checkpoints of jobs that are over,
    * state without references,
    * savepoints that were never completed, and unfinished files.

    Completed savepoints stay for ever. Checkpoints that a job left behind when it went back to an
    older one do not count among the newest. These checkpoints stay until that job has completed
    another checkpoint. If the store refuses to remove something, a later call tries again.
    """
    objects = store.objects
    before = host.clock.wall_ms() - grace_ms
    removed: list[str] = []

    async def remove(names: list[str]) -> None:
        removed.extend(await _remove_old(store, names, before))

    try:
        await objects.sweep(before)
        numbers = await store.checkpoints()
        finished = await store.finished()
        left = dict.fromkeys(await store.left_behind())
        going = [number for number in numbers if number not in left]
        stays = {*going[-retain:], *(number for number in left if not going or number > going[-1])}
        over = [
            number
            for number in numbers
            if number not in keep and (number <= finished or number not in stays)
        ]
        await remove([f"checkpoints/{number}/{METADATA}" for number in over])
        removed += await _remove_state(store, before)
        saved: dict[str, list[str]] = {}
        for name in await objects.names("savepoints"):
            saved.setdefault(name.split("/")[1], []).append(name)
        for savepoint, names in saved.items():
            if f"savepoints/{savepoint}/{METADATA}" not in names:
                await remove(names)
    except (OSError, RestoreError) as error:
        logger.warning("unused objects in %s could not be removed, and stay: %s", store.url, error)
    if removed:
        logger.info("removed %d left-over objects from %s", len(removed), store.url)
    return removed


async def sweep_state(store: FlowStore, host: Host, *, grace_ms: int = GRACE_MS) -> list[str]:
    """Removes the state files that no checkpoint refers to, and returns their names.

    Called before the tasks of a job are deployed again: a task that was killed may have written
    files for a checkpoint that never completed. Checkpoints may complete during the sweep. The
    files of such checkpoints are either younger than `grace_ms`, or belong to a checkpoint that
    exists already.
    """
    removed: list[str] = []
    try:
        removed = await _remove_state(store, host.clock.wall_ms() - grace_ms)
    except (
        OSError,
        RestoreError,
    ) as error:
        # Perhaps a checkpoint was removed while it was read: the next sweep tries again.
        logger.debug("state that is left over in %s stays there: %s", store.url, error)
    if removed:
        logger.info("removed %d left-over files of state from %s", len(removed), store.url)
    return removed


async def _remove_state(store: FlowStore, before_ms: int) -> list[str]:
    """Removes old state files that no checkpoint refers to. Returns their names."""
    referred: set[str] = set()
    for number in await store.checkpoints():
        referred.update(files_of((await store.checkpoint(number)).subtasks.values()))
    return await _remove_old(
        store,
        [name for name in await store.objects.names("state") if name not in referred],
        before_ms,
    )


async def _remove_old(store: FlowStore, names: list[str], before_ms: int) -> list[str]:
    """Removes the files in `names` that are older than `before_ms`. Returns the names of the
    removed files."""
    old = [name for name in names if await store.objects.modified_ms(name) < before_ms]
    await store.objects.delete(old)
    return old
