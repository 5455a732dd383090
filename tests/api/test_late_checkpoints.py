"""The warning about a late checkpoint: in which phase it is, which task it waits for, and what that
task does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.testing import run_simulated
from tests.api.test_checkpoints import store as store

pytestmark = pytest.mark.timeout(120)

HANGS_S = 20
"""Longer than a checkpoint may take before the warning."""


async def numbers(position: int | None) -> AsyncIterator[tuple[int, int]]:
    for n in range(position or 0, 1_000_000):
        await asyncio.sleep(0.01)
        yield n, n + 1


async def hangs_once(n: int, ctx: Any) -> list[int]:
    if n == 5:
        await asyncio.sleep(HANGS_S)
    return [n]


class HangsInItsSnapshot(af.MapFunction[int, int]):
    hung = False

    def map(self, value: int) -> int:
        return value

    def initialize_state(self, ctx: Any) -> None:
        pass

    async def snapshot_state(self, ctx: Any) -> None:
        if not HangsInItsSnapshot.hung:
            HangsInItsSnapshot.hung = True
            await asyncio.sleep(HANGS_S)


def of_an_alignment() -> af.Flow:
    """The call holds the second of two tasks, whose other input is through with the checkpoint."""
    flow = af.Flow("late")
    slow = flow.source(numbers, name="slow").process(hangs_once, name="hangs").rebalance()
    other = flow.source(numbers, name="other").rebalance()
    other.union(slow).map(lambda n: n, name="both").rebalance().sink(lambda n: None)
    return flow


def of_a_snapshot() -> af.Flow:
    flow = af.Flow("late")
    flow.source(numbers, name="source").map(HangsInItsSnapshot(), name="own").sink(lambda n: None)
    return flow


def of_back_pressure() -> af.Flow:
    """Very large elements: the call behind holds the task in front, which has no room left."""
    flow = af.Flow("late")
    large = flow.source(numbers, name="source").map(lambda n: bytes(1 << 20), name="large")
    large.rebalance().process(hangs_at_first, name="hangs").sink(lambda n: None)
    return flow


async def hangs_at_first(n: bytes, ctx: Any) -> list[int]:
    await asyncio.sleep(HANGS_S)
    return [len(n)]


def late_messages(
    flow: af.Flow, store: str, caplog: pytest.LogCaptureFixture, **options: Any
) -> list[str]:
    async def drive(job: Any) -> None:
        await asyncio.sleep(30)
        await job.cancel()

    with caplog.at_level(logging.WARNING, "aioflow.cluster.job_checkpoints"):
        run_simulated(
            flow, drive=drive, checkpoints=store, every="500ms", max_steps=10_000_000, **options
        )
    return [one for one in caplog.messages if "is not complete after" in one]


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (
            of_an_alignment,
            "waits for hangs (1/1), attempt 0 and 2 more: its phase is alignment, 1 of 1 barriers "
            "have not come (input 'slow'); the task is busy in operator 'hangs', subtask 1/1;",
        ),
        (
            of_a_snapshot,
            "its phase is snapshot, its operators look at their state; the task is busy in "
            "operator 'own', subtask 1/1;",
        ),
        (of_back_pressure, "the task waits for room in its output (back pressure);"),
    ],
)
def test_warning_names_the_phase_and_what_the_task_does(
    build: Callable[[], af.Flow], told: str, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    HangsInItsSnapshot.hung = False
    first, *_ = late_messages(build(), store, caplog)
    assert told in first


@pytest.mark.slow
async def test_task_in_another_process_says_what_it_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def hangs(n: int, ctx: Any, directory: Path = tmp_path) -> list[int]:
        while n == 5 and not (directory / "over").exists():
            await asyncio.sleep(0.05)
        return [n]

    flow = af.Flow("late")
    flow.source(numbers, name="source").process(hangs, name="hangs").sink(lambda n: None)
    async with flow.run(workers=1, checkpoints=tmp_path / "store", every="100ms") as job:
        async with asyncio.timeout(100):
            while "is not complete after" not in caplog.text:
                await asyncio.sleep(0.05)
        (tmp_path / "over").touch()
        await job.stop()
    assert "the task is busy in operator 'hangs', subtask 1/1;" in caplog.text
