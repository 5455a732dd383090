"""The open batch of one subpartition: plain lists that a routing loop appends to.

The consumer sees nothing of the open batch before `seal`. The lists `values`, `timestamps`, `keys`
and `watermarks` are public because generated routing loops append to them directly. At every
`seal`, `timestamps` and `keys` are either empty or as long as `values`. If records are their own
keys, `keys` is the list `values` itself. This avoids a second copy, and the encoder of the sealed
batch need not compare two lists.

Entries of `watermarks` are added lazily. `told` is the last watermark that was sent to the channel,
`watermark` the current watermark. A record without an entry was appended under the current
watermark. So a loop over a batch with a constant watermark appends no entries, and calls
`advance_watermark` after the batch. A loop over a batch with a list of watermarks calls
`start_watermarks()` first, appends one entry per record, and calls `advance_watermark` at the end.
A sealed batch has no list of watermarks if all its records were appended under `told`. But even a
list of equal entries is kept if they are above `told`. Without the list, the consumer would process
the records under a watermark that is too low.
"""

from __future__ import annotations

from typing import Any

from aioflow.core.column_batch import COLUMN_RECORDS_MAX
from aioflow.core.elements import BATCH_RECORDS_MAX, MIN_WATERMARK, RecordBatch

__all__ = ["COLUMN_RECORDS_PER_ROW", "NO_KEY", "BatchBuilder"]

COLUMN_RECORDS_PER_ROW = COLUMN_RECORDS_MAX // BATCH_RECORDS_MAX
"""Ratio of the maximum number of records in a columnar batch to the maximum in a batch of rows."""

NO_KEY: Any = object()
"""Means "this stream has no keys"; None is a valid key."""


class BatchBuilder:
    """Builds the batches of one subpartition: append until `is_full`, then call `seal`.

    `watermark` is the current watermark, after all records so far.
    """

    __slots__ = (
        "_covered",
        "_sealed_records",
        "batch_records_max",
        "is_closed",
        "keys",
        "taken",
        "timestamps",
        "told",
        "values",
        "watermark",
        "watermarks",
    )

    def __init__(self, batch_records_max: int = BATCH_RECORDS_MAX) -> None:
        self.batch_records_max = batch_records_max
        self.values: list[Any] = []
        self.timestamps: list[int] = []
        self.keys: list[Any] = []
        self.watermarks: list[int] = []
        self.taken = False
        self.watermark = MIN_WATERMARK
        self.told = MIN_WATERMARK
        """The last watermark that was sealed into a batch, or sent as an event."""
        self.is_closed = False
        self._covered = 0
        """Number of leading records that need no entry in `watermarks`, because the consumer has
        their watermark; valid while this list is empty.
        """
        self._sealed_records = 0

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_full(self) -> bool:
        return len(self.values) >= self.batch_records_max

    @property
    def has_news(self) -> bool:
        """Whether there are records, or a higher watermark, that the consumer has not received."""
        return bool(self.values) or self.watermark > self.told

    @property
    def is_finished(self) -> bool:
        """Whether the builder is closed and all records are sealed."""
        return self.is_closed and not self.values

    def append(self, value: Any, timestamp: int | None = None, key: Any = NO_KEY) -> bool:
        """Appends one record under the current watermark.

        Returns False if the batch is full or closed. Either all records of a batch carry a
        timestamp or none does; likewise for keys.
        """
        values = self.values
        if self.is_closed or len(values) >= self.batch_records_max:
            return False
        if self.keys is values:
            self.keys = list(values)
        values.append(value)
        if timestamp is not None:
            self.timestamps.append(timestamp)
        if key is not NO_KEY:
            self.keys.append(key)
        return True

    def extend(self, batch: RecordBatch, start: int = 0) -> int:
        """Appends the records of `batch` from index `start` on, while there is room. Returns their
        number.

        Returns 0 if the open batch is full, or if only one of the two batches has timestamps, has
        keys, or is marked `taken`. Then call `seal`, and try again.
        """
        values = self.values
        if not batch.values:
            self.advance_watermark(batch.watermark)
            return 0
        count = min(len(batch.values) - start, self.batch_records_max - len(values))
        if self.is_closed or count < 0 or (values and not self._same_shape(batch)):
            return 0
        self.taken = batch.taken
        stop = start + count
        watermarks, keys = batch.watermarks, batch.keys
        if watermarks is not None:
            self.start_watermarks()
        if count and keys is batch.values and (not values or self.keys is values):
            self.keys = values
        elif keys is not None:
            if self.keys is values:
                self.keys = list(values)
            self.keys.extend(keys[start:stop])
        values.extend(batch.values[start:stop])
        if batch.timestamps is not None:
            self.timestamps.extend(batch.timestamps[start:stop])
        if watermarks is not None:
            entries = watermarks[start:stop]
            if entries and entries[0] < self.watermark:
                # The list must not decrease, because the channel has received earlier
                # watermarks.
                entries = [max(entry, self.watermark) for entry in entries]
            self.watermarks.extend(entries)
        if stop == len(batch.values):
            after = batch.watermark
        else:
            after = MIN_WATERMARK if watermarks is None else watermarks[stop]
        self.advance_watermark(after)
        return count

    def seal_whole(self, batch: RecordBatch) -> RecordBatch | None:
        """Does the same as `extend(batch)` and `seal()`, but returns a batch with the lists of
        `batch` itself instead of copies.

        Returns None and changes nothing unless the builder is open and empty, and the channel has
        received the current watermark.
        """
        told = self.told
        if self.values or self.is_closed or not batch.values or self.watermark > told:
            return None
        watermarks, after = batch.watermarks, max(told, batch.watermark)
        if watermarks is not None:
            if watermarks[0] < told:
                return None  # Entries would have to be raised.
            if watermarks[-1] <= told:
                watermarks = None
            elif watermarks[-1] > after:
                after = watermarks[-1]
        self.watermark = self.told = after
        self._sealed_records += len(batch.values)
        return batch.with_watermarks(watermarks, after if after > told else MIN_WATERMARK)

    def advance_watermark(self, watermark: int) -> None:
        """Sets the watermark after the records so far. A watermark that is lower than the current
        one has no effect.
        """
        if watermark > self.watermark:
            self._fill()
            self.watermark = watermark

    def start_watermarks(self) -> None:
        """Starts the list `watermarks`, to which the caller appends one entry for each further
        record.

        Adds the entries of the records that are open already.
        """
        self._fill()
        if not self.watermarks:
            self.watermarks = [self.told] * len(self.values)

    def seal(self, watermark: int | None = None) -> RecordBatch:
        """Returns the open records as a batch followed by `watermark` (default: the current one).

        Starts the next open batch. The returned batch has no records if none were appended, and no
        watermark either if `has_news` is False.
        """
        self._fill()
        if watermark is not None:
            self.advance_watermark(watermark)
        values = self.values
        count = len(values)
        timestamps = self.timestamps or None
        keys = self.keys or None
        watermarks = self.watermarks or None
        assert timestamps is None or len(timestamps) == count, (
            f"{len(timestamps)} timestamps for {count} records"
        )
        assert keys is None or len(keys) == count, f"{len(keys)} keys for {count} records"
        told = self.told
        if watermarks is not None:
            assert len(watermarks) == count, f"{len(watermarks)} watermarks for {count} records"
            # The list never decreases, so its last entry alone tells whether any entry is news.
            if watermarks[-1] <= told:
                watermarks = None
            else:
                self.watermark = max(self.watermark, watermarks[-1])
        after = self.watermark
        batch = RecordBatch(
            values,
            timestamps,
            keys,
            watermarks,
            after if after > told else MIN_WATERMARK,
            self.taken,
        )
        self.values = []
        if timestamps is not None:
            self.timestamps = []
        if keys is not None:
            self.keys = []
        if self.watermarks:
            self.watermarks = []
        self.taken = False
        self._sealed_records += count
        self.told = after
        return batch

    def note_told(self) -> int:
        """Returns the current watermark, and notes that the caller sends it as an event."""
        self.told = self.watermark
        return self.told

    def finish(self) -> int:
        """Closes the builder for appends and returns the number of records so far. Idempotent.

        The next `seal` still returns the open records. `is_finished` is False until then.
        """
        self.is_closed = True
        return self._sealed_records + len(self.values)

    def clear(self) -> None:
        """Drops the open records, because the consumer is gone."""
        self.values, self.timestamps, self.keys, self.watermarks = [], [], [], []
        self.taken = False
        self._covered = 0

    def _fill(self) -> None:
        """Adds an entry with the current watermark to `watermarks` for each record without an
        entry.

        If the consumer already has this watermark, only notes how many records need no entry.
        """
        count = len(self.values)
        if not self.watermarks:
            if self.watermark <= self.told:
                self._covered = count
                return
            self.watermarks = [self.told] * self._covered
        self.watermarks.extend([self.watermark] * (count - len(self.watermarks)))

    def _same_shape(self, batch: RecordBatch) -> bool:
        return (
            (batch.timestamps is not None) == bool(self.timestamps)
            and (batch.keys is not None) == bool(self.keys)
            and batch.taken is self.taken
        )
