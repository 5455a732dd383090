"""Draws programs, runs each in several ways, and compares what comes out with the model.

    python -m tests.programs.hunt --seeds 0:10000 --jobs 2 --ledger
    python -m tests.programs.hunt --seeds 17:18 --ways restored --shrink

Each program runs plainly, in another form, and simulated, restarted or restored; on columns where
its sources can be tables; and a quarter of them on simulated machines that fail. Every 50th runs
over worker processes too, if not `--in-process`; with `--spark` every 20th that ends is a job of
Spark. The way `on_cluster` starts a cluster of processes for all programs. A difference is printed
with its seed, its way and the command that repeats it; `--shrink` prints the smallest program that
still differs. With `--ledger` what was run is added to `ledger.jsonl`; `--sum` adds that up.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import gc
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.integration.clusters import Cluster
from tests.programs import model
from tests.programs.draw import draw
from tests.programs.program import Program, Step
from tests.programs.run import WAYS, check, ways_of
from tests.simulation.sweep import commit

__all__ = ["main", "shrunk"]

LEDGER = Path(__file__).parent / "ledger.jsonl"
COLLECT_EVERY = 20
SPARK_EVERY = 20
CHUNK = 5


@dataclass(frozen=True)
class Given:
    """How seeds are run."""

    ways: Sequence[str] = ()
    """Only these ways; none: those that each seed chooses."""
    in_process: bool = False
    spark: bool = False
    cluster: Path | None = None
    """Directory of the cluster for `on_cluster`."""


class Seen(NamedTuple):
    """The runs of one seed."""

    seed: int
    ways: list[str]
    kills: int
    wrong: list[tuple[str, str]]
    """The ways that differ, each with what was wrong."""


def run_seed(seed: int, given: Given) -> Seen:
    if seed % COLLECT_EVERY == 0:
        gc.collect()
    program = draw(seed)
    ways, spark = given.ways, given.spark
    chosen = list(ways) or ways_of(program, processes=not given.in_process)
    if spark and not ways and seed % SPARK_EVERY == 0 and not program.reads_first:
        chosen.append("on_spark")
    wrong, kills = [], 0
    for way in chosen:
        try:
            kills += check(program, way, service_of(way, given.cluster)).kills
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # Any end of a run is of interest here.
            wrong.append((way, "".join(traceback.format_exception_only(error)).rstrip()))
    return Seen(seed, chosen, kills, wrong)


def service_of(way: str, cluster: Path | None = None) -> Any:
    """Returns what serves all programs of a way: the bridge to Spark, the cluster, or None."""
    if way == "on_spark":
        return spark_bridge()
    return cluster if way == "on_cluster" else None


@cache
def spark_bridge() -> Any:
    """One session for all programs of a process, until its end."""
    from aioflow.spark.bridge.session import SparkBridge

    bridge = SparkBridge("local[2]", app="programs")
    with asyncio.Runner() as runner:
        runner.run(bridge.session())
    atexit.register(lambda: asyncio.run(bridge.close()))
    return bridge


# --------------------------------------------------------------------------------------------------
# shrink


def shrunk(program: Program, way: str, *, tries: int = 400, cluster: Path | None = None) -> Program:
    """The smallest program found that still differs in `way`."""
    wanted = failure(program, way, cluster)
    if wanted is None:
        raise ValueError(f"program {program.seed} does not differ in way {way}")
    found = True
    while found and tries > 0:
        found = False
        for smaller in smaller_programs(program):
            tries -= 1
            if tries <= 0:
                break
            if failure(smaller, way, cluster) == wanted:
                program, found = smaller, True
                break
    return program


def failure(program: Program, way: str, cluster: Path | None) -> str | None:
    """The kind of what is wrong."""
    try:
        check(program, way, service_of(way, cluster))
    except model.Undetermined:
        return None
    except Exception as error:
        return type(error).__name__
    return None


def smaller_programs(program: Program) -> Iterator[Program]:
    """Yields programs with one output less, one step less, or half of the rows."""
    if len(program.outputs) > 1:
        for output in program.outputs:
            yield pruned(replace(program, outputs=(output,)))
    for i in reversed(range(len(program.steps))):
        step = program.steps[i]
        if step.kind == "source":
            rows = step.args["rows"]
            for size in (len(rows) // 2, len(rows) // 8, 1):
                for begin in range(0, len(rows), size) if size else ():
                    less = Step(
                        "source", (), {**step.args, "rows": rows[:begin] + rows[begin + size :]}
                    )
                    yield replace(
                        program, steps=(*program.steps[:i], less, *program.steps[i + 1 :])
                    )
        elif step.kind != "side":
            yield pruned(bypassed(program, i))


def bypassed(program: Program, i: int) -> Program:
    """Returns the program in which readers of step `i` read its inputs instead."""
    (other, *_) = program.steps[i].inputs
    steps = [
        replace(
            step, inputs=tuple(other if j == i and step.kind != "side" else j for j in step.inputs)
        )
        for step in program.steps
    ]
    return replace(
        program,
        steps=tuple(steps),
        outputs=tuple(dict.fromkeys(other if j == i else j for j in program.outputs)),
    )


def pruned(program: Program) -> Program:
    """Returns the program without steps that no output depends on."""
    kept: set[int] = set()
    left = list(program.outputs)
    while left:
        i = left.pop()
        if i not in kept:
            kept.add(i)
            left += program.steps[i].inputs
    number = {old: new for new, old in enumerate(sorted(kept))}
    steps = tuple(
        replace(program.steps[i], inputs=tuple(number[j] for j in program.steps[i].inputs))
        for i in sorted(kept)
    )
    return replace(program, steps=steps, outputs=tuple(number[i] for i in program.outputs))


# --------------------------------------------------------------------------------------------------
# command


def results(seeds: Sequence[int], given: Given, jobs: int) -> Iterator[Seen]:
    one = partial(run_seed, given=given)
    if jobs == 1:
        gc.freeze()
        yield from map(one, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, gc.freeze) as pool:
        yield from pool.imap_unordered(one, seeds, CHUNK)


@contextmanager
def a_cluster(wanted: bool) -> Iterator[Path | None]:
    """The directory of a cluster of two TaskManagers, if one is wanted."""
    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder, closing(Cluster(Path(folder))) as cluster:
        cluster.start(workers=2, slots=6)
        yield cluster.data


def parse_seeds(text: str) -> range:
    first, colon, end = text.partition(":")
    return range(int(first), int(end)) if colon else range(int(first))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.hunt",
        description="Draw programs and compare them with the model.",
    )
    parser.add_argument(
        "--seeds", type=parse_seeds, default=range(1000), help="FIRST:END, or how many from 0"
    )
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=[], help="only these ways")
    parser.add_argument("--in-process", action="store_true", help="no ways with processes")
    parser.add_argument("--spark", action="store_true", help="some of them as jobs of Spark, too")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--until-found", action="store_true", help="stop at the first difference")
    parser.add_argument(
        "--shrink", action="store_true", help="print the smallest program that still differs"
    )
    parser.add_argument("--ledger", action="store_true", help="add the result to ledger.jsonl")
    parser.add_argument("--sum", action="store_true", help="print the sum of the ledger")
    given = parser.parse_args(argv)
    if given.sum:
        print_sum()
        return 0
    at, begun = commit("tests/programs/*.py"), time.monotonic()
    failed: Counter[str] = Counter()
    seeds: list[int] = []
    wrong_seeds: list[int] = []
    runs: Counter[str] = Counter()
    kills = 0
    with a_cluster("on_cluster" in given.ways) as cluster:
        how = Given(given.ways, given.in_process, given.spark, cluster)
        for seen in results(given.seeds, how, given.jobs):
            seeds.append(seen.seed)
            runs.update(seen.ways)
            kills += seen.kills
            for way, error in seen.wrong:
                failed[way] += 1
                print(f"program {seen.seed} at commit {at}, {way}: {error[:2_000]}")
                print(
                    f"  repeat it: python -m tests.programs.hunt --seeds {seen.seed}:"
                    f"{seen.seed + 1} --jobs 1 --ways {way} --shrink",
                    flush=True,
                )
                if given.shrink:
                    small = shrunk(draw(seen.seed), way, cluster=cluster)
                    print(small.text, f"to keep it: {small.literal}", sep="\n", flush=True)
            if seen.wrong:
                wrong_seeds.append(seen.seed)
            spent = time.monotonic() - begun
            if (seen.wrong and given.until_found) or spent > given.minutes * 60:
                break
    spent = time.monotonic() - begun
    ways = ", ".join(f"{way} {count}" for way, count in failed.items())
    pace = f"{spent:.1f} s, {len(seeds) / spent * 60:.0f} a minute"
    print(
        f"{len(seeds)} programs at commit {at}, {runs.total()} runs, {kills} kills, "
        f"{len(wrong_seeds)} differ ({ways or 'none'}), {pace}"
    )
    if given.ledger and seeds:
        entry: dict[str, Any] = {
            "commit": at,
            "first": min(seeds),
            "count": len(seeds),
            "runs": dict(sorted(runs.items())),
            "kills": kills,
            "failed": sorted(wrong_seeds),
        }
        with LEDGER.open("a", encoding="utf-8") as ledger:
            ledger.write(json.dumps(entry) + "\n")
    return 1 if wrong_seeds else 0


def print_sum() -> None:
    """Prints what the ledger holds, by commit."""
    programs: Counter[str] = Counter()
    runs: dict[str, Counter[str]] = {}
    kills: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for line in LEDGER.read_text("utf-8").splitlines():
        entry = json.loads(line)
        name = entry["commit"]
        programs[name] += entry["count"]
        runs.setdefault(name, Counter()).update(entry["runs"])
        kills[name] += entry["kills"]
        failed[name] += len(entry["failed"])
    for name, count in programs.items():
        ways = ", ".join(f"{way} {number}" for way, number in sorted(runs[name].items()))
        print(f"{name}: {count} programs, {kills[name]} kills, {failed[name]} differ ({ways})")
    print(f"{programs.total()} programs, {kills.total()} kills, {failed.total()} differ")


if __name__ == "__main__":
    sys.exit(main())
