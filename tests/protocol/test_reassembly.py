"""Batches that span frames: put together for each channel by itself, whole or not at all, and
with no permit left behind.
"""

from __future__ import annotations

import pytest

from aioflow.core.elements import EndOfPartition, RecordBatch
from aioflow.core.errors import RemoteProtocolError
from aioflow.core.wire.batch import encode_event
from aioflow.core.wire.serializers import DecodeError
from aioflow.protocol.framing import Frame, FrameType
from aioflow.protocol.outlet import FLAG_CONTINUES, PAYLOAD_BYTES_MAX, PREFIX
from tests.protocol.link import Link


def record_of(frames: float, fill: int) -> bytes:
    return bytes([fill]) * int(PAYLOAD_BYTES_MAX * frames)


def test_a_record_of_three_and_a_half_frames_is_one_record_and_all_its_permits_come_back() -> None:
    """C4.1: four frames, four credits, one element."""
    link = Link()
    subpartition = link.open(0, exclusive=10)
    subpartition.add(RecordBatch([record_of(3.5, 7)]))
    link.exchange()
    assert len(link.queues[0]) == 1
    assert link.upstream.producer.kept_frames(0) == 4
    assert link.take(0) == [record_of(3.5, 7)]
    for number in range(
        8
    ):  # Credit is returned when half of the window is owed: then the frames are let go.
        subpartition.add(RecordBatch([number]))
    link.run()
    assert link.pool.batches == 0
    assert link.errors[0] == []


def test_channels_whose_frames_interleave_are_put_together_apart() -> None:
    """C4.4: a record of channel 1 arrives in the middle of one of channel 0, and the reverse."""
    link = Link()
    first, second = link.open(0, exclusive=10), link.open(1, exclusive=10)
    first.add(RecordBatch([record_of(3.5, 1)]))
    second.add(RecordBatch([record_of(2.5, 2)]))
    link.flush_downstream()
    link.deliver_up()
    order = []
    while link.upstream.has_output:
        link.flush_upstream(1)  # A frame or so at a time: the channels take turns.
        before = len(link.queues[0]), len(link.queues[1])
        link.deliver_down()
        order.append((len(link.queues[0]) - before[0], len(link.queues[1]) - before[1]))
    assert order.index((0, 1)) < order.index((1, 0)), (
        "the shorter one was complete while the longer one was under way"
    )
    assert link.take(0) == [record_of(3.5, 1)]
    assert link.take(1) == [record_of(2.5, 2)]


def test_the_end_of_the_partition_in_the_middle_of_a_batch_is_an_error() -> None:
    """C4.5: trailing data is never taken for a whole batch, nor dropped in silence."""
    link = Link()
    link.open(0, exclusive=4)
    link.open(1)
    link.exchange()
    half = Frame(
        FrameType.BUFFER_RESPONSE, 0, 0, PREFIX.pack(FLAG_CONTINUES, 0) + b"half of a batch"
    )
    assert link.downstream.receive(half) == []
    end = Frame(FrameType.EVENT_RESPONSE, 0, 1, PREFIX.pack(0, 0) + encode_event(EndOfPartition()))
    ((channel, error),) = link.downstream.receive(end)
    assert channel == 0
    assert isinstance(error, RemoteProtocolError)
    assert "middle of a batch" in str(error)
    assert link.downstream.consumer.channels == [1]


@pytest.mark.parametrize("frames", [0.5, 1, 2, 3.5])
def test_a_record_of_any_length_arrives_whole_over_a_wire_that_is_cut_anywhere(
    frames: float,
) -> None:
    link = Link()
    link.open(0, exclusive=10).add(RecordBatch([record_of(frames, 3), "next"]))
    link.flush_downstream()
    link.deliver_up()
    link.flush_upstream()
    while link.down_wire:
        link.deliver_down(min(9_973, len(link.down_wire)))
    assert link.take(0) == [record_of(frames, 3), "next"]


def test_a_batch_that_cannot_be_decoded_gives_its_permit_back() -> None:
    """D2.3: the error names the channel; the producer's pool is whole again once the connection
    has said what was taken over.
    """
    link = Link()
    subpartition = link.open(0, exclusive=2)
    link.exchange()
    subpartition.add(RecordBatch([1]))
    link.exchange()
    content = link.queues[0][0]
    assert isinstance(content, bytes)
    link.queues[0][0] = content[:-1] + b"\xc1"
    with pytest.raises(DecodeError, match="test"):
        link.take(0)
    link.downstream.consumer.taken_over(0)
    link.downstream.consumer.cancel(0)
    link.exchange()
    assert link.pool.batches == 0
