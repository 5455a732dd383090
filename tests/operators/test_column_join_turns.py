"""Joins of windows on columns take turns: what may happen between two pieces, and how much is
done in one.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aioflow.columns import hash_join
from aioflow.core.column_batch import CodedColumn
from aioflow.core.elements import MIN_WATERMARK, RecordBatch
from aioflow.core.functions import Pair
from aioflow.operators.join.joins import COLUMNS
from aioflow.operators.join.window_join import WindowJoinOperator
from aioflow.operators.window.assigners import SlidingWindows, TumblingWindows

from .context import drive_inputs, opened
from .test_column_joins import as_columns


def some(count: int, time: int, keys: list[Any] | None = None) -> RecordBatch:
    """Columns of `count` records at `time`, of as many keys."""
    return as_columns(
        RecordBatch(
            list(range(count)), [time] * count, keys or list(range(count)), [MIN_WATERMARK] * count
        )
    )


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
async def test_keys_are_encoded_once_however_many_are_alive(
    assigner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hash_join, "KEYS_MIN", 100)
    operator = await opened(WindowJoinOperator(assigner, Pair))
    begun = []
    texts = [f"k{key}" for key in range(150)]
    for number in range(40):
        # Each batch has a few of the texts, and the list of all of them, as batches of a channel
        # do.
        batch = some(20, 5 * number)
        batch.keys = CodedColumn(np.arange(20, dtype=np.int32) * 7 + number % 7, texts)
        drive_inputs(operator, [(number % 2, batch), (0, until(5 * number - 1))])
        if not begun or begun[-1] is not operator._sides._encoder:
            begun.append(operator._sides._encoder)

    assert len(begun) <= 2


async def test_codes_of_keys_live_as_long_as_what_is_pending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hash_join, "KEYS_MIN", 100)
    operator = await opened(WindowJoinOperator(TumblingWindows(10), Pair))
    keys = [f"k{number}" for number in range(150)]
    drive_inputs(operator, [(0, some(150, 5, keys)), (1, some(150, 5, keys[::-1]))])

    pairs = [row[0] for row in drive_inputs(operator, [(0, until(9))])]

    assert [(pair.left["id"], pair.right["id"]) for pair in pairs] == [
        (number, 149 - number) for number in range(150)
    ]


async def test_keys_that_are_gone_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_join, "KEYS_MIN", 100)
    operator = await opened(WindowJoinOperator(TumblingWindows(10), Pair))
    for number in range(60):
        keys = [50 * number + key for key in range(50)]
        drive_inputs(operator, [(side, some(50, 10 * number, keys)) for side in (0, number % 2)])
        drive_inputs(operator, [(0, until(10 * number + 9))])

    assert len(operator._sides._encoder) <= 6 * 50


def turns(operator: Any, batch: RecordBatch) -> int:
    """Takes `batch`, and gives the number of pieces."""
    operator.process_input(0, batch)
    found = 1
    while operator.has_pending:
        operator.resume(1_000)
        found += 1
    return found


async def test_each_window_whose_keys_do_not_meet_is_a_turn() -> None:
    operator = await opened(WindowJoinOperator(SlidingWindows(50, 1), Pair))
    drive_inputs(operator, [(side, some(3, 0, [side, side + 2, side + 4])) for side in (0, 1)])

    assert turns(operator, until(1_000)) >= 50


async def test_windows_of_one_side_pass_in_steps() -> None:
    operator = await opened(WindowJoinOperator(SlidingWindows(5_000, 1), Pair))
    drive_inputs(operator, [(0, some(3, 0))])

    assert turns(operator, until(10_000)) >= 5_000 // 64


async def test_a_batch_of_many_slices_is_added_in_steps() -> None:
    operator = await opened(WindowJoinOperator(TumblingWindows(1), Pair))
    batch = some(640, 0)
    batch.timestamps = list(range(640))

    assert turns(operator, batch) >= 10


class Walked(dict[Any, Any]):
    """A space of which the operator may walk the items, and nothing else: all else costs RocksDB
    a walk or more.
    """

    def __len__(self) -> int:
        raise AssertionError("its length was asked for")

    def values(self) -> Any:
        raise AssertionError("its values were asked for")


async def test_a_firing_walks_the_items_of_each_slice_once(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = await opened(WindowJoinOperator(SlidingWindows(20, 10), Pair))
    drive_inputs(operator, [(side, some(10, 5)) for side in (0, 1)])
    operator.snapshot_state(1)
    table, walks = operator.ctx.keyed_state.table(COLUMNS), []

    def peek(namespace: Any) -> Any:
        walks.append(namespace[:2])
        return Walked(table.peek(namespace))

    monkeypatch.setattr(operator._sides, "_table", SimpleNamespace(peek=peek, drop=table.drop))
    rows = drive_inputs(operator, [(0, until(19))])

    assert len(rows) == 20
    assert walks == [(0, 0), (1, 0)]


async def test_columns_become_rows_in_steps() -> None:
    operator = await opened(WindowJoinOperator(SlidingWindows(40, 10), Pair))
    drive_inputs(operator, [(side, some(20_000, 5, ["hot"] * 20_000)) for side in (0, 1)])

    # 4,096 records made rows are a turn, and 1,024 that are added to windows, of which each is in
    # four.
    assert (
        turns(operator, RecordBatch([{"id": 1}], [6], ["hot"], [MIN_WATERMARK]))
        >= 40_000 // 4_096 + 4 * 40_000 // 1_024
    )


async def test_a_snapshot_settles_many_slices_in_steps() -> None:
    operator = await opened(WindowJoinOperator(SlidingWindows(4_000, 1), Pair))
    batch = some(3_000, 0)
    batch.timestamps = list(range(3_000))
    drive_inputs(operator, [(0, batch)])
    turns_of_others = 0

    async def other() -> None:
        nonlocal turns_of_others
        while True:
            await asyncio.sleep(0)
            turns_of_others += 1

    beside = asyncio.create_task(other(), name="other")
    await operator.snapshot_state(1)
    beside.cancel()

    assert turns_of_others >= 3_000 // 512 - 2
    assert len(operator.ctx.keyed_state.table(COLUMNS).namespaces()) == 3_000
    assert not operator._sides._pending


async def test_chunks_of_a_hot_key_are_read_in_steps() -> None:
    operator = await opened(WindowJoinOperator(TumblingWindows(10), Pair))
    for _ in range(8):
        drive_inputs(operator, [(0, some(32_768, 5, ["hot"] * 32_768))])
    drive_inputs(operator, [(1, some(1, 5, ["cold"]))])

    # 131,072 records are a turn. Each of the three parts is looked at twice, and their keys are
    # divided. There are no pairs.
    assert turns(operator, until(9)) == 8 * 32_768 // 131_072 + 2 * 3 + 1 + 1 + 1


@pytest.mark.parametrize(("time", "warnings"), [(1_900, 0), (500_000, 1)])
async def test_a_row_far_ahead_is_named_once(
    time: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    operator = await opened(WindowJoinOperator(TumblingWindows(10), Pair))
    drive_inputs(operator, [(0, until(1_000)), (0, some(1, 1_005))])

    drive_inputs(
        operator,
        [(1, RecordBatch([{"id": 1}], [time + more], ["k"], [1_000])) for more in (0, 100)],
    )

    found = [
        record.getMessage()
        for record in caplog.records
        if record.name == "aioflow.operators.join.window_join"
    ]
    assert len(found) == warnings
    assert all(
        "join 'window'" in message and "at 500000 ms" in message and "watermark 1000 ms" in message
        for message in found
    )
