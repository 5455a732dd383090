"""The producer's side of every logical channel of one connection: what may be sent next, and what may be forgotten.

Channels with something to send stand in a ready queue, each at most once, and take turns: a turn is one batch, one event, or one
segment of a batch that does not fit into one frame. Nobody ever scans all channels. Invariants:

* a data frame leaves only with credit, an event without; behind a blocking event nothing leaves until the consumer resumes;
* what was sent is kept until the consumer has *taken it over*, which AddCredit tells: so what is kept never exceeds the buffers
  that the consumer granted, plus few events, and after a reset the channel goes on exactly where the consumer is;
* a batch holds its permit from the moment it leaves the queue until it was taken over: queued and kept batches together never
  exceed the pool of the partition by more than its overdraft. (Held only while queued, the window of each channel would come on top.)

A channel that fails ends alone: its consumer gets the error as data. After PartitionRequestQueue and
CreditBasedSequenceNumberingViewReader of Flink; keeping sent frames for a resume is not theirs.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from typing import Final, NamedTuple, Protocol

from aioflow.core.batch_codec import decode_event, encode_event
from aioflow.core.elements import EndOfPartition, Event, RecordBatch
from aioflow.core.errors import LocalProtocolError, ProducerFailed, RemoteProtocolError
from aioflow.core.serializers import Codec
from aioflow.protocol.credit import CreditSender, NextElement
from aioflow.protocol.errors import PartitionNotFound, describe_error
from aioflow.protocol.framing import NO_CHANNEL, SEGMENT_BYTES, Frame, FrameEncoder, FrameType
from aioflow.protocol.messages import (
    CREDIT_MAX,
    AckAllUserRecordsProcessed,
    AddCredit,
    BacklogAnnouncement,
    CancelPartitionRequest,
    CloseRequest,
    ErrorResponse,
    Message,
    NewBufferSize,
    PartitionRequest,
    ResumeConsumption,
    TaskEvent,
    decode_message,
    encode_message,
)

__all__ = ["PAYLOAD_BYTES_MAX", "ProducerExchange", "RetainedPermits", "SubpartitionView"]

PREFIX: Final = struct.Struct(">BI")
"""What is in front of the payload of data and events: flags, and the backlog behind it."""

FLAG_CONTINUES = 1
"""The next data frame of the channel goes on with the same batch."""
FLAG_BLOCKING = 2
"""The channel is blocked behind this event."""
FLAG_PRIORITY = 4
"""This event has overtaken what its channel held at the producer, and overtakes what it holds at the consumer. It may come in the middle
of a batch."""

PAYLOAD_BYTES_MAX = SEGMENT_BYTES - PREFIX.size
"""A longer batch spans several frames."""

UNACKNOWLEDGED_EVENTS_MAX = 1024
"""Events need no credit; but a consumer that takes nothing over shall not make the producer keep ever more of them."""

_DATA, _EVENT = FrameType.BUFFER_RESPONSE, FrameType.EVENT_RESPONSE


class SubpartitionView(Protocol):
    """The queue that a channel reads: `network.subpartition.PipelinedSubpartition`, or batches that are encoded already."""

    def create_read_view(
        self,
        on_data_available: Callable[[bool], None],
        *,
        acknowledges: bool = False,
        unsent: Callable[[], list[bytes | Event]] | None = None,
    ) -> None:
        """Call back when the queue turns from empty to not empty, fails, or is released; with True when a priority event has come that
        is to be polled at once. Closed for a second reader.

        `acknowledges`: `taken_over` is called for each batch. `unsent` gives what was polled and is not sent yet.
        """

    def poll(self) -> tuple[RecordBatch | bytes | Event, int, bool, int] | None:
        """(element, backlog behind it, is more available, its number) or None. Raises ProducerFailed."""

    @property
    def has_priority_event(self) -> bool: ...
    @property
    def next_is_event(self) -> bool: ...
    @property
    def backlog(self) -> int: ...
    @property
    def is_blocked(self) -> bool: ...
    @property
    def is_released(self) -> bool: ...
    def taken_over(self) -> None:
        """The consumer took over the oldest batch that was polled."""

    def resize(self, records: int) -> None:
        """Batches of up to so many records from now on."""

    def resume_consumption(self) -> None: ...
    def acknowledge_all_records_processed(self) -> None: ...
    def release(self) -> None: ...


class RetainedPermits(Protocol):
    """The pool of the partition; `channel` is the index of the subpartition."""

    def take_permit(self, channel: int = 0) -> None: ...
    def recycle(self, channel: int = 0) -> None: ...


class _Sent(NamedTuple):
    """A frame as it is kept: encoded again if it has to go over another connection."""

    sequence: int
    type: FrameType
    flags: int
    backlog: int
    payload: bytes | memoryview
    ends_batch: bool
    """The last one of its batch: the permit goes back with it."""


def _is_priority(sent: _Sent) -> bool:
    return sent.flags & FLAG_PRIORITY != 0


class _Outlet:
    """One channel."""

    __slots__ = (
        "acknowledged",
        "blocking_sequence",
        "channel",
        "credit",
        "encode",
        "end_sequence",
        "error",
        "has_data",
        "is_closed",
        "is_detached",
        "is_ready",
        "kept",
        "kept_events",
        "next_sequence",
        "partition",
        "permits",
        "unsent",
        "view",
    )

    def __init__(
        self,
        channel: int,
        request: PartitionRequest,
        view: SubpartitionView,
        encode: Callable[[RecordBatch], bytes],
        permits: RetainedPermits | None,
    ) -> None:
        self.channel = channel
        self.partition = request.partition_id, request.subpartition_index
        self.view = view
        self.encode = encode
        self.permits = permits
        self.credit = CreditSender(request.initial_credit)
        self.kept: deque[_Sent] = deque()
        """Sent over this connection and not taken over: the retransmit buffer."""
        self.kept_events = 0
        self.unsent: deque[_Sent] = deque()
        """To be sent before the view is asked: the rest of a batch, or what was sent over a connection that was lost."""
        self.next_sequence = 0
        self.acknowledged = 0
        self.blocking_sequence: int | None = None
        self.end_sequence: int | None = None
        self.error: ErrorResponse | None = None
        """Why it failed; nothing else is left then."""
        self.has_data = False
        self.is_ready = False
        self.is_closed = False
        self.is_detached = False

    @property
    def sent_sequence(self) -> int:
        """The sequence of the next frame to be sent."""
        return self.unsent[0].sequence if self.unsent else self.next_sequence

    def unsent_elements(self) -> list[bytes | Event]:
        """The batches and events that a priority event overtakes now, oldest first; a batch of which some has left is one of them,
        whole.
        """
        elements: list[bytes | Event] = []
        for sent in self.unsent:
            payload = sent.payload
            if sent.flags & FLAG_PRIORITY:
                continue
            if sent.type is _EVENT:
                elements.append(decode_event(payload, f"channel {self.channel}"))
            elif sent.ends_batch:
                elements.append(payload if isinstance(payload, bytes) else bytes(payload.obj))
        return elements

    def put_first(self, event: Event, backlog: int) -> None:
        """`event` leaves next, behind others of its kind and in front of what else was polled before it. Nothing of that was sent, so it
        is free to be numbered anew.
        """
        urgent = list(takewhile(_is_priority, self.unsent))
        sequence = self.sent_sequence + len(urgent)
        behind = deque(sent._replace(sequence=sent.sequence + 1) for sent in islice(self.unsent, len(urgent), None))
        if self.blocking_sequence is not None and self.blocking_sequence >= sequence:
            self.blocking_sequence += 1
        if self.end_sequence is not None and self.end_sequence >= sequence:
            self.end_sequence += 1
        behind.appendleft(_Sent(sequence, _EVENT, FLAG_PRIORITY, backlog, encode_event(event), False))
        behind.extendleft(reversed(urgent))
        self.unsent = behind
        self.next_sequence += 1

    def can_send(self) -> bool:
        """May a frame leave now? Also true for an error that is to be found by polling."""
        if self.is_closed or self.is_detached or self.error is not None:
            return False
        if self.unsent:
            queued = NextElement.DATA if self.unsent[0].type is _DATA else NextElement.EVENT
        elif not self.has_data:
            return False
        elif self.credit.is_blocked:
            # Only who resumes unblocks the view, and that is this side: the view failed, or was released.
            return not self.view.is_blocked
        else:
            # Without a batch in the queue there is an event, or an error.
            queued = NextElement.EVENT if self.view.next_is_event or self.view.backlog == 0 else NextElement.DATA
        if queued is NextElement.EVENT and self.kept_events >= UNACKNOWLEDGED_EVENTS_MAX:
            return False
        return self.credit.next_element(queued) is not NextElement.NONE


class ProducerExchange:
    """The channels that the peer reads. Outlives a connection: `attach` and `connection_lost` say when there is one.

    `on_output` is called, at most once until the next `data_to_send`, when there is something to send.
    """

    def __init__(self, codec: Codec, on_output: Callable[[], None]) -> None:
        self._codec = codec
        self._on_output = on_output
        self._encoder: FrameEncoder | None = None
        self._outlets: dict[int, _Outlet] = {}
        self._ready: deque[_Outlet] = deque()
        self._messages: deque[tuple[int, Message]] = deque()
        self._told = False

    # The connection.

    def attach(self, encoder: FrameEncoder) -> None:
        """There is a new connection. Each channel goes on once the consumer asks for it again."""
        self.connection_lost()
        self._encoder = encoder

    def connection_lost(self) -> None:
        """Nothing can be sent, and what was on the way may be lost. Idempotent."""
        self._encoder = None
        self._messages.clear()
        for outlet in self._ready:
            outlet.is_ready = False
        self._ready.clear()
        for outlet in self._outlets.values():
            outlet.is_detached = True
            outlet.credit.reset(0, outlet.credit.is_blocked)

    def abandon_detached(self) -> None:
        """Release the channels that were not asked for again: their consumer is gone, or had read them to the end.

        The peer says when it has asked for all; call it when there will be no further connection.
        """
        for outlet in [outlet for outlet in self._outlets.values() if outlet.is_detached]:
            self._close(outlet)

    def close(self) -> None:
        """Release all channels. Idempotent."""
        for outlet in list(self._outlets.values()):
            self._close(outlet)

    # What arrives.

    def receive(self, frame: Frame) -> list[tuple[int, PartitionRequest | TaskEvent | CloseRequest]]:
        """Returns what is for the owner: a request for a channel that is new here (answer it with `on_partition_request`,
        `partition_not_found` or `refuse`), or a message for the producing task.

        RemoteProtocolError for a malformed body. What breaks the rules of one channel only ends that channel.
        """
        channel = frame.channel
        message = decode_message(frame.type, frame.body)
        outlet = self._outlets.get(channel)
        if isinstance(message, PartitionRequest) and outlet is None:
            return [(channel, message)]
        if channel == NO_CHANNEL and isinstance(message, CancelPartitionRequest):
            self.abandon_detached()
            return []
        if isinstance(message, CloseRequest):
            self.close()
            return [(NO_CHANNEL, message)]
        # Anything else for a channel that is not here has crossed its end.
        if outlet is None or (outlet.error is not None and not isinstance(message, PartitionRequest | CancelPartitionRequest)):
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
                case TaskEvent():
                    return [(channel, message)]
                case _:
                    raise RemoteProtocolError(f"a {type(message).__name__} is nothing that a consumer sends")
        except RemoteProtocolError as error:
            self._fail(outlet, error)
        return []

    def on_partition_request(
        self,
        channel: int,
        request: PartitionRequest,
        view: SubpartitionView,
        encode: Callable[[RecordBatch], bytes],
        permits: RetainedPermits | None = None,
    ) -> None:
        """Read `view` for `channel`. With `permits` each batch takes one of the partition's pool until it was taken over.

        If it cannot be read, because it has a reader or was read before, the consumer of this channel gets the error.
        """
        if channel in self._outlets:
            raise LocalProtocolError(f"channel {channel} is read already; requests for known channels do not come out of `receive`")
        if request.resume_from:
            name = f"subpartition {request.subpartition_index} of {request.partition_id}"
            self.refuse(channel, ProducerFailed(f"{name} cannot go on at {request.resume_from}: it is not known here any more"))
            return
        outlet = self._outlets[channel] = _Outlet(channel, request, view, encode, permits)
        outlet.credit.reset(request.credit, blocked=False)
        try:
            view.create_read_view(
                lambda priority: self._on_data_available(outlet, priority), acknowledges=True, unsent=outlet.unsent_elements
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this channel only.
            # Not released: it may well have another reader.
            del self._outlets[channel]
            outlet.is_closed = True
            self.refuse(channel, error)

    def partition_not_found(self, channel: int, partition_id: str) -> None:
        """Tell the consumer to ask again later."""
        self.refuse(channel, PartitionNotFound(f"partition {partition_id} is not registered at its producer"))

    def refuse(self, channel: int, error: BaseException) -> None:
        """Answer a request with an error; NO_CHANNEL ends all channels of the connection."""
        self._post(channel, describe_error(error, self._codec))

    # What leaves.

    @property
    def has_output(self) -> bool:
        """Would `data_to_send` return something?"""
        return self._encoder is not None and bool(self._messages or self._ready)

    def data_to_send(self, max_bytes: int) -> list[bytes | memoryview]:
        """Returns pieces to write in this order: about `max_bytes`, at least one frame if there is one. Batches are not copied."""
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
            except Exception as error:  # noqa: BLE001 - the producer failed, or a value cannot travel: its consumer must know.
                self._fail(outlet, error)
            self._schedule(outlet)
        return out

    @property
    def channels(self) -> Sequence[int]:
        """The channels that are open."""
        return list(self._outlets)

    def kept_frames(self, channel: int) -> int:
        """Data frames of a channel that were sent and not taken over: never more than the consumer granted."""
        outlet = self._outlets.get(channel)
        return 0 if outlet is None else len(outlet.kept) - outlet.kept_events

    # One channel.

    def _send_one(self, outlet: _Outlet, encoder: FrameEncoder, out: list[bytes | memoryview]) -> int:
        """Sends the next frame of `outlet`; returns its payload's size."""
        if not outlet.unsent and not self._poll(outlet):
            return 0
        sent = outlet.unsent.popleft()
        sequence, kind, flags, backlog, payload, _ = sent
        # Kept first: whatever happens now, the permit is found here.
        outlet.kept.append(sent)
        if kind is _DATA:
            outlet.credit.send_data(backlog)
        else:
            outlet.credit.send_event(backlog, blocking=bool(flags & FLAG_BLOCKING))
            outlet.kept_events += 1
        out += encoder.encode_parts(kind, outlet.channel, sequence, PREFIX.pack(flags, backlog), payload)
        return len(payload) + PREFIX.size

    def _poll(self, outlet: _Outlet) -> bool:
        """Turns the next element of the view into frames. False if there is none."""
        view, permits, index = outlet.view, outlet.permits, outlet.partition[1]
        # The pool of a partition that was released is gone; then `poll` has nothing, and that is what the consumer must hear.
        holds_permit = permits is not None and not view.is_released
        if holds_permit and permits is not None:
            # Before `poll` gives the queue's own back, so that the pool does not look free in between.
            permits.take_permit(index)
        try:
            polled = view.poll()
            if polled is None:
                outlet.has_data = False
                if view.is_released:
                    raise ProducerFailed(f"subpartition {index} of {outlet.partition[0]} was released before it was read to the end")
                return False
            element, backlog, outlet.has_data, _ = polled
            if type(element) is RecordBatch:
                self._add_batch(outlet, outlet.encode(element), backlog)
                holds_permit = False
            elif type(element) is bytes:
                self._add_batch(outlet, element, backlog)
                holds_permit = False
            else:
                self._add_event(outlet, element, backlog, view.is_blocked)  # type: ignore[arg-type]  # By exclusion an Event.
            return True
        finally:
            if holds_permit and permits is not None:
                permits.recycle(index)

    def _add_batch(self, outlet: _Outlet, payload: bytes, backlog: int) -> None:
        sequence = outlet.next_sequence
        if len(payload) <= PAYLOAD_BYTES_MAX:
            outlet.unsent.append(_Sent(sequence, _DATA, 0, backlog, payload, True))
            outlet.next_sequence = sequence + 1
            return
        view = memoryview(payload)
        starts = range(0, len(payload), PAYLOAD_BYTES_MAX)
        behind = len(starts) - 1
        for start in starts:
            flags = FLAG_CONTINUES if behind else 0
            part = view[start : start + PAYLOAD_BYTES_MAX]
            outlet.unsent.append(_Sent(sequence, _DATA, flags, backlog + behind, part, not behind))
            sequence += 1
            behind -= 1
        outlet.next_sequence = sequence

    def _add_event(self, outlet: _Outlet, event: Event, backlog: int, blocking: bool) -> None:
        sequence = outlet.next_sequence
        if blocking:
            outlet.blocking_sequence = sequence
        if type(event) is EndOfPartition:
            outlet.end_sequence = sequence
        flags = FLAG_BLOCKING if blocking else 0
        outlet.unsent.append(_Sent(sequence, _EVENT, flags, 0 if blocking else backlog, encode_event(event), False))
        outlet.next_sequence = sequence + 1

    def _on_add_credit(self, outlet: _Outlet, message: AddCredit) -> None:
        if outlet.is_detached:
            raise RemoteProtocolError("AddCredit came before the channel was requested on this connection")
        if message.taken_over > outlet.sent_sequence:
            raise RemoteProtocolError(
                f"AddCredit says that all below {message.taken_over} was taken over, but only {outlet.sent_sequence} elements were sent"
            )
        if outlet.credit.credit + len(outlet.kept) + message.credit > CREDIT_MAX:
            raise RemoteProtocolError(f"AddCredit of {message.credit} buffers makes more than {CREDIT_MAX} of one channel")
        self._forget(outlet, message.taken_over)
        if outlet.end_sequence is not None and message.taken_over > outlet.end_sequence:
            self._close(outlet)
            return
        if message.credit:
            outlet.credit.add_credit(message.credit)
        self._schedule(outlet)

    def _resume(self, outlet: _Outlet, request: PartitionRequest) -> None:
        """The consumer asks again: over a new connection, or because it did not hear the answer."""
        if outlet.error is not None:
            self._post(outlet.channel, outlet.error)
            return
        if (request.partition_id, request.subpartition_index) != outlet.partition:
            raise RemoteProtocolError(f"channel {outlet.channel} was requested for another partition than before; cancel it first")
        start = request.resume_from
        if not outlet.acknowledged <= start <= outlet.sent_sequence:
            raise RemoteProtocolError(
                f"channel {outlet.channel} cannot go on at {start}: {outlet.acknowledged} to {outlet.sent_sequence} are possible"
            )
        self._forget(outlet, start)
        outlet.unsent.extendleft(reversed(outlet.kept))
        outlet.kept.clear()
        outlet.kept_events = 0
        was_received = outlet.blocking_sequence is not None and outlet.blocking_sequence < start
        outlet.is_detached = False
        # A blocking event that has to be sent again blocks again by itself.
        outlet.credit.reset(request.credit, blocked=was_received)
        if was_received and not request.blocked:
            # The consumer resumed, and the message was lost. Its credit is newer than that.
            self._resume_consumption(outlet)
            outlet.credit.reset(request.credit, blocked=False)
        self._schedule(outlet)

    def _resume_consumption(self, outlet: _Outlet) -> None:
        if not outlet.credit.is_blocked:
            return
        outlet.blocking_sequence = None
        outlet.credit.resume()
        outlet.view.resume_consumption()
        self._schedule(outlet)

    def _on_data_available(self, outlet: _Outlet, priority: bool) -> None:
        outlet.has_data = True
        if priority and outlet.error is None and not outlet.is_closed:
            # Now: what is polled already must not leave before it, and what it overtook was told to the producer just now.
            while outlet.view.has_priority_event and (polled := outlet.view.poll()) is not None:
                event, backlog, outlet.has_data, _ = polled
                outlet.put_first(event, backlog)  # type: ignore[arg-type]  # A priority event, as the view says.
        self._schedule(outlet)

    def _schedule(self, outlet: _Outlet) -> None:
        """Into the ready queue, at its end, if something may leave; otherwise tell a consumer without buffers what waits."""
        if outlet.is_ready or outlet.is_closed:
            return
        if outlet.can_send():
            outlet.is_ready = True
            self._ready.append(outlet)
            self._tell()
        elif outlet.credit.initial_credit == 0 and not outlet.is_detached and outlet.error is None:
            # Sequences of the rest of a batch count as its frames; without credit there is no event among them.
            backlog = outlet.credit.backlog_to_announce(outlet.view.backlog + len(outlet.unsent))
            if backlog:
                self._post(outlet.channel, BacklogAnnouncement(min(backlog, CREDIT_MAX)))

    def _forget(self, outlet: _Outlet, taken_over: int) -> None:
        """Elements below `taken_over` will never be asked for again."""
        if taken_over <= outlet.acknowledged:
            return
        outlet.acknowledged = taken_over
        kept, permits, index = outlet.kept, outlet.permits, outlet.partition[1]
        for frames in (kept, outlet.unsent):
            while frames and frames[0].sequence < taken_over:
                sent = frames.popleft()
                if sent.type is _EVENT and frames is kept:
                    outlet.kept_events -= 1
                if sent.ends_batch:
                    if permits is not None:
                        permits.recycle(index)
                    outlet.view.taken_over()

    def _fail(self, outlet: _Outlet, error: BaseException) -> None:
        """Ends `outlet` with `error` for its consumer. The entry stays until the consumer has heard of it."""
        outlet.error = describe_error(error, self._codec)
        self._drop(outlet)
        self._post(outlet.channel, outlet.error)

    def _close(self, outlet: _Outlet) -> None:
        """Ends `outlet`: nobody reads it any more."""
        if self._outlets.pop(outlet.channel, None) is not None:
            outlet.is_closed = True
            self._drop(outlet)

    def _drop(self, outlet: _Outlet) -> None:
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
