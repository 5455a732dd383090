"""Flows over a stream with one `key_by`, whose answers depend on order, time and lateness, to
compare two places that run them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import aioflow as af
from tests.spark.answers import Event, SilentFor, Streams, by_key, late_events

__all__ = ["STREAM_ANSWERS", "batch_time"]


def silent_keys(events: af.DataStream[Event]) -> Streams:
    """The timer program: timers that later elements delete and set again; late elements go to a
    side output.
    """
    alerts = events.key_by(by_key).process(SilentFor)
    return alerts, alerts.side(late_events)


def reduced(events: af.DataStream[Event]) -> Streams:
    """A reduce that is neither commutative nor associative, running counts, and what goes past
    the key.
    """
    keyed = events.key_by(by_key)
    return (
        keyed.reduce(lambda a, b: b._replace(value=a.value * 3 - b.value)),
        keyed.count(),
        events.filter(lambda event: event.value > 5),
    )


def tumbled(events: af.DataStream[Event]) -> Streams:
    """Windows with a list of elements in order of arrival, and what came too late for them."""
    windows = (
        events.filter(lambda event: event.value != 3)
        .key_by(by_key)
        .window(af.tumbling("40ms"), lateness="10ms")
    )
    lists = windows.aggregate(af.collect(lambda event: event.value))
    return lists.map(lambda result: result), lists.late


def slid(events: af.DataStream[Event]) -> Streams:
    """Sliding windows, sessions that merge, early results by count."""
    keyed = events.key_by(by_key)
    slices = keyed.window(af.sliding("60ms", "20ms")).aggregate(
        af.agg(n=af.count(), last=af.last(lambda event: event.value))
    )
    merged = keyed.window(af.session("25ms")).reduce(
        lambda a, b: b._replace(value=a.value * 2 + b.value)
    )
    counted = keyed.window(af.global_window(), trigger=af.purging(af.on_count(3))).aggregate(
        af.collect(lambda event: event.value)
    )
    return slices, merged, merged.late, counted


def around(events: af.DataStream[Event]) -> Streams:
    """Async calls and batches before the key, and behind it."""

    async def slowly(event: Event) -> Event:
        await asyncio.sleep(0)
        return event._replace(value=event.value + 1)

    def twice(pair: tuple[str, int]) -> Iterator[tuple[str, int]]:
        yield pair
        yield pair

    counts = (
        events.map(slowly, concurrency=4)
        .flat_map(lambda event: [event] * (event.value % 3))
        .key_by(by_key)
        .count()
    )
    return (counts.flat_map(twice).filter(lambda pair: pair[1] % 2 == 0),)


STREAM_ANSWERS: dict[str, Callable[[af.DataStream[Event]], Streams]] = {
    "timers": silent_keys,
    "running": reduced,
    "tumbling": tumbled,
    "sliding": slid,
    "around": around,
}


def batch_time(events: list[list[Event]], delay_ms: int) -> Any:
    """The watermark strategy of an engine whose event time moves behind each of these batches,
    as Spark's does.
    """
    after: list[int | None] = []
    latest = 0
    for batch in events:
        latest = max([latest, *(event.at for event in batch)])
        behind = (
            latest - delay_ms - 1 if latest > delay_ms else None
        )  # Spark's time begins in 1970.
        after += [*[None] * (len(batch) - 1), behind] if batch else []

    class ByBatch:
        def __init__(self) -> None:
            self.left = iter(after)

        def on_event(self, value: Event, timestamp: int) -> int | None:
            return next(self.left)

    return af.WatermarkStrategy.custom(ByBatch, timestamp=lambda event: event.at)
