"""The input of a task that reads other tasks' output: batches from gates.

Two or more logical inputs are read in turn, one batch each. Watermarks of all channels go through
one valve, which also maps the watermarks inside a batch. After Flink's
StreamMultipleInputProcessor.

If one input is to be read first, the sources of the other inputs wait (`cluster.split_discovery`).
So no data of the other inputs arrives before that input has ended or is idle, and this module need
not hold any back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from aioflow.checkpoint.completed import ChannelSide
from aioflow.core.elements import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    CancelCheckpointMarker,
    CheckpointAnnouncement,
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    Event,
    LatencyMarker,
    RecordBatch,
    Watermark,
    WatermarkStatus,
    empty_batch,
)
from aioflow.core.errors import ProducerFailed
from aioflow.network.gate import EndOfDataStatus, InputGate, SharedAvailability
from aioflow.operators.valve import ChannelTime, StatusWatermarkValve
from aioflow.task.barriers import InputBarriers
from aioflow.task.input import InputStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflow.core.availability import Availability
    from aioflow.network.gate import InputChannel
    from aioflow.network.local_pool import LocalBufferPool
    from aioflow.task.barriers import BarrierListener
    from aioflow.task.channel_state import (
        ChannelStateCapture,
        ChannelStateLog,
        RestoredChannelState,
    )
    from aioflow.task.input import InputConsumer

__all__ = ["GateInput", "InputEdge", "NetworkInput"]


class InputEdge(NamedTuple):
    """The channels that a task reads over one edge."""

    channels: Sequence[InputChannel]
    input_index: int
    """The logical input of the edge."""
    edge_id: int = -1
    may_be_overtaken: bool = False
    """Whether barriers may overtake the data of this edge."""
    buffers: LocalBufferPool | None = None
    """Buffer pool of the channels from other processes."""


class GateInput(msgspec.Struct):
    """The gate of one edge, its logical input, and the position of its channels in the valve."""

    gate: InputGate
    input_index: int
    first_channel: int
    edge_id: int
    may_be_overtaken: bool


class NetworkInput:
    """The input of a task that reads other tasks' output, with one gate for each edge."""

    def __init__(self, edges: Sequence[InputEdge], consumer: InputConsumer) -> None:
        self._availability = SharedAvailability()
        self._inputs: list[GateInput] = []
        channels = 0
        for edge in edges:
            gate = InputGate(edge.channels, self._availability, edge.buffers)
            self._inputs.append(
                GateInput(gate, edge.input_index, channels, edge.edge_id, edge.may_be_overtaken)
            )
            channels += len(edge.channels)
        self._channels = channels
        self._valve = StatusWatermarkValve(channels)
        self._consumer = consumer
        self._turn = 0
        self._logical = sorted({part.input_index for part in self._inputs})
        self._ended: set[int] = set()
        self._stopped: set[int] = set()
        """Channels that ended without draining."""
        self._first: int | None = None
        """The input that is read first; None once it has been read."""
        self._on_first_read: Callable[[], None]
        self._barriers: InputBarriers | None = None
        self._urgently: Callable[[Callable[[], None], str], None]
        self._priority_due = False
        self._capture: ChannelStateCapture | None = None
        """Channel state of the last unaligned checkpoint, which may still wait for barriers."""
        self.records_in = 0
        self.failed_producer: ProducerFailed | None = None
        """The error of a poll that found a failed producer."""

    def read_first(self, input_index: int, on_read: Callable[[], None]) -> None:
        """Calls `on_read` once input `input_index` has ended, or all its channels are idle.

        Until then only barriers arrive from the other inputs. This method must be called before
        `align`.
        """
        self._first, self._on_first_read = input_index, on_read

    def align(
        self,
        listener: BarrierListener,
        now_ms: Callable[[], int],
        urgently: Callable[[Callable[[], None], str], None],
    ) -> None:
        """Enables barriers. `listener` gets the decisions about checkpoints, see `InputBarriers`.

        `urgently(action, description)` runs an action in the task soon, even while the task waits.
        Overtaking barriers must not wait until there is room for records.
        """
        gates = [(part.gate, part.first_channel) for part in self._inputs]
        # Sources that wait send their barriers at once. Records before these barriers must be
        # processed after the first input, but a restore would process captured records before it.
        never = self._channels_where(
            lambda part: (
                not part.may_be_overtaken
                or (self._first is not None and part.input_index != self._first)
            )
        )
        self._barriers = InputBarriers(gates, listener, lambda: self.records_in, now_ms, never)
        self._urgently = urgently
        for part in self._inputs:
            part.gate.tell_priority(
                self._on_priority, partial(self._on_announced, part.first_channel)
            )

    @property
    def channel_times(self) -> list[ChannelTime]:
        """The event time of each channel, in the order of the gates."""
        return self._valve.channels

    def debloat(self, records_max: int, now_s: Callable[[], float], rows_max: int) -> None:
        """Asks producers for batches that suit the speed of this task; see `BufferDebloater`."""
        for part in self._inputs:
            part.gate.debloat(records_max, now_s, rows_max)

    def stalled(self) -> None:
        """Asks the producers for the smallest batches, because the task cannot keep up with its
        input.
        """
        for part in self._inputs:
            part.gate.stalled()

    @property
    def barriers(self) -> InputBarriers:
        """The alignment of all channels. Available after `align`."""
        assert self._barriers is not None, (
            "a barrier came into an input without a listener for barriers"
        )
        return self._barriers

    @property
    def availability(self) -> Availability:
        """Available when any gate has data."""
        return self._availability

    @property
    def current_watermark(self) -> int:
        return self._valve.watermark

    @property
    def input_watermarks(self) -> list[int]:
        """The event time of each logical input, in order."""
        marks: dict[int, list[int]] = {index: [] for index in self._logical}
        for part in self._inputs:
            marks[part.input_index] += [
                self._valve.state_of(part.first_channel + i)[0]
                for i in range(part.gate.channel_count)
            ]
        return [min(found, default=MIN_WATERMARK) for found in marks.values()]

    @property
    def channel_count(self) -> int:
        """Number of channels of all gates."""
        return self._channels

    @property
    def gates(self) -> list[InputGate]:
        """The gate of each edge, for monitoring."""
        return [part.gate for part in self._inputs]

    @property
    def queued_batches(self) -> int:
        """Number of batches that wait in all channels."""
        return sum(part.gate.queued_batches for part in self._inputs)

    def emit_next(self, max_records: int) -> InputStatus:
        """Polls the next gate in turn that has data, and passes on the element."""
        inputs = self._inputs
        for step in range(len(inputs)):
            part = inputs[(self._turn + step) % len(inputs)]
            polled = self._poll(part) if not part.gate.is_finished else None
            if polled is None:
                continue
            self._turn = (self._turn + step + 1) % len(inputs)
            channel, element = polled
            capture = self._capture
            if capture is not None and capture.channels:
                capture.keep_input(part.first_channel + channel, (element,))
            if type(element) is RecordBatch:
                self._on_records(part, part.first_channel + channel, element)
                return InputStatus.MORE_AVAILABLE
            self._on_event(part, part.first_channel + channel, element)
            return self._status() if isinstance(element, EndOfData) else InputStatus.MORE_AVAILABLE
        return InputStatus.NOTHING_AVAILABLE

    def _poll(self, part: GateInput) -> tuple[int, RecordBatch | Event] | None:
        try:
            return part.gate.poll()
        except ProducerFailed as error:
            self.failed_producer = error
            raise

    def close(self) -> None:
        for part in self._inputs:
            part.gate.close()

    # Data in flight.

    def restore(self, restored: RestoredChannelState) -> None:
        """Continues at the event time after the restored data, which the chain processes first.

        A channel that was idle counts as active. Its producer has restarted, and reports when it is
        idle.
        """
        self._valve.resume(restored.watermark)
        if restored.channel_count == self._channels:
            first = {part.edge_id: part.first_channel for part in self._inputs}
            for (edge_id, index), time in restored.channels.items():
                aligned = time.aligned or time.watermark >= restored.watermark
                self._valve.restore(
                    first[edge_id] + index, ChannelTime(time.watermark, False, aligned)
                )

    def begin_capture(
        self,
        capture: ChannelStateCapture,
        overtaken: Sequence[int],
        left_behind: Mapping[int, list[bytes | Event]],
    ) -> None:
        """Stores in `capture` the data that waits at this receiver, and the elements of
        `left_behind`, by channel.

        Further data of the channels in `overtaken` is added until their barriers arrive.
        """
        for part in self._inputs:
            for index in range(part.gate.channel_count):
                capture.log(
                    part.edge_id,
                    ChannelSide.INPUT,
                    index,
                    self._valve.state_of(part.first_channel + index),
                )
        for channel, elements in left_behind.items():
            capture.add(self._log_of(capture, channel), elements)
        self._capture = capture
        for channel in overtaken:
            capture.channels[channel] = self._log_of(capture, channel)
            part = self._part_of(channel)
            part.gate.hurry(channel - part.first_channel, capture.checkpoint_id)

    def _log_of(self, capture: ChannelStateCapture, channel: int) -> ChannelStateLog:
        part = self._part_of(channel)
        return capture.log(part.edge_id, ChannelSide.INPUT, channel - part.first_channel)

    def _part_of(self, channel: int) -> GateInput:
        return next(part for part in reversed(self._inputs) if part.first_channel <= channel)

    def _on_priority(self) -> None:
        if not self._priority_due:
            self._priority_due = True
            self._urgently(self._poll_priority, "barriers that overtake")

    def _poll_priority(self) -> None:
        """Polls only for barriers that overtake records."""
        self._priority_due = False
        for part in self._inputs:
            while part.gate.has_priority_event:
                polled = self._poll(part)
                if polled is None:
                    break
                self._on_event(part, part.first_channel + polled[0], polled[1])

    def _on_announced(self, first_channel: int, index: int, barrier: CheckpointBarrier) -> None:
        if barrier.aligned_timeout_ms is None and not self.barriers.is_void(barrier.checkpoint_id):
            return
        self._urgently(partial(self._announce, first_channel + index, barrier), "announced barrier")

    def _announce(self, channel: int, barrier: CheckpointBarrier) -> None:
        self.barriers.announce(channel, barrier)
        capture = self._capture
        if (
            capture is not None
            and capture.checkpoint_id == barrier.checkpoint_id
            and channel in capture.channels
        ):
            part = self._part_of(channel)
            part.gate.hurry(channel - part.first_channel, barrier.checkpoint_id)

    def _on_barrier(self, part: GateInput, channel: int, barrier: CheckpointBarrier) -> None:
        # While the task was blocked, barriers of several checkpoints may have come. Elements belong
        # to the checkpoint whose barrier overtook them.
        overtaken = part.gate.overtaken(channel - part.first_channel)
        self.barriers.barrier(channel, barrier, overtaken)

    def _channels_where(self, condition: Callable[[GateInput], bool]) -> list[int]:
        """Returns the numbers of all channels of the gates for which `condition` is true."""
        return [
            part.first_channel + i
            for part in self._inputs
            if condition(part)
            for i in range(part.gate.channel_count)
        ]

    def _look_at_first(self) -> None:
        """Ends the phase in which one input is read first, if this input has ended or is idle."""
        first = self._first
        if first not in self._ended:
            times = map(
                self._valve.state_of, self._channels_where(lambda part: part.input_index == first)
            )
            if not all(time.idle or time.watermark == MAX_WATERMARK for time in times):
                return
        self._first = None
        self.barriers.may_be_overtaken(
            self._channels_where(lambda part: part.may_be_overtaken and part.input_index != first)
        )
        self._on_first_read()

    def _on_records(self, part: GateInput, channel: int, batch: RecordBatch) -> None:
        batch = self._valve.input_batch(channel, batch)
        self.records_in += len(batch.values)
        self._consumer.on_batch(batch, part.input_index)

    def _on_event(self, part: GateInput, channel: int, event: Event | RecordBatch) -> None:
        if isinstance(event, Watermark):
            self._advance(self._valve.input_watermark(channel, event.timestamp))
        elif isinstance(event, WatermarkStatus):
            self._tell_time(self._valve.input_status(channel, event.idle))
        elif isinstance(event, EndOfData):
            if not event.drain:
                self._stopped.add(channel)
            self._on_end_of_data(part)
        elif isinstance(event, EndOfPartition):
            # A stopped channel continues later from its position: its event time stays and keeps
            # its effect.
            if channel not in self._stopped:
                self._tell_time(self._valve.input_finished(channel))
            if self._barriers is not None:
                self._barriers.end_of_partition(channel)
        elif isinstance(event, CheckpointBarrier):
            self._on_barrier(part, channel, event)
        elif isinstance(event, CancelCheckpointMarker):
            self.barriers.cancel(channel, event)
        elif isinstance(event, CheckpointAnnouncement):
            part.gate.overtaken(channel - part.first_channel)  # Its data is not stored.
            self.barriers.announced(event.checkpoint_id)
        elif isinstance(event, LatencyMarker):
            self._consumer.on_marker(event)
        if self._first is not None:
            self._look_at_first()

    def _tell_time(self, outputs: Sequence[Watermark | WatermarkStatus]) -> None:
        for output in outputs:
            if isinstance(output, WatermarkStatus):
                self._consumer.on_status(output.idle)
            else:
                self._advance(output.timestamp)

    def _advance(self, watermark: int | None) -> None:
        if watermark is not None and watermark != MIN_WATERMARK:
            self._consumer.on_batch(empty_batch(watermark), self._logical[0])

    def _on_end_of_data(self, part: GateInput) -> None:
        index = part.input_index
        parts = [p.gate.has_received_end_of_data for p in self._inputs if p.input_index == index]
        if index not in self._ended and EndOfDataStatus.NOT_REACHED not in parts:
            self._ended.add(index)
            if EndOfDataStatus.STOPPED not in parts:
                self._consumer.on_end_of_input(index)

    def _status(self) -> InputStatus:
        if len(self._ended) < len(self._logical):
            return InputStatus.MORE_AVAILABLE
        drained = all(
            part.gate.has_received_end_of_data is EndOfDataStatus.DRAINED for part in self._inputs
        )
        return InputStatus.END_OF_DATA if drained else InputStatus.STOPPED
