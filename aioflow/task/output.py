"""What leaves a task: a RecordWriter for each edge, and all of them together as one output with one
availability.

A writer splits each batch by its partitioner and gathers the parts, channel by channel, until a
batch is full, an event comes, the task is about to sleep, or `FLUSH_MAX_AGE_NS` passed under a
steady trickle. So batches grow under load and shrink to one record when idle. The watermark rides
in the batches; a channel that got no record learns it as an event at the next flush.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.core.availability import AVAILABLE, Availability, all_of
from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK, EndOfData, Event, RecordBatch
from aioflow.core.errors import TypeNotSupported
from aioflow.core.serializers import Codec
from aioflow.task.partitioners import BroadcastPartitioner

if TYPE_CHECKING:
    from aioflow.core.elements import CheckpointBarrier
    from aioflow.core.functions import OutputTag
    from aioflow.network.partition import ResultPartition
    from aioflow.network.subpartition import PipelinedSubpartition
    from aioflow.task.inflight import InFlightCapture
    from aioflow.task.partitioners import Partitioner

__all__ = ["FLUSH_MAX_AGE_NS", "SIDES_MAX", "RecordWriter", "TaskOutput", "TravelCheck"]

logger = logging.getLogger(__name__)

FLUSH_MAX_AGE_NS = 1_000_000
"""The oldest that a gathered record gets while its task, of a few channels, is busy with others:
half of what may pass through an exchange takes at the 99th percentile. With more channels it gets
older, see below. A consumer that is behind gets no smaller batches by it, since a flush leaves open
what could not be read yet.
"""

FLUSH_FREE_CHANNELS = 8
FLUSH_CHANNEL_NS = 125_000
"""A flush makes a batch for each channel, and wakes whoever reads it: more than so many channels
get as much more time each. It is that of a task that is busy all the while; before it sleeps it
flushes whatever there is.
"""

FLUSH_CHANNEL_RECORDS = 64
FLUSH_LATER = 4
"""And so many records must have been gathered for each of these channels, or so many times that
time have passed: where readers and writer share a processor that is busy with others too, the
readers of one flush may take longer than the time to the next.
"""

PIECES_MAX = 16
"""Batches that a part is cut into, at most, while they are smaller than any may be. One record may
become a million for a consumer that wants them one by one: all are queued at once, in however many
batches, and each of these costs the loop some ten microseconds or more.
"""

SIDES_MAX = 1_000
"""So many side outputs that nobody reads are remembered, for what is said of them at the end: a
tag may be made of a record.
"""


class TravelCheck:
    """Looks at the first value that crosses an edge inside this process: could it have gone to
    another one?

    Once for each edge and worker; `checked` holds the edges that were looked at, `codec` knows the
    job's types. `strict`: what could not travel is an error.
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
    ) -> None:
        """`may_be_overtaken`: whether a barrier may go ahead of what waits here; `edge_id` is
        the exchange that it is kept for then.
        """
        self.edge_id = edge_id
        self.may_be_overtaken = may_be_overtaken
        self.partition = partition
        self._partitioner = partitioner
        self._subpartitions = partition.subpartitions
        self._check = check

    def emit(self, batch: RecordBatch) -> None:
        """Route the records; seal what is full. The lists of `batch` are not changed."""
        if batch.values:
            if self._check is not None:
                self._check(batch.values[0])
                self._check = None
            for index, part in self._partitioner.split(batch):
                subpartition = self._subpartitions[index]
                builder = subpartition.builder
                written, count = 0, len(part.values)
                if type(part.values) is not list:
                    # Gathered with other records it would become rows.
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
                # A large part goes as it is when nothing waits before it: copying it would only
                # make the batch a little larger.
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
                    if (
                        written < count or builder.is_full
                    ):  # Full, or of another shape than what it holds.
                        subpartition.seal()
                    if written == count or builder.is_closed:
                        break
        if batch.watermark != MIN_WATERMARK:
            ends = batch.watermark == MAX_WATERMARK
            for subpartition in self._subpartitions:
                if ends:
                    subpartition.seal()  # The end of time is no step of it: MAX travels alone.
                subpartition.builder.advance_watermark(batch.watermark)

    @property
    def slice_records(self) -> int:
        """Records at a time that make no more than about one batch for each consumer."""
        return self._once(self.partition.slice_records)

    @property
    def slice_columns(self) -> int:
        """The same of records that come as columns."""
        return self._once(self.partition.slice_columns)

    def _once(self, total: int) -> int:
        return (
            total // len(self._subpartitions)
            if isinstance(self._partitioner, BroadcastPartitioner)
            else total
        )

    @property
    def has_gathered(self) -> bool:
        """Whether records wait to be sealed."""
        # Asked after each slice: `any` over a generator costs twice as much.
        for subpartition in self._subpartitions:  # noqa: SIM110
            if subpartition.builder.values:
                return True
        return False

    def flush(self) -> None:
        """Let consumers have what was gathered; tell the watermark to channels that had nothing."""
        self.partition.flush()


class TaskOutput:
    """All writers of a task: the main ones, and those of side outputs by tag and operator."""

    def __init__(self) -> None:
        self._main: list[RecordWriter] = []
        self._side: dict[tuple[int, OutputTag[Any]], list[RecordWriter]] = {}
        self.sides_sent: dict[tuple[int, OutputTag[Any]], None] = {}
        """Side outputs that something was sent to: those that are read, and the first
        `SIDES_MAX` that are not.
        """
        self._all: list[RecordWriter] = []
        self.availability: Availability = AVAILABLE
        self.on_slice_records: Callable[[int, int], None] | None = None
        """Called with the records that the task should emit at a time, as rows and as columns, when
        consumers have asked for other batches."""
        self.watermark = MIN_WATERMARK
        """The last one that went out."""
        self.records_out = 0
        """Records that went out, each counted once however many edges it took."""
        self._records_flushed = 0
        self._starting = True

    def add(self, writer: RecordWriter, side: tuple[int, OutputTag[Any]] | None = None) -> None:
        """Register the writer of an edge; `side` is (index of the node in the chain, tag).

        Without edges it is always available.
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
    def sides_read(self) -> Collection[tuple[int, OutputTag[Any]]]:
        """Side outputs that have edges, by index of the node in the chain and tag."""
        return self._side.keys()

    @property
    def writers(self) -> Sequence[RecordWriter]:
        return self._all

    def flush_age_ns(self, flush_max_age_ns: int) -> int:
        """How old what was gathered may get while the task is busy, where it is
        `flush_max_age_ns` for a few channels.
        """
        return flush_max_age_ns + self._costly_channels * FLUSH_CHANNEL_NS

    @property
    def is_worth_a_flush(self) -> bool:
        """Whether batches would be of some size, on average over many channels; a few need not
        ask.
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
        """A batch of the last operator, to every main edge."""
        if batch.watermark != MIN_WATERMARK:
            self.watermark = batch.watermark
        if self._main:
            self.records_out += len(batch.values)
        for writer in self._main:
            writer.emit(batch)
        if self._side and batch.watermark != MIN_WATERMARK:
            # Side outputs keep event time going; their own records carry the watermark that was in
            # force for them.
            news = RecordBatch([], None, None, None, batch.watermark)
            for writers in self._side.values():
                for writer in writers:
                    writer.emit(news)

    def emit_side(
        self,
        node_index: int,
        tag: OutputTag[Any],
        value: Any,
        timestamp: int | None,
        watermark: int,
    ) -> None:
        """One record to the side output `tag` of one operator; dropped when nobody reads it."""
        side = node_index, tag
        writers = self._side.get(side)
        if side not in self.sides_sent and (
            writers is not None or len(self.sides_sent) < SIDES_MAX
        ):
            self.sides_sent[side] = None
        if writers is None:
            return
        self.records_out += 1
        if watermark == MAX_WATERMARK:
            watermark = self.watermark  # The end goes out when all operators have finished.
        batch = RecordBatch(
            [value], None if timestamp is None else [timestamp], None, [watermark], watermark
        )
        for writer in writers:
            writer.emit(batch)

    @property
    def is_starting(self) -> bool:
        """Whether batches are small still, as it is not known how fast the consumers are: then
        `grow` is to be called again and again.
        """
        if self._starting:
            self._starting = any(
                one.is_starting for writer in self._main for one in writer.partition.subpartitions
            )
        return self._starting

    def grow(self) -> None:
        """Make the first batches larger where the consumers keep up, and what the task emits at
        a time as small where one waits.
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
        """Whether one record's own output went beyond what there was room for."""
        return any(writer.partition.pool.overdraft_in_use > 0 for writer in self._all)

    @property
    def queued_batches(self) -> int:
        """Batches that wait for consumers."""
        return sum(writer.partition.queued_batches for writer in self._all)

    @property
    def batches_out(self) -> int:
        """Batches that were queued for consumers."""
        return sum(writer.partition.batches_added for writer in self._all)

    @property
    def bytes_out(self) -> int:
        """Bytes of those that went to other processes."""
        return sum(writer.partition.bytes_encoded for writer in self._all)

    @property
    def queued_bytes(self) -> int:
        """Of batches that are encoded and wait for the credit of their consumers."""
        return sum(writer.partition.queued_bytes for writer in self._all)

    @property
    def pool_usage(self) -> float:
        """Of the fullest edge: 1 is full, more is overdraft."""
        return max((writer.partition.pool_usage for writer in self._all), default=0.0)

    def broadcast_event(self, event: Event, *, blocking: bool = False) -> None:
        for writer in self._all:
            writer.partition.broadcast_event(event, blocking)

    def overtake(self, barrier: CheckpointBarrier, capture: InFlightCapture) -> None:
        """Send `barrier` ahead of all that waits, which `capture` keeps; in its turn where
        nothing may be overtaken.
        """
        for writer in self._all:
            if writer.may_be_overtaken:
                for index, subpartition in enumerate(writer.partition.subpartitions):
                    capture.keep_output(writer.edge_id, index, subpartition.overtake(barrier))
            else:
                writer.partition.broadcast_event(barrier)

    def await_passage(self, checkpoint_id: int, capture: InFlightCapture) -> None:
        """`capture` is not complete until the barrier, sent in its turn, has left every queue
        where it may still have to overtake.
        """
        for writer in self._all:
            if writer.may_be_overtaken:
                for subpartition in writer.partition.subpartitions:
                    if subpartition.holds(checkpoint_id):
                        capture.wait_for(subpartition)
                        subpartition.tell_passed(
                            partial(_passed, subpartition, checkpoint_id, capture)
                        )

    def hurry(self, barrier: CheckpointBarrier, capture: InFlightCapture) -> None:
        """Let `barrier` overtake where it still waits in its turn."""
        for writer in self._all:
            if writer.may_be_overtaken:
                for index, subpartition in enumerate(writer.partition.subpartitions):
                    overtaken = subpartition.hurry(barrier)
                    if overtaken is not None:
                        capture.keep_output(writer.edge_id, index, overtaken)
                        subpartition.tell_passed(None)
                        capture.arrived(subpartition)

    def end_of_data(self, *, drain: bool) -> None:
        """No record follows on any edge."""
        self.broadcast_event(EndOfData(drain))

    def all_processed(self) -> Availability:
        """Up once every consumer has processed all records up to the end of the data, or left."""
        return all_of([writer.partition.all_data_processed for writer in self._all])

    def finish(self) -> None:
        """EndOfPartition on every channel: consumers release them once they have read it."""
        for writer in self._all:
            writer.partition.finish()

    def fail(self, error: BaseException) -> None:
        """Consumers see that their producer failed."""
        for writer in self._all:
            writer.partition.fail(error)


def _write_pieces(
    subpartition: PipelinedSubpartition, part: RecordBatch, records: int, records_max: int
) -> None:
    """Queue `part` by itself, in pieces of `records`; of more, up to `records_max`, if they
    would be too many.
    """
    subpartition.seal()  # What was written before. The channel knows the watermark in force then.
    builder = subpartition.builder
    count = len(part.values)
    step = max(records, min(-(-count // PIECES_MAX), records_max))
    for start in range(0, count, step):
        piece = part.slice(start, start + step)
        if piece.watermarks is not None and piece.watermarks[0] < builder.told:
            piece.watermarks = _raised(piece.watermarks, builder.told)
        whole = builder.seal_whole(piece)
        if whole is not None:  # Else the consumer is gone.
            subpartition.add(whole)


def _raised(watermarks: list[int], least: int) -> list[int]:
    """The channel cannot be told less than it knows."""
    if type(watermarks) is list:
        return [max(mark, least) for mark in watermarks]
    from aioflow.columns.event_time import raised

    # A column, which reads like a list.
    return raised(watermarks, least)  # type: ignore[arg-type, return-value]


def _passed(
    subpartition: PipelinedSubpartition, checkpoint_id: int, capture: InFlightCapture, _index: int
) -> None:
    if not subpartition.holds(checkpoint_id):
        subpartition.tell_passed(None)
        capture.arrived(subpartition)


class JointAvailability(Availability):
    """Available while each of `parts` is: a task with two consumers follows the slower one."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Availability]) -> None:
        self._parts = parts
        super().__init__()

    @property
    def is_available(self) -> bool:
        return all(part.is_available for part in self._parts)

    @is_available.setter
    def is_available(self, value: bool) -> None:
        """The parts decide; the base class sets its initial value here."""

    def on_available(self, callback: Any) -> None:
        all_of(self._parts).on_available(callback)
