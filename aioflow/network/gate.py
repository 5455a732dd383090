"""The input of one task: merges its channels fairly, one element at a time, without blocking.

A FIFO holds the channels that have something, each at most once. A polled channel that has more
goes to the tail, so while all have data no channel is ever more than one element ahead of another;
one with a priority event goes to the front. A channel whose last element was a blocking event, or
that was blocked by hand, is not in the FIFO until it is resumed. What comes out depends on the
order of arrivals and nothing else. Notifications are direct calls: they never arrive late or out of
order, so there is no outdated one to recognise.

`availability` is level-triggered: up while the FIFO is not empty, and for ever once finished or
closed. It may be up in vain; it is never down while something can be polled. Nothing here awaits.
After Flink's SingleInputGate.
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
from aioflow.network.debloat import BufferDebloater
from aioflow.network.subpartition import Polled

__all__ = ["ChannelTraffic", "EndOfDataStatus", "InputChannel", "InputGate", "SharedAvailability"]


class ChannelTraffic(NamedTuple):
    """What a channel has brought since it was made, and what of it waits.

    A batch of this process has no bytes, and fills no buffer.
    """

    is_remote: bool
    batches: int
    bytes: int
    queued_batches: int
    queued_bytes: int
    buffers: int = 0
    """That the producer may fill, filled ones included."""
    buffers_filled: int = 0
    credits: int = 0
    """Buffers that the producer knows of and has not filled yet, as far as it is known here."""


class InputChannel(Protocol):
    """What the gate needs of a channel, local or remote."""

    def request(self, on_data_available: Callable[[bool], None]) -> bool:
        """Subscribe to the producer; False if its partition does not exist yet. Idempotent.

        The callback is made when the channel turns from empty to not empty, was resumed with
        something waiting, or failed; with True when a priority event came, even if there was
        something already.
        """
        ...

    def poll(self) -> Polled | None:
        """(element, backlog, more available, sequence number), or None.

        Raises ProducerFailed or Broken.
        """
        ...

    def resume(self) -> None:
        """Go on after a blocking event; nothing if the channel is not blocked, or released."""
        ...

    def acknowledge_all_records_processed(self) -> None:
        """Tell the producer that everything up to EndOfData was processed."""
        ...

    def announce_batch_size(self, records: int) -> None:
        """Ask the producer for batches of up to so many records."""
        ...

    @property
    def has_priority_event(self) -> bool:
        """Is the next element a priority event?"""
        ...

    def overtaken(self) -> list[bytes | Event]:
        """What waits on this side that the last priority event was polled ahead of, oldest first.
        Empty where all that waits does so at the producer.
        """
        ...

    def hurry(self, checkpoint_id: int) -> None:
        """Let the barrier of this checkpoint, if it waits on this side, overtake what is in
        front of it.
        """
        ...

    def tell_announced(self, on_announced: Callable[[CheckpointBarrier], None]) -> None:
        """Call back when a barrier comes that may wait on this side only for some time; at once
        for one that waits already.
        """
        ...

    @property
    def queued_batches(self) -> int:
        """Batches that wait on this side."""
        ...

    @property
    def traffic(self) -> ChannelTraffic:
        """What it has brought so far, for whoever watches."""
        ...

    def release(self) -> None:
        """No more interest. Idempotent."""
        ...


class EndOfDataStatus(Enum):
    """What the channels of a gate said about the end of their records."""

    NOT_REACHED = "not reached"
    """Some channel may still bring records."""
    DRAINED = "drain"
    """All ended, and every one by draining: event time is over."""
    STOPPED = "stop"
    """All ended, and at least one keeps its windows open for a restart."""


class SharedAvailability(Availability):
    """Up while at least one of several gates is: one future for a task with several inputs."""

    __slots__ = ("_parts_up",)

    def __init__(self) -> None:
        super().__init__()
        self._parts_up = 0

    def part_up(self) -> None:
        """One gate has something."""
        self._parts_up += 1
        if not self.is_available:
            self.set_available()

    def part_down(self) -> None:
        """One gate has nothing any more."""
        self._parts_up -= 1
        if self._parts_up == 0:
            self.set_unavailable()


class InputGate:
    """Merges `channels`; their position is their index. `availability` is shared with other gates
    of the task, or its own.

    A gate that finished leaves a shared availability: the others decide. Its own stays up.
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
        "is_closed",
    )

    def __init__(
        self, channels: Sequence[InputChannel], availability: SharedAvailability | None = None
    ) -> None:
        count = len(channels)
        self._channels = list(channels)
        self._ready: deque[int] = deque()
        self._queued = [False] * count
        self._blocked = [False] * count
        """Blocked by `block`; a blocking event is kept by the channel itself."""
        self._held = [False] * count
        """Has something, but is blocked by `block`."""
        self._finished = [False] * count
        self._end_of_data: dict[int, bool] = {}
        self._unfinished = count
        self._priority_count = 0
        self._debloater: BufferDebloater | None = None
        self._brings_rows = True  # Of the batch that came last.
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
        """(channel index, element) of the next channel in turn, or None when nothing is there.

        Raises Closed after `close`, and whatever a channel failed with (ProducerFailed: cancel, do
        not fail).
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
                # A failed channel stays at the head: whoever looks again finds the failure, not the
                # silence after it.
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
            # One comparison of types a batch; isinstance would cost twice as much and narrow the
            # same.
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
        """From now on keep asking the producers, whose batches have up to `records_max`, those of
        rows `rows_max`, for the size that suits this task."""
        self._rows_max = records_max if rows_max is None else rows_max
        self._debloater = BufferDebloater(len(self._channels), records_max)
        self._now_s = now_s

    def tell_priority(
        self,
        on_priority: Callable[[], None],
        on_announced: Callable[[int, CheckpointBarrier], None],
    ) -> None:
        """Call `on_priority` whenever a priority event may be polled, and `on_announced(index,
        barrier)` when a barrier that may overtake later waits in channel `index` on this side; at
        once if there is one.
        """
        self._on_priority = on_priority
        for index, channel in enumerate(self._channels):
            channel.tell_announced(partial(on_announced, index))
        if self._priority_count:
            on_priority()

    @property
    def has_priority_event(self) -> bool:
        """Is what `poll` gives next a priority event?"""
        return (
            self._priority_count > 0
            and bool(self._ready)
            and self._channels[self._ready[0]].has_priority_event
        )

    def overtaken(self, index: int) -> list[bytes | Event]:
        """What the priority event that channel `index` gave last has overtaken on this side."""
        return self._channels[index].overtaken()

    def hurry(self, index: int, checkpoint_id: int) -> None:
        """Let a barrier that waits in channel `index` on this side overtake what is in front of
        it.
        """
        self._channels[index].hurry(checkpoint_id)

    def block(self, index: int) -> None:
        """Poll nothing more from channel `index` until `resume`."""
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
        """Go on with channel `index`, blocked by hand or by a blocking event.

        Nothing if it is not blocked.
        """
        self._blocked[index] = False
        self._channels[index].resume()
        if self._held[index]:
            self._held[index] = False
            self._on_data(index, self._channels[index].has_priority_event)

    def resume_all(self) -> None:
        """`resume` every channel, in the order of their indices."""
        for index in range(len(self._channels)):
            self.resume(index)

    def request_partitions(self) -> list[int]:
        """Subscribe to every partition; the indices of those that do not exist yet.

        Idempotent: call it again later.
        """
        return [
            index
            for index, channel in enumerate(self._channels)
            if not self._finished[index] and not channel.request(partial(self._on_data, index))
        ]

    @property
    def is_finished(self) -> bool:
        """Every channel delivered EndOfPartition."""
        return self._unfinished == 0

    @property
    def has_received_end_of_data(self) -> EndOfDataStatus:
        """Did every channel say EndOfData, and did all of them drain?"""
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
        """Batches that wait in all channels."""
        return sum(channel.queued_batches for channel in self._channels)

    def traffic(self) -> list[ChannelTraffic]:
        """What each channel has brought so far."""
        return [channel.traffic for channel in self._channels]

    @property
    def batch_records(self) -> int:
        """Records that a batch has now at most: as many as the producers were asked for last, of
        rows no more than they ever have; 0 before anybody asked."""
        if self._debloater is None:
            return 0
        return (
            min(self._debloater.records, self._rows_max)
            if self._brings_rows
            else self._debloater.records
        )

    @property
    def records_per_s(self) -> float:
        """How fast the task works on what comes through here; 0.0 until that is known."""
        return 0.0 if self._debloater is None else self._debloater.records_per_s

    def is_channel_finished(self, index: int) -> bool:
        """Did channel `index` deliver EndOfPartition?"""
        return self._finished[index]

    def close(self) -> None:
        """Release every channel and free whoever waits; `poll` raises Closed from here on.

        Idempotent.
        """
        if self.is_closed:
            return
        self.is_closed = True
        for channel in self._channels:
            channel.release()
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
        """Behind the other channels with priority events, before all others."""
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
                # The last element: the channel is not in the FIFO, and the notice of its release is
                # not heard.
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
        """Its own availability stays up for ever, so that a waiter sees the end; a shared one is
        left to the others.
        """
        if not self._shared:
            self._raise()
