"""Fused loops give what map, filter and flat_map give one after the other; times follow their
records; errors say which.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.elements import MIN_WATERMARK, RecordBatch
from aioflow.core.functions import FilterFunction, FlatMapFunction, MapFunction, RuntimeContext
from aioflow.core.signatures import resource, use
from aioflow.operators.stateless import StatelessKind, StatelessOperator, StatelessStep

from .process_context import Context, opened, rows


def numbers(value: int) -> Iterator[int]:
    for n in range(value % 3):
        yield value * 10 + n


STEPS: dict[str, StatelessStep] = {
    "plus one": StatelessStep(StatelessKind.MAP, lambda value: value + 1),
    "double": StatelessStep(StatelessKind.MAP, lambda value: value * 2),
    "even": StatelessStep(StatelessKind.FILTER, lambda value: value % 2 == 0),
    "truthy": StatelessStep(StatelessKind.FILTER, lambda value: value % 5),
    "twice": StatelessStep(StatelessKind.FLAT_MAP, lambda value: [value, -value]),
    "none": StatelessStep(StatelessKind.FLAT_MAP, lambda value: ()),
    "numbers": StatelessStep(StatelessKind.FLAT_MAP, numbers),
}


def applied(step: StatelessStep, values: list[Any]) -> list[Any]:
    """Returns the results of one step for a list, by the definition."""
    if step.kind is StatelessKind.MAP:
        return [step.function(value) for value in values]
    if step.kind is StatelessKind.FILTER:
        return [value for value in values if step.function(value)]
    return [result for value in values for result in step.function(value)]


def named(name: str) -> Context:
    context = Context(keyed=False)
    context.name = name
    return context


async def fused(steps: list[StatelessStep]) -> StatelessOperator:
    """Each step an operator of its own, all in one loop."""
    operators = [
        await opened(StatelessOperator([step]), named(f"step {i}")) for i, step in enumerate(steps)
    ]
    return StatelessOperator.fuse(operators)


@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(-20, 20), st.integers(0, 2)), max_size=12),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
async def test_a_fused_loop_is_its_steps_one_after_the_other(
    names: list[str], records: list[tuple[int, int]], timed: bool, marked: bool, together: bool
) -> None:
    steps = [STEPS[name] for name in names]
    operator = (
        await opened(StatelessOperator(steps), Context(keyed=False))
        if together
        else await fused(steps)
    )
    values = [value for value, _ in records]
    marks = [sum(rise for _, rise in records[: i + 1]) for i in range(len(records))]
    stamps = [100 + i for i in range(len(records))]
    batch = RecordBatch(
        list(values),
        stamps if timed else None,
        None,
        marks if marked else None,
        99 if marked else MIN_WATERMARK,
    )
    out = operator.process_batch(batch)
    expected: list[tuple[Any, int | None, int]] = []
    for i, value in enumerate(values):
        results = [value]
        for step in steps:
            results = applied(step, results)
        expected += [
            (result, stamps[i] if timed else None, marks[i] if marked else MIN_WATERMARK)
            for result in results
        ]
    assert rows([out]) == expected
    assert out.watermark == batch.watermark
    assert (out.timestamps is not None, out.watermarks is not None) == (
        timed and bool(values),
        marked and bool(values),
    )
    assert batch.values == values, "the input belongs to others too"


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=4), st.data())
async def test_an_error_names_the_operator_the_subtask_and_the_record(
    names: list[str], data: st.DataObject
) -> None:
    """The step that fails stands anywhere among the others, and fails at any record that reaches
    it.
    """
    before = data.draw(st.integers(0, len(names)))
    kind = data.draw(st.sampled_from(list(StatelessKind)))
    values = data.draw(st.lists(st.integers(-9, 9), min_size=1, max_size=8))
    timed = data.draw(st.booleans())
    prefix = [STEPS[name] for name in names[:before]]
    reached: list[int] = []  # For each call of the failing step, the record that it stems from.
    for i, value in enumerate(values):
        results = [value]
        for step in prefix:
            results = applied(step, results)
        reached += [i] * len(results)
    if not reached:
        return
    fails_at = data.draw(st.integers(0, len(reached) - 1))
    calls = 0

    def fail(value: int) -> Any:
        nonlocal calls
        calls += 1
        if calls > fails_at:
            raise LookupError("as planned")
        return [value] if kind is StatelessKind.FLAT_MAP else value

    steps = [*prefix, StatelessStep(kind, fail), *(STEPS[name] for name in names[before:])]
    operator = await fused(steps)
    with pytest.raises(LookupError, match="as planned") as caught:
        operator.process_batch(RecordBatch(values, [0] * len(values) if timed else None))
    record = values[reached[fails_at]]
    assert caught.value.__notes__ == [
        f"aioflow: in operator 'step {before}', subtask 2/4, at record {record}"
    ]


async def test_an_error_of_a_generator_after_its_first_result_is_found_too() -> None:
    def halves(value: int) -> Iterator[float]:
        yield value
        yield 1 / value

    operator = await opened(
        StatelessOperator([StatelessStep(StatelessKind.FLAT_MAP, halves)]), named("halves")
    )
    with pytest.raises(ZeroDivisionError) as caught:
        operator.process_batch(RecordBatch([2, 1, 0, 4]))
    assert caught.value.__notes__ == ["aioflow: in operator 'halves', subtask 2/4, at record 0"]


async def twice(value: int) -> int:
    return value * 2


@pytest.mark.parametrize("kind", StatelessKind)
@pytest.mark.parametrize("after", [[], ["even", "twice"]])
@pytest.mark.parametrize("timed", [False, True])
async def test_a_plain_function_that_gives_a_coroutine_is_refused_at_its_first_result(
    kind: StatelessKind, after: list[str], timed: bool
) -> None:
    """The coroutine would not be awaited: it would go downstream as a value.

    That it is closed is told by the absence of a warning.
    """
    steps = [*(STEPS[name] for name in after), StatelessStep(kind, lambda value: twice(value))]
    operator = await fused(steps)
    operator.process_batch(
        RecordBatch([1, 3]) if after else RecordBatch([])
    )  # Dropped before: nothing was seen yet.
    with pytest.raises(
        TypeError,
        match=(
            rf"^operator 'step {len(after)}': the function of {kind.value} returned coroutine.* "
            r"`async def`"
        ),
    ):
        operator.process_batch(RecordBatch([2, 4], [0, 0] if timed else None))


@pytest.mark.parametrize("result", [None, 7])
@pytest.mark.parametrize("after", [[], ["plus one"]])
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("first", [False, True])
async def test_error_for_a_flat_map_that_gives_no_iterable_says_what_was_expected(
    result: Any, after: list[str], timed: bool, first: bool
) -> None:
    def few(value: int) -> Any:
        return [value] if value < 9 else result

    operator = await fused(
        [*(STEPS[name] for name in after), StatelessStep(StatelessKind.FLAT_MAP, few)]
    )
    values = [9] if first else [1, 9, 2]
    expected = (
        rf"^operator 'step {len(after)}': the function of flat_map gave what is no iterable "
        rf"\('{type(result).__name__}' .*\[\]"
    )
    with pytest.raises(TypeError, match=expected) as caught:
        operator.process_batch(RecordBatch(values, [0] * len(values) if timed else None))
    assert caught.value.__notes__ == [
        f"aioflow: in operator 'step {len(after)}', subtask 2/4, at record 9"
    ]


@pytest.mark.parametrize(
    "function", [list, lambda value: list(value), lambda value: (n for n in value)]
)
async def test_a_type_error_of_the_function_itself_stays_as_it_is(
    function: Callable[[Any], Any],
) -> None:
    operator = await opened(
        StatelessOperator([StatelessStep(StatelessKind.FLAT_MAP, function)]), named("each")
    )
    with pytest.raises(TypeError, match=r"^'int' object is not iterable"):
        operator.process_batch(RecordBatch([[1], 7]))


async def test_after_the_first_results_the_loop_calls_the_functions_directly() -> None:
    calls: list[int] = []

    def depth(value: int) -> int:
        calls.append(len(inspect.stack(0)))
        return value

    operator = await fused([STEPS["even"], StatelessStep(StatelessKind.MAP, depth), STEPS["twice"]])
    for values in ([1], [2, 4], [6]):
        operator.process_batch(RecordBatch(values))
    assert calls == [calls[0], calls[0], calls[0] - 1]


async def test_an_empty_batch_carries_the_watermark() -> None:
    operator = await opened(StatelessOperator([STEPS["twice"]]), Context(keyed=False))
    out = operator.process_batch(RecordBatch([], None, None, None, 7))
    assert (out.values, out.watermark) == ([], 7)


class Logs:
    """Writes down its life."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log = log
        self.name = name

    def open(self, ctx: RuntimeContext) -> None:
        self.log.append(f"open {self.name} in {ctx.subtask_index}")

    def close(self) -> None:
        self.log.append(f"close {self.name}")


class Maps(Logs, MapFunction[int, int]):
    def map(self, value: int) -> int:
        return value + 1


class Filters(Logs, FilterFunction[int]):
    def filter(self, value: int) -> bool:
        return value > 2


class FlatMaps(Logs, FlatMapFunction[int, int]):
    def flat_map(self, value: int) -> list[int]:
        return [value] * 2


async def test_function_classes_are_opened_in_order_and_closed_in_reverse_once() -> None:
    """B5.4"""
    log: list[str] = []
    steps = [
        StatelessStep(StatelessKind.MAP, Maps(log, "map")),
        StatelessStep(StatelessKind.FILTER, Filters(log, "filter")),
        StatelessStep(StatelessKind.FLAT_MAP, FlatMaps(log, "flat_map")),
    ]
    operator = await opened(StatelessOperator(steps), Context(keyed=False))
    assert operator.process_batch(RecordBatch([1, 2, 3])).values == [3, 3, 4, 4]
    await operator.close()
    await operator.close()
    assert log == [
        "open map in 1",
        "open filter in 1",
        "open flat_map in 1",
        "close flat_map",
        "close filter",
        "close map",
    ]


async def test_function_that_failed_to_open_is_closed_and_later_ones_are_not_opened() -> None:
    """B5.2"""
    log: list[str] = []

    class Fails(Maps):
        def open(self, ctx: RuntimeContext) -> None:
            super().open(ctx)
            raise OSError("no route")

    steps = [
        StatelessStep(StatelessKind.MAP, make)
        for make in (Maps(log, "a"), Fails(log, "b"), Maps(log, "c"))
    ]
    operator = StatelessOperator(steps)
    with pytest.raises(OSError, match="no route"):
        await opened(operator, Context(keyed=False))
    await operator.close()
    assert log == ["open a in 1", "open b in 1", "close b", "close a"]


async def test_a_plain_object_with_open_and_close_is_left_alone() -> None:
    """B5.1"""

    class Plain:
        def __call__(self, value: int) -> int:
            return value + 1

        def open(self, ctx: Any) -> None:
            raise AssertionError("not a Function")

        close = open

    operator = await opened(
        StatelessOperator([StatelessStep(StatelessKind.MAP, Plain())]), Context(keyed=False)
    )
    assert operator.process_batch(RecordBatch([1])).values == [2]
    await operator.close()


async def test_a_resource_is_passed_to_the_function_that_asks() -> None:
    async def make() -> None: ...

    there = resource(make)

    def add(value: int, n: Any = use(there)) -> int:
        return value + n

    context = Context(keyed=False)
    context.resources[there] = 100
    operator = await opened(StatelessOperator([StatelessStep(StatelessKind.MAP, add)]), context)
    assert operator.process_batch(RecordBatch([1])).values == [101]


@pytest.mark.parametrize("function", [7, None, "text"])
def test_value_that_is_no_function_is_refused(function: Any) -> None:
    make: Callable[[], StatelessOperator] = lambda: StatelessOperator(
        [StatelessStep(StatelessKind.MAP, function)]
    )
    with pytest.raises(TypeError, match="expected a function for map"):
        make()
