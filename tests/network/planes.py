"""Two data planes in one loop, over any network of their host: channels of one read the output of
the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from aioflow.core.elements import RecordBatch
from aioflow.core.host import Host
from aioflow.core.wire.serializers import Codec
from aioflow.network.channels import (
    EXCLUSIVE_BUFFERS,
    FLOATING_BUFFERS,
    ProducerState,
    RemoteInputChannel,
)
from aioflow.network.data_plane import DataPlane
from aioflow.network.link import Link
from aioflow.network.local_pool import NetworkBufferPool
from aioflow.network.partition import ResultPartition
from aioflow.protocol.framing import SEGMENT_BYTES

SECRET = b"s" * 32
ADDRESS = "127.0.0.1"


@dataclass
class Registry:
    """Partitions by name."""

    partitions: dict[str, ResultPartition] = field(default_factory=dict)

    def find_partition(self, partition_id: str) -> ResultPartition | None:
        return self.partitions.get(partition_id)


class Planes:
    """Use as `async with`.

    `port` is where the consumer dials; a proxy may be put there instead of the producer's own.
    """

    def __init__(
        self, host: Host, producer_host: Host | None = None, address: str = ADDRESS
    ) -> None:
        self.host = host
        self.address = address
        self.registry = Registry()
        self.pool = NetworkBufferPool()
        self.codec = Codec()
        self.producer = DataPlane(producer_host or host, SECRET, self.codec, self.registry)
        self.consumer = DataPlane(host, SECRET, self.codec, Registry())
        self.port = 0
        self.own_port = 0
        self.buffers = EXCLUSIVE_BUFFERS + FLOATING_BUFFERS
        """Segments of each channel."""
        self.producer_state = ProducerState.RUNNING
        """The answer of the JobMaster."""
        self.asked = 0

    async def __aenter__(self) -> Self:
        self.own_port = await self.producer.listen(self.address)
        self.port = self.port or self.own_port
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.consumer.close()
        await self.producer.close()

    def partition(
        self, name: str = "p", subpartitions: int = 1, batches: int = 8
    ) -> ResultPartition:
        """A registered partition with a pool of its own."""
        partition = ResultPartition(
            name,
            subpartitions,
            self.pool.create_buffer_pool(SEGMENT_BYTES, None, batches),
            owner=f"map-{name}",
        )
        self.registry.partitions[name] = partition
        return partition

    @property
    def link(self) -> Link:
        """The consumer's side of the one link."""
        return self.consumer.link_to((self.address, self.port))

    def channel(self, name: str = "p", subpartition: int = 0, index: int = 0) -> RemoteInputChannel:
        buffers = self.pool.create_buffer_pool(
            EXCLUSIVE_BUFFERS * SEGMENT_BYTES, self.buffers * SEGMENT_BYTES
        )
        return RemoteInputChannel(
            index, name, subpartition, self.link, self.codec, buffers, self._ask_producer
        )

    def _ask_producer(self, answer: Callable[[ProducerState], None]) -> None:
        self.asked += 1
        answer(self.producer_state)

    @property
    def is_quiet(self) -> bool:
        """Everything that was written has arrived, and nothing waits to be written."""
        far = {link.name: link for link in self.producer.links}
        for near in self.consumer.links:
            other = far.get(near.name)
            if (
                near.connection is None
                or other is None
                or other.connection is None
                or near.has_output
                or other.has_output
            ):
                return False
            for sender, receiver in (
                (near.connection, other.connection),
                (other.connection, near.connection),
            ):
                if sender.bytes_sent != receiver.bytes_received:
                    return False
        return True

    async def settle(self) -> None:
        """Returns when all is quiet, for one more turn of the loop."""
        turns = 0
        while turns < 2:
            await asyncio.sleep(0)
            turns = turns + 1 if self.is_quiet else 0


async def until(condition: Callable[[], bool], every_s: float = 0.0) -> None:
    """Turns of the loop until `condition()` holds; the time limit of the test ends it if it
    never does. `every_s` for virtual time.
    """
    while not condition():
        await asyncio.sleep(every_s)


class Reader:
    """A task that reads a channel whenever that says so; while `paused`, only when the test
    calls `read`.
    """

    def __init__(self, channel: RemoteInputChannel) -> None:
        self.channel = channel
        self.records: list[object] = []
        self.events: list[object] = []
        self.error: Exception | None = None
        self.paused = False
        self.told = 0
        """How often the channel said that it turned from empty to not empty."""
        self._loop = asyncio.get_running_loop()
        channel.request(self._on_data)

    def _on_data(self, priority: bool) -> None:
        self.told += 1
        if not self.paused:
            # As a gate: reading happens later, in the task.
            self._loop.call_soon(self.read)

    def read(self, limit: int = 1 << 30) -> None:
        try:
            while limit > 0 and (polled := self.channel.poll()) is not None:
                element = polled[0]
                if isinstance(element, RecordBatch):
                    self.records += element.values
                else:
                    self.events.append(element)
                limit -= 1
        except Exception as error:
            self.error = error
