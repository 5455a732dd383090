"""The loop over a chain: slices by measured cost, room, what waits where, taps, early emits and
errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.availability import Availability
from aioflow.core.column_batch import COLUMN_RECORDS_MAX, ColumnBatch, ObjectColumn
from aioflow.core.elements import BATCH_RECORDS_MAX, RecordBatch, empty_batch
from aioflow.core.scope import Scope
from aioflow.operators.operator import Operator
from aioflow.operators.stateless import StatelessKind, StatelessOperator, StatelessStep
from aioflow.task.chain import COLUMN_RECORDS_LEAST, ChainStatus, OperatorChain


def context(name: str) -> Any:
    runtime = SimpleNamespace(subtask_index=0, parallelism=1)
    return SimpleNamespace(name=name, runtime=runtime, keyed_state=None)


class Clock:
    """Nanoseconds that pass only on demand."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class Step(Operator):
    """Calls `function` for each batch, and takes `cost_ns` a record of the clock."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        cost_ns: int = 0,
        function: Callable[[list[Any]], list[Any]] | None = None,
    ) -> None:
        self.ctx = context(name)
        self.clock = clock
        self.cost_ns = cost_ns
        self.function = function or list
        self.sizes: list[int] = []

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        self.sizes.append(len(batch.values))
        self.clock.now += self.cost_ns * len(batch.values)
        return RecordBatch(self.function(batch.values), None, None, None, batch.watermark)


class World:
    """A chain with its output."""

    def __init__(self, *steps: Any, clock: Clock | None = None, **options: Any) -> None:
        self.clock = clock or Clock()
        self.out: list[Any] = []
        self.watermarks: list[int] = []
        self.available = Availability(available=True)
        self.chain = OperatorChain(steps, self._take, self.available, self.clock, **options)
        self.chain.compile()

    def _take(self, batch: RecordBatch) -> None:
        self.out += batch.values
        self.watermarks.append(batch.watermark)

    def drain(self) -> int:
        slices = 0
        while self.chain.has_work:
            assert self.chain.run() is not ChainStatus.BLOCKED
            slices += 1
        return slices


def stateless(name: str, kind: StatelessKind, function: Callable[[Any], Any]) -> StatelessOperator:
    operator = StatelessOperator([StatelessStep(kind, function)])
    operator.setup(context(name))
    asyncio.run(operator.open())
    return operator


def test_records_keep_their_order_through_the_chain() -> None:
    """C5.1: r1, w, r2 through three operators."""
    clock = Clock()
    seen: list[Any] = []

    class Logs(Step):
        def process_batch(self, batch: RecordBatch) -> RecordBatch:
            seen.append((self.ctx.name, list(batch.values), batch.watermark))
            return batch

    world = World(Logs("a", clock), Logs("b", clock), Logs("c", clock), clock=clock)
    for batch in (RecordBatch([1]), empty_batch(5), RecordBatch([2])):
        world.chain.push(batch)
    world.drain()
    for name in "abc":
        elements = [values or mark for who, values, mark in seen if who == name]
        assert elements == [[1], 5, [2]]
    assert world.out == [1, 2]


def test_the_deepest_waiting_work_goes_first() -> None:
    """Nothing overtakes, and little is held."""
    clock, order = Clock(), []

    def logged(name: str) -> Callable[[list[Any]], list[Any]]:
        return lambda values: order.append((name, *values)) or values

    world = World(
        Step("a", clock, 0, logged("a")),
        Step("b", clock, 0, logged("b")),
        clock=clock,
        batch_records_max=1,
    )
    world.chain.push(RecordBatch([1, 2]))
    world.drain()
    assert order == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_the_first_record_goes_alone_until_its_cost_is_known() -> None:
    clock = Clock()
    step = Step("slow", clock, 1_000_000)
    world = World(step, clock=clock, slice_ns=2_000_000)
    world.chain.push(RecordBatch(list(range(9))))
    assert world.chain.run() is ChainStatus.MORE
    assert step.sizes[0] == 1
    world.drain()
    assert max(step.sizes) == 2
    assert world.out == list(range(9))


def test_a_function_that_turns_slow_holds_the_loop_for_one_slice_only() -> None:
    clock = Clock()
    step = Step("turns", clock, 100)
    world = World(step, clock=clock, slice_ns=1_000_000, batch_records_max=100)
    world.chain.push(RecordBatch(list(range(500))))
    world.drain()
    step.cost_ns, step.sizes = 500_000, []
    world.chain.push(RecordBatch(list(range(300))))
    world.drain()
    assert step.sizes[0] == 100
    assert max(step.sizes[1:]) <= 2


def test_a_stage_that_was_interrupted_once_is_given_whole_batches_again_within_ten() -> None:
    """A busy machine takes the processor away in the middle of a batch, which then seems to cost a
    thousand times as much.
    """
    clock = Clock()
    step = Step("interrupted", clock, 500)
    world = World(step, clock=clock, slice_ns=2_000_000, batch_records_max=1000)
    world.chain.push(RecordBatch(list(range(2000))))
    world.drain()
    step.cost_ns = 500_000
    world.chain.push(RecordBatch([0] * 10))
    world.drain()
    step.cost_ns, step.sizes = 500, []
    world.chain.push(RecordBatch(list(range(10_000))))
    world.drain()
    assert step.sizes[0] == 4
    assert max(step.sizes[:10]) == 1000


def test_cost_of_leaving_the_chain_counts_for_its_last_stage() -> None:
    """A key function of a millisecond behind a cheap map."""
    clock = Clock()
    sizes: list[int] = []
    step = Step("cheap", clock, 10)
    world = World(step, clock=clock, slice_ns=2_000_000)

    def route(batch: RecordBatch) -> None:
        sizes.append(len(batch.values))
        clock.now += 1_000_000 * len(batch.values)

    world.chain._output = route
    world.chain.push(RecordBatch(list(range(50))))
    world.drain()
    assert max(sizes) <= 2


def test_a_chain_without_operators_hands_on_in_slices_too() -> None:
    clock = Clock()
    sizes: list[int] = []
    world = World(clock=clock, slice_ns=2_000_000)

    def route(batch: RecordBatch) -> None:
        sizes.append(len(batch.values))
        clock.now += 1_000_000 * len(batch.values)

    world.chain._output = route
    world.chain.push(RecordBatch(list(range(50))))
    world.drain()
    assert sum(sizes) == 50
    assert max(sizes) <= 2


def test_a_slice_ends_when_its_time_is_over() -> None:
    """C4.2: 100 records in one batch are slices, with a look at the mail between them."""
    clock = Clock()
    world = World(Step("a", clock, 100_000), clock=clock, slice_ns=1_000_000)
    world.chain.push(RecordBatch(list(range(100))))
    assert world.drain() >= 9
    assert world.out == list(range(100))


def test_a_slice_ends_when_the_output_is_full() -> None:
    clock = Clock()
    world = World(Step("a", clock), clock=clock, batch_records_max=4)
    world.chain.push(RecordBatch(list(range(12))))
    world.available.set_unavailable()
    assert world.chain.run() is ChainStatus.MORE
    assert len(world.out) == 1


def test_a_large_fan_out_lowers_what_is_taken() -> None:
    """Overshoot is one record's own output."""
    clock = Clock()
    step = Step("explodes", clock, 0, lambda values: [v for v in values for _ in range(10_000)])
    world = World(step, clock=clock)
    world.chain.push(RecordBatch(list(range(10))))
    world.drain()
    assert step.sizes == [1] * 10
    assert len(world.out) == 100_000


class Full(Step):
    """Takes as many records as it has places; `free` makes room."""

    def __init__(self, clock: Clock, places: int) -> None:
        super().__init__("full", clock)
        self.places = places
        self.availability = Availability(available=True)

    def room(self) -> int:
        return self.places

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        self.places -= len(batch.values)
        if self.places == 0:
            self.availability.set_unavailable()
        return super().process_batch(batch)


def test_an_operator_that_is_full_keeps_the_rest_waiting() -> None:
    clock = Clock()
    full = Full(clock, 3)
    world = World(full, clock=clock)
    world.chain.push(RecordBatch(list(range(5))))
    while (status := world.chain.run()) is ChainStatus.MORE:
        pass
    assert status is ChainStatus.BLOCKED
    assert world.chain.blocked_on is full.availability
    assert (world.out, world.chain.has_work) == ([0, 1, 2], True)
    full.places = 9
    world.drain()
    assert world.out == [0, 1, 2, 3, 4]


def test_a_long_firing_goes_on_before_new_input() -> None:
    clock = Clock()

    class Fires(Step):
        left = 0

        @property
        def has_pending(self) -> bool:
            return self.left > 0

        def process_batch(self, batch: RecordBatch) -> RecordBatch:
            self.left = 3
            return RecordBatch([f"begin {batch.values[0]}"])

        def resume(self, max_records: int) -> RecordBatch:
            self.left -= 1
            return RecordBatch([f"fired {self.left}"])

    world = World(Fires("fires", clock), clock=clock, batch_records_max=1)
    world.chain.push(RecordBatch(["a", "b"]))
    world.drain()
    fired = ["fired 2", "fired 1", "fired 0"]
    assert world.out == ["begin a", *fired, "begin b", *fired]


def test_firing_that_cannot_wait_is_worked_off_in_slices_even_without_room() -> None:
    clock = Clock()

    class Fires(Step):
        left = 5

        @property
        def has_pending(self) -> bool:
            return self.left > 0

        def resume(self, max_records: int) -> RecordBatch:
            clock.now += 1_000_000
            self.left -= 1
            return RecordBatch([f"fired {self.left}"])

    world = World(Fires("fires", clock), clock=clock, slice_ns=2_000_000)
    world.available.set_unavailable()
    slices = [list(world.out) for _ in world.chain.finish_pending()]
    assert slices == [["fired 4", "fired 3"], ["fired 4", "fired 3", "fired 2", "fired 1"]]
    assert world.out == ["fired 4", "fired 3", "fired 2", "fired 1", "fired 0"]


def test_output_of_an_operator_by_mail_goes_to_the_next_operator() -> None:
    clock = Clock()
    world = World(
        Step("a", clock), Step("b", clock, 0, lambda vs: [v + 1 for v in vs]), clock=clock
    )
    world.chain.emit_from(0, RecordBatch([10]))
    world.chain.emit_from(1, RecordBatch([10]))
    world.drain()
    assert sorted(world.out) == [10, 11]


def test_output_during_open_waits_for_the_chain() -> None:
    """An operator may emit in `open`: those after it are open, but there are no stages yet."""
    clock, out = Clock(), []
    steps = [Step("a", clock), Step("b", clock, 0, lambda vs: [v + 1 for v in vs])]
    chain = OperatorChain(
        steps, lambda batch: out.extend(batch.values), Availability(available=True), clock
    )
    chain.emit_from(0, RecordBatch([1]))
    chain.compile()
    while chain.has_work:
        chain.run()
    assert out == [2]


def test_stateless_neighbours_are_one_stage_until_a_tap_is_added_between_them() -> None:
    first = stateless("first", StatelessKind.MAP, lambda x: x + 1)
    second = stateless("second", StatelessKind.MAP, lambda x: x * 10)
    world = World(first, second)
    assert len(world.chain._stages) == 1
    seen: list[int] = []
    world.chain.set_taps(0, [lambda batch: seen.extend(batch.values)])
    assert len(world.chain._stages) == 2
    world.chain.push(RecordBatch([1, 2]))
    world.drain()
    assert (seen, world.out) == ([2, 3], [20, 30])
    world.chain.set_taps(0, [])
    assert len(world.chain._stages) == 1
    assert world.chain.record_counts() == {0: (2, 0), 1: (0, 2)}


def test_a_tap_of_the_input_sees_what_comes_into_the_chain() -> None:
    seen: list[int] = []
    world = World(Step("a", Clock(), 0, lambda vs: []))
    world.chain.set_taps(-1, [lambda batch: seen.extend(batch.values)])
    world.chain.push(RecordBatch([1, 2]))
    world.drain()
    assert seen == [1, 2]


def test_measurements_are_kept_when_stages_are_rebuilt() -> None:
    clock = Clock()
    step = Step("slow", clock, 500_000)
    world = World(step, clock=clock, slice_ns=2_000_000)
    world.chain.push(RecordBatch(list(range(20))))
    world.drain()
    world.chain.compile()
    step.sizes.clear()
    world.chain.push(RecordBatch(list(range(20))))
    world.drain()
    assert step.sizes[0] == 4


def test_an_error_names_its_operator_once() -> None:
    def fail(values: list[Any]) -> list[Any]:
        raise ValueError("mine")

    clock = Clock()
    world = World(Step("good", clock), Step("bad", clock, 0, fail), clock=clock)
    world.chain.push(RecordBatch([1]))
    with pytest.raises(ValueError, match="mine") as caught:
        world.drain()
    assert caught.value.__notes__ == ["aioflow: in operator 'bad', subtask 1/1"]


@pytest.mark.parametrize("kind", [StopIteration, asyncio.CancelledError])
def test_signals_that_user_code_raises_become_errors(kind: type[BaseException]) -> None:
    def fail(values: list[Any]) -> list[Any]:
        raise kind

    world = World(Step("bad", Clock(), 0, fail))
    world.chain.push(RecordBatch([1]))
    with pytest.raises(RuntimeError, match=kind.__name__) as caught:
        world.drain()
    assert isinstance(caught.value.__cause__, kind)
    assert caught.value.__notes__ == ["aioflow: in operator 'bad', subtask 1/1"]


def test_an_operator_that_holds_the_loop_for_long_is_remembered() -> None:
    clock = Clock()
    quick, slow = Step("quick", clock, 10), Step("slow", clock, 200_000_000)
    world = World(quick, slow, clock=clock)
    world.chain.push(RecordBatch([1]))
    world.drain()
    assert world.chain.slowest_operator is slow


def test_no_operator_is_blamed_when_leaving_a_task_without_operators_took_long() -> None:
    world = World()

    def leave(batch: RecordBatch) -> None:
        world.clock.now += 200_000_000

    world.chain = OperatorChain((), leave, world.available, world.clock)
    world.chain.compile()
    world.chain.push(RecordBatch([1]))
    world.drain()
    assert world.chain.slowest_operator is None


def test_a_slice_takes_no_more_than_readers_of_the_output_want_and_as_usual_again_later() -> None:
    clock, sizes = Clock(), []

    def note(values: list[Any]) -> list[Any]:
        sizes.append(len(values))
        return values

    world = World(Step("note", clock, 0, note), clock=clock)
    world.chain.push(RecordBatch(list(range(200))))
    world.drain()
    assert world.chain.room == BATCH_RECORDS_MAX
    world.chain.limit_slice(40, 40)
    assert world.chain.room == 40
    for _ in range(2):
        world.chain.push(RecordBatch(list(range(40))))
        world.drain()
    world.chain.push(RecordBatch(list(range(100))))
    world.drain()
    assert sizes[-3:] == [40, 40, 20]
    world.chain.limit_slice(1 << 20, 1 << 20)
    world.chain.push(RecordBatch([1]))
    world.drain()
    assert world.chain.room == BATCH_RECORDS_MAX


def test_the_scope_follows_the_operator_that_runs() -> None:
    clock, scope, seen = Clock(), Scope("job"), []

    def look(values: list[Any]) -> list[Any]:
        seen.append(scope.operator)
        return values

    world = World(Step("a", clock, 0, look), Step("b", clock, 0, look), clock=clock, scope=scope)
    world.chain.push(RecordBatch([1]))
    world.drain()
    assert seen == ["a", "b"]


@given(
    st.lists(st.lists(st.integers(), max_size=20), max_size=8),
    st.integers(1, 9),
    st.sampled_from([1, 1000, 1 << 40]),
)
def test_slicing_loses_and_reorders_nothing(
    batches: list[list[int]], size: int, slice_ns: int
) -> None:
    clock = Clock()
    doubles = Step("doubles", clock, 700, lambda vs: [v for v in vs for _ in (0, 1)])
    drops = Step("drops", clock, 300, lambda vs: [v for v in vs if v % 3])
    world = World(doubles, drops, clock=clock, batch_records_max=size, slice_ns=slice_ns)
    for values in batches:
        world.chain.push(RecordBatch(values))
    world.drain()
    assert world.out == [v for values in batches for v in values if v % 3 for _ in (0, 1)]
    assert max(drops.sizes, default=0) <= size


class Columns(Step):
    """A step that reads columns; `fixed_ns` is what each piece costs, however small."""

    reads_columns = True

    def __init__(
        self, clock: Clock, cost_ns: int, fixed_ns: int = 0, *, calls_functions: bool = False
    ) -> None:
        super().__init__("columns", clock, cost_ns)
        self.fixed_ns = fixed_ns
        self.calls_functions = calls_functions

    def process_batch(self, batch: RecordBatch) -> RecordBatch:
        self.clock.now += self.fixed_ns
        return super().process_batch(batch)


def columns(count: int) -> RecordBatch:
    values = ColumnBatch({"x": ObjectColumn(list(range(count)))}, count)
    return RecordBatch(values)  # type: ignore[arg-type]


def test_reader_of_columns_gets_large_pieces_of_columns_and_slices_of_rows() -> None:
    clock = Clock()
    step = Columns(clock, 100)
    world = World(step, clock=clock)
    for _ in range(8):
        world.chain.push(columns(COLUMN_RECORDS_MAX))
        world.drain()
    assert step.sizes[0] == COLUMN_RECORDS_LEAST
    assert max(step.sizes) == COLUMN_RECORDS_MAX
    step.sizes.clear()
    world.chain.push(RecordBatch(list(range(5_000))))
    world.drain()
    assert max(step.sizes) <= BATCH_RECORDS_MAX


def test_reader_of_rows_gets_columns_in_pieces_of_rows() -> None:
    clock = Clock()
    step = Step("rows", clock, 100)
    world = World(step, clock=clock)
    world.chain.push(columns(COLUMN_RECORDS_MAX))
    world.drain()
    assert max(step.sizes) <= BATCH_RECORDS_MAX
    assert world.out == [{"x": i} for i in range(COLUMN_RECORDS_MAX)]


def test_columns_are_taken_in_no_larger_pieces_than_readers_of_the_output_want() -> None:
    clock = Clock()
    step = Columns(clock, 100)
    world = World(step, clock=clock)
    world.chain.limit_slice(40, 300)
    assert (world.chain.room, world.chain.column_room) == (1, 300), (
        "of rows it is not known yet what one costs"
    )
    world.chain.push(columns(1_000))
    world.drain()
    assert step.sizes == [300, 300, 300, 100]


def test_a_window_takes_columns_in_large_pieces_however_few_of_its_results_are_wanted() -> None:
    clock = Clock()

    class Window(Columns):
        has_pending = False

    step = Window(clock, 100)
    world = World(step, clock=clock)
    world.chain.limit_slice(4, 4)
    world.chain.push(columns(10_000))
    world.drain()
    assert step.sizes == [COLUMN_RECORDS_LEAST, 10_000 - COLUMN_RECORDS_LEAST]


def test_pieces_of_columns_do_not_shrink_to_nothing_where_each_piece_is_dear() -> None:
    clock = Clock()
    step = Columns(clock, 10, fixed_ns=5_000_000)
    world = World(step, clock=clock)
    for _ in range(20):
        world.chain.push(columns(COLUMN_RECORDS_MAX))
        world.drain()
    assert min(step.sizes) >= COLUMN_RECORDS_LEAST


def test_functions_behind_columns_begin_with_one_record() -> None:
    clock = Clock()
    step = Columns(clock, 10_000_000, calls_functions=True)
    world = World(step, clock=clock)
    world.chain.push(columns(20))
    world.drain()
    assert step.sizes == [1] * 20
