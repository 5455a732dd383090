"""Both directions of all logical channels between two TaskManagers, over successive connections.

The channels that the peer reads and the channels that this side reads are numbered independently.
The type of a frame determines to which of the two its channel number belongs. This module uses no
socket: it takes frames, returns pieces to write, and calls `on_output` when there is output.
"""

from __future__ import annotations

from collections.abc import Callable

from aioflow.core.errors import RemoteProtocolError
from aioflow.core.wire.serializers import Codec
from aioflow.protocol.consumer import RECORD_BYTES_MAX, ConsumerExchange, Delivered
from aioflow.protocol.framing import NO_CHANNEL, Frame, FrameEncoder, FrameType
from aioflow.protocol.messages import CloseRequest, PartitionRequest
from aioflow.protocol.producer import ProducerExchange

__all__ = ["Exchange", "Stimulus"]

Stimulus = Delivered | PartitionRequest | CloseRequest
"""Result of a received frame for one channel.

Bytes, events and errors are for a channel that this side reads, messages for a channel that the
peer reads.
"""

_FOR_THE_CONSUMER = frozenset(
    [
        FrameType.BUFFER_RESPONSE,
        FrameType.EVENT_RESPONSE,
        FrameType.ERROR_RESPONSE,
    ]
)
_FOR_THE_PRODUCER = frozenset(
    [
        FrameType.PARTITION_REQUEST,
        FrameType.CANCEL_PARTITION_REQUEST,
        FrameType.CLOSE_REQUEST,
        FrameType.ADD_CREDIT,
        FrameType.RESUME_CONSUMPTION,
        FrameType.ACK_ALL_USER_RECORDS_PROCESSED,
        FrameType.NEW_BUFFER_SIZE,
    ]
)


class Exchange:
    """All channels between two processes: `producer` serves the channels that the peer reads,
    `consumer` the channels that this side reads.

    `on_output` is called when `data_to_send` has something to return.
    """

    def __init__(
        self, codec: Codec, on_output: Callable[[], None], record_bytes_max: int = RECORD_BYTES_MAX
    ) -> None:
        self.producer = ProducerExchange(codec, on_output)
        self.consumer = ConsumerExchange(codec, on_output, record_bytes_max)
        self._on_output = on_output
        self._encoder: FrameEncoder | None = None
        self._heartbeats: list[tuple[FrameType, int]] = []

    def attach(self, encoder: FrameEncoder) -> None:
        """Continues on a new connection, whose frames `encoder` writes.

        Frames of an earlier connection must no longer be passed to `receive`.
        """
        self._heartbeats.clear()
        self._encoder = encoder
        self.producer.attach(encoder)
        self.consumer.attach(encoder)

    def connection_lost(self) -> None:
        """Stops sending until the next `attach`. To give up all channels instead, call `close`.
        Idempotent.
        """
        self._encoder = None
        self._heartbeats.clear()
        self.producer.connection_lost()
        self.consumer.connection_lost()

    def close(self) -> None:
        """Releases the channels that the peer reads, and gives up the channels that this side
        reads.

        `data_to_send` then returns the messages that announce this to the peer.
        """
        self.producer.close()
        self.consumer.close()

    def receive(self, frame: Frame) -> list[tuple[int, Stimulus]]:
        """Handles `frame`, and returns its results as pairs of a channel and an element or message.

        Raises RemoteProtocolError for an invalid frame. The caller must then end the connection;
        the channels stay.
        """
        kind = frame.type
        if kind in _FOR_THE_CONSUMER:
            return [*self.consumer.receive(frame)]
        if kind in _FOR_THE_PRODUCER:
            return [*self.producer.receive(frame)]
        if kind is FrameType.HEARTBEAT:
            self._beat(FrameType.HEARTBEAT_REPLY, frame.sequence)
        elif kind is not FrameType.HEARTBEAT_REPLY:
            raise RemoteProtocolError(f"a {kind.name} frame is not part of the data plane")
        return []

    def send_heartbeat(self, number: int) -> None:
        """Requests a sign of life from the peer. Any frame that the peer sends counts as one."""
        self._beat(FrameType.HEARTBEAT, number)

    @property
    def has_output(self) -> bool:
        """Whether `data_to_send` would return anything."""
        return bool(self._heartbeats) or self.consumer.has_output or self.producer.has_output

    def data_to_send(self, max_bytes: int) -> list[bytes | memoryview]:
        """Returns the pieces to write, in order: heartbeats, then messages of consumers, then about
        `max_bytes` of data.

        Call it again while `has_output` is True. Data is not copied, so the pieces must be written
        before the next call.
        """
        encoder = self._encoder
        if encoder is None:
            return []
        out: list[bytes | memoryview] = [
            encoder.encode(kind, NO_CHANNEL, number) for kind, number in self._heartbeats
        ]
        self._heartbeats.clear()
        out += self.consumer.data_to_send()
        out += self.producer.data_to_send(max_bytes)
        return out

    def _beat(self, kind: FrameType, number: int) -> None:
        if self._encoder is not None and len(self._heartbeats) < 16:
            # A flood of heartbeats is not answered one by one.
            self._heartbeats.append((kind, number))
            self._on_output()
