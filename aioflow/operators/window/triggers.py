"""Triggers, which decide when a window fires: the built-in ones, and the base class for
user-defined ones. The design follows Flink's triggers.

A trigger is immutable and shared by all keys and windows. It keeps its data in partitioned state
for each key and window, which its context provides. So the data is part of every checkpoint and is
dropped with the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from aioflow.advice.hints import explained
from aioflow.core.elements import MAX_WATERMARK
from aioflow.core.errors import GraphError
from aioflow.core.functions import TriggerResult
from aioflow.core.states import ReducingStateDescriptor, StateDescriptor
from aioflow.core.timeunits import Duration, is_event_time, positive_ms

__all__ = [
    "NEXT_FIRE",
    "TRIGGER_COUNT",
    "PlainTrigger",
    "Trigger",
    "TriggerContext",
    "continuous",
    "default_trigger",
    "early",
    "fires_by_clock_alone",
    "global_trigger",
    "on_count",
    "on_processing_time",
    "on_watermark",
    "plain_trigger",
    "purging",
]

T = TypeVar("T")


class TriggerContext(Protocol):
    """The context of a trigger for one key and one window. It is valid only during the call."""

    @property
    def current_watermark(self) -> int | None: ...
    @property
    def current_processing_time(self) -> int: ...
    def register_event_time_timer(self, timestamp: int) -> None: ...
    def register_processing_time_timer(self, timestamp: int) -> None: ...
    def delete_event_time_timer(self, timestamp: int) -> None: ...
    def delete_processing_time_timer(self, timestamp: int) -> None: ...
    def get_partitioned_state(self, descriptor: StateDescriptor) -> Any:
        """Returns the state of this key and window that `descriptor` declares."""

    def merge_partitioned_state(self, descriptor: StateDescriptor) -> None:
        """Merges the state of the merged windows into the state of the resulting window. Called in
        `on_merge`.
        """


class Trigger(Generic[T]):
    """Decides when a window fires.

    Instances keep no data of their own. The context provides state for each key and window.
    """

    def on_element(
        self, value: T, timestamp: int | None, window: Any, ctx: TriggerContext
    ) -> TriggerResult:
        """Returns the decision after `value` was added to `window`."""
        raise TypeError(
            f"{type(self).__name__} must define on_element(self, value, timestamp, window, ctx)"
        )

    def on_event_time(self, time: int, window: Any, ctx: TriggerContext) -> TriggerResult:
        """Returns the decision when an event-time timer of this trigger is due."""
        return TriggerResult.CONTINUE

    def on_processing_time(self, time: int, window: Any, ctx: TriggerContext) -> TriggerResult:
        """Returns the decision when a processing-time timer of this trigger is due."""
        return TriggerResult.CONTINUE

    def on_merge(self, window: Any, ctx: TriggerContext) -> None:
        """Registers the timers of `window`, which results from a merge, and merges the state of the
        windows.

        Session windows require this method.
        """
        raise TypeError(
            f"{type(self).__name__} must define on_merge(self, window, ctx): session windows merge"
        )

    def clear(self, window: Any, ctx: TriggerContext) -> None:
        """Deletes the remaining timers and state of a window that is dropped."""

    @property
    def can_merge(self) -> bool:
        """Whether the trigger defines `on_merge`, which session windows need."""
        return type(self).on_merge is not Trigger.on_merge


@explained
def on_watermark() -> Trigger[Any]:
    """Returns a trigger that fires when the watermark passes the window's end.

    After that, the trigger fires for each late element within the allowed lateness.
    """
    return _OnWatermark()


@explained
def on_count(n: int) -> Trigger[Any]:
    """Returns a trigger that fires at every n-th element of the window.

    The window keeps its contents; use `purging` to drop them.
    """
    if type(n) is not int or n <= 0:
        raise GraphError(f"on_count: n is {n!r}, expected an int above 0")
    return _OnCount(n)


@explained
def on_processing_time(d: Duration | None = None) -> Trigger[Any]:
    """Returns a trigger that fires `d` of processing time after the first element since the last
    firing.

    Without `d`, the trigger fires when the clock reaches the window's end.
    """
    return (
        _AtProcessingTime()
        if d is None
        else _ProcessingTimeout(positive_ms(d, "on_processing_time", "duration"))
    )


@explained
def continuous(d: Duration, *, time: str = "event") -> Trigger[Any]:
    """Returns a trigger that fires every `d` of event time (or processing time), and at the
    window's end.
    """
    interval = positive_ms(d, "continuous", "duration")
    return (
        _ContinuousEventTime(interval)
        if is_event_time(time, "continuous")
        else _ContinuousProcessingTime(interval)
    )


@explained
def purging(t: Trigger[T]) -> Trigger[T]:
    """Returns a trigger that fires when `t` fires, and drops the window's contents each time."""
    if not isinstance(t, Trigger):
        raise GraphError(f"purging: expected a Trigger, got {t!r}")
    return _Purging(t)


@explained
def early(d: Duration) -> Trigger[Any]:
    """Returns a trigger that fires every `d` of processing time until the watermark passes the
    window's end.

    From then on it behaves like `on_watermark`.
    """
    return _Early(positive_ms(d, "early", "duration"))


def _earliest(a: int, b: int) -> int:
    return a if a < b else b


def _sum(a: int, b: int) -> int:
    return a + b


TRIGGER_COUNT: ReducingStateDescriptor[int] = ReducingStateDescriptor("trigger-count", _sum)
NEXT_FIRE: ReducingStateDescriptor[int] = ReducingStateDescriptor("trigger-next-fire", _earliest)


@dataclass(frozen=True, slots=True)
class _OnWatermark(Trigger[Any]):
    def on_element(
        self, value: Any, timestamp: int | None, window: Any, ctx: TriggerContext
    ) -> TriggerResult:
        watermark = ctx.current_watermark
        if watermark is not None and window.max_timestamp <= watermark:
            return TriggerResult.FIRE
        ctx.register_event_time_timer(window.max_timestamp)
        return TriggerResult.CONTINUE

    def on_event_time(self, time: int, window: Any, ctx: TriggerContext) -> TriggerResult:
        return TriggerResult.FIRE if time == window.max_timestamp else TriggerResult.CONTINUE

    def on_merge(self, window: Any, ctx: TriggerContext) -> None:
        # A window that is over already fires with the element that caused the merge, not by a
        # timer.
        watermark = ctx.current_watermark
        if watermark is None or window.max_timestamp > watermark:
            ctx.register_event_time_timer(window.max_timestamp)

    def clear(self, window: Any, ctx: TriggerContext) -> None:
        ctx.delete_event_time_timer(window.max_timestamp)


@dataclass(frozen=True, slots=True)
class _AtProcessingTime(Trigger[Any]):
    def on_element(
        self, value: Any, timestamp: int | None, window: Any, ctx: TriggerContext
    ) -> TriggerResult:
        ctx.register_processing_time_timer(window.max_timestamp)
        return TriggerResult.CONTINUE

    def on_processing_time(self, time: int, window: Any, ctx: TriggerContext) -> TriggerResult:
        return TriggerResult.FIRE if time == window.max_timestamp else TriggerResult.CONTINUE

    def on_merge(self, window: Any, ctx: TriggerContext) -> None:
        if window.max_timestamp > ctx.current_processing_time:
            ctx.register_processing_time_timer(window.max_timestamp)

    def clear(self, window: Any, ctx: TriggerContext) -> None:
        ctx.delete_processing_time_timer(window.max_timestamp)


@dataclass(frozen=True, slots=True)
class _Never(Trigger[Any]):
    def on_element(
        self, value: Any, timestamp: int | None, window: Any, ctx: TriggerContext
    ) -> TriggerResult:
        return TriggerResult.CONTINUE

    def on_merge(self, window: Any, ctx: TriggerContext) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _OnCount(Trigger[Any]):
    n: int

    def on_element(
        self, value: Any, timestamp: int | None, window: Any, ctx: TriggerContext
    ) -> TriggerResult:
        count = ctx.get_partitioned_state(TRIGGER_COUNT)
        count.add(1)
        if count.get() < self.n:
            return TriggerResult.CONTINUE
        count.clear()
        return TriggerResult.FIRE

    def on_merge(self, window: Any, ctx: TriggerContext) -> None:
        ctx.merge_partitioned_state(TRIGGER_COUNT)

    def clear(self, window: Any, ctx: TriggerContext) -> None:
        ctx.get_partitioned_state(TRIGGER_COUNT).clear()


@dataclass(frozen=True, slots=True)
class _ProcessingTimeout(Trigger[Any]):
    interval: int

    def on_element(
        self, value: Any, timestamp: int | None, window: Any, ctx: TriggerContext
    ) -> TriggerResult:
        _arm(ctx, ctx.current_processing_time + self.interval)
        return TriggerResult.CONTINUE

    def on_processing_time(self, time: int, window: Any, ctx: TriggerContext) -> TriggerResult:
        next_fire = ctx.get_partitioned_state(NEXT_FIRE)
        if next_fire.get() != time:
            return TriggerResult.CONTINUE
        next_fire.clear()
        return TriggerResult.FIRE

    def on_merge(self, window: Any, ctx: TriggerContext) -> None:
        _merge_armed(ctx)

    def clear(self, window: Any, ctx: TriggerContext) -> None:
        _disarm(ctx)


def _fire_again(ctx: TriggerContext, time: int, interval: int) -> TriggerResult:
    """Returns the decision at a timer for `time`: fires if this is the timer of the next firing,
    and registers the one after `interval`.
    """
    next_fire = ctx.get_partitioned_state(NEXT_FIRE)
    if next_fire.get() != time:
        return TriggerResult.CONTINUE
    next_fire.clear()
    _arm(ctx, time + interval)
    return TriggerResult.FIRE


def _arm(ctx: TriggerContext, time: int) -> None:
    """Registers a processing-time timer at `time`, unless the window already has a timer.

    The state of the window records the registered timer.
    """
    next_fire = ctx.get_partitioned_state(NEXT_FIRE)
    if next_fire.get() is None:
        next_fire.add(time)
        ctx.register_processing_time_timer(time)


def _disarm(ctx: TriggerContext) -> None:
    next_fire = ctx.get_partitioned_state(NEXT_FIRE)
    time = next_fire.get()
    if time is not None:
        ctx.delete_processing_time_timer(time)
        next_fire.clear()


def _merge_armed(ctx: TriggerContext) -> None:
    ctx.merge_partitioned_state(NEXT_FIRE)
    time = ctx.get_partitioned_state(NEXT_FIRE).get()
    if time is not None:
        ctx.register_processing_time_timer(time)


@dataclass(frozen=True, slots=True)
class _ContinuousProcessingTime(Trigger[Any]):
    interval: int

    def on_element(
        self, value: Any, timestamp: int | None, window: Any, ctx: TriggerContext
    ) -> TriggerResult:
        now = ctx.current_processing_time
        _arm(ctx, now - now % self.interval + self.interval)
        return TriggerResult.CONTINUE

    def on_processing_time(self, time: int, window: Any, ctx: TriggerContext) -> TriggerResult:
        return _fire_again(ctx, time, self.interval)

    def on_merge(self, window: Any, ctx: TriggerContext) -> None:
        _merge_armed(ctx)

    def clear(self, window: Any, ctx: TriggerContext) -> None:
        _disarm(ctx)


@dataclass(frozen=True, slots=True)
class _ContinuousEventTime(Trigger[Any]):
    interval: int

    def on_element(
        self, value: Any, timestamp: int | None, window: Any, ctx: TriggerContext
    ) -> TriggerResult:
        end, watermark = window.max_timestamp, ctx.current_watermark
        if watermark is not None and end <= watermark:
            return TriggerResult.FIRE
        ctx.register_event_time_timer(end)
        if timestamp is None:
            raise GraphError(
                f"continuous({self.interval} ms) needs a timestamp on each element; the stream "
                "has none"
            )
        next_fire = ctx.get_partitioned_state(NEXT_FIRE)
        if next_fire.get() is None:
            time = min(timestamp - timestamp % self.interval + self.interval, end)
            next_fire.add(time)
            ctx.register_event_time_timer(time)
        return TriggerResult.CONTINUE

    def on_event_time(self, time: int, window: Any, ctx: TriggerContext) -> TriggerResult:
        end = window.max_timestamp
        next_fire = ctx.get_partitioned_state(NEXT_FIRE)
        if time == end:
            next_fire.clear()
            return TriggerResult.FIRE
        if next_fire.get() != time:
            return TriggerResult.CONTINUE
        next_fire.clear()
        # A window without an end waits for its next element, because the final watermark could
        # never be reached in steps.
        if end != MAX_WATERMARK:
            time = min(time + self.interval, end)
            next_fire.add(time)
            ctx.register_event_time_timer(time)
        return TriggerResult.FIRE

    def on_merge(self, window: Any, ctx: TriggerContext) -> None:
        ctx.merge_partitioned_state(NEXT_FIRE)
        ctx.register_event_time_timer(window.max_timestamp)
        time = ctx.get_partitioned_state(NEXT_FIRE).get()
        if time is not None:
            ctx.register_event_time_timer(time)

    def clear(self, window: Any, ctx: TriggerContext) -> None:
        next_fire = ctx.get_partitioned_state(NEXT_FIRE)
        time = next_fire.get()
        if time is not None:
            ctx.delete_event_time_timer(time)
            next_fire.clear()
        ctx.delete_event_time_timer(window.max_timestamp)


@dataclass(frozen=True, slots=True)
class _Early(Trigger[Any]):
    interval: int

    def on_element(
        self, value: Any, timestamp: int | None, window: Any, ctx: TriggerContext
    ) -> TriggerResult:
        result = _ON_WATERMARK.on_element(value, timestamp, window, ctx)
        if not result:
            _arm(ctx, ctx.current_processing_time + self.interval)
        return result

    def on_event_time(self, time: int, window: Any, ctx: TriggerContext) -> TriggerResult:
        if time != window.max_timestamp:
            return TriggerResult.CONTINUE
        _disarm(ctx)
        return TriggerResult.FIRE

    def on_processing_time(self, time: int, window: Any, ctx: TriggerContext) -> TriggerResult:
        return _fire_again(ctx, time, self.interval)

    def on_merge(self, window: Any, ctx: TriggerContext) -> None:
        _ON_WATERMARK.on_merge(window, ctx)
        _merge_armed(ctx)

    def clear(self, window: Any, ctx: TriggerContext) -> None:
        _disarm(ctx)
        _ON_WATERMARK.clear(window, ctx)


@dataclass(frozen=True, slots=True)
class _Purging(Trigger[Any]):
    inner: Trigger[Any]

    def on_element(
        self, value: Any, timestamp: int | None, window: Any, ctx: TriggerContext
    ) -> TriggerResult:
        return _with_purge(self.inner.on_element(value, timestamp, window, ctx))

    def on_event_time(self, time: int, window: Any, ctx: TriggerContext) -> TriggerResult:
        return _with_purge(self.inner.on_event_time(time, window, ctx))

    def on_processing_time(self, time: int, window: Any, ctx: TriggerContext) -> TriggerResult:
        return _with_purge(self.inner.on_processing_time(time, window, ctx))

    def on_merge(self, window: Any, ctx: TriggerContext) -> None:
        self.inner.on_merge(window, ctx)

    def clear(self, window: Any, ctx: TriggerContext) -> None:
        self.inner.clear(window, ctx)

    @property
    def can_merge(self) -> bool:
        return self.inner.can_merge


def _with_purge(result: TriggerResult) -> TriggerResult:
    return TriggerResult.FIRE_AND_PURGE if result is TriggerResult.FIRE else result


_ON_WATERMARK = _OnWatermark()


class PlainTrigger(NamedTuple):
    """A built-in trigger in a form that an operator can evaluate without calls, for a window that
    has not ended.
    """

    every: int | None
    """Number of elements after which the trigger fires; None if no element fires it."""
    purges: bool
    at_end: bool
    """Whether the trigger has a timer at the end of the window."""
    step: int | None = None
    """Milliseconds of event time between two firings before the end; None if there are none."""


def plain_trigger(trigger: Trigger[Any], *, is_event_time: bool) -> PlainTrigger | None:
    """Returns `trigger` as a `PlainTrigger`, or None if this is not possible.

    `is_event_time` tells whether the windows end by event time; otherwise they end by processing
    time.
    """
    purges = False
    while isinstance(trigger, _Purging):
        trigger, purges = trigger.inner, True
    if isinstance(trigger, _OnCount):
        return PlainTrigger(trigger.n, purges, at_end=False)
    if isinstance(trigger, _Never):
        return PlainTrigger(None, purges, at_end=False)
    if isinstance(trigger, _OnWatermark if is_event_time else _AtProcessingTime):
        return PlainTrigger(None, purges, at_end=True)
    if isinstance(trigger, _ContinuousEventTime) and is_event_time:
        return PlainTrigger(None, purges, at_end=True, step=trigger.interval)
    return None


def fires_by_clock_alone(trigger: Trigger[Any]) -> bool:
    """Returns whether `trigger` is a built-in trigger that a watermark never fires."""
    while isinstance(trigger, _Purging):
        trigger = trigger.inner
    return isinstance(trigger, (_AtProcessingTime, _ProcessingTimeout, _ContinuousProcessingTime))


def default_trigger(is_event_time: bool) -> Trigger[Any]:
    """Returns the default trigger of a time window, which fires when the watermark, or the clock,
    passes the window's end.
    """
    return _ON_WATERMARK if is_event_time else _AtProcessingTime()


def global_trigger(at_end: bool) -> Trigger[Any]:
    """Returns the default trigger of a global window, which never fires or, with `at_end`, fires at
    the end of event time.
    """
    return _ON_WATERMARK if at_end else _Never()
