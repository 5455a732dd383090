"""Rows between Spark and this process: over our channels, against what PySpark has for it; by wall
time and by CPU, alternating in one run.

    python benchmarks/bench_spark.py [--rows 1000000] [--rounds 3] [--master local[2]]

`in`: a DataFrame of four columns (long, string, double, timestamp) comes here as Arrow, through
`FrameReading` and through `toArrow()`. `out`: Arrow batches of the same rows go to Parquet, through
a spool and a job that fetches them, as a sink commits them, and through `createDataFrame(table)`.
`flow in` and `flow out` are flows of a fifth as many rows, as Python values. CPU is that of this
process, of the Java process and of its Python workers together.

`lag` is the longest time for which the event loop did not turn meanwhile. It has two parts: `held`
is the most CPU that this process spent between two turns, on the loop or with the interpreter's
lock; the rest is waiting for a core, which another process that does nothing else (`beside`) does
too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import monotonic, process_time, sleep
from typing import Any

import pyarrow as pa

import aioflow as af
from aioflow.core.system_host import SystemHost
from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.bridge.sink import FrameCommitter, Spool
from aioflow.spark.bridge.source import FrameReading

GOALS = {"in": 0.8, "out": 2.0}
"""Our rows a second over PySpark's."""
LAG_GOALS_MS = {"in": 50.0, "out": 100.0}

COLUMNS = (
    "id, concat('user-', CAST(id % 1000 AS STRING)) AS user, id * 0.5D AS amount, "
    "timestamp_millis(1700000000000 + id) AS ts"
)
SCHEMA = "id bigint, user string, amount double, ts timestamp"
PARTITIONS = 4
TICK_S = 0.005
WHOSE = ("ours", "flow")
BEGUN = datetime(2024, 1, 1, tzinfo=UTC)


def cpu_of_all() -> float:
    """CPU seconds of this process and everything that it started, Java and Spark's Python
    workers included.
    """
    ticks, me = 0, os.getpid()
    parents: dict[int, int] = {}
    spent: dict[int, int] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(path.name)] = int(fields[1])
            # With children that have ended and were waited for.
            spent[int(path.name)] = sum(int(field) for field in fields[11:15])
    for pid, own in spent.items():
        above = pid
        while above != me and above in parents:
            above = parents[above]
        if above == me:
            ticks += own
    return ticks / os.sysconf("SC_CLK_TCK")


class Lag:
    """The longest time between two turns of the loop, beyond what was asked for, and the most
    CPU of this process between two, in ms.
    """

    def __init__(self) -> None:
        self.worst_ms = 0.0
        self.held_ms = 0.0

    async def watch(self) -> None:
        while True:
            begun, spent = monotonic(), process_time()
            await asyncio.sleep(TICK_S)
            self.worst_ms = max(self.worst_ms, (monotonic() - begun - TICK_S) * 1000)
            self.held_ms = max(self.held_ms, (process_time() - spent) * 1000)


def watch_beside(answers: Connection) -> None:
    """Returns, in a process of its own, the worst lag since the last request, for each request."""

    worst_s = 0.0
    while True:
        begun = monotonic()
        sleep(TICK_S)
        worst_s = max(worst_s, monotonic() - begun - TICK_S)
        if answers.poll():
            if not answers.recv():
                return
            answers.send(worst_s * 1000)
            worst_s = 0.0


async def timed(
    rows: int, work: Callable[[], Awaitable[int]], beside: Connection
) -> dict[str, float]:
    beside.send(True)
    beside.recv()
    lag = Lag()
    watching = asyncio.create_task(lag.watch())
    cpu, begun = cpu_of_all(), monotonic()
    got = await work()
    wall, cpu = monotonic() - begun, cpu_of_all() - cpu
    watching.cancel()
    beside.send(True)
    assert got == rows, f"{got} rows came through, expected {rows}"
    lags = {"lag_ms": lag.worst_ms, "held_ms": lag.held_ms, "beside_ms": beside.recv()}
    return {"rows_per_s": rows / wall, "cpu_us_per_row": cpu / rows * 1e6} | lags


async def measure(
    master: str, rows: int, rounds: int, directory: str, beside: Connection
) -> dict[str, list[dict[str, float]]]:
    host = SystemHost()
    found: dict[str, list[dict[str, float]]] = {}
    async with SparkBridge(master) as spark:
        session = await spark.session()
        stored = f"{directory}/in"
        made = await spark.sql(f"SELECT {COLUMNS} FROM range(0, {rows}, 1, {PARTITIONS})")
        await spark.call(made.write.parquet, stored)
        frame = await spark.call(session.read.parquet, stored)

        async def ours_in() -> int:
            count = 0
            async with FrameReading(spark, host, frame) as reading:
                await reading.plan()
                async for arrival in reading:
                    count += arrival.batch.num_rows
            return count

        async def theirs_in() -> int:
            return int((await spark.call(frame.toArrow)).num_rows)

        table: Any = await spark.call(frame.toArrow)
        batches = table.to_batches(max_chunksize=10_000)

        sink = af.io.spark(
            spark, into=f"{directory}/ours", schema=SCHEMA, spool=f"{directory}/spool"
        )

        async def ours_out() -> int:
            spool = Spool(host, f"{directory}/spool")
            await host.fs.mkdirs(f"{directory}/spool")
            for start in range(0, len(batches), 8):
                await spool.append(batches[start : start + 8])
            staged = await spool.seal(1)
            assert staged is not None
            await FrameCommitter(host, sink).commit([staged])
            return staged.rows

        async def theirs_out() -> int:
            made = await spark.call(session.createDataFrame, table)
            await spark.call(made.write.mode("overwrite").parquet, f"{directory}/theirs")
            return int(table.num_rows)

        few = rows // 5

        async def flow_in() -> int:
            count = 0

            def take(row: dict[str, Any]) -> None:
                nonlocal count
                count += 1

            flow = af.Flow("in")
            flow.source(
                af.io.spark(spark, lambda session: session.read.parquet(stored).where("id % 5 = 0"))
            ).sink(take)
            await flow.execute()
            return count

        async def flow_out() -> int:
            flow = af.Flow("out")
            made = flow.source(range(few)).map(
                lambda n: {"id": n, "user": "user", "amount": n * 0.5, "ts": BEGUN}
            )
            made.sink(af.io.spark(spark, into=f"{directory}/flow", schema=SCHEMA))
            await flow.execute()
            return few

        works = {
            "in ours": ours_in,
            "in theirs": theirs_in,
            "out ours": ours_out,
            "out theirs": theirs_out,
        }
        flows = {"in flow": flow_in, "out flow": flow_out}
        for number in range(rounds + 1):  # The first warms Java up.
            for name, work in (works | flows).items():
                result = await timed(few if name in flows else rows, work, beside)
                if number:
                    found.setdefault(name, []).append(result)
    await host.close()
    return found


def report(found: dict[str, list[dict[str, float]]], rows: int, master: str) -> None:
    print(
        f"{'':12} {'rows/s':>12} {'us CPU/row':>11} {'lag ms':>8} {'held ms':>8} {'beside ms':>10}"
    )
    for name, results in found.items():
        middle = {key: median(result[key] for result in results) for key in results[0]}
        speed = f"{middle['rows_per_s']:12,.0f} {middle['cpu_us_per_row']:11.2f}"
        print(
            f"{name:12} {speed} {middle['lag_ms']:8.1f} {middle['held_ms']:8.1f} "
            f"{middle['beside_ms']:10.1f}"
        )
    ratios: dict[str, dict[str, float]] = {}
    for way, goal in GOALS.items():
        pairs = list(zip(found[f"{way} ours"], found[f"{way} theirs"], strict=True))
        wall = median(ours["rows_per_s"] / theirs["rows_per_s"] for ours, theirs in pairs)
        cpu = median(theirs["cpu_us_per_row"] / ours["cpu_us_per_row"] for ours, theirs in pairs)
        kinds = [(kind, whose) for whose in WHOSE for kind in ("lag_ms", "held_ms")]
        lags = {
            f"{kind} {whose}": median(one[kind] for one in found[f"{way} {whose}"])
            for kind, whose in kinds
        }
        ratios[way] = {"wall": round(wall, 2), "cpu": round(cpu, 2)} | {
            name: round(value, 1) for name, value in lags.items()
        }
        print(f"{way}: {wall:.2f} times PySpark's by wall time (goal {goal}), {cpu:.2f} by CPU")
        for whose in WHOSE:
            lag, held = lags[f"lag_ms {whose}"], lags[f"held_ms {whose}"]
            print(
                f"    lag of the loop ({whose}) {lag:.0f} ms, {held:.0f} ms of it by this process "
                f"(goal {LAG_GOALS_MS[way]:.0f})"
            )
    place = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
    }
    print(
        json.dumps(
            {
                "benchmark": "spark",
                "rows": rows,
                "master": master,
                **place,
                "ratios": ratios,
                "rounds": found,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--master", default="local[2]")
    given = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="bench-spark-")
    beside, answers = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=watch_beside, args=(answers,))
    other.start()
    try:
        found = asyncio.run(measure(given.master, given.rows, given.rounds, directory, beside))
    finally:
        beside.send(False)
        other.join()
        shutil.rmtree(directory)
    report(found, given.rows, given.master)


if __name__ == "__main__":
    main()
