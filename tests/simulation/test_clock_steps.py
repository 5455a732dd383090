"""Flows of processing time while the wall clock is set: nothing is lost, and nothing waits for a
time that is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import aioflow as af
from aioflow.testing import run_simulated

YEARS = 10 * 365 * 86_400_000
COUNT = 40
BLIP = [(1.1, YEARS), (1.6, -YEARS)]
BACK = [(1.1, -5_000)]
SLEPT = [(0.5, 8 * 3_600_000)]


async def ticks() -> AsyncIterator[int]:
    """Ten a second."""
    for n in range(COUNT):
        await asyncio.sleep(0.1)
        yield n
    await asyncio.sleep(15)


class Counts(af.KeyedProcessFunction[int, int, Any]):
    """Arms a timer half a second after each element, and keeps a state that lives for two
    seconds.
    """

    def open(self, ctx: Any) -> None:
        self.seen = ctx.get_state(af.ValueStateDescriptor("seen", default=0, ttl="2s"))

    def process_element(self, value: int, ctx: Any) -> Iterator[Any]:
        self.seen.update(self.seen.value() + 1)
        ctx.timer_service.register_processing_time_timer(
            ctx.timer_service.current_processing_time + 500
        )
        yield "seen", self.seen.value()

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[Any]:
        yield "timer", timestamp


@pytest.mark.parametrize(
    "steps",
    [[], BLIP, BACK, [*BACK, *[(t + 1, by) for t, by in BLIP]]],
    ids=["none", "blip", "back", "both"],
)
def test_windows_timers_and_lives_by_the_clock_are_as_without_steps(
    steps: list[tuple[float, int]],
) -> None:
    results = {}
    for taken in ([], steps):
        flow = af.Flow("clock")
        keyed = flow.source(ticks).key_by(lambda n: 0)
        sessions = keyed.window(af.session("3s", time="processing")).aggregate(af.count())
        slices = keyed.window(af.tumbling("1s", time="processing")).aggregate(af.count())
        listed = keyed.window(af.sliding("2s", "1s", time="processing")).process(
            lambda key, ctx, rows: [len(list(rows))]
        )
        told = keyed.process(Counts())
        streams = [sessions, slices, listed, told]
        run = run_simulated(
            flow, clock=1_700_000_000_000, clock_steps=taken, collect=streams, perturb=False
        )
        results[bool(taken)] = [sorted(map(str, rows)) for rows in run.outputs]
    assert results[bool(steps)] == results[False]
    assert sum(int(row.split("value=")[1][:-1]) for row in results[False][1]) == COUNT


def test_after_the_machine_has_slept_what_was_due_meanwhile_fires() -> None:
    flow = af.Flow("slept")

    class Arms(af.KeyedProcessFunction[int, int, Any]):
        def process_element(self, value: int, ctx: Any) -> None:
            if value == 0:
                ctx.timer_service.register_processing_time_timer(
                    ctx.timer_service.current_processing_time + 3_600_000
                )

        def on_timer(self, timestamp: int, ctx: Any) -> Iterator[Any]:
            yield timestamp

    async def waits() -> AsyncIterator[int]:
        yield 0
        await asyncio.sleep(900)

    fired = flow.source(waits).key_by(lambda n: n).process(Arms())
    run = run_simulated(flow, clock=0, clock_steps=SLEPT, collect=[fired], perturb=False)
    assert len(run.outputs[0]) == 1


def test_a_timer_that_looked_far_off_fires_soon_after_the_clock_is_set_right() -> None:
    """This happens after a restore on a machine whose clock is wrong until its time server
    answers.

    The task is idle.
    """
    now = 1_700_000_000_000

    class Arms(af.KeyedProcessFunction[int, int, Any]):
        def process_element(self, value: int, ctx: Any) -> None:
            ctx.timer_service.register_processing_time_timer(now + 5_000)

        def on_timer(self, timestamp: int, ctx: Any) -> Iterator[Any]:
            yield timestamp, asyncio.get_running_loop().time() - began_s[0]

    began_s: list[float] = []

    async def waits() -> AsyncIterator[int]:
        began_s.append(asyncio.get_running_loop().time())
        yield 0
        await asyncio.sleep(900)

    flow = af.Flow("wrong")
    fired = flow.source(waits).key_by(lambda n: n).process(Arms())
    run = run_simulated(
        flow, clock=now - YEARS, clock_steps=[(1.0, YEARS)], collect=[fired], perturb=False
    )
    ((due, after_s),) = run.outputs[0]
    assert due == now + 5_000
    assert after_s < 130, "the first look sees the step, the second one that it has lasted"
