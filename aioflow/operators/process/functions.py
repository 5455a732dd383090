"""Process functions over batches, with full access to each element, its time, and the state and
timers of its key.

Event time is exact for each record: a timer fires between the two records between which the
watermark passes its timestamp. So the input and output of a function do not depend on the borders
of batches. While timer t fires, the current watermark is t, however far the watermark jumps. The
output of the timer follows watermark t - 1, so that it is not late downstream.

If a million timers are due at once, they fire in slices: `has_pending` and `resume` yield to the
loop in between. The operator keeps the unfinished batch. The emitted watermark does not pass any
timer that has not fired.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import count, islice, repeat
from operator import length_hint
from typing import TYPE_CHECKING, Any, NamedTuple

from aioflow.core.elements import MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.errors import describe_record, note_once
from aioflow.core.functions import Function
from aioflow.operators.operator import CHEAPER_OR_ASYNC, Operator, Unprocessed
from aioflow.operators.process.context import OperatorProcessContext, note_no_time
from aioflow.operators.results import PLAIN_RESULTS, UserFunction, elements_of, with_resources
from aioflow.operators.stateless import describe_place
from aioflow.state.backend import NO_KEY, require_keyed

if TYPE_CHECKING:
    from aioflow.state.backend import KeyedStateBackend
    from aioflow.state.timers import InternalTimerService

__all__ = [
    "TIMERS",
    "BroadcastProcessOperator",
    "CoProcessOperator",
    "KeyedProcessOperator",
    "ProcessOperator",
    "Rows",
]

TIMERS = "user-timers"
"""Name of the timer service of user functions."""

DRAIN_NS = 2_000_000
"""Maximum time in nanoseconds for which timers fire before the operator yields to the event loop.
"""

DRAIN_RECORDS_MAX = 1_024
"""Approximate maximum number of records that firing timers emit in one batch."""

NO_DEADLINE = 1 << 63

FEW_RESULTS = 4
"""Maximum length of a list of results whose elements are added one by one. For a longer list,
extending the three lists of `Rows` costs less.
"""


class _Side(NamedTuple):
    """One input of a process operator: the name of the method for its elements, and whether it is
    broadcast.

    Elements of a broadcast input have no key, and may change broadcast state.
    """

    method: str
    broadcast: bool = False


class Rows:
    """Collected output: values, their timestamps (`stamps`), and the watermark before each
    (`marks`).
    """

    __slots__ = ("marks", "stamps", "values")

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.stamps: list[int | None] = []
        self.marks: list[int] = []

    def add(self, elements: Any, stamp: int | None, mark: int) -> None:
        values, stamps, marks = self.values, self.stamps, self.marks
        if type(elements) is list and len(elements) > FEW_RESULTS:
            values.extend(elements)
            stamps.extend(repeat(stamp, len(elements)))
            marks.extend(repeat(mark, len(elements)))
            return
        for element in elements:
            values.append(element)
            stamps.append(stamp)
            marks.append(mark)

    def batch(self, before: int, watermark: int) -> RecordBatch:
        """Returns all collected rows as a batch.

        `before` is the watermark that was in force when the input arrived, `watermark` the one that
        is in force now.
        """
        stamps, marks = self.stamps, self.marks
        return RecordBatch(
            self.values,
            None if None in stamps else stamps,  # type: ignore[arg-type]
            None,
            None if not marks or marks[-1] == before else marks,
            watermark,
        )


class ProcessOperator(Operator):
    """The operator of a function with one input.

    The function is a `ProcessFunction`, or a plain (generator) function `fn(value, ctx)`. Keyed
    state and timers are available if the input is keyed. Subclasses list their inputs in `sides`.
    """

    sides: tuple[_Side, ...] = (_Side("process_element"),)
    slow_remedy = CHEAPER_OR_ASYNC

    def __init__(self, function: Any) -> None:
        self._user = UserFunction(function, self.sides[0].method)
        self._calls: list[Callable[..., Any]] = []
        self._on_timer: Callable[..., Any] | None = None
        self._finish: Callable[..., Any] | None = None
        self._keyed: KeyedStateBackend | None = None
        self._timers: InternalTimerService | None = None
        self._batch: RecordBatch | None = None
        self._input = 0
        self._position = 0
        self._mark = MIN_WATERMARK  # Watermark in force before the next output.
        self._sent = MIN_WATERMARK  # Watermark that the next operator knows.
        self._ending = False
        self._fired = Rows()  # Output of processing-time timers since the last emit.
        self.inputs = len(self.sides)

    def initialize_state(self) -> None:
        self._keyed = self.ctx.keyed_state
        if self._keyed is not None:
            self._timers = self.ctx.timer_service(TIMERS, _no_callback, self._on_processing_time)
            self._timers.on_processing_done = self._emit_fired
        self._user.initialize_state(self.ctx)

    async def open(self) -> None:
        ctx, function = self.ctx, self._user.function
        self._perf_ns, self._has_event_time = ctx.host.clock.perf_ns, ctx.has_event_time
        self._context = OperatorProcessContext(ctx, self._keyed, self._timers)
        if self._timers is not None:
            reached, next_due = self._timers.current_watermark, self._timers.next_event_time
            self._context.watermark = reached
            # After a checkpoint amid due timers, some timers of the instant may be left.
            self._mark = reached if next_due > reached else next_due - 1
        await self._user.open(ctx)
        self._calls = [self._user.call]
        if isinstance(function, Function):
            self._calls += [
                await with_resources(getattr(function, side.method), ctx) for side in self.sides[1:]
            ]
            on_timer = getattr(function, "on_timer", None)
            if on_timer is not None:
                self._on_timer = await with_resources(on_timer, ctx)
            finish = getattr(function, "finish", None)
            if finish is not None:
                self._finish = await with_resources(finish, ctx)

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        return self.process_input(0, batch)

    def process_input(self, index: int, batch: RecordBatch) -> RecordBatch:
        self._context.collect_sides()
        try:
            if self._timers is None:
                return self._process_unkeyed(index, batch)
            assert self._batch is None, "resume() ends the batch before, then the next one comes"
            self._batch, self._input, self._position = batch, index, 0
            return self._process_keyed(DRAIN_RECORDS_MAX)
        finally:
            self._context.flush_sides()

    @property
    def has_pending(self) -> bool:
        return self._batch is not None

    def resume(self, max_records: int) -> RecordBatch:
        self._context.collect_sides()
        try:
            return self._process_keyed(max_records)
        finally:
            self._context.flush_sides()

    def unprocessed(self) -> Unprocessed | None:
        """Returns the elements that follow the timers that fire now. Timers that have not fired are
        in state.
        """
        batch, first = self._batch, self._position
        if batch is None or self._ending:
            return None
        if first < len(batch.values) and self.sides[self._input].broadcast:
            return None  # After a change of the parallelism only one subtask would get the rest.
        return Unprocessed.rest_of(batch, first, self._context.watermark, self._input)

    def finish(self) -> RecordBatch:
        """Fires waiting processing-time timers, then calls the function's own `finish`."""
        if self._timers is None:
            rows = Rows()
            self._finish_function(rows)
            return rows.batch(self._mark, MIN_WATERMARK)
        self._context.timer_service.begin_end()
        self._ending = True
        self._batch, self._input, self._position = empty_batch(), 0, 0
        return self.resume(DRAIN_RECORDS_MAX)

    def snapshot_state(self, checkpoint_id: int) -> Awaitable[None] | None:
        return self._user.snapshot_state(self.ctx)

    async def close(self) -> None:
        await self._user.close()

    # Input without keys.

    def _process_unkeyed(self, index: int, batch: RecordBatch) -> RecordBatch:
        values, context, side = batch.values, self._context, self.sides[index]
        out: list[Any] = []
        origin: list[int] = []
        stamps, marks = batch.timestamps, batch.watermarks
        context.broadcast_writable = side.broadcast
        rest = iter(values if type(values) is list else list(values))
        try:
            if stamps is None and marks is None:
                self._call_plainly(index, rest, out)
            else:
                self._call_with_times(
                    index,
                    rest,
                    repeat(None) if stamps is None else stamps,
                    repeat(context.watermark) if marks is None else marks,
                    out,
                    origin,
                )
        except BaseException as error:
            self._note(error, values, rest)
            raise
        finally:
            context.timestamp = None
            context.broadcast_writable = False
        if batch.watermark > context.watermark:
            context.watermark = batch.watermark
        self._mark = context.watermark
        return batch.select(origin, out)

    def _call_plainly(self, index: int, values: Iterator[Any], out: list[Any]) -> None:
        """Calls the function for elements without event time, and appends the results to `out`."""
        call, context, append, plain = self._calls[index], self._context, out.append, PLAIN_RESULTS
        for value in values:
            result = call(value, context)
            if result is not None:
                # Most generators yield one element; `extend` prepares for several.
                for made in (
                    result if type(result) in plain else elements_of(result, self._described(index))
                ):
                    append(made)

    def _call_with_times(
        self,
        index: int,
        values: Iterator[Any],
        stamps: Iterable[int | None],
        marks: Iterable[int],
        out: list[Any],
        origin: list[int],
    ) -> None:
        """Calls the function for elements with event time, and appends the results to `out`.

        For each result, appends the index of its element to `origin`.
        """
        call, context, append, plain = self._calls[index], self._context, out.append, PLAIN_RESULTS
        add_origin = origin.append
        for i, value, stamp, mark in zip(count(), values, stamps, marks):
            context.timestamp = stamp
            context.watermark = mark
            result = call(value, context)
            if result is not None:
                for made in (
                    result if type(result) in plain else elements_of(result, self._described(index))
                ):
                    append(made)
                    add_origin(i)

    def _note(self, error: BaseException, values: list[Any], rest: Iterator[Any]) -> None:
        """Adds a note to `error`, raised by the function, that names the failing element of
        `values`.

        `rest` is the iterator over `values`, which has stopped after this element.
        """
        note_no_time(error, self.ctx)
        at = len(values) - length_hint(rest) - 1
        if at >= 0:
            note_once(
                error, f"in {describe_place(self.ctx)}, at record {describe_record(values[at])}"
            )

    def _note_timer(self, error: BaseException, timestamp: int, key: Any) -> None:
        timer = f"the timer {timestamp} of key {describe_record(key)}"
        note_once(error, f"in {describe_place(self.ctx)}, at {timer}")

    # Input with keys.

    def _process_keyed(self, max_records: int) -> RecordBatch:
        """Continues the current batch to its end, or until timers have fired for a whole time
        slice.
        """
        batch, context, timers, keyed = self._batch, self._context, self._timers, self._keyed
        assert batch is not None and timers is not None and keyed is not None
        values, keys, stamps, watermarks = (
            batch.values,
            batch.keys,
            batch.timestamps,
            batch.watermarks,
        )
        call, side = self._calls[self._input], self.sides[self._input]
        if keys is None and values and not side.broadcast:
            raise AssertionError(
                f"operator {self.ctx.name!r} got a batch without keys: the edge before it must be "
                "keyed"
            )
        service = context.timer_service
        rows = Rows()
        out, add_stamp, add_mark = rows.values, rows.stamps.append, rows.marks.append
        append, extend, size = out.append, out.extend, len(values)
        plain = PLAIN_RESULTS
        deadline, is_at_end = NO_DEADLINE, False
        current, marked = context.watermark, self._mark
        start = self._position
        rest = iter(values[start:] if start or type(values) is not list else values)
        of_keys = repeat(NO_KEY) if keys is None else islice(keys, start, None)
        try:
            context.broadcast_writable = side.broadcast
            if (
                stamps is None
                and watermarks is None
                and not self._has_event_time
                and service.next_due > current
            ):
                # No timer becomes due before the end of the batch, and `rest` is empty then.
                self._mark = marked = max(marked, current)
                self._call_with_keys(call, rest, of_keys, out)
                rows.stamps.extend(repeat(None, len(out)))
                rows.marks.extend(repeat(current, len(out)))
            for value, key, stamp, mark in zip(  # noqa: B905
                rest,
                of_keys,
                repeat(None) if stamps is None else islice(stamps, start, None),
                repeat(current) if watermarks is None else islice(watermarks, start, None),
            ):
                # `mark` is lower only after a restore. Event time then stays at the restored time
                # of the timers until the stream has reached it again.
                if mark > current:
                    current = mark
                if service.next_due <= current:
                    if deadline == NO_DEADLINE:
                        deadline = self._perf_ns() + DRAIN_NS
                    if not self._fire_due(current, rows, deadline, max_records):
                        self._position = size - length_hint(rest) - 1
                        return self._given_amid_timers(rows)
                    marked = self._mark
                if current > marked:
                    self._mark = marked = current
                context.watermark = current
                keyed.current_key = key
                context.timestamp = stamp
                result = call(value, context)
                if result is None:
                    continue
                if type(result) is list and len(result) > FEW_RESULTS:
                    extend(result)
                    rows.stamps.extend(repeat(stamp, len(result)))
                    rows.marks.extend(repeat(current, len(result)))
                    continue
                for made in (
                    result
                    if type(result) in plain
                    else elements_of(result, self._described(self._input))
                ):
                    append(made)
                    add_stamp(stamp)
                    add_mark(current)
            is_at_end = True
            if batch.watermark > current:
                current = batch.watermark
            if service.next_due <= current:
                if deadline == NO_DEADLINE:
                    deadline = self._perf_ns() + DRAIN_NS
                if not self._fire_due(current, rows, deadline, max_records):
                    self._position = size
                    return self._given_amid_timers(rows)
                marked = self._mark
            if current > marked:
                self._mark = current
        except BaseException as error:
            if not is_at_end:
                self._note(error, values, rest)
            raise
        finally:
            keyed.current_key = NO_KEY
            context.timestamp = None
            context.broadcast_writable = False
        context.watermark = timers.current_watermark = current
        if self._ending and not self._finish_keyed(rows, max_records):
            return self._given(rows, self._mark)
        self._batch = None
        return self._given(rows, self._news(batch))

    def _call_with_keys(
        self,
        call: Callable[..., Any],
        values: Iterator[Any],
        keys: Iterator[Any],
        out: list[Any],
    ) -> None:
        """Calls the function for elements without event time, each with its key as the current key.

        Appends the results to `out`.
        """
        context, keyed, append, plain = self._context, self._keyed, out.append, PLAIN_RESULTS
        assert keyed is not None
        for value, key in zip(values, keys):  # noqa: B905
            keyed.current_key = key
            result = call(value, context)
            if result is None:
                continue
            if type(result) is list and len(result) > FEW_RESULTS:
                out.extend(result)
                continue
            for made in (
                result
                if type(result) in plain
                else elements_of(result, self._described(self._input))
            ):
                append(made)

    def _given(self, rows: Rows, watermark: int) -> RecordBatch:
        """Returns `rows` as a batch that ends with `watermark`, and notes `watermark` as sent
        downstream.
        """
        before, self._sent = self._sent, max(self._sent, watermark)
        return rows.batch(before, watermark)

    def _given_amid_timers(self, rows: Rows) -> RecordBatch:
        """Returns `rows` as a batch while some due timers have not fired.

        The next operator gets a new watermark only with an output, or after all timers have fired.
        So the order in which its own timers fire does not depend on where a time slice ended.
        """
        return self._given(rows, max([self._sent, *rows.marks[-1:]]))

    def _news(self, batch: RecordBatch) -> int:
        """Returns the watermark to emit after `batch`, or MIN_WATERMARK if there is no new one."""
        return MIN_WATERMARK if batch.watermark == MIN_WATERMARK else self._mark

    def _fire_due(self, watermark: int, rows: Rows, deadline: int, max_records: int) -> bool:
        """Fires event-time timers up to `watermark`.

        Adds their output to `rows`. Returns False if not all timers have fired because `rows` has
        `max_records` or the clock has passed `deadline` (ns).
        """
        timers, context = self._timers, self._context
        assert timers is not None
        if context.watermark > timers.current_watermark:
            timers.current_watermark = context.watermark
        watermark = max(watermark, timers.current_watermark)
        writable, context.broadcast_writable = context.broadcast_writable, False
        is_first = True
        # A record often makes one timer due. No call then finds out that it was the only one.
        while (next_due := timers.next_event_time) <= watermark:
            if is_first:
                is_first = False
            elif self._perf_ns() >= deadline or len(rows.values) >= max_records:
                return False
            timestamp, key, _ = timers.pop_due(watermark)  # type: ignore[misc]
            if timestamp - 1 > self._mark:
                self._mark = timestamp - 1
            context.watermark = timers.current_watermark
            self._call_on_timer(timestamp, key, rows, self._mark)
        timers.current_watermark = watermark
        context.timer_service.next_due = next_due
        context.broadcast_writable = writable
        return True

    def _call_on_timer(self, timestamp: int, key: Any, rows: Rows, mark: int) -> None:
        context = self._context
        stamp = context.timestamp = timestamp if self._has_event_time else None
        context.mark = mark
        try:
            result = (self._on_timer or self._timer_function())(timestamp, context)
            if result is not None:
                rows.add(
                    result if type(result) in PLAIN_RESULTS else elements_of(result, "on_timer"),
                    stamp,
                    mark,
                )
        except BaseException as error:
            self._note_timer(error, timestamp, key)
            raise
        finally:
            context.mark = None

    def _on_processing_time(self, timestamp: int, key: Any, namespace: Any) -> None:
        self._context.collect_sides()
        try:
            self._call_on_timer(timestamp, key, self._fired, self._mark)
        except BaseException:
            self._context.flush_sides()
            raise
        self._context.timestamp = None

    def _emit_fired(self) -> None:
        """Emits the output of processing-time timers, and of event-time timers that they registered
        and that are due already.
        """
        rows, self._fired = self._fired, Rows()
        timers, context = self._timers, self._context
        assert timers is not None and self._keyed is not None
        try:
            if self._batch is None and context.timer_service.next_due <= context.watermark:
                self._fire_due(context.watermark, rows, NO_DEADLINE, NO_DEADLINE)
                context.timestamp = None
                self._keyed.current_key = NO_KEY
        finally:
            context.flush_sides()
        if rows.values:
            self.ctx.emit(self._given(rows, MIN_WATERMARK))

    # The end of the input.

    def _finish_keyed(self, rows: Rows, max_records: int) -> bool:
        """Fires waiting processing-time timers, then calls the function's `finish`.

        Adds their output to `rows`. Returns False if `max_records` or the time slice is used up
        before all of this is done.
        """
        service, keyed = self._context.timer_service, self._keyed
        assert keyed is not None
        deadline = self._perf_ns() + DRAIN_NS
        try:
            while (timer := service.pop_ending()) is not None:
                self._call_on_timer(timer[0], timer[1], rows, self._mark)
                if service.next_due <= self._context.watermark:
                    self._fire_due(self._context.watermark, rows, NO_DEADLINE, NO_DEADLINE)
                if self._perf_ns() >= deadline or len(rows.values) >= max_records:
                    return False
        finally:
            keyed.current_key = NO_KEY
            self._context.timestamp = None
        self._ending = False
        self._finish_function(rows)
        return True

    def _finish_function(self, rows: Rows) -> None:
        finish = self._finish
        if finish is None:
            return
        stamp = self._mark if self._has_event_time else None
        try:
            rows.add(elements_of(finish(), "finish"), stamp, self._mark)
        except BaseException as error:
            note_once(error, f"in finish() of {describe_place(self.ctx)}")
            raise

    def _timer_function(self) -> Callable[..., Any]:
        if self._on_timer is None:
            raise TypeError(
                f"{describe_record(self._user.function)} registered a timer, but a plain function "
                "has no on_timer: make it a "
                "KeyedProcessFunction"
            )
        return self._on_timer

    def _described(self, index: int) -> str:
        if isinstance(self._user.function, Function):
            return f"{type(self._user.function).__name__}.{self.sides[index].method}"
        return getattr(self._user.function, "__qualname__", repr(self._user.function))


class KeyedProcessOperator(ProcessOperator):
    """The operator of a process function directly after `key_by`; `open` checks that the input is
    keyed.
    """

    async def open(self) -> None:
        require_keyed(self.ctx.keyed_state, self.ctx.name)
        await super().open()


class CoProcessOperator(ProcessOperator):
    """The operator of a `CoProcessFunction` with two inputs. Both are keyed, or neither is."""

    sides = (_Side("process_element1"), _Side("process_element2"))


class BroadcastProcessOperator(ProcessOperator):
    """The operator of a broadcast process function.

    Input 0 has the elements, keyed or not. Input 1 is the broadcast stream; only its elements may
    change broadcast state.
    """

    sides = (_Side("process_element"), _Side("process_broadcast_element", broadcast=True))


def _no_callback(timestamp: int, key: Any, namespace: Any) -> None:
    """Does nothing, because event-time timers are popped and fired inside `process_input`."""
