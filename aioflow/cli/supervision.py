"""Keeps the TaskManagers of `aioflow cluster start` running, in the process of the JobManager.

A TaskManager that ends by itself, with exit code 0, was told to end. Any other end is unexpected:
another process takes its place after a delay, which doubles with each end soon after a start.
"""

from __future__ import annotations

import asyncio
import logging
import math
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Replacements", "keep_running"]

logger = logging.getLogger(__name__)

POLL_S = 0.2
FIRST_S, LONGEST_S = 1.0, 60.0
"""Shortest and longest delay before a replacement."""

HEALTHY_S = 60.0
"""A process that ran for this long had started well."""

REPLACEMENTS_MAX = 10
"""Maximum number of successive replacements that end before `HEALTHY_S`."""

WRONG_USAGE = 2
"""Exit code of a command that will never run with these arguments."""


@dataclass(slots=True)
class Replacements:
    """Decides when a process that has ended is replaced. Times are those of a monotonic clock."""

    _started_at: float = 0.0
    in_a_row: int = field(default=0, init=False)
    """Replacements since a process ran for `HEALTHY_S`."""

    def started(self, now: float) -> None:
        self._started_at = now

    def ended(self, code: int, now: float) -> float | None:
        """Returns after how many seconds to replace the process; None: never."""
        if now - self._started_at >= HEALTHY_S:
            self.in_a_row = 0
        if code in (0, WRONG_USAGE) or self.in_a_row >= REPLACEMENTS_MAX:
            return None
        self.in_a_row += 1
        return min(math.ldexp(FIRST_S, self.in_a_row - 1), LONGEST_S)


async def keep_running(
    start: Callable[[int], subprocess.Popen[bytes]],
    count: int,
    is_stopping: Callable[[], bool],
    now: Callable[[], float],
) -> None:
    """Starts TaskManagers 1 to `count`, and replaces each that ends unexpectedly.

    `start(number)` starts one. While `is_stopping()`, none is replaced.
    """
    keeping = [
        asyncio.get_running_loop().create_task(
            _keep_one(start, number, is_stopping, now), name=f"keep taskmanager {number}"
        )
        for number in range(1, count + 1)
    ]
    try:
        for task in keeping:
            await task
    finally:
        for task in keeping:
            task.cancel()


async def _keep_one(
    start: Callable[[int], subprocess.Popen[bytes]],
    number: int,
    is_stopping: Callable[[], bool],
    now: Callable[[], float],
) -> None:
    replacements = Replacements()
    while not is_stopping():
        replacements.started(now())
        try:
            code = await _end_of(start(number))
            how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        except OSError as error:
            code, how = 1, f"could not be started ({error})"
        if is_stopping():
            return
        delay_s = replacements.ended(code, now())
        if delay_s is None:
            level = logging.INFO if code == 0 else logging.ERROR
            logger.log(level, "taskmanager %d %s, and is not replaced: see its log", number, how)
            return
        logger.warning(
            "taskmanager %d %s, another one takes its place in %g s (%d of %d)",
            number,
            how,
            delay_s,
            replacements.in_a_row,
            REPLACEMENTS_MAX,
        )
        await asyncio.sleep(delay_s)


async def _end_of(process: subprocess.Popen[bytes]) -> int:
    """Waits for the end of a process, and returns its exit code."""
    while (code := process.poll()) is None:  # noqa: ASYNC110  # Another process ends it.
        await asyncio.sleep(POLL_S)
    return code
