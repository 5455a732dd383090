"""Windows as data: assigners, which assign elements to windows, and evictors, which choose the
elements that a firing window keeps.

The classes follow Flink's `api.windowing`; triggers have a module of their own. Nothing here
touches a stream: the window operators call these objects. Every object is immutable and shared by
all subtasks.

Times are int ms and may be negative. The last instant of a window [start, end) is its
`max_timestamp`, `end - 1`.

The module also contains the arithmetic over int milliseconds: the bounds of slices and windows, the
next time at which work is due, and lateness.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import gcd
from types import GeneratorType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from msgspec import convert

from aioflow.advice.hints import explained
from aioflow.core.elements import GLOBAL, MAX_WATERMARK, GlobalWindow, TimeWindow, Window
from aioflow.core.errors import GraphError
from aioflow.core.functions import WindowResult
from aioflow.core.signatures import check_takes
from aioflow.core.timeunits import Duration, is_event_time, positive_ms, signed_ms, to_ms
from aioflow.expressions.nodes import Expr
from aioflow.expressions.rows import compile_row
from aioflow.operators.window.triggers import Trigger, default_trigger, global_trigger

__all__ = [
    "Evictor",
    "EvictorContext",
    "GlobalWindows",
    "SessionWindows",
    "SliceGrid",
    "SlidingWindows",
    "TimestampedValue",
    "TumblingWindows",
    "WindowAssigner",
    "global_window",
    "keep_last",
    "keep_within",
    "keeps_some",
    "last_kept",
    "session",
    "sliding",
    "tumbling",
    "window_fn_results",
    "window_results",
]


class SliceGrid:
    """The arithmetic of slices and windows. It has no state, and also works for negative times.

    A slice is `width` ms long, the greatest common divisor of `size` and `slide`, so each window is
    a whole number of slices.
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
        """Returns the first end of a window that `watermark` has not passed.

        This is the least end with `end - 1 > watermark`.
        """
        origin = self.offset + self.size
        return watermark + 1 - (watermark + 1 - origin) % self.slide + self.slide

    def deadline(self, watermark: int) -> int:
        """Returns the first watermark above `watermark` at which a window fires or is dropped.

        The result is above MAX_WATERMARK only if `watermark` is MAX_WATERMARK.
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
        """Returns the timestamp from which on a record is only added to its slice.

        Records with an earlier timestamp make windows fire again, or are dropped.
        """
        if self.lateness:
            # No window of the slice may have fired, so the slice begins at or after the last end
            # that was passed.
            return self.next_end(watermark) - self.slide
        return self.late_below(watermark)

    def late_below(self, watermark: int) -> int:
        """Returns the timestamp below which records are late for all windows, lateness included."""
        return self.next_end(watermark - self.lateness) - self.size


logger = logging.getLogger(__name__)

T = TypeVar("T")


_RESULTS = list[WindowResult[Any, Any]]


def window_fn_results(made: Any) -> Iterable[Any]:
    """Returns `made`, the result of a plain `window_fn(key, window, value)`, as elements: one
    value, or all values of a generator.
    """
    return made if type(made) is GeneratorType else (made,)


def window_results(
    keys: Iterable[Any], start: int | None, end: int | None, values: Iterable[Any]
) -> list[WindowResult[Any, Any]]:
    """Returns a `WindowResult` for each key of one window, from `keys` and their `values`.

    This takes 0.65 of the time of a call of `tuple.__new__` for each result.
    """
    rows = list(zip(keys, repeat(start), repeat(end), values, strict=False))
    return convert(rows, _RESULTS)


class WindowAssigner(Protocol):
    """The interface of an object that assigns elements to windows.

    The argument `timestamp` of `assign` is event time, or processing time for a processing-time
    assigner.
    """

    @property
    def is_event_time(self) -> bool: ...
    @property
    def is_merging(self) -> bool:
        """Whether windows that overlap or touch are merged, as sessions are."""

    def assign(self, value: Any, timestamp: int) -> Sequence[Window]: ...
    def default_trigger(self) -> Trigger[Any]: ...


@dataclass(frozen=True, slots=True)
class TumblingWindows:
    """Assigner of adjacent windows of `size` ms. Windows start at `offset` plus each multiple of
    `size`.
    """

    size: int
    offset: int = 0
    is_event_time: bool = True
    is_merging: bool = field(default=False, init=False)

    def assign(self, value: Any, timestamp: int) -> tuple[TimeWindow]:
        start = timestamp - (timestamp - self.offset) % self.size
        return (TimeWindow(start, start + self.size),)

    def default_trigger(self) -> Trigger[Any]:
        return default_trigger(self.is_event_time)

    def __str__(self) -> str:
        return f"tumbling({self.size} ms{_offset(self.offset)}{_domain(self.is_event_time)})"


@dataclass(frozen=True, slots=True)
class SlidingWindows:
    """Assigner of windows of `size` ms, one starting every `slide` ms.

    With `slide > size` some instants belong to no window.
    """

    size: int
    slide: int
    offset: int = 0
    is_event_time: bool = True
    is_merging: bool = field(default=False, init=False)

    def assign(self, value: Any, timestamp: int) -> list[TimeWindow]:
        size, slide = self.size, self.slide
        last = timestamp - (timestamp - self.offset) % slide
        # Earliest first, so that an element fires its windows in order of time.
        first = last - (size - 1 - (timestamp - last)) // slide * slide
        return [TimeWindow(start, start + size) for start in range(first, last + 1, slide)]

    def default_trigger(self) -> Trigger[Any]:
        return default_trigger(self.is_event_time)

    def __str__(self) -> str:
        return (
            f"sliding({self.size} ms by {self.slide} "
            f"ms{_offset(self.offset)}{_domain(self.is_event_time)})"
        )


@dataclass(frozen=True, slots=True)
class SessionWindows:
    """Assigner of sessions: each element opens [t, t + gap); windows that overlap or touch merge.

    `gap` is a number of ms, or a function of the element that returns one.
    """

    gap: int | Callable[[Any], int | Duration]
    is_event_time: bool = True
    is_merging: bool = field(default=True, init=False)

    def assign(self, value: Any, timestamp: int) -> tuple[TimeWindow]:
        gap = self.gap
        if not isinstance(gap, int):
            given = gap(value)
            gap = given if isinstance(given, int) else to_ms(given, "session gap")
            if gap <= 0:
                raise ValueError(
                    f"the session gap function gave {given!r} for {value!r}; expected more than 0 "
                    "ms"
                )
        return (TimeWindow(timestamp, timestamp + gap),)

    def default_trigger(self) -> Trigger[Any]:
        return default_trigger(self.is_event_time)

    def __str__(self) -> str:
        gap = f"{self.gap} ms" if isinstance(self.gap, int) else "by element"
        return f"session({gap}{_domain(self.is_event_time)})"


@dataclass(frozen=True, slots=True)
class GlobalWindows:
    """Assigner of one window for all elements of a key.

    By default the window never fires by itself. With `at_end` it fires when event time ends.
    """

    at_end: bool = False
    is_event_time: bool = field(default=False, init=False)
    is_merging: bool = field(default=False, init=False)

    def assign(self, value: Any, timestamp: int) -> tuple[GlobalWindow]:
        return (GLOBAL,)

    def default_trigger(self) -> Trigger[Any]:
        return global_trigger(self.at_end)

    def __str__(self) -> str:
        return "global_window(at_end=True)" if self.at_end else "global_window()"


@explained
def tumbling(size: Duration, offset: Duration | int = 0, *, time: str = "event") -> TumblingWindows:
    """Returns an assigner of adjacent windows of `size`.

    `offset` moves the starts of the windows. It is a duration, or a number of ms, which may be
    negative; |offset| < size.
    """
    size_ms = positive_ms(size, "tumbling", "size")
    offset_ms = signed_ms(offset, "tumbling", "offset")
    if abs(offset_ms) >= size_ms:
        raise GraphError(f"tumbling: offset is {offset!r}, expected less than the size {size!r}")
    return TumblingWindows(size_ms, offset_ms, is_event_time(time, "tumbling"))


@explained
def sliding(
    size: Duration, slide: Duration, offset: Duration | int = 0, *, time: str = "event"
) -> SlidingWindows:
    """Returns an assigner of windows of `size`, one starting every `slide`.

    `offset` moves the starts of the windows, as in `tumbling`; |offset| < slide.
    """
    size_ms, slide_ms = positive_ms(size, "sliding", "size"), positive_ms(slide, "sliding", "slide")
    offset_ms = signed_ms(offset, "sliding", "offset")
    if abs(offset_ms) >= slide_ms:
        raise GraphError(f"sliding: offset is {offset!r}, expected less than the slide {slide!r}")
    if slide_ms > size_ms:
        logger.warning(
            "sliding: size %s is less than slide %s, so that what falls between two windows is in "
            "none of them and is dropped; the size "
            "comes first: sliding(%r, %r)",
            size, slide, slide, size,
        )  # fmt: skip
    return SlidingWindows(size_ms, slide_ms, offset_ms, is_event_time(time, "sliding"))


@explained
def session(
    gap: Duration | Callable[[Any], int | Duration] | Expr[Any], *, time: str = "event"
) -> SessionWindows:
    """Returns an assigner of session windows, which end after `gap` without an element.

    `gap` may be a function of the element that returns a duration or a number of ms.
    """
    is_event = is_event_time(time, "session")
    if isinstance(gap, Expr):
        return SessionWindows(compile_row(gap), is_event)
    if callable(gap):
        check_takes(gap, "gap of session()", "value")
        return SessionWindows(gap, is_event)
    return SessionWindows(positive_ms(gap, "session", "gap"), is_event)


@explained
def global_window(at_end: bool = False, *, time: str = "event") -> GlobalWindows:
    """Returns an assigner of one window for all elements of a key.

    Such a window needs a trigger, or `at_end=True` for one result per key at the end of the input.
    """
    is_event_time(time, "global_window")
    return GlobalWindows(at_end)


class TimestampedValue(NamedTuple, Generic[T]):
    """An element as passed to evictors.

    `timestamp` is its event time, or its time of arrival if the stream has no event time.
    """

    value: T
    timestamp: int


class EvictorContext(Protocol):
    """The context of an evictor's methods: the clocks that it may read."""

    @property
    def current_watermark(self) -> int | None: ...
    @property
    def current_processing_time(self) -> int: ...


class Evictor(Generic[T]):
    """Drops elements of a window that fires, before or after the window function is called.

    The lists of elements are in order of arrival.
    """

    def evict_before(
        self, elements: list[TimestampedValue[T]], window: Any, ctx: EvictorContext
    ) -> list[TimestampedValue[T]]:
        """Returns the elements to pass to the window function; the window keeps only these."""
        return elements

    def evict_after(
        self, elements: list[TimestampedValue[T]], window: Any, ctx: EvictorContext
    ) -> list[TimestampedValue[T]]:
        """Returns the elements that the window keeps for its next firing."""
        return elements


@dataclass(frozen=True, slots=True)
class _KeepLast(Evictor[Any]):
    n: int

    def evict_before(
        self, elements: list[TimestampedValue[Any]], window: Any, ctx: EvictorContext
    ) -> list[TimestampedValue[Any]]:
        return elements[-self.n :]


@dataclass(frozen=True, slots=True)
class _KeepWithin(Evictor[Any]):
    interval: int

    def evict_before(
        self, elements: list[TimestampedValue[Any]], window: Any, ctx: EvictorContext
    ) -> list[TimestampedValue[Any]]:
        if not elements:
            return elements
        cutoff = max(timestamp for _, timestamp in elements) - self.interval
        return [element for element in elements if element[1] > cutoff]


@explained
def keep_last(n: int) -> Evictor[Any]:
    """Returns an evictor that keeps the last `n` elements that arrived."""
    if type(n) is not int or n <= 0:
        raise GraphError(f"keep_last: n is {n!r}, expected an int above 0")
    return _KeepLast(n)


@explained
def keep_within(d: Duration) -> Evictor[Any]:
    """Returns an evictor that keeps the elements that are less than `d` older than the newest
    one.
    """
    return _KeepWithin(positive_ms(d, "keep_within", "duration"))


def last_kept(evictor: Evictor[Any] | None) -> int | None:
    """Returns `n` if `evictor` is `keep_last(n)`, otherwise None."""
    return evictor.n if isinstance(evictor, _KeepLast) else None


def keeps_some(evictor: Evictor[Any] | None) -> bool:
    """Returns whether `evictor` is None or built in.

    A built-in evictor leaves no window empty, and accepts plain pairs as elements.
    """
    return evictor is None or type(evictor) in (_KeepLast, _KeepWithin)


def _offset(offset: int) -> str:
    return f", offset {offset} ms" if offset else ""


def _domain(is_event_time: bool) -> str:
    return "" if is_event_time else ", processing time"
