"""Reads a user's iterator outside of the event loop's own task: a plain iterator on its own thread,
an async iterator in its own task.

A plain iterator stays on one thread from its first step to its last, because its resources (a
database connection) may demand that. Invariant: the thread checks between two steps whether it must
stop, and it waits while the buffer is full.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from aioflow.core.aio import wait_all
from aioflow.core.injection import injected_parameters
from aioflow.io.buffered import BUFFER_RECORDS, BufferedReader

if TYPE_CHECKING:
    from aioflow.operators.source import SourceContext, Split

__all__ = ["FunctionReader"]

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 0.5
"""Maximum time that `close` waits for a running step.

A step cannot be interrupted, and it may never end.
"""

FINISHED = "finished"
"""Position of an ended function without positions: the function is not called again."""


class FunctionReader(BufferedReader):
    """A reader of the iterator that `function` returns.

    `replayable` means that the function takes the position and yields `(value, position)`.
    `indexed` means that the iterator yields the same elements each time. Its position is then the
    number of elements, and a restart skips as many.
    """

    def __init__(
        self,
        ctx: SourceContext,
        function: Callable[..., Any],
        *,
        replayable: bool = False,
        indexed: bool = False,
        capacity: int = BUFFER_RECORDS,
    ) -> None:
        super().__init__(ctx, capacity=capacity)
        self._function = function
        self._name = getattr(function, "__qualname__", None) or type(function).__name__
        self._replayable = replayable
        self._indexed = indexed
        self._iterator: Iterator[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._in_thread = False
        self._stopped = False
        self._hungry = False
        self._go_on = threading.Event()

    async def run(self, split: Split) -> None:
        if split.position == FINISHED and not self._replayable:
            return
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        function = self._function
        arguments = {"position": split.position} if self._replayable else {}
        for name, resource in injected_parameters(function).items():
            arguments[name] = await self.ctx.resource(resource)
        if inspect.isasyncgenfunction(inspect.unwrap(function)):
            made = function(**arguments)
        elif inspect.iscoroutinefunction(function):
            made = await function(**arguments)
        else:
            # The call itself may block: a function that connects, then returns an iterator.
            made = lambda: function(**arguments)  # noqa: E731
        if isinstance(made, AsyncIterator):
            await self._run_async(made)
            return
        self._in_thread = True
        make: Callable[[], Any] | None = (
            made if callable(made) and not isinstance(made, Iterator) else lambda: iter(made)
        )
        skip = (split.position or 0) if self._indexed else 0
        while True:
            outcome = await self.ctx.host.blocking(
                self._fill, make, skip, dedicated=True, name=f"aioflow-source-{self._name}"
            )
            if isinstance(outcome, AsyncIterator):
                self._in_thread = False
                await self._run_async(outcome)
                return
            if outcome:
                return
            make = None
            while len(self._values) > self._capacity // 2:
                await self.room()

    async def _run_async(self, iterator: AsyncIterator[Any]) -> None:
        try:
            if self._replayable:
                async for pair in iterator:
                    value, position = self._parted(pair)
                    await self.put(value, position)
            else:
                async for value in iterator:
                    await self.put(value)
        finally:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                await close()

    def _fill(self, make: Callable[[], Any] | None, skip: int) -> bool | AsyncIterator[Any]:
        """Reads on the thread until the iterator ends, and returns True.

        Returns False if the buffer is full and no other thread can empty it.
        """
        if make is not None:
            made = make()
            if isinstance(made, AsyncIterator):
                return made
            if not hasattr(made, "__iter__"):
                raise TypeError(
                    f"source function {self._name} returned {made!r}, expected an iterator or an "
                    "async iterator"
                )
            self._iterator = iter(made)
            if skip:
                next(islice(self._iterator, skip - 1, skip), None)
        assert self._iterator is not None, "the first call makes it"
        ended = True
        try:
            ended = self._read(self._iterator)
        finally:
            # The generator's `finally` runs here, on the thread that ran the rest of it.
            close = getattr(self._iterator, "close", None)
            if ended and close is not None:
                close()
        return ended

    def _read(self, iterator: Iterator[Any]) -> bool:
        values, capacity, replayable = self._values, self._capacity, self._replayable
        put, put_position = values.append, self._positions.append
        for value in iterator:
            if self._stopped:
                return True
            if replayable:
                # Append the position before the value: a reader that sees the value must find it.
                element, position = self._parted(value)
                put_position(position)
                put(element)
            else:
                put(value)
            if self._hungry:
                self._tell_reader()
            if len(values) >= capacity:
                if threading.get_ident() == self._loop_thread:
                    # A simulated host runs this code on the thread of the loop. If it waited here,
                    # the loop could not empty the buffer.
                    return False
                self._wait_for_room(values, capacity)
        return True

    def _wait_for_room(self, values: list[Any], capacity: int) -> None:
        while len(values) >= capacity and not self._stopped:
            self._go_on.clear()
            if (
                len(values) >= capacity and not self._stopped
            ):  # Checked again: a poll before clear() may have emptied the buffer.
                self._go_on.wait()

    def _tell_reader(self) -> None:
        self._hungry = False
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self.wake)
        except RuntimeError:
            self._stopped = True  # The loop is closed: there is no reader any more.

    def _parted(self, pair: Any) -> tuple[Any, Any]:
        try:
            value, position = pair
        except (TypeError, ValueError):
            raise TypeError(
                f"source function {self._name} takes `position` but yielded {pair!r}, expected a "
                "pair (value, position)"
            ) from None
        if position is None:
            raise TypeError(
                f"source function {self._name} yielded the position None, which stands for the "
                "beginning"
            )
        return value, position

    def on_room(self) -> None:
        self._go_on.set()
        super().on_room()

    def poll_batch(self, max_records: int) -> list[Any] | None:
        batch = super().poll_batch(max_records)
        if batch is not None and self._indexed:
            self._position = (self._position or 0) + len(batch)
        return batch

    async def wait(self) -> None:
        # Set before the buffer is checked, so that any later element wakes this reader.
        self._hungry = True
        await super().wait()

    def position(self, split_id: str) -> Any:
        if self.finished and not self._replayable and not self._indexed:
            return FINISHED
        return self._position

    async def close(self) -> None:
        self._stopped = True
        self._go_on.set()
        if (
            self._in_thread
            and self._pump is not None
            and not await wait_all([self._pump], timeout_s=STOP_TIMEOUT_S)
        ):
            logger.warning(
                "source function %s is still in a step after %.1f s: its thread ends with it",
                self._name,
                STOP_TIMEOUT_S,
            )
        await super().close()
