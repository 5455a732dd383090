"""Windows on columns take turns: how much is done in one, what may happen between two, and what
many keys cost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioflow as af
from aioflow.columns import accumulators
from aioflow.columns.keys import KeyEncoder, KeyRouter
from aioflow.core.column_batch import CodedColumn, ColumnBatch, NumberColumn
from aioflow.core.elements import RecordBatch
from aioflow.core.keygroups import KeyGroupRange, key_group
from aioflow.core.wire.columns import GrowingList
from aioflow.operators.window.assigners import SlidingWindows, TumblingWindows
from aioflow.operators.window.slices import SliceWindowOperator
from tests.columns.test_aggregates import ROWS, TIMES, Held

from .context import Context, drive, opened


def some(keys: Any, time: int) -> RecordBatch:
    """Columns of a record at `time` for each of `keys`, a column or ints."""
    column = keys if isinstance(keys, CodedColumn) else NumberColumn(np.asarray(keys, np.int64))
    count = len(column)
    values = ColumnBatch({"x": NumberColumn(np.arange(count))}, count)
    # Columns read like lists.
    return RecordBatch(values, NumberColumn(np.full(count, time)), column)  # type: ignore[arg-type]


def until(watermark: int) -> RecordBatch:
    return RecordBatch([], None, None, None, watermark)


def counting(assigner: TumblingWindows | SlidingWindows) -> SliceWindowOperator:
    return SliceWindowOperator(assigner, af.agg(n=af.count(), most=af.max(af.col.x)))


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The keys that encoders have looked up one by one."""
    found: list[Any] = []
    of_list = KeyEncoder._of_list
    monkeypatch.setattr(
        KeyEncoder, "_of_list", lambda self, keys: found.extend(keys) or of_list(self, keys)
    )
    return found


async def test_keys_are_encoded_once_however_many_a_channel_lists(
    monkeypatch: pytest.MonkeyPatch, looked_up: list[Any]
) -> None:
    monkeypatch.setattr(accumulators, "KEYS_MIN", 100)
    operator = await opened(counting(TumblingWindows(10)))
    texts = GrowingList(f"k{key}" for key in range(1_000))
    for number in range(40):
        # Each batch has a few of the texts, and the list of all of them.
        drive(operator, [some(CodedColumn(np.arange(number % 5, 150, 5, np.int32), texts), 1)])

    assert sorted(looked_up) == sorted(texts[:150])


async def test_the_first_keys_of_a_slice_keep_the_codes_that_the_slice_before_gave(
    monkeypatch: pytest.MonkeyPatch, looked_up: list[Any]
) -> None:
    monkeypatch.setattr(accumulators, "KEYS_MIN", 100)
    operator = await opened(counting(TumblingWindows(10)))
    texts = GrowingList(f"k{key}" for key in range(150))
    for number in range(40):
        drive(
            operator,
            [
                some(CodedColumn(np.arange(number % 5, 150, 5, np.int32), texts), 2 * number),
                until(2 * number),
            ],
        )

    assert len(looked_up) == 150


async def test_codes_of_keys_that_are_gone_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulators, "KEYS_MIN", 100)
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
        columns = ColumnBatch({"k": keys}, 10)
        parts = router.split(RecordBatch(columns, None, None))  # type: ignore[arg-type]
        assert sum(len(part.values) for _, part in parts) == 10

    assert looked_up == texts[:20]


@pytest.fixture
def in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns come out 100 results at a time, and are written 100 keys at a time."""
    monkeypatch.setattr(accumulators, "COLUMN_RECORDS_MAX", 100)
    monkeypatch.setattr(accumulators, "WRITTEN_MAX", 100)
    monkeypatch.setattr(accumulators, "WRITTEN_MAX", 100)


def pieces(operator: Any, batch: RecordBatch) -> Iterator[RecordBatch]:
    """Takes `batch`, and gives what comes out of it in each turn."""
    yield operator.process_batch(batch)
    while operator.has_pending:
        yield operator.resume(1_000_000)


def as_rows(batch: RecordBatch) -> RecordBatch:
    assert batch.keys is not None and batch.timestamps is not None
    return RecordBatch(list(batch.values), list(batch.timestamps), list(batch.keys))


SOME = [some(range(700), 1), some(range(400, 1_000), 6), some(range(0, 1_000, 3), 7)]


@pytest.mark.usefixtures("in_small_parts")
@pytest.mark.parametrize("assigner", [TumblingWindows(10), SlidingWindows(10, 5)])
async def test_a_firing_leaves_in_pieces_between_which_state_may_be_looked_at(
    assigner: Any,
) -> None:
    operator, rows = await opened(counting(assigner)), await opened(counting(assigner))
    drive(operator, SOME)
    expected = drive(rows, [*map(as_rows, SOME), until(14)])

    found, watermark = [], 0
    for out in pieces(operator, until(14)):
        operator.settle_state()
        assert len(out.values) <= 100
        assert out.watermark >= watermark
        watermark = out.watermark
        found += list(zip(out.values, out.timestamps or (), out.watermarks or (), strict=True))

    assert found == expected
    assert watermark == 14


async def turns_of_others(ongoing: Any) -> int:
    """How often others had a turn until `ongoing` was over."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(other(), name="other")
    await ongoing
    beside.cancel()
    return turns


@pytest.mark.usefixtures("in_small_parts")
async def test_a_snapshot_writes_a_large_slice_in_steps() -> None:
    operator = await opened(counting(TumblingWindows(10)))
    drive(operator, SOME)

    assert await turns_of_others(operator.snapshot_state(1)) >= 1_000 // 100 - 1
    assert operator.snapshot_state(2) is None  # Nothing has changed.


@pytest.mark.usefixtures("in_small_parts")
async def test_a_snapshot_that_was_given_up_in_its_midst_leaves_nothing_out_of_the_next() -> None:
    """Two subtasks resume from the next snapshot, in the order in which keys came."""
    operator, rows = (
        await opened(counting(TumblingWindows(10))),
        await opened(counting(TumblingWindows(10))),
    )
    drive(operator, SOME[:1])
    given_up = asyncio.create_task(operator.snapshot_state(1), name="snapshot")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    given_up.cancel()
    drive(operator, SOME[1:])
    await operator.snapshot_state(2)
    expected = [row[0] for row in drive(rows, [*map(as_rows, SOME), until(9)])]

    for groups in (KeyGroupRange(0, 63), KeyGroupRange(64, 127)):
        restored = await opened(counting(TumblingWindows(10)), Context(operator.ctx, groups=groups))
        found = [row[0] for row in drive(restored, [until(9)])]
        assert sorted(found) == sorted(row for row in expected if key_group(row.key, 128) in groups)


@pytest.mark.usefixtures("in_small_parts")
async def test_columns_of_a_slice_become_rows_in_steps() -> None:
    operator, rows = (
        await opened(counting(TumblingWindows(10))),
        await opened(counting(TumblingWindows(10))),
    )
    drive(operator, SOME)
    late = as_rows(some([3, 2_000], 8))

    assert len(list(pieces(operator, late))) >= 10
    assert drive(operator, [until(9)]) == drive(rows, [*map(as_rows, SOME), late, until(9)])


@pytest.mark.usefixtures("in_small_parts")
async def test_windows_of_many_slices_are_written_in_turns() -> None:
    operator = await opened(counting(SlidingWindows(10, 1)))
    for time in range(10):
        drive(operator, [some(range(500), time)])

    # All windows before it have seven slices or fewer.
    drive(operator, [until(6)])
    first = operator.process_batch(until(7))

    assert operator.has_pending and not len(first.values)
    table = operator.ctx.keyed_state.table("window-slices")
    assert sum(len(table.peek(start)) for start in table.namespaces()) < 500


@pytest.mark.usefixtures("in_small_parts")
async def test_keys_that_are_many_are_given_up_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulators, "KEYS_MIN", 100)
    operator = await opened(counting(TumblingWindows(10)))
    for number in range(5):
        drive(operator, [some(range(500 * number, 500 * number + 500), 10 * number)])

    assert len(list(pieces(operator, some([1], 40)))) >= 5 * 500 // 100


@pytest.mark.parametrize("state", ["heap", "rocksdb"])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 1)])
async def test_a_job_stopped_during_a_firing_goes_on_where_it_was(
    before: int, after: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (accumulators, "COLUMN_RECORDS_MAX"),
        (accumulators, "WRITTEN_MAX"),
        (accumulators, "WRITTEN_MAX"),
    ):
        monkeypatch.setattr(module, name, 2)
    store, fired, given = f"file://{tmp_path}", asyncio.Event(), asyncio.Event()
    found: list[Any] = []

    def counted(stream: Any) -> Any:
        return (
            stream.key_by(af.col.k)
            .window(af.sliding("400ms", "200ms"))
            .aggregate(af.agg(n=af.count(), x=af.sum(af.col.x)))
        )

    def put(result: Any) -> None:
        found.append(result)
        fired.set()

    def flow(until: int, parallelism: int) -> af.Flow:
        flow = af.Flow("pieces", parallelism=parallelism)
        counted(flow.source(Held("columns", until, given), uid="in", watermarks=TIMES)).sink(
            put, uid="out"
        )
        return flow

    async with flow(3_300, before).run(checkpoints=store, every="1h", state=state) as job:
        await asyncio.wait_for(fired.wait(), 60)
        await job.stop()
    assert found
    await flow(len(ROWS), after).execute(checkpoints=store, every="1h", state=state)

    whole = await counted(af.Flow("whole").source(ROWS, watermarks=TIMES)).collect()
    assert sorted(map(repr, found)) == sorted(map(repr, whole))
