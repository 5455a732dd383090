"""A streaming query as a source, each row once, wherever its query, a task of it or the flow ends.

No Java here: the test plays Spark.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.spark.streaming.source import Handover
from tests.spark.fake_streaming import FAULTS, ROWS, FakeSpark, Log

BATCHES = 8

WITHIN_S = 45.0


async def ids_through(spark: FakeSpark, tmp_path: Path, fails_at: list[int]) -> list[int]:
    """Returns the committed ids of a flow over a query that fails at these rows, once at each."""

    def fails(row: dict[str, Any]) -> int:
        if row["id"] in fails_at:
            fails_at.remove(row["id"])
            raise OSError("the flow fails")
        return int(row["id"])

    flow = af.Flow("numbers")
    numbers = flow.source(spark.source(), uid="numbers").throttle(1000)
    numbers.map(fails, uid="fails").sink(af.io.jsonl(tmp_path / "out"), uid="out")
    async with asyncio.timeout(WITHIN_S):
        await flow.execute(
            checkpoints=(tmp_path / "store").as_uri(),
            every="10ms",
            restart=af.fixed_delay(attempts=50, delay="1ms"),
        )
    files = sorted((tmp_path / "out").glob("part-*"))
    return sorted(int(line) for path in files for line in path.read_text().splitlines())


@pytest.mark.parametrize("number", [0, 3, BATCHES - 1])
@pytest.mark.parametrize("fault", FAULTS)
async def test_each_row_is_read_once_for_any_end_around_a_batch(
    fault: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(tmp_path / "spark", BATCHES, {number: fault})
    with FakeSpark(log, monkeypatch) as spark:
        assert await ids_through(spark, tmp_path, []) == list(range(BATCHES * ROWS))
    assert log.faults == {}
    assert log.given.count(number) == (2 if fault in ("after", "tasks") else 1)


@pytest.mark.parametrize("seed", range(10))
async def test_each_row_is_read_once_for_any_number_of_ends(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    faults = {number: chance.choice(FAULTS) for number in range(BATCHES) if chance.random() < 0.5}
    fails_at = chance.sample(range(BATCHES * ROWS), 2)
    log = Log(tmp_path / "spark", BATCHES, faults)
    with FakeSpark(log, monkeypatch) as spark:
        assert await ids_through(spark, tmp_path, fails_at) == list(range(BATCHES * ROWS))
    assert log.faults == {} and fails_at == []


async def test_no_rows_stay_without_their_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(tmp_path / "spark", BATCHES, {2: "tasks", 5: "after"})
    with FakeSpark(log, monkeypatch) as spark:
        await ids_through(spark, tmp_path, [40])
    kept = list((tmp_path / "spark" / "aioflow").iterdir())
    assert {path.suffix for path in kept} <= {".arrow", ".batch", ""}
    assert {path.stem for path in kept if path.suffix == ".arrow"} <= {
        path.stem for path in kept if path.suffix == ".batch"
    }


async def test_a_disk_that_is_full_fails_the_flow_and_holds_no_task_of_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Handover.append
    full = True

    async def appended(handover: Handover, number: int, batches: Any) -> None:
        nonlocal full
        if number == 2 and full:
            full = False
            raise OSError(28, "No space left on device")
        await append(handover, number, batches)

    monkeypatch.setattr(Handover, "append", appended)
    log = Log(tmp_path / "spark", BATCHES)
    with FakeSpark(log, monkeypatch) as spark:
        assert await ids_through(spark, tmp_path, []) == list(range(BATCHES * ROWS))
    assert not full and log.given.count(2) == 2
