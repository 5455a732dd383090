"""The base class of readers for streams that deliver data on their own: one task fills a bounded
buffer, and `poll_batch` empties it.

Invariant: the task waits while the buffer is full, so a reader never holds more than its capacity
and one element. Every element is in exactly one polled batch, together with the position after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aioflow.core.user_code import check_own_task, close_user_code, user_error
from aioflow.operators.source import BaseReader

if TYPE_CHECKING:
    from aioflow.operators.source import SourceContext, Split

__all__ = ["BUFFER_RECORDS", "BufferedReader", "say_at_most_once"]

logger = logging.getLogger(__name__)

BUFFER_RECORDS = 4096
"""Capacity of the buffer: two polls of the largest batch, so that the pump fills one while the
other is processed.
"""


class BufferedReader(BaseReader[Any]):
    """A reader of one split. A subclass defines `run`, which reads until the stream ends and awaits
    `put` for each element.

    `run` is one asyncio task from beginning to end, so it may keep timeouts, task groups and
    connections open across elements.
    """

    at_most_once = ""
    """Text on elements that no checkpoint covers, if the peer cannot send them again.

    Logged once a run.
    """

    def __init__(self, ctx: SourceContext, *, capacity: int = BUFFER_RECORDS) -> None:
        self.ctx = ctx
        self._capacity = capacity
        # Parallel lists. `_positions` stays empty if the stream has no positions.
        self._values: list[Any] = []
        self._positions: list[Any] = []
        self._split: Split | None = None
        self._position: Any = None
        self._pump: asyncio.Task[None] | None = None
        self._ended = True
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    async def run(self, split: Split) -> None:
        """Reads `split` from its position to the end of the stream.

        `poll_batch` raises its error.
        """
        raise TypeError(f"{type(self).__name__} must define run(self, split)")

    async def put(self, value: Any, position: Any = None) -> None:
        """Adds one element to the buffer, then waits while the buffer is full.

        Either all elements have positions or none has.
        """
        self.add(value, position)
        while len(self._values) >= self._capacity:
            await self.room()

    def add(self, value: Any, position: Any = None) -> None:
        """Adds one element to the buffer without waiting; the caller has checked that there is
        room.
        """
        if position is not None:
            self._positions.append(position)
        self._values.append(value)
        if self._waiter is not None:
            self.wake()

    async def room(self) -> None:
        """Returns after the next poll that leaves the buffer at most half full."""
        if self._room is None:
            self._room = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._room)

    def wake(self) -> None:
        """Ends the current `wait`."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def open(self, splits: Sequence[Split]) -> None:
        if not splits:
            return
        assert self._split is None and len(splits) == 1, "the stream has one split"
        self._split = splits[0]
        self._position = splits[0].position
        self._ended = False
        if self.at_most_once and self.ctx.replays and self.ctx.runtime.attempt == 0:
            say_at_most_once(self.ctx, self.at_most_once)
        # Owned by this reader: close() cancels it and waits for its end.
        self._pump = asyncio.get_running_loop().create_task(
            self._guarded(splits[0]), name=f"{type(self).__name__}-{splits[0].id}"
        )

    async def _guarded(self, split: Split) -> None:
        try:
            await self.run(split)
            check_own_task()
        # poll_batch raises this error after it has returned all elements before it.
        except BaseException as error:  # noqa: BLE001
            self._error = user_error(error)
        finally:
            self._ended = True
            self.wake()

    def poll_batch(self, max_records: int) -> list[Any] | None:
        values = self._values
        # Slice and delete rather than swap: another thread may be appending to this very list.
        batch = values[:max_records]
        if not batch:
            if self._error is not None:
                raise self._error
            return None
        taken = len(batch)
        del values[:taken]
        if self._positions:
            self._position = self._positions[taken - 1]
            del self._positions[:taken]
        if len(values) <= self._capacity // 2:
            self.on_room()
        return batch

    def on_room(self) -> None:
        """Lets the filling task continue, because the buffer is at most half full."""
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    async def wait(self) -> None:
        if self._values or self._ended:
            return
        if self._waiter is None:
            self._waiter = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._waiter)

    @property
    def finished(self) -> bool:
        return self._ended and not self._values and self._error is None

    def position(self, split_id: str) -> Any:
        return self._position

    async def close(self) -> None:
        pump, self._pump = self._pump, None
        if pump is not None:
            try:
                await self.ctx.end(pump)
            except asyncio.CancelledError:  # Closing took longer than its time limit.
                close_user_code(pump)
                raise


def say_at_most_once(ctx: SourceContext, what: str) -> None:
    """Logs a warning that elements which no checkpoint covers are lost after a restart.

    `what` is the reason, as a part of the message. The caller calls it once in each run.
    """
    logger.warning(
        "source of %s: %s, so after a restart elements that no checkpoint covers are lost (at "
        "most once)",
        ctx.runtime.task_name,
        what,
    )
