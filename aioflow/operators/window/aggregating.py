"""The common base of window operators that add each record only once, on arrival, and not once to
each of its windows.

These windows have an aggregate and no other function that needs the elements. `slice_window` and
`session_window` define how records are added and when windows fire.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.core.elements import TimeWindow
from aioflow.core.errors import StateError, describe_record, note_once
from aioflow.core.functions import OutputTag
from aioflow.operators.aggregate.functions import resolve_aggregate
from aioflow.operators.aggregate.local import of_taken
from aioflow.operators.aggregate.running import check_same_aggregate
from aioflow.operators.operator import Operator, Unprocessed
from aioflow.operators.results import ResumableOutput, UserFunction
from aioflow.operators.stateless import describe_place
from aioflow.operators.window.assigners import window_fn_results
from aioflow.state.backend import require_keyed

if TYPE_CHECKING:
    from aioflow.core.elements import RecordBatch
    from aioflow.core.functions import AggregateFunction
    from aioflow.operators.aggregate.folding import FoldingAggregate
    from aioflow.state.backend import KeyedStateBackend

__all__ = ["AddingWindowOperator"]


class AddingWindowOperator(Operator, ABC):
    """The base class of window operators that add each record once. The base class owns the
    aggregate, the window function, and the output.

    Subclasses own the state of the windows.
    """

    _state: KeyedStateBackend
    _out: ResumableOutput
    _batch: RecordBatch | None = None
    """The batch whose processing is suspended between two pieces of output."""
    _position = 0
    """The number of processed records of `_batch`."""
    _at_rest = False
    """Whether a checkpoint can store the state and the rest of the batch at this moment."""

    def __init__(
        self,
        aggregate: AggregateFunction[Any, Any, Any],
        window_fn: Callable[[Any, TimeWindow, Any], Any] | None,
        late_tag: OutputTag[Any] | None,
    ) -> None:
        self._aggregate = resolve_aggregate(aggregate)
        self._window_fn = None if window_fn is None else UserFunction(window_fn, "__call__")
        self.late_tag = late_tag
        self._folding = self._aggregate
        self._of_taken: FoldingAggregate | None = (
            None  # Made for the first batch of extracted values.
        )

    @property
    def aggregate(self) -> FoldingAggregate:
        """The aggregate that the window computes."""
        return self._aggregate

    def initialize_state(self) -> None:
        check_same_aggregate(self.ctx, self._aggregate)

    async def open(self) -> None:
        self._out = ResumableOutput(self.ctx.host.clock.perf_ns)
        self._state = require_keyed(self.ctx.keyed_state, self.ctx.name)
        self._late_dropped = self.ctx.runtime.metrics.counter("numLateRecordsDropped")
        if self._window_fn is not None:
            await self._window_fn.open(self.ctx)

    async def close(self) -> None:
        if self._window_fn is not None:
            await self._window_fn.close()

    @property
    def has_pending(self) -> bool:
        return self._out.pending

    def resume(self, max_records: int) -> RecordBatch:
        return self._out.resume(max_records)

    @property
    def comes_to_rest(self) -> bool:
        return self._out.pending and self._batch is not None

    def unprocessed(self) -> Unprocessed | None:
        """Returns the rest of the batch, which is processed after the windows that fire now.

        Windows that have not fired are in state.
        """
        batch = self._batch
        if batch is None or not self._at_rest or not self._out.pending:
            return None
        return Unprocessed.rest_of(batch, self._position, self._event_time_reached)

    @property
    @abstractmethod
    def _event_time_reached(self) -> int:
        """Event time in milliseconds; all windows that end up to this time have fired."""

    def _fold_by(self, batch: RecordBatch) -> None:
        """Chooses the form of the aggregate for `batch`, which contains either whole elements or
        values extracted from them.
        """
        if batch.taken and self._of_taken is None:
            self._of_taken = of_taken(self._aggregate)
        self._folding = (
            self._of_taken if batch.taken and self._of_taken is not None else self._aggregate
        )

    def _unfit(self, batch: RecordBatch) -> StateError:
        """Returns the error for a batch without timestamps or keys."""
        return StateError(
            f"window {self.ctx.name!r}: a batch without "
            f"{'keys' if batch.timestamps else 'timestamps'}; event-time "
            "windows stand after key_by, with a watermark strategy upstream"
        )

    def _emit_made(
        self,
        call: Callable[..., Any],
        window: TimeWindow,
        watermark: int,
        keys: Sequence[Any],
        results: Sequence[Any],
    ) -> None:
        """Calls the window function by `call` for each of `keys` and its result in `results`, and
        emits the output.

        The output has the last instant of `window` as timestamp and follows `watermark`.
        """
        add, time = self._out.add, window.max_timestamp
        key = None
        try:
            for key, result in zip(keys, results, strict=True):
                for made in window_fn_results(call(key, window, result)):
                    add(made, time, watermark)
        except BaseException as error:
            self._name(error, key, window)
            raise

    def _name(self, error: BaseException, key: Any, window: TimeWindow) -> None:
        note_once(
            error,
            f"in {describe_place(self.ctx)}, window {tuple(window)} of key {describe_record(key)}",
        )

    def _drop_late(self, value: Any, timestamp: int, watermark: int) -> None:
        """Drops a record that is late for all its windows."""
        self._late_dropped.inc(1)
        if self.late_tag is not None and self._folding is self._aggregate:
            # Late elements have no reader if only extracted values are sent.
            self.ctx.side_output(self.late_tag, value, timestamp, watermark)
