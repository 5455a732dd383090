"""The CPU time of the workloads by function: a statistical profile of the worker processes.

    python -m benchmarks.profiles [--only w1 w2] [--forms rows columns] [--records 2000000]
                                  [--py-spy PATH] [--out build/bench]

Runs the programs of `bench_engines` with two workers under py-spy (`pip install py-spy`), which
looks 200 times a second at what their threads do, and costs them a few hundredths. What a function
calls in C, in numpy or in the standard library counts as its own. What waits, what loads the flow,
and the process that only submits are left out. A table by stage for docs/benchmarks.md, and all
functions as JSON in `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.bench_throughput import environment
from benchmarks.engines import ROOT
from benchmarks.peers.pools import write_json, write_pools

__all__ = ["main", "shares"]

PROGRAMS = {"rows": "aioflow_rows", "columns": "aioflow_columns"}
WORKLOADS = ("w1", "w2", "w3", "w4", "w1json", "w2json")
RATE_HZ = 200
TOP = 3
"""Functions that are named."""

OUTSIDE = "the event loop"
"""Code outside of the project that runs the loop: uvloop, and the threads of asyncio."""
RUNS_LOOP = (("main", "worker"), ("<module>", "worker_program"))

STAGES: dict[str, tuple[str, ...]] = {
    "make, read": (
        "io/",
        "columns/pages",
        "columns/growing",
        *(f"peers/aioflow_rows.{name}" for name in ("word", "event", "bid")),
    ),
    "route": ("<aioflow routing loop>", "task/partitioners", "columns/keys", "core/keygroups"),
    "to and from bytes": (
        "core/serializers",
        "core/batch_codec",
        "core/tagging",
        "core/type_registry",
        "core/column_codec",
        "core/entry",
    ),
    "send, receive": ("network/", "protocol/", "core/system_network", "core/system_host", OUTSIDE),
    "functions, state": (
        "<aioflow",
        "operators/",
        "columns/",
        "state/",
        "core/expression",
        "core/column_batch",
        "core/numpy",
    ),
    "sink": ("peers/",),
}
"""The first whose beginning fits takes a function; the loop of the task, the mailbox and what is
left are the last column.
"""
REST = "tasks, the rest"

FRAME = re.compile(r"(.*) \((.*?)(?::\d+)?\)$")
PROCESS = "process "
"""How the frame of a process begins: a worker's follows that of the process that submits."""
WAITING = (
    "select (selectors.py",
    "wait (threading.py",
    "_worker (",
    "Pulse._run (",
    "_end_with_parent (",
)
"""Functions of a waiting thread, though the machine may count it as running."""
STARTING = ("<frozen importlib", "open_job (")
"""Functions that load the flow, and freeze it for the collector."""


def shares(stacks: str) -> dict[str, float]:
    """The share of each function in the samples of the workers, greatest first.

    `stacks`: py-spy's raw format.
    """
    counts: Counter[str] = Counter()
    for line in stacks.splitlines():
        path, _, count = line.rpartition(" ")
        frames = path.split(";")
        if path.count(PROCESS) < 2 or any(what in path for what in STARTING):
            continue
        if not any(what in frames[-1] for what in WAITING):
            counts[_innermost(frames)] += int(count)
    total = counts.total()
    return {name: count / total for name, count in counts.most_common()}


def _innermost(frames: list[str]) -> str:
    """Returns the function of this project that a thread runs, otherwise `OUTSIDE`."""
    for frame in reversed(frames):
        found = FRAME.match(frame)
        if found is not None:
            function, file = found.groups()
            if file.startswith("<aioflow"):
                return f"{file}.{function}"
            for part in ("aioflow/", "benchmarks/"):
                if part in file and (function, Path(file).stem) not in RUNS_LOOP:
                    return f"{file.split(part)[-1].removesuffix('.py')}.{function}"
    return OUTSIDE


def profile(
    py_spy: str, program: str, workload: str, options: argparse.Namespace
) -> dict[str, float]:
    """Runs one program to its end."""
    raw = options.out / f"{program}-{workload}.raw"
    given = [
        f"workload={workload}",
        f"records={options.records}",
        "outputs=1",
        f"data={options.data}",
        "parallelism=2",
    ]
    watched = [sys.executable, "-m", f"benchmarks.peers.{program}", *given]
    command = [
        py_spy,
        "record",
        "--subprocesses",
        "--format",
        "raw",
        "--rate",
        str(RATE_HZ),
        "--output",
        str(raw),
        "--",
        *watched,
    ]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "AIOFLOW_BENCHMARK_DATA": str(options.data)}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=options.timeout,
        check=False,
    )
    if done.returncode or not raw.exists():
        raise SystemExit(
            f"{' '.join(command)} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        )
    return shares(raw.read_text())


def stages(found: dict[str, float]) -> dict[str, float]:
    """The shares of the stages."""
    sums = dict.fromkeys([*STAGES, REST], 0.0)
    for name, share in found.items():
        sums[
            next((stage for stage, begins in STAGES.items() if name.startswith(begins)), REST)
        ] += share
    return sums


def line(form: str, workload: str, found: dict[str, float]) -> str:
    """Returns one row of the table."""
    told = [f"`{name}` {share:.0%}" for name, share in list(found.items())[:TOP]]
    return (
        f"| {form} {workload} | {' | '.join(f'{share:.0%}' for share in stages(found).values())} "
        f"| {', '.join(told)} |"
    )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--forms", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--py-spy", default=shutil.which("py-spy"), help="the program")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(arguments)
    if options.py_spy is None:
        raise SystemExit("there is no py-spy: pip install py-spy, or say where with --py-spy")
    options.out.mkdir(parents=True, exist_ok=True)
    options.data = (options.out / "data").resolve()
    write_pools(options.data)
    lines, found = (
        [
            f"| | {' | '.join([*STAGES, REST])} | most of all |",
            "| --- |" + " ---: |" * (len(STAGES) + 1) + " --- |",
        ],
        {},
    )
    for form in options.forms:
        for workload in options.only:
            if workload.endswith("json"):
                write_json(options.data, workload, options.records)
            made = found[f"{form} {workload}"] = profile(
                options.py_spy, PROGRAMS[form], workload, options
            )
            lines.append(line(form, workload, made))
            print(lines[-1], flush=True)
    report = {
        **environment(),
        "unit": "share of the samples of the workers",
        "records": options.records,
        "profiles": found,
    }
    (options.out / "profiles.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "profiles.md").write_text("\n".join(lines) + "\n")
    return report


if __name__ == "__main__":
    main()
