"""Impossible settings are refused with an alternative: too few cores, second attempts, plain text
between machines, a Python without libraries.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping
from typing import Any

import pytest

import aioflow as af
from aioflow.core.errors import NotAuthenticated
from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.workers.runner import SparkWorkersRun, check_cores, check_secrecy, worker_config
from aioflow.spark.workers.worker import NEEDED, WorkerTask


def flow() -> af.DataStream[int]:
    return af.Flow("f", parallelism=2).source(range(10)).rebalance().map(lambda n: n + 1)


@pytest.mark.parametrize(
    ("master", "config", "workers", "shared", "cores"),
    [
        ("local", {}, 1, False, None),
        ("local[2]", {}, 2, False, None),
        ("local[2,4]", {}, 1, True, None),
        ("local[*]", {}, 3, False, 3),
        ("local-cluster[2,2,1024]", {}, 4, False, None),
        ("local-cluster[2,2,1024]", {"spark.task.cpus": "2"}, 2, False, None),
        ("spark://h:7077", {}, 100, True, None),
        ("spark://h:7077", {"spark.cores.max": "3"}, 2, True, None),
    ],
)
def test_number_of_workers_that_fit(
    master: str, config: Mapping[str, str], workers: int, shared: bool, cores: int | None
) -> None:
    check_cores(master, config, workers, shared=shared, cores=cores)


@pytest.mark.parametrize(
    ("master", "config", "workers", "shared", "says"),
    [
        (
            "local",
            {},
            2,
            False,
            "local has 1 cores, and 2 workers need 2: each holds its core for as long as the flow "
            "runs",
        ),
        (
            "local[2]",
            {},
            2,
            True,
            "local\\[2\\] has 2 cores, and 2 workers need 3: .* and 1 must stay free for the "
            "other jobs",
        ),
        ("local-cluster[2,1,1024]", {}, 3, False, "has 2 cores, and 3 workers need 3"),
        (
            "local-cluster[2,1,1024]",
            {"spark.task.cpus": "2"},
            2,
            False,
            "2 workers of 2 cores each need 4",
        ),
        ("yarn", {"spark.cores.max": "1"}, 2, False, "yarn has 1 cores"),
        (
            "local[8]",
            {"spark.speculation": "true"},
            1,
            False,
            "spark.speculation is on: Spark would start workers a second time",
        ),
    ],
)
def test_too_many_workers_are_refused_with_the_numbers(
    master: str, config: Mapping[str, str], workers: int, shared: bool, says: str
) -> None:
    with pytest.raises(af.SparkError, match=says):
        check_cores(master, config, workers, shared=shared)


async def test_a_flow_is_refused_before_spark_is_started_for_it() -> None:
    with pytest.raises(af.SparkError, match="local\\[1\\] has 1 cores, and 2 workers need 2"):
        await flow().collect(on=af.SparkWorkers("local[1]", workers=2))


def test_an_application_takes_no_more_of_a_cluster_than_its_workers_need() -> None:
    assert worker_config({"spark.task.cpus": "2"}, 3)["spark.cores.max"] == "6"


def test_neither_records_nor_the_secret_cross_a_network_in_plain_text_unless_told_to() -> None:
    check_secrecy("127.0.0.1", {}, has_tls=False, allow_plaintext=False)
    check_secrecy("10.0.0.1", {}, has_tls=False, allow_plaintext=True)
    check_secrecy(
        "10.0.0.1", {"spark.network.crypto.enabled": "true"}, has_tls=True, allow_plaintext=False
    )
    with pytest.raises(NotAuthenticated, match=r"connect to 10.0.0.1 in plain text: give tls="):
        check_secrecy(
            "10.0.0.1",
            {"spark.network.crypto.enabled": "true"},
            has_tls=False,
            allow_plaintext=False,
        )
    with pytest.raises(
        NotAuthenticated,
        match=(
            r"the secret of the workers would travel in plain text in Spark's tasks: set "
            r"spark.network"
        ),
    ):
        check_secrecy("10.0.0.1", {}, has_tls=True, allow_plaintext=False)


@pytest.mark.parametrize("given", [{"workers": 0}, {"slots": 0}, {"workers": "2"}, {"slots": True}])
def test_a_number_that_is_none_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"(workers|slots) is .*, expected a number of at least 1"):
        af.SparkWorkers("local[2]", **given)


def test_a_bridge_on_another_master_is_refused() -> None:
    with pytest.raises(
        ValueError, match="bridge= is a session on 'local\\[4\\]', and master= is 'local\\[2\\]'"
    ):
        af.SparkWorkers("local[2]", bridge=SparkBridge("local[4]"))


async def test_a_flow_that_uses_another_session_is_refused() -> None:
    source = af.Flow("f").source(af.io.spark(SparkBridge("local[4]"), "SELECT 1 AS one"))
    with pytest.raises(
        af.GraphError,
        match="uses a Spark session on 'local\\[4\\]', and the workers would be on 'local\\[2\\]'",
    ):
        await source.collect(on=af.SparkWorkers("local[2]"))


async def test_a_master_that_does_not_answer_is_named() -> None:
    with pytest.raises(af.SparkError, match=r"no Spark master answers at spark://127.0.0.1:1 "):
        await flow().collect(on=af.SparkWorkers("spark://127.0.0.1:1", workers=2))


def test_the_secret_is_not_shown() -> None:
    assert "s3cr3t" not in repr(WorkerTask("spark-1", "127.0.0.1", 1, b"s3cr3t"))


async def test_with_a_session_of_the_service_a_core_stays_free_for_its_other_jobs(
    spark: SparkBridge,
) -> None:
    with pytest.raises(
        af.SparkError,
        match=(
            r"local\[2\] has 2 cores, and 2 workers need 3: .* 1 "
            r"must stay free for the other jobs"
        ),
    ):
        await flow().collect(on=af.SparkWorkers("local[2]", workers=2, bridge=spark))


async def test_the_example_runs_on_a_session_that_others_use_too(
    spark: SparkBridge, capsys: pytest.CaptureFixture[str]
) -> None:
    await importlib.import_module("examples.spark_workers").main(
        af.SparkWorkers("local[2]", workers=1, bridge=spark)
    )

    assert capsys.readouterr().out.splitlines() == [
        " 0 min  cellar     100 W",
        " 0 min  kitchen    200 W",
        " 0 min  roof       300 W",
        "10 min  cellar     150 W",
        "10 min  kitchen    250 W",
        "10 min  roof       350 W",
    ]


async def test_a_frame_of_the_session_can_be_the_source(spark: SparkBridge) -> None:
    rows = (
        af.Flow("f")
        .source(af.io.spark(spark, "SELECT id FROM range(0, 500, 1, 1)"))
        .map(lambda row: row["id"])
    )
    total = await rows.key_by(lambda n: n % 5).sum().collect(on=af.SparkWorkers("local[2]"))
    assert max(total) == (4, sum(range(4, 500, 5)))


async def test_output_of_print_in_a_flow_appears_here(
    spark: SparkBridge, capfd: pytest.CaptureFixture[str]
) -> None:
    words = af.Flow("f").source(["b", "a", "b"]).key_by(str.lower).count()
    words.sink(af.io.stdout())
    await words.flow.execute(on=af.SparkWorkers("local[2]", workers=1, bridge=spark))
    assert sorted(capfd.readouterr().out.splitlines()) == ["('a', 1)", "('b', 1)", "('b', 2)"]


async def test_libraries_that_executors_lack_are_named_at_the_start(
    spark: SparkBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SparkWorkersRun._task_of

    def lacking(run: SparkWorkersRun, worker_id: str) -> WorkerTask:
        task = made(run, worker_id)
        return WorkerTask(
            worker_id, task.host, task.port, task.secret, needed=(*NEEDED, "no_such_module")
        )

    monkeypatch.setattr(SparkWorkersRun, "_task_of", lacking)
    with pytest.raises(
        af.SparkError,
        match=r"a worker cannot start in Spark: .*python.* lacks no_such_module.*pip install",
    ):
        await flow().collect(on=af.SparkWorkers("local[2]", workers=1, bridge=spark))


async def test_cancelled_while_its_workers_start_it_leaves_none_behind(spark: SparkBridge) -> None:
    session = await spark.session()
    tracker = session.sparkContext.statusTracker()
    running = asyncio.ensure_future(
        flow().collect(on=af.SparkWorkers("local[2]", workers=1, bridge=spark))
    )
    async with asyncio.timeout(120):
        while not await spark.call(lambda: list(tracker.getActiveJobsIds())):
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        while await spark.call(lambda: list(tracker.getActiveJobsIds())):
            await asyncio.sleep(0.01)
