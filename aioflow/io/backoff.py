"""Delays between attempts to connect. Each delay is twice as long as the last. Random jitter keeps
many clients from reconnecting at the same moment.

If a connection fails again and again, a warning is logged at the first failure, and later at
growing intervals.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from aioflow.core.errors import Broken
from aioflow.core.timeunits import LogBackoff, to_seconds
from aioflow.inspection.redaction import redacted

if TYPE_CHECKING:
    from aioflow.core.host import Rng
    from aioflow.core.timeunits import Duration

__all__ = ["MAX_BACKOFF_S", "Backoff", "reached"]

T = TypeVar("T")

MAX_BACKOFF_S = 30.0

START_PATIENCE_S = 30.0
"""Time in seconds for which a source or sink tries to reach its server when the job starts."""

START_BACKOFF_S = 0.1, 2.0
"""Shortest and longest delay between two attempts at the start, in seconds."""

logger = logging.getLogger(__name__)


def _described(error: BaseException) -> str:
    """Returns the class and the message of an error, without secrets."""
    return redacted(f"{type(error).__name__}: {error}".removesuffix(": "))


def _unexplained(error: Exception) -> None:
    return None


class Backoff:
    """The delays between one connection's attempts to connect. The caller calls `reset` after a
    success.
    """

    def __init__(self, rng: Rng, first: Duration = "100ms", max_s: float = MAX_BACKOFF_S) -> None:
        self._rng = rng
        self._first_s = to_seconds(first, "backoff")
        self._max_s = max_s
        self.tries = 0
        self._log_backoff: LogBackoff | None = None

    def reset(self) -> None:
        self.tries = 0
        self._log_backoff = None

    def failed(self, subject: object, error: BaseException, then: str = "connecting again") -> None:
        """Logs that an attempt of `subject`, a source or a sink, to connect has failed.

        `then` is the part of the log message that says what the subject does next.
        """
        if self._log_backoff is None:
            self._log_backoff = LogBackoff()
        lasts_s = self._log_backoff.failed(asyncio.get_running_loop().time())
        level = logging.DEBUG if lasts_s is None else logging.WARNING
        since = f"; it has failed for {lasts_s:.0f} s" if lasts_s else ""
        logger.log(level, "%r: %s, %s%s", subject, _described(error), then, since)

    def ended(self, subject: object) -> None:
        """Notes that the peer has ended the connection of `subject`.

        If this happens twice in a row without any data received, a failure is logged.
        """
        if self.tries:
            self.failed(
                subject, Broken("the other side has ended the connection again, and sent nothing")
            )

    async def persistently(
        self,
        attempt: Callable[[], Awaitable[T]],
        subject: object,
        is_away: Callable[[Exception], bool],
        explained: Callable[[Exception], BaseException | None] = _unexplained,
        then: str = "connecting again",
    ) -> T:
        """Returns the result of `attempt()`. Retries it as long as `is_away(error)` is true for the
        error that it raises.

        For any other error, `explained(error)` returns a more helpful error to raise instead, or
        None. `subject` and `then` appear in the log messages, as in `failed`.
        """
        while True:
            try:
                return await attempt()
            except Exception as error:  # Checked here, because most errors justify no retry.
                if not is_away(error):
                    if (explanation := explained(error)) is not None:
                        raise explanation from None
                    raise
                self.failed(subject, error, then)
            await self.sleep()

    async def reconnecting(
        self,
        attempt: Callable[[], Awaitable[object]],
        subject: object,
        reconnect: bool,
        errors: tuple[type[Exception], ...],
    ) -> None:
        """Repeats `attempt()` until its result is true, also after an error of the classes
        `errors`.

        If `reconnect` is false, `attempt` is called only once, and its error is raised.
        """
        while True:
            try:
                if await attempt() or not reconnect:
                    return
            except errors as error:
                if not reconnect:
                    raise
                self.failed(subject, error)
            else:
                self.ended(subject)
            await self.sleep()

    async def sleep(self) -> None:
        """Waits between half and all of the current delay."""
        delay_s = min(self._first_s * 2.0 ** min(self.tries, 32), self._max_s)
        self.tries += 1
        await asyncio.sleep(delay_s * self._rng.uniform(0.5, 1.0))


async def reached(
    connect: Callable[[], Awaitable[T]],
    subject: object,
    is_away: Callable[[Exception], bool],
    rng: Rng | None = None,
    explained: Callable[[Exception], BaseException | None] = _unexplained,
) -> T:
    """Returns the result of `connect()`. Retries it as long as `is_away(error)` is true for the
    error that it raises.

    The retries allow for a server that starts at the same time as the job. After `START_PATIENCE_S`
    the last error is raised, or the error that `explained` returns for it. Log warnings about
    `subject` come at growing intervals. Without `rng`, the delays have no jitter.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + START_PATIENCE_S
    log_backoff = LogBackoff()
    delay_s, longest_s = START_BACKOFF_S
    while True:
        try:
            return await connect()
        except Exception as error:  # Checked here, because most errors justify no retry.
            left_s = until - loop.time()
            if left_s <= 0 or isinstance(error, ImportError) or not is_away(error):
                if (explanation := explained(error)) is not None:
                    raise explanation from None
                raise
            level = logging.DEBUG if log_backoff.failed(loop.time()) is None else logging.WARNING
            why = _described(error)
            logger.log(level, "%s: %s; trying again for %.0f s", subject, why, left_s)
        await asyncio.sleep(delay_s if rng is None else delay_s * rng.uniform(0.5, 1.0))
        delay_s = min(2 * delay_s, longest_s)
