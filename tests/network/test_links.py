"""Links outlive their connections: resets, cuts, silence and changed bytes cost no record, and
what is not used is forgotten.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aioflow.core.elements import EndOfPartition, RecordBatch
from aioflow.core.errors import Broken, LocalProtocolError, ProducerFailed
from aioflow.core.host import Host
from aioflow.core.system_host import SystemHost
from aioflow.network.data_plane import FORGET_S, GIVE_UP_S, UNUSED_S, DataPlane
from aioflow.network.link import HEARTBEAT_S, HEARTBEATS_MISSED_MAX, Link
from aioflow.network.partition import ResultPartition
from aioflow.network.security import SecuredHost, Security
from aioflow.protocol.consumer import ConsumerExchange
from aioflow.protocol.framing import FrameType
from aioflow.testing import simulate
from aioflow.testing.fault_proxy import FaultProxy
from aioflow.testing.simulation import SimulatedHost
from tests.network.planes import ADDRESS, SECRET, Planes, Reader, Registry, until

PORT = 7000


def on_sockets(main: Callable[[Planes, FaultProxy], Awaitable[None]]) -> None:
    """The consumer dials through a proxy that does what the test wants."""

    async def run() -> None:
        host = SystemHost()
        async with Planes(host) as planes, FaultProxy(host, ADDRESS, planes.own_port) as proxy:
            planes.port = proxy.port
            await main(planes, proxy)
            await planes.consumer.close()

    asyncio.run(run())


class TwoMachines:
    """`planes.producer` lives in a process `far` on a machine of its own."""

    def __init__(self, host: SimulatedHost) -> None:
        self.sim = host.sim
        self.planes = Planes(host, address="far")
        self.planes.port = PORT
        self.loop = asyncio.get_running_loop()

    async def _far(self, host: Host) -> None:
        allowed = SecuredHost(host, Security(allow_plaintext=True))
        self.planes.producer = DataPlane(allowed, SECRET, self.planes.codec, self.planes.registry)
        await self.planes.producer.listen("0.0.0.0", PORT)
        await self.loop.create_future()

    async def __aenter__(self) -> TwoMachines:
        self.sim.spawn("far", self._far)
        await asyncio.sleep(0.1)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.planes.consumer.close()


def on_two_machines(
    main: Callable[[TwoMachines], Awaitable[None]], seed: int = 1, **options: Any
) -> None:
    async def run(host: SimulatedHost) -> None:
        async with TwoMachines(host) as machines:
            await main(machines)

    simulate(run, seed, max_steps=5_000_000, **options)


async def feed(partition: ResultPartition, count: int, size: int = 10, index: int = 0) -> None:
    """`count` batches of `size` numbers that go on counting, then the end.

    As a task: only while the pool has room.
    """
    for first in range(0, count * size, size):
        if not partition.availability.is_available:
            await partition.availability.get_available_future()
        partition.subpartitions[index].add(RecordBatch(list(range(first, first + size))))
        await asyncio.sleep(0)
    partition.subpartitions[index].finish()


@pytest.mark.parametrize("batch_bytes", [100, 100_000], ids=["one-frame", "four-frames"])
def test_a_hundred_resets_under_load_cost_no_record_and_none_comes_twice(batch_bytes: int) -> None:
    """R10: on real sockets, like the resets of a firewall that lost its state."""

    async def main(planes: Planes, proxy: FaultProxy) -> None:
        partition = planes.partition()
        channel = planes.channel()
        reader = Reader(channel)
        payload = "x" * batch_bytes
        number, resets = 0, 0
        while resets < 100:
            for _ in range(4):
                if partition.availability.is_available:
                    partition.subpartitions[0].add(RecordBatch([(number, payload)]))
                    number += 1
                await asyncio.sleep(0)
            last = len(reader.records)
            if (
                planes.link.connection is not None and last > 3 * resets and last < number
            ):  # With something on its way.
                proxy.reset()
                resets += 1
                await until(lambda: planes.link.resets == resets)  # noqa: B023
                await until(lambda: len(reader.records) > last)  # noqa: B023  # Load in between.
        partition.finish()
        await until(lambda: bool(reader.events))
        assert reader.events == [EndOfPartition()]
        numbers = [record[0] for record in reader.records]  # type: ignore[index]
        assert numbers == list(range(number))
        assert planes.link.resets == 100
        await until(lambda: partition.is_released)  # The last acknowledgement is on its way.
        assert partition.pool.in_use == 0
        channel.release()

    on_sockets(main)


@pytest.mark.slow
def test_a_thousand_real_resets_under_load_cost_no_record() -> None:
    """The issue's figure; the shorter one above is always run."""

    async def main(planes: Planes, proxy: FaultProxy) -> None:
        partition = planes.partition()
        reader = Reader(planes.channel())
        feeding = asyncio.ensure_future(feed(partition, 100_000))
        for resets in range(1, 1001):
            seen = len(reader.records)
            await until(lambda: len(reader.records) > seen + 50)  # noqa: B023
            proxy.reset()
            await until(lambda: planes.link.resets == resets)  # noqa: B023
        proxy.heal()
        await until(lambda: bool(reader.events))
        await feeding
        assert reader.records == list(range(1_000_000))
        reader.channel.release()

    on_sockets(main)


def test_a_thousand_resets_in_virtual_time_cost_no_record_on_any_channel() -> None:
    """Three channels at once, resets at any moment: in handshakes, in the middle of frames,
    before the first answer.
    """

    async def main(machines: TwoMachines) -> None:
        planes = machines.planes
        partition = planes.partition(subpartitions=3, batches=12)
        readers = [Reader(planes.channel(subpartition=i, index=i)) for i in range(3)]
        link = planes.link
        feeding = [
            asyncio.ensure_future(feed(partition, 12_000, size=2, index=i)) for i in range(3)
        ]
        rng = machines.loop.stream("resets")  # type: ignore[attr-defined]
        while link.resets < 1000:
            machines.sim.network.reset("main", "far")
            await asyncio.sleep(rng.uniform(0.0, 0.02))
        assert not all(reader.events for reader in readers), "the resets must strike under load"
        for task in feeding:
            await task
        await until(lambda: all(reader.events for reader in readers), 0.1)
        for reader in readers:
            assert reader.error is None
            assert reader.records == list(range(24_000))
            reader.channel.release()

    on_two_machines(main)


def test_a_connection_that_is_aborted_by_its_own_side_in_the_middle_of_load_goes_on() -> None:
    async def main(planes: Planes, proxy: FaultProxy) -> None:
        partition = planes.partition()
        reader = Reader(planes.channel())
        feeding = asyncio.ensure_future(feed(partition, 400))
        for number in range(40):
            await until(
                lambda: (
                    len(reader.records) > number * 50  # noqa: B023
                    and planes.link.connection is not None
                )
            )
            victim = planes.link if number % 2 else planes.producer.links[0]
            if victim.connection is not None:
                victim.connection.abort()
        await until(lambda: bool(reader.events))
        await feeding
        assert reader.records == list(range(4000))
        reader.channel.release()

    on_sockets(main)


def test_a_connection_cut_in_the_middle_of_a_frame_goes_on() -> None:
    """E5.4: at each of the first bytes, frame boundaries or not."""

    async def main(planes: Planes, proxy: FaultProxy) -> None:
        partition = planes.partition(batches=64)
        reader = Reader(planes.channel())
        count = 0
        for number in range(60):
            made = proxy.connections_made
            proxy.cut_after(number * 7)
            while proxy.connections_made == made:  # Until the cut has struck.
                if partition.availability.is_available:
                    partition.subpartitions[0].add(RecordBatch([count]))
                    count += 1
                await asyncio.sleep(0)
        await until(lambda: len(reader.records) == count)
        assert reader.records == list(range(count))
        assert planes.link.resets > 5
        reader.channel.release()

    on_sockets(main)


def test_changed_bytes_end_the_connection_and_the_channel_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In virtual time: a changed length makes a decoder wait for bytes that never come, until
    heartbeats are missed.
    """

    async def run(host: SimulatedHost) -> None:
        async with Planes(host) as planes, FaultProxy(host, ADDRESS, planes.own_port) as proxy:
            planes.port = proxy.port
            partition = planes.partition(batches=64)
            reader = Reader(planes.channel())
            await until(lambda: planes.link.connection is not None, 0.01)
            for number in range(100):
                proxy.corrupt_next()
                partition.subpartitions[0].add(RecordBatch([number]))
                await until(lambda: len(reader.records) == number + 1, 0.01)  # noqa: B023
                await asyncio.sleep(0.5)
            assert reader.records == list(range(100))
            assert reader.error is None
            assert planes.link.resets > 20
            reader.channel.release()
            await planes.consumer.close()

    with caplog.at_level(logging.WARNING):
        simulate(run, 1)
    assert any("is closed: " in record.message for record in caplog.records)


def test_a_link_that_only_moves_errors_fails_instead_of_going_on_for_ever() -> None:
    """A frame that this side can never take is the same after each reset."""

    async def main(planes: Planes, proxy: FaultProxy) -> None:
        partition = planes.partition()
        reader = Reader(planes.channel())
        partition.subpartitions[0].add(RecordBatch([1]))
        await until(lambda: reader.records == [1])
        far = planes.producer.links[0]
        carry_on = far.carry_on

        def poisoned(connection: Any) -> None:
            carry_on(connection)
            connection.write([connection.encoder.encode(FrameType.SEGMENT_ID, body=b"poison")])

        far.carry_on = poisoned  # type: ignore[method-assign]
        planes.link.connection.abort()  # type: ignore[union-attr]
        await until(lambda: reader.error is not None)
        assert isinstance(reader.error, Broken)
        assert "5 connections" in str(reader.error)
        assert "in a row ended in a protocol error" in str(reader.error)
        reader.channel.release()

    on_sockets(main)


def test_silence_is_noticed_by_heartbeats_and_the_channel_goes_on_elsewhere() -> None:
    """E5.5: half-open; no FIN, no reset, nothing in either direction."""

    async def main(machines: TwoMachines) -> None:
        planes = machines.planes
        partition = planes.partition()
        reader = Reader(planes.channel())
        partition.subpartitions[0].add(RecordBatch([1]))
        await until(lambda: reader.records == [1], 0.01)
        first = planes.link.connection
        start = machines.loop.time()
        machines.sim.network.cut("main", "far")
        await until(lambda: planes.link.connection is not first, 0.1)
        assert machines.loop.time() - start <= HEARTBEAT_S * (HEARTBEATS_MISSED_MAX + 1)
        partition.subpartitions[0].add(RecordBatch([2]))
        machines.sim.network.heal("main", "far")
        await until(lambda: len(reader.records) == 2, 0.1)
        reader.channel.release()

    on_two_machines(main)


def test_an_idle_channel_notices_that_the_power_of_its_producer_is_gone() -> None:
    """E5.5: nothing is sent that could be missed; the time is that of the heartbeats, and then
    of giving up.
    """

    async def main(machines: TwoMachines) -> None:
        planes = machines.planes
        planes.partition()
        reader = Reader(planes.channel())
        await until(lambda: len(planes.producer.links) == 1, 0.01)
        await asyncio.sleep(20)
        assert reader.error is None
        assert planes.link.resets == 0
        start = machines.loop.time()
        machines.sim.power("far")
        await until(lambda: reader.error is not None, 0.1)
        assert isinstance(reader.error, Broken)
        assert f"cannot be reached for {GIVE_UP_S:g} s" in str(reader.error)
        assert (
            machines.loop.time() - start
            <= HEARTBEAT_S * (HEARTBEATS_MISSED_MAX + 1) + GIVE_UP_S + 6
        )
        late = Reader(planes.channel())
        assert late.channel.request(lambda priority: None)
        for channel in (reader.channel, late.channel):
            channel.release()

    on_two_machines(main)


def test_a_channel_that_comes_to_a_link_after_it_has_failed_fails_too() -> None:
    async def main(machines: TwoMachines) -> None:
        planes = machines.planes
        channel, first = planes.channel(), Reader(planes.channel())
        machines.sim.kill("far")
        await until(lambda: first.error is not None, 0.1)
        second = Reader(channel)
        await asyncio.sleep(0)
        assert second.error is first.error
        channel.release()
        first.channel.release()

    on_two_machines(main)


def test_a_producer_gives_up_a_consumer_that_does_not_come_back() -> None:
    """Its partition is released: the reader cannot be reached, and the job hears of it
    elsewhere.
    """

    async def main(machines: TwoMachines) -> None:
        planes = machines.planes
        partition = planes.partition()
        reader = Reader(planes.channel())
        reader.paused = True
        partition.subpartitions[0].add(RecordBatch([1]))
        await until(lambda: len(planes.producer.links) == 1, 0.01)
        await asyncio.sleep(1)
        machines.sim.network.cut("main", "far")
        await asyncio.sleep(HEARTBEAT_S * (HEARTBEATS_MISSED_MAX + 1) + FORGET_S + 1)
        assert planes.producer.links == []
        assert partition.is_released
        assert partition.pool.in_use == 0
        machines.sim.network.heal("main", "far")
        reader.read()
        assert isinstance(reader.error, Broken)
        reader.channel.release()

    on_two_machines(main)


def cut(machines: TwoMachines, direction: str) -> None:
    network = machines.sim.network
    if direction == "to the consumer":
        network.cut("far", "main", one_way=True)
    elif direction == "to the producer":
        network.cut("main", "far", one_way=True)
    else:
        network.cut("main", "far")


@pytest.mark.parametrize("direction", ["both ways", "to the consumer", "to the producer"])
def test_after_outages_around_the_limit_all_is_read_or_the_consumer_has_given_up(
    direction: str,
) -> None:
    """Only the consumer decides: the producer never forgets a consumer that goes on, and no
    consumer gets a false report of a failure.
    """
    ends = set()
    for seed in range(16):

        async def main(machines: TwoMachines) -> None:
            planes = machines.planes
            partition = planes.partition()
            reader = Reader(planes.channel())
            feeding = asyncio.ensure_future(feed(partition, 3000))
            rng = machines.loop.stream("outages")  # type: ignore[attr-defined]
            for _ in range(rng.choice((1, 1, 3))):
                await asyncio.sleep(rng.uniform(0.0, 0.1))
                cut(machines, direction)
                await asyncio.sleep(rng.uniform(GIVE_UP_S - 1, GIVE_UP_S + 16))
                machines.sim.network.heal("main", "far")
            await until(lambda: bool(reader.events) or reader.error is not None, 0.1)
            if reader.error is None:
                assert reader.records == list(range(30_000))
            else:
                assert type(reader.error) is Broken
                assert f"cannot be reached for {GIVE_UP_S:g} s" in str(reader.error)
                assert reader.records == list(range(len(reader.records)))
            ends.add(reader.error is None)
            feeding.cancel()
            reader.channel.release()

        on_two_machines(main, seed)
    assert ends == {True, False}, "the outages must be around the limit"


def test_a_consumer_that_comes_back_after_its_producer_has_forgotten_it_fails() -> None:
    """The process or the clock of the consumer stood still."""

    async def main(machines: TwoMachines) -> None:
        planes = machines.planes
        partition = planes.partition()
        reader = Reader(planes.channel())
        partition.subpartitions[0].add(RecordBatch([1]))
        await until(lambda: reader.records == [1], 0.01)
        (far,) = planes.producer.links
        planes.producer._give_up(far)
        await until(lambda: reader.error is not None, 0.01)
        assert type(reader.error) is Broken
        assert "cannot go on at element 1: its producer has given up this consumer" in str(
            reader.error
        )
        reader.channel.release()

    on_two_machines(main)


def test_an_outage_shorter_than_giving_up_costs_nothing() -> None:
    """R7."""

    async def main(machines: TwoMachines) -> None:
        planes = machines.planes
        partition = planes.partition()
        reader = Reader(planes.channel())
        feeding = asyncio.ensure_future(feed(partition, 3000))
        for _ in range(5):
            await asyncio.sleep(0.05)
            machines.sim.network.cut("main", "far")
            await asyncio.sleep(GIVE_UP_S - 5)
            machines.sim.network.heal("main", "far")
            seen = len(reader.records)
            await until(lambda: len(reader.records) > seen, 0.01)  # noqa: B023
        await feeding
        await until(lambda: bool(reader.events), 0.1)
        assert reader.records == list(range(30_000))
        reader.channel.release()

    on_two_machines(main)


def test_a_process_that_stands_still_longer_than_the_heartbeats_goes_on() -> None:
    """R7: as after SIGSTOP, swap, or a call that blocks the loop."""

    async def main(machines: TwoMachines) -> None:
        planes = machines.planes
        partition = planes.partition()
        reader = Reader(planes.channel())
        await until(lambda: len(planes.producer.links) == 1, 0.01)
        machines.sim.pause("far")
        await asyncio.sleep(HEARTBEAT_S * (HEARTBEATS_MISSED_MAX + 1) + 5)
        assert planes.link.resets >= 1, (
            "its machine acknowledges all the while: only the heartbeats tell"
        )
        machines.sim.resume("far")
        partition.subpartitions[0].add(RecordBatch([1]))
        await until(lambda: reader.records == [1], 0.1)
        reader.channel.release()

    on_two_machines(main)


def test_channels_to_one_process_share_a_link_which_is_closed_and_forgotten_when_unused() -> None:
    async def main(planes: Planes) -> None:
        for job in range(20):
            readers = []
            for name in (f"a{job}", f"b{job}"):
                partition = planes.partition(name)
                readers.append(Reader(planes.channel(name)))
                partition.subpartitions[0].add(RecordBatch([job]))
                partition.finish()
            await until(lambda: all(reader.events for reader in readers), 0.01)  # noqa: B023
            assert len(planes.consumer.links) == len(planes.producer.links) == 1
            for reader in readers:
                reader.channel.release()
            if job % 2:
                await asyncio.sleep(UNUSED_S + 1)
                assert planes.consumer.links == []
                assert planes.producer.links == []
        assert planes.pool.used_bytes == 0

    async def run(host: SimulatedHost) -> None:
        async with Planes(host) as planes:
            await main(planes)

    assert simulate(run, 1).errors == []


def test_a_link_is_kept_for_a_channel_that_comes_before_its_time_is_up() -> None:
    async def run(host: SimulatedHost) -> None:
        async with Planes(host) as planes:
            planes.partition()
            first = planes.channel()
            first.request(lambda priority: None)
            link = planes.link
            await planes.settle()
            first.release()
            await asyncio.sleep(UNUSED_S - 1)
            reader = Reader(planes.channel("q"))
            planes.partition("q").subpartitions[0].add(RecordBatch([1]))
            await asyncio.sleep(UNUSED_S + 5)
            assert reader.records == [1]
            assert planes.link is link
            assert link.resets == 0
            reader.channel.release()

    simulate(run, 1)


def test_a_last_acknowledgement_that_is_lost_leaves_nothing_at_the_producer() -> None:
    """The consumer has read to the end and let go; the link comes back once more to say so."""

    async def main(planes: Planes, proxy: FaultProxy) -> None:
        partition = planes.partition()
        reader = Reader(planes.channel())
        reader.paused = True
        partition.finish()
        await until(lambda: reader.told == 1)
        proxy.reset()
        reader.read()
        reader.channel.release()
        await until(lambda: partition.is_released)
        assert reader.events == [EndOfPartition()]
        assert planes.producer.links[0].has_channels is False

    on_sockets(main)


def test_closing_in_the_middle_of_everything_leaves_nothing_open() -> None:
    """Connecting, in the handshake, connected, waiting for a retry: the fixtures look for what
    is left.
    """

    async def main(planes: Planes, proxy: FaultProxy) -> None:
        host = planes.host
        for turns in range(30):
            consumer = DataPlane(host, SECRET, planes.codec, planes.registry)
            consumer.link_to((ADDRESS, planes.own_port))
            for _ in range(turns):
                await asyncio.sleep(0)
            await consumer.close()
            await consumer.close()
            assert consumer.links == []
        consumer = DataPlane(host, SECRET, planes.codec, planes.registry)
        link = consumer.link_to((ADDRESS, planes.own_port))
        await until(lambda: link.connection is not None)
        connection = link.connection
        for _ in range(5):  # Until the dialling side has heard of it.
            await asyncio.sleep(0)
        await consumer.close()
        assert connection is not None
        assert connection.closed.done()
        silent = await host.net.listen(asyncio.Protocol, ADDRESS, 0)
        consumer = DataPlane(host, SECRET, planes.codec, planes.registry)
        consumer.link_to((ADDRESS, silent.port))
        await asyncio.sleep(0.01)
        await consumer.close()
        silent.close()

    on_sockets(main)


def test_a_mistake_of_this_side_fails_the_link_and_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(self: ConsumerExchange) -> list[bytes | memoryview]:
        raise LocalProtocolError("a frame was sent that must not be")

    async def main(planes: Planes, proxy: FaultProxy) -> None:
        planes.partition()
        reader = Reader(planes.channel())
        await until(lambda: planes.link.connection is not None)
        monkeypatch.setattr(ConsumerExchange, "data_to_send", mistaken)
        planes.link.consumer.announce_batch_size(0, 1000)
        await until(lambda: reader.error is not None)
        assert isinstance(reader.error, LocalProtocolError)
        monkeypatch.undo()
        await until(lambda: planes.producer.links == [])
        assert planes.consumer.links == []
        reader.channel.release()

    with caplog.at_level(logging.ERROR):
        on_sockets(main)
    assert "has failed" in caplog.text


def test_an_older_connection_of_a_link_gives_way_to_a_newer_one() -> None:
    """The peer may have noticed its end first: half-open here, it must not hold the channels."""

    async def main(planes: Planes, proxy: FaultProxy) -> None:
        partition = planes.partition()
        reader = Reader(planes.channel())
        partition.subpartitions[0].add(RecordBatch([1]))
        await until(lambda: reader.records == [1])
        far = planes.producer.links[0]
        old = far.connection
        assert old is not None
        proxy.stall()
        near = planes.link.connection
        assert near is not None
        near.abort()
        proxy.resume()
        partition.subpartitions[0].add(RecordBatch([2]))
        await until(lambda: reader.records == [1, 2])
        assert far.connection is not old
        assert planes.producer.links == [far]
        reader.channel.release()

    on_sockets(main)


def test_the_producers_failure_reaches_a_consumer_whose_connection_was_down_meanwhile() -> None:
    async def main(planes: Planes, proxy: FaultProxy) -> None:
        partition = planes.partition()
        reader = Reader(planes.channel())
        partition.subpartitions[0].add(RecordBatch([1]))
        await until(lambda: reader.records == [1])
        proxy.cut()
        partition.fail(ValueError("bad record"))
        await until(lambda: planes.link.attempts > 2)
        proxy.heal()
        await until(lambda: reader.error is not None)
        assert isinstance(reader.error, ProducerFailed)
        assert "bad record" in str(reader.error)
        reader.channel.release()

    on_sockets(main)


def test_an_attempt_cut_short_at_its_deadline_leaves_no_dead_connection_in_its_link(
    uvloop: Any,
) -> None:
    """uvloop closes a connected transport without `connection_lost` if the call that connects is
    cancelled. Deadlines of 0 to 12 ms meet each step of an attempt.
    """
    listening, leave = threading.Event(), threading.Event()
    port = 0

    async def serve() -> None:
        nonlocal port
        plane = DataPlane(SystemHost(), SECRET, Planes(SystemHost()).codec, Registry())
        port = await plane.listen(ADDRESS)
        listening.set()
        while not leave.is_set():
            await asyncio.sleep(0.01)
        await plane.close()

    async def dial() -> None:
        loop = asyncio.get_running_loop()
        plane = DataPlane(SystemHost(), SECRET, Planes(SystemHost()).codec, Registry())
        address, connected = (ADDRESS, port), 0
        for n in range(400):
            link: Link = plane.link_to(address)
            link.silent_since = loop.time() - GIVE_UP_S + n % 40 * 0.0003
            while link.connection is None and link.failure is None:
                await asyncio.sleep(0)
            await asyncio.sleep(0.001)
            if link.failure is None:
                assert link.connection is not None
                link.connection.write([b""])  # Raises RuntimeError on a closed handle.
                connected += 1
            plane.forget(address, link)
            link.close()
        assert connected > 10
        await plane.close()

    server = threading.Thread(target=lambda: uvloop.run(serve()))
    server.start()
    try:
        assert listening.wait(10)
        uvloop.run(dial())
    finally:
        leave.set()
        server.join()
