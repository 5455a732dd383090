"""Logs refused connections: the first at once, then one line a minute with a count.

A flood of connections must show in the log, but must not flood the log.
"""

from __future__ import annotations

import asyncio
import logging

__all__ = ["EVERY_S", "Refusals"]

EVERY_S = 60.0


class Refusals:
    """Counts and logs the refused connections of one listener.

    `subject` names the listener in messages, as in "the monitoring endpoint".
    """

    __slots__ = ("_logger", "_silent", "_silent_until_s", "_subject", "total")

    def __init__(self, logger: logging.Logger, subject: str) -> None:
        self._logger = logger
        self._subject = subject
        self._silent = 0
        self._silent_until_s = float("-inf")
        self.total = 0
        """Number of connections refused so far."""

    def add(self, peer: str, reason: object) -> None:
        """Counts a refused connection.

        Logs it, with those since the last line, unless that line is less than a minute old.
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
