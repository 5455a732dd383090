"""The state of one channel at its producer: the sent frames that are kept, and the frames to send
next.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from itertools import islice, takewhile
from typing import Final, NamedTuple, Protocol

from aioflow.core.elements import Event, RecordBatch
from aioflow.core.wire.batch import decode_event, encode_event
from aioflow.protocol.credit import CreditSender, NextElement
from aioflow.protocol.framing import SEGMENT_BYTES, FrameType
from aioflow.protocol.messages import ErrorResponse, PartitionRequest

__all__ = ["PAYLOAD_BYTES_MAX", "Outlet", "SentFrame", "SubpartitionView"]

PREFIX: Final = struct.Struct(">BI")
"""Format of the bytes before the payload of a data or event frame: flags, and the backlog after
this frame.
"""

FLAG_CONTINUES = 1
"""Flag: the next data frame of the channel continues the same batch."""
FLAG_BLOCKING = 2
"""Flag: the channel is blocked after this event."""
FLAG_PRIORITY = 4
"""Flag: this event has overtaken the elements at the producer, and overtakes the elements at the
consumer.

The event may come in the middle of a batch.
"""

PAYLOAD_BYTES_MAX = SEGMENT_BYTES - PREFIX.size
"""Maximum size in bytes of the payload of one frame. A longer batch spans several frames."""

UNACKNOWLEDGED_EVENTS_MAX = 1024
"""Maximum number of sent events that the consumer has not taken over.

Events need no credit, but a consumer that takes no events over must not fill the producer's memory.
"""

_DATA, _EVENT = FrameType.BUFFER_RESPONSE, FrameType.EVENT_RESPONSE


class SubpartitionView(Protocol):
    """The interface of a channel's queue: `network.subpartition.PipelinedSubpartition`."""

    def create_read_view(
        self,
        on_data_available: Callable[[bool], None],
        *,
        acknowledges: bool = False,
        unsent: Callable[[], list[bytes | Event]] | None = None,
    ) -> None:
        """Registers a callback for when the queue becomes non-empty, fails, or is released.

        The callback gets True for a priority event, which must be polled at once. Raises Closed for
        a second reader. With `acknowledges` the reader will call `taken_over` for each batch.
        `unsent` returns the polled elements that the reader has not sent yet.
        """

    def poll(self) -> tuple[RecordBatch | Event, int, bool, int] | None:
        """Returns the next element, the backlog after it, whether more elements are available, and
        the element's number. Returns None if there is no element.

        Raises ProducerFailed if the producer has failed.
        """

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
        """Notes that the consumer has taken over the oldest polled batch, and returns the memory of
        this batch.
        """

    def resize(self, records: int) -> None:
        """Limits batches to `records` records from now on."""

    def resume_consumption(self) -> None: ...
    def acknowledge_all_records_processed(self) -> None: ...
    def release(self) -> None: ...


class SentFrame(NamedTuple):
    """A sent frame. Sent frames are kept so that they can be encoded again for another
    connection.
    """

    sequence: int
    type: FrameType
    flags: int
    backlog: int
    payload: bytes | memoryview
    ends_batch: bool
    """Whether the frame is the last one of a batch. When it is taken over, the memory of the batch
    is returned.
    """


def _is_priority(sent: SentFrame) -> bool:
    return sent.flags & FLAG_PRIORITY != 0


class Outlet:
    """The state of one channel at its producer."""

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
        "unsent",
        "view",
    )

    def __init__(
        self,
        channel: int,
        request: PartitionRequest,
        view: SubpartitionView,
        encode: Callable[[RecordBatch], bytes],
    ) -> None:
        self.channel = channel
        self.partition = request.partition_id, request.subpartition_index
        self.view = view
        self.encode = encode
        self.credit = CreditSender(request.credit)
        self.kept: deque[SentFrame] = deque()
        """Frames sent on this connection that the consumer has not taken over: the retransmit
        buffer.
        """
        self.kept_events = 0
        self.unsent: deque[SentFrame] = deque()
        """Frames to send before the next element is polled.

        These are the remaining frames of a batch, or frames of a lost connection.
        """
        self.next_sequence = 0
        self.acknowledged = 0
        self.blocking_sequence: int | None = None
        self.end_sequence: int | None = None
        self.error: ErrorResponse | None = None
        """Error with which the channel has failed, otherwise None. After an error, all other
        attributes are meaningless.
        """
        self.has_data = False
        self.is_ready = False
        self.is_closed = False
        self.is_detached = False

    @property
    def sent_sequence(self) -> int:
        """The sequence number of the next frame to send."""
        return self.unsent[0].sequence if self.unsent else self.next_sequence

    def unsent_elements(self) -> list[bytes | Event]:
        """Returns the batches and events in `unsent` that a priority event would overtake now,
        oldest first.

        A partly sent batch is included as a whole.
        """
        elements: list[bytes | Event] = []
        for sent in self.unsent:
            payload = sent.payload
            if sent.flags & FLAG_PRIORITY:
                continue
            if sent.type is _EVENT:
                elements.append(decode_event(payload, f"channel {self.channel}"))
            elif sent.ends_batch:
                # The object that was encoded, because it also knows what its bytes refer to.
                # A view of bytes.
                elements.append(
                    payload if isinstance(payload, bytes) else payload.obj  # type: ignore[arg-type]
                )
        return elements

    def put_first(self, event: Event, backlog: int) -> None:
        """Inserts `event` in `unsent` behind other priority events, before everything else.

        Renumbers the frames behind the event, which is possible because they were not sent on this
        connection.
        """
        urgent = list(takewhile(_is_priority, self.unsent))
        sequence = self.sent_sequence + len(urgent)
        behind = deque(
            sent._replace(sequence=sent.sequence + 1)
            for sent in islice(self.unsent, len(urgent), None)
        )
        if self.blocking_sequence is not None and self.blocking_sequence >= sequence:
            self.blocking_sequence += 1
        if self.end_sequence is not None and self.end_sequence >= sequence:
            self.end_sequence += 1
        behind.appendleft(
            SentFrame(sequence, _EVENT, FLAG_PRIORITY, backlog, encode_event(event), False)
        )
        behind.extendleft(reversed(urgent))
        self.unsent = behind
        self.next_sequence += 1

    def can_send(self) -> bool:
        """Returns whether a frame may be sent now. Also returns True if the next poll will raise an
        error.
        """
        if self.is_closed or self.is_detached or self.error is not None:
            return False
        if self.unsent:
            queued = NextElement.DATA if self.unsent[0].type is _DATA else NextElement.EVENT
        elif not self.has_data:
            return False
        elif self.credit.is_blocked:
            # Only this side's resume unblocks the view, so the view failed or was released.
            return not self.view.is_blocked
        else:
            # Without a batch in the queue there is an event, or an error.
            queued = (
                NextElement.EVENT
                if self.view.next_is_event or self.view.backlog == 0
                else NextElement.DATA
            )
        if queued is NextElement.EVENT and self.kept_events >= UNACKNOWLEDGED_EVENTS_MAX:
            return False
        return self.credit.next_element(queued) is not NextElement.NONE
