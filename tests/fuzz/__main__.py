"""Runs targets, guided by coverage:  python -m tests.fuzz TARGET|all [--seconds S] [--runs N]
[--keep] [--seeded]

Coverage guidance is that of atheris (libFuzzer). Without it, or with `--seeded`, inputs are made by
a seeded generator instead. Each target runs in a process of its own and prints one line of JSON.
`--keep` puts what is new into the corpus of the repository. An input that fails is written to
build/fuzz/TARGET and ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

NAMES = (
    "frames",
    "rpc",
    "handshake",
    "rows",
    "columns",
    "metadata",
    "state",
    "savepoint",
    "rest",
    "json",
    "csv",
    "pgoutput",
    "binlog",
)
BUILD = Path("build") / "fuzz"
KEPT_BYTES_MAX = 24_000
"""Maximum bytes of a corpus in the repository, which keeps its smallest inputs."""

RSS_MB_MAX = 1024


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=(*NAMES, "all"))
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--runs", type=int, default=-1, help="inputs, instead of seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--seeded", action="store_true")
    parser.add_argument("--child", choices=("atheris", "seeded"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "seeded":
        return _seeded(options)
    if options.child is not None:
        return _guided(options)
    how = "seeded" if options.seeded or importlib.util.find_spec("atheris") is None else "atheris"
    names = NAMES if options.target == "all" else (options.target,)
    return max([_run(name, how, options) for name in names])


def _run(name: str, how: str, options: argparse.Namespace) -> int:
    """Runs one target in its own process. Returns 1 if it failed."""
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    code, text = _child(name, how, options, folder)
    print(
        text.splitlines()[-1] if how == "seeded" and not code else _summary(name, text, code),
        flush=True,
    )
    if code:
        print(text[-6000:], file=sys.stderr, flush=True)
    elif options.keep and how == "atheris":
        _keep(name, folder)
    return int(code != 0)


def _child(name: str, how: str, options: argparse.Namespace, folder: Path) -> tuple[int, str]:
    given = [
        "--seconds",
        str(options.seconds),
        "--runs",
        str(options.runs),
        "--seed",
        str(options.seed),
    ]
    command = [sys.executable, "-m", "tests.fuzz", name, "--child", how, *given]
    with (folder / f"{how}.log").open("w+") as log:
        done = subprocess.run(command, stdout=log, stderr=log, check=False)
        log.seek(0)
        return done.returncode, log.read()


def _summary(name: str, text: str, code: int) -> str:
    def last(pattern: str) -> int:
        found = re.findall(pattern, text)
        return int(found[-1]) if found else 0

    inputs, rss = last(r"number_of_executed_units: (\d+)"), last(r"peak_rss_mb: +(\d+)")
    per_s = last(r"average_exec_per_sec: +(\d+)")
    covered, kept = last(r" cov: (\d+)"), last(r" corp: (\d+)")
    figures: dict[str, Any] = {
        "target": name,
        "inputs": inputs,
        "per_s": per_s,
        "covered": covered,
        "corpus": kept,
        "rss_mb": rss,
    }
    return json.dumps({**figures, "failed": bool(code)})


def _keep(name: str, folder: Path) -> None:
    """Keeps the smallest inputs: those that libFuzzer kept for their coverage, reduced, and the
    earlier ones.
    """
    from tests.fuzz.engine import read_corpus, write_corpus

    found = {
        path.read_bytes()
        for path in (folder / "corpus").iterdir()
        if not path.name.startswith("seed-")
    }
    kept, size = [], 0
    for content in sorted(found | set(read_corpus(name)), key=len):
        size += len(content)
        if size <= KEPT_BYTES_MAX:
            kept.append(content)
    write_corpus(name, kept)


def _seeded(options: argparse.Namespace) -> int:
    from tests.fuzz.engine import run_seeded
    from tests.fuzz.targets import TARGETS

    runs = options.runs if options.runs >= 0 else sys.maxsize
    report = run_seeded(
        TARGETS[options.target],
        runs,
        options.seed,
        options.seconds if options.runs < 0 else float("inf"),
    )
    print(json.dumps(report))
    return 0


def _guided(options: argparse.Namespace) -> int:
    """Does not return: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["aioflow"]):
        from tests.fuzz.engine import MEMORY_EVERY, judge, mutate, read_corpus
        from tests.fuzz.targets import TARGETS

        target = TARGETS[options.target]
        seeds = [*target.seeds(), *read_corpus(target.name)]
        opened = target.open()
        run = opened.__enter__()  # As long as the process lives.
        for content in seeds:
            judge(target, run, content)
    folder = BUILD / target.name
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, content in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(content)
    done = 0

    def one(content: bytes) -> None:
        nonlocal done
        done += 1
        judge(target, run, content, memory=done % MEMORY_EVERY == 0)

    def other(content: bytes, size_max: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.random() < 0.4:
            made: bytes = atheris.Mutate(content, size_max)
            return (
                target.mend(made, rng)[:size_max]
                if target.mend is not None and rng.random() < 0.5
                else made
            )
        return mutate(content, rng, seeds, target)[:size_max]

    argv = [
        sys.argv[0],
        f"-max_len={target.bytes_max}",
        f"-rss_limit_mb={RSS_MB_MAX}",
        f"-artifact_prefix={folder}/",
    ]
    argv.append("-print_final_stats=1")
    limit = f"-runs={options.runs}" if options.runs >= 0 else f"-max_total_time={options.seconds}"
    argv += [limit, f"-seed={options.seed}", "-len_control=0", str(corpus)]
    gc.freeze()
    atheris.Setup(argv, one, custom_mutator=other)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
