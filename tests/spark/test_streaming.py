"""A streaming query as a source: every row is read once, after restarts and repetitions."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.spark.bridge.connector import spark as frames
from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.failures import SparkError

ROWS = 500
FIRST_FILE_S = 1_700_000_000
"""Modification time of the first file.

Spark reads files by their times, those of one time in no order.
"""


def files(directory: Path, first: int, count: int) -> None:
    """Writes files of `ROWS` rows.

    Each becomes a batch of its own, in the order of their modification times.
    """
    directory.mkdir(exist_ok=True)
    for number in range(first, first + count):
        aside = directory / f".{number}"
        aside.write_text(
            "".join(json.dumps({"id": i}) + "\n" for i in range(number * ROWS, (number + 1) * ROWS))
        )
        os.utime(aside, (FIRST_FILE_S + number, FIRST_FILE_S + number))
        aside.rename(directory / f"{number:05}.json")


def query(directory: Path) -> Any:
    return lambda session: (
        session.readStream.schema("id bigint").option("maxFilesPerTrigger", 1).json(str(directory))
    )


def flow_of(
    spark: SparkBridge, tmp_path: Path, kept: list[int], fails_at: int | None = None, **options: Any
) -> af.Flow:
    failed = False

    def keep(row: dict[str, Any]) -> None:
        nonlocal failed
        if row["id"] == fails_at and not failed:
            failed = True
            raise OSError("once")
        kept.append(row["id"])

    flow = af.Flow("numbers")
    source = frames(spark, query(tmp_path / "in"), checkpoint=tmp_path / "spark", **options)
    flow.source(source, uid="numbers").sink(keep, uid="kept")
    return flow


async def test_existing_data_is_read_once_new_data_by_the_next_run_and_repeats_by_none(
    spark: SparkBridge, tmp_path: Path
) -> None:
    files(tmp_path / "in", 0, 3)
    kept: list[int] = []
    await flow_of(spark, tmp_path, kept, trigger="once").execute()
    assert kept == list(range(3 * ROWS))

    # As after a crash between our answer and Spark's note of it.
    commits = tmp_path / "spark" / "spark" / "commits"
    for path in [commits / "2", commits / ".2.crc"]:
        path.unlink()
    files(tmp_path / "in", 3, 2)
    kept.clear()
    await flow_of(spark, tmp_path, kept, trigger="once").execute()
    assert kept == list(range(3 * ROWS, 5 * ROWS))


async def test_a_query_runs_until_the_flow_is_stopped_which_goes_on_where_it_was(
    spark: SparkBridge, tmp_path: Path
) -> None:
    files(tmp_path / "in", 0, 2)
    kept: list[int] = []
    options: dict[str, Any] = {"checkpoints": (tmp_path / "store").as_uri(), "every": "200ms"}
    async with flow_of(spark, tmp_path, kept, trigger="100ms").run(**options) as job:
        async with asyncio.timeout(120):
            while len(kept) < 2 * ROWS:
                await asyncio.sleep(0.05)
            files(tmp_path / "in", 2, 1)
            while len(kept) < 2 * ROWS + 100:
                await asyncio.sleep(0.05)
        await job.stop()
    first = list(kept)
    files(tmp_path / "in", 3, 1)
    async with flow_of(spark, tmp_path, kept, trigger="100ms").run(**options):
        async with asyncio.timeout(120):
            while len(kept) < 4 * ROWS:
                await asyncio.sleep(0.05)

    assert first == list(range(len(first)))
    assert kept == list(range(4 * ROWS))


class Doubles(af.MapFunction[dict[str, Any], int]):
    failed = False

    def map(self, row: dict[str, Any]) -> int:
        if row["id"] == 3 * ROWS + 7 and not Doubles.failed:
            Doubles.failed = True
            raise OSError("once")
        return int(row["id"])


async def test_a_flow_that_fails_takes_each_row_once(spark: SparkBridge, tmp_path: Path) -> None:
    Doubles.failed = False
    files(tmp_path / "in", 0, 5)
    flow = af.Flow("numbers")
    source = frames(spark, query(tmp_path / "in"), checkpoint=tmp_path / "spark", trigger="once")
    rows = (
        await flow.source(source)
        .map(Doubles)
        .collect(
            checkpoints=(tmp_path / "store").as_uri(),
            every="50ms",
            restart=af.fixed_delay(attempts=3, delay="10ms"),
        )
    )

    assert Doubles.failed
    assert rows == list(range(5 * ROWS))


async def test_a_frame_that_is_no_stream_is_refused(spark: SparkBridge, tmp_path: Path) -> None:
    with pytest.raises(SparkError, match="is no streaming query, expected one with checkpoint="):
        await af.Flow("batch").source(frames(spark, "SELECT 1", checkpoint=tmp_path)).collect()


async def test_a_query_that_fails_fails_the_flow_with_its_cause(
    spark: SparkBridge, tmp_path: Path
) -> None:
    files(tmp_path / "in", 0, 1)

    def failing(session: Any) -> Any:
        return query(tmp_path / "in")(session).selectExpr(
            "IF(id = 100, raise_error('bad row'), id) AS id"
        )

    with pytest.raises(SparkError, match="bad row"):
        await (
            af.Flow("bad")
            .source(frames(spark, failing, checkpoint=tmp_path / "spark", trigger="once"))
            .collect()
        )
