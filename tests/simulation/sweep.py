"""Runs many seeds of the simulated world, on several processors, and keeps account of them.

    python -m tests.simulation.sweep --seeds 0:20000 --jobs 2 --ledger
    python -m tests.simulation.sweep --seeds 0:1000 --workers

Every twelfth seed is run of the world of worker processes as well, which costs four times as much; with `--workers` nothing else is.
A failure is printed with its seed and the commit, and with the command that repeats it. With `--ledger` what was run is added to
`ledger.jsonl`, from which `--sum` computes how many seeds ran without a violation, over which commits.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.simulation.world import Outcome, run_world

__all__ = ["main", "sweep_one"]

LEDGER = Path(__file__).parent / "ledger.jsonl"
ROOT = Path(__file__).parents[2]
WORKERS_EVERY = 12
COLLECT_EVERY = 20
CHUNK = 10


def sweep_one(seed: int, *, workers: bool = False) -> tuple[int, Outcome | None, str]:
    """One seed: what it came to, or what was wrong."""
    if seed % COLLECT_EVERY == 0:
        gc.collect()
    try:
        return seed, run_world(seed, workers=workers), ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Whatever ends a run is what this is for.
        return seed, None, f"{type(error).__name__}: {error}"


def _worlds(seeds: Sequence[int], only_workers: bool) -> Iterator[tuple[int, bool]]:
    """What is run of each seed, and whether it is the world of workers."""
    for seed in seeds:
        if not only_workers:
            yield seed, False
        if only_workers or seed % WORKERS_EVERY == 0:
            yield seed, True


def _run(world: tuple[int, bool]) -> tuple[bool, tuple[int, Outcome | None, str]]:
    seed, workers = world
    return workers, sweep_one(seed, workers=workers)


def _outcomes(worlds: Iterator[tuple[int, bool]], jobs: int) -> Iterator[tuple[bool, tuple[int, Outcome | None, str]]]:
    if jobs == 1:
        yield from map(_run, worlds)
        return
    # Fresh interpreters: nothing is inherited that a seed run alone would not have.
    with multiprocessing.get_context("spawn").Pool(jobs, gc.freeze) as pool:
        yield from pool.imap_unordered(_run, worlds, CHUNK)


def commit() -> str:
    """The commit of the tree, marked if the package or its simulation differ from it."""

    def git(*argv: str) -> str:
        return subprocess.run(["git", *argv], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    name = git("rev-parse", "--short=10", "HEAD") or "unknown"
    return f"{name}+" if git("status", "--porcelain", "--untracked-files=no", "--", "aioflow", "tests/simulation/*.py") else name


def _parse_seeds(text: str) -> range:
    first, colon, end = text.partition(":")
    return range(int(first), int(end)) if colon else range(int(first))


def _print_sum() -> None:
    total = failed = 0
    by_commit: dict[str, int] = {}
    for line in LEDGER.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        total += entry["count"]
        failed += len(entry["failed"])
        by_commit[entry["commit"]] = by_commit.get(entry["commit"], 0) + entry["count"]
    for name, count in by_commit.items():
        print(f"{name}: {count} seeds")
    print(f"{total} seeds, {failed} failed")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.sweep", description="Run seeds of the simulated world.")
    parser.add_argument("--seeds", type=_parse_seeds, default=range(1000), help="FIRST:END, or how many from 0")
    parser.add_argument("--workers", action="store_true", help="only of the world whose tasks run in worker processes")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--for", dest="for_s", type=float, default=float("inf"), metavar="SECONDS", help="stop after so long")
    parser.add_argument("--ledger", action="store_true", help="add the result to ledger.jsonl")
    parser.add_argument("--sum", action="store_true", help="print the sum of the ledger, and run nothing")
    given = parser.parse_args(argv)
    if given.sum:
        _print_sum()
        return 0
    at = commit()
    begun = time.monotonic()
    gc.freeze()  # What is loaded stays: the collection after each seed need not walk it.
    failed: dict[bool, list[int]] = {False: [], True: []}
    done: dict[bool, list[int]] = {False: [], True: []}
    faults = steps = 0
    for workers, (seed, outcome, error) in _outcomes(_worlds(given.seeds, given.workers), given.jobs):
        done[workers].append(seed)
        if outcome is None:
            failed[workers].append(seed)
            again = f"--seeds {seed}:{seed + 1} --jobs 1" + (" --workers" if workers else "")
            print(f"seed {seed} at commit {at}: {error}\n  repeat it: python -m tests.simulation.sweep {again}")
            sys.stdout.flush()
        else:
            faults += sum(outcome.faults.values())
            steps += outcome.steps
        if time.monotonic() - begun > given.for_s:
            break
    spent = time.monotonic() - begun
    total, wrong = sum(map(len, done.values())), sum(map(len, failed.values()))
    print(f"{total} seeds at commit {at}, {wrong} failed, {faults} faults, {steps} steps, {spent:.1f} s")
    if given.ledger:
        with LEDGER.open("a", encoding="utf-8") as ledger:
            for workers, seeds in done.items():
                if seeds:
                    test = "world of workers" if workers else "world"
                    entry: dict[str, Any] = {"commit": at, "test": test, "first": min(seeds), "count": len(seeds)}
                    ledger.write(json.dumps({**entry, "failed": sorted(failed[workers])}) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
