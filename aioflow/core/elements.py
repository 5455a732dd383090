"""The elements between operators: batches of records, the events that are sent in band with them,
and the windows that may be values of a record.

A `RecordBatch` is the unit of all hot work: queueing, credit, pool permits, and one step of an
operator. It consists of parallel lists. Invariants that every producer keeps and every consumer may
rely on:

* `timestamps`, `keys` and `watermarks` are either None or as long as `values`;
* `watermarks[i]` is the watermark in force before record i; the list never decreases; None means
  that the watermark did not change within the batch (it stays the one before the batch);
* `watermark` is the watermark after the last record, `MIN_WATERMARK` if the batch has no new one;
  it is never below the list;
* `taken` means that each record was replaced by the value that its aggregate extracts from it, or
  by its key if the aggregate extracts none; code that rebuilds the same records uses `slice`,
  `pick` or `with_watermarks`, which keep the flag;
* a batch belongs to its holder, and an emitted batch is never mutated: local edges pass it by
  reference.

Event time is continuous: when the watermark jumps, all work that was due in between is done in
order of its own time. Each piece of work sees the watermark of its own time. So results do not
depend on where batches begin and end. A batch without values is a bare watermark.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

__all__ = [
    "BATCH_RECORDS_MAX",
    "GLOBAL",
    "MAX_WATERMARK",
    "MIN_WATERMARK",
    "CancelCheckpointMarker",
    "CheckpointAnnouncement",
    "CheckpointBarrier",
    "EndOfData",
    "EndOfPartition",
    "Event",
    "GlobalWindow",
    "LatencyMarker",
    "RecordBatch",
    "TimeWindow",
    "Watermark",
    "WatermarkStatus",
    "Window",
    "empty_batch",
    "last_instant",
    "one_record",
]

MIN_WATERMARK = -(2**63)
"""The watermark of a stream before its first watermark event."""

MAX_WATERMARK = 2**63 - 1
"""The end of event time: no record can follow."""

BATCH_RECORDS_MAX = 2048
"""Maximum number of rows of a batch, and of one slice of a stage.

The fixed cost of a batch of this size is a few ns a record. Larger batches exceed the processor's
cache.
"""


class RecordBatch:
    """Records in order, with their timestamps, keys and the watermarks between them.

    `values` are the records. `timestamps` are int ms since the epoch, or None without event time.
    `keys` are the raw keys that the sender's key function returned, or None on a stream that is not
    keyed.
    """

    __slots__ = ("keys", "taken", "timestamps", "values", "watermark", "watermarks")

    def __init__(
        self,
        values: list[Any],
        timestamps: list[int] | None = None,
        keys: list[Any] | None = None,
        watermarks: list[int] | None = None,
        watermark: int = MIN_WATERMARK,
        taken: bool = False,
    ) -> None:
        self.values = values
        self.timestamps = timestamps
        self.keys = keys
        self.watermarks = watermarks
        self.watermark = watermark
        self.taken = taken

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"RecordBatch({len(self.values)} records, watermark={self.watermark})"

    def slice(self, start: int, stop: int) -> RecordBatch:
        """Returns the records from `start` to `stop` (exclusive), with the watermark that was in
        force after the last of them.

        Copies the lists, shares the values.
        """
        count = len(self.values)
        keys, watermarks = self.keys, self.watermarks
        if stop >= count:
            watermark = self.watermark
        else:
            watermark = MIN_WATERMARK if watermarks is None else watermarks[stop]
        values = self.values[start:stop]
        return RecordBatch(
            values,
            None if self.timestamps is None else self.timestamps[start:stop],
            None if keys is None else values if keys is self.values else keys[start:stop],
            None if watermarks is None else watermarks[start:stop],
            watermark,
            self.taken,
        )

    def pick(self, indices: Sequence[int]) -> RecordBatch:
        """Returns the records at `indices`, which never decrease, with their times, keys and
        watermarks.

        The watermark after the last record is the same as in this batch.
        """
        values, timestamps, keys, watermarks = (
            self.values,
            self.timestamps,
            self.keys,
            self.watermarks,
        )
        return RecordBatch(
            [values[i] for i in indices],
            None if timestamps is None else [timestamps[i] for i in indices],
            None if keys is None else [keys[i] for i in indices],
            None if watermarks is None else [watermarks[i] for i in indices],
            self.watermark,
            self.taken,
        )

    def with_watermarks(
        self, watermarks: list[int] | None, watermark: int = MIN_WATERMARK
    ) -> RecordBatch:
        """Returns the same records with other watermarks. The new batch shares the other lists."""
        return RecordBatch(
            self.values, self.timestamps, self.keys, watermarks, watermark, self.taken
        )

    def before_end(self) -> RecordBatch:
        """Returns the same records without the end of event time: replaces MAX_WATERMARK with the
        last watermark before it.
        """
        marks = self.watermarks
        if marks is None or not len(marks):
            return self.with_watermarks(None)
        if marks[-1] == MAX_WATERMARK:
            begin = bisect_left(marks, MAX_WATERMARK)
            if not begin:
                return self.with_watermarks(None)
            marks = [*marks[:begin], *[marks[begin - 1]] * (len(marks) - begin)]
        return self.with_watermarks(marks, marks[-1])

    def with_values(self, values: list[Any]) -> RecordBatch:
        """Returns a batch of `values`, one for each record of this batch, with the timestamps and
        watermarks of this batch.

        Drops the keys, because the new values may have other keys.
        """
        return RecordBatch(values, self.timestamps, None, self.watermarks, self.watermark)

    def select(self, indices: Sequence[int], values: list[Any]) -> RecordBatch:
        """Returns a batch of `values`, where `values[j]` stems from record `indices[j]` of this
        batch.

        Each value keeps the time and watermark of its record. Indices never decrease.
        """
        timestamps, watermarks = self.timestamps, self.watermarks
        return RecordBatch(
            values,
            None if timestamps is None else [timestamps[i] for i in indices],
            None,
            None if watermarks is None else [watermarks[i] for i in indices],
            self.watermark,
        )


def empty_batch(watermark: int = MIN_WATERMARK) -> RecordBatch:
    """Returns a batch without records, whose watermark is `watermark`."""
    return RecordBatch([], None, None, None, watermark)


def one_record(value: Any, timestamp: int | None, watermark: int) -> RecordBatch:
    """Returns a batch of one record, before and after which `watermark` is in force."""
    return RecordBatch(
        [value], None if timestamp is None else [timestamp], None, [watermark], watermark
    )


class Watermark(msgspec.Struct, frozen=True):
    """The event that says: no record with a timestamp <= `timestamp` follows on this channel.

    Sent when there is no batch of records that could carry the watermark.
    """

    timestamp: int


class WatermarkStatus(msgspec.Struct, frozen=True):
    """The event that a channel becomes idle, or active again.

    An idle channel does not hold the watermark back.
    """

    idle: bool


class CheckpointBarrier(msgspec.Struct, frozen=True):
    """The event that cuts the stream for checkpoint `checkpoint_id`, triggered at `timestamp_ms`
    (wall clock of the coordinator).

    The coordinator sends the barrier to the sources, and they send it downstream. The barrier
    contains all that tasks know about a checkpoint.
    """

    checkpoint_id: int
    timestamp_ms: int
    savepoint: bool = False
    """Whether the checkpoint is a savepoint: aligned, self-contained, in the canonical format."""
    unaligned: bool = False
    """Whether the barrier overtakes the in-flight data, which becomes part of the checkpoint."""
    aligned_timeout_ms: int | None = None
    """Time after `timestamp_ms` from which an aligned barrier becomes unaligned.

    None: the barrier never becomes unaligned.
    """
    full: bool = False
    """Whether the checkpoint refers to no file of an earlier checkpoint."""
    directory: str = ""
    """URL of the directory for the checkpoint's files; empty for the flow's own store."""
    final: bool = False
    """Whether every task has processed all its data, so that the tasks end once the checkpoint is
    complete.
    """
    holds: bool = False
    """Whether tasks process nothing after the checkpoint, because the job restarts from it. If the
    checkpoint is aborted, the tasks go on.
    """


class CheckpointAnnouncement(msgspec.Struct, frozen=True):
    """The event that says: the barrier of checkpoint `checkpoint_id` is on its way.

    The announcement overtakes records. An operator that waits for asynchronous calls then stores
    its waiting input in its state, so that the barrier can arrive.
    """

    checkpoint_id: int


class CancelCheckpointMarker(msgspec.Struct, frozen=True):
    """The event that checkpoint `checkpoint_id` will not complete, so that tasks stop waiting for
    its barriers.
    """

    checkpoint_id: int


class EndOfData(msgspec.Struct, frozen=True):
    """The event that no record follows on this channel.

    `drain` distinguishes a finished stream (MAX watermark, `finish`) from a stop that keeps its
    windows open.
    """

    drain: bool = True


class EndOfPartition(msgspec.Struct, frozen=True):
    """The event that is the last element of a channel. The channel is released afterwards."""


class LatencyMarker(msgspec.Struct, frozen=True):
    """An event that measures the latency from a source.

    It bypasses functions and keeps its order among the records of its channel.
    """

    emitted_ms: int
    source: str
    subtask: int


Event = (
    Watermark
    | WatermarkStatus
    | CheckpointBarrier
    | CancelCheckpointMarker
    | EndOfData
    | EndOfPartition
    | LatencyMarker
    | CheckpointAnnouncement
)
"""Any element of a channel that is not a batch. Events need no credit."""


def last_instant(end: int) -> int:
    """Returns the last instant of a window that ends at `end`.

    The window fires at this instant. Event time itself ends at MAX_WATERMARK.
    """
    return min(end - 1, MAX_WATERMARK)


class TimeWindow(NamedTuple):
    """The instants from `start` up to `end` (exclusive), in ms. A window equals the plain tuple
    (start, end), and is stored as one.
    """

    start: int
    end: int

    @property
    def max_timestamp(self) -> int:
        """The last instant that belongs to the window."""
        return last_instant(self.end)


class GlobalWindow(NamedTuple):
    """The only window of a stream with global windows or count windows.

    It has no start and no end, and is over at the end of event time.
    """

    @property
    def start(self) -> None:
        return None

    @property
    def end(self) -> None:
        return None

    @property
    def max_timestamp(self) -> int:
        return MAX_WATERMARK


Window: TypeAlias = TimeWindow | GlobalWindow

GLOBAL = GlobalWindow()
