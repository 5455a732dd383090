"""Buffer debloating: sizes batches so that the queued data is about one second of work.

Large batches are cheap per record. But all queued data delays the next barrier, and the records
behind it. So a gate measures how fast its task processes records, and asks the producers for
batches of a size such that

    batches queued * records per batch = records that the task processes in `TARGET_S`

The size is in records, not in bytes as in Flink, because a consumer's rate is in records. The
producer knows the size of its records, and makes batches smaller if their bytes would not fit into
its share of the network memory. So the smaller one of a time and a number of bytes bounds what is
queued. The size may exceed a batch of rows, because columnar batches can hold more. The channels
that have not ended share the total. A change below `THRESHOLD` is not announced. Idle time does not
count, so a quiet input is not mistaken for a slow one.

The design follows BufferDebloater and BufferSizeEMA of Flink. Without clock or loop: `now_s` is an
argument.
"""

from __future__ import annotations

__all__ = ["BATCHES_PER_CHANNEL", "RECORDS_MIN", "TARGET_S", "THRESHOLD", "BufferDebloater"]

TARGET_S = 1.0
"""Target for the time that the consumer needs for all queued data."""

THRESHOLD = 0.25
"""Minimum relative change of the size that is announced."""

RECORDS_MIN = 1
"""Minimum batch size. A task that needs it takes four batches a second from a channel.

So the fixed cost of a batch does not matter.
"""

BATCHES_PER_CHANNEL = 4
"""Number of batches that may wait for a consumer, or be on the way to it.

They keep two processes busy while the loop of each does other work for a slice. With 2 both wait
for one another (a quarter less throughput by wall, a tenth by CPU); 8 gain no more than 4.
"""

PERIOD_S = 0.2
"""Working time between two measurements; Flink's default."""

SMOOTHING = 2 / 21
"""Weight of one period in the moving average, as in an average over 20 periods."""


class BufferDebloater:
    """Computes the batch size for one gate with `channels` channels.

    Producers make batches of up to `records_max` records. `records` is the last announced size.
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
        """Moving average of records per second; 0 before the first measurement."""
        self._since: float | None = None
        """Time at which the task started on its batch; None while idle."""
        self._in_hand = 0
        self._taken = 0
        self._active_s = 0.0

    @property
    def records_per_s(self) -> float:
        """Moving average of records per second of work; 0.0 before the first measurement."""
        return self._per_s

    @property
    def is_active(self) -> bool:
        """Whether the task processes a batch of this gate now, as reported by `took` and `idle`."""
        return self._since is not None

    def share_among(self, channels: int) -> None:
        """Sets the number of channels that have not ended."""
        self._batches = max(1, channels) * BATCHES_PER_CHANNEL

    def took(self, now_s: float, records: int) -> int | None:
        """Notes that the task begins to process a batch of `records` records, and so has finished
        the previous batch.

        Returns the batch size to announce, None for no change.
        """
        self._settle(now_s)
        self._since = now_s
        self._in_hand = records
        return self._look() if self._active_s >= PERIOD_S else None

    def idle(self, now_s: float) -> None:
        """Notes that the task has finished its batch, and that no other batch waits."""
        self._settle(now_s)
        self._since = None

    def stalled(self) -> bool:
        """Notes that the task cannot process what it takes.

        Returns whether the batch size is new: the minimum, so that little more comes.
        """
        self._since = None
        self._in_hand = self._taken = 0
        self._active_s = 0.0
        is_new, self.records = self.records != self.records_min, self.records_min
        return is_new

    def _settle(self, now_s: float) -> None:
        if self._since is not None:
            self._active_s += now_s - self._since
            self._taken += self._in_hand
            self._in_hand = 0

    def _look(self) -> int | None:
        rate = self._taken / self._active_s
        # One batch of a slow task takes many periods, so it weighs as much as all of them.
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
