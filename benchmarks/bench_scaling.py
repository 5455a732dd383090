"""The cost of a record as the work grows: more keys, longer chains, more channels, more tasks in
one loop, larger batches and records, windows of more slices.

    python benchmarks/bench_scaling.py [--records 300000] [--rounds 3] [--only keys chain] [--large]
                                       [--out build/bench]

CPU nanoseconds a record, the best of the rounds, on uvloop; JSON, and a plot of each curve in
--out. A curve should be flat, or its slope should be explained in README.md. --large adds the ends
that take minutes and gigabytes: ten million keys.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from time import process_time
from typing import Any

import aioflow as af
from aioflow.core.elements import RecordBatch
from aioflow.core.wire.batch import decode_batch, encode_batch
from aioflow.core.wire.serializers import Codec
from aioflow.task.environment import TaskOptions
from benchmarks import plots
from benchmarks.bench_throughput import environment, loop_factory, print_rows

Made = tuple[af.Flow, dict[str, Any]]
"""A flow and the options of its run."""

BYTES_MAX = 64_000_000
"""Maximum bytes of all records of a run about their size."""


def ignore(_row: Any) -> None:
    """The sink of all flows here."""


def keys(n: int, size: int) -> Made:
    """Running count of `size` keys, each met equally often in an order without locality."""
    flow = af.Flow("keys")
    flow.source(af.io.datagen(lambda i: i * 2654435761 % size, count=n)).key_by(
        lambda x: x
    ).count().sink(ignore)
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
    reduce(
        lambda stream, _: stream.map(lambda x: x + 1).start_new_chain(), range(size), source
    ).sink(ignore)
    return flow, {}


def channels(n: int, size: int) -> Made:
    """One source, `size` keyed consumers in one loop."""
    flow = af.Flow("channels", parallelism=size)
    source = flow.source(af.io.datagen(lambda i: i, count=n), parallelism=1)
    source.key_by(lambda x: x % 10_000).count().sink(ignore)
    return flow, {}


def tasks(n: int, size: int) -> Made:
    """`size` tasks in one loop, each a source with a map and a sink that share the records among
    them.
    """
    flow = af.Flow("tasks", parallelism=size, max_parallelism=max(128, size))
    flow.source(af.io.datagen(lambda i: i, count=n, splits=size)).map(lambda x: x + 1).sink(ignore)
    return flow, {}


def record_bytes(n: int, size: int) -> Made:
    """Records of `size` bytes over a keyed exchange in one process, which hands them on and
    copies nothing.
    """
    flow = af.Flow("bytes")
    flow.source(af.io.datagen(lambda i: bytes(size), count=n)).key_by(len).count().sink(ignore)
    return flow, {}


def wire_ns(n: int, size: int) -> float:
    """Writing and reading batches of records of `size` bytes as frames between processes hold
    them: as many as fit into 32 KiB, or one.
    """
    codec = Codec()
    a_batch = max(1, min(1024, 32_768 // size))
    batch = RecordBatch([bytes(size)] * a_batch)
    begun = process_time()
    for _ in range(max(1, n // a_batch)):
        decode_batch(encode_batch(batch, codec, "scaling"), codec, "scaling")
    return (process_time() - begun) / (max(1, n // a_batch) * a_batch) * 1e9


def batches(n: int, size: int) -> Made:
    """Running count at batches of at most `size` records: the cost of a batch with any content."""
    flow = af.Flow("batches")
    flow.source(af.io.datagen(lambda i: i % 10_000, count=n)).key_by(lambda x: x).count().sink(
        ignore
    )
    return flow, {"tasks": replace(TaskOptions(), batch_records_max=size)}


SLIDE_MS = 1_000
SLICE_KEYS = 2_000


def slices(n: int, size: int) -> Made:
    """Windows of `size` slices, each of which has a record of all keys.

    The cost is that of a result: they are more.
    """
    flow = af.Flow("slices")
    times: Any = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda row: row[1])
    events = flow.source(
        af.io.datagen(lambda i: (i % SLICE_KEYS, i // SLICE_KEYS * SLIDE_MS), count=n),
        watermarks=times,
    )
    windows = events.key_by(lambda row: row[0]).window(
        af.sliding(f"{size * SLIDE_MS}ms", f"{SLIDE_MS}ms")
    )
    windows.aggregate(af.agg(n=af.count(), last=af.max(lambda row: row[1]))).sink(ignore)
    return flow, {}


CURVES: dict[str, tuple[Callable[[int, int], Any], list[int]]] = {
    "keys": (keys, [1_000, 10_000, 100_000, 1_000_000]),
    "chain": (chain, [1, 5, 10, 50]),
    "unfused": (unfused, [1, 5, 10, 50]),
    "channels": (channels, [1, 2, 4, 16, 64]),
    "tasks": (tasks, [1, 10, 100, 1_000]),
    "batches": (batches, [1, 16, 64, 256, 1024]),
    "bytes": (record_bytes, [10, 1_000, 100_000, 1_000_000]),
    "slices": (slices, [1, 6, 60, 600]),
    "wire": (wire_ns, [10, 100, 1_000, 10_000, 100_000, 1_000_000]),
}
"""Flow (or cost) by (records, size), and the sizes."""

LARGE = {"keys": [10_000_000]}
ACROSS = {
    "keys": "keys",
    "slices": "slices a window",
    "batches": "records a batch",
    "bytes": "bytes a record",
    "wire": "bytes a record",
}
"""Curve -> the meaning of its sizes; for the other curves, the number of the things they are named
after.
"""


def records_of(name: str, n: int, size: int) -> int:
    """Each key is met three times at least, each task has a thousand records; large records are
    few.
    """
    if name == "keys":
        return max(n, 3 * size)
    if name == "tasks":
        return max(n, 1_000 * size)
    return max(1, min(n, BYTES_MAX // size)) if name in ("bytes", "wire") else n


def counted(name: str, n: int, size: int) -> int:
    """Returns the number that shares the cost: of records, or of results for windows."""
    return n + (size - 1) * min(n, SLICE_KEYS) if name == "slices" else n


def cost_ns(name: str, n: int, size: int) -> float:
    """CPU nanoseconds a record of one run, from its start to its end."""
    make = CURVES[name][0]
    return (
        wire_ns(n, size) if make is wire_ns else cpu_s(make(n, size)) / counted(name, n, size) * 1e9
    )


def cpu_s(made: Made) -> float:
    """Returns the CPU seconds of one run, from its start to its end."""
    flow, options = made

    async def execute() -> float:
        begun = process_time()
        await flow.execute(**options)
        return process_time() - begun

    with asyncio.Runner(loop_factory=loop_factory("uvloop")) as runner:
        return runner.run(execute())


def curve(name: str, n: int, rounds: int, sizes: list[int] | None = None) -> list[dict[str, Any]]:
    """Returns one row for each size; the sizes alternate from round to round."""
    costs: dict[int, list[float]] = {size: [] for size in sizes or CURVES[name][1]}
    for _ in range(rounds):
        for size, measured in costs.items():
            measured.append(cost_ns(name, records_of(name, n, size), size))
    rows = []
    for size, measured in costs.items():
        least, greatest = round(min(measured)), round(max(measured))
        rows.append(
            {"curve": name, "size": size, "ns_per_record": least, "spread": [least, greatest]}
        )
    return rows


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=list(CURVES), choices=list(CURVES))
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in options.only:
        drawn = curve(
            name,
            options.records,
            options.rounds,
            [*CURVES[name][1], *(LARGE.get(name, []) if options.large else [])],
        )
        line = [(row["size"], max(1, row["ns_per_record"])) for row in drawn]
        (options.out / f"{name}.svg").write_text(
            plots.curve(f"CPU time a record: {name}", {name: line}, ACROSS.get(name, name), "ns")
        )
        rows += drawn
    report = {
        **environment(),
        "unit": "CPU ns a record; best of the rounds [least, greatest]",
        "records": options.records,
        "scaling": rows,
    }
    print_rows(rows, ["curve", "size", "ns_per_record", "spread"])
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
