"""Stateful coroutines: one element at a time, nothing else meanwhile, and the same answers as a
plain function gives.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.elements import MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.errors import StateError
from aioflow.core.functions import (
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    ProcessContext,
    ProcessFunction,
    RuntimeContext,
)
from aioflow.core.states import MapStateDescriptor, ValueStateDescriptor
from aioflow.operators.process.async_functions import (
    PENDING_UNKEYED,
    AsyncBroadcastProcessOperator,
    AsyncCoProcessOperator,
    AsyncProcessOperator,
    is_async_process,
)
from aioflow.operators.process.functions import DRAIN_NS, DRAIN_RECORDS_MAX
from tests.state.snapshots import restore, taken

from .process_context import Context, keyed_batch, opened, rows
from .test_process import AlertWhenSilent, Event, cut, histories, silent_alerts


class AsyncAlerts(AlertWhenSilent):
    """The same program with pauses in it."""

    async def process_element(  # type: ignore[override]
        self, value: int, ctx: ProcessContext
    ) -> AsyncIterator[Any]:
        for result in super().process_element(value, ctx):
            await asyncio.sleep(0)
            yield result

    async def on_timer(  # type: ignore[override]
        self, timestamp: int, ctx: ProcessContext
    ) -> list[Any]:
        await asyncio.sleep(0)
        return list(super().on_timer(timestamp, ctx))


async def feed(
    operator: Any, context: Context, batches: Sequence[RecordBatch], index: int = 0
) -> list[RecordBatch]:
    """Yields the results of `batches`, taken as the chain takes them: as much as there is room for,
    the rest when there is room again.
    """
    outputs: list[RecordBatch] = []
    for batch in batches:
        start = 0
        while start < len(batch.values) or start == 0:
            while operator.room() == 0:
                await context.work()
            stop = start + operator.room()
            part = batch.slice(start, stop) if start or stop < len(batch.values) else batch
            outputs.append(operator.process_input(index, part))
            start = stop
            await context.work()
            outputs += context.emitted
            context.emitted.clear()
    return outputs


@given(histories(), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.booleans())
async def test_timers_fire_as_one_record_at_a_time_however_the_input_was_cut(
    history: tuple[list[Event], int], sizes: list[int], sparse: bool
) -> None:
    """G5.2, G5.5, J4.1"""
    events, final = history
    context = Context()
    context.clock.perf_step_ns = 1_000_000
    operator = await opened(AsyncProcessOperator(AsyncAlerts(), keyed=True), context)
    outputs = await feed(operator, context, cut(events, final, sizes, sparse))
    assert rows(outputs) == silent_alerts(events, final)
    assert context.timers is not None
    assert (context.timers.current_watermark, operator.busy) == (final, False)


async def test_while_an_element_awaits_nothing_else_of_the_subtask_runs_and_the_key_stays() -> None:
    """J4.1"""
    log: list[Any] = []
    gate = asyncio.Event()

    class Slow(KeyedProcessFunction[str, int, Any]):
        def open(self, ctx: RuntimeContext) -> None:
            self.sum = ctx.get_state(ValueStateDescriptor("sum", default=0))

        async def process_element(self, value: int, ctx: ProcessContext) -> list[Any]:
            before = self.sum.value()
            ctx.timer_service.register_processing_time_timer(5)
            log.append(("begin", value))
            await gate.wait()
            self.sum.update(before + value)
            log.append(("end", value))
            return [(ctx.current_key, self.sum.value(), ctx.timestamp)]

        async def on_timer(self, timestamp: int, ctx: ProcessContext) -> list[Any]:
            log.append(("timer", ctx.current_key))
            return [("timer", ctx.current_key, self.sum.value())]

    context = Context()
    operator = await opened(AsyncProcessOperator(Slow(), keyed=True), context)
    assert operator.room() == 1
    assert operator.process_batch(keyed_batch("a", [1], [10])).values == []
    working = asyncio.create_task(context.work())
    for _ in range(3):
        await asyncio.sleep(0)
    assert (
        operator.room(),
        operator.busy,
        operator.has_pending,
        operator.availability.is_available,
    ) == (0, True, False, False)
    context.execute(lambda: log.append("checkpoint"), "checkpoint")
    context.advance(20)  # The timer of the first element is due while it awaits.
    for _ in range(3):
        await asyncio.sleep(0)
    assert log == [("begin", 1)]
    gate.set()
    await working
    assert log == [("begin", 1), ("end", 1), "checkpoint", ("timer", "a")]
    assert context.emitted_values == [("a", 1, 10), ("timer", "a", 1)]
    assert (operator.room(), operator.busy, operator.availability.is_available) == (1, False, True)
    assert context.keyed_state is not None
    with pytest.raises(StateError):
        {context.keyed_state.current_key}


async def test_an_element_that_was_taken_and_not_begun_is_in_the_checkpoint() -> None:
    class Sums(KeyedProcessFunction[str, int, Any]):
        async def process_element(self, value: int, ctx: ProcessContext) -> list[Any]:
            return [(ctx.current_key, value, ctx.timestamp)]

    context = Context()
    operator = await opened(AsyncProcessOperator(Sums(), keyed=True), context)
    operator.process_batch(keyed_batch("k", [7], [70]))
    operator.snapshot_state(1)
    assert context.keyed_state is not None
    snapshot = taken(context.keyed_state)
    await context.work()
    operator.snapshot_state(2)
    later = taken(context.keyed_state)

    for state, expected in ((snapshot, [("k", 7, 70)]), (later, [])):
        restored = Context()
        assert restored.keyed_state is not None
        restore(restored.keyed_state, [state])
        operator = await opened(AsyncProcessOperator(Sums(), keyed=True), restored)
        assert operator.room() == (0 if expected else 1)
        await restored.work()
        assert (restored.emitted_values, operator.busy) == (expected, False)


async def test_element_with_an_unused_key_is_in_the_checkpoint_too() -> None:
    """One side of connected streams has keys, the other has none: the operator has no keyed state
    for the element.
    """

    class Passes(ProcessFunction[int, Any]):
        async def process_element(self, value: int, ctx: ProcessContext) -> list[Any]:
            return [value]

    context = Context(keyed=False)
    operator = await opened(AsyncProcessOperator(Passes()), context)
    operator.process_batch(keyed_batch("k", [7], [70]))
    operator.snapshot_state(1)
    assert [one[:3] for one in context.operator_state.get_list_state(PENDING_UNKEYED).get()] == [
        (0, 7, 70)
    ]
    await context.work()
    assert context.emitted_values == [7]


async def test_elements_of_several_former_subtasks_come_one_after_the_other() -> None:
    class Tags(KeyedCoProcessFunction[str, int, int, Any]):
        async def process_element1(self, value: int, ctx: ProcessContext) -> list[Any]:
            return [(1, value)]

        async def process_element2(self, value: int, ctx: ProcessContext) -> list[Any]:
            return [(2, value)]

    snapshots = []
    for index, key in ((1, "b"), (0, "a")):
        context = Context()
        operator = await opened(AsyncCoProcessOperator(Tags(), keyed=True), context)
        operator.process_input(index, keyed_batch(key, [index]))
        operator.snapshot_state(1)
        assert context.keyed_state is not None
        snapshots.append(taken(context.keyed_state))
    restored = Context()
    assert restored.keyed_state is not None
    restore(restored.keyed_state, snapshots)
    operator = await opened(AsyncCoProcessOperator(Tags(), keyed=True), restored)
    await restored.work()
    assert (restored.emitted_values, operator.room()) == ([(1, 0), (2, 1)], 1)


async def test_a_processing_time_timer_whose_mail_waits_is_in_the_checkpoint() -> None:
    class Arms(KeyedProcessFunction[str, int, Any]):
        async def process_element(self, value: int, ctx: ProcessContext) -> None:
            ctx.timer_service.register_processing_time_timer(value)

        async def on_timer(self, timestamp: int, ctx: ProcessContext) -> list[Any]:
            return [(ctx.current_key, timestamp)]

    context = Context()
    operator = await opened(AsyncProcessOperator(Arms(), keyed=True), context)
    await feed(operator, context, [keyed_batch("ab", [5, 6])])
    context.advance(6)
    assert operator.busy
    operator.snapshot_state(1)
    assert context.timers is not None
    assert context.timers.processing_time_timers() == [(5, "a", None), (6, "b", None)]
    await context.work()
    assert context.emitted_values == []
    context.advance(7)
    await context.work()
    context.advance(8)
    await context.work()
    assert context.emitted_values == [("a", 5), ("b", 6)]


async def test_timers_of_the_clock_that_are_due_at_once_fire_in_several_mails() -> None:
    class Arms(KeyedProcessFunction[str, int, Any]):
        async def process_element(self, value: int, ctx: ProcessContext) -> None:
            ctx.timer_service.register_processing_time_timer(value)

        async def on_timer(self, timestamp: int, ctx: ProcessContext) -> list[Any]:
            return [timestamp]

    context, count = Context(), 3 * DRAIN_RECORDS_MAX
    operator = await opened(AsyncProcessOperator(Arms(), keyed=True), context)
    await feed(operator, context, [keyed_batch("a", [value]) for value in range(count)])
    context.advance(count)
    await context.work()
    assert not operator.busy
    assert operator.room() == 1
    assert context.emitted_values == list(range(count))
    assert max(len(batch.values) for batch in context.emitted) <= DRAIN_RECORDS_MAX
    context.emitted.clear()
    await feed(operator, context, [keyed_batch("a", [value]) for value in range(count)])
    context.clock.perf_step_ns = DRAIN_NS
    context.advance(2 * count)
    await context.work()
    assert [len(batch.values) for batch in context.emitted if batch.values] == [1] * count


async def test_at_the_end_waiting_timers_fire_and_finish_is_awaited() -> None:
    class Ends(KeyedProcessFunction[str, int, Any]):
        async def process_element(self, value: int, ctx: ProcessContext) -> None:
            ctx.timer_service.register_processing_time_timer(value)

        async def on_timer(self, timestamp: int, ctx: ProcessContext) -> list[Any]:
            await asyncio.sleep(0)
            if timestamp > 1:
                ctx.timer_service.register_event_time_timer(1)
            return [(ctx.current_key, timestamp)]

        async def finish(self) -> AsyncIterator[str]:
            await asyncio.sleep(0)
            yield "end"

    context = Context()
    context.clock.perf_step_ns = 1_500_000
    operator = await opened(AsyncProcessOperator(Ends(), keyed=True), context)
    await feed(operator, context, [keyed_batch("ab", [900, 800], [1, 1], None, 5)])
    assert operator.finish().values == []
    assert operator.busy
    await context.work()
    assert context.emitted_values == [("b", 800), ("b", 1), ("a", 900), ("a", 1), "end"]
    assert not operator.busy


async def test_cancelling_ends_the_call_at_once_and_closes_its_generator() -> None:
    """B3.1"""
    log: list[str] = []

    async def process(value: int, ctx: ProcessContext) -> AsyncIterator[int]:
        try:
            yield value
            await asyncio.sleep(60)
        finally:
            log.append("closed")

    context = Context(keyed=False)
    operator = await opened(AsyncProcessOperator(process), context)
    operator.process_batch(RecordBatch([1]))
    working = asyncio.create_task(context.work())
    await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert log == ["closed"]
    assert context.emitted_values == []
    await operator.close()


async def test_an_error_names_operator_subtask_and_record_or_timer() -> None:
    class Fails(KeyedProcessFunction[str, int, Any]):
        async def process_element(self, value: int, ctx: ProcessContext) -> list[int]:
            ctx.timer_service.register_event_time_timer(value)
            return [1 // value]

        async def on_timer(self, timestamp: int, ctx: ProcessContext) -> str:
            return "not a list"

    for value, error, place in (
        (0, ZeroDivisionError, "record 0"),
        (5, TypeError, "the timer 5 of key 'a'"),
    ):
        context = Context()
        operator = await opened(AsyncProcessOperator(Fails(), keyed=True), context)
        operator.process_batch(keyed_batch("a", [value], [1], None, 6))
        with pytest.raises(error) as caught:
            await context.work()
        assert caught.value.__notes__ == [f"aioflow: in operator 'alerts', subtask 2/4, at {place}"]


async def test_a_keyed_function_on_a_stream_without_key_is_refused_at_open() -> None:
    """H2.2"""
    with pytest.raises(StateError, match="key_by"):
        await opened(AsyncProcessOperator(AsyncAlerts(), keyed=True), Context(keyed=False))


async def test_without_a_key_elements_go_one_by_one_and_watermarks_pass() -> None:
    async def process(value: int, ctx: ProcessContext) -> list[Any]:
        await asyncio.sleep(0)
        return [(value, ctx.current_watermark)]

    context = Context(keyed=False)
    operator = await opened(AsyncProcessOperator(process), context)
    outputs = await feed(
        operator, context, [RecordBatch([1, 2], [10, 11], None, [3, 4], 6), empty_batch(8)]
    )
    assert rows(outputs) == [((1, 3), 10, 3), ((2, 4), 11, 4)]
    assert outputs[-1].watermark == 8
    assert not context.mail


async def test_broadcast_state_is_written_on_its_side_only() -> None:
    rules: MapStateDescriptor[str, int] = MapStateDescriptor("rules")

    class Limits(KeyedBroadcastProcessFunction[str, int, tuple[str, int], Any]):
        async def process_element(self, value: Any, ctx: ProcessContext) -> list[Any]:
            if value == "write":
                ctx.get_broadcast_state(rules).put("limit", 0)
            return [ctx.get_broadcast_state(rules).get("limit")]

        async def process_broadcast_element(
            self, value: tuple[str, int], ctx: ProcessContext
        ) -> None:
            ctx.get_broadcast_state(rules).put(*value)

    context = Context()
    operator = await opened(AsyncBroadcastProcessOperator(Limits(), keyed=True), context)
    await feed(operator, context, [RecordBatch([("limit", 7)])], 1)
    assert rows(await feed(operator, context, [keyed_batch("a", [1])])) == [
        (7, None, MIN_WATERMARK)
    ]
    with pytest.raises(StateError, match="read-only"):
        await feed(operator, context, [keyed_batch("a", ["write"])])


def test_async_functions_are_distinguished_from_plain_ones() -> None:
    class Plain(ProcessFunction[int, int]):
        def process_element(self, value: int, ctx: ProcessContext) -> Iterator[int]:
            yield value

    class OnlyTimer(Plain):
        async def on_timer(self, timestamp: int, ctx: ProcessContext) -> None: ...

    class Generates(ProcessFunction[int, int]):
        async def process_element(self, value: int, ctx: ProcessContext) -> AsyncIterator[int]:
            yield value

    class Callable:
        async def __call__(self, value: int, ctx: ProcessContext) -> None: ...

    async def function(value: int, ctx: ProcessContext) -> None: ...

    for asynchronous in (OnlyTimer, OnlyTimer(), Generates, Generates(), Callable(), function):
        assert is_async_process(asynchronous)
    for plain in (Plain, Plain(), lambda value, ctx: None):
        assert not is_async_process(plain)
