"""Runs many seeds of the simulated world, on several processors, and keeps account of them.

    python -m tests.simulation.sweep --seeds 0:20000 --jobs 2 --ledger
    python -m tests.simulation.sweep --seeds 0:1000 --place cluster

Each seed chooses where the tasks of its world run; with `--place` all run there. A failure is
printed with its seed and the commit, and with the command that repeats it. With `--ledger` what was
run is added to `ledger.jsonl`, from which `--sum` computes how many seeds ran without a violation,
over which commits.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.simulation.world import PLACES, Outcome, run_world

__all__ = ["main", "sweep_one"]

LEDGER = Path(__file__).parent / "ledger.jsonl"
ROOT = Path(__file__).parents[2]
COLLECT_EVERY = 20
CHUNK = 10


def sweep_one(seed: int, place: str | None = None) -> tuple[int, Outcome | None, str]:
    """Runs one seed; returns its outcome or its error."""
    if seed % COLLECT_EVERY == 0:
        gc.collect()
    try:
        return seed, run_world(seed, place), ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Any end of a run is of interest here.
        return seed, None, f"{type(error).__name__}: {error}"


def _outcomes(
    seeds: range, place: str | None, jobs: int
) -> Iterator[tuple[int, Outcome | None, str]]:
    run = partial(sweep_one, place=place)
    if jobs == 1:
        yield from map(run, seeds)
        return
    # Fresh interpreters: nothing is inherited that a seed run alone would not have.
    with multiprocessing.get_context("spawn").Pool(jobs, gc.freeze) as pool:
        yield from pool.imap_unordered(run, seeds, CHUNK)


def commit(*more: str) -> str:
    """The commit of the tree, marked if the package, its simulation or `more` differ from it."""

    def git(*argv: str) -> str:
        return subprocess.run(
            ["git", *argv], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()

    name = git("rev-parse", "--short=10", "HEAD") or "unknown"
    return (
        f"{name}+"
        if git(
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--",
            "aioflow",
            "tests/simulation/*.py",
            *more,
        )
        else name
    )


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
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.sweep", description="Run seeds of the simulated world."
    )
    parser.add_argument(
        "--seeds", type=_parse_seeds, default=range(1000), help="FIRST:END, or how many from 0"
    )
    parser.add_argument(
        "--place",
        choices=list(PLACES),
        help="where the tasks of all worlds run; otherwise each seed chooses",
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--for",
        dest="for_s",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="stop after so long",
    )
    parser.add_argument("--ledger", action="store_true", help="add the result to ledger.jsonl")
    parser.add_argument(
        "--sum", action="store_true", help="print the sum of the ledger, and run nothing"
    )
    given = parser.parse_args(argv)
    if given.sum:
        _print_sum()
        return 0
    at = commit()
    begun = time.monotonic()
    gc.freeze()  # Loaded objects stay: the collection after each seed need not examine them.
    failed: list[int] = []
    done: list[int] = []
    places: Counter[str] = Counter()
    faults = steps = 0
    for seed, outcome, error in _outcomes(given.seeds, given.place, given.jobs):
        done.append(seed)
        if outcome is None:
            failed.append(seed)
            again = f"--seeds {seed}:{seed + 1} --jobs 1" + (
                f" --place {given.place}" if given.place else ""
            )
            print(
                f"seed {seed} at commit {at}: {error}\n  repeat it: python -m "
                f"tests.simulation.sweep {again}"
            )
            sys.stdout.flush()
        else:
            faults += sum(outcome.faults.values())
            steps += outcome.steps
            places[outcome.place] += 1
        if time.monotonic() - begun > given.for_s:
            break
    spent = time.monotonic() - begun
    where = ", ".join(f"{count} {place}" for place, count in sorted(places.items()))
    print(
        f"{len(done)} seeds at commit {at}, {len(failed)} failed, {faults} faults, {steps} steps, "
        f"{spent:.1f} s ({where})"
    )
    if given.ledger and done:
        test = f"world of {given.place}" if given.place else "worlds"
        entry: dict[str, Any] = {"commit": at, "test": test, "first": min(done), "count": len(done)}
        with LEDGER.open("a", encoding="utf-8") as ledger:
            ledger.write(json.dumps({**entry, "failed": sorted(failed)}) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
