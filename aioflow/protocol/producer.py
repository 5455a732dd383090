"""The producer's side of all channels of one connection.

Channels with output are in a ready queue, each at most once, and take turns. So no code has to scan
all channels. In a turn a channel sends one batch, one event, or one segment of a batch that does
not fit into one frame. Invariants:

* a data frame needs credit, an event does not. After a blocking event no frame leaves until the
  consumer resumes;
* sent frames are kept until the consumer has *taken them over*, as AddCredit reports. So the number
  of kept frames never exceeds the number of buffers that the consumer granted, plus a limited
  number of events. After a reset the channel continues exactly at the consumer's position;
* the subpartition keeps the memory of a batch until the consumer has taken the batch over. So
  queued and kept batches together never exceed the pool of the partition by more than its
  overdraft.

If a channel fails, only this channel ends, and its consumer gets the error as data. The design
follows PartitionRequestQueue and CreditBasedSequenceNumberingViewReader of Flink, which keep no
sent frames for a resume.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from aioflow.core.elements import EndOfPartition, Event, RecordBatch
from aioflow.core.errors import Broken, LocalProtocolError, ProducerFailed, RemoteProtocolError
from aioflow.core.wire.batch import encode_event
from aioflow.core.wire.serializers import Codec
from aioflow.protocol.errors import PartitionNotFound, describe_error
from aioflow.protocol.framing import NO_CHANNEL, Frame, FrameEncoder, FrameType
from aioflow.protocol.messages import (
    CREDIT_MAX,
    AckAllUserRecordsProcessed,
    AddCredit,
    CancelPartitionRequest,
    CloseRequest,
    Message,
    NewBufferSize,
    PartitionRequest,
    ResumeConsumption,
    decode_message,
    encode_message,
)
from aioflow.protocol.outlet import (
    FLAG_BLOCKING,
    FLAG_CONTINUES,
    PAYLOAD_BYTES_MAX,
    PREFIX,
    Outlet,
    SentFrame,
    SubpartitionView,
)

__all__ = ["ProducerExchange"]

_DATA, _EVENT = FrameType.BUFFER_RESPONSE, FrameType.EVENT_RESPONSE


class ProducerExchange:
    """The channels that the peer reads. They outlive the connection; see `attach`.

    `on_output` is called when there is output, at most once until the next `data_to_send`.
    """

    def __init__(self, codec: Codec, on_output: Callable[[], None]) -> None:
        self._codec = codec
        self._on_output = on_output
        self._encoder: FrameEncoder | None = None
        self._outlets: dict[int, Outlet] = {}
        self._ready: deque[Outlet] = deque()
        self._messages: deque[tuple[int, Message]] = deque()
        self._told = False

    # The connection.

    def attach(self, encoder: FrameEncoder) -> None:
        """Continues on a new connection, whose frames `encoder` writes.

        Each channel sends again once the consumer has requested it on this connection.
        """
        self.connection_lost()
        self._encoder = encoder

    def connection_lost(self) -> None:
        """Stops sending; data in transit may be lost. Idempotent."""
        self._encoder = None
        self._messages.clear()
        for outlet in self._ready:
            outlet.is_ready = False
        self._ready.clear()
        for outlet in self._outlets.values():
            outlet.is_detached = True
            outlet.credit.reset(0, outlet.credit.is_blocked)

    def abandon_detached(self) -> None:
        """Releases the channels that were not requested on the new connection, because their
        consumers are gone or have finished.

        Called when the peer has signalled that it has requested all its channels, or if no further
        connection will come.
        """
        for outlet in [outlet for outlet in self._outlets.values() if outlet.is_detached]:
            self._close(outlet)

    def close(self) -> None:
        """Releases all channels. Idempotent."""
        for outlet in list(self._outlets.values()):
            self._close(outlet)

    # Receiving.

    def receive(self, frame: Frame) -> list[tuple[int, PartitionRequest | CloseRequest]]:
        """Handles a received frame. Returns requests for the owner of this object, as pairs
        (channel, message).

        The owner answers a PartitionRequest by `on_partition_request`, `partition_not_found` or
        `refuse`. This method itself refuses a channel that cannot continue because this side gave
        it up. Raises RemoteProtocolError for a malformed body. A protocol violation in one channel
        ends only that channel.
        """
        channel = frame.channel
        message = decode_message(frame.type, frame.body)
        outlet = self._outlets.get(channel)
        if isinstance(message, PartitionRequest) and outlet is None:
            if message.resume_from:
                self.refuse(channel, _forgotten(message))
                return []
            return [(channel, message)]
        if channel == NO_CHANNEL and isinstance(message, CancelPartitionRequest):
            self.abandon_detached()
            return []
        if isinstance(message, CloseRequest):
            self.close()
            return [(NO_CHANNEL, message)]
        # A message for an unknown channel was in transit when the channel ended.
        if outlet is None or (
            outlet.error is not None
            and not isinstance(message, PartitionRequest | CancelPartitionRequest)
        ):
            return []
        try:
            match message:
                case AddCredit():
                    self._on_add_credit(outlet, message)
                case PartitionRequest():
                    self._resume(outlet, message)
                case ResumeConsumption():
                    self._resume_consumption(outlet)
                case AckAllUserRecordsProcessed():
                    outlet.view.acknowledge_all_records_processed()
                case CancelPartitionRequest():
                    self._close(outlet)
                case NewBufferSize():
                    outlet.view.resize(message.records)
                case _:
                    raise RemoteProtocolError(f"a consumer never sends a {type(message).__name__}")
        except RemoteProtocolError as error:
            self._fail(outlet, error)
        return []

    def on_partition_request(
        self,
        channel: int,
        request: PartitionRequest,
        view: SubpartitionView,
        encode: Callable[[RecordBatch], bytes],
    ) -> None:
        """Starts to send the elements of `view` to `channel`.

        `encode` encodes a batch. If `view` has or had a reader already, the consumer of this
        channel gets an error.
        """
        if channel in self._outlets:
            raise LocalProtocolError(
                f"channel {channel} is read already; requests for known channels do not come out "
                "of `receive`"
            )
        if view.is_released:
            self.refuse(channel, _forgotten(request))
            return
        outlet = self._outlets[channel] = Outlet(channel, request, view, encode)
        outlet.credit.reset(request.credit, blocked=False)
        try:
            view.create_read_view(
                lambda priority: self._on_data_available(outlet, priority),
                acknowledges=True,
                unsent=outlet.unsent_elements,
            )
        except Exception as error:  # noqa: BLE001 - any error concerns only this channel.
            # The view is not released, because it may have another reader.
            del self._outlets[channel]
            outlet.is_closed = True
            self.refuse(channel, error)

    def partition_not_found(self, channel: int, partition_id: str) -> None:
        """Answers the request of `channel`: the partition does not exist yet. The consumer will ask
        again later.
        """
        self.refuse(
            channel,
            PartitionNotFound(f"partition {partition_id} is not registered at its producer"),
        )

    def refuse(self, channel: int, error: BaseException) -> None:
        """Answers the request of `channel` with an error. With NO_CHANNEL as `channel`, the error
        ends all channels of the connection.
        """
        self._post(channel, describe_error(error, self._codec))

    # Sending.

    @property
    def has_output(self) -> bool:
        """Whether `data_to_send` would return anything."""
        return self._encoder is not None and bool(self._messages or self._ready)

    def data_to_send(self, max_bytes: int) -> list[bytes | memoryview]:
        """Returns the pieces to write, in order: about `max_bytes`, but at least one frame if there
        is output.

        Does not copy batches.
        """
        self._told = False
        out: list[bytes | memoryview] = []
        encoder = self._encoder
        if encoder is None:
            return out
        total = 0
        messages, ready = self._messages, self._ready
        while messages and total < max_bytes:
            channel, message = messages.popleft()
            content = encode_message(encoder, message, channel)
            total += len(content)
            out.append(content)
        while ready and total < max_bytes:
            outlet = ready.popleft()
            outlet.is_ready = False
            try:
                total += self._send_one(outlet, encoder, out)
            except LocalProtocolError:
                raise
            # The producer failed, or a value cannot travel: its consumer must know.
            except Exception as error:  # noqa: BLE001
                self._fail(outlet, error)
            self._schedule(outlet)
        return out

    @property
    def channels(self) -> Sequence[int]:
        """Numbers of the open channels."""
        return list(self._outlets)

    def kept_frames(self, channel: int) -> int:
        """Returns the number of sent data frames of a channel that the consumer has not taken over.

        The number never exceeds the granted credit.
        """
        outlet = self._outlets.get(channel)
        return 0 if outlet is None else len(outlet.kept) - outlet.kept_events

    # One channel.

    def _send_one(
        self, outlet: Outlet, encoder: FrameEncoder, out: list[bytes | memoryview]
    ) -> int:
        """Appends the next frame of `outlet` to `out`. Returns the size of its payload in bytes."""
        if not outlet.unsent and not self._poll(outlet):
            return 0
        sent = outlet.unsent.popleft()
        sequence, kind, flags, backlog, payload, _ = sent
        # Kept before it is encoded, so that its memory is released also after an error.
        outlet.kept.append(sent)
        if kind is _DATA:
            outlet.credit.send_data(backlog)
        else:
            outlet.credit.send_event(backlog, blocking=bool(flags & FLAG_BLOCKING))
            outlet.kept_events += 1
        out += encoder.encode_parts(
            kind, outlet.channel, sequence, PREFIX.pack(flags, backlog), payload
        )
        return len(payload) + PREFIX.size

    def _poll(self, outlet: Outlet) -> bool:
        """Converts the next element in the queue of `outlet` into frames. Returns False if there is
        no element.
        """
        view = outlet.view
        polled = view.poll()
        if polled is None:
            outlet.has_data = False
            if view.is_released:
                raise ProducerFailed(
                    f"subpartition {outlet.partition[1]} of {outlet.partition[0]} was released "
                    "before it was read to the end"
                )
            return False
        element, backlog, outlet.has_data, _ = polled
        if type(element) is RecordBatch:
            try:
                payload = outlet.encode(element)
            except BaseException:
                view.taken_over()
                raise
            self._add_batch(outlet, payload, backlog)
        else:
            # An Event, by exclusion.
            self._add_event(outlet, element, backlog, view.is_blocked)  # type: ignore[arg-type]
        return True

    def _add_batch(self, outlet: Outlet, payload: bytes, backlog: int) -> None:
        sequence = outlet.next_sequence
        if len(payload) <= PAYLOAD_BYTES_MAX:
            outlet.unsent.append(SentFrame(sequence, _DATA, 0, backlog, payload, True))
            outlet.next_sequence = sequence + 1
            return
        view = memoryview(payload)
        starts = range(0, len(payload), PAYLOAD_BYTES_MAX)
        behind = len(starts) - 1
        for start in starts:
            flags = FLAG_CONTINUES if behind else 0
            part = view[start : start + PAYLOAD_BYTES_MAX]
            outlet.unsent.append(
                SentFrame(sequence, _DATA, flags, backlog + behind, part, not behind)
            )
            sequence += 1
            behind -= 1
        outlet.next_sequence = sequence

    def _add_event(self, outlet: Outlet, event: Event, backlog: int, blocking: bool) -> None:
        sequence = outlet.next_sequence
        if blocking:
            outlet.blocking_sequence = sequence
        if type(event) is EndOfPartition:
            outlet.end_sequence = sequence
        flags = FLAG_BLOCKING if blocking else 0
        outlet.unsent.append(
            SentFrame(
                sequence, _EVENT, flags, 0 if blocking else backlog, encode_event(event), False
            )
        )
        outlet.next_sequence = sequence + 1

    def _on_add_credit(self, outlet: Outlet, message: AddCredit) -> None:
        if outlet.is_detached:
            raise RemoteProtocolError(
                "AddCredit came before the channel was requested on this connection"
            )
        if message.taken_over > outlet.sent_sequence:
            raise RemoteProtocolError(
                f"AddCredit says that all below {message.taken_over} was taken over, but only "
                f"{outlet.sent_sequence} elements were sent"
            )
        if outlet.credit.credit + len(outlet.kept) + message.credit > CREDIT_MAX:
            raise RemoteProtocolError(
                f"AddCredit of {message.credit} buffers makes more than {CREDIT_MAX} of one channel"
            )
        self._forget(outlet, message.taken_over)
        if outlet.end_sequence is not None and message.taken_over > outlet.end_sequence:
            self._close(outlet)
            return
        if message.credit:
            outlet.credit.add_credit(message.credit)
        self._schedule(outlet)

    def _resume(self, outlet: Outlet, request: PartitionRequest) -> None:
        """Handles a repeated request for a channel.

        The consumer repeats a request on a new connection, or if it did not get the answer.
        """
        if outlet.error is not None:
            self._post(outlet.channel, outlet.error)
            return
        if (request.partition_id, request.subpartition_index) != outlet.partition:
            raise RemoteProtocolError(
                f"channel {outlet.channel} was requested for another partition than before; "
                "cancel it first"
            )
        start = request.resume_from
        if not outlet.acknowledged <= start <= outlet.sent_sequence:
            raise RemoteProtocolError(
                f"channel {outlet.channel} cannot go on at {start}: {outlet.acknowledged} to "
                f"{outlet.sent_sequence} are possible"
            )
        self._forget(outlet, start)
        outlet.unsent.extendleft(reversed(outlet.kept))
        outlet.kept.clear()
        outlet.kept_events = 0
        was_received = outlet.blocking_sequence is not None and outlet.blocking_sequence < start
        outlet.is_detached = False
        # A blocking event that is sent again blocks again by itself.
        outlet.credit.reset(request.credit, blocked=was_received)
        if was_received and not request.blocked:
            # The consumer resumed, and that message was lost. Its credit is newer.
            self._resume_consumption(outlet)
            outlet.credit.reset(request.credit, blocked=False)
        self._schedule(outlet)

    def _resume_consumption(self, outlet: Outlet) -> None:
        if not outlet.credit.is_blocked:
            return
        outlet.blocking_sequence = None
        outlet.credit.resume()
        outlet.view.resume_consumption()
        self._schedule(outlet)

    def _on_data_available(self, outlet: Outlet, priority: bool) -> None:
        outlet.has_data = True
        if priority and outlet.error is None and not outlet.is_closed:
            # Sent at once. Polled elements must not leave before the event, and the producer has
            # just recorded the elements that it overtook.
            while outlet.view.has_priority_event and (polled := outlet.view.poll()) is not None:
                event, backlog, outlet.has_data, _ = polled
                # A priority event, as the view says.
                outlet.put_first(event, backlog)  # type: ignore[arg-type]
        self._schedule(outlet)

    def _schedule(self, outlet: Outlet) -> None:
        """Adds `outlet` to the ready queue if it can send."""
        if not outlet.is_ready and outlet.can_send():
            outlet.is_ready = True
            self._ready.append(outlet)
            self._tell()

    def _forget(self, outlet: Outlet, taken_over: int) -> None:
        """Drops the frames with a sequence number below `taken_over`, which will never be requested
        again.
        """
        if taken_over <= outlet.acknowledged:
            return
        outlet.acknowledged = taken_over
        kept = outlet.kept
        for frames in (kept, outlet.unsent):
            while frames and frames[0].sequence < taken_over:
                sent = frames.popleft()
                if sent.type is _EVENT and frames is kept:
                    outlet.kept_events -= 1
                if sent.ends_batch:
                    outlet.view.taken_over()

    def _fail(self, outlet: Outlet, error: BaseException) -> None:
        """Ends `outlet`, and sends `error` to its consumer.

        The outlet stays until the consumer has received the error.
        """
        outlet.error = describe_error(error, self._codec)
        self._drop(outlet)
        self._post(outlet.channel, outlet.error)

    def _close(self, outlet: Outlet) -> None:
        """Ends and removes `outlet`, because its consumer does not read it any more."""
        if self._outlets.pop(outlet.channel, None) is not None:
            outlet.is_closed = True
            self._drop(outlet)

    def _drop(self, outlet: Outlet) -> None:
        self._forget(outlet, outlet.next_sequence)
        outlet.credit.close()
        if outlet.is_ready:
            outlet.is_ready = False
            self._ready.remove(outlet)
        outlet.view.release()

    def _post(self, channel: int, message: Message) -> None:
        if self._encoder is not None:
            self._messages.append((channel, message))
            self._tell()

    def _tell(self) -> None:
        if not self._told and self._encoder is not None:
            self._told = True
            self._on_output()


def _forgotten(request: PartitionRequest) -> Broken:
    """Returns the error for a consumer that requests its channel after this side gave it up.

    The error is not a ProducerFailed, which would mean that the failure of a producer was reported
    already. In this case the consumer has to report the failure.
    """
    name = f"subpartition {request.subpartition_index} of {request.partition_id}"
    return Broken(
        f"{name} cannot go on at element {request.resume_from}: its producer has given up this "
        "consumer, or has ended"
    )
