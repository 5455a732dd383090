"""What a sink is, and the operator that writes to it. Two phases: prepare at the barrier, commit when the checkpoint is complete.

Without checkpoints everything that was prepared is committed when the input ends (and when the writer rolls by itself).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from aioflow.core.availability import Availability
from aioflow.core.elements import RecordBatch
from aioflow.operators.operator import UNBOUNDED_ROOM, Operator

if TYPE_CHECKING:
    from aioflow.operators.operator import OperatorContext

__all__ = ["Committer", "Sink", "SinkOperator", "SinkWriter"]

T_contra = TypeVar("T_contra", contravariant=True)


class SinkWriter(Protocol[T_contra]):
    """Writes the records of one subtask.

    Optional: `full` (bool): set by the writer when it wants `flush` to be awaited before it takes more; `async open()`;
    `async close()` (also after a failure); `restore(committables)`.
    """

    def write_batch(self, values: Sequence[T_contra], timestamps: Sequence[int] | None) -> None:
        """Take the records. Never blocks: buffer, and set `full`."""

    async def flush(self) -> None:
        """Bring what is buffered to the outside, as far as that is visible without a commit."""

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        """Everything written so far becomes committables: plain data that survive this process."""


class Committer(Protocol):
    """Makes prepared data visible. Both calls are idempotent."""

    async def commit(self, committables: Sequence[Any]) -> None: ...
    async def abort(self, committables: Sequence[Any]) -> None: ...


@runtime_checkable
class Sink(Protocol[T_contra]):
    """A place to write to. Pure data: it opens nothing until a job runs."""

    def writer(self, ctx: OperatorContext) -> SinkWriter[T_contra]: ...
    def committer(self) -> Committer | None:
        """None when `flush` is all there is (at-least-once)."""


class SinkOperator(Operator):
    """Drives one `SinkWriter`. Takes no more while a flush is under way; emits nothing but the watermark."""

    def __init__(self, sink: Sink[Any]) -> None:
        self._sink = sink
        self._writer: SinkWriter[Any] | None = None
        self._flushing = False
        self._work: asyncio.Task[None] | None = None
        self.availability = Availability(available=True)

    async def open(self) -> None:
        self._writer = writer = self._sink.writer(self.ctx)
        opener = getattr(writer, "open", None)
        if opener is not None:
            await opener()

    def room(self) -> int:
        return 0 if self._flushing else UNBOUNDED_ROOM

    @property
    def busy(self) -> bool:
        return self._flushing

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        writer = self._writer
        assert writer is not None, "open() comes before the first batch"
        if batch.values:
            writer.write_batch(batch.values, batch.timestamps)
            if getattr(writer, "full", False):
                self._begin(self._flush, "flush")
        return RecordBatch([], None, None, None, batch.watermark)

    def finish(self) -> RecordBatch:
        """End of input: what is left becomes visible now, without a checkpoint to wait for."""
        self._begin(self._commit_rest, "commit")
        return RecordBatch([])

    def _begin(self, work: Callable[[], Awaitable[None]], what: str) -> None:
        self._flushing = True
        self.availability.set_unavailable()
        self._work = self.ctx.spawn(self._guarded(work), f"{self.ctx.name}-{what}")

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()  # Called only here: a task that is cancelled before it began must not leave a coroutine behind.
        finally:
            self._flushing = False
            self.availability.set_available()

    async def _flush(self) -> None:
        assert self._writer is not None
        await self._writer.flush()

    async def _commit_rest(self) -> None:
        writer, committer = self._writer, self._sink.committer()
        assert writer is not None
        await writer.flush()
        if committer is not None:
            await committer.commit(await writer.prepare(FINAL_COMMIT))

    async def close(self) -> None:
        writer, self._writer = self._writer, None
        closer = getattr(writer, "close", None)
        if closer is not None:
            await closer()


FINAL_COMMIT = 0
"""The checkpoint id of the commit at the end of input, when no checkpoints are taken (their ids start at 1)."""
