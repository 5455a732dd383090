"""What Python's garbage collector costs a flow inside a service that holds many objects.

    python benchmarks/bench_collector.py [--objects 5000000] [--records 10000000] [--rounds 3]

W2 (count and sum of windows) runs beside a list of small lists, which Python's full collections
walk. `python` is the collector as Python sets it, `tuned` as `af.tune_gc` does, `off` is the limit:
no collection at all. All three take their turn in each round. Rates are by CPU time, and ratios are
those to `python` of the same round.

Python collects fully once the survivors of younger collections are a quarter of all objects. With
fewer records there is no such collection beside millions of objects, and no difference but that of
the young ones. `collected_ms` is the CPU time of all collections of a run, and `longest_ms` that of
the longest one, for which the event loop stands still.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from time import process_time
from typing import Any

import aioflow as af
from benchmarks import flows
from benchmarks.bench_throughput import environment, loop_factory, print_rows
from benchmarks.workloads import make_events

SETTINGS = ("python", "tuned", "off")


class Pauses:
    """The CPU times of the collections of a run."""

    def __init__(self) -> None:
        self.seconds = [0.0]
        self._begun = 0.0

    def hear(self, phase: str, info: dict[str, int]) -> None:
        """A collection begins (`phase` is "start") or has ended."""
        if phase == "start":
            self._begun = process_time()
        else:
            self.seconds.append(process_time() - self._begun)


@contextmanager
def collecting(setting: str) -> Iterator[None]:
    """Sets the collector inside the block."""
    before, callbacks = gc.get_threshold(), list(gc.callbacks)
    gc.collect()
    if setting == "tuned":
        af.tune_gc()
    elif setting == "off":
        gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.callbacks[:] = callbacks
        gc.set_threshold(*before)
        gc.unfreeze()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--objects", type=int, default=5_000_000)
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    events = make_events()
    gc.disable()  # Otherwise the list itself is walked again and again while it grows.
    held = [[i] for i in range(options.objects)]
    gc.enable()
    rates: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    pauses: dict[str, list[Pauses]] = {setting: [] for setting in SETTINGS}
    sums = set()
    for _ in range(options.rounds):
        for setting in SETTINGS:
            summed, paused = flows.Summed(), Pauses()
            with (
                collecting(setting),
                asyncio.Runner(loop_factory=loop_factory("uvloop")) as runner,
            ):
                gc.callbacks.append(paused.hear)
                begun = process_time()
                runner.run(flows.w2(events, options.records, summed).execute())
                rates[setting].append(options.records / (process_time() - begun))
            pauses[setting].append(paused)
            sums.add(summed.result)
    if len(sums) != 1:
        raise SystemExit(f"the settings give different results: {sums}")
    rows = [
        {
            "collector": setting,
            "records_per_cpu_s": round(median(rates[setting])),
            "ratio": round(
                median(a / b for a, b in zip(rates[setting], rates["python"], strict=True)), 2
            ),
            "collected_ms": _median_ms(sum(one.seconds) for one in pauses[setting]),
            "longest_ms": _median_ms(max(one.seconds) for one in pauses[setting]),
        }
        for setting in SETTINGS
    ]
    report = {**environment(), "objects": len(held), "rounds": options.rounds, "collectors": rows}
    print_rows(rows, list(rows[0]))
    print(json.dumps(report))
    return report


def _median_ms(seconds: Iterable[float]) -> float:
    return round(median(seconds) * 1e3, 1)


if __name__ == "__main__":
    main(sys.argv[1:])
