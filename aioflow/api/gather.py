"""Returns the results of a run to the program: in a list, or row by row with back pressure."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Never, Protocol, Self, TypeVar

from aioflow.core.availability import Availability
from aioflow.core.elements import RecordBatch
from aioflow.operators.operator import Operator

if TYPE_CHECKING:
    from aioflow.cluster.execution_graph import JobStatus

__all__ = ["CollectOperator", "Collected", "RowStream"]

T = TypeVar("T")

ROWS_BUFFERED_MAX = 1024
"""Number of rows that may wait for the reader of `execute_and_collect` before the job waits."""


class RunOfRows(Protocol):
    """The interface of a job that a RowStream uses: the job that fills the stream."""

    @property
    def status(self) -> JobStatus: ...
    def on_end(self, callback: Callable[[], None]) -> None: ...
    async def wait(self) -> Any: ...
    async def cancel(self) -> Any: ...


@dataclass(slots=True)
class Collected:
    """The list of rows that a run has collected.

    The list belongs to the program, and outlives the attempts that add to it.
    """

    rows: list[Any] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    """Number of rows that came before the barrier of each checkpoint, by checkpoint number."""
    complete: int = 0
    """Number of rows collected when the input of an attempt had ended.

    Later checkpoints cover all these rows, although they send no barrier.
    """


class CollectOperator(Operator):
    """An operator that collects all elements in one list.

    An attempt that restores a checkpoint removes the elements after that checkpoint; any other
    attempt begins with an empty list. So the list holds each element once. The list is not state: a
    later run does not restore it.
    """

    def __init__(self, collected: Collected) -> None:
        self._collected = collected

    async def open(self) -> None:
        restored, collected = self.ctx.restored_checkpoint, self._collected
        length = (
            0 if restored is None else collected.lengths.setdefault(restored, collected.complete)
        )
        del collected.rows[length:]

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        self._collected.rows.extend(batch.values)
        return RecordBatch([], None, None, None, batch.watermark)

    def finish(self) -> RecordBatch:
        self._collected.complete = len(self._collected.rows)
        return super().finish()

    def snapshot_state(self, checkpoint_id: int) -> None:
        self._collected.lengths[checkpoint_id] = len(self._collected.rows)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        lengths = self._collected.lengths
        for older in [number for number in lengths if number < checkpoint_id]:
            del lengths[older]


class _RowOperator(Operator):
    """An operator that passes rows to a RowStream. It accepts no more rows while
    `ROWS_BUFFERED_MAX` rows wait in the RowStream.
    """

    def __init__(self, rows: RowStream[Any]) -> None:
        self._rows = rows
        self.availability = rows.has_room

    def room(self) -> int:
        return self._rows.room

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        self._rows.put(batch.values)
        return RecordBatch([], None, None, None, batch.watermark)


class RowStream(Generic[T]):
    """An asynchronous iterator over the rows of a run: `async for row in ...`.

    With `async with ... as rows` around the loop, the run ends with the block.
    """

    def __init__(self, run: Callable[[], AbstractAsyncContextManager[RunOfRows]]) -> None:
        self._run = run
        self._running: AbstractAsyncContextManager[RunOfRows] | None = None
        self._job: RunOfRows | None = None
        self._rows: deque[T] = deque()
        self._arrived = Availability()
        self.has_room = Availability(available=True)

    def operator(self) -> Operator:
        """Returns a new operator. The rows that it receives become the rows of this iterator."""
        return _RowOperator(self)

    @property
    def room(self) -> int:
        return max(0, ROWS_BUFFERED_MAX - len(self._rows)) if self.has_room.is_available else 0

    def put(self, rows: list[T]) -> None:
        """Adds rows from the job. Called on the job's loop."""
        self._rows.extend(rows)
        if len(self._rows) >= ROWS_BUFFERED_MAX:
            self.has_room.set_unavailable()
        self._wake()

    if not TYPE_CHECKING:  # Hidden from type checkers, which report these uses themselves.

        def __iter__(self) -> Never:
            how = (
                "`async for x in stream.execute_and_collect()`; all at once: `await "
                "stream.collect()`"
            )
            raise TypeError(f"rows come while the flow runs: {how}")

        def __await__(self) -> Never:
            raise TypeError(
                "a run is not awaited: `async for x in stream.execute_and_collect()`; all at "
                "once: `await stream.collect()`"
            )

        def __enter__(self) -> Never:
            raise TypeError("a run is entered by `async with stream.execute_and_collect() as rows`")

        def __exit__(self, *exc_info: object) -> None:
            """Does nothing. Without this method, `with` would not call `__enter__`, which explains
            the error.
            """

    async def __aenter__(self) -> Self:
        self._rows.clear()  # Rows of an earlier run, which was left early.
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
                # The reader has left: a job that waits for room would never end by itself.
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
                # The job goes on once half of the rows are read. Waking it for each row would cost
                # more than the row.
                if not self.has_room.is_available and len(self._rows) <= ROWS_BUFFERED_MAX // 2:
                    self.has_room.set_available()
                yield row
            if self._job.status.is_terminal:
                await self._job.wait()  # Raises the job's error after its last row.
                return
            self._arrived.set_unavailable()
            await self._arrived.get_available_future()

    def _wake(self) -> None:
        self._arrived.set_available()
