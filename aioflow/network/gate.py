"""The input of one task: merges its channels fairly, one element at a time, without blocking.

A FIFO queue holds the channels that have data, each at most once. A channel that was polled and has
more data goes to the end of the queue. So while all channels have data, none gets more than one
element ahead of another. A channel with a priority event goes to the front. A channel whose last
element was a blocking event, or that was blocked by `block`, is not in the FIFO until it is
resumed. The output depends only on the order of arrivals. Notifications of channels are direct
calls, so they are never late, out of order or outdated.

`availability` is set while the FIFO is not empty, and for ever once the gate is finished or closed.
It may be set although no element can be polled, but it is always set if one can. Nothing in this
module awaits. The design follows Flink's SingleInputGate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol

from aioflow.core.availability import Availability
from aioflow.core.elements import CheckpointBarrier, EndOfData, EndOfPartition, Event, RecordBatch
from aioflow.core.errors import Broken, Closed
from aioflow.network.batch_size import BufferDebloater
from aioflow.network.local_pool import LocalBufferPool
from aioflow.network.subpartition import Polled

__all__ = ["ChannelTraffic", "EndOfDataStatus", "InputChannel", "InputGate", "SharedAvailability"]


class ChannelTraffic(NamedTuple):
    """Counts for one channel: elements that were delivered since the channel was made, and elements
    that wait.

    Batches of a local channel occupy no buffers.
    """

    is_remote: bool
    batches: int
    bytes: int
    queued_batches: int
    queued_bytes: int
    buffers: int = 0
    """Number of buffers granted to the producer, including filled ones."""
    floating: int = 0
    """Number of granted buffers that are borrowed from the gate's pool."""
    buffers_filled: int = 0
    credits: int = 0
    """Number of buffers that were announced to the producer and have not been filled yet."""


class InputChannel(Protocol):
    """The interface of the channels of a gate, local or remote."""

    def request(self, on_data_available: Callable[[bool], None]) -> bool:
        """Subscribes to the producer. Returns False if its partition does not exist yet.

        Idempotent. The callback gets False when the channel becomes non-empty, is resumed while it
        has data, or fails. The callback gets True when a priority event arrives, even if there was
        data before.
        """
        ...

    def poll(self) -> Polled | None:
        """Returns (element, backlog, whether more is available, sequence number), or None if there
        is no element.

        Raises ProducerFailed if the producer has failed, Broken if the connection to its process is
        lost.
        """
        ...

    def resume(self) -> None:
        """Continues after a blocking event. Has no effect if the channel is not blocked, or is
        released.
        """
        ...

    def acknowledge_all_records_processed(self) -> None:
        """Tells the producer that everything up to EndOfData was processed."""
        ...

    def announce_batch_size(self, records: int) -> None:
        """Asks the producer for batches of up to `records` records."""
        ...

    @property
    def has_priority_event(self) -> bool:
        """Whether the next element is a priority event."""
        ...

    def overtaken(self) -> list[bytes | Event]:
        """Returns the elements that the last polled priority event has overtaken at the receiver,
        oldest first.

        The list is empty if all overtaken elements are at the producer.
        """
        ...

    def hurry(self, checkpoint_id: int) -> None:
        """Lets the barrier of checkpoint `checkpoint_id`, if it waits at the receiver, overtake the
        elements before it.
        """
        ...

    def tell_announced(self, on_announced: Callable[[CheckpointBarrier], None]) -> None:
        """Sets the callback for checkpoint barriers that wait at the receiver.

        Calls `on_announced` at once for each barrier that waits already.
        """
        ...

    @property
    def queued_batches(self) -> int:
        """Number of batches that wait at the receiver."""
        ...

    @property
    def traffic(self) -> ChannelTraffic:
        """Counts of delivered and waiting elements of the channel, for monitoring."""
        ...

    def release(self) -> None:
        """Releases the channel. Idempotent."""
        ...


class EndOfDataStatus(Enum):
    """Whether the channels of a gate have reached the end of their records."""

    NOT_REACHED = "not reached"
    """Some channel may still deliver records."""
    DRAINED = "drain"
    """All channels have reached the end of their records by draining, so event time is over."""
    STOPPED = "stop"
    """All channels have reached the end of their records, at least one because the job is stopped.
    Windows stay open for a restart.
    """


class SharedAvailability(Availability):
    """The availability of a task with several gates: it is set while at least one gate has data."""

    __slots__ = ("_parts_up",)

    def __init__(self) -> None:
        super().__init__()
        self._parts_up = 0

    def part_up(self) -> None:
        """Notes that one gate has data."""
        self._parts_up += 1
        if not self.is_available:
            self.set_available()

    def part_down(self) -> None:
        """Notes that one gate has no more data."""
        self._parts_up -= 1
        if self._parts_up == 0:
            self.set_unavailable()


class InputGate:
    """Merges `channels`. The index of a channel is its position in that list.

    `availability` may be shared with other gates of the task. A shared availability ignores gates
    that have finished. Without `availability` the gate has an availability of its own, which stays
    set after the end. The gate owns `buffers`, the memory of channels from other processes.
    """

    __slots__ = (
        "_blocked",
        "_brings_rows",
        "_channels",
        "_debloater",
        "_end_of_data",
        "_finished",
        "_held",
        "_is_up",
        "_lower",
        "_now_s",
        "_on_priority",
        "_priority_count",
        "_queued",
        "_raise",
        "_ready",
        "_rows_max",
        "_shared",
        "_unfinished",
        "availability",
        "buffers",
        "is_closed",
    )

    def __init__(
        self,
        channels: Sequence[InputChannel],
        availability: SharedAvailability | None = None,
        buffers: LocalBufferPool | None = None,
    ) -> None:
        count = len(channels)
        self._channels = list(channels)
        self.buffers = buffers
        self._ready: deque[int] = deque()
        self._queued = [False] * count
        self._blocked = [False] * count
        """For each channel, whether `block` has blocked it. Blocking events are not counted,
        because a channel itself handles these.
        """
        self._held = [False] * count
        """For each channel, whether it has data and is blocked by `block`."""
        self._finished = [False] * count
        self._end_of_data: dict[int, bool] = {}
        self._unfinished = count
        self._priority_count = 0
        self._debloater: BufferDebloater | None = None
        self._brings_rows = True  # Whether the last batch was a batch of rows.
        self._rows_max = 0
        self._on_priority: Callable[[], None] | None = None
        self._now_s: Callable[[], float] = float
        self.is_closed = False
        self._is_up = False
        self._shared = availability is not None
        self.availability: Availability
        self._raise: Callable[[], None]
        self._lower: Callable[[], None]
        if availability is not None:
            self.availability = availability
            self._raise, self._lower = availability.part_up, availability.part_down
        else:
            self.availability = own = Availability()
            self._raise, self._lower = own.set_available, own.set_unavailable
        self.request_partitions()
        if count == 0:
            self._finish()

    def poll(self) -> tuple[int, RecordBatch | Event] | None:
        """Returns (channel index, element) of the next channel in turn, or None if there is no
        data.

        Raises Closed after `close`, and any error of a channel. After ProducerFailed, the caller
        should cancel the task instead of failing it, because the failure of the producer is
        reported already.
        """
        ready = self._ready
        while ready:
            index = ready.popleft()
            self._queued[index] = False
            if self._priority_count:
                self._priority_count -= 1
            try:
                polled = self._channels[index].poll()
            except Broken:
                # A failed channel stays at the head, so that the next poll finds the failure again
                # and does not wait for ever.
                self._queued[index] = True
                ready.appendleft(index)
                raise
            if polled is None:
                continue
            element, _, more, _ = polled
            if more:
                self._queued[index] = True
                ready.append(index)
            elif not ready and self._is_up:
                self._is_up = False
                self._lower()
            # One type comparison per batch; isinstance would cost twice as much for the same
            # narrowing.
            if type(element) is RecordBatch:
                debloater = self._debloater
                self._brings_rows = type(element.values) is list
                if (
                    debloater is not None
                    and (size := debloater.took(self._now_s(), len(element.values))) is not None
                ):
                    self._announce(size)
                return index, element
            self._on_event(index, element)
            return index, element
        if self.is_closed:
            raise Closed("input gate was polled after it was closed; its task is over")
        if self._debloater is not None and self._debloater.is_active:
            self._debloater.idle(self._now_s())
        if self._is_up:
            self._is_up = False
            self._lower()
        return None

    def debloat(
        self, records_max: int, now_s: Callable[[], float], rows_max: int | None = None
    ) -> None:
        """Enables debloating: asks the producers for the batch size that suits this task.

        Producers make columnar batches of up to `records_max` records, and batches of rows of up to
        `rows_max`. `now_s` returns the time in seconds.
        """
        self._rows_max = records_max if rows_max is None else rows_max
        self._debloater = BufferDebloater(len(self._channels), records_max)
        self._now_s = now_s

    def stalled(self) -> None:
        """Asks the producers for the smallest batches, because the task cannot process its input at
        present.
        """
        if self._debloater is not None and self._debloater.stalled():
            self._announce(self._debloater.records)

    def tell_priority(
        self,
        on_priority: Callable[[], None],
        on_announced: Callable[[int, CheckpointBarrier], None],
    ) -> None:
        """Sets the callbacks for priority events, and calls them at once for events that wait
        already.

        `on_priority` is called when a priority event can be polled. `on_announced(index, barrier)`
        is called when a barrier waits in channel `index` at the receiver. `hurry` can then let this
        barrier overtake the elements before it.
        """
        self._on_priority = on_priority
        for index, channel in enumerate(self._channels):
            channel.tell_announced(partial(on_announced, index))
        if self._priority_count:
            on_priority()

    @property
    def has_priority_event(self) -> bool:
        """Whether the next `poll` returns a priority event."""
        return (
            self._priority_count > 0
            and bool(self._ready)
            and self._channels[self._ready[0]].has_priority_event
        )

    def overtaken(self, index: int) -> list[bytes | Event]:
        """Returns the elements that the last polled priority event of channel `index` has overtaken
        at the receiver.
        """
        return self._channels[index].overtaken()

    def hurry(self, index: int, checkpoint_id: int) -> None:
        """Lets the barrier of checkpoint `checkpoint_id`, if it waits in channel `index` at the
        receiver, overtake the elements before it.
        """
        self._channels[index].hurry(checkpoint_id)

    def block(self, index: int) -> None:
        """Stops polling channel `index` until `resume`."""
        self._blocked[index] = True
        if self._queued[index]:
            if self._ready.index(index) < self._priority_count:
                self._priority_count -= 1
            self._ready.remove(index)
            self._queued[index] = False
            self._held[index] = True
            if not self._ready and self._is_up:
                self._is_up = False
                self._lower()

    def resume(self, index: int) -> None:
        """Continues with channel `index`, after `block` or a blocking event.

        Has no effect if the channel is not blocked.
        """
        self._blocked[index] = False
        self._channels[index].resume()
        if self._held[index]:
            self._held[index] = False
            self._on_data(index, self._channels[index].has_priority_event)

    def request_partitions(self) -> list[int]:
        """Subscribes to every partition. Returns the indices of channels whose partition does not
        exist yet.

        Idempotent. The caller must subscribe these channels again once their partitions exist.
        """
        return [
            index
            for index, channel in enumerate(self._channels)
            if not self._finished[index] and not channel.request(partial(self._on_data, index))
        ]

    @property
    def is_finished(self) -> bool:
        """Whether every channel delivered EndOfPartition."""
        return self._unfinished == 0

    @property
    def has_received_end_of_data(self) -> EndOfDataStatus:
        """Whether all channels have reached the end of their records, and whether by draining or by
        a stop.
        """
        if len(self._end_of_data) < len(self._channels):
            return EndOfDataStatus.NOT_REACHED
        return (
            EndOfDataStatus.DRAINED if all(self._end_of_data.values()) else EndOfDataStatus.STOPPED
        )

    @property
    def channel_count(self) -> int:
        return len(self._channels)

    @property
    def queued_batches(self) -> int:
        """Total number of batches that wait in the channels."""
        return sum(channel.queued_batches for channel in self._channels)

    def traffic(self) -> list[ChannelTraffic]:
        """Returns the counts of delivered and waiting elements of each channel."""
        return [channel.traffic for channel in self._channels]

    @property
    def batch_records(self) -> int:
        """The batch size in records for which this gate has last asked its producers.

        The value is 0 without debloating. If the last batch was a batch of rows, the value is at
        most the limit for rows.
        """
        if self._debloater is None:
            return 0
        return (
            min(self._debloater.records, self._rows_max)
            if self._brings_rows
            else self._debloater.records
        )

    @property
    def records_per_s(self) -> float:
        """Number of records that the task processes per second of work; 0.0 before the first
        measurement.
        """
        return 0.0 if self._debloater is None else self._debloater.records_per_s

    def close(self) -> None:
        """Releases every channel and wakes waiters; `poll` raises Closed from here on.

        Idempotent.
        """
        if self.is_closed:
            return
        self.is_closed = True
        for channel in self._channels:
            channel.release()
        if self.buffers is not None:
            self.buffers.destroy()
        self._ready.clear()
        if not self._is_up:
            self._raise()

    def _on_data(self, index: int, priority: bool) -> None:
        if self._finished[index] or self.is_closed:
            return
        if self._blocked[index]:
            self._held[index] = True
            return
        if priority:
            self._to_front(index)
        elif not self._queued[index]:
            self._queued[index] = True
            self._ready.append(index)
        if not self._is_up:
            self._is_up = True
            self._raise()

    def _announce(self, records: int) -> None:
        for index, channel in enumerate(self._channels):
            if not self._finished[index]:
                channel.announce_batch_size(records)

    def _to_front(self, index: int) -> None:
        """Moves channel `index` in front of all channels without priority events."""
        ready = self._ready
        if self._queued[index]:
            if ready.index(index) < self._priority_count:
                return
            ready.remove(index)
        self._queued[index] = True
        ready.insert(self._priority_count, index)
        self._priority_count += 1
        if self._on_priority is not None:
            self._on_priority()

    def _on_event(self, index: int, event: RecordBatch | Event) -> None:
        match event:
            case EndOfData():
                self._end_of_data[index] = event.drain
                self._channels[index].acknowledge_all_records_processed()
            case EndOfPartition():
                # After its last element the channel is not in the FIFO, and the notice of its
                # release is ignored.
                self._finished[index] = True
                self._channels[index].release()
                self._unfinished -= 1
                if self._debloater is not None:
                    self._debloater.share_among(self._unfinished)
                if self._unfinished == 0:
                    self._finish()
            case _:
                if self._queued[index] and self._channels[index].has_priority_event:
                    self._to_front(index)

    def _finish(self) -> None:
        """Sets the gate's own availability for ever, so that a waiting task notices the end.

        A shared availability is not set, because it depends on the other gates now.
        """
        if not self._shared:
            self._raise()
