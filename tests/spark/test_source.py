"""A DataFrame as a source: every row once, also over failures of the job, of the flow and of
tasks.
"""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import aioflow as af
from aioflow.core.errors import GraphError, RestoreError
from aioflow.spark.bridge.connector import spark as frames
from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.failures import SparkError

NUMBERS = "SELECT id FROM range(0, 20000, 1, 3)"
# Partitions that no stop drains to their end: it would be behind one, not in the middle of it.
PART = "SELECT id FROM range(0, 60000, 1, 3)"


class Reading(NamedTuple):
    station: str
    celsius: float | None
    at: datetime.datetime


async def test_rows_are_dicts_and_arrive_once_each(spark: SparkBridge) -> None:
    flow = af.Flow("numbers")
    rows = await flow.source(frames(spark, NUMBERS)).collect()

    assert sorted(row["id"] for row in rows) == list(range(20_000))


async def test_rows_of_one_partition_keep_their_order(spark: SparkBridge) -> None:
    flow = af.Flow("numbers")
    rows = await flow.source(frames(spark, lambda session: session.range(0, 5000, 1, 1))).collect()

    assert [row["id"] for row in rows] == list(range(5000))


async def test_rows_become_values_of_a_type(spark: SparkBridge) -> None:
    query = (
        "SELECT 'LGA' AS station, CAST(NULL AS DOUBLE) AS celsius, TIMESTAMP '2013-01-01 "
        "05:00:00' AS at"
    )
    flow = af.Flow("readings")

    (reading,) = await flow.source(frames(spark, query, Reading)).collect()

    assert reading == Reading("LGA", None, datetime.datetime(2013, 1, 1, 5, tzinfo=datetime.UTC))


async def test_a_frame_can_be_read_in_columns(spark: SparkBridge) -> None:
    frame = await spark.sql(NUMBERS)
    flow = af.Flow("columns")
    counts = (
        await flow.source(frames(spark, frame, batches=True))
        .map(lambda batch: batch.num_rows)
        .collect()
    )

    assert sum(counts) == 20_000 and max(counts) <= 1000


async def test_an_empty_frame_ends_the_flow(spark: SparkBridge) -> None:
    flow = af.Flow("nothing")
    assert (
        await flow.source(frames(spark, "SELECT id FROM range(10) WHERE id > 10")).collect() == []
    )


async def test_event_time_of_each_partition_is_its_own(spark: SparkBridge) -> None:
    """A partition that begins long after another has ended is not late."""
    flow = af.Flow("windows")
    source = flow.source(
        frames(spark, "SELECT id FROM range(0, 3000, 1, 6)"),
        watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda row: row["id"]),
    )
    windows = source.key_by(lambda row: "all").window(af.tumbling("1s")).aggregate(af.count())

    assert sorted((one.start, one.value) for one in await windows.collect()) == [
        (0, 1000),
        (1000, 1000),
        (2000, 1000),
    ]


class FailsOnce(af.MapFunction[dict[str, Any], int]):
    """Fails at its 5,000th row, in the first attempt."""

    failed = False

    def __init__(self) -> None:
        self.seen = 0

    def map(self, row: dict[str, Any]) -> int:
        self.seen += 1
        if self.seen == 5000 and not FailsOnce.failed:
            FailsOnce.failed = True
            raise OSError("once")
        return int(row["id"])


async def test_a_flow_that_fails_goes_on_behind_its_checkpoint(
    spark: SparkBridge, tmp_path: Path
) -> None:
    FailsOnce.failed = False
    flow = af.Flow("failing")
    stream = flow.source(frames(spark, NUMBERS)).map(FailsOnce)
    rows = await stream.collect(
        checkpoints=tmp_path.as_uri(),
        every="50ms",
        restart=af.fixed_delay(attempts=3, delay="10ms"),
    )

    assert FailsOnce.failed
    assert sorted(rows) == list(range(20_000))


def slow_flow(
    spark: SparkBridge, what: Any, kept: list[int], limit: int, enough: asyncio.Event
) -> af.Flow:
    """Keeps `limit` rows at full speed, the others a few at a time."""

    async def keep(row: dict[str, Any]) -> int:
        if len(kept) >= limit:
            enough.set()
            if len(kept) % 8 == 0:  # A stop lets what is under way go through first.
                await asyncio.sleep(0.001)
        kept.append(row["id"])
        return len(kept)

    flow = af.Flow("stopped")
    flow.source(frames(spark, what), uid="numbers").map(keep, concurrency=1, uid="keep").sink(
        af.io.blackhole(), uid="nothing"
    )
    return flow


async def read_a_part(spark: SparkBridge, what: Any, store: Path) -> list[int]:
    """Some 1,210 rows, and a savepoint behind them."""
    kept: list[int] = []
    enough = asyncio.Event()
    async with slow_flow(spark, what, kept, 1210, enough).run(
        checkpoints=store.as_uri(), every="1h"
    ) as job:
        async with asyncio.timeout(60):
            await enough.wait()
            await job.stop()
    assert 1210 <= len(kept) < 60_000
    return kept


async def test_a_flow_that_was_stopped_goes_on_in_the_middle_of_a_partition(
    spark: SparkBridge, tmp_path: Path
) -> None:
    first = await read_a_part(spark, PART, tmp_path)
    second: list[int] = []
    await slow_flow(spark, PART, second, 60_000, asyncio.Event()).execute(
        checkpoints=tmp_path.as_uri(), every="1h"
    )

    assert sorted(first + second) == list(range(60_000))


async def test_a_frame_that_gives_other_rows_after_a_restart_is_refused(
    spark: SparkBridge, tmp_path: Path
) -> None:
    await read_a_part(spark, PART, tmp_path)
    other = slow_flow(spark, "SELECT id FROM range(1, 60001, 1, 3)", [], 60_000, asyncio.Event())

    with pytest.raises(
        RestoreError, match="it must give the same rows in the same order each time it is computed"
    ):
        await other.execute(checkpoints=tmp_path.as_uri(), every="1h", restart=af.no_restart())


async def test_a_frame_that_has_another_number_of_partitions_after_a_restart_is_refused(
    spark: SparkBridge, tmp_path: Path
) -> None:
    await read_a_part(spark, PART, tmp_path)
    other = slow_flow(spark, "SELECT id FROM range(0, 60000, 1, 4)", [], 60_000, asyncio.Event())

    with pytest.raises(
        RestoreError, match="had 3 partitions when its positions were saved, and has 4 now"
    ):
        await other.execute(checkpoints=tmp_path.as_uri(), every="1h", restart=af.no_restart())


async def test_a_query_that_fails_fails_the_flow_with_its_cause(spark: SparkBridge) -> None:
    flow = af.Flow("broken")
    stream = flow.source(
        frames(
            spark,
            "SELECT IF(id = 15000, raise_error('bad row'), id) AS id FROM range(0, 20000, 1, 2)",
        )
    )

    with pytest.raises(SparkError, match="bad row"):
        await stream.collect()


async def test_a_table_that_does_not_exist_fails_before_anything_runs(spark: SparkBridge) -> None:
    with pytest.raises(SparkError, match="TABLE_OR_VIEW_NOT_FOUND"):
        await af.Flow("none").source(frames(spark, "SELECT * FROM nosuch")).collect()


async def test_a_streaming_query_without_a_checkpoint_gets_a_warning(spark: SparkBridge) -> None:
    with pytest.raises(GraphError, match="reads a streaming query, and there is no checkpoint="):
        await (
            af.Flow("rate")
            .source(frames(spark, lambda session: session.readStream.format("rate").load()))
            .collect()
        )


async def test_cancelling_a_flow_cancels_its_spark_job(spark: SparkBridge) -> None:
    stuck = asyncio.Event()

    async def wait(row: Any) -> Any:
        stuck.set()
        await asyncio.Event().wait()

    flow = af.Flow("stuck")
    running = asyncio.create_task(flow.source(frames(spark, NUMBERS)).map(wait).collect())
    async with asyncio.timeout(60):
        await stuck.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    session = await spark.session()
    async with asyncio.timeout(60):
        while await spark.call(
            lambda: len(session.sparkContext.statusTracker().getActiveJobsIds())
        ):
            await asyncio.sleep(0.05)


async def test_batches_of_a_type_make_no_sense(spark: SparkBridge) -> None:
    with pytest.raises(GraphError, match="a record batch is no row"):
        frames(spark, NUMBERS, Reading, batches=True)


async def test_malformed_frame_is_rejected_by_name(spark: SparkBridge) -> None:
    with pytest.raises(GraphError, match="reads int, expected a query, a DataFrame"):
        await af.Flow("seven").source(frames(spark, lambda session: 7)).collect()


class FailsToOpen(af.MapFunction[Any, Any]):
    async def open(self, ctx: af.RuntimeContext) -> None:
        raise OSError("no such model")

    def map(self, value: Any) -> Any:
        return value


async def test_a_flow_that_fails_before_it_reads_leaves_nothing_that_was_planned(
    spark: SparkBridge,
) -> None:
    source = frames(spark, NUMBERS)
    with pytest.raises(OSError, match="no such model"):
        await af.Flow("unread").source(source).map(FailsToOpen).collect()
    assert source._planned is None  # A job that would listen for its tasks.
