"""Checkpoints amid very many due timers and windows: none is lost, and none fires twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aioflow as af
from aioflow.core.keygroups import key_group, range_for_subtask
from aioflow.operators import results
from aioflow.operators.process import async_functions, functions
from aioflow.task import checkpointing
from tests.task.checkpointed import Feed, Ledger
from tests.task.test_exactly_once import strategy
from tests.task.test_unaligned import Execution

pytestmark = pytest.mark.timeout(120)

KEYS, INSTANTS = 150, 3
EVENTS = [(f"k{i}", 0) for i in range(KEYS)] + [(f"z{i}", 1_000 + i) for i in range(20)]
OVERTAKES = {"unaligned": True}
MAY_OVERTAKE = {"aligned_timeout_ms": 3_600_000}


class Reminders(af.KeyedProcessFunction[str, Any, Any]):
    """Sets a timer for each of the first elements; counts the timers that fire, over all runs."""

    fired = 0

    def open(self, ctx: af.RuntimeContext) -> None:
        self.seen = ctx.get_state(af.ValueStateDescriptor("seen", default=0))

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        self.seen.update(self.seen.value() + 1)
        if value[1] == 0:
            ctx.timer_service.register_event_time_timer(100 + int(value[0][1:]) % INSTANTS)
        else:
            yield "element", value[0], ctx.current_watermark

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[Any]:
        type(self).fired += 1
        yield "timer", ctx.current_key, timestamp, ctx.current_watermark, self.seen.value()


class Ledgers:
    """The output of the timers, and of the windows behind them, which drop what is late."""

    def __init__(self) -> None:
        self.timers, self.windows = Ledger(), Ledger()

    @property
    def rows(self) -> Counter[str]:
        return Counter(map(repr, self.timers.rows + self.windows.rows))


def reminders(feed: Feed, ledgers: Ledgers, parallelism: int = 1) -> af.Flow:
    flow = af.Flow("reminders", parallelism=parallelism)
    events = flow.source(feed, watermarks=strategy(), parallelism=1)
    reminded = events.key_by(lambda e: e[0]).process(Reminders())
    reminded.sink(ledgers.timers)
    windows = reminded.key_by(lambda row: row[0]).window(af.tumbling("1ms"))
    windows.aggregate(af.count()).sink(ledgers.windows)
    return flow


@pytest.fixture(autouse=True)
def fires_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has one timer fire in a slice, and an aligned checkpoint interrupt them without delay."""
    monkeypatch.setattr(Reminders, "fired", 0)
    monkeypatch.setattr(functions, "DRAIN_NS", 0)
    monkeypatch.setattr(results, "RESULTS_FIRST", 1)
    monkeypatch.setattr(results, "PIECE_NS", 0)
    monkeypatch.setattr(checkpointing, "FIRING_S", 0.0)


async def amid_the_firing(run: Execution, feed: Feed, at: int) -> None:
    """Lets `at` timers fire, one a turn of the loop; elements behind them are in the same batch."""
    feed.allow(KEYS)
    await run.idle(feed)
    for task in run.tasks.values():
        task._runtime.chain._slice_ns, task._processor._slice_s = 0, 0.0
    feed.allow_all()
    while Reminders.fired < at:
        await asyncio.sleep(0)


async def expected(events: list[tuple[str, int]] = EVENTS) -> Counter[str]:
    feed, ledgers = Feed(events), Ledgers()
    feed.allow_all()
    async with Execution(reminders(feed, ledgers)) as run:
        await run.finished()
    Reminders.fired = 0
    return ledgers.rows


@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("at", [1, KEYS // INSTANTS, KEYS // 2])
@pytest.mark.parametrize(
    "barrier", [{}, MAY_OVERTAKE, OVERTAKES], ids=["aligned", "may overtake", "unaligned"]
)
async def test_checkpoint_amid_due_timers_is_taken_and_restored_exactly(
    barrier: dict[str, Any], at: int, parallelism: int
) -> None:
    rows = await expected()
    feed, ledgers = Feed(EVENTS, bounded=False), Ledgers()
    async with Execution(reminders(feed, ledgers)) as run:
        await amid_the_firing(run, feed, at)
        cut = await run.cut_here(**barrier)
        assert cut.in_flight
    feed.bounded, Reminders.fired = True, 0
    async with Execution(reminders(feed, ledgers, parallelism), cut) as run:
        feed.allow_all()
        await run.finished()
    assert 0 < Reminders.fired < KEYS
    assert ledgers.rows == rows


async def test_subtasks_at_rest_keep_their_event_time_for_a_restore_at_another_parallelism() -> (
    None
):
    """All elements and timers belong to one of two subtasks; its data in flight sees event time."""
    first = range_for_subtask(0, 2, 128)
    keys = [f"k{i}" for i in range(4 * KEYS) if key_group(f"k{i}", 128) in first]
    events = [(key, 0) for key in keys[:KEYS]] + [(key, 1_000 + i) for i, key in enumerate(keys)]
    rows = await expected(events)
    feed, ledgers = Feed(events, bounded=False), Ledgers()
    async with Execution(reminders(feed, ledgers, 2)) as run:
        await amid_the_firing(run, feed, 1)
        cut = await run.cut_here()
        assert cut.in_flight
    feed.bounded = True
    async with Execution(reminders(feed, ledgers), cut) as run:
        feed.allow_all()
        await run.finished()
    assert ledgers.rows == rows


async def test_savepoint_amid_due_timers_holds_no_data_in_flight() -> None:
    feed, ledgers = Feed(EVENTS, bounded=False), Ledgers()
    async with Execution(reminders(feed, ledgers)) as run:
        await amid_the_firing(run, feed, KEYS // 2)
        cut = await run.cut_here(savepoint=True)
        assert Reminders.fired == KEYS
        assert not cut.in_flight


async def test_aligned_checkpoint_lets_few_timers_fire_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpointing, "FIRING_S", 3_600.0)
    feed, ledgers = Feed(EVENTS, bounded=False), Ledgers()
    async with Execution(reminders(feed, ledgers)) as run:
        await amid_the_firing(run, feed, KEYS // 2)
        cut = await run.cut_here()
        assert not cut.in_flight


class Echoes(af.KeyedProcessFunction[str, Any, Any]):
    """Sets timers around the time of each element, and tells what they see."""

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        for later in (-3, 0, 2, 7):
            ctx.timer_service.register_event_time_timer(ctx.timestamp + later)
        yield "element", value, ctx.current_watermark

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[Any]:
        yield "timer", timestamp, ctx.current_watermark


class Quiet(af.KeyedProcessFunction[str, Any, Any]):
    """Sets a timer for each element; of most timers nothing comes."""

    def process_element(self, value: Any, ctx: Any) -> None:
        ctx.timer_service.register_event_time_timer(100 + int(value[0][1:]))

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[Any]:
        if timestamp % 7 == 0:
            yield ctx.current_key, timestamp


class QuietAsync(af.KeyedProcessFunction[str, Any, Any]):
    """The same with coroutines."""

    async def process_element(self, value: Any, ctx: Any) -> None:
        ctx.timer_service.register_event_time_timer(100 + int(value[0][1:]))

    async def on_timer(self, timestamp: int, ctx: Any) -> Any:
        return [(ctx.current_key, timestamp)] if timestamp % 7 == 0 else None


@pytest.mark.parametrize("function", [Quiet, QuietAsync])
async def test_timers_see_the_same_event_time_wherever_slices_of_timers_before_them_end(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for slice_ns in (0, 1 << 60):
        for module in (functions, async_functions):
            monkeypatch.setattr(module, "DRAIN_NS", slice_ns)
        feed, ledger = Feed(EVENTS[:KEYS]), Ledger()
        feed.allow_all()
        flow = af.Flow("echoes")
        quiet = flow.source(feed, watermarks=strategy()).key_by(lambda e: e[0]).process(function())
        quiet.key_by(lambda row: row[1] % 2).process(Echoes()).sink(ledger)
        async with Execution(flow) as run:
            await run.finished()
        seen.append(ledger.rows)
    assert seen[0] == seen[1]
    assert ("timer", 247, af.MAX_WATERMARK) in seen[0], "it is behind the last output"


# Windows.


def fired(key: str, window: Any, result: Any) -> tuple[str, int, Any]:
    """A window function that counts its calls, over all runs."""
    Reminders.fired += 1
    return key, window.start, result


def fired_with_elements(key: str, ctx: Any, elements: Any) -> list[tuple[str, int, Any]]:
    Reminders.fired += 1
    return [(key, ctx.window.start, sorted(elements))]


Windowed = Callable[[Any], Any]

WINDOWS: dict[str, Windowed] = {
    "slices": lambda s: s.window(af.tumbling("1ms")).aggregate(af.count(), window_fn=fired),
    "sliding": lambda s: s.window(af.sliding("2ms", "1ms")).aggregate(af.count(), window_fn=fired),
    "sessions": lambda s: s.window(af.session("10ms")).aggregate(af.count(), window_fn=fired),
    "sessions of lists": lambda s: s.window(af.session("10ms")).process(fired_with_elements),
    "elements": lambda s: s.window(af.tumbling("1ms")).process(fired_with_elements),
}
WINDOW_EVENTS = [(f"k{i}", i % 5) for i in range(KEYS)] + [
    (f"{name}{i}", 1_000 + i) for i in range(10) for name in "kz"
]


def windows(windowed: Windowed, feed: Feed, ledger: Ledger, parallelism: int = 1) -> af.Flow:
    flow = af.Flow("windows", parallelism=parallelism)
    windowed(flow.source(feed, watermarks=strategy()).key_by(lambda e: e[0])).sink(ledger)
    return flow


@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("at", [1, KEYS // 2])
@pytest.mark.parametrize("barrier", [{}, OVERTAKES], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("windowed", WINDOWS.values(), ids=WINDOWS.keys())
async def test_checkpoint_amid_windows_that_fire_is_taken_and_restored_exactly(
    windowed: Windowed, barrier: dict[str, Any], at: int, parallelism: int
) -> None:
    feed, ledger = Feed(WINDOW_EVENTS), Ledger()
    feed.allow_all()
    async with Execution(windows(windowed, feed, ledger)) as run:
        await run.finished()
    rows, all_fired = Counter(map(repr, ledger.rows)), Reminders.fired
    Reminders.fired = 0
    feed, ledger = Feed(WINDOW_EVENTS, bounded=False), Ledger()
    async with Execution(windows(windowed, feed, ledger)) as run:
        await amid_the_firing(run, feed, at)
        cut = await run.cut_here(**barrier)
        assert cut.in_flight
        assert Reminders.fired < KEYS, "it does not wait for all windows that are due"
        before = Reminders.fired
    feed.bounded = True
    async with Execution(windows(windowed, feed, ledger, parallelism), cut) as run:
        feed.allow_all()
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == rows
    assert before < all_fired


SLICES: dict[str, Windowed] = {
    "tumbling": lambda s: s.window(af.tumbling("10ms")).aggregate(af.count(), window_fn=fired),
    "sliding": lambda s: s.window(af.sliding("20ms", "10ms")).aggregate(
        af.count(), window_fn=fired
    ),
    "late": lambda s: s.window(af.tumbling("10ms"), lateness="2s").aggregate(
        af.count(), window_fn=fired
    ),
}


@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("at", [1, KEYS // 2, KEYS - 1])
@pytest.mark.parametrize("barrier", [{}, OVERTAKES], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("windowed", SLICES.values(), ids=SLICES.keys())
async def test_checkpoint_amid_the_keys_of_one_window_is_taken_and_restored_exactly(
    windowed: Windowed, barrier: dict[str, Any], at: int, parallelism: int
) -> None:
    """Some elements are late for the window, and some of them may fire it again."""
    events = [(f"k{i}", i % 10) for i in range(KEYS)]
    events += [("z", 1_000), *((f"k{i}", i) for i in range(0, KEYS, 7)), ("z", 1_001)]
    feed, ledger = Feed(events), Ledger()
    feed.allow_all()
    async with Execution(windows(windowed, feed, ledger)) as run:
        await run.finished()
    rows = Counter(map(repr, ledger.rows))
    Reminders.fired = 0
    feed, ledger = Feed(events, bounded=False), Ledger()
    async with Execution(windows(windowed, feed, ledger)) as run:
        await amid_the_firing(run, feed, at)
        cut = await run.cut_here(**barrier)
        assert cut.in_flight
        assert Reminders.fired < at + 20, "it does not wait for the other keys"
    feed.bounded = True
    async with Execution(windows(windowed, feed, ledger, parallelism), cut) as run:
        feed.allow_all()
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == rows


@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("at", [1, KEYS // 2])
@pytest.mark.parametrize("barrier", [{}, OVERTAKES], ids=["aligned", "unaligned"])
async def test_checkpoint_amid_windows_of_the_clock_is_taken_and_restored_exactly(
    barrier: dict[str, Any], at: int, parallelism: int
) -> None:
    # On a slow machine short windows have fired before the test looks.
    for size in ("200ms", "2s", "20s"):

        def by_clock(stream: Any, size: str = size) -> Any:
            clocks = af.tumbling(size, time="processing")
            return stream.window(clocks).aggregate(af.count(), window_fn=fired)

        Reminders.fired = 0
        feed, ledger = Feed(EVENTS[:KEYS], bounded=False), Ledger()
        async with Execution(windows(by_clock, feed, ledger)) as run:
            await amid_the_firing(run, feed, at)
            cut = await run.cut_here(**barrier)
        if Reminders.fired < KEYS:
            break
    assert Reminders.fired < KEYS
    feed.bounded = True
    async with Execution(windows(by_clock, feed, ledger, parallelism), cut) as run:
        feed.allow_all()
        await run.finished()
    counts: Counter[str] = Counter()
    for key, _start, count in ledger.rows:
        counts[key] += count
    assert counts == dict.fromkeys((key for key, _ in EVENTS[:KEYS]), 1)


@pytest.mark.parametrize("windowed", WINDOWS.values(), ids=WINDOWS.keys())
async def test_new_input_stays_behind_restored_elements_while_windows_fire(
    windowed: Windowed,
) -> None:
    """The new input is so much later that restored elements behind it would be late."""
    events = [*WINDOW_EVENTS, *((f"later{i}", 1_000_000 + i) for i in range(20))]
    feed, ledger = Feed(events), Ledger()
    feed.allow_all()
    async with Execution(windows(windowed, feed, ledger)) as run:
        await run.finished()
    rows = Counter(map(repr, ledger.rows))
    Reminders.fired = 0
    feed, ledger = Feed(WINDOW_EVENTS, bounded=False), Ledger()
    async with Execution(windows(windowed, feed, ledger), batch_records_max=4) as run:
        await amid_the_firing(run, feed, 1)
        for _ in range(20):
            await asyncio.sleep(0)
        cut = await run.cut_here(**OVERTAKES)
    feed = Feed(events)
    feed.allow_all()
    async with Execution(windows(windowed, feed, ledger), cut, batch_records_max=4) as run:
        for task in run.tasks.values():
            task._runtime.chain._slice_ns, task._processor._slice_s = 0, 0.0
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == rows


@pytest.mark.parametrize("windowed", WINDOWS.values(), ids=WINDOWS.keys())
async def test_results_of_windows_left_at_the_instant_of_a_checkpoint_are_not_late_after_it(
    windowed: Windowed,
) -> None:
    """The watermark behind a single element fires the windows, so no element is left."""
    events = [*WINDOW_EVENTS[:KEYS], ("z0", 1_000)]

    def counted(feed: Feed, ledger: Ledger) -> af.Flow:
        flow = af.Flow("windows")
        fired = windowed(flow.source(feed, watermarks=strategy()).key_by(lambda e: e[0]))
        counts = fired.key_by(lambda row: row[0]).window(af.tumbling("1ms"))
        counts.aggregate(af.count()).sink(ledger)
        return flow

    feed, ledger = Feed(events), Ledger()
    feed.allow_all()
    async with Execution(counted(feed, ledger)) as run:
        await run.finished()
    rows = Counter(map(repr, ledger.rows))
    Reminders.fired = 0
    feed, ledger = Feed(events, bounded=False), Ledger()
    async with Execution(counted(feed, ledger)) as run:
        await amid_the_firing(run, feed, KEYS // 10)
        cut = await run.cut_here(**OVERTAKES)
    feed = Feed(events)
    feed.allow_all()
    async with Execution(counted(feed, ledger), cut) as run:
        await run.finished()
    assert Counter(map(repr, ledger.rows)) == rows
