"""Arithmetic over int milliseconds: the bounds of slices and windows, the next time at which work
is due, and lateness.
"""

from __future__ import annotations

from math import gcd

from aioflow.core.elements import MAX_WATERMARK

__all__ = ["SliceGrid", "last_instant"]


def last_instant(end: int) -> int:
    """Returns the last instant of a window that ends at `end`.

    The window fires at this instant. Event time itself ends at MAX_WATERMARK.
    """
    return min(end - 1, MAX_WATERMARK)


class SliceGrid:
    """The arithmetic of slices and windows. It has no state, and works for times of any sign.

    All divisions floor, so negative times need no special case.
    """

    __slots__ = ("lateness", "offset", "size", "slide", "width")

    def __init__(self, size: int, slide: int, offset: int = 0, lateness: int = 0) -> None:
        self.size = size
        self.slide = slide
        self.width = gcd(size, slide)
        self.offset = offset % slide
        self.lateness = lateness

    def slice_start(self, timestamp: int) -> int:
        return timestamp - (timestamp - self.offset) % self.width

    def first_end(self, slice_start: int) -> int:
        """Returns the end of the earliest window that contains the slice that starts at
        `slice_start`.
        """
        return self.next_end(slice_start + self.width - 2)

    def last_end(self, slice_start: int) -> int:
        """Returns the end of the latest window that contains the slice that starts at
        `slice_start`.
        """
        return slice_start - (slice_start - self.offset) % self.slide + self.size

    def next_end(self, watermark: int) -> int:
        """Returns the first end of a window that the watermark has not passed.

        That is the least end with `end - 1 > watermark`.
        """
        origin = self.offset + self.size
        return watermark + 1 - (watermark + 1 - origin) % self.slide + self.slide

    def deadline(self, watermark: int) -> int:
        """Returns the next watermark at which a window fires or is dropped.

        After the end of time it is above MAX_WATERMARK.
        """
        if watermark < MAX_WATERMARK:
            return min(self._deadline(watermark), MAX_WATERMARK)
        return self._deadline(watermark)

    def _deadline(self, watermark: int) -> int:
        fires = self.next_end(watermark) - 1
        if not self.lateness:
            return fires
        return min(fires, self.next_end(watermark - self.lateness) - 1 + self.lateness)

    def live_from(self, watermark: int) -> int:
        """Returns the timestamp from which on records are only added to their slice.

        Earlier records fire windows again or are dropped.
        """
        if self.lateness:
            # No window of the slice may have fired, so the slice begins at or after the last end
            # that was passed.
            return self.next_end(watermark) - self.slide
        return self.late_below(watermark)

    def late_below(self, watermark: int) -> int:
        """Returns the timestamp below which records are late for all windows, lateness included."""
        return self.next_end(watermark - self.lateness) - self.size
