"""The parts that the Python programs share: arguments, and the meter that a sink drives."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, process_time
from typing import Any

__all__ = ["WARM_UP", "Arguments", "Meter", "arguments", "peak_mb", "percentiles", "rates", "tell"]

WARM_UP = 0.3
"""The share of the latencies that does not count."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a program."""

    workload: str
    data: Path
    records: int = 0
    outputs: int = 0
    """How many outputs are expected."""
    parallelism: int = 1
    rate: int = 0
    seconds: int = 0
    every_s: float = 0.0
    """Seconds between two checkpoints; 0: none."""


def arguments() -> Arguments:
    given: dict[str, Any] = dict(argument.split("=", 1) for argument in sys.argv[1:])
    kinds: dict[str, Any] = {"workload": str, "data": Path, "every_s": float}
    return Arguments(**{name: kinds.get(name, int)(value) for name, value in given.items()})


class Meter:
    """Counts the outputs of one subtask from its opening on."""

    __slots__ = ("begun", "checksum", "last_at", "outputs")

    def __init__(self) -> None:
        self.outputs = self.checksum = 0
        self.last_at = 0.0
        self.begin()

    def begin(self) -> None:
        """Begins to measure: where sources and sinks open, so that the start does not count."""
        self.begun = (monotonic(), process_time())

    def count(self, outputs: int, checksum: int) -> None:
        self.outputs += outputs
        self.checksum += checksum
        self.last_at = monotonic()

    def told(self) -> dict[str, Any]:
        """Plain data. To be called right after the last output."""
        return {
            "outputs": self.outputs,
            "checksum": self.checksum,
            "begun": self.begun,
            "last": (self.last_at, process_time()),
        }


def rates(told: list[dict[str, Any]], records: int) -> dict[str, Any]:
    """The figures of all subtasks, each in a process of its own.

    The time is that from the first opening to the last output of any subtask: all processes of a
    machine share the clock. A sum of rates of subtasks that work at different times would be too
    high, and so would a rate from some output on, if most outputs come at the end.
    """
    begun = min((one["begun"][0] for one in told), default=0.0)
    last = max((one["last"][0] for one in told), default=0.0)
    cpu = sum(one["last"][1] - one["begun"][1] for one in told)
    return {
        "outputs": sum(one["outputs"] for one in told),
        "checksum": sum(one["checksum"] for one in told),
        "steady_per_s": round(records / max(last - begun, 1e-9)),
        "steady_per_cpu_s": round(records / max(cpu, 1e-9)),
        "peak_mb": round(sum(one.get("peak_mb", 0.0) for one in told)),
    }


def percentiles(subtasks: list[list[float]]) -> dict[str, Any]:
    """Latencies of each subtask in order of arrival, in s: percentiles of all in ms.

    The first 30 % do not count.
    """
    counted = sorted(age for ages in subtasks for age in ages[int(len(ages) * WARM_UP) :])
    picked = {
        f"p{p}_ms": round(counted[min(len(counted) - 1, len(counted) * p // 100)] * 1e3, 3)
        for p in (50, 90, 99)
    }
    return {**picked, "max_ms": round(counted[-1] * 1e3, 3), "outputs": sum(map(len, subtasks))}


def peak_mb() -> float:
    """Returns the peak memory of this process so far."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def tell(answer: dict[str, Any]) -> None:
    print(json.dumps(answer))
