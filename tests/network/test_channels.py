"""Properties of the local channel only: a partition that may not exist yet, and no copy in
between.
"""

from __future__ import annotations

import pytest

from aioflow.core.elements import RecordBatch
from aioflow.core.errors import ProducerFailed
from aioflow.network.channels import LocalInputChannel
from aioflow.network.gate import InputGate
from aioflow.network.local_pool import NetworkBufferPool
from aioflow.network.partition import ResultPartition
from aioflow.network.subpartition import PipelinedSubpartition
from aioflow.protocol.framing import SEGMENT_BYTES


def partition() -> ResultPartition:
    return ResultPartition(
        "p", 1, NetworkBufferPool().create_buffer_pool(SEGMENT_BYTES, batches_max=8)
    )


def test_a_batch_crosses_by_reference() -> None:
    """C12.1"""
    output = partition()
    channel = LocalInputChannel(0, lambda: output.subpartitions[0])
    channel.request(lambda priority: None)
    batch = RecordBatch([object()])
    output.subpartitions[0].add(batch)
    polled = channel.poll()
    assert polled is not None
    assert polled[0] is batch


def test_a_partition_that_does_not_exist_yet_can_be_requested_again() -> None:
    """C12: the retry is the business of the gate's owner."""
    output = partition()
    known: list[PipelinedSubpartition] = []
    gate = InputGate([LocalInputChannel(0, lambda: known[0] if known else None)])
    assert gate.request_partitions() == [0]
    assert gate.poll() is None
    known.append(output.subpartitions[0])
    output.subpartitions[0].add(RecordBatch([1]))
    assert gate.request_partitions() == []
    assert gate.request_partitions() == []
    assert gate.availability.is_available
    polled = gate.poll()
    assert polled is not None


def test_channel_without_a_partition_has_nothing_to_poll_resume_or_acknowledge() -> None:
    channel = LocalInputChannel(0, lambda: None)
    assert channel.poll() is None
    channel.resume()
    channel.acknowledge_all_records_processed()
    assert (channel.queued_batches, channel.has_priority_event) == (0, False)
    channel.release()
    assert channel.request(lambda priority: None)


def test_a_channel_that_is_released_during_its_request_leaks_no_view() -> None:
    """C12: release concurrent with the request."""
    output = partition()

    def release_meanwhile() -> PipelinedSubpartition:
        channel.release()
        return output.subpartitions[0]

    channel = LocalInputChannel(0, release_meanwhile)
    assert channel.request(lambda priority: None)
    output.subpartitions[0].create_read_view(lambda priority: None)


def test_a_partition_that_was_dropped_before_its_end_cancels_the_consumer() -> None:
    output = partition()
    notices: list[bool] = []
    channel = LocalInputChannel(3, lambda: output.subpartitions[0])
    channel.request(notices.append)
    output.subpartitions[0].add(RecordBatch([1]))
    output.release()
    assert len(notices) == 2
    with pytest.raises(
        ProducerFailed, match="channel 3: its partition was released before it was read to the end"
    ):
        channel.poll()


def test_the_number_of_waiting_batches_is_that_of_the_queue() -> None:
    output = partition()
    channel = LocalInputChannel(0, lambda: output.subpartitions[0])
    channel.request(lambda priority: None)
    output.subpartitions[0].add(RecordBatch([1]))
    output.subpartitions[0].add(RecordBatch([2]))
    assert channel.queued_batches == 2


def test_a_consumer_that_fails_at_a_batch_holds_no_memory_of_it() -> None:
    """D2.3: after any error with the batch in hand, its memory is back, and closing returns those
    that still wait.
    """
    pool = NetworkBufferPool().create_buffer_pool(SEGMENT_BYTES, batches_max=4)
    output = ResultPartition("p", 1, pool)
    for number in range(3):
        output.subpartitions[0].add(RecordBatch([number]))
    gate = InputGate([LocalInputChannel(0, lambda: output.subpartitions[0])])
    assert pool.batches == 3

    def process(batch: object) -> None:
        raise ValueError(f"cannot use {batch}")

    with pytest.raises(ValueError, match="cannot use"):
        process(gate.poll())
    assert pool.batches == 2
    gate.close()
    assert pool.batches == 0
