"""One input of a gate whose producer is in another process. Bytes wait here until the task polls; it decodes them on its own time.

After Flink's RemoteInputChannel. Order, credit and what happens after a reset are the exchange's business.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from aioflow.core.batch_codec import decode_batch
from aioflow.core.elements import Event
from aioflow.core.serializers import Codec
from aioflow.network.subpartition import Polled
from aioflow.protocol.consumer import ConsumerExchange, Delivered, partition_request_backoff
from aioflow.protocol.errors import PartitionNotFound

__all__ = ["EXCLUSIVE_BUFFERS", "ChannelLink", "RemoteInputChannel"]

EXCLUSIVE_BUFFERS = 2
"""Segments of each channel that are its own: one on the way, one being read."""

REQUEST_BACKOFF_MS = partition_request_backoff(50, 3_000)
"""Delays before each request for a partition that the producer does not have yet."""


class ChannelLink(Protocol):
    """The link to the producer's process, as far as a channel needs it."""

    @property
    def consumer(self) -> ConsumerExchange: ...
    def add_channel(self, channel: RemoteInputChannel) -> int:
        """A number for the channel; what arrives for it goes to its `on_delivered`."""

    def remove_channel(self, number: int) -> None: ...


class RemoteInputChannel:
    """Channel `index` of its gate, reading `subpartition_index` of `partition_id` over `link`."""

    def __init__(self, index: int, partition_id: str, subpartition_index: int, link: ChannelLink, codec: Codec) -> None:
        self.index = index
        self._partition_id = partition_id
        self._subpartition_index = subpartition_index
        self._link = link
        self._codec = codec
        self._number: int | None = None
        self._received: deque[bytes | Event] = deque()
        self._error: Exception | None = None
        self._notify: Callable[[bool], None] | None = None
        self._sequence_number = 0
        self._batches = 0
        self._attempt = 0
        self._retry: asyncio.TimerHandle | None = None
        self.is_released = False

    # InputChannel

    def request(self, on_data_available: Callable[[bool], None]) -> bool:
        """Always True: a partition that is not there yet is asked for again from here."""
        if self._number is None and not self.is_released:
            self._notify = on_data_available
            number = self._number = self._link.add_channel(self)
            if self._error is None:  # The link may have failed already.
                self._link.consumer.open_channel(number, self._partition_id, self._subpartition_index, EXCLUSIVE_BUFFERS)
        return True

    def poll(self) -> Polled | None:
        """The next element, decoded now. Raises what the producer or the connection failed with."""
        if self._error is not None:
            raise self._error
        received = self._received
        if not received:
            return None
        content = received.popleft()
        assert self._number is not None
        # Taken over before it is decoded: a batch that cannot be decoded must not hold its permit for ever.
        self._link.consumer.taken_over(self._number)
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        more = bool(received)
        if type(content) is bytes:
            self._batches -= 1
            return decode_batch(content, self._codec, str(self)), self._batches, more, number
        return content, self._batches, more, number  # type: ignore[return-value]  # By exclusion an Event.

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
        """Priority events are not sent over a connection."""
        return False

    @property
    def queued_batches(self) -> int:
        return self._batches

    def release(self) -> None:
        if self.is_released:
            return
        self.is_released = True
        if self._retry is not None:
            self._retry.cancel()
        self._received.clear()
        self._batches = 0
        if self._number is not None:
            self._link.consumer.cancel(self._number)
            self._link.remove_channel(self._number)

    def __str__(self) -> str:
        return f"channel {self.index} (subpartition {self._subpartition_index} of {self._partition_id})"

    # From the link.

    def on_delivered(self, what: Delivered) -> None:
        """A batch as bytes, an event, or the error that ended the channel."""
        if self.is_released:
            return
        if isinstance(what, PartitionNotFound) and self._attempt + 1 < len(REQUEST_BACKOFF_MS):
            self._attempt += 1
            self._retry = asyncio.get_running_loop().call_later(REQUEST_BACKOFF_MS[self._attempt] / 1000, self._request_again)
            return
        was_empty = not self._received and self._error is None
        if isinstance(what, Exception):
            # It comes out at the next poll: what was received before it is of no use to a task that ends now.
            self._error = what
            self._received.clear()
            self._batches = 0
        else:
            self._received.append(what)
            self._batches += type(what) is bytes
        if was_empty and self._notify is not None:
            self._notify(False)

    def _request_again(self) -> None:
        self._retry = None
        if self._number is not None:
            self._link.consumer.request_again(self._number)
