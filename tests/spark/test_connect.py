"""The bridge over Spark Connect, with a real server: calls, rows in both directions, queries by
their trigger, and a flow in the executors, which is refused.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import aioflow as af
from aioflow.spark.bridge import connect
from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.versions import Feature
from tests import needs
from tests.spark.brief import BRIEF
from tests.spark.test_streaming import files, query
from tests.spark.versions import since

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("spark-connect"),
    since(Feature.CONNECT),
]

START_S = 240.0


@pytest.fixture(scope="module")
def server(java: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Connect server."""
    import pyspark

    if not all(map(_has, ("grpc", "grpc_status", "zstandard"))):
        needs.missing("packages of Spark Connect", "pip install 'pyspark[connect]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("connect")
    command = [
        str(Path(pyspark.__file__).parent / "bin" / "spark-submit"),
        "--class",
        "org.apache.spark.sql.connect.service.SparkConnectServer",
    ]
    settings = {
        "spark.master": "local[2]",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": BRIEF,
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "Asia/Tokyo",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder / "local"),
    }
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    environ = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "JAVA_HOME": java,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, env=environ
        )
    try:
        ends = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < ends, (folder / "log").read_text()
                time.sleep(0.2)
        yield f"sc://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _has(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """gRPC keeps threads and connections of its own."""


@pytest.fixture
async def bridge(server: str) -> AsyncIterator[SparkBridge]:
    async with SparkBridge(server) as bridge:
        yield bridge


class Flight(NamedTuple):
    carrier: str
    delay: int


async def test_calls_and_arrow(bridge: SparkBridge) -> None:
    frame = await bridge.sql("SELECT id FROM range(:n)", {"n": 10})

    assert await bridge.call(frame.count) == 10
    table = await bridge.call(frame.toArrow)
    assert table.column("id").to_pylist() == list(range(10))
    session = await bridge.session()
    zone = await bridge.call(lambda: session.conf.get("spark.sql.session.timeZone"))
    assert zone == "Asia/Tokyo", "a setting of the server stays"


async def test_settings_of_the_program_are_those_of_its_session(server: str) -> None:
    config = {"spark.sql.session.timeZone": "UTC"}
    async with SparkBridge(server, config=config) as bridge:
        session = await bridge.session()
        assert await bridge.call(lambda: session.conf.get("spark.sql.session.timeZone")) == "UTC"
    async with SparkBridge(server, config={"spark.driver.memory": "1g"}) as bridge:
        with pytest.raises(af.SparkError, match="which belongs to the server at"):
            await bridge.session()


async def test_errors_are_those_of_spark_in_a_sentence(bridge: SparkBridge) -> None:
    with pytest.raises(af.SparkError, match="nosuch") as caught:
        await bridge.sql("SELECT * FROM nosuch")
    assert caught.value.condition == "TABLE_OR_VIEW_NOT_FOUND"


async def test_a_call_that_is_out_of_time_is_interrupted_in_the_server(bridge: SparkBridge) -> None:
    def slow(batches: Any) -> Any:
        import time

        time.sleep(600)
        yield from batches

    frame = await bridge.sql("SELECT 1L AS one")
    with pytest.raises(TimeoutError, match="its jobs are cancelled"):
        await bridge.call(lambda: frame.mapInArrow(slow, "one long").collect(), timeout="5s")
    async with asyncio.timeout(120):
        while bridge.running:
            await asyncio.sleep(0.1)


async def test_rows_of_a_frame_are_a_source(bridge: SparkBridge) -> None:
    text = "SELECT concat('c', id % 3) AS carrier, int(id) AS delay FROM range(0, 5000, 1, 4)"
    source = af.io.spark(bridge, f"{text} ORDER BY delay", Flight)
    rows = await af.Flow("in").source(source).filter(lambda flight: flight.delay % 2 == 0).collect()

    assert rows == [Flight(f"c{n % 3}", n) for n in range(0, 5000, 2)]


async def test_rows_go_into_a_directory_once(bridge: SparkBridge, tmp_path: Path) -> None:
    at = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
    flow = af.Flow("out")
    given = flow.source([{"id": n, "at": at} for n in range(2000)])
    schema = "id bigint, at timestamp"
    given.sink(af.io.spark(bridge, into=tmp_path / "out", schema=schema))
    await flow.execute(checkpoints=str(tmp_path / "checkpoints"))

    read = f"SELECT id, unix_seconds(at) AS at FROM parquet.`{tmp_path}/out` ORDER BY id"
    rows = await bridge.call((await bridge.sql(read)).collect)
    assert [row.id for row in rows] == list(range(2000))
    assert {row.at for row in rows} == {int(at.timestamp())}


async def test_a_batch_that_is_written_again_is_there_once(
    bridge: SparkBridge, tmp_path: Path
) -> None:
    from aioflow.spark.bridge.targets import FileTarget

    target = FileTarget(str(tmp_path / "out"))
    session = await bridge.session()
    for _ in range(2):
        await bridge.call(lambda: target.write(session, session.range(10), "0001-a"))
    await bridge.call(lambda: target.write(session, session.range(10, 20), "0002-b"))

    frame = await bridge.sql(f"SELECT id, batch FROM parquet.`{tmp_path}/out` ORDER BY id")
    rows = await bridge.call(frame.collect)
    assert [(row.id, row.batch) for row in rows] == [
        (n, "0001-a" if n < 10 else "0002-b") for n in range(20)
    ]


async def test_a_table_is_refused_with_the_way_out(bridge: SparkBridge, tmp_path: Path) -> None:
    flow = af.Flow("out")
    sink = af.io.spark(bridge, table="t", schema="id bigint", spool=tmp_path / "spool")
    flow.source([{"id": 1}]).sink(sink)
    with pytest.raises(af.SparkError, match="is not possible on Spark Connect: give a function"):
        await flow.execute()


async def test_a_function_as_sink_gets_frames_of_the_server(
    bridge: SparkBridge, tmp_path: Path
) -> None:
    seen: list[int] = []

    def keep(frame: Any, batch_id: str) -> None:
        seen.extend(row.id for row in frame.collect())

    flow = af.Flow("out")
    sink = af.io.spark(bridge, into=keep, schema="id bigint", spool=tmp_path / "spool")
    flow.source([{"id": n} for n in range(100)]).sink(sink)
    await flow.execute()

    assert sorted(seen) == list(range(100))


async def test_a_streaming_query_is_read_once_over_runs(
    bridge: SparkBridge, tmp_path: Path
) -> None:
    kept: list[int] = []
    for first in (0, 2):
        files(tmp_path / "in", first, 2)
        flow = af.Flow("numbers")
        source = af.io.spark(
            bridge, query(tmp_path / "in"), checkpoint=tmp_path / "spark", trigger="once"
        )
        flow.source(source).sink(lambda row: kept.append(row["id"]))
        await flow.execute()

    assert kept == list(range(2000))


async def test_a_streaming_query_goes_on_by_its_trigger(
    bridge: SparkBridge, tmp_path: Path
) -> None:
    seen: asyncio.Queue[int] = asyncio.Queue()
    files(tmp_path / "in", 0, 1)
    flow = af.Flow("numbers")
    source = af.io.spark(
        bridge, query(tmp_path / "in"), checkpoint=tmp_path / "spark", trigger="200ms"
    )
    flow.source(source).sink(lambda row: seen.put_nowait(row["id"]))
    async with flow.run() as job:
        assert [await seen.get() for _ in range(500)] == list(range(500))
        files(tmp_path / "in", 1, 1)
        assert [await seen.get() for _ in range(500)] == list(range(500, 1000))
        await job.stop()


async def test_an_error_of_the_flow_ends_its_query(bridge: SparkBridge, tmp_path: Path) -> None:
    def fail(row: dict[str, Any]) -> None:
        raise OSError("disk full")

    files(tmp_path / "in", 0, 3)
    flow = af.Flow("numbers")
    source = af.io.spark(
        bridge, query(tmp_path / "in"), checkpoint=tmp_path / "spark", trigger="200ms"
    )
    flow.source(source).sink(fail)
    with pytest.raises(OSError, match="disk full"):
        await flow.execute()
    session = await bridge.session()
    assert await bridge.call(lambda: session.streams.active) == []


async def test_a_server_that_does_not_answer_is_named_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with SparkBridge(f"sc://127.0.0.1:{taken.getsockname()[1]}/;token=s3cret") as bridge:
            with pytest.raises(af.SparkError, match="no Spark Connect server answers at") as caught:
                await bridge.session()
    assert "s3cret" not in f"{caught.value}{bridge!r}{bridge.master}"


async def test_a_flow_in_the_executors_is_refused_with_the_way_out(server: str) -> None:
    says = "is a server of Spark Connect, where a program has no executors: run the flow here"
    async with SparkBridge(server) as bridge:
        stream = af.Flow("f").source(af.io.spark(bridge, "SELECT 1 AS one"))
        with pytest.raises(af.SparkError, match=says):
            await stream.collect(on=af.Spark())
        for place in (af.Spark, af.SparkWorkers):
            with pytest.raises(af.SparkError, match=says):
                place(bridge=bridge)
            with pytest.raises(af.SparkError, match=says):
                place(server)


def test_addresses_of_servers() -> None:
    assert connect.server_of("sc://host") == ("host", 15002)
    assert connect.server_of("sc://host:7/;token=t") == ("host", 7)
    assert connect.server_of("spark://host:7") is None
    assert connect.address_toward("sc://127.0.0.1:7") == "127.0.0.1"
