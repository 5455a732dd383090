"""Event time over a restore at another parallelism: with data in flight each record is as late as
it was, and timers fire between the same records.

Programs with one source give the same answers in every run, with any late records. Each is cut by
unaligned checkpoints with much in flight, and continued at other parallelisms. The output is that
of a run without a restart.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aioflow as af
from tests.task.checkpointed import Feed, Ledger, Run
from tests.task.test_unaligned import Cut, Execution

pytestmark = pytest.mark.timeout(300)

PARALLELISMS = range(1, 5)


class Turnstile:
    """Lets as many values through as were allowed."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(0)
        self._is_open = False

    def allow(self, count: int) -> None:
        for _ in range(count):
            self._free.release()

    def open(self) -> None:
        self._is_open = True
        self.allow(10_000)

    async def __call__(self, value: Any) -> Any:
        if not self._is_open:
            await self._free.acquire()
        return value


Program = Callable[[Feed, Ledger, Turnstile, int], af.Flow]
Event = tuple[str, int, int]
"""Key, event time, number."""


def key(event: Event) -> str:
    return event[0]


def source(flow: af.Flow, feed: Feed) -> Any:
    strategy = af.WatermarkStrategy.bounded_out_of_orderness("20ms", timestamp=lambda e: e[1])
    return flow.source(feed, watermarks=strategy, parallelism=1, uid="events")


class Tells(af.KeyedProcessFunction[str, Event, Any]):
    """Says of each event how far event time is, and of each timer how many events came before."""

    def open(self, ctx: Any) -> None:
        self.seen = ctx.get_state(af.ValueStateDescriptor("seen", default=0))

    def process_element(self, value: Event, ctx: Any) -> Iterator[Any]:
        self.seen.update(self.seen.value() + 1)
        ctx.timer_service.register_event_time_timer(value[1] + 35)
        yield value, ctx.timer_service.current_watermark

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[Any]:
        yield ctx.current_key, timestamp, self.seen.value()


class Copies(af.ProcessFunction[Event, Event]):
    """Makes more than leaves at once."""

    def process_element(self, value: Event, ctx: Any) -> Iterator[Event]:
        for n in range(3):
            yield value[0] + "'" * n, value[1], value[2]


def timers(feed: Feed, ledger: Ledger, gate: Turnstile, parallelism: int) -> af.Flow:
    flow = af.Flow("timers", parallelism=parallelism)
    told = source(flow, feed).key_by(key).process(Tells(), uid="tells")
    told.rebalance().map(gate, concurrency=2, uid="gate").sink(ledger, uid="ledger")
    return flow


def windows(feed: Feed, ledger: Ledger, gate: Turnstile, parallelism: int) -> af.Flow:
    """Builds windows with lateness, and elements later than that."""
    flow = af.Flow("windows", parallelism=parallelism)
    counts = (
        source(flow, feed)
        .key_by(key)
        .window(af.tumbling("30ms"), lateness="15ms")
        .aggregate(af.count(), uid="windows")
    )
    counts.rebalance().map(gate, concurrency=2, uid="gate").union(counts.late).sink(
        ledger, uid="ledger"
    )
    return flow


def sessions(feed: Feed, ledger: Ledger, gate: Turnstile, parallelism: int) -> af.Flow:
    flow = af.Flow("sessions", parallelism=parallelism)
    counts = (
        source(flow, feed)
        .key_by(key)
        .window(af.session("12ms"))
        .aggregate(af.count(), uid="sessions")
    )
    counts.rebalance().map(gate, concurrency=2, uid="gate").union(counts.late).sink(
        ledger, uid="ledger"
    )
    return flow


def in_the_source(feed: Feed, ledger: Ledger, gate: Turnstile, parallelism: int) -> af.Flow:
    """Builds a flow in which data in the chain of the source keeps its event time, too."""
    flow = af.Flow("in the source", parallelism=parallelism)
    copies = source(flow, feed).process(Copies(), uid="copies", parallelism=1)
    events = copies.rebalance().map(gate, concurrency=2, uid="gate", parallelism=1)
    events.key_by(key).process(Tells(), uid="tells").sink(ledger, uid="ledger")
    return flow


def sums_on_time(feed: Feed, ledger: Ledger, gate: Turnstile, parallelism: int) -> af.Flow:
    """Windows of the results of windows: on several ways, and none of it late."""
    flow = af.Flow("on time", parallelism=parallelism)
    events = source(flow, feed).filter(lambda e: e[2] >= 0, parallelism=1)
    counts = events.key_by(key).window(af.tumbling("20ms")).aggregate(af.count(), uid="counts")
    through = counts.rebalance().map(gate, concurrency=2, uid="gate")
    sums = (
        through.key_by(lambda row: len(row.key))
        .window(af.tumbling("60ms"))
        .aggregate(af.sum(lambda row: row.value), uid="sums")
    )
    sums.union(sums.late).sink(ledger, uid="ledger")
    return flow


def joined_on_time(feed: Feed, ledger: Ledger, gate: Turnstile, parallelism: int) -> af.Flow:
    flow = af.Flow("joined", parallelism=parallelism)
    events = source(flow, feed).filter(lambda e: e[2] >= 0, parallelism=1)
    even = events.rebalance().filter(lambda e: e[2] % 2 == 0, parallelism=1)
    pairs = (
        events.join(even).where(key).equal_to(key).window(af.tumbling("10ms")).pairs(uid="pairs")
    )
    pairs.rebalance().map(gate, concurrency=2, uid="gate").sink(ledger, uid="ledger")
    return flow


PROGRAMS: list[Program] = [timers, windows, sessions, in_the_source, sums_on_time, joined_on_time]
NAMES = [program.__name__ for program in PROGRAMS]


def events_of(chance: random.Random) -> list[Event]:
    """Out of order, some too late: those have a number below 0."""
    found, now = list[Event](), 1000
    for n in range(110):
        now += chance.choice((0, 0, 1, 2, 7))
        name = chance.choice("abcdefgh") * chance.choice((1, 1, 3))
        if chance.random() < 0.2:
            found.append((name, now - 21 - chance.randrange(60), -1 - n))
        else:
            found.append((name, now - chance.randrange(19), n))
    return found


async def reference(program: Program, events: list[Event]) -> Counter[str]:
    feed, ledger, gate = Feed(events), Ledger(), Turnstile()
    gate.open()
    feed.allow_all()
    async with Run(program(feed, ledger, gate, 1)) as run:
        await run.finished()
    return Counter(map(repr, ledger.rows))


@pytest.mark.parametrize(
    ("seed", "backend"), [*((seed, "heap") for seed in range(4)), (4, "rocksdb")]
)
@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
async def test_nothing_becomes_late_or_stops_being_late_by_a_rescale(
    program: Program, seed: int, backend: str
) -> None:
    """F6, G5: chains of up to four restores, each at any parallelism, some before anything was
    processed.
    """
    chance = random.Random(f"{program.__name__} {seed}")
    events = events_of(chance)
    expected = await reference(program, events)
    options = {"batch_records_max": chance.choice((1, 3, 8, 1024)), "state_backend": backend}
    feed, ledger = Feed(events, bounded=False), Ledger()
    feed.allow_all()
    cut: Cut | None = None
    for _ in range(chance.randint(1, 4)):
        gate = Turnstile()
        gate.allow(chance.choice((0, 1, 7, 20, 50)))
        async with Execution(
            program(feed, ledger, gate, chance.choice(PARALLELISMS)), cut, **options
        ) as run:
            if chance.random() < 0.8:
                await run.stuck()
            cut = await run.cut_here(
                **chance.choice(({"unaligned": True}, {"aligned_timeout_ms": 10}))
            )
    gate = Turnstile()
    gate.open()
    feed.bounded = True
    async with Execution(
        program(feed, ledger, gate, chance.choice(PARALLELISMS)), cut, **options
    ) as run:
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == expected
