"""Word counts by Spark: a flow with `on=af.Spark(...)` beside a plain PySpark program over RDDs, in
one session, and beside PyFlink.

    python benchmarks/bench_spark_runner.py [--words 1000000] [--rounds 3]
                                            [--pyflink thread|process|none]

`running` is the word count of a stream: a pair (word, how many so far) for each word. `total` is
that of a batch program: one pair a word at the end, for which the RDD adds up before the shuffle
and the flow does not. Both read the same two files, on as many cores, and what comes out is thrown
away where it was made (`running`) or brought to the program (`total`). The answers are compared
first, on a part, which also warms Java up. Ratios are of the clock and of CPU time: of Java, its
Python processes and the one that asks.

PyFlink (`running` alone) has a Java of its own that stays up too, in an environment of its own:
`make peers`. Each of its jobs starts a cluster within that Java, which takes seconds. So the part
is timed in each round as well, and what all words take longer gives the ratios "behind the start",
which mean something from a million words on. Where it is not installed it is left out, and said.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import tempfile
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from operator import add
from pathlib import Path
from shutil import which
from statistics import median
from time import perf_counter, process_time
from typing import Any

import aioflow as af
from aioflow.spark.bridge.session import SparkBridge
from benchmarks.engines import PEERS, ROOT, Missing
from benchmarks.workloads import make_words

CORES = 2
WORDS_A_LINE = 10
CHECKED_WORDS = 20_000
GOAL = 1.5
"""Goal for `running`: the flow's rate relative to the RDD program's, or to PyFlink's."""

PYFLINK = {
    "thread": {"python.execution-mode": "thread", "pipeline.object-reuse": "true"},
    # Its cache of state holds 1,000 keys unless told, and each miss is a message to Java.
    "process": {
        "python.execution-mode": "process",
        "python.state.cache-size": "20000",
        "python.fn-execution.bundle.size": "20000",
    },
}
"""Settings of Flink for either way to run Python: within Java, or in processes beside it.

The first is the faster one.
"""


def write_files(directory: Path, words: int) -> Path:
    """Writes one file for each core."""
    directory.mkdir()
    pool = make_words(words)
    for core in range(CORES):
        own = [pool[i % len(pool)] for i in range(core, words, CORES)]
        lines = (
            " ".join(own[start : start + WORDS_A_LINE])
            for start in range(0, len(own), WORDS_A_LINE)
        )
        (directory / f"{core}.txt").write_text("\n".join(lines) + "\n")
    return directory


# The flow.


def counts(directory: Path, name: str) -> af.DataStream[Any]:
    keyed = (
        af.Flow(name, parallelism=CORES)
        .source(af.io.lines(directory))
        .flat_map(str.split)
        .key_by(str.lower)
    )
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
    return (
        pairs.groupByKey(CORES).flatMap(so_far)
        if name == "running"
        else pairs.reduceByKey(add, CORES)
    )


def run_rdd(session: Any, directory: Path, name: str) -> None:
    rdd = rdd_of(session, directory, name)
    if name == "running":
        rdd.foreachPartition(drop)
    else:
        rdd.collect()


class PyFlink:
    """The program of PyFlink, which lives until the block ends."""

    def __init__(self, mode: str, scratch: Path) -> None:
        """Raises Missing."""
        installed = next(iter(PEERS.glob("lib/python*/site-packages/pyflink/datastream")), None)
        if installed is None:
            raise Missing(f"apache-flink is not in {PEERS}: make peers")
        if which("java") is None and "JAVA_HOME" not in os.environ:
            raise Missing("there is no java (JDK 17)")
        self._settings = PYFLINK[mode]
        self._logs = scratch / "pyflink"
        self._logs.mkdir()
        self._environment = {
            **os.environ,
            # The Python within Java does not know of its virtual environment.
            "PYTHONPATH": f"{ROOT}:{installed.parents[1]}",
            "PATH": f"{PEERS / 'bin'}:{os.environ['PATH']}",
            "FLINK_LOG_DIR": str(self._logs),
        }

    def __enter__(self) -> PyFlink:
        command = [str(PEERS / "bin" / "python"), "-m", "benchmarks.peers.pyflink_words"]
        with (self._logs / "stderr").open("w") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _ask(self, do: str, directory: Path) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(
            json.dumps({"do": do, "directory": str(directory), "settings": self._settings}) + "\n"
        )
        self._process.stdin.flush()
        if line := self._process.stdout.readline():
            return json.loads(line)
        raise SystemExit(f"PyFlink failed:\n{(self._logs / 'stderr').read_text()[-3000:]}")

    def run(self, directory: Path) -> None:
        self._ask("run", directory)

    def collect(self, directory: Path) -> Counter[tuple[str, int]]:
        return Counter({(word, n): times for word, n, times in self._ask("collect", directory)})


def cpu_s(java: int) -> float:
    """CPU seconds so far of this process, of Java, and of all that Java started and that lives or
    was waited for. Of PyFlink, `java` is the program that started it."""
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


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of one engine: a job over a part, mostly its start, and one over all words."""

    part: Spent
    whole: Spent

    @property
    def behind_start(self) -> Spent:
        return Spent(self.whole.wall - self.part.wall, self.whole.cpu - self.part.cpu)


async def timed(job: Callable[[Path], Awaitable[None]], directory: Path, java: int) -> Spent:
    begun, before = perf_counter(), cpu_s(java)
    await job(directory)
    return Spent(perf_counter() - begun, cpu_s(java) - before)


def over(theirs: Iterable[float], ours: Iterable[float]) -> dict[str, Any]:
    """The middle of the rounds' ratios, the least and the greatest."""
    ratios = sorted(their / our for their, our in zip(theirs, ours, strict=True))
    return {
        "ratio": round(median(ratios), 2),
        "spread": [round(ratios[0], 2), round(ratios[-1], 2)],
    }


def beside(theirs: list[Turn], ours: list[Turn]) -> dict[str, Any]:
    return {
        "by_clock": over([one.whole.wall for one in theirs], [one.whole.wall for one in ours]),
        "by_cpu": over([one.whole.cpu for one in theirs], [one.whole.cpu for one in ours]),
        "by_clock_behind_start": over(
            [one.behind_start.wall for one in theirs], [one.behind_start.wall for one in ours]
        ),
        "by_cpu_behind_start": over(
            [one.behind_start.cpu for one in theirs], [one.behind_start.cpu for one in ours]
        ),
    }


def told(turns: list[Turn], words: int) -> dict[str, Any]:
    return {
        "words_per_s": round(words / median(one.whole.wall for one in turns)),
        "words_per_cpu_s": round(words / median(one.whole.cpu for one in turns)),
        "wall_s": round(median(one.whole.wall for one in turns), 2),
        "cpu_s": round(median(one.whole.cpu for one in turns), 2),
        "start_wall_s": round(median(one.part.wall for one in turns), 2),
        "start_cpu_s": round(median(one.part.cpu for one in turns), 2),
    }


async def compare(
    spark: SparkBridge,
    flink: PyFlink | None,
    directory: Path,
    part: Path,
    name: str,
    words: int,
    rounds: int,
) -> dict[str, Any]:
    session = await spark.session()
    on = af.Spark(spark.master, bridge=spark)
    ours = Counter(await counts(part, name).collect(on=on))
    others = {"RDD": Counter(await spark.call(lambda: rdd_of(session, part, name).collect()))}
    if flink is not None:
        others["PyFlink"] = await asyncio.to_thread(flink.collect, part)
    for other, theirs in others.items():
        if ours != theirs:
            raise SystemExit(
                f"{name}: the flow and {other} give different answers over {CHECKED_WORDS} words"
            )

    java = session.sparkContext._gateway.proc.pid
    engines: dict[str, tuple[int, Callable[[Path], Awaitable[None]]]] = {
        "rdd": (java, lambda files: spark.call(run_rdd, session, files, name)),
        "flow": (java, lambda files: run_flow(files, name, on)),
    }
    if flink is not None:
        run = flink.run
        engines["pyflink"] = (flink.pid, lambda files: asyncio.to_thread(run, files))
    turns: dict[str, list[Turn]] = {engine: [] for engine in engines}
    for _ in range(rounds):
        for engine, (root, job) in engines.items():
            turns[engine].append(
                Turn(await timed(job, part, root), await timed(job, directory, root))
            )
    return {
        "workload": name,
        "words": words,
        **{engine: told(own, words) for engine, own in turns.items()},
        **{
            f"flow_over_{engine}": beside(own, turns["flow"])
            for engine, own in turns.items()
            if engine != "flow"
        },
        "goal": GOAL if name == "running" else None,
    }


async def measure(words: int, rounds: int, only: list[str], mode: str) -> dict[str, Any]:
    missing, load = [], os.getloadavg()[0]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory, part = (
            write_files(scratch / "words", words),
            write_files(scratch / "part", CHECKED_WORDS),
        )
        flink: PyFlink | None = None
        if mode != "none" and "running" in only:
            try:
                flink = stack.enter_context(PyFlink(mode, scratch))
            except Missing as why:
                missing.append(f"Left out: PyFlink: {why}")
        async with SparkBridge(f"local[{CORES}]") as spark:
            rows = [
                await compare(
                    spark,
                    flink if name == "running" else None,
                    directory,
                    part,
                    name,
                    words,
                    rounds,
                )
                for name in only
            ]
    return {
        "machine": (
            f"{platform.machine()}, {os.cpu_count()} processors, {platform.system()} "
            f"{platform.release()}"
        ),
        "load_before": round(load, 2),
        "python": platform.python_version(),
        "rounds": rounds,
        "pyflink": mode,
        "missing": missing,
        "throughput": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--words", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", nargs="+", choices=("running", "total"), default=["running", "total"]
    )
    parser.add_argument("--pyflink", choices=(*PYFLINK, "none"), default="thread")
    options = parser.parse_args()
    print(
        json.dumps(
            asyncio.run(measure(options.words, options.rounds, options.only, options.pyflink)),
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
