"""Tumbling and sliding windows of processing time. They use the slices of `slice_window`, so that a
whole batch is added by one call, whatever its keys are.

The clock takes the place of event time: all records of a batch arrive at one instant, and no record
is ever late. One timer of the operator serves all keys; it fires every window that has ended.
Results have the time `end - 1`, and the watermark of the records is in force for them.

After a restore the clock may be behind, because the machine is another or its clock had been wrong.
A window that has fired stays closed, and no window may wait for a time that may be years away. So
the operator's own time continues where it was, at the pace of the clock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.errors import StateError
from aioflow.operators.slice_window import SliceWindowOperator

if TYPE_CHECKING:
    from aioflow.operators.operator import ProcessingTimeTimer

__all__ = ["ClockWindowOperator"]

logger = logging.getLogger(__name__)


class ClockWindowOperator(SliceWindowOperator):
    """A window operator that emits `WindowResult(key, start, end, result)`, or the output of
    `window_fn` for it.

    A window fires once the clock has reached `end`.
    """

    _timer: ProcessingTimeTimer | None = None
    _event_time = MIN_WATERMARK
    """The watermark of the input."""
    _lead = 0
    """Lead of the operator's time over the clock, in ms."""
    _due = MIN_WATERMARK
    """The instant for which the timer last fired; windows that end up to it are due."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reads_columns = False

    async def open(self) -> None:
        await super().open()
        self._continue()
        self._schedule()

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        if batch.values:
            if batch.keys is None:
                raise StateError(
                    f"window {self.ctx.name!r}: a batch without keys; put key_by directly before "
                    "window"
                )
            self._fold_by(batch)
            self._fold(self._grid.slice_start(self._now()), list(batch.keys), list(batch.values))
            if self._timer is None:
                self._schedule()
        if batch.watermark > self._event_time:
            self._event_time = batch.watermark
        self._out.passed(batch.watermark)
        return empty_batch(self._out.watermark)

    def finish(self) -> RecordBatch:
        """Fires the remaining windows in their order, because no clock will reach their end.

        Results beyond the first piece are emitted later.
        """
        return self._out.start(self._advance(MAX_WATERMARK), self._event_time)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await super().close()

    def _now(self) -> int:
        """Returns the time of the operator.

        This time lies in no window that has fired, even if the clock was put back a little.
        """
        now = self.ctx.processing_time() + self._lead
        return max([now, self._watermark + 1, *(reached + 1 for _, reached in self._ahead)])

    def _continue(self) -> None:
        """Continues after a restore at the time that was reached, or later."""
        starts = self._slices.starts
        reached = [self._watermark + 1, *(reached + 1 for _, reached in self._ahead), *starts[-1:]]
        self._lead = max(0, max(reached) - self.ctx.processing_time())
        if self._lead > 0:
            logger.warning(
                "window %r: the clock is %.1f s behind what the checkpoint had reached: its "
                "windows continue from there, at the "
                "pace of the clock, so that none waits for it",
                self.ctx.name,
                self._lead / 1000.0,
            )

    def _schedule(self) -> None:
        """Registers the timer for the first window that is not empty."""
        self._timer = None
        starts = self._slices.starts
        if starts:
            end = max(self._grid.next_end(self._watermark), self._grid.first_end(starts[0]))
            self._timer = self.ctx.register_processing_timer(end - 1 - self._lead, self._on_time)

    def _on_time(self, timestamp: int) -> None:
        # While earlier windows still emit results, the next timer is not registered.
        self._due = timestamp + self._lead
        batch = self._out.start(self._fire_due(), self._event_time)
        if batch.values or self.has_pending:  # Work without results has to continue, too.
            self.ctx.emit(batch)

    def _fire_due(self) -> Iterator[None]:
        yield from self._advance(self._due)
        self._schedule()

    def _emit(self, end: int, watermark: int, keys: list[Any], values: list[Any]) -> None:
        super()._emit(end, self._event_time, keys, values)
