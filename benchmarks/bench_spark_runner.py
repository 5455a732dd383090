"""Word counts by Spark: a flow with `on=af.Spark(...)` beside a plain PySpark program over RDDs, in one session, turn by turn.

    python benchmarks/bench_spark_runner.py [--words 1000000] [--rounds 3]

`running` is the word count of a stream: a pair (word, how many so far) for each word. `total` is that of a batch program: one pair a word
at the end, for which the RDD adds up before the shuffle and the flow does not. Both read the same two files, on as many cores, and what
comes out is thrown away where it was made (`running`) or brought to the program (`total`). The answers are compared first, on a part,
which also warms Java up. Ratios are of the clock and of CPU time: of Java, its Python processes and this one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import add
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import aioflow as af
from aioflow.spark.session import SparkBridge
from benchmarks.workloads import make_words

CORES = 2
WORDS_A_LINE = 10
CHECKED_WORDS = 20_000
GOAL = 1.5
"""Of `running`: the flow's rate over the RDD's."""


def write_files(directory: Path, words: int) -> Path:
    """As many files as there are cores, so that each has one to read."""
    directory.mkdir()
    pool = make_words(words)
    for core in range(CORES):
        own = [pool[i % len(pool)] for i in range(core, words, CORES)]
        lines = (" ".join(own[start : start + WORDS_A_LINE]) for start in range(0, len(own), WORDS_A_LINE))
        (directory / f"{core}.txt").write_text("\n".join(lines) + "\n")
    return directory


# The flow.


def counts(directory: Path, name: str) -> af.DataStream[Any]:
    keyed = af.Flow(name, parallelism=CORES).source(af.io.lines(directory)).flat_map(str.split).key_by(str.lower)
    if name == "running":
        return keyed.count()
    return keyed.window(af.global_window(at_end=True)).aggregate(af.count(), pair_of)


def pair_of(key: str, window: Any, n: int) -> tuple[str, int]:
    return key, n


async def run_flow(directory: Path, name: str, on: af.Spark) -> None:
    stream = counts(directory, name)
    if name == "running":
        stream.sink(af.io.blackhole())
        await stream.flow.execute(on=on)
    else:
        await stream.collect(on=on)


# The same over RDDs.


def paired(word: str) -> tuple[str, int]:
    return word.lower(), 1


def so_far(grouped: tuple[str, Iterable[int]]) -> Iterator[tuple[str, int]]:
    key, ones = grouped
    n = 0
    for one in ones:
        n += one
        yield key, n


def drop(rows: Iterator[Any]) -> None:
    deque(rows, maxlen=0)


def rdd_of(session: Any, directory: Path, name: str) -> Any:
    pairs = session.sparkContext.textFile(str(directory), CORES).flatMap(str.split).map(paired)
    return pairs.groupByKey(CORES).flatMap(so_far) if name == "running" else pairs.reduceByKey(add, CORES)


def run_rdd(session: Any, directory: Path, name: str) -> None:
    rdd = rdd_of(session, directory, name)
    if name == "running":
        rdd.foreachPartition(drop)
    else:
        rdd.collect()


def cpu_s(java: int) -> float:
    """CPU seconds so far of this process, of Java, and of all that Java started and that lives or was waited for."""
    parents, spent = dict[int, int](), dict[int, float]()
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            try:
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # It has ended.
            parents[int(directory.name)] = int(fields[1])
            spent[int(directory.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    ours = {java}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return process_time() + sum(spent.get(pid, 0.0) for pid in ours)


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one run: by the clock, and of CPU, which a busy machine changes little."""

    wall: float
    cpu: float


async def timed(run: Callable[[], Awaitable[None]], java: int) -> Spent:
    begun, before = perf_counter(), cpu_s(java)
    await run()
    return Spent(perf_counter() - begun, cpu_s(java) - before)


async def compare(spark: SparkBridge, directory: Path, part: Path, name: str, words: int, rounds: int) -> dict[str, Any]:
    session = await spark.session()
    on = af.Spark(spark.master, bridge=spark)
    ours = Counter(await counts(part, name).collect(on=on))
    theirs = Counter(await spark.call(lambda: rdd_of(session, part, name).collect()))
    if ours != theirs:
        raise SystemExit(f"{name}: the flow and the RDD give different answers over {CHECKED_WORDS} words")
    java = session.sparkContext._gateway.proc.pid
    flow_s, rdd_s = [], []
    for _ in range(rounds):
        rdd_s.append(await timed(lambda: spark.call(run_rdd, session, directory, name), java))
        flow_s.append(await timed(lambda: run_flow(directory, name, on), java))
    ratios = sorted(theirs_s.wall / ours_s.wall for ours_s, theirs_s in zip(flow_s, rdd_s, strict=True))
    by_cpu = sorted(theirs_s.cpu / ours_s.cpu for ours_s, theirs_s in zip(flow_s, rdd_s, strict=True))
    return {
        "workload": name,
        "words": words,
        "flow_words_per_s": round(words / median(one.wall for one in flow_s)),
        "rdd_words_per_s": round(words / median(one.wall for one in rdd_s)),
        "flow_cpu_s": round(median(one.cpu for one in flow_s), 2),
        "rdd_cpu_s": round(median(one.cpu for one in rdd_s), 2),
        "ratio": round(median(ratios), 2),
        "ratio_spread": [round(ratios[0], 2), round(ratios[-1], 2)],
        "cpu_ratio": round(median(by_cpu), 2),
        "cpu_ratio_spread": [round(by_cpu[0], 2), round(by_cpu[-1], 2)],
        "goal": GOAL if name == "running" else None,
    }


async def measure(words: int, rounds: int, only: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        directory, part = write_files(Path(scratch, "words"), words), write_files(Path(scratch, "part"), CHECKED_WORDS)
        async with SparkBridge(f"local[{CORES}]") as spark:
            rows = [await compare(spark, directory, part, name, words, rounds) for name in only]
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, {platform.system()} {platform.release()}",
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "rounds": rounds,
        "throughput": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--words", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=("running", "total"), default=["running", "total"])
    options = parser.parse_args()
    print(json.dumps(asyncio.run(measure(options.words, options.rounds, options.only)), indent=2))


if __name__ == "__main__":
    main()
