"""What Python's garbage collector costs a flow inside a service that holds many objects.

    python benchmarks/bench_collector.py [--objects 5000000] [--records 2000000] [--rounds 5]

W2 (count and sum of windows) runs beside a list of small lists, which Python's full collections
walk. `python` is the collector as Python sets it, `tuned` as `af.tune_gc` does, `off` is the limit:
no collection at all. All three take their turn in each round. Rates are by CPU time, and ratios are
those to `python` of the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import process_time
from typing import Any

import aioflow as af
from benchmarks import flows
from benchmarks.bench_throughput import environment, loop_factory, print_rows
from benchmarks.workloads import make_events

SETTINGS = ("python", "tuned", "off")


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
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    events = make_events()
    gc.disable()  # Otherwise the list itself is walked again and again while it grows.
    held = [[i] for i in range(options.objects)]
    gc.enable()
    rates: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    sums = set()
    for _ in range(options.rounds):
        for setting in SETTINGS:
            summed = flows.Summed()
            with (
                collecting(setting),
                asyncio.Runner(loop_factory=loop_factory("uvloop")) as runner,
            ):
                begun = process_time()
                runner.run(flows.w2(events, options.records, summed).execute())
                rates[setting].append(options.records / (process_time() - begun))
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
        }
        for setting in SETTINGS
    ]
    report = {**environment(), "objects": len(held), "rounds": options.rounds, "collectors": rows}
    print_rows(rows, ["collector", "records_per_cpu_s", "ratio"])
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
