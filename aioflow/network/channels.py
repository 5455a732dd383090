"""The input channels of a gate, for producers in this process and in other processes.

`LocalInputChannel` reads the producer's own queue, so batches are never copied. If the producer has
not registered its partition yet, `request` returns False. The process calls `request_again` once
the partition is registered. The design follows Flink's LocalInputChannel.

`RemoteInputChannel` has its producer in another process. If the partition is missing there, the
channel asks the JobMaster about the producer before it requests the partition again. Received bytes
wait in the channel until the task polls it; only then are they decoded. The `ConsumerExchange`
handles order, credit and resets. The design follows Flink's RemoteInputChannel.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import Protocol

from aioflow.core.elements import CheckpointBarrier, Event
from aioflow.core.errors import ProducerFailed
from aioflow.core.wire.batch import decode_batch, standing_alone
from aioflow.core.wire.columns import EntryTables
from aioflow.core.wire.serializers import Codec
from aioflow.network.gate import ChannelTraffic
from aioflow.network.local_pool import LocalBufferPool
from aioflow.network.subpartition import PipelinedSubpartition, Polled
from aioflow.protocol.consumer import (
    ConsumerExchange,
    Delivered,
    PriorityEvent,
    partition_request_backoff,
)
from aioflow.protocol.errors import PartitionNotFound

__all__ = [
    "EXCLUSIVE_BUFFERS",
    "FLOATING_BUFFERS",
    "ChannelLink",
    "LocalInputChannel",
    "ProducerState",
    "RemoteInputChannel",
]


class LocalInputChannel:
    """An input channel whose producer is in this process. `index` is the number of the channel in
    its gate.

    `subpartition_provider` returns the subpartition to read, or None while the producer is not
    deployed yet.
    """

    __slots__ = ("_on_data_available", "_provider", "_subpartition", "index", "is_released")

    def __init__(
        self, index: int, subpartition_provider: Callable[[], PipelinedSubpartition | None]
    ) -> None:
        self.index = index
        self.is_released = False
        self._provider = subpartition_provider
        self._subpartition: PipelinedSubpartition | None = None
        self._on_data_available: Callable[[bool], None] | None = None

    def request(self, on_data_available: Callable[[bool], None]) -> bool:
        """Subscribes to the subpartition. Returns False if the partition does not exist yet.

        Idempotent. Has no effect after `release`.
        """
        if self.is_released or self._subpartition is not None:
            return True
        subpartition = self._provider()
        # The provider may have run code that released this channel. A view would then never be
        # closed.
        if subpartition is None or self.is_released:
            self._on_data_available = on_data_available
            return self.is_released
        self._subpartition = subpartition
        subpartition.create_read_view(on_data_available)
        return True

    def request_again(self) -> None:
        """Repeats the request for the partition, which did not exist before and exists now."""
        if self._on_data_available is not None:
            self.request(self._on_data_available)

    def poll(self) -> Polled | None:
        """Returns the next element, or None if there is none.

        Raises ProducerFailed if the producer has failed, or has dropped the partition before it was
        read to the end.
        """
        subpartition = self._subpartition
        if subpartition is None:
            return None
        polled = subpartition.poll()
        if polled is None and subpartition.is_released and not self.is_released:
            raise ProducerFailed(
                f"channel {self.index}: its partition was released before it was read to the end; "
                "the producer was cancelled or failed"
            )
        return polled

    def resume(self) -> None:
        """Continues after a blocking event. Has no effect if the channel is not blocked."""
        if self._subpartition is not None:
            self._subpartition.resume_consumption()

    def acknowledge_all_records_processed(self) -> None:
        """Tells the producer that everything up to EndOfData was processed."""
        if self._subpartition is not None:
            self._subpartition.acknowledge_all_records_processed()

    def announce_batch_size(self, records: int) -> None:
        """Asks the producer for batches of up to `records` records."""
        if self._subpartition is not None:
            self._subpartition.resize(records)

    @property
    def has_priority_event(self) -> bool:
        """Whether the next element is a priority event."""
        return self._subpartition is not None and self._subpartition.has_priority_event

    def overtaken(self) -> list[bytes | Event]:
        """Returns an empty list, because all waiting elements are at the producer, which stores
        them in the checkpoint.
        """
        return []

    def hurry(self, checkpoint_id: int) -> None:
        """Does nothing, because a waiting barrier is at the producer, where it can overtake."""

    def tell_announced(self, on_announced: Callable[[CheckpointBarrier], None]) -> None:
        """Does nothing, because no element waits at the receiver."""

    @property
    def queued_batches(self) -> int:
        """Number of waiting batches."""
        return 0 if self._subpartition is None else self._subpartition.queued_batches

    @property
    def traffic(self) -> ChannelTraffic:
        """Counts of delivered and waiting elements, from the counters of the producer."""
        subpartition = self._subpartition
        if subpartition is None:
            return ChannelTraffic(False, 0, 0, 0, 0)
        queued = subpartition.queued_batches
        return ChannelTraffic(
            False, subpartition.batches_added - queued, 0, queued, subpartition.queued_bytes
        )

    def release(self) -> None:
        """Releases the channel: drops waiting elements and returns their memory. Idempotent."""
        self.is_released = True
        if self._subpartition is not None:
            self._subpartition.release()


EXCLUSIVE_BUFFERS = 2
"""Number of segments that each channel owns, as in Flink: one for a batch in transit, and one for
the previous batch, which waits for the task.
"""

FLOATING_BUFFERS = 30
"""Maximum number of segments per channel that a gate lends to its channels in total.

This is enough for a few columnar batches of a dozen segments each. With fewer segments, the sender
of such a batch would have to wait until the receiver returns the credit of the first frames.
"""

REQUEST_BACKOFF_MS = partition_request_backoff(50, 3_000)
"""Delays in ms before each request for a partition that the producer does not have yet."""


class ProducerState(StrEnum):
    """The answer of the JobMaster about the producer of a missing partition."""

    AWAITED = "awaited"
    """The producer does not run yet: the partition will exist later."""
    RUNNING = "running"
    """The producer runs or has finished, so its partition exists or will exist soon."""
    GONE = "gone"
    """The producer has failed, was cancelled, or was replaced by another attempt."""
    UNKNOWN = "unknown"
    """The JobMaster has not answered, so nothing is known of the producer."""


AskProducer = Callable[[Callable[[ProducerState], None]], None]
"""A function that asks the JobMaster for the state of a producer, and calls its argument with the
answer.
"""


class ChannelLink(Protocol):
    """The methods that a channel uses of the link to the producer's process."""

    @property
    def consumer(self) -> ConsumerExchange: ...
    def add_channel(self, channel: RemoteInputChannel) -> int:
        """Adds `channel`, and returns its number on the link. Its data is passed to
        `channel.on_delivered`.
        """

    def remove_channel(self, number: int) -> None: ...


class RemoteInputChannel:
    """An input channel whose producer is in another process.

    `index` is the number of the channel in its gate. The channel reads the subpartition
    `subpartition_index` of the partition `partition_id` over `link`.
    """

    def __init__(
        self,
        index: int,
        partition_id: str,
        subpartition_index: int,
        link: ChannelLink,
        codec: Codec,
        buffers: LocalBufferPool,
        ask_producer: AskProducer,
    ) -> None:
        """Makes a channel that takes its segments from `buffers`, the pool of the gate.

        `ask_producer` is called when the producer does not have the partition, before the next
        request.
        """
        self.index = index
        self._partition_id = partition_id
        self._subpartition_index = subpartition_index
        self._link = link
        self._codec = codec
        self._buffers = buffers
        self._ask_producer = ask_producer
        self._tables = EntryTables()
        self._number: int | None = None
        self._received: deque[bytes | Event | None] = deque()
        """Received elements in order of arrival. None marks the original position of an event that
        has overtaken other elements.
        """
        self._priority: deque[tuple[Event, list[bytes | Event]]] = deque()
        """Priority events, each with all elements that it has overtaken in this channel.

        If two barriers wait, an element that both have overtaken is listed with both.
        """
        self._overtaken: list[bytes | Event] = []
        self._on_announced: Callable[[CheckpointBarrier], None] | None = None
        self._error: Exception | None = None
        self._notify: Callable[[bool], None] | None = None
        self._sequence_number = 0
        self._batches = 0
        self._batches_taken = 0
        self._bytes_taken = 0
        self._attempt = 0
        self._retry: asyncio.TimerHandle | None = None
        self._is_open = False
        self.is_released = False

    # InputChannel

    def request(self, on_data_available: Callable[[bool], None]) -> bool:
        """Subscribes to the partition. Always returns True, because the channel itself retries if
        the partition is missing.
        """
        if self._number is None and not self.is_released:
            self._notify = on_data_available
            number = self._number = self._link.add_channel(self)
            if self._error is None:  # The link may have failed already, which sets the error.
                for _ in range(EXCLUSIVE_BUFFERS):
                    self._buffers.take_segment()
                self._link.consumer.open_channel(
                    number,
                    self._partition_id,
                    self._subpartition_index,
                    EXCLUSIVE_BUFFERS,
                    self._buffers,
                )
                self._is_open = True
        return True

    def poll(self) -> Polled | None:
        """Decodes and returns the next element, or returns None if there is none.

        Raises the error with which the producer or the connection has ended the channel.
        """
        if self._error is not None:
            raise self._error
        received = self._received
        if self._priority:
            return self._poll_priority()
        if not received:
            return None
        content = received.popleft()
        assert self._number is not None and content is not None
        # Acknowledged before decoding: a batch that cannot be decoded must not hold its memory for
        # ever.
        self._link.consumer.taken_over(self._number)
        if received and received[0] is None:
            self._take_over_places()
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        more = bool(received)
        if type(content) is bytes:
            self._batches -= 1
            self._batches_taken += 1
            self._bytes_taken += len(content)
            return (
                decode_batch(content, self._codec, str(self), self._tables),
                self._batches,
                more,
                number,
            )
        # An Event, by exclusion.
        return content, self._batches, more, number  # type: ignore[return-value]

    def _poll_priority(self) -> Polled:
        event, self._overtaken = self._priority.popleft()
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        return event, self._batches, bool(self._received or self._priority), number

    def resume(self) -> None:
        if self._number is not None:
            self._link.consumer.resume(self._number)

    def acknowledge_all_records_processed(self) -> None:
        if self._number is not None:
            self._link.consumer.acknowledge_all_records_processed(self._number)

    def announce_batch_size(self, records: int) -> None:
        if self._number is not None:
            self._link.consumer.announce_batch_size(self._number, records)

    @property
    def has_priority_event(self) -> bool:
        return bool(self._priority)

    def overtaken(self) -> list[bytes | Event]:
        overtaken, self._overtaken = self._overtaken, []
        return [
            standing_alone(element, self._codec, str(self), self._tables)
            if isinstance(element, bytes)
            else element
            for element in overtaken
        ]

    def hurry(self, checkpoint_id: int) -> None:
        for place, element in enumerate(self._received):
            if isinstance(element, CheckpointBarrier) and element.checkpoint_id == checkpoint_id:
                self._received[place] = None
                self._put_first(element, place)
                return

    def tell_announced(self, on_announced: Callable[[CheckpointBarrier], None]) -> None:
        self._on_announced = on_announced
        for element in self._received:
            if isinstance(element, CheckpointBarrier):
                on_announced(element)

    def _put_first(self, event: Event, place: int) -> None:
        """Makes `event` the next element to poll. `place` is its original position in `_received`.

        The event is acknowledged at its original position, because acknowledgements must be in
        order.
        """
        self._priority.append(
            (event, [element for element in islice(self._received, place) if element is not None])
        )
        self._take_over_places()
        if self._notify is not None:
            self._notify(True)

    def _take_over_places(self) -> None:
        received = self._received
        assert self._number is not None
        while received and received[0] is None:
            received.popleft()
            self._link.consumer.taken_over(self._number)

    @property
    def queued_batches(self) -> int:
        return self._batches

    @property
    def traffic(self) -> ChannelTraffic:
        buffers, floating, ready, known = (
            (0, 0, 0, 0) if self._number is None else self._link.consumer.buffers(self._number)
        )
        waiting = sum(len(element) for element in self._received if type(element) is bytes)
        return ChannelTraffic(
            True,
            self._batches_taken,
            self._bytes_taken,
            self._batches,
            waiting,
            buffers,
            floating,
            buffers - ready,
            known,
        )

    def release(self) -> None:
        if self.is_released:
            return
        self.is_released = True
        if self._retry is not None:
            self._retry.cancel()
        self._received.clear()
        self._priority.clear()
        self._batches = 0
        if self._number is not None:
            self._link.consumer.cancel(self._number)
            self._link.remove_channel(self._number)
        if self._is_open:
            for _ in range(EXCLUSIVE_BUFFERS):
                self._buffers.recycle_segment()

    def __str__(self) -> str:
        return (
            f"channel {self.index} (subpartition {self._subpartition_index} of "
            f"{self._partition_id})"
        )

    # From the link.

    def on_delivered(self, what: Delivered) -> None:
        """Receives a batch as bytes, an event, or the error that ended the channel."""
        if self.is_released:
            return
        if isinstance(what, PartitionNotFound):
            self._ask_producer(partial(self._on_producer_state, what))
            return
        self._take(what)

    def _on_producer_state(self, missing: PartitionNotFound, state: ProducerState) -> None:
        """Requests the missing partition again after a back-off, or ends the channel.

        The channel ends if the producer is gone, or after the last back-off. While the producer
        does not run yet, the number of requests is not limited.
        """
        if self.is_released or self._error is not None:
            return
        last = len(REQUEST_BACKOFF_MS) - 1
        if state is ProducerState.GONE:
            self._take(ProducerFailed(f"the producer of {self._partition_id} is gone: {missing}"))
        elif self._attempt < last or state is ProducerState.AWAITED:
            self._attempt = min(self._attempt + 1, last)
            self._retry = asyncio.get_running_loop().call_later(
                REQUEST_BACKOFF_MS[self._attempt] / 1000, self._request_again
            )
        else:
            self._take(missing)

    def _take(self, what: Delivered) -> None:
        was_empty = not self._received and not self._priority and self._error is None
        if isinstance(what, Exception):
            # The next poll raises it. Earlier elements are of no use to a task that ends now.
            self._error = what
            self._received.clear()
            self._priority.clear()
            self._batches = 0
        elif isinstance(what, PriorityEvent):
            self._received.append(None)
            self._put_first(what.event, len(self._received) - 1)
            return
        else:
            self._received.append(what)
            self._batches += type(what) is bytes
            if type(what) is CheckpointBarrier and self._on_announced is not None:
                self._on_announced(what)
        if was_empty and self._notify is not None:
            self._notify(False)

    def _request_again(self) -> None:
        self._retry = None
        if self._number is not None:
            self._link.consumer.request_again(self._number)
