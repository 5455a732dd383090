"""What comes into a task: batches from gates, or from a source reader, behind one small contract.

`emit_next` hands at most one batch to the chain and says what to expect next; it never blocks. Two or more logical inputs alternate,
one batch each, unless the operator asks for one of them. Watermarks of all channels meet in one valve, which also maps the watermarks
between the records of a batch. After Flink's StreamTaskInput and StreamMultipleInputProcessor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from aioflow.core.elements import (
    MIN_WATERMARK,
    CancelCheckpointMarker,
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
from aioflow.network.gate import EndOfDataStatus, InputGate, SharedAvailability
from aioflow.operators.valve import StatusWatermarkValve
from aioflow.task.barriers import InputBarriers

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflow.core.availability import Availability
    from aioflow.network.gate import InputChannel
    from aioflow.operators.operator import Operator
    from aioflow.task.barriers import BarrierListener

__all__ = ["GateInput", "InputConsumer", "InputStatus", "NetworkInput", "TaskInput"]


class InputStatus(Enum):
    """What `emit_next` found."""

    MORE_AVAILABLE = "call again"
    NOTHING_AVAILABLE = "wait for availability"
    END_OF_DATA = "every input ended and drained"
    STOPPED = "every input ended, at least one without draining"


class InputConsumer(Protocol):
    """Where the elements of an input go: the task."""

    def on_batch(self, batch: RecordBatch, input_index: int) -> None: ...
    def on_status(self, idle: bool) -> None: ...
    def on_end_of_input(self, input_index: int) -> None:
        """Input `input_index` ended and drained, while others go on."""

    def on_event(self, event: Event) -> None:
        """Any event that is neither time nor end: latency markers."""


class TaskInput(Protocol):
    """One side of the task's contract with whatever feeds it."""

    @property
    def availability(self) -> Availability: ...
    def emit_next(self, max_records: int) -> InputStatus: ...
    def close(self) -> None: ...


class InputAvailability(SharedAvailability):
    """Up while a gate of one input is, and counts for the task's: an operator that wants one input waits for that one alone."""

    __slots__ = ("_task",)

    def __init__(self, task: SharedAvailability) -> None:
        super().__init__()
        self._task = task

    def part_up(self) -> None:
        super().part_up()
        self._task.part_up()

    def part_down(self) -> None:
        super().part_down()
        self._task.part_down()


@dataclass(slots=True)
class GateInput:
    """The gate of one edge, which logical input it belongs to, and where its channels stand in the valve."""

    gate: InputGate
    input_index: int
    first_channel: int


class NetworkInput:
    """All gates of a task with inputs."""

    def __init__(
        self, edges: Sequence[tuple[Sequence[InputChannel], int]], consumer: InputConsumer, head: Operator
    ) -> None:
        """`edges`: the channels of each edge, and the logical input that it belongs to."""
        self._availability = SharedAvailability()
        self._of_input: dict[int, InputAvailability] = {}
        self._inputs: list[GateInput] = []
        count = 0
        for channels, input_index in edges:
            own = self._of_input.setdefault(input_index, InputAvailability(self._availability))
            self._inputs.append(GateInput(InputGate(channels, own), input_index, count))
            count += len(channels)
        self._valve = StatusWatermarkValve(count)
        self._consumer = consumer
        self._head = head
        self._turn = 0
        self._logical = sorted({part.input_index for part in self._inputs})
        self._ended: set[int] = set()
        self._stopped: set[int] = set()
        """Channels that ended without draining."""
        self._barriers: InputBarriers | None = None
        self.records_in = 0

    def align(self, listener: BarrierListener, now_ms: Callable[[], int], schedule: Callable[[int, Callable[[int], None]], Any]) -> None:
        """Let barriers take effect; `listener` hears what they decide. See `InputBarriers`."""
        gates = [(part.gate, part.first_channel) for part in self._inputs]
        self._barriers = InputBarriers(gates, listener, lambda: self.records_in, now_ms, schedule)

    def debloat(self, records_max: int, now_s: Callable[[], float]) -> None:
        """Keep asking the producers for batches that suit the speed of this task; see `BufferDebloater`."""
        for part in self._inputs:
            part.gate.debloat(records_max, now_s)

    @property
    def barriers(self) -> InputBarriers:
        """The alignment of all channels; after `align`."""
        assert self._barriers is not None, "a barrier came into an input whose barriers nobody listens to"
        return self._barriers

    @property
    def availability(self) -> Availability:
        """Raised when any gate has something; while the operator wants one input only, that input's own."""
        wanted = self._wanted()
        return self._availability if wanted is None else self._of_input[wanted]

    @property
    def current_watermark(self) -> int:
        return self._valve.watermark

    @property
    def queued_batches(self) -> int:
        """Batches that wait in all channels."""
        return sum(part.gate.queued_batches for part in self._inputs)

    def emit_next(self, max_records: int) -> InputStatus:
        """Poll the next gate in turn that has something, and hand on what it gave."""
        inputs = self._inputs
        wanted = self._wanted()
        for step in range(len(inputs)):
            part = inputs[(self._turn + step) % len(inputs)]
            if wanted is not None and part.input_index != wanted:
                continue
            polled = part.gate.poll() if not part.gate.is_finished else None
            if polled is None:
                continue
            self._turn = (self._turn + step + 1) % len(inputs)
            channel, element = polled
            if type(element) is RecordBatch:
                batch = self._valve.input_batch(part.first_channel + channel, element)
                self.records_in += len(batch.values)
                self._consumer.on_batch(batch, part.input_index)
                return InputStatus.MORE_AVAILABLE
            self._on_event(part, part.first_channel + channel, element)
            return self._status() if isinstance(element, EndOfData) else InputStatus.MORE_AVAILABLE
        return InputStatus.NOTHING_AVAILABLE

    def close(self) -> None:
        for part in self._inputs:
            part.gate.close()

    def _wanted(self) -> int | None:
        """The one input that the operator asks for, as long as that one has not ended."""
        wanted = self._head.next_input() if len(self._logical) > 1 else None
        return None if wanted in self._ended else wanted

    def _on_event(self, part: GateInput, channel: int, event: Event | RecordBatch) -> None:
        if isinstance(event, Watermark):
            self._advance(self._valve.input_watermark(channel, event.timestamp))
        elif isinstance(event, WatermarkStatus):
            for output in self._valve.input_status(channel, event.idle):
                if isinstance(output, WatermarkStatus):
                    self._consumer.on_status(output.idle)
                else:
                    self._advance(output.timestamp)
        elif isinstance(event, EndOfData):
            if not event.drain:
                self._stopped.add(channel)
            self._on_end_of_data(part)
        elif isinstance(event, EndOfPartition):
            # What was stopped goes on later from where it is: its event time stays, and holds back what it did.
            for output in () if channel in self._stopped else self._valve.input_finished(channel):
                if isinstance(output, WatermarkStatus):
                    self._consumer.on_status(output.idle)
                else:
                    self._advance(output.timestamp)
            if self._barriers is not None:
                self._barriers.end_of_partition(channel)
        elif isinstance(event, CheckpointBarrier):
            self.barriers.barrier(channel, event)
        elif isinstance(event, CancelCheckpointMarker):
            self.barriers.cancel(channel, event)
        elif isinstance(event, LatencyMarker):
            self._consumer.on_event(event)

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
        drained = all(part.gate.has_received_end_of_data is EndOfDataStatus.DRAINED for part in self._inputs)
        return InputStatus.END_OF_DATA if drained else InputStatus.STOPPED
