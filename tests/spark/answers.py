"""Flows whose answers depend on order, time and lateness, to compare two places that run them.

One split a source, functions that care which element comes first, data that is late: what must be
equal to the last element.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import aioflow as af

__all__ = ["ANSWERS", "DELAY_MS", "Event", "Streams", "late_events", "silent_keys"]


class Event(NamedTuple):
    """`at` in ms."""

    key: str
    at: int
    value: int


Streams = tuple[af.DataStream[Any], ...]

DELAY_MS = 30


class SilentFor(af.KeyedProcessFunction[str, Event, tuple[str, int, int]]):
    """Reports a key that was silent for 50 ms: each element deletes the timer and sets it again.

    Elements that are late go aside.
    """

    def open(self, ctx: af.RuntimeContext) -> None:
        self.timer = ctx.get_state(af.ValueStateDescriptor[int]("timer"))
        self.seen = ctx.get_list_state(af.ListStateDescriptor[int]("seen"))

    def process_element(
        self, value: Event, ctx: af.ProcessContext
    ) -> Iterator[tuple[str, int, int]]:
        if ctx.current_watermark is not None and value.at <= ctx.current_watermark:
            ctx.output(late_events, value)
            return
        old = self.timer.value()
        new = max(old or 0, value.at + 50)
        if old is not None and old != new:
            ctx.timer_service.delete_event_time_timer(old)
        self.timer.update(new)
        self.seen.add(value.value)
        ctx.timer_service.register_event_time_timer(new)
        yield (
            "seen",
            value.value,
            ctx.current_watermark if ctx.current_watermark is not None else -1,
        )

    def on_timer(self, timestamp: int, ctx: af.ProcessContext) -> Iterator[tuple[str, int, int]]:
        yield f"silent {ctx.current_key}", timestamp, sum(self.seen.get())
        self.timer.clear()
        self.seen.clear()


late_events = af.OutputTag[Event]("late")


def source(flow: af.Flow, events: Sequence[Event], name: str = "events") -> af.DataStream[Event]:
    strategy = af.WatermarkStrategy.bounded_out_of_orderness(
        f"{DELAY_MS}ms", timestamp=lambda event: event.at
    )
    return flow.source(list(events), name=name, watermarks=strategy)


def by_key(event: Event) -> str:
    return event.key


def silent_keys(flow: af.Flow, events: Sequence[Event]) -> Streams:
    """The timer program: timers that later elements delete and set again."""
    alerts = source(flow, events).key_by(by_key).process(SilentFor)
    return alerts, alerts.side(late_events)


def reduced(flow: af.Flow, events: Sequence[Event]) -> Streams:
    """A reduce that is neither commutative nor associative, and a running maximum of what it
    gives, by another key.
    """
    kept = (
        source(flow, events)
        .key_by(by_key)
        .reduce(lambda a, b: b._replace(value=a.value * 3 - b.value))
    )
    return kept, kept.key_by(lambda event: event.value % 2).max(lambda event: event.at)


def tumbled(flow: af.Flow, events: Sequence[Event]) -> Streams:
    """Windows with a list of elements in order of arrival, and what came too late for them."""
    windows = (
        source(flow, events)
        .filter(lambda event: event.value != 3)
        .key_by(by_key)
        .window(af.tumbling("40ms"), lateness="10ms")
    )
    lists = windows.aggregate(af.collect(lambda event: event.value))
    return lists, lists.late


def slid(flow: af.Flow, events: Sequence[Event]) -> Streams:
    """Sliding windows, and windows over their results: event time goes on through both."""
    keyed = source(flow, events).key_by(by_key)
    slices = keyed.window(af.sliding("60ms", "20ms")).aggregate(
        af.agg(n=af.count(), last=af.last(lambda event: event.value))
    )
    totals = (
        slices.key_by(lambda result: result.key)
        .window(af.tumbling("80ms"))
        .aggregate(af.sum(lambda result: result.value["n"]))
    )
    return slices, totals, totals.late


def sessions(flow: af.Flow, events: Sequence[Event]) -> Streams:
    """Sessions that merge, early results by count."""
    keyed = source(flow, events).key_by(by_key)
    merged = keyed.window(af.session("25ms")).reduce(
        lambda a, b: b._replace(value=a.value * 2 + b.value)
    )
    counted = keyed.window(af.global_window(), trigger=af.purging(af.on_count(3))).aggregate(
        af.collect(lambda event: event.value)
    )
    return merged, merged.late, counted


def joined(flow: af.Flow, events: Sequence[Event]) -> Streams:
    """Joins of two sources.

    Nothing is late in them, since what is late depends on which source is faster.
    """
    ordered = sorted(events, key=lambda event: event.at)
    left, right = source(flow, ordered[::2], "left"), source(flow, ordered[1::2], "right")
    pairs = (
        left.join(right)
        .where(by_key)
        .equal_to(by_key)
        .window(af.tumbling("50ms"))
        .apply(lambda a, b: (a.value, b.value))
    )
    near = (
        left.key_by(by_key)
        .interval_join(right.key_by(by_key), "-20ms", "20ms")
        .process(lambda a, b, ctx: [(a.at, b.at, ctx.timestamp)])
    )
    groups = (
        left.co_group(right)
        .where(by_key)
        .equal_to(by_key)
        .window(af.sliding("40ms", "20ms"))
        .apply(lambda key, lefts, rights: [(key, len(lefts), len(rights))])
    )
    return pairs, near, groups


def passed_along(flow: af.Flow, events: Sequence[Event]) -> Streams:
    """Builds a flow without keys: fan-out of one stream, a union of its parts, async calls,
    elements in batches, timestamps in mid-stream.
    """

    async def slowly(event: Event) -> Event:
        await asyncio.sleep(0)
        return event._replace(value=event.value + 1)

    def split(event: Event) -> list[Event]:
        return [event] * (event.value % 3)

    start = flow.source(list(events))
    some = start.flat_map(split).map(slowly, concurrency=4)
    others = start.filter(lambda event: event.value > 4).map_batches(
        lambda batch: [event._replace(key="batch") for event in batch]
    )
    strategy = af.WatermarkStrategy.bounded_out_of_orderness(
        "10ms", timestamp=lambda event: event.at
    )
    timed = (
        start.assign_timestamps_and_watermarks(strategy)
        .key_by(by_key)
        .window(af.tumbling("30ms"))
        .aggregate(af.count())
    )
    return some, some.union(others), timed, timed.late


class Numbered(af.ProcessFunction[Event, tuple[int, str]]):
    """Numbers what passes, and tells how much it was at the end."""

    def open(self, ctx: af.RuntimeContext) -> None:
        self.count = 0

    def process_element(self, value: Event, ctx: af.ProcessContext) -> Iterator[tuple[int, str]]:
        self.count += 1
        yield self.count, value.key

    def finish(self) -> Iterator[tuple[int, str]]:
        yield self.count, "in all"


def numbered(flow: af.Flow, events: Sequence[Event]) -> Streams:
    """Functions that hold something of their own, before and behind a shuffle."""
    first = source(flow, events).process(Numbered)
    return first, source(flow, events, "again").key_by(by_key).process(
        lambda event, ctx: [event]
    ).process(Numbered)


def from_a_function(flow: af.Flow, events: Sequence[Event]) -> Streams:
    """An async function as the source, expressions, and a running aggregate of equal keys that
    are spelled differently.
    """

    async def read() -> AsyncIterator[dict[str, Any]]:
        for event in events:
            yield {"key": event.key, "at": event.at, "value": event.value}

    rows = (
        flow.source(read)
        .filter(af.col.value * 2 > 3)
        .select(at=af.col.at, half=af.col.value / 2, key=af.col.key.str.upper())
    )
    return rows, rows.key_by(lambda row: row["half"] if row["at"] % 2 else int(row["half"])).sum(
        af.col.at
    )


ANSWERS: dict[str, Callable[[af.Flow, Sequence[Event]], Streams]] = {
    "timers": silent_keys,
    "reduce": reduced,
    "tumbling": tumbled,
    "sliding": slid,
    "sessions": sessions,
    "joins": joined,
    "no keys": passed_along,
    "instances": numbered,
    "function source": from_a_function,
}
