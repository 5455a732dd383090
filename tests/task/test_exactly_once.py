"""Whole jobs of a few tasks, checkpointed, killed and gone on with: what comes out is what would
have come out without the crash.

What sources may read is let out in portions, so that some records lie before the barrier, some
behind it, and some are read again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aioflow as af
from aioflow.core.host import Clock
from aioflow.mailbox.timers import ProcessingClock
from tests.task.checkpointed import Feed, Ledger, Run
from tests.task.running import until

pytestmark = pytest.mark.timeout(300)

SIZES = [1, 7, 1024]
WORDS = [[f"w{(i * 7 + split) % 5}" for i in range(60)] for split in range(2)]

Program = Callable[..., af.Flow]


async def reference(program: Program, lists: list[list[Any]]) -> Counter[Any]:
    """Returns the output of the program without failures, and without checkpoints except the
    last.
    """
    feed, ledger = Feed(*lists), Ledger()
    feed.allow_all()
    async with Run(program(feed, ledger)) as run:
        await run.finished()
    return Counter(map(repr, ledger.rows))


async def crashed_twice(
    program: Program, lists: list[list[Any]], portions: tuple[int, int, int, int], **options: Any
) -> Counter[Any]:
    """Two checkpoints, each with records behind it that are lost with a crash; then to the end."""
    feed, ledger = Feed(*lists), Ledger()
    flow = program(feed, ledger)
    first, lost, second, lost_again = portions
    async with Run(flow, **options) as run:
        feed.allow(first)
        await run.idle(feed)
        taken = await run.checkpoint()
        feed.allow(lost)
        await run.idle(feed)
    async with Run(flow, taken, **options) as run:
        feed.allow(second)
        await run.idle(feed)
        taken = await run.checkpoint()
        feed.allow(lost_again)
    async with Run(flow, taken, **options) as run:
        feed.allow_all()
        await run.finished()
    return Counter(map(repr, ledger.rows))


async def caught_moving(program: Program, lists: list[list[Any]], **options: Any) -> Counter[Any]:
    """The checkpoint falls into full traffic, wherever that is; the crash comes as soon as it is
    complete.
    """
    feed, ledger = Feed(*lists), Ledger()
    flow = program(feed, ledger)
    taken = None
    for allowed in (10, 25, 40):
        async with Run(flow, taken, **options) as run:
            feed.allow(allowed)
            taken = await run.checkpoint()
    async with Run(flow, taken, **options) as run:
        feed.allow_all()
        await run.finished()
    return Counter(map(repr, ledger.rows))


def counts(feed: Feed, ledger: Ledger, parallelism: int = 2) -> af.Flow:
    flow = af.Flow("counts", parallelism=parallelism)
    flow.source(feed).key_by(lambda word: word).count().sink(ledger)
    return flow


def unions(feed: Feed, ledger: Ledger, parallelism: int = 2) -> af.Flow:
    """Two ways from one source to a union: two edges, each barrier comes twice."""
    flow = af.Flow("unions", parallelism=parallelism)
    words = flow.source(feed)
    upper = words.rebalance().map(str.upper)
    words.union(upper).key_by(lambda word: word.lower()).count().sink(ledger)
    return flow


LONG: af.OutputTag[str] = af.OutputTag("seldom")


class Splits(af.ProcessFunction[str, str]):
    """Every third word of a subtask goes to a side output; how many there were is operator
    state.
    """

    def initialize_state(self, ctx: Any) -> None:
        self.state = ctx.operator_state.get_list_state("seen")
        self.seen = sum(self.state.get())

    def snapshot_state(self, ctx: Any) -> None:
        self.state.update([self.seen])

    def process_element(self, value: str, ctx: Any) -> Iterator[str]:
        self.seen += 1
        if value in ("w1", "w3"):
            ctx.output(LONG, value)
        else:
            yield value


def side_outputs(feed: Feed, ledger: Ledger, parallelism: int = 2) -> af.Flow:
    flow = af.Flow("sides", parallelism=parallelism)
    plain = flow.source(feed).process(Splits())
    side = plain.side(LONG).map(lambda word: f"side {word}")
    plain.union(side).key_by(lambda word: word).count().sink(ledger)
    return flow


class Both(af.KeyedCoProcessFunction[str, str, str, Any]):
    """Counts what came from each side of a key."""

    def open(self, ctx: Any) -> None:
        self.counts = ctx.get_state(af.ValueStateDescriptor("counts", default=(0, 0)))

    def process_element1(self, value: str, ctx: Any) -> Iterator[Any]:
        left, right = self.counts.value()
        self.counts.update((left + 1, right))
        yield value, "left", left + 1

    def process_element2(self, value: str, ctx: Any) -> Iterator[Any]:
        left, right = self.counts.value()
        self.counts.update((left, right + 1))
        yield value, "right", right + 1


def two_inputs(feed: Feed, ledger: Ledger, parallelism: int = 2) -> af.Flow:
    flow = af.Flow("two", parallelism=parallelism)
    words = flow.source(feed).rebalance()
    left = words.map(lambda word: word).key_by(lambda word: word)
    right = words.filter(lambda word: word != "w2").key_by(lambda word: word)
    left.connect(right).process(Both()).sink(ledger)
    return flow


def asynchronous(feed: Feed, ledger: Ledger, parallelism: int = 2) -> af.Flow:
    """Elements whose calls are under way at the barrier are called again after a restore."""

    async def slowly(word: str) -> str:
        for _ in range(len(word) * 3):
            await asyncio.sleep(0)
        return word + "!"

    flow = af.Flow("async", parallelism=parallelism)
    flow.source(feed).rebalance().map(slowly, concurrency=4).key_by(lambda word: word).count().sink(
        ledger
    )
    return flow


def in_batches(feed: Feed, ledger: Ledger, parallelism: int = 2) -> af.Flow:
    async def together(words: list[str]) -> list[str]:
        await asyncio.sleep(0)
        return [word + "?" for word in words]

    flow = af.Flow("batches", parallelism=parallelism)
    flow.source(feed).rebalance().map_batches(together, max_size=4, max_wait="1h").key_by(
        lambda word: word
    ).count().sink(ledger)
    return flow


class Awaits(af.KeyedProcessFunction[str, str, Any]):
    """A stateful coroutine: elements taken and not begun are in the checkpoint."""

    def open(self, ctx: Any) -> None:
        self.seen = ctx.get_state(af.ValueStateDescriptor("seen", default=0))

    async def process_element(self, value: str, ctx: Any) -> list[Any]:
        seen = self.seen.value() + 1
        await asyncio.sleep(0)
        self.seen.update(seen)
        return [(value, seen)]


def stateful_coroutines(feed: Feed, ledger: Ledger, parallelism: int = 2) -> af.Flow:
    flow = af.Flow("coroutines", parallelism=parallelism)
    flow.source(feed).key_by(lambda word: word).process(Awaits()).sink(ledger)
    return flow


PROGRAMS = [counts, unions, side_outputs, two_inputs, asynchronous, in_batches, stateful_coroutines]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
async def test_a_killed_job_goes_on_as_if_nothing_had_happened(program: Program, size: int) -> None:
    """F2, F7: the cut is consistent, and every record counts exactly once."""
    expected = await reference(program, WORDS)
    assert await crashed_twice(program, WORDS, (20, 35, 40, 50), batch_records_max=size) == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
async def test_a_checkpoint_in_full_traffic_is_a_consistent_cut(
    program: Program, size: int
) -> None:
    """F2.7, F7: wherever the barriers meet the records."""
    expected = await reference(program, WORDS)
    assert await caught_moving(program, WORDS, batch_records_max=size) == expected


# Event time.

EVENTS = [[("ab"[i % 2], 10 * i + split) for i in range(60)] for split in range(2)]


def strategy() -> Any:
    return af.WatermarkStrategy.bounded_out_of_orderness("20ms", timestamp=lambda e: e[1])


def windows(feed: Feed, ledger: Ledger, parallelism: int = 2) -> af.Flow:
    flow = af.Flow("windows", parallelism=parallelism)
    events = flow.source(feed, watermarks=strategy())
    events.key_by(lambda e: e[0]).window(af.tumbling("100ms")).aggregate(af.count()).sink(ledger)
    return flow


class Reminds(af.KeyedProcessFunction[str, Any, Any]):
    """A timer behind each event; what fires tells how many events of the key there had been."""

    def open(self, ctx: Any) -> None:
        self.seen = ctx.get_state(af.ValueStateDescriptor("seen", default=0))

    def process_element(self, value: Any, ctx: Any) -> None:
        self.seen.update(self.seen.value() + 1)
        ctx.timer_service.register_event_time_timer(value[1] + 35)

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[Any]:
        yield ctx.current_key, timestamp


def timers(feed: Feed, ledger: Ledger, parallelism: int = 2) -> af.Flow:
    flow = af.Flow("timers", parallelism=parallelism)
    flow.source(feed, watermarks=strategy()).key_by(lambda e: e[0]).process(Reminds()).sink(ledger)
    return flow


def midstream(feed: Feed, ledger: Ledger, parallelism: int = 2) -> af.Flow:
    """Event time is made behind a shuffle."""
    flow = af.Flow("midstream", parallelism=parallelism)
    stamped = flow.source(feed).map(lambda e: e).assign_timestamps_and_watermarks(strategy())
    stamped.key_by(lambda e: e[0]).window(af.sliding("100ms", "50ms")).aggregate(af.count()).sink(
        ledger
    )
    return flow


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "program", [windows, timers, midstream], ids=lambda program: program.__name__
)
async def test_windows_and_timers_survive_a_crash(program: Program, size: int) -> None:
    """G5, F7: open ones fire once, with all their elements."""
    expected = await reference(program, EVENTS)
    assert (
        await crashed_twice(program, EVENTS, (20, 35, 40, 50), batch_records_max=size) == expected
    )
    assert await caught_moving(program, EVENTS, batch_records_max=size) == expected


@pytest.mark.parametrize("midway", [False, True], ids=["at the source", "in mid-stream"])
async def test_late_elements_before_a_crash_are_late_after_it(midway: bool) -> None:
    """G5, F7: event time does not regress, though the first record after the restore is far
    behind.
    """
    feed, ledger, late = Feed([("a", 1000), ("a", 10), ("a", 20)]), Ledger(), Ledger()
    flow = af.Flow("late")
    events: Any = flow.source(feed, watermarks=None if midway else strategy())
    if midway:
        events = events.assign_timestamps_and_watermarks(strategy())
    windowed = events.key_by(lambda e: e[0]).window(af.tumbling("100ms")).aggregate(af.count())
    windowed.sink(ledger)
    windowed.late.sink(late)
    async with Run(flow) as run:
        feed.allow(2)
        await run.idle(feed)
        taken = await run.checkpoint()
    async with Run(flow, taken) as run:
        feed.allow_all()
        await run.finished()
    assert late.rows == [("a", 10), ("a", 20)]
    assert [row.value for row in ledger.rows] == [1]


class Marks(af.ProcessFunction[Any, Any]):
    """Records the event time that each record meets."""

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        yield value[1], ctx.current_watermark


async def test_event_time_is_announced_before_the_first_record_after_a_restore() -> None:
    """G5: an operator without state of its own sees no step back either."""
    feed, ledger = Feed([("a", 1000), ("a", 10)]), Ledger()
    flow = af.Flow("marks")
    flow.source(feed, watermarks=strategy()).rebalance().process(Marks()).sink(ledger)
    async with Run(flow) as run:
        feed.allow(1)
        await run.idle(feed)
        taken = await run.checkpoint()
    async with Run(flow, taken) as run:
        feed.allow_all()
        await run.finished()
    assert ledger.rows == [(1000, None), (10, 979)]


HOUR_MS = 3_600_000


class TwoHoursAhead:
    """The clocks of the machine, but for the wall clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.monotonic, self.perf_ns = clock.monotonic, clock.perf_ns

    def wall_ms(self) -> int:
        return self._clock.wall_ms() + 2 * HOUR_MS


class Alarm(af.KeyedProcessFunction[str, str, str]):
    """A processing-time timer in an hour, or in a day."""

    def process_element(self, value: str, ctx: Any) -> None:
        now = ctx.timer_service.current_processing_time
        ctx.timer_service.register_processing_time_timer(
            now + (24 if value == "later" else 1) * HOUR_MS
        )

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[str]:
        yield f"fired {ctx.current_key}"


async def test_a_processing_timer_that_is_overdue_at_a_restore_fires_at_once_after_open() -> None:
    """G5: and the one that is not due waits."""
    feed, ledger = Feed(["soon", "later"], bounded=False), Ledger()
    flow = af.Flow("alarm")
    flow.source(feed).key_by(lambda word: word).process(Alarm()).sink(ledger)
    async with Run(flow) as run:
        feed.allow_all()
        await run.idle(feed)
        taken = await run.checkpoint()
    assert ledger.rows == []
    run = Run(flow, taken)
    run.environment.processing_ms = ProcessingClock(TwoHoursAhead(run.host.clock)).read
    async with run:
        while not ledger.rows:
            await run.checkpoint()
    assert ledger.rows == ["fired soon"]


# The end of data.


class Farewell(af.ProcessFunction[str, str]):
    """Says something when the input ends."""

    def process_element(self, value: str, ctx: Any) -> Iterator[str]:
        yield value

    def finish(self) -> Iterator[str]:
        yield "goodbye"


async def test_sinks_commit_with_the_last_checkpoint_before_the_job_ends() -> None:
    """F4: every task lingers until a checkpoint behind its last record has completed."""
    feed, ledger = Feed(["a", "b"]), Ledger()
    flow = af.Flow("end")
    flow.source(feed).rebalance().process(Farewell()).sink(ledger)
    feed.allow_all()
    async with Run(flow) as run:
        run.final = False
        await until(lambda: len(run.ended) == len(run.tasks))
        assert ledger.rows == [] and not any(runner.done() for runner in run.runners.values())
        run.trigger()
        await run.finished()
    assert Counter(ledger.rows) == Counter(["a", "b", "goodbye"])


async def test_a_crash_behind_the_last_checkpoint_commits_it_and_finishes_nothing_twice() -> None:
    """F4: restored, a task that had finished emits nothing more; its sink commits what was
    prepared.
    """
    feed, ledger = Feed(["a", "b"]), Ledger()
    flow = af.Flow("end")
    flow.source(feed).rebalance().process(Farewell()).sink(ledger)
    feed.allow_all()
    notified = asyncio.Event()
    async with Run(flow) as run:
        run.final = False
        for task in run.tasks.values():
            # Lost on its way.
            task.notify_checkpoint_complete = (  # type: ignore[method-assign]
                lambda checkpoint_id: notified.set()
            )
        await until(lambda: len(run.ended) == len(run.tasks))
        taken = await run.checkpoint()
    assert notified.is_set() and ledger.rows == []
    async with Run(flow, taken) as run:
        await run.finished()
    assert Counter(ledger.rows) == Counter(["a", "b", "goodbye"])


async def test_a_source_that_ended_early_finishes_and_checkpoints_go_on_without_it() -> None:
    """F4, FLIP-147: its channels count as aligned, and a restore does not read it again."""
    short, long, ledger = Feed(["a", "b"]), Feed([f"n{i}" for i in range(20)]), Ledger()
    flow = af.Flow("short and long")
    flow.source(short, uid="short").union(flow.source(long, uid="long")).key_by(
        lambda word: word
    ).count().sink(ledger)
    short.allow_all()
    async with Run(flow) as run:
        long.allow(5)
        await until(lambda: len(run.ended) == 1)
        await run.checkpoint()
        await until(lambda: sum(runner.done() for runner in run.runners.values()) == 1)
        long.allow(10)
        await run.idle(long)
        taken = await run.checkpoint()
        long.allow(15)
        await run.idle(long)
    async with Run(flow, taken) as run:
        long.allow_all()
        await run.finished()
    assert Counter(ledger.rows) == Counter([("a", 1), ("b", 1), *((f"n{i}", 1) for i in range(20))])


async def test_a_split_that_was_read_to_its_end_is_not_read_again_after_a_second_crash() -> None:
    """F7: it stays in every checkpoint, though no reader has it any more."""
    feed, ledger = Feed(["a", "b"], [f"n{i}" for i in range(12)]), Ledger()
    flow = af.Flow("split")
    flow.source(feed).sink(ledger)
    taken = None
    for allowed in (3, 6):
        async with Run(flow, taken) as run:
            feed.allow(allowed)
            await run.idle(feed)
            taken = await run.checkpoint()
    async with Run(flow, taken) as run:
        feed.allow_all()
        await run.finished()
    assert Counter(ledger.rows) == Counter(["a", "b", *(f"n{i}" for i in range(12))])


async def test_a_reader_is_notified_of_its_checkpoint_and_of_its_completion() -> None:
    """F8: records read before may be acknowledged to their sender."""
    feed, ledger = Feed(["a", "b"], bounded=False), Ledger()
    flow = af.Flow("told")
    flow.source(feed).sink(ledger)
    async with Run(flow) as run:
        (reader,) = feed.readers
        for _ in range(2):
            await run.checkpoint()
        await until(lambda: len(reader.told) == 4)
        assert reader.told == [
            ("checkpoint", 1),
            ("completed", 1),
            ("checkpoint", 2),
            ("completed", 2),
        ]


async def test_stopping_keeps_windows_open_for_the_run_that_goes_on() -> None:
    """F4: `stop()` ends in a checkpoint too, and what is restored from it goes on where it was."""
    feed, ledger = Feed(*EVENTS), Ledger()
    flow = windows(feed, ledger)
    async with Run(flow) as run:
        feed.allow(25)
        await run.idle(feed)
        for task in run.tasks.values():
            task.stop_source(drain=False)
        await run.finished()
        taken = run.latest
    async with Run(flow, taken) as run:
        feed.allow_all()
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == await reference(windows, EVENTS)


async def test_a_checkpoint_that_was_under_way_does_not_end_what_is_stopped() -> None:
    """F4: a checkpoint triggered before the stop may reach a task behind its end, and complete; the
    tasks stay for the final one.
    """
    feed, ledger = Feed(*EVENTS), Ledger()
    flow = windows(feed, ledger)
    async with Run(flow) as run:
        run.final = False
        feed.allow(25)
        await run.idle(feed)
        for task in run.tasks.values():
            task.stop_source(drain=False)
        while len(run.ended) < len(run.tasks):
            await asyncio.sleep(0)
        await run.checkpoint()
        await run.checkpoint(savepoint=True)
        assert not any(runner.done() for runner in run.runners.values())
        await run.checkpoint(final=True)
        await run.finished()
        taken = run.latest
    async with Run(flow, taken) as run:
        feed.allow_all()
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == await reference(windows, EVENTS)


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("program", [counts, timers, windows], ids=lambda program: program.__name__)
async def test_another_parallelism_gives_the_same_results(
    program: Program, parallelism: int
) -> None:
    """H3, H5, G5: state, timers and splits go where their keys and numbers send them."""
    lists = EVENTS if program is not counts else WORDS
    feed, ledger = Feed(*lists), Ledger()
    async with Run(program(feed, ledger)) as run:
        feed.allow(25)
        await run.idle(feed)
        taken = await run.checkpoint()
    async with Run(program(feed, ledger, parallelism), taken) as run:
        feed.allow_all()
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == await reference(program, lists)
