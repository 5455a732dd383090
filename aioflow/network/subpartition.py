"""The queue between one producing and one consuming subtask. One reader reads it once, in order.

The queue contains sealed batches, which occupy bytes of the partition's pool, and events, which
occupy none. A batch for another process occupies bytes until its consumer has taken it over. The
open batch (`builder`) is not in the queue. It is sealed when it is full, after `flush`, and before
an event is queued, so that the event does not overtake earlier records. `flush` seals at once if
the reader has nothing else to read. Otherwise the batch is sealed once the reader has taken all
queued batches, including batches in transit. Until then the open batch grows. So a slow reader gets
large batches, a waiting reader gets each record at once, and users need not choose between the two.

Invariants: the reader is notified only when the queue becomes non-empty, is unblocked, fails or is
released. There is no further notification until the reader has emptied the queue. After a blocking
event `poll` returns no element until `resume_consumption`. The bytes of a batch are returned to the
pool exactly once. This module does not interpret events. The design follows Flink's
PipelinedSubpartition.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from aioflow.core.elements import (
    BATCH_RECORDS_MAX,
    CheckpointBarrier,
    EndOfPartition,
    Event,
    RecordBatch,
    Watermark,
)
from aioflow.core.errors import Closed, ProducerFailed
from aioflow.network.batch_size import batch_bytes
from aioflow.network.builder import COLUMN_RECORDS_PER_ROW, BatchBuilder
from aioflow.protocol.outlet import PAYLOAD_BYTES_MAX

__all__ = ["BatchMemory", "PipelinedSubpartition", "Polled"]

Polled = tuple[RecordBatch | Event, int, bool, int]
"""Tuple (element, backlog after it, whether more is available now, sequence number).

A named tuple would cost more time.
"""

PLAIN_EVENT = 0
BLOCKING_EVENT = -1
"""Entries of the queue are (element, size). An event has `PLAIN_EVENT` or `BLOCKING_EVENT` as its
size.
"""


class BatchMemory(Protocol):
    """The methods that a subpartition uses of the pool of its partition."""

    batch_bytes_max: int

    def take(self, size: int) -> None: ...
    def resize(self, before: int, size: int) -> None: ...
    def recycle(self, size: int) -> None: ...


START_RECORDS = 16
"""Maximum number of records in the first batches of an exchange."""

START_QUEUED = 6
"""Number of additional batches that must be sealed before batches grow, if batches still wait for
the consumer.
"""

START_GROWTH = 4


class PipelinedSubpartition:
    """The queue of batches and events for one consumer, with the number `index` in its partition.

    Queued batches occupy bytes of `memory`, which bounds the queue.
    """

    __slots__ = (
        "_acknowledges",
        "_backlog",
        "_blocked",
        "_buffers",
        "_error",
        "_flush_when_drained",
        "_grows_at",
        "_made_for",
        "_memory",
        "_notify",
        "_on_all_processed",
        "_on_passed",
        "_on_released",
        "_on_resized",
        "_priority_events",
        "_queue",
        "_record_bytes",
        "_recycle",
        "_sequence_number",
        "_take",
        "_unread",
        "_unsent",
        "_wanted",
        "batch_records_max",
        "batches_added",
        "builder",
        "column_records",
        "column_records_max",
        "index",
        "is_finished",
        "is_released",
        "is_starting",
    )

    def __init__(
        self,
        index: int,
        memory: BatchMemory,
        batch_records_max: int = BATCH_RECORDS_MAX,
        on_all_records_processed: Callable[[int], None] | None = None,
        on_released: Callable[[int], None] | None = None,
        on_resized: Callable[[], None] | None = None,
    ) -> None:
        self.index = index
        self.builder = BatchBuilder(batch_records_max)
        self.batch_records_max = batch_records_max
        """Maximum number of records in any batch of rows.

        `builder.batch_records_max` is the present maximum: the size that the consumer wants, or the
        small initial size.
        """
        self.column_records_max = batch_records_max * COLUMN_RECORDS_PER_ROW
        self._made_for = batch_records_max
        self._wanted = self.column_records_max
        """Batch size in records that the consumer wants, before the producer's limits are
        applied.
        """
        self.column_records = self.column_records_max
        """Present maximum number of records in a batch of columns. `builder.batch_records_max` is
        the maximum for rows.
        """
        self._on_resized = on_resized
        self.is_starting = False
        """Whether batches are still small because the consumer's speed is unknown."""
        self._grows_at = 0
        self.is_finished = False
        self.is_released = False
        self._memory = memory
        self._take = memory.take
        self._recycle = memory.recycle
        self._on_all_processed = on_all_records_processed
        self._on_released = on_released
        self._queue: deque[tuple[RecordBatch | Event, int]] = deque()
        self._backlog = 0
        self.batches_added = 0
        """Number of batches sealed so far."""
        self._priority_events = 0
        """Number of priority events at the head of the queue."""
        self._blocked = False
        self._flush_when_drained = False
        """Whether `flush` was called while the reader had other data. The open batch is sealed once
        the reader has taken that data.
        """
        self._unread: deque[int] = deque()
        """Sizes in bytes of the polled batches that the remote consumer has not taken over yet."""
        self._buffers = 1
        """Number of frames in which the last batch for a remote consumer was sent."""
        self._record_bytes = 0
        """Estimated size of a record in bytes; 0 while unknown."""
        self._acknowledges = False
        self._sequence_number = 0
        self._error: BaseException | None = None
        self._notify: Callable[[bool], None] | None = None
        self._unsent: Callable[[], list[bytes | Event]] | None = None
        self._on_passed: Callable[[int], None] | None = None

    # The producer's side.

    def add(self, batch: RecordBatch) -> bool:
        """Queues a sealed batch, which the producer must not change any more.

        Returns False, and takes no memory, after finish or release.
        """
        if self.is_finished or self.is_released:
            return False
        if self._flush_when_drained:
            self.seal()
        size = batch_bytes(batch, self._record_bytes)
        self._take(size)
        queue = self._queue
        queue.append((batch, size))
        self._backlog += 1
        self.batches_added += 1
        if len(queue) == 1 and not self._blocked and self._notify is not None:
            self._notify(False)
        return True

    def add_event(self, event: Event, blocking: bool = False, priority: bool = False) -> bool:
        """Queues an event after all elements written so far.

        A `priority` event is queued before these elements, but after earlier priority events. A
        `blocking` event stops the reader until `resume_consumption`. Returns False after finish or
        release.
        """
        if self.is_finished or self.is_released:
            return False
        entry = (event, BLOCKING_EVENT if blocking else PLAIN_EVENT)
        queue = self._queue
        if priority:
            queue.insert(self._priority_events, entry)
            self._priority_events += 1
            if not self._blocked:
                self._tell_reader(priority=True)
            return True
        self.seal()
        queue.append(entry)
        if len(queue) == 1 and not self._blocked:
            self._tell_reader()
        return True

    def overtake(self, barrier: CheckpointBarrier) -> list[RecordBatch | bytes | Event]:
        """Queues `barrier` before all elements written so far, except earlier priority events.

        Returns the overtaken elements, oldest first: batches, events, and encoded batches that a
        remote reader could not send yet. Nothing is dropped: the elements are read as usual, behind
        the barrier.
        """
        self.seal()
        if self.is_finished or self.is_released:
            return []
        overtaken = (
            [] if self._unsent is None else list[RecordBatch | bytes | Event](self._unsent())
        )
        overtaken += [element for element, _ in islice(self._queue, self._priority_events, None)]
        self.add_event(barrier, priority=True)
        return overtaken

    def holds(self, checkpoint_id: int) -> bool:
        """Returns whether the barrier of checkpoint `checkpoint_id` waits in the queue."""
        return self._place_of(checkpoint_id) is not None

    def hurry(self, barrier: CheckpointBarrier) -> list[RecordBatch | bytes | Event] | None:
        """Does the same as `overtake` for a barrier that is already in the queue, and replaces it
        by `barrier`.

        Returns the overtaken elements, or None if the reader has read the barrier already.
        """
        place = self._place_of(barrier.checkpoint_id)
        if place is None:
            return None
        del self._queue[place]
        overtaken = (
            [] if self._unsent is None else list[RecordBatch | bytes | Event](self._unsent())
        )
        overtaken += [element for element, _ in islice(self._queue, self._priority_events, place)]
        self.add_event(barrier, priority=True)
        return overtaken

    def tell_passed(self, on_passed: Callable[[int], None] | None) -> None:
        """Sets a callback `on_passed(index)`; None removes it.

        The callback is called when the reader has read a blocking event, or when all waiting
        elements were dropped.
        """
        self._on_passed = on_passed

    def flush(self) -> bool:
        """Makes the records of the open batch visible to the reader, or its watermark if it has no
        records.

        Returns whether there was data. While the reader has other data to read, the batch stays
        open, because sealing it now would only make it smaller.
        """
        if not self._queue and not self._unread:
            return self.seal()
        self._flush_when_drained = self.builder.has_news and not self.is_finished
        return self._flush_when_drained

    def seal(self) -> bool:
        """Queues the open batch now. If the batch has only a watermark and no records, queues the
        watermark as an event.

        Returns whether there was data.
        """
        self._flush_when_drained = False
        builder = self.builder
        if builder.values:
            return self.add(builder.seal())
        if builder.watermark > builder.told and not self.is_finished and not self.is_released:
            self._queue.append((Watermark(builder.note_told()), PLAIN_EVENT))
            if len(self._queue) == 1 and not self._blocked:
                self._tell_reader()
            return True
        return False

    def finish(self) -> None:
        """Seals the open batch, then queues EndOfPartition. Later elements are refused.
        Idempotent.
        """
        self.add_event(EndOfPartition())
        self.builder.finish()
        self.is_finished = True

    def fail(self, error: BaseException) -> None:
        """Drops queued elements, because the producer failed. Every later poll raises
        ProducerFailed.
        """
        if self.is_released or self._error is not None:
            return
        self._error = error
        self.is_finished = True
        self._drop()
        self._tell_reader()

    def release(self) -> None:
        """Drops queued elements and returns their memory. Either side may call it. Idempotent.

        The memory of batches in transit is returned when `taken_over` is called.
        """
        if self.is_released:
            return
        self.is_released = True
        self._drop()
        self._tell_reader()
        self._notify = None
        if self._on_released is not None:
            self._on_released(self.index)

    # The consumer's side.

    def create_read_view(
        self,
        on_data_available: Callable[[bool], None],
        *,
        acknowledges: bool = False,
        unsent: Callable[[], list[bytes | Event]] | None = None,
    ) -> None:
        """Registers the reader. Calls `on_data_available` at once if there is data.

        Raises Closed for a second reader. The callback gets True for a priority event, which should
        be read before data of other channels. A reader that `acknowledges` polls for a remote
        consumer, and calls `taken_over` for each batch. `unsent` returns the polled batches and
        events that such a reader could not send yet, because a priority event overtakes these, too.
        """
        if self._notify is not None:
            raise Closed(
                f"subpartition {self.index} has a reader already; a pipelined partition can be "
                "read once"
            )
        if self.is_released:
            raise Closed(
                f"subpartition {self.index} is released; its partition was consumed or dropped"
            )
        self._notify = on_data_available
        self._acknowledges = acknowledges
        self._unsent = unsent
        if self._queue or self._error is not None:
            on_data_available(self._priority_events > 0)

    def poll(self) -> Polled | None:
        """Returns the next element, as a `Polled`. Returns None if there is none, or if the queue
        is blocked or released.

        Never blocks. Raises ProducerFailed once the producer has failed.
        """
        queue = self._queue
        if not queue or self._blocked:
            if self._error is not None:
                message = f"the producer of subpartition {self.index} failed: {self._error!r}"
                raise ProducerFailed(message) from self._error
            return None
        element, size = queue.popleft()
        number = self._sequence_number
        self._sequence_number = number + 1
        if self._acknowledges and size > 0:
            self._unread.append(size)
        if self._flush_when_drained and not queue and not self._unread and size != BLOCKING_EVENT:
            # Called before memory is returned, so that an exhausted pool does not seem to have
            # room.
            self._seal_quietly()
        if size > 0:
            self._backlog = backlog = self._backlog - 1
            if not self._acknowledges:
                self._recycle(size)
            return element, backlog * self._buffers, bool(queue), number
        if self._priority_events:
            self._priority_events -= 1
        if size == BLOCKING_EVENT:
            self._blocked = True
            if self._on_passed is not None:
                self._on_passed(self.index)
            return element, 0, False, number
        return element, self._backlog * self._buffers, bool(queue), number

    def encoded(self, batch: RecordBatch, size: int) -> None:
        """Notes that the last polled batch has `size` bytes in its encoded form, for another
        process.
        """
        self._memory.resize(self._unread[-1], size)
        self._unread[-1] = size
        self._buffers = -(-size // PAYLOAD_BYTES_MAX)
        if batch.values and (record_bytes := size // len(batch.values)) > self._record_bytes:
            # The estimate misses memory that an object does not show.
            self.fit(record_bytes)

    def taken_over(self) -> None:
        """Notes that the remote consumer has taken over the oldest of the batches that were polled
        for it.

        Only called by a reader that `acknowledges`.
        """
        self._recycle(self._unread.popleft())
        if self._flush_when_drained and not self._unread and not self._queue and not self._blocked:
            self.seal()

    def resume_consumption(self) -> None:
        """Continues after a blocking event. Notifies the reader if there is data."""
        if self._blocked:
            self._blocked = False
            if self._queue:
                self._tell_reader(self._priority_events > 0)
            elif self._flush_when_drained and not self._unread:
                self.seal()

    def start_small(self) -> None:
        """Limits batches to a small size until the speed of the consumer is known.

        Otherwise the first batches could be so large that they delay the next barrier.
        """
        self.is_starting = True
        self._grows_at = 2
        self._wanted = START_RECORDS
        self.builder.batch_records_max = self.column_records = min(
            START_RECORDS, self.batch_records_max
        )

    def grow(self) -> None:
        """Increases the size of batches if the consumer keeps up.

        Has no effect once the consumer has asked for a size, or batches have their full size.
        """
        # A consumer takes a batch when it has finished the previous one. So one taken batch does
        # not show that it keeps up.
        if (
            self.batches_added < self._grows_at + (START_QUEUED if self._backlog else 0)
            or not self.is_starting
        ):
            return
        self._grows_at = self.batches_added + 2
        records = START_GROWTH * self.column_records
        self.is_starting = records < self.column_records_max
        self._limit(records)

    def resize(self, records: int) -> None:
        """Sets the batch size that the consumer wants, in records. The producer's own limit still
        applies.
        """
        self.is_starting = False
        self._limit(records)

    def fit(self, record_bytes: int) -> None:
        """Limits the number of records in a batch so that records of `record_bytes` fit into the
        memory.
        """
        self._record_bytes = record_bytes
        fitting = max(1, self._memory.batch_bytes_max // record_bytes)
        rows, columns = (
            min(self._made_for, fitting),
            min(self._made_for * COLUMN_RECORDS_PER_ROW, fitting),
        )
        if rows != self.batch_records_max or columns != self.column_records_max:
            self.batch_records_max, self.column_records_max = rows, columns
            self._limit(self._wanted)

    def _limit(self, records: int) -> None:
        self._wanted = records
        # One second of the consumer's work is the same number of records in rows and in columns.
        self.builder.batch_records_max = max(1, min(records, self.batch_records_max))
        self.column_records = max(1, min(records, self.column_records_max))
        if self._on_resized is not None:
            self._on_resized()

    @property
    def is_awaited(self) -> bool:
        """Whether batches or records of the open batch wait for the consumer, or are in transit to
        it.
        """
        return not self.is_released and bool(self._backlog or self._unread or self.builder.values)

    @property
    def wanted_records(self) -> int:
        """Batch size in records that the consumer has asked for, within the producer's limit.

        Before the consumer has asked, this is the producer's limit. The small initial size would
        slow down a task that writes nothing to this subpartition.
        """
        return self.batch_records_max if self.is_starting else self.builder.batch_records_max

    @property
    def wanted_columns(self) -> int:
        """The same as `wanted_records`, for columnar batches."""
        return self.column_records_max if self.is_starting else self.column_records

    def acknowledge_all_records_processed(self) -> None:
        """Notes that the consumer has processed everything up to EndOfData."""
        if self._on_all_processed is not None:
            self._on_all_processed(self.index)

    @property
    def backlog(self) -> int:
        """Estimated number of buffers that the queued batches need; 0 while the queue is
        blocked.
        """
        return 0 if self._blocked else self._backlog * self._buffers

    @property
    def queued_batches(self) -> int:
        """Number of queued batches, blocked or not."""
        return self._backlog

    @property
    def queued_bytes(self) -> int:
        """Number of bytes of the batches that are queued, or in transit to a remote consumer."""
        return sum(size for _, size in self._queue if size > 0) + sum(self._unread)

    @property
    def has_priority_event(self) -> bool:
        """Whether the next element is a priority event."""
        return self._priority_events > 0 and not self._blocked

    @property
    def next_is_event(self) -> bool:
        """Whether the next element is an event, which may be read without credit."""
        return bool(self._queue) and self._queue[0][1] <= 0 and not self._blocked

    @property
    def is_blocked(self) -> bool:
        return self._blocked

    @property
    def should_gather(self) -> bool:
        """Whether the producer should fill the open batch further before sealing it.

        This is the case while the remote reader has another batch to read, because sending a batch
        costs as much as processing hundreds of its records.
        """
        return bool(self._unread)

    def __len__(self) -> int:
        """Returns the number of queued batches and events."""
        return len(self._queue)

    def _place_of(self, checkpoint_id: int) -> int | None:
        for place, (element, _) in enumerate(self._queue):
            if isinstance(element, CheckpointBarrier) and element.checkpoint_id == checkpoint_id:
                return place
        return None

    def _seal_quietly(self) -> None:
        """Seals the open batch without notifying the reader, which is polling and so finds the new
        data itself.
        """
        notify, self._notify = self._notify, None
        self.seal()
        self._notify = notify

    def _drop(self) -> None:
        dropped, self._queue = self._queue, deque()
        self._backlog = 0
        self._flush_when_drained = False
        self._priority_events = 0
        self._blocked = False
        self.builder.clear()
        for _, size in dropped:
            if size > 0:
                self._recycle(size)
        if self._on_passed is not None:
            self._on_passed(self.index)

    def _tell_reader(self, priority: bool = False) -> None:
        if self._notify is not None:
            self._notify(priority)
