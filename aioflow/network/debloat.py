"""How many records a batch shall have, so that what is on the way to a slow consumer is about a
second of its work.

Large batches are cheap for each record, but all that is queued stands before the next barrier, and
before the record that just came. So a gate measures how fast its task really takes records and asks
the producers for batches of a size that makes

    batches on the way * records of a batch = records that the task takes in `TARGET_S`

The size is in records, not in bytes as in Flink: the unit of queueing, credit and permits is the
sealed batch, a consumer's rate is one of records, and within one process a batch has no bytes at
all. It may be more than a batch of rows can hold, as one of columns can. Channels that have ended
bring nothing, and the others share what they had. A change below `THRESHOLD` is not announced. Time
in which there was nothing to take does not count, so an input that has little is not taken for one
that is slow.

After BufferDebloater and BufferSizeEMA of Flink. No clock and no loop in here: `now_s` is an
argument.
"""

from __future__ import annotations

__all__ = ["BATCHES_PER_CHANNEL", "RECORDS_MIN", "TARGET_S", "THRESHOLD", "BufferDebloater"]

TARGET_S = 1.0
"""How long what is on the way may take the consumer."""

THRESHOLD = 0.25
"""Changes by a smaller share are not worth a message."""

RECORDS_MIN = 1
"""A task for which a second of work is so few records does not notice what their batches cost:
those of a channel are four a second.
"""

BATCHES_PER_CHANNEL = 4
"""Batches of one channel that hold a permit, from being sealed to being taken: what its
producer's pool gives it.
"""

PERIOD_S = 0.2
"""Of working time, between two looks; Flink's default."""

SMOOTHING = 2 / 21
"""Of one period, as an average over 20: after 10 s at half the rate the average is at 0.51."""


class BufferDebloater:
    """Of one gate with `channels`, whose producers make batches of up to `records_max`.

    `records` was announced last.
    """

    __slots__ = (
        "_active_s",
        "_batches",
        "_in_hand",
        "_per_s",
        "_since",
        "_taken",
        "records",
        "records_max",
        "records_min",
    )

    def __init__(self, channels: int, records_max: int, records_min: int = RECORDS_MIN) -> None:
        self.records_max = records_max
        self.records_min = min(records_min, records_max)
        self.records = records_max
        self.share_among(channels)
        self._per_s = 0.0
        """Moving average of the records a second; 0 before the first look."""
        self._since: float | None = None
        """When the batch in hand was taken; None while there is nothing to do."""
        self._in_hand = 0
        self._taken = 0
        self._active_s = 0.0

    @property
    def records_per_s(self) -> float:
        """Moving average while there is something to do; 0.0 before the first look."""
        return self._per_s

    @property
    def is_active(self) -> bool:
        """Whether the task works on a batch of this gate, as far as is known here."""
        return self._since is not None

    def share_among(self, channels: int) -> None:
        """Only so many bring anything from now on."""
        self._batches = max(1, channels) * BATCHES_PER_CHANNEL

    def took(self, now_s: float, records: int) -> int | None:
        """The task takes a batch, so it is through with the one before.

        Returns the size to announce, None for no change.
        """
        self._settle(now_s)
        self._since = now_s
        self._in_hand = records
        return self._look() if self._active_s >= PERIOD_S else None

    def idle(self, now_s: float) -> None:
        """The task is through with its batch, and there is no other."""
        self._settle(now_s)
        self._since = None

    def _settle(self, now_s: float) -> None:
        if self._since is not None:
            self._active_s += now_s - self._since
            self._taken += self._in_hand
            self._in_hand = 0

    def _look(self) -> int | None:
        rate = self._taken / self._active_s
        # One batch of a slow task takes many periods: it weighs as much as they.
        weight = 1.0 - (1.0 - SMOOTHING) ** (self._active_s / PERIOD_S)
        self._per_s = rate if self._per_s == 0.0 else self._per_s + (rate - self._per_s) * weight
        self._taken = 0
        self._active_s = 0.0
        wanted = int(self._per_s * TARGET_S / self._batches)
        size = max(self.records_min, min(self.records_max, wanted))
        if abs(size - self.records) < THRESHOLD * self.records:
            return None
        self.records = size
        return size
