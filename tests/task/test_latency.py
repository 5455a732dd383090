"""Latency markers: each operator has a histogram of their ages for each source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aioflow as af
from aioflow.core.elements import LatencyMarker
from aioflow.core.metrics import MetricGroup
from aioflow.monitoring.metrics import labels_of
from aioflow.task.metrics import LatencyEmitter, LatencyStats


async def ticks() -> AsyncIterator[int]:
    tick = 0
    while True:
        yield (tick := tick + 1)
        await asyncio.sleep(0.001)


def waiting_flow() -> af.Flow:
    flow = af.Flow("watched", parallelism=2)
    numbers = flow.source(ticks, name="numbers").key_by(lambda value: value % 7)
    numbers.map(lambda value: value + 1, name="plus").rebalance().filter(
        lambda value: True, name="all"
    ).sink(af.io.blackhole(), name="hole")
    return flow


async def counted(job: Any, names: list[str]) -> dict[str, Any]:
    """The metrics, once each of `names` has a latency."""
    async with asyncio.timeout(60):
        while True:
            metrics = job.metrics()
            counts = {
                name: sum(
                    value
                    for key, value in metrics.items()
                    if key.endswith(f".{name}.latency.numbers.count")
                )
                for name in names
            }
            if all(counts.values()):
                return metrics  # type: ignore[no-any-return]
            await asyncio.sleep(0.02)


async def test_each_operator_has_a_histogram_for_each_source() -> None:
    """C5.3."""
    async with waiting_flow().run(latency_tracking="20ms") as job:
        metrics = await counted(job, ["plus", "all", "hole"])
        await job.cancel()
    assert not any(".numbers.latency." in key for key in metrics)
    assert any(key.endswith("latencyMsP99") for key in metrics)
    assert all(
        value < 30_000 for key, value in metrics.items() if key.endswith("latency.numbers.p99")
    )


async def test_no_marker_is_sent_without_the_option() -> None:
    async with waiting_flow().run() as job:
        await asyncio.sleep(0.1)
        metrics = job.metrics()
        await job.cancel()
    assert not any("latency.numbers" in key for key in metrics)


@pytest.mark.parametrize("wrong", ["0s", "-1s"])
async def test_an_interval_that_is_no_time_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="expected the time between two markers"):
        async with waiting_flow().run(latency_tracking=wrong):
            pass


def test_a_marker_that_could_not_be_sent_keeps_its_age_and_is_not_doubled() -> None:
    timers: list[Any] = []
    now, due = [1_000], []
    emitter = LatencyEmitter(
        "s",
        3,
        100,
        lambda: now[0],
        lambda at, callback: timers.append((at, callback)),
        lambda: due.append(now[0]),
    )
    assert [at for at, _ in timers] == [1_100]
    for now[0] in (1_100, 1_200):
        at, callback = timers.pop()
        callback(at)
    assert (emitter.take(), emitter.due, due) == (LatencyMarker(1_100, "s", 3), None, [1_100])
    assert [at for at, _ in timers] == [1_300]


def test_ages_are_never_negative_although_clocks_differ() -> None:
    task, operator = MetricGroup(lambda: 0.0), MetricGroup(lambda: 0.0)
    stats = LatencyStats(task, [operator], lambda: 100)
    for emitted_ms in (40, 130):
        stats.note(LatencyMarker(emitted_ms, "s", 0))
    values = operator.snapshot()
    assert (values["latency.s.min"], values["latency.s.max"]) == (0, 60)
    assert task.snapshot() == {"latencyMsP99": 60}


def test_the_source_is_a_label_for_prometheus() -> None:
    assert labels_of("latency.a.b: c.p99") == ({"source": "a.b: c"}, "latency.p99")
    assert labels_of("split.0.watermark.x") == ({"split": "0"}, "split.watermark.x")
    assert labels_of("numRecordsIn") == ({}, "numRecordsIn")
