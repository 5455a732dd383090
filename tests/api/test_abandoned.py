"""Orders of events in which a job goes back, stops or ends half-way: what a record's answer was
stays what it was, each once.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.task.ending import TaskPhase
from tests.api.test_checkpoints import Numbers, eventually

pytestmark = pytest.mark.timeout(60)


async def test_a_savepoint_of_a_past_that_was_given_up_is_not_the_latest(tmp_path: Path) -> None:
    """The restart went back behind it, and its sinks dropped what they had prepared for it."""
    numbers, out, store = Numbers(10), tmp_path / "out", tmp_path / "store"
    failures: list[bool] = []
    counted: list[int] = []

    def seen(n: int) -> int:
        counted.append(n)
        return n

    def fragile(n: int) -> int:
        if n == 25 and not failures:
            failures.append(True)
            raise OSError("away")
        return n

    def flow() -> af.Flow:
        made = af.Flow("forked")
        made.source(numbers.read, uid="numbers").map(fragile).map(seen).sink(
            af.io.jsonl(str(out)), uid="out"
        )
        return made

    def visible() -> list[int]:
        return sorted(int(line) for part in out.glob("part-*") for line in part.read_text().split())

    async with flow().run(checkpoints=store, every="1h", restart=af.fixed_delay(3, "1ms")) as job:
        await eventually(lambda: len(counted) == 10)
        await job.checkpoint()
        numbers.limit = 20
        await eventually(lambda: len(counted) == 20)
        await job.savepoint()
        numbers.limit = 30
        await eventually(lambda: counted[-1] == 29)
        await job.cancel()
    counted.clear()
    async with flow().run(checkpoints=store):
        await eventually(lambda: counted[-1:] == [29])
    assert visible() == list(range(30))
    assert numbers.began_at == [None, 10, 10]


async def test_checkpoint_requested_while_a_job_drains_does_not_replace_its_savepoint(
    tmp_path: Path,
) -> None:
    """Every task takes that one behind its last record, and yet must not end with it: the
    savepoint would never be made.
    """
    rows: list[Any] = []
    numbers, opened, held = Numbers(10), asyncio.Event(), []
    opened.set()

    async def gate(pair: tuple[int, int]) -> tuple[int, int]:
        held.append(pair)
        await opened.wait()
        return pair

    def flow() -> af.Flow:
        made = af.Flow("draining")
        made.source(numbers.read, uid="numbers").key_by(lambda n: 0).count(uid="count").map(
            gate, concurrency=100
        ).sink(rows.append)
        return made

    async with flow().run(checkpoints=tmp_path, every="1h") as job:
        await eventually(lambda: len(rows) == 10)
        opened.clear()
        numbers.limit = 20
        await eventually(lambda: len(held) == 20)
        stopping = asyncio.create_task(job.stop(drain=True))
        source = job._cluster.task_executor.tasks[0]  # type: ignore[union-attr]
        await eventually(lambda: source.life.phase is TaskPhase.LINGERING)
        asked = asyncio.create_task(job.checkpoint())
        await asyncio.sleep(0)
        opened.set()
        path = await stopping
        await asked
    assert path is not None
    numbers.limit = 30
    async with flow().run(checkpoints=tmp_path):
        await eventually(lambda: len(rows) == 30)
    assert [count for _, count in rows] == list(range(1, 31))
    assert numbers.began_at == [None, 20]
