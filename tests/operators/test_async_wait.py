"""Async calls: a bounded number at once, results in order or within their epoch, every element
accounted for after any outcome of its call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.column_batch import NumberColumn
from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.errors import GraphError
from aioflow.core.functions import Failed, MapFunction, OutputTag, RuntimeContext
from aioflow.operators.async_io import AsyncWaitOperator, OrderedQueue, UnorderedQueue
from aioflow.operators.call_pool import Deadlines, Retry
from aioflow.operators.guarded_rows import GuardedRowsOperator

from .process_context import Context, opened, rows

MARK: ContextVar[str] = ContextVar("mark", default="none")
BAD: OutputTag[Failed[Any]] = OutputTag("bad")


class Calls:
    """An async function whose results the test gives, one by one."""

    def __init__(self) -> None:
        self.open: dict[Any, asyncio.Future[Any]] = {}
        self.started: list[Any] = []
        self.most = 0

    async def __call__(self, value: Any) -> Any:
        self.started.append(value)
        future = self.open[value] = asyncio.get_running_loop().create_future()
        self.most = max(self.most, len(self.open))
        try:
            return await future
        finally:
            self.open.pop(value, None)


def batch(
    values: Sequence[Any], marks: Sequence[int] | None = None, watermark: int = MIN_WATERMARK
) -> RecordBatch:
    """Element v has timestamp 100 + v."""
    return RecordBatch(
        list(values),
        [100 + v for v in values],
        None,
        None if marks is None else list(marks),
        watermark,
    )


@pytest.mark.parametrize(("ordered", "expected"), [(True, [1, 2, 3]), (False, [3, 1, 2])])
async def test_results_come_in_the_order_of_input_or_of_completion(
    ordered: bool, expected: list[int]
) -> None:
    """J5.3"""
    calls, context = Calls(), Context()
    operator = await opened(AsyncWaitOperator("map", calls, ordered=ordered), context)
    assert operator.process_batch(batch([1, 2, 3])).values == []
    await context.settle()
    for value in (3, 1, 2):
        calls.open[value].set_result(value)
        await context.settle()
    assert context.emitted_values == expected
    assert rows(context.emitted) == [(value, 100 + value, MIN_WATERMARK) for value in expected]
    assert not operator.busy


async def test_completions_of_one_turn_are_delivered_by_one_mail_as_one_batch() -> None:
    calls, context = Calls(), Context()
    operator = await opened(AsyncWaitOperator("map", calls), context)
    operator.process_batch(batch(range(50)))
    await context.settle()
    for value in range(50):
        calls.open[value].set_result(value)
    for _ in range(5):
        await asyncio.sleep(0)
    assert context.run_mail() == 1
    assert [len(out.values) for out in context.emitted] == [50]


async def test_unordered_results_stay_within_their_epoch() -> None:
    """J5.3"""
    calls, context = Calls(), Context()
    operator = await opened(AsyncWaitOperator("map", calls, ordered=False), context)
    out = [operator.process_batch(batch([1, 2, 3, 4], [5, 5, 9, 9], 20))]
    await context.settle()
    for value in (4, 2, 3, 1):
        calls.open[value].set_result(value)
        await context.settle()
    assert [value for value, _, _ in rows(out + context.emitted)] == [2, 1, 4, 3]
    assert rows(out + context.emitted) == [(2, 102, 5), (1, 101, 5), (4, 104, 9), (3, 103, 9)]
    assert context.emitted[-1].watermark == 20


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=25),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
async def test_watermarks_are_never_overtaken_nor_overtake_and_nothing_is_lost(
    steps: list[tuple[int, int]], sizes: list[int], ordered: bool, chance: Any
) -> None:
    """J5.3: `steps` are (rise of the watermark before the element, how many results it gives)."""
    calls, context = Calls(), Context()
    operator = await opened(
        AsyncWaitOperator("flat_map", calls, concurrency=5, ordered=ordered), context
    )
    marks, mark = [], 0
    for rise, _ in steps:
        mark += rise
        marks.append(mark)
    collected: list[RecordBatch] = []

    async def answer() -> None:
        await context.settle(4)
        value = chance.choice(list(calls.open))
        calls.open[value].set_result([(value, n) for n in range(steps[value][1])])
        await context.settle(4)
        collected.extend(context.emitted)
        context.emitted.clear()

    try:
        position, cut = 0, 0
        while position < len(steps):
            while (room := operator.room()) == 0:
                await answer()
            stop = min(len(steps), position + min(room, sizes[cut % len(sizes)]))
            after = marks[stop] if stop < len(steps) else marks[-1]
            collected.append(
                operator.process_batch(batch(range(position, stop), marks[position:stop], after))
            )
            position, cut = stop, cut + 1
        collected.append(operator.process_batch(empty_batch(MAX_WATERMARK)))
        while operator.busy:
            assert collected[-1].watermark < MAX_WATERMARK
            await answer()
    finally:
        await context.close()  # A drawn example may end early.
    found = rows(collected)
    assert calls.most <= 5
    expected = [
        ((i, n), 100 + i, marks[i]) for i, (_, count) in enumerate(steps) for n in range(count)
    ]
    assert sorted(found) == expected
    assert [mark for _, _, mark in found] == sorted(mark for _, _, mark in found)
    if ordered:
        assert found == expected
    assert max([MIN_WATERMARK] + [out.watermark for out in collected]) == MAX_WATERMARK


async def test_calls_in_flight_are_bounded_and_the_chain_is_notified_when_there_is_room() -> None:
    """J5.1"""
    calls, context = Calls(), Context()
    operator = await opened(AsyncWaitOperator("map", calls, concurrency=4), context)
    assert operator.room() == 4
    operator.process_batch(batch([1, 2, 3]))
    assert operator.room() == 1
    operator.process_batch(batch([4]))
    await context.settle()
    assert (operator.room(), len(calls.open)) == (0, 4)
    woken: list[int] = []
    operator.availability.on_available(lambda: woken.append(operator.room()))
    calls.open[2].set_result(2)
    await context.settle()
    assert woken == []  # In order: the second waits for the first, and keeps its place.
    calls.open[1].set_result(1)
    await context.settle()
    # One more waits for a worker, since one has ended in this turn of the loop.
    assert woken == [2 + 1]
    operator.process_batch(batch([5, 6, 7, 8]))
    await context.settle()
    assert (operator.room(), len(calls.open)) == (0, 4)
    await context.close()


async def test_availability_stays_up_only_when_nothing_is_in_flight() -> None:
    """Otherwise a task that waits for the end of `busy` would spin."""
    calls, context = Calls(), Context()
    operator = await opened(AsyncWaitOperator("map", calls, concurrency=4), context)
    assert operator.availability.is_available
    operator.process_batch(batch([1, 2]))
    await context.settle()
    ended = operator.availability.get_available_future()
    calls.open[1].set_result(1)
    await context.settle()
    assert (ended.done(), operator.availability.is_available, operator.busy) == (True, False, True)
    calls.open[2].set_result(2)
    await context.settle()
    assert (operator.availability.is_available, operator.busy) == (True, False)


async def test_the_watermark_follows_the_oldest_element_in_flight() -> None:
    calls, context = Calls(), Context()
    operator = await opened(AsyncWaitOperator("map", calls), context)
    assert operator.process_batch(empty_batch(3)).watermark == 3
    assert operator.process_batch(batch([1, 2], [5, 7], 9)).watermark == 5
    assert operator.process_batch(empty_batch(30)).watermark == MIN_WATERMARK
    await context.settle()
    calls.open[1].set_result(1)
    await context.settle()
    assert (context.emitted[0].watermarks, context.emitted[0].watermark) == (None, 7)
    calls.open[2].set_result(2)
    await context.settle()
    assert context.emitted[1].watermark == 30


async def test_filter_keeps_the_element_and_flat_map_takes_iterables_and_async_generators() -> None:
    async def even(value: int) -> bool:
        return value % 2 == 0

    async def repeat(value: int) -> Iterator[int]:
        return iter([value] * value)

    async def generate(value: int) -> AsyncIterator[int]:
        for n in range(value):
            await asyncio.sleep(0)
            yield n

    found = []
    for kind, function in (("filter", even), ("flat_map", repeat), ("flat_map", generate)):
        context = Context()
        operator = await opened(AsyncWaitOperator(kind, function), context)
        operator.process_batch(batch([1, 2, 3]))
        await context.settle()
        found.append(context.emitted_values)
    assert found == [[2], [1, 2, 2, 3, 3, 3], [0, 0, 1, 0, 1, 2]]


async def test_a_function_class_is_opened_and_closed() -> None:
    class Adds(MapFunction[int, int]):
        async def open(self, ctx: RuntimeContext) -> None:  # type: ignore[override]
            self.n = ctx.subtask_index

        async def map(self, value: int) -> int:  # type: ignore[override]
            return value + self.n

        async def close(self) -> None:  # type: ignore[override]
            self.n = -1

    context, function = Context(), Adds()
    operator = await opened(AsyncWaitOperator("map", function), context)
    operator.process_batch(batch([1]))
    await context.settle()
    await operator.close()
    assert (context.emitted_values, function.n) == ([2], -1)


# --------------------------------------------------------------------------------------------------
# errors, time and tries


async def test_calls_that_do_not_suspend_share_a_task_and_let_the_loop_go_on() -> None:
    tasks: list[Any] = []

    async def plain(value: int) -> int:
        tasks.append(asyncio.current_task())
        context.clock.perf_step_ns = 1_000_000
        return value

    context = Context()
    operator = await opened(AsyncWaitOperator("map", plain, concurrency=64), context)
    operator.process_batch(batch(range(64)))
    await asyncio.sleep(0)
    begun = len(tasks)
    await context.settle(100)
    assert context.emitted_values == list(range(64))
    assert None not in tasks
    assert len(set(tasks)) < 32
    assert begun < 10  # The clock of the test moves by a millisecond with each call.


async def test_calls_at_once_have_a_task_each_which_later_calls_use_again() -> None:
    tasks: dict[int, Any] = {}

    async def suspends(value: int) -> int:
        tasks[value] = asyncio.current_task()
        await asyncio.sleep(0)
        assert asyncio.current_task() is tasks[value]
        return value

    context = Context()
    operator = await opened(AsyncWaitOperator("map", suspends, concurrency=4), context)
    operator.process_batch(batch(range(20)))
    await context.settle(40)
    assert context.emitted_values == list(range(20))
    assert len(set(tasks.values())) == 4


async def test_a_context_variable_that_a_call_sets_is_not_seen_by_the_next() -> None:
    seen: list[str] = []

    async def marks(value: int) -> int:
        seen.append(MARK.get())
        MARK.set(f"of {value}")
        await asyncio.sleep(0)
        assert MARK.get() == f"of {value}"
        return value

    context = Context()
    operator = await opened(AsyncWaitOperator("map", marks, concurrency=2), context)
    operator.process_batch(batch(range(6)))
    await context.settle(40)
    assert (context.emitted_values, set(seen)) == (list(range(6)), {"none"})


async def test_a_context_variable_whose_values_cannot_be_compared_fails_no_call() -> None:
    class Array:
        def __eq__(self, other: object) -> bool:
            raise ValueError("the truth value of an array is ambiguous")

        __hash__ = None  # type: ignore[assignment]

    variable: ContextVar[Array] = ContextVar("variable")
    given, seen = Array(), list[bool]()
    variable.set(given)

    async def marks(value: int) -> int:
        seen.append(variable.get() is given)
        variable.set(Array())
        return value

    context = Context()
    operator = await opened(AsyncWaitOperator("map", marks, concurrency=1), context)
    operator.process_batch(batch(range(3)))
    await wait_until(context, lambda: not operator.busy)
    assert (context.emitted_values, seen) == ([0, 1, 2], [True] * 3)


@pytest.mark.parametrize("awaits", [True, False])
async def test_a_call_that_cancels_its_task_spoils_no_other_call(awaits: bool) -> None:
    async def cancels(value: int) -> int:
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        if value % 3 == 0:
            task.cancel()
            if awaits:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        return value

    context = Context()
    operator = await opened(AsyncWaitOperator("map", cancels, concurrency=2, on_error=BAD), context)
    operator.process_batch(batch(range(9)))
    await context.settle(60)
    assert context.emitted_values == [1, 2, 4, 5, 7, 8]
    assert [failure.value for _, failure, _, _ in context.side] == [0, 3, 6]
    assert not operator.busy


async def test_a_call_that_is_cancelled_after_its_end_harms_no_other_call() -> None:
    """Its task may be used again, or wait for a call."""
    loop = asyncio.get_running_loop()

    async def regrets(value: int) -> int:
        task = asyncio.current_task()
        assert task is not None
        if value == 0:
            loop.call_later(0.001, task.cancel)
        elif value == 1:
            await asyncio.sleep(0.01)
        return value

    context = Context()
    operator = await opened(AsyncWaitOperator("map", regrets, concurrency=2), context)
    operator.process_batch(batch([1, 0]))
    await wait_until(context, lambda: not operator.busy)
    assert context.emitted_values == [1, 0]


async def test_time_outs_of_asyncio_and_anyio_work_within_calls() -> None:
    async def bounded(value: int) -> list[str]:
        found = []
        try:
            async with asyncio.timeout(0.001):
                await asyncio.sleep(60)
        except TimeoutError:
            found.append("asyncio")
        with anyio.move_on_after(0.001) as scope:
            await anyio.sleep(60)
        if scope.cancelled_caught:
            found.append("anyio")
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 0)
        return found

    context = Context()
    operator = await opened(AsyncWaitOperator("map", bounded, concurrency=3, timeout_s=60), context)
    operator.process_batch(batch(range(9)))
    await wait_until(context, lambda: not operator.busy)
    await operator.close()
    assert context.emitted_values == [["asyncio", "anyio"]] * 9


async def test_one_timer_ends_each_call_at_its_own_time() -> None:
    calls, context = Calls(), Context()
    operator = await opened(
        AsyncWaitOperator("map", calls, timeout_s=0.05, on_timeout=lambda value: -value), context
    )
    operator.process_batch(batch([1, 2]))
    await context.settle()
    calls.open[1].set_result(1)
    await asyncio.sleep(0.02)
    operator.process_batch(batch([3]))
    await wait_until(context, lambda: 2 not in calls.open)
    assert 3 in calls.open
    await wait_until(context, lambda: not operator.busy)
    assert context.emitted_values == [1, -2, -3]
    await operator.close()


async def test_an_error_fails_the_task_with_a_note_and_only_once() -> None:
    async def fail(value: int) -> None:
        raise LookupError(f"no {value}")

    context = Context()
    operator = await opened(AsyncWaitOperator("map", fail), context)
    operator.process_batch(batch([7, 8]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(context.mail) == 1
    with pytest.raises(LookupError, match="no 7") as caught:
        context.run_mail()
    assert caught.value.__notes__ == ["aioflow: in operator 'alerts', subtask 2/4, at record 7"]


@pytest.mark.parametrize("ordered", [True, False])
async def test_an_error_goes_to_the_side_output_and_the_rest_goes_on(ordered: bool) -> None:
    async def halve(value: int) -> int:
        if value % 2:
            raise ValueError(f"{value} is odd")
        return value // 2

    context = Context()
    operator = await opened(AsyncWaitOperator("map", halve, ordered=ordered, on_error=BAD), context)
    operator.process_batch(batch([1, 2, 4], [3, 4, 4], 8))
    await context.settle()
    assert context.emitted_values == [1, 2]
    assert context.side == [("bad", Failed(1, "1 is odd", "ValueError", "alerts", 101), 101, 3)]
    assert (operator.busy, context.emitted[-1].watermark) == (False, 8)


async def test_a_call_that_takes_too_long_is_a_timeout_error() -> None:
    """J5.4"""
    calls, context = Calls(), Context()
    operator = await opened(AsyncWaitOperator("map", calls, timeout_s=0.001, on_error=BAD), context)
    operator.process_batch(batch([1]))
    await wait_until(context, lambda: context.side)
    failure = context.side[0][1]
    assert failure.error_type == "TimeoutError"
    assert "no result within 0.001 s" in failure.error
    assert (calls.open, operator.busy) == ({}, False)


async def test_a_timeout_handler_gives_the_result_instead() -> None:
    """J5.4"""
    calls, context = Calls(), Context()
    operator = await opened(
        AsyncWaitOperator("map", calls, timeout_s=0.001, on_timeout=lambda value: -value), context
    )
    operator.process_batch(batch([1, 2]))
    await wait_until(context, lambda: not operator.busy)
    assert context.emitted_values == [-1, -2]


async def test_a_result_that_comes_after_the_timeout_is_ignored() -> None:
    """J5.4: here the function swallows its cancellation."""

    async def stubborn(value: int) -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
        return "late"

    context = Context()
    operator = await opened(
        AsyncWaitOperator("map", stubborn, timeout_s=0.001, on_timeout=lambda value: "handled"),
        context,
    )
    operator.process_batch(batch([1]))
    await wait_until(context, lambda: not operator.busy)
    assert context.emitted_values == ["handled"]


async def test_a_timeout_of_the_function_itself_is_an_error_like_any_other() -> None:
    async def impatient(value: int) -> None:
        raise TimeoutError("of my own")

    context = Context()
    operator = await opened(
        AsyncWaitOperator(
            "map", impatient, timeout_s=60, on_timeout=lambda value: "handled", on_error=BAD
        ),
        context,
    )
    operator.process_batch(batch([1]))
    await context.settle()
    assert [failure.error for _, failure, _, _ in context.side] == ["of my own"]


async def test_await_of_a_cancelled_future_is_an_error_and_loses_no_element() -> None:
    async def awaits(value: int) -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    context = Context()
    operator = await opened(AsyncWaitOperator("map", awaits, on_error=BAD), context)
    operator.process_batch(batch([1]))
    await context.settle()
    assert "user code raised CancelledError" in context.side[0][1].error
    assert not operator.busy


async def test_a_call_is_tried_again_after_the_errors_that_are_worth_it() -> None:
    tries: list[int] = []

    async def flaky(value: int) -> int:
        tries.append(value)
        if len(tries) < 3:
            raise ConnectionResetError("again")
        return value

    context = Context()
    retry = Retry(3, backoff="0ms", on=(OSError,))
    operator = await opened(AsyncWaitOperator("map", flaky, retry=retry), context)
    operator.process_batch(batch([1]))
    await wait_until(context, lambda: not operator.busy)
    assert (context.emitted_values, tries) == ([1], [1, 1, 1])


@pytest.mark.parametrize(("error", "tries"), [(ConnectionError("x"), 2), (ValueError("x"), 1)])
async def test_tries_end_with_the_last_error_or_with_one_that_is_not_worth_it(
    error: Exception, tries: int
) -> None:
    count = 0

    async def fail(value: int) -> None:
        nonlocal count
        count += 1
        raise error

    context = Context()
    operator = await opened(
        AsyncWaitOperator(
            "map", fail, retry=Retry(2, backoff="0ms", on=ConnectionError), on_error=BAD
        ),
        context,
    )
    operator.process_batch(batch([1]))
    await wait_until(context, lambda: not operator.busy)
    assert (count, context.side[0][1].error_type) == (tries, type(error).__name__)


async def test_the_timeout_bounds_all_tries_together() -> None:
    async def fail(value: int) -> None:
        raise OSError

    context = Context()
    retry = Retry(1_000_000, backoff="10ms", multiplier=1)
    operator = await opened(
        AsyncWaitOperator("map", fail, retry=retry, timeout_s=0.015, on_error=BAD), context
    )
    operator.process_batch(batch([1]))
    await wait_until(context, lambda: not operator.busy)
    assert context.side[0][1].error_type == "TimeoutError"


async def test_a_try_that_the_timeout_cancels_is_the_last() -> None:
    calls, context = Calls(), Context()
    retry = Retry(5, backoff="0ms")
    operator = await opened(
        AsyncWaitOperator("map", calls, retry=retry, timeout_s=0.001, on_error=BAD), context
    )
    operator.process_batch(batch([1]))
    await wait_until(context, lambda: context.side)
    assert context.side[0][1].error_type == "TimeoutError"
    assert calls.started == [1]


async def test_a_try_that_hides_the_cancellation_of_the_timeout_is_the_last() -> None:
    started, context = list[int](), Context()

    async def hides(value: int) -> None:
        started.append(value)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionError("aborted") from None

    retry = Retry(5, backoff="0ms")
    operator = await opened(
        AsyncWaitOperator("map", hides, retry=retry, timeout_s=0.001, on_error=BAD), context
    )
    operator.process_batch(batch([1]))
    await wait_until(context, lambda: context.side or len(started) > 1)
    assert started == [1]
    assert context.side[0][1].error_type == "ConnectionError"


def test_pauses_between_tries_grow_up_to_their_limit() -> None:
    retry = Retry(9, backoff="100ms", multiplier=3, max_backoff="1s")
    assert [retry.delay_s(tries) for tries in (1, 2, 3, 4, 5_000)] == [
        0.1,
        0.30000000000000004,
        0.9,
        1.0,
        1.0,
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Retry(0),
        lambda: Retry(2.0),  # type: ignore[arg-type]
        lambda: Retry(2, backoff="-1s"),
        lambda: Retry(2, backoff=5),  # type: ignore[arg-type]
        lambda: Retry(2, multiplier=0.5),
        lambda: Retry(2, on=(asyncio.CancelledError,)),  # type: ignore[arg-type]
        lambda: Retry(2, on="OSError"),  # type: ignore[arg-type]
        lambda: AsyncWaitOperator("map", print, concurrency=0),
        lambda: AsyncWaitOperator("map", print, timeout_s=0),
        lambda: AsyncWaitOperator("map", print, on_timeout=print),
    ],
)
def test_arguments_that_make_no_sense_are_refused_where_they_are_written(make: Any) -> None:
    with pytest.raises((ValueError, TypeError, GraphError), match=r"expected|without"):
        make()


# ----------------------------------------------------------------------------------------------
# blocking, restore, guarded


async def test_blocking_functions_run_elsewhere_a_generator_too() -> None:
    def repeat(value: int) -> Iterator[int]:
        ran.append(asyncio.current_task())
        yield from [value] * value

    ran: list[Any] = []
    context = Context()
    operator = await opened(AsyncWaitOperator("flat_map", repeat, blocking=True), context)
    assert operator.room() == 8
    operator.process_batch(batch([1, 2]))
    await context.settle()
    assert context.emitted_values == [1, 2, 2]
    assert ran == [None, None]  # Not inside the task of the call.


async def test_calls_in_flight_are_in_the_checkpoint_and_made_again_after_a_restore() -> None:
    calls, context = Calls(), Context()
    operator = await opened(AsyncWaitOperator("map", calls, concurrency=4), context)
    operator.process_batch(batch([1, 2, 3, 4], [1, 2, 3, 4], 9))
    await context.settle()
    for value in (1, 3):
        calls.open[value].set_result(value)
    await context.settle()
    assert context.emitted_values == [1]
    operator.snapshot_state(1)
    snapshot = context.operator_state.snapshot()
    await context.close()

    calls, restored = Calls(), Context()
    restored.operator_state.restore(snapshot)
    operator = await opened(AsyncWaitOperator("map", calls, concurrency=2), restored)
    assert (operator.room(), operator.busy, operator.availability.is_available) == (0, True, False)
    await restored.settle()
    assert calls.started == [2, 3]
    while operator.busy:
        for future in list(calls.open.values()):
            if not future.done():
                future.set_result("result")
        await restored.settle()
    assert calls.started == [2, 3, 4]
    assert [(value, stamp) for value, stamp, _ in rows(restored.emitted)] == [
        ("result", 102),
        ("result", 103),
        ("result", 104),
    ]


async def test_a_plain_function_with_on_error_diverts_what_fails() -> None:
    def fan_out(value: int) -> Iterator[int]:
        yield value
        yield 10 // value

    def positive(value: int) -> bool:
        return 1 / value > 0

    for kind, function, expected in (
        ("map", lambda value: 10 // value, [5, 2]),
        ("flat_map", fan_out, [2, 5, 5, 2]),
        ("filter", positive, [2, 5]),
    ):
        context = Context()
        operator = await opened(GuardedRowsOperator(kind, function, BAD), context)
        out = operator.process_batch(batch([2, 0, 5], [1, 2, 3], 9))
        assert out.values == expected
        assert (
            [mark for _, _, mark in rows([out])] == [1, 3] if len(expected) == 2 else [1, 1, 3, 3]
        )
        assert [(f.value, f.error_type, f.timestamp, mark) for _, f, _, mark in context.side] == [
            (0, "ZeroDivisionError", 100, 2)
        ]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_queues_keep_their_order_for_any_order_of_completion(
    rises: list[int], ordered: bool, chance: Any
) -> None:
    queue: OrderedQueue | UnorderedQueue = OrderedQueue() if ordered else UnorderedQueue()
    mark, marks, numbers = 0, list[int](), list[int]()
    for at, rise in enumerate(rises):
        mark += rise
        marks.append(mark)
        numbers += queue.add([f"value {at}"], [at], [mark])
    assert numbers == list(range(len(rises)))
    left, taken = list(numbers), list[Any]()
    failing = {number for number in numbers if chance.random() < 0.2}

    def take() -> None:
        found = queue.take()
        if found is not None:
            assert found.marks == sorted(found.marks)
            taken.extend(zip(found.results, found.timestamps, found.marks, strict=True))
            taken.extend((failure.value, *failure[1:3]) for failure in found.failures)
            assert all(str(failure.error) == failure.value for failure in found.failures)

    while left:
        number = left.pop(chance.randrange(len(left)))
        if number in failing:
            queue.errors[number] = ValueError(queue.values[number - queue.base])
        else:
            queue.results[number - queue.base] = f"value {number}"
        queue.complete([number])
        if chance.random() < 0.5:
            take()
        gone = {stamp for _, stamp, _ in taken}
        rest = [(f"value {n}", n, marks[n]) for n in numbers if n not in gone]
        assert list(queue.elements()) == rest
        assert len(queue) == len(rest)
        if rest:
            assert queue.oldest_mark == rest[0][2]
    take()
    assert sorted(taken, key=lambda one: one[1]) == [(f"value {n}", n, marks[n]) for n in numbers]
    assert not len(queue) and not queue.errors and not queue.results
    if ordered and not failing:
        assert [stamp for _, stamp, _ in taken] == numbers


def test_a_queue_keeps_its_list_of_elements_when_columns_come() -> None:
    """Workers hold the list: an element after columns and rows in turn was taken from another."""
    queue = OrderedQueue()
    held = queue.values
    for values in (NumberColumn(np.array([1, 2])), [3], NumberColumn(np.array([4]))):
        queue.add(values, [None] * len(values), [0] * len(values))
    assert queue.values is held == [1, 2, 3, 4]


async def wait_until(context: Context, condition: Any) -> None:
    """Let the loop run, its short timers too, until `condition()`."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)
            context.run_mail()


@pytest.mark.parametrize("kind", ["map", "filter", "flat_map"])
async def test_a_plain_function_that_gives_a_coroutine_is_never_taken_for_its_result(
    kind: str,
) -> None:
    async def double(value: int) -> int:
        return value * 2

    context = Context()
    guarded = await opened(GuardedRowsOperator(kind, lambda value: double(value), BAD), context)
    assert guarded.process_batch(batch([1])).values == []
    ((_, failure, _, _),) = context.side
    assert (failure.error_type, "declare the function itself as `async def`" in failure.error) == (
        "TypeError",
        True,
    )
    threaded = await opened(
        AsyncWaitOperator(kind, lambda value: double(value), blocking=True), context
    )
    threaded.process_batch(batch([1]))
    with pytest.raises(TypeError, match="returned coroutine, which is never awaited"):
        await context.settle()


@pytest.mark.parametrize("has_uvloop", [False, True])
@pytest.mark.parametrize("timeout_ms", [0.0, 0.3, 0.5, 1.4, 20.3])
def test_calls_end_at_their_time_on_every_loop(
    timeout_ms: float, has_uvloop: bool, uvloop: Any
) -> None:
    """uvloop gives a timer that is due within half a millisecond a handle without its time."""

    async def late() -> None:
        deadlines = Deadlines(timeout_ms / 1_000)

        async def call(number: int) -> tuple[bool, Any]:
            await asyncio.sleep(number / 3_000)
            return await deadlines.limit(asyncio.Event().wait())

        async with asyncio.timeout(60):
            assert await asyncio.gather(*map(call, range(20))) == [(False, None)] * 20
        deadlines.close()

    with asyncio.Runner(loop_factory=(uvloop if has_uvloop else asyncio).new_event_loop) as runner:
        runner.run(late())
