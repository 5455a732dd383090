"""A Java process that is killed: the calls under way fail, the next one starts another. In a program of its own, for it has only one."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, os, signal
from aioflow.core.errors import Broken
from aioflow.spark.session import SparkBridge

def endless(session):
    def forever(rows):
        import time
        while True:
            time.sleep(0.05)
        yield 1
    return session.sparkContext.parallelize([1], 1).mapPartitions(forever).collect()

async def main():
    async with SparkBridge("local[2]") as spark:
        session = await spark.session()
        call = asyncio.create_task(spark.call(endless, session))
        while not await spark.call(lambda: list(session.sparkContext.statusTracker().getActiveJobsIds())):
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

asyncio.run(main())
"""


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("java")
def test_a_java_process_that_is_killed_fails_its_calls_and_is_followed_by_another() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=800, check=False)

    assert done.stdout.splitlines() == [
        "failed: the Java process of Spark ended with code -9 during the call; the next call starts another one",
        "then: 42",
        "0 0",
    ], done.stderr
    assert "\tat " not in done.stderr
