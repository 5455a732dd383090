"""Values that replace the elements of an aggregate: the same results as with whole elements, and
whole elements where necessary.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioflow as af
from aioflow.core.elements import MAX_WATERMARK, RecordBatch
from aioflow.core.functions import OutputTag
from aioflow.operators.aggregate.functions import resolve_aggregate
from aioflow.operators.aggregate.local import of_taken, taken_by
from aioflow.operators.aggregate.running import RunningAggregateOperator
from aioflow.operators.window.assigners import tumbling
from aioflow.operators.window.slices import SliceWindowOperator

from . import context

value: Callable[[Any], Any] = lambda row: row[1]
AGGREGATES = {
    "count": af.count(),
    "several of one": af.agg(
        n=af.count(),
        total=af.sum(value),
        low=af.min(lambda row: row[1]),
        high=af.max(itemgetter(1)),
    ),
    "mean": af.mean(value),
    "first and last": af.agg(first=af.first(value), last=af.last(value)),
    "all": af.agg(all=af.collect(value), different=af.distinct(value)),
}
NUMBERS = st.none() | st.integers(-5, 5) | st.floats(-2, 2) | st.just(float("nan"))


@pytest.mark.parametrize("name", AGGREGATES)
@given(rows=st.lists(st.tuples(st.sampled_from("ab"), NUMBERS), max_size=12))
def test_projected_values_give_the_same_results_and_accumulators(
    name: str, rows: list[tuple[str, Any]]
) -> None:
    aggregate = resolve_aggregate(AGGREGATES[name])
    taken = taken_by(aggregate)
    assert taken is not None
    keys = [key for key, _ in rows]
    whole: dict[Any, Any] = {}
    given_: dict[Any, Any] = {}
    results = aggregate.running(whole, keys, rows)
    values = [taken[0](row) for row in rows] if taken else keys
    assert repr(of_taken(aggregate).running(given_, keys, values)) == repr(results)
    assert repr(given_) == repr(whole)


@pytest.mark.parametrize(
    "aggregate",
    [
        af.agg(total=af.sum(lambda row: row[1]), other=af.sum(lambda row: row[2])),
        af.sum(lambda row: row[1], where=lambda row: row[0]),
        af.count(where=lambda row: row[0]),
        af.max_by(lambda row: row[1]),
        af.top(3, lambda row: row[1]),
        af.sum(),
        af.sum(af.col.value),
        af.sum(lambda row: float(row[1])),
        af.sum(lambda row: next(iter(row))),
    ],
    ids=[
        "two fields",
        "a sum of some",
        "a count of some",
        "max_by",
        "top",
        "elements",
        "an expression",
        "a call",
        "another call",
    ],
)
def test_aggregates_that_read_more_or_call_unknown_functions_get_whole_elements(
    aggregate: Any,
) -> None:
    assert taken_by(resolve_aggregate(aggregate)) is None


def test_aggregate_of_the_user_gets_whole_elements() -> None:
    assert taken_by(object()) is None


async def test_a_window_adds_up_both_kinds_of_batches_and_gives_out_no_part_as_late() -> None:
    late: OutputTag[Any] = OutputTag("late")
    operator = await context.opened(
        SliceWindowOperator(tumbling("10ms"), af.sum(value), late_tag=late)
    )
    operator.process_batch(RecordBatch([5], [1], ["k"], None, 3, taken=True))
    operator.process_batch(RecordBatch([("x", 7)], [2], ["k"], None, 4))
    out = operator.process_batch(RecordBatch([9], [3], ["k"], None, 9, taken=True))
    assert [row.value for row in out.values] == [21]
    operator.process_batch(RecordBatch([100], [4], ["k"], None, 9, taken=True))
    operator.process_batch(RecordBatch([("x", 100)], [4], ["k"], None, 9))
    assert operator.ctx.dropped() == 2
    assert [element for _, element, _, _ in operator.ctx.side] == [("x", 100)]
    assert operator.process_batch(RecordBatch([], watermark=MAX_WATERMARK)).values == []


async def test_a_running_aggregate_adds_up_both_kinds_of_batches() -> None:
    operator = await context.opened(RunningAggregateOperator(resolve_aggregate(af.sum(value))))
    assert operator.process_batch(RecordBatch([5], None, ["k"], taken=True)).values == [("k", 5)]
    assert operator.process_batch(RecordBatch([("x", 7)], None, ["k"])).values == [("k", 12)]


async def test_value_that_cannot_be_added_is_named_with_its_key() -> None:
    operator = await context.opened(RunningAggregateOperator(resolve_aggregate(af.sum(value))))
    with pytest.raises(TypeError) as caught:
        operator.process_batch(RecordBatch([1, "x"], None, ["k", "k"], taken=True))
    assert "at 'x', taken of a record of key 'k'" in "\n".join(caught.value.__notes__)
    with pytest.raises(TypeError) as caught:
        operator.process_batch(RecordBatch([("r", 1), ("r", "x")], None, ["k", "k"]))
    assert "at record ('r', 'x') of key 'k'" in "\n".join(caught.value.__notes__)


async def test_a_window_that_cannot_add_names_what_was_taken_of_a_record() -> None:
    operator = await context.opened(SliceWindowOperator(tumbling("10ms"), af.sum(value)))
    with pytest.raises(TypeError) as caught:
        operator.process_batch(RecordBatch([1, "x"], [1, 2], ["k", "k"], None, 3, taken=True))
    assert "at 'x', taken of a record of key 'k'" in "\n".join(caught.value.__notes__)


async def test_note_of_a_failed_built_in_aggregate_names_the_first_and_the_last_value() -> None:
    operator = await context.opened(RunningAggregateOperator(resolve_aggregate(af.max(value))))
    with pytest.raises(TypeError) as caught:
        operator.process_batch(RecordBatch([1, "x"], None, ["k", "k"], taken=True))
    assert "between 1 and 'x', taken of records" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize(
    "changed",
    [af.sum(value, where=lambda row: row[0] == "x"), af.sum(lambda row: row[2])],
    ids=["of some only", "of another field"],
)
async def test_values_projected_before_a_change_of_the_code_count_unchanged(
    changed: Any,
) -> None:
    """Data in flight of an unaligned checkpoint: an aligned one would have it in the sum
    already.
    """
    running = await context.opened(RunningAggregateOperator(resolve_aggregate(changed)))
    assert running.process_batch(RecordBatch([5, 6], None, ["k", "k"], taken=True)).values == [
        ("k", 5),
        ("k", 11),
    ]
    window = await context.opened(SliceWindowOperator(tumbling("10ms"), changed))
    window.process_batch(RecordBatch([5, 6], [1, 2], ["k", "k"], taken=True))
    window.process_batch(RecordBatch([("y", 7, 0)], [3], ["k"]))
    (row,) = window.process_batch(RecordBatch([], watermark=MAX_WATERMARK)).values
    assert row.value == 11
