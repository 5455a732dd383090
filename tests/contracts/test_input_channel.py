"""The contract of every input channel, local or remote, that the gate relies on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from aioflow.core.elements import (
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    LatencyMarker,
    RecordBatch,
)
from aioflow.core.errors import ProducerFailed
from aioflow.core.system_host import SystemHost
from aioflow.network.channels import LocalInputChannel, RemoteInputChannel
from aioflow.network.gate import InputChannel
from aioflow.network.local_pool import NetworkBufferPool
from aioflow.network.partition import ResultPartition
from aioflow.protocol.framing import SEGMENT_BYTES
from aioflow.testing.simulation import Simulation
from aioflow.testing.simulation.loop import SimLoop
from tests.network.planes import Planes

BARRIER = CheckpointBarrier(1, 0)


@dataclass
class Wire:
    """One producer, one channel that reads it, and the channel's messages to its gate.

    `settle` makes everything that was written reach the channel; a local channel has nothing to do.
    """

    partition: ResultPartition
    channel: InputChannel
    pool: NetworkBufferPool
    settle: Callable[[], None] = lambda: None
    notices: list[bool] = field(default_factory=list)

    def connect(self) -> None:
        assert self.channel.request(self.notices.append)
        self.settle()

    def write(self, *elements: object, blocking: bool = False) -> None:
        for element in elements:
            if isinstance(element, RecordBatch):
                self.partition.subpartitions[0].add(element)
            else:
                self.partition.add_event(0, element, blocking=blocking)  # type: ignore[arg-type]
        self.settle()

    def read(self) -> list[object]:
        elements: list[object] = []
        while (polled := self.channel.poll()) is not None:
            element = polled[0]
            elements.append(element.values if isinstance(element, RecordBatch) else element)
            self.settle()
        return elements


class InLoop:
    """A remote channel as its task sees it: every call is made inside of the loop."""

    def __init__(
        self, channel: RemoteInputChannel, run: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        self._channel = channel
        self._run = run
        self.index = channel.index

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            found = getattr(self._channel, name)
            return found(*args) if callable(found) else found

        if callable(getattr(RemoteInputChannel, name)):
            return lambda *args: self._run(call(*args))
        return self._run(call())


def local() -> Iterator[Wire]:
    pool = NetworkBufferPool()
    partition = ResultPartition("p", 1, pool.create_buffer_pool(SEGMENT_BYTES, batches_max=8))
    yield Wire(partition, LocalInputChannel(0, lambda: partition.subpartitions[0]), pool)


def remote() -> Iterator[Wire]:
    """Over sockets of this machine."""
    with asyncio.Runner() as runner:
        yield from over(SystemHost(), runner.run)


def simulated() -> Iterator[Wire]:
    """Over a network that delays bytes and cuts them anywhere; every frame carries a MAC there."""
    loop = SimLoop(1, max_steps=1_000_000, max_virtual_s=1e6, perturb=True, keep_trace=False)
    try:
        yield from over(Simulation(loop).root, loop.run_until_complete)
    finally:
        loop.finish()


def over(host: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> Iterator[Wire]:
    async def open_planes() -> tuple[Planes, RemoteInputChannel]:
        planes = await Planes(host).__aenter__()
        return planes, planes.channel()

    planes, channel = run(open_planes())
    partition = ResultPartition(
        "p", 1, planes.pool.create_buffer_pool(SEGMENT_BYTES, batches_max=8)
    )
    planes.registry.partitions["p"] = partition
    yield Wire(partition, InLoop(channel, run), planes.pool, lambda: run(planes.settle()))
    run(planes.__aexit__())


@pytest.fixture(params=[local, remote, simulated], ids=["local", "remote", "simulated"])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    yield from request.param()


@pytest.fixture
def local_wire() -> Iterator[Wire]:
    yield from local()


def test_elements_arrive_in_order_with_increasing_sequence_numbers(wire: Wire) -> None:
    wire.connect()
    wire.write(RecordBatch([1, 2]), LatencyMarker(0, "s", 0), RecordBatch([3]))
    polled = [wire.channel.poll() for _ in range(3)]
    assert [p[3] for p in polled if p] == [0, 1, 2]
    assert [p[2] for p in polled if p] == [True, True, False]
    assert wire.channel.poll() is None


def test_every_data_element_carries_the_backlog_after_it(wire: Wire) -> None:
    """E2.2: events do not count, a blocking one carries 0."""
    wire.connect()
    wire.write(
        RecordBatch([1]), RecordBatch([2]), LatencyMarker(0, "s", 0), LatencyMarker(1, "s", 0)
    )
    wire.write(BARRIER, blocking=True)
    assert [polled[1] for _ in range(5) if (polled := wire.channel.poll())] == [1, 0, 0, 0, 0]


def test_a_local_backlog_counts_what_waits_behind_the_window_and_the_barrier_too(
    local_wire: Wire,
) -> None:
    """E2.2: over a connection only what has arrived is known for sure."""
    wire = local_wire
    wire.connect()
    wire.write(RecordBatch([1]), RecordBatch([2]), LatencyMarker(0, "s", 0), RecordBatch([3]))
    wire.write(BARRIER, blocking=True)
    wire.write(RecordBatch([4]))
    backlogs = [polled[1] for _ in range(5) if (polled := wire.channel.poll())]
    assert backlogs == [3, 2, 2, 1, 0]


def test_turning_from_empty_to_not_empty_is_announced_once(wire: Wire) -> None:
    wire.connect()
    assert wire.notices == []
    wire.write(RecordBatch([1]), RecordBatch([2]))
    assert wire.notices == [False]
    wire.read()
    wire.write(RecordBatch([3]))
    assert wire.notices == [False, False]


def test_data_written_before_the_request_is_announced_on_it(wire: Wire) -> None:
    wire.write(RecordBatch([1]))
    wire.connect()
    assert wire.notices == [False]
    assert wire.read() == [[1]]


def test_request_is_idempotent(wire: Wire) -> None:
    wire.connect()
    wire.connect()
    wire.write(RecordBatch([1]))
    assert wire.notices == [False]


def test_a_blocking_event_holds_back_what_follows_until_resume(wire: Wire) -> None:
    """C12.3: an aligned barrier blocks a local channel as it does a remote one."""
    wire.connect()
    wire.write(BARRIER, blocking=True)
    wire.write(RecordBatch([1]))
    assert wire.read() == [BARRIER]
    told = len(wire.notices)
    wire.write(RecordBatch([2]))
    assert wire.read() == []
    assert len(wire.notices) == told
    wire.channel.resume()
    wire.settle()
    assert len(wire.notices) == told + 1
    assert wire.read() == [[1], [2]]


def test_resume_of_a_channel_that_is_not_blocked_changes_nothing(wire: Wire) -> None:
    wire.connect()
    wire.write(RecordBatch([1]))
    wire.channel.resume()
    assert wire.notices == [False]
    assert wire.read() == [[1]]


def test_the_end_of_the_partition_is_its_last_element(wire: Wire) -> None:
    wire.connect()
    wire.write(RecordBatch([1]), EndOfData())
    wire.partition.finish()
    wire.settle()
    assert wire.read() == [[1], EndOfData(), EndOfPartition()]


def test_a_failed_producer_surfaces_at_the_next_poll_and_at_each_later_one(wire: Wire) -> None:
    """C11.3: ProducerFailed, which cancels the consumer and does not fail it."""
    wire.connect()
    wire.write(RecordBatch([1]))
    wire.partition.fail(ValueError("bad record"))
    wire.settle()
    for _ in range(2):
        with pytest.raises(ProducerFailed, match="bad record"):
            wire.channel.poll()


def test_a_failure_of_the_producer_is_reported_even_to_an_idle_channel(wire: Wire) -> None:
    wire.connect()
    wire.partition.fail(ValueError("bad record"))
    wire.settle()
    assert wire.notices == [False]


def test_release_returns_all_memory_and_leaves_the_producer_alone(wire: Wire) -> None:
    """C11.2: data that arrives after the release is dropped, and the pool is full."""
    wire.connect()
    wire.write(RecordBatch([1]), RecordBatch([2]))
    wire.channel.release()
    wire.channel.release()
    wire.settle()
    wire.write(RecordBatch([3]))
    assert wire.channel.poll() is None
    assert wire.pool.used_bytes == 0


def test_a_released_channel_is_not_resumed(wire: Wire) -> None:
    wire.connect()
    wire.write(BARRIER, blocking=True)
    wire.read()
    wire.channel.release()
    told = len(wire.notices)
    wire.channel.resume()
    wire.settle()
    assert len(wire.notices) == told
    assert wire.channel.poll() is None


def test_a_priority_event_overtakes_in_the_queue_and_is_announced_as_such(local_wire: Wire) -> None:
    """Data in transit over a connection is not overtaken: the sender overtakes only unsent data."""
    wire = local_wire
    wire.connect()
    wire.write(RecordBatch([1]))
    wire.partition.add_event(0, BARRIER, priority=True)
    wire.settle()
    assert wire.notices == [False, True]
    assert wire.channel.has_priority_event
    assert wire.read() == [BARRIER, [1]]
    assert not wire.channel.has_priority_event


def test_acknowledging_end_of_data_reaches_the_producer(wire: Wire) -> None:
    wire.connect()
    assert not wire.partition.all_data_processed.is_available
    wire.channel.acknowledge_all_records_processed()
    wire.settle()
    assert wire.partition.all_data_processed.is_available


def test_batch_size_that_a_channel_requests_reaches_the_producer_within_its_limit(
    wire: Wire,
) -> None:
    """D6.1"""
    wire.connect()
    builder = wire.partition.subpartitions[0].builder
    most = builder.batch_records_max
    wire.channel.announce_batch_size(20)
    wire.settle()
    assert builder.batch_records_max == 20
    wire.channel.announce_batch_size(2 * most)
    wire.settle()
    assert builder.batch_records_max == most
