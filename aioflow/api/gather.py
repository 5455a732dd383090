"""Results of a run, handed back to the program that runs it: gathered in a list, or row by row with back pressure."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from aioflow.core.availability import Availability
from aioflow.core.elements import RecordBatch
from aioflow.operators.operator import Operator

if TYPE_CHECKING:
    from aioflow.api.job import Job

__all__ = ["CollectOperator", "RowStream"]

T = TypeVar("T")

ROWS_BUFFERED_MAX = 1024
"""Rows that wait for the reader of `execute_and_collect` before the job is held back."""


class CollectOperator(Operator):
    """Gathers everything in one list. A restart begins anew, so the list holds the elements of one complete run."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    async def open(self) -> None:
        self._rows.clear()

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        self._rows.extend(batch.values)
        return RecordBatch([], None, None, None, batch.watermark)


class _RowOperator(Operator):
    """Hands rows to a RowStream, and takes no more while `ROWS_BUFFERED_MAX` wait there."""

    def __init__(self, rows: RowStream[Any]) -> None:
        self._rows = rows
        self.availability = rows.has_room

    def room(self) -> int:
        return self._rows.room

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        self._rows.put(batch.values)
        return RecordBatch([], None, None, None, batch.watermark)


class RowStream(Generic[T]):
    """The rows of a run: `async for row in ...`, or `async with ... as rows` first, to end the run with the block."""

    def __init__(self, run: Callable[[], AbstractAsyncContextManager[Job]]) -> None:
        self._run = run
        self._running: AbstractAsyncContextManager[Job] | None = None
        self._job: Job | None = None
        self._rows: deque[T] = deque()
        self._arrived = Availability()
        self.has_room = Availability(available=True)

    def operator(self) -> Operator:
        """Factory of the operator that fills this stream."""
        return _RowOperator(self)

    @property
    def room(self) -> int:
        return max(0, ROWS_BUFFERED_MAX - len(self._rows)) if self.has_room.is_available else 0

    def put(self, rows: list[T]) -> None:
        """Take rows from the job, on its loop."""
        self._rows.extend(rows)
        if len(self._rows) >= ROWS_BUFFERED_MAX:
            self.has_room.set_unavailable()
        self._wake()

    async def __aenter__(self) -> Self:
        self._rows.clear()  # Of a run before, which was left early.
        self.has_room.set_available()
        self._running = self._run()
        self._job = await self._running.__aenter__()
        self._job.on_end(self._wake)
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        assert self._running is not None and self._job is not None
        running, self._running = self._running, None
        try:
            if not self._job.status.is_terminal:
                # Nobody reads any more: a job that waits for room would never end by itself.
                await self._job.cancel()
        finally:
            await running.__aexit__(*exc_info)

    async def __aiter__(self) -> AsyncIterator[T]:
        if self._running is not None:
            async for row in self._read():
                yield row
            return
        async with self:
            async for row in self._read():
                yield row

    async def _read(self) -> AsyncIterator[T]:
        assert self._job is not None
        while True:
            while self._rows:
                row = self._rows.popleft()
                # Not before half of it is read: waking the job for each row would cost more than the row.
                if not self.has_room.is_available and len(self._rows) <= ROWS_BUFFERED_MAX // 2:
                    self.has_room.set_available()
                yield row
            if self._job.status.is_terminal:
                await self._job.wait()  # Raises the job's error after its last row.
                return
            self._arrived.set_unavailable()
            await asyncio.shield(self._arrived.get_available_future())

    def _wake(self) -> None:
        self._arrived.set_available()
