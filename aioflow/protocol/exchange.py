"""Both directions of all logical channels between two TaskManagers, over one connection after
another.

The numbers of channels that the peer reads from here and of those that are read from the peer are
independent of each other: a frame's type tells which are meant. Nothing here knows a socket: frames
go in, pieces to write come out, and `on_output` says when.
"""

from __future__ import annotations

from collections.abc import Callable

from aioflow.core.errors import RemoteProtocolError
from aioflow.core.serializers import Codec
from aioflow.protocol.consumer import RECORD_BYTES_MAX, ConsumerExchange, Delivered
from aioflow.protocol.framing import NO_CHANNEL, Frame, FrameEncoder, FrameType
from aioflow.protocol.messages import CloseRequest, PartitionRequest, TaskEvent
from aioflow.protocol.producer import ProducerExchange

__all__ = ["Exchange", "Stimulus"]

Stimulus = Delivered | PartitionRequest | TaskEvent | CloseRequest
"""Bytes, events and errors are for a channel that is read here; messages are about one that the
peer reads.
"""

_FOR_THE_CONSUMER = frozenset(
    [
        FrameType.BUFFER_RESPONSE,
        FrameType.EVENT_RESPONSE,
        FrameType.ERROR_RESPONSE,
        FrameType.BACKLOG_ANNOUNCEMENT,
    ]
)
_FOR_THE_PRODUCER = frozenset(
    [
        FrameType.PARTITION_REQUEST,
        FrameType.TASK_EVENT,
        FrameType.CANCEL_PARTITION_REQUEST,
        FrameType.CLOSE_REQUEST,
        FrameType.ADD_CREDIT,
        FrameType.RESUME_CONSUMPTION,
        FrameType.ACK_ALL_USER_RECORDS_PROCESSED,
        FrameType.NEW_BUFFER_SIZE,
    ]
)


class Exchange:
    """`producer` is what the peer reads from here, `consumer` what is read from the peer.

    `on_output` is called when `data_to_send` has something to return that it did not have before.
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
        """There is a connection, whose frames `encoder` writes.

        Frames of an earlier one must not be given to `receive` any more.
        """
        self._heartbeats.clear()
        self._encoder = encoder
        self.producer.attach(encoder)
        self.consumer.attach(encoder)

    def connection_lost(self) -> None:
        """Everything waits for the next `attach`; to give up instead, `close`. Idempotent."""
        self._encoder = None
        self._heartbeats.clear()
        self.producer.connection_lost()
        self.consumer.connection_lost()

    def close(self) -> None:
        """Release what the peer reads and give up what is read here; `data_to_send` says so to
        the peer.
        """
        self.producer.close()
        self.consumer.close()

    def receive(self, frame: Frame) -> list[tuple[int, Stimulus]]:
        """Returns what follows from `frame`, by channel.

        RemoteProtocolError ends the connection, not the channels.
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
        """Ask the peer for a sign of life; any frame that arrives is one."""
        self._beat(FrameType.HEARTBEAT, number)

    @property
    def has_output(self) -> bool:
        """Would `data_to_send` return something?"""
        return bool(self._heartbeats) or self.consumer.has_output or self.producer.has_output

    def data_to_send(self, max_bytes: int) -> list[bytes | memoryview]:
        """Returns pieces to write in this order: heartbeats, what the consumers have to say, and
        about `max_bytes` of data.

        Ask again as long as `has_output`. Nothing is copied: write the pieces before anything else
        is sent.
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
        if (
            self._encoder is not None and len(self._heartbeats) < 16
        ):  # A flood of them is not answered one by one.
            self._heartbeats.append((kind, number))
            self._on_output()
