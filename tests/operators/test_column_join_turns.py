"""Joins of windows on columns take turns: what may happen between two pieces, and how much is done in one."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from aioflow.columns import join_sides
from aioflow.core.column_batch import CodedColumn
from aioflow.core.elements import MIN_WATERMARK, RecordBatch
from aioflow.core.functions import Pair
from aioflow.operators.window_join import WindowJoinOperator
from aioflow.operators.windowing import SlidingWindows, TumblingWindows

from .context import drive_inputs, opened
from .test_column_joins import as_columns


def some(count: int, time: int, keys: list[Any] | None = None) -> RecordBatch:
    """Columns of `count` records at `time`, of as many keys."""
    return as_columns(RecordBatch(list(range(count)), [time] * count, keys or list(range(count)), [MIN_WATERMARK] * count))


def until(watermark: int) -> RecordBatch:
    return RecordBatch([], None, None, None, watermark)


async def test_state_may_be_looked_at_between_two_pieces_of_a_firing() -> None:
    operator = await opened(WindowJoinOperator(SlidingWindows(20, 10), Pair))
    # When the windows fire, half of it is in the table, in more chunks than are read at once.
    drive_inputs(operator, [(side, some(500, 5)) for side in (0, 1)])
    operator.snapshot_state(1)
    drive_inputs(operator, [(side, some(500, 5)) for side in (0, 1)])
    pairs, looks = 0, 0
    for watermark in (9, 19):
        out = operator.process_input(0, until(watermark))
        pairs += len(out.values)
        while operator.has_pending:
            operator.settle_state()
            looks += 1
            out = operator.resume(1_000)
            pairs += len(out.values)

    assert looks > 2
    assert pairs == 2 * 500 * 2 * 2


async def test_a_join_keeps_nothing_of_windows_that_are_over() -> None:
    operator = await opened(WindowJoinOperator(TumblingWindows(10), Pair))

    def windows(first: int, stop: int) -> int:
        for number in range(first, stop):
            drive_inputs(operator, [(side, some(1, 10 * number, ["hot"])) for side in (0, 1)])
            operator.snapshot_state(number)
            drive_inputs(operator, [(0, until(10 * number + 9))])
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = windows(0, 50)
        # A window costs bytes, not the tens of thousands that ints of all key groups took.
        assert windows(50, 450) - before < 400_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("assigner", [TumblingWindows(10), SlidingWindows(100, 10)])
async def test_keys_are_encoded_once_however_many_are_alive(assigner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_sides, "KEYS_MIN", 100)
    operator = await opened(WindowJoinOperator(assigner, Pair))
    begun = []
    texts = [f"k{key}" for key in range(150)]
    for number in range(40):
        # Each batch has a few of the texts, and the list of all of them, as batches of a channel do.
        batch = some(20, 5 * number)
        batch.keys = CodedColumn(np.arange(20, dtype=np.int32) * 7 + number % 7, texts)
        drive_inputs(operator, [(number % 2, batch), (0, until(5 * number - 1))])
        if not begun or begun[-1] is not operator._sides._encoder:
            begun.append(operator._sides._encoder)

    assert len(begun) <= 2


async def test_keys_that_are_gone_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_sides, "KEYS_MIN", 100)
    operator = await opened(WindowJoinOperator(TumblingWindows(10), Pair))
    for number in range(60):
        keys = [50 * number + key for key in range(50)]
        drive_inputs(operator, [(side, some(50, 10 * number, keys)) for side in (0, number % 2)])
        drive_inputs(operator, [(0, until(10 * number + 9))])

    assert len(operator._sides._encoder) <= 6 * 50
