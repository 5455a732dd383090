"""Uses an `asyncio.Queue` of the program as source or sink, within one event loop.

As a source it is at-most-once over a restart: elements removed from the queue exist only in the
job. While it waits, the source may hold one removed element that it has not emitted yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError
from aioflow.io.brokers.readers import say_at_most_once
from aioflow.operators.sink import BaseSink, BaseWriter
from aioflow.operators.source import BaseReader, BaseSource, Split

if TYPE_CHECKING:
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["QueueConnector", "queue"]

T = TypeVar("T")

_NO_END = object()

_SHUT_DOWN: tuple[type[BaseException], ...] = tuple(
    error for error in (getattr(asyncio, "QueueShutDown", None),) if error is not None
)
"""The error of a queue that was shut down. Empty before Python 3.13."""


@explained
def queue(asyncio_queue: asyncio.Queue[T], *, end: Any = _NO_END) -> QueueConnector[T]:
    """Returns a connector that reads `asyncio_queue`, or puts records into it.

    The source ends when the queue is shut down, or when it gets the object `end` from the queue
    (compared by identity). The sink awaits `put` for each record.
    """
    if not isinstance(asyncio_queue, asyncio.Queue):
        raise GraphError(
            f"queue got {asyncio_queue!r}, expected an asyncio.Queue: for a queue.Queue write a "
            "function that yields from it"
        )
    return QueueConnector(asyncio_queue, end)


class QueueConnector(BaseSource[T], BaseSink[Any]):
    """A `Source` and a `Sink` of an `asyncio.Queue`. Made by `queue`. The flow must run in the loop
    that uses the queue.
    """

    name = "queue"
    bounded = False
    parallelism_max = 1
    stays_here = True
    per_run = True

    def __init__(self, asyncio_queue: asyncio.Queue[T], end: Any) -> None:
        self._queue = asyncio_queue
        self._end = end

    def __repr__(self) -> str:
        return "queue()"

    async def discover(self) -> list[Split]:
        return [Split("0")]

    def reader(self, ctx: SourceContext) -> SourceReader[T]:
        return _QueueReader(ctx, self._queue, self._end)

    def writer(self, ctx: OperatorContext) -> QueueWriter:
        return QueueWriter(self._queue)

    def committer(self) -> None:
        return None


class _QueueReader(BaseReader[Any]):
    finished: bool

    def __init__(self, ctx: SourceContext, source: asyncio.Queue[Any], end: Any) -> None:
        self._ctx = ctx
        self._queue = source
        self._end = end
        self._held: list[Any] = []
        self.finished = True

    async def open(self, splits: Sequence[Split]) -> None:
        if splits:
            self.finished = False
            if self._ctx.replays and self._ctx.runtime.attempt == 0:
                say_at_most_once(self._ctx, "what was taken out of a queue is not in it any more")

    def poll_batch(self, max_records: int) -> list[Any] | None:
        if self.finished:
            return None
        batch, self._held = self._held, []
        take, end = self._queue.get_nowait, self._end
        try:
            while len(batch) < max_records:
                value = take()
                self._queue.task_done()
                if value is end:
                    self.finished = True
                    break
                batch.append(value)
        except asyncio.QueueEmpty:
            pass
        except _SHUT_DOWN:
            self.finished = True
        return batch or None

    async def wait(self) -> None:
        if self.finished or self._held:
            return
        try:
            value = await self._queue.get()
        except _SHUT_DOWN:
            self.finished = True
            return
        self._queue.task_done()
        if value is self._end:
            self.finished = True
        else:
            self._held.append(value)

    def position(self, split_id: str) -> None:
        return None

    async def close(self) -> None:
        """Does nothing: the queue belongs to the program."""


class QueueWriter(BaseWriter[Any]):
    """A writer that puts records into the queue one by one. A full queue blocks the job."""

    def __init__(self, target: asyncio.Queue[Any]) -> None:
        self._queue = target
        self._pending: list[Any] = []
        self.full = False

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        self._pending.extend(values)
        self.full = True

    async def flush(self) -> None:
        self.full = False
        pending, self._pending = self._pending, []
        for value in pending:
            await self._queue.put(value)

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        await self.flush()
        return []
