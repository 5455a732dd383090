"""The output of a task: a RecordWriter for each edge, with one availability for all.

A writer splits each batch by its partitioner, and collects the parts for each channel in an open
batch. A writer seals an open batch when the batch is full, an event comes, or the task is about to
sleep. If records trickle in steadily, a writer also seals its open batches after
`FLUSH_MAX_AGE_NS`. So batches grow under load and shrink to one record when the task is nearly
idle. Batches carry the watermark. A channel that gets no record gets the watermark as an event at
the next flush.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.core.availability import AVAILABLE, Availability, all_of
from aioflow.core.elements import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    CheckpointAnnouncement,
    EndOfData,
    Event,
    LatencyMarker,
    RecordBatch,
    WatermarkStatus,
)
from aioflow.core.errors import TypeNotSupported
from aioflow.core.wire.serializers import Codec
from aioflow.network.batch_size import record_size
from aioflow.task.partitioners import BroadcastPartitioner

if TYPE_CHECKING:
    from aioflow.core.elements import CheckpointBarrier
    from aioflow.core.functions import OutputTag
    from aioflow.network.partition import ResultPartition
    from aioflow.network.subpartition import PipelinedSubpartition
    from aioflow.task.chain import Tap
    from aioflow.task.channel_state import ChannelStateCapture
    from aioflow.task.partitioners import Partitioner

__all__ = ["FLUSH_MAX_AGE_NS", "SIDES_MAX", "RecordWriter", "TaskOutput", "TravelCheck"]

logger = logging.getLogger(__name__)

FLUSH_MAX_AGE_NS = 1_000_000
"""Maximum age of a record in an open batch while the task is busy and has few channels.

The value is half of the 99th percentile of the time through an exchange. With more channels the
maximum age is larger, see `FLUSH_CHANNEL_NS`. A slow consumer still gets large batches, because a
flush does not seal batches that the consumer cannot read yet.
"""

FLUSH_FREE_CHANNELS = 8
FLUSH_CHANNEL_NS = 125_000
"""Time added to the maximum age for each channel above `FLUSH_FREE_CHANNELS`.

A flush makes a batch for each channel, and wakes the channel's reader. The age matters only for a
task that is always busy; a task flushes everything before it sleeps.
"""

FLUSH_CHANNEL_RECORDS = 64
FLUSH_LATER = 4
"""Multiple of the maximum age after which a flush happens even with few records.

Before that, a flush waits for `FLUSH_CHANNEL_RECORDS` records per extra channel. If readers and
writer share a busy processor, reading the data of one flush may take longer than the time to the
next flush.
"""

PIECES_MAX = 16
"""Maximum number of batches into which one consumer's part of a batch is cut, unless the batches
would exceed their size limits.

A flat map may make a million records of one, for a consumer that wants small batches. All batches
are queued at once, and each costs the loop ten microseconds or more.
"""

MEASURED_RECORDS = 16
"""Minimum number of routed records for each record whose size is measured."""

FALL = 1 / 16
"""Weight of a measured record in the estimated record size, if the record is smaller than the
estimate.
"""

SIDES_MAX = 1_000
"""Maximum number of side outputs without a reader that are remembered for the warning at the end.

Tags may be made from records, so the number of side outputs is unbounded.
"""


class TravelCheck:
    """Checks whether the first value of an edge within this process could go to another process.

    The check is made once per edge and worker. `checked` contains the ids of the checked edges.
    `codec` knows the job's types. With `strict`, a value that cannot be encoded is an error.
    """

    def __init__(
        self, owner: str, edge_id: int, checked: set[int], codec: Codec, *, strict: bool
    ) -> None:
        self._owner = owner
        self._codec = codec
        self._edge_id = edge_id
        self._checked = checked
        self._strict = strict

    def __call__(self, value: Any) -> None:
        if self._edge_id in self._checked:
            return
        try:
            self._codec.check(value, owner=self._owner)
        except TypeNotSupported as error:
            if self._strict:
                raise
            logger.warning(
                "%s. Within one process it is passed by reference; with workers=, or strict=True, "
                "it is refused",
                error,
            )
        self._checked.add(self._edge_id)


class RecordWriter:
    """Writes the batches of one edge into its partition, through the open batch of each
    subpartition.
    """

    def __init__(
        self,
        partition: ResultPartition,
        partitioner: Partitioner,
        check: TravelCheck | None = None,
        *,
        edge_id: int = -1,
        may_be_overtaken: bool = False,
        announces: bool = False,
    ) -> None:
        """`may_be_overtaken` means that a barrier may overtake waiting data of this edge.

        The overtaken data is stored under `edge_id`. `announces` means that checkpoints are
        announced on this edge, see `CheckpointAnnouncement`.
        """
        self.announces = announces
        self.edge_id = edge_id
        self.may_be_overtaken = may_be_overtaken
        self.partition = partition
        self._partitioner = partitioner
        self._subpartitions = partition.subpartitions
        self._check = check
        self._samples = 0
        self._unmeasured = MEASURED_RECORDS
        """Number of records since the last measured record. A record of the first batch is
        measured.
        """
        self._record_bytes = 0.0
        """Estimated size of a record. The estimate rises at once and falls slowly, because only few
        records may be large.
        """
        self._fitted: tuple[int, int] = 0, 0
        """Record size and batch limit to which the subpartitions were last fitted."""

    def emit(self, batch: RecordBatch) -> None:
        """Routes the records, and seals full batches. The lists of `batch` are not changed."""
        if batch.values:
            if self._check is not None:
                self._check(batch.values[0])
                self._check = None
            self._unmeasured += len(batch.values)
            if self._unmeasured >= MEASURED_RECORDS:
                self._unmeasured = 0
                self._measure(batch.values)
            for index, part in self._partitioner.split(batch):
                subpartition = self._subpartitions[index]
                builder = subpartition.builder
                written, count = 0, len(part.values)
                if type(part.values) is not list:
                    # Collected with other records, columns would become rows.
                    _write_pieces(
                        subpartition,
                        part,
                        subpartition.column_records,
                        subpartition.column_records_max,
                    )
                    continue
                if count > PIECES_MAX * builder.batch_records_max:
                    _write_pieces(
                        subpartition,
                        part,
                        builder.batch_records_max,
                        subpartition.batch_records_max,
                    )
                    continue
                # A large part is passed on as it is if the open batch is empty: a copy would only
                # gain a slightly larger batch.
                least = (
                    builder.batch_records_max
                    if subpartition.should_gather
                    else builder.batch_records_max // 2
                )
                if (
                    least <= count <= builder.batch_records_max
                    and (whole := builder.seal_whole(part)) is not None
                ):
                    subpartition.add(whole)
                    continue
                while True:
                    written += builder.extend(part, written)
                    if written < count or builder.is_full:
                        # Full, or of another shape than the open batch.
                        subpartition.seal()
                    if written == count or builder.is_closed:
                        break
        if batch.watermark != MIN_WATERMARK:
            ends = batch.watermark == MAX_WATERMARK
            for subpartition in self._subpartitions:
                if ends:
                    subpartition.seal()  # MAX_WATERMARK is sent without records.
                subpartition.builder.advance_watermark(batch.watermark)

    def _measure(self, values: Sequence[Any]) -> None:
        """Measures one record before the records join open batches, and fits the limits of the
        batches to its size.
        """
        self._samples = sample = self._samples + 1
        size: float = record_size(values, sample % len(values))
        if size < self._record_bytes:
            size = self._record_bytes + (size - self._record_bytes) * FALL
        self._record_bytes = size
        fitted, room = self._fitted
        if size > fitted or 2 * size < fitted or room != self.partition.pool.batch_bytes_max:
            self._fitted = int(size), self.partition.pool.batch_bytes_max
            for subpartition in self._subpartitions:
                subpartition.fit(int(size))

    @property
    def slice_records(self) -> int:
        """Number of records in a slice that yields about one batch per consumer."""
        return self._once(self.partition.slice_records)

    @property
    def slice_columns(self) -> int:
        """Number of records of column batches in a slice that yields about one batch per
        consumer.
        """
        return self._once(self.partition.slice_columns)

    def _once(self, total: int) -> int:
        return (
            total // len(self._subpartitions)
            if isinstance(self._partitioner, BroadcastPartitioner)
            else total
        )

    @property
    def has_gathered(self) -> bool:
        """Whether records wait in open batches to be sealed."""
        # Called after each slice; `any` over a generator costs twice as much.
        for subpartition in self._subpartitions:  # noqa: SIM110
            if subpartition.builder.values:
                return True
        return False

    def flush(self) -> None:
        """Seals open batches, so that consumers see them, and sends the watermark to channels
        without records.
        """
        self.partition.flush()


class TaskOutput:
    """All writers of a task: the writers of the main output, and the writers of side outputs by tag
    and operator.
    """

    def __init__(self) -> None:
        self._main: list[RecordWriter] = []
        self._side: dict[tuple[int, OutputTag[Any]], list[RecordWriter]] = {}
        self.sides_sent: dict[tuple[int, OutputTag[Any]], None] = {}
        """Side outputs to which records were sent: all that have a reader, and the first
        `SIDES_MAX` that have none.
        """
        self._all: list[RecordWriter] = []
        self.availability: Availability = AVAILABLE
        self.on_slice_records: Callable[[int, int], None] | None = None
        """Called with the new slice size, in rows and in records of column batches, when consumers
        want another size.
        """
        self.watermark = MIN_WATERMARK
        """The last watermark that was emitted."""
        self.records_out = 0
        """Number of emitted records, each counted once for all edges."""
        self.is_idle_due = False
        """Whether an idle status must be sent once everything that the task still holds has
        left.
        """
        self._is_idle_sent = False
        self._side_taps: dict[tuple[int, str], tuple[Tap, ...]] = {}
        self._records_flushed = 0
        self._markers = 0
        self._starting = True

    def add(self, writer: RecordWriter, side: tuple[int, OutputTag[Any]] | None = None) -> None:
        """Registers the writer of an edge; `side` is (index of the node in the chain, tag).

        An output without edges is always available.
        """
        self._all.append(writer)
        writer.partition.on_resized = self._on_resized
        if side is None:
            self._main.append(writer)
        else:
            self._side.setdefault(side, []).append(writer)
        if len(self._all) == 1:
            self.availability = writer.partition.availability
        else:
            self.availability = JointAvailability([w.partition.availability for w in self._all])

    @property
    def writers(self) -> Sequence[RecordWriter]:
        return self._all

    def flush_age_ns(self, flush_max_age_ns: int) -> int:
        """Returns the maximum age of open records while the task is busy.

        `flush_max_age_ns` is the maximum age for few channels.
        """
        return flush_max_age_ns + self._costly_channels * FLUSH_CHANNEL_NS

    @property
    def is_worth_a_flush(self) -> bool:
        """Whether a flush would make batches of a useful size, averaged over many channels.

        Always true for few channels.
        """
        return (
            self.records_out - self._records_flushed
            >= self._costly_channels * FLUSH_CHANNEL_RECORDS
        )

    @property
    def _costly_channels(self) -> int:
        channels = sum(len(writer.partition.subpartitions) for writer in self._all)
        return max(0, channels - FLUSH_FREE_CHANNELS)

    def emit(self, batch: RecordBatch) -> None:
        """Passes a batch of the last operator to every main edge."""
        if batch.watermark != MIN_WATERMARK:
            self.watermark = batch.watermark
        if self._main:
            self.records_out += len(batch.values)
        for writer in self._main:
            writer.emit(batch)
        if self._side and batch.watermark != MIN_WATERMARK:
            # Side outputs follow event time, too. Their own records carry the watermark that was in
            # force for them.
            news = RecordBatch([], None, None, None, batch.watermark)
            for writers in self._side.values():
                for writer in writers:
                    writer.emit(news)

    def emit_side(self, node_index: int, tag: OutputTag[Any], batch: RecordBatch) -> None:
        """Sends records to the side output `tag` of one operator. Drops the records if the side
        output has no reader.
        """
        side = node_index, tag
        writers = self._side.get(side)
        if side not in self.sides_sent and (
            writers is not None or len(self.sides_sent) < SIDES_MAX
        ):
            self.sides_sent[side] = None
        if writers is not None:
            self.records_out += len(batch.values)
            # The end goes out when all operators have finished.
            sent = batch.before_end() if batch.watermark == MAX_WATERMARK else batch
            for writer in writers:
                writer.emit(sent)
        if self._side_taps:
            for tap in self._side_taps.get((node_index, tag.name), ()):
                tap(batch)

    def set_side_taps(self, node_index: int, name: str, taps: Sequence[Tap]) -> None:
        """Sets the taps on the side output `name` of one operator, from the next record on."""
        if taps:
            self._side_taps[node_index, name] = tuple(taps)
        else:
            self._side_taps.pop((node_index, name), None)

    def emit_status(self, idle: bool) -> None:
        """Reports that the stream is active (at once) or idle.

        An idle status is sent only after everything that the task still holds (see `send_idle`). It
        is dropped if records come first.
        """
        self.is_idle_due = idle
        if not idle and self._is_idle_sent:
            self._is_idle_sent = False
            self.broadcast_event(WatermarkStatus(False))

    def send_idle(self) -> None:
        """Sends the due idle status."""
        due, self.is_idle_due = self.is_idle_due, False
        if due and not self._is_idle_sent:
            self._is_idle_sent = True
            self.broadcast_event(WatermarkStatus(True))

    def read_sides(self) -> list[tuple[int, OutputTag[Any]]]:
        """Returns side outputs with a consumer or a tap, by index of the node and tag."""
        tapped = [side for side in self.sides_sent if (side[0], side[1].name) in self._side_taps]
        return [*self._side, *tapped]

    @property
    def is_starting(self) -> bool:
        """Whether batches are still small because the speed of the consumers is unknown.

        Call `grow` repeatedly while this is true.
        """
        if self._starting:
            self._starting = any(
                one.is_starting for writer in self._main for one in writer.partition.subpartitions
            )
        return self._starting

    def grow(self) -> None:
        """Grows the batches of consumers that keep up, and reports the slice size, which is smaller
        if a consumer waits.
        """
        for writer in self._main:
            for subpartition in writer.partition.subpartitions:
                subpartition.grow()
        self._on_resized()

    def _on_resized(self) -> None:
        if self.on_slice_records is not None:
            writers = [writer for writer in self._all if writer.partition.subpartitions]
            self.on_slice_records(
                min(writer.slice_records for writer in writers),
                min(writer.slice_columns for writer in writers),
            )

    def flush(self) -> None:
        self._records_flushed = self.records_out
        for writer in self._all:
            writer.flush()

    @property
    def has_gathered(self) -> bool:
        for writer in self._all:  # noqa: SIM110  # As above.
            if writer.has_gathered:
                return True
        return False

    @property
    def is_overdrawn(self) -> bool:
        """Whether the output of a single record exceeded the room."""
        return any(writer.partition.pool.is_overdrawn for writer in self._all)

    @property
    def queued_batches(self) -> int:
        """Number of batches that wait for consumers."""
        return sum(writer.partition.queued_batches for writer in self._all)

    @property
    def batches_out(self) -> int:
        """Number of batches that were queued for consumers."""
        return sum(writer.partition.batches_added for writer in self._all)

    @property
    def bytes_out(self) -> int:
        """Bytes of batches that were sent to other processes."""
        return sum(writer.partition.bytes_encoded for writer in self._all)

    @property
    def queued_bytes(self) -> int:
        """Bytes of batches that wait for consumers, or are being sent to them."""
        return sum(writer.partition.queued_bytes for writer in self._all)

    @property
    def pool_usage(self) -> float:
        """Usage of the output buffers of the fullest edge: 1.0 means full, more means overdraft."""
        return max((writer.partition.pool_usage for writer in self._all), default=0.0)

    def broadcast_event(self, event: Event, *, blocking: bool = False) -> None:
        for writer in self._all:
            writer.partition.broadcast_event(event, blocking)

    def announce(self, checkpoint_id: int) -> None:
        """Announces a checkpoint ahead of its barrier, on edges to operators that wait for
        asynchronous calls.
        """
        for writer in self._all:
            if writer.announces:
                for subpartition in writer.partition.subpartitions:
                    subpartition.add_event(CheckpointAnnouncement(checkpoint_id), priority=True)

    def send_marker(self, marker: LatencyMarker) -> None:
        """Sends a latency marker to one channel of each edge, in turn."""
        self._markers += 1
        for writer in self._all:
            subpartitions = writer.partition.subpartitions
            subpartitions[self._markers % len(subpartitions)].add_event(marker)

    def overtake(self, barrier: CheckpointBarrier, capture: ChannelStateCapture) -> None:
        """Sends `barrier` ahead of all waiting data, and stores this data in `capture`.

        On an edge that may not be overtaken, the barrier is sent behind the data.
        """
        for writer in self._all:
            if writer.may_be_overtaken:
                for index, subpartition in enumerate(writer.partition.subpartitions):
                    capture.keep_output(writer.edge_id, index, subpartition.overtake(barrier))
            else:
                writer.partition.broadcast_event(barrier)

    def await_passage(self, checkpoint_id: int, capture: ChannelStateCapture) -> None:
        """Keeps `capture` open until the barrier has left every queue in which it may still
        overtake data.
        """
        for writer in self._all:
            if writer.may_be_overtaken:
                for subpartition in writer.partition.subpartitions:
                    if subpartition.holds(checkpoint_id):
                        capture.wait_for(subpartition)
                        subpartition.tell_passed(
                            partial(_passed, subpartition, checkpoint_id, capture)
                        )

    def hurry(self, barrier: CheckpointBarrier, capture: ChannelStateCapture) -> None:
        """Lets `barrier` overtake the records in every subpartition in which it still waits.

        These records are added to `capture`.
        """
        for writer in self._all:
            if writer.may_be_overtaken:
                for index, subpartition in enumerate(writer.partition.subpartitions):
                    overtaken = subpartition.hurry(barrier)
                    if overtaken is not None:
                        capture.keep_output(writer.edge_id, index, overtaken)
                        subpartition.tell_passed(None)
                        capture.arrived(subpartition)

    def end_of_data(self, *, drain: bool) -> None:
        """Sends EndOfData, because no record follows on any edge."""
        self.broadcast_event(EndOfData(drain))

    def all_processed(self) -> Availability:
        """Returns an availability that is set once every consumer has processed all records, or has
        left.
        """
        return all_of([writer.partition.all_data_processed for writer in self._all])

    def finish(self) -> None:
        """Sends EndOfPartition on every channel; consumers release the channels after it."""
        for writer in self._all:
            writer.partition.finish()

    def fail(self, error: BaseException) -> None:
        """Fails the partitions, so that consumers see that their producer failed."""
        for writer in self._all:
            writer.partition.fail(error)


def _write_pieces(
    subpartition: PipelinedSubpartition, part: RecordBatch, records: int, records_max: int
) -> None:
    """Queues `part` as separate batches of `records` records.

    The batches are larger, up to `records_max`, if there would be more than `PIECES_MAX`.
    """
    subpartition.seal()  # Earlier records first. The channel then knows the current watermark.
    builder = subpartition.builder
    count = len(part.values)
    step = max(records, min(-(-count // PIECES_MAX), records_max))
    for start in range(0, count, step):
        piece = part.slice(start, start + step)
        if piece.watermarks is not None and piece.watermarks[0] < builder.told:
            piece.watermarks = _raised(piece.watermarks, builder.told)
        whole = builder.seal_whole(piece)
        if whole is not None:  # Otherwise the consumer is gone.
            subpartition.add(whole)


def _raised(watermarks: list[int], least: int) -> list[int]:
    """Returns `watermarks`, each raised to at least `least`, because the channel already has this
    watermark.
    """
    if type(watermarks) is list:
        return [max(mark, least) for mark in watermarks]
    from aioflow.columns.expressions import raised

    # A column, which reads like a list.
    return raised(watermarks, least)  # type: ignore[arg-type, return-value]


def _passed(
    subpartition: PipelinedSubpartition,
    checkpoint_id: int,
    capture: ChannelStateCapture,
    _index: int,
) -> None:
    if not subpartition.holds(checkpoint_id):
        subpartition.tell_passed(None)
        capture.arrived(subpartition)


class JointAvailability(Availability):
    """Available while all of `parts` are available: a task with two consumers follows the slower
    one.
    """

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Availability]) -> None:
        self._parts = parts
        super().__init__()

    @property
    def is_available(self) -> bool:
        return all(part.is_available for part in self._parts)

    @is_available.setter
    def is_available(self, value: bool) -> None:
        """Ignores the value that the base class sets, because the parts decide."""

    def on_available(self, callback: Any) -> None:
        all_of(self._parts).on_available(callback)
