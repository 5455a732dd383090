"""What a record costs as the work grows: more keys, longer chains, more channels, more tasks in one loop, larger batches.

    python benchmarks/bench_scaling.py [--records 300000] [--rounds 3] [--only keys chain]

CPU nanoseconds a record, the best of the rounds, on uvloop. A curve should be flat, or its slope should be explained in README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from time import process_time
from typing import Any

import aioflow as af
from aioflow.task.environment import TaskOptions
from benchmarks.bench_throughput import environment, loop_factory, print_rows

Made = tuple[af.Flow, dict[str, Any]]
"""A flow and the options of its run."""


def ignore(_row: Any) -> None:
    """The sink of all flows here."""


def keys(n: int, size: int) -> Made:
    """Running count of `size` keys, each met equally often in an order without locality."""
    flow = af.Flow("keys")
    flow.source(af.io.datagen(lambda i: i * 2654435761 % size, count=n)).key_by(lambda x: x).count().sink(ignore)
    return flow, {}


def chain(n: int, size: int) -> Made:
    """`size` maps in a row, fused."""
    flow = af.Flow("chain")
    source = flow.source(af.io.datagen(lambda i: i, count=n))
    reduce(lambda stream, _: stream.map(lambda x: x + 1), range(size), source).sink(ignore)
    return flow, {}


def unfused(n: int, size: int) -> Made:
    """`size` tasks in a row, each one map behind an exchange: what a chain saves."""
    flow = af.Flow("unfused")
    source = flow.source(af.io.datagen(lambda i: i, count=n))
    reduce(lambda stream, _: stream.map(lambda x: x + 1).start_new_chain(), range(size), source).sink(ignore)
    return flow, {}


def channels(n: int, size: int) -> Made:
    """One source, `size` keyed consumers in one loop."""
    flow = af.Flow("channels", parallelism=size)
    source = flow.source(af.io.datagen(lambda i: i, count=n), parallelism=1)
    source.key_by(lambda x: x % 10_000).count().sink(ignore)
    return flow, {}


def batches(n: int, size: int) -> Made:
    """Running count at batches of at most `size` records: what a batch costs, whatever is in it."""
    flow = af.Flow("batches")
    flow.source(af.io.datagen(lambda i: i % 10_000, count=n)).key_by(lambda x: x).count().sink(ignore)
    return flow, {"tasks": replace(TaskOptions(), batch_records_max=size)}


CURVES: dict[str, tuple[Callable[[int, int], Made], list[int]]] = {
    "keys": (keys, [1_000, 10_000, 100_000, 300_000]),
    "chain": (chain, [1, 5, 10, 50]),
    "unfused": (unfused, [1, 5, 10, 50]),
    "channels": (channels, [1, 2, 4, 16, 64]),
    "batches": (batches, [1, 16, 64, 256, 1024]),
}
"""Flow by (records, size), and the sizes."""


def cost_ns(made: Made, n: int) -> float:
    """CPU nanoseconds a record of one run, from its start to its end."""
    flow, options = made

    async def execute() -> float:
        begun = process_time()
        await flow.execute(**options)
        return process_time() - begun

    with asyncio.Runner(loop_factory=loop_factory("uvloop")) as runner:
        return runner.run(execute()) / n * 1e9


def curve(name: str, n: int, rounds: int, sizes: list[int] | None = None) -> list[dict[str, Any]]:
    """One row for each size; the sizes alternate from round to round."""
    make, usual = CURVES[name]
    costs: dict[int, list[float]] = {size: [] for size in sizes or usual}
    for _ in range(rounds):
        for size, measured in costs.items():
            measured.append(cost_ns(make(n, size), n))
    rows = []
    for size, measured in costs.items():
        least, greatest = round(min(measured)), round(max(measured))
        rows.append({"curve": name, "size": size, "ns_per_record": least, "spread": [least, greatest]})
    return rows


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=list(CURVES), choices=list(CURVES))
    options = parser.parse_args(arguments)
    rows = [row for name in options.only for row in curve(name, options.records, options.rounds)]
    report = {**environment(), "unit": "CPU ns a record; best of the rounds [least, greatest]", "records": options.records, "scaling": rows}
    print_rows(rows, ["curve", "size", "ns_per_record", "spread"])
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
