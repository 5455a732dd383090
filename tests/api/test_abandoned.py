"""Orders of events in which a job goes back, stops or ends half-way: what a record's answer was stays what it was, each once."""

from __future__ import annotations

from pathlib import Path

import pytest

import aioflow as af
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
        made.source(numbers.read, uid="numbers").map(fragile).map(seen).sink(af.io.jsonl(str(out)), uid="out")
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
    async with flow().run(checkpoints=store):
        await eventually(lambda: counted[-1] == 29)
    assert visible() == list(range(30))
    assert numbers.began_at == [None, 10, 10]
