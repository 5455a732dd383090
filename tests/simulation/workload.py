"""The flow that the simulated world runs: two replayable sources, async maps, a keyed counter with
timers, windows, two sinks.

Everything is plain functions and classes of this module, so that worker processes load it by name;
what a run shares is `World.current`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random  # Only its type; the streams come from the loop.
from types import MappingProxyType
from typing import Any

import aioflow as af
from aioflow.operators.source import Split
from tests.simulation.external import Database, DatabaseSink
from tests.simulation.oracle import (
    CHURN_MS,
    LAG_MS,
    TIMER_MS,
    WINDOW_MS,
    Data,
    Record,
    Violation,
    churn_key_of,
    has_alarm,
    has_timer,
    key_of,
    time_of,
)

__all__ = [
    "ENDLESS",
    "ENDLESS_SITES",
    "MISDEEDS",
    "OUT",
    "SITES",
    "Shared",
    "share",
    "shared",
    "unshare",
    "world_flow",
]

OUT = "/out"
ALARM_MS = 8
SUM_EVERY = 3
ASYNC_SITES = ("wait", "enrich", "flush", "prepare", "commit")
ENDLESS_SITES = (*ASYNC_SITES, "close")
SITES = ("poll", "open", "count", "timer", "write", *ASYNC_SITES)
"""Functions of the user that may misbehave. Those of `ASYNC_SITES` are asynchronous."""


class Odd(BaseException):
    """An error that no function should raise."""


ERRORS: tuple[type[BaseException], ...] = (
    MemoryError,
    RecursionError,
    StopIteration,
    StopAsyncIteration,
    GeneratorExit,
    TimeoutError,
    asyncio.CancelledError,
    asyncio.InvalidStateError,
    af.ProducerFailed,
    af.JobCanceled,
    Odd,
)
"""Any of them may come out of a function.

The simulation takes none of them for a bug of its own.
"""

MISDEEDS = MappingProxyType(
    {
        "user": ("raises",),
        "odd user": ("odd", "cancelled", "cancels"),
        "slow user": ("slow", "swallows"),
        "endless user": ("endless",),
    }
)
"""Misbehaviour of a function, by kind of fault: raise a plain error or an odd one, await a
cancelled future, cancel its own task, take long, swallow a cancellation, go on for ever after one.
"""

ENDLESS = "endless user"
LONG_S = 0.02
"""How often an endless function looks whether the faults are over."""

SLOW_S = 0.3
STUBBORN_S = 1.0
"""How long a function goes on that was cancelled and swallows it."""


@dataclass(slots=True)
class Shared:
    """State that the functions of one run share, across all simulated processes."""

    database: Database
    data: Data
    pace_s: dict[str, float]
    """Between two bursts of a split's reader, on average, by source."""
    burst: int
    answer_s: float
    """How long an answer takes at most that a record is enriched with.

    While some take long, barriers are far apart.
    """
    rng: Random
    """Random numbers for functions only, so that they disturb no fault."""
    discovers: bool = False
    """Whether splits are found one after the other."""
    found: dict[str, int] = field(default_factory=dict)
    """How many splits of each source are found by now."""
    fails: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Misbehaviour of the next call of a function, by site: a kind of `MISDEEDS`, and one of its
    misdeeds.
    """
    churns: bool = False
    """Whether each record is also counted under a key that comes and goes."""
    acknowledged: dict[tuple[str, str], int] = field(default_factory=dict)
    """Up to which position the sources have told the outside world that a split is done with, by
    source and split.
    """
    is_calm: Callable[[], bool] = lambda: False
    """Whether the faults are over. An endless function that was not cancelled then returns."""
    closed_by_force: int = 0
    """Number of endless functions that were cancelled in vain and then closed."""
    is_over: Callable[[], bool] = lambda: False
    """Whether everything is committed: the next run begins with nothing then."""

    def maybe_fail(self, site: str) -> None:
        """Raise, if that is what the next call of the function at `site` does."""
        if not self.fails or site not in self.fails:
            return
        kind, misdeed = self.fails.pop(site)
        self.database.struck[kind] += 1
        if misdeed == "raises":
            raise ConnectionError(f"no answer in {site}")
        if misdeed == "cancels" and (task := asyncio.current_task()) is not None:
            task.cancel()
            return
        if misdeed in ("odd", "cancelled"):
            raise self.rng.choice(ERRORS)(f"raised in {site}")

    async def misbehave(self, site: str) -> None:
        """Does for an asynchronous function what `maybe_fail` does."""
        misdeed = self.fails.get(site, ("", ""))[1]
        self.maybe_fail(site) if misdeed in ("raises", "odd", "cancels") else None
        if misdeed not in ("cancelled", "slow", "swallows", "endless"):
            return
        self.database.struck[self.fails.pop(site)[0]] += 1
        if misdeed == "endless":
            await self._go_on()
            return
        if misdeed == "cancelled":
            given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            given_up.cancel()
            await given_up
        try:
            await asyncio.sleep(self.rng.uniform(0, SLOW_S))
        except asyncio.CancelledError:
            if misdeed == "slow":
                raise
            await asyncio.sleep(self.rng.uniform(0, STUBBORN_S))

    async def _go_on(self) -> None:
        """Goes on for ever once it was cancelled. Only the engine can end it: by force."""
        is_cancelled = False
        try:
            while is_cancelled or not self.is_calm():
                try:
                    await asyncio.sleep(LONG_S)
                except asyncio.CancelledError:
                    is_cancelled = True
        except GeneratorExit:
            self.closed_by_force += 1
            raise


_current: list[Shared] = []


def shared() -> Shared:
    """Returns the shared state of the present run."""
    return _current[-1]


def share(with_all: Shared) -> None:
    _current[:] = [with_all]


def unshare() -> None:
    _current.clear()


def database() -> Database:
    return shared().database


@dataclass(frozen=True, slots=True)
class Numbers:
    """A source of records that come at a pace.

    Positions are numbers. Where it looks again, each look finds another split.
    """

    name: str

    @property
    def bounded(self) -> bool:
        return shared().data.bounded

    @property
    def discover_every(self) -> str | None:
        return "5ms" if shared().discovers else None

    async def discover(self) -> list[Split]:
        world = shared()
        count = world.data.splits[self.name]
        if world.discovers:
            count = world.found[self.name] = min(count, world.found.get(self.name, 0) + 1)
        return [Split(str(split)) for split in range(count)]

    def reader(self, ctx: Any) -> NumbersReader:
        return NumbersReader(ctx, self.name, shared())


@dataclass(frozen=True, slots=True)
class Rules:
    """A source of a few numbers, of which one comes now and then."""

    count: int

    @property
    def bounded(self) -> bool:
        return shared().data.bounded

    async def discover(self) -> list[Split]:
        return [Split("rules")]

    def reader(self, ctx: Any) -> RulesReader:
        return RulesReader(ctx, self.count, shared())


class RulesReader:
    """A reader that gives one number, then waits for a while."""

    def __init__(self, ctx: Any, count: int, world: Shared) -> None:
        self._rng = ctx.host.rng
        self._count = count
        self._world = world
        self._at = count
        self._may_go = False

    async def open(self, splits: Sequence[Split]) -> None:
        self._at = splits[0].position or 0 if splits else self._count

    def poll_batch(self, max_records: int) -> list[int] | None:
        if not self._may_go or self._at == self._count:
            return None
        self._may_go = False
        self._at += 1
        return [self._at - 1]

    async def wait(self) -> None:
        if self._at == self._count and not self._world.data.bounded:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(min(self._world.pace_s.values()) * self._rng.uniform(0.5, 4.0))
        self._may_go = True

    @property
    def finished(self) -> bool:
        return self._world.data.bounded and self._at == self._count

    def position(self, split_id: str) -> int:
        return self._at

    async def close(self) -> None:
        self._may_go = False


class NumbersReader:
    """Reads its splits in turn. Deals out its budget, then waits for another."""

    def __init__(self, ctx: Any, source: str, world: Shared) -> None:
        self._rng = ctx.host.rng
        self._source = source
        self._world = world
        self._records = world.data.records[source]
        self._ends = world.data.bounded or world.discovers
        """Whether a split is over when all of it was read."""
        self._at: dict[str, int] = {}
        self._taken: dict[int, dict[str, int]] = {}
        """Positions by checkpoint: once it is completed they are acknowledged, and what lies
        before them is gone.
        """
        self._budget = 0
        self.finished_splits: set[str] = set()
        self.current_split = ""

    async def open(self, splits: Sequence[Split]) -> None:
        world = self._world
        for split in splits:
            self._at[split.id] = split.position or 0
            gone = world.acknowledged.get((self._source, split.id), 0)
            if self._at[split.id] < gone and not world.is_over():
                at = f"is to be read from {split.position}, and it was acknowledged up to {gone}"
                raise Violation(f"split {split.id} of {self._source} {at}")
            self._note_end(split.id)

    def poll_batch(self, max_records: int) -> list[Record] | None:
        self._world.maybe_fail("poll")
        for split_id, at in list(self._at.items()):
            stop = min(at + max_records, at + self._budget, self._records)
            if stop > at:
                self._budget -= stop - at
                self._at[split_id] = self._at.pop(split_id) + stop - at  # To the end of the line.
                self.current_split = split_id
                self._note_end(split_id)
                return [(self._source, int(split_id), i) for i in range(at, stop)]
        return None

    def _note_end(self, split_id: str) -> None:
        if self._ends and self._at[split_id] == self._records:
            self.finished_splits.add(split_id)

    async def wait(self) -> None:
        world = self._world
        await world.misbehave("wait")
        if all(at == self._records for at in self._at.values()) and not self._ends:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(world.pace_s[self._source] * self._rng.uniform(0.2, 1.8))
        self._budget = self._rng.randrange(1, world.burst + 1)

    @property
    def finished(self) -> bool:
        return self._ends and all(at == self._records for at in self._at.values())

    def position(self, split_id: str) -> int:
        return self._at[split_id]

    def checkpoint(self, checkpoint_id: int) -> None:
        self._taken[checkpoint_id] = dict(self._at)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        acknowledged = self._world.acknowledged
        for taken in [taken for taken in self._taken if taken <= checkpoint_id]:
            for split_id, at in self._taken.pop(taken).items():
                split = self._source, split_id
                acknowledged[split] = max(at, acknowledged.get(split, 0))

    async def close(self) -> None:
        self._at = {}


class Counting(af.KeyedProcessFunction[int, Record, Any]):
    """Numbers the records of a key, fires timers in event time, and for some keys one in processing
    time.

    What its states say of each other is checked at each record: a Violation ends the run where it
    is raised.
    """

    def open(self, ctx: Any) -> None:
        self.count = ctx.get_state(af.ValueStateDescriptor("count", default=0))
        self.waiting = ctx.get_map_state(af.MapStateDescriptor("waiting"))
        self.recent = ctx.get_list_state(af.ListStateDescriptor("recent"))
        shared().maybe_fail("open")

    def process_element(self, value: Record, ctx: Any) -> Iterator[Any]:
        shared().maybe_fail("count")
        key, count, timers = ctx.current_key, self.count.value() + 1, ctx.timer_service
        self.count.update(count)
        recent = list(self.recent.get())
        if len(recent) != (count - 1) % SUM_EVERY:
            raise Violation(
                f"key {key}: number {count} comes behind {recent}, which are {len(recent)}"
            )
        if count % SUM_EVERY:
            self.recent.add(value)
        else:
            self.recent.clear()
        reached, first = timers.current_watermark, min(self.waiting.keys(), default=None)
        if (
            reached is not None
            and first is not None
            and first <= reached
            and not shared().discovers
        ):
            raise Violation(
                f"key {key}: the timer of {first} has not fired, and event time is {reached}"
            )
        if count == 1 and has_alarm(key):
            timers.register_processing_time_timer(timers.current_processing_time + ALARM_MS)
        if has_timer(value):
            due = ctx.timestamp + TIMER_MS
            self.waiting.put(due, value)
            timers.register_event_time_timer(due)
        yield "n", key, count, value

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[Any]:
        shared().maybe_fail("timer")
        if timestamp > 1_000_000_000_000:  # No event time is that late.
            yield "p", ctx.current_key
            return
        waiting = sorted(self.waiting.keys())
        if not waiting or waiting[0] != timestamp:
            raise Violation(
                f"key {ctx.current_key}: a timer fires at {timestamp}, those that wait are "
                f"{waiting}"
            )
        self.waiting.remove(timestamp)
        yield "t", ctx.current_key, timestamp


class Churning(af.KeyedProcessFunction[str, Record, Any]):
    """Counts the records of a key that has few of them. A timer tells the number and clears
    everything; a second one is deleted when another record comes."""

    def open(self, ctx: Any) -> None:
        self.count = ctx.get_state(af.ValueStateDescriptor("count", default=0))
        self.due = ctx.get_state(af.ValueStateDescriptor("due"))

    def process_element(self, value: Record, ctx: Any) -> None:
        count, timers = self.count.value() + 1, ctx.timer_service
        self.count.update(count)
        if count == 1:
            due = (
                time_of((*value[:2], value[2] - value[2] % 2)) + CHURN_MS
            )  # Behind an exchange either may be the first.
            self.due.update(due)
            timers.register_event_time_timer(due)
            timers.register_event_time_timer(due + 1)
        else:
            timers.delete_event_time_timer(self.due.value() + 1)

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[Any]:
        if self.due.value() != timestamp:
            yield "d", ctx.current_key
            return
        yield "c", ctx.current_key, self.count.value()
        self.count.clear()
        self.due.clear()


RULES = af.MapStateDescriptor[int, int]("rules")


class Ruling(af.KeyedBroadcastProcessFunction[int, Record, int, Any]):
    """Meets each record with the rules that were told so far.

    They come in their order, none twice, to every subtask.
    """

    def open(self, ctx: Any) -> None:
        self.met = ctx.get_state(af.ValueStateDescriptor("met", default=0))

    def process_element(self, value: Record, ctx: Any) -> Iterator[Any]:
        rules = sorted(ctx.get_broadcast_state(RULES).keys())
        if rules != list(range(len(rules))):
            raise Violation(
                f"the rules that were told are {rules}, expected the first ones without a gap"
            )
        if len(rules) < self.met.value():
            raise Violation(
                f"key {ctx.current_key} has met {self.met.value()} rules, and now there are "
                f"{len(rules)}"
            )
        self.met.update(len(rules))
        yield "r", ctx.current_key, value, len(rules)

    def process_broadcast_element(self, value: int, ctx: Any) -> None:
        rules = ctx.get_broadcast_state(RULES)
        if rules.contains(value):
            raise Violation(f"rule {value} is told twice")
        rules.put(value, value)


async def enrich(record: Record) -> Record:
    """An answer takes its time, and sometimes never comes."""
    world = shared()
    await asyncio.sleep(world.rng.uniform(0, world.answer_s))
    await world.misbehave("enrich")
    return record


def window_row(row: Any) -> list[int]:
    return [row.key, row.start, row.value]


def late_row(record: Record) -> tuple[str, int, Record]:
    return "l", key_of(record), record


def world_flow(parallelism: int, *, asked: str, ordered: bool, slow: bool) -> af.Flow:
    """The flow, as a program that is started with these settings builds it. `asked`: the sources
    whose records are enriched; `slow`: all are once more, one at a time and behind an exchange by
    key, where they pile up.
    """
    strategy: Any = af.WatermarkStrategy.bounded_out_of_orderness(f"{LAG_MS}ms", timestamp=time_of)
    splits = shared().data.splits
    flow = af.Flow("world", parallelism=parallelism, max_parallelism=8)
    streams: list[Any] = []
    for name in sorted(splits):
        stream = flow.source(
            Numbers(name), uid=name, watermarks=strategy, parallelism=min(parallelism, splits[name])
        )
        streams.append(
            stream.map(enrich, concurrency=3, ordered=ordered, uid=f"enrich {name}")
            if name in asked
            else stream
        )
    records = streams[0].union(*streams[1:])
    if slow:
        records = records.key_by(key_of).map(enrich, concurrency=1, uid="slow")
    records.key_by(key_of).process(Counting, uid="count").sink(
        DatabaseSink(database), uid="database"
    )
    windows = (
        records.key_by(key_of)
        .window(af.tumbling(f"{WINDOW_MS}ms"))
        .aggregate(af.count(), uid="windows")
    )
    windows.map(window_row, uid="rows").sink(af.io.jsonl(OUT), uid="files")
    if rules := shared().data.rules:
        told = flow.source(Rules(rules), uid="rules of one split", parallelism=1).broadcast(RULES)
        ruled = records.key_by(key_of).connect(told).process(Ruling, uid="ruling")
        ruled.sink(DatabaseSink(database), uid="ruled database")
    if shared().churns:
        churned = records.key_by(churn_key_of).process(Churning, uid="churn")
        churned.sink(DatabaseSink(database), uid="churn database")
    if shared().discovers:
        windows.late.map(late_row, uid="late").sink(DatabaseSink(database), uid="late database")
    return flow
