"""The cost of merging slices of a window, and of sending its results to a window that searches for
the best of them.

    python benchmarks/bench_windows.py [--records 200000] [--rounds 5]

*merge*: the five slices of a sliding window, ns of CPU time a key of each but the first. *share*:
windows of several slices, each slice of 5,000 keys, merged by themselves and from runs of slices
that they share (`operators.window.slice_store`), ns a result. *exchange*: results are dealt out to
two subtasks, those of one of them are written and read, and all are folded by `max_by`, ns a
result: as they are, and folded before they are dealt out (`operators.aggregate.local`), by the end
of their window, of which a batch has one, and by their key, of which it has many. Ratios are of one
round each, and the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Generator
from statistics import median
from time import process_time_ns
from typing import Any

from aioflow.core.elements import RecordBatch
from aioflow.core.functions import WindowResult
from aioflow.core.wire.batch import decode_batch, encode_batch
from aioflow.core.wire.serializers import Codec
from aioflow.graph.stream_graph import Partitioning, ShipStrategy
from aioflow.operators.aggregate.functions import agg, count, max_by, mean, resolve_aggregate
from aioflow.operators.aggregate.local import local_aggregate
from aioflow.operators.window.assigners import SliceGrid
from aioflow.operators.window.slice_store import SliceRuns, merge_tables
from aioflow.task.partitioners import create_partitioner
from benchmarks.bench_throughput import environment, print_rows

BATCH = 1_000
WORDS = 10_000
SLICES = 5
SLIDE_MS = 2_000
SHARED = (3, 5, 7, 20)
"""Slices a window."""

BEST = resolve_aggregate(max_by(lambda row: row.value))
MERGED = {"count": (count(), 1), "count and mean": (agg(n=count(), mean=mean()), [1, [2, 1]])}
KEYS: dict[str, Callable[[Any], Any]] = {
    "few keys": lambda row: row.end,
    "many keys": lambda row: row.key,
}


def merge_ns(aggregate: Any, accumulator: Any, rng: random.Random) -> float:
    slices = [
        {f"word-{rng.randrange(WORDS)}": accumulator for _ in range(WORDS)} for _ in range(SLICES)
    ]
    begun = process_time_ns()
    for _ in merge_tables(resolve_aggregate(aggregate), False, list(slices)):
        pass
    return (process_time_ns() - begun) / len([key for held in slices[1:] for key in held])


def share_ns(slices: list[dict[Any, Any]], size: int, *, runs: bool) -> tuple[float, list[Any]]:
    """ns a result of the windows of `size` slices, and the results."""
    count_of = resolve_aggregate(count())
    shared = SliceRuns(count_of, False, slices.__getitem__, lambda first, stop: True)
    windows = []
    begun = process_time_ns()
    for first in range(len(slices) - size + 1):
        tables: list[Any] = (
            run(shared.cover(first, first + size)) if runs else list(slices[first : first + size])
        )
        windows.append(run(merge_tables(count_of, False, tables)) if len(tables) > 1 else tables[0])
    return (process_time_ns() - begun) / sum(map(len, windows)), windows


def run(work: Generator[None, None, Any]) -> Any:
    """Returns the result of `work`, without pause."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value


def results(records: int, rng: random.Random) -> list[RecordBatch]:
    """Batches as a sliding window gives them: each of one window."""
    made = []
    for number in range(records // BATCH):
        end = SLIDE_MS * (number // SLICES)
        rows = [
            WindowResult(
                f"word-{rng.randrange(WORDS)}", end - SLICES * SLIDE_MS, end, rng.randrange(300)
            )
            for _ in range(BATCH)
        ]
        made.append(RecordBatch(rows, [end - 1] * BATCH, None, [end - 2] * BATCH, end - 2))
    return made


def exchange(
    batches: list[RecordBatch], key: Callable[[Any], Any], *, fold: bool
) -> tuple[float, dict[Any, Any]]:
    """ns a result, and the best of each key."""
    local = local_aggregate(BEST, SliceGrid(SLIDE_MS, SLIDE_MS)) if fold else None
    partitioning = Partitioning(ShipStrategy.HASH, key, local=local)
    partitioner = create_partitioner(
        partitioning,
        2,
        max_parallelism=128,
        subtask_index=0,
        rng=random.Random(0),
        place="'window'",
    )
    codec, best = Codec(), dict[Any, Any]()
    begun = process_time_ns()
    for batch in batches:
        for subtask, dealt in partitioner.split(batch):
            part = (
                decode_batch(encode_batch(dealt, codec, "window"), codec, "window")
                if subtask
                else dealt
            )
            assert part.keys is not None, "it was dealt out by key"
            BEST.fold(best, part.keys, part.values)
    return (process_time_ns() - begun) / (len(batches) * BATCH), best


def merges(rounds: int, rng: random.Random) -> list[dict[str, Any]]:
    rows = []
    for name, (aggregate, accumulator) in MERGED.items():
        times = sorted(merge_ns(aggregate, accumulator, rng) for _ in range(rounds))
        rows.append(
            {"merge": name, "ns": round(times[0]), "spread": [round(times[0]), round(times[-1])]}
        )
    return rows


def shares(rounds: int, rng: random.Random) -> list[dict[str, Any]]:
    rows = []
    slices = [
        dict(Counter(f"word-{rng.randrange(WORDS // 2)}" for _ in range(WORDS))) for _ in range(40)
    ]
    for size in SHARED:
        alone, shared = [], []
        for _ in range(rounds):
            (one, expected), (other, windows) = (
                share_ns(slices, size, runs=False),
                share_ns(slices, size, runs=True),
            )
            if windows != expected:
                raise SystemExit(
                    f"windows of {size} slices: what is merged from runs is not the same"
                )
            alone.append(one)
            shared.append(other)
        rows.append(
            {
                "share": size,
                "ns": round(min(alone)),
                "shared_ns": round(min(shared)),
                **ratio(alone, shared),
            }
        )
    return rows


def exchanges(records: int, rounds: int, rng: random.Random) -> list[dict[str, Any]]:
    batches = results(records, rng)
    rows = []
    for name, key in KEYS.items():
        plain, folded = [], []
        for _ in range(rounds):
            (one, expected), (other, best) = (
                exchange(batches, key, fold=False),
                exchange(batches, key, fold=True),
            )
            if best != expected:
                raise SystemExit(f"exchange, {name}: what was folded before gives other results")
            plain.append(one)
            folded.append(other)
        rows.append(
            {
                "exchange": name,
                "ns": round(min(plain)),
                "folded_ns": round(min(folded)),
                **ratio(plain, folded),
            }
        )
    return rows


def ratio(before: list[float], after: list[float]) -> dict[str, Any]:
    """Returns the ratio of the two times of each round."""
    ratios = sorted(b / a for a, b in zip(before, after, strict=True))
    return {
        "ratio": round(median(ratios), 2),
        "spread": [round(ratios[0], 2), round(ratios[-1], 2)],
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Returns, and prints as JSON, what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    rng = random.Random(7)
    merged, shared = merges(options.rounds, rng), shares(options.rounds, rng)
    exchanged = exchanges(options.records, options.rounds, rng)
    print_rows(merged, ["merge", "ns", "spread"])
    print_rows(shared, ["share", "ns", "shared_ns", "ratio", "spread"])
    print_rows(exchanged, ["exchange", "ns", "folded_ns", "ratio", "spread"])
    unit = {
        "unit": "ns of CPU time a key (merge) or a result (share, exchange)",
        "batch_records": BATCH,
    }
    report = {
        "benchmark": "windows",
        **environment(),
        **unit,
        "merges": merged,
        "shares": shared,
        "exchanges": exchanged,
    }
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
