"""Process functions whose methods are `async def`. They process one element at a time, while all
other work of the subtask waits.

The operator accepts the element and enqueues a mail whose action is the coroutine. The mailbox
awaits it before it runs any other mail or accepts more input. So no other element, timer, query or
checkpoint sees state that is half changed, and the current key stays the same. Control mail (fail,
cancel) still gets through. The operator is the head of its chain. The operators after it run when
the element is done.

A checkpoint contains the elements that were accepted but not begun, as keyed state. After a restore
they are processed first.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Awaitable
from contextlib import aclosing
from itertools import groupby
from operator import itemgetter
from typing import Any

from aioflow.core.availability import Availability
from aioflow.core.elements import MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.errors import describe_record, note_once
from aioflow.core.functions import Function
from aioflow.core.states import ListStateDescriptor
from aioflow.core.user_code import check_own_task
from aioflow.operators.async_io import KEPT_MAX
from aioflow.operators.process.context import note_no_time
from aioflow.operators.process.functions import (
    DRAIN_NS,
    DRAIN_RECORDS_MAX,
    BroadcastProcessOperator,
    CoProcessOperator,
    ProcessOperator,
    Rows,
)
from aioflow.operators.results import elements_of
from aioflow.operators.stateless import describe_place
from aioflow.operators.valve import mark_after_restore
from aioflow.state.backend import INTERNAL_PREFIX, NO_KEY, require_keyed

__all__ = [
    "AsyncBroadcastProcessOperator",
    "AsyncCoProcessOperator",
    "AsyncProcessOperator",
    "is_async_process",
]

PENDING = f"{INTERNAL_PREFIX}async-process-input"
"""Name of the state with the elements that were accepted but not begun.

Each entry is (input, value, timestamp, watermark in force, number of subtasks). Entries of earlier
versions lack the last two items.
"""

PENDING_UNKEYED: ListStateDescriptor[Any] = ListStateDescriptor(PENDING)

METHODS = (
    "process_element",
    "process_element1",
    "process_element2",
    "process_broadcast_element",
    "on_timer",
    "finish",
)


def is_async_process(function: Any) -> bool:
    """Returns whether `function` has an `async def` method or async generator.

    `function` may be a plain function, a process function class, or an instance of one.
    """
    is_class = isinstance(function, Function) or (
        isinstance(function, type) and issubclass(function, Function)
    )
    methods = (
        [getattr(function, name, None) for name in METHODS]
        if is_class
        else [function, getattr(function, "__call__", None)]  # noqa: B004
    )
    return any(
        inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
        for method in methods
    )


class AsyncProcessOperator(ProcessOperator):
    """The operator of a process function with one input.

    Its methods may be `async def`, async generators, or plain, in any mixture.
    """

    def __init__(self, function: Any, *, keyed: bool = False) -> None:
        super().__init__(function)
        self._is_keyed = keyed
        # Processing-time timers that wait for their mail.
        self._due: deque[tuple[int, Any]] = deque()
        self._is_firing = False  # Whether that mail is queued.
        # Batches beyond `room`: restored, or taken over for a checkpoint.
        self._backlog: deque[tuple[int, RecordBatch]] = deque()
        self.availability = Availability(available=True)

    async def open(self) -> None:
        if self._is_keyed:
            require_keyed(self.ctx.keyed_state, self.ctx.name)
        await super().open()
        self._take_over_restored()

    def room(self) -> int:
        return 1 if self._batch is None else 0

    @property
    def keeps_input(self) -> bool:
        return len(self._backlog) < KEPT_MAX

    @property
    def has_pending(self) -> bool:
        return False  # Work continues by mail, not by `resume`.

    @property
    def busy(self) -> bool:
        return self._batch is not None or bool(self._due)

    def process_input(self, index: int, batch: RecordBatch) -> RecordBatch:
        if self._batch is not None:
            self._backlog.append((index, batch))  # A checkpoint does not wait for the elements.
            return empty_batch()
        watermark = max(batch.watermark, self._context.watermark)
        if not batch.values and (
            self._timers is None or self._context.timer_service.next_due > watermark
        ):
            self._context.watermark = self._mark = watermark
            if self._timers is not None:
                self._timers.current_watermark = watermark
            self._sent = max(self._sent, news := self._news(batch))
            return empty_batch(news)
        self._begin(index, batch)
        return empty_batch()

    def finish(self) -> RecordBatch:
        """Schedules a mail that ends the function; `busy` is true until this mail has run."""
        self._context.timer_service.begin_end()
        self._ending = True
        self._begin(0, empty_batch())
        return empty_batch()

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        of_function = super().snapshot_state(checkpoint_id)
        in_hand = [] if self._batch is None else [(self._input, self._batch, self._position)]
        unkeyed: list[Any] = []
        keyed: dict[Any, list[Any]] = {}
        parallelism, mark = self.ctx.runtime.parallelism, self._context.watermark
        for index, batch, first in [
            *in_hand,
            *((index, batch, 0) for index, batch in self._backlog),
        ]:
            for i in range(first, len(batch.values)):
                place = (
                    unkeyed
                    if batch.keys is None or self._keyed is None
                    else keyed.setdefault(batch.keys[i], [])
                )
                if batch.watermarks is not None:
                    mark = max(mark, batch.watermarks[i])
                stamp = None if batch.timestamps is None else batch.timestamps[i]
                place.append((index, batch.values[i], stamp, mark, parallelism))
            mark = max(mark, batch.watermark)
        self.ctx.operator_state.get_list_state(PENDING_UNKEYED).update(unkeyed)
        if self._keyed is not None:
            table = self._keyed.table(PENDING)
            table.drop(None)
            table.of(None).update(keyed)
            # A processing-time timer was popped when its mail came, but has not fired yet, so it
            # must be in the snapshot.
            assert self._timers is not None
            for timestamp, key in self._due:
                self._timers.register_processing_time_timer(key, None, timestamp)
            self._due.clear()
        return of_function

    # Mail.

    def _begin(self, index: int, batch: RecordBatch) -> None:
        assert self._batch is None, "room() is 0 until the element before it is done"
        self._batch, self._input, self._position = batch, index, 0
        self.availability.set_unavailable()
        self.ctx.execute(self._step, "async process")

    async def _step(self) -> None:
        """Processes the accepted elements. Runs as mail.

        At the end of a time slice the rest is left to another mail, so that other mail runs in
        between.
        """
        rows = Rows()
        self._context.collect_sides()
        try:
            is_done = await self._go_on(rows)
        finally:
            self._context.flush_sides()
            self._context.timestamp = None
            self._context.broadcast_writable = False
            if self._keyed is not None:
                self._keyed.current_key = NO_KEY
        batch = self._batch
        assert batch is not None
        if is_done:
            self._batch = None
            self.ctx.emit(self._given(rows, self._news(batch)))
            if self._backlog:
                self._begin(*self._backlog.popleft())
            elif not self.busy:
                self.availability.set_available()
        else:
            is_amid_timers = self._context.timer_service.next_due <= self._context.watermark
            self.ctx.emit(
                self._given_amid_timers(rows) if is_amid_timers else self._given(rows, self._mark)
            )
            self.ctx.execute(self._step, "async process")

    async def _go_on(self, rows: Rows) -> bool:
        batch, context, keyed = self._batch, self._context, self._keyed
        assert batch is not None
        values, keys, stamps, watermarks = (
            batch.values,
            batch.keys,
            batch.timestamps,
            batch.watermarks,
        )
        call, side = self._calls[self._input], self.sides[self._input]
        deadline = self._perf_ns() + DRAIN_NS
        count = len(values)
        for i in range(self._position, count + 1):
            current = context.watermark
            if i == count:
                current = max(current, batch.watermark)
            elif watermarks is not None:
                current = max(current, watermarks[i])
            if not await self._fire_until(current, rows, deadline):
                self._position = i
                return False
            self._mark = max(self._mark, current)
            context.watermark = current
            if self._timers is not None:
                self._timers.current_watermark = current
            if i == count:
                break
            context.broadcast_writable = side.broadcast
            if keyed is not None:
                keyed.current_key = NO_KEY if keys is None else keys[i]
            stamp = context.timestamp = None if stamps is None else stamps[i]
            try:
                await _collect(
                    call(values[i], context), rows, stamp, current, self._described(self._input)
                )
                check_own_task()
            except BaseException as error:
                note_no_time(error, self.ctx)
                note_once(
                    error, f"in {describe_place(self.ctx)}, at record {describe_record(values[i])}"
                )
                raise
            self._position = i + 1
            if i + 1 < count and self._perf_ns() >= deadline:
                return False  # A checkpoint may come between two elements.
        return not self._ending or await self._end(rows, deadline)

    async def _fire_until(self, watermark: int, rows: Rows, deadline: int) -> bool:
        """Fires event-time timers up to `watermark`.

        Adds their output to `rows`. Returns False if not all timers have fired because the output
        is large or the clock has passed `deadline` (ns).
        """
        timers, context = self._timers, self._context
        service = context.timer_service
        if timers is None or service.next_due > watermark:
            return True
        timers.current_watermark = max(timers.current_watermark, context.watermark)
        context.broadcast_writable = False
        while (timer := timers.pop_due(watermark)) is not None:
            self._mark = max(self._mark, timer[0] - 1)
            context.watermark = timers.current_watermark
            await self._await_on_timer(timer[0], timer[1], rows)
            if (
                self._perf_ns() >= deadline or len(rows.values) >= DRAIN_RECORDS_MAX
            ) and timers.next_event_time <= watermark:
                return False
        service.next_due = timers.next_event_time
        return True

    async def _await_on_timer(self, timestamp: int, key: Any, rows: Rows) -> None:
        stamp = self._context.timestamp = timestamp if self.ctx.has_event_time else None
        self._context.mark = self._mark
        try:
            await _collect(
                self._timer_function()(timestamp, self._context),
                rows,
                stamp,
                self._mark,
                "on_timer",
            )
            check_own_task()
        except BaseException as error:
            self._note_timer(error, timestamp, key)
            raise
        finally:
            self._context.mark = None

    # Processing-time timers: the timer service calls synchronously, so the function runs in a later
    # mail.

    def _on_processing_time(self, timestamp: int, key: Any, namespace: Any) -> None:
        self._due.append((timestamp, key))

    def _emit_fired(self) -> None:
        if self._due and not self._is_firing:
            self._is_firing = True
            self.availability.set_unavailable()
            self.ctx.execute(self._fire_processing, "async timers")

    async def _fire_processing(self) -> None:
        """Fires the processing-time timers that the clock has passed. Runs as mail.

        Timers for which the time slice is too short fire in another mail.
        """
        rows, keyed = Rows(), self._keyed
        assert keyed is not None
        deadline = self._perf_ns() + DRAIN_NS
        self._context.collect_sides()
        try:
            while self._due:
                timestamp, key = self._due.popleft()
                keyed.current_key = key
                await self._await_on_timer(timestamp, key, rows)
                if self._batch is None:
                    # If elements wait, timers that `on_timer` has set fire with the next element.
                    await self._fire_until(self._context.watermark, rows, 1 << 63)
                if self._perf_ns() >= deadline or len(rows.values) >= DRAIN_RECORDS_MAX:
                    break
        finally:
            self._context.flush_sides()
            keyed.current_key = NO_KEY
            self._context.timestamp = None
        if rows.values:
            self.ctx.emit(self._given(rows, MIN_WATERMARK))
        self._is_firing = bool(self._due)
        if self._is_firing:
            self.ctx.execute(self._fire_processing, "async timers")
        elif not self.busy:
            self.availability.set_available()

    async def _end(self, rows: Rows, deadline: int) -> bool:
        """Fires waiting processing-time timers, then calls the function's `finish`.

        Adds their output to `rows`. Returns False if the work is not done because the output is
        large or the clock has passed `deadline` (ns).
        """
        service = self._context.timer_service
        while (timer := service.pop_ending()) is not None:
            await self._await_on_timer(timer[0], timer[1], rows)
            await self._fire_until(self._context.watermark, rows, 1 << 63)
            if self._perf_ns() >= deadline or len(rows.values) >= DRAIN_RECORDS_MAX:
                return False
        self._ending = False
        finish = self._finish
        if finish is not None:
            stamp = self._mark if self.ctx.has_event_time else None
            try:
                await _collect(finish(), rows, stamp, self._mark, "finish")
            except BaseException as error:
                note_once(error, f"in finish() of {describe_place(self.ctx)}")
                raise
        return True

    def _take_over_restored(self) -> None:
        """Starts with the restored elements that were accepted and not begun before the
        checkpoint.
        """
        unkeyed = self.ctx.operator_state.get_list_state(PENDING_UNKEYED)
        elements = [(None, *element) for element in unkeyed.get()]
        unkeyed.clear()
        if self._keyed is not None:
            table = self._keyed.table(PENDING)
            elements += [
                (key, *element) for key, found in table.peek(None).items() for element in found
            ]
            table.drop(None)
        parallelism = self.ctx.runtime.parallelism
        found = []
        for key, index, value, stamp, *kept in elements:
            found.append((mark_after_restore(kept, parallelism), index, key, value, stamp))
        # Elements of one key are in the order of their watermarks. Elements of several keys meet
        # here.
        for index, run in groupby(sorted(found, key=itemgetter(0, 1)), key=itemgetter(1)):
            marks, _, keys, values, stamps = (list(column) for column in zip(*run, strict=True))
            known = None if marks[-1] == MIN_WATERMARK else marks
            batch = RecordBatch(
                values,
                None if None in stamps else stamps,
                None if None in keys else keys,
                known,
                marks[-1],
            )
            self._backlog.append((index, batch))
        if self._backlog:
            self._begin(*self._backlog.popleft())


class AsyncCoProcessOperator(AsyncProcessOperator):
    """The operator of a process function with two inputs."""

    sides = CoProcessOperator.sides


class AsyncBroadcastProcessOperator(AsyncProcessOperator):
    """The operator of a process function with an input of elements and a broadcast stream."""

    sides = BroadcastProcessOperator.sides


async def _collect(result: Any, rows: Rows, stamp: int | None, mark: int, what: str) -> None:
    """Awaits `result`, the return value of a method, and adds the elements in it to `rows`.

    The elements get timestamp `stamp` and watermark `mark`. `what` names the method in errors. An
    async generator is always closed, also after an error.
    """
    if inspect.isawaitable(result):
        result = await result
    if inspect.isasyncgen(result):
        async with aclosing(result) as elements:
            rows.add([element async for element in elements], stamp, mark)
    else:
        rows.add(elements_of(result, what), stamp, mark)
