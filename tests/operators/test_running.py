"""Running results: one out for each in, keyed by Python equality, the same at every batch size."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.elements import RecordBatch
from aioflow.core.errors import StateError
from aioflow.operators.aggregate.running import (
    RUNNING,
    RunningAggregateOperator,
    RunningReduceOperator,
)
from aioflow.operators.key_spelling import KeySpelling

from .process_context import Context, keyed_batch, opened


class SumOf:
    """The bulk fold of a sum."""

    def __init__(self, fn: Any = lambda value: value) -> None:
        self._fn = fn

    def running(
        self, table: Any, keys: Sequence[Any], values: Sequence[Any]
    ) -> list[tuple[Any, Any]]:
        out = []
        for key, value in zip(keys, values, strict=True):
            table[key] = table.get(key, 0) + self._fn(value)
            out.append((key, table[key]))
        return out

    def get_result(self, accumulator: Any) -> Any:
        return accumulator


async def test_each_element_gives_the_result_of_its_key_so_far() -> None:
    operator = await opened(RunningAggregateOperator(SumOf()), Context())
    out = operator.process_batch(keyed_batch("abab", [1, 2, 3, 4]))
    assert out.values == [("a", 1), ("b", 2), ("a", 4), ("b", 6)]
    assert operator.process_batch(keyed_batch("a", [10])).values == [("a", 14)]


async def test_times_and_watermarks_follow_their_elements_and_keys_end() -> None:
    operator = await opened(RunningAggregateOperator(SumOf()), Context())
    out = operator.process_batch(keyed_batch("ab", [1, 2], [5, 6], [3, 4], 9))
    assert (out.timestamps, out.watermarks, out.watermark, out.keys) == ([5, 6], [3, 4], 9, None)
    out = operator.process_batch(RecordBatch([], None, None, None, 12))
    assert (out.values, out.watermark) == ([], 12)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-9, 9)), min_size=1, max_size=40),
    st.integers(1, 7),
    st.booleans(),
)
async def test_results_do_not_depend_on_the_cut(
    records: list[tuple[str, int]], size: int, reduce: bool
) -> None:
    make = (
        (lambda: RunningReduceOperator(lambda a, b: a + b))
        if reduce
        else (lambda: RunningAggregateOperator(SumOf()))
    )
    totals: dict[str, int] = {}
    expected: list[Any] = []
    for key, value in records:
        totals[key] = totals.get(key, 0) + value
        expected.append(totals[key] if reduce else (key, totals[key]))
    operator = await opened(make(), Context())
    found: list[Any] = []
    for start in range(0, len(records), size):
        part = records[start : start + size]
        found += operator.process_batch(
            keyed_batch([k for k, _ in part], [v for _, v in part])
        ).values
    assert found == expected


async def test_reduce_emits_the_first_element_as_it_is() -> None:
    calls: list[Any] = []
    operator = await opened(
        RunningReduceOperator(lambda a, b: calls.append((a, b)) or max(a, b)), Context()
    )
    assert operator.process_batch(keyed_batch("aaba", [3, 1, 7, 5])).values == [3, 3, 7, 5]
    assert calls == [(3, 1), (3, 5)]


async def test_a_stream_without_key_is_refused_at_open() -> None:
    """H2.2"""
    with pytest.raises(StateError, match="key_by"):
        await opened(RunningReduceOperator(max), Context(keyed=False))


async def test_an_error_of_reduce_names_operator_subtask_record_and_key() -> None:
    operator = await opened(RunningReduceOperator(lambda a, b: a / b), Context())
    with pytest.raises(ZeroDivisionError) as caught:
        operator.process_batch(keyed_batch("aba", [1, 2, 0]))
    assert caught.value.__notes__ == [
        "aioflow: in operator 'alerts', subtask 2/4, at record 0 of key 'a'"
    ]


async def test_an_error_of_an_aggregate_names_the_record() -> None:
    operator = await opened(RunningAggregateOperator(SumOf(lambda value: 1 // value)), Context())
    with pytest.raises(ZeroDivisionError) as caught:
        operator.process_batch(keyed_batch("abc", [1, 0, 2]))
    assert caught.value.__notes__ == [
        "aioflow: in operator 'alerts', subtask 2/4, at record 0 of key 'b'"
    ]


async def test_an_error_that_needs_the_accumulator_is_framed_by_its_batch() -> None:
    class Refuses(SumOf):
        def running(
            self, table: Any, keys: Sequence[Any], values: Sequence[Any]
        ) -> list[tuple[Any, Any]]:
            if len(table) + len(keys) > 2:
                raise OverflowError("too many keys")
            return super().running(table, keys, values)

    operator = await opened(RunningAggregateOperator(Refuses()), Context())
    with pytest.raises(OverflowError) as caught:
        operator.process_batch(keyed_batch("abc", [1, 2, 3]))
    assert caught.value.__notes__ == [
        "aioflow: in operator 'alerts', subtask 2/4, between records 1 and 3"
    ]


async def test_the_first_spelling_of_a_key_is_the_one_shown() -> None:
    operator = await opened(RunningAggregateOperator(SumOf()), Context())
    out = operator.process_batch(keyed_batch([1, 2, True, 1.0], [1, 1, 1, 1]))
    out2 = operator.process_batch(keyed_batch([Decimal("1.00"), 2.0], [1, 1]))
    assert [repr(key) for key, _ in out.values + out2.values] == ["1", "2", "1", "1", "1", "2"]
    assert out2.values[0][1] == 4


async def test_queries_see_the_result_of_a_key() -> None:
    context = Context()
    operator = await opened(RunningAggregateOperator(SumOf()), context)
    operator.process_batch(keyed_batch("ab", [1, 2]))
    assert context.keyed_state is not None
    assert context.keyed_state.query(RUNNING, "b") == 2


class Pair(NamedTuple):
    a: int
    b: int


@given(
    st.lists(
        st.lists(
            st.one_of(
                st.sampled_from([0, 1, True, False, 1.0, 0.0, -0.0, Decimal(1), "a", b"a"]),
                st.tuples(st.sampled_from([1, True, "x", 1.0])),
                st.builds(Pair, st.sampled_from([1, True]), st.just(2)),
                st.tuples(st.sampled_from([1, True]), st.just(2)),
            ),
            max_size=6,
        ),
        max_size=6,
    )
)
def test_spelling_is_that_of_a_dict(batches: list[list[Any]]) -> None:
    spelling, table = KeySpelling(), {}
    first: dict[Any, Any] = {}
    for keys in batches:
        shown = spelling.shown(keys, table)
        for key in keys:
            table[key] = None
            first.setdefault(key, key)
        assert list(map(repr, shown)) == [repr(first[key]) for key in keys]
