"""Several gates behind one task: fairness, selection, watermarks of all channels, and the ends
of inputs.
"""

from __future__ import annotations

from typing import Any

import pytest

from aioflow.core.elements import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    CheckpointBarrier,
    EndOfData,
    Event,
    LatencyMarker,
    RecordBatch,
    Watermark,
    WatermarkStatus,
    empty_batch,
)
from aioflow.core.errors import ProducerFailed
from aioflow.network.channels import LocalInputChannel
from aioflow.network.local_pool import NetworkBufferPool
from aioflow.network.partition import ResultPartition
from aioflow.operators.valve import ChannelTime
from aioflow.protocol.framing import SEGMENT_BYTES
from aioflow.task.channel_state import RestoredChannelState
from aioflow.task.input import InputStatus
from aioflow.task.network_input import InputEdge, NetworkInput


class Barriers:
    """A `BarrierListener` that keeps which channels were overtaken."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, ...]] = []

    def due(self, take: Any) -> None:
        self.taken.append(take.overtaken)


class World:
    """A NetworkInput over `edges`: for each, its logical input and how many channels it has."""

    def __init__(self, *edges: tuple[int, int]) -> None:
        pool = NetworkBufferPool()
        self.got: list[tuple[int, Any]] = []
        self.partitions: list[list[ResultPartition]] = []
        wired = []
        for index, count in edges:
            partitions = [
                ResultPartition(
                    "p", 1, pool.create_buffer_pool(SEGMENT_BYTES, batches_max=64), 1024
                )
                for _ in range(count)
            ]
            self.partitions.append(partitions)
            channels = [
                LocalInputChannel(i, lambda p=p: p.subpartitions[0])
                for i, p in enumerate(partitions)
            ]  # type: ignore[misc]
            wired.append(InputEdge(channels, index, may_be_overtaken=True))
        self.input = NetworkInput(wired, self)

    def send(self, edge: int, *elements: Any, channel: int = 0) -> None:
        partition = self.partitions[edge][channel]
        for element in elements:
            if isinstance(element, RecordBatch):
                if element.values:
                    partition.subpartitions[0].add(element)
                else:
                    partition.subpartitions[0].builder.advance_watermark(element.watermark)
                    partition.flush()
            elif isinstance(element, list):
                partition.subpartitions[0].add(RecordBatch(element))
            else:
                partition.add_event(0, element)

    def poll_all(self) -> InputStatus:
        while (status := self.input.emit_next(1024)) is InputStatus.MORE_AVAILABLE:
            pass
        return status

    def values(self) -> list[tuple[int, Any]]:
        return [
            (index, got.values)
            for index, got in self.got
            if isinstance(got, RecordBatch) and got.values
        ]

    def watermarks(self) -> list[int]:
        return [
            got.watermark
            for _, got in self.got
            if isinstance(got, RecordBatch) and got.watermark != MIN_WATERMARK
        ]

    def on_batch(self, batch: RecordBatch, input_index: int) -> None:
        self.got.append((input_index, batch))

    def on_status(self, idle: bool) -> None:
        self.got.append((-1, idle))

    def on_end_of_input(self, input_index: int) -> None:
        self.got.append((input_index, "end"))

    def on_marker(self, marker: LatencyMarker) -> None:
        self.got.append((-1, marker))


def test_two_inputs_that_always_have_something_alternate() -> None:
    """C3.1."""
    world = World((0, 1), (1, 1))
    for i in range(5):
        world.send(0, [i])
        world.send(1, [i])
    world.poll_all()
    assert [index for index, _ in world.values()] == [0, 1] * 5


@pytest.mark.parametrize(
    "last",
    [EndOfData(), WatermarkStatus(idle=True), Watermark(MAX_WATERMARK)],
    ids=["end", "idle", "end of time"],
)
def test_an_input_is_read_once_each_of_its_channels_has_ended_or_is_idle(last: Event) -> None:
    """C3.2"""
    world = World((0, 1), (1, 2))
    told: list[int] = []
    world.input.read_first(1, lambda: told.append(1))
    world.input.align(world, int, lambda action, description: None)  # type: ignore[arg-type]
    world.send(1, [1], last, channel=0)
    world.send(0, WatermarkStatus(idle=True))
    world.poll_all()
    assert told == []
    world.send(1, [2], last, channel=1)
    world.poll_all()
    assert told == [1]
    world.send(1, WatermarkStatus(idle=False), WatermarkStatus(idle=True), channel=1)
    world.poll_all()
    assert told == [1]


def test_no_barrier_overtakes_records_of_the_inputs_that_are_read_later() -> None:
    """C3.3: a checkpoint has none of them as long as the first input is not read."""
    barriers = Barriers()
    world = World((0, 1), (1, 1))
    world.input.read_first(1, lambda: None)
    world.input.align(barriers, int, lambda action, description: None)  # type: ignore[arg-type]
    world.send(1, CheckpointBarrier(1, 0, unaligned=True))
    world.poll_all()
    assert barriers.taken == []
    world.send(0, CheckpointBarrier(1, 0, unaligned=True))
    world.poll_all()
    assert barriers.taken == [()]


def test_an_input_that_ends_is_reported_once_while_the_other_goes_on() -> None:
    """C3.4."""
    world = World((0, 2), (1, 1))
    world.send(0, EndOfData(), channel=0)
    assert world.poll_all() is InputStatus.NOTHING_AVAILABLE
    assert (0, "end") not in world.got, "one of its channels goes on"
    world.send(0, EndOfData(), channel=1)
    world.poll_all()
    world.send(1, [5])
    world.poll_all()
    assert [entry for entry in world.got if entry[1] == "end"] == [(0, "end")]
    assert world.values() == [(1, [5])]


def test_a_union_ends_when_all_its_edges_have() -> None:
    world = World((0, 1), (0, 1))
    world.send(0, EndOfData())
    assert world.poll_all() is InputStatus.NOTHING_AVAILABLE
    world.send(1, [1], EndOfData())
    assert world.poll_all() is InputStatus.END_OF_DATA


@pytest.mark.parametrize(
    ("drains", "status"),
    [((True, True), InputStatus.END_OF_DATA), ((True, False), InputStatus.STOPPED)],
)
def test_the_end_is_a_drain_only_if_every_input_drained(
    drains: tuple[bool, bool], status: InputStatus
) -> None:
    world = World((0, 1), (1, 1))
    for edge, drain in enumerate(drains):
        world.send(edge, EndOfData(drain))
    assert world.poll_all() is status


def test_a_stopped_input_is_not_reported_as_ended() -> None:
    world = World((0, 1), (1, 1))
    world.send(0, EndOfData(False))
    world.poll_all()
    assert world.got == []


def test_the_watermark_is_the_least_of_all_channels() -> None:
    """C5.2: two inputs, 10 and 7, give 7."""
    world = World((0, 1), (1, 2))
    world.send(0, empty_batch(10))
    world.send(1, empty_batch(7), channel=0)
    world.poll_all()
    assert world.watermarks() == []
    world.send(1, empty_batch(20), channel=1)
    world.poll_all()
    assert world.watermarks() == [7]
    assert world.input.current_watermark == 7


def test_a_watermark_keeps_its_place_between_records() -> None:
    """C5.1."""
    world = World((0, 1))
    world.send(0, RecordBatch([1]), empty_batch(5), RecordBatch([2]))
    world.poll_all()
    assert [(got.values, got.watermark) for _, got in world.got] == [
        ([1], MIN_WATERMARK),
        ([], 5),
        ([2], MIN_WATERMARK),
    ]


def test_a_finished_channel_holds_no_watermark_back() -> None:
    world = World((0, 2))
    world.send(0, empty_batch(10), channel=0)
    world.send(0, empty_batch(MAX_WATERMARK), EndOfData(), channel=1)
    world.partitions[0][1].finish()
    world.poll_all()
    assert world.watermarks() == [10]


def test_a_channel_that_was_stopped_holds_the_watermark_where_it_is() -> None:
    """B4.4: without drain no window fires because one producer stopped before another."""
    world = World((0, 2))
    world.send(0, empty_batch(10), EndOfData(drain=False), channel=0)
    world.partitions[0][0].finish()
    world.send(0, empty_batch(5), channel=1)
    world.poll_all()
    world.send(0, empty_batch(500), EndOfData(drain=False), channel=1)
    world.partitions[0][1].finish()
    world.poll_all()
    assert world.watermarks() == [5, 10]


def test_an_idle_channel_holds_no_watermark_back_and_all_idle_is_announced() -> None:
    """G3."""
    world = World((0, 2))
    world.send(0, empty_batch(10), channel=0)
    world.send(0, WatermarkStatus(True), channel=1)
    world.poll_all()
    assert world.watermarks() == [10]
    world.send(0, WatermarkStatus(True), channel=0)
    world.poll_all()
    assert world.got[-1] == (-1, True)
    world.send(0, WatermarkStatus(False), channel=1)
    world.poll_all()
    assert (-1, False) in world.got


def test_a_latency_marker_keeps_its_place_among_records() -> None:
    """C5.3."""
    world, marker = World((0, 1)), LatencyMarker(1, "s", 0)
    world.send(0, [1], marker, [2])
    world.poll_all()
    assert [got.values if isinstance(got, RecordBatch) else got for _, got in world.got] == [
        [1],
        marker,
        [2],
    ]


def test_a_failed_producer_comes_out_of_the_poll() -> None:
    """B1.6."""
    world = World((0, 1))
    world.partitions[0][0].fail(ValueError("up there"))
    with pytest.raises(ProducerFailed, match="up there"):
        world.input.emit_next(10)


def test_close_gives_everything_back() -> None:
    world = World((0, 2), (1, 1))
    world.send(0, [1], [2])
    world.input.close()
    assert all(partition.is_released for partitions in world.partitions for partition in partitions)


def test_records_and_waiting_batches_are_counted() -> None:
    world = World((0, 1), (1, 1))
    world.send(0, [1, 2], [3])
    world.send(1, [4])
    assert world.input.queued_batches == 3
    world.poll_all()
    assert (world.input.queued_batches, world.input.records_in) == (0, 4)


def test_an_input_continues_at_the_event_time_behind_what_was_in_flight() -> None:
    """New channels hold it there until each has told more; one that is known continues where it
    stood.
    """
    world = World((0, 2))
    world.input.restore(RestoredChannelState([], 100))
    world.send(0, empty_batch(150), channel=0)
    assert world.poll_all() is InputStatus.NOTHING_AVAILABLE
    assert (world.input.current_watermark, world.watermarks()) == (100, [])
    world.send(0, empty_batch(120), channel=1)
    world.poll_all()
    assert world.watermarks() == [120]
    known = World((0, 2))
    known.input.restore(
        RestoredChannelState([], 100, {(-1, 0): ChannelTime(100), (-1, 1): ChannelTime(170)}, 2)
    )
    known.send(0, empty_batch(150), channel=0)
    known.poll_all()
    assert known.watermarks() == [150]
