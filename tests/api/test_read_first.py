"""`connect(other, read_first=...)`: one side is read before the sources of the other begin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from tests.integration.processes import eventually

RULES = af.MapStateDescriptor[str, int]("rules")
COUNT = 40


class Rate(af.BroadcastProcessFunction[int, tuple[str, int], tuple[int, int]]):
    """Emits each event with the number of rules that it saw."""

    def process_element(self, value: int, ctx: Any) -> Any:
        yield value, len(list(ctx.get_broadcast_state(RULES).items()))

    def process_broadcast_element(self, rule: tuple[str, int], ctx: Any) -> Any:
        ctx.get_broadcast_state(RULES).put(*rule)


class Gate:
    """A source of rules that waits in their midst until the test opens it."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.is_half = asyncio.Event()
        self.began_at: list[int | None] = []

    async def rules(self, position: int | None = None) -> AsyncIterator[tuple[Any, int]]:
        self.began_at.append(position)
        for n in range(position or 0, COUNT):
            if n == COUNT // 2:
                self.is_half.set()
                await self.open.wait()
            yield (str(n), n), n + 1


def gated_flow(gate: Gate, parallelism: int = 1) -> tuple[af.Flow, Any, list[Any]]:
    flow = af.Flow("first", parallelism=parallelism)
    rules = flow.source(gate.rules, uid="rules").broadcast(RULES)
    events = flow.source(list(range(COUNT)), uid="events")
    rated = events.connect(rules, read_first="right").process(Rate, uid="rate")
    rows: list[Any] = []
    rated.sink(rows.append)
    return flow, rated, rows


@pytest.mark.parametrize("parallelism", [1, 3])
async def test_every_event_sees_every_rule(parallelism: int) -> None:
    """C3.3"""
    gate = Gate()
    flow, _, rows = gated_flow(gate, parallelism)
    async with flow.run() as job:
        await gate.is_half.wait()
        await asyncio.sleep(0.05)  # Time in which the events would come.
        assert rows == []
        gate.open.set()
        await job.wait()
    assert sorted(rows) == [(n, COUNT) for n in range(COUNT)]


async def test_without_it_events_come_before_the_last_rule() -> None:
    gate = Gate()
    flow = af.Flow("any")
    rules = flow.source(gate.rules).broadcast(RULES)
    rows: list[Any] = []
    flow.source(list(range(COUNT))).connect(rules).process(Rate).sink(rows.append)
    async with flow.run() as job:
        await eventually(lambda: len(rows) == COUNT)
        gate.open.set()
        await job.wait()


@pytest.mark.parametrize("side", ["left", "right"])
async def test_either_side_of_keyed_streams_can_be_first(side: Any) -> None:
    flow = af.Flow("keyed", parallelism=2)
    left, right = flow.source([1, 2, 3] * 20), flow.source(["1", "2", "3"] * 20)
    both = left.connect(right, read_first=side).key_by(lambda n: n, int)
    rows = await both.map(lambda n: ("left", n), lambda text: ("right", int(text))).collect()
    for key in (1, 2, 3):
        sides = [name for name, n in rows if n == key]
        assert sides == sorted(sides, reverse=side == "right")
        assert len(sides) == 40


@pytest.mark.parametrize("unaligned", [False, True])
async def test_checkpoints_complete_meanwhile_and_a_restart_waits_again(
    unaligned: bool, tmp_path: Path
) -> None:
    """C3.3: barriers of the side that waits are not held up."""
    gate = Gate()
    failures = iter([True])
    flow = af.Flow("first", parallelism=2)
    rules = flow.source(gate.rules, uid="rules").broadcast(RULES)

    def fragile(n: int) -> int:
        if n == COUNT // 2 and next(failures, False):
            raise OSError("away")
        return n

    events = flow.source(list(range(COUNT)), uid="events").map(fragile, uid="fragile")
    rated = events.connect(rules, read_first="right").process(Rate, uid="rate")
    seen: dict[int, int] = {}
    rated.sink(lambda row: seen.update([row]))
    options: Any = {"checkpoints": tmp_path, "every": "1h", "unaligned": unaligned}
    async with flow.run(restart=af.fixed_delay(1, "1ms"), **options) as job:
        await gate.is_half.wait()
        async with asyncio.timeout(20):
            for _ in range(2):
                await job.checkpoint()
        assert seen == {}
        gate.open.set()
        result = await job.wait()
    assert (result.restarts, gate.began_at) == (1, [None, COUNT // 2])
    assert seen == dict.fromkeys(range(COUNT), COUNT)


async def test_a_job_that_is_stopped_meanwhile_goes_on_where_it_was(tmp_path: Path) -> None:
    gate = Gate()
    flow, _, rows = gated_flow(gate)
    async with flow.run(checkpoints=tmp_path) as job:
        await gate.is_half.wait()
        await job.stop()
    assert rows == []
    gate.open.set()
    async with flow.run(checkpoints=tmp_path) as job:
        await job.wait()
    assert gate.began_at == [None, COUNT // 2]
    assert sorted(rows) == [(n, COUNT) for n in range(COUNT)]


async def test_an_endless_stream_is_read_up_to_now_that_is_until_it_is_idle() -> None:
    flow = af.Flow("endless", parallelism=2)
    strategy: Any = af.WatermarkStrategy.monotonous_timestamps(
        timestamp=lambda rule: rule[1], idle_after="50ms"
    )
    rules = flow.source(af.io.push(), watermarks=strategy)
    events = flow.source(af.io.push())
    rated = events.connect(rules.broadcast(RULES), read_first="right").process(Rate)
    rows: list[Any] = []
    rated.sink(rows.append)
    async with flow.run() as job:
        for n in range(3):
            await job.input(events).put(n)
            await job.input(rules).put((str(n), n))
        await eventually(lambda: len(rows) == 3)
        assert sorted(rows) == [(0, 3), (1, 3), (2, 3)]
        await job.input(rules).put(("later", 4))
        await asyncio.sleep(0.05)
        await job.input(events).put(3)  # Both go on side by side.
        await eventually(lambda: len(rows) == 4)


async def test_what_does_not_need_the_operator_does_not_wait() -> None:
    gate = Gate()
    flow = af.Flow("part")
    events = flow.source([1, 2, 3])
    rules = flow.source(gate.rules).broadcast(RULES)
    events.connect(rules, read_first="right").process(Rate).sink(print)
    assert await events.map(lambda n: n * 2).collect() == [2, 4, 6]


def test_explain_says_which_input_is_read_first() -> None:
    _, rated, _ = gated_flow(Gate())
    assert "reads its right input first" in rated.explain()


def test_a_side_that_waits_for_itself_is_refused() -> None:
    flow = af.Flow("circle")
    one, two, three = (flow.source([n], name=f"source {n}") for n in (1, 2, 3))
    with pytest.raises(af.GraphError, match="source 'source 1' would wait until it is read itself"):
        one.connect(two.union(one.map(str)), read_first="right")
    first = one.connect(two, read_first="right").map(str, str)
    with pytest.raises(af.GraphError, match="source 'source 2' would wait"):
        two.connect(one, read_first="right")
    three.connect(first, read_first="right").map(str, str)
    with pytest.raises(af.GraphError, match="source 'source 2' would wait"):
        two.connect(three, read_first="right")


def test_a_side_of_which_it_is_never_known_that_it_is_read_is_refused() -> None:
    flow = af.Flow("endless")
    endless: Any = flow.source(af.io.push(), name="pushed")
    with pytest.raises(af.GraphError, match=r"source 'pushed' does not end.*idle_after="):
        flow.source([1]).connect(endless, read_first="right")
    idle: Any = af.WatermarkStrategy.monotonous_timestamps(timestamp=int, idle_after="1s")
    timed = endless.assign_timestamps_and_watermarks(idle)
    flow.source([1]).connect(timed.map(str), read_first="right").map(str, str)
    never: Any = af.WatermarkStrategy.monotonous_timestamps(timestamp=int)
    silent = flow.source(af.io.push(), watermarks=idle).assign_timestamps_and_watermarks(never)
    with pytest.raises(af.GraphError, match="does not end"):
        flow.source([1]).connect(silent, read_first="right")
    with pytest.raises(ValueError, match="read_first is 'first', expected 'left', 'right' or None"):
        side: Any = "first"
        flow.source([1]).connect(flow.source([2]), read_first=side)
