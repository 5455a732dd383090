"""The engines that `bench_engines` compares: where each is, what it can do, and how its program
is started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.workloads import Result

__all__ = ["ENGINES", "TIMED", "WORKLOADS", "Engine", "Missing", "WrongAnswer", "check", "run"]

ROOT = Path(__file__).parents[1]
PEERS = Path(os.environ.get("BENCH_PEERS", ROOT / ".venv-peers"))
"""A virtual environment with the other engines: `make peers`.

What is not there is left out, and said.
"""

WORKLOADS = {
    "w1": "running count of each word",
    "w2": "count and sum of each user in 10 s",
    "w3": "map, filter, map, flat_map",
    "w4": "most frequent word of 10 s, every 2 s",
    "w6": "w1 with a checkpoint each second",
    "w1json": "w1 from JSON lines",
    "w2json": "w2 from JSON lines",
    "w5": "latency over a keyed exchange",
}


class Missing(Exception):
    """The engine is not installed; what is missing."""


class WrongAnswer(SystemExit):
    """A program gave something else than the bare loop."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One row of the table."""

    name: str
    program: str
    parallelism: int = 1
    workloads: Sequence[str] = tuple(WORKLOADS)
    share: float = 1.0
    """Share of the requested records: a slow engine gets fewer, one with a long warm-up more."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """The same for single workloads."""
    extra: tuple[str, ...] = ()

    def records(self, workload: str, asked: int) -> int:
        return max(1_000, int(asked * self.shares.get(workload, self.share)) // 1_000 * 1_000)

    def command(self, data: Path) -> list[str]:
        """Returns the command that starts its program. Raises Missing."""
        match self.program:
            case "flink":
                return _flink(data)
            case "bytewax":
                python = PEERS / "bin" / "python"
                if not list(PEERS.glob("lib/python*/site-packages/bytewax")):
                    raise Missing(f"bytewax is not in {PEERS}: make peers")
                return [str(python), "-m", "benchmarks.peers.bytewax_rows"]
            case "aioflow_columns":
                if find_spec("numpy") is None or find_spec("pyarrow") is None:
                    raise Missing("the extra [columns] is not installed")
        return [sys.executable, "-m", f"benchmarks.peers.{self.program}"]


TIMED = ("w1", "w2", "w3", "w4", "w6", "w1json", "w2json")

JSON_SHARES = {"w1json": 8.0, "w2json": 8.0}
"""Shares as for Flink: both read the same file, which is long enough for two readers."""
COLUMN_SHARES = {"w3": 64.0, **JSON_SHARES}
"""Shares for columns, which keep two processors busy for some seconds after the warm-up."""

ENGINES = [
    Engine("bare loop", "bare_loop", workloads=[name for name in TIMED if name != "w6"]),
    Engine("aioflow rows, workers=2", "aioflow_rows", parallelism=2, shares=JSON_SHARES),
    Engine("aioflow rows, one process", "aioflow_rows", shares=JSON_SHARES),
    Engine(
        "aioflow columns, workers=2",
        "aioflow_columns",
        parallelism=2,
        workloads=TIMED,
        share=16.0,
        shares=COLUMN_SHARES,
    ),
    Engine(
        "aioflow columns, one process",
        "aioflow_columns",
        workloads=TIMED,
        share=16.0,
        shares=COLUMN_SHARES,
    ),
    Engine(
        "Flink Java, p=2",
        "flink",
        parallelism=2,
        share=16.0,
        shares={"w4": 4.0, **JSON_SHARES},
    ),
    Engine(
        "Flink Java, p=2, object reuse",
        "flink",
        parallelism=2,
        workloads=["w1", "w2", "w3", "w4"],
        share=16.0,
        shares={"w4": 4.0},
        extra=("reuse=true",),
    ),
    Engine(
        "Flink Java, p=2, buffer timeout 0",
        "flink",
        parallelism=2,
        workloads=["w5"],
        extra=("buffer_ms=0",),
    ),
    Engine(
        "Bytewax, one worker",
        "bytewax",
        workloads=["w1", "w2", "w3"],
        share=0.5,
        shares={"w2": 0.06},
    ),
]


def _environment(data: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "AIOFLOW_BENCHMARK_DATA": str(data)}


def run(engine: Engine, data: Path, timeout_s: float, **arguments: Any) -> dict[str, Any]:
    """Returns the report of the program. Raises Missing, and SystemExit where it fails."""
    given = [f"{name}={value}" for name, value in arguments.items()]
    command = [
        *engine.command(data),
        *given,
        f"data={data}",
        f"parallelism={engine.parallelism}",
        *engine.extra,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=_environment(data),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(
            f"{engine.name} failed ({' '.join(given)}):\n{done.stdout[-1000:]}\n"
            f"{done.stderr[-3000:]}"
        )
    told: dict[str, Any] = json.loads(lines[-1])
    return told


def check(
    engine: Engine, workload: str, records: int, told: dict[str, Any], expected: Result
) -> None:
    """Raises WrongAnswer."""
    got = (told["outputs"], told["checksum"])
    if got != expected:
        raise WrongAnswer(
            f"{engine.name}, {workload} of {records} records: (outputs, checksum) is {got}, "
            f"expected {expected}"
        )


def _flink(data: Path) -> list[str]:
    jars = next(iter(PEERS.glob("lib/python*/site-packages/pyflink/lib")), None)
    if jars is None:
        raise Missing(f"apache-flink-libraries is not in {PEERS}: make peers")
    path = ":".join(
        str(jar)
        for pattern in ("flink-dist-*", "flink-connector-files-*", "log4j*")
        for jar in sorted(jars.glob(pattern))
    )
    classes = data / "classes"
    source = Path(__file__).parent / "peers" / "Flink.java"
    if (
        not (classes / "Flink.class").exists()
        or (classes / "Flink.class").stat().st_mtime < source.stat().st_mtime
    ):
        classes.mkdir(parents=True, exist_ok=True)
        try:
            done = subprocess.run(
                ["javac", "-nowarn", "-cp", path, "-d", classes, source],
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError:
            raise Missing("there is no javac (JDK 17)") from None
        if done.returncode:
            raise SystemExit(f"Flink.java does not compile:\n{done.stderr}")
    opens = [
        f"--add-opens=java.base/java.{package}=ALL-UNNAMED" for package in ("util", "lang", "time")
    ]
    return ["java", "-Xmx4g", *opens, "-cp", f"{classes}:{path}", "Flink"]
