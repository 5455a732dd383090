"""The functions with state of drawn programs: process functions, with and without keys.

The model calls the same functions. Each keeps nothing outside of its state.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from typing import Any

import aioflow as af
from tests.programs.pieces import TAG, n_of

# Process functions without keys.


def Spread(value: Any, ctx: af.ProcessContext) -> Iterator[Any]:
    """Every third goes aside; the others come with their time."""
    if n_of(value) % 3 == 0:
        ctx.output(TAG, value)
    else:
        yield ctx.timestamp, value


class LatePart(af.ProcessFunction[Any, Any]):
    """Parts what is late from what is not."""

    def process_element(self, value: Any, ctx: af.ProcessContext) -> Any:
        watermark = ctx.current_watermark
        if watermark is not None and ctx.timestamp <= watermark:
            ctx.output(TAG, value)
            return None
        return [value]


class Numbered(af.MapFunction[Any, Any], af.CheckpointedFunction):
    """Operator state: how many there were."""

    def initialize_state(self, ctx: Any) -> None:
        self.kept = ctx.operator_state.get_list_state("count")
        self.count = sum(self.kept.get())

    def map(self, value: Any) -> Any:
        self.count += 1
        return (self.count, value)

    def snapshot_state(self, ctx: Any) -> None:
        self.kept.update([self.count])


class UnionNumbered(Numbered):
    """Does the same, with union state."""

    def initialize_state(self, ctx: Any) -> None:
        self.kept = ctx.operator_state.get_union_list_state("count")
        self.count = sum(self.kept.get())


# Functions with state of a key that are no process functions.


class Counting(af.MapFunction[Any, Any]):
    def open(self, ctx: af.RuntimeContext) -> None:
        self.count = ctx.get_state(af.ValueStateDescriptor("count", default=0))

    def map(self, value: Any) -> Any:
        self.count.update(self.count.value() + 1)
        return (self.count.value(), value)


class EveryOther(af.FilterFunction[Any]):
    def open(self, ctx: af.RuntimeContext) -> None:
        self.seen = ctx.get_state(af.ValueStateDescriptor("seen"))

    def filter(self, value: Any) -> bool:
        first = self.seen.value() is None
        self.seen.update(True if first else None)
        return first


class Repeating(af.FlatMapFunction[Any, Any]):
    def open(self, ctx: af.RuntimeContext) -> None:
        self.held = ctx.get_list_state(af.ListStateDescriptor("held"))

    def flat_map(self, value: Any) -> list[Any]:
        self.held.add(value)
        held = list(self.held.get())
        if len(held) == 3:
            self.held.clear()
        return held


# Keyed process functions. `free`: the answers do not depend on the order of elements, if none is
# late.


class Totals(af.KeyedProcessFunction[Any, Any, Any]):
    free = False
    timed = False

    def __init__(self, ttl: str | None = None) -> None:
        self.ttl = ttl

    def open(self, ctx: af.RuntimeContext) -> None:
        self.total = ctx.get_state(af.ValueStateDescriptor("total", default=0, ttl=self.ttl))

    def process_element(self, value: Any, ctx: af.ProcessContext) -> Any:
        total = self.total.value() + n_of(value)
        if total % 5 == 4:
            self.total.clear()
        else:
            self.total.update(total)
        return [(ctx.current_key, total)]


class AwaitedTotals(Totals):
    async def process_element(self, value: Any, ctx: af.ProcessContext) -> Any:
        before = self.total.value()
        await asyncio.sleep(0)
        self.total.update(before + n_of(value))
        return [(ctx.current_key, before + n_of(value))]


class RawTotals(af.KeyedProcessFunction[Any, Any, Any], af.CheckpointedFunction):
    """Does the same as `Totals`, with raw keyed state."""

    free = False
    timed = False

    def initialize_state(self, ctx: Any) -> None:
        self.raw = ctx.get_raw_keyed_state()
        self.totals: dict[Any, int] = {}
        for content in self.raw.get().values():
            self.totals.update(pickle.loads(content))

    def snapshot_state(self, ctx: Any) -> None:
        groups: dict[int, dict[Any, int]] = {}
        for key, total in self.totals.items():
            groups.setdefault(self.raw.group_of(key), {})[key] = total
        self.raw.update({group: pickle.dumps(held) for group, held in groups.items()})

    def process_element(self, value: Any, ctx: af.ProcessContext) -> Any:
        total = self.totals.pop(ctx.current_key, 0) + n_of(value)
        if total % 5 != 4:
            self.totals[ctx.current_key] = total
        return [(ctx.current_key, total)]


class Once(af.KeyedProcessFunction[Any, Any, Any]):
    free = True
    timed = False

    def __init__(self, ttl: str | None = None) -> None:
        self.ttl = ttl

    def open(self, ctx: af.RuntimeContext) -> None:
        self.seen = ctx.get_state(af.ValueStateDescriptor("seen", ttl=self.ttl))

    def process_element(self, value: Any, ctx: af.ProcessContext) -> Iterator[Any]:
        if self.seen.value() is None:
            self.seen.update({"at": (1, None)})
            yield ("once", ctx.current_key)


class Digits(af.KeyedProcessFunction[Any, Any, Any]):
    """A map that grows and shrinks."""

    free = False
    timed = False

    def __init__(self, ttl: str | None = None) -> None:
        self.ttl = ttl

    def open(self, ctx: af.RuntimeContext) -> None:
        self.digits = ctx.get_map_state(af.MapStateDescriptor("digits", ttl=self.ttl))

    def process_element(self, value: Any, ctx: af.ProcessContext) -> Iterator[Any]:
        digit = n_of(value) % 6
        if digit == 5:
            if not self.digits.is_empty():
                self.digits.remove(min(self.digits.keys()))
        elif self.digits.contains(digit):
            self.digits.put(digit, self.digits.get(digit) + 1)
        else:
            self.digits.put_all({digit: 1})
        yield (
            ctx.current_key,
            sorted(self.digits.items()),
            sum(self.digits.values()),
            self.digits.get(9, "none"),
        )


class Chunks(af.KeyedProcessFunction[Any, Any, Any]):
    """A list that is given out when it has three elements."""

    free = False
    timed = False

    def __init__(self, ttl: str | None = None) -> None:
        self.ttl = ttl

    def open(self, ctx: af.RuntimeContext) -> None:
        self.held = ctx.get_list_state(af.ListStateDescriptor("held", ttl=self.ttl))

    def process_element(self, value: Any, ctx: af.ProcessContext) -> Any:
        self.held.add(value)
        held = self.held.get()
        if len(held) < 3:
            return None
        if n_of(value) % 2:
            self.held.clear()
        else:
            self.held.update(held[-1:])
        return ((ctx.current_key, len(held), one) for one in held)


class _Largest(af.AggregateFunction[Any, Any, Any]):
    def create_accumulator(self) -> list[int]:
        return []

    def add(self, value: Any, accumulator: list[int]) -> list[int]:
        return sorted([*accumulator, value])[-2:]

    def get_result(self, accumulator: list[int]) -> tuple[int, ...]:
        return tuple(accumulator)

    def merge(self, a: list[int], b: list[int]) -> list[int]:
        return sorted([*a, *b])[-2:]


class Sums(af.KeyedProcessFunction[Any, Any, Any]):
    """Reducing and aggregating state, and two of one kind."""

    free = False
    timed = False

    def __init__(self, ttl: str | None = None) -> None:
        self.ttl = ttl

    def open(self, ctx: af.RuntimeContext) -> None:
        self.sum = ctx.get_reducing_state(
            af.ReducingStateDescriptor("sum", lambda a, b: a + b, ttl=self.ttl)
        )
        self.least = ctx.get_reducing_state(af.ReducingStateDescriptor("least", min, ttl=self.ttl))
        self.largest = ctx.get_aggregating_state(
            af.AggregatingStateDescriptor("largest", _Largest(), ttl=self.ttl)
        )

    def process_element(self, value: Any, ctx: af.ProcessContext) -> Iterator[Any]:
        n = n_of(value)
        self.sum.add(n)
        self.largest.add(n)
        if n % 4 == 0:
            self.least.clear()
        else:
            self.least.add(n)
        yield ctx.current_key, self.sum.get(), self.least.get(), self.largest.get()


class Buckets(af.KeyedProcessFunction[Any, Any, Any]):
    """Gives what a key has had in each stretch of event time, by a timer at its end."""

    free = True
    timed = True

    def __init__(self, ms: int, ttl: str | None = None) -> None:
        self.ms = ms
        self.ttl = ttl

    def open(self, ctx: af.RuntimeContext) -> None:
        self.held = ctx.get_list_state(af.ListStateDescriptor("held", ttl=self.ttl))

    def process_element(self, value: Any, ctx: af.ProcessContext) -> None:
        self.held.add((ctx.timestamp, n_of(value)))
        ctx.timer_service.register_event_time_timer((ctx.timestamp // self.ms + 1) * self.ms)

    def on_timer(self, timestamp: int, ctx: af.ProcessContext) -> Iterator[Any]:
        held = self.held.get()
        due = sorted(entry for entry in held if entry[0] < timestamp)
        self.held.update([entry for entry in held if entry[0] >= timestamp])
        yield (
            ctx.current_key,
            timestamp,
            ctx.current_watermark in (timestamp, af.MAX_WATERMARK),
            due,
        )


class Silence(af.KeyedProcessFunction[Any, Any, Any]):
    """Tells of a key that was silent: each element deletes the timer and sets another."""

    free = False
    timed = True

    def __init__(self, ms: int, ttl: str | None = None) -> None:
        self.ms = ms
        self.ttl = ttl

    def open(self, ctx: af.RuntimeContext) -> None:
        self.due = ctx.get_state(af.ValueStateDescriptor("due", ttl=self.ttl))
        self.count = ctx.get_state(af.ValueStateDescriptor("count", default=0, ttl=self.ttl))

    def process_element(self, value: Any, ctx: af.ProcessContext) -> None:
        due = self.due.value()
        if due is not None:
            ctx.timer_service.delete_event_time_timer(due)
        due = max(due or ctx.timestamp, ctx.timestamp) + self.ms
        self.due.update(due)
        self.count.update(self.count.value() + 1)
        ctx.timer_service.register_event_time_timer(due)

    def on_timer(self, timestamp: int, ctx: af.ProcessContext) -> list[Any]:
        count = self.count.value()
        self.due.clear()
        self.count.update(None)
        if count % 3 == 0:  # Another one, which may be due already.
            ctx.timer_service.register_event_time_timer(timestamp + 1)
            self.count.update(count + 1)
        return [("silent", timestamp, count)]


class AwaitedBuckets(Buckets):
    async def process_element(  # type: ignore[override]
        self, value: Any, ctx: af.ProcessContext
    ) -> None:
        await asyncio.sleep(0)
        super().process_element(value, ctx)
        await asyncio.sleep(0)

    async def on_timer(  # type: ignore[override]
        self, timestamp: int, ctx: af.ProcessContext
    ) -> list[Any]:
        rows = list(super().on_timer(timestamp, ctx))
        await asyncio.sleep(0)
        return rows


class AwaitedSilence(Silence):
    async def process_element(  # type: ignore[override]
        self, value: Any, ctx: af.ProcessContext
    ) -> None:
        super().process_element(value, ctx)
        await asyncio.sleep(0)

    async def on_timer(  # type: ignore[override]
        self, timestamp: int, ctx: af.ProcessContext
    ) -> list[Any]:
        await asyncio.sleep(0)
        return super().on_timer(timestamp, ctx)


class Passing(af.KeyedProcessFunction[Any, Any, Any]):
    """Keys that come and go: all state of a key lives from its first element to a timer."""

    free = False
    timed = True

    def __init__(self, ms: int, ttl: str | None = None) -> None:
        self.ms = ms
        self.ttl = ttl

    def open(self, ctx: af.RuntimeContext) -> None:
        self.first = ctx.get_state(af.ValueStateDescriptor("first", ttl=self.ttl))
        self.count = ctx.get_reducing_state(
            af.ReducingStateDescriptor("count", lambda a, b: a + b, ttl=self.ttl)
        )
        self.by_n = ctx.get_map_state(af.MapStateDescriptor("by_n", ttl=self.ttl))

    def process_element(self, value: Any, ctx: af.ProcessContext) -> None:
        timers = ctx.timer_service
        if self.first.value() is None:
            self.first.update(ctx.timestamp)
            timers.register_event_time_timer(ctx.timestamp + self.ms)
        timers.register_event_time_timer(ctx.timestamp + 3 * self.ms + 1)
        timers.delete_event_time_timer(ctx.timestamp + 3 * self.ms + 1)
        self.count.add(1)
        self.by_n.put(n_of(value), ctx.timestamp)

    def on_timer(self, timestamp: int, ctx: af.ProcessContext) -> list[Any]:
        found = (
            ctx.current_key,
            timestamp,
            self.first.value(),
            self.count.get(),
            sorted(self.by_n.items()),
        )
        for state in (self.first, self.count, self.by_n):
            state.clear()
        return [found]


class Sided(af.KeyedProcessFunction[Any, Any, Any]):
    """Elements of a key go aside in turn."""

    free = False
    timed = False

    def __init__(self, ttl: str | None = None) -> None:
        self.ttl = ttl

    def open(self, ctx: af.RuntimeContext) -> None:
        self.turn = ctx.get_state(af.ValueStateDescriptor("turn", default=0, ttl=self.ttl))

    def process_element(self, value: Any, ctx: af.ProcessContext) -> Iterator[Any]:
        turn = self.turn.value()
        self.turn.update((turn + 1) % 3)
        if turn == 1:
            ctx.output(TAG, (ctx.current_key, value))
        else:
            yield turn, value


class Forgetful(af.KeyedProcessFunction[Any, Any, Any]):
    """State that expires at once, or has not yet: the answers do not depend on which."""

    free = True
    timed = False

    def __init__(self, ttl: Any = "1ms") -> None:
        self.ttl = ttl

    def open(self, ctx: af.RuntimeContext) -> None:
        self.last = ctx.get_state(af.ValueStateDescriptor("last", ttl=self.ttl))
        self.held = ctx.get_list_state(af.ListStateDescriptor("held", ttl=self.ttl))
        self.by_n = ctx.get_map_state(af.MapStateDescriptor("by_n", ttl=self.ttl))

    def process_element(self, value: Any, ctx: af.ProcessContext) -> Iterator[Any]:
        key, n = ctx.current_key, n_of(value)
        of = [self.last.value(), *self.held.get(), *self.by_n.values()]
        wrong = [one for one in of if one is not None and one != [key]]
        self.last.update([key])
        self.held.add([key])
        self.by_n.put(n, [key])
        if n % 3 == 0:
            self.by_n.remove(n)
        if n % 5 == 0:
            self.held.clear()
        yield key, n, wrong


class AtEnd(af.KeyedProcessFunction[Any, Any, Any]):
    """A timer of the clock, long after the end: it fires when the input ends."""

    free = True
    timed = False
    at_end = True

    def __init__(self, ttl: str | None = None) -> None:
        self.ttl = ttl

    def open(self, ctx: af.RuntimeContext) -> None:
        self.held = ctx.get_list_state(af.ListStateDescriptor("held", ttl=self.ttl))

    def process_element(self, value: Any, ctx: af.ProcessContext) -> None:
        if not self.held.get():
            ctx.timer_service.register_processing_time_timer(
                ctx.timer_service.current_processing_time + 86_400_000
            )
        self.held.add_all([n_of(value)])

    def on_timer(self, timestamp: int, ctx: af.ProcessContext) -> Iterator[Any]:
        yield "end", sorted(self.held.get())
        self.held.clear()


class AtEndAgain(AtEnd):
    """Each element deletes the timer of the clock and sets another."""

    def open(self, ctx: af.RuntimeContext) -> None:
        super().open(ctx)
        self.due = ctx.get_state(af.ValueStateDescriptor("due", ttl=self.ttl))

    def process_element(self, value: Any, ctx: af.ProcessContext) -> None:
        timers, due = ctx.timer_service, self.due.value()
        if due is not None:
            timers.delete_processing_time_timer(due)
        due = (due or timers.current_processing_time) + 86_400_000
        timers.register_processing_time_timer(due)
        self.due.update(due)
        self.held.add_all([n_of(value)])

    def on_timer(self, timestamp: int, ctx: af.ProcessContext) -> Iterator[Any]:
        self.due.clear()
        yield from super().on_timer(timestamp, ctx)


class Merging(af.CoProcessFunction[Any, Any, Any]):
    """Two streams without keys."""

    def process_element1(self, value: Any, ctx: af.ProcessContext) -> list[Any]:
        return [("left", value)]

    def process_element2(self, value: Any, ctx: af.ProcessContext) -> Iterator[Any]:
        yield "right", value


def on_left(value: Any) -> Any:
    return ("left", value)


def on_right(value: Any) -> Any:
    return ("right", value)


def rows_left(value: Any) -> list[Any]:
    return [on_left(value)]


def rows_right(value: Any) -> Iterator[Any]:
    yield on_right(value)


class PairUp(af.KeyedCoProcessFunction[Any, Any, Any, Any]):
    """Pairs each element of one side with each of the other, in any order of arrival."""

    def open(self, ctx: af.RuntimeContext) -> None:
        self.lefts = ctx.get_list_state(af.ListStateDescriptor("lefts"))
        self.rights = ctx.get_list_state(af.ListStateDescriptor("rights"))

    def process_element1(self, value: Any, ctx: af.ProcessContext) -> Iterator[Any]:
        self.lefts.add(n_of(value))
        for right in self.rights.get():
            yield n_of(value), right

    def process_element2(self, value: Any, ctx: af.ProcessContext) -> Iterator[Any]:
        self.rights.add(n_of(value))
        for left in self.lefts.get():
            yield left, n_of(value)


RULES: af.MapStateDescriptor[Any, Any] = af.MapStateDescriptor("rules")


class Ruling(af.BroadcastProcessFunction[Any, Any, Any]):
    """Each element with all rules, which are read first."""

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        yield n_of(value), sorted(ctx.get_broadcast_state(RULES).items())

    def process_broadcast_element(self, value: Any, ctx: Any) -> None:
        rules = ctx.get_broadcast_state(RULES)
        rules.put(n_of(value) % 5, max(n_of(value), rules.get(n_of(value) % 5, 0)))


class KeepingTotals(af.KeyedBroadcastProcessFunction[Any, Any, Any, Any]):
    """Elements wait, by key, until event time ends; then all rules are there."""

    def open(self, ctx: af.RuntimeContext) -> None:
        self.held = ctx.get_list_state(af.ListStateDescriptor("held"))

    def process_element(self, value: Any, ctx: Any) -> None:
        self.held.add(n_of(value))
        ctx.timer_service.register_event_time_timer(2**62)

    def process_broadcast_element(self, value: Any, ctx: Any) -> None:
        rules = ctx.get_broadcast_state(RULES)
        rules.put(n_of(value) % 5, max(n_of(value), rules.get(n_of(value) % 5, 0)))

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[Any]:
        yield sorted(self.held.get()), sorted(ctx.get_broadcast_state(RULES).items())


__all__ = sorted(
    name for name in globals() if not name.startswith("_")
)  # A program may name anything that is here.
