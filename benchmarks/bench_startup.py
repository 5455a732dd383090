"""The cost of a small flow before its first result: import, first result, memory.

Each run is a fresh process.

    python benchmarks/bench_startup.py [--rounds 5]

Absolute times, so the machine should be idle; the best of the rounds counts, and `python -c pass`
stands beside it as calibration. Bytecode is compiled before the first round, as it is in an
installed package, into a directory of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from time import perf_counter
from typing import Any

from benchmarks.bench_throughput import environment, print_rows

GOALS = {
    "import aioflow": 0.15,
    "import and build": 0.3,
    "process to first result": 0.3,
    "run to first result": 0.05,
    "peak memory": 80.0,
}
"""Seconds, and MB; the import and the memory are promises, the others what they leave room for."""

# perf_counter is the system's monotonic clock, so a child's readings compare with the parent's.
PROGRAM = """
from time import perf_counter
started = perf_counter()
import aioflow as af
imported = perf_counter()
import asyncio, json, re
first = []
flow = af.Flow("small")
words = flow.source([f"w{i % 10}" for i in range(100)])
counts = words.map(str.upper).key_by(lambda w: w).count()
counts.sink(lambda row: first or first.append(perf_counter()))
built = perf_counter()
async def main():
    begun = perf_counter()
    await flow.execute()
    return begun
begun = asyncio.run(main())
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())
times = {"import": imported - started, "build": built - started}
times |= {"run": first[0] - begun, "first": first[0]}
print(json.dumps({**times, "peak_kb": int(peak[1])}))
"""


def run_once(bytecode: str) -> dict[str, float]:
    """Runs one process that finds its bytecode in the directory `bytecode`; returns seconds and
    MB.
    """
    environ = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    environ["PYTHONPYCACHEPREFIX"] = bytecode
    begun = perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True, env=environ)
    python = perf_counter() - begun
    begun = perf_counter()
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, env=environ
    )
    told = json.loads(child.stdout)
    return {
        "python -c pass": python,
        "import aioflow": told["import"],
        "import and build": told["build"],
        "run to first result": told["run"],
        "process to first result": told["first"] - begun,
        "peak memory": told["peak_kb"] / 1024,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as bytecode:
        run_once(bytecode)
        runs = [run_once(bytecode) for _ in range(options.rounds)]
    rows = []
    for name in runs[0]:
        figures = sorted(run[name] for run in runs)
        rows.append({
            "what": name,
            "best": round(figures[0], 4),
            "spread": [round(figures[0], 4), round(figures[-1], 4)],
            "unit": "MB" if name == "peak memory" else "s",
            "goal": GOALS.get(name),
        })  # fmt: skip
    report = {
        **environment(),
        "unit": "s, MB; best of the rounds [least, greatest]",
        "rounds": options.rounds,
        "startup": rows,
    }
    print_rows(rows, ["what", "best", "spread", "unit", "goal"])
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
