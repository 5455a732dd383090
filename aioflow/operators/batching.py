"""Operators that collect or delay elements: `map_batches` collects elements for one call, and
`throttle` limits the rate of elements.

`map_batches` calls its function when its list has the maximum size, or when the first element of
the list has waited long enough. A throttle holds no elements: the chain keeps the elements that do
not pass yet. Neither operator lets the watermark overtake an element that waits.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import repeat
from typing import TYPE_CHECKING, Any

from aioflow.core.availability import Availability
from aioflow.core.elements import MIN_WATERMARK, RecordBatch
from aioflow.core.errors import GraphError, describe_record, note_once
from aioflow.core.scope import current_scope, enter_scope
from aioflow.core.signatures import check_takes
from aioflow.core.states import ListStateDescriptor
from aioflow.core.timeunits import Duration, to_ms
from aioflow.core.user_code import check_own_task, take_back_cancellation, user_error
from aioflow.operators.async_io import KEPT_MAX
from aioflow.operators.operator import CHEAPER_ASYNC_OR_BLOCKING, UNBOUNDED_ROOM, Operator
from aioflow.operators.process.functions import Rows
from aioflow.operators.results import UserFunction, elements_of
from aioflow.operators.stateless import describe_place
from aioflow.operators.valve import mark_after_restore

if TYPE_CHECKING:
    from aioflow.operators.operator import ProcessingTimeTimer

__all__ = ["MapBatchesOperator", "ThrottleOperator"]

GATHERED: ListStateDescriptor[Any] = ListStateDescriptor("map-batches-gathered")
"""Operator state of the elements whose results were not emitted yet.

Each entry is (value, timestamp, watermark in force, number of subtasks). Entries of earlier
versions lack the last two items.
"""


class _Gathered:
    """The collected elements in order, each with its timestamp and the watermark in force before
    it.
    """

    __slots__ = ("marks", "stamps", "values")

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.stamps: list[int | None] = []
        self.marks: list[int] = []

    def add(self, batch: RecordBatch, mark: int) -> None:
        count = len(batch.values)
        self.values += batch.values
        self.stamps += batch.timestamps if batch.timestamps is not None else [None] * count
        self.marks += batch.watermarks if batch.watermarks is not None else [mark] * count

    def take(self, count: int) -> _Gathered:
        taken = _Gathered()
        for name in self.__slots__:
            column = getattr(self, name)
            setattr(taken, name, column[:count])
            del column[:count]
        return taken


class MapBatchesOperator(Operator):
    """An operator that calls `function` with lists of up to `max_size` elements. The function
    returns one result for each element, in order.

    The first element of a list waits for at most `max_wait`. If `max_wait` is None, only elements
    that arrive together form a list. A plain function runs inline, or with `blocking` in a thread;
    an `async def` is awaited. A call in a thread or a coroutine runs while the next list is
    collected; there is at most one such call.
    """

    slow_remedy = CHEAPER_ASYNC_OR_BLOCKING

    def __init__(
        self,
        function: Any,
        max_size: int = 256,
        max_wait: Duration | None = "10ms",
        *,
        blocking: bool = False,
    ) -> None:
        if type(max_size) is not int or max_size < 1:
            raise GraphError(
                f"map_batches: max_size is {max_size!r}, expected an int of at least 1"
            )
        self._wait_ms = 0 if max_wait is None else to_ms(max_wait, "map_batches: max_wait")
        if self._wait_ms < 0:
            raise GraphError(f"map_batches: max_wait is {max_wait!r}, expected 0 or more")
        if not callable(function):
            raise GraphError(
                f"map_batches needs a function of a list, got {type(function).__name__}: "
                f"{function!r}"
            )
        check_takes(function, "map_batches", "values")
        self._user = UserFunction(function, "map_batches")
        self._max_size = max_size
        self._blocking = blocking
        self._is_inline = False
        self._gathered = _Gathered()
        self._in_flight: _Gathered | None = None
        self._is_due = False  # Whether an incomplete list may be passed to the function.
        self._is_ending = False
        self._watermark = MIN_WATERMARK  # Watermark after the last element received.
        self._sent = MIN_WATERMARK  # Watermark that was sent to the next operator.
        self._timer: ProcessingTimeTimer | None = None
        self.availability = Availability(available=True)

    def initialize_state(self) -> None:
        self._user.initialize_state(self.ctx)

    async def open(self) -> None:
        await self._user.open(self.ctx)
        call = self._user.call
        is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
            getattr(call, "__call__", None)  # noqa: B004
        )
        if is_async and self._blocking:
            raise GraphError(
                f"operator {self.ctx.name!r}: blocking=True is for plain functions, this one is "
                "async"
            )
        self._is_inline = not is_async and not self._blocking
        scope = current_scope()
        self._scope = None if scope is None else scope.at(self.ctx)
        restored = self.ctx.operator_state.get_list_state(GATHERED).get()
        if restored:
            parallelism = self.ctx.runtime.parallelism
            for value, stamp, *kept in restored:
                mark = mark_after_restore(kept, parallelism)
                self._gathered.add(RecordBatch([value], None if stamp is None else [stamp]), mark)
            self._is_due = True
            self.availability.set_unavailable()
            self.ctx.execute(self._on_wait_over, "restored batch", 0)

    def room(self) -> int:
        return (
            UNBOUNDED_ROOM
            if self._is_inline
            else max(0, self._max_size - len(self._gathered.values))
        )

    @property
    def keeps_input(self) -> bool:
        return len(self._gathered.values) < KEPT_MAX

    @property
    def busy(self) -> bool:
        return bool(self._gathered.values) or self._in_flight is not None

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        self._gathered.add(batch, self._watermark)
        self._watermark = max(self._watermark, batch.watermark)
        if self._wait_ms == 0 or self._is_ending:
            self._is_due = True  # There is nothing to wait for.
        return self._go_on()

    def input_stopped(self) -> None:
        self._is_ending = self._is_due = True
        self._disarm()

    @property
    def has_pending(self) -> bool:
        """Whether the input has stopped, and elements wait for a call that could begin now."""
        return self._is_ending and self._in_flight is None and bool(self._gathered.values)

    def resume(self, max_records: int) -> RecordBatch:
        return self._go_on()

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        """Writes to state the elements whose results will be emitted after the barrier."""
        held = [part for part in (self._in_flight, self._gathered) if part is not None]
        former = repeat(self.ctx.runtime.parallelism)
        elements = [
            one
            for part in held
            for one in zip(part.values, part.stamps, part.marks, former, strict=False)
        ]
        self.ctx.operator_state.get_list_state(GATHERED).update(elements)
        return self._user.snapshot_state(self.ctx)

    async def close(self) -> None:
        self._disarm()
        await self._user.close()

    def _go_on(self) -> RecordBatch:
        """Calls the function for all lists that are full or due, as far as possible now.

        Returns the results of inline calls.
        """
        gathered, rows, before = self._gathered, Rows(), self._sent
        while (
            self._in_flight is None
            and gathered.values
            and (self._is_due or len(gathered.values) >= self._max_size)
        ):
            part = gathered.take(self._max_size)
            self._disarm()
            if self._is_inline:
                self._keep(rows, part, self._call_inline(part))
            else:
                self._in_flight = part
                _ = self.ctx.spawn(self._run(part), f"{self.ctx.name}-call")
        if not gathered.values:
            self._is_due = self._is_ending
        elif self._timer is None and not self._is_due:
            self._timer = self.ctx.register_processing_timer(
                self.ctx.processing_time() + self._wait_ms, self._on_wait_over
            )
        # A waiter checks again at each change. The flag stays up only when nothing is held, because
        # waiters on `busy` use it too.
        self.availability.set_available()
        if self.busy:
            self.availability.set_unavailable()
        return rows.batch(before, self._reached())

    def _on_wait_over(self, timestamp_ms: int) -> None:
        """Handles that the first element of the list has waited for `max_wait`. Runs as mail."""
        self._timer = None
        self._is_due = True
        self._emit(self._go_on())

    def _emit(self, batch: RecordBatch) -> None:
        if batch.values or batch.watermark != MIN_WATERMARK:
            self.ctx.emit(batch)

    def _disarm(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _reached(self) -> int:
        """Returns the watermark that may be emitted now, or MIN_WATERMARK if it was already
        emitted.
        """
        oldest = self._in_flight if self._in_flight is not None else self._gathered
        reached = oldest.marks[0] if oldest.marks else self._watermark
        if reached <= self._sent:
            return MIN_WATERMARK
        self._sent = reached
        return reached

    # Calls.

    def _call_inline(self, part: _Gathered) -> list[Any]:
        try:
            return self._checked(part, self._user.call(list(part.values)))
        except BaseException as error:
            self._name_culprit(error, part)
            raise

    async def _run(self, part: _Gathered) -> None:
        if self._scope is not None:
            enter_scope(self._scope)
        values = list(part.values)
        call: Callable[[list[Any]], Awaitable[Any]] = self._user.call
        try:
            results = self._checked(
                part,
                await (
                    self.ctx.blocking(self._in_thread, values) if self._blocking else call(values)
                ),
            )
            check_own_task()
        # Raised by mail, where it fails the task in its order.
        except BaseException as raised:  # noqa: BLE001
            error = user_error(raised)
            self._name_culprit(error, part)
            await take_back_cancellation()
            self.ctx.execute(self._fail, "map_batches failed", error)
        else:
            self.ctx.execute(self._deliver, "map_batches results", part, results)

    def _in_thread(self, values: list[Any]) -> list[Any]:
        # A generator runs here, too.
        return list(elements_of(self._user.call(values), "the function of map_batches"))

    def _deliver(self, part: _Gathered, results: list[Any]) -> None:
        """Emits the results of the call that has just ended. Runs as mail."""
        rows, before = Rows(), self._sent
        self._keep(rows, part, results)
        self._in_flight = None
        following = self._go_on()
        self._emit(rows.batch(before, following.watermark))

    def _fail(self, error: BaseException) -> None:
        raise error

    @staticmethod
    def _keep(rows: Rows, part: _Gathered, results: list[Any]) -> None:
        rows.values += results
        rows.stamps += part.stamps
        rows.marks += part.marks

    def _checked(self, part: _Gathered, result: Any) -> list[Any]:
        results = list(elements_of(result, "the function of map_batches"))
        if len(results) != len(part.values):
            raise ValueError(
                f"the function of map_batches returned {len(results)} results for "
                f"{len(part.values)} elements, expected one for each, "
                "in their order"
            )
        return results

    def _name_culprit(self, error: BaseException, part: _Gathered) -> None:
        first, last = describe_record(part.values[0]), describe_record(part.values[-1])
        note_once(
            error,
            f"in {describe_place(self.ctx)}, at the {len(part.values)} records from {first} to "
            f"{last}",
        )


class ThrottleOperator(Operator):
    """An operator that lets at most `n` elements pass in any period of length `per`, in each
    subtask.

    It holds no elements itself.
    """

    def __init__(self, n: int, per: Duration = "1s") -> None:
        if type(n) is not int or n < 1:
            raise GraphError(f"throttle: n is {n!r}, expected an int of at least 1")
        self._per_ms = to_ms(per, "throttle: per")
        if self._per_ms <= 0:
            raise GraphError(f"throttle: per is {per!r}, expected more than 0")
        self._n = n
        self._passed: deque[tuple[float, int]] = deque()  # (when, how many), within the last `per`.
        self._used = 0
        self._timer: ProcessingTimeTimer | None = None
        self.availability = Availability(available=True)

    def room(self) -> int:
        now = self._now_ms()
        passed = self._passed
        while passed and passed[0][0] + self._per_ms <= now:
            self._used -= passed.popleft()[1]
        room = self._n - self._used
        if room <= 0:
            self.availability.set_unavailable()
            if self._timer is None:
                wait_ms = math.ceil(passed[0][0] + self._per_ms - now)
                self._timer = self.ctx.register_processing_timer(
                    self.ctx.processing_time() + wait_ms - 1, self._on_time
                )
        return max(0, room)

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        count = len(batch.values)
        if count:
            self._passed.append((self._now_ms(), count))
            self._used += count
        return batch

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _now_ms(self) -> float:
        # Uses the monotonic clock, because a step of the wall clock must not change the rate.
        return self.ctx.host.clock.monotonic() * 1000

    def _on_time(self, timestamp_ms: int) -> None:
        """Wakes the chain, because the next elements may pass now. Runs as mail.

        The chain calls `room` again, and waits again if it is still 0.
        """
        self._timer = None
        self.availability.set_available()
