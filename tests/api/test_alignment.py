"""`WatermarkStrategy.with_alignment`: a source that is ahead waits for the slowest of its group."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from tests.integration.processes import eventually

DRIFT = 10_000
AT = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda row: row[1])


class Pair:
    """Two pushed streams of one group, into one list."""

    def __init__(self, **idle: str) -> None:
        strategy: Any = AT.with_idleness(**idle) if idle else AT
        aligned = strategy.with_alignment("pair", "10s", every="5ms")
        self.flow = af.Flow("pair")
        self.fast = self.flow.source(af.io.push(), name="fast", uid="fast", watermarks=aligned)
        self.slow = self.flow.source(af.io.push(), name="slow", uid="slow", watermarks=aligned)
        self.rows: list[tuple[str, int]] = []
        self.fast.union(self.slow).sink(self.rows.append)

    async def put(self, job: af.Job, stream: Any, *times: int) -> None:
        for at in times:
            await job.input(stream).put(("fast" if stream is self.fast else "slow", at))

    def got(self, name: str) -> list[int]:
        return [at for one, at in self.rows if one == name]


async def test_a_source_that_is_ahead_waits_and_holds_up_no_checkpoint(tmp_path: Path) -> None:
    """G4.5"""
    pair = Pair()
    async with pair.flow.run(checkpoints=tmp_path, every="1h") as job:
        await pair.put(job, pair.slow, 0)
        await pair.put(job, pair.fast, 0)
        await eventually(lambda: len(pair.rows) == 2)
        await pair.put(job, pair.fast, DRIFT + 100)  # One more than the drift is read.
        await eventually(lambda: len(pair.rows) == 3)
        limits: Any = job._cluster.job_master._limits  # type: ignore[attr-defined]
        await eventually(lambda: {mark for _, mark in limits._sent.values()} == {DRIFT - 1})
        await pair.put(job, pair.fast, DRIFT + 200, DRIFT + 300)
        async with asyncio.timeout(20):
            await job.checkpoint()
        await asyncio.sleep(0.05)
        assert pair.got("fast") == [0, DRIFT + 100]
        await pair.put(job, pair.slow, 5_000)
        await eventually(lambda: len(pair.got("fast")) == 4)


async def test_a_source_that_is_idle_or_has_ended_holds_no_other_back() -> None:
    pair = Pair(idle_after="50ms")
    async with pair.flow.run() as job:
        await pair.put(job, pair.slow, 0)
        await pair.put(job, pair.fast, 0)
        await eventually(lambda: len(pair.rows) == 2)
        for n in range(1, 4):
            await pair.put(job, pair.fast, n * 2 * DRIFT)
        await eventually(lambda: len(pair.got("fast")) == 4)
        await pair.put(job, pair.slow, 3 * DRIFT)
        await eventually(lambda: len(pair.got("slow")) == 2)
        job.input(pair.slow).close()
        for n in range(4, 8):
            await pair.put(job, pair.fast, n * 2 * DRIFT)
        await eventually(lambda: len(pair.got("fast")) == 8)


async def test_bounded_sources_of_one_group_end_and_lose_nothing() -> None:
    flow = af.Flow("bounded", parallelism=2)
    aligned: Any = AT.with_alignment("all", "1s", every="1ms")
    one = flow.source([("a", n * 1_000) for n in range(500)], watermarks=aligned)
    two = flow.source([("b", n * 10) for n in range(500)], watermarks=aligned)
    rows = await one.union(two).key_by(lambda row: row[0]).count().collect()
    assert max(rows) == ("b", 500)
    assert ("a", 500) in rows


async def test_an_aligned_source_may_wait_for_an_input_of_its_group_that_is_read_first() -> None:
    flow = af.Flow("both")
    aligned: Any = AT.with_alignment("all", "1s", every="1ms")
    rules = flow.source([("rule", n * 1_000) for n in range(100)], watermarks=aligned)
    events = flow.source([("event", n * 1_000) for n in range(100)], watermarks=aligned)
    both = events.connect(rules, read_first="right").map(lambda row: row[0], lambda row: row[0])
    assert await both.collect() == ["rule"] * 100 + ["event"] * 100


def test_wrong_alignments_are_refused() -> None:
    for group, drift, every in (("", "1s", "1s"), ("g", "-1s", "1s"), ("g", "1s", "0s")):
        with pytest.raises(ValueError, match=r"group is|max_drift is"):
            AT.with_alignment(group, drift, every=every)
    with pytest.raises(ValueError, match="has no event time that could be aligned"):
        af.WatermarkStrategy.no_watermarks().with_alignment("g", "1s")
    flow: Any = af.Flow("mid")
    with pytest.raises(af.GraphError, match="only sources can be aligned"):
        flow.source([1]).assign_timestamps_and_watermarks(AT.with_alignment("g", "1s"))
