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
"""The share of the outputs that does not count."""


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
    """Counts the outputs of one subtask, and marks where the warm-up was over."""

    __slots__ = ("checksum", "last_at", "mark", "mark_at", "outputs")

    def __init__(self, expected: int) -> None:
        self.outputs = self.checksum = 0
        self.mark_at = int(expected * WARM_UP)
        self.mark: tuple[int, float, float] | None = None
        self.last_at = 0.0

    def begin(self) -> None:
        """Count from here on.

        An engine that has no warm-up, and would else be measured by one burst, calls it before the
        first record.
        """
        self.mark = (self.outputs, monotonic(), process_time())

    def count(self, outputs: int, checksum: int) -> None:
        self.outputs += outputs
        self.checksum += checksum
        self.last_at = monotonic()
        if self.mark is None and self.outputs >= self.mark_at:
            # Only here and at the end: on a virtual machine, asking for the CPU time may be a
            # thousand times dearer than the clock.
            self.begin()

    def told(self) -> dict[str, Any]:
        """Plain data. To be called right after the last output."""
        last = (self.outputs, self.last_at, process_time())
        return {
            "outputs": self.outputs,
            "checksum": self.checksum,
            "mark": self.mark or last,
            "last": last,
        }


def rates(told: list[dict[str, Any]], records: int) -> dict[str, Any]:
    """The figures of all subtasks, each in a process of its own."""
    outputs = sum(one["outputs"] for one in told)
    by_clock = by_cpu = cpu = 0.0
    for one in told:
        (begun, at, cpu_at), (ended, to, cpu_to) = one["mark"], one["last"]
        by_clock += (ended - begun) / max(to - at, 1e-9)
        by_cpu += ended - begun
        cpu += cpu_to - cpu_at
    each = records / max(outputs, 1)
    return {
        "outputs": outputs,
        "checksum": sum(one["checksum"] for one in told),
        "steady_per_s": round(by_clock * each),
        "steady_per_cpu_s": round(by_cpu / max(cpu, 1e-9) * each),
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
