"""Properties of a remote channel only: it asks again for a missing partition, decodes when polled,
and reports unsupported values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from aioflow.core.elements import CheckpointBarrier, EndOfPartition, LatencyMarker, RecordBatch
from aioflow.core.errors import ProducerFailed, RemoteProtocolError, TypeNotSupported
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.batch import decode_batch
from aioflow.core.wire.serializers import DecodeError
from aioflow.network.channels import EXCLUSIVE_BUFFERS, REQUEST_BACKOFF_MS, ProducerState
from aioflow.protocol.consumer import UNTOLD_BATCHES_MAX
from aioflow.protocol.errors import BufferReordering, PartitionNotFound
from aioflow.protocol.framing import FrameType
from aioflow.protocol.outlet import PREFIX
from aioflow.testing import simulate
from aioflow.testing.simulation import SimulatedHost
from tests.network.planes import Planes, Reader, until


def on_sockets(main: Callable[[Planes], Awaitable[None]]) -> None:
    async def run() -> None:
        async with Planes(SystemHost()) as planes:
            await main(planes)

    asyncio.run(run())


def in_virtual_time(main: Callable[[Planes], Awaitable[None]]) -> None:
    async def run(host: SimulatedHost) -> None:
        async with Planes(host) as planes:
            await main(planes)

    assert simulate(run, 1).errors == []


class CannotTravel:
    """No codec knows it."""


def test_a_value_that_cannot_travel_fails_its_consumer_and_names_the_operator() -> None:
    async def main(planes: Planes) -> None:
        partition = planes.partition(subpartitions=2)
        reader, other = (
            Reader(planes.channel(subpartition=0)),
            Reader(planes.channel(subpartition=1)),
        )
        partition.subpartitions[0].add(RecordBatch([1]))
        partition.subpartitions[0].add(RecordBatch([CannotTravel()]))
        partition.subpartitions[0].add(RecordBatch([2]))
        await until(lambda: reader.error is not None)
        assert isinstance(reader.error, TypeNotSupported)
        assert "map-p" in str(reader.error)
        assert "CannotTravel" in str(reader.error)
        partition.subpartitions[1].add(RecordBatch([3]))
        await until(lambda: other.records == [3])
        assert partition.subpartitions[0].is_released
        assert planes.link.resets == 0
        reader.channel.release()
        other.channel.release()

    on_sockets(main)


def test_a_partition_that_comes_late_is_asked_for_again() -> None:
    """C13.1: at once, then doubling."""

    async def main(planes: Planes) -> None:
        reader = Reader(planes.channel("late"))
        await asyncio.sleep(sum(REQUEST_BACKOFF_MS[:4]) / 1000 + 0.01)
        assert reader.told == 0
        planes.partition("late").subpartitions[0].add(RecordBatch([1]))
        await asyncio.sleep(REQUEST_BACKOFF_MS[4] / 1000 + 0.1)
        assert reader.records == [1]
        reader.channel.release()

    in_virtual_time(main)


def test_a_partition_that_never_comes_is_given_up_after_the_last_delay() -> None:
    """C13.1, C13.2."""

    async def main(planes: Planes) -> None:
        start = asyncio.get_running_loop().time()
        reader = Reader(planes.channel("never"))
        await until(lambda: reader.error is not None, 0.01)
        assert isinstance(reader.error, PartitionNotFound)
        assert asyncio.get_running_loop().time() - start == pytest.approx(
            sum(REQUEST_BACKOFF_MS) / 1000, abs=0.3
        )
        reader.channel.release()

    in_virtual_time(main)


def test_a_partition_is_requested_for_as_long_as_its_producer_is_to_be_deployed() -> None:
    """C13.2: the JobMaster is asked each time."""

    async def main(planes: Planes) -> None:
        planes.producer_state = ProducerState.AWAITED
        reader = Reader(planes.channel("late"))
        await asyncio.sleep(3 * sum(REQUEST_BACKOFF_MS) / 1000)
        assert reader.error is None
        assert planes.asked > len(REQUEST_BACKOFF_MS)
        planes.partition("late").subpartitions[0].add(RecordBatch([1]))
        await asyncio.sleep(REQUEST_BACKOFF_MS[-1] / 1000 + 0.1)
        assert reader.records == [1]
        reader.channel.release()

    in_virtual_time(main)


def test_a_channel_whose_producer_is_gone_ends_at_once() -> None:
    async def main(planes: Planes) -> None:
        planes.producer_state = ProducerState.GONE
        reader = Reader(planes.channel("never"))
        await asyncio.sleep(0.02)
        assert isinstance(reader.error, ProducerFailed)
        assert planes.asked == 1
        reader.channel.release()

    in_virtual_time(main)


def test_a_channel_goes_on_for_a_while_if_the_jobmaster_does_not_answer() -> None:
    async def main(planes: Planes) -> None:
        planes.producer_state = ProducerState.UNKNOWN
        reader = Reader(planes.channel("late"))
        await asyncio.sleep(sum(REQUEST_BACKOFF_MS[:4]) / 1000 + 0.01)
        planes.partition("late").subpartitions[0].add(RecordBatch([1]))
        await asyncio.sleep(REQUEST_BACKOFF_MS[4] / 1000 + 0.1)
        assert reader.records == [1]
        reader.channel.release()

    in_virtual_time(main)


def test_a_channel_released_while_it_waits_to_ask_again_asks_no_more() -> None:
    async def main(planes: Planes) -> None:
        reader = Reader(planes.channel("late"))
        await asyncio.sleep(0.2)
        reader.channel.release()
        partition = planes.partition("late")
        partition.subpartitions[0].add(RecordBatch([1]))
        await asyncio.sleep(10)
        assert reader.told == 0
        assert partition.queued_batches == 1
        assert planes.link.consumer.channels == []

    in_virtual_time(main)


def test_a_subpartition_is_read_once_and_a_second_reader_fails_alone() -> None:
    """C13.5."""

    async def main(planes: Planes) -> None:
        partition = planes.partition()
        first = Reader(planes.channel())
        partition.subpartitions[0].add(RecordBatch([1]))
        await until(lambda: first.records == [1])
        second = Reader(planes.channel())
        await until(lambda: second.error is not None)
        assert "has a reader already" in str(second.error)
        partition.subpartitions[0].add(RecordBatch([2]))
        await until(lambda: first.records == [1, 2])
        first.channel.release()
        second.channel.release()

    on_sockets(main)


def test_a_subpartition_that_does_not_exist_fails_its_channel_alone() -> None:
    async def main(planes: Planes) -> None:
        partition = planes.partition()
        good, bad = Reader(planes.channel()), Reader(planes.channel(subpartition=7))
        await until(lambda: bad.error is not None)
        assert isinstance(bad.error, RemoteProtocolError)
        assert "p has no subpartition 7" in str(bad.error)
        partition.subpartitions[0].add(RecordBatch([1]))
        await until(lambda: good.records == [1])
        for reader in (good, bad):
            reader.channel.release()

    on_sockets(main)


async def say(planes: Planes, kind: FrameType, sequence: int, content: bytes) -> None:
    """The producer's side says something that it should not."""
    connection = planes.producer.links[0].connection
    assert connection is not None
    assert connection.encoder is not None
    connection.write([connection.encoder.encode(kind, 0, sequence, PREFIX.pack(0, 0) + content)])


def test_a_gap_in_the_sequence_is_reordering_for_that_channel() -> None:
    """C11.1."""

    async def main(planes: Planes) -> None:
        partition = planes.partition(subpartitions=2)
        reader, other = (
            Reader(planes.channel(subpartition=0)),
            Reader(planes.channel(subpartition=1)),
        )
        partition.subpartitions[0].add(RecordBatch([1]))
        await until(lambda: reader.records == [1])
        await say(planes, FrameType.BUFFER_RESPONSE, 3, b"x")
        await until(lambda: reader.error is not None)
        assert isinstance(reader.error, BufferReordering)
        partition.subpartitions[1].add(RecordBatch([2]))
        await until(lambda: other.records == [2])
        assert planes.link.resets == 0
        for channel in (reader.channel, other.channel):
            channel.release()
        await until(lambda: partition.is_released)
        assert planes.pool.used_bytes == 0

    on_sockets(main)


def test_an_event_of_a_newer_release_fails_its_channel_alone() -> None:
    """C14.3."""

    async def main(planes: Planes) -> None:
        partition = planes.partition(subpartitions=2)
        reader, other = (
            Reader(planes.channel(subpartition=0)),
            Reader(planes.channel(subpartition=1)),
        )
        await planes.settle()
        await say(planes, FrameType.EVENT_RESPONSE, 0, b"\x91\x63")
        await until(lambda: reader.error is not None)
        assert isinstance(reader.error, DecodeError)
        assert "an event of kind 99 is not known here" in str(reader.error)
        partition.subpartitions[1].add(RecordBatch([2]))
        await until(lambda: other.records == [2])
        for channel in (reader.channel, other.channel):
            channel.release()

    on_sockets(main)


def test_a_batch_that_cannot_be_decoded_fails_the_poll_and_holds_no_memory() -> None:
    async def main(planes: Planes) -> None:
        planes.partition()
        reader = Reader(planes.channel())
        await planes.settle()
        await say(planes, FrameType.BUFFER_RESPONSE, 0, b"no batch")
        await until(lambda: reader.error is not None)
        assert isinstance(reader.error, DecodeError)
        assert "channel 0 (subpartition 0 of p)" in str(reader.error)
        reader.channel.release()

    on_sockets(main)


def test_each_of_two_barriers_that_wait_has_overtaken_all_that_waits() -> None:
    """F6: a task that is held up finds several; the first may be of a checkpoint that is given
    up by then.
    """

    async def main(planes: Planes) -> None:
        partition = planes.partition()
        channel = planes.channel()
        reader = Reader(channel)
        reader.paused = True
        partition.subpartitions[0].add(RecordBatch([1]))
        await planes.settle()
        first, second = CheckpointBarrier(1, 0), CheckpointBarrier(2, 0)
        partition.subpartitions[0].overtake(first)
        await planes.settle()
        partition.subpartitions[0].add(RecordBatch([2]))
        await planes.settle()
        partition.subpartitions[0].overtake(second)
        await planes.settle()
        for barrier, overtaken in ((first, [[1]]), (second, [[1], [2]])):
            polled = channel.poll()
            assert polled is not None
            assert polled[0] == barrier
            assert [
                decode_batch(content, planes.codec, "a test").values
                for content in channel.overtaken()
            ] == overtaken
        reader.read()
        assert reader.records == [1, 2]
        channel.release()

    on_sockets(main)


def test_a_consumer_that_does_not_read_gets_its_window_and_no_more() -> None:
    """E1.1, E4: granted data waits here, the rest in memory of the producer, whose pool then is
    used up.
    """

    async def main(planes: Planes) -> None:
        planes.buffers = EXCLUSIVE_BUFFERS
        batches = EXCLUSIVE_BUFFERS + 2
        partition = planes.partition(batches=batches)
        reader = Reader(planes.channel())
        reader.paused = True
        written = 0
        while partition.availability.is_available:
            partition.subpartitions[0].add(RecordBatch([written]))
            written += 1
            await planes.settle()
        assert written <= batches + 1
        assert reader.channel.queued_batches == EXCLUSIVE_BUFFERS
        reader.read(1)
        await until(lambda: partition.availability.is_available)
        await planes.settle()
        assert reader.channel.queued_batches == EXCLUSIVE_BUFFERS
        assert partition.availability.is_available
        reader.paused = False
        reader.read()
        await planes.settle()
        assert reader.records == list(range(written))
        reader.channel.release()

    on_sockets(main)


def test_a_consumer_that_was_stuck_and_goes_on_gets_the_producer_going_again() -> None:
    """E4.2: at once, over the same connection, by reading alone."""

    async def main(planes: Planes) -> None:
        partition = planes.partition(batches=6)
        reader = Reader(planes.channel())
        reader.paused = True

        async def produce() -> None:
            for number in range(500):
                while not partition.availability.is_available:
                    await partition.availability.get_available_future()
                partition.subpartitions[0].add(RecordBatch([number]))

        producing = asyncio.get_running_loop().create_task(produce())
        await until(lambda: not partition.availability.is_available)
        await planes.settle()
        assert not producing.done()
        reader.paused = False
        reader.read()
        await producing
        await until(lambda: reader.records == list(range(500)))
        assert planes.link.resets == 0
        reader.channel.release()

    on_sockets(main)


def test_a_stuck_channel_does_not_hold_up_another_of_the_same_connection() -> None:
    """E4: the reason for credits."""

    async def main(planes: Planes) -> None:
        planes.buffers = EXCLUSIVE_BUFFERS
        count = EXCLUSIVE_BUFFERS + 2
        slow, fast = planes.partition("slow", batches=count), planes.partition("fast", batches=4)
        stuck, reader = Reader(planes.channel("slow")), Reader(planes.channel("fast"))
        stuck.paused = True
        payload = "x" * 30_000
        for number in range(count):
            slow.subpartitions[0].add(RecordBatch([(number, payload)]))
        for number in range(200):
            if not fast.availability.is_available:
                await fast.availability.get_available_future()
            fast.subpartitions[0].add(RecordBatch([(number, payload)]))
        await until(lambda: len(reader.records) == 200)
        assert stuck.channel.queued_batches == EXCLUSIVE_BUFFERS
        assert len(planes.producer.links) == 1
        stuck.paused = False
        stuck.read()
        await until(lambda: len(stuck.records) == count)
        for channel in (stuck.channel, reader.channel):
            channel.release()

    on_sockets(main)


def test_a_batch_larger_than_the_window_arrives_whole() -> None:
    async def main(planes: Planes) -> None:
        partition = planes.partition()
        reader = Reader(planes.channel())
        value = "y" * 3_000_000
        partition.subpartitions[0].add(RecordBatch([value, 1]))
        partition.add_event(0, LatencyMarker(1, "s", 0))
        partition.finish()
        await until(lambda: len(reader.events) == 2)
        assert reader.records == [value, 1]
        assert reader.events == [LatencyMarker(1, "s", 0), EndOfPartition()]
        reader.channel.release()

    on_sockets(main)


def test_batches_that_were_taken_over_are_reported_long_before_half_of_the_window_is() -> None:
    """A producer has room for fewer batches than the window has segments: it must not wait
    until all that it has sent were read.
    """

    async def main(planes: Planes) -> None:
        partition = planes.partition(batches=4)
        reader = Reader(planes.channel())
        reader.paused = True
        written = 0
        while partition.availability.is_available:
            partition.subpartitions[0].add(RecordBatch([written]))
            written += 1
            await planes.settle()
        assert reader.channel.queued_batches == written == 4
        reader.read(UNTOLD_BATCHES_MAX)
        await until(lambda: partition.availability.is_available)
        assert reader.channel.queued_batches == written - UNTOLD_BATCHES_MAX > 0
        reader.paused = False
        reader.read()
        reader.channel.release()

    on_sockets(main)


def test_a_released_partition_reaches_its_consumer_as_a_failure_of_the_producer() -> None:
    async def main(planes: Planes) -> None:
        partition = planes.partition()
        reader = Reader(planes.channel())
        await planes.settle()
        partition.release()
        await until(lambda: reader.error is not None)
        assert isinstance(reader.error, ProducerFailed)
        reader.channel.release()

    on_sockets(main)


def test_an_error_before_the_request_is_answered_surfaces_and_a_release_hides_it() -> None:
    """C11.2, C11.3."""

    async def main(planes: Planes) -> None:
        partition = planes.partition()
        partition.fail(ValueError("early"))
        reader, released = Reader(planes.channel()), planes.channel("q")
        planes.partition("q").fail(ValueError("early"))
        released.request(lambda priority: None)
        released.release()
        await until(lambda: reader.error is not None)
        assert isinstance(reader.error, ProducerFailed)
        await planes.settle()
        assert released.poll() is None
        reader.channel.release()

    on_sockets(main)
