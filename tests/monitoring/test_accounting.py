"""The time of a task: every second is busy, idle or held back, to the millisecond, by the clock of
the task.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

import aioflow as af
from aioflow.core.metrics import MetricGroup
from aioflow.mailbox.mailbox import TaskMailbox
from aioflow.mailbox.metrics import MailboxMetrics
from aioflow.monitoring.monitor import Monitor
from aioflow.monitoring.options import MonitorOptions
from aioflow.monitoring.view import monitored
from aioflow.task.metrics import HARD, IDLE, SOFT, TaskMetrics

SHARES = ("busyTimeMsPerSecond", "idleTimeMsPerSecond", "backPressuredTimeMsPerSecond")


class Stub:
    """An input and an output in which nothing happens."""

    records_in = records_out = batches_out = bytes_out = queued_batches = queued_bytes = 0
    current_watermark = watermark = 0
    pool_usage = 0.0

    def record_counts(self) -> dict[int, tuple[int, int]]:
        return {}


class Task:
    """The metrics of one task over a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.group = MetricGroup(lambda: self.now_s)
        self.mailbox = MailboxMetrics(TaskMailbox(), lambda: self.now_s)
        stub: Any = Stub()
        self.metrics = TaskMetrics(
            self.group, [], lambda: self.now_s, self.mailbox, stub, stub, stub, lambda: None
        )
        self.read()  # Windows begin with the first reading.

    def spend(self, seconds: float, reason: str | None) -> None:
        """Run for so long, or wait for `reason`."""
        if reason is not None:
            self.mailbox.park(reason)
        self.now_s += seconds
        if reason is not None:
            self.mailbox.unpark()

    def read(self) -> dict[str, float]:
        found = self.group.snapshot()
        return {
            name: found[name]
            for name in (
                *SHARES,
                "softBackPressuredTimeMsPerSecond",
                "hardBackPressuredTimeMsPerSecond",
            )
        }


async def test_each_second_is_shown_to_the_millisecond() -> None:
    task = Task()
    for seconds, reason in ((0.4, None), (0.3, IDLE), (0.2, SOFT), (0.1, HARD)):
        task.spend(seconds, reason)
    assert task.read() == pytest.approx(
        {
            "busyTimeMsPerSecond": 400,
            "idleTimeMsPerSecond": 300,
            "backPressuredTimeMsPerSecond": 300,
            "softBackPressuredTimeMsPerSecond": 200,
            "hardBackPressuredTimeMsPerSecond": 100,
        }
    )


@pytest.mark.parametrize("seed", range(20))
async def test_busy_idle_and_held_back_make_a_second_however_it_is_divided(seed: int) -> None:
    """1000 +- 50 ms: here exact, at any time of reading, also in the middle of a wait, and for any
    number of reads.
    """
    rng, task = random.Random(seed), Task()
    spent = dict.fromkeys((None, IDLE, SOFT, HARD), 0.0)
    while task.now_s < 130:
        seconds, reason = (
            rng.choice((0.0001, 0.003, 0.04, 0.7, 2.5)) * rng.random(),
            rng.choice((None, IDLE, SOFT, HARD)),
        )
        if reason is None or rng.random() < 0.7:
            task.spend(seconds, reason)
        else:
            task.mailbox.park(reason)
            task.now_s += seconds
            assert sum(task.read()[name] for name in SHARES) == pytest.approx(1000, abs=0.001)
            task.mailbox.unpark()
        spent[reason] += seconds
        if rng.random() < 0.3 and task.now_s > 101:
            assert sum(task.read()[name] for name in SHARES) == pytest.approx(1000, abs=0.001)
    total = task.group.snapshot()
    assert total["accumulateIdleTimeMs"] == pytest.approx(spent[IDLE] * 1000)
    assert total["accumulateBackPressuredTimeMs"] == pytest.approx(
        (spent[SOFT] + spent[HARD]) * 1000
    )
    assert total["accumulateBusyTimeMs"] == pytest.approx(spent[None] * 1000)


async def test_the_time_of_running_subtasks_adds_up() -> None:
    """Over a pipeline that is held back by its last operator, each subtask's accumulated times
    grow by what the clock says.
    """
    flow = af.Flow("load", parallelism=2)
    gate = asyncio.Event()

    async def slow(value: int) -> int:
        await asyncio.sleep(0.001)
        return value

    def numbers() -> Any:
        number = 0
        while not gate.is_set():
            yield number
            number += 1

    flow.source(numbers, name="numbers").rebalance().map(lambda x: x, name="plain").rebalance().map(
        slow, name="slow"
    ).sink(af.io.blackhole())
    async with flow.run(stop_timeout="0s") as job:
        monitor = Monitor(monitored(job), MonitorOptions())
        (view,) = monitor.jobs()
        clock = monitor.host.clock.monotonic

        def totals() -> tuple[float, dict[Any, float], float]:
            before = clock()
            found = view.read_metrics()
            names = (
                "accumulateBusyTimeMs",
                "accumulateIdleTimeMs",
                "accumulateBackPressuredTimeMs",
            )
            tasks = [key.removesuffix(names[0]) for key in found if key.endswith(names[0])]
            return (
                before,
                {task: sum(found[task + name] for name in names) for task in tasks},
                clock(),
            )

        first = totals()
        while clock() - first[2] < 2.0:
            await asyncio.sleep(0.05)
        last = totals()
        assert len(last[1]) == 5
        for task, milliseconds in last[1].items():
            grown = milliseconds - first[1][task]
            # Between the shortest and the longest that may lie between the two readings.
            assert (last[0] - first[2]) * 950 <= grown <= (last[2] - first[0]) * 1050, task
        gate.set()
