"""Whole flows under many seeds: what comes out never depends on interleavings, slice lengths,
stalls or how long calls take.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aioflow as af
from aioflow.operators import async_io
from aioflow.operators.async_io import UnorderedQueue
from aioflow.testing import (
    Faults,
    SimDeadlock,
    SimFenceBroken,
    SimLivelock,
    SimulatedRun,
    run_simulated,
)

SEEDS = range(50)

Program = Callable[[], tuple[af.Flow, Any]]


def word_count() -> tuple[af.Flow, Any]:
    words = [
        f"{random.Random(i).choice('abcdefgh')} {random.Random(-i).choice('xyz')}"
        for i in range(60)
    ]
    flow = af.Flow("words", parallelism=2)
    return flow, flow.source(words).flat_map(str.split).key_by(str).count()


def windows() -> tuple[af.Flow, Any]:
    rng = random.Random(1)
    events = [(rng.choice("abc"), i * 10 + rng.randrange(-30, 30)) for i in range(80)]
    flow = af.Flow("windows", parallelism=2)
    strategy = af.WatermarkStrategy.bounded_out_of_orderness("20ms", timestamp=lambda e: e[1])
    source = flow.source(events, watermarks=strategy, parallelism=1)
    return flow, source.key_by(lambda e: e[0]).window(af.sliding("100ms", "50ms")).aggregate(
        af.count()
    )


def sessions_after_a_map_that_waits() -> tuple[af.Flow, Any]:
    rng = random.Random(2)
    events = [(rng.choice("ab"), i * 10 + rng.randrange(60)) for i in range(60)]
    flow = af.Flow("sessions")
    strategy = af.WatermarkStrategy.bounded_out_of_orderness("60ms", timestamp=lambda e: e[1])
    rows = flow.source(events, watermarks=strategy).map(
        lambda e: e, blocking=True, concurrency=4, ordered=False
    )
    return flow, rows.key_by(lambda e: e[0]).window(af.session("15ms")).aggregate(
        af.collect(lambda e: e[1]), window_fn=sort_session
    )


def sort_session(key: str, window: Any, times: list[int]) -> tuple[str, int, list[int]]:
    return (
        key,
        window.start,
        sorted(times),
    )  # An unordered map promises no order inside of one watermark.


def async_map() -> tuple[af.Flow, Any]:
    async def twice(x: int) -> int:
        await asyncio.sleep(x % 7 / 1000)
        return 2 * x

    flow = af.Flow("async")
    return flow, flow.source(range(60)).map(twice, concurrency=5, ordered=True)


def blocking_map() -> tuple[af.Flow, Any]:
    flow = af.Flow("blocking")
    return flow, flow.source(range(60)).map(
        lambda x: 2 * x, blocking=True, concurrency=5, ordered=True
    )


class Alarm(af.KeyedProcessFunction[str, tuple[str, int], tuple[str, int, int]]):
    """Emits a key's sum 25 ms of event time after its first element, and the rest at the end of
    processing time.
    """

    def open(self, ctx: Any) -> None:
        self.total = ctx.get_state(af.ValueStateDescriptor("total", default=0))

    def process_element(self, value: tuple[str, int], ctx: Any) -> None:
        if not self.total.value():
            ctx.timer_service.register_event_time_timer(ctx.timestamp + 25)
        self.total.update(self.total.value() + value[1] + 1)

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[tuple[str, int, int]]:
        yield ctx.current_key, timestamp, self.total.value()
        self.total.clear()


def timers() -> tuple[af.Flow, Any]:
    rng = random.Random(3)
    flow = af.Flow("timers", parallelism=2)
    strategy = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda e: e[1])
    source = flow.source(
        [(rng.choice("abcd"), i * 5) for i in range(80)], watermarks=strategy, parallelism=1
    )
    return flow, source.key_by(lambda e: e[0]).process(Alarm)


def run(program: Program, seed: int, **options: Any) -> SimulatedRun:
    flow, stream = program()
    return run_simulated(flow, seed=seed, collect=[stream], **options)


PROGRAMS: list[Program] = [
    word_count,
    windows,
    sessions_after_a_map_that_waits,
    async_map,
    blocking_map,
    timers,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_every_seed_gives_the_output_of_the_plain_run_on_its_own_way(program: Program) -> None:
    _, stream = program()
    plain = asyncio.run(stream.collect())
    assert plain
    ways = set()
    for seed in SEEDS:
        simulated = run(program, seed)
        (rows,) = simulated.outputs
        if program in (async_map, blocking_map):
            assert rows == plain, f"seed {seed}"
        else:
            assert sorted(rows) == sorted(plain), f"seed {seed}"
        assert simulated.errors == []
        assert simulated.job is not None
        assert simulated.job.status == "FINISHED"
        ways.add(simulated.trace_crc)
    assert len(ways) == len(SEEDS)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_seed_repeats_its_run(program: Program) -> None:
    first, second = run(program, 11), run(program, 11)
    assert (first.trace_crc, first.steps, first.virtual_s) == (
        second.trace_crc,
        second.steps,
        second.virtual_s,
    )
    assert first.outputs == second.outputs


def test_a_planted_bug_in_the_order_of_results_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ablation of `ordered=True`: results leave as they complete.

    Seeds find it, a run in which calls take equally long does not.
    """
    monkeypatch.setattr(async_io, "OrderedQueue", UnorderedQueue)
    expected = [2 * x for x in range(60)]
    assert run(blocking_map, 0, perturb=False).outputs == (expected,)
    found = [seed for seed in range(10) if run(blocking_map, seed).outputs != (expected,)]
    assert len(found) >= 5


def test_a_planted_race_of_user_code_is_found() -> None:
    """Read, wait, write, from several calls at once: some seeds lose an update."""

    def racy() -> tuple[af.Flow, Any]:
        total = {"n": 0}

        async def add(x: int) -> int:
            seen = total["n"]
            await asyncio.get_running_loop().run_in_executor(None, int)
            total["n"] = seen + 1
            return total["n"]

        flow = af.Flow("racy")
        return flow, flow.source(range(20)).map(add, concurrency=2, ordered=False)

    assert any(max(run(racy, seed).outputs[0]) < 20 for seed in range(10))


@pytest.mark.parametrize("seed", range(8))
def test_a_process_that_stands_still_for_a_while_loses_nothing(seed: int) -> None:
    _, stream = windows()
    expected = sorted(asyncio.run(stream.collect()))
    simulated = run(windows, seed, faults=Faults(pause=400.0, outage_s=(0.001, 0.05)))
    assert sorted(simulated.outputs[0]) == expected
    assert simulated.faults.keys() <= {"pause"}


def test_faults_strike_a_flow_that_lasts() -> None:
    async def slow(x: int) -> int:
        await asyncio.sleep(0.1)
        return x

    flow = af.Flow("slow")
    rows = flow.source(range(20)).map(slow, concurrency=1)
    simulated = run_simulated(
        flow, seed=3, collect=[rows], faults=Faults(pause=5.0, disk=5.0, outage_s=(0.01, 0.1))
    )
    assert simulated.outputs == (list(range(20)),)
    assert min(simulated.faults[kind] for kind in ("pause", "disk")) > 0


@pytest.mark.parametrize("kind", ["kill", "power", "cut", "reset", "slow"])
def test_faults_that_mean_nothing_in_one_process_are_refused(kind: str) -> None:
    flow, _ = word_count()
    with pytest.raises(ValueError, match=f"{kind}="):
        run_simulated(flow, faults=Faults(**{kind: 1.0}))


def test_all_sinks_of_the_flow_run_as_well() -> None:
    seen: Counter[int] = Counter()
    flow = af.Flow("sinks")
    numbers = flow.source(range(10))
    numbers.map(lambda x: x + 1).sink(lambda x: seen.update([x]))
    simulated = run_simulated(flow, collect=[numbers])
    assert simulated.outputs == (list(range(10)),)
    assert seen == Counter(range(1, 11))
    assert len(flow.graph.nodes) == 3  # Collecting left no trace in the flow.


def test_an_error_of_the_flow_comes_out_with_its_seed() -> None:
    flow = af.Flow("fails")
    flow.source([1, 0]).map(lambda x: 1 // x).sink(lambda x: None)
    with pytest.raises(ZeroDivisionError) as caught:
        run_simulated(flow, seed=42)
    assert any("seed 42" in note for note in caught.value.__notes__)


def test_a_flow_that_waits_for_ever_is_a_deadlock() -> None:
    async def never(x: int) -> int:
        await asyncio.get_running_loop().create_future()
        return x

    flow = af.Flow("stuck")
    stream = flow.source([1]).map(never)
    with pytest.raises((SimDeadlock, SimLivelock)):
        run_simulated(flow, collect=[stream], max_steps=20_000)


def test_code_that_reaches_for_the_real_machine_is_stopped() -> None:
    flow = af.Flow("fenced")
    flow.source(["/etc/hostname"]).map(open).sink(lambda x: None)
    with pytest.raises(SimFenceBroken):
        run_simulated(flow)


def test_the_clock_starts_where_it_is_told_and_days_pass_in_no_time() -> None:
    day_ms = 86_400_000
    seen: list[int] = []

    class Look(af.KeyedProcessFunction[int, int, int]):
        def process_element(self, value: int, ctx: Any) -> Iterator[int]:
            yield ctx.timer_service.current_processing_time

    async def sleep_a_day(x: int) -> int:
        await asyncio.sleep(86_400)
        return x

    flow = af.Flow("clock")
    times = flow.source([1, 2]).map(sleep_a_day, concurrency=1).key_by(lambda x: x).process(Look)
    times.sink(seen.append)
    simulated = run_simulated(flow, clock=1_000_000)
    assert [round((time - 1_000_000) / day_ms, 3) for time in seen] == [1, 2]
    assert simulated.virtual_s > 2 * 86_400


def test_a_running_job_can_be_driven() -> None:
    flow = af.Flow("driven")
    counts = flow.source(range(1_000_000)).key_by(lambda x: x % 3).count()

    async def drive(job: Any) -> int:
        while not (found := await job.state(counts).get(0)):
            await asyncio.sleep(0.001)
        await job.cancel()
        return found

    simulated = run_simulated(flow, drive=drive)
    assert simulated.value > 0
    assert simulated.job is None


async def test_it_can_be_called_while_a_loop_runs() -> None:
    flow, stream = word_count()
    simulated = run_simulated(flow, collect=[stream])
    await asyncio.sleep(0)
    assert len(simulated.outputs[0]) == 120


def test_a_stream_of_another_flow_is_refused() -> None:
    flow, _ = word_count()
    _, stream = windows()
    with pytest.raises(ValueError, match="'windows'"):
        run_simulated(flow, collect=[stream])
