"""Long-lived objects are examined once, and frozen objects are examined again before they can hide
much garbage.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable, Iterator

import pytest

import aioflow as af
from aioflow.api.runner import new_event_loop
from aioflow.cli.progress import Watcher, run_flow
from aioflow.cluster import collector as collector_module
from aioflow.cluster.collector import (
    COLLECTED_AFTER,
    COMPLETE_FROM_NS,
    FREEZE_FROM_NS,
    FULL,
    FULL_EVERY_S,
    LATER,
    YOUNG,
    Collector,
    collector_of_process,
)
from aioflow.core.aio import cancel_and_wait
from aioflow.testing import simulate
from aioflow.testing.simulation import SimulatedHost


class Process:
    """A process with a collector over generations that are counted.

    Time passes while objects are walked, one ns each.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.frozen = self.seen = 0
        self.collected: list[int] = []
        self.collector = Collector(lambda: self.now_ns, self)

    def freeze(self) -> None:
        self.frozen, self.seen = self.frozen + self.seen, 0

    def unfreeze(self) -> None:
        self.frozen, self.seen = 0, self.frozen + self.seen

    def collect(self, generation: int, /) -> int:
        self.collected.append(generation)
        return 0

    def full(self, new: int, garbage: int = 0, generation: int = 2) -> int:
        """Returns the number of objects that a collection examines after this number of new
        ones.

        `garbage`: those that it finds.
        """
        self.seen += new
        self.collector.hear("start", {"generation": generation, "collected": 0, "uncollectable": 0})
        walked = self.seen
        self.now_ns += walked
        self.collector.hear(
            "stop", {"generation": generation, "collected": garbage, "uncollectable": 0}
        )
        return walked


def test_survivors_of_a_long_collection_are_not_examined_again() -> None:
    process = Process()
    assert [process.full(FREEZE_FROM_NS) for _ in range(5)] == [FREEZE_FROM_NS] * 5
    assert process.frozen == 5 * FREEZE_FROM_NS


def test_short_collections_freeze_nothing() -> None:
    process = Process()
    assert [process.full(1000) for _ in range(3)] == [1000, 2000, 3000]
    assert process.frozen == 0


def collecting_for(
    collector: Collector, seconds: float, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Lets it collect by hand, in virtual time; `meanwhile` is called after a second."""

    async def main(host: SimulatedHost) -> None:
        collecting = asyncio.create_task(collector.collect())
        await asyncio.sleep(1)
        meanwhile()
        await asyncio.sleep(seconds - 1)
        await cancel_and_wait([collecting])

    simulate(main, 1)


def test_the_young_are_collected_by_hand_all_the_while_and_everything_from_time_to_time() -> None:
    process = Process()
    collecting_for(process.collector, 3.5 * FULL_EVERY_S)
    assert process.collected.count(FULL) == 3
    assert process.collected.count(YOUNG) > 100 * process.collected.count(FULL)


def test_garbage_that_survived_the_young_is_found_in_a_process_that_makes_few_objects() -> None:
    """The interpreter finds no collection due there, so objects of restarted tasks stayed for
    ever.
    """

    class Task:
        def __init__(self) -> None:
            self.itself = self

    tasks = [Task()]
    gone = weakref.ref(tasks[0])
    gc.disable()
    try:
        collecting_for(Collector(lambda: 0), 2 * FULL_EVERY_S, tasks.clear)
        assert gone() is None
    finally:
        gc.enable()


def test_young_generations_are_none_of_its_business() -> None:
    process = Process()
    process.full(10 * FREEZE_FROM_NS, generation=1)
    assert process.frozen == 0


def test_without_garbage_everything_is_walked_seldom() -> None:
    process = Process()
    step = COMPLETE_FROM_NS // 4
    walked = [process.full(step) for _ in range(4 * LATER + 1)]
    assert walked[:-1] == [step] * (4 * LATER)
    assert walked[-1] == step * (4 * LATER + 1)


def test_with_garbage_everything_is_walked_when_it_may_have_doubled() -> None:
    process = Process()
    step = COMPLETE_FROM_NS // 4
    walked = [process.full(step, garbage=step // 10) for _ in range(14)]
    assert [number for number, count in enumerate(walked) if count > step] == [4, 10]


def test_next_full_collection_comes_late_after_a_fruitless_one() -> None:
    process = Process()
    step = COMPLETE_FROM_NS // 4
    for _ in range(4):
        process.full(step, garbage=step // 10)
    assert process.full(step) == 5 * step
    assert [process.full(step) for _ in range(5 * LATER)] == [step] * (5 * LATER)


def test_when_a_task_has_ended_all_is_walked_once() -> None:
    process = Process()
    process.full(FREEZE_FROM_NS)
    process.collector.look_everywhere()
    assert process.full(1, garbage=FREEZE_FROM_NS) == FREEZE_FROM_NS + 1
    assert process.full(1) == 1
    assert process.full(COMPLETE_FROM_NS) == COMPLETE_FROM_NS + 1


@pytest.fixture(autouse=True, scope="module")
def _signal_pipe_of_libuv() -> None:
    """libuv opens one pipe a process when its first loop starts, and keeps it: before the tests,
    which look for what they leave open.
    """
    new_event_loop().close()


class Cycle:
    itself: object = None


@pytest.fixture
def pythons_collector() -> Iterator[None]:
    """Lets a test begin with Python's own settings, and restores those of this process."""
    before, callbacks = gc.get_threshold(), list(gc.callbacks)
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)
    gc.callbacks[:] = callbacks
    gc.unfreeze()


@pytest.mark.usefixtures("pythons_collector")
def test_tune_gc_freezes_what_a_service_holds_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = [[i] for i in range(1_000)]
    with caplog.at_level(logging.INFO, "aioflow"):
        af.tune_gc()
    assert gc.get_threshold() == COLLECTED_AFTER
    assert gc.get_freeze_count() > len(held)
    assert f"thresholds {COLLECTED_AFTER}" in caplog.text
    af.tune_gc()
    callbacks = [
        one for one in gc.callbacks if isinstance(getattr(one, "__self__", None), Collector)
    ]
    assert len(callbacks) == 1


@pytest.mark.usefixtures("pythons_collector")
def test_cyclic_garbage_is_freed_after_tune_gc() -> None:
    made = Cycle()
    weak, made.itself = weakref.ref(made), made
    af.tune_gc()
    del made
    collector = collector_of_process()
    assert collector is not None
    gc.collect()
    assert weak() is not None, "a frozen object was examined by an ordinary collection"
    collector.look_everywhere()
    gc.collect()
    assert weak() is None


@pytest.mark.usefixtures("pythons_collector")
def test_the_collection_of_tune_gc_counts_as_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a service with millions of objects it took the time after which all are walked again."""
    monkeypatch.setattr(collector_module, "FREEZE_FROM_NS", 0)
    monkeypatch.setattr(collector_module, "COMPLETE_FROM_NS", 1)
    made = Cycle()
    weak, made.itself = weakref.ref(made), made
    af.tune_gc()
    del made
    gc.collect()
    assert weak() is not None, "all objects were walked again at once"


def collector_seen_by(run: Callable[[af.Flow], object]) -> tuple[int, int, int]:
    """Returns the thresholds of the collector while `run` runs a flow."""
    seen = []
    flow = af.Flow("seen")
    flow.source([1]).map(lambda _: seen.append(gc.get_threshold())).sink(af.io.blackhole())
    run(flow)
    return seen[0]


@pytest.mark.usefixtures("pythons_collector")
@pytest.mark.parametrize("run", [af.run, lambda flow: run_flow(flow, Watcher())])
def test_run_chooses_the_collector_until_it_returns(
    run: Callable[[af.Flow], object], caplog: pytest.LogCaptureFixture
) -> None:
    before, callbacks = gc.get_threshold(), list(gc.callbacks)
    with caplog.at_level(logging.INFO, "aioflow"):
        assert collector_seen_by(run) == COLLECTED_AFTER
    assert (gc.get_threshold(), gc.callbacks, gc.get_freeze_count()) == (before, callbacks, 0)
    assert f"thresholds {COLLECTED_AFTER}" in caplog.text


@pytest.mark.usefixtures("pythons_collector")
def test_run_leaves_the_collector_of_a_program_that_has_set_it() -> None:
    gc.set_threshold(50_000, 20, 20)
    assert collector_seen_by(af.run) == (50_000, 20, 20)


@pytest.mark.usefixtures("pythons_collector")
def test_flow_inside_a_service_leaves_the_collector_alone() -> None:
    assert collector_seen_by(lambda flow: asyncio.run(flow.execute())) == (700, 10, 10)
    af.tune_gc()
    assert collector_seen_by(lambda flow: asyncio.run(flow.execute())) == COLLECTED_AFTER
