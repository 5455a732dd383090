"""The output of one subtask: one budget over all its consumers."""

from __future__ import annotations

import pytest

from aioflow.core.elements import CheckpointBarrier, EndOfData, EndOfPartition, RecordBatch
from aioflow.core.errors import ProducerFailed
from aioflow.network.local_pool import NetworkBufferPool
from aioflow.network.partition import ResultPartition
from aioflow.protocol.framing import SEGMENT_BYTES

BARRIER = CheckpointBarrier(1, 0)


def partition(consumers: int, budget: int = 4) -> ResultPartition:
    pool = NetworkBufferPool().create_buffer_pool(SEGMENT_BYTES, batches_max=budget)
    return ResultPartition("p", consumers, pool)


def test_the_partition_is_unavailable_while_the_queued_batches_reach_the_budget() -> None:
    output = partition(2, budget=3)
    for number in range(3):
        assert output.availability.is_available
        output.subpartitions[number % 2].add(RecordBatch([number]))
    assert not output.availability.is_available
    output.subpartitions[1].poll()
    assert output.availability.is_available


async def test_a_waiting_producer_is_woken_by_its_consumer_alone() -> None:
    output = partition(1, budget=1)
    output.subpartitions[0].add(RecordBatch([1]))
    future = output.availability.get_available_future()
    output.subpartitions[0].poll()
    assert future.done()


def test_a_records_own_output_is_accepted_past_the_budget_and_counted() -> None:
    output = partition(1, budget=2)
    for number in range(50):
        assert output.subpartitions[0].add(RecordBatch([number]))
    assert (output.queued_batches, output.pool_usage) == (50, 25.0)
    for _ in range(48):
        output.subpartitions[0].poll()
        assert not output.availability.is_available
    output.subpartitions[0].poll()
    assert output.availability.is_available


def test_a_broadcast_event_reaches_every_queue_and_takes_no_memory() -> None:
    """C6.1"""
    output = partition(4)
    output.broadcast_event(BARRIER, blocking=True)
    assert [len(output.subpartitions[i]) for i in range(4)] == [1, 1, 1, 1]
    assert output.pool_usage == 0
    for subpartition in output.subpartitions:
        polled = subpartition.poll()
        assert polled is not None
        assert polled[0] is BARRIER
        assert subpartition.is_blocked


def test_a_broadcast_event_comes_last_behind_open_batches() -> None:
    """C6.2: half a batch, more than one, exactly one, over four consumers, then the event."""
    output = ResultPartition(
        "p", 4, NetworkBufferPool().create_buffer_pool(SEGMENT_BYTES), batch_records_max=4
    )
    for index, records in enumerate((2, 6, 4, 0)):
        for record in range(records):
            builder = output.subpartitions[index].builder
            if not builder.append(record):
                output.subpartitions[index].flush()
                assert builder.append(record)
    output.broadcast_event(BARRIER)
    assert [len(output.subpartitions[i]) for i in range(4)] == [2, 3, 2, 1]
    for subpartition in output.subpartitions:
        last = None
        while (polled := subpartition.poll()) is not None:
            last = polled[0]
        assert last is BARRIER


def test_an_event_for_one_consumer_reaches_only_that_one() -> None:
    output = partition(2)
    output.add_event(1, BARRIER)
    assert [len(output.subpartitions[i]) for i in range(2)] == [0, 1]


def test_flush_makes_every_open_batch_visible() -> None:
    output = partition(2)
    for subpartition in output.subpartitions:
        subpartition.builder.append(1)
    output.flush()
    assert output.queued_batches == 2


def test_finish_ends_every_subpartition_once() -> None:
    output = partition(2)
    output.finish()
    output.finish()
    assert output.is_finished
    assert not output.subpartitions[0].add(RecordBatch([1]))
    for subpartition in output.subpartitions:
        polled = subpartition.poll()
        assert polled is not None
        assert polled[0] == EndOfPartition()
        assert subpartition.poll() is None


def test_a_failure_reaches_every_consumer_at_its_next_poll() -> None:
    output = partition(2)
    output.subpartitions[0].add(RecordBatch([1]))
    output.fail(ValueError("broken"))
    assert output.is_finished
    for subpartition in output.subpartitions:
        with pytest.raises(ProducerFailed, match="broken"):
            subpartition.poll()
    assert output.queued_batches == 0


def test_release_returns_all_to_the_global_pool() -> None:
    parent = NetworkBufferPool()
    output = ResultPartition("p", 2, parent.create_buffer_pool(SEGMENT_BYTES))
    for number in range(6):
        output.subpartitions[number % 2].add(RecordBatch([number]))
    output.release()
    output.release()
    assert (parent.used_bytes, parent.required_bytes) == (0, 0)
    assert not output.subpartitions[0].add(RecordBatch([1]))
    assert output.pool_usage == 0


def test_a_partition_that_all_consumers_released_gives_its_pool_back() -> None:
    parent = NetworkBufferPool()
    output = ResultPartition("p", 2, parent.create_buffer_pool(SEGMENT_BYTES))
    output.subpartitions[0].release()
    output.subpartitions[0].release()
    assert not output.is_released
    output.subpartitions[1].release()
    assert output.is_released
    assert parent.required_bytes == 0


def test_all_data_is_processed_when_every_consumer_said_so() -> None:
    """C14.2"""
    output = partition(3)
    output.broadcast_event(EndOfData())
    for index in (0, 1, 1):
        output.subpartitions[index].acknowledge_all_records_processed()
        assert not output.all_data_processed.is_available
    output.subpartitions[2].acknowledge_all_records_processed()
    assert output.all_data_processed.is_available


def test_a_consumer_that_leaves_is_not_waited_for() -> None:
    """C14.2: it was cancelled, or its process is gone, so it sends no acknowledgement any more."""
    output = partition(2)
    output.broadcast_event(EndOfData())
    output.subpartitions[0].release()
    assert not output.all_data_processed.is_available
    output.subpartitions[1].acknowledge_all_records_processed()
    assert output.all_data_processed.is_available


def test_a_partition_without_consumers_has_nothing_to_wait_for() -> None:
    assert partition(0).all_data_processed.is_available
