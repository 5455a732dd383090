"""The open batch of one subpartition: plain lists that a routing loop appends to, until they are
sealed and handed over.

Nothing of it is visible to the consumer before `seal`. The lists `values`, `timestamps`, `keys` and
`watermarks` are public because generated routing loops append to them directly. `timestamps` and
`keys` are, at every `seal`, either empty or as long as `values`. Where records are their own keys,
`keys` is `values` itself, as in the batches that are gathered: nothing is copied twice then, and
whoever writes the sealed batch to bytes need not compare the two.

Watermarks are kept lazily. `told` is what the channel already knows, `watermark` what is in force
now. Records without an entry in `watermarks` saw the watermark in force, so a loop over a batch in
which it stands still appends none, and calls `advance_watermark` after the batch. A loop over a
batch with a list calls `start_watermarks()` before it, appends one entry a record, and calls
`advance_watermark` after it. A sealed batch carries no list iff no record saw a watermark above
`told`. A list that never moves inside the batch is kept too if it is above `told`: the channel
would otherwise take the records for earlier than they are.
"""

from __future__ import annotations

from typing import Any

from aioflow.core.column_batch import COLUMN_RECORDS_MAX
from aioflow.core.elements import BATCH_RECORDS_MAX, MIN_WATERMARK, RecordBatch

__all__ = ["COLUMN_RECORDS_PER_ROW", "NO_KEY", "BatchBuilder"]

COLUMN_RECORDS_PER_ROW = COLUMN_RECORDS_MAX // BATCH_RECORDS_MAX
"""Records that a batch of columns may have where one of rows may have one."""

NO_KEY: Any = object()
"""Stands for "this stream has no keys": None is a key."""


class BatchBuilder:
    """Appends until `is_full`, then `seal`.

    `watermark` is the watermark in force after everything appended so far.
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
        """The last watermark that was sealed into a batch, or noted as sent by an event."""
        self.is_closed = False
        self._covered = 0
        """Leading records that are known to need no entry in `watermarks` while that list is
        empty.
        """
        self._sealed_records = 0

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_full(self) -> bool:
        return len(self.values) >= self.batch_records_max

    @property
    def has_news(self) -> bool:
        """Is there anything that the consumer was not told: records, or a higher watermark?"""
        return bool(self.values) or self.watermark > self.told

    @property
    def is_finished(self) -> bool:
        """Closed, and everything was sealed."""
        return self.is_closed and not self.values

    def append(self, value: Any, timestamp: int | None = None, key: Any = NO_KEY) -> bool:
        """One record, under the watermark in force. False, and nothing is written, if the batch is
        full or closed.

        All records of one batch carry a timestamp or none does; likewise for keys.
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
        """Append records of `batch` from `start` on while there is room; how many were taken.

        None are if this is full, or of another shape: it has timestamps (or keys, or is `taken`)
        and `batch` has not, or the reverse. Then `seal` first, and go on.
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
                # The list must not decrease; what the channel will know already cannot be taken
                # back.
                entries = [max(entry, self.watermark) for entry in entries]
            self.watermarks.extend(entries)
        if stop == len(batch.values):
            after = batch.watermark
        else:
            after = MIN_WATERMARK if watermarks is None else watermarks[stop]
        self.advance_watermark(after)
        return count

    def seal_whole(self, batch: RecordBatch) -> RecordBatch | None:
        """What `extend(batch)` and `seal()` would give, with the lists of `batch` itself instead of
        copies.

        None, and nothing is written, unless this is open and holds nothing, and the watermark in
        force is known to the channel.
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
        """The watermark after the records so far. A lower one is no news."""
        if watermark > self.watermark:
            self._fill()
            self.watermark = watermark

    def start_watermarks(self) -> None:
        """From here on the caller appends one entry a record to `watermarks`; earlier records
        get theirs now.
        """
        self._fill()
        if not self.watermarks:
            self.watermarks = [self.told] * len(self.values)

    def seal(self, watermark: int | None = None) -> RecordBatch:
        """Hand the lists over as a batch, with `watermark` (or the one in force) after it, and
        start new ones.

        The batch may be empty: then it is a bare watermark, or nothing if `has_news` is False.
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
            # The list never decreases, so its last entry alone tells whether any is news.
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
        """The watermark in force goes to the consumer as an event now; returns it."""
        self.told = self.watermark
        return self.told

    def finish(self) -> int:
        """No more records: appends are refused. The number of records written so far. Idempotent.

        What is open stays until the next `seal`; only then `is_finished`.
        """
        self.is_closed = True
        return self._sealed_records + len(self.values)

    def clear(self) -> None:
        """Drop what is open: the consumer is gone."""
        self.values, self.timestamps, self.keys, self.watermarks = [], [], [], []
        self.taken = False
        self._covered = 0

    def _fill(self) -> None:
        """Give the records without an entry the watermark in force, or count them as covered if
        that is no news.
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
