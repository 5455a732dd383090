"""The output of a task: routing into partitions, flushing, watermarks to all consumers, events
behind records, and unsupported values.
"""

from __future__ import annotations

import logging
import random
import threading
from typing import Any

import pytest

from aioflow.core.column_batch import ColumnBatch, ObjectColumn
from aioflow.core.elements import (
    MAX_WATERMARK,
    EndOfData,
    EndOfPartition,
    LatencyMarker,
    RecordBatch,
    Watermark,
    empty_batch,
    one_record,
)
from aioflow.core.errors import ProducerFailed, TypeNotSupported
from aioflow.core.functions import OutputTag
from aioflow.core.wire.serializers import Codec
from aioflow.graph.stream_graph import Partitioning, ShipStrategy
from aioflow.network.local_pool import NetworkBufferPool
from aioflow.network.partition import ResultPartition
from aioflow.protocol.framing import SEGMENT_BYTES
from aioflow.task.output import PIECES_MAX, SIDES_MAX, RecordWriter, TaskOutput, TravelCheck
from aioflow.task.partitioners import create_partitioner

TAG: OutputTag[Any] = OutputTag("side")


def writer(
    strategy: ShipStrategy = ShipStrategy.REBALANCE,
    channels: int = 2,
    size: int = 4,
    batches: int = 8,
    **options: Any,
) -> RecordWriter:
    pool = NetworkBufferPool().create_buffer_pool(SEGMENT_BYTES, batches_max=batches)
    partition = ResultPartition("p", channels, pool, size)
    partitioner = create_partitioner(
        Partitioning(strategy, lambda x: x),
        channels,
        max_parallelism=128,
        subtask_index=0,
        rng=random.Random(0),
        place="'op'",
    )
    return RecordWriter(partition, partitioner, **options)


def task_output(*writers: RecordWriter) -> TaskOutput:
    output = TaskOutput()
    for one in writers:
        output.add(one)
    return output


def read(one: RecordWriter, channel: int) -> list[Any]:
    """Everything that is visible to a consumer: values of batches, and events."""
    found: list[Any] = []
    while (polled := one.partition.subpartitions[channel].poll()) is not None:
        element = polled[0]
        found.append(element.values if isinstance(element, RecordBatch) else element)
    return found


def test_full_batches_are_visible_at_once_the_rest_at_the_next_flush() -> None:
    """C9.1: "only when full" without a flush."""
    one = writer(ShipStrategy.GLOBAL, size=4)
    for value in (1, 2, 3):
        one.emit(RecordBatch([value]))
    assert read(one, 0) == []
    assert one.has_gathered
    one.emit(RecordBatch([4]))
    assert read(one, 0) == [[1, 2, 3, 4]]
    one.emit(RecordBatch([5]))
    one.flush()
    assert read(one, 0) == [[5]]
    assert not one.has_gathered


def test_a_large_part_travels_as_it_is_to_a_waiting_consumer_and_gathered_to_others() -> None:
    """C9.1: a frame costs as much as hundreds of records, but no consumer waits for a full one."""
    one = writer(ShipStrategy.GLOBAL, size=8)
    subpartition = one.partition.subpartitions[0]
    subpartition.create_read_view(lambda priority: None, acknowledges=True)
    one.emit(RecordBatch([1, 2, 3, 4]))
    assert read(one, 0) == [[1, 2, 3, 4]]
    one.emit(RecordBatch([5, 6, 7, 8]))
    assert read(one, 0) == []
    one.emit(RecordBatch([9, 10, 11, 12]))
    assert read(one, 0) == [[5, 6, 7, 8, 9, 10, 11, 12]]
    one.emit(RecordBatch([13, 14, 15, 16]))
    subpartition.taken_over()
    subpartition.taken_over()
    assert read(one, 0) == []
    one.emit(RecordBatch([17, 18, 19, 20]))
    assert read(one, 0) == [[13, 14, 15, 16, 17, 18, 19, 20]]


def test_a_batch_larger_than_the_limit_is_cut() -> None:
    one = writer(ShipStrategy.GLOBAL, size=4)
    one.emit(RecordBatch(list(range(10))))
    one.flush()
    parts = read(one, 0)
    assert [value for part in parts for value in part] == list(range(10))
    assert max(len(part) for part in parts) <= 4


def test_records_with_and_without_timestamps_never_share_a_batch() -> None:
    one = writer(ShipStrategy.GLOBAL, size=10)
    one.emit(RecordBatch([1, 2]))
    one.emit(RecordBatch([3], [30]))
    one.emit(RecordBatch([4]))
    one.flush()
    assert read(one, 0) == [[1, 2], [3], [4]]


def test_the_lists_of_an_emitted_batch_are_not_changed() -> None:
    one = writer(ShipStrategy.GLOBAL, size=10)
    batch = RecordBatch([1, 2], [10, 20])
    one.emit(batch)
    one.emit(RecordBatch([3], [30]))
    one.flush()
    assert (batch.values, batch.timestamps) == ([1, 2], [10, 20])


def test_empty_flush_notifies_no_consumer() -> None:
    """C9.2: flush on empty no notification; two flushes one notification."""
    one, told = writer(ShipStrategy.GLOBAL), []
    one.partition.subpartitions[0].create_read_view(lambda priority: told.append(priority))
    one.flush()
    assert told == []
    one.emit(RecordBatch([1]))
    one.flush()
    one.flush()
    assert told == [False]


def test_a_channel_without_records_learns_the_watermark_as_an_event() -> None:
    one = writer(ShipStrategy.GLOBAL, channels=3)
    one.emit(RecordBatch([1], [5], None, None, 4))
    one.flush()
    assert read(one, 0) == [[1]]
    assert read(one, 1) == [Watermark(4)]
    assert read(one, 2) == [Watermark(4)]


def test_an_event_goes_to_every_channel_behind_the_records_and_takes_no_memory() -> None:
    """C6.1, C6.2."""
    one = writer(channels=4)
    marker = LatencyMarker(1, "s", 0)
    task_output(one).broadcast_event(marker)
    assert [len(one.partition.subpartitions[i]) for i in range(4)] == [1, 1, 1, 1]
    assert one.partition.pool_usage == 0
    one.emit(RecordBatch([1, 2, 3]))
    task_output(one).broadcast_event(marker)
    assert [read(one, i) for i in range(4)] == [[marker, [i + 1], marker] for i in range(3)] + [
        [marker, marker]
    ]


def test_broadcast_puts_every_record_into_every_channel() -> None:
    """C6.3."""
    one = writer(ShipStrategy.BROADCAST, channels=3)
    one.emit(RecordBatch([1, 2]))
    one.flush()
    assert [read(one, i) for i in range(3)] == [[[1, 2]]] * 3


def test_a_batch_goes_to_every_main_edge_and_is_counted_once() -> None:
    a, b = writer(ShipStrategy.GLOBAL), writer(ShipStrategy.GLOBAL)
    output = task_output(a, b)
    output.emit(RecordBatch([1, 2], None, None, None, 7))
    output.flush()
    assert read(a, 0) == read(b, 0) == [[1, 2]]
    assert output.records_out == 2
    assert output.watermark == 7


def test_tags_made_of_records_are_not_all_remembered_but_those_that_are_read_are() -> None:
    output, side = task_output(writer(ShipStrategy.GLOBAL)), writer(ShipStrategy.GLOBAL)
    output.add(side, (0, TAG))
    for i in range(2 * SIDES_MAX):
        output.emit_side(0, OutputTag(f"tag {i}"), one_record(i, None, 4))
    output.emit_side(0, TAG, one_record("read", None, 4))
    assert len(output.sides_sent) == SIDES_MAX + 1
    assert (0, TAG) in output.sides_sent


def test_side_outputs_go_by_operator_and_tag() -> None:
    main, first, second = (writer(ShipStrategy.GLOBAL) for _ in range(3))
    output = task_output(main)
    output.add(first, (0, TAG))
    output.add(second, (1, TAG))
    output.emit_side(0, TAG, one_record("a", 5, 4))
    output.emit_side(1, TAG, one_record("b", 6, 4))
    output.emit_side(2, TAG, one_record("unread", 6, 4))
    output.flush()
    assert (read(main, 0), read(first, 0), read(second, 0)) == ([], [["a"]], [["b"]])


def test_side_outputs_keep_event_time_going() -> None:
    main, side = writer(ShipStrategy.GLOBAL), writer(ShipStrategy.GLOBAL)
    output = task_output(main)
    output.add(side, (0, TAG))
    output.emit(RecordBatch([1], [10], None, None, 9))
    output.flush()
    assert read(side, 0) == [Watermark(9)]


def test_the_end_follows_everything_that_was_gathered() -> None:
    """C9.4, C2.4: end of input flushes regardless of age; MAX, EndOfData and EndOfPartition in
    this order, once.
    """
    one = writer(ShipStrategy.GLOBAL, channels=1)
    output = task_output(one)
    output.emit(RecordBatch([1]))
    output.emit(empty_batch(MAX_WATERMARK))
    output.end_of_data(drain=True)
    output.finish()
    output.finish()
    assert read(one, 0) == [[1], Watermark(MAX_WATERMARK), EndOfData(True), EndOfPartition()]


def test_readers_of_a_failed_task_see_their_producer_fail() -> None:
    """B1.6."""
    one = writer(ShipStrategy.GLOBAL)
    output = task_output(one)
    output.emit(RecordBatch([1]))
    output.flush()
    output.fail(ValueError("mine"))
    with pytest.raises(ProducerFailed, match="mine"):
        one.partition.subpartitions[0].poll()


@pytest.mark.parametrize(
    ("edges", "age_ns"),
    [((), 1_000), ((2,), 1_000), ((8,), 1_000), ((64,), 7_001_000), ((6, 6), 501_000)],
)
def test_a_task_of_many_channels_gathers_for_longer(edges: tuple[int, ...], age_ns: int) -> None:
    """Each flush wakes all of their readers."""
    outputs = [writer(channels=channels, batches=channels) for channels in edges]
    assert task_output(*outputs).flush_age_ns(1_000) == age_ns


@pytest.mark.parametrize(("channels", "records"), [(8, 0), (9, 64), (16, 512)])
def test_a_flush_to_many_channels_is_worth_it_from_some_records_each_on(
    channels: int, records: int
) -> None:
    output = task_output(writer(channels=channels, batches=channels))
    for _ in range(2):  # Counted again after each flush.
        for _ in range(records):
            assert not output.is_worth_a_flush
            output.emit(RecordBatch([1]))
        assert output.is_worth_a_flush
        output.flush()


def test_a_task_without_edges_always_has_room() -> None:
    output = TaskOutput()
    output.emit(RecordBatch([1]))
    assert output.availability.is_available
    assert not output.is_overdrawn


def test_a_task_with_two_consumers_follows_the_slower_one() -> None:
    slow, quick = (
        writer(ShipStrategy.GLOBAL, size=1, batches=2),
        writer(ShipStrategy.GLOBAL, size=1, batches=8),
    )
    output = task_output(slow, quick)
    told: list[bool] = []
    while output.availability.is_available:
        output.emit(RecordBatch([1]))
    output.availability.on_available(lambda: told.append(True))
    read(quick, 0)
    assert not output.availability.is_available
    assert told == []
    read(slow, 0)
    assert output.availability.is_available
    assert told == [True]


def test_records_beyond_the_room_are_overdraft_and_never_lost() -> None:
    """Hard back pressure: one record's own output."""
    one = writer(ShipStrategy.GLOBAL, channels=1, size=1, batches=2)
    output = task_output(one)
    output.emit(RecordBatch([1]))
    assert not output.is_overdrawn
    output.emit(RecordBatch(list(range(50))))
    assert output.is_overdrawn
    assert output.pool_usage > 1
    assert output.queued_batches == len(read(one, 0))
    assert not output.is_overdrawn


def test_released_consumer_takes_nothing_and_blocks_no_other() -> None:
    one = writer(ShipStrategy.REBALANCE, channels=2, size=1)
    one.partition.subpartitions[0].release()
    one.emit(RecordBatch([1, 2, 3, 4]))
    assert read(one, 1) == [[2], [4]]


# Whether values could travel.


def test_only_the_first_value_of_an_edge_is_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    checked: set[int] = set()
    one = writer(
        ShipStrategy.GLOBAL, check=TravelCheck("output of 'op'", 7, checked, Codec(), strict=False)
    )
    again = writer(
        ShipStrategy.GLOBAL, check=TravelCheck("output of 'op'", 7, checked, Codec(), strict=False)
    )
    with caplog.at_level(logging.WARNING):
        for each in (one, again):
            each.emit(RecordBatch([threading.Lock()]))
            each.emit(RecordBatch([threading.Lock()]))
    (record,) = caplog.records
    assert "output of 'op'" in record.getMessage()
    assert checked == {7}


def test_a_value_that_can_travel_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    one = writer(
        ShipStrategy.GLOBAL, check=TravelCheck("output of 'op'", 7, set(), Codec(), strict=True)
    )
    one.emit(RecordBatch([{"a": 1}]))
    one.emit(RecordBatch([threading.Lock()]))
    assert caplog.records == []


def test_strict_refuses_before_anything_is_written() -> None:
    one = writer(
        ShipStrategy.GLOBAL, check=TravelCheck("output of 'op'", 7, set(), Codec(), strict=True)
    )
    with pytest.raises(TypeNotSupported, match="output of 'op'"):
        one.emit(RecordBatch([threading.Lock()]))
    one.flush()
    assert read(one, 0) == []


def test_task_is_notified_of_one_batch_per_consumer_of_its_narrowest_edge() -> None:
    spread, everywhere = (
        writer(channels=3, size=100),
        writer(ShipStrategy.BROADCAST, channels=3, size=100),
    )
    output, told = task_output(spread, everywhere), []
    output.on_slice_records = lambda rows, _columns: told.append(rows)
    spread.partition.subpartitions[0].resize(10)
    for subpartition in everywhere.partition.subpartitions:
        subpartition.resize(20)
    assert told[0] == 100  # Each of these records goes to all three consumers of the other edge.
    assert told[-1] == 20
    spread.partition.subpartitions[1].resize(1)
    spread.partition.subpartitions[2].resize(1)
    assert told[-1] == 12


def columns(count: int) -> RecordBatch:
    values = ColumnBatch({"x": ObjectColumn(list(range(count)))}, count)
    return RecordBatch(values)  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [100, 1_500, 10_000])
def test_columns_come_and_are_taken_in_batches_of_what_the_consumer_asked_for(
    asked: int,
) -> None:
    one = writer(ShipStrategy.GLOBAL, channels=1, size=1024)
    output, told = task_output(one), []
    output.on_slice_records = lambda rows, columns: told.append((rows, columns))
    one.partition.subpartitions[0].resize(asked)
    one.emit(columns(min(20_000, PIECES_MAX * asked)))
    assert {len(values) for values in read(one, 0)[:-1]} == {asked}
    assert told == [(min(asked, 1024), asked)]


@pytest.mark.parametrize(
    "make", [lambda count: RecordBatch(list(range(count))), columns], ids=["rows", "columns"]
)
def test_simultaneous_records_are_queued_in_few_batches_and_do_not_count_as_pace(
    make: Any,
) -> None:
    one = writer(ShipStrategy.GLOBAL, channels=1, size=2048)
    (subpartition,) = one.partition.subpartitions
    subpartition.start_small()
    one.emit(make(10_000))
    assert [len(values) for values in read(one, 0)] == [625] * PIECES_MAX
    assert subpartition.is_starting
    assert subpartition.builder.batch_records_max == subpartition.column_records == 16
    subpartition.resize(1)
    one.emit(make(10_000))
    assert [len(values) for values in read(one, 0)] == [625] * PIECES_MAX, (
        "the consumer asked for single records"
    )


def test_rows_in_pieces_of_a_batch_follow_what_was_gathered_and_keep_their_watermarks() -> None:
    one = writer(ShipStrategy.GLOBAL, channels=1, size=8)
    (subpartition,) = one.partition.subpartitions
    subpartition.resize(1)
    subpartition.builder.extend(RecordBatch([-1], [0], None, [7], 7))
    one.emit(RecordBatch(list(range(200)), list(range(200)), None, list(range(200)), 500))
    values: list[int] = []
    marks: list[int] = []
    told = 0
    while (polled := subpartition.poll()) is not None:
        batch = polled[0]
        assert isinstance(batch, RecordBatch)
        assert len(batch.values) <= 8
        values += batch.values
        marks += [told] * len(batch.values) if batch.watermarks is None else batch.watermarks
        told = max(told, batch.watermark)
    assert values == [-1, *range(200)]
    assert marks == [7, *(max(7, mark) for mark in range(200))]
    assert max(told, subpartition.builder.watermark) == 500


def test_a_starting_exchange_holds_up_its_task_only_while_something_waits_in_it() -> None:
    one, quiet = (
        writer(ShipStrategy.GLOBAL, channels=1, size=1024),
        writer(ShipStrategy.GLOBAL, channels=1, size=1024),
    )
    output, told = task_output(one, quiet), []
    for each in (one, quiet):
        each.partition.subpartitions[0].start_small()
    output.on_slice_records = lambda rows, columns: told.append((rows, columns))
    output.grow()
    whole = (1024, 1024 * 32)
    assert told[-1] == whole, "the pace of consumers is unknown, but nothing waits for them"
    one.emit(RecordBatch([1]))
    output.grow()
    assert told[-1] == (16, 16), "gathered"
    one.flush()
    output.grow()
    assert told[-1] == (16, 16), "queued"
    assert read(one, 0) == [[1]]
    output.grow()
    assert told[-1] == whole
    one.partition.subpartitions[0].create_read_view(lambda _: None, acknowledges=True)
    one.emit(RecordBatch([2]))
    one.flush()
    assert read(one, 0) == [[2]]
    output.grow()
    assert told[-1] == (64, 64), (
        "on the way to a consumer elsewhere, which is through with the first one"
    )
    one.partition.subpartitions[0].taken_over()
    output.grow()
    assert told[-1] == whole
