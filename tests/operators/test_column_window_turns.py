"""Windows on columns take turns: how much is done in one, what may happen between two, and what many keys cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aioflow as af
from aioflow.columns import slices
from aioflow.columns.keys import KeyEncoder, KeyRouter
from aioflow.core.column_batch import CodedColumn, ColumnBatch, NumberColumn
from aioflow.core.elements import RecordBatch
from aioflow.core.entry_tables import GrowingList
from aioflow.operators.slice_window import SliceWindowOperator
from aioflow.operators.windowing import SlidingWindows, TumblingWindows

from .context import drive, opened


def some(keys: Any, time: int) -> RecordBatch:
    """Columns of a record at `time` for each of `keys`, a column or ints."""
    column = keys if isinstance(keys, CodedColumn) else NumberColumn(np.asarray(keys, np.int64))
    count = len(column)
    values = ColumnBatch({"x": NumberColumn(np.arange(count))}, count)
    return RecordBatch(values, NumberColumn(np.full(count, time)), column)  # type: ignore[arg-type]  # Columns read like lists.


def until(watermark: int) -> RecordBatch:
    return RecordBatch([], None, None, None, watermark)


def counting(assigner: TumblingWindows | SlidingWindows) -> SliceWindowOperator:
    return SliceWindowOperator(assigner, af.agg(n=af.count(), most=af.max(af.col.x)))


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The keys that encoders have looked up one by one."""
    found: list[Any] = []
    of_list = KeyEncoder._of_list
    monkeypatch.setattr(KeyEncoder, "_of_list", lambda self, keys: found.extend(keys) or of_list(self, keys))
    return found


async def test_keys_are_encoded_once_however_many_a_channel_lists(monkeypatch: pytest.MonkeyPatch, looked_up: list[Any]) -> None:
    monkeypatch.setattr(slices, "KEYS_MIN", 100)
    operator = await opened(counting(TumblingWindows(10)))
    texts = GrowingList(f"k{key}" for key in range(1_000))
    for number in range(40):
        # Each batch has a few of the texts, and the list of all of them.
        drive(operator, [some(CodedColumn(np.arange(number % 5, 150, 5, np.int32), texts), 1)])

    assert sorted(looked_up) == sorted(texts[:150])


async def test_the_first_keys_of_a_slice_keep_the_codes_that_the_slice_before_gave(
    monkeypatch: pytest.MonkeyPatch, looked_up: list[Any]
) -> None:
    monkeypatch.setattr(slices, "KEYS_MIN", 100)
    operator = await opened(counting(TumblingWindows(10)))
    texts = GrowingList(f"k{key}" for key in range(150))
    for number in range(40):
        drive(operator, [some(CodedColumn(np.arange(number % 5, 150, 5, np.int32), texts), 2 * number), until(2 * number)])

    assert len(looked_up) == 150


async def test_codes_of_keys_that_are_gone_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "KEYS_MIN", 100)
    operator = await opened(counting(TumblingWindows(10)))
    results = []
    for number in range(60):
        drive(operator, [some(range(50 * number, 50 * number + 50), 10 * number)])
        results += drive(operator, [until(10 * number + 9)])

    assert [row[0].key for row in results] == list(range(3_000))
    assert len(operator._slices._columns._encoder) <= 6 * 50


def test_a_router_looks_up_the_keys_of_a_piece_alone(looked_up: list[Any]) -> None:
    router = KeyRouter(af.col.k, 2, 128)
    texts = GrowingList(f"k{key}" for key in range(1_000))
    for begin in (0, 10):
        keys = CodedColumn(np.arange(begin, begin + 10, dtype=np.int32), texts)
        parts = router.split(RecordBatch(ColumnBatch({"k": keys}, 10), None, None))  # type: ignore[arg-type]
        assert sum(len(part.values) for _, part in parts) == 10

    assert looked_up == texts[:20]
