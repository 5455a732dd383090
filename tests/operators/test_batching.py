"""Batches of elements for one call, and elements let through by time: bounded, in order, with
the watermark behind them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.errors import GraphError
from aioflow.operators.batching import MapBatchesOperator, ThrottleOperator
from aioflow.operators.operator import UNBOUNDED_ROOM

from .process_context import Context, opened, rows


class Batches:
    """Remembers the lists that it was called with; the result is each element's square."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, values: list[int]) -> list[int]:
        self.calls.append(values)
        return [value * value for value in values]


class AsyncBatches(Batches):
    def __init__(self) -> None:
        super().__init__()
        self.gates: list[asyncio.Future[None]] = []

    async def __call__(self, values: list[int]) -> list[int]:  # type: ignore[override]
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gates.append(gate)
        await gate
        return super().__call__(values)


async def test_a_full_list_is_called_at_once_and_the_rest_after_the_wait() -> None:
    function, context = Batches(), Context()
    operator = await opened(MapBatchesOperator(function, 3, "20ms"), context)
    out = operator.process_batch(RecordBatch([1, 2, 3, 4], [10, 20, 30, 40], None, [1, 2, 3, 4], 5))
    assert rows([out]) == [(1, 10, 1), (4, 20, 2), (9, 30, 3)]
    assert (out.watermark, operator.busy) == (4, True)
    context.advance(20)
    assert context.emitted == []
    context.advance(21)
    assert (rows(context.emitted, 4), context.emitted[0].watermark, operator.busy) == (
        [(16, 40, 4)],
        5,
        False,
    )
    assert function.calls == [[1, 2, 3], [4]]


async def test_the_wait_is_that_of_the_first_element() -> None:
    function, context = Batches(), Context()
    operator = await opened(MapBatchesOperator(function, 3, "20ms"), context)
    operator.process_batch(RecordBatch([1]))
    context.advance(15)
    operator.process_batch(RecordBatch([2]))
    context.advance(21)
    assert function.calls == [[1, 2]]
    operator.process_batch(RecordBatch([3]))
    assert context.physical_timers == [41]
    operator.process_batch(RecordBatch([4, 5]))
    assert (function.calls[1:], context.physical_timers) == ([[3, 4, 5]], [])
    operator.process_batch(RecordBatch([6]))
    assert context.physical_timers == [41]


async def test_the_end_waits_for_nothing_and_what_comes_then_is_not_gathered_either() -> None:
    function, context = Batches(), Context()
    operator = await opened(MapBatchesOperator(function, 100, "1h"), context)
    operator.process_batch(RecordBatch([1, 2], None, None, None, 5))
    operator.input_stopped()
    assert operator.has_pending
    context.emit(operator.resume(1))
    assert not operator.has_pending
    assert (rows(context.emitted), context.emitted[-1].watermark) == (
        [(1, None, MIN_WATERMARK), (4, None, MIN_WATERMARK)],
        5,
    )
    assert (operator.busy, context.physical_timers) == (False, [])
    assert operator.process_batch(RecordBatch([3])).values == [9]
    assert not operator.busy


async def test_without_a_wait_a_list_is_what_came_at_once() -> None:
    function = Batches()
    operator = await opened(MapBatchesOperator(function, 2, None), Context())
    assert operator.process_batch(RecordBatch([1, 2, 3])).values == [1, 4, 9]
    assert (function.calls, operator.room()) == ([[1, 2], [3]], UNBOUNDED_ROOM)


async def test_async_function_has_one_call_in_progress_while_the_next_list_is_gathered() -> None:
    function, context = AsyncBatches(), Context()
    operator = await opened(MapBatchesOperator(function, 2, "1h"), context)
    assert operator.room() == 2
    assert operator.process_batch(RecordBatch([1, 2], None, None, [3, 4], 5)).watermark == 3
    assert operator.room() == 2
    assert (
        operator.process_batch(RecordBatch([3, 4], None, None, [6, 7], 8)).watermark
        == MIN_WATERMARK
    )
    assert operator.room() == 0
    woken: list[int] = []
    operator.availability.on_available(lambda: woken.append(operator.room()))
    await context.settle()
    assert len(function.gates) == 1
    function.gates[0].set_result(None)
    await context.settle()
    assert (woken, operator.room(), function.calls) == ([2], 2, [[1, 2]])
    assert context.emitted[0].watermark == 6
    function.gates[1].set_result(None)
    await context.settle()
    assert rows(context.emitted, 3) == [(1, None, 3), (4, None, 4), (9, None, 6), (16, None, 7)]
    assert (context.emitted[1].watermark, operator.busy, operator.availability.is_available) == (
        8,
        False,
        True,
    )


async def test_blocking_functions_run_elsewhere_a_generator_too() -> None:
    ran: list[Any] = []

    def squares(values: list[int]) -> Iterator[int]:
        ran.append(asyncio.current_task())
        yield from (value * value for value in values)

    context = Context()
    operator = await opened(MapBatchesOperator(squares, 2, blocking=True), context)
    assert operator.process_batch(RecordBatch([1, 2])).values == []
    await context.settle()
    assert (context.emitted_values, ran) == ([1, 4], [None])


@pytest.mark.parametrize("result", [[1], [1, 2, 3], "ab", {"a": 1, "b": 2}, None, 7])
@pytest.mark.parametrize("kind", ["inline", "async", "blocking"])
async def test_anything_but_one_result_for_each_element_is_an_error(result: Any, kind: str) -> None:
    async def asynchronous(values: list[int]) -> Any:
        return result

    context = Context()
    function = asynchronous if kind == "async" else lambda values: result
    operator = await opened(MapBatchesOperator(function, 2, blocking=kind == "blocking"), context)
    with pytest.raises((ValueError, TypeError), match="map_batches returned") as caught:
        operator.process_batch(RecordBatch([5, 6]))
        await context.settle()
    assert caught.value.__notes__ == [
        "aioflow: in operator 'alerts', subtask 2/4, at the 2 records from 5 to 6"
    ]


@given(
    st.lists(st.integers(0, 2), max_size=30),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([None, "5ms"]),
)
async def test_results_and_watermarks_are_those_of_a_map(
    rises: list[int], sizes: list[int], max_size: int, is_async: bool, wait: str | None
) -> None:
    async def asynchronous(values: list[int]) -> list[int]:
        calls.append(len(values))
        return [-value for value in values]

    def plain(values: list[int]) -> list[int]:
        calls.append(len(values))
        return [-value for value in values]

    calls: list[int] = []
    context = Context()
    operator = await opened(
        MapBatchesOperator(asynchronous if is_async else plain, max_size, wait), context
    )
    marks = [sum(rises[: i + 1]) for i in range(len(rises))]
    collected: list[RecordBatch] = []
    position, cut = 0, 0
    while position < len(rises):
        while (room := operator.room()) == 0:
            await context.settle(3)
            collected += context.emitted
            context.emitted.clear()
        stop = min(len(rises), position + min(room, sizes[cut % len(sizes)]))
        after = marks[stop] if stop < len(rises) else marks[-1]
        numbers = list(range(position, stop))
        collected += context.emitted
        context.emitted.clear()
        collected.append(
            operator.process_batch(RecordBatch(numbers, numbers, None, marks[position:stop], after))
        )
        context.advance(context.clock.now_ms + 3)
        position, cut = stop, cut + 1
    collected += context.emitted
    context.emitted.clear()
    operator.input_stopped()
    while operator.busy:
        context.emit(operator.resume(1) if operator.has_pending else empty_batch())
        await context.settle(60)
    context.emit(operator.process_batch(empty_batch(MAX_WATERMARK)))
    collected += context.emitted
    assert rows(collected) == [(-i, i, mark) for i, mark in enumerate(marks)]
    assert max([MIN_WATERMARK] + [out.watermark for out in collected]) == MAX_WATERMARK
    assert max([0, *calls]) <= max_size
    assert not operator.busy


async def test_held_elements_are_in_the_checkpoint_and_passed_again_after_a_restore() -> None:
    context = Context()
    operator = await opened(MapBatchesOperator(AsyncBatches(), 2, "1h"), context)
    operator.process_batch(RecordBatch([1, 2], [10, 20]))
    operator.process_batch(RecordBatch([3], [30]))
    await context.settle()
    operator.snapshot_state(1)
    snapshot = context.operator_state.snapshot()
    await context.close()
    restored = Context()
    restored.operator_state.restore(snapshot)
    function = Batches()
    operator = await opened(MapBatchesOperator(function, 2, "1h"), restored)
    assert operator.busy
    restored.run_mail()
    assert (function.calls, operator.busy) == ([[1, 2], [3]], False)
    assert rows(restored.emitted) == [
        (1, 10, MIN_WATERMARK),
        (4, 20, MIN_WATERMARK),
        (9, 30, MIN_WATERMARK),
    ]


async def test_a_throttle_lets_at_most_n_pass_in_any_stretch_of_time() -> None:
    context = Context()
    operator = await opened(ThrottleOperator(3, "100ms"), context)
    passed: list[int] = []
    waiting = 12
    for now in range(0, 500, 10):
        context.advance(now)
        if not operator.availability.is_available:
            continue
        while waiting and (room := operator.room()):
            take = min(room, waiting, 2)
            batch = RecordBatch(list(range(take)))
            assert operator.process_batch(batch) is batch
            passed += [now] * take
            waiting -= take
    assert waiting == 0
    assert all(sum(start <= at < start + 100 for at in passed) <= 3 for start in range(500))
    assert passed[-1] <= 330
    await operator.close()
    assert context.physical_timers == []


async def test_a_throttle_gives_back_what_passed_as_it_grows_old_and_no_more() -> None:
    context = Context()
    operator = await opened(ThrottleOperator(3, "100ms"), context)
    operator.process_batch(RecordBatch([1]))
    context.advance(50)
    operator.process_batch(RecordBatch([2, 3]))
    rooms = []
    for now in (50, 99, 100, 149, 150):
        context.advance(now)
        rooms.append(operator.room())
    assert rooms == [0, 0, 1, 1, 3]


async def test_watermarks_pass_a_throttle_without_being_counted() -> None:
    operator = await opened(ThrottleOperator(1), Context())
    for watermark in (1, 2, 3):
        assert operator.room() == 1
        assert operator.process_batch(empty_batch(watermark)).watermark == watermark


@pytest.mark.parametrize(
    "make",
    [
        lambda: MapBatchesOperator(print, 0),
        lambda: MapBatchesOperator(print, 2, "-1s"),
        lambda: ThrottleOperator(0),
        lambda: ThrottleOperator(1, "0s"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_where_they_are_written(make: Any) -> None:
    with pytest.raises(GraphError, match="expected"):
        make()
