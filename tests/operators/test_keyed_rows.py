"""map, filter and flat_map with keyed state: the key of each record is set, and only while its
function runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from aioflow.core.elements import RecordBatch
from aioflow.core.errors import StateError
from aioflow.core.functions import FilterFunction, FlatMapFunction, MapFunction, RuntimeContext
from aioflow.core.states import ValueStateDescriptor
from aioflow.operators.stateless import KeyedRowsOperator

from .process_context import Context, keyed_batch, opened


class Numbers:
    """Counts the elements of a key."""

    def open(self, ctx: RuntimeContext) -> None:
        self.count = ctx.get_state(ValueStateDescriptor("count", default=0))

    def next(self) -> int:
        self.count.update(self.count.value() + 1)
        return self.count.value()  # type: ignore[no-any-return]


class Numbered(Numbers, MapFunction[int, Any]):
    def map(self, value: int) -> Any:
        return (value, self.next())


class First(Numbers, FilterFunction[int]):
    def filter(self, value: int) -> bool:
        return self.next() == 1


class Repeats(Numbers, FlatMapFunction[int, int]):
    def flat_map(self, value: int) -> Iterator[int]:
        yield from [value] * self.next()


@pytest.mark.parametrize(
    ("kind", "function", "values", "stamps"),
    [
        ("map", Numbered, [(1, 1), (2, 1), (3, 2)], [10, 20, 30]),
        ("filter", First, [1, 2], [10, 20]),
        ("flat_map", Repeats, [1, 2, 3, 3], [10, 20, 30, 30]),
    ],
)
async def test_each_record_sees_the_state_of_its_key(
    kind: str, function: Any, values: list[Any], stamps: list[int]
) -> None:
    context = Context()
    operator = await opened(KeyedRowsOperator(kind, function()), context)
    out = operator.process_batch(keyed_batch("aba", [1, 2, 3], [10, 20, 30], [5, 6, 7], 9))
    assert (out.values, out.timestamps, out.keys, out.watermark) == (values, stamps, None, 9)
    assert out.watermarks == [stamp // 10 + 4 for stamp in stamps]
    assert context.keyed_state is not None
    with pytest.raises(StateError):
        {context.keyed_state.current_key}
    assert operator.process_batch(RecordBatch([], None, None, None, 11)).watermark == 11
    await operator.close()


@pytest.mark.parametrize("kind", ["map", "filter", "flat_map"])
async def test_an_error_names_the_record_and_its_key(kind: str) -> None:
    operator = await opened(KeyedRowsOperator(kind, lambda value: [1 / value]), Context())
    with pytest.raises(ZeroDivisionError) as caught:
        operator.process_batch(keyed_batch("abc", [1, 0, 2]))
    assert caught.value.__notes__ == [
        "aioflow: in operator 'alerts', subtask 2/4, at record 0 of key 'b'"
    ]


async def test_text_out_of_flat_map_is_refused() -> None:
    operator = await opened(KeyedRowsOperator("flat_map", lambda value: "text"), Context())
    with pytest.raises(TypeError, match="yield it"):
        operator.process_batch(keyed_batch("a", [1]))


async def test_a_stream_without_key_is_refused_at_open() -> None:
    """H2.2"""
    with pytest.raises(StateError, match="key_by"):
        await opened(KeyedRowsOperator("map", Numbered()), Context(keyed=False))
