"""The queue of one consumer: order, backlog, blocking, notification, and permits that always
come back.
"""

from __future__ import annotations

import pytest

from aioflow.core.elements import (
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    LatencyMarker,
    RecordBatch,
    Watermark,
)
from aioflow.core.errors import Closed, ProducerFailed
from aioflow.network.local_pool import LocalBufferPool, NetworkBufferPool
from aioflow.network.subpartition import PipelinedSubpartition
from aioflow.protocol.framing import SEGMENT_BYTES

MARKER = LatencyMarker(0, "source", 0)
BARRIER = CheckpointBarrier(1, 0)


@pytest.fixture
def pool() -> LocalBufferPool:
    return NetworkBufferPool().create_buffer_pool(SEGMENT_BYTES, batches_max=16)


@pytest.fixture
def subpartition(pool: LocalBufferPool) -> PipelinedSubpartition:
    return PipelinedSubpartition(0, pool)


@pytest.fixture
def notices(subpartition: PipelinedSubpartition) -> list[bool]:
    told: list[bool] = []
    subpartition.create_read_view(told.append)
    return told


def batch(*values: int) -> RecordBatch:
    return RecordBatch(list(values))


def contents(subpartition: PipelinedSubpartition) -> list[object]:
    elements: list[object] = []
    while (polled := subpartition.poll()) is not None:
        elements.append(polled[0].values if isinstance(polled[0], RecordBatch) else polled[0])
    return elements


def test_open_batch_does_not_notify_and_the_first_sealed_one_notifies_once(
    subpartition: PipelinedSubpartition, notices: list[bool]
) -> None:
    """C8.1"""
    subpartition.builder.append(1)
    assert notices == []
    subpartition.flush()
    subpartition.builder.append(2)
    subpartition.flush()
    assert len(notices) == 1


def test_the_open_batch_behind_a_sealed_one_is_not_in_the_backlog_but_can_be_flushed(
    subpartition: PipelinedSubpartition,
) -> None:
    """C8.2"""
    sealed = batch(*range(1025))
    subpartition.add(sealed)
    for value in range(1024):
        subpartition.builder.append(value)
    assert subpartition.backlog == 1
    assert subpartition.poll() == (sealed, 0, False, 0)
    subpartition.flush()
    polled = subpartition.poll()
    assert polled is not None
    assert isinstance(polled[0], RecordBatch)
    assert polled[0].values == list(range(1024))


def test_the_backlog_counts_batches_only(subpartition: PipelinedSubpartition) -> None:
    """C8.4"""
    subpartition.add(batch(1))
    subpartition.add_event(MARKER)
    subpartition.add(batch(2))
    assert (subpartition.backlog, len(subpartition)) == (2, 3)
    backlogs = [polled[1] for _ in range(3) if (polled := subpartition.poll())]
    assert backlogs == [1, 1, 0]


def test_after_finish_everything_is_refused_and_no_memory_is_taken(
    subpartition: PipelinedSubpartition, pool: LocalBufferPool
) -> None:
    """C8.6"""
    subpartition.finish()
    subpartition.finish()
    assert not subpartition.add(batch(1))
    assert not subpartition.add_event(MARKER)
    assert not subpartition.add_event(MARKER, priority=True)
    assert not subpartition.builder.append(1)
    subpartition.builder.advance_watermark(9)
    assert not subpartition.flush()
    assert pool.batches == 0
    assert contents(subpartition) == [EndOfPartition()]


def test_a_second_reader_is_refused(
    subpartition: PipelinedSubpartition, notices: list[bool]
) -> None:
    """C8.7"""
    with pytest.raises(Closed, match="subpartition 0 has a reader already"):
        subpartition.create_read_view(lambda priority: None)


def test_release_while_reading_wakes_the_reader_and_returns_the_memory(
    subpartition: PipelinedSubpartition, notices: list[bool], pool: LocalBufferPool
) -> None:
    """C8.7"""
    subpartition.add(batch(1))
    subpartition.add(batch(2))
    subpartition.builder.append(3)
    subpartition.poll()
    assert pool.batches == 1
    subpartition.release()
    subpartition.release()
    assert len(notices) == 2
    assert subpartition.is_released
    assert subpartition.poll() is None
    assert pool.batches == 0
    assert not subpartition.add(batch(4))
    assert len(subpartition.builder) == 0
    assert not subpartition.flush()
    subpartition.finish()
    assert subpartition.poll() is None
    with pytest.raises(Closed, match="subpartition 0 is released"):
        subpartition.create_read_view(lambda priority: None)


def test_finish_flushes_what_is_open_and_ends_the_partition(
    subpartition: PipelinedSubpartition, notices: list[bool]
) -> None:
    """C9.4: the end of the input flushes."""
    subpartition.builder.append(1)
    subpartition.finish()
    assert len(notices) == 1
    assert contents(subpartition) == [[1], EndOfPartition()]


def test_flush_of_nothing_is_silent_and_two_flushes_are_one_notification(
    subpartition: PipelinedSubpartition, notices: list[bool]
) -> None:
    """C9.2"""
    assert not subpartition.flush()
    assert notices == []
    subpartition.builder.append(1)
    assert subpartition.flush()
    assert not subpartition.flush()
    assert len(notices) == 1


def test_records_flushed_behind_a_sealed_batch_grow_until_the_reader_takes_them(
    subpartition: PipelinedSubpartition, notices: list[bool], pool: LocalBufferPool
) -> None:
    subpartition.add(batch(1))
    for value in (2, 3, 4):
        subpartition.builder.append(value)
        assert subpartition.flush()
    assert (len(subpartition), pool.batches) == (1, 1)
    first = subpartition.poll()
    assert first is not None
    assert first[1:3] == (1, True)
    second = subpartition.poll()
    assert second is not None
    assert isinstance(second[0], RecordBatch)
    assert second[0].values == [2, 3, 4]
    assert second[1:3] == (0, False)
    assert len(notices) == 1
    subpartition.builder.append(5)
    assert subpartition.poll() is None
    assert subpartition.flush()
    assert (len(notices), contents(subpartition)) == (2, [[5]])
    assert pool.batches == 0


def test_data_in_transit_to_a_remote_consumer_lets_the_open_batch_grow_too(
    subpartition: PipelinedSubpartition,
) -> None:
    told: list[bool] = []
    subpartition.create_read_view(told.append, acknowledges=True)
    subpartition.add(batch(1))
    subpartition.add(batch(2))
    assert contents(subpartition) == [[1], [2]]
    for value in (3, 4):
        subpartition.builder.append(value)
        subpartition.flush()
    subpartition.taken_over()
    assert contents(subpartition) == []
    assert len(told) == 1
    subpartition.taken_over()
    assert len(told) == 2
    assert contents(subpartition) == [[3, 4]]


def test_full_batch_is_queued_with_any_data_in_transit(pool: LocalBufferPool) -> None:
    subpartition = PipelinedSubpartition(0, pool, batch_records_max=2)
    subpartition.create_read_view(lambda priority: None, acknowledges=True)
    subpartition.add(batch(1))
    assert contents(subpartition) == [[1]]
    subpartition.builder.append(2)
    subpartition.builder.append(3)
    assert subpartition.builder.is_full
    subpartition.seal()
    assert contents(subpartition) == [[2, 3]]


def test_a_batch_that_is_handed_over_whole_comes_behind_what_was_flushed(
    subpartition: PipelinedSubpartition,
) -> None:
    subpartition.add(batch(1))
    subpartition.builder.append(2)
    subpartition.flush()
    subpartition.add(batch(3))
    assert contents(subpartition) == [[1], [2], [3]]


def test_records_flushed_behind_a_blocking_event_come_when_the_reader_resumes(
    subpartition: PipelinedSubpartition, notices: list[bool]
) -> None:
    subpartition.add_event(BARRIER, blocking=True)
    subpartition.builder.append(1)
    subpartition.flush()
    assert contents(subpartition) == [BARRIER]
    assert len(notices) == 1
    subpartition.resume_consumption()
    assert len(notices) == 2
    assert contents(subpartition) == [[1]]


def test_a_watermark_flushed_behind_a_sealed_batch_comes_after_it(
    subpartition: PipelinedSubpartition,
) -> None:
    subpartition.add(batch(1))
    subpartition.builder.advance_watermark(5)
    subpartition.flush()
    assert contents(subpartition) == [[1], Watermark(5)]


def test_a_watermark_without_records_goes_as_an_event_and_takes_no_memory(
    subpartition: PipelinedSubpartition, notices: list[bool], pool: LocalBufferPool
) -> None:
    subpartition.builder.advance_watermark(5)
    assert subpartition.flush()
    assert not subpartition.flush()
    assert (pool.batches, len(notices)) == (0, 1)
    assert contents(subpartition) == [Watermark(5)]


def test_an_event_never_overtakes_records_that_were_written_before_it(
    subpartition: PipelinedSubpartition,
) -> None:
    subpartition.builder.append(1)
    subpartition.add_event(EndOfData())
    subpartition.builder.append(2)
    subpartition.flush()
    assert contents(subpartition) == [[1], EndOfData(), [2]]


def test_a_batch_holds_memory_until_it_is_polled_and_an_event_none(
    subpartition: PipelinedSubpartition, pool: LocalBufferPool
) -> None:
    subpartition.add(batch(*range(1000)))
    subpartition.add_event(MARKER)
    assert (pool.batches, subpartition.queued_batches) == (1, 1)
    subpartition.poll()
    assert (pool.batches, subpartition.queued_batches) == (0, 0)


def test_the_batch_itself_is_handed_on(subpartition: PipelinedSubpartition) -> None:
    """C12.1: by reference, no copy."""
    sealed = batch(1, 2)
    subpartition.add(sealed)
    polled = subpartition.poll()
    assert polled is not None
    assert polled[0] is sealed


def test_sequence_numbers_count_what_was_polled(subpartition: PipelinedSubpartition) -> None:
    subpartition.add(batch(1))
    subpartition.add_event(MARKER)
    subpartition.add_event(BARRIER, priority=True)
    assert [polled[3] for _ in range(3) if (polled := subpartition.poll())] == [0, 1, 2]


def test_a_blocking_event_stops_the_reader_and_hides_the_backlog(
    subpartition: PipelinedSubpartition, notices: list[bool]
) -> None:
    """E2.2"""
    subpartition.add_event(BARRIER, blocking=True)
    subpartition.add(batch(1))
    assert subpartition.poll() == (BARRIER, 0, False, 0)
    assert subpartition.is_blocked
    assert (subpartition.backlog, subpartition.queued_batches) == (0, 1)
    assert subpartition.poll() is None
    subpartition.resume_consumption()
    assert len(notices) == 2
    assert contents(subpartition) == [[1]]


def test_nothing_that_arrives_while_blocked_notifies(
    subpartition: PipelinedSubpartition, notices: list[bool]
) -> None:
    subpartition.add_event(BARRIER, blocking=True)
    subpartition.poll()
    subpartition.add(batch(1))
    subpartition.add_event(MARKER)
    subpartition.add_event(BARRIER, priority=True)
    assert len(notices) == 1
    subpartition.resume_consumption()
    assert notices == [False, True]


def test_resuming_an_empty_or_unblocked_queue_is_silent(
    subpartition: PipelinedSubpartition, notices: list[bool]
) -> None:
    subpartition.resume_consumption()
    subpartition.add_event(BARRIER, blocking=True)
    subpartition.poll()
    subpartition.resume_consumption()
    assert len(notices) == 1
    subpartition.add(batch(1))
    assert len(notices) == 2


def test_priority_events_keep_their_order_before_everything_else(
    subpartition: PipelinedSubpartition,
) -> None:
    first, second = CheckpointBarrier(1, 0), CheckpointBarrier(2, 0)
    subpartition.add(batch(1))
    subpartition.add_event(first, priority=True)
    subpartition.add_event(second, priority=True)
    assert subpartition.has_priority_event
    assert contents(subpartition) == [first, second, [1]]
    assert not subpartition.has_priority_event


def test_a_priority_event_does_not_flush_the_open_batch(
    subpartition: PipelinedSubpartition,
) -> None:
    subpartition.builder.append(1)
    subpartition.add_event(BARRIER, priority=True)
    assert contents(subpartition) == [BARRIER]
    assert len(subpartition.builder) == 1


def test_a_failure_drops_what_is_queued_and_is_raised_at_every_poll(
    subpartition: PipelinedSubpartition, notices: list[bool], pool: LocalBufferPool
) -> None:
    subpartition.add(batch(1))
    cause = ValueError("first")
    subpartition.fail(cause)
    subpartition.fail(ValueError("second"))
    assert pool.batches == 0
    assert len(notices) == 2
    for _ in range(2):
        with pytest.raises(ProducerFailed, match="first") as caught:
            subpartition.poll()
        assert caught.value.__cause__ is cause
    assert not subpartition.add(batch(2))


def test_a_failure_reaches_a_reader_that_was_blocked_and_one_that_comes_later(
    subpartition: PipelinedSubpartition,
) -> None:
    subpartition.add_event(BARRIER, blocking=True)
    subpartition.poll()
    subpartition.add_event(BARRIER, priority=True)
    subpartition.fail(ValueError("bad"))
    assert not subpartition.is_blocked
    assert not subpartition.has_priority_event
    notices: list[bool] = []
    subpartition.create_read_view(notices.append)
    assert notices == [False]
    with pytest.raises(ProducerFailed):
        subpartition.poll()


def test_the_first_batches_are_small_and_grow_when_the_consumer_is_through_with_some() -> None:
    pool = NetworkBufferPool().create_buffer_pool(SEGMENT_BYTES, batches_max=4)
    subpartition = PipelinedSubpartition(0, pool, 1024)
    subpartition.create_read_view(lambda _: None)
    subpartition.start_small()
    assert (subpartition.builder.batch_records_max, subpartition.wanted_records) == (16, 1024)

    def write() -> None:
        subpartition.add(RecordBatch([0] * 16))
        subpartition.grow()

    subpartition.grow()
    assert subpartition.builder.batch_records_max == 16, "nothing was taken"
    write()
    subpartition.poll()
    subpartition.grow()
    assert subpartition.builder.batch_records_max == 16, "it has the first one in hand"
    write()
    subpartition.poll()
    subpartition.grow()
    assert subpartition.builder.batch_records_max == 64
    for _ in range(8):
        write()
    assert subpartition.builder.batch_records_max == 256, "eight were sealed where four may wait"
    subpartition.resize(5)
    for _ in range(20):
        write()
    assert subpartition.builder.batch_records_max == 5, "the consumer has said what it wants"


def test_a_batch_holds_memory_until_a_remote_consumer_has_taken_it(
    subpartition: PipelinedSubpartition, pool: LocalBufferPool
) -> None:
    subpartition.create_read_view(lambda _: None, acknowledges=True)
    sealed = batch(*range(10))
    subpartition.add(sealed)
    subpartition.poll()
    assert pool.batches == 1
    subpartition.encoded(sealed, 70_000)
    assert (pool.in_use, subpartition.queued_bytes) == (70_000, 70_000)
    subpartition.taken_over()
    assert (pool.in_use, pool.batches) == (0, 0)


def test_the_backlog_is_in_buffers_of_the_size_of_the_last_batch(
    subpartition: PipelinedSubpartition,
) -> None:
    subpartition.create_read_view(lambda _: None, acknowledges=True)
    sealed = batch(*range(10))
    for _ in range(3):
        subpartition.add(sealed)
    assert (polled := subpartition.poll()) is not None
    assert polled[1] == 2
    subpartition.encoded(sealed, 3 * SEGMENT_BYTES)
    assert subpartition.backlog == 2 * 4, "each frame has a head"


def test_batches_of_large_records_have_fewer_and_grow_again_when_records_are_small(
    pool: LocalBufferPool,
) -> None:
    subpartition = PipelinedSubpartition(0, pool, batch_records_max=64)
    room = pool.batch_bytes_max
    subpartition.fit(room // 64)
    assert subpartition.builder.batch_records_max == 64
    subpartition.fit(room // 8)
    assert (subpartition.builder.batch_records_max, subpartition.batch_records_max) == (8, 8)
    subpartition.fit(1 + 2 * room)
    assert subpartition.builder.batch_records_max == 1, "one record is never too much"
    subpartition.fit(100)
    assert subpartition.builder.batch_records_max == 64


def test_size_that_the_consumer_requests_holds_beside_the_size_that_fits(
    pool: LocalBufferPool,
) -> None:
    subpartition = PipelinedSubpartition(0, pool, batch_records_max=64)
    subpartition.resize(10)
    subpartition.fit(pool.batch_bytes_max // 2)
    assert subpartition.builder.batch_records_max == 2
    subpartition.resize(50)
    assert subpartition.builder.batch_records_max == 2
    subpartition.fit(100)
    assert subpartition.builder.batch_records_max == 50


def test_the_first_batches_of_large_records_are_no_larger_than_any_first_ones(
    pool: LocalBufferPool,
) -> None:
    subpartition = PipelinedSubpartition(0, pool, batch_records_max=64)
    subpartition.start_small()
    subpartition.fit(pool.batch_bytes_max // 8)
    assert subpartition.builder.batch_records_max == 8
    subpartition.fit(100)
    assert subpartition.builder.batch_records_max == 16, "no request for more yet"


def test_a_batch_that_hides_its_size_until_it_is_encoded_makes_later_ones_smaller(
    pool: LocalBufferPool,
) -> None:
    subpartition = PipelinedSubpartition(0, pool, batch_records_max=64)
    subpartition.create_read_view(lambda _: None, acknowledges=True)
    sealed = batch(*range(64))
    subpartition.add(sealed)
    subpartition.poll()
    subpartition.encoded(sealed, 8 * pool.batch_bytes_max)
    assert subpartition.builder.batch_records_max == 8
