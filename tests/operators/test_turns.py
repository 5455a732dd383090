"""Work that is due at once is done in turns: how much of it one turn does, counted by what it
gives and by what it looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.functions import ProcessWindowFunction
from aioflow.core.states import ValueStateDescriptor
from aioflow.operators.aggregate import functions
from aioflow.operators.join.joins import CoGroupOperator
from aioflow.operators.join.stream_joins import IntervalJoinOperator
from aioflow.operators.join.window_join import WindowJoinOperator
from aioflow.operators.operator import Operator
from aioflow.operators.results import RESULTS_FIRST
from aioflow.operators.window.assigners import global_window, keep_last, session, tumbling
from aioflow.operators.window.operator import WindowOperator
from aioflow.operators.window.slices import ClockWindowOperator
from aioflow.operators.window.triggers import on_count, purging

from .context import Context, cut, opened, untimed

START = MIN_WATERMARK
PIECE = 700
SIDE = 100
"""Elements of each side of a join: their pairs are many pieces."""


def turns(
    operator: Any, first: RecordBatch, each: Callable[[], int] = lambda: 0
) -> list[tuple[list[Any], int]]:
    """Returns for each turn, beginning with `first`, its output and the count of `each` after it.

    The count begins at 0.
    """
    done = [(first.values, each())]
    while operator.has_pending:
        done.append((operator.resume(PIECE).values, each()))
    return done


def most(done: list[tuple[list[Any], int]]) -> int:
    """Returns the largest increase of the count in one turn."""
    return max(after - before for before, after in pairwise([0, *(count for _, count in done)]))


class Called:
    """A window function that counts its calls, and gives the key or nothing."""

    def __init__(self, *, silent: bool = False) -> None:
        self.count = 0
        self.silent = silent

    def __call__(self, key: Any, ctx: Any, elements: Any) -> tuple[Any, ...]:
        self.count += 1
        return () if self.silent else (key,)


def nothing(*args: Any) -> Iterator[Any]:
    yield from ()


# --------------------------------------------------------------------------------------------------
# processing time


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize(
    "assigner", [tumbling("10s", time="processing"), session("10s", time="processing")], ids=str
)
async def test_windows_of_the_clock_that_are_open_at_the_end_fire_in_turns(
    assigner: Any, silent: bool
) -> None:
    keys, called = 5_000, Called(silent=silent)
    ctx = Context(has_event_time=False)
    operator = await opened(WindowOperator(assigner, process=called), ctx)
    operator.process_batch(RecordBatch([0] * keys, None, list(range(keys))))
    done = turns(operator, operator.finish(), lambda: called.count)
    assert [key for values, _ in done for key in values] == ([] if silent else list(range(keys)))
    assert called.count == keys
    assert most(done) == PIECE
    assert ctx.keyed_state.table("window-contents").namespaces() == []
    assert ctx.timers["window-timers"].processing_time_timers() == []


async def test_a_timer_waits_in_the_queue_until_it_is_its_turn_at_the_end() -> None:
    keys = 3_000
    ctx = Context(has_event_time=False)
    operator = await opened(
        WindowOperator(tumbling("10s", time="processing"), process=Called()), ctx
    )
    operator.process_batch(RecordBatch([0] * keys, None, list(range(keys))))
    given = len(operator.finish().values)
    while operator.has_pending:
        assert len(ctx.timers["window-timers"].processing_time_timers()) == keys - given
        given += len(operator.resume(PIECE).values)
    assert given == keys


@pytest.mark.parametrize("silent", [False, True])
async def test_windows_that_the_clock_fires_do_so_in_turns(silent: bool) -> None:
    keys, called = 3_000, Called(silent=silent)
    ctx = Context(has_event_time=False)
    operator = await opened(WindowOperator(tumbling("10s", time="processing"), process=called), ctx)
    operator.process_batch(RecordBatch([0] * keys, None, list(range(keys))))
    first = ctx.advance(10_000)
    assert called.count <= 2 * RESULTS_FIRST
    rest = [key for values, _ in turns(operator, empty_batch()) for key in values]
    assert first + rest == ([] if silent else list(range(keys)))
    assert called.count == keys


@pytest.mark.parametrize("silent", [False, True])
async def test_a_mail_that_leaves_windows_to_fire_has_the_chain_go_on(silent: bool) -> None:
    """Without the mail, the next element might come only in an hour."""
    keys = 3_000
    operators: list[Operator] = [
        WindowOperator(tumbling("10s", time="processing"), process=nothing if silent else Called()),
        ClockWindowOperator(
            tumbling("10s", time="processing"),
            functions.count(),
            window_fn=nothing if silent else None,
        ),
    ]
    for operator in operators:
        ctx = Context(has_event_time=False)
        await opened(operator, ctx)
        operator.process_batch(RecordBatch([0] * keys, None, list(range(keys))))
        ctx.advance(10_000)
        assert operator.has_pending
        assert ctx.emitted


# --------------------------------------------------------------------------------------------------
# one window


def side_by_side(operator: Any, count: int = SIDE) -> None:
    for index in (0, 1):
        times = [1] * count
        operator.process_input(
            index, RecordBatch(list(range(count)), times, ["k"] * count, [START] * count, START)
        )


PAIRS = [(left, right) for left in range(SIDE) for right in range(SIDE)]


async def test_the_pairs_of_one_key_of_a_join_leave_in_turns() -> None:
    made = 0

    def pair(left: int, right: int) -> tuple[int, int]:
        nonlocal made
        made += 1
        return left, right

    operator = await opened(WindowJoinOperator(tumbling("10ms"), pair))
    side_by_side(operator)
    done = turns(operator, operator.process_input(0, empty_batch(MAX_WATERMARK)), lambda: made)
    assert [row for values, _ in done for row in values] == PAIRS
    assert most(done) <= PIECE
    assert operator.ctx.keyed_state.table("window-contents").namespaces() == []


async def test_results_of_one_key_of_a_co_group_leave_in_turns() -> None:
    def pairs(key: str, lefts: list[int], rights: list[int]) -> Iterator[Any]:
        yield from ((left, right) for left in lefts for right in rights)

    operator = await opened(CoGroupOperator(tumbling("10ms"), pairs))
    side_by_side(operator)
    done = turns(operator, operator.process_input(0, empty_batch(MAX_WATERMARK)))
    assert [row for values, _ in done for row in values] == PAIRS
    assert max(len(values) for values, _ in done) == PIECE


async def test_the_pairs_of_a_join_that_the_clock_fires_leave_in_turns() -> None:
    ctx = Context(has_event_time=False)
    operator = await opened(
        WindowJoinOperator(tumbling("10s", time="processing"), lambda left, right: (left, right)),
        ctx,
    )
    for index in (0, 1):
        operator.process_input(index, untimed("k", *range(SIDE)))
        operator.process_input(index, untimed("j", *range(3)))
    first = ctx.advance(10_000)
    assert len(first) <= RESULTS_FIRST
    rows = first + [row for values, _ in turns(operator, empty_batch()) for row in values]
    assert rows == PAIRS + [(left, right) for left in range(3) for right in range(3)]


async def test_results_fired_by_an_element_precede_results_of_the_next_one() -> None:
    count = 2_000
    operator = await opened(
        WindowOperator(
            global_window(),
            trigger=purging(on_count(1)),
            process=lambda key, ctx, elements: elements * count,
        )
    )
    done = turns(operator, operator.process_batch(untimed("k", "a", "b")))
    assert [row for values, _ in done for row in values] == ["a"] * count + ["b"] * count
    assert max(len(values) for values, _ in done) == PIECE
    assert operator.ctx.keyed_state.table("window-contents").namespaces() == []


async def test_an_evictor_drops_behind_the_last_result() -> None:
    count = 1_500
    operator = await opened(
        WindowOperator(
            global_window(),
            trigger=on_count(1),
            evictor=keep_last(1),
            process=lambda key, ctx, elements: [*elements] * count,
        )
    )
    done = turns(operator, operator.process_batch(untimed("k", "a", "b")))
    assert [row for values, _ in done for row in values] == ["a"] * count + ["b"] * count


class Numbered(ProcessWindowFunction[Any, Any, Any]):
    """Keeps in state of the window how much it has given, and clears it when the window goes."""

    given = ValueStateDescriptor("given", default=0)

    def process(self, key: Any, ctx: Any, elements: Any) -> Iterator[Any]:
        state = ctx.window_state.get_state(self.given)
        for _ in range(1_000):
            state.update(state.value() + 1)
            yield key, ctx.window.start, state.value()

    def clear(self, ctx: Any) -> None:
        ctx.window_state.get_state(self.given).clear()


async def test_a_function_that_is_left_midway_finds_its_window_and_key_again() -> None:
    operator = await opened(WindowOperator(tumbling("10ms"), process=Numbered()))
    records = [(key, 0, start, START) for key in "ab" for start in (0, 10)]
    (batch, _) = cut(records, MAX_WATERMARK, [4])
    done = turns(operator, operator.process_batch(batch))
    expected = [
        (key, start, number) for start in (0, 10) for key in "ab" for number in range(1, 1_001)
    ]
    assert [row for values, _ in done for row in values] == expected
    assert not operator.ctx.keyed_state.items("given", namespace=(0, 10))


# --------------------------------------------------------------------------------------------------
# what it costs


async def test_pieces_are_as_large_as_their_cost_allows() -> None:
    operator = await opened(WindowOperator(tumbling("10ms"), process=Called()))
    keys = 20_000
    operator.process_batch(RecordBatch([0] * keys, [1] * keys, list(range(keys))))
    clock = operator.ctx.host.clock
    sizes = [len(operator.process_batch(empty_batch(MAX_WATERMARK)).values)]
    for step_ns, count in ((0, 3), (8_000_000, 4), (3_000_000, 2), (0, 3)):
        clock.step_ns = step_ns
        sizes += [len(operator.resume(2_048).values) for _ in range(count)]
    # Doubled while they are cheap, cut to a slice of 2 ms when they took 8, left alone at 3,
    # doubled again.
    assert sizes == [32, 64, 128, 256, 512, 128, 32, 8, 2, 2, 2, 4, 8]


async def test_one_result_is_given_however_long_it_takes() -> None:
    operator = await opened(WindowOperator(tumbling("10ms"), process=Called()))
    operator.process_batch(RecordBatch([0] * 100, [1] * 100, list(range(100))))
    operator.ctx.host.clock.step_ns = 10**10
    operator.process_batch(empty_batch(MAX_WATERMARK))
    assert [len(operator.resume(2_048).values) for _ in range(3)] == [1, 1, 1]


# --------------------------------------------------------------------------------------------------
# one hot key


async def test_removals_of_an_interval_join_cost_the_same_for_each_element() -> None:
    operator, count = (
        await opened(IntervalJoinOperator(lambda left, right, ctx: (), -10, 10)),
        2_000,
    )
    times = list(range(count))
    operator.process_input(0, RecordBatch(times, times, ["k"] * count, [START] * count, START))
    table = operator.ctx.keyed_state.table("interval-join-left")
    moved, last = 0, table.peek(None)["k"][0]
    for watermark in range(count):
        operator.process_input(1, empty_batch(watermark))
        held = table.peek(None).get("k", ([],))[0]
        if held is not last:
            moved, last = moved + len(held), held
        over = watermark - 10 + 1  # Elements that find no partner any more.
        assert len(held) <= max(1, 2 * (count - max(0, over)))
    assert moved <= count
    operator.process_input(1, empty_batch(count + 10))
    assert table.namespaces() == []
