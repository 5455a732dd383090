"""Process functions: times exact to the record, timers between the records where the watermark
passes them, errors that say where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.errors import GraphError, StateError
from aioflow.core.functions import (
    CoProcessFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    OutputTag,
    ProcessContext,
    ProcessFunction,
    RuntimeContext,
)
from aioflow.core.signatures import resource, use
from aioflow.core.states import MapStateDescriptor, ValueStateDescriptor
from aioflow.operators.process.async_functions import AsyncProcessOperator
from aioflow.operators.process.functions import (
    BroadcastProcessOperator,
    CoProcessOperator,
    KeyedProcessOperator,
    ProcessOperator,
)

from .process_context import Context, keyed_batch, opened, push, rows

SILENCE_MS = 10


class AlertWhenSilent(KeyedProcessFunction[str, int, Any]):
    """Emits an alert for each key without records for `SILENCE_MS`: each record deletes the timer
    and sets it again.
    """

    def open(self, ctx: RuntimeContext) -> None:
        self.armed = ctx.get_state(ValueStateDescriptor("armed"))
        self.seen = ctx.get_state(ValueStateDescriptor("seen", default=0))

    def process_element(self, value: int, ctx: ProcessContext) -> Iterator[Any]:
        timers = ctx.timer_service
        if self.armed.value() is not None:
            timers.delete_event_time_timer(self.armed.value())
        assert ctx.timestamp is not None
        self.armed.update(ctx.timestamp + SILENCE_MS)
        timers.register_event_time_timer(ctx.timestamp + SILENCE_MS)
        self.seen.update(self.seen.value() + 1)
        if value % 5 == 0:
            yield ("value", ctx.current_key, value, ctx.current_watermark)

    def on_timer(self, timestamp: int, ctx: ProcessContext) -> Iterator[Any]:
        yield ("silent", ctx.current_key, timestamp, self.seen.value(), ctx.current_watermark)
        self.armed.clear()
        if (
            self.seen.value() % 3 == 0
        ):  # A chain of timers: due in the same advance when the watermark jumped.
            self.seen.update(self.seen.value() + 1)
            self.armed.update(timestamp + 1)
            ctx.timer_service.register_event_time_timer(timestamp + 1)


class Event(NamedTuple):
    key: str
    value: int
    timestamp: int
    watermark: int


def silent_alerts(events: Sequence[Event], final: int) -> list[tuple[Any, int, int]]:
    """The program above, one record at a time over a list of timers: (value, timestamp,
    watermark in force before).
    """
    timers: dict[tuple[int, str], None] = {}
    armed: dict[str, int] = {}
    seen: dict[str, int] = {}
    found: list[tuple[Any, int, int]] = []
    current = mark = MIN_WATERMARK

    def advance(watermark: int) -> None:
        nonlocal current, mark
        while due := [timer for timer in timers if timer[0] <= max(watermark, current)]:
            timestamp, key = min(
                due, key=lambda timer: timer[0]
            )  # The first registered among equals.
            del timers[timestamp, key]
            current, mark = (
                max(current, watermark if watermark == MAX_WATERMARK else timestamp),
                max(mark, timestamp - 1),
            )
            found.append((("silent", key, timestamp, seen[key], current), timestamp, mark))
            armed.pop(key)
            if seen[key] % 3 == 0:
                seen[key] += 1
                armed[key] = timestamp + 1
                timers[timestamp + 1, key] = None
        current = mark = max(current, watermark)

    for event in events:
        advance(event.watermark)
        if event.key in armed:
            timers.pop((armed[event.key], event.key), None)
        armed[event.key] = event.timestamp + SILENCE_MS
        timers[armed[event.key], event.key] = None
        seen[event.key] = seen.get(event.key, 0) + 1
        if event.value % 5 == 0:
            shown = None if current == MIN_WATERMARK else current
            found.append((("value", event.key, event.value, shown), event.timestamp, current))
    advance(final)
    return found


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Event], int]:
    """Records somewhat out of order, with a watermark that rises by any step, also far, also not
    at all.
    """
    events, watermark, time = [], MIN_WATERMARK, 0
    for _ in range(draw(st.integers(0, 30))):
        time += draw(st.sampled_from([0, 1, 2, 5, 11, 40]))
        events.append(
            Event(
                draw(st.sampled_from("abc")),
                draw(st.integers(0, 9)),
                time - draw(st.integers(0, 4)),
                watermark,
            )
        )
        if draw(st.booleans()):
            watermark = max(watermark, time - draw(st.integers(0, 6)))
    return events, draw(st.sampled_from([watermark, max(watermark, time + 7), MAX_WATERMARK]))


def cut(
    events: Sequence[Event], final: int, sizes: Sequence[int], sparse: bool
) -> list[RecordBatch]:
    """`events` as batches of `sizes`, repeated.

    `sparse` leaves out the watermarks of batches in which they do not move.
    """
    batches, position, in_force = [], 0, MIN_WATERMARK
    while position < len(events):
        part = events[position : position + sizes[len(batches) % len(sizes)]]
        position += len(part)
        after = events[position].watermark if position < len(events) else part[-1].watermark
        watermarks: list[int] | None = [event.watermark for event in part]
        if sparse and watermarks and watermarks[0] == watermarks[-1] == in_force:
            watermarks = None
        batches.append(
            keyed_batch(
                [e.key for e in part],
                [e.value for e in part],
                [e.timestamp for e in part],
                watermarks,
                after,
            )
        )
        in_force = after
    return [*batches, empty_batch(final)]


@given(
    histories(),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([1, 3, 1024]),
)
async def test_timers_fire_as_one_record_at_a_time_however_the_input_was_cut(
    history: tuple[list[Event], int], sizes: list[int], sparse: bool, resume: int
) -> None:
    """G5.2, G5.5"""
    events, final = history
    context = Context()
    context.clock.perf_step_ns = 1_000_000  # Every second timer ends a slice.
    operator = await opened(KeyedProcessOperator(AlertWhenSilent()), context)
    outputs = [
        out
        for batch in cut(events, final, sizes, sparse)
        for out in push(operator, batch, resume=resume)
    ]
    assert rows(outputs) == silent_alerts(events, final)
    assert context.timers is not None
    assert context.timers.current_watermark == final


class Timers(KeyedProcessFunction[str, Any, Any]):
    """Registers what a record says: a list of timestamps, negative ones are deleted."""

    def __init__(self, *, processing: bool = False) -> None:
        self.processing = processing

    def process_element(self, value: list[int], ctx: ProcessContext) -> None:
        service = ctx.timer_service
        for timestamp in value:
            if self.processing:
                register, delete = (
                    service.register_processing_time_timer,
                    service.delete_processing_time_timer,
                )
            else:
                register, delete = (
                    service.register_event_time_timer,
                    service.delete_event_time_timer,
                )
            (register if timestamp >= 0 else delete)(abs(timestamp))

    def on_timer(self, timestamp: int, ctx: ProcessContext) -> list[Any]:
        return [(ctx.current_key, timestamp)]


async def test_a_timer_registered_twice_fires_once() -> None:
    """G5.1"""
    operator = await opened(KeyedProcessOperator(Timers()), Context())
    outputs = push(operator, keyed_batch("aa", [[5, 5], [5]], [1, 2], None, 9))
    assert rows(outputs) == [(("a", 5), 5, 4)]


async def test_timers_fire_in_order_of_time_each_with_its_key_and_only_what_is_due() -> None:
    """G5.2"""
    operator = await opened(KeyedProcessOperator(Timers()), Context())
    outputs = push(operator, keyed_batch("abc", [[5], [3], [9]], [1, 1, 1], None, 6))
    assert rows(outputs) == [(("b", 3), 3, 2), (("a", 5), 5, 4)]
    assert outputs[-1].watermark == 6
    assert rows(push(operator, empty_batch(9)), 6) == [(("c", 9), 9, 8)]


async def test_a_deleted_timer_does_not_fire_and_deleting_none_is_no_error() -> None:
    """G5.5"""
    operator = await opened(KeyedProcessOperator(Timers()), Context())
    assert rows(
        push(operator, keyed_batch("aab", [[5], [-5, -7], [-5, 6]], [1, 1, 1], None, 20))
    ) == [(("b", 6), 6, 5)]


async def test_a_timer_in_the_past_fires_right_after_the_record_that_registered_it() -> None:
    operator = await opened(KeyedProcessOperator(Timers()), Context())
    push(operator, empty_batch(100))
    out = push(operator, keyed_batch("ab", [[50], [60]], [101, 102]))
    assert rows(out, 100) == [(("a", 50), 50, 100), (("b", 60), 60, 100)]


async def test_one_physical_timer_moves_to_the_earliest() -> None:
    """G5.4"""
    context = Context()
    operator = await opened(KeyedProcessOperator(Timers(processing=True)), context)
    push(operator, keyed_batch("ab", [[100], [200]]))
    assert context.physical_timers == [100]
    push(operator, keyed_batch("c", [[50]]))
    assert context.physical_timers == [50]
    context.advance(51)
    assert context.physical_timers == [100]
    context.advance(300)
    assert context.emitted_values == [("c", 50), ("a", 100), ("b", 200)]
    assert context.keyed_state is not None
    with pytest.raises(StateError):
        hash(context.keyed_state.current_key)


async def test_waiting_processing_time_timers_fire_at_the_end_of_input_and_cannot_be_set() -> None:
    class Again(Timers):
        def on_timer(self, timestamp: int, ctx: ProcessContext) -> list[Any]:
            ctx.timer_service.register_processing_time_timer(timestamp + 1)
            if ctx.current_key == "a":
                ctx.timer_service.delete_processing_time_timer(300)
            return [(ctx.current_key, timestamp)]

        def finish(self) -> Iterator[str]:
            yield "end"

    context = Context()
    context.clock.perf_step_ns = 1_500_000
    operator = await opened(KeyedProcessOperator(Again(processing=True)), context)
    push(operator, keyed_batch("baca", [[200], [100, 300], [300], [-100, 90]]))
    outputs = [operator.finish()]
    while operator.has_pending:
        outputs.append(operator.resume(1))
    assert [value for out in outputs for value in out.values] == [
        ("a", 90),
        ("b", 200),
        ("c", 300),
        "end",
    ]
    assert len(outputs) > 1


async def test_a_long_drain_gives_the_loop_back_and_sends_the_watermark_on_meanwhile() -> None:
    context = Context()
    operator = await opened(KeyedProcessOperator(Timers()), context)
    count = 5_000
    push(operator, keyed_batch(["k"] * count, [[10 * i] for i in range(count)], [0] * count))
    context.clock.perf_step_ns = 100_000  # Twenty timers a slice.
    outputs = push(operator, empty_batch(10 * count))
    assert len(outputs) >= count // 20
    assert max(len(out.values) for out in outputs) <= 21
    found = rows(outputs)
    assert [value[1] for value, _, _ in found] == [10 * i for i in range(count)]
    for out, following in pairwise(outputs):
        assert all(out.watermark < timestamp for _, timestamp in following.values), (
            "a result that follows would be late"
        )
        assert out.watermark >= out.values[-1][1] - 1
    assert outputs[-1].watermark == 10 * count


async def test_a_drain_is_bounded_by_its_records_too() -> None:
    class Many(Timers):
        def on_timer(self, timestamp: int, ctx: ProcessContext) -> list[int]:
            return [timestamp] * 10

    operator = await opened(KeyedProcessOperator(Many()), Context())
    push(operator, keyed_batch("k" * 300, [[i] for i in range(300)], [0] * 300))
    outputs = push(operator, empty_batch(1_000), resume=50)
    assert max(len(out.values) for out in outputs[1:]) <= 59
    assert sum(len(out.values) for out in outputs) == 3_000


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_after_a_restore_event_time_goes_on_where_the_timers_were(asynchronous: bool) -> None:
    class Sees(Timers):
        def process_element(  # type: ignore[override]
            self, value: Any, ctx: ProcessContext
        ) -> list[Any]:
            return [(value, ctx.current_watermark)]

    context = Context()
    operator = (
        AsyncProcessOperator(Sees(), keyed=True) if asynchronous else KeyedProcessOperator(Sees())
    )
    operator.setup(context)
    operator.initialize_state()
    assert context.timers is not None
    context.timers.register_event_time_timer("k", None, 60)
    context.timers.current_watermark = 50
    await operator.open()
    outputs = []
    for value, mark, after in ((1, 5, 40), (2, 55, 70)):
        outputs.append(operator.process_batch(keyed_batch("a", [value], [mark], [mark], after)))
        await context.work()
    assert rows(outputs + context.emitted, 50) == [
        ((1, 50), 5, 50),
        ((2, 55), 55, 55),
        (("k", 60), 60, 59),
    ]


async def test_watermarks_are_none_before_the_first_and_max_at_the_end() -> None:
    class Sees(KeyedProcessFunction[str, int, Any]):
        def process_element(self, value: int, ctx: ProcessContext) -> list[Any]:
            ctx.timer_service.register_event_time_timer(MAX_WATERMARK)
            return [(ctx.current_watermark, ctx.timer_service.current_watermark, ctx.timestamp)]

        def on_timer(self, timestamp: int, ctx: ProcessContext) -> list[Any]:
            return [(ctx.current_watermark, ctx.timer_service.current_watermark, ctx.timestamp)]

    operator = await opened(KeyedProcessOperator(Sees()), Context())
    outputs = push(operator, keyed_batch("aa", [1, 2], [5, 6], [MIN_WATERMARK, 3], 4)) + push(
        operator, empty_batch(MAX_WATERMARK)
    )
    assert [value for out in outputs for value in out.values] == [
        (None, None, 5),
        (3, 3, 6),
        (MAX_WATERMARK,) * 3,
    ]


async def test_without_event_time_there_is_no_timestamp_and_event_time_timers_are_refused() -> None:
    context = Context(has_event_time=False)
    operator = await opened(KeyedProcessOperator(Timers(processing=True)), context)
    assert rows(push(operator, keyed_batch("a", [[5]]))) == []
    context.advance(10)
    assert context.emitted[0].timestamps is None
    operator = await opened(KeyedProcessOperator(Timers()), Context(has_event_time=False))
    with pytest.raises(GraphError, match="watermark strategy") as caught:
        operator.process_batch(keyed_batch("a", [[5]]))
    assert "at record [5]" in caught.value.__notes__[0]


async def test_a_timer_in_the_past_fires_before_the_next_record_that_has_no_timestamp() -> None:
    class Told(Timers):
        def process_element(self, value: list[int], ctx: ProcessContext) -> Any:
            super().process_element(value, ctx)
            return [value]

    operator = await opened(KeyedProcessOperator(Told()), Context())
    push(operator, empty_batch(100))
    (out,) = push(operator, keyed_batch("ab", [[50], [60]]))
    assert out.values == [[50], ("a", 50), [60], ("b", 60)]


@given(
    records=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6)), max_size=30),
    cuts=st.lists(st.integers(0, 30)),
)
async def test_without_event_time_each_record_has_its_key_however_the_input_is_cut(
    records: list[tuple[str, int]], cuts: list[int]
) -> None:
    class Sums(KeyedProcessFunction[str, int, Any]):
        def open(self, ctx: RuntimeContext) -> None:
            self.sum = ctx.get_state(ValueStateDescriptor("sum", default=0))

        def process_element(self, value: int, ctx: ProcessContext) -> Any:
            self.sum.update(self.sum.value() + value)
            row = (ctx.current_key, self.sum.value(), ctx.timestamp)
            forms = (None, [row] * value, (row,) * value, iter([row] * value))
            return forms[value % len(forms)]

    sums, expected = dict.fromkeys("abc", 0), []
    for key, value in records:
        sums[key] += value
        expected += [(key, sums[key], None)] * (value if value % 4 else 0)
    operator = await opened(KeyedProcessOperator(Sums()), Context(has_event_time=False))
    got: list[Any] = []
    for start, end in pairwise([0, *sorted({min(cut, len(records)) for cut in cuts}), None]):
        some = records[start:end]
        batch = keyed_batch([key for key, _ in some], [value for _, value in some])
        for out in push(operator, batch):
            assert not out.values or (out.timestamps, out.watermarks) == (None, None)
            got += out.values
    assert got == expected


async def test_timers_and_keys_without_key_by_are_refused() -> None:
    """H2.2"""
    with pytest.raises(StateError, match="key_by"):
        await opened(KeyedProcessOperator(Timers()), Context(keyed=False))
    operator = await opened(ProcessOperator(Timers()), Context(keyed=False))
    with pytest.raises(StateError, match="key_by"):
        operator.process_batch(RecordBatch([[5]]))
    operator = await opened(
        ProcessOperator(lambda value, ctx: [ctx.current_key]), Context(keyed=False)
    )
    with pytest.raises(StateError, match="key_by"):
        operator.process_batch(RecordBatch([5]))


@pytest.mark.parametrize("timestamp", [1.5, "5", None, 2**63, -(2**63)])
async def test_a_timestamp_that_is_none_is_refused_when_registered(timestamp: Any) -> None:
    def process(value: Any, ctx: ProcessContext) -> None:
        ctx.timer_service.register_event_time_timer(value)

    operator = await opened(KeyedProcessOperator(process), Context())
    with pytest.raises((TypeError, ValueError), match="ms since the epoch"):
        operator.process_batch(keyed_batch("a", [timestamp], [1]))


async def test_error_for_a_plain_function_that_set_a_timer_says_that_it_has_no_on_timer() -> None:
    operator = await opened(
        KeyedProcessOperator(lambda value, ctx: ctx.timer_service.register_event_time_timer(3)),
        Context(),
    )
    with pytest.raises(TypeError, match="KeyedProcessFunction"):
        operator.process_batch(keyed_batch("a", [1], [1], None, 5))


# --------------------------------------------------------------------------------------------------
# results, errors


@pytest.mark.parametrize("keyed", [False, True])
async def test_results_may_be_none_a_list_any_iterable_or_a_generator(keyed: bool) -> None:
    def generate(value: int, ctx: ProcessContext) -> Iterator[Any]:
        yield from (ctx.timestamp for _ in range(value))

    forms = {0: None, 1: ["one"], 2: ("a", "b"), 3: range(3), 4: map(str, [7]), 5: frozenset(["s"])}
    operator = await opened(ProcessOperator(lambda value, ctx: forms[value]), Context(keyed=keyed))
    out = operator.process_batch(keyed_batch([0] * 6, range(6), range(10, 16), range(6), 99))
    assert out.values == ["one", "a", "b", 0, 1, 2, "7", "s"]
    assert (out.timestamps, out.watermarks) == (
        [11, 12, 12, 13, 13, 13, 14, 15],
        [1, 2, 2, 3, 3, 3, 4, 5],
    )
    assert (out.watermark, out.keys) == (99, None)
    operator = await opened(ProcessOperator(generate), Context(keyed=keyed))
    out = operator.process_batch(keyed_batch([0] * 3, [2, 0, 1], [10, 11, 12]))
    assert (out.values, out.timestamps, out.watermarks) == ([10, 10, 12], [10, 10, 12], None)


class Point(NamedTuple):
    x: int


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("result", ["text", b"bytes", {"a": 1}, 7, Point(1)])
async def test_one_element_returned_instead_of_yielded_is_refused(result: Any, keyed: bool) -> None:
    operator = await opened(ProcessOperator(lambda value, ctx: result), Context(keyed=keyed))
    with pytest.raises(TypeError, match="yield") as caught:
        operator.process_batch(keyed_batch("a", ["in"]))
    assert caught.value.__notes__ == ["aioflow: in operator 'alerts', subtask 2/4, at record 'in'"]


@pytest.mark.parametrize("keyed", [False, True])
async def test_a_coroutine_out_of_a_plain_function_is_refused(keyed: bool) -> None:
    async def later(value: Any) -> None: ...

    operator = await opened(ProcessOperator(lambda value, ctx: later(value)), Context(keyed=keyed))
    with pytest.raises(TypeError, match="async def"):
        operator.process_batch(keyed_batch("a", ["in"]))


@pytest.mark.parametrize("keyed", [False, True])
async def test_an_error_names_operator_subtask_and_record(keyed: bool) -> None:
    def process(value: int, ctx: ProcessContext) -> Iterator[float]:
        yield 1 / value

    operator = await opened(ProcessOperator(process), Context(keyed=keyed))
    with pytest.raises(ZeroDivisionError) as caught:
        operator.process_batch(keyed_batch("abc", [2, 0, 1]))
    assert caught.value.__notes__ == ["aioflow: in operator 'alerts', subtask 2/4, at record 0"]


async def test_an_error_in_a_timer_names_the_timer_and_its_key() -> None:
    class Fails(Timers):
        def on_timer(self, timestamp: int, ctx: ProcessContext) -> list[Any]:
            raise LookupError("nothing there")

    operator = await opened(KeyedProcessOperator(Fails()), Context())
    with pytest.raises(LookupError) as caught:
        operator.process_batch(keyed_batch("ab", [[5], []], [1, 1], [MIN_WATERMARK, 7], 7))
    assert caught.value.__notes__ == [
        "aioflow: in operator 'alerts', subtask 2/4, at the timer 5 of key 'a'"
    ]


async def test_side_outputs_carry_the_time_of_their_element() -> None:
    tag: OutputTag[Any] = OutputTag("odd")

    class Splits(Timers):
        def process_element(self, value: Any, ctx: ProcessContext) -> None:
            ctx.output(tag, value)
            ctx.timer_service.register_event_time_timer(value)

        def on_timer(self, timestamp: int, ctx: ProcessContext) -> None:
            ctx.output(tag, "timer")

    context = Context()
    operator = await opened(KeyedProcessOperator(Splits()), context)
    push(operator, keyed_batch("ab", [15, 30], [10, 20], [MIN_WATERMARK, 18], 19))
    assert context.side == [
        ("odd", 15, 10, MIN_WATERMARK),
        ("odd", "timer", 15, 14),
        ("odd", 30, 20, 18),
    ]


async def test_side_outputs_of_equal_tags_keep_the_order_of_their_elements() -> None:
    def split(value: Any, ctx: ProcessContext) -> None:
        ctx.output(OutputTag("odd" if value % 2 else "even"), value)

    context = Context(keyed=False)
    operator = await opened(ProcessOperator(split), context)
    operator.process_batch(RecordBatch([1, 2, 3, 4, 5]))
    assert [row[:2] for row in context.side if row[0] == "odd"] == [("odd", n) for n in (1, 3, 5)]
    assert [row[:2] for row in context.side if row[0] == "even"] == [("even", 2), ("even", 4)]


async def test_side_outputs_before_an_error_are_sent() -> None:
    def fail(value: Any, ctx: ProcessContext) -> None:
        ctx.output(OutputTag("seen"), value)
        if value == 2:
            raise ValueError("two")

    context = Context(keyed=False)
    operator = await opened(ProcessOperator(fail), context)
    with pytest.raises(ValueError, match="two") as raised:
        operator.process_batch(RecordBatch([1, 2, 3]))
    assert [value for _, value, _, _ in context.side] == [1, 2]
    assert "at record 2" in raised.value.__notes__[0]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_side_outputs_outside_of_a_call_are_sent_at_once(asynchronous: bool) -> None:
    tag: OutputTag[Any] = OutputTag("kept")

    class Keeps(ProcessFunction[int, Any]):
        def process_element(self, value: int, ctx: ProcessContext) -> None:
            self.ctx = ctx

        def finish(self) -> None:
            self.ctx.output(tag, "end")

    context, function = Context(keyed=False), Keeps()
    made = AsyncProcessOperator if asynchronous else ProcessOperator
    operator = await opened(made(function), context)
    operator.process_batch(RecordBatch([1]))
    await context.work()
    function.ctx.output(tag, "between batches")
    assert [value for _, value, _, _ in context.side] == ["between batches"]
    operator.finish()
    await context.work()
    assert [value for _, value, _, _ in context.side] == ["between batches", "end"]


async def test_side_outputs_before_an_error_of_an_asynchronous_function_are_sent() -> None:
    async def fail(value: int, ctx: ProcessContext) -> None:
        ctx.output(OutputTag("seen"), value)
        if value == 2:
            raise ValueError("two")

    context = Context(keyed=False)
    operator = await opened(AsyncProcessOperator(fail), context)
    operator.process_batch(RecordBatch([1, 2, 3]))
    with pytest.raises(ValueError, match="two"):
        await context.work()
    assert [value for _, value, _, _ in context.side] == [1, 2]


async def test_side_outputs_before_an_error_of_a_timer_are_sent() -> None:
    class Fails(Timers):
        def process_element(self, value: int, ctx: ProcessContext) -> None:
            ctx.timer_service.register_processing_time_timer(value)

        def on_timer(self, timestamp: int, ctx: ProcessContext) -> None:
            ctx.output(OutputTag("seen"), timestamp)
            if timestamp == 7:
                raise LookupError("seven")

    context = Context()
    operator = await opened(KeyedProcessOperator(Fails()), context)
    operator.process_batch(keyed_batch("ab", [5, 7]))
    with pytest.raises(LookupError, match="seven"):
        context.advance(10)
    assert [value for _, value, _, _ in context.side] == [5, 7]


async def test_functions_learn_where_they_run() -> None:
    operator = await opened(
        ProcessOperator(lambda value, ctx: [dict(ctx.metadata)]), Context(keyed=False)
    )
    assert operator.process_batch(RecordBatch([1])).values == [
        {
            "operator": "alerts",
            "uid": "alerts-uid",
            "subtask_index": 1,
            "parallelism": 4,
            "attempt": 0,
        }
    ]


async def test_resources_are_passed_to_every_method() -> None:
    async def make() -> None: ...

    there = resource(make)

    class Uses(KeyedProcessFunction[str, int, Any]):
        def process_element(
            self, value: int, ctx: ProcessContext, got: Any = use(there)
        ) -> list[Any]:
            ctx.timer_service.register_event_time_timer(5)
            return [got]

        def on_timer(self, timestamp: int, ctx: ProcessContext, got: Any = use(there)) -> list[Any]:
            return [got, timestamp]

    context = Context()
    context.resources[there] = "opened"
    operator = await opened(KeyedProcessOperator(Uses()), context)
    assert operator.process_batch(keyed_batch("a", [1], [1], None, 9)).values == [
        "opened",
        "opened",
        5,
    ]


# --------------------------------------------------------------------------------------------------
# life cycle


async def test_state_is_initialised_before_open_and_finish_before_close() -> None:
    """B5.3, B5.4"""
    log: list[str] = []

    class Logs(ProcessFunction[int, Any]):
        def initialize_state(self, ctx: Any) -> None:
            log.append(f"initialize {ctx.operator_state is not None}")

        def snapshot_state(self, ctx: Any) -> None:
            log.append("snapshot")

        async def open(self, ctx: RuntimeContext) -> None:  # type: ignore[override]
            log.append("open")

        def process_element(self, value: int, ctx: ProcessContext) -> None:
            log.append(f"element {value}")

        def finish(self) -> Iterator[str]:
            log.append("finish")
            yield "last words"

        def close(self) -> None:
            log.append("close")

    operator = await opened(ProcessOperator(Logs()), Context(keyed=False))
    operator.process_batch(RecordBatch([1, 2]))
    operator.snapshot_state(1)
    assert operator.finish().values == ["last words"]
    await operator.close()
    await operator.close()
    assert log == [
        "initialize True",
        "open",
        "element 1",
        "element 2",
        "snapshot",
        "finish",
        "close",
    ]


async def test_a_function_whose_open_failed_is_closed_once() -> None:
    """B5.2"""
    closed: list[int] = []

    class Fails(ProcessFunction[int, Any]):
        def open(self, ctx: RuntimeContext) -> None:
            raise OSError("no route")

        def close(self) -> None:
            closed.append(1)

    operator = ProcessOperator(Fails())
    with pytest.raises(OSError, match="no route"):
        await opened(operator, Context(keyed=False))
    await operator.close()
    assert closed == [1]


async def test_a_plain_function_is_neither_opened_nor_closed() -> None:
    """B5.1"""

    class Callable:
        def __call__(self, value: Any, ctx: ProcessContext) -> list[Any]:
            return [value]

        def open(self, ctx: Any) -> None:
            raise AssertionError("not a Function")

        close = finish = open

    operator = await opened(ProcessOperator(Callable()), Context(keyed=False))
    assert operator.process_batch(RecordBatch([1])).values == [1]
    assert operator.finish().values == []
    await operator.close()


async def test_state_has_no_current_key_between_batches() -> None:
    """H2.6"""

    class Keeps(KeyedProcessFunction[str, int, Any]):
        def open(self, ctx: RuntimeContext) -> None:
            self.state = ctx.get_state(ValueStateDescriptor("n", default=0))

        def process_element(self, value: int, ctx: ProcessContext) -> list[int]:
            self.state.update(self.state.value() + value)
            return [self.state.value()]

    function = Keeps()
    operator = await opened(KeyedProcessOperator(function), Context())
    assert operator.process_batch(keyed_batch("aba", [1, 2, 3])).values == [1, 2, 4]
    with pytest.raises(StateError, match="current key"):
        function.state.value()


# --------------------------------------------------------------------------------------------------
# two inputs


async def test_two_inputs_share_the_state_and_timers_of_their_key() -> None:
    class Matches(KeyedCoProcessFunction[str, int, str, Any]):
        def open(self, ctx: RuntimeContext) -> None:
            self.left = ctx.get_state(ValueStateDescriptor("left"))

        def process_element1(self, value: int, ctx: ProcessContext) -> None:
            self.left.update(value)
            assert ctx.timestamp is not None
            ctx.timer_service.register_event_time_timer(ctx.timestamp + 5)

        def process_element2(self, value: str, ctx: ProcessContext) -> Iterator[Any]:
            yield (ctx.current_key, self.left.value(), value)

        def on_timer(self, timestamp: int, ctx: ProcessContext) -> Iterator[Any]:
            self.left.clear()
            yield ("expired", ctx.current_key)

    operator = await opened(CoProcessOperator(Matches()), Context())
    assert operator.inputs == 2
    out = push(operator, keyed_batch("ab", [1, 2], [10, 11]), 0)
    out += push(operator, keyed_batch("ab", ["x", "y"], [12, 13], [MIN_WATERMARK, 15], 15), 1)
    assert rows(out) == [
        (("a", 1, "x"), 12, MIN_WATERMARK),
        (("expired", "a"), 15, 14),
        (("b", 2, "y"), 13, 15),
    ]


async def test_two_inputs_without_keys_each_have_their_method() -> None:
    class Tags(CoProcessFunction[int, int, Any]):
        def process_element1(self, value: int, ctx: ProcessContext) -> list[Any]:
            return [(1, value)]

        def process_element2(self, value: int, ctx: ProcessContext) -> list[Any]:
            return [(2, value)]

    operator = await opened(CoProcessOperator(Tags()), Context(keyed=False))
    assert operator.process_input(0, RecordBatch([5])).values == [(1, 5)]
    assert operator.process_input(1, RecordBatch([5])).values == [(2, 5)]


RULES: MapStateDescriptor[str, int] = MapStateDescriptor("rules")


class Limits(KeyedBroadcastProcessFunction[str, int, tuple[str, int], Any]):
    def process_element(self, value: Any, ctx: ProcessContext) -> Iterator[Any]:
        rules = ctx.get_broadcast_state(RULES)
        if value == "write":
            rules.put("limit", 0)
        yield (value, rules.get("limit", "none"), rules.contains("limit"), list(rules.items()))

    def process_broadcast_element(
        self, value: tuple[str, int], ctx: ProcessContext
    ) -> Iterator[Any]:
        ctx.get_broadcast_state(RULES).put(*value)
        yield ("changed", ctx.current_watermark)


@pytest.mark.parametrize("keyed", [False, True])
async def test_broadcast_state_is_read_on_one_side_and_written_on_the_other(keyed: bool) -> None:
    operator = await opened(BroadcastProcessOperator(Limits()), Context(keyed=keyed))
    assert operator.process_input(0, keyed_batch("a", [1])).values == [(1, "none", False, [])]
    assert operator.process_input(1, RecordBatch([("limit", 7)], None, None, [3], 3)).values == [
        ("changed", 3)
    ]
    assert operator.process_input(0, keyed_batch("a", [2])).values == [(2, 7, True, [("limit", 7)])]
    with pytest.raises(StateError, match="process_broadcast_element"):
        operator.process_input(0, keyed_batch("a", ["write"]))


@pytest.mark.parametrize(
    "use",
    [lambda ctx: ctx.current_key, lambda ctx: ctx.timer_service.register_processing_time_timer(5)],
)
async def test_a_broadcast_element_has_no_key_and_no_timers(use: Any) -> None:
    class Uses(KeyedBroadcastProcessFunction[str, int, int, Any]):
        def process_element(self, value: int, ctx: ProcessContext) -> None: ...

        def process_broadcast_element(self, value: int, ctx: ProcessContext) -> None:
            use(ctx)

    operator = await opened(BroadcastProcessOperator(Uses()), Context())
    operator.process_input(0, keyed_batch("a", [1]))
    with pytest.raises(StateError, match="broadcast element"):
        operator.process_input(1, RecordBatch([1]))


async def test_a_timer_fired_on_the_way_of_a_broadcast_cannot_write_broadcast_state() -> None:
    class Writes(KeyedBroadcastProcessFunction[str, int, int, Any]):
        def process_element(self, value: int, ctx: ProcessContext) -> None:
            ctx.timer_service.register_event_time_timer(5)

        def process_broadcast_element(self, value: int, ctx: ProcessContext) -> None: ...

        def on_timer(self, timestamp: int, ctx: ProcessContext) -> None:
            ctx.get_broadcast_state(RULES).put("a", 1)

    operator = await opened(BroadcastProcessOperator(Writes()), Context())
    operator.process_input(0, keyed_batch("a", [1], [1]))
    with pytest.raises(StateError, match="read-only"):
        operator.process_input(1, RecordBatch([1], [9], None, [8], 8))
