"""A task that reads ahead of the polls: it starts with the reader, waits while enough is buffered,
and ends with `close`.

It reads files in the executor, one call at a time. A running call continues when the task is
cancelled, and `close` waits for it. An error is raised by the first poll after all data read before
the error was polled. The reader itself holds the data.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from aioflow.core.aio import cancel_and_wait, wait_all
from aioflow.core.user_code import check_own_task, user_error

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from aioflow.core.host import Host

__all__ = ["ReadAhead"]

T = TypeVar("T")
Args = TypeVarTuple("Args")


class ReadAhead:
    """The owner of a task that reads ahead; `name` is the name of the task."""

    def __init__(self, host: Host, name: str) -> None:
        self.error: BaseException | None = None
        """The error that ended the task."""
        self._host = host
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._reading: asyncio.Future[Any] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the task may still add data."""
        return self._task is not None and not self._task.done()

    def start(self, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Starts a task that runs `read()`, unless it runs already."""
        if not self.is_running:
            # Owned by this object: close() cancels it and waits for its end.
            self._task = asyncio.get_running_loop().create_task(
                self._guarded(read), name=self._name
            )

    async def _guarded(self, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await read()
            check_own_task()
        # A later poll raises this error, once all data before it was polled.
        except BaseException as error:  # noqa: BLE001
            self.error = user_error(error)
        finally:
            self._wake()

    # Methods that the task calls.

    async def blocking(self, call: Callable[[*Args], T], *args: *Args) -> T:
        """Returns the result of `call(*args)`, a call that reads, run in the executor."""
        reading = self._reading = self._host.blocking(call, *args)
        # Shielded, because a running read continues after a cancellation, and close() waits for it.
        return await asyncio.shield(reading)

    async def added(self, is_full: Callable[[], bool]) -> None:
        """Wakes the waiting poll after data was added. Returns when `is_full()` is false."""
        self._wake()
        while is_full():
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    # Methods that the reader calls.

    def taken(self) -> None:
        """Notes that data was polled, so there may be room again."""
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    async def wait(self) -> None:
        """Waits until data is added, or no more will be."""
        if not self.is_running:
            return
        if self._waiter is None:
            self._waiter = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._waiter)

    async def close(self) -> None:
        """Ends the task, and waits for its running read."""
        task, self._task = self._task, None
        if task is not None:
            await cancel_and_wait([task])
        if self._reading is not None:
            await wait_all([self._reading])
            if not self._reading.cancelled():
                self._reading.exception()  # Otherwise asyncio logs the error as never retrieved.

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
