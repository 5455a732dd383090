"""Blocks: what is written comes back record by record, and the order does not depend on where
blocks are cut or when they come.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, RecordBatch, empty_batch
from aioflow.core.errors import TypeNotSupported
from aioflow.core.wire.serializers import Codec
from aioflow.graph.stream_graph import Partitioning, ShipStrategy
from aioflow.spark.runner import blocks
from aioflow.spark.runner.blocks import (
    ARRIVAL_GRAIN_MS,
    BlockRow,
    BlockWriter,
    cut,
    decode_block,
    merged,
)
from aioflow.task.partitioners import create_partitioner

CODEC = Codec()


class Channel:
    """A writer whose rows are kept."""

    def __init__(
        self,
        edge: int = 0,
        producer: int = 0,
        targets: int = 1,
        strategy: ShipStrategy = ShipStrategy.GLOBAL,
        key: Any = abs,
        taken: tuple[Any, ...] | None = None,
    ) -> None:
        self.rows: list[BlockRow] = []
        self.now_ms = 0
        partitioning = Partitioning(strategy, key, taken=taken)
        partitioner = create_partitioner(
            partitioning,
            targets,
            max_parallelism=128,
            subtask_index=0,
            rng=None,
            place="here",  # type: ignore[arg-type]
        )
        self.writer = BlockWriter(
            edge, producer, partitioner, CODEC, "here", lambda: self.now_ms, self.rows.append
        )


def read(rows: list[BlockRow]) -> Iterator[tuple[Any, int, int, int]]:
    """(value, watermark before it, edge, arrival) in the order of the merge."""
    for piece in merged(decode_block(row, CODEC) for row in sorted(rows)):
        assert (
            piece.batch.watermarks is not None
            and piece.batch.watermark == piece.batch.watermarks[-1]
        )
        for value, mark in zip(piece.batch.values, piece.batch.watermarks, strict=True):
            yield value, mark, piece.edge, piece.arrival_ms


def test_records_come_back_with_times_keys_and_the_watermark_in_force() -> None:
    channel = Channel(strategy=ShipStrategy.HASH)
    channel.writer.emit(RecordBatch([-1, 2], [10, 20], None, [MIN_WATERMARK, 5], 9))
    channel.writer.emit(RecordBatch([3], [15], None, None, 14))
    channel.writer.emit(RecordBatch([4], [16], None, None, MIN_WATERMARK))
    channel.writer.flush()

    (row,) = channel.rows
    batch = decode_block(row, CODEC).batch
    assert (batch.values, batch.timestamps, batch.keys) == (
        [-1, 2, 3, 4],
        [10, 20, 15, 16],
        [1, 2, 3, 4],
    )
    assert batch.watermarks == [MIN_WATERMARK, 5, 9, 14]


def test_records_of_another_channel_do_not_precede_their_watermark() -> None:
    channel = Channel()
    channel.writer.emit(empty_batch(50))
    channel.writer.emit(RecordBatch(["side"], [10], None, [7], 7))
    channel.writer.emit(RecordBatch(["main"], [60], None, None, 55))
    channel.writer.emit(RecordBatch(["end"], None, None, None, MAX_WATERMARK))
    channel.writer.flush()

    assert [(value, mark) for value, mark, *_ in read(channel.rows)] == [
        ("side", 50),
        ("main", 50),
        ("end", 55),
    ]


def test_records_with_and_without_times_do_not_share_a_block() -> None:
    channel = Channel()
    for timestamps in ([1], None, [2]):
        channel.writer.emit(RecordBatch(["x"], timestamps))
    channel.writer.flush()

    assert [decode_block(row, CODEC).batch.timestamps for row in channel.rows] == [[1], None, [2]]


def test_projected_values_do_not_share_a_block_with_records() -> None:
    """If a record of a batch cannot be projected, all records of the batch go whole."""
    channel = Channel(
        targets=2, strategy=ShipStrategy.HASH, key=itemgetter(0), taken=(itemgetter(1),)
    )
    for rows in ([(1, "x")], [(1, "y")], [(1,)], [(1, "z")]):
        channel.writer.emit(RecordBatch(rows, [5] * len(rows), None, [3] * len(rows), 3))
    channel.writer.flush()

    blocks = [decode_block(row, CODEC) for row in channel.rows]
    assert [(block.batch.values, block.batch.taken) for block in blocks] == [
        (["x", "y"], True),
        ([(1,)], False),
        (["z"], True),
    ]
    assert cut(blocks[0].batch, 1, 2).taken, "a part of a block is as the block"


def test_arrival_times_come_in_steps_and_cut_pieces() -> None:
    channel = Channel()
    for value, now_ms in enumerate((0, 1, 19, 20, 45, 59)):
        channel.now_ms = now_ms
        channel.writer.emit(RecordBatch([value]))
    channel.writer.flush()

    assert ARRIVAL_GRAIN_MS == 20
    assert [(value, arrival) for value, _, _, arrival in read(channel.rows)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (3, 20),
        (4, 40),
        (5, 40),
    ]
    assert len(channel.rows) == 1


def test_keys_that_are_the_texts_themselves_are_written_once() -> None:
    same, other = (
        Channel(strategy=ShipStrategy.HASH, key=str.lower),
        Channel(strategy=ShipStrategy.HASH, key=str.lower),
    )
    same.writer.emit(RecordBatch(["word", "count"] * 20))
    other.writer.emit(RecordBatch(["word", "Count"] * 20))
    for channel in (same, other):
        channel.writer.flush()

    (short,), (long,) = same.rows, other.rows
    assert len(short.payload) < len(long.payload) * 0.6
    assert (
        decode_block(short, CODEC).batch.keys
        == ["word", "count"] * 20
        == decode_block(long, CODEC).batch.keys
    )


def test_value_that_cannot_travel_names_the_operator() -> None:
    channel = Channel()
    channel.writer.emit(RecordBatch([object()]))
    with pytest.raises(TypeNotSupported, match="here: "):
        channel.writer.flush()


@given(data=st.data())
def test_channels_merge_by_watermark_wherever_blocks_are_cut(data: st.DataObject) -> None:
    """The order is that of (watermark, edge, producer), and within a channel that of emission."""
    expected: list[tuple[int, tuple[int, int], int]] = []
    rows: list[BlockRow] = []
    with pytest.MonkeyPatch.context() as patch:
        for edge in range(data.draw(st.integers(1, 2))):
            for producer in range(data.draw(st.integers(1, 3))):
                limit = data.draw(st.integers(1, 4))
                patch.setattr(blocks, "BLOCK_RECORDS_FIRST", limit)
                patch.setattr(blocks, "BLOCK_RECORDS_MAX", limit)
                channel = Channel(edge, producer)
                marks = sorted(data.draw(st.lists(st.integers(0, 5), max_size=8)))
                for index, mark in enumerate(marks):
                    channel.writer.emit(
                        RecordBatch([(mark, (edge, producer), index)], None, None, [mark], mark)
                    )
                    expected.append((mark, (edge, producer), index))
                channel.writer.flush()
                rows += channel.rows

    assert [value for value, *_ in read(rows)] == sorted(expected)
    assert all(value[0] == mark for value, mark, *_ in read(rows))
