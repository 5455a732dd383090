"""The consumer's side of all logical channels of one connection: order, credit and resumption.

This module returns the bytes of whole batches, which the task decodes, and decoded events.
Invariants:

* elements are returned in order of their sequence numbers. A gap ends the channel with
  BufferReordering; a frame that is repeated after a resume is dropped.
* an element is *taken over* when the task takes it from its queue, always in order. A frame of an
  incomplete batch is taken over as soon as all frames before it are. So a batch that is larger than
  the window still arrives. The bytes of such a frame stay in memory of the pool, even if this
  exceeds the pool's size.
* credit is returned in few messages: when half of the window can be returned, or when all received
  elements were taken over. In the second case the producer may be waiting for its memory.
* an error of one channel ends that channel alone.

A channel outlives its connection: `attach` requests all open channels again, each from its first
missing element. The design follows CreditBasedPartitionRequestClientHandler and RemoteInputChannel
of Flink, which cannot resume after a reset.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from aioflow.core.elements import EndOfPartition, Event
from aioflow.core.errors import LocalProtocolError, RemoteProtocolError
from aioflow.core.wire.batch import decode_event
from aioflow.core.wire.serializers import Codec
from aioflow.protocol.credit import BufferKind, CreditReceiver, FloatingBuffers
from aioflow.protocol.errors import BufferReordering, PartitionNotFound, rebuild_error
from aioflow.protocol.framing import NO_CHANNEL, Frame, FrameEncoder, FrameType
from aioflow.protocol.messages import (
    AckAllUserRecordsProcessed,
    AddCredit,
    CancelPartitionRequest,
    CloseRequest,
    ErrorResponse,
    Message,
    NewBufferSize,
    PartitionRequest,
    ResumeConsumption,
    decode_message,
    encode_message,
)
from aioflow.protocol.outlet import FLAG_BLOCKING, FLAG_CONTINUES, FLAG_PRIORITY, PREFIX

__all__ = [
    "RECORD_BYTES_MAX",
    "UNTOLD_BATCHES_MAX",
    "ConsumerExchange",
    "Delivered",
    "PriorityEvent",
    "partition_request_backoff",
]

RECORD_BYTES_MAX = 64 << 20
"""Maximum size of one batch over all its frames. A larger record cannot be sent."""

UNTOLD_BATCHES_MAX = 2
"""Number of batches, taken over since the last message, from which on AddCredit is sent even for
little credit.

The producer counts a batch among its few queued batches until it learns that the batch was taken
over.
"""

UNTOLD_EVENTS_MAX = 64
"""Number of events, taken over since the last message, from which on AddCredit is sent. Fewer
events are reported with the next credit.
"""


class PriorityEvent(msgspec.Struct, frozen=True):
    """An event that overtakes the elements of its channel.

    It is acknowledged at its original position, like any other element.
    """

    event: Event


Delivered = bytes | Event | PriorityEvent | Exception
"""A delivery to a channel: the bytes of a batch, an event, or the error that ended the channel.

The error PartitionNotFound does not end the channel. It means that the producer does not have the
partition.
"""


def partition_request_backoff(initial_ms: int, max_ms: int) -> tuple[int, ...]:
    """Returns the delays in ms before each request for a partition that was not found.

    The first is 0, then they double from `initial_ms`, and the last is `max_ms`. For (500, 3000)
    the delays are 0, 500, 1000, 2000, 3000. If the last request fails, give up.
    """
    delays = [0]
    delay = initial_ms
    while 0 < delay < max_ms:
        delays.append(delay)
        delay *= 2
    if max_ms > 0 and initial_ms > 0:
        delays.append(max_ms)
    return tuple(delays)


class _Inlet:
    """The state of one channel at its consumer."""

    __slots__ = (
        "backlog",
        "batch_records",
        "channel",
        "credit",
        "expected",
        "has_ended",
        "is_acknowledged",
        "is_blocked",
        "is_refused",
        "part_bytes",
        "partition_id",
        "parts",
        "pending",
        "subpartition_index",
        "taken_over",
        "untold_batches",
        "untold_data",
        "untold_events",
    )

    def __init__(
        self, channel: int, partition_id: str, subpartition_index: int, credit: CreditReceiver
    ) -> None:
        self.channel = channel
        self.partition_id = partition_id
        self.subpartition_index = subpartition_index
        self.credit = credit
        self.expected = 0
        """Sequence number of the next expected frame."""
        self.taken_over = 0
        """The task has taken over all frames below this sequence number."""
        self.pending: deque[tuple[BufferKind | None, bool]] = deque()
        """Received frames that were not taken over yet: (buffer, whether the frame completes an
        element).

        The buffer is None for an event.
        """
        self.parts: list[bytes] = []
        self.part_bytes = 0
        self.backlog = 0
        self.untold_data = 0
        self.untold_batches = 0
        self.untold_events = 0
        self.is_blocked = False
        self.is_refused = False
        """Whether the producer did not have the partition at the last request."""
        self.is_acknowledged = False
        self.has_ended = False
        self.batch_records: int | None = None
        """The batch size in records that was last requested; None before."""

    def __str__(self) -> str:
        return (
            f"channel {self.channel} (subpartition {self.subpartition_index} of "
            f"{self.partition_id})"
        )

    def request(self) -> PartitionRequest:
        """Returns a PartitionRequest that asks for frames from the next expected one on. Its credit
        is the number of ready buffers.
        """
        credit = self.credit
        credit.take_credit()
        self.told()
        return PartitionRequest(
            partition_id=self.partition_id,
            subpartition_index=self.subpartition_index,
            credit=credit.available,
            resume_from=self.expected,
            blocked=self.is_blocked,
        )

    def told(self) -> None:
        """Resets the counts of elements that were taken over without the producer's knowledge,
        because a message reports them now.
        """
        self.untold_data = self.untold_batches = self.untold_events = 0

    def is_due(self) -> bool:
        """Returns whether to send AddCredit now."""
        if (
            self.credit.is_credit_due
            or self.untold_batches >= UNTOLD_BATCHES_MAX
            or self.untold_events >= UNTOLD_EVENTS_MAX
        ):
            return True
        # The elements taken over may hold all memory of a small pool of the producer.
        return self.untold_data > 0 and self.backlog == 0 and not self.pending


class ConsumerExchange:
    """The channels whose data the peer produces. They outlive the connection; see `attach`.

    `on_output` is called when there is output, at most once until the next `data_to_send`.
    """

    def __init__(
        self, codec: Codec, on_output: Callable[[], None], record_bytes_max: int = RECORD_BYTES_MAX
    ) -> None:
        self._codec = codec
        self._on_output = on_output
        self._record_bytes_max = record_bytes_max
        self._encoder: FrameEncoder | None = None
        self._inlets: dict[int, _Inlet] = {}
        self._messages: deque[tuple[int, Message]] = deque()
        self._credit_due: dict[int, _Inlet] = {}
        self._told = False

    # The connection.

    def attach(self, encoder: FrameEncoder) -> None:
        """Continues on a new connection, whose frames `encoder` writes: requests all open channels,
        each from its first missing element.
        """
        self.connection_lost()
        self._encoder = encoder
        for inlet in self._inlets.values():
            self._ask(inlet)
        # Cancellations and last acknowledgements may be lost: this cancels all channels not
        # requested now.
        self._post(NO_CHANNEL, CancelPartitionRequest())

    def connection_lost(self) -> None:
        """Stops sending; data in transit may be lost. Idempotent."""
        self._encoder = None
        self._messages.clear()
        self._credit_due.clear()

    def close(self) -> None:
        """Gives up all channels, and announces to the peer that this side will request no more."""
        for inlet in list(self._inlets.values()):
            self._remove(inlet)
        self._post(NO_CHANNEL, CloseRequest())

    # The channels.

    def open_channel(
        self,
        channel: int,
        partition_id: str,
        subpartition_index: int,
        exclusive: int,
        pool: FloatingBuffers | None = None,
    ) -> None:
        """Requests a subpartition for `channel`, a number chosen by the caller.

        The channel gets `exclusive` buffers of its own, and borrows floating buffers from `pool`.
        """
        if channel in self._inlets or not 0 <= channel < NO_CHANNEL:
            raise LocalProtocolError(
                f"channel {channel} cannot be opened: it is open already, or no number of a channel"
            )
        credit = CreditReceiver(exclusive, pool, lambda: self._settle(inlet))
        inlet = self._inlets[channel] = _Inlet(channel, partition_id, subpartition_index, credit)
        self._ask(inlet)

    def request_again(self, channel: int) -> None:
        """Repeats a request after PartitionNotFound, once the back-off is over.

        Has no effect if the channel was cancelled meanwhile, or was requested on a new connection.
        After a second request the producer would send elements again, perhaps under other sequence
        numbers.
        """
        inlet = self._inlets.get(channel)
        if inlet is not None and inlet.is_refused:
            self._ask(inlet)

    def taken_over(self, channel: int, count: int = 1) -> None:
        """Notes that the task has taken over the next `count` batches or events of `channel`.

        Ends the channel if EndOfPartition is among them.
        """
        inlet = self._inlets.get(channel)
        if inlet is None:
            return
        pending = inlet.pending
        while count > 0:
            if not pending:
                raise LocalProtocolError(f"{inlet}: more was taken over than was handed out")
            count -= self._take_over_one(inlet, stays=False)
        while pending and not pending[0][1]:
            self._take_over_one(inlet, stays=True)
        if inlet.has_ended and not pending:
            self._post(channel, AddCredit(0, inlet.taken_over))
            self._remove(inlet)
        else:
            self._settle(inlet)

    def resume(self, channel: int) -> None:
        """Asks the producer to continue after a blocking event. Has no effect if the channel is not
        blocked.
        """
        inlet = self._inlets.get(channel)
        if inlet is not None and inlet.is_blocked:
            inlet.is_blocked = False
            self._post(channel, ResumeConsumption())

    def acknowledge_all_records_processed(self, channel: int) -> None:
        """Tells the producer that everything up to EndOfData was processed."""
        inlet = self._inlets.get(channel)
        if inlet is not None:
            inlet.is_acknowledged = True
            self._post(channel, AckAllUserRecordsProcessed())

    def announce_batch_size(self, channel: int, records: int) -> None:
        """Asks the producer for batches of up to `records` records. The request is repeated after a
        reset.
        """
        inlet = self._inlets.get(channel)
        if inlet is not None:
            inlet.batch_records = records
            self._post(channel, NewBufferSize(records))

    def cancel(self, channel: int) -> None:
        """Gives up a channel; later data for it is dropped. Idempotent."""
        inlet = self._inlets.get(channel)
        if inlet is not None:
            self._remove(inlet)
            self._post(channel, CancelPartitionRequest())

    @property
    def channels(self) -> Sequence[int]:
        """Numbers of the open channels."""
        return list(self._inlets)

    def buffers(self, channel: int) -> tuple[int, int, int, int]:
        """Returns four counts of a channel's buffers: all, borrowed, ready to receive, and ready
        and announced to the producer.
        """
        inlet = self._inlets.get(channel)
        if inlet is None:
            return 0, 0, 0, 0
        credit = inlet.credit
        filled = [buffer for buffer, _ in inlet.pending if buffer is not None]
        return (
            credit.available + len(filled),
            credit.floating + filled.count(BufferKind.FLOATING),
            credit.available,
            credit.available - credit.unannounced,
        )

    # Receiving.

    def receive(self, frame: Frame) -> list[tuple[int, Delivered]]:
        """Handles a received frame. Returns pairs (channel, element or error), in order.

        Any error except PartitionNotFound ends its channel. Raises RemoteProtocolError for a
        control message that is malformed, or that no producer sends.
        """
        kind, channel, sequence, body = frame
        inlet = self._inlets.get(channel)
        if kind is FrameType.BUFFER_RESPONSE or kind is FrameType.EVENT_RESPONSE:
            if inlet is None:  # The channel was cancelled while the frame was in transit.
                return []
            try:
                element = self._on_element(inlet, kind, sequence, body)
            except RemoteProtocolError as error:
                return [(channel, self._fail(inlet, error))]
            # A backlog may have borrowed buffers that the producer does not know yet.
            self._settle(inlet)
            return [] if element is None else [(channel, element)]
        message = decode_message(kind, body)
        if isinstance(message, ErrorResponse):
            return self._on_error(channel, message)
        raise RemoteProtocolError(f"a producer never sends a {type(message).__name__}")

    # Sending.

    @property
    def has_output(self) -> bool:
        """Whether `data_to_send` would return anything."""
        return self._encoder is not None and bool(self._messages or self._credit_due)

    def data_to_send(self) -> list[bytes | memoryview]:
        """Returns all messages to send, which are few and small.

        Credit is computed only in this call, so that it includes all buffers that are ready now.
        """
        self._told = False
        out: list[bytes | memoryview] = []
        encoder = self._encoder
        if encoder is None:
            return out
        for channel, message in self._messages:
            out.append(encode_message(encoder, message, channel))
        self._messages.clear()
        # Credit follows the messages, because a ResumeConsumption makes a producer drop older
        # credit.
        for channel, inlet in self._credit_due.items():
            out.append(
                encode_message(
                    encoder, AddCredit(inlet.credit.take_credit(), inlet.taken_over), channel
                )
            )
            inlet.told()
        self._credit_due.clear()
        return out

    # One channel.

    def _on_element(
        self, inlet: _Inlet, kind: FrameType, sequence: int, body: bytes
    ) -> bytes | Event | PriorityEvent | None:
        """Returns the element that this frame completes, or None if the element is still
        incomplete.
        """
        expected = inlet.expected
        if sequence != expected:
            if sequence > expected:
                raise BufferReordering(
                    f"{inlet}: element {sequence} came where {expected} was expected; those "
                    "between are lost"
                )
            self._on_repeated(inlet, kind)
            return None
        if inlet.is_blocked:
            raise RemoteProtocolError(
                f"{inlet}: element {sequence} came behind a blocking event, before it was resumed"
            )
        if inlet.has_ended:
            raise RemoteProtocolError(
                f"{inlet}: element {sequence} came behind the end of the partition"
            )
        if len(body) < PREFIX.size:
            raise RemoteProtocolError(
                f"{inlet}: element {sequence} has {len(body)} bytes, expected at least "
                f"{PREFIX.size}"
            )
        flags, backlog = PREFIX.unpack_from(body)
        if kind is FrameType.BUFFER_RESPONSE:
            return self._on_data(inlet, flags, backlog, body)
        if flags not in (0, FLAG_BLOCKING, FLAG_PRIORITY) or (
            inlet.parts and flags != FLAG_PRIORITY
        ):
            raise RemoteProtocolError(
                f"{inlet}: event {sequence} has flags {flags}, or came in the middle of a batch"
            )
        event = decode_event(memoryview(body)[PREFIX.size :], str(inlet))
        inlet.expected = sequence + 1
        inlet.pending.append((None, True))
        inlet.backlog = backlog
        if flags & FLAG_BLOCKING:
            inlet.is_blocked = True
        else:
            inlet.credit.on_backlog(backlog)
        if type(event) is EndOfPartition:
            inlet.has_ended = True
        return PriorityEvent(event) if flags == FLAG_PRIORITY else event

    def _on_data(self, inlet: _Inlet, flags: int, backlog: int, body: bytes) -> bytes | None:
        if flags & ~FLAG_CONTINUES:
            raise RemoteProtocolError(
                f"{inlet}: data {inlet.expected} has flags {flags}, which are not part of the "
                "protocol"
            )
        buffer = inlet.credit.receive_data(backlog)
        inlet.expected += 1
        inlet.backlog = backlog
        payload = body[PREFIX.size :]
        if not flags and not inlet.parts:
            inlet.pending.append((buffer, True))
            return payload
        inlet.parts.append(payload)
        inlet.part_bytes += len(payload)
        inlet.pending.append((buffer, not flags))
        if inlet.part_bytes > self._record_bytes_max:
            raise RemoteProtocolError(
                f"{inlet}: a batch takes more than {self._record_bytes_max} bytes; emit smaller "
                "records"
            )
        if not flags:
            content = b"".join(inlet.parts)
            inlet.parts.clear()
            inlet.part_bytes = 0
            return content
        while inlet.pending and not inlet.pending[0][1]:
            self._take_over_one(inlet, stays=True)
        return None

    def _on_repeated(self, inlet: _Inlet, kind: FrameType) -> None:
        """Drops a frame that was received before, and grants its credit again."""
        if kind is FrameType.BUFFER_RESPONSE:
            credit = inlet.credit
            if credit.available <= credit.unannounced:
                raise RemoteProtocolError(f"{inlet}: data was repeated without credit")
            credit.unannounced += 1

    def _take_over_one(self, inlet: _Inlet, *, stays: bool) -> int:
        """Takes over the oldest pending frame. Returns 1 if the frame is the last of an element,
        otherwise 0.

        `stays` is True if the element is incomplete, so that the content of the frame is kept.
        """
        buffer, is_element = inlet.pending.popleft()
        inlet.taken_over += 1
        if buffer is None:
            inlet.untold_events += 1
        else:
            inlet.untold_data += 1
            inlet.untold_batches += is_element
            if stays:
                inlet.credit.set_aside(buffer)
            else:
                inlet.credit.recycle(buffer)
            if is_element:
                inlet.credit.finish_batch()
        return int(is_element)

    def _on_error(self, channel: int, response: ErrorResponse) -> list[tuple[int, Delivered]]:
        if channel != NO_CHANNEL:
            inlet = self._inlets.get(channel)
            # An error after the end has no effect.
            if inlet is None or inlet.has_ended:
                return []
            error = rebuild_error(response, self._codec)
            if isinstance(error, PartitionNotFound):
                inlet.is_refused = True
                return [(channel, error)]
            return [(channel, self._fail(inlet, error))]
        return [
            (inlet.channel, self._fail(inlet, rebuild_error(response, self._codec)))
            for inlet in list(self._inlets.values())
        ]

    def _fail(self, inlet: _Inlet, error: Exception) -> Exception:
        """Ends the channel `inlet` on this side, and makes the producer forget it."""
        self._remove(inlet)
        self._post(inlet.channel, CancelPartitionRequest())
        return error

    def _remove(self, inlet: _Inlet) -> None:
        """Removes a channel, and recycles the buffers of its elements.

        Elements that the task still uses stay valid, because they are in ordinary memory.
        """
        del self._inlets[inlet.channel]
        self._credit_due.pop(inlet.channel, None)
        # Released first, so that a returned floating buffer is not offered to this channel again.
        inlet.credit.release()
        for buffer, _ in inlet.pending:
            if buffer is not None:
                inlet.credit.recycle(buffer)
        inlet.pending.clear()
        inlet.parts.clear()

    def _ask(self, inlet: _Inlet) -> None:
        if self._encoder is None:
            return
        inlet.is_refused = False
        self._credit_due.pop(inlet.channel, None)
        self._post(inlet.channel, inlet.request())
        if inlet.is_acknowledged:
            self._post(inlet.channel, AckAllUserRecordsProcessed())
        if inlet.batch_records is not None:
            self._post(inlet.channel, NewBufferSize(inlet.batch_records))

    def _settle(self, inlet: _Inlet) -> None:
        if self._encoder is not None and inlet.channel not in self._credit_due and inlet.is_due():
            self._credit_due[inlet.channel] = inlet
            self._tell()

    def _post(self, channel: int, message: Message) -> None:
        if self._encoder is not None:
            self._messages.append((channel, message))
            self._tell()

    def _tell(self) -> None:
        if not self._told and self._encoder is not None:
            self._told = True
            self._on_output()
