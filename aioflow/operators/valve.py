"""Combines the watermarks of the channels of a task.

The combined watermark is the minimum over the active channels. It only rises, and it is never
MAX_WATERMARK while a channel could still send records. A channel that has reached MAX_WATERMARK is
finished. It is ignored until all channels are finished.

A channel that becomes active after being idle is ignored until its watermark has reached the
combined watermark.

Each record carries the watermark that is in force before it. While a batch of one channel is
processed, the other channels do not advance. So the combined watermarks are the watermarks of the
batch, clamped between the last output and the minimum of the other channels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from aioflow.core.elements import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    RecordBatch,
    Watermark,
    WatermarkStatus,
)

__all__ = [
    "BEGINNING",
    "ChannelTime",
    "StatusWatermarkValve",
    "clamped",
    "mark_after_restore",
]


class ChannelTime(NamedTuple):
    """The event time and status of one channel of a valve, as stored in a checkpoint."""

    watermark: int = MIN_WATERMARK
    idle: bool = False
    aligned: bool = True
    """Whether the channel takes part in the minimum. It does not while it is idle, or below the
    last output after being idle.
    """


BEGINNING = ChannelTime()
"""State of a channel that has sent no watermark yet."""


class StatusWatermarkValve:
    """The minimum of the watermarks over the aligned, active channels of one input.

    A channel is aligned, that is, it takes part in the minimum, while it is not idle and its
    watermark is not below the last output. Only a channel that was idle can be below the last
    output. The valve is idle when all its channels are idle or finished, and at least one is not
    finished. The design follows the current form of Flink's StatusWatermarkValve.
    """

    __slots__ = ("_aligned", "_held", "_idle", "_watermarks", "idle", "watermark")

    def __init__(self, n_channels: int) -> None:
        if n_channels < 1:
            raise ValueError(f"a valve needs at least one channel, got {n_channels}")
        self.watermark = MIN_WATERMARK
        """The last emitted watermark."""
        self.idle = False
        """The last emitted status: whether the valve is idle."""
        self._watermarks = [MIN_WATERMARK] * n_channels
        self._idle = [False] * n_channels
        self._aligned = [True] * n_channels
        # The watermark with which each channel takes part in the minimum, MAX if it does not. So
        # the minimum is one call in C.
        self._held = [MIN_WATERMARK] * n_channels

    def input_watermark(self, channel: int, watermark: int) -> int | None:
        """Handles `watermark` of `channel`. Returns the combined watermark if it has risen,
        otherwise None.

        Ignores a watermark that is lower than the last one of the channel. On an idle channel,
        ignores any watermark except MAX_WATERMARK.
        """
        if watermark == MAX_WATERMARK:
            self._watermarks[channel] = MAX_WATERMARK
            self._held[channel] = MAX_WATERMARK
            return self._advance()
        if self._idle[channel] or watermark <= self._watermarks[channel]:
            return None
        self._watermarks[channel] = watermark
        if self._aligned[channel] or watermark >= self.watermark:
            self._aligned[channel] = True
            self._held[channel] = watermark
        return self._advance()

    def input_status(self, channel: int, idle: bool) -> list[Watermark | WatermarkStatus]:
        """Handles that `channel` has become idle or active. Returns the watermarks and statuses to
        emit, in order.

        An unchanged status has no effect.
        """
        if self._idle[channel] == idle or self._watermarks[channel] == MAX_WATERMARK:
            return []
        self._idle[channel] = idle
        outputs: list[Watermark | WatermarkStatus] = []
        if idle:
            self._aligned[channel] = False
            self._held[channel] = MAX_WATERMARK
            if not self._settle_idle(outputs):
                self._append(outputs, self._advance())
            return outputs
        if self.idle:
            self.idle = False
            outputs.append(WatermarkStatus(idle=False))
        if self._watermarks[channel] >= self.watermark:
            self._aligned[channel] = True
            self._held[channel] = self._watermarks[channel]
        self._append(outputs, self._advance())
        return outputs

    def input_finished(self, channel: int) -> list[Watermark | WatermarkStatus]:
        """Handles the end of `channel`, which sets its watermark to MAX_WATERMARK.

        Returns the watermarks and statuses to emit, in order.
        """
        outputs: list[Watermark | WatermarkStatus] = []
        self._append(outputs, self.input_watermark(channel, MAX_WATERMARK))
        if not self.idle:
            self._settle_idle(outputs)
        return outputs

    def input_batch(self, channel: int, batch: RecordBatch) -> RecordBatch:
        """Returns `batch` with the combined watermarks in place of the channel's watermarks.

        Returns `batch` itself if both are equal.
        """
        watermarks, last, final = batch.watermarks, self.watermark, batch.watermark
        held = self._held
        if final <= self._watermarks[channel]:
            # The watermark does not rise within the batch. A batch without watermarks is passed on
            # unchanged.
            return (
                batch if watermarks is None and final <= last else batch.with_watermarks(None, last)
            )
        if self._idle[channel]:
            if final == MAX_WATERMARK:
                self.input_watermark(channel, final)
            return batch.with_watermarks(None, self.watermark)
        if len(held) == 1:
            limit = MAX_WATERMARK
        else:
            own, held[channel] = held[channel], MAX_WATERMARK
            limit = min(held)
            held[channel] = own
        if final == MAX_WATERMARK and watermarks is not None:
            # A finished channel does not count, so its watermark must be counted first.
            self.input_watermark(channel, watermarks[-1])
        self.input_watermark(channel, final)
        combined = self.watermark
        if watermarks is None:
            return batch if combined == final else batch.with_watermarks(None, combined)
        if combined == final and watermarks[0] >= last and watermarks[-1] <= limit:
            return batch
        return batch.with_watermarks(clamped(watermarks, last, limit), combined)

    def state_of(self, channel: int) -> ChannelTime:
        """Returns the event time and the status of `channel`, for a checkpoint."""
        return ChannelTime(self._watermarks[channel], self._idle[channel], self._aligned[channel])

    @property
    def channels(self) -> list[ChannelTime]:
        """The event time and status of each channel."""
        return [self.state_of(channel) for channel in range(len(self._watermarks))]

    def resume(self, watermark: int) -> None:
        """Sets the last output to `watermark`. Called before any input, and before `restore`."""
        self.watermark = watermark

    def restore(self, channel: int, time: ChannelTime) -> None:
        """Restores the state of `channel`. Called before any input, and followed by `restored`."""
        self._watermarks[channel], self._idle[channel], self._aligned[channel] = time
        self._held[channel] = time.watermark if time.aligned else MAX_WATERMARK

    def restored(self) -> list[Watermark | WatermarkStatus]:
        """Returns the watermark and status to emit after a restore."""
        outputs: list[Watermark | WatermarkStatus] = []
        if not self._settle_idle(outputs):
            self._append(outputs, self._advance())
        return outputs

    def _advance(self) -> int | None:
        # The minimum over the aligned channels, if there are any and it is above the last output.
        lowest = min(self._held)
        if lowest == MAX_WATERMARK and min(self._watermarks) < MAX_WATERMARK:
            return None
        if lowest > self.watermark:
            self.watermark = lowest
            return lowest
        return None

    def _settle_idle(self, outputs: list[Watermark | WatermarkStatus]) -> bool:
        # If no channel is left that could advance the valve, flushes the maximum over all channels
        # and emits the idle status. Returns whether it did.
        open_channels = [
            i for i, watermark in enumerate(self._watermarks) if watermark < MAX_WATERMARK
        ]
        if not open_channels or not all(self._idle[i] for i in open_channels):
            return False
        highest = max(self._watermarks[i] for i in open_channels)
        if highest > self.watermark:
            self.watermark = highest
            outputs.append(Watermark(highest))
        self.idle = True
        outputs.append(WatermarkStatus(idle=True))
        return True

    @staticmethod
    def _append(outputs: list[Watermark | WatermarkStatus], watermark: int | None) -> None:
        if watermark is not None:
            outputs.append(Watermark(watermark))


def mark_after_restore(kept: Sequence[int], parallelism: int) -> int:
    """Returns the watermark that is in force for a restored element.

    `kept` contains the watermark before the restore and the number of former subtasks, or is empty
    in state of earlier versions. Returns that watermark, but MIN_WATERMARK if there were several
    former subtasks and the parallelism has changed. Elements of several former subtasks may meet
    then, and the watermark of one must not make elements of another late.
    """
    mark, former = kept or (MIN_WATERMARK, 1)
    return mark if former in (1, parallelism) else MIN_WATERMARK


def clamped(watermarks: list[int], low: int, high: int) -> list[int] | None:
    """Returns `watermarks`, a non-decreasing list, with each value clamped to [low, high].

    Returns None if all values would be `low`.
    """
    if type(watermarks) is not list:
        from aioflow.columns import expressions

        # A column, which reads like a list.
        return expressions.clamped(watermarks, low, high)  # type: ignore[arg-type, return-value]
    start, count = bisect_right(watermarks, low), len(watermarks)
    if start == count or high <= low:
        return None
    stop = bisect_right(watermarks, high, start)
    return [low] * start + watermarks[start:stop] + [high] * (count - stop)
