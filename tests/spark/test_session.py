"""The bridge on a real session: answers, failures, bounded calls, time-outs and cancellation
that reach Spark's jobs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.failures import SparkError

WITHIN_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)


async def active_jobs(spark: SparkBridge) -> int:
    session = await spark.session()
    return await spark.call(lambda: len(session.sparkContext.statusTracker().getActiveJobsIds()))


def endless(session: Any) -> Any:
    """A job that ends only by being cancelled."""

    def forever(rows: Iterator[Any]) -> Iterator[int]:
        import time

        while True:
            time.sleep(0.05)
        yield 1

    return session.sparkContext.parallelize([1], 1).mapPartitions(forever).collect()


async def test_sql_and_calls_answer(spark: SparkBridge) -> None:
    frame = await spark.sql("SELECT id FROM range(:n)", {"n": 10})

    assert await spark.call(frame.count) == 10
    assert [row.id for row in await spark.call(frame.collect)] == list(range(10))


async def test_a_query_that_spark_refuses_is_one_error_with_its_condition_and_no_java_frames(
    spark: SparkBridge,
) -> None:
    with pytest.raises(SparkError, match="nosuch") as caught:
        await spark.sql("SELECT * FROM nosuch")

    assert caught.value.condition == "TABLE_OR_VIEW_NOT_FOUND"
    assert "\tat " not in str(caught.value) and "\tat " in caught.value.trace
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


async def test_a_job_that_fails_names_the_cause(spark: SparkBridge) -> None:
    frame = await spark.sql("SELECT raise_error('the cellar is full')")

    with pytest.raises(SparkError, match="the cellar is full") as caught:
        await spark.call(frame.collect)
    assert "\tat " not in str(caught.value)


async def test_a_python_function_that_fails_on_an_executor_is_named_with_its_own_traceback(
    spark: SparkBridge,
) -> None:
    def fail(batches: Iterator[Any]) -> Iterator[Any]:
        raise ValueError("no such airport")
        yield

    frame = await spark.sql("SELECT 1 AS a")
    with pytest.raises(
        SparkError, match=r"^a function failed in Spark: ValueError: no such airport$"
    ) as caught:
        await spark.call(lambda: frame.mapInArrow(fail, "a int").collect())
    assert 'raise ValueError("no such airport")' in caught.value.trace


async def test_an_error_of_the_called_function_itself_comes_out_as_it_is(
    spark: SparkBridge,
) -> None:
    with pytest.raises(KeyError, match="gate"):
        await spark.call({}.__getitem__, "gate")


async def test_a_call_that_is_out_of_time_ends_at_once_and_its_job_is_cancelled(
    spark: SparkBridge,
) -> None:
    """J5.4: the caller goes on, the job of the call is cancelled, and its late end has no
    effect.
    """
    session = await spark.session()

    with pytest.raises(
        TimeoutError, match="the Spark call endless took longer than 2s, its jobs are cancelled"
    ):
        await spark.call(endless, session, timeout="2s")

    await until(lambda: spark.running == 0)
    assert await active_jobs(spark) == 0


async def test_a_cancelled_call_cancels_its_job_and_no_other(spark: SparkBridge) -> None:
    session = await spark.session()
    doomed = asyncio.create_task(spark.call(endless, session))
    other = asyncio.create_task(spark.call(endless, session))
    async with asyncio.timeout(WITHIN_S):
        while await active_jobs(spark) < 2:
            await asyncio.sleep(0.05)

    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    await until(lambda: spark.running == 1)
    assert await active_jobs(spark) == 1

    other.cancel()
    await asyncio.wait([other])
    await until(lambda: spark.running == 0)


async def test_a_call_that_is_cancelled_before_its_first_job_ends_however_the_two_meet(
    spark: SparkBridge,
) -> None:
    session = await spark.session()
    inside, go_on = threading.Event(), threading.Event()

    def late() -> Any:
        inside.set()
        go_on.wait(WITHIN_S)
        return endless(session)

    task = asyncio.create_task(spark.call(late))
    await until(inside.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await until(lambda: spark.running == 0)


async def test_a_flow_keeps_to_its_concurrency_and_order_while_it_calls_spark(
    spark: SparkBridge,
) -> None:
    """J5.1, J5.3: at most `concurrency` calls in flight, and results in the order of the
    elements.
    """
    at_once = most = 0

    async def enrich(n: int) -> tuple[int, int]:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        try:
            frame = await spark.sql("SELECT :n * 2 AS twice", {"n": n})
            (row,) = await spark.call(frame.collect)
            return n, row.twice
        finally:
            at_once -= 1

    flow = af.Flow("calls")
    rows = await flow.source(range(12)).map(enrich, concurrency=3).collect()

    assert rows == [(n, 2 * n) for n in range(12)]
    assert most <= 3


async def test_every_thread_has_the_session_as_its_active_one(spark: SparkBridge) -> None:
    session = await spark.session()

    def active() -> bool:
        return bool(session._jvm.SparkSession.getActiveSession().isDefined())

    assert all(await asyncio.gather(*[spark.call(active) for _ in range(8)]))


async def test_a_second_bridge_shares_the_session_of_the_same_master_and_leaves_it(
    spark: SparkBridge,
) -> None:
    async with SparkBridge("local[2]") as other:
        assert await other.session() is await spark.session()

    assert await spark.call((await spark.sql("SELECT 1")).count) == 1


async def test_a_second_master_in_one_process_is_refused(spark: SparkBridge) -> None:
    async with SparkBridge("local[1]") as other:
        with pytest.raises(
            SparkError, match=r"has a Spark context on 'local\[2\]' already, and can have only one"
        ):
            await other.session()


async def test_java_starts_with_the_configuration_and_without_showing_it(
    spark: SparkBridge,
) -> None:
    session: Any = await spark.session()
    assert spark._process is not None
    command = Path(f"/proc/{spark._process._process.pid}/cmdline").read_bytes()

    assert (
        b"-XX:+UseSerialGC" in command
    )  # Part of spark.driver.extraJavaOptions, which only a start can use.
    assert b"maxRecordsPerBatch" not in command
    found = await spark.call(
        lambda: session._jvm.java.lang.System.getProperty(
            "spark.sql.execution.arrow.maxRecordsPerBatch"
        )
    )
    assert found == "1000"
