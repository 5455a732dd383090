"""A connection between two exchanges that a test can cut, delay and reset: bytes wait in it
until they are delivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from aioflow.core.elements import EndOfPartition, Event, RecordBatch
from aioflow.core.wire.batch import decode_batch, encode_batch
from aioflow.core.wire.serializers import Codec
from aioflow.network.local_pool import LocalBufferPool, NetworkBufferPool
from aioflow.network.subpartition import PipelinedSubpartition
from aioflow.protocol.credit import FloatingBuffers
from aioflow.protocol.exchange import Exchange
from aioflow.protocol.framing import DATA_PLANE, SEGMENT_BYTES, FrameDecoder, FrameEncoder
from aioflow.protocol.handshake import Side, direction_key
from aioflow.protocol.messages import Message, PartitionRequest

CODEC = Codec()
PARTITION = "map-0"


def pool_of(count: int) -> LocalBufferPool:
    """A pool of `count` segments."""
    return NetworkBufferPool(count * SEGMENT_BYTES).create_buffer_pool(0)


def encode(batch: RecordBatch) -> bytes:
    return encode_batch(batch, CODEC, "map-0")


def contents(elements: Iterable[RecordBatch | bytes | Event]) -> list[object]:
    """Records and events, one by one."""
    found: list[object] = []
    for element in elements:
        batch = decode_batch(element, CODEC, "test") if isinstance(element, bytes) else element
        found += batch.values if isinstance(batch, RecordBatch) else [batch]
    return found


class Link:
    """`upstream` produces partition `map-0`, subpartition i for channel i; `downstream` reads
    it.
    """

    def __init__(
        self, pool_size: int = 100, record_bytes_max: int = 1 << 26, mac: bool = False
    ) -> None:
        self.pool = NetworkBufferPool().create_buffer_pool(SEGMENT_BYTES, batches_max=pool_size)
        self.mac = mac
        self.outputs = 0
        self.upstream = Exchange(CODEC, self._on_output)
        self.downstream = Exchange(CODEC, self._on_output, record_bytes_max)
        self.subpartitions: dict[int, PipelinedSubpartition] = {}
        self.queues: dict[int, deque[bytes | Event]] = {}
        """Delivered and untaken data."""
        self.taken: dict[int, list[object]] = {}
        """Records and events that the task took, in order."""
        self.errors: dict[int, list[Exception]] = {}
        self.told: list[tuple[int, Message]] = []
        """Events that the exchange upstream left to its owner."""
        self.known = True
        """Is the partition registered?"""
        self.connect()
        self.exchange()

    def connect(self) -> None:
        """A new connection; what the old one had on the way is lost."""
        down_key, up_key = (direction_key(b"k" * 32, side) if self.mac else None for side in Side)
        self.down_wire = bytearray()
        self.up_wire = bytearray()
        self.down_decoder = FrameDecoder(DATA_PLANE, down_key)
        self.up_decoder = FrameDecoder(DATA_PLANE, up_key)
        self.upstream.attach(FrameEncoder(down_key))
        self.downstream.attach(FrameEncoder(up_key))

    def open(
        self, channel: int, exclusive: int = 2, floating: FloatingBuffers | None = None
    ) -> PipelinedSubpartition:
        subpartition = self.subpartitions[channel] = PipelinedSubpartition(channel, self.pool)
        self.queues[channel] = deque()
        self.taken[channel] = []
        self.errors[channel] = []
        self.downstream.consumer.open_channel(channel, PARTITION, channel, exclusive, floating)
        return subpartition

    def flush_upstream(self, max_bytes: int = 1 << 30) -> None:
        self.down_wire += b"".join(self.upstream.data_to_send(max_bytes))

    def flush_downstream(self) -> None:
        self.up_wire += b"".join(self.downstream.data_to_send(1 << 30))

    def deliver_down(self, count: int | None = None) -> None:
        count = len(self.down_wire) if count is None else count
        data = bytes(self.down_wire[:count])
        del self.down_wire[:count]
        for frame in self.down_decoder.receive(data):
            for channel, element in self.downstream.receive(frame):
                if isinstance(element, Exception):
                    self.errors[channel].append(element)
                else:
                    self.queues[channel].append(element)  # type: ignore[arg-type]

    def deliver_up(self, count: int | None = None) -> None:
        count = len(self.up_wire) if count is None else count
        data = bytes(self.up_wire[:count])
        del self.up_wire[:count]
        for frame in self.up_decoder.receive(data):
            for channel, message in self.upstream.receive(frame):
                if isinstance(message, PartitionRequest):
                    self.on_request(channel, message)
                else:
                    self.told.append((channel, message))  # type: ignore[arg-type]

    def on_request(self, channel: int, request: PartitionRequest) -> None:
        producer = self.upstream.producer
        if not self.known:
            producer.partition_not_found(channel, request.partition_id)
        else:
            producer.on_partition_request(
                channel, request, self.subpartitions[request.subpartition_index], encode
            )

    def take(self, channel: int, count: int = 1) -> list[object]:
        """The task takes elements from its queue; records are listed one by one."""
        records: list[object] = []
        for _ in range(count):
            records += contents([self.queues[channel].popleft()])
            self.downstream.consumer.taken_over(channel)
        self.taken[channel] += records
        return records

    def exchange(self) -> None:
        """Everything crosses until nothing is left to send."""
        while (
            self.upstream.has_output or self.downstream.has_output or self.up_wire or self.down_wire
        ):
            self.flush_downstream()
            self.deliver_up()
            self.flush_upstream()
            self.deliver_down()

    def run(self) -> None:
        """Runs like `exchange`, with a task that takes all it gets and resumes at once."""
        self.exchange()
        idle = False
        while not idle:
            for channel, queue in self.queues.items():
                self.take(channel, len(queue))
                self.downstream.consumer.resume(channel)
            self.exchange()
            idle = not any(self.queues.values())

    def ended(self, channel: int) -> bool:
        return self.taken[channel][-1:] == [EndOfPartition()]

    def _on_output(self) -> None:
        self.outputs += 1
