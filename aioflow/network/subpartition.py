"""The queue between one producing subtask and one consuming subtask; read once, in order, by one
reader.

Queued are sealed batches, each with one permit of the partition's pool, and events, without. The
open batch (`builder`) is not queued: it is sealed when it is full, before any event, so that none
overtakes records that were written before it, and when the reader is to have it: `flush` makes it
visible, which means at once if the reader has nothing else, and otherwise when it has taken all
that it has, on the way to it too. Until then it grows: a reader that is behind gets large batches,
one that waits gets each record as it comes, and nobody has to choose between the two.

Invariants: the reader is notified only when the queue turns from empty to not empty (or unblocked,
failed, released), so one notification stands for all that follows until the queue was drained;
after a blocking event nothing more comes out until `resume_consumption`; every permit goes back
exactly once, when its batch is polled or dropped. After Flink's PipelinedSubpartition; what an
event means is not known here.
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
from aioflow.network.builder import COLUMN_RECORDS_PER_ROW, BatchBuilder

__all__ = ["Permits", "PipelinedSubpartition", "Polled"]

Polled = tuple[RecordBatch | Event, int, bool, int]
"""(element, backlog after it, is more available now, sequence number).

A plain tuple: a named one would cost more.
"""

NO_EVENT = 0
PLAIN_EVENT = 1
BLOCKING_EVENT = 2


class Permits(Protocol):
    """What a subpartition needs of its pool; `channel` is its own index."""

    def take_permit(self, channel: int = 0) -> None: ...
    def recycle(self, channel: int = 0) -> None: ...


START_RECORDS = 16
"""Of the first batches of an exchange."""

START_QUEUED = 6
"""So many more sealed ones than were needed say that the consumer takes them, though some always
wait.
"""

START_GROWTH = 4

BATCH_BYTES = 4 << 20
"""Of a batch on its way to another process, about at most: as many records as are in one otherwise
may be gigabytes, and a consumer takes no batch of more than 64 MiB."""


class PipelinedSubpartition:
    """Subpartition `index`, whose batches take their permits from `permits`."""

    __slots__ = (
        "_acknowledges",
        "_backlog",
        "_blocked",
        "_error",
        "_flush_when_drained",
        "_grows_at",
        "_made_for",
        "_notify",
        "_on_all_processed",
        "_on_passed",
        "_on_released",
        "_on_resized",
        "_priority_events",
        "_queue",
        "_recycle",
        "_sequence_number",
        "_take_permit",
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
        permits: Permits,
        batch_records_max: int = BATCH_RECORDS_MAX,
        on_all_records_processed: Callable[[int], None] | None = None,
        on_released: Callable[[int], None] | None = None,
        on_resized: Callable[[], None] | None = None,
    ) -> None:
        self.index = index
        self.builder = BatchBuilder(batch_records_max)
        self.batch_records_max = batch_records_max
        """Of any batch of rows: `builder.batch_records_max` is what the consumer wants of it, or
        how it starts.
        """
        self.column_records_max = batch_records_max * COLUMN_RECORDS_PER_ROW
        self._made_for = batch_records_max
        self._wanted = self.column_records_max
        """Of any batch of columns."""
        self.column_records = self.column_records_max
        """Of a batch of columns, where `builder.batch_records_max` is that of one of rows."""
        self._on_resized = on_resized
        self.is_starting = False
        """Whether its batches are small as long as nobody knows what a record costs the
        consumer.
        """
        self._grows_at = 0
        self.is_finished = False
        self.is_released = False
        self._take_permit = permits.take_permit
        self._recycle = permits.recycle
        self._on_all_processed = on_all_records_processed
        self._on_released = on_released
        self._queue: deque[tuple[RecordBatch | Event, int]] = deque()
        self._backlog = 0
        self.batches_added = 0
        """Sealed batches, since it was made."""
        self._priority_events = 0
        """How many elements at the head of the queue are priority events."""
        self._blocked = False
        self._flush_when_drained = False
        """`flush` was asked for while the reader had something: the open batch is its next."""
        self._unread = 0
        """Batches that were polled for a consumer elsewhere, which has not taken them yet."""
        self._acknowledges = False
        self._sequence_number = 0
        self._error: BaseException | None = None
        self._notify: Callable[[bool], None] | None = None
        self._unsent: Callable[[], list[bytes | Event]] | None = None
        self._on_passed: Callable[[int], None] | None = None

    # The producer's side.

    def add(self, batch: RecordBatch) -> bool:
        """Queue a sealed batch; the consumer owns it from here on.

        False, without a permit, after finish or release.
        """
        if self.is_finished or self.is_released:
            return False
        if self._flush_when_drained:
            self.seal()
        self._take_permit(self.index)
        queue = self._queue
        queue.append((batch, NO_EVENT))
        self._backlog += 1
        self.batches_added += 1
        if len(queue) == 1 and not self._blocked and self._notify is not None:
            self._notify(False)
        return True

    def add_event(self, event: Event, blocking: bool = False, priority: bool = False) -> bool:
        """Queue an event behind everything written so far; a `priority` one in front of it, behind
        earlier priority events.

        A `blocking` event stops the reader until `resume_consumption`. False after finish or
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
        """Send `barrier` ahead of everything that was written so far, but for earlier ones of its
        kind. Returns what it overtook, oldest first: batches, those that a remote reader could not
        send as bytes, and events. Nothing of it is dropped: it is read as usual, behind the
        barrier.
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
        """Does the barrier of this checkpoint wait here to be read?"""
        return self._place_of(checkpoint_id) is not None

    def hurry(self, barrier: CheckpointBarrier) -> list[RecordBatch | bytes | Event] | None:
        """Like `overtake`, for a barrier that waits in its turn: `barrier` takes its place, ahead
        of what was written before it, which is returned. None: it was read already.
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
        """Call `on_passed(index)` when a blocking event was read, or all that waits was dropped;
        None: no more.
        """
        self._on_passed = on_passed

    def flush(self) -> bool:
        """Make the open batch visible, a watermark without records too. Was there anything?

        While the reader has something else, it stays open: it would not be read earlier, only
        smaller.
        """
        if not self._queue and not self._unread:
            return self.seal()
        self._flush_when_drained = self.builder.has_news and not self.is_finished
        return self._flush_when_drained

    def seal(self) -> bool:
        """Queue the open batch now; a watermark without records goes as an event.

        Was there anything?
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
        """Seal, then EndOfPartition; everything later is refused. Idempotent."""
        self.add_event(EndOfPartition())
        self.builder.finish()
        self.is_finished = True

    def fail(self, error: BaseException) -> None:
        """The producer failed: what is queued is dropped, and every poll from now on raises
        ProducerFailed.
        """
        if self.is_released or self._error is not None:
            return
        self._error = error
        self.is_finished = True
        self._drop()
        self._tell_reader()

    def release(self) -> None:
        """Drop what is queued and return its permits, from either side. Idempotent."""
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
        """Become the reader; called back at once if there is something already. Closed for a second
        one: data is read once.

        The callback gets True when a priority event arrived, which should be read before other
        channels. A reader that `acknowledges` polls for a consumer elsewhere, and calls
        `taken_over` for each batch; `unsent` gives what it polled and could not send, which a
        priority event overtakes too.
        """
        if self._notify is not None:
            raise Closed(
                f"subpartition {self.index} has a reader already; what is pipelined can be read "
                "once"
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
        """The next element, or None if there is none, the view is blocked, or it was released.
        Never blocks.

        Raises ProducerFailed once the producer failed.
        """
        queue = self._queue
        if not queue or self._blocked:
            if self._error is not None:
                message = f"the producer of subpartition {self.index} failed: {self._error!r}"
                raise ProducerFailed(message) from self._error
            return None
        element, kind = queue.popleft()
        number = self._sequence_number
        self._sequence_number = number + 1
        if self._acknowledges and kind == NO_EVENT:
            self._unread += 1
        if self._flush_when_drained and not queue and not self._unread and kind != BLOCKING_EVENT:
            # Before the permit goes back: a pool that is used up must not look free in between.
            self._seal_quietly()
        if kind == NO_EVENT:
            self._backlog = backlog = self._backlog - 1
            self._recycle(self.index)
            return element, backlog, bool(queue), number
        if self._priority_events:
            self._priority_events -= 1
        if kind == BLOCKING_EVENT:
            self._blocked = True
            if self._on_passed is not None:
                self._on_passed(self.index)
            return element, 0, False, number
        return element, self._backlog, bool(queue), number

    def taken_over(self) -> None:
        """The consumer has taken the oldest batch that was polled for it: only from a reader
        that `acknowledges`.
        """
        self._unread -= 1
        if self._flush_when_drained and not self._unread and not self._queue and not self._blocked:
            self.seal()

    def resume_consumption(self) -> None:
        """Go on after a blocking event. Tells the reader if there is something."""
        if self._blocked:
            self._blocked = False
            if self._queue:
                self._tell_reader(self._priority_events > 0)
            elif self._flush_when_drained and not self._unread:
                self.seal()

    def start_small(self) -> None:
        """Begin with small batches: all that is sealed before the consumer is known to be slow
        stands before the next barrier.
        """
        self.is_starting = True
        self._grows_at = 2
        self._wanted = START_RECORDS
        self.builder.batch_records_max = self.column_records = min(
            START_RECORDS, self.batch_records_max
        )

    def grow(self) -> None:
        """Make them larger, if the consumer keeps up.

        Until it says itself what it wants, or they are as large as they may be.
        """
        # It takes a batch when it is through with the one before: one that was taken says nothing
        # yet.
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
        """The consumer wants batches of up to so many records: taken as far as the producer's
        own limit allows.
        """
        self.is_starting = False
        self._limit(records)

    def fit(self, batch: RecordBatch, size: int) -> None:
        """`batch` took `size` bytes: later ones are to take about `BATCH_BYTES` at most, as far
        as their records are alike.
        """
        made_for = self._made_for * (1 if type(batch.values) is list else COLUMN_RECORDS_PER_ROW)
        before = self.batch_records_max if type(batch.values) is list else self.column_records_max
        # Down at once, and up by and by: there may be large ones among many small ones.
        fitting = max(1, min(made_for, 2 * before, len(batch.values) * BATCH_BYTES // size))
        if fitting == before or (size <= BATCH_BYTES and fitting < before):
            return
        if type(batch.values) is list:
            self.batch_records_max = fitting
        else:
            self.column_records_max = fitting
        self._limit(self._wanted)

    @property
    def is_bounded_by_bytes(self) -> bool:
        """Whether its batches have fewer records than they might, for their size."""
        return (
            self.batch_records_max < self._made_for
            or self.column_records_max < self._made_for * COLUMN_RECORDS_PER_ROW
        )

    def _limit(self, records: int) -> None:
        self._wanted = records
        # What is a second of work for the consumer is so whether it comes as rows or as columns.
        self.builder.batch_records_max = max(1, min(records, self.batch_records_max))
        self.column_records = max(1, min(records, self.column_records_max))
        if self._on_resized is not None:
            self._on_resized()

    @property
    def is_awaited(self) -> bool:
        """Whether the consumer has not yet taken all that was written for it."""
        return not self.is_released and bool(self._backlog or self._unread or self.builder.values)

    @property
    def wanted_records(self) -> int:
        """Of a batch, as far as the consumer has said: a task that writes nothing here is not to
        be held up by how it starts.
        """
        return self.batch_records_max if self.is_starting else self.builder.batch_records_max

    @property
    def wanted_columns(self) -> int:
        """The same of a batch of columns."""
        return self.column_records_max if self.is_starting else self.column_records

    def acknowledge_all_records_processed(self) -> None:
        """The consumer has processed everything up to EndOfData."""
        if self._on_all_processed is not None:
            self._on_all_processed(self.index)

    @property
    def backlog(self) -> int:
        """Queued batches that may be read; events do not count, and nothing may be read while
        blocked.
        """
        return 0 if self._blocked else self._backlog

    @property
    def queued_batches(self) -> int:
        """Queued batches, blocked or not: the permits held here."""
        return self._backlog

    @property
    def queued_bytes(self) -> int:
        """Bytes of batches that were encoded for a consumer elsewhere and wait for its credit.

        What waits to be encoded has no size.
        """
        return (
            0
            if self._unsent is None
            else sum(len(element) for element in self._unsent() if isinstance(element, bytes))
        )

    @property
    def has_priority_event(self) -> bool:
        """Is the next element a priority event?"""
        return self._priority_events > 0 and not self._blocked

    @property
    def next_is_event(self) -> bool:
        """Is the next element an event, which may be read without credit?"""
        return bool(self._queue) and self._queue[0][1] != NO_EVENT and not self._blocked

    @property
    def is_blocked(self) -> bool:
        return self._blocked

    @property
    def should_gather(self) -> bool:
        """Whether a batch is better made full than queued as it is: it travels, which costs as much
        as hundreds of its records, and who reads it elsewhere has another one to read first.
        """
        return self._unread > 0

    def __len__(self) -> int:
        """Queued batches and events."""
        return len(self._queue)

    def _place_of(self, checkpoint_id: int) -> int | None:
        for place, (element, _) in enumerate(self._queue):
            if isinstance(element, CheckpointBarrier) and element.checkpoint_id == checkpoint_id:
                return place
        return None

    def _seal_quietly(self) -> None:
        """The reader is here and sees by itself that there is more."""
        notify, self._notify = self._notify, None
        self.seal()
        self._notify = notify

    def _drop(self) -> None:
        backlog, self._backlog = self._backlog, 0
        self._flush_when_drained = False
        self._queue.clear()
        self._priority_events = 0
        self._blocked = False
        self.builder.clear()
        for _ in range(backlog):
            self._recycle(self.index)
        if self._on_passed is not None:
            self._on_passed(self.index)

    def _tell_reader(self, priority: bool = False) -> None:
        if self._notify is not None:
            self._notify(priority)
