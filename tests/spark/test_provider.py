"""The provider of workers, over a Spark that the test plays: who is started, who is waited for,
and who is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.failures import SparkError
from aioflow.spark.workers import provider as provider_module
from aioflow.spark.workers.provider import SparkProvider
from aioflow.spark.workers.worker import LACKS, RETRIED, SERVED, WorkerTask


class Session:
    sparkContext = None


class FakeSpark:
    """A bridge whose jobs end when the test says so.

    `jobs` are those that run, by the id of their worker.
    """

    master = "local-cluster[2,1,1024]"
    address = "127.0.0.1"

    def __init__(self) -> None:
        self.jobs: dict[str, asyncio.Future[tuple[str, str]]] = {}
        self.cancelled: list[str] = []

    async def session(self) -> Session:
        return Session()

    async def job(self, fn: Any) -> tuple[str, str]:
        worker_id = fn.args[1].worker_id
        ends = self.jobs[worker_id] = asyncio.get_running_loop().create_future()
        try:
            return await ends
        except asyncio.CancelledError:
            self.cancelled.append(worker_id)
            raise
        finally:
            del self.jobs[worker_id]

    async def started(self, *worker_ids: str) -> None:
        async with asyncio.timeout(60):
            while not set(worker_ids) <= self.jobs.keys():
                await asyncio.sleep(0)


@asynccontextmanager
async def provided(workers: int = 1) -> AsyncIterator[tuple[FakeSpark, SparkProvider, list[str]]]:
    """`failures` gets a line for each start that is reported as failed."""
    spark, failures = FakeSpark(), list[str]()
    provider = SparkProvider(
        cast(SparkBridge, spark),
        lambda id: WorkerTask(id, "127.0.0.1", 1, b""),
        workers=workers,
        slots=1,
    )
    provider.start_workers(workers, lambda: failures.append("failed"))
    try:
        yield spark, provider, failures
    finally:
        await provider.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def test_it_is_ready_when_all_have_registered() -> None:
    async with provided(2) as (spark, provider, failures):
        await spark.started("spark-1", "spark-2")
        provider.registered("spark-2")
        await until(lambda: provider.present == ["spark-2"])
        assert not provider.ready.done()
        provider.registered("spark-1")
        await provider.ready
        for job in list(spark.jobs.values()):
            job.set_result((SERVED, ""))
    assert failures == [] and spark.cancelled == []


async def test_a_replacement_has_an_id_that_was_never_used() -> None:
    async with provided() as (spark, provider, failures):
        await spark.started("spark-1")
        provider.registered("spark-1")
        spark.jobs["spark-1"].set_exception(SparkError("its Python process was killed"))
        await until(lambda: not provider.present)
        assert failures == [], "it was there: the ResourceManager has seen its end by itself"
        provider.start_workers(1, lambda: failures.append("failed"))
        await spark.started("spark-2")


async def test_a_worker_that_is_given_up_and_does_not_end_loses_its_spark_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(provider_module, "EXIT_S", 0.01)
    async with provided() as (spark, provider, failures):
        await spark.started("spark-1")
        provider.registered("spark-1")
        provider.lost("spark-1", "its connection ended")
        await until(lambda: spark.cancelled == ["spark-1"])
        assert failures == []


async def test_one_that_does_not_come_in_time_is_cancelled_and_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(provider_module, "START_TIMEOUT_S", 0.01)
    async with provided() as (spark, provider, failures):
        await until(lambda: failures == ["failed"])
        assert spark.cancelled == ["spark-1"]
        assert (
            "did not start spark-1 within 0.01 s, 0 of 1 workers are there: each holds a core"
            in str(provider.last_error)
        )


@pytest.mark.parametrize("outcome", [(RETRIED, "attempt 1"), SparkError("the executor was lost")])
async def test_failing_starts_are_reported_and_after_three_in_a_row_no_caller_waits(
    outcome: Any,
) -> None:
    async with provided() as (spark, provider, failures):
        for number in range(1, 4):
            worker_id = f"spark-{number}"
            await spark.started(worker_id)
            job = spark.jobs[worker_id]
            if isinstance(outcome, tuple):
                job.set_result(outcome)
            else:
                job.set_exception(outcome)
            # mypy knows no type for the default.
            await until(lambda number=number: len(failures) == number)  # type: ignore[misc]
            assert provider.ready.done() == (number == 3)
            provider.start_workers(1, lambda: failures.append("failed"))
        with pytest.raises(SparkError, match=r"a second time by itself|the executor was lost"):
            await provider.ready


async def test_it_is_ready_with_fewer_if_others_do_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Executors without enough memory for all leave the jobs of some workers waiting."""
    monkeypatch.setattr(provider_module, "START_TIMEOUT_S", 0.2)
    async with provided(2) as (spark, provider, failures):
        await spark.started("spark-1", "spark-2")
        provider.registered("spark-1")
        await provider.ready
        assert provider.present == ["spark-1"] and failures == ["failed"]
        assert spark.cancelled == ["spark-2"], "it must not hold a place later"
        monkeypatch.setattr(provider_module, "START_TIMEOUT_S", 60)
        provider.start_workers(1, lambda: failures.append("failed"))
        await spark.started("spark-3")
        provider.registered("spark-3")
        await until(lambda: provider.present == ["spark-1", "spark-3"])


async def test_executors_that_lack_libraries_are_not_tried_again() -> None:
    async with provided() as (spark, provider, failures):
        await spark.started("spark-1")
        spark.jobs["spark-1"].set_result(
            (LACKS, "/usr/bin/python3 (Python 3.11.2) on h lacks msgspec")
        )
        with pytest.raises(
            SparkError,
            match=r"cannot start in Spark: /usr/bin/python3 \(Python 3.11.2\) on h lacks msgspec",
        ):
            await provider.ready
        await until(lambda: failures == ["failed"])


async def test_closing_starts_no_worker_and_ends_the_remaining_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(provider_module, "EXIT_S", 0.01)
    async with provided(2) as (spark, provider, failures):
        await spark.started("spark-1", "spark-2")
        provider.registered("spark-1")
        await until(lambda: provider.present)
        provider.begin_closing()
        provider.start_workers(1, lambda: failures.append("failed"))
    assert sorted(spark.cancelled) == ["spark-1", "spark-2"]
    assert failures == [] and spark.jobs == {}
